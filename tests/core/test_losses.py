"""Losses: gradients are derivatives, and the constants that guarantees rest on are never exceeded."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.polynomial import chebyshev as series
from pydantic import TypeAdapter, ValidationError
from scipy.optimize import minimize
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.decision_sets import L2Ball
from sottovoce_core.errors import AssumptionViolated, SpecError
from sottovoce_core.losses import AnyLoss, Loss, MarginLoss, mean_gradient, scale_rows
from sottovoce_core.losses.history import start_history
from sottovoce_core.losses.linear import (
    HingeLoss,
    LeastSquaresLoss,
    LogisticLoss,
    PassGlmLoss,
    QuadraticLoss,
    RidgeLoss,
    SmoothedHingeLoss,
    SoftmaxLoss,
    SquaredLoss,
    _chebyshev,
)
from sottovoce_core.losses.loss import sigmoid
from sottovoce_core.noise import SeededNoise
from sottovoce_core.privacy.guarantee import Regularity
from sottovoce_core.runs.replay import replay
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.spec import parse_spec
from tests.examples import made_up, small_run
from tests.strategies import (
    CLASSES,
    labels_for,
    margin_losses,
    matrices,
    pass_glms,
    smoothed_hinges,
    softmaxes,
    squared_losses,
    vectors,
)

SLACK = 1 + 1e-9
DIM = 3

losses: st.SearchStrategy[Loss] = st.one_of(margin_losses, softmaxes)


def gradient(loss: Loss, theta: FloatArray, features: FloatArray, label: float) -> FloatArray:
    """Data gradient of one record, made to obey the bounds and clipped, as a learner computes it."""
    return loss.gradient_sum(theta, Batch(*loss.enforce_bounds(features[None], np.array([label]))))


def inside(theta: FloatArray, radius: float) -> FloatArray:
    return theta * min(1.0, radius / max(float(np.linalg.norm(theta)), 1e-300))


def parameters(data: st.DataObject, loss: Loss, size: float = 100.0) -> FloatArray:
    return data.draw(vectors(loss.dim(DIM), size))


def corners(loss: MarginLoss) -> list[float]:
    """Where `phi'` or `phi''` jumps, as `y z`."""
    return {HingeLoss: [1.0], SmoothedHingeLoss: [1.0, 1.0 - getattr(loss, "width", 0.0)]}.get(type(loss), [])


# ---- derivatives -----------------------------------------------------------------------------------------------------


@given(st.data(), margin_losses, st.floats(-60.0, 60.0))
def test_slope_and_bend_are_the_derivatives(data: st.DataObject, loss: MarginLoss, score: float) -> None:
    """Central differences in the score, away from corners."""
    labels, step = data.draw(labels_for(loss, 1)), 1e-5
    assume(all(abs((2.0 * labels[0] - 1.0) * score - corner) > 2 * step for corner in corners(loss)))
    scores = np.array([score])
    rise = loss.value(scores + step, labels) - loss.value(scores - step, labels)
    turn = loss.slope(scores + step, labels) - loss.slope(scores - step, labels)

    assert loss.slope(scores, labels) == pytest.approx(rise / (2 * step), rel=1e-5, abs=1e-5)
    assert loss.second_derivative(scores, labels) == pytest.approx(turn / (2 * step), rel=1e-5, abs=1e-5)


@given(st.data(), margin_losses, vectors(4, 60.0))
def test_slope_and_curvature_bounds_are_not_exceeded(data: st.DataObject, loss: MarginLoss, scores: FloatArray) -> None:
    labels = data.draw(labels_for(loss, 4))
    assert (np.abs(loss.slope(scores, labels)) <= loss.slope_bound).all()
    assert (loss.second_derivative(scores, labels) <= loss.curvature).all()


@given(st.data(), softmaxes, matrices(2, DIM, 3.0))
def test_the_softmax_gradient_is_the_derivative_of_its_value(
    data: st.DataObject, loss: SoftmaxLoss, features: FloatArray
) -> None:
    unclipped = SoftmaxLoss(feature_bound=loss.feature_bound, ridge=0.0, clip_norm=None, classes=CLASSES)
    batch = Batch(*loss.enforce_bounds(features, data.draw(labels_for(loss, 2))))
    theta, step = parameters(data, loss, 5.0), 1e-5
    moves = step * np.eye(theta.size)
    rise = [(loss.values(theta + m, batch) - loss.values(theta - m, batch)).sum() / (2 * step) for m in moves]

    np.testing.assert_allclose(unclipped.gradient_sum(theta, batch), rise, rtol=1e-5, atol=1e-6)


@given(st.data(), losses, matrices(3, DIM, 3.0))
def test_a_sum_is_over_the_clipped_gradients_of_the_records(
    data: st.DataObject, loss: Loss, features: FloatArray
) -> None:
    labels, theta = data.draw(labels_for(loss, 3)), parameters(data, loss, 5.0)
    batch = Batch(*loss.enforce_bounds(features, labels))
    alone = [loss.gradient_sum(theta, Batch(batch.features[k : k + 1], batch.labels[k : k + 1])) for k in range(3)]

    assert all(np.linalg.norm(each) <= loss.clip_threshold * SLACK for each in alone)
    np.testing.assert_allclose(loss.gradient_sum(theta, batch), np.sum(alone, axis=0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(mean_gradient(loss, theta, batch), np.mean(alone, axis=0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("clip", [None, 0.4])
@pytest.mark.parametrize("kind", [LogisticLoss, HingeLoss, SmoothedHingeLoss, RidgeLoss, PassGlmLoss, SoftmaxLoss])
def test_leading_axes_are_computed_each_by_itself(kind: type[Loss], clip: float | None) -> None:
    """Two learners with unequal numbers of records and three replicas, against one vector at a time."""
    if kind is PassGlmLoss and clip is not None:
        return  # refused: clipping needs the records
    fields: dict[str, Any] = (
        {"classes": 4} if kind is SoftmaxLoss else {"score_bound": 4.0} if kind is PassGlmLoss else {}
    )
    loss = kind.model_validate({"feature_bound": 9.0, "ridge": 0.0, "clip_norm": clip, **fields})
    generator = np.random.default_rng(1)
    theta = generator.normal(size=(2, 3, loss.dim(DIM)))
    features, labels = generator.normal(size=(2, 5, DIM)), generator.integers(0, 2, (2, 5)).astype(np.float64)
    present = np.array([[1.0] * 5, [1.0, 1.0, 0.0, 0.0, 0.0]])
    stacked = loss.gradient_sum(theta, Batch(features, labels, present))
    values = loss.values(theta, Batch(features, labels, present))
    scores = loss.predict(theta, features)
    public = loss.predict(theta, features[0])

    for i, size in enumerate((5, 2)):
        own = Batch(features[i, :size], labels[i, :size])
        np.testing.assert_allclose(loss.gradient_sum(theta[i], own), stacked[i], rtol=1e-12, atol=1e-12)
        for k in range(3):
            np.testing.assert_allclose(loss.gradient_sum(theta[i, k], own), stacked[i, k], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(loss.values(theta[i, k], own), values[i, k, :size], rtol=1e-12)
            np.testing.assert_allclose(loss.predict(theta[i, k], features[i]), scores[i, k], rtol=1e-12)
            np.testing.assert_allclose(loss.predict(theta[i, k], features[0]), public[i, k], rtol=1e-12)
    assert loss.classify(scores).shape == (2, 3, 5)
    assert mean_gradient(loss, theta, Batch.empty(DIM)).tolist() == np.zeros_like(theta).tolist()


LOSSES_OF_EVERY_KIND: list[Loss] = [
    kind.model_validate({"feature_bound": 9.0, "clip_norm": clip, **({"classes": 4} if kind is SoftmaxLoss else {})})
    for kind in (LogisticLoss, HingeLoss, SmoothedHingeLoss, RidgeLoss, LeastSquaresLoss, SoftmaxLoss)
    for clip in (None, 0.4)
] + [PassGlmLoss(score_bound=4.0)]


@pytest.mark.parametrize("records", [1, 4])
@pytest.mark.parametrize("of_records", [(), (1,), (2,)])
@pytest.mark.parametrize("of_theta", [(), (3,), (1, 3), (2, 3)])
def test_leading_axes_broadcast(of_theta: tuple[int, ...], of_records: tuple[int, ...], records: int) -> None:
    """Those of the records against those of theta without its replicas: as if both were repeated first."""
    if not of_theta and of_records:
        return  # theta without axes meets records without
    lead = (*np.broadcast_shapes(of_theta[:-1], of_records), *of_theta[-1:])
    generator = np.random.default_rng(2)
    present = np.broadcast_to((np.arange(records) != 1).astype(np.float64), (*of_records, records))
    batch = Batch(
        generator.normal(size=(*of_records, records, DIM)),
        generator.integers(0, 2, (*of_records, records)).astype(np.float64),
        present,
    )
    wide = Batch(
        *(
            np.broadcast_to(each, (*lead[:-1], *each.shape[len(of_records) :]))
            for each in (batch.features, batch.labels, present)
        )
    )
    for loss in LOSSES_OF_EVERY_KIND:
        theta = generator.normal(size=(*of_theta, loss.dim(DIM)))
        full = np.broadcast_to(theta, (*lead, loss.dim(DIM)))
        for found, expected in (
            (loss.gradient_sum(theta, batch), loss.gradient_sum(full, wide)),
            (mean_gradient(loss, theta, batch), mean_gradient(loss, full, wide)),
            (loss.values(theta, batch), loss.values(full, wide)),
            (loss.predict(theta, batch.features), loss.predict(full, wide.features)),
            (start_history(loss).observe(batch).gradient(theta), start_history(loss).observe(wide).gradient(full)),
        ):
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


# ---- constants -------------------------------------------------------------------------------------------------------


@given(st.data(), losses, vectors(DIM), st.floats(0.1, 50.0))
def test_the_smoothness_is_not_exceeded(data: st.DataObject, loss: Loss, features: FloatArray, radius: float) -> None:
    """Neither by the gradient nor by the clipped one: clipping does not expand."""
    label = float(data.draw(labels_for(loss, 1))[0])
    one, two = (inside(parameters(data, loss), radius) for _ in range(2))
    moved = np.linalg.norm(gradient(loss, one, features, label) - gradient(loss, two, features, label))

    assume(loss.smoothness < math.inf)
    assert moved <= loss.smoothness * np.linalg.norm(one - two) * SLACK + 1e-9


@given(st.data(), losses, matrices(2, DIM), st.floats(0.1, 50.0))
def test_the_gradient_bound_and_change_are_not_exceeded(
    data: st.DataObject, loss: Loss, features: FloatArray, radius: float
) -> None:
    labels = data.draw(labels_for(loss, 2))
    theta = inside(parameters(data, loss), radius)
    first, second = (gradient(loss, theta, features[k], float(labels[k])) for k in range(2))

    assert np.linalg.norm(first) <= loss.gradient_bound(radius) * SLACK
    assert np.linalg.norm(first - second) <= loss.gradient_change(radius) * SLACK


@given(st.data(), losses, vectors(DIM))
def test_clipped_gradients_are_monotone_where_the_loss_says_so(
    data: st.DataObject, loss: Loss, features: FloatArray
) -> None:
    """As gradients of a convex function are: `<g(x) - g(y), x - y> >= 0`."""
    assume(loss.is_convex_when_clipped)
    label = float(data.draw(labels_for(loss, 1))[0])
    one, two = parameters(data, loss, 20.0), parameters(data, loss, 20.0)
    fall = (gradient(loss, one, features, label) - gradient(loss, two, features, label)) @ (one - two)

    assert fall >= -1e-9 * (1 + np.linalg.norm(one - two) * loss.gradient_bound(100.0))


def test_clipped_gradients_of_softmax_are_not_those_of_a_convex_function() -> None:
    """A pair of parameters at which they fall: mode `convex` of LDP-DOL must not apply, unless clipping never acts."""
    row, one, two = np.array([1.0]), np.array([1.0, 0.0, -1.0]), np.array([-3.0, 2.0, 0.0])
    clipped, free = (
        SoftmaxLoss(feature_bound=1.0, ridge=0.0, clip_norm=0.01, classes=3),
        SoftmaxLoss(feature_bound=1.0, ridge=0.0, clip_norm=None, classes=3),
    )
    falls, rises = (
        (gradient(loss, one, row, 0.0) - gradient(loss, two, row, 0.0)) @ (one - two) for loss in (clipped, free)
    )

    assert falls < -1e-3
    assert rises > 0
    assert not clipped.is_convex_when_clipped
    assert free.is_convex_when_clipped
    assert not Regularity.from_loss(clipped, L2Ball(radius=1.0), 3).can_use_convex_mode
    assert Regularity.from_loss(free, L2Ball(radius=1.0), 3).can_use_convex_mode


@given(st.one_of(squared_losses, pass_glms), st.floats(0.1, 50.0))
def test_a_quadratic_losses_bounds_are_attained(loss: QuadraticLoss, radius: float) -> None:
    """Feature, label and parameter at their bounds, pulling one way: the bounds cannot be smaller."""
    axis = np.eye(DIM)[0]
    label = loss.label_bound if isinstance(loss, SquaredLoss) else 1.0
    reached = gradient(loss, -radius * axis, loss.feature_bound * axis, label)
    slopes = loss.slope(np.array([1.0, -1.0]) * loss.feature_bound, np.zeros(2))

    assert np.linalg.norm(reached) == pytest.approx(loss.gradient_bound(radius))
    assert (slopes[0] - slopes[1]) * loss.feature_bound / 2 == pytest.approx(loss.smoothness)


@pytest.mark.parametrize(
    "loss",
    [
        LogisticLoss(feature_bound=2.0, ridge=0.0),
        SoftmaxLoss(feature_bound=2.0, ridge=0.0, clip_norm=None, classes=2),
        SmoothedHingeLoss(feature_bound=2.0, ridge=0.0, width=0.7),
    ],
)
def test_the_smoothness_is_attained(loss: Loss) -> None:
    """At even odds of two classes, and in the corner of the hinge; a logistic theta is half of the difference."""
    step, row = 1e-5, np.array([2.0])
    move = np.array([-step, step]) / math.sqrt(2) if isinstance(loss, SoftmaxLoss) else np.array([step])
    middle = np.array([0.4]) if isinstance(loss, SmoothedHingeLoss) else 0.0 * move
    moved = gradient(loss, middle + move, row, 1.0) - gradient(loss, middle - move, row, 1.0)

    assert np.linalg.norm(moved) / (2 * step) == pytest.approx(loss.smoothness, rel=1e-6)


def test_the_bounds_of_softmax_are_neared() -> None:
    """A sure and wrong guess has the largest gradient; nearly opposite records guessed alike have the largest change."""
    loss, rows = (
        SoftmaxLoss(feature_bound=3.0, ridge=0.0, clip_norm=None, classes=3),
        3.0 * np.array([[1.0, 1e-3], [-1.0, 1e-3]]),
    )
    theta = np.array([[0.0, 1e5], [0.0, 0.0], [0.0, 0.0]]).ravel()
    first, second = gradient(loss, theta, rows[0], 1.0), gradient(loss, theta, rows[1], 1.0)

    assert np.linalg.norm(first) == pytest.approx(math.sqrt(2) * 3.0) == pytest.approx(loss.gradient_bound(1.0))
    assert np.linalg.norm(first - second) == pytest.approx(2 * math.sqrt(2) * 3.0, rel=1e-5)
    assert loss.gradient_change(1.0) == pytest.approx(2 * math.sqrt(2) * 3.0)


# ---- what losses are to each other -----------------------------------------------------------------------------------


@given(vectors(DIM, 10.0), matrices(4, DIM, 3.0))
def test_softmax_of_two_classes_is_logistic(theta: FloatArray, features: FloatArray) -> None:
    """With rows -theta/2 and theta/2: equal values, and a gradient of g and -g."""
    both, labels = np.concatenate([-theta / 2, theta / 2]), np.array([0.0, 1.0, 1.0, 0.0])
    two, one = (
        SoftmaxLoss(feature_bound=9.0, ridge=0.0, clip_norm=None, classes=2),
        LogisticLoss(feature_bound=9.0, ridge=0.0),
    )
    batch = Batch(features, labels)
    expected = one.gradient_sum(theta, batch)

    np.testing.assert_allclose(two.values(both, batch), one.values(theta, batch), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(
        two.gradient_sum(both, batch), np.concatenate([-expected, expected]), rtol=1e-9, atol=1e-12
    )
    clear = np.abs(features @ theta) > 1e-9
    told = two.classify(two.predict(both, features)), one.classify(one.predict(theta, features))
    assert (told[0] == told[1])[clear].all()


def test_softmax_takes_one_row_of_parameters_for_each_class() -> None:
    """Computed by hand: `outer(p - e_b, a)`."""
    theta, row = np.array([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]]), np.array([0.5, 0.25])
    loss, scores = SoftmaxLoss(feature_bound=1.0, ridge=0.0, clip_norm=None, classes=3), theta @ np.array([0.5, 0.25])
    chances = np.exp(scores) / np.exp(scores).sum()

    assert gradient(loss, theta.ravel(), row, 2.0) == pytest.approx(np.outer(chances - np.eye(3)[2], row).ravel())
    assert loss.values(theta.ravel(), Batch(row[None], np.array([2.0]))) == pytest.approx(-np.log(chances[2:]))
    assert loss.predict(theta.ravel(), row[None]) == pytest.approx(scores[None])


def test_softmax_does_not_overflow() -> None:
    loss, theta = SoftmaxLoss(feature_bound=1.0, ridge=0.0, clip_norm=None, classes=3), np.array([1e300, 0.0, -1e300])
    batch = Batch(np.ones((1, 1)), np.array([2.0]))
    assert loss.gradient_sum(theta, batch).tolist() == [1.0, 0.0, -1.0]
    assert loss.values(theta, batch).tolist() == [2e300]


@given(smoothed_hinges, st.floats(-20.0, 20.0), st.sampled_from([0.0, 1.0]))
def test_the_smoothed_hinge_lies_below_the_hinge_by_half_its_width(
    loss: SmoothedHingeLoss, score: float, label: float
) -> None:
    at = np.array([score]), np.array([label])
    gap = float((HingeLoss(feature_bound=1.0, ridge=0.0).value(*at) - loss.value(*at))[0])

    assert -1e-12 <= gap <= loss.width / 2 + 1e-12
    if (2 * label - 1) * score <= 1 - loss.width:
        assert gap == pytest.approx(loss.width / 2)


def test_hinges_by_hand() -> None:
    scores, ones, zeros = np.array([-1.0, 0.5, 0.9, 1.0, 2.0]), np.ones(5), np.zeros(5)
    hinge, smoothed = (
        HingeLoss(feature_bound=1.0, ridge=0.0),
        SmoothedHingeLoss(feature_bound=1.0, ridge=0.0, width=0.25),
    )
    assert hinge.value(scores, ones) == pytest.approx([2.0, 0.5, 0.1, 0.0, 0.0])
    assert hinge.slope(scores, ones).tolist() == [-1.0, -1.0, -1.0, 0.0, 0.0]
    assert hinge.slope(scores, zeros).tolist() == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert smoothed.value(scores, ones) == pytest.approx([1.875, 0.375, 0.02, 0.0, 0.0])
    assert smoothed.slope(scores, ones) == pytest.approx([-1.0, -1.0, -0.4, 0.0, 0.0])
    assert hinge.smoothness == math.inf


# ---- the quadratic approximation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [0.5, 4.0, 20.0])
def test_the_approximation_is_chebyshevs_series(bound: float) -> None:
    """Against NumPy's interpolation of a high degree, whose first coefficients are those of the series."""
    nodes = series.chebpts1(200)
    first = series.chebfit(nodes, np.logaddexp(0.0, -bound * nodes), 199)[:3]
    constant, linear, square = series.cheb2poly(first)

    assert _chebyshev(bound) == pytest.approx((constant, 2 * square / bound**2), rel=1e-9)
    assert linear / bound == pytest.approx(-0.5)


