"""A way over the network that can be cut: a port that passes bytes on to another one, or does not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass

_CHUNK = 64 * 1024


@dataclass(slots=True, eq=False)
class _Pair:
    """A caller, and our connection to the target in its name."""

    caller: asyncio.StreamWriter
    target: asyncio.StreamWriter
    forgotten: bool = False


class Link:
    """Listens on a port and passes on, both ways.

    Attributes:
        forth, back: set while bytes pass from the caller to the target, and back. Else they wait: nothing is lost.
        delay_s: of every piece.

    Args:
        port: to listen on.
        target: the port to pass on to.
    """

    def __init__(self, port: int, target: int) -> None:
        self.port, self._target = port, target
        self.forth, self.back, self.delay_s = asyncio.Event(), asyncio.Event(), 0.0
        self.heal()
        self._pairs: set[_Pair] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def stop(self) -> None:
        """End all connections."""
        assert self._server is not None
        self._server.close()
        self.reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def heal(self) -> None:
        """Let everything pass."""
        self.forth.set()
        self.back.set()
        self.delay_s = 0.0

    def reset(self) -> None:
        """End all connections at once, with a reset to both sides."""
        for pair in list(self._pairs):
            _reset(pair.caller)
            _reset(pair.target)

    def forget_callers(self) -> None:
        """Half open: callers are told that their connections are gone, and the target is not."""
        for pair in list(self._pairs):
            pair.forgotten = True
            _reset(pair.caller)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._pass(reader, writer)
        except (OSError, asyncio.CancelledError):
            _reset(writer)
        finally:
            self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.forth.wait()
        answers, target = await asyncio.open_connection("127.0.0.1", self._target)
        pair = _Pair(writer, target)
        self._pairs.add(pair)
        try:
            out = asyncio.ensure_future(self._pump(reader, target, self.forth))
            back = asyncio.ensure_future(self._pump(answers, writer, self.back))
            try:
                await asyncio.wait([out, back], return_when=asyncio.FIRST_COMPLETED)
            finally:
                out.cancel()
                back.cancel()
                await asyncio.gather(out, back, return_exceptions=True)
            if pair.forgotten:  # the target learns nothing, until it ends the connection by itself
                await self._drained(answers)
        finally:
            self._pairs.discard(pair)
            writer.close()
            target.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await gate.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()

    async def _drained(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            while await reader.read(_CHUNK):
                pass


def _reset(writer: asyncio.StreamWriter) -> None:
    own = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
