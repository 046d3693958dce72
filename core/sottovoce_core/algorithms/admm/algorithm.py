"""Consensus ADMM: plain, and with dual (DVP) or primal (PVP) variable perturbation (Zhang & Zhu, IEEE TIFS 2017).

The nodes minimise `sum_p [ (C/B_p) sum_i phi(a_i.f, b_i) + rho/2 ||f||^2 ]` over a common f. Round t of node p, with N
neighbours i and B records so far::

    draw      e_t of density exp(-zeta ||e||)                         (DVP, PVP)
    solve     f_t = argmin (C/B) sum_i phi(a_i.f, b_i) + (rho + Phi)/2 ||f||^2
                           + 2 (lambda_t + [DVP] C/(2B) e_t).f + eta sum_i ||f - (own_{t-1} + y^i_{t-1})/2||^2
    say       y_t = f_t, for PVP f_t + e_t
    hear      y^i_t of every neighbour i
    update    lambda_{t+1} = lambda_t + eta/2 sum_i (y_t - y^i_t)

`own` is y; two variants of PVP put in the clean f instead. All starts from zero, and before its first record a node
minimises its regulariser alone, without noise. So message 0 is zero, and T rounds are T-1 iterations. Where `output_noise`
is set, DVP says the minimiser with Laplace noise on a lattice, which hides the solver's error, and takes what it said for f.
Optimisation is over all of space: the decision set of a run is not used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sottovoce_core.algorithms.admm.accounting import AdmmAccountant, Calibration, Node, Perturbation, PrimalCalibration
from sottovoce_core.algorithms.admm.local import ROUNDING, LocalProblem, cut, norm
from sottovoce_core.algorithms.interface import Heard, Message, Who
from sottovoce_core.arrays import Batch, FloatArray, Scalars
from sottovoce_core.losses import MarginLoss, bounded
from sottovoce_core.losses.history import RecordHistory
from sottovoce_core.noise import Draw, Noise
from sottovoce_core.noise.mechanisms import say_laplace, spherical_density


@dataclass(frozen=True, slots=True)
class _State:
    """A node before round t.

    Attributes:
        who: which learners.
        node: their public numbers.
        t: the round.
        primal: f, `(..., dim)`; for PVP it is private.
        said: y, the node's last message.
        around: sum of its neighbours' last messages.
        dual: lambda.
        sensitivity: Delta of the last iteration (PVP).
        history: the records.
        count: B, their number.
    """

    who: Who
    node: Node
    t: int
    primal: FloatArray
    said: FloatArray
    around: FloatArray
    dual: FloatArray
    sensitivity: Scalars
    history: RecordHistory
    count: Scalars


@dataclass(frozen=True, slots=True)
class Admm:
    """The algorithm for one run; the calibration of its noise is what its three forms differ in."""

    name: str
    dim: int
    rounds: int
    loss: MarginLoss
    calibration: Calibration
    nodes: tuple[Node, ...]
    """The public numbers of every learner."""

    def field_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"y": (self.dim,)}

    def start(self, who: Who) -> _State:
        node = replace(
            self.nodes[0],
            alpha=who.pick(tuple(float(each.alpha) for each in self.nodes)),
            final_alpha=who.pick(tuple(float(each.final_alpha) for each in self.nodes)),
            degree=who.pick(tuple(float(each.degree) for each in self.nodes)),
        )
        zero = np.zeros((*who.lead, self.dim))
        return _State(who, node, 0, zero, zero, zero, zero, 0.0, RecordHistory(self.loss), 0.0)

    def speak(self, state: _State, noise: Noise) -> tuple[_State, Message]:
        step, problem = self._iteration(state)
        if step.perturbed == "nothing":
            primal = said = problem.minimise(state.primal)
        else:
            drawn = _drawn(noise, state, step.rate)
            in_objective = step.perturbed == "objective"
            exact = (problem.tilted(problem.weight * drawn) if in_objective else problem).minimise(state.primal)
            # In every round, if only the last one needs it: so a recording has one for each.
            hidden = say_laplace(noise, "output", state.t, exact, state.node.output_noise)
            if in_objective:
                primal = said = np.where(np.isinf(step.rate), exact, hidden)
            else:
                primal, said = exact, exact + drawn
        return replace(state, primal=primal, said=said, sensitivity=step.sensitivity), Message({"y": said})

    def listen(self, state: _State, heard: Heard, batch: Batch) -> _State:
        node, around = state.node, heard.total("y")
        return replace(
            state,
            t=state.t + 1,
            around=around,
            dual=state.dual + node.penalty / 2.0 * (node.degree * state.said - around),
            history=state.history.observe(bounded(self.loss, batch)),
            count=state.count + _records(batch),
        )

    def decision(self, state: _State) -> FloatArray:
        return state.primal

    def overheard(self, state: _State, message: Message) -> tuple[_State, FloatArray]:
        """As `Algorithm.overheard`. With output noise, the density is that of the exact minimiser where it was said.

        A message without noise must be a minimiser up to twice the solver's tolerance.
        """
        step, problem = self._iteration(state)
        said = np.broadcast_to(message["y"], state.primal.shape)
        gradient, enough = problem.gradient(said)
        if step.perturbed == "minimiser":
            primal = problem.minimise(state.primal)
            noise, rate = said - primal, step.rate
        else:  # (29), with both sides times C/B
            primal, noise, rate = said, -gradient, step.rate / problem.weight
        silent = np.isinf(rate)
        density = spherical_density(noise, np.where(silent, 1.0, rate))
        if step.perturbed == "objective":
            density = density + problem.hessian(said).log_determinant()
        free = np.where(norm(gradient) <= 2.0 * enough, 0.0, -np.inf)
        density = np.where(silent, free, density[..., None])[..., 0]
        after = replace(state, primal=primal, said=said, sensitivity=step.sensitivity)
        return after, density

    def accountant(self, learner: int) -> AdmmAccountant:
        return AdmmAccountant(self.calibration, self.nodes[learner], self.rounds)

    def says_model(self, rounds: int) -> bool:
        """It is the last message, but where the noise is added to the minimiser as it is said."""
        if isinstance(self.calibration, PrimalCalibration):
            return self.calibration.last is not None and rounds == self.rounds
        return True

    def noise_scale(self, learner: int, t: int) -> float:
        """`1/zeta` of a message, for one record a round; of e, which DVP adds to the dual variable and not to the message."""
        accountant = self.accountant(learner)
        for _ in range(t):
            accountant.advance(1)
        return float(1.0 / accountant.step.rate)

    def _iteration(self, state: _State) -> tuple[Perturbation, LocalProblem]:
        """How this round is perturbed, and the problem before that."""
        node, count = state.node, state.count
        step = self.calibration.step(node, count, state.sensitivity, last=state.t == self.rounds - 1)
        own = state.said + step.carried * (state.primal - state.said)
        linear = 2.0 * state.dual - node.penalty * (node.degree * own + state.around)
        stiffness = node.stiffness + step.extra_ridge
        if step.perturbed != "nothing":
            linear = cut(linear, _longest(node, stiffness))
        problem = LocalProblem(
            loss=self.loss,
            records=state.history.records or Batch.empty(self.dim),
            weight=node.weight(count),
            smoothness=node.loss_weight * node.curvature + stiffness,
            stiffness=stiffness,
            linear=linear,
            tolerance=node.tolerance,
        )
        return step, problem


def _drawn(noise: Noise, state: _State, rate: Scalars) -> FloatArray:
    """The round's e. Where many are stacked, the silent ones among them (rate infinite) are asked for, too, and get zero.

    A learner alone asks nobody then: no source of real noise serves a rate that is not finite.
    """
    if state.primal.ndim == 1 and np.isinf(rate):
        return np.zeros_like(state.primal)
    return noise(Draw("spherical", "y", state.t, rate, None, state.primal.shape))


def _longest(node: Node, stiffness: Scalars) -> Scalars:
    """The norm of `linear` up to which float64 resolves the tolerance.

    A minimiser of norm F has `stiffness F <= linear + C ell`, and the terms of its gradient sum to at most
    `C (ell + c F) + stiffness F + linear`. The guarantee rests on the tolerance, and a neighbour may say what it likes.
    """
    pull = node.loss_weight * node.lipschitz
    share = 2.0 + node.loss_weight * node.curvature / stiffness
    return np.maximum(node.tolerance / ROUNDING / share - pull, 0.0)[()]


def _records(batch: Batch) -> Scalars:
    """Number of records, one per learner where padding tells them apart."""
    if batch.present is None:
        return float(batch.size)
    counts: FloatArray = batch.present.sum(axis=-1)
    return counts.reshape(-1, 1, 1) if counts.ndim else float(counts)
