"""Run of a learner: the round loop around the pure algorithm.

A round: wait for its lease, form the message, log and charge it, send it; take the round's records, receive the messages
of all neighbours, update. The pure parts decide (algorithm, privacy filter, inbox, record queue), and `state_machine.py`
keeps the state; this file awaits.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
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
from sottovoce_learner.privacy_filter import PrivacyFilter
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
"""Time limit for the last signatures: they directly follow the last messages, unless a neighbour is lost."""


class Session:
    """A learner in a run.

    Args:
        role: assignment of the learner.
        policy: policy of the learner's owner.
        noise: noise source.
        state_machine: state and steps of a round; already recovered from the log.
        run_log: log of the run, open for writing.
        outbox: messages to neighbours.
        receiver: messages of neighbours.
        is_noise_private: False when the noise is not the operating system's.
        report_event: set when a report is due.
    """

    def __init__(
        self,
        role: RunAssignment,
        policy: Policy,
        noise: NoiseSource,
        state_machine: LearnerStateMachine,
        run_log: RunLog,
        outbox: Outbox,
        receiver: MessageReceiver,
        *,
        is_noise_private: bool,
        report_event: asyncio.Event | None,
    ) -> None:
        spec = role.spec
        self.assignment, self.policy, self._noise, self._is_noise_private = role, policy, noise, is_noise_private
        self.state_machine, self.plan, self.record_queue, self.codec = (
            state_machine,
            state_machine.plan,
            state_machine.intake,
            state_machine.codec,
        )
        self.algorithm, self._staleness_timeout_s = state_machine.algorithm, spec.clock.staleness_timeout_s
        self._log, self._snapshots = run_log, SnapshotWriter(role.name, run_log, state_machine.named_objects)
        self.outbox, self.links, self.receiver, self.inbox = outbox, outbox.links, receiver, receiver.inbox
        self._report_event, self._received_event = report_event or asyncio.Event(), asyncio.Event()
        self.lifecycle = Lifecycle(role, self._report_event.set)
        self.lease_tracker = LeaseTracker(spec.clock, spec.n_learners, self._report_event.set)
        self.wait_tracker = WaitTracker(spec.clock, self._list_missing_neighbours, spec.names)
        self.ingestor = RecordIngestor(
            role,
            run_log,
            self.record_queue,
            self.lifecycle,
            self.lease_tracker,
            self.wait_tracker,
            state_machine.rounds_done,
        )
        self._disk_full_wait = DiskFullWait(role.name, "the round waits", "the log cannot be written")

    @property
    def status(self) -> LearnerStatus:
        """Status of the learner in the run."""
        state_machine, privacy_filter = self.state_machine, self.state_machine.privacy_filter
        return LearnerStatus(
            learner=self.assignment.name,
            run_id=self.assignment.run_id,
            state=self.lifecycle.state,
            detail=self.lifecycle.detail,
            rounds_done=state_machine.rounds_done,
            rounds_committed=state_machine.rounds_committed,
            rounds_with_data=self.record_queue.filled_rounds,
            messages_sent=state_machine.messages_sent,
            bytes_sent=state_machine.messages_sent * self.codec.message_bytes,
            epsilon_spent=privacy_filter.epsilon_spent,
            **_describe_spending(privacy_filter),
            noise_is_not_private=not self._is_noise_private,
            prequential_accuracy=state_machine.records_correct / state_machine.records_judged
            if state_machine.records_judged
            else None,
            violation_count=self.receiver.violation_count,
            records=self.record_queue.records,
            records_waiting=self.record_queue.queued_records,
        )

    # ---- input from the coordinator and the neighbours -----------------------------------------------------

    def extend_lease(self, lease: RoundLease) -> None:
        """Extend the rounds that may be run, as far as their network is known.

        Raises:
            RemoteProtocolError: an epoch of them is missing, or they have another network.
        """
        until = min(lease.until_round, self.assignment.spec.rounds)
        self.plan.accept_digest(lease.from_round, until, lease.network_hash)
        self.plan.require_epochs(until)
        self.lease_tracker.extend(until, self.record_queue.filled_rounds)
        self.wait_tracker.wake()

    def receive(self, neighbour: int, payload: bytes) -> None:
        """Accept a neighbour's message, or its signature of several, as received.

        Raises:
            RemoteProtocolError: it is not what is due from this neighbour.
        """
        if self.receiver.take(neighbour, payload) or self._staleness_timeout_s is not None:
            self.wait_tracker.wake()
        self._received_event.set()

    def request_report(self) -> None:
        """Request a report to the coordinator at once."""
        self._report_event.set()

    def require_log_complete(self, neighbour: int, next_round: int) -> None:
        """Check that a neighbour has not received a message that the log lacks.

        Else our log was set back, and those rounds must not be sent again.

        Raises:
            CorruptStateError: it has.
        """
        # In lockstep and with bounded staleness, an out-neighbour receives every message. An offline neighbour
        # receives none, and asks for the earliest round that it may receive.
        if (
            next_round > self.state_machine.rounds_committed
            and (self.plan.is_lockstep or self._staleness_timeout_s is not None)
            and neighbour in self.plan.get_round_part(0).out_neighbours
        ):
            raise CorruptStateError(
                f"{format_learner_name(self.assignment.spec.names, neighbour)} has received round {next_round - 1} of this "
                f"learner, whose log has {self.state_machine.rounds_committed} rounds: "
                "its state folder was set back, and nothing is sent until it is restored"
            )

    # ---- waits --------------------------------------------------------------------------------------------

    @property
    def reportable_wait(self) -> WaitReport | None:
        """Wait that is long enough to be reported, or the one that ended the run."""
        return self.wait_tracker.get_reportable_wait(has_ended=self.lifecycle.has_ended)

    def _list_missing_neighbours(self) -> list[int]:
        """Return the neighbours that this learner waits for: before its first round, those not connected."""
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
        """Run all rounds to any end; the status has the result."""
        try:
            async with run_in_background(self.wait_tracker.run_watchdog(), self._snapshots.run()):
                await self._run_all_rounds()
        except asyncio.CancelledError:
            self._set_state(LearnerState.STOPPED)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything, and quote a record in it
            self._fail(error)
        finally:
            self.ingestor.begin_round(self.state_machine.rounds_done)
            with contextlib.suppress(FailedPrecondition):  # a missing identity must not change how the run ends
                self.outbox.end(self.state_machine.rounds_committed)
            self._close_log()

    async def _run_all_rounds(self) -> None:
        if not self.state_machine.is_finished:  # else the log is closed: only what neighbours lack remains to be sent
            await self._wait_connected()
            self._set_state(LearnerState.RUNNING)
        try:
            while not self.state_machine.is_finished:
                await self._run_round(self.state_machine.rounds_done)
        except BudgetExhausted as error:
            if not has_project_text(error):
                raise
            await self.outbox.flush()
            self._set_state(LearnerState.BUDGET_EXHAUSTED, str(error))
        else:
            await self.outbox.flush()
            await self._wait_signed()
            self._set_state(LearnerState.FINISHED)

    async def _wait_connected(self) -> None:
        self.wait_tracker.begin(0, WaitCause.NEIGHBOUR)
        for link in self.outbox.get_active_links(self.state_machine.rounds_done).values():
            try:
                async with asyncio.timeout(self.assignment.spec.clock.deadline_s):
                    await link.attached_event.wait()
            except TimeoutError:
                names = abbreviate_names(
                    [format_learner_name(self.assignment.spec.names, j) for j in self._list_missing_neighbours()]
                )
                raise Unavailable(f"no connection with {names} within the deadline") from None
        self.wait_tracker.end()

    async def _run_round(self, t: int) -> None:
        while self.lease_tracker.end_round <= t:
            await self.wait_tracker.wait(t, WaitCause.LEASE)
        if t >= self.state_machine.rounds_committed:  # else it was committed before a crash, and the links have it
            await self._send(t)
        while self.record_queue.filled_rounds <= t:
            await self.wait_tracker.wait(t, WaitCause.DISK if self.ingestor.is_disk_full else WaitCause.RECORDS)
        await self._receive_round(t)
        await self._update(t)
        self.ingestor.begin_round(self.state_machine.rounds_done)
        self.lease_tracker.report_progress(t + 1)
        if not self.plan.is_lockstep or self._staleness_timeout_s is not None:
            await asyncio.sleep(0)  # the round may not have waited: yield to other tasks

    async def _send(self, t: int) -> None:
        """Form the round's message, log it ahead, and queue it for all recipients."""
        frame = await self._form_and_log(t)
        self.outbox.send_round(t, frame)
        if self._snapshots.is_due:
            self._snapshots.begin(self.state_machine.take_snapshot())

    async def _form_and_log(self, t: int) -> bytes:
        """Draw the noise once and log the message, which charges it before any recipient gets it; then return it.

        Raises:
            BudgetExhausted: it would exceed the budget.
            LocalProtocolError: it has a number that neighbours would reject; nothing was charged or sent.
            FailedPrecondition: the log cannot be written.
        """
        state_machine, noise = self.state_machine, NoiseRecorder(self._noise)
        spent = state_machine.privacy_filter.admit_round(t)
        state, message = await self._compute(self.algorithm.emit, state_machine.state, noise)
        payload = state_machine.form_message(t, message, noise)
        await self._write_log(partial(self._log.write_ahead, t, spent, payload))
        self.ingestor.receipts.commit_now()  # the same sync covers their records
        state_machine.commit_message(t, state, payload.frame, spent)
        return payload.frame

    async def _receive_round(self, t: int) -> None:
        """Wait for the neighbours' messages of the round; with bounded staleness, only for a while.

        The last round waits for all neighbours in any case: a run ends when its last learner does, and all messages are
        received.
        """
        if self._staleness_timeout_s is None or t == self.state_machine.learner_participation.end - 1:
            await self._receive_all(t)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._staleness_timeout_s):
                await self._receive_all(t)
        while not self.inbox.has_enough:
            await self.wait_tracker.wait(t, WaitCause.NEIGHBOUR)

    async def _receive_all(self, t: int) -> None:
        while not self.inbox.is_complete:
            await self.wait_tracker.wait(t, WaitCause.NEIGHBOUR)

    async def _wait_signed(self) -> None:
        """Wait for a moment for the signatures of the last received messages, except those of lost neighbours.

        When all have finished, channels are closed, and what is still in transit is cut off: here, and in a capture.
        """
        lost = self.outbox.participation.lost_senders(self.assignment.index, self.state_machine.rounds_done)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_SIGNATURE_TIMEOUT_S, self.assignment.spec.clock.deadline_s / 4)):
                while not self.receiver.unsigned_neighbours <= lost:
                    self._received_event.clear()
                    await self._received_event.wait()

    async def _update(self, t: int) -> None:
        """Update with the round's records and received messages."""
        state_machine = self.state_machine
        received, batch, inputs = state_machine.prepare_update(self.inbox.take())
        state = await self._compute(self.algorithm.update, state_machine.state, received, batch)
        state_machine.commit_update(state, inputs)
        if state_machine.rounds_done not in state_machine.learner_participation:
            # Make the received messages durable: after a crash they would not be sent again.
            await self._write_log(partial(self._log.close_rounds, state_machine.rounds_done, inputs))
            state_machine.skip_offline_rounds(state_machine.learner_participation.end)
            while self.inbox.round < state_machine.rounds_done:
                self.inbox.take()

    async def _write_log(self, write: Callable[[], None]) -> None:
        """Write to the log, as soon as the disk has space.

        Raises:
            FailedPrecondition: it cannot be written.
        """
        with self._disk_full_wait:
            while True:
                try:
                    return write()
                except OSError as error:
                    self._disk_full_wait.require_disk_full(error, self.state_machine.rounds_done)
                await self.wait_tracker.pause(self.state_machine.rounds_done, WaitCause.DISK, DISK_RETRY_INTERVAL_S)

    async def _compute(self, compute: Callable[..., T], *arguments: Any) -> T:
        """Run slow computations in a thread: the event loop stays responsive, and the round waits for the result."""
        return (
            await asyncio.to_thread(compute, *arguments)
            if self.state_machine.loss.has_slow_gradient
            else compute(*arguments)
        )

    # ---- the end ------------------------------------------------------------------------------------------

    def _set_state(self, state: LearnerState, detail: str = "") -> None:
        self.lifecycle.set_state(state, self.state_machine.rounds_done, detail)

    def _fail(self, error: BaseException) -> None:
        """End the run for this learner; log the error's kind and place, and hide texts that are not the project's own."""
        own = {type(part).__module__.partition(".")[0] for part in (self.algorithm, self.state_machine.loss)}
        log.error(
            "failed", learner=self.assignment.name, round=self.state_machine.rounds_done, **describe_failure(error, own)
        )
        out_of_memory = "too little memory (docs/operate/upgrade.md lists what a learner keeps)"
        cause = out_of_memory if isinstance(error, MemoryError) else "an internal error"
        detail = str(error) if has_project_text(error) else f"{cause}; {SEE_LOG_TEXT}"
        self._set_state(LearnerState.FAILED, detail)

    async def close(self) -> None:
        """Send and write nothing more."""
        await self.outbox.close()
        self._close_log()

    def _close_log(self) -> None:
        self.ingestor.receipts.commit_now()
        self._log.close()


def _describe_spending(privacy_filter: PrivacyFilter) -> dict[str, Any]:
    """Return the fields of a status about limits, and what counts against them."""
    (run, _, all_runs), limit = privacy_filter.scopes, privacy_filter.budget
    owner_limit, other_runs = all_runs.limit, all_runs.other_loss
    return {
        "epsilon_charged": privacy_filter.measure(run),
        "delta": 0.0 if limit is None else limit.delta,
        "epsilon_budget": None if limit is None or limit.epsilon == math.inf else limit.epsilon,
        "epsilon_other_runs": other_runs.pure if owner_limit is None else owner_limit.measure(other_runs),
        "epsilon_owner_budget": None if owner_limit is None else owner_limit.epsilon,
        "owner_delta": 0.0 if owner_limit is None else owner_limit.delta,
    }
