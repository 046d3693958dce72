"""The rounds that a learner may run, and what it reports of its own accord: more of them hang on that, or a curve. No network."""

from __future__ import annotations

from collections.abc import Callable

from sottovoce.spec import ClockSpec
from sottovoce_rpc.specs import next_look


class Grants:
    """What the coordinator's clock has granted.

    Args:
        clock: of the run.
        learners: in it.
        report: reports now how far the learner is.
    """

    def __init__(self, clock: ClockSpec, learners: int, report: Callable[[], None]) -> None:
        self._clock, self._learners, self._report = clock, learners, report
        self.until = 0
        """Rounds below this one may be run."""
        self._asked = self._filled = self._look = 0

    def extend(self, until: int, filled: int) -> None:
        """More rounds may be run; those below `filled` have their records."""
        self.until = max(self.until, until)
        self.fill(filled)

    def fill(self, filled: int) -> None:
        """Rounds below this one have their records. The clock may wait for those of the first round that is not granted."""
        if self._clock.mode == "data" and self._filled <= self.until and filled > self._filled:
            self._filled = filled
            self._report()

    def use(self, rounds: int) -> None:
        """So many rounds are over: once per grant it is time for the next one, and ever more seldom for a look."""
        if rounds >= self._look:
            self._look = next_look(rounds, self._learners)
            self._report()
        if self._asked != self.until and 2 * (self.until - rounds) <= self._clock.window:
            self._asked = self.until
            self._report()
