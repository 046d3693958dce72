"""Privacy accountant of ADMM: dual (DVP) and primal (PVP) variable perturbation (Zhang & Zhu, IEEE TIFS 2017).

Node p minimises in every iteration, over all of space, the strongly convex

    (C/B) sum_i phi(a_i.f, b_i) + m/2 ||f||^2 + linear.f,      m = rho + Phi + 2 eta N,

with B records, `|phi'| ||a|| <= ell` and `phi'' ||a||^2 <= c`. With sent and received messages fixed, `linear` is public, up
to the clean minimiser that two variants of PVP carry over. Replacing a pair (a, b) then has these effects.

DVP adds `(C/B) e` to `linear`, e of density `exp(-zeta ||e||)`, and sends the minimiser: a bijection of e. A given minimiser
belongs to two noises, apart by at most the sum of both records' gradients at it. The two Hessians differ from a common part
of at least `kappa = (B/C) m` by `phi'' a a^T` of the one or the other record, so only one of them raises the ratio of the
Jacobians, by a factor of at most `1 + phi'' ||a||^2 / kappa`. With `s = |phi'| / sup |phi'|` of that record::

    loss <= ell zeta + max_s [ ell zeta s + ln(1 + q(s)/kappa) ],

q(s) the largest `phi'' ||a||^2` at this slope: c, or `4 c s (1 - s)` for the logistic loss, which is flat where it is steep.
It is concave in s, and largest at s = 1 if `ell zeta >= 4 c / kappa`: then the Jacobian costs nothing.

The minimiser must be exact. A solver's result is within `tau/m` of it; Laplace noise of scale s on a lattice of spacing g
on every coordinate hides that error: for every e, the distribution of the message is within
`(sqrt(n) tau/m + n g)/s` of that around the exact minimiser. Used once for each world, this costs twice as much.

PVP sends the minimiser plus e. It moves by at most Delta, with the recursion (s = 0, 1, 2 for the centre `public`,
`own_clean`, `literal`; tau is the solver's tolerance, once for each world)

    Delta' = (2 ell C/B + s eta N Delta + 2 tau) / (rho + 2 eta N),      loss <= zeta Delta.

With k pairs replaced, both bounds (for PVP `2 ell`) count k times. B is the number of records so far, which is public;
before the first record a node minimises its regulariser alone, without noise and without cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sottovoce_core.arrays import FloatArray, Scalars
from sottovoce_core.noise import lattice_spacing
from sottovoce_core.privacy.accountant import FirstRecordAccountant
from sottovoce_core.privacy.guarantee import Constant, GuaranteeBasis

# ---- calibration of an iteration's noise to a loss alpha ---------------------------------------------------------------

ExtraRidgeRule = Literal["tight", "printed"]
ScaleRule = Literal["tight", "printed"]
CentreVariant = Literal["public", "own_clean", "literal"]
_Perturbed = Literal["nothing", "objective", "minimiser"]

_CARRY_FACTORS: dict[CentreVariant, float] = {"public": 0.0, "own_clean": 1.0, "literal": 2.0}
"""Factor s of the clean minimiser in a node's own part of the centre, in place of its message."""


