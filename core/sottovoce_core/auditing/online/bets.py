"""Bets on noise: on the distribution of single numbers, on whether they are new, and on whether they are independent.

Each bet keeps sums over rounds, `(learners, width)`, and computes the e-value of such sums.

So bets on one learner, on all learners together, and on some rounds only use the same sums, added differently. Every e-value
assumes numbers that arrive in order, each independent standard Laplace given all earlier ones; everything that a stake depends
on was known earlier (`noise_history`).

Stakes mix all bets, since round 0 and in blocks of rounds, for each learner and for all. Half of the stake is on the learners,
evenly, and half on all of them together: on the same sums added over learners, which detects faults that are slight in each,
and on dependence within one round, which cannot be attributed to one learner.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from scipy import special

from sottovoce_core.arrays import BoolArray, FloatArray, IntArray
from sottovoce_core.auditing.online.noise_history import (
    EQUALITY_TOLERANCE,
    KEY_MATCH_PROBABILITY,
    LAGS,
    SHIFTS,
    RoundObservation,
)

# ---- e-values --------------------------------------------------------------------------------------------------------


def mix_e_values(e_values: FloatArray, weights: FloatArray | None = None) -> FloatArray:
    """Compute the logarithm of the weighted mean of e-values, which is an e-value for any dependence.

    Args:
        e_values: `(..., bets)` logarithms.
        weights: `(bets,)` with sum one; None: equal weights.
    """
    largest: FloatArray = e_values.max(axis=-1)
    shift = np.where(np.isfinite(largest), largest, 0.0)
    stakes = np.exp(e_values - shift[..., None])
    total = stakes.mean(axis=-1) if weights is None else stakes @ weights
    with np.errstate(divide="ignore"):  # a total of zero gives minus infinity
        mixed: FloatArray = np.where(np.isposinf(largest), np.inf, shift + np.log(total))
    return mixed


def _update_detector(previous: FloatArray, e_values: FloatArray) -> FloatArray:
    """Update a change detector, `R_t = (R_{t-1} + 1) e_t`, with one e-value per step, given the earlier ones.

    Alarm at `e >= log c`: while the claim holds, the mean number of steps to an alarm is at least c. A step may be inspected
    before it is complete: at any time, the mean of R is at most the number of steps begun.

    Args:
        previous: `log R_{t-1}`; minus infinity before the first step.
        e_values: logarithms.
    """
    updated: FloatArray = np.logaddexp(previous, 0.0) + e_values
    return updated


# ---- bet -------------------------------------------------------------------------------------------------------------


class _Bet(ABC):
    """Kind of bet.

    Attributes:
        name: name of the detected fault.
    """

    name: ClassVar[str]

    @abstractmethod
    def compute_sums(self, observation: RoundObservation) -> FloatArray:
        """Compute the addends of a round, `(learners, width)`."""

    @abstractmethod
    def compute_log_e_value(self, sums: FloatArray) -> FloatArray:
        """Compute the logarithm of the e-value `(...)` of sums `(..., width)`."""


def _krichevsky_trofimov(counts: FloatArray, distribution: FloatArray) -> FloatArray:
    """Compute the log e-value of a mixture over all distributions on cells against this one, for `counts (..., cells)`.

    The mixture is Dirichlet with one half for each cell (Krichevsky and Trofimov 1981).
    """
    cells, n = counts.shape[-1], counts.sum(axis=-1)
    no_bet = math.lgamma(cells / 2) - cells * math.lgamma(0.5)
    each = special.gammaln(counts + 0.5) - counts * np.log(distribution)
    e: FloatArray = no_bet - special.gammaln(n + cells / 2) + each.sum(axis=-1)
    return e


def _bet_on_excess(count: FloatArray, expected: FloatArray) -> FloatArray:
    """Compute the log e-value of a count of events, each rare given the past: a mixture over how much more often they occur.

    For a rate l, it is `l^count exp(-(l - 1) expected)`; rates have the distribution Gamma(1/2, 1e-4), some thousands at
    first, above 1: only so may `expected` be larger than the true expectation.
    """
    shape, rate = 0.5, 1e-4
    posterior_shape, posterior_rate = shape + count, rate + expected
    with np.errstate(divide="ignore"):  # far fewer events than expected give minus infinity
        above_one = np.log(special.gammaincc(posterior_shape, posterior_rate)) - math.log(
            special.gammaincc(shape, rate)
        )
    log_mixture = (
        special.gammaln(posterior_shape)
        - math.lgamma(shape)
        + shape * math.log(rate)
        - posterior_shape * np.log(posterior_rate)
    )
    e: FloatArray = log_mixture + above_one + expected
    return e


# ---- distribution of a number ----------------------------------------------------------------------------------------


class _Scale(_Bet):
    """Bet that the scale differs: a Gamma mixture over rates, of mean 1, with `shape` in place of a sample."""

    name = "scale"
    shape = 20.0

    def compute_sums(self, observation: RoundObservation) -> FloatArray:
        return np.stack([observation.sizes.sum(axis=1), observation.known_mask.sum(axis=1)], axis=-1)

    def compute_log_e_value(self, sums: FloatArray) -> FloatArray:
        a, total, n = self.shape, sums[..., 0], sums[..., 1]
        e: FloatArray = special.gammaln(a + n) - math.lgamma(a) + a * math.log(a) - (a + n) * np.log(a + total) + total
        return e


def _count_cells(rows: int, cells: int, cell: IntArray, weights: FloatArray | BoolArray) -> FloatArray:
    """Count the numbers of each row, `(rows, numbers)`, in each cell: `(rows, cells)`."""
    flat_cell = cell + cells * np.arange(rows)[:, None]
    counts = np.bincount(flat_cell.ravel(), weights.ravel(), rows * cells).astype(np.float64)
    return counts.reshape(rows, cells)


class _Histogram(_Bet):
    """Bet that the numbers have another distribution: `F(r)` in equally likely cells; or their sizes, which need less data."""

    name = "histogram"
    cells = 16

    def compute_sums(self, observation: RoundObservation) -> FloatArray:
        cumulative = np.where(observation.signs > 0, 1.0 - 0.5 * observation.tail, 0.5 * observation.tail)
        cell = np.minimum((cumulative * self.cells).astype(np.int64), self.cells - 1)
        return _count_cells(len(cell), self.cells, cell, observation.known_mask)

    def compute_log_e_value(self, sums: FloatArray) -> FloatArray:
        half = self.cells // 2
        folded = sums[..., half:] + sums[..., half - 1 :: -1]
        both = [_krichevsky_trofimov(each, np.full(each.shape[-1], 1.0 / each.shape[-1])) for each in (sums, folded)]
        return mix_e_values(np.stack(both, axis=-1))


class _LowBits(_Bet):
    """Bet that the low bits of noise or of messages, in lattice spacings, are not uniform: a coarser lattice.

    It uses eight nibbles and the number of trailing zeros, of both, counted from the lowest bit that float64 resolves; and
    messages whose numbers are all even, for noise that is coarse in a few messages only.
    """

    name = "low bits"
    nibbles, zeros = 8, 12
    zero_probabilities = 2.0 ** -np.minimum(np.arange(1, 13), 11)
    """Probabilities of the number of trailing zeros: the last cell is for 11 and more."""
    uniform_bits = 34
    """Number of low bits that are uniform, to 1e-8 (`(2^uniform_bits h)^4/720`, h = 2^-40)."""

    def compute_sums(self, observation: RoundObservation) -> FloatArray:
        rows = len(observation.lost_bits)
        lost_bits = np.minimum(observation.lost_bits, self.uniform_bits).astype(np.int64)[:, None]
        steps = np.stack([observation.steps, observation.message_steps], axis=1) >> lost_bits  # learners, 2, numbers
        offsets = 4 * np.arange(self.nibbles)
        is_resolved = np.broadcast_to(
            lost_bits[..., None] + offsets + 4 <= self.uniform_bits, (*steps.shape, self.nibbles)
        )
        cells = (steps[..., None] >> offsets & 15) + 16 * (offsets // 4 + self.nibbles * np.arange(2)[:, None, None])
        nibbles = _count_cells(rows, 32 * self.nibbles, cells.reshape(rows, -1), is_resolved.reshape(rows, -1))
        with_sentinel = steps | (1 << self.zeros - 1)
        trailing_cells = (
            np.frexp((with_sentinel & -with_sentinel).astype(np.float64))[1] - 1 + self.zeros * np.arange(2)[:, None]
        )
        is_resolved = np.broadcast_to(lost_bits + self.zeros <= self.uniform_bits, trailing_cells.shape)
        zeros = _count_cells(rows, 2 * self.zeros, trailing_cells.reshape(rows, -1), is_resolved.reshape(rows, -1))
        resolved_count = is_resolved.sum(axis=-1)
        is_coarse = (resolved_count > 0) & ~(is_resolved & (steps & 1 == 1)).any(axis=-1)
        expected = np.where(resolved_count > 0, 2.0**-resolved_count, 0.0)
        return np.concatenate([nibbles, zeros, is_coarse, expected], axis=1)

    def compute_log_e_value(self, sums: FloatArray) -> FloatArray:
        split = 32 * self.nibbles
        nibbles = sums[..., :split].reshape(*sums.shape[:-1], 2 * self.nibbles, 16)
        zeros = sums[..., split:-4].reshape(*sums.shape[:-1], 2, self.zeros)
        each = (
            _krichevsky_trofimov(nibbles, np.full(16, 1 / 16)),
            _krichevsky_trofimov(zeros, self.zero_probabilities),
            _bet_on_excess(sums[..., -4:-2], sums[..., -2:]),
        )
        return mix_e_values(np.stack([mix_e_values(e) for e in each], axis=-1))


# ---- repeats ---------------------------------------------------------------------------------------------------------


def _bet_on_hits(hits: FloatArray, trials: FloatArray, probability: float) -> FloatArray:
    """Compute the log e-value of a number of hits, each with at most this probability."""
    return _krichevsky_trofimov(np.stack([hits, trials - hits], axis=-1), np.array([probability, 1.0 - probability]))


class _Repeats(_Bet):
    """Bet that numbers are zero or repeated: from the last rounds, or, by their keys, from any earlier time.

    It mixes four bets: numbers that are close to zero or to a number of the last rounds; successors of a repeated number; the
    count of repeated numbers; and the count of sums or differences of numbers of the last rounds.
    """

    name = "repeats"

    def compute_sums(self, observation: RoundObservation) -> FloatArray:
        keys, sums = observation.key_repeats, observation.sum_repeats
        return np.stack(
            [
                observation.repeat_counts,
                observation.exact_counts,
                keys.followed_repeat_counts,
                keys.repeat_counts,
                keys.expected_counts,
                sums.earlier_counts,
                sums.expected_counts,
            ],
            axis=-1,
        )

    def compute_log_e_value(self, sums: FloatArray) -> FloatArray:
        near, exact, followed, repeated, expected, sum_count, sum_expected = np.moveaxis(sums, -1, 0)
        near_bet = _bet_on_hits(near, exact, (1 + 2 * LAGS) * EQUALITY_TOLERANCE)
        key_bets = _bet_on_hits(followed, repeated, KEY_MATCH_PROBABILITY), _bet_on_excess(repeated, expected)
        return mix_e_values(np.stack([near_bet, *key_bets, _bet_on_excess(sum_count, sum_expected)], axis=-1))


class _Shared(_Bet):
    """Bet that learners send the same numbers in one round, numbers that add to zero, or sums of other learners' numbers."""

    name = "copies"

    def compute_sums(self, observation: RoundObservation) -> FloatArray:
        keys, sums = observation.key_repeats, observation.sum_repeats
        return np.stack(
            [
                keys.same_round_followed_counts,
                keys.same_round_repeat_counts,
                observation.cancelled_counts,
                observation.exact_counts,
                sums.same_round_counts,
                sums.expected_same_round_counts,
            ],
            axis=-1,
        ).astype(np.float64)

    def compute_log_e_value(self, sums: FloatArray) -> FloatArray:
        followed, repeated, cancelled, exact, sum_count, sum_expected = np.moveaxis(sums, -1, 0)
        hit_bets = (
            _bet_on_hits(followed, repeated, KEY_MATCH_PROBABILITY),
            _bet_on_hits(cancelled, exact, EQUALITY_TOLERANCE),
        )
        return mix_e_values(np.stack([*hit_bets, _bet_on_excess(sum_count, sum_expected)], axis=-1))


