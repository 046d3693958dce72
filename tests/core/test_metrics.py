"""Metrics of simulated runs: against scikit-learn, against their definitions written out, and where answers are known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from scipy import optimize
from sklearn.linear_model import LogisticRegression, Ridge

from sottovoce_core.algorithms.interface import Message
from sottovoce_core.arrays import FloatArray
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.decision_sets import L2Ball
from sottovoce_core.errors import SpecError
from sottovoce_core.losses import Loss
from sottovoce_core.losses.linear import LogisticLoss
from sottovoce_core.noise import RecordedNoise, Recorder, SeededNoise, no_noise
from sottovoce_core.runs import metrics, minimisers
from sottovoce_core.runs.curves import Curve, Curves
from sottovoce_core.runs.metrics import (
    DEFAULT_METRICS,
    METRICS,
    Metrics,
    _spread_checkpoints,
    list_metrics,
)
from sottovoce_core.runs.minimisers import Objective
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.simulator import SimulatedRound, simulate_rounds
from tests.examples import made_up, small_run, small_spec

minimize: Any = optimize.minimize

SETS: list[dict[str, Any]] = [
    {"kind": "l2_ball", "radius": 0.3},
    {"kind": "l2_ball", "radius": 50.0},
    {"kind": "box", "low": -0.05, "high": 0.2},
    {"kind": "l1_ball", "radius": 0.3},
    {"kind": "simplex"},
]
LOSSES: list[dict[str, Any]] = [
    {"kind": "logistic", "ridge": 0.02, "feature_bound": 10.0},
    {"kind": "ridge", "ridge": 0.02, "feature_bound": 10.0},
    {"kind": "logistic", "ridge": 0.02, "feature_bound": 10.0, "clip_norm": 0.1},
    {"kind": "softmax", "classes": 2, "ridge": 0.02, "feature_bound": 10.0},
]


def some_objective(loss: dict[str, Any], seed: int = 0, records: int = 60, dim: int = 4) -> Objective:
    """Separable by half: labels follow the first feature with noise."""
    generator = np.random.default_rng(seed)
    features = generator.normal(size=(records, dim))
    labels = (features[:, 0] + generator.normal(size=records) > 0).astype(np.float64)
    weights = generator.choice([0.5, 1.0, 2.0], size=records)
    return Objective(small_spec(loss=loss).loss, features, labels, weights, 0.7)


def measured(run: Run, data: PlacedData, noise: Any, replicas: int = 1, **options: Any) -> Curves:
    meter = Metrics(run, data, **options)
    for step in simulate_rounds(run, data, noise, replicas):
        meter.add_round(step)
    return meter.curves


# ---- minimisers ------------------------------------------------------------------------------------------------------


def test_the_minimiser_of_the_logistic_loss_is_scikit_learns() -> None:
    objective = some_objective(LOSSES[0])
    model = LogisticRegression(C=1 / 0.7, fit_intercept=False, tol=1e-12, max_iter=10_000)
    model.fit(objective.features, objective.labels, sample_weight=objective.weights)

    found = objective.minimiser(L2Ball(radius=1e5), np.zeros(4))
    np.testing.assert_allclose(found, model.coef_[0], atol=1e-6)


def test_the_minimiser_of_the_squared_loss_is_scikit_learns() -> None:
    objective = some_objective(LOSSES[1])
    model = Ridge(alpha=0.7 / 2, fit_intercept=False, tol=1e-12)
    model.fit(objective.features, objective.labels, sample_weight=objective.weights)

    found = objective.minimiser(L2Ball(radius=1e5), np.zeros(4))
    np.testing.assert_allclose(found, model.coef_, atol=1e-8)


@pytest.mark.parametrize("region", SETS, ids=lambda region: f"{region['kind']}")
@pytest.mark.parametrize("loss", LOSSES, ids=["logistic", "squared", "clipped", "softmax"])
def test_at_the_minimiser_no_direction_into_the_set_goes_down(loss: dict[str, Any], region: dict[str, Any]) -> None:
    """First-order optimality, by numerical derivatives and the set's own linear oracle. Clipping changes nothing."""
    objective = some_objective(loss)
    decision_set = small_spec(decision_set=region).decision_set
    dim = objective.loss.dim(4)
    found = objective.minimiser(decision_set, np.zeros(dim))

    steps = 1e-6 * np.eye(dim)
    slope = (objective.values(found + steps) - objective.values(found - steps)) / 2e-6
    np.testing.assert_allclose(decision_set.project(found), found, atol=1e-12)
    assert float(slope @ (found - decision_set.minimise(slope))) < 1e-5 * objective.weights.sum()


