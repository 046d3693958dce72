"""A schema of records: what it may declare, how records become features, and that this is the same on every path."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import zoneinfo
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sottovoce_core.auditing.online.canaries import draw_canaries
from sottovoce_core.auditing.plan import plan_audit
from sottovoce_core.data import load_dataset
from sottovoce_core.data import spec as schemas
from sottovoce_core.data.columns import read_cells, read_columns
from sottovoce_core.data.encoding import UNDECLARED_FIELD_REASON, EncodedRecords, Encoder
from sottovoce_core.data.spec import DataSpec, Schema
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.experiment import Experiment, load, prepare
from sottovoce_core.losses.linear import LogisticLoss, RidgeLoss, SoftmaxLoss
from sottovoce_core.spec import build_spec_json_schema, dump_spec, find_imports, load_schema, load_spec, parse_spec
from sottovoce_rpc.specs import compute_plan_hash, document_from_wire, spec_from_wire, spec_to_wire

pytestmark = pytest.mark.each

WARDS = """
features:
  age:      {type: number, bounds: [0, 120]}
  stay:     {type: number, bounds: [0, 30], out_of_bounds: clip, missing: neutral}
  ward:     {type: category, categories: [north, south, icu], missing: flag}
  insured:  boolean
  admitted: {type: date, bounds: [2020-01-01, 2030-01-01]}
