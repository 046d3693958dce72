"""Fields of a record, by type: a number, a date, a category, true or false; a feature or the label.

Reading has two steps. `parse` converts a value to the field's own unit: a number, a day, the place of a category. `_settle`
validates all of them against the declaration, and scales.
"""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny

from sottovoce_core.arrays import FloatArray, IntArray, as_floats
from sottovoce_core.data.cells import (
    NO_FLAW,
    Cells,
    CellValue,
    Flaw,
    MissingValues,
    UnsupportedValue,
    normalise_text,
    parse_day,
    parse_number,
    to_python_value,
)
from sottovoce_core.registry import Finite, Registry, Section

MAX_NAME_CHARACTERS = 200
"""Maximum number of characters of a name or a category."""
_MAX_CODE_BITS = 1024
"""Minimum number of bits of an integer that is too large for a code."""


_ParsedColumn = tuple[FloatArray, IntArray]
"""Parsed column: values, meaningless where there is a flaw; and the number of the `Flaw` of each value."""


# ---- validation of a schema file -------------------------------------------------------------------------

_QUOTES_ADVICE = "YAML reads true and false as truth values, and 2020-01-31 as a date: put quotes around text"


def _require_words(value: object) -> object:
    """Require text and numbers."""
    for each in value if isinstance(value, list | tuple) else ():
        if isinstance(each, bool) or not isinstance(each, str | int | float):
            raise ValueError(f"must be text or numbers ({_QUOTES_ADVICE})")
    return value


def _require_days(value: object) -> object:
    if isinstance(value, list | tuple) and not all(map(_is_day, value)):
        raise ValueError("must be two days such as 2020-01-31")
    return value


def _is_day(value: object) -> bool:
    """Return whether this is a day without a time, as YAML or JSON gives it."""
    return type(value) is datetime.date or (
        isinstance(value, str) and len(value) == len("2020-01-31") and not isinstance(parse_day(value), Flaw)
    )


def _require_order(bounds: Any) -> Any:
    if not bounds[0] < bounds[1]:
        raise ValueError("the first bound must be below the second one")
    return bounds


def _require_distinct(categories: tuple[str | int | float, ...]) -> tuple[str | int | float, ...]:
    """Normalise categories, and require that they differ."""
    kinds = {isinstance(each, str) for each in categories}
    if len(kinds) > 1:
        raise ValueError(
            f"must be all text or all numbers: put quotes around {_list_bare_words(categories)} if it is text"
        )
    made = tuple(normalise_text(each) if isinstance(each, str) else each for each in categories)
    if any(not np.isfinite(float(each)) for each in made if not isinstance(each, str)):
        raise ValueError("numbers must be finite")
    if any(not 0 < len(each) <= MAX_NAME_CHARACTERS for each in made if isinstance(each, str)):
        raise ValueError(f"must be texts of 1 to {MAX_NAME_CHARACTERS} characters")
    if len({each if isinstance(each, str) else float(each) for each in made}) < len(made):
        raise ValueError("must differ in more than blanks, Unicode's forms, or how a number is written")
    if any(abs(each) >= 2**53 for each in made if not isinstance(each, str)):
        raise ValueError("numbers must be below 2**53, beyond which they lose digits: put quotes around codes")
    return made


def _list_bare_words(categories: tuple[str | int | float, ...]) -> str:
    return str(next(each for each in categories if not isinstance(each, str)))


Words = Annotated[tuple[str | int | float, ...], BeforeValidator(_require_words)]
_Bounds = Annotated[tuple[Finite, Finite], AfterValidator(_require_order)]
_Days = Annotated[tuple[datetime.date, datetime.date], BeforeValidator(_require_days), AfterValidator(_require_order)]
_Categories = Annotated[Words, AfterValidator(_require_distinct)]


# ---- types -----------------------------------------------------------------------------------------------


