"""The conditions that the theory of LDP-DOL puts on its parameters (Chen & Wang 2025, Theorems 1-5).

What would void the privacy guarantee or leave it undefined is refused. What only voids a convergence theorem is a
finding: the run goes on, and its user is told which theorem does not apply. Conditions on W are `topology`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

from sottovoce.algorithms.ldp_dol.sensitivity import Mode, require_mode
from sottovoce.algorithms.setting import Caveat
from sottovoce.errors import require
from sottovoce.privacy.regularity import Regularity


class Parameters(Protocol):
    """What the conditions ask of a spec: `lam0`, `v`, `gam0`, `u` and the mode of accounting."""

    @property
    def lam0(self) -> float: ...
    @property
    def v(self) -> float: ...
    @property
    def gam0(self) -> float: ...
    @property
    def u(self) -> float: ...
    @property
    def accounting(self) -> Mode: ...


class Couplings(Protocol):
    """What the conditions ask of a topology."""

    @property
    def n_learners(self) -> int:
        """Number of learners."""
        ...

    @property
    def delta_2(self) -> float:
        """Second largest eigenvalue of W, negative."""
        ...

    @property
    def delta_m(self) -> float:
        """Smallest eigenvalue of W."""
        ...

    def own_weight(self, learner: int, /) -> float:
        """`|w_ii|`."""
        ...


def check_ldp_dol(
    spec: Parameters,
    sigma: tuple[float, ...],
    varsigma: tuple[float, ...],
    topology: Couplings,
    known: Regularity,
    strong_convexity: float,
    *,
    kappa: float | None = None,
    gradient_bound: float | None = None,
    budget_requested: bool,
    infinite_horizon_requested: bool,
) -> tuple[Caveat, ...]:
    """Refuse parameters without a guarantee, and report those outside a convergence theorem.

    Args:
        strong_convexity: mu of every expected loss, ridge included; 0: convex only.
        kappa: standard deviation of a record's gradient (default: `C / sqrt(2)`, the most that C allows).
        gradient_bound: D, bound on the expected loss's gradient, ridge included (default: `G + r * diameter`).

    Raises:
        CheckFailed: LAMBDA0, GAMMA0, EXPONENT_RANGE, SIGMA, VARSIGMA_RANGE, GRAD_CHANGE, SMOOTHNESS, NOT_CONVEX,
            CONVEX_CLIPPED or INFINITE_HORIZON, whichever fails first.
    """
    _require_schedules(spec)
    _require_noise(sigma, varsigma)
    _require_accounting(spec, known, budget_requested, infinite_horizon_requested)
    findings = [*_network_findings(spec, varsigma, topology)]
    if strong_convexity > 0:
        findings += _strongly_convex_findings(spec, topology, known, strong_convexity)
    elif known.convex:
        findings += _convex_findings(spec, topology, known, kappa, gradient_bound)
    return tuple(findings)


# ---- refused ---------------------------------------------------------------------------------------------


def _require_schedules(spec: Parameters) -> None:
    """LAMBDA0, GAMMA0, EXPONENT_RANGE."""
    positive = "lam0 and gam0 must be positive"
    require(0 < spec.lam0 < math.inf, "LAMBDA0", f"{positive}, got lam0={spec.lam0}")
    require(0 < spec.gam0 < math.inf, "GAMMA0", f"{positive}, got gam0={spec.gam0}")
    text = f"u and v must lie strictly between 0.5 and 1, got u={spec.u}, v={spec.v}"
    require(0.5 < spec.u < 1 and 0.5 < spec.v < 1, "EXPONENT_RANGE", text)


def _require_noise(sigma: tuple[float, ...], varsigma: tuple[float, ...]) -> None:
    """SIGMA, VARSIGMA_RANGE."""
    for value in sigma:
        require(0 < value < math.inf, "SIGMA", f"sigma must be positive, got {value}")
    for value in varsigma:
        require(0 <= value < 0.5, "VARSIGMA_RANGE", f"varsigma must lie in [0, 0.5), got {value}")


def _require_accounting(spec: Parameters, known: Regularity, budget: bool, infinite: bool) -> None:
    """GRAD_CHANGE, those of `require_mode`, INFINITE_HORIZON."""
    text = "a privacy budget needs a finite bound on the per-record gradient change"
    text = f"{text}: bound the features, or set clip_norm, got {known.change}"
    require(not budget or 0 < known.change < math.inf, "GRAD_CHANGE", text)
    require_mode(spec.accounting, known)
    text = "no finite infinite-horizon budget: needs u < v and a smooth loss"
    got = f'got u={spec.u}, v={spec.v}, smoothness={known.smoothness}, mode "{spec.accounting}"'
    bounded = spec.u < spec.v and known.smoothness < math.inf and spec.accounting != "loose"
    require(not infinite or bounded, "INFINITE_HORIZON", f"{text}, {got}")


# ---- reported --------------------------------------------------------------------------------------------


def _network_findings(spec: Parameters, varsigma: tuple[float, ...], topology: Couplings) -> Iterator[Caveat]:
    """U_NOT_BELOW_V, NOISE_GROWTH, GAMMA0_LARGE, COUPLING_OVERSHOOT."""
    if spec.u >= spec.v:
        yield Caveat("U_NOT_BELOW_V", f"u >= v: learners do not reach agreement, got u={spec.u}, v={spec.v}")
    if max(varsigma) + 0.5 >= spec.u:
        text = "noise grows too fast for Theorems 1-4 (max varsigma + 0.5 must be below u)"
        yield Caveat("NOISE_GROWTH", f"{text}, got {max(varsigma)} + 0.5 against u={spec.u}")
    if -3 * topology.delta_m * spec.gam0 > 1:
        text = "gam0 exceeds 1/(3 |delta_m|): only the large-time theorems apply"
        yield Caveat("GAMMA0_LARGE", f"{text}, got gam0={spec.gam0}, delta_m={topology.delta_m:.6g}")
    largest = max(topology.own_weight(i) for i in range(topology.n_learners))
    if spec.gam0 * largest > 1:
        text = "gam0*|w_ii| > 1: first rounds overshoot; accounting uses |1 - |w_ii| gamma_t|"
        yield Caveat("COUPLING_OVERSHOOT", f"{text}, got {spec.gam0 * largest:.6g}")


def _strongly_convex_findings(spec: Parameters, topology: Couplings, known: Regularity, mu: float) -> Iterator[Caveat]:
    """LAMBDA0_LARGE of Theorem 1: `lambda_0 <= -gamma_0 delta_2 mu / (mu^2 + 8 L^2)`."""
    smoothness = known.smoothness + known.ridge  # the theorem's L is that of the whole loss
    excess = (mu * mu + 8 * smoothness * smoothness) * spec.lam0 / (-topology.delta_2 * mu * spec.gam0)
    if excess > 1:
        yield _late(1, _transient(spec, topology, excess, spec.v - spec.u))


def _convex_findings(
    spec: Parameters, topology: Couplings, known: Regularity, kappa: float | None, gradient_bound: float | None
) -> Iterator[Caveat]:
    """V_TOO_SMALL, and LAMBDA0_LARGE of Theorem 2: `lambda_0 <= -delta_2 gamma_0 / (2 (L^2 + kappa^2 + D^2))`."""
    if (1 + 2 * spec.u) / 3 >= spec.v:
        text = f"v too small for Theorem 2/4, got v={spec.v} against (1 + 2u)/3 = {(1 + 2 * spec.u) / 3:.6g}"
        yield Caveat("V_TOO_SMALL", text)
    smoothness = known.smoothness + known.ridge
    deviation = known.change / math.sqrt(2) if kappa is None else kappa
    slope = _gradient_bound(known) if gradient_bound is None else gradient_bound
    squares = smoothness * smoothness + deviation * deviation + slope * slope
    excess = 2 * squares * spec.lam0 / (-topology.delta_2 * spec.gam0)
    if excess > 1:
        yield _late(2, _transient(spec, topology, excess, (3 * spec.v - 2 * spec.u - 1) / 2))


def _gradient_bound(known: Regularity) -> float:
    """D: what is known of it. Without a ridge, an unbounded decision set does no harm."""
    return known.clip_norm + (known.ridge * known.diameter if known.ridge else 0.0)


def _transient(spec: Parameters, topology: Couplings, excess: float, gap: float) -> float:
    """t0, the round after which the step sizes are small enough: the theorems' large-time versions (Theorems 3, 4)."""
    coupling = -3 * topology.delta_m * spec.gam0
    return max(0.0, _root(coupling, spec.u) - 1, _root(excess, gap) - 1)


def _root(base: float, degree: float) -> float:
    """`base^(1/degree)`, infinite beyond floats, and where the step sizes never get small (degree <= 0)."""
    if degree <= 0:
        return math.inf
    try:
        return float(base ** (1 / degree))
    except OverflowError:
        return math.inf


def _late(theorem: int, t0: float) -> Caveat:
    shown = f"{math.ceil(t0)}" if t0 < 1e6 else f"{t0:.0e}"
    text = f"lam0 above the Theorem {theorem} limit; guarantee starts after round t0 = {shown}"
    return Caveat("LAMBDA0_LARGE", text)
