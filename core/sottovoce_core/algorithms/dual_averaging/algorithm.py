"""Dual averaging over a network, with Laplace noise on the dual vectors (Cheng, Liao & Li, IEEE TNSE 2023).

Round t of learner i, rounds counted from 0::

    send      h_t = z_t + eta_t,   eta_t ~ Laplace(sigma) on the own block;   h_0 = z_0 = 0
    decide    y_t = Pro( -alpha_t h_t / w_t ),   alpha_t = step / sqrt(t)
    update    z_{t+1} = sum_j A_ij h_t^j + k u_t,   w_{t+1} = sum_j A_ij w_t^j

`u_t` is the own block of the gradient of the round's loss at y_t, clipped. With `primal: clean`, as in the paper, z_t replaces
h_t in the decision. The sums over j include the learner itself, with its noisy message.

    dpsda-c   doubly stochastic weights, w = 1; one loss that all learners hold; a block each; k = n    (12)-(13)
    dpsda-ps  column-stochastic weights: push-sum; otherwise the same                                   (20)-(22)
    dpcda     one learner alone
    dpps      push-sum, with a loss of its own for each learner: the whole gradient, k = 1

A receiver applies the weight of the sender, so h and w are sent unscaled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from sottovoce_core.algorithms.dual_averaging.accounting import (
    DualAveragingAccountant,
    DualSensitivity,
    LipschitzSchedule,
)
from sottovoce_core.algorithms.interface import Message, ReceivedMessages, StateAxes
from sottovoce_core.arrays import Batch, FloatArray, summarize_fields
from sottovoce_core.decision_sets import Box, DecisionSet
from sottovoce_core.losses import Loss, enforce_bounds, mean_gradient
from sottovoce_core.noise import NoiseSource
from sottovoce_core.noise.mechanisms import add_laplace_noise, laplace_log_density

CoordinateMask = npt.NDArray[np.bool_]

_REPLAY_TOLERANCE = 1e-9
"""Tolerance between two orders of summing messages, relative to the largest number sent."""


@dataclass(frozen=True, slots=True)
class _State:
    """z_t in two parts, w_t, and the last message and decision.

    The mix of messages, `public_part`, is public. Only the newest gradient, k u, is private, and only that part is rounded to
    the noise's lattice: a neighbour that sends huge numbers must not make float64 round the private part coarsely.
    """

    axes: StateAxes
    t: int
    public_part: FloatArray
    private_part: FloatArray
    push_weight: FloatArray
    message: FloatArray
    decision: FloatArray
    owned: CoordinateMask
    noisy: CoordinateMask

    @property
    def dual(self) -> FloatArray:
        """Dual vector z_t."""
        return self.public_part + self.private_part


@dataclass(frozen=True, slots=True, eq=False)
class DualAveraging:
    """Dual averaging of one run.

    Attributes:
        step: `alpha_t = step / sqrt(t)`.
        sigma: Laplace scale; 0: no noise.
        clip_threshold: l2 bound on the own block of a gradient; infinite: none.
        has_mean_loss: the loss of a round is the mean over its records, not the sum.
        has_noised_primal: decisions are computed from messages.
        has_push_sum: push-sum: messages also contain w.
        has_shared_loss: all learners hold the same loss, so its replacement changes the messages of all of them.
        owned_mask: `(learners, dim)`, the coordinates that a learner's gradients enter.
        noise_mask: `(learners, dim)`, the coordinates that a learner perturbs.
        push_weights: `(rounds, learners)` w_t, or `(1, learners)` ones.
    """

    name: str
    dim: int
    rounds: int
    step: float
    sigma: float
    clip_threshold: float
    has_mean_loss: bool
    has_noised_primal: bool
    has_push_sum: bool
    has_shared_loss: bool
    owned_mask: CoordinateMask
    noise_mask: CoordinateMask
    push_weights: FloatArray
    loss: Loss
    decision_set: DecisionSet

    __repr__ = summarize_fields

    def field_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"h": (self.dim,), "w": (1,)} if self.has_push_sum else {"h": (self.dim,)}

    def init(self, axes: StateAxes) -> _State:
        origin = np.zeros((*axes.leading_shape, self.dim))
        first = self.decision_set.project(origin)
        noisy = self.noise_mask & (self.sigma > 0)
        ones = np.ones((*axes.leading_shape, 1))
        return _State(axes, 0, origin, origin, ones, origin, first, _rows(self.owned_mask, axes), _rows(noisy, axes))

    def emit(self, state: _State, noise: NoiseSource) -> tuple[_State, Message]:
        noised = add_laplace_noise(noise, "h", state.t, state.private_part, self.sigma, lambda t: self.sigma)
        message = state.public_part + np.where(_noise_mask(state), noised, state.private_part)
        return self._decide(state, message), Message(
            {"h": message, "w": state.push_weight} if self.has_push_sum else {"h": message}
        )

    def update(self, state: _State, received: ReceivedMessages, batch: Batch) -> _State:
        public = received.weighted_sum("h") + received.own_weight * state.message
        private = self.gradient_factor * self._block_gradient(state, batch)
        weight = self._next_weight(state, received)
        return replace(state, t=state.t + 1, public_part=public, private_part=private, push_weight=weight)

    def _next_weight(self, state: _State, received: ReceivedMessages) -> FloatArray:
        """Compute w_{t+1}, at least its value from the network: a wrong w from a neighbour must not make decisions move more."""
        if not self.has_push_sum:
            return state.push_weight
        weight = received.weighted_sum("w") + received.own_weight * state.push_weight
        planned = tuple(self.push_weights[min(state.t + 1, self.rounds - 1)].tolist())
        return np.maximum(weight, state.axes.pick(planned))

    def decision(self, state: _State) -> FloatArray:
        """Return y_t, computed by `emit` of round t; before it, the decision of the round before."""
        return state.decision

    def replay(self, state: _State, message: Message) -> tuple[_State, FloatArray]:
        sent, dual = message["h"], state.dual
        each = laplace_log_density((sent - state.public_part)[..., None], state.private_part[..., None], self.sigma)
        largest = np.abs(dual).max(axis=-1, keepdims=True)
        same = np.abs(sent - dual) <= _REPLAY_TOLERANCE * (largest + self.sigma)
        density: FloatArray = np.where(_noise_mask(state), each, np.where(same, 0.0, -np.inf)).sum(axis=-1)
        if self.has_push_sum:
            same = np.abs(message["w"] - state.push_weight) <= _REPLAY_TOLERANCE * state.push_weight
            density = density + np.where(same[..., 0], 0.0, -np.inf)
        return self._decide(state, np.broadcast_to(sent, dual.shape)), density

    def _decide(self, state: _State, message: FloatArray) -> _State:
        """Return the state after sending `message`, with the decision for the round's records."""
        basis = message if self.has_noised_primal else state.dual
        decision = self.decision_set.project(-self._step_size(state.t) * basis / state.push_weight)
        return replace(state, message=message, decision=decision)

    def _step_size(self, t: int) -> float:
        """Return `alpha_t`; its value in round 0 has no effect."""
        return _step_size(self.step, t)

    def _block_gradient(self, state: _State, batch: Batch) -> FloatArray:
        """Compute u_t, zero outside the own block. The exact ridge is not clipped, because it does not depend on records."""
        records, point = enforce_bounds(self.loss, batch), state.decision
        data = (
            mean_gradient(self.loss, point, records) if self.has_mean_loss else self.loss.gradient_sum(point, records)
        )
        data = np.where(state.owned, data, 0.0)
        if self.clip_threshold < math.inf:
            data *= self.clip_threshold / np.maximum(np.linalg.norm(data, axis=-1, keepdims=True), self.clip_threshold)
        gradient: FloatArray = data + np.where(state.owned, self.loss.ridge * point, 0.0)
        return gradient

    @property
    def gradient_factor(self) -> float:
        """Factor k of a gradient: n if each learner computes a block of one gradient and messages are averaged, else 1."""
        return float(len(self.owned_mask)) if self.has_shared_loss else 1.0

    # ---- accounting ----------------------------------------------------------------------------------------

    @property
    def gradient_bound(self) -> float:
        """Strict l2 bound B of the data part of a block's gradient."""
        return min(self.clip_threshold, self._natural_bound())

    def noise_scale(self, learner: int, t: int) -> float:
        return self.sigma if t else 0.0

    def is_model_public(self, rounds: int) -> bool:
        return self.has_noised_primal

    def accountant(self, learner: int) -> DualAveragingAccountant:
        """Return the accountant of one learner. With a shared loss, all learners' messages depend on it, and losses add up."""
        return DualAveragingAccountant(
            self.sensitivity(learner),
            self.sigma,
            mode="noised" if self.has_noised_primal else "clean",
            paper_round_epsilon=self._paper_round(),
            has_shared_records=self.has_shared_loss and len(self.owned_mask) > 1,
        )

    def sensitivity(self, learner: int) -> DualSensitivity:
        """Return the constants that bound the change of one learner's messages."""
        block = int(self.owned_mask[learner].sum())
        lipschitz, grows = self._decision_lipschitz(learner)
        later_bound = (
            math.inf if self.has_push_sum else self._step_size(self.rounds)
        )  # w is unknown after the planned rounds
        return DualSensitivity(
            block_size=block,
            gradient_factor=self.gradient_factor,
            gradient_bound=self.gradient_bound,
            gradient_change=min(2.0 * self.gradient_bound, self._natural_change()),
            smoothness=self.loss.smoothness if self.has_mean_loss else math.inf,
            ridge=self.loss.ridge,
            diameter=self.decision_set.diameter(block if isinstance(self.decision_set, Box) else self.dim),
            decision_lipschitz=lipschitz,
            has_growing_lipschitz=grows,
            later_lipschitz_bound=0.0 if self.has_noised_primal else later_bound,
        )

    def _decision_lipschitz(self, learner: int) -> tuple[LipschitzSchedule, bool]:
        """Return c_t by round, and whether it ever grows after round 0, in which worlds do not differ."""
        if self.has_noised_primal:
            return _zero, False
        if not self.has_push_sum:
            return partial(_step_size, self.step), False
        steps = np.array([self._step_size(t) for t in range(self.rounds)]) / self.push_weights[:, learner]
        by_round: list[float] = steps.tolist()
        return by_round.__getitem__, bool((np.diff(steps[1:]) > 0.0).any())

    def _natural_bound(self) -> float:
        """Return the l2 bound on the data gradient of a round without clipping."""
        return self.loss.gradient_bound(self.decision_set.largest_norm(self.dim)) if self.has_mean_loss else math.inf

    def _natural_change(self) -> float:
        """Return the l2 distance of the data gradients of two rounds with equally many records at one decision, unclipped."""
        return self.loss.gradient_change(self.decision_set.largest_norm(self.dim)) if self.has_mean_loss else math.inf

    def _paper_round(self) -> float:
        """Return `2 n L / sigma` (Lemma 1, Theorem 2), with L the bound of the whole gradient; dpps: `2 G sqrt(d) / sigma`."""
        if self.sigma == 0.0:
            return math.inf
        if not self.has_shared_loss:
            return 2.0 * math.sqrt(self.dim) * self.gradient_bound / self.sigma
        gradient_bound = min(self._natural_bound(), math.sqrt(len(self.owned_mask)) * self.clip_threshold)
        return 2.0 * self.gradient_factor * gradient_bound / self.sigma


def _zero(t: int) -> float:
    return 0.0


def _step_size(step: float, t: int) -> float:
    return step / math.sqrt(max(t, 1))


def _noise_mask(state: _State) -> CoordinateMask | np.bool_:
    """Return the mask of noised coordinates of this round's message. Message 0 is zero in every world and has no noise."""
    return state.noisy if state.t else np.False_


def _rows(mask: CoordinateMask, axes: StateAxes) -> CoordinateMask:
    """Return the rows of a `(learners, dim)` mask for the learners of a state, ready to broadcast."""
    return mask[axes.learner] if isinstance(axes.learner, int) else mask[list(axes.learner)][:, None, :]
