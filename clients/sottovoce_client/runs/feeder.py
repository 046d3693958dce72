"""Feeders: stream an owner's records into a learner, each exactly once, whatever happens to the connection."""

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
"""Of a batch: rounds, and bytes unless one round alone has more."""
_MAX_UNCONFIRMED_BATCHES = 64
"""Batches that are sent before the learner has confirmed them; it does so every so often."""
_FEED_TIMEOUT_S, _RETRY_DELAY_S = 60.0, 0.5


def make_batch(
    data: LearnerData, source: str, sequence: int, rounds: int = _MAX_ROUNDS_PER_BATCH
) -> learner_pb2.SampleBatch:
    """One of a learner's batches, each of so many consecutive rounds."""
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
    """Rounds in each of a learner's batches: the same whenever they are sent again."""
    most = max(int(np.diff(data.offsets).max(initial=1)), 1)
    width: int = data.features.shape[1] + 1
    return max(1, min(_MAX_ROUNDS_PER_BATCH, _MAX_BATCH_BYTES // (8 * width * most)))


class _Sending:
    """Batches on their way: made as the learner takes them in, so that a long stream is never in memory as a whole.

    Attributes:
        received: batches that the learner has in keeping.
    """

    def __init__(self, data: LearnerData, source: str) -> None:
        self._data, self._source, self._rounds = data, source, choose_rounds_per_batch(data)
        self._many = -(-data.rounds // self._rounds)
        self.received = 0
        self._receipt = asyncio.Event()

    @property
    def over(self) -> bool:
        """Has the learner everything?"""
        return self.received >= self._many

    def receive(self, count: int) -> None:
        """A receipt: the learner has so many."""
        self.received = count
        self._receipt.set()

    async def batches(self) -> AsyncIterator[learner_pb2.SampleBatch]:
        """From the first that it has not, on one stream."""
        due = self.received
        while due < self._many:
            while due >= self.received + _MAX_UNCONFIRMED_BATCHES:
                self._receipt.clear()
                await self._receipt.wait()
            yield make_batch(self._data, self._source, due, self._rounds)
            due = max(due + 1, self.received)  # it may have had more already


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
    """Stream all of a learner's records into it; a broken connection is opened again where it ended.

    Args:
        address: of the learner.
        run_id: the run.
        data: its records.
        source: what they are counted under.
        patience_s: how long it may be away; at least `_PATIENCE_S`.
        learner: its name, which its certificate must hold; empty: any.
        credentials: of the feeder.

    Raises:
        DataError: the learner refused the records.
        Unavailable, FailedPrecondition: for so long it could not be reached, was not in the run, or took nothing in: it is being told, or
            has failed and the coordinator is.
    """
    timeout_s = max(timeout_s, _FEED_TIMEOUT_S)
    sending, away, refused, told = _Sending(data, source), _Failing(timeout_s), _Failing(timeout_s), ""
    now = asyncio.get_running_loop().time
    while not sending.over:
        # A channel of its own for each try: the identity may have been renewed.
        async with open_channel(address, Role.LEARNER, learner, credentials=credentials) as to:
            stub = learner_pb2_grpc.LearnerStub(to)
            try:
                await _ready(stub, run_id, address, timeout_s)  # again after a break: it may have been started again
                away.over()
                await _sent(stub.Ingest(), sending, refused)
                continue
            except grpc.aio.AioRpcError as error:
                failure = convert_status_error(error, f"the learner at {address}")
                if (
                    why := explain_handshake_failure(error.details() or "")
                ) and why != told:  # waiting alone does not mend it
                    told = why
                    terminal.print_notice(f"waiting for {learner or 'the learner'} at {address}: {why}")
        failing = away if isinstance(failure, Unavailable) else refused
        if not isinstance(failure, Unavailable | FailedPrecondition) or failing.too_long(now()):
            raise failure
        await asyncio.sleep(_RETRY_DELAY_S)


class _Failing:
    """How long something has failed, each time that it was tried.

    Args:
        patience_s: how long it may.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: float | None = None

    def over(self) -> None:
        """It has succeeded."""
        self._since = None

    def too_long(self, now: float) -> bool:
        """It has failed now; True if it has for too long."""
        self._since = now if self._since is None else self._since
        return now - self._since > self._patience_s


async def _sent(call: grpc.aio.StreamStreamCall[Any, Any], sending: _Sending, refused: _Failing) -> None:
    """Send on one stream until all is taken in.

    Raises:
        AioRpcError: it broke, or the learner refuses.
    """
    ending = CallOutcome(call)
    try:
        async with run_in_background(_said(call, sending)):
            try:
                async for receipt in call:
                    sending.receive(receipt.next_sequence)
                    refused.over()
            except grpc.aio.AioRpcError:
                await ending.require_ok()
    finally:
        call.cancel()


async def _said(call: grpc.aio.StreamStreamCall[Any, Any], sending: _Sending) -> None:
    """Send batches as receipts allow; whoever reads these is told why a stream ended."""
    with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
        async for batch in sending.batches():
            await call.write(batch)
        await call.done_writing()


async def _ready(stub: learner_pb2_grpc.LearnerAsyncStub, run_id: str, address: str, patience_s: float) -> None:
    """Wait until the learner knows the run: the coordinator tells it at the same time as it tells us.

    Raises:
        Unavailable: it was not told.
        AioRpcError: it cannot be asked.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + patience_s
    while loop.time() < until:
        asked = stub.GetStatus(learner_pb2.GetStatusRequest(), timeout=_FEED_TIMEOUT_S)
        if (await asked).status.run_id == run_id:
            return
        await asyncio.sleep(0.02)
    raise Unavailable(f"the learner at {address} has not heard of run {run_id} within {patience_s:g} s")
