"""A learner as an estimator of scikit-learn; and records that a plain program sends without waiting."""

from __future__ import annotations

import asyncio
import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sottovoce_client.live.connect import connect_learner
from sottovoce_client.live.sync_learner import SyncLearner
from sottovoce_core.errors import DataError, FailedPrecondition, SpecError
from tests.client.plainly import plainly
from tests.client.test_live_learner import NAMES, RECORD, SCHEMA, SECRET, spec_of
from tests.services.network import PATIENCE_S, network

NUMBERS = {"features": 2, "batch_size": 1_000}
AGES = {"age": {"type": "number", "bounds": [0, 120]}}
ROWS, LABELS = np.array([[0.1, 0.2], [0.3, -0.4], [-0.5, 0.6]]), np.array([0, 1, 1])


@pytest.mark.slow
async def test_records_that_are_sent_are_all_kept_when_the_block_ends(tmp_path: Path) -> None:
    async with network(tmp_path, NAMES) as up:
        await up.start(spec_of({"schema": SCHEMA}), 4)

        def program() -> None:
            with connect_learner(up.addresses["ann"]) as learner:
                for _ in range(500):
                    learner.send([RECORD])
                with pytest.raises(DataError, match=r"record 0 .* age: beyond its bounds$"):
                    learner.send([{**RECORD, "age": SECRET}])
                learner.send({"age": [1, 2], "ward": ["icu", None]}, ["home", "died"])
                learner.flush()
                assert learner.position == 501
                for _ in range(20):
                    learner.send([RECORD])
                learner.feed([RECORD], positions=[1_000])  # behind them
                learner.send([RECORD])

        await asyncio.to_thread(program)
        async with connect_learner(up.addresses["ann"]) as again:
            assert again.position == 1_001
            async for status in again.watch(0.01):
                if status.records_waiting == 0:
                    break
            assert status.records == 524


async def test_what_was_sent_and_is_not_kept_is_said(tmp_path: Path) -> None:
    async with network(tmp_path, NAMES) as up:
        await up.start(spec_of({"features": 2}, rounds=30), 3)

        def program(*, told: bool, fails: type[Exception] | None = None) -> None:
            with connect_learner(up.addresses["ann"], patience_s=PATIENCE_S) as learner:
                for _ in learner.watch(0.01):
                    pass
                learner.send(ROWS[:1], [0])
                if told:
                    with pytest.raises(
                        FailedPrecondition, match=r"some of the last 1 records are not stored: .* is over"
                    ):
                        learner.flush()
                    with pytest.raises(FailedPrecondition, match="records are not stored"):
                        learner.send(ROWS[:1], [0])
                if fails is not None:
                    raise fails("of its own")

        await asyncio.to_thread(program, told=True)
        await up.start_another(spec_of({"features": 2}, rounds=30), 3)
        with pytest.raises(FailedPrecondition, match="records are not stored"):
            await asyncio.to_thread(program, told=False)
        await up.start_another(spec_of({"features": 2}, rounds=30), 3)
        with pytest.raises(OSError, match="of its own"):
            await asyncio.to_thread(program, told=False, fails=OSError)


async def test_a_library_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(learner: SyncLearner) -> None:
        with pytest.raises(SpecError, match=r"as_river needs river: .*, pip install '\.\[river\]'"):
            learner.as_river()
        with pytest.raises(SpecError, match=r"as_sklearn needs scikit-learn: .*, pip install '\.\[audit\]'"):
            learner.as_sklearn()

    monkeypatch.setitem(sys.modules, "river", None)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    await plainly(tmp_path, spec_of(NUMBERS), program)


# ---- scikit-learn ----------------------------------------------------------------------------------------------------


