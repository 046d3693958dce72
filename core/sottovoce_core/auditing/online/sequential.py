"""Monitoring that may be looked at after every round: e-processes.

An e-process is a bet against a claim that starts with 1. While the claim holds, whoever bets gains nothing on average, so the
stake ever reaches `1/alpha` with probability at most alpha, however often one looks (Ville). All e-values here are
logarithms: alarm at `e >= log(1/alpha)`. Bets on noise: `bet`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from sottovoce_core.arrays import FloatArray

# ---- guesses of a world ----------------------------------------------------------------------------------------------


class Guesses:
    """Bets that guesses of fair coins are right more often than `p = sigmoid(epsilon)`.

    `M_n = prod (q_i/p)^{Z_i} ((1-q_i)/(1-p))^{1-Z_i}`, with Z_i = 1 for a right guess and `q_i = max(p, (c + 1/2)/i)` for c
    right ones before the i-th.

    Args:
        epsilon: the claim.
    """

    def __init__(self, epsilon: float) -> None:
        self._bound = EpsilonBound(np.array([epsilon]))

    @property
    def e(self) -> float:
        return float(self._bound.log_stakes[0])

    def add(self, values: FloatArray) -> None:
        """`values (guesses,)`: 1.0 for a right guess, 0.0 for a wrong one."""
        self._bound.add(values)


class EpsilonBound:
    """Confidence sequence for epsilon: the claims that no bet of `Guesses` has refuted so far.

    Args:
        epsilons: `(claims,)` increasing; what the bound may be.
    """

    def __init__(self, epsilons: FloatArray | None = None) -> None:
        self.epsilons = np.linspace(0.0, 10.0, 1001) if epsilons is None else epsilons
        self.log_stakes: FloatArray = np.zeros(len(self.epsilons))
        """`(claims,)` e-values now."""
        self._highest: FloatArray = np.zeros(len(self.epsilons))
        self._right, self._count = 0.0, 0

    def add(self, values: FloatArray) -> None:
        """`values (guesses,)`: 1.0 for a right guess, 0.0 for a wrong one."""
        right = np.asarray(values, dtype=np.float64)
        before = self._right + np.cumsum(right) - right
        learned = (before + 0.5) / (self._count + 1.0 + np.arange(len(right)))
        epsilons = self.epsilons[:, None]
        odds = np.maximum(special.logit(learned) - epsilons, 0.0) + epsilons  # of q: never below those of p
        gained = special.log_expit(odds) - special.log_expit(epsilons)
        lost = special.log_expit(-odds) - special.log_expit(-epsilons)  # where 1 - p is too small for float64, too
        stakes = np.cumsum(np.where(right > 0, gained, lost), axis=1)
        if len(right):
            self._highest = np.maximum(self._highest, self.log_stakes + stakes.max(axis=1))
            self.log_stakes = self.log_stakes + stakes[:, -1]
        self._right, self._count = self._right + float(right.sum()), self._count + len(right)

    def lower(self, alpha: float) -> float:
        """A bound that epsilon is below with probability at most `alpha`, at whatever time one asks; 0: none."""
        refuted = np.flatnonzero(self._highest >= -math.log(alpha))
        return float(self.epsilons[refuted[-1]]) if refuted.size else 0.0


# ---- many e-values ---------------------------------------------------------------------------------------------------


def mixture(e_values: FloatArray, weights: FloatArray | None = None) -> FloatArray:
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


class Detector:
    """For what breaks in the middle of a run: `R_t = (R_{t-1} + 1) e_t`, for one e-value a step, given the steps before.

    Alarm at `e >= log c`: while the claim holds, the mean number of steps to an alarm is at least c.

    Args:
        shape: of several that run side by side.

    Attributes:
        e: `log R_t`; minus infinity before the first step.
    """

    def __init__(self, *shape: int) -> None:
        self.e: FloatArray = np.full(shape, -np.inf)

    def with_next(self, e_values: FloatArray) -> FloatArray:
        """`log R_t` if the next e-value were this, logarithms; the step may be asked for before it is over.

        At whatever time one asks it is at most the number of steps begun, on average.
        """
        following: FloatArray = np.logaddexp(self.e, 0.0) + e_values
        return following

    def add(self, e_values: FloatArray) -> None:
        """The step is over."""
        self.e = self.with_next(e_values)


def e_bh(e_values: Sequence[float], alpha: float) -> tuple[int, ...]:
    """Which claims are refuted (Wang and Ramdas 2022): at most a share `alpha` wrongly, on average, whatever the dependence.

    Args:
        e_values: logarithms, one a claim (a learner).
        alpha: false discovery rate.

    Returns:
        Their indices, in order.
    """
    n = len(e_values)
    order = sorted(range(n), key=lambda i: -e_values[i])
    refuted = [k for k in range(1, n + 1) if e_values[order[k - 1]] >= math.log(n / (k * alpha))]
    return tuple(sorted(order[: refuted[-1]])) if refuted else ()
