"""Owners of tasks: what they started ends with them, in bounded time, and what fails is heard of."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog.testing

from sottovoce_rpc.tasks import Tasks, extract_first_error, run_cleanup, run_in_background

CHECKOUT = Path(__file__).resolve().parents[2]


class Work:
    """Runs until it is cancelled, or released to end or fail."""

    def __init__(self, clean_up: Callable[[], object] = lambda: None) -> None:
        self.begun, self.released, self.ended = asyncio.Event(), asyncio.Event(), False
        self.error: BaseException | None = None
        self._clean_up = clean_up

    async def __call__(self) -> str:
        self.begun.set()
        try:
            await self.released.wait()
        finally:
            self.ended = True
            self._clean_up()
        if self.error is not None:
            raise self.error
        return "done"


async def test_the_end_of_an_owner_is_the_end_of_its_tasks() -> None:
    first, second = Work(), Work()
    async with Tasks() as tasks:
        task = tasks.start(first())
        tasks.start(second())
        first.released.set()
        assert await task == "done"
        await second.begun.wait()
        assert not second.ended
    assert second.ended


async def test_an_owner_that_is_cancelled_ends_its_tasks() -> None:
    work = Work()

    async def owner() -> None:
        async with Tasks() as tasks:
            tasks.start(work())
            await asyncio.Event().wait()

    async with Tasks() as tasks:
        task = tasks.start(owner())
        await work.begun.wait()
        task.cancel()
        await asyncio.wait([task])
        assert work.ended


async def test_a_task_that_does_not_end_holds_nobody_up_and_is_logged() -> None:
    hold = asyncio.Event()

    async def stubborn() -> None:
        while not hold.is_set():
            try:
                await hold.wait()
            except asyncio.CancelledError:
                continue

    tasks = Tasks()
    task = tasks.start(stubborn())
    await asyncio.sleep(0)
    with structlog.testing.capture_logs() as logs:
        await tasks.end(0.01)
    assert [(event["event"], event["tasks"]) for event in logs] == [("tasks do not end", 1)]
    hold.set()
    await task


async def test_a_failure_is_logged_by_kind_and_place_alone() -> None:
    work = Work()
    work.error = ValueError("diagnosis: positive")
    work.released.set()
    with structlog.testing.capture_logs() as logs:
        async with Tasks() as tasks:
            await asyncio.wait([tasks.start(work(), "the work is over")])
    assert [(event["event"], event["kind"]) for event in logs] == [("the work is over", "ValueError")]
    assert "test_tasks.py" in logs[0]["where"]
    assert "diagnosis" not in str(logs)


async def test_works_beside_a_block_end_with_it() -> None:
    work = Work()
    async with run_in_background(work()):
        await work.begun.wait()
    assert work.ended


async def test_a_work_that_fails_ends_the_block_with_its_own_error() -> None:
    work, other, error = Work(), Work(), ValueError("why")
    work.error = error
    work.released.set()
    with pytest.raises(ValueError, match="why") as raised:
        async with run_in_background(work(), other()):
            await asyncio.Event().wait()
    assert raised.value is error
    assert other.ended


async def test_a_block_that_fails_raises_its_own_error() -> None:
    work, error = Work(), KeyError("block")

    async def block() -> None:
        async with run_in_background(work()):
            await work.begun.wait()
            raise error

    with pytest.raises(KeyError) as raised:
        await block()
    assert raised.value is error
    assert work.ended


async def test_a_block_that_is_cancelled_is_cancelled() -> None:
    work = Work()

    async def block() -> None:
        async with run_in_background(work()):
            await asyncio.Event().wait()

    async with Tasks() as tasks:
        task = tasks.start(block())
        await work.begun.wait()
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
    assert work.ended


async def test_cleanup_goes_on_when_whoever_waits_for_it_is_cancelled() -> None:
    work = Work()
    async with Tasks() as tasks:
        waiting = tasks.start(run_cleanup(work(), 60.0))
        await work.begun.wait()
        waiting.cancel()
        await asyncio.sleep(0)
        assert not work.ended
        work.released.set()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert work.ended


async def test_cleanup_is_cut_off_in_the_end() -> None:
    late, early = Work(), Work()
    early.released.set()
    assert await run_cleanup(early(), 60.0)
    assert not await run_cleanup(late(), 0.01)
    await asyncio.sleep(0)
    assert late.ended


def test_the_first_of_nested_groups() -> None:
    first = ValueError("first")
    group = BaseExceptionGroup("", [BaseExceptionGroup("", [first]), KeyError("second")])
    assert extract_first_error(group) is first
    assert extract_first_error(first) is first


def test_no_task_is_started_that_nobody_owns() -> None:
    """`Tasks` and task groups alone start tasks; `gather` and `wait_for` await theirs."""
    bare = re.compile(r"\bensure_future\(|asyncio\.create_task\(|loop\(?\)?\.create_task\(")
    found = [
        f"{path.relative_to(CHECKOUT)}:{number}"
        for house in ("core", "services", "coordinator", "clients")
        for path in sorted((CHECKOUT / house).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if bare.search(line) and path.name != "tasks.py"
    ]
    assert found == []


async def test_a_cancellation_is_not_lost_where_a_work_fails_at_the_same_time() -> None:
    """Whoever goes on after the failure would otherwise live on."""
    fail = asyncio.Event()

    async def failing() -> None:
        await fail.wait()
        raise ValueError("it failed")

    async def follower() -> None:
        with contextlib.suppress(ValueError):
            async with run_in_background(failing()):
                await asyncio.Event().wait()
        await asyncio.Event().wait()

    task = asyncio.get_running_loop().create_task(follower())
    await asyncio.sleep(0.01)
    fail.set()
    await asyncio.sleep(0)  # the work fails; the group has not heard of it yet
    task.cancel()
    await asyncio.wait([task], timeout=10.0)
    assert task.cancelled()
