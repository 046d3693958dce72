"""Feeders: stream an owner's records into a learner, each exactly once, whatever happens to the connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import numpy as np

from sottovoce.data import LearnerData
from sottovoce.errors import NotReady, Unavailable
from sottovoce_rpc.codec import to_tensor
from sottovoce_rpc.server import channel
from sottovoce_rpc.status import as_error
from sottovoce_wire.v1 import learner_pb2, learner_pb2_grpc

_ROUNDS_PER_BATCH = 64
_PATIENCE_S, _RETRY_S = 60.0, 0.5


def batches(data: LearnerData, source: str) -> list[learner_pb2.SampleBatch]:
    """A learner's records as numbered batches of consecutive rounds."""
    made: list[learner_pb2.SampleBatch] = []
    for first in range(0, data.rounds, _ROUNDS_PER_BATCH):
        last = min(first + _ROUNDS_PER_BATCH, data.rounds)
        rows = data.order[data.offsets[first] : data.offsets[last]]
        made.append(
            learner_pb2.SampleBatch(
                source=source,
                sequence=len(made),
                first_round=first,
                counts=np.diff(data.offsets[first : last + 1]).tolist(),
                features=to_tensor(data.features[rows]),
                labels=to_tensor(data.labels[rows]),
            )
        )
    return made


async def feed(address: str, run_id: str, data: LearnerData, source: str = "feeder") -> None:
    """Stream all of a learner's records into it; a broken connection is opened again where it ended.

    Raises:
        DataError: the learner refused the records.
        Unavailable, NotReady: for `_PATIENCE_S` it could not be reached, or was not in the run: it is being told, or has failed
            and the coordinator is.
    """
    to_send = batches(data, source)
    sent, failures = 0, 0
    async with channel(address) as to:
        stub = learner_pb2_grpc.LearnerStub(to)
        while sent < len(to_send):
            await _ready(stub, run_id, address)  # again after a break: it may have been started again
            try:
                call = stub.Ingest(_from(to_send, sent))
                async for receipt in call:
                    sent, failures = receipt.next_sequence, 0
            except grpc.aio.AioRpcError as error:
                failure = as_error(error, f"the learner at {address}")
                failures += 1
                if not isinstance(failure, Unavailable | NotReady) or failures > _PATIENCE_S / _RETRY_S:
                    raise failure from None
                await asyncio.sleep(_RETRY_S)


async def _from(batches: list[learner_pb2.SampleBatch], first: int) -> AsyncIterator[learner_pb2.SampleBatch]:
    for batch in batches[first:]:
        yield batch


async def _ready(stub: learner_pb2_grpc.LearnerAsyncStub, run_id: str, address: str) -> None:
    """Wait until the learner knows the run: the coordinator tells it at the same time as it tells us."""
    loop = asyncio.get_running_loop()
    until = loop.time() + _PATIENCE_S
    while loop.time() < until:
        try:
            status = (await stub.Status(learner_pb2.StatusRequest(), wait_for_ready=True, timeout=_PATIENCE_S)).status
        except grpc.aio.AioRpcError as error:
            raise as_error(error, f"the learner at {address}") from None
        if status.run_id == run_id:
            return
        await asyncio.sleep(0.02)
    raise Unavailable(f"the learner at {address} has not heard of run {run_id} within {_PATIENCE_S:g} s")
