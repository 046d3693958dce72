"""The intake: records from the learner's owner, cut into rounds. No network, no clock.

Every source counts its batches from 0. A batch that was taken in already is passed over, a gap is refused, so a feeder
that reconnects neither loses nor doubles a record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from sottovoce.arrays import Batch, FloatArray
from sottovoce.data import check_batch
from sottovoce.errors import DataError, NotReady, RemoteProtocolError
from sottovoce.losses.loss import Loss
from sottovoce.network.roster import Attendance
from sottovoce_rpc.codec import from_tensor
from sottovoce_wire.v1 import learner_pb2

_MOST_COUNTS = 65_536
"""Rounds of one batch."""
MOST_SOURCES, _LONGEST_NAME = 1_024, 128
"""Sources that are remembered for as long as the run lasts, and characters of what one calls itself."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What an intake holds: all that it goes on from.

    Attributes:
        next: the batch that is due from each source.
        filled: rounds below this one have their records.
        batches: taken in.
        waiting: records that wait for their round.
    """

    next: dict[str, int]
    filled: int
    batches: int
    waiting: dict[int, Batch]

    def packed(self) -> tuple[Any, ...]:
        """For a snapshot: all records in one table, and how many are of which round."""
        batches = list(self.waiting.values())
        sizes = np.array([batch.size for batch in batches], np.int64)
        rows = [
            np.concatenate(parts) for parts in zip(*((each.features, each.labels) for each in batches), strict=True)
        ]
        return self.next, self.filled, self.batches, np.array(list(self.waiting), np.int64), sizes, rows

    @classmethod
    def unpacked(cls, value: tuple[Any, ...]) -> Taken:
        """`packed` backwards."""
        due, filled, count, rounds, sizes, rows = value
        cut = (np.split(each, np.cumsum(sizes)[:-1]) for each in rows)
        return cls(due, filled, count, dict(zip(rounds.tolist(), map(Batch, *cut), strict=True)) if rows else {})


class Intake:
    """Batches by round.

    Args:
        n_features: features of a record.
        loss: of the run.
        rounds: planned rounds of the run.
        attendance: the rounds in which the learner takes part, and learns something (default: all).
    """

    def __init__(self, n_features: int, loss: Loss, rounds: int, attendance: Attendance | None = None) -> None:
        self._n_features, self._loss, self._rounds = n_features, loss, rounds
        self._attendance = attendance or Attendance((range(rounds),), rounds)
        self._next: dict[str, int] = {}
        self._batches: dict[int, Batch] = {}
        self._nothing = Batch.empty(n_features)
        self.filled = 0
        """Rounds below this one have their records."""
        self.held = 0
        """Bytes of records that wait for their round."""
        self.batches = 0
        """Batches taken in."""

    def next_sequence(self, source: str) -> int:
        """The batch that is due from a source."""
        return self._next.get(source, 0)

    def put(self, batch: learner_pb2.SampleBatch, keep: Callable[[int], None] = lambda first: None) -> None:
        """Take a batch in, whole or not at all.

        Args:
            batch: what came.
            keep: called with the first round of a batch that is right, before it counts; what it raises leaves all as it was.

        Raises:
            NotReady: an earlier batch of the source is missing.
            DataError: the records do not fit the run. The message quotes no record value.
            RemoteProtocolError: a malformed tensor, rounds that have their records already, or more sources or rounds than
                are kept.
        """
        self._require_bounds(batch)
        due = self.next_sequence(batch.source)
        if batch.sequence < due:
            return
        if batch.sequence > due:
            raise NotReady(f"source {batch.source!r} must send batch {due} next, got batch {batch.sequence}")
        features, labels = from_tensor(batch.features), from_tensor(batch.labels)
        check_batch(features, labels, self._n_features, self._loss)
        first, counts = self._rounds_of(batch, len(labels))
        keep(first)
        self._file(first, counts, features, labels)
        self._next[batch.source] = due + 1
        self.batches += 1

    def taken(self) -> Taken:
        """What it holds now."""
        return Taken(dict(self._next), self.filled, self.batches, dict(self._batches))

    def restore(self, taken: Taken) -> None:
        """Hold what another one held."""
        self._next, self._batches = dict(taken.next), dict(taken.waiting)
        self.filled, self.batches = taken.filled, taken.batches
        self.held = sum(map(_bytes, self._batches.values()))

    def take(self, t: int) -> Batch:
        """The records of a round below `filled`, once."""
        taken = self._batches.pop(t, self._nothing)
        self.held -= _bytes(taken)
        return taken

    def _require_bounds(self, batch: learner_pb2.SampleBatch) -> None:
        if len(batch.source) > _LONGEST_NAME:
            raise RemoteProtocolError(f"a source has at most {_LONGEST_NAME} characters, got {len(batch.source)}")
        if batch.source not in self._next and len(self._next) >= MOST_SOURCES:
            raise RemoteProtocolError(f"records must come from at most {MOST_SOURCES} sources, got one more")
        if len(batch.counts) > _MOST_COUNTS:
            raise RemoteProtocolError(f"a batch must be of at most {_MOST_COUNTS} rounds, got {len(batch.counts)}")

    def _rounds_of(self, batch: learner_pb2.SampleBatch, records: int) -> tuple[int, list[int]]:
        counts = list(batch.counts) or [records]
        first = batch.first_round if batch.HasField("first_round") else self._attendance.following(self.filled)
        if sum(counts) != records:
            raise DataError(f"the counts of a batch must add up to its records, {records}, got {sum(counts)}")
        if first < self.filled:
            raise RemoteProtocolError(f"records must be for round {self.filled} or later, got round {first}")
        if first + len(counts) > self._rounds:
            raise DataError(
                f"the run has rounds 0 to {self._rounds - 1}, got records for round {first + len(counts) - 1}"
            )
        return first, counts

    def _file(self, first: int, counts: list[int], features: FloatArray, labels: FloatArray) -> None:
        ends = list(accumulate(counts))
        for t, (count, end) in enumerate(zip(counts, ends, strict=True), start=first):
            if count and t in self._attendance:
                self._batches[t] = filed = Batch(features[end - count : end], labels[end - count : end])
                self.held += _bytes(filed)
        self.filled = first + len(counts)


def _bytes(batch: Batch) -> int:
    return batch.features.nbytes + batch.labels.nbytes
