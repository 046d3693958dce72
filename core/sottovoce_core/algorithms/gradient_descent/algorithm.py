"""Gossip gradient descent, with or without noise: DSGD, DOLA, PDOP, DPDOLA, PD-OGD, D-OGD, and DPSR.

Round t of learner i::

    say       y_t = x_t + noise,  noise ~ Laplace(rho_t)
    hear      y_t^j of every neighbour j
    mix       b = a_ii own + sum_j a_ij y_t^j             own: y_t (as it was said) or x_t (clean)
    update    x_{t+1} = Pro( b - alpha_t g_t(p) )         p: b, or the own x_t
    play      Pro(b), or x_{t+1}

`g_t` is the mean gradient of the records of round t alone, ridge included. A record of round t comes after the messages of
round t, so it first shows in message t+1; `y_0` says the start, which knows no data.

The published methods are choices of `own`, p, what is played, and the schedules of step and noise
(`parameters`). With the own value clean, the gradient at b and b played it is adapt-then-combine: x is the
adapted value z that is said, b the combined one. Playing x instead is combine-then-adapt. The messages of both are equal.

DPSR: gossip gradient descent over a fixed directed graph, rescaled (Xiong et al. 2020; reconstructed, details unsure).

Row-stochastic weights W alone would lead to an optimum in which learner i weighs `pi_i`, its share of W's left Perron vector.
So every learner also tracks its own share, by a second vector that knows no data, and divides its steps by it::

    say       y_t = x_t + noise,   e_t                     e_0 = unit vector of the learner
    hear      y_t^j, e_t^j
    update    x_{t+1} = Pro( sum_j W_ij y_t^j - eta_t / [e_t]_i g_t(x_t) ),   e_{t+1} = sum_j W_ij e_t^j

The sums include the learner itself, its own value as it was said. `[e_t]_i = (W^t)_ii` follows from the network, which is
public: a neighbour that lies about e cannot make a step larger than what the guarantee assumes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from sottovoce_core.algorithms.gradient_descent.accounting import (
    DescentAccountant,
    DescentAdjacency,
    LearnerUpdate,
    RoundSchedule,
)
from sottovoce_core.algorithms.interface import Message, ReceivedMessages, StateAxes
from sottovoce_core.arrays import Batch, FloatArray, Scalars
from sottovoce_core.decision_sets import DecisionSet
from sottovoce_core.losses import Loss, enforce_bounds, mean_gradient
from sottovoce_core.network.network import Network
from sottovoce_core.noise import NoiseSource
from sottovoce_core.noise.mechanisms import (
    add_laplace_noise,
    dirac_log_density,
    field_lattice_spacing,
    laplace_log_density,
    magnitude_bound,
)
from sottovoce_core.privacy.guarantee import Adjacency, Regularity

# ---- algorithm -------------------------------------------------------------------------------------------------------

Point = Literal["own", "mixed"]
"""x, or b: where the gradient is taken, and which of the two is played."""

OwnValue = Literal["said", "clean"]
"""How the learner's own value enters its mix: with the noise of its message, or without."""


@dataclass(frozen=True, slots=True)
class _State:
    """x_t, what was said of it in this round, and what is played."""

    who: StateAxes
    t: int
    x: FloatArray
    said: FloatArray
    played: FloatArray


@dataclass(frozen=True, slots=True)
class GossipDescent:
    """The algorithm for one run: all learners' parameters, by index."""

    name: str
    dim: int
    rounds: int
    step: tuple[RoundSchedule, ...]
    """alpha_t of every learner."""
    noise: tuple[RoundSchedule, ...]
    """rho_t of every learner: all positive, or all 0."""
    own_value: OwnValue
    gradient_at: Point
    play: Point
    adjacency: DescentAdjacency
    loss: Loss
    decision_set: DecisionSet
    network: Network

    def field_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"y": (self.dim,)}

    def init(self, axes: StateAxes) -> _State:
        first = self.decision_set.project(
            np.broadcast_to(self.loss.initial_parameters(self.dim), (*axes.leading_shape, self.dim))
        )
        return _State(axes, 0, first, first, first)

    def emit(self, state: _State, noise: NoiseSource) -> tuple[_State, Message]:
        said = add_laplace_noise(
            noise, "y", state.t, state.x, self._scale(state), partial(_picked, state.who, self.noise)
        )
        return _State(state.who, state.t, state.x, said, state.played), Message({"y": said})

    def update(self, state: _State, received: ReceivedMessages, batch: Batch) -> _State:
        return self.descend(state, received, batch, _picked(state.who, self.step, state.t))

    def descend(self, state: _State, received: ReceivedMessages, batch: Batch, step: Scalars) -> _State:
        """`listen` with a step size of one's own."""
        own = state.said if self.own_value == "said" else state.x
        mixed = received.own_weight * own
        mixed += received.weighted_sum("y")
        point = mixed if self.gradient_at == "mixed" else state.x
        gradient = mean_gradient(self.loss, point, enforce_bounds(self.loss, batch))
        if self.loss.ridge:
            gradient += self.loss.ridge * point
        gradient *= step
        x = self.decision_set.project(np.subtract(mixed, gradient, out=gradient))
        played = self.decision_set.project(mixed) if self.play == "mixed" else x
        return _State(state.who, state.t + 1, x, state.said, played)

    def decision(self, state: _State) -> FloatArray:
        return state.played

    def replay(self, state: _State, message: Message) -> tuple[_State, FloatArray]:
        said = message["y"]
        return replace(state, said=said), laplace_log_density(said, state.x, self._scale(state))

    def lattice_spacings(self, learner: int, t: int) -> dict[str, float]:
        return field_lattice_spacing("y", self.noise_scale(learner, t))

    def clip_bounds(self, learner: int, t: int) -> dict[str, float]:
        return {"y": magnitude_bound(self.decision_set.largest_norm(self.dim), self.noise_scale(learner, t))}

    def noise_scale(self, learner: int, t: int) -> float:
        return self.noise[learner](t)

    def is_model_public(self, rounds: int) -> bool:
        """The mix of what was said is; a clean value in it, or a step from it on the newest records, is in no message."""
        return self.own_value == "said" and self.play == "mixed"

    def accountant(self, learner: int) -> DescentAccountant:
        own_weight = self._clean_weight(learner)
        update = LearnerUpdate(
            self.dim,
            self.step[learner],
            self.noise[learner],
            own_weight,
            is_gradient_at_mix=self.gradient_at == "mixed",
        )
        named = own_weight(0) if self.own_value == "clean" else None
        return DescentAccountant(self.regularity(), update, Adjacency(self.adjacency), named)

    def regularity(self) -> Regularity:
        """What is known of the loss where gradients are taken: b carries noise, so it may lie anywhere."""
        known = Regularity.from_loss(self.loss, self.decision_set, self.dim)
        if self.gradient_at == "own":
            return known
        change, bound = self.loss.gradient_change(np.inf), self.loss.gradient_bound(np.inf)
        return replace(known, gradient_change=change, clip_norm=bound)

    def _clean_weight(self, learner: int) -> Callable[[int], float]:
        """Weight by round of what enters the mix without noise."""
        if self.own_value == "said":
            return lambda t: 0.0
        return lambda t: float(self.network.mixing(t).own_weights[learner])

    def _scale(self, state: _State) -> Scalars:
        return _picked(state.who, self.noise, state.t)