@given(pass_glms, st.floats(-1.0, 1.0))
def test_the_slope_error_holds_and_is_attained(loss: PassGlmLoss, share: float) -> None:
    exact, labels = LogisticLoss(feature_bound=1.0, ridge=0.0), np.ones(1)
    score = np.array([share * loss.score_bound])
    grid = np.linspace(-loss.score_bound, loss.score_bound, 4001)

    assert abs(loss.slope(score, labels) - exact.slope(score, labels)) <= loss.slope_error * SLACK + 1e-15
    largest = np.abs(loss.slope(grid, 0.0 * grid) - exact.slope(grid, 0.0 * grid)).max()
    assert largest == pytest.approx(loss.slope_error, rel=1e-4, abs=1e-15)


@given(pass_glms, vectors(DIM, 10.0), matrices(5, DIM, 3.0))
def test_the_gradient_error_holds_where_scores_are_inside(
    loss: PassGlmLoss, theta: FloatArray, features: FloatArray
) -> None:
    loss = PassGlmLoss(feature_bound=loss.feature_bound, ridge=0.0, clip_norm=None, score_bound=loss.score_bound)
    batch = Batch(*loss.enforce_bounds(features, np.array([0.0, 1.0, 1.0, 0.0, 1.0])))
    theta = inside(theta, loss.score_bound / loss.feature_bound)
    apart = mean_gradient(loss, theta, batch) - mean_gradient(
        LogisticLoss(feature_bound=loss.feature_bound, ridge=0.0), theta, batch
    )

    assert np.linalg.norm(apart) <= loss.gradient_error * SLACK + 1e-12