ignored: [patient_id]
label: {name: outcome, type: category, categories: [home, died]}
"""
NAMES = ("admitted", "age", "insured", "stay", "ward=north", "ward=south", "ward=icu", "ward missing")
RECORD = {"age": 30, "stay": 15, "ward": "icu", "insured": True, "admitted": "2025-01-01", "outcome": "died"}
LOW, HIGH = datetime.date(2020, 1, 1).toordinal(), datetime.date(2030, 1, 1).toordinal()


def schema_of(text: str = WARDS, **changes: Any) -> Schema:
    return Schema.model_validate({**yaml.safe_load(text), **changes})


def of_one(kind: Any, label: Any = None) -> Schema:
    """One feature `x`, and a label `y`."""
    return Schema.model_validate(
        {"features": {"x": kind}, "label": {"name": "y", **(label or {"type": "category", "categories": ["a", "b"]})}}
    )


WARDS_SCHEMA = schema_of()
ENCODER = Encoder.from_schema(WARDS_SCHEMA, LogisticLoss())


def one(record: dict[str, Any], encoder: Encoder = ENCODER) -> EncodedRecords:
    return encoder.encode_records([record])


def reason_of(record: dict[str, Any], encoder: Encoder = ENCODER) -> str | None:
    return one(record, encoder).refusals.get(0)


def column(kind: Any, values: Any) -> tuple[list[list[float]], dict[int, str]]:
    """The features of a column `x`, and why some do not fit."""
    encoder = Encoder.from_schema(of_one(kind), LogisticLoss())
    found = encoder.encode_columns({"x": values}, has_labels=False)
    return found.features.tolist(), {row: why.removeprefix("x: ") for row, why in found.refusals.items()}


# ---- what it declares ------------------------------------------------------------------------------------------------


def test_features_stand_in_the_order_of_their_names() -> None:
    """A mapping has none: whoever sorts its keys on the way changes neither the features nor the plan."""
    schema = WARDS_SCHEMA
    turned = schema_of(features=dict(reversed(yaml.safe_load(WARDS)["features"].items())))

    assert schema.names == turned.names == NAMES and schema.width == len(NAMES)
    assert schema == turned and hash(schema) == hash(turned)


def test_a_record_is_scaled_by_what_is_declared_alone() -> None:
    found = one(RECORD)

    day = datetime.date(2025, 1, 1).toordinal()
    assert found.features[0] == pytest.approx([2 * (day - LOW) / (HIGH - LOW) - 1, -0.5, 1, 0, 0, 0, 1, 0])
    assert found.labels.tolist() == [1.0] and found.classes is not None and found.classes.tolist() == [1]
    assert found.accepted_mask.all() and found.refusals == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": {}}, "features: .*at least 1"),
        (
            {"features": {"a": {"type": "number", "bounds": [1, 1]}}},
            r"features\.a\.bounds: the first bound must be below",
        ),
        ({"features": {"a": {"type": "number", "bounds": [0, float("inf")]}}}, "finite"),
        (
            {"features": {"a": {"type": "number", "bounds": [False, True]}}},
            r"features\.a\.bounds\.0: must be a number, got False",
        ),
        (
            {"features": {"a": {"type": "number", "bounds": [0, 1], "mising": "flag"}}},
            r"unknown field features\.a\.mising",
        ),
        (
            {"features": {"a": {"type": "numbr", "bounds": [0, 1]}}},
            r"features\.a\.type must be one of .*did you mean number",
        ),
        ({"features": {"a": {"type": "os:system"}}}, r"type must be one of boolean, category, date, number, got"),
        ({"features": {"a": {"bounds": [0, 1]}}}, r"features\.a\.type is required"),
        ({"features": {"a": {"type": "date", "bounds": [2020, 2030]}}}, "two days such as"),
        ({"features": {"a": {"type": "date", "bounds": ["2020-02-30", "2021-01-01"]}}}, "two days such as"),
        ({"features": {"a": {"type": "date", "bounds": ["2021-01-01", "2020-01-01"]}}}, "first bound must be below"),
        ({"features": {"a": {"type": "category", "categories": []}}}, "at least 1"),
        ({"features": {"a": {"type": "category", "categories": [True, False]}}}, "YAML reads true and false.*quotes"),
        ({"features": {"a": {"type": "category", "categories": ["north", False]}}}, "YAML reads true"),
        ({"features": {"a": {"type": "category", "categories": ["a", None]}}}, "must be text or numbers"),
        ({"features": {"a": {"type": "category", "categories": [datetime.date(2020, 1, 1)]}}}, "text or numbers"),
        ({"features": {"a": {"type": "category", "categories": ["a", 1]}}}, "all text or all numbers: .* around 1"),
        ({"features": {"a": {"type": "category", "categories": ["a", " a"]}}}, "must differ in more than"),
        ({"features": {"a": {"type": "category", "categories": ["é", "e\u0301"]}}}, "must differ in more than"),
        ({"features": {"a": {"type": "category", "categories": [1, 1.0]}}}, "must differ in more than"),
        ({"features": {"a": {"type": "category", "categories": [2**53, 2**53 + 1]}}}, "must differ in more than"),
        ({"features": {"a": {"type": "category", "categories": [""]}}}, "texts of 1 to 200"),
        (
            {"features": {"a": {"type": "category", "categories": ["a", "na"]}}},
            "'na' is a category of 'a', and counts as",
        ),
        ({"features": {"a": "boolean", " a": "boolean"}}, "got 'a' twice"),
        ({"features": {False: "boolean"}}, "must be text: put quotes"),
        ({"features": {"round": "boolean"}}, "learner and round place a record"),
        ({"features": {"outcome": "boolean"}}, "got 'outcome' twice"),
        ({"ignored": ["age"]}, "got 'age' twice"),
        ({"ignored": ["b", "b "]}, "got 'b' twice"),
        ({"features": {"a=b": "boolean", "a": {"type": "category", "categories": ["b"]}}}, "got 'a=b' twice"),
        (
            {"features": {"a": {"type": "category", "categories": list(range(101))}}},
            "must be at most 100 encoded features",
        ),
        ({"label": {"name": "outcome", "type": "category", "categories": ["home"]}}, "at least 2"),
        (
            {"label": {"name": "outcome", "type": "date", "bounds": ["2020-01-01", "2021-01-01"]}},
            "label.type must be one of",
        ),
        ({"label": {"type": "boolean"}}, "field label.name is required"),
        ({"label": {"name": "outcome", "type": "boolean", "missing": "flag"}}, r"unknown field label\.missing"),
        ({"missing_values": [None]}, "must be text or numbers"),
        ({"colour": "red"}, "unknown field colour; the fields are features, label"),
    ],
)
def test_a_schema_checks_itself(
    tmp_path: Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "MAX_FEATURES", 100)
    path = tmp_path / "schema.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(WARDS), **changes}, allow_unicode=True), encoding="utf-8")
    with pytest.raises(SpecError, match=message):
        load_schema(path)


def test_a_schema_file_is_read_as_a_spec_is(tmp_path: Path) -> None:
    path = tmp_path / "schema.yaml"
    path.write_text(WARDS, encoding="utf-8")
    assert load_schema(path) == WARDS_SCHEMA
    with pytest.raises(SpecError, match="cannot read the schema"):
        load_schema(tmp_path / "none.yaml")
    path.write_text("- a\n", encoding="utf-8")
    with pytest.raises(SpecError, match="a schema must be a mapping of fields, got a list"):
        load_schema(path)


# ---- values ----------------------------------------------------------------------------------------------------------

TENS = {"type": "number", "bounds": [0, 10]}


@pytest.mark.parametrize(
    "value",
    [5, 5.0, "5", " 5 ", "\u00a05", "5.0", "+5", "5.", "0.5e1", "5E0", "05", np.int8(5), np.float32(5), np.uint64(5),
     Decimal("5.00"), np.str_("5")],
    ids=repr,
)  # fmt: skip
def test_a_number_is_a_number_in_whatever_clothes(value: Any) -> None:
    assert column(TENS, [value]) == ([[0.0]], {})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("five", "not a number"), ("1_0", "not a number"), ("1 000", "not a number"), ("5%", "not a number"),
        ("0x5", "not a number"), ("٥", "not a number"), ("５", "not a number"), ("--5", "not a number"),
        ("1,5", "a number with a comma, write 1234.5"), ("1,000.5", "a number with a comma, write 1234.5"),
        ("1.000,5", "a number with a comma, write 1234.5"),
        (True, "not a number"), (np.bool_(False), "not a number"), (b"5", "not a number"), ([5], "not a number"),
        ({"a": 5}, "not a number"), (5j, "not a number"), (datetime.date(2020, 1, 1), "not a number"),
        (np.datetime64("2020-01-01", "ns"), "not a number"), (np.timedelta64(5, "ns"), "not a number"),
        (math.nan, "not a finite number"), (math.inf, "not a finite number"), ("NaN", "not a finite number"),
        ("-Infinity", "not a finite number"), (Decimal("NaN"), "not a finite number"), (np.float32("inf"), "not a finite number"),
        (-1e-9, "beyond its bounds"), ("10.1", "beyond its bounds"), (10**400, "beyond its bounds"),
        ("1e400", "beyond its bounds"), ("9" * 400, "beyond its bounds"), (Decimal("1e400"), "beyond its bounds"),
        (None, "missing"), ("", "missing"), ("  ", "missing"), ("na", "missing"), ("?", "missing"), (np.ma.masked, "missing"),
        (np.datetime64("NaT", "s"), "missing"),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_number_within_bounds_is_refused(value: Any, reason: str) -> None:
    assert column(TENS, [value]) == ([], {0: reason})
    assert column(TENS, [5, value, 10]) == ([[0.0], [1.0]], {1: reason})


def test_numbers_beyond_are_clipped_where_that_is_declared() -> None:
    values = [-1, 0, -0.0, 10, 11, "1e400", -(10**400), 1.7e308]
    assert column({**TENS, "out_of_bounds": "clip"}, values) == ([[-1], [-1], [-1], [1], [1], [1], [-1], [1]], {})
    assert column({**TENS, "out_of_bounds": "clip"}, [math.inf])[1] == {0: "not a finite number"}


@pytest.mark.parametrize(
    ("missing", "expected"),
    [("neutral", [[1.0], [0.0], [0.0]]), ("flag", [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])],
)
def test_a_gap_is_neutral_or_flagged(missing: str, expected: list[list[float]]) -> None:
    kind = {**TENS, "missing": missing}
    assert column(kind, ["10", "", "NA"]) == (expected, {})
    encoder = Encoder.from_schema(of_one(kind), LogisticLoss())
    assert encoder.encode_records([{"x": 10}, {}, {"x": None}], has_labels=False).features.tolist() == expected
    assert encoder.encode_columns({"y": ["a"] * 2}).features.tolist() == expected[1:], (
        "a field without a column is a gap"
    )


def test_declared_missing_values_are_words_or_numbers() -> None:
    fields = {"features": {"x": {**TENS, "missing": "neutral"}}, "label": {"name": "y", "type": "boolean"}}
    schema = Schema.model_validate({**fields, "missing_values": ["none", -999, "-7", "nan"]})
    encoder = Encoder.from_schema(schema, LogisticLoss())
    gaps = ["NONE", "-999.0", -999, -999.0, "-7.0", -7, math.nan, "NaN", "", None]
    found = encoder.encode_columns({"x": [*gaps, "NA"]}, has_labels=False)
    assert found.features.tolist() == [[0.0]] * len(gaps)
    assert found.refusals == {len(gaps): "x: not a number"}, "the default ones hold no more"
    assert (
        encoder.encode_columns({"x": np.array([-999.0, math.nan, 5.0])}, has_labels=False).features.tolist()
        == [[0.0]] * 3
    )


@pytest.mark.parametrize("categories", [[1, 2, 10], [1.0, 2.0, 10.0]])
def test_numbers_as_categories_are_compared_as_numbers(categories: list[float]) -> None:
    kind = {"type": "category", "categories": categories}
    second = [0.0, 1.0, 0.0]
    for value in (2, 2.0, "2", "2.0", " 2", "02", "2e0", np.int64(2), Decimal(2)):
        assert column(kind, [value]) == ([second], {})
    assert column(kind, np.array([2, 10, 3])) == ([second, [0.0, 0.0, 1.0]], {2: "none of its categories"})
    assert column(kind, [True, "b", math.nan])[1] == dict.fromkeys(range(3), "none of its categories")
    assert of_one(kind).names == ("x=1", "x=2", "x=10")


def test_text_as_categories_is_compared_as_text() -> None:
    kind = {"type": "category", "categories": ["01", "1", "e\u0301", "no"]}
    assert column(kind, ["01", " 1", 1, np.int8(1), "\u00e9 ", "no"])[0] == np.eye(4)[[0, 1, 1, 1, 2, 3]].tolist()
    assert column(kind, np.array([1, 1]))[0] == np.eye(4)[[1, 1]].tolist()
    refused = ["1.0", 1.0, "NO", False, "É", 10**5000, b"no", ("no",)]
    assert column(kind, refused) == ([], dict.fromkeys(range(len(refused)), "none of its categories"))


def test_true_and_false_in_their_usual_words() -> None:
    yes = [True, np.bool_(True), 1, 1.0, "1", "1.0", "TRUE", "t", "Yes", "y", "on"]
    no = [False, 0, -0.0, "0", "0.0", "false", "F", "no", "N", "off"]
    assert column("boolean", [*yes, *no]) == ([[1.0]] * len(yes) + [[-1.0]] * len(no), {})
    assert column("boolean", np.array([0, 1, 2])) == ([[-1.0], [1.0]], {2: "neither true nor false"})
    assert column("boolean", np.array([True, False]))[0] == [[1.0], [-1.0]]
    assert column("boolean", ["maybe", 2, math.nan])[1] == dict.fromkeys(range(3), "neither true nor false")


DAYS = {"type": "date", "bounds": [datetime.date(2020, 1, 1), "2020-01-03"]}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2020-01-02", 0.0), (datetime.date(2020, 1, 2), 0.0), (datetime.datetime(2020, 1, 2, 23, 59), 0.0),
        (np.datetime64("2020-01-02"), 0.0), (np.datetime64("2020-01-02T23:59:59.999999999"), 0.0),
        ("2020-01-02 23:59", 0.0), ("2020-01-02T23:59:59.123456789", 0.0), ("2020-01-02T00:30:00Z", 0.0),
        ("2020-01-02T00:30:00+01:00", -1.0), ("2020-01-01T23:30-0100", 0.0),
        (datetime.datetime(2020, 1, 2, 0, 30, tzinfo=datetime.timezone(datetime.timedelta(hours=1))), -1.0),
    ],
    ids=repr,
)  # fmt: skip
def test_a_date_counts_by_its_day_in_utc(value: Any, expected: float) -> None:
    assert column(DAYS, [value]) == ([[expected]], {})


@pytest.mark.parametrize(
    "value",
    ["02.01.2020", "01/02/2020", "2020-1-2", "20200102", "2020-02-30", "2020-01-02T24:00", "2020-01-02T10", "2020-W01-4",
     "2020-01-02T10:00+99:00", "yesterday", 20200102, 18263.0, True, math.nan, datetime.time(1)],
    ids=repr,
)  # fmt: skip
def test_what_is_no_iso_date_is_refused(value: Any) -> None:
    assert column(DAYS, [value])[1] == {0: "not a date, write 2020-01-31"}


def test_dates_of_numpy_and_beyond() -> None:
    stamps = np.array(["2020-01-01", "2020-01-04", "NaT", "12020-01-01"], dtype="datetime64[s]")
    found, refused = column(DAYS, stamps)
    assert found == [[-1.0]] and set(refused) == {1, 2, 3}
    assert (refused[1], refused[2]) == ("beyond its bounds", "missing")
    assert column({**DAYS, "out_of_bounds": "clip"}, ["1970-01-01", "2999-12-31"])[0] == [[-1.0], [1.0]]
    assert column(DAYS, np.array([1.0, 2.0]))[1] == dict.fromkeys(range(2), "not a date, write 2020-01-31")


# ---- labels ----------------------------------------------------------------------------------------------------------


def test_declared_categories_give_class_numbers_whichever_occur() -> None:
    schema = of_one("boolean", {"type": "category", "categories": ["c", "a", "b"]})
    found = Encoder.from_schema(schema, SoftmaxLoss(classes=3)).encode_columns({"x": [1, 1], "y": ["b", "a"]})
    assert found.labels.tolist() == [2.0, 1.0]
    binary = Encoder.from_schema(schema, LogisticLoss()).encode_columns({"x": [1, 1, 1], "y": ["c", "a", "b"]})
    assert (
        binary.labels.tolist() == [0.0, 0.0, 1.0]
        and binary.classes is not None
        and binary.classes.tolist() == [0, 1, 2]
    )
    assert Encoder.from_schema(schema, LogisticLoss(), ("c",)).encode_columns(
        {"x": [1, 1], "y": ["c", "b"]}
    ).labels.tolist() == [1.0, 0.0]


def test_a_boolean_label_is_two_classes_and_a_number_is_scaled() -> None:
    yes = Encoder.from_schema(of_one("boolean", {"type": "boolean"}), LogisticLoss()).encode_columns(
        {"x": [1, 1], "y": ["no", "YES"]}
    )
    assert yes.labels.tolist() == [0.0, 1.0]
    cost = Encoder.from_schema(of_one("boolean", {"type": "number", "bounds": [0, 1000]}), RidgeLoss())
    found = cost.encode_columns({"x": [1] * 4, "y": ["0", 750, 1001, ""]})
    assert found.labels.tolist() == [-1.0, 0.5] and found.classes is None
    assert found.refusals == {2: "y: beyond its bounds", 3: "y: missing"}


@pytest.mark.parametrize(
    ("label", "positive", "values"),
    [
        ({"type": "boolean"}, (True,), [0.0, 1.0]),  # which a spec keeps as 1
        ({"type": "boolean"}, ("no",), [1.0, 0.0]),
        ({"type": "category", "categories": [1, 2]}, ("1.0",), [1.0, 0.0]),
        ({"type": "category", "categories": ["1", "2"]}, (1,), [1.0, 0.0]),
        ({"type": "category", "categories": ["e\u0301", "a"]}, ("é",), [1.0, 0.0]),
    ],
)
def test_positive_labels_are_named_as_records_name_them(
    tmp_path: Path, label: Any, positive: tuple[int | str, ...], values: list[float]
) -> None:
    spec = load_spec(spec_file(tmp_path, of_one("boolean", label).model_dump(mode="json"), positive=list(positive)))
    assert spec.data.schema is not None
    assert Encoder.from_schema(spec.data.schema, LogisticLoss(), spec.data.positive).class_values == tuple(values)


@pytest.mark.parametrize(
    ("label", "loss", "positive", "message"),
    [
        (
            {"type": "number", "bounds": [0, 1]},
            LogisticLoss(),
            None,
            "must be a category or a boolean for the logistic loss",
        ),
        ({"type": "boolean"}, RidgeLoss(), None, "must be a number for the ridge loss, got type boolean"),
        ({"type": "category", "categories": [1, 2, 3]}, SoftmaxLoss(classes=2), None, "got 2 for 3 labels: 1, 2, 3"),
        ({"type": "category", "categories": [1, 2]}, LogisticLoss(), (3,), r"labels that are declared \(1, 2\), got 3"),
        ({"type": "category", "categories": [1, 2]}, LogisticLoss(), (1, 2), "some of the labels 1, 2, not all"),
    ],
)
def test_a_label_fits_its_loss(label: Any, loss: Any, positive: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Encoder.from_schema(of_one("boolean", label), loss, positive)


# ---- records that do not fit -----------------------------------------------------------------------------------------


def test_the_first_reason_counts_and_says_nothing_of_the_record() -> None:
    hidden = "31337"
    records: list[dict[Any, Any]] = [
        {**RECORD, "age": hidden},
        {**RECORD, "ward": hidden, "outcome": hidden},
        {**RECORD, "age": "", "stay": "x"},
        {**RECORD, hidden: 1},
        {**RECORD, "age ": 3},
        {**RECORD, 5: 3},
        RECORD,
        {**RECORD, "age": hidden, "patient_id": hidden},
    ]
    found = ENCODER.encode_records(records)

    assert found.accepted_mask.tolist() == [False] * 6 + [True, False]
    assert len(found.features) == len(found.labels) == 1
    assert found.reasons == {
        UNDECLARED_FIELD_REASON: 3,
        "age: beyond its bounds": 2,
        "ward: none of its categories": 1,
        "age: missing": 1,
    }
    assert hidden not in str(found.reasons)


def test_a_missing_label_is_refused_unless_none_is_asked_for() -> None:
    bare = {name: value for name, value in RECORD.items() if name != "outcome"}
    assert reason_of(bare) == "outcome: missing"
    assert reason_of({**RECORD, "outcome": "moved"}) == "outcome: none of its categories"
    found = ENCODER.encode_records([bare, {**bare, "outcome": "?"}], has_labels=False)
    assert found.accepted_mask.all() and found.labels.size == 0 and found.classes is None


def test_columns_are_lists_of_equal_length() -> None:
    with pytest.raises(DataError, match="equally many"):
        ENCODER.encode_columns({"age": [1, 2], "stay": [1]})
    with pytest.raises(DataError, match="'age' must be a list of values, one for each record, got str"):
        ENCODER.encode_columns({"age": "12"})
    with pytest.raises(DataError, match="got int"):
        ENCODER.encode_columns({"age": 12})
    with pytest.raises(DataError, match="array of 2 axes"):
        ENCODER.encode_columns({"age": np.ones((2, 2))})
    with pytest.raises(DataError, match="must be a mapping"):
        ENCODER.encode_records([[1, 2]])  # type: ignore[list-item]
    assert ENCODER.encode_records([]).features.shape == (0, WARDS_SCHEMA.width)


@pytest.mark.parametrize("dtype", ["Int64", "float64", "float32", "object"])
def test_what_pandas_takes_for_no_value_is_missing(dtype: str) -> None:
    pandas = pytest.importorskip("pandas")
    flagged = {**TENS, "missing": "flag"}
    assert column(flagged, pandas.Series([5, None], dtype=dtype)) == ([[0.0, 0.0], [0.0, 1.0]], {})
    words = pandas.Series(["a", None], dtype="category" if dtype == "object" else None)
    kind = {"type": "category", "categories": ["a"], "missing": "flag"}
    assert column(kind, words) == ([[1.0, 0.0], [0.0, 1.0]], {})
    (row,) = pandas.DataFrame({"x": pandas.Series([None], dtype="Int64")}).to_dict("records")
    assert reason_of({**RECORD, "age": row["x"]}) == "age: missing"


def test_columns_of_polars_are_columns() -> None:
    polars = pytest.importorskip("polars")
    assert column(TENS, polars.Series([5.0, None, math.nan])) == ([[0.0]], {1: "missing", 2: "not a finite number"})
    assert column(DAYS, polars.Series([datetime.date(2020, 1, 2)])) == ([[0.0]], {})


# ---- one by one, all at once, by file --------------------------------------------------------------------------------

_NUMBERS = st.one_of(
    st.floats(-1e3, 1e3), st.integers(-5, 125), st.sampled_from([-0.0, 2**63, 2**64 - 1, 1e308, 5e-324, -999])
)
_TEXTS = st.one_of(
    st.sampled_from(["", "NA", " ? ", "1,5", "1_0", "1e1", "north", " icu", "ICU", "yes", "on", "1", "1.0", "nan", "inf",
                     "2024-02-30", "2024-02-29", "2024-06-01T12:00:00+02:00", "home", "died ", "\u0065\u0301", '"', "a\nb", ";"]),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=5),
    _NUMBERS.map(str),
)  # fmt: skip
_ANY = st.one_of(_TEXTS, _NUMBERS, st.none(), st.booleans(), st.dates(), st.datetimes(), st.decimals(), st.just([1]))
_FIELDS = ("age", "stay", "ward", "insured", "admitted", "outcome", "patient_id")


def rows_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(st.fixed_dictionaries(dict.fromkeys(_FIELDS, values)), min_size=1, max_size=6)


def told(found: EncodedRecords) -> tuple[Any, ...]:
    return found.features.tolist(), found.labels.tolist(), found.accepted_mask.tolist(), dict(found.refusals)


def together(parts: list[EncodedRecords]) -> tuple[Any, ...]:
    refused = {i: part.refusals[0] for i, part in enumerate(parts) if part.refusals}
    return (
        [row for part in parts for row in part.features.tolist()],
        [label for part in parts for label in part.labels.tolist()],
        [bool(part.accepted_mask[0]) for part in parts],
        refused,
    )


@given(rows_of(_ANY))
def test_one_by_one_is_all_at_once(records: list[dict[str, Any]]) -> None:
    whole = told(ENCODER.encode_records(records))
    assert whole == together([one(record) for record in records])
    assert whole == told(ENCODER.encode_columns({name: [record[name] for record in records] for name in _FIELDS}))
    assert np.abs(whole[0] or [[0.0]]).max() <= 1.0
    assert (np.linalg.norm(np.asarray(whole[0] or [[0.0]]), axis=1) <= math.sqrt(5) + 1e-12).all()


@given(st.lists(_NUMBERS, min_size=1, max_size=8))
def test_arrays_of_numbers_are_lists_of_numbers(numbers: list[float]) -> None:
    """Of every type of field."""
    floats = [float(number) for number in numbers]
    whole = [round(number) for number in floats if abs(number) < 2**62] or [0]
    for values in (np.array(floats), np.array(whole, dtype=np.int64)):
        for name in _FIELDS:
            same = [{name: values}, {name: values.tolist()}, {name: [*values]}]
            first, *others = (told(ENCODER.encode_columns(columns)) for columns in same)
            assert all(first == other for other in others)
        numeric = Encoder.from_schema(of_one({"type": "category", "categories": [5, -999, 1.5, 0]}), LogisticLoss())
        a, b = (told(numeric.encode_columns({"x": each}, has_labels=False)) for each in (values, values.tolist()))
        assert a == b


@given(rows_of(_TEXTS))
def test_text_is_the_same_by_csv_and_parquet(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, str]]
) -> None:
    arrow, csv = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.csv")
    parquet, folder = pytest.importorskip("pyarrow.parquet"), tmp_path_factory.mktemp("same")
    table = arrow.table({name: [record[name] for record in records] for name in _FIELDS})
    csv.write_csv(table, folder / "r.csv")
    parquet.write_table(table, folder / "r.parquet")
    direct = told(ENCODER.encode_records(records))
    for name in ("r.csv", "r.parquet"):
        assert from_file(folder / name) == direct


def test_typed_columns_are_the_same_by_csv_and_parquet(tmp_path: Path) -> None:
    arrow, csv = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.csv")
    parquet = pytest.importorskip("pyarrow.parquet")
    zone = zoneinfo.ZoneInfo("Etc/GMT-5")  # five hours ahead; old versions of Arrow write none without a name as text
    records = [
        {**RECORD, "age": 30.5, "stay": None, "admitted": datetime.datetime(2024, 1, 1, 2, tzinfo=zone), "patient_id": 7},
        {**RECORD, "age": 0.0, "stay": 400, "admitted": datetime.datetime(2024, 1, 1, 12, tzinfo=zone), "insured": False,
         "patient_id": 8},
        {**RECORD, "age": -1e-9, "stay": 3, "ward": None, "admitted": datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC),
         "patient_id": None},
        {**RECORD, "age": 1e300, "ward": "ICU", "admitted": None, "patient_id": 9},
    ]  # fmt: skip
    table = arrow.Table.from_pylist(records)
    table = table.set_column(
        table.column_names.index("ward"), "ward", table.column("ward").combine_chunks().dictionary_encode()
    )
    csv.write_csv(table, tmp_path / "r.csv")
    parquet.write_table(table, tmp_path / "r.parquet")
    direct = told(ENCODER.encode_records(records))
    assert (
        from_file(tmp_path / "r.csv") == from_file(tmp_path / "r.parquet") == direct == together([*map(one, records)])
    )
    assert direct[2] == [True, True, False, False]


def from_file(path: Path) -> tuple[Any, ...]:
    return told(ENCODER.encode_columns(read_cells(path)[0]))


# ---- files -----------------------------------------------------------------------------------------------------------

ADULT = {
    "features": {
        "age": {"type": "number", "bounds": [17, 90]},
        "workclass": {"type": "category", "categories": ["Private", "State-gov", "Self-emp"], "missing": "flag"},
        "hours": {"type": "number", "bounds": [0, 60], "out_of_bounds": "clip", "missing": "neutral"},
        "sex": {"type": "category", "categories": ["Female", "Male"]},
        "since": {"type": "date", "bounds": ["1990-01-01", "2000-01-01"], "missing": "flag"},
    },
    "ignored": ["name"],
    "label": {"name": "income", "type": "category", "categories": ["<=50K", ">50K"]},
}
ROWS = """name, age, workclass, hours, sex, since, income
"Doe, J.",39, State-gov,40, Male,1994-05-01,<=50K
b,50, Self-emp,13, Male,,<=50K
c,38, ?,99, Female,1994-05-01T10:00:00Z,>50K
d,53, Private,, Male,1999-12-31, >50K
e,28, Private,40, Female,1991-01-01, <=50K
f,37, Private,40, Female,1991-01-01, >50K
g,49, Private,16, Female,NA, <=50K
h,52, State-gov,45, Male,1990-01-01, >50K
"""


@pytest.fixture
def adult(tmp_path: Path) -> Callable[..., DataSpec]:
    def write(text: str = ROWS, **fields: Any) -> DataSpec:
        pytest.importorskip("pyarrow")
        path = tmp_path / "adult.csv"
        path.write_text(text, encoding="utf-8")
        return DataSpec.model_validate({"source": str(path), "schema": ADULT, **fields})

    return write


def test_a_file_of_text_gaps_and_dates_is_read(adult: Callable[..., DataSpec]) -> None:
    found = load_dataset(adult(), LogisticLoss())
    assert found.features.shape == (8, 1 + 1 + 2 + 2 + 4)
    assert found.labels.tolist() == [0, 0, 1, 1, 0, 1, 0, 1]
    assert found.classes is not None and found.classes.tolist() == found.labels.tolist()
    assert np.abs(found.features).max() <= 1.0
    swapped = load_dataset(adult(positive=["<=50K"]), LogisticLoss())
    assert (swapped.labels == 1 - found.labels).all()


def test_columns_that_place_a_record_keep_their_meaning(adult: Callable[..., DataSpec]) -> None:
    lines = ROWS.splitlines()
    for words, names in ((("rome", "bern"), ("bern", "rome")), (("1", "0"), None)):
        text = "\n".join(
            [f"{lines[0]}, round,learner", *(f"{line},{k % 3},{words[k % 2]}" for k, line in enumerate(lines[1:]))]
        )
        found = load_dataset(adult(text), LogisticLoss())
        assert found.round is not None and found.round.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
        assert found.learner is not None and found.learner.tolist() == [1, 0] * 4
        assert found.learner_names == names
    with pytest.raises(DataError, match="'round' must be an integer >= 0, got -1"):
        load_dataset(adult("\n".join([f"{lines[0]},round", *(f"{line},-1" for line in lines[1:])])), LogisticLoss())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name, age,", "name, agee,", "has none for 'age'"),
        ("name, age,", "names, age,", "'names' is not: declare it, or name it under ignored"),
        ("name, age,", "age , age,", "column names must differ"),
        (
            "b,50,",
            "b,5 0,",
            r"1 of 8 records do not fit the schema: age: not a number \(1\); the first is row 1 \(counted from 0\)",
        ),
        ("b,50,", 'b,"50,5",', "age: a number with a comma"),
        (">50K", "50K", r"4 of 8 records .*: income: none of its categories \(4\); the first is row 2"),
        ("b,50, Self-emp", "b,500, Self", r"schema: age: beyond its bounds \(1\); the first"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(adult: Callable[..., DataSpec], old: str, new: str, message: str) -> None:
    data = adult(ROWS.replace(old, new))
    with pytest.raises(DataError, match=message) as refused:
        load_dataset(data, LogisticLoss())
    told = str(refused.value).replace(str(data.source), "")
    assert "5 0" not in told and "500" not in told


@pytest.mark.parametrize("text", ["", "a\n", ROWS.splitlines()[0] + "\n"])
def test_a_file_without_records_is_refused(adult: Callable[..., DataSpec], text: str) -> None:
    with pytest.raises(DataError):
        load_dataset(adult(text), LogisticLoss())


def test_a_file_of_windows_reads_alike(adult: Callable[..., DataSpec]) -> None:
    plain = load_dataset(adult(), LogisticLoss())
    windows = load_dataset(adult("\ufeff" + ROWS.replace("\n", "\r\n")), LogisticLoss())
    assert np.array_equal(plain.features, windows.features)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ROWS.replace(",", ";").encode(), "must have commas between its columns, and has semicolons: save it with commas"),
        (b"sep=;\n" + ROWS.replace(",", ";").encode(), "has semicolons"),
        (ROWS.replace(",", "\t").encode(), "has tabs"),
        (ROWS.replace("Doe", "Doé").encode("latin-1"), "must be UTF-8"),
        (ROWS.replace("name", "nåme").encode("latin-1"), "must be UTF-8"),
        (ROWS.encode("utf-16"), "must be UTF-8"),
        (ROWS.replace("name,", '"nåm\ne",').encode("latin-1"), "must be UTF-8"),
        (ROWS.replace("e,28,", "e,28,28,").encode(), r"1 of 8 records .*: not as many values as the header \(1\); .* row 4 "),
        (ROWS.replace('"Doe, J."', '"Doe, J.').encode(), "a quote in row . .* is never closed"),
        (ROWS.partition("\n")[2].encode(), "must begin with a line of column names"),
        (ROWS.replace("name, age", ", age").encode(), "'' is not: declare it"),
        (b"", "it has no record"),
        (b"\xef\xbb\xbf\r\n", "it has no record"),
        (b"name, age", "it has no record"),
        (ROWS.splitlines()[0].encode() + b"\n", "must hold at least one record"),
        (b"\0" * 99, "must"),
    ],
    ids=range(16),
)  # fmt: skip
def test_a_file_that_is_written_otherwise_is_refused(
    adult: Callable[..., DataSpec], content: bytes, message: str
) -> None:
    data = adult()
    Path(str(data.source)).write_bytes(content)
    with pytest.raises(DataError, match=message) as refused:
        load_dataset(data, LogisticLoss())
    told = str(refused.value).replace(str(data.source), "")
    assert not any(word in told for word in ("Doe", "State-gov", "39"))


def test_names_of_columns_that_may_be_a_record_are_not_quoted(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "x.csv"
    path.write_text("63,145,63,1\n41,130,41,0\n", encoding="utf-8")
    for read in (lambda: read_cells(path), lambda: read_columns(path, None)):
        with pytest.raises(DataError, match=r"columns 0 and 2 .* have the same; is its first line a header") as refused:
            read()
        assert "63" not in str(refused.value).replace(str(path), "")


@given(
    st.lists(st.binary(max_size=30), max_size=6),
    st.sampled_from([b",", b";", b"\t", b"\n", b"\r\n", b'"', b"\0", b"\xff"]),
)
def test_whatever_a_file_holds_it_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], between: bytes
) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path_factory.mktemp("any") / "x.csv"
    for content in (between.join(parts), b"age,ward\n" + between.join(parts)):
        path.write_bytes(content)
        for read in (lambda: read_cells(path), lambda: read_columns(path, None)):
            with contextlib.suppress(DataError, SpecError):
                read()


def test_what_python_has_no_value_for_fits_no_field(tmp_path: Path) -> None:
    """And is no reason to end with an error that quotes it."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    late, day = 317_000_000_000_000_000, 1_577_923_200_000_000
    broken = arrow.Array.from_buffers(
        arrow.string(), 2, [*arrow.array(["é", "a"]).buffers()[:2], arrow.py_buffer(b"\xff\xffa")]
    )
    columns = {
        "x": arrow.array([late, day], arrow.timestamp("us")),
        "w": broken,
        "t": arrow.array([1, 2], arrow.time64("ns")),
        "n": arrow.array([10**30, 5], arrow.decimal128(38)),
    }
    parquet.write_table(arrow.table(columns), path := tmp_path / "x.parquet")
    cells = read_cells(path)[0]
    assert column(DAYS, cells["x"]) == ([[0.0]], {0: "not a date, write 2020-01-31"})
    assert column({"type": "category", "categories": ["a"]}, cells["w"])[1] == {0: "none of its categories"}
    assert column(TENS, cells["t"])[1] == dict.fromkeys(range(2), "not a number")
    assert column({**TENS, "out_of_bounds": "clip"}, cells["n"])[0] == [[1.0], [0.0]]
    with pytest.raises(DataError, match=r"'x' must be numeric, got type timestamp\[us\]"):
        read_columns(path, "n")


