"""Captures of foreign services as runs: rows grouped by connection or stream, and read with the user's decoder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from sottovoce.audit.foreign.conversation import HEAD, Conversation, Decoded, Heard, digest, numbers
from sottovoce.errors import CaptureError, SpecError
from sottovoce_eavesdropper.reading import Capture, open_capture
from sottovoce_eavesdropper.storage import Folder, open_folder

RunIs = Literal["connection", "stream"]
Decoder = Callable[[str, str, bytes], Mapping[str, Any] | Decoded | None]

MOST_IN_A_RUN = 512
"""What a run says beyond so many messages, metadata and trailers is not looked at."""

PLACES = 5
"""Of messages that a decoder fails on, so many are named."""

_COLUMNS = ("connection", "stream", "method", "direction", "kind", "wall_ns", "mono_ns", "size", "payload")


@dataclass(slots=True)
class Reading:
    """What was read of the captures.

    Attributes:
        runs: all of them.
        messages: how many passed.
        decoded: how many of those that were looked at the decoder read.
        failed: how many it failed on.
        failures: where it failed first, and why.
        unfinished: captures that were not closed.
        cut: runs that said more than is looked at.
    """

    runs: list[Conversation] = field(default_factory=list)
    messages: int = 0
    decoded: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)
    unfinished: int = 0
    cut: int = 0


def load_decoder(name: str) -> Decoder:
    """The function that `module:function` names.

    Raises:
        SpecError: it cannot be imported, or called.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise SpecError(
            f"--decoder: cannot import {name!r}: {error}; is it module:function, and its folder in PYTHONPATH?"
        ) from None
    if not callable(found):
        raise SpecError(f"--decoder: {name!r} must be a function, got {type(found).__name__}")
    decoder: Decoder = found
    return decoder


def read_runs(folder: str | Path, decoder: Decoder | None, run_is: RunIs) -> Reading:
    """All runs of all captures below a folder.

    Raises:
        CaptureError: there is none, one cannot be read, or one is of no world.
    """
    captures = list(_captures(open_folder(folder)))
    if not captures:
        raise CaptureError(f"{folder} has no captures: record some with sottovoce eavesdropper relay")
    reading = Reading(unfinished=sum(not capture.complete for capture in captures))
    for capture in captures:
        world = capture.facts.get("world")
        if world not in (0, 1):
            raise CaptureError(f"the capture {capture.name} must be of world 0 or 1 (--world), got {world}")
        _read(capture, int(world), decoder, run_is, reading)
    return reading


def _read(capture: Capture, world: int, decoder: Decoder | None, run_is: RunIs, reading: Reading) -> None:
    """Add the runs of one capture, a part at a time."""
    gathered: dict[int, list[Heard]] = {}
    begun: dict[int, tuple[int, int]] = {}
    streams: dict[int, dict[int, int]] = {}
    for row in _rows(capture):
        key = row[run_is]
        mine = gathered.setdefault(key, [])
        _, mono = begun.setdefault(key, (row["wall_ns"], row["mono_ns"]))
        reading.messages += row["kind"] == "message"
        reading.cut += len(mine) == MOST_IN_A_RUN
        if len(mine) > MOST_IN_A_RUN:
            continue
        known = streams.setdefault(key, {})
        stream = known.setdefault(row["stream"], len(known))
        decoded = None
        if row["kind"] == "message" and decoder is not None:
            decoded = _decoded(decoder, row, f"{capture.facts['capture_id']}, {run_is} {key}", reading)
        mine.append(_heard(row, stream, (row["mono_ns"] - mono) / 1e9, decoded))
    for key, heard in gathered.items():
        name = f"{capture.facts['capture_id']}, {run_is} {key}"
        reading.runs.append(Conversation(world, name, begun[key][0] / 1e9, tuple(heard[:MOST_IN_A_RUN])))


def _captures(place: Folder, depth: int = 3) -> Iterator[Capture]:
    """All captures in a folder, and in those below it."""
    names = place.names()
    if "capture.json" in names:
        yield open_capture(place.name)
    elif depth:
        for name in names:
            yield from _captures(place.below(name), depth - 1)


def _rows(capture: Capture) -> Iterator[dict[str, Any]]:
    for batch in capture.batches(_COLUMNS):
        for k in range(0, batch.num_rows, 64):  # as Python objects, payloads take their space twice
            yield from batch.slice(k, 64).to_pylist()


def _heard(row: Mapping[str, Any], stream: int, seconds: float, decoded: Decoded | None) -> Heard:
    payload, kind = row["payload"], row["kind"]
    facts = (kind, row["method"], row["direction"], stream, seconds, row["size"])
    if kind == "message":
        return Heard(*facts, payload[:HEAD], digest(payload), decoded=decoded)
    told = json.loads(payload)
    entries = tuple((str(key), str(value)) for key, value in told.get("metadata", ()))
    return Heard(*facts, entries=entries, status=(told.get("code", ""), told.get("details", "")))


def _decoded(decoder: Decoder, row: Mapping[str, Any], run: str, reading: Reading) -> Decoded | None:
    """What the user's decoder makes of a message; what it raises is noted, whatever it is."""
    try:
        found = decoder(row["method"], row["direction"], row["payload"])
        if found is None:
            return None
        given = found if isinstance(found, Decoded) else Decoded(found)
        fields = {str(name): numbers(values) for name, values in given.fields.items()}
        known = Decoded(fields, None if given.round is None else int(given.round), given.sender)
        hash(known.sender)
    except Exception as error:  # noqa: BLE001 - foreign code, fed with foreign bytes: it may raise anything
        reading.failed += 1
        if len(reading.failures) < PLACES:
            side = "request" if row["direction"] == "out" else "response"
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
            reading.failures.append(f"{run}, {row['method']} {side} of {row['size']:,} bytes: {text}")
        return None
    reading.decoded += 1
    return known
