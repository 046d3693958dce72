"""The stand-alone relay, and the audit of services that are not ours: `docs/audit/other-systems.md` does what it says."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import json
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from sottovoce_client.auditing import foreign_audit as auditing
from sottovoce_client.auditing.foreign_audit import _load_noise_claims, audit_foreign_captures
from sottovoce_client.auditing.foreign_runs import ForeignRequest, RunBoundary, load_decoder, read_runs
from sottovoce_client.cli import app
from sottovoce_core.errors import CaptureError, SpecError, Unavailable
from sottovoce_eavesdropper import grpc_proxy as forwarding
from sottovoce_eavesdropper import parts
from sottovoce_eavesdropper.capture_checks import CaptureRow
from sottovoce_eavesdropper.capture_reader import open_capture
from sottovoce_eavesdropper.capture_writer import CaptureWriter
from sottovoce_eavesdropper.grpc_proxy import StandaloneProxy, StandaloneProxyConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "audit" / "other-systems.md"
NAMES = ("service", "runs", "decode")
PATIENCE_S = 100.0
ANY_SIZE = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


ALONE = (("grpc.use_local_subchannel_pool", 1),)
"""Options of a channel with a connection of its own."""


@asynccontextmanager
async def relayed(config: StandaloneProxyConfig) -> AsyncIterator[tuple[str, StandaloneProxy]]:
    relay = StandaloneProxy(config)
    address = await relay.start()
    try:
        yield address, relay
    finally:
        await relay.stop()


def unary(channel: grpc.aio.Channel, method: str) -> Any:
    return channel.unary_unary(method)


def stream(channel: grpc.aio.Channel, method: str) -> Any:
    return channel.stream_stream(method)


# ---- the page --------------------------------------------------------------------------------------------


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The page's modules."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.syspath_prepend(tmp_path)
    for name, code in zip(NAMES, blocks, strict=True):
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    return {name: importlib.import_module(name) for name in NAMES}


async def record(example: dict[str, Any], folder: Path, leak: str, runs: int) -> None:
    """What the page does, in one process."""
    servers = [example["service"].serve("127.0.0.1:0", world, leak, seed=world) for world in (0, 1)]
    first, second = (
        StandaloneProxyConfig(f"127.0.0.1:{port}", folder=folder, world=world)
        for world, (_, port) in enumerate(servers)
    )
    async with relayed(first) as (to_first, _), relayed(second) as (to_second, _):
        await asyncio.to_thread(example["runs"].run, [to_first, to_second], runs)
    for server, _ in servers:
        server.stop(0).wait()


def audited(
    folder: Path, out: Path, *, decoder: str | None = "decode:decode", run_is: RunBoundary = "connection"
) -> Any:
    console = Console(width=100, record=True, quiet=True)
    code = audit_foreign_captures(ForeignRequest(folder, decoder, run_is, claim=1.0, confidence=0.9999), out, console)
    return code, json.loads((out / "audit.json").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leak", "kind", "view"),
    [("norm", "refuted", "of norm"), ("late", "refuted", "of total"), ("none", "inconclusive", "half of its noise")],
)
async def test_the_example_is_judged_as_the_page_says(
    example: dict[str, Any], tmp_path: Path, leak: str, kind: str, view: str
) -> None:
    """The correct service is refuted with probability at most 0.0001: its coins and the times are not seeded."""
    await record(example, tmp_path / "captures", leak, 200)
    code, told = audited(tmp_path / "captures", tmp_path)

    assert told["verdict"]["kind"] == kind
    assert view in told["verdict"]["text"]
    assert code == (kind == "refuted")
    # A busy system uses a port again, now and then, or halts a client between its calls: a connection that may be two is no run.
    # Of three that came from one port, two were not heard of as runs at all.
    again, kept = told["connections_left_out"], sum(told["runs_of_each_world"]) + told["runs_left_out"]
    assert again <= 20 and 200 - 3 * again <= kept <= 200 - again
    decoded = told["decoder"].pop("decoded")
    assert told["decoder"] == {"name": "decode:decode", "failed": 0, "first_failures": []}
    assert 800 - 12 * again <= decoded <= 800
    assert [each["text"].split(",")[0] for each in told["findings"][:1]] == {
        "norm": ["number 0 of norm"], "late": ["number 0 of total"], "none": []
    }[leak]  # fmt: skip
    captures = {
        Path(path).name: open_capture(str(path)).compute_digests()[0] for path in (tmp_path / "captures").iterdir()
    }
    page = (tmp_path / "audit.html").read_text(encoding="utf-8")
    assert told["captures_sha256"] == captures and len(captures) == 2
    assert all(digest in page for digest in captures.values())
    assert hashlib.sha256((tmp_path / "audit.json").read_bytes()).hexdigest() in page
    assert told["sottovoce"] == version("sottovoce") and datetime.fromisoformat(told["written_at"]).tzinfo is not None
    assert ("number 0 of norm, message 0 (round 0, from clinic)" in page) == (leak == "norm")


NOISE = "total: {distribution: laplace, scale: %s, centre: {0: [3, 1, 0], 1: [1, 1, 0]}}"
"""What the page claims of its example, at another scale."""


@pytest.mark.slow
async def test_claimed_noise_decides_with_few_runs(example: dict[str, Any], tmp_path: Path) -> None:
    """The correct service is refuted with probability at most 0.0001."""
    await record(example, tmp_path / "captures", "none", 60)
    known, twice, free = (tmp_path / f"{name}.yaml" for name in ("known", "twice", "free"))
    known.write_text(NOISE % "8", encoding="utf-8")
    twice.write_text(NOISE % "[16, 16]", encoding="utf-8")
    free.write_text("total: {distribution: laplace, scale: 8}", encoding="utf-8")

    kinds = {}
    for file in (known, twice, free):
        asked = ForeignRequest(
            tmp_path / "captures", "decode:decode", "stream", claim=1.0, confidence=0.9999, noise_claims_file=file
        )
        audit_foreign_captures(asked, tmp_path, Console(width=100, quiet=True))
        told = json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"))
        kinds[file.stem] = told["verdict"]["kind"], told["noise"]["epsilon"]
    assert kinds == {"known": ("consistent", 1.0), "twice": ("refuted", 0.5), "free": ("inconclusive", None)}


@pytest.mark.slow
async def test_a_weak_claim_is_amber_and_a_page_that_fails_loses_no_result(
    example: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The correct service is refuted with probability at most 0.0001."""
    await record(example, tmp_path / "captures", "none", 60)
    (tmp_path / "known.yaml").write_text(NOISE % "8", encoding="utf-8")
    asked = ForeignRequest(
        tmp_path / "captures", "decode:decode", claim=11.0, confidence=0.9999, noise_claims_file=tmp_path / "known.yaml"
    )
    (tmp_path / "amber").mkdir()
    (tmp_path / "broken").mkdir()
    assert audit_foreign_captures(asked, tmp_path / "amber") == 0
    page = (tmp_path / "amber" / "audit.html").read_text(encoding="utf-8")
    assert re.search(r'class="verdict weak"[^>]*>\s*<strong>Consistent with a weak claim: no violation', page)

    def broken(*_: object) -> None:
        raise ValueError("no such figure")

    monkeypatch.setattr(auditing, "_build_page", broken)
    capsys.readouterr()
    assert audit_foreign_captures(asked, tmp_path / "broken") == 3
    out, err = capsys.readouterr()
    assert "CONSISTENT" in out and "audit.json\n" in out and "audit.html" not in out
    assert "audit.html could not be made" in err and "ValueError" in err
    assert [each.name for each in (tmp_path / "broken").iterdir()] == ["audit.json"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "must name decoded fields, got none"),
        ("total: 8", "a noise claim must be a mapping of fields, got a number"),
        ("total: {distribution: cauchy, scale: 8}", "distribution must be laplace or gaussian, got cauchy"),
        (
            "total: {distribution: laplace, scale: 0}",
            "scale must be a number above 0, or a list of them, one for each message, got 0",
        ),
        ("total: {distribution: laplace, scale: [8, no]}", "scale must be a number above 0"),
        ("total: {distribution: laplace}", "scale must be a number above 0.*got None"),
        (
            "total: {distribution: laplace, scale: 8, mean: 0}",
            "a noise claim has distribution, scale and centre, got mean",
        ),
        ("total: {distribution: laplace, scale: 8, centre: {0: 1}}", "centre must be numbers, numbers of each world"),
        ("total: {distribution: laplace, scale: 8, centre: nowhere:mean}", "centre: cannot import 'nowhere:mean'"),
    ],
)
def test_a_file_of_noise_claims_that_says_something_else(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "noise.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=says):
        _load_noise_claims(path)


async def test_a_run_may_be_a_stream_and_needs_no_decoder(example: dict[str, Any], tmp_path: Path) -> None:
    await record(example, tmp_path / "captures", "late", 60)
    by_stream = read_runs(tmp_path / "captures", None, "stream")
    by_connection = read_runs(tmp_path / "captures", None, "connection")

    assert len(by_stream.runs) == len(by_connection.runs) == 60
    assert by_stream.message_count == 60 * 5
    assert all(run.messages[0].direction == "out" and len(run.messages) == 5 for run in by_stream.runs)
    assert all(each.decoded_message is None for run in by_stream.runs for each in run.frames)


async def test_a_decoder_that_raises_is_told_with_its_place(
    example: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    useful: list[Any] = []

    def broken(method: str, direction: str, payload: bytes) -> Any:
        if direction == "out":
            return {"words": ["not", "numbers"]}
        if useful:
            return useful.pop()
        raise KeyError("no\nsuch field " + "x" * 1000)

    await record(example, tmp_path / "captures", "none", 10)
    monkeypatch.setattr(example["decode"], "decode", broken)
    with pytest.raises(CaptureError, match="the decoder must decode some message, and failed on all 50;"):
        read_runs(tmp_path / "captures", load_decoder("decode:decode"), "connection")
    useful.append({"x": [1.0]})
    reading = read_runs(tmp_path / "captures", load_decoder("decode:decode"), "connection")

    assert (reading.decoded_count, reading.failed_count) == (1, 49)
    assert len(reading.failures) == 5
    assert (
        "connection 1, /clinic.Totals/Watch request of 0 bytes: TypeError: a field must hold numbers"
        in reading.failures[0]
    )
    assert all(len(line) < 400 and "\n" not in line for line in reading.failures)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("nowhere:decode", "PYTHONPATH"),
        ("decode:nothing", "has no attribute 'nothing'; name one that the module has"),
        ("decode", "must be module:function"),
        ("decode:np.x", "did you mean np"),
        (":x", "must be module:function"),
    ],
)
def test_a_decoder_that_is_not_there(example: dict[str, Any], name: str, advice: str) -> None:
    with pytest.raises(SpecError, match=f"--decoder.*{advice}"):
        load_decoder(name)