# ---- dependence ------------------------------------------------------------------------------------------------------


def _bet_on_signs(s: FloatArray, v: FloatArray, variance: float) -> FloatArray:
    """Compute the log e-value of `S = sum X sign(r)`, `V = sum X^2`.

    Signs are fair for any size, so `exp(l S - l^2 V/2)` is an e-process for every l, and so is its mean over normal l.
    """
    e: FloatArray = 0.5 * (s**2 * variance / (1.0 + variance * v) - np.log1p(variance * v))
    return e


def _bet_on_sizes(s: FloatArray, v: FloatArray, rate: float) -> FloatArray:
    """Compute the log e-value of `S = sum X (|r| - 1)`, `V = sum X^2`, with |X| <= 1: exponential numbers are sub-gamma.

    `log E exp(u (|r| - 1)) = -u - log(1 - u) <= u^2/(2 (1 - |u|))`.
    """
    e: FloatArray = rate * s - v * (rate**2 / (2.0 * (1.0 - abs(rate))))
    return e


class _Dependence(_Bet):
    """Bet that signs and sizes depend on earlier values X, for many X at once."""

    variances = (0.01, 0.1)
    rates = (-0.3, -0.1, 0.1, 0.3)
    weights = (0.7, 0.3)
    """Fractions of the stake on signs, and on sizes."""

    @abstractmethod
    def compute_sums(self, observation: RoundObservation) -> FloatArray:
        """Compute S and V of signs, S and V of sizes: each `(learners, X)`, concatenated."""

    def compute_log_e_value(self, sums: FloatArray) -> FloatArray:
        s, v, size, spread = np.split(sums, 4, axis=-1)
        signs = [_bet_on_signs(s, v, variance) for variance in self.variances]
        sizes = [_bet_on_sizes(size, spread, rate) for rate in self.rates]
        both = [mix_e_values(np.concatenate(each, axis=-1)) for each in (signs, sizes)]
        return mix_e_values(np.stack(both, axis=-1), np.array(self.weights))


