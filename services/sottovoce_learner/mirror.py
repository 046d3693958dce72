"""Copies of sent messages to the eavesdropper, in batches, outside the round loop.

A broken stream is reopened. The copies sent last on it may be lost, and are sent again; the eavesdropper sees dropped
copies by their round numbers, and the capture reports the gap.
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
"""Maximum size of a batch of several copies: gRPC messages are limited, while a model may be large."""
MAX_RESENT_COPIES = 1_024
"""Maximum number of copies sent again on a new stream: copies are not acknowledged one by one."""
_BACKOFF_S = (0.1, 0.2, 0.5, 1.0, 2.0)
DRAIN_TIMEOUT_S = 3.0
"""Time limit for sending the last copies after the end of the run; the eavesdropper waits as long for them."""
_PERMANENT_CODES = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Status codes after which there is no retry: the copies are wrong, or the capture is closed or unknown."""
_JITTER = secrets.SystemRandom()


class Mirror:
    """Sender of copies of one learner's messages to an eavesdropper.

    Args:
        run_id: run id.
        sender: index of the learner.
        address: address of the eavesdropper.
        credentials: credentials of the learner.
        accepted_names: eavesdroppers that its owner accepts; an empty name: any.
    """

    def __init__(
        self,
        run_id: str,
        sender: int,
        address: str,
        credentials: Credentials = NO_IDENTITY,
        accepted_names: Sequence[str] = ("",),
    ) -> None:
        self._credentials, self._accepted_names = credentials, accepted_names
        self._run_id, self._sender, self._address = run_id, sender, address
        self._queue: deque[eavesdropper_pb2.MirroredMessage] = deque(maxlen=MAX_QUEUED_COPIES)
        self._sent: deque[eavesdropper_pb2.MirroredMessage] = deque(maxlen=MAX_RESENT_COPIES)
        self._full, self._dropping = asyncio.Event(), False
        self._ended_at: float | None = None

    def copy(self, frame: bytes, receivers: list[int]) -> None:
        """Queue a copy for the next batch.

        While the eavesdropper is unreachable, the oldest copies are dropped; rounds never wait.
        """
        if len(self._queue) == self._queue.maxlen and not self._dropping:
            self._dropping = True
            log.warning(
                "eavesdropper unreachable: the oldest copies are dropped from here on", waiting=self._queue.maxlen
            )
        message = eavesdropper_pb2.MirroredMessage(payload=frame, receivers=receivers)
        message.sent_at.FromNanoseconds(time.time_ns())
        self._queue.append(message)
        if len(self._queue) >= _MAX_BATCH_COPIES:
            self._full.set()

    @property
    def queue_size(self) -> int:
        """Number of copies not sent yet."""
        return len(self._queue)

    def end(self) -> None:
        """Send the remaining copies, then let `run` return."""
        self._ended_at = time.monotonic()
        self._full.set()

    async def run(self) -> None:
        """Send batches until ended or refused; wait for an eavesdropper that is unreachable."""
        attempts = 0
        while self._ended_at is None or time.monotonic() - self._ended_at < DRAIN_TIMEOUT_S:
            began, name = time.monotonic(), self._accepted_names[attempts % len(self._accepted_names)]
            async with open_channel(self._address, Role.EAVESDROPPER, name, credentials=self._credentials) as to:
                try:
                    await self._send(eavesdropper_pb2_grpc.EavesdropperStub(to).Mirror())
                    return
                except grpc.aio.AioRpcError as error:
                    log.warning("mirroring broke off", attempts=attempts, reason=error.details())
                    if error.code() in _PERMANENT_CODES:
                        return
            attempts = attempts + 1 if time.monotonic() - began < _BACKOFF_S[-1] else 0
            self._queue = deque([*self._sent, *self._queue], self._queue.maxlen)
            self._sent.clear()
            await asyncio.sleep(_JITTER.uniform(0.5, 1.0) * _BACKOFF_S[min(attempts, len(_BACKOFF_S) - 1)])

    async def _send(
        self, call: grpc.aio.StreamUnaryCall[eavesdropper_pb2.MirrorRequest, eavesdropper_pb2.MirrorResponse]
    ) -> None:
        """Send batches on one stream until ended.

        Raises:
            grpc.aio.AioRpcError: it broke, or the eavesdropper refuses copies.
        """
        ending = CallOutcome(call)
        # If the stream is over, its status has the reason.
        with contextlib.suppress(asyncio.InvalidStateError, grpc.RpcError, grpc.aio.BaseError):
            while self._ended_at is None or self._queue:
                await self._wait_for_batch()
                batch = self._take_batch()
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

    def _take_batch(self) -> list[eavesdropper_pb2.MirroredMessage]:
        """Take the copies of the next batch from the queue."""
        batch, size = list[eavesdropper_pb2.MirroredMessage](), 0
        while self._queue and len(batch) < _MAX_BATCH_COPIES:
            size += len(self._queue[0].payload)
            if batch and size > _MAX_BATCH_BYTES:
                break
            batch.append(self._queue.popleft())
        return batch

    async def _wait_for_batch(self) -> None:
        """Wait until a batch is full, or for the flush interval."""
        if len(self._queue) >= _MAX_BATCH_COPIES or self._ended_at is not None:
            return
        self._full.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_INTERVAL_S):
                await self._full.wait()
