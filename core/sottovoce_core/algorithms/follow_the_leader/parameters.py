"""Parameters of PD-FTGL and PD-OCG, with the conditions and defaults of their theory (Wang et al., ICML 2025).

A condition of the privacy guarantee or of the algorithm itself raises an error. A condition of a regret theorem only, or of a
user's expectation, gives a warning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from sottovoce_core.algorithms.follow_the_leader.accounting import BlockSchedule, LeafSensitivity, levels
from sottovoce_core.algorithms.follow_the_leader.algorithm import PdFtgl
from sottovoce_core.algorithms.follow_the_leader.gossip import EIGENVALUE_TOLERANCE, Gossip, LazyMode
from sottovoce_core.algorithms.run_context import (
    AlgorithmSpec,
    PerLearner,
    RunContext,
    RunWarning,
    divide_per_learner,
    multiply_per_learner,
    require_scales,
)
from sottovoce_core.arrays import MAX_ARRAY_ELEMENTS, FloatArray
from sottovoce_core.errors import AssumptionViolated, SpecError
from sottovoce_core.registry import Count, Positive

# ---- conditions -------------------------------------------------------------------------------------------------------

_MAX_BISECTIONS = 64
"""Maximum number of bisections. Forty are enough for float64: the ratio's logarithm, at most 1500, is halved to 1e-9."""
MAX_GOSSIP_STEPS = 2**20
"""Maximum gossip steps of a block: each is a product of two matrices before the run begins."""


@dataclass(frozen=True, slots=True)
class RegretParameters:
    """Constants of a run in the regret bounds.

    Attributes:
        rounds: T.
        radius: R, largest l2 norm in the decision set.
        lipschitz: G, bound on a record's data gradient; may be infinite.
        alpha: strong convexity; the loss's exact ridge.
    """

    rounds: int
    radius: float
    lipschitz: float
    alpha: float

    @classmethod
    def from_context(cls, context: RunContext) -> RegretParameters:
        """Return the constants of a run.

        Raises:
            AssumptionViolated: ORIGIN or FINITE_ROUNDS.
        """
        context.require_finite_rounds("an algorithm whose regularization follows from the number of rounds")
        if not context.decision_set.contains_origin:
            raise AssumptionViolated(
                "ORIGIN", "the decision set must contain the origin (Assumption 3.1), got one that does not"
            )
        radius = context.decision_set.largest_norm(context.dim)
        return cls(context.rounds, radius, context.loss.gradient_bound(radius), context.loss.ridge)

    def paper_numerator(self, dim: int) -> float:
        """Return `6 sqrt(d) (G + alpha R) (2 + log2 T)`: epsilon times Laplace scale in Theorem 3.6."""
        bound = self.lipschitz + self.alpha * self.radius
        return 6.0 * math.sqrt(dim) * bound * (2.0 + math.log2(self.rounds))

    def regularization(self, length: int, lag: float, error: float) -> float:
        """Return the h that minimises the regret bound (8), or `alpha L` if that is larger.

        The bound of a learner: `h R^2 + L sum_z lag G L (G + 2 alpha R)/(alpha z L + 2h) + L sum_z 3 G E/(alpha z L + 2h)`, the
        second sum from z = 0. For alpha = 0 that is `sqrt(G T (lag G L + 3 E)/2) / R`.

        Args:
            length: L.
            lag: factor of the delay by blocks: 12 in (8), and 30 in (11) with its last term.
            error: E, expected l2 distance of the learner's prefix sum from the exact mean.

        Raises:
            AssumptionViolated: GRADIENT_BOUND or REGULARIZATION.
        """
        G, R, L, alpha = _require_bound(self.lipschitz, "the default regularization"), self.radius, length, self.alpha
        lag_term, noise_term = lag * G * L * (G + 2.0 * alpha * R), 3.0 * G * error
        low, high = alpha * L, math.sqrt(self.rounds * (lag_term + noise_term) / 2.0) / R
        if not math.isfinite(high):
            text = "the default regularization must be a finite number, got one outside float64"
            raise AssumptionViolated(
                "REGULARIZATION", f"{text}; take less noise or a smaller loss, or set regularization"
            )
        if not low:
            return high
        blocks = math.ceil(self.rounds / L)
        if blocks >= MAX_ARRAY_ELEMENTS:
            text = f"the default regularization needs fewer than {MAX_ARRAY_ELEMENTS} blocks, got {blocks}"
            raise AssumptionViolated("REGULARIZATION", f"{text}; set regularization, or a longer block")
        grown = alpha * L * np.arange(blocks + 1)

        def is_falling(h: float) -> bool:
            """Return whether a larger h lowers the bound."""
            c = (grown + 2.0 * h) ** -2
            return bool(2.0 * L * (lag_term * c[1:].sum() + noise_term * c[:-1].sum()) > R * R)

        if not is_falling(low):
            return low
        for _ in range(_MAX_BISECTIONS):
            if high / low <= 1.0 + 1e-9:
                break
            middle = math.sqrt(low) * math.sqrt(high)
            low, high = (middle, high) if is_falling(middle) else (low, middle)
        return high


