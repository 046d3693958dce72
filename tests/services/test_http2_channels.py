"""Places where an end could hide bytes in a connection of gRPC: a capture has them, or they do not pass."""

from __future__ import annotations

import gzip
import struct
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import grpc
import pytest
from hpack import Encoder
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from hypothesis import given
from hypothesis import strategies as st

from sottovoce_core.auditing.http2_frames import find_violations, split_frames
from sottovoce_core.errors import RemoteProtocolError
from sottovoce_eavesdropper.capture_reader import open_capture
from sottovoce_eavesdropper.capture_writer import CaptureWriter
from sottovoce_eavesdropper.grpc_proxy import GrpcRecorder
from sottovoce_eavesdropper.http2 import Direction, Event, GrpcDecoder
from sottovoce_wire.v1 import eavesdropper_pb2
from tests.services.capturing import SHAPES
from tests.services.test_foreign import ALONE, PATIENCE_S, served, stream, unary
from tests.services.test_http2 import METHOD, PREFACE, REQUEST, headers, message, new_decoder, opened, read, serialize

SECRET = b"\x53\x45\x43\x52\x45\x54\x21\x21"


def frame(kind: int, content: bytes, *, flags: int = 0, stream: int = 0) -> bytes:
    """A frame of any kind."""
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def read_all(decoder: GrpcDecoder, direction: Direction, data: bytes, cuts: list[int] | None = None) -> list[Event]:
    """Decode the last bytes of a direction; return all events."""
    events = read(decoder, direction, data, cuts)
    return [*events, *decoder.end("back"), *decoder.end(direction), *decoder.take_frames(direction)]


def rebuild(events: Iterable[Event], preface: bytes = b"") -> bytes:
    """The bytes of one direction of a connection with one call, as they passed: out of what was recorded."""
    recorded = list(events)
    frames = b"".join(each.payload for each in recorded if each.kind == "http2")
    data = b"".join(message(each.payload) for each in recorded if each.kind == "message")
    data += b"".join(each.payload for each in recorded if each.kind == "unfinished" and each.call)
    rest = b"".join(each.payload for each in recorded if each.kind == "unfinished" and not each.call)
    passed, at = preface, 0
    for each in split_frames(frames):
        head, at = frames[at : at + 9], at + 9
        if each.kind == 0:
            own = each.size if each.flags <= 1 else max(0, each.size - each.padding - bool(each.flags & 8))
            passed += head + (data[:own] if each.flags <= 1 else each.content)
            data = data[own:]
        else:
            passed += head + each.content
        at += len(each.content)
    assert not data
    return passed + rest


some_frames = st.one_of(
    st.builds(
        lambda data, flags: frame(0, data, flags=flags, stream=1), st.binary(max_size=40), st.sampled_from([0, 2])
    ),
    st.builds(
        lambda data, pad: frame(0, bytes([len(pad)]) + data + pad, flags=8, stream=1),
        st.binary(max_size=40),
        st.binary(max_size=9),
    ),
    st.builds(
        lambda kind, data, flags, stream: frame(kind, data, flags=flags, stream=stream),
        st.sampled_from([2, 3, 6, 7, 8, *range(10, 256)]),
        st.binary(max_size=40),
        st.integers(0, 255),
        st.integers(0, 2**32 - 1),
    ),
    st.builds(lambda data: frame(4, data), st.binary(max_size=5).map(lambda data: data.ljust(6, b"\7"))),
    st.builds(
        lambda stream, flags: frame(0, b"", stream=stream, flags=flags), st.integers(2, 2**32 - 1), st.integers(0, 7)
    ),
)


@given(
    sent=st.lists(st.one_of(some_frames, st.binary(max_size=60).map(lambda data: frame(0, message(data), stream=1)))),
    rest=st.binary(max_size=20),
    cuts=st.lists(st.integers(1, 60), max_size=60),
    direction=st.sampled_from(["out", "back"]),
)
def test_every_byte_that_passes_can_be_rebuilt_from_a_capture(
    sent: list[bytes], rest: bytes, cuts: list[int], direction: Direction
) -> None:
    """Frames of all kinds, with any flags, padding and streams, and messages that have no end, however TCP cuts them."""
    decoder, data = opened(), b"".join(sent) + rest
    list(decoder.take_frames(direction))
    try:
        recorded = read_all(decoder, direction, data, cuts)
    except RemoteProtocolError:
        return
    assert rebuild(recorded) == data


