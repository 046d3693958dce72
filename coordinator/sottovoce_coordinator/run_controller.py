"""The course of a run from its first directive to its end: what its learners tell, what they are told, who is missed.

Members change while a run goes on. All who are there rest, so that it is known which rounds were sent; the spec gets another
absence, from the first round on that none has sent; then all go on from their logs, by that spec. Each step is written down
before learners receive it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import structlog

from sottovoce_coordinator.capture_client import CaptureClient
from sottovoce_coordinator.learner_registry import JoinedLearner, LearnerRegistry, require_learner_name
from sottovoce_coordinator.run_registry import ManagedRun
from sottovoce_coordinator.run_state import RunState, RunStateMachine
from sottovoce_coordinator.store import CoordinatorStore, log_write_failures
from sottovoce_core.errors import FailedPrecondition, NotFound, SottovoceError, Unavailable
from sottovoce_core.runs.participation import add_learner, remove_learner
from sottovoce_core.runs.run import Run, build_run, require_equal_noise
from sottovoce_core.spec import RunSpec
from sottovoce_core.text import abbreviate_names
from sottovoce_rpc.commands import Command
from sottovoce_rpc.learner_status import LearnerStatus, WaitReport, describe_violation
from sottovoce_rpc.specs import spec_to_wire
from sottovoce_rpc.tasks import Tasks
from sottovoce_wire.v1.coordinator_pb2 import Stop, Violation

log = structlog.get_logger()

SpecChange = Callable[[RunSpec], RunSpec]

QUIESCE_COMMAND = Stop(reason="learners leave or join")
_RETRY_INTERVAL_S = 1.0
"""Between two tries to write that learners are lost."""


class RunController:
    """Leads runs, each by itself.

    Args:
        store: where they are kept.
        members: who is told.
        captures: what the eavesdropper captures.
        tasks: of the coordinator.
    """

    def __init__(
        self, store: CoordinatorStore, members: LearnerRegistry, captures: CaptureClient, tasks: Tasks
    ) -> None:
        self._store, self._members, self._captures, self._tasks = store, members, captures, tasks

    # ---- under way ----------------------------------------------------------------------------------------

    def start_run(self, course: ManagedRun, briefings: Sequence[Sequence[Command]]) -> None:
        """Brief every learner, all assignments before the first epoch, so that nobody meets a neighbour that knows nothing."""
        book = course.machine
        for directives in zip(*briefings, strict=True):
            self._members.enqueue_commands(
                book.run_id, {name: [own] for name, own in zip(book.index, directives, strict=True)}
            )
        for name, index in book.index.items():  # who joined while the run was being started
            if name in self._members:
                self._back(course, index, self._members.get(name))
        self._accompany(course)

    def continue_run(self, course: ManagedRun) -> None:
        """With a run whose learners are yet to come back."""
        log.info("run goes on", run_id=course.machine.run_id, granted=course.machine.clock.leased_until)
        for index, since in course.machine.disconnected_since.items():
            self._tasks.start(self._deadline(course, index, since), "nobody misses a learner")
        self._accompany(course)

    def resume_run(self, course: ManagedRun) -> None:
        """A run that failed: whoever is here goes on at once.

        Raises:
            Unavailable: how far they may go cannot be written.
        """
        self.continue_run(course)
        book, here = (
            course.machine,
            [name for name in course.machine.index if name in self._members and course.has_learner(name)],
        )
        self._reserve(course)
        for name in here:
            self._back(course, book.index[name], self._members.get(name))
        self._members.enqueue_commands(
            book.run_id, {name: book.build_resume_commands(book.index[name]) for name in here}
        )

    def _accompany(self, course: ManagedRun) -> None:
        """What goes on beside a run until it ends."""
        self._captures.monitor_capture(course, lambda why: self.end_run(course, RunState.FAILED, why))
        self._tasks.start(self._look_ahead(course), "grants are not prepared")
        if (period_s := course.machine.run.spec.clock.period_s) is not None:
            self._tasks.start(self._pace(course, period_s), "the clock stands still")

    async def _look_ahead(self, course: ManagedRun) -> None:
        """Know what the next grants will say of the network, a round at a time: none of them holds up everybody."""
        book = course.machine
        if book.digests.is_needed:
            for t in range(
                book.clock.leased_until, min(book.clock.leased_until + book.run.spec.clock.window, book.run.spec.rounds)
            ):
                book.digests.digest(t)
                await asyncio.sleep(0)

    async def _pace(self, course: ManagedRun, period_s: float) -> None:
        """Grant one round a period (paced mode)."""
        book = course.machine
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not book.has_ended:
            due += period_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            if book.state is RunState.RUNNING:
                book.clock.tick()
                with log_write_failures():
                    self._grant(course)

    def _grant(self, course: ManagedRun) -> None:
        """Tell a grant that has grown; else directives would heap up for as long as a learner is behind.

        Who rests is briefed anew; one that came back meanwhile knows no epochs between.
        """
        book = course.machine
        if course.is_quiesced or book.clock.leased_until <= course.announced_lease:
            return
        self._reserve(course)
        course.announced_lease = book.clock.leased_until
        grant = book.build_next_lease()
        self._members.enqueue_commands(book.run_id, {name: [grant] for name in book.index if course.has_learner(name)})
        self._tasks.start(self._look_ahead(course), "grants are not prepared")

    def _reserve(self, course: ManagedRun) -> None:
        """Before anybody is told how far it may go.

        Raises:
            Unavailable: it cannot be written.
        """
        book = course.machine
        if book.clock.leased_until:
            ahead = (book.run.spec.clock.window + 1) // 2
            self._store.reserve_lease(book.run_id, book.clock.leased_until, ahead, course.encode_view())

    def save_progress(self, courses: Iterable[ManagedRun]) -> None:
        """Write down how far learners are; a disk that is full has no part in this."""
        if views := {course.machine.run_id: course.encode_view() for course in courses}:
            with log_write_failures():
                self._store.save_views(views)

    # ---- learners -----------------------------------------------------------------------------------------

    def handle_report(
        self, course: ManagedRun, status: LearnerStatus, waiting: WaitReport | None, noticed: Sequence[Violation] = ()
    ) -> None:
        """A learner's progress, and what it has noticed of its neighbours."""
        book = course.machine
        known = len(book.violations)
        book.handle_report(status, waiting, noticed)
        for each in list(book.violations.values())[known:]:
            text = describe_violation(each, book.run.spec.names)
            log.warning("misconduct", run_id=book.run_id, detail=text)
        course.progress_event.set()
        course.notify_if_due()
        self._judged(course)
        if not course.machine.has_ended:
            self._grant(course)

    def handle_rejoin(self, course: ManagedRun, member: JoinedLearner) -> None:
        """A learner of the run is there again, and may know of more grants than this coordinator."""
        book = course.machine
        index = book.index[member.name]
        self._back(course, index, member)
        ours = member.introduction.run_id == book.run_id
        if ours:
            book.clock.raise_lease(max(member.introduction.lease_until_round, member.claim.rounds_committed or 0))
        if course.is_quiesced:
            self._rest_one(course, index, member if ours else None)
            return
        self._reserve(course)
        self._members.enqueue_commands(book.run_id, {member.name: book.build_resume_commands(index)})
        self._grant(course)

    def _rest_one(self, course: ManagedRun, index: int, member: JoinedLearner | None) -> None:
        """A learner is there again while all rest; None: as one that is not in the run."""
        book = course.machine
        if (
            member is not None and member.introduction.lease_until_round
        ):  # only its stream broke: it may speak until it is told to rest
            book.possible_senders.add(index)
        else:
            said, closed = (
                (None, False)
                if member is None
                else (member.claim.rounds_committed, member.introduction.last_round_learned)
            )
            book.mark_quiesced(index, said, closed)
        self._members.enqueue_commands(book.run_id, {book.run.spec.names[index]: [QUIESCE_COMMAND]})
        course.progress_event.set()

    def handle_quiesced_report(self, course: ManagedRun, status: LearnerStatus) -> None:
        """A learner came back while all rest, and tells how far it was in an attempt before this one."""
        if course.is_quiesced:
            course.machine.handle_quiesced_report(status)
            course.progress_event.set()

    def _back(self, course: ManagedRun, index: int, member: JoinedLearner) -> None:
        """A learner is there again; whoever opens streams to it is told where, if that is elsewhere."""
        book, names = course.machine, course.machine.run.spec.names
        book.mark_connected(index)
        moved = book.update_address(index, member.introduction.address)
        self._members.enqueue_commands(book.run_id, {names[i]: [epoch] for i, epoch in moved.items()})

    def handle_disconnect(self, course: ManagedRun, name: str) -> None:
        """A learner's stream has ended: who is away is told at once; the run ends if it is not back by the deadline."""
        index, since = course.machine.index[name], datetime.now(UTC)
        course.machine.mark_disconnected(index, since)
        log.warning("learner is gone", learner=name, round=course.machine.statuses[index].rounds_done)
        self._tasks.start(self._deadline(course, index, since), "nobody misses a learner")

    async def _deadline(self, course: ManagedRun, index: int, since: datetime) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(course.machine.run.spec.clock.deadline_s):
                await course.end_event.wait()
        course.machine.handle_deadline(index, since)
        self._judged(course)

    def _judged(self, course: ManagedRun) -> None:
        """The run may have ended by what was heard, or lost learners."""
        if course.machine.has_ended:
            self._after_end(course)
        elif course.machine.pending_removals and course.is_quiesced:
            course.progress_event.set()  # one learner fewer is waited for
        elif course.machine.pending_removals:
            self._tasks.start(self._lose(course), "learners are not lost")

    async def run_operator_change(self, course: ManagedRun, change: Coroutine[Any, Any, None]) -> None:
        """A change that an operator asked for. Once begun it comes to its end, whether anybody still waits for it or not.

        Raises:
            SottovoceError: as the change.
        """

        async def whole() -> None:
            try:
                await change
            finally:
                self._judged(course)

        await asyncio.shield(self._tasks.start(whole()))

    async def _lose(self, course: ManagedRun) -> None:
        try:
            await self._go_on_without(course)
        except SottovoceError as error:
            names = abbreviate_names(
                [course.machine.run.spec.names[i] for i in sorted(course.machine.pending_removals)]
            )
            why = f"{names} lost, and the run cannot go on without: {error}"
            self.end_run(course, RunState.FAILED, course.machine.append_violations(why))
        self._judged(course)

    # ---- the end ------------------------------------------------------------------------------------------

    def end_run(self, course: ManagedRun, state: RunState, detail: str) -> None:
        """End a run; one that has ended is as it was."""
        if not course.machine.has_ended:
            course.machine.end(state, detail)
            self._after_end(course)

    def _after_end(self, course: ManagedRun) -> None:
        """Let the learners go, who hold their channels open even when they have finished, and close the capture, once."""
        if course.ended_at is not None:
            return
        course.ended_at = datetime.now(UTC)
        book = course.machine
        tell = log.warning if book.state is RunState.FAILED else log.info
        tell(
            "run ended",
            run_id=book.run_id,
            state=book.state.value,
            reason=book.detail,
            rounds=book.clock.completed_rounds,
        )
        self.save_progress([course])  # a coordinator after this one would find it under way, and its learners done
        self._members.enqueue_commands(
            course.machine.run_id, {name: [course.machine.build_stop()] for name in course.machine.index}
        )
        course.capture_close_task = None if course.capture_loss_reason else self._captures.close_capture(course.machine)
        course.end_event.set()
        course.progress_event.set()
        course.notify_watchers()

    # ---- changes of members (reconfiguration) -------------------------------------------------------------

    async def remove_learner(self, course: ManagedRun, name: str) -> None:
        """A learner says its last round; one that is gone is lost at once.

        Raises:
            NotFound: it is not in the run.
            FailedPrecondition: it is away, or the run is changed already, or not running.
            Unavailable: others did not rest, and are lost.
            SpecError: the run cannot go on without it.
        """
        book = _required(course, name)
        if (own := book.index[name]) in book.lost_learners:
            raise FailedPrecondition(f"learner {name!r} is lost to run {book.run_id} already")
        if name in self._members or own in book.possible_senders:  # it may be about to come back
            await self._change(course, lambda spec: remove_learner(spec, name, book.first_unsent_round))
            return
        gone = frozenset({own})
        await asyncio.to_thread(_changed, book.run, partial(_without, book=book, lost=gone), book.n_features)
        _require_awake(course)
        book.pending_removals |= gone
        try:
            await self._go_on_without(course)
        except SottovoceError:
            book.pending_removals -= gone
            self._begin_anew(course, book.run)  # as before
            raise

    async def add_learner(self, course: ManagedRun, name: str) -> None:
        """A learner that is away takes part from the first round on that nobody has said.

        Raises:
            FailedPrecondition: it is not here, or not away, or was lost, or as `leave`.
            NotFound: as `leave`.
        """
        book = _required(course, name)
        if name not in self._members:
            raise FailedPrecondition(f"learner {name!r} has not joined this coordinator")
        await self._change(course, lambda spec: add_learner(spec, name, book.first_unsent_round))

    async def _go_on_without(self, course: ManagedRun) -> None:
        """Go on without learners that are lost, those who are lost meanwhile included, as soon as that can be written.

        Raises:
            SottovoceError: the run cannot.
        """
        book = course.machine
        if course.is_quiesced:
            return  # whoever lets them rest looks again
        while book.pending_removals and not book.has_ended:
            course.is_quiesced = True
            try:
                await self._rest(course)
                lost = frozenset(book.pending_removals)
                await self._amend(course, partial(_without, book=book, lost=lost))
                book.pending_removals -= lost
            except Unavailable as error:  # a disk that is full: all wait for it, as for a grant
                log.warning("not written", run_id=book.run_id, reason=str(error))
                await asyncio.sleep(_RETRY_INTERVAL_S)
            finally:
                course.is_quiesced = False

    async def _change(self, course: ManagedRun, change: SpecChange) -> None:
        book = course.machine
        await asyncio.to_thread(_changed, book.run, change, book.n_features)  # what is refused wakes nobody
        _require_awake(course)
        course.is_quiesced = True
        try:
            await self._rest(course)
            try:
                _require_rest(book)
                await self._amend(course, change)
            except SottovoceError:
                self._begin_anew(course, book.run)  # as before
                raise
        finally:
            course.is_quiesced = False

    async def _rest(self, course: ManagedRun) -> None:
        """Everybody ends what it does; who does not within the deadline is lost."""
        book = course.machine
        view, ceiling = course.encode_view(), book.max_leased_round + book.run.spec.clock.window
        self._store.save_views({book.run_id: view})  # who goes on after this one, does so anew
        self._store.reserve_lease(book.run_id, ceiling, 0, view)  # when all begin anew
        self._members.enqueue_commands(book.run_id, {name: [QUIESCE_COMMAND] for name in book.index})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(book.run.spec.clock.deadline_s):
                while book.busy_learners and not book.has_ended:
                    course.progress_event.clear()
                    await course.progress_event.wait()
        book.pending_removals |= set(book.busy_learners)

    async def _amend(self, course: ManagedRun, change: SpecChange) -> None:
        """Write the changed run down, tell the eavesdropper, then the learners."""
        book = course.machine
        run = await asyncio.to_thread(_changed, book.run, change, book.n_features)
        if book.has_ended:
            return
        self._store.update_spec(book.run_id, spec_to_wire(run.spec), course.encode_view())
        await self._captures.reconfigure(book, run)
        self._begin_anew(course, run)

    def _begin_anew(self, course: ManagedRun, run: Run) -> None:
        book, before = course.machine, course.machine.lost_learners
        book.reconfigure(run)
        if book.has_ended:  # meanwhile, or nobody has anything left to do: they are told that
            return
        here = [name for name in book.index if name in self._members]
        for name in here:
            own = book.index[name]
            told = (
                [Stop(reason="the run goes on without this learner", final=True)]
                if own in book.lost_learners
                else book.build_resume_commands(own)
            )
            self._members.enqueue_commands(book.run_id, {name: told})
        if gone := [book.run.spec.names[i] for i in sorted(book.lost_learners - before)]:
            log.warning("learners are lost", run_id=book.run_id, learners=gone)


