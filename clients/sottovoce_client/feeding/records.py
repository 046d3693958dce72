"""Messages of a source, their conversion to records of a run, and reasons for refusals."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from sottovoce_core.data.cells import normalise_text
from sottovoce_core.data.encoding import UNDECLARED_FIELD_REASON, EncodedRecords
from sottovoce_core.data.files import describe_column_mismatch
from sottovoce_core.data.live_records import LiveRecordEncoder
from sottovoce_core.data.spec import Schema
from sottovoce_core.errors import SpecError

NO_POSITION = "its position: not a whole number above the one before it"
NO_OBJECT, DUPLICATE_FIELD, NOT_UTF8 = "not a JSON object", "a field that is there twice", "not UTF-8"
EMPTY_MESSAGE = "an empty message"
SCHEMALESS_FIELDS = ("features", "label")
"""Fields of a record in a run without a schema: a list of numbers, and a number."""
NO_NUMBERS = "features and label: not a list of as many numbers as the run has features, and a number"


@dataclass(frozen=True, slots=True)
class SourceMessage:
    """Received message.

    Attributes:
        body: fields and their values, or the bytes of a JSON object.
        position: position in its partition, 0 or above.
        reason: why it cannot be read, without quoting it; empty: it can.
    """

    body: Mapping[str, Any] | bytes
    position: int
    reason: str = ""


ColumnCheck = Callable[[Sequence[str]], str]
"""Function that returns why column names do not fit a run's records; empty: they do."""


def accept_any_columns(names: Sequence[str]) -> str:
    """Accept any columns."""
    return ""


class SourcePartition(Protocol):
    """Ordered messages: a file, a stream, one partition of a topic. A learner counts each under its own name.

    Attributes:
        name: identifies it among the fed partitions; constant for the same content.
    """

    @property
    def name(self) -> str: ...

    def read(self, after: int) -> AsyncIterator[Sequence[SourceMessage]]:
        """Yield messages, positions ascending, a few at a time, as they arrive; return where none can follow.

        Args:
            after: position of the last message that the learner has; -1: none in this run.

        Raises:
            Unavailable: the source is unreachable for too long.
            DataError: its content was deleted or replaced.
        """
        ...

    async def acknowledge(self, position: int) -> None:
        """Acknowledge all messages up to a position: the learner has stored them, and the source may delete them."""
        ...


@runtime_checkable
class TabularPartition(Protocol):
    """Partition whose messages all have the same fields, its columns, known before the first message.

    Attributes:
        column_check: returns why columns do not fit records; `read` raises that as a `DataError`.
    """

    column_check: ColumnCheck


class UnfitRecordError(Exception):
    """Message that is not a record; the text gives the reason, and quotes nothing."""


def parse_field_map(text: str) -> tuple[str, tuple[str, ...]]:
    """Parse `FIELD=PATH` to a field and its path.

    Raises:
        SpecError: the text has another form.
    """
    name, equals, path = text.partition("=")
    steps = tuple(map(normalise_text, path.split(".")))
    if not equals or not all((normalise_text(name), *steps)):
        raise SpecError(f"--map must be FIELD=PATH, as age=patient.age, got {text!r}")
    return normalise_text(name), steps


