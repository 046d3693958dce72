"""Connection of an owner's program to a learner: records in, predictions out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sottovoce_client.live.sender import LearnerEndpoint, Sender
from sottovoce_core.arrays import FloatArray, IntArray, summarize_fields
from sottovoce_core.data.encoding import EncodedRecords
from sottovoce_core.data.live_records import LiveRecordEncoder
from sottovoce_core.errors import DataError, RunEnded, SottovoceError
from sottovoce_core.spec import RunSpec
from sottovoce_rpc.learner_status import LearnerStatus
from sottovoce_rpc.specs import spec_from_wire
from sottovoce_rpc.tasks import Tasks
from sottovoce_wire.v1 import learner_pb2

_STATUS_INTERVAL_S = 0.5
_MAX_CALLS, _MAX_RECORDS_AHEAD = 64, 1_024
"""Maximum number of concurrent predictions, and of records read ahead of them."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction of the current model for some records.

    Attributes:
        labels: `(records,)`: classes, as in the records if the schema has a label for each, else by number; or numbers,
            in the unit of the records.
        scores: `(records, ...)`, scores of the loss.
        rounds_done: rounds that the model has learned from.
        classes: all classes; None: labels are numbers.
        probabilities: `(records, classes)`; None: the loss gives none.
    """

    labels: list[str | float]
    scores: FloatArray
    rounds_done: int
    classes: tuple[str | float, ...] | None = None
    probabilities: FloatArray | None = None

    __repr__ = summarize_fields


class ConnectedLearner:
    """Learner in a run of live records, created by `connect_learner`.

    Attributes:
        run_id: run id.
        spec: run spec.
        records: encoder of the run's records; reports why one does not fit.
        source: name under which records are counted.
    """

    def __init__(
        self,
        endpoint: LearnerEndpoint,
        stub: Any,
        intake: learner_pb2.GetIntakeResponse,
        source: str,
        patience_s: float,
        tasks: Tasks,
        notify: Callable[[str], None],
        *,
        allow_imports: bool,
    ) -> None:
        self._endpoint, self._stub = endpoint, stub
        self.run_id, self.source = intake.run_id, source
        self.spec: RunSpec = spec_from_wire(intake.spec, imports=allow_imports)
        self.records = LiveRecordEncoder.from_spec(self.spec.data, self.spec.loss)
        self._sender = Sender(endpoint, source, intake, patience_s, tasks, notify)
        self._tasks, self._send_lock, self._call_slots = tasks, asyncio.Lock(), asyncio.Semaphore(_MAX_CALLS)

    def __repr__(self) -> str:
        return f"ConnectedLearner at {self._endpoint.address} in run {self.run_id!r}, source {self.source!r}"

    @property
    def position(self) -> int:
        """Position of the last record of this source that was fed; -1: none. The next feeder continues after it."""
        return self._sender.last_position

    @property
    def run_end(self) -> RunEnded | None:
        """Error with which the learner reported the end of the run; None: it has not."""
        return self._sender.run_end

    async def feed(self, records: Any, labels: Any = None, *, positions: Sequence[int] | None = None) -> int:
        """Send records; return when the learner has stored them durably. Each record is learned once.

        Args:
            records: with a schema, mappings of fields to values, or a table (of pandas, polars or Arrow, or a mapping of
                fields to columns); without, numbers `(records, features)`. Or the result of `records.encode`: its fitting
                records.
            labels: `(records,)`; None: they are a field of the records.
            positions: position of each record in its source, ascending: one at or below `position` is skipped. None: they
                are numbered consecutively.

        Returns:
            Number of new records.

        Raises:
            DataError: a record does not fit, with its number and a reason; none was sent.
            FailedPrecondition: the run is over.
            Unavailable: the learner is unreachable for too long.
        """
        found = records if isinstance(records, EncodedRecords) else self.records.encode_strictly(records, labels)
        features, labels, n = found.features, found.labels, len(found.labels)
        given_positions = None if positions is None else _parse_positions(positions, n)
        async with self._send_lock:  # calls are served in order
            first = self._sender.last_position + 1
            all_positions = np.arange(first, first + n) if given_positions is None else given_positions
            known_count = int(np.searchsorted(all_positions, first))
            pending = self._sender.find_pending(int(all_positions[known_count - 1])) if known_count else []
            waits = pending + await self._sender.put(
                features[known_count:], labels[known_count:], all_positions[known_count:]
            )
        await asyncio.gather(*map(asyncio.shield, waits))
        return n - known_count

    def build_away_error(self, seconds: float, error: SottovoceError) -> SottovoceError:
        """Build the error for giving up after so many seconds, from the error of the last call."""
        return self._endpoint.build_away_error(self.run_id, seconds, error)

    async def predict(self, records: Any) -> Prediction:
        """Predict with the current model, where the run opted in (`telemetry.predict`).

        Args:
            records: as for `feed`; a label in them is ignored.

        Raises:
            DataError: a record does not fit.
            FailedPrecondition: the run did not opt in.
            Unavailable: the learner does not answer.
        """
        return await self._predict_features(self.records.encode_strictly(records, has_labels=False).features)

    async def predict_each(self, records: AsyncIterable[Any]) -> AsyncGenerator[Prediction, None]:
        """Predict each record of a stream with the current model, in order, at any rate of arrival.

        One call is in progress at a time; records that arrive meanwhile share the next one.

        Args:
            records: each a mapping of fields to values, or numbers `(features,)`.

        Yields:
            A prediction of one record for each of them.

        Raises:
            DataError: a record does not fit, with its number and a reason; those before it are answered.
            FailedPrecondition, Unavailable: as of `predict`.
        """
        queue: asyncio.Queue[Any] = asyncio.Queue(_MAX_RECORDS_AHEAD)
        read_task = self._tasks.start(_read_into(records, queue))
        try:
            offset, is_over = 0, False
            while not is_over:
                batch = [await queue.get()]
                while not queue.empty():
                    batch.append(queue.get_nowait())
                if is_over := batch[-1] is _END:
                    batch.pop()
                if not batch:
                    break
                found = self.records.encode(batch, has_labels=False)
                fitting_count = min(found.refusals, default=len(batch))
                if fitting_count:
                    for each in _split_prediction(await self._predict_features(found.features[:fitting_count])):
                        yield each
                if found.refusals:
                    raise DataError(
                        f"record {offset + fitting_count} (counted from 0) does not fit: {found.refusals[fitting_count]}"
                    )
                offset += len(batch)
            await read_task  # raises its error
        finally:
            read_task.cancel()

    async def _predict_features(self, features: FloatArray) -> Prediction:
        async with self._call_slots:  # a connection allows few, and more would be refused
            scores, labels, rounds = await self._endpoint.predict(self._stub, features)
        classes, probabilities = self.records.class_names, self.spec.loss.probabilities(scores)
        return Prediction(self.records.decode_predictions(scores, labels), scores, rounds, classes, probabilities)

    async def fetch_status(self) -> LearnerStatus:
        """Return the learner's progress and spent epsilon.

        Raises:
            Unavailable: it does not answer.
        """
        return await self._endpoint.fetch_status(self._stub)

    async def watch(self, interval_s: float = _STATUS_INTERVAL_S) -> AsyncIterator[LearnerStatus]:
        """Yield the status periodically, until the run is over.

        Args:
            interval_s: seconds between two calls.
        """
        while (status := await self.fetch_status()).run_id == self.run_id:
            yield status
            if not status.state.is_active:
                return
            await asyncio.sleep(interval_s)


_END = object()


async def _read_into(records: AsyncIterable[Any], into: asyncio.Queue[Any]) -> None:
    """Read a stream into a queue, little faster than it is consumed, and mark its end."""
    read_task = asyncio.current_task()
    try:
        async for each in records:
            await into.put(each)
    finally:
        if read_task is None or not read_task.cancelling():  # else the queue is not read any more
            await into.put(_END)


def _split_prediction(found: Prediction) -> Iterator[Prediction]:
    """Yield each record's own prediction."""
    for row, label in enumerate(found.labels):
        probabilities = None if found.probabilities is None else found.probabilities[row : row + 1]
        yield Prediction([label], found.scores[row : row + 1], found.rounds_done, found.classes, probabilities)


def _parse_positions(positions: Sequence[int], records: int) -> IntArray:
    """Return valid positions as an array.

    Raises:
        DataError: they are not valid.
    """
    try:
        given_positions = np.asarray(positions, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        given_positions = np.empty(0, np.int64)
    if given_positions.shape != (records,) or (np.diff(given_positions, prepend=-1) <= 0).any():
        raise DataError(f"positions must be whole numbers, one for each of {records} records, ascending from 0")
    return given_positions
