"""D-FTGL: decentralised follow the generalised leader, a baseline without privacy (Wan et al. 2024; Wang et al. 2025, (3)-(4)).

Round t of learner i::

    say       z_t                                  (a running sum of gradients, in clear)
    hear      z_t^j of every neighbour j
    update    z_{t+1} = sum_j P_ij z_t^j + g_t,   x_{t+1} = Proj( -z_{t+1} / (alpha (t+1) + 2h) )

with g_t the data gradient at x_t: the loss's exact ridge is alpha, and a gradient without its alpha x is the data gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sottovoce_core.algorithms.follow_the_leader.gossip import Gossip, LazyMode
from sottovoce_core.algorithms.follow_the_leader.parameters import Problem
from sottovoce_core.algorithms.interface import ReceivedMessages, Message, Who
from sottovoce_core.algorithms.setting import AlgorithmSpec, RunWarning, Setting
from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.decision_sets import DecisionSet
from sottovoce_core.errors import SpecError
from sottovoce_core.losses import Loss, bounded, mean_gradient
from sottovoce_core.noise import NoiseSource
from sottovoce_core.noise.mechanisms import dirac_log_density
from sottovoce_core.privacy.accountant import PrecomputedAccountant
from sottovoce_core.privacy.guarantee import GuaranteeBasis
from sottovoce_core.registry import Positive


class DFtglSpec(AlgorithmSpec):
    """D-FTGL: says sums of gradients without noise."""

    name: Literal["d-ftgl"]
    regularization: Positive | None = None
    """h. The default is what a regret bound is least for, which is cautious."""
    multiplier: Positive = 1.0
    """Factor on h, given or not."""
    lazy: LazyMode = False
    """Gossip with (I+P)/2; auto: where the mixing matrix has a negative eigenvalue."""

    def build(self, setting: Setting) -> tuple[_DFtgl, tuple[RunWarning, ...]]:
        gossip, problem = Gossip.of(setting.fixed_network, self.lazy), Problem.of(setting)
        # Plain gossip keeps all z within sqrt(n) G / rho of their mean: the error of a prefix sum in the bound.
        error = math.sqrt(gossip.n_learners) * problem.lipschitz / gossip.gap
        h = self.multiplier * (self.regularization or problem.regularization(1, 2.0, error))
        algorithm = _DFtgl(setting.dim, setting.rounds, gossip, h, setting.loss, setting.decision_set)
        text = "d-ftgl says sums of gradients without noise: on the wire epsilon is infinite; for privacy take pd-ftgl"
        return algorithm, (RunWarning("WIRE_EXPOSED", text),)

    def noisier(self, factors: tuple[float, ...]) -> DFtglSpec:
        raise SpecError("d-ftgl has no noise; take pd-ftgl")


@dataclass(frozen=True, slots=True)
class _State:
    """The round t, x_t, and z_t."""

    t: int
    decision: FloatArray
    sum: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class _DFtgl:
    """The algorithm for one run."""

    dim: int
    rounds: int
    gossip: Gossip
    regularization: float
    loss: Loss
    decision_set: DecisionSet
    name: str = "d-ftgl"

    def field_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"y": (self.dim,)}

    def start(self, who: Who) -> _State:
        initial = np.zeros((*who.lead, self.dim)) + self.loss.initial(self.dim)
        # A regulariser h ||x - x_0||^2 in place of h ||x||^2: a network of neurons cannot start from zero.
        return self._deciding(0, -2.0 * self.regularization * initial)

    def speak(self, state: _State, noise: NoiseSource) -> tuple[_State, Message]:
        return state, Message({"y": state.sum})

    def listen(self, state: _State, heard: ReceivedMessages, batch: Batch) -> _State:
        seen = mean_gradient(self.loss, state.decision, bounded(self.loss, batch))
        total = self.gossip.mix(state.sum, heard.weighted_sum("y"), heard.own_weight) + seen
        return self._deciding(state.t + 1, total)

    def decision(self, state: _State) -> FloatArray:
        return state.decision

    def overheard(self, state: _State, message: Message) -> tuple[_State, FloatArray]:
        said = np.broadcast_to(message["y"], state.decision.shape)
        return self._deciding(state.t, said), dirac_log_density(said, state.sum)

    def _deciding(self, t: int, total: FloatArray) -> _State:
        """The state before round t, a function of the sum alone."""
        curvature = self.loss.ridge * t + 2.0 * self.regularization
        return _State(t, self.decision_set.project(total * (-1.0 / curvature)), total)

    def noise_scale(self, learner: int, t: int) -> float:
        return 0.0

    def is_model_public(self, rounds: int) -> bool:
        """Not the last gradients, which are in the sum before it is said."""
        return False

    def accountant(self, learner: int) -> PrecomputedAccountant:
        """Nothing in the first message, which is zero; everything after it."""
        losses = np.full(self.rounds, math.inf)
        losses[0] = 0.0
        return PrecomputedAccountant(losses, grounds=GuaranteeBasis("none", "nothing is promised"))
