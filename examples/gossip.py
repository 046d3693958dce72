"""Gossip descent: x <- Pro(b - step * gradient(b)), b the projected average of all noised models, own one included."""

from dataclasses import dataclass, replace

import numpy as np

from sottovoce_core.algorithms.interface import Message
from sottovoce_core.algorithms.run_context import AlgorithmSpec, RunContext
from sottovoce_core.arrays import Batch
from sottovoce_core.losses import mean_gradient
from sottovoce_core.noise.mechanisms import add_laplace_noise, laplace_log_density, laplace_loss
from sottovoce_core.privacy.accountant import PrecomputedAccountant
from sottovoce_core.privacy.loss import Mechanism


class GossipSpec(AlgorithmSpec):
    step: float = 0.2
    scale: float = 1.0
    has_shared_noise_scale = True  # one scale for all learners

    def build(self, context):
        return Gossip(self.name, context.dim, context, self.step, self.scale), ()

    def scale_noise(self, factors):
        return self.model_copy(update={"scale": self.scale * factors[0]})


@dataclass(frozen=True)
class State:
    t: int
    x: np.ndarray
    message: np.ndarray  # the own noised model


@dataclass(frozen=True)
class Gossip:
    name: str
    dim: int
    context: RunContext
    step: float
    scale: float

    def field_shapes(self):
        return {"y": (self.dim,)}

    def init(self, axes):
        return State(0, np.zeros((*axes.leading_shape, self.dim)), np.zeros((*axes.leading_shape, self.dim)))

    def emit(self, state, noise):
        message = add_laplace_noise(noise, "y", state.t, state.x, self.scale)
        return replace(state, message=message), Message({"y": message})

    def update(self, state, received, batch):
        loss, project = self.context.loss, self.context.decision_set.project
        b = project(received.own_weight * state.message + received.weighted_sum("y"))
        records = Batch(*loss.enforce_bounds(batch.features, batch.labels), batch.mask)
        x = project(b - self.step * mean_gradient(loss, b, records))
        return State(state.t + 1, x, state.message)

    def decision(self, state):
        return state.x

    def replay(self, state, message):
        return replace(state, message=message["y"]), laplace_log_density(message["y"], state.x, self.scale)

    def noise_scale(self, learner, t):
        return self.scale

    def accountant(self, learner):
        change = self.step * self.context.loss.gradient_change(self.context.decision_set.largest_norm(self.dim))
        losses = np.zeros(self.context.rounds)  # x depends on messages and one round's records: only one message costs
        losses[1:2] = laplace_loss(np.sqrt(self.dim) * change, self.dim, self.scale)
        return PrecomputedAccountant(losses, Mechanism.laplace(self.dim))
