"""Monitoring that may be looked at after every round: e-processes.

An e-process is a bet against a claim that starts with 1. While the claim holds, whoever bets gains nothing on average, so the
stake ever reaches `1/alpha` with probability at most alpha, however often one looks (Ville). All e-values here are
logarithms: alarm at `e >= log(1/alpha)`.

The conformance processes take, round by round, standard Laplace numbers (`conformance.Residuals.values`); what is
not a number is left out. That the numbers are on a lattice of 2^-40 scales is beyond what they see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.auditing.conformance import NEAR

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


# ---- noise -----------------------------------------------------------------------------------------------------------


def _krichevsky_trofimov(counts: IntArray) -> float:
    """Log e-value of a mixture over all laws on cells against equal ones, `counts (..., cells)`, summed over rows."""
    cells, n = counts.shape[-1], counts.sum(axis=-1)
    no_bet = math.lgamma(cells / 2) - cells * math.lgamma(0.5)
    each = special.gammaln(counts + 0.5).sum(axis=-1)
    return float(np.sum(n * math.log(cells) + no_bet - special.gammaln(n + cells / 2) + each))


def _cell(values: FloatArray, cells: int) -> IntArray:
    """In which of so many equally likely cells Laplace numbers are."""
    half = 0.5 * np.exp(-np.abs(values))
    probability = np.where(values > 0, 1.0 - half, half)
    return np.minimum((probability * cells).astype(np.int64), cells - 1)


class Histogram:
    """Bets that the numbers have another law: `F(r)` in 16 equally likely cells (Krichevsky and Trofimov 1981)."""

    def __init__(self, cells: int = 16) -> None:
        self._counts = np.zeros(cells, dtype=np.int64)

    @property
    def e(self) -> float:
        return _krichevsky_trofimov(self._counts)

    def add(self, values: FloatArray) -> None:
        cells = len(self._counts)
        self._counts += np.bincount(_cell(values[np.isfinite(values)], cells), minlength=cells)


class Lag:
    """Bets that a number depends on the one before it in the same coordinate: a histogram of quarters for each quarter."""

    def __init__(self) -> None:
        self._counts = np.zeros((4, 4), dtype=np.int64)
        self._before: FloatArray | None = None

    @property
    def e(self) -> float:
        return _krichevsky_trofimov(self._counts)

    def add(self, values: FloatArray) -> None:
        if self._before is not None:
            both = np.isfinite(values) & np.isfinite(self._before)
            np.add.at(self._counts, (_cell(self._before[both], 4), _cell(values[both], 4)), 1)
        self._before = values.copy()


class Repeats:
    """Bets that one number in a hundred is zero, or equal to the one before it in the same coordinate."""

    share = 0.01

    def __init__(self) -> None:
        self._repeated, self._count = 0, 0
        self._before: FloatArray | None = None

    @property
    def e(self) -> float:
        gain, loss = math.log(self.share / (2 * NEAR)), math.log((1 - self.share) / (1 - 2 * NEAR))
        return self._repeated * gain + (self._count - self._repeated) * loss

    def add(self, values: FloatArray) -> None:
        repeated = np.abs(values) < NEAR
        if self._before is not None:
            repeated |= np.abs(values - self._before) < NEAR
        self._repeated += int(np.count_nonzero(repeated))
        self._count += int(np.count_nonzero(np.isfinite(values)))
        self._before = values.copy()


class Scale:
    """Bets that the scale is another one: a mixture over rates of law Gamma, of mean 1, with `shape` in place of a sample."""

    shape = 20.0

    def __init__(self) -> None:
        self._total, self._count = 0.0, 0

    @property
    def e(self) -> float:
        a, n, total = self.shape, self._count, self._total
        return math.lgamma(a + n) - math.lgamma(a) + a * math.log(a) - (a + n) * math.log(a + total) + total

    def add(self, values: FloatArray) -> None:
        sizes = np.abs(values[np.isfinite(values)])
        self._total += float(sizes.sum())
        self._count += sizes.size


class Conformance:
    """The mean of all bets on noise: an e-process, whatever their dependence."""

    def __init__(self) -> None:
        self.bets: tuple[Histogram | Lag | Repeats | Scale, ...] = (Histogram(), Lag(), Repeats(), Scale())

    @property
    def e(self) -> float:
        return mean([bet.e for bet in self.bets])

    @property
    def strongest(self) -> str:
        """Name of the bet that has gained most, in lower case."""
        return type(max(self.bets, key=lambda bet: bet.e)).__name__.lower()

    def add(self, values: FloatArray) -> None:
        """`values (dim,)` of one round; the same coordinates in every round."""
        for bet in self.bets:
            bet.add(values)


# ---- many e-values ---------------------------------------------------------------------------------------------------


def mean(e_values: Sequence[float]) -> float:
    """The mean of e-values, both as logarithms: an e-value again, whatever their dependence."""
    largest = max(e_values)
    if math.isinf(largest):
        return largest
    return largest + math.log(math.fsum(math.exp(e - largest) for e in e_values) / len(e_values))


class Detector:
    """For what breaks in the middle of a run: `R_t = (R_{t-1} + 1) e_t`, for one e-value a round, given the rounds before.

    Alarm at `e >= log c`: while the claim holds, the mean number of rounds to an alarm is at least c.
    """

    def __init__(self) -> None:
        self._log = -math.inf

    @property
    def e(self) -> float:
        """`log R_t`; minus infinity before the first round."""
        return self._log

    def add(self, values: FloatArray) -> None:
        """`values (rounds,)`: log e-values, such as those of `Conformance` processes of one round each."""
        for value in values:
            self._log = float(np.logaddexp(self._log, 0.0) + value)


class Changes:
    """A `Detector` of blocks of rounds, which may be asked within a block, too: `(R_{b-1} + 1) e`, e of the block so far.

    A block begins its bets anew, so what was right for long does not hide what has broken since. While the claim holds it is
    at most the number of blocks begun, on average, at whatever time one asks: the mean number of rounds to an alarm at
    `e >= log c` is at least c.

    Args:
        length: rounds in a block.
    """

    def __init__(self, length: int) -> None:
        self._length, self._rounds = length, 0
        self._before, self.block = Detector(), Conformance()

    @property
    def e(self) -> float:
        return float(np.logaddexp(self._before.e, 0.0)) + self.block.e

    def add(self, values: FloatArray) -> None:
        """`values (dim,)` of one round, as in `Conformance`."""
        if self._rounds == self._length:
            self._before.add(np.array([self.block.e]))
            self.block, self._rounds = Conformance(), 0
        self.block.add(values)
        self._rounds += 1


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
