"""One learner of a name, on one state folder: others are refused, with what to do."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sottovoce_core.errors import CorruptStateError, FailedPrecondition, PermissionDenied
from sottovoce_learner import service as learner_service
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.service import Learner
from sottovoce_learner.storage import state_folder
from sottovoce_learner.storage.state_folder import LearnerPaths, StoreIdentity
from sottovoce_learner.storage.store import Ledger
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_rpc.server import open_channel
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.examples import made_up, small_spec
from tests.services.network import PATIENCE_S, Network, network, refused, until_charged

NAMES = ["ann", "ben"]


async def follows(up: Network, name: str, folder: Path) -> None:
    """Start a learner in this process and let it follow, until it is refused."""
    learner = Learner(LearnerConfig(name, up.coordinator, state_folder=folder))
    address = await learner.start()
    try:
        await asyncio.wait_for(learner.follow(address), PATIENCE_S)
    finally:
        await learner.stop()


async def moved_away(up: Network, name: str, to: Path) -> None:
    """Stop a learner, and copy its state folder."""
    await up.leave(name)
    await up.until_gone(name)
    shutil.copytree(up.folder / "journals", to)


async def rebind(up: Network, name: str) -> None:
    async with open_channel(up.coordinator) as to:
        request = coordinator_pb2.RebindLearnerRequest(learner=name)
        await coordinator_pb2_grpc.CoordinatorStub(to).RebindLearner(request, timeout=PATIENCE_S)


async def test_a_learner_with_another_state_folder_is_refused_until_an_operator_lets_it_in(tmp_path: Path) -> None:
    """While the first is there, and after it has left: the run of the first is not disturbed.

    What was spent is in no ledger then: nothing is sent until the owner has charged it.
    """
    spec = small_spec(100, NAMES, clock={"mode": "paced", "period_s": 0.01, "deadline_s": 100.0})
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING)
        with pytest.raises(PermissionDenied, match="has joined with another state folder than this one"):
            await follows(up, "ann", tmp_path / "other")
        assert (await running).state == "finished"
        here = await refused(rebind(up, "ann"))
        await up.leave("ann")
        with pytest.raises(PermissionDenied, match="sottovoce rebind ann"):
            await follows(up, "ann", tmp_path / "other")
        await rebind(up, "ann")
        up.folder = tmp_path / "new"
        await up.join("ann")
        forgotten = await up.run(spec, made_up(spec))
        await up.leave("ann")
        Ledger(tmp_path / "new" / "journals").repair("ann", 1.5)
        await up.join("ann")
        assert (await up.run(spec, made_up(spec))).state == "finished"
    assert (forgotten.state, forgotten.statuses[0].rounds_committed) == ("failed", 0)
    assert "must know all rounds that were sent, got 0 of 100 in run" in forgotten.detail
    assert "is connected, with the state folder that it has: stop it first" in (here.details() or "")


async def test_every_start_is_another_incarnation_and_an_old_folder_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "journals"
    async with network(tmp_path, ["ann"]) as up:
        spec = small_spec(5, ["ann"])
        first = StoreIdentity.load_or_create(state, "ann")
        for _ in range(2):
            assert (await up.run(spec, made_up(spec))).state == "finished"
            await up.leave("ann")
            await up.join("ann")
        assert (await up.run(spec, made_up(spec))).state == "finished"
        assert StoreIdentity.load_or_create(state, "ann") == StoreIdentity("ann", first.store_id, 3)
        await up.leave("ann")
        StoreIdentity("ann", first.store_id).write_incarnation(1, state)
        with pytest.raises(FailedPrecondition, match="is outdated: it has incarnation 1 and 0 rounds, and must have 3"):
            await follows(up, "ann", state)


SLOW = {"mode": "paced", "period_s": 0.02, "deadline_s": 100.0}
HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "log cut": (
        lambda folder: next(folder.glob("*@ann/*.log")).write_bytes(b""),
        "is lost, or its first segment is damaged",
    ),
    "mark lost": (lambda folder: (folder / "ann.mark").unlink(), r"the mark .* is lost or damaged"),
    "ledger lost": (lambda folder: (folder / "ann.runs").unlink(), r"the ledger .* is lost, cut or damaged"),
    "identity damaged": (lambda folder: (folder / "ann.identity").write_text("{}"), "is damaged"),
}


@pytest.mark.parametrize(("harm", "text"), HARMS.values(), ids=HARMS)
async def test_a_damaged_folder_is_refused_before_it_joins_and_costs_nobody_a_run(
    tmp_path: Path, harm: Callable[[Path], object], text: str
) -> None:
    spec, state, aside = small_spec(60, NAMES, clock=SLOW), tmp_path / "journals", tmp_path / "aside"
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 5)
        await moved_away(up, "ann", aside)
        harm(state)
        with pytest.raises(CorruptStateError, match=text):
            await follows(up, "ann", state)
        shutil.copytree(aside, state, dirs_exist_ok=True)  # files that are still there keep their place
        if "mark" in text:
            Ledger(state).accept_moved_folder("ann")
        await up.join("ann")
        outcome = await running
    assert (outcome.state, outcome.detail) == ("finished", "")


async def test_a_newer_folder_is_refused_before_it_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_spec(60, NAMES, clock=SLOW)
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 5)
        await up.leave("ann")
        with monkeypatch.context() as older:
            older.setattr(state_folder, "FORMAT", 0)
            with pytest.raises(CorruptStateError, match="take a newer Sottovoce"):
                await follows(up, "ann", tmp_path / "journals")
        await up.join("ann")
        assert (await running).state == "finished"


async def test_a_copy_is_refused_before_it_joins_and_goes_on_where_its_owner_says_so(tmp_path: Path) -> None:
    """The round of a failed run was told as 0 before; here the run does not fail at all."""
    spec, copy = small_spec(60, NAMES, clock=SLOW), tmp_path / "moved" / "journals"
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 5)
        await moved_away(up, "ann", copy)
        way_out = f"`sottovoce ledger --adopt-copy --state {copy} --learner ann`"
        with pytest.raises(CorruptStateError, match=f"this state folder is a copy.* {re.escape(way_out)}"):
            await follows(up, "ann", copy)
        Ledger(copy).accept_moved_folder("ann")
        up.folder = tmp_path / "moved"
        await up.join("ann")
        outcome = await running
    assert (outcome.state, outcome.detail) == ("finished", "")
    assert [status.rounds_committed for status in outcome.statuses] == [60, 60]


@pytest.mark.parametrize("other", [False, True], ids=["no log", "the log of another run"])
async def test_a_folder_of_before_the_run_is_refused_before_it_joins(tmp_path: Path, *, other: bool) -> None:
    """Of the same incarnation: only what was said in the run tells that it is an old one. It would begin the run anew."""
    spec, state = small_spec(60, NAMES, clock=SLOW), tmp_path / "journals"
    async with network(tmp_path, NAMES) as up:
        await up.until_here("ann")
        earlier = await up.start_another(spec, 3) if other else None
        before = {path: path.read_bytes() for path in state.rglob("*") if path.is_file() and "ann" in str(path)}
        if earlier is not None:
            async with open_channel(up.coordinator) as to:
                request = coordinator_pb2.StopRunRequest(run_id=earlier.run_id)
                await coordinator_pb2_grpc.CoordinatorStub(to).StopRun(request, timeout=PATIENCE_S)
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 5)
        await moved_away(up, "ann", tmp_path / "aside")
        shutil.rmtree(next(state.glob("*@ann")))
        for path in state.glob("ann.*"):
            path.unlink()
        for path, content in before.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        if (state / "ann.mark").exists():
            Ledger(state).accept_moved_folder("ann")
        with pytest.raises(
            FailedPrecondition, match=r"has no log of the run that this learner is in, and \d+ rounds were sent in it"
        ):
            await follows(up, "ann", state)
        shutil.rmtree(state / next(state.glob("*@ann"), Path("none")).name, ignore_errors=True)
        shutil.copytree(tmp_path / "aside", state, dirs_exist_ok=True)
        Ledger(state).accept_moved_folder("ann")
        await up.join("ann")
        outcome = await running
    assert (outcome.state, outcome.detail) == ("finished", "")


async def test_a_learner_whose_folder_is_deleted_says_nothing_more_and_ends(tmp_path: Path) -> None:
    spec, state = small_spec(100_000, NAMES, clock={"deadline_s": 100.0}), tmp_path / "own" / "journals"
    async with network(tmp_path, ["ben"]) as up:
        up.folder = tmp_path / "own"
        await up.join("ann")
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 5)
        said = up.learners["ann"].status.rounds_committed
        shutil.rmtree(state)
        outcome = await running
        learner = up.learners["ann"]
        with pytest.raises(CorruptStateError, match="was deleted, moved, replaced or cut"):
            await asyncio.wait_for(up._following["ann"], PATIENCE_S)
        assert learner.status.rounds_committed == said
    assert outcome.state == "failed" and "the state folder must stay where it is" in outcome.detail
    assert not state.exists()


async def test_a_learner_whose_folder_is_deleted_between_runs_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its next run would begin another ledger, in which nothing is spent."""
    monkeypatch.setattr(learner_service, "FOLDER_CHECK_INTERVAL_S", 0.05)
    async with network(tmp_path, ["ann"]) as up:
        await up.until_here("ann")
        shutil.rmtree(tmp_path / "journals")
        with pytest.raises(CorruptStateError, match="was deleted, moved, replaced or cut"):
            await asyncio.wait_for(up._following["ann"], PATIENCE_S)
    assert not (tmp_path / "journals").exists()


