"""Live records: conversion of the owner's data to rows of features and labels as a run learns them.

Mappings, tables of pandas, polars or Arrow, and plain arrays are all converted here, for every caller; so the spec of a run
defines its records in one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sottovoce_core.arrays import FloatArray, as_floats
from sottovoce_core.data.encoding import EncodedRecords, Encoder
from sottovoce_core.data.files import LOST_DIGITS_REASON
from sottovoce_core.data.spec import DataSpec
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.losses import Loss
from sottovoce_core.registry import MAX_MAGNITUDE

NOT_FINITE_REASON, UNKNOWN_LABEL_REASON = "a number that is not finite", "the label: not one of the loss"
TOO_LARGE_REASON = f"a number beyond {MAX_MAGNITUDE:g}"


@dataclass(frozen=True, slots=True)
class LiveRecordEncoder:
    """Encoder of the live records of a run. Make one with `LiveRecordEncoder.from_spec`.

    Attributes:
        data: section of the run spec.
        loss: loss of the run.
        encoder: encoder of the schema; None: records are numbers already.
    """

    data: DataSpec
    loss: Loss
    encoder: Encoder | None

    @classmethod
    def from_spec(cls, data: DataSpec, loss: Loss) -> LiveRecordEncoder:
        """Make the encoder of a run.

        Raises:
            SpecError: the run has no live records, or its schema does not fit its loss.
        """
        if not data.is_live:
            raise SpecError(
                f"a run must have data.source live to take records, got {data.source}, where its records come from"
            )
        return cls(data, loss, None if data.schema is None else Encoder.from_schema(data.schema, loss, data.positive))

    def encode(self, records: Any, labels: Any = None, *, has_labels: bool = True) -> EncodedRecords:
        """Encode records for learning, with the intercept if the run has one.

        Args:
            records: with a schema, mappings of fields to values, or a table: a mapping of fields to columns, or one of pandas,
                polars or Arrow. Without, numbers: `(records, features)`.
            labels: `(records,)`; None: with a schema they are a field of the records.
            has_labels: whether the records have labels; False: they are to be predicted.

        Raises:
            DataError: not such records. A record that does not fit is no error: `EncodedRecords.refusals` explains it.
        """
        if self.encoder is None:
            found = self._encode_numbers(records, labels, labelled=has_labels)
        else:
            found = self._encode_fields(self.encoder, records, labels, labelled=has_labels)
        if not self.data.intercept:
            return found
        return replace(found, features=np.column_stack([found.features, np.ones(len(found.features))]))

    def _encode_fields(self, encoder: Encoder, records: Any, labels: Any, *, labelled: bool) -> EncodedRecords:
        name = encoder.schema.label.name
        columns = _get_columns(records)
        if columns is not None:
            return encoder.encode_columns(columns if labels is None else {**columns, name: labels}, has_labels=labelled)
        if isinstance(records, str | bytes) or not isinstance(records, Sequence):
            raise DataError(
                f"records must be mappings of fields to values, or a table, got {type(records).__name__}; this run has a schema"
            )
        if labels is not None:
            labels = list(labels)
            if len(labels) != len(records) or not all(isinstance(record, Mapping) for record in records):
                raise DataError(f"labels must be one for each of {len(records)} mappings, got {len(labels)}")
            records = [{**record, name: label} for record, label in zip(records, labels, strict=True)]
        return encoder.encode_records(records, has_labels=labelled)

    def _encode_numbers(self, records: Any, labels: Any, *, labelled: bool) -> EncodedRecords:
        wanted = self.data.features
        try:
            features = np.asarray(records, dtype=np.float64)
            given = np.asarray(labels if labelled and labels is not None else np.empty(0), dtype=np.float64)
        except (TypeError, ValueError):
            raise DataError(f"records must be numbers (records, {wanted}): this run has no schema") from None
        if features.ndim != 2 or features.shape[1] != wanted:
            raise DataError(f"records must be shaped (records, {wanted}), got {features.shape}")
        if labelled and given.shape != features.shape[:1]:
            raise DataError(f"labels must be {len(features)}, one for each record, got {given.shape}")
        refused = dict.fromkeys(np.flatnonzero(~np.isfinite(features).all(axis=1)).tolist(), NOT_FINITE_REASON)
        for row in np.flatnonzero((np.abs(features) >= 2**53).any(axis=1)).tolist():
            exact = records[row].tolist() if isinstance(records[row], np.ndarray) else records[row]
            if any(isinstance(each, int) and int(float(each)) != each for each in exact):
                refused.setdefault(row, LOST_DIGITS_REASON)
            elif (np.abs(features[row]) > MAX_MAGNITUDE).any():
                refused.setdefault(row, TOO_LARGE_REASON)
        if labelled:
            classes = self.loss.n_classes
            known = np.isfinite(given) if classes is None else np.isin(given, np.arange(classes))
            for row in np.flatnonzero(~known).tolist():
                refused.setdefault(row, UNKNOWN_LABEL_REASON)
        fits = np.ones(len(features), dtype=bool)
        fits[list(refused)] = False
        return EncodedRecords(
            as_floats(features[fits]), given[fits] if labelled else given, None, fits, dict(sorted(refused.items()))
        )

    def encode_strictly(self, records: Any, labels: Any = None, *, has_labels: bool = True) -> EncodedRecords:
        """Encode records as `encode`, and require that all of them fit.

        Raises:
            DataError: a record does not fit; the message has its number and a reason.
        """
        found = self.encode(records, labels, has_labels=has_labels)
        if found.refusals:
            row, why = next(iter(found.refusals.items()))
            more = "" if len(found.refusals) == 1 else f", and {len(found.refusals) - 1} more do not fit"
            raise DataError(f"record {row} (counted from 0) does not fit: {why}{more}")
        return found

    @property
    def has_merged_labels(self) -> bool:
        """True if several of the schema's labels count as one class of the loss."""
        values = () if self.encoder is None else self.encoder.class_values or ()
        return len(set(values)) < len(values)

    @property
    def class_names(self) -> tuple[str | float, ...] | None:
        """Names of the loss's classes 0, 1, ...; None: labels are numbers.

        Names as in the records, if the schema has a label for each class; else, and beyond those, class numbers.
        """
        n = self.loss.n_classes
        if n is None:
            return None
        called: list[str | float] = list(range(n))
        if self.encoder is not None and self.encoder.class_values is not None and not self.has_merged_labels:
            for place, label in zip(self.encoder.class_values, self.encoder.schema.label.values, strict=True):
                called[int(place)] = label
        return tuple(called)

    def decode_predictions(self, scores: FloatArray, labels: FloatArray) -> list[str | float]:
        """Convert predictions to the form of the labels in records.

        Args:
            scores: `(records, ...)`.
            labels: `(records,)`, labels that the loss derives from the scores if it has classes.
        """
        classes = self.class_names
        if classes is not None:
            return [classes[int(label)] for label in labels]
        return list((scores if self.encoder is None else self.encoder.schema.label.unscale(scores)).tolist())


def _get_columns(table: Any) -> Mapping[str, Any] | None:
    """Return a table as columns by name; None: it is no table."""
    if isinstance(table, Mapping):
        return table
    if hasattr(table, "column_names") and hasattr(table, "column"):  # Arrow
        return {name: table.column(name) for name in table.column_names}
    if hasattr(table, "columns") and hasattr(table, "__getitem__"):  # pandas, polars
        return {name: table[name] for name in table.columns}
    return None
