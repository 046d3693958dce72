"""Queue of records between the learner's owner and the rounds. No network or clock.

Every source numbers its batches from 0, or gives a position for each live record. Known records are skipped and a gap
between batches is rejected, so a feeder that reconnects neither loses nor duplicates a record.
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
"""Maximum number of rounds of one batch."""
MAX_SOURCES, _MAX_SOURCE_NAME_CHARS = 1_024, 128
"""Maximum number of sources, remembered for the whole run, and maximum length of a source name in characters."""


@dataclass(frozen=True, slots=True)
class RecordQueueState:
    """State of a record queue.

    Attributes:
        next_sequences: number of the next batch of each source.
        filled_rounds: rounds below this one have their records; of live records, have taken theirs.
        batch_count: number of accepted batches.
        queued_batches: queued records in parts, those of the first round first.
        rounds, sizes: rounds of the queued records, ascending, and the number of records for each; live records are all
            for the next round.
        last_positions: position of the last record of each source that gives positions.
        records: number of accepted records.
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
        """Return the fields for a snapshot, with all records in one table."""
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
        """Restore the state from the fields of `to_packable`."""
        due, filled, count, rounds, sizes, rows, last, records = value
        return cls(due, filled, count, (Batch(*rows),) if rows else (), rounds, sizes, last, records)


class _NewRecords(NamedTuple):
    """Records of a batch that were not accepted before.

    Attributes:
        source: name of their source.
        position: position of the last one in its source; None: the source numbers batches.
        first_round: first round that they are for.
        counts: number of records of each round from there on.
        features, labels: the records.
    """

    source: str
    position: int | None
    first_round: int
    counts: list[int]
    features: FloatArray
    labels: FloatArray


