"""Columns of `.csv` and `.parquet` files: as numbers, or as they stand there for a schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce.arrays import FloatArray, as_floats
from sottovoce.data.cells import OTHER, normal
from sottovoce.data.files import PLACEMENT, AnyArray, RawTable, import_extra
from sottovoce.data.first_line import LABELS, why_names
from sottovoce.data.header import listed
from sottovoce.errors import DataError, SpecError

_DECLARE = "declare its fields in a schema (`sottovoce schema infer` drafts one from public records)"
_LONGEST_LINE = 2**24
"""Bytes of a header line that are looked at."""
OTHER_WIDTH = "not as many values as the header"
_NO_VALUE = (ValueError, OverflowError)  # those of Arrow are ValueErrors, too


def read_columns(path: Path, label: str | None) -> RawTable:
    """Read a `.csv` (with a header line) or `.parquet` file.

    Args:
        path: the file; its suffix tells the format.
        label: the label column; None: `label`, else `y`, else the last one. The columns `learner` and `round` place a
            record; every other column is a feature.

    Raises:
        DataError: unreadable, an empty cell, or a feature column that is not numeric (named).
        SpecError: no such label column; pyarrow is not installed.
    """
    table, names, header = _named_table(path, label)
    label = _label_column(names, label, path)
    features = [name for name in names if name != label and name not in PLACEMENT]
    if not features:
        raise DataError(f"{path} must have a feature column beside {label!r}, got the columns {names}")
    columns = {name: _values(table, name, path) for name in names}
    if odd := [name for name in features if columns[name].dtype.kind != "f"]:
        told = " and ".join(
            f"column {name!r} must be numeric, got type {table.schema.field(name).type}" for name in odd[:12]
        )
        raise DataError(f"{path}: {told}; {_DECLARE}, or drop {'it' if len(odd) == 1 else 'them'}")
    matrix = np.column_stack([columns[name] for name in features])
    placed = columns.get("learner"), columns.get("round")
    return RawTable(as_floats(matrix), columns[label], tuple(features), *placed, label=label, header=header)


def column_features(path: Path, wanted: Sequence[str] | None, label: str | None) -> tuple[FloatArray, tuple[str, ...]]:
    """Records of a `.csv` or `.parquet` file that are to be predicted, without their labels.

    Args:
        path: the file.
        wanted: names of the features, in their order; None: all columns but the label and those of `PLACEMENT`.
        label: of the label column, where there is one; None: `label` or `y`.

    Returns:
        `(records, features)`, and the names.

    Raises:
        DataError: unreadable, a column is missing or not numeric, or a cell is empty.
        SpecError: pyarrow is not installed.
    """
    table, names, _ = _named_table(path, label)
    others = {*PLACEMENT, *(LABELS if label is None else (label,))}
    if wanted is None:
        wanted = [name for name in names if name not in others]
    if lacking := [name for name in wanted if name not in names]:
        raise DataError(f"{path} must have a column for every feature of the run, and has none for {listed(lacking)}")
    columns = {name: _values(table, name, path) for name in wanted}
    if odd := [name for name, column in columns.items() if column.dtype.kind != "f"]:
        raise DataError(f"{path}: column {odd[0]!r} must be numeric, got type {table.schema.field(odd[0]).type}")
    return as_floats(np.column_stack([*columns.values()])), tuple(columns)


def read_cells(path: Path, ragged: list[int] | None = None) -> tuple[dict[str, Any], AnyArray | None, AnyArray | None]:
    """Read a `.csv` (with a header line) or `.parquet` file as a schema needs it: nothing is taken for a number yet.

    Args:
        path: the file; its suffix tells the format.
        ragged: gets the places of rows that have not as many values as the header, which are left out then; None: there must be
            none. Where rows are so, nothing places a record.

    Returns:
        Columns by name, text of a `.csv`; and the columns `learner` and `round`, as `RawTable` has them, where there are such.

    Raises:
        DataError: unreadable, or an empty cell among those that place a record.
        SpecError: pyarrow is not installed.
    """
    table = _arrow_table(path, as_text=True, ragged=ragged)
    names = _names_of(table.schema, path)
    placed = {normal(name): name for name in names if normal(name) in PLACEMENT}
    columns = {name: _cells(table.column(name)) for name in names if name not in placed.values()}
    learner, rounds = (_values(table, placed[name], path) if name in placed else None for name in PLACEMENT)
    return columns, learner, rounds


def require_names(path: Path, label: str | None = None) -> None:
    """Refuse a `.csv` file whose first line is a record.

    Args:
        path: the file; its suffix tells the format.
        label: the label column, where somebody has said it.

    Raises:
        DataError, SpecError: as `read_columns`.
    """
    if path.suffix.lower() == ".csv":
        table = _arrow_table(path)
        why_names(_names_of(table.schema, path), table.column, label, path)


def _named_table(path: Path, label: str | None) -> tuple[Any, list[str], str | None]:
    """A file's records, one at least, the names of its columns, and why these are names where it is not plain.

    Raises:
        DataError: unreadable, without names or without records.
        SpecError: pyarrow is not installed.
    """
    table = _arrow_table(path)
    names = _names_of(table.schema, path, compared=str)
    why = why_names(names, table.column, label, path) if path.suffix.lower() == ".csv" else None
    if not table.num_rows:
        raise DataError(f"{path} must hold at least one record, and has column names alone")
    return table, names, why


def _names_of(columns: Any, path: Path, compared: Callable[[str], str] = normal) -> list[str]:
    """The names of an Arrow schema's columns; no error quotes them, for a file without a header line has a record in their place.

    Raises:
        DataError: two are the same as they are compared, or one is no text.
    """
    try:
        names: list[str] = columns.names
    except UnicodeDecodeError:
        raise DataError(f"{path} must be a readable {path.suffix} file: {_AS_UTF_8}") from None
    known = dict[str, int]()
    for k, name in enumerate(names):
        if (first := known.setdefault(compared(name), k)) != k:
            raise DataError(
                f"{path}: column names must differ, and columns {first} and {k} (counted from 0) have the same; is its first "
                "line a header?"
            )
    return names


def _cells(column: Any) -> Any:
    """A column as numbers where all are, else as a list."""
    arrow = import_extra("pyarrow", "pyarrow", "reading columns")
    types = arrow.types
    if types.is_timestamp(column.type):  # nanoseconds are for pandas
        column = column.cast(arrow.timestamp("us", column.type.tz), safe=False)
    numeric = types.is_integer(column.type) or types.is_floating(column.type)
    return column.to_numpy() if numeric and not column.null_count else _values_of_python(column)


def _values_of_python(column: Any) -> list[Any]:
    """A column as a list; `OTHER` where Python has no such value: the year 12020, text that is no UTF-8, nanoseconds."""
    try:
        return list(column.to_pylist())
    except _NO_VALUE:
        return [_value_of_python(cell) for cell in column]


def _value_of_python(cell: Any) -> Any:
    try:
        return cell.as_py()
    except _NO_VALUE:
        return OTHER


def _arrow_table(path: Path, *, as_text: bool = False, ragged: list[int] | None = None) -> Any:
    """The file as a pyarrow table; `as_text`: with the cells of a `.csv` as they stand there, but for those of `PLACEMENT`.

    Args:
        path, ragged: as of `read_cells`.
        as_text: see above.
    """
    arrow = import_extra("pyarrow", "pyarrow", f"reading {path.suffix} files")
    try:
        if path.suffix.lower() == ".csv":
            return _csv_table(path, as_text=as_text, ragged=ragged)
        # One file, not a data set: a folder named a=b on the way to it must not become a column.
        return import_extra("pyarrow.parquet", "pyarrow", "reading .parquet files").ParquetFile(path).read()
    except OSError as error:
        raise DataError(f"{path} must be a readable {path.suffix} file: {error.strerror or 'it is broken'}") from None
    except arrow.ArrowException as error:  # its text may quote a row: what comes after the last colon
        raise DataError(f"{path} must be a readable {path.suffix} file: {_unquoted(path, str(error))}") from None


def _csv_table(path: Path, *, as_text: bool, ragged: list[int] | None) -> Any:
    _require_csv(path)
    arrow, csv = (import_extra(name, "pyarrow", "reading .csv files") for name in ("pyarrow", "pyarrow.csv"))
    lines, convert = csv.ParseOptions(newlines_in_values=True), csv.ConvertOptions()
    if as_text:
        with csv.open_csv(path, parse_options=lines if ragged is None else _passing_over(lambda row: None)) as first:
            names = [name for name in _names_of(first.schema, path) if normal(name) not in PLACEMENT]
        convert = csv.ConvertOptions(column_types=dict.fromkeys(names, arrow.string()))
    try:
        return csv.read_csv(path, parse_options=lines, convert_options=convert)
    except arrow.ArrowInvalid as error:
        if ragged is not None and _RAGGED.match(str(error)):
            return _without_ragged(path, convert, ragged)
        raise


def _without_ragged(path: Path, convert: Any, ragged: list[int]) -> Any:
    """The rows that have as many values as the header; where the others are is told.

    Raises:
        DataError: one of the others is all that follows a quote which is never closed.
    """
    csv, found = import_extra("pyarrow.csv", "pyarrow", "reading .csv files"), list[tuple[int, bool]]()

    def note(row: Any) -> None:  # rows are numbered from 1, the header's
        found.append((row.number - 2, bool(row.text.count('"') % 2)))

    # In threads nobody knows the numbers of rows.
    table = csv.read_csv(path, csv.ReadOptions(use_threads=False), _passing_over(note), convert)
    for place, is_open in found:
        if is_open:
            raise DataError(
                f"{path} must be a readable .csv file: a quote in row {place} (counted from 0) is never closed, or a lone one"
            )
    ragged += [place for place, _ in found]
    return table


def _passing_over(note: Callable[[Any], None]) -> Any:
    """To leave out rows that have not as many values as the header, each of which is told."""

    def skip(row: Any) -> str:
        note(row)
        return "skip"

    csv = import_extra("pyarrow.csv", "pyarrow", "reading .csv files")
    return csv.ParseOptions(newlines_in_values=True, invalid_row_handler=skip)


_AS_UTF_8 = "it must be UTF-8 (spreadsheets call it CSV UTF-8)"


def _require_csv(path: Path) -> None:
    """Refuse, by its first line, what spreadsheets write that is read as something else, or not at all.

    Raises:
        DataError: it is not UTF-8, or something else than a comma stands between its columns.
    """
    with path.open("rb") as file:
        line = file.readline(_LONGEST_LINE)
    try:
        header = line.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{path} must be a readable .csv file: {_AS_UTF_8}") from None
    between = re.sub(r'"[^"]*"', "", header)
    for sign, name in ((";", "semicolons"), ("\t", "tabs")):
        if sign in between and "," not in between:
            raise DataError(
                f"{path} must have commas between its columns, and has {name}: save it with commas, and numbers as 1234.5"
            )


_RAGGED = re.compile(r"CSV parse error: (?:Row #(\d+): )?Expected (\d+) columns, got (\d+)")


def _unquoted(path: Path, text: str) -> str:
    """What Arrow says of a broken file, as far as it quotes nothing of it."""
    if "Empty CSV file" in text:
        return "it has no record"
    if "invalid UTF8" in text:
        return _AS_UTF_8
    if (ragged := _RAGGED.match(text)) is None:
        return "it is broken"
    row, wanted, got = (_RAGGED.match(_in_one_thread(path)) or ragged).groups()
    where = f" in row {int(row) - 2} (counted from 0)" if row else ""  # Arrow's row 1 is the header
    return f"each row must have {wanted} columns, as the first one has, got {got}{where}"


def _in_one_thread(path: Path) -> str:
    """What Arrow says of a broken file if it counts the rows."""
    arrow, csv = (import_extra(name, "pyarrow", "reading .csv files") for name in ("pyarrow", "pyarrow.csv"))
    try:
        csv.read_csv(path, csv.ReadOptions(use_threads=False), csv.ParseOptions(newlines_in_values=True))
    except arrow.ArrowException as error:
        return str(error)
    return ""


def default_label(names: list[str]) -> str:
    """The label column where nobody has said which: `label`, else `y`, else the last one."""
    return next((name for name in LABELS if name in names), names[-1])


def _label_column(names: list[str], label: str | None, path: Path) -> str:
    """The label column that was asked for, or the default one."""
    candidates = [name for name in names if name not in PLACEMENT]
    if label is None and candidates:
        return default_label(candidates)
    if label not in candidates:
        raise SpecError(f"data.label must name a column of {path}, one of {candidates}, got {label!r}")
    return label


def _values(table: Any, name: str, path: Path) -> AnyArray:
    """One column: float64 where it is numeric, else text."""
    types = import_extra("pyarrow", "pyarrow", "reading columns").types
    column = table.column(name)
    kind = column.type
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy())[0])
        advice = "" if normal(name) in PLACEMENT else f"; or {_DECLARE}"
        raise DataError(
            f"{path}: row {row} (counted from 0), column {name!r} must hold a value, got an empty cell, or a word "
            f"for one (nan, NA, null){advice}"
        )
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind):
        return as_floats(column.cast("float64", safe=False).to_numpy())
    values = _values_of_python(column)
    if OTHER in values:
        raise DataError(f"{path}: column {name!r} must hold numbers or text, got type {kind}")
    return np.array(list(map(str, values)), dtype=np.str_)
