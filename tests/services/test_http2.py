"""The decoder of relays: the same calls and messages, however a connection cuts its bytes."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import struct

import grpc
import pytest
from hpack import Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from hypothesis import given
from hypothesis import strategies as st

from sottovoce_core.errors import RemoteProtocolError
from sottovoce_eavesdropper import http2
from sottovoce_eavesdropper.http2 import Direction, Event, GrpcDecoder, GrpcRefusal
from tests.services.test_foreign import PATIENCE_S, unary

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
METHOD = "/x/Echo"
REQUEST = [(":method", "POST"), (":path", METHOD), ("te", "trailers"), ("x-key", "value"), ("x-raw-bin", "AAE")]
ANSWER = [(":status", "200"), ("content-type", "application/grpc")]
END = [("grpc-status", "10"), ("grpc-message", "not%20today"), ("x-last", "2")]


def message(payload: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(payload)) + payload


def serialize(*frames: Frame) -> bytes:
    return b"".join(each.serialize() for each in frames)


def headers(encoder: Encoder, stream: int, fields: list[tuple[str, str]], *, is_end: bool = False) -> Frame:
    flags = ["END_HEADERS", "END_STREAM"] if is_end else ["END_HEADERS"]
    return HeadersFrame(stream, encoder.encode(fields), flags=flags)


def read(decoder: GrpcDecoder, direction: Direction, data: bytes, cuts: list[int] | None = None) -> list[Event]:
    """Feed the bytes in pieces."""
    found = list[Event]()
    for cut in [*(cuts or ()), len(data)]:
        piece, data = data[:cut], data[cut:]
        found += decoder.decode(direction, piece)
    return found


def new_decoder(max_bytes: int = 2**20) -> GrpcDecoder:
    return GrpcDecoder(max_bytes, itertools.count(1).__next__)


def opened(encoder: Encoder | None = None, fields: list[tuple[str, str]] = REQUEST) -> GrpcDecoder:
    """A decoder with one open call, whose answer has begun."""
    decoder = new_decoder()
    read(decoder, "out", PREFACE + serialize(SettingsFrame(0), headers(encoder or Encoder(), 1, fields)))
    return decoder


@given(
    payloads=st.lists(st.binary(max_size=300), max_size=6),
    frame_bytes=st.integers(1, 400),
    padding=st.integers(0, 5),
    cuts=st.lists(st.integers(1, 60), max_size=60),
)
def test_a_call_is_read_in_whatever_pieces_it_comes(
    payloads: list[bytes], frame_bytes: int, padding: int, cuts: list[int]
) -> None:
    """Messages over several frames, several in one, with padding, other frames in between, however TCP cuts them."""
    body = b"".join(map(message, payloads))
    pieces = [body[at : at + frame_bytes] for at in range(0, len(body), frame_bytes)]
    flags = ["PADDED"] if padding else []
    data: list[Frame] = []
    for piece in pieces:
        data += [DataFrame(1, piece, pad_length=padding, flags=flags), WindowUpdateFrame(1, window_increment=5)]
    out = [SettingsFrame(0), headers(Encoder(), 1, REQUEST), *data, PingFrame(0), DataFrame(1, flags=["END_STREAM"])]
    answer = Encoder()
    back = [SettingsFrame(0, flags=["ACK"]), headers(answer, 1, ANSWER), *data, headers(answer, 1, END, is_end=True)]
    decoder = new_decoder()

    sent = read(decoder, "out", PREFACE + serialize(*out), cuts)
    assert decoder.has_open_calls
    received = read(decoder, "back", serialize(*back), cuts)

    metadata = (("x-key", "value"), ("x-raw-bin", b"\0\1"))
    messages = [Event(1, "message", METHOD, payload, k == 0) for k, payload in enumerate(payloads)]
    assert sent == [Event(1, "metadata", METHOD, metadata=metadata), *messages]
    end = Event(1, "trailers", METHOD, metadata=(("x-last", "2"),), code="ABORTED", details="not today")
    assert received == [Event(1, "metadata", METHOD), *messages, end]
    assert not decoder.has_open_calls and not decoder._calls


def test_headers_may_come_in_several_frames_and_refer_to_earlier_ones() -> None:
    encoder, decoder = Encoder(), new_decoder()
    read(decoder, "out", PREFACE)
    for number, stream in enumerate((1, 3), 1):
        block = encoder.encode(REQUEST)
        frames = (
            HeadersFrame(stream, block[:3], flags=["END_STREAM"]),
            ContinuationFrame(stream, block[3:4]),
            ContinuationFrame(stream, block[4:], flags=["END_HEADERS"]),
        )
        assert [(each.call, each.method) for each in read(decoder, "out", serialize(*frames))] == [(number, METHOD)]


def test_the_table_of_headers_may_grow_as_the_other_side_allows() -> None:
    encoder, decoder = Encoder(), new_decoder()
    encoder.header_table_size = 20_000
    call = headers(encoder, 1, REQUEST)
    read(decoder, "back", serialize(SettingsFrame(0, settings={SettingsFrame.HEADER_TABLE_SIZE: 20_000})))
    assert read(decoder, "out", PREFACE + serialize(call))[0].method == METHOD
    with pytest.raises(RemoteProtocolError, match="this is not HTTP/2: InvalidTableSizeError"):
        read(new_decoder(), "out", PREFACE + serialize(call))


@pytest.mark.parametrize(("encoding", "flag"), [("gzip", 1), ("identity", 1), ("gzip", 0)])
def test_a_compressed_message_is_recorded_unpacked(encoding: str, flag: int) -> None:
    packed = gzip.compress(b"abc" * 100)
    decoder = opened(fields=[*REQUEST, ("grpc-encoding", encoding)])
    (event,) = read(decoder, "out", serialize(DataFrame(1, message(packed, flag))))
    assert event.payload == (b"abc" * 100 if (encoding, flag) == ("gzip", 1) else packed)


def test_of_a_long_message_the_beginning_is_kept() -> None:
    decoder, encoder = new_decoder(10), Encoder()
    long = DataFrame(1, message(bytes(100)))
    first, *events = read(decoder, "out", PREFACE + serialize(headers(encoder, 1, REQUEST), long, long), [50, 60])
    assert [len(each.payload) for each in events] == [10, 10] and first.kind == "metadata"

    bomb = DataFrame(1, message(gzip.compress(bytes(10**6)), 1))
    packed = headers(Encoder(), 1, [*REQUEST, ("grpc-encoding", "gzip")])
    *_, last = read(new_decoder(2_000), "out", PREFACE + serialize(packed, bomb))
    assert len(bomb.data) < 2_000 and last.payload == bytes(2_000)


def test_a_call_that_is_reset_has_an_end_where_the_callee_resets_it() -> None:
    """And what the other side still sends, because it does not know yet, is recorded."""
    for direction, other, code in (("back", "out", "CANCELLED"), ("out", "back", None)):
        decoder = opened()
        read(decoder, "back", serialize(headers(Encoder(), 1, ANSWER)))
        ends = read(decoder, direction, serialize(RstStreamFrame(1, error_code=8)))  # type: ignore[arg-type]
        assert [each.code for each in ends] == ([code] if code else [])
        assert not decoder.has_open_calls
        late = read(decoder, other, serialize(DataFrame(1, message(b"late"))))  # type: ignore[arg-type]
        assert [each.payload for each in late] == [b"late"]
        assert list(decoder.end("back")) == []


def test_reset_calls_are_forgotten_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "_MAX_RESET_CALLS", 3)
    decoder, encoder = new_decoder(), Encoder()
    read(decoder, "out", PREFACE)
    for stream in range(1, 101, 2):
        read(decoder, "out", serialize(headers(encoder, stream, REQUEST), RstStreamFrame(stream, error_code=8)))
    assert len(decoder._calls) == 3


def test_the_end_of_a_connection_cuts_open_calls() -> None:
    decoder = opened()
    (end,) = decoder.end("back")
    assert (end.code, end.details, end.method) == ("UNAVAILABLE", "the connection was cut", METHOD)
    assert not decoder.has_open_calls


def test_an_answer_without_messages_has_metadata_and_trailers() -> None:
    decoder = opened()
    found = read(decoder, "back", serialize(headers(Encoder(), 1, [*ANSWER, *END], is_end=True)))
    assert [(each.kind, each.code) for each in found] == [("metadata", ""), ("trailers", "ABORTED")]


def test_an_answer_that_ends_without_a_status_is_unknown() -> None:
    decoder = opened()
    frames = headers(Encoder(), 1, ANSWER), DataFrame(1, message(b"x"), flags=["END_STREAM"])
    assert [(each.kind, each.code) for each in read(decoder, "back", serialize(*frames))][-1] == ("trailers", "UNKNOWN")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "must begin with the preface of HTTP/2"),
        (PREFACE + serialize(DataFrame(1, b"x")), "must belong to an open call"),
        (PREFACE + serialize(HeadersFrame(1, b"\xff" * 30, flags=["END_HEADERS"])), "this is not HTTP/2: "),
        (PREFACE + b"\0\0\4\1\4\0\0\0\1\x7fbcd", "this is not HTTP/2: "),
        (PREFACE + b"\0\0\1\0\x08\0\0\0\1\xff", "this is not HTTP/2: "),
        (PREFACE + serialize(*(HeadersFrame(1, bytes(16_000)) for _ in range(5))), "must have at most 65536 bytes"),
    ],
)
def test_what_cannot_be_read_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        read(new_decoder(), "out", data)


def test_a_connection_has_a_bounded_number_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "_MAX_CALLS", 2)
    encoder = Encoder()
    frames = [headers(encoder, stream, REQUEST) for stream in (1, 3, 5)]
    with pytest.raises(RemoteProtocolError, match="at most 2 open calls"):
        read(new_decoder(), "out", PREFACE + serialize(*frames))


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    decoder = opened()
    for direction in ("out", "back"):
        try:
            for event in decoder.decode(direction, data):
                assert event.kind in ("metadata", "message", "trailers")
        except RemoteProtocolError:
            pass


async def test_a_refused_caller_reads_why() -> None:
    """By gRPC's own library: every call of the connection, until it ends."""
    import asyncio

    writers = list[asyncio.StreamWriter]()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        refusal = GrpcRefusal(grpc.StatusCode.PERMISSION_DENIED, "100 % nö")
        writers.append(writer)
        while data := await reader.read(65_536):
            writer.write(refusal.answer(data))

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as channel:
        for _ in range(2):
            call = unary(channel, "/x/Unary")(b"abc", timeout=PATIENCE_S)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.PERMISSION_DENIED, "100 % nö")
    server.close()
    for writer in writers:
        writer.close()
        await writer.wait_closed()
