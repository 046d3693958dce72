"""Calibration: are coins what the losses say of them, neither more nor less often?

Every run lives in a world that a fair coin chose. Given all that was heard, the coin is 1 (the first world) with probability
`q = 1 / (1 + e^-L)`, where L is the exact loss of the transcript, if densities are as claimed and nothing else tells the
world. So for any instrument Y, a function of what was heard, `sum Y (coin - q)` has mean zero, and a generating function
that is known exactly. Chernoff's bound on it needs no law of L, and holds for every number of runs:

    p = 2 min_theta exp(sum log(1 - q + q e^{theta Y}) - theta sum Y coin)

Too few right guesses refute a claim as well as too many: less is told than is claimed where the noise is other noise, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.auditing.levels import Test
from sottovoce.auditing.likelihood import Ratios

_BINS = 5
"""Of right guesses by the strength of the hint."""

_STEPS = 30
"""Of Newton's method at most: any theta gives a valid bound, the best one the smallest."""


def calibration(pairs: Iterable[Ratios], where: str = "") -> tuple[Test, ...]:
    """Hold the coins of all runs against their losses.

    Args:
        pairs: the exact losses of the runs, of every pair of worlds.
        where: the place that the tests name.
    """
    losses = list(pairs)
    coins = np.concatenate([1 - each.worlds for each in losses])
    total = np.concatenate([each.total for each in losses])
    stretches = np.concatenate([each.stretches for each in losses])
    sign, finite = np.sign(total), np.nan_to_num(total, posinf=0.0, neginf=0.0)
    of_round, rounds = _worst(total, coins, stretches)
    of_bin, bins = _worst(total, coins, _by_strength(total))
    found = [
        ("right guesses", "the sign of the loss is right as often as the loss says", tilted(total, coins, sign), True),
        ("slope", "stronger hints are right more often, as the loss says", tilted(total, coins, finite), True),
        (
            "surest wrong guess",
            "no guess is wrong that is as good as certain",
            _surest_wrong(total, coins),
            True,
        ),
        ("coins", "both worlds come as often as the losses say", tilted(total, coins, np.ones(len(total))), False),
        (
            "slope of weak hints",
            "weak hints are right as often as the loss says",
            tilted(total, coins, np.clip(total, -1.0, 1.0)),
            False,
        ),
        ("losses of rounds", "the loss of every round says of the coin what it should", (of_round, rounds), False),
        ("guesses by strength", "guesses of every strength are right as often as it says", (of_bin, bins), False),
    ]
    return tuple(
        Test(name, what, statistic, p, where, primary=primary) for name, what, (statistic, p), primary in found
    )


def tilted(losses: FloatArray, coins: IntArray, instrument: FloatArray) -> tuple[float, float]:
    """`sum Y (coin - q)`, and how likely a sum as far from zero is, at most; two-sided.

    Runs with an infinite loss have nothing random, and do not count.

    Args:
        losses: `(runs,)` `log p(heard | first world) - log p(heard | second world)`; zero: it says nothing.
        coins: `(runs,)` 1 in the first world, 0 in the second.
        instrument: `(runs,)` any finite function of what was heard.
    """
    used = np.isfinite(losses) & (instrument != 0.0)
    if not used.any():
        return 0.0, 1.0
    weights = instrument[used]
    size = float(np.abs(weights).max())
    loss, y, coin = losses[used], weights / size, coins[used]
    excess = float((y * (coin - _chance(loss))).sum())
    return size * excess, min(1.0, 2.0 * math.exp(_lowest(loss, y, float((y * coin).sum()))))


def _surest_wrong(losses: FloatArray, coins: IntArray) -> tuple[float, float]:
    """The strongest hint that was wrong, and how likely one as strong is among all runs, at most.

    Infinite: only one world could have said it, and the run lived in the other one.
    """
    wrong = (losses != 0.0) & ((losses > 0) != (coins == 1))
    if not wrong.any():
        return 0.0, 1.0
    strengths = np.abs(losses)
    surest = float(strengths[wrong].max())
    return surest, min(1.0, float(_chance(-strengths[strengths >= surest]).sum()))


def _lowest(losses: FloatArray, y: FloatArray, reached: float) -> float:
    """The least value of the convex `sum log(1 - q + q e^{theta y}) - theta reached`, or a little more."""
    quiet = np.logaddexp(0.0, losses)

    def exponent(theta: float) -> float:
        return float((np.logaddexp(0.0, losses + theta * y) - quiet).sum() - theta * reached)

    theta, least = 0.0, 0.0
    for _ in range(_STEPS):
        chances = _chance(losses + theta * y)
        slope = float((y * chances).sum()) - reached
        bend = float((y * y * chances * (1.0 - chances)).sum())
        step = -slope / max(bend, 1e-300)
        step = math.copysign(min(abs(step), 4.0), step)  # far away the bend says little
        while (there := exponent(theta + step)) > least and abs(step) > 1e-9:
            step /= 2.0
        if least - there < 1e-9 * max(1.0, -least):
            break
        theta, least = theta + step, there
    return least


def _chance(losses: FloatArray) -> FloatArray:
    """q, without overflow, and exact where it is small."""
    chances: FloatArray = np.exp(-np.logaddexp(0.0, -losses))
    return chances


def _worst(losses: FloatArray, coins: IntArray, instruments: FloatArray) -> tuple[float, float]:
    """Of many instruments `(runs, many)` the one that fits least: its sum, and its p-value times their number."""
    each = [tilted(losses, coins, instruments[:, k]) for k in range(instruments.shape[1])]
    statistic, p = min(each, key=lambda found: found[1], default=(0.0, 1.0))
    return statistic, min(1.0, p * len(each))


def _by_strength(losses: FloatArray) -> FloatArray:
    """`(runs, _BINS)`: the sign of the losses of one fifth of the runs each, from the weakest to the strongest."""
    strengths = np.abs(losses)
    edges = np.quantile(strengths, np.arange(1, _BINS) / _BINS, method="inverted_cdf")
    place = np.searchsorted(edges, strengths, side="left")
    signs: FloatArray = np.sign(losses)[:, None] * (place[:, None] == np.arange(_BINS))
    return signs
