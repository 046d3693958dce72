"""Files of records: NumPy archives, the header of a table, and the first line of a `.csv` file."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce_core.arrays import AnyArray, FloatArray, as_floats, has_unrepresentable_integers
from sottovoce_core.errors import DataError
from sottovoce_core.optional import import_optional
from sottovoce_core.text import abbreviate_names
from sottovoce_core.yaml_files import detect_format

SCHEMA_FILE_SUFFIXES = (".csv", ".parquet")
RECORD_FILE_SUFFIXES = (".npz", *SCHEMA_FILE_SUFFIXES)
"""Suffixes of files of records."""
PLACEMENT_COLUMNS = ("learner", "round")
"""Columns that say who learns a record, and when."""
UNCERTAIN_HEADER_REASON = "not most of them are numbers, and none stands below again"
"""Why the first line of a `.csv` file may hold names, where nothing better is known. It may be a record: no error quotes it."""
_MAX_SNIFFED_BYTES = 4096
"""Bytes that a format is known by."""
LOST_DIGITS_REASON = "whole numbers beyond 2**53, of which float64 loses digits"


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
        label: the name of the label column, where the source has names.
        header: why the first line of a `.csv` file is taken for names.
    """

    features: FloatArray
    labels: AnyArray
    columns: tuple[str, ...] | None = None
    learner: AnyArray | None = None
    round: AnyArray | None = None
    test: tuple[FloatArray, AnyArray] | None = None
    label: str | None = None
    header_reason: str | None = None

    def describe_column(self, column: int) -> str:
        """A feature column in an error: by its place, where it has no name or that may be a value of a record."""
        return describe_column(column, None if self.columns is None else self.columns[column], self.header_reason)


def describe_column(place: int, name: str | None, header: str | None) -> str:
    """A column in an error.

    Args:
        place: of the column, from 0.
        name: its name, where it has one.
        header: why the first line of a `.csv` file is taken for names, as `RawTable.header`.
    """
    return (
        f"column {place} (counted from 0)" if name is None or header == UNCERTAIN_HEADER_REASON else f"column {name!r}"
    )


def read_npz(path: Path) -> RawTable:
    """Read a NumPy archive; more than one axis after the first is flattened.

    Layouts: `X` (or `X_train`) and `y` (or `y_train`), optionally `X_test`/`X_test_part` and `y_test`/`y_test_part`,
    `learner`, `round`, `columns`; `X_onehot` is preferred to `X`; or `num_train`, `cat_train`, `num_test`, `cat_test`,
    where codes of categories become one-hot columns (-1, a missing value: all zero).

    Raises:
        DataError: unreadable, pickled objects, or none of these layouts.
    """
    arrays = _load_arrays(path)
    labels, test_labels = _first(arrays, "y", "y_train"), _first(arrays, "y_test", "y_test_part")
    found, test = _features(arrays, path), _features(arrays, path, test=True)
    if found is None or labels is None:
        raise DataError(f"{path} must hold the arrays X and y (or X_train and y_train), got {sorted(arrays)}")
    if (test is None) != (test_labels is None):
        raise DataError(f"{path} must hold both of X_test and y_test, or neither, got one of them")
    held_out = None if test is None or test_labels is None else (test[0], test_labels)
    return RawTable(found[0], labels, found[1], arrays.get("learner"), arrays.get("round"), held_out)


def read_npz_features(path: Path) -> FloatArray:
    """Records of a NumPy archive without their labels, in the layouts of `read_npz`.

    Raises:
        DataError: as `read_npz`.
    """
    arrays = _load_arrays(path)
    if (found := _features(arrays, path)) is None:
        raise DataError(f"{path} must hold the array X, got {sorted(arrays)}")
    return found[0]


_Features = tuple[FloatArray, tuple[str, ...] | None]
"""Records, and the names of their columns where the archive has them."""


