"""Captures of foreign services as runs: rows grouped by connection or stream, and read with the user's decoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from sottovoce_client.auditing.captures import parse_metadata
from sottovoce_core.auditing.traffic_features import (
    MAX_HEAD_BYTES,
    CapturedFrame,
    DecodedMessage,
    RunTraffic,
    digest,
    flatten_numbers,
)
from sottovoce_core.errors import CaptureError, SpecError
from sottovoce_core.registry import import_object
from sottovoce_eavesdropper.capture_reader import Capture, find_captures
from sottovoce_eavesdropper.storage import open_folder

RunGrouping = str
"""What a run is: `connection`, `stream`, or `metadata:KEY`: the streams with one value of an entry that the client sends."""
_Decoder = Callable[[str, str, bytes], Mapping[str, Any] | DecodedMessage | None]

_PAUSE_NS = 1_000_000_000
"""After so long without a stream, an address may be that of another connection: systems use ports again."""

_MAX_FRAMES_PER_RUN = 512
"""What a run says beyond so many messages, metadata and trailers is not looked at."""

_MAX_NAMED_FAILURES = 5
"""Of messages that a decoder fails on, so many are named."""

_COLUMNS = ("connection", "stream", "method", "direction", "kind", "wall_ns", "mono_ns", "size", "payload")


@dataclass(frozen=True, slots=True)
class ForeignRequest:
    """What is asked of captures of a service that is not ours.

    Attributes:
        folder: with captures of both worlds below it.
        decoder: `module:function` that reads a message; None: only bytes are looked at.
        run_is: what one run is.
        claim: epsilon that the owner claims for a run; infinite: nothing is.
        delta: at which it is claimed.
        noise: file of what is claimed of the noise in decoded fields; None: nothing is.
        confidence: with which a claim that holds is not refuted.
        seed: of the split and the classifiers.
    """

    folder: str | Path
    decoder: str | None = None
    run_is: RunGrouping = "connection"
    claim: float = math.inf
    delta: float = 0.0
    noise_claims_file: Path | None = None
    confidence: float = 0.95
    seed: int = 0

    @property
    def name(self) -> str:
        """Name of the folder."""
        return PurePosixPath(str(self.folder)).name or str(self.folder)


@dataclass(slots=True)
class ForeignRuns:
    """What was read of the captures.

    Attributes:
        runs: all of them.
        messages: how many passed.
        decoded: how many of those that were looked at the decoder read.
        failed: how many it failed on.
        failures: where it failed first, and why.
        unfinished: captures that were not closed.
        cut: runs that said more than is looked at.
        paused: connections that were left out, because they may be two.
        unnamed: streams that were left out, because their metadata do not name a run.
        captures: SHA-256 of every capture, by its path in the folder.
    """

    runs: list[RunTraffic] = field(default_factory=list)
    message_count: int = 0
    decoded_count: int = 0
    failed_count: int = 0
    failures: list[str] = field(default_factory=list)
    unclosed_captures: int = 0
    truncated_runs: int = 0
    ambiguous_connections: int = 0
    unnamed_streams: int = 0
    capture_digests: dict[str, str] = field(default_factory=dict)


def load_decoder(name: str) -> _Decoder:
    """The function that `module:function` names.

    Raises:
        SpecError: it cannot be imported, or called.
    """
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise SpecError(f"--decoder must be module:function, got {name!r}")
    found = import_object(name, "--decoder")
    if not callable(found):
        raise SpecError(f"--decoder: {name!r} must be a function, got {type(found).__name__}")
    decoder: _Decoder = found
    return decoder


def read_runs(folder: str | Path, decoder: _Decoder | None, run_is: RunGrouping) -> ForeignRuns:
    """All runs of all captures below a folder.

    Raises:
        CaptureError: there is none, one cannot be read, one is of no world, or the decoder could read nothing at all.
        SpecError: nobody knows what a run is.
    """
    if run_is not in ("connection", "stream") and not (run_is.startswith("metadata:") and run_is != "metadata:"):
        raise SpecError(f"--run-boundary must be connection, stream or metadata:KEY, got {run_is}")
    place = open_folder(folder)
    captures = list(find_captures(place))
    if not captures:
        raise CaptureError(f"{folder} has no captures: record some with sottovoce eavesdropper relay")
    reading = ForeignRuns(unclosed_captures=sum(not capture.is_complete for capture in captures))
    for capture in captures:
        if capture.world not in (0, 1):
            raise CaptureError(f"the capture {capture.name} must be of world 0 or 1 (--world), got {capture.world}")
        _read(capture, capture.world, decoder, run_is, reading)
        name = capture.name.removeprefix(f"{place.name}/")
        reading.capture_digests[PurePosixPath(name).name if name == place.name else name] = capture.compute_digests()[0]
    if reading.failed_count and not reading.decoded_count:
        raise CaptureError(
            f"the decoder read none of {reading.failed_count:,} messages, so nothing would be tested; first: {reading.failures[0]}"
        )
    return reading


def _read(capture: Capture, world: int, decoder: _Decoder | None, run_is: RunGrouping, reading: ForeignRuns) -> None:
    """Add the runs of one capture, a part at a time."""
    runs: dict[object, _Run] = {}
    named: dict[int, str | None] = {}
    for row in _rows(capture):
        reading.message_count += row["kind"] == "message"
        key = row[run_is] if run_is in ("connection", "stream") else _named(row, run_is, named)
        if key is None:
            continue
        run = runs.setdefault(key, _Run(row["wall_ns"], row["mono_ns"]))
        run.see(row)
        reading.truncated_runs += len(run.heard) == _MAX_FRAMES_PER_RUN
        if len(run.heard) > _MAX_FRAMES_PER_RUN:
            continue
        decoded = None
        if row["kind"] == "message" and decoder is not None:
            decoded = _decoded(decoder, row, f"{capture.metadata['capture_id']}, {run_is} {key}", reading)
        stream = run.streams.setdefault(row["stream"], len(run.streams))
        run.heard.append(_heard(row, stream, (row["mono_ns"] - run.mono_ns) / 1e9, decoded))
    reading.unnamed_streams += sum(name is None for name in named.values())
    for key, run in runs.items():
        if run_is == "connection" and run.paused:
            reading.ambiguous_connections += 1
            continue
        name = f"{capture.metadata['capture_id']}, {run_is} {key}"
        reading.runs.append(RunTraffic(world, name, run.wall_ns / 1e9, tuple(run.heard[:_MAX_FRAMES_PER_RUN])))


@dataclass(slots=True)
class _Run:
    """A run as it is gathered: when it began, and whether it was silent for long between two streams."""

    wall_ns: int
    mono_ns: int
    heard: list[CapturedFrame] = field(default_factory=list)
    streams: dict[int, int] = field(default_factory=dict)
    paused: bool = False
    _open: set[int] = field(default_factory=set)
    _last_ns: int = 0

    def see(self, row: Mapping[str, Any]) -> None:
        if self.streams and not self._open and row["mono_ns"] - self._last_ns >= _PAUSE_NS:
            self.paused = True
        self._last_ns = row["mono_ns"]
        (self._open.discard if row["kind"] == "trailers" else self._open.add)(row["stream"])


def _named(row: Mapping[str, Any], run_is: RunGrouping, named: dict[int, str | None]) -> str | None:
    """The run that a stream's metadata name, which a client sends first; None: they name none."""
    stream = row["stream"]
    if stream not in named:
        first = row["kind"] == "metadata" and row["direction"] == "out"
        entries = _heard(row, 0, 0.0, None).entries if first else ()
        named[stream] = next((value for key, value in entries if f"metadata:{key}" == run_is), None)
    return named[stream]


