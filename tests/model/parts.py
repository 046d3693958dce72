"""The product's own decisions, as functions of values: what is modelled is what runs.

Here stands nothing of the protocol: each function puts the product's objects together from values, calls them, and takes the
result apart. So a change of the product changes the model. All are remembered: a state asks what others have asked before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np

from sottovoce.algorithms.interface import Message, Who
from sottovoce.arrays import as_floats
from sottovoce.errors import DataError, SottovoceError
from sottovoce.running.run import Run, build_run
from sottovoce_coordinator.runs import RunBook, RunState
from sottovoce_learner import exchange, standing
from sottovoce_learner import lines as ledger_lines
from sottovoce_learner.bodies import Said
from sottovoce_learner.books import Books
from sottovoce_learner.entries import START, Entry, Kind, encode, walk
from sottovoce_learner.inbox import Inbox
from sottovoce_learner.intake import Intake
from sottovoce_learner.links import Link
from sottovoce_learner.log import About, Log, Reading, hashed, host
from sottovoce_learner.mark import Mark, MarkFile
from sottovoce_learner.plan import Plan
from sottovoce_learner.recovery import Recovery
from sottovoce_learner.role import Role
from sottovoce_learner.session import Session
from sottovoce_learner.store import RunLog, Terms
from sottovoce_rpc.codec import RoundCodec, to_tensor
from sottovoce_rpc.learner_status import LearnerState, LearnerStatus
from sottovoce_wire.v1 import learner_pb2
from tests.examples import small_spec

RUN, SOURCE, FEATURES = "run", "feeder", 1
NOW = datetime(2000, 1, 1, tzinfo=UTC)


class Shape(NamedTuple):
    """A run.

    Attributes:
        learners, rounds, window: how many.
        graph: who hears whom.
    """

    learners: int = 2
    rounds: int = 2
    window: int = 3
    graph: str = "complete"

    def owner(self, f: int) -> int:
        """The learner whose folder this is; behind those of all learners stands a copy of the first one's."""
        return f if f < self.learners else 0

    def called(self, f: int) -> str:
        """The learner on this folder, in words."""
        return f"learner {f}" if f < self.learners else "the copy of learner 0"


class Folder(NamedTuple):
    """A state folder: a learner's incarnation, its log, byte for byte, and its mark."""

    incarnation: int
    log: bytes
    mark: Mark


class Box(NamedTuple):
    """An inbox: the current round, and for each neighbour its messages from that round on."""

    round: int
    heard: tuple[tuple[bytes, ...], ...]


class Book(NamedTuple):
    """A run's book: where it stands, what is granted, and by learner what it reported: state, rounds done, rounds said."""

    state: RunState
    granted: int
    statuses: tuple[tuple[LearnerState, int, int], ...]


# ---- the run -------------------------------------------------------------------------------------------------------------


@cache
def run_of(shape: Shape) -> Run:
    """The run itself."""
    clock = {"window": shape.window}
    return build_run(small_spec(shape.rounds, shape.learners, clock=clock, topology={"graph": shape.graph}), FEATURES)


@cache
def codec_of(shape: Shape) -> RoundCodec:
    """How a round looks on the wire."""
    return RoundCodec(run_of(shape).algorithm.field_shapes())


def plan_of(shape: Shape, learner: int) -> Plan:
    """Whom a learner hears and tells; new, for it remembers rounds."""
    return Plan(run_of(shape).network, learner)


@cache
def neighbours(shape: Shape, learner: int) -> tuple[int, ...]:
    """Of a learner, in order."""
    return tuple(sorted(plan_of(shape, learner).neighbours))


@cache
def frame(shape: Shape, learner: int, t: int, content: int) -> bytes:
    """A message; other contents are other draws of the noise."""
    shapes = codec_of(shape).shapes
    return codec_of(shape).encode(
        t, learner, Message({name: np.full(size, float(content)) for name, size in shapes.items()})
    )