class FieldMap:
    """Mapping of record fields to places in a message.

    Args:
        schema: schema of the run; None: a record is a list of `features` and a `label`.
        maps: `FIELD=PATH`, with dots between the names of a path.
        ignore_unknown: leave out unknown fields, instead of refusing the message.
        position: field with a message's position, which is not a field of the record; empty: none.

    Raises:
        SpecError: a map is not valid, names an unknown field, or one twice.
    """

    def __init__(
        self, schema: Schema | None, maps: Iterable[str] = (), *, ignore_unknown: bool = False, position: str = ""
    ) -> None:
        own: tuple[str, ...] = SCHEMALESS_FIELDS if schema is None else (*schema.features, schema.label.name)
        paths = dict[str, tuple[str, ...]]()
        for each in maps:
            name, steps = parse_field_map(each)
            if name not in own:
                raise SpecError(
                    f"--map names a field that the run's records do not have: {name!r}; they have {list(own)}"
                )
            if name in paths:
                raise SpecError(f"--map must name {name!r} once, got it twice")
            paths[name] = steps
        self._own, self._paths, self._ignore_unknown, self._position = (
            own,
            paths,
            ignore_unknown,
            normalise_text(position),
        )
        self._own_name_fields = frozenset((*own, *(() if schema is None else schema.ignored))) - paths.keys()
        """Fields that may be in a message under their own names."""
        self._fields_by_place = dict[tuple[str, ...], list[str]]()
        """Mapped fields by their possible places: nested, or with the full path as a name."""
        for name, steps in paths.items():
            for place in {steps, (".".join(steps),)}:
                self._fields_by_place.setdefault(place, []).append(name)
        self._traversed_paths = {steps[:n] for steps in paths.values() for n in range(1, len(steps))}
        """Objects on the path of a map."""

    def find_column_misfit(self, columns: Sequence[str]) -> str:
        """Return why messages with these normalised column names are not records; empty: they may be."""
        present = set(columns)
        places = {name: {name} for name in self._own if name not in self._paths}
        for name, steps in self._paths.items():  # a column with the full path as its name, or an object with the field
            places[f"{name}={'.'.join(steps)}"] = {".".join(steps), steps[0]}
        is_present = {name: bool(present & here) for name, here in places.items()}
        if self._own == SCHEMALESS_FIELDS and not all(is_present.values()):
            return "must have the columns features, lists of numbers, and label: this run has no schema"
        allowed = {*self._own_name_fields, self._position}.union(
            *places.values(), present if self._ignore_unknown else ()
        )
        return describe_column_mismatch(
            present,
            is_present,
            allowed,
            "--map FIELD=COLUMN gives the place of a field, --ignore-unknown leaves others out",
        )

    def extract_record(self, body: Mapping[str, Any] | bytes) -> Mapping[str, Any]:
        """Return the record of a message, by the fields' own names; missing mapped fields are left out.

        Raises:
            UnfitRecordError: it is not an object, or has an unknown field, or one twice.
        """
        message = _parse_object(body) if isinstance(body, bytes) else body
        if not (self._paths or self._ignore_unknown or self._position):
            return message  # the schema's encoder does the same check, faster
        found = dict[str, Any]()
        self._collect(message, (), found)
        return found

    def _collect(self, message: Mapping[Any, Any], at: tuple[str, ...], found: dict[str, Any]) -> None:
        """Collect the fields of an object, and of the nested ones on the path of a map."""
        for given, value in message.items():
            here = (*at, normalise_text(given) if isinstance(given, str) else "")
            names = self._fields_by_place.get(here, [])
            is_traversed = here in self._traversed_paths and isinstance(value, Mapping | None)
            if is_traversed and value is not None:
                self._collect(value, here, found)
            if not names and not at and here[0] in self._own_name_fields:
                names = list(here)
            if found.keys() & set(names):
                raise UnfitRecordError(DUPLICATE_FIELD)
            if not (names or is_traversed or self._ignore_unknown or here == (self._position,)):
                raise UnfitRecordError(UNDECLARED_FIELD_REASON)
            found |= dict.fromkeys(names, value)


def _parse_position(record: Mapping[str, Any], name: str) -> int | None:
    """Return a field's value as a non-negative integer, from a number or its digits; None: it is not a position."""
    value = next((value for given, value in record.items() if normalise_text(given) == name), None)
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) < 20:
        value = int(value)
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    return value if fits else None


@dataclass(slots=True)
class PositionCounter:
    """Positions of messages that arrive in a stream.

    Attributes:
        position_field: field with the position; empty: numbered consecutively.
        last_position: highest position so far; for consecutive numbers it begins with the learner's.
        requires_ascending: whether a position at or below the last one is refused.
    """

    position_field: str
    last_position: int
    requires_ascending: bool = True

    def __post_init__(self) -> None:
        self.position_field = normalise_text(self.position_field)
        self.last_position = -1 if self.position_field and self.requires_ascending else self.last_position

    def number_message(self, body: Mapping[str, Any] | bytes, reason: str = "") -> SourceMessage:
        """Return a message with its position. One without a valid position is refused, at the position before it.

        Args:
            body: body of the message.
            reason: why it cannot be read; empty: it can.
        """
        if not self.position_field:
            self.last_position += 1
            return SourceMessage(body, self.last_position, reason)
        position = None
        if not reason:
            try:
                position = _parse_position(
                    _parse_object(body) if isinstance(body, bytes) else body, self.position_field
                )
            except UnfitRecordError as error:
                reason = str(error)
        if position is None or (self.requires_ascending and position <= self.last_position):
            return SourceMessage(body, self.last_position, reason or NO_POSITION)
        self.last_position = max(self.last_position, position)
        return SourceMessage(body, position)


