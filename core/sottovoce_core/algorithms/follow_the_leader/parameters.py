"""The parameters of PD-FTGL and PD-OCG, and how a run is made of them."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from sottovoce_core.algorithms.follow_the_leader.accounting import Blocks, LeafSensitivity
from sottovoce_core.algorithms.follow_the_leader.algorithm import PdFtgl
from sottovoce_core.algorithms.follow_the_leader.conditions import (
    Problem,
    findings,
    plan_blocks,
    prefix_error,
    problem_of,
    require_bound,
)
from sottovoce_core.algorithms.follow_the_leader.gossip import ROUNDING, Gossip, Lazy, gossip_of
from sottovoce_core.algorithms.setting import AlgorithmSpec, Caveat, PerLearner, Setting, divided, require_scales, times
from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import CheckFailed, SpecError
from sottovoce_core.registry import Count, Positive

_Placement = Literal["before_gossip", "after_gossip"]
_Rule = Literal["tight", "paper"]


class _BlockSpec(AlgorithmSpec):
    """The parameters that PD-FTGL and PD-OCG share. What is left out follows the theory, see `conditions`."""

    delay: ClassVar[int] = 2
    """Blocks from a gradient to the first decision that rests on it."""
    lag: ClassVar[float] = 12.0
    """Factor of the first sum of the regret bound (8)."""

    epsilon: PerLearner | None = None
    """Target for a whole run: noise is made to fit. Infinite: no noise."""
    noise_scale: PerLearner | None = None
    """Laplace scale of a coordinate of a tree node, in place of `epsilon`. 0: no noise."""
    noise_placement: _Placement = "before_gossip"
    """after_gossip, as published, protects published decisions only: what is said is not protected at all."""
    scale_rule: _Rule = "tight"
    """How `epsilon` becomes a scale: tight, or the paper's formula (more noise than needed)."""
    block_length: Count | None = None
    """L, rounds that a decision is held for."""
    gossip_steps: Count | None = None
    """K, at most L."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """theta; 0 is plain gossip."""
    regularization: Positive | None = None
    """h. The default is what the regret bound is least for, which is cautious."""
    multiplier: Positive = 1.0
    """Factor on h, given or not."""
    lazy: Lazy = "auto"
    """Gossip with (I+P)/2; auto: where the mixing matrix has a negative eigenvalue."""

    def build(self, setting: Setting) -> tuple[PdFtgl, tuple[Caveat, ...]]:
        gossip = gossip_of(setting.fixed_network, self.lazy)
        if gossip.smallest < -ROUNDING:  # accelerated gossip has no bound then
            text = "mixing matrix has a negative eigenvalue: use (I+P)/2, that is, set lazy to true or auto"
            raise CheckFailed("P_EIGENVALUE", f"{text}, got {gossip.smallest:g}")
        problem, sharp = problem_of(setting), gossip.sharp_steps(setting.rounds)
        length = self.block_length or self._default_length(problem, gossip)
        steps = self.gossip_steps or self._default_steps(length, sharp)
        blocks = plan_blocks(setting.rounds, length, steps, self.delay, sharp)
        momentum = gossip.momentum if self.momentum is None else self.momentum
        reach = np.abs(gossip.polynomial(steps, momentum))
        sensitivity = LeafSensitivity(setting.dim, setting.loss.gradient_change(problem.radius))
        before = self.noise_placement == "before_gossip"
        scales = self._scales(setting, problem, blocks, sensitivity, reach)
        error = prefix_error(max(scales), setting.dim, blocks, gossip, momentum, before=before)
        algorithm = PdFtgl(
            name=self.name,
            dim=setting.dim,
            blocks=blocks,
            gossip=gossip,
            momentum=momentum,
            regularization=self.multiplier * (self.regularization or problem.regularization(length, self.lag, error)),
            scales=scales,
            before_gossip=before,
            delay=self.delay,
            problem=problem,
            sensitivity=sensitivity,
            reach=reach,
            loss=setting.loss,
            decision_set=setting.decision_set,
        )
        paper_scale = self.scale_rule == "paper" and self.epsilon is not None
        return algorithm, tuple(findings(blocks, gossip, sensitivity, exposed=not before, paper_scale=paper_scale))

    def noisier(self, factors: tuple[float, ...]) -> _BlockSpec:
        if self.noise_scale == 0 or self.epsilon == math.inf:
            raise SpecError("algorithm.noise_scale must be above 0, or algorithm.epsilon finite, to be scaled")
        if self.epsilon is not None:
            return self.model_copy(update={"epsilon": divided(self.epsilon, factors)})
        return self.model_copy(update={"noise_scale": times(self.noise_scale or 0.0, factors)})

    def _default_length(self, problem: Problem, gossip: Gossip) -> int:
        return gossip.paper_steps(problem.rounds)

    def _default_steps(self, length: int, sharp: int) -> int:
        return length

    def _scales(
        self, setting: Setting, problem: Problem, blocks: Blocks, sensitivity: LeafSensitivity, reach: FloatArray
    ) -> tuple[float, ...]:
        """Laplace scale of every learner; zeros: no noise."""
        if self.noise_scale is not None and self.epsilon is None:
            scales = setting.per_learner(self.noise_scale, "algorithm.noise_scale")
            if not all(0 <= scale < math.inf for scale in scales) or (not all(scales) and any(scales)):
                text = "noise_scale must be finite, and above 0 for all learners or 0 for all"
                raise CheckFailed("NOISE_SCALE", f"{text}, got {self.noise_scale}")
        elif self.epsilon is not None and self.noise_scale is None:
            scales = self._calibrated(self.epsilon, setting, problem, blocks, sensitivity, reach)
        else:
            text = "exactly one of algorithm.epsilon and algorithm.noise_scale must be given"
            given = "neither" if self.epsilon is None else "both"
            raise CheckFailed("NOISE", f"{text}, got {given}; for no noise at all set noise_scale to 0")
        if any(scales):
            require_bound(problem.lipschitz, "noise")
        require_scales(scales)
        return scales

    def _calibrated(
        self,
        epsilon: PerLearner,
        setting: Setting,
        problem: Problem,
        blocks: Blocks,
        sensitivity: LeafSensitivity,
        reach: FloatArray,
    ) -> tuple[float, ...]:
        """Laplace scales at which the worst record costs `epsilon`; infinite where gradients have no bound."""
        targets = setting.per_learner(epsilon, "algorithm.epsilon")
        if not all(target > 0 for target in targets):
            raise CheckFailed("EPSILON", f"epsilon must be above 0 (infinite: no noise), got {epsilon}")
        mixed = math.inf in targets and min(targets) < math.inf
        if mixed or (self.noise_placement == "after_gossip" and len(set(targets)) > 1):
            text = "epsilon must be one number for all where noise comes after gossip, and infinite for all or for none"
            raise CheckFailed("EPSILON_ONE", f"{text}, got {epsilon}")
        if self.scale_rule == "paper":
            return tuple(problem.paper_numerator(setting.dim) / target for target in targets)
        across, trees = (1.0, 1) if self.noise_placement == "before_gossip" else (reach.sum(axis=0).max(), len(reach))
        return tuple(sensitivity.scale(target, blocks.leaves, float(across), trees) for target in targets)


class PdFtglSpec(_BlockSpec):
    """PD-FTGL (Wang et al. 2025, Algorithm 1), by default with its noise where it protects the wire."""

    name: Literal["pd-ftgl"]


class PdOcgSpec(_BlockSpec):
    """PD-OCG (Wang et al. 2025, Algorithm 3): projection-free."""

    name: Literal["pd-ocg"]
    delay: ClassVar[int] = 3
    lag: ClassVar[float] = 30.0

    def _default_length(self, problem: Problem, gossip: Gossip) -> int:
        T = problem.rounds
        return max(1, round((T / math.log(T)) ** (2 / 3) if problem.alpha and T > 1 else math.sqrt(T)))

    def _default_steps(self, length: int, sharp: int) -> int:
        return min(length, sharp)
