"""Lower bounds on epsilon: anchors, validity over many repetitions, and how close they come."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.bounds import (
    MAX_RUNS,
    Bound,
    choose_threshold,
    compute_confidence_interval,
    compute_epsilon_lower_bound,
    compute_max_provable_epsilon,
    compute_min_runs,
    compute_needed_runs,
)
from sottovoce_core.auditing.coin_tests import run_calibration_tests
from sottovoce_core.auditing.likelihood import RunLosses, guess


def laplace_runs(epsilon: float, runs: int, generator: np.random.Generator, scale: float = 1.0) -> RunLosses:
    """A number that is 0 in one world and epsilon in the other, and said with Laplace noise of scale 1 (or so it claims)."""
    worlds = generator.integers(0, 2, 2 * runs)
    said = epsilon * worlds + generator.laplace(scale=scale, size=2 * runs)
    losses = np.abs(said - epsilon) - np.abs(said)
    return ratios_of(worlds, losses)


def ratios_of(worlds: np.ndarray, losses: FloatArray) -> RunLosses:
    none = np.full(len(losses), -1)
    return RunLosses(worlds, losses, np.abs(losses), none, np.abs(losses), np.zeros(1), np.zeros(1), losses[:, None])


def guessed_right(runs: RunLosses) -> float:
    """The p-value of the number of right guesses."""
    return next(test.p_value for test in run_calibration_tests([runs]) if test.name == "right guesses")


# ---- anchors ---------------------------------------------------------------------------------------------------------


def test_anchors() -> None:
    assert compute_needed_runs(1.0) == pytest.approx(271 * (1 + math.e), rel=2e-3)
    assert compute_needed_runs(2.0) == pytest.approx(271 * (1 + math.e**2) / 4, rel=2e-3)
    assert compute_max_provable_epsilon(1000, 0.05) == pytest.approx(math.log(2000 / 3), abs=2e-3)
    assert (
        compute_epsilon_lower_bound(0, 0, 0.05)
        == compute_epsilon_lower_bound(0, 10, 0.05)
        == compute_epsilon_lower_bound(5, 10, 0.05)
        == 0
    )


def test_the_bound_is_where_so_many_right_guesses_have_probability_alpha() -> None:
    found = compute_epsilon_lower_bound(80, 100, 0.05)
    assert binom.sf(79, 100, 1 / (1 + math.exp(-found))) == pytest.approx(0.05)


def test_more_runs_decide_only_what_is_above_the_claim() -> None:
    weak = Bound("likelihood", "somebody", "", 60, 100, 0.2, 0.01)
    factor = weak.find_deciding_factor()
    assert factor is not None and compute_epsilon_lower_bound(60 * factor, 100 * factor, 0.01) > 0.2 >= weak.value
    assert replace(weak, correct_guesses=55, claim=0.3).find_deciding_factor() is None


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0])
def test_so_many_runs_and_no_fewer_show_an_epsilon(epsilon: float) -> None:
    runs = compute_min_runs(epsilon, 0.01)
    assert compute_max_provable_epsilon(int(runs), 0.01) > epsilon >= compute_max_provable_epsilon(int(runs) - 1, 0.01)


@pytest.mark.parametrize("epsilon", [25.0, 95.6, 710.0, 1e6, math.inf])
def test_what_nobody_makes_is_no_number(epsilon: float) -> None:
    assert compute_min_runs(epsilon, 0.01) == math.inf


def test_more_epsilon_takes_more_runs_until_nobody_makes_them() -> None:
    shown = [compute_min_runs(float(epsilon), 0.01) for epsilon in np.linspace(0.0, 40.0, 200)]
    assert shown == sorted(shown) and max(each for each in shown if math.isfinite(each)) <= MAX_RUNS


# ---- validity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 3.0])
def test_the_bound_is_above_epsilon_no_more_often_than_alpha(epsilon: float) -> None:
    """2000 audits of guesses as good as epsilon allows. Failure probability below 1e-5 (five standard errors)."""
    chance, audits, guesses = 1 / (1 + math.exp(-epsilon)), 2000, 300
    right = np.random.default_rng(1).binomial(guesses, chance, audits)
    known = {count: compute_epsilon_lower_bound(count, guesses, 0.05) for count in set(right.tolist())}
    above = sum(known[count] > epsilon for count in right.tolist())
    assert 0 < above <= audits * 0.05 + 5 * math.sqrt(audits * 0.05 * 0.95)


def test_audits_of_a_correct_mechanism_raise_no_more_alarms_than_alpha() -> None:
    """The whole likelihood ratio at alpha .05 for the bound and for the test, 400 times. Failure probability below 1e-5 each."""
    generator = np.random.default_rng(2)
    rehearsed = laplace_runs(1.0, 500, generator)
    audits = [laplace_runs(1.0, 200, generator) for _ in range(400)]
    most = 400 * 0.05 + 5 * math.sqrt(400 * 0.05 * 0.95)
    assert sum(guess(each, rehearsed, 1.0, 0.05).is_above_claim for each in audits) <= most
    assert 0 < sum(guessed_right(each) < 0.05 for each in audits) <= most


def test_no_difference_no_violation() -> None:
    """Losses that say nothing of the world. The seed is fixed; a tenth of others would fail."""
    generator = np.random.default_rng(3)
    runs = ratios_of(generator.integers(0, 2, 2000), generator.normal(size=2000) * 1e-3)
    found = guess(runs, laplace_runs(1.0, 500, generator), 1.0, 0.1)
    assert found.value == 0.0 and guessed_right(runs) > 0.05
    mute = ratios_of(np.arange(200) % 2, np.zeros(200))
    silent = guess(mute, runs, 1.0, 0.1)
    assert (silent.guesses, silent.value, guessed_right(mute)) == (0, 0.0, 1.0)


# ---- power -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("runs", "audits", "least"), [(1_000, 300, 0.89), (10_000, 100, 0.96)])
def test_a_laplace_number_of_epsilon_one_is_audited_tightly(runs: int, audits: int, least: float) -> None:
    """The mean bound at 95 % is .900 (1000 runs of each world) and .967 (10,000), with standard errors .0034 and .0018.

    Failure probability below .002 each.
    """
    generator = np.random.default_rng(0)
    least_strength = choose_threshold(np.abs(laplace_runs(1.0, 5000, generator).total), 2 * runs, 0.05)
    found = []
    for _ in range(audits):
        audited = laplace_runs(1.0, runs, generator)
        guessed = np.abs(audited.total) >= least_strength
        right = guessed & ((audited.total < 0) == (audited.worlds == 1))
        found.append(compute_epsilon_lower_bound(int(right.sum()), int(guessed.sum()), 0.05))
    assert least <= np.mean(found) <= 1.0


def test_half_the_noise_gives_too_many_right_guesses() -> None:
    """Twice the epsilon: found with 300 runs of each world. Failure probability below 1e-4 (measured power above .9999)."""
    generator = np.random.default_rng(4)
    runs = laplace_runs(1.0, 300, generator, scale=0.5)
    assert guessed_right(runs) < 1e-3 and guess(runs, laplace_runs(1.0, 500, generator), 1.0, 0.1).value > 1.0


def test_the_threshold_is_the_strength_that_pays() -> None:
    """Few strong hints and many weak ones: with 1000 runs only the strong ones are worth a guess."""
    strengths = np.concatenate([np.full(100, 4.0), np.full(900, 0.1)])
    assert choose_threshold(strengths, 1000, 0.05) == pytest.approx(4.0)
    assert choose_threshold(np.full(100, 0.5), 1000, 0.05) == pytest.approx(0.5)


@pytest.mark.statistics
@pytest.mark.parametrize("delta", [0.001, 0.05])
def test_a_bound_at_a_delta_is_above_epsilon_as_rarely_as_it_says(delta: float) -> None:
    """A mechanism that tells all with probability delta, and epsilon 1 else; 20,000 audits at 95 %.

    By construction at most 5 % are above it; more than 5.7 % have a chance below 1e-5.
    """
    generator = np.random.default_rng(0)
    tested, audits = 200, 20_000
    free = generator.binomial(tested, delta, audits)
    right = free + generator.binomial(tested - free, 1.0 / (1.0 + math.exp(-1.0)))
    known = {k: compute_epsilon_lower_bound(k, tested, 0.05, delta, tested) for k in set(right.tolist())}
    above = np.mean([known[k] > 1.0 for k in right.tolist()])

    assert above < 0.057
    assert compute_epsilon_lower_bound(150, tested, 0.05, delta, tested) < compute_epsilon_lower_bound(
        150, tested, 0.05
    )
    assert compute_epsilon_lower_bound(150, tested, 0.05, 1e-12, tested) == pytest.approx(
        compute_epsilon_lower_bound(150, tested, 0.05)
    )


def test_the_runs_needed_at_a_delta_are_those_that_suffice() -> None:
    runs = int(compute_min_runs(2.0, 0.025, 0.4, 1e-3))
    enough, few = (int(0.8 * each) for each in (runs, runs - 1))

    assert compute_epsilon_lower_bound(enough, enough, 0.025, 1e-3, enough) > 2.0
    assert compute_epsilon_lower_bound(few, few, 0.025, 1e-3, few) <= 2.0
    assert compute_min_runs(60.0, 0.025, 0.4, 1e-3) == math.inf


def test_intervals_are_exact() -> None:
    """By hand: none of 20 has probability 2.5 % at `1 - 0.025^(1/20)`."""
    np.testing.assert_allclose(compute_confidence_interval(0, 20), (0.0, 1.0 - 0.025 ** (1 / 20)))
    np.testing.assert_allclose(compute_confidence_interval(20, 20), (0.025 ** (1 / 20), 1.0))