CHANNELS = {
    "payload of a ping": (PingFrame(0, SECRET).serialize(), ""),
    "debug data of GOAWAY": (GoAwayFrame(0, additional_data=SECRET).serialize(), ""),
    "value of a setting": (SettingsFrame(0, settings={4: 0x53454352}).serialize(), ""),
    "setting of an unknown key": (
        SettingsFrame(0, settings={0x5345: 0x43524554}).serialize(),
        "a setting with the key",
    ),
    "change of a window": (WindowUpdateFrame(1, window_increment=0x53454352).serialize(), ""),
    "code of a reset": (RstStreamFrame(1, error_code=0x53454352).serialize(), ""),
    "reset of a stream without a call": (RstStreamFrame(0x53454352, error_code=8).serialize(), ""),
    "empty data on a stream without a call": (DataFrame(0x53454352).serialize(), ""),
    "unknown kind of frame": (frame(0x53, SECRET), "a frame of kind 83"),
    "PRIORITY": (PriorityFrame(1, depends_on=0x53454352).serialize(), "a frame PRIORITY"),
    "zeros of padding": (DataFrame(1, message(b""), pad_length=0x53, flags=["PADDED"]).serialize(), "flags 0x08"),
    "bytes of padding": (frame(0, b"\x08" + message(b"") + SECRET, flags=8, stream=1), "flags 0x08"),
    "flags without a meaning": (frame(0, message(b""), flags=0x40, stream=1), "flags 0x40"),
    "flags of a ping": (frame(6, bytes(8), flags=0x52), "flags 0x52"),
    "reserved bit of a ping": (frame(6, bytes(8), stream=0xD3454352), "reserved bit"),
    "reserved bit of a window": (frame(8, b"\xd3\x45\x43\x52", stream=1), "reserved bit"),
    "packing of headers": (
        HeadersFrame(1, Encoder().encode([("x", "y")], huffman=False), flags=["END_HEADERS"]).serialize(),
        "",
    ),
    "headers of the transport": (headers(Encoder(), 1, [("grpc-timeout", "5345S")]).serialize(), ""),
    "priority of headers": (
        HeadersFrame(1, Encoder().encode([]), flags=["END_HEADERS", "PRIORITY"], depends_on=0x5345).serialize(),
        "flags 0x24",
    ),
    "frame without an end": (frame(0x53, SECRET)[:-1], ""),
    "cuts of a message into frames": (
        serialize(DataFrame(1, message(b"ab")[:3]), DataFrame(1, message(b"ab")[3:])),
        "",
    ),
}
"""Bytes that an end chooses freely, and what a learner is reported for."""


@pytest.mark.parametrize("name", CHANNELS)
@given(cuts=st.lists(st.integers(1, 20), max_size=9))
def test_what_is_hidden_in_frames_is_recorded(name: str, cuts: list[int]) -> None:
    data, violation = CHANNELS[name]
    decoder = opened()
    list(decoder.take_frames("out"))
    recorded = read_all(decoder, "out", data, cuts)
    assert rebuild(recorded) == data
    found = [text for each in recorded if each.kind == "http2" for text in find_violations(each.payload)]
    assert [violation in text for text in found] == [True] * bool(violation)