class _Typed(Section, ABC):
    """A field of one type: a feature, or the label."""

    type: str

    def read(self, cells: Cells, missing: MissingValues) -> _ParsedColumn:
        """Parse a column, and validate it against the declaration.

        Args:
            cells: `(records,)`.
            missing: values that count as missing.
        """
        return self._settle(*self._parse_column(cells, missing))

    def _parse_column(self, cells: Cells, missing: MissingValues) -> _ParsedColumn:
        values, flaws = np.zeros(len(cells)), np.zeros(len(cells), dtype=np.int64)
        known: dict[object, float | Flaw] = {}
        for i, cell in enumerate(cells.tolist() if isinstance(cells, np.ndarray) else cells):
            try:
                found = known.get(key := (type(cell), cell))
            except TypeError:  # a list or the like, which no field accepts
                key, found = None, None
            if found is None:
                value = to_python_value(cell)
                found = known[key] = Flaw.MISSING if missing.is_missing(value) else self.parse(value)
            if isinstance(found, Flaw):
                flaws[i] = found.value
            else:
                values[i] = found
        return values, flaws

    @abstractmethod
    def parse(self, value: CellValue | UnsupportedValue) -> float | Flaw:
        """Convert a value to the field's own unit."""

    def _settle(self, values: FloatArray, flaws: IntArray) -> _ParsedColumn:
        """Scale parsed values, and validate them against the declaration."""
        return values, flaws

    @property
    def words(self) -> tuple[str, ...]:
        """Categories as text, if the type has categories."""
        return ()

    @property
    @abstractmethod
    def accepted_values(self) -> str:
        """Description of the accepted values."""


def _scale(values: FloatArray, flaws: IntArray, low: float, high: float, *, clips: bool) -> _ParsedColumn:
    """Scale onto [-1, 1]; a value out of bounds is refused, unless `clips`."""
    within = np.clip(values, low, high)
    if not clips:
        flaws = np.where((flaws == NO_FLAW) & (within != values), Flaw.OUT_OF_BOUNDS.value, flaws)
    return np.clip(2.0 * ((within - low) / (high - low)) - 1.0, -1.0, 1.0), flaws


def _format_number(number: float) -> str:
    """Format a number for people: 1.0 is `1`."""
    return str(int(number)) if float(number).is_integer() else str(number)


class _Number(_Typed):
    """A number within declared bounds."""

    type: Literal["number"] = "number"
    bounds: _Bounds
    """Smallest and largest value; public."""

    def _parse_column(self, cells: Cells, missing: MissingValues) -> _ParsedColumn:
        """Parse an array in one step: its values may all differ."""
        if not isinstance(cells, np.ndarray):
            return super()._parse_column(cells, missing)
        numbers = as_floats(cells)
        fits = np.isfinite(numbers)
        flaws = np.where(fits, NO_FLAW, Flaw.NOT_FINITE.value)
        return np.where(fits, numbers, 0.0), np.where(missing.missing_mask(numbers), Flaw.MISSING.value, flaws)

    def parse(self, value: CellValue | UnsupportedValue) -> float | Flaw:
        return parse_number(value)

    def _settle(self, values: FloatArray, flaws: IntArray) -> _ParsedColumn:
        return _scale(values, flaws, *self.bounds, clips=_clips(self))

    @property
    def accepted_values(self) -> str:
        return " to ".join(map(_format_number, self.bounds))


class _Category(_Typed):
    """Declared word or number."""

    type: Literal["category"] = "category"
    categories: Annotated[_Categories, Field(min_length=1)]
    """All values that the field may have; public."""

    @cached_property
    def _places(self) -> Mapping[object, int]:
        return {each if isinstance(each, str) else float(each): k for k, each in enumerate(self.categories)}

    def parse(self, value: CellValue | UnsupportedValue) -> float | Flaw:
        written_value: object = value
        if not isinstance(self.categories[0], str):
            written_value = parse_number(value)
        elif isinstance(value, int) and not isinstance(value, bool):  # a code of digits only
            written_value = str(value) if value.bit_length() < _MAX_CODE_BITS else None
        place = self._places.get(written_value)
        return Flaw.NO_CATEGORY if place is None else float(place)

    @property
    def words(self) -> tuple[str, ...]:
        """Categories as text: the number 1.0 is `1`."""
        return tuple(each if isinstance(each, str) else _format_number(each) for each in self.categories)

    @property
    def accepted_values(self) -> str:
        return ", ".join(self.words)


