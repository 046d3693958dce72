"""Parameters of LDP-DOL and the conditions of its theory (Chen & Wang 2025, Theorems 1-5).

A condition of the privacy guarantee raises an error. A condition of a convergence theorem only gives a warning, which names
the theorem that does not apply: the run continues. `topology` checks the conditions on W.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from sottovoce_core.algorithms.ldp_dol.accounting import AccountingMode, SharedSchedules, require_mode
from sottovoce_core.algorithms.ldp_dol.algorithm import LdpDol
from sottovoce_core.algorithms.run_context import (
    AlgorithmSpec,
    PerLearner,
    RunContext,
    RunWarning,
    multiply_per_learner,
    require_scales,
)
from sottovoce_core.errors import require
from sottovoce_core.losses import Loss
from sottovoce_core.losses.history import QuadraticHistory, start_history
from sottovoce_core.network.topology import FixedNetwork
from sottovoce_core.privacy.guarantee import Regularity


class LdpDolSpec(AlgorithmSpec):
    """LDP-DOL (Chen & Wang 2025). The conditions of the theory on these numbers are below."""

    name: Literal["ldp-dol"]
    lam0: float = 1.0
    """Step size in round t: lam0/(t+1)^v."""
    v: float = 0.77
    """Exponent of the step size, in (1/2, 1)."""
    gam0: float = 1.0
    """Coupling in round t: gam0/(t+1)^u."""
    u: float = 0.65
    """Exponent of the coupling, in (1/2, 1)."""
    sigma: PerLearner = 1.0
    """Size of the noise: its scale in round t is sigma/sqrt(2) (t+1)^varsigma."""
    varsigma: PerLearner = 0.1
    """Growth of the noise, in [0, 1/2)."""
    accounting: AccountingMode = "best"
    """Bound on the sensitivity. best: the least of those that apply to the loss."""

    def build(self, context: RunContext) -> tuple[LdpDol, tuple[RunWarning, ...]]:
        topology = context.full_fixed_network
        algorithm = LdpDol(
            dim=context.dim,
            rounds=context.rounds,
            schedules=SharedSchedules(self.lam0, self.v, self.gam0, self.u),
            sigma=context.broadcast_to_learners(self.sigma, "algorithm.sigma"),
            varsigma=context.broadcast_to_learners(self.varsigma, "algorithm.varsigma"),
            network=context.network,
            loss=context.loss,
            decision_set=context.decision_set,
            accounting=self.accounting,
        )
        findings = _check_ldp_dol(
            algorithm.schedules,
            self.accounting,
            algorithm.sigma,
            algorithm.varsigma,
            topology,
            Regularity.from_loss(context.loss, context.decision_set, context.dim),
            strong_convexity=context.loss.ridge if context.loss.is_convex else 0.0,
        )
        ends = (0, context.rounds - 1)  # the noise grows with the rounds
        require_scales(algorithm.noise_scale(i, t) for i in range(context.n_learners) for t in ends)
        return algorithm, (*findings, *_large_statistics(context.loss, context.dim))

    def scale_noise(self, factors: tuple[float, ...]) -> LdpDolSpec:
        return self.model_copy(update={"sigma": multiply_per_learner(self.sigma, factors)})


# ---- conditions -------------------------------------------------------------------------------------------------------

_LARGE_STATISTICS_BYTES = 2**28
"""Bytes of statistics from which the user gets a warning."""


def _check_ldp_dol(
    schedules: SharedSchedules,
    mode: AccountingMode,
    sigma: tuple[float, ...],
    varsigma: tuple[float, ...],
    topology: FixedNetwork,
    regularity: Regularity,
    strong_convexity: float,
) -> tuple[RunWarning, ...]:
    """Raise an error for parameters without a guarantee, and return warnings for those outside a convergence theorem.

    Args:
        strong_convexity: mu of every expected loss, ridge included; 0: convex only.

    Raises:
        AssumptionViolated: LAMBDA0, GAMMA0, EXPONENT_RANGE, SIGMA, VARSIGMA_RANGE, GRAD_CHANGE, SMOOTHNESS, NOT_CONVEX or
            CONVEX_CLIPPED: the first that fails.
    """
    _require_schedules(schedules)
    _require_noise(sigma, varsigma)
    text = "a privacy budget needs a finite bound on the per-record gradient change"
    text = f"{text}: bound the features, or set clip_norm, got {regularity.clipped_gradient_change}"
    require(0 < regularity.clipped_gradient_change < math.inf, "GRAD_CHANGE", text)
    require_mode(mode, regularity)
    findings = [*_network_findings(schedules, varsigma, topology)]
    if strong_convexity > 0:
        findings += _strongly_convex_findings(schedules, topology, regularity, strong_convexity)
    elif regularity.is_convex:
        findings += _convex_findings(schedules, topology, regularity)
    return tuple(findings)


# ---- errors ----------------------------------------------------------------------------------------------


def _require_schedules(schedules: SharedSchedules) -> None:
    """Raise LAMBDA0, GAMMA0 or EXPONENT_RANGE."""
    positive = "lam0 and gam0 must be positive and finite"
    require(0 < schedules.lam0 < math.inf, "LAMBDA0", f"{positive}, got lam0={schedules.lam0}")
    require(0 < schedules.gam0 < math.inf, "GAMMA0", f"{positive}, got gam0={schedules.gam0}")
    text = f"u and v must lie strictly between 0.5 and 1, got u={schedules.u}, v={schedules.v}"
    require(0.5 < schedules.u < 1 and 0.5 < schedules.v < 1, "EXPONENT_RANGE", text)


def _require_noise(sigma: tuple[float, ...], varsigma: tuple[float, ...]) -> None:
    """Raise SIGMA or VARSIGMA_RANGE."""
    for value in sigma:
        require(0 < value < math.inf, "SIGMA", f"sigma must be positive and finite, got {value}")
    for value in varsigma:
        require(0 <= value < 0.5, "VARSIGMA_RANGE", f"varsigma must lie in [0, 0.5), got {value}")


# ---- warnings --------------------------------------------------------------------------------------------


def _network_findings(
    schedules: SharedSchedules, varsigma: tuple[float, ...], topology: FixedNetwork
) -> Iterator[RunWarning]:
    """Yield the warnings U_NOT_BELOW_V, NOISE_GROWTH, GAMMA0_LARGE and COUPLING_OVERSHOOT."""
    if schedules.u >= schedules.v:
        yield RunWarning(
            "U_NOT_BELOW_V", f"u >= v: learners do not reach agreement, got u={schedules.u}, v={schedules.v}"
        )
    if max(varsigma) + 0.5 >= schedules.u:
        text = "noise grows too fast for Theorems 1-4 (max varsigma + 0.5 must be below u)"
        yield RunWarning("NOISE_GROWTH", f"{text}, got {max(varsigma)} + 0.5 against u={schedules.u}")
    if -3 * topology.delta_m * schedules.gam0 > 1:
        text = "gam0 exceeds 1/(3 |delta_m|): only the large-time theorems apply"
        yield RunWarning("GAMMA0_LARGE", f"{text}, got gam0={schedules.gam0}, delta_m={topology.delta_m:.6g}")
    largest = max(topology.own_weight(i) for i in range(topology.n_learners))
    if schedules.gam0 * largest > 1:
        text = "gam0*|w_ii| > 1: first rounds overshoot; accounting uses |1 - |w_ii| gamma_t|"
        yield RunWarning("COUPLING_OVERSHOOT", f"{text}, got {schedules.gam0 * largest:.6g}")


def _large_statistics(loss: Loss, dim: int) -> Iterator[RunWarning]:
    """Yield the warning STATISTICS if exact statistics may need more memory than a machine has."""
    size = 8 * (dim + 1) ** 2
    if isinstance(start_history(loss), QuadraticHistory) and size >= _LARGE_STATISTICS_BYTES:
        yield RunWarning(
            "STATISTICS",
            f"a learner keeps exact statistics of this loss in place of records, {dim + 1} x {dim + 1} numbers: "
            f"{size / 2**30:.2g} GiB, and up to four times that while it writes a snapshot; with loss.clip_norm, or "
            "history: exact for the logistic loss, it keeps its records",
        )


def _strongly_convex_findings(
    schedules: SharedSchedules, topology: FixedNetwork, regularity: Regularity, mu: float
) -> Iterator[RunWarning]:
    """Yield the warning LAMBDA0_LARGE of Theorem 1: `lambda_0 <= -gamma_0 delta_2 mu / (mu^2 + 8 L^2)`."""
    smoothness = regularity.smoothness + regularity.ridge  # the theorem's L is that of the whole loss
    excess = (mu * mu + 8 * smoothness * smoothness) * schedules.lam0 / (-topology.delta_2 * mu * schedules.gam0)
    if excess > 1:
        yield _warn_of_transient(1, _transient(schedules, topology, excess, schedules.v - schedules.u))


def _convex_findings(
    schedules: SharedSchedules, topology: FixedNetwork, regularity: Regularity
) -> Iterator[RunWarning]:
    """Yield V_TOO_SMALL, and LAMBDA0_LARGE of Theorem 2: `lambda_0 <= -delta_2 gamma_0 / (2 (L^2 + kappa^2 + D^2))`.

    kappa, the standard deviation of a record's gradient, is at most `C / sqrt(2)`; D, the bound on the expected loss's gradient,
    is at most `G + r diameter`. Without a ridge, an unbounded decision set is allowed.
    """
    if (1 + 2 * schedules.u) / 3 >= schedules.v:
        text = f"v too small for Theorem 2/4, got v={schedules.v} against (1 + 2u)/3 = {(1 + 2 * schedules.u) / 3:.6g}"
        yield RunWarning("V_TOO_SMALL", text)
    smoothness = regularity.smoothness + regularity.ridge
    deviation = regularity.clipped_gradient_change / math.sqrt(2)
    slope = regularity.clip_norm + (regularity.ridge * regularity.diameter if regularity.ridge else 0.0)
    squares = smoothness * smoothness + deviation * deviation + slope * slope
    excess = 2 * squares * schedules.lam0 / (-topology.delta_2 * schedules.gam0)
    if excess > 1:
        yield _warn_of_transient(
            2, _transient(schedules, topology, excess, (3 * schedules.v - 2 * schedules.u - 1) / 2)
        )


def _transient(schedules: SharedSchedules, topology: FixedNetwork, excess: float, gap: float) -> float:
    """Return t0, the round after which the step sizes are small enough for the large-time Theorems 3 and 4."""
    coupling = -3 * topology.delta_m * schedules.gam0
    return max(0.0, _root(coupling, schedules.u) - 1, _root(excess, gap) - 1)


def _root(base: float, degree: float) -> float:
    """Return `base^(1/degree)`, infinite on overflow, and if the step sizes never get small (degree <= 0)."""
    if degree <= 0:
        return math.inf
    try:
        return float(base ** (1 / degree))
    except OverflowError:
        return math.inf


def _warn_of_transient(theorem: int, t0: float) -> RunWarning:
    shown = f"{math.ceil(t0)}" if t0 < 1e6 else f"{t0:.0e}"
    text = f"lam0 is above the limit of Theorem {theorem}: its convergence bound holds only after round t0 = {shown}"
    return RunWarning("LAMBDA0_LARGE", text)