@pytest.mark.parametrize("capture", ["none", "relay", "mirror"])
async def test_a_ledger_that_was_set_back_between_runs_is_known_by_the_coordinator_or_by_captures(
    tmp_path: Path, capture: str
) -> None:
    """Of the same incarnation, and whole: without either it would have forgotten what a run has cost."""
    spec, state = small_spec(5, NAMES, capture=capture), tmp_path / "journals"
    async with network(tmp_path, NAMES) as up:
        assert (await up.run(spec, made_up(spec))).state == "finished"
        await until_charged(LearnerPaths(state, "ann"))
        before = {path: path.read_bytes() for path in state.glob("ann.*")}
        second = await up.run(spec, made_up(spec))
        await up.leave("ann")
        for path, content in before.items():
            path.write_bytes(content)
        if capture != "none":  # this one remembers the runs
            await up.restart_coordinator()
        await up.join("ann")
        forgotten = await up.run(spec, made_up(spec))
        await up.leave("ann")
        Ledger(state).repair("ann", second.statuses[0].epsilon_spent)
        await up.join("ann")
        assert (await up.run(spec, made_up(spec))).state == "finished"
        await up.leave("ann")
        (*_, spent) = [line.epsilon_spent for line in Ledger(state).list_entries("ann") if line.run_id == "repaired"]
    assert forgotten.state == "failed"
    assert f"got 0 of 5 in run {second.run_id}: the state folder was set back" in forgotten.detail
    assert spent == second.statuses[0].epsilon_spent > 0