def test_numbers_of_the_approximation() -> None:
    """At 4, the bound of the paper's experiments; and towards 0, where the series is Taylor's."""
    loss = PassGlmLoss(feature_bound=2.0, ridge=0.0, score_bound=4.0)
    assert loss.curvature == pytest.approx(0.1633355, abs=1e-7)
    assert loss.slope_error == pytest.approx(0.1713283, abs=1e-7)
    assert (loss.smoothness, loss.gradient_error) == (4 * loss.curvature, 2 * loss.slope_error)
    assert loss.gradient_change(3.0) == pytest.approx(loss.curvature * 4 * 3 + 2.0)
    assert _chebyshev(1e-6) == pytest.approx((math.log(2), 0.25), rel=1e-12)


# ---- in a run --------------------------------------------------------------------------------------------------------

PASS_GLM = {"history": "pass_glm", "score_bound": 3.0}
RUNS: list[tuple[dict[str, object], dict[str, object], str]] = [
    (PASS_GLM, {"kind": "l2_ball", "radius": 2.0}, "convex"),
    (PASS_GLM, {"kind": "l1_ball", "radius": 3.0}, "best"),
    ({"kind": "hinge"}, {"kind": "simplex", "radius": 2.0}, "best"),
    ({"kind": "smoothed_hinge", "width": 0.5}, {"kind": "box", "low": -1.0, "high": 1.0}, "convex"),
    ({"kind": "softmax", "classes": 2}, {"kind": "trace_norm", "rows": 2, "columns": 3, "radius": 2.0}, "convex"),
    ({"kind": "softmax", "classes": 2, "clip_norm": 0.3}, {"kind": "l2_ball", "radius": 2.0}, "best"),
]


