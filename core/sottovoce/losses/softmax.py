"""Losses of many classes."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from sottovoce.arrays import Batch, FloatArray, as_floats
from sottovoce.losses.loss import Loss, beside, scale_rows


class Softmax(Loss):
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

    convex: ClassVar[bool] = True
    binary: ClassVar[bool] = False

    @property
    def n_classes(self) -> int | None:
        return self.classes

    @property
    def convex_clipped(self) -> bool:
        """Only where clipping never acts: a clipped gradient need not be the gradient of anything."""
        return self.clip >= math.sqrt(2) * self.feature_bound

    @property
    def smoothness(self) -> float:
        return self.feature_bound**2 / 2

    def dim(self, n_features: int) -> int:
        return self.classes * n_features

    def gradient_sum(self, theta: FloatArray, batch: Batch) -> FloatArray:
        scores = self._scores(theta, batch.features)
        chances = np.exp(scores - scores.max(axis=-2, keepdims=True))
        chances /= chances.sum(axis=-2, keepdims=True)
        residuals: FloatArray = chances - self._one_hot(batch.labels, theta)
        if self.clip_norm is not None:
            norms = np.linalg.norm(residuals, axis=-2)
            norms *= beside(np.sqrt(np.vecdot(batch.features, batch.features)), theta)
            residuals *= (self.clip_norm / np.maximum(norms, self.clip_norm))[..., None, :]
        if batch.present is not None:
            residuals *= beside(batch.present, theta)[..., None, :]
        *lead, classes, size = residuals.shape
        stacked = [*lead[:-1], lead[-1] * classes] if theta.ndim > 1 else [*lead, classes]
        total: FloatArray = np.matmul(residuals.reshape(*stacked, size), batch.features)
        return total.reshape(*lead, theta.shape[-1])

    def values(self, theta: FloatArray, batch: Batch) -> FloatArray:
        scores = self._scores(theta, batch.features)
        chosen = (scores * self._one_hot(batch.labels, theta)).sum(axis=-2)
        values: FloatArray = np.logaddexp.reduce(scores, axis=-2) - chosen
        return values

    def gradient_bound(self, radius: float) -> float:
        return min(math.sqrt(2) * self.feature_bound, self.clip)

    def predict(self, theta: FloatArray, features: FloatArray) -> FloatArray:
        return self._scores(theta, scale_rows(features, self.feature_bound)).swapaxes(-1, -2)

    def classify(self, scores: FloatArray) -> FloatArray:
        return as_floats(scores.argmax(axis=-1))

    def probabilities(self, scores: FloatArray) -> FloatArray:
        chances: FloatArray = np.exp(scores - scores.max(axis=-1, keepdims=True))
        chances /= chances.sum(axis=-1, keepdims=True)
        return chances

    def _scores(self, theta: FloatArray, features: FloatArray) -> FloatArray:
        """`(..., classes, records)`."""
        # One matrix product for all replicas: their classes are the rows of `(..., replicas * classes, features)`.
        stacked = theta.reshape(*theta.shape[:-2], -1, features.shape[-1])
        scores: FloatArray = np.matmul(stacked, features.swapaxes(-1, -2))
        return scores.reshape(*scores.shape[:-2], *theta.shape[-2:-1], self.classes, features.shape[-2])

    def _one_hot(self, labels: FloatArray, theta: FloatArray) -> FloatArray:
        """`(..., classes, records)` of 1.0 where the label is the class."""
        return as_floats(beside(labels, theta)[..., None, :] == np.arange(self.classes)[:, None])
