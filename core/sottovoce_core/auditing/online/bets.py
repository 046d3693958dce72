"""Bets on noise: on the law of single numbers, on whether they are new, and on whether they are independent.

Each bet keeps sums over rounds, `(learners, width)`, and knows the e-value that such sums have.

So bets of one learner, of all learners together, and of some rounds only are the same sums, added up otherwise. Every e-value is
that of numbers which come one after another, each independent standard Laplace given all before it; whatever a stake depends
on was known before (`seen`).

Stakes mix all bets, since round 0 and in blocks of rounds, for each learner and for all. Half of the stake is on the
learners, evenly, and half on all of them together: on the same sums added up over learners, which sees what is slight in all,
and on what they have in common in one round, of which nobody can say whose fault it is.
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
    """Logarithm of the weighted mean of e-values: an e-value again, whatever their dependence.

    Args:
        e_values: `(..., bets)` logarithms.
        weights: `(bets,)` that add up to one; None: all alike.
    """
    largest: FloatArray = e_values.max(axis=-1)
    shift = np.where(np.isfinite(largest), largest, 0.0)
    stakes = np.exp(e_values - shift[..., None])
    total = stakes.mean(axis=-1) if weights is None else stakes @ weights
    with np.errstate(divide="ignore"):  # nothing is left
        mixed: FloatArray = np.where(np.isposinf(largest), np.inf, shift + np.log(total))
    return mixed


def _detected(before: FloatArray, e_values: FloatArray) -> FloatArray:
    """Detector of what breaks in the middle of a run: `R_t = (R_{t-1} + 1) e_t`, for one e-value a step, given those before.

    Alarm at `e >= log c`: while the claim holds, the mean number of steps to an alarm is at least c. The step may be asked for
    before it is over: at whatever time one asks, R is at most the number of steps begun, on average.

    Args:
        before: `log R_{t-1}`; minus infinity before the first step.
        e_values: logarithms.
    """
    now: FloatArray = np.logaddexp(before, 0.0) + e_values
    return now


# ---- bet -------------------------------------------------------------------------------------------------------------


class _Bet(ABC):
    """One kind of bet.

    Attributes:
        name: of what it sees.
    """

    name: ClassVar[str]

    @abstractmethod
    def sums(self, seen: RoundObservation) -> FloatArray:
        """What a round adds, `(learners, width)`."""

    @abstractmethod
    def e(self, sums: FloatArray) -> FloatArray:
        """Logarithm of the e-value `(...)` of sums `(..., width)`."""


def _krichevsky_trofimov(counted: FloatArray, law: FloatArray) -> FloatArray:
    """Log e-value of a mixture over all laws on cells against this one, `counted (..., cells)`.

    Krichevsky and Trofimov 1981: the laws are Dirichlet, with one half for each cell.
    """
    cells, n = counted.shape[-1], counted.sum(axis=-1)
    no_bet = math.lgamma(cells / 2) - cells * math.lgamma(0.5)
    each = special.gammaln(counted + 0.5) - counted * np.log(law)
    e: FloatArray = no_bet - special.gammaln(n + cells / 2) + each.sum(axis=-1)
    return e


def _too_many(counted: FloatArray, expected: FloatArray) -> FloatArray:
    """Log e-value of so many events that each were rare, given all before: a mixture over how much more often they come.

    For a rate l, `l^counted exp(-(l - 1) expected)`; rates have the law Gamma(1/2, 1e-4), some thousands at first, above 1:
    only so may `expected` be more than is expected.
    """
    shape, few = 0.5, 1e-4
    after, seen = shape + counted, few + expected
    with np.errstate(divide="ignore"):  # far fewer than expected: nothing is left
        above_one = np.log(special.gammaincc(after, seen)) - math.log(special.gammaincc(shape, few))
    whole = special.gammaln(after) - math.lgamma(shape) + shape * math.log(few) - after * np.log(seen)
    e: FloatArray = whole + above_one + expected
    return e


# ---- the law of a number ---------------------------------------------------------------------------------------------


class _Scale(_Bet):
    """Bets that the scale is another one: a mixture over rates of law Gamma, of mean 1, with `shape` in place of a sample."""

    name = "scale"
    shape = 20.0

    def sums(self, seen: RoundObservation) -> FloatArray:
        return np.stack([seen.sizes.sum(axis=1), seen.known_mask.sum(axis=1)], axis=-1)

    def e(self, sums: FloatArray) -> FloatArray:
        a, total, n = self.shape, sums[..., 0], sums[..., 1]
        e: FloatArray = special.gammaln(a + n) - math.lgamma(a) + a * math.log(a) - (a + n) * np.log(a + total) + total
        return e


def _counts(rows: int, cells: int, where: IntArray, kept: FloatArray | BoolArray) -> FloatArray:
    """How many of the numbers of each row, `(rows, numbers)`, are in which cell: `(rows, cells)`."""
    of_row = where + cells * np.arange(rows)[:, None]
    counted = np.bincount(of_row.ravel(), kept.ravel(), rows * cells).astype(np.float64)
    return counted.reshape(rows, cells)


class _Histogram(_Bet):
    """Bets that the numbers have another law: `F(r)` in equally likely cells; or their sizes, of which less must be learned."""

    name = "histogram"
    cells = 16

    def sums(self, seen: RoundObservation) -> FloatArray:
        below = np.where(seen.signs > 0, 1.0 - 0.5 * seen.tail, 0.5 * seen.tail)
        cell = np.minimum((below * self.cells).astype(np.int64), self.cells - 1)
        return _counts(len(cell), self.cells, cell, seen.known_mask)

    def e(self, sums: FloatArray) -> FloatArray:
        half = self.cells // 2
        folded = sums[..., half:] + sums[..., half - 1 :: -1]
        both = [_krichevsky_trofimov(each, np.full(each.shape[-1], 1.0 / each.shape[-1])) for each in (sums, folded)]
        return mix_e_values(np.stack(both, axis=-1))


class _LowBits(_Bet):
    """Bets that the low bits of noise or of messages, in lattice spacings, are not evenly spread: a coarser lattice.

    Eight nibbles, and how many zeros a number ends with, of both, counted from the lowest bit that float64 resolves; and
    messages whose numbers are all even, where a few are drawn otherwise.
    """

    name = "low bits"
    nibbles, zeros = 8, 12
    law = 2.0 ** -np.minimum(np.arange(1, 13), 11)
    """Of zeros at the end: the last cell is for 11 and more."""
    even = 34
    """So many low bits are evenly spread, to 1e-8 (`(2^even h)^4/720`, h = 2^-40)."""

    def sums(self, seen: RoundObservation) -> FloatArray:
        rows, lost = len(seen.lost_bits), np.minimum(seen.lost_bits, self.even).astype(np.int64)[:, None]
        whole = np.stack([seen.steps, seen.message_steps], axis=1) >> lost  # learners, 2, numbers
        first = 4 * np.arange(self.nibbles)
        kept = np.broadcast_to(lost[..., None] + first + 4 <= self.even, (*whole.shape, self.nibbles))
        of_each = (whole[..., None] >> first & 15) + 16 * (first // 4 + self.nibbles * np.arange(2)[:, None, None])
        nibbles = _counts(rows, 32 * self.nibbles, of_each.reshape(rows, -1), kept.reshape(rows, -1))
        marked = whole | (1 << self.zeros - 1)
        ends = np.frexp((marked & -marked).astype(np.float64))[1] - 1 + self.zeros * np.arange(2)[:, None]
        kept = np.broadcast_to(lost + self.zeros <= self.even, ends.shape)
        zeros = _counts(rows, 2 * self.zeros, ends.reshape(rows, -1), kept.reshape(rows, -1))
        judged = kept.sum(axis=-1)
        coarse = (judged > 0) & ~(kept & (whole & 1 == 1)).any(axis=-1)
        expected = np.where(judged > 0, 2.0**-judged, 0.0)
        return np.concatenate([nibbles, zeros, coarse, expected], axis=1)

    def e(self, sums: FloatArray) -> FloatArray:
        split = 32 * self.nibbles
        nibbles = sums[..., :split].reshape(*sums.shape[:-1], 2 * self.nibbles, 16)
        zeros = sums[..., split:-4].reshape(*sums.shape[:-1], 2, self.zeros)
        each = (
            _krichevsky_trofimov(nibbles, np.full(16, 1 / 16)),
            _krichevsky_trofimov(zeros, self.law),
            _too_many(sums[..., -4:-2], sums[..., -2:]),
        )
        return mix_e_values(np.stack([mix_e_values(e) for e in each], axis=-1))


# ---- whether a number is new -----------------------------------------------------------------------------------------


def _hits(hits: FloatArray, trials: FloatArray, chance: float) -> FloatArray:
    """Log e-value of so many hits, each of probability `chance` at most."""
    return _krichevsky_trofimov(np.stack([hits, trials - hits], axis=-1), np.array([chance, 1.0 - chance]))


class _Repeats(_Bet):
    """Bets that numbers are zero or heard before: of the last rounds, or, by their keys, at any time.

    Four bets: numbers that are close to zero or to one of the last rounds; what follows a number that was heard before;
    how many are heard before at all; and how many are sums or differences of numbers of the last rounds.
    """

    name = "repeats"

    def sums(self, seen: RoundObservation) -> FloatArray:
        heard, summed = seen.key_repeats, seen.sum_repeats
        return np.stack(
            [
                seen.repeat_counts,
                seen.exact_counts,
                heard.followed_repeat_counts,
                heard.repeat_counts,
                heard.expected_counts,
                summed.earlier_counts,
                summed.expected_counts,
            ],
            axis=-1,
        )

    def e(self, sums: FloatArray) -> FloatArray:
        twice, exact, again, known, expected, summed, by_chance = np.moveaxis(sums, -1, 0)
        near = _hits(twice, exact, (1 + 2 * LAGS) * EQUALITY_TOLERANCE)
        heard = _hits(again, known, KEY_MATCH_PROBABILITY), _too_many(known, expected)
        return mix_e_values(np.stack([near, *heard, _too_many(summed, by_chance)], axis=-1))


class _Shared(_Bet):
    """Bets that learners say the same numbers in one round, numbers that add up to nothing, or sums of what others say."""

    name = "copies"

    def sums(self, seen: RoundObservation) -> FloatArray:
        heard, summed = seen.key_repeats, seen.sum_repeats
        return np.stack(
            [
                heard.same_round_followed_counts,
                heard.same_round_repeat_counts,
                seen.cancelled_counts,
                seen.exact_counts,
                summed.same_round_counts,
                summed.expected_same_round_counts,
            ],
            axis=-1,
        ).astype(np.float64)

    def e(self, sums: FloatArray) -> FloatArray:
        again, known, cancelled, exact, summed, by_chance = np.moveaxis(sums, -1, 0)
        either = _hits(again, known, KEY_MATCH_PROBABILITY), _hits(cancelled, exact, EQUALITY_TOLERANCE)
        return mix_e_values(np.stack([*either, _too_many(summed, by_chance)], axis=-1))


# ---- dependence ------------------------------------------------------------------------------------------------------


def _on_signs(s: FloatArray, v: FloatArray, variance: float) -> FloatArray:
    """Log e-value of `S = sum X sign(r)`, `V = sum X^2`.

    Signs are fair whatever the size, so `exp(l S - l^2 V/2)` is an e-process for every l, and so is its mean over normal l.
    """
    e: FloatArray = 0.5 * (s**2 * variance / (1.0 + variance * v) - np.log1p(variance * v))
    return e


def _on_sizes(s: FloatArray, v: FloatArray, rate: float) -> FloatArray:
    """Log e-value of `S = sum X (|r| - 1)`, `V = sum X^2`, with |X| <= 1: exponential numbers are sub-gamma.

    `log E exp(u (|r| - 1)) = -u - log(1 - u) <= u^2/(2 (1 - |u|))`.
    """
    e: FloatArray = rate * s - v * (rate**2 / (2.0 * (1.0 - abs(rate))))
    return e


class _Dependence(_Bet):
    """Bets that signs and sizes follow something that was there before: X, for so many X at once."""

    variances = (0.01, 0.1)
    rates = (-0.3, -0.1, 0.1, 0.3)
    shares = (0.7, 0.3)
    """Of the stake on signs, and on sizes."""

    @abstractmethod
    def sums(self, seen: RoundObservation) -> FloatArray:
        """S and V of signs, S and V of sizes: each `(learners, X)`, one after another."""

    def e(self, sums: FloatArray) -> FloatArray:
        s, v, size, spread = np.split(sums, 4, axis=-1)
        signs = [_on_signs(s, v, variance) for variance in self.variances]
        sizes = [_on_sizes(size, spread, rate) for rate in self.rates]
        both = [mix_e_values(np.concatenate(each, axis=-1)) for each in (signs, sizes)]
        return mix_e_values(np.stack(both, axis=-1), np.array(self.shares))


class _Lag(_Dependence):
    """X: noise of every learner in each of the rounds before, at the same coordinate and beside it."""

    name = "lag"

    def sums(self, seen: RoundObservation) -> FloatArray:
        found = (seen.bet_targets @ seen.earlier_noise.swapaxes(1, 2)).swapaxes(0, 1)
        return found.reshape(len(found), 4, LAGS, -1)[:, :, seen.lag_slots].reshape(len(found), -1)


class _FarLag(_Bet):
    """Bets that signs follow noise of any learner, of one round farther back, at the same coordinate: all X alike."""

    name = "lag"
    variance = 0.03

    def sums(self, seen: RoundObservation) -> FloatArray:
        return np.concatenate([seen.signs @ seen.far_noise.T, np.abs(seen.signs) @ (seen.far_noise**2).T], axis=1)

    def e(self, sums: FloatArray) -> FloatArray:
        s, v = np.split(sums, 2, axis=-1)
        return mix_e_values(_on_signs(s, v, self.variance))


class _OwnLag(_Dependence):
    """X: a learner's own noise in each of the rounds before; may be added up over learners."""

    name = "lag"

    def sums(self, seen: RoundObservation) -> FloatArray:
        before = seen.earlier_noise.reshape(4, LAGS, len(SHIFTS), *seen.known_mask.shape)
        found: FloatArray = np.einsum("klsid,kid->ikls", before, seen.bet_targets)[:, :, seen.lag_slots]
        return found.reshape(len(found), -1)


