"""One run of one learner: the round loop around the pure algorithm.

A round: be granted it, form the message, journal and charge it, send it; take the round's records, hear all neighbours,
update. What is decided is decided by the pure parts (algorithm, books, inbox, intake); this file awaits.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog

from sottovoce.algorithms.interface import HeardFromNeighbours, Who
from sottovoce.algorithms.per_learner import spread
from sottovoce.arrays import Batch, FloatArray
from sottovoce.errors import (
    BudgetExhausted,
    DataError,
    EquivocationError,
    NotReady,
    RemoteProtocolError,
    Unavailable,
)
from sottovoce.noise import Noise
from sottovoce.running.assembly import KEPT, Recent
from sottovoce.running.run import build_run
from sottovoce.spec import RunSpec
from sottovoce_learner.books import Books
from sottovoce_learner.inbox import Inbox
from sottovoce_learner.intake import Intake
from sottovoce_learner.journal import Entry
from sottovoce_learner.ledger import Ledger, LedgerLine
from sottovoce_learner.links import Link
from sottovoce_learner.plan import Plan
from sottovoce_learner.waiting import Wait, waiting
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.learner_status import LearnerState, LearnerStatus
from sottovoce_rpc.logs import failure, worded_by_us
from sottovoce_rpc.specs import check_size
from sottovoce_rpc.tasks import beside
from sottovoce_rpc.waiting import Cause, Waiting
from sottovoce_wire.v1 import learner_pb2

log = structlog.get_logger()

T = TypeVar("T")

AHEAD, MOST_HELD = 4096, 64 * 1024 * 1024
"""Rounds of records, and their bytes, that a learner takes in before it lets the feeder wait."""


@dataclass(frozen=True, slots=True)
class Role:
    """What a learner is told before a run.

    Attributes:
        run_id: the run.
        spec: the run spec.
        n_features: features of a record.
        index: this learner's index.
        name: the learner's own, by which its ledger counts.
        incarnation: of the process.

    Raises:
        RemoteProtocolError: the spec has no such learner, or calls it by another name: under that its budget would begin anew.
    """

    run_id: str
    spec: RunSpec
    n_features: int
    index: int
    name: str
    incarnation: int = 0

    def __post_init__(self) -> None:
        if not self.index < self.spec.n_learners:
            raise RemoteProtocolError(f"an assignment needs an index below {self.spec.n_learners}, got {self.index}")
        if (told := self.spec.names[self.index]) != self.name:
            raise RemoteProtocolError(f"learner {self.name!r} must be assigned under its own name, got {told!r}")


class Session:
    """A learner in a run.

    Args:
        role: what to do.
        noise: where noise comes from.
        journal_folder: where journals and the ledger stand.
        mirror: is given every frame that was sent and who heard it, where the run is mirrored.
        private: False when the noise is not the operating system's.
        own_budget: epsilon that the learner's owner allows in all runs together; None: no limit.
        changed: set when there is something to report.

    Raises:
        DataError: the ledger or a journal cannot be read, so that what was spent is not known.
        NotReady: the journal says that this learner has spoken in this run before.
        SpecError: the spec cannot be run, or its messages are too long.
    """

    def __init__(
        self,
        role: Role,
        noise: Noise,
        journal_folder: Path,
        mirror: Callable[[bytes, list[int]], None] | None = None,
        *,
        private: bool = True,
        own_budget: float | None = None,
        changed: asyncio.Event | None = None,
    ) -> None:
        self.role, self._noise, self._mirror = role, noise, mirror
        spec, index = role.spec, role.index
        run = build_run(spec, role.n_features)
        self.algorithm, self.loss = run.algorithm, run.loss
        shapes = self.algorithm.field_shapes()
        check_size(shapes)
        self.codec = RoundCodec(shapes)
        self._state = self.algorithm.start(Who(index))
        self._name = name = role.name
        ledger = Ledger(journal_folder)
        self._books = Books(
            self.algorithm.accountant(index),
            _budget(spec, index),
            own_budget=own_budget,
            elsewhere=ledger.spent(name, but=role.run_id),
        )
        line = LedgerLine(name, role.run_id, index, role.n_features, spec.model_dump_json())
        self._journal = ledger.open_run(line, self.codec.length, spec.durability)
        self._refuse_to_repeat()
        self.intake = Intake(role.n_features, spec.loss, spec.rounds)
        self._plan = Plan(run.network, index)
        # Elsewhere a neighbour goes as far as the clock lets it: at most a window beyond the slowest learner.
        ahead = 2 if self._plan.lockstep else min(spec.clock.window, spec.rounds)
        self.inbox = Inbox(self._plan.neighbours, self._plan.heard, ahead)
        self._heard: Recent[tuple[int, int], bytes] = Recent(KEPT)
        self.links = {j: Link(max(ahead, 2)) for j in sorted(self._plan.neighbours)}
        self._granted = self._told = 0
        self._wait_is: Wait | None = None
        self._waker: asyncio.Future[None] | None = None
        self._alone = False
        self._correct = self._seen = 0
        self._messages = self._bytes = self._said = self._done = 0
        self._lifecycle = (LearnerState.CONNECTING, "")
        self._private = private
        self._hungry = asyncio.Event()  # set once a round, so a feeder that waits looks again
        self._changed = changed or asyncio.Event()

    @property
    def status(self) -> LearnerStatus:
        """How far the learner is."""
        state, detail = self._lifecycle
        return LearnerStatus(
            learner=self._name,
            run_id=self.role.run_id,
            state=state,
            detail=detail,
            rounds_done=self._done,
            rounds_said=self._said,
            rounds_with_data=self.intake.filled,
            messages_sent=self._messages,
            bytes_sent=self._bytes,
            epsilon_spent=self._books.spent,
            epsilon_budget=self._books.budget,
            epsilon_elsewhere=self._books.elsewhere,
            epsilon_own_budget=self._books.own_budget,
            noise_is_not_private=not self._private,
            prequential_accuracy=self._correct / self._seen if self._seen else None,
        )

    def _refuse_to_repeat(self) -> None:
        """A learner that died in this run has lost its state: beginning again would say its rounds with other noise."""
        if said := self._journal.entries():
            self._journal.close()
            raise NotReady(
                f"this learner has said round {said[-1].round} of this run and was restarted since: it cannot go on in the "
                "run, and must not say any round again; start a new run"
            )

    # ---- what the coordinator and the neighbours bring ----------------------------------------------------

    @property
    def introduced(self) -> bool:
        """True when the neighbours' addresses are known."""
        return self._plan.announced > 0

    def announce(self, first_round: int, weights: Mapping[int, float], told: Collection[int]) -> None:
        """An epoch: neighbours and their weights, and who is told, from a round on.

        Raises:
            RemoteProtocolError: they are not those of the spec, which the guarantee rests on.
        """
        self._plan.announce(first_round, weights, told)

    def grant(self, until_round: int) -> None:
        """Rounds below `until_round` may be run.

        Raises:
            RemoteProtocolError: an epoch of them is missing.
        """
        self._plan.require(until_round)
        self._granted = max(self._granted, until_round)
        self._wake()

    @property
    def granted(self) -> int:
        """Rounds below this one may be run."""
        return self._granted

    def hear(self, neighbour: int, payload: bytes) -> None:
        """A neighbour's message, as it came.

        Raises:
            EquivocationError: the neighbour has said something else in this round: two noisy copies of one state.
            RemoteProtocolError: it is not what is due from this neighbour.
        """
        t, sender, message = self.codec.decode(payload)
        digest = hashlib.blake2b(payload, digest_size=16).digest()
        try:
            complete = self.inbox.put(neighbour, t, sender, message)
        except RemoteProtocolError:
            if sender == neighbour and self._heard.get((neighbour, t), digest) != digest:
                raise EquivocationError(f"learner {neighbour} said two different things in round {t}") from None
            raise
        self._heard[neighbour, t] = digest
        if complete:
            self._wake()

    async def feed(self, batch: learner_pb2.SampleBatch) -> None:
        """Records from the owner; waits while the learner has more than enough.

        Raises:
            DataError: they do not fit the run.
        """
        while self._has_enough() and not self.ended:
            self._hungry.clear()
            await self._hungry.wait()
        self.intake.put(batch)
        self._changed.set()
        self._wake()

    def _has_enough(self) -> bool:
        return self.intake.filled > self.inbox.round + AHEAD or self.intake.held > MOST_HELD

    def predict(self, features: FloatArray) -> tuple[FloatArray, FloatArray, int]:
        """What the model in use says.

        Returns:
            scores, labels: `(records,)`.
            rounds: that the model has learned from.

        Raises:
            DataError: rows of another width.
        """
        if features.ndim != 2 or features.shape[1] != self.role.n_features:
            raise DataError(f"features must be shaped (records, {self.role.n_features}), got {features.shape}")
        scores = self.loss.predict(self.algorithm.decision(self._state), features)
        return scores, self.loss.classify(scores), self._done

    @property
    def ended(self) -> bool:
        """True when nothing more will be said."""
        return self._lifecycle[0] not in (LearnerState.CONNECTING, LearnerState.RUNNING)

    @property
    def silent(self) -> bool:
        """True when a neighbour has nothing to expect. After the last round it may still lack what was said in it."""
        return self.ended and self._lifecycle[0] is not LearnerState.FINISHED

    # ---- the rounds ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """All rounds, to whatever end; the status says which."""
        try:
            async with beside(self._watch()):
                await self._all_rounds()
        except asyncio.CancelledError:
            self._become(LearnerState.STOPPED)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - own code may raise anything, and quote a record with it
            self._fail(error)
        finally:
            self._hungry.set()
            self._journal.close()

    async def _all_rounds(self) -> None:
        await self._connected()
        self._become(LearnerState.RUNNING)
        try:
            for t in range(self.role.spec.rounds):
                await self._round(t)
        except BudgetExhausted as error:
            if not worded_by_us(error):
                raise
            await self.flush()
            self._become(LearnerState.BUDGET_EXHAUSTED, str(error))
        else:
            await self.flush()
            self._become(LearnerState.FINISHED)

    def _fail(self, error: BaseException) -> None:
        """The run is over for this learner; the log has the error's kind and place, and nobody the text of one not ours."""
        own = {type(part).__module__.partition(".")[0] for part in (self.algorithm, self.loss)}
        log.error("failed", learner=self._name, round=self._done, **failure(error, own))
        detail = str(error) if worded_by_us(error) else "an internal error; the learner's log has it"
        self._become(LearnerState.FAILED, detail)

    async def _connected(self) -> None:
        self._wait_is = Wait(0, Cause.NEIGHBOUR, self._alone, time.monotonic())
        for j, link in self.links.items():
            try:
                await asyncio.wait_for(link.attached.wait(), self.role.spec.clock.deadline_s)
            except TimeoutError:
                raise Unavailable(f"no connection with learner {j} within the deadline") from None
        self._wait_is = None

    async def _round(self, t: int) -> None:
        while self._granted <= t:
            await self._wait("a grant of the coordinator")
        part = self._plan.part(t)
        frame = await self._speak(t, len(part.told))
        for j in part.told:
            self.links[j].say(t, frame)
        if self._mirror is not None:
            self._mirror(frame, list(part.told))
        while self.intake.filled <= t:
            await self._wait("records")
        while not self.inbox.complete:
            await self._wait("a neighbour")
        batch = self.intake.take(t)
        self._predict_first(batch)
        heard = HeardFromNeighbours(part.heard, self.inbox.take(), part.own)
        self._state = await self._computed(lambda: self.algorithm.listen(self._state, heard, batch))
        self._plan.forget(t)
        self._books.round_over(batch.size)
        self._done = t + 1
        self._hungry.set()
        if self._told != self._granted and 2 * (self._granted - t - 1) <= self.role.spec.clock.window:
            self._told = self._granted  # once per grant: time for the next one
            self._changed.set()
        if not self._plan.lockstep:
            await asyncio.sleep(0)  # nobody may have been waited for: let others have the loop

    async def _speak(self, t: int, receivers: int) -> bytes:
        """Draw the noise, once; journal and charge the message, whoever hears it; only then give it out.

        Raises:
            BudgetExhausted: it is too dear.
            LocalProtocolError: it has a number that no neighbour would take; nothing was charged for it, and nothing said.
            NotReady: the journal cannot be written.
        """
        after = self._books.price(t)
        self._state, message = await self._computed(lambda: self.algorithm.speak(self._state, self._noise))
        self.codec.require_sayable(message)
        frame = self.codec.encode(t, self.role.index, message)
        try:
            self._journal.write(Entry(t, after, frame))
        except OSError as error:
            raise NotReady(f"the journal cannot be written: {error.strerror}") from None
        self._books.charge(after)
        self._said = t + 1
        self._messages += receivers
        self._bytes += len(frame) * receivers
        return frame

    async def _computed(self, compute: Callable[[], T]) -> T:
        """What takes long is computed in a thread: the loop stays awake, and the round waits, so it is one at a time."""
        return await asyncio.to_thread(compute) if self.loss.heavy else compute()

    def _predict_first(self, batch: Batch) -> None:
        """Prequential accuracy: predict the records before learning them. Opt-in, because it depends on the data."""
        if not self.role.spec.telemetry.accuracy or batch.size == 0:
            return
        scores = self.loss.predict(self.algorithm.decision(self._state), batch.features)
        self._correct += int((self.loss.classify(scores) == batch.labels).sum())
        self._seen += batch.size

    async def close(self) -> None:
        """Say nothing more to anybody."""
        for link in self.links.values():
            await link.close()

    async def flush(self) -> None:
        """Wait until all that was said is written, or the channels are broken."""
        await asyncio.gather(*(link.flushed() for link in self.links.values()))

    # ---- waiting ------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> Waiting | None:
        """What it has waited for, for so long that its coordinator should know, or gave up waiting for."""
        wait, waker = self._wait_is, self._waker
        over = waker is not None and waker.done() and (waker.cancelled() or waker.exception() is None)
        if wait is None or over or (not self.ended and not wait.told(self.role.spec.clock, time.monotonic())):
            return None
        return Waiting(wait.round, wait.cause, self._unheard if wait.cause is Cause.NEIGHBOUR else ())

    @property
    def _unheard(self) -> tuple[int, ...]:
        """Neighbours that this learner waits for: before its first round, those that it is not connected with."""
        unmet = (j for j, link in self.links.items() if not link.attached.is_set())
        return tuple(self.inbox.missing if self._said else unmet)

    def coordinated(self, *, away: bool) -> None:
        """The coordinator is away, or back: what is waited for is waited for anew, with another patience."""
        self._alone = away
        self._wake()

    async def _wait(self, what: str) -> None:
        """Until something comes that may be it."""
        self._wait_is = waiting(self._wait_is, self._done, Cause(what), time.monotonic(), alone=self._alone)
        self._waker = asyncio.get_running_loop().create_future()
        await self._waker

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    async def _watch(self) -> None:
        """One watchdog instead of a timer per wait: rounds are too short for those."""
        clock = self.role.spec.clock
        while True:
            await asyncio.sleep(min(1.0, clock.deadline_s / 4))
            wait, waker = self._wait_is, self._waker
            if wait is None or waker is None or waker.done() or time.monotonic() - wait.since <= wait.limit_s(clock):
                continue
            missing = f" {list(self._unheard)}" if wait.cause is Cause.NEIGHBOUR else ""
            text = f"waited {wait.limit_s(clock):g} s for {wait.cause.value}{missing} in round {wait.round}"
            waker.set_exception(Unavailable(text))

    def _become(self, state: LearnerState, detail: str = "") -> None:
        self._lifecycle = (state, detail)
        log.info("state", learner=self._name, state=state.name.lower(), round=self._done, detail=detail)
        self._changed.set()


def _budget(spec: RunSpec, index: int) -> float | None:
    budget = spec.privacy.budget
    return None if budget is None else spread(budget, spec.n_learners, "privacy.budget")[index]
