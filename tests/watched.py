"""Runs under watch whose noise is broken in a stated way, and how many rounds it takes to see it.

`python -m tests.watched` prints the table of docs/developers/sequential-tests.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import stats

from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.online.noise_history import KeyTable
from sottovoce_core.auditing.online.watch import Alarm, Watch
from sottovoce_core.data import PlacedData
from sottovoce_core.noise import NoiseRequest, SeededNoise
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.simulator import simulate_rounds
from tests.examples import made_up, small_run

LEARNERS, NUMBERS, ALPHA = 5, 17, 1e-3
"""Of the table."""

Change = Callable[[FloatArray, int, int], FloatArray]
"""From all noise drawn so far, `(rounds, learners, numbers)` in lattice spacings, the seed and the spacings in a scale, to
what is said in the last of these rounds instead, in spacings."""


class Changed:
    """Noise of a seed, changed; what was drawn is kept."""

    def __init__(self, seed: int, change: Change | None = None) -> None:
        self._source, self._seed, self._change = SeededNoise(seed), seed, change
        self._drawn: list[FloatArray] = []

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        drawn = self._source(draw)
        if self._change is None or draw.spacing is None:
            return drawn
        self._drawn.append((drawn / draw.spacing)[:, 0])
        points = round(float(np.max(np.asarray(draw.scale) / draw.spacing)))
        return np.asarray(np.rint(self._change(np.stack(self._drawn), self._seed, points))[:, None] * draw.spacing)


@cache
def a_run(rounds: int, learners: int = LEARNERS, numbers: int = NUMBERS) -> tuple[Run, PlacedData]:
    """Noise of scale 1: the lattice's spacing is 2^-40 of it."""
    run = small_run(rounds, learners, numbers, algorithm={"sigma": math.sqrt(2.0), "varsigma": 0.0})
    return run, made_up(run.spec, numbers)


def alarms(
    rounds: int,
    noise: Changed,
    *,
    learners: int = LEARNERS,
    numbers: int = NUMBERS,
    keys: KeyTable | None = None,
    alpha: float = ALPHA,
) -> Iterator[Alarm]:
    """All alarms of a run."""
    run, data = a_run(rounds, learners, numbers)
    watch = Watch(run, data.learners, alpha, range(learners), keys)
    for step in simulate_rounds(run, data, noise):
        yield from watch.take(step.t, step.split_by_sender())


# ---- what is broken --------------------------------------------------------------------------------------------------


def times(factor: float, who: slice = slice(None)) -> Change:
    """Noise of these learners is too small."""

    def change(drawn: FloatArray, seed: int, points: int) -> FloatArray:
        said: FloatArray = drawn[-1].copy()
        said[who] *= factor
        return said

    return change


def gaussian(drawn: FloatArray, seed: int, points: int) -> FloatArray:
    """Of equal variance: the same probabilities, by another law."""
    scores = stats.norm.isf(np.exp(-np.abs(drawn[-1]) / points) / 2.0)
    said: FloatArray = np.copysign(scores, drawn[-1]) * math.sqrt(2.0) * points
    return said


def two_rounds_later(drawn: FloatArray, seed: int, points: int) -> FloatArray:
    """One learner says the noise of two rounds before, in every other pair of rounds."""
    said: FloatArray = drawn[-1].copy()
    if (len(drawn) - 1) % 4 >= 2:
        said[1] = drawn[-3, 1]
    return said


def summed(*rounds_before: int, sign: float = 1.0) -> Change:
    """One learner says, in every fourth round, the sum or the difference of its noise of two earlier rounds."""

    def change(drawn: FloatArray, seed: int, points: int) -> FloatArray:
        said: FloatArray = drawn[-1].copy()
        if len(drawn) % 4 == 0:
            one, other = (drawn[-1 - lag, 1] for lag in rounds_before)
            said[1] = one + sign * other
        return said

    return change


def difference_of_others(drawn: FloatArray, seed: int, points: int) -> FloatArray:
    """One learner says the difference of what two others said, one and two rounds before."""
    said: FloatArray = drawn[-1].copy()
    if len(drawn) > 2:
        said[1] = drawn[-2, 3] - drawn[-3, 4]
    return said


def sum_of_others(drawn: FloatArray, seed: int, points: int) -> FloatArray:
    """One learner says the sum of what two others say in the same round."""
    said: FloatArray = drawn[-1].copy()
    said[1] = said[3] + said[4]
    return said


def float32(drawn: FloatArray, seed: int, points: int) -> FloatArray:
    """Noise is drawn in float32."""
    said: FloatArray = drawn[-1].astype(np.float32).astype(np.float64)
    return said


def coarser(drawn: FloatArray, seed: int, points: int) -> FloatArray:
    """A lattice twice as wide."""
    said: FloatArray = 2.0 * np.rint(drawn[-1] / 2.0)
    return said


def shifted_copy(drawn: FloatArray, seed: int, points: int) -> FloatArray:
    """One learner says the noise of another, by one coordinate further."""
    said: FloatArray = drawn[-1].copy()
    said[3] = np.roll(said[1], 1)
    return said


