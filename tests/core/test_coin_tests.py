"""Ranks of features against coins: what tells the world beside the messages is found, and what follows from these is not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.blackbox import attack
from sottovoce_core.auditing.bounds import BLACK_BOX_ALLOCATION, AlphaAllocation
from sottovoce_core.auditing.coin_tests import PairRuns, run_channel_tests, run_classifier_tests

Generator = np.random.Generator


def runs(generator: Generator, count: int, epsilon: float = 0.5) -> PairRuns:
    """Messages that tell the world with losses up to epsilon, and a view of nothing else than the losses."""
    losses = generator.choice([-epsilon, epsilon], count)
    coins = (generator.random(count) < 1.0 / (1.0 + np.exp(-losses))).astype(np.int64)
    return PairRuns(losses, coins, {"values": losses[:, None]})


def p_value(heard: PairRuns, view: FloatArray, name: str = "sizes") -> float:
    (test,) = run_channel_tests([PairRuns(heard.losses, heard.coins, {name: view})])
    return test.p_value


def test_what_the_messages_say_is_no_side_channel() -> None:
    """A feature that is the loss itself tells the world as far as it should. Failure probability below 1e-4."""
    heard = runs(np.random.default_rng(0), 20_000)
    assert p_value(heard, heard.losses[:, None]) > 1e-4
    unknown = PairRuns(np.zeros(20_000), heard.coins, heard.views)
    assert p_value(unknown, heard.losses[:, None]) < 1e-100  # it does, beyond a loss of zero


def test_a_length_that_is_the_world_is_found_among_a_thousand_features() -> None:
    """24 runs of each world, whatever epsilon is claimed: at most `2^(1-n)` times the instruments, before losses."""
    generator = np.random.default_rng(1)
    heard = runs(generator, 48)
    view = np.column_stack([generator.normal(size=(48, 1000)), 100.0 + heard.coins])
    assert p_value(heard, view) < 2e-6


def test_a_spread_that_follows_the_world_is_found_by_the_squared_rank() -> None:
    """Equal medians, twice the spread. Failure probability below 1e-4."""
    generator = np.random.default_rng(2)
    heard = runs(generator, 2000)
    delays = generator.normal(size=2000) * np.where(heard.coins == 1, 2.0, 1.0)
    assert p_value(heard, delays[:, None]) < 1e-4


def test_what_is_the_same_in_all_runs_counts_for_nothing() -> None:
    heard = runs(np.random.default_rng(3), 100)
    blank = np.ones((100, 50))
    assert run_channel_tests([PairRuns(heard.losses, heard.coins, {"sizes": blank})]) == ()
    leak = heard.coins[:, None].astype(float)
    assert p_value(heard, np.hstack([blank, leak])) == p_value(heard, leak)


def test_features_of_every_pair_of_worlds_are_paid_for() -> None:
    generator = np.random.default_rng(4)
    loud, mirror = runs(generator, 60), runs(generator, 60)
    loud = PairRuns(loud.losses, loud.coins, {"sizes": loud.coins[:, None].astype(float)})
    mirror = PairRuns(mirror.losses, mirror.coins, {"sizes": generator.normal(size=(60, 3))})
    (alone,), (both,) = run_channel_tests([loud]), run_channel_tests([mirror, loud])
    assert both.p_value == pytest.approx(4 * alone.p_value) and both.p_value < 1e-6
    assert both.family == "black box" and both.is_primary
    assert not run_channel_tests([runs(generator, 60)])[0].is_primary  # numbers are for the second half of the level


@pytest.mark.statistics
@pytest.mark.parametrize("epsilon", [0.0, 1.0, 6.0])
def test_correct_runs_raise_no_more_alarms_than_the_level(epsilon: float) -> None:
    """1,000 audits of 60 runs, features skewed, tied and dependent on the loss: at most 5 % below .05.

    Failure probability below 1e-6 each (five standard errors).
    """
    generator, below = np.random.default_rng(5), 0
    for _ in range(1000):
        heard = runs(generator, 60, epsilon)
        rough = generator.standard_cauchy((60, 3))
        view = np.column_stack([rough, heard.losses + rough[:, 0], np.round(rough[:, 1])])
        below += p_value(heard, view) < 0.05
    assert below <= 50 + 5 * math.sqrt(1000 * 0.05 * 0.95)


def test_infinite_losses_leave_nothing_to_tell() -> None:
    losses = np.array([np.inf, -np.inf, np.inf, -np.inf])
    heard = PairRuns(losses, np.array([1, 0, 1, 0]), {})
    assert p_value(heard, np.array([[1.0], [0.0], [1.0], [0.0]])) == 1.0


# ---- what is learned of several features -----------------------------------------------------------------------------


def learned(heard: PairRuns) -> dict[str, float]:
    """p-values, by classifier."""
    attacks = attack(
        heard.views, 1 - heard.coins, AlphaAllocation(0.05, BLACK_BOX_ALLOCATION), 20.0, np.random.SeedSequence(0)
    )
    return {test.name: test.p_value for test in run_classifier_tests(heard, attacks)}


def test_what_only_two_features_tell_together_is_found_whatever_is_claimed() -> None:
    """Their product is the world; each by itself, and its square, says nothing. The claim, 20, is beyond any bound."""
    generator = np.random.default_rng(6)
    heard = runs(generator, 600)
    one = generator.normal(size=600)
    view = np.column_stack([one, np.abs(generator.normal(size=600)) * np.sign(one) * (2.0 * heard.coins - 1.0)])
    alone, together = p_value(heard, view), learned(PairRuns(heard.losses, heard.coins, {"sizes": view}))
    assert alone > 1e-3 and together["gradient boosting"] < 1e-12


def test_what_the_messages_say_may_be_learned() -> None:
    """Classifiers that learn the loss say no more than it does: 8 audits, failure probability below 8 * 2 * 1e-5."""
    audits = [runs(np.random.default_rng(seed), 200, 2.0) for seed in range(8)]
    for heard in audits:
        assert min(learned(heard).values()) > 1e-5
    known = PairRuns(np.zeros(200), audits[0].coins, audits[0].views)  # of messages that should say nothing
    assert min(learned(known).values()) < 1e-6


def test_where_nothing_varies_nothing_is_learned() -> None:
    heard = runs(np.random.default_rng(7), 60)
    assert learned(PairRuns(heard.losses, heard.coins, {"sizes": np.ones((60, 2))})) == {}
