"""Records of linear losses, read off their gradients: no search is needed.

A margin loss has the gradient `phi'(z) a`, the softmax the outer product of `p - e_b` and a: the record up to a factor. The
appended intercept is 1 before rows are scaled, which gives the factor.
"""

from __future__ import annotations

import numpy as np

from sottovoce.arrays import Batch, FloatArray
from sottovoce.errors import SpecError
from sottovoce.lab.attacks.gradients import Added
from sottovoce.losses import Loss
from sottovoce.losses.linear import Softmax

_TINY = 1e-300


def read(
    gradients: FloatArray, loss: Loss, *, intercept: bool, nonnegative: bool = False
) -> tuple[FloatArray, FloatArray]:
    """The records whose data gradients these are.

    Noise is met by the best fit of rank one. The sign: the true class has the largest residual, and it is negative. A margin
    loss leaves the sign open; the intercept tells it, or features that cannot be negative do. A gradient of zero, of a record
    that is fitted exactly, tells nothing.

    Args:
        gradients: `(..., dim)`, each of one record.
        loss: linear in the record: softmax, or a margin loss of two classes.
        intercept: the last feature is a constant 1; else rows come at the loss's feature bound.
        nonnegative: the features are known not to be negative, such as pixels.

    Returns:
        Records `(..., features)`, the intercept included, and labels `(...)`, which mean nothing for squared error.

    Raises:
        SpecError: the loss is a network of neurons.
    """
    if loss.heavy:
        raise SpecError("a network's gradient is no record: give it to sottovoce.lab.attacks.inversion")
    if isinstance(loss, Softmax):
        matrices = gradients.reshape(*gradients.shape[:-1], loss.classes, -1)
        left, _, right = np.linalg.svd(matrices, full_matrices=False)
        residuals, rows = left[..., 0], right[..., 0, :]
        largest = np.abs(residuals).argmax(axis=-1)
        rows = rows * -np.sign(np.take_along_axis(residuals, largest[..., None], axis=-1))
        labels = np.asarray(largest, dtype=np.float64)
    else:
        known = gradients[..., -1] if intercept and not nonnegative else gradients.sum(axis=-1)
        labels = np.asarray(known < 0, dtype=np.float64)
        rows = gradients * np.where(known < 0, -1.0, 1.0)[..., None]
    if intercept:
        return rows / np.maximum(np.abs(rows[..., -1:]), _TINY), labels
    return rows * (loss.feature_bound / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), _TINY)), labels


def read_stream(
    found: Added, loss: Loss, *, intercept: bool, nonnegative: bool = False, most: int = 64
) -> tuple[FloatArray, FloatArray]:
    """Round by round, the records of a learner that gets one a round.

    Where gradients are means over all records so far, those read before are taken out, so that errors add up.

    Args:
        found: what the learner added.
        loss: as for `read`.
        intercept, nonnegative: as for `read`.
        most: rounds to read.

    Returns:
        Records `(rounds, replicas, features)` and labels `(rounds, replicas)`.
    """
    if not found.so_far:
        return read(found.gradients[:most], loss, intercept=intercept, nonnegative=nonnegative)
    replicas = [_peeled(found, loss, r, intercept, nonnegative, most) for r in range(found.at.shape[1])]
    return np.stack([rows for rows, _ in replicas], axis=1), np.stack([labels for _, labels in replicas], axis=1)


def _peeled(
    found: Added, loss: Loss, replica: int, intercept: bool, nonnegative: bool, most: int
) -> tuple[FloatArray, FloatArray]:
    """The records of one replica."""
    count, dim = min(most, len(found.rounds)), found.at.shape[-1]
    rows, labels = np.empty((count, dim // getattr(loss, "classes", 1))), np.empty(count)
    for t in range(count):
        gradient = (t + 1) * found.gradients[t, replica]
        if t:
            gradient = gradient - loss.gradient_sum(found.at[t, replica], Batch(*loss.enforce(rows[:t], labels[:t])))
        rows[t], labels[t] = read(gradient, loss, intercept=intercept, nonnegative=nonnegative)
    return rows, labels
