"""Progress of a session: its state, the rounds it may run, what it waits for and for how long.

A wait begins when its cause begins in the round. A wake-up in between, such as by a lease that is not the last missing
input, does not begin a new wait.
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
"""Minimum duration of a wait that is reported to the coordinator; shorter ones are part of every round."""
DISK_RETRY_INTERVAL_S = 1.0
"""Seconds between attempts to write to a full disk."""


class Lifecycle:
    """State of one session from connecting to its end, and whether another session resumes the run.

    Args:
        role: assignment of the learner.
        report: reports the state now.
    """

    def __init__(self, role: RunAssignment, report: Callable[[], None]) -> None:
        self._role, self._report = role, report
        self.state, self.detail = LearnerState.CONNECTING, ""
        self._replaced, self._run_ended = asyncio.Event(), asyncio.Event()

    def set_state(self, state: LearnerState, t: int, detail: str = "") -> None:
        """Change the state in round t."""
        self.state, self.detail = state, detail
        log.info("state", learner=self._role.name, state=state.name.lower(), round=t, detail=detail)
        self._report()

    @property
    def has_ended(self) -> bool:
        """Return whether no further round will be run."""
        return not self.state.is_active

    @property
    def is_silent(self) -> bool:
        """Return whether neighbours need nothing more. After the last round they may still lack its message."""
        return self.has_ended and self.state is not LearnerState.FINISHED

    def mark_replaced(self) -> None:
        """Note that a new session resumes the run."""
        self._replaced.set()

    async def wait_replaced(self) -> Unavailable:
        """Wait until a new session replaces this one; return the error for callers of the old one."""
        await self._replaced.wait()
        return Unavailable("this learner takes the run up again")

    def mark_run_ended(self) -> None:
        """Note that the run has ended for good and will not be resumed."""
        self._run_ended.set()

    @property
    def is_run_ended(self) -> bool:
        """Return whether the run has ended for good."""
        return self._run_ended.is_set()

    async def wait_run_ended(self) -> RunEnded:
        """Wait until the run has ended for good; return the error for senders of records."""
        await self._run_ended.wait()
        return RunEnded(self.end_message, self._state_text)

    @property
    def end_message(self) -> str:
        """Message that the run is over, with the final state."""
        return f"run {self._role.run_id} is over for this learner ({self._state_text})"

    @property
    def _state_text(self) -> str:
        return self.state.name.lower().replace("_", " ")


class LeaseTracker:
    """Rounds leased by the coordinator's clock, and reports needed for the next lease or a learning curve.

    Args:
        clock: clock of the run.
        learners: number of learners in the run.
        report: reports the learner's progress now.
    """

    def __init__(self, clock: ClockSpec, learners: int, report: Callable[[], None]) -> None:
        self._clock, self._learners, self._report = clock, learners, report
        self.end_round = 0
        """End of the lease: rounds below this one may be run."""
        self._reported_end_round = self._filled_rounds = self._next_report_round = 0

    def extend(self, until: int, filled: int) -> None:
        """Extend the lease to rounds below `until`; rounds below `filled` have their records."""
        self.end_round = max(self.end_round, until)
        self.set_filled_rounds(filled)

    def set_filled_rounds(self, filled: int) -> None:
        """Note that rounds below `filled` have their records. The clock may wait for the first round after the lease."""
        if self._clock.mode == "data" and self._filled_rounds <= self.end_round and filled > self._filled_rounds:
            self._filled_rounds = filled
            self._report()

    def report_progress(self, rounds: int) -> None:
        """Report when half of the lease's window is used, and at ever rarer rounds for the learning curve."""
        if rounds >= self._next_report_round:
            self._next_report_round = compute_next_report_round(rounds, self._learners)
            self._report()
        if self._reported_end_round != self.end_round and 2 * (self.end_round - rounds) <= self._clock.window:
            self._reported_end_round = self.end_round
            self._report()


class TimedWait(NamedTuple):  # created in every round: a frozen dataclass takes four times as long
    """Wait of a learner.

    Attributes:
        round: round of the learner.
        cause: missing input.
        is_coordinator_away: whether the coordinator is unreachable: neither this learner nor its neighbours may get a lease.
        started_at_s: when the cause began, in seconds of a monotonic clock.
    """

    round: int
    cause: WaitCause
    is_coordinator_away: bool
    started_at_s: float

    def compute_limit_s(self, clock: ClockSpec) -> float:
        """Return the maximum duration of this wait, in seconds."""
        if self.cause is WaitCause.DISK or (self.is_coordinator_away and self.cause is not WaitCause.RECORDS):
            return clock.coordinator_timeout_s
        period_s = (
            clock.period_s if self.cause is not WaitCause.NEIGHBOUR else None
        )  # a paced round waits for its period
        return clock.deadline_s + (period_s or 0.0)

    def is_reportable(self, clock: ClockSpec, now: float) -> bool:
        """Return whether it has lasted long enough to be reported to the coordinator."""
        return now - self.started_at_s >= min(REPORTABLE_WAIT_S, clock.deadline_s / 4)


