"""Tests against the coins of the runs: calibration of the losses, features of what was recorded, and how runs ended.

Calibration: are coins what the losses say of them, neither more nor less often?

Every run lives in a world that a fair coin chose. Given all that was heard, the coin is 1 (the first world) with probability
`q = 1 / (1 + e^-L)`, where L is the exact loss of the transcript, if densities are as claimed and nothing else tells the
world. So for any instrument Y, a function of what was heard, `sum Y (coin - q)` has mean zero, and a generating function
that is known exactly. Chernoff's bound on it needs no law of L, and holds for every number of runs:

    p = 2 min_theta exp(sum log(1 - q + q e^{theta Y}) - theta sum Y coin)

Too few right guesses refute a claim as well as too many: less is told than is claimed where the noise is other noise, too.

How started runs ended, against their coins: a run that fails, ends early or is never seen again says something, too.

Nothing about the end of a run may depend on its world but through what was said. A run is never left out because of its end:
what was heard of it counts with its loss, and ends are compared between the worlds by Fisher's exact test.

The coins come first. If there are many more started runs in one world than fair coins give, the ledger or the coin is at
fault, or captures were lost on purpose: the guesses are worth nothing, and say nothing against the learner either.

What else tells the world: every feature of what was heard, by its rank among the runs, against the coins.

Given all messages, the coin of a run has the chance that its exact loss says, and nothing else depends on it: neither lengths,
times and metadata, nor how numbers lie beside what their densities say. So the centred rank of any feature, and its square,
is an instrument of calibration (`_tilted`), whatever epsilon is claimed. It finds one feature that tells, where a classifier
must learn it and guess above the claim; it bounds no epsilon, and does not replace the classifiers.

What only several features together tell is learned by the classifiers: the rank of what one says of runs that it did not learn
from is an instrument, too.

A channel may tell what the learner keeps to itself, as the norm of a gradient, and the world only through that, in one run so and
in the next one otherwise. So the rank of what a channel shows, times how much the worlds differ in what is kept, is an
instrument, too.

Where the exact loss is not known, a feature may depend on the world through messages as much as epsilon allows: not judged.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.auditing.blackbox import NUMBER_VIEWS, Attack
from sottovoce_core.auditing.bounds import Test
from sottovoce_core.auditing.likelihood import RunLosses
from sottovoce_core.optional import import_optional

# ---- calibration -----------------------------------------------------------------------------------------------------

_BINS = 5
"""Of right guesses by the strength of the hint."""

_STEPS = 30
"""Of Newton's method at most: any theta gives a valid bound, the best one the smallest."""


def run_calibration_tests(pairs: Iterable[RunLosses]) -> tuple[Test, ...]:
    """Hold the coins of all runs against their losses.

    Args:
        pairs: the exact losses of the runs, of every pair of worlds.
    """
    losses = list(pairs)
    coins = np.concatenate([1 - each.worlds for each in losses])
    total = np.concatenate([each.total for each in losses])
    stretches = np.concatenate([each.segment_losses for each in losses])
    sign, finite = np.sign(total), np.nan_to_num(total, posinf=0.0, neginf=0.0)
    of_round, rounds = _worst(total, coins, stretches)
    of_bin, bins = _worst(total, coins, _by_strength(total))
    found = [
        ("right guesses", "the sign of the loss is right as often as the loss says", _tilted(total, coins, sign), True),
        ("slope", "stronger hints are right more often, as the loss says", _tilted(total, coins, finite), True),
        (
            "surest wrong guess",
            "no guess is wrong that is as good as certain",
            _surest_wrong(total, coins),
            True,
        ),
        ("coins", "both worlds come as often as the losses say", _tilted(total, coins, np.ones(len(total))), False),
        (
            "slope of weak hints",
            "weak hints are right as often as the loss says",
            _tilted(total, coins, np.clip(total, -1.0, 1.0)),
            False,
        ),
        ("losses of rounds", "the loss of every round says of the coin what it should", (of_round, rounds), False),
        ("guesses by strength", "guesses of every strength are right as often as it says", (of_bin, bins), False),
    ]
    return tuple(Test(name, what, statistic, p, is_primary=primary) for name, what, (statistic, p), primary in found)