@dataclass(frozen=True, slots=True)
class NodeParameters:
    """Public parameters of a node's problem: one number each, or one per learner for `Scalars`.

    Attributes:
        alpha: maximum privacy loss of an iteration; infinite: no privacy.
        final_alpha: maximum privacy loss of the last iteration.
        degree: N, number of neighbours.
        penalty: eta.
        loss_weight: C.
        ridge: rho.
        lipschitz: ell, bound on the norm of a record's gradient.
        curvature: c, bound on the norm of a record's Hessian.
        has_logistic_curvature: that norm is at most `4 c s (1 - s)` where its gradient is at most `s ell` long.
        tolerance: tau, norm of the gradient at which the solver stops.
        output_noise: s, Laplace scale of the noise on a perturbed objective's minimiser; 0: no such noise.
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
    has_logistic_curvature: bool = False

    @property
    def stiffness(self) -> Scalars:
        """Strong convexity `rho + 2 eta N` of the local problem without extra ridge."""
        return self.ridge + 2.0 * self.penalty * self.degree

    def weight(self, count: Scalars) -> Scalars:
        """Return `C/B` for B records (for no record, as for one)."""
        weight: Scalars = self.loss_weight / np.maximum(count, 1.0)
        return weight

    def objective_loss(self, rate: float, kappa: float) -> float:
        """Return the loss of DVP's minimiser for one replaced record, with noise of rate zeta in the objective."""
        steep = self.lipschitz * rate
        if not self.has_logistic_curvature:
            return float(2.0 * steep + np.log1p(self.curvature / kappa))
        # The root of the derivative of `steep s + ln(1 + b s (1 - s))` in s.
        b = 4.0 * self.curvature / kappa
        s = 2.0 * (steep + b) / ((2.0 - steep) * b + math.sqrt(b * b * (steep * steep + 4.0) + 4.0 * b * steep * steep))
        s = min(s, 1.0)
        return float(steep + steep * s + np.log1p(b * s * (1.0 - s)))

    def minimiser_shift(self, count: Scalars, s: float, previous_shift: Scalars, n_replaced: Scalars) -> Scalars:
        """Return Delta' of PVP, the bound on the change of the clean minimiser.

        Args:
            count: B, records so far.
            s: factor of the variant.
            previous_shift: Delta, bound on the change of the minimiser before.
            n_replaced: number of records that differ.
        """
        worlds_differ = np.minimum(n_replaced, 1.0)
        push = 2.0 * self.lipschitz * n_replaced * self.weight(count) + 2.0 * self.tolerance * worlds_differ
        delta: Scalars = (push + s * self.penalty * self.degree * previous_shift) / self.stiffness
        return delta


@dataclass(frozen=True, slots=True)
class Perturbation:
    """Perturbation of one iteration.

    Attributes:
        target: part of the problem that gets the noise.
        rate: zeta; infinite: no noise.
        extra_ridge: Phi.
        carry_factor: s, for the centre of this iteration.
        sensitivity: Delta, bound on the change of the clean minimiser for one replaced record; 0 if unused.
    """

    target: _Perturbed
    rate: Scalars = math.inf
    extra_ridge: Scalars = 0.0
    carry_factor: float = 0.0
    sensitivity: Scalars = 0.0


@dataclass(frozen=True, slots=True)
class NoCalibration:
    """No noise: plain ADMM."""

    mode: str = "none"
    """Name of the calibration in a guarantee."""

    def calibrate_iteration(
        self, node: NodeParameters, count: Scalars, previous_sensitivity: Scalars, is_last: bool
    ) -> Perturbation:
        """Return the perturbation of the next iteration of a node.

        Args:
            node: parameters of the node.
            count: B, records so far.
            previous_sensitivity: `Perturbation.sensitivity` of the iteration before.
            is_last: it is the last iteration of the run.
        """
        return Perturbation("nothing")


