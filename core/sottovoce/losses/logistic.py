"""The logistic loss, and its quadratic approximation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, Self

import numpy as np
from pydantic import model_validator

from sottovoce.arrays import FloatArray
from sottovoce.losses.margin import MarginLoss, sigmoid
from sottovoce.losses.quadratic import Quadratic
from sottovoce.registry import Positive, Section


class Logistic(MarginLoss):
    """Cross-entropy of two classes, labels 0 and 1: `phi = log(1 + exp(z)) - b z`. L = R^2/4."""

    kind: Literal["logistic"] = "logistic"
    history: Literal["exact", "pass_glm"] = "exact"
    """pass_glm: learn the loss's quadratic approximation, whose history takes constant time and memory."""
    score_bound: Positive | None = None
    """pass_glm only: the approximation is close where scores lie in [-score_bound, score_bound]."""

    @classmethod
    def class_for(cls, fields: Mapping[str, Any]) -> type[Section]:
        return PassGlm if fields.get("history") == "pass_glm" else cls

    @model_validator(mode="after")
    def _exact(self) -> Self:
        if self.score_bound is not None:
            raise ValueError("score_bound must be given with history pass_glm, and only there")
        if self.history != "exact":
            raise ValueError("in Python, the loss with history pass_glm is PassGlm")
        return self

    @property
    def curvature(self) -> float:
        return 0.25

    def slope(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        slopes = sigmoid(scores)
        slopes -= labels
        return slopes

    def bend(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        chance = sigmoid(scores)
        return chance * (1.0 - chance)

    def value(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return np.logaddexp(0.0, scores) - labels * scores

    def probabilities(self, scores: FloatArray) -> FloatArray:
        return np.stack([sigmoid(-scores), sigmoid(scores)], axis=-1)


class PassGlm(Quadratic):
    """The logistic loss's quadratic approximation (PASS-GLM: Huggins, Adams & Broderick 2017, with M = 2). P = 1/2.

    `phi = k + c z^2 / 2 + z/2 - b z`: Chebyshev's expansion of `log(1 + exp(-s))` up to degree 2 where `|s| <= score_bound`,
    at `s = (2b - 1) z`. It is a convex loss in its own right, and all constants are its own, at any score; only its
    likeness to the logistic loss ends at the score bound.
    """

    kind: Literal["logistic"] = "logistic"
    history: Literal["pass_glm"] = "pass_glm"
    score_bound: Positive
    """The approximation is close where scores lie in [-score_bound, score_bound]."""

    @model_validator(mode="before")
    @classmethod
    def _approximate(cls, fields: Any) -> Any:
        if fields.get("score_bound") is None:
            raise ValueError(
                "score_bound must be given with history pass_glm: the largest score at which its approximation is to be "
                "close; no score is beyond feature_bound times the radius of the decision set (docs/losses-and-sets.md, PASS-GLM)"
            )
        if fields.get("clip_norm") is not None:
            raise ValueError("clip_norm must not be given with history pass_glm: to clip, one needs the records")
        return fields

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