def _picked(who: StateAxes, schedules: tuple[RoundSchedule, ...], t: int) -> Scalars:
    """The numbers of round t that belong to a state, ready to broadcast."""
    if isinstance(who.learner, int):
        return schedules[who.learner](t)
    if schedules.count(schedules[0]) == len(schedules):
        return schedules[0](t)
    return who.pick(tuple([schedule(t) for schedule in schedules]))


# ---- dpsr ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RescaledState:
    """The state of the descent, the learner's own place as a unit vector, and e_t: both `(..., learners)`."""

    descent: _State
    place: FloatArray
    e: FloatArray


@dataclass(frozen=True, slots=True)
class Dpsr:
    """The algorithm for one run: a descent whose planned steps are rescaled already, and the steps before that."""

    descent: GossipDescent
    unscaled_steps: tuple[RoundSchedule, ...]
    n_learners: int

    @property
    def name(self) -> str:
        return self.descent.name

    @property
    def dim(self) -> int:
        return self.descent.dim

    def field_shapes(self) -> dict[str, tuple[int, ...]]:
        return {**self.descent.field_shapes(), "e": (self.n_learners,)}

    def init(self, axes: StateAxes) -> _RescaledState:
        index = np.asarray(axes.learner)
        unit = np.eye(self.n_learners)[index if index.ndim == 0 else index[:, None]]
        place = np.broadcast_to(unit, (*axes.leading_shape, self.n_learners))
        return _RescaledState(self.descent.init(axes), place, place)

    def emit(self, state: _RescaledState, noise: NoiseSource) -> tuple[_RescaledState, Message]:
        descent, message = self.descent.emit(state.descent, noise)
        return replace(state, descent=descent), Message({**message.fields, "e": state.e})

    def update(self, state: _RescaledState, received: ReceivedMessages, batch: Batch) -> _RescaledState:
        who, t = state.descent.who, state.descent.t
        share = (state.e * state.place).sum(axis=-1, keepdims=True)
        planned = _picked(who, self.descent.step, t)
        step = np.minimum(_picked(who, self.unscaled_steps, t) / np.maximum(share, np.finfo(float).tiny), planned)
        e = received.own_weight * state.e + received.weighted_sum("e")
        return _RescaledState(self.descent.descend(state.descent, received, batch, step), state.place, e)

    def decision(self, state: _RescaledState) -> FloatArray:
        return self.descent.decision(state.descent)

    def replay(self, state: _RescaledState, message: Message) -> tuple[_RescaledState, FloatArray]:
        descent, density = self.descent.replay(state.descent, message)
        return replace(state, descent=descent), density + dirac_log_density(message["e"], state.e)

    def lattice_spacings(self, learner: int, t: int) -> dict[str, float]:
        return self.descent.lattice_spacings(learner, t)

    def clip_bounds(self, learner: int, t: int) -> dict[str, float]:
        """A share lies between 0 and 1."""
        return {**self.descent.clip_bounds(learner, t), "e": magnitude_bound(1.0, 0.0)}

    def noise_scale(self, learner: int, t: int) -> float:
        return self.descent.noise_scale(learner, t)

    def is_model_public(self, rounds: int) -> bool:
        return self.descent.is_model_public(rounds)

    def accountant(self, learner: int) -> DescentAccountant:
        return self.descent.accountant(learner)
