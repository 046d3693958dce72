"""Watching a run: correct learners raise an alarm as rarely as is said, broken ones soon, and the right one is named.

Seeds are fixed. Every test says with which probability it would fail for another seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from scipy import stats

from sottovoce.algorithms.interface import Message
from sottovoce.arrays import FloatArray, Scalars
from sottovoce.data import PlacedData
from sottovoce.errors import CaptureError
from sottovoce.lab.watch.sequential import Changes, Conformance, Detector
from sottovoce.lab.watch.watch import BLOCKS, Alarm, Watch
from sottovoce.noise import Draw, Noise, SeededNoise
from sottovoce.running.run import Run
from sottovoce.running.simulator import simulate
from tests.examples import made_up, small_run

Change = Callable[[int, FloatArray, FloatArray, Scalars], FloatArray]
"""From round, this learner's noise, that of the round before, and the lattice, to what is said instead."""

BROKEN = 1
"""The learner whose noise is broken."""


class Broken:
    """Noise of a seed, changed for one learner."""

    def __init__(self, seed: int, change: Change, since: int = 0) -> None:
        self._source, self._change, self._since = SeededNoise(seed), change, since
        self._before: FloatArray | None = None

    def __call__(self, draw: Draw) -> FloatArray:
        drawn = self._source(draw)
        before = drawn if self._before is None else self._before
        if draw.round >= self._since:
            spacing = draw.grid if isinstance(draw.grid, float) else np.asarray(draw.grid)[BROKEN]
            drawn[BROKEN] = self._change(draw.round, drawn[BROKEN], before[BROKEN], spacing)
        self._before = drawn
        return drawn


def times(factor: float) -> Change:
    return lambda t, drawn, before, grid: np.rint(factor * drawn / grid) * grid


def repeated(t: int, drawn: FloatArray, before: FloatArray, grid: Scalars) -> FloatArray:
    return before if t % 2 else drawn


def omitted(t: int, drawn: FloatArray, before: FloatArray, grid: Scalars) -> FloatArray:
    return np.zeros_like(drawn) if t == 10 else drawn


def normal(t: int, drawn: FloatArray, before: FloatArray, grid: Scalars) -> FloatArray:
    """Gaussian noise of the same variance: the Laplace numbers' probabilities, taken by another law."""
    scale = float(np.ldexp(grid, 40))
    standard: FloatArray = stats.norm.ppf(stats.laplace.cdf(drawn / scale))
    rounded: FloatArray = np.rint(standard * scale * np.sqrt(2.0) / grid) * grid
    return rounded


def off_the_lattice(t: int, drawn: FloatArray, before: FloatArray, grid: Scalars) -> FloatArray:
    return drawn + 0.4 * grid


def a_run(dim: int, rounds: int, learners: int = 3) -> tuple[Run, PlacedData]:
    """Noise of scale 1: the lattice's spacing is 2^-40 of it."""
    run = small_run(rounds, learners, dim, algorithm={"sigma": math.sqrt(2.0), "varsigma": 0.0})
    return run, made_up(run.spec, dim)


def overheard(run: Run, data: PlacedData, noise: Noise, replicas: int = 1) -> Iterator[list[dict[int, Message]]]:
    """By round, what was said in every replica."""
    for step in simulate(run, data, noise, replicas):
        yield [
            {i: Message({"y": step.message["y"][i : i + 1, k : k + 1]}) for i in range(run.spec.n_learners)}
            for k in range(replicas)
        ]


def alarms_of(watch: Watch, rounds: Iterator[list[dict[int, Message]]]) -> list[Alarm]:
    found = []
    for t, (messages,) in enumerate(rounds):
        found += watch.take(t, messages)
    return found


# ---- correct learners ------------------------------------------------------------------------------------------------


def test_false_alarms_are_as_rare_as_stated() -> None:
    """200 runs, looked at in every round; more alarms than these have probability below 1e-3, if each has alpha."""
    run, data = a_run(3, 6, 2)
    watches = [Watch(run, data, 0.05, (0, 1)) for _ in range(200)]
    alarmed: dict[float, set[int]] = {0.05: set(), 0.001: set()}
    more = math.log(0.05 / 0.001)  # by so much the thresholds of a Watch at alpha 0.001 are higher
    for t, replicas in enumerate(overheard(run, data, SeededNoise(7), len(watches))):
        for k, (watch, messages) in enumerate(zip(watches, replicas, strict=True)):
            if watch.take(t, messages):
                alarmed[0.05].add(k)
            if watch.e >= watch.threshold + more or watch.change >= watch.change_threshold + more:
                alarmed[0.001].add(k)
    for alpha, most in ((0.05, 21), (0.001, 3)):
        assert stats.binom.sf(most, len(watches), alpha) < 1e-3
        assert len(alarmed[alpha]) <= most


def test_a_long_correct_run_raises_no_alarm() -> None:
    """With probability at least 0.999."""
    run, data = a_run(10, 150)
    watch = Watch(run, data, 1e-3, (0, 1, 2))
    assert alarms_of(watch, overheard(run, data, SeededNoise(1))) == []
    assert watch.round == 150
    assert watch.e < 0.0


def test_blocks_are_those_of_the_detector() -> None:
    """`(R_{b-1} + 1) e_b`, where `R_b` is Shiryaev and Roberts's sum over blocks."""
    values = np.random.default_rng(0).laplace(size=(7, 20))
    changes, detector = Changes(3), Detector()
    for row in values:
        changes.add(row)
    for block in (values[:3], values[3:6], values[6:]):
        bet = Conformance()
        for row in block:
            bet.add(row)
        detector.add(np.array([bet.e]))
    assert changes.e == pytest.approx(detector.e)
    assert Changes(3).e == pytest.approx(0.0, abs=1e-12)