def _parse_object(body: bytes) -> Mapping[str, Any]:
    """Parse a JSON object.

    Raises:
        UnfitRecordError: it is not one, or has a name twice, which is ambiguous.
    """
    found = parse_json(body)
    if not isinstance(found, dict):
        raise UnfitRecordError(NO_OBJECT)
    return found


def parse_json(body: bytes) -> Any:
    """Parse JSON.

    Raises:
        UnfitRecordError: it is not valid, or an object in it has a name twice.
    """
    if not body:
        raise UnfitRecordError(EMPTY_MESSAGE)
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_reject_duplicates)
    except UnicodeDecodeError:
        raise UnfitRecordError(NOT_UTF8) from None
    except (ValueError, RecursionError):
        raise UnfitRecordError(NO_OBJECT) from None


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise UnfitRecordError(DUPLICATE_FIELD)
    return found


@dataclass(frozen=True, slots=True)
class ConvertedMessages:
    """Result of a conversion.

    Attributes:
        fitting_records: records to learn, and their positions; None: none.
        refusals: refused messages by their index, each with a reason that quotes nothing.
        duplicate_count: number of repeated messages, which are skipped.
        last_position: highest position so far.
    """

    fitting_records: tuple[EncodedRecords, list[int]] | None
    refusals: Mapping[int, str]
    duplicate_count: int
    last_position: int


@dataclass(frozen=True, slots=True)
class RecordConverter:
    """Converter of messages to records of a run.

    Attributes:
        records: encoder of the run's records.
        fields: places of the fields in a message.
    """

    records: LiveRecordEncoder
    fields: FieldMap

    def convert(self, messages: Sequence[SourceMessage], after: int) -> ConvertedMessages:
        """Convert messages to records, or refuse them.

        Args:
            messages: messages in order.
            after: highest position so far; a message at or below it is a duplicate.
        """
        records, refusals, duplicate_count = dict[int, Mapping[str, Any]](), dict[int, str](), 0
        for place, message in enumerate(messages):
            if message.reason:
                refusals[place] = message.reason
            elif message.position <= after:
                duplicate_count += 1
            else:
                try:
                    records[place] = self._extract_record(message)
                except UnfitRecordError as error:
                    refusals[place] = str(error)
            after = max(after, message.position)
        fitting_records = None
        if records:
            encoded = self._encode(list(records.values()))
            refusals |= {place: encoded.refusals[row] for row, place in enumerate(records) if row in encoded.refusals}
            if len(encoded.labels):
                fitting_records = (encoded, [messages[place].position for place in records if place not in refusals])
        return ConvertedMessages(fitting_records, dict(sorted(refusals.items())), duplicate_count, after)

    def _extract_record(self, message: SourceMessage) -> Mapping[str, Any]:
        """Return a message's record.

        Raises:
            UnfitRecordError: it has none.
        """
        record = self.fields.extract_record(message.body)
        if self.records.encoder is None:
            features, label = record.get("features"), record.get("label")
            has_features = isinstance(features, list) and len(features) == self.records.data.features
            if not (
                has_features
                and record.keys() == set(SCHEMALESS_FIELDS)
                and all(map(_is_number, [*(features or ()), label]))
            ):
                raise UnfitRecordError(NO_NUMBERS)
        return record

    def _encode(self, records: Sequence[Mapping[str, Any]]) -> EncodedRecords:
        """Encode records; `EncodedRecords.refusals` has those that do not fit."""
        if self.records.encoder is not None:
            return self.records.encode(records)
        features = np.array([record["features"] for record in records], dtype=np.float64)
        return self.records.encode(features, [record["label"] for record in records])


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 10**300)
