"""Messages of a source, the records of a run in them, and why the others are none."""

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
    """One record, as it came.

    Attributes:
        body: fields and their values, or the bytes of a JSON object.
        position: where it stands in its part, 0 or above.
        reason: why it cannot be read, in words that quote nothing of it; empty: it can.
    """

    body: Mapping[str, Any] | bytes
    position: int
    reason: str = ""


ColumnCheck = Callable[[Sequence[str]], str]
"""Why names of columns are not those of a run's records; empty: they are."""


def accept_any_columns(names: Sequence[str]) -> str:
    """Columns may be any."""
    return ""


class SourcePartition(Protocol):
    """Messages in order: a file, a stream, one partition of a topic. A learner counts each under a name of its own.

    Attributes:
        name: that tells it from the other parts of what is fed; the same whenever the same is fed.
    """

    @property
    def name(self) -> str: ...

    def read(self, after: int) -> AsyncIterator[Sequence[SourceMessage]]:
        """Messages, positions ascending, a few at a time, as they come; it ends where nothing more can come.

        Args:
            after: position of the last one that the learner has; -1: it has none in this run.

        Raises:
            Unavailable: the source is away for too long.
            DataError: what was there is not there any more, or is another.
        """
        ...

    async def acknowledge(self, position: int) -> None:
        """Everything up to a position is in the learner's keeping: the source may forget it."""
        ...


@runtime_checkable
class TabularPartition(Protocol):
    """A part whose messages all have the same fields, its columns: they are known before the first message.

    Attributes:
        misfit: says why columns are not those of records; `read` raises that as a `DataError`.
    """

    column_check: ColumnCheck


class UnfitRecordError(Exception):
    """A message is no record; its text says why, and quotes nothing."""


def parse_field_map(text: str) -> tuple[str, tuple[str, ...]]:
    """A field, and where it stands, of `FIELD=PATH`.

    Raises:
        SpecError: it is no such text.
    """
    name, equals, path = text.partition("=")
    steps = tuple(map(normalise_text, path.split(".")))
    if not equals or not all((normalise_text(name), *steps)):
        raise SpecError(f"--map must be FIELD=PATH, as age=patient.age, got {text!r}")
    return normalise_text(name), steps