def test_a_loss_with_a_corner_is_minimised_nearly() -> None:
    objective = some_objective({"kind": "hinge", "feature_bound": 10.0})
    best = minimize(lambda x: float(objective.values(x[None])[0]), np.zeros(4), method="Powell", tol=1e-12)
    found = objective.minimiser(L2Ball(radius=100.0), np.zeros(4))
    assert objective.values(found[None])[0] <= best.fun * 1.001


class Bent(LogisticLoss):
    is_convex: ClassVar[bool] = False


def test_a_loss_that_is_not_convex_has_no_minimiser_and_no_regret() -> None:
    run = small_run(5)
    bent: Loss = Bent(feature_bound=1.0, ridge=0.01)
    with pytest.raises(SpecError, match="not convex"):
        replace(some_objective(LOSSES[0]), loss=bent).minimiser(L2Ball(radius=1.0), np.zeros(4))

    found = measured(
        replace(run, spec=run.spec.model_copy(update={"loss": bent})),
        made_up(run.spec),
        SeededNoise(1),
    )
    assert set(found.curves) == {"average_loss", "consensus_error", "accuracy", "balanced_accuracy"}


# ---- definitions, written out ----------------------------------------------------------------------------------------

RIDGE = 0.05


def ragged(rounds: int = 12, learners: int = 3, features: int = 3) -> PlacedData:
    """0 to 3 records in a round, some of them used twice; the first learner begins late."""
    generator = np.random.default_rng(5)
    everybody = []
    for i in range(learners):
        sizes = generator.integers(0, 4, rounds)
        sizes[: 2 if i == 0 else 0] = 0
        own = 9
        x = generator.normal(size=(own, features))
        y = (x[:, 0] > 0.2).astype(np.float64)
        order = generator.integers(0, own, sizes.sum())
        everybody.append(LearnerData(x, y, order, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)))
    test = generator.normal(size=(20, features))
    return PlacedData(tuple(everybody), test, (test[:, 0] > 0.2).astype(np.float64))


def record_loss(theta: FloatArray, x: FloatArray, y: FloatArray) -> float:
    """Mean cross-entropy of some records, rows scaled to norm 1, with the ridge."""
    if not len(y):
        return 0.0
    x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1.0)
    z = x @ theta
    return float(np.mean(np.logaddexp(0, z) - y * z) + RIDGE / 2 * theta @ theta)


def of_rounds(own: LearnerData, first: int, last: int) -> tuple[FloatArray, FloatArray]:
    rows = own.order[own.offsets[first] : own.offsets[last + 1]]
    return own.features[rows], own.labels[rows]


def least(function: Any) -> tuple[FloatArray, float]:
    found = minimize(function, np.zeros(3), method="BFGS", options={"gtol": 1e-9})
    return found.x, float(found.fun)


