"""E-processes: whoever looks after every guess is misled no more often than alpha; and many e-values at once."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from scipy import special

from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.online.bets import _Scale, _update_detector, mix_e_values
from sottovoce_core.auditing.online.canaries import EpsilonBound
from sottovoce_core.auditing.online.watch import _select_by_e_bh

ALARM = math.log(1e3)
"""At alpha = 0.001."""


def bets_against(epsilon: float) -> EpsilonBound:
    """A bet against one claim."""
    return EpsilonBound(np.array([epsilon]))


def e(bets: EpsilonBound) -> float:
    """Logarithm of the e-value of the only claim."""
    return float(bets.log_e_values[0])


def rounds_to_alarm(process: EpsilonBound, rounds: Iterator[FloatArray], most: int, alarm: float = ALARM) -> int:
    """The round, from 1, after which the alarm was given; one more than `most` if it was not."""
    for t, values in zip(range(1, most + 1), rounds, strict=False):
        process.add(values)
        if e(process) >= alarm:
            return t
    return most + 1


# ---- the values ------------------------------------------------------------------------------------------------------


def test_guesses_bet_as_the_formula_says() -> None:
    right = np.random.default_rng(1).integers(0, 4, 60) > 0
    p, stake, c = float(special.expit(0.4)), 1.0, 0
    for i, z in enumerate(right, 1):
        q = max(p, (c + 0.5) / i)
        stake *= q / p if z else (1 - q) / (1 - p)
        c += int(z)
    whole, parts = bets_against(0.4), bets_against(0.4)
    whole.add(right.astype(np.float64))
    for part in np.split(right.astype(np.float64), [0, 1, 13, 40]):
        parts.add(part)

    assert e(whole) == pytest.approx(math.log(stake))
    assert e(parts) == pytest.approx(e(whole))


# ---- guesses ---------------------------------------------------------------------------------------------------------


def guesses(seed: int, epsilon: float, count: int) -> FloatArray:
    right = np.random.default_rng(seed).random(count) < special.expit(epsilon)
    return right.astype(np.float64)


def test_guesses_at_half_scale_are_found_out() -> None:
    """Epsilon 2 where 1 is claimed, at alpha = 0.05 and 0.001: most of them within a factor of three of 46 and 118 guesses."""
    for alpha, least, most in ((0.05, 16, 130), (0.001, 60, 240)):
        alarms = [
            rounds_to_alarm(bets_against(1.0), iter(guesses(seed, 2.0, 600)[:, None]), 600, -math.log(alpha))
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
            so_far.append(bound.compute_lower_bound(0.05))
        broken += so_far[-1] > 1.0
        reached.append(so_far)
    medians = np.median(reached, axis=0)

    assert broken <= 30
    assert medians[0] < medians[1] < medians[2] < 1.0
    assert medians[2] > 0.6
    assert EpsilonBound().compute_lower_bound(0.05) == 0.0


def test_the_bound_is_where_guesses_are_refuted() -> None:
    """The bound keeps the highest stake: what was refuted once stays refuted."""
    right = np.concatenate([np.ones(30), np.zeros(30)])
    bound, single = EpsilonBound(np.array([0.5, 1.0, 1.5, 2.0, 2.5])), bets_against(1.0)
    bound.add(right)
    highest = []
    for value in right:
        single.add(np.array([value]))
        highest.append(e(single))

    assert max(highest) > math.log(20) > e(single)
    assert bound.log_e_values[1] == pytest.approx(e(single))
    assert bound.compute_lower_bound(0.05) >= 1.0
    assert bound.compute_lower_bound(0.9 * math.exp(-max(highest))) < 1.0


# ---- many e-values ---------------------------------------------------------------------------------------------------


def test_the_mixture_of_e_values() -> None:
    assert mix_e_values(np.log([3.0, 1.0])) == pytest.approx(math.log(2.0))
    assert mix_e_values(np.array([-5000.0, 800.0])) == pytest.approx(800.0 - math.log(2.0))
    rows = np.log([[3.0, 1.0], [4.0, 8.0]])
    assert mix_e_values(rows, np.array([0.25, 0.75])) == pytest.approx(np.log([1.5, 7.0]))
    assert mix_e_values(np.array([math.inf, 0.0])) == math.inf
    assert mix_e_values(np.array([-math.inf, -math.inf])) == -math.inf


def test_the_detector_finds_what_breaks_in_the_middle() -> None:
    """Half the scale from round 300 on: within two rounds of it; and no alarm before (probability below 300/1e6)."""
    generator, detector, bet, alarm = np.random.default_rng(5), np.array(-np.inf), _Scale(), None
    for t in range(310):
        sizes = np.abs(generator.laplace(size=100)) * (0.5 if t >= 300 else 1.0)
        detector = _update_detector(detector, bet.compute_log_e_value(np.array([sizes.sum(), 100.0])))
        if alarm is None and detector >= math.log(1e6):
            alarm = t
    assert alarm is not None
    assert 300 <= alarm <= 302


def test_the_detector_adds_up_and_seldom_alarms_falsely() -> None:
    """`R_t = (R_{t-1} + 1) e_t`. The mean time to `R >= 20` is at least 20: 200 runs, four standard errors."""
    detector = np.array(-np.inf)
    for e_value in np.log([2.0, 0.5, 3.0]):
        detector = _update_detector(detector, e_value)
    assert detector == pytest.approx(math.log(((2.0 + 1.0) * 0.5 + 1.0) * 3.0))

    generator, side_by_side = np.random.default_rng(6), np.full(200, -np.inf)
    lengths = np.full(200, 1001)
    for t in range(1, 1001):
        side_by_side = _update_detector(side_by_side, np.log1p(0.5 * generator.choice([-1.0, 1.0], size=200)))
        lengths[(side_by_side >= math.log(20)) & (lengths > 1000)] = t
    assert np.mean(lengths) >= 20.0 - 4.0 * np.std(lengths) / math.sqrt(200)


def test_e_bh_names_the_culprits() -> None:
    """Of n claims the k largest, for the largest k whose k-th e-value is at least `n / (k alpha)`."""
    assert _select_by_e_bh(np.log([1.0, 60.0, 2.0, 45.0]).tolist(), 0.05) == (1, 3)
    assert _select_by_e_bh(np.log([1.0, 60.0, 2.0, 35.0]).tolist(), 0.05) == ()
    assert _select_by_e_bh(np.log([1.0, 90.0, 2.0, 35.0]).tolist(), 0.05) == (1,)
    assert _select_by_e_bh(np.log([30.0, 30.0, 30.0, 30.0]).tolist(), 0.05) == (0, 1, 2, 3)
    assert _select_by_e_bh([], 0.05) == ()
