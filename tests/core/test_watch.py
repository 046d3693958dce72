"""Watching a run: correct learners raise an alarm as rarely as is said, broken ones soon, and the right one is named.

Seeds are fixed. Every test says with which probability it would fail for another seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from scipy import stats

from sottovoce_core.algorithms.interface import Message
from sottovoce_core.arrays import FloatArray, Scalars
from sottovoce_core.auditing.online.bets import _BLOCKS
from sottovoce_core.auditing.online.noise_history import KeyTable
from sottovoce_core.auditing.online.watch import Alarm, Watch
from sottovoce_core.data import PlacedData
from sottovoce_core.errors import CaptureError
from sottovoce_core.noise import NoiseRequest, NoiseSource, SeededNoise
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.simulator import simulate_rounds
from tests.examples import made_up, small_run
from tests.watched import Changed, alarms

Change = Callable[[int, FloatArray, FloatArray, Scalars], FloatArray]
"""From round, this learner's noise, that of the round before, and the lattice, to what is said instead."""

BROKEN = 1
"""The learner whose noise is broken."""


class Broken:
    """Noise of a seed, changed for one learner."""

    def __init__(self, seed: int, change: Change, since: int = 0) -> None:
        self._source, self._change, self._since = SeededNoise(seed), change, since
        self._before: FloatArray | None = None

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        drawn = self._source(draw)
        before = drawn if self._before is None else self._before
        if draw.round >= self._since:
            spacing = draw.spacing if isinstance(draw.spacing, float) else np.asarray(draw.spacing)[BROKEN]
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


def overheard(run: Run, data: PlacedData, noise: NoiseSource, replicas: int = 1) -> Iterator[list[dict[int, Message]]]:
    """By round, what was said in every replica."""
    for step in simulate_rounds(run, data, noise, replicas):
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


@pytest.mark.statistics
def test_false_alarms_are_as_rare_as_stated() -> None:
    """200 runs, looked at in every round; more alarms than these have probability below 1e-3, if each has alpha."""
    run, data = a_run(3, 6, 2)
    watches = [Watch(run, data.learners, 0.05, (0, 1)) for _ in range(200)]
    alarmed: dict[float, set[int]] = {0.05: set(), 0.001: set()}
    more = math.log(0.05 / 0.001)  # by so much the thresholds of a Watch at alpha 0.001 are higher
    for t, replicas in enumerate(overheard(run, data, SeededNoise(7), len(watches))):
        for k, (watch, messages) in enumerate(zip(watches, replicas, strict=True)):
            if watch.take(t, messages):
                alarmed[0.05].add(k)
            if (
                watch.log_e_value >= watch.log_threshold + more
                or watch.change_log_e_value >= watch.change_log_threshold + more
            ):
                alarmed[0.001].add(k)
    for alpha, most in ((0.05, 21), (0.001, 3)):
        assert stats.binom.sf(most, len(watches), alpha) < 1e-3
        assert len(alarmed[alpha]) <= most


def test_a_long_correct_run_raises_no_alarm() -> None:
    """With probability at least 0.999."""
    run, data = a_run(10, 150)
    watch = Watch(run, data.learners, 1e-3, (0, 1, 2))
    assert alarms_of(watch, overheard(run, data, SeededNoise(1))) == []
    assert watch.round == 150
    assert watch.log_e_value < 0.0


@pytest.mark.long
def test_no_correct_run_of_sixty_raises_an_alarm() -> None:
    """60 runs of 60 rounds, five learners, 17 numbers, at alpha 0.001: one alarm has probability below 0.06.

    That all bets together are fair is tested beside them.
    """
    assert [alarm for seed in range(60) for alarm in alarms(60, Changed(seed))] == []


@pytest.mark.parametrize(("learners", "numbers"), [(1, 1), (1, 40), (2, 2), (20, 3), (50, 1), (3, 500)])
def test_correct_runs_of_all_shapes_raise_none(learners: int, numbers: int) -> None:
    """With probability at least 0.999 each, however many learners and numbers there are."""
    assert list(alarms(20, Changed(0), learners=learners, numbers=numbers)) == []


# ---- broken ones -----------------------------------------------------------------------------------------------------


@pytest.mark.statistics
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
        watch = Watch(run, data.learners, 1e-3, (0, 1, 2))
        found = [a for a in alarms_of(watch, overheard(run, data, Broken(seed, change))) if not a.is_change]
        assert {alarm.learner for alarm in found} <= {BROKEN}
        rounds += [found[0].round + 1 if found else most + 1]
        assert all(alarm.test in tests and alarm.log_e_value >= alarm.log_threshold for alarm in found)
    assert np.median(rounds) <= most


