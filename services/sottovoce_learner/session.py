"""One run of one learner: the round loop around the pure algorithm.

A round: be granted it, form the message, journal and charge it, send it; take the round's records, hear all neighbours,
update. What is decided is decided by the pure parts (algorithm, books, inbox, intake); this file awaits.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import structlog

from sottovoce.algorithms.interface import HeardFromNeighbours, Message, Who
from sottovoce.arrays import Batch, FloatArray
from sottovoce.errors import (
    BudgetExhausted,
    DataError,
    NotReady,
    Rule,
    Unavailable,
)
from sottovoce.noise import Noise
from sottovoce.running.late import USED, slots, used_field
from sottovoce.running.policy import DAYS, Policy
from sottovoce_learner.bodies import Said
from sottovoce_learner.books import Allowance, Books
from sottovoce_learner.hearing import Hearing, Received
from sottovoce_learner.hidden import Kept, hides_noise
from sottovoce_learner.inbox import Inbox
from sottovoce_learner.intake import intake_for
from sottovoce_learner.links import Link
from sottovoce_learner.log import DiskFull
from sottovoce_learner.plan import Plan
from sottovoce_learner.receipts import Receipts
from sottovoce_learner.recovery import Recovery, away_for_a_round
from sottovoce_learner.role import Role, open_log
from sottovoce_learner.signing import Own
from sottovoce_learner.snapshots import Image, Snapshots, named, read_image
from sottovoce_learner.store import Terms
from sottovoce_learner.waiting import Wait, waiting
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.credentials import NO_IDENTITY, Credentials
from sottovoce_rpc.learner_status import LearnerState, LearnerStatus
from sottovoce_rpc.logs import failure, worded_by_us
from sottovoce_rpc.misconduct import KnownBy, Misconduct
from sottovoce_rpc.signatures import BLOCK, Statement, digest
from sottovoce_rpc.specs import check_size
from sottovoce_rpc.tasks import beside
from sottovoce_rpc.waiting import Cause, Waiting
from sottovoce_wire.v1 import learner_pb2

log = structlog.get_logger()

T = TypeVar("T")

AHEAD, MOST_HELD = 4096, 64 * 1024 * 1024
"""Rounds of records, and their bytes, that a learner takes in before it lets the feeder wait."""
ROOM_S = 1.0
"""Between tries to write to a disk that is full."""


class Session:
    """A learner in a run.

    Args:
        role: what to do.
        noise: where noise comes from.
        state_folder: where the ledger and the logs of runs stand.
        mirror: is given every frame that was sent and who heard it, where the run is mirrored.
        policy: of the learner's owner.
        private: False when the noise is not the operating system's.
        own_budget: epsilon that the owner allows in all runs together; None: no limit.
        credentials: of the learner: with an identity it signs what it says, and so must its neighbours.
        changed: set when there is something to report.
        keep_log: whether the log is kept when the run is over.

    Raises:
        DataError: what stands in the state folder is damaged, so that what was spent is not known.
        NotReady: this learner has been in another run since.
        SpecError: the owner's policy does not allow the run, the spec cannot be run, or its messages are too long.
    """

    def __init__(
        self,
        role: Role,
        noise: Noise,
        state_folder: Path,
        mirror: Callable[[bytes, list[int]], None] | None = None,
        *,
        policy: Policy,
        private: bool = True,
        own_budget: float | None = None,
        credentials: Credentials = NO_IDENTITY,
        changed: asyncio.Event | None = None,
        keep_log: bool = False,
    ) -> None:
        self.role, self.policy, self._noise, self._mirror = role, policy, noise, mirror
        spec, index = role.spec, role.index
        run = policy.admit(spec, role.n_features, index, mirrored=mirror is not None)
        self.algorithm, self.loss, self._clipping = run.algorithm, run.loss, run.clipping
        check_size(run.field_shapes)
        self.codec = RoundCodec(run.field_shapes)
        self._state, self._hidden = self.algorithm.start(Who(index)), hides_noise(self.algorithm)
        self._name = role.name
        terms = Terms(spec.durability, self.codec.length, spec.clock.window, spec.rounds, role.budget)
        since = datetime.now(UTC) - timedelta(days=DAYS)
        others, self._log = open_log(state_folder, role, terms, since, keep_log=keep_log)
        limits = Allowance(policy.epsilon_per_run, policy.epsilon_per_month, own_budget, others.lately, others.in_all)
        self._books = Books(self.algorithm.accountant(index), role.budget, limits)
        self._inputs = Said(b"")
        self._late_s, self._slots = spec.clock.hold_s, slots(run.network) if run.late else 0
        self._used: list[float] = []
        self._roster = spec.roster
        self._attendance = self._roster.attendance(index, spec.rounds)
        self.intake = intake_for(spec, role.n_features, self._attendance)
        self._plan = Plan(run.network, index)
        # Elsewhere a neighbour goes as far as the clock lets it: a window beyond the slowest learner, which may die, and stand a
        # round before what it has reported.
        self._lockstep = self._plan.lockstep and not run.late
        ahead = 2 if self._lockstep else min(spec.clock.window, spec.rounds) + 1
        # Where nobody waits for late ones, a neighbour may be as far behind in what it has heard of us.
        keep = 2 * ahead + 1 if run.late else ahead
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=keep)
        self._used_last: Mapping[int, tuple[int, Received]] | None = {} if run.late else None
        self._named = named(run)
        self._snapshots = Snapshots(self._name, self._log, self._named)
        self._wait_is: Wait | None = None
        self._waker: asyncio.Future[None] | None = None
        self._alone = self._full = False
        self._correct = self._seen = 0
        self._messages = self._bytes = self._said = self._done = 0
        self.links = {j: Link(keep) for j in sorted(self._plan.neighbours)}
        self._credentials, self._own = credentials, Own(keep)
        self._recover()
        self._pass_absence()
        self.inbox: Inbox[Received] = Inbox(
            self._plan.neighbours, self._plan.heard, ahead, self._done, last=self._used_last
        )
        self._hearing = Hearing(role, self.codec, self.inbox, len(self.links), credentials)
        self._granted = self._told = 0
        self._lifecycle = (LearnerState.CONNECTING, "")
        self._private = private
        self.receipts = Receipts(self._settle)
        self._hungry = asyncio.Event()  # set once a round, so a feeder that waits looks again
        self._changed = changed or asyncio.Event()
        self.replaced = asyncio.Event()
        """Set when another session takes this run up."""

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
            epsilon_elsewhere=self._books.allowance.elsewhere,
            epsilon_own_budget=self._books.allowance.in_all,
            noise_is_not_private=not self._private,
            prequential_accuracy=self._correct / self._seen if self._seen else None,
            rules_broken=self._hearing.rules_broken,
            records=self.intake.records,
            records_waiting=self.intake.waiting,
        )

    def _recover(self) -> None:
        """Go on where the log ends: what it says was said is said, and nothing of it is drawn again."""
        reading = self._log.reading
        if reading is None:
            return
        recovery = Recovery(
            self.algorithm,
            self.codec,
            self._plan,
            self._attendance,
            self._books,
            self.intake,
            self._state,
            self._own,
            self._predict_first,
            self._kept,
            clipping=self._clipping,
        )
        try:
            if (image := read_image(reading, self._named)) is not None:
                self._correct, self._seen = image.judged
                recovery.restore(image)
            for entry in reading.uncovered:
                recovery.take(entry)
        except BaseException:
            self._log.close()
            raise
        self._state, self._said, self._done = recovery.state, recovery.said, recovery.done
        self._kept = recovery.frames
        if self._used_last is not None:
            decoded = ((frame, *self.codec.decode(frame)) for frame in recovery.heard)
            self._used_last = {sender: (t, Received(t, frame, message)) for frame, t, sender, message in decoded}
        for t, frame in self._kept:
            for j in self._plan.part(t).told:
                self.links[j].say(t, frame)
        for block in self._own.blocks:
            t = min(BLOCK * (block + 1), self._said) - 1
            if self._ends_block(t):
                self._sign(t)
        self._log.reading = None

    def _pass_absence(self) -> None:
        """The rounds from here on in which this learner is away, until it takes part again, or for good."""
        while self._done not in self._attendance and self._done < self._attendance.end and self._said <= self._done:
            self._state = away_for_a_round(
                self.algorithm, self._state, self._plan, self._books, self.intake, self._done
            )
            self._done += 1
            self._inputs, self._used = Said(b"", (), self.intake.batches), []

    def _image(self) -> Image:
        """What it is now, right after a round was said."""
        books, judged = self._books, (self._correct, self._seen)
        heard = () if self._used_last is None else self._inputs.heard
        return Image(
            self._state,
            books.spent,
            books.counts.tobytes(),
            self.intake.taken(),
            tuple(self._kept),
            judged,
            self._own.vouched,
            heard,
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
        """Rounds below `until_round` may be run, as far as they are planned.

        Raises:
            RemoteProtocolError: an epoch of them is missing.
        """
        until = min(until_round, self.role.spec.rounds)
        self._plan.require(until)
        self._granted = max(self._granted, until)
        self._wake()

    @property
    def granted(self) -> int:
        """Rounds below this one may be run."""
        return self._granted

    def hear(self, neighbour: int, payload: bytes) -> None:
        """A neighbour's message, or its signature of several, as it came.

        Raises:
            RemoteProtocolError: it is not what is due from this neighbour.
        """
        if self._hearing.take(neighbour, payload) or self._late_s is not None:
            self._wake()

    def notice(self, neighbour: int, rule: Rule, known_by: KnownBy) -> None:
        """A neighbour broke a rule: the first time is told at once, as long as the run goes on here."""
        self._hearing.rules_broken += 1
        if self.ended or (found := self._hearing.notice(neighbour, rule, known_by)) is None:
            return
        told = {"round": found.round, "rule": rule.name.lower(), "known_by": known_by.name.lower()}
        log.warning("misconduct", learner=self._name, neighbour=neighbour, **told)
        self._changed.set()

    @property
    def misconduct(self) -> tuple[Misconduct, ...]:
        """What was noticed: of each neighbour the first rule that it broke."""
        return self._hearing.misconduct

    def require_own_past(self, neighbour: int, next_round: int) -> None:
        """A neighbour cannot have heard what was never said: our log was set back, and those rounds must not be said again.

        Raises:
            DataError: it has.
        """
        # In lockstep, and where nobody waits for late ones, whoever hears this learner hears all that it says. Who is away, and
        # may join, hears nothing, and asks for what it may be told at the earliest.
        if (
            next_round > self._said
            and (self._plan.lockstep or self._late_s is not None)
            and neighbour in self._plan.part(0).told
        ):
            raise DataError(
                f"learner {neighbour} has heard round {next_round - 1} of this learner, whose log has {self._said} rounds: its "
                "state folder was set back, and nothing is said until it is put back"
            )

    async def feed(self, batch: learner_pb2.SampleBatch) -> None:
        """Records from the owner; waits while the learner has more than enough, and once it takes no more.

        Raises:
            DataError: they do not fit the run.
            Unavailable: the run is taken up again: its next session takes them.
            NotReady: the run is over, and what is live comes to none of its rounds.
        """
        while self._has_enough() and not self.ended:
            self._hungry.clear()
            await self._hungry.wait()
        if self.ended and not self.intake.covers(batch):
            if self.role.spec.data.live:
                raise NotReady(f"run {self.role.run_id} is over for this learner ({self._lifecycle[0].name.lower()})")
            # No receipt for what is not kept. The end of the run is told by the coordinator, and ends the feeder, too.
            await self.replaced.wait()
            raise Unavailable("this learner takes the run up again")
        try:
            while not self._written_down(batch):
                self._full = True
                self._wake()
                await asyncio.sleep(ROOM_S)
        finally:
            self._full = False
            self._wake()  # it may have waited for that
        self._changed.set()
        self._wake()

    def _written_down(self, batch: learner_pb2.SampleBatch) -> bool:
        """Take records in and write them down; False where the disk has no room for them now.

        Raises:
            DataError: they do not fit the run.
            NotReady: they cannot be kept.
        """
        try:
            self.intake.put(batch, lambda first: self._log.keep(first, batch.SerializeToString(deterministic=True)))
        except DiskFull:
            return False
        except OSError as error:
            raise NotReady(f"records cannot be kept: {error.strerror}") from None
        return True

    async def settled(self) -> None:
        """Wait until all records that were taken in by now last; then receipts may go out.

        Raises:
            NotReady: they cannot be kept.
        """
        if not self._log.settled:
            await self.receipts.settled()

    def _settle(self) -> None:
        try:
            self._log.settle()
        except OSError as error:
            raise NotReady(f"records cannot be kept: {error.strerror}") from None

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
        return not self._lifecycle[0].under_way

    @property
    def silent(self) -> bool:
        """True when a neighbour has nothing to expect. After the last round it may still lack what was said in it."""
        return self.ended and self._lifecycle[0] is not LearnerState.FINISHED

    # ---- the rounds ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """All rounds, to whatever end; the status says which."""
        try:
            async with beside(self._watch(), self._snapshots.run()):
                await self._all_rounds()
        except asyncio.CancelledError:
            self._become(LearnerState.STOPPED)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - own code may raise anything, and quote a record with it
            self._fail(error)
        finally:
            self._hungry.set()
            with contextlib.suppress(NotReady):  # an identity that is gone: no reason to end otherwise
                if self._said and not self._ends_block(self._said - 1):
                    self._sign(self._said - 1)
            self._close_log()

    async def _all_rounds(self) -> None:
        if self._done < self._attendance.end:  # else the log is closed: only what neighbours lack is left to say
            await self._connected()
            self._become(LearnerState.RUNNING)
        try:
            while self._done < self._attendance.end:
                await self._round(self._done)
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
        for j, link in self._met.items():
            try:
                async with asyncio.timeout(self.role.spec.clock.deadline_s):
                    await link.attached.wait()
            except TimeoutError:
                raise Unavailable(f"no connection with learner {j} within the deadline") from None
        self._wait_is = None

    @property
    def _met(self) -> dict[int, Link]:
        """The links to those who are there now, and not lost."""
        there, lost = self._roster.there(self._done), self._roster.lost_to(self.role.index, self._done)
        return {j: link for j, link in self.links.items() if there[j] and j not in lost}

    async def _round(self, t: int) -> None:
        while self._granted <= t:
            await self._wait("a grant of the coordinator")
        if t >= self._said:  # else it was said before this learner died, and the links have it
            await self._say(t)
        while self.intake.filled <= t:
            await self._wait("room on its disk" if self._full else "records")
        await self._hear()
        await self._learn(t)
        self._hungry.set()
        if self._told != self._granted and 2 * (self._granted - t - 1) <= self.role.spec.clock.window:
            self._told = self._granted  # once per grant: time for the next one
            self._changed.set()
        if not self._lockstep:
            await asyncio.sleep(0)  # nobody may have been waited for: let others have the loop

    async def _hear(self) -> None:
        """Wait for the neighbours' messages of the round; where it may go on without one that is late, only for a while.

        The last round waits for everybody in any case: a run ends when the last learner does, and all that was said was heard.
        """
        if self.inbox.complete:
            return
        last = self._done == self._attendance.end - 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if last else self._late_s):
                while not self.inbox.complete:
                    await self._wait("a neighbour")
        while not self.inbox.enough:
            await self._wait("a neighbour")

    async def _say(self, t: int) -> None:
        """Form the round's message and hand it to everybody who is told."""
        part = self._plan.part(t)
        frame = await self._speak(t, len(part.told))
        for j in part.told:
            self.links[j].say(t, frame)
        if self._mirror is not None:
            self._mirror(frame, list(part.told))
        if self._ends_block(t):
            self._sign(t)
        if self._snapshots.due:
            self._snapshots.begin(self._image())

    def _ends_block(self, t: int) -> bool:
        """Is a round followed by a signature, once it was said?"""
        return t % BLOCK == BLOCK - 1 or t + 1 not in self._attendance

    def _sign(self, t: int) -> None:
        """Tell whoever was told anything of the block of round t what was said in it, signed.

        Raises:
            NotReady: the identity cannot sign.
        """
        if self._credentials.principal is None:
            return
        block = t // BLOCK
        signature, told = (
            self._signature(self._own.statement(self.role.run_id, self.role.index, block)),
            self._own.told(block),
        )
        for j in told:
            self.links[j].sign(t, signature)
        if self._mirror is not None and told:
            self._mirror(signature(), told)

    def _signature(self, statement: Statement) -> Callable[[], bytes]:
        """Makes a signature, once for all neighbours, and anew where the identity was renewed since."""
        made = dict[datetime | None, bytes]()

        def make() -> bytes:
            if (until := self._credentials.expires) not in made:
                made[until] = self._credentials.signed(statement).encode()
            return made[until]

        return make

    async def _learn(self, t: int) -> None:
        """Take in the round's records, and what was heard in it."""
        part, batch, here = self._plan.part(t), self.intake.take(t), self.inbox.take()
        self._inputs = Said(b"", tuple(here[j].frame for j in part.heard), self.intake.batches, batch.size)
        self._used = [float(here[j].round) for j in part.heard]
        self._predict_first(self._state, batch)
        used = {j: self._clipping.of(j, t, each.message) for j, each in here.items()}
        heard = HeardFromNeighbours(part.heard, used, part.own)
        self._state = await self._computed(lambda: self.algorithm.listen(self._state, heard, batch))
        self._plan.forget(t)
        self._books.round_over(batch.size)
        self._done = t + 1
        if self._done not in self._attendance:
            # What it heard lasts, so that a learner that dies now is told nothing again.
            await self._journaled(lambda: self._log.close_rounds(self._done, self._inputs))
            self._pass_absence()
            while self.inbox.round < self._done:
                self.inbox.take()

    async def _speak(self, t: int, receivers: int) -> bytes:
        """Draw the noise, once; journal and charge the message, whoever hears it; only then give it out.

        Raises:
            BudgetExhausted: it is too dear.
            LocalProtocolError: it has a number that no neighbour would take; nothing was charged for it, and nothing said.
            NotReady: the journal cannot be written.
        """
        after, noise = self._books.price(t), Kept(self._noise)
        self._state, message = await self._computed(lambda: self.algorithm.speak(self._state, noise))
        if self._late_s is not None:
            message = Message({**message.fields, USED: used_field(self._used, self._slots)})
        self.codec.require_sayable(message)
        frame = self.codec.encode(t, self.role.index, message)
        said = replace(self._inputs, frame=frame, drawn=noise.drawn if self._hidden else b"")
        await self._journaled(lambda: self._log.say(t, after, said))
        self.receipts.now()  # the same sync was theirs
        self._books.charge(after)
        self._kept.append((t, frame))
        self._own.said(t, digest(frame), self._plan.part(t).told)
        self._said = t + 1
        self._messages += receivers
        self._bytes += len(frame) * receivers
        return frame

    async def _journaled(self, write: Callable[[], None]) -> None:
        """Write to the log; where the disk has no room, the same again, until it has.

        Raises:
            NotReady: it cannot be written.
        """
        while True:
            try:
                write()
            except DiskFull:
                again = asyncio.get_running_loop().call_later(ROOM_S, self._wake)
                try:
                    await self._wait("room on its disk")
                finally:
                    again.cancel()
            except OSError as error:
                raise NotReady(f"the journal cannot be written: {error.strerror}") from None
            else:
                return

    async def _computed(self, compute: Callable[[], T]) -> T:
        """What takes long is computed in a thread: the loop stays awake, and the round waits, so it is one at a time."""
        return await asyncio.to_thread(compute) if self.loss.heavy else compute()

    def _predict_first(self, state: Any, batch: Batch) -> None:
        """Prequential accuracy: predict the records before learning them. Opt-in, because it depends on the data."""
        if not self.role.spec.telemetry.accuracy or batch.size == 0:
            return
        scores = self.loss.predict(self.algorithm.decision(state), batch.features)
        self._correct += int((self.loss.classify(scores) == batch.labels).sum())
        self._seen += batch.size

    async def close(self) -> None:
        """Say nothing more to anybody, and write nothing more."""
        for link in self.links.values():
            await link.close()
        self._close_log()

    def _close_log(self) -> None:
        self.receipts.now()
        self._log.close()

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
        unmet = (j for j, link in self._met.items() if not link.attached.is_set())
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
