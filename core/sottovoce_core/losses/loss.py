"""Interface of a loss of one record, and margin losses, which depend on the parameters only through the record's score.

Every loss is a data part and an exact ridge: `l(theta; a, b) = phi(theta; a, b) + (r/2) ||theta||^2`. A record's gradient has
the same two parts; clipping bounds the data part.

Shapes. `theta` is `(dim,)` with `features (records, m)`, or `(..., replicas, dim)` with `(..., records, m)`. The leading
axes broadcast: one set of parameters with the records of several learners, or one set of records with all parameters.
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

    Your own loss defines at least `gradient_sum`, `values`, `gradient_bound`, `predict` and `classify`.
    """

    kind: str
    ridge: NonNegative = 0.01
    """Coefficient r of the exact term `r theta` in every gradient."""
    feature_bound: Positive = 1.0
    """Maximum l2 norm of a feature row: each row is scaled down to it before use."""
    clip_norm: Positive | None = None
    """Maximum l2 norm of a record's data gradient, by clipping (None: no clipping)."""

    is_convex: ClassVar[bool] = False
    """True if the data part is convex in theta."""
    has_binary_labels: ClassVar[bool] = True
    """True if labels are two classes, 0 and 1, to which a source's labels may be reduced."""
    has_slow_gradient: ClassVar[bool] = False
    """True if one gradient may take so long that a service should not compute it in its event loop."""

    @property
    def clip_threshold(self) -> float:
        """Clipping threshold G of a record's data gradient; infinite: none."""
        return math.inf if self.clip_norm is None else self.clip_norm

    @property
    def n_classes(self) -> int | None:
        """Number of classes, labelled 0, 1, …; None: labels are numbers."""
        return 2

    @property
    def smoothness(self) -> float:
        """Lipschitz constant L of a record's data gradient; infinite: not smooth, or unknown."""
        return math.inf

    @property
    def is_convex_when_clipped(self) -> bool:
        """Return whether clipped data gradients are those of a convex function. Only then does a gradient step contract."""
        return False

    def dim(self, n_features: int) -> int:
        """Return the number of parameters for records of `n_features` features.

        Raises:
            SpecError: the loss needs another number of features.
        """
        return n_features

    def initial_parameters(self, dim: int) -> FloatArray:
        """Return the start parameters `(dim,)` before any projection: public, independent of all records."""
        return np.zeros(dim)

    def enforce_bounds(self, features: FloatArray, labels: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Scale records down to the declared bounds, row by row. It never rejects one: an error would leak information."""
        return scale_rows(features, self.feature_bound), labels

    @abstractmethod
    def gradient_sum(self, theta: FloatArray, batch: Batch) -> FloatArray:
        """Return the sum over the records of their data gradients at theta, each clipped, without the ridge: `(..., dim)`.

        Args:
            theta: parameters.
            batch: records that satisfy the bounds (`enforce_bounds`).
        """

    @abstractmethod
    def values(self, theta: FloatArray, batch: Batch) -> FloatArray:
        """Return the data part of every record's loss at theta, unclipped: `(..., records)`, padding included."""

    @abstractmethod
    def gradient_bound(self, radius: float) -> float:
        """Return the largest l2 norm of a record's data gradient for `||theta|| <= radius`, clipping included."""

    def gradient_change(self, radius: float) -> float:
        """Return C, the largest l2 distance between the gradients of two records at one theta with `||theta|| <= radius`."""
        return 2 * self.gradient_bound(radius)

    @abstractmethod
    def predict(self, theta: FloatArray, features: FloatArray) -> FloatArray:
        """Return scores of records, with rows scaled as in learning: `(..., records)`, or `(..., records, classes)`."""

    @abstractmethod
    def classify(self, scores: FloatArray) -> FloatArray:
        """Convert scores to labels of the loss's domain, `(..., records)`."""

    def probabilities(self, scores: FloatArray) -> FloatArray | None:
        """Return class probabilities `(..., records, classes)`; None: the loss has no probabilities."""
        return None


def enforce_bounds(loss: Loss, batch: Batch) -> Batch:
    """Return the batch with the bounds of the loss enforced (`Loss.enforce_bounds`)."""
    if batch.bounding_loss is loss:
        return batch
    if batch.bounded_batch is not None and batch.bounded_batch.bounding_loss is loss:
        return batch.bounded_batch
    return Batch.from_bounded_records(loss, *loss.enforce_bounds(batch.features, batch.labels), batch.mask)


def mean_gradient(loss: Loss, theta: FloatArray, batch: Batch) -> FloatArray:
    """Return the mean of the batch's clipped data gradients, without the ridge: `(..., dim)`; 0 for a round without records."""
    if batch.size == 0:
        return np.zeros_like(theta)
    total = loss.gradient_sum(theta, batch)
    if batch.mask is not None:
        total /= np.maximum(add_replica_axis(batch.mask, theta).sum(axis=-1, keepdims=True), 1.0)
    elif batch.size > 1:
        total /= batch.size
    return total


def add_replica_axis(per_record: FloatArray, theta: FloatArray) -> FloatArray:
    """Reshape `(..., records)` to `(..., 1, records)` if theta has a replica axis; leave it unchanged for `theta (dim,)`."""
    return per_record[..., None, :] if theta.ndim > 1 else per_record


def scale_rows(features: FloatArray, bound: float) -> FloatArray:
    """Scale rows of l2 norm above `bound` down to it, each by its own norm only."""
    if features.size == features.shape[-1]:  # a single row: same result, fewer calls
        norm = math.sqrt(np.vdot(features, features))
        return features * (bound / norm) if norm > bound else features
    norms = np.sqrt(np.vecdot(features, features))
    if not np.count_nonzero(norms > bound):
        return features
    factors: FloatArray = bound / np.maximum(norms, bound)
    return features * factors[..., None]


# ---- margin ----------------------------------------------------------------------------------------------------------


class MarginLoss(Loss):
    """Loss of the score `z = a.theta`, with `|phi'| <= slope_bound` and `phi'' <= curvature`. L = curvature R^2.

    If it is convex, its slope grows with z, and so does the slope clipped to `[-G/||a||, G/||a||]`: clipped gradients are
    those of another convex function. Two records' gradients differ by at most C = 2 min(slope_bound R, G).
    """

    is_convex: ClassVar[bool] = True
    has_logistic_curvature: ClassVar[bool] = False
    """True if `phi'' <= 4 curvature s (1 - s)` with `s = |phi'| / slope_bound`: nothing is curved where it is steepest."""

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
        """Return `phi(score, label)`."""

    @abstractmethod
    def slope(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """Return `phi'(score, label)`, unclipped."""

    def second_derivative(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """Return `phi''(score, label)`; 0 where it does not exist."""
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
    """Compute `a.theta` for every record: `(..., records)`."""
    scores: FloatArray = np.matmul(theta, features.swapaxes(-1, -2))
    return scores


def _weighted_rows(weights: FloatArray, rows: FloatArray) -> FloatArray:
    """Compute `sum_k weights_k rows_k` over the records; for one record without a matrix product, which is slower."""
    if rows.shape[-2] == 1:
        return weights * (rows if weights.ndim == rows.ndim else rows[..., 0, :])
    total: FloatArray = np.matmul(weights, rows)
    return total


def sigmoid(scores: FloatArray) -> FloatArray:
    """Compute `1 / (1 + exp(-z))` without overflow."""
    chance = np.negative(scores, out=np.empty_like(scores))  # an array, even without axes
    np.minimum(chance, 700.0, out=chance)  # exp of more overflows
    np.exp(chance, out=chance)
    chance += 1.0
    np.reciprocal(chance, out=chance)
    return chance
