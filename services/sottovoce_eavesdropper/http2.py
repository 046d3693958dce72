"""Decoder of one connection of gRPC over HTTP/2 that passes by: calls, their metadata, messages and ends.

It takes no part in the connection. Frames are split here (RFC 9113, 4.1), because most are data of one message; hyperframe parses
all others, and hpack the headers. gRPC's rules: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md.

No byte that an end chooses is lost: beside the messages there is a record of all frames without the messages in them
(`GrpcDecoder.take_frames`). So the decoder need not know where something may be hidden: in pings, settings, windows, padding,
flags, packed headers, or frames of a kind that is not known.
"""

from __future__ import annotations

import base64
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple
from urllib.parse import quote, unquote

import grpc

from sottovoce_core.errors import RemoteProtocolError
from sottovoce_core.optional import import_optional
from sottovoce_eavesdropper.grpc_messages import MessageSplitter

Direction = Literal["out", "back"]
"""Direction of bytes: from caller to callee, or back."""
Metadata = tuple[tuple[str, str | bytes], ...]
_Headers = list[tuple[bytes, bytes]]

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PUSH_PROMISE, _CONTINUATION = 0, 1, 3, 4, 5, 9
_END_STREAM = 0x1
_STREAM_MASK = 0x7FFFFFFF
_HEADER_BYTES = 9
"""Bytes before the content of a frame."""
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
    """Event of a call: its metadata, a message, or trailers of either side; or bytes that are in none of these.

    Attributes:
        call: number of the call; 0: none.
        kind: `metadata`, `message` or `trailers`; `http2`, frames of a direction; `unfinished`, the bytes of a message (with its
            prefix) or of a frame that has no end.
        method: method of the call.
        payload: bytes of a message, unpacked, or of `unfinished` and `http2`, as they came; empty otherwise.
        is_first: True for the first message of a direction of the call.
        metadata: metadata or trailing metadata; empty for a message.
        code, details: status, in the callee's trailers only.
    """

    call: int
    kind: Literal["metadata", "message", "trailers", "unfinished", "http2"]
    method: str
    payload: bytes = b""
    is_first: bool = False
    metadata: Metadata = ()
    code: str = ""
    details: str = ""


@dataclass(slots=True)
class _Call:
    """Call that is open, or was reset a moment ago."""

    number: int
    method: str
    out: MessageSplitter
    back: MessageSplitter
    has_answer: bool = False
    is_reset: bool = False


@dataclass(slots=True)
class _Side:
    """State of one direction.

    Attributes:
        block, block_owner: block of headers that is not complete, its stream, and whether this ends it.
        frames: frames that were not taken, of plain data the headers alone.
        unfinished: messages, and a frame, that have no end, and were not taken.
    """

    decode_headers: Callable[[bytes], _Headers]
    set_table_size: Callable[[int], None]
    preface: bytes = b""
    block: bytearray = field(default_factory=bytearray)
    block_owner: tuple[int, bool] = (0, False)
    frames: bytearray = field(default_factory=bytearray)
    unfinished: list[Event] = field(default_factory=list)
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

    def end(self) -> None:
        """Keep the bytes of a frame that has no end."""
        if self._partial:
            self.unfinished.append(Event(0, "unfinished", "", bytes(self._partial)))
            self._partial.clear()


class GrpcDecoder:
    """Decoder of one connection, fed with the bytes of each direction.

    Args:
        max_message_bytes: maximum bytes of a message that are kept; a longer one is cut.
        number_call: returns the number of a new call.
        allow_compression: compressed messages may pass, which are unpacked.

    Raises:
        SpecError: hpack is not installed.
    """

    def __init__(
        self, max_message_bytes: int, number_call: Callable[[], int], *, allow_compression: bool = True
    ) -> None:
        self._hpack = import_optional("hpack", "hpack", "recording gRPC")
        self._frames = import_optional("hyperframe.frame", "hyperframe", "recording gRPC")
        self._frame_error: type[Exception] = import_optional(
            "hyperframe.exceptions", "hyperframe", "recording gRPC"
        ).HyperframeError
        self._number_call = number_call
        self._build_splitter = partial(MessageSplitter, max_message_bytes, int(allow_compression))
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
        side = self._sides[direction]
        for frame in side.split_frames(data):
            kind, flags = frame[3], frame[4]
            if kind == _DATA and flags <= _END_STREAM:
                side.frames += frame[:_HEADER_BYTES]
                yield from self._read_data(
                    direction, int.from_bytes(frame[5:9]), frame[_HEADER_BYTES:], is_end=bool(flags)
                )
                continue
            side.frames += frame
            if kind in (_DATA, _HEADERS, _CONTINUATION, _RST_STREAM, _SETTINGS):
                yield from self._read_frame(direction, frame)
            elif kind == _PUSH_PROMISE:
                raise RemoteProtocolError("an end of gRPC must not send PUSH_PROMISE")

    def take_frames(self, direction: Direction) -> Iterator[Event]:
        """Yield the bytes of a direction that are in no other event: frames, and what has no end.

        A frame is as it came. Of DATA with no flag but END_STREAM, its header alone is there.
        """
        side = self._sides[direction]
        frames, side.frames, unfinished, side.unfinished = bytes(side.frames), bytearray(), side.unfinished, []
        if frames:
            yield Event(0, "http2", "", frames)
        yield from unfinished

    def end(self, direction: Direction) -> Iterator[Event]:
        """End a direction; yield the trailers of calls that are cut because the callee sends nothing more."""
        self._sides[direction].end()
        if direction == "back":
            for stream, call in tuple(self._calls.items()):
                if not (call.is_reset or call.back.is_ended):
                    text = "the connection was cut"
                    yield Event(call.number, "trailers", call.method, code="UNAVAILABLE", details=text)
                self._forget(stream)

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
            out, back = self._build_splitter(), self._build_splitter()
            out.encoding = fields.get(b"grpc-encoding", "")
            call = self._calls[stream] = _Call(self._number_call(), fields.get(b":path", ""), out, back)
            yield Event(call.number, "metadata", call.method, metadata=_read_metadata(headers))
        elif call is None:  # of a call that was reset long ago
            return
        elif direction == "out":
            yield Event(call.number, "trailers", call.method, metadata=_read_metadata(headers))
        else:
            if not (call.has_answer and is_end):
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
            self._forget(self._reset.popleft())

    def _end(self, stream: int, messages: MessageSplitter) -> None:
        messages.is_ended = True
        call = self._calls[stream]
        if call.out.is_ended and call.back.is_ended:
            self._forget(stream)

    def _forget(self, stream: int) -> None:
        if (call := self._calls.pop(stream, None)) is not None:
            for name, messages in (("out", call.out), ("back", call.back)):
                if rest := messages.take_rest():
                    self._sides[name].unfinished.append(Event(call.number, "unfinished", call.method, rest))


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
