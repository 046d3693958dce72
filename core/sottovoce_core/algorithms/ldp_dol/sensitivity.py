"""How far a replaced record moves LDP-DOL's clean state (Chen & Wang 2025, section IV).

With the received messages fixed, a learner's clean state `theta_t` is a function of its records. `Phi_t` bounds its l2 change
when records are replaced. It obeys a recursion in scalars that depends on no data:

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
from dataclasses import dataclass
from typing import Literal

from sottovoce_core.errors import CheckFailed
from sottovoce_core.privacy.guarantee import Regularity

Mode = Literal["loose", "smooth", "convex", "clip", "best"]
_SQRT2 = math.sqrt(2.0)


@dataclass(frozen=True, slots=True)
class Schedules:
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


def require_mode(mode: Mode, known: Regularity) -> None:
    """Refuse a mode whose proof does not cover this loss. `best` falls back to what applies, so it never fails.

    Raises:
        CheckFailed: SMOOTHNESS, NOT_CONVEX or CONVEX_CLIPPED.
    """
    if mode in ("smooth", "convex") and known.smoothness == math.inf:
        text = 'this accounting mode needs a known smoothness constant; use mode "clip"'
        raise CheckFailed("SMOOTHNESS", f'{text}, got mode "{mode}" with smoothness inf')
    if mode == "convex" and not known.convex:
        raise CheckFailed("NOT_CONVEX", 'this loss is not convex; mode "convex" does not apply')
    if mode == "convex" and not known.convex_step:
        text = 'clipped gradients of this loss are not gradients of a convex function; mode "convex" does not apply'
        raise CheckFailed("CONVEX_CLIPPED", f"{text}, got clip_norm={known.clip_norm}")


class SensitivityRecursion:
    """`Phi_t`, round by round: O(1) a round.

    Args:
        mode: of the recursion.
        known: of the loss.
        schedules: of all learners.
        own_weight: `a = |w_ii|`; by round, where it changes.

    Raises:
        CheckFailed: the mode does not apply to the loss (`require_mode`).
    """

    def __init__(
        self, mode: Mode, known: Regularity, schedules: Schedules, own_weight: float | Callable[[int], float]
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
            return abs(s) * phi + lam * (moved + known.change)
        if mode == "smooth":
            return abs(s) * phi + lam * (moved + share * known.change)
        clip = abs(s) * phi + lam * min(moved + share * known.change, 2 * known.clip_norm)  # never above `smooth`
        if mode == "clip" or (mode == "best" and not known.convex_step):
            return clip
        convex = max(abs(s), abs(s - lam * known.smoothness)) * phi + lam * share * known.change
        return convex if mode == "convex" else min(clip, convex)


def first_record(
    sensitivity: SensitivityRecursion, learner: LearnerScales, rounds: int, batch_size: int = 1
) -> list[float]:
    """`sqrt(n) Phi_t / rho_t` of so many rounds, without lattice: equal batches, one record of the first one replaced."""
    losses = []
    for t in range(rounds):
        losses.append(math.sqrt(learner.dim) * sensitivity.phi / learner.laplace_scale(t))
        sensitivity.advance(batch_size, int(t == 0))
    return losses