def test_changes_are_at_most_the_blocks_begun_on_average() -> None:
    """That gives the run length. 600 streams of four blocks, five standard errors: failure probability below 1e-5."""
    generator, found = np.random.default_rng(4), []
    for _ in range(600):
        changes = Changes(2)
        for _ in range(8):
            changes.add(generator.laplace(size=2))
        found.append(math.exp(changes.e))
    assert np.mean(found) <= 4.0 + 5.0 * np.std(found) / math.sqrt(len(found))


# ---- broken ones -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "dim", "most", "tests"),
    [
        (times(0.5), 100, 4, {"scale", "histogram"}),
        (times(0.9), 100, 54, {"scale"}),
        (repeated, 10, 2, {"repeats"}),
        (omitted, 10, 11, {"repeats"}),
        (normal, 100, 30, {"histogram", "scale"}),
        (off_the_lattice, 3, 1, {"lattice"}),
        (times(0.5), 10, 40, {"scale", "histogram"}),
    ],
    ids=["half", "nine tenths", "repeated", "omitted", "normal", "off the lattice", "half of ten"],
)
def test_a_broken_learner_is_named_soon(change: Change, dim: int, most: int, tests: set[str]) -> None:
    """Within three times the median rounds of one learner's bets (half 1-2, nine tenths 18, normal 10), reuse at once.

    That is for the median of five runs, with failure probability below 1e-3. The margin is for three learners' mean.
    """
    run, data = a_run(dim, most + 1)
    rounds = []
    for seed in range(5):
        watch = Watch(run, data, 1e-3, (0, 1, 2))
        found = [a for a in alarms_of(watch, overheard(run, data, Broken(seed, change))) if not a.change]
        assert {alarm.learner for alarm in found} <= {BROKEN}
        rounds += [found[0].round + 1 if found else most + 1]
        assert all(alarm.test in tests and alarm.e >= alarm.threshold for alarm in found)
    assert np.median(rounds) <= most


def test_what_breaks_on_the_way_is_seen_by_the_detector_first() -> None:
    """After 300 correct rounds of one number; the detector needs no more than half as long. Probability below 0.01."""
    run, data = a_run(1, 600, 2)
    watch = Watch(run, data, 1e-3, (0, 1))
    found = alarms_of(watch, overheard(run, data, Broken(3, times(0.25), since=300)))
    first = {change: min((a.round for a in found if a.change is change), default=600) for change in (False, True)}
    assert {alarm.learner for alarm in found} == {BROKEN}
    assert 300 <= first[True] < first[False]


def test_two_different_messages_of_a_round_refute_a_learner() -> None:
    run, data = a_run(2, 5)
    watch = Watch(run, data, 1e-3, (0, BROKEN))
    assert watch.equivocated(2, 3) == []  # is not watched
    (alarm,) = watch.equivocated(BROKEN, 3)
    assert (alarm.learner, alarm.round, alarm.test, alarm.e) == (BROKEN, 3, "equivocation", math.inf)
    assert watch.equivocated(BROKEN, 4) == []  # once is enough


# ---- what can be watched ---------------------------------------------------------------------------------------------


def test_only_the_records_of_those_who_are_watched_are_needed() -> None:
    run, data = a_run(4, 20)
    rounds = list(overheard(run, data, SeededNoise(0)))
    blank = data.with_learner(0, data.learners[1]).with_learner(2, data.learners[1])
    some, all_of_them = Watch(run, blank, 1e-3, (1,)), Watch(run, data, 1e-3, (0, 1, 2))
    assert alarms_of(some, iter(rounds)) == alarms_of(all_of_them, iter(rounds)) == []
    assert some.learners[0].e == all_of_them.learners[1].e


def test_who_was_not_overheard_is_not_watched_from_there_on() -> None:
    run, data = a_run(4, 20)
    watch = Watch(run, data, 1e-3, (0, 1, 2))
    for t, (messages,) in enumerate(overheard(run, data, SeededNoise(0))):
        watch.take(t, {i: m for i, m in messages.items() if (t, i) != (7, 2)})
    heard_by = [run.network.at(7).heard_by(i) for i in range(3)]
    assert [w.heard for w in watch.learners] == [i != 2 and 2 not in heard_by[i] for i in range(3)]
    assert watch.learners[2].rounds == 7


def test_rounds_come_in_order() -> None:
    run, data = a_run(2, 5)
    with pytest.raises(CaptureError, match="must be 0, got 1"):
        Watch(run, data, 1e-3, (0,)).take(1, {})


def test_state_is_as_large_after_many_rounds_as_after_few() -> None:
    """Numbers in the bets of a learner; what the algorithm remembers is its own."""

    def numbers(changes: Changes) -> int:
        return sum(np.size(v) for bet in changes.block.bets for v in vars(bet).values())

    run, data = a_run(2, 3 * BLOCKS[0])
    watch, sizes = Watch(run, data, 1e-3, (0,)), []
    for t, (messages,) in enumerate(overheard(run, data, SeededNoise(0))):
        watch.take(t, messages)
        sizes.append(sum(numbers(each) for each in watch.learners[0].changes))
    assert sizes[3] == sizes[-1]
