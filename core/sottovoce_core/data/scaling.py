"""Scaling of features: by constants that the spec states, or that follow from the held-out records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, SerializeAsAny, model_validator

from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.registry import Finite, Positive, Registry, Section

ScaleConstants = tuple[FloatArray, FloatArray]
"""Offset to subtract, then divisor: `(features,)` each."""


class Scale(Section, ABC):
    """Rule that scales each feature by two constants: `(x - offset) / divisor`."""

    kind: str

    @property
    def is_stated(self) -> bool:
        """True if the spec states the constants, so that they depend on no record."""
        return True

    @property
    def clip_bound(self) -> float | None:
        """Bound to which scaled features are clipped; None: no clipping."""
        return None

    @abstractmethod
    def compute_constants(self, n_features: int, held_out: FloatArray | None = None) -> ScaleConstants | None:
        """Compute the constants; None: features stay unchanged.

        Args:
            n_features: number of features, without the intercept.
            held_out: `(records, features)`; not needed if `is_stated`.

        Raises:
            SpecError: the spec states another number of constants, or there is no held-out record to compute them from.
            DataError: float64 cannot represent the range of the held-out records.
        """


SCALES: Registry[Scale] = Registry(
    Scale,  # type: ignore[type-abstract]  # of its subclasses
    {"none": "NoScale", "standard": "StandardScale", "range": "RangeScale"},
    group=None,
)

AnyScale = Annotated[SerializeAsAny[Scale], SCALES]
"""Field of a spec: the scale of the named kind."""


class NoScale(Scale):
    """Features as they are."""

    kind: Literal["none"] = "none"

    def compute_constants(self, n_features: int, held_out: FloatArray | None = None) -> ScaleConstants | None:
        return None


class StandardScale(Scale):
    """Mean 0 and standard deviation 1: those of the held-out records, unless the spec states them."""

    kind: Literal["standard"] = "standard"
    mean: Finite | tuple[Finite, ...] | None = None
    """Stated mean: one number, or one per feature; None: that of the held-out records."""
    deviation: Positive | tuple[Positive, ...] | None = None
    """Stated standard deviation: one number, or one per feature; None: that of the held-out records."""
    clip: Positive | None = None
    """Bound on the size of a scaled feature: features that hardly vary do not outweigh all others. None: no clipping."""

    @property
    def is_stated(self) -> bool:
        return self.mean is not None and self.deviation is not None

    @property
    def clip_bound(self) -> float | None:
        return self.clip

    def compute_constants(self, n_features: int, held_out: FloatArray | None = None) -> ScaleConstants | None:
        known = np.zeros((1, n_features)) if self.is_stated else _require_held_out(self, held_out)
        with np.errstate(over="ignore", invalid="ignore"):  # refused below
            mean = known.mean(axis=0) if self.mean is None else _spread("mean", self.mean, n_features)
            if self.deviation is not None:
                return _require_usable(self, mean, _spread("deviation", self.deviation, n_features))
            # By extremes: the standard deviation of a constant column is rounding noise, not zero.
            is_constant = known.min(axis=0) == known.max(axis=0)
            return _require_usable(self, mean, np.where(is_constant, 1.0, known.std(axis=0)))


class RangeScale(Scale):
    """Smallest and largest value onto two given numbers: those of the held-out records, unless the spec states them."""

    kind: Literal["range"] = "range"
    low: Finite | tuple[Finite, ...] | None = None
    """Stated smallest value: one number, or one per feature; None: that of the held-out records."""
    high: Finite | tuple[Finite, ...] | None = None
    """Stated largest value: one number, or one per feature; None: that of the held-out records."""
    onto: Annotated[tuple[Finite, ...], Field(min_length=2, max_length=2, examples=[[-1, 1]])] = (0.0, 1.0)
    """Numbers that the smallest and the largest value become. Values beyond them stay beyond."""

    @model_validator(mode="after")
    def _require_order(self) -> RangeScale:
        if not self.onto[0] < self.onto[1]:
            raise ValueError(f"onto must be two ascending numbers, such as [-1, 1], got {list(self.onto)}")
        return self

    @property
    def is_stated(self) -> bool:
        return self.low is not None and self.high is not None

    def compute_constants(self, n_features: int, held_out: FloatArray | None = None) -> ScaleConstants | None:
        known = np.zeros((1, n_features)) if self.is_stated else _require_held_out(self, held_out)
        low = known.min(axis=0) if self.low is None else _spread("low", self.low, n_features)
        high = known.max(axis=0) if self.high is None else _spread("high", self.high, n_features)
        is_empty = low >= high if self.is_stated else low > high
        if is_empty.any():
            column = int(np.flatnonzero(is_empty)[0])
            came = f"{low[column]:g} and {high[column]:g}" if self.is_stated else "a held-out record beyond it"
            raise SpecError(f"data.scale.low must be below high in column {column} (counted from 0), got {came}")
        first, last = self.onto
        with np.errstate(over="ignore", invalid="ignore"):  # refused below
            divisor = np.where(low == high, 1.0, (high - low) / (last - first))
            return _require_usable(self, low - first * divisor, divisor)


def _spread(name: str, stated: float | tuple[float, ...], n_features: int) -> FloatArray:
    """Return one stated constant for each feature."""
    if isinstance(stated, tuple) and len(stated) != n_features:
        raise SpecError(
            f"data.scale.{name} must be one number, or one for each of the {n_features} features, got {len(stated)}"
        )
    return np.broadcast_to(np.asarray(stated, dtype=np.float64), n_features)


def _require_held_out(scale: Scale, held_out: FloatArray | None) -> FloatArray:
    if held_out is None or not len(held_out):
        raise SpecError(
            f"data.scale {scale.kind} takes its constants from held-out records, and this source has none: give the "
            "file X_test and y_test, state the constants in data.scale, or scale the features beforehand and set data.scale to "
            "none"
        )
    return held_out


def _require_usable(scale: Scale, offset: FloatArray, divisor: FloatArray) -> ScaleConstants:
    """Return the constants, if they are finite and the divisor is positive."""
    usable = np.isfinite(offset) & np.isfinite(divisor) & (divisor > 0)
    if not usable.all():
        column = int(np.flatnonzero(~usable)[0])
        raise DataError(
            f"data.scale {scale.kind} must represent the range of column {column} (counted from 0), got one that is too wide or "
            "too narrow for float64; rescale it first"
        )
    return offset, divisor
