"""Captures of foreign services as runs: rows grouped by connection or stream, and decoded by the user's decoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from sottovoce_client.auditing.captures import parse_metadata
from sottovoce_core.auditing.http2_frames import FrameSample
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

RunBoundary = str
"""Definition of a run: `connection`, `stream`, or `metadata:KEY`: the streams with one value of a client's metadata entry."""
_Decoder = Callable[[str, str, bytes], Mapping[str, Any] | DecodedMessage | None]

_PAUSE_NS = 1_000_000_000
"""Minimum time without streams after which an address may be that of another connection, because ports are reused."""

_MAX_FRAMES_PER_RUN = 512
"""Maximum number of examined messages, metadata and trailers of a run."""

_MAX_NAMED_FAILURES = 5
"""Maximum number of named decoder failures."""

_COLUMNS = ("connection", "stream", "method", "direction", "kind", "wall_ns", "mono_ns", "size", "payload")


@dataclass(frozen=True, slots=True)
class ForeignRequest:
    """Options of an audit of captures of a foreign service.

    Attributes:
        folder: folder with captures of both worlds.
        decoder: `module:function` that decodes a message; None: only bytes are examined.
        run_boundary: definition of a run.
        claim: claimed epsilon of a run; infinite: no claim.
        delta: delta of the claim.
        noise_claims_file: file of claims about the noise in decoded fields; None: no claims.
        confidence: probability that a correct claim is not refuted.
        seed: seed of the split and the classifiers.
    """

    folder: str | Path
    decoder: str | None = None
    run_boundary: RunBoundary = "connection"
    claim: float = math.inf
    delta: float = 0.0
    noise_claims_file: Path | None = None
    confidence: float = 0.95
    seed: int = 0

    @property
    def name(self) -> str:
        """Name of the folder of the captures."""
        return PurePosixPath(str(self.folder)).name or str(self.folder)


@dataclass(slots=True)
class ForeignRuns:
    """Content of the captures.

    Attributes:
        runs: all runs.
        message_count: number of all messages.
        decoded_count: number of examined messages that the decoder decoded.
        failed_count: number of messages on which the decoder failed.
        failures: first failures and their reasons.
        unclosed_captures: number of captures that were not closed.
        truncated_runs: number of runs with more messages than are examined.
        ambiguous_connections: number of excluded connections that may be two.
        unnamed_streams: number of excluded streams whose metadata name no run.
        capture_digests: SHA-256 of every capture, by its path in the folder.
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
    """Import the decoder `module:function`.

    Raises:
        SpecError: It cannot be imported, or is not callable.
    """
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise SpecError(f"--decoder must be module:function, got {name!r}")
    found = import_object(name, "--decoder", is_own=True)
    if not callable(found):
        raise SpecError(f"--decoder: {name!r} must be a function, got {type(found).__name__}")
    decoder: _Decoder = found
    return decoder


def read_runs(folder: str | Path, decoder: _Decoder | None, run_boundary: RunBoundary) -> ForeignRuns:
    """Read all runs of all captures in a folder and below.

    Raises:
        CaptureError: There is no capture, one cannot be read or has no world, or the decoder failed on all messages.
        SpecError: The run boundary is invalid.
    """
    is_by_metadata = run_boundary.startswith("metadata:") and run_boundary != "metadata:"
    if run_boundary not in ("connection", "stream") and not is_by_metadata:
        raise SpecError(f"--run-boundary must be connection, stream or metadata:KEY, got {run_boundary}")
    place = open_folder(folder)
    captures = list(find_captures(place))
    if not captures:
        raise CaptureError(f"{folder} must have captures, and has none: record some with sottovoce eavesdropper relay")
    reading = ForeignRuns(unclosed_captures=sum(not capture.is_complete for capture in captures))
    for capture in captures:
        if capture.world not in (0, 1):
            raise CaptureError(f"the capture {capture.name} must be of world 0 or 1 (--world), got {capture.world}")
        _add_runs(capture, capture.world, decoder, run_boundary, reading)
        name = capture.name.removeprefix(f"{place.name}/")
        reading.capture_digests[PurePosixPath(name).name if name == place.name else name] = capture.compute_digests()[0]
    if reading.failed_count and not reading.decoded_count:
        raise CaptureError(
            f"the decoder must decode some message, and failed on all {reading.failed_count:,}; first: {reading.failures[0]}"
        )
    return reading


def _add_runs(
    capture: Capture, world: int, decoder: _Decoder | None, run_boundary: RunBoundary, reading: ForeignRuns
) -> None:
    """Add the runs of one capture, read in parts."""
    runs: dict[object, _PartialRun] = {}
    names: dict[int, str | None] = {}
    for row in _iterate_rows(capture):
        reading.message_count += row["kind"] == "message"
        if row["stream"] == 0 and run_boundary != "connection":  # frames of all runs of the connection
            continue
        key = (
            row[run_boundary] if run_boundary in ("connection", "stream") else _find_run_name(row, run_boundary, names)
        )
        if key is None:
            continue
        run = runs.setdefault(key, _PartialRun(row["wall_ns"], row["mono_ns"]))
        if row["kind"] == "http2":
            run.sample.add(f"connection {'request' if row['direction'] == 'out' else 'response'}", row["payload"])
            continue
        run.track_streams(row)
        reading.truncated_runs += len(run.frames) == _MAX_FRAMES_PER_RUN
        if len(run.frames) > _MAX_FRAMES_PER_RUN:
            continue
        decoded = None
        if row["kind"] == "message" and decoder is not None:
            decoded = _decode(decoder, row, f"{capture.metadata['capture_id']}, {run_boundary} {key}", reading)
        stream = run.streams.setdefault(row["stream"], len(run.streams))
        run.frames.append(_read_frame(row, stream, (row["mono_ns"] - run.mono_ns) / 1e9, decoded))
    reading.unnamed_streams += sum(name is None for name in names.values())
    for key, run in runs.items():
        if not run.frames:  # a connection without a call
            continue
        if run_boundary == "connection" and run.has_pause:
            reading.ambiguous_connections += 1
            continue
        name = f"{capture.metadata['capture_id']}, {run_boundary} {key}"
        frames = tuple(run.frames[:_MAX_FRAMES_PER_RUN])
        reading.runs.append(RunTraffic(world, name, run.wall_ns / 1e9, frames, tuple(run.sample.frames)))


@dataclass(slots=True)
class _PartialRun:
    """A run while it is read: its start time, its frames, and whether it had a long pause between two streams."""

    wall_ns: int
    mono_ns: int
    frames: list[CapturedFrame] = field(default_factory=list)
    sample: FrameSample = field(default_factory=FrameSample)
    streams: dict[int, int] = field(default_factory=dict)
    has_pause: bool = False
    _open: set[int] = field(default_factory=set)
    _last_ns: int = 0

    def track_streams(self, row: Mapping[str, Any]) -> None:
        if self.streams and not self._open and row["mono_ns"] - self._last_ns >= _PAUSE_NS:
            self.has_pause = True
        self._last_ns = row["mono_ns"]
        is_end = row["kind"] == "trailers" and row["direction"] == "back"
        (self._open.discard if is_end else self._open.add)(row["stream"])


def _find_run_name(row: Mapping[str, Any], run_boundary: RunBoundary, names: dict[int, str | None]) -> str | None:
    """Return the run named by a stream's metadata, which a client sends first; None if they name none."""
    stream = row["stream"]
    if stream not in names:
        first = row["kind"] == "metadata" and row["direction"] == "out"
        entries = _read_frame(row, 0, 0.0, None).entries if first else ()
        names[stream] = next((value for key, value in entries if f"metadata:{key}" == run_boundary), None)
    return names[stream]


