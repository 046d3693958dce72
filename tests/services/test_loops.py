"""Proxies on the event loops that services may run on: they differ in when a new connection is read."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from sottovoce_core.errors import PermissionDenied
from sottovoce_eavesdropper.capture_reader import open_capture
from sottovoce_eavesdropper.capture_writer import CaptureWriter
from sottovoce_eavesdropper.grpc_proxy import GrpcProxy
from sottovoce_wire.v1 import eavesdropper_pb2
from tests.services.test_foreign import ALONE, PATIENCE_S, Service, served, stream, unary
from tests.services.test_wiretap import record, tapped


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Runs a coroutine on one of the loops."""
    if request.param == "uvloop" and importlib.util.find_spec("uvloop") is None:
        pytest.skip("uvloop is not installed")

    def run_there(work: Any) -> Any:
        new_loop = importlib.import_module(request.param).new_event_loop
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(work)

    return run_there


def test_a_relay_loses_nothing_that_comes_before_it_has_connected(run: Callable[[Any], Any], tmp_path: Path) -> None:
    async def call(address: str, k: int) -> None:
        payload = bytes([k]) * (10_000 * k + 1)
        async with grpc.aio.insecure_channel(address, options=ALONE) as channel:
            assert await unary(channel, "/x/Unary")(payload, timeout=PATIENCE_S) == payload
            echo = stream(channel, "/x/Echo")()
            for _ in range(3):
                await echo.write(payload)
                assert await echo.read() == payload
            await echo.done_writing()
            assert await echo.read() is grpc.aio.EOF

    async def main() -> str:
        async with served(tmp_path) as (address, _, relay):
            await asyncio.gather(*(call(address, k) for k in range(20)))
        return relay.folder

    capture = open_capture(run(main()))
    assert capture.is_complete
    assert capture.count_messages() == (20 * 8, 8 * sum(10_000 * k + 1 for k in range(20)))


def test_a_wiretap_passes_on_what_comes_before_it_has_connected(run: Callable[[Any], Any], tmp_path: Path) -> None:
    """And the end of one direction, while the other one goes on."""
    sent = record(1_000) * 100

    async def main() -> None:
        async with tapped(tmp_path) as (port, _, _):
            for _ in range(20):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(sent)
                writer.write_eof()
                assert await asyncio.wait_for(reader.read(), PATIENCE_S) == sent
                writer.close()

    run(main())
    counts = open_capture(tmp_path).ciphertext
    assert counts is not None and (counts.connections, counts.bytes) == (20, 40 * len(sent))


def test_a_relay_reaches_a_learner_at_a_unix_socket(run: Callable[[Any], Any], tmp_path: Path) -> None:
    async def main() -> bytes:
        server, service = grpc.aio.server(), Service()
        server.add_generic_rpc_handlers((service,))
        server.add_insecure_port(f"unix:{tmp_path}/learner.sock")
        await server.start()
        route = eavesdropper_pb2.Route(caller=0, callee=1, target=f"unix:{tmp_path}/learner.sock")
        file = CaptureWriter(tmp_path / "c", "c", "run-1", "{}")
        relay = GrpcProxy(route, file)
        async with grpc.aio.insecure_channel(await relay.open("127.0.0.1:0")) as channel:
            answer: bytes = await unary(channel, "/x/Unary")(b"abc", timeout=PATIENCE_S)
        await relay.stop()
        await file.close()
        await server.stop(0)
        return answer

    assert run(main()) == b"cba"


def test_refused_callers_do_not_take_the_place_of_others(
    run: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there may be connections are answered, the rest is cut off, and a caller that may connect is served."""
    refused = {"now": True}

    def require(self: GrpcProxy, transport: asyncio.Transport) -> None:
        if refused["now"]:
            raise PermissionDenied("not you")

    monkeypatch.setattr(GrpcProxy, "require_caller", require)

    async def main() -> list[grpc.StatusCode]:
        codes = list[grpc.StatusCode]()
        async with served(tmp_path) as (address, _, relay), contextlib.AsyncExitStack() as stack:
            monkeypatch.setattr(relay._proxy, "max_connections", 2)
            for k in range(5):
                refused["now"] = k < 4
                channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=ALONE))
                try:
                    await unary(channel, "/x/Unary")(b"abc", timeout=PATIENCE_S)
                    codes.append(grpc.StatusCode.OK)
                except grpc.aio.AioRpcError as error:
                    codes.append(error.code())
        return codes

    denied, cut = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE
    assert run(main()) == [denied, denied, cut, cut, grpc.StatusCode.OK]
