"""Losses of one record, the constants that guarantees rest on, and what makes the constants true.

Every loss is a data part and an exact ridge: `l(theta; a, b) = phi(theta; a, b) + (r/2) ||theta||^2`. A record's gradient has
the same two parts; clipping bounds the data part. Most losses are margin losses, `phi(a.theta, b)`.

Shapes. `theta` is `(dim,)` beside `features (records, m)`, or `(learners, replicas, dim)` beside `(learners, records, m)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Protocol

import numpy as np

from sottovoce.arrays import FloatArray, as_floats
from sottovoce.errors import SpecError
from sottovoce.machine import Batch
from sottovoce.spec import HingeSpec, LogisticSpec, LossSpec, SmoothedHingeSpec, SoftmaxSpec, SquaredSpec, TorchLossSpec


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

    @property
    def convex_clipped(self) -> bool:
        """Are the data gradients, clipped, still those of a convex function? Only then does a step on them contract."""
        ...

    @property
    def heavy(self) -> bool:
        """May one gradient take so long that a service should not let its event loop wait for it?"""
        ...

    def dim(self, n_features: int) -> int:
        """Number of parameters for records of so many features."""
        ...

    def initial(self, dim: int) -> FloatArray:
        """Where learning starts, before any projection, `(dim,)`: public, independent of all records."""
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


def scale_rows(features: FloatArray, bound: float) -> FloatArray:
    """Rows of l2 norm above `bound` scaled down to it, each by its own norm alone."""
    norms = np.sqrt(np.vecdot(features, features))
    if not np.count_nonzero(norms > bound):
        return features
    factors: FloatArray = bound / np.maximum(norms, bound)
    return features * factors[..., None]


def sigmoid(scores: FloatArray) -> FloatArray:
    """`1 / (1 + exp(-z))`, without overflow."""
    chance = np.negative(scores, out=np.empty_like(scores))  # an array, even of no axes
    np.minimum(chance, 700.0, out=chance)  # exp of more overflows
    np.exp(chance, out=chance)
    chance += 1.0
    np.reciprocal(chance, out=chance)
    return chance


# ---- labels 0 and 1 --------------------------------------------------------------------------------------------------


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


# ---- quadratic in theta ----------------------------------------------------------------------------------------------


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


# ---- many classes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Softmax:
    """Multiclass cross-entropy: `log sum_k exp(z_k) - z_b` for labels b in 0 .. classes-1. L = R^2/2, G = sqrt(2) R.

    theta is a matrix `(classes, features)`, row by row in one vector; `z = theta a`. A record's gradient is the outer product
    of `p - e_b` and a, with `p = softmax(z)` and `e_b` the unit vector of b. Its norm is `||p - e_b|| ||a||`, and
    `||p - e_b||^2 <= (1 - p_b)^2 + (sum of the other p)^2 = 2 (1 - p_b)^2 <= 2`. Two records' gradients differ by at
    most C = 2 G, which large theta and nearly opposite rows come near. The Hessian is the Kronecker product of
    `diag(p) - p p^T`, whose norm is at most 1/2, and `a a^T`.
    """

    feature_bound: float
    ridge: float
    clip_norm: float
    classes: int

    convex: ClassVar[bool] = True
    heavy: ClassVar[bool] = False

    @property
    def convex_clipped(self) -> bool:
        """Only where clipping never acts: a clipped gradient need not be the gradient of anything."""
        return self.clip_norm >= math.sqrt(2) * self.feature_bound

    @property
    def smoothness(self) -> float:
        return self.feature_bound**2 / 2

    def dim(self, n_features: int) -> int:
        return self.classes * n_features

    def initial(self, dim: int) -> FloatArray:
        return np.zeros(dim)

    def enforce(self, features: FloatArray, labels: FloatArray) -> tuple[FloatArray, FloatArray]:
        return scale_rows(features, self.feature_bound), labels

    def gradient_sum(self, theta: FloatArray, batch: Batch) -> FloatArray:
        scores = self._scores(theta, batch.features)
        chances = np.exp(scores - scores.max(axis=-2, keepdims=True))
        chances /= chances.sum(axis=-2, keepdims=True)
        residuals: FloatArray = chances - self._one_hot(batch.labels, theta)
        if np.isfinite(self.clip_norm):
            norms = np.linalg.norm(residuals, axis=-2)
            norms *= beside(np.sqrt(np.vecdot(batch.features, batch.features)), theta)
            residuals *= (self.clip_norm / np.maximum(norms, self.clip_norm))[..., None, :]
        if batch.present is not None:
            residuals *= beside(batch.present, theta)[..., None, :]
        rows = residuals.reshape(*self._matrix(theta, batch.features).shape[:-1], batch.size)
        total: FloatArray = np.matmul(rows, batch.features)
        return total.reshape(theta.shape)

    def values(self, theta: FloatArray, batch: Batch) -> FloatArray:
        scores = self._scores(theta, batch.features)
        chosen = (scores * self._one_hot(batch.labels, theta)).sum(axis=-2)
        values: FloatArray = np.logaddexp.reduce(scores, axis=-2) - chosen
        return values

    def gradient_bound(self, radius: float) -> float:
        return min(math.sqrt(2) * self.feature_bound, self.clip_norm)

    def gradient_change(self, radius: float) -> float:
        return 2 * self.gradient_bound(radius)

    def predict(self, theta: FloatArray, features: FloatArray) -> FloatArray:
        return self._scores(theta, scale_rows(features, self.feature_bound)).swapaxes(-1, -2)

    def classify(self, scores: FloatArray) -> FloatArray:
        return as_floats(scores.argmax(axis=-1))

    def _scores(self, theta: FloatArray, features: FloatArray) -> FloatArray:
        """`(..., classes, records)`."""
        scores: FloatArray = np.matmul(self._matrix(theta, features), features.swapaxes(-1, -2))
        return scores.reshape(*theta.shape[:-1], self.classes, features.shape[-2])

    def _matrix(self, theta: FloatArray, features: FloatArray) -> FloatArray:
        """Parameters with all replicas' classes as rows of one matrix: `(..., replicas * classes, features)`."""
        return theta.reshape(*theta.shape[:-2], -1, features.shape[-1])

    def _one_hot(self, labels: FloatArray, theta: FloatArray) -> FloatArray:
        """`(..., classes, records)` of 1.0 where the label is the class."""
        return as_floats(beside(labels, theta)[..., None, :] == np.arange(self.classes)[:, None])


def build_loss(spec: LossSpec) -> Loss:
    """The loss that a spec names.

    Raises:
        SpecError: a PyTorch module that cannot be used (`torch_loss.build_torch_loss`).
    """
    common = (spec.feature_bound, spec.ridge, math.inf if spec.clip_norm is None else spec.clip_norm)
    match spec:
        case SquaredSpec():
            return Squared(*common, spec.label_bound)
        case HingeSpec():
            return Hinge(*common)
        case SmoothedHingeSpec():
            return SmoothedHinge(*common, spec.width)
        case SoftmaxSpec():
            return Softmax(*common, spec.classes)
        case TorchLossSpec():
            return _torch_loss(spec)
        case LogisticSpec(score_bound=float(bound)):
            return PassGlm(*common, bound)
        case _:
            return Logistic(*common)


def _torch_loss(spec: TorchLossSpec) -> Loss:
    """PyTorch takes seconds to import, so only a run that asks for it does."""
    try:
        from sottovoce.torch_loss import build_torch_loss
    except ModuleNotFoundError:
        raise SpecError("loss.kind: torch needs PyTorch: pip install 'sottovoce[torch]'") from None
    return build_torch_loss(spec)
