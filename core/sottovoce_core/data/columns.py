"""Columns of `.csv` and `.parquet` files: as numbers, or as raw cells for a schema."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce_core.arrays import AnyArray, FloatArray, as_floats, has_unrepresentable_integers
from sottovoce_core.data.cells import (
    CODE_DESCRIPTION,
    CODE_PATTERN,
    INDEX_DESCRIPTION,
    UNSUPPORTED_VALUE,
    is_index,
    normalise_text,
    to_python_value,
)
from sottovoce_core.data.files import (
    LABEL_COLUMN_NAMES,
    LOST_DIGITS_REASON,
    PLACEMENT_COLUMNS,
    UNCERTAIN_HEADER_REASON,
    RawTable,
    describe_column,
    describe_content,
    explain_header,
    is_numeric_type,
    quote_names,
    read_npz_features,
)
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.optional import import_optional
from sottovoce_core.text import suggest_name
from sottovoce_core.yaml_files import detect_format

_MAX_REPORTED_COLUMNS = 12
"""Maximum number of columns that an error explains."""
_DECLARE_ADVICE = (
    "declare its fields in a schema, or ignore them there (`sottovoce init --schema-only` drafts one from public "
    "records)"
)
_MAX_SNIFFED_BYTES = 2**16
"""Number of bytes after the first line of a `.csv` file that are inspected for another format."""
_MAX_HEADER_LINE_BYTES = 2**24
"""Maximum number of bytes of a header line that are read."""
WRONG_VALUE_COUNT_REASON = "not as many values as the header"
_CONVERSION_ERRORS = (ValueError, OverflowError)  # errors of Arrow are ValueErrors, too


def read_columns(path: Path, label: str | None) -> RawTable:
    """Read a `.csv` (with a header line) or `.parquet` file.

    Args:
        path: path of the file; its suffix determines the format.
        label: the label column; None: `label`, else `y`, else the last one. The columns `learner` and `round` place a
            record; every other column is a feature.

    Raises:
        DataError: unreadable, an empty cell, or a feature column that is not numeric (named).
        SpecError: no such label column; pyarrow is not installed.
    """
    label = None if label is None else normalise_text(label)
    return _split_columns(_named_table(path, label), label)


def read_table_columns(source: str, table: Any, label: str | None) -> RawTable:
    """Read an Arrow table in memory as `read_columns` does a file; `source` is its name in errors.

    Raises:
        DataError, SpecError: as `read_columns`.
    """
    if not table.num_rows:
        raise DataError(f"{source} must hold at least one record, got only column names")
    names = [*map(normalise_text, table.column_names)]
    return _split_columns(_TableFile(source, table, names, None), None if label is None else normalise_text(label))


def _split_columns(file: _TableFile, label: str | None) -> RawTable:
    """Split the columns of a file into features, label and placement."""
    path = file.path
    candidates = [name for name in file.names if name not in PLACEMENT_COLUMNS]
    if not candidates:
        raise SpecError(f"data.label must name a column of {path}, which has only learner and round")
    label = choose_label(candidates, label, f"data.label must name a column of {path}", file.header)
    features = [name for name in candidates if name != label]
    if not features:
        alone = "; commas must separate columns" if len(file.names) == 1 else ""
        raise DataError(f"{path} must have a feature column beside the label, got none{alone}")
    matrix = file.matrix(features)
    learner, rounds = (file.values(name, "") if name in file.names else None for name in PLACEMENT_COLUMNS)
    own = file.values(label, "; drop these records, or choose another label")
    return RawTable(matrix, own, tuple(features), learner, rounds, label=label, header_reason=file.header)


def read_features(path: Path, wanted: Sequence[str] | None, label: str | None) -> FloatArray:
    """Read records for prediction, without their labels: `(records, features)`.

    Args:
        path: a `.npz`, `.csv` or `.parquet` file.
        wanted: names of the features, in their order; None: all columns but the label and those of `PLACEMENT_COLUMNS`.
        label: name of the label column, if there is one; None: `label` or `y`.

    Raises:
        DataError: unreadable, a column is missing or not numeric, or a cell is empty.
        SpecError: pyarrow is not installed.
    """
    if path.suffix.lower() == ".npz":
        return read_npz_features(path)
    label = None if label is None else normalise_text(label)
    file = _named_table(path, label)
    others = {*PLACEMENT_COLUMNS, *(LABEL_COLUMN_NAMES if label is None else (label,))}
    if wanted is None:
        wanted = [name for name in file.names if name not in others]
    if lacking := [name for name in wanted if name not in file.names]:
        raise DataError(
            f"{path} must have a column for every feature of the run, and has none for {quote_names(lacking)}"
        )
    if not wanted:
        raise DataError(f"{path} must have a feature column, got none")
    return file.matrix(wanted)


Cells = tuple[dict[str, Any], AnyArray | None, AnyArray | None]
"""Columns by name, and the columns `learner` and `round`, if present."""


def read_cells(path: Path, ragged: list[int] | None = None) -> Cells:
    """Read a `.csv` (with a header line) or `.parquet` file for a schema: no cell is converted to a number yet.

    Args:
        path: path of the file; its suffix determines the format.
        ragged: receives the places of rows whose number of values differs from the header's, which are left out; None: such rows
            are an error. If there are such rows, no columns place a record.

    Returns:
        Columns by name, as text for a `.csv`; and the columns `learner` and `round`, as in `RawTable`, if present.

    Raises:
        DataError: unreadable, or an empty cell in a column that places a record.
        SpecError: pyarrow is not installed.
    """
    table = _read_arrow_table(path, as_text=True, ragged=ragged)
    is_csv = path.suffix.lower() == ".csv" and not ragged
    codes = _find_codes(path, table.select(_list_placement_columns(table))) if is_csv else {}
    return read_table_cells(path, table, codes)


def _list_placement_columns(table: Any) -> list[str]:
    return [name for name in table.column_names if normalise_text(name) in PLACEMENT_COLUMNS]


def read_table_cells(source: Path | str, table: Any, codes: Mapping[str, Any] | None = None) -> Cells:
    """Split an Arrow table as `read_cells` does a file.

    Args:
        source: its name in errors.
        table: the table.
        codes: columns that hold codes, as text.

    Raises:
        DataError: an empty cell in a column that places a record.
    """
    placing = _list_placement_columns(table)
    columns = {name: _to_cells(table.column(name)) for name in table.column_names if name not in placing}
    file = _TableFile(source, table.select(placing), [*map(normalise_text, placing)], None, codes or {})
    learner, rounds = (file.values(name, "") if name in file.names else None for name in PLACEMENT_COLUMNS)
    return columns, learner, rounds


def read_names(path: Path, label: str | None = None) -> tuple[dict[str, bool], str | None]:
    """Read the names of the columns of a `.csv` or `.parquet` file.

    Args:
        path: path of the file; its suffix determines the format.
        label: the label column, if known.

    Returns:
        For each normalised column name, whether the column holds words; and the reason why the first line is taken for names, as
        `RawTable.header_reason`.

    Raises:
        DataError, SpecError: as `read_columns`; also where the first line of a `.csv` is a record.
    """
    table = _read_arrow_table(path)
    kinds = {normalise_text(each.name): each.type in ("string", "large_string", "bool") for each in table.schema}
    is_csv = path.suffix.lower() == ".csv"
    return kinds, explain_header([*kinds], table.column, label, path) if is_csv else None


@dataclass(frozen=True, slots=True)
class _TableFile:
    """Records of a file.

    Attributes:
        path: path of the file, or name of the source.
        table: Arrow table, in the order of the names; of a `.csv`, with inferred types.
        names: normalised names of the columns.
        header: reason why the first line holds names, as `RawTable.header_reason`.
        codes: columns of a `.csv` that Arrow read as numbers, although some of their digits are codes; as text.
    """

    path: Path | str
    table: Any
    names: list[str]
    header: str | None
    codes: Mapping[str, Any] = field(default_factory=dict)

    def column(self, name: str) -> Any:
        """Return Arrow's column of this name."""
        return self.table.column(self.names.index(name))

    def describe_column(self, name: str) -> str:
        """Describe a column in an error."""
        return describe_column(self.names.index(name), name, self.header)

    def values(self, name: str, advice: str) -> AnyArray:
        """Return a column as float64 if it holds numbers, else as text.

        Args:
            name: name of the column.
            advice: remedy for an empty cell.

        Raises:
            DataError: an empty cell, or values of another kind.
        """
        column = self.column(name)
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy())[0])
            raise DataError(
                f"{self.path}: row {row} (counted from 0), {self.describe_column(name)} must hold a value, got an empty cell, or "
                f"a word for one (nan, NA, null){advice}"
            )
        numeric = is_numeric_type(column.type) or (column.type == "bool" and name not in PLACEMENT_COLUMNS)
        if numeric and name not in self.codes and not _has_unrepresentable_digits(column):
            return as_floats(column.cast("float64", safe=False).to_numpy())
        values = _to_python_values(self.codes.get(name, column))
        if any(to_python_value(value) is UNSUPPORTED_VALUE for value in values):
            raise DataError(
                f"{self.path}: {self.describe_column(name)} must hold numbers or text, got type {column.type}"
            )
        return np.array(
            [value.strip() for value in values] if name in self.codes else [*map(str, values)], dtype=np.str_
        )

    def matrix(self, features: Sequence[str]) -> FloatArray:
        """Return the feature columns, `(records, features)`.

        Raises:
            DataError: some columns are no features, or hold something other than numbers.
        """
        if wrong := [(name, why) for name in features if (why := self._explain_no_feature(name))]:
            problems = " and ".join(
                f"{self.describe_column(name)} {why}" for name, why in wrong[:_MAX_REPORTED_COLUMNS]
            )
            it = "it" if len(wrong) == 1 else "them"
            raise DataError(f"{self.path}: {problems}; {_DECLARE_ADVICE}, or drop {it}")
        return as_floats(np.column_stack([self.values(name, f"; or {_DECLARE_ADVICE}") for name in features]))

    def _explain_no_feature(self, name: str) -> str:
        """Explain why a column is no feature; empty: it is one."""
        if is_index(name):
            return f"must be a field of the records, and is {INDEX_DESCRIPTION}"
        column = self.column(name)
        if name in self.codes:
            return f"must be numeric, got {CODE_DESCRIPTION}"
        if is_numeric_type(column.type) or column.type == "bool":
            return f"must be numeric, got {LOST_DIGITS_REASON}" if _has_unrepresentable_digits(column) else ""
        return "" if column.type == "null" else f"must be numeric, got type {column.type}"