def test_what_a_run_is_may_be_said_by_the_client(tmp_path: Path) -> None:
    """Two connections from one port, a pause between them; and a client whose metadata name its run."""
    file = CaptureWriter(tmp_path / "c", "c", "", "{}", world=0)

    def call(stream: int, connection: int, second: float, *named: str) -> None:
        told = json.dumps({"method": "/a/B", "metadata": [["run", name] for name in named]}).encode()
        ended = json.dumps({"code": "OK", "details": "", "metadata": []}).encode()
        for k, (kind, direction, payload) in enumerate(
            (("metadata", "out", told), ("message", "out", b"x"), ("trailers", "back", ended))
        ):
            at = int(1e9 * second) + k
            file.add_row(
                CaptureRow(0, 1, 0, direction, kind, stream, connection, "/a/B", at, at, len(payload), payload)
            )

    call(1, 1, 1.0, "first")
    call(2, 1, 3.0, "second")
    call(3, 2, 3.1, "second")
    call(4, 2, 3.2)
    asyncio.run(file.close())

    by_connection = read_runs(tmp_path, None, "connection")
    assert (len(by_connection.runs), by_connection.ambiguous_connections) == (1, 1)
    by_name = read_runs(tmp_path, None, "metadata:run")
    assert [len(run.frames) for run in by_name.runs] == [3, 6] and by_name.unnamed_streams == 1
    for wrong in ("metadata:", "port"):
        with pytest.raises(SpecError, match="--run-boundary must be connection, stream or metadata:KEY"):
            read_runs(tmp_path, None, wrong)


