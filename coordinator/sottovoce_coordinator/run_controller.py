"""Controller of active runs, from the first command to the end: handles reports, disconnects and deadlines, and sends commands.

Learners leave and join while a run goes on (reconfiguration). First all connected learners are quiesced, so that it is known
which rounds were sent; the spec gets another offline interval, from the first unsent round on; then all go on from their logs,
with that spec. Each step is stored before learners are informed.
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
"""Interval between attempts to write that learners are lost."""


class RunController:
    """Controller of all active runs.

    Args:
        store: durable store of the runs.
        learners: connected learners.
        captures: client of the eavesdropper.
        tasks: tasks of the coordinator.
    """

    def __init__(
        self, store: CoordinatorStore, learners: LearnerRegistry, captures: CaptureClient, tasks: Tasks
    ) -> None:
        self._store, self._learners, self._captures, self._tasks = store, learners, captures, tasks

    # ---- under way ----------------------------------------------------------------------------------------

    def start_run(self, managed: ManagedRun, commands_by_learner: Sequence[Sequence[Command]]) -> None:
        """Send every learner its commands, all assignments before the first epoch, so that all neighbours know the run."""
        machine = managed.machine
        for commands in zip(*commands_by_learner, strict=True):
            self._learners.enqueue_commands(
                machine.run_id, {name: [own] for name, own in zip(machine.index, commands, strict=True)}
            )
        for name, index in machine.index.items():  # some may have joined while the run was being started
            if name in self._learners:
                self._connect(managed, index, self._learners.get(name))
        self._start_background_tasks(managed)

    def continue_run(self, managed: ManagedRun) -> None:
        """Continue a restored run, whose learners are yet to reconnect."""
        log.info("run resumed", run_id=managed.machine.run_id, leased=managed.machine.clock.leased_until)
        for index, since in managed.machine.disconnected_since.items():
            self._tasks.start(self._watch_deadline(managed, index, since), "the deadline of a learner is not watched")
        self._start_background_tasks(managed)

    def resume_run(self, managed: ManagedRun) -> None:
        """Continue a failed run; connected learners go on at once.

        Raises:
            Unavailable: the lease cannot be written.
            Unavailable: how far they may go cannot be written.
        """
        self.continue_run(managed)
        machine = managed.machine
        connected = [name for name in machine.index if name in self._learners and managed.has_learner(name)]
        self._reserve_lease(managed)
        for name in connected:
            self._connect(managed, machine.index[name], self._learners.get(name))
        self._learners.enqueue_commands(
            machine.run_id, {name: machine.build_resume_commands(machine.index[name]) for name in connected}
        )

    def _start_background_tasks(self, managed: ManagedRun) -> None:
        self._captures.monitor_capture(managed, lambda why: self.end_run(managed, RunState.FAILED, why))
        self._tasks.start(self._prepare_digests(managed), "leases are not prepared")
        if (period_s := managed.machine.run.spec.clock.period_s) is not None:
            self._tasks.start(self._run_paced_clock(managed, period_s), "the clock has stopped")

    async def _prepare_digests(self, managed: ManagedRun) -> None:
        """Compute the network digests of the next leases, one round at a time, so that no lease delays other calls."""
        machine = managed.machine
        if machine.digests.is_needed:
            for t in range(
                machine.clock.leased_until,
                min(machine.clock.leased_until + machine.run.spec.clock.window, machine.run.spec.rounds),
            ):
                machine.digests.digest(t)
                await asyncio.sleep(0)

    async def _run_paced_clock(self, managed: ManagedRun, period_s: float) -> None:
        """Lease one round per period (paced mode)."""
        machine = managed.machine
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not machine.has_ended:
            due += period_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            if machine.state is RunState.RUNNING:
                machine.clock.tick()
                with log_write_failures():
                    self._send_lease(managed)

    def _send_lease(self, managed: ManagedRun) -> None:
        """Send the lease if it has grown; otherwise commands would pile up while a learner is behind.

        Quiesced learners get new commands later; one that reconnected meanwhile knows no epochs in between.
        """
        machine = managed.machine
        if managed.is_quiesced or machine.clock.leased_until <= managed.announced_lease:
            return
        self._reserve_lease(managed)
        managed.announced_lease = machine.clock.leased_until
        lease = machine.build_next_lease()
        self._learners.enqueue_commands(
            machine.run_id, {name: [lease] for name in machine.index if managed.has_learner(name)}
        )
        self._tasks.start(self._prepare_digests(managed), "leases are not prepared")

    def _reserve_lease(self, managed: ManagedRun) -> None:
        """Write the lease before it is sent.

        Raises:
            Unavailable: it cannot be written.
        """
        machine = managed.machine
        if machine.clock.leased_until:
            ahead = (machine.run.spec.clock.window + 1) // 2
            self._store.reserve_lease(machine.run_id, machine.clock.leased_until, ahead, managed.encode_view())

    def save_progress(self, managed_runs: Iterable[ManagedRun]) -> None:
        """Write the learners' progress; a full disk is no error here."""
        if views := {managed.machine.run_id: managed.encode_view() for managed in managed_runs}:
            with log_write_failures():
                self._store.save_views(views)

    # ---- learners -----------------------------------------------------------------------------------------

    def handle_report(
        self, managed: ManagedRun, status: LearnerStatus, wait: WaitReport | None, violations: Sequence[Violation] = ()
    ) -> None:
        """Process a learner's progress, and the violations that it reports of its neighbours."""
        machine = managed.machine
        known = len(machine.violations)
        machine.handle_report(status, wait, violations)
        for each in list(machine.violations.values())[known:]:
            text = describe_violation(each, machine.run.spec.names)
            log.warning("violation", run_id=machine.run_id, detail=text)
        managed.progress_event.set()
        managed.notify_if_due()
        self._handle_consequences(managed)
        if not managed.machine.has_ended:
            self._send_lease(managed)

    def handle_rejoin(self, managed: ManagedRun, member: JoinedLearner) -> None:
        """Process the return of a learner, which may know of later leases than this coordinator."""
        machine = managed.machine
        index = machine.index[member.name]
        self._connect(managed, index, member)
        is_in_run = member.introduction.run_id == machine.run_id
        if is_in_run:
            machine.clock.raise_lease(max(member.introduction.lease_until_round, member.claim.rounds_committed or 0))
        if managed.is_quiesced:
            self._quiesce_rejoined(managed, index, member if is_in_run else None)
            return
        self._reserve_lease(managed)
        self._learners.enqueue_commands(machine.run_id, {member.name: machine.build_resume_commands(index)})
        self._send_lease(managed)

    def _quiesce_rejoined(self, managed: ManagedRun, index: int, member: JoinedLearner | None) -> None:
        """Quiesce a learner that returned during a reconfiguration; None: it returned without the run."""
        machine = managed.machine
        if member is not None and member.introduction.lease_until_round:
            machine.possible_senders.add(index)  # only its stream broke: it may send until it gets the command
        else:
            rounds_committed, is_last_round_learned = (
                (None, False)
                if member is None
                else (member.claim.rounds_committed, member.introduction.last_round_learned)
            )
            machine.mark_quiesced(index, rounds_committed, is_last_round_learned)
        self._learners.enqueue_commands(machine.run_id, {machine.run.spec.names[index]: [QUIESCE_COMMAND]})
        managed.progress_event.set()

    def handle_quiesced_report(self, managed: ManagedRun, status: LearnerStatus) -> None:
        """Process a report of an earlier attempt, from a learner that returned during a reconfiguration."""
        if managed.is_quiesced:
            managed.machine.handle_quiesced_report(status)
            managed.progress_event.set()

    def _connect(self, managed: ManagedRun, index: int, member: JoinedLearner) -> None:
        """Mark a learner as connected; send its new address, if it has moved, to those that open streams to it."""
        machine, names = managed.machine, managed.machine.run.spec.names
        machine.mark_connected(index)
        moved = machine.update_address(index, member.introduction.address)
        self._learners.enqueue_commands(machine.run_id, {names[i]: [epoch] for i, epoch in moved.items()})

    def handle_disconnect(self, managed: ManagedRun, name: str) -> None:
        """Process the end of a learner's stream; the run fails if it has not reconnected by the deadline."""
        index, since = managed.machine.index[name], datetime.now(UTC)
        managed.machine.mark_disconnected(index, since)
        log.warning("learner is gone", learner=name, round=managed.machine.statuses[index].rounds_done)
        self._tasks.start(self._watch_deadline(managed, index, since), "the deadline of a learner is not watched")

    async def _watch_deadline(self, managed: ManagedRun, index: int, since: datetime) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(managed.machine.run.spec.clock.deadline_s):
                await managed.end_event.wait()
        managed.machine.handle_deadline(index, since)
        self._handle_consequences(managed)

    def _handle_consequences(self, managed: ManagedRun) -> None:
        """React to a change of state: the run may have ended, or lost learners."""
        if managed.machine.has_ended:
            self._finish_end(managed)
        elif managed.machine.pending_removals and managed.is_quiesced:
            managed.progress_event.set()  # one learner fewer to wait for
        elif managed.machine.pending_removals:
            self._tasks.start(self._remove_lost_learners(managed), "lost learners are not removed")

    async def run_operator_change(self, managed: ManagedRun, change: Coroutine[Any, Any, None]) -> None:
        """Run a change that an operator asked for to its end, even if the caller gives up waiting.

        Raises:
            SottovoceError: as of the change.
        """

        async def run() -> None:
            try:
                await change
            finally:
                self._handle_consequences(managed)

        await asyncio.shield(self._tasks.start(run()))

    async def _remove_lost_learners(self, managed: ManagedRun) -> None:
        try:
            await self._continue_without_lost(managed)
        except SottovoceError as error:
            names = abbreviate_names(
                [managed.machine.run.spec.names[i] for i in sorted(managed.machine.pending_removals)]
            )
            why = f"{names} lost, and the run cannot go on without: {error}"
            self.end_run(managed, RunState.FAILED, managed.machine.append_violations(why))
        self._handle_consequences(managed)

    # ---- the end ------------------------------------------------------------------------------------------

    def end_run(self, managed: ManagedRun, state: RunState, detail: str) -> None:
        """End a run; nothing changes if it has ended."""
        if not managed.machine.has_ended:
            managed.machine.end(state, detail)
            self._finish_end(managed)

    def _finish_end(self, managed: ManagedRun) -> None:
        """Stop all learners, which keep channels open even when they have finished, and close the capture, once."""
        if managed.ended_at is not None:
            return
        managed.ended_at = datetime.now(UTC)
        machine = managed.machine
        log_end = log.warning if machine.state is RunState.FAILED else log.info
        log_end(
            "run ended",
            run_id=machine.run_id,
            state=machine.state.value,
            reason=machine.detail,
            rounds=machine.clock.completed_rounds,
        )
        self.save_progress([managed])  # otherwise the next coordinator would find an active run with finished learners
        self._learners.enqueue_commands(
            managed.machine.run_id, {name: [managed.machine.build_stop()] for name in managed.machine.index}
        )
        managed.capture_close_task = (
            None if managed.capture_loss_reason else self._captures.close_capture(managed.machine)
        )
        managed.end_event.set()
        managed.progress_event.set()
        managed.notify_watchers()

    # ---- reconfiguration ----------------------------------------------------------------------------------

    async def remove_learner(self, managed: ManagedRun, name: str) -> None:
        """Remove a learner after its last round; a disconnected one is lost at once.

        Raises:
            NotFound: it is not in the run.
            FailedPrecondition: it is lost already, or the run is being changed, or not running.
            Unavailable: others could not be quiesced, and are lost.
            SpecError: the run cannot go on without it.
        """
        machine = _require_changeable(managed, name)
        if (own := machine.index[name]) in machine.lost_learners:
            raise FailedPrecondition(f"learner {name!r} is lost to run {machine.run_id} already")
        if name in self._learners or own in machine.possible_senders:  # the latter may be about to reconnect
            await self._change(managed, lambda spec: remove_learner(spec, name, machine.first_unsent_round))
            return
        lost = frozenset({own})
        await asyncio.to_thread(
            _build_changed_run, machine.run, partial(_remove_lost, machine=machine, lost=lost), machine.n_features
        )
        _require_not_quiesced(managed)
        machine.pending_removals |= lost
        try:
            await self._continue_without_lost(managed)
        except SottovoceError:
            machine.pending_removals -= lost
            self._restart_learners(managed, machine.run)  # unchanged
            raise

    async def add_learner(self, managed: ManagedRun, name: str) -> None:
        """Add a learner that is offline in the run, from the first unsent round on.

        Raises:
            FailedPrecondition: it is not connected, not offline, or lost; or as of `remove_learner`.
            NotFound: as of `remove_learner`.
        """
        machine = _require_changeable(managed, name)
        if name not in self._learners:
            raise FailedPrecondition(f"learner {name!r} has not joined this coordinator")
        await self._change(managed, lambda spec: add_learner(spec, name, machine.first_unsent_round))

    async def _continue_without_lost(self, managed: ManagedRun) -> None:
        """Continue without lost learners, including those that are lost meanwhile, as soon as that can be written.

        Raises:
            SottovoceError: the run cannot go on.
        """
        machine = managed.machine
        if managed.is_quiesced:
            return  # the reconfiguration under way removes them
        while machine.pending_removals and not machine.has_ended:
            managed.is_quiesced = True
            try:
                await self._quiesce(managed)
                lost = frozenset(machine.pending_removals)
                await self._apply_change(managed, partial(_remove_lost, machine=machine, lost=lost))
                machine.pending_removals -= lost
            except Unavailable as error:  # a full disk: all wait for it, as for a lease
                log.warning("not written", run_id=machine.run_id, reason=str(error))
                await asyncio.sleep(_RETRY_INTERVAL_S)
            finally:
                managed.is_quiesced = False

    async def _change(self, managed: ManagedRun, change: SpecChange) -> None:
        machine = managed.machine
        await asyncio.to_thread(
            _build_changed_run, machine.run, change, machine.n_features
        )  # refused before learners pause
        _require_not_quiesced(managed)
        managed.is_quiesced = True
        try:
            await self._quiesce(managed)
            try:
                _require_all_quiesced(machine)
                await self._apply_change(managed, change)
            except SottovoceError:
                self._restart_learners(managed, machine.run)  # unchanged
                raise
        finally:
            managed.is_quiesced = False

    async def _quiesce(self, managed: ManagedRun) -> None:
        """Stop all learners between rounds; those that do not stop within the deadline are lost."""
        machine = managed.machine
        view, ceiling = managed.encode_view(), machine.max_leased_round + machine.run.spec.clock.window
        self._store.save_views({machine.run_id: view})  # a later coordinator restarts all learners, too
        self._store.reserve_lease(machine.run_id, ceiling, 0, view)  # for the restart
        self._learners.enqueue_commands(machine.run_id, {name: [QUIESCE_COMMAND] for name in machine.index})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(machine.run.spec.clock.deadline_s):
                while machine.busy_learners and not machine.has_ended:
                    managed.progress_event.clear()
                    await managed.progress_event.wait()
        machine.pending_removals |= set(machine.busy_learners)

    async def _apply_change(self, managed: ManagedRun, change: SpecChange) -> None:
        """Write the changed run, inform the eavesdropper, then the learners."""
        machine = managed.machine
        run = await asyncio.to_thread(_build_changed_run, machine.run, change, machine.n_features)
        if machine.has_ended:
            return
        self._store.update_spec(machine.run_id, spec_to_wire(run.spec), managed.encode_view())
        await self._captures.reconfigure(machine, run)
        self._restart_learners(managed, run)

    def _restart_learners(self, managed: ManagedRun, run: Run) -> None:
        machine, before = managed.machine, managed.machine.lost_learners
        machine.reconfigure(run)
        if machine.has_ended:  # meanwhile, or no learner has anything left to do: the end sends them commands
            return
        for name in [name for name in machine.index if name in self._learners]:
            own = machine.index[name]
            commands = (
                [Stop(reason="the run goes on without this learner", final=True)]
                if own in machine.lost_learners
                else machine.build_resume_commands(own)
            )
            self._learners.enqueue_commands(machine.run_id, {name: commands})
        if gone := [machine.run.spec.names[i] for i in sorted(machine.lost_learners - before)]:
            log.warning("learners are lost", run_id=machine.run_id, learners=gone)


