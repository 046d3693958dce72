"""The catalogue of breaks: ten classes, each from the obvious to the just detectable.

To add one: a `Mutant` in the file of its class.
"""

from sottovoce_lab.catalogue.centre import CENTRE_MUTANTS, DATA_DEPENDENT_MUTANTS
from sottovoce_lab.catalogue.distribution import SCALE_MUTANTS, SHAPE_MUTANTS, SUPPORT_MUTANTS
from sottovoce_lab.catalogue.lattice import LATTICE_MUTANTS
from sottovoce_lab.catalogue.reuse import CROSS_LEARNER_MUTANTS, CROSS_RUN_MUTANTS, IN_RUN_REUSE_MUTANTS
from sottovoce_lab.catalogue.side_channels import SIDE_CHANNEL_MUTANTS
from sottovoce_lab.mutants import Mutant

CATALOGUE: tuple[Mutant, ...] = (
    *SCALE_MUTANTS,
    *SHAPE_MUTANTS,
    *SUPPORT_MUTANTS,
    *LATTICE_MUTANTS,
    *IN_RUN_REUSE_MUTANTS,
    *CROSS_LEARNER_MUTANTS,
    *CROSS_RUN_MUTANTS,
    *CENTRE_MUTANTS,
    *DATA_DEPENDENT_MUTANTS,
    *SIDE_CHANNEL_MUTANTS,
)
"""All of them."""

QUICK_MUTANTS = tuple(mutant for mutant in CATALOGUE if mutant.quick)
"""Those that every self-test tries."""
