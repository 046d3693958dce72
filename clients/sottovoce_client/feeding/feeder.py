"""Feeder: from the partitions of a source into a learner, each record once, unfit messages into a file, without loss.

For each partition, in this order: read on from the learner's position; write down unfit messages; feed records, and wait
until the learner has stored them; acknowledge both to the source. After a crash at any point, reading restarts after the
last record that the learner has: repeated records are skipped, and a message that was written down is not written again.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import json
import math
import os
from collections import Counter, deque
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import structlog

from sottovoce_client.feeding.progress import FeedCounters, FeedTask
from sottovoce_client.feeding.records import (
    FieldMap,
    RecordConverter,
    SourceMessage,
    SourcePartition,
    TabularPartition,
    parse_field_map,
)
from sottovoce_client.live.connect import connect_learner
from sottovoce_client.live.learner import ConnectedLearner
from sottovoce_core.errors import DataError, FailedPrecondition, SottovoceError, SpecError, Unavailable
from sottovoce_rpc.tasks import Tasks

T = TypeVar("T")

log = structlog.get_logger()

MAX_PARTITIONS, MAX_WAITING_MESSAGES, _MAX_BATCH_MESSAGES = 256, 8_192, 1_024
"""Maximum number of partitions of a feeder, of waiting messages of a partition, and of messages fed at once."""
MAX_LEADING_REFUSALS = 100
"""Number of unfit messages at the beginning of a partition after which a feeder without a dead-letter file stops."""
DRAIN_TIMEOUT_S = 10.0
"""Time limit for feeding messages already read after a stop; the rest is read again next time."""
_STATUS_INTERVAL_S, _RUN_END_TIMEOUT_S, _LAST_STATUS_TIMEOUT_S = 1.0, 2.0, 2.0


@dataclass(frozen=True, slots=True)
class FeedTarget:
    """Learner to be fed; attributes as the arguments of `connect_learner`.

    Attributes:
        source: prefix of the partitions' names, under which the learner counts records; empty: none.
    """

    address: str
    source: str = ""
    name: str = ""
    identity: Path | None = None
    insecure: bool = False
    patience_s: float = 60.0
    allow_imports: bool = False

    def connect(self, source: str, counters: FeedCounters) -> connect_learner:
        """Connect for one source; the reason for a wait is logged at once, and kept in the counters."""
        counters.awaited_condition = awaited = f"the learner at {self.address} to be in a run"

        def report_wait(reason: str) -> None:
            counters.awaited_condition = f"{awaited}: {reason}"
            log.warning("waiting for the learner", address=self.address, reason=reason)

        return connect_learner(**asdict(replace(self, source=source)), notify=report_wait)


@dataclass(frozen=True, slots=True)
class FeedOptions:
    """Options for the conversion of messages.

    Attributes:
        maps: places of record fields in a message, `FIELD=PATH`.
        ignore_unknown: leave out fields that neither the schema nor a map has, instead of refusing the message.
        position: field with a message's position, which is not a field of the record; empty: none.
        dead_letters: file for unfit messages; None: they are dropped.
    """

    maps: Sequence[str] = ()
    ignore_unknown: bool = False
    position: str = ""
    dead_letters: Path | None = None

    def __post_init__(self) -> None:
        for each in self.maps:
            parse_field_map(each)

    def build_converter(self, learner: ConnectedLearner) -> RecordConverter:
        """Build the converter for the run of a learner.

        Raises:
            SpecError: a map does not fit its records.
        """
        schema = learner.spec.data.schema
        fields = FieldMap(schema, self.maps, ignore_unknown=self.ignore_unknown, position=self.position)
        return RecordConverter(learner.records, fields)


async def feed(
    parts: Sequence[SourcePartition],
    target: FeedTarget,
    options: FeedOptions,
    counters: FeedCounters,
    stop: asyncio.Event,
) -> None:
    """Feed partitions until they end, or a stop is requested; messages read by then are fed.

    Args:
        parts: partitions with different names.
        target: the learner.
        options: conversion of messages.
        counters: counts of messages, updated here.
        stop: set it to end.

    Raises:
        SpecError: partitions have the same name, or a map does not fit; and as of `connect_learner`.
        DataError: a source was replaced, or none of its first messages is a record.
        FailedPrecondition: the run is over.
        Unavailable: the learner, or a source, was unreachable for too long.
        OSError: dead letters cannot be written.
    """
    sources = [f"{target.source}/{part.name}" if target.source else part.name for part in parts]
    if duplicates := [source for source, times in Counter(sources).items() if times > 1]:
        raise SpecError(
            f"sources must have different names, got two named {duplicates[0]!r}: feed one of them under another --source"
        )
    if len(parts) > MAX_PARTITIONS:
        raise SpecError(f"one feeder takes at most {MAX_PARTITIONS} sources, got {len(parts)}: start several")
    counters.refusal_destination = "" if options.dead_letters is None else f"written to {options.dead_letters}"
    async with AsyncExitStack() as stack:
        dead_letters = (
            None if options.dead_letters is None else stack.enter_context(_open_dead_letters(options.dead_letters))
        )
        learners = list[ConnectedLearner]()
        for source in sources:
            learner = await run_unless_stopped(stop, stack.enter_async_context(target.connect(source, counters)))
            if learner is None:
                return
            learners.append(learner)
        if not learners:
            return
        converter = options.build_converter(learners[0])
        counters.run_id = learners[0].run_id
        counters.sources |= set(sources)
        for part in parts:
            if isinstance(part, TabularPartition):
                part.column_check = converter.fields.find_column_misfit
        is_single_pass = any(getattr(part, "is_single_pass", False) for part in parts)
        pumps = [
            _Pump(part, learner, converter, dead_letters, counters).run(stop)
            for part, learner in zip(parts, learners, strict=True)
        ]
        await _run_pumps(
            pumps,
            watch_run(learners[0], counters, target.patience_s),
            stop,
            target.patience_s if is_single_pass else DRAIN_TIMEOUT_S,
        )
        with suppress(SottovoceError, TimeoutError):
            async with asyncio.timeout(_LAST_STATUS_TIMEOUT_S):
                counters.status = await learners[0].fetch_status()
        if is_single_pass and counters.messages_waiting:
            raise Unavailable(
                f"the learner accepted nothing more: {counters.messages_waiting} messages that were read are not fed"
            )


def build_feed_task(
    opened: AbstractAsyncContextManager[Sequence[SourcePartition]], target: FeedTarget, options: FeedOptions
) -> FeedTask:
    """Build the task of feeding partitions.

    Args:
        opened: context manager that opens them.
        target, options: as of `feed`.
    """

    async def work(counters: FeedCounters, stop: asyncio.Event) -> None:
        counters.awaited_condition = "the broker"  # files need no wait
        async with opened as parts:
            await feed(parts, target, options, counters, stop)

    return work


async def _run_pumps(
    pumps: Sequence[Coroutine[Any, Any, None]],
    watching: Coroutine[Any, Any, None],
    stop: asyncio.Event,
    drain_s: float,
) -> None:
    """Run all pumps until they are done, the run is over, or the drain time after a stop is over. A failure stops the others."""

    async def run_out() -> None:
        await stop.wait()
        await asyncio.sleep(drain_s)

    async with Tasks() as tasks:
        run_over, drained = tasks.start(watching), tasks.start(run_out())
        running = {tasks.start(work) for work in pumps}
        failed: BaseException | None = None
        while running and not (run_over.done() or drained.done()):
            done, _ = await asyncio.wait({*running, run_over, drained}, return_when=asyncio.FIRST_COMPLETED)
            failed = failed or next((error for each in done & running if (error := each.exception()) is not None), None)
            running -= done
            if failed is not None:
                stop.set()
        if run_over.done() and running:
            stop.set()
            await asyncio.wait(running, timeout=_RUN_END_TIMEOUT_S)  # they may have a more specific error
            failed = failed or run_over.exception()
        if failed is not None:
            raise failed


async def watch_run(learner: ConnectedLearner, counters: FeedCounters, patience_s: float = math.inf) -> None:
    """Poll the learner's status.

    Args:
        learner: connected learner.
        counters: receives the status.
        patience_s: how long it may be unreachable, even without messages to feed.

    Raises:
        FailedPrecondition: its run is over.
        Unavailable: it is unreachable for too long.
    """
    now = asyncio.get_running_loop().time
    last_answer_s = now()
    while True:
        try:
            counters.status = status = await learner.fetch_status()
            last_answer_s = now()
        except SottovoceError as error:
            last_status, counters.status = counters.status, None
            if learner.run_end is not None:
                raise _build_run_over_error(learner.run_id, learner.run_end.state) from None
            if last_status is not None:
                log.warning("the learner does not answer", run=learner.run_id, timeout_s=patience_s)
            if isinstance(error, Unavailable) and now() - last_answer_s > patience_s:
                raise learner.build_away_error(patience_s, error) from None
        else:
            if status.run_id != learner.run_id or not status.state.is_active:
                state = "over" if status.run_id != learner.run_id else status.state.name.lower().replace("_", " ")
                raise _build_run_over_error(learner.run_id, state)
        await asyncio.sleep(_STATUS_INTERVAL_S)


def _build_run_over_error(run_id: str, state: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"run {run_id} takes no more records: {state}; records that it did not accept were not learned"
    )


async def run_unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of a coroutine; None: a stop was requested first."""
    async with Tasks() as tasks:
        working, stopping = tasks.start(work), tasks.start(stop.wait())
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None


