"""Drafts of schemas: what columns are taken for, and that a draft fits whatever it was made from."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sottovoce_core.data.cells import Cells
from sottovoce_core.data.encoding import Encoder
from sottovoce_core.data.schema_inference import draft_schema
from sottovoce_core.data.spec import Schema
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.losses import Loss
from sottovoce_core.losses.linear import RidgeLoss, SoftmaxLoss
from sottovoce_core.spec import load_schema

pytestmark = pytest.mark.each

MANY = 20
"""Records of the tables below."""


def taken(values: Cells, name: str = "x") -> tuple[Any, str]:
    """What a column is taken for, and why."""
    n = len(values)
    found = draft_schema({name: values, "label": [k % 2 for k in range(n)], "z": [1.5] * n}).columns[0]
    return found.field, found.why


def spread(*values: Any) -> list[Any]:
    """These values again and again."""
    return [values[k % len(values)] for k in range(MANY)]


def loss_for(schema: Schema) -> Loss:
    return RidgeLoss() if schema.label.classes is None else SoftmaxLoss(classes=len(schema.label.classes))


# ---- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "bounds"),
    [
        (["17", "94", "33"], [0, 100]), (["0", "100"], [0, 100]), (["0.2", "0.73"], [0, 0.8]), (["-40", "35"], [-40, 40]),
        (["-94", "-17"], [-100, 0]), (["1950", "2023"], [1950, 2030]), (["99.5", "100"], [99.5, 100]),
        (["36.1", "41.9"], [36, 42]), (["5", "5"], [0, 5]), (["0", "0"], [0, 1]), (["-3", "-3"], [-3, 0]), (["0.1"], [0, 0.1]),
        (["2020", "2020.0"], [0, 3000]), (["1e-7", "3e-7"], [0, 3e-7]), (["0", "1e99"], [0, 1e99]),
        (["-1e100", "1e100"], [-1e100, 1e100]), (np.array([17.0, 94.0]), [0, 100]), ([1.5, 2, None], [1.5, 2.0]),
        (["1.50", "120"], [0, 200]),
    ],
    ids=repr,
)  # fmt: skip
def test_bounds_of_numbers_are_rounded_outward(values: Any, bounds: list[float]) -> None:
    field, why = taken(values)
    assert (field["type"], field["bounds"]) == ("number", pytest.approx(bounds, rel=1e-12, abs=0))
    assert "in the sample" in why


@given(st.lists(st.floats(-1e100, 1e100), min_size=1, max_size=4))
def test_bounds_hold_what_was_seen_and_are_short(numbers: list[float]) -> None:
    field, _ = taken(np.array([*numbers, 0.5]))  # no boolean
    low, high = field["bounds"]
    lowest, highest = min(*numbers, 0.5), max(*numbers, 0.5)
    assert low <= lowest <= highest <= high <= 1e100 and low >= -1e100
    wide = max(high - low, 2e-323)
    assert lowest - low <= wide / 2 or low == 0
    assert high - highest <= wide / 2 or high == 0


@pytest.mark.parametrize(
    ("values", "bounds"),
    [
        (["2023-11-30", "2024-05-01"], ("2023-01-01", "2025-01-01")),
        (["2024-02-29T23:30:00-05:00", "2024-02-29 10:00"], ("2024-01-01", "2025-01-01")),
        (["2023-12-31T23:30:00-05:00"], ("2024-01-01", "2025-01-01")),  # in UTC
        ([datetime.date(9999, 5, 1), None], ("9999-01-01", "9999-12-31")),
        ([datetime.datetime(1, 1, 1)], ("0001-01-01", "0002-01-01")),
        (np.array(["2020-05-05"], dtype="datetime64[s]"), ("2020-01-01", "2021-01-01")),
    ],
    ids=repr,
)
def test_bounds_of_dates_are_years(values: Any, bounds: tuple[str, str]) -> None:
    field, _ = taken(values)
    assert (field["type"], tuple(map(str, field["bounds"]))) == ("date", bounds)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        (spread("yes", "no"), {"type": "boolean"}),
        (spread("TRUE"), {"type": "boolean"}),
        (spread(0, 1), {"type": "boolean"}),
        (spread("1", "0", ""), {"type": "boolean", "missing": "flag"}),
        (spread(True, False, None), {"type": "boolean", "missing": "flag"}),
        (spread("north", "south ", " icu"), {"type": "category", "categories": ["icu", "north", "south"]}),
        (spread("yes", "no", "off and on"), {"type": "category", "categories": ["no", "off and on", "yes"]}),
        (spread("01234", "80331"), {"type": "category", "categories": ["01234", "80331"]}),
        ([*spread("80331"), "01234"], {"type": "category", "categories": ["01234", "80331"]}),
        (spread("a", "?", "NA"), {"type": "category", "categories": ["a"], "missing": "flag"}),
        (spread("none", "mild", "severe"), {"type": "category", "categories": ["mild", "none", "severe"]}),
        (spread("1.5", "none", "-"), {"type": "number", "bounds": [0, 2], "missing": "flag"}),
        (spread("2020-01-01", "unknown"), {"missing": "flag", "type": "date",
                                          "bounds": [datetime.date(2020, 1, 1), datetime.date(2021, 1, 1)]}),
        (spread(1.5, math.nan), {"type": "number", "bounds": [0, 2], "missing": "flag"}),
        (np.array(spread(1.5, math.nan)), {"type": "number", "bounds": [0, 2], "missing": "flag"}),
        (["a", "b", "c", "d"], {"type": "category", "categories": ["a", "b", "c", "d"]}),  # of four records
    ],
    ids=repr,
)  # fmt: skip
def test_what_columns_are_taken_for(values: Any, field: dict[str, Any]) -> None:
    assert taken(values)[0] == field


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("x", [None, "", "NA", "n/a"], "no record of the sample has a value"),
        ("x", [f"P{k:04}" for k in range(MANY)], "nearly all values differ"),
        ("id", range(7, 7 + MANY), "it names records"),
        ("patient_id", [str(k) for k in range(MANY)], "it names records"),
        ("patientId", [f"a{k}" for k in range(4)], "it names records"),
        ("Case ID", [k % 60 for k in range(3 * MANY)], "it names records"),
        ("x", ["word " * 50, "b"] * 10, "free text"),
        ("x", [f"{k % 60}a" for k in range(1_000)], "60 different words in 1,000 records are too many"),
        ("x", [f"{k % 15}a" for k in range(MANY)], "15 different words in 20 records are too many"),
        ("x", spread("22,5", "1,250.0"), r"numbers, but for: a number with a comma, write 1234.5 \(20\)"),
        ("x", [*spread("1", "2.5"), "inf", "five"],
         r"numbers, but for: (not a finite number \(1\); not a number|not a number \(1\); not a finite number) \(1\)"),
        ("x", spread("1", "1e101"), "some numbers are beyond 1e\\+100"),
        ("x", spread("05.03.2024", "06.03.2024"), r"dates, but for: not a date, write 2020-01-31 \(20\)"),
        ("x", [*spread("2024-01-01"), "3/5/2024"], r"dates, but for: .* \(1\)"),
        ("x", [b"a"] * 4, "of a kind that no field takes"),
        ("x", [[1]] * 4, "of a kind that no field takes"),
        ("x", ["a", True], "of several kinds"),
        ("x", ["a", datetime.date(2020, 1, 1), 1.5, 10**400], "of several kinds"),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_not_learned_from(name: str, values: Any, why: str) -> None:
    field, told = taken(list(values), name)
    assert field is None
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(told)


def test_codes_of_a_few_wards_are_categories_and_other_names_are_none() -> None:
    assert taken(spread(1, 2, 3), "ward_id")[0] == {"type": "category", "categories": [1, 2, 3]}
    assert taken(spread("a", "b"), "ward id")[0] == {"type": "category", "categories": ["a", "b"]}
    for name in ("paid", "humid", "identity", "ida"):
        assert taken([k + 10 for k in range(MANY)], name)[0]["type"] == "number"


# ---- labels ----------------------------------------------------------------------------------------------------------


def label_of(values: Any, **columns: Any) -> Any:
    return draft_schema({"x": [1.5] * len(values), **columns, "outcome": values}).label.field


@pytest.mark.parametrize(
    ("values", "field"),
    [
        (spread("home", "died"), {"type": "category", "categories": ["died", "home"]}),
        (spread("yes", "no"), {"type": "boolean"}),
        (spread(0, 1), {"type": "boolean"}),
        (spread("1", "2"), {"type": "category", "categories": [1, 2]}),
        (np.array(spread(0.0, 1.0, 2.0)), {"type": "category", "categories": [0, 1, 2]}),
        (spread("1.5", "2"), {"type": "number", "bounds": [1.5, 2]}),
        ([str(k) for k in range(MANY)], {"type": "number", "bounds": [0, 20]}),
        ([k * 100 for k in range(21)] * 5, {"type": "number", "bounds": [0, 2000]}),
    ],
    ids=repr,
)
def test_what_labels_are_taken_for(values: Any, field: dict[str, Any]) -> None:
    assert label_of(values) == field


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (spread("a", ""), "'outcome' must have a value in every record, got one missing in 10 of 20"),
        ([None] * 4, "missing in 4 of 4"),
        (spread("2020-01-01"), "got another: 2020-01-01 to 2020-01-01 in the sample"),
        ([f"{k}a" for k in range(MANY)], "nearly all values differ"),
        (["word " * 50, "b"], "free text"),
        (spread("a"), "two values or more"),
        (spread(3), "two values or more"),
        (spread("1,5", "2,5"), "a number with a comma"),
        ([b"a"] * 4, "no field takes"),
    ],
    ids=repr,
)
def test_a_label_that_cannot_be_learned_is_refused(values: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        label_of(values)


def test_which_column_is_the_label() -> None:
    columns: dict[str, Cells] = {"y": [1, 0], "a": [1.5, 2], "label ": [0, 1]}
    assert draft_schema(columns).label.name == "label"
    assert draft_schema(columns, " y").label.name == "y"
    assert draft_schema({"y": [1, 0], "a": [2, 1]}).label.name == "y"
    assert draft_schema({"b": [1, 0], "a": [2, 1]}).label.name == "a"
    with pytest.raises(SpecError, match=r"one of the columns, got 'z' \('y', 'a', 'label'\)"):
        draft_schema(columns, "z")
    with pytest.raises(DataError, match="it names records"):
        draft_schema({"a": [3, 2], "patient_id": [1, 2]})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "there must be one, with a field to learn from"),
        ({"a": [1]}, "there must be one, with a field to learn from"),
        ({"a": [], "y": []}, "there must be one"),
        ({"": [1], "y": [0]}, r"column 0 \(counted from 0\) has none: name it"),
        ({"a": [1], " a": [1], "y": [0]}, "names that differ"),
        ({"a": [1, 2], "y": [0]}, "equally many"),
        ({"a": [None] * 2, "id": [1, 2], "y": [0, 1]}, r"none \('a': no record .* a value; 'id': it names records\)"),
        ({"a\nb": [1.5, 2], "y": [0, 1]}, "1 to 200 printable"),
        ({"round": [1.5, 2], "y": [0, 1]}, "learner and round place a record"),
        ({"a": ["b", "c"], "a=b": [1, 0], "y": [0, 1]}, "got 'a=b' twice"),
    ],
)
def test_what_gives_no_schema_is_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        draft_schema(columns)


# ---- the file --------------------------------------------------------------------------------------------------------


def test_a_draft_is_a_file_for_people() -> None:
    columns = {
        "id": range(MANY),
        "age": [17 + k for k in range(MANY)],
        "ward": spread("north", "no", "icu", ""),
        "stay": spread("1.5", "n/a"),
        "outcome": spread("home", "died"),
    }
    text = draft_schema({name: list(values) for name, values in columns.items()}).text
    assert text.partition("features:\n")[2] == (
        "  # 17 to 36 in the sample\n"
        "  age: {type: number, bounds: [0, 40]}\n"
        "  # missing in 5 of 20\n"
        "  ward: {type: category, categories: [icu, 'no', north], missing: flag}\n"
        "  # 1.5 to 1.5 in the sample; missing in 10 of 20\n"
        "  stay: {type: number, bounds: [0, 2], missing: flag}\n"
        "ignored:\n"
        "  # it names records\n"
        "  - id\n"
        "# classes 0, 1, ... in this order; of two kinds, the later half counts as 1, or what data.positive names\n"
        "label: {name: outcome, type: category, categories: [died, home]}\n"
        "missing_values: [NA, '?', n/a]\n"
    )
    assert "must be public" in text.partition("features:\n")[0]


_NAMES = st.one_of(
    st.sampled_from(["age", "id", "ward_id", "no", "1", "2020-01-01", "~", "a: b", "# a", "'", "{", "a=b", "a" * 200, " é "]),
    st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=5),
    st.text(max_size=2),
)  # fmt: skip
_WORDS = st.one_of(
    st.sampled_from(["a", "b", "yes", "no", "0", "1", "01", "NA", "", "none", "-", "nan", "inf", "1,5", "1.5", "null", "~",
                     "1e400", "2020-02-29", "31.12.2020", "2020-01-01T00:00:00+14:00", "a\nb", "a: b", "'", "\\", "w" * 201]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    st.integers(-3, 30).map(str),
)  # fmt: skip
_CELLS = st.one_of(_WORDS, st.none(), st.booleans(), st.floats(), st.integers(), st.dates(), st.datetimes(), st.decimals(),
                   st.just(10**400), st.just([1]))  # fmt: skip
_COLUMNS = st.one_of(
    *(st.lists(each, min_size=6, max_size=6)
      for each in (_WORDS, _CELLS, st.sampled_from(["a", "b", "?"]), st.floats(-1e3, 1e3), st.dates().map(str), st.booleans())),
    st.lists(st.floats(), min_size=6, max_size=6).map(np.array),
)  # fmt: skip


_LABELS = st.one_of(
    *(st.lists(each, min_size=6, max_size=6)
      for each in (st.sampled_from(["a", "b "]), st.sampled_from([1, 2]), st.floats(-1e9, 1e9), st.booleans(), _WORDS)),
)  # fmt: skip


@given(st.dictionaries(_NAMES, _COLUMNS, max_size=4), _LABELS)
def test_a_draft_fits_what_it_was_made_from(
    tmp_path_factory: pytest.TempPathFactory, columns: Mapping[str, Cells], label: list[Any]
) -> None:
    """Whatever the table, once it is accepted: the file loads, and says what was drafted."""
    table: dict[str, Cells] = {**columns, "label": label, "z": [1.5] * 6}
    try:
        made = draft_schema(table)
    except DataError:
        return
    (path := tmp_path_factory.mktemp("draft") / "schema.yaml").write_text(made.text, encoding="utf-8")
    schema = load_schema(path)
    assert schema == Schema.model_validate(made.document)
    found = Encoder.from_schema(schema, loss_for(schema)).encode_columns(table)
    assert found.refusals == {} and len(found.labels) == 6
    assert {*schema.features, *schema.ignored, schema.label.name} == {name.strip() for name in map(_composed, table)}


def _composed(name: str) -> str:
    import unicodedata

    return unicodedata.normalize("NFC", name)


def test_a_draft_of_a_draft_is_the_same() -> None:
    columns: dict[str, Cells] = {"age": ["17", "94", ""], "ward": ["no", "yes", "maybe"], "y": ["1", "0", "1"]}
    made = draft_schema(columns)
    assert draft_schema(columns).text == made.text
    assert yaml.safe_load(made.text)["features"] == made.document["features"]
    assert draft_schema({name: [*cells, *cells] for name, cells in columns.items()}).document == made.document


def test_a_hundred_thousand_records(tmp_path: Path) -> None:
    """By what they say, not by how many they are."""
    n = 100_000
    columns: dict[str, Cells] = {
        "id": [f"P{k}" for k in range(n)],
        "age": [str(k % 91) for k in range(n)],
        "weight": np.linspace(40.0, 120.0, n),
        "ward": [("north", "south", "icu", "")[k % 4] for k in range(n)],
        "since": [str(datetime.date.fromordinal(730_000 + k % 5_000)) for k in range(n)],
        "outcome": [("home", "died")[k % 2] for k in range(n)],
    }
    made = draft_schema(columns)
    assert [each.field and each.field["type"] for each in made.columns] == [
        None,
        "number",
        "number",
        "category",
        "date",
    ]
    schema = Schema.model_validate(made.document)
    assert Encoder.from_schema(schema, loss_for(schema)).encode_columns(columns).accepted_mask.all()
