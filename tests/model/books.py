"""What a coordinator decides in a run: grants, its end, who rests, and the spec when learners leave, join or are lost."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache, partial
from typing import NamedTuple

from sottovoce_coordinator import run_controller
from sottovoce_coordinator.run_registry import ManagedRun
from sottovoce_coordinator.run_state import CaptureBinding, RunState, RunStateMachine
from sottovoce_coordinator.store import StoredRun
from sottovoce_core.errors import SottovoceError
from sottovoce_core.runs.participation import add_learner, remove_learner
from sottovoce_core.spec import RunSpec
from sottovoce_rpc.learner_status import LearnerState, LearnerStatus
from sottovoce_rpc.specs import spec_to_wire
from tests.model.runs import FEATURES, RUN, Shape, absences_of, run_of

NOW = datetime(2000, 1, 1, tzinfo=UTC)

Status = tuple[LearnerState, int, int]
"""What a learner reported: state, rounds done, rounds said."""


class Book(NamedTuple):
    """A run's book.

    Attributes:
        state: where it stands.
        granted: rounds.
        statuses: by learner.
        absences: of its spec.
        attempt: how often all have begun anew.
        losing: learners that it is to go on without.
        unsure: who may speak by what a coordinator before this one, or a stream that broke, has told them.
        reserved: rounds that a coordinator before this one may have granted.
    """

    state: RunState
    granted: int
    statuses: tuple[Status, ...]
    absences: str = "[]"
    attempt: int = 0
    losing: frozenset[int] = frozenset()
    unsure: frozenset[int] = frozenset()
    reserved: int = 0

    def shape(self, run: Shape) -> Shape:
        """The run as the book has it."""
        return run.amended(self.absences)


def _blank(shape: Shape, attempt: int = 0) -> RunStateMachine:
    return RunStateMachine(RUN, run_of(shape), FEATURES, ("",) * shape.learners, attempt=attempt)


def _book(run: Shape, book: Book, away: frozenset[int] = frozenset()) -> RunStateMachine:
    new = _blank(book.shape(run), book.attempt)
    new.state, new.statuses = book.state, [_status(run, i, each) for i, each in enumerate(book.statuses)]
    new.pending_removals, new.possible_senders, new.disconnected_since = (
        set(book.losing),
        set(book.unsure),
        dict.fromkeys(away, NOW),
    )
    new.inherited_lease = book.reserved
    new.clock.raise_lease(book.granted)
    for i in range(run.learners):
        if book.state is RunState.RUNNING:  # before, the clock was told nothing
            new._record_progress(i)
    return new


def _value(book: RunStateMachine) -> Book:
    return Book(
        book.state,
        book.clock.leased_until,
        tuple((each.state, each.rounds_done, each.rounds_committed) for each in book.statuses),
        absences_of(book.run.spec),
        book.attempt,
        frozenset(book.pending_removals),
        frozenset(book.possible_senders),
        book.inherited_lease,
    )


def _status(shape: Shape, learner: int, status: Status) -> LearnerStatus:
    state, done, said = status
    return LearnerStatus(run_of(shape).spec.names[learner], RUN, state, rounds_done=done, rounds_committed=said)


@cache
def new_book(shape: Shape) -> Book:
    """Of a run that begins."""
    return _value(_blank(shape))


@cache
def reported(shape: Shape, book: Book, learner: int, status: Status) -> Book:
    """A report was taken in."""
    now = _book(shape, book)
    now.handle_report(_status(shape, learner, status))
    return _value(now)


@cache
def taken_up(shape: Shape, kept: Book, reserved: int) -> Book:
    """A run that another coordinator has left, as it was written (`ManagedRun.record`, `ManagedRun.resumed`)."""
    if kept.state in (RunState.FINISHED, RunState.FAILED):
        return kept
    before = _book(shape, kept)
    view = ManagedRun(before, NOW, is_durable=True).encode_view()
    written = StoredRun(RUN, spec_to_wire(before.run.spec), FEATURES, CaptureBinding(), view, reserved)
    return _value(ManagedRun.from_stored_run(written, before.run, NOW).machine)


@cache
def taken_back(shape: Shape, book: Book, learner: int, granted: int) -> Book:
    """A learner is there again, and was granted so much (`RunController.handle_rejoin`)."""
    now = _book(shape, book)
    now.mark_connected(learner)
    now.clock.raise_lease(granted)
    return _value(now)


# ---- learners leave, join, and are lost ------------------------------------------------------------------------------


@cache
def missed(shape: Shape, book: Book, learner: int) -> Book:
    """A learner is gone, and the deadline has passed (`RunController._watch_deadline`)."""
    now = _book(shape, book, frozenset({learner}))
    now.handle_deadline(learner, NOW)
    return _value(now)


@cache
def busy(shape: Shape, book: Book, away: frozenset[int]) -> frozenset[int]:
    """Those whom a change waits for."""
    return frozenset(_book(shape, book, away).busy_learners)


@cache
def rested(shape: Shape, book: Book, learner: int, granted: int, said: int, closed: bool) -> Book:
    """A learner is there again while all rest (`RunController.handle_rejoin`, `_rest`).

    Args:
        shape, book: the run.
        learner: who it is.
        granted: to a process that never stopped, so it may speak until it is told to rest; 0: it does not speak.
        said: rounds, by its log.
        closed: by its log the last one was learned, too.
    """
    now = _book(shape, book)
    now.mark_connected(learner)
    now.clock.raise_lease(max(granted, said))
    if granted:
        now.possible_senders.add(learner)
    else:
        now.mark_quiesced(learner, said, closed)
    return _value(now)


@cache
def rests(shape: Shape, book: Book, learner: int, status: Status) -> Book:
    """While all rest, a learner tells how far it was in an attempt before this one (`RunController.rests`)."""
    now = _book(shape, book)
    now.handle_quiesced_report(_status(shape, learner, status))
    return _value(now)


@cache
def changed(shape: Shape, book: Book, verb: str, learner: int) -> str | None:
    """The absences of the changed spec (`RunController._apply_change`); None: the run cannot go on so.

    Args:
        shape, book: the run, whose learners rest.
        verb: `leave`, `join` or `lose`; whoever is to be lost is in the book.
        learner: who leaves or joins.
    """
    if verb != "lose" and book.losing:  # `RunController._change`: not before they are lost
        return None
    now = _book(shape, book)
    name = now.run.spec.names[learner]
    changes: dict[str, Callable[[RunSpec], RunSpec]] = {
        "leave": lambda spec: remove_learner(spec, name, now.first_unsent_round),
        "join": lambda spec: add_learner(spec, name, now.first_unsent_round),
        "lose": partial(run_controller._remove_lost, machine=now, lost=book.losing),
    }
    try:
        return absences_of(run_controller._build_changed_run(now.run, changes[verb], FEATURES).spec)
    except SottovoceError:
        return None


@cache
def ceiling(shape: Shape, book: Book) -> int:
    """No round from this one on was ever granted."""
    return _book(shape, book).max_leased_round


@cache
def amended(shape: Shape, book: Book, absences: str) -> Book:
    """All who are told go on by another spec (`RunStateMachine.amend`)."""
    now = _book(shape, book)
    now.reconfigure(run_of(shape.amended(absences)))
    return _value(now)
