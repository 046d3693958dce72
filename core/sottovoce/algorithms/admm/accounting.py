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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from sottovoce.arrays import FloatArray, IntArray, Scalars
from sottovoce.errors import SpecError
from sottovoce.noise import grid
from sottovoce.privacy.guarantee import Constant, Guarantee, ThreatModel

Rule = Literal["balanced", "printed"]
Scale = Literal["tight", "printed"]
Variant = Literal["public", "own_clean", "literal"]
Perturbed = Literal["nothing", "objective", "minimiser"]

CARRIED: dict[Variant, float] = {"public": 0.0, "own_clean": 1.0, "literal": 2.0}
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
class Step:
    """How one iteration is perturbed.

    Attributes:
        perturbed: where the noise goes.
        rate: zeta; infinite: no noise.
        extra_ridge: Phi.
        carried: s, for the centre of this iteration.
        sensitivity: Delta, by which the clean minimiser moves if one record is replaced; 0 where nobody needs it.
    """

    perturbed: Perturbed
    rate: Scalars = math.inf
    extra_ridge: Scalars = 0.0
    carried: float = 0.0
    sensitivity: Scalars = 0.0


class Calibration(Protocol):
    """From public numbers to the noise of an iteration."""

    @property
    def mode(self) -> str:
        """Its name in a guarantee."""
        ...

    def step(self, node: Node, count: Scalars, carried_in: Scalars, last: bool) -> Step:
        """The next iteration.

        Args:
            node: whose.
            count: B, records so far.
            carried_in: `Step.sensitivity` of the iteration before.
            last: is it the last one of the run?
        """
        ...


# ---- calibrations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unperturbed:
    """ADMM as it is."""

    mode: str = "none"

    def step(self, node: Node, count: Scalars, carried_in: Scalars, last: bool) -> Step:
        return Step("nothing")


@dataclass(frozen=True, slots=True)
class Objective:
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

    def step(self, node: Node, count: Scalars, carried_in: Scalars, last: bool) -> Step:
        weight, alpha, k = node.weight(count), node.final_alpha if last else node.alpha, float(self.jacobian)
        for_noise = alpha - k * np.log1p(node.curvature * weight / node.stiffness)
        enough = for_noise > 0.0 if self.rule == "printed" else for_noise >= alpha / 2.0
        extra = np.where(enough, 0.0, node.curvature * weight / np.expm1(alpha / (2.0 * k)) - node.stiffness)
        rate = np.where(enough, for_noise, alpha / 2.0) / node.lipschitz
        if self.scale == "tight":
            rate = rate / 2.0
        some = np.asarray(count) > 0
        return Step("objective", np.where(some, rate, np.inf)[()], np.where(some, extra, 0.0)[()])


@dataclass(frozen=True, slots=True)
class Minimiser:
    """PVP.

    Attributes:
        variant: the node's own part of the centre. `public`: what it said. `own_clean`: its clean minimiser (the prose).
            `literal`: twice that, less what it said (the printed objective).
        scale: `tight`: `zeta = alpha / Delta`. `printed`: `rho B alpha / (2 ell C)`.
        last: of another kind, if any.
    """

    variant: Variant = "public"
    scale: Scale = "tight"
    last: Objective | None = None

    @property
    def mode(self) -> str:
        ending = "" if self.last is None else f", last {self.last.mode}"
        return f"pvp, variant {self.variant}, scale {self.scale}{ending}"

    def step(self, node: Node, count: Scalars, carried_in: Scalars, last: bool) -> Step:
        if last and self.last is not None:
            return self.last.step(node, count, 0.0, last)
        s = CARRIED[self.variant]
        delta = moved(node, count, s, carried_in, (np.asarray(count) > 0).astype(np.float64))
        alpha = node.final_alpha if last else node.alpha
        tight = alpha / np.where(delta > 0.0, delta, 1.0)
        printed = alpha * node.ridge / (2.0 * node.lipschitz * node.weight(count))
        rate = np.where(delta > 0.0, tight if self.scale == "tight" else printed, np.inf)[()]
        return Step("minimiser", rate, carried=s, sensitivity=delta)


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


# ---- accounting ------------------------------------------------------------------------------------------------------


def step_loss(node: Node, step: Step, count: float, replaced: int, shift: float) -> float:
    """What the message of an iteration costs.

    Args:
        node: whose, with single numbers.
        step: the iteration.
        count: B, records so far.
        replaced: how many of them differ.
        shift: how far the clean minimiser moves (PVP).
    """
    if replaced == 0:
        return 0.0
    if step.perturbed == "nothing":
        return math.inf
    if step.perturbed == "minimiser":
        return float(step.rate * shift)
    stiffness = node.stiffness + step.extra_ridge
    once = 2.0 * node.lipschitz * step.rate + np.log1p(node.curvature * node.weight(count) / stiffness)
    return float(replaced * once + output_loss(node, float(stiffness)))