def correlated(rho: float, lag: int = 3) -> Change:
    """Normal scores of a learner follow those of another one, some rounds before."""

    def change(drawn: FloatArray, seed: int, points: int) -> FloatArray:
        said: FloatArray = drawn[-1].copy()
        if len(drawn) > lag:
            own, other = (_scores(row / points) for row in (drawn[-1, 3], drawn[-1 - lag, 1]))
            mixed = rho * other + math.sqrt(1.0 - rho**2) * own
            said[3] = np.copysign(-np.log(2.0 * stats.norm.sf(np.abs(mixed))), mixed) * points
        return said

    return change


def _scores(values: FloatArray) -> FloatArray:
    scores: FloatArray = np.copysign(stats.norm.isf(np.exp(-np.abs(values)) / 2.0), values)
    return scores


def streams(count: int) -> Change:
    """Every message is drawn with one of so many seeds."""

    def change(drawn: FloatArray, seed: int, points: int) -> FloatArray:
        said: FloatArray = drawn[-1].copy()
        chosen = np.random.default_rng((seed, len(drawn)))
        for row in said:
            stream = np.random.default_rng((7, int(chosen.integers(count))))
            row[:] = stream.laplace(scale=points, size=len(row))
        return said

    return change


def sizes_follow(drawn: FloatArray, seed: int, points: int) -> FloatArray:
    """A fifth smaller after a small number, a fifth larger after a large one."""
    said: FloatArray = drawn[-1].copy()
    if len(drawn) > 1:
        said *= np.where(np.abs(drawn[-2]) / points < math.log(2.0), 0.8, 1.2)
    return said


def zero_sum(drawn: FloatArray, seed: int, points: int) -> FloatArray:
    """The last learner takes back what the others said."""
    said: FloatArray = drawn[-1].copy()
    said[-1] = -said[:-1].sum(axis=0)
    return said


@dataclass(frozen=True, slots=True)
class Break:
    """What is broken, and how soon it should be seen.

    Attributes:
        name: in words.
        change: of the noise.
        most: rounds, a bound on the median over several seeds.
        soonest: rounds that any test needs: `log(1/alpha)` over the nats of evidence in a round, or the first of all
            rounds in which there is something to see.
    """

    name: str
    change: Change
    most: int
    soonest: int


def _soonest(nats: float, numbers: int = LEARNERS * NUMBERS) -> int:
    """Of so much evidence in a number."""
    return math.ceil(math.log(1.0 / ALPHA) / (nats * numbers))


def _of_scale(factor: float) -> float:
    return factor - 1.0 - math.log(factor)


BREAKS = (
    Break("half the scale", times(0.5), 2, _soonest(_of_scale(0.5))),
    Break("0.9 of the scale", times(0.9), 78, _soonest(_of_scale(0.9))),
    Break("0.95 of the scale", times(0.95), 320, _soonest(_of_scale(0.95))),
    Break("half the scale, one learner", times(0.5, slice(1, 2)), 10, _soonest(_of_scale(0.5), NUMBERS)),
    Break("Gaussian noise of equal variance", gaussian, 24, _soonest(0.056)),
    Break("noise in float32", float32, 2, 1),
    Break("a lattice twice as coarse", coarser, 2, _soonest(math.log(2.0))),
    Break("noise again two rounds later, one learner", two_rounds_later, 6, 3),
    Break("the sum of its two rounds before, one learner", summed(1, 2), 6, 4),
    Break("the difference of two earlier rounds, one learner", summed(1, 3, sign=-1.0), 6, 4),
    Break("the difference of two others' earlier noise, one learner", difference_of_others, 6, 3),
    Break("the sum of two others' noise of the same round", sum_of_others, 2, 1),
    Break("2^12 streams", streams(2**12), 42, round(math.sqrt(2.0**13 * math.log(2.0)) / LEARNERS)),
    Break("a shifted copy of another learner", shifted_copy, 2, 1),
    Break("noise of all learners adds up to nothing", zero_sum, 2, 1),
    Break("correlation 0.5 of two learners at lag 3", correlated(0.5), 34, _soonest(-math.log(0.75) / 2.0, NUMBERS)),
    Break("correlation 0.3 of two learners at lag 3", correlated(0.3), 68, _soonest(-math.log(0.91) / 2.0, NUMBERS)),
    Break(
        "correlation 0.5 of two learners at lag 40",
        correlated(0.5, 40),
        90,
        40 + _soonest(-math.log(0.75) / 2.0, NUMBERS),
    ),
    Break("sizes follow those of the round before", sizes_follow, 42, _soonest(0.0204)),
)


def rounds_to_alarm(change: Change, most: int, seed: int) -> tuple[int, Alarm | None]:
    """Rounds until the first alarm, of any kind; one more than `most`: there was none."""
    first = next(alarms(most, Changed(seed, change)), None)
    return (most + 1, None) if first is None else (first.round + 1, first)


if __name__ == "__main__":
    print("| fault | rounds, median (range of nine) | at best | found by |\n|---|---|---|---|")
    for each in BREAKS:
        found = [rounds_to_alarm(each.change, 4 * each.most, seed) for seed in range(9)]
        rounds = sorted(count for count, _ in found)
        seen_by = ", ".join(sorted({f"`{alarm.test}`" for _, alarm in found if alarm}))
        print(f"| {each.name} | {rounds[4]} ({rounds[0]}-{rounds[-1]}) | {each.soonest} | {seen_by} |", flush=True)
