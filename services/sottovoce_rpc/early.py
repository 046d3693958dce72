"""What is waited for, told while it is: by whoever waits, and by a service to whoever calls, before its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message

from sottovoce.errors import RemoteProtocolError
from sottovoce.text import plain
from sottovoce_rpc.tasks import Tasks

EARLY_S = 1.5
"""After which whoever waits is told for what."""
_KEY = "sottovoce-waiting-bin"
"""Of the metadata before an answer. Its text names learners and services of the caller's spec, and who else has joined."""

Tell = Callable[[str], Awaitable[None]]
"""Says what is waited for."""

T = TypeVar("T")
M = TypeVar("M", bound=Message)


@asynccontextmanager
async def if_long(tell: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Have it told, once, where what is done within takes long."""

    async def later() -> None:
        await asyncio.sleep(EARLY_S)
        await tell()

    async with Tasks() as tasks:
        tasks.start(later(), "what is waited for could not be told")
        yield


def to_caller(context: grpc.aio.ServicerContext[Any, Any]) -> Tell:
    """Tells whoever calls, who is told once: the first thing."""
    told = False

    async def tell(text: str) -> None:
        nonlocal told
        if not told:
            told = True
            await context.send_initial_metadata(((_KEY, text.encode()),))

    return tell


def told_early(
    to: grpc.aio.Channel, method: str, request: Message, answer: type[M], timeout_s: float
) -> grpc.aio.UnaryStreamCall[Any, M]:
    """A call whose metadata are there before its answer: those of what is no stream gRPC hands over together with it.

    Args:
        to: the service.
        method: its path.
        request: to ask.
        answer: its class.
        timeout_s: to wait.
    """
    ask: grpc.aio.UnaryStreamMultiCallable[Any, M] = to.unary_stream(
        method, request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString
    )
    return ask(request, timeout=timeout_s)


async def answered(
    call: grpc.aio.UnaryUnaryCall[Any, T] | grpc.aio.UnaryStreamCall[Any, T],
    to: grpc.aio.Channel,
    who: str,
    say: Callable[[str], None],
) -> T:
    """The answer of a call; if it is long in coming, it is said what is waited for.

    Args:
        call: just made.
        to: that it was made on.
        who: is called, for people.
        say: to people.

    Raises:
        AioRpcError: there is none.
    """

    async def wonder() -> None:
        if to.get_state() is not grpc.ChannelConnectivity.READY:
            say(f"waiting for {who}: not reached yet; is it running, and is the address right?")
        for key, value in await call.initial_metadata() or ():
            if key == _KEY and isinstance(value, bytes):
                say(f"waiting for {plain(value.decode(errors='replace'))}")

    async with if_long(wonder):
        if isinstance(call, grpc.aio.UnaryUnaryCall):
            return await call
        found = await call.read()
        if found is grpc.aio.EOF:
            raise RemoteProtocolError(f"expected an answer of {who}, got none")
        return cast(T, found)