class _Pump:
    """Feeder of one partition.

    Args:
        part: source of messages.
        learner: learner, connected for the partition's source.
        converter: converts messages to records.
        dead_letters: file for unfit messages; None: they are dropped.
        counters: counts of messages.
    """

    def __init__(
        self,
        part: SourcePartition,
        learner: ConnectedLearner,
        converter: RecordConverter,
        dead_letters: _DeadLetters | None,
        counters: FeedCounters,
    ) -> None:
        self._part, self._learner, self._converter, self._dead_letters, self._counters = (
            part,
            learner,
            converter,
            dead_letters,
            counters,
        )
        self._buffer: deque[SourceMessage] = deque()
        self._more_event, self._space_event = asyncio.Event(), asyncio.Event()
        self._last_position = learner.position
        self._refusal_reasons = Counter[str]()

    async def run(self, stop: asyncio.Event) -> None:
        """Feed until the partition ends or a stop is requested; messages read by then are fed.

        Raises:
            SottovoceError, OSError: as of `feed`.
        """
        async with Tasks() as tasks:
            reading = tasks.start(self._read_on(self._learner.position))
            reading.add_done_callback(lambda _: self._more_event.set())
            stopping = tasks.start(stop.wait())
            stopping.add_done_callback(lambda _: reading.cancel())
            while self._buffer or not reading.done():
                if self._buffer:
                    await self._feed_messages(
                        [self._buffer.popleft() for _ in range(min(_MAX_BATCH_MESSAGES, len(self._buffer)))]
                    )
                else:
                    self._more_event.clear()
                    await self._more_event.wait()
            if not reading.cancelled():
                reading.result()

    async def _read_on(self, after: int) -> None:
        """Read while the buffer has space."""
        messages = self._part.read(after)
        try:
            async for each in messages:
                self._buffer.extend(each)
                self._counters.messages_waiting += len(each)
                self._more_event.set()
                while len(self._buffer) >= MAX_WAITING_MESSAGES:
                    self._space_event.clear()
                    await self._space_event.wait()
        finally:
            if isinstance(messages, AsyncGenerator):
                await messages.aclose()

    async def _feed_messages(self, messages: Sequence[SourceMessage]) -> None:
        """Feed or write down messages, then acknowledge them to the source."""
        self._space_event.set()
        converted = self._converter.convert(messages, self._last_position)
        self._last_position, self._counters.duplicate_count = (
            converted.last_position,
            self._counters.duplicate_count + converted.duplicate_count,
        )
        await self._record_refusals([(messages[place], reason) for place, reason in converted.refusals.items()])
        if converted.fitting_records is not None:
            records, positions = converted.fitting_records
            fed = await self._learner.feed(records, positions=positions)
            self._counters.records_fed += fed  # after the wait: other pumps change it meanwhile
        elif self._has_no_record_yet and self._refusal_reasons.total() >= MAX_LEADING_REFUSALS:
            ((reason, _),) = self._refusal_reasons.most_common(1)
            raise DataError(
                f"none of the first {self._refusal_reasons.total()} messages of {self._learner.source} is a record of this "
                f"run, mostly because of: {reason}. The source still has them: correct the map, or "
                "give a file for them by --dead-letters"
            )
        self._counters.messages_waiting -= len(messages)
        if not self._has_no_record_yet:  # also if all were duplicates: a broker waits for it
            await self._part.acknowledge(self._last_position)

    @property
    def _has_no_record_yet(self) -> bool:
        """Return whether no message was a record so far, and unfit ones would be dropped.

        The map may be wrong, so they are not acknowledged.
        """
        return self._dead_letters is None and self._learner.position < 0

    async def _record_refusals(self, refused: Sequence[tuple[SourceMessage, str]]) -> None:
        """Count unfit messages, and write them to the dead-letter file, if any."""
        reasons = [reason for _, reason in refused]
        self._refusal_reasons.update(reasons)
        self._counters.refusals.update(reasons)
        if self._dead_letters is not None and refused:
            run_id, source = self._learner.run_id, self._learner.source
            written = await self._dead_letters.write(run_id, source, refused)
            self._counters.already_written_count += written