def test_a_schema_reads_files_alone(tmp_path: Path) -> None:
    for source in ("breast_cancer", str(tmp_path / "x.npz")):
        with pytest.raises(SpecError, match=r"a file for a schema must be \.csv or \.parquet"):
            load_dataset(DataSpec.model_validate({"source": source, "schema": ADULT}), LogisticLoss())
    with pytest.raises(SpecError, match="must be in a file that exists"):
        load_dataset(DataSpec.model_validate({"source": str(tmp_path / "x.csv"), "schema": ADULT}), LogisticLoss())


# ---- in a spec -------------------------------------------------------------------------------------------------------


def spec_file(folder: Path, schema: Any, **data: Any) -> Path:
    path = folder / "spec.yaml"
    fields = {"rounds": 4, "learners": 2, "algorithm": "ldp-dol", "data": {**data, "schema": schema}}
    path.write_text(yaml.safe_dump(fields), encoding="utf-8")
    return path


def test_a_path_stands_in_place_once_the_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "deep"
    folder.mkdir()
    (folder / "wards.yaml").write_text(WARDS, encoding="utf-8")
    named, in_place = spec_file(folder, "wards.yaml"), spec_file(tmp_path, yaml.safe_load(WARDS))
    monkeypatch.chdir(tmp_path)

    assert load_spec(named) == load_spec(in_place)
    assert load_spec(named).data.schema == WARDS_SCHEMA
    assert load(named) == load(in_place)
    made = Experiment(rounds=4, learners=2, algorithm="ldp-dol", data={"schema": folder / "wards.yaml"})
    assert made.data.schema == WARDS_SCHEMA
    assert made.replace(rounds=5).data.schema == made.data.schema
    assert made.replace(**{"data.schema": str(folder / "wards.yaml")}) == made
    assert Experiment(rounds=4, algorithm="ldp-dol", data={"schema": WARDS_SCHEMA}).data.schema == WARDS_SCHEMA


