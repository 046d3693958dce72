"""The parameters of ADMM, DVP and PVP, how a run is made of them, and their conditions (Zhang & Zhu 2017).

What would void the guarantee or leave the solver without end is refused; what only biases the result, or spends much, is a
finding. How many records there will be is not known beforehand, so findings name the number from which they do not apply.
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
from sottovoce_core.algorithms.admm.algorithm import GRADIENT_ROUNDING_ERROR, Admm
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
    """eta"""
    loss_weight: float = 1.0
    """C: weight of the mean loss of a learner's records beside its ridge."""
    tolerance: float = 1e-10
    """tau: norm of the gradient at which the local solver stops."""

    def build(self, context: RunContext) -> tuple[Admm, tuple[RunWarning, ...]]:
        return _build(self, context, NoCalibration())

    def scale_noise(self, factors: tuple[float, ...]) -> AdmmSpec:
        raise SpecError("admm has no noise; take dvp or pvp")


class DvpSpec(AdmmSpec):
    """ADMM with dual variable perturbation (Zhang & Zhu 2017, Algorithm 2)."""

    name: Literal["dvp"]  # type: ignore[assignment]
    alpha: PerLearner = 0.1
    """Privacy loss of an iteration."""
    rule: ExtraRidgeRule = "balanced"
    jacobian: Literal[1, 2] = 1
    scale_rule: ScaleRule = "tight"
    output_noise: float = 1e-6
    """Laplace scale; 0: the minimiser is said as it is, and must be exact."""

    def build(self, context: RunContext) -> tuple[Admm, tuple[RunWarning, ...]]:
        objective = DualCalibration(self.rule, self.jacobian, self.scale_rule)
        return _build(self, context, objective, self.alpha, self.alpha, self.output_noise)

    def scale_noise(self, factors: tuple[float, ...]) -> DvpSpec:
        return self.model_copy(update={"alpha": divide_per_learner(self.alpha, factors)})


class PvpSpec(AdmmSpec):
    """ADMM with primal variable perturbation (Zhang & Zhu 2017, Algorithm 3)."""

    name: Literal["pvp"]  # type: ignore[assignment]
    alpha: PerLearner = 0.1
    """Privacy loss of an iteration."""
    variant: CentreVariant = "public"
    scale_rule: ScaleRule = "tight"
    final: Literal["none", "dvp"] = "none"
    """Is the last iteration one of DVP?"""
    final_alpha: PerLearner | None = None
    """Privacy loss of the last iteration (None: `alpha`)."""
    output_noise: NonNegative = 1e-6
    """Of the last iteration, if that is one of DVP."""

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
    setting: RunContext,
    calibration: NoiseCalibration,
    alpha: PerLearner = float("inf"),
    final_alpha: PerLearner = float("inf"),
    output_noise: float = 0.0,
) -> tuple[Admm, tuple[RunWarning, ...]]:
    coupling = setting.fixed_network.mixing(0).neighbour_weights
    degrees = tuple(float(degree) for degree in np.count_nonzero(coupling, axis=1))
    alphas = setting.broadcast_to_learners(alpha, "algorithm.alpha")
    finals = setting.broadcast_to_learners(final_alpha, "algorithm.final_alpha")
    loss = setting.loss
    slope, bend = (loss.slope_bound, loss.curvature) if isinstance(loss, MarginLoss) else (np.inf, np.inf)
    nodes = tuple(
        NodeParameters(
            alpha=alphas[i],
            final_alpha=finals[i],
            degree=degrees[i],
            penalty=spec.penalty,
            loss_weight=spec.loss_weight,
            ridge=loss.ridge,
            lipschitz=slope * loss.feature_bound,
            curvature=bend * loss.feature_bound**2,
            tolerance=spec.tolerance,
            output_noise=output_noise,
            dim=setting.dim,
        )
        for i in range(setting.n_learners)
    )
    margin_loss, findings = _checked(calibration, nodes, loss, setting)
    algorithm = Admm(spec.name, setting.dim, setting.rounds, margin_loss, calibration, nodes)
    return algorithm, findings


# ---- conditions -------------------------------------------------------------------------------------------------------

_MIN_CURVATURE_RATIO = 2.0**-40
"""Of the curvature of all records: the local problem must have as much of its own."""

_WARNING_EPSILON = 10.0
"""Cumulative epsilon from which a user is told."""


def _checked(
    calibration: NoiseCalibration, nodes: Sequence[NodeParameters], loss: Loss, setting: RunContext
) -> tuple[MarginLoss, tuple[RunWarning, ...]]:
    """The loss, known to be one of the score, and what the user is told; what has no guarantee or no solution is refused.

    Raises:
        AssumptionViolated: GRAPH, PENALTY, RIDGE, LOSS_WEIGHT, CLIPPED, LOSS_CONSTANTS, LOSS_FIRST_ORDER, ALPHA, NOISE_SCALE or
            SOLVER, whichever fails first.
    """
    node = nodes[0]
    lonely = ", ".join(format_learner_name(setting.names, i) for i, each in enumerate(nodes) if each.degree == 0)
    require(not lonely, "GRAPH", f"the communication graph must be connected, got {lonely} without neighbours")
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
    _require_solver(node)
    for each in nodes:
        _require_solvable(each)
    return cast(MarginLoss, loss), tuple(_findings(calibration, nodes, setting))


