"""Decision sets Theta: closed convex sets with a Euclidean projection along the last axis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.errors import SpecError
from sottovoce.spec import BoxSpec, L2BallSpec


class DecisionSet(Protocol):
    """Where a parameter vector may lie."""

    def project(self, theta: FloatArray) -> FloatArray:
        """Nearest point of the set to each vector of `theta (..., dim)`; `theta` itself where it lies inside."""
        ...

    def minimise(self, direction: FloatArray) -> FloatArray:
        """The linear minimisation oracle: a point v of the set with the smallest `<direction, v>`.

        For each vector of `direction (..., dim)`; for a zero vector a fixed point of the set, the origin where it has one.
        """
        ...

    def radius(self, dim: int) -> float:
        """Largest l2 norm in the set."""
        ...

    def diameter(self, dim: int) -> float:
        """Largest l2 distance between two points."""
        ...


@dataclass(frozen=True, slots=True)
class L2Ball:
    """All theta with `||theta||_2 <= r`."""

    r: float

    def project(self, theta: FloatArray) -> FloatArray:
        square: FloatArray = np.vecdot(theta, theta)
        if (square <= self.r * self.r).all():
            return theta
        shrink: FloatArray = np.minimum(1.0, self.r / np.sqrt(np.maximum(square, np.finfo(float).tiny)))
        return theta * shrink[..., None]

    def minimise(self, direction: FloatArray) -> FloatArray:
        norms = np.sqrt(np.vecdot(direction, direction))[..., None]
        point: FloatArray = -self.r * direction / np.where(norms > 0, norms, 1.0)
        return point

    def radius(self, dim: int) -> float:
        return self.r

    def diameter(self, dim: int) -> float:
        return 2 * self.r


@dataclass(frozen=True, slots=True)
class Box:
    """All theta with `low <= theta_k <= high` for every coordinate k."""

    low: float
    high: float

    def project(self, theta: FloatArray) -> FloatArray:
        return np.clip(theta, self.low, self.high)

    def minimise(self, direction: FloatArray) -> FloatArray:
        origin = min(max(0.0, self.low), self.high)
        return np.where(direction > 0, self.low, np.where(direction < 0, self.high, origin))

    def radius(self, dim: int) -> float:
        return math.sqrt(dim) * max(abs(self.low), abs(self.high))

    def diameter(self, dim: int) -> float:
        return math.sqrt(dim) * (self.high - self.low)


def build_decision_set(spec: L2BallSpec | BoxSpec) -> DecisionSet:
    """The set that a spec names.

    Raises:
        SpecError: an empty box.
    """
    if isinstance(spec, L2BallSpec):
        return L2Ball(spec.radius)
    if not spec.low < spec.high:
        raise SpecError(f"decision_set: low must be below high, got low={spec.low}, high={spec.high}")
    return Box(spec.low, spec.high)
