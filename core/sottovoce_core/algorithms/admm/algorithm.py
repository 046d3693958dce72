"""Consensus ADMM: plain, and with dual (DVP) or primal (PVP) variable perturbation (Zhang & Zhu, IEEE TIFS 2017).

The nodes minimise `sum_p [ (C/B_p) sum_i phi(a_i.f, b_i) + rho/2 ||f||^2 ]` over a common f. Round t of node p, with N
neighbours i and B records so far::

    draw      e_t of density exp(-zeta ||e||)                         (DVP, PVP)
    solve     f_t = argmin (C/B) sum_i phi(a_i.f, b_i) + (rho + Phi)/2 ||f||^2
                           + 2 (lambda_t + [DVP] C/(2B) e_t).f + eta sum_i ||f - (own_{t-1} + y^i_{t-1})/2||^2
    send      y_t = f_t, for PVP f_t + e_t
    receive   y^i_t of every neighbour i
    update    lambda_{t+1} = lambda_t + eta/2 sum_i (y_t - y^i_t)

`own` is y; two variants of PVP use the clean f instead. All starts from zero, and before its first record a node
minimises its regulariser alone, without noise. So message 0 is zero, and T rounds are T-1 iterations. If `output_noise`
is set, DVP sends the minimiser with Laplace noise on a lattice, which hides the solver's error, and uses its message as f.
Optimisation is over all of space: the decision set of a run is not used.

Messages may be of any size, and the term that is linear in f grows with them. float64 would then lose the gradients of the
records next to it. So the solver looks for the distance of f from a centre, the minimiser of everything but the records: it
is public, and no linear term is left but the noise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sottovoce_core.algorithms.admm.accounting import (
    AdmmAccountant,
    NodeParameters,
    NoiseCalibration,
    Perturbation,
    PrimalCalibration,
)
from sottovoce_core.algorithms.interface import Message, ReceivedMessages, StateAxes
from sottovoce_core.arrays import Batch, FloatArray, Scalars, as_floats, summarize_fields
from sottovoce_core.losses import MarginLoss, add_replica_axis, enforce_bounds
from sottovoce_core.losses.history import RecordHistory
from sottovoce_core.losses.loss import compute_scores
from sottovoce_core.noise import NoiseRequest, NoiseSource, lattice_spacing, round_to_lattice
from sottovoce_core.noise.mechanisms import add_laplace_noise, spherical_log_density
from sottovoce_core.registry import MAX_MAGNITUDE

# ---- local problem and solver -----------------------------------------------------------------------------------------

_MAX_LINE_SEARCH_TRIALS = 60
"""Maximum number of lengths tried for a Newton step before a gradient step is taken instead."""

MAX_NEWTON_STEPS = 10_000
"""Maximum number of Newton steps of a round, hundreds of times the need of the worst conditioned problems of the tests."""

GRADIENT_ROUNDING_ERROR = 2.0**-48
"""Upper bound on the relative error of a gradient in float64."""


class _Evaluation(NamedTuple):
    """Values at points `(..., dim)`.

    Attributes:
        gradient: `(..., dim)`.
        enough: `(..., 1)`, the norm below which the gradient is zero up to tolerance or float64 errors.
        curvatures: `(..., records)`, phi'' of each record.
    """

    gradient: FloatArray
    enough: FloatArray
    curvatures: FloatArray


@dataclass(frozen=True, slots=True)
class _LocalProblem:
    """Problem `minimise  weight sum_i phi(o_i + a_i.f, b_i) + stiffness/2 ||f||^2 + linear.f`, over all of space.

    Attributes:
        loss: phi.
        records: `a_i, b_i`.
        weight: weight of a record's loss.
        smoothness: bound on the norm of the Hessian.
        stiffness: positive.
        linear: `(..., dim)`.
        tolerance: norm of the gradient at which a point counts as the minimiser.
        offsets: `o_i`, `(..., records)`, or 0. A rounding error in them changes the problem, but no bound on `phi'` or `phi''`.
    """

    loss: MarginLoss
    records: Batch
    weight: Scalars
    smoothness: Scalars
    stiffness: Scalars
    linear: FloatArray
    tolerance: float
    offsets: Scalars = 0.0

    def add_linear(self, term: FloatArray) -> _LocalProblem:
        """Return the problem with `term.f` added."""
        return replace(self, linear=self.linear + term)

    def evaluate(self, point: FloatArray) -> _Evaluation:
        """Return the gradient at points `(..., dim)`, and what else follows from the scores."""
        features, labels = self.records.features, add_replica_axis(self.records.labels, point)
        scores, bound = self.offsets + compute_scores(point, features), self.loss.feature_bound
        slopes = self._mask_padding(self.loss.slope(scores, labels), point)
        gradient = self.weight * np.matmul(slopes, features) + self.stiffness * point + self.linear
        # Rounding errors are relative to the terms of the sum, and to the effect of a score's error on them.
        curvatures = self._mask_padding(self.loss.second_derivative(scores, labels), point)
        score_error = (bound * _norm(point) + np.abs(scores)) * curvatures
        terms = bound * self.weight * (np.abs(slopes) + score_error).sum(axis=-1, keepdims=True)
        terms = terms + self.stiffness * _norm(point) + _norm(self.linear)
        return _Evaluation(gradient, np.maximum(self.tolerance, GRADIENT_ROUNDING_ERROR * terms), curvatures)

    def hessian(self, curvatures: FloatArray) -> _Hessian:
        """Return the Hessian of the objective where `evaluate` gives these curvatures."""
        features, labels = self.records.features, self.records.labels
        rows = features[..., None, :, :] if curvatures.ndim > labels.ndim else features
        return _Hessian(np.sqrt(self.weight * curvatures)[..., None] * rows, np.atleast_1d(self.stiffness))

    def minimise(self, start: FloatArray) -> FloatArray:
        """Return a point whose gradient norm is at most the tolerance, by Newton steps from `start`, for each row alone.

        A step is accepted if it halves the shortest gradient so far, as all steps near the minimum do, or if the objective
        still falls along it at its end, but at most half as steeply as at its start: that brings the objective nearer to its
        minimum by a constant factor. So the solver terminates for any records.
        """
        point, here = start, self.evaluate(start)
        shortest = _norm(here.gradient)
        for _ in range(MAX_NEWTON_STEPS):
            unfinished = _norm(here.gradient) > here.enough
            if not unfinished.any():
                break
            newton = self.hessian(here.curvatures).solve(here.gradient)
            point, here = self._search(point, here.gradient, newton, unfinished, shortest)
            shortest = np.minimum(shortest, _norm(here.gradient))
        return point

    def _search(
        self,
        point: FloatArray,
        gradient: FloatArray,
        newton: FloatArray,
        unfinished: npt.NDArray[np.bool_],
        shortest: FloatArray,
    ) -> tuple[FloatArray, _Evaluation]:
        """Return the next point and its evaluation: a step length by bisection, or else a gradient step."""
        steepness, length = _inner_product(gradient, newton), unfinished.astype(np.float64)
        low, high = np.zeros_like(length), np.full_like(length, np.inf)
        rejected = unfinished
        for _ in range(_MAX_LINE_SEARCH_TRIALS):
            trial = point - length * newton
            after = self.evaluate(trial)
            slope = _inner_product(after.gradient, newton)
            rejected = (
                unfinished & (_norm(after.gradient) > shortest / 2.0) & ((slope < 0.0) | (slope > steepness / 2.0))
            )
            if not rejected.any():
                return trial, after
            low, high = (
                np.where(rejected & (slope > 0.0), length, low),
                np.where(rejected & (slope < 0.0), length, high),
            )
            between = np.where(np.isinf(high), 2.0 * length, (low + high) / 2.0)
            length = np.where(rejected, between, length)
        trial = np.where(rejected, point - gradient / self.smoothness, trial)
        return trial, self.evaluate(trial)

    def _mask_padding(self, per_record: FloatArray, point: FloatArray) -> FloatArray:
        """Set the numbers of padding to zero."""
        present = self.records.mask
        return per_record if present is None else per_record * add_replica_axis(present, point)


@dataclass(frozen=True, slots=True)
class _Hessian:
    """Hessian `R^T R + s I`, with a row of R for every record, solved by `R R^T + s I` if records are fewer than dimensions.

    Attributes:
        rows: `(..., records, dim)`: R.
        stiffness: `(..., 1)`: s, positive.
    """

    rows: FloatArray
    stiffness: FloatArray

    def solve(self, vectors: FloatArray) -> FloatArray:
        """Multiply the inverse with vectors `(..., dim)`."""
        if not self._has_few_records:
            return as_floats(np.linalg.solve(self._smaller, vectors[..., None])[..., 0])
        solution = np.linalg.solve(self._smaller, np.matmul(self.rows, vectors[..., None]))
        correction = np.matmul(self.rows.swapaxes(-1, -2), solution)[..., 0]
        return as_floats((vectors - correction) / self.stiffness)

    def log_determinant(self) -> FloatArray:
        """Return the log determinant `(...)`."""
        records, dim = self.rows.shape[-2:]
        rest = (dim - records) * np.log(self.stiffness[..., 0]) if self._has_few_records else 0.0
        return as_floats(np.linalg.slogdet(self._smaller)[1] + rest)

    @property
    def _has_few_records(self) -> bool:
        is_wide: bool = self.rows.shape[-2] < self.rows.shape[-1]
        return is_wide

    @property
    def _smaller(self) -> FloatArray:
        transposed = self.rows.swapaxes(-1, -2)
        product = np.matmul(self.rows, transposed) if self._has_few_records else np.matmul(transposed, self.rows)
        return as_floats(product + self.stiffness[..., None] * np.eye(product.shape[-1]))


def _norm(vectors: FloatArray) -> FloatArray:
    """Return l2 norms `(..., 1)` along the last axis."""
    norms: FloatArray = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return norms


def _clip_norm(vectors: FloatArray, max_norm: Scalars) -> FloatArray:
    """Project vectors `(..., dim)` onto the ball of radius `max_norm`, so no two get farther apart."""
    return vectors * (max_norm / np.maximum(_norm(vectors), np.maximum(max_norm, np.finfo(float).tiny)))


def _inner_product(vectors: FloatArray, others: FloatArray) -> FloatArray:
    """Return inner products `(..., 1)` along the last axis."""
    products: FloatArray = np.vecdot(vectors, others)[..., None]
    return products


# ---- algorithm --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _State:
    """State of a node before round t.

    Attributes:
        axes: learners and replicas.
        node: their public parameters.
        t: the round.
        primal: f, `(..., dim)`; for PVP it is private.
        message: y, the node's last message.
        neighbour_sum: sum of its neighbours' last messages.
        dual: lambda.
        sensitivity: Delta of the last iteration (PVP).
        history: the records.
        count: B, their number.
    """

    axes: StateAxes
    node: NodeParameters
    t: int
    primal: FloatArray
    message: FloatArray
    neighbour_sum: FloatArray
    dual: FloatArray
    sensitivity: Scalars
    history: RecordHistory
    count: Scalars


@dataclass(frozen=True, slots=True)
class Admm:
    """ADMM of one run; its three forms differ in the calibration of the noise."""

    name: str
    dim: int
    rounds: int
    loss: MarginLoss
    calibration: NoiseCalibration
    nodes: tuple[NodeParameters, ...]
    """Public parameters of every learner."""

    __repr__ = summarize_fields

    def field_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"y": (self.dim,)}

    def init(self, axes: StateAxes) -> _State:
        node = replace(
            self.nodes[0],
            alpha=axes.pick(tuple(float(each.alpha) for each in self.nodes)),
            final_alpha=axes.pick(tuple(float(each.final_alpha) for each in self.nodes)),
            degree=axes.pick(tuple(float(each.degree) for each in self.nodes)),
        )
        zero = np.zeros((*axes.leading_shape, self.dim))
        return _State(axes, node, 0, zero, zero, zero, zero, 0.0, RecordHistory(self.loss), 0.0)

    def emit(self, state: _State, noise: NoiseSource) -> tuple[_State, Message]:
        step, centre, problem = self._iteration(state)
        start = state.primal - centre
        # A message is the centre plus a noised distance: the rounding of this sum depends on nothing private.
        if step.target == "nothing":
            primal = sent = centre + problem.minimise(start)
        else:
            drawn = _draw_noise(noise, state, step.rate)
            in_objective = step.target == "objective"
            exact = (problem.add_linear(problem.weight * drawn) if in_objective else problem).minimise(start)
            # Also in rounds that do not need it, so that a recording has noise for every round.
            noised = add_laplace_noise(noise, "output", state.t, exact, state.node.output_noise)
            if in_objective:
                primal = sent = centre + np.where(np.isinf(step.rate), exact, noised)
            else:
                primal, sent = centre + exact, centre + (exact + drawn)
        return replace(state, primal=primal, message=sent, sensitivity=step.sensitivity), Message({"y": sent})

    def update(self, state: _State, received: ReceivedMessages, batch: Batch) -> _State:
        node, neighbour_sum = state.node, received.total("y")
        return replace(
            state,
            t=state.t + 1,
            neighbour_sum=neighbour_sum,
            dual=state.dual + node.penalty / 2.0 * (node.degree * state.message - neighbour_sum),
            history=state.history.observe(enforce_bounds(self.loss, batch)),
            count=state.count + _count_records(batch),
        )

    def decision(self, state: _State) -> FloatArray:
        return state.primal

    def released_decision(self, message: Message) -> FloatArray:
        return message["y"]

    def replay(self, state: _State, message: Message) -> tuple[_State, FloatArray]:
        """Return the state after `message` and its log density, as `Algorithm.replay`.

        With output noise, the density is that of the exact minimiser at the message. A message without noise must be a
        minimiser up to twice the solver's tolerance.
        """
        step, centre, problem = self._iteration(state)
        sent = np.broadcast_to(message["y"], state.primal.shape)
        distance = sent - centre
        gradient, enough, curvatures = problem.evaluate(distance)
        if step.target == "minimiser":
            exact = problem.minimise(state.primal - centre)
            primal, noise, rate = centre + exact, distance - exact, step.rate
        else:  # (29), both sides multiplied by C/B
            primal, noise, rate = sent, -gradient, step.rate / problem.weight
        is_exact = np.isinf(rate)
        density = spherical_log_density(noise, np.where(is_exact, 1.0, rate))
        if step.target == "objective":
            density = density + problem.hessian(curvatures).log_determinant()
        enough = enough + GRADIENT_ROUNDING_ERROR * problem.smoothness * _norm(sent)  # the message is rounded, too
        exact_density = np.where(_norm(gradient) <= 2.0 * enough, 0.0, -np.inf)
        density = np.where(is_exact, exact_density, density[..., None])[..., 0]
        after = replace(state, primal=primal, message=sent, sensitivity=step.sensitivity)
        return after, density

    def accountant(self, learner: int) -> AdmmAccountant:
        return AdmmAccountant(self.calibration, self.nodes[learner], self.rounds)

    def is_model_public(self, rounds: int) -> bool:
        """Return whether the model is the last message: not where noise is added to the minimiser in the message."""
        if isinstance(self.calibration, PrimalCalibration):
            return self.calibration.final_calibration is not None and rounds == self.rounds
        return True

    def noise_scale(self, learner: int, t: int) -> float:
        """Return `1/zeta` for one record a round: the scale of e, which DVP adds to the dual variable, not to the message."""
        accountant = self.accountant(learner)
        for _ in range(t):
            accountant.advance(1)
        return float(1.0 / accountant.perturbation.rate)

    def _iteration(self, state: _State) -> tuple[Perturbation, FloatArray, _LocalProblem]:
        """Return the perturbation of this round, the public centre, and the unperturbed problem of the distance from it."""
        node, count = state.node, state.count
        step = self.calibration.calibrate_iteration(node, count, state.sensitivity, is_last=state.t == self.rounds - 1)
        stiffness = node.stiffness + step.extra_ridge
        pull = node.penalty * (node.degree * state.message + state.neighbour_sum) - 2.0 * state.dual
        centre = _clip_norm(pull / stiffness, MAX_MAGNITUDE)
        if node.output_noise:
            centre = round_to_lattice(centre, lattice_spacing(node.output_noise))
        # Only this part is private: two variants of PVP use the clean minimiser in place of their message.
        linear = node.penalty * node.degree * step.carry_factor * (state.message - state.primal)
        linear = _clip_norm(linear, find_max_private_norm(node, self.loss, stiffness))
        records = state.history.records or Batch.empty(self.dim)
        problem = _LocalProblem(
            loss=self.loss,
            records=records,
            weight=node.weight(count),
            smoothness=node.loss_weight * node.curvature + stiffness,
            stiffness=stiffness,
            linear=linear,
            tolerance=node.tolerance,
            offsets=compute_scores(centre, records.features),
        )
        return step, centre, problem


def _draw_noise(noise: NoiseSource, state: _State, rate: Scalars) -> FloatArray:
    """Draw the round's e. Stacked learners also request it where the rate is infinite, and get zero.

    A single learner then makes no request, because real noise sources reject an infinite rate.
    """
    if state.primal.ndim == 1 and np.isinf(rate):
        return np.zeros_like(state.primal)
    return noise(NoiseRequest("spherical", "y", state.t, rate, None, state.primal.shape))


def bound_gradient_terms(node: NodeParameters, loss: MarginLoss, stiffness: Scalars) -> Scalars:
    """Bound the sum of the terms of a gradient (`_LocalProblem.evaluate`) at a minimiser, if there is no linear term.

    Its norm F has `stiffness F <= C ell`. The records contribute `C (ell + c F)` and, as far as scores are rounded,
    `C R |z| phi''(z)`. This is at most `C (2 ell + c/R)` if `phi''` does not grow with `|z|` from 1 on.
    """
    weight, slope, curvature = node.loss_weight, node.lipschitz, node.curvature
    return weight * (4.0 * slope + curvature / loss.feature_bound + curvature * weight * slope / stiffness)


def find_max_private_norm(node: NodeParameters, loss: MarginLoss, stiffness: Scalars) -> Scalars:
    """Return the norm of `linear` up to which float64 resolves the tolerance; a longer one is cut.

    That moves no two vectors farther apart, so the sensitivity remains. The minimiser's norm grows by `linear / stiffness`.
    """
    share = 2.0 + node.loss_weight * node.curvature / stiffness
    rest = node.tolerance / GRADIENT_ROUNDING_ERROR - bound_gradient_terms(node, loss, stiffness)
    return np.maximum(rest / share, 0.0)[()]


def _count_records(batch: Batch) -> Scalars:
    """Return the number of records, one per learner if padding makes them differ."""
    if batch.mask is None:
        return float(batch.size)
    counts: FloatArray = batch.mask.sum(axis=-1)
    return counts.reshape(-1, 1, 1) if counts.ndim else float(counts)
