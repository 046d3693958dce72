"""Losses: gradients are derivatives, and the constants that guarantees rest on are never exceeded."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.arrays import FloatArray
from sottovoce.history import RecordHistory
from sottovoce.losses import Logistic, Loss, Squared, build_loss, scale_rows, sigmoid
from sottovoce.machine import Batch
from sottovoce.spec import LossSpec
from tests.strategies import labels_for, logistic_losses, losses, matrices, squared_losses, vectors

SLACK = 1 + 1e-9
DIM = 3


def gradient(loss: Loss, theta: FloatArray, features: FloatArray, label: float) -> FloatArray:
    """Data gradient of one record, made to obey the bounds and clipped, as a learner computes it."""
    batch = Batch(*loss.enforce(features[None], np.array([label])))
    return RecordHistory(loss).observe(batch).gradient(theta)


def inside(theta: FloatArray, radius: float) -> FloatArray:
    return theta * min(1.0, radius / max(float(np.linalg.norm(theta)), 1e-300))


@given(st.data(), losses, vectors(DIM, 20.0), vectors(DIM, 3.0))
def test_the_slope_is_the_derivative_of_the_value(
    data: st.DataObject, loss: Loss, theta: FloatArray, features: FloatArray
) -> None:
    """Central differences in the score."""
    labels = data.draw(labels_for(loss, 1))
    scores, step = np.array([float(theta @ features)]), 1e-5
    rise = loss.value(scores + step, labels) - loss.value(scores - step, labels)

    assert loss.slope(scores, labels) == pytest.approx(rise / (2 * step), rel=1e-5, abs=1e-5)


@given(st.data(), losses, vectors(DIM), vectors(DIM), vectors(DIM), st.floats(0.1, 50.0))
def test_the_smoothness_is_not_exceeded(
    data: st.DataObject, loss: Loss, one: FloatArray, two: FloatArray, features: FloatArray, radius: float
) -> None:
    label = float(data.draw(labels_for(loss, 1))[0])
    one, two = inside(one, radius), inside(two, radius)
    moved = np.linalg.norm(gradient(loss, one, features, label) - gradient(loss, two, features, label))

    assert moved <= loss.smoothness * np.linalg.norm(one - two) * SLACK + 1e-9


@given(st.data(), losses, vectors(DIM), matrices(2, DIM), st.floats(0.1, 50.0))
def test_the_gradient_bound_and_change_are_not_exceeded(
    data: st.DataObject, loss: Loss, theta: FloatArray, features: FloatArray, radius: float
) -> None:
    labels = data.draw(labels_for(loss, 2))
    theta = inside(theta, radius)
    first, second = (gradient(loss, theta, features[k], float(labels[k])) for k in range(2))

    assert np.linalg.norm(first) <= loss.gradient_bound(radius) * SLACK
    assert np.linalg.norm(first - second) <= loss.gradient_change(radius) * SLACK


@given(squared_losses, st.floats(0.1, 50.0))
def test_the_squared_losses_bound_is_attained(loss: Squared, radius: float) -> None:
    """Feature, label and parameter at their bounds, pulling one way: the bound cannot be smaller."""
    axis = np.eye(DIM)[0]
    reached = gradient(loss, -radius * axis, loss.feature_bound * axis, loss.label_bound)

    assert np.linalg.norm(reached) == pytest.approx(loss.gradient_bound(radius))


@given(logistic_losses)
def test_the_logistic_smoothness_is_attained_at_the_origin(loss: Logistic) -> None:
    axis, step = np.eye(DIM)[0], 1e-4
    slopes = loss.slope(np.array([step, -step]) * loss.feature_bound, np.zeros(2))
    curvature = (slopes[0] - slopes[1]) * loss.feature_bound / (2 * step)

    assert curvature == pytest.approx(loss.smoothness, rel=1e-6)
    assert loss.predict(axis, 9 * loss.feature_bound * axis[None]) == pytest.approx(loss.feature_bound)


@given(st.data(), losses, matrices(4, DIM, 1e6))
def test_enforced_records_obey_the_bounds_and_others_are_left_alone(
    data: st.DataObject, loss: Logistic | Squared, features: FloatArray
) -> None:
    labels = data.draw(labels_for(loss, 4))
    kept, kept_labels = loss.enforce(features, labels)
    norms = np.linalg.norm(features, axis=1)

    assert (np.linalg.norm(kept, axis=1) <= loss.feature_bound * SLACK).all()
    assert (kept[norms < loss.feature_bound / SLACK] == features[norms < loss.feature_bound / SLACK]).all()
    assert np.linalg.norm(np.cross(kept, features), axis=1) == pytest.approx(0.0, abs=1e-3)  # the direction stays
    if isinstance(loss, Squared):
        assert (np.abs(kept_labels) <= loss.label_bound).all()
    else:
        assert (kept_labels == labels).all()


def test_rows_are_scaled_by_their_own_norm_alone() -> None:
    rows = np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    assert scale_rows(rows, 1.0) == pytest.approx(np.array([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))
    assert (scale_rows(rows, 1.0)[1] == scale_rows(rows[1:2], 1.0)[0]).all()


def test_the_sigmoid_does_not_overflow() -> None:
    scores = np.array([-1e308, -800.0, 0.0, 800.0, 1e308])
    assert sigmoid(scores).tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert Logistic(1.0, 0.0).value(scores[1:4], np.array([1.0, 1.0, 0.0])) == pytest.approx(
        [800.0, math.log(2), 800.0]
    )


def test_classes_are_told_at_the_boundary_of_each_loss() -> None:
    scores = np.array([-1.0, 0.0, 0.1, 0.5, 0.6])
    assert Logistic(1.0, 0.0).classify(scores).tolist() == [0, 0, 1, 1, 1]
    assert Squared(1.0, 0.0, label_bound=1.0).classify(scores).tolist() == [0, 0, 0, 0, 1]


def test_a_spec_builds_its_loss() -> None:
    assert build_loss(LossSpec(kind="logistic", feature_bound=2.0, ridge=0.1)) == Logistic(2.0, 0.1, math.inf)
    spec = LossSpec(kind="ridge", feature_bound=2.0, label_bound=3.0, ridge=0.0, clip_norm=0.5)
    assert build_loss(spec) == Squared(2.0, 0.0, 0.5, label_bound=3.0)
