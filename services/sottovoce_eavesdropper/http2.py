"""Decoder of one connection of gRPC over HTTP/2 that passes by: calls, their metadata, messages and ends.

It takes no part in the connection. Frames are split here (RFC 9113, 4.1), because most are data of one message; hyperframe parses
all others, and hpack the headers. gRPC's rules: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import base64
import contextlib
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple
from urllib.parse import quote, unquote

import grpc

from sottovoce_core.errors import RemoteProtocolError
from sottovoce_core.optional import import_optional

Direction = Literal["out", "back"]
"""Direction of bytes: from caller to callee, or back."""
Metadata = tuple[tuple[str, str | bytes], ...]
_Headers = list[tuple[bytes, bytes]]

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _CONTINUATION = 0, 1, 3, 4, 9
_END_STREAM, _PADDED = 0x1, 0x8
_STREAM_MASK = 0x7FFFFFFF
_HEADER_BYTES, _PREFIX_BYTES = 9, 5
"""Bytes before the content of a frame, and of a gRPC message."""
_MAX_HEADER_BLOCK_BYTES = 64 * 1024
"""Maximum bytes of the headers of a call, packed and unpacked: gRPC's own limit is a quarter of that."""
_MAX_CALLS, _MAX_RESET_CALLS = 4_096, 128
"""Maximum numbers of open calls of a connection, and of remembered reset calls: their last messages may still be on the way."""
_MAX_TABLE_BYTES = 1024 * 1024
"""Maximum bytes of the table by which headers are packed, even where the other side allows more."""
_TRANSPORT_KEYS = frozenset(
    {
        b"te",
        b"content-type",
        b"host",
        b"grpc-timeout",
        b"grpc-encoding",
        b"grpc-accept-encoding",
        b"grpc-status",
        b"grpc-message",
    }
)
"""Headers of the transport, which are no metadata of an application."""
_STATUS_NAMES = {str(code.value[0]): code.name for code in grpc.StatusCode}
_RESET_STATUS_NAMES = {7: "UNAVAILABLE", 8: "CANCELLED", 11: "RESOURCE_EXHAUSTED", 12: "PERMISSION_DENIED"}
"""Status of a call that the callee's side reset, by the code of the error; INTERNAL for others."""


class Event(NamedTuple):
    """Event of a call: its metadata, a message, or its trailers.

    Attributes:
        call: number of the call.
        kind: `metadata`, `message` or `trailers`.
        method: method of the call.
        payload: bytes of a message, unpacked; empty otherwise.
        is_first: True for the first message of a direction of the call.
        metadata: metadata or trailing metadata; empty for a message.
        code, details: status, in trailers only.
    """

    call: int
    kind: Literal["metadata", "message", "trailers"]
    method: str
    payload: bytes = b""
    is_first: bool = False
    metadata: Metadata = ()
    code: str = ""
    details: str = ""


@dataclass(slots=True)
class _Messages:
    """Splitter of one direction of a call into messages; of a longer one it keeps `max_bytes` bytes.

    Attributes:
        max_bytes: maximum bytes of a message that is kept.
        encoding: how messages that say so are compressed.
        count: number of messages so far.
        is_ended: nothing more comes.
    """

    max_bytes: int
    encoding: str = ""
    count: int = 0
    is_ended: bool = False
    _head: bytearray = field(default_factory=bytearray)
    _body: bytearray = field(default_factory=bytearray)
    _remaining: int = 0

    def split(self, data: bytes) -> Iterator[bytes]:
        """Yield every message that ends in these bytes."""
        size = len(data)
        if not self._head and size - _PREFIX_BYTES == int.from_bytes(data[1:5]) and size > _PREFIX_BYTES:
            yield self._unpack(data[0], data[5 : 5 + self.max_bytes])  # one message, which is the rule
            return
        at = 0
        while at < size:
            if len(self._head) < _PREFIX_BYTES:
                missing = _PREFIX_BYTES - len(self._head)
                self._head += data[at : at + missing]
                at += missing
                if len(self._head) < _PREFIX_BYTES:
                    return
                self._remaining = int.from_bytes(self._head[1:])
            taken = min(self._remaining, size - at)
            self._body += data[at : at + min(taken, self.max_bytes - len(self._body))]
            self._remaining, at = self._remaining - taken, at + taken
            if not self._remaining:
                yield self._unpack(self._head[0], bytes(self._body))
                self._head.clear()
                self._body.clear()

    def _unpack(self, flag: int, body: bytes) -> bytes:
        """Return a message; as it is if it cannot be decompressed."""
        if not flag & 1 or self.encoding not in ("gzip", "deflate"):
            return body
        try:
            return zlib.decompressobj(wbits=47).decompress(body, self.max_bytes)  # 47: zlib or gzip
        except zlib.error:
            return body


