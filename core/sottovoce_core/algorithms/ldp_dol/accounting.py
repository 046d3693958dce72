"""What LDP-DOL's messages cost (Chen & Wang 2025, section IV).

With the received messages fixed, a learner's messages are independent Laplace vectors around its clean states. So the loss of
message t is at most `sqrt(n) Phi_t / rho_t`, where `Phi_t` bounds the l2 change of `theta_t`.

Of infinitely many messages: the recursion runs to a round T1; from there on `Phi_t <= K (t+1)^-p` with `p = 1 + v - u`, and the
rest sums to `sqrt(2n)/sigma K zeta(p + varsigma, T1 + 1)` (Hurwitz).

The clean state `theta_t` is then a function of the learner's records, and `Phi_t` obeys a recursion in scalars that depends
on no data:

    s_t       = 1 - a gamma_t - lambda_t r
    loose     |s_t| Phi + lambda_t (L Phi + C)                                  (19), Theorem 5-(i)
    smooth    |s_t| Phi + lambda_t (L Phi + C m_t/n_t)                          (22)
    convex    max(|s_t|, |s_t - lambda_t L|) Phi + lambda_t C m_t/n_t
    clip      |s_t| Phi + lambda_t min(L Phi + C m_t/n_t, 2G)
    best      the least of those that apply, in every round anew

`n_t` records were seen up to round t, `m_t` of them replaced; with one record a round, the first one replaced,
`m_t/n_t = 1/(t+1)`. A history gradient is a mean of `n_t` record gradients. Replacing changes `m_t` of them, each by at
most C; moving theta by Phi changes it by at most L Phi, or 2G if each is clipped. `convex` holds because a gradient
step on a convex L-smooth f contracts. Projection does not expand, and no two states are further apart than the
diameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.errors import AssumptionViolated, SpecError
from sottovoce_core.noise import lattice_spacing
from sottovoce_core.optional import format_install_hint
from sottovoce_core.privacy.accountant import FirstRecordAccountant
from sottovoce_core.privacy.guarantee import GuaranteeBasis, Mechanism, Regularity

# ---- sensitivity ------------------------------------------------------------------------------------------------------

AccountingMode = Literal["loose", "smooth", "convex", "clip", "best"]
_SQRT2 = math.sqrt(2.0)


@dataclass(frozen=True, slots=True)
class SharedSchedules:
    """The numbers that all learners share."""

    lam0: float
    v: float
    gam0: float
    u: float

    def step_size(self, t: int) -> float:
        """`lambda_t = lambda_0 / (t+1)^v`."""
        return self.lam0 * math.pow(t + 1.0, -self.v)

    def coupling(self, t: int) -> float:
        """`gamma_t = gamma_0 / (t+1)^u`."""
        return self.gam0 * math.pow(t + 1.0, -self.u)


@dataclass(frozen=True, slots=True)
class LearnerScales:
    """The numbers of one learner: `a = |w_ii|`, dimension n, noise size sigma and growth varsigma."""

    own_weight: float
    dim: int
    sigma: float
    varsigma: float

    def laplace_scale(self, t: int) -> float:
        """`rho_t = sigma / sqrt(2) * (t+1)^varsigma`."""
        return self.sigma / _SQRT2 * math.pow(t + 1.0, self.varsigma)


def require_mode(mode: AccountingMode, known: Regularity) -> None:
    """Refuse a mode whose proof does not cover this loss. `best` falls back to what applies, so it never fails.

    Raises:
        AssumptionViolated: SMOOTHNESS, NOT_CONVEX or CONVEX_CLIPPED.
    """
    if mode in ("smooth", "convex") and known.smoothness == math.inf:
        text = 'this accounting mode needs a known smoothness constant; use mode "clip"'
        raise AssumptionViolated("SMOOTHNESS", f'{text}, got mode "{mode}" with smoothness inf')
    if mode == "convex" and not known.is_convex:
        raise AssumptionViolated("NOT_CONVEX", 'this loss is not convex; mode "convex" does not apply')
    if mode == "convex" and not known.can_use_convex_mode:
        text = 'clipped gradients of this loss are not gradients of a convex function; mode "convex" does not apply'
        raise AssumptionViolated("CONVEX_CLIPPED", f"{text}, got clip_norm={known.clip_norm}")


class _SensitivityRecursion:
    """`Phi_t`, round by round: O(1) a round.

    Args:
        mode: of the recursion.
        known: of the loss.
        schedules: of all learners.
        own_weight: `a = |w_ii|`; by round, where it changes.

    Raises:
        AssumptionViolated: the mode does not apply to the loss (`require_mode`).
    """

    def __init__(
        self,
        mode: AccountingMode,
        known: Regularity,
        schedules: SharedSchedules,
        own_weight: float | Callable[[int], float],
    ) -> None:
        require_mode(mode, known)
        self._mode, self._known, self._schedules = mode, known, schedules
        self._own_weight = own_weight if callable(own_weight) else lambda t: own_weight
        self._seen = self._replaced = 0
        self.t, self.phi = 0, 0.0

    def advance(self, records: int, replaced: int) -> None:
        """The round brought `records` records, `replaced` of which differ. A record that is used again is replaced again."""
        self._seen += records
        self._replaced += replaced
        if self._replaced:
            lam = self._schedules.step_size(self.t)
            s = 1.0 - self._own_weight(self.t) * self._schedules.coupling(self.t) - lam * self._known.ridge
            phi = self._step(self.phi, s, lam, self._replaced / self._seen)
            # In this order, not-a-number (0 * inf) is the diameter.
            self.phi = phi if phi < self._known.diameter else self._known.diameter
        self.t += 1

    def _step(self, phi: float, s: float, lam: float, share: float) -> float:
        """`Phi_{t+1}`, before the cap at the diameter, by the recursions of the module's head."""
        known, mode = self._known, self._mode
        moved = known.smoothness * phi if phi > 0.0 else 0.0  # L may be infinite
        if mode == "loose":
            return abs(s) * phi + lam * (moved + known.clipped_gradient_change)
        if mode == "smooth":
            return abs(s) * phi + lam * (moved + share * known.clipped_gradient_change)
        clip = abs(s) * phi + lam * min(
            moved + share * known.clipped_gradient_change, 2 * known.clip_norm
        )  # never above `smooth`
        if mode == "clip" or (mode == "best" and not known.can_use_convex_mode):
            return clip
        convex = max(abs(s), abs(s - lam * known.smoothness)) * phi + lam * share * known.clipped_gradient_change
        return convex if mode == "convex" else min(clip, convex)


