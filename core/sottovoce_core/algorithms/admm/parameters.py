"""Parameters of ADMM, DVP and PVP, and their conditions (Zhang & Zhu 2017).

A condition of the guarantee or of the solver's termination raises an error. A biased result or a large epsilon gives a
warning. The number of records is not known in advance, so warnings name the number from which they do not apply.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, cast

import numpy as np

from sottovoce_core.algorithms.admm.accounting import (
    CentreVariant,
    DualCalibration,
    ExtraRidgeRule,
    NoCalibration,
    NodeParameters,
    NoiseCalibration,
    PrimalCalibration,
    ScaleRule,
)
from sottovoce_core.algorithms.admm.algorithm import (
    GRADIENT_ROUNDING_ERROR,
    Admm,
    bound_gradient_terms,
    find_max_private_norm,
)
from sottovoce_core.algorithms.run_context import (
    AlgorithmSpec,
    PerLearner,
    RunContext,
    RunWarning,
    divide_per_learner,
    require_scales,
)
from sottovoce_core.errors import SpecError, require
from sottovoce_core.losses import Loss, MarginLoss
from sottovoce_core.registry import MAX_MAGNITUDE, MIN_MAGNITUDE, NonNegative
from sottovoce_core.text import format_learner_name


class AdmmSpec(AlgorithmSpec):
    """Consensus ADMM, without privacy."""

    name: Literal["admm"]
    penalty: float = 0.5
    """Penalty parameter eta."""
    loss_weight: float = 1.0
    """Weight C of the mean loss of a learner's records, relative to its ridge."""
    tolerance: float = 1e-10
    """Norm tau of the gradient at which the local solver stops."""

    def build(self, context: RunContext) -> tuple[Admm, tuple[RunWarning, ...]]:
        return _build(self, context, NoCalibration())

    def scale_noise(self, factors: tuple[float, ...]) -> AdmmSpec:
        raise SpecError("admm has no noise; take dvp or pvp")


class DvpSpec(AdmmSpec):
    """ADMM with dual variable perturbation (Zhang & Zhu 2017, Algorithm 2)."""

    name: Literal["dvp"]  # type: ignore[assignment]
    alpha: PerLearner = 0.1
    """Privacy loss of an iteration."""
    rule: ExtraRidgeRule = "tight"
    """Extra ridge that makes alpha hold. tight: the least that can be proved. printed: the paper's (Eq. 19), which counts
    the Jacobian twice."""
    scale_rule: ScaleRule = "tight"
    """tight: the exact sensitivity of a record. printed: that of the paper."""
    output_noise: float = 1e-6
    """Laplace scale of the noise on the minimiser; 0: no such noise, and the minimiser must be exact."""

    def build(self, context: RunContext) -> tuple[Admm, tuple[RunWarning, ...]]:
        objective = DualCalibration(self.rule, self.scale_rule)
        return _build(self, context, objective, self.alpha, self.alpha, self.output_noise)

    def scale_noise(self, factors: tuple[float, ...]) -> DvpSpec:
        return self.model_copy(update={"alpha": divide_per_learner(self.alpha, factors)})


class PvpSpec(AdmmSpec):
    """ADMM with primal variable perturbation (Zhang & Zhu 2017, Algorithm 3)."""

    name: Literal["pvp"]  # type: ignore[assignment]
    alpha: PerLearner = 0.1
    """Privacy loss of an iteration."""
    variant: CentreVariant = "public"
    """Centre of the minimiser that carries the noise. public: computed from messages alone. own_clean: with the own
    minimiser without noise. literal: as printed."""
    scale_rule: ScaleRule = "tight"
    """tight: the exact sensitivity of a record. printed: that of the paper."""
    final: Literal["none", "dvp"] = "none"
    """Kind of the last iteration, if it is not PVP."""
    final_alpha: PerLearner | None = None
    """Privacy loss of the last iteration (None: `alpha`)."""
    output_noise: NonNegative = 1e-6
    """Laplace scale of the noise on the last minimiser, if the last iteration is one of DVP."""

    def build(self, context: RunContext) -> tuple[Admm, tuple[RunWarning, ...]]:
        calibration = PrimalCalibration(
            self.variant, self.scale_rule, DualCalibration() if self.final == "dvp" else None
        )
        final = self.alpha if self.final_alpha is None else self.final_alpha
        output_noise = self.output_noise if self.final == "dvp" else 0.0
        return _build(self, context, calibration, self.alpha, final, output_noise)

    def scale_noise(self, factors: tuple[float, ...]) -> PvpSpec:
        final = None if self.final_alpha is None else divide_per_learner(self.final_alpha, factors)
        return self.model_copy(update={"alpha": divide_per_learner(self.alpha, factors), "final_alpha": final})


