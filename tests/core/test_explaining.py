"""What is wrong with a document is said once for each place in it, in words for the person who wrote it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import Experiment, require_count
from sottovoce_core.spec import RunSpec, parse_spec
from sottovoce_core.validation_errors import format_validation_errors

pytestmark = pytest.mark.each

WRONG = [
    ({"rounds": 1e20}, "rounds: must be a whole number, got 1e+20"),
    ({"rounds": "1e400"}, "rounds: must be a number within [-1e+308, 1e+308], got '1e400'"),
    ({"rounds": 2.5}, "rounds: must be a whole number, got 2.5"),
    ({"learners": "five"}, "learners: must be a whole number or a list, got 'five'"),
    ({"learners": 1.5}, "learners: must be a whole number or a list, got 1.5"),
    ({"learners": [True, "b"]}, "learners.0: must be text, got True: put quotes around it, because it is text"),
    ({"learners": ["a", "b", "a"]}, "learners: learner names must differ, and 'a' is there 2 times, got ['a', 'b', 'a']"),
    ({"data": {"positive": "sick"}}, "data.positive: must be a list, got 'sick': write [sick]"),
    ({"data": {"positive": "yes"}}, "data.positive: must be a list, got 'yes': write ['yes']"),
    ({"data": {"positive": True}}, "data.positive: must be a list, got True: write [true]"),
    ({"data": {"positive": [2.5]}}, "data.positive.0: must be a whole number or text, got 2.5"),
    ({"data": {"batch_size": "some"}}, "data.batch_size: must be a whole number or 'all', got 'some'"),
    ({"data": {"batch_size": 0}}, "data.batch_size: must be greater than 0, got 0"),
    ({"data": ["a.csv"]}, "data: must be a mapping of fields, got ['a.csv']"),
    ({"algorithm": {"name": "ldp-dol", "sigma": "big"}}, "algorithm.sigma: must be a number or a list of numbers, got 'big'"),
    ({"algorithm": {"name": "ldp-dol", "sigma": [1, "big"]}}, "algorithm.sigma.1: must be a number, got 'big'"),
    ({"algorithm": {"name": "ldp-dol", "v": []}}, "algorithm.v: must be a number, got []"),
    ({"privacy": {"budget": -1}}, "privacy.budget: must be greater than 0, got -1"),
    ({"telemetry": {"accuracy": "often"}}, "telemetry.accuracy: must be true or false, got 'often'"),
    ({"clock": {"window": None}}, "clock.window: must be a whole number, got None"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "line"), WRONG, ids=str)
def test_a_place_has_one_line_in_our_words(changes: dict[str, Any], line: str) -> None:
    document = {"rounds": 5, "algorithm": {"name": "ldp-dol"}, **changes}
    with pytest.raises(SpecError) as refused:
        parse_spec(document, source="s.yaml", allow_imports=True)
    assert str(refused.value) == f"s.yaml: {line}"
    with pytest.raises(SpecError) as refused:
        Experiment(**document)
    assert str(refused.value) == f"experiment: {line}"


def test_what_is_wrong_with_the_whole_does_not_quote_it() -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec({"rounds": None, "algorithm": "ldp-dol"}, source="s.yaml", allow_imports=True)
    assert str(refused.value).startswith("s.yaml: rounds: null needs records that go on")
    assert "{" not in str(refused.value)


@pytest.mark.parametrize("name", ["Krankenhaus Süd", "北院", "a.b-c_d"])
def test_learners_are_called_as_their_language_has_it(name: str) -> None:
    spec = parse_spec({"rounds": 5, "algorithm": "ldp-dol", "learners": [name, "other"]}, allow_imports=True)
    assert spec.names == (name, "other")


def test_every_problem_is_told_at_once() -> None:
    document = {"rounds": "x", "learners": [1], "data": {"seed": -1}, "algorithm": {"name": "ldp-dol", "v": "y"}}
    with pytest.raises(ValidationError) as refused:
        RunSpec.model_validate(document)
    assert [line.partition(":")[0] for line in format_validation_errors(refused.value, document, RunSpec)] == [
        "rounds",
        "learners.0",
        "algorithm.v",
        "data.seed",
    ]


@pytest.mark.parametrize("source", [np.full((3, 2), 777.5), [[777.5, 1], [777.5, 0]], [777.5] * 300, {"a": [777.5]}])
@pytest.mark.parametrize("data", [lambda source: {"source": source}, lambda source: source])
def test_records_that_somebody_gives_are_not_said(source: Any, data: Any) -> None:
    with pytest.raises(SpecError) as refused:
        Experiment(rounds=1, algorithm="ldp-dol", data=data(source))
    text = str(refused.value)
    assert "777" not in text
    if data(source) is not source:
        assert text.startswith(f"experiment: data.source: must be text, got {type(source).__qualname__}")
        assert text.endswith(
            ": records must be a pair of arrays (X, y), a data frame, or in a file: write them to one (.csv, .parquet)"
        )


@pytest.mark.parametrize("field", ["name", "data.label", "data.test_fraction", "rounds", "loss.ridge"])
def test_no_error_quotes_an_array_or_a_frame(field: str) -> None:
    table = pa.table({"a": [777.5] * 9})
    for given in (np.full((3, 2), 777.5), table, [[777.5]] * 3, [{"a": 777.5}]):
        with pytest.raises(SpecError) as refused:
            Experiment(rounds=1, algorithm="ldp-dol", loss="logistic").replace(**{field: given})
        assert "777" not in str(refused.value)
        assert len(str(refused.value)) < 400
    with pytest.raises(SpecError, match="must be a whole number, got Table of pyarrow"):
        require_count("replicas", table)
