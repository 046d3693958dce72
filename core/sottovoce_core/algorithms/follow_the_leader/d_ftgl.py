"""D-FTGL: decentralised follow-the-generalised-leader, a baseline without privacy (Wan et al. 2024; Wang et al. 2025, (3)-(4)).

Round t of learner i::

    send      z_t                                  (a running sum of gradients, without noise)
    receive   z_t^j of every neighbour j
    update    z_{t+1} = sum_j P_ij z_t^j + g_t,   x_{t+1} = Proj( -z_{t+1} / (alpha (t+1) + 2h) )

with g_t the data gradient at x_t: the loss's exact ridge is alpha, and a gradient without its alpha x is the data gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sottovoce_core.algorithms.follow_the_leader.gossip import Gossip, LazyMode
from sottovoce_core.algorithms.follow_the_leader.parameters import RegretParameters
from sottovoce_core.algorithms.interface import Message, ReceivedMessages, StateAxes
from sottovoce_core.algorithms.run_context import AlgorithmSpec, RunContext, RunWarning
from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.decision_sets import DecisionSet
from sottovoce_core.errors import SpecError
from sottovoce_core.losses import Loss, enforce_bounds, mean_gradient
from sottovoce_core.noise import NoiseSource
from sottovoce_core.noise.mechanisms import dirac_log_density
from sottovoce_core.privacy.accountant import PrecomputedAccountant
from sottovoce_core.privacy.guarantee import GuaranteeBasis
from sottovoce_core.registry import Positive


class DFtglSpec(AlgorithmSpec):
    """Parameters of D-FTGL, which sends sums of gradients without noise."""

    name: Literal["d-ftgl"]
    regularization: Positive | None = None
    """Regularisation h. The default minimises a regret bound, which is conservative."""
    multiplier: Positive = 1.0
    """Factor on h, for a given or a default h."""
    lazy: LazyMode = False
    """Gossip with (I+P)/2; auto: if the mixing matrix has a negative eigenvalue."""

    def build(self, context: RunContext) -> tuple[DFtgl, tuple[RunWarning, ...]]:
        gossip, regret = Gossip.from_network(context.fixed_network, self.lazy), RegretParameters.from_context(context)
        # Plain gossip keeps all z within sqrt(n) G / rho of their mean: the error of a prefix sum in the bound.
        error = math.sqrt(gossip.n_learners) * regret.lipschitz / gossip.spectral_gap
        h = self.multiplier * (self.regularization or regret.regularization(1, 2.0, error))
        algorithm = DFtgl(context.dim, context.rounds, gossip, h, context.loss, context.decision_set)
        text = "d-ftgl sends sums of gradients without noise: on the wire epsilon is infinite; for privacy take pd-ftgl"
        return algorithm, (RunWarning("WIRE_EXPOSED", text),)

    def scale_noise(self, factors: tuple[float, ...]) -> DFtglSpec:
        raise SpecError("d-ftgl has no noise; take pd-ftgl")


@dataclass(frozen=True, slots=True)
class _State:
    """Round t, x_t, and z_t."""

    t: int
    decision: FloatArray
    sum: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class DFtgl:
    """D-FTGL of one run."""

    dim: int
    rounds: int
    gossip: Gossip
    regularization: float
    loss: Loss
    decision_set: DecisionSet
    name: str = "d-ftgl"

    def field_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"y": (self.dim,)}

    def init(self, axes: StateAxes) -> _State:
        initial = np.zeros((*axes.leading_shape, self.dim)) + self.loss.initial_parameters(self.dim)
        # The regulariser is h ||x - x_0||^2 instead of h ||x||^2: a neural network cannot start from zero.
        return self._decide(0, -2.0 * self.regularization * initial)

    def emit(self, state: _State, noise: NoiseSource) -> tuple[_State, Message]:
        return state, Message({"y": state.sum})

    def update(self, state: _State, received: ReceivedMessages, batch: Batch) -> _State:
        gradient = mean_gradient(self.loss, state.decision, enforce_bounds(self.loss, batch))
        total = self.gossip.mix(state.sum, received.weighted_sum("y"), received.own_weight) + gradient
        return self._decide(state.t + 1, total)

    def decision(self, state: _State) -> FloatArray:
        return state.decision

    def replay(self, state: _State, message: Message) -> tuple[_State, FloatArray]:
        sent = np.broadcast_to(message["y"], state.decision.shape)
        return self._decide(state.t, sent), dirac_log_density(sent, state.sum)

    def _decide(self, t: int, total: FloatArray) -> _State:
        """Return the state before round t, a function of the sum alone."""
        curvature = self.loss.ridge * t + 2.0 * self.regularization
        return _State(t, self.decision_set.project(total * (-1.0 / curvature)), total)

    def noise_scale(self, learner: int, t: int) -> float:
        return 0.0

    def is_model_public(self, rounds: int) -> bool:
        """Return False: the sum contains the last gradients before it is sent."""
        return False

    def accountant(self, learner: int) -> PrecomputedAccountant:
        """Return infinite losses, except 0 for the first message, which is zero."""
        losses = np.full(self.rounds, math.inf)
        losses[0] = 0.0
        return PrecomputedAccountant(losses, basis=GuaranteeBasis("none", "no guarantee"))