class _Lag(_Dependence):
    """Dependence bet whose X is the noise of every learner in each earlier round, at the same and the adjacent coordinates."""

    name = "lag"

    def compute_sums(self, observation: RoundObservation) -> FloatArray:
        products = (observation.bet_targets @ observation.earlier_noise.swapaxes(1, 2)).swapaxes(0, 1)
        return products.reshape(len(products), 4, LAGS, -1)[:, :, observation.lag_slots].reshape(len(products), -1)


class _FarLag(_Bet):
    """Bet that signs follow noise of any learner, of one round farther back, at the same coordinate: all X alike."""

    name = "lag"
    variance = 0.03

    def compute_sums(self, observation: RoundObservation) -> FloatArray:
        return np.concatenate(
            [observation.signs @ observation.far_noise.T, np.abs(observation.signs) @ (observation.far_noise**2).T],
            axis=1,
        )

    def compute_log_e_value(self, sums: FloatArray) -> FloatArray:
        s, v = np.split(sums, 2, axis=-1)
        return mix_e_values(_bet_on_signs(s, v, self.variance))


class _OwnLag(_Dependence):
    """Dependence bet whose X is a learner's own noise in each earlier round; may be added over learners."""

    name = "lag"

    def compute_sums(self, observation: RoundObservation) -> FloatArray:
        earlier = observation.earlier_noise.reshape(4, LAGS, len(SHIFTS), *observation.known_mask.shape)
        products: FloatArray = np.einsum("klsid,kid->ikls", earlier, observation.bet_targets)[
            :, :, observation.lag_slots
        ]
        return products.reshape(len(products), -1)


