"""History gradient `d_t(theta)`: the mean gradient of all records seen so far (Chen & Wang 2025, section II).

Two ways, chosen by the loss: exact statistics where it is quadratic in theta and not clipped (constant time and memory), and
the records themselves for everything else (time and memory grow with the rounds).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from sottovoce_core.arrays import Batch, FloatArray, Scalars
from sottovoce_core.losses.linear import QuadraticLoss
from sottovoce_core.losses.loss import Loss, add_replica_axis, compute_scores, mean_gradient


class GradientHistory(Protocol):
    """A learner's memory of its records: an immutable value; `observe` returns the next one."""

    def observe(self, batch: Batch) -> Self:
        """Return the history with one more batch, whose records satisfy the loss's bounds (`Loss.enforce_bounds`)."""
        ...

    def gradient(self, theta: FloatArray) -> FloatArray:
        """Return the mean data gradient at `theta (..., dim)` over the records seen (0 before the first), without the ridge."""
        ...


@dataclass(frozen=True, slots=True)
class _Log:
    """Append-only rows along axis -2. Values share one buffer: appending to the newest writes in place, else copies."""

    buffer: FloatArray
    length: int
    filled: list[int]  # rows of the shared buffer that are in use by any value

    @classmethod
    def empty(cls, like: FloatArray, more: int = 0) -> _Log:
        """Return an empty log for rows of this shape, with `more` extra columns."""
        return cls(np.empty((*like.shape[:-2], 8, like.shape[-1] + more)), 0, [0])

    @property
    def rows(self) -> FloatArray:
        return self.buffer[..., : self.length, :]

    def append(self, rows: FloatArray) -> _Log:
        longer, new = self.extend(rows.shape[-2])
        new[...] = rows
        return longer

    def extend(self, rows: int) -> tuple[_Log, FloatArray]:
        """Return the log with `rows` more rows, and those rows, which the caller must write."""
        new = self.length + rows
        buffer, filled = self.buffer, self.filled
        if new > buffer.shape[-2] or filled[0] != self.length:
            buffer = np.empty((*buffer.shape[:-2], max(2 * new, 8), buffer.shape[-1]))
            buffer[..., : self.length, :] = self.rows
            filled = [self.length]
        filled[0] = new
        return _Log(buffer, new, filled), buffer[..., self.length : new, :]

    def pack(self) -> FloatArray:
        """Return the used rows, for a snapshot."""
        return self.rows

    @classmethod
    def unpack(cls, rows: FloatArray) -> _Log:
        """Restore the log from the rows of `pack`."""
        return cls(rows, rows.shape[-2], [rows.shape[-2]])


@dataclass(frozen=True, slots=True)
class RecordHistory:
    """History that keeps the records. It clips per record, before averaging: a clipped mean would not be 1/t-sensitive."""

    loss: Loss
    features: _Log | None = None
    labels: _Log | None = None
    present: _Log | None = None  # only if stacked learners have unequal numbers of records

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
        if batch.mask is not None or present_log is not None:
            if present_log is None:
                present_log = _Log.empty(labels).append(np.ones((*labels.shape[:-2], seen, 1)))
            present = np.ones_like(batch.labels) if batch.mask is None else batch.mask
            present_log = present_log.append(present[..., None])
        return RecordHistory(self.loss, features_log.append(batch.features), labels_log.append(labels), present_log)

    @property
    def records(self) -> Batch | None:
        """Records seen so far; None before the first."""
        if self.features is None or self.labels is None:
            return None
        present = None if self.present is None else self.present.rows[..., 0]
        return Batch(self.features.rows, self.labels.rows[..., 0], present)

    def gradient(self, theta: FloatArray) -> FloatArray:
        records = self.records
        return np.zeros_like(theta) if records is None else mean_gradient(self.loss, theta, records)


_ZERO = np.zeros(())
MAX_PENDING_RECORDS = 32
"""Number of records buffered before one update of the exact statistics, to update the large matrix less often."""


@dataclass(frozen=True, slots=True)
class QuadraticHistory:
    """Exact statistics of an unclipped quadratic loss: the moments `M = sum r r^T` of rows `r = (a, phi'(0, b))`.

    `d = (c theta, 1) M / count`, without its last number. M has `(..., dim + 1, dim + 1)` numbers, and fewer than
    `MAX_PENDING_RECORDS` rows are not yet in it: constant time per round.
    """

    loss: QuadraticLoss
    moments: FloatArray | None = None
    pending_rows: _Log | None = None
    count: Scalars = 0.0  # (..., 1) if stacked learners have unequal numbers of records

    def observe(self, batch: Batch) -> QuadraticHistory:
        if batch.size == 0:
            return self
        recent, new = (self.pending_rows or _Log.empty(batch.features, 1)).extend(batch.size)
        new[..., :-1] = batch.features
        new[..., -1] = self.loss.slope(_ZERO, batch.labels)
        count = self.count + batch.size
        if batch.mask is not None:  # padding does not count: its rows become zero
            new *= batch.mask[..., None]
            count = self.count + batch.mask.sum(axis=-1, keepdims=True)
        if recent.length < MAX_PENDING_RECORDS:
            return QuadraticHistory(self.loss, self.moments, recent, count)
        rows = recent.rows
        moments = np.matmul(rows.swapaxes(-1, -2), rows)
        if self.moments is not None:
            moments += self.moments  # into the new array: old values stay as they are
        return QuadraticHistory(self.loss, moments, None, count)

    def gradient(self, theta: FloatArray) -> FloatArray:
        if self.moments is None and self.pending_rows is None:
            return np.zeros_like(theta)
        point = np.empty((*theta.shape[:-1], theta.shape[-1] + 1))
        np.multiply(self.loss.curvature, theta, out=point[..., :-1])
        point[..., -1] = 1.0
        total = np.zeros_like(point) if self.moments is None else np.matmul(point, self.moments)
        if self.pending_rows is not None:
            rows = self.pending_rows.rows
            total = total + np.matmul(compute_scores(point, rows), rows)  # may have more learners than theta
        gradient: FloatArray = total[..., :-1]
        gradient /= (
            self.count if isinstance(self.count, float) else np.maximum(add_replica_axis(self.count, theta), 1.0)
        )
        return gradient


def start_history(loss: Loss) -> GradientHistory:
    """Return the cheapest exact history for a loss."""
    if isinstance(loss, QuadraticLoss) and loss.clip_norm is None:
        return QuadraticHistory(loss)
    return RecordHistory(loss)
