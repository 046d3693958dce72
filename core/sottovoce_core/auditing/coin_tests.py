"""Tests of the runs' coins: calibration of the losses, features of the recorded traffic, and outcomes of runs.

Calibration tests whether the coins agree with the losses, neither more nor less often than claimed.

Every run belongs to a world that a fair coin chose. Given all messages, the coin is 1 (world 0) with probability `q = 1 / (1 +
e^-L)`, where L is the exact loss of the transcript, if the densities are as claimed and nothing else reveals the world. So for
any instrument Y, a function of the messages, `sum Y (coin - q)` has mean zero and a generating function that is known exactly.
Chernoff's bound on it needs no distribution of L, and holds for every number of runs:

    p = 2 min_theta exp(sum log(1 - q + q e^{theta Y}) - theta sum Y coin)

Too few correct guesses refute a claim as well as too many: less is revealed than claimed if the noise has another
distribution, too.

Outcomes of started runs are compared with their coins: a run that fails, ends early or leaves no trace carries information,
too.

The outcome of a run may depend on its world only through its messages. A run is never excluded because of its outcome: its
messages count with their loss, and outcomes are compared between the worlds by Fisher's exact test.

The coins are tested first. If one world has many more started runs than fair coins give, the ledger or the coin is at fault,
or captures were lost on purpose: the guesses are then worthless, and no evidence against the learner either.

Channel tests compare every feature of the traffic, by its rank among the runs, with the coins.

Given all messages, the probability of the coin follows from the exact loss, and nothing else depends on the coin: neither
lengths, times and metadata, nor numbers beyond their densities. So the centred rank of any feature, and its square, is an
instrument of calibration (`_compute_coin_test`), for any claimed epsilon. It finds one informative feature, where a
classifier must learn it and guess above the claim; it bounds no epsilon, and does not replace the classifiers.

Information that only several features carry together is learned by the classifiers: the rank of a classifier's score in runs
that it did not learn from is an instrument, too.

A channel may reveal a private quantity, such as the norm of a gradient, and the world only through that, with a sign that
changes from run to run. So the rank of a channel feature, times the difference of the private quantity between the worlds, is
an instrument, too.

If the exact loss is not known, a feature may depend on the world through messages as much as epsilon allows: it is not tested.
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
"""Number of bins of guesses by the strength of the loss."""

_STEPS = 30
"""Maximum number of Newton steps: any theta gives a valid bound, the best one the smallest."""


def run_calibration_tests(pairs: Iterable[RunLosses]) -> tuple[Test, ...]:
    """Test the coins of all runs against their losses.

    Args:
        pairs: exact losses of the runs, one item per pair of worlds.
    """
    losses = list(pairs)
    coins = np.concatenate([1 - each.worlds for each in losses])
    total = np.concatenate([each.total for each in losses])
    segments = np.concatenate([each.segment_losses for each in losses])
    sign, finite = np.sign(total), np.nan_to_num(total, posinf=0.0, neginf=0.0)
    of_rounds = _test_worst_instrument(total, coins, segments)
    of_bins = _test_worst_instrument(total, coins, _bin_by_strength(total))
    test = partial(_compute_coin_test, total, coins)
    results = [
        ("right guesses", "the sign of the loss is correct as often as the loss implies", test(sign), True),
        ("slope", "larger losses are correct more often, as the loss implies", test(finite), True),
        (
            "surest wrong guess",
            "no guess that is nearly certain is wrong",
            _find_surest_wrong_guess(total, coins),
            True,
        ),
        ("coins", "both worlds are as frequent as the losses imply", test(np.ones(len(total))), False),
        (
            "slope of small losses",
            "small losses are correct as often as the loss implies",
            test(np.clip(total, -1.0, 1.0)),
            False,
        ),
        ("losses of rounds", "the loss of every round agrees with the coin", of_rounds, False),
        ("guesses by strength", "guesses of every strength are correct as often as it implies", of_bins, False),
    ]
    return tuple(
        Test(name, description, statistic, p, is_primary=primary)
        for name, description, (statistic, p), primary in results
    )


def _compute_coin_test(losses: FloatArray, coins: IntArray, instrument: FloatArray) -> tuple[float, float]:
    """Compute `sum Y (coin - q)` and an upper bound on its two-sided p-value.

    Runs with an infinite loss have nothing random, and do not count.

    Args:
        losses: `(runs,)` `log p(messages | world 0) - log p(messages | world 1)`; zero: no information.
        coins: `(runs,)` 1 in world 0, 0 in world 1.
        instrument: `(runs,)` any finite function of the messages.
    """
    used = np.isfinite(losses) & (instrument != 0.0)
    if not used.any():
        return 0.0, 1.0
    weights = instrument[used]
    size = float(np.abs(weights).max())
    loss, y, coin = losses[used], weights / size, coins[used]
    excess = float((y * (coin - _compute_world_0_probability(loss))).sum())
    return size * excess, min(1.0, 2.0 * math.exp(_minimize_exponent(loss, y, float((y * coin).sum()))))


def _find_surest_wrong_guess(losses: FloatArray, coins: IntArray) -> tuple[float, float]:
    """Find the largest absolute loss with a wrong sign, and an upper bound on its p-value among all runs.

    The loss is infinite if only one world could have produced the messages, and the run belonged to the other one.
    """
    wrong = (losses != 0.0) & ((losses > 0) != (coins == 1))
    if not wrong.any():
        return 0.0, 1.0
    strengths = np.abs(losses)
    surest = float(strengths[wrong].max())
    return surest, min(1.0, float(_compute_world_0_probability(-strengths[strengths >= surest]).sum()))


def _minimize_exponent(losses: FloatArray, y: FloatArray, reached: float) -> float:
    """Minimise the convex `sum log(1 - q + q e^{theta y}) - theta reached`; the result may be slightly too large."""
    baseline = np.logaddexp(0.0, losses)

    def compute_exponent(theta: float) -> float:
        return float((np.logaddexp(0.0, losses + theta * y) - baseline).sum() - theta * reached)

    theta, least = 0.0, 0.0
    for _ in range(_STEPS):
        chances = _compute_world_0_probability(losses + theta * y)
        slope = float((y * chances).sum()) - reached
        curvature = float((y * y * chances * (1.0 - chances)).sum())
        step = -slope / max(curvature, 1e-300)
        step = math.copysign(min(abs(step), 4.0), step)  # far from the minimum the curvature is a poor guide
        while (value := compute_exponent(theta + step)) > least and abs(step) > 1e-9:
            step /= 2.0
        if least - value < 1e-9 * max(1.0, -least):
            break
        theta, least = theta + step, value
    return least


def _compute_world_0_probability(losses: FloatArray) -> FloatArray:
    """Compute q without overflow, exact where it is small."""
    chances: FloatArray = np.exp(-np.logaddexp(0.0, -losses))
    return chances


def _test_worst_instrument(losses: FloatArray, coins: IntArray, instruments: FloatArray) -> tuple[float, float]:
    """Test many instruments `(runs, count)`; return the sum of the worst one, and its p-value times their number."""
    each = [_compute_coin_test(losses, coins, instruments[:, k]) for k in range(instruments.shape[1])]
    statistic, p = min(each, key=lambda result: result[1], default=(0.0, 1.0))
    return statistic, min(1.0, p * len(each))


def _bin_by_strength(losses: FloatArray) -> FloatArray:
    """Return `(runs, _BINS)` the sign of the losses of one fifth of the runs per column, from the smallest to the largest."""
    strengths = np.abs(losses)
    edges = np.quantile(strengths, np.arange(1, _BINS) / _BINS, method="inverted_cdf")
    bin_index = np.searchsorted(edges, strengths, side="left")
    signs: FloatArray = np.sign(losses)[:, None] * (bin_index[:, None] == np.arange(_BINS))
    return signs


# ---- outcomes of runs ------------------------------------------------------------------------------------------------

MAX_UNTRACED_RUNS = 1
"""Maximum number of runs that an interrupted audit can leave without a trace: it makes one after the other."""

COMPLETE_OUTCOME = "complete"
"""Outcome of a run with all rounds recorded."""


@dataclass(frozen=True, slots=True)
class RunOutcomes:
    """Outcomes of all started runs.

    Attributes:
        worlds: `(started,)` the coin of each run, 0 or 1.
        outcomes: outcome of each run, in a word or two; `COMPLETE_OUTCOME` if nothing failed.
        incomplete_losses: losses of the recorded part of incomplete runs, by pair of worlds; empty if the adversary cannot
            compute them.
        untraced_count: number of further started runs whose world is not known: they left neither a capture nor a coin.
    """

    worlds: IntArray
    outcomes: tuple[str, ...]
    incomplete_losses: Mapping[int, RunLosses] = field(default_factory=dict)
    untraced_count: int = 0

    @property
    def coin_p_value(self) -> float:
        """Two-sided probability that fair coins are this uneven."""
        stats = import_optional("scipy.stats", "scipy", "an audit")
        return float(stats.binomtest(int(self.worlds.sum()), len(self.worlds)).pvalue) if len(self.worlds) else 1.0

    @property
    def counts(self) -> tuple[int, int]:
        """Number of started runs in world 0 and in world 1."""
        seconds = int(self.worlds.sum())
        return len(self.worlds) - seconds, seconds

    def explain_unfair_coins(self, level: float) -> str:
        """Explain why the coins are not valid; return an empty text if they may be fair.

        Args:
            level: probability of a false alarm for fair coins.
        """
        if self.untraced_count > MAX_UNTRACED_RUNS:
            return (
                f"{self.untraced_count:,} started runs left neither a capture nor a coin, so their worlds are not known"
            )
        if self.coin_p_value < level:
            first, second = self.counts
            return (
                f"{first:,} runs of the first world and {second:,} of the second are not what fair coins give "
                f"(p = {self.coin_p_value:.2g}): the coin or the ledger is at fault"
            )
        return ""

    def test(self) -> Test:
        """Test whether runs end alike in both worlds: the outcome that differs most, times the number of outcomes compared."""
        exact = import_optional("scipy.stats", "scipy", "an audit").fisher_exact
        tables = dict(self._iterate_tables())
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

    def _iterate_tables(self) -> Iterator[tuple[str, tuple[tuple[int, int], tuple[int, int]]]]:
        """Iterate over the outcomes: number of runs of world 0 and of world 1 with the outcome, and without it."""
        counts = Counter(zip(self.outcomes, self.worlds.tolist(), strict=True))
        names = sorted(set(self.outcomes) - {COMPLETE_OUTCOME})
        for name in names:
            yield name, self._build_table(counts[name, 0], counts[name, 1])
        if len(names) > 1:
            first, second = (total - counts[COMPLETE_OUTCOME, world] for world, total in enumerate(self.counts))
            yield "not complete", self._build_table(first, second)

    def _build_table(self, first: int, second: int) -> tuple[tuple[int, int], tuple[int, int]]:
        return (first, self.counts[0] - first), (second, self.counts[1] - second)


# ---- features by rank ------------------------------------------------------------------------------------------------

FEATURES_PER_CHUNK = 32
"""Number of features that are ranked at once."""


@dataclass(frozen=True, slots=True)
class PairRuns:
    """Runs of one pair of worlds.

    Attributes:
        losses: `(runs,)` exact losses of the messages.
        coins: `(runs,)` 1 in world 0, 0 in world 1.
        views: views of the runs, by name: finite numbers `(runs, features)`.
        private_differences: `(runs, quantities)` differences of the private quantities between the worlds
            (`compute_private_differences`); None: not known, or no channel could reveal them.
    """

    losses: FloatArray
    coins: IntArray
    views: Mapping[str, FloatArray]
    private_differences: FloatArray | None = None


def run_channel_tests(pairs: Iterable[PairRuns]) -> tuple[Test, ...]:
    """Run one test of every view in which anything varies: the feature with the smallest p-value, times their number.

    Args:
        pairs: runs of every pair of worlds.

    Raises:
        SpecError: scipy is not installed.
    """
    found = defaultdict[str, list[tuple[float, float, int]]](list)
    for runs in pairs:
        for name, view in runs.views.items():
            if (worst := _find_worst_feature(runs, view, _build_rank_instruments)) is not None:
                found[name].append(worst)
    description = "given the messages, the rank of no feature depends on the world"
    return tuple(_test(name, description, each) for name, each in found.items())


def run_private_quantity_tests(pairs: Iterable[PairRuns]) -> tuple[Test, ...]:
    """Run one test of all channel features against the private quantities.

    Only quantities whose difference between the worlds varies from run to run are used.

    Args:
        pairs: runs of every pair of worlds.

    Raises:
        SpecError: scipy is not installed.
    """
    found = []
    for runs in pairs:
        quantities = np.empty((len(runs.coins), 0)) if runs.private_differences is None else runs.private_differences
        quantities = quantities[:, (quantities != quantities[:1]).any(axis=0)]
        if not quantities.shape[1]:
            continue
        multiply = partial(_multiply_by_quantities, quantities / np.abs(quantities).max(axis=0))
        for name, view in runs.views.items():
            if name not in NUMBER_VIEWS and (worst := _find_worst_feature(runs, view, multiply)) is not None:
                found.append(worst)
    description = "given the messages, no feature follows a private quantity of the learner"
    return (_test("private quantities", description, found),) if found else ()


def run_classifier_tests(runs: PairRuns, attacks: Iterable[Attack]) -> tuple[Test, ...]:
    """Run one test of every classifier that learned something: its scores in the runs that it did not learn from.

    Args:
        runs: runs that were attacked.
        attacks: attacks on them.

    Raises:
        SpecError: scipy is not installed.
    """
    return tuple(_test_classifier(runs, each) for each in attacks if len(each.scores))


def _test_classifier(runs: PairRuns, attack: Attack) -> Test:
    (ranks,) = _rank_features(attack.scores[:, None]).T
    statistic, p = _compute_coin_test(runs.losses[attack.guessed_runs], runs.coins[attack.guessed_runs], ranks)
    name = attack.bound.guesser
    description = "given the messages, what was learned from other runs does not reveal the world"
    return Test(name, description, statistic, p, is_primary=attack.bound.view not in NUMBER_VIEWS, family="black box")


def _test(name: str, description: str, found: list[tuple[float, float, int]]) -> Test:
    statistic, p, _ = min(found, key=lambda each: each[1])
    tried = sum(count for _, _, count in found)
    return Test(
        name, description, statistic, min(1.0, p * tried), is_primary=name not in NUMBER_VIEWS, family="black box"
    )


def _find_worst_feature(
    runs: PairRuns, view: FloatArray, build_instruments: Callable[[FloatArray], FloatArray]
) -> tuple[float, float, int] | None:
    """Return statistic and p-value of the instrument with the smallest bound, and the number of instruments.

    Args:
        runs: runs of one pair of worlds.
        view: one view of them.
        build_instruments: function from the ranks of features, `(runs, features)`, to `(runs, instruments)`.

    Returns:
        None if nothing varies.
    """
    varying = np.flatnonzero((view != view[:1]).any(axis=0))
    if not len(varying):
        return None
    least_bound, instrument, tried = np.inf, np.zeros(len(view)), 0
    for start in range(0, len(varying), FEATURES_PER_CHUNK):
        instruments = build_instruments(_rank_features(view[:, varying[start : start + FEATURES_PER_CHUNK]]))
        bounds = _approximate_log_bounds(runs, instruments)
        k = int(np.argmin(bounds))
        tried += len(bounds)
        if bounds[k] < least_bound:
            least_bound, instrument = float(bounds[k]), instruments[:, k]
    return *_compute_coin_test(runs.losses, runs.coins, instrument), tried


def _build_rank_instruments(ranks: FloatArray) -> FloatArray:
    squares = ranks**2
    return np.concatenate([ranks, squares - squares.mean(axis=0)], axis=1)


def _multiply_by_quantities(quantities: FloatArray, ranks: FloatArray) -> FloatArray:
    """Multiply every rank by every private quantity, `(runs, features * quantities)`."""
    return (ranks[:, :, None] * quantities[:, None, :]).reshape(len(ranks), -1)


def _rank_features(features: FloatArray) -> FloatArray:
    """Rank features `(runs, count)` and scale the ranks to [-1, 1]; equal numbers share one."""
    rank = import_optional("scipy.stats", "scipy", "an audit").rankdata
    ranks: FloatArray = 2.0 * (rank(features, axis=0) - 0.5) / len(features) - 1.0
    return ranks


def _approximate_log_bounds(runs: PairRuns, instruments: FloatArray) -> FloatArray:
    """Compute logarithms of Chernoff's bounds for instruments `(runs, count)`, each at the theta of a normal approximation."""
    finite = np.isfinite(runs.losses)
    losses, coins, y = runs.losses[finite], runs.coins[finite, None], instruments[finite]
    chances = np.exp(-np.logaddexp(0.0, -losses))[:, None]
    theta = (y * (coins - chances)).sum(axis=0) / np.maximum((y * y * chances * (1.0 - chances)).sum(axis=0), 1e-300)
    theta = np.clip(theta, -20.0, 20.0)
    growth = np.logaddexp(0.0, losses[:, None] + theta * y) - np.logaddexp(0.0, losses)[:, None]
    bounds: FloatArray = growth.sum(axis=0) - theta * (y * coins).sum(axis=0)
    return bounds
