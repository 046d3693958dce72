"""Owners of background tasks, which end them, wait for them and log their failures; and messages about what a call waits for.

A caller that waits for long prints what it waits for, and a service sends it to the caller before its answer.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import grpc
import structlog
from google.protobuf.message import Message

from sottovoce_core.errors import RemoteProtocolError
from sottovoce_core.text import escape_control
from sottovoce_rpc.logs import describe_failure

log = structlog.get_logger()

T = TypeVar("T")

_END_TIMEOUT_S = 2.0
"""How long tasks that were cancelled may take to clean up."""


class Tasks:
    """The tasks of one owner, where an `asyncio.TaskGroup` does not fit: they begin at any time, and one failure ends no other.

    Use it in `async with`, or end it. Whoever started a task reads its result; what nobody reads is given a name, and a
    failure is logged under it, by kind and place.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()

    def start(self, work: Coroutine[Any, Any, T], what: str = "") -> asyncio.Task[T]:
        """Start a task.

        Args:
            work: what it does.
            what: what a failure is called in the log; empty where somebody reads the result.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def done(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None and what:
                log.error(what, **describe_failure(error))

        task.add_done_callback(done)
        return task

    async def end(self, seconds: float = _END_TIMEOUT_S) -> None:
        """Cancel what still runs, and give it so long to clean up."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            if late:
                log.error("tasks do not end", tasks=len(late), seconds=seconds)


@asynccontextmanager
async def run_in_background(*works: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Do these works while the block lasts. Its end cancels them; a failure of one ends the block, with that error.

    An `asyncio.TaskGroup` that waits for nobody but the block, and raises what failed first as it is, not in a group.
    """
    owner = asyncio.current_task()
    assert owner is not None  # noqa: S101 - asynchronous code runs in one
    before = owner.cancelling()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        if sys.version_info < (3, 13) and owner.cancelling() > before:  # later groups do not lose it
            raise asyncio.CancelledError from None
        raise extract_first_error(errors) from None


def extract_first_error(error: BaseException) -> BaseException:
    """What a group of errors, or of such groups, began with."""
    return extract_first_error(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def run_cleanup(work: Coroutine[Any, Any, object], seconds: float) -> bool:
    """Give cleanup its time, even if whoever waits for it is cancelled; False when it was cut off."""
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    until = asyncio.get_running_loop().time() + seconds
    while not task.done() and (left := until - asyncio.get_running_loop().time()) > 0:
        try:
            await asyncio.wait([task], timeout=left)
        except asyncio.CancelledError as error:  # it waits until the cleanup is over, which is bounded
            cancelled = error
    in_time = task.done()
    task.cancel()
    if cancelled is not None:
        raise cancelled
    if in_time:
        task.result()
    return in_time


# ---- what a call waits for -------------------------------------------------------------------------------------------


WAIT_NOTICE_DELAY_S = 1.5
"""After which whoever waits is told for what."""
_KEY = "sottovoce-waiting-bin"
"""Of the metadata before an answer. Its text names learners and services of the caller's spec, and who else has joined."""

NotifyWait = Callable[[str], Awaitable[None]]
"""Says what is waited for."""

M = TypeVar("M", bound=Message)


@asynccontextmanager
async def notify_if_slow(tell: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Have it told, once, where what is done within takes long."""

    async def later() -> None:
        await asyncio.sleep(WAIT_NOTICE_DELAY_S)
        await tell()

    async with Tasks() as tasks:
        tasks.start(later(), "what is waited for could not be told")
        yield


def build_wait_notifier(context: grpc.aio.ServicerContext[Any, Any]) -> NotifyWait:
    """Tells whoever calls, who is told once: the first thing."""
    told = False

    async def tell(text: str) -> None:
        nonlocal told
        if not told:
            told = True
            await context.send_initial_metadata(((_KEY, text.encode()),))

    return tell


def call_with_early_metadata(
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


async def await_answer(
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
                say(f"waiting for {escape_control(value.decode(errors='replace'))}")

    async with notify_if_slow(wonder):
        if isinstance(call, grpc.aio.UnaryUnaryCall):
            return await call
        found = await call.read()
        if found is grpc.aio.EOF:
            raise RemoteProtocolError(f"expected an answer of {who}, got none")
        return cast(T, found)