def _has_unrepresentable_digits(column: Any) -> bool:
    """Return whether float64 cannot hold some of a column's integers."""
    types = _import_arrow().types
    if types.is_integer(column.type):
        return has_unrepresentable_integers(column.drop_null().to_numpy())
    if not types.is_decimal(column.type):
        return False
    whole = (value for value in column.to_pylist() if value is not None and abs(value) > 2**53)
    return any(value == value.to_integral_value() and int(float(value)) != value for value in whole)


def _named_table(path: Path, label: str | None) -> _TableFile:
    """Read a file with at least one record.

    Raises:
        DataError: unreadable, without names or without records.
        SpecError: pyarrow is not installed.
    """
    table = _read_arrow_table(path)
    names = [*map(normalise_text, table.column_names)]
    is_csv = path.suffix.lower() == ".csv"
    if is_csv and any(each.type == "binary" for each in table.schema):  # values that Arrow cannot decode as text
        raise DataError(f"{path} must be a readable .csv file: {_UTF_8_REQUIREMENT}{_LATIN_1_HINT}")
    why = explain_header(names, table.column, label, path) if is_csv else None
    if not table.num_rows:
        raise DataError(f"{path} must hold at least one record, got only column names")
    return _TableFile(path, table, names, why, _find_codes(path, table) if is_csv else {})


