"""Values in the cells of a table, or in the fields of a live record: numbers, dates, words, or missing.

A value means the same from every source: a number of NumPy or of Python and the same number as text in a CSV file, a date of a
database and a date as text.
"""

from __future__ import annotations

import datetime
import re
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from sottovoce_core.errors import DataError

CellValue = str | int | float | datetime.date | None
"""Plain Python value: text without surrounding blanks and in Unicode's composed form (NFC), None if missing. A bool is an int,
a datetime a date."""

Cells = npt.NDArray[Any] | list[Any]
"""A column: an array of numbers, or a list of any values."""


class Flaw(Enum):
    """Reasons why a value does not fit its field; an array of flaws holds their numbers, and 0 for no flaw."""

    MISSING = 1
    NO_NUMBER = 2
    COMMA = 3
    NOT_FINITE = 4
    OUT_OF_BOUNDS = 5
    NO_CATEGORY = 6
    NO_BOOLEAN = 7
    NO_DATE = 8

    @property
    def description(self) -> str:
        """Description for people; reveals nothing of the value."""
        return _FLAW_DESCRIPTIONS[self]


NO_FLAW = 0
_FLAW_DESCRIPTIONS = {
    Flaw.MISSING: "missing",
    Flaw.NO_NUMBER: "not a number",
    Flaw.COMMA: "a number with a comma, write 1234.5",
    Flaw.NOT_FINITE: "not a finite number",
    Flaw.OUT_OF_BOUNDS: "beyond its bounds",
    Flaw.NO_CATEGORY: "none of its categories",
    Flaw.NO_BOOLEAN: "neither true nor false",
    Flaw.NO_DATE: "not a date, write 2020-01-31",
}


class UnsupportedValue:
    """A value of a kind that no field accepts: bytes, a list, a duration."""


UNSUPPORTED_VALUE = UnsupportedValue()


def normalise_text(text: str) -> str:
    """Normalise text for comparison: Unicode's composed form (NFC), without surrounding blanks."""
    return unicodedata.normalize("NFC", text).strip()


def to_python_value(value: Any) -> CellValue | UnsupportedValue:
    """Convert a value of a library, or of Python, to Python's own; `UNSUPPORTED_VALUE` if no field accepts its kind."""
    if isinstance(value, np.datetime64):
        value = value.astype("datetime64[us]").item()  # in nanoseconds it would become a number
        return value if value is None or isinstance(value, datetime.date) else UNSUPPORTED_VALUE
    if isinstance(value, np.generic) and not isinstance(value, np.timedelta64):
        value = float(value) if isinstance(value, np.floating) else value.item()
    if isinstance(value, str):
        return normalise_text(value)
    if value is None or value is np.ma.masked or type(value).__name__ == "NAType":  # the latter is pandas'
        return None
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, datetime.datetime) and value != value:  # what pandas has where there is none
        return None
    return value if isinstance(value, int | float | datetime.date) else UNSUPPORTED_VALUE


# ---- numbers and dates -----------------------------------------------------------------------------------

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_COMMA_NUMBER = re.compile(r"[+-]?[\d.]*,[\d.,]*", re.ASCII)
_NOT_FINITE = ("nan", "inf", "infinity")
_DATE = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ]((?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d)?)(?:\.\d+)?(Z|[+-]\d\d:?\d\d)?)?", re.ASCII
)


def parse_number(value: CellValue | UnsupportedValue) -> float | Flaw:
    """Convert a number, or its text, to float64; a number beyond float64's range becomes the largest that it holds."""
    if isinstance(value, str):
        if _NUMBER.fullmatch(value):
            return _clamp(float(value))
        if value.lstrip("+-").casefold() in _NOT_FINITE:
            return Flaw.NOT_FINITE
        return Flaw.COMMA if _COMMA_NUMBER.fullmatch(value) else Flaw.NO_NUMBER
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Flaw.NO_NUMBER
    try:
        found = float(value)
    except OverflowError:
        return _clamp(float("inf") if value > 0 else float("-inf"))
    return found if np.isfinite(found) else Flaw.NOT_FINITE


