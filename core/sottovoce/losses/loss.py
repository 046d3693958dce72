"""What a loss of one record is: its constants, on which guarantees rest, and what makes them true.

Every loss is a data part and an exact ridge: `l(theta; a, b) = phi(theta; a, b) + (r/2) ||theta||^2`. A record's gradient has
the same two parts; clipping bounds the data part. Most losses are margin losses, `phi(a.theta, b)`.

Shapes. `theta` is `(dim,)` beside `features (records, m)`, or `(learners, replicas, dim)` beside `(learners, records, m)`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from sottovoce.arrays import Batch, FloatArray


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


def scale_rows(features: FloatArray, bound: float) -> FloatArray:
    """Rows of l2 norm above `bound` scaled down to it, each by its own norm alone."""
    norms = np.sqrt(np.vecdot(features, features))
    if not np.count_nonzero(norms > bound):
        return features
    factors: FloatArray = bound / np.maximum(norms, bound)
    return features * factors[..., None]
