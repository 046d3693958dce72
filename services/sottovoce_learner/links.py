"""Links: the stream to each neighbour, whoever opened it, and what is said again when it breaks.

A link keeps the bytes of as many rounds as the neighbour may lack, exactly as they were journaled, and the signatures that stand
behind them. When a stream is opened (again), the neighbour names the first round it has not heard, and the link goes on from
there with the same bytes; the signature before that may not have come, and is said again in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Protocol

import grpc

from sottovoce_learner.signing import signatures_kept
from sottovoce_rpc.tasks import Tasks

_QUIET_S = 1.0
"""How long a write to a stream that has ended is waited for."""
_BREAKS = (
    grpc.RpcError,
    grpc.aio.BaseError,
    grpc.aio.UsageError,
    asyncio.InvalidStateError,
    asyncio.CancelledError,
)
"""How a write ends whose call is over."""


class _Stream(Protocol):
    """The writing half of a stream: a client call and a server context look alike here."""

    async def write(self, message: bytes) -> None:
        """Send one message."""
        ...


class Link:
    """Everything that is said to one neighbour, in order, over whichever stream is there.

    Args:
        keep: how many messages the neighbour may lack.
    """

    def __init__(self, keep: int = 2) -> None:
        self._frames: deque[tuple[int, bytes]] = deque(maxlen=keep)
        self._signatures: deque[tuple[int, Callable[[], bytes]]] = deque(maxlen=signatures_kept(keep))
        self._due: deque[bytes] = deque(maxlen=2 * keep)
        self._stream: _Stream | None = None
        self._displaced: Callable[[], object] = lambda: None
        self._tasks = Tasks()
        self._writing: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._woken: asyncio.Future[None] | None = None  # an event would make one for each wait, too, and more
        self.attached = asyncio.Event()
        self.streams = 0
        """That were attached."""
        self.incarnation = 0
        """The highest that the neighbour has greeted with: a lower one is an old process, or a copy."""

    def say(self, t: int, frame: bytes) -> None:
        """Send a round's bytes as soon as the stream allows; never waits."""
        self._frames.append((t, frame))
        self._due.append(frame)
        self._kick()

    def sign(self, t: int, signature: Callable[[], bytes]) -> None:
        """Send a signature behind round t, of a block in which the neighbour was told anything.

        Args:
            t: the round.
            signature: makes it; again where it is said again, for the signer's certificate may have been renewed.
        """
        self._signatures.append((t, signature))
        self._due.append(signature())
        self._kick()

    def attach(self, stream: _Stream, next_round: int, displaced: Callable[[], object] = lambda: None) -> None:
        """A stream is there, and its other end has heard everything below `next_round`.

        Args:
            stream: takes the place of the one that was there.
            next_round: the round to go on with.
            displaced: called when another stream takes this one's place.
        """
        if self.has(self._stream):
            self._displaced()
        self._stream, self._displaced = stream, displaced
        self.streams += 1
        self._due.clear()
        self._due.extend(self._from(next_round))
        self.attached.set()
        self._kick()

    def _from(self, next_round: int) -> list[bytes]:
        """What a neighbour may lack that has heard everything below a round: a signature stands behind its round."""
        before = [signature() for t, signature in self._signatures if t < next_round][-1:]
        due = [(t, 0, frame) for t, frame in self._frames if t >= next_round]
        due += [(t, 1, signature()) for t, signature in self._signatures if t >= next_round]
        return [*before, *(payload for _, _, payload in sorted(due))]

    @property
    def waiting(self) -> int:
        """Messages and signatures that are yet to be written."""
        return len(self._due)

    def has(self, stream: _Stream | None) -> bool:
        """True when this is the stream that the link writes to."""
        return stream is not None and self._stream is stream

    def detach(self, stream: _Stream) -> None:
        """A stream has ended."""
        if self.has(stream):
            self._stream = None
            self.attached.clear()
            self._wake()

    async def flushed(self) -> None:
        """Wait until all that was said is written, or the stream is gone."""
        await self._idle.wait()

    async def quiet(self) -> None:
        """Wait for a moment until nothing is being written: a call that ends meanwhile does not end on the other side."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_QUIET_S):
                await self._idle.wait()

    async def close(self) -> None:
        """Write nothing more."""
        self._stream = None
        await self._tasks.end()

    def _kick(self) -> None:
        if self._stream is not None:
            self._idle.clear()
            self._wake()
            if self._writing is None or self._writing.done():
                self._writing = self._tasks.start(self._write(), "a channel cannot be written")

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def _write(self) -> None:
        """As long as there is a stream, write what is due, one message at a time: two writes in flight on one are an error."""
        try:
            while (stream := self._stream) is not None:
                if self._due:
                    try:
                        await stream.write(self._due.popleft())
                    except _BREAKS:
                        self.detach(stream)
                else:
                    self._idle.set()
                    self._woken = asyncio.get_running_loop().create_future()
                    await self._woken
        finally:
            self._idle.set()
