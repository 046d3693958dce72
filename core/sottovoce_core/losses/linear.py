"""Losses of linear scores: quadratic, logistic, hinge and softmax losses."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from sottovoce_core.arrays import Batch, FloatArray, as_floats
from sottovoce_core.losses.loss import Loss, MarginLoss, add_replica_axis, scale_rows, sigmoid
from sottovoce_core.registry import NonNegative, Positive, Section

# ---- quadratic -------------------------------------------------------------------------------------------------------


class QuadraticLoss(MarginLoss):
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
        """Constant second derivative c."""

    @property
    @abstractmethod
    def max_slope_at_zero(self) -> float:
        """Largest `|phi'(0, b)|`, P."""

    def second_derivative(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return np.full_like(scores, self.curvature)

    def gradient_bound(self, radius: float) -> float:
        natural = self.feature_bound * (self.curvature * self.feature_bound * radius + self.max_slope_at_zero)
        return min(natural, self.clip_threshold)

    def gradient_change(self, radius: float) -> float:
        natural = self.curvature * self.feature_bound**2 * radius + 2 * self.feature_bound * self.max_slope_at_zero
        return min(natural, 2 * self.clip_threshold)


class SquaredLoss(QuadraticLoss):
    """Squared error of labels in [-B, B]: `phi = (b - z)^2`. c = 2, P = 2B."""

    label_bound: Positive = 1.0
    """Labels are clipped to [-label_bound, label_bound]."""

    has_binary_labels: ClassVar[bool] = False

    @property
    def n_classes(self) -> int | None:
        return None

    @property
    def curvature(self) -> float:
        return 2.0

    @property
    def max_slope_at_zero(self) -> float:
        return 2 * self.label_bound

    def enforce_bounds(self, features: FloatArray, labels: FloatArray) -> tuple[FloatArray, FloatArray]:
        bounded = np.minimum(np.maximum(labels, -self.label_bound), self.label_bound)
        return scale_rows(features, self.feature_bound), bounded

    def slope(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return 2.0 * (scores - labels)

    def value(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return (labels - scores) ** 2

    def classify(self, scores: FloatArray) -> FloatArray:
        return (scores > 0.5).astype(np.float64)


class RidgeLoss(SquaredLoss):
    """Squared error, by default with a ridge."""

    kind: Literal["ridge"] = "ridge"


class LeastSquaresLoss(SquaredLoss):
    """Squared error, by default without ridge."""

    kind: Literal["least_squares"] = "least_squares"
    ridge: NonNegative = 0.0


# ---- logistic --------------------------------------------------------------------------------------------------------


class LogisticLoss(MarginLoss):
    """Cross-entropy of two classes, labels 0 and 1: `phi = log(1 + exp(z)) - b z`. L = R^2/4."""

    kind: Literal["logistic"] = "logistic"
    history: Literal["exact", "pass_glm"] = "exact"
    """pass_glm: use the loss's quadratic approximation, whose history takes constant time and memory."""
    score_bound: Positive | None = None
    """pass_glm only: the approximation is close where scores lie in [-score_bound, score_bound]."""

    has_logistic_curvature: ClassVar[bool] = True

    @classmethod
    def select_class(cls, fields: Mapping[str, Any]) -> type[Section]:
        return PassGlmLoss if fields.get("history") == "pass_glm" else cls

    @model_validator(mode="after")
    def _require_exact(self) -> Self:
        if self.score_bound is not None:
            raise ValueError("score_bound must be given with history pass_glm, and only there")
        if self.history != "exact":
            raise ValueError("in Python, the loss with history pass_glm is PassGlmLoss")
        return self

    @property
    def curvature(self) -> float:
        return 0.25

    def slope(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        slopes = sigmoid(scores)
        slopes -= labels
        return slopes

    def second_derivative(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        chance = sigmoid(scores)
        return chance * (1.0 - chance)

    def value(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return np.logaddexp(0.0, scores) - labels * scores

    def probabilities(self, scores: FloatArray) -> FloatArray:
        return np.stack([sigmoid(-scores), sigmoid(scores)], axis=-1)


class PassGlmLoss(QuadraticLoss):
    """The logistic loss's quadratic approximation (PASS-GLM: Huggins, Adams & Broderick 2017, with M = 2). P = 1/2.

    `phi = k + c z^2 / 2 + z/2 - b z`: Chebyshev's expansion of `log(1 + exp(-s))` up to degree 2 where `|s| <= score_bound`,
    at `s = (2b - 1) z`. It is itself a convex loss, and its constants hold at any score; only the approximation of the
    logistic loss ends at the score bound.
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
                "close; no score is beyond feature_bound times the radius of the decision set "
                "(docs/reference/losses.md, PASS-GLM)"
            )
        if fields.get("clip_norm") is not None:
            raise ValueError("clip_norm must not be given with history pass_glm: clipping needs the records")
        return fields

    @property
    def curvature(self) -> float:
        return _chebyshev(self.score_bound)[1]

    @property
    def max_slope_at_zero(self) -> float:
        return 0.5

    @property
    def slope_error(self) -> float:
        """Largest distance to the slope of the logistic loss for `|z| <= score_bound`.

        The maximum is at the bound, or at the turning point of `c z - tanh(z/2)/2`: at `cosh(z/2)^2 = 1/(4c)`.
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
        constant, curvature = _chebyshev(self.score_bound)
        return constant + 0.5 * curvature * scores**2 + (0.5 - labels) * scores


@cache
def _chebyshev(bound: float) -> tuple[float, float]:
    """Compute k and c of `log(1 + exp(-s)) ~ k - s/2 + c s^2 / 2`, the Chebyshev expansion on `[-bound, bound]` of degree 2.

    The function is `-s/2` plus the even `f = log(2 cosh(s/2))`, whose coefficients `a_0`, `a_2` are means over a half-circle,
    `s = bound cos t`. Integration by parts makes `a_2` a mean of `f' = tanh(s/2)/2`, without cancellation for small bounds.
    """
    angles = np.pi * (np.arange(4096) + 0.5) / 4096
    x, height = np.cos(angles), np.sin(angles)
    curvature = float(np.mean(4.0 / bound * np.tanh(0.5 * bound * x) * x * height**2))  # 4 a_2 / bound^2
    mean = float(np.mean(np.logaddexp(0.5 * bound * x, -0.5 * bound * x)))
    return mean - curvature * bound**2 / 4, curvature


# ---- hinge -----------------------------------------------------------------------------------------------------------


class HingeLoss(MarginLoss):
    """Loss of the support vector machine: `phi = max(0, 1 - y z)`, `y = 2b - 1`.

    Not smooth; at `y z = 1` the slope is the subgradient 0.
    """

    kind: Literal["hinge"] = "hinge"

    def slope(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        signs = 2.0 * labels - 1.0
        return np.where(signs * scores < 1.0, -signs, 0.0)

    def value(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return np.maximum(0.0, 1.0 - (2.0 * labels - 1.0) * scores)


class SmoothedHingeLoss(MarginLoss):
    """Hinge loss with a corner smoothed over a width h. L = R^2/h.

    With the shortfall `s = 1 - y z`, `y = 2b - 1`: phi is 0 below s = 0, `s^2 / (2h)` up to s = h, and `s - h/2` from there.
    It lies below the hinge, by at most h/2.
    """

    kind: Literal["smoothed_hinge"] = "smoothed_hinge"
    width: Positive = 1.0
    """Width of the corner, in units of the score: the smoothness is feature_bound^2 / width."""

    @property
    def curvature(self) -> float:
        return 1.0 / self.width

    def slope(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        signs = 2.0 * labels - 1.0
        return -signs * np.clip((1.0 - signs * scores) / self.width, 0.0, 1.0)

    def second_derivative(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        shortfall = 1.0 - (2.0 * labels - 1.0) * scores
        return np.where((shortfall > 0.0) & (shortfall < self.width), self.curvature, 0.0)

    def value(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        shortfall = 1.0 - (2.0 * labels - 1.0) * scores
        rounded = np.clip(shortfall, 0.0, self.width)
        return rounded**2 / (2.0 * self.width) + np.maximum(shortfall - self.width, 0.0)


# ---- softmax ---------------------------------------------------------------------------------------------------------


class SoftmaxLoss(Loss):
    """Multiclass cross-entropy: `log sum_k exp(z_k) - z_b` for labels b in 0 .. classes-1. L = R^2/2, G = sqrt(2) R.

    theta is a matrix `(classes, features)`, row by row in one vector; `z = theta a`. A record's gradient is the outer product
    of `p - e_b` and a, with `p = softmax(z)` and `e_b` the unit vector of b. Its norm is `||p - e_b|| ||a||`, and
    `||p - e_b||^2 <= (1 - p_b)^2 + (sum of the other p)^2 = 2 (1 - p_b)^2 <= 2`. Two records' gradients differ by at
    most C = 2 G, which large theta and nearly opposite rows come near. The Hessian is the Kronecker product of
    `diag(p) - p p^T`, whose norm is at most 1/2, and `a a^T`.
    """

    kind: Literal["softmax"] = "softmax"
    classes: Annotated[int, Field(ge=2, le=2**53)]
    """Labels are the numbers 0 to classes - 1."""

    is_convex: ClassVar[bool] = True
    has_binary_labels: ClassVar[bool] = False

    @property
    def n_classes(self) -> int | None:
        return self.classes

    @property
    def is_convex_when_clipped(self) -> bool:
        """Return whether clipping never acts: a clipped gradient may not be the gradient of any function."""
        return self.clip_threshold >= math.sqrt(2) * self.feature_bound

    @property
    def smoothness(self) -> float:
        return self.feature_bound**2 / 2

    def dim(self, n_features: int) -> int:
        return self.classes * n_features

    def gradient_sum(self, theta: FloatArray, batch: Batch) -> FloatArray:
        residuals = self._scores(theta, batch.features)
        residuals -= residuals.max(axis=-2, keepdims=True)
        np.exp(residuals, out=residuals)
        residuals /= residuals.sum(axis=-2, keepdims=True)
        residuals -= self._one_hot(batch.labels, theta)
        if self.clip_norm is not None:
            norms = np.linalg.norm(residuals, axis=-2)
            norms *= add_replica_axis(np.sqrt(np.vecdot(batch.features, batch.features)), theta)
            residuals *= (self.clip_norm / np.maximum(norms, self.clip_norm))[..., None, :]
        if batch.mask is not None:
            residuals *= add_replica_axis(batch.mask, theta)[..., None, :]
        *lead, classes, size = residuals.shape
        stacked = [*lead[:-1], lead[-1] * classes] if theta.ndim > 1 else [*lead, classes]
        total: FloatArray = np.matmul(residuals.reshape(*stacked, size), batch.features)
        return total.reshape(*lead, theta.shape[-1])

    def values(self, theta: FloatArray, batch: Batch) -> FloatArray:
        scores = self._scores(theta, batch.features)
        scores -= scores.max(axis=-2, keepdims=True)
        chosen = np.einsum("...kr,...kr->...r", scores, self._one_hot(batch.labels, theta))
        values: FloatArray = np.log(np.exp(scores, out=scores).sum(axis=-2)) - chosen
        return values

    def gradient_bound(self, radius: float) -> float:
        return min(math.sqrt(2) * self.feature_bound, self.clip_threshold)

    def predict(self, theta: FloatArray, features: FloatArray) -> FloatArray:
        return self._scores(theta, scale_rows(features, self.feature_bound)).swapaxes(-1, -2)

    def classify(self, scores: FloatArray) -> FloatArray:
        return as_floats(scores.argmax(axis=-1))

    def probabilities(self, scores: FloatArray) -> FloatArray:
        chances: FloatArray = np.exp(scores - scores.max(axis=-1, keepdims=True))
        chances /= chances.sum(axis=-1, keepdims=True)
        return chances

    def _scores(self, theta: FloatArray, features: FloatArray) -> FloatArray:
        """Compute scores `(..., classes, records)`."""
        # One matrix product for all replicas: their classes are the rows of `(..., replicas * classes, features)`.
        stacked = theta.reshape(*theta.shape[:-2], -1, features.shape[-1])
        scores: FloatArray = np.matmul(stacked, features.swapaxes(-1, -2))
        return scores.reshape(*scores.shape[:-2], *theta.shape[-2:-1], self.classes, features.shape[-2])

    def _one_hot(self, labels: FloatArray, theta: FloatArray) -> FloatArray:
        """Return `(..., classes, records)` with 1.0 at the class of the label."""
        return as_floats(add_replica_axis(labels, theta)[..., None, :] == np.arange(self.classes)[:, None])
