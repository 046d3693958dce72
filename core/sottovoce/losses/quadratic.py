"""Losses that are quadratic in theta."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar, Literal

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.losses.loss import scale_rows
from sottovoce.losses.margin import MarginLoss
from sottovoce.registry import NonNegative, Positive


class Quadratic(MarginLoss):
    """Margin losses whose slope is a line, `phi' = c z + phi'(0, b)`. L = c R^2; unclipped, a history needs no records.

    With `|phi'(0, b)| <= P`, a gradient has norm at most `R (c R ||theta|| + P)`. Two records' gradients differ by at most
    `c R^2 ||theta|| + 2 R P` (the difference of two rank-one projectors has norm at most 1), or `2 G` when clipped.
    """

    @property
    def slope_bound(self) -> float:
        return math.inf

    @property
    @abstractmethod
    def curvature(self) -> float:
        """The slope's slope, c."""

    @property
    @abstractmethod
    def pull(self) -> float:
        """P, the largest `|phi'(0, b)|`."""

    def bend(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return np.full_like(scores, self.curvature)

    def gradient_bound(self, radius: float) -> float:
        natural = self.feature_bound * (self.curvature * self.feature_bound * radius + self.pull)
        return min(natural, self.clip)

    def gradient_change(self, radius: float) -> float:
        natural = self.curvature * self.feature_bound**2 * radius + 2 * self.feature_bound * self.pull
        return min(natural, 2 * self.clip)


class Squared(Quadratic):
    """Squared error of labels in [-B, B]: `phi = (b - z)^2`. c = 2, P = 2B."""

    label_bound: Positive = 1.0
    """Labels are clipped to [-label_bound, label_bound]."""

    binary: ClassVar[bool] = False

    @property
    def n_classes(self) -> int | None:
        return None

    @property
    def curvature(self) -> float:
        return 2.0

    @property
    def pull(self) -> float:
        return 2 * self.label_bound

    def enforce(self, features: FloatArray, labels: FloatArray) -> tuple[FloatArray, FloatArray]:
        bounded = np.minimum(np.maximum(labels, -self.label_bound), self.label_bound)
        return scale_rows(features, self.feature_bound), bounded

    def slope(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return 2.0 * (scores - labels)

    def value(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return (labels - scores) ** 2

    def classify(self, scores: FloatArray) -> FloatArray:
        return (scores > 0.5).astype(np.float64)


class Ridge(Squared):
    """Squared error, by default with a ridge."""

    kind: Literal["ridge"] = "ridge"


class LeastSquares(Squared):
    """Squared error, by default without ridge."""

    kind: Literal["least_squares"] = "least_squares"
    ridge: NonNegative = 0.0
