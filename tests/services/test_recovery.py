"""A coordinator that dies and is started again on its state: the run goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sottovoce_client.runs.run_client import STOPPED_BY_OPERATOR
from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper.capture_reader import open_capture
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_rpc.server import open_channel
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.examples import made_up, small_spec
from tests.gossip import gossip_spec
from tests.services.network import PATIENCE_S, missed_soon, network, refused
from tests.services.test_run import SHAPES, recorded

NAMES = ["ann", "ben", "cleo"]
CLOCKS: list[dict[str, Any]] = [
    {"window": 7},
    {"mode": "paced", "period_s": 0.01, "window": 5},
    {"mode": "data", "window": 5},
]


def spec_of(rounds: int = 300, **more: Any) -> RunSpec:
    clock = {"deadline_s": 100.0, **more.pop("clock", {})}
    return small_spec(rounds, NAMES, clock=clock, **more)


@pytest.mark.parametrize("clock", CLOCKS, ids=lambda clock: clock.get("mode", "free"))
async def test_a_run_goes_on_when_its_coordinator_is_started_again(tmp_path: Path, clock: dict[str, Any]) -> None:
    """Twice; the client goes on watching, and every message and decision is that of an undisturbed run."""
    spec = spec_of(clock=clock, capture="relay")
    data = made_up(spec)
    noise, said, last = recorded(spec, data, tmp_path / "noise.npz")
    async with network(tmp_path, NAMES, noise=noise, durable=True) as up:
        running = asyncio.ensure_future(up.run(spec, data))
        for rounds in (20, 60):
            await up.until("ann", LearnerState.RUNNING, rounds)
            await up.restart_coordinator()
        outcome = await running
        decisions = [
            up.learners[name]
            .require_session()
            .algorithm.decision(up.learners[name].require_session().state_machine.state)
            for name in NAMES
        ]
        capture = open_capture(outcome.capture_location or "")
    assert (outcome.state, outcome.detail) == ("finished", "")
    np.testing.assert_allclose(decisions, last, rtol=1e-12, atol=1e-12)
    assert capture.is_complete
    np.testing.assert_allclose(capture.read_transcript(SHAPES, 3).fields["y"], said, rtol=1e-12, atol=1e-12)


async def test_a_changing_network_goes_on_with_the_epochs_that_each_learner_lacks(tmp_path: Path) -> None:
    digraphs = {"sequence": {"kind": "random", "probability": 0.5, "seed": 1, "directed": True}, "weights": "in_degree"}
    clock = {"mode": "paced", "period_s": 0.01, "window": 10, "deadline_s": 100.0}
    spec = gossip_spec(digraphs, 200, NAMES, clock=clock)
    data = made_up(spec)
    noise, _, last = recorded(spec, data, tmp_path / "noise.npz")
    async with network(tmp_path, NAMES, noise=noise, durable=True) as up:
        running = asyncio.ensure_future(up.run(spec, data))
        for rounds in (20, 60, 100):
            await up.until("ann", LearnerState.RUNNING, rounds)
            await up.restart_coordinator()
        outcome = await running
        sessions = [up.learners[name].require_session() for name in NAMES]
        decisions = [session.algorithm.decision(session.state_machine.state) for session in sessions]
    assert (outcome.state, outcome.detail) == ("finished", "")
    np.testing.assert_allclose(decisions, last, rtol=1e-12, atol=1e-12)


async def test_runs_that_are_over_are_remembered(tmp_path: Path) -> None:
    spec, wire = spec_of(5), coordinator_pb2
    async with network(tmp_path, NAMES, durable=True) as up:
        outcomes = [await up.run(spec, made_up(spec)) for _ in range(2)]
        await up.restart_coordinator()
        async with open_channel(up.coordinator) as to:
            stub = coordinator_pb2_grpc.CoordinatorStub(to)
            listed = (await stub.ListRuns(wire.ListRunsRequest(), timeout=PATIENCE_S, wait_for_ready=True)).runs
            whole = await stub.GetRun(wire.GetRunRequest(run_id=outcomes[0].run_id), timeout=PATIENCE_S)
            await stub.StopRun(wire.StopRunRequest(run_id=outcomes[0].run_id), timeout=PATIENCE_S)
            none = await refused(stub.GetRun(wire.GetRunRequest(run_id="x"), timeout=PATIENCE_S))
        (last,) = [view async for view in up.watch(outcomes[0].run_id)]
        again = await up.run(spec, made_up(spec))
    assert [run.run_id for run in listed] == [each.run_id for each in reversed(outcomes)]
    assert {run.state for run in [*listed, last]} == {wire.RUN_STATE_FINISHED}
    assert (whole.n_features, whole.learners[0].status.rounds_done) == (3, 5)
    assert none.details() == f"no run 'x': the last one is {outcomes[1].run_id!r}"
    assert again.state == "finished"


async def test_a_run_whose_coordinator_kept_nothing_is_over_and_learners_are_told(tmp_path: Path) -> None:
    spec = spec_of(clock={"mode": "paced", "period_s": 0.05})
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 3)
        await up.restart_coordinator()
        with pytest.raises(Exception, match="coordinator"):
            await running
        for name in NAMES:
            await up.until(name, LearnerState.STOPPED)
        assert (await up.run(short := spec_of(5), made_up(short))).state == "finished"


async def test_a_run_that_is_stopped_while_its_coordinator_is_away_stops_when_it_is_back(tmp_path: Path) -> None:
    spec, stop = spec_of(10_000, clock={"mode": "paced", "period_s": 0.02}), asyncio.Event()
    async with network(tmp_path, NAMES, durable=True) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec_of(1_000)), stop))
        await up.until("ann", LearnerState.RUNNING, 5)
        old = up.coordinating
        assert old is not None and old.server is not None
        await old.server.server.stop(None)
        stop.set()
        await asyncio.sleep(0.2)
        await up.restart_coordinator()
        outcome = await running
    assert (outcome.state, outcome.detail) == ("stopped", STOPPED_BY_OPERATOR)


async def test_a_learner_that_died_with_its_coordinator_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(clock={"mode": "paced", "period_s": 0.05})
    async with network(tmp_path, NAMES, durable=True) as up:
        run = await up.start(spec, 3)
        feeding = asyncio.ensure_future(up.feed(run.run_id, spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 3)
        await up.leave("cleo")
        missed_soon(monkeypatch, 2.0)  # the others are back by then
        await up.restart_coordinator()
        end = await up.end(run.run_id)
        feeding.cancel()
    assert end.state == coordinator_pb2.RUN_STATE_FAILED
    assert end.detail.startswith("cleo is gone since round ")
