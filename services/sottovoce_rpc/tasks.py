"""Owners of tasks: nothing runs in the background that nobody ends, waits for, and hears the failure of."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import structlog

from sottovoce_rpc.logs import failure

log = structlog.get_logger()

T = TypeVar("T")

_END_S = 2.0
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
                log.error(what, **failure(error))

        task.add_done_callback(done)
        return task

    async def end(self, seconds: float = _END_S) -> None:
        """Cancel what still runs, and give it so long to clean up."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            if late:
                log.error("tasks do not end", tasks=len(late), seconds=seconds)


@asynccontextmanager
async def beside(*works: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
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
        raise first_of(errors) from None


def first_of(error: BaseException) -> BaseException:
    """What a group of errors, or of such groups, began with."""
    return first_of(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def drained(work: Coroutine[Any, Any, object], seconds: float) -> bool:
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
