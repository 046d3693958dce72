"""The queue of records between the learner's owner and the rounds. No network, no clock.

Every source counts its batches from 0, or says where each of its live records stands. What was taken in already is passed over, a
gap between batches is refused, so a feeder that reconnects neither loses nor doubles a record.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from sottovoce_core.arrays import Batch, FloatArray, IntArray
from sottovoce_core.data import check_batch
from sottovoce_core.errors import DataError, FailedPrecondition, RemoteProtocolError
from sottovoce_core.losses.loss import Loss
from sottovoce_core.network.participation_schedule import Participation
from sottovoce_core.spec import RunSpec
from sottovoce_rpc.codec import from_tensor
from sottovoce_wire.v1 import learner_pb2

_MAX_BATCH_ROUNDS = 65_536
"""Rounds of one batch."""
MAX_SOURCES, _MAX_SOURCE_NAME_CHARS = 1_024, 128
"""Sources that are remembered for as long as the run lasts, and characters of what one calls itself."""


@dataclass(frozen=True, slots=True)
class RecordQueueState:
    """What an intake holds: all that it goes on from.

    Attributes:
        next: the batch that is due from each source.
        filled: rounds below this one have their records; of live records, have taken theirs.
        batches: taken in.
        waiting: records that wait, in parts, those of the first round first.
        rounds, sizes: which rounds they are for, ascending, and how many are for each; live ones are all for the round to come.
        last: position of the last record of each source that says positions.
        records: taken in.
    """

    next_sequences: dict[str, int]
    filled_rounds: int
    batch_count: int
    queued_batches: tuple[Batch, ...]
    rounds: IntArray
    sizes: IntArray
    last_positions: dict[str, int]
    records: int

    def to_packable(self) -> tuple[Any, ...]:
        """For a snapshot: all records in one table."""
        parts = [(each.features, each.labels) for each in self.queued_batches]
        rows = [np.concatenate(part) for part in zip(*parts, strict=True)]
        return (
            self.next_sequences,
            self.filled_rounds,
            self.batch_count,
            self.rounds,
            self.sizes,
            rows,
            self.last_positions,
            self.records,
        )

    @classmethod
    def from_packable(cls, value: tuple[Any, ...]) -> RecordQueueState:
        """`packed` backwards."""
        due, filled, count, rounds, sizes, rows, last, records = value
        return cls(due, filled, count, (Batch(*rows),) if rows else (), rounds, sizes, last, records)


class _New(NamedTuple):
    """The records of a batch that were not taken in before.

    Attributes:
        source: where they come from.
        position: of the last one in its source; None: the source counts batches.
        first: the first round that they are for.
        counts: records of each round from there on.
        features, labels: of the records.
    """

    source: str
    position: int | None
    first_round: int
    counts: list[int]
    features: FloatArray
    labels: FloatArray


class RecordQueue(ABC):
    """Records on their way to rounds.

    Args:
        n_features: features of a record.
        loss: of the run.
    """

    def __init__(self, n_features: int, loss: Loss) -> None:
        self.n_features, self._loss = n_features, loss
        self._next: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._nothing = Batch.empty(n_features)
        self.queued_records = 0
        """Records that wait for their round."""
        self.batch_count = self.records = 0
        """Taken in."""

    @staticmethod
    def from_spec(spec: RunSpec, n_features: int, attendance: Participation | None = None) -> RecordQueue:
        """The intake of a learner in a run.

        Args:
            spec: of the run.
            n_features: features of a record, with the intercept.
            attendance: the rounds in which the learner takes part, and learns something (default: all).
        """
        attendance = attendance or Participation((range(spec.rounds),), spec.rounds)
        if not spec.data.is_live:
            return PlannedRecordQueue(n_features, spec.loss, spec.rounds, attendance)
        most = spec.data.batch_size
        return LiveRecordQueue(
            n_features, spec.loss, attendance, 1 if most == "all" else most, waits_for_record=spec.clock.mode != "paced"
        )

    @property
    def queued_bytes(self) -> int:
        """Bytes of the records that wait."""
        return 8 * (self.n_features + 1) * self.queued_records

    def get_next_sequence(self, source: str) -> int:
        """The batch that is due from a source."""
        return self._next.get(source, 0)

    def get_position(self, source: str) -> int | None:
        """Where the last record of a source stands in it; None: there is none, or it does not say."""
        return self._last.get(source)

    def has_batch(self, batch: learner_pb2.SampleBatch) -> bool:
        """Is all of a batch taken in already?"""
        if batch.positions:
            return max(batch.positions) <= self._last.get(batch.source, -1)
        return batch.sequence < self.get_next_sequence(batch.source)

    def prepare(self, batch: learner_pb2.SampleBatch) -> _New | None:
        """What is new in a batch, checked, and changes nothing; None: all of it was taken in already.

        Raises:
            FailedPrecondition: an earlier batch of the source is missing.
            DataError: the records do not fit the run. The message quotes no record value.
            RemoteProtocolError: a malformed tensor, rounds that have their records already, or more sources or rounds than
                are kept.
        """
        self._require_bounds(batch)
        if self.has_batch(batch):
            return None
        due = self.get_next_sequence(batch.source)
        if not batch.positions and batch.sequence > due:
            raise FailedPrecondition(f"source {batch.source!r} must send batch {due} next, got batch {batch.sequence}")
        features, labels = from_tensor(batch.features), from_tensor(batch.labels)
        check_batch(features, labels, self.n_features, self._loss)
        first, counts = self._rounds_of(batch, len(labels))
        old = self._known(batch, len(labels))
        position = batch.positions[-1] if batch.positions else None
        return _New(batch.source, position, first, counts, features[old:], labels[old:])

    def add(self, new: _New) -> None:
        """Hold what is new for its rounds."""
        self._file(new.first_round, new.counts, new.features, new.labels)
        self._next[new.source] = self.get_next_sequence(new.source) + (new.position is None)
        if new.position is not None:
            self._last[new.source] = new.position
        self.batch_count += 1
        self.records += len(new.labels)

    def put(self, batch: learner_pb2.SampleBatch) -> None:
        """Take a batch in, whole or not at all; of one with positions, what is new; errors as `prepare`."""
        if (new := self.prepare(batch)) is not None:
            self.add(new)

    def replay(self, first: int, batch: learner_pb2.SampleBatch) -> None:
        """Take in again what was kept; errors as `prepare`.

        Args:
            first: the first round that it was for.
            batch: what was kept.
        """
        self.put(batch)

    @property
    @abstractmethod
    def filled_rounds(self) -> int:
        """Rounds below this one have their records."""

    @abstractmethod
    def take(self, t: int, records: int | None = None) -> Batch:
        """The records of a round, once; rounds come in order.

        Args:
            t: the round, below `filled`.
            records: how many live ones, where a log says so.
        """

    @abstractmethod
    def get_state(self) -> RecordQueueState:
        """What it holds now."""

    def restore(self, taken: RecordQueueState) -> None:
        """Hold what another one held."""
        self._next, self._last = dict(taken.next_sequences), dict(taken.last_positions)
        self.batch_count, self.records = taken.batch_count, taken.records
        self.queued_records = sum(each.size for each in taken.queued_batches)

    def _require_bounds(self, batch: learner_pb2.SampleBatch) -> None:
        if len(batch.source) > _MAX_SOURCE_NAME_CHARS:
            raise RemoteProtocolError(
                f"a source has at most {_MAX_SOURCE_NAME_CHARS} characters, got {len(batch.source)}"
            )
        if batch.source not in self._next and len(self._next) >= MAX_SOURCES:
            raise RemoteProtocolError(f"records must come from at most {MAX_SOURCES} sources, got one more")
        if len(batch.counts) > _MAX_BATCH_ROUNDS:
            raise RemoteProtocolError(f"a batch must be of at most {_MAX_BATCH_ROUNDS} rounds, got {len(batch.counts)}")

    def _known(self, batch: learner_pb2.SampleBatch, records: int) -> int:
        """How many records of a batch, its first ones, are here already."""
        if not batch.positions:
            return 0
        positions = np.array(batch.positions, np.uint64)
        if len(positions) != records or (positions[1:] <= positions[:-1]).any():
            raise RemoteProtocolError(
                f"positions must be one for each of {records} records, each above the one before it, got {len(positions)}"
            )
        last = self._last.get(batch.source)
        return 0 if last is None else int(np.searchsorted(positions, np.uint64(last), side="right"))

    def _as(self, filled: int, waiting: tuple[Batch, ...], rounds: IntArray, sizes: IntArray) -> RecordQueueState:
        return RecordQueueState(
            dict(self._next), filled, self.batch_count, waiting, rounds, sizes, dict(self._last), self.records
        )

    @abstractmethod
    def _rounds_of(self, batch: learner_pb2.SampleBatch, records: int) -> tuple[int, list[int]]:
        """The first round that a batch is for, and how many records each round from there on has of it."""

    @abstractmethod
    def _file(self, first: int, counts: list[int], features: FloatArray, labels: FloatArray) -> None:
        """Hold records for their rounds."""


_NO_ROUNDS: IntArray = np.empty(0, np.int64)


class _Fed:
    """Records of rounds one after the other, which came together.

    Args:
        records: all of them.
        first: the first round.
        counts: how many are for each round.
    """

    def __init__(self, records: Batch, first: int, counts: Iterable[int]) -> None:
        self._records, self.first, self._ends = records, first, list(accumulate(counts, initial=0))
        self._bounded: tuple[FloatArray, FloatArray] | None = None

    @property
    def until(self) -> int:
        """The round after the last one."""
        return self.first + len(self._ends) - 1

    def of(self, t: int, loss: Loss) -> Batch:
        """Those of a round; the loss's bounds are enforced for all rounds at once, which takes a tenth of the time."""
        features, labels = self._records.features, self._records.labels
        if self._bounded is None:
            self._bounded = loss.enforce_bounds(features, labels)
        rows = slice(self._ends[t - self.first], self._ends[t - self.first + 1])
        bounded = Batch.from_bounded_records(loss, self._bounded[0][rows], self._bounded[1][rows])
        return Batch.with_bounded_batch(features[rows], labels[rows], bounded)

    def since(self, t: int) -> tuple[Batch, IntArray, IntArray]:
        """Those of round t and later, the rounds that they are for, and how many are for each."""
        k = max(t - self.first, 0)
        a, sizes = self._ends[k], np.diff(self._ends[k:])
        rounds = np.flatnonzero(sizes)
        return Batch(self._records.features[a:], self._records.labels[a:]), self.first + k + rounds, sizes[rounds]