def test_frames_belong_to_connections(tmp_path: Path) -> None:
    """Not to a stream, or to a run that metadata name; and a connection without a call is no run."""
    file = CaptureWriter(tmp_path / "c", "c", "", "{}", world=0)
    told = json.dumps({"method": "/a/B", "metadata": [["run", "first"]]}).encode()
    unknown = bytes.fromhex("000001530000000000ff")
    for kind, stream, connection, payload in (
        ("metadata", 1, 1, told),
        ("trailers", 1, 1, b"{}"),  # the caller's: the call goes on
        ("http2", 0, 1, unknown),
        ("unfinished", 0, 1, b"half"),
        ("http2", 0, 2, unknown),
    ):
        at = 10**9 * (5 if kind == "http2" else 1)
        file.add_row(CaptureRow(0, 1, 0, "out", kind, stream, connection, "", at, at, len(payload), payload))
    asyncio.run(file.close())

    (run,) = read_runs(tmp_path, None, "connection").runs
    assert [place for place, _ in run.http2_frames] == ["connection request"]
    assert [(frame.kind, frame.entries) for frame in run.frames][1:] == [
        ("trailers", ()),
        ("unfinished", (("bytes", b"half".hex()),)),
    ]
    for boundary in ("stream", "metadata:run"):
        reading = read_runs(tmp_path, None, boundary)
        assert reading.unnamed_streams == 0
        assert [(len(each.frames), each.http2_frames) for each in reading.runs] == [(2, ())]


