"""Privacy accountant of LDP-DOL (Chen & Wang 2025, section IV).

With the received messages fixed, a learner's messages are independent Laplace vectors around its clean states. So the loss of
message t is at most `sqrt(n) Phi_t / rho_t`, where `Phi_t` bounds the l2 change of `theta_t`.

For infinitely many messages, the recursion runs to a round T1; from there on `Phi_t <= K (t+1)^-p` with `p = 1 + v - u`, and
the rest sums to `sqrt(2n)/sigma K zeta(p + varsigma, T1 + 1)` (Hurwitz).

The clean state `theta_t` is then a function of the learner's records, and `Phi_t` obeys a recursion in scalars that depends
on no data:

    s_t       = 1 - a gamma_t - lambda_t r
    loose     |s_t| Phi + lambda_t (L Phi + C)                                  (19), Theorem 5-(i)
    smooth    |s_t| Phi + lambda_t (L Phi + C m_t/n_t)                          (22)
    convex    max(|s_t|, |s_t - lambda_t L|) Phi + lambda_t C m_t/n_t
    clip      |s_t| Phi + lambda_t min(L Phi + C m_t/n_t, 2G)
    best      the smallest of those that apply, chosen in every round

`n_t` records were seen up to round t, `m_t` of them replaced; with one record a round, the first one replaced,
`m_t/n_t = 1/(t+1)`. A history gradient is a mean of `n_t` record gradients. Replacing changes `m_t` of them, each by at
most C; moving theta by Phi changes it by at most L Phi, or 2G if each is clipped. `convex` holds because a gradient
step on a convex L-smooth f contracts. Projection does not expand, and the distance of two states is at most the
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
from sottovoce_core.privacy.guarantee import GuaranteeBasis, Regularity
from sottovoce_core.privacy.loss import Mechanism

# ---- sensitivity ------------------------------------------------------------------------------------------------------

AccountingMode = Literal["loose", "smooth", "convex", "clip", "best"]
_SQRT2 = math.sqrt(2.0)


@dataclass(frozen=True, slots=True)
class SharedSchedules:
    """Step size and coupling schedules that all learners share."""

    lam0: float
    v: float
    gam0: float
    u: float

    def step_size(self, t: int) -> float:
        """Return `lambda_t = lambda_0 / (t+1)^v`."""
        return self.lam0 * math.pow(t + 1.0, -self.v)

    def coupling(self, t: int) -> float:
        """Return `gamma_t = gamma_0 / (t+1)^u`."""
        return self.gam0 * math.pow(t + 1.0, -self.u)


@dataclass(frozen=True, slots=True)
class LearnerScales:
    """Parameters of one learner: `a = |w_ii|`, dimension n, noise size sigma and growth varsigma."""

    own_weight: float
    dim: int
    sigma: float
    varsigma: float

    def laplace_scale(self, t: int) -> float:
        """Return `rho_t = sigma / sqrt(2) * (t+1)^varsigma`."""
        return self.sigma / _SQRT2 * math.pow(t + 1.0, self.varsigma)


def require_mode(mode: AccountingMode, regularity: Regularity) -> None:
    """Raise an error for a mode whose proof does not cover this loss. `best` uses the modes that apply, so it never fails.

    Raises:
        AssumptionViolated: SMOOTHNESS, NOT_CONVEX or CONVEX_CLIPPED.
    """
    if mode in ("smooth", "convex") and regularity.smoothness == math.inf:
        text = 'this accounting mode needs a known smoothness constant; use mode "clip"'
        raise AssumptionViolated("SMOOTHNESS", f'{text}, got mode "{mode}" with smoothness inf')
    if mode == "convex" and not regularity.is_convex:
        raise AssumptionViolated("NOT_CONVEX", 'this loss is not convex; mode "convex" does not apply')
    if mode == "convex" and not regularity.can_use_convex_mode:
        text = 'clipped gradients of this loss are not gradients of a convex function; mode "convex" does not apply'
        raise AssumptionViolated("CONVEX_CLIPPED", f"{text}, got clip_norm={regularity.clip_norm}")


class _SensitivityRecursion:
    """Recursion of `Phi_t`: O(1) a round.

    Args:
        mode: mode of the recursion.
        regularity: constants of the loss.
        schedules: schedules of all learners.
        own_weight: `a = |w_ii|`; by round, if it changes.

    Raises:
        AssumptionViolated: the mode does not apply to the loss (`require_mode`).
    """

    def __init__(
        self,
        mode: AccountingMode,
        regularity: Regularity,
        schedules: SharedSchedules,
        own_weight: float | Callable[[int], float],
    ) -> None:
        require_mode(mode, regularity)
        self._mode, self._regularity, self._schedules = mode, regularity, schedules
        self._own_weight = own_weight if callable(own_weight) else lambda t: own_weight
        self._seen = self._replaced = 0
        self.t, self.phi = 0, 0.0

    def advance(self, records: int, replaced: int) -> None:
        """End a round with `records` records; `replaced` of them differ. A reused record is replaced again."""
        self._seen += records
        self._replaced += replaced
        if self._replaced:
            lam = self._schedules.step_size(self.t)
            s = 1.0 - self._own_weight(self.t) * self._schedules.coupling(self.t) - lam * self._regularity.ridge
            phi = self._step(self.phi, s, lam, self._replaced / self._seen)
            # In this order of comparison, NaN (0 * inf) gives the diameter.
            self.phi = phi if phi < self._regularity.diameter else self._regularity.diameter
        self.t += 1

    def _step(self, phi: float, s: float, lam: float, share: float) -> float:
        """Compute `Phi_{t+1}`, before the cap at the diameter, by the recursions of the module docstring."""
        regularity, mode = self._regularity, self._mode
        moved = regularity.smoothness * phi if phi > 0.0 else 0.0  # L may be infinite
        if mode == "loose":
            return abs(s) * phi + lam * (moved + regularity.clipped_gradient_change)
        if mode == "smooth":
            return abs(s) * phi + lam * (moved + share * regularity.clipped_gradient_change)
        clip = abs(s) * phi + lam * min(
            moved + share * regularity.clipped_gradient_change, 2 * regularity.clip_norm
        )  # never above `smooth`
        if mode == "clip" or (mode == "best" and not regularity.can_use_convex_mode):
            return clip
        convex = (
            max(abs(s), abs(s - lam * regularity.smoothness)) * phi + lam * share * regularity.clipped_gradient_change
        )
        return convex if mode == "convex" else min(clip, convex)


def _first_record(
    sensitivity: _SensitivityRecursion, learner: LearnerScales, rounds: int, batch_size: int = 1
) -> list[float]:
    """Compute `sqrt(n) Phi_t / rho_t` of each round, without lattice: equal batches, one record of the first replaced."""
    losses = []
    for t in range(rounds):
        losses.append(math.sqrt(learner.dim) * sensitivity.phi / learner.laplace_scale(t))
        sensitivity.advance(batch_size, int(t == 0))
    return losses


# ---- accounting -------------------------------------------------------------------------------------------------------

_MIN_HEAD_ROUNDS, _MAX_HEAD_ROUNDS = 2**12, 2**20
"""Range of the round at which the tail of `_infinite_horizon` starts: the later, the tighter, but every round is computed."""


class LdpDolAccountant(FirstRecordAccountant):
    """Privacy accountant of one learner: O(1) a round.

    Args:
        mode: mode of the recursion.
        regularity: constants of the loss.
        schedules: schedules of all learners.
        learner: parameters of the learner.
        min_own_weight: `min_j |w_jj|` over all learners, for the paper's formula (default: the own weight).
        own_weight_schedule: `|w_ii|` by round, if it changes (default: always the learner's own weight).

    Raises:
        AssumptionViolated: the mode does not apply to the loss (`require_mode`).
    """

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
        self._mode, self._regularity, self._schedules, self._learner = mode, regularity, schedules, learner
        self._smallest = learner.own_weight if min_own_weight is None else min_own_weight
        self._changes = own_weight_schedule is not None
        self._sensitivity = _SensitivityRecursion(
            mode, regularity, schedules, own_weight_schedule or learner.own_weight
        )
        self.mechanism = Mechanism.laplace(learner.dim)
        self._root = math.sqrt(learner.dim)
        proof = "Chen & Wang 2025, Theorem 5 with (17)-(22) and the learner's own |w_ii|; docs/theory/ldp-dol.md"
        self.basis = GuaranteeBasis(mode, proof, regularity.constants(learner.own_weight))

    @property
    def sensitivity(self) -> float:
        """Sensitivity `Phi_t` of the current round, in l2."""
        return self._sensitivity.phi

    def next_loss(self) -> float:
        """Return `(sqrt(n) Phi_t + n grid_t) / rho_t`, or 0 while nothing can differ.

        Rounding to the lattice can move two states apart by one more spacing in every coordinate.
        """
        if self._sensitivity.phi == 0.0:
            return 0.0
        scale = self._learner.laplace_scale(self._sensitivity.t)
        return (self._root * self._sensitivity.phi + self._learner.dim * float(lattice_spacing(scale))) / scale

    def advance(self, records: int, n_replaced: int | None = None) -> None:
        self._sensitivity.advance(records, self.count_replaced(records, n_replaced))

    def paper_epsilon(self, rounds: int) -> FloatArray:
        """Return the epsilon of Theorem 5-(i).

        Its double sum is recursion (19), with `w_bar = min_j |w_jj|` instead of the own weight and the ridge as part of L.
        It has neither batches nor a diameter. T rounds send messages 0..T-1; the paper sums to T.
        """
        smoothness = self._regularity.smoothness + self._regularity.ridge
        paper_constants = replace(self._regularity, smoothness=smoothness, ridge=0.0, diameter=math.inf)
        return np.cumsum(
            _first_record(
                _SensitivityRecursion("loose", paper_constants, self._schedules, self._smallest), self._learner, rounds
            )
        )

    def infinite_horizon_epsilon(self, counts: IntArray, n_replaced: IntArray | None) -> float:
        """Bound for one replaced record, with at least the smallest batch in every round; infinite for reused records."""
        batch = int(counts.min())
        if self._changes or batch == 0 or (n_replaced is not None and n_replaced.sum() > 1):
            return math.inf
        return _infinite_horizon(self._mode, self._regularity, self._schedules, self._learner, batch)


def _infinite_horizon(
    mode: AccountingMode,
    regularity: Regularity,
    schedules: SharedSchedules,
    learner: LearnerScales,
    batch_size: int = 1,
) -> float:
    """Bound epsilon over infinitely many rounds with at least `batch_size` records each, one record replaced in all.

    Infinite if there is no such bound or it cannot be computed: `u >= v`, mode `loose`, an unknown L, or T1 above
    `_MAX_HEAD_ROUNDS`. It leaves out the lattice term of a loss, about `n 2^-40` a round at most, whose sum diverges.

    Raises:
        AssumptionViolated: the mode does not apply to the loss.
        SpecError: SciPy is missing.
    """
    require_mode(mode, regularity)
    if schedules.u >= schedules.v or mode == "loose" or regularity.smoothness == math.inf:
        return math.inf
    convex = mode == "convex" or (mode == "best" and regularity.can_use_convex_mode)
    return _head_and_tail(mode, regularity, schedules, learner, batch_size, convex)


def _head_and_tail(
    mode: AccountingMode,
    regularity: Regularity,
    schedules: SharedSchedules,
    learner: LearnerScales,
    batch_size: int,
    convex: bool,
) -> float:
    """Compute the bound of `_infinite_horizon` with the tail of mode `convex`, or of `smooth`."""
    try:
        from scipy.special import zeta
    except ImportError:
        raise SpecError(f"an infinite-horizon bound needs SciPy: {format_install_hint('audit')}") from None
    start = _tail_start(regularity, schedules, learner.own_weight, convex)
    if start is None:
        return math.inf
    t1, margin = start
    head, phi = _head(mode, regularity, schedules, replace(learner, sigma=1.0), batch_size, t1)
    p = 1.0 + schedules.v - schedules.u
    k = max(schedules.lam0 * regularity.clipped_gradient_change / batch_size / margin, phi * math.pow(t1 + 1.0, p))
    tail = math.sqrt(2.0 * learner.dim) * k * float(zeta(p + learner.varsigma, t1 + 1.0))
    return (head + tail) / learner.sigma


@lru_cache
def _head(
    mode: AccountingMode,
    regularity: Regularity,
    schedules: SharedSchedules,
    learner: LearnerScales,
    batch_size: int,
    rounds: int,
) -> tuple[float, float]:
    """Return the loss of the first `rounds` rounds and `Phi` after them: learners and searched noise sizes share them."""
    sensitivity = _SensitivityRecursion(mode, regularity, schedules, learner.own_weight)
    return math.fsum(_first_record(sensitivity, learner, rounds, batch_size)), sensitivity.phi


def _tail_start(regularity: Regularity, schedules: SharedSchedules, a: float, convex: bool) -> tuple[int, float] | None:
    """Return the least power of two T1 from `_MIN_HEAD_ROUNDS` on with `c' >= a gamma_0 / 2`, and `c'`; None: above the maximum.

    From T1 on, a step must shrink Phi by `1 - c (t+1)^-u`. That needs `|s_t| <= 1 - a gamma_t` (for `convex`, of
    `s_t - lambda_t L` too), so coupling and ridge must have become small enough not to overshoot.
    """
    growth = 0.0 if convex else regularity.smoothness * schedules.lam0
    push = 2 * regularity.ridge + regularity.smoothness if convex else regularity.ridge
    t1 = _MIN_HEAD_ROUNDS
    while t1 <= _MAX_HEAD_ROUNDS:
        c = a * schedules.gam0 - growth * (t1 + 1.0) ** (schedules.u - schedules.v)
        margin = c - (1.0 + schedules.v - schedules.u) * (t1 + 1.0) ** (schedules.u - 1.0)
        steady = schedules.step_size(t1) * push <= 2.0 * (1.0 - a * schedules.coupling(t1))
        if steady and 0.0 < a * schedules.gam0 / 2.0 <= margin:
            return t1, margin
        t1 *= 2
    return None
