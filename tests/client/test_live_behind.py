"""Records that are handed over and not waited for: their order, their bound, and that none is silently lost."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from sottovoce_client.live.sync_learner import MAX_PENDING_RECORDS, _BackgroundSender
from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import FailedPrecondition, SottovoceError, Unavailable


class Learner:
    """Keeps records once it may; fails where it is told to."""

    def __init__(self, fails_at: int | None = None, error: Exception | None = None) -> None:
        self.kept, self.calls = list[float](), 0
        self.may = asyncio.Event()
        self._fails_at, self._error = fails_at, error

    async def bring(self, features: FloatArray, labels: FloatArray) -> None:
        assert features.shape == (len(labels), 1)
        await self.may.wait()
        if self._error is not None and self.calls == self._fails_at:
            raise self._error
        self.calls += 1
        self.kept += features[:, 0].tolist()


def one(number: float) -> tuple[FloatArray, FloatArray]:
    return np.full((1, 1), number), np.zeros(1)


async def test_what_waits_goes_together_and_in_order() -> None:
    learner = Learner()
    behind = _BackgroundSender(learner.bring, asyncio.get_running_loop())
    for k in range(100):
        behind.put(*one(k))
    learner.may.set()
    await asyncio.to_thread(behind.flush)
    assert learner.kept == list(range(100))
    assert learner.calls <= 2
    behind.put(*one(100))
    await asyncio.to_thread(behind.flush)
    assert learner.kept[-1] == 100


async def test_who_hands_over_too_many_waits() -> None:
    learner, handed = Learner(), list[int]()
    behind = _BackgroundSender(learner.bring, asyncio.get_running_loop())

    def program() -> None:
        for k in range(3 * MAX_PENDING_RECORDS):
            behind.put(*one(k))
            handed.append(k)
        behind.flush()

    running = asyncio.ensure_future(asyncio.to_thread(program))
    while len(handed) < MAX_PENDING_RECORDS:  # noqa: ASYNC110 - of another thread
        await asyncio.sleep(0.001)
    assert not running.done() and len(handed) <= 2 * MAX_PENDING_RECORDS + 1
    learner.may.set()
    await running
    assert learner.kept == list(range(3 * MAX_PENDING_RECORDS))


@pytest.mark.parametrize(
    ("error", "kind"),
    [(Unavailable("it is away"), Unavailable), (SottovoceError("the run is over"), FailedPrecondition)],
)
async def test_a_failure_is_raised_by_every_later_call_and_nothing_follows_it(
    error: SottovoceError, kind: type[SottovoceError]
) -> None:
    learner = Learner(1, error)
    learner.may.set()
    behind = _BackgroundSender(learner.bring, asyncio.get_running_loop())
    behind.put(*one(0))
    await asyncio.to_thread(behind.flush)
    behind.put(*one(1))
    text = f"some of the last 1 records are not stored: {error}"
    with pytest.raises(kind, match=text):
        await asyncio.to_thread(behind.flush)
    with pytest.raises(kind, match=text):
        behind.put(*one(2))
    assert learner.kept == [0]
    behind.end()  # it was told


async def test_a_failure_that_nobody_was_told_is_told_at_the_end() -> None:
    learner = Learner(0, Unavailable("it is away"))
    learner.may.set()
    behind = _BackgroundSender(learner.bring, asyncio.get_running_loop())
    behind.put(*one(0))
    with pytest.raises(Unavailable, match="records are not stored: it is away"):
        await asyncio.to_thread(behind.end)


async def test_who_waits_for_room_is_told_of_a_failure() -> None:
    learner = Learner(0, Unavailable("it is away"))
    behind = _BackgroundSender(learner.bring, asyncio.get_running_loop())
    behind.put(*one(0))
    while behind._waiting:  # noqa: ASYNC110 - until it is on its way
        await asyncio.sleep(0)
    behind.put(np.zeros((MAX_PENDING_RECORDS, 1)), np.zeros(MAX_PENDING_RECORDS))
    waiting = asyncio.ensure_future(asyncio.to_thread(behind.put, *one(1)))
    learner.may.set()
    with pytest.raises(Unavailable, match="records are not stored"):
        await waiting


async def test_many_threads_hand_over() -> None:
    learner = Learner()
    learner.may.set()
    behind = _BackgroundSender(learner.bring, asyncio.get_running_loop())

    def program(first: int) -> None:
        for k in range(first, first + 200):
            behind.put(*one(k))

    def all_of_them() -> None:
        threads = [threading.Thread(target=program, args=(1_000 * k,)) for k in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        behind.flush()

    await asyncio.to_thread(all_of_them)
    assert sorted(learner.kept) == sorted(1_000 * k + i for k in range(4) for i in range(200))
    for k in range(4):
        own = [each for each in learner.kept if each // 1_000 == k]
        assert own == sorted(own)