class PlannedRecordQueue(RecordQueue):
    """Every record is for a round that it names, or the next that has none yet.

    Args:
        n_features, loss: as `RecordQueue`.
        rounds: planned rounds of the run.
        attendance: the rounds in which the learner takes part, and learns something.
    """

    def __init__(self, n_features: int, loss: Loss, rounds: int, attendance: Participation) -> None:
        super().__init__(n_features, loss)
        self._rounds, self._attendance = rounds, attendance
        self._fed: deque[_Fed] = deque()
        self._filled = self._due = 0

    @property
    def filled_rounds(self) -> int:
        """Rounds below this one have their records."""
        return self._filled

    def take(self, t: int, records: int | None = None) -> Batch:
        """The records of a round."""
        while self._fed and self._fed[0].until <= t:
            self._fed.popleft()
        if t < self._due or not self._fed or t < self._fed[0].first:
            return self._nothing
        self._due, taken = t + 1, self._fed[0].of(t, self._loss)
        self.queued_records -= taken.size
        return taken

    def replay(self, first: int, batch: learner_pb2.SampleBatch) -> None:
        """For the rounds that it was for then."""
        batch.first_round = first
        self.put(batch)

    def get_state(self) -> RecordQueueState:
        """What it holds now."""
        held = [part for fed in self._fed if fed.until > self._due and (part := fed.since(self._due))[0].size]
        waiting, rounds, sizes = zip(*held, strict=True) if held else ((), (_NO_ROUNDS,), (_NO_ROUNDS,))
        return self._as(self._filled, waiting, np.concatenate(rounds), np.concatenate(sizes))

    def restore(self, taken: RecordQueueState) -> None:
        """Hold what another one held."""
        super().restore(taken)
        self._filled, self._due = taken.filled_rounds, 0
        self._fed.clear()
        if len(taken.rounds):
            first = int(taken.rounds[0])
            counts = np.zeros(taken.rounds[-1] + 1 - first, np.int64)
            counts[taken.rounds - first] = taken.sizes
            self._fed.append(_Fed(_joined(taken.queued_batches), first, counts.tolist()))

    def _rounds_of(self, batch: learner_pb2.SampleBatch, records: int) -> tuple[int, list[int]]:
        if batch.positions:
            raise RemoteProtocolError(
                "positions must be left out: this run knows which record is for which round; number the batches (sequence)"
            )
        counts = list(batch.counts) or [records]
        first = batch.first_round if batch.HasField("first_round") else self._attendance.next_round(self._filled)
        if sum(counts) != records:
            raise DataError(f"the counts of a batch must add up to its records, {records}, got {sum(counts)}")
        if first < self._filled:
            raise RemoteProtocolError(f"records must be for round {self._filled} or later, got round {first}")
        if first + len(counts) > self._rounds:
            raise DataError(
                f"the run has rounds 0 to {self._rounds - 1}, got records for round {first + len(counts) - 1}"
            )
        return first, counts

    def _file(self, first: int, counts: list[int], features: FloatArray, labels: FloatArray) -> None:
        self._filled = first + len(counts)
        there = [t in self._attendance for t in range(first, self._filled)]
        if not all(there):
            kept = np.repeat(there, counts)
            features, labels = features[kept], labels[kept]
            counts = [count * here for count, here in zip(counts, there, strict=True)]
        if len(labels):
            self._fed.append(_Fed(Batch(features, labels), first, counts))
            self.queued_records += len(labels)


