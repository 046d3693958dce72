"""Catalogue of mutants: ten classes, each from obvious to barely detectable faults.

To add one, define a `Mutant` in the module of its class.
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
"""All mutants."""

QUICK_MUTANTS = tuple(mutant for mutant in CATALOGUE if mutant.quick)
"""Mutants that every self-test tries."""