def _require_bound(lipschitz: float, subject: str) -> float:
    """Return G if it is finite.

    Raises:
        AssumptionViolated: GRADIENT_BOUND.
    """
    if lipschitz == math.inf:
        text = f"{subject} needs a bound on a record's gradient, got none"
        raise AssumptionViolated("GRADIENT_BOUND", f"{text}; set loss.clip_norm")
    return lipschitz


def _plan_blocks(rounds: int, length: int, steps: int, delay: int, advice: int) -> BlockSchedule:
    """Build the schedule of blocks.

    Args:
        rounds: T.
        length: L.
        steps: K.
        delay: number of blocks at the end whose sums no decision uses.
        advice: a shorter block that would be enough.

    Raises:
        AssumptionViolated: BLOCK_LENGTH or GOSSIP_STEPS.
    """
    enough = f"rounds of at least {2 * length + 1}"
    hint = f"set {enough}, or block_length to {advice}" if 2 * advice < rounds else f"set {enough}, or a shorter block"
    if not 1 <= length <= rounds:
        raise AssumptionViolated("BLOCK_LENGTH", f"block_length must be in 1..horizon={rounds}, got {length}; {hint}")
    if 2 * length >= rounds:
        text = f"block_length must be below half the horizon ({rounds} rounds), or no decision ever moves"
        raise AssumptionViolated("BLOCK_LENGTH", f"{text}, got {length}; {hint}")
    if steps > length:
        text = f"gossip_steps must not exceed block_length={length}, got {steps}"
        raise AssumptionViolated("GOSSIP_STEPS", f"{text}; raise block_length or lower gossip_steps")
    if steps > MAX_GOSSIP_STEPS:
        raise AssumptionViolated(
            "GOSSIP_STEPS", f"gossip_steps must be at most {MAX_GOSSIP_STEPS}, got {steps}; set it"
        )
    return BlockSchedule(rounds, length, steps, max(math.ceil(rounds / length) - delay, 0))


def _prefix_error(
    scale: float, dim: int, blocks: BlockSchedule, gossip: Gossip, momentum: float, *, before: bool
) -> float:
    """Bound E, the l2 size of the noise in a prefix sum: `b sqrt(2 d levels)`; with noise before gossip, a mean of n copies."""
    noise = scale * math.sqrt(2.0 * dim * levels(blocks.leaves))
    n = gossip.n_learners
    return noise * (1.0 / math.sqrt(n) + math.sqrt(2.0 * n) * momentum ** (blocks.steps / 2.0)) if before else noise


def _warnings(
    blocks: BlockSchedule, gossip: Gossip, sensitivity: LeafSensitivity, *, exposed: bool, paper_scale: bool
) -> Iterator[RunWarning]:
    """Yield the warnings NO_MOVE, GOSSIP_SHORT, PAPER_SCALE and WIRE_EXPOSED."""
    sharp, paper = gossip.sharp_steps(blocks.rounds), gossip.paper_steps(blocks.rounds)
    if not blocks.leaves:
        count = math.ceil(blocks.rounds / blocks.length)
        yield RunWarning(
            "NO_MOVE", f"no decision ever moves: there must be one block more, got {count}; shorten block_length"
        )
    if blocks.steps < sharp:
        text = "learners agree less than Theorems 3.6 and 3.9 assume: gossip_steps should be at least"
        yield RunWarning(
            "GOSSIP_SHORT", f"{text} {sharp}, got {blocks.steps}; the regret bounds do not apply, privacy does"
        )
    if paper_scale and blocks.steps < paper:
        text = "the paper's noise scale needs gossip_steps of at least"
        yield RunWarning(
            "PAPER_SCALE", f"{text} {paper}, got {blocks.steps}; the claim is computed from the steps taken"
        )
    if exposed:
        text = "noise_placement after_gossip sends sums of gradients without noise: on the wire epsilon is infinite"
        hint = "only published decisions are protected; take before_gossip"
        yield RunWarning(
            "WIRE_EXPOSED", f"{text}, and {hint} (a record moves a sum by up to {sensitivity.gradient_change:g})"
        )