def _tilted(losses: FloatArray, coins: IntArray, instrument: FloatArray) -> tuple[float, float]:
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
    each = [_tilted(losses, coins, instruments[:, k]) for k in range(instruments.shape[1])]
    statistic, p = min(each, key=lambda found: found[1], default=(0.0, 1.0))
    return statistic, min(1.0, p * len(each))


def _by_strength(losses: FloatArray) -> FloatArray:
    """`(runs, _BINS)`: the sign of the losses of one fifth of the runs each, from the weakest to the strongest."""
    strengths = np.abs(losses)
    edges = np.quantile(strengths, np.arange(1, _BINS) / _BINS, method="inverted_cdf")
    place = np.searchsorted(edges, strengths, side="left")
    signs: FloatArray = np.sign(losses)[:, None] * (place[:, None] == np.arange(_BINS))
    return signs


# ---- how runs ended --------------------------------------------------------------------------------------------------

MAX_UNTRACED_RUNS = 1
"""Runs that an audit which is cut off can leave without a trace: it makes one after the other."""

COMPLETE_OUTCOME = "complete"
"""The outcome of a run of which all rounds were overheard."""


@dataclass(frozen=True, slots=True)
class RunOutcomes:
    """All runs that were started, and how they ended.

    Attributes:
        worlds: `(started,)` 0 or 1, what the coin of each run fell on.
        outcomes: of each, in a word or two; `WHOLE` if all is well.
        lost: losses of what was heard of those that are not whole, by pair of worlds; where the listener can know them.
        unknown: so many more were started, and nobody knows in which world: they left neither a capture nor a coin.
    """

    worlds: IntArray
    outcomes: tuple[str, ...]
    incomplete_losses: Mapping[int, RunLosses] = field(default_factory=dict)
    untraced_count: int = 0

    @property
    def coin_p_value(self) -> float:
        """How likely fair coins fall this unevenly, two-sided."""
        stats = import_optional("scipy.stats", "scipy", "an audit")
        return float(stats.binomtest(int(self.worlds.sum()), len(self.worlds)).pvalue) if len(self.worlds) else 1.0

    @property
    def counts(self) -> tuple[int, int]:
        """Started runs of either world."""
        seconds = int(self.worlds.sum())
        return len(self.worlds) - seconds, seconds

    def explain_unfair_coins(self, level: float) -> str:
        """Why the coins are none; empty where they may be fair ones.

        Args:
            level: with which probability fair coins may be taken for others.
        """
        if self.untraced_count > MAX_UNTRACED_RUNS:
            return f"{self.untraced_count:,} started runs left neither a capture nor a coin: nobody knows in which world they were"
        if self.coin_p_value < level:
            first, second = self.counts
            return (
                f"{first:,} runs of the first world and {second:,} of the second are not what fair coins give "
                f"(p = {self.coin_p_value:.2g}): the coin or the ledger is at fault"
            )
        return ""

    def test(self) -> Test:
        """Do runs end alike in both worlds? The outcome that differs most, times the number of outcomes that are compared."""
        exact = import_optional("scipy.stats", "scipy", "an audit").fisher_exact
        tables = dict(self._tables())
        p_values = {name: float(exact(table).pvalue) for name, table in tables.items()}
        name = min(p_values, key=p_values.__getitem__, default="")
        (first, _), (second, _) = tables.get(name, ((0, 0), (0, 0)))
        ends = (
            f"{name} in {first} of {self.counts[0]} and {second} of {self.counts[1]} runs" if name else "all complete"
        )
        return Test(
            name="outcomes of runs",
            description=f"runs end alike in both worlds: {ends}",
            statistic=float(first - second),
            p_value=min(1.0, len(p_values) * p_values[name]) if name else 1.0,
            family="black box",
        )

    def _tables(self) -> Iterator[tuple[str, tuple[tuple[int, int], tuple[int, int]]]]:
        """Runs of the first and of the second world with this outcome, and without it."""
        counts = Counter(zip(self.outcomes, self.worlds.tolist(), strict=True))
        names = sorted(set(self.outcomes) - {COMPLETE_OUTCOME})
        for name in names:
            yield name, self._table(counts[name, 0], counts[name, 1])
        if len(names) > 1:
            first, second = (total - counts[COMPLETE_OUTCOME, world] for world, total in enumerate(self.counts))
            yield "not complete", self._table(first, second)

    def _table(self, first: int, second: int) -> tuple[tuple[int, int], tuple[int, int]]:
        return (first, self.counts[0] - first), (second, self.counts[1] - second)


