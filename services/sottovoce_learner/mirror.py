"""Mirroring: copies of what was said, to the eavesdropper, in batches, off the round loop."""

from __future__ import annotations

import asyncio
import contextlib
import time

import grpc
import structlog

from sottovoce_rpc.server import channel
from sottovoce_wire.v1 import eavesdropper_pb2, eavesdropper_pb2_grpc

log = structlog.get_logger()

_BATCH, FLUSH_S, _MOST_WAITING = 64, 0.2, 20_000


class Mirror:
    """Sends copies of one learner's messages to an eavesdropper.

    Args:
        run_id: the run.
        sender: the learner's index.
        address: the eavesdropper.
    """

    def __init__(self, run_id: str, sender: int, address: str) -> None:
        self._run_id, self._sender, self._address = run_id, sender, address
        self._waiting: list[eavesdropper_pb2.MirroredMessage] = []
        self._full, self._ended, self._dropped = asyncio.Event(), False, 0

    def copy(self, frame: bytes, receivers: list[int]) -> None:
        """Keep a copy for the next batch. When the eavesdropper is away for too long, copies are dropped, never rounds."""
        if len(self._waiting) >= _MOST_WAITING:
            if not self._dropped:
                log.warning("eavesdropper away: copies are dropped from here on", waiting=_MOST_WAITING)
            self._dropped += 1
            return
        message = eavesdropper_pb2.MirroredMessage(payload=frame, receivers=receivers)
        message.sent_at.FromNanoseconds(time.time_ns())
        self._waiting.append(message)
        if len(self._waiting) >= _BATCH:
            self._full.set()

    def end(self) -> None:
        """Send what is left, then end `run`."""
        self._ended = True
        self._full.set()

    async def run(self) -> None:
        """Send batches until ended."""
        async with channel(self._address) as to:
            call = eavesdropper_pb2_grpc.EavesdropperStub(to).Mirror()
            try:
                while not self._ended or self._waiting:
                    await self._pause()
                    batch, self._waiting = self._waiting, []
                    if batch:
                        await call.write(
                            eavesdropper_pb2.MirrorRequest(run_id=self._run_id, sender=self._sender, messages=batch)
                        )
                await call.done_writing()
                await call
            except grpc.aio.AioRpcError as error:
                log.warning("mirroring ended", reason=error.details())

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._full.wait(), FLUSH_S)
        if not self._ended:
            self._full.clear()