@dataclass(frozen=True, slots=True)
class DualCalibration:
    """Calibration of DVP.

    Attributes:
        rule: extra ridge Phi and rate zeta. `tight`: for the logistic loss `zeta = alpha / (2 ell)`, the largest that any ridge
            permits, and the least Phi that permits it, for `kappa >= 8 c / alpha`. `printed`: Algorithm 2 gives alpha_bar =
            `2 ln(1 + c/kappa)` of alpha to the Jacobian and the rest alpha_hat to the noise, and each a half, by an extra
            ridge, where nothing would be left. For other losses `tight` is that with `ln(1 + c/kappa)`, and where less than a
            half would be left.
        scale_rule: `tight`: zeta is for the noise's share of alpha, as in Appendix A. `printed`: twice that (Algorithm 2), which
            costs more than alpha.
    """

    rule: ExtraRidgeRule = "tight"
    scale_rule: ScaleRule = "tight"

    @property
    def mode(self) -> str:
        return f"dvp, rule {self.rule}, scale {self.scale_rule}"

    def calibrate_iteration(
        self, node: NodeParameters, count: Scalars, previous_sensitivity: Scalars, is_last: bool
    ) -> Perturbation:
        weight, alpha = node.weight(count), node.final_alpha if is_last else node.alpha
        kappa, target = node.stiffness / weight, self._target(node, alpha)
        enough = self._noise_share(node, alpha, kappa) > 0.0 if self.rule == "printed" else kappa >= target
        rate = self._noise_share(node, alpha, np.where(enough, kappa, target)) / node.lipschitz
        if self.scale_rule == "tight":
            rate = rate / 2.0
        extra = np.where(enough, 0.0, target * weight - node.stiffness)
        has_records = np.asarray(count) > 0
        return Perturbation("objective", np.where(has_records, rate, np.inf)[()], np.where(has_records, extra, 0.0)[()])

    def min_records(self, node: NodeParameters) -> int:
        """Return the least number of records with which the last iteration needs no extra ridge."""
        # The printed rule needs an extra ridge where the Jacobian costs all of alpha, `tight` where it costs a half.
        least = self._target(node, node.final_alpha * (2.0 if self.rule == "printed" else 1.0))
        return math.ceil(float(least) * node.loss_weight / float(node.stiffness))

    def _target(self, node: NodeParameters, alpha: Scalars) -> Scalars:
        """Return the kappa that an extra ridge gives."""
        if self._is_jacobian_free(node):
            return 8.0 * node.curvature / alpha
        target: Scalars = node.curvature / np.expm1(alpha / (2.0 * self._jacobian))
        return target

    def _noise_share(self, node: NodeParameters, alpha: Scalars, kappa: Scalars) -> Scalars:
        """Return the part of alpha for the noise."""
        if self._is_jacobian_free(node):
            return alpha
        share: Scalars = alpha - self._jacobian * np.log1p(node.curvature / kappa)
        return share

    @property
    def _jacobian(self) -> float:
        """Number of times that the Jacobian is counted: the paper bounds its square."""
        return 2.0 if self.rule == "printed" else 1.0

    def _is_jacobian_free(self, node: NodeParameters) -> bool:
        return self.rule == "tight" and node.has_logistic_curvature


@dataclass(frozen=True, slots=True)
class PrimalCalibration:
    """Calibration of PVP.

    Attributes:
        variant: the node's own part of the centre. `public`: its message. `own_clean`: its clean minimiser (the paper's text).
            `literal`: twice that, less its message (the paper's printed objective).
        scale_rule: `tight`: `zeta = alpha / Delta`. `printed`: `rho B alpha / (2 ell C)`.
        final_calibration: calibration of the last iteration, if it is one of DVP.
    """

    variant: CentreVariant = "public"
    scale_rule: ScaleRule = "tight"
    final_calibration: DualCalibration | None = None

    @property
    def carry_factor(self) -> float:
        """Factor s of the variant."""
        return _CARRY_FACTORS[self.variant]

    @property
    def mode(self) -> str:
        ending = "" if self.final_calibration is None else f", last {self.final_calibration.mode}"
        return f"pvp, variant {self.variant}, scale {self.scale_rule}{ending}"

    def calibrate_iteration(
        self, node: NodeParameters, count: Scalars, previous_sensitivity: Scalars, is_last: bool
    ) -> Perturbation:
        if is_last and self.final_calibration is not None:
            return self.final_calibration.calibrate_iteration(node, count, 0.0, is_last)
        s = self.carry_factor
        delta = node.minimiser_shift(count, s, previous_sensitivity, (np.asarray(count) > 0).astype(np.float64))
        alpha = node.final_alpha if is_last else node.alpha
        tight = alpha / np.where(delta > 0.0, delta, 1.0)
        printed = alpha * node.ridge / (2.0 * node.lipschitz * node.weight(count))
        rate = np.where(delta > 0.0, tight if self.scale_rule == "tight" else printed, np.inf)[()]
        return Perturbation("minimiser", rate, carry_factor=s, sensitivity=delta)


NoiseCalibration = NoCalibration | DualCalibration | PrimalCalibration


# ---- accounting -------------------------------------------------------------------------------------------------------

_ENFORCED_BY = {
    "lipschitz": "the loss, on rows scaled to feature_bound",
    "curvature": "the loss, on rows scaled to feature_bound",
    "ridge": "the loss, exactly",
    "penalty": "the learner, exactly",
    "degree": "the learner, which subtracts each neighbour's message once",
    "tolerance": "the solver, which continues until the gradient in float64 is at most as long",
}
_EXACT_SOLVER_TEXT = "nothing: without output noise the guarantee is that of an exact solver"
_LATTICE_TEXT = "the lattice of the noise"


