"""Learners that leave a run under way, are lost to it, or join it.

All who are there rest, so that it is known which rounds were said; the spec gets another absence, from the first round on that
nobody has said; then all go on from their logs, by that spec. What is told is written down before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

import structlog

from sottovoce.errors import NotFound, NotReady, SottovoceError, Unavailable
from sottovoce.running.participation import with_learner, without
from sottovoce.running.run import Run, build_run, require_noise
from sottovoce.spec import RunSpec
from sottovoce.text import in_short
from sottovoce_coordinator.captures import Captures
from sottovoce_coordinator.courses import Course
from sottovoce_coordinator.joining import Members, require_named
from sottovoce_coordinator.runs import RunBook, RunState
from sottovoce_coordinator.store import Store
from sottovoce_rpc.directives import Stop
from sottovoce_rpc.specs import spec_to_wire

log = structlog.get_logger()

Change = Callable[[RunSpec], RunSpec]

RESTING = Stop("learners leave or join")
_AGAIN_S = 1.0
"""Between two tries to write that learners are lost."""


class Amender:
    """Changes who takes part in runs under way.

    Args:
        store: where runs are kept.
        members: who is here.
        captures: what the eavesdropper captures.
    """

    def __init__(self, store: Store, members: Members, captures: Captures) -> None:
        self._store, self._members, self._captures = store, members, captures

    async def leave(self, course: Course, name: str) -> None:
        """A learner says its last round; one that is gone is lost at once.

        Raises:
            NotFound: it is not in the run.
            NotReady: it is away, or the run is changed already, or not running.
            Unavailable: others did not rest, and are lost.
            SpecError: the run cannot go on without it.
        """
        book = _required(course, name)
        if (own := book.index[name]) in book.lost:
            raise NotReady(f"learner {name!r} is lost to run {book.run_id} already")
        if name in self._members or own in book.unsure:  # it may be about to come back
            await self._operated(course, lambda spec: without(spec, name, book.unsaid))
            return
        gone = frozenset({own})
        await asyncio.to_thread(_changed, book.run, partial(_without, book=book, lost=gone), book.n_features)
        _require_awake(course)
        book.losing |= gone
        try:
            await self.lose(course)
        except SottovoceError:
            book.losing -= gone
            self._go_on(course, book.run)  # as before
            raise

    async def join(self, course: Course, name: str) -> None:
        """A learner that is away takes part from the first round on that nobody has said.

        Raises:
            NotReady: it is not here, or not away, or was lost, or as `leave`.
            NotFound: as `leave`.
        """
        book = _required(course, name)
        if name not in self._members:
            raise NotReady(f"learner {name!r} has not joined this coordinator")
        await self._operated(course, lambda spec: with_learner(spec, name, book.unsaid))

    async def lose(self, course: Course) -> None:
        """Go on without learners that are lost, those who are lost meanwhile included, as soon as that can be written.

        Raises:
            SottovoceError: the run cannot.
        """
        book = course.book
        if course.resting:
            return  # whoever lets them rest looks again
        while book.losing and not book.ended:
            course.resting = True
            try:
                await self._rest(course)
                lost = frozenset(book.losing)
                await self._amend(course, partial(_without, book=book, lost=lost))
                book.losing -= lost
            except Unavailable as error:  # a disk that is full: all wait for it, as for a grant
                log.warning("not written", run_id=book.run_id, reason=str(error))
                await asyncio.sleep(_AGAIN_S)
            finally:
                course.resting = False

    async def _operated(self, course: Course, change: Change) -> None:
        book = course.book
        await asyncio.to_thread(_changed, book.run, change, book.n_features)  # what is refused wakes nobody
        _require_awake(course)
        course.resting = True
        try:
            await self._rest(course)
            try:
                _require_rest(book)
                await self._amend(course, change)
            except SottovoceError:
                self._go_on(course, book.run)  # as before
                raise
        finally:
            course.resting = False

    async def _rest(self, course: Course) -> None:
        """Everybody ends what it does; who does not within the deadline is lost."""
        book = course.book
        view, ceiling = course.record(), book.ceiling + book.run.spec.clock.window
        self._store.keep({book.run_id: view})  # who goes on after this one, does so anew
        self._store.grant(book.run_id, ceiling, 0, view)  # when all begin anew
        self._members.tell(book.run_id, {name: [RESTING] for name in book.index})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(book.run.spec.clock.deadline_s):
                while book.busy and not book.ended:
                    course.heard.clear()
                    await course.heard.wait()
        book.losing |= set(book.busy)

    async def _amend(self, course: Course, change: Change) -> None:
        """Write the changed run down, tell the eavesdropper, then the learners."""
        book = course.book
        run = await asyncio.to_thread(_changed, book.run, change, book.n_features)
        if book.ended:
            return
        self._store.amend(book.run_id, spec_to_wire(run.spec), course.record())
        await self._captures.amend(book, run)
        self._go_on(course, run)

    def _go_on(self, course: Course, run: Run) -> None:
        book, before = course.book, course.book.lost
        book.amend(run)
        if book.ended:  # meanwhile, or nobody has anything left to do: they are told that
            return
        here = [name for name in book.index if name in self._members]
        for name in here:
            own = book.index[name]
            told = [Stop("the run goes on without this learner", over=True)] if own in book.lost else book.briefing(own)
            self._members.tell(book.run_id, {name: told})
        if gone := [book.run.spec.names[i] for i in sorted(book.lost - before)]:
            log.warning("learners are lost", run_id=book.run_id, learners=gone)


def _required(course: Course, name: str) -> RunBook:
    """The book of a run that can be changed, with such a learner in it."""
    book = course.book
    require_named(name)
    if name not in book.index:
        raise NotFound(f"run {book.run_id} has no learner {name!r}; it has {in_short(sorted(book.index))}")
    if book.state is RunState.RUNNING and not book.clock.granted:
        why = "it is only beginning, or its coordinator was started again and its learners are coming back"
        raise NotReady(f"run {book.run_id} has no round under way, {why}: ask again in a moment")
    if book.ended or not book.clock.granted:
        raise NotReady(f"learners leave and join a run that is running, and run {book.run_id} is {book.state.value}")
    _require_awake(course)
    return book


def _require_awake(course: Course) -> None:
    if course.resting:
        raise NotReady(f"learners of run {course.book.run_id} are leaving or joining already: try again")


def _require_rest(book: RunBook) -> None:
    """Who does not rest may have said more than it has told, so it is lost before anybody leaves or joins.

    Raises:
        Unavailable: somebody does not.
    """
    if book.losing:
        names = in_short([book.run.spec.names[i] for i in sorted(book.losing)])
        raise Unavailable(f"{names} did not rest within the deadline, and the run goes on without: try again then")


def _without(spec: RunSpec, *, book: RunBook, lost: frozenset[int]) -> RunSpec:
    """The spec without learners that are lost, and what their neighbours have not heard of them."""
    for i in sorted(lost - book.lost):
        # Nobody knows how much it has said of what was granted.
        spec = without(spec, spec.names[i], book.ceiling, book.unheard(i))
    return spec


def _changed(run: Run, change: Change, n_features: int) -> Run:
    changed = build_run(change(run.spec), n_features)
    require_noise(run.algorithm, changed.algorithm, run.spec)
    return changed
