"""One number for all learners, or one for each."""

from __future__ import annotations

from sottovoce.errors import SpecError

PerLearner = float | tuple[float, ...]
"""One number for all learners, or a list with one number each."""


def times(value: PerLearner, factors: tuple[float, ...]) -> PerLearner:
    """Every learner's number times its factor; one number where all are equal.

    Raises:
        SpecError: a list of another length than `factors`.
    """
    products = tuple(each * factor for each, factor in zip(spread(value, len(factors)), factors, strict=True))
    return products[0] if len(set(products)) == 1 else products


def divided(value: PerLearner, factors: tuple[float, ...]) -> PerLearner:
    """As `times`, divided: for what a loss is, not a noise."""
    return times(value, tuple(1.0 / factor for factor in factors))


def spread(value: PerLearner, n_learners: int, field: str = "") -> tuple[float, ...]:
    """One number for all learners, or one each, as a tuple.

    Raises:
        SpecError: a list of another length than the number of learners; it names the field.
    """
    values = value if isinstance(value, tuple) else (value,) * n_learners
    if len(values) != n_learners:
        place = f"{field}: " if field else ""
        raise SpecError(f"{place}a list must have one number per learner ({n_learners}), got {len(values)}")
    return values
