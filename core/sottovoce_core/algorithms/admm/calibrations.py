"""How noisy an iteration of ADMM is: from public numbers and a loss alpha to the noise, for DVP and PVP.

`accounting` has the theory, and what an iteration then costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sottovoce_core.arrays import Scalars

Rule = Literal["balanced", "printed"]
Scale = Literal["tight", "printed"]
Variant = Literal["public", "own_clean", "literal"]
_Perturbed = Literal["nothing", "objective", "minimiser"]

_CARRIED: dict[Variant, float] = {"public": 0.0, "own_clean": 1.0, "literal": 2.0}
"""s: how often the clean minimiser stands in a node's own part of the centre, in place of what it said."""


@dataclass(frozen=True, slots=True)
class Node:
    """The public numbers of a node's problem: one number each, or one per learner where it says `Scalars`.

    Attributes:
        alpha: privacy loss that an iteration may cost; infinite: no privacy.
        final_alpha: the same for the last one.
        degree: N, number of neighbours.
        penalty: eta.
        loss_weight: C.
        ridge: rho.
        lipschitz: ell, bound on the norm of a record's gradient.
        curvature: c, bound on the norm of a record's Hessian.
        tolerance: tau, bound on the gradient's norm where the solver stops.
        output_noise: s, Laplace scale of what a perturbed objective's minimiser is said with; 0: it is said as it is.
        dim: n.
    """

    alpha: Scalars
    final_alpha: Scalars
    degree: Scalars
    penalty: float
    loss_weight: float
    ridge: float
    lipschitz: float
    curvature: float
    tolerance: float
    output_noise: float
    dim: int

    @property
    def stiffness(self) -> Scalars:
        """`rho + 2 eta N`: strong convexity of the local problem without extra ridge."""
        return self.ridge + 2.0 * self.penalty * self.degree

    def weight(self, count: Scalars) -> Scalars:
        """`C/B` for B records (for none, as for one: there is nothing to weigh)."""
        weight: Scalars = self.loss_weight / np.maximum(count, 1.0)
        return weight


@dataclass(frozen=True, slots=True)
class Perturbation:
    """How one iteration is perturbed.

    Attributes:
        perturbed: where the noise goes.
        rate: zeta; infinite: no noise.
        extra_ridge: Phi.
        carried: s, for the centre of this iteration.
        sensitivity: Delta, by which the clean minimiser moves if one record is replaced; 0 where nobody needs it.
    """

    perturbed: _Perturbed
    rate: Scalars = math.inf
    extra_ridge: Scalars = 0.0
    carried: float = 0.0
    sensitivity: Scalars = 0.0


# ---- calibrations: from public numbers to the noise of an iteration --------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unperturbed:
    """ADMM as it is."""

    mode: str = "none"
    """The name of a calibration in a guarantee."""

    def step(self, node: Node, count: Scalars, carried_in: Scalars, last: bool) -> Perturbation:
        """The next iteration of a node, with so many records so far.

        Args:
            node: whose.
            count: B.
            carried_in: `Perturbation.sensitivity` of the iteration before.
            last: is it the last one of the run?
        """
        return Perturbation("nothing")


@dataclass(frozen=True, slots=True)
class DualCalibration:
    """DVP. Of alpha, `alpha_bar = k ln(1 + c/kappa)` goes to the Jacobian, and `alpha_hat`, the rest, to the noise.

    Attributes:
        rule: when to stiffen the problem by an extra ridge Phi, so that each gets a half. `balanced`: where alpha_hat would
            be less than a half. `printed`: where it would not be positive (Algorithm 2); just above, the noise is unbounded.
        jacobian: k. 1 suffices; 2 is printed.
        scale: `tight`: `zeta = alpha_hat / (2 ell)`, as in Appendix A. `printed`: twice that (Algorithm 2), which costs more
            than alpha.
    """

    rule: Rule = "balanced"
    jacobian: Literal[1, 2] = 1
    scale: Scale = "tight"

    @property
    def mode(self) -> str:
        return f"dvp, rule {self.rule}, jacobian {self.jacobian}, scale {self.scale}"

    def step(self, node: Node, count: Scalars, carried_in: Scalars, last: bool) -> Perturbation:
        weight, alpha, k = node.weight(count), node.final_alpha if last else node.alpha, float(self.jacobian)
        for_noise = alpha - k * np.log1p(node.curvature * weight / node.stiffness)
        enough = for_noise > 0.0 if self.rule == "printed" else for_noise >= alpha / 2.0
        extra = np.where(enough, 0.0, node.curvature * weight / np.expm1(alpha / (2.0 * k)) - node.stiffness)
        rate = np.where(enough, for_noise, alpha / 2.0) / node.lipschitz
        if self.scale == "tight":
            rate = rate / 2.0
        some = np.asarray(count) > 0
        return Perturbation("objective", np.where(some, rate, np.inf)[()], np.where(some, extra, 0.0)[()])


@dataclass(frozen=True, slots=True)
class PrimalCalibration:
    """PVP.

    Attributes:
        variant: the node's own part of the centre. `public`: what it said. `own_clean`: its clean minimiser (the prose).
            `literal`: twice that, less what it said (the printed objective).
        scale: `tight`: `zeta = alpha / Delta`. `printed`: `rho B alpha / (2 ell C)`.
        last: of another kind, if any.
    """

    variant: Variant = "public"
    scale: Scale = "tight"
    last: DualCalibration | None = None

    @property
    def mode(self) -> str:
        ending = "" if self.last is None else f", last {self.last.mode}"
        return f"pvp, variant {self.variant}, scale {self.scale}{ending}"

    def step(self, node: Node, count: Scalars, carried_in: Scalars, last: bool) -> Perturbation:
        if last and self.last is not None:
            return self.last.step(node, count, 0.0, last)
        s = _CARRIED[self.variant]
        delta = moved(node, count, s, carried_in, (np.asarray(count) > 0).astype(np.float64))
        alpha = node.final_alpha if last else node.alpha
        tight = alpha / np.where(delta > 0.0, delta, 1.0)
        printed = alpha * node.ridge / (2.0 * node.lipschitz * node.weight(count))
        rate = np.where(delta > 0.0, tight if self.scale == "tight" else printed, np.inf)[()]
        return Perturbation("minimiser", rate, carried=s, sensitivity=delta)


Calibration = Unperturbed | DualCalibration | PrimalCalibration


def moved(node: Node, count: Scalars, s: float, before: Scalars, replaced: Scalars) -> Scalars:
    """Delta' of PVP, how far the clean minimiser moves.

    Args:
        node: whose.
        count: B, records so far.
        s: of the variant.
        before: Delta, how far the one before moved.
        replaced: how many of the records differ.
    """
    worlds_differ = np.minimum(replaced, 1.0)
    push = 2.0 * node.lipschitz * replaced * node.weight(count) + 2.0 * node.tolerance * worlds_differ
    delta: Scalars = (push + s * node.penalty * node.degree * before) / node.stiffness
    return delta
