"""A coordinator whose state folder is lost in the middle of a run: another one takes the run up, as all its learners know it."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import grpc
import pytest

from sottovoce_client.runs import feeder
from sottovoce_client.runs.run_client import run_on_services
from sottovoce_coordinator import run_launcher
from sottovoce_coordinator.run_state import RunState
from sottovoce_coordinator.service import Coordinator
from sottovoce_core.errors import FailedPrecondition
from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper.capture_reader import open_capture
from sottovoce_learner import coordinator_client
from sottovoce_learner.session import Session
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_rpc.server import open_channel
from sottovoce_rpc.specs import spec_to_wire
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.examples import made_up
from tests.gossip import gossip_spec
from tests.services.network import PATIENCE_S, Network, given_up_soon, network, refused, said_rounds
from tests.services.test_fencing import follows
from tests.services.test_resume import resume
from tests.services.test_run import recorded
from tests.services.test_several_runs import Work, begun, ends_as_simulated, serving, work

NAMES = ["ann", "ben", "cleo"]  # ann opens all her streams: she is found again wherever she is started
PACED = {"mode": "paced", "period_s": 0.01}
CLOCKS: list[dict[str, Any]] = [{}, PACED, {"mode": "data", "window": 5}]
ROUNDS = 150


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners that are refused ask again soon."""
    monkeypatch.setattr(coordinator_client, "_MAX_REJOIN_PAUSE_S", 0.5)


async def recover(up: Network, run_id: str, spec: RunSpec, n_features: int = 3) -> coordinator_pb2.Run:
    async with open_channel(up.coordinator) as to:
        request = coordinator_pb2.RecoverRunRequest(run_id=run_id, spec=spec_to_wire(spec), n_features=n_features)
        call = coordinator_pb2_grpc.CoordinatorStub(to).RecoverRun
        return await call(request, timeout=PATIENCE_S, wait_for_ready=True)


async def not_recovered(up: Network, run_id: str, spec: RunSpec, n_features: int = 3) -> str:
    """Why a run is not taken up."""
    failure = await refused(recover(up, run_id, spec, n_features))
    assert failure.code() in (
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
    )
    return failure.details() or ""


async def fed(up: Network, run_id: str, each: Work, rounds: int = 64) -> None:
    """Until the first learner has done so many rounds, for which there are records, in whole batches of the feeder's."""
    some = tuple(
        replace(own, order=own.order[:rounds], offsets=own.offsets[: rounds + 1]) for own in each.data.learners
    )
    await up.feed(run_id, each.spec, replace(each.data, learners=some))
    await up.until("ann", LearnerState.RUNNING, rounds)


async def until_heard(up: Network, name: str, t: int) -> None:
    """Wait until the neighbours have heard what a learner says in a round."""
    index = NAMES.index(name)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if all(own.inbox.get_due_round(index) > t for own in sessions(up) if own.assignment.index != index):
                return
            await asyncio.sleep(0.01)


async def lost(up: Network, each: Work, *gone: str) -> str:
    """A run in the middle of which its coordinator is killed, and its state folder deleted; and some learners leave."""
    (run_id,) = await begun(up, each)
    await fed(up, run_id, each)
    for name in gone:
        await up.leave(name)
    await up.restart_coordinator(lose=True)
    return run_id


async def its_end(up: Network, run_id: str, each: Work) -> coordinator_pb2.Run:
    """With the other records."""
    await up.feed(run_id, each.spec, each.data)
    return await up.end(run_id)


def sessions(up: Network) -> list[Session]:
    return [up.learners[name].require_session() for name in NAMES]