def _required(course: ManagedRun, name: str) -> RunStateMachine:
    """The book of a run that can be changed, with such a learner in it."""
    book = course.machine
    require_learner_name(name)
    if name not in book.index:
        raise NotFound(f"run {book.run_id} has no learner {name!r}; it has {abbreviate_names(sorted(book.index))}")
    if book.state is RunState.RUNNING and not book.clock.leased_until:
        why = "it is only beginning, or its coordinator was started again and its learners are coming back"
        raise FailedPrecondition(f"run {book.run_id} has no round under way, {why}: ask again in a moment")
    if book.has_ended or not book.clock.leased_until:
        raise FailedPrecondition(
            f"learners leave and join a run that is running, and run {book.run_id} is {book.state.value}"
        )
    _require_awake(course)
    return book


def _require_awake(course: ManagedRun) -> None:
    if course.is_quiesced:
        raise FailedPrecondition(f"learners of run {course.machine.run_id} are leaving or joining already: try again")


def _require_rest(book: RunStateMachine) -> None:
    """Who does not rest may have said more than it has told, so it is lost before anybody leaves or joins.

    Raises:
        Unavailable: somebody does not.
    """
    if book.pending_removals:
        names = abbreviate_names([book.run.spec.names[i] for i in sorted(book.pending_removals)])
        raise Unavailable(f"{names} did not rest within the deadline, and the run goes on without: try again then")


def _without(spec: RunSpec, *, book: RunStateMachine, lost: frozenset[int]) -> RunSpec:
    """The spec without learners that are lost, and what their neighbours have not heard of them."""
    for i in sorted(lost - book.lost_learners):
        # Nobody knows how much it has said of what was granted.
        spec = remove_learner(spec, spec.names[i], book.max_leased_round, book.compute_missed_from_rounds(i))
    return spec


def _changed(run: Run, change: SpecChange, n_features: int) -> Run:
    changed = build_run(change(run.spec), n_features)
    require_equal_noise(run.algorithm, changed.algorithm, run.spec)
    return changed
