"""The model of all records together that a run is compared with: it minimises the run's own loss."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize

from sottovoce_client.runs.evaluate import compute_central_accuracy, find_one_way_edges
from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import prepare
from sottovoce_core.losses import Loss, mean_gradient
from sottovoce_core.runs.run import build_run
from sottovoce_core.spec import parse_spec
from sottovoce_rpc.learner_status import LearnerStatus
from tests.examples import small_run, small_spec

RECORDS, TEST = 300, 2000


def placed(classes: int) -> PlacedData:
    """Overlapping clusters, one a class, dealt to three learners."""
    generator = np.random.default_rng(3)
    labels = generator.integers(0, classes, RECORDS + TEST)
    features = generator.normal(size=(RECORDS + TEST, 3)) + 1.5 * np.eye(3)[labels]
    order, offsets = np.arange(RECORDS // 3), np.arange(RECORDS // 3 + 1)
    known = labels.astype(np.float64)
    learners = tuple(LearnerData(features[k:RECORDS:3], known[k:RECORDS:3], order, offsets) for k in range(3))
    return PlacedData(learners, features[RECORDS:], known[RECORDS:])


def minimiser(loss: Loss, batch: Batch) -> FloatArray:
    def objective(theta: FloatArray) -> tuple[float, FloatArray]:
        value = float(loss.values(theta, batch).mean() + loss.ridge / 2 * theta @ theta)
        return value, mean_gradient(loss, theta, batch) + loss.ridge * theta

    found: FloatArray = minimize(objective, np.zeros(loss.dim(3)), jac=True, method="L-BFGS-B", tol=1e-12).x
    return found


@pytest.mark.parametrize(
    ("loss", "slack"),
    [
        ({"kind": "logistic"}, 0.001),
        ({"kind": "ridge"}, 0.001),
        ({"kind": "softmax", "classes": 2}, 0.001),
        ({"kind": "softmax", "classes": 3}, 0.001),
        ({"kind": "smoothed_hinge", "width": 0.1}, 0.01),
        ({"history": "pass_glm", "score_bound": 3.0}, 0.02),
    ],
    ids=str,
)
def test_the_central_model_minimises_the_loss_of_the_run(loss: dict[str, object], slack: float) -> None:
    """A large ridge, so that a wrong one shows; the hinge and the approximation are answered by their neighbours."""
    run = small_run(loss={**loss, "ridge": 0.3, "feature_bound": 5.0})
    data = placed(int(str(loss.get("classes", 2))))
    features = np.concatenate([each.features for each in data.learners])
    batch = Batch(*run.loss.enforce_bounds(features, np.concatenate([each.labels for each in data.learners])))
    scores = run.loss.predict(minimiser(run.loss, batch), data.test_features)
    expected = float(np.mean(run.loss.classify(scores) == data.test_labels))

    assert compute_central_accuracy(run, data) == pytest.approx(expected, abs=slack)
    assert math.isclose(expected, 0.75, abs_tol=0.15)


def test_a_hinge_without_a_ridge_still_gets_a_model() -> None:
    accuracy = compute_central_accuracy(
        small_run(loss={"kind": "hinge", "ridge": 0.0, "feature_bound": 5.0}), placed(2)
    )
    assert accuracy is not None
    assert accuracy > 0.75


def test_without_held_out_records_there_is_nothing_to_compare() -> None:
    data = placed(2)
    run = small_run()
    assert compute_central_accuracy(run, PlacedData(data.learners, np.empty((0, 3)), np.empty(0))) is None


def test_the_nearest_limit_counts() -> None:
    status = LearnerStatus(epsilon_budget=5.0, epsilon_owner_budget=12.0, epsilon_other_runs=9.0)
    assert status.epsilon_limit == 3.0
    assert LearnerStatus(epsilon_budget=5.0).epsilon_limit == 5.0
    assert LearnerStatus().epsilon_limit is None


def test_a_global_objective_needs_shared_records() -> None:
    document = {"rounds": 5, "learners": 3, "algorithm": {"name": "dpsda-c", "epsilon": 1.0, "clip": 1.0}}
    with pytest.raises(SpecError, match=r"set data.partition to shared"):
        prepare(parse_spec(document, allow_imports=True))
    assert (
        prepare(parse_spec({**document, "data": {"partition": "shared"}}, allow_imports=True))
        .run.guarantee(0)
        .has_shared_records
    )


def test_who_speaks_and_never_hears_the_other() -> None:
    edges = [[0, 1], [1, 2], [2, 0], [2, 1]]
    document = {
        "rounds": 3,
        "learners": 3,
        "algorithm": {"name": "dpsda-ps", "sigma": 4.0},
        "topology": {"graph": {"kind": "edges", "directed": True, "edges": edges}, "weights": "out_degree"},
        "data": {"partition": "shared"},
    }
    assert find_one_way_edges(build_run(parse_spec(document, allow_imports=True), 3).network) == ((0, 1), (2, 0))
    assert find_one_way_edges(build_run(small_spec(3, 2), 3).network) == ()