async def test_captures_must_be_of_a_world(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="must have captures, and has none"):
        read_runs(tmp_path, None, "connection")
    async with relayed(StandaloneProxyConfig("127.0.0.1:1", folder=tmp_path / "below")):
        pass
    with pytest.raises(CaptureError, match="must be of world 0 or 1"):
        read_runs(tmp_path, None, "connection")


# ---- what passes -----------------------------------------------------------------------------------------


class Service(grpc.GenericRpcHandler):
    """Every kind of method, on bytes."""

    def __init__(self) -> None:
        self.waiting, self.cancelled, self.last = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.seen: dict[str, Any] = {}

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return {
            "/x/Unary": grpc.unary_unary_rpc_method_handler(self._unary),
            "/x/Echo": grpc.stream_stream_rpc_method_handler(self._echo),
            "/x/Late": grpc.stream_stream_rpc_method_handler(self._late),
            "/x/Wait": grpc.unary_unary_rpc_method_handler(self._wait),
        }.get(str(details.method))

    async def _unary(self, request: bytes, context: Any) -> bytes:
        self.seen = dict(context.invocation_metadata())
        self.seen["remaining"] = context.time_remaining()
        await context.send_initial_metadata((("x-first", "1"), ("x-first-bin", b"\0\xff")))
        context.set_trailing_metadata((("x-last", "2"), ("grpc-status-details-bin", b"\x08\x0a")))
        if request == b"fail":
            await context.abort(grpc.StatusCode.ABORTED, "not today: ü", context.trailing_metadata())
        return request[::-1]

    async def _echo(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    async def _late(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """An answer, and long after it the end."""
        yield b"answer"
        await self.last.wait()
        context.set_trailing_metadata((("x-last", "2"),))

    async def _wait(self, request: bytes, context: Any) -> bytes:
        self.waiting.set()
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return b""


@asynccontextmanager
async def served(
    folder: Path, server_credentials: grpc.ServerCredentials | None = None, **config: Any
) -> AsyncIterator[tuple[str, Service, StandaloneProxy]]:
    service, server = Service(), grpc.aio.server(options=ANY_SIZE)
    server.add_generic_rpc_handlers((service,))
    if server_credentials is None:
        port = server.add_insecure_port("localhost:0")
    else:
        port = server.add_secure_port("localhost:0", server_credentials)
    await server.start()
    try:
        async with relayed(
            StandaloneProxyConfig(f"localhost:{port}", **{"listen": "localhost:0", "folder": folder, **config})
        ) as (address, relay):
            yield address, service, relay
    finally:
        await server.stop(0)


async def test_a_unary_call_passes_unchanged(tmp_path: Path) -> None:
    sent = (("x-key", "value"), ("x-raw-bin", b"\0\1"))
    async with served(tmp_path) as (address, service, relay), grpc.aio.insecure_channel(address) as channel:
        call = unary(channel, "/x/Unary")(b"abc", metadata=sent, timeout=PATIENCE_S)
        answer = await call
        first, last = dict(await call.initial_metadata()), dict(await call.trailing_metadata())
        assert (answer, await call.code()) == (b"cba", grpc.StatusCode.OK)

    assert first == {"x-first": "1", "x-first-bin": b"\0\xff"}
    assert last == {"x-last": "2", "grpc-status-details-bin": b"\x08\x0a"}
    assert dict(sent).items() <= service.seen.items()
    assert 0 < service.seen["remaining"] <= PATIENCE_S + 2  # gRPC rounds a long deadline up to a second, on either way
    rows = open_capture(relay.folder).read_messages().to_pylist()
    assert [(row["direction"], row["payload"]) for row in rows] == [("out", b"abc"), ("back", b"cba")]


async def test_a_refusal_passes_unchanged(tmp_path: Path) -> None:
    async with served(tmp_path) as (address, _, _), grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await unary(channel, "/x/Unary")(b"fail")
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await unary(channel, "/y/" + "Z" * 5000)(b"")

    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.ABORTED, "not today: ü")
    assert dict(refused.value.trailing_metadata())["grpc-status-details-bin"] == b"\x08\x0a"
    assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_streams_and_messages_of_many_mebibytes_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than is held in memory: the wire waits for the disk."""
    monkeypatch.setattr(parts, "MAX_PART_BYTES", 4 * 2**20)
    large = [bytes([k]) * (6 * 2**20) for k in range(4)]
    async with (
        served(tmp_path) as (address, _, relay),
        grpc.aio.insecure_channel(address, options=ANY_SIZE) as channel,
    ):
        call = stream(channel, "/x/Echo")()
        held = []
        for payload in large:
            await call.write(payload)
            assert await call.read() == payload
            held.append(relay.writer._buffered_bytes)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF

    assert max(held) < 2 * 4 * 2**20 + 2 * 6 * 2**20
    assert open_capture(relay.folder).count_messages() == (8, 2 * sum(map(len, large)))


async def test_deadlines_and_cancellation_reach_the_server(tmp_path: Path) -> None:
    async with served(tmp_path) as (address, service, _), grpc.aio.insecure_channel(address) as channel:
        within_s = 0.2
        while not service.waiting.is_set():  # a machine that is busy may be late itself
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await unary(channel, "/x/Wait")(b"", timeout=within_s)
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            within_s *= 2
        await asyncio.wait_for(service.cancelled.wait(), PATIENCE_S)

        service.cancelled.clear()
        service.waiting.clear()
        call = stream(channel, "/x/Wait")()
        await call.write(b"")
        await asyncio.wait_for(service.waiting.wait(), PATIENCE_S)
        call.cancel()
        await asyncio.wait_for(service.cancelled.wait(), PATIENCE_S)


def trailers(folder: str) -> list[dict[str, Any]]:
    """What ended the calls of a capture."""
    parts = [pq.read_table(path).to_pylist() for path in sorted(Path(folder).glob("*.parquet"))]
    return [json.loads(row["payload"]) for rows in parts for row in rows if row["kind"] == "trailers"]


async def test_the_last_call_ends_before_the_capture_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "FINISH_TIMEOUT_S", PATIENCE_S)
    async with served(tmp_path) as (address, service, relay), grpc.aio.insecure_channel(address) as channel:
        call = stream(channel, "/x/Late")()
        assert await call.read() == b"answer"
        closing = asyncio.create_task(relay.stop())
        with contextlib.suppress(grpc.aio.AioRpcError):  # no new connection is taken: it closes
            while True:
                async with grpc.aio.insecure_channel(address, options=ALONE) as later:
                    await unary(later, "/x/Unary")(b"abc", timeout=PATIENCE_S)
        service.last.set()
        assert await call.read() is grpc.aio.EOF
        assert dict(await call.trailing_metadata())["x-last"] == "2"
        await closing

    assert {"code": "OK", "details": "", "metadata": [["x-last", "2"]]} in trailers(relay.folder)


async def test_a_call_without_end_does_not_hold_a_capture_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "FINISH_TIMEOUT_S", 0.1)
    async with served(tmp_path) as (address, service, relay), grpc.aio.insecure_channel(address) as channel:
        call = stream(channel, "/x/Wait")()
        await call.write(b"")
        await asyncio.wait_for(service.waiting.wait(), PATIENCE_S)
        await relay.stop()
        await asyncio.wait_for(service.cancelled.wait(), PATIENCE_S)

    assert open_capture(relay.folder).is_complete


async def test_peers_that_reset_or_talk_nonsense_end_nothing_but_themselves(tmp_path: Path) -> None:
    async with served(tmp_path) as (address, _, relay), grpc.aio.insecure_channel(address) as channel:
        lasting = stream(channel, "/x/Echo")()
        await lasting.write(b"before")
        assert await lasting.read() == b"before"
        host, port = address.rsplit(":", 1)
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        for nonsense in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            preface + b"\xff" * 10_000,
            preface + b"\0\0\4\1\0\0\0\0\1abcd",
        ):
            with socket.create_connection((host, int(port))) as raw:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
                raw.sendall(nonsense)
        async with grpc.aio.insecure_channel(address) as leaving:
            await stream(leaving, "/x/Echo")().write(b"x" * 2**20)
        await lasting.write(b"after")
        assert await lasting.read() == b"after"
        await lasting.done_writing()
        assert await lasting.code() is grpc.StatusCode.OK

    assert open_capture(relay.folder).is_complete


async def test_a_server_that_is_not_there_is_unavailable_until_it_is(tmp_path: Path) -> None:
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
    async with (
        relayed(StandaloneProxyConfig(f"localhost:{port}", folder=tmp_path)) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as absent:
            await unary(channel, "/x/Unary")(b"")

    assert absent.value.code() is grpc.StatusCode.UNAVAILABLE


# ---- TLS -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """For localhost, signed by itself, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    files = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([openssl, *request.split(), *files], check=True, capture_output=True)
    return cert, key


async def test_tls_on_both_sides(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    server = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    trusted = grpc.ssl_channel_credentials(cert.read_bytes())
    async with (
        served(tmp_path, server, tls_cert=cert, tls_key=key, server_tls=True, server_ca=cert) as (address, _, relay),
        grpc.aio.secure_channel(address, trusted) as channel,
    ):
        assert await unary(channel, "/x/Unary")(b"secret") == b"terces"

    payloads = open_capture(relay.folder).read_messages()["payload"].to_pylist()
    assert payloads == [b"secret", b"terces"]


async def test_a_server_that_nobody_vouches_for_is_not_talked_to(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    server = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    async with (
        served(tmp_path, server, server_tls=True) as (address, service, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await unary(channel, "/x/Unary")(b"secret")

    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert service.seen == {}


# ---- the commands ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"server_address": "localhost"}, "--to must be HOST:PORT with a port from 1 to 65535"),
        ({"server_address": "a:1", "listen": "b"}, "--listen must be HOST:PORT with a port from 0 to 65535"),
        ({"server_address": "a:1", "tls_cert": Path("x")}, "must be given together"),
        ({"server_address": "a:1", "server_ca": Path("x")}, "--to-ca needs --to-tls"),
    ],
)
def test_options_that_make_no_sense_are_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        StandaloneProxyConfig(**config)


async def test_an_address_that_is_taken_and_a_certificate_that_is_none(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = StandaloneProxyConfig("a:1", f"127.0.0.1:{taken.getsockname()[1]}", tmp_path)
        with pytest.raises(Unavailable, match="cannot listen"):
            await StandaloneProxy(config).start()
    with pytest.raises(Unavailable, match="--tls-key are not a certificate and its key"):
        await StandaloneProxy(StandaloneProxyConfig("a:1", folder=tmp_path, tls_cert=PAGE, tls_key=PAGE)).start()
    with pytest.raises(SpecError, match="cannot read"):
        StandaloneProxy(
            StandaloneProxyConfig("a:1", folder=tmp_path, tls_cert=tmp_path / "no", tls_key=tmp_path / "no")
        )


def test_the_eavesdropper_itself_starts_without_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    async def serve(config: Any, **_: Any) -> None:
        started.append(config)

    monkeypatch.setattr("sottovoce_eavesdropper.service.serve", serve)
    monkeypatch.setattr("sottovoce_rpc.logs.configure_logs", lambda level, form: None)  # what it sets outlives the test
    monkeypatch.setenv("SOTTOVOCE_CAPTURES", "here")
    result = CliRunner().invoke(app, ["eavesdropper", "--listen", "127.0.0.1:0"])

    assert result.exit_code == 0, result.output
    assert [(config.listen, str(config.folder)) for config in started] == [("127.0.0.1:0", "here")]


@contextmanager
def command(*options: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "sottovoce_client", "eavesdropper", "relay", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_closes_the_capture(tmp_path: Path) -> None:
    with command("--to", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--folder", str(tmp_path), "--world", "1") as relay:
        assert relay.stdout is not None
        told = json.loads(relay.stdout.readline())
        with grpc.insecure_channel(told["address"]) as channel:
            call: Any = channel.unary_unary("/x/Y")
            with pytest.raises(grpc.RpcError):
                call(b"hello", timeout=PATIENCE_S)
        relay.send_signal(signal.SIGINT)
        assert relay.wait(PATIENCE_S) == 0

    capture = open_capture(told["capture"])
    assert capture.is_complete
    assert capture.metadata["world"] == 1
