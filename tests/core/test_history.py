"""The history gradient is the mean of the records' clipped gradients, however it is computed; a history is a value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.data.schedule import stack_batches
from sottovoce_core.losses import Loss
from sottovoce_core.losses.history import (
    MAX_PENDING_RECORDS,
    GradientHistory,
    QuadraticHistory,
    RecordHistory,
    start_history,
)
from sottovoce_core.losses.linear import LogisticLoss, PassGlmLoss, QuadraticLoss, RidgeLoss, SoftmaxLoss
from tests.strategies import labels_for, margin_losses, matrices, softmaxes, vectors

DIM = 3


def brute_force(loss: Loss, batches: Sequence[Batch], theta: FloatArray) -> FloatArray:
    """One record at a time, straight from the definition."""
    gradients = []
    for batch in batches:
        for features, label in zip(batch.features, batch.labels, strict=True):
            gradient = unclipped(loss, features, label, theta)
            norm = float(np.linalg.norm(gradient))
            gradients.append(gradient * min(1.0, loss.clip_threshold / norm) if norm > 0 else gradient)
    return np.mean(gradients, axis=0) if gradients else np.zeros(loss.dim(DIM))


def unclipped(loss: Any, features: FloatArray, label: float, theta: FloatArray) -> FloatArray:
    if isinstance(loss, SoftmaxLoss):
        scores = theta.reshape(loss.classes, DIM) @ features
        chances = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        return np.outer(chances - np.eye(loss.classes)[int(label)], features).ravel()
    return float(loss.slope(np.array(features @ theta), np.array(label))) * features


def observed(history: GradientHistory, batches: Sequence[Batch]) -> GradientHistory:
    for batch in batches:
        history = history.observe(batch)
    return history


@st.composite
def some_batches(draw: st.DrawFn, loss: Loss, rounds: int) -> list[Batch]:
    """A batch for every round, some of them empty; records obey the loss's bounds."""
    made = []
    for size in draw(st.lists(st.integers(0, 3), min_size=rounds, max_size=rounds)):
        features, labels = draw(matrices(size, DIM, 3.0)), draw(labels_for(loss, size))
        made.append(Batch(*loss.enforce_bounds(features, labels)))
    return made


def random_batches(sizes: Sequence[int], seed: int = 0) -> list[Batch]:
    generator = np.random.default_rng(seed)
    return [Batch(generator.normal(size=(n, DIM)), (generator.random(n) < 0.5).astype(np.float64)) for n in sizes]