@cache
def about(shape: Shape, message: bytes) -> tuple[int, int]:
    """Sender and round of a message."""
    t, sender, _ = codec_of(shape).decode(message)
    return sender, t


@cache
def record(number: int) -> learner_pb2.SampleBatch:
    """A feeder's batch: one record, which is its number."""
    return learner_pb2.SampleBatch(
        source=SOURCE,
        sequence=number,
        features=to_tensor(as_floats([[number / 10]])),
        labels=to_tensor(as_floats([0.0])),
    )


@cache
def prices(shape: Shape, learner: int) -> tuple[float, ...]:
    """Epsilon of a run once so many rounds were said."""
    books, spent = Books(run_of(shape).algorithm.accountant(learner), None), [0.0]
    for t in range(shape.rounds):
        books.charge(books.price(t))
        books.round_over(1)
        spent.append(books.spent)
    return tuple(spent)


# ---- a learner's files ---------------------------------------------------------------------------------------------------


@cache
def _lines(shape: Shape, learner: int) -> tuple[ledger_lines.Line, ...]:
    """The ledger of a learner that has opened the run."""
    spec = run_of(shape).spec
    first = ledger_lines.first(f"{learner:032x}", spec.names[learner])
    raw, chain = ledger_lines.encode(first, bytes(16))
    opened = {
        "kind": standing.OPENED,
        "run_id": RUN,
        "index": learner,
        "n_features": FEATURES,
        "spec": spec.model_dump_json(),
    }
    return tuple(ledger_lines.walk(raw + ledger_lines.encode(opened, chain)[0]))


@cache
def read(shape: Shape, learner: int, log: bytes) -> Reading:
    """A log as `log.read_log` reads it, without the segments' first pages."""
    name = run_of(shape).spec.names[learner]
    placed = walk(log)
    entries, chains = tuple(each.entry for each in placed), tuple(each.chain for each in placed)
    about = About(f"{learner:032x}", name, RUN, "process")
    return Reading(about, 0, START, entries, chains, Path("0.log"), len(log))


def _standing(shape: Shape, learner: int, folder: Folder) -> standing.Standing:
    files = standing.Files(Path("nowhere"), run_of(shape).spec.names[learner])
    return standing.Standing(files, folder.mark, _lines(shape, learner), read(shape, learner, folder.log))


@cache
def stands(shape: Shape, learner: int, folder: Folder) -> bool:
    """Does all fit together? False: something was lost, and nothing is said from this folder."""
    try:
        standing._required(_standing(shape, learner, folder))
    except DataError:
        return False
    return True


@cache
def charged(shape: Shape, learner: int, folder: Folder) -> float:
    """Epsilon of the run, by its log; by what a repair would charge, where that is damaged."""
    if stands(shape, learner, folder):
        return standing.spent(read(shape, learner, folder.log))
    most = standing.most_spent(_standing(shape, learner, folder))
    return 0.0 if most is None else most


@cache
def cut(log: bytes) -> bytes | None:
    """A log without its last entry; None: there is nothing to be lost but the first."""
    placed = walk(log)
    return log[: placed[-2].end] if len(placed) > 1 else None


_WRITTEN = {Kind.GRANT: "reserved", Kind.BATCH: "kept", Kind.ROUND: "journaled", Kind.CLOSE: "closed"}


class _MemoryLog(Log):
    """A log in memory, and who is told of every write."""

    def __init__(self, raw: bytes, written: Callable[[str], None]) -> None:
        placed = walk(raw)
        self.raw, self.sequence, self.chain, self._written = raw, len(placed), placed[-1].chain, written

    def append(self, kind: Kind, t: int, spent: float, in_all: float, body: bytes, incarnation: int = 0) -> int:
        raw, self.chain = encode(Entry(kind, self.sequence, t, spent, in_all, body, incarnation), self.chain)
        self.raw += raw
        self.sequence += 1
        self._written(_WRITTEN[kind])
        return self.sequence - 1

    def sync(self) -> None:
        pass