def _iterate_rows(capture: Capture) -> Iterator[dict[str, Any]]:
    for batch in capture.read_batches(_COLUMNS):
        for k in range(0, batch.num_rows, 64):  # few at a time: Python objects double the memory of payloads
            yield from batch.slice(k, 64).to_pylist()


def _read_frame(row: Mapping[str, Any], stream: int, seconds: float, decoded: DecodedMessage | None) -> CapturedFrame:
    payload = row["payload"]
    frame = CapturedFrame(row["kind"], row["method"], row["direction"], stream, seconds, row["size"])
    if frame.kind == "message":
        return replace(frame, head=payload[:MAX_HEAD_BYTES], digest=digest(payload), decoded_message=decoded)
    if frame.kind == "unfinished":
        return replace(frame, entries=(("bytes", payload[:MAX_HEAD_BYTES].hex()),))
    return parse_metadata(frame, payload)


def _decode(decoder: _Decoder, row: Mapping[str, Any], run: str, reading: ForeignRuns) -> DecodedMessage | None:
    """Decode a message with the user's decoder; count and name any exception."""
    try:
        found = decoder(row["method"], row["direction"], row["payload"])
        if found is None:
            return None
        given = found if isinstance(found, DecodedMessage) else DecodedMessage(found)
        fields = {str(name): flatten_numbers(values) for name, values in given.fields.items()}
        message = DecodedMessage(fields, None if given.round is None else int(given.round), given.sender)
        hash(message.sender)
    except Exception as error:  # noqa: BLE001 - foreign code with foreign bytes may raise anything
        reading.failed_count += 1
        if len(reading.failures) < _MAX_NAMED_FAILURES:
            side = "request" if row["direction"] == "out" else "response"
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
            reading.failures.append(f"{run}, {row['method']} {side} of {row['size']:,} bytes: {text}")
        return None
    reading.decoded_count += 1
    return message
