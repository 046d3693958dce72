"""A learner's state folder: what it writes, what is read of it, and what a learner is that is started on it again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sottovoce_core.algorithms.interface import StateAxes
from sottovoce_core.errors import CorruptStateError, SottovoceError
from sottovoce_learner.ingest.record_queue import PlannedRecordQueue
from sottovoce_learner.peers.outbox import NeighbourLink
from sottovoce_learner.privacy_filter import PrivacyFilter
from sottovoce_learner.state_machine import LearnerStateMachine
from sottovoce_learner.storage import ledger, state_folder
from sottovoce_learner.storage.ledger import LedgerEntry
from sottovoce_learner.storage.run_log import HighWaterMark, HighWaterMarkFile, LogOptions, RunLog
from sottovoce_learner.storage.state_folder import FileGuard, hash_boot_id, hash_text
from sottovoce_learner.storage.wal import (
    START_CHAIN,
    EntryKind,
    LogContents,
    LogEntry,
    LogHeader,
    RoundPayload,
    WriteAheadLog,
    read_entries,
)
from sottovoce_wire.v1 import learner_pb2
from tests.model.channels import reach
from tests.model.runs import (
    FEATURES,
    RUN,
    SOURCE,
    Shape,
    attendance,
    codec_of,
    plan_of,
    prices,
    record,
    run_of,
)

Amended = Callable[[LedgerEntry, LedgerEntry, LogContents | None, Path], bool]


class Folder(NamedTuple):
    """A state folder.

    Attributes:
        incarnation: the learner's.
        log: byte for byte.
        mark: beside it.
        offline_intervals: of the run's spec, each time that it was opened by another one: lines of the ledger.
    """

    incarnation: int
    log: bytes
    mark: HighWaterMark
    offline_intervals: tuple[str, ...]

    def shape(self, run: Shape) -> Shape:
        """The run as the ledger has it."""
        return run.amended(self.offline_intervals[-1])


# ---- what stands in it -----------------------------------------------------------------------------------------------


@cache
def _lines(shape: Shape, learner: int, offline_intervals: tuple[str, ...]) -> tuple[ledger.ChainedLine, ...]:
    """The ledger of a learner that has opened the run, by these specs one after the other."""
    raw = ledger.ChainedLine.encode_first(_name(shape, learner), f"{learner:032x}")
    for each in offline_intervals:
        line = _line(shape.amended(each), learner)
        opened = {
            "kind": ledger.OPENED,
            "run_id": RUN,
            "index": learner,
            "n_features": FEATURES,
            "spec": line.spec,
        }
        raw += ledger.ChainedLine.encode(opened, ledger.ChainedLine.parse_all(raw)[-1].chain)
    return ledger.ChainedLine.parse_all(raw)


def _name(shape: Shape, learner: int) -> str:
    return run_of(shape).spec.names[learner]


def _line(shape: Shape, learner: int) -> LedgerEntry:
    return LedgerEntry(_name(shape, learner), RUN, learner, FEATURES, run_of(shape).spec.model_dump_json())


@cache
def read(shape: Shape, learner: int, log: bytes) -> LogContents:
    """A log as `wal.read_log` reads it, without the segments' first pages."""
    entries = tuple(read_entries(log))
    about = LogHeader(f"{learner:032x}", _name(shape, learner), RUN, "process")
    return LogContents(about, 0, START_CHAIN, entries, Path("0.log"), len(log))


def _standing(shape: Shape, learner: int, folder: Folder) -> ledger.StoredState:
    files = state_folder.LearnerPaths(Path("nowhere"), _name(shape, learner))
    lines = _lines(shape, learner, folder.offline_intervals)
    return ledger.StoredState(files, folder.mark, lines, read(shape, learner, folder.log))


@cache
def stands(shape: Shape, learner: int, folder: Folder) -> bool:
    """Does all fit together? False: something was lost, and nothing is said from this folder."""
    try:
        _standing(shape, learner, folder).verify()
    except CorruptStateError:
        return False
    return True


@cache
def charged(shape: Shape, learner: int, folder: Folder) -> float:
    """Epsilon of the run, by its log; by what a repair would charge, where that is damaged."""
    if stands(shape, learner, folder):
        return read(shape, learner, folder.log).epsilon_spent
    most = _standing(shape, learner, folder).max_epsilon_spent
    return 0.0 if most is None else most


@cache
def cut(log: bytes) -> bytes | None:
    """A log without its last entry; None: there is nothing to be lost but the first."""
    placed = read_entries(log)
    return log[: placed[-2].end_offset] if len(placed) > 1 else None


@cache
def rounds_said(shape: Shape, learner: int, log: bytes) -> int:
    """Rounds that were said, by a log."""
    return read(shape, learner, log).rounds_committed