def test_losses_and_regrets_are_their_definitions() -> None:
    data = ragged()
    run = small_run(12, loss={"kind": "logistic", "ridge": RIDGE, "feature_bound": 1.0})
    steps = list(simulate_rounds(run, data, SeededNoise(3), 2))
    found = measured(run, data, SeededNoise(3), 2, checkpoints=(7, 12), metrics=[*DEFAULT_METRICS, "dynamic_regret"])

    def network(t: int, theta: FloatArray) -> float:
        return sum(record_loss(theta, *of_rounds(own, t, t)) for own in data.learners)

    for k, rounds in enumerate((7, 12)):
        T = rounds - 1

        def so_far(theta: FloatArray, T: int = T) -> float:
            return sum(record_loss(theta, *of_rounds(own, 0, T)) for own in data.learners) / 3

        cost = np.array(
            [
                [sum(network(t, steps[t].decisions_before[i, r]) for t in range(rounds)) for r in range(2)]
                for i in range(3)
            ]
        )
        _, whole = least(lambda x, T=T: sum(network(t, x) for t in range(T + 1)))
        rounds_best = sum(least(lambda x, t=t: network(t, x))[1] for t in range(rounds))
        best, value = least(so_far)
        before = steps[T].decisions_before
        now = np.array([[so_far(before[i, r]) - value for r in range(2)] for i in range(3)])
        after = steps[T].decisions_after
        spread = np.linalg.norm(after - after.mean(axis=0), axis=-1)
        wanted = {
            "average_loss": cost
            / sum(len(of_rounds(own, t, t)[1]) > 0 for own in data.learners for t in range(rounds)),
            "static_regret": cost - whole,
            "dynamic_regret": cost - rounds_best,
            "instantaneous_regret": now,
            "tracking_error": np.linalg.norm(before - best, axis=-1),
            "tracking_error_of_mean": np.linalg.norm(before.mean(axis=0) - best, axis=-1),
            "consensus_error": spread,
        }
        for name, values in wanted.items():
            assert found[name].mean[k] == pytest.approx(values.mean(), abs=2e-6), name
        np.testing.assert_allclose(found["static_regret"].learners[k], (cost - whole).mean(axis=1), atol=1e-5)  # type: ignore[index]


def test_the_spread_is_that_over_replicas_and_a_learner_is_a_mean_over_them() -> None:
    run = small_run(10)
    data, recorder = made_up(run.spec), Recorder(SeededNoise(4))
    together = measured(run, data, recorder, 3)
    noise = np.stack(recorder.noise_by_field["y"])
    alone = [measured(run, data, RecordedNoise({"y": noise[:, :, r : r + 1]})) for r in range(3)]

    for name, curve in together.curves.items():
        single = np.stack([each[name].mean for each in alone])
        np.testing.assert_allclose(curve.mean, single.mean(axis=0), atol=1e-9)
        np.testing.assert_allclose(curve.error, single.std(axis=0, ddof=1) / math.sqrt(3), atol=1e-9)
        assert np.isnan(alone[0][name].error).all()
        if curve.learners is not None:
            np.testing.assert_allclose(curve.learners.mean(axis=1), curve.mean, atol=1e-9)


def test_computing_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(10)
    whole = measured(run, made_up(run.spec), SeededNoise(1), 4)
    monkeypatch.setattr(minimisers, "MAX_CHUNK_ELEMENTS", 20)
    parts = measured(run, made_up(run.spec), SeededNoise(1), 4)
    for name, curve in whole.curves.items():
        np.testing.assert_allclose(parts[name].mean, curve.mean, rtol=1e-9, atol=1e-9)


# ---- known answers ---------------------------------------------------------------------------------------------------


def test_without_noise_learners_find_the_optimum() -> None:
    run = small_run(600, loss={"kind": "logistic", "ridge": 0.2, "feature_bound": 1.0}, algorithm={"lam0": 3.0})
    found = measured(run, made_up(run.spec), no_noise)

    assert found.rounds[0] == 1
    assert found.rounds[-1] == 600
    assert found["tracking_error"].final_mean < 0.02 < found["tracking_error"].mean[0]
    assert 0 <= found["instantaneous_regret"].final_mean < 1e-3
    assert found["static_regret"].final_mean / 600 < 0.05


def test_accuracy_is_a_share_of_records_and_balanced_accuracy_one_of_classes() -> None:
    """A model that says yes to all: right for the 9 of 12 records with label 1."""
    run = small_run(1, 2)
    learner = LearnerData(np.ones((1, 3)), np.ones(1), np.zeros(1, np.int64), np.array([0, 1]))
    test = np.ones((12, 3))
    data = PlacedData((learner, learner), test, (np.arange(12) < 9).astype(np.float64))
    meter = Metrics(run, data)
    meter.add_round(SimulatedRound(0, Message({}), np.zeros((2, 1, 3)), np.full((2, 1, 3), 0.5)))

    assert meter.curves["accuracy"].final_mean == pytest.approx(0.75)
    assert meter.curves["balanced_accuracy"].final_mean == pytest.approx(0.5)
    measurements = replace(data, test_labels=np.linspace(0, 1, 12))
    assert "accuracy" not in measured(run, measurements, no_noise)


