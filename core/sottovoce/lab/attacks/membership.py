"""Was this record learned? Guesses in dual averaging with a shared loss (`dpsda-c`, `dpsda-ps`, `dpcda`).

All learners hold a record or all hold another one, and everything else is known. Given the past, the messages of a round are
independent, so the log-likelihood ratios of all learners add up: nobody guesses better from messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sottovoce.algorithms.dual_averaging.algorithm import DualAveraging
from sottovoce.arrays import FloatArray, IntArray
from sottovoce.auditing.bounds import epsilon_lower_bound, interval
from sottovoce.data import LearnerData, PlacedData
from sottovoce.noise import SeededNoise
from sottovoce.running.replay import Replay, replay
from sottovoce.running.run import Run
from sottovoce.running.simulator import simulate
from sottovoce.running.transcript import Transcript

_ROUNDING = 1e-9
"""Decisions closer than this, relative to the largest, are equal."""

Pair = tuple[LearnerData, LearnerData]
"""What every learner holds in world 0 and in world 1."""


@dataclass(frozen=True, slots=True)
class _HeardRuns:
    """Runs of one world.

    Attributes:
        transcript: what was said.
        decisions: `(rounds, learners, replicas, dim)`, in use when the round's records came.
    """

    transcript: Transcript
    decisions: FloatArray


def simulate_worlds(run: Run, data: PlacedData, pair: Pair, runs: int, seed: int) -> tuple[_HeardRuns, _HeardRuns]:
    """Simulate `runs` runs, each in a world that a fair coin chose."""
    coins, *sources = np.random.SeedSequence(seed).spawn(3)
    seconds = int(np.clip(np.random.default_rng(coins).binomial(runs, 0.5), 1, runs - 1))
    counts = (runs - seconds, seconds)
    first, second = (
        _world(run, data, own, count, source) for own, count, source in zip(pair, counts, sources, strict=True)
    )
    return first, second


def _world(run: Run, data: PlacedData, own: LearnerData, runs: int, seed: np.random.SeedSequence) -> _HeardRuns:
    shared = PlacedData((own,) * run.spec.n_learners, data.test_features, data.test_labels)
    steps = list(simulate(run, shared, SeededNoise(seed), runs))
    return _HeardRuns(Transcript.of(step.message for step in steps), np.stack([step.before for step in steps]))


# ---- scores: above 0 speaks for world 0, below for world 1 -----------------------------------------------------------


def from_messages(run: Run, transcript: Transcript, pair: Pair) -> FloatArray:
    """`(replicas,)` log-likelihood ratio of all that was said."""
    losses = [replay(run, transcript, i, pair).total[0] for i in range(run.spec.n_learners)]
    total: FloatArray = np.sum(losses, axis=0)
    return total


def from_decisions(run: Run, algorithm: DualAveraging, decisions: FloatArray, pair: Pair) -> FloatArray:
    """The same from the decisions of all learners, `(rounds, learners, replicas, dim)`, where they are made from messages.

    A decision `Pro(-alpha_t h_t / w_t)` that the projection leaves alone is the message in another unit.
    """
    alphas = algorithm.step / np.sqrt(np.maximum(np.arange(len(decisions)), 1.0))
    pushed = np.broadcast_to(algorithm.push_weights, (len(decisions), decisions.shape[1]))[:, :, None, None]
    duals = -decisions * pushed / alphas[:, None, None, None]
    weights = np.broadcast_to(pushed, (*decisions.shape[:3], 1))
    return from_messages(run, Transcript({"h": duals, "w": weights} if algorithm.push else {"h": duals}), pair)


def from_both(run: Run, heard: _HeardRuns, pair: Pair) -> FloatArray:
    """From messages and decisions: infinite where a decision could only have been made in one of the worlds."""
    scores = from_messages(run, heard.transcript, pair)
    for learner in range(run.spec.n_learners):
        for t, decided in enumerate(_decided(run, heard.transcript, learner, pair)):
            published = heard.decisions[t, learner]
            apart = np.abs(decided - published).max(axis=-1)
            fits = apart <= _ROUNDING * (1.0 + np.abs(published).max(axis=-1))
            scores = np.where(fits[0] & ~fits[1], np.inf, np.where(fits[1] & ~fits[0], -np.inf, scores))
    return scores


def _decided(run: Run, transcript: Transcript, learner: int, pair: Pair) -> Iterator[FloatArray]:
    """By round, `(worlds, replicas, dim)`: what the learner would have decided in each world, given what was said."""
    machine = Replay(run, learner, transcript.replicas, len(pair))
    for t in range(transcript.rounds):
        machine.step(transcript.messages(t, learner, machine.concerned), *(own.batch(t) for own in pair))
        yield machine.decision


# ---- what guessing comes to ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GuessingRate:
    """Guesses of the world by the sign of the score.

    Attributes:
        runs, correct: all of them, and those guessed right.
        low, high: Clopper-Pearson interval of the rate of right guesses.
        bound: lower bound on epsilon.
        false_alarms, detections: the ROC, ascending: world 0 is called when it is not, and when it is.
    """

    runs: int
    correct: int
    low: float
    high: float
    bound: float
    false_alarms: FloatArray
    detections: FloatArray

    @property
    def rate(self) -> float:
        """Share of right guesses."""
        return self.correct / self.runs


def guess(scores: Sequence[FloatArray], seed: int, confidence: float = 0.95) -> GuessingRate:
    """Guess the world of every run; a score of 0 is met by a coin.

    Args:
        scores: of the runs of world 0, and of world 1.
        seed: of the coins.
        confidence: of the interval, two-sided, and of the bound, one-sided.
    """
    generator, (first, second) = np.random.default_rng(seed), scores
    coins = [generator.random(len(each)) < 0.5 for each in scores]
    right = (first > 0) | ((first == 0) & coins[0]), (second < 0) | ((second == 0) & coins[1])
    runs, correct = len(first) + len(second), int(sum(each.sum() for each in right))
    low, high = interval(correct, runs, confidence)
    return GuessingRate(
        runs, correct, low, high, epsilon_lower_bound(correct, runs, 1.0 - confidence), *roc(first, second)
    )


def roc(first: FloatArray, second: FloatArray) -> tuple[FloatArray, FloatArray]:
    """False alarms and detections of "world 0" as the threshold falls; equal scores are called together."""
    levels: FloatArray = np.unique(np.concatenate([first, second]))[::-1]
    shares: list[FloatArray] = []
    for scores in (second, first):
        below: IntArray = np.searchsorted(np.sort(scores), levels, side="left").astype(np.int64)
        shares.append(np.concatenate([[0.0], 1.0 - below / len(scores)]))
    return shares[0], shares[1]
