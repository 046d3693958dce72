"""Draft of a schema from public records: the inferred type of each column, with bounds and categories taken from its values.

The draft fits every record of the sample. Its content appears in a spec that everyone can read, so the sample must be public; and
an expert must replace the observed values by the possible ones.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from textwrap import indent
from typing import Any

import numpy as np
from pydantic import ValidationError

from sottovoce_core.data.cells import (
    CODE_PATTERN,
    INDEX_DESCRIPTION,
    Cells,
    CellValue,
    Flaw,
    MissingValues,
    UnsupportedValue,
    extract_cells,
    is_index,
    normalise_text,
    parse_day,
    parse_number,
    to_python_value,
)
from sottovoce_core.data.columns import choose_label
from sottovoce_core.data.encoding import describe_similar_labels
from sottovoce_core.data.fields import MAX_NAME_CHARACTERS, parse_boolean
from sottovoce_core.data.files import RawTable, describe_column
from sottovoce_core.data.spec import Schema
from sottovoce_core.errors import DataError
from sottovoce_core.registry import MAX_MAGNITUDE
from sottovoce_core.validation_errors import describe_requirement
from sottovoce_core.yaml_files import write_yaml

_MAX_CATEGORY_WORDS = 50
"""Maximum number of different words of a category."""
_MAX_UNCHECKED_WORDS, _MAX_CLASSES = 10, 20
_MAX_INTEGER_BITS = 1023
"""Maximum number of digits of an integer that float64 holds exactly."""
_DEFAULT_MISSING_VALUES: tuple[str, ...] = Schema.model_fields["missing_values"].default
"""Default missing values of a schema."""
_MIN_TYPE_SHARE = 0.8
"""Share of a column above which its other values are taken for mistakes."""
_MIN_UNIQUENESS_RECORDS = 5
"""Number of records up to which all values being different means nothing."""
_MAX_DISTINCT_SHARE = 0.9
_NEARLY_UNIQUE_REASON = "nearly all values differ: it names records, or is free text"

_NEVER_WORDS = frozenset({"n/a", "n.a.", "#n/a", "nan", "null", "<na>", "nat"})
"""Words that always mean a missing value."""
_CONTEXTUAL_MISSING_WORDS = frozenset({"none", "nil", "-", "--", ".", "unknown"})
"""Words that mean a missing value if all others are numbers or dates, and may be words elsewhere."""


_IDENTIFIER = re.compile(r"(?i:(.*[ _.-])?id)|.*[a-z]I[dD]")
_CODE = re.compile(CODE_PATTERN, re.ASCII)
_IDENTIFIER_REASON = "it names records"
_OTHER_DATE = re.compile(r"(\d{1,2}[./-]\d{1,2}[./-]\d{4}|\d{4}[./-]\d{1,2}[./-]\d{1,2})\b.*", re.ASCII)

_Field = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _FieldDraft:
    """Draft of a field for one column.

    Attributes:
        name: name of the column.
        field: field of the schema; None: the column is ignored.
        why: observation behind the decision, in words.
    """

    name: str
    field: _Field | None
    why: str


@dataclass(frozen=True, slots=True)
class _ColumnValues:
    """Distinct values of a column.

    Attributes:
        values: distinct values as plain Python values.
        times: number of occurrences of each value.
        gaps: number of records without a value.
    """

    values: tuple[CellValue | UnsupportedValue, ...]
    times: tuple[int, ...]
    gaps: int

    @classmethod
    def of(cls, cells: Cells, missing: MissingValues) -> _ColumnValues:
        counted = Counter((type(value), value) for value in _iterate_values(cells))  # by type, too: True is 1
        there = {value: times for value, times in counted.items() if not missing.is_missing(value[1])}
        return cls(tuple(value for _, value in there), tuple(there.values()), len(cells) - sum(there.values()))

    @property
    def records(self) -> int:
        """Number of records with a value."""
        return sum(self.times)

    def count(self, holds: Callable[[CellValue | UnsupportedValue], bool]) -> int:
        """Count the records whose value satisfies a predicate."""
        return sum(times for value, times in zip(self.values, self.times, strict=True) if holds(value))


def _iterate_values(cells: Cells) -> Iterator[CellValue | UnsupportedValue]:
    return map(to_python_value, cells.tolist() if isinstance(cells, np.ndarray) else cells)


def _find_gaps(columns: Iterable[Cells], always: tuple[str, ...]) -> list[str]:
    """Find the words that mean a missing value in these columns, in addition to those of `always`."""
    found = set[str]()
    for cells in columns:
        values = {(type(value), value) for value in _iterate_values(cells)}
        words = {value.casefold() for _, value in values if isinstance(value, str)}
        found |= words & _NEVER_WORDS
        if any(isinstance(value, float) and np.isnan(value) for _, value in values):
            found.add("nan")
        if odd := words & _CONTEXTUAL_MISSING_WORDS:
            missing = MissingValues.from_values((*always, *_NEVER_WORDS, *odd))
            others = [value for _, value in values if not missing.is_missing(value)]
            if others and (all(map(_is_number, others)) or all(map(_is_date, others))):
                found |= odd
    return sorted(found)


def _is_number(value: CellValue | UnsupportedValue) -> bool:
    return not isinstance(parse_number(value), Flaw) and not _is_code(value)


def _is_code(value: CellValue | UnsupportedValue) -> bool:
    """Return whether the value is digits but no number: a postcode, a card number."""
    if isinstance(value, int) and abs(value) > 2**53:
        return value.bit_length() > _MAX_INTEGER_BITS or int(float(value)) != value
    return isinstance(value, str) and _CODE.fullmatch(value) is not None


def _may_identify(name: str) -> bool:
    """Return whether a column's name is like an identifier's."""
    return _IDENTIFIER.fullmatch(normalise_text(name)) is not None


def _is_identifier(distinct: int, records: int) -> bool:
    """Return whether a column named like an identifier identifies records, by how many of its values differ."""
    return distinct == records > 1 or distinct > _MAX_CATEGORY_WORDS


def _nearly_all_differ(distinct: int, records: int) -> bool:
    """Return whether the words are too many, among these records, for categories."""
    return records >= _MIN_UNIQUENESS_RECORDS and distinct > _MAX_DISTINCT_SHARE * records


def _is_date(value: CellValue | UnsupportedValue) -> bool:
    return not isinstance(parse_day(value), Flaw)


# ---- features and labels ---------------------------------------------------------------------------------

_InferredField = tuple[_Field | None, str]
"""Field of a schema, or None; and the reason, in words."""


def _draft_feature(name: str, seen: _ColumnValues) -> _FieldDraft:
    """Draft a feature from a column, or explain why it is none."""
    if not seen.values:
        return _FieldDraft(name, None, "no record of the sample has a value")
    field, why = (None, INDEX_DESCRIPTION) if is_index(name) else _draft_by_name(name, seen) or _infer_type(seen)
    if field is not None and seen.gaps:
        field = {**field, "missing": "flag"}
        why = f"{why}; {_describe_gaps(seen)}" if why else _describe_gaps(seen)
    return _FieldDraft(name, field, why)


def _draft_label(name: str, seen: _ColumnValues, called: str) -> _FieldDraft:
    """Draft the label from a column.

    Args:
        name: name of the column.
        seen: its values.
        called: description of the column in an error.

    Raises:
        DataError: the column cannot be a label.
    """
    if seen.gaps:
        raise DataError(
            f"the label {called} must have a value in every record, got one {_describe_gaps(seen)}: drop these, or choose "
            "another label"
        )
    field, why = _draft_by_name(name, seen) or _draft_classes(seen) or _infer_type(seen)
    if field is None or field["type"] == "date":
        raise DataError(
            f"the label {called} must be a number, true or false, or one of a few words, got another: {why}; choose another label"
        )
    if len(field.get("categories", ("", ""))) < 2:
        raise DataError(f"the label {called} must have two values or more in the sample, got one; choose another label")
    if field["type"] == "category":
        why = "classes 0, 1, ... in this order; of two kinds, the later half counts as 1, or what data.positive names"
        why += f"; {similar}" if (similar := describe_similar_labels(map(str, field["categories"]))) else ""
    return _FieldDraft(name, field, why)


def _describe_gaps(seen: _ColumnValues) -> str:
    return f"missing in {seen.gaps:,} of {seen.gaps + seen.records:,}"


def _draft_by_name(name: str, seen: _ColumnValues) -> _InferredField | None:
    """Draft a column named like an identifier: a few codes are categories, other values identify records."""
    if not _may_identify(name) or not all(map(_is_whole, seen.values)):
        return None
    if _is_identifier(len(seen.values), seen.records):
        return None, _IDENTIFIER_REASON
    return _draft_classes(seen) or _draft_words(seen)


def _is_whole(value: CellValue | UnsupportedValue) -> bool:
    number = parse_number(value)
    return isinstance(value, str) if isinstance(number, Flaw) else number.is_integer()


def _infer_type(seen: _ColumnValues) -> _InferredField:
    """Return the type that fits all values of a column."""
    if any(isinstance(value, UnsupportedValue) for value in seen.values):
        return None, "some values are of a kind that no field takes"
    return (
        _draft_boolean(seen) or _draft_number(seen) or _draft_date(seen) or _explain_flaws(seen) or _draft_words(seen)
    )


def _draft_boolean(seen: _ColumnValues) -> _InferredField | None:
    found = set(map(parse_boolean, seen.values))
    if None in found:
        return None
    return ({"type": "boolean"}, "") if len(found) == 2 or not all(map(_is_number, seen.values)) else None


def _draft_classes(seen: _ColumnValues) -> _InferredField | None:
    """Draft a few integers as categories."""
    numbers = [parse_number(value) for value in seen.values]
    few = len(numbers) <= min(_MAX_CLASSES, seen.records / 2)
    if (
        not few
        or any(map(_is_code, seen.values))
        or _draft_boolean(seen)
        or not all(not isinstance(each, Flaw) and each.is_integer() for each in numbers)
    ):
        return None
    found = sorted({_shorten(each) for each in numbers if not isinstance(each, Flaw)})
    return ({"type": "category", "categories": found}, "") if abs(found[0]) <= MAX_MAGNITUDE >= abs(found[-1]) else None


def _draft_number(seen: _ColumnValues) -> _InferredField | None:
    if not all(map(_is_number, seen.values)):
        return None
    numbers = [number for number in map(parse_number, seen.values) if not isinstance(number, Flaw)]
    low, high = min(numbers), max(numbers)
    if max(-low, high) > MAX_MAGNITUDE:
        return None, f"some numbers are beyond {MAX_MAGNITUDE:g}"
    return {
        "type": "number",
        "bounds": list(_round_outward(low, high)),
    }, f"{_shorten(low)} to {_shorten(high)} in the sample"


def _round_outward(low: float, high: float) -> tuple[float, float]:
    """Round the observed bounds outward to usual numbers: 17 to 94 becomes 0 to 100."""
    a, b = Decimal(repr(low)), Decimal(repr(high))
    if a == b == 0:
        return 0, 1
    if a > 0 and (2 * a <= b or a == b):
        a = Decimal(0)
    elif b < 0 and (2 * b >= a or a == b):
        b = Decimal(0)
    step = Decimal(10) ** (b - a).adjusted()
    return (
        _shorten(float((a / step).to_integral_value(ROUND_FLOOR) * step)),
        _shorten(float((b / step).to_integral_value(ROUND_CEILING) * step)),
    )


def _shorten(number: float) -> float:
    """Convert a float without a fraction to an integer, if it is short."""
    return int(number) if number.is_integer() and abs(number) < 1e15 else number


def _draft_date(seen: _ColumnValues) -> _InferredField | None:
    if not all(map(_is_date, seen.values)):
        return None
    days = [int(day) for day in map(parse_day, seen.values) if not isinstance(day, Flaw)]
    low, high = (datetime.date.fromordinal(each) for each in (min(days), max(days)))
    ends = datetime.date(high.year + 1, 1, 1) if high.year < datetime.MAXYEAR else datetime.date.max
    return {"type": "date", "bounds": [datetime.date(low.year, 1, 1), ends]}, f"{low} to {high} in the sample"


def _explain_flaws(seen: _ColumnValues) -> _InferredField | None:
    """Describe a column of numbers or dates that can be read in part only."""
    if seen.count(_resembles_number) >= _MIN_TYPE_SHARE * seen.records and not any(map(_is_code, seen.values)):
        flaws = Counter[str]()
        for value, times in zip(seen.values, seen.times, strict=True):
            if isinstance(found := parse_number(value), Flaw):
                flaws[found.description] += times
        return None, "numbers, but for: " + "; ".join(f"{words} ({n:,})" for words, n in flaws.most_common())
    if seen.count(_resembles_date) >= _MIN_TYPE_SHARE * seen.records:
        return None, f"dates, but for: {Flaw.NO_DATE.description} ({seen.records - seen.count(_is_date):,})"
    return None


def _resembles_number(value: CellValue | UnsupportedValue) -> bool:
    return _is_number(value) or parse_number(value) in (Flaw.COMMA, Flaw.NOT_FINITE)


def _resembles_date(value: CellValue | UnsupportedValue) -> bool:
    return _is_date(value) or (isinstance(value, str) and _OTHER_DATE.fullmatch(value) is not None)


def _draft_words(seen: _ColumnValues) -> _InferredField:
    if not all(isinstance(value, str) or _is_short_code(value) for value in seen.values):
        return None, "its values are of several kinds"
    words = sorted({str(value) for value in seen.values})
    if max(map(len, words)) > MAX_NAME_CHARACTERS:
        return None, f"free text, of more than {MAX_NAME_CHARACTERS} characters"
    if _nearly_all_differ(len(words), seen.records):
        return None, _NEARLY_UNIQUE_REASON
    if len(words) > _MAX_CATEGORY_WORDS or (len(words) > _MAX_UNCHECKED_WORDS and 2 * len(words) > seen.records):
        return None, f"{len(words):,} different words in {seen.records:,} records are too many for categories"
    return {"type": "category", "categories": words}, describe_similar_labels(words)


def _is_short_code(value: CellValue | UnsupportedValue) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < MAX_NAME_CHARACTERS


def require_learnable(table: RawTable, source: str) -> None:
    """Refuse a table with a column that a schema draft would ignore.

    Args:
        table: records without a schema.
        source: their source.

    Raises:
        DataError: a column is an index or identifies records, or the labels cannot be learned.
    """
    for k, name in enumerate(table.columns or ()):
        values = table.features[:, k]
        why = INDEX_DESCRIPTION if is_index(name) else ""
        if _may_identify(name) and (values == np.floor(values)).all():
            why = _IDENTIFIER_REASON if _is_identifier(len(np.unique(values)), len(values)) else why
        if why:
            raise DataError(
                f"{source}: {table.describe_column(k)} must be a field to learn from, and is none: {why}; drop it, or list it "
                "under ignored in a schema"
            )
    labels = table.labels if table.test is None else np.concatenate([table.labels, table.test[1]])
    if labels.dtype.kind != "U":
        return
    words = np.unique(labels).tolist()
    if _nearly_all_differ(len(words), len(labels)):
        raise DataError(
            f"{source}: the label must be one of a few words, or a number, got a column of which {_NEARLY_UNIQUE_REASON}; "
            "choose another label"
        )
    gone = MissingValues.from_values((*_DEFAULT_MISSING_VALUES, *_NEVER_WORDS))
    if gaps := [word for word in words if gone.is_missing(normalise_text(word))]:
        missing = int(np.isin(labels, gaps).sum())
        raise DataError(
            f"{source}: the label must have a value in every record, got one missing in {missing:,} of {len(labels):,} (empty, "
            "or a word for it such as NA or ?): drop these, or choose another label"
        )


_MAX_LINE_CHARACTERS = 100
"""Maximum number of characters of a line."""
_FILE_HEADER = """\
# A draft: types, bounds and categories are taken from the sample, which must be public, because everyone can read them here.
# Replace observed values by possible ones: a record with any other value is refused (or, out of bounds, clipped
# with `out_of_bounds: clip`). A missing value may be refused, neutral or flagged.
"""


@dataclass(frozen=True, slots=True)
class SchemaDraft:
    """Draft of a schema; `text` is its file.

    Attributes:
        columns: features and ignored columns, in the order of the sample.
        label: the label.
        missing_values: values that count as missing.
    """

    columns: tuple[_FieldDraft, ...]
    label: _FieldDraft
    missing_values: tuple[str, ...]

    @property
    def features(self) -> tuple[_FieldDraft, ...]:
        """Drafted features."""
        return tuple(each for each in self.columns if each.field is not None)

    @property
    def ignored_columns(self) -> tuple[_FieldDraft, ...]:
        """Ignored columns."""
        return tuple(each for each in self.columns if each.field is None)

    @property
    def document(self) -> dict[str, Any]:
        """The schema as a document for YAML."""
        return {
            "features": {each.name: dict(each.field or {}) for each in self.features},
            "ignored": [each.name for each in self.ignored_columns],
            "label": {"name": self.label.name, **(self.label.field or {})},
            "missing_values": list(self.missing_values),
        }

    @property
    def text(self) -> str:
        """The schema as a file, with observations in comments."""
        document = self.document
        parts = [_FILE_HEADER, "features:\n"]
        parts += [indent(_write_with_comment(each.why, {each.name: each.field}), "  ") for each in self.features]
        if self.ignored_columns:
            parts += [
                "ignored:\n",
                *(indent(_write_with_comment(each.why, [each.name]), "  ") for each in self.ignored_columns),
            ]
        parts.append(_write_with_comment(self.label.why, {"label": document["label"]}))
        if self.missing_values != _DEFAULT_MISSING_VALUES:
            parts.append(_dump({"missing_values": document["missing_values"]}))
        return "".join(parts)


def _write_with_comment(comment: str, entry: Any) -> str:
    return f"# {comment}\n" * bool(comment) + _dump(entry)


def _dump(entry: Any) -> str:
    """Write a mapping or a list as YAML: on one line if it is short."""
    if isinstance(entry, dict) and len(entry) == 1:
        line = write_yaml(entry, flow=True)[1:-2]
        if len(line) <= _MAX_LINE_CHARACTERS and "\n" not in line:
            return f"{line}\n"
    return write_yaml(entry)


def draft_schema(columns: Mapping[str, Any], label: str | None = None, header: str | None = None) -> SchemaDraft:
    """Draft a schema from the columns of public records.

    Args:
        columns: by name, one value for each record: as for `Encoder.encode_columns`.
        label: the label column; None: `label`, else `y`, else the last one.
        header: reason why the names of a file's columns are names, as `RawTable.header_reason`.

    Raises:
        SpecError: no such label column.
        DataError: no record, no feature, or a label that cannot be learned.
    """
    named = {normalise_text(name): extract_cells(column, name) for name, column in columns.items()}
    if len(named) < len(columns) or len({len(cells) for cells in named.values()}) > 1:
        raise DataError("columns must have names that differ, and equally many values")
    if len(named) < 2 or not all(len(cells) for cells in named.values()):
        raise DataError("a schema is drafted from records: there must be one, with a field to learn from and a label")
    if "" in named:
        at = [*named].index("")
        raise DataError(
            f"every column must have a name, and column {at} (counted from 0) has none: name it or drop it (pandas "
            "writes the index of a table so)"
        )
    label = None if label is None else normalise_text(label)
    label = choose_label([*named], label, "the label must be one of the columns", header)
    missing_values = (*_DEFAULT_MISSING_VALUES, *_find_gaps(named.values(), _DEFAULT_MISSING_VALUES))
    seen = {name: _ColumnValues.of(cells, MissingValues.from_values(missing_values)) for name, cells in named.items()}
    drafted = tuple(_draft_feature(name, each) for name, each in seen.items() if name != label)
    called = {name: describe_column(k, name, header).replace("column '", "'") for k, name in enumerate(named)}
    made = SchemaDraft(drafted, _draft_label(label, seen[label], called[label]), missing_values)
    if not made.features:
        why = "; ".join(f"{called[each.name]}: {each.why}" for each in made.ignored_columns)
        raise DataError(f"there must be a column to learn from besides the label, got none ({why})")
    try:
        Schema.model_validate(made.document)
    except ValidationError as error:
        problem = error.errors()[0]
        where, what = ".".join(map(str, problem["loc"])), describe_requirement(problem)
        raise DataError(f"these columns give no schema: {f'{where}: ' if where else ''}{what}") from None
    return made