class _MemoryMark(MarkFile):
    """A mark in memory."""

    def __init__(self, mark: Mark, written: Callable[[str], None]) -> None:
        self.mark, self._written = mark, written

    def write(self, mark: Mark) -> None:
        self.mark = mark
        self._written("marked")

    def settle(self, mark: Mark, *, sync: bool = True) -> None:
        self.write(mark)


class Writes(NamedTuple):
    """What a learner wrote: the folder after every write, with the name of what was written; all of it at last."""

    names: tuple[str, ...]
    folders: tuple[Folder, ...]


def _written(
    kind: Callable[..., RunLog], shape: Shape, learner: int, folder: Folder, what: Callable[[RunLog], None]
) -> Writes:
    names: list[str] = []
    folders: list[Folder] = []

    def note(name: str) -> None:
        names.append(name)
        folders.append(Folder(folder.incarnation, log.raw, mark.mark))

    log, mark = _MemoryLog(folder.log, note), _MemoryMark(folder.mark, note)
    terms = Terms("process", codec_of(shape).length, shape.window, shape.rounds, None)
    what(kind(log, mark, folder.mark, 0.0, terms, None))
    return Writes(tuple(names), tuple(folders))


@cache
def said(kind: Callable[..., RunLog], shape: Shape, learner: int, folder: Folder, t: int, what: Said) -> Writes:
    """A round is written down, and charged."""
    after = prices(shape, learner)[t + 1]
    return _written(kind, shape, learner, folder, lambda log: log.say(t, after, what))


@cache
def closed(kind: Callable[..., RunLog], shape: Shape, learner: int, folder: Folder, what: Said) -> Writes:
    """The inputs of the last round are written down."""
    return _written(kind, shape, learner, folder, lambda log: log.close_rounds(shape.rounds, what))


@cache
def taken_in(
    kind: Callable[..., RunLog], intake: Callable[..., Intake], shape: Shape, learner: int, folder: Folder, number: int
) -> Writes:
    """A feeder's batch is taken in, and settled; no writes where it was there already."""

    def take(log: RunLog) -> None:
        box = _intake(intake, shape, read(shape, learner, folder.log))
        with suppress(SottovoceError):  # what is refused changes nothing
            box.put(record(number), lambda first: log.keep(first, record(number).SerializeToString(deterministic=True)))
        log.settle()

    return _written(kind, shape, learner, folder, take)


def _intake(kind: Callable[..., Intake], shape: Shape, log: Reading) -> Intake:
    box = kind(FEATURES, run_of(shape).spec.loss, shape.rounds)
    for entry in log.entries:
        if entry.kind is Kind.BATCH:
            box.put(learner_pb2.SampleBatch.FromString(entry.body))
    return box


@cache
def records(shape: Shape, learner: int, log: bytes) -> tuple[int, ...]:
    """The batches in a log, by their numbers, round by round."""
    entries = read(shape, learner, log).entries
    return tuple(learner_pb2.SampleBatch.FromString(each.body).sequence for each in entries if each.kind is Kind.BATCH)


@cache
def due_next(intake: Callable[..., Intake], shape: Shape, learner: int, log: bytes) -> int:
    """The batch that is due from the feeder, as a receipt says it."""
    return _intake(intake, shape, read(shape, learner, log)).next_sequence(SOURCE)


@cache
def fresh_folder(shape: Shape, learner: int, *, fed: bool) -> Folder:
    """Of a learner that has opened the run (`store.Store._opened`); without a feeder it has all its records already."""
    lines, spec = _lines(shape, learner), run_of(shape).spec
    opening, chain = encode(Entry(Kind.OPEN, 0, 0, 0.0, 0.0, spec.model_dump_json().encode()), bytes(16))
    mark = Mark(bytes.fromhex(f"{learner:032x}"), host(), len(lines), lines[-1].chain, run=hashed(RUN), chain=chain)
    folder = Folder(0, opening, mark)
    for number in range(0 if fed else shape.rounds):
        folder = taken_in(RunLog, Intake, shape, learner, folder, number).folders[-1]
    return folder