def _build(
    spec: AdmmSpec,
    context: RunContext,
    calibration: NoiseCalibration,
    alpha: PerLearner = float("inf"),
    final_alpha: PerLearner = float("inf"),
    output_noise: float = 0.0,
) -> tuple[Admm, tuple[RunWarning, ...]]:
    coupling = context.fixed_network.mixing(0).neighbour_weights
    degrees = tuple(float(degree) for degree in np.count_nonzero(coupling, axis=1))
    alphas = context.broadcast_to_learners(alpha, "algorithm.alpha")
    finals = context.broadcast_to_learners(final_alpha, "algorithm.final_alpha")
    loss = context.loss
    slope, curvature = (loss.slope_bound, loss.curvature) if isinstance(loss, MarginLoss) else (np.inf, np.inf)
    nodes = tuple(
        NodeParameters(
            alpha=alphas[i],
            final_alpha=finals[i],
            degree=degrees[i],
            penalty=spec.penalty,
            loss_weight=spec.loss_weight,
            ridge=loss.ridge,
            lipschitz=slope * loss.feature_bound,
            curvature=curvature * loss.feature_bound**2,
            tolerance=spec.tolerance,
            output_noise=output_noise,
            dim=context.dim,
            has_logistic_curvature=isinstance(loss, MarginLoss) and loss.has_logistic_curvature,
        )
        for i in range(context.n_learners)
    )
    margin_loss, findings = _check(calibration, nodes, loss, context)
    algorithm = Admm(spec.name, context.dim, context.rounds, margin_loss, calibration, nodes)
    return algorithm, findings


# ---- conditions -------------------------------------------------------------------------------------------------------

_MIN_CURVATURE_RATIO = 2.0**-40
"""Minimum curvature of the local problem without records, as a share of the curvature of all records."""

_TAIL = 64.0
"""Logarithm of the probability that noise is longer than the warning about its size assumes, with the sign reversed."""

_WARNING_EPSILON = 10.0
"""Cumulative epsilon from which the user gets a warning."""


def _check(
    calibration: NoiseCalibration, nodes: Sequence[NodeParameters], loss: Loss, context: RunContext
) -> tuple[MarginLoss, tuple[RunWarning, ...]]:
    """Return the loss as a margin loss, and warnings; raise an error if there is no guarantee or no solution.

    Raises:
        AssumptionViolated: GRAPH, PENALTY, RIDGE, LOSS_WEIGHT, CLIPPED, LOSS_CONSTANTS, LOSS_FIRST_ORDER, ALPHA, NOISE_SCALE or
            SOLVER: the first that fails.
    """
    node = nodes[0]
    isolated = ", ".join(format_learner_name(context.names, i) for i, each in enumerate(nodes) if each.degree == 0)
    require(not isolated, "GRAPH", f"the communication graph must be connected, got {isolated} without neighbours")
    for code, name, value in (
        ("PENALTY", "penalty", node.penalty),
        ("RIDGE", "loss.ridge", node.ridge),
        ("LOSS_WEIGHT", "loss_weight", node.loss_weight),
    ):
        text = f"eta, rho and C_R must be positive, and within [{MIN_MAGNITUDE:g}, {MAX_MAGNITUDE:g}]"
        require(MIN_MAGNITUDE <= value <= MAX_MAGNITUDE, code, f"{text}, got {name}={value}")
    _require_loss(calibration, node, loss)
    if not isinstance(calibration, NoCalibration):
        for each in nodes:
            for alpha in (each.alpha, each.final_alpha):
                require(bool(0 < alpha < math.inf), "ALPHA", f"alpha must be positive and finite, got {alpha}")
        _require_noise(calibration, nodes)
    margin_loss = cast(MarginLoss, loss)
    for each in nodes:
        _require_solver(calibration, each, margin_loss)
        _require_solvable(each)
    return margin_loss, tuple(_findings(calibration, nodes, margin_loss, context))


