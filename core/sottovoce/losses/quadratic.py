"""Losses that are quadratic in theta."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.losses.loss import scale_rows
from sottovoce.losses.margin import _Margin


@dataclass(frozen=True, slots=True)
class Quadratic(_Margin):
    """Margin losses whose slope is a line, `phi' = c z + phi'(0, b)`. L = c R^2; unclipped, a history needs no records.

    With `|phi'(0, b)| <= P`, a gradient has norm at most `R (c R ||theta|| + P)`. Two records' gradients differ by at most
    `c R^2 ||theta|| + 2 R P` (the difference of two rank-one projectors has norm at most 1), or `2 G` when clipped.
    """

    slope_bound: ClassVar[float] = math.inf

    @property
    def curvature(self) -> float:
        """The slope's slope, c."""
        raise NotImplementedError

    @property
    def pull(self) -> float:
        """P, the largest `|phi'(0, b)|`."""
        raise NotImplementedError

    @property
    def smoothness(self) -> float:
        return self.curvature * self.feature_bound**2

    def bend(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return np.full_like(scores, self.curvature)

    def gradient_bound(self, radius: float) -> float:
        natural = self.feature_bound * (self.curvature * self.feature_bound * radius + self.pull)
        return min(natural, self.clip_norm)

    def gradient_change(self, radius: float) -> float:
        natural = self.curvature * self.feature_bound**2 * radius + 2 * self.feature_bound * self.pull
        return min(natural, 2 * self.clip_norm)


@dataclass(frozen=True, slots=True)
class Squared(Quadratic):
    """Squared error of labels in [-B, B]: `phi = (b - z)^2`. c = 2, P = 2B."""

    label_bound: float = math.inf

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


@dataclass(frozen=True, slots=True)
class PassGlm(Quadratic):
    """The logistic loss's quadratic approximation (PASS-GLM: Huggins, Adams & Broderick 2017, with M = 2). P = 1/2.

    `phi = k + c z^2 / 2 + z/2 - b z`: Chebyshev's expansion of `log(1 + exp(-s))` up to degree 2 where `|s| <= score_bound`,
    at `s = (2b - 1) z`. It is a convex loss in its own right, and all constants are its own, at any score; only its
    likeness to the logistic loss ends at the score bound.
    """

    score_bound: float = 4.0

    @property
    def curvature(self) -> float:
        return chebyshev(self.score_bound)[1]

    @property
    def pull(self) -> float:
        return 0.5

    @property
    def slope_error(self) -> float:
        """Largest distance of the slope to the logistic loss's where `|z| <= score_bound`.

        It is largest at the bound, or where the difference `c z - tanh(z/2)/2` turns: at `cosh(z/2)^2 = 1/(4c)`.
        """
        turn = min(2.0 * math.acosh(max(1.0, 0.5 / math.sqrt(self.curvature))), self.score_bound)
        return max(abs(self.curvature * z - 0.5 * math.tanh(0.5 * z)) for z in (turn, self.score_bound))

    @property
    def gradient_error(self) -> float:
        """Largest l2 distance of a mean data gradient to the logistic loss's: `R slope_error`, within the score bound."""
        return self.feature_bound * self.slope_error

    def slope(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return self.curvature * scores + (0.5 - labels)

    def value(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        constant, curvature = chebyshev(self.score_bound)
        return constant + 0.5 * curvature * scores**2 + (0.5 - labels) * scores


@cache
def chebyshev(bound: float) -> tuple[float, float]:
    """Numbers k and c of `log(1 + exp(-s)) ~ k - s/2 + c s^2 / 2`, the Chebyshev expansion on `[-bound, bound]` up to degree 2.

    The function is `-s/2` plus the even `f = log(2 cosh(s/2))`, whose coefficients `a_0`, `a_2` are means over a half-circle,
    `s = bound cos t`. Integrated by parts, `a_2` is one of `f' = tanh(s/2)/2`, which does not cancel for small bounds.
    """
    angles = np.pi * (np.arange(4096) + 0.5) / 4096
    x, height = np.cos(angles), np.sin(angles)
    curvature = float(np.mean(4.0 / bound * np.tanh(0.5 * bound * x) * x * height**2))  # 4 a_2 / bound^2
    mean = float(np.mean(np.logaddexp(0.5 * bound * x, -0.5 * bound * x)))
    return mean - curvature * bound**2 / 4, curvature
