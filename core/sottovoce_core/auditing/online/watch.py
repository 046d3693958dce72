"""Watch of a run while it goes on: tests every learner's noise round by round against the claim.

Every round of every learner is replayed, its noise extracted (`residuals.extract_round_noise`), and bet on
(`bets.EProcesses`). The result may be inspected after every round. Each of the two questions gets half of `alpha`; while all
claims hold,

1. *Was the noise ever wrong?* Every learner has an e-process, and all of them together have another one (`bets.EProcesses`).
  Half the
   learners' mean plus half that of all is an e-process again, so neither half reaches `2/alpha` except with probability at
   most
   `alpha/2`, in any number of rounds (Ville). Faulty learners are named by e-BH at that level, which names none before the
   mean
   reaches the threshold: k e-values above `4n/(k alpha)`, of n learners, have a mean above `4/alpha`.
2. *Did it break during the run?* Detectors of blocks of rounds bet the same, with the same weights, and their mean
   reaches `c = 2 rounds/alpha` after c rounds or more, on average. So within the planned `rounds` it does with
   probability at most `alpha/2`; a run without end would raise a false alarm eventually.

An impossible observation (noise off its lattice, two different messages of one round) is an infinite e-value: no claim
survives it. State and work of a round are the same in every round, except for the memory of the algorithm itself.
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
    """Records of one learner by round."""

    def batch(self, t: int) -> Batch:
        """Return the records of round t; called once for every round, in order."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Observation that is very unlikely if the claims hold.

    Attributes:
        learner: index of the learner; None: all watched learners together, none of them singled out.
        round: round after whose messages the alarm was raised.
        test: bet with the largest gain (`bets`), `lattice`, `equivocation` or `canaries`.
        log_e_value: logarithm of the e-value that reached the threshold.
        log_threshold: logarithm of the threshold.
        is_change: True if a change detector raised it: the noise broke during the run.
    """

    learner: int | None
    round: int
    test: str
    log_e_value: float
    log_threshold: float
    is_change: bool = False


class _EProcess:
    """Current e-values of one learner, or of all together.

    Attributes:
        log_e_value: logarithm of the e-value since round 0.
        change_log_e_value: logarithm of the mean of the detectors.
        test: bet with the largest gain since round 0.
        change_test: bet with the largest recent gain.
    """

    def __init__(self) -> None:
        self.log_e_value = self.change_log_e_value = 0.0
        self.test = self.change_test = "scale"

    def update(self, stakes: EProcesses, k: int) -> None:
        """Read the e-values after another round."""
        self.log_e_value, self.change_log_e_value = float(stakes.log_e_values[k]), float(stakes.change_log_e_values[k])
        self.test, self.change_test = stakes.tests[k], stakes.change_tests[k]


class _WatchedLearner(_EProcess):
    """Watched learner.

    Args:
        run: run that it belongs to.
        learner: its index.
    """

    def __init__(self, run: Run, learner: int) -> None:
        super().__init__()
        self.learner = learner
        self._replay = Replay(run, learner)
        self._past: Mapping[str, FloatArray] = {}
        self._impossible: str | None = None

    @property
    def is_replayable(self) -> bool:
        """True if the replay is possible: not after a round in which messages that its state depends on are missing."""
        return self._replay.is_known

    @property
    def rounds(self) -> int:
        """Number of replayed rounds."""
        return self._replay.t

    def refute(self, test: str) -> None:
        """Record an impossible observation."""
        self._impossible = self._impossible or test
        self.log_e_value, self.test = math.inf, self._impossible

    def update(self, stakes: EProcesses, k: int) -> None:
        super().update(stakes, k)
        if self._impossible:
            self.refute(self._impossible)

    def take(
        self,
        messages: Mapping[int, Message],
        records: _Records,
        round_noise: RoundNoise,
        row: int,
        starts: Mapping[str, int],
    ) -> None:
        """Extract the noise of the next round and store it in its row."""
        if not self.is_replayable:
            return
        if self.learner in messages and not self._replay.is_offline:
            message = messages[self.learner]
            for name, noise in extract_round_noise(self._replay, message).items():
                round_noise.store(row, starts[name], noise, message[name], self._past)
                if noise.is_off_lattice.any():
                    self.refute("lattice")
        batch = records.batch(self._replay.t)
        self._replay.step(messages, batch)
        if self.is_replayable:
            self._past = collect_past(self._replay, batch)


class Watch:
    """Watch of one run.

    Args:
        run: run whose traffic is recorded.
        records: records of its learners, by index.
        alpha: probability of a false alarm, in all planned rounds together.
        learners: indices of the learners to watch; the records of the others are not needed.
        keys: keys of the noise of earlier runs of the same deployment; updated in place. None: there are none.

    Raises:
        SpecError: the run does not wait for late neighbours.

    Attributes:
        learners: watched learners.
        pooled_bets: bets on all of them together.
        key_table: keys of all noise so far, for the next run.
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
        self._history = NoiseHistory(len(self.learners), self._numbers, self.key_table)
        self._stakes = EProcesses(len(self.learners))

    @property
    def log_e_value(self) -> float:
        """Logarithm of the e-value since round 0: half that of all together, or half the learners' mean, if larger."""
        return max(self.pooled_bets.log_e_value, self._mix_learners("log_e_value")) - math.log(2.0)

    @property
    def change_log_e_value(self) -> float:
        """Logarithm of the e-value of all detectors, combined in the same way."""
        return max(self.pooled_bets.change_log_e_value, self._mix_learners("change_log_e_value")) - math.log(2.0)

    @property
    def learner_margin(self) -> float:
        """Logarithmic margin above a threshold at which one learner's e-value alone makes the combined one exceed it."""
        return math.log(2.0 * len(self.learners))

    def _mix_learners(self, attribute: str) -> float:
        return float(mix_e_values(np.array([getattr(each, attribute) for each in self.learners])))

    def take(self, t: int, messages: Mapping[int, Message]) -> list[Alarm]:
        """Process the messages of the next round.

        Args:
            t: the round.
            messages: messages by sender; fields `(1, 1, dim)`. A missing sender was not recorded.

        Returns:
            New alarms: at most one per learner and question.

        Raises:
            CaptureError: another round is next.
        """
        if t != self.round:
            raise CaptureError(
                f"the next round to watch must be {self.round}, got {t}: pass every round once, in order"
            )
        round_noise = RoundNoise(len(self.learners), self._numbers)
        for row, watched in enumerate(self.learners):
            watched.take(messages, self._records[watched.learner], round_noise, row, self._starts)
        self._stakes.add(self._history.observe(round_noise))
        for k, process in enumerate((self.pooled_bets, *self.learners)):
            process.update(self._stakes, k)
        self.round += 1
        return self._collect_new_alarms(t)

    def report_equivocation(self, learner: int, t: int) -> list[Alarm]:
        """Report two different messages of a learner in round t, which is impossible: a message is drawn once."""
        for watched in self.learners:
            if watched.learner == learner:
                watched.refute("equivocation")
        return self._collect_new_alarms(t)

    def _collect_new_alarms(self, t: int) -> list[Alarm]:
        new = []
        for alarm in (*self._raise_e_value_alarms(t), *self._raise_change_alarms(t)):
            named = {learner for learner, change in self._alarmed if change is alarm.is_change}
            if alarm.learner not in named and not (alarm.learner is None and named):
                new.append(alarm)
                self._alarmed.add((alarm.learner, alarm.is_change))
        return new

    def _raise_e_value_alarms(self, t: int) -> list[Alarm]:
        if self.log_e_value < self.log_threshold:
            return []
        named = _select_by_e_bh([watched.log_e_value - math.log(2.0) for watched in self.learners], self._level)
        if not named:
            return [
                Alarm(
                    self._common_index,
                    t,
                    self._find_strongest("log_e_value").test,
                    self.log_e_value,
                    self.log_threshold,
                )
            ]
        threshold = self.log_threshold + self.learner_margin - math.log(len(named))
        return [
            Alarm(each.learner, t, each.test, each.log_e_value, threshold) for each in (self.learners[k] for k in named)
        ]

    def _raise_change_alarms(self, t: int) -> list[Alarm]:
        """Name the learners whose part of the mean suffices; a correct one of n is named with probability alpha/(4 n)."""
        if self.change_log_e_value < self.change_log_threshold:
            return []
        threshold = self.change_log_threshold + self.learner_margin
        faulty = [watched for watched in self.learners if watched.change_log_e_value >= threshold]
        if not faulty:
            return [
                Alarm(
                    self._common_index,
                    t,
                    self._find_strongest("change_log_e_value").change_test,
                    self.change_log_e_value,
                    self.change_log_threshold,
                    True,
                )
            ]
        return [
            Alarm(watched.learner, t, watched.change_test, watched.change_log_e_value, threshold, True)
            for watched in faulty
        ]

    @property
    def _common_index(self) -> int | None:
        """Learner index of a common alarm: None if several learners are watched."""
        return None if len(self.learners) > 1 else self.learners[0].learner

    def _find_strongest(self, attribute: str) -> _EProcess:
        """Find the process that raised the combined e-value over its threshold."""
        if getattr(self.pooled_bets, attribute) >= self._mix_learners(attribute):
            return self.pooled_bets
        worst: _EProcess = max(self.learners, key=lambda watched: getattr(watched, attribute))
        return worst


def _select_by_e_bh(e_values: Sequence[float], alpha: float) -> tuple[int, ...]:
    """Select the refuted claims by e-BH (Wang and Ramdas 2022).

    The mean fraction of false ones is at most `alpha`, for any dependence.

    Args:
        e_values: logarithms, one per claim (learner).
        alpha: false discovery rate.

    Returns:
        Indices of the refuted claims, in order.
    """
    n = len(e_values)
    order = sorted(range(n), key=lambda i: -e_values[i])
    refuted = [k for k in range(1, n + 1) if e_values[order[k - 1]] >= math.log(n / (k * alpha))]
    return tuple(sorted(order[: refuted[-1]])) if refuted else ()