@pytest.mark.parametrize("clock", CLOCKS, ids=lambda clock: clock.get("mode", "free"))
async def test_a_run_goes_on_as_its_learners_know_it(tmp_path: Path, clock: dict[str, Any]) -> None:
    """They never stop, and remember what they have heard, whatever the term of who does not know their run.

    And the coordinator keeps the run from then on.
    """
    first = work(tmp_path, NAMES, 1, ROUNDS, clock=clock)
    async with serving(tmp_path, first, durable=True) as up:
        run_id = await lost(up, first)
        before = sessions(up)
        await up.restart_coordinator()
        again = await recover(up, run_id, first.spec)
        await up.until("cleo", LearnerState.RUNNING, 64)
        await up.restart_coordinator()
        end = await its_end(up, run_id, first)
        ends_as_simulated(up, first, end)
        assert sessions(up) == before
    assert (again.run_id, again.durable, again.HasField("ended_at")) == (run_id, True, False)
    assert [each.status.rounds_committed for each in end.learners] == [ROUNDS] * 3


async def test_learners_that_were_told_to_end_or_were_started_again_go_on_from_their_logs(tmp_path: Path) -> None:
    """As where their coordinator kept nothing; one of them is elsewhere then."""
    first = work(tmp_path, NAMES, 1, ROUNDS)
    async with serving(tmp_path, first) as up:
        assert up.coordinating is not None
        up.coordinating.config = replace(up.coordinating.config, state=tmp_path / "coordinator")
        run_id = await lost(up, first)
        await up.until("ben", LearnerState.STOPPED)
        await up.until("cleo", LearnerState.STOPPED)
        await up.leave("ann")
        await up.join("ann", first.noise)
        await recover(up, run_id, first.spec)
        ends_as_simulated(up, first, await its_end(up, run_id, first))


async def test_a_changing_network_goes_on_with_the_epochs_that_each_learner_lacks(tmp_path: Path) -> None:
    """Who never stopped knows them, and who was started again does not."""
    digraphs = {"sequence": {"kind": "random", "probability": 0.5, "seed": 1, "directed": True}, "weights": "in_degree"}
    spec = gossip_spec(digraphs, ROUNDS, NAMES, clock={"window": 10, "deadline_s": 100.0})
    data = made_up(spec)
    first = Work(spec, data, *recorded(spec, data, tmp_path / "noise.npz"))
    async with serving(tmp_path, first, durable=True) as up:
        run_id = await lost(up, first, "ben")
        await up.join("ben", first.noise)
        await recover(up, run_id, spec)
        ends_as_simulated(up, first, await its_end(up, run_id, first))


async def test_a_run_that_was_taken_up_before_goes_on_in_that_attempt(tmp_path: Path) -> None:
    """What comes late from an earlier one must not count."""
    first = work(tmp_path, NAMES, 1, ROUNDS)
    async with serving(tmp_path, first, durable=True) as up:
        (run_id,) = await begun(up, first)
        await fed(up, run_id, first)
        assert up.coordinating is not None
        course = up.coordinating._runs.find_active("ann")
        assert course is not None
        up.coordinating._controller.end_run(course, RunState.FAILED, "to be taken up again")
        await resume(up, run_id)
        await fed(up, run_id, first, 128)
        await up.restart_coordinator(lose=True)
        again = await recover(up, run_id, first.spec)
        ends_as_simulated(up, first, await its_end(up, run_id, first))
    assert again.attempt == 1


async def test_its_capture_goes_on(tmp_path: Path) -> None:
    first = work(tmp_path, NAMES, 1, ROUNDS, capture="relay")
    async with serving(tmp_path, first, durable=True) as up:
        run_id = await lost(up, first)
        again = await recover(up, run_id, first.spec)
        end = await its_end(up, run_id, first)
        ends_as_simulated(up, first, end)
    assert (again.capture_error, end.capture_error) == ("", "")
    assert open_capture(end.capture_location).is_complete


async def test_what_nobody_captures_any_more_is_said(tmp_path: Path) -> None:
    first = work(tmp_path, NAMES, 1, ROUNDS, capture="mirror")
    async with serving(tmp_path, first, durable=True) as up:
        run_id = await lost(up, first)
        assert up.coordinating is not None
        up.coordinating._captures.address = None
        again = await recover(up, run_id, first.spec)
        end = await its_end(up, run_id, first)
    assert (end.state, end.detail) == (coordinator_pb2.RUN_STATE_FINISHED, "")
    assert again.capture_error == end.capture_error
    assert again.capture_error.startswith(
        "nothing is captured since the run was resumed: this coordinator was given no"
    )


