"""What a learner waits for, since when, and how long it may.

A wait begins when its cause begins in the round. What wakes the waiter in between, such as a grant that is not the last
thing it needs, begins nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from sottovoce.errors import Unavailable
from sottovoce.network.roster import called, in_short
from sottovoce.spec import ClockSpec
from sottovoce_rpc.learner_status import Cause, Waiting

TOLD_S = 1.0
"""A wait that has lasted so long is told to the coordinator: shorter ones are part of every round."""


class Wait(NamedTuple):  # made in every round: a frozen dataclass takes four times as long
    """One wait.

    Attributes:
        round: the learner's.
        cause: what is missing.
        alone: the coordinator is away: nobody brings grants to this learner, nor perhaps to those that it waits for.
        since: when the cause began, in seconds of a monotonic clock.
    """

    round: int
    cause: Cause
    alone: bool
    since: float

    def limit_s(self, clock: ClockSpec) -> float:
        """How long it may last, in seconds."""
        if self.cause is Cause.DISK or (self.alone and self.cause is not Cause.RECORDS):
            return clock.patience
        due = clock.period_s if self.cause is not Cause.NEIGHBOUR else None  # paced: not before the period is over
        return clock.deadline_s + (due or 0.0)

    def told(self, clock: ClockSpec, now: float) -> bool:
        """True once it has lasted so long that the coordinator should know."""
        return now - self.since >= min(TOLD_S, clock.deadline_s / 4)


def in_words(wait: Waiting, names: Sequence[str]) -> str:
    """What is waited for, and of whom."""
    of = f" ({in_short([called(names, i) for i in wait.neighbours])})" if wait.neighbours else ""
    return f"{wait.cause.value}{of} in round {wait.round}"


def waiting(before: Wait | None, t: int, cause: Cause, now: float, *, alone: bool) -> Wait:
    """The wait of a learner that lacks something now: the one that it was in, if that is the same."""
    if before is not None and (before.round, before.cause, before.alone) == (t, cause, alone):
        return before
    return Wait(t, cause, alone, now)


class Waits:
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
        self.newest: Wait | None = None
        """It may be over."""

    def begin(self, t: int, cause: Cause) -> None:
        """Something is awaited that comes without `wake`, and is said to be `over`."""
        self.newest = waiting(self.newest, t, cause, time.monotonic(), alone=self._alone)

    def over(self) -> None:
        """What was awaited is there."""
        self.newest = None

    async def wait(self, t: int, cause: Cause) -> None:
        """Until something comes that may be it.

        Raises:
            Unavailable: nothing has for too long.
        """
        self.begin(t, cause)
        self._waker = asyncio.get_running_loop().create_future()
        await self._waker

    async def pause(self, t: int, cause: Cause, seconds: float) -> None:
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

    def coordinated(self, *, away: bool) -> None:
        """The coordinator is away, or back: what is waited for is waited for anew, with another patience."""
        self._alone = away
        self.wake()

    def told(self, *, ended: bool) -> Waiting | None:
        """What it has waited for, for so long that its coordinator should know; where the run has ended, what it gave up on."""
        wait, waker = self.newest, self._waker
        over = waker is not None and waker.done() and (waker.cancelled() or waker.exception() is None)
        if wait is None or over or (not ended and not wait.told(self._clock, time.monotonic())):
            return None
        return self._waiting(wait)

    def _waiting(self, wait: Wait) -> Waiting:
        return Waiting(wait.round, wait.cause, tuple(self._unheard()) if wait.cause is Cause.NEIGHBOUR else ())

    def in_words(self) -> str:
        """What it has waited for, as `told`; empty: nothing that need be told."""
        wait = self.told(ended=False)
        return "" if wait is None else in_words(wait, self._names)

    async def watch(self) -> None:
        """One watchdog instead of a timer per wait: rounds are too short for those."""
        while True:
            await asyncio.sleep(min(TOLD_S, self._clock.deadline_s / 4))
            wait, waker = self.newest, self._waker
            if wait is None or waker is None or waker.done():
                continue
            limit_s = wait.limit_s(self._clock)
            if time.monotonic() - wait.since > limit_s:
                text = f"waited {limit_s:g} s for {in_words(self._waiting(wait), self._names)}"
                waker.set_exception(Unavailable(text))
