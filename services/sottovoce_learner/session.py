"""One run of one learner: the round loop around the pure algorithm.

A round: be granted it, form the message, journal and charge it, send it; take the round's records, hear all neighbours,
update. What is decided is decided by the pure parts (algorithm, books, inbox, intake), and remembered by another (`memory.py`);
this file awaits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import structlog

from sottovoce_core.errors import BudgetExhausted, CorruptStateError, FailedPrecondition, Unavailable
from sottovoce_core.noise import NoiseSource
from sottovoce_core.runs.policy import Policy
from sottovoce_core.text import abbreviate_names, format_learner_name
from sottovoce_learner.assignment import RunAssignment
from sottovoce_learner.ingest.group_commit import RecordIngestor
from sottovoce_learner.peers.inbox import MessageReceiver
from sottovoce_learner.peers.outbox import Outbox
from sottovoce_learner.progress import DISK_RETRY_INTERVAL_S, DiskFullWait, LeaseTracker, Lifecycle, WaitTracker
from sottovoce_learner.state_machine import LearnerStateMachine, NoiseRecorder
from sottovoce_learner.storage.run_log import RunLog, SnapshotWriter
from sottovoce_rpc.learner_status import LearnerState, LearnerStatus, WaitCause, WaitReport
from sottovoce_rpc.logs import SEE_LOG_TEXT, describe_failure, has_project_text
from sottovoce_rpc.tasks import run_in_background
from sottovoce_wire.v1.coordinator_pb2 import RoundLease

log = structlog.get_logger()

T = TypeVar("T")

_SIGNATURE_TIMEOUT_S = 2.0
"""How long the last signatures are waited for at the most: they stand right behind the last messages, unless somebody is gone."""


class Session:
    """A learner in a run.

    Args:
        role: what to do.
        policy: of the learner's owner.
        noise: where noise comes from.
        memory: state and steps of a round; what the log says is in it already.
        run_log: the log of the run, open for writing.
        telling: messages to neighbours.
        hearing: messages of neighbours.
        private: False when the noise is not the operating system's.
        changed: set when there is something to report.
    """

    def __init__(
        self,
        role: RunAssignment,
        policy: Policy,
        noise: NoiseSource,
        memory: LearnerStateMachine,
        run_log: RunLog,
        telling: Outbox,
        hearing: MessageReceiver,
        *,
        is_noise_private: bool,
        report_event: asyncio.Event | None,
    ) -> None:
        spec = role.spec
        self.assignment, self.policy, self._noise, self._private = role, policy, noise, is_noise_private
        self.state_machine, self.plan, self.record_queue, self.codec = memory, memory.plan, memory.intake, memory.codec
        self.algorithm, self._late_s = memory.algorithm, spec.clock.staleness_timeout_s
        self._log, self._snapshots = run_log, SnapshotWriter(role.name, run_log, memory.named_objects)
        self.outbox, self.links, self.receiver, self.inbox = telling, telling.links, hearing, hearing.inbox
        self._changed, self._heard = report_event or asyncio.Event(), asyncio.Event()
        self.lifecycle = Lifecycle(role, self._changed.set)
        self.lease_tracker = LeaseTracker(spec.clock, spec.n_learners, self._changed.set)
        self.wait_tracker = WaitTracker(spec.clock, self._unheard, spec.names)
        self.ingestor = RecordIngestor(
            role, run_log, self.record_queue, self.lifecycle, self.lease_tracker, self.wait_tracker, memory.rounds_done
        )
        self._room = DiskFullWait(role.name, "the round waits", "the journal cannot be written")

    @property
    def status(self) -> LearnerStatus:
        """How far the learner is."""
        memory, books = self.state_machine, self.state_machine.privacy_filter
        return LearnerStatus(
            learner=self.assignment.name,
            run_id=self.assignment.run_id,
            state=self.lifecycle.state,
            detail=self.lifecycle.detail,
            rounds_done=memory.rounds_done,
            rounds_committed=memory.rounds_committed,
            rounds_with_data=self.record_queue.filled_rounds,
            messages_sent=memory.messages_sent,
            bytes_sent=memory.messages_sent * self.codec.message_bytes,
            epsilon_spent=books.epsilon_spent,
            epsilon_budget=books.budget,
            epsilon_other_runs=books.allowance.other_runs_epsilon,
            epsilon_owner_budget=books.allowance.max_epsilon_in_all_runs,
            noise_is_not_private=not self._private,
            prequential_accuracy=memory.records_correct / memory.records_judged if memory.records_judged else None,
            violation_count=self.receiver.violation_count,
            records=self.record_queue.records,
            records_waiting=self.record_queue.queued_records,
        )

    # ---- what the coordinator and the neighbours bring ----------------------------------------------------

    def extend_lease(self, grant: RoundLease) -> None:
        """More rounds may be run, as far as they are planned.

        Raises:
            RemoteProtocolError: an epoch of them is missing, or they are to be of another network.
        """
        until = min(grant.until_round, self.assignment.spec.rounds)
        self.plan.accept_digest(grant.from_round, until, grant.network_hash)
        self.plan.require_epochs(until)
        self.lease_tracker.extend(until, self.record_queue.filled_rounds)
        self.wait_tracker.wake()

    def receive(self, neighbour: int, payload: bytes) -> None:
        """A neighbour's message, or its signature of several, as it came.

        Raises:
            RemoteProtocolError: it is not what is due from this neighbour.
        """
        if self.receiver.take(neighbour, payload) or self._late_s is not None:
            self.wait_tracker.wake()
        self._heard.set()

    def request_report(self) -> None:
        """Let the coordinator know at once what is new."""
        self._changed.set()

    def require_log_complete(self, neighbour: int, next_round: int) -> None:
        """A neighbour cannot have heard what was never said: our log was set back, and those rounds must not be said again.

        Raises:
            CorruptStateError: it has.
        """
        # In lockstep, and where nobody waits for late ones, whoever hears this learner hears all that it says. Who is away, and
        # may join, hears nothing, and asks for what it may be told at the earliest.
        if (
            next_round > self.state_machine.rounds_committed
            and (self.plan.is_lockstep or self._late_s is not None)
            and neighbour in self.plan.get_round_part(0).out_neighbours
        ):
            raise CorruptStateError(
                f"{format_learner_name(self.assignment.spec.names, neighbour)} has heard round {next_round - 1} of this learner, whose log has "
                f"{self.state_machine.rounds_committed} rounds: "
                "its state folder was set back, and nothing is said until it is put back"
            )

    # ---- what it waits for --------------------------------------------------------------------------------

    @property
    def reportable_wait(self) -> WaitReport | None:
        """What it has waited for, for so long that its coordinator should know, or gave up waiting for."""
        return self.wait_tracker.get_reportable_wait(has_ended=self.lifecycle.has_ended)

    def _unheard(self) -> list[int]:
        """Neighbours that this learner waits for: before its first round, those that it is not connected with."""
        return (
            self.inbox.missing_neighbours
            if self.state_machine.rounds_committed
            else [
                j
                for j, link in self.outbox.get_active_links(self.state_machine.rounds_done).items()
                if not link.attached_event.is_set()
            ]
        )

    # ---- the rounds ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """All rounds, to whatever end; the status says which."""
        try:
            async with run_in_background(self.wait_tracker.run_watchdog(), self._snapshots.run()):
                await self._all_rounds()
        except asyncio.CancelledError:
            self._become(LearnerState.STOPPED)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - own code may raise anything, and quote a record with it
            self._fail(error)
        finally:
            self.ingestor.begin_round(self.state_machine.rounds_done)
            with contextlib.suppress(FailedPrecondition):  # an identity that is gone: no reason to end otherwise
                self.outbox.end(self.state_machine.rounds_committed)
            self._close_log()

    async def _all_rounds(self) -> None:
        if not self.state_machine.is_finished:  # else the log is closed: only what neighbours lack is left to say
            await self._connected()
            self._become(LearnerState.RUNNING)
        try:
            while not self.state_machine.is_finished:
                await self._round(self.state_machine.rounds_done)
        except BudgetExhausted as error:
            if not has_project_text(error):
                raise
            await self.outbox.flush()
            self._become(LearnerState.BUDGET_EXHAUSTED, str(error))
        else:
            await self.outbox.flush()
            await self._all_signed()
            self._become(LearnerState.FINISHED)

    async def _connected(self) -> None:
        self.wait_tracker.begin(0, WaitCause.NEIGHBOUR)
        for link in self.outbox.get_active_links(self.state_machine.rounds_done).values():
            try:
                async with asyncio.timeout(self.assignment.spec.clock.deadline_s):
                    await link.attached_event.wait()
            except TimeoutError:
                names = abbreviate_names([format_learner_name(self.assignment.spec.names, j) for j in self._unheard()])
                raise Unavailable(f"no connection with {names} within the deadline") from None
        self.wait_tracker.end()

    async def _round(self, t: int) -> None:
        while self.lease_tracker.end_round <= t:
            await self.wait_tracker.wait(t, WaitCause.LEASE)
        if t >= self.state_machine.rounds_committed:  # else it was said before this learner died, and the links have it
            await self._send(t)
        while self.record_queue.filled_rounds <= t:
            await self.wait_tracker.wait(t, WaitCause.DISK if self.ingestor.is_disk_full else WaitCause.RECORDS)
        await self._hear(t)
        await self._learn(t)
        self.ingestor.begin_round(self.state_machine.rounds_done)
        self.lease_tracker.report_progress(t + 1)
        if not self.plan.is_lockstep or self._late_s is not None:
            await asyncio.sleep(0)  # nobody may have been waited for: let others have the loop

    async def _send(self, t: int) -> None:
        """Form the round's message, write it ahead, and hand it to everybody who is told."""
        frame = await self._speak(t)
        self.outbox.send_round(t, frame)
        if self._snapshots.is_due:
            self._snapshots.begin(self.state_machine.take_snapshot())

    async def _speak(self, t: int) -> bytes:
        """Draw the noise, once; write the message ahead, which charges it, whoever hears it; only then give it out.

        Raises:
            BudgetExhausted: it is too dear.
            LocalProtocolError: it has a number that no neighbour would take; nothing was charged for it, and nothing said.
            FailedPrecondition: the log cannot be written.
        """
        memory, noise = self.state_machine, NoiseRecorder(self._noise)
        spent = memory.privacy_filter.admit_round(t)
        state, message = await self._computed(self.algorithm.emit, memory.state, noise)
        said = memory.form_message(t, message, noise)
        await self._written(partial(self._log.write_ahead, t, spent, said))
        self.ingestor.receipts.commit_now()  # the same sync was theirs
        memory.commit_message(t, state, said.frame, spent)
        return said.frame

    async def _hear(self, t: int) -> None:
        """Wait for the neighbours' messages of the round; where it may go on without one that is late, only for a while.

        The last round waits for everybody in any case: a run ends when the last learner does, and all that was said was heard.
        """
        if self._late_s is None or t == self.state_machine.learner_participation.end - 1:
            await self._all_heard(t)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._late_s):
                await self._all_heard(t)
        while not self.inbox.has_enough:
            await self.wait_tracker.wait(t, WaitCause.NEIGHBOUR)

    async def _all_heard(self, t: int) -> None:
        while not self.inbox.is_complete:
            await self.wait_tracker.wait(t, WaitCause.NEIGHBOUR)

    async def _all_signed(self) -> None:
        """Wait for a moment for the signatures of what was heard last, but of those who are lost.

        When all have finished, channels are closed, and what is still on its way is cut off: here, and in a capture.
        """
        lost = self.outbox.participation.lost_senders(self.assignment.index, self.state_machine.rounds_done)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_SIGNATURE_TIMEOUT_S, self.assignment.spec.clock.deadline_s / 4)):
                while not self.receiver.unsigned_neighbours <= lost:
                    self._heard.clear()
                    await self._heard.wait()

    async def _learn(self, t: int) -> None:
        """Take in the round's records, and what was heard in it."""
        memory = self.state_machine
        heard, batch, inputs = memory.prepare_update(self.inbox.take())
        state = await self._computed(self.algorithm.update, memory.state, heard, batch)
        memory.commit_update(state, inputs)
        if memory.rounds_done not in memory.learner_participation:
            # What it heard lasts, so that a learner that dies now is told nothing again.
            await self._written(partial(self._log.close_rounds, memory.rounds_done, inputs))
            memory.skip_offline_rounds(memory.learner_participation.end)
            while self.inbox.round < memory.rounds_done:
                self.inbox.take()

    async def _written(self, write: Callable[[], None]) -> None:
        """Write to the log, as soon as there is room.

        Raises:
            FailedPrecondition: it cannot be written.
        """
        with self._room:
            while True:
                try:
                    return write()
                except OSError as error:
                    self._room.require_disk_full(error, self.state_machine.rounds_done)
                await self.wait_tracker.pause(self.state_machine.rounds_done, WaitCause.DISK, DISK_RETRY_INTERVAL_S)

    async def _computed(self, compute: Callable[..., T], *arguments: Any) -> T:
        """What takes long is computed in a thread: the loop stays awake, and the round waits, so it is one at a time."""
        return (
            await asyncio.to_thread(compute, *arguments)
            if self.state_machine.loss.has_slow_gradient
            else compute(*arguments)
        )

    # ---- the end ------------------------------------------------------------------------------------------

    def _become(self, state: LearnerState, detail: str = "") -> None:
        self.lifecycle.set_state(state, self.state_machine.rounds_done, detail)

    def _fail(self, error: BaseException) -> None:
        """The run is over for this learner; the log has the error's kind and place, and nobody the text of one not ours."""
        own = {type(part).__module__.partition(".")[0] for part in (self.algorithm, self.state_machine.loss)}
        log.error(
            "failed", learner=self.assignment.name, round=self.state_machine.rounds_done, **describe_failure(error, own)
        )
        little = "too little memory (docs/scale.md says what a learner keeps)"
        ours = little if isinstance(error, MemoryError) else "an internal error"
        detail = str(error) if has_project_text(error) else f"{ours}; {SEE_LOG_TEXT}"
        self._become(LearnerState.FAILED, detail)

    async def close(self) -> None:
        """Say nothing more to anybody, and write nothing more."""
        await self.outbox.close()
        self._close_log()

    def _close_log(self) -> None:
        self.ingestor.receipts.commit_now()
        self._log.close()