async def test_who_takes_a_run_up_brings_the_records_that_its_learners_lack(tmp_path: Path) -> None:
    first = work(tmp_path, NAMES, 1, ROUNDS)
    async with serving(tmp_path, first, durable=True) as up:
        (run_id,) = await begun(up, first)
        await up.feed(run_id, first.spec, first.data, but=["cleo"])
        await up.restart_coordinator(lose=True)
        going = run_on_services(up.coordinator, first.spec, first.data, lambda *seen: None, recover=run_id)
        outcome = await asyncio.wait_for(going, PATIENCE_S)
        ends_as_simulated(up, first, await up.end(run_id))
    assert (outcome.run_id, outcome.state) == (run_id, "finished")


async def test_whoever_watches_a_run_that_was_lost_is_told_what_to_do(tmp_path: Path) -> None:
    first = work(tmp_path, NAMES, 1, 1000, clock=PACED)
    async with serving(tmp_path, first, durable=True) as up:
        running = asyncio.ensure_future(up.run(first.spec, first.data))
        await up.until("ann", LearnerState.RUNNING, 3)
        await up.restart_coordinator(lose=True)
        with pytest.raises(
            FailedPrecondition,
            match=r"there are no runs; if its .* `sottovoce run SPEC --recover run-[0-9a-f]+` recovers",
        ):
            await running


async def test_nobody_goes_on_before_all_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is not is named, and waited for the next time."""
    first = work(tmp_path, NAMES, 1, ROUNDS)
    async with serving(tmp_path, first, durable=True) as up:
        run_id = await lost(up, first, "ben")
        with monkeypatch.context() as patch:
            patch.setattr(run_launcher, "_JOIN_TIMEOUT_S", 1.5)
            missing = await not_recovered(up, run_id, first.spec)
        going = asyncio.ensure_future(recover(up, run_id, first.spec))
        await up.join("ben", first.noise)
        await asyncio.wait_for(going, PATIENCE_S)
        ends_as_simulated(up, first, await its_end(up, run_id, first))
    assert missing.startswith("1 of 3 learners have not joined: ben. Start each under the name that")


async def test_a_run_is_taken_up_with_what_it_was_started_with(tmp_path: Path) -> None:
    """By the ledger of every learner; whoever errs may try again, for nobody was told anything."""
    first = work(tmp_path, NAMES, 1, ROUNDS)
    other = first.spec.model_copy(update={"rounds": 101})
    async with serving(tmp_path, first, durable=True) as up:
        run_id = await lost(up, first)
        spec = await not_recovered(up, run_id, other)
        features = await not_recovered(up, run_id, first.spec, 4)
        name = await not_recovered(up, "small-0", first.spec)
        await recover(up, run_id, first.spec)
        ends_as_simulated(up, first, await its_end(up, run_id, first))
    assert spec == features
    assert spec.startswith(
        f"run {run_id} has another spec or other records, by the ledgers of ann, ben, cleo: recover it"
    )
    got = ", ".join(f"that of run {run_id!r} with {each}" for each in NAMES)
    assert name.startswith(f"each learner must have the log of run 'small-0', got {got}: ")


async def test_a_learner_without_the_log_of_a_run_does_not_begin_it_anew(tmp_path: Path) -> None:
    """Its state folder is lost, too: it would say rounds again."""
    first = work(tmp_path, NAMES, 1, ROUNDS)
    async with serving(tmp_path, first, durable=True) as up:
        run_id = await lost(up, first, "cleo")
        up.folder = tmp_path / "new"
        await up.join("cleo", first.noise)
        assert (await not_recovered(up, run_id, first.spec)).startswith(
            f"each learner must have the log of run {run_id!r}, got none with cleo: "
        )


async def test_a_learner_that_was_set_back_at_the_same_time_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one round, which no log has: who has heard it never stopped, and remembers it."""
    first, journals = work(tmp_path, NAMES, 1, clock={"deadline_s": 10.0}), tmp_path / "journals"
    monkeypatch.setattr(feeder, "_MAX_ROUNDS_PER_BATCH", 1)
    async with serving(tmp_path, first, durable=True) as up:
        (run_id,) = await begun(up, first)
        await fed(up, run_id, first, 20)
        await until_heard(up, "ben", 20)
        earlier = {file: file.read_bytes() for file in journals.rglob("*ben*/*") if file.is_file()}
        earlier |= {file: file.read_bytes() for file in journals.glob("ben.*")}
        before = said_rounds(journals, "ben")
        await fed(up, run_id, first, 21)
        await until_heard(up, "ben", 21)
        await up.leave("ben")
        await up.restart_coordinator(lose=True)
        for file, content in earlier.items():
            file.write_bytes(content)
        await up.join("ben", first.noise)
        await recover(up, run_id, first.spec)
        await up.feed(run_id, first.spec, first.data, but=["ann", "cleo"])
        given_up_soon(monkeypatch)
        end = await up.end(run_id)
    assert end.state == coordinator_pb2.RUN_STATE_FAILED
    assert (len(before), said_rounds(journals, "ben")) == (21, before)