class _Past(_Dependence):
    """Dependence bet whose X is the learner's state when it drew the noise."""

    name = "past"

    def compute_sums(self, observation: RoundObservation) -> FloatArray:
        products = (observation.past @ observation.bet_targets[..., None])[..., 0].swapaxes(0, 1)
        return products.reshape(len(products), -1)


class _Copies(_Dependence):
    """Dependence bet whose X is the noise of preceding learners in the same round, at the same and the adjacent coordinates."""

    name = "copies"

    def compute_sums(self, observation: RoundObservation) -> FloatArray:
        products = (observation.bet_targets @ observation.same_round_noise.swapaxes(1, 2)).swapaxes(0, 1)
        earlier = np.tile(np.tri(len(products), k=-1), len(SHIFTS))
        return (products * earlier[:, None]).reshape(len(products), -1)


# ---- stakes ----------------------------------------------------------------------------------------------------------

_BLOCKS = (16, 256)
"""Lengths in rounds of the detectors' blocks: short ones detect gross faults early, long ones detect slight faults at all."""

_LEARNER_BETS: tuple[tuple[_Bet, float], ...] = (
    (_Scale(), 0.2),
    (_Histogram(), 0.1),
    (_LowBits(), 0.1),
    (_Lag(), 0.25),
    (_FarLag(), 0.05),
    (_Past(), 0.1),
    (_Repeats(), 0.2),
)
"""Bets on each learner, and their fractions of its stake."""