_TRUE, _FALSE = ("true", "t", "yes", "y", "on"), ("false", "f", "no", "n", "off")


def parse_boolean(value: CellValue | UnsupportedValue) -> bool | None:
    """Read a word or a number as true or false; None: neither."""
    written_value, number = value.casefold() if isinstance(value, str) else None, parse_number(value)
    if value is True or written_value in _TRUE or number == 1.0:
        return True
    return False if value is False or written_value in _FALSE or number == 0.0 else None


class _Boolean(_Typed):
    """True or false, in their usual words."""

    type: Literal["boolean"] = "boolean"

    def parse(self, value: CellValue | UnsupportedValue) -> float | Flaw:
        written_value = parse_boolean(value)
        return Flaw.NO_BOOLEAN if written_value is None else 1.0 if written_value else -1.0

    @property
    def accepted_values(self) -> str:
        return "true, false"


# ---- features --------------------------------------------------------------------------------------------


class Feature(_Typed):
    """A field to learn from: a number, a date, a category, true or false."""

    missing: Literal["refuse", "neutral", "flag"] = "refuse"
    """Policy for a missing value. refuse: the record does not fit. neutral: zeros replace it. flag: as neutral, with one more
    feature that is 1 if the value is missing, else 0."""

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names of the encoded features of the field with this name."""
        return (*self._names(name), *((f"{name} missing",) if self.missing == "flag" else ()))

    def _names(self, name: str) -> tuple[str, ...]:
        return (name,)

    def encode(self, cells: Cells, missing: MissingValues, into: FloatArray) -> IntArray:
        """Write a column's features.

        Args:
            cells: `(records,)`.
            missing: values that count as missing.
            into: zeros, `(records, features)`, one column for each of `names`.

        Returns:
            `(records,)`: 0 or the number of a `Flaw`.
        """
        values, flaws = self.read(cells, missing)
        gaps = flaws == Flaw.MISSING.value
        rows = np.flatnonzero(flaws == NO_FLAW)
        self._write(values[rows], rows, into)
        if self.missing == "flag":
            into[:, -1] = gaps
        return flaws if self.missing == "refuse" else np.where(gaps, NO_FLAW, flaws)

    def _write(self, values: FloatArray, rows: IntArray, into: FloatArray) -> None:
        into[rows, 0] = values

    @property
    def min_norm_value(self) -> float:
        """First feature of the value with the smallest norm."""
        return 1.0

    @abstractmethod
    def make_opposite(self, features: FloatArray) -> FloatArray:
        """Return the features of a distant value, `(features,)` each; a missing value stays missing."""


class _Bounded(Feature):
    """A feature with declared bounds."""

    out_of_bounds: Literal["refuse", "clip"] = "refuse"
    """Policy for a value out of bounds. refuse: the record does not fit. clip: the value becomes the bound."""

    def make_opposite(self, features: FloatArray) -> FloatArray:
        return _negate(features)


def _clips(field: _Typed) -> bool:
    """Return whether the field clips a value out of bounds, instead of refusing it."""
    return isinstance(field, _Bounded) and field.out_of_bounds == "clip"


class Number(_Number, _Bounded):
    """A number within declared bounds, which are scaled onto [-1, 1]."""

    @property
    def min_norm_value(self) -> float:
        return 0.0


class Date(_Bounded):
    """A day between two declared ones, which are scaled onto [-1, 1]."""

    type: Literal["date"] = "date"
    bounds: _Days
    """First and last day; public."""

    @property
    def _ends(self) -> tuple[float, float]:
        low, high = (float(day.toordinal()) for day in self.bounds)
        return low, high

    def parse(self, value: CellValue | UnsupportedValue) -> float | Flaw:
        return parse_day(value)

    def _settle(self, values: FloatArray, flaws: IntArray) -> _ParsedColumn:
        return _scale(values, flaws, *self._ends, clips=_clips(self))

    @property
    def accepted_values(self) -> str:
        return "{} to {}".format(*self.bounds)

    @property
    def min_norm_value(self) -> float:
        return float(self._settle(np.array([sum(self._ends) // 2]), np.zeros(1, dtype=np.int64))[0][0])


class Boolean(_Boolean, Feature):
    """True, which is 1, or false, which is -1."""

    def make_opposite(self, features: FloatArray) -> FloatArray:
        return _negate(features)


class Category(_Category, Feature):
    """Declared word or number: a feature for each, 1 for the value, else 0."""

    def _names(self, name: str) -> tuple[str, ...]:
        return tuple(f"{name}={word}" for word in self.words)

    def _write(self, values: FloatArray, rows: IntArray, into: FloatArray) -> None:
        into[rows, values.astype(np.int64)] = 1.0

    def make_opposite(self, features: FloatArray) -> FloatArray:
        n = len(self.categories)
        return np.concatenate([np.roll(features[:n], 1), features[n:]])


def _negate(features: FloatArray) -> FloatArray:
    """Negate all features but a flag, which is the second one."""
    return np.concatenate([-features[:1], features[1:]])


FEATURES: Registry[Feature] = Registry(
    Feature,  # type: ignore[type-abstract]  # of its subclasses
    {"number": "Number", "category": "Category", "boolean": "Boolean", "date": "Date"},
    group=None,
    key="type",
)

AnyFeature = Annotated[SerializeAsAny[Feature], FEATURES]
"""Field of a schema: the feature of the named type."""


# ---- labels ----------------------------------------------------------------------------------------------


class Label(_Typed):
    """The field to predict. It may be neither missing nor out of bounds."""

    name: str
    """Name of the field."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Meanings of the class numbers 0, 1, ...; None: the label is a number."""
        return None

    @property
    def values(self) -> tuple[str | float, ...]:
        """Classes as in a record: words, numbers, or False and True."""
        return self.classes or ()

    def unscale(self, labels: FloatArray) -> FloatArray:
        """Convert learned numbers, `(...)`, back to those of a record."""
        return labels


