"""What a learner waits for, since when, and how long it may. Pure.

A wait begins when its cause begins in the round. What wakes the waiter in between, such as a grant that is not the last
thing it needs, begins nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from sottovoce.spec import ClockSpec
from sottovoce_rpc.waiting import Cause

TOLD_S = 1.0
"""A wait that has lasted so long is told to the coordinator: shorter ones are part of every round."""


@dataclass(frozen=True, slots=True)
class Wait:
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


def waiting(before: Wait | None, t: int, cause: Cause, now: float, *, alone: bool) -> Wait:
    """The wait of a learner that lacks something now: the one that it was in, if that is the same."""
    if before is not None and (before.round, before.cause, before.alone) == (t, cause, alone):
        return before
    return Wait(t, cause, alone, now)