def _find_codes(path: Path, table: Any) -> dict[str, Any]:
    """Return, as text, the columns of a `.csv` file that were read as numbers and have values written as codes."""
    arrow = _import_arrow()
    types, compute = arrow.types, arrow.compute

    def may_be(column: Any) -> bool:  # an integer has fewer digits than such a number
        floating = types.is_floating(column.type)
        whole = floating and compute.all(compute.equal(column, compute.floor(column))).as_py()
        return bool(types.is_integer(column.type) or whole)

    if not (names := [name for name in table.column_names if may_be(table.column(name))]):
        return {}
    text = arrow.csv.read_csv(
        path, parse_options=_build_parse_options(), convert_options=_build_convert_options(names, include_columns=names)
    )
    code = rf"^\s*({CODE_PATTERN})\s*$"
    found = {normalise_text(name): text.column(name) for name in names}
    return {name: own for name, own in found.items() if compute.any(compute.match_substring_regex(own, code)).as_py()}


def build_arrow_table(source: str, frame: Any, labels: tuple[str, AnyArray | None]) -> Any:
    """Copy a data frame (pandas, polars, pyarrow, or another with Arrow's interface) to an Arrow table.

    Args:
        source: name of the records in errors.
        frame: the data frame; an index of pandas is no column.
        labels: name and values of a column to add; None: none.

    Raises:
        DataError: it cannot be converted, or two columns have the same name.
        SpecError: pyarrow is not installed.
    """
    arrow = _import_arrow("a data frame")
    name, values = labels
    try:
        if hasattr(frame, "to_arrow"):
            table = frame.to_arrow()
        elif type(frame).__module__.partition(".")[0] == "pandas":
            table = arrow.Table.from_pandas(frame.copy(), preserve_index=False).replace_schema_metadata(None)
        else:
            table = arrow.table(frame)
        if values is not None:
            table = table.append_column(name, arrow.array(values, from_pandas=True))
        _require_names(table.schema, source)
        return _decode_dictionaries(table)
    except (arrow.ArrowException, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{source} must be columns of equal length, each of one type, with different names, and labels with one entry a "
            f"record, got a {type(frame).__qualname__} that Arrow cannot convert"
        ) from None


