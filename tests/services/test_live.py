"""Live records: each is learned once, whoever dies, and rounds take what is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sottovoce_client.live.connect import connect_learner
from sottovoce_client.live.learner import ConnectedLearner
from sottovoce_core.arrays import FloatArray, as_floats
from sottovoce_core.spec import RunSpec
from sottovoce_learner.session import Session
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_wire.v1 import coordinator_pb2
from tests.examples import small_spec
from tests.services.network import Network, network

NAMES = ["ann", "ben", "cleo"]


def spec_of(rounds: int = 60, most: int = 1, **more: Any) -> RunSpec:
    data = {"source": "live", "features": 2, "batch_size": most}
    return small_spec(rounds, NAMES, data=data, **{"clock": {"window": 5, "deadline_s": 100.0}, **more})


def numbered(first: int, count: int) -> tuple[FloatArray, FloatArray]:
    """Records that can be told apart, all of norm 1 or less."""
    angle = np.arange(first, first + count) / 1_000.0
    return np.column_stack([np.cos(angle), np.sin(angle)]) / 2, as_floats(np.arange(first, first + count) % 2)


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[int, list[int]]]:
    """Numbers of the records that each round of each learner took; of a round that is learned again, the last."""
    found: dict[str, dict[int, list[int]]] = {name: {} for name in NAMES}
    learn = Session._update

    async def noting(session: Session, t: int) -> None:
        take = session.record_queue.take

        def taking(t: int, records: int | None = None) -> Any:
            batch = take(t, records)
            angles = np.arctan2(batch.features[:, 1], batch.features[:, 0]) * 1_000.0
            found[session.assignment.name][t] = np.rint(angles).astype(int).tolist()
            return batch

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(session.record_queue, "take", taking)
            await learn(session, t)

    monkeypatch.setattr(Session, "_update", noting)
    return found


def all_of(rounds: dict[int, list[int]]) -> list[int]:
    return [number for t in sorted(rounds) for number in rounds[t]]


@asynccontextmanager
async def connected(up: Network, name: str, **more: Any) -> AsyncIterator[ConnectedLearner]:
    async with connect_learner(up.addresses[name], source="stream", name="", **more) as learner:
        yield learner


async def fed(up: Network, name: str, count: int, at_a_time: int = 1) -> None:
    async with connected(up, name) as learner:
        for first in range(learner.position + 1, count, at_a_time):
            size = min(at_a_time, count - first)
            assert await learner.feed(*numbered(first, size)) == size


async def test_each_record_is_learned_once_in_its_order(
    tmp_path: Path, learned: dict[str, dict[int, list[int]]]
) -> None:
    async with network(tmp_path, NAMES) as up:
        run_id = (await up.start(spec_of(), 3)).run_id
        await asyncio.gather(fed(up, "ann", 60), fed(up, "ben", 60, 7), fed(up, "cleo", 60, 60))
        end = await up.end(run_id)
    assert (end.state, end.detail) == (coordinator_pb2.RUN_STATE_FINISHED, "")
    assert {name: all_of(rounds) for name, rounds in learned.items()} == {key: list(range(60)) for key in NAMES}
    assert all(each.status.records == 60 and each.status.records_waiting == 0 for each in end.learners)


async def test_a_paced_round_takes_what_is_there(tmp_path: Path, learned: dict[str, dict[int, list[int]]]) -> None:
    """Nothing, some, and no more than it may."""
    spec = spec_of(40, most=4, clock={"mode": "paced", "period_s": 0.02})
    async with network(tmp_path, NAMES) as up:
        run_id = (await up.start(spec, 3)).run_id
        await fed(up, "ann", 30, 30)
        await fed(up, "ben", 2)
        end = await up.end(run_id)
    assert (end.state, end.detail) == (coordinator_pb2.RUN_STATE_FINISHED, "")
    assert [all_of(learned[name]) for name in NAMES] == [list(range(30)), [0, 1], []]
    assert max(map(len, learned["ann"].values())) == 4
    assert sorted(learned["cleo"]) == list(range(40)), "a round without records is a round"


async def test_a_learner_that_dies_goes_on_where_it_stood(
    tmp_path: Path, learned: dict[str, dict[int, list[int]]]
) -> None:
    spec = spec_of(120, most=2, clock={"mode": "data", "window": 5, "deadline_s": 100.0})
    async with network(tmp_path, NAMES) as up:
        run_id = (await up.start(spec, 3)).run_id
        feeding = [
            asyncio.ensure_future(fed(up, name, 240, 4)) for name in ("ann", "cleo")
        ]  # even: each round takes two
        address = up.addresses["ben"]
        for rounds in (10, 40, 80):
            async with connected(up, "ben") as learner:
                first = learner.position + 1
                await learner.feed(*numbered(first, 60))
                await up.until("ben", LearnerState.RUNNING, rounds)
            await up.leave("ben")
            await up.join("ben")
        await up.until("ben", LearnerState.RUNNING)
        await fed(up, "ben", 240, 20)
        await asyncio.gather(*feeding)
        end = await up.end(run_id)
    assert address != up.addresses["ben"]
    assert (end.state, end.detail) == (coordinator_pb2.RUN_STATE_FINISHED, "")
    assert {name: all_of(rounds) for name, rounds in learned.items()} == {key: list(range(240)) for key in NAMES}