def test_a_spec_with_a_schema_goes_round(tmp_path: Path) -> None:
    spec = load_spec(spec_file(tmp_path, yaml.safe_load(WARDS)))
    for document in (yaml.safe_load(dump_spec(spec)), json.loads(json.dumps(spec.model_dump(mode="json")))):
        assert parse_spec(document, allow_imports=False) == spec
    assert spec_from_wire(spec_to_wire(spec), imports=False) == spec
    assert json.loads(build_spec_json_schema())["$defs"]["Schema"]["required"] == ["features", "label"]
    sorted_keys = json.loads(json.dumps(spec.model_dump(mode="json"), sort_keys=True))
    assert compute_plan_hash(parse_spec(sorted_keys, allow_imports=False), 9) == compute_plan_hash(spec, 9)
    other = schema_of(label={"name": "outcome", "type": "category", "categories": ["died", "home"]})
    changed = spec.model_copy(update={"data": spec.data.model_copy(update={"schema": other})})
    assert compute_plan_hash(changed, 9) != compute_plan_hash(spec, 9), "the order of classes is part of the plan"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"label": "outcome"}, "label must be left out with a schema"),
        ({"scale": "standard"}, "scale must be none with a schema"),
    ],
)
def test_what_a_schema_says_is_said_nowhere_else(tmp_path: Path, data: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_spec(spec_file(tmp_path, yaml.safe_load(WARDS), **data))


def test_no_file_is_read_for_a_spec_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "wards.yaml").write_text(WARDS, encoding="utf-8")
    document = {"rounds": 3, "algorithm": "ldp-dol", "data": {"schema": str(tmp_path / "wards.yaml")}}
    with pytest.raises(SpecError, match=r"data\.schema: "):
        parse_spec(document_from_wire(json.dumps(document)), allow_imports=False)


