"""Validity checks of LDP-DOL: every code exactly on its condition, with its text."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from sottovoce_core.algorithms.ldp_dol.accounting import SharedSchedules
from sottovoce_core.algorithms.ldp_dol.parameters import LdpDolSpec, _check_ldp_dol, _large_statistics
from sottovoce_core.algorithms.run_context import RunWarning
from sottovoce_core.errors import AssumptionViolated
from sottovoce_core.losses import Loss
from sottovoce_core.losses.linear import LeastSquaresLoss, LogisticLoss, PassGlmLoss, RidgeLoss
from sottovoce_core.privacy.guarantee import Regularity
from sottovoce_core.runs.run import build_run
from tests.examples import small_spec

UP, DOWN = math.inf, -math.inf


@dataclass(frozen=True)
class Web:
    """A topology, as far as the checks look."""

    delta_2: float = -0.4
    delta_m: float = -1.0
    own_weights: tuple[float, ...] = (0.6, 0.5, 0.4)

    @property
    def n_learners(self) -> int:
        return len(self.own_weights)

    def own_weight(self, learner: int) -> float:
        return self.own_weights[learner]


LOGISTIC = Regularity(2.0, 0.25, 1.0, 0.0, 10.0, is_convex=True, is_convex_when_clipped=True)
QUIET = LdpDolSpec(name="ldp-dol", lam0=1e-4, v=0.9, gam0=0.25, u=0.7, accounting="best")


def check(known: Regularity = LOGISTIC, topology: Web | None = None, **changes: Any) -> tuple[RunWarning, ...]:
    """Run the checks on parameters that satisfy all of them, but for `changes`."""
    arguments: dict[str, Any] = {
        "sigma": (1.0, 2.0, 3.0),
        "varsigma": (0.1, 0.15, 0.1),
        "strong_convexity": 0.5,
        "topology": topology or Web(),
    }
    spec = QUIET.model_copy(update={key: value for key, value in changes.items() if key not in _OF_CALL})
    arguments |= {key: value for key, value in changes.items() if key in _OF_CALL}
    schedules = SharedSchedules(spec.lam0, spec.v, spec.gam0, spec.u)
    return _check_ldp_dol(schedules, spec.accounting, regularity=known, **arguments)


_OF_CALL = {"sigma", "varsigma", "strong_convexity"}


def refusal(known: Regularity = LOGISTIC, **changes: Any) -> AssumptionViolated:
    with pytest.raises(AssumptionViolated) as failure:
        check(known, **changes)
    return failure.value


def codes(*args: Any, **changes: Any) -> list[str]:
    return [finding.code for finding in check(*args, **changes)]


def above(value: float) -> float:
    return math.nextafter(value, UP)


def below(value: float) -> float:
    return math.nextafter(value, DOWN)


def test_quiet_parameters_have_no_findings() -> None:
    assert check() == ()


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize(("field", "code"), [("lam0", "LAMBDA0"), ("gam0", "GAMMA0")])
def test_step_sizes_must_be_positive(field: str, code: str, value: float) -> None:
    changes: dict[str, Any] = {field: value}
    failure = refusal(**changes)
    assert failure.code == code
    assert failure.text == f"lam0 and gam0 must be positive and finite, got {field}={value}"


@pytest.mark.parametrize("value", [0.5, 1.0, 0.3, math.nan])
@pytest.mark.parametrize("field", ["u", "v"])
def test_exponents_must_lie_inside(field: str, value: float) -> None:
    changes: dict[str, Any] = {field: value}
    failure = refusal(**changes)
    assert failure.code == "EXPONENT_RANGE"
    assert failure.text.startswith("u and v must lie strictly between 0.5 and 1, got ")
    assert f"{field}={value}" in failure.text


def test_exponents_just_inside_pass() -> None:
    assert isinstance(check(u=above(0.5), v=below(1.0)), tuple)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_sigma_must_be_positive_for_every_learner(value: float) -> None:
    failure = refusal(sigma=(1.0, 1.0, value))
    assert (failure.code, failure.text) == ("SIGMA", f"sigma must be positive and finite, got {value}")


@pytest.mark.parametrize("value", [0.5, -0.01, math.nan])
def test_varsigma_must_lie_in_range_for_every_learner(value: float) -> None:
    failure = refusal(varsigma=(0.1, value, 0.1))
    assert (failure.code, failure.text) == ("VARSIGMA_RANGE", f"varsigma must lie in [0, 0.5), got {value}")


def test_varsigma_range_ends() -> None:
    assert codes(varsigma=(0.0, 0.0, 0.0)) == []
    assert codes(varsigma=(0.0, below(0.5), 0.0)) == ["NOISE_GROWTH"]


@pytest.mark.parametrize("change", [0.0, math.inf])
def test_a_budget_needs_a_gradient_change(change: float) -> None:
    constants = replace(LOGISTIC, gradient_change=change, clip_norm=math.inf)
    failure = refusal(constants)
    assert failure.code == "GRAD_CHANGE"
    assert failure.text == (
        "a privacy budget needs a finite bound on the per-record gradient change: "
        f"bound the features, or set clip_norm, got {change}"
    )


def test_clipping_bounds_the_gradient_change() -> None:
    assert check(replace(LOGISTIC, gradient_change=math.inf, clip_norm=1.0)) == ()


@pytest.mark.parametrize("mode", ["loose", "smooth", "convex", "clip", "best"])
def test_unknown_smoothness_is_refused_by_the_modes_that_need_it(mode: str) -> None:
    rough = replace(LOGISTIC, smoothness=math.inf)
    if mode not in ("smooth", "convex"):
        assert codes(rough, accounting=mode) == ["LAMBDA0_LARGE"]
        return
    failure = refusal(rough, accounting=mode)
    assert failure.code == "SMOOTHNESS"
    assert failure.text.startswith('this accounting mode needs a known smoothness constant; use mode "clip", got ')


def test_best_without_smoothness_or_clipping_needs_a_gradient_change() -> None:
    wild = replace(LOGISTIC, smoothness=math.inf, clip_norm=math.inf, gradient_change=math.inf)
    assert refusal(wild).code == "GRAD_CHANGE"
    assert codes(replace(wild, gradient_change=2.0)) == ["LAMBDA0_LARGE"]


@pytest.mark.parametrize("mode", ["loose", "smooth", "convex", "clip", "best"])
@pytest.mark.parametrize(("margin", "clip"), [(True, 1.0), (False, math.inf), (False, 1.0)])
def test_convex_mode_of_clipped_gradients_needs_a_margin_loss(mode: str, margin: bool, clip: float) -> None:
    constants = replace(LOGISTIC, is_convex_when_clipped=margin, clip_norm=clip)
    if mode != "convex" or margin or clip == math.inf:
        assert check(constants, accounting=mode) == ()
        return
    failure = refusal(constants, accounting=mode)
    assert failure.code == "CONVEX_CLIPPED"
    assert failure.text.startswith(
        "clipped gradients of this loss are not gradients of a convex function; "
        'mode "convex" does not apply, got clip_norm='
    )


def test_convex_mode_needs_a_convex_loss() -> None:
    bent = replace(LOGISTIC, is_convex=False)
    assert refusal(bent, accounting="convex").code == "NOT_CONVEX"
    assert check(bent, accounting="best") == ()


# ---- reported --------------------------------------------------------------------------------------------------------


def found(code: str, *args: Any, **changes: Any) -> str | None:
    """The text of a finding, if it is there; it must be there once at most."""
    texts = [finding.text for finding in check(*args, **changes) if finding.code == code]
    assert len(texts) <= 1
    return texts[0] if texts else None


def test_u_not_below_v() -> None:
    assert found("U_NOT_BELOW_V", u=0.7, v=above(0.7)) is None
    text = found("U_NOT_BELOW_V", u=0.7, v=0.7)
    assert text == "u >= v: learners do not reach agreement, got u=0.7, v=0.7"


def test_noise_growth() -> None:
    assert found("NOISE_GROWTH", u=0.75, varsigma=(0.1, 0.2499, 0.2)) is None
    text = found("NOISE_GROWTH", u=0.75, varsigma=(0.1, 0.25, 0.2))
    assert text is not None
    assert text.startswith("noise grows too fast for Theorems 1-4 (max varsigma + 0.5 must be below u), got 0.25")


def test_gamma0_large() -> None:
    web = Web(delta_m=-1.0)
    assert found("GAMMA0_LARGE", topology=web, gam0=0.3333) is None
    text = found("GAMMA0_LARGE", topology=web, gam0=0.3334)
    assert text == "gam0 exceeds 1/(3 |delta_m|): only the large-time theorems apply, got gam0=0.3334, delta_m=-1"


def test_coupling_overshoot() -> None:
    web = Web(own_weights=(0.25, 0.5, 0.25))
    assert found("COUPLING_OVERSHOOT", topology=web, gam0=2.0) is None
    text = found("COUPLING_OVERSHOOT", topology=web, gam0=2.5)
    assert text == "gam0*|w_ii| > 1: first rounds overshoot; accounting uses |1 - |w_ii| gamma_t|, got 1.25"


@pytest.mark.parametrize(
    ("loss", "dim", "told"),
    [
        (RidgeLoss(), 5_791, ""),
        (RidgeLoss(), 5_792, "5793 x 5793 numbers: 0.25 GiB, and up to four times that"),
        (RidgeLoss(clip_norm=1.0), 5_792, ""),
        (LeastSquaresLoss(), 20_000, "20001 x 20001 numbers: 3 GiB"),
        (PassGlmLoss(score_bound=3.0), 5_792, "history: exact"),
        (LogisticLoss(), 20_000, ""),
    ],
)
def test__large_statistics(loss: Loss, dim: int, told: str) -> None:
    found = list(_large_statistics(loss, dim))
    assert [each.code for each in found] == ["STATISTICS"] * bool(told)
    assert all(told in each.text for each in found)


def test_a_run_tells_of__large_statistics() -> None:
    spec = small_spec(5, 2, algorithm={"name": "ldp-dol"}, loss={"kind": "ridge"})
    codes = [[each.code for each in build_run(spec, dim).warnings] for dim in (100, 10_000)]
    assert ["STATISTICS" in each for each in codes] == [False, True]


def test_lambda0_large_strongly_convex() -> None:
    """L = 0.25 + 0.25 with the ridge, mu = 0.5: limit 0.25 * 0.4 * 0.5 / (0.25 + 8 * 0.25) = 0.05 / 2.25."""
    constants = replace(LOGISTIC, ridge=0.25)
    limit = 0.05 / 2.25
    assert codes(constants, lam0=0.999 * limit) == []
    text = found("LAMBDA0_LARGE", constants, lam0=1.5 * limit)  # 1.5^(1/0.2) - 1 = 6.59
    assert text == "lam0 is above the limit of Theorem 1: its convergence bound holds only after round t0 = 7"


def test_transient_covers_the_coupling() -> None:
    """(3 * 1 * 2)^(1/0.7) - 1 = 11.93 outweighs the step size: with gam0 = 2 the limit is 0.4 / 2.25."""
    constants = replace(LOGISTIC, ridge=0.25)
    text = found("LAMBDA0_LARGE", constants, gam0=2.0, lam0=1.2 * 0.4 / 2.25)
    assert text == "lam0 is above the limit of Theorem 1: its convergence bound holds only after round t0 = 12"


@pytest.mark.parametrize(
    ("changes", "shown"),
    [({"lam0": 22.3}, "1e+15"), ({"lam0": 1.0, "v": 0.7001}, "inf"), ({"lam0": 1.0, "v": 0.7}, "inf")],
)
def test_astronomic_transients(changes: dict[str, float], shown: str) -> None:
    constants = replace(LOGISTIC, ridge=0.25)
    text = found("LAMBDA0_LARGE", constants, **changes)
    assert text == f"lam0 is above the limit of Theorem 1: its convergence bound holds only after round t0 = {shown}"


def test_v_too_small_of_convex_losses() -> None:
    limit = (1 + 2 * 0.7) / 3
    assert found("V_TOO_SMALL", strong_convexity=0.0, v=0.8001) is None
    text = found("V_TOO_SMALL", strong_convexity=0.0, v=below(limit))
    assert text is not None and text.startswith("v too small for Theorem 2/4, got v=")
    assert found("V_TOO_SMALL", strong_convexity=0.0, v=limit) is not None
    assert found("V_TOO_SMALL", strong_convexity=0.5, v=0.75) is None


def test_lambda0_large_convex() -> None:
    """L = 0.5, kappa = 0.5, D = 1: limit 0.4 * 0.25 / (2 * 1.5) = 1/30."""
    constants = replace(LOGISTIC, smoothness=0.5, gradient_change=math.sqrt(0.5))
    known = {"strong_convexity": 0.0}
    assert codes(constants, lam0=0.999 / 30, **known) == []
    text = found("LAMBDA0_LARGE", constants, lam0=1.2 / 30, **known)  # 1.2^(2 / 0.3) - 1 = 2.37
    assert text == "lam0 is above the limit of Theorem 2: its convergence bound holds only after round t0 = 3"
    late = found("LAMBDA0_LARGE", constants, lam0=1.2 / 30, v=0.75, **known)  # v too small: never
    assert late is not None and late.endswith("t0 = inf")


def test_lambda0_large_convex_defaults() -> None:
    """kappa^2 = C^2/2 = 2 and D = G + r * diameter = 1 + 1, L = 0.35: limit 0.1 / (2 * 6.1225)."""
    constants = replace(LOGISTIC, ridge=0.1)
    limit = 0.1 / (2 * (0.35**2 + 2 + 4))
    assert codes(constants, strong_convexity=0.0, lam0=0.999 * limit) == []
    assert codes(constants, strong_convexity=0.0, lam0=1.001 * limit) == ["LAMBDA0_LARGE"]


def test_an_unbounded_set_without_ridge_leaves_d_finite() -> None:
    assert codes(replace(LOGISTIC, diameter=math.inf), strong_convexity=0.0) == []
    assert codes(replace(LOGISTIC, clip_norm=math.inf), strong_convexity=0.0) == ["LAMBDA0_LARGE"]


def test_convergence_of_non_convex_losses_is_nobodys_claim() -> None:
    assert check(replace(LOGISTIC, is_convex=False), strong_convexity=0.0, lam0=5.0, v=0.75) == ()


def test_one_learner_alone_is_quiet() -> None:
    alone = Web(delta_2=-math.inf, delta_m=0.0, own_weights=(0.0,))
    assert check(topology=alone, gam0=50.0, lam0=5.0) == ()
    assert check(topology=alone, gam0=50.0, lam0=5.0, strong_convexity=0.0) == ()


def test_the_experiments_of_the_paper_break_what_the_errata_say() -> None:
    """Mushrooms: max varsigma + 1/2 = u, gam0 = 1 > 0.307, lam0 far above the limit; no refusal."""
    ring = Web(delta_2=-0.4146, delta_m=-1.0854, own_weights=(0.6,) * 5)
    varsigma = tuple(0.1 + 0.01 * i for i in range(1, 6))
    mushrooms = {"lam0": 1.0, "v": 0.77, "gam0": 1.0, "u": 0.65, "varsigma": varsigma, "strong_convexity": 0.01}
    findings = codes(replace(LOGISTIC, ridge=0.01), topology=ring, **mushrooms)
    assert findings == ["NOISE_GROWTH", "GAMMA0_LARGE", "LAMBDA0_LARGE"]