def _describe_wait(wait: WaitReport, names: Sequence[str]) -> str:
    """Describe the missing input and the neighbours it is expected from."""
    senders = (
        f" ({abbreviate_names([format_learner_name(names, i) for i in wait.neighbours])})" if wait.neighbours else ""
    )
    return f"{wait.cause.value}{senders} in round {wait.round}"


class WaitTracker:
    """Waits of a learner, one after the other.

    Args:
        clock: clock of the run.
        get_missing: returns the neighbours waited for now.
        names: names of the run's learners.
    """

    def __init__(self, clock: ClockSpec, get_missing: Callable[[], Iterable[int]], names: Sequence[str]) -> None:
        self._clock, self._get_missing, self._names = clock, get_missing, names
        self._waker: asyncio.Future[None] | None = None
        self._is_coordinator_away = False
        self.current_wait: TimedWait | None = None
        """The latest wait; it may be over."""

    def begin(self, t: int, cause: WaitCause) -> None:
        """Begin a wait that is not ended by `wake` but by `end`."""
        if self.current_wait is None or self.current_wait[:3] != (
            t,
            cause,
            self._is_coordinator_away,
        ):  # else it goes on
            self.current_wait = TimedWait(t, cause, self._is_coordinator_away, time.monotonic())

    def end(self) -> None:
        """End the wait: the missing input has arrived."""
        self.current_wait = None

    async def wait(self, t: int, cause: WaitCause) -> None:
        """Wait until something arrives that may be the missing input.

        Raises:
            Unavailable: nothing has arrived for too long.
        """
        self.begin(t, cause)
        self._waker = asyncio.get_running_loop().create_future()
        await self._waker

    async def pause(self, t: int, cause: WaitCause, seconds: float) -> None:
        """Wait as `wait` does, but at most for some seconds."""
        again = asyncio.get_running_loop().call_later(seconds, self.wake)
        try:
            await self.wait(t, cause)
        finally:
            again.cancel()

    def wake(self) -> None:
        """Wake the waiter."""
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    def set_coordinator_away(self, *, is_away: bool) -> None:
        """Note that the coordinator is unreachable or back: the wait begins anew, with another limit."""
        self._is_coordinator_away = is_away
        self.wake()

    def get_reportable_wait(self, *, has_ended: bool) -> WaitReport | None:
        """Return the current wait if it exceeds the reporting threshold, or the last wait if the run has ended."""
        wait, waker = self.current_wait, self._waker
        is_over = waker is not None and waker.done() and (waker.cancelled() or waker.exception() is None)
        if wait is None or is_over or (not has_ended and not wait.is_reportable(self._clock, time.monotonic())):
            return None
        return self._build_report(wait)

    def _build_report(self, wait: TimedWait) -> WaitReport:
        return WaitReport(
            wait.round, wait.cause, tuple(self._get_missing()) if wait.cause is WaitCause.NEIGHBOUR else ()
        )

    def describe(self) -> str:
        """Describe the reportable wait; empty: there is none."""
        wait = self.get_reportable_wait(has_ended=False)
        return "" if wait is None else _describe_wait(wait, self._names)

    async def run_watchdog(self) -> None:
        """Check the current wait periodically: rounds are too short for a timer per wait."""
        while True:
            await asyncio.sleep(min(REPORTABLE_WAIT_S, self._clock.deadline_s / 4))
            wait, waker = self.current_wait, self._waker
            if wait is None or waker is None or waker.done():
                continue
            limit_s = wait.compute_limit_s(self._clock)
            if time.monotonic() - wait.started_at_s > limit_s:
                text = f"waited {limit_s:g} s for {_describe_wait(self._build_report(wait), self._names)}"
                waker.set_exception(Unavailable(text))


class DiskFullWait:
    """Handling of a full disk for one kind of write; used with `with` around the write.

    Args:
        learner: learner name.
        waiting_text: subject of the log line, such as "the round waits".
        error_text: text for other failures.
    """

    def __init__(self, learner: str, waiting_text: str, error_text: str) -> None:
        self._learner, self._waiting_text, self._error_text = learner, waiting_text, error_text
        self.is_waiting = False
        """True if something waits for disk space."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.is_waiting = False

    def require_disk_full(self, error: OSError, t: int) -> None:
        """Handle a failed write in round t: a full disk allows a retry after `DISK_RETRY_INTERVAL_S`.

        Raises:
            FailedPrecondition: it failed otherwise.
        """
        if not isinstance(error, DiskFull):
            raise FailedPrecondition(f"{self._error_text}: {error.strerror}") from None
        if not self.is_waiting:
            log.warning(f"disk full: {self._waiting_text} until there is room", learner=self._learner, round=t)
        self.is_waiting = True