@pytest.mark.parametrize(("loss", "decision_set", "mode"), RUNS, ids=str)
def test_no_transcript_shows_more_than_the_constants_allow(
    loss: dict[str, object], decision_set: dict[str, object], mode: str
) -> None:
    """Replaced records of a run, large and of either label: the largest loss of all messages is below the claim."""
    run = small_run(15, loss=loss, decision_set=decision_set, algorithm={"accounting": mode})
    data, generator = made_up(run.spec, batch=2), np.random.default_rng(1)
    said = [step.message["y"] for step in simulate_rounds(run, data, SeededNoise(1))]
    own = data.learners[0]
    strangers = [own.with_use(0, 3.0 * generator.normal(size=3), float(k % 2)) for k in range(10)]
    losses = replay(run, Transcript({"y": np.stack(said)}), 0, [own, *strangers])
    claim = run.guarantee(0, np.diff(own.offsets)).cumulative_epsilon

    assert (np.cumsum(losses.max_losses, axis=0) <= claim[:, None, None] * SLACK).all()
    assert losses.supremum.max() > 0.01 * claim[-1]


def test_convex_accounting_is_refused_for_clipped_softmax() -> None:
    with pytest.raises(AssumptionViolated, match="CONVEX_CLIPPED"):
        small_run(loss={"kind": "softmax", "classes": 2, "clip_norm": 0.3}, algorithm={"accounting": "convex"})