def _first_record(
    sensitivity: _SensitivityRecursion, learner: LearnerScales, rounds: int, batch_size: int = 1
) -> list[float]:
    """`sqrt(n) Phi_t / rho_t` of so many rounds, without lattice: equal batches, one record of the first one replaced."""
    losses = []
    for t in range(rounds):
        losses.append(math.sqrt(learner.dim) * sensitivity.phi / learner.laplace_scale(t))
        sensitivity.advance(batch_size, int(t == 0))
    return losses


# ---- accounting -------------------------------------------------------------------------------------------------------

_MAX_HEAD_ROUNDS = 2**20
"""Rounds after which `_infinite_horizon` gives up looking for the start of its tail."""


class LdpDolAccountant(FirstRecordAccountant):
    """Running meter of one learner: O(1) a round.

    Args:
        mode: of the recursion.
        known: of the loss.
        schedules: of all learners.
        learner: whose messages these are.
        smallest_own_weight: `min_j |w_jj|` over all learners, for the paper's formula (default: the own weight).
        own_weight_at: `|w_ii|` by round, where it changes (default: always the learner's own weight).

    Raises:
        AssumptionViolated: the mode does not apply to the loss (`require_mode`).
    """

    mechanism = Mechanism.LAPLACE
    is_valid_for_any_messages = True
    can_pause = True

    def __init__(
        self,
        mode: AccountingMode,
        regularity: Regularity,
        schedules: SharedSchedules,
        learner: LearnerScales,
        min_own_weight: float | None = None,
        own_weight_schedule: Callable[[int], float] | None = None,
    ) -> None:
        self._mode, self._known, self._schedules, self._learner = mode, regularity, schedules, learner
        self._smallest = learner.own_weight if min_own_weight is None else min_own_weight
        self._changes = own_weight_schedule is not None
        self._sensitivity = _SensitivityRecursion(
            mode, regularity, schedules, own_weight_schedule or learner.own_weight
        )
        self._root = math.sqrt(learner.dim)
        proof = (
            "Chen & Wang 2025, Theorem 5 with (17)-(22) and the learner's own |w_ii|; sottovoce_core.algorithms.ldp_dol"
        )
        self.basis = GuaranteeBasis(mode, proof, regularity.constants(learner.own_weight))

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
        return (self._root * self._sensitivity.phi + self._learner.dim * float(lattice_spacing(scale))) / scale

    def advance(self, records: int, n_replaced: int | None = None) -> None:
        self._sensitivity.advance(records, self.count_replaced(records, n_replaced))

    def paper_epsilon(self, rounds: int) -> FloatArray:
        """Theorem 5-(i).

        Its double sum is recursion (19), with `w_bar = min_j |w_jj|` in place of the own weight and the ridge as part of L.
        It knows neither batches nor a diameter. T rounds send messages 0..T-1; the paper sums to T.
        """
        smoothness = self._known.smoothness + self._known.ridge
        theirs = replace(self._known, smoothness=smoothness, ridge=0.0, diameter=math.inf)
        return np.cumsum(
            _first_record(
                _SensitivityRecursion("loose", theirs, self._schedules, self._smallest), self._learner, rounds
            )
        )

    def infinite_horizon_epsilon(self, counts: IntArray, n_replaced: IntArray | None) -> float:
        """Of one replaced record among at least the smallest batch a round; what is used again has no end to be planned for."""
        batch = int(counts.min())
        if self._changes or batch == 0 or (n_replaced is not None and n_replaced.sum() > 1):
            return math.inf
        return _infinite_horizon(self._mode, self._known, self._schedules, self._learner, batch)