REFUSED = {
    "PUSH_PROMISE": (
        PushPromiseFrame(1, promised_stream_id=2, data=b"\x82", flags=["END_HEADERS"]).serialize(),
        "PUSH_PROMISE",
    ),
    "data on a stream without a call": (DataFrame(3, SECRET).serialize(), "must belong to an open call"),
    "data with the reserved bit": (frame(0, SECRET, stream=0x80000001), "must belong to an open call"),
    "first byte of a message": (DataFrame(1, message(b"", 2)).serialize(), "must be at most 1, got 2"),
    "padding beyond its frame": (frame(0, b"\xff" + SECRET, flags=8, stream=1), "this is not HTTP/2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_gRPC_does_not_allow_does_not_pass(name: str) -> None:  # noqa: N802 - the word is spelled so
    hidden, text = REFUSED[name]
    with pytest.raises(RemoteProtocolError, match=text):
        read(opened(), "out", hidden)


def test_trailers_of_a_caller_are_recorded() -> None:
    encoder = Encoder()
    (event,) = read(opened(encoder), "out", serialize(headers(encoder, 1, [("x-key", "hidden")], is_end=True)))
    assert event == Event(1, "trailers", METHOD, metadata=(("x-key", "hidden"),))


def test_all_headers_of_an_answer_are_recorded() -> None:
    """Of an interim one, of the answer, and of one that comes in the middle of it."""
    encoder, decoder = Encoder(), opened()
    blocks = [[(":status", "103"), ("x", "1")], [(":status", "200"), ("x", "2")], [("x", "3")]]
    found = read(decoder, "back", serialize(*(headers(encoder, 1, block) for block in blocks)))
    assert [(each.kind, each.metadata) for each in found] == [("metadata", (("x", str(k)),)) for k in (1, 2, 3)]


@pytest.mark.parametrize(
    "end", [DataFrame(1, flags=["END_STREAM"]), RstStreamFrame(1, error_code=8), b""], ids=["end", "reset", "cut"]
)
def test_a_message_without_an_end_is_recorded(end: Frame | bytes) -> None:
    decoder = opened()
    half = message(SECRET)[:-1]
    read(decoder, "out", serialize(DataFrame(1, half)) + (end.serialize() if isinstance(end, Frame) else end))
    list(decoder.end("back"))
    assert [each for each in decoder.take_frames("out") if each.kind == "unfinished"] == [
        Event(1, "unfinished", METHOD, half)
    ]


def test_what_follows_a_compressed_message_is_recorded() -> None:
    decoder = opened(fields=[*REQUEST, ("grpc-encoding", "gzip")])
    packed = gzip.compress(b"abc") + SECRET
    (event,) = read(decoder, "out", serialize(DataFrame(1, message(packed, 1))))
    assert event.payload == packed


def test_a_learner_cannot_choose_how_a_message_is_compressed(tmp_path: Path) -> None:
    route = eavesdropper_pb2.Route(caller=0, callee=1)
    recorder = GrpcRecorder(route, CaptureWriter(tmp_path, "c", "run-1", "{}", fields=SHAPES), 1, lambda: 1)
    call = headers(Encoder(), 1, [*REQUEST, ("grpc-encoding", "gzip")])
    recorder.record("out", PREFACE + serialize(SettingsFrame(0), call))
    with pytest.raises(RemoteProtocolError, match="must be at most 0, got 1"):
        recorder.record("out", serialize(DataFrame(1, message(gzip.compress(b"abc"), 1))))


def test_a_preface_without_an_end_is_recorded() -> None:
    (event,) = read_all(new_decoder(), "out", PREFACE[:7])
    assert event == Event(0, "unfinished", "", PREFACE[:7])


async def test_connections_of_grpc_can_be_rebuilt_from_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte, and nothing in them is what gRPC never sends."""
    passed = defaultdict[tuple[int, str], bytes](bytes)
    record = GrpcRecorder.record

    def keep(self: GrpcRecorder, direction: Direction, data: bytes) -> None:
        passed[self._connection, direction] += data
        record(self, direction, data)

    monkeypatch.setattr(GrpcRecorder, "record", keep)
    async with served(tmp_path) as (address, _, relay):
        async with grpc.aio.insecure_channel(address) as channel:
            call = stream(channel, "/x/Echo")()
            for k in range(50):
                await call.write(bytes(100 * k))
                assert await call.read() == bytes(100 * k)
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
        async with grpc.aio.insecure_channel(address, options=ALONE) as channel:
            assert await unary(channel, "/x/Unary")(b"abc", timeout=PATIENCE_S) == b"cba"

    rows = [row for batch in open_capture(relay.folder).read_batches() for row in batch.to_pylist()]
    for (connection, direction), data in passed.items():
        own = [row for row in rows if (row["connection"], row["direction"]) == (connection, direction)]
        events = [Event(row["stream"], row["kind"], row["method"], row["payload"]) for row in own]
        assert rebuild(events, PREFACE if direction == "out" else b"") == data
        assert not [text for row in own if row["kind"] == "http2" for text in find_violations(row["payload"])]
    assert len(passed) == 4
