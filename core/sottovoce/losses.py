"""Losses of one record, the constants that guarantees rest on, and what makes the constants true.

Every loss is a data part and an exact ridge: `l(theta; a, b) = phi(theta; a, b) + (r/2) ||theta||^2`. A record's gradient has
the same two parts; clipping bounds the data part. Most losses are margin losses, `phi(a.theta, b)`.

Shapes. `theta` is `(dim,)` beside `features (records, m)`, or `(learners, replicas, dim)` beside `(learners, records, m)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.machine import Batch
from sottovoce.spec import LossSpec


class Loss(Protocol):
    """The loss of one record, vectorised over records and leading axes."""

    @property
    def ridge(self) -> float:
        """r, coefficient of the exact term `r*theta` in every gradient."""
        ...

    @property
    def feature_bound(self) -> float:
        """R, the l2 norm that rows are scaled down to."""
        ...

    @property
    def clip_norm(self) -> float:
        """G, the clipping threshold of a record's data gradient; infinite: none."""
        ...

    @property
    def smoothness(self) -> float:
        """L, Lipschitz constant of a record's data gradient; infinite: not smooth."""
        ...

    @property
    def convex(self) -> bool:
        """Is the data part convex in theta?"""
        ...

    def dim(self, n_features: int) -> int:
        """Number of parameters for records of so many features."""
        ...

    def enforce(self, features: FloatArray, labels: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Records made to obey the declared bounds, row by row: scaled down, never refused (an error would tell)."""
        ...

    def gradient_sum(self, theta: FloatArray, batch: Batch) -> FloatArray:
        """Sum over the records of their data gradients at theta, each clipped, without the ridge: `(..., dim)`.

        Args:
            theta: where.
            batch: records that obey the bounds (`enforce`).
        """
        ...

    def values(self, theta: FloatArray, batch: Batch) -> FloatArray:
        """Data part of every record's loss at theta, unclipped: `(..., records)`; of padding, too."""
        ...

    def gradient_bound(self, radius: float) -> float:
        """Largest l2 norm of a record's data gradient where `||theta|| <= radius`, clipping included."""
        ...

    def gradient_change(self, radius: float) -> float:
        """C, largest l2 distance between the gradients of two records at one theta with `||theta|| <= radius`."""
        ...

    def predict(self, theta: FloatArray, features: FloatArray) -> FloatArray:
        """Scores of records, rows scaled as for learning: `(..., records)`, or `(..., records, classes)`."""
        ...

    def classify(self, scores: FloatArray) -> FloatArray:
        """Scores as labels of the loss's domain, `(..., records)`."""
        ...


class MarginLoss(Loss, Protocol):
    """A loss that depends on theta through the score `z = a.theta` alone."""

    @property
    def slope_bound(self) -> float:
        """Largest `|phi'|`; infinite: unbounded."""
        ...

    @property
    def curvature(self) -> float:
        """Largest `phi''`; infinite: not twice differentiable."""
        ...

    def value(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """`phi(score, label)`."""
        ...

    def slope(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """`phi'(score, label)`, unclipped."""
        ...

    def bend(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """`phi''(score, label)`."""
        ...


def mean_gradient(loss: Loss, theta: FloatArray, batch: Batch) -> FloatArray:
    """Mean of the batch's clipped data gradients, without the ridge: `(..., dim)`; zero for a round without records."""
    if batch.size == 0:
        return np.zeros_like(theta)
    total = loss.gradient_sum(theta, batch)
    if batch.present is None:
        total /= batch.size
    else:
        total /= np.maximum(beside(batch.present, theta).sum(axis=-1, keepdims=True), 1.0)
    return total


def beside(per_record: FloatArray, theta: FloatArray) -> FloatArray:
    """`(learners, records)` as `(learners, 1, records)` where theta has a replica axis; `(records,)` as it is."""
    return per_record[..., None, :] if theta.ndim > per_record.ndim else per_record


@dataclass(frozen=True, slots=True)
class _Margin:
    """What all margin losses share."""

    feature_bound: float
    ridge: float
    clip_norm: float = math.inf

    def dim(self, n_features: int) -> int:
        return n_features

    def enforce(self, features: FloatArray, labels: FloatArray) -> tuple[FloatArray, FloatArray]:
        return scale_rows(features, self.feature_bound), labels

    def slope(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        raise NotImplementedError

    def value(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        raise NotImplementedError

    def gradient_sum(self, theta: FloatArray, batch: Batch) -> FloatArray:
        slopes = self.slope(scores_of(theta, batch.features), beside(batch.labels, theta))
        if np.isfinite(self.clip_norm):
            norms = beside(np.sqrt(np.vecdot(batch.features, batch.features)), theta)
            slopes = slopes * (self.clip_norm / np.maximum(np.abs(slopes) * norms, self.clip_norm))
        if batch.present is not None:
            slopes = slopes * beside(batch.present, theta)
        total: FloatArray = np.matmul(slopes, batch.features)
        return total

    def values(self, theta: FloatArray, batch: Batch) -> FloatArray:
        return self.value(scores_of(theta, batch.features), beside(batch.labels, theta))

    def predict(self, theta: FloatArray, features: FloatArray) -> FloatArray:
        return scores_of(theta, scale_rows(features, self.feature_bound))


def scores_of(theta: FloatArray, features: FloatArray) -> FloatArray:
    """`a.theta` for every record: `(..., records)`."""
    scores: FloatArray = np.matmul(theta, features.swapaxes(-1, -2))
    return scores


def scale_rows(features: FloatArray, bound: float) -> FloatArray:
    """Rows of l2 norm above `bound` scaled down to it, each by its own norm alone."""
    norms = np.sqrt(np.vecdot(features, features))
    factors: FloatArray = bound / np.maximum(norms, bound)
    return features * factors[..., None]


def sigmoid(scores: FloatArray) -> FloatArray:
    """`1 / (1 + exp(-z))`, without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * scores))


@dataclass(frozen=True, slots=True)
class Logistic(_Margin):
    """Cross-entropy of labels in {0, 1}: `phi = log(1 + exp(z)) - b z`. L = R^2/4, C = 2 min(R, G), with `||a|| <= R`."""

    convex: bool = True
    slope_bound: float = 1.0
    curvature: float = 0.25

    @property
    def smoothness(self) -> float:
        return self.feature_bound**2 / 4

    def slope(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return sigmoid(scores) - labels

    def bend(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        chance = sigmoid(scores)
        return chance * (1.0 - chance)

    def value(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return np.logaddexp(0.0, scores) - labels * scores

    def gradient_bound(self, radius: float) -> float:
        return min(self.feature_bound, self.clip_norm)

    def gradient_change(self, radius: float) -> float:
        return 2 * self.gradient_bound(radius)

    def classify(self, scores: FloatArray) -> FloatArray:
        return (scores > 0).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Squared(_Margin):
    """Squared error of labels in [-B, B]: `phi = (b - z)^2`. L = 2 R^2.

    Two records' gradients `2 (a a^T theta - a b)` differ by at most `2 R^2 ||theta|| + 4 R B` (the difference of two
    rank-one projectors has norm at most 1), or `2 G` when clipped.
    """

    label_bound: float = math.inf
    convex: bool = True
    slope_bound: float = math.inf
    curvature: float = 2.0

    @property
    def smoothness(self) -> float:
        return 2 * self.feature_bound**2

    def enforce(self, features: FloatArray, labels: FloatArray) -> tuple[FloatArray, FloatArray]:
        bounded = np.minimum(np.maximum(labels, -self.label_bound), self.label_bound)
        return scale_rows(features, self.feature_bound), bounded

    def slope(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return 2.0 * (scores - labels)

    def bend(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return np.full_like(scores, 2.0)

    def value(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return (labels - scores) ** 2

    def gradient_bound(self, radius: float) -> float:
        natural = 2 * self.feature_bound * (self.feature_bound * radius + self.label_bound)
        return min(natural, self.clip_norm)

    def gradient_change(self, radius: float) -> float:
        natural = 2 * self.feature_bound**2 * radius + 4 * self.feature_bound * self.label_bound
        return min(natural, 2 * self.clip_norm)

    def classify(self, scores: FloatArray) -> FloatArray:
        return (scores > 0.5).astype(np.float64)


def build_loss(spec: LossSpec) -> Loss:
    """The loss that a spec names."""
    clip = math.inf if spec.clip_norm is None else spec.clip_norm
    if spec.kind == "logistic":
        return Logistic(spec.feature_bound, spec.ridge, clip)
    return Squared(spec.feature_bound, spec.ridge, clip, spec.label_bound)
