"""Wiretaps: bytes pass as they are, only sizes and times are noted, and learners insist on each other all the same."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sottovoce_client.runs.evaluate import describe_missing_traffic
from sottovoce_client.transcripts.show import show
from sottovoce_client.transcripts.verify import read_signatures
from sottovoce_core.errors import CaptureError, PermissionDenied, Unavailable
from sottovoce_core.runs.policy import Policy
from sottovoce_eavesdropper import capture_writer
from sottovoce_eavesdropper.capture_reader import Capture, open_capture
from sottovoce_eavesdropper.capture_writer import CaptureWriter
from sottovoce_eavesdropper.proxy import Proxy
from sottovoce_eavesdropper.service import Eavesdropper
from sottovoce_eavesdropper.tcp_proxy import Framing, TcpProxy
from sottovoce_learner.peers import connection
from sottovoce_learner.session import Session
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_wire.v1 import eavesdropper_pb2
from tests.examples import made_up, small_spec
from tests.services.identities import Identities
from tests.services.network import PATIENCE_S, network

pytestmark = pytest.mark.each

NAMES = ["ann", "ben", "cleo"]
SPEC = '{"capture": "wiretap"}'

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def rows(capture: Capture, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for batch in capture.read_batches(columns) for row in batch.to_pylist()]


# ---- one edge --------------------------------------------------------------------------------------------------------


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Say all again, and end when the other side does."""
    with suppress(ConnectionError):
        while came := await reader.read(65536):
            writer.write(came)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def tapped(
    folder: Path, talk: Talk = echo, credentials: Credentials | None = None
) -> AsyncIterator[tuple[int, TcpProxy, CaptureWriter]]:
    """A wiretap before a server, and its port."""
    talks = dict[Any, asyncio.Task[Any]]()

    async def talk_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talks[writer.get_extra_info("peername")] = task
        await talk(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(talk_and_close, "127.0.0.1", 0)
    target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    file = CaptureWriter(folder, "cap", "run-1", SPEC)
    tap = TcpProxy(
        eavesdropper_pb2.Route(caller=0, callee=1, target=target), file, credentials=credentials or Credentials()
    )
    address = await tap.open("127.0.0.1:0")
    try:
        yield int(address.rpartition(":")[2]), tap, file
    finally:
        await tap.stop()
        await file.close()
        # Connections are accepted in order: when this one is, all have been, and then they end.
        _, last = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        async with asyncio.timeout(PATIENCE_S):
            while last.get_extra_info("sockname") not in talks:  # noqa: ASYNC110 - what is waited for is no event
                await asyncio.sleep(0.01)
            last.close()
            await asyncio.gather(*talks.values())
        server.close()


def record(size: int, kind: int = 23) -> bytes:
    """A TLS record with so many bytes."""
    return bytes([kind, 3, 3]) + size.to_bytes(2) + bytes(size)


@given(sizes=st.lists(st.integers(0, 300), max_size=8), cuts=st.lists(st.integers(1, 50), max_size=60))
def test_records_are_told_however_they_are_cut(sizes: list[int], cuts: list[int]) -> None:
    """All sizes of records, whatever came at a time; what the end cuts off is left over."""
    stream, framing, found = b"".join(map(record, sizes)) + record(9)[:7], Framing(), list[int]()
    for cut in [*cuts, len(stream)]:
        came, stream = stream[:cut], stream[cut:]
        found += framing.split_records(came)
    assert found == [size + 5 for size in sizes] and framing.count_partial_bytes() == 7


@pytest.mark.parametrize("begin", [b"PRI * HTTP/2.0", b"\x16\x01\x01abc", b"\x17\x03\x03\xff\xffabc", b"\x16"])
def test_what_is_no_tls_is_told_as_it_comes(begin: bytes) -> None:
    framing = Framing()
    found = [*framing.split_records(begin), *framing.split_records(b"zwei drei"), *framing.split_records(b"vier")]
    assert sum(found) + framing.count_partial_bytes() == len(begin) + 13
    assert found[-1] == 4 and len(found) >= 2


def test_a_stream_that_stops_being_tls_is_told_as_it_comes_from_there_on() -> None:
    framing = Framing()
    assert list(framing.split_records(record(10) + b"HELO you")) == [15, 8]
    assert list(framing.split_records(record(10))) == [15] and framing.count_partial_bytes() == 0


async def test_bytes_pass_as_they_are_and_are_not_kept(tmp_path: Path) -> None:
    async with tapped(tmp_path) as (port, _, file):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        said = b"".join(record(size) for size in (0, 1, 16_384)) * 20
        writer.write(said)
        writer.write_eof()
        assert await reader.read() == said
        writer.close()
    capture = open_capture(tmp_path)
    noted = rows(capture, "direction", "kind", "size", "connection", "payload", "sender")
    own = [(kind, size) for direction, kind, size, *_ in noted if direction == "out"]
    assert own == [("opened", 0), *[("ciphertext", size + 5) for size in (0, 1, 16_384)] * 20, ("closed", 0)]
    assert [row[1] for row in noted if row[0] == "back"] == ["ciphertext"] * 60 + ["closed"]
    assert {(row[3], row[4]) for row in noted} == {(1, b"")}
    assert {(row[0], row[5]) for row in noted} == {("out", 0), ("back", 1)}
    told = capture.ciphertext
    assert told is not None and (told.connections, told.records, told.bytes) == (1, 120, 2 * len(said))
    assert file.channel_traffic == {(0, 1): (60, len(said)), (1, 0): (60, len(said))}
    assert capture.is_complete and capture.count_messages() == (0, 0)
    assert capture.metadata["unchecked_reason"] == "anything: a wiretap reads no messages"


async def test_a_connection_on_which_nothing_passes_is_seen(tmp_path: Path) -> None:
    async with tapped(tmp_path) as (port, _, _):
        for _ in range(2):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            await writer.wait_closed()
    noted = rows(open_capture(tmp_path), "connection", "kind", "direction", "size")
    for number in (1, 2):
        assert [row[1:] for row in noted if row[0] == number] == [
            ("opened", "out", 0),
            ("closed", "out", 0),
            ("closed", "back", 0),
        ]


async def test_whoever_does_not_listen_is_not_told_more_than_fits(tmp_path: Path) -> None:
    """What is not taken is not read: of 64 MiB the sender can send but what buffers hold."""
    heard = asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await heard.wait()
        while await reader.read(2**20):
            pass
        writer.close()

    async with tapped(tmp_path, deaf) as (port, _, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        most, sent, taken = 64 * 2**20, 0, True
        drained = asyncio.ensure_future(writer.drain())
        while sent < most and taken:
            writer.write(record(16_000) * 16)
            sent += 16 * 16_005
            drained = asyncio.ensure_future(writer.drain())
            done, _ = await asyncio.wait([drained], timeout=1.0)
            taken = bool(done)
        assert sent < most / 2
        heard.set()
        await drained
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
    told = open_capture(tmp_path).ciphertext
    assert told is not None and told.bytes == sent


async def test_a_connection_that_is_reset_ends_on_both_sides(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def until_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read()
        ended.set()
        writer.close()

    async with tapped(tmp_path, until_the_end) as (port, _, _):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(record(5)[:4])
        await writer.drain()
        writer.transport.abort()
        await asyncio.wait_for(ended.wait(), PATIENCE_S)
    noted = rows(open_capture(tmp_path), "kind", "direction", "size")
    assert noted[0][0] == "opened" and sorted(noted[-2:]) == [("closed", "back", 0), ("closed", "out", 0)]
    assert sum(size for _, _, size in noted) in (0, 4)  # a reset may overtake what was said


async def test_where_nobody_accepts_a_connection_ends(tmp_path: Path) -> None:
    async with tapped(tmp_path) as (port, tap, _):
        for target in ("127.0.0.1:1", ""):
            await tap.redirect(target)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
    told = open_capture(tmp_path).ciphertext
    assert told is not None and (told.connections, told.records) == (2, 0)


async def test_when_the_way_leads_elsewhere_connections_end_and_others_lead_there(tmp_path: Path) -> None:
    async def here(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"here")
        await echo(reader, writer)

    other = await asyncio.start_server(here, "127.0.0.1", 0)
    async with tapped(tmp_path) as (port, tap, _):
        first, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x")
        assert await first.read(1) == b"x"
        await tap.redirect(f"127.0.0.1:{other.sockets[0].getsockname()[1]}")
        with suppress(ConnectionError):
            assert await first.read() == b""
        second, again = await asyncio.open_connection("127.0.0.1", port)
        assert await second.read(4) == b"here"
        for each in (writer, again):
            each.close()
    other.close()


async def test_beyond_the_most_connections_one_more_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Proxy, "max_connections", 1)
    async with tapped(tmp_path) as (port, _, _):
        first, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x")
        assert await first.read(1) == b"x"
        second, other = await asyncio.open_connection("127.0.0.1", port)
        with suppress(ConnectionError):
            assert await second.read() == b""
        writer.write(b"y")
        assert await first.read(1) == b"y"
        for each in (writer, other):
            each.close()


async def test_without_an_identity_other_users_of_this_machine_do_not_come_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the learner behind it a connection of theirs would be this user's; with an identity, TLS tells them apart."""
    monkeypatch.setattr(
        "sottovoce_rpc.credentials.is_same_user", lambda peer, _: not peer.startswith("ipv4:127.0.0.1:")
    )
    ids = Identities(tmp_path / "ids")
    for credentials, answer in ((Credentials(), b""), (ids.of("eavesdropper/ear"), b"x")):
        async with tapped(tmp_path / str(answer), credentials=credentials) as (port, _, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with suppress(ConnectionError):
                writer.write(b"x")
                assert await reader.read(1) == answer
            writer.close()


async def test_a_connection_that_is_ready_only_when_the_proxy_stops_is_cut(tmp_path: Path) -> None:
    """The proxy accepts the connection before it stops, and the TLS handshake ends afterwards."""
    async with tapped(tmp_path) as (_, proxy, _):
        late, transport = proxy._accept(), Mock(spec=asyncio.Transport)
        await proxy.stop()
        late.connection_made(transport)
        transport.abort.assert_called_once_with()
        late.connection_lost(None)
        assert not proxy.connections and not proxy.refused


async def test_an_address_that_is_taken_is_said(tmp_path: Path) -> None:
    async with tapped(tmp_path) as (port, tap, _):
        with pytest.raises(Unavailable, match=f"cannot listen on 127.0.0.1:{port}: "):
            await tap.open(f"127.0.0.1:{port}")


async def test_rows_that_hold_no_bytes_are_not_kept_without_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever says record after record of one byte waits until they are written."""
    monkeypatch.setattr(capture_writer, "_MAX_BUFFERED_ROWS", 100)
    most = 0

    async with tapped(tmp_path) as (port, _, file):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(50):
            writer.write(record(1) * 60)
            await reader.readexactly(60 * 6)
            most = max(most, len(file._rows))
        writer.close()
    told = open_capture(tmp_path).ciphertext
    assert told is not None and told.records == 2 * 50 * 60
    assert most < 100 + 4 * 60


# ---- runs ------------------------------------------------------------------------------------------------------------


async def test_learners_insist_on_each_other_and_nothing_is_decrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No relay stands there: everybody shows a learner's certificate, and is asked for it."""
    spec, seen = small_spec(10, NAMES, capture="wiretap", topology={"graph": {"kind": "complete"}}), list[str]()
    true = connection._require_authentic

    def require(told: Any, learner: int, caller: Any) -> None:
        seen.append(str(caller))
        true(told, learner, caller)

    monkeypatch.setattr(connection, "_require_authentic", require)
    async with network(tmp_path, NAMES, identities=Identities(tmp_path / "ids")) as up:
        outcome = await up.run(spec, made_up(spec))
    assert outcome.state == "finished" and not outcome.capture_error
    assert set(seen) >= {"learner/ann", "learner/ben"} and not any("eavesdropper" in each for each in seen)
    capture = open_capture(outcome.capture_location or "")
    told = capture.ciphertext
    assert capture.is_complete and told is not None and told.connections >= 3
    noted = rows(capture, "caller", "callee", "direction", "kind", "size")
    for edge in ((0, 1), (0, 2), (1, 2)):
        for direction in ("out", "back"):
            sizes = [row[4] for row in noted if row[:4] == (*edge, direction, "ciphertext")]
            assert len(sizes) > 10 and min(sizes) > 5
    assert {payload for (payload,) in rows(capture, "payload")} == {b""}
    with pytest.raises(CaptureError, match="is by wiretap: it has sizes and times of ciphertext, and no message"):
        capture.read_transcript({"y": (3,)}, spec.n_learners)
    with pytest.raises(CaptureError, match="is by wiretap"):
        read_signatures(capture, b"")


def test_a_learner_takes_no_relays_word_in_a_run_that_is_tapped(tmp_path: Path) -> None:
    eavesdropper = Identities(tmp_path).of("eavesdropper/ear").principal

    def session(capture: str) -> Session:
        role = SimpleNamespace(spec=small_spec(2, NAMES, capture=capture), name="ben")
        return cast(Session, SimpleNamespace(assignment=role, policy=Policy()))

    with pytest.raises(PermissionDenied, match="must not send in the name of ann"):
        connection._require_authentic(session("wiretap"), 0, eavesdropper)
    connection._require_authentic(session("relay"), 0, eavesdropper)


@pytest.mark.parametrize("killed", [True, False])
async def test_an_eavesdropper_that_is_started_again_taps_on_and_says_that_something_may_lack(
    tmp_path: Path, killed: bool
) -> None:
    """Where the capture must be whole, that is an error: nobody knows what passed last before it ended."""
    spec = small_spec(200, NAMES, capture="wiretap", capture_gap="fail", clock={"window": 7, "deadline_s": 100.0})
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 30)
        old = up.eavesdropping
        assert old is not None and old.server is not None
        (recording,) = old._captures.sessions.values()
        if killed:
            recording.writer.is_open = False  # what it has in memory goes with it
            await recording.writer_tasks.end()
            for each in recording.proxies:
                await each.stop()
            await old.server.server.stop(None)
        else:
            await old.stop()
        up.eavesdropping = Eavesdropper(replace(old.config, listen=up.eavesdropper))
        assert await up.eavesdropping.start() == up.eavesdropper
        outcome = await running
    taken = open_capture(outcome.capture_location or "")
    assert (outcome.state, taken.metadata["capture_id"]) == ("finished", recording.writer.capture_id)
    ways = {(gap["sender"], gap["receiver"], gap["from"], gap["to"]) for gap in taken.metadata["gaps"]}
    edges = {(each["caller"], each["callee"]) for each in taken.metadata["routes"]}
    assert ways == {(*way, 0, None) for i, j in edges for way in ((i, j), (j, i))}
    assert not taken.is_complete and "must be complete (capture_gap: fail)" in outcome.capture_error
    assert "The wiretap was restarted during the run: its last records before that may be missing" in list(
        describe_missing_traffic(outcome)
    )
    noted, told = rows(taken, "caller", "callee", "connection", "kind", "size"), taken.ciphertext
    sizes = [row[4] for row in noted if row[3] == "ciphertext"]
    assert told is not None and (told.records, told.bytes) == (len(sizes), sum(sizes))
    opened = [row[:3] for row in noted if row[3] == "opened"]
    assert len(opened) == len(set(opened)) == told.connections
    # Those of before may have been in memory alone when it was killed.
    assert told.connections >= len(edges) + (not killed)


async def test_what_is_there_is_shown(tmp_path: Path) -> None:
    for name in ("one", "two"):
        async with tapped(tmp_path / name) as (port, _, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(record(95) * 3)
            writer.write_eof()
            await reader.read()
            writer.close()
    one, both = shown(tmp_path / "one"), shown(tmp_path)
    assert "6 records of ciphertext, 600 bytes, in 1 connection, by wiretap" in one
    assert "anything: a wiretap reads no messages" in one and "nothing that must never happen" not in one
    assert re.search(r"learner 0 +learner 1 +3 +300 bytes +100 +1 *\n", one) and re.search(
        r"a full bar: [123] record", one
    )
    assert len(re.findall(r"– +600 bytes +closed", both)) == 2


def shown(place: Path) -> str:
    console = Console(width=140, file=io.StringIO(), markup=False, highlight=False)
    show(str(place), console=console)
    found = console.file
    assert isinstance(found, io.StringIO)
    return found.getvalue()
