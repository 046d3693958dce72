"""Section `data` of a run spec: the source of records, their schema, and their partition among learners.

A schema declares the fields and their allowed values, and thereby the encoding of a record as features. Nothing is derived from
records, so the encoding is public, and equal at every learner.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    SerializerFunctionWrapHandler,
    WrapSerializer,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from sottovoce_core.arrays import FloatArray
from sottovoce_core.data.cells import MissingValues, normalise_text
from sottovoce_core.data.fields import MAX_NAME_CHARACTERS, AnyFeature, AnyLabel, Label, Words
from sottovoce_core.data.files import PLACEMENT_COLUMNS
from sottovoce_core.data.memory import MemoryRecords, is_records
from sottovoce_core.data.partitions import AnyPartition, IidPartition
from sottovoce_core.data.scaling import AnyScale, NoScale
from sottovoce_core.data.synthetic import AnySyntheticSource, SyntheticSource
from sottovoce_core.registry import Count, Section

MAX_FEATURES = 2**16


def _name(value: object) -> str:
    """Normalise the name of a field."""
    if not isinstance(value, str):
        raise ValueError("a field's name must be text: put quotes around it")
    name = normalise_text(value)
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        raise ValueError(f"a field's name must be 1 to {MAX_NAME_CHARACTERS} printable characters")
    if name in PLACEMENT_COLUMNS:
        raise ValueError("learner and round place a record: they are not fields of it, and must be left out")
    return name


FieldName = Annotated[str, BeforeValidator(_name)]


class Schema(Section):
    """Fields of a record.

    Features are in the order of their fields' names: a mapping has no order, and the same schema must give the same features
    wherever it was written or copied.
    """

    features: Annotated[dict[FieldName, AnyFeature], Field(min_length=1)]
    """Features by name, which is that of a column."""
    label: AnyLabel
    """Label: its name and its type."""
    ignored: tuple[FieldName, ...] = ()
    """Fields that may be present, and are not learned."""
    missing_values: Words = ("NA", "?")
    """Values that count as missing, ignoring case, in addition to None and empty text."""

    @field_validator("features", mode="before")
    @classmethod
    def _require_distinct_names(cls, features: Any) -> Any:
        if isinstance(features, Mapping):
            named = Counter(normalise_text(name) for name in features if isinstance(name, str))
            if twice := [name for name, times in named.items() if times > 1]:
                raise ValueError(f"names must differ in more than blanks or Unicode's forms, got {twice[0]!r} twice")
        return features

    @field_validator("features")
    @classmethod
    def _in_order(cls, features: dict[str, Any]) -> dict[str, Any]:
        return dict(sorted(features.items()))

    @field_validator("label")
    @classmethod
    def _normalise_label_name(cls, label: Label) -> Label:
        return label.model_copy(update={"name": _name(label.name)})

    @model_validator(mode="after")
    def _require_one_meaning(self) -> Schema:
        declared = [*self.features, self.label.name, *self.ignored]
        if twice := [name for name, times in Counter(declared).items() if times > 1]:
            raise ValueError(
                f"a field must be either a feature, the label or ignored, and once, got {twice[0]!r} twice"
            )
        if self.width > MAX_FEATURES:
            raise ValueError(f"there must be at most {MAX_FEATURES} encoded features, got {self.width}")
        if twice := [name for name, times in Counter(self.names).items() if times > 1]:
            raise ValueError(f"encoded features must differ in name, got {twice[0]!r} twice: rename a field")
        for name, field in {**self.features, self.label.name: self.label}.items():
            if none := [each for each in getattr(field, "categories", ()) if self.missing_value_set.is_missing(each)]:
                raise ValueError(
                    f"{none[0]!r} is a category of {name!r}, and counts as missing: take it out of the categories or out "
                    f"of missing_values, which are {list(self.missing_values)}"
                )
        return self

    def __hash__(self) -> int:
        return hash((tuple(self.features.items()), self.label, self.ignored, self.missing_values))

    @cached_property
    def missing_value_set(self) -> MissingValues:
        """Values that count as missing."""
        return MissingValues.from_values(self.missing_values)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the encoded features, in order: `age`, `ward=icu`, `stay missing`."""
        return tuple(each for name, feature in self.features.items() for each in feature.names(name))

    @cached_property
    def feature_slices(self) -> Mapping[str, slice]:
        """Positions of the encoded features of each field."""
        ends = [0, *accumulate(len(feature.names(name)) for name, feature in self.features.items())]
        return dict(zip(self.features, map(slice, ends[:-1], ends[1:]), strict=True))

    @cached_property
    def width(self) -> int:
        """Number of encoded features."""
        return int(max(own.stop for own in self.feature_slices.values()))

    # ---- extreme records -------------------------------------------------------------------------------------

    def make_opposite_record(self, features: FloatArray) -> FloatArray:
        """Make a record that is distant from this one: `(width,)` each.

        Numbers, dates, true and false are mirrored, a category becomes the next one, and a missing value stays missing.
        """
        made = features.copy()
        for name, own in self.feature_slices.items():
            made[own] = self.features[name].make_opposite(features[own])
        return made

    def make_max_norm_record(self) -> FloatArray:
        """Make a record of the largest norm, `(width,)`: upper bounds, true, and first categories."""
        made = np.zeros(self.width)
        made[[own.start for own in self.feature_slices.values()]] = 1.0
        return made

    def make_min_norm_record(self) -> FloatArray:
        """Make a record of the smallest norm, `(width,)`: half-way between bounds, and missing where that is neutral."""
        made = np.zeros(self.width)
        for name, own in self.feature_slices.items():
            feature = self.features[name]
            made[own.start] = 0.0 if feature.missing == "neutral" else feature.min_norm_value
        return made