@cache
def closed_by(shape: Shape, learner: int, log: bytes) -> bool:
    """Was all that was said learned, too, by a log (`Standing.under_way`)?"""
    reading = read(shape, learner, log)
    return 0 < reading.rounds_committed == reading.rounds_done


@cache
def learned(shape: Shape, learner: int, log: bytes) -> tuple[tuple[int, RoundPayload], ...]:
    """Each round whose inputs a log has, with them: those that were learned before something else was said, or at the end."""
    entries = read(shape, learner, log).entries
    return tuple(
        (e.round - 1, RoundPayload.decode(e.body))
        for e in entries
        if e.kind in (EntryKind.ROUND, EntryKind.CLOSE) and e.round
    )


# ---- what is written -------------------------------------------------------------------------------------------------

_WRITTEN = {
    EntryKind.RESERVATION: "reserved",
    EntryKind.BATCH: "kept",
    EntryKind.ROUND: "journaled",
    EntryKind.CLOSE: "closed",
}


class _MemoryLog(WriteAheadLog):
    """A log in memory, and who is told of every write."""

    def __init__(self, raw: bytes, written: Callable[[str], None]) -> None:
        placed = read_entries(raw)
        self.raw, self.sequence, self.chain, self._written = raw, len(placed), placed[-1].chain, written

    def append(self, kind: EntryKind, t: int, spent: float, in_all: float, body: bytes) -> int:
        raw, self.chain = LogEntry(kind, self.sequence, t, spent, in_all, body).encode(self.chain)
        self.raw += raw
        self.sequence += 1
        self._written(_WRITTEN[kind])
        return self.sequence - 1

    def sync(self) -> None:
        pass

    def require_in_place(self) -> None:
        pass


class _MemoryMark(HighWaterMarkFile):
    """A mark in memory."""

    def __init__(self, mark: HighWaterMark, written: Callable[[str], None]) -> None:
        self.mark, self._written = mark, written

    def write(self, mark: HighWaterMark) -> None:
        self.mark = mark
        self._written("marked")

    def write_both_slots(self, mark: HighWaterMark, *, sync: bool = True) -> None:
        self.write(mark)

    def require_in_place(self) -> None:
        pass


class _MemoryLedger(FileGuard):
    """A ledger in memory."""

    def __init__(self) -> None:
        pass

    def require_in_place(self, size: int | None = None) -> None:
        pass


class Writes(NamedTuple):
    """What a learner wrote: the folder after every write, with the name of what was written; all of it at last."""

    names: tuple[str, ...]
    folders: tuple[Folder, ...]


def _written(kind: Callable[..., RunLog], shape: Shape, folder: Folder, what: Callable[[RunLog], None]) -> Writes:
    names: list[str] = []
    folders: list[Folder] = []

    def note(name: str) -> None:
        names.append(name)
        folders.append(folder._replace(log=log.raw, mark=mark.mark))

    log, mark = _MemoryLog(folder.log, note), _MemoryMark(folder.mark, note)
    terms = LogOptions("process", codec_of(shape).message_bytes, shape.window, shape.rounds, None)
    what(kind(log, mark, folder.mark, 0.0, terms, None, _MemoryLedger()))
    return Writes(tuple(names), tuple(folders))


@cache
def said(kind: Callable[..., RunLog], shape: Shape, learner: int, folder: Folder, t: int, what: RoundPayload) -> Writes:
    """A round is written down, and charged."""
    after = prices(folder.shape(shape), learner)[t + 1]
    return _written(kind, shape, folder, lambda log: log.write_ahead(t, after, what))


@cache
def closed(kind: Callable[..., RunLog], shape: Shape, folder: Folder, done: int, what: RoundPayload) -> Writes:
    """The inputs of the learner's last round are written down."""
    return _written(kind, shape, folder, lambda log: log.close_rounds(done, what))


@cache
def taken_in(
    kind: Callable[..., RunLog],
    intake: Callable[..., PlannedRecordQueue],
    shape: Shape,
    learner: int,
    folder: Folder,
    number: int,
) -> Writes:
    """A feeder's batch is taken in, and settled; no writes where it was there already."""

    def take(log: RunLog) -> None:
        box = _intake(intake, shape, learner, folder)
        with suppress(SottovoceError):  # what is refused changes nothing
            if (new := box.prepare(record(number))) is not None:
                log.append_records(new.first_round, record(number).SerializeToString(deterministic=True))
                box.add(new)
        log.make_durable()

    return _written(kind, shape, folder, take)


