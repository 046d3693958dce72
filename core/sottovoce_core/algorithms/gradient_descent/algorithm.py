"""Gossip gradient descent, with or without noise: DSGD, DOLA, PDOP, DPDOLA, PD-OGD, D-OGD, and DPSR.

Round t of learner i::

    send      y_t = x_t + noise,  noise ~ Laplace(rho_t)
    receive   y_t^j of every neighbour j
    mix       b = a_ii own + sum_j a_ij y_t^j             own: y_t (noised) or x_t (clean)
    update    x_{t+1} = Pro( b - alpha_t g_t(p) )         p: b, or the own x_t
    play      Pro(b), or x_{t+1}

`g_t` is the mean gradient of the records of round t alone, ridge included. A record of round t comes after the messages of
round t, so it first influences message t+1; `y_0` is the start value, which does not depend on data.

The published methods are choices of `own`, p, the played point, and the schedules of step and noise
(`parameters`). With the own value clean, the gradient at b and b played it is adapt-then-combine: x is the
adapted value z that is sent, b the combined one. Playing x instead is combine-then-adapt. The messages of both are equal.

DPSR: gossip gradient descent over a fixed directed graph, rescaled (Xiong et al. 2020; reconstructed, details unsure).

Row-stochastic weights W alone would lead to an optimum in which learner i weighs `pi_i`, its share of W's left Perron vector.
So every learner also tracks its own share, by a second vector independent of data, and divides its steps by it::

    send      y_t = x_t + noise,   e_t                     e_0 = unit vector of the learner
    receive   y_t^j, e_t^j
    update    x_{t+1} = Pro( sum_j W_ij y_t^j - eta_t / [e_t]_i g_t(x_t) ),   e_{t+1} = sum_j W_ij e_t^j

The sums include the learner itself, with its noised value. `[e_t]_i = (W^t)_ii` follows from the network, which is
public: a neighbour that sends a wrong e cannot make a step larger than the guarantee assumes.
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
from sottovoce_core.algorithms.gradient_descent.schedules import bound_later_costs
from sottovoce_core.algorithms.interface import Message, ReceivedMessages, StateAxes
from sottovoce_core.arrays import Batch, FloatArray, Scalars, summarize_fields
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
"""Point x or b, for the gradient or for the played decision."""

OwnValue = Literal["noised", "clean"]
"""Own value in the learner's mix: with the noise of its message, or without."""


@dataclass(frozen=True, slots=True)
class _State:
    """x_t, its message of this round, and the played decision."""

    axes: StateAxes
    t: int
    x: FloatArray
    message: FloatArray
    played: FloatArray


@dataclass(frozen=True, slots=True)
class GossipDescent:
    """Gossip gradient descent of one run, with all learners' parameters by index."""

    name: str
    dim: int
    rounds: int
    step: tuple[RoundSchedule, ...]
    """Schedule alpha_t of every learner."""
    noise: tuple[RoundSchedule, ...]
    """Schedule rho_t of every learner: all positive, or all 0."""
    own_value: OwnValue
    gradient_at: Point
    play: Point
    adjacency: DescentAdjacency
    loss: Loss
    decision_set: DecisionSet
    network: Network

    __repr__ = summarize_fields

    def field_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"y": (self.dim,)}

    def init(self, axes: StateAxes) -> _State:
        first = self.decision_set.project(
            np.broadcast_to(self.loss.initial_parameters(self.dim), (*axes.leading_shape, self.dim))
        )
        return _State(axes, 0, first, first, first)

    def emit(self, state: _State, noise: NoiseSource) -> tuple[_State, Message]:
        noised = add_laplace_noise(
            noise, "y", state.t, state.x, self._scale(state), partial(_pick, state.axes, self.noise)
        )
        return _State(state.axes, state.t, state.x, noised, state.played), Message({"y": noised})

    def update(self, state: _State, received: ReceivedMessages, batch: Batch) -> _State:
        return self.descend(state, received, batch, _pick(state.axes, self.step, state.t))

    def descend(self, state: _State, received: ReceivedMessages, batch: Batch, step: Scalars) -> _State:
        """Do an `update` with the given step size."""
        own = state.message if self.own_value == "noised" else state.x
        mixed = received.own_weight * own
        mixed += received.weighted_sum("y")
        point = mixed if self.gradient_at == "mixed" else state.x
        gradient = mean_gradient(self.loss, point, enforce_bounds(self.loss, batch))
        if self.loss.ridge:
            gradient += self.loss.ridge * point
        gradient *= step
        x = self.decision_set.project(np.subtract(mixed, gradient, out=gradient))
        played = self.decision_set.project(mixed) if self.play == "mixed" else x
        return _State(state.axes, state.t + 1, x, state.message, played)

    def decision(self, state: _State) -> FloatArray:
        return state.played

    def released_decision(self, message: Message) -> FloatArray:
        return message["y"]

    def replay(self, state: _State, message: Message) -> tuple[_State, FloatArray]:
        noised = message["y"]
        return replace(state, message=noised), laplace_log_density(noised, state.x, self._scale(state))

    def lattice_spacings(self, learner: int, t: int) -> dict[str, float]:
        return field_lattice_spacing("y", self.noise_scale(learner, t))

    def clip_bounds(self, learner: int, t: int) -> dict[str, float]:
        return {"y": magnitude_bound(self.decision_set.largest_norm(self.dim), self.noise_scale(learner, t))}

    def noise_scale(self, learner: int, t: int) -> float:
        return self.noise[learner](t)

    def is_model_public(self, rounds: int) -> bool:
        """Return whether the decision is a mix of messages; a clean value, or a step on the newest records, is in no message."""
        return self.own_value == "noised" and self.play == "mixed"

    def accountant(self, learner: int) -> DescentAccountant:
        own_weight, step, noise = self._clean_weight(learner), self.step[learner], self.noise[learner]
        has_single_message = self.own_value == "noised" and self.gradient_at == "mixed"
        update = LearnerUpdate(
            self.dim,
            step,
            noise,
            own_weight,
            is_gradient_at_mix=self.gradient_at == "mixed",
            later_costs=partial(bound_later_costs, step, noise) if has_single_message else None,
        )
        stated_weight = own_weight(0) if self.own_value == "clean" else None
        return DescentAccountant(self.regularity(), update, Adjacency(self.adjacency), stated_weight)

    def regularity(self) -> Regularity:
        """Return the constants of the loss at the points of gradients: b carries noise, so it may be any point."""
        regularity = Regularity.from_loss(self.loss, self.decision_set, self.dim)
        if self.gradient_at == "own":
            return regularity
        change, bound = self.loss.gradient_change(np.inf), self.loss.gradient_bound(np.inf)
        return replace(regularity, gradient_change=change, clip_norm=bound)

    def _clean_weight(self, learner: int) -> Callable[[int], float]:
        """Return the weight by round of the own value that enters the mix without noise."""
        if self.own_value == "noised":
            return lambda t: 0.0
        return lambda t: float(self.network.mixing(t).own_weights[learner])

    def _scale(self, state: _State) -> Scalars:
        return _pick(state.axes, self.noise, state.t)