def _require_loss(calibration: NoiseCalibration, node: NodeParameters, loss: Loss) -> None:
    """Raise CLIPPED, LOSS_CONSTANTS, LOSS_FIRST_ORDER or SOLVER."""
    text = "ADMM minimises the loss itself, whose gradients are not clipped: remove loss.clip_norm"
    require(loss.clip_norm is None, "CLIPPED", f"{text}, got {loss.clip_norm}")
    first, second, convex = node.lipschitz < math.inf, node.curvature < math.inf, loss.is_convex
    got = f"got slope bound {node.lipschitz}, curvature bound {node.curvature}, convex {convex} ({type(loss).__name__})"
    if isinstance(calibration, DualCalibration) or (
        isinstance(calibration, PrimalCalibration) and calibration.final_calibration is not None
    ):
        text = "DVP needs a twice differentiable loss with bounded first and second derivative"
        require(convex and first and second, "LOSS_CONSTANTS", f"{text}, {got}")
    if isinstance(calibration, PrimalCalibration):
        require(convex and first, "LOSS_FIRST_ORDER", f"PVP needs a convex loss with bounded derivative, {got}")
    text = "the local solver needs a convex loss of the score with bounded second derivative"
    require(convex and second and hasattr(loss, "second_derivative"), "SOLVER", f"{text}, {got}")


def _require_noise(calibration: NoiseCalibration, nodes: Sequence[NodeParameters]) -> None:
    """Raise NOISE_SCALE if `1/zeta` can leave the range, for any number of records.

    DVP's noise gets all of alpha, half, or with rule `printed` any part that float64 distinguishes from 0. PVP's Delta is
    between `2 tau/m` and `(2 ell C + 2 tau)/rho`, for the most and the fewest records.
    """
    for each in nodes:
        ends = [each.lipschitz, each.lipschitz * 2.0**55]
        if isinstance(calibration, PrimalCalibration):
            largest = 2.0 * (each.lipschitz * each.loss_weight + each.tolerance) / each.ridge
            ends += [2.0 * each.tolerance / float(each.stiffness), largest]
        require_scales(end / float(alpha) for end in ends for alpha in (each.alpha, each.final_alpha))


def _require_solver(calibration: NoiseCalibration, node: NodeParameters, loss: MarginLoss) -> None:
    """Raise SOLVER for a tolerance that float64 cannot reach, or negative output noise.

    Noise covers the solver's error up to the tolerance, so a private form must reach it for all records and messages.
    """
    if isinstance(calibration, NoCalibration):
        terms = 2.0 * node.loss_weight * (node.lipschitz if node.lipschitz < math.inf else 0.0)
    else:
        terms = float(bound_gradient_terms(node, loss, node.stiffness))
    least = GRADIENT_ROUNDING_ERROR * terms
    text = f"tolerance must be positive and finite, and at least {least:.3g} for this loss_weight, ridge and penalty"
    text = f"{text}: float64 resolves no less"
    require(max(least, 1e-300) <= node.tolerance < math.inf, "SOLVER", f"{text}, got {node.tolerance}")
    require_scales([node.output_noise], "SOLVER")


def _require_solvable(node: NodeParameters) -> None:
    """Raise SOLVER if float64 would lose the local problem's own curvature next to that of the records."""
    stiffness, least = float(node.stiffness), _MIN_CURVATURE_RATIO * node.curvature * node.loss_weight
    text = f"ridge and penalty must give the local problem a curvature (rho + 2 eta N) of at least {least:.3g}"
    require(
        stiffness >= least,
        "SOLVER",
        f"{text}: float64 cannot solve flatter problems, got {stiffness:.3g}",
    )