class RecordQueue(ABC):
    """Records that wait for their rounds.

    Args:
        n_features: features of a record.
        loss: loss of the run.
    """

    def __init__(self, n_features: int, loss: Loss) -> None:
        self.n_features, self._loss = n_features, loss
        self._next_sequences: dict[str, int] = {}
        self._last_positions: dict[str, int] = {}
        self._empty_batch = Batch.empty(n_features)
        self.queued_records = 0
        """Number of queued records."""
        self.batch_count = self.records = 0
        """Number of accepted batches and records."""

    @staticmethod
    def from_spec(spec: RunSpec, n_features: int, participation: Participation | None = None) -> RecordQueue:
        """Build the queue of a learner in a run.

        Args:
            spec: run spec.
            n_features: features of a record, with the intercept.
            participation: rounds in which the learner participates (default: all).
        """
        participation = participation or Participation((range(spec.rounds),), spec.rounds)
        if not spec.data.is_live:
            return PlannedRecordQueue(n_features, spec.loss, spec.rounds, participation)
        max_records = spec.data.batch_size
        return LiveRecordQueue(
            n_features,
            spec.loss,
            participation,
            1 if max_records == "all" else max_records,
            waits_for_record=spec.clock.mode != "paced",
        )

    @property
    def queued_bytes(self) -> int:
        """Size of the queued records in bytes."""
        return 8 * (self.n_features + 1) * self.queued_records

    def get_next_sequence(self, source: str) -> int:
        """Return the number of the next batch of a source."""
        return self._next_sequences.get(source, 0)

    def get_position(self, source: str) -> int | None:
        """Return the position of the last record of a source; None: there is none, or the source gives no positions."""
        return self._last_positions.get(source)

    def has_batch(self, batch: learner_pb2.SampleBatch) -> bool:
        """Return whether all of a batch was accepted before."""
        if batch.positions:
            return max(batch.positions) <= self._last_positions.get(batch.source, -1)
        return batch.sequence < self.get_next_sequence(batch.source)

    def prepare(self, batch: learner_pb2.SampleBatch) -> _NewRecords | None:
        """Validate a batch and return its new records, without changing the queue; None: all are known.

        Raises:
            FailedPrecondition: an earlier batch of the source is missing.
            DataError: the records do not fit the run. The message quotes no record value.
            RemoteProtocolError: a malformed tensor, rounds that have their records already, or more sources or rounds
                than are kept.
        """
        self._require_bounds(batch)
        if self.has_batch(batch):
            return None
        due = self.get_next_sequence(batch.source)
        if not batch.positions and batch.sequence > due:
            raise FailedPrecondition(f"source {batch.source!r} must send batch {due} next, got batch {batch.sequence}")
        features, labels = from_tensor(batch.features), from_tensor(batch.labels)
        check_batch(features, labels, self.n_features, self._loss)
        first, counts = self._assign_rounds(batch, len(labels))
        old = self._count_known(batch, len(labels))
        position = batch.positions[-1] if batch.positions else None
        return _NewRecords(batch.source, position, first, counts, features[old:], labels[old:])

    def add(self, new: _NewRecords) -> None:
        """Queue new records for their rounds."""
        self._enqueue(new.first_round, new.counts, new.features, new.labels)
        self._next_sequences[new.source] = self.get_next_sequence(new.source) + (new.position is None)
        if new.position is not None:
            self._last_positions[new.source] = new.position
        self.batch_count += 1
        self.records += len(new.labels)

    def put(self, batch: learner_pb2.SampleBatch) -> None:
        """Accept a batch as a whole or not at all; of a batch with positions, its new records. Errors as of `prepare`."""
        if (new := self.prepare(batch)) is not None:
            self.add(new)

    def replay(self, first: int, batch: learner_pb2.SampleBatch) -> None:
        """Accept a batch of the log again; errors as of `prepare`.

        Args:
            first: first round that it was for.
            batch: logged batch.
        """
        self.put(batch)

    @property
    @abstractmethod
    def filled_rounds(self) -> int:
        """Rounds below this one have their records."""

    @abstractmethod
    def take(self, t: int, records: int | None = None) -> Batch:
        """Take the records of a round, once; rounds come in order.

        Args:
            t: round below `filled_rounds`.
            records: number of live records, where a log gives it.
        """

    @abstractmethod
    def get_state(self) -> RecordQueueState:
        """Return the current state."""

    def restore(self, taken: RecordQueueState) -> None:
        """Restore a state."""
        self._next_sequences, self._last_positions = dict(taken.next_sequences), dict(taken.last_positions)
        self.batch_count, self.records = taken.batch_count, taken.records
        self.queued_records = sum(each.size for each in taken.queued_batches)

    def _require_bounds(self, batch: learner_pb2.SampleBatch) -> None:
        if len(batch.source) > _MAX_SOURCE_NAME_CHARS:
            raise RemoteProtocolError(
                f"a source has at most {_MAX_SOURCE_NAME_CHARS} characters, got {len(batch.source)}"
            )
        if batch.source not in self._next_sequences and len(self._next_sequences) >= MAX_SOURCES:
            raise RemoteProtocolError(f"records must come from at most {MAX_SOURCES} sources, got one more")
        if len(batch.counts) > _MAX_BATCH_ROUNDS:
            raise RemoteProtocolError(f"a batch must be of at most {_MAX_BATCH_ROUNDS} rounds, got {len(batch.counts)}")

    def _count_known(self, batch: learner_pb2.SampleBatch, records: int) -> int:
        """Return the number of known records at the beginning of a batch."""
        if not batch.positions:
            return 0
        positions = np.array(batch.positions, np.uint64)
        if len(positions) != records or (positions[1:] <= positions[:-1]).any():
            raise RemoteProtocolError(
                f"positions must be one for each of {records} records, each above the one before it, got {len(positions)}"
            )
        last = self._last_positions.get(batch.source)
        return 0 if last is None else int(np.searchsorted(positions, np.uint64(last), side="right"))

    def _build_state(
        self, filled: int, waiting: tuple[Batch, ...], rounds: IntArray, sizes: IntArray
    ) -> RecordQueueState:
        return RecordQueueState(
            dict(self._next_sequences),
            filled,
            self.batch_count,
            waiting,
            rounds,
            sizes,
            dict(self._last_positions),
            self.records,
        )

    @abstractmethod
    def _assign_rounds(self, batch: learner_pb2.SampleBatch, records: int) -> tuple[int, list[int]]:
        """Return the first round of a batch, and its number of records for each round from there on."""

    @abstractmethod
    def _enqueue(self, first: int, counts: list[int], features: FloatArray, labels: FloatArray) -> None:
        """Queue records for their rounds."""


