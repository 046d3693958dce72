"""Proxies on the event loops that services may run on: they differ in when a new connection is read."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from sottovoce_eavesdropper.capture_reader import open_capture
from tests.services.test_foreign import ALONE, PATIENCE_S, served, stream, unary
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