def _require_source(source: object) -> object:
    """Require a word, the fields of a synthetic source, or records in memory."""
    if is_records(source):
        return MemoryRecords(source)
    is_section = isinstance(source, Mapping) and "kind" in source
    if not (is_section or isinstance(source, str | SyntheticSource | MemoryRecords)):
        raise PydanticCustomError("string_type", "must be text")  # worded as for any other field of text
    return source


def _serialize_source(source: object, handler: SerializerFunctionWrapHandler) -> Any:
    return str(source) if isinstance(source, MemoryRecords) else handler(source)


LIVE_SOURCE = "live"
_FILE_ONLY_FIELDS = ("label", "only_labels", "partition", "order", "reuse", "test_fraction", "scale")
"""Fields that determine the use of records in a file."""

with warnings.catch_warnings():
    # Pydantic warns that the name hides a method, which was replaced by `model_json_schema` and is not called here. A class that
    # inherited the field would have that method as its default, before Pydantic 2.12.
    warnings.filterwarnings("ignore", 'Field name "schema"', UserWarning)

    class DataSpec(Section):
        """Source, partition and order of the records."""

        schema: Schema | None = None  # type: ignore[assignment]
        """Schema of a `.csv` or `.parquet` file, and of live records; None: all fields are numbers."""
        source: Annotated[
            str | AnySyntheticSource | SkipJsonSchema[MemoryRecords],
            BeforeValidator(_require_source),
            WrapSerializer(_serialize_source, when_used="json"),
        ] = "breast_cancer"
        """Name of a data set (`sottovoce data list` shows them), path to a `.npz`, `.csv` or `.parquet` file, a synthetic source
        with its fields, or `live`: each learner's owner feeds records during the run. In Python also records in memory: `(X, y)`
        or a data frame; `data=(X, y)` is short for `data={"source": (X, y)}`."""
        features: Count | None = None
        """Number of features of a live record without a schema, without the intercept."""
        label: str | None = None
        """Label column of a `.csv` or `.parquet` file (default: `label`, else `y`, else the last column)."""
        positive: tuple[int | str, ...] | None = None
        """Labels that count as 1 in a binary problem (default: the later half, sorted; with a schema, in its order)."""
        only_labels: tuple[int | str, ...] | None = None
        """Labels of the records to use; others are left out, also of a test part. None: all records."""
        partition: AnyPartition = IidPartition()
        """Partition among learners; ignored if the file has a `learner` column."""
        order: Literal["given", "shuffled"] = "shuffled"
        """Order of the records at each learner."""
        batch_size: Count | Literal["all"] = 1
        """Records per learner and round; `all`: all in round 0 (with `reuse`, in every round). For live records: the maximum that
        a round takes.

        Ignored if the file has a `round` column.
        """
        reuse: bool = False
        """Start again from the first record after a learner's last one. Each use counts separately for `record_use`."""
        test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.25
        """Share held out for accuracy. Treated as public: constants of `scale` that are not stated are computed from it."""
        scale: AnyScale = NoScale()
        """Per-feature scaling by stated constants or those of the held-out part, so that none depends on a learner's records."""
        intercept: bool = True
        """Append a constant feature."""
        seed: NonNegativeInt = 0
        """Seed of the split, the partition and the order. Not of the noise."""

        @model_validator(mode="before")
        @classmethod
        def _accept_records(cls, fields: Any) -> Any:
            """Take records in memory for the source."""
            return {"source": fields} if is_records(fields) else fields

        @model_validator(mode="after")
        def _require_compatible_fields(self) -> DataSpec:
            if self.schema is not None and self.label is not None:
                raise ValueError("label must be left out with a schema, which declares it")
            if self.schema is not None and self.only_labels is not None:
                raise ValueError("only_labels must be left out with a schema, which declares the labels")
            if self.schema is not None and self.scale.kind != "none":
                raise ValueError("scale must be none with a schema, which scales by declared bounds")
            if self.label is not None and isinstance(self.source, MemoryRecords) and self.source.has_own_labels:
                raise ValueError("label must be left out with (X, y): y has the labels")
            if self.schema is not None and isinstance(self.source, SyntheticSource):
                raise ValueError(f"schema must be left out with the source {self.source}, whose fields are all numbers")
            if self.partition.has_own_order and self.order == "given":
                raise ValueError(
                    "partition.own_order must be left out with order: given, which is the same for all learners"
                )
            return self

        @model_validator(mode="after")
        def _require_live_fields(self) -> DataSpec:
            if not self.is_live:
                if self.features is not None:
                    raise ValueError(
                        f"features must be left out unless source: {LIVE_SOURCE}; a file determines their number"
                    )
                return self
            if (self.schema is None) == (self.features is None):
                raise ValueError(
                    f"source: {LIVE_SOURCE} needs a schema, or features (how many numbers a record has): one of the two"
                )
            if self.batch_size == "all":
                raise ValueError("batch_size must be a number for live records: the maximum that a round takes")
            if self.positive is not None and self.schema is None:
                raise ValueError(
                    "positive must be left out without a schema: labels of live records are the loss's own"
                )
            unset = type(self).model_fields
            odd = [name for name in _FILE_ONLY_FIELDS if getattr(self, name) != unset[name].get_default()]
            if odd:
                raise ValueError(f"{odd[0]} must be left out with source: {LIVE_SOURCE}, whose records come later")
            return self

        @property
        def is_live(self) -> bool:
            """True if records arrive during the run."""
            return self.source == LIVE_SOURCE

        @property
        def width(self) -> int | None:
            """Number of features of a live record, with the intercept; None: the file determines it."""
            if not self.is_live:
                return None
            own = self.features if self.schema is None else self.schema.width
            return (own or 0) + self.intercept
