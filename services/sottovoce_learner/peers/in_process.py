"""Streams between learners of one process without identities: bytes written to one end are read from the other.

They replace only the gRPC call of such a process to itself: handshake, messages, log, mirror and repetitions are the same
(`connection.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Self

import grpc

from sottovoce_rpc.tasks import run_in_background


class _WakeScheduler:
    """Scheduler of wake-ups: one in each turn of the event loop.

    gRPC delivers one event a turn, too. If all learners of a large host ran their rounds in one turn, other callers would
    wait for many such turns.
    """

    def __init__(self) -> None:
        self._pending = deque[Callable[[], None]]()

    def schedule(self, wake: Callable[[], None]) -> None:
        """Schedule a wake-up."""
        self._pending.append(wake)
        if len(self._pending) == 1:
            asyncio.get_running_loop().call_soon(self._run_next)

    def _run_next(self) -> None:
        wake = self._pending.popleft()
        if self._pending:
            asyncio.get_running_loop().call_soon(self._run_next)
        wake()


class InProcessStream:
    """End of a stream, with the read and write methods of a grpc.aio call.

    Unread messages are bounded like the queue of a link: a reader takes messages at once, and rejects more.

    Args:
        scheduler: scheduler of all streams of the process.
    """

    def __init__(self, scheduler: _WakeScheduler) -> None:
        self._scheduler = scheduler
        self._received = deque[bytes]()
        self._waiter: asyncio.Future[None] | None = None
        self._is_over = False
        self._other_end: InProcessStream | None = None

    @classmethod
    def create_pair(cls, scheduler: _WakeScheduler) -> tuple[Self, Self]:
        """Create both ends of a new stream."""
        one, other = cls(scheduler), cls(scheduler)
        one._other_end, other._other_end = other, one
        return one, other

    async def read(self) -> Any:
        """Return the next message, or `grpc.aio.EOF`."""
        while not self._received:
            if self._is_over:
                return grpc.aio.EOF
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._received.popleft()

    async def write(self, message: bytes) -> None:
        """Send one message.

        Raises:
            InvalidStateError: the stream is over, as a gRPC call reports it.
        """
        if self._is_over or self._other_end is None:
            raise asyncio.InvalidStateError("the stream is over")
        self._other_end._received.append(message)
        self._scheduler.schedule(self._other_end._wake)

    def end(self) -> None:
        """Close the stream for writing; written messages can still be read."""
        for each in (self, self._other_end):
            if each is not None:
                each._is_over = True
                each._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


StreamHandler = Callable[[InProcessStream], Coroutine[Any, Any, None]]
"""Coroutine that serves a stream opened by a neighbour, until it ends."""


class InProcessTransport:
    """Learners of a process that others of it reach without a channel, by address."""

    def __init__(self) -> None:
        self._learners: dict[str, tuple[StreamHandler, set[InProcessStream]]] = {}
        self._scheduler = _WakeScheduler()

    def add(self, address: str, accept: StreamHandler) -> None:
        """Register a learner."""
        self._learners[address] = accept, set()

    def remove(self, address: str) -> None:
        """Remove a learner, and end its streams."""
        for stream in self._learners.pop(address, (None, set()))[1]:
            stream.end()

    def has_learner(self, address: str) -> bool:
        """Return whether a learner of this process has this address."""
        return address in self._learners

    @asynccontextmanager
    async def open_stream(self, address: str) -> AsyncIterator[InProcessStream]:
        """Open a stream to a learner of this process, while the block lasts.

        Raises:
            SottovoceError: error of the other side.
        """
        accept, streams = self._learners[address]
        opened, accepted = InProcessStream.create_pair(self._scheduler)
        streams.add(accepted)
        try:
            async with run_in_background(accept(accepted)):
                yield opened
        finally:
            streams.discard(accepted)
            opened.end()