# ---- dead letters ------------------------------------------------------------------------------------------------------


class _DeadLetters:
    """File of unfit messages, for repair by its owner, readable by this user only. Opened by `_dead_letters`.

    Its lines are JSON: `run`, `source`, `position`, `reason`, `message`.

    Args:
        file: open for reading and appending.
        path: path for errors.

    Raises:
        DataError: a line was not written by a feeder.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._write_lock = file, asyncio.Lock()
        self._earlier_letters = Counter[tuple[str, str, int, int]]()
        """Letters of earlier feeders, with their counts: a position alone does not identify a message."""
        file.seek(0)
        for number, line in enumerate(file, 1):
            try:
                self._earlier_letters[_letter_key(**json.loads(line))] += 1
            except (ValueError, TypeError, RecursionError):
                raise DataError(f"{path} has a line {number} that no feeder wrote: use another file") from None

    async def write(self, run_id: str, source: str, refused: Sequence[tuple[SourceMessage, str]]) -> int:
        """Append messages and return when they are on disk; OSError: they are not.

        Args:
            run_id: run id.
            source: source of the messages.
            refused: messages, each with its reason.

        Returns:
            Number of messages that an earlier feeder had written; they are not written again.
        """
        lines = list[bytes]()
        for message, reason in refused:
            letter = {
                "run": run_id,
                "source": source,
                "position": message.position,
                "reason": reason,
                "message": _to_json(message.body),
            }
            if self._earlier_letters[letter_key := _letter_key(**letter)] > 0:
                self._earlier_letters[letter_key] -= 1
            else:
                lines.append(f"{json.dumps(letter)}\n".encode())
        if lines:
            async with self._write_lock:
                await asyncio.to_thread(self._append, b"".join(lines))
        return len(refused) - len(lines)

    def _append(self, lines: bytes) -> None:
        self._file.seek(0, os.SEEK_END)
        self._file.write(lines)
        self._file.flush()
        os.fsync(self._file.fileno())


@contextmanager
def _open_dead_letters(path: Path) -> Iterator[_DeadLetters]:
    """Open a dead-letter file, created if missing: readable by this user only, and locked against other feeders.

    An incomplete last line, of a feeder that crashed, is cut off: its message was not acknowledged.

    Raises:
        FailedPrecondition: another feeder writes to it, or it cannot be written to.
        DataError: it has other content.
    """
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        where = f": there is no folder {path.parent.absolute()}" if not path.parent.exists() else f": {error.strerror}"
        raise FailedPrecondition(f"dead letters cannot be written to {path}{where}") from None
    with os.fdopen(number, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FailedPrecondition(
                f"another feeder writes dead letters to {path}: stop it, or use another file"
            ) from None
        os.fchmod(number, 0o600)
        os.truncate(number, _find_end_of_lines(file))
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        yield _DeadLetters(file, path)


def _find_end_of_lines(file: BinaryIO) -> int:
    """Return the number of bytes up to the last line end."""
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - 65_536)
        file.seek(begin)
        if (found := file.read(end - begin).rfind(b"\n")) >= 0:
            return begin + found + 1
        end = begin
    return 0


def _letter_key(run: str, source: str, position: int, message: Any, reason: str) -> tuple[str, str, int, int]:
    """Return the key of a letter in this process."""
    return run, source, position, hash(json.dumps(message))


def _to_json(value: Any) -> Any:
    """Convert a message to JSON: bytes that are text to text, other types to their text."""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {str(name): _to_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(each) for each in value]
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
