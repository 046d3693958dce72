"""E-processes: whoever looks after every round is misled no more often than alpha, and broken noise is found in few rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import pytest
from scipy import integrate, special, stats

from sottovoce.arrays import FloatArray
from sottovoce.auditing.conformance import residuals
from sottovoce.lab.watch.sequential import (
    Conformance,
    Detector,
    EpsilonBound,
    Guesses,
    Histogram,
    Lag,
    Repeats,
    Scale,
    e_bh,
    mean,
)
from sottovoce.noise import SeededNoise
from sottovoce.running.simulator import simulate
from sottovoce.running.transcript import Transcript
from tests.examples import made_up, small_run

ALARM = math.log(1e3)
"""At alpha = 0.001."""

Stream = Callable[[np.random.Generator, int], Iterator[FloatArray]]


class Process(Protocol):
    """A bet that goes on: the logarithm of its stake now, and what comes next."""

    @property
    def e(self) -> float: ...
    def add(self, values: FloatArray) -> None: ...


def rounds_to_alarm(process: Process, rounds: Iterator[FloatArray], most: int, alarm: float = ALARM) -> int:
    """The round, from 1, after which the alarm was given; one more than `most` if it was not."""
    for t, values in zip(range(1, most + 1), rounds, strict=False):
        process.add(values)
        if process.e >= alarm:
            return t
    return most + 1


# ---- the values ------------------------------------------------------------------------------------------------------


def test_e_values_are_those_of_the_formulas() -> None:
    """Against the products and integrals that the closed forms stand for."""
    values = np.random.default_rng(0).laplace(size=40)
    histogram, scale, repeats = Histogram(), Scale(), Repeats()
    for process in (histogram, scale, repeats):
        process.add(values[:20])
        process.add(values[20:])
    counts, product = np.zeros(16), 1.0
    for cell in (stats.laplace.cdf(values) * 16).astype(int):
        product *= 16 * (counts[cell] + 0.5) / (counts.sum() + 8.0)
        counts[cell] += 1
    total = np.abs(values).sum()
    mixture, _ = integrate.quad(
        lambda rate: stats.gamma.pdf(rate, 20, scale=1 / 20) * rate**40 * math.exp((1 - rate) * total), 0, 10
    )

    assert histogram.e == pytest.approx(math.log(product))
    assert scale.e == pytest.approx(math.log(mixture))
    assert repeats.e == pytest.approx(40 * math.log(0.99), rel=1e-6)
    repeats.add(np.append(np.zeros(1), np.full(19, np.nan)))
    assert repeats.e == pytest.approx(40 * math.log(0.99) + math.log(0.01 * 2**33), rel=1e-6)


def test_guesses_bet_as_the_formula_says() -> None:
    right = np.random.default_rng(1).integers(0, 4, 60) > 0
    p, stake, c = float(special.expit(0.4)), 1.0, 0
    for i, z in enumerate(right, 1):
        q = max(p, (c + 0.5) / i)
        stake *= q / p if z else (1 - q) / (1 - p)
        c += int(z)
    whole, parts = Guesses(0.4), Guesses(0.4)
    whole.add(right.astype(np.float64))
    for part in np.split(right.astype(np.float64), [0, 1, 13, 40]):
        parts.add(part)

    assert whole.e == pytest.approx(math.log(stake))
    assert parts.e == pytest.approx(whole.e)


@pytest.mark.parametrize("make", [Histogram, Lag, Repeats, Scale, Conformance])
def test_e_values_are_at_most_one_on_average(make: Callable[[], Process]) -> None:
    """Over 1,500 runs, five standard errors: failure probability below 1e-5. No bet: exactly 1."""
    generator = np.random.default_rng(2)
    e_values = []
    for _ in range(1500):
        process = make()
        assert process.e == pytest.approx(0.0, abs=1e-12)
        for _ in range(3):
            process.add(generator.laplace(size=4))
        e_values.append(math.exp(process.e))
    assert np.mean(e_values) <= 1.0 + 5.0 * np.std(e_values) / math.sqrt(len(e_values))


@pytest.mark.parametrize("make", [Histogram, Lag, Repeats, Scale, Conformance])
def test_what_is_not_a_number_counts_for_nothing(make: Callable[[], Process]) -> None:
    """Coordinates that never carry noise, and a round in which nobody was heard."""
    generator = np.random.default_rng(3)
    values = generator.laplace(size=(6, 5))
    sparse, dense = make(), make()
    for row in values:
        sparse.add(np.concatenate([row, [np.nan]]))
        dense.add(row)
    before = sparse.e
    sparse.add(np.full(6, np.nan))
    assert dense.e == pytest.approx(before)
    assert sparse.e == pytest.approx(before)


# ---- monitoring noise ------------------------------------------------------------------------------------------------


def correct(generator: np.random.Generator, dim: int) -> Iterator[FloatArray]:
    while True:
        yield generator.laplace(size=dim)


def half(generator: np.random.Generator, dim: int) -> Iterator[FloatArray]:
    return (values / 2 for values in correct(generator, dim))


def nine_tenths(generator: np.random.Generator, dim: int) -> Iterator[FloatArray]:
    return (0.9 * values for values in correct(generator, dim))


def normal(generator: np.random.Generator, dim: int) -> Iterator[FloatArray]:
    while True:
        yield generator.normal(size=dim) * math.sqrt(2.0)


def reused(generator: np.random.Generator, dim: int) -> Iterator[FloatArray]:
    for values in correct(generator, dim):
        yield values
        yield values


def omitted_in_round_20(generator: np.random.Generator, dim: int) -> Iterator[FloatArray]:
    for t, values in enumerate(correct(generator, dim), 1):
        yield np.zeros(dim) if t == 20 else values


def correlated(generator: np.random.Generator, dim: int) -> Iterator[FloatArray]:
    """Laplace numbers with normal scores that are autocorrelated by 0.5."""
    score = generator.normal(size=dim)
    while True:
        yield stats.laplace.ppf(stats.norm.cdf(score))
        score = 0.5 * score + math.sqrt(0.75) * generator.normal(size=dim)


@pytest.mark.parametrize(
    ("stream", "dim", "least", "most"),
    [
        (half, 100, 1, 3),
        (nine_tenths, 100, 8, 36),
        (normal, 100, 5, 20),
        (reused, 100, 2, 2),
        (omitted_in_round_20, 100, 20, 20),
        (correlated, 100, 2, 6),
        (half, 1, 30, 130),
        (reused, 1, 2, 2),
        (omitted_in_round_20, 1, 20, 20),
    ],
)
def test_median_rounds_to_alarm(stream: Stream, dim: int, least: int, most: int) -> None:
    """Of nine streams, within a factor of two of what is known: a median outside has probability below 1e-4."""
    alarms = [rounds_to_alarm(Conformance(), stream(np.random.default_rng(k), dim), 2 * most) for k in range(9)]
    assert least <= np.median(alarms) <= most


@pytest.mark.parametrize(("dim", "streams", "rounds"), [(1, 40, 80), (100, 15, 100)])
def test_false_alarms_are_as_rare_as_stated_however_often_one_looks(dim: int, streams: int, rounds: int) -> None:
    """At alpha = 0.05 two or one of the streams are expected to raise an alarm, at most."""
    alarms = [
        rounds_to_alarm(Conformance(), correct(np.random.default_rng(k), dim), rounds, math.log(20)) <= rounds
        for k in range(streams)
    ]
    assert stats.binom.sf(sum(alarms) - 1, streams, 0.05) > 1e-3


def test_residuals_of_a_run_are_what_is_monitored() -> None:
    """A correct learner raises no alarm (alpha = 0.001); a claim of twice the noise is refuted in few rounds."""
    run, louder = (small_run(rounds=50, n_features=10, algorithm={"sigma": sigma}) for sigma in (1.0, 2.0))
    data = made_up(run.spec, 10)
    said = [step.message["y"] for step in simulate(run, data, SeededNoise(0))]
    transcript, alarms = Transcript({"y": np.stack(said)}), []
    for claimed in (run, louder):
        (found,) = residuals(claimed, transcript, data, 0)
        alarms.append(rounds_to_alarm(Conformance(), iter(found.values[:, 0]), 50))
    assert alarms[0] == 51
    assert alarms[1] <= 25


# ---- guesses ---------------------------------------------------------------------------------------------------------


def guesses(seed: int, epsilon: float, count: int) -> FloatArray:
    right = np.random.default_rng(seed).random(count) < special.expit(epsilon)
    return right.astype(np.float64)


def test_guesses_at_half_scale_are_found_out() -> None:
    """Epsilon 2 where 1 is claimed, at alpha = 0.05 and 0.001: most of them within a factor of three of 46 and 118 guesses."""
    for alpha, least, most in ((0.05, 16, 130), (0.001, 60, 240)):
        alarms = [
            rounds_to_alarm(Guesses(1.0), iter(guesses(seed, 2.0, 600)[:, None]), 600, -math.log(alpha))
            for seed in range(15)
        ]
        assert least <= np.median(alarms) <= most


def test_the_bound_holds_at_all_times_and_comes_near() -> None:
    """300 streams at alpha = 0.05; more than 30 have probability below 1e-4. With a margin: what is reached grows."""
    broken, reached = 0, []
    for seed in range(300):
        bound, so_far = EpsilonBound(np.linspace(0.0, 3.0, 61)), []
        for part in np.split(guesses(seed, 1.0, 1000), [100, 300]):
            bound.add(part)
            so_far.append(bound.lower(0.05))
        broken += so_far[-1] > 1.0
        reached.append(so_far)
    medians = np.median(reached, axis=0)

    assert broken <= 30
    assert medians[0] < medians[1] < medians[2] < 1.0
    assert medians[2] > 0.6
    assert EpsilonBound().lower(0.05) == 0.0


def test_the_bound_is_where_guesses_are_refuted() -> None:
    """The bound keeps the highest stake: what was refuted once stays refuted."""
    right = np.concatenate([np.ones(30), np.zeros(30)])
    bound, single = EpsilonBound(np.array([0.5, 1.0, 1.5, 2.0, 2.5])), Guesses(1.0)
    bound.add(right)
    highest = []
    for value in right:
        single.add(np.array([value]))
        highest.append(single.e)

    assert max(highest) > math.log(20) > single.e
    assert bound.log_stakes[1] == pytest.approx(single.e)
    assert bound.lower(0.05) >= 1.0
    assert bound.lower(0.9 * math.exp(-max(highest))) < 1.0


# ---- many e-values ---------------------------------------------------------------------------------------------------


def test_the_mean_of_e_values() -> None:
    assert mean([math.log(3.0), math.log(1.0)]) == pytest.approx(math.log(2.0))
    assert mean([-5000.0, 800.0]) == pytest.approx(800.0 - math.log(2.0))


def test_the_detector_finds_what_breaks_in_the_middle() -> None:
    """Half the scale from round 300 on: within two rounds of it; and no alarm before (probability below 300/1e6)."""
    generator, detector = np.random.default_rng(5), Detector()
    alarm = None
    for t in range(310):
        single = Scale()
        single.add(generator.laplace(size=100) * (0.5 if t >= 300 else 1.0))
        detector.add(np.array([single.e]))
        if alarm is None and detector.e >= math.log(1e6):
            alarm = t
    assert alarm is not None
    assert 300 <= alarm <= 302


def test_the_detector_adds_up_and_seldom_alarms_falsely() -> None:
    """`R_t = (R_{t-1} + 1) e_t`. The mean time to `R >= 20` is at least 20: 200 runs, four standard errors."""
    detector = Detector()
    detector.add(np.log([2.0, 0.5, 3.0]))
    assert detector.e == pytest.approx(math.log(((2.0 + 1.0) * 0.5 + 1.0) * 3.0))

    generator, lengths = np.random.default_rng(6), []
    for _ in range(200):
        process, bets = Detector(), 1.0 + 0.5 * generator.choice([-1.0, 1.0], size=1000)
        lengths.append(rounds_to_alarm(process, iter(np.log(bets)[:, None]), 1000, math.log(20)))
    assert np.mean(lengths) >= 20.0 - 4.0 * np.std(lengths) / math.sqrt(200)


def test_e_bh_names_the_culprits() -> None:
    """Of n claims the k largest, for the largest k whose k-th e-value is at least `n / (k alpha)`."""
    assert e_bh(np.log([1.0, 60.0, 2.0, 45.0]).tolist(), 0.05) == (1, 3)
    assert e_bh(np.log([1.0, 60.0, 2.0, 35.0]).tolist(), 0.05) == ()
    assert e_bh(np.log([1.0, 90.0, 2.0, 35.0]).tolist(), 0.05) == (1,)
    assert e_bh(np.log([30.0, 30.0, 30.0, 30.0]).tolist(), 0.05) == (0, 1, 2, 3)
    assert e_bh([], 0.05) == ()
