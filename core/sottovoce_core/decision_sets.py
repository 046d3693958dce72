"""Decision sets Theta, chosen by their kind in the spec: closed convex sets with a Euclidean projection on the last axis.

To add a set: write its class, and a line in `DECISION_SETS`. A set of matrices flattens them row by row, as `losses.softmax`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, SerializeAsAny, model_validator

from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import SpecError
from sottovoce_core.registry import Count, Finite, Positive, Registry, Section


class DecisionSet(Section, ABC):
    """A closed convex set of parameter vectors."""

    kind: str

    @property
    def size(self) -> int | None:
        """Number of parameters that the set requires; None: any number."""
        return None

    @property
    def contains_origin(self) -> bool:
        """True if the zero vector is in the set."""
        return True

    @abstractmethod
    def project(self, theta: FloatArray) -> FloatArray:
        """Return the nearest point of the set to each vector of `theta (..., dim)`; `theta` itself where it lies inside."""

    @abstractmethod
    def minimise(self, direction: FloatArray) -> FloatArray:
        """Solve the linear minimisation problem: return a point v of the set with the smallest `<direction, v>`.

        One v for each vector of `direction (..., dim)`; for a zero vector a fixed point, the origin if the set contains it.
        """

    @abstractmethod
    def largest_norm(self, dim: int) -> float:
        """Return the largest l2 norm in the set, among vectors of `dim` parameters."""

    @abstractmethod
    def diameter(self, dim: int) -> float:
        """Return the largest l2 distance between two points of the set."""

    def require_dim(self, dim: int) -> None:
        """Require that the set accepts `dim` parameters.

        Raises:
            SpecError: the set is made for another number.
        """
        if self.size not in (None, dim):
            raise SpecError(
                f"decision_set: the set requires {self.size} parameters, and the loss has {dim} with these "
                "features (intercept included)"
            )


DECISION_SETS: Registry[DecisionSet] = Registry(
    DecisionSet,  # type: ignore[type-abstract]  # of its subclasses
    {
        "l2_ball": "L2Ball",
        "box": "Box",
        "l1_ball": "_L1Ball",
        "simplex": "_Simplex",
        "trace_norm": "_TraceNorm",
        "product": "_Product",
    },
    group="decision_sets",
)

AnyDecisionSet = Annotated[SerializeAsAny[DecisionSet], DECISION_SETS]
"""Field of a spec: the decision set of the named kind."""

_ROUNDING_MARGIN = 1e-6
"""Relative bound, with a margin, on the rounding error of a sum of billions of squares."""
_NON_PRODUCT_SETS = {kind: where for kind, where in DECISION_SETS.built_in_classes.items() if kind != "product"}
NonProductDecisionSet = Annotated[
    SerializeAsAny[DecisionSet], replace(DECISION_SETS, built_in_classes=_NON_PRODUCT_SETS)
]
"""The same bound for products, whose factors are products themselves."""


class _Ball(DecisionSet):
    """All theta with a certain norm of at most `radius`; the l2 norm never exceeds that norm."""

    radius: Positive
    """Bound on the norm."""

    def largest_norm(self, dim: int) -> float:
        return self.radius

    def diameter(self, dim: int) -> float:
        return 2 * self.radius


class L2Ball(_Ball):
    """All theta with l2 norm at most `radius`."""

    kind: Literal["l2_ball"] = "l2_ball"

    def project(self, theta: FloatArray) -> FloatArray:
        if np.vdot(theta, theta) <= (1.0 - _ROUNDING_MARGIN) * self.radius * self.radius:  # all vectors together
            return theta
        square: FloatArray = np.vecdot(theta, theta)
        if np.count_nonzero(square <= self.radius * self.radius) == square.size:
            return theta
        shrink: FloatArray = np.minimum(1.0, self.radius / np.sqrt(np.maximum(square, np.finfo(float).tiny)))
        return theta * shrink[..., None]

    def minimise(self, direction: FloatArray) -> FloatArray:
        scaled = direction / _nonzero(np.abs(direction).max(axis=-1, keepdims=True))  # so that squares stay in range
        point: FloatArray = -self.radius * scaled / _nonzero(np.sqrt(np.vecdot(scaled, scaled))[..., None])
        return point


class Box(DecisionSet):
    """All theta with every coordinate in [low, high]."""

    kind: Literal["box"] = "box"
    low: Finite
    """Lower bound of each coordinate."""
    high: Finite
    """Upper bound of each coordinate."""

    @model_validator(mode="after")
    def _require_not_empty(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"low must be below high, got low={self.low}, high={self.high}")
        return self

    @property
    def contains_origin(self) -> bool:
        return self.low <= 0.0 <= self.high

    def project(self, theta: FloatArray) -> FloatArray:
        return np.clip(theta, self.low, self.high)

    def minimise(self, direction: FloatArray) -> FloatArray:
        origin = min(max(0.0, self.low), self.high)
        return np.where(direction > 0, self.low, np.where(direction < 0, self.high, origin))

    def largest_norm(self, dim: int) -> float:
        return math.sqrt(dim) * max(abs(self.low), abs(self.high))

    def diameter(self, dim: int) -> float:
        return math.sqrt(dim) * (self.high - self.low)


class _Simplex(DecisionSet):
    """All theta without negative coordinates whose sum is `radius`; does not contain the origin."""

    kind: Literal["simplex"] = "simplex"
    radius: Positive = 1.0
    """Sum of the coordinates."""

    @property
    def contains_origin(self) -> bool:
        return False

    def project(self, theta: FloatArray) -> FloatArray:
        return _project_on_simplex(theta, self.radius)

    def minimise(self, direction: FloatArray) -> FloatArray:
        point = np.zeros_like(direction)
        np.put_along_axis(point, direction.argmin(axis=-1, keepdims=True), self.radius, axis=-1)
        return point

    def largest_norm(self, dim: int) -> float:
        return self.radius

    def diameter(self, dim: int) -> float:
        return math.sqrt(2) * self.radius if dim > 1 else 0.0


class _L1Ball(_Ball):
    """All theta with l1 norm at most `radius`."""

    kind: Literal["l1_ball"] = "l1_ball"

    def project(self, theta: FloatArray) -> FloatArray:
        lengths = np.abs(theta)
        inside = lengths.sum(axis=-1, keepdims=True) <= self.radius
        if inside.all():
            return theta
        return np.where(inside, theta, np.copysign(_project_on_simplex(lengths, self.radius), theta))

    def minimise(self, direction: FloatArray) -> FloatArray:
        steepest = np.abs(direction).argmax(axis=-1, keepdims=True)
        point = np.zeros_like(direction)
        np.put_along_axis(
            point, steepest, -self.radius * np.sign(np.take_along_axis(direction, steepest, axis=-1)), axis=-1
        )
        return point


class _TraceNorm(_Ball):
    """Matrices whose singular values sum to at most `radius`, flattened row by row (`softmax`: one row a class)."""

    kind: Literal["trace_norm"] = "trace_norm"
    rows: Count
    """Rows of the matrix; with `softmax`, the classes."""
    columns: Count
    """Columns of the matrix; with `softmax`, the features, intercept included."""

    @property
    def size(self) -> int:
        return self.rows * self.columns

    def project(self, theta: FloatArray) -> FloatArray:
        left, values, right = np.linalg.svd(self._matrices(theta), full_matrices=False)
        inside = values.sum(axis=-1, keepdims=True) <= self.radius
        if inside.all():
            return theta
        nearest = np.matmul(left * _project_on_simplex(values, self.radius)[..., None, :], right)
        return np.where(inside, theta, nearest.reshape(theta.shape))

    def minimise(self, direction: FloatArray) -> FloatArray:
        """Return `-r u v^T` with the first singular vectors, v from the smaller of `M^T M` and `M M^T`.

        Squaring the matrix costs small singular vectors their digits, but not the first, whose `||M v||` is exact to
        rounding. Any v of a repeated first singular value will do.
        """
        matrices = self._matrices(direction)
        tall = matrices if self.rows >= self.columns else matrices.swapaxes(-1, -2)
        tall = tall / _nonzero(np.abs(tall).max(axis=(-2, -1), keepdims=True))  # so that squares stay in range
        right = np.linalg.eigh(np.matmul(tall.swapaxes(-1, -2), tall))[1][..., :, -1:]
        left = np.matmul(tall, right)
        left = left / _nonzero(np.linalg.norm(left, axis=-2, keepdims=True))
        point: FloatArray = -self.radius * np.matmul(left, right.swapaxes(-1, -2))
        return (point if self.rows >= self.columns else point.swapaxes(-1, -2)).reshape(direction.shape)

    def _matrices(self, vectors: FloatArray) -> FloatArray:
        return vectors.reshape(*vectors.shape[:-1], self.rows, self.columns)


class _Block(Section):
    """A block of the next `size` parameters and its set."""

    size: Count
    """Number of parameters."""
    set: NonProductDecisionSet
    """Decision set of these parameters."""

    @model_validator(mode="after")
    def _require_fitting_size(self) -> Self:
        if self.set.size not in (None, self.size):
            raise ValueError(f"a block of {self.set.size} parameters must have that size, got {self.size}")
        return self


class _Product(DecisionSet):
    """Consecutive blocks of parameters, each with a set of its own."""

    kind: Literal["product"] = "product"
    blocks: Annotated[tuple[_Block, ...], Field(min_length=1)]
    """Blocks, in the order of the parameters; their sizes add up to the number of parameters."""

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    @property
    def contains_origin(self) -> bool:
        return all(block.set.contains_origin for block in self.blocks)

    def project(self, theta: FloatArray) -> FloatArray:
        return np.concatenate([each.project(part) for each, part in self._parts(theta)], axis=-1)

    def minimise(self, direction: FloatArray) -> FloatArray:
        return np.concatenate([each.minimise(part) for each, part in self._parts(direction)], axis=-1)

    def largest_norm(self, dim: int) -> float:
        return math.hypot(*(block.set.largest_norm(block.size) for block in self.blocks))

    def diameter(self, dim: int) -> float:
        return math.hypot(*(block.set.diameter(block.size) for block in self.blocks))

    def _parts(self, vectors: FloatArray) -> Iterator[tuple[DecisionSet, FloatArray]]:
        parts: list[FloatArray] = np.split(vectors, np.cumsum([block.size for block in self.blocks])[:-1], axis=-1)
        return zip([block.set for block in self.blocks], parts, strict=True)


def _project_on_simplex(theta: FloatArray, radius: float) -> FloatArray:
    """Project each vector of `theta (..., dim)` on the simplex of sum `radius`, by sorting.

    The projection is `max(theta - tau, 0)`. Among the k largest coordinates tau would be `(their sum - radius)/k`; the right one
    belongs to the last k whose smallest coordinate stays above it (Duchi et al. 2008, Figure 1).
    """
    theta = theta - theta.max(axis=-1, keepdims=True)  # which moves tau alike, and keeps digits: what stays is near 0
    falling = -np.sort(-theta, axis=-1)
    counts = np.arange(1, theta.shape[-1] + 1)
    thresholds = (falling.cumsum(axis=-1) - radius) / counts
    kept = (falling > thresholds).sum(axis=-1, keepdims=True)
    return np.maximum(theta - np.take_along_axis(thresholds, kept - 1, axis=-1), 0.0)


def _nonzero(divisors: FloatArray) -> FloatArray:
    return np.where(divisors > 0, divisors, 1.0)