async def set_back_together(up: Network, first: Work) -> str:
    """A run that is captured; then its coordinator is lost, and the folders of all learners are set back, where they are.

    The noise is the operating system's: what is sent again is sent with other bytes.
    """
    (run_id,) = await begun(up, first)
    await fed(up, run_id, first, 20)
    journals = up.folder / "journals"
    earlier = {file: file.read_bytes() for file in journals.rglob("*") if file.is_file()}
    await fed(up, run_id, first, 40)
    for name in NAMES:
        await up.leave(name)
    await up.restart_coordinator(lose=True)
    for file, content in earlier.items():
        file.write_bytes(content)
    for name in NAMES:
        await up.join(name)
    return run_id


@pytest.mark.parametrize("capture", ["relay", "mirror"])
async def test_learners_that_were_set_back_together_are_known_by_the_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capture: str
) -> None:
    """It is asked before anybody goes on; an eavesdropper that does not answer is waited for by the operator."""
    monkeypatch.setattr(feeder, "_MAX_ROUNDS_PER_BATCH", 1)
    first = work(tmp_path, NAMES, 1, ROUNDS, capture=capture)
    async with network(tmp_path, NAMES, durable=True) as up:
        run_id = await set_back_together(up, first)
        assert up.coordinating is not None
        captures = up.coordinating._captures
        with monkeypatch.context() as away:
            away.setattr(captures, "address", "127.0.0.1:1")
            unanswered = await refused(recover(up, run_id, first.spec))
        old = await not_recovered(up, run_id, first.spec)
        said = [len(said_rounds(tmp_path / "journals", name)) for name in NAMES]
    assert unanswered.code() is grpc.StatusCode.UNAVAILABLE
    assert re.search(
        rf"each learner must have all captured rounds of run '{run_id}' in its log, got "
        r"ann \(2\d of 4\d rounds\), ben \(2\d of 4\d rounds\), cleo .*"
        "`sottovoce ledger --repair --state FOLDER --learner NAME --charge",
        old,
    )
    assert max(said) <= 22


