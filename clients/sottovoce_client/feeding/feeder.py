"""The pump: from the parts of a source into a learner, each record once, what is no record into a file, and nothing lost.

For each part, in this order: read on from where the learner stands; write down what is no record; feed what is one, and wait
until it is in the learner's keeping; let the source forget both. Whatever dies in between, reading begins again behind the last
record that the learner has: it passes over what came twice, and a message that was written down is not written again.
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
"""Parts of one feeder; messages of a part that wait; and that are fed at once."""
MAX_LEADING_REFUSALS = 100
"""After so many messages of a part of which none is a record, a feeder that would drop them stops."""
DRAIN_TIMEOUT_S = 10.0
"""What was read is fed for so long when a feeder is told to end; the rest is read again next time."""
_STATUS_INTERVAL_S, _RUN_END_TIMEOUT_S, _LAST_STATUS_TIMEOUT_S = 1.0, 2.0, 2.0


@dataclass(frozen=True, slots=True)
class FeedTarget:
    """A learner that is fed; as the arguments of `connect_learner`.

    Attributes:
        source: what stands before the names of parts, where the learner counts them; empty: nothing.
    """

    address: str
    source: str = ""
    name: str = ""
    identity: Path | None = None
    insecure: bool = False
    patience_s: float = 60.0
    allow_imports: bool = False

    def connect(self, source: str, account: FeedCounters) -> connect_learner:
        """For one source; why it is waited for stands in the log at once, and in the account."""
        account.awaited_condition = awaited = f"the learner at {self.address} to be in a run"

        def waits(why: str) -> None:
            account.awaited_condition = f"{awaited}: {why}"
            log.warning("waiting for the learner", at=self.address, why=why)

        return connect_learner(**asdict(replace(self, source=source)), notify=waits)


@dataclass(frozen=True, slots=True)
class FeedOptions:
    """What becomes of messages.

    Attributes:
        maps: where fields of records stand in them, `FIELD=PATH`.
        ignore_unknown: leave out fields that neither the schema nor a map knows, in place of refusing the message.
        position: field that says where a message stands, and is none of the record's; empty: there is none.
        dead_letters: file for messages that are no records; None: they are dropped.
    """

    maps: Sequence[str] = ()
    ignore_unknown: bool = False
    position: str = ""
    dead_letters: Path | None = None

    def __post_init__(self) -> None:
        for each in self.maps:
            parse_field_map(each)

    def build_converter(self, learner: ConnectedLearner) -> RecordConverter:
        """For the run that a learner is in.

        Raises:
            SpecError: a map does not fit its records.
        """
        schema = learner.spec.data.schema
        fields = FieldMap(schema, self.maps, ignore_unknown=self.ignore_unknown, position=self.position)
        return RecordConverter(learner.records, fields)


async def feed(
    parts: Sequence[SourcePartition], target: FeedTarget, terms: FeedOptions, account: FeedCounters, stop: asyncio.Event
) -> None:
    """Feed parts until they end, or it is told to stop; what was read by then is fed.

    Args:
        parts: whose names differ.
        target: the learner.
        terms: what becomes of messages.
        account: what becomes of them is counted here.
        stop: set it to end.

    Raises:
        SpecError: parts have one name, or a map does not fit; and as `connect_learner`.
        DataError: a source is not what it was, or none of its first messages is a record.
        FailedPrecondition: the run is over.
        Unavailable: the learner, or a source, was away for too long.
        OSError: dead letters cannot be written.
    """
    sources = [f"{target.source}/{part.name}" if target.source else part.name for part in parts]
    if twice := [source for source, times in Counter(sources).items() if times > 1]:
        raise SpecError(
            f"sources must differ in name, and two are called {twice[0]!r}: feed one of them under another --source"
        )
    if len(parts) > MAX_PARTITIONS:
        raise SpecError(f"one feeder takes at most {MAX_PARTITIONS} sources, got {len(parts)}: start several")
    account.refusal_destination = "" if terms.dead_letters is None else f"written to {terms.dead_letters}"
    async with AsyncExitStack() as stack:
        dead = None if terms.dead_letters is None else stack.enter_context(_dead_letters(terms.dead_letters))
        learners = list[ConnectedLearner]()
        for source in sources:
            learner = await run_unless_stopped(stop, stack.enter_async_context(target.connect(source, account)))
            if learner is None:
                return
            learners.append(learner)
        if not learners:
            return
        sieve = terms.build_converter(learners[0])
        account.run_id = learners[0].run_id
        account.sources |= set(sources)
        for part in parts:
            if isinstance(part, TabularPartition):
                part.column_check = sieve.fields.find_column_misfit
        once = any(getattr(part, "is_single_pass", False) for part in parts)
        works = [
            _Pump(part, learner, sieve, dead, account).run(stop) for part, learner in zip(parts, learners, strict=True)
        ]
        await _all(
            works,
            watch_run(learners[0], account, target.patience_s),
            stop,
            target.patience_s if once else DRAIN_TIMEOUT_S,
        )
        with suppress(SottovoceError, TimeoutError):
            async with asyncio.timeout(_LAST_STATUS_TIMEOUT_S):
                account.status = await learners[0].fetch_status()
        if once and account.messages_waiting:
            raise Unavailable(
                f"the learner took nothing more: {account.messages_waiting} messages that were read are fed by nobody"
            )


def build_feed_task(
    opened: AbstractAsyncContextManager[Sequence[SourcePartition]], target: FeedTarget, terms: FeedOptions
) -> FeedTask:
    """The work of feeding parts.

    Args:
        opened: gives them, open.
        target, terms: as of `feed`.
    """

    async def work(account: FeedCounters, stop: asyncio.Event) -> None:
        account.awaited_condition = "the broker"  # files are there
        async with opened as parts:
            await feed(parts, target, terms, account, stop)

    return work


async def _all(
    works: Sequence[Coroutine[Any, Any, None]],
    looking: Coroutine[Any, Any, None],
    stop: asyncio.Event,
    drain_s: float,
) -> None:
    """Pump until all is done, the run is over, or so long after it was told to stop. One that fails tells the others to."""

    async def late() -> None:
        await stop.wait()
        await asyncio.sleep(drain_s)

    async with Tasks() as tasks:
        over, overdue = tasks.start(looking), tasks.start(late())
        pumping = {tasks.start(work) for work in works}
        failed: BaseException | None = None
        while pumping and not (over.done() or overdue.done()):
            done, _ = await asyncio.wait({*pumping, over, overdue}, return_when=asyncio.FIRST_COMPLETED)
            failed = failed or next((error for each in done & pumping if (error := each.exception()) is not None), None)
            pumping -= done
            if failed is not None:
                stop.set()
        if over.done() and pumping:
            stop.set()
            await asyncio.wait(pumping, timeout=_RUN_END_TIMEOUT_S)  # they have a reason of their own, perhaps
            failed = failed or over.exception()
        if failed is not None:
            raise failed


async def watch_run(learner: ConnectedLearner, account: FeedCounters, patience_s: float = math.inf) -> None:
    """Look at the learner again and again.

    Args:
        learner: connected.
        account: where it is written how the learner stands.
        patience_s: how long it may be away, even if there is nothing to feed.

    Raises:
        FailedPrecondition: its run is over.
        Unavailable: it is away for too long.
    """
    now = asyncio.get_running_loop().time
    seen = now()
    while True:
        try:
            account.status = status = await learner.fetch_status()
            seen = now()
        except SottovoceError as error:
            seen_last, account.status = account.status, None
            if learner.run_end is not None:
                raise _over(learner.run_id, learner.run_end.state) from None
            if seen_last is not None:
                log.warning("the learner does not answer", run=learner.run_id, waits_s=patience_s)
            if isinstance(error, Unavailable) and now() - seen > patience_s:
                raise learner.build_away_error(patience_s, error) from None
        else:
            if status.run_id != learner.run_id or not status.state.is_active:
                state = "over" if status.run_id != learner.run_id else status.state.name.lower().replace("_", " ")
                raise _over(learner.run_id, state)
        await asyncio.sleep(_STATUS_INTERVAL_S)


def _over(run_id: str, state: str) -> FailedPrecondition:
    return FailedPrecondition(f"run {run_id} takes no more records: {state}; what it did not take was not learned")


async def run_unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What comes of a work; None: it was told to stop before."""
    async with Tasks() as tasks:
        working, stopping = tasks.start(work), tasks.start(stop.wait())
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None


