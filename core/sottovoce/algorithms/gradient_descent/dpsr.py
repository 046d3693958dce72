"""DPSR: gossip gradient descent over a fixed directed graph, rescaled (Xiong et al. 2020; reconstructed, details unsure).

Row-stochastic weights W alone would lead to an optimum in which learner i weighs `pi_i`, its share of W's left Perron vector.
So every learner also tracks its own share, by a second vector that knows no data, and divides its steps by it::

    say       y_t = x_t + noise,   e_t                     e_0 = unit vector of the learner
    hear      y_t^j, e_t^j
    update    x_{t+1} = Pro( sum_j W_ij y_t^j - eta_t / [e_t]_i g_t(x_t) ),   e_{t+1} = sum_j W_ij e_t^j

The sums include the learner itself, its own value as it was said. `[e_t]_i = (W^t)_ii` follows from the network, which is
public: a neighbour that lies about e cannot make a step larger than what the guarantee assumes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sottovoce.algorithms.gradient_descent.accounting import DescentAccountant, Schedule
from sottovoce.algorithms.gradient_descent.algorithm import GossipDescent, State, picked
from sottovoce.algorithms.interface import Heard, Message, Who
from sottovoce.arrays import Batch, FloatArray
from sottovoce.noise import Noise
from sottovoce.noise.mechanisms import certain_density, largest_said


@dataclass(frozen=True, slots=True)
class _State:
    """The state of the descent, the learner's own place as a unit vector, and e_t: both `(..., learners)`."""

    descent: State
    place: FloatArray
    e: FloatArray


@dataclass(frozen=True, slots=True)
class Dpsr:
    """The algorithm for one run: a descent whose planned steps are rescaled already, and the steps before that."""

    descent: GossipDescent
    unscaled: tuple[Schedule, ...]
    n_learners: int

    @property
    def name(self) -> str:
        return self.descent.name

    @property
    def dim(self) -> int:
        return self.descent.dim

    def field_shapes(self) -> dict[str, tuple[int, ...]]:
        return {**self.descent.field_shapes(), "e": (self.n_learners,)}

    def start(self, who: Who) -> _State:
        index = np.asarray(who.learner)
        unit = np.eye(self.n_learners)[index if index.ndim == 0 else index[:, None]]
        place = np.broadcast_to(unit, (*who.lead, self.n_learners))
        return _State(self.descent.start(who), place, place)

    def speak(self, state: _State, noise: Noise) -> tuple[_State, Message]:
        descent, message = self.descent.speak(state.descent, noise)
        return replace(state, descent=descent), Message({**message.fields, "e": state.e})

    def listen(self, state: _State, heard: Heard, batch: Batch) -> _State:
        who, t = state.descent.who, state.descent.t
        share = (state.e * state.place).sum(axis=-1, keepdims=True)
        planned = picked(who, self.descent.step, t)
        step = np.minimum(picked(who, self.unscaled, t) / np.maximum(share, np.finfo(float).tiny), planned)
        e = heard.own_weight * state.e + heard.weighted_sum("e")
        return _State(self.descent.descend(state.descent, heard, batch, step), state.place, e)

    def decision(self, state: _State) -> FloatArray:
        return self.descent.decision(state.descent)

    def overheard(self, state: _State, message: Message) -> tuple[_State, FloatArray]:
        descent, density = self.descent.overheard(state.descent, message)
        return replace(state, descent=descent), density + certain_density(message["e"], state.e)

    def lattice(self, learner: int, t: int) -> dict[str, float]:
        return self.descent.lattice(learner, t)

    def clip_bounds(self, learner: int, t: int) -> dict[str, float]:
        """A share lies between 0 and 1."""
        return {**self.descent.clip_bounds(learner, t), "e": largest_said(1.0, 0.0)}

    def noise_scale(self, learner: int, t: int) -> float:
        return self.descent.noise_scale(learner, t)

    def says_model(self, rounds: int) -> bool:
        return self.descent.says_model(rounds)

    def accountant(self, learner: int) -> DescentAccountant:
        return self.descent.accountant(learner)
