"""Round clock: leases for windows of rounds. Pure; the service passes progress and ticks to it.

A lease permits all rounds below some number. Within it learners synchronize with their neighbours only, so the clock adds no
delay as long as the next lease arrives before the last one is used up. A lease extends at most one window beyond the slowest
learner, which bounds the messages on their way between two learners, whichever waits.

Stragglers hold a run up. They are the sinks of the wait-for graph: a learner that waits for a neighbour is not the cause.
Following the waits leads to a learner that is disconnected, has no records, or does not wait; or to a cycle, where messages do
not pass.

Evictions follow accusations by most neighbours. A report about a neighbour proves nothing: the coordinator sees no messages, and
either of the two may lie. So one accusation never suffices, and several only if they are a majority of the neighbours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sottovoce_core.spec import ClockSpec
from sottovoce_core.text import abbreviate_names
from sottovoce_rpc.learner_status import WaitCause, WaitReport


class RoundClock:
    """Clock that decides how far learners may go.

    Args:
        spec: clock section of the run spec.
        rounds: number of rounds of the run.
        learners: number of learners.
    """

    def __init__(self, spec: ClockSpec, rounds: int, learners: int) -> None:
        self._mode, self._window, self._rounds = spec.mode, spec.window, rounds
        self._free = spec.mode in ("free", "async")
        self._done, self._ready = np.zeros((2, learners), dtype=np.int64)  # by learner; they never decrease
        self.leased_until = 0
        """End of the lease: rounds below this number may be run."""

    @property
    def completed_rounds(self) -> int:
        """Number of rounds that all learners have done."""
        return int(self._done.min())

    def start(self) -> int:
        """Grant the first lease, when all learners are connected; return its end."""
        return self._extend_lease(self._window if self._free else self.leased_until)

    def record_progress(self, learner: int, rounds_done: int, rounds_with_data: int) -> int:
        """Record a learner's progress; return the end of the lease."""
        self._done[learner] = max(self._done[learner], rounds_done)
        self._ready[learner] = max(self._ready[learner], rounds_with_data)
        slowest = self.completed_rounds
        # At half a window already: the next lease must arrive before the last one is used up.
        if self._free and 2 * (self.leased_until - slowest) <= self._window:
            return self._extend_lease(slowest + self._window)
        if self._mode == "data":
            return self._extend_lease(min(int(self._ready.min()), slowest + self._window))
        return self.leased_until

    def tick(self) -> int:
        """Lease one more round after a period (paced mode), unless the slowest learner still lags by a window."""
        if self._mode == "paced" and self.leased_until - self.completed_rounds < self._window:
            return self._extend_lease(self.leased_until + 1)
        return self.leased_until

    def raise_lease(self, until: int) -> int:
        """Extend the lease to one granted by an earlier coordinator; return its end."""
        return self._extend_lease(until)

    def _extend_lease(self, until: int) -> int:
        self.leased_until = max(self.leased_until, min(until, self._rounds))
        return self.leased_until


# ---- stragglers ------------------------------------------------------------------------------------------------------


_MAX_NAMED_LEARNERS = 10
"""Maximum number of learners that are all named."""


@dataclass(frozen=True, slots=True)
class LearnerProgress:
    """Progress of one learner in a run.

    Attributes:
        name: the learner's name.
        round: number of rounds done.
        is_disconnected: its stream has ended.
        wait: its last reported wait; None: it does not wait.
        is_starved: no round is leased because it has no records.
    """

    name: str
    round: int
    is_disconnected: bool = False
    wait: WaitReport | None = None
    is_starved: bool = False


def find_stragglers(learners: Sequence[LearnerProgress], who: int) -> tuple[int, ...]:
    """Return the indices of those that learner `who` waits for in the end: disconnected ones, else the slowest; or a cycle."""
    reached = {who} | _find_reachable(learners, who)
    sinks = [i for i in sorted(reached) if not _find_awaited(learners, i)]
    if not sinks:
        return tuple(i for i in sorted(reached) if i in _find_reachable(learners, i))
    found = [i for i in sinks if learners[i].is_disconnected] or sinks
    least = min(learners[i].round for i in found)
    return tuple(i for i in found if learners[i].is_disconnected or learners[i].round == least)


def _find_reachable(learners: Sequence[LearnerProgress], who: int) -> set[int]:
    """Return all learners to which the waits of a learner lead; itself, too, if they form a cycle."""
    reached, due = set[int](), _find_awaited(learners, who)
    while due:
        if (i := due.pop()) not in reached:
            reached.add(i)
            due += _find_awaited(learners, i)
    return reached


def describe_stragglers(learners: Sequence[LearnerProgress], found: Sequence[int]) -> str:
    """Describe why these learners hold the run up."""
    first = learners[found[0]]
    names, are = _join_names(learners, found), "is" if len(found) == 1 else "are"
    if first.is_disconnected:
        return f"{names} {are} gone since round {first.round}"
    if first.is_starved or (first.wait is not None and first.wait.cause is WaitCause.RECORDS):
        return f"{names} {'has' if len(found) == 1 else 'have'} no records for round {first.round}"
    if len(found) > 1 and first.wait is not None and first.wait.cause is WaitCause.NEIGHBOUR:
        return f"no messages pass between {names} in round {min(learners[i].round for i in found)}"
    if first.wait is not None:
        return f"{names} waited for {first.wait.cause.value} in round {first.round}"
    return f"{names} {are} silent in round {first.round}"


def _find_awaited(learners: Sequence[LearnerProgress], who: int) -> list[int]:
    """Return the learners that a learner waits for; empty for a sink."""
    own = learners[who]
    if own.is_disconnected or own.wait is None:
        return []
    others = [i for i in range(len(learners)) if i != who]
    match own.wait.cause:
        case WaitCause.NEIGHBOUR:
            return [i for i in own.wait.neighbours if i < len(learners)]
        case WaitCause.LEASE if not own.is_starved:  # the clock waits for the slowest learner
            return [i for i in others if learners[i].is_starved or learners[i].round < own.round]
    return []


def _join_names(learners: Sequence[LearnerProgress], found: Sequence[int]) -> str:
    *names, last = (learners[i].name for i in found)
    if len(names) >= _MAX_NAMED_LEARNERS:
        return abbreviate_names([*names, last])
    return f"{', '.join(names)} and {last}" if names else last


# ---- evictions -------------------------------------------------------------------------------------------------------


MIN_ACCUSERS = 2
"""Minimum number of accusers for an eviction."""


def find_evictions(accusations: Iterable[tuple[int, int]], neighbours: Sequence[Collection[int]]) -> frozenset[int]:
    """Return the indices of learners accused by more than half of their neighbours, and at least `MIN_ACCUSERS`.

    Args:
        accusations: pairs of accuser and accused.
        neighbours: by index, neighbours of each learner that are still in the run: only their accusations count.
    """
    against: dict[int, set[int]] = {}
    for by, whom in accusations:
        if by in neighbours[whom]:
            against.setdefault(whom, set()).add(by)
    return frozenset(
        i for i, accusers in against.items() if len(accusers) >= MIN_ACCUSERS and 2 * len(accusers) > len(neighbours[i])
    )
