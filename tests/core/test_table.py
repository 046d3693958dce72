"""A table of results, and the ways out of it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from sottovoce_core.errors import SpecError
from sottovoce_core.table import MAX_DISPLAYED_ROWS, Table

ROWS = [("north", 1, 0.5), (None, 2, math.nan), ("a_b & <c>", 3, math.inf)]


def table() -> Table:
    return Table.from_rows(["learner", "rounds", "mean"], ROWS)


def test_columns_have_the_types_of_their_values() -> None:
    kinds = {name: column.dtype for name, column in table().columns.items()}

    assert kinds == {"learner": np.dtype(object), "rounds": np.dtype(np.int64), "mean": np.dtype(np.float64)}
    assert table().to_numpy()["rounds"].tolist() == [1, 2, 3]
    assert len(Table.from_rows(["a"], [])) == 0


def test_rows_are_chosen_by_value() -> None:
    assert [row[1] for row in table().where(learner=None).rows()] == [2]
    assert len(table().where(learner="north", rounds=2)) == 0


def test_what_is_missing_among_numbers_is_chosen_too() -> None:
    assert [row[1] for row in table().where(mean=None).rows()] == [2]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"metric": 1}, "a column must be one of learner, rounds, mean, got metric"),
        ({"learner": "nrth"}, r"learner must be one of the column's values, north, –, a_b & <c>, got 'nrth'"),
        ({"rounds": "1"}, "rounds must be one of the column's values, 1, 2, 3, got '1'"),
    ],
)
def test_what_no_row_has_is_refused_with_what_there_is(wanted: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        table().where(**wanted)
    assert len(Table.from_rows(["a"], []).where(a=1)) == 0
    with pytest.raises(SpecError, match=r"0, 1, .*, 11, \.\.\., got -1"):
        Table.from_rows(["a"], [(k,) for k in range(30)]).where(a=-1)


def test_columns_must_be_equally_long() -> None:
    with pytest.raises(SpecError, match=r"equally long, got \{'a': 1, 'b': 2\}"):
        Table({"a": np.zeros(1), "b": np.zeros(2)})


def test_arrow_has_null_for_what_is_missing() -> None:
    arrow = pytest.importorskip("pyarrow")
    found = table().to_arrow()

    assert [str(kind) for kind in found.schema.types] == ["string", "int64", "double"]
    assert found.column("learner").null_count == found.column("mean").null_count == 1
    assert isinstance(found, arrow.Table)


def test_pandas_and_polars_hold_the_same() -> None:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    pandas_frame, polars_frame = table().to_pandas(), table().to_polars()

    assert isinstance(pandas_frame, pandas.DataFrame)
    assert isinstance(polars_frame, polars.DataFrame)
    assert pandas_frame["rounds"].tolist() == polars_frame["rounds"].to_list() == [1, 2, 3]
    assert polars_frame["mean"].to_list() == [0.5, None, math.inf]
    assert list(pandas_frame.columns) == polars_frame.columns == ["learner", "rounds", "mean"]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)

    with pytest.raises(SpecError, match="pip install pandas"):
        table().to_pandas()


def test_csv_is_in_full(tmp_path: Path) -> None:
    exact = Table.from_rows(["name", "value"], [("a,b", 0.1 + 0.2), (None, math.nan)])
    exact.to_csv(tmp_path / "t.csv")

    assert (tmp_path / "t.csv").read_text(encoding="utf-8") == 'name,value\n"a,b",0.30000000000000004\n,\n'


def test_latex_is_escaped(tmp_path: Path) -> None:
    table().to_latex(tmp_path / "t.tex")
    lines = (tmp_path / "t.tex").read_text(encoding="utf-8").splitlines()

    assert lines[0] == r"\begin{tabular}{lrr}"
    assert lines[4:7] == [r"north & 1 & 0.5 \\", r"-- & 2 & -- \\", r"a\_b \& <c> & 3 & $\infty$ \\"]


def test_long_tables_are_cut_on_the_screen_alone() -> None:
    long = Table.from_rows(["k"], [(k,) for k in range(MAX_DISPLAYED_ROWS + 5)])

    assert repr(long).splitlines()[-1] == "… 5 more rows"
    assert len(repr(long).splitlines()) == MAX_DISPLAYED_ROWS + 2
    assert len(list(long.rows())) == MAX_DISPLAYED_ROWS + 5


def test_notebooks_see_no_markup_of_the_values() -> None:
    assert "a_b &amp; &lt;c&gt;" in table()._repr_html_()
