"""A learner as a model of River, and River's metrics of what it predicts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sottovoce_client.live.learner import Prediction
from sottovoce_client.live.prequential import PrequentialEvaluation
from sottovoce_client.live.sync_learner import SyncLearner
from sottovoce_core.errors import DataError, SpecError
from tests.client.plainly import plainly
from tests.client.test_live_learner import SCHEMA, SECRET, spec_of
from tests.client.test_sklearn_model import AGES, NUMBERS

river = pytest.importorskip("river", reason="the extra river is not installed")


def stays(n: int) -> Iterator[tuple[dict[str, Any], str]]:
    for k in range(n):
        yield {"age": k % 120, "ward": "icu" if k % 2 else "surgery"}, "died" if k % 120 > 60 else "home"


async def test_a_classifier_learns_and_predicts_record_by_record(tmp_path: Path) -> None:
    def program(learner: SyncLearner) -> None:
        model: Any = learner.as_river()
        assert isinstance(model, river.base.Classifier) and not model._multiclass
        for x, y in stays(300):
            model.learn_one(x, y)
        model.flush()
        assert learner.position == 299
        x = {"age": 1, "ward": "icu"}
        assert model.predict_one(x) in ("home", "died")
        chances = model.predict_proba_one(x)
        assert set(chances) == {"home", "died"} and sum(chances.values()) == pytest.approx(1.0)
        with pytest.raises(DataError, match="age: beyond its bounds") as refused:
            model.learn_one({**x, "age": SECRET}, "home")
        assert str(SECRET) not in str(refused.value)
        assert "RiverClassifier" in repr(model)
        with pytest.raises(SpecError, match="features must be left out"):
            learner.as_river(["age", "ward"])

    await plainly(tmp_path, spec_of({"schema": SCHEMA}), program)


async def test_progressive_validation_and_a_pipeline(tmp_path: Path) -> None:
    from river import compose, evaluate, metrics

    def program(learner: SyncLearner) -> None:
        known = compose.Select("age", "ward")  # learns nothing
        model = known | learner.as_river()
        noted = (({**x, "note": SECRET}, y) for x, y in stays(30))
        accuracy = evaluate.progressive_val_score(noted, model, metrics.Accuracy() + metrics.F1(pos_val="died"))
        assert accuracy[0].cm.n_samples == 30
        learner.flush()
        assert learner.position == 29
        late = evaluate.progressive_val_score(stays(8), model["RiverClassifier"], metrics.Accuracy(), delay=3)
        assert late.cm.n_samples == 8

    await plainly(tmp_path, spec_of({"schema": SCHEMA}), program)


async def test_many_at_a_time(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([x for x, _ in stays(5)], index=[10, 20, 30, 40, 50])
    labels = pandas.Series([y for _, y in stays(5)], index=frame.index)

    def program(learner: SyncLearner) -> None:
        model: Any = learner.as_river()
        model.learn_many(frame, labels)
        model.flush()
        assert learner.position == 4
        found, chances = model.predict_many(frame), model.predict_proba_many(frame)
        assert list(found.index) == list(chances.index) == list(frame.index)
        assert list(chances.columns) == ["home", "died"] and set(found) <= {"home", "died"}

    await plainly(tmp_path, spec_of({"schema": SCHEMA}), program)


async def test_without_a_schema_the_numbers_have_names(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")

    def program(learner: SyncLearner) -> None:
        model: Any = learner.as_river(["b", "a"])
        model.learn_one({"a": 0.1, "b": 0.2}, True)
        model.learn_many(pandas.DataFrame({"a": [0.3], "c": [1], "b": [0.4]})[["a", "b"]], [0])
        assert model._to_rows([{"a": 0.1, "b": 0.2}]) == [[0.2, 0.1]]
        assert model._to_table(pandas.DataFrame({"a": [0.1], "b": [0.2]})).tolist() == [[0.2, 0.1]]
        assert model.predict_one({"a": 0.1, "b": 0.2}) in (False, True)
        assert set(model.predict_proba_one({"a": 0.1, "b": 0.2})) == {False, True}
        for wrong in ({"a": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.0}):
            with pytest.raises(DataError, match="must have the 2 features"):
                model.learn_one(wrong, True)
        with pytest.raises(DataError, match="must have the 2 features"):
            model.predict_many(pandas.DataFrame({"a": [0.1]}))
        for names in (None, ["a"], ["a", "a"]):
            with pytest.raises(SpecError, match="features must be 2 different names"):
                learner.as_river(names)

    await plainly(tmp_path, spec_of(NUMBERS), program)


async def test_a_clone_predicts_and_does_not_learn(tmp_path: Path) -> None:
    """Else a record that an ensemble hands to each of its clones would be learned by each."""
    from river import ensemble

    def program(learner: SyncLearner) -> None:
        model = learner.as_river(["a", "b"])
        x = {"a": 0.1, "b": 0.2}
        assert model.clone().predict_one(x) in (0, 1)
        with pytest.raises(SpecError, match="a clone must only predict"):
            model.clone().clone().learn_one(x, 1)
        with pytest.raises(SpecError, match="a clone must only predict"):
            copy.deepcopy(model).learn_one(x, 1)
        bag = ensemble.BaggingClassifier(model, n_models=3, seed=1)
        with pytest.raises(SpecError, match="a clone must only predict"):
            [bag.learn_one(x, 1) for _ in range(20)]  # each clone learns a record a random number of times
        learner.flush()
        assert learner.position == -1

    await plainly(tmp_path, spec_of(NUMBERS), program)


async def test_a_regressor(tmp_path: Path) -> None:
    from river import evaluate, metrics

    schema = {"features": AGES, "label": {"name": "stay", "type": "number", "bounds": [100, 300]}}

    def program(learner: SyncLearner) -> None:
        model: Any = learner.as_river()
        assert isinstance(model, river.base.Regressor)
        told = (({"age": k}, 100.0 + k) for k in range(20))
        error = evaluate.progressive_val_score(told, model, metrics.MAE())
        assert 0.0 <= error.get() < 300.0
        assert not hasattr(model, "predict_proba_one")

    await plainly(tmp_path, spec_of({"schema": schema}, loss="least_squares"), program)


async def test_a_loss_without_probabilities_says_so(tmp_path: Path) -> None:
    def program(learner: SyncLearner) -> None:
        model: Any = learner.as_river(["a", "b"])
        with pytest.raises(SpecError, match=r"probabilities need the loss logistic.*; the run has hinge"):
            model.predict_proba_one({"a": 0.0, "b": 0.0})

    await plainly(tmp_path, spec_of(NUMBERS, loss="hinge"), program)


@pytest.mark.filterwarnings("ignore:Passing an instance:DeprecationWarning")  # the other way is newer
def test_rivers_metrics_take_what_prequential_tells_them() -> None:
    from river import drift, metrics, utils

    rng = np.random.default_rng(3)
    rolling = utils.Rolling(metrics.Accuracy(), window_size=100)
    accuracy, loss, area = metrics.Accuracy(), metrics.LogLoss(), metrics.ROCAUC()
    judged = PrequentialEvaluation(accuracy, loss, area, rolling, drift=drift.ADWIN())
    for step in range(20):
        chances = rng.uniform(0.0, 1.0, 100)
        true = np.where((chances > 0.5) == (step < 10), "died", "home")  # what was right is wrong from then on
        told = ["died" if chance > 0.5 else "home" for chance in chances]
        columns = np.column_stack([1.0 - chances, chances])
        judged.update(true, Prediction(list(told), chances, step, ("home", "died"), columns))
    assert (accuracy.get(), rolling.get()) == (0.5, 0.0)
    assert 0.0 < loss.get() < 3.0 and 0.3 < area.get() < 0.7
    assert judged.drifts and 1_000 < judged.drifts[0] < 1_200
    assert judged.calibration.error == pytest.approx(0.25, abs=0.05)