# ---- features by rank ------------------------------------------------------------------------------------------------

FEATURES_PER_CHUNK = 32
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
    private_differences: FloatArray | None = None


def run_channel_tests(pairs: Iterable[PairRuns]) -> tuple[Test, ...]:
    """One test of every view in which anything varies: the feature that fits the coins least, times their number.

    Args:
        pairs: the runs of every pair of worlds.

    Raises:
        SpecError: scipy is not installed.
    """
    found = defaultdict[str, list[tuple[float, float, int]]](list)
    for heard in pairs:
        for name, view in heard.views.items():
            if (worst := _worst_feature(heard, view, _ranks_and_squares)) is not None:
                found[name].append(worst)
    what = "given the messages, the rank of no feature depends on the world"
    return tuple(_test(name, what, each) for name, each in found.items())


def run_private_quantity_tests(pairs: Iterable[PairRuns]) -> tuple[Test, ...]:
    """One test of whatever varies on a channel, against all that the worlds differ in otherwise in one run than in another.

    Args:
        pairs: the runs of every pair of worlds.

    Raises:
        SpecError: scipy is not installed.
    """
    found = []
    for heard in pairs:
        kept = np.empty((len(heard.coins), 0)) if heard.private_differences is None else heard.private_differences
        kept = kept[:, (kept != kept[:1]).any(axis=0)]
        for name, view in heard.views.items() if kept.shape[1] else ():
            worst = (
                None
                if name in NUMBER_VIEWS
                else _worst_feature(heard, view, partial(_times, kept / np.abs(kept).max(axis=0)))
            )
            found += [] if worst is None else [worst]
    what = "given the messages, no feature follows what the learner keeps to itself"
    return (_test("private quantities", what, found),) if found else ()


def run_classifier_tests(heard: PairRuns, attacks: Iterable[Attack]) -> tuple[Test, ...]:
    """One test of every classifier that learned something: what it says of the runs that it did not learn from.

    Args:
        heard: the runs that were attacked.
        attacks: of them.

    Raises:
        SpecError: scipy is not installed.
    """
    return tuple(_learned(heard, each) for each in attacks if len(each.scores))


def _learned(heard: PairRuns, attack: Attack) -> Test:
    (ranks,) = _ranks(attack.scores[:, None]).T
    statistic, p = _tilted(heard.losses[attack.guessed_runs], heard.coins[attack.guessed_runs], ranks)
    name, what = attack.bound.guesser, "given the messages, what was learned of other runs does not tell the world"
    return Test(name, what, statistic, p, is_primary=attack.bound.view not in NUMBER_VIEWS, family="black box")


def _test(name: str, what: str, found: list[tuple[float, float, int]]) -> Test:
    statistic, p, _ = min(found, key=lambda each: each[1])
    tried = sum(count for _, _, count in found)
    return Test(name, what, statistic, min(1.0, p * tried), is_primary=name not in NUMBER_VIEWS, family="black box")


def _worst_feature(
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
    for start in range(0, len(varying), FEATURES_PER_CHUNK):
        instruments = instruments_of(_ranks(view[:, varying[start : start + FEATURES_PER_CHUNK]]))
        bounds = _roughly(heard, instruments)
        k = int(np.argmin(bounds))
        tried += len(bounds)
        if bounds[k] < least:
            least, most = float(bounds[k]), instruments[:, k]
    return *_tilted(heard.losses, heard.coins, most), tried


def _ranks_and_squares(ranks: FloatArray) -> FloatArray:
    squares = ranks**2
    return np.concatenate([ranks, squares - squares.mean(axis=0)], axis=1)


def _times(kept: FloatArray, ranks: FloatArray) -> FloatArray:
    """Every rank times everything that is kept, `(runs, features * quantities)`."""
    return (ranks[:, :, None] * kept[:, None, :]).reshape(len(ranks), -1)


def _ranks(features: FloatArray) -> FloatArray:
    """Of features `(runs, many)`, in [-1, 1]; equal numbers share one."""
    rank = import_optional("scipy.stats", "scipy", "an audit").rankdata
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
