"""A field of a record: a feature, which becomes numbers that are learned from, or the label."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, SerializeAsAny

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.data.cells import FITS, Cells, Flaw, Missing
from sottovoce.data.typed import BooleanType, Categories, CategoryType, DateType, NumberType, Reading, Typed
from sottovoce.registry import Registry

_Beyond = Literal["refuse", "clip"]

# ---- features --------------------------------------------------------------------------------------------


class Feature(Typed):
    """A field that is learned from: a number, a date, a category, true or false."""

    missing: Literal["refuse", "neutral", "flag"] = "refuse"
    """A record without a value. refuse: it does not fit. neutral: zeros stand for it. flag: likewise, and one more feature is 1
    where the value is missing, else 0."""

    def names(self, name: str) -> tuple[str, ...]:
        """Of the encoded features of the field of this name."""
        return (*self._names(name), *((f"{name} missing",) if self.missing == "flag" else ()))

    def _names(self, name: str) -> tuple[str, ...]:
        return (name,)

    def encode(self, cells: Cells, missing: Missing, into: FloatArray) -> IntArray:
        """Write a column's features.

        Args:
            cells: `(records,)`.
            missing: what counts as no value.
            into: zeros, `(records, features)`: as many as there are `names`.

        Returns:
            `(records,)`: 0 or the number of a `Flaw`.
        """
        values, flaws = self.read(cells, missing)
        gaps = flaws == Flaw.MISSING.value
        rows = np.flatnonzero(flaws == FITS)
        self._write(values[rows], rows, into)
        if self.missing == "flag":
            into[:, -1] = gaps
        return flaws if self.missing == "refuse" else np.where(gaps, FITS, flaws)

    def _write(self, values: FloatArray, rows: IntArray, into: FloatArray) -> None:
        into[rows, 0] = values

    @property
    def calm(self) -> float:
        """The first feature of the value that has the smallest norm."""
        return 1.0

    @abstractmethod
    def opposite(self, features: FloatArray) -> FloatArray:
        """The features of a value that is far from this one, `(features,)` each; what is missing stays missing."""


class _Bounded(Feature):
    """A feature with declared bounds."""

    beyond: _Beyond = "refuse"
    """A value beyond the bounds. refuse: the record does not fit. clip: it counts as the bound."""

    @property
    def clips(self) -> bool:
        return self.beyond == "clip"

    def opposite(self, features: FloatArray) -> FloatArray:
        return _negated(features)


class Number(NumberType, _Bounded):
    """A number within declared bounds, which are scaled onto [-1, 1]."""

    @property
    def calm(self) -> float:
        return 0.0


class Date(DateType, _Bounded):
    """A day between two declared ones, which are scaled onto [-1, 1]."""

    @property
    def calm(self) -> float:
        low, high = (day.toordinal() for day in self.bounds)
        return float(self.settle(Reading(np.array([float((low + high) // 2)]), np.zeros(1, dtype=np.int64))).values[0])


class Boolean(BooleanType, Feature):
    """True, which is 1, or false, which is -1."""

    def opposite(self, features: FloatArray) -> FloatArray:
        return _negated(features)


class Category(CategoryType, Feature):
    """One of declared words or numbers: a feature for each, 1 where it is that one, else 0."""

    def _names(self, name: str) -> tuple[str, ...]:
        return tuple(f"{name}={word}" for word in self.words)

    def _write(self, values: FloatArray, rows: IntArray, into: FloatArray) -> None:
        into[rows, values.astype(np.int64)] = 1.0

    def opposite(self, features: FloatArray) -> FloatArray:
        n = len(self.categories)
        return np.concatenate([np.roll(features[:n], 1), features[n:]])


def _negated(features: FloatArray) -> FloatArray:
    """Of all but a flag, which is the second one."""
    return np.concatenate([-features[:1], features[1:]])


FEATURES: Registry[Feature] = Registry(
    Feature,  # type: ignore[type-abstract]  # of its subclasses
    {"number": "Number", "category": "Category", "boolean": "Boolean", "date": "Date"},
    group=None,
    key="type",
)

AnyFeature = Annotated[SerializeAsAny[Feature], FEATURES]
"""A field of a schema: the feature of the type that it names."""


# ---- labels ----------------------------------------------------------------------------------------------


class Label(Typed):
    """The field that is learned. It may neither be missing nor beyond its bounds."""

    name: str

    @property
    def classes(self) -> tuple[str, ...] | None:
        """What the class numbers 0, 1, ... stand for; None: it is a number."""
        return None

    @property
    def values(self) -> tuple[str | float, ...]:
        """The classes as a record has them: words, numbers, or False and True."""
        return self.classes or ()

    def unscaled(self, labels: FloatArray) -> FloatArray:
        """Numbers as a record has them, of such as are learned, `(...)`."""
        return labels


class NumberLabel(NumberType, Label):
    """A number within declared bounds, which are scaled onto [-1, 1]."""

    def unscaled(self, labels: FloatArray) -> FloatArray:
        low, high = self.bounds
        return low + (labels + 1.0) * ((high - low) / 2.0)


class CategoryLabel(CategoryType, Label):
    """One of declared words or numbers: classes 0, 1, ... in this order."""

    categories: Annotated[Categories, Field(min_length=2)]

    @property
    def classes(self) -> tuple[str, ...]:
        return self.words

    @property
    def values(self) -> tuple[str | float, ...]:
        return self.categories


class BooleanLabel(BooleanType, Label):
    """False, which is class 0, or true, which is class 1."""

    def settle(self, reading: Reading) -> Reading:
        return Reading((reading.values + 1.0) / 2.0, reading.flaws)

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
"""The label of a schema, of the type that it names."""
