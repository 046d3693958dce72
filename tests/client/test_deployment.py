"""Experiments on services that are up, from Python: coordinator and learners in this event loop, over real gRPC on loopback."""

from __future__ import annotations

from pathlib import Path

import pytest

from sottovoce_client import deployment
from sottovoce_client.deployment import connect
from sottovoce_client.runs.run_client import STOPPED_BY_OPERATOR
from sottovoce_core.errors import SpecError, Unavailable
from tests.core.test_experiment import small
from tests.services.network import network

NAMES = ["ann", "ben", "cleo"]
QUICK = {"durability": "process", "clock": {"window": 5, "deadline_s": 100.0}}


async def test_an_experiment_is_started_watched_and_ends(tmp_path: Path) -> None:
    experiment = small(tmp_path, **QUICK, telemetry={"predict": True})
    async with network(tmp_path, NAMES) as up, connect(up.coordinator) as there:
        started = await there.start(experiment)
        looks = [progress async for progress in started.watch()]
        outcome = await started.wait_for_outcome()

        assert [progress async for progress in started.watch()] == []

    assert (outcome.state, started.state) == ("finished", "finished")
    assert looks == list(outcome.progress)
    assert looks[-1].rounds == (6, 6, 6)
    assert looks[-1].epsilon == pytest.approx([experiment.guarantee(name).epsilon() for name in NAMES])
    n = len(experiment.records.test_labels)
    assert all(labels is not None and labels.shape == (n,) for labels in outcome.predictions)


async def test_a_run_is_stopped_when_told(tmp_path: Path) -> None:
    # Far more rounds than pass before it is told; paced, so that the machine's speed does not matter.
    endless = small(tmp_path, rounds=5000, **{**QUICK, "clock": {"mode": "paced", "period_s": 0.05}})
    endless = endless.replace(**{"data.reuse": True})
    async with network(tmp_path, NAMES) as up, connect(up.coordinator) as there:
        outcome = await (await there.start(endless)).stop()

    assert (outcome.state, outcome.detail) == ("stopped", STOPPED_BY_OPERATOR)


async def test_leaving_the_block_stops_what_was_started_in_it(tmp_path: Path) -> None:
    endless = small(tmp_path, rounds=5000, **{**QUICK, "clock": {"mode": "paced", "period_s": 0.05}})
    endless = endless.replace(**{"data.reuse": True})
    async with network(tmp_path, NAMES) as up:
        started = []

        async def caller() -> None:
            async with connect(up.coordinator) as there:
                started.append(await there.start(endless))
                raise RuntimeError("of the caller's own")

        with pytest.raises(RuntimeError, match="of the caller's own"):
            await caller()

        assert [each.state for each in started] == ["stopped"]


async def test_what_is_refused_is_raised_at_the_start(tmp_path: Path) -> None:
    async with network(tmp_path, NAMES) as up, connect(up.coordinator) as there:
        with pytest.raises(SpecError, match=r"data\.source must be"):
            await there.start(small(tmp_path).replace(**{"data.source": "nowhere"}))


async def test_nobody_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "CONNECT_TIMEOUT_S", 0.2)
    with pytest.raises(Unavailable, match=r"cannot reach the coordinator at 127\.0\.0\.1:1 within"):
        async with connect("127.0.0.1:1"):
            pass