@dataclass(slots=True)
class _Call:
    """Call that is open, or was reset a moment ago."""

    number: int
    method: str
    out: _Messages
    back: _Messages
    has_answer: bool = False
    is_reset: bool = False


@dataclass(slots=True)
class _Side:
    """State of one direction: bytes of an unfinished frame, and a block of headers that is not complete."""

    decode_headers: Callable[[bytes], _Headers]
    set_table_size: Callable[[int], None]
    preface: bytes = b""
    block: bytearray = field(default_factory=bytearray)
    block_owner: tuple[int, bool] = (0, False)
    _partial: bytearray = field(default_factory=bytearray)
    _needed: int = 0

    def split_frames(self, data: bytes) -> Iterator[bytes]:
        """Yield every frame that ends in these bytes, whole."""
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed:
                return
            data = bytes(self._partial)
            self._partial.clear()
        at, size = 0, len(data)
        if self.preface:
            if size < len(self.preface) and self.preface.startswith(data):
                self._hold(data, len(self.preface))
                return
            if not data.startswith(self.preface):
                raise RemoteProtocolError(
                    "a connection of gRPC must begin with the preface of HTTP/2, and this one does not"
                )
            at, self.preface = len(self.preface), b""
        while size - at >= _HEADER_BYTES:
            end = at + _HEADER_BYTES + int.from_bytes(data[at : at + 3])
            if end > size:
                break
            yield data[at:end]
            at = end
        if at < size:
            left = size - at
            needed = _HEADER_BYTES + (int.from_bytes(data[at : at + 3]) if left >= _HEADER_BYTES else 0)
            self._hold(data[at:], needed)

    def _hold(self, rest: bytes, needed: int) -> None:
        self._partial += rest
        self._needed = needed