async def test_a_coordinator_that_was_set_back_with_its_learners_asks_the_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a machine is by a snapshot. Nobody asks for a recovery then."""
    monkeypatch.setattr(feeder, "_MAX_ROUNDS_PER_BATCH", 1)
    first = work(tmp_path, NAMES, 1, ROUNDS, capture="relay")
    async with network(tmp_path, NAMES, durable=True) as up:
        (run_id,) = await begun(up, first)
        await fed(up, run_id, first, 20)
        folders = tmp_path / "journals", tmp_path / "coordinator"
        earlier = {file: file.read_bytes() for each in folders for file in each.rglob("*") if file.is_file()}
        await fed(up, run_id, first, 40)
        for name in NAMES:
            await up.leave(name)
        old = await up.cut_coordinator()
        for file, content in earlier.items():
            file.write_bytes(content)
        up.coordinating = Coordinator(replace(old.config, listen=up.coordinator))
        await up.coordinating.start()
        for name in NAMES:
            with pytest.raises(
                FailedPrecondition,
                match=r"is outdated: it has incarnation 1 and 2\d rounds, and must have 1 and 4\d",
            ):
                await follows(up, name, tmp_path / "journals")


@pytest.mark.parametrize("capture", ["relay", "mirror"])
async def test_the_first_contradiction_that_is_recorded_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capture: str
) -> None:
    monkeypatch.setattr(feeder, "_MAX_ROUNDS_PER_BATCH", 1)
    monkeypatch.setattr(run_launcher.RunLauncher, "_require_newest", AsyncMock())  # as if the capture had not known it
    first = work(tmp_path, NAMES, 1, 5_000, capture=capture, clock=PACED)
    async with network(tmp_path, NAMES, durable=True) as up:
        run_id = await set_back_together(up, first)
        await recover(up, run_id, first.spec)
        feeding = asyncio.ensure_future(up.feed(run_id, first.spec, first.data))
        end = await up.end(run_id)
        feeding.cancel()
    assert end.state == coordinator_pb2.RUN_STATE_FAILED
    assert end.detail.startswith("a round was sent with two contents, whose difference no noise hides: ")
    assert re.search(r": \w+ to \w+, round [234]\d: .* other bytes.* set back\?$", end.detail)


async def test_a_run_that_nobody_takes_up_ends_when_patience_does(tmp_path: Path) -> None:
    """Whoever joins a coordinator that cannot lead the run is as alone as before."""
    first = work(tmp_path, NAMES, 1, ROUNDS, clock={"outage_timeout_s": 2.0})
    async with serving(tmp_path, first, durable=True) as up:
        run_id = await lost(up, first)
        feeding = asyncio.ensure_future(up.feed(run_id, first.spec, first.data))

        async def detail(name: str) -> str:
            """The detail as soon as it has failed: as one that is in no run, it is let in again, and no longer alone."""
            await up.until(name, LearnerState.FAILED)
            return up.learners[name]._build_public_status().detail

        details = await asyncio.gather(*(detail(name) for name in NAMES))
        feeding.cancel()
    own, alone = zip(*(detail.split("; ", 1) for detail in details), strict=True)
    assert [each.rpartition(" ")[0] for each in own] == ["waited 2 s for a lease of the coordinator in round"] * 3
    assert all(
        re.match(r"it has had no command from its coordinator since round \d+: .* --recover", each) for each in alone
    )


async def test_what_is_known_is_not_taken_up_again(tmp_path: Path) -> None:
    """Not when two operators ask at once, either."""
    first = work(tmp_path, NAMES, 1, ROUNDS)
    async with serving(tmp_path, first, durable=True) as up:
        run_id = await lost(up, first)
        asked = recover(up, run_id, first.spec), recover(up, run_id, first.spec)
        answers: tuple[Any, ...] = await asyncio.gather(*asked, return_exceptions=True)
        (error,) = [each for each in answers if isinstance(each, grpc.aio.AioRpcError)]
        known = await not_recovered(up, run_id, first.spec)
        ends_as_simulated(up, first, await its_end(up, run_id, first))
        over = await not_recovered(up, run_id, first.spec)
    assert run_id in (error.details() or "")
    assert known.startswith(f"run {run_id} is known here and is not lost; it is running. ")
    assert over.startswith(f"run {run_id} is known here and is not lost; it is finished. ")


async def test_a_run_is_taken_up_by_a_coordinator_that_keeps_it(tmp_path: Path) -> None:
    first = work(tmp_path, NAMES, 1, ROUNDS)
    async with serving(tmp_path, first) as up:
        run_id = await lost(up, first)
        assert "start this one with --state FOLDER" in await not_recovered(up, run_id, first.spec)
