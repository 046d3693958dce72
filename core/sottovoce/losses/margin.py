"""Margin losses: those that depend on theta through the score of a record alone, `phi(a.theta, b)`."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import numpy as np

from sottovoce.arrays import Batch, FloatArray
from sottovoce.losses.loss import Loss, beside, scale_rows


class MarginLoss(Loss):
    """A loss of the score `z = a.theta`, with `|phi'| <= slope_bound` and `phi'' <= curvature`. L = curvature R^2.

    If it is convex, its slope grows with z, and so does the slope clipped to `[-G/||a||, G/||a||]`: clipped gradients are
    those of another convex function. Two records' gradients differ by at most C = 2 min(slope_bound R, G).
    """

    convex: ClassVar[bool] = True

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

    def bend(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        """`phi''(score, label)`; 0 where there is none."""
        return np.zeros_like(scores)

    @property
    def smoothness(self) -> float:
        return self.curvature * self.feature_bound**2

    @property
    def convex_clipped(self) -> bool:
        return self.convex

    def gradient_sum(self, theta: FloatArray, batch: Batch) -> FloatArray:
        slopes = self.slope(scores_of(theta, batch.features), beside(batch.labels, theta))
        if self.clip_norm is not None:
            norms = beside(np.sqrt(np.vecdot(batch.features, batch.features)), theta)
            slopes = slopes * (self.clip_norm / np.maximum(np.abs(slopes) * norms, self.clip_norm))
        if batch.present is not None:
            slopes = slopes * beside(batch.present, theta)
        return weighted_rows(slopes, batch.features)

    def values(self, theta: FloatArray, batch: Batch) -> FloatArray:
        return self.value(scores_of(theta, batch.features), beside(batch.labels, theta))

    def gradient_bound(self, radius: float) -> float:
        return min(self.slope_bound * self.feature_bound, self.clip)

    def predict(self, theta: FloatArray, features: FloatArray) -> FloatArray:
        return scores_of(theta, scale_rows(features, self.feature_bound))

    def classify(self, scores: FloatArray) -> FloatArray:
        return (scores > 0).astype(np.float64)


def scores_of(theta: FloatArray, features: FloatArray) -> FloatArray:
    """`a.theta` for every record: `(..., records)`."""
    scores: FloatArray = np.matmul(theta, features.swapaxes(-1, -2))
    return scores


def weighted_rows(weights: FloatArray, rows: FloatArray) -> FloatArray:
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
