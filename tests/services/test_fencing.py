"""One learner of a name, on one state folder: others are refused, with what to do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sottovoce.errors import NotReady, StrangerError
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.identity import Identity
from sottovoce_learner.service import Learner
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_rpc.server import channel
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.examples import made_up, small_spec
from tests.services.network import PATIENCE_S, Network, network, refused

NAMES = ["ann", "ben"]


async def follows(up: Network, name: str, folder: Path) -> None:
    """Start a learner in this process and let it follow, until it is refused."""
    learner = Learner(LearnerConfig(name, up.coordinator, state_folder=folder))
    address = await learner.start()
    try:
        await asyncio.wait_for(learner.follow(address), PATIENCE_S)
    finally:
        await learner.stop()


async def rebind(up: Network, name: str) -> None:
    async with channel(up.coordinator) as to:
        request = coordinator_pb2.RebindLearnerRequest(learner=name)
        await coordinator_pb2_grpc.CoordinatorStub(to).RebindLearner(request, timeout=PATIENCE_S)


async def test_a_learner_with_another_state_folder_is_refused_until_an_operator_lets_it_in(tmp_path: Path) -> None:
    """While the first is there, and after it has left: the run of the first is not disturbed."""
    spec = small_spec(100, NAMES, clock={"mode": "paced", "period_s": 0.01, "deadline_s": 100.0})
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING)
        with pytest.raises(StrangerError, match="has joined with another state folder than this one"):
            await follows(up, "ann", tmp_path / "other")
        assert (await running).state == "finished"
        here = await refused(rebind(up, "ann"))
        await up.leave("ann")
        with pytest.raises(StrangerError, match="sottovoce rebind ann"):
            await follows(up, "ann", tmp_path / "other")
        await rebind(up, "ann")
        up.folder = tmp_path / "new"
        await up.join("ann")
        assert (await up.run(spec, made_up(spec))).state == "finished"
    assert "is here, with the state folder that it has: stop it first" in (here.details() or "")


async def test_every_start_is_another_incarnation_and_an_old_folder_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "journals"
    async with network(tmp_path, ["ann"]) as up:
        spec = small_spec(5, ["ann"])
        first = Identity.of(state, "ann")
        for _ in range(2):
            assert (await up.run(spec, made_up(spec))).state == "finished"
            await up.leave("ann")
            await up.join("ann")
        assert (await up.run(spec, made_up(spec))).state == "finished"
        assert Identity.of(state, "ann") == Identity("ann", first.store, 3)
        await up.leave("ann")
        Identity("ann", first.store, 1).write(state)
        with pytest.raises(NotReady, match="is an old one: it knows incarnation 1 and 0 rounds, and must know 3"):
            await follows(up, "ann", state)