_POOLED_BETS: tuple[tuple[_Bet, float], ...] = (
    (_Scale(), 0.25),
    (_Histogram(), 0.1),
    (_LowBits(), 0.1),
    (_OwnLag(), 0.15),
    (_Past(), 0.05),
)
"""Bets on the sums over all learners, and their fractions of the stake on all together."""

_SAME_ROUND_BETS: tuple[tuple[_Bet, float], ...] = ((_Copies(), 0.25), (_Shared(), 0.1))
"""Bets on every learner against the preceding ones in the same round: the mean over learners; fractions as in `_POOLED_BETS`."""


class EProcesses:
    """Sums of all bets and their current e-values: of all learners together, and of every learner.

    Args:
        learners: number of watched learners.

    Attributes:
        log_e_values: `(1 + learners,)` logarithms, since round 0.
        change_log_e_values: the same of the mean of all detectors.
        tests: name of the bet with the largest gain since round 0.
        change_tests: name of the bet with the largest gain in the current blocks.
    """

    def __init__(self, learners: int) -> None:
        self._sums: dict[type[_Bet], FloatArray] = {}  # row 0 since round 0, then those of the blocks
        self._before: FloatArray = np.full((len(_BLOCKS), 1 + learners), -np.inf)  # state of the detectors
        self._rounds = 0
        self._bets = tuple({type(bet): bet for bet, _ in (*_LEARNER_BETS, *_POOLED_BETS, *_SAME_ROUND_BETS)}.values())
        self._now: FloatArray = np.zeros((1 + len(_BLOCKS), 1 + learners))
        self.log_e_values, self.change_log_e_values = np.zeros((2, 1 + learners))
        self.tests = self.change_tests = ("scale",) * (1 + learners)

    def add(self, observation: RoundObservation) -> None:
        """Add one round."""
        self._begin_blocks()
        for bet in self._bets:
            addends = bet.compute_sums(observation)
            sums = self._sums.setdefault(type(bet), np.zeros((1 + len(_BLOCKS), *addends.shape)))
            sums += addends
        self._rounds += 1
        by_learner = [bet.compute_log_e_value(self._sums[type(bet)]) for bet, _ in _LEARNER_BETS]
        pooled = [bet.compute_log_e_value(self._sums[type(bet)].sum(axis=1)) for bet, _ in _POOLED_BETS]
        shared = [mix_e_values(bet.compute_log_e_value(self._sums[type(bet)])) for bet, _ in _SAME_ROUND_BETS]
        all_bets, learner_bets = np.stack([*pooled, *shared], axis=-1), np.stack(by_learner, axis=-1)
        all_mixed = mix_e_values(all_bets, _list_weights(*_POOLED_BETS, *_SAME_ROUND_BETS))
        learners_mixed = mix_e_values(learner_bets, _list_weights(*_LEARNER_BETS))
        self._now = np.concatenate([all_mixed[:, None], learners_mixed], axis=1)
        self.log_e_values = self._now[0]
        self.change_log_e_values = mix_e_values(_update_detector(self._before, self._now[1:]).T)
        self.tests = self._find_strongest_bets(all_bets[0], learner_bets[0])
        self.change_tests = self._find_strongest_bets(all_bets[1:].max(axis=0), learner_bets[1:].max(axis=0))

    def _begin_blocks(self) -> None:
        for k, length in enumerate(_BLOCKS, 1):
            if self._rounds and self._rounds % length == 0:
                self._before[k - 1] = _update_detector(self._before[k - 1], self._now[k])
                for sums in self._sums.values():
                    sums[k] = 0.0

    def _find_strongest_bets(self, all_bets: FloatArray, learner_bets: FloatArray) -> tuple[str, ...]:
        all_names = [bet.name for bet, _ in (*_POOLED_BETS, *_SAME_ROUND_BETS)]
        own_names = [bet.name for bet, _ in _LEARNER_BETS]
        return all_names[int(all_bets.argmax())], *(own_names[k] for k in learner_bets.argmax(axis=-1))


def _list_weights(*bets: tuple[_Bet, float]) -> FloatArray:
    return np.array([weight for _, weight in bets])
