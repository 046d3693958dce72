"""What else tells the world: every feature of what was heard, by its rank among the runs, against the coins.

Given all messages, the coin of a run has the chance that its exact loss says, and nothing else depends on it: neither lengths,
times and metadata, nor how numbers lie beside what their densities say. So the centred rank of any feature, and its square,
is an instrument of calibration (`tilted`), whatever epsilon is claimed. It finds one feature that tells, where a classifier
must learn it and guess above the claim; it bounds no epsilon, and does not replace the classifiers.

What only several features together tell is learned by the classifiers: the rank of what one says of runs that it did not learn
from is an instrument, too.

A channel may tell what the learner keeps to itself, as the norm of a gradient, and the world only through that, in one run so and
in the next one otherwise. So the rank of what a channel shows, times how much the worlds differ in what is kept, is an
instrument, too.

Where the exact loss is not known, a feature may depend on the world through messages as much as epsilon allows: not judged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.auditing.blackbox import VIEWS, Attack
from sottovoce.auditing.calibration import tilted
from sottovoce.auditing.levels import Test
from sottovoce.optional import import_extra

COLUMNS = 32
"""Features that are ranked at a time."""


@dataclass(frozen=True, slots=True)
class PairRuns:
    """Runs of one pair of worlds.

    Attributes:
        losses: `(runs,)` exact, of what was heard.
        coins: `(runs,)` 1 in the first world, 0 in the second.
        views: of them, by name: finite numbers `(runs, features)`.
        private: `(runs, quantities)` how much the worlds differ in what the learner keeps to itself (`differences`); None: not
            known, or nothing could tell it.
    """

    losses: FloatArray
    coins: IntArray
    views: Mapping[str, FloatArray]
    private: FloatArray | None = None


def channel_tests(pairs: Iterable[PairRuns], where: str = "") -> tuple[Test, ...]:
    """One test of every view in which anything varies: the feature that fits the coins least, times their number.

    Args:
        pairs: the runs of every pair of worlds.
        where: the place that the tests name.

    Raises:
        SpecError: scipy is not installed.
    """
    found = defaultdict[str, list[tuple[float, float, int]]](list)
    for heard in pairs:
        for name, view in heard.views.items():
            if (worst := _worst(heard, view, _ranks_and_squares)) is not None:
                found[name].append(worst)
    what = "given the messages, the rank of no feature depends on the world"
    return tuple(_test(name, what, each, where) for name, each in found.items())


def private_tests(pairs: Iterable[PairRuns], where: str = "") -> tuple[Test, ...]:
    """One test of whatever varies on a channel, against all that the worlds differ in otherwise in one run than in another.

    Args:
        pairs: the runs of every pair of worlds.
        where: the place that the test names.

    Raises:
        SpecError: scipy is not installed.
    """
    found = []
    for heard in pairs:
        kept = np.empty((len(heard.coins), 0)) if heard.private is None else heard.private
        kept = kept[:, (kept != kept[:1]).any(axis=0)]
        for name, view in heard.views.items() if kept.shape[1] else ():
            worst = None if name in VIEWS else _worst(heard, view, partial(_times, kept / np.abs(kept).max(axis=0)))
            found += [] if worst is None else [worst]
    what = "given the messages, no feature follows what the learner keeps to itself"
    return (_test("private quantities", what, found, where),) if found else ()


def learned_tests(heard: PairRuns, attacks: Iterable[Attack], where: str = "") -> tuple[Test, ...]:
    """One test of every classifier that learned something: what it says of the runs that it did not learn from.

    Args:
        heard: the runs that were attacked.
        attacks: of them.
        where: the place that the tests name.

    Raises:
        SpecError: scipy is not installed.
    """
    return tuple(_learned(heard, each, where) for each in attacks if len(each.scores))


def _learned(heard: PairRuns, attack: Attack, where: str) -> Test:
    (ranks,) = _ranks(attack.scores[:, None]).T
    statistic, p = tilted(heard.losses[attack.guessed], heard.coins[attack.guessed], ranks)
    name, what = attack.bound.guesser, "given the messages, what was learned of other runs does not tell the world"
    return Test(name, what, statistic, p, where, primary=attack.bound.view not in VIEWS, family="black box")


def _test(name: str, what: str, found: list[tuple[float, float, int]], where: str) -> Test:
    statistic, p, _ = min(found, key=lambda each: each[1])
    tried = sum(count for _, _, count in found)
    return Test(name, what, statistic, min(1.0, p * tried), where, primary=name not in VIEWS, family="black box")


def _worst(
    heard: PairRuns, view: FloatArray, instruments_of: Callable[[FloatArray], FloatArray]
) -> tuple[float, float, int] | None:
    """Statistic and p-value of the instrument that fits the coins least, and how many were tried; None: nothing varies.

    Args:
        heard: the runs.
        view: of them.
        instruments_of: `(runs, instruments)` from the ranks of some features, `(runs, features)`.
    """
    varying = np.flatnonzero((view != view[:1]).any(axis=0))
    if not len(varying):
        return None
    least, most, tried = np.inf, np.zeros(len(view)), 0
    for start in range(0, len(varying), COLUMNS):
        instruments = instruments_of(_ranks(view[:, varying[start : start + COLUMNS]]))
        bounds = _roughly(heard, instruments)
        k = int(np.argmin(bounds))
        tried += len(bounds)
        if bounds[k] < least:
            least, most = float(bounds[k]), instruments[:, k]
    return *tilted(heard.losses, heard.coins, most), tried


def _ranks_and_squares(ranks: FloatArray) -> FloatArray:
    squares = ranks**2
    return np.concatenate([ranks, squares - squares.mean(axis=0)], axis=1)


def _times(kept: FloatArray, ranks: FloatArray) -> FloatArray:
    """Every rank times everything that is kept, `(runs, features * quantities)`."""
    return (ranks[:, :, None] * kept[:, None, :]).reshape(len(ranks), -1)


def _ranks(features: FloatArray) -> FloatArray:
    """Of features `(runs, many)`, in [-1, 1]; equal numbers share one."""
    rank = import_extra("scipy.stats", "scipy", "an audit").rankdata
    ranks: FloatArray = 2.0 * (rank(features, axis=0) - 0.5) / len(features) - 1.0
    return ranks


def _roughly(heard: PairRuns, instruments: FloatArray) -> FloatArray:
    """Logarithms of Chernoff's bounds for instruments `(runs, many)`, each at the theta that a normal law would have."""
    finite = np.isfinite(heard.losses)
    losses, coins, y = heard.losses[finite], heard.coins[finite, None], instruments[finite]
    chances = np.exp(-np.logaddexp(0.0, -losses))[:, None]
    theta = (y * (coins - chances)).sum(axis=0) / np.maximum((y * y * chances * (1.0 - chances)).sum(axis=0), 1e-300)
    theta = np.clip(theta, -20.0, 20.0)
    grown = np.logaddexp(0.0, losses[:, None] + theta * y) - np.logaddexp(0.0, losses)[:, None]
    bounds: FloatArray = grown.sum(axis=0) - theta * (y * coins).sum(axis=0)
    return bounds