@cache
def reopened(shape: Shape, learner: int, folder: Folder) -> Folder:
    """Opened again: what is torn is cut off, and a new mark counts all that is left (`store.Store._opened`)."""
    log = read(shape, learner, folder.log)
    last = log.entries[-1]
    mark = folder.mark._replace(sequence=log.next - 1, chain=log.chains[-1], spent=last.spent)
    return folder._replace(mark=mark)


@cache
def rounds_said(shape: Shape, learner: int, log: bytes) -> int:
    """Rounds that were said, by a log."""
    return standing.said(read(shape, learner, log))


@dataclass(frozen=True, slots=True)
class Recovered:
    """A learner, as its log has it: rounds said and done, and the messages that a neighbour may lack."""

    said: int
    done: int
    kept: tuple[tuple[int, bytes], ...]


@cache
def recovered(link: Callable[[], Link], shape: Shape, learner: int, log: bytes) -> Recovered:
    """A learner that is started again."""
    run, new = run_of(shape), link()
    recovery = Recovery(
        run.algorithm,
        codec_of(shape),
        plan_of(shape, learner),
        run.spec.roster.attendance(learner, shape.rounds),
        Books(run.algorithm.accountant(learner), None),
        Intake(FEATURES, run.spec.loss, shape.rounds),
        run.algorithm.start(Who(learner)),
        lambda state, batch: None,
        deque(maxlen=new._frames.maxlen),
    )
    for entry in read(shape, learner, log).entries:
        recovery.take(entry)
    for t, message in recovery.frames:
        new.say(t, message)
    return Recovered(recovery.said, recovery.done, tuple(new._frames))


# ---- neighbours ----------------------------------------------------------------------------------------------------------


def _link(link: Callable[[], Link], kept: tuple[tuple[int, bytes], ...]) -> Link:
    new = link()
    for t, message in kept:
        new.say(t, message)
    return new


@cache
def kept(
    link: Callable[[], Link], before: tuple[tuple[int, bytes], ...], t: int, message: bytes
) -> tuple[tuple[int, bytes], ...]:
    """What a link keeps once a message was said."""
    after = _link(link, before)
    after.say(t, message)
    return tuple(after._frames)


class _Unwritten:
    """A stream that nothing is written to."""

    async def write(self, message: bytes) -> None:
        raise NotImplementedError


@cache
def due(link: Callable[[], Link], before: tuple[tuple[int, bytes], ...], next_round: int) -> tuple[bytes, ...]:
    """What a link says on a new stream."""
    attached = _link(link, before)
    attached._kick = lambda: None  # type: ignore[method-assign] # the model says when it is written
    attached.attach(_Unwritten(), next_round)
    return tuple(attached._due)


def _inbox(shape: Shape, learner: int, box: Box) -> Inbox[Message]:
    plan = plan_of(shape, learner)
    new: Inbox[Message] = Inbox(
        plan.neighbours, plan.heard, first_round=box.round
    )  # one round ahead: the network is in lockstep
    for j, messages in zip(neighbours(shape, learner), box.heard, strict=True):
        for t, message in enumerate(messages, start=box.round):
            new.put(j, t, j, codec_of(shape).decode(message)[2])
    return new


@cache
def heard(shape: Shape, learner: int, box: Box, neighbour: int, message: bytes) -> Box | None:
    """The inbox with one more message; None: it is refused, and the stream ends."""
    t, sender, decoded = codec_of(shape).decode(message)
    try:
        _inbox(shape, learner, box).put(neighbour, t, sender, decoded)
    except SottovoceError:
        return None
    at = neighbours(shape, learner).index(neighbour)
    return box._replace(heard=(*box.heard[:at], (*box.heard[at], message), *box.heard[at + 1 :]))


