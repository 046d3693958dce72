"""The round clock: grants of windows of rounds. Pure; the service brings it progress and ticks.

A grant says that rounds below some number may be run. Inside it learners synchronise with their neighbours alone, so the
clock costs nothing as long as the next grant is there before the last one is used up. No grant reaches further than a window
beyond the slowest learner: what is on its way between two learners is bounded, whoever waits for whom.
"""

from __future__ import annotations

from sottovoce.spec import ClockSpec


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
        self._done = [0] * learners
        self._ready = [0] * learners
        self.granted = 0
        """Rounds below this one may be run."""

    def start(self) -> int:
        """All learners are connected: the first grant."""
        return self._grant(self._window if self._free else self.granted)

    def progress(self, learner: int, rounds_done: int, rounds_with_data: int) -> int:
        """A learner has told how far it is; returns what is granted now."""
        self._done[learner] = max(self._done[learner], rounds_done)
        self._ready[learner] = max(self._ready[learner], rounds_with_data)
        # At half a window already: the next grant has to arrive before the last one is used up.
        if self._free and 2 * (self.granted - min(self._done)) <= self._window:
            return self._grant(min(self._done) + self._window)
        if self._mode == "data":
            return self._grant(min(min(self._ready), min(self._done) + self._window))
        return self.granted

    def tick(self) -> int:
        """A period has passed (paced mode): one more round, unless the slowest learner is still busy with earlier ones."""
        if self._mode == "paced" and self.granted - min(self._done) < self._window:
            return self._grant(self.granted + 1)
        return self.granted

    def resume(self, until: int) -> int:
        """A learner was granted so much by a coordinator before this one; returns what is granted now."""
        return self._grant(until)

    def _grant(self, until: int) -> int:
        self.granted = max(self.granted, min(until, self._rounds))
        return self.granted