def _intake(kind: Callable[..., PlannedRecordQueue], run: Shape, learner: int, folder: Folder) -> PlannedRecordQueue:
    """As `Session` and `Recovery` make and fill it."""
    shape = folder.shape(run)
    box = kind(FEATURES, run_of(shape).spec.loss, shape.rounds, attendance(shape, learner))
    for entry in read(shape, learner, folder.log).entries:
        if entry.kind is EntryKind.BATCH:
            batch = learner_pb2.SampleBatch.FromString(entry.body)
            batch.first_round = entry.round
            box.put(batch)
    return box


@cache
def records(shape: Shape, learner: int, log: bytes) -> tuple[int, ...]:
    """The batches in a log, by their numbers, round by round."""
    entries = read(shape, learner, log).entries
    return tuple(
        learner_pb2.SampleBatch.FromString(each.body).sequence for each in entries if each.kind is EntryKind.BATCH
    )


@cache
def due_next(intake: Callable[..., PlannedRecordQueue], shape: Shape, learner: int, folder: Folder) -> int:
    """The batch that is due from the feeder, as a receipt says it."""
    return _intake(intake, shape, learner, folder).get_next_sequence(SOURCE)


@cache
def filled(intake: Callable[..., PlannedRecordQueue], shape: Shape, learner: int, folder: Folder) -> int:
    """Rounds below this one have their records."""
    return _intake(intake, shape, learner, folder).filled_rounds


# ---- from its beginning, and from its log ----------------------------------------------------------------------------


@cache
def fresh_folder(shape: Shape, learner: int, *, fed: bool) -> Folder:
    """Of a learner that has opened the run (`store.LearnerStore._open_log`); without a feeder it has all its records already."""
    offline_intervals = (shape.offline_intervals,)
    lines, spec = _lines(shape, learner, offline_intervals), run_of(shape).spec
    opening, chain = LogEntry(EntryKind.OPEN, 0, 0, 0.0, 0.0, spec.model_dump_json().encode()).encode(bytes(16))
    mark = HighWaterMark(
        bytes.fromhex(f"{learner:032x}"),
        hash_boot_id(),
        len(lines),
        lines[-1].chain,
        run_hash=hash_text(RUN),
        chain=chain,
    )
    folder = Folder(0, opening, mark, offline_intervals)
    for number in range(0 if fed else sum(map(len, attendance(shape, learner).intervals))):
        folder = taken_in(RunLog, PlannedRecordQueue, shape, learner, folder, number).folders[-1]
    return folder


@cache
def opened(amended: Amended, shape: Shape, learner: int, folder: Folder, offline_intervals: str) -> Writes | None:
    """The folder is opened by a spec (`store.Store.open_run`); None: by that one it cannot be.

    What is torn is cut off, and a new mark counts all that is left. A spec with other offline_intervals is noted before.
    """
    before, after = (_line(each, learner) for each in (folder.shape(shape), shape.amended(offline_intervals)))
    log, names, folders = read(shape, learner, folder.log), [], []
    try:
        changed = amended(before, after, log, Path("runs"))
    except CorruptStateError:
        return None
    if changed:
        folder = folder._replace(offline_intervals=(*folder.offline_intervals, offline_intervals))
        names, folders = ["amended"], [folder]
    lines = _lines(shape, learner, folder.offline_intervals)
    mark = folder.mark._replace(
        line_count=len(lines),
        lines_chain=lines[-1].chain,
        sequence=log.next_sequence - 1,
        chain=log.entries[-1].chain,
        epsilon_spent=log.entries[-1].epsilon_spent,
    )
    return Writes((*names, "opened"), (*folders, folder._replace(mark=mark)))


@dataclass(frozen=True, slots=True)
class Recovered:
    """A learner, as its log has it.

    Attributes:
        said, done: rounds.
        kept: messages that a neighbour may lack.
        heard: the messages that were used last.
    """

    said: int
    done: int
    kept: tuple[tuple[int, bytes], ...]
    heard: tuple[bytes, ...]


@cache
def recovered(link: Callable[[int], NeighbourLink], shape: Shape, learner: int, log: bytes) -> Recovered | None:
    """A learner that is started again (`Session._recover`); None: its log does not fit the spec."""
    run, there = run_of(shape), attendance(shape, learner)
    new = link(reach(shape, learner).keep)
    memory = LearnerStateMachine(
        run,
        plan_of(shape, learner),
        there,
        PrivacyFilter(run.algorithm.accountant(learner), None),
        PlannedRecordQueue(FEATURES, run.spec.loss, shape.rounds, there),
        run.algorithm.init(StateAxes(learner)),
        new._frames.maxlen or 0,
    )
    try:
        for entry in read(shape, learner, log).entries:
            memory.replay_entry(entry)
    except CorruptStateError:
        return None
    memory.skip_offline_rounds(there.end)
    for t, message in memory.frames:
        new.queue(t, message)
    return Recovered(memory.rounds_committed, memory.rounds_done, tuple(new._frames), memory.inputs.received_frames)
