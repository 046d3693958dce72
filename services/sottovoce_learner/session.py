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

from sottovoce_core.errors import BudgetExhausted, DataError, FailedPrecondition, Unavailable
from sottovoce_core.noise import NoiseSource
from sottovoce_core.running.policy import Policy
from sottovoce_core.text import called, abbreviate_names
from sottovoce_learner.ingest.ingest import Ingest
from sottovoce_learner.memory import Kept, Memory
from sottovoce_learner.peers.inbox import MessageReceiver
from sottovoce_learner.peers.outbox import Outbox
from sottovoce_learner.progress import DISK_RETRY_INTERVAL_S, LeaseTracker, Lifecycle, DiskFullWait, WaitTracker
from sottovoce_learner.role import Role
from sottovoce_learner.storage.run_log import RunLog, SnapshotWriter
from sottovoce_rpc.learner_status import WaitCause, LearnerState, LearnerStatus, WaitReport
from sottovoce_rpc.logs import SEE_LOG_TEXT, failure, has_project_text
from sottovoce_rpc.tasks import beside
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
        role: Role,
        policy: Policy,
        noise: NoiseSource,
        memory: Memory,
        run_log: RunLog,
        telling: Outbox,
        hearing: MessageReceiver,
        *,
        private: bool,
        changed: asyncio.Event | None,
    ) -> None:
        spec = role.spec
        self.role, self.policy, self._noise, self._private = role, policy, noise, private
        self.memory, self.plan, self.intake, self.codec = memory, memory.plan, memory.intake, memory.codec
        self.algorithm, self._late_s = memory.algorithm, spec.clock.staleness_timeout_s
        self._log, self._snapshots = run_log, SnapshotWriter(role.name, run_log, memory.names)
        self.telling, self.links, self.hearing, self.inbox = telling, telling.links, hearing, hearing.inbox
        self._changed, self._heard = changed or asyncio.Event(), asyncio.Event()
        self.life = Lifecycle(role, self._changed.set)
        self.grants = LeaseTracker(spec.clock, spec.n_learners, self._changed.set)
        self.waits = WaitTracker(spec.clock, self._unheard, spec.names)
        self.ingest = Ingest(role, run_log, self.intake, self.life, self.grants, self.waits, memory.done)
        self._room = DiskFullWait(role.name, "the round waits", "the journal cannot be written")

    @property
    def status(self) -> LearnerStatus:
        """How far the learner is."""
        memory, books = self.memory, self.memory.books
        return LearnerStatus(
            learner=self.role.name,
            run_id=self.role.run_id,
            state=self.life.state,
            detail=self.life.detail,
            rounds_done=memory.done,
            rounds_said=memory.said,
            rounds_with_data=self.intake.filled,
            messages_sent=memory.messages,
            bytes_sent=memory.messages * self.codec.length,
            epsilon_spent=books.spent,
            epsilon_budget=books.budget,
            epsilon_other_runs=books.allowance.elsewhere,
            epsilon_owner_budget=books.allowance.in_all,
            noise_is_not_private=not self._private,
            prequential_accuracy=memory.correct / memory.judged if memory.judged else None,
            violation_count=self.hearing.violation_count,
            records=self.intake.records,
            records_waiting=self.intake.waiting,
        )

    # ---- what the coordinator and the neighbours bring ----------------------------------------------------

    def grant(self, grant: RoundLease) -> None:
        """More rounds may be run, as far as they are planned.

        Raises:
            RemoteProtocolError: an epoch of them is missing, or they are to be of another network.
        """
        until = min(grant.until_round, self.role.spec.rounds)
        self.plan.agree(grant.from_round, until, grant.network_hash)
        self.plan.require(until)
        self.grants.extend(until, self.intake.filled)
        self.waits.wake()

    def hear(self, neighbour: int, payload: bytes) -> None:
        """A neighbour's message, or its signature of several, as it came.

        Raises:
            RemoteProtocolError: it is not what is due from this neighbour.
        """
        if self.hearing.take(neighbour, payload) or self._late_s is not None:
            self.waits.wake()
        self._heard.set()

    def report(self) -> None:
        """Let the coordinator know at once what is new."""
        self._changed.set()

    def require_log_complete(self, neighbour: int, next_round: int) -> None:
        """A neighbour cannot have heard what was never said: our log was set back, and those rounds must not be said again.

        Raises:
            DataError: it has.
        """
        # In lockstep, and where nobody waits for late ones, whoever hears this learner hears all that it says. Who is away, and
        # may join, hears nothing, and asks for what it may be told at the earliest.
        if (
            next_round > self.memory.said
            and (self.plan.lockstep or self._late_s is not None)
            and neighbour in self.plan.part(0).told
        ):
            raise DataError(
                f"{called(self.role.spec.names, neighbour)} has heard round {next_round - 1} of this learner, whose log has "
                f"{self.memory.said} rounds: "
                "its state folder was set back, and nothing is said until it is put back"
            )

    # ---- what it waits for --------------------------------------------------------------------------------

    @property
    def waiting(self) -> WaitReport | None:
        """What it has waited for, for so long that its coordinator should know, or gave up waiting for."""
        return self.waits.told(ended=self.life.ended)

    def _unheard(self) -> list[int]:
        """Neighbours that this learner waits for: before its first round, those that it is not connected with."""
        return (
            self.inbox.missing
            if self.memory.said
            else [j for j, link in self.telling.met(self.memory.done).items() if not link.attached.is_set()]
        )

    # ---- the rounds ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """All rounds, to whatever end; the status says which."""
        try:
            async with beside(self.waits.watch(), self._snapshots.run()):
                await self._all_rounds()
        except asyncio.CancelledError:
            self._become(LearnerState.STOPPED)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - own code may raise anything, and quote a record with it
            self._fail(error)
        finally:
            self.ingest.next_round(self.memory.done)
            with contextlib.suppress(FailedPrecondition):  # an identity that is gone: no reason to end otherwise
                self.telling.end(self.memory.said)
            self._close_log()

    async def _all_rounds(self) -> None:
        if not self.memory.over:  # else the log is closed: only what neighbours lack is left to say
            await self._connected()
            self._become(LearnerState.RUNNING)
        try:
            while not self.memory.over:
                await self._round(self.memory.done)
        except BudgetExhausted as error:
            if not has_project_text(error):
                raise
            await self.telling.flush()
            self._become(LearnerState.BUDGET_EXHAUSTED, str(error))
        else:
            await self.telling.flush()
            await self._all_signed()
            self._become(LearnerState.FINISHED)

    async def _connected(self) -> None:
        self.waits.begin(0, WaitCause.NEIGHBOUR)
        for link in self.telling.met(self.memory.done).values():
            try:
                async with asyncio.timeout(self.role.spec.clock.deadline_s):
                    await link.attached.wait()
            except TimeoutError:
                names = abbreviate_names([called(self.role.spec.names, j) for j in self._unheard()])
                raise Unavailable(f"no connection with {names} within the deadline") from None
        self.waits.over()

    async def _round(self, t: int) -> None:
        while self.grants.until <= t:
            await self.waits.wait(t, WaitCause.GRANT)
        if t >= self.memory.said:  # else it was said before this learner died, and the links have it
            await self._send(t)
        while self.intake.filled <= t:
            await self.waits.wait(t, WaitCause.DISK if self.ingest.is_disk_full else WaitCause.RECORDS)
        await self._hear(t)
        await self._learn(t)
        self.ingest.next_round(self.memory.done)
        self.grants.use(t + 1)
        if not self.plan.lockstep or self._late_s is not None:
            await asyncio.sleep(0)  # nobody may have been waited for: let others have the loop

    async def _send(self, t: int) -> None:
        """Form the round's message, write it ahead, and hand it to everybody who is told."""
        frame = await self._speak(t)
        self.telling.send_round(t, frame)
        if self._snapshots.due:
            self._snapshots.begin(self.memory.image())

    async def _speak(self, t: int) -> bytes:
        """Draw the noise, once; write the message ahead, which charges it, whoever hears it; only then give it out.

        Raises:
            BudgetExhausted: it is too dear.
            LocalProtocolError: it has a number that no neighbour would take; nothing was charged for it, and nothing said.
            FailedPrecondition: the log cannot be written.
        """
        memory, noise = self.memory, Kept(self._noise)
        spent = memory.books.price(t)
        state, message = await self._computed(self.algorithm.speak, memory.state, noise)
        said = memory.form_message(t, message, noise)
        await self._written(partial(self._log.write_ahead, t, spent, said))
        self.ingest.receipts.now()  # the same sync was theirs
        memory.remember(t, state, said.frame, spent)
        return said.frame

    async def _hear(self, t: int) -> None:
        """Wait for the neighbours' messages of the round; where it may go on without one that is late, only for a while.

        The last round waits for everybody in any case: a run ends when the last learner does, and all that was said was heard.
        """
        if self._late_s is None or t == self.memory.attendance.end - 1:
            await self._all_heard(t)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._late_s):
                await self._all_heard(t)
        while not self.inbox.enough:
            await self.waits.wait(t, WaitCause.NEIGHBOUR)

    async def _all_heard(self, t: int) -> None:
        while not self.inbox.complete:
            await self.waits.wait(t, WaitCause.NEIGHBOUR)

    async def _all_signed(self) -> None:
        """Wait for a moment for the signatures of what was heard last, but of those who are lost.

        When all have finished, channels are closed, and what is still on its way is cut off: here, and in a capture.
        """
        lost = self.telling.roster.lost_senders(self.role.index, self.memory.done)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_SIGNATURE_TIMEOUT_S, self.role.spec.clock.deadline_s / 4)):
                while not self.hearing.owing <= lost:
                    self._heard.clear()
                    await self._heard.wait()

    async def _learn(self, t: int) -> None:
        """Take in the round's records, and what was heard in it."""
        memory = self.memory
        heard, batch, inputs = memory.taken_in(self.inbox.take())
        state = await self._computed(self.algorithm.listen, memory.state, heard, batch)
        memory.learn(state, inputs)
        if memory.done not in memory.attendance:
            # What it heard lasts, so that a learner that dies now is told nothing again.
            await self._written(partial(self._log.close_rounds, memory.done, inputs))
            memory.skip_offline_rounds(memory.attendance.end)
            while self.inbox.round < memory.done:
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
                    self._room.require_disk_full(error, self.memory.done)
                await self.waits.pause(self.memory.done, WaitCause.DISK, DISK_RETRY_INTERVAL_S)

    async def _computed(self, compute: Callable[..., T], *arguments: Any) -> T:
        """What takes long is computed in a thread: the loop stays awake, and the round waits, so it is one at a time."""
        return await asyncio.to_thread(compute, *arguments) if self.memory.loss.heavy else compute(*arguments)

    # ---- the end ------------------------------------------------------------------------------------------

    def _become(self, state: LearnerState, detail: str = "") -> None:
        self.life.set_state(state, self.memory.done, detail)

    def _fail(self, error: BaseException) -> None:
        """The run is over for this learner; the log has the error's kind and place, and nobody the text of one not ours."""
        own = {type(part).__module__.partition(".")[0] for part in (self.algorithm, self.memory.loss)}
        log.error("failed", learner=self.role.name, round=self.memory.done, **failure(error, own))
        little = "too little memory (docs/scale.md says what a learner keeps)"
        ours = little if isinstance(error, MemoryError) else "an internal error"
        detail = str(error) if has_project_text(error) else f"{ours}; {SEE_LOG_TEXT}"
        self._become(LearnerState.FAILED, detail)

    async def close(self) -> None:
        """Say nothing more to anybody, and write nothing more."""
        await self.telling.close()
        self._close_log()

    def _close_log(self) -> None:
        self.ingest.receipts.now()
        self._log.close()
