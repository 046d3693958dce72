"""Fields of a message, as fields of a record: JSON is read, nested objects are reached into, and what nobody knows is noticed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sottovoce.data.cells import normal
from sottovoce.data.encoding import UNDECLARED
from sottovoce.data.files import misfit
from sottovoce.data.spec import Schema
from sottovoce.errors import SpecError

NO_OBJECT, TWICE, NOT_UTF8 = "not a JSON object", "a field that is there twice", "not UTF-8"
WITHOUT_SCHEMA = ("features", "label")
"""Fields of a record in a run without a schema: a list of numbers, and a number."""


class Unfit(Exception):
    """A message is no record; its text says why, and quotes nothing."""


def map_of(text: str) -> tuple[str, tuple[str, ...]]:
    """A field, and where it stands, of `FIELD=PATH`.

    Raises:
        SpecError: it is no such text.
    """
    name, equals, path = text.partition("=")
    steps = tuple(map(normal, path.split(".")))
    if not equals or not all((normal(name), *steps)):
        raise SpecError(f"--map must be FIELD=PATH, as age=patient.age, got {text!r}")
    return normal(name), steps


@dataclass(frozen=True, slots=True)
class Fields:
    """Which field of a record stands where in a message. `Fields.of` makes one.

    Attributes:
        paths: of fields that a map names, each to the names that lead there.
        known: fields that may stand in a message under their own names.
        ignore_unknown: leave out all others, in place of refusing the message.
        position: field that says where a message stands in its source, and is no field of the record; empty: there is none.
        own: fields of a record.
    """

    paths: Mapping[str, tuple[str, ...]]
    known: frozenset[str]
    ignore_unknown: bool = False
    position: str = ""
    own: tuple[str, ...] = ()
    _places: Mapping[tuple[str, ...], list[str]] = field(default_factory=dict, repr=False)
    """Fields that a map names, by where they may stand: nested, or under the whole path as a name."""
    _reached: frozenset[tuple[str, ...]] = field(default=frozenset(), repr=False)
    """Objects into which a map leads."""

    @classmethod
    def of(
        cls, schema: Schema | None, maps: Iterable[str] = (), *, ignore_unknown: bool = False, position: str = ""
    ) -> Fields:
        """Fields of a run's records.

        Args:
            schema: of the run; None: a record is a list of `features` and a `label`.
            maps: `FIELD=PATH`, where a path's names have dots between them.
            ignore_unknown, position: as the attributes.

        Raises:
            SpecError: a map is none, names a field that records do not have, or one twice.
        """
        own: tuple[str, ...] = WITHOUT_SCHEMA if schema is None else (*schema.features, schema.label.name)
        paths = dict[str, tuple[str, ...]]()
        for each in maps:
            name, steps = map_of(each)
            if name not in own:
                raise SpecError(
                    f"--map names a field that the run's records do not have: {name!r}; they have {list(own)}"
                )
            if name in paths:
                raise SpecError(f"--map says twice where {name!r} is: once is enough")
            paths[name] = steps
        places = dict[tuple[str, ...], list[str]]()
        for name, steps in paths.items():
            for place in {steps, (".".join(steps),)}:
                places.setdefault(place, []).append(name)
        ignored = () if schema is None else schema.ignored
        reached = frozenset(steps[:n] for steps in paths.values() for n in range(1, len(steps)))
        known = frozenset((*own, *ignored)) - paths.keys()
        return cls(paths, known, ignore_unknown, normal(position), own, places, reached)

    def misfit(self, columns: Sequence[str]) -> str:
        """Why messages with these columns, by their names as they are compared, are no records; empty: they may be."""
        there = set(columns)
        places = {name: {name} for name in self.own if name not in self.paths}
        for name, steps in self.paths.items():  # a column of the whole path, or an object that has the field
            places[f"{name}={'.'.join(steps)}"] = {".".join(steps), steps[0]}
        wanted = {name: bool(there & here) for name, here in places.items()}
        if self.own == WITHOUT_SCHEMA and not all(wanted.values()):
            return "must have the columns features, lists of numbers, and label: this run has no schema, so it knows no others"
        allowed = {*self.known, self.position}.union(*places.values(), there if self.ignore_unknown else ())
        return misfit(
            there, wanted, allowed, "--map FIELD=COLUMN says where a field stands, --ignore-unknown leaves others out"
        )

    def record(self, body: Mapping[str, Any] | bytes) -> Mapping[str, Any]:
        """A message's record, by the fields' own names; what a map does not find is left out.

        Raises:
            Unfit: it is no object, or has a field that nobody knows, or one twice.
        """
        message = object_of(body) if isinstance(body, bytes) else body
        if not (self.paths or self.ignore_unknown or self.position):
            return message  # the schema's encoder says the same of it, faster
        found = dict[str, Any]()
        self._take(message, (), found)
        return found

    def _take(self, message: Mapping[Any, Any], at: tuple[str, ...], found: dict[str, Any]) -> None:
        """What stands in an object, and in those below it into which a map leads."""
        for given, value in message.items():
            here = (*at, normal(given) if isinstance(given, str) else "")
            names = self._places.get(here, [])
            into = here in self._reached and isinstance(value, Mapping | None)
            if into and value is not None:
                self._take(value, here, found)
            if not names and not at and here[0] in self.known:
                names = list(here)
            if found.keys() & set(names):
                raise Unfit(TWICE)
            if not (names or into or self.ignore_unknown or here == (self.position,)):
                raise Unfit(UNDECLARED)
            found |= dict.fromkeys(names, value)


def object_of(body: bytes) -> Mapping[str, Any]:
    """A JSON object.

    Raises:
        Unfit: it is none, or has a name twice, so that nobody knows which is meant.
    """
    found = json_of(body)
    if not isinstance(found, dict):
        raise Unfit(NO_OBJECT)
    return found


def json_of(body: bytes) -> Any:
    """What JSON says.

    Raises:
        Unfit: it is none, or an object in it has a name twice.
    """
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_once)
    except UnicodeDecodeError:
        raise Unfit(NOT_UTF8) from None
    except (ValueError, RecursionError):
        raise Unfit(NO_OBJECT) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Unfit(TWICE)
    return found
