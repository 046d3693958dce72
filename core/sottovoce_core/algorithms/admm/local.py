"""The problem that a node of ADMM solves in every iteration, and a solver that always gets there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sottovoce_core.arrays import Batch, FloatArray, Scalars, as_floats
from sottovoce_core.losses import MarginLoss, beside
from sottovoce_core.losses.loss import scores_of

_TRIALS = 60
"""Lengths tried for a Newton step before a gradient step is taken instead."""

MOST_STEPS = 10_000
"""A bound on the time of a round, hundreds of times what the worst conditioned problems of the tests take."""

ROUNDING = 2.0**-48
"""Relative error of a gradient in float64, with room to spare."""


@dataclass(frozen=True, slots=True)
class LocalProblem:
    """`minimise  weight sum_i phi(a_i.f, b_i) + stiffness/2 ||f||^2 + linear.f`, over all of space.

    Attributes:
        loss: phi.
        records: `a_i, b_i`.
        weight: of a record's loss.
        smoothness: bound on the norm of the _Hessian.
        stiffness: positive.
        linear: `(..., dim)`.
        tolerance: norm of the gradient at which a point counts as the minimiser.
    """

    loss: MarginLoss
    records: Batch
    weight: Scalars
    smoothness: Scalars
    stiffness: Scalars
    linear: FloatArray
    tolerance: float

    def tilted(self, by: FloatArray) -> LocalProblem:
        """The same with `by.f` added."""
        return replace(self, linear=self.linear + by)

    def gradient(self, point: FloatArray) -> tuple[FloatArray, FloatArray]:
        """`(..., dim)`, and the norm `(..., 1)` at which it counts as zero: the tolerance, or what float64 resolves."""
        features, labels = self.records.features, beside(self.records.labels, point)
        scores, bound = scores_of(point, features), self.loss.feature_bound
        slopes = self._real(self.loss.slope(scores, labels), point)
        gradient = self.weight * np.matmul(slopes, features) + self.stiffness * point + self.linear
        # What rounding errors are relative to: the terms of the sum, and what an error of a score does to them.
        moved = bound * norm(point) * self._real(self.loss.bend(scores, labels), point)
        terms = bound * self.weight * (np.abs(slopes) + moved).sum(axis=-1, keepdims=True)
        terms = terms + self.stiffness * norm(point) + norm(self.linear)
        return gradient, np.maximum(self.tolerance, ROUNDING * terms)

    def hessian(self, point: FloatArray) -> _Hessian:
        """Of the objective at points `(..., dim)`."""
        features, labels = self.records.features, self.records.labels
        bends = self._real(self.loss.bend(scores_of(point, features), beside(labels, point)), point)
        rows = features[..., None, :, :] if point.ndim > labels.ndim else features
        return _Hessian(np.sqrt(self.weight * bends)[..., None] * rows, np.atleast_1d(self.stiffness))

    def minimise(self, start: FloatArray) -> FloatArray:
        """Where the gradient's norm is at most the tolerance: Newton steps from `start`, each row by itself.

        A step is accepted if it halves the shortest gradient so far, as all do when the end is near, or if it ends where the
        objective still falls _along it, but at most half as steeply as at its beginning: that brings the objective nearer to
        its minimum by a constant factor. So the end is reached whatever the records are.
        """
        point, (gradient, enough) = start, self.gradient(start)
        shortest = norm(gradient)
        for _ in range(MOST_STEPS):
            unfinished = norm(gradient) > enough
            if not unfinished.any():
                break
            newton = self.hessian(point).solve(gradient)
            point, gradient, enough = self._search(point, gradient, newton, unfinished, shortest)
            shortest = np.minimum(shortest, norm(gradient))
        return point

    def _search(
        self,
        point: FloatArray,
        gradient: FloatArray,
        newton: FloatArray,
        unfinished: npt.NDArray[np.bool_],
        shortest: FloatArray,
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """The next point, with its gradient and tolerance: a length by bisection, or a gradient step if there is none."""
        steepness, length = _along(gradient, newton), unfinished.astype(np.float64)
        low, high = np.zeros_like(length), np.full_like(length, np.inf)
        wrong = unfinished
        for _ in range(_TRIALS):
            trial = point - length * newton
            after, enough = self.gradient(trial)
            left = _along(after, newton)
            wrong = unfinished & (norm(after) > shortest / 2.0) & ((left < 0.0) | (left > steepness / 2.0))
            if not wrong.any():
                return trial, after, enough
            low, high = np.where(wrong & (left > 0.0), length, low), np.where(wrong & (left < 0.0), length, high)
            between = np.where(np.isinf(high), 2.0 * length, (low + high) / 2.0)
            length = np.where(wrong, between, length)
        trial = np.where(wrong, point - gradient / self.smoothness, trial)
        return trial, *self.gradient(trial)

    def _real(self, per_record: FloatArray, point: FloatArray) -> FloatArray:
        """Zero for padding."""
        present = self.records.present
        return per_record if present is None else per_record * beside(present, point)


@dataclass(frozen=True, slots=True)
class _Hessian:
    """`R^T R + s I`, where R has a row for every record: by `R R^T + s I` where records are fewer than dimensions.

    Attributes:
        rows: `(..., records, dim)`: R.
        stiffness: `(..., 1)`: s, positive.
    """

    rows: FloatArray
    stiffness: FloatArray

    def solve(self, vectors: FloatArray) -> FloatArray:
        """The product of the inverse with vectors `(..., dim)`."""
        if not self._few:
            return as_floats(np.linalg.solve(self._smaller, vectors[..., None])[..., 0])
        along = np.linalg.solve(self._smaller, np.matmul(self.rows, vectors[..., None]))
        across = np.matmul(self.rows.swapaxes(-1, -2), along)[..., 0]
        return as_floats((vectors - across) / self.stiffness)

    def log_determinant(self) -> FloatArray:
        """`(...)`."""
        records, dim = self.rows.shape[-2:]
        rest = (dim - records) * np.log(self.stiffness[..., 0]) if self._few else 0.0
        return as_floats(np.linalg.slogdet(self._smaller)[1] + rest)

    @property
    def _few(self) -> bool:
        few: bool = self.rows.shape[-2] < self.rows.shape[-1]
        return few

    @property
    def _smaller(self) -> FloatArray:
        flipped = self.rows.swapaxes(-1, -2)
        product = np.matmul(self.rows, flipped) if self._few else np.matmul(flipped, self.rows)
        return as_floats(product + self.stiffness[..., None] * np.eye(product.shape[-1]))


def norm(vectors: FloatArray) -> FloatArray:
    """l2 norms `(..., 1)` _along the last axis."""
    norms: FloatArray = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return norms


def cut(vectors: FloatArray, longest: Scalars) -> FloatArray:
    """Vectors `(..., dim)` shortened to a norm of at most `longest`: the nearest such, so no two get farther apart."""
    return vectors * (longest / np.maximum(norm(vectors), np.maximum(longest, np.finfo(float).tiny)))


def _along(vectors: FloatArray, others: FloatArray) -> FloatArray:
    """Inner products `(..., 1)` _along the last axis."""
    products: FloatArray = np.vecdot(vectors, others)[..., None]
    return products