def _output_loss(node: NodeParameters, stiffness: float) -> float:
    """Return the cost of the solver's error with output noise: `2 (sqrt(n) tau/m + n g)/s`; 0 without it (exact solver)."""
    if node.output_noise == 0.0:
        return 0.0
    distance = math.sqrt(node.dim) * node.tolerance / stiffness + node.dim * float(lattice_spacing(node.output_noise))
    return 2.0 * distance / node.output_noise


class AdmmAccountant(FirstRecordAccountant):
    """Privacy accountant of one learner. A record stays in use in all later iterations.

    Args:
        calibration: calibration of the noise.
        node: parameters of the node, as single numbers.
        rounds: planned rounds.
    """

    is_valid_for_any_messages = True

    def __init__(self, calibration: NoiseCalibration, node: NodeParameters, rounds: int) -> None:
        self._calibration, self._node, self._rounds = calibration, node, rounds
        self._round = self._replaced = 0
        self._assumed_shift: Scalars = 0.0  # Delta that the calibration assumes, and below the actual one
        self._shift: Scalars = 0.0
        self.basis = GuaranteeBasis(calibration.mode, _proof(calibration), _constants(calibration, node))

    def next_loss(self) -> float:
        """Return the loss of the current round's message: 0 until a replaced record was used."""
        node, step = self._node, self.perturbation
        if self._replaced == 0:
            return 0.0
        if step.target == "nothing":
            return math.inf
        if step.target == "minimiser":
            return float(step.rate * float(self._actual_shift(step)))
        stiffness = float(node.stiffness + step.extra_ridge)
        once = node.objective_loss(float(step.rate), stiffness / float(node.weight(float(self._seen))))
        return self._replaced * once + _output_loss(node, stiffness)

    @property
    def perturbation(self) -> Perturbation:
        """Perturbation of the current round's iteration."""
        last = self._round == self._rounds - 1
        return self._calibration.calibrate_iteration(self._node, float(self._seen), self._assumed_shift, last)

    def advance(self, records: int, n_replaced: int | None = None) -> None:
        step = self.perturbation
        self._shift, self._assumed_shift = self._actual_shift(step), step.sensitivity
        self._replaced += self.count_replaced(records, n_replaced)
        self._round += 1

    def paper_epsilon(self, rounds: int) -> FloatArray:
        return _paper_epsilon(self._node, rounds)

    def _actual_shift(self, step: Perturbation) -> Scalars:
        if step.target != "minimiser":
            return 0.0
        return self._node.minimiser_shift(float(self._seen), step.carry_factor, self._shift, float(self._replaced))


def _paper_epsilon(node: NodeParameters, rounds: int) -> FloatArray:
    """Return `(rounds,)` sums of the alphas of iterations 1..t; message 0 is no iteration. The paper has single alphas."""
    alphas = np.full(rounds, float(node.alpha))
    alphas[-1] = node.final_alpha
    alphas[0] = 0.0
    return np.cumsum(alphas)


def _proof(calibration: NoiseCalibration) -> str:
    if isinstance(calibration, NoCalibration):
        return "none: messages carry no noise"
    theorem = "Theorem 5 (DVP)" if isinstance(calibration, DualCalibration) else "Theorem 6 (PVP)"
    return f"Zhang & Zhu 2017, {theorem}, corrected and summed over the iterations; docs/theory/admm.md"


def _constants(calibration: NoiseCalibration, node: NodeParameters) -> dict[str, Constant]:
    """Return the constants that the calibration uses, with what enforces them."""
    if isinstance(calibration, NoCalibration):
        return {}
    enforced_by = dict(_ENFORCED_BY)
    if isinstance(calibration, PrimalCalibration) and calibration.final_calibration is None:
        del enforced_by["curvature"]
    else:
        enforced_by["output_noise"] = _LATTICE_TEXT if node.output_noise else _EXACT_SOLVER_TEXT
    return {name: Constant(float(getattr(node, name)), text) for name, text in enforced_by.items()}
