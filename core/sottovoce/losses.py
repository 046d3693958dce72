"""Losses of one record, the constants that guarantees rest on, and what makes the constants true.

Every loss is `l(theta; a, b) = phi(a.theta, b) + (r/2) ||theta||^2`: a margin function phi of the score, and an exact ridge.
A record's gradient is `phi'(a.theta, b) a + r theta`; the first term, the data part, is what clipping bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.spec import LossSpec


class Loss(Protocol):
    """The loss of one record, vectorised over records and leading axes."""

    @property
    def ridge(self) -> float:
        """r, coefficient of the exact term `r*theta` in every gradient."""
        ...

    @property
    def clip_norm(self) -> float:
        """G, the clipping threshold of a record's data gradient; infinite: none."""
        ...

    @property
    def smoothness(self) -> float:
        """L, Lipschitz constant of a record's data gradient."""
        ...

    @property
    def convex(self) -> bool:
        """Is `phi` convex in the score?"""
        ...

    def enforce(self, features: FloatArray, labels: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Records made to obey the declared bounds, row by row: scaled down, never refused (an error would tell)."""
        ...

    def slope(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """`phi'(score, label)`, unclipped."""
        ...

    def gradient_bound(self, radius: float) -> float:
        """Largest l2 norm of a record's data gradient where `||theta|| <= radius`, clipping included."""
        ...

    def gradient_change(self, radius: float) -> float:
        """C, largest l2 distance between the gradients of two records at one theta with `||theta|| <= radius`."""
        ...

    def value(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """`phi(score, label)`."""
        ...

    def predict(self, theta: FloatArray, features: FloatArray) -> FloatArray:
        """Scores `(..., records)` of `theta (..., dim)` on `features (..., records, dim)`, rows scaled as for learning."""
        ...

    def classify(self, scores: FloatArray) -> FloatArray:
        """Scores as labels of the loss's domain."""
        ...


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
class Logistic:
    """Cross-entropy of labels in {0, 1}: `phi = log(1 + exp(z)) - b z`. L = R^2/4, C = 2 min(R, G), with `||a|| <= R`."""

    feature_bound: float
    ridge: float
    clip_norm: float = math.inf
    convex: bool = True

    @property
    def smoothness(self) -> float:
        return self.feature_bound**2 / 4

    def enforce(self, features: FloatArray, labels: FloatArray) -> tuple[FloatArray, FloatArray]:
        return scale_rows(features, self.feature_bound), labels

    def slope(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return sigmoid(scores) - labels

    def gradient_bound(self, radius: float) -> float:
        return min(self.feature_bound, self.clip_norm)

    def gradient_change(self, radius: float) -> float:
        return 2 * self.gradient_bound(radius)

    def value(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return np.logaddexp(0.0, scores) - labels * scores

    def predict(self, theta: FloatArray, features: FloatArray) -> FloatArray:
        return scores_of(theta, scale_rows(features, self.feature_bound))

    def classify(self, scores: FloatArray) -> FloatArray:
        return (scores > 0).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Squared:
    """Squared error of labels in [-B, B]: `phi = (b - z)^2`. L = 2 R^2.

    Two records' gradients `2 (a a^T theta - a b)` differ by at most `2 R^2 ||theta|| + 4 R B` (the difference of two
    rank-one projectors has norm at most 1), or `2 G` when clipped.
    """

    feature_bound: float
    label_bound: float
    ridge: float
    clip_norm: float = math.inf
    convex: bool = True

    @property
    def smoothness(self) -> float:
        return 2 * self.feature_bound**2

    def enforce(self, features: FloatArray, labels: FloatArray) -> tuple[FloatArray, FloatArray]:
        return scale_rows(features, self.feature_bound), np.minimum(
            np.maximum(labels, -self.label_bound), self.label_bound
        )

    def slope(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return 2.0 * (scores - labels)

    def gradient_bound(self, radius: float) -> float:
        natural = 2 * self.feature_bound * (self.feature_bound * radius + self.label_bound)
        return min(natural, self.clip_norm)

    def gradient_change(self, radius: float) -> float:
        natural = 2 * self.feature_bound**2 * radius + 4 * self.feature_bound * self.label_bound
        return min(natural, 2 * self.clip_norm)

    def value(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return (labels - scores) ** 2

    def predict(self, theta: FloatArray, features: FloatArray) -> FloatArray:
        return scores_of(theta, scale_rows(features, self.feature_bound))

    def classify(self, scores: FloatArray) -> FloatArray:
        return (scores > 0.5).astype(np.float64)


def build_loss(spec: LossSpec) -> Loss:
    """The loss that a spec names."""
    clip = math.inf if spec.clip_norm is None else spec.clip_norm
    if spec.kind == "logistic":
        return Logistic(spec.feature_bound, spec.ridge, clip)
    return Squared(spec.feature_bound, spec.label_bound, spec.ridge, clip)
