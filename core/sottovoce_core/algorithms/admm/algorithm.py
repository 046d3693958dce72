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
import numpy.typing as npt

from sottovoce_core.algorithms.admm.accounting import (
    AdmmAccountant,
    NodeParameters,
    NoiseCalibration,
    Perturbation,
    PrimalCalibration,
)
from sottovoce_core.algorithms.interface import Message, ReceivedMessages, StateAxes
from sottovoce_core.arrays import Batch, FloatArray, Scalars, as_floats
from sottovoce_core.losses import MarginLoss, add_replica_axis, enforce_bounds
from sottovoce_core.losses.history import RecordHistory
from sottovoce_core.losses.loss import compute_scores
from sottovoce_core.noise import NoiseRequest, NoiseSource
from sottovoce_core.noise.mechanisms import add_laplace_noise, spherical_log_density

# ---- the problem that a node solves in every iteration, and a solver that always gets there ---------------------------

_MAX_LINE_SEARCH_TRIALS = 60
"""Lengths tried for a Newton step before a gradient step is taken instead."""

MAX_NEWTON_STEPS = 10_000
"""A bound on the time of a round, hundreds of times what the worst conditioned problems of the tests take."""

GRADIENT_ROUNDING_ERROR = 2.0**-48
"""Relative error of a gradient in float64, with room to spare."""


