"""Progress of a session: where it stands, which rounds it may run, what it waits for, since when, and how long it may.

A wait begins when its cause begins in the round. What wakes the waiter in between, such as a grant that is not the last
thing it needs, begins nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import structlog

from sottovoce_core.errors import FailedPrecondition, RunEnded, Unavailable
from sottovoce_core.spec import ClockSpec
from sottovoce_core.text import abbreviate_names, format_learner_name
from sottovoce_learner.assignment import RunAssignment
from sottovoce_learner.storage.state_folder import DiskFull
from sottovoce_rpc.learner_status import LearnerState, WaitCause, WaitReport
from sottovoce_rpc.specs import compute_next_report_round

log = structlog.get_logger()

REPORTABLE_WAIT_S = 1.0
"""A wait that has lasted so long is told to the coordinator: shorter ones are part of every round."""
DISK_RETRY_INTERVAL_S = 1.0
"""Between tries to write to a disk that is full."""


class Lifecycle:
    """From connecting to the end of one session, and whether it is taken up again from there.

    Args:
        role: of the learner.
        report: reports now where it stands.
    """

    def __init__(self, role: RunAssignment, report: Callable[[], None]) -> None:
        self._role, self._report = role, report
        self.state, self.detail = LearnerState.CONNECTING, ""
        self._replaced, self._over = asyncio.Event(), asyncio.Event()

    def set_state(self, state: LearnerState, t: int, detail: str = "") -> None:
        """Another state, in this round."""
        self.state, self.detail = state, detail
        log.info("state", learner=self._role.name, state=state.name.lower(), round=t, detail=detail)
        self._report()

    @property
    def has_ended(self) -> bool:
        """True when nothing more will be said."""
        return not self.state.is_active

    @property
    def is_silent(self) -> bool:
        """True when a neighbour has nothing to expect. After the last round it may still lack what was said in it."""
        return self.has_ended and self.state is not LearnerState.FINISHED

    def mark_replaced(self) -> None:
        """Another session takes the run up."""
        self._replaced.set()

    async def wait_replaced(self) -> Unavailable:
        """Wait until another session does; what whoever deals with this one is told then."""
        await self._replaced.wait()
        return Unavailable("this learner takes the run up again")

    def mark_run_ended(self) -> None:
        """The run is over for good: nobody will take it up again."""
        self._over.set()

    @property
    def is_run_ended(self) -> bool:
        """Is the run over for good?"""
        return self._over.is_set()

    async def wait_run_ended(self) -> RunEnded:
        """Wait until it is dismissed; what whoever brings records is told then."""
        await self._over.wait()
        return RunEnded(self.end_message, self._word)

    @property
    def end_message(self) -> str:
        """That the run is over, and how."""
        return f"run {self._role.run_id} is over for this learner ({self._word})"

    @property
    def _word(self) -> str:
        return self.state.name.lower().replace("_", " ")


class LeaseTracker:
    """The rounds that the coordinator's clock has granted, and what is reported because more of them, or a curve, hang on it.

    Args:
        clock: of the run.
        learners: in it.
        report: reports now how far the learner is.
    """

    def __init__(self, clock: ClockSpec, learners: int, report: Callable[[], None]) -> None:
        self._clock, self._learners, self._report = clock, learners, report
        self.end_round = 0
        """Rounds below this one may be run."""
        self._asked = self._filled = self._look = 0

    def extend(self, until: int, filled: int) -> None:
        """More rounds may be run; those below `filled` have their records."""
        self.end_round = max(self.end_round, until)
        self.set_filled_rounds(filled)

    def set_filled_rounds(self, filled: int) -> None:
        """Rounds below this one have their records. The clock may wait for those of the first round that is not granted."""
        if self._clock.mode == "data" and self._filled <= self.end_round and filled > self._filled:
            self._filled = filled
            self._report()

    def report_progress(self, rounds: int) -> None:
        """So many rounds are over: once per grant it is time for the next one, and ever more seldom for a look."""
        if rounds >= self._look:
            self._look = compute_next_report_round(rounds, self._learners)
            self._report()
        if self._asked != self.end_round and 2 * (self.end_round - rounds) <= self._clock.window:
            self._asked = self.end_round
            self._report()


class TimedWait(NamedTuple):  # made in every round: a frozen dataclass takes four times as long
    """One wait.

    Attributes:
        round: the learner's.
        cause: what is missing.
        alone: the coordinator is away: nobody brings grants to this learner, nor perhaps to those that it waits for.
        since: when the cause began, in seconds of a monotonic clock.
    """

    round: int
    cause: WaitCause
    is_coordinator_away: bool
    started_at_s: float

    def compute_limit_s(self, clock: ClockSpec) -> float:
        """How long it may last, in seconds."""
        if self.cause is WaitCause.DISK or (self.is_coordinator_away and self.cause is not WaitCause.RECORDS):
            return clock.coordinator_timeout_s
        due = clock.period_s if self.cause is not WaitCause.NEIGHBOUR else None  # paced: not before the period is over
        return clock.deadline_s + (due or 0.0)

    def is_reportable(self, clock: ClockSpec, now: float) -> bool:
        """True once it has lasted so long that the coordinator should know."""
        return now - self.started_at_s >= min(REPORTABLE_WAIT_S, clock.deadline_s / 4)


def _in_words(wait: WaitReport, names: Sequence[str]) -> str:
    """What is waited for, and of whom."""
    of = f" ({abbreviate_names([format_learner_name(names, i) for i in wait.neighbours])})" if wait.neighbours else ""
    return f"{wait.cause.value}{of} in round {wait.round}"


class WaitTracker:
    """The waits of a learner, one after the other.

    Args:
        clock: of the run.
        unheard: neighbours that it waits for now.
        names: of the run's learners.
    """

    def __init__(self, clock: ClockSpec, unheard: Callable[[], Iterable[int]], names: Sequence[str]) -> None:
        self._clock, self._unheard, self._names = clock, unheard, names
        self._waker: asyncio.Future[None] | None = None
        self._alone = False
        self.current_wait: TimedWait | None = None
        """It may be over."""

    def begin(self, t: int, cause: WaitCause) -> None:
        """Something is awaited that comes without `wake`, and is said to be `over`."""
        if self.current_wait is None or self.current_wait[:3] != (t, cause, self._alone):  # else it goes on
            self.current_wait = TimedWait(t, cause, self._alone, time.monotonic())

    def end(self) -> None:
        """What was awaited is there."""
        self.current_wait = None

    async def wait(self, t: int, cause: WaitCause) -> None:
        """Until something comes that may be it.

        Raises:
            Unavailable: nothing has for too long.
        """
        self.begin(t, cause)
        self._waker = asyncio.get_running_loop().create_future()
        await self._waker

    async def pause(self, t: int, cause: WaitCause, seconds: float) -> None:
        """As `wait`, but only for a while."""
        again = asyncio.get_running_loop().call_later(seconds, self.wake)
        try:
            await self.wait(t, cause)
        finally:
            again.cancel()

    def wake(self) -> None:
        """Something has come."""
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    def set_coordinator_away(self, *, is_away: bool) -> None:
        """The coordinator is away, or back: what is waited for is waited for anew, with another patience."""
        self._alone = is_away
        self.wake()

    def get_reportable_wait(self, *, has_ended: bool) -> WaitReport | None:
        """What it has waited for, for so long that its coordinator should know; where the run has ended, what it gave up on."""
        wait, waker = self.current_wait, self._waker
        over = waker is not None and waker.done() and (waker.cancelled() or waker.exception() is None)
        if wait is None or over or (not has_ended and not wait.is_reportable(self._clock, time.monotonic())):
            return None
        return self._waiting(wait)

    def _waiting(self, wait: TimedWait) -> WaitReport:
        return WaitReport(wait.round, wait.cause, tuple(self._unheard()) if wait.cause is WaitCause.NEIGHBOUR else ())

    def describe(self) -> str:
        """What it has waited for, as `told`; empty: nothing that need be told."""
        wait = self.get_reportable_wait(has_ended=False)
        return "" if wait is None else _in_words(wait, self._names)

    async def run_watchdog(self) -> None:
        """One watchdog instead of a timer per wait: rounds are too short for those."""
        while True:
            await asyncio.sleep(min(REPORTABLE_WAIT_S, self._clock.deadline_s / 4))
            wait, waker = self.current_wait, self._waker
            if wait is None or waker is None or waker.done():
                continue
            limit_s = wait.compute_limit_s(self._clock)
            if time.monotonic() - wait.started_at_s > limit_s:
                text = f"waited {limit_s:g} s for {_in_words(self._waiting(wait), self._names)}"
                waker.set_exception(Unavailable(text))


class DiskFullWait:
    """Room for what a learner writes of one kind; in `with`, while it is written.

    Args:
        learner: its name.
        waits: what does, where there is none, in the log's words.
        unwritten: what an error says of it.
    """

    def __init__(self, learner: str, waits: str, unwritten: str) -> None:
        self._learner, self._waits, self._unwritten = learner, waits, unwritten
        self.is_waiting = False
        """Something waits for it."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.is_waiting = False

    def require_disk_full(self, error: OSError, t: int) -> None:
        """After a write that did not succeed, in round t: the same may be tried again in `DISK_RETRY_INTERVAL_S`, where there was no room.

        Raises:
            FailedPrecondition: it failed otherwise.
        """
        if not isinstance(error, DiskFull):
            raise FailedPrecondition(f"{self._unwritten}: {error.strerror}") from None
        if not self.is_waiting:
            log.warning(f"disk full: {self._waits} until there is room", learner=self._learner, round=t)
        self.is_waiting = True