@cache
def complete(shape: Shape, learner: int, box: Box) -> bool:
    """Was everybody heard in this round?"""
    return _inbox(shape, learner, box).complete


class Greeting(NamedTuple):
    """What a session knows where it greets, or is greeted by, a neighbour.

    Attributes:
        learner, incarnation, said: its own.
        box: its inbox.
        known: incarnation that the neighbour has greeted with before.
    """

    learner: int
    incarnation: int
    said: int
    box: Box
    known: int = 0


@cache
def hello(shape: Shape, own: Greeting, neighbour: int) -> bytes:
    """What a side says of itself when a stream is opened."""
    return exchange._hello(_session(shape, own, neighbour), neighbour)


@cache
def greeted(shape: Shape, own: Greeting, neighbour: int, payload: bytes) -> tuple[int, int] | None:
    """The first round that the neighbour has not heard, and its incarnation; None: it is refused."""
    session = _session(shape, own, neighbour)
    try:
        _, asked = exchange._greeted(session, payload)
    except SottovoceError:
        return None
    return asked, session.links[neighbour].incarnation


def _session(shape: Shape, own: Greeting, neighbour: int) -> Session:
    """As much of a session as a greeting looks at."""
    run, link = run_of(shape), Link()
    link.incarnation = own.known
    bare: Any = SimpleNamespace(
        role=Role(RUN, run.spec, FEATURES, own.learner, run.spec.names[own.learner], own.incarnation),
        inbox=_inbox(shape, own.learner, own.box),
        codec=codec_of(shape),
        links={neighbour: link},
        _plan=plan_of(shape, own.learner),
        _said=own.said,
    )
    bare.require_own_past = lambda j, asked: Session.require_own_past(bare, j, asked)
    return cast(Session, bare)


# ---- the coordinator -----------------------------------------------------------------------------------------------------


def _blank(shape: Shape) -> RunBook:
    return RunBook(RUN, run_of(shape), FEATURES, ("",) * shape.learners)


def _book(shape: Shape, book: Book) -> RunBook:
    new = _blank(shape)
    new.state, new.statuses = book.state, [_status(shape, i, *each) for i, each in enumerate(book.statuses)]
    new.clock.resume(book.granted)
    for i, (_, done, _) in enumerate(book.statuses):
        if book.state is RunState.RUNNING:  # before, the clock was told nothing
            new.clock.progress(i, done, 0)
    return new


def _value(book: RunBook) -> Book:
    return Book(
        book.state,
        book.clock.granted,
        tuple((each.state, each.rounds_done, each.rounds_said) for each in book.statuses),
    )


def _status(shape: Shape, learner: int, state: LearnerState, done: int, said: int) -> LearnerStatus:
    return LearnerStatus(run_of(shape).spec.names[learner], RUN, state, rounds_done=done, rounds_said=said)


@cache
def new_book(shape: Shape) -> Book:
    """Of a run that begins."""
    return _value(_blank(shape))


@cache
def reported(shape: Shape, book: Book, learner: int, status: tuple[LearnerState, int, int]) -> Book:
    """A report was taken in."""
    now = _book(shape, book)
    now.report(_status(shape, learner, *status))
    return _value(now)


@cache
def taken_up(shape: Shape, kept: Book) -> Book:
    """A run that another coordinator has left, as it was written (`courses.Course.resumed`)."""
    if kept.state in (RunState.FINISHED, RunState.FAILED):
        return kept
    now = _blank(shape)
    now.restore(kept.state, [_status(shape, i, *each) for i, each in enumerate(kept.statuses)], NOW)
    return _value(now)


@cache
def taken_back(shape: Shape, book: Book, granted: int) -> Book:
    """A learner is there again, and was granted so much (`service.Coordinator._take_back`)."""
    now = _book(shape, book)
    now.clock.resume(granted)
    return _value(now)
