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

from sottovoce_core.arrays import AnyArray, FloatArray, as_floats, has_unrepresentable_integers, summarize_fields
from sottovoce_core.errors import DataError
from sottovoce_core.optional import import_optional
from sottovoce_core.text import abbreviate_names
from sottovoce_core.yaml_files import detect_format

SCHEMA_FILE_SUFFIXES = (".csv", ".parquet")
RECORD_FILE_SUFFIXES = (".npz", *SCHEMA_FILE_SUFFIXES)
"""Suffixes of files of records."""
PLACEMENT_COLUMNS = ("learner", "round")
"""Columns that determine the learner and the round of a record."""
UNCERTAIN_HEADER_REASON = "most of them are not numbers, and none is a value in its column"
"""Weakest reason to take the first line of a `.csv` file for names. It may be a record: no error quotes it."""
_MAX_SNIFFED_BYTES = 4096
"""Number of bytes of a file that are inspected to detect its format."""
LOST_DIGITS_REASON = "integers beyond 2**53, of which float64 loses digits"


@dataclass(frozen=True, slots=True, eq=False)
class RawTable:
    """Raw content of a source, before labels and placement are interpreted.

    Attributes:
        features: `(records, features)`.
        labels: `(records,)`, numbers or text.
        columns: names of the features, if the source has them.
        learner: `(records,)` indices or names.
        round: `(records,)`.
        test: features and labels held out by the source itself.
        label: name of the label column, if the source has names.
        header_reason: reason why the first line of a `.csv` file is taken for names.
    """

    features: FloatArray
    labels: AnyArray
    columns: tuple[str, ...] | None = None
    learner: AnyArray | None = None
    round: AnyArray | None = None
    test: tuple[FloatArray, AnyArray] | None = None
    label: str | None = None
    header_reason: str | None = None

    __repr__ = summarize_fields

    def describe_column(self, column: int) -> str:
        """Describe a feature column in an error: by its place, if it has no name or the name may be a value of a record."""
        return describe_column(column, None if self.columns is None else self.columns[column], self.header_reason)


def describe_column(place: int, name: str | None, header: str | None) -> str:
    """Describe a column in an error.

    Args:
        place: place of the column, from 0.
        name: its name, if known.
        header: reason why the first line of a `.csv` file is taken for names, as `RawTable.header_reason`.
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
        DataError: unreadable, pickled objects, or another layout.
    """
    arrays = _load_arrays(path)
    labels, test_labels = _get_first(arrays, "y", "y_train"), _get_first(arrays, "y_test", "y_test_part")
    found, test = _get_features(arrays, path), _get_features(arrays, path, test=True)
    if found is None or labels is None:
        raise DataError(f"{path} must hold the arrays X and y (or X_train and y_train), got {sorted(arrays)}")
    if (test is None) != (test_labels is None):
        raise DataError(f"{path} must hold both of X_test and y_test, or neither, got one of them")
    held_out = None if test is None or test_labels is None else (test[0], test_labels)
    return RawTable(found[0], labels, found[1], arrays.get("learner"), arrays.get("round"), held_out)


def read_npz_features(path: Path) -> FloatArray:
    """Read the records of a NumPy archive without their labels, in the layouts of `read_npz`.

    Raises:
        DataError: as `read_npz`.
    """
    arrays = _load_arrays(path)
    if (found := _get_features(arrays, path)) is None:
        raise DataError(f"{path} must hold the array X, got {sorted(arrays)}")
    return found[0]


_Features = tuple[FloatArray, tuple[str, ...] | None]
"""Records, and the names of their columns if the archive has them."""


def _get_features(arrays: Mapping[str, AnyArray], path: Path, *, test: bool = False) -> _Features | None:
    """Return the training records, or the test records; None: there are none."""
    if "num_train" in arrays:
        part = "test" if test else "train"
        return _read_mixed_table(arrays, part, path) if f"num_{part}" in arrays else None
    raw = _get_first(arrays, *(("X_test", "X_test_part") if test else ("X_onehot", "X", "X_train")))
    if raw is None:
        return None
    features = flatten_features(raw, path)
    return features, _get_column_names(arrays, features.shape[1])


def _load_arrays(path: Path) -> dict[str, AnyArray]:
    """Load every array of the archive."""
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
            f"{path} must be a NumPy .npz archive without pickled objects, got {_describe_archive(path, error)}"
        ) from None
    except MemoryError:
        raise DataError(f"{path} must fit into memory, got arrays of more than there is") from None


