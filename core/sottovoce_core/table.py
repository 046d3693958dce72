"""A small table of results: columns by name, with export to pandas, polars, Arrow, CSV and LaTeX."""

from __future__ import annotations

import csv
import html
import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from sottovoce_core.errors import SpecError
from sottovoce_core.text import escape_control, escape_formula, suggest_name

Column = npt.NDArray[Any]
MAX_DISPLAYED_ROWS = 40
"""Maximum number of rows that a table shows on the screen; files hold all of them."""
_MAX_LISTED_VALUES = 12
"""Maximum number of values of a column that an error lists."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Table:
    """Named columns of equal length, in order.

    Numbers are float64 or int64; a missing value is not-a-number among numbers, None among words. Exported tables have the same
    columns in the same order.

    Attributes:
        columns: name to `(rows,)`.

    Raises:
        SpecError: the columns differ in length.

    >>> table = Table.from_rows(["learner", "epsilon"], [("north", 1.5), (None, 2.0)])
    >>> table
    learner  epsilon
    north        1.5
    –              2
    >>> table["epsilon"].max()
    np.float64(2.0)
    >>> table.to_dict()
    {'learner': ['north', None], 'epsilon': [1.5, 2.0]}
    >>> table.where(learner="north")
    learner  epsilon
    north        1.5
    """

    columns: Mapping[str, Column]

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            raise SpecError(f"the columns of a table must be equally long, got {lengths}")

    @classmethod
    def from_rows(cls, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Self:
        """Make a table of rows, each with one value per name."""
        values = list(zip(*rows, strict=True)) or [()] * len(names)
        return cls({name: _build_column(column) for name, column in zip(names, values, strict=True)})

    @classmethod
    def from_facts(cls, facts: Mapping[str, object]) -> Self:
        """Make a table with a row for each named fact."""
        return cls.from_rows(("", "value"), [*facts.items()])

    def __len__(self) -> int:
        """Count the rows."""
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, name: str) -> Column:
        """Return a column.

        Raises:
            SpecError: no such column.
        """
        if name not in self.columns:
            raise SpecError(
                f"a column must be one of {', '.join(self.columns)}, got {name}{suggest_name(name, self.columns)}"
            )
        return self.columns[name]

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Iterate over the rows, as Python's own values."""
        return zip(*self.to_dict().values(), strict=True)

    def where(self, **wanted: Any) -> Table:
        """Return the rows whose columns have these values (None: missing).

        Raises:
            SpecError: no such column, or no row with such a value.
        """
        kept = np.ones(len(self), dtype=bool)
        for name, value in wanted.items():
            values = self[name].tolist()
            found = np.array([_is_missing(each) if value is None else each == value for each in values], dtype=bool)
            if len(self) and not found.any():
                known = ", ".join(_format_value(each) for each in list(dict.fromkeys(values))[:_MAX_LISTED_VALUES])
                more = ", ..." if len(set(map(str, values))) > _MAX_LISTED_VALUES else ""
                near = suggest_name(value, {each for each in values if isinstance(each, str)})
                raise SpecError(f"{name} must be one of the column's values, {known}{more}, got {value!r}{near}")
            kept &= found
        return Table({name: column[kept] for name, column in self.columns.items()})

    # ---- other forms -----------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, list[Any]]:
        """Return columns as lists of Python's own values."""
        return {name: column.tolist() for name, column in self.columns.items()}

    def to_numpy(self) -> npt.NDArray[Any]:
        """Return a structured array, `(rows,)`."""
        fields = [(name, column.dtype) for name, column in self.columns.items()]
        made: npt.NDArray[Any] = np.empty(len(self), dtype=fields)
        for name, column in self.columns.items():
            made[name] = column
        return made

    def to_arrow(self) -> Any:
        """Return a `pyarrow.Table`; missing values are null.

        Raises:
            SpecError: pyarrow is not installed.
        """
        arrow = _import_library("pyarrow")
        return arrow.table({name: arrow.array(column, from_pandas=True) for name, column in self.columns.items()})

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame`.

        Raises:
            SpecError: pandas is not installed.
        """
        return _import_library("pandas").DataFrame(dict(self.columns))

    def to_polars(self) -> Any:
        """Return a `polars.DataFrame`; missing values are null.

        Raises:
            SpecError: polars is not installed.
        """
        known = {
            name: [None if _is_missing(each) else each for each in cells] for name, cells in self.to_dict().items()
        }
        return _import_library("polars").DataFrame(known)

    # ---- files -----------------------------------------------------------------------------------------------

    def to_csv(self, path: Path | str) -> None:
        """Write a CSV file with a header: numbers in full, missing values as empty cells, text escaped against formulas."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self.columns)
            writer.writerows(
                [["" if _is_missing(cell) else escape_formula(cell) for cell in row] for row in self.rows()]
            )

    def to_latex(self, path: Path | str) -> None:
        r"""Write a `tabular` in the style of the package booktabs, for `\input`; numbers to four significant digits."""
        heads, *rows = ([_escape_latex(cell) for cell in row] for row in self._format_rows())
        form = "".join("r" if self._is_numeric(name) else "l" for name in self.columns)
        lines = [
            rf"\begin{{tabular}}{{{form}}}",
            r"\toprule",
            _format_latex_row(heads),
            r"\midrule",
            *map(_format_latex_row, rows),
        ]
        text = "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])
        Path(path).write_text(text + "\n", encoding="utf-8")

    # ---- on the screen ---------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        texts = self._format_rows(MAX_DISPLAYED_ROWS)
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        right = [self._is_numeric(name) for name in self.columns]
        lines = [
            "  ".join(
                cell.rjust(width) if to_right else cell.ljust(width)
                for cell, width, to_right in zip(row, widths, right, strict=True)
            ).rstrip()
            for row in texts
        ]
        more = len(self) - MAX_DISPLAYED_ROWS
        return "\n".join(lines + ([f"… {more:,} more rows"] if more > 0 else []))

    def _repr_html_(self) -> str:
        """Render the table as HTML, for notebooks."""
        heads, *rows = ([html.escape(cell) for cell in row] for row in self._format_rows(MAX_DISPLAYED_ROWS))
        head = "".join(f"<th>{cell}</th>" for cell in heads)
        body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
        more = f"<p>… {len(self) - MAX_DISPLAYED_ROWS:,} more rows</p>" if len(self) > MAX_DISPLAYED_ROWS else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"

    def _format_rows(self, max_rows: int | None = None) -> list[list[str]]:
        """Return header and rows as display text."""
        first = Table({name: column[:max_rows] for name, column in self.columns.items()})
        return [list(self.columns), *([_format_value(cell) for cell in row] for row in first.rows())]

    def _is_numeric(self, name: str) -> bool:
        return self[name].dtype.kind in "iuf"


def _build_column(values: Sequence[Any]) -> Column:
    """Return a column: numbers as numbers, everything else unchanged."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return np.asarray(values, dtype=None if values else np.float64)
    made: Column = np.empty(len(values), dtype=object)
    made[:] = values
    return made


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _format_value(value: Any) -> str:
    if _is_missing(value):
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else escape_control(str(value))


def _format_latex_row(cells: Sequence[str]) -> str:
    return rf"{' & '.join(cells)} \\"


def _escape_latex(text: str) -> str:
    """Escape plain text for LaTeX."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--"}
    special |= {"ε": r"$\varepsilon$", "±": r"$\pm$", "−": "$-$", "∞": r"$\infty$"}
    text = "".join(special.get(sign, f"\\{sign}" if sign in "#$%&_{}" else sign) for sign in text)
    return {"inf": r"$\infty$", "-inf": r"$-\infty$"}.get(text, text)


def _import_library(name: str) -> Any:
    """Import a library for export, only when needed.

    Raises:
        SpecError: the library is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise SpecError(f"a table for {name} needs {name}: pip install {name}") from None