def _features(arrays: Mapping[str, AnyArray], path: Path, *, test: bool = False) -> _Features | None:
    """The records to learn from, or those for tests; None: there are none."""
    if "num_train" in arrays:
        part = "test" if test else "train"
        return _mixed_table(arrays, part, path) if f"num_{part}" in arrays else None
    raw = _first(arrays, *(("X_test", "X_test_part") if test else ("X_onehot", "X", "X_train")))
    if raw is None:
        return None
    features = _flat(raw, path)
    return features, _column_names(arrays, features.shape[1])


def _load_arrays(path: Path) -> dict[str, AnyArray]:
    """Every array of the archive."""
    try:
        # Opened here: np.load leaves its own handle open when the archive is broken.
        with path.open("rb") as file:
            archive: Any = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it holds one bare array")
            members: dict[str, Any] = {key: archive[key] for key in archive.files}
            return {key: value for key, value in members.items() if isinstance(value, np.ndarray)}
    except _ARCHIVE_ERRORS as error:
        raise DataError(
            f"{path} must be a NumPy .npz archive without pickled objects, got {_npz_found(path, error)}"
        ) from None
    except MemoryError:
        raise DataError(f"{path} must fit into memory, got arrays of more than there is") from None


def _npz_found(path: Path, error: Exception) -> str:
    """What a file is that is no such archive: NumPy's own words may quote bytes of it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    found = describe_content(path)
    if "NumPy archive" not in found and "zip" not in found:
        return found
    return "arrays of Python objects: write numbers or text" if "pickle" in str(error) else "a broken one: copy it anew"


def describe_content(path: Path) -> str:
    """What the content of a file looks like that cannot be read as its name says, with what to do."""
    with path.open("rb") as file:
        content = file.read(_MAX_SNIFFED_BYTES)
    if not content:
        return "an empty file"
    if found := detect_format(content):
        return found
    try:
        text = content.decode("utf-8", "ignore" if len(content) == _MAX_SNIFFED_BYTES else "strict")
    except UnicodeDecodeError:
        text = "\0"
    return (
        "text: its name must end in .csv if it is CSV"
        if text.isprintable() or ("\n" in text and "\0" not in text)
        else "a broken one"
    )


_ARCHIVE_ERRORS = (
    OSError, ValueError, EOFError, KeyError, TypeError, SyntaxError, OverflowError, NotImplementedError, RuntimeError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What NumPy and zipfile raise of an archive that is torn, encrypted, packed as they do not know, or none."""


def _first(arrays: Mapping[str, AnyArray], *names: str) -> AnyArray | None:
    """The first of these arrays that there is."""
    return next((arrays[name] for name in names if name in arrays), None)