def _require_loss(calibration: NoiseCalibration, node: NodeParameters, loss: Loss) -> None:
    """CLIPPED, LOSS_CONSTANTS, LOSS_FIRST_ORDER, SOLVER."""
    text = "ADMM minimises the loss itself, which clipped gradients do not belong to: remove loss.clip_norm"
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
    """NOISE_SCALE: `1/zeta` lies between these two, however many records come.

    Of alpha, DVP's noise gets all, half, or with rule `printed` whatever float64 tells from 0. PVP's Delta lies between
    `2 tau/m` and `(2 ell C + 2 tau)/rho`, of the most records and of the fewest.
    """
    for each in nodes:
        ends = [each.lipschitz, each.lipschitz * 2.0**55]
        if isinstance(calibration, PrimalCalibration):
            most = 2.0 * (each.lipschitz * each.loss_weight + each.tolerance) / each.ridge
            ends += [2.0 * each.tolerance / float(each.stiffness), most]
        require_scales(end / float(alpha) for end in ends for alpha in (each.alpha, each.final_alpha))


def _require_solver(node: NodeParameters) -> None:
    """SOLVER: a tolerance that float64 can reach; no negative output noise."""
    known = node.lipschitz if node.lipschitz < math.inf else 0.0
    least = 2 * GRADIENT_ROUNDING_ERROR * node.loss_weight * known
    text = f"tolerance must be positive and finite, and at least {least:.3g} for this loss_weight: float64 resolves no less"
    require(max(least, 1e-300) <= node.tolerance < math.inf, "SOLVER", f"{text}, got {node.tolerance}")
    require_scales([node.output_noise], "SOLVER")


def _require_solvable(node: NodeParameters) -> None:
    """SOLVER: what keeps the local problem curved is not lost beside the records' own curvature, in float64."""
    stiffness, most = float(node.stiffness), node.curvature * node.loss_weight
    text = f"ridge and penalty must give the local problem a curvature (rho + 2 eta N) of at least {_MIN_CURVATURE_RATIO * most:.3g}"
    require(
        stiffness >= _MIN_CURVATURE_RATIO * most,
        "SOLVER",
        f"{text}: float64 solves nothing flatter, got {stiffness:.3g}",
    )


def _findings(
    calibration: NoiseCalibration, nodes: Sequence[NodeParameters], setting: RunContext
) -> Iterator[RunWarning]:
    """LOSS_WEIGHT_RANGE, EXTRA_RIDGE, SOLVER, BUDGET."""
    node, rounds = nodes[0], setting.rounds
    if isinstance(calibration, NoCalibration):
        return
    if node.loss_weight > 1:
        text = f"C_R > B_p while a learner has fewer than {math.ceil(node.loss_weight)} records"
        yield RunWarning("LOSS_WEIGHT_RANGE", f"{text}: outside the paper's range (privacy unaffected)")
    objective = (
        calibration if isinstance(calibration, DualCalibration) else getattr(calibration, "final_calibration", None)
    )
    if objective is not None:
        yield from _objective_findings(objective, nodes, setting.names)
    largest = max((rounds - 2) * each.alpha + each.final_alpha for each in nodes) if rounds > 1 else 0.0
    if largest > _WARNING_EPSILON:
        text = f"cumulative loss {largest:.6g} over {rounds - 1} iterations"
        yield RunWarning("BUDGET", f"{text}: what protects is the sum, not the alpha of one; lower alpha or rounds")


def _objective_findings(
    objective: DualCalibration, nodes: Sequence[NodeParameters], names: Sequence[str]
) -> Iterator[RunWarning]:
    """EXTRA_RIDGE, SOLVER."""
    for i, node in enumerate(nodes):
        if (phi := float(objective.calibrate_iteration(node, 1.0, 0.0, is_last=True).extra_ridge)) > 0:
            least = _records_without_extra_ridge(objective, node)
            text = f"alpha too small for {format_learner_name(names, i)} while it has fewer than {least} records"
            got = f"extra regularisation biases the classifier, got Phi = {phi:.6g} with one record"
            yield RunWarning("EXTRA_RIDGE", f"{text}: {got}")
            break
    if nodes[0].output_noise == 0:
        text = "output_noise is 0: the guarantee is that of exact minimisation"
        yield RunWarning("SOLVER", f"{text}, got a solver with tolerance {nodes[0].tolerance:g}")


def _records_without_extra_ridge(objective: DualCalibration, node: NodeParameters) -> int:
    """The least B with Phi = 0: where `k ln(1 + c C/(B (rho + 2 eta N)))` is at most alpha or half of it."""
    share = 1.0 if objective.rule == "printed" else 0.5
    room = np.expm1(share * node.final_alpha / objective.jacobian)
    return math.ceil(node.curvature * node.loss_weight / (node.stiffness * room))