_NO_ROUNDS: IntArray = np.empty(0, np.int64)


class _RoundRecords:
    """Records of consecutive rounds that arrived together.

    Args:
        records: all of them.
        first: first round.
        counts: number of records of each round.
    """

    def __init__(self, records: Batch, first: int, counts: Iterable[int]) -> None:
        self._records, self.first, self._ends = records, first, list(accumulate(counts, initial=0))
        self._bounded: tuple[FloatArray, FloatArray] | None = None

    @property
    def end_round(self) -> int:
        """Round after the last one."""
        return self.first + len(self._ends) - 1

    def take_round(self, t: int, loss: Loss) -> Batch:
        """Return the records of a round. The loss's bounds are enforced for all rounds at once, in a tenth of the time."""
        features, labels = self._records.features, self._records.labels
        if self._bounded is None:
            self._bounded = loss.enforce_bounds(features, labels)
        rows = slice(self._ends[t - self.first], self._ends[t - self.first + 1])
        bounded = Batch.from_bounded_records(loss, self._bounded[0][rows], self._bounded[1][rows])
        return Batch.with_bounded_batch(features[rows], labels[rows], bounded)

    def list_since(self, t: int) -> tuple[Batch, IntArray, IntArray]:
        """Return the records of round t and later, their rounds, and the number of records of each."""
        k = max(t - self.first, 0)
        a, sizes = self._ends[k], np.diff(self._ends[k:])
        rounds = np.flatnonzero(sizes)
        return Batch(self._records.features[a:], self._records.labels[a:]), self.first + k + rounds, sizes[rounds]


class PlannedRecordQueue(RecordQueue):
    """Queue of records that are each for a given round, or for the next one without records.

    Args:
        n_features, loss: as for `RecordQueue`.
        rounds: planned rounds of the run.
        participation: rounds in which the learner participates.
    """

    def __init__(self, n_features: int, loss: Loss, rounds: int, participation: Participation) -> None:
        super().__init__(n_features, loss)
        self._rounds, self._participation = rounds, participation
        self._queued_parts: deque[_RoundRecords] = deque()
        self._filled_rounds = self._next_round = 0

    @property
    def filled_rounds(self) -> int:
        """Rounds below this one have their records."""
        return self._filled_rounds

    def take(self, t: int, records: int | None = None) -> Batch:
        """Take the records of a round."""
        while self._queued_parts and self._queued_parts[0].end_round <= t:
            self._queued_parts.popleft()
        if t < self._next_round or not self._queued_parts or t < self._queued_parts[0].first:
            return self._empty_batch
        self._next_round, taken = t + 1, self._queued_parts[0].take_round(t, self._loss)
        self.queued_records -= taken.size
        return taken

    def replay(self, first: int, batch: learner_pb2.SampleBatch) -> None:
        """Accept a batch of the log for its logged rounds."""
        batch.first_round = first
        self.put(batch)

    def get_state(self) -> RecordQueueState:
        """Return the current state."""
        parts = [
            left
            for part in self._queued_parts
            if part.end_round > self._next_round and (left := part.list_since(self._next_round))[0].size
        ]
        waiting, rounds, sizes = zip(*parts, strict=True) if parts else ((), (_NO_ROUNDS,), (_NO_ROUNDS,))
        return self._build_state(self._filled_rounds, waiting, np.concatenate(rounds), np.concatenate(sizes))

    def restore(self, taken: RecordQueueState) -> None:
        """Restore a state."""
        super().restore(taken)
        self._filled_rounds, self._next_round = taken.filled_rounds, 0
        self._queued_parts.clear()
        if len(taken.rounds):
            first = int(taken.rounds[0])
            counts = np.zeros(taken.rounds[-1] + 1 - first, np.int64)
            counts[taken.rounds - first] = taken.sizes
            self._queued_parts.append(_RoundRecords(_concatenate(taken.queued_batches), first, counts.tolist()))

    def _assign_rounds(self, batch: learner_pb2.SampleBatch, records: int) -> tuple[int, list[int]]:
        if batch.positions:
            raise RemoteProtocolError(
                "positions must be left out: this run knows which record is for which round; number the batches (sequence)"
            )
        counts = list(batch.counts) or [records]
        first = (
            batch.first_round if batch.HasField("first_round") else self._participation.next_round(self._filled_rounds)
        )
        if sum(counts) != records:
            raise DataError(f"the counts of a batch must add up to its records, {records}, got {sum(counts)}")
        if first < self._filled_rounds:
            raise RemoteProtocolError(f"records must be for round {self._filled_rounds} or later, got round {first}")
        if first + len(counts) > self._rounds:
            raise DataError(
                f"the run has rounds 0 to {self._rounds - 1}, got records for round {first + len(counts) - 1}"
            )
        return first, counts

    def _enqueue(self, first: int, counts: list[int], features: FloatArray, labels: FloatArray) -> None:
        self._filled_rounds = first + len(counts)
        participates = [t in self._participation for t in range(first, self._filled_rounds)]
        if not all(participates):
            kept = np.repeat(participates, counts)
            features, labels = features[kept], labels[kept]
            counts = [
                count * participates_in_round for count, participates_in_round in zip(counts, participates, strict=True)
            ]
        if len(labels):
            self._queued_parts.append(_RoundRecords(Batch(features, labels), first, counts))
            self.queued_records += len(labels)