def test_rounds_without_records_cost_nothing() -> None:
    run = small_run(3, 2)
    learner = LearnerData(np.ones((1, 3)), np.ones(1), np.zeros(0, np.int64), np.zeros(4, np.int64))
    found = measured(run, PlacedData((learner, learner), np.ones((2, 3)), np.ones(2)), SeededNoise(1))
    assert found["static_regret"].mean.tolist() == [0.0, 0.0, 0.0]
    for name in ("average_loss", "tracking_error", "tracking_error_of_mean", "instantaneous_regret"):
        assert np.isnan(found[name].mean).all(), name
    assert found.rounds_with_records.tolist() == [0.0, 0.0, 0.0] and not found.has_records_in_all_rounds


def test_rounds_after_the_last_record_change_no_average() -> None:
    """Records in the first 5 rounds, one learner without any: averages are over the rounds that had them."""
    loss = {"kind": "logistic", "ridge": RIDGE, "feature_bound": 1.0}
    short, long = small_run(5, 3, loss=loss), small_run(40, 3, loss=loss)
    generator = np.random.default_rng(8)
    x = generator.normal(size=(5, 3))
    y = (x[:, 0] > 0).astype(np.float64)

    def placed(rounds: int) -> PlacedData:
        own = LearnerData(x, y, np.arange(5), np.minimum(np.arange(rounds + 1), 5))
        none = LearnerData(x, y, np.zeros(0, np.int64), np.zeros(rounds + 1, np.int64))
        return PlacedData((own, own, none), x, y)

    until, after = measured(short, placed(5), no_noise), measured(long, placed(40), no_noise, checkpoints=(5, 20, 40))
    assert until["average_loss"].final_mean > 0.1
    assert after["average_loss"].mean == pytest.approx([until["average_loss"].final_mean] * 3)
    assert after.rounds_with_records == pytest.approx([10 / 3] * 3) and not until.has_records_in_all_rounds
    full = measured(small_run(5, 2), PlacedData(placed(5).learners[:2], x, y), no_noise)
    assert full.has_records_in_all_rounds and full.rounds_with_records.tolist() == [1, 2, 3, 4, 5]
    *_, last = simulate_rounds(short, placed(5), no_noise, 1)  # F_t is the mean over the two learners that have records
    _, value = least(lambda theta: record_loss(theta, x, y))
    regret = np.mean([record_loss(last.decisions_before[i, 0], x, y) - value for i in range(3)])
    assert until["instantaneous_regret"].final_mean == pytest.approx(regret, abs=1e-6)


@pytest.mark.parametrize("rounds", [1, 2, 20, 25, 26, 30, 40, 60, 2000, 10**7])
def test_checkpoints_are_few_and_reach_from_the_first_round_to_the_last(rounds: int) -> None:
    points = _spread_checkpoints(rounds)
    assert points[0] == 1
    assert points[-1] == rounds
    assert min(rounds, 20) <= len(points) <= metrics.CHECKPOINTS
    assert (np.diff(points) > 0).all()


# ---- chosen metrics and checkpoints ----------------------------------------------------------------------------------


