"""What the messages of ADMM cost: dual (DVP) and primal (PVP) variable perturbation (Zhang & Zhu, IEEE TIFS 2017).

Node p minimises in every iteration, over all of space, the strongly convex

    (C/B) sum_i phi(a_i.f, b_i) + m/2 ||f||^2 + linear.f,      m = rho + Phi + 2 eta N,

with B records, `|phi'| ||a|| <= ell` and `phi'' ||a||^2 <= c`. With what it heard and said fixed, `linear` is known to
everybody, up to the clean minimiser that two variants of PVP carry over. Replacing a pair (a, b) then has these effects.

DVP adds `(C/B) e` to `linear`, e of density `exp(-zeta ||e||)`, and says the minimiser: a bijection of e. A given minimiser
belongs to two noises at most `2 ell` apart, and the Jacobians' ratio is at most `1 + c/kappa`, `kappa = (B/C) m`, as the
two Hessians differ from a common part by matrices of rank one:

    loss <= 2 ell zeta + ln(1 + c/kappa).

The minimiser must be exact. What a solver finds instead is within `tau/m` of it; adding Laplace noise of scale s on a
lattice of spacing g to every coordinate hides that: for every e, the law of what is said is within
`(sqrt(n) tau/m + n g)/s` of that around the exact minimiser. Used once for each world, this costs twice as much.

PVP says the minimiser plus e. It moves by at most Delta, which follows (s = 0, 1, 2 for the centre `public`, `own_clean`,
`literal`; tau is the solver's tolerance, once for each world)

    Delta' = (2 ell C/B + s eta N Delta + 2 tau) / (rho + 2 eta N),      loss <= zeta Delta.

With k pairs replaced, `2 ell` and `ln(1 + c/kappa)` count k times. B is the number of records so far, which is public;
before the first record a node minimises its regulariser alone, without noise and without cost.
"""

from __future__ import annotations

import math

import numpy as np

from sottovoce_core.algorithms.admm.calibrations import (
    Calibration,
    DualCalibration,
    Node,
    Perturbation,
    PrimalCalibration,
    Unperturbed,
    moved,
)
from sottovoce_core.arrays import FloatArray, Scalars
from sottovoce_core.noise import grid
from sottovoce_core.privacy.accountant import FirstRecord
from sottovoce_core.privacy.guarantee import Constant, Grounds

_ENFORCED_BY = {
    "lipschitz": "the loss, on rows scaled to feature_bound",
    "curvature": "the loss, on rows scaled to feature_bound",
    "ridge": "the loss, exactly",
    "penalty": "the learner, exactly",
    "degree": "the learner, which subtracts what each of its neighbours said once",
    "tolerance": "the solver, which goes on until the gradient is as short, as float64 computes it",
}
_EXACT = "nothing: without output noise the promise is that of an exact solver"
_HIDDEN = "the lattice of the noise"


def _output_loss(node: Node, stiffness: float) -> float:
    """What the solver's error costs behind the output noise: `2 (sqrt(n) tau/m + n g)/s`; 0 without (an exact solver)."""
    if node.output_noise == 0.0:
        return 0.0
    apart = math.sqrt(node.dim) * node.tolerance / stiffness + node.dim * float(grid(node.output_noise))
    return 2.0 * apart / node.output_noise


class AdmmAccountant(FirstRecord):
    """Running meter of one learner. A record stays in use in all later iterations.

    Args:
        calibration: of the noise.
        node: whose, with single numbers.
        rounds: planned.
    """

    any_messages = True

    def __init__(self, calibration: Calibration, node: Node, rounds: int) -> None:
        self._calibration, self._node, self._rounds = calibration, node, rounds
        self._round = self._replaced = 0
        self._calibrated: Scalars = 0.0  # Delta as the noise assumes it, and below as it is
        self._shift: Scalars = 0.0
        self.grounds = Grounds(calibration.mode, _proof(calibration), _constants(calibration, node))

    def next_loss(self) -> float:
        """Of the message of the current round: 0 before the first record that differs was learned."""
        node, step = self._node, self.step
        if self._replaced == 0:
            return 0.0
        if step.perturbed == "nothing":
            return math.inf
        if step.perturbed == "minimiser":
            return float(step.rate * float(self._moved(step)))
        stiffness = node.stiffness + step.extra_ridge
        once = 2.0 * node.lipschitz * step.rate + np.log1p(node.curvature * node.weight(float(self._seen)) / stiffness)
        return float(self._replaced * once + _output_loss(node, float(stiffness)))

    @property
    def step(self) -> Perturbation:
        """The iteration of the current round."""
        last = self._round == self._rounds - 1
        return self._calibration.step(self._node, float(self._seen), self._calibrated, last)

    def advance(self, records: int, replaced: int | None = None) -> None:
        step = self.step
        self._shift, self._calibrated = self._moved(step), step.sensitivity
        self._replaced += self.differ(records, replaced)
        self._round += 1

    def paper(self, rounds: int) -> FloatArray:
        return _paper_epsilon(self._node, rounds)

    def _moved(self, step: Perturbation) -> Scalars:
        if step.perturbed != "minimiser":
            return 0.0
        return moved(self._node, float(self._seen), step.carried, self._shift, float(self._replaced))


def _paper_epsilon(node: Node, rounds: int) -> FloatArray:
    """`(rounds,)`: the sum of the alphas of iterations 1..t, for message 0 is no iteration. The paper states single ones."""
    alphas = np.full(rounds, float(node.alpha))
    alphas[-1] = node.final_alpha
    alphas[0] = 0.0
    return np.cumsum(alphas)


def _proof(calibration: Calibration) -> str:
    if isinstance(calibration, Unperturbed):
        return "none: messages carry no noise"
    theorem = "Theorem 5 (DVP)" if isinstance(calibration, DualCalibration) else "Theorem 6 (PVP)"
    return f"Zhang & Zhu 2017, {theorem}, corrected and summed over the iterations; sottovoce_core.algorithms.admm"


def _constants(calibration: Calibration, node: Node) -> dict[str, Constant]:
    """What enforces the numbers that the calibration uses."""
    if isinstance(calibration, Unperturbed):
        return {}
    enforced_by = dict(_ENFORCED_BY)
    if isinstance(calibration, PrimalCalibration) and calibration.last is None:
        del enforced_by["curvature"]
    else:
        enforced_by["output_noise"] = _HIDDEN if node.output_noise else _EXACT
    return {name: Constant(float(getattr(node, name)), text) for name, text in enforced_by.items()}
