"""An algorithm of a user's own, named by a spec as `module:Class`: noisy gossip that runs over every network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sottovoce_core.algorithms.interface import Message, ReceivedMessages, StateAxes
from sottovoce_core.algorithms.run_context import AlgorithmSpec, RunContext, RunWarning
from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.noise import NoiseSource
from sottovoce_core.noise.mechanisms import add_laplace_noise, laplace_log_density
from sottovoce_core.privacy.accountant import PrecomputedAccountant
from sottovoce_core.spec import RunSpec, parse_spec

GOSSIP = "tests.gossip:GossipSpec"


class GossipSpec(AlgorithmSpec):
    """Say the noisy value, mix, and step towards the mean of the round's records."""

    scale: float = 1.0
    step: float = 0.1

    def build(self, context: RunContext) -> tuple[Gossip, tuple[RunWarning, ...]]:
        return Gossip(context.n_features, context.rounds, self.scale, self.step), ()


@dataclass(frozen=True, slots=True)
class State:
    t: int
    value: FloatArray


@dataclass(frozen=True, slots=True)
class Gossip:
    """`x <- a_ii x + sum_j a_ij (x_j + noise_j) - step (x - mean record)`."""

    dim: int
    rounds: int
    scale: float
    step: float
    name: str = "gossip"

    def field_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"y": (self.dim,)}

    def init(self, axes: StateAxes) -> State:
        return State(0, np.zeros((*axes.leading_shape, self.dim)))

    def emit(self, state: State, noise: NoiseSource) -> tuple[State, Message]:
        return state, Message({"y": add_laplace_noise(noise, "y", state.t, state.value, self.scale)})

    def update(self, state: State, received: ReceivedMessages, batch: Batch) -> State:
        mixed = received.own_weight * state.value + received.weighted_sum("y")
        pulled = batch.features.mean(axis=-2)[..., : self.dim]
        if pulled.ndim < mixed.ndim:
            pulled = pulled[:, None]
        return State(state.t + 1, mixed - self.step * (state.value - pulled))

    def decision(self, state: State) -> FloatArray:
        return state.value

    def replay(self, state: State, message: Message) -> tuple[State, FloatArray]:
        return state, laplace_log_density(message["y"], state.value, self.scale)

    def noise_scale(self, learner: int, t: int) -> float:
        return self.scale

    def accountant(self, learner: int) -> PrecomputedAccountant:
        """Nothing is promised."""
        return PrecomputedAccountant(np.full(self.rounds, np.inf))


def gossip_spec(topology: dict[str, Any], rounds: int, learners: Any, **sections: Any) -> RunSpec:
    """A run of it."""
    document = {"rounds": rounds, "learners": learners, "topology": topology, "durability": "process", **sections}
    return parse_spec({**document, "algorithm": {"name": GOSSIP}}, allow_imports=True)
