"""Encoding of records by a schema: features, labels in the domain of the loss, and reasons for refused records.

Single records, live batches and whole files use the same code. A refusal names a field and a reason in words of the schema only,
which is public; the number of refusals by reason depends on the records, and is only for their owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sottovoce_core.arrays import AnyArray, BoolArray, FloatArray, IntArray, as_floats
from sottovoce_core.data.cells import NO_FLAW, Cells, Flaw, MissingValues, extract_cells, normalise_text
from sottovoce_core.data.fields import Feature, Label, parse_boolean
from sottovoce_core.data.spec import Schema
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.losses import Loss
from sottovoce_core.text import abbreviate_names

_MAX_LISTED_LABELS = 12
"""Maximum number of labels that an error lists."""
_BOOLEAN_WORDS = {"yes", "no", "on", "off", "true", "false"}


def map_labels(
    labels: AnyArray, loss: Loss, positive: tuple[int | str, ...] | None, *, labels_required: bool = True
) -> tuple[FloatArray, IntArray]:
    """Map labels to the domain of the loss, and return the class of each record.

    Squared losses: numbers unchanged. Many classes: the class, its rank among the sorted labels. Logistic and hinge losses: 1 for
    a label in `positive`, else 0; by default the later half of the k sorted labels is positive (with an odd k the middle one is
    not), so of two labels the second. If a file has a single label, `positive` must decide, unless the label is 0 or 1.

    Args:
        labels: `(records,)`, finite numbers or text.
        loss: the loss of the run.
        positive: labels that count as 1.
        labels_required: whether the labels are learned. If not, the only label of a file becomes 0 if its meaning is open.

    Returns:
        Mapped labels `(records,)`, and classes `(records,)`: the rank of the original label among the distinct ones.

    Raises:
        DataError: labels of a squared loss are not numbers, or a loss of two classes has a single label of open meaning.
        SpecError: `positive` names a label that does not occur, or all of them; or there are more labels than classes.
    """
    distinct, classes = np.unique(labels, return_inverse=True)
    classes = classes.astype(np.int64)
    if loss.n_classes is None:
        if labels.dtype.kind != "f":
            raise DataError(
                f"labels of the {loss.kind} loss must be numbers, got text{_list_labels(labels, distinct)}; choose another "
                "label or a loss of classes"
            )
        return as_floats(labels), classes
    if loss.has_binary_labels and len(distinct) < 2:
        only = format_labels(distinct)[0]
        known = labels_required or positive is not None or only in ("0", "1")
        return np.full(
            len(labels), _map_single_label(only, loss, positive, many=len(labels) > 1) if known else 0.0
        ), classes
    few = _list_labels(labels, distinct)
    return _map_classes(format_labels(distinct), loss, positive, "that occur", shown=bool(few))[classes], classes


def _list_labels(labels: AnyArray, distinct: AnyArray) -> str:
    """Format the labels for an error if they are few classes; else empty: they could identify records, and are not quoted."""
    few = len(distinct) <= _MAX_LISTED_LABELS and 2 * len(distinct) <= len(labels)
    return f": {abbreviate_names(format_labels(distinct))}" if few else ""


def _simplify_label(text: str) -> str:
    """Normalise a label: ignore case, blanks and a final dot."""
    return " ".join(normalise_text(text).rstrip(". ").split()).casefold()


def describe_similar_labels(texts: Iterable[str]) -> str:
    """Describe labels that differ only by case, blanks or a final dot; empty: there are none."""
    kinds: dict[str, list[str]] = {}
    for text in texts:
        kinds.setdefault(_simplify_label(text), []).append(text)
    same = [" and ".join(map(repr, kind)) for kind in kinds.values() if len(kind) > 1]
    return (
        f"{'; '.join(same[:_MAX_LISTED_LABELS])} differ only by case, blanks or a final dot: write them alike if they are one"
        if same
        else ""
    )


def _map_single_label(only: str, loss: Loss, positive: tuple[int | str, ...] | None, *, many: bool) -> float:
    """Map the only label of all records: by `positive`, or 0 and 1 unchanged.

    Raises:
        DataError: the meaning is open.
    """
    if positive is not None:
        return float(only in map(str, positive))
    if only in ("0", "1"):
        return float(only)
    need = f"the {loss.kind} loss needs two labels, got"
    if not many:  # the label of a single record is not quoted
        raise DataError(f"{need} a single record: name in data.positive what counts as 1")
    raise DataError(
        f"{need} only {only}: name in data.positive what counts as 1 (if it is another one, {only} counts as 0)"
    )


def resolve_class_name(word: str, texts: Sequence[str]) -> str:
    """Return the label that a word refers to: exactly, else ignoring case, else by truth value among a true and a false label.

    Args:
        word: for example `yes`.
        texts: all labels, as text.

    Returns:
        A label; `word` itself if no label or several match.
    """
    if word in texts:
        return word
    if len(same := [text for text in texts if text.casefold() == word.casefold()]) == 1:
        return same[0]
    truths = {parse_boolean(text): text for text in texts} if len(texts) == 2 else {}
    return truths.get(parse_boolean(word), word) if truths.keys() == {True, False} else word


def _map_classes(
    classes: Sequence[str],
    loss: Loss,
    positive: tuple[int | str, ...] | None,
    these: str = "that are declared",
    *,
    shown: bool = True,
) -> FloatArray:
    """Map classes to the domain of the loss, `(classes,)`: as `map_labels`, in the order given.

    Args:
        classes: at least two if the loss has two.
        loss: the loss of the run, which must have classes.
        positive: labels that count as 1.
        these: description of the classes, in errors.
        shown: whether errors may list them.

    Raises:
        SpecError: `positive` names another label, or all of them; or there are more classes than the loss has.
    """
    if loss.has_binary_labels:
        return _is_positive(classes, positive, these, shown=shown)
    if len(classes) > (loss.n_classes or 0):
        found = f"{len(classes)} labels{f': {abbreviate_names(classes)}' if shown else ''}"
        raise SpecError(f"loss.classes must be at least the number of labels {these}, got {loss.n_classes} for {found}")
    return np.arange(len(classes), dtype=np.float64)


def _is_positive(
    texts: Sequence[str], positive: tuple[int | str, ...] | None, these: str, *, shown: bool
) -> FloatArray:
    """Return `(labels,)`: 1.0 for labels that count as 1."""
    if positive is None:
        return as_floats(2 * np.arange(len(texts)) >= len(texts))
    wanted = {str(label) for label in positive}
    if unknown := sorted(wanted - set(texts)):
        bare = {"0", "1"}.issuperset(unknown) and _BOOLEAN_WORDS & {text.lower() for text in texts}
        advice = "; without quotes YAML takes true and false for 1 and 0: put quotes around them" if bare else ""
        known = f" ({abbreviate_names(texts)})" if shown else ""
        raise SpecError(f"data.positive must name labels {these}{known}, got {abbreviate_names(unknown)}{advice}")
    if not 0 < len(wanted) < len(texts):
        known = f"labels {abbreviate_names(texts)}" if shown else f"{len(texts)} labels"
        raise SpecError(f"data.positive must name some of the {known}, not all, got {list(positive)}")
    return as_floats([text in wanted for text in texts])


def format_labels(distinct: AnyArray) -> list[str]:
    """Format labels as in a spec: the float 3.0 is `3`."""
    if distinct.dtype.kind != "f":
        return [str(label) for label in distinct]
    return [str(int(label)) if float(label).is_integer() else str(label) for label in distinct]


UNDECLARED_FIELD_REASON = "a field that is neither declared nor ignored, or is a duplicate"


@dataclass(frozen=True, slots=True, eq=False)
class EncodedRecords:
    """Records, encoded for learning.

    Attributes:
        features: `(accepted, width)`, within [-1, 1].
        labels: `(accepted,)` in the domain of the loss; `(0,)` if not requested.
        classes: `(accepted,)` class of each record, in the schema's order; None: the label is a number, or was not requested.
        accepted_mask: `(records,)`: True for accepted records.
        refusals: reasons of the others, by their place among all records: a field's name and a description.
        near_categories: by field, declared categories that differ from words of refused records only by case, blanks or a final
            dot. Reveals records; only for their owner.
    """

    features: FloatArray
    labels: FloatArray
    classes: IntArray | None
    accepted_mask: BoolArray
    refusals: Mapping[int, str]
    near_categories: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def hint(self) -> str:
        """Hint about words that are nearly categories; empty: there are none."""
        hints = [
            f"{name}: some words differ from {', '.join(map(repr, words))}"
            for name, words in self.near_categories.items()
        ]
        return f"{'; '.join(hints)} only by case, blanks or a final dot: write them as in the schema" if hints else ""

    @property
    def reasons(self) -> dict[str, int]:
        """Number of refused records by reason, most frequent first."""
        return dict(Counter(self.refusals.values()).most_common())

    def merge_unreadable(self, others: Mapping[int, str]) -> EncodedRecords:
        """Insert records that could not be read.

        Args:
            others: reasons, by their place among all records.
        """
        if not others:
            return self
        here = np.ones(len(self.accepted_mask) + len(others), dtype=bool)
        here[list(others)] = False
        places, fits = np.flatnonzero(here), here.copy()
        fits[here] = self.accepted_mask
        refused = {int(places[row]): why for row, why in self.refusals.items()} | dict(others)
        return replace(self, accepted_mask=fits, refusals=dict(sorted(refused.items())))


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encoder of records by a schema for a loss. Make one with `Encoder.from_schema`.

    Attributes:
        schema: schema of the records.
        class_values: value of each class for the loss, `(classes,)`; None: the label is a number.
    """

    schema: Schema
    class_values: tuple[float, ...] | None

    @classmethod
    def from_schema(cls, schema: Schema, loss: Loss, positive: tuple[int | str, ...] | None = None) -> Encoder:
        """Make an encoder of records for a loss.

        Args:
            schema: schema of the records.
            loss: loss of the run.
            positive: labels that count as 1 in a binary problem; None: the later half of them.

        Raises:
            SpecError: the label is of another type than the loss needs, has more classes, or `positive` does not fit.
        """
        label = schema.label
        if loss.n_classes is None:
            if label.classes is not None:
                raise SpecError(f"data.schema.label must be a number for the {loss.kind} loss, got type {label.type}")
            return cls(schema, None)
        if label.classes is None:
            raise SpecError(
                f"data.schema.label must be a category or a boolean for the {loss.kind} loss, got type {label.type}"
            )
        named = None if positive is None else tuple(_resolve_class(each, label, label.classes) for each in positive)
        return cls(schema, tuple(_map_classes(label.classes, loss, named).tolist()))

    def encode_columns(self, columns: Mapping[str, Any], *, has_labels: bool = True) -> EncodedRecords:
        """Encode many records.

        Args:
            columns: by name, one value for each record: lists, arrays of NumPy, Arrow, pandas or polars. A field without a
                column is missing in every record.
            has_labels: whether the records have a label.

        Raises:
            DataError: the columns differ in length, or are no columns.
        """
        cells = {name: extract_cells(column, name) for name, column in columns.items()}
        lengths = {len(column) for column in cells.values()}
        if len(lengths) > 1:
            raise DataError(f"fields must have equally many values, got {sorted(lengths)}")
        n = lengths.pop() if lengths else 0
        named, odd = self._match_fields(cells)
        return self._encode({name: cells[own] for name, own in named.items()}, np.full(n, odd), labelled=has_labels)

    def encode_records(self, records: Sequence[Mapping[str, Any]], *, has_labels: bool = True) -> EncodedRecords:
        """Encode records that are mappings of field names to values, as in JSON; otherwise as `encode_columns`.

        A field that a record leaves out is missing.

        Raises:
            DataError: a record is no mapping.
        """
        if not all(isinstance(record, Mapping) for record in records):
            raise DataError("a record must be a mapping of fields to values")
        found = [self._match_fields(record) for record in records]
        cells: dict[str, Cells] = {
            field: [
                record[named[field]] if field in named else None
                for record, (named, _) in zip(records, found, strict=True)
            ]
            for field in (*self.schema.features, self.schema.label.name)
        }
        return self._encode(cells, np.array([odd for _, odd in found], dtype=bool), labelled=has_labels)

    def _match_fields(self, record: Mapping[Any, Any]) -> tuple[dict[str, str], bool]:
        """Return the declared fields of a record with the names used there, and whether the record has other fields."""
        schema, named, odd = self.schema, dict[str, str](), False
        for given in record:
            name = normalise_text(given) if isinstance(given, str) else ""
            declared = name in schema.features or name == schema.label.name
            odd |= name in named or not (declared or name in schema.ignored)
            named[name] = given
        return named, odd

    def _encode(self, cells: Mapping[str, Cells], odd: BoolArray, *, labelled: bool) -> EncodedRecords:
        schema, n = self.schema, len(odd)
        nothing: Cells = [None] * n
        features, nearly = np.zeros((n, schema.width)), dict[str, Sequence[str]]()
        refused = dict.fromkeys(np.flatnonzero(odd).tolist(), UNDECLARED_FIELD_REASON)
        for name, feature in schema.features.items():
            flaws = feature.encode(
                cells.get(name, nothing), schema.missing_value_set, features[:, schema.feature_slices[name]]
            )
            _record_flaws(refused, name, flaws)
            nearly |= _find_near_categories(name, feature, cells.get(name, nothing), flaws)
        label_values = np.zeros(n)
        if labelled:
            label_values, flaws = schema.label.read(cells.get(schema.label.name, nothing), schema.missing_value_set)
            _record_flaws(refused, schema.label.name, flaws)
            nearly |= _find_near_categories(
                schema.label.name, schema.label, cells.get(schema.label.name, nothing), flaws
            )
        fits = np.ones(n, dtype=bool)
        fits[list(refused)] = False
        labels = label_values[fits] if labelled else np.empty(0)
        classes = None
        if labelled and self.class_values is not None:
            classes = labels.astype(np.int64)
            labels = np.asarray(self.class_values)[classes]
        return EncodedRecords(features[fits], labels, classes, fits, dict(sorted(refused.items())), nearly)


def _resolve_class(value: int | str, label: Label, classes: tuple[str, ...]) -> str:
    """Return the class that a value means, read as a label's value, or as a word; the value itself if it means none."""
    (place,), (flaw,) = label.read([value], MissingValues())
    return resolve_class_name(str(value), classes) if flaw != NO_FLAW else classes[int(place)]


def _find_near_categories(name: str, of: Feature | Label, cells: Cells, flaws: IntArray) -> dict[str, Sequence[str]]:
    """Find the categories of a field that differ from some of its words only by case, blanks or a final dot."""
    rows = np.flatnonzero(flaws == Flaw.NO_CATEGORY.value)
    odd = {_simplify_label(cells[row]) for row in rows if isinstance(cells[row], str)}
    found = sorted(word for word in of.words if _simplify_label(word) in odd)
    return {name: found} if found else {}


def _record_flaws(refused: dict[int, str], name: str, flaws: IntArray) -> None:
    """Record the first flaw of each record that has no earlier one."""
    for row in np.flatnonzero(flaws).tolist():
        refused.setdefault(row, f"{name}: {Flaw(int(flaws[row])).description}")
