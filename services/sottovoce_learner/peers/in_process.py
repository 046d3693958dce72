"""Streams between learners of one process that show no identity: what is written to one end is read from the other.

They take the place of the gRPC call that such a process would make to itself, and of nothing else: what both agree on first, what
is said, heard, journaled, mirrored and said again is the same (`connection.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Self

import grpc

from sottovoce_rpc.tasks import run_in_background


class _Turns:
    """Who is told that something has come: one in each turn of the event loop.

    gRPC hands over one event a turn, too. If all learners of a large host took their rounds in one turn, whoever asks one of them
    anything would wait for many such turns.
    """

    def __init__(self) -> None:
        self._due = deque[Callable[[], None]]()

    def take(self, wake: Callable[[], None]) -> None:
        """It is called when it is its turn."""
        self._due.append(wake)
        if len(self._due) == 1:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        wake = self._due.popleft()
        if self._due:
            asyncio.get_running_loop().call_soon(self._next)
        wake()


class InProcessStream:
    """One end of a stream, read and written as a call of grpc.aio is.

    What was written and not read yet is bounded as what a link has due is: a reader takes what comes at once, and refuses more.

    Args:
        turns: of all streams of the process.
    """

    def __init__(self, turns: _Turns) -> None:
        self._turns = turns
        self._come = deque[bytes]()
        self._awaited: asyncio.Future[None] | None = None
        self._over = False
        self._other: InProcessStream | None = None

    @classmethod
    def create_pair(cls, turns: _Turns) -> tuple[Self, Self]:
        """Both ends of a new stream."""
        one, other = cls(turns), cls(turns)
        one._other, other._other = other, one
        return one, other

    async def read(self) -> Any:
        """The next message, or `grpc.aio.EOF`."""
        while not self._come:
            if self._over:
                return grpc.aio.EOF
            self._awaited = asyncio.get_running_loop().create_future()
            await self._awaited
        return self._come.popleft()

    async def write(self, message: bytes) -> None:
        """Send one message.

        Raises:
            InvalidStateError: the stream is over, as a call of gRPC says it.
        """
        if self._over or self._other is None:
            raise asyncio.InvalidStateError("the stream is over")
        self._other._come.append(message)
        self._turns.take(self._other._wake)

    def end(self) -> None:
        """Nothing more is written; what was written can be read."""
        for each in (self, self._other):
            if each is not None:
                each._over = True
                each._wake()

    def _wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)


StreamHandler = Callable[[InProcessStream], Coroutine[Any, Any, None]]
"""Serves a stream that a neighbour opened, until it ends."""


class InProcessTransport:
    """The learners of a process that others of it may meet without a channel, by their addresses."""

    def __init__(self) -> None:
        self._learners: dict[str, tuple[StreamHandler, set[InProcessStream]]] = {}
        self._turns = _Turns()

    def add(self, address: str, accept: StreamHandler) -> None:
        """A learner is there."""
        self._learners[address] = accept, set()

    def remove(self, address: str) -> None:
        """It is no longer: its streams end."""
        for stream in self._learners.pop(address, (None, set()))[1]:
            stream.end()

    def has_learner(self, address: str) -> bool:
        """Is a learner of this process there?"""
        return address in self._learners

    @asynccontextmanager
    async def open_stream(self, address: str) -> AsyncIterator[InProcessStream]:
        """A stream to a learner that is there, for as long as the block lasts.

        Raises:
            SottovoceError: the other side erred: what it says.
        """
        accept, streams = self._learners[address]
        ours, theirs = InProcessStream.create_pair(self._turns)
        streams.add(theirs)
        try:
            async with run_in_background(accept(theirs)):
                yield ours
        finally:
            streams.discard(theirs)
            ours.end()
