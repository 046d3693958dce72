"""The links: what passes, what waits, what is cut, and who is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.faults.link import Link
from tests.faults.processes import chance, free_port

PATIENCE_S = 30.0

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Link, Ends, Ends]]:
    """A link with one connection: the caller's end, and the target's."""
    met: asyncio.Queue[Ends] = asyncio.Queue()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.put_nowait((reader, writer))

    random = chance(0)
    port = free_port(random)
    async with asyncio.timeout(PATIENCE_S):
        server = await asyncio.start_server(accept, "127.0.0.1", port)
        link = Link(free_port(random), port)
        await link.start()
        caller = await asyncio.open_connection("127.0.0.1", link.port)
        target = await met.get()
        try:
            yield link, caller, target
        finally:
            await link.stop()
            for _, writer in (caller, target):
                writer.close()
            server.close()


async def says(end: Ends, words: bytes) -> None:
    end[1].write(words)
    await end[1].drain()


async def test_what_is_said_passes_both_ways() -> None:
    async with linked() as (link, caller, target):
        link.delay_s = 0.01
        await says(caller, b"forth")
        assert await target[0].readexactly(5) == b"forth"
        await says(target, b"back")
        assert await caller[0].readexactly(4) == b"back"


async def test_cut_one_way_nothing_is_lost() -> None:
    async with linked() as (link, caller, target):
        link.forth.clear()
        await says(caller, b"forth")
        await says(target, b"back")
        assert await caller[0].readexactly(4) == b"back"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(target[0].read(1), 0.05)
        link.heal()
        assert await target[0].readexactly(5) == b"forth"


async def test_a_reset_is_told_to_both() -> None:
    async with linked() as (link, caller, target):
        await says(caller, b"forth")
        await target[0].readexactly(5)
        link.reset()
        for reader, _ in (caller, target):
            with pytest.raises(ConnectionError):
                await reader.read(1)


async def test_half_open_the_target_is_told_nothing() -> None:
    async with linked() as (link, caller, target):
        await says(caller, b"forth")
        await target[0].readexactly(5)
        link.forget_callers()
        with pytest.raises(ConnectionError):
            await caller[0].read(1)
        await says(target, b"still here")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(target[0].read(1), 0.05)