class NumberLabel(_Number, Label):
    """A number within declared bounds, which are scaled onto [-1, 1]."""

    def unscale(self, labels: FloatArray) -> FloatArray:
        low, high = self.bounds
        return low + (labels + 1.0) * ((high - low) / 2.0)


class CategoryLabel(_Category, Label):
    """Declared word or number: classes 0, 1, ... in this order."""

    categories: Annotated[_Categories, Field(min_length=2)]

    @property
    def classes(self) -> tuple[str, ...]:
        return self.words

    @property
    def values(self) -> tuple[str | float, ...]:
        return self.categories


class BooleanLabel(_Boolean, Label):
    """False, which is class 0, or true, which is class 1."""

    def _settle(self, values: FloatArray, flaws: IntArray) -> _ParsedColumn:
        return (values + 1.0) / 2.0, flaws

    @property
    def classes(self) -> tuple[str, ...]:
        return ("false", "true")

    @property
    def values(self) -> tuple[str | float, ...]:
        return (False, True)


LABELS: Registry[Label] = Registry(
    Label,  # type: ignore[type-abstract]  # of its subclasses
    {"number": "NumberLabel", "category": "CategoryLabel", "boolean": "BooleanLabel"},
    group=None,
    key="type",
)

AnyLabel = Annotated[SerializeAsAny[Label], LABELS]
"""The label of a schema, of the named type."""
