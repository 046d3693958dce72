"""LDP-DOL: locally differentially private distributed online learning (Chen & Wang, IEEE TAC 2025).

Round t of learner i::

    send      y_t = theta_t + noise,  noise ~ Laplace(rho_t),  rho_t = sigma/sqrt(2) (t+1)^varsigma
    receive   y_t^j of every neighbour j
    update    theta_{t+1} = Pro( theta_t + gamma_t sum_j w_ij (y_t^j - theta_t) - lambda_t d_t(theta_t) )

with `lambda_t = lam0/(t+1)^v`, `gamma_t = gam0/(t+1)^u` and `d_t` the mean gradient over all records so far, those of round t
included. The learner uses its own clean theta; its noise never enters its own update. In a message, theta is first
rounded to the noise's lattice, which changes it by less than 2^-40 scales and is charged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from sottovoce_core.algorithms.interface import Message, ReceivedMessages, StateAxes
from sottovoce_core.algorithms.ldp_dol.accounting import (
    AccountingMode,
    LdpDolAccountant,
    LearnerScales,
    SharedSchedules,
)
from sottovoce_core.arrays import Batch, FloatArray, Scalars, summarize_fields
from sottovoce_core.decision_sets import DecisionSet
from sottovoce_core.losses import Loss, enforce_bounds
from sottovoce_core.losses.history import GradientHistory, start_history
from sottovoce_core.network.network import Network
from sottovoce_core.noise import NoiseSource
from sottovoce_core.noise.mechanisms import (
    add_laplace_noise,
    field_lattice_spacing,
    laplace_log_density,
    magnitude_bound,
)
from sottovoce_core.privacy.guarantee import Regularity


@dataclass(frozen=True, slots=True)
class _State:
    """State theta_t, the round t, and the records seen."""

    axes: StateAxes
    t: int
    theta: FloatArray
    history: GradientHistory
    sigma: Scalars
    varsigma: Scalars


@dataclass(frozen=True, slots=True)
class LdpDol:
    """LDP-DOL of one run, with all learners' parameters by index."""

    dim: int
    rounds: int
    schedules: SharedSchedules
    sigma: tuple[float, ...]
    varsigma: tuple[float, ...]
    network: Network
    """Network whose weights the guarantee uses."""
    loss: Loss
    decision_set: DecisionSet
    accounting: AccountingMode = "best"
    name: str = "ldp-dol"

    __repr__ = summarize_fields

    def field_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"y": (self.dim,)}

    def init(self, axes: StateAxes) -> _State:
        initial = np.broadcast_to(self.loss.initial_parameters(self.dim), (*axes.leading_shape, self.dim))
        origin = self.decision_set.project(initial)
        return _State(axes, 0, origin, start_history(self.loss), axes.pick(self.sigma), axes.pick(self.varsigma))

    def emit(self, state: _State, noise: NoiseSource) -> tuple[_State, Message]:
        scale, future_scale = _laplace_scale(state, state.t), partial(_laplace_scale, state)
        return state, Message({"y": add_laplace_noise(noise, "y", state.t, state.theta, scale, future_scale)})

    def update(self, state: _State, received: ReceivedMessages, batch: Batch) -> _State:
        t, theta, ridge = state.t, state.theta, self.loss.ridge
        coupling, step = self.schedules.coupling(t), self.schedules.step_size(t)
        history = state.history.observe(enforce_bounds(self.loss, batch))
        pulled = received.weighted_sum("y")
        keep = 1.0 - coupling * received.total_weight - step * ridge
        moved = keep * theta
        pulled *= coupling
        moved += pulled
        gradient = history.gradient(theta)
        gradient *= step
        moved -= gradient
        theta = self.decision_set.project(moved)
        return _State(state.axes, t + 1, theta, history, state.sigma, state.varsigma)

    def decision(self, state: _State) -> FloatArray:
        return state.theta

    def released_decision(self, message: Message) -> FloatArray:
        return message["y"]

    def replay(self, state: _State, message: Message) -> tuple[_State, FloatArray]:
        return state, laplace_log_density(message["y"], state.theta, _laplace_scale(state, state.t))

    def accountant(self, learner: int) -> LdpDolAccountant:
        regularity = Regularity.from_loss(self.loss, self.decision_set, self.dim)
        min_own_weight = float(self.network.mixing(0).neighbour_weights.sum(axis=1).min())
        changing = self.network.horizon > 1
        return LdpDolAccountant(
            self.accounting,
            regularity,
            self.schedules,
            self._scales(learner),
            min_own_weight=min_own_weight,
            own_weight_schedule=(lambda t: self._own_weight(learner, t)) if changing else None,
        )

    def lattice_spacings(self, learner: int, t: int) -> dict[str, float]:
        return field_lattice_spacing("y", self.noise_scale(learner, t))

    def clip_bounds(self, learner: int, t: int) -> dict[str, float]:
        return {"y": magnitude_bound(self.decision_set.largest_norm(self.dim), self.noise_scale(learner, t))}

    def noise_scale(self, learner: int, t: int) -> float:
        return self._scales(learner).laplace_scale(t)

    def _scales(self, learner: int) -> LearnerScales:
        return LearnerScales(self._own_weight(learner, 0), self.dim, self.sigma[learner], self.varsigma[learner])

    def _own_weight(self, learner: int, t: int) -> float:
        """Return `|w_ii|` of round t: the sum of the learner's weights of others."""
        return float(self.network.mixing(t).neighbour_weights[learner].sum())


def _laplace_scale(state: _State, t: int) -> Scalars:
    """Return `rho_t = sigma/sqrt(2) (t+1)^varsigma`."""
    return state.sigma / math.sqrt(2.0) * (t + 1.0) ** state.varsigma
