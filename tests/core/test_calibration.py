"""Calibration: coins against what the losses say of them. Both sides, whatever the losses, at any number of runs."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from scipy.stats import binom

from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.auditing.audit import audit_simulated
from sottovoce_core.auditing.coin_tests import _compute_coin_test, run_calibration_tests
from sottovoce_core.auditing.likelihood import RunLosses, compute_run_losses
from sottovoce_core.auditing.plan import plan_audit
from sottovoce_core.auditing.verdict import decide
from sottovoce_core.auditing.worlds import plan_chunks, simulate_runs
from sottovoce_core.noise import NoiseSource, SeededNoise
from tests.claims import SETUPS, Times
from tests.examples import made_up


def ratios_of(losses: FloatArray, coins: IntArray, stretches: FloatArray | None = None) -> RunLosses:
    size, none, blank = np.abs(losses), np.full(len(losses), -1), np.zeros(1)
    parts = np.nan_to_num(losses[:, None], posinf=0.0, neginf=0.0) if stretches is None else stretches
    return RunLosses(1 - coins, losses, size, none, size, blank, blank, parts)


def drawn(losses: FloatArray, generator: np.random.Generator, truth: float = 1.0) -> IntArray:
    """Coins for which the true loss is `truth` times the one that is told."""
    return (generator.random(len(losses)) < 1.0 / (1.0 + np.exp(np.clip(-truth * losses, -700.0, 700.0)))).astype(
        np.int64
    )


def p_values(losses: FloatArray, coins: IntArray, stretches: FloatArray | None = None) -> dict[str, float]:
    return {test.name: test.p_value for test in run_calibration_tests([ratios_of(losses, coins, stretches)])}


# ---- anchors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("right", [0, 3, 550, 1240, 1999, 2000])
def test_the_bound_is_chernoffs_and_above_the_binomial_tail(right: int) -> None:
    """Of 2,000 coins with chance 0.62: `2 exp(-n KL(right/n || 0.62))`, on both sides."""
    n, q = 2000, 0.62
    losses = np.full(n, math.log(q / (1 - q)))
    statistic, p = _compute_coin_test(losses, (np.arange(n) < right).astype(np.int64), np.ones(n))
    share = right / n
    rate = sum(a * math.log(a / b) for a, b in ((share, q), (1 - share, 1 - q)) if a > 0)
    assert statistic == pytest.approx(right - n * q)
    assert p == pytest.approx(min(1.0, 2 * math.exp(-n * rate)), rel=1e-4, abs=1e-300)
    assert p >= min(binom.cdf(right, n, q), binom.sf(right - 1, n, q))


def test_550_right_where_1239_were_expected_is_no_chance() -> None:
    """The one-sided test of before saw nothing here."""
    n = 2000
    losses = np.full(n, math.log(1239.8 / (n - 1239.8)))
    assert p_values(losses, (np.arange(n) < 550).astype(np.int64))["right guesses"] < 1e-100


def test_small_cases_hold_exactly() -> None:
    """All coins of six runs with unequal losses: P(p <= level) <= level for every level, by enumeration."""
    losses = np.array([-2.0, -0.7, 0.0, 0.3, 1.1, 4.0])
    chances = 1.0 / (1.0 + np.exp(-losses))
    for y in (np.sign(losses), losses, np.array([1.0, -3.0, 2.0, 0.0, 5.0, 0.1])):
        outcomes = []
        for coins in product((0, 1), repeat=6):
            coin = np.array(coins)
            mass = float(np.prod(np.where(coin == 1, chances, 1 - chances)))
            outcomes.append((_compute_coin_test(losses, coin, y)[1], mass))
        outcomes.sort()
        below = np.cumsum([mass for _, mass in outcomes])
        assert all(p >= mass - 1e-12 for (p, _), mass in zip(outcomes, below, strict=True) if p < 1.0)


def test_nothing_said_is_nothing_wrong() -> None:
    assert set(p_values(np.zeros(50), np.arange(50) % 2).values()) <= {1.0}
    assert _compute_coin_test(np.ones(0), np.ones(0, dtype=np.int64), np.ones(0)) == (0.0, 1.0)


# ---- losses that are infinite ----------------------------------------------------------------------------------------


def test_what_one_world_alone_could_say_is_certain() -> None:
    losses = np.array([np.inf, -np.inf, 0.5, -0.5])
    right, wrong = np.array([1, 0, 1, 1]), np.array([1, 1, 1, 1])
    assert min(p_values(losses, right).values()) > 0.05
    found = p_values(losses, wrong)
    assert found["surest wrong guess"] == 0.0
    assert all(math.isfinite(p) for p in found.values())
    (test,) = (each for each in run_calibration_tests([ratios_of(losses, wrong)]) if each.name == "surest wrong guess")
    assert test.statistic == math.inf


def test_huge_losses_do_no_harm() -> None:
    losses = np.array([1e6, -1e6, 1e-300, 800.0, -0.1])
    assert min(p_values(losses, np.array([1, 0, 1, 1, 0])).values()) > 0.05
    assert p_values(losses, np.array([0, 0, 1, 1, 0]))["surest wrong guess"] < 1e-100


# ---- validity --------------------------------------------------------------------------------------------------------


@pytest.mark.statistics
def test_correct_losses_raise_no_more_alarms_than_their_levels() -> None:
    """1,000 audits of 60 runs, with losses of heavy tails: no test rejects more often than at its level of 5 %.

    Failure probability below 1e-6 each (five standard errors), and Chernoff's bound is well below its level.
    """
    generator, below = np.random.default_rng(1), dict[str, int]()
    for _ in range(1000):
        losses = generator.standard_cauchy((60, 3))
        total = losses.sum(axis=1)
        for name, p in p_values(total, drawn(total, generator), losses).items():
            below[name] = below.get(name, 0) + (p < 0.05)
    assert len(below) == 7 and max(below.values()) <= 50 + 5 * math.sqrt(1000 * 0.05 * 0.95)


# ---- power -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("truth", "runs"), [(2.2, 400), (0.1, 600), (0.0, 600), (-1.0, 100)])
def test_a_loss_that_is_not_the_loss_is_found(truth: float, runs: int) -> None:
    """Told twice too small, ten times too large, nothing at all, or the other way round. Epsilon is one.

    Failure probability below 1e-3 each (200 other seeds: p below 1e-3 in all).
    """
    generator = np.random.default_rng(2)
    losses = generator.uniform(-1.0, 1.0, 2 * runs)
    assert p_values(losses, drawn(losses, generator, truth))["slope"] < 1e-3


def test_a_round_that_lies_is_found_though_the_whole_does_not() -> None:
    """Two rounds whose losses cancel in the total. Failure probability below 1e-6."""
    generator = np.random.default_rng(3)
    first = generator.uniform(-1.0, 1.0, 2000)
    coins = drawn(first, generator)
    found = p_values(np.zeros(2000), coins, np.stack([first, -first], axis=1))
    assert found["losses of rounds"] < 1e-6 and found["right guesses"] == 1.0


def test_wrong_at_one_strength_only_is_found() -> None:
    """Strong hints are right too often, middling ones too seldom: the sum is right. Failure probability below 1e-6."""
    generator = np.random.default_rng(4)
    losses = generator.uniform(0.0, 3.0, 4000)
    chances = 1.0 / (1.0 + np.exp(-losses))
    strong, middling = losses > 2.4, (losses > 1.2) & (losses < 1.8)
    chances[strong], chances[middling] = 1.0, chances[middling] - (1.0 - chances[strong]).sum() / middling.sum()
    found = p_values(losses, (generator.random(4000) < chances).astype(np.int64))
    assert found["guesses by strength"] < 1e-3 < found["right guesses"]


# ---- in an audit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SETUPS))
def test_the_losses_of_every_algorithm_are_calibrated(name: str) -> None:
    """400 runs of two worlds: no test below 1e-4. Failure probability below 1e-3 each (seven tests)."""
    setup = SETUPS[name]
    run = setup.build()
    data = made_up(run.spec, setup.n_features)
    if run.algorithm.accountant(0).has_shared_records:
        data = replace(data, learners=data.learners[:1] * run.spec.n_learners)
    plan = plan_audit(run, data, 0, runs=200, seed=5)
    parts = (
        simulate_runs(run, data, plan.worlds, share, SeededNoise)
        for share in plan_chunks(200, 200, plan.seeds.audited_runs)
    )
    losses = RunLosses.concatenate([compute_run_losses(run, plan.worlds, part, plan.claim) for part in parts])
    found = run_calibration_tests([losses])
    assert all(test.p_value > 1e-4 for test in found), [(test.name, test.p_value) for test in found]


def test_an_audit_judges_them_at_their_level() -> None:
    """Half the noise, told as the whole: found by calibration alone. Failure probability below 1e-6."""
    setup = SETUPS["ldp-dol"]
    run = setup.build()
    plan = plan_audit(run, made_up(run.spec, setup.n_features), 1, runs=200, seed=1)
    correct, broken = (audit_simulated(plan, noise=noise).findings for noise in (SeededNoise, halved))
    for found in (correct, broken):
        tests = [test for test in found.tests if test.part == "calibration"]
        assert sum(test.level for test in tests) == pytest.approx(
            plan.alpha_allocation.compute_level("likelihood", "calibration")
        )
    alone = replace(broken, tests=tuple(test for test in broken.tests if test.part == "calibration"), bounds=())
    assert decide(replace(alone, excess=None, round_bounds=None)).kind == "refuted"


def halved(seed: np.random.SeedSequence) -> NoiseSource:
    return Times(SeededNoise(seed), 0.5)