# ---- parameters -------------------------------------------------------------------------------------------------------

_Placement = Literal["before_gossip", "after_gossip"]
_ScaleRule = Literal["tight", "paper"]


class _BlockSpec(AlgorithmSpec):
    """Parameters that PD-FTGL and PD-OCG share. Omitted ones follow the theory."""

    delay: ClassVar[int] = 2
    """Number of blocks from a gradient to the first decision that uses it."""
    lag: ClassVar[float] = 12.0
    """Factor of the first sum of the regret bound (8)."""

    epsilon: PerLearner | None = None
    """Target epsilon of a whole run, to which noise is calibrated. Infinite: no noise."""
    noise_scale: PerLearner | None = None
    """Laplace scale of a coordinate of a tree node, instead of `epsilon`. 0: no noise."""
    noise_placement: _Placement = "before_gossip"
    """Placement of the noise. after_gossip, as in the paper, protects published decisions only, and no message."""
    scale_rule: _ScaleRule = "tight"
    """Rule from `epsilon` to a scale: tight, or the paper's formula (more noise than needed)."""
    block_length: Count | None = None
    """Block length L: number of rounds with the same decision."""
    gossip_steps: Count | None = None
    """Number of gossip steps K, at most L."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Momentum theta; 0 is plain gossip."""
    regularization: Positive | None = None
    """Regularisation h. The default minimises the regret bound, which is conservative."""
    multiplier: Positive = 1.0
    """Factor on h, for a given or a default h."""
    lazy: LazyMode = "auto"
    """Gossip with (I+P)/2; auto: if the mixing matrix has a negative eigenvalue."""

    def build(self, context: RunContext) -> tuple[PdFtgl, tuple[RunWarning, ...]]:
        gossip = Gossip.from_network(context.fixed_network, self.lazy)
        if gossip.min_eigenvalue < -EIGENVALUE_TOLERANCE:  # accelerated gossip has no bound then
            text = "mixing matrix has a negative eigenvalue: use (I+P)/2, that is, set lazy to true or auto"
            raise AssumptionViolated("P_EIGENVALUE", f"{text}, got {gossip.min_eigenvalue:g}")
        regret, sharp = RegretParameters.from_context(context), gossip.sharp_steps(context.rounds)
        length = self.block_length or self._default_length(regret, gossip)
        steps = self.gossip_steps or self._default_steps(length, sharp)
        blocks = _plan_blocks(context.rounds, length, steps, self.delay, sharp)
        momentum = gossip.momentum if self.momentum is None else self.momentum
        prefix_weights = np.abs(gossip.polynomial(steps, momentum))
        sensitivity = LeafSensitivity(context.dim, context.loss.gradient_change(regret.radius))
        before = self.noise_placement == "before_gossip"
        scales = self._scales(context, regret, blocks, sensitivity, prefix_weights)
        error = _prefix_error(max(scales), context.dim, blocks, gossip, momentum, before=before)
        algorithm = PdFtgl(
            name=self.name,
            dim=context.dim,
            blocks=blocks,
            gossip=gossip,
            momentum=momentum,
            regularization=self.multiplier * (self.regularization or regret.regularization(length, self.lag, error)),
            scales=scales,
            has_noise_before_gossip=before,
            delay=self.delay,
            paper_cost=regret.paper_numerator(context.dim),
            sensitivity=sensitivity,
            prefix_weights=prefix_weights,
            loss=context.loss,
            decision_set=context.decision_set,
        )
        paper_scale = self.scale_rule == "paper" and self.epsilon is not None
        return algorithm, tuple(_warnings(blocks, gossip, sensitivity, exposed=not before, paper_scale=paper_scale))

    def scale_noise(self, factors: tuple[float, ...]) -> _BlockSpec:
        if self.noise_scale == 0 or self.epsilon == math.inf:
            raise SpecError("algorithm.noise_scale must be above 0, or algorithm.epsilon finite, to be scaled")
        if self.epsilon is not None:
            return self.model_copy(update={"epsilon": divide_per_learner(self.epsilon, factors)})
        return self.model_copy(update={"noise_scale": multiply_per_learner(self.noise_scale or 0.0, factors)})

    def _default_length(self, regret: RegretParameters, gossip: Gossip) -> int:
        return gossip.paper_steps(regret.rounds)

    def _default_steps(self, length: int, sharp: int) -> int:
        return length

    def _scales(
        self,
        context: RunContext,
        regret: RegretParameters,
        blocks: BlockSchedule,
        sensitivity: LeafSensitivity,
        prefix_weights: FloatArray,
    ) -> tuple[float, ...]:
        """Return the Laplace scale of every learner; zeros: no noise."""
        if self.noise_scale is not None and self.epsilon is None:
            scales = context.broadcast_to_learners(self.noise_scale, "algorithm.noise_scale")
            if not all(0 <= scale < math.inf for scale in scales) or (not all(scales) and any(scales)):
                text = "noise_scale must be finite, and above 0 for all learners or 0 for all"
                raise AssumptionViolated("NOISE_SCALE", f"{text}, got {self.noise_scale}")
        elif self.epsilon is not None and self.noise_scale is None:
            scales = self._calibrate_scales(self.epsilon, context, regret, blocks, sensitivity, prefix_weights)
        else:
            text = "exactly one of algorithm.epsilon and algorithm.noise_scale must be given"
            given = "neither" if self.epsilon is None else "both"
            raise AssumptionViolated("NOISE", f"{text}, got {given}; for no noise at all set noise_scale to 0")
        if any(scales):
            _require_bound(regret.lipschitz, "noise")
        require_scales(scales)
        return scales

    def _calibrate_scales(
        self,
        epsilon: PerLearner,
        context: RunContext,
        regret: RegretParameters,
        blocks: BlockSchedule,
        sensitivity: LeafSensitivity,
        prefix_weights: FloatArray,
    ) -> tuple[float, ...]:
        """Return the Laplace scales at which the worst-case record costs `epsilon`; infinite if gradients have no bound."""
        targets = context.broadcast_to_learners(epsilon, "algorithm.epsilon")
        if not all(target > 0 for target in targets):
            raise AssumptionViolated("EPSILON", f"epsilon must be above 0 (infinite: no noise), got {epsilon}")
        mixed = math.inf in targets and min(targets) < math.inf
        if mixed or (self.noise_placement == "after_gossip" and len(set(targets)) > 1):
            text = "epsilon must be one number for all if noise comes after gossip, and infinite for all or for none"
            raise AssumptionViolated("EPSILON_UNIFORM", f"{text}, got {epsilon}")
        if self.scale_rule == "paper":
            return tuple(regret.paper_numerator(context.dim) / target for target in targets)
        across, trees = (
            (1.0, 1)
            if self.noise_placement == "before_gossip"
            else (prefix_weights.sum(axis=0).max(), len(prefix_weights))
        )
        return tuple(sensitivity.calibrate_scale(target, blocks.leaves, float(across), trees) for target in targets)


class PdFtglSpec(_BlockSpec):
    """PD-FTGL (Wang et al. 2025, Algorithm 1), by default with noise before gossip, which protects the wire."""

    name: Literal["pd-ftgl"]


class PdOcgSpec(_BlockSpec):
    """PD-OCG (Wang et al. 2025, Algorithm 3): projection-free."""

    name: Literal["pd-ocg"]
    delay: ClassVar[int] = 3
    lag: ClassVar[float] = 30.0

    def _default_length(self, regret: RegretParameters, gossip: Gossip) -> int:
        T = regret.rounds
        return max(1, round((T / math.log(T)) ** (2 / 3) if regret.alpha and T > 1 else math.sqrt(T)))

    def _default_steps(self, length: int, sharp: int) -> int:
        return min(length, sharp)
