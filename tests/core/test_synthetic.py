"""Synthetic sources: what a spec states of the records holds, and the same fields give the same records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sottovoce_core.data.dataset import load_dataset, read_source
from sottovoce_core.data.spec import DataSpec
from sottovoce_core.data.synthetic import LinearRegressionSource
from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import Experiment
from sottovoce_core.losses.linear import RidgeLoss

STREAM: dict[str, Any] = {"kind": "linear_regression", "features": 4}


def test_a_label_is_linear_in_the_features_up_to_the_stated_noise() -> None:
    table = read_source(DataSpec.model_validate({"source": {**STREAM, "records": 4_000, "noise": 0.25}}))
    assert table.features.shape == (4_000, 4)
    np.testing.assert_allclose(np.linalg.norm(table.features, axis=1), 1.0)
    found, (residual,), *_ = np.linalg.lstsq(table.features, table.labels, rcond=None)
    # The deviation of 4,000 numbers is within 5 % with more than six standard errors of 0.6 %.
    assert np.sqrt(residual / 4_000) == pytest.approx(0.25, rel=0.05)
    assert np.linalg.norm(found) == pytest.approx(1.0, abs=0.1)


def test_without_noise_labels_stay_within_the_default_bound() -> None:
    table = LinearRegressionSource(**STREAM, noise=0.0).generate()
    _, (residual,), *_ = np.linalg.lstsq(table.features, table.labels, rcond=None)
    assert residual < 1e-20 and np.abs(table.labels).max() <= 1.0


def test_the_same_fields_give_the_same_records_and_another_seed_others() -> None:
    one, again, other = (LinearRegressionSource(**STREAM, seed=seed).generate() for seed in (3, 3, 4))
    assert np.array_equal(one.features, again.features) and np.array_equal(one.labels, again.labels)
    assert not np.array_equal(one.features, other.features)


def test_it_runs_and_is_written_and_read_again() -> None:
    experiment = Experiment(
        rounds=30,
        learners=3,
        algorithm={"name": "d-ogd"},
        loss="ridge",
        data={"source": {**STREAM, "records": 400}, "batch_size": 2},
    )
    assert sum(len(own.labels) for own in experiment.records.learners) + len(experiment.records.test_labels) == 400
    assert Experiment.model_validate(experiment.model_dump(mode="json")) == experiment
    assert "30 rounds of linear_regression" in repr(experiment)
    assert load_dataset(experiment.data, RidgeLoss()).name == "linear_regression"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"kind": "linear_regression"}, "field data.source.features is required: write features: 10"),
        (
            {"kind": "linear_regresion"},
            "one of linear_regression, or module:Class of your own, got 'linear_regresion'; did you mean linear_regression",
        ),
        ({**STREAM, "noise": -0.1}, r"noise: must be greater than or equal to 0, got -0\.1"),
        ({**STREAM, "records": 2**40}, r"features times records must be at most 134217728, got \d+$"),
        ({"age": [1, 2]}, "data.source: must be text, got dict: records must be a pair of arrays"),
        (5, "data.source: must be text, got 5: put quotes around it"),
        (
            "linear_regression",
            r"needs its fields: write source: \{kind: linear_regression, features: 10\}, and optionally",
        ),
        ("linear", r"or the fields of a synthetic source \(linear_regression\), got linear"),
    ],
)
def test_refused(source: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Experiment(rounds=2, algorithm="ldp-dol", loss="ridge", data={"source": source}).records  # noqa: B018


def test_a_schema_is_refused() -> None:
    schema = {"features": {"a": "boolean"}, "label": {"name": "b", "type": "boolean"}}
    with pytest.raises(SpecError, match="schema must be left out with the source linear_regression"):
        Experiment(rounds=2, algorithm="ldp-dol", data={"source": STREAM, "schema": schema})
