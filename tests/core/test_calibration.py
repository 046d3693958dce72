"""The noise that meets a budget: targets met from below, and what cannot be met refused with the reason."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sottovoce.algorithms import ALGORITHMS
from sottovoce.algorithms.parameters import AlgorithmSpec
from sottovoce.algorithms.per_learner import divided, times
from sottovoce.budget.calibration import TOLERANCE, Budget, Calibrated, calibrate, epsilons
from sottovoce.data import PlacedData
from sottovoce.errors import CheckFailed, SpecError
from sottovoce.running.run import build_run
from sottovoce.spec import RunSpec, parse_spec
from tests.examples import made_up

ROUNDS, LEARNERS, FEATURES = 16, 3, 3
NOISY: dict[str, dict[str, Any]] = {
    "ldp-dol": {"sigma": [1.0, 2.0, 3.0]},
    "dsgd": {},
    "dola": {},
    "dpdola": {},
    "pdop": {},
    "pd-ogd": {},
    "dpsr": {},
    "dpsda-c": {"sigma": 1.0, "clip": 1.0},
    "dpsda-ps": {"epsilon": 10.0, "clip": 1.0},
    "dpps": {"clip": 1.0},
    "dpcda": {"sigma": 1.0, "clip": 1.0},
    "pd-ftgl": {"noise_scale": 1.0, "block_length": 4},
    "pd-ocg": {"epsilon": 5.0, "block_length": 4},
    "dvp": {"alpha": 0.5},
    "pvp": {"alpha": [0.5, 0.6, 0.7], "final_alpha": 0.2},
}
SILENT = ("admm", "d-ogd", "d-ftgl")


def spec_of(name: str, /, **parameters: Any) -> RunSpec:
    sections: dict[str, Any] = {key: parameters.pop(key) for key in ("loss", "data") if key in parameters}
    weights = {"dpsr": "in_degree", "dpps": "out_degree", "dpsda-ps": "out_degree"}.get(name, "metropolis")
    return parse_spec(
        {
            "rounds": ROUNDS,
            "learners": 1 if name == "dpcda" else LEARNERS,
            "algorithm": {"name": name, **NOISY.get(name, {}), **parameters},
            "topology": {"graph": "ring", "weights": weights},
            **sections,
        }
    )


def records(spec: RunSpec, **more: Any) -> PlacedData:
    return made_up(spec, FEATURES, **more)


def calibrated(spec: RunSpec, *targets: float, **more: Any) -> Calibrated:
    epsilon = targets if len(targets) == spec.n_learners else targets * spec.n_learners
    return calibrate(spec, records(spec), Budget(epsilon, **more))


def test_every_built_in_algorithm_is_either_noisy_or_silent() -> None:
    assert {*NOISY, *SILENT} == set(ALGORITHMS.built_in)


# ---- targets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NOISY)
@pytest.mark.parametrize("target", [0.4, 30.0])
def test_the_target_is_met_from_below(name: str, target: float) -> None:
    spec = spec_of(name)
    found = calibrated(spec, target)
    spent = epsilons(build_run(found.spec, FEATURES), records(spec))
    assert spent == pytest.approx(found.epsilons)
    assert max(spent) <= target
    nearest = max if spec.algorithm.one_noise else min
    assert nearest(spent) >= target * (1 - TOLERANCE)
    kept = found.spec.model_copy(update={"algorithm": spec.algorithm})
    assert kept == spec
    assert parse_spec(found.spec.model_dump(mode="json")) == found.spec


def test_learners_may_have_targets_of_their_own() -> None:
    targets = (0.5, 2.0, 7.0)
    for name in ("ldp-dol", "dsgd", "pvp"):
        found = calibrated(spec_of(name), *targets)
        for spent, target in zip(found.epsilons, targets, strict=True):
            assert target * (1 - TOLERANCE) <= spent <= target


def test_with_one_noise_for_all_nobody_exceeds_its_target() -> None:
    found = calibrated(spec_of("dpps"), 5.0, 1.0, 5.0)
    assert len(set(found.factors)) == 1
    ratios = [spent / target for spent, target in zip(found.epsilons, (5.0, 1.0, 5.0), strict=True)]
    assert 1 - TOLERANCE <= max(ratios) <= 1


def test_a_record_in_all_of_its_uses_needs_more_noise() -> None:
    spec = spec_of("ldp-dol")
    data = records(spec, records=4)
    event, record = (calibrate(spec, data, Budget((1.0,) * LEARNERS, per=per)) for per in ("event", "record"))
    assert all(more > less for more, less in zip(record.factors, event.factors, strict=True))
    spent = epsilons(build_run(record.spec, FEATURES), data, per="record")
    assert max(spent) <= 1.0
    assert min(spent) >= 1 - TOLERANCE


@pytest.mark.parametrize("per", ["event", "record"])
def test_horizons(per: Any) -> None:
    spec = spec_of("ldp-dol")
    data = records(spec, records=4)
    found = calibrate(spec, data, Budget((1.0,) * LEARNERS, horizon=5, per=per))
    run = build_run(found.spec, FEATURES)
    assert max(epsilons(run, data, 5, per)) <= 1.0 < min(epsilons(run, data, None, per))


def test_for_ever() -> None:
    found = calibrated(spec_of("ldp-dol"), 3.0, horizon=math.inf)
    for i in range(LEARNERS):
        bound = build_run(found.spec, FEATURES).algorithm.guarantee(i).infinite_horizon
        assert 3.0 * (1 - TOLERANCE) <= bound <= 3.0


def test_learners_that_share_records_share_the_budget() -> None:
    spec = spec_of("dpsda-c", data={"partition": "shared"})
    found = calibrated(spec, 2.0)
    alone = epsilons(build_run(found.spec, FEATURES), records(spec))
    assert 2.0 * (1 - TOLERANCE) <= math.fsum(alone) <= 2.0
    with pytest.raises(SpecError, match="give one epsilon"):
        calibrated(spec, 1.0, 2.0, 3.0)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SILENT)
def test_without_noise_there_is_nothing_to_scale(name: str) -> None:
    with pytest.raises(SpecError, match="has no noise; take"):
        calibrated(spec_of(name), 1.0)


def test_an_algorithm_that_does_not_say_how_cannot_be_calibrated() -> None:
    with pytest.raises(SpecError, match="this algorithm's noise cannot be calibrated"):
        AlgorithmSpec(name="mine").noisier((2.0,))


@pytest.mark.parametrize(
    ("spec", "budget", "reason"),
    [
        (spec_of("dsgd", noise={"kind": "none"}), {}, "noise.kind must be power"),
        (spec_of("dola", noise={"kind": "power", "sigma": 0.0}), {}, "message of round 1 carries no noise"),
        (spec_of("dpps", sigma=0.0), {}, "sigma must be above 0"),
        (spec_of("pd-ftgl", noise_scale=0.0), {}, "noise_scale must be above 0"),
        (spec_of("pd-ftgl", noise_placement="after_gossip"), {}, "only published decisions are protected"),
        (spec_of("dsgd"), {"horizon": math.inf}, "no finite bound over infinitely many rounds"),
        (spec_of("ldp-dol", u=0.77, v=0.77), {"horizon": math.inf}, "no finite bound over infinitely many rounds"),
        (
            spec_of("ldp-dol"),
            {"horizon": 17},
            "at most the run's 16 rounds, or inf, got 17; for a longer one raise rounds",
        ),
        (spec_of("ldp-dol"), {"horizon": 0}, "at least 1"),
        (spec_of("ldp-dol"), {"horizon": 1}, "is 0 whatever its noise"),
        (spec_of("ldp-dol"), {"epsilons": (0.0,) * 3}, "above 0 and finite, got 0"),
        (spec_of("ldp-dol"), {"epsilons": (math.inf,) * 3}, "above 0 and finite, got inf"),
        (spec_of("ldp-dol"), {"epsilons": (1e-12,) * 3}, r"epsilon of learner-0 must be above .*lattice.*; got 1e-12"),
        (spec_of("dvp"), {"epsilons": (1e-11,) * 3}, "must be above .* a solver's tolerance"),
    ],
)
def test_what_cannot_be_met_says_why(spec: RunSpec, budget: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        calibrate(spec, records(spec), Budget(**{"epsilons": (1.0,) * LEARNERS, **budget}))


def test_missing_clipping_is_named() -> None:
    with pytest.raises(CheckFailed, match="clip"):
        calibrated(spec_of("dola", loss={"kind": "least_squares"}), 1.0)


# ---- factors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NOISY)
def test_twice_the_noise_is_twice_the_scale(name: str) -> None:
    """For what is calibrated by epsilon, up to what the lattice costs; DVP's own noise is not proportional."""
    spec = spec_of(name)
    louder = spec.model_copy(update={"algorithm": spec.algorithm.noisier((2.0,) * spec.n_learners)})
    before, after = (build_run(each, FEATURES).algorithm for each in (spec, louder))
    t = 12
    if name != "dvp":
        assert after.noise_scale(0, t) == pytest.approx(2 * before.noise_scale(0, t), rel=1e-9)
    assert after.guarantee(0).epsilon() == pytest.approx(before.guarantee(0).epsilon() / 2, rel=1e-2)
    assert ALGORITHMS.find(name).model_validate(louder.algorithm.model_dump()) == louder.algorithm


def test_times() -> None:
    assert times(3.0, (2.0, 2.0)) == 6.0
    assert times(3.0, (1.0, 2.0)) == (3.0, 6.0)
    assert times((1.0, 2.0), (2.0, 1.0)) == 2.0
    assert divided(3.0, (2.0, 4.0)) == (1.5, 0.75)
    with pytest.raises(SpecError, match=r"one number per learner \(2\), got 3"):
        times((1.0, 2.0, 3.0), (1.0, 1.0))