class GrpcDecoder:
    """Decoder of one connection, fed with the bytes of each direction.

    Args:
        max_message_bytes: maximum bytes of a message that are kept; a longer one is cut.
        number_call: returns the number of a new call.

    Raises:
        SpecError: hpack is not installed.
    """

    def __init__(self, max_message_bytes: int, number_call: Callable[[], int]) -> None:
        self._hpack = import_optional("hpack", "hpack", "recording gRPC")
        self._frames = import_optional("hyperframe.frame", "hyperframe", "recording gRPC")
        self._frame_error: type[Exception] = import_optional(
            "hyperframe.exceptions", "hyperframe", "recording gRPC"
        ).HyperframeError
        self._max_bytes, self._number_call = max_message_bytes, number_call
        self._sides = {"out": self._build_side(_PREFACE), "back": self._build_side(b"")}
        self._calls: dict[int, _Call] = {}
        self._reset: deque[int] = deque()

    def _build_side(self, preface: bytes) -> _Side:
        decoder = self._hpack.Decoder(max_header_list_size=_MAX_HEADER_BLOCK_BYTES)

        def set_table_size(size: int) -> None:
            decoder.max_allowed_table_size = min(size, _MAX_TABLE_BYTES)

        return _Side(lambda block: decoder.decode(block, raw=True), set_table_size, preface)

    @property
    def has_open_calls(self) -> bool:
        """Return whether a call has not ended."""
        return any(not (call.is_reset or call.back.is_ended) for call in self._calls.values())

    def decode(self, direction: Direction, data: bytes) -> Iterator[Event]:
        """Yield the events of bytes of one direction, in order.

        Raises:
            RemoteProtocolError: these bytes are not gRPC over HTTP/2.
        """
        for frame in self._sides[direction].split_frames(data):
            kind, flags = frame[3], frame[4]
            if kind == _DATA and not flags & _PADDED:
                yield from self._read_data(
                    direction, int.from_bytes(frame[5:9]), frame[_HEADER_BYTES:], is_end=bool(flags & _END_STREAM)
                )
            elif kind in (_DATA, _HEADERS, _CONTINUATION, _RST_STREAM, _SETTINGS):
                yield from self._read_frame(direction, frame)

    def end_calls(self) -> Iterator[Event]:
        """Yield the trailers of calls that the end of the connection cuts."""
        for call in self._calls.values():
            if not (call.is_reset or call.back.is_ended):
                yield Event(call.number, "trailers", call.method, code="UNAVAILABLE", details="the connection was cut")
        self._calls.clear()

    def _read_data(self, direction: Direction, stream: int, data: bytes, *, is_end: bool) -> Iterator[Event]:
        if (call := self._calls.get(stream)) is None:
            if data:  # it would pass unrecorded
                raise RemoteProtocolError("data of HTTP/2 must belong to an open call")
            return
        messages = call.out if direction == "out" else call.back
        for payload in messages.split(data):
            messages.count += 1
            yield Event(call.number, "message", call.method, payload, messages.count == 1)
        if is_end:
            if direction == "back":
                yield Event(call.number, "trailers", call.method, code="UNKNOWN", details="ended without a status")
            self._end(stream, messages)

    def _read_frame(self, direction: Direction, raw: bytes) -> Iterator[Event]:
        """Read a frame that is not plain data."""
        side, kind, stream = self._sides[direction], raw[3], int.from_bytes(raw[5:9]) & _STREAM_MASK
        try:
            frame, _ = self._frames.Frame.parse_frame_header(memoryview(raw[:_HEADER_BYTES]))
            frame.parse_body(memoryview(raw[_HEADER_BYTES:]))
            if kind == _DATA:
                yield from self._read_data(direction, stream, frame.data, is_end="END_STREAM" in frame.flags)
            elif kind == _SETTINGS:
                other = self._sides["back" if direction == "out" else "out"]
                if (size := frame.settings.get(self._frames.SettingsFrame.HEADER_TABLE_SIZE)) is not None:
                    other.set_table_size(size)
            elif kind == _RST_STREAM:
                yield from self._reset_call(direction, stream, frame.error_code)
            else:
                if kind == _HEADERS:
                    side.block_owner = stream, "END_STREAM" in frame.flags
                side.block += frame.data
                if len(side.block) > _MAX_HEADER_BLOCK_BYTES:
                    raise RemoteProtocolError(f"headers must have at most {_MAX_HEADER_BLOCK_BYTES} bytes")
                if "END_HEADERS" in frame.flags:
                    block, (stream, is_end) = bytes(side.block), side.block_owner
                    side.block.clear()
                    yield from self._read_headers(direction, stream, side.decode_headers(block), is_end=is_end)
        except (self._hpack.HPACKError, self._frame_error) as error:
            raise RemoteProtocolError(f"this is not HTTP/2: {type(error).__name__}") from None

    def _read_headers(self, direction: Direction, stream: int, headers: _Headers, *, is_end: bool) -> Iterator[Event]:
        fields = {key: _decode_text(value) for key, value in headers}
        call = self._calls.get(stream)
        if direction == "out" and call is None:
            if len(self._calls) >= _MAX_CALLS:
                raise RemoteProtocolError(f"a connection must have at most {_MAX_CALLS} open calls")
            out, back = (_Messages(self._max_bytes) for _ in range(2))
            out.encoding = fields.get(b"grpc-encoding", "")
            call = self._calls[stream] = _Call(self._number_call(), fields.get(b":path", ""), out, back)
            yield Event(call.number, "metadata", call.method, metadata=_read_metadata(headers))
        if call is None:  # of a call that was reset long ago
            return
        if direction == "back":
            if not call.has_answer:
                call.has_answer, call.back.encoding = True, fields.get(b"grpc-encoding", "")
                yield Event(call.number, "metadata", call.method, metadata=() if is_end else _read_metadata(headers))
            if is_end:
                code = _STATUS_NAMES.get(fields.get(b"grpc-status", ""), "UNKNOWN")
                details = unquote(fields.get(b"grpc-message", ""))
                yield Event(
                    call.number,
                    "trailers",
                    call.method,
                    metadata=_read_metadata(headers),
                    code=code,
                    details=details,
                )
        if is_end:
            self._end(stream, call.out if direction == "out" else call.back)

    def _reset_call(self, direction: Direction, stream: int, error: int) -> Iterator[Event]:
        call = self._calls.get(stream)
        if call is None or call.is_reset:
            return
        if direction == "back" and not call.back.is_ended:
            code = _RESET_STATUS_NAMES.get(error, "INTERNAL")
            yield Event(call.number, "trailers", call.method, code=code, details="the callee reset the call")
        call.is_reset = True
        self._reset.append(stream)  # the other side may not know yet: what it still sends crosses the channel, too
        if len(self._reset) > _MAX_RESET_CALLS:
            self._calls.pop(self._reset.popleft(), None)

    def _end(self, stream: int, messages: _Messages) -> None:
        messages.is_ended = True
        call = self._calls[stream]
        if call.out.is_ended and call.back.is_ended:
            del self._calls[stream]


