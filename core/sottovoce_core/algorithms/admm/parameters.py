"""The parameters of ADMM, DVP and PVP, and how a run is made of them."""

from __future__ import annotations

from typing import Literal

import numpy as np

from sottovoce_core.algorithms.admm.algorithm import Admm
from sottovoce_core.algorithms.admm.calibrations import (
    Calibration,
    DualCalibration,
    Node,
    PrimalCalibration,
    Rule,
    Scale,
    Unperturbed,
    Variant,
)
from sottovoce_core.algorithms.admm.conditions import checked
from sottovoce_core.algorithms.setting import AlgorithmSpec, Caveat, PerLearner, Setting, divided
from sottovoce_core.errors import SpecError
from sottovoce_core.losses import MarginLoss
from sottovoce_core.registry import NonNegative


class AdmmSpec(AlgorithmSpec):
    """Consensus ADMM, without privacy."""

    name: Literal["admm"]
    penalty: float = 0.5
    """eta"""
    loss_weight: float = 1.0
    """C: weight of the mean loss of a learner's records beside its ridge."""
    tolerance: float = 1e-10
    """tau: norm of the gradient at which the local solver stops."""

    def build(self, setting: Setting) -> tuple[Admm, tuple[Caveat, ...]]:
        return _build(self, setting, Unperturbed())

    def noisier(self, factors: tuple[float, ...]) -> AdmmSpec:
        raise SpecError("admm has no noise; take dvp or pvp")


class DvpSpec(AdmmSpec):
    """ADMM with dual variable perturbation (Zhang & Zhu 2017, Algorithm 2)."""

    name: Literal["dvp"]  # type: ignore[assignment]
    alpha: PerLearner = 0.1
    """Privacy loss of an iteration."""
    rule: Rule = "balanced"
    jacobian: Literal[1, 2] = 1
    scale: Scale = "tight"
    output_noise: float = 1e-6
    """Laplace scale; 0: the minimiser is said as it is, and must be exact."""

    def build(self, setting: Setting) -> tuple[Admm, tuple[Caveat, ...]]:
        objective = DualCalibration(self.rule, self.jacobian, self.scale)
        return _build(self, setting, objective, self.alpha, self.alpha, self.output_noise)

    def noisier(self, factors: tuple[float, ...]) -> DvpSpec:
        return self.model_copy(update={"alpha": divided(self.alpha, factors)})


class PvpSpec(AdmmSpec):
    """ADMM with primal variable perturbation (Zhang & Zhu 2017, Algorithm 3)."""

    name: Literal["pvp"]  # type: ignore[assignment]
    alpha: PerLearner = 0.1
    """Privacy loss of an iteration."""
    variant: Variant = "public"
    scale: Scale = "tight"
    final: Literal["none", "dvp"] = "none"
    """Is the last iteration one of DVP?"""
    final_alpha: PerLearner | None = None
    """Privacy loss of the last iteration (None: `alpha`)."""
    output_noise: NonNegative = 1e-6
    """Of the last iteration, if that is one of DVP."""

    def build(self, setting: Setting) -> tuple[Admm, tuple[Caveat, ...]]:
        calibration = PrimalCalibration(self.variant, self.scale, DualCalibration() if self.final == "dvp" else None)
        final = self.alpha if self.final_alpha is None else self.final_alpha
        output_noise = self.output_noise if self.final == "dvp" else 0.0
        return _build(self, setting, calibration, self.alpha, final, output_noise)

    def noisier(self, factors: tuple[float, ...]) -> PvpSpec:
        final = None if self.final_alpha is None else divided(self.final_alpha, factors)
        return self.model_copy(update={"alpha": divided(self.alpha, factors), "final_alpha": final})


def _build(
    spec: AdmmSpec,
    setting: Setting,
    calibration: Calibration,
    alpha: PerLearner = float("inf"),
    final_alpha: PerLearner = float("inf"),
    output_noise: float = 0.0,
) -> tuple[Admm, tuple[Caveat, ...]]:
    coupling = setting.fixed_network.at(0).neighbours
    degrees = tuple(float(degree) for degree in np.count_nonzero(coupling, axis=1))
    alphas = setting.per_learner(alpha, "algorithm.alpha")
    finals = setting.per_learner(final_alpha, "algorithm.final_alpha")
    loss = setting.loss
    slope, bend = (loss.slope_bound, loss.curvature) if isinstance(loss, MarginLoss) else (np.inf, np.inf)
    nodes = tuple(
        Node(
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
    margin_loss, findings = checked(calibration, nodes, loss, setting)
    algorithm = Admm(spec.name, setting.dim, setting.rounds, margin_loss, calibration, nodes)
    return algorithm, findings