def _rows(capture: Capture) -> Iterator[dict[str, Any]]:
    for batch in capture.read_batches(_COLUMNS):
        for k in range(0, batch.num_rows, 64):  # as Python objects, payloads take their space twice
            yield from batch.slice(k, 64).to_pylist()


def _heard(row: Mapping[str, Any], stream: int, seconds: float, decoded: DecodedMessage | None) -> CapturedFrame:
    payload = row["payload"]
    heard = CapturedFrame(row["kind"], row["method"], row["direction"], stream, seconds, row["size"])
    if heard.kind == "message":
        return replace(heard, head=payload[:MAX_HEAD_BYTES], digest=digest(payload), decoded_message=decoded)
    return parse_metadata(heard, payload)


def _decoded(decoder: _Decoder, row: Mapping[str, Any], run: str, reading: ForeignRuns) -> DecodedMessage | None:
    """What the user's decoder makes of a message; what it raises is noted, whatever it is."""
    try:
        found = decoder(row["method"], row["direction"], row["payload"])
        if found is None:
            return None
        given = found if isinstance(found, DecodedMessage) else DecodedMessage(found)
        fields = {str(name): flatten_numbers(values) for name, values in given.fields.items()}
        known = DecodedMessage(fields, None if given.round is None else int(given.round), given.sender)
        hash(known.sender)
    except Exception as error:  # noqa: BLE001 - foreign code, fed with foreign bytes: it may raise anything
        reading.failed_count += 1
        if len(reading.failures) < _MAX_NAMED_FAILURES:
            side = "request" if row["direction"] == "out" else "response"
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
            reading.failures.append(f"{run}, {row['method']} {side} of {row['size']:,} bytes: {text}")
        return None
    reading.decoded_count += 1
    return known