@dataclass(frozen=True, slots=True)
class _LocalProblem:
    """`minimise  weight sum_i phi(a_i.f, b_i) + stiffness/2 ||f||^2 + linear.f`, over all of space.

    Attributes:
        loss: phi.
        records: `a_i, b_i`.
        weight: of a record's loss.
        smoothness: bound on the norm of the Hessian.
        stiffness: positive.
        linear: `(..., dim)`.
        tolerance: norm of the gradient at which a point counts as the minimiser.
    """

    loss: MarginLoss
    records: Batch
    weight: Scalars
    smoothness: Scalars
    stiffness: Scalars
    linear: FloatArray
    tolerance: float

    def tilted(self, by: FloatArray) -> _LocalProblem:
        """The same with `by.f` added."""
        return replace(self, linear=self.linear + by)

    def gradient(self, point: FloatArray) -> tuple[FloatArray, FloatArray]:
        """`(..., dim)`, and the norm `(..., 1)` at which it counts as zero: the tolerance, or what float64 resolves."""
        features, labels = self.records.features, add_replica_axis(self.records.labels, point)
        scores, bound = compute_scores(point, features), self.loss.feature_bound
        slopes = self._real(self.loss.slope(scores, labels), point)
        gradient = self.weight * np.matmul(slopes, features) + self.stiffness * point + self.linear
        # What rounding errors are relative to: the terms of the sum, and what an error of a score does to them.
        moved = bound * _norm(point) * self._real(self.loss.second_derivative(scores, labels), point)
        terms = bound * self.weight * (np.abs(slopes) + moved).sum(axis=-1, keepdims=True)
        terms = terms + self.stiffness * _norm(point) + _norm(self.linear)
        return gradient, np.maximum(self.tolerance, GRADIENT_ROUNDING_ERROR * terms)

    def hessian(self, point: FloatArray) -> _Hessian:
        """Of the objective at points `(..., dim)`."""
        features, labels = self.records.features, self.records.labels
        bends = self._real(
            self.loss.second_derivative(compute_scores(point, features), add_replica_axis(labels, point)), point
        )
        rows = features[..., None, :, :] if point.ndim > labels.ndim else features
        return _Hessian(np.sqrt(self.weight * bends)[..., None] * rows, np.atleast_1d(self.stiffness))

    def minimise(self, start: FloatArray) -> FloatArray:
        """Where the gradient's norm is at most the tolerance: Newton steps from `start`, each row by itself.

        A step is accepted if it halves the shortest gradient so far, as all do when the end is near, or if it ends where the
        objective still falls _along it, but at most half as steeply as at its beginning: that brings the objective nearer to
        its minimum by a constant factor. So the end is reached whatever the records are.
        """
        point, (gradient, enough) = start, self.gradient(start)
        shortest = _norm(gradient)
        for _ in range(MAX_NEWTON_STEPS):
            unfinished = _norm(gradient) > enough
            if not unfinished.any():
                break
            newton = self.hessian(point).solve(gradient)
            point, gradient, enough = self._search(point, gradient, newton, unfinished, shortest)
            shortest = np.minimum(shortest, _norm(gradient))
        return point

    def _search(
        self,
        point: FloatArray,
        gradient: FloatArray,
        newton: FloatArray,
        unfinished: npt.NDArray[np.bool_],
        shortest: FloatArray,
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """The next point, with its gradient and tolerance: a length by bisection, or a gradient step if there is none."""
        steepness, length = _along(gradient, newton), unfinished.astype(np.float64)
        low, high = np.zeros_like(length), np.full_like(length, np.inf)
        wrong = unfinished
        for _ in range(_MAX_LINE_SEARCH_TRIALS):
            trial = point - length * newton
            after, enough = self.gradient(trial)
            left = _along(after, newton)
            wrong = unfinished & (_norm(after) > shortest / 2.0) & ((left < 0.0) | (left > steepness / 2.0))
            if not wrong.any():
                return trial, after, enough
            low, high = np.where(wrong & (left > 0.0), length, low), np.where(wrong & (left < 0.0), length, high)
            between = np.where(np.isinf(high), 2.0 * length, (low + high) / 2.0)
            length = np.where(wrong, between, length)
        trial = np.where(wrong, point - gradient / self.smoothness, trial)
        return trial, *self.gradient(trial)

    def _real(self, per_record: FloatArray, point: FloatArray) -> FloatArray:
        """Zero for padding."""
        present = self.records.mask
        return per_record if present is None else per_record * add_replica_axis(present, point)


@dataclass(frozen=True, slots=True)
class _Hessian:
    """`R^T R + s I`, where R has a row for every record: by `R R^T + s I` where records are fewer than dimensions.

    Attributes:
        rows: `(..., records, dim)`: R.
        stiffness: `(..., 1)`: s, positive.
    """

    rows: FloatArray
    stiffness: FloatArray

    def solve(self, vectors: FloatArray) -> FloatArray:
        """The product of the inverse with vectors `(..., dim)`."""
        if not self._few:
            return as_floats(np.linalg.solve(self._smaller, vectors[..., None])[..., 0])
        along = np.linalg.solve(self._smaller, np.matmul(self.rows, vectors[..., None]))
        across = np.matmul(self.rows.swapaxes(-1, -2), along)[..., 0]
        return as_floats((vectors - across) / self.stiffness)

    def log_determinant(self) -> FloatArray:
        """`(...)`."""
        records, dim = self.rows.shape[-2:]
        rest = (dim - records) * np.log(self.stiffness[..., 0]) if self._few else 0.0
        return as_floats(np.linalg.slogdet(self._smaller)[1] + rest)

    @property
    def _few(self) -> bool:
        few: bool = self.rows.shape[-2] < self.rows.shape[-1]
        return few

    @property
    def _smaller(self) -> FloatArray:
        flipped = self.rows.swapaxes(-1, -2)
        product = np.matmul(self.rows, flipped) if self._few else np.matmul(flipped, self.rows)
        return as_floats(product + self.stiffness[..., None] * np.eye(product.shape[-1]))


def _norm(vectors: FloatArray) -> FloatArray:
    """l2 norms `(..., 1)` _along the last axis."""
    norms: FloatArray = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return norms


def _cut(vectors: FloatArray, longest: Scalars) -> FloatArray:
    """Vectors `(..., dim)` shortened to a norm of at most `longest`: the nearest such, so no two get farther apart."""
    return vectors * (longest / np.maximum(_norm(vectors), np.maximum(longest, np.finfo(float).tiny)))


def _along(vectors: FloatArray, others: FloatArray) -> FloatArray:
    """Inner products `(..., 1)` _along the last axis."""
    products: FloatArray = np.vecdot(vectors, others)[..., None]
    return products


# ---- algorithm --------------------------------------------------------------------------------------------------------


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

    who: StateAxes
    node: NodeParameters
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
    calibration: NoiseCalibration
    nodes: tuple[NodeParameters, ...]
    """The public numbers of every learner."""

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
        step, problem = self._iteration(state)
        if step.target == "nothing":
            primal = said = problem.minimise(state.primal)
        else:
            drawn = _drawn(noise, state, step.rate)
            in_objective = step.target == "objective"
            exact = (problem.tilted(problem.weight * drawn) if in_objective else problem).minimise(state.primal)
            # In every round, if only the last one needs it: so a recording has one for each.
            hidden = add_laplace_noise(noise, "output", state.t, exact, state.node.output_noise)
            if in_objective:
                primal = said = np.where(np.isinf(step.rate), exact, hidden)
            else:
                primal, said = exact, exact + drawn
        return replace(state, primal=primal, said=said, sensitivity=step.sensitivity), Message({"y": said})

    def update(self, state: _State, received: ReceivedMessages, batch: Batch) -> _State:
        node, around = state.node, received.total("y")
        return replace(
            state,
            t=state.t + 1,
            around=around,
            dual=state.dual + node.penalty / 2.0 * (node.degree * state.said - around),
            history=state.history.observe(enforce_bounds(self.loss, batch)),
            count=state.count + _records(batch),
        )

    def decision(self, state: _State) -> FloatArray:
        return state.primal

    def replay(self, state: _State, message: Message) -> tuple[_State, FloatArray]:
        """As `Algorithm.replay`. With output noise, the density is that of the exact minimiser where it was said.

        A message without noise must be a minimiser up to twice the solver's tolerance.
        """
        step, problem = self._iteration(state)
        said = np.broadcast_to(message["y"], state.primal.shape)
        gradient, enough = problem.gradient(said)
        if step.target == "minimiser":
            primal = problem.minimise(state.primal)
            noise, rate = said - primal, step.rate
        else:  # (29), with both sides times C/B
            primal, noise, rate = said, -gradient, step.rate / problem.weight
        silent = np.isinf(rate)
        density = spherical_log_density(noise, np.where(silent, 1.0, rate))
        if step.target == "objective":
            density = density + problem.hessian(said).log_determinant()
        free = np.where(_norm(gradient) <= 2.0 * enough, 0.0, -np.inf)
        density = np.where(silent, free, density[..., None])[..., 0]
        after = replace(state, primal=primal, said=said, sensitivity=step.sensitivity)
        return after, density

    def accountant(self, learner: int) -> AdmmAccountant:
        return AdmmAccountant(self.calibration, self.nodes[learner], self.rounds)

    def is_model_public(self, rounds: int) -> bool:
        """It is the last message, but where the noise is added to the minimiser as it is said."""
        if isinstance(self.calibration, PrimalCalibration):
            return self.calibration.final_calibration is not None and rounds == self.rounds
        return True

    def noise_scale(self, learner: int, t: int) -> float:
        """`1/zeta` of a message, for one record a round; of e, which DVP adds to the dual variable and not to the message."""
        accountant = self.accountant(learner)
        for _ in range(t):
            accountant.advance(1)
        return float(1.0 / accountant.perturbation.rate)

    def _iteration(self, state: _State) -> tuple[Perturbation, _LocalProblem]:
        """How this round is perturbed, and the problem before that."""
        node, count = state.node, state.count
        step = self.calibration.calibrate_iteration(node, count, state.sensitivity, is_last=state.t == self.rounds - 1)
        own = state.said + step.carry_factor * (state.primal - state.said)
        linear = 2.0 * state.dual - node.penalty * (node.degree * own + state.around)
        stiffness = node.stiffness + step.extra_ridge
        if step.target != "nothing":
            linear = _cut(linear, _longest(node, stiffness))
        problem = _LocalProblem(
            loss=self.loss,
            records=state.history.records or Batch.empty(self.dim),
            weight=node.weight(count),
            smoothness=node.loss_weight * node.curvature + stiffness,
            stiffness=stiffness,
            linear=linear,
            tolerance=node.tolerance,
        )
        return step, problem


def _drawn(noise: NoiseSource, state: _State, rate: Scalars) -> FloatArray:
    """The round's e. Where many are stacked, the silent ones among them (rate infinite) are asked for, too, and get zero.

    A learner alone asks nobody then: no source of real noise serves a rate that is not finite.
    """
    if state.primal.ndim == 1 and np.isinf(rate):
        return np.zeros_like(state.primal)
    return noise(NoiseRequest("spherical", "y", state.t, rate, None, state.primal.shape))


def _longest(node: NodeParameters, stiffness: Scalars) -> Scalars:
    """The norm of `linear` up to which float64 resolves the tolerance.

    A minimiser of norm F has `stiffness F <= linear + C ell`, and the terms of its gradient sum to at most
    `C (ell + c F) + stiffness F + linear`. The guarantee rests on the tolerance, and a neighbour may say what it likes.
    """
    pull = node.loss_weight * node.lipschitz
    share = 2.0 + node.loss_weight * node.curvature / stiffness
    return np.maximum(node.tolerance / GRADIENT_ROUNDING_ERROR / share - pull, 0.0)[()]


def _records(batch: Batch) -> Scalars:
    """Number of records, one per learner where padding tells them apart."""
    if batch.mask is None:
        return float(batch.size)
    counts: FloatArray = batch.mask.sum(axis=-1)
    return counts.reshape(-1, 1, 1) if counts.ndim else float(counts)
