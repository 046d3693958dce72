"""Predictions while a learner learns: of a stream, many at a time, in the words of the records, and how good they were."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sottovoce_client.live.connect import connect_learner
from sottovoce_client.live.learner import Prediction
from sottovoce_client.live.prequential import Calibration, PrequentialEvaluation
from sottovoce_core.data.live_records import LiveRecordEncoder
from sottovoce_core.errors import DataError, FailedPrecondition
from sottovoce_core.losses.linear import LeastSquaresLoss, LogisticLoss, PassGlmLoss, SoftmaxLoss
from sottovoce_rpc.server import SERVER_OPTIONS
from tests.client.test_live_learner import NAMES, SCHEMA, SECRET, ann_in, spec_of
from tests.services.network import network

STREAMS = dict(SERVER_OPTIONS)["grpc.max_concurrent_streams"]


async def stream(*records: Any) -> AsyncIterator[Any]:
    for each in records:
        yield each


async def test_a_stream_is_asked_for_together_and_answered_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()

    async def echoed(features: Any) -> Prediction:
        calls.append(len(features))
        await asyncio.sleep(0)
        return Prediction(features[:, 0].tolist(), features[:, 0], 3, None, features)

    async with ann_in(tmp_path, spec_of({"features": 2})) as (_, learner):
        monkeypatch.setattr(learner, "_predict_features", echoed)
        found = [each async for each in learner.predict_each(stream(*([float(k), 0.0] for k in range(3_000))))]
    assert [each.labels for each in found] == [[float(k)] for k in range(3_000)]
    assert [each.scores.tolist() for each in found] == [each.labels for each in found]
    assert all(each.probabilities is not None and each.probabilities[0, 0] == each.labels[0] for each in found)
    assert sum(calls) == 3_000 and len(calls) < 300


async def test_predictions_come_as_records_do(tmp_path: Path) -> None:
    """One that comes is answered, though the next one is not here yet."""
    async with ann_in(tmp_path, spec_of({"features": 2})) as (_, learner):
        coming: asyncio.Queue[Any] = asyncio.Queue()

        async def slow() -> AsyncIterator[Any]:
            while (each := await coming.get()) is not None:
                yield each

        found = learner.predict_each(slow())
        for _ in range(3):
            coming.put_nowait([0.1, 0.2])
            assert len((await anext(found)).labels) == 1
        coming.put_nowait(None)
        assert await anext(found, None) is None


async def test_whoever_leaves_a_stream_early_leaves_nothing_behind(tmp_path: Path) -> None:
    async with ann_in(tmp_path, spec_of({"features": 2})) as (_, learner):
        before = len(learner._tasks._tasks)
        found = learner.predict_each(stream(*([[0.0, 0.0]] * 10_000)))
        await anext(found)
        await found.aclose()
        while len(learner._tasks._tasks) > before:  # noqa: ASYNC110 - until its task has ended
            await asyncio.sleep(0)


async def test_a_record_that_does_not_fit_ends_a_stream(tmp_path: Path) -> None:
    async with ann_in(tmp_path, spec_of({"schema": SCHEMA})) as (_, learner):
        found = learner.predict_each(stream({"age": 1}, {"age": 2}, {"age": SECRET}, {"age": 3}))
        assert [len((await anext(found)).labels) for _ in range(2)] == [1, 1]
        with pytest.raises(DataError, match=r"record 2 .* age: beyond its bounds$"):
            await anext(found)


async def test_a_stream_that_fails_says_why(tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[Any]:
        yield [0.0, 0.0]
        raise OSError("the file is gone")

    async with ann_in(tmp_path, spec_of({"features": 2})) as (_, learner):
        found = learner.predict_each(broken())
        assert len((await anext(found)).labels) == 1
        with pytest.raises(OSError, match="the file is gone"):
            await anext(found)
    async with ann_in(tmp_path / "silent", spec_of({"features": 2}, telemetry={})) as (_, learner):
        with pytest.raises(FailedPrecondition, match="did not opt in"):
            await anext(learner.predict_each(stream([0.0, 0.0])))


async def test_more_calls_than_a_connection_has_room_for_wait_their_turn(tmp_path: Path) -> None:
    async with ann_in(tmp_path, spec_of({"features": 2})) as (_, learner):
        many = 2 * STREAMS
        found = await asyncio.gather(*(learner.predict(np.zeros((1, 2))) for _ in range(many)))
        assert len(found) == many


async def test_a_plain_program_predicts_a_stream(tmp_path: Path) -> None:
    async with network(tmp_path, NAMES) as up:
        await up.start(spec_of({"features": 2}), 3)

        def program() -> list[int]:
            with connect_learner(up.addresses["ann"]) as learner:
                some = learner.predict_each([0.0, 0.0] for _ in range(10_000))
                next(some)
                some.close()  # type: ignore[attr-defined]  # a generator
                return [len(each.labels) for each in learner.predict_each([float(k), 0.0] for k in range(50))]

        assert await asyncio.to_thread(program) == [1] * 50


# ---- in the words of the records -------------------------------------------------------------------------------------


def records_of(label: dict[str, Any], loss: Any, **more: Any) -> LiveRecordEncoder:
    schema = {"features": {"age": {"type": "number", "bounds": [0, 120]}}, "label": {"name": "y", **label}}
    return LiveRecordEncoder.from_spec(spec_of({"schema": schema, **more}, loss=loss.model_dump()).data, loss)


def test_labels_are_told_as_the_records_have_them() -> None:
    scores, labels = np.array([-1.0, 0.0, 1.0]), np.array([0.0, 0.0, 1.0])
    words = records_of({"type": "category", "categories": ["home", "died"]}, LogisticLoss())
    assert (words.class_names, words.decode_predictions(scores, labels)) == (("home", "died"), ["home", "home", "died"])
    turned = records_of({"type": "category", "categories": ["home", "died"]}, LogisticLoss(), positive=["home"])
    assert (turned.class_names, turned.decode_predictions(scores, labels)) == (
        ("died", "home"),
        ["died", "died", "home"],
    )
    flags = records_of({"type": "boolean"}, LogisticLoss())
    assert flags.class_names == (False, True) and flags.decode_predictions(scores, labels)[2] is True
    stars = records_of({"type": "category", "categories": [5, 3, 1]}, SoftmaxLoss(classes=4))
    assert (stars.class_names, stars.decode_predictions(scores, np.array([0.0, 2.0, 3.0]))) == ((5, 3, 1, 3), [5, 1, 3])
    folded = records_of({"type": "category", "categories": ["a", "b", "c"]}, LogisticLoss())
    assert folded.has_merged_labels and folded.class_names == (0, 1)
    number = records_of({"type": "number", "bounds": [100, 300]}, LeastSquaresLoss())
    assert number.class_names is None and number.decode_predictions(scores, labels) == [100.0, 200.0, 300.0]
    encoded = number.encode([{"age": 1, "y": y} for y in (100, 250)])
    assert number.decode_predictions(encoded.labels, labels) == [100.0, 250.0]
    bare = LiveRecordEncoder.from_spec(spec_of({"features": 1}).data, LogisticLoss())
    assert (bare.class_names, bare.decode_predictions(scores, labels)) == ((0, 1), [0, 0, 1])
    assert LiveRecordEncoder.from_spec(spec_of({"features": 1}).data, LeastSquaresLoss()).decode_predictions(
        scores, labels
    ) == [-1.0, 0.0, 1.0]


def test_probabilities_are_those_that_the_loss_means() -> None:
    scores = np.array([-800.0, 0.0, np.log(3.0)])
    found = LogisticLoss().probabilities(scores)
    np.testing.assert_allclose(found, np.array([[1, 0], [0.5, 0.5], [0.25, 0.75]]), atol=1e-12)
    several = SoftmaxLoss(classes=3).probabilities(np.array([[1000.0, 1000.0, 0.0], np.log([1.0, 2.0, 5.0])]))
    assert several is not None
    np.testing.assert_allclose(several, np.array([[0.5, 0.5, 0], [0.125, 0.25, 0.625]]), atol=1e-12)
    assert PassGlmLoss(score_bound=2.0).probabilities(scores) is LeastSquaresLoss().probabilities(scores) is None


# ---- how good they were ----------------------------------------------------------------------------------------------


class Kept:
    """A metric that keeps what it was told."""

    def __init__(self, *, requires_labels: bool = True) -> None:
        self.requires_labels, self.told = requires_labels, list[tuple[Any, Any]]()

    def update(self, y_true: Any, y_pred: Any) -> None:
        self.told.append((y_true, y_pred))


class Third:
    """A detector that finds a drift at its third error."""

    def __init__(self) -> None:
        self.errors, self.drift_detected = list[float](), False

    def update(self, x: float) -> None:
        self.errors.append(x)
        self.drift_detected = len(self.errors) == 3


HOME = np.array([[0.9, 0.1], [0.4, 0.6]])


def of_classes(classes: tuple[Any, ...] = ("home", "died"), chances: Any = HOME) -> Prediction:
    labels = [classes[k] for k in np.argmax(HOME, axis=1)]
    return Prediction(labels, np.zeros(2), 7, classes, chances)


def test_metrics_are_told_labels_or_probabilities() -> None:
    labels, chances, drift = Kept(), Kept(requires_labels=False), Third()
    judged = PrequentialEvaluation([labels, chances], drift=drift)  # as River's sum of metrics is
    judged.update(np.array(["home", "home"]), of_classes())
    judged.update(["died", "died"], of_classes())
    assert labels.told == [("home", "home"), ("home", "died"), ("died", "home"), ("died", "died")]
    assert all(type(label) is str for label, _ in labels.told)
    assert [label for label, _ in chances.told] == [False, False, True, True]
    assert chances.told[0][1] == {False: 0.9, True: 0.1}
    assert (judged.records, drift.errors, list(judged.drifts)) == (4, [0.0, 1.0, 1.0, 0.0], [3])
    of_three = Kept(requires_labels=False)
    thirds = np.full((2, 3), 1 / 3)
    PrequentialEvaluation(of_three).update(["a", "b"], Prediction(["a", "a"], thirds, 0, ("a", "b", "c"), thirds))
    assert of_three.told[1] == ("b", dict.fromkeys("abc", 1 / 3))


def test_numbers_are_judged_by_their_distance() -> None:
    metric, drift = Kept(requires_labels=False), Third()
    judged = PrequentialEvaluation(metric, drift=drift)
    judged.update([1, 5], Prediction([2.0, 2.0], np.zeros(2), 0))
    assert (metric.told, drift.errors) == ([(1, 2.0), (5, 2.0)], [1.0, 3.0])
    assert np.isnan(judged.calibration.error)


def test_what_cannot_be_judged_is_refused() -> None:
    with pytest.raises(DataError, match="labels must be one for each of 2 predictions, got 1"):
        PrequentialEvaluation(Kept()).update(["home"], of_classes())
    judged = PrequentialEvaluation(Kept(), Kept(requires_labels=False))
    with pytest.raises(DataError, match="Kept must be given probabilities"):
        judged.update(["home", "home"], of_classes(chances=None))


def test_calibration_compares_chances_with_what_came_true() -> None:
    judged = PrequentialEvaluation()
    judged.update(["home", "home"], of_classes())
    judged.update(["home", "died"], of_classes())
    assert list(judged.calibration.iterate_bins()) == [(2, 0.6, 0.5), (2, 0.9, 1.0)]
    assert judged.calibration.error == pytest.approx((2 * 0.1 + 2 * 0.1) / 4)
    edge = Calibration(4)
    edge.update(np.array([0.0, 1.0]), [False, True])
    assert (edge.record_counts.tolist(), edge.error) == ([1, 0, 0, 1], 0.0)


def test_chances_that_are_true_are_well_calibrated() -> None:
    """Fails for a correct table with probability below 1e-6: the sum of 20,000 bounded differences, by Hoeffding."""
    rng = np.random.default_rng(5)
    chances = rng.uniform(0.5, 1.0, 20_000)
    table = Calibration(1)
    table.update(chances, (rng.random(20_000) < chances).tolist())
    assert table.error < np.sqrt(np.log(2e6) / (2 * 20_000))
