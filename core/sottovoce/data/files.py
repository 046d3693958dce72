"""Reads a file into a `RawTable`: features as numbers, everything else as it stands there."""

from __future__ import annotations

import importlib
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sottovoce.arrays import FloatArray, as_floats
from sottovoce.data.cells import normal
from sottovoce.errors import DataError, SpecError

AnyArray = npt.NDArray[Any]
PLACEMENT = ("learner", "round")
"""Columns that say who learns a record, and when."""


@dataclass(frozen=True, slots=True, eq=False)
class RawTable:
    """What a source holds, before labels and placement are given a meaning.

    Attributes:
        features: `(records, features)`.
        labels: `(records,)`, numbers or text.
        columns: names of the features, where the source has them.
        learner: `(records,)` indices or names.
        round: `(records,)`.
        test: features and labels that the source itself holds out.
    """

    features: FloatArray
    labels: AnyArray
    columns: tuple[str, ...] | None = None
    learner: AnyArray | None = None
    round: AnyArray | None = None
    test: tuple[FloatArray, AnyArray] | None = None


def import_extra(module: str, package: str, what: str, extra: str = "audit") -> Any:
    """A module that only an extra installs.

    Raises:
        SpecError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise SpecError(f"{what} needs {package}: pip install 'sottovoce[{extra}]'") from None


# ---- .npz ------------------------------------------------------------------------------------------------


def read_npz(path: Path) -> RawTable:
    """Read a NumPy archive; more than one axis after the first is flattened.

    Layouts: `X` (or `X_train`) and `y` (or `y_train`), optionally `X_test`/`X_test_part` and `y_test`/`y_test_part`,
    `learner`, `round`, `columns`; `X_onehot` is preferred to `X`; or `num_train`, `cat_train`, `num_test`, `cat_test`,
    where codes of categories become one-hot columns (-1, a missing value: all zero).

    Raises:
        DataError: unreadable, pickled objects, or none of these layouts.
    """
    arrays = _load_arrays(path)
    labels = _first(arrays, "y", "y_train")
    test_labels = _first(arrays, "y_test", "y_test_part")
    columns: tuple[str, ...] | None
    if "num_train" in arrays and labels is not None:
        features, columns = _mixed_table(arrays, "train", path)
        test_features = _mixed_table(arrays, "test", path)[0] if "num_test" in arrays else None
    else:
        raw, raw_test = _first(arrays, "X_onehot", "X", "X_train"), _first(arrays, "X_test", "X_test_part")
        if raw is None or labels is None:
            raise DataError(f"{path} must hold the arrays X and y (or X_train and y_train), got {sorted(arrays)}")
        features = _flat(raw, path)
        test_features = None if raw_test is None else _flat(raw_test, path)
        columns = _column_names(arrays, features.shape[1])
    if (test_features is None) != (test_labels is None):
        raise DataError(f"{path} must hold both of X_test and y_test, or neither, got one of them")
    test = None if test_features is None or test_labels is None else (test_features, test_labels)
    return RawTable(features, labels, columns, arrays.get("learner"), arrays.get("round"), test)


def _load_arrays(path: Path) -> dict[str, AnyArray]:
    """Every array of the archive."""
    try:
        # Opened here: np.load leaves its own handle open when the archive is broken.
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it holds one bare array")
            return {key: archive[key] for key in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} must be a NumPy .npz archive without pickled objects: {error}") from None


def _first(arrays: Mapping[str, AnyArray], *names: str) -> AnyArray | None:
    """The first of these arrays that there is."""
    return next((arrays[name] for name in names if name in arrays), None)


def _flat(values: AnyArray, path: Path) -> FloatArray:
    """`(records, ...)` as `(records, features)` numbers."""
    if values.dtype.kind not in "biuf" or values.ndim < 2:
        raise DataError(
            f"{path}: features must be numbers of the shape (records, features), got {values.dtype} {values.shape}"
        )
    return as_floats(values.reshape(len(values), int(np.prod(values.shape[1:]))))


def _column_names(arrays: Mapping[str, AnyArray], width: int) -> tuple[str, ...] | None:
    """Names of the feature columns, where the archive has as many as there are columns."""
    names = _first(arrays, "onehot_names", "columns") if "X_onehot" in arrays else arrays.get("columns")
    return tuple(map(str, names)) if names is not None and names.shape == (width,) else None


def _listed(arrays: Mapping[str, AnyArray], name: str, path: Path) -> AnyArray:
    """An array that is a list.

    Raises:
        KeyError: there is none of this name.
        DataError: it has another number of axes.
    """
    if (found := arrays[name]).ndim != 1:
        raise DataError(f"{path}: {name} must be a list, got an array of {found.ndim} axes")
    return found


def _mixed_table(arrays: Mapping[str, AnyArray], part: str, path: Path) -> tuple[FloatArray, tuple[str, ...]]:
    """Numeric columns as they are, then one column for each value of each categorical column."""
    try:
        numbers, codes = arrays[f"num_{part}"], arrays[f"cat_{part}"]
        attributes = [str(name) for name in _listed(arrays, "cat_columns", path)]
        values = [_listed(arrays, f"values_{attribute}", path) for attribute in attributes]
        names = [str(name) for name in _listed(arrays, "num_columns", path)]
    except KeyError as error:
        raise DataError(f"{path} has num_{part}, so it must hold the array {error.args[0].split()[0]} too") from None
    if numbers.ndim != 2 or numbers.dtype.kind not in "biuf" or codes.shape != (len(numbers), len(attributes)):
        text = f"num_{part} must be numbers (records, features), and cat_{part} codes (records, {len(attributes)})"
        raise DataError(f"{path}: {text}, got {numbers.dtype} {numbers.shape} and {codes.shape}")
    one_hot = [codes[:, j, None] == np.arange(len(values[j])) for j in range(len(attributes))]
    names += [f"{attribute}={value}" for attribute, of in zip(attributes, values, strict=True) for value in of]
    return as_floats(np.hstack([numbers, *one_hot])), tuple(names)


# ---- .csv and .parquet -----------------------------------------------------------------------------------


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
    table = _arrow_table(path)
    names: list[str] = list(table.column_names)
    if len(set(names)) != len(names):
        raise DataError(f"{path}: column names must differ, got {names}")
    label = _label_column(names, label, path)
    features = [name for name in names if name != label and name not in PLACEMENT]
    if not features:
        raise DataError(f"{path} must have a feature column beside {label!r}, got the columns {names}")
    columns = {name: _values(table, name, path) for name in names}
    for name in features:
        if columns[name].dtype.kind != "f":
            kind = table.schema.field(name).type
            raise DataError(f"{path}: column {name!r} must be numeric, got type {kind}; encode or drop it")
    matrix = np.column_stack([columns[name] for name in features])
    return RawTable(as_floats(matrix), columns[label], tuple(features), columns.get("learner"), columns.get("round"))


def read_cells(path: Path) -> tuple[dict[str, Any], AnyArray | None, AnyArray | None]:
    """Read a `.csv` (with a header line) or `.parquet` file as a schema needs it: nothing is taken for a number yet.

    Args:
        path: the file; its suffix tells the format.

    Returns:
        Columns by name, text of a `.csv`; and the columns `learner` and `round`, as `RawTable` has them, where there are such.

    Raises:
        DataError: unreadable, or an empty cell among those that place a record.
        SpecError: pyarrow is not installed.
    """
    table = _arrow_table(path, as_text=True)
    names: list[str] = list(table.column_names)
    if len({normal(name) for name in names}) != len(names):
        raise DataError(f"{path}: column names must differ, got {names}")
    placed = {normal(name): name for name in names if normal(name) in PLACEMENT}
    columns = {name: _cells(table.column(name)) for name in names if name not in placed.values()}
    learner, rounds = (_values(table, placed[name], path) if name in placed else None for name in PLACEMENT)
    return columns, learner, rounds


def _cells(column: Any) -> Any:
    """A column as numbers where all are, else as a list."""
    types = import_extra("pyarrow", "pyarrow", "reading columns").types
    if types.is_timestamp(column.type):  # nanoseconds are for pandas
        column = column.cast(
            import_extra("pyarrow", "pyarrow", "reading columns").timestamp("us", column.type.tz), safe=False
        )
    numeric = types.is_integer(column.type) or types.is_floating(column.type)
    return column.to_numpy() if numeric and not column.null_count else column.to_pylist()


def _arrow_table(path: Path, *, as_text: bool = False) -> Any:
    """The file as a pyarrow table; `as_text`: with the cells of a `.csv` as they stand there, but for those of `PLACEMENT`."""
    arrow = import_extra("pyarrow", "pyarrow", f"reading {path.suffix} files")
    try:
        if path.suffix.lower() == ".csv":
            csv = import_extra("pyarrow.csv", "pyarrow", "reading .csv files")
            if not as_text:
                return csv.read_csv(path)
            lines = csv.ParseOptions(newlines_in_values=True)
            with csv.open_csv(path, parse_options=lines) as first:
                names = [name for name in first.schema.names if normal(name) not in PLACEMENT]
            text = csv.ConvertOptions(column_types=dict.fromkeys(names, arrow.string()))
            return csv.read_csv(path, parse_options=lines, convert_options=text)
        # One file, not a data set: a folder named a=b on the way to it must not become a column.
        return import_extra("pyarrow.parquet", "pyarrow", "reading .parquet files").ParquetFile(path).read()
    except OSError as error:
        raise DataError(f"{path} must be a readable {path.suffix} file: {error.strerror or 'it is broken'}") from None
    except arrow.ArrowException as error:  # its text may quote a row: what comes after the last colon
        raise DataError(f"{path} must be a readable {path.suffix} file: {_unquoted(str(error))}") from None


def _unquoted(text: str) -> str:
    """What Arrow says of a broken file, as far as it quotes nothing of it."""
    known = re.match(r"Empty CSV file|CSV parse error: (Row #\d+: )?Expected \d+ columns, got \d+", text)
    return known[0] if known else "it is broken"


def _label_column(names: list[str], label: str | None, path: Path) -> str:
    """The label column that was asked for, or the default one."""
    candidates = [name for name in names if name not in PLACEMENT]
    if label is None and candidates:
        return next((name for name in ("label", "y") if name in candidates), candidates[-1])
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
        raise DataError(f"{path}: row {row} (counted from 0), column {name!r} must hold a value, got an empty cell")
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind):
        return as_floats(column.cast("float64", safe=False).to_numpy())
    return np.array([str(value) for value in column.to_pylist()], dtype=np.str_)