def _decode_dictionaries(table: Any) -> Any:
    """Return a table whose categorical columns have their values."""
    arrow = _import_arrow()
    plain = [
        column.cast(column.type.value_type) if arrow.types.is_dictionary(column.type) else column
        for column in table.columns
    ]
    return arrow.table(plain, names=table.column_names)


def _require_names(columns: Any, path: Path | str) -> list[str]:
    """Return the names of an Arrow schema's columns; errors do not quote them: without a header line they are a record.

    Raises:
        DataError: two normalised names are equal, or one is no text.
    """
    try:
        names: list[str] = columns.names
    except UnicodeDecodeError:
        what = f"a readable {path.suffix} file" if isinstance(path, Path) else "columns with names"
        raise DataError(f"{path} must be {what}: {_UTF_8_REQUIREMENT}") from None
    known = dict[str, int]()
    for k, name in enumerate(names):
        if (first := known.setdefault(normalise_text(name), k)) != k:
            raise DataError(
                f"{path}: column names must differ, and columns {first} and {k} (counted from 0) have the same"
                + ("; is its first line a header?" if isinstance(path, Path) else "")
            )
    return names


def _to_cells(column: Any) -> Any:
    """Return a column as numbers if all values are, else as a list."""
    arrow = _import_arrow()
    types = arrow.types
    if types.is_timestamp(column.type):  # pandas reads nanoseconds
        column = column.cast(arrow.timestamp("us", column.type.tz), safe=False)
    numeric = types.is_integer(column.type) or types.is_floating(column.type)
    return column.to_numpy() if numeric and not column.null_count else _to_python_values(column)