def test_a_chosen_metric_equals_that_among_all() -> None:
    run = small_run(12, loss={"kind": "logistic", "ridge": RIDGE, "feature_bound": 1.0})
    possible = list_metrics(run, ragged())
    assert [name for name in METRICS if name not in possible] == [m for m in METRICS if m.startswith("assembled")]
    together = measured(run, ragged(), SeededNoise(3), 2, metrics=possible)
    assert tuple(together.curves) == possible
    assert tuple(measured(run, ragged(), SeededNoise(3), 2).curves) == DEFAULT_METRICS
    for name, curve in together.curves.items():
        alone = measured(run, ragged(), SeededNoise(3), 2, metrics=[name])
        assert tuple(alone.curves) == (name,)
        np.testing.assert_array_equal(alone[name].replicas, curve.replicas)
        own, among_all = alone[name].learners, curve.learners
        assert (own is None) == (among_all is None)
        if own is not None and among_all is not None:
            np.testing.assert_array_equal(own, among_all)
        np.testing.assert_array_equal(alone.rounds_with_records, together.rounds_with_records)


def test_nothing_is_computed_that_was_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(10)

    def fail(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(Objective, "minimiser", fail)
    cheap = ["average_loss", "consensus_error", "error", "training_accuracy", "prequential_loss"]
    assert tuple(measured(run, made_up(run.spec), SeededNoise(1), metrics=cheap).curves) == tuple(cheap)
    for name in ("instantaneous_regret", "tracking_error", "tracking_error_of_mean", "static_regret", "dynamic_regret"):
        with pytest.raises(AssertionError):
            measured(run, made_up(run.spec), SeededNoise(1), metrics=[name])
    monkeypatch.setattr(Objective, "values", fail)
    monkeypatch.setattr(LogisticLoss, "values", fail)
    measured(run, made_up(run.spec), SeededNoise(1), metrics=["accuracy", "prequential_accuracy"])


def test_metrics_and_checkpoints_that_a_run_does_not_have_are_refused() -> None:
    run = small_run(10)
    data = made_up(run.spec)
    with pytest.raises(SpecError, match=r"metrics must be of average_loss, .*, got luck$"):
        Metrics(run, data, metrics=["accuracy", "luck"])
    with pytest.raises(SpecError, match=r"metrics must be of average_loss, .*, got none$"):
        Metrics(run, data, metrics=[])
    with pytest.raises(SpecError, match=r"got 5, 10: numbers of rounds are checkpoints"):
        Metrics(run, data, metrics=[5, 10])  # type: ignore[list-item]
    bent: Loss = Bent(feature_bound=1.0, ridge=0.01)
    with pytest.raises(SpecError, match=r"got static_regret: regrets and tracking errors need a convex loss"):
        Metrics(replace(run, spec=run.spec.model_copy(update={"loss": bent})), data, metrics=["static_regret"])
    none_held_out = replace(data, test_features=data.test_features[:0], test_labels=data.test_labels[:0])
    with pytest.raises(SpecError, match=r"got error: .* need held-out records"):
        Metrics(run, none_held_out, metrics=["error", "training_accuracy"])
    for wrong, text in (([0, 5], "0, 5"), ([11], "11"), ([2.5], "2.5"), ([], "none")):
        with pytest.raises(SpecError, match=rf"checkpoints must be numbers of rounds from 1 to 10, got {text}"):
            Metrics(run, data, checkpoints=wrong)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="the number of checkpoints must be at least 1, got 0"):
        Metrics(run, data, checkpoints=0)


