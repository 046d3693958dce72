"""What a loss of one record is, and losses that depend on the parameters through the score of a record alone.

Every loss is a data part and an exact ridge: `l(theta; a, b) = phi(theta; a, b) + (r/2) ||theta||^2`. A record's gradient has
the same two parts; clipping bounds the data part.

Shapes. `theta` is `(dim,)` beside `features (records, m)`, or `(..., replicas, dim)` beside `(..., records, m)`, where the
leading axes broadcast: one set of parameters may meet the records of several learners, or one set of records those of all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.registry import NonNegative, Positive, Section

# ---- loss ------------------------------------------------------------------------------------------------------------


class Loss(Section, ABC):
    """The loss of one record, vectorised over records and leading axes.

    A loss of one's own says at least `gradient_sum`, `values`, `gradient_bound`, `predict` and `classify`.
    """

    kind: str
    ridge: NonNegative = 0.01
    """Coefficient r of the exact term r*theta in every gradient."""
    feature_bound: Positive = 1.0
    """Every row is scaled to at most this l2 norm, row by row, before use."""
    clip_norm: Positive | None = None
    """Clip every record's data gradient to this l2 norm (None: no clipping)."""

    is_convex: ClassVar[bool] = False
    """Is the data part convex in theta?"""
    has_binary_labels: ClassVar[bool] = True
    """Are labels two classes, 0 and 1, into which a source's labels may be folded?"""
    has_slow_gradient: ClassVar[bool] = False
    """May one gradient take so long that a service should not let its event loop wait for it?"""

    @property
    def clip_threshold(self) -> float:
        """G, the clipping threshold of a record's data gradient; infinite: none."""
        return math.inf if self.clip_norm is None else self.clip_norm

    @property
    def n_classes(self) -> int | None:
        """How many classes the labels 0, 1, … name; None: labels are numbers."""
        return 2

    @property
    def smoothness(self) -> float:
        """L, Lipschitz constant of a record's data gradient; infinite: not smooth, or not known."""
        return math.inf

    @property
    def is_convex_when_clipped(self) -> bool:
        """Are the data gradients, clipped, still those of a convex function? Only then does a step on them contract."""
        return False

    def dim(self, n_features: int) -> int:
        """Number of parameters for records of so many features.

        Raises:
            SpecError: the loss is made for another number.
        """
        return n_features

    def initial_parameters(self, dim: int) -> FloatArray:
        """Where learning starts, before any projection, `(dim,)`: public, independent of all records."""
        return np.zeros(dim)

    def enforce_bounds(self, features: FloatArray, labels: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Records made to obey the declared bounds, row by row: scaled down, never refused (an error would tell)."""
        return scale_rows(features, self.feature_bound), labels

    @abstractmethod
    def gradient_sum(self, theta: FloatArray, batch: Batch) -> FloatArray:
        """Sum over the records of their data gradients at theta, each clipped, without the ridge: `(..., dim)`.

        Args:
            theta: where.
            batch: records that obey the bounds (`enforce`).
        """

    @abstractmethod
    def values(self, theta: FloatArray, batch: Batch) -> FloatArray:
        """Data part of every record's loss at theta, unclipped: `(..., records)`; of padding, too."""

    @abstractmethod
    def gradient_bound(self, radius: float) -> float:
        """Largest l2 norm of a record's data gradient where `||theta|| <= radius`, clipping included."""

    def gradient_change(self, radius: float) -> float:
        """C, largest l2 distance between the gradients of two records at one theta with `||theta|| <= radius`."""
        return 2 * self.gradient_bound(radius)

    @abstractmethod
    def predict(self, theta: FloatArray, features: FloatArray) -> FloatArray:
        """Scores of records, rows scaled as for learning: `(..., records)`, or `(..., records, classes)`."""

    @abstractmethod
    def classify(self, scores: FloatArray) -> FloatArray:
        """Scores as labels of the loss's domain, `(..., records)`."""

    def probabilities(self, scores: FloatArray) -> FloatArray | None:
        """What scores say of each class's chance, `(..., records, classes)`; None: they say no such thing."""
        return None


def enforce_bounds(loss: Loss, batch: Batch) -> Batch:
    """The batch, made to obey the bounds that the loss declares (`Loss.enforce`)."""
    if batch.bounding_loss is loss:
        return batch
    if batch.bounded_batch is not None and batch.bounded_batch.bounding_loss is loss:
        return batch.bounded_batch
    return Batch.from_bounded_records(loss, *loss.enforce_bounds(batch.features, batch.labels), batch.mask)


def mean_gradient(loss: Loss, theta: FloatArray, batch: Batch) -> FloatArray:
    """Mean of the batch's clipped data gradients, without the ridge: `(..., dim)`; zero for a round without records."""
    if batch.size == 0:
        return np.zeros_like(theta)
    total = loss.gradient_sum(theta, batch)
    if batch.mask is not None:
        total /= np.maximum(add_replica_axis(batch.mask, theta).sum(axis=-1, keepdims=True), 1.0)
    elif batch.size > 1:
        total /= batch.size
    return total


def add_replica_axis(per_record: FloatArray, theta: FloatArray) -> FloatArray:
    """`(..., records)` as `(..., 1, records)` where theta has a replica axis; as it is beside `theta (dim,)`."""
    return per_record[..., None, :] if theta.ndim > 1 else per_record


def scale_rows(features: FloatArray, bound: float) -> FloatArray:
    """Rows of l2 norm above `bound` scaled down to it, each by its own norm alone."""
    if features.size == features.shape[-1]:  # a single row: the same in fewer calls
        norm = math.sqrt(np.vdot(features, features))
        return features * (bound / norm) if norm > bound else features
    norms = np.sqrt(np.vecdot(features, features))
    if not np.count_nonzero(norms > bound):
        return features
    factors: FloatArray = bound / np.maximum(norms, bound)
    return features * factors[..., None]


# ---- margin ----------------------------------------------------------------------------------------------------------


class MarginLoss(Loss):
    """A loss of the score `z = a.theta`, with `|phi'| <= slope_bound` and `phi'' <= curvature`. L = curvature R^2.

    If it is convex, its slope grows with z, and so does the slope clipped to `[-G/||a||, G/||a||]`: clipped gradients are
    those of another convex function. Two records' gradients differ by at most C = 2 min(slope_bound R, G).
    """

    is_convex: ClassVar[bool] = True

    @property
    def slope_bound(self) -> float:
        """Largest `|phi'|`; infinite: unbounded."""
        return 1.0

    @property
    def curvature(self) -> float:
        """Largest `phi''`; infinite: not twice differentiable."""
        return math.inf

    @abstractmethod
    def value(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """`phi(score, label)`."""

    @abstractmethod
    def slope(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """`phi'(score, label)`, unclipped."""

    def second_derivative(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """`phi''(score, label)`; 0 where there is none."""
        return np.zeros_like(scores)

    @property
    def smoothness(self) -> float:
        return self.curvature * self.feature_bound**2

    @property
    def is_convex_when_clipped(self) -> bool:
        return self.is_convex

    def gradient_sum(self, theta: FloatArray, batch: Batch) -> FloatArray:
        slopes = self.slope(compute_scores(theta, batch.features), add_replica_axis(batch.labels, theta))
        if self.clip_norm is not None:
            norms = add_replica_axis(np.sqrt(np.vecdot(batch.features, batch.features)), theta)
            slopes = slopes * (self.clip_norm / np.maximum(np.abs(slopes) * norms, self.clip_norm))
        if batch.mask is not None:
            slopes = slopes * add_replica_axis(batch.mask, theta)
        return _weighted_rows(slopes, batch.features)

    def values(self, theta: FloatArray, batch: Batch) -> FloatArray:
        return self.value(compute_scores(theta, batch.features), add_replica_axis(batch.labels, theta))

    def gradient_bound(self, radius: float) -> float:
        return min(self.slope_bound * self.feature_bound, self.clip_threshold)

    def predict(self, theta: FloatArray, features: FloatArray) -> FloatArray:
        return compute_scores(theta, scale_rows(features, self.feature_bound))

    def classify(self, scores: FloatArray) -> FloatArray:
        return (scores > 0).astype(np.float64)


def compute_scores(theta: FloatArray, features: FloatArray) -> FloatArray:
    """`a.theta` for every record: `(..., records)`."""
    scores: FloatArray = np.matmul(theta, features.swapaxes(-1, -2))
    return scores


def _weighted_rows(weights: FloatArray, rows: FloatArray) -> FloatArray:
    """`sum_k weights_k rows_k` over the records; of a single one without a matrix product, which takes longer."""
    if rows.shape[-2] == 1:
        return weights * (rows if weights.ndim == rows.ndim else rows[..., 0, :])
    total: FloatArray = np.matmul(weights, rows)
    return total


def sigmoid(scores: FloatArray) -> FloatArray:
    """`1 / (1 + exp(-z))`, without overflow."""
    chance = np.negative(scores, out=np.empty_like(scores))  # an array, even of no axes
    np.minimum(chance, 700.0, out=chance)  # exp of more overflows
    np.exp(chance, out=chance)
    chance += 1.0
    np.reciprocal(chance, out=chance)
    return chance