def _describe_archive(path: Path, error: Exception) -> str:
    """Describe a file that is not such an archive; NumPy's own message may quote bytes of it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    found = describe_content(path)
    if "NumPy archive" not in found and "zip" not in found:
        return found
    return "arrays of Python objects: write numbers or text" if "pickle" in str(error) else "a broken one: copy it anew"


def describe_content(path: Path) -> str:
    """Describe the content of a file that cannot be read as its name states, with what to do."""
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
"""Errors of NumPy and zipfile for an archive that is truncated, encrypted, compressed by an unknown method, or no archive."""


def _get_first(arrays: Mapping[str, AnyArray], *names: str) -> AnyArray | None:
    """Return the first of these arrays that exists."""
    return next((arrays[name] for name in names if name in arrays), None)


def flatten_features(values: AnyArray, path: Path | str) -> FloatArray:
    """Flatten `(records, ...)` to `(records, features)` numbers."""
    if values.dtype.kind not in "biuf" or values.ndim < 2:
        raise DataError(
            f"{path}: features must be numbers of the shape (records, features), got {values.dtype} {values.shape}"
        )
    if has_unrepresentable_integers(values):
        raise DataError(
            f"{path}: features must be numbers, got {LOST_DIGITS_REASON}: drop identifiers, or write the others as float64"
        )
    return as_floats(values.reshape(len(values), int(np.prod(values.shape[1:]))))


def _get_column_names(arrays: Mapping[str, AnyArray], width: int) -> tuple[str, ...] | None:
    """Return the names of the feature columns, if the archive has as many names as columns."""
    names = _get_first(arrays, "onehot_names", "columns") if "X_onehot" in arrays else arrays.get("columns")
    return tuple(map(str, names)) if names is not None and names.shape == (width,) else None


def _get_list(arrays: Mapping[str, AnyArray], name: str, path: Path) -> AnyArray:
    """Return an array of one axis.

    Raises:
        KeyError: no array of this name.
        DataError: another number of axes.
    """
    if (found := arrays[name]).ndim != 1:
        raise DataError(f"{path}: {name} must be a list, got an array of {found.ndim} axes")
    return found


def _read_mixed_table(arrays: Mapping[str, AnyArray], part: str, path: Path) -> tuple[FloatArray, tuple[str, ...]]:
    """Build the features: numeric columns unchanged, then one column for each value of each categorical column."""
    try:
        numbers, codes = arrays[f"num_{part}"], arrays[f"cat_{part}"]
        attributes = [str(name) for name in _get_list(arrays, "cat_columns", path)]
        values = [_get_list(arrays, f"values_{attribute}", path) for attribute in attributes]
        names = [str(name) for name in _get_list(arrays, "num_columns", path)]
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
    """Explain why the columns of a table are not those of the schema; empty: they are.

    Column names are quoted only if half of the fields are among them: else the line may be a record, and no header.

    Args:
        there: normalised names of the columns.
        wanted: for each field, whether a column has it.
        allowed: allowed columns.
        odd: remedy for another column.
    """
    lacking = [field for field, found in wanted.items() if not found]
    if 2 * len(lacking) > len(wanted):
        fields = f"the fields are {quote_names([*wanted])}"
        found = len(wanted) - len(lacking)
        many = (
            f"only {found} of its {len(there)} are fields" if found > 1 else f"only one of its {len(there)} is a field"
        )
        many = many if found else f"none of its {len(there)} is a field"
        return f"must begin with a line of column names, and {many} of the schema; {fields}"
    problems = []
    if lacking:
        problems.append(f"must have a column for every field of the schema, and has none for {quote_names(lacking)}")
    if unknown := sorted(name for name in there if name not in allowed):
        problems.append(f"every column must be in the schema, and {quote_names(unknown)} is not: {odd}")
    return "; ".join(problems)


def quote_names(names: Collection[str]) -> str:
    """Join names in quotes, for people."""
    return abbreviate_names([*map(repr, names)])


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_MISSING_WORD = re.compile(r"#?n/?a|<na>|nan|null|none|[+-]?inf(inity)?")
"""Words, in lower case, for a missing or infinite value."""
LABEL_COLUMN_NAMES = ("label", "y")
"""Default names of the label column."""


def explain_header(names: Sequence[str], column: Callable[[int], Any], label: str | None, path: Path) -> str:
    """Return the first of these reasons why the first line of a file holds names.

    One name is the label's. A word heads a column of numbers. One name is usual: `label`, `y`, `learner`, `round`. The names
    count up by one, or at least half of them are no numbers.

    Args:
        names: the first line.
        column: function from a place to the values below it: Arrow's array, of the type that it has without the first line.
        label: name of the label column in the spec.
        path: path of the file, for errors.

    Raises:
        DataError: the line is a record (not quoted): no word heads numbers, and one occurs again in its column; or most are
            numbers.
    """
    if label is not None and label in names:
        return f"one is called {label!r}, as data.label names it"
    places = range(len(names))
    if over := [k for k in places if _is_word(names[k]) and is_numeric_type(column(k).type)]:
        return f"a word, {names[over[0]]!r}, heads a column of numbers"
    if again := [k for k in places if not _NUMBER.fullmatch(names[k].strip()) and _is_value_of(names[k], column(k))]:
        raise _build_header_error(
            path, f"what its first line has in column {again[0]} (counted from 0) occurs below, too"
        )
    if usual := [name for name in names if name in (*LABEL_COLUMN_NAMES, *PLACEMENT_COLUMNS)]:
        return f"one is called {usual[0]!r}"
    numbers = [float(name) for name in names if _NUMBER.fullmatch(name.strip())]
    if len(numbers) > 2 and all(later == one + 1 for one, later in pairwise(numbers)):
        return "they count up by one"
    if 2 * len(numbers) > len(names):
        raise _build_header_error(path, f"{len(numbers)} of the {len(names)} in its first line are numbers")
    return UNCERTAIN_HEADER_REASON


def _build_header_error(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} must begin with a line of column names, and {why}, like a record: put a line of names before it, or declare "
        "its fields in a schema if they are names"
    )


def _is_word(name: str) -> bool:
    text = name.strip().lower()
    return any(map(str.isalpha, text)) and not (_NUMBER.fullmatch(text) or _MISSING_WORD.fullmatch(text))


def is_numeric_type(kind: Any) -> bool:
    """Return whether Arrow's type is numeric."""
    types = import_optional("pyarrow", "pyarrow", "reading .csv files").types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def _is_value_of(name: str, column: Any) -> bool:
    """Return whether the name is a value of the column: one of its texts, or a date or truth value if all are."""
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