def test_checkpoints_are_a_number_or_listed() -> None:
    run = small_run(40)

    def rounds(checkpoints: Any) -> list[int]:
        found = measured(run, made_up(run.spec), SeededNoise(1), metrics=["average_loss"], checkpoints=checkpoints)
        return found.rounds.tolist()  # type: ignore[no-any-return]

    assert rounds(1) == [40]
    assert rounds(2) == [1, 40]
    assert rounds([30, 5, 30]) == [5, 30]
    assert rounds(range(10, 41, 10)) == [10, 20, 30, 40]
    assert rounds(100) == list(range(1, 41))
    for count in range(2, 60):
        for total in (count, count + 1, 2 * count, 300, 10**6):
            points = _spread_checkpoints(total, count)
            assert points[-1] == total
            assert min(total, 4 * count // 5) <= len(points) <= count


def test_training_and_prequential_metrics_are_their_definitions() -> None:
    """Of ragged batches; the first learner has no record in the first two rounds, and some records are learned twice."""
    data, names = (
        ragged(),
        ["training_accuracy", "balanced_training_accuracy", "prequential_loss", "prequential_accuracy"],
    )
    run = small_run(12, loss={"kind": "logistic", "ridge": RIDGE, "feature_bound": 1.0})
    steps = list(simulate_rounds(run, data, SeededNoise(3), 2))
    found = measured(run, data, SeededNoise(3), 2, metrics=names, checkpoints=(1, 7, 12))

    for k, rounds in enumerate((1, 7, 12)):
        learned = [np.unique(own.order[: own.offsets[rounds]]) for own in data.learners]
        x = np.concatenate([own.features[rows] for own, rows in zip(data.learners, learned, strict=True)])
        y = np.concatenate([own.labels[rows] for own, rows in zip(data.learners, learned, strict=True)])
        is_right = ((steps[rounds - 1].decisions_after @ x.T) > 0) == y  # (learners, replicas, records)
        assert found["training_accuracy"].mean[k] == pytest.approx(is_right.mean())
        recalls = [is_right[..., y == each].mean(axis=-1) for each in np.unique(y)]
        assert found["balanced_training_accuracy"].mean[k] == pytest.approx(np.mean(recalls))

        losses, hits, counts = np.zeros((3, 2)), np.zeros((3, 2)), np.zeros(3)
        for t in range(rounds):
            for i, own in enumerate(data.learners):
                own_x, own_y = of_rounds(own, t, t)
                counts[i] += len(own_y)
                for r in range(2):
                    theta = steps[t].decisions_before[i, r]
                    losses[i, r] += len(own_y) * record_loss(theta, own_x, own_y)
                    hits[i, r] += np.sum(((own_x @ theta) > 0) == own_y)
        for name, sums in (("prequential_loss", losses), ("prequential_accuracy", hits)):
            curve = found[name]
            assert curve.learners is not None
            np.testing.assert_allclose(curve.replicas[k], sums.sum(axis=0) / counts.sum())
            has_records = counts > 0
            np.testing.assert_allclose(
                curve.learners[k][has_records], sums[has_records].mean(axis=1) / counts[has_records]
            )
            assert np.isnan(curve.learners[k][~has_records]).all()
    assert np.isnan(found["prequential_loss"].learners[0, 0])  # type: ignore[index]


def test_records_that_are_measurements_have_losses_and_no_accuracies() -> None:
    run = small_run(6)
    data = made_up(run.spec)
    learners = tuple(replace(own, labels=np.linspace(0.1, 0.9, len(own.labels))) for own in data.learners)
    possible = list_metrics(run, replace(data, learners=learners, test_labels=data.test_labels + 0.5))
    assert [name for name in METRICS if name not in possible and not name.startswith("assembled")] == [
        "accuracy",
        "balanced_accuracy",
        "error",
        "training_accuracy",
        "balanced_training_accuracy",
        "prequential_accuracy",
        "released_error",
    ]


def test_before_the_first_record_nothing_was_predicted() -> None:
    run = small_run(3, 2)
    learner = LearnerData(np.ones((1, 3)), np.ones(1), np.zeros(1, np.int64), np.array([0, 0, 1, 1]))
    data, names = PlacedData((learner, learner), np.ones((2, 3)), np.ones(2)), ["training_accuracy", "prequential_loss"]
    found = measured(run, data, SeededNoise(1), metrics=names)
    for name in names:
        assert np.isnan(found[name].mean).tolist() == [True, False, False]


def test_rounds_until_a_threshold_are_counted_for_each_replica() -> None:
    falling = Curve(np.array([[3.0, 3.0], [1.0, 2.0], [0.5, 2.0]]), None)
    rising = Curve(np.array([[0.1, 0.9], [0.5, 0.2], [math.nan, 0.3]]), None)
    curves = Curves(np.array([1, 10, 100]), {"average_loss": falling, "prequential_accuracy": rising}, np.ones(3))
    np.testing.assert_array_equal(curves.count_rounds_until("average_loss", 1.0), [10, math.nan])
    np.testing.assert_array_equal(curves.count_rounds_until("prequential_accuracy", 0.5), [10, 1])
