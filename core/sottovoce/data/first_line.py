"""Whether the first line of a `.csv` file names its columns, or is a record already."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from sottovoce.data.files import PLACEMENT, UNSURE
from sottovoce.errors import DataError
from sottovoce.optional import import_extra

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NO_WORD = re.compile(r"#?n/?a|<na>|nan|null|none|[+-]?inf(inity)?")
"""In small letters: what stands where a value is missing or endless."""
LABELS = ("label", "y")
"""What the label column is called where nobody says."""


def why_names(names: Sequence[str], column: Callable[[int], Any], label: str | None, path: Path) -> str:
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
    if over := [k for k in places if _is_word(names[k]) and _is_numeric(column(k).type)]:
        return f"a word, {names[over[0]]!r}, stands over a column of numbers"
    if again := [k for k in places if not _NUMBER.fullmatch(names[k].strip()) and _is_there(names[k], column(k))]:
        raise _no_names(path, f"what its first line has in column {again[0]} (counted from 0) stands below it, too")
    if usual := [name for name in names if name in (*LABELS, *PLACEMENT)]:
        return f"one is called {usual[0]!r}"
    numbers = [float(name) for name in names if _NUMBER.fullmatch(name.strip())]
    if len(numbers) > 2 and all(later == one + 1 for one, later in pairwise(numbers)):
        return "they count up by one"
    if 2 * len(numbers) > len(names):
        raise _no_names(path, f"{len(numbers)} of the {len(names)} in its first line are numbers")
    return UNSURE


def _no_names(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} must begin with a line of column names, and {why}, as of a record: put a line of names before it, or declare "
        "its fields in a schema if they are names"
    )


def _is_word(name: str) -> bool:
    text = name.strip().lower()
    return any(map(str.isalpha, text)) and not (_NUMBER.fullmatch(text) or _NO_WORD.fullmatch(text))


def _is_numeric(kind: Any) -> bool:
    types = import_extra("pyarrow", "pyarrow", "reading .csv files").types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def _is_there(name: str, column: Any) -> bool:
    """Is it a value of the column: one of its texts, or a date or truth where all are such?"""
    arrow = import_extra("pyarrow", "pyarrow", "reading .csv files")
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
    compute = import_extra("pyarrow.compute", "pyarrow", "reading .csv files")
    return bool(name.strip() and compute.any(compute.equal(compute.utf8_trim_whitespace(column), value)).as_py())