class _Past(_Dependence):
    """X: what the learner had when it drew."""

    name = "past"

    def sums(self, seen: RoundObservation) -> FloatArray:
        found = (seen.past @ seen.bet_targets[..., None])[..., 0].swapaxes(0, 1)
        return found.reshape(len(found), -1)


class _Copies(_Dependence):
    """X: noise of the learners before this one in the same round, at the same coordinate and beside it."""

    name = "copies"

    def sums(self, seen: RoundObservation) -> FloatArray:
        found = (seen.bet_targets @ seen.same_round_noise.swapaxes(1, 2)).swapaxes(0, 1)
        earlier = np.tile(np.tri(len(found), k=-1), len(SHIFTS))
        return (found * earlier[:, None]).reshape(len(found), -1)


# ---- stakes ----------------------------------------------------------------------------------------------------------

_BLOCKS = (16, 256)
"""Rounds of the detectors' blocks: short ones see what is gross soon, long ones what is slight at all."""

_OWN: tuple[tuple[_Bet, float], ...] = (
    (_Scale(), 0.2),
    (_Histogram(), 0.1),
    (_LowBits(), 0.1),
    (_Lag(), 0.25),
    (_FarLag(), 0.05),
    (_Past(), 0.1),
    (_Repeats(), 0.2),
)
"""Bets on each learner, and their shares of its stake."""

