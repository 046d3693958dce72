"""Records in memory as the source of an experiment in Python: arrays `(X, y)`, or a data frame."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from sottovoce_core.arrays import AnyArray
from sottovoce_core.data.columns import Cells, build_arrow_table, read_table_cells, read_table_columns
from sottovoce_core.data.files import LABEL_COLUMN_NAMES, RawTable, flatten_features
from sottovoce_core.errors import DataError, SpecError

IN_MEMORY = "records in memory"
"""Name of such a source in errors and results."""
FILE_ADVICE = "write them to a .csv or .parquet file, and give its path as data.source"


def is_records(value: object) -> bool:
    """Return whether a value is a pair `(X, y)` or a data frame (pandas, polars, pyarrow, or another with Arrow's interface)."""
    is_pair = isinstance(value, tuple) and len(value) == 2 and not any(isinstance(each, str) for each in value)
    return is_pair or _is_frame(value)


def _is_frame(value: object) -> bool:
    return hasattr(value, "columns") and (hasattr(value, "__arrow_c_stream__") or hasattr(value, "__dataframe__"))


class MemoryRecords:
    """Copy of records in memory, which later changes of the original do not reach.

    Two of them are equal if they hold the same records.

    Args:
        value: `(X, y)`, where X is an array `(records, features)` or a data frame and y has the labels; or a data frame with
            the label among its columns.

    Attributes:
        has_own_labels: whether the labels are given beside the features, and not by a column.

    Raises:
        DataError: these are no records.
        SpecError: a data frame needs pyarrow.
    """

    def __init__(self, value: Any) -> None:
        self.has_own_labels = isinstance(value, tuple)
        features, labels = value if isinstance(value, tuple) else (value, None)
        own = None if labels is None else _copy_array(labels, "labels")
        self._arrays: tuple[AnyArray, AnyArray] | None = None
        self._table: Any = None
        if _is_frame(features):
            self._table = build_arrow_table(IN_MEMORY, features, (LABEL_COLUMN_NAMES[0], own))
        elif own is not None:
            self._arrays = _copy_array(features, "features"), own

    def read(self, label: str | None) -> RawTable:
        """Read the records as a table of numbers, as from a file; `label` is that of the spec.

        Raises:
            SpecError, DataError: as for a file with the same columns.
        """
        if self._arrays is None:
            return read_table_columns(IN_MEMORY, self._table, LABEL_COLUMN_NAMES[0] if self.has_own_labels else label)
        features, labels = self._arrays
        return RawTable(flatten_features(features, IN_MEMORY), labels)

    def read_cells(self) -> Cells:
        """Return the columns for a schema.

        Raises:
            SpecError: they have no names.
        """
        if self._arrays is not None:
            raise SpecError("data.schema needs columns with names: give a data frame in place of the array X")
        return read_table_cells(IN_MEMORY, self._table)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MemoryRecords):
            return NotImplemented
        if self._arrays is None or other._arrays is None:
            same = self._table is not None and other._table is not None and self._table.equals(other._table)
            return bool(same)
        return all(map(np.array_equal, self._arrays, other._arrays))

    def __hash__(self) -> int:
        return hash(self._shape)

    @property
    def _shape(self) -> tuple[int, ...]:
        return self._table.shape if self._arrays is None else self._arrays[0].shape

    def __str__(self) -> str:
        return IN_MEMORY

    def __repr__(self) -> str:
        return f"<{IN_MEMORY}, {' x '.join(map(str, self._shape))}>"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.is_instance_schema(cls)


def _copy_array(values: Any, what: str) -> AnyArray:
    """Copy values to an array; text in an array of objects becomes an array of text.

    Raises:
        DataError: the rows differ in length, or some cells are masked.
    """
    try:
        copied: AnyArray = np.array(values)
    except (ValueError, TypeError):
        raise DataError(f"{what} in memory must be an array, got rows of several lengths, or no array") from None
    if np.ma.is_masked(values):
        raise DataError(f"{what} in memory must have a value in every cell, got masked cells: drop these records")
    if copied.dtype.kind == "T" or (copied.dtype.kind == "O" and all(isinstance(each, str) for each in copied.flat)):
        copied = copied.astype(np.str_)
    copied.flags.writeable = False
    return copied