def test_names_of_columns_are_no_code() -> None:
    schema = {**yaml.safe_load(WARDS), "label": {"name": "os:system", "type": "boolean"}}
    document = {"rounds": 3, "algorithm": "ldp-dol", "data": {"schema": schema}}
    assert [*find_imports(document)] == []
    assert [*find_imports({**document, "loss": {"schema": {"kind": "os:system"}}})] == ["os:system"]


# ---- audits ----------------------------------------------------------------------------------------------------------


def allowed(schema: Schema, row: list[float]) -> bool:
    """Whether some record has these features and an intercept."""
    encoder, at, record = Encoder.from_schema(schema, LogisticLoss()), 0, {}
    for name, feature in schema.features.items():
        names = feature.names(name)
        own, at = row[at : at + len(names)], at + len(names)
        if (feature.missing == "flag" and own[-1] == 1.0) or (feature.missing == "neutral" and not any(own)):
            continue
        value: Any = own[0]
        match feature.type:
            case "number":
                low, high = feature.bounds  # type: ignore[attr-defined]
                value = low + (own[0] + 1) / 2 * (high - low)
            case "date":
                low, high = (day.toordinal() for day in feature.bounds)  # type: ignore[attr-defined]
                value = datetime.date.fromordinal(round(low + (own[0] + 1) / 2 * (high - low)))
            case "boolean":
                value = own[0] == 1.0
            case "category":
                value = feature.categories[own.index(1.0)]  # type: ignore[attr-defined]
        record[name] = value
    found = encoder.encode_records([record], has_labels=False)
    return not found.refusals and row[-1] == 1.0 and bool(np.allclose(found.features[0], row[:-1], atol=1e-12))


