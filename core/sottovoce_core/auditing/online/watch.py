"""The watch over a run while it goes on: is every learner's noise, round after round, what is claimed?

Every round of every learner is replayed, its noise taken off (`residuals.noise_of`), and bet on (`bets.EProcesses`). May be looked at
after every round. Of `alpha`, half is for either question; while all claims hold,

1. *Was the noise ever wrong?* Every learner has an e-process, and all of them together have another one (`bets.EProcesses`). Half the
   learners' mean plus half that of all is one again, so neither half reaches `2/alpha` but with probability at most `alpha/2`,
   in however many rounds (Ville). Who is to blame is named by e-BH at that level, which names nobody before the mean is there:
   k e-values above `4n/(k alpha)`, of n learners, have a mean above `4/alpha`.
2. *Did it break on the way?* Detectors of blocks of rounds bet the same, with the same shares, and their mean
   reaches `c = 2 rounds/alpha` after c rounds or more, on average. So within the `rounds` that are planned it does with
   probability at most `alpha/2`; a run that went on for ever would raise a false alarm some time.

What cannot be (noise off its lattice, two different messages of one round) is an infinite e-value: no claim survives it.
State and work of a round are the same in every round, except for what the algorithm itself remembers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np

from sottovoce_core.algorithms.interface import Message
from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.auditing.conformance.residuals import collect_past, extract_round_noise
from sottovoce_core.auditing.online.bets import EProcesses, mix_e_values
from sottovoce_core.auditing.online.noise_history import KeyTable, NoiseHistory, RoundNoise
from sottovoce_core.errors import CaptureError
from sottovoce_core.runs.replay import Replay
from sottovoce_core.runs.run import Run


class _Records(Protocol):
    """What a learner learns."""

    def batch(self, t: int) -> Batch:
        """In round t; asked once for every round, in order."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that would hardly ever happen if the claims held.

    Attributes:
        learner: its index; None: of all that are watched together, and none stands out.
        round: after whose messages.
        test: which bet has gained most (`bets`), `lattice`, `equivocation` or `canaries`.
        e: logarithm of the e-value that reached the threshold.
        threshold: its logarithm.
        change: it is a detector's: the noise broke on the way.
    """

    learner: int | None
    round: int
    test: str
    log_e_value: float
    log_threshold: float
    is_change: bool = False


class _EProcess:
    """How the bets on one learner stand, or those on all together.

    Attributes:
        e: logarithm of the e-value since round 0.
        change: logarithm of the mean of the detectors.
        test: what has gained most since round 0.
        changed: what has gained most of late.
    """

    def __init__(self) -> None:
        self.log_e_value = self.change_log_e_value = 0.0
        self.test = self.change_test = "scale"

    def update(self, stakes: EProcesses, k: int) -> None:
        """After another round."""
        self.log_e_value, self.change_log_e_value = float(stakes.log_e_values[k]), float(stakes.change_log_e_values[k])
        self.test, self.change_test = stakes.tests[k], stakes.change_tests[k]


class _WatchedLearner(_EProcess):
    """One learner under watch.

    Args:
        run: the run.
        learner: its index.
    """

    def __init__(self, run: Run, learner: int) -> None:
        super().__init__()
        self.learner = learner
        self._replay = Replay(run, learner)
        self._learned: Mapping[str, FloatArray] = {}
        self._impossible: str | None = None

    @property
    def is_replayable(self) -> bool:
        """False from the first round on in which somebody was not overheard whom its state depends on."""
        return self._replay.is_known

    @property
    def rounds(self) -> int:
        """Rounds replayed."""
        return self._replay.t

    def refute(self, test: str) -> None:
        """Something was seen that cannot be."""
        self._impossible = self._impossible or test
        self.log_e_value, self.test = math.inf, self._impossible

    def update(self, stakes: EProcesses, k: int) -> None:
        super().update(stakes, k)
        if self._impossible:
            self.refute(self._impossible)

    def take(
        self, messages: Mapping[int, Message], records: _Records, into: RoundNoise, row: int, starts: Mapping[str, int]
    ) -> None:
        """Take the noise of the next round off, and put it into its row."""
        if not self.is_replayable:
            return
        if self.learner in messages and not self._replay.is_offline:
            said = messages[self.learner]
            for name, noise in extract_round_noise(self._replay, said).items():
                into.put(row, starts[name], noise, said[name], self._learned)
                if noise.is_off_lattice.any():
                    self.refute("lattice")
        batch = records.batch(self._replay.t)
        self._replay.step(messages, batch)
        if self.is_replayable:
            self._learned = collect_past(self._replay, batch)


class Watch:
    """A run under watch.

    Args:
        run: the run that is overheard.
        records: what its learners learn, by index.
        alpha: the chance of a false alarm, in all planned rounds together.
        learners: indices of those to watch; the records of the others are not needed.
        keys: of noise in the runs before, of the same deployment; it is kept up. None: there was none.

    Raises:
        SpecError: the run does not wait for late neighbours.

    Attributes:
        learners: those under watch.
        together: how bets on all of them together stand.
        keys: of all noise so far, for the next run.
    """

    def __init__(
        self,
        run: Run,
        records: Sequence[_Records] | Mapping[int, _Records],
        alpha: float,
        learners: Sequence[int],
        keys: KeyTable | None = None,
    ) -> None:
        run.require_synchronous_rounds("a watch")
        self.round = 0
        self.pooled_bets = _EProcess()
        self.key_table = keys or KeyTable()
        self.learners = tuple(_WatchedLearner(run, i) for i in learners)
        self.log_threshold = math.log(2.0 / alpha)
        self.change_log_threshold = math.log(2.0 * run.spec.rounds / alpha)
        self._records, self._level = records, alpha / 2.0
        self._alarmed: set[tuple[int | None, bool]] = set()
        widths = {name: math.prod(shape) for name, shape in run.field_shapes.items()}
        self._starts = dict(zip(widths, accumulate(widths.values(), initial=0), strict=False))
        self._numbers = sum(widths.values())
        self._memory = NoiseHistory(len(self.learners), self._numbers, self.key_table)
        self._stakes = EProcesses(len(self.learners))

    @property
    def log_e_value(self) -> float:
        """Logarithm of the e-value since round 0: half that of all together, or half the learners' mean, if that is more."""
        return max(self.pooled_bets.log_e_value, self._mean("log_e_value")) - math.log(2.0)

    @property
    def change_log_e_value(self) -> float:
        """The same of all detectors."""
        return max(self.pooled_bets.change_log_e_value, self._mean("change_log_e_value")) - math.log(2.0)

    @property
    def learner_margin(self) -> float:
        """How far above a threshold, in logarithms, a learner's own e-value lifts the whole over it."""
        return math.log(2.0 * len(self.learners))

    def _mean(self, what: str) -> float:
        return float(mix_e_values(np.array([getattr(each, what) for each in self.learners])))

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
        said = RoundNoise(len(self.learners), self._numbers)
        for row, watched in enumerate(self.learners):
            watched.take(messages, self._records[watched.learner], said, row, self._starts)
        self._stakes.add(self._memory.see(said))
        for k, stake in enumerate((self.pooled_bets, *self.learners)):
            stake.update(self._stakes, k)
        self.round += 1
        return self._new_alarms(t)

    def report_equivocation(self, learner: int, t: int) -> list[Alarm]:
        """A learner said two different things in round t: a message is drawn once."""
        for watched in self.learners:
            if watched.learner == learner:
                watched.refute("equivocation")
        return self._new_alarms(t)

    def _new_alarms(self, t: int) -> list[Alarm]:
        new = []
        for alarm in (*self._since_the_start(t), *self._of_late(t)):
            named = {learner for learner, change in self._alarmed if change is alarm.is_change}
            if alarm.learner not in named and not (alarm.learner is None and named):
                new.append(alarm)
                self._alarmed.add((alarm.learner, alarm.is_change))
        return new

    def _since_the_start(self, t: int) -> list[Alarm]:
        if self.log_e_value < self.log_threshold:
            return []
        named = _e_bh([watched.log_e_value - math.log(2.0) for watched in self.learners], self._level)
        if not named:
            return [Alarm(self._all, t, self._strongest("log_e_value").test, self.log_e_value, self.log_threshold)]
        line = self.log_threshold + self.learner_margin - math.log(len(named))
        return [Alarm(w.learner, t, w.test, w.log_e_value, line) for w in (self.learners[k] for k in named)]

    def _of_late(self, t: int) -> list[Alarm]:
        """Who is to blame: those whose share of the mean is enough; a correct one of n is, with probability alpha/(4 n)."""
        if self.change_log_e_value < self.change_log_threshold:
            return []
        alone = self.change_log_threshold + self.learner_margin
        guilty = [watched for watched in self.learners if watched.change_log_e_value >= alone]
        if not guilty:
            return [
                Alarm(
                    self._all,
                    t,
                    self._strongest("change_log_e_value").change_test,
                    self.change_log_e_value,
                    self.change_log_threshold,
                    True,
                )
            ]
        return [
            Alarm(watched.learner, t, watched.change_test, watched.change_log_e_value, alone, True)
            for watched in guilty
        ]

    @property
    def _all(self) -> int | None:
        """All that are watched together, if they are several."""
        return None if len(self.learners) > 1 else self.learners[0].learner

    def _strongest(self, what: str) -> _EProcess:
        """Who has lifted the whole over its line."""
        if getattr(self.pooled_bets, what) >= self._mean(what):
            return self.pooled_bets
        worst: _EProcess = max(self.learners, key=lambda watched: getattr(watched, what))
        return worst


def _e_bh(e_values: Sequence[float], alpha: float) -> tuple[int, ...]:
    """Which claims are refuted (Wang and Ramdas 2022): at most a share `alpha` wrongly, on average, whatever the dependence.

    Args:
        e_values: logarithms, one a claim (a learner).
        alpha: false discovery rate.

    Returns:
        Their indices, in order.
    """
    n = len(e_values)
    order = sorted(range(n), key=lambda i: -e_values[i])
    refuted = [k for k in range(1, n + 1) if e_values[order[k - 1]] >= math.log(n / (k * alpha))]
    return tuple(sorted(order[: refuted[-1]])) if refuted else ()
