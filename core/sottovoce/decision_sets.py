"""Decision sets Theta: closed convex sets with a Euclidean projection along the last axis.

A set of matrices takes them row by row in one vector, as `losses.Softmax` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.decision_sets_specs import (
    BoxSpec,
    DecisionSetSpec,
    L1BallSpec,
    L2BallSpec,
    ProductSpec,
    SimplexSpec,
    TraceNormSpec,
)
from sottovoce.errors import SpecError


class DecisionSet(Protocol):
    """Where a parameter vector may lie."""

    @property
    def size(self) -> int | None:
        """Number of parameters that the set is made for; None: any."""
        ...

    @property
    def contains_origin(self) -> bool:
        """Is the zero vector in the set?"""
        ...

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

    size: ClassVar[int | None] = None
    contains_origin: ClassVar[bool] = True

    def project(self, theta: FloatArray) -> FloatArray:
        square: FloatArray = np.vecdot(theta, theta)
        if np.count_nonzero(square <= self.r * self.r) == square.size:
            return theta
        shrink: FloatArray = np.minimum(1.0, self.r / np.sqrt(np.maximum(square, np.finfo(float).tiny)))
        return theta * shrink[..., None]

    def minimise(self, direction: FloatArray) -> FloatArray:
        scaled = direction / _nonzero(np.abs(direction).max(axis=-1, keepdims=True))  # so that squares stay in range
        point: FloatArray = -self.r * scaled / _nonzero(np.sqrt(np.vecdot(scaled, scaled))[..., None])
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

    size: ClassVar[int | None] = None

    @property
    def contains_origin(self) -> bool:
        return self.low <= 0.0 <= self.high

    def project(self, theta: FloatArray) -> FloatArray:
        return np.clip(theta, self.low, self.high)

    def minimise(self, direction: FloatArray) -> FloatArray:
        origin = min(max(0.0, self.low), self.high)
        return np.where(direction > 0, self.low, np.where(direction < 0, self.high, origin))

    def radius(self, dim: int) -> float:
        return math.sqrt(dim) * max(abs(self.low), abs(self.high))

    def diameter(self, dim: int) -> float:
        return math.sqrt(dim) * (self.high - self.low)


@dataclass(frozen=True, slots=True)
class Simplex:
    """All theta with `theta_k >= 0` and `sum theta_k = r`."""

    r: float

    size: ClassVar[int | None] = None
    contains_origin: ClassVar[bool] = False

    def project(self, theta: FloatArray) -> FloatArray:
        return project_on_simplex(theta, self.r)

    def minimise(self, direction: FloatArray) -> FloatArray:
        point = np.zeros_like(direction)
        np.put_along_axis(point, direction.argmin(axis=-1, keepdims=True), self.r, axis=-1)
        return point

    def radius(self, dim: int) -> float:
        return self.r

    def diameter(self, dim: int) -> float:
        return math.sqrt(2) * self.r if dim > 1 else 0.0


@dataclass(frozen=True, slots=True)
class L1Ball:
    """All theta with `||theta||_1 <= r`."""

    r: float

    size: ClassVar[int | None] = None
    contains_origin: ClassVar[bool] = True

    def project(self, theta: FloatArray) -> FloatArray:
        lengths = np.abs(theta)
        inside = lengths.sum(axis=-1, keepdims=True) <= self.r
        if inside.all():
            return theta
        return np.where(inside, theta, np.copysign(project_on_simplex(lengths, self.r), theta))

    def minimise(self, direction: FloatArray) -> FloatArray:
        steepest = np.abs(direction).argmax(axis=-1, keepdims=True)
        point = np.zeros_like(direction)
        np.put_along_axis(point, steepest, -self.r * np.sign(np.take_along_axis(direction, steepest, axis=-1)), axis=-1)
        return point

    def radius(self, dim: int) -> float:
        return self.r

    def diameter(self, dim: int) -> float:
        return 2 * self.r


@dataclass(frozen=True, slots=True)
class TraceNorm:
    """All matrices `(rows, columns)` whose singular values have a sum of at most r."""

    rows: int
    columns: int
    r: float

    contains_origin: ClassVar[bool] = True

    @property
    def size(self) -> int:
        return self.rows * self.columns

    def project(self, theta: FloatArray) -> FloatArray:
        left, values, right = np.linalg.svd(self._matrices(theta), full_matrices=False)
        inside = values.sum(axis=-1, keepdims=True) <= self.r
        if inside.all():
            return theta
        nearest = np.matmul(left * project_on_simplex(values, self.r)[..., None, :], right)
        return np.where(inside, theta, nearest.reshape(theta.shape))

    def minimise(self, direction: FloatArray) -> FloatArray:
        """`-r u v^T` with the first singular vectors, v from the smaller one of `M^T M` and `M M^T`.

        Squaring the matrix costs small singular vectors their digits, but not the first, whose `||M v||` is exact to
        rounding. Any v of a repeated first singular value will do.
        """
        matrices = self._matrices(direction)
        tall = matrices if self.rows >= self.columns else matrices.swapaxes(-1, -2)
        tall = tall / _nonzero(np.abs(tall).max(axis=(-2, -1), keepdims=True))  # so that squares stay in range
        right = np.linalg.eigh(np.matmul(tall.swapaxes(-1, -2), tall))[1][..., :, -1:]
        left = np.matmul(tall, right)
        left = left / _nonzero(np.linalg.norm(left, axis=-2, keepdims=True))
        point: FloatArray = -self.r * np.matmul(left, right.swapaxes(-1, -2))
        return (point if self.rows >= self.columns else point.swapaxes(-1, -2)).reshape(direction.shape)

    def radius(self, dim: int) -> float:
        return self.r

    def diameter(self, dim: int) -> float:
        return 2 * self.r

    def _matrices(self, vectors: FloatArray) -> FloatArray:
        return vectors.reshape(*vectors.shape[:-1], self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class Product:
    """Vectors of consecutive blocks: the next `sizes[k]` coordinates lie in `parts[k]`."""

    parts: tuple[DecisionSet, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def contains_origin(self) -> bool:
        return all(part.contains_origin for part in self.parts)

    def project(self, theta: FloatArray) -> FloatArray:
        return np.concatenate([part.project(block) for part, block in self._blocks(theta)], axis=-1)

    def minimise(self, direction: FloatArray) -> FloatArray:
        return np.concatenate([part.minimise(block) for part, block in self._blocks(direction)], axis=-1)

    def radius(self, dim: int) -> float:
        return math.hypot(*(part.radius(size) for part, size in zip(self.parts, self.sizes, strict=True)))

    def diameter(self, dim: int) -> float:
        return math.hypot(*(part.diameter(size) for part, size in zip(self.parts, self.sizes, strict=True)))

    def _blocks(self, vectors: FloatArray) -> Iterator[tuple[DecisionSet, FloatArray]]:
        blocks: list[FloatArray] = np.split(vectors, np.cumsum(self.sizes)[:-1], axis=-1)
        return zip(self.parts, blocks, strict=True)


def project_on_simplex(theta: FloatArray, radius: float) -> FloatArray:
    """Nearest point without negative coordinates whose sum is `radius`, by sorting; for each vector of `theta (..., dim)`.

    It is `max(theta - tau, 0)`. Among the k largest coordinates tau would be `(their sum - radius)/k`, and it is that of the
    last k whose smallest coordinate stays above it (Duchi et al. 2008, Figure 1).
    """
    theta = theta - theta.max(axis=-1, keepdims=True)  # which moves tau alike, and keeps digits: what stays is near 0
    falling = -np.sort(-theta, axis=-1)
    counts = np.arange(1, theta.shape[-1] + 1)
    thresholds = (falling.cumsum(axis=-1) - radius) / counts
    kept = (falling > thresholds).sum(axis=-1, keepdims=True)
    return np.maximum(theta - np.take_along_axis(thresholds, kept - 1, axis=-1), 0.0)


def _nonzero(divisors: FloatArray) -> FloatArray:
    return np.where(divisors > 0, divisors, 1.0)


def check_dim(decision_set: DecisionSet, dim: int) -> None:
    """The set is made for so many parameters.

    Raises:
        SpecError: it is made for another number.
    """
    if decision_set.size not in (None, dim):
        raise SpecError(
            f"decision_set: the set is made for {decision_set.size} parameters, and the loss has {dim} with these "
            "features (intercept included)"
        )


def build_decision_set(spec: DecisionSetSpec) -> DecisionSet:
    """The set that a spec names.

    Raises:
        SpecError: an empty box, or a block of another size than its matrices.
    """
    match spec:
        case L2BallSpec():
            return L2Ball(spec.radius)
        case BoxSpec():
            if not spec.low < spec.high:
                raise SpecError(f"decision_set: low must be below high, got low={spec.low}, high={spec.high}")
            return Box(spec.low, spec.high)
        case L1BallSpec():
            return L1Ball(spec.radius)
        case SimplexSpec():
            return Simplex(spec.radius)
        case TraceNormSpec():
            return TraceNorm(spec.rows, spec.columns, spec.radius)
        case ProductSpec():
            parts = tuple(build_decision_set(block.set) for block in spec.blocks)
            sizes = tuple(block.size for block in spec.blocks)
            for part, size in zip(parts, sizes, strict=True):
                if part.size not in (None, size):
                    raise SpecError(f"decision_set: a block of {part.size} parameters must have that size, got {size}")
            return Product(parts, sizes)