@given(st.data(), st.one_of(margin_losses, softmaxes))
def test_the_gradient_is_the_mean_over_the_records(data: st.DataObject, loss: Loss) -> None:
    batches, theta = data.draw(some_batches(loss, 5)), data.draw(vectors(loss.dim(DIM), 5.0))
    expected = brute_force(loss, batches, theta)
    for beside in (theta * (1 - 1e-12), theta * (1 + 1e-12)):  # at a kink of the loss rounding decides
        assume(np.allclose(brute_force(loss, batches, beside), expected, rtol=1e-9, atol=1e-9))

    np.testing.assert_allclose(observed(start_history(loss), batches).gradient(theta), expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(observed(RecordHistory(loss), batches).gradient(theta), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "loss",
    [
        LogisticLoss(feature_bound=9.0, ridge=0.0),
        LogisticLoss(feature_bound=9.0, ridge=0.0, clip_norm=0.3),
        RidgeLoss(feature_bound=9.0, ridge=0.0, label_bound=9.0),
        RidgeLoss(feature_bound=9.0, ridge=0.0, clip_norm=0.7, label_bound=9.0),
        PassGlmLoss(feature_bound=9.0, ridge=0.0, score_bound=4.0),
        SoftmaxLoss(feature_bound=9.0, ridge=0.0, clip_norm=None, classes=3),
        SoftmaxLoss(feature_bound=9.0, ridge=0.0, clip_norm=0.5, classes=3),
    ],
    ids=str,
)
@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_stacked_ragged_batches_give_every_learner_its_own_mean(loss: Loss, seed: int, replicas: int) -> None:
    """Three learners with unequal numbers of records, one of them with none at first, several replicas."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(0, 4, size=(6, 3))
    sizes[:2, 1] = 0
    by_learner = [random_batches(sizes[:, i].tolist(), seed + i) for i in range(3)]
    rounds = [stack_batches([batches[t] for batches in by_learner]) for t in range(6)]
    theta = generator.normal(size=(3, replicas, loss.dim(DIM)))
    got = observed(start_history(loss), rounds).gradient(theta)

    for i in range(3):
        for k in range(replicas):
            expected = brute_force(loss, by_learner[i], theta[i, k])
            np.testing.assert_allclose(got[i, k], expected, rtol=1e-10, atol=1e-12)


QUADRATIC = [
    RidgeLoss(feature_bound=3.0, ridge=0.0, label_bound=5.0),
    PassGlmLoss(feature_bound=3.0, ridge=0.0, score_bound=2.0),
]


@pytest.mark.parametrize("loss", QUADRATIC, ids=str)
@settings(max_examples=40)
@given(st.data(), vectors(DIM, 5.0))
def test_statistics_equal_the_records(loss: QuadraticLoss, data: st.DataObject, theta: FloatArray) -> None:
    batches = data.draw(some_batches(loss, 6))

    np.testing.assert_allclose(
        observed(QuadraticHistory(loss), batches).gradient(theta),
        observed(RecordHistory(loss), batches).gradient(theta),
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize(
    "loss",
    [
        *QUADRATIC,
        LogisticLoss(feature_bound=9.0, ridge=0.0),
        SoftmaxLoss(feature_bound=9.0, ridge=0.0, clip_norm=0.5, classes=3),
    ],
    ids=str,
)
def test_padding_counts_for_nothing_whatever_stands_there(loss: Loss) -> None:
    [batch], present = random_batches([5]), np.array([1.0, 0.0, 1.0, 1.0, 0.0])
    kept = present > 0
    theta = np.linspace(-1.0, 1.0, loss.dim(DIM))
    expected = brute_force(loss, [Batch(batch.features[kept], batch.labels[kept])], theta)
    padded = start_history(loss).observe(Batch(batch.features, batch.labels, present))

    np.testing.assert_allclose(padded.gradient(theta), expected, rtol=1e-10)


def test_the_cheapest_exact_history_is_chosen() -> None:
    assert isinstance(start_history(RidgeLoss(feature_bound=1.0, ridge=0.0, label_bound=1.0)), QuadraticHistory)
    assert isinstance(start_history(PassGlmLoss(feature_bound=1.0, ridge=0.0, score_bound=4.0)), QuadraticHistory)
    assert isinstance(
        start_history(RidgeLoss(feature_bound=1.0, ridge=0.0, clip_norm=0.5, label_bound=1.0)), RecordHistory
    )
    assert isinstance(start_history(LogisticLoss(feature_bound=1.0, ridge=0.0)), RecordHistory)
    assert isinstance(
        start_history(SoftmaxLoss(feature_bound=1.0, ridge=0.0, clip_norm=None, classes=2)), RecordHistory
    )


@pytest.mark.parametrize("loss", QUADRATIC, ids=str)
def test_statistics_equal_the_records_whenever_they_are_added_in(loss: QuadraticLoss) -> None:
    theta = np.linspace(-1.0, 1.0, DIM)[None, None, :]
    statistics, records = QuadraticHistory(loss), RecordHistory(loss)
    for batch in random_batches([2, 1, 0, 3] * (MAX_PENDING_RECORDS // 2)):
        statistics, records = statistics.observe(batch), records.observe(batch)
        np.testing.assert_allclose(statistics.gradient(theta), records.gradient(theta), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("loss", QUADRATIC, ids=str)
def test_statistics_do_not_grow(loss: QuadraticLoss) -> None:
    history = QuadraticHistory(loss)
    for batch in random_batches([2] * 50):
        history = history.observe(batch)
        assert history.pending_rows is None or history.pending_rows.length < MAX_PENDING_RECORDS
    assert history.moments is not None
    assert history.moments.shape == (DIM + 1, DIM + 1)


@pytest.mark.parametrize(
    "loss",
    [LogisticLoss(feature_bound=9.0, ridge=0.0), RidgeLoss(feature_bound=9.0, ridge=0.0, label_bound=9.0)],
    ids=str,
)
def test_before_the_first_record_the_gradient_is_zero(loss: Loss) -> None:
    history = start_history(loss).observe(Batch.empty(DIM))
    assert history.gradient(np.ones((2, 1, DIM))).tolist() == [[[0.0] * DIM]] * 2


# ---- a history is a value --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [
        LogisticLoss(feature_bound=9.0, ridge=0.0, clip_norm=0.5),
        RidgeLoss(feature_bound=9.0, ridge=0.0, label_bound=9.0),
    ],
    ids=str,
)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 3)), min_size=1, max_size=40), st.integers(0, 2**32))
def test_old_values_stay_valid_whatever_grows_from_them(loss: Loss, steps: list[tuple[int, int]], seed: int) -> None:
    """A random tree of histories: each node appended to some earlier one, then all compared with brute force."""
    batches = random_batches([size for _, size in steps], seed)
    theta = np.array([0.5, -1.0, 2.0])
    values: list[tuple[GradientHistory, list[Batch]]] = [(start_history(loss), [])]
    for (parent, _), batch in zip(steps, batches, strict=True):
        history, seen = values[parent % len(values)]
        values.append((history.observe(batch), [*seen, batch]))

    for history, seen in values:
        np.testing.assert_allclose(history.gradient(theta), brute_force(loss, seen, theta), rtol=1e-10, atol=1e-12)


def test_a_shared_buffer_is_not_written_twice() -> None:
    """Two successors of one value, and the value itself after both."""
    loss, theta = LogisticLoss(feature_bound=9.0, ridge=0.0), np.array([1.0, 0.0, -1.0])
    first, left, right = random_batches([2, 3, 3])
    root = RecordHistory(loss).observe(first)
    before = root.gradient(theta)
    one, two = root.observe(left), root.observe(right)

    np.testing.assert_allclose(one.gradient(theta), brute_force(loss, [first, left], theta))
    np.testing.assert_allclose(two.gradient(theta), brute_force(loss, [first, right], theta))
    assert (root.gradient(theta) == before).all()


def test_clipping_is_before_averaging() -> None:
    """Opposite large gradients: clipped one by one they cancel, and so does their mean; three against one do not."""
    loss = RidgeLoss(feature_bound=100.0, ridge=0.0, clip_norm=1.0, label_bound=100.0)
    features = np.array([[10.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    batch = Batch(features, np.array([50.0, 0.2]))
    gradient = RecordHistory(loss).observe(batch).gradient(np.zeros(DIM))

    np.testing.assert_allclose(gradient, [-0.5, -0.2, 0.0])
    assert math.isclose(loss.clip_threshold, 1.0)
