"""The history gradient `d_t(theta)`: the mean gradient of all records seen so far (Chen & Wang 2025, section II).

Two ways, chosen by the loss: exact statistics where it is quadratic in theta and not clipped (constant time and memory), and
the records themselves for everything else (time and memory grow with the rounds).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from sottovoce.arrays import Batch, FloatArray
from sottovoce.losses.loss import Loss, beside, mean_gradient
from sottovoce.losses.margin import scores_of
from sottovoce.losses.quadratic import Quadratic


class History(Protocol):
    """All that a learner remembers of its records: a value, `observe` returns the next one."""

    def observe(self, batch: Batch) -> Self:
        """The history with one more batch. Its records obey the loss's bounds (`Loss.enforce`)."""
        ...

    def gradient(self, theta: FloatArray) -> FloatArray:
        """Mean data gradient at `theta (..., dim)` over the records seen (zero before the first), without the ridge."""
        ...


@dataclass(frozen=True, slots=True)
class _Log:
    """Rows along axis -2 that only grow. Values share one buffer: appending to the newest writes in place, else copies."""

    buffer: FloatArray
    length: int
    filled: list[int]  # of the shared buffer: how far some value has written it

    @classmethod
    def empty(cls, like: FloatArray) -> _Log:
        return cls(np.empty((*like.shape[:-2], 8, like.shape[-1])), 0, [0])

    @property
    def rows(self) -> FloatArray:
        return self.buffer[..., : self.length, :]

    def append(self, rows: FloatArray) -> _Log:
        new = self.length + rows.shape[-2]
        buffer, filled = self.buffer, self.filled
        if new > buffer.shape[-2] or filled[0] != self.length:
            buffer = np.empty((*buffer.shape[:-2], max(2 * new, 8), buffer.shape[-1]))
            buffer[..., : self.length, :] = self.rows
            filled = [self.length]
        buffer[..., self.length : new, :] = rows
        filled[0] = new
        return _Log(buffer, new, filled)

    def packed(self) -> FloatArray:
        """For a snapshot: what is in use of the buffer."""
        return self.rows

    @classmethod
    def unpacked(cls, rows: FloatArray) -> _Log:
        """`packed` backwards."""
        return cls(rows, rows.shape[-2], [rows.shape[-2]])


@dataclass(frozen=True, slots=True)
class RecordHistory:
    """Keeps the records. Clipping is per record, before averaging: clipping the mean would not be 1/t-sensitive."""

    loss: Loss
    features: _Log | None = None
    labels: _Log | None = None
    present: _Log | None = None  # only where stacked learners have unequal numbers of records

    def observe(self, batch: Batch) -> RecordHistory:
        if batch.size == 0:
            return self
        labels = batch.labels[..., None]
        if self.features is None or self.labels is None:
            seen = 0
            features_log, labels_log, present_log = _Log.empty(batch.features), _Log.empty(labels), None
        else:
            seen = self.features.length
            features_log, labels_log, present_log = self.features, self.labels, self.present
        if batch.present is not None or present_log is not None:
            if present_log is None:
                present_log = _Log.empty(labels).append(np.ones((*labels.shape[:-2], seen, 1)))
            present = np.ones_like(batch.labels) if batch.present is None else batch.present
            present_log = present_log.append(present[..., None])
        return RecordHistory(self.loss, features_log.append(batch.features), labels_log.append(labels), present_log)

    @property
    def records(self) -> Batch | None:
        """All records seen; None before the first."""
        if self.features is None or self.labels is None:
            return None
        present = None if self.present is None else self.present.rows[..., 0]
        return Batch(self.features.rows, self.labels.rows[..., 0], present)

    def gradient(self, theta: FloatArray) -> FloatArray:
        records = self.records
        return np.zeros_like(theta) if records is None else mean_gradient(self.loss, theta, records)


FOLD = 32
"""Records that exact statistics keep as they are before adding them in: one update of a large matrix instead of many."""


@dataclass(frozen=True, slots=True)
class QuadraticHistory:
    """Exact statistics of an unclipped quadratic loss: `S = sum a a^T`, `q = sum phi'(0, b) a`, `d = (c S theta + q) / count`.

    `(..., dim, dim)` and `(..., dim)` numbers, and fewer than `FOLD` records not yet in them: constant time per round.
    """

    loss: Quadratic
    S: FloatArray | None = None
    q: FloatArray | None = None
    count: FloatArray | None = None
    recent: tuple[_Log, _Log] | None = None  # features, and phi'(0, b) as a column

    def observe(self, batch: Batch) -> QuadraticHistory:
        if batch.size == 0:
            return self
        features = batch.features
        slopes = self.loss.slope(np.zeros_like(batch.labels), batch.labels)[..., None]
        count = np.full(batch.labels.shape[:-1], float(batch.size)) if self.count is None else self.count + batch.size
        if batch.present is not None:  # what is padding counts for nothing, and neither do rows of zeros
            features = features * batch.present[..., None]
            count = count - batch.size + batch.present.sum(axis=-1)
        logs = self.recent or (_Log.empty(features), _Log.empty(slopes))
        recent = (logs[0].append(features), logs[1].append(slopes))
        if recent[0].length < FOLD:
            return QuadraticHistory(self.loss, self.S, self.q, count, recent)
        rows, column = recent[0].rows, recent[1].rows
        S, q = np.matmul(rows.swapaxes(-1, -2), rows), np.matmul(column.swapaxes(-1, -2), rows)[..., 0, :]
        if self.S is not None and self.q is not None:
            S += self.S  # into the new array: old values stay as they are
            q += self.q
        return QuadraticHistory(self.loss, S, q, count)

    def gradient(self, theta: FloatArray) -> FloatArray:
        if self.count is None:
            return np.zeros_like(theta)
        curvature, stacked = self.loss.curvature, theta.ndim > self.count.ndim + 1
        total: FloatArray | float = 0.0
        if self.S is not None and self.q is not None:
            total = curvature * np.matmul(theta, self.S) + (self.q[..., None, :] if stacked else self.q)
        if self.recent is not None:
            features, at_zero = self.recent[0].rows, beside(self.recent[1].rows[..., 0], theta)
            total = total + np.matmul(curvature * scores_of(theta, features) + at_zero, features)
        count = self.count[..., None, None] if stacked else self.count[..., None]
        gradient: FloatArray = total / np.maximum(count, 1.0)
        return gradient


def start_history(loss: Loss) -> History:
    """The cheapest exact history for a loss."""
    if isinstance(loss, Quadratic) and loss.clip_norm is None:
        return QuadraticHistory(loss)
    return RecordHistory(loss)
