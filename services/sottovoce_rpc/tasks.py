"""Background task owners, which cancel, await and log their tasks; and messages to the caller of an RPC that waits long.

The server sends the message in initial metadata, before its answer; the client prints it.
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
"""Time for cancelled tasks to clean up."""


class Tasks:
    """Tasks of one owner, where an `asyncio.TaskGroup` does not fit: they start at any time, and one failure ends no other.

    Use it in `async with`, or call `end`. The starter of a task reads its result; a task whose result is not read gets a failure
    text, under which its failure is logged by class and place.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()

    def start(self, work: Coroutine[Any, Any, T], failure_text: str = "") -> asyncio.Task[T]:
        """Start a task.

        Args:
            work: coroutine to run.
            failure_text: log event for a failure; empty if the result is read.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def done(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None and failure_text:
                log.error(failure_text, **describe_failure(error))

        task.add_done_callback(done)
        return task

    async def end(self, seconds: float = _END_TIMEOUT_S) -> None:
        """Cancel running tasks, and wait up to `seconds` for their cleanup."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            if late:
                log.error("tasks do not end", tasks=len(late), seconds=seconds)


@asynccontextmanager
async def run_in_background(*works: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Run coroutines during the block. Its end cancels them; a failure of one ends the block with that error.

    Unlike `asyncio.TaskGroup`, it waits for the block only, and raises the first error itself, not in a group.
    """
    owner = asyncio.current_task()
    assert owner is not None  # noqa: S101 - asynchronous code runs in a task
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
    """Return the first error of a (nested) exception group."""
    return extract_first_error(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def run_cleanup(work: Coroutine[Any, Any, object], seconds: float) -> bool:
    """Run cleanup to its end or for `seconds`, even if the caller is cancelled; return False if it was cut off."""
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    until = asyncio.get_running_loop().time() + seconds
    while not task.done() and (left := until - asyncio.get_running_loop().time()) > 0:
        try:
            await asyncio.wait([task], timeout=left)
        except asyncio.CancelledError as error:  # re-raised after the cleanup, whose time is bounded
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
"""Time after which a caller is informed what its call waits for."""
_KEY = "sottovoce-waiting-bin"
"""Key of the initial metadata. The text names learners and services of the caller's spec, and which others have joined."""

NotifyWait = Callable[[str], Awaitable[None]]
"""Callback that sends what is waited for."""

M = TypeVar("M", bound=Message)


@asynccontextmanager
async def notify_if_slow(notify: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Call `notify` once if the block takes long."""

    async def later() -> None:
        await asyncio.sleep(WAIT_NOTICE_DELAY_S)
        await notify()

    async with Tasks() as tasks:
        tasks.start(later(), "the wait notice could not be sent")
        yield


def build_wait_notifier(context: grpc.aio.ServicerContext[Any, Any]) -> NotifyWait:
    """Return a callback that sends its first text to the caller in initial metadata, and ignores later ones."""
    is_sent = False

    async def send(text: str) -> None:
        nonlocal is_sent
        if not is_sent:
            is_sent = True
            await context.send_initial_metadata(((_KEY, text.encode()),))

    return send


def call_with_early_metadata(
    channel: grpc.aio.Channel, method: str, request: Message, answer_type: type[M], timeout_s: float
) -> grpc.aio.UnaryStreamCall[Any, M]:
    """Start a unary call as a stream: gRPC delivers the initial metadata of a unary call only together with its answer.

    Args:
        channel: channel to the service.
        method: full path of the method.
        request: request message.
        answer_type: class of the answer.
        timeout_s: time limit of the call.
    """
    start: grpc.aio.UnaryStreamMultiCallable[Any, M] = channel.unary_stream(
        method, request_serializer=type(request).SerializeToString, response_deserializer=answer_type.FromString
    )
    return start(request, timeout=timeout_s)


async def await_answer(
    call: grpc.aio.UnaryUnaryCall[Any, T] | grpc.aio.UnaryStreamCall[Any, T],
    channel: grpc.aio.Channel,
    who: str,
    show: Callable[[str], None],
) -> T:
    """Return the answer of a call; while it takes long, show what it waits for.

    Args:
        call: a call just started.
        channel: the call's channel.
        who: the service called, for users.
        show: shows a line to the user.

    Raises:
        AioRpcError: the call failed.
        RemoteProtocolError: the stream ended without an answer.
    """

    async def show_cause() -> None:
        if channel.get_state() is not grpc.ChannelConnectivity.READY:
            show(f"waiting for {who}: not reached yet; is it running, and is the address right?")
        for key, value in await call.initial_metadata() or ():
            if key == _KEY and isinstance(value, bytes):
                show(f"waiting for {escape_control(value.decode(errors='replace'))}")

    async with notify_if_slow(show_cause):
        if isinstance(call, grpc.aio.UnaryUnaryCall):
            return await call
        found = await call.read()
        if found is grpc.aio.EOF:
            raise RemoteProtocolError(f"expected an answer of {who}, got none")
        return cast(T, found)
