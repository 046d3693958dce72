"""Bets on what a number depends on: noise of the rounds before, of other learners, and what a learner had when it drew."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.lab.watch.bet import Bet
from sottovoce.lab.watch.seen import LAGS, SHIFTS, Seen, shifted
from sottovoce.lab.watch.sequential import mixture


def on_signs(s: FloatArray, v: FloatArray, variance: float) -> FloatArray:
    """Log e-value of `S = sum X sign(r)`, `V = sum X^2`.

    Signs are fair whatever the size, so `exp(l S - l^2 V/2)` is an e-process for every l, and so is its mean over normal l.
    """
    e: FloatArray = 0.5 * (s**2 * variance / (1.0 + variance * v) - np.log1p(variance * v))
    return e


def on_sizes(s: FloatArray, v: FloatArray, rate: float) -> FloatArray:
    """Log e-value of `S = sum X (|r| - 1)`, `V = sum X^2`, with |X| <= 1: exponential numbers are sub-gamma.

    `log E exp(u (|r| - 1)) = -u - log(1 - u) <= u^2/(2 (1 - |u|))`.
    """
    e: FloatArray = rate * s - v * (rate**2 / (2.0 * (1.0 - abs(rate))))
    return e


class Dependence(Bet):
    """Bets that signs and sizes follow something that was there before: X, for so many X at once."""

    variances = (0.01, 0.1)
    rates = (-0.3, -0.1, 0.1, 0.3)
    shares = (0.7, 0.3)
    """Of the stake on signs, and on sizes."""

    @abstractmethod
    def sums(self, seen: Seen) -> FloatArray:
        """S and V of signs, S and V of sizes: each `(learners, X)`, one after another."""

    def e(self, sums: FloatArray) -> FloatArray:
        s, v, size, spread = np.split(sums, 4, axis=-1)
        signs = [on_signs(s, v, variance) for variance in self.variances]
        sizes = [on_sizes(size, spread, rate) for rate in self.rates]
        both = [mixture(np.concatenate(each, axis=-1)) for each in (signs, sizes)]
        return mixture(np.stack(both, axis=-1), np.array(self.shares))


def excess(seen: Seen) -> FloatArray:
    """Sizes without their mean, 0 where unknown."""
    return seen.sizes - seen.known


class Lag(Dependence):
    """X: noise of every learner in each of the rounds before, at the same coordinate and beside it."""

    name = "lag"

    def sums(self, seen: Seen) -> FloatArray:
        before, rows = seen.before, len(seen.known)
        found = np.stack(
            [
                seen.signs @ before.normal.T,
                np.abs(seen.signs) @ before.squares.T,
                excess(seen) @ before.even.T,
                seen.known @ before.even_squares.T,
            ],
            axis=1,
        )
        return found.reshape(rows, 4, LAGS, -1)[:, :, before.order].reshape(rows, -1)


class FarLag(Bet):
    """Bets that signs follow noise of any learner, of one round farther back, at the same coordinate: all X alike."""

    name = "lag"
    variance = 0.03

    def sums(self, seen: Seen) -> FloatArray:
        return np.concatenate([seen.signs @ seen.far.T, np.abs(seen.signs) @ (seen.far**2).T], axis=1)

    def e(self, sums: FloatArray) -> FloatArray:
        s, v = np.split(sums, 2, axis=-1)
        return mixture(on_signs(s, v, self.variance))


class OwnLag(Dependence):
    """X: a learner's own noise in each of the rounds before; may be added up over learners."""

    name = "lag"

    def sums(self, seen: Seen) -> FloatArray:
        before, rows = seen.before, len(seen.known)

        def own(x: FloatArray, y: FloatArray) -> FloatArray:
            sums: FloatArray = np.einsum("lsid,id->ils", x.reshape(LAGS, len(SHIFTS), *y.shape), y)
            return sums[:, before.order]

        found = np.stack(
            [
                own(before.normal, seen.signs),
                own(before.squares, np.abs(seen.signs)),
                own(before.even, excess(seen)),
                own(before.even_squares, seen.known),
            ],
            axis=1,
        )
        return found.reshape(rows, -1)


class Past(Dependence):
    """X: what the learner had when it drew."""

    name = "past"

    def sums(self, seen: Seen) -> FloatArray:
        x = seen.past
        size = np.clip(np.abs(x) - 1.0, -1.0, 1.0)
        pairs = ((x, seen.signs), (x**2, np.abs(seen.signs)), (size, excess(seen)), (size**2, seen.known))
        return np.concatenate([(left @ right[..., None])[..., 0] for left, right in pairs], axis=1)


class Copies(Dependence):
    """X: noise of the learners before this one in the same round, at the same coordinate and beside it."""

    name = "copies"

    def sums(self, seen: Seen) -> FloatArray:
        normal, even = shifted(seen.normal), shifted(seen.even)
        found = np.stack(
            [
                seen.signs @ normal.T,
                np.abs(seen.signs) @ (normal**2).T,
                excess(seen) @ even.T,
                seen.known @ (even**2).T,
            ],
            axis=1,
        )
        rows = len(seen.known)
        earlier = np.tile(np.tri(rows, k=-1), len(SHIFTS))
        return (found * earlier[:, None]).reshape(rows, -1)