def _require_changeable(managed: ManagedRun, name: str) -> RunStateMachine:
    """Return the state machine of a run that can be changed, with this learner in it."""
    machine = managed.machine
    require_learner_name(name)
    if name not in machine.index:
        raise NotFound(
            f"run {machine.run_id} has no learner {name!r}; it has {abbreviate_names(sorted(machine.index))}"
        )
    if machine.state is RunState.RUNNING and not machine.clock.leased_until:
        why = "it is only beginning, or its coordinator was started again and its learners are reconnecting"
        raise FailedPrecondition(f"run {machine.run_id} has no round under way, {why}: try again in a moment")
    if machine.has_ended or not machine.clock.leased_until:
        raise FailedPrecondition(
            f"learners leave and join a running run only, and run {machine.run_id} is {machine.state.value}"
        )
    _require_not_quiesced(managed)
    return machine


def _require_not_quiesced(managed: ManagedRun) -> None:
    if managed.is_quiesced:
        raise FailedPrecondition(f"learners of run {managed.machine.run_id} are leaving or joining already: try again")


def _require_all_quiesced(machine: RunStateMachine) -> None:
    """Require that all learners are quiesced: another one may have sent more than it reported, so it is lost first.

    Raises:
        Unavailable: some are not.
    """
    if machine.pending_removals:
        names = abbreviate_names([machine.run.spec.names[i] for i in sorted(machine.pending_removals)])
        raise Unavailable(f"{names} did not pause within the deadline, and the run goes on without: try again then")


def _remove_lost(spec: RunSpec, *, machine: RunStateMachine, lost: frozenset[int]) -> RunSpec:
    """Return the spec without lost learners, with the rounds that their neighbours miss from them."""
    for i in sorted(lost - machine.lost_learners):
        # It is unknown which of the leased rounds it has sent.
        spec = remove_learner(spec, spec.names[i], machine.max_leased_round, machine.compute_missed_from_rounds(i))
    return spec


def _build_changed_run(run: Run, change: SpecChange, n_features: int) -> Run:
    changed = build_run(change(run.spec), n_features)
    require_equal_noise(run.algorithm, changed.algorithm, run.spec)
    return changed
