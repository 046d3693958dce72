"""A state of the world, as a value: folders and processes of learners, streams between them, and a coordinator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from sottovoce_coordinator.store import LearnerBinding
from sottovoce_learner.storage.wal import RoundPayload
from sottovoce_rpc.learner_status import LearnerState
from tests.model.books import Book
from tests.model.channels import Box
from tests.model.folders import Folder

T = TypeVar("T")
CALLER, CALLEE = 0, 1


class Faults(NamedTuple):
    """How often each may still happen.

    Attributes:
        deaths: of a learner, between two steps or at any write within one.
        streams: lost between neighbours, or between a learner and the coordinator.
        answers: of the coordinator, or to a feeder, that never arrive.
        coordinator: deaths of the coordinator.
        copies: of the first learner's folder, made while it is down, and later put back or started beside it.
        hot: the same, made while it runs.
        cuts: of a folder's log, by its last entry, while its learner is down.
        leave, join: an operator lets a learner that is there leave, or one that has a place join.
        lost: a learner is given up, by a deadline or an operator, whether it lives or not.
    """

    deaths: int = 0
    streams: int = 0
    answers: int = 0
    coordinator: int = 0
    copies: int = 0
    hot: int = 0
    cuts: int = 0
    leave: int = 0
    join: int = 0
    lost: int = 0


NONE = Faults()


class Session(NamedTuple):
    """A learner in the run (`session.Session`): its state, rounds granted, said and done, and what is in memory only.

    Attributes:
        inputs: of the round learned last, to be written down with the next message.
        kept: own messages that a neighbour may lack, by round.
        known: incarnations that the neighbours have greeted with, in their order; 0: not met yet.
    """

    state: LearnerState
    granted: int
    said: int
    done: int
    inputs: RoundPayload
    kept: tuple[tuple[int, bytes], ...]
    box: Box
    known: tuple[int, ...]


class Begin(NamedTuple):
    """A briefing: the run as it is now, of which so much is granted."""

    attempt: int
    offline_intervals: str
    granted: int


class Stop(NamedTuple):
    """The end: for now, or for good."""

    over: bool = False


Directive = Stop | Begin


class Process(NamedTuple):
    """A learner's process.

    Attributes:
        written: it was issued the incarnation of its folder, and has to confirm it.
        confirmed: it is that incarnation.
        joined: its stream to the coordinator is there.
        out: it was refused, or told that the run goes on without it, and has ended.
        session: None until it was confirmed.
        attempt: at the run, that it was told last.
        resting: it was told to rest, and not to begin since.
        told: directives on their way to it.
    """

    written: bool = False
    confirmed: bool = False
    joined: bool = False
    out: bool = False
    session: Session | None = None
    attempt: int = 0
    resting: bool = False
    told: tuple[Directive, ...] = ()


class Stream(NamedTuple):
    """A stream between two neighbours, by the numbers of their folders.

    Attributes:
        ends: of the caller and the callee: True: attached; False: not yet; None: gone.
        on_way: to the caller and to the callee.
        hello: the callee's, until the caller has read it.
        asked: the first round that the caller has not heard.
    """

    caller: int
    callee: int
    ends: tuple[bool | None, bool | None]
    on_way: tuple[tuple[bytes, ...], tuple[bytes, ...]]
    hello: bytes
    asked: int


class Change(NamedTuple):
    """Learners leave, join or are lost: all rest until it is told.

    Attributes:
        verb: `leave`, `join` or `lose`.
        learner: who leaves or joins.
        offline_intervals: of the changed spec, once it is written down.
    """

    verb: str
    learner: int = 0
    offline_intervals: str = ""


class Coordinator(NamedTuple):
    """The coordinator.

    Attributes:
        up: it runs.
        members: what it knows of each learner, durably.
        book: of the run.
        kept: the book as it was last written because something was about to be told.
        reserved: rounds that may have been granted, as written.
        change: that is under way.
    """

    up: bool
    members: tuple[LearnerBinding, ...]
    book: Book
    kept: Book
    reserved: int = 0
    change: Change | None = None

    @property
    def record(self) -> Book:
        """The run as it would be written now: who rests will go on as after another attempt (`ManagedRun.record`)."""
        return self.book._replace(
            offline_intervals=self.kept.offline_intervals,
            attempt=self.book.attempt + (self.change is not None),
            losing=frozenset(),
            unsure=frozenset(),
            reserved=0,
        )


class State(NamedTuple):
    """Everything, and what is needed to judge it.

    Attributes:
        folders, processes: of the learners, by index; behind them one that was copied.
        streams: between neighbours, oldest first.
        coordinator: the coordinator.
        receipts: batches that each learner's feeder need not send again.
        left: messages that have ever left a learner.
        copy: of the first learner's folder.
        set_back: its folder was replaced by the copy.
        damaged: learners whose folder was cut, and who say nothing more.
        faults: that may still happen.
    """

    folders: tuple[Folder, ...]
    processes: tuple[Process, ...]
    streams: tuple[Stream, ...]
    coordinator: Coordinator
    receipts: tuple[int, ...]
    left: frozenset[bytes]
    faults: Faults
    copy: Folder | None = None
    set_back: bool = False
    damaged: bool = False


def less(state: State, fault: str) -> State:
    """One fault of a kind has happened."""
    return state._replace(faults=state.faults._replace(**{fault: getattr(state.faults, fault) - 1}))


def with_item(items: tuple[T, ...], at: int, new: T) -> tuple[T, ...]:
    """A tuple with another item at a place."""
    return (*items[:at], new, *items[at + 1 :])


def with_end(items: tuple[T, T], end: int, new: T) -> tuple[T, T]:
    """The same of a pair: what the two ends of a stream have."""
    return (new, items[1]) if end == CALLER else (items[0], new)


def still_open(streams: Iterable[Stream]) -> tuple[Stream, ...]:
    """Streams that something may come of: where one end is gone, that is what is on its way to the other."""
    return tuple(s for s in streams if None not in s.ends or any(s.ends[end] and s.on_way[end] for end in (0, 1)))