class LiveRecordQueue(RecordQueue):
    """Records wait in the order in which they came, and a round takes what is there.

    Args:
        n_features, loss: as `RecordQueue`.
        attendance: the rounds in which the learner takes part: in others it learns nothing, and records wait.
        most: records that a round takes.
        patient: a round waits for a record; else it takes what is there, if it is nothing.
    """

    def __init__(
        self, n_features: int, loss: Loss, attendance: Participation, most: int, *, waits_for_record: bool
    ) -> None:
        super().__init__(n_features, loss)
        self._attendance, self._most, self._patient = attendance, most, waits_for_record
        self._queue: deque[Batch] = deque()
        self._done = 0

    @property
    def filled_rounds(self) -> int:
        """Rounds below this one have taken their records, or would find some."""
        return self._done + max(-(-self.queued_records // self._most), 0 if self._patient else 1)

    def take(self, t: int, records: int | None = None) -> Batch:
        """The oldest records, as many as a round takes."""
        self._done = t + 1
        if t not in self._attendance:
            return self._nothing
        wanted = min(self.queued_records, self._most if records is None else records)
        parts = []
        while wanted:
            first = self._queue.popleft()
            if first.size > wanted:
                self._queue.appendleft(Batch(first.features[wanted:], first.labels[wanted:]))
                first = Batch(first.features[:wanted], first.labels[:wanted])
            parts.append(first)
            wanted -= first.size
        taken = _joined(parts) if parts else self._nothing
        self.queued_records -= taken.size
        return taken

    def get_state(self) -> RecordQueueState:
        """What it holds now."""
        rounds, sizes = ([self._done], [self.queued_records]) if self.queued_records else ((), ())
        return self._as(self._done, tuple(self._queue), np.array(rounds, np.int64), np.array(sizes, np.int64))

    def restore(self, taken: RecordQueueState) -> None:
        """Hold what another one held."""
        super().restore(taken)
        self._queue, self._done = deque(taken.queued_batches), taken.filled_rounds

    def _rounds_of(self, batch: learner_pb2.SampleBatch, records: int) -> tuple[int, list[int]]:
        if batch.HasField("first_round") or batch.counts:
            raise RemoteProtocolError(
                "first_round and counts must be left out: the rounds of this run take live records as they come"
            )
        return self._done, [records]

    def _file(self, first: int, counts: list[int], features: FloatArray, labels: FloatArray) -> None:
        if len(labels):
            self._queue.append(Batch(features, labels))
            self.queued_records += len(labels)


def _joined(parts: Sequence[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    return Batch(np.concatenate([part.features for part in parts]), np.concatenate([part.labels for part in parts]))