def _to_python_values(column: Any) -> list[Any]:
    """Return a column as a list; `UNSUPPORTED_VALUE` for what Python lacks: the year 12020, text not in UTF-8, nanoseconds."""
    try:
        return list(column.to_pylist())
    except _CONVERSION_ERRORS:
        return [_to_python_value(cell) for cell in column]


def _to_python_value(cell: Any) -> Any:
    try:
        return cell.as_py()
    except _CONVERSION_ERRORS:
        return UNSUPPORTED_VALUE


def _import_arrow(what: str = "reading columns") -> Any:
    """Import pyarrow with its readers for columns.

    Raises:
        SpecError: pyarrow is not installed; `what` needs it.
    """
    arrow = import_optional("pyarrow", "pyarrow", what)
    for module in ("pyarrow.csv", "pyarrow.compute", "pyarrow.parquet"):
        import_optional(module, "pyarrow", what)
    return arrow


def _read_arrow_table(path: Path, *, as_text: bool = False, ragged: list[int] | None = None) -> Any:
    """Read the file as a pyarrow table.

    Args:
        path, ragged: as in `read_cells`.
        as_text: keep the cells of a `.csv` as text, except those of `PLACEMENT_COLUMNS`.
    """
    arrow = _import_arrow(f"reading {path.suffix} files")
    try:
        if path.suffix.lower() == ".csv":
            table = _read_csv_table(path, as_text=as_text, ragged=ragged)
        else:  # one file, not a data set: a folder named a=b in its path must not become a column
            table = arrow.parquet.ParquetFile(path).read()
        _require_names(table.schema, path)
        return _decode_dictionaries(table)
    except MemoryError:
        raise DataError(f"{path} must fit into memory, got more records than do") from None
    except OSError as error:
        why = error.strerror or _describe_content(path)
        raise DataError(f"{path} must be a readable {path.suffix} file: {why}") from None
    except arrow.ArrowException as error:  # its text may quote a row after the last colon
        raise DataError(
            f"{path} must be a readable {path.suffix} file: {_remove_quotations(path, str(error))}"
        ) from None


def _describe_content(path: Path) -> str:
    """Describe a file that cannot be read as its name states."""
    found = describe_content(path)
    own = path.suffix.lower() == ".csv" if found.startswith("text:") else found.startswith("a Parquet")
    return "it is broken: copy it anew" if own else f"it is {found}"


def _read_csv_table(path: Path, *, as_text: bool, ragged: list[int] | None) -> Any:
    _require_csv(path)
    arrow, convert = _import_arrow(), None
    csv = arrow.csv
    if as_text:
        with csv.open_csv(path, parse_options=_build_parse_options(None if ragged is None else [])) as first:
            names = _require_names(first.schema, path)
        convert = _build_convert_options([name for name in names if normalise_text(name) not in PLACEMENT_COLUMNS])
    try:
        return csv.read_csv(path, parse_options=_build_parse_options(), convert_options=convert)
    except arrow.ArrowInvalid as error:
        if "columns, got" not in str(error):
            raise
    # Multi-threaded reading does not number the rows, which count from 1, the header's.
    found = None if ragged is None else list[Any]()
    table = csv.read_csv(path, csv.ReadOptions(use_threads=False), _build_parse_options(found), convert)
    for row in found or ():
        if row.text.count('"') % 2:
            raise DataError(
                f"{path} must be a readable .csv file: a quote in row {row.number - 2} (counted from 0) is never closed, or a "
                "lone one"
            )
        if ragged is not None:
            ragged.append(row.number - 2)
    return table


