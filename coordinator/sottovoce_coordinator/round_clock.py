"""The round clock: grants of windows of rounds. Pure; the service brings it progress and ticks.

A grant says that rounds below some number may be run. Inside it learners synchronise with their neighbours alone, so the
clock costs nothing as long as the next grant is there before the last one is used up. No grant reaches further than a window
beyond the slowest learner: what is on its way between two learners is bounded, whoever waits for whom.

Stragglers (who holds a run up) are the sinks of the wait-for graph: a learner that waits for a neighbour is not to blame for
it. Following the waits leads to a learner that is gone, has no records, or waits for none; or round in a circle, where
messages do not pass.

Evictions follow accusations of most neighbours. Nothing proves what a learner reports of its neighbour: no message comes by
here, and either of the two may lie. So one voice counts for nothing, and several only where they are most of those who can
tell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sottovoce_core.spec import ClockSpec
from sottovoce_core.text import abbreviate_names
from sottovoce_rpc.learner_status import WaitCause, WaitReport


class RoundClock:
    """Decides how far learners may go.

    Args:
        spec: the clock's section of the run spec.
        rounds: planned rounds.
        learners: how many there are.
    """

    def __init__(self, spec: ClockSpec, rounds: int, learners: int) -> None:
        self._mode, self._window, self._rounds = spec.mode, spec.window, rounds
        self._free = spec.mode in ("free", "async")
        self._done, self._ready = np.zeros((2, learners), dtype=np.int64)  # by learner; nobody goes back
        self.leased_until = 0
        """Rounds below this one may be run."""

    @property
    def completed_rounds(self) -> int:
        """Rounds that all learners have done."""
        return int(self._done.min())

    def start(self) -> int:
        """All learners are connected: the first grant."""
        return self._grant(self._window if self._free else self.leased_until)

    def record_progress(self, learner: int, rounds_done: int, rounds_with_data: int) -> int:
        """A learner has told how far it is; returns what is granted now."""
        self._done[learner] = max(self._done[learner], rounds_done)
        self._ready[learner] = max(self._ready[learner], rounds_with_data)
        slowest = self.completed_rounds
        # At half a window already: the next grant has to arrive before the last one is used up.
        if self._free and 2 * (self.leased_until - slowest) <= self._window:
            return self._grant(slowest + self._window)
        if self._mode == "data":
            return self._grant(min(int(self._ready.min()), slowest + self._window))
        return self.leased_until

    def tick(self) -> int:
        """A period has passed (paced mode): one more round, unless the slowest learner is still busy with earlier ones."""
        if self._mode == "paced" and self.leased_until - self.completed_rounds < self._window:
            return self._grant(self.leased_until + 1)
        return self.leased_until

    def raise_lease(self, until: int) -> int:
        """A learner was granted so much by a coordinator before this one; returns what is granted now."""
        return self._grant(until)

    def _grant(self, until: int) -> int:
        self.leased_until = max(self.leased_until, min(until, self._rounds))
        return self.leased_until


# ---- stragglers ------------------------------------------------------------------------------------------------------


_MAX_NAMED_LEARNERS = 10
"""Learners of whom all are named."""


@dataclass(frozen=True, slots=True)
class LearnerProgress:
    """How one learner stands in a run.

    Attributes:
        name: the learner's.
        round: rounds that it has done.
        away: its stream has ended.
        waiting: what it has said that it waits for; None: nothing.
        starved: no round is granted because it has no records.
    """

    name: str
    round: int
    is_disconnected: bool = False
    wait: WaitReport | None = None
    is_starved: bool = False


def find_stragglers(standings: Sequence[LearnerProgress], who: int) -> tuple[int, ...]:
    """Indices of those because of whom learner `who` waits: those who are gone, else the furthest behind; or a circle."""
    reached = {who} | _beyond(standings, who)
    sinks = [i for i in sorted(reached) if not _waited_for(standings, i)]
    if not sinks:
        return tuple(i for i in sorted(reached) if i in _beyond(standings, i))
    found = [i for i in sinks if standings[i].is_disconnected] or sinks
    least = min(standings[i].round for i in found)
    return tuple(i for i in found if standings[i].is_disconnected or standings[i].round == least)


def _beyond(standings: Sequence[LearnerProgress], who: int) -> set[int]:
    """Everybody to whom the waits of a learner lead; itself, too, where they go round in a circle."""
    reached, due = set[int](), _waited_for(standings, who)
    while due:
        if (i := due.pop()) not in reached:
            reached.add(i)
            due += _waited_for(standings, i)
    return reached


def describe_stragglers(standings: Sequence[LearnerProgress], found: Sequence[int]) -> str:
    """What is wrong with those who were `blamed`."""
    first = standings[found[0]]
    names, are = _named(standings, found), "is" if len(found) == 1 else "are"
    if first.is_disconnected:
        return f"{names} {are} gone since round {first.round}"
    if first.is_starved or (first.wait is not None and first.wait.cause is WaitCause.RECORDS):
        return f"{names} {'has' if len(found) == 1 else 'have'} no records for round {first.round}"
    if len(found) > 1 and first.wait is not None and first.wait.cause is WaitCause.NEIGHBOUR:
        return f"no messages pass between {names} in round {min(standings[i].round for i in found)}"
    if first.wait is not None:
        return f"{names} waited for {first.wait.cause.value} in round {first.round}"
    return f"{names} {are} silent in round {first.round}"


def _waited_for(standings: Sequence[LearnerProgress], who: int) -> list[int]:
    """Those whom a learner waits for; none: it is a sink."""
    own = standings[who]
    if own.is_disconnected or own.wait is None:
        return []
    others = [i for i in range(len(standings)) if i != who]
    match own.wait.cause:
        case WaitCause.NEIGHBOUR:
            return [i for i in own.wait.neighbours if i < len(standings)]
        case WaitCause.LEASE if not own.is_starved:  # the clock waits for whoever is furthest behind
            return [i for i in others if standings[i].is_starved or standings[i].round < own.round]
    return []


def _named(standings: Sequence[LearnerProgress], found: Sequence[int]) -> str:
    *names, last = (standings[i].name for i in found)
    if len(names) >= _MAX_NAMED_LEARNERS:
        return abbreviate_names([*names, last])
    return f"{', '.join(names)} and {last}" if names else last


# ---- evictions -------------------------------------------------------------------------------------------------------


MIN_ACCUSERS = 2
"""Voices without which nobody leaves."""


def find_evictions(accusations: Iterable[tuple[int, int]], neighbours: Sequence[Collection[int]]) -> frozenset[int]:
    """Indices of those whom more than half of their neighbours accuse, and at least `LEAST`.

    Args:
        accusations: who accuses whom.
        neighbours: by index, those of a learner who are still in the run: nobody else has a voice.
    """
    against: dict[int, set[int]] = {}
    for by, whom in accusations:
        if by in neighbours[whom]:
            against.setdefault(whom, set()).add(by)
    return frozenset(
        i for i, voices in against.items() if len(voices) >= MIN_ACCUSERS and 2 * len(voices) > len(neighbours[i])
    )