def _findings(
    calibration: NoiseCalibration, nodes: Sequence[NodeParameters], loss: MarginLoss, context: RunContext
) -> Iterator[RunWarning]:
    """Yield the warnings LOSS_WEIGHT_RANGE, EXTRA_RIDGE, SOLVER and BUDGET."""
    node, rounds = nodes[0], context.rounds
    if isinstance(calibration, NoCalibration):
        return
    if node.loss_weight > 1:
        text = f"C_R > B_p while a learner has fewer than {math.ceil(node.loss_weight)} records"
        yield RunWarning("LOSS_WEIGHT_RANGE", f"{text}: outside the paper's range (privacy unaffected)")
    objective = (
        calibration if isinstance(calibration, DualCalibration) else getattr(calibration, "final_calibration", None)
    )
    if objective is not None:
        yield from _objective_findings(objective, nodes, context.names)
    if isinstance(calibration, PrimalCalibration):
        yield from _cut_findings(calibration, nodes, loss, context.names)
    largest = max((rounds - 2) * each.alpha + each.final_alpha for each in nodes) if rounds > 1 else 0.0
    if largest > _WARNING_EPSILON:
        text = f"cumulative loss {largest:.6g} over {rounds - 1} iterations"
        yield RunWarning("BUDGET", f"{text}: the sum protects, not the alpha of one iteration; lower alpha or rounds")


def _objective_findings(
    objective: DualCalibration, nodes: Sequence[NodeParameters], names: Sequence[str]
) -> Iterator[RunWarning]:
    """Yield the warnings EXTRA_RIDGE and SOLVER."""
    for i, node in enumerate(nodes):
        if (phi := float(objective.calibrate_iteration(node, 1.0, 0.0, is_last=True).extra_ridge)) > 0:
            text = f"alpha too small for {format_learner_name(names, i)} while it has fewer than"
            text = f"{text} {objective.min_records(node)} records"
            got = f"extra regularisation biases the classifier, got Phi = {phi:.6g} with one record"
            yield RunWarning("EXTRA_RIDGE", f"{text}: {got}")
            break
    if nodes[0].output_noise == 0:
        text = "output_noise is 0: the guarantee is that of exact minimisation"
        yield RunWarning("SOLVER", f"{text}, got a solver with tolerance {nodes[0].tolerance:g}")


def _cut_findings(
    calibration: PrimalCalibration, nodes: Sequence[NodeParameters], loss: MarginLoss, names: Sequence[str]
) -> Iterator[RunWarning]:
    """Yield the warning SOLVER if a private linear term may be cut: `eta N s` times the norm of the noise before.

    The norm has a Gamma distribution, and exceeds `(n + sqrt(2 n x) + x) / zeta` with a probability of at most `exp(-x)`.
    """
    factor = calibration.carry_factor
    for i, node in enumerate(nodes if factor else ()):
        norm = node.dim + math.sqrt(2.0 * node.dim * _TAIL) + _TAIL
        pull = float(node.penalty * node.degree)
        # 1/zeta is Delta/alpha; Delta is largest in the long run, and with scale rule `printed` that of `literal`.
        steady = float(node.stiffness) - pull * (factor if calibration.scale_rule == "tight" else 2.0)
        per_gradient = factor * pull * norm * 2.0 / (steady * float(node.alpha))
        longest = float(find_max_private_norm(node, loss, node.stiffness))
        room = longest / per_gradient - node.tolerance
        least = math.ceil(node.lipschitz * node.loss_weight / room) if room > 0 else math.inf
        if least > 1:
            text = (
                f"tolerance {node.tolerance:g} is too small for {format_learner_name(names, i)} while it has fewer than"
            )
            got = f"{least} records: noise in the carried minimiser is cut, got a term of norm above {longest:.3g}"
            yield RunWarning("SOLVER", f"{text} {got}; raise tolerance, or take variant public")
            return