def _build_parse_options(others: list[Any] | None = None) -> Any:
    """Build Arrow's options for splitting rows.

    Args:
        others: receives the rows whose number of values differs from the header's, which are left out; None: such rows are an
            error.
    """

    def skip(row: Any, others: list[Any]) -> str:
        others.append(row)
        return "skip"

    handler = None if others is None else partial(skip, others=others)
    return _import_arrow().csv.ParseOptions(newlines_in_values=True, invalid_row_handler=handler)


def _build_convert_options(names: Sequence[str], **options: Any) -> Any:
    """Build Arrow's options to read columns as text; types of other columns are inferred."""
    arrow = _import_arrow()
    return arrow.csv.ConvertOptions(column_types=dict.fromkeys(names, arrow.string()), **options)


_UTF_8_REQUIREMENT = "it must be UTF-8 (spreadsheets call it CSV UTF-8)"
_LATIN_1_HINT = ", and may be Latin-1 or Windows-1252"


def _require_csv(path: Path) -> None:
    """Refuse, by its first line, spreadsheet output that would be misread or not read at all.

    Raises:
        DataError: not UTF-8, or columns separated by something other than a comma.
    """
    with path.open("rb") as file:
        line = file.readline(_MAX_HEADER_LINE_BYTES)
        found = detect_format(line + file.read(_MAX_SNIFFED_BYTES))
    if found:
        advice = f": {_UTF_8_REQUIREMENT}" if found.startswith("text in") else ""
        raise DataError(f"{path} must be a .csv file, and looks like {found}{advice}")
    try:
        header = line.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{path} must be a readable .csv file: {_UTF_8_REQUIREMENT}{_LATIN_1_HINT}") from None
    if "\0" in header:
        raise DataError(f"{path} must be a readable .csv file: its first line has NUL bytes, which are no text")
    if header.startswith("#") and "," not in header:
        raise DataError(f"{path} must begin with a line of column names, got a comment (#); remove it")
    between = re.sub(r'"[^"]*"', "", header)
    for sign, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if sign in between and "," not in between:
            raise DataError(
                f"{path} must have commas between its columns, and has {name}: save it with commas, and numbers as 1234.5"
            )
    if header.lower().startswith("sep="):
        raise DataError(f"{path} must begin with a line of column names, got a spreadsheet's sep=; remove it")


def _remove_quotations(path: Path, text: str) -> str:
    """Return Arrow's message about a broken file without any quoted content."""
    if "Empty CSV file" in text:
        return "it has no record"
    if "invalid UTF8" in text:
        return f"{_UTF_8_REQUIREMENT}{_LATIN_1_HINT}"
    if "straddling object" in text:
        return "a row is longer than 1 MiB: see whether a quote in it is never closed, or drop its long column"
    if (other := re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", text)) is None:
        return _describe_content(path)
    row, wanted, got = other.groups()
    with path.open("rb") as file:
        advice = "; its first line begins with #: remove it if it is a comment" if file.read(1) == b"#" else ""
    return f"each row must have {wanted} columns, as the first one has, got {got} in row {int(row) - 2} (counted from 0){advice}"


def choose_label(names: Sequence[str], label: str | None, must: str, header: str | None = None) -> str:
    """Choose the label column: the requested one, else `label`, else `y`, else the last one.

    Args:
        names: names of the possible columns.
        label: requested column.
        must: requirement, as the start of an error.
        header: reason why the names are names, as `RawTable.header_reason`; if they may be a record, only a similar one is
            quoted.

    Raises:
        SpecError: the requested column does not exist.
    """
    if label is None:
        return next((name for name in LABEL_COLUMN_NAMES if name in names), names[-1])
    if label in names:
        return label
    near = suggest_name(label, names)
    known = f" ({quote_names(names)}){near}" if header != UNCERTAIN_HEADER_REASON else near
    raise SpecError(f"{must}, got {label!r}{known}")
