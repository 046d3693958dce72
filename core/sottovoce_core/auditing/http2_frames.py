"""Frames of HTTP/2 that a relay has recorded without the messages in them (RFC 9113, 4 and 6).

An end that follows gRPC chooses little in them: its library does. An end that does not follow it could hide anything there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
"""Kinds of frames that gRPC's library sends."""
_NAMES = ("DATA", "HEADERS", "PRIORITY", "RST_STREAM", "SETTINGS", "PUSH_PROMISE", "PING", "GOAWAY", "WINDOW_UPDATE")
_HEADER_BYTES = 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 0x1, 0x1, 0x4, 0x8
_GRPC_FLAGS = {
    DATA: _END_STREAM,
    HEADERS: _END_STREAM | _END_HEADERS,
    RST_STREAM: 0,
    SETTINGS: _ACK,
    PING: _ACK,
    GOAWAY: 0,
    WINDOW_UPDATE: 0,
    CONTINUATION: _END_HEADERS,
}
"""Flags that gRPC's library sends: neither padding nor priorities are among them."""
_GRPC_SETTINGS = frozenset({*range(1, 7), *range(0xFE00, 0xFF00)})
"""Settings of HTTP/2, and those of gRPC's library."""
_USUAL_FRAMES = re.compile(
    rb"(?s:...\x00[\x00\x01][\x00-\x7f]...|\x00\x00\x04\x08\x00[\x00-\x7f]...[\x00-\x7f]...|\x00\x00\x08\x06[\x00\x01]\0{4}.{8})*+"
)
"""Headers of plain data, changes of windows and pings: nearly all frames, passed over at once."""
_MAX_FRAMES = 16
"""Number of frames of one kind and place that are kept for an audit."""


@dataclass(frozen=True, slots=True)
class Http2Frame:
    """Frame of HTTP/2.

    Attributes:
        kind: number of its kind.
        flags: its flags.
        stream: its stream, with the reserved bit before it.
        size: bytes of its content.
        content: its content; empty for plain data.
    """

    kind: int
    flags: int
    stream: int
    size: int
    content: bytes

    @property
    def name(self) -> str:
        """Name of its kind."""
        names = (*_NAMES, "CONTINUATION")
        return names[self.kind] if self.kind < len(names) else f"of kind {self.kind}"

    @property
    def padding(self) -> int:
        """Number of bytes of padding."""
        return self.content[0] if self.kind in (DATA, HEADERS) and self.flags & _PADDED and self.content else 0

    @property
    def settings(self) -> Iterator[tuple[int, int]]:
        """Key and value of every setting."""
        for at in range(0, len(self.content) - 5, 6):
            yield int.from_bytes(self.content[at : at + 2]), int.from_bytes(self.content[at + 2 : at + 6])

    def describe_violation(self) -> str:
        """Describe what gRPC's library never sends; empty: nothing."""
        if (usual := _GRPC_FLAGS.get(self.kind)) is None:
            return f"a frame {self.name} ({self.size} bytes)"
        if self.flags & ~usual:
            return f"a frame {self.name} with the flags {self.flags:#04x}"
        if self.stream >> 31 or (self.kind == WINDOW_UPDATE and self.content[:1] >= b"\x80"):
            return f"a frame {self.name} with a reserved bit"
        if self.kind == SETTINGS:
            unknown = next((key for key, _ in self.settings if key not in _GRPC_SETTINGS), None)
            return "" if unknown is None else f"a setting with the key {unknown}"
        return ""


def split_frames(recorded: bytes, at: int = 0) -> Iterator[Http2Frame]:
    """Yield the frames that were recorded, from a position on."""
    while at + _HEADER_BYTES <= len(recorded):
        size, kind, flags = int.from_bytes(recorded[at : at + 3]), recorded[at + 3], recorded[at + 4]
        stream, at = int.from_bytes(recorded[at + 5 : at + _HEADER_BYTES]), at + _HEADER_BYTES
        kept = 0 if kind == DATA and flags <= _END_STREAM else size
        yield Http2Frame(kind, flags, stream, size, recorded[at : at + kept])
        at += kept


def find_violations(recorded: bytes) -> Iterator[str]:
    """Yield descriptions of what gRPC's library never sends in frames that were recorded."""
    at = 0
    while (found := _USUAL_FRAMES.match(recorded, at)) is not None:
        at = found.end()
        if (frame := next(split_frames(recorded, at), None)) is None:
            return
        if text := frame.describe_violation():
            yield text
        at += _HEADER_BYTES + len(frame.content)


@dataclass(slots=True)
class FrameSample:
    """First frames of a run, by kind and place.

    Attributes:
        frames: place and frame, in order.
    """

    frames: list[tuple[str, Http2Frame]] = field(default_factory=list)
    _counts: Counter[tuple[str, int]] = field(default_factory=Counter)

    def add(self, place: str, recorded: bytes) -> None:
        """Add frames that were recorded at a place: a direction of an edge."""
        for frame in split_frames(recorded):
            self._counts[place, frame.kind] += 1
            if self._counts[place, frame.kind] <= _MAX_FRAMES:
                self.frames.append((place, frame))
