"""Margin losses: those that depend on theta through the score of a record alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from sottovoce.arrays import Batch, FloatArray
from sottovoce.losses.loss import Loss, beside, scale_rows


class MarginLoss(Loss, Protocol):
    """A loss that depends on theta through the score `z = a.theta` alone.

    If it is convex, its slope grows with z, and so does the slope clipped to `[-G/||a||, G/||a||]`: clipped gradients are
    those of another convex function.
    """

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


@dataclass(frozen=True, slots=True)
class _Margin:
    """What all margin losses share. All of them are convex."""

    feature_bound: float
    ridge: float
    clip_norm: float = math.inf

    convex: ClassVar[bool] = True
    convex_clipped: ClassVar[bool] = True
    heavy: ClassVar[bool] = False

    def dim(self, n_features: int) -> int:
        return n_features

    def initial(self, dim: int) -> FloatArray:
        return np.zeros(dim)

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

    def classify(self, scores: FloatArray) -> FloatArray:
        return (scores > 0).astype(np.float64)


def scores_of(theta: FloatArray, features: FloatArray) -> FloatArray:
    """`a.theta` for every record: `(..., records)`."""
    scores: FloatArray = np.matmul(theta, features.swapaxes(-1, -2))
    return scores


def sigmoid(scores: FloatArray) -> FloatArray:
    """`1 / (1 + exp(-z))`, without overflow."""
    chance = np.negative(scores, out=np.empty_like(scores))  # an array, even of no axes
    np.minimum(chance, 700.0, out=chance)  # exp of more overflows
    np.exp(chance, out=chance)
    chance += 1.0
    np.reciprocal(chance, out=chance)
    return chance


@dataclass(frozen=True, slots=True)
class _Binary(_Margin):
    """Margin losses of labels in {0, 1} with `|phi'| <= 1`, so that C = 2 min(R, G), with `||a|| <= R`."""

    slope_bound: ClassVar[float] = 1.0

    def gradient_bound(self, radius: float) -> float:
        return min(self.feature_bound, self.clip_norm)

    def gradient_change(self, radius: float) -> float:
        return 2 * self.gradient_bound(radius)


@dataclass(frozen=True, slots=True)
class Logistic(_Binary):
    """Cross-entropy: `phi = log(1 + exp(z)) - b z`. L = R^2/4."""

    curvature: ClassVar[float] = 0.25

    @property
    def smoothness(self) -> float:
        return self.feature_bound**2 / 4

    def slope(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        slopes = sigmoid(scores)
        slopes -= labels
        return slopes

    def bend(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        chance = sigmoid(scores)
        return chance * (1.0 - chance)

    def value(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return np.logaddexp(0.0, scores) - labels * scores


@dataclass(frozen=True, slots=True)
class Hinge(_Binary):
    """`phi = max(0, 1 - y z)`, `y = 2b - 1`. Not smooth; where `y z = 1` the slope is the subgradient 0."""

    smoothness: ClassVar[float] = math.inf
    curvature: ClassVar[float] = math.inf

    def slope(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        signs = 2.0 * labels - 1.0
        return np.where(signs * scores < 1.0, -signs, 0.0)

    def bend(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return np.zeros_like(scores)

    def value(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return np.maximum(0.0, 1.0 - (2.0 * labels - 1.0) * scores)


@dataclass(frozen=True, slots=True)
class SmoothedHinge(_Binary):
    """The hinge with its corner rounded off over a width h. L = R^2/h.

    With the shortfall `s = 1 - y z`, `y = 2b - 1`: phi is 0 below s = 0, `s^2 / (2h)` up to s = h, and `s - h/2` from there.
    It lies below the hinge, by at most h/2.
    """

    width: float = 1.0

    @property
    def curvature(self) -> float:
        return 1.0 / self.width

    @property
    def smoothness(self) -> float:
        return self.feature_bound**2 / self.width

    def slope(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        signs = 2.0 * labels - 1.0
        return -signs * np.clip((1.0 - signs * scores) / self.width, 0.0, 1.0)

    def bend(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        shortfall = 1.0 - (2.0 * labels - 1.0) * scores
        return np.where((shortfall > 0.0) & (shortfall < self.width), self.curvature, 0.0)

    def value(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        shortfall = 1.0 - (2.0 * labels - 1.0) * scores
        rounded = np.clip(shortfall, 0.0, self.width)
        return rounded**2 / (2.0 * self.width) + np.maximum(shortfall - self.width, 0.0)
