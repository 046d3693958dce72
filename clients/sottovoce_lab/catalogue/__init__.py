"""The catalogue of breaks: ten classes, each from the obvious to the just detectable.

To add one: a `Mutant` in the file of its class.
"""

from sottovoce_lab.catalogue.centre import CENTRE, DATA
from sottovoce_lab.catalogue.distribution import SCALE, SHAPE, SUPPORT
from sottovoce_lab.catalogue.lattice import LATTICE
from sottovoce_lab.catalogue.reuse import LEARNERS, RUNS, WITHIN
from sottovoce_lab.catalogue.wire import WIRE
from sottovoce_lab.mutants import Mutant

CATALOGUE: tuple[Mutant, ...] = (*SCALE, *SHAPE, *SUPPORT, *LATTICE, *WITHIN, *LEARNERS, *RUNS, *CENTRE, *DATA, *WIRE)
"""All of them."""

MUTANTS = tuple(mutant for mutant in CATALOGUE if mutant.quick)
"""Those that every self-test tries."""
