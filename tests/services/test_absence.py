"""Learners that are gone, and come back or do not: who is named, and when the run ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sottovoce_core.spec import RunSpec
from sottovoce_learner.peers.outbox import NeighbourLink
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_wire.v1 import coordinator_pb2
from tests.examples import made_up, small_spec
from tests.services.network import PATIENCE_S, given_up_soon, network

NAMES = ["ann", "ben", "cleo", "dan"]
PACED = {"mode": "paced", "period_s": 0.02}


def endless(**clock: Any) -> RunSpec:
    return small_spec(100_000, NAMES, clock={"window": 5, "deadline_s": PATIENCE_S, **clock})


@pytest.mark.parametrize("clock", [{}, PACED], ids=["free", "paced"])
async def test_a_learner_that_is_gone_is_named_at_once_and_fails_the_run_at_its_deadline(
    tmp_path: Path, clock: dict[str, Any]
) -> None:
    """Under a paced clock, too, whose ticks go on for the others."""
    spec = endless(**clock, deadline_s=2.0)
    data = made_up(small_spec(200, NAMES))
    async with network(tmp_path, NAMES) as up:
        run = await up.start(spec, 3)
        feeding = asyncio.ensure_future(up.feed(run.run_id, spec, data))
        await up.until("cleo", LearnerState.RUNNING, 3)
        await up.leave("cleo")
        async with asyncio.timeout(PATIENCE_S):
            views = [view async for view in up.watch(run.run_id)]
        feeding.cancel()  # it may wait for cleo still
        await asyncio.gather(feeding, return_exceptions=True)
    away = [[each.status.learner for each in view.learners if each.HasField("disconnected_at")] for view in views]
    assert ["cleo"] in away and views[away.index(["cleo"])].state == coordinator_pb2.RUN_STATE_RUNNING
    assert views[-1].state == coordinator_pb2.RUN_STATE_FAILED
    assert views[-1].detail.startswith("cleo is gone since round ")


@pytest.mark.parametrize("clock", [{}, PACED], ids=["free", "paced"])
async def test_a_channel_on_which_nothing_passes_is_named_by_its_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: dict[str, Any]
) -> None:
    """Ben and cleo are there, and do not hear each other: their neighbours wait, and are not blamed."""
    say = NeighbourLink.queue
    spec = endless(**clock)
    data = made_up(small_spec(200, NAMES))
    async with network(tmp_path, NAMES) as up:
        run = await up.start(spec, 3)
        feeding = asyncio.ensure_future(up.feed(run.run_id, spec, data))
        await up.until("cleo", LearnerState.RUNNING, 3)
        cut = {id(up.learners["ben"].require_session().links[2]), id(up.learners["cleo"].require_session().links[1])}
        monkeypatch.setattr(
            NeighbourLink, "queue", lambda own, t, frame: None if id(own) in cut else say(own, t, frame)
        )
        given_up_soon(monkeypatch)
        end = await up.end(run.run_id)
        await asyncio.gather(feeding, return_exceptions=True)
    assert end.state == coordinator_pb2.RUN_STATE_FAILED
    assert end.detail.startswith("no messages pass between ben and cleo in round ")


async def test_a_learner_without_records_is_named(tmp_path: Path) -> None:
    spec = endless(deadline_s=2.0)
    async with network(tmp_path, NAMES) as up:
        run = await up.start(spec, 3)
        await up.feed(run.run_id, spec, made_up(small_spec(3, NAMES)), but=["cleo"])
        end = await up.end(run.run_id)
    assert end.detail.startswith(("cleo has no records for round 0", "cleo failed: waited 2 s for records in round 0"))
