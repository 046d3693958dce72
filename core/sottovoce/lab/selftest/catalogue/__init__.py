"""The catalogue of breaks: ten classes, each from the obvious to the just detectable.

To add one: a `Mutant` in the file of its class.
"""

from sottovoce.lab.selftest.catalogue.centre import CENTRE
from sottovoce.lab.selftest.catalogue.data import DATA
from sottovoce.lab.selftest.catalogue.lattice import LATTICE
from sottovoce.lab.selftest.catalogue.learners import LEARNERS
from sottovoce.lab.selftest.catalogue.runs import RUNS
from sottovoce.lab.selftest.catalogue.scale import SCALE
from sottovoce.lab.selftest.catalogue.shape import SHAPE
from sottovoce.lab.selftest.catalogue.support import SUPPORT
from sottovoce.lab.selftest.catalogue.wire import WIRE
from sottovoce.lab.selftest.catalogue.within import WITHIN
from sottovoce.lab.selftest.mutants import Mutant

CATALOGUE: tuple[Mutant, ...] = (
    *SCALE,
    *SHAPE,
    *SUPPORT,
    *LATTICE,
    *WITHIN,
    *LEARNERS,
    *RUNS,
    *CENTRE,
    *DATA,
    *WIRE,
)
"""All of them."""

MUTANTS = tuple(mutant for mutant in CATALOGUE if mutant.quick)
"""Those that every self-test tries."""