class FieldMap:
    """Which field of a record stands where in a message.

    Args:
        schema: of the run; None: a record is a list of `features` and a `label`.
        maps: `FIELD=PATH`, where a path's names have dots between them.
        ignore_unknown: leave out fields that nobody knows, in place of refusing the message.
        position: field that says where a message stands in its source, and is no field of the record; empty: there is none.

    Raises:
        SpecError: a map is none, names a field that records do not have, or one twice.
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
                raise SpecError(f"--map says twice where {name!r} is: once is enough")
            paths[name] = steps
        self._own, self._paths, self._ignore_unknown, self._position = (
            own,
            paths,
            ignore_unknown,
            normalise_text(position),
        )
        self._known = frozenset((*own, *(() if schema is None else schema.ignored))) - paths.keys()
        """Fields that may stand in a message under their own names."""
        self._places = dict[tuple[str, ...], list[str]]()
        """Fields that a map names, by where they may stand: nested, or under the whole path as a name."""
        for name, steps in paths.items():
            for place in {steps, (".".join(steps),)}:
                self._places.setdefault(place, []).append(name)
        self._reached = {steps[:n] for steps in paths.values() for n in range(1, len(steps))}
        """Objects into which a map leads."""

    def find_column_misfit(self, columns: Sequence[str]) -> str:
        """Why messages with these columns, by their names as they are compared, are no records; empty: they may be."""
        there = set(columns)
        places = {name: {name} for name in self._own if name not in self._paths}
        for name, steps in self._paths.items():  # a column of the whole path, or an object that has the field
            places[f"{name}={'.'.join(steps)}"] = {".".join(steps), steps[0]}
        wanted = {name: bool(there & here) for name, here in places.items()}
        if self._own == SCHEMALESS_FIELDS and not all(wanted.values()):
            return "must have the columns features, lists of numbers, and label: this run has no schema, so it knows no others"
        allowed = {*self._known, self._position}.union(*places.values(), there if self._ignore_unknown else ())
        return describe_column_mismatch(
            there, wanted, allowed, "--map FIELD=COLUMN says where a field stands, --ignore-unknown leaves others out"
        )

    def extract_record(self, body: Mapping[str, Any] | bytes) -> Mapping[str, Any]:
        """A message's record, by the fields' own names; what a map does not find is left out.

        Raises:
            Unfit: it is no object, or has a field that nobody knows, or one twice.
        """
        message = _object_of(body) if isinstance(body, bytes) else body
        if not (self._paths or self._ignore_unknown or self._position):
            return message  # the schema's encoder says the same of it, faster
        found = dict[str, Any]()
        self._take(message, (), found)
        return found

    def _take(self, message: Mapping[Any, Any], at: tuple[str, ...], found: dict[str, Any]) -> None:
        """What stands in an object, and in those below it into which a map leads."""
        for given, value in message.items():
            here = (*at, normalise_text(given) if isinstance(given, str) else "")
            names = self._places.get(here, [])
            into = here in self._reached and isinstance(value, Mapping | None)
            if into and value is not None:
                self._take(value, here, found)
            if not names and not at and here[0] in self._known:
                names = list(here)
            if found.keys() & set(names):
                raise UnfitRecordError(DUPLICATE_FIELD)
            if not (names or into or self._ignore_unknown or here == (self._position,)):
                raise UnfitRecordError(UNDECLARED_FIELD_REASON)
            found |= dict.fromkeys(names, value)


def _whole_number(record: Mapping[str, Any], name: str) -> int | None:
    """What a field says, as a number or its digits; None: it says no position."""
    value = next((value for given, value in record.items() if normalise_text(given) == name), None)
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) < 20:
        value = int(value)
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    return value if fits else None


@dataclass(slots=True)
class PositionCounter:
    """Positions of messages that come in a stream.

    Attributes:
        field: that has the position; empty: positions are counted on.
        last: the highest so far; where they are counted on, it begins with the learner's.
        rising: whether a position at or below the last one is refused.
    """

    position_field: str
    last_position: int
    requires_ascending: bool = True

    def __post_init__(self) -> None:
        self.position_field = normalise_text(self.position_field)
        self.last_position = -1 if self.position_field and self.requires_ascending else self.last_position

    def number_message(self, body: Mapping[str, Any] | bytes, reason: str = "") -> SourceMessage:
        """A message with its position. One whose field has none is no record, and stands where the one before it does.

        Args:
            body: of the message.
            reason: why it cannot be read; empty: it can.
        """
        if not self.position_field:
            self.last_position += 1
            return SourceMessage(body, self.last_position, reason)
        position = None
        if not reason:
            try:
                position = _whole_number(_object_of(body) if isinstance(body, bytes) else body, self.position_field)
            except UnfitRecordError as why:
                reason = str(why)
        if position is None or (self.requires_ascending and position <= self.last_position):
            return SourceMessage(body, self.last_position, reason or NO_POSITION)
        self.last_position = max(self.last_position, position)
        return SourceMessage(body, position)


def _object_of(body: bytes) -> Mapping[str, Any]:
    """A JSON object.

    Raises:
        Unfit: it is none, or has a name twice, so that nobody knows which is meant.
    """
    found = parse_json(body)
    if not isinstance(found, dict):
        raise UnfitRecordError(NO_OBJECT)
    return found


def parse_json(body: bytes) -> Any:
    """What JSON says.

    Raises:
        Unfit: it is none, or an object in it has a name twice.
    """
    if not body:
        raise UnfitRecordError(EMPTY_MESSAGE)
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_once)
    except UnicodeDecodeError:
        raise UnfitRecordError(NOT_UTF8) from None
    except (ValueError, RecursionError):
        raise UnfitRecordError(NO_OBJECT) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise UnfitRecordError(DUPLICATE_FIELD)
    return found


@dataclass(frozen=True, slots=True)
class _Sifted:
    """What came of some messages.

    Attributes:
        fitting: records that can be learned, and the positions of those; None: there is none.
        refused: messages that cannot, by their place among all, each with a reason that quotes nothing of it.
        again: how many came a second time, and are passed over.
        last: the highest position so far.
    """

    fitting_records: tuple[EncodedRecords, list[int]] | None
    refusals: Mapping[int, str]
    duplicate_count: int
    last_position: int


@dataclass(frozen=True, slots=True)
class RecordConverter:
    """What a message must be in a run.

    Attributes:
        records: of the run.
        fields: where they stand in a message.
    """

    records: LiveRecordEncoder
    fields: FieldMap

    def convert(self, messages: Sequence[SourceMessage], after: int) -> _Sifted:
        """Tell records from what is none.

        Args:
            messages: in their order.
            after: the highest position so far; a message at or below it came before.
        """
        records, refused, again = dict[int, Mapping[str, Any]](), dict[int, str](), 0
        for place, message in enumerate(messages):
            if message.reason:
                refused[place] = message.reason
            elif message.position <= after:
                again += 1
            else:
                try:
                    records[place] = self._record(message)
                except UnfitRecordError as why:
                    refused[place] = str(why)
            after = max(after, message.position)
        fitting = None
        if records:
            encoded = self._encode(list(records.values()))
            refused |= {place: encoded.refusals[row] for row, place in enumerate(records) if row in encoded.refusals}
            if len(encoded.labels):
                fitting = (encoded, [messages[place].position for place in records if place not in refused])
        return _Sifted(fitting, dict(sorted(refused.items())), again, after)

    def _record(self, message: SourceMessage) -> Mapping[str, Any]:
        """A message's record.

        Raises:
            Unfit: it has none.
        """
        record = self.fields.extract_record(message.body)
        if self.records.encoder is None:
            features, label = record.get("features"), record.get("label")
            whole = isinstance(features, list) and len(features) == self.records.data.features
            if not (
                whole and record.keys() == set(SCHEMALESS_FIELDS) and all(map(_is_number, [*(features or ()), label]))
            ):
                raise UnfitRecordError(NO_NUMBERS)
        return record

    def _encode(self, records: Sequence[Mapping[str, Any]]) -> EncodedRecords:
        """Records as they are learned; `EncodedRecords.refused` has what does not fit."""
        if self.records.encoder is not None:
            return self.records.encode(records)
        features = np.array([record["features"] for record in records], dtype=np.float64)
        return self.records.encode(features, [record["label"] for record in records])


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 10**300)