class GrpcRefusal:
    """Answer of every call on a connection that is refused.

    Args:
        code: status code of the answer.
        text: its details.
    """

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        hpack = import_optional("hpack", "hpack", "recording gRPC")
        self._frames = import_optional("hyperframe.frame", "hyperframe", "recording gRPC")
        self._side = _Side(lambda _: [], lambda _: None, _PREFACE)
        self._encode = hpack.Encoder().encode
        self._headers = [
            (":status", "200"),
            ("content-type", "application/grpc"),
            ("grpc-status", str(code.value[0])),
            ("grpc-message", quote(text, safe=" !\"#$&'()*+,/:;<=>?@[]^_`{|}~-.")),
        ]
        self._has_begun = False

    def answer(self, data: bytes) -> bytes:
        """Return the answer to bytes of the caller; empty where they are no gRPC, which the caller notices by itself."""
        frames, answers = self._frames, []
        if not self._has_begun:
            self._has_begun = True
            answers.append(frames.SettingsFrame(0))
        with contextlib.suppress(RemoteProtocolError):
            for raw in self._side.split_frames(data):
                if raw[3] == _SETTINGS and not raw[4]:
                    answers.append(frames.SettingsFrame(0, flags=["ACK"]))
                elif raw[3] == _HEADERS:
                    stream = int.from_bytes(raw[5:9]) & _STREAM_MASK
                    ends = ["END_HEADERS", "END_STREAM"]
                    answers.append(frames.HeadersFrame(stream, self._encode(self._headers), flags=ends))
        return b"".join(each.serialize() for each in answers)


def _read_metadata(headers: _Headers) -> Metadata:
    """Return an application's metadata among headers."""
    return tuple(
        (_decode_text(key), _decode_bytes(value) if key.endswith(b"-bin") else _decode_text(value))
        for key, value in headers
        if key not in _TRANSPORT_KEYS and not key.startswith((b":", b"grpc-internal-"))
    )


def _decode_text(value: bytes) -> str:
    return bytes(value).decode(errors="replace")


def _decode_bytes(value: bytes) -> bytes:
    """Return the bytes of a value: in base64, or as they are after a zero, which gRPC's own library negotiates."""
    if value[:1] == b"\0":
        return bytes(value[1:])
    with contextlib.suppress(ValueError):
        return base64.b64decode(bytes(value) + b"=" * (-len(value) % 4), validate=True)
    return bytes(value)
