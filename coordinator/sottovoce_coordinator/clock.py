"""The round clock: grants of windows of rounds. Pure; the service brings it progress and ticks.

A grant says that rounds below some number may be run. Inside it learners synchronise with their neighbours alone, so the
clock costs nothing as long as the next grant is there before the last one is used up. No grant reaches further than a window
beyond the slowest learner: what is on its way between two learners is bounded, whoever waits for whom.
"""

from __future__ import annotations

from collections import Counter

from sottovoce.spec import ClockSpec


class _Slowest:
    """How far each learner is, and the slowest of them: known at once, however many there are."""

    def __init__(self, learners: int) -> None:
        self._at = [0] * learners
        self._there = Counter({0: learners})
        self.least = 0

    def move(self, learner: int, to: int) -> None:
        """A learner is so far; it does not go back."""
        before = self._at[learner]
        if to <= before:
            return
        self._at[learner] = to
        self._there[to] += 1
        self._there[before] -= 1
        if not self._there[before]:
            del self._there[before]
            if before == self.least:
                self.least = min(self._there)


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
        self._done, self._ready = _Slowest(learners), _Slowest(learners)
        self.granted = 0
        """Rounds below this one may be run."""

    @property
    def slowest(self) -> int:
        """Rounds that all learners have done."""
        return self._done.least

    def start(self) -> int:
        """All learners are connected: the first grant."""
        return self._grant(self._window if self._free else self.granted)

    def progress(self, learner: int, rounds_done: int, rounds_with_data: int) -> int:
        """A learner has told how far it is; returns what is granted now."""
        self._done.move(learner, rounds_done)
        self._ready.move(learner, rounds_with_data)
        slowest = self._done.least
        # At half a window already: the next grant has to arrive before the last one is used up.
        if self._free and 2 * (self.granted - slowest) <= self._window:
            return self._grant(slowest + self._window)
        if self._mode == "data":
            return self._grant(min(self._ready.least, slowest + self._window))
        return self.granted

    def tick(self) -> int:
        """A period has passed (paced mode): one more round, unless the slowest learner is still busy with earlier ones."""
        if self._mode == "paced" and self.granted - self._done.least < self._window:
            return self._grant(self.granted + 1)
        return self.granted

    def resume(self, until: int) -> int:
        """A learner was granted so much by a coordinator before this one; returns what is granted now."""
        return self._grant(until)

    def _grant(self, until: int) -> int:
        self.granted = max(self.granted, min(until, self._rounds))
        return self.granted