class LiveRecordQueue(RecordQueue):
    """Queue of records in order of arrival; a round takes those that are there.

    Args:
        n_features, loss: as for `RecordQueue`.
        participation: rounds in which the learner participates: in others it learns nothing, and records wait.
        max_records: maximum number of records that a round takes.
        waits_for_record: whether a round waits for a record; else it takes what is there, possibly none.
    """

    def __init__(
        self, n_features: int, loss: Loss, participation: Participation, max_records: int, *, waits_for_record: bool
    ) -> None:
        super().__init__(n_features, loss)
        self._participation, self._max_records, self._waits_for_record = participation, max_records, waits_for_record
        self._queue: deque[Batch] = deque()
        self._rounds_taken = 0

    @property
    def filled_rounds(self) -> int:
        """Rounds below this one have taken their records, or would find some."""
        return self._rounds_taken + max(
            -(-self.queued_records // self._max_records), 0 if self._waits_for_record else 1
        )

    def take(self, t: int, records: int | None = None) -> Batch:
        """Take the oldest records, as many as a round takes."""
        self._rounds_taken = t + 1
        if t not in self._participation:
            return self._empty_batch
        wanted = min(self.queued_records, self._max_records if records is None else records)
        parts = []
        while wanted:
            first = self._queue.popleft()
            if first.size > wanted:
                self._queue.appendleft(Batch(first.features[wanted:], first.labels[wanted:]))
                first = Batch(first.features[:wanted], first.labels[:wanted])
            parts.append(first)
            wanted -= first.size
        taken = _concatenate(parts) if parts else self._empty_batch
        self.queued_records -= taken.size
        return taken

    def get_state(self) -> RecordQueueState:
        """Return the current state."""
        rounds, sizes = ([self._rounds_taken], [self.queued_records]) if self.queued_records else ((), ())
        return self._build_state(
            self._rounds_taken, tuple(self._queue), np.array(rounds, np.int64), np.array(sizes, np.int64)
        )

    def restore(self, taken: RecordQueueState) -> None:
        """Restore a state."""
        super().restore(taken)
        self._queue, self._rounds_taken = deque(taken.queued_batches), taken.filled_rounds

    def _assign_rounds(self, batch: learner_pb2.SampleBatch, records: int) -> tuple[int, list[int]]:
        if batch.HasField("first_round") or batch.counts:
            raise RemoteProtocolError(
                "first_round and counts must be left out: the rounds of this run take live records as they come"
            )
        return self._rounds_taken, [records]

    def _enqueue(self, first: int, counts: list[int], features: FloatArray, labels: FloatArray) -> None:
        if len(labels):
            self._queue.append(Batch(features, labels))
            self.queued_records += len(labels)


def _concatenate(parts: Sequence[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    return Batch(np.concatenate([part.features for part in parts]), np.concatenate([part.labels for part in parts]))
