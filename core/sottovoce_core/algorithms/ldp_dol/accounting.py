"""What LDP-DOL's messages cost (Chen & Wang 2025, section IV).

With the received messages fixed, a learner's messages are independent Laplace vectors around its clean states. So the loss of
message t is at most `sqrt(n) Phi_t / rho_t`, where `Phi_t` bounds the l2 change of `theta_t` (`sensitivity`).

Of infinitely many messages: the recursion runs to a round T1; from there on `Phi_t <= K (t+1)^-p` with `p = 1 + v - u`, and the
rest sums to `sqrt(2n)/sigma K zeta(p + varsigma, T1 + 1)` (Hurwitz).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np

from sottovoce_core.algorithms.ldp_dol.sensitivity import (
    LearnerScales,
    Mode,
    Schedules,
    SensitivityRecursion,
    first_record,
    require_mode,
)
from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.errors import SpecError
from sottovoce_core.noise import grid
from sottovoce_core.optional import get_extra
from sottovoce_core.privacy.accountant import FirstRecord
from sottovoce_core.privacy.guarantee import Grounds, Mechanism, Regularity

_LONGEST_HEAD = 2**20
"""Rounds after which `_infinite_horizon` gives up looking for the start of its tail."""


class LdpDolAccountant(FirstRecord):
    """Running meter of one learner: O(1) a round.

    Args:
        mode: of the recursion.
        known: of the loss.
        schedules: of all learners.
        learner: whose messages these are.
        smallest_own_weight: `min_j |w_jj|` over all learners, for the paper's formula (default: the own weight).
        own_weight_at: `|w_ii|` by round, where it changes (default: always the learner's own weight).

    Raises:
        CheckFailed: the mode does not apply to the loss (`require_mode`).
    """

    mechanism = Mechanism.LAPLACE
    any_messages = True
    pauses = True

    def __init__(
        self,
        mode: Mode,
        known: Regularity,
        schedules: Schedules,
        learner: LearnerScales,
        smallest_own_weight: float | None = None,
        own_weight_at: Callable[[int], float] | None = None,
    ) -> None:
        self._mode, self._known, self._schedules, self._learner = mode, known, schedules, learner
        self._smallest = learner.own_weight if smallest_own_weight is None else smallest_own_weight
        self._changes = own_weight_at is not None
        self._sensitivity = SensitivityRecursion(mode, known, schedules, own_weight_at or learner.own_weight)
        self._root = math.sqrt(learner.dim)
        proof = (
            "Chen & Wang 2025, Theorem 5 with (17)-(22) and the learner's own |w_ii|; sottovoce_core.algorithms.ldp_dol"
        )
        self.grounds = Grounds(mode, proof, known.constants(learner.own_weight))

    @property
    def sensitivity(self) -> float:
        """`Phi_t` of the current round: l2."""
        return self._sensitivity.phi

    def next_loss(self) -> float:
        """`(sqrt(n) Phi_t + n grid_t) / rho_t`, or 0 while nothing can differ.

        The release rounds the state to a lattice, which can part two states by one more spacing in every coordinate.
        """
        if self._sensitivity.phi == 0.0:
            return 0.0
        scale = self._learner.laplace_scale(self._sensitivity.t)
        return (self._root * self._sensitivity.phi + self._learner.dim * float(grid(scale))) / scale

    def advance(self, records: int, replaced: int | None = None) -> None:
        self._sensitivity.advance(records, self.differ(records, replaced))

    def paper(self, rounds: int) -> FloatArray:
        """Theorem 5-(i).

        Its double sum is recursion (19), with `w_bar = min_j |w_jj|` in place of the own weight and the ridge as part of L.
        It knows neither batches nor a diameter. T rounds send messages 0..T-1; the paper sums to T.
        """
        smoothness = self._known.smoothness + self._known.ridge
        theirs = replace(self._known, smoothness=smoothness, ridge=0.0, diameter=math.inf)
        return np.cumsum(
            first_record(SensitivityRecursion("loose", theirs, self._schedules, self._smallest), self._learner, rounds)
        )

    def infinite_horizon(self, counts: IntArray, replaced: IntArray | None) -> float:
        """Of one replaced record among at least the smallest batch a round; what is used again has no end to be planned for."""
        batch = int(counts.min())
        if self._changes or batch == 0 or (replaced is not None and replaced.sum() > 1):
            return math.inf
        return _infinite_horizon(self._mode, self._known, self._schedules, self._learner, batch)


def _infinite_horizon(
    mode: Mode, known: Regularity, schedules: Schedules, learner: LearnerScales, batch_size: int = 1
) -> float:
    """Bound on epsilon over infinitely many rounds, each bringing at least `batch_size` records, one of all replaced.

    Infinite where there is no such bound or it is out of reach: `u >= v`, mode `loose`, an unknown L, or T1 above
    `_LONGEST_HEAD`. It leaves out the lattice term of a loss, about `n 2^-40` a round at most, whose sum diverges.

    Raises:
        CheckFailed: the mode does not apply to the loss.
        SpecError: SciPy is missing.
    """
    require_mode(mode, known)
    if schedules.u >= schedules.v or mode == "loose" or known.smoothness == math.inf:
        return math.inf
    tails = (True, False) if mode == "best" and known.convex_step else (mode == "convex",)
    return min(_head_and_tail(mode, known, schedules, learner, batch_size, tail) for tail in tails)


def _head_and_tail(
    mode: Mode, known: Regularity, schedules: Schedules, learner: LearnerScales, batch_size: int, convex: bool
) -> float:
    """The bound of `_infinite_horizon` with the tail of mode `convex`, or of `smooth`."""
    try:
        from scipy.special import zeta
    except ImportError:
        raise SpecError(f"an infinite-horizon bound needs SciPy: {get_extra('audit')}") from None
    start = _tail_start(known, schedules, learner.own_weight, convex)
    if start is None:
        return math.inf
    t1, margin = start
    head, phi = _head(mode, known, schedules, learner, batch_size, t1)
    p = 1.0 + schedules.v - schedules.u
    k = max(schedules.lam0 * known.change / batch_size / margin, phi * math.pow(t1 + 1.0, p))
    return head + math.sqrt(2.0 * learner.dim) / learner.sigma * k * float(zeta(p + learner.varsigma, t1 + 1.0))


@lru_cache
def _head(
    mode: Mode, known: Regularity, schedules: Schedules, learner: LearnerScales, batch_size: int, rounds: int
) -> tuple[float, float]:
    """The privacy loss of the first `rounds` rounds, up to a million, and `Phi` after them; most learners of a run share it."""
    sensitivity = SensitivityRecursion(mode, known, schedules, learner.own_weight)
    return math.fsum(first_record(sensitivity, learner, rounds, batch_size)), sensitivity.phi


def _tail_start(known: Regularity, schedules: Schedules, a: float, convex: bool) -> tuple[int, float] | None:
    """First power of two T1 with `c' >= a gamma_0 / 2`, and `c'`; None if there is none up to `_LONGEST_HEAD`.

    From T1 on, a step must shrink Phi by `1 - c (t+1)^-u`. That needs `|s_t| <= 1 - a gamma_t` (for `convex`, of
    `s_t - lambda_t L` too), so coupling and ridge must have become small enough not to overshoot.
    """
    growth = 0.0 if convex else known.smoothness * schedules.lam0
    push = 2 * known.ridge + known.smoothness if convex else known.ridge
    t1 = 1
    while t1 <= _LONGEST_HEAD:
        c = a * schedules.gam0 - growth * (t1 + 1.0) ** (schedules.u - schedules.v)
        margin = c - (1.0 + schedules.v - schedules.u) * (t1 + 1.0) ** (schedules.u - 1.0)
        steady = schedules.step_size(t1) * push <= 2.0 * (1.0 - a * schedules.coupling(t1))
        if steady and 0.0 < a * schedules.gam0 / 2.0 <= margin:
            return t1, margin
        t1 *= 2
    return None