async def test_a_classifier_learns_and_predicts(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")

    def program(learner: SyncLearner) -> None:
        model: Any = learner.as_sklearn()
        assert model.partial_fit(ROWS, LABELS, classes=[0, 1]) is model
        model.partial_fit(ROWS.tolist(), LABELS.tolist()).flush()
        assert learner.position == 5
        assert (model.classes_.tolist(), model.n_features_in_) == ([0, 1], 2)
        labels, chances, scores = model.predict(ROWS), model.predict_proba(ROWS), model.decision_function(ROWS)
        assert labels.shape == scores.shape == (3,) and set(labels.tolist()) <= {0, 1}
        np.testing.assert_allclose(chances.sum(axis=1), 1.0)
        assert 0.0 <= model.score(ROWS, LABELS) <= 1.0
        with pytest.raises(DataError, match="classes must be among the 2 that the run declares"):
            model.partial_fit(ROWS, LABELS, classes=[0, 1, 2])
        with pytest.raises(SpecError, match="call partial_fit, not fit"):
            model.fit(ROWS, LABELS)
        with pytest.raises(DataError, match="labels must be 3, one for each record"):
            model.partial_fit(ROWS, LABELS[:2])
        assert learner.position == 5

    await plainly(tmp_path, spec_of(NUMBERS), program)


async def test_a_classifier_takes_data_frames_where_the_run_has_a_schema(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pandas = pytest.importorskip("pandas")
    frame, labels = pandas.DataFrame({"age": [5, 90], "ward": ["icu", None]}), np.array(["home", "died"])

    def program(learner: SyncLearner) -> None:
        model: Any = learner.as_sklearn()
        model.partial_fit(frame, labels, classes=np.array(["died", "home"])).flush()
        assert (model.classes_.tolist(), model.n_features_in_) == (["home", "died"], 2)
        assert set(model.predict(frame)) <= {"home", "died"}
        assert model.predict_proba(frame).shape == (2, 2)

    await plainly(tmp_path, spec_of({"schema": SCHEMA}), program)


async def test_it_ends_a_pipeline_of_transformers_that_are_fitted(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import MinMaxScaler

    def program(learner: SyncLearner) -> None:
        scaler = MinMaxScaler().fit(np.array([[0.0, 0.0], [10.0, 10.0]]))
        line = Pipeline([("scale", scaler), ("model", learner.as_sklearn())])
        line[-1].partial_fit(line[:-1].transform(10 * np.abs(ROWS)), LABELS)
        assert line.predict(10 * np.abs(ROWS)).shape == (3,)
        assert line.predict_proba(10 * np.abs(ROWS)).shape == (3, 2)

    await plainly(tmp_path, spec_of(NUMBERS), program)


async def test_a_clone_predicts_and_does_not_learn(tmp_path: Path) -> None:
    """Else a record that `MultiOutputClassifier` and its kind hand to each of their clones would be learned by each."""
    pytest.importorskip("sklearn")
    from sklearn.base import clone

    def program(learner: SyncLearner) -> None:
        model: Any = learner.as_sklearn()
        copied = clone(model)
        assert copied is not model and copied.get_params() == model.get_params() == {"learner": learner}
        assert copied.predict(ROWS).shape == (3,)
        for each in (copied, clone(copied), copy.deepcopy(model)):
            with pytest.raises(SpecError, match="a clone must only predict"):
                each.partial_fit(ROWS, LABELS)
        model.partial_fit(ROWS, LABELS).flush()
        assert learner.position == 2

    await plainly(tmp_path, spec_of(NUMBERS), program)


async def test_what_scikit_learn_asks_of_every_estimator(tmp_path: Path) -> None:
    """The checks that need no `fit`, which a learner refuses."""
    pytest.importorskip("sklearn")
    from sklearn.utils import estimator_checks
    from sklearn.utils.validation import check_is_fitted

    def program(learner: SyncLearner) -> None:
        model: Any = learner.as_sklearn()
        for check in ("check_no_attributes_set_in_init", "check_get_params_invariance", "check_set_params"):
            getattr(estimator_checks, check)("SklearnClassifier", model)
        check_is_fitted(model)
        assert "SklearnClassifier" in repr(model)

    await plainly(tmp_path, spec_of(NUMBERS), program)


async def test_a_regressor_says_numbers_in_the_unit_of_the_records(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    schema = {"features": AGES, "label": {"name": "stay", "type": "number", "bounds": [100, 300]}}

    def program(learner: SyncLearner) -> None:
        model: Any = learner.as_sklearn()
        model.partial_fit([{"age": 5}, {"age": 90}], [100, 250.5]).flush()
        assert not hasattr(model, "classes_") and not hasattr(model, "predict_proba")
        assert model.predict([{"age": 60}]).dtype == np.float64
        told = learner.predict([{"age": 60}])  # rounds go on: of another call it may be another model
        assert told.labels == pytest.approx(200.0 + 100.0 * told.scores)
        assert model.score([{"age": 5}, {"age": 90}], [100, 250]) < 1.0

    await plainly(tmp_path, spec_of({"schema": schema}, loss="least_squares"), program)


async def test_a_loss_without_probabilities_has_none(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")

    def program(learner: SyncLearner) -> None:
        model: Any = learner.as_sklearn()
        assert not hasattr(model, "predict_proba")
        with pytest.raises(AttributeError, match="predict_proba"):
            model.predict_proba(ROWS)
        assert model.decision_function(ROWS).shape == (3,)

    await plainly(tmp_path, spec_of(NUMBERS, loss="smoothed_hinge"), program)


async def test_labels_that_count_as_one_class_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    label = {"name": "outcome", "type": "category", "categories": ["home", "moved", "died"]}

    def program(learner: SyncLearner) -> None:
        with pytest.raises(SpecError, match="as_sklearn needs a class for each label"):
            learner.as_sklearn()

    await plainly(tmp_path, spec_of({"schema": {"features": AGES, "label": label}}), program)
