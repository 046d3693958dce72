"""Several runs of one coordinator at the same time, each on learners of its own: none has a part in how another one goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from sottovoce_coordinator import run_registry
from sottovoce_core.arrays import FloatArray
from sottovoce_core.data import PlacedData
from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper.capture_reader import open_capture
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_rpc.server import open_channel
from sottovoce_rpc.specs import spec_to_wire
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.examples import made_up, small_spec
from tests.services.network import PATIENCE_S, Network, missed_soon, network, refused
from tests.services.test_run import SHAPES, recorded

PACED = {"mode": "paced", "period_s": 0.02}


@dataclass(frozen=True)
class Work:
    """What one operator has learned, and what must come of it."""

    spec: RunSpec
    data: PlacedData
    noise: Path
    said: FloatArray
    last: FloatArray


def work(folder: Path, names: list[str], seed: int, rounds: int = 40, **more: Any) -> Work:
    clock = {"window": 7, "deadline_s": 100.0, **more.pop("clock", {})}
    spec = small_spec(rounds, names, clock=clock, **more)
    data = made_up(spec, seed=seed)
    return Work(spec, data, *recorded(spec, data, folder / f"noise-{seed}.npz"))


@asynccontextmanager
async def serving(folder: Path, *works: Work, durable: bool = False) -> AsyncIterator[Network]:
    """Services for all of them."""
    async with network(folder, [], durable=durable) as up:
        for each in works:
            for name in each.spec.names:
                await up.join(name, each.noise)
        yield up


def ends_as_simulated(up: Network, each: Work, end: coordinator_pb2.Run) -> None:
    """The messages, where they were captured, and the decisions, to 1e-12."""
    assert (end.state, end.detail) == (coordinator_pb2.RUN_STATE_FINISHED, "")
    sessions = [up.learners[name].require_session() for name in each.spec.names]
    assert {session.assignment.run_id for session in sessions} == {end.run_id}
    decisions = [session.algorithm.decision(session.state_machine.state) for session in sessions]
    np.testing.assert_allclose(decisions, each.last, rtol=1e-12, atol=1e-12)
    if each.spec.capture != "none":
        capture = open_capture(end.capture_location)
        assert (capture.is_complete, capture.metadata["run_id"]) == (True, end.run_id)
        said = capture.read_transcript(SHAPES, each.spec.n_learners).fields["y"]
        np.testing.assert_allclose(said, each.said, rtol=1e-12, atol=1e-12)


async def begun(up: Network, *works: Work) -> list[str]:
    """Start them all; their records are still to come."""
    return [(await up.start(each.spec, each.data.n_features)).run_id for each in works]


async def fed_to_their_ends(up: Network, run_ids: list[str], *works: Work) -> list[coordinator_pb2.Run]:
    pairs = list(zip(run_ids, works, strict=True))
    await asyncio.gather(*(up.feed(run_id, each.spec, each.data) for run_id, each in pairs))
    return [await up.end(run_id) for run_id in run_ids]


async def listed(up: Network) -> dict[str, int]:
    """State of every run that is remembered, the newest first."""
    async with open_channel(up.coordinator) as to:
        ask = coordinator_pb2_grpc.CoordinatorStub(to).ListRuns
        answer = await ask(coordinator_pb2.ListRunsRequest(), timeout=PATIENCE_S, wait_for_ready=True)
    return {run.run_id: run.state for run in answer.runs}


async def until_wanted(up: Network, learner: str) -> None:
    """Wait until a run is being started that needs a learner."""
    assert up.coordinating is not None
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if learner in up.coordinating._runs._starting:
                return
            await asyncio.sleep(0.01)


async def start_refused(up: Network, spec: RunSpec) -> grpc.aio.AioRpcError:
    async with open_channel(up.coordinator) as to:
        request = coordinator_pb2.StartRunRequest(spec=spec_to_wire(spec), n_features=3)
        return await refused(coordinator_pb2_grpc.CoordinatorStub(to).StartRun(request, timeout=PATIENCE_S))


# ---- side by side ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("captures", [("relay", "mirror"), ("relay", "relay")], ids="-".join)
async def test_two_runs_at_once_end_each_as_it_was_simulated(tmp_path: Path, captures: tuple[str, str]) -> None:
    """No record comes before both are under way; each has a clock, and a capture, of its own."""
    first = work(tmp_path, ["ann", "ben"], 1, 60, capture=captures[0])
    second = work(tmp_path, ["cleo", "dan", "eve"], 2, 40, capture=captures[1], clock={"mode": "data"})
    async with serving(tmp_path, first, second) as up:
        run_ids = await begun(up, first, second)
        assert set((await listed(up)).values()) <= {
            coordinator_pb2.RUN_STATE_CONNECTING,
            coordinator_pb2.RUN_STATE_RUNNING,
        }
        ends = await fed_to_their_ends(up, run_ids, first, second)
        for each, end in zip((first, second), ends, strict=True):
            ends_as_simulated(up, each, end)
    assert ends[0].capture_location != ends[1].capture_location


async def test_a_run_that_needs_a_learner_of_another_one_is_refused_at_once(tmp_path: Path) -> None:
    """Even where its other learners are not there: nobody waits for them."""
    first = work(tmp_path, ["ann", "ben"], 1)
    async with serving(tmp_path, first) as up:
        (run_id,) = await begun(up, first)
        one = await start_refused(up, small_spec(5, ["zoe", "ben"]))
        both = await start_refused(up, small_spec(5, ["ben", "ann"]))
        (end,) = await fed_to_their_ends(up, [run_id], first)
        ends_as_simulated(up, first, end)
        again = work(tmp_path, ["ann", "ben"], 1, 5)
        assert (await up.run(again.spec, again.data)).state == "finished"
    way_out = f"wait for its end, stop it first (`sottovoce runs stop {run_id}`), or take other learners"
    assert one.code() is both.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert one.details() == f"ben is in run {run_id}, which is under way: {way_out}"
    assert both.details() == f"ben, ann are in run {run_id}, which is under way: {way_out}"


async def test_a_run_that_fails_or_is_stopped_leaves_another_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing, stopped = (small_spec(100_000, names, clock={"deadline_s": 5.0}) for names in (["fay", "gus"], ["hal"]))
    first = work(tmp_path, ["ann", "ben"], 1, 60, capture="relay")
    async with serving(tmp_path, first) as up:
        for name in (*failing.names, *stopped.names):
            await up.join(name)
        (run_id,) = await begun(up, first)
        others = [(await up.start(spec, 3)).run_id for spec in (failing, stopped)]
        few = small_spec(9, failing.names)
        await up.feed(others[0], few, made_up(few), but=["gus"])  # fay has nobody to wait for but gus
        missed_soon(monkeypatch)
        await up.leave("gus")
        async with open_channel(up.coordinator) as to:
            request = coordinator_pb2.StopRunRequest(run_id=others[1], reason="enough")
            await coordinator_pb2_grpc.CoordinatorStub(to).StopRun(request, timeout=PATIENCE_S)
        ends = [await up.end(each) for each in others]
        assert (await up.status("ann")).state is LearnerState.RUNNING
        (end,) = await fed_to_their_ends(up, [run_id], first)
        ends_as_simulated(up, first, end)
    assert [each.state for each in ends] == [coordinator_pb2.RUN_STATE_FAILED, coordinator_pb2.RUN_STATE_STOPPED]
    assert ends[0].detail.startswith("gus is gone since round 0")
    assert ends[1].detail == "enough"


# ---- started together ------------------------------------------------------------------------------------------------


async def test_two_operators_start_at_the_same_time(tmp_path: Path) -> None:
    """One of them waits for a learner that has not joined; the other, whose learners have, does not wait for that."""
    first, second = work(tmp_path, ["ann", "ben"], 1), work(tmp_path, ["cleo", "dan"], 2)
    async with serving(tmp_path, second) as up:
        await up.join("ann", first.noise)
        waiting = asyncio.ensure_future(up.start(first.spec, 3))
        await until_wanted(up, "ben")
        (run_id,) = await begun(up, second)
        assert not waiting.done()
        await up.join("ben", first.noise)
        run_ids = [(await waiting).run_id, run_id]
        for each, end in zip((first, second), await fed_to_their_ends(up, run_ids, first, second), strict=True):
            ends_as_simulated(up, each, end)


@pytest.mark.parametrize("joins", [True, False], ids=["begins", "fails"])
async def test_who_wants_a_learner_of_a_run_that_is_being_started_waits_for_how_that_goes(
    tmp_path: Path, joins: bool
) -> None:
    """It is refused where that run begins, and begins where it does not: no learner is ever in both."""
    first = small_spec(5, ["ann", "ben"], clock={"deadline_s": 100.0 if joins else 0.5})
    second = work(tmp_path, ["ann", "cleo"], 2)
    async with serving(tmp_path, second) as up:
        waiting = asyncio.ensure_future(up.start(first, 3))
        await until_wanted(up, "ben")
        if joins:
            late = asyncio.ensure_future(start_refused(up, second.spec))
            await up.join("ben")
            run_id = (await waiting).run_id
            assert ((await late).details() or "").startswith(f"ann is in run {run_id}, which is under way")
        else:
            ends = await fed_to_their_ends(up, await begun(up, second), second)
            ends_as_simulated(up, second, ends[0])
            with pytest.raises(grpc.aio.AioRpcError, match="1 of 2 learners have not joined: ben"):
                await waiting


async def test_an_operator_that_gives_up_holds_no_learner(tmp_path: Path) -> None:
    first = work(tmp_path, ["ann"], 1)
    async with serving(tmp_path, first) as up:
        waiting = asyncio.ensure_future(up.start(small_spec(5, ["ann", "ben"], clock={"deadline_s": 100.0}), 3))
        await until_wanted(up, "ann")
        waiting.cancel()
        (end,) = await fed_to_their_ends(up, await begun(up, first), first)
        ends_as_simulated(up, first, end)


# ---- a coordinator that is started again -----------------------------------------------------------------------------


async def test_all_runs_go_on_when_their_coordinator_is_started_again(tmp_path: Path) -> None:
    first = work(tmp_path, ["ann", "ben"], 1, 200, clock={**PACED, "period_s": 0.01}, capture="relay")
    second = work(tmp_path, ["cleo", "dan", "eve"], 2, 100, clock=PACED, capture="mirror")
    async with serving(tmp_path, first, second, durable=True) as up:
        running = [asyncio.ensure_future(up.run(each.spec, each.data)) for each in (first, second)]
        await up.until("cleo", LearnerState.RUNNING, 5)
        await up.restart_coordinator()
        assert up.coordinating is not None and len(up.coordinating._runs.active_runs) == 2
        async with asyncio.timeout(PATIENCE_S):
            outcomes = [await each for each in running]
        for each, outcome in zip((first, second), outcomes, strict=True):
            ends_as_simulated(up, each, await up.end(outcome.run_id))


async def test_no_run_that_is_under_way_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others end meanwhile, and when the coordinator is started again."""
    monkeypatch.setattr(run_registry, "MAX_ENDED_RUNS", 2)
    first, short = work(tmp_path, ["ann"], 1), work(tmp_path, ["ben"], 2, 5)
    async with serving(tmp_path, first, short, durable=True) as up:
        (run_id,) = await begun(up, first)
        over = [(await up.run(short.spec, short.data)).run_id for _ in range(4)]
        before = await listed(up)
        await up.restart_coordinator()
        assert list(await listed(up)) == list(before) == [over[3], over[2], run_id]
        (end,) = await fed_to_their_ends(up, [run_id], first)
        ends_as_simulated(up, first, end)