_POOLED: tuple[tuple[_Bet, float], ...] = (
    (_Scale(), 0.25),
    (_Histogram(), 0.1),
    (_LowBits(), 0.1),
    (_OwnLag(), 0.15),
    (_Past(), 0.05),
)
"""Bets on the sums of all learners, and their shares of the stake on all together."""

_SHARED: tuple[tuple[_Bet, float], ...] = ((_Copies(), 0.25), (_Shared(), 0.1))
"""Bets on every learner beside those before it in the same round: the mean over learners; shares as in `_POOLED`."""


class EProcesses:
    """The sums of all bets, and their e-values now: of all learners together, and of every learner.

    Args:
        learners: how many are watched.

    Attributes:
        e: `(1 + learners,)` logarithms, since round 0.
        change: the same of the mean of all detectors.
        tests: which bet has gained most since round 0.
        changed: which has of late.
    """

    def __init__(self, learners: int) -> None:
        self._sums: dict[type[_Bet], FloatArray] = {}  # row 0 since round 0, then those of the blocks
        self._before: FloatArray = np.full((len(_BLOCKS), 1 + learners), -np.inf)  # of the detectors
        self._rounds = 0
        self._bets = tuple({type(bet): bet for bet, _ in (*_OWN, *_POOLED, *_SHARED)}.values())
        self._now: FloatArray = np.zeros((1 + len(_BLOCKS), 1 + learners))
        self.log_e_values, self.change_log_e_values = np.zeros((2, 1 + learners))
        self.tests = self.change_tests = ("scale",) * (1 + learners)

    def add(self, seen: RoundObservation) -> None:
        """A round more."""
        self._begin_blocks()
        for bet in self._bets:
            added = bet.sums(seen)
            kept = self._sums.setdefault(type(bet), np.zeros((1 + len(_BLOCKS), *added.shape)))
            kept += added
        self._rounds += 1
        own = [bet.e(self._sums[type(bet)]) for bet, _ in _OWN]
        pooled = [bet.e(self._sums[type(bet)].sum(axis=1)) for bet, _ in _POOLED]
        shared = [mix_e_values(bet.e(self._sums[type(bet)])) for bet, _ in _SHARED]
        on_all, on_each = np.stack([*pooled, *shared], axis=-1), np.stack(own, axis=-1)
        together, apart = mix_e_values(on_all, _shares(*_POOLED, *_SHARED)), mix_e_values(on_each, _shares(*_OWN))
        self._now = np.concatenate([together[:, None], apart], axis=1)
        self.log_e_values, self.change_log_e_values = (
            self._now[0],
            mix_e_values(_detected(self._before, self._now[1:]).T),
        )
        self.tests = self._strongest(on_all[0], on_each[0])
        self.change_tests = self._strongest(on_all[1:].max(axis=0), on_each[1:].max(axis=0))

    def _begin_blocks(self) -> None:
        for k, length in enumerate(_BLOCKS, 1):
            if self._rounds and self._rounds % length == 0:
                self._before[k - 1] = _detected(self._before[k - 1], self._now[k])
                for kept in self._sums.values():
                    kept[k] = 0.0

    def _strongest(self, on_all: FloatArray, on_each: FloatArray) -> tuple[str, ...]:
        all_names = [bet.name for bet, _ in (*_POOLED, *_SHARED)]
        own_names = [bet.name for bet, _ in _OWN]
        return all_names[int(on_all.argmax())], *(own_names[k] for k in on_each.argmax(axis=-1))


def _shares(*bets: tuple[_Bet, float]) -> FloatArray:
    return np.array([share for _, share in bets])