def test_the_gradient_leads_to_scikit_learns_model() -> None:
    """The minimiser of the mean loss with its ridge, of three classes."""
    features, labels = load_iris(return_X_y=True)
    loss = SoftmaxLoss(feature_bound=10.0, ridge=0.1, clip_norm=None, classes=3)
    batch = Batch(*loss.enforce_bounds(features, labels.astype(np.float64)))

    def objective(theta: FloatArray) -> tuple[float, FloatArray]:
        value = loss.values(theta, batch).mean() + loss.ridge / 2 * theta @ theta
        return float(value), mean_gradient(loss, theta, batch) + loss.ridge * theta

    ours = minimize(objective, np.zeros(loss.dim(4)), jac=True, method="L-BFGS-B", tol=1e-12).x
    model = LogisticRegression(C=1 / (0.1 * len(labels)), fit_intercept=False, tol=1e-8, max_iter=1000)
    np.testing.assert_allclose(ours.reshape(3, 4), model.fit(batch.features, labels).coef_, atol=1e-4)


# ---- records, labels, specs ------------------------------------------------------------------------------------------


@given(st.data(), losses, matrices(4, DIM, 1e6))
def test_enforced_records_obey_the_bounds_and_others_are_left_alone(
    data: st.DataObject, loss: Loss, features: FloatArray
) -> None:
    labels = data.draw(labels_for(loss, 4))
    kept, kept_labels = loss.enforce_bounds(features, labels)
    norms = np.linalg.norm(features, axis=1)

    assert (np.linalg.norm(kept, axis=1) <= loss.feature_bound * SLACK).all()
    assert (kept[norms < loss.feature_bound / SLACK] == features[norms < loss.feature_bound / SLACK]).all()
    assert np.linalg.norm(np.cross(kept, features), axis=1) == pytest.approx(0.0, abs=1e-3)  # the direction stays
    if isinstance(loss, SquaredLoss):
        assert (np.abs(kept_labels) <= loss.label_bound).all()
    else:
        assert (kept_labels == labels).all()
    theta = np.ones(loss.dim(DIM))
    assert loss.predict(theta, features) == pytest.approx(loss.predict(theta, kept))