def _pick(axes: StateAxes, schedules: tuple[RoundSchedule, ...], t: int) -> Scalars:
    """Return the numbers of round t for the learners of a state, ready to broadcast."""
    if isinstance(axes.learner, int):
        return schedules[axes.learner](t)
    if schedules.count(schedules[0]) == len(schedules):
        return schedules[0](t)
    return axes.pick(tuple([schedule(t) for schedule in schedules]))


# ---- dpsr ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RescaledState:
    """State of the descent, the learner's own index as a unit vector, and e_t: both `(..., learners)`."""

    descent: _State
    unit: FloatArray
    e: FloatArray


@dataclass(frozen=True, slots=True)
class Dpsr:
    """DPSR of one run: a descent whose planned steps are already rescaled, and the unscaled steps."""

    descent: GossipDescent
    unscaled_steps: tuple[RoundSchedule, ...]
    n_learners: int

    __repr__ = summarize_fields

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
        rows = np.eye(self.n_learners)[index if index.ndim == 0 else index[:, None]]
        unit = np.broadcast_to(rows, (*axes.leading_shape, self.n_learners))
        return _RescaledState(self.descent.init(axes), unit, unit)

    def emit(self, state: _RescaledState, noise: NoiseSource) -> tuple[_RescaledState, Message]:
        descent, message = self.descent.emit(state.descent, noise)
        return replace(state, descent=descent), Message({**message.fields, "e": state.e})

    def update(self, state: _RescaledState, received: ReceivedMessages, batch: Batch) -> _RescaledState:
        axes, t = state.descent.axes, state.descent.t
        share = (state.e * state.unit).sum(axis=-1, keepdims=True)
        planned = _pick(axes, self.descent.step, t)
        step = np.minimum(_pick(axes, self.unscaled_steps, t) / np.maximum(share, np.finfo(float).tiny), planned)
        e = received.own_weight * state.e + received.weighted_sum("e")
        return _RescaledState(self.descent.descend(state.descent, received, batch, step), state.unit, e)

    def decision(self, state: _RescaledState) -> FloatArray:
        return self.descent.decision(state.descent)

    def released_decision(self, message: Message) -> FloatArray:
        return message["y"]

    def replay(self, state: _RescaledState, message: Message) -> tuple[_RescaledState, FloatArray]:
        descent, density = self.descent.replay(state.descent, message)
        return replace(state, descent=descent), density + dirac_log_density(message["e"], state.e)

    def lattice_spacings(self, learner: int, t: int) -> dict[str, float]:
        return self.descent.lattice_spacings(learner, t)

    def clip_bounds(self, learner: int, t: int) -> dict[str, float]:
        """Return the bounds of the descent; a share is between 0 and 1."""
        return {**self.descent.clip_bounds(learner, t), "e": magnitude_bound(1.0, 0.0)}

    def noise_scale(self, learner: int, t: int) -> float:
        return self.descent.noise_scale(learner, t)

    def is_model_public(self, rounds: int) -> bool:
        return self.descent.is_model_public(rounds)

    def accountant(self, learner: int) -> DescentAccountant:
        return self.descent.accountant(learner)
