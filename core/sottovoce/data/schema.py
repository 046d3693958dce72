"""A schema of records: which fields there are, what each may say, and so how a record becomes features.

All of it is declared and nothing is read off records, so that the encoding is public, and the same at every learner.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field, field_validator, model_validator

from sottovoce.arrays import FloatArray
from sottovoce.data.cells import Missing, normal
from sottovoce.data.fields import AnyFeature, AnyLabel, Label
from sottovoce.data.files import PLACEMENT
from sottovoce.data.typed import LONGEST, Words
from sottovoce.registry import Section

MOST_FEATURES = 2**16


def _name(value: object) -> str:
    """The name of a field as it is compared."""
    if not isinstance(value, str):
        raise ValueError("a field's name must be text: put quotes around it")
    name = normal(value)
    if not 0 < len(name) <= LONGEST or not name.isprintable():
        raise ValueError(f"a field's name must be 1 to {LONGEST} printable characters")
    if name in PLACEMENT:
        raise ValueError("learner and round place a record: they are no fields of it, and need not be declared")
    return name


Name = Annotated[str, BeforeValidator(_name)]


class Schema(Section):
    """The fields of a record.

    Features stand in the order of their fields' names: a mapping has no order, and the same schema must give the same
    features wherever it was written or copied.
    """

    features: Annotated[dict[Name, AnyFeature], Field(min_length=1)]
    """By name, which is that of a column."""
    label: AnyLabel
    ignored: tuple[Name, ...] = ()
    """Fields that are there, and not learned from."""
    missing_values: Words = ("NA", "?")
    """What counts as no value, in any case of letters, beside none at all and empty text."""

    @field_validator("features", mode="before")
    @classmethod
    def _names_differ(cls, features: Any) -> Any:
        if isinstance(features, Mapping):
            named = Counter(normal(name) for name in features if isinstance(name, str))
            if twice := [name for name, times in named.items() if times > 1]:
                raise ValueError(
                    f"names must differ in more than blanks or Unicode's forms: {twice[0]!r} is there twice"
                )
        return features

    @field_validator("features")
    @classmethod
    def _in_order(cls, features: dict[str, Any]) -> dict[str, Any]:
        return dict(sorted(features.items()))

    @field_validator("label")
    @classmethod
    def _label_is_named(cls, label: Label) -> Label:
        return label.model_copy(update={"name": _name(label.name)})

    @model_validator(mode="after")
    def _one_meaning(self) -> Schema:
        declared = [*self.features, self.label.name, *self.ignored]
        if twice := [name for name, times in Counter(declared).items() if times > 1]:
            raise ValueError(f"a field is a feature, the label or ignored, and that once: {twice[0]!r} is there twice")
        if self.width > MOST_FEATURES:
            raise ValueError(f"there may be {MOST_FEATURES} encoded features, and there are {self.width}")
        if twice := [name for name, times in Counter(self.names).items() if times > 1]:
            raise ValueError(f"encoded features must differ in name, and two are called {twice[0]!r}: rename a field")
        for name, field in {**self.features, self.label.name: self.label}.items():
            if none := [each for each in getattr(field, "categories", ()) if self.missing.has(each)]:
                raise ValueError(
                    f"{none[0]!r} is a category of {name!r}, and counts as missing: take it out of the categories or out "
                    f"of missing_values, which are {list(self.missing_values)}"
                )
        return self

    def __hash__(self) -> int:
        return hash((tuple(self.features.items()), self.label, self.ignored, self.missing_values))

    @cached_property
    def missing(self) -> Missing:
        """What counts as no value."""
        return Missing.of(self.missing_values)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the encoded features, in order: `age`, `ward=icu`, `stay missing`."""
        return tuple(each for name, feature in self.features.items() for each in feature.names(name))

    @cached_property
    def width(self) -> int:
        """How many encoded features there are."""
        return sum(len(feature.names(name)) for name, feature in self.features.items())

    @property
    def norm_bound(self) -> float:
        """The largest l2 norm of a record's encoded features: no field contributes more than 1 to its square."""
        return math.sqrt(len(self.features))

    # ---- records that it allows ------------------------------------------------------------------------------

    def opposite(self, features: FloatArray) -> FloatArray:
        """A record that is far from this one: `(width,)` each.

        Numbers, dates, true and false are mirrored, a category becomes the next one, and what is missing stays missing.
        """
        made, at = features.copy(), 0
        for name, feature in self.features.items():
            end = at + len(feature.names(name))
            made[at:end] = feature.opposite(features[at:end])
            at = end
        return made

    def extreme(self) -> FloatArray:
        """A record of the largest norm, `(width,)`: upper bounds, true, and first categories."""
        made, at = np.zeros(self.width), 0
        for name, feature in self.features.items():
            made[at] = 1.0
            at += len(feature.names(name))
        return made

    def quiet(self) -> FloatArray:
        """A record of the smallest norm, `(width,)`: half-way between bounds, and missing where that is neutral."""
        made, at = np.zeros(self.width), 0
        for name, feature in self.features.items():
            made[at] = 0.0 if feature.missing == "neutral" else feature.calm
            at += len(feature.names(name))
        return made