class _Pump:
    """One part into the learner.

    Args:
        part: where messages come from.
        learner: connected for the part's source.
        sieve: tells what is a record.
        dead: takes what is none; None: that is dropped.
        account: counts.
    """

    def __init__(
        self,
        part: SourcePartition,
        learner: ConnectedLearner,
        sieve: RecordConverter,
        dead: _DeadLetters | None,
        account: FeedCounters,
    ) -> None:
        self._part, self._learner, self._sieve, self._dead, self._account = part, learner, sieve, dead, account
        self._read: deque[SourceMessage] = deque()
        self._more, self._room = asyncio.Event(), asyncio.Event()
        self._last = learner.position
        self._reasons = Counter[str]()

    async def run(self, stop: asyncio.Event) -> None:
        """Until the part ends or it is told to stop; what was read by then is fed.

        Raises:
            SottovoceError, OSError: as `feed`.
        """
        async with Tasks() as tasks:
            reading = tasks.start(self._read_on(self._learner.position))
            reading.add_done_callback(lambda _: self._more.set())
            stopping = tasks.start(stop.wait())
            stopping.add_done_callback(lambda _: reading.cancel())
            while self._read or not reading.done():
                if self._read:
                    await self._pass_on(
                        [self._read.popleft() for _ in range(min(_MAX_BATCH_MESSAGES, len(self._read)))]
                    )
                else:
                    self._more.clear()
                    await self._more.wait()
            if not reading.cancelled():
                reading.result()

    async def _read_on(self, after: int) -> None:
        """Read, as far as there is room."""
        messages = self._part.read(after)
        try:
            async for each in messages:
                self._read.extend(each)
                self._account.messages_waiting += len(each)
                self._more.set()
                while len(self._read) >= MAX_WAITING_MESSAGES:
                    self._room.clear()
                    await self._room.wait()
        finally:
            if isinstance(messages, AsyncGenerator):
                await messages.aclose()

    async def _pass_on(self, messages: Sequence[SourceMessage]) -> None:
        """Messages to where they belong; then the source may forget them."""
        self._room.set()
        sifted = self._sieve.convert(messages, self._last)
        self._last, self._account.duplicate_count = (
            sifted.last_position,
            self._account.duplicate_count + sifted.duplicate_count,
        )
        await self._bury([(messages[place], why) for place, why in sifted.refusals.items()])
        if sifted.fitting_records is not None:
            records, positions = sifted.fitting_records
            fed = await self._learner.feed(records, positions=positions)
            self._account.records_fed += fed  # others count meanwhile
        elif self._hopeless and self._reasons.total() >= MAX_LEADING_REFUSALS:
            ((reason, _),) = self._reasons.most_common(1)
            raise DataError(
                f"none of the first {self._reasons.total()} messages of {self._learner.source} is a record of this run, mostly "
                f"because of: {reason}. The source still has them: mend the map, or say by --dead-letters where what is none goes"
            )
        self._account.messages_waiting -= len(messages)
        if not self._hopeless:  # where all came again, too: a broker waits for its receipt
            await self._part.acknowledge(self._last)

    @property
    def _hopeless(self) -> bool:
        """Nothing was a record so far, and all would be dropped: the source keeps it, for the map may be wrong."""
        return self._dead is None and self._learner.position < 0

    async def _bury(self, refused: Sequence[tuple[SourceMessage, str]]) -> None:
        """What is no record, counted, and written down where there is a file."""
        reasons = [reason for _, reason in refused]
        self._reasons.update(reasons)
        self._account.refusals.update(reasons)
        if self._dead is not None and refused:
            run_id, source = self._learner.run_id, self._learner.source
            written = await self._dead.write(run_id, source, refused)
            self._account.already_written_count += written