def test_an_audit_swaps_records_that_the_schema_allows(adult: Callable[..., DataSpec]) -> None:
    spec = parse_spec(
        {"rounds": 5, "learners": 2, "algorithm": "ldp-dol", "data": adult().model_dump(mode="json")},
        allow_imports=False,
    )
    prepared = prepare(spec)
    schema = spec.data.schema
    assert schema is not None
    planned = plan_audit(prepared.run, prepared.data, 0, runs=400, seed=1)
    assert len(planned.pairs) > 1
    for pair in planned.pairs:
        for records in (pair.worlds.records_0, pair.worlds.records_1):
            assert all(allowed(schema, row) for row in records.features.tolist()), pair.worlds.description


def test_canaries_are_records_that_the_schema_allows(adult: Callable[..., DataSpec]) -> None:
    data = adult().model_dump(mode="json")
    prepared = prepare(
        parse_spec({"rounds": 5, "learners": 2, "algorithm": "ldp-dol", "data": data}, allow_imports=False)
    )
    schema = prepared.run.spec.data.schema
    assert schema is not None
    canaries = draw_canaries(prepared.run, prepared.data, 2, np.random.default_rng(0))
    first, second = (canaries.build_record(0, coin, prepared.data.n_features).tolist() for coin in (0, 1))
    assert first != second and allowed(schema, first) and allowed(schema, second)
    for own in canaries.insert_into(prepared.data).learners:
        assert all(allowed(schema, row) for row in own.features.tolist())

    only = of_one({"type": "category", "categories": ["a"]}).model_dump(mode="json")
    Path(data["source"]).write_text("x,y\na,a\na,b\na,a\na,b\n", encoding="utf-8")
    spec = {"rounds": 5, "learners": 1, "algorithm": "ldp-dol", "data": {**data, "schema": only}}
    prepared = prepare(parse_spec(spec, allow_imports=False))
    with pytest.raises(SpecError, match=r"two different records, but data\.schema allows one only"):
        draw_canaries(prepared.run, prepared.data, 1, np.random.default_rng(0))


def test_what_is_made_up_is_at_the_ends_and_in_the_middle() -> None:
    schema = WARDS_SCHEMA
    loud, quiet = schema.make_max_norm_record(), schema.make_min_norm_record()
    assert np.linalg.norm(loud) == pytest.approx(math.sqrt(5))
    assert quiet.tolist()[1:] == [0, 1, 0, 1, 0, 0, 0] and abs(quiet[0]) < 1e-3
    for row in (
        loud,
        quiet,
        schema.make_opposite_record(loud),
        schema.make_opposite_record(schema.make_opposite_record(loud)),
    ):
        assert allowed(schema, [*row.tolist(), 1.0])
    assert schema.make_opposite_record(loud).tolist() == [-1, -1, -1, -1, 0, 1, 0, 0]