def _clamp(number: float) -> float:
    return min(max(number, -sys.float_info.max), sys.float_info.max)


def parse_day(value: CellValue | UnsupportedValue) -> float | Flaw:
    """Return the day of a date, or of its text (ISO 8601), counted from the first of the year 1; in UTC given a time zone."""
    try:
        if isinstance(value, str):
            if (parts := _DATE.fullmatch(value)) is None:
                return Flaw.NO_DATE
            day, time, zone = parts.groups()
            value = datetime.datetime.fromisoformat(f"{day}T{time or '00:00'}{zone or ''}")
        if isinstance(value, datetime.datetime) and value.tzinfo is not None:
            value = value.astimezone(datetime.UTC)
    except (ValueError, OverflowError):  # the 30th of February; the first day of all, further east
        return Flaw.NO_DATE
    return float(value.toordinal()) if isinstance(value, datetime.date) else Flaw.NO_DATE


# ---- missing values --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MissingValues:
    """Values that count as missing, in addition to None and empty text.

    Attributes:
        words: case-folded words.
        numbers: numbers, however they are written.
    """

    words: frozenset[str] = frozenset()
    numbers: frozenset[float] = frozenset()

    @classmethod
    def from_values(cls, listed: Iterable[str | int | float]) -> MissingValues:
        """Make the set from text and numbers; numbers may be given as text."""
        numbers: set[float] = set()
        words: set[str] = set()
        for each in listed:
            number = parse_number(to_python_value(each))
            if isinstance(number, Flaw):
                words.add(normalise_text(str(each)).casefold())
            else:
                numbers.add(number)
        return cls(frozenset(words), frozenset(numbers))

    def is_missing(self, value: CellValue | UnsupportedValue) -> bool:
        """Return whether this value is missing. Not-a-number counts as the word `nan`."""
        if value is None or value == "":
            return True
        if isinstance(value, float) and np.isnan(value):
            return "nan" in self.words
        if isinstance(value, str) and value.casefold() in self.words:
            return True
        return bool(self.numbers) and parse_number(value) in self.numbers

    def missing_mask(self, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Return which numbers are missing, `(records,)`."""
        found = np.isin(numbers, list(self.numbers))
        return found | np.isnan(numbers) if "nan" in self.words else found


def extract_cells(column: Any, name: str) -> Cells:
    """Extract a column of any library, as an array of numbers or else as a list.

    Values that pandas treats as missing, NaN among numbers too, become None.

    Args:
        column: a list, a NumPy array, an Arrow array, a pandas or polars series.
        name: name of the column in errors.

    Raises:
        DataError: not a list of values.
    """
    if hasattr(column, "to_pylist"):
        return list(column.to_pylist())
    if hasattr(column, "isna"):
        return [None if gone else value for value, gone in zip(column, column.isna(), strict=True)]
    if isinstance(column, np.ndarray):
        if column.ndim != 1:
            raise DataError(f"field {name!r} must be a list of values, got an array of {column.ndim} axes")
        numeric = column.dtype.kind in "iuf" and not isinstance(column, np.ma.MaskedArray)
        return column if numeric else list(column)
    if isinstance(column, str | bytes) or (not isinstance(column, Sequence) and not hasattr(column, "__array__")):
        raise DataError(f"field {name!r} must be a list of values, one for each record, got {type(column).__name__}")
    return list(column)


# ---- columns that are not fields ---------------------------------------------------------------------------

_INDEX = re.compile(r"(Unnamed: \d+)?|__index_level_\d+__|Unnamed: \d+_level_\d+")
INDEX_DESCRIPTION = "the index of a pandas table, or a column without a name"
CODE_PATTERN = r"0\d+|0[xX][\dA-Fa-f]+|[+-]?\d{16,}"
"""Pattern of digits that are codes: with leading zeros, hexadecimal, or more digits than float64 holds."""
CODE_DESCRIPTION = "digits that are codes: with leading zeros, hexadecimal, or 16 digits and more"


def is_index(name: str) -> bool:
    """Return whether a column is named as pandas names its index, which numbers records: an empty name is one."""
    return _INDEX.fullmatch(normalise_text(name)) is not None