# ---- dead letters ------------------------------------------------------------------------------------------------------


class _DeadLetters:
    """Messages that are no records, kept for whoever mends them, in a file that is its user's alone.

    Its lines are JSON: `run`, `source`, `position`, `reason`, `message`. `_dead_letters` opens one.

    Args:
        file: open for reading and appending.
        path: what errors call it.

    Raises:
        DataError: a line of it is none of ours.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._turn = file, asyncio.Lock()
        self._before = Counter[tuple[str, str, int, int]]()
        """What earlier feeders have written, as often as they have: a position alone does not tell a message from another."""
        file.seek(0)
        for number, line in enumerate(file, 1):
            try:
                self._before[_known_by(**json.loads(line))] += 1
            except (ValueError, TypeError, RecursionError):
                raise DataError(f"{path} has a line {number} that no feeder wrote: take another file") from None

    async def write(self, run_id: str, source: str, refused: Sequence[tuple[SourceMessage, str]]) -> int:
        """Add messages, and come back when they are on the disk; OSError: they are not.

        Args:
            run_id: of the run.
            source: that they came from.
            refused: each with its reason.

        Returns:
            How many a feeder before this one had written; they are not written again.
        """
        lines = list[bytes]()
        for message, reason in refused:
            letter = {
                "run": run_id,
                "source": source,
                "position": message.position,
                "reason": reason,
                "message": _as_json(message.body),
            }
            if self._before[known := _known_by(**letter)] > 0:
                self._before[known] -= 1
            else:
                lines.append(f"{json.dumps(letter)}\n".encode())
        if lines:
            async with self._turn:
                await asyncio.to_thread(self._append, b"".join(lines))
        return len(refused) - len(lines)

    def _append(self, lines: bytes) -> None:
        self._file.seek(0, os.SEEK_END)
        self._file.write(lines)
        self._file.flush()
        os.fsync(self._file.fileno())


@contextmanager
def _dead_letters(path: Path) -> Iterator[_DeadLetters]:
    """A file for dead letters, made where it is not there: nobody else may read it, and no other feeder writes to it meanwhile.

    Half a line at its end, of a feeder that died, is cut off: its message has not been passed.

    Raises:
        FailedPrecondition: another feeder writes to it, or it cannot be written to.
        DataError: it holds something else.
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
                f"another feeder writes dead letters to {path}: stop it, or take another file"
            ) from None
        os.fchmod(number, 0o600)
        os.truncate(number, _whole(file))
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        yield _DeadLetters(file, path)


def _whole(file: BinaryIO) -> int:
    """Bytes up to the end of the last whole line."""
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - 65_536)
        file.seek(begin)
        if (found := file.read(end - begin).rfind(b"\n")) >= 0:
            return begin + found + 1
        end = begin
    return 0


def _known_by(run: str, source: str, position: int, message: Any, reason: str) -> tuple[str, str, int, int]:
    """What tells a letter from others in this process."""
    return run, source, position, hash(json.dumps(message))


def _as_json(value: Any) -> Any:
    """What came, as JSON has it: text of bytes that are text, text of what JSON has no word for."""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {str(name): _as_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
