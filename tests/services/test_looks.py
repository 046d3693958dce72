"""A run is shown after ever more rounds, whatever the time: curves of short runs have points."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sottovoce_client.runs.feeder import make_batch
from sottovoce_coordinator import service as coordinator_service
from sottovoce_learner import coordinator_client
from tests.examples import made_up, small_spec
from tests.services.network import PATIENCE_S, network

ROUNDS, NAMES = 20, ["ann", "ben"]


async def test_whoever_watches_a_short_run_sees_its_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports and views by time are ten minutes apart; each round's records come when the round before was seen."""
    monkeypatch.setattr(coordinator_service, "WATCH_INTERVAL_S", 600.0)
    monkeypatch.setattr(coordinator_client, "REPORT_INTERVAL_S", 600.0)
    spec = small_spec(ROUNDS, NAMES, clock={"mode": "data", "deadline_s": 100.0})
    data, seen = made_up(spec), list[int]()
    async with network(tmp_path, NAMES) as up:
        run = await up.start_another(spec, 3)

        async def bring(t: int) -> None:
            for own, learner in zip(data.learners, up.learners.values(), strict=True):
                await learner.require_session().ingestor.feed(make_batch(own, "s", t, rounds=1))

        watching = up.watch(run.run_id)
        await anext(watching)
        for t in range(8):
            await bring(t)
            async with asyncio.timeout(PATIENCE_S):
                while not seen or seen[-1] <= t:
                    view = await anext(watching)
                    seen.append(min(each.status.rounds_done for each in view.learners))
        for t in range(8, ROUNDS):
            await bring(t)
        async with asyncio.timeout(PATIENCE_S):
            seen += [min(each.status.rounds_done for each in view.learners) async for view in watching]
    assert {*range(1, 9), ROUNDS} <= set(seen) and seen == sorted(seen)
