"""What infinitely many messages of LDP-DOL cost.

The recursion runs to a round T1; from there on `Phi_t <= K (t+1)^-p` with `p = 1 + v - u`, and the rest sums to
`sqrt(2n)/sigma K zeta(p + varsigma, T1 + 1)` (Hurwitz).
"""

from __future__ import annotations

import math

from sottovoce.algorithms.ldp_dol.sensitivity import (
    LearnerScales,
    Mode,
    Schedules,
    SensitivityRecursion,
    first_record,
    require_mode,
)
from sottovoce.errors import SpecError
from sottovoce.privacy.regularity import Regularity

LONGEST_HEAD = 2**20
"""Rounds after which `infinite_horizon` gives up looking for the start of its tail."""


def infinite_horizon(
    mode: Mode, known: Regularity, schedules: Schedules, learner: LearnerScales, batch_size: int = 1
) -> float:
    """Bound on epsilon over infinitely many rounds, each bringing at least `batch_size` records, one of all replaced.

    Infinite where there is no such bound or it is out of reach: `u >= v`, mode `loose`, an unknown L, or T1 above
    `LONGEST_HEAD`. It leaves out the lattice term of a loss, about `n 2^-40` a round at most, whose sum diverges.

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
    """The bound of `infinite_horizon` with the tail of mode `convex`, or of `smooth`."""
    try:
        from scipy.special import zeta
    except ImportError:
        raise SpecError("an infinite-horizon bound needs SciPy: pip install 'sottovoce[audit]'") from None
    start = _tail_start(known, schedules, learner.own_weight, convex)
    if start is None:
        return math.inf
    t1, margin = start
    sensitivity = SensitivityRecursion(mode, known, schedules, learner.own_weight)
    head = math.fsum(first_record(sensitivity, learner, t1, batch_size))
    p = 1.0 + schedules.v - schedules.u
    k = max(schedules.lam0 * known.change / batch_size / margin, sensitivity.phi * math.pow(t1 + 1.0, p))
    return head + math.sqrt(2.0 * learner.dim) / learner.sigma * k * float(zeta(p + learner.varsigma, t1 + 1.0))


def _tail_start(known: Regularity, schedules: Schedules, a: float, convex: bool) -> tuple[int, float] | None:
    """First power of two T1 with `c' >= a gamma_0 / 2`, and `c'`; None if there is none up to `LONGEST_HEAD`.

    From T1 on, a step must shrink Phi by `1 - c (t+1)^-u`. That needs `|s_t| <= 1 - a gamma_t` (for `convex`, of
    `s_t - lambda_t L` too), so coupling and ridge must have become small enough not to overshoot.
    """
    growth = 0.0 if convex else known.smoothness * schedules.lam0
    push = 2 * known.ridge + known.smoothness if convex else known.ridge
    t1 = 1
    while t1 <= LONGEST_HEAD:
        c = a * schedules.gam0 - growth * (t1 + 1.0) ** (schedules.u - schedules.v)
        margin = c - (1.0 + schedules.v - schedules.u) * (t1 + 1.0) ** (schedules.u - 1.0)
        steady = schedules.step_size(t1) * push <= 2.0 * (1.0 - a * schedules.coupling(t1))
        if steady and 0.0 < a * schedules.gam0 / 2.0 <= margin:
            return t1, margin
        t1 *= 2
    return None