def test_rows_are_scaled_by_their_own_norm_alone() -> None:
    rows = np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    assert scale_rows(rows, 1.0) == pytest.approx(np.array([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))
    assert (scale_rows(rows, 1.0)[1] == scale_rows(rows[1:2], 1.0)[0]).all()


def test_the_sigmoid_does_not_overflow() -> None:
    scores = np.array([-1e308, -800.0, 0.0, 800.0, 1e308])
    assert sigmoid(scores) == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.0], abs=1e-300)
    assert sigmoid(np.array(0.0)) == 0.5
    assert LogisticLoss(feature_bound=1.0, ridge=0.0).value(scores[1:4], np.array([1.0, 1.0, 0.0])) == pytest.approx(
        [800.0, math.log(2), 800.0]
    )


def test_classes_are_told_at_the_boundary_of_each_loss() -> None:
    scores = np.array([-1.0, 0.0, 0.1, 0.5, 0.6])
    for loss in (
        LogisticLoss(feature_bound=1.0, ridge=0.0),
        HingeLoss(feature_bound=1.0, ridge=0.0),
        SmoothedHingeLoss(feature_bound=1.0, ridge=0.0),
        PassGlmLoss(feature_bound=1.0, ridge=0.0, score_bound=4.0),
    ):
        assert loss.classify(scores).tolist() == [0, 0, 1, 1, 1]
    assert RidgeLoss(feature_bound=1.0, ridge=0.0, label_bound=1.0).classify(scores).tolist() == [0, 0, 0, 0, 1]
    assert SoftmaxLoss(feature_bound=1.0, ridge=0.0, clip_norm=None, classes=3).classify(
        np.array([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    ).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("section", "loss"),
    [
        ("logistic", LogisticLoss()),
        ({"feature_bound": 2.0, "ridge": 0.1}, LogisticLoss(feature_bound=2.0, ridge=0.1)),
        ({"history": "pass_glm", "score_bound": 3}, PassGlmLoss(score_bound=3.0)),
        (
            {"kind": "ridge", "label_bound": 3.0, "clip_norm": 0.5},
            RidgeLoss(ridge=0.01, clip_norm=0.5, label_bound=3.0),
        ),
        ({"kind": "least_squares", "label_bound": 3.0}, LeastSquaresLoss(ridge=0.0, label_bound=3.0)),
        ({"kind": "hinge", "clip_norm": 0.5}, HingeLoss(clip_norm=0.5)),
        ({"kind": "smoothed_hinge", "width": 0.2}, SmoothedHingeLoss(width=0.2)),
        ({"kind": "softmax", "classes": 26}, SoftmaxLoss(classes=26)),
    ],
    ids=str,
)
def test_a_section_is_its_loss(section: object, loss: Loss) -> None:
    made = TypeAdapter(AnyLoss).validate_python(section)
    assert made == loss
    assert type(made) is type(loss)
    assert made.dim(5) == (130 if isinstance(loss, SoftmaxLoss) else 5)
    assert TypeAdapter(AnyLoss).validate_python(made.model_dump(mode="json")) == made


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"kind": "logistics"}, "kind must be one of hinge, .*did you mean logistic"),
        ({"kind": "logistic", "score_bound": 3}, "score_bound must be given with history pass_glm, and only there"),
        (
            {"kind": "logistic", "history": "pass_glm"},
            "score_bound must be given .*: the largest .* radius of the decision set",
        ),
        ({"history": "pass_glm", "score_bound": 3, "clip_norm": 1}, "clipping needs the records"),
        ({"kind": "softmax"}, "classes"),
        ({"kind": "tests.core.test_losses:DIM"}, "must be a subclass of sottovoce_core.losses.loss.Loss"),
        (7, "must be a kind or a mapping of fields"),
    ],
)
def test_a_section_that_is_no_loss_is_refused(section: object, text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        TypeAdapter(AnyLoss).validate_python(section)


class Absolute(MarginLoss):
    """A loss of one's own, in six lines: `|b - z|` of labels in [-1, 1]."""

    kind: str = "absolute"
    has_binary_labels: ClassVar[bool] = False
    n_classes: ClassVar[int | None] = None

    def value(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return np.abs(labels - scores)

    def slope(self, scores: FloatArray, labels: FloatArray) -> FloatArray:
        return np.sign(scores - labels)


def test_a_loss_of_ones_own_is_named_by_module_and_class() -> None:
    document = {"rounds": 3, "algorithm": "ldp-dol", "loss": {"kind": "tests.core.test_losses:Absolute", "ridge": 0.5}}
    spec = parse_spec(document, allow_imports=True)
    assert isinstance(spec.loss, Absolute)
    assert (spec.loss.ridge, spec.loss.gradient_change(9.0), spec.loss.n_classes) == (0.5, 2.0, None)
    assert parse_spec(spec.model_dump(mode="json"), allow_imports=True) == spec
    with pytest.raises(SpecError, match="imports no code named in a spec from elsewhere"):
        parse_spec(document, allow_imports=False)