def _infinite_horizon(
    mode: AccountingMode, known: Regularity, schedules: SharedSchedules, learner: LearnerScales, batch_size: int = 1
) -> float:
    """Bound on epsilon over infinitely many rounds, each bringing at least `batch_size` records, one of all replaced.

    Infinite where there is no such bound or it is out of reach: `u >= v`, mode `loose`, an unknown L, or T1 above
    `_MAX_HEAD_ROUNDS`. It leaves out the lattice term of a loss, about `n 2^-40` a round at most, whose sum diverges.

    Raises:
        AssumptionViolated: the mode does not apply to the loss.
        SpecError: SciPy is missing.
    """
    require_mode(mode, known)
    if schedules.u >= schedules.v or mode == "loose" or known.smoothness == math.inf:
        return math.inf
    tails = (True, False) if mode == "best" and known.can_use_convex_mode else (mode == "convex",)
    return min(_head_and_tail(mode, known, schedules, learner, batch_size, tail) for tail in tails)


def _head_and_tail(
    mode: AccountingMode,
    known: Regularity,
    schedules: SharedSchedules,
    learner: LearnerScales,
    batch_size: int,
    convex: bool,
) -> float:
    """The bound of `_infinite_horizon` with the tail of mode `convex`, or of `smooth`."""
    try:
        from scipy.special import zeta
    except ImportError:
        raise SpecError(f"an infinite-horizon bound needs SciPy: {format_install_hint('audit')}") from None
    start = _tail_start(known, schedules, learner.own_weight, convex)
    if start is None:
        return math.inf
    t1, margin = start
    head, phi = _head(mode, known, schedules, learner, batch_size, t1)
    p = 1.0 + schedules.v - schedules.u
    k = max(schedules.lam0 * known.clipped_gradient_change / batch_size / margin, phi * math.pow(t1 + 1.0, p))
    return head + math.sqrt(2.0 * learner.dim) / learner.sigma * k * float(zeta(p + learner.varsigma, t1 + 1.0))


@lru_cache
def _head(
    mode: AccountingMode,
    known: Regularity,
    schedules: SharedSchedules,
    learner: LearnerScales,
    batch_size: int,
    rounds: int,
) -> tuple[float, float]:
    """The privacy loss of the first `rounds` rounds, up to a million, and `Phi` after them; most learners of a run share it."""
    sensitivity = _SensitivityRecursion(mode, known, schedules, learner.own_weight)
    return math.fsum(_first_record(sensitivity, learner, rounds, batch_size)), sensitivity.phi


def _tail_start(known: Regularity, schedules: SharedSchedules, a: float, convex: bool) -> tuple[int, float] | None:
    """First power of two T1 with `c' >= a gamma_0 / 2`, and `c'`; None if there is none up to `_MAX_HEAD_ROUNDS`.

    From T1 on, a step must shrink Phi by `1 - c (t+1)^-u`. That needs `|s_t| <= 1 - a gamma_t` (for `convex`, of
    `s_t - lambda_t L` too), so coupling and ridge must have become small enough not to overshoot.
    """
    growth = 0.0 if convex else known.smoothness * schedules.lam0
    push = 2 * known.ridge + known.smoothness if convex else known.ridge
    t1 = 1
    while t1 <= _MAX_HEAD_ROUNDS:
        c = a * schedules.gam0 - growth * (t1 + 1.0) ** (schedules.u - schedules.v)
        margin = c - (1.0 + schedules.v - schedules.u) * (t1 + 1.0) ** (schedules.u - 1.0)
        steady = schedules.step_size(t1) * push <= 2.0 * (1.0 - a * schedules.coupling(t1))
        if steady and 0.0 < a * schedules.gam0 / 2.0 <= margin:
            return t1, margin
        t1 *= 2
    return None