def output_loss(node: Node, stiffness: float) -> float:
    """What the solver's error costs behind the output noise: `2 (sqrt(n) tau/m + n g)/s`; 0 without (an exact solver)."""
    if node.output_noise == 0.0:
        return 0.0
    apart = math.sqrt(node.dim) * node.tolerance / stiffness + node.dim * float(grid(node.output_noise))
    return 2.0 * apart / node.output_noise


@dataclass(slots=True)
class AdmmAccountant:
    """Running meter of one learner: implements `Accountant`. A record stays in use in all later iterations.

    Attributes:
        calibration: of the noise.
        node: whose, with single numbers.
        rounds: planned.
    """

    calibration: Calibration
    node: Node
    rounds: int
    _round: int = field(default=0, init=False)
    _seen: int = field(default=0, init=False)
    _replaced: int = field(default=0, init=False)
    _calibrated: Scalars = field(default=0.0, init=False)  # Delta as the noise assumes it, and below as it is
    _shift: Scalars = field(default=0.0, init=False)

    def next_loss(self) -> float:
        """Of the message of the current round: 0 before the first record that differs was learned."""
        step = self.step
        shift = self._moved(step)
        return step_loss(self.node, step, float(self._seen), self._replaced, float(shift))

    @property
    def step(self) -> Step:
        """The iteration of the current round."""
        last = self._round == self.rounds - 1
        return self.calibration.step(self.node, float(self._seen), self._calibrated, last)

    def advance(self, new_records: int, replaced: int | None = None) -> None:
        """The round is over and brought `new_records` records, `replaced` of which differ between the two worlds.

        By default one record of the first round that brings any: no later record costs more.

        Raises:
            SpecError: not `0 <= replaced <= new_records`.
        """
        if replaced is None:
            replaced = 1 if new_records and not self._seen else 0
        if not 0 <= replaced <= new_records:
            raise SpecError(f"replaced must lie in [0, new_records={new_records}], got {replaced}")
        step = self.step
        self._shift, self._calibrated = self._moved(step), step.sensitivity
        self._seen += new_records
        self._replaced += replaced
        self._round += 1

    def _moved(self, step: Step) -> Scalars:
        if step.perturbed != "minimiser":
            return 0.0
        return moved(self.node, float(self._seen), step.carried, self._shift, float(self._replaced))


def admm_guarantee(
    calibration: Calibration,
    node: Node,
    rounds: int,
    enforced_by: Mapping[str, str],
    counts: IntArray | None = None,
    replaced: IntArray | None = None,
) -> Guarantee:
    """The meter run over the planned rounds.

    Args:
        calibration: of the noise.
        node: whose, with single numbers.
        rounds: planned.
        enforced_by: what makes numbers of `node` true, by their names there.
        counts: `(rounds,)` new records of each round (default: one each).
        replaced: `(rounds,)` of them that differ (default: one record of the first round that brings any).

    Raises:
        SpecError: wrong shapes or counts.
    """
    plan = np.ones(rounds, np.int64) if counts is None else np.asarray(counts)
    changes = None if replaced is None else np.asarray(replaced)
    for name, numbers in (("counts", plan), ("replaced", changes)):
        if numbers is not None and numbers.shape != (rounds,):
            raise SpecError(f"{name} must have one number for each of the {rounds} rounds, got shape {numbers.shape}")
    accountant, losses = AdmmAccountant(calibration, node, rounds), np.zeros(rounds)
    for t in range(rounds):
        losses[t] = accountant.next_loss()
        accountant.advance(int(plan[t]), None if changes is None else int(changes[t]))
    uses = 1 if changes is None else int(changes.sum())
    return Guarantee(
        threat_model=ThreatModel.WIRE,
        adjacency=f"{uses} record{'s' * (uses != 1)} of one learner replaced (event level, numbers of records public)",
        mode=calibration.mode,
        per_round=losses,
        paper=paper_epsilon(node, rounds),
        infinite_horizon=math.inf,
        proof=_proof(calibration),
        constants={name: Constant(float(getattr(node, name)), text) for name, text in enforced_by.items()},
    )


def paper_epsilon(node: Node, rounds: int) -> FloatArray:
    """`(rounds,)`: the sum of the alphas of iterations 1..t, for message 0 is no iteration. The paper states single ones."""
    alphas = np.full(rounds, float(node.alpha))
    alphas[-1] = node.final_alpha
    alphas[0] = 0.0
    return np.cumsum(alphas)


def _proof(calibration: Calibration) -> str:
    if isinstance(calibration, Unperturbed):
        return "none: messages carry no noise"
    theorem = "Theorem 5 (DVP)" if isinstance(calibration, Objective) else "Theorem 6 (PVP)"
    return f"Zhang & Zhu 2017, {theorem}, corrected and summed over the iterations; sottovoce.algorithms.admm"