@pytest.mark.statistics
def test_what_breaks_on_the_way_is_seen_by_the_detector_first() -> None:
    """After 300 correct rounds of one number; the detector needs no more than half as long. Probability below 0.01."""
    run, data = a_run(1, 600, 2)
    watch = Watch(run, data.learners, 1e-3, (0, 1))
    found = alarms_of(watch, overheard(run, data, Broken(3, times(0.25), since=300)))
    first = {change: min((a.round for a in found if a.is_change is change), default=600) for change in (False, True)}
    assert {alarm.learner for alarm in found} == {BROKEN}
    assert 300 <= first[True] < first[False]


def test_two_different_messages_of_a_round_refute_a_learner() -> None:
    run, data = a_run(2, 5)
    watch = Watch(run, data.learners, 1e-3, (0, BROKEN))
    assert watch.report_equivocation(2, 3) == []  # is not watched
    (alarm,) = watch.report_equivocation(BROKEN, 3)
    assert (alarm.learner, alarm.round, alarm.test, alarm.log_e_value) == (BROKEN, 3, "equivocation", math.inf)
    assert watch.report_equivocation(BROKEN, 4) == []  # once is enough


# ---- what can be watched ---------------------------------------------------------------------------------------------


def test_only_the_records_of_those_who_are_watched_are_needed() -> None:
    run, data = a_run(4, 20)
    rounds = list(overheard(run, data, SeededNoise(0)))
    blank = data.with_learner(0, data.learners[1]).with_learner(2, data.learners[1])
    some, all_of_them = Watch(run, blank.learners, 1e-3, (1,)), Watch(run, data.learners, 1e-3, (0, 1, 2))
    alone = Watch(run, data.learners, 1e-3, (1,))
    assert alarms_of(some, iter(rounds)) == alarms_of(alone, iter(rounds)) == alarms_of(all_of_them, iter(rounds)) == []
    assert some.learners[0].log_e_value == alone.learners[0].log_e_value


def test_who_was_not_overheard_is_not_watched_from_there_on() -> None:
    run, data = a_run(4, 20)
    watch = Watch(run, data.learners, 1e-3, (0, 1, 2))
    for t, (messages,) in enumerate(overheard(run, data, SeededNoise(0))):
        watch.take(t, {i: m for i, m in messages.items() if (t, i) != (7, 2)})
    heard_by = [run.network.mixing(7).in_neighbour_weights(i) for i in range(3)]
    assert [w.is_replayable for w in watch.learners] == [i != 2 and 2 not in heard_by[i] for i in range(3)]
    assert watch.learners[2].rounds == 7


def test_rounds_come_in_order() -> None:
    run, data = a_run(2, 5)
    with pytest.raises(CaptureError, match="must be 0, got 1"):
        Watch(run, data.learners, 1e-3, (0,)).take(1, {})


def bytes_of(thing: Any) -> int:
    """In all arrays of a value and its parts."""
    if isinstance(thing, np.ndarray):
        return int(thing.nbytes)
    if isinstance(thing, dict):
        return sum(map(bytes_of, thing.values()))
    if isinstance(thing, (tuple, list)):
        return sum(map(bytes_of, thing))
    if not type(thing).__module__.startswith("sottovoce_core.auditing.online"):
        return 0  # the run, its data, what an algorithm remembers
    names = [*getattr(thing, "__dict__", ()), *getattr(type(thing), "__slots__", ())]
    return sum(bytes_of(getattr(thing, name)) for name in names)


def test_state_is_as_large_after_many_rounds_as_after_few() -> None:
    run, data = a_run(2, 3 * _BLOCKS[0])
    watch, sizes = Watch(run, data.learners, 1e-3, (0,)), []
    for t, (messages,) in enumerate(overheard(run, data, SeededNoise(0))):
        watch.take(t, messages)
        sizes.append(bytes_of(watch))
    assert sizes[0] > 10_000
    assert sizes[3] == sizes[-1]


# ---- from run to run -------------------------------------------------------------------------------------------------


def test_noise_of_the_run_before_is_known_again() -> None:
    """At once, and every learner is named; without the keys of that run there is no alarm, but with probability 0.001."""
    keys = KeyTable()
    assert list(alarms(20, Changed(1), keys=keys)) == []
    again = list(alarms(3, Changed(1), keys=keys))
    assert {(alarm.learner, alarm.round, alarm.test) for alarm in again if not alarm.is_change} == {
        (i, 0, "repeats") for i in range(5)
    }
    assert list(alarms(20, Changed(2), keys=keys)) == []
    assert list(alarms(20, Changed(1))) == []
