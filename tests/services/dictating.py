"""A coordinator that says whatever a test wants it to, and writes down what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc

from sottovoce_rpc.commands import Command, Origin, command_to_wire
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.services.network import PATIENCE_S

pb = coordinator_pb2
Sent = TypeVar("Sent", pb.Assignment, pb.Neighbour)


def changed(message: Sent, **fields: Any) -> Sent:
    """A message with other fields."""
    copy = type(message)()
    copy.CopyFrom(message)
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy


class Dictator(coordinator_pb2_grpc.CoordinatorServicer):
    """Lets one learner in, says what it is given, and remembers the learner's last report."""

    def __init__(self) -> None:
        self.address, self.joined = "", 0
        self.last: coordinator_pb2.Report | None = None
        self._said: asyncio.Queue[coordinator_pb2.Command] = asyncio.Queue()
        self._heard = asyncio.Event()

    def say(self, run_id: str, told: Command) -> None:
        """Say a directive."""
        self._said.put_nowait(command_to_wire(run_id, told, Origin()))

    def say_as_is(self, directive: coordinator_pb2.Command) -> None:
        """Say what is no directive of ours."""
        self._said.put_nowait(directive)

    async def until(self, holds: Callable[[coordinator_pb2.Report], bool]) -> coordinator_pb2.Report:
        """The first report, from the last one on, of which something holds."""
        async with asyncio.timeout(PATIENCE_S):
            while self.last is None or not holds(self.last):
                self._heard.clear()
                await self._heard.wait()
        return self.last

    async def Join(  # noqa: N802 - the .proto names it
        self, events: AsyncIterator[coordinator_pb2.LearnerMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[coordinator_pb2.Command]:
        first = await anext(events)
        incarnation = max(first.introduction.incarnation, 1)
        if not first.introduction.is_reconnect:
            yield command_to_wire("", pb.IncarnationIssued(incarnation=incarnation), Origin())
            await anext(events)
        yield command_to_wire("", pb.IncarnationConfirmed(incarnation=incarnation), Origin())
        self.joined += 1
        listening = asyncio.ensure_future(self._listen(events))
        try:
            while True:
                yield await self._said.get()
        finally:
            listening.cancel()

    async def _listen(self, events: AsyncIterator[coordinator_pb2.LearnerMessage]) -> None:
        async for event in events:
            self.last = event.report
            self._heard.set()


@asynccontextmanager
async def dictating() -> AsyncIterator[Dictator]:
    """A dictator that is up."""
    server, dictator = grpc.aio.server(), Dictator()  # type: ignore[abstract] # a learner calls nothing else
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(dictator, server)
    dictator.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield dictator
    finally:
        await server.stop(None)
