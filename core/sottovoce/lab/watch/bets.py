"""Bets on the law of single numbers, and on whether they are new. How they add up: `bet`."""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from sottovoce.arrays import BoolArray, FloatArray, IntArray
from sottovoce.lab.watch.bet import Bet, krichevsky_trofimov, too_many
from sottovoce.lab.watch.keys import CHANCE
from sottovoce.lab.watch.seen import LAGS, NEAR, Seen
from sottovoce.lab.watch.sequential import mixture

# ---- the law of a number ---------------------------------------------------------------------------------------------


class Scale(Bet):
    """Bets that the scale is another one: a mixture over rates of law Gamma, of mean 1, with `shape` in place of a sample."""

    name = "scale"
    shape = 20.0

    def sums(self, seen: Seen) -> FloatArray:
        return np.stack([seen.sizes.sum(axis=1), seen.known.sum(axis=1)], axis=-1)

    def e(self, sums: FloatArray) -> FloatArray:
        a, total, n = self.shape, sums[..., 0], sums[..., 1]
        e: FloatArray = special.gammaln(a + n) - math.lgamma(a) + a * math.log(a) - (a + n) * np.log(a + total) + total
        return e


def counts(rows: int, cells: int, where: IntArray, kept: FloatArray | BoolArray) -> FloatArray:
    """How many of the numbers of each row, `(rows, numbers)`, are in which cell: `(rows, cells)`."""
    of_row = where + cells * np.arange(rows)[:, None]
    counted = np.bincount(of_row.ravel(), kept.ravel(), rows * cells).astype(np.float64)
    return counted.reshape(rows, cells)


class Histogram(Bet):
    """Bets that the numbers have another law: `F(r)` in equally likely cells; or their sizes, of which less must be learned."""

    name = "histogram"
    cells = 16

    def sums(self, seen: Seen) -> FloatArray:
        below = np.where(seen.signs > 0, 1.0 - 0.5 * seen.tail, 0.5 * seen.tail)
        cell = np.minimum((below * self.cells).astype(np.int64), self.cells - 1)
        return counts(len(cell), self.cells, cell, seen.known)

    def e(self, sums: FloatArray) -> FloatArray:
        half = self.cells // 2
        folded = sums[..., half:] + sums[..., half - 1 :: -1]
        both = [krichevsky_trofimov(each, np.full(each.shape[-1], 1.0 / each.shape[-1])) for each in (sums, folded)]
        return mixture(np.stack(both, axis=-1))


class LowBits(Bet):
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

    def sums(self, seen: Seen) -> FloatArray:
        rows, lost = len(seen.lost), np.minimum(seen.lost, self.even).astype(np.int64)[:, None]
        whole = np.stack([seen.steps, seen.said], axis=1) >> lost  # learners, 2, numbers
        first = 4 * np.arange(self.nibbles)
        kept = np.broadcast_to(lost[..., None] + first + 4 <= self.even, (*whole.shape, self.nibbles))
        of_each = (whole[..., None] >> first & 15) + 16 * (first // 4 + self.nibbles * np.arange(2)[:, None, None])
        nibbles = counts(rows, 32 * self.nibbles, of_each.reshape(rows, -1), kept.reshape(rows, -1))
        marked = whole | (1 << self.zeros - 1)
        ends = np.frexp((marked & -marked).astype(np.float64))[1] - 1 + self.zeros * np.arange(2)[:, None]
        kept = np.broadcast_to(lost + self.zeros <= self.even, ends.shape)
        zeros = counts(rows, 2 * self.zeros, ends.reshape(rows, -1), kept.reshape(rows, -1))
        judged = kept.sum(axis=-1)
        coarse = (judged > 0) & ~(kept & (whole & 1 == 1)).any(axis=-1)
        expected = np.where(judged > 0, 2.0**-judged, 0.0)
        return np.concatenate([nibbles, zeros, coarse, expected], axis=1)

    def e(self, sums: FloatArray) -> FloatArray:
        split = 32 * self.nibbles
        nibbles = sums[..., :split].reshape(*sums.shape[:-1], 2 * self.nibbles, 16)
        zeros = sums[..., split:-4].reshape(*sums.shape[:-1], 2, self.zeros)
        each = (
            krichevsky_trofimov(nibbles, np.full(16, 1 / 16)),
            krichevsky_trofimov(zeros, self.law),
            too_many(sums[..., -4:-2], sums[..., -2:]),
        )
        return mixture(np.stack([mixture(e) for e in each], axis=-1))


# ---- whether a number is new -----------------------------------------------------------------------------------------


def _hits(hits: FloatArray, trials: FloatArray, chance: float) -> FloatArray:
    """Log e-value of so many hits, each of probability `chance` at most."""
    return krichevsky_trofimov(np.stack([hits, trials - hits], axis=-1), np.array([chance, 1.0 - chance]))


class Repeats(Bet):
    """Bets that numbers are zero or heard before: of the last rounds, or, by their keys, at any time.

    Four bets: numbers that are close to zero or to one of the last rounds; what follows a number that was heard before;
    how many are heard before at all; and how many are sums or differences of numbers of the last rounds.
    """

    name = "repeats"

    def sums(self, seen: Seen) -> FloatArray:
        heard, summed = seen.heard, seen.summed
        return np.stack(
            [seen.twice, seen.exact, heard.again, heard.known, heard.expected, summed.before, summed.expected], axis=-1
        )

    def e(self, sums: FloatArray) -> FloatArray:
        twice, exact, again, known, expected, summed, by_chance = np.moveaxis(sums, -1, 0)
        near = _hits(twice, exact, (1 + 2 * LAGS) * NEAR)
        heard = _hits(again, known, CHANCE), too_many(known, expected)
        return mixture(np.stack([near, *heard, too_many(summed, by_chance)], axis=-1))


class Shared(Bet):
    """Bets that learners say the same numbers in one round, numbers that add up to nothing, or sums of what others say."""

    name = "copies"

    def sums(self, seen: Seen) -> FloatArray:
        heard, summed = seen.heard, seen.summed
        return np.stack(
            [heard.again_now, heard.known_now, seen.cancelled, seen.exact, summed.now, summed.expected_now], axis=-1
        ).astype(np.float64)

    def e(self, sums: FloatArray) -> FloatArray:
        again, known, cancelled, exact, summed, by_chance = np.moveaxis(sums, -1, 0)
        either = _hits(again, known, CHANCE), _hits(cancelled, exact, NEAR)
        return mixture(np.stack([*either, too_many(summed, by_chance)], axis=-1))
