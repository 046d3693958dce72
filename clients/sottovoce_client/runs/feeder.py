"""Feeders: stream records into a learner, each exactly once, also over broken connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np

from sottovoce_client import terminal
from sottovoce_core.data import LearnerData
from sottovoce_core.errors import FailedPrecondition, Unavailable
from sottovoce_rpc.codec import to_tensor
from sottovoce_rpc.credentials import NO_IDENTITY, Credentials
from sottovoce_rpc.error_status import CallOutcome, convert_status_error, explain_handshake_failure
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import open_channel
from sottovoce_rpc.tasks import run_in_background
from sottovoce_wire.v1 import learner_pb2, learner_pb2_grpc

_MAX_ROUNDS_PER_BATCH, _MAX_BATCH_BYTES = 64, 8 * 1024 * 1024
"""Maximum rounds of a batch, and maximum bytes unless a single round has more."""
_MAX_UNCONFIRMED_BATCHES = 64
"""Maximum number of batches in flight: the learner acknowledges several at a time."""
_FEED_TIMEOUT_S, _RETRY_DELAY_S = 60.0, 0.5


def make_batch(
    data: LearnerData, source: str, sequence: int, rounds: int = _MAX_ROUNDS_PER_BATCH
) -> learner_pb2.SampleBatch:
    """Build one of a learner's batches, each of a fixed number of consecutive rounds."""
    first = sequence * rounds
    last = min(first + rounds, data.rounds)
    rows = data.order[data.offsets[first] : data.offsets[last]]
    return learner_pb2.SampleBatch(
        source=source,
        sequence=sequence,
        first_round=first,
        counts=np.diff(data.offsets[first : last + 1]).tolist(),
        features=to_tensor(data.features[rows]),
        labels=to_tensor(data.labels[rows]),
    )


def choose_rounds_per_batch(data: LearnerData) -> int:
    """Choose the rounds per batch: always the same, so that a batch can be sent again."""
    max_records = max(int(np.diff(data.offsets).max(initial=1)), 1)
    width: int = data.features.shape[1] + 1
    return max(1, min(_MAX_ROUNDS_PER_BATCH, _MAX_BATCH_BYTES // (8 * width * max_records)))


class _BatchStream:
    """Stream of batches, built as the learner acknowledges them, so that a long stream is never in memory as a whole.

    Attributes:
        received: Number of batches that the learner has stored.
    """

    def __init__(self, data: LearnerData, source: str) -> None:
        self._data, self._source, self._rounds = data, source, choose_rounds_per_batch(data)
        self._batch_count = -(-data.rounds // self._rounds)
        self.received = 0
        self._receipt = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """True once the learner has all batches."""
        return self.received >= self._batch_count

    def receive(self, count: int) -> None:
        """Handle an acknowledgement: the learner has this many batches."""
        self.received = count
        self._receipt.set()

    async def batches(self) -> AsyncIterator[learner_pb2.SampleBatch]:
        """Yield batches on one stream, from the first that the learner lacks."""
        next_batch = self.received
        while next_batch < self._batch_count:
            while next_batch >= self.received + _MAX_UNCONFIRMED_BATCHES:
                self._receipt.clear()
                await self._receipt.wait()
            yield make_batch(self._data, self._source, next_batch, self._rounds)
            next_batch = max(next_batch + 1, self.received)  # the learner may have had more already


async def feed(
    address: str,
    run_id: str,
    data: LearnerData,
    source: str = "feeder",
    timeout_s: float = _FEED_TIMEOUT_S,
    *,
    learner: str = "",
    credentials: Credentials = NO_IDENTITY,
) -> None:
    """Stream all of a learner's records into it; a broken connection is opened again and continued.

    Args:
        address: Address of the learner.
        run_id: Id of the run.
        data: Records of the learner.
        source: Name of the source.
        timeout_s: Maximum seconds without progress; at least `_FEED_TIMEOUT_S`.
        learner: Name of the learner, which its certificate must contain; empty: any.
        credentials: Credentials of the feeder.

    Raises:
        DataError: The learner refused the records.
        Unavailable, FailedPrecondition: Within the timeout the learner was unreachable, did not join the run, or stored nothing:
            it is still being started, or it has failed and the coordinator is being informed.
    """
    timeout_s = max(timeout_s, _FEED_TIMEOUT_S)
    stream, outage, refusal, shown = _BatchStream(data, source), _FailureTimer(timeout_s), _FailureTimer(timeout_s), ""
    now = asyncio.get_running_loop().time
    while not stream.is_complete:
        # A new channel for each attempt: the identity may have been renewed.
        async with open_channel(address, Role.LEARNER, learner, credentials=credentials) as channel:
            stub = learner_pb2_grpc.LearnerStub(channel)
            try:
                await _wait_for_run(
                    stub, run_id, address, timeout_s
                )  # again after a break: the learner may have restarted
                outage.reset()
                await _send(stub.Ingest(), stream, refusal)
                continue
            except grpc.aio.AioRpcError as error:
                failure = convert_status_error(error, f"the learner at {address}")
                reason = explain_handshake_failure(error.details() or "")
                if reason and reason != shown:  # waiting alone does not fix it
                    shown = reason
                    terminal.print_notice(f"waiting for {learner or 'the learner'} at {address}: {reason}")
        timer = outage if isinstance(failure, Unavailable) else refusal
        if not isinstance(failure, Unavailable | FailedPrecondition) or timer.has_expired(now()):
            raise failure
        await asyncio.sleep(_RETRY_DELAY_S)


class _FailureTimer:
    """Timer of consecutive failures.

    Args:
        timeout_s: Seconds after which it expires.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since: float | None = None

    def reset(self) -> None:
        """Reset the timer after a success."""
        self._since = None

    def has_expired(self, now: float) -> bool:
        """Record a failure; return whether failures have lasted too long."""
        self._since = now if self._since is None else self._since
        return now - self._since > self._timeout_s


async def _send(call: grpc.aio.StreamStreamCall[Any, Any], stream: _BatchStream, refusal: _FailureTimer) -> None:
    """Send on one stream until everything is acknowledged.

    Raises:
        AioRpcError: The stream broke, or the learner refuses.
    """
    outcome = CallOutcome(call)
    try:
        async with run_in_background(_write_batches(call, stream)):
            try:
                async for receipt in call:
                    stream.receive(receipt.next_sequence)
                    refusal.reset()
            except grpc.aio.AioRpcError:
                await outcome.require_ok()
    finally:
        call.cancel()


async def _write_batches(call: grpc.aio.StreamStreamCall[Any, Any], stream: _BatchStream) -> None:
    """Write batches as acknowledgements allow; the reader of the acknowledgements receives the error of the stream."""
    with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
        async for batch in stream.batches():
            await call.write(batch)
        await call.done_writing()


async def _wait_for_run(stub: learner_pb2_grpc.LearnerAsyncStub, run_id: str, address: str, timeout_s: float) -> None:
    """Wait until the learner knows the run: the coordinator starts it at the same time as this feeder.

    Raises:
        Unavailable: The learner did not start the run.
        AioRpcError: The learner does not answer.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while loop.time() < deadline:
        answer = stub.GetStatus(learner_pb2.GetStatusRequest(), timeout=_FEED_TIMEOUT_S)
        if (await answer).status.run_id == run_id:
            return
        await asyncio.sleep(0.02)
    raise Unavailable(f"the learner at {address} has not received run {run_id} within {timeout_s:g} s")