def _flat(values: AnyArray, path: Path) -> FloatArray:
    """`(records, ...)` as `(records, features)` numbers."""
    if values.dtype.kind not in "biuf" or values.ndim < 2:
        raise DataError(
            f"{path}: features must be numbers of the shape (records, features), got {values.dtype} {values.shape}"
        )
    if has_unrepresentable_integers(values):
        raise DataError(
            f"{path}: features must be numbers, got {LOST_DIGITS_REASON}: drop identifiers, or write the others as float64"
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


def describe_column_mismatch(
    there: Collection[str], wanted: Mapping[str, bool], allowed: Collection[str], odd: str
) -> str:
    """Why the columns of a table are not those of records; empty: they are.

    What stands there is named only where half of the fields are among it: else it may be a record, and no header.

    Args:
        there: names of columns, as they are compared.
        wanted: fields, and whether a column has each.
        allowed: columns that may be there.
        odd: what to do with one that may not.
    """
    lacking = [field for field, found in wanted.items() if not found]
    if 2 * len(lacking) > len(wanted):
        fields = f"the fields are {quote_names([*wanted])}"
        found = len(wanted) - len(lacking)
        many = f"{found} of its {len(there)} are fields" if found > 1 else f"one of its {len(there)} is a field"
        many = many if found else f"none of its {len(there)} is a field"
        return f"must begin with a line of column names, and {many} of the schema; {fields}"
    told = []
    if lacking:
        told.append(f"must have a column for every field of the schema, and has none for {quote_names(lacking)}")
    if unknown := sorted(name for name in there if name not in allowed):
        told.append(f"every column must be in the schema, and {quote_names(unknown)} is not: {odd}")
    return "; ".join(told)


def quote_names(names: Collection[str]) -> str:
    """Names for people, in quotes."""
    return abbreviate_names([*map(repr, names)])


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_MISSING_WORD = re.compile(r"#?n/?a|<na>|nan|null|none|[+-]?inf(inity)?")
"""In small letters: what stands where a value is missing or endless."""
LABEL_COLUMN_NAMES = ("label", "y")
"""What the label column is called where nobody says."""


def explain_header(names: Sequence[str], column: Callable[[int], Any], label: str | None, path: Path) -> str:
    """Why the first line of a file holds names: the first that is so of these.

    It has the label's name. A word stands over a column of numbers. One of its names is usual: `label`, `y`, `learner`, `round`.
    They count up by one, or not most of them are numbers.

    Args:
        names: the first line.
        column: what stands below it, by place: Arrow's array, of the type that it has without the first line.
        label: the name of the label column, as a spec has it.
        path: of the file, for errors.

    Raises:
        DataError: it is a record, and is not quoted: no word stands over numbers, and one stands in its own column again; or most
            of it are numbers.
    """
    if label is not None and label in names:
        return f"one is called {label!r}, as data.label says"
    places = range(len(names))
    if over := [k for k in places if _is_word(names[k]) and is_numeric_type(column(k).type)]:
        return f"a word, {names[over[0]]!r}, stands over a column of numbers"
    if again := [k for k in places if not _NUMBER.fullmatch(names[k].strip()) and _is_there(names[k], column(k))]:
        raise _no_names(path, f"what its first line has in column {again[0]} (counted from 0) stands below it, too")
    if usual := [name for name in names if name in (*LABEL_COLUMN_NAMES, *PLACEMENT_COLUMNS)]:
        return f"one is called {usual[0]!r}"
    numbers = [float(name) for name in names if _NUMBER.fullmatch(name.strip())]
    if len(numbers) > 2 and all(later == one + 1 for one, later in pairwise(numbers)):
        return "they count up by one"
    if 2 * len(numbers) > len(names):
        raise _no_names(path, f"{len(numbers)} of the {len(names)} in its first line are numbers")
    return UNCERTAIN_HEADER_REASON


def _no_names(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} must begin with a line of column names, and {why}, as of a record: put a line of names before it, or declare "
        "its fields in a schema if they are names"
    )


def _is_word(name: str) -> bool:
    text = name.strip().lower()
    return any(map(str.isalpha, text)) and not (_NUMBER.fullmatch(text) or _MISSING_WORD.fullmatch(text))


def is_numeric_type(kind: Any) -> bool:
    """Whether Arrow's type is one of numbers."""
    types = import_optional("pyarrow", "pyarrow", "reading .csv files").types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def _is_there(name: str, column: Any) -> bool:
    """Is it a value of the column: one of its texts, or a date or truth where all are such?"""
    arrow = import_optional("pyarrow", "pyarrow", "reading .csv files")
    kinds = arrow.types
    text = kinds.is_string(column.type)
    if not (text or kinds.is_temporal(column.type) or kinds.is_boolean(column.type)):
        return False
    try:
        value = arrow.scalar(name.strip()).cast(column.type)
    except (arrow.ArrowException, NotImplementedError):
        return False
    if not text:
        return True
    compute = import_optional("pyarrow.compute", "pyarrow", "reading .csv files")
    return bool(name.strip() and compute.any(compute.equal(compute.utf8_trim_whitespace(column), value)).as_py())
