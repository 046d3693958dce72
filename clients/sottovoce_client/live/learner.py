"""A learner, from its owner's programs: records in, predictions out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sottovoce_client.live.sender import LearnerEndpoint, Sender
from sottovoce_core.arrays import FloatArray, IntArray
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
"""Predictions asked for at a time, and records read ahead of them."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model in use says of records.

    Attributes:
        labels: `(records,)`: classes, as the records have them where the schema has a label for each, else by number; or
            numbers, in the unit of the records.
        scores: `(records, ...)`, as the loss scores.
        rounds_done: that the model has learned from.
        classes: that there are; None: labels are numbers.
        probabilities: `(records, classes)`; None: the loss gives none.
    """

    labels: list[str | float]
    scores: FloatArray
    rounds_done: int
    classes: tuple[str | float, ...] | None = None
    probabilities: FloatArray | None = None


class ConnectedLearner:
    """A learner in a run of live records. `connect_learner` makes it.

    Attributes:
        run_id: of the run.
        spec: of the run.
        records: what a record is in it, and why one does not fit.
        source: under which records are counted.
    """

    def __init__(
        self,
        at: LearnerEndpoint,
        stub: Any,
        told: learner_pb2.GetIntakeResponse,
        source: str,
        patience_s: float,
        tasks: Tasks,
        tell: Callable[[str], None],
        *,
        allow_imports: bool,
    ) -> None:
        self._at, self._stub = at, stub
        self.run_id, self.source = told.run_id, source
        self.spec: RunSpec = spec_from_wire(told.spec, imports=allow_imports)
        self.records = LiveRecordEncoder.from_spec(self.spec.data, self.spec.loss)
        self._sender = Sender(at, source, told, patience_s, tasks, tell)
        self._tasks, self._turn, self._calls = tasks, asyncio.Lock(), asyncio.Semaphore(_MAX_CALLS)

    @property
    def position(self) -> int:
        """Of the last record of this source that was fed; -1: there is none. Whoever goes on begins with the next."""
        return self._sender.last_position

    @property
    def run_end(self) -> RunEnded | None:
        """How the learner said that the run is over for it; None: it has not."""
        return self._sender.run_end

    async def feed(self, records: Any, labels: Any = None, *, positions: Sequence[int] | None = None) -> int:
        """Bring records. It comes back when they are in the learner's keeping, and survive its death: each is learned once.

        Args:
            records: with a schema, mappings of fields to values, or a table (of pandas, polars or Arrow, or a mapping of
                fields to columns); without, numbers `(records, features)`. Or what `records.encode` gave: of that, what fits.
            labels: `(records,)`; None: they are a field of the records.
            positions: where each record stands in its source, ascending: one at or below `position` is passed over. None: they
                are counted on.

        Returns:
            How many were new.

        Raises:
            DataError: one of them does not fit, by its number and a reason; none of them was sent.
            FailedPrecondition: the run is over.
            Unavailable: the learner is away for too long.
        """
        found = records if isinstance(records, EncodedRecords) else self.records.encode_strictly(records, labels)
        features, labels, n = found.features, found.labels, len(found.labels)
        given = None if positions is None else _rising(positions, n)
        async with self._turn:  # who came first is sent first
            first = self._sender.last_position + 1
            places = np.arange(first, first + n) if given is None else given
            old = int(np.searchsorted(places, first))
            again = self._sender.find_pending(int(places[old - 1])) if old else []
            kept = again + await self._sender.put(features[old:], labels[old:], places[old:])
        await asyncio.gather(*map(asyncio.shield, kept))
        return n - old

    def build_away_error(self, seconds: float, error: SottovoceError) -> SottovoceError:
        """Why it is given up after so many seconds; the error is that of the last call."""
        return self._at.build_away_error(self.run_id, seconds, error)

    async def predict(self, records: Any) -> Prediction:
        """What the model in use says of records, where the run opted in (`telemetry.predict`).

        Args:
            records: as for `feed`; a label in them is not looked at.

        Raises:
            DataError: one of them does not fit.
            FailedPrecondition: the run did not opt in.
            Unavailable: the learner does not answer.
        """
        return await self._predicted(self.records.encode_strictly(records, has_labels=False).features)

    async def predict_each(self, records: AsyncIterable[Any]) -> AsyncGenerator[Prediction, None]:
        """What the model in use says of each record of a stream, in order, however fast they come.

        One call at a time is under way; what came meanwhile is asked for together in the next one.

        Args:
            records: each a mapping of fields to values, or numbers `(features,)`.

        Yields:
            A prediction of one record for each of them.

        Raises:
            DataError: one of them does not fit, by its number and a reason; those before it are answered.
            FailedPrecondition, Unavailable: as `predict`.
        """
        coming: asyncio.Queue[Any] = asyncio.Queue(_MAX_RECORDS_AHEAD)
        reading = self._tasks.start(_read(records, coming))
        try:
            at, over = 0, False
            while not over:
                together = [await coming.get()]
                while not coming.empty():
                    together.append(coming.get_nowait())
                if over := together[-1] is _END:
                    together.pop()
                if not together:
                    break
                found = self.records.encode(together, has_labels=False)
                fitting = min(found.refusals, default=len(together))
                if fitting:
                    for each in _apart(await self._predicted(found.features[:fitting])):
                        yield each
                if found.refusals:
                    raise DataError(f"record {at + fitting} (counted from 0) does not fit: {found.refusals[fitting]}")
                at += len(together)
            await reading  # it may have failed
        finally:
            reading.cancel()

    async def _predicted(self, features: FloatArray) -> Prediction:
        async with self._calls:  # of which a connection has few, and more would be refused
            scores, labels, rounds = await self._at.predict(self._stub, features)
        classes, chances = self.records.class_names, self.spec.loss.probabilities(scores)
        return Prediction(self.records.decode_predictions(scores, labels), scores, rounds, classes, chances)

    async def fetch_status(self) -> LearnerStatus:
        """How far the learner is, and what it has spent.

        Raises:
            Unavailable: it does not answer.
        """
        return await self._at.fetch_status(self._stub)

    async def watch(self, interval_s: float = _STATUS_INTERVAL_S) -> AsyncIterator[LearnerStatus]:
        """`status` again and again, until the run is over.

        Args:
            interval_s: seconds between two looks.
        """
        while (status := await self.fetch_status()).run_id == self.run_id:
            yield status
            if not status.state.is_active:
                return
            await asyncio.sleep(interval_s)


_END = object()


async def _read(records: AsyncIterable[Any], into: asyncio.Queue[Any]) -> None:
    """Read a stream, not much faster than it is taken, and say when it is over."""
    reading = asyncio.current_task()
    try:
        async for each in records:
            await into.put(each)
    finally:
        if reading is None or not reading.cancelling():  # else nobody takes anything more
            await into.put(_END)


def _apart(found: Prediction) -> Iterator[Prediction]:
    """Each record's own."""
    for row, label in enumerate(found.labels):
        chances = None if found.probabilities is None else found.probabilities[row : row + 1]
        yield Prediction([label], found.scores[row : row + 1], found.rounds_done, found.classes, chances)


def _rising(positions: Sequence[int], records: int) -> IntArray:
    """Positions as they may be.

    Raises:
        DataError: they are not.
    """
    try:
        given = np.asarray(positions, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        given = np.empty(0, np.int64)
    if given.shape != (records,) or (np.diff(given, prepend=-1) <= 0).any():
        raise DataError(f"positions must be whole numbers, one for each of {records} records, ascending from 0")
    return given
