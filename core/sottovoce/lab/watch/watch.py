"""Watching a run while it goes on: is every learner's noise, round after round, what is claimed?

Every round of every learner is replayed, its noise taken off (`conformance.noise_of`), and bet on. May be looked at after every
round. Of `alpha`, half is for either question; while all claims hold,

1. *Was the noise ever wrong?* Every learner has the e-process `sequential.Conformance`, and their mean is one again. It reaches
   `2/alpha` with probability at most `alpha/2`, in however many rounds (Ville). Who is to blame is named by e-BH at `alpha/2`,
   which names nobody before the mean is there: k e-values above `n/(k alpha/2)` have a mean above `1/(alpha/2)`.
2. *Did it break on the way?* Every learner has detectors of blocks of rounds (`sequential.Changes`); the mean of all of them
   reaches `c = 2 rounds/alpha` after c rounds or more, on average. So within the `rounds` that are planned it does with
   probability at most `alpha/2`; a run that went on for ever would raise a false alarm some time.

What cannot be (noise off its lattice, two different messages of one round) is an infinite e-value: no claim survives it.
State and work of a round are the same in every round, except for what the algorithm itself remembers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sottovoce.algorithms.interface import Message
from sottovoce.arrays import FloatArray
from sottovoce.auditing.conformance import RESOLVED, noise_of
from sottovoce.data import PlacedData
from sottovoce.errors import CaptureError
from sottovoce.lab.watch.sequential import Changes, Conformance, e_bh, mean
from sottovoce.running.replay import Replay
from sottovoce.running.run import Run

BLOCKS = (16, 256)
"""Rounds of the detectors' blocks: short ones see what is gross soon, long ones what is slight at all."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that would hardly ever happen if the claims held.

    Attributes:
        learner: its index; None: of all that are watched together, and none stands out.
        round: after whose messages.
        test: which bet has gained most, `lattice`, `equivocation` or `canaries`.
        e: logarithm of the e-value that reached the threshold.
        threshold: its logarithm.
        change: it is a detector's: the noise broke on the way.
    """

    learner: int | None
    round: int
    test: str
    e: float
    threshold: float
    change: bool = False


class _Watched:
    """One learner under watch.

    Args:
        run: the run.
        learner: its index.

    Attributes:
        changes: its detectors.
        e: logarithm of the e-value of its noise since round 0.
        change: logarithm of the mean of its detectors.
    """

    def __init__(self, run: Run, learner: int) -> None:
        self.learner = learner
        self.e = self.change = 0.0
        self._replay = Replay(run, learner)
        self._whole, self.changes = Conformance(), tuple(Changes(length) for length in BLOCKS)
        self._shapes = run.algorithm.field_shapes()
        self._impossible: str | None = None

    @property
    def test(self) -> str:
        """What has gained most since round 0."""
        return self._impossible or self._whole.strongest

    @property
    def heard(self) -> bool:
        """False from the first round on in which somebody was not overheard whom its state depends on."""
        return self._replay.known

    @property
    def rounds(self) -> int:
        """Rounds replayed."""
        return self._replay.t

    @property
    def changed(self) -> str:
        """What has gained most of late."""
        return max(self.changes, key=lambda each: each.e).block.strongest

    def refute(self, test: str) -> None:
        """Something was seen that cannot be."""
        self._impossible = self._impossible or test
        self.e = math.inf

    def take(self, messages: Mapping[int, Message], data: PlacedData) -> None:
        """Bet on the next round."""
        if not self.heard:
            return
        if self.learner in messages:
            self._bet(messages[self.learner])
        self._replay.step(messages, data.learners[self.learner].batch(self._replay.t))

    def _bet(self, said: Message) -> None:
        found = noise_of(self._replay, said)
        if any((noise.off_lattice > RESOLVED).any() for noise in found.values()):
            self.refute("lattice")
        values = [
            found[name].values.ravel() if name in found else np.full(math.prod(shape), np.nan)
            for name, shape in self._shapes.items()
        ]
        row: FloatArray = np.concatenate(values)
        if np.isfinite(row).any():  # rounds without noise do not part those with noise
            self._whole.add(row)
            for each in self.changes:
                each.add(row)
            self.e = math.inf if self._impossible else self._whole.e
            self.change = mean([each.e for each in self.changes])


class Watch:
    """A run under watch.

    Args:
        run: the run that is overheard.
        data: what its learners learn.
        alpha: the chance of a false alarm, in all planned rounds together.
        learners: indices of those to watch; the records of the others are not looked at.
    """

    def __init__(self, run: Run, data: PlacedData, alpha: float, learners: Sequence[int]) -> None:
        self.round = 0
        self.learners = tuple(_Watched(run, i) for i in learners)
        self.threshold = math.log(2.0 / alpha)
        self.change_threshold = math.log(2.0 * run.spec.rounds / alpha)
        self._data, self._level = data, alpha / 2.0
        self._alarmed: set[tuple[int | None, bool]] = set()

    @property
    def e(self) -> float:
        """Logarithm of the mean e-value of all learners since round 0."""
        return mean([watched.e for watched in self.learners])

    @property
    def change(self) -> float:
        """Logarithm of the mean of all detectors."""
        return mean([watched.change for watched in self.learners])

    def take(self, t: int, messages: Mapping[int, Message]) -> list[Alarm]:
        """Take the messages of the next round.

        Args:
            t: the round.
            messages: by sender; fields `(1, 1, dim)`. One left out was not overheard.

        Returns:
            New alarms: one a learner and question.

        Raises:
            CaptureError: another round is next.
        """
        if t != self.round:
            raise CaptureError(f"the next round to watch must be {self.round}, got {t}")
        for watched in self.learners:
            watched.take(messages, self._data)
        self.round += 1
        return self._new_alarms(t)

    def equivocated(self, learner: int, t: int) -> list[Alarm]:
        """A learner said two different things in round t: a message is drawn once."""
        for watched in self.learners:
            if watched.learner == learner:
                watched.refute("equivocation")
        return self._new_alarms(t)

    def _new_alarms(self, t: int) -> list[Alarm]:
        alarms = [*self._since_the_start(t), *self._of_late(t)]
        new = [alarm for alarm in alarms if (alarm.learner, alarm.change) not in self._alarmed]
        self._alarmed |= {(alarm.learner, alarm.change) for alarm in new}
        return new

    def _since_the_start(self, t: int) -> list[Alarm]:
        if self.e < self.threshold:
            return []
        named = e_bh([watched.e for watched in self.learners], self._level)
        if not named:
            return [Alarm(None, t, max(self.learners, key=lambda w: w.e).test, self.e, self.threshold)]
        line = self.threshold + math.log(len(self.learners) / len(named))
        return [Alarm(w.learner, t, w.test, w.e, line) for w in (self.learners[k] for k in named)]

    def _of_late(self, t: int) -> list[Alarm]:
        """Who is to blame: those whose share of the mean is enough; a correct one of n is, with probability alpha/(2 n)."""
        if self.change < self.change_threshold:
            return []
        line = self.change_threshold
        alone = line + math.log(len(self.learners))
        guilty = [watched for watched in self.learners if watched.change >= alone]
        if not guilty:
            return [Alarm(None, t, max(self.learners, key=lambda w: w.change).changed, self.change, line, True)]
        return [Alarm(watched.learner, t, watched.changed, watched.change, alone, True) for watched in guilty]
