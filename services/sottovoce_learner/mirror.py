"""Mirroring: copies of what was said, to the eavesdropper, in batches, off the round loop.

A stream that breaks is opened again. What was sent last on it may not have come, and is sent again; what is dropped meanwhile
the eavesdropper sees by its round, and the capture names the gap.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Sequence

import grpc
import structlog

from sottovoce_rpc.credentials import NO_IDENTITY, Credentials
from sottovoce_rpc.error_status import CallOutcome
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import open_channel
from sottovoce_wire.v1 import eavesdropper_pb2, eavesdropper_pb2_grpc

log = structlog.get_logger()

_MAX_BATCH_COPIES, FLUSH_INTERVAL_S, MAX_QUEUED_COPIES = 64, 0.2, 20_000
_MAX_BATCH_BYTES = 16 * 1024 * 1024
"""Of a batch of several copies: a message has a limit, however large a model is."""
MAX_RESENT_COPIES = 1_024
"""Copies that are sent again on a new stream: nobody confirms them one by one."""
_BACKOFF_S = (0.1, 0.2, 0.5, 1.0, 2.0)
DRAIN_TIMEOUT_S = 3.0
"""How long the last copies are tried after the end of the run: the eavesdropper waits as long for them."""
_PERMANENT_CODES = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""What is no use to try again: the copies are wrong, or the capture is closed or unknown."""
_JITTER = secrets.SystemRandom()


class Mirror:
    """Sends copies of one learner's messages to an eavesdropper.

    Args:
        run_id: the run.
        sender: the learner's index.
        address: the eavesdropper.
        credentials: of the learner.
        names: of eavesdroppers that its owner accepts; an empty one: any.
    """

    def __init__(
        self,
        run_id: str,
        sender: int,
        address: str,
        credentials: Credentials = NO_IDENTITY,
        names: Sequence[str] = ("",),
    ) -> None:
        self._credentials, self._names = credentials, names
        self._run_id, self._sender, self._address = run_id, sender, address
        self._waiting: deque[eavesdropper_pb2.MirroredMessage] = deque(maxlen=MAX_QUEUED_COPIES)
        self._sent: deque[eavesdropper_pb2.MirroredMessage] = deque(maxlen=MAX_RESENT_COPIES)
        self._full, self._dropping = asyncio.Event(), False
        self._ended_at: float | None = None

    def copy(self, frame: bytes, receivers: list[int]) -> None:
        """Keep a copy for the next batch. When the eavesdropper is away for too long, the oldest are dropped, never rounds."""
        if len(self._waiting) == self._waiting.maxlen and not self._dropping:
            self._dropping = True
            log.warning("eavesdropper away: the oldest copies are dropped from here on", waiting=self._waiting.maxlen)
        message = eavesdropper_pb2.MirroredMessage(payload=frame, receivers=receivers)
        message.sent_at.FromNanoseconds(time.time_ns())
        self._waiting.append(message)
        if len(self._waiting) >= _MAX_BATCH_COPIES:
            self._full.set()

    @property
    def queue_size(self) -> int:
        """Copies that are yet to be sent."""
        return len(self._waiting)

    def end(self) -> None:
        """Send what is left, then end `run`."""
        self._ended_at = time.monotonic()
        self._full.set()

    async def run(self) -> None:
        """Send batches until ended, or refused; an eavesdropper that is away is waited for."""
        attempts = 0
        while self._ended_at is None or time.monotonic() - self._ended_at < DRAIN_TIMEOUT_S:
            began, name = time.monotonic(), self._names[attempts % len(self._names)]
            async with open_channel(self._address, Role.EAVESDROPPER, name, credentials=self._credentials) as to:
                try:
                    await self._send(eavesdropper_pb2_grpc.EavesdropperStub(to).Mirror())
                    return
                except grpc.aio.AioRpcError as error:
                    log.warning("mirroring broke off", attempts=attempts, reason=error.details())
                    if error.code() in _PERMANENT_CODES:
                        return
            attempts = attempts + 1 if time.monotonic() - began < _BACKOFF_S[-1] else 0
            self._waiting = deque([*self._sent, *self._waiting], self._waiting.maxlen)
            self._sent.clear()
            await asyncio.sleep(_JITTER.uniform(0.5, 1.0) * _BACKOFF_S[min(attempts, len(_BACKOFF_S) - 1)])

    async def _send(
        self, call: grpc.aio.StreamUnaryCall[eavesdropper_pb2.MirrorRequest, eavesdropper_pb2.MirrorResponse]
    ) -> None:
        """Batches, on one stream, until ended.

        Raises:
            grpc.aio.AioRpcError: it broke, or the eavesdropper refuses copies.
        """
        ending = CallOutcome(call)
        # Where it is over, its ending says why.
        with contextlib.suppress(asyncio.InvalidStateError, grpc.RpcError, grpc.aio.BaseError):
            while self._ended_at is None or self._waiting:
                await self._pause()
                batch = self._batch()
                self._sent.extend(batch)
                if batch:
                    await call.write(
                        eavesdropper_pb2.MirrorRequest(run_id=self._run_id, sender=self._sender, messages=batch)
                    )
            await call.done_writing()
        try:
            await call
        except grpc.aio.AioRpcError:
            await ending.require_ok()

    def _batch(self) -> list[eavesdropper_pb2.MirroredMessage]:
        """The next copies that go out together."""
        batch, size = list[eavesdropper_pb2.MirroredMessage](), 0
        while self._waiting and len(batch) < _MAX_BATCH_COPIES:
            size += len(self._waiting[0].payload)
            if batch and size > _MAX_BATCH_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _pause(self) -> None:
        """Until there is a batch, or for a moment."""
        if len(self._waiting) >= _MAX_BATCH_COPIES or self._ended_at is not None:
            return
        self._full.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_INTERVAL_S):
                await self._full.wait()
