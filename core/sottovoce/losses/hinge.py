"""The support vector machine's loss, and a smooth one near it."""

from __future__ import annotations

from typing import Literal

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.losses.margin import MarginLoss
from sottovoce.registry import Positive


class Hinge(MarginLoss):
    """The support vector machine's loss: `phi = max(0, 1 - y z)`, `y = 2b - 1`.

    Not smooth; where `y z = 1` the slope is the subgradient 0.
    """

    kind: Literal["hinge"] = "hinge"

    def slope(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        signs = 2.0 * labels - 1.0
        return np.where(signs * scores < 1.0, -signs, 0.0)

    def value(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return np.maximum(0.0, 1.0 - (2.0 * labels - 1.0) * scores)


class SmoothedHinge(MarginLoss):
    """The hinge with its corner rounded off over a width h. L = R^2/h.

    With the shortfall `s = 1 - y z`, `y = 2b - 1`: phi is 0 below s = 0, `s^2 / (2h)` up to s = h, and `s - h/2` from there.
    It lies below the hinge, by at most h/2.
    """

    kind: Literal["smoothed_hinge"] = "smoothed_hinge"
    width: Positive = 1.0
    """Of the corner, in units of the score: the smoothness is feature_bound^2 / width."""

    @property
    def curvature(self) -> float:
        return 1.0 / self.width

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
