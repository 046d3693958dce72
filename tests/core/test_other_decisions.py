"""Metrics of decisions in messages and of assembled decisions, and the privacy loss, against their definitions written out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize

from sottovoce_core.arrays import FloatArray
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.errors import SpecError
from sottovoce_core.noise import SeededNoise
from sottovoce_core.runs.curves import Curves
from sottovoce_core.runs.metrics import Metrics
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.runs.simulator import SimulatedRound, simulate_rounds
from sottovoce_core.spec import parse_spec
from tests.examples import made_up, small_run

RIDGE = 0.05
ROUNDS, LEARNERS, REPLICAS = 8, 3, 2
RELEASING: list[dict[str, Any]] = [
    {"name": "admm"},
    {"name": "dvp", "alpha": 0.8},
    {"name": "pvp", "alpha": 0.8},
    {"name": "ldp-dol"},
    {"name": "pd-ogd"},
    {"name": "dsgd"},
    {"name": "dpsr"},
]
BOX = {"kind": "box", "low": -5.0, "high": 5.0}
BLOCKS = ["dpsda-c", "dpsda-ps"]


def a_run(algorithm: dict[str, Any], **sections: Any) -> Run:
    weights = {"weights": "out_degree"} if algorithm["name"] in ("dpsda-ps", "dpps") else {}
    document = {
        "rounds": ROUNDS,
        "learners": LEARNERS,
        "algorithm": algorithm,
        "topology": {"graph": "complete", **weights},
        "loss": {"kind": "logistic", "ridge": RIDGE, "feature_bound": 1.0},
        **sections,
    }
    return build_run(parse_spec(document, allow_imports=False), 4)


def measured(run: Run, data: PlacedData, *metrics: str, **options: Any) -> tuple[Curves, list[SimulatedRound]]:
    steps = list(simulate_rounds(run, data, SeededNoise(3), REPLICAS))
    curves = Metrics(run, data, metrics=metrics, **options)
    for step in steps:
        curves.add_round(step)
    return curves.curves, steps


def shared(data: PlacedData) -> PlacedData:
    return PlacedData((data.learners[0],) * LEARNERS, data.test_features, data.test_labels)


def learned(own: LearnerData, first: int, last: int) -> tuple[FloatArray, FloatArray]:
    rows = own.order[own.offsets[first] : own.offsets[last + 1]]
    x = own.features[rows]
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1.0), own.labels[rows]


def log_losses(theta: FloatArray, x: FloatArray, y: FloatArray) -> FloatArray:
    return np.logaddexp(0.0, x @ theta) - y * (x @ theta)


def wrong_share(theta: FloatArray, data: PlacedData) -> float:
    return float(np.mean((data.test_features @ theta > 0) != (data.test_labels > 0)))


# ---- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", RELEASING, ids=lambda each: each["name"])
def test_released_metrics_are_those_of_the_messages(algorithm: dict[str, Any]) -> None:
    run = a_run(algorithm)
    data = made_up(run.spec, 4, batch=2, records=5)
    curves, steps = measured(run, data, "released_loss", "released_error", "empirical_loss", checkpoints=[3, ROUNDS])
    for k, rounds in enumerate((3, ROUNDS)):
        step = steps[rounds - 1]
        for name, thetas in (("released_loss", step.message["y"]), ("empirical_loss", step.decisions_before)):
            wanted = [
                [log_losses(theta, *learned(own, 0, step.t)).mean() for theta in each]
                for each, own in zip(thetas, data.learners, strict=True)
            ]
            np.testing.assert_allclose(curves[name].replicas[k], np.mean(wanted, axis=0))
            learners = curves[name].learners
            assert learners is not None
            np.testing.assert_allclose(learners[k], np.mean(wanted, axis=1))
        errors = [[wrong_share(theta, data) for theta in each] for each in step.message["y"]]
        np.testing.assert_allclose(curves["released_error"].replicas[k], np.mean(errors, axis=0))


def test_a_learner_without_records_has_no_empirical_loss_and_is_left_out() -> None:
    run = small_run(3, 2)
    own = LearnerData(np.ones((1, 3)), np.ones(1), np.zeros(1, np.int64), np.array([0, 0, 1, 1]))
    none = LearnerData(np.ones((1, 3)), np.ones(1), np.zeros(0, np.int64), np.zeros(4, np.int64))
    data = PlacedData((own, none), np.ones((2, 3)), np.ones(2))
    curves, steps = measured(run, data, "empirical_loss")
    each = curves["empirical_loss"].learners
    assert each is not None
    assert np.isnan(each[:, 1]).all()
    assert np.isnan(curves["empirical_loss"].mean).tolist() == [True, False, False]
    theta, x = steps[1].decisions_before[0], np.ones((1, 3)) / math.sqrt(3.0)
    np.testing.assert_allclose(each[1, 0], np.mean([log_losses(one, x, np.ones(1)) for one in theta]))


def test_an_offline_learner_releases_nothing() -> None:
    run = small_run(
        6, ["a", "b", "c"], topology={"graph": "complete"}, offline_intervals=[{"learner": "c", "first_round": 3}]
    )
    curves, _ = measured(run, made_up(run.spec), "released_loss", checkpoints=[3, 6])
    each = curves["released_loss"].learners
    assert each is not None
    assert np.isnan(each).tolist() == [[False, False, False], [False, False, True]]
    np.testing.assert_allclose(curves["released_loss"].mean[1], each[1, :2].mean())


@pytest.mark.parametrize("name", [*BLOCKS, "dpps", "pd-ftgl", "d-ftgl"])
def test_messages_that_are_no_decisions_have_no_loss(name: str) -> None:
    run = a_run({"name": name, **({"epsilon": 1.0} if name == "pd-ftgl" else {})}, rounds=60)
    with pytest.raises(SpecError, match=rf"got released_loss: released metrics need .*those of {name} are not"):
        Metrics(run, made_up(run.spec, 4), metrics=["average_loss", "released_loss"])


# ---- assembled decisions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BLOCKS)
def test_assembled_metrics_are_those_of_each_learners_own_block(name: str) -> None:
    """The four coordinates belong to the learners 0, 0, 1, 2; all learners hold the same two records a round."""
    run = a_run({"name": name, "sigma": 0.5}, decision_set=BOX)
    data = shared(made_up(run.spec, 4, batch=2))
    names = ["loss", "regret", "mean_regret", "accuracy", "balanced_accuracy", "prequential_accuracy"]
    curves, steps = measured(run, data, *(f"assembled_{each}" for each in names))

    for r in range(REPLICAS):
        own = [step.decisions_before[:, r] for step in steps]
        played = [np.array([*each[0, :2], each[1, 2], each[2, 3]]) for each in own]
        batches = [learned(data.learners[0], t, t) for t in range(ROUNDS)]

        def cost(theta: FloatArray, t: int, batches: list[Any] = batches) -> float:
            return float(log_losses(theta, *batches[t]).mean() + RIDGE / 2 * theta @ theta)

        def total(theta: FloatArray) -> float:
            return sum(cost(theta, t) for t in range(ROUNDS))

        least = minimize(total, np.zeros(4), bounds=[(-5.0, 5.0)] * 4).fun
        average = [np.mean(played[: t + 1], axis=0) for t in range(ROUNDS)]
        hits = [(batches[t][0] @ played[t] > 0) == batches[t][1] for t in range(ROUNDS)]
        right = (data.test_features @ played[-1] > 0) == (data.test_labels > 0)
        wanted = {
            "loss": np.mean([cost(played[t], t) for t in range(ROUNDS)]),
            "regret": (sum(cost(played[t], t) for t in range(ROUNDS)) - least) / ROUNDS,
            "mean_regret": (sum(cost(average[t], t) for t in range(ROUNDS)) - least) / ROUNDS,
            "accuracy": right.mean(),
            "balanced_accuracy": np.mean([right[data.test_labels == each].mean() for each in (0.0, 1.0)]),
            "prequential_accuracy": np.mean(hits),
        }
        for each, value in wanted.items():
            curve = curves[f"assembled_{each}"]
            assert curve.replicas[-1, r] == pytest.approx(value, abs=1e-6), each
            assert curve.learners is None


def test_an_assembled_decision_needs_a_block_for_each_learner() -> None:
    for name in ("dpps", "ldp-dol"):
        run = a_run({"name": name})
        with pytest.raises(SpecError, match=rf"got assembled_loss: assembled metrics need .* {name} does not have"):
            Metrics(run, made_up(run.spec, 4), metrics=["assembled_loss"])


def test_average_regret_is_static_regret_over_the_rounds_with_records() -> None:
    run = small_run(6, 3)
    curves, _ = measured(run, made_up(run.spec), "static_regret", "average_regret")
    np.testing.assert_allclose(
        curves["average_regret"].replicas * 3 * curves.rounds[:, None], curves["static_regret"].replicas
    )


# ---- privacy loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ldp-dol", "dpsda-c"])
def test_the_privacy_loss_is_the_epsilon_after_so_many_messages(name: str) -> None:
    run = a_run({"name": name, "sigma": [1.0, 2.0, 4.0] if name == "ldp-dol" else 1.0})
    data = shared(made_up(run.spec, 4))
    curve = measured(run, data, "privacy_loss", checkpoints=[1, 4, ROUNDS])[0]["privacy_loss"]
    counts = np.ones(ROUNDS, dtype=np.int64)
    each = np.array([[run.guarantee(i, counts).epsilon(rounds) for i in range(LEARNERS)] for rounds in (1, 4, ROUNDS)])
    assert curve.learners is not None
    np.testing.assert_allclose(curve.learners, each)
    network = each.sum(axis=1) if name == "dpsda-c" else each.max(axis=1)
    np.testing.assert_allclose(curve.replicas, np.stack([network] * REPLICAS, axis=1))
    assert 0.0 < curve.mean[1] <= curve.mean[2]


def test_without_noise_the_privacy_loss_is_infinite() -> None:
    run = a_run({"name": "admm"})
    curve = measured(run, made_up(run.spec, 4), "privacy_loss")[0]["privacy_loss"]
    assert math.isinf(curve.final_mean)
    assert math.isnan(curve.final_error)
