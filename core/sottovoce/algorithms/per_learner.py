"""One number for all learners, or one for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sottovoce.errors import SpecError

if TYPE_CHECKING:
    pass


PerLearner = float | tuple[float, ...]
"""One number for all learners, or a list with one number each."""


def times(value: PerLearner, factors: tuple[float, ...]) -> PerLearner:
    """Every learner's number times its factor; one number where all are equal.

    Raises:
        SpecError: a list of another length than `factors`.
    """
    values = value if isinstance(value, tuple) else (value,) * len(factors)
    if len(values) != len(factors):
        raise SpecError(f"a list must have one number per learner ({len(factors)}), got {len(values)}")
    products = tuple(each * factor for each, factor in zip(values, factors, strict=True))
    return products[0] if len(set(products)) == 1 else products


def divided(value: PerLearner, factors: tuple[float, ...]) -> PerLearner:
    """As `times`, divided: for what a loss is, not a noise."""
    return times(value, tuple(1.0 / factor for factor in factors))


def spread(value: PerLearner, n_learners: int, field: str) -> tuple[float, ...]:
    """One number for all learners, or one each, as a tuple.

    Raises:
        SpecError: a list of another length than the number of learners.
    """
    values = value if isinstance(value, tuple) else (value,) * n_learners
    if len(values) != n_learners:
        raise SpecError(f"{field}: a list must have one number per learner ({n_learners}), got {len(values)}")
    return values
