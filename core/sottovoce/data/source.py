"""The section `data` of a run spec."""

from __future__ import annotations

import warnings
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, model_validator

from sottovoce.data.partition import AnyPartition, Iid
from sottovoce.data.schema import Schema
from sottovoce.registry import Count, Section

LIVE = "live"
_OF_FILES = ("label", "partition", "order", "reuse", "test_fraction", "scale")
"""Fields that say what becomes of records that are there."""

with warnings.catch_warnings():
    # Pydantic says that the name hides a method, which it gave up for `model_json_schema` and nothing here calls. A class that
    # inherited the field would have that method for its default, before Pydantic 2.12.
    warnings.filterwarnings("ignore", 'Field name "schema"', UserWarning)

    class DataSpec(Section):
        """Where records come from, who gets which, and in what order."""

        schema: Schema | None = None  # type: ignore[assignment]
        """What the fields of a `.csv` or `.parquet` file, and of live records, may say; None: all are numbers."""
        source: str = "breast_cancer"
        """The name of a data set (`sottovoce data list` shows them), a path to a `.npz`, `.csv` or `.parquet` file, or `live`:
        each learner's owner brings records while the run goes on."""
        features: Count | None = None
        """Numbers of a live record, which no schema describes, without the intercept."""
        label: str | None = None
        """Label column of a `.csv` or `.parquet` file (default: `label`, else `y`, else the last column)."""
        positive: tuple[int | str, ...] | None = None
        """Labels that count as 1 in a binary problem (default: the later half of the sorted labels; of those of a schema, in its
        order)."""
        partition: AnyPartition = Iid()
        """Ignored where the file carries a `learner` column."""
        order: Literal["given", "shuffled"] = "shuffled"
        batch_size: Count | Literal["all"] = 1
        """Records per learner and round; `all`: all in round 0 (with `reuse`, in every round). Of live records: the most that a
        round takes, of those that are there.

        Ignored where the file carries a `round` column.
        """
        reuse: bool = False
        """Start again from the first record when a learner's records run out. Each use is an event of its own."""
        test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.25
        """Held out for accuracy. Treated as public: the constants of `scale` are read off it."""
        scale: Literal["none", "standard", "range"] = "none"
        """Per-feature scaling by constants of the held-out part, so that no constant depends on a learner's records."""
        intercept: bool = True
        """Append a constant feature."""
        seed: NonNegativeInt = 0
        """For the split, the partition and the order. Not for noise."""

        @model_validator(mode="after")
        def _schema_says_it(self) -> DataSpec:
            if self.schema is not None and self.label is not None:
                raise ValueError("label must be left out with a schema, which says which field it is")
            if self.schema is not None and self.scale != "none":
                raise ValueError("scale must be none with a schema, which scales by declared bounds")
            return self

        @model_validator(mode="after")
        def _live_or_not(self) -> DataSpec:
            if not self.live:
                if self.features is not None:
                    raise ValueError(
                        f"features must be left out but with source: {LIVE}; a file says how many there are"
                    )
                return self
            if (self.schema is None) == (self.features is None):
                raise ValueError(
                    f"source: {LIVE} needs a schema, or features (how many numbers a record has): one of the two"
                )
            if self.batch_size == "all":
                raise ValueError("batch_size must be a number for live records: the most that a round takes")
            if self.positive is not None and self.schema is None:
                raise ValueError(
                    "positive must be left out without a schema: labels of live records are the loss's own"
                )
            unset = type(self).model_fields
            odd = [name for name in _OF_FILES if getattr(self, name) != unset[name].get_default()]
            if odd:
                raise ValueError(f"{odd[0]} must be left out with source: {LIVE}, whose records are nowhere yet")
            return self

        @property
        def live(self) -> bool:
            """True where records come while the run goes on."""
            return self.source == LIVE

        @property
        def width(self) -> int | None:
            """Features of a live record as it is learned, with the intercept; None: a file says it."""
            if not self.live:
                return None
            own = self.features if self.schema is None else self.schema.width
            return (own or 0) + self.intercept
