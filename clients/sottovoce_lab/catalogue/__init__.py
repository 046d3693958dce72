"""The catalogue of breaks: ten classes, each from the obvious to the just detectable.

To add one: a `Mutant` in the file of its class.
"""

from sottovoce_lab.catalogue.centre import CENTRE, DATA
from sottovoce_lab.catalogue.distribution import SCALE, SHAPE_MUTANTS, SUPPORT_MUTANTS
from sottovoce_lab.catalogue.lattice import LATTICE_MUTANTS
from sottovoce_lab.catalogue.reuse import LEARNERS, RUNS, IN_RUN_REUSE_MUTANTS
from sottovoce_lab.catalogue.wire import WIRE
from sottovoce_lab.mutants import Mutant

CATALOGUE: tuple[Mutant, ...] = (*SCALE, *SHAPE_MUTANTS, *SUPPORT_MUTANTS, *LATTICE_MUTANTS, *IN_RUN_REUSE_MUTANTS, *LEARNERS, *RUNS, *CENTRE, *DATA, *WIRE)
"""All of them."""

QUICK_MUTANTS = tuple(mutant for mutant in CATALOGUE if mutant.quick)
"""Those that every self-test tries."""
