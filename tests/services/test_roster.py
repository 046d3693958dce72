"""Learners that join late, leave early or pause, as services."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest

from sottovoce_client.runs import run_client
from sottovoce_client.runs.evaluate import summarise
from sottovoce_client.runs.feeder import feed
from sottovoce_client.runs.run_client import Outcome
from sottovoce_coordinator import run_controller
from sottovoce_coordinator.capture_client import CaptureClient
from sottovoce_coordinator.run_controller import QUIESCE_COMMAND, RunController
from sottovoce_coordinator.run_registry import ManagedRun
from sottovoce_coordinator.run_state import RunState, RunStateMachine
from sottovoce_coordinator.store import CoordinatorStore
from sottovoce_core.errors import CaptureError, Unavailable
from sottovoce_core.network.participation_schedule import OfflineInterval
from sottovoce_core.noise import RecordedNoise, Recorder, SeededNoise
from sottovoce_core.runs.participation import require_valid_reconfiguration
from sottovoce_core.runs.replay import replay
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper.capture_reader import _AllowedChannels, open_capture
from sottovoce_learner.service import Learner
from sottovoce_learner.session import Session
from sottovoce_learner.storage import run_log
from sottovoce_learner.storage.store import Ledger
from sottovoce_rpc.commands import Command
from sottovoce_rpc.learner_status import LearnerState, LearnerStatus, WaitCause
from sottovoce_rpc.server import open_channel
from sottovoce_rpc.specs import spec_from_wire
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.examples import made_up, small_spec
from tests.services.network import PATIENCE_S, Network, given_up_soon, missed_soon, network, refused
from tests.services.test_every_algorithm import FIELD

NAMES = ["ann", "ben", "cleo", "dora"]
ABSENCES = [
    {"learner": "dora", "until_round": 10},
    {"learner": "ben", "first_round": 20},
    {"learner": "cleo", "first_round": 5, "until_round": 9},
]
PLACE: dict[str, Any] = {"learners": NAMES, "rounds": 30, "offline_intervals": ABSENCES, "capture": "relay"}
COMPLETE = {"graph": "complete", "weights": "metropolis"}
DIRECTED = {"graph": {"kind": "erdos_renyi", "probability": 1.0, "directed": True}}
ALSO: dict[str, Any] = {
    "dola": {"topology": COMPLETE},
    "dpps": {"topology": {**DIRECTED, "weights": "out_degree"}},
    "dpsr": {"topology": {**DIRECTED, "weights": "in_degree"}},
}
CASES = {
    "ldp-dol": small_spec(**{**PLACE, "topology": COMPLETE}),
    "ldp-dol, copied": small_spec(**{**PLACE, "topology": COMPLETE, "capture": "mirror"}),
    **{
        run["name"]: RunSpec.model_validate(
            {**FIELD["common"], **run, **PLACE, "offline_intervals": ABSENCES[:2], **ALSO[run["name"]]}
        )
        for run in FIELD["runs"]
        if run["name"] in ALSO
    },
}


def transcript_of(outcome: Outcome, run: Run) -> Transcript:
    return open_capture(outcome.capture_location or "").read_transcript(
        run.field_shapes, run.spec.n_learners, run.network
    )


def noise_for(run: Run, folder: Path) -> tuple[Path, Transcript]:
    """A file of noise, and what is said with it."""
    recorder = Recorder(SeededNoise(1))
    said = Transcript.from_rounds(step.message for step in simulate_rounds(run, made_up(run.spec), recorder))
    np.savez(
        folder / "noise.npz",
        **cast(dict[str, Any], {name: np.stack(each) for name, each in recorder.noise_by_field.items()}),
    )
    return folder / "noise.npz", said


@pytest.mark.parametrize("spec", CASES.values(), ids=CASES)
async def test_a_run_with_absences_is_what_the_simulator_says(tmp_path: Path, spec: RunSpec) -> None:
    run, data = build_run(spec, 3), made_up(spec)
    noise, simulated = noise_for(run, tmp_path)
    async with network(tmp_path, spec.names, noise=noise) as up:
        outcome = await up.run(spec, data)
    assert outcome.state == "finished"
    assert open_capture(outcome.capture_location or "").is_complete
    said = transcript_of(outcome, run)
    for name, values in simulated.fields.items():
        np.testing.assert_allclose(said.fields[name], values, rtol=1e-9, atol=1e-12)
    away = np.isnan(next(iter(said.fields.values()))[:, :, 0, 0])
    there = np.array([spec.participation.participant_mask(t) for t in range(spec.rounds)])
    assert (away == ~there).all()
    for i, learned in enumerate(data.learners):
        promised = run.guarantee(i)
        losses = replay(run, said, i, [learned, learned.with_use(0, -learned.features[0], 1.0 - learned.labels[0])])
        assert len(losses.realised_losses) == spec.rounds
        assert np.abs(losses.total).max() <= promised.cumulative_epsilon[-1]
        assert outcome.statuses[i].epsilon_spent == pytest.approx(promised.epsilon(), rel=1e-12)
    for reported in summarise(
        run, data, outcome
    ).learners:  # rounds in which nobody spoke are not rounds that nobody heard
        assert reported.record_use_loss is not None and len(reported.record_use_loss.cumulative_loss) == spec.rounds


async def test_who_joins_late_need_not_be_there_before(tmp_path: Path) -> None:
    """The run begins without it; the others wait for it in its first round."""
    spec = CASES["ldp-dol"]
    run, data = build_run(spec, 3), made_up(spec)
    noise, simulated = noise_for(run, tmp_path)
    async with network(tmp_path, NAMES[:3], noise=noise) as up:
        running = asyncio.ensure_future(up.run(spec, data))
        await up.until("ann", LearnerState.RUNNING, 10)
        await up.join("dora", noise)
        outcome = await running
    assert outcome.state == "finished", outcome.detail
    said = transcript_of(outcome, run)
    np.testing.assert_allclose(said.fields["y"], simulated.fields["y"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["ben", "cleo", "dora"])
@pytest.mark.parametrize("t", [3, 7, 15, 22])
async def test_who_died_goes_on_from_its_log_with_absences(tmp_path: Path, name: str, t: int) -> None:
    """Before, in and after its own absence, and those of others."""
    spec = CASES["ldp-dol, copied"]
    run, data = build_run(spec, 3), made_up(spec)
    noise, simulated = noise_for(run, tmp_path)
    async with network(tmp_path, NAMES, noise=noise) as up:
        running = asyncio.ensure_future(up.run(spec, data))
        await up.until("ann", LearnerState.RUNNING, t)
        await up.leave(name)
        await up.until_gone(name)
        await up.join(name, noise)
        outcome = await running
    assert outcome.state == "finished", outcome.detail
    said = transcript_of(outcome, run)
    np.testing.assert_allclose(said.fields["y"], simulated.fields["y"], rtol=1e-9, atol=1e-12)


# ---- leaving and joining a run under way -----------------------------------------------------------------------------

OPEN = {"topology": COMPLETE, "offline_intervals": (), "rounds": 60, "capture": "mirror", "clock": {"window": 8}}


async def ask(up: Network, name: str, request: Any) -> coordinator_pb2.Run:
    async with open_channel(up.coordinator) as to:
        call = getattr(coordinator_pb2_grpc.CoordinatorStub(to), name)
        answer: coordinator_pb2.Run = await call(request, timeout=PATIENCE_S)
        return answer


async def amended_spec(up: Network, run_id: str) -> RunSpec:
    run = await ask(up, "GetRun", coordinator_pb2.GetRunRequest(run_id=run_id))
    return spec_from_wire(run.spec, imports=True)


def as_amended(spec: RunSpec, noise: Path) -> tuple[Run, Transcript]:
    """What the simulator says with this noise, by the spec as it is in the end."""
    run = build_run(spec, 3)
    with np.load(noise) as drawn:
        source = RecordedNoise({name: drawn[name] for name in drawn})
    return run, Transcript.from_rounds(step.message for step in simulate_rounds(run, made_up(spec), source))


async def test_who_leaves_is_heard_to_its_last_round(tmp_path: Path) -> None:
    spec = small_spec(**{**PLACE, **OPEN})
    noise, _ = noise_for(build_run(spec, 3), tmp_path)
    async with network(tmp_path, NAMES, noise=noise) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 10)
        run_id = up.learners["ann"].status.run_id
        await ask(up, "LeaveRun", coordinator_pb2.LeaveRunRequest(run_id=run_id, learner="dora"))
        left = await amended_spec(up, run_id)
        outcome = await running
    assert outcome.state == "finished", outcome.detail
    (absence,) = left.offline_intervals or ()
    assert absence.learner == "dora" and 10 <= absence.first_round < 60 and not absence.missed_from_rounds
    assert outcome.offline_intervals == left.offline_intervals
    run, simulated = as_amended(left, noise)
    said = transcript_of(outcome, run)
    np.testing.assert_allclose(said.fields["y"], simulated.fields["y"], rtol=1e-9, atol=1e-12)
    assert said.rounds == 60


async def test_who_joins_takes_part_from_then_on(tmp_path: Path) -> None:
    spec = small_spec(**{**PLACE, **OPEN, "offline_intervals": [{"learner": "dora"}]})
    everybody = spec.model_copy(update={"offline_intervals": ()})
    noise, _ = noise_for(build_run(everybody, 3), tmp_path)
    async with network(tmp_path, NAMES, noise=noise) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec), place_data=made_up))
        await up.until("ann", LearnerState.RUNNING, 10)
        run_id = up.learners["ann"].status.run_id
        await ask(up, "JoinRun", coordinator_pb2.JoinRunRequest(run_id=run_id, learner="dora"))
        joined = await amended_spec(up, run_id)
        outcome = await running
    assert outcome.state == "finished", outcome.detail
    (absence,) = joined.offline_intervals or ()
    assert absence.until_round is not None and 10 <= absence.until_round < 60
    run, simulated = as_amended(joined, noise)
    said = transcript_of(outcome, run)
    np.testing.assert_allclose(said.fields["y"], simulated.fields["y"], rtol=1e-9, atol=1e-12)


DROP = {"mode": "paced", "period_s": 0.01, "window": 8, "staleness": "drop", "deadline_s": PATIENCE_S}
LOSABLE = {
    "ldp-dol": small_spec(**{**PLACE, **OPEN, "clock": DROP}),
    **{
        name: RunSpec.model_validate({**spec.model_dump(mode="json"), **OPEN, "topology": spec.topology, "clock": DROP})
        for name, spec in CASES.items()
        if name in ALSO
    },
}


@pytest.mark.parametrize("after", [run_log.SNAPSHOT_AFTER_BYTES, 0], ids=["by logs", "by snapshots"])
@pytest.mark.parametrize(
    ("name", "t"), [("ldp-dol", 1), ("ldp-dol", 10), ("ldp-dol", 57), *((name, 20) for name in ALSO)]
)
async def test_a_run_goes_on_without_a_learner_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, t: int, after: int
) -> None:
    """What its neighbours have not learned of it is left out, and the spec says so: the simulator says the same."""
    monkeypatch.setattr(run_log, "SNAPSHOT_AFTER_BYTES", after)
    spec = LOSABLE[name]
    if t == 10:  # by the deadline of the spec
        spec = spec.model_copy(update={"clock": spec.clock.model_copy(update={"deadline_s": 2.0})})
    noise, _ = noise_for(build_run(spec, 3), tmp_path)
    async with network(tmp_path, NAMES, noise=noise) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("dora", LearnerState.RUNNING, t)
        if t != 10:
            missed_soon(monkeypatch)
        await up.leave("dora")
        outcome = await running
    assert outcome.state == "finished", outcome.detail
    (absence,) = outcome.offline_intervals
    assert absence.learner == "dora" and set(absence.missed_from_rounds) == set(NAMES[:3])
    run, simulated = as_amended(spec.model_copy(update={"offline_intervals": outcome.offline_intervals}), noise)
    for field, said in transcript_of(outcome, run).fields.items():
        assert len(said) == 60
        np.testing.assert_allclose(said[:, :3], simulated.fields[field][:, :3], rtol=1e-9, atol=1e-12)
        heard = ~np.isnan(said[:, 3, 0, 0])
        np.testing.assert_allclose(said[heard, 3], simulated.fields[field][heard, 3], rtol=1e-9, atol=1e-12)
        assert heard[: max(absence.missed_from_rounds.values()) - 1].all()


async def test_who_is_gone_when_all_others_have_finished_is_lost_in_the_end(tmp_path: Path) -> None:
    """It has said all that it had to say: the others need nothing of it."""
    spec = LOSABLE["ldp-dol"]
    learn = Session._update

    async with network(tmp_path, NAMES) as up:
        with pytest.MonkeyPatch.context() as patch:

            async def slowly(self: Session, t: int) -> None:
                if self.assignment.name == "dora" and t == 59:
                    await asyncio.sleep(PATIENCE_S)
                await learn(self, t)

            patch.setattr(Session, "_update", slowly)
            missed_soon(patch)
            running = asyncio.ensure_future(up.run(spec, made_up(spec)))
            await up.until("ann", LearnerState.FINISHED, 60)
            await up.leave("dora")
            outcome = await running
    assert outcome.state == "finished", outcome.detail
    (absence,) = outcome.offline_intervals
    assert (absence.learner, absence.first_round, dict(absence.missed_from_rounds)) == (
        "dora",
        60,
        dict.fromkeys(NAMES[:3], 60),
    )


async def test_a_learner_that_is_lost_is_told_so_and_free_for_other_runs(tmp_path: Path) -> None:
    """It may come back; the run goes on without it, and its ledger says what it has cost."""
    spec = small_spec(**{**PLACE, **OPEN, "clock": {**DROP, "period_s": 0.04}})  # other runs end before it does
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("dora", LearnerState.RUNNING, 10)
        run_id = up.learners["ann"].status.run_id
        await up.leave("dora")
        await up.until_gone("dora")
        await ask(up, "LeaveRun", coordinator_pb2.LeaveRunRequest(run_id=run_id, learner="dora"))
        await up.join("dora")
        another = small_spec(5, ["dora"], topology=COMPLETE)
        assert (await up.run(another, made_up(another))).state == "finished"
        refusal = await refused(ask(up, "JoinRun", coordinator_pb2.JoinRunRequest(run_id=run_id, learner="dora")))
        assert "and dora has participated" in (refusal.details() or "")
        outcome = await running
        lines = {line.run_id: line for line in Ledger(tmp_path / "journals").list_entries("dora")}
    assert outcome.state == "finished", outcome.detail
    line, spent = lines[run_id], build_run(spec, 3).guarantee(3).cumulative_epsilon
    assert line.rounds_committed >= 10 and line.epsilon_spent == pytest.approx(spent[line.rounds_committed - 1])
    assert 0 < outcome.statuses[3].epsilon_spent <= line.epsilon_spent  # what was heard of it before it went


REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "nobody of this name": ("Leave", "eve", {}, "has no learner 'eve'"),
    "who is not away": ("Join", "ben", {}, "and ben has participated"),
    "a graph that falls apart": (
        "Leave",
        "ann",
        {"topology": {"graph": "star"}},
        "must be connected, got no path both ways",
    ),
    "an algorithm that needs all": (
        "Leave",
        "dora",
        {"algorithm": {"name": "admm"}},
        "needs all learners in all rounds",
    ),
}


@pytest.mark.parametrize(("verb", "name", "other", "why"), REFUSED.values(), ids=REFUSED)
async def test_what_a_run_cannot_do_is_refused_and_it_goes_on(
    tmp_path: Path, verb: str, name: str, other: dict[str, Any], why: str
) -> None:
    paced = {"mode": "paced", "period_s": 0.02}
    document = small_spec(30, NAMES, topology=COMPLETE, clock=paced).model_dump(mode="json")
    spec = RunSpec.model_validate({**document, **other})
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 3)
        request = getattr(coordinator_pb2, f"{verb}RunRequest")
        asked = request(run_id=up.learners["ann"].status.run_id, learner=name)
        assert why in ((await refused(ask(up, f"{verb}Run", asked))).details() or "")
        outcome = await running
    assert outcome.state == "finished" and not outcome.offline_intervals


def test_what_came_of_a_lost_learner_and_was_not_used_is_no_forgery() -> None:
    """It is on the wire, as long as the learner may have spoken; afterwards nobody can have heard it."""
    lost = {"learner": "dora", "first_round": 20, "missed_from_rounds": {"ann": 12, "ben": 12, "cleo": 13}}
    run = build_run(small_spec(30, NAMES, topology=COMPLETE, offline_intervals=[lost]), 3)
    listening = _AllowedChannels(run.network, NAMES)
    listening.require(3, 0, 3, 12, "a capture")
    with pytest.raises(CaptureError, match="ann does not receive from dora in round 20"):
        listening.require(3, 0, 3, 20, "a capture")


# ---- changes that meet something else --------------------------------------------------------------------------------

PACED = {"mode": "paced", "period_s": 0.01, "window": 4, "staleness": "drop", "deadline_s": PATIENCE_S}
PAUSE = small_spec(
    **{**PLACE, **OPEN, "clock": PACED, "offline_intervals": [{"learner": "cleo", "first_round": 5, "until_round": 40}]}
)


async def leave(up: Network, run_id: str, name: str) -> None:
    await ask(up, "LeaveRun", coordinator_pb2.LeaveRunRequest(run_id=run_id, learner=name))


async def left(up: Network, run_id: str, name: str) -> str | None:
    """None, or why it may not leave now."""
    try:
        await leave(up, run_id, name)
    except grpc.aio.AioRpcError as error:
        return error.details() or ""
    return None


def require_simulated(outcome: Outcome, spec: RunSpec, noise: Path, *lost: int) -> None:
    """What was overheard is what the simulator says by the spec as it is in the end; of who was lost, what was heard."""
    assert outcome.state == "finished", outcome.detail
    run, simulated = as_amended(spec.model_copy(update={"offline_intervals": outcome.offline_intervals}), noise)
    for field, said in transcript_of(outcome, run).fields.items():
        wanted = simulated.fields[field]
        assert len(said) == spec.rounds
        for i in lost:  # nobody knows which round was its last one
            said[:, i], wanted[:, i] = said[:, i] + 0 * wanted[:, i], wanted[:, i] + 0 * said[:, i]
        np.testing.assert_allclose(said, wanted, rtol=1e-9, atol=1e-12)


async def test_who_leaves_in_a_pause_stays_away(tmp_path: Path) -> None:
    """It has passed over rounds that it is told of again."""
    noise, _ = noise_for(build_run(PAUSE.model_copy(update={"offline_intervals": ()}), 3), tmp_path)
    async with network(tmp_path, NAMES, noise=noise) as up:
        running = asyncio.ensure_future(up.run(PAUSE, made_up(PAUSE)))
        await up.until("ann", LearnerState.RUNNING, 8)
        await leave(up, up.learners["ann"].status.run_id, "cleo")
        outcome = await running
    (absence,) = outcome.offline_intervals
    assert (absence.learner, absence.first_round, absence.until_round) == (
        "cleo",
        5,
        None,
    ) and not absence.missed_from_rounds
    require_simulated(outcome, PAUSE, noise)


@pytest.mark.parametrize("name", ["cleo", "dora"])
async def test_who_is_gone_while_somebody_pauses_is_lost(tmp_path: Path, name: str) -> None:
    """Who pauses itself, or another one: that has learned of the last round that it said, too."""
    noise, _ = noise_for(build_run(PAUSE.model_copy(update={"offline_intervals": ()}), 3), tmp_path)
    async with network(tmp_path, NAMES, noise=noise) as up:
        running = asyncio.ensure_future(up.run(PAUSE, made_up(PAUSE)))
        await up.until("ann", LearnerState.RUNNING, 8)
        run_id = up.learners["ann"].status.run_id
        await up.leave(name)
        await up.until_gone(name)
        await leave(up, run_id, name)
        outcome = await running
    assert {each.learner for each in outcome.offline_intervals if each.missed_from_rounds} == {name}
    require_simulated(outcome, PAUSE, noise, NAMES.index(name))


async def test_who_is_lost_cannot_be_lost_again(tmp_path: Path) -> None:
    """Rounds that are over would change."""
    spec = LOSABLE["ldp-dol"]
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("dora", LearnerState.RUNNING, 5)
        run_id = up.learners["ann"].status.run_id
        await up.leave("dora")
        await up.until_gone("dora")
        await leave(up, run_id, "dora")
        lost = (await amended_spec(up, run_id)).offline_intervals
        await up.until("ann", LearnerState.RUNNING, 20)
        assert "is lost to run" in ((await refused(leave(up, run_id, "dora"))).details() or "")
        outcome = await running
    assert outcome.state == "finished" and outcome.offline_intervals == lost


async def test_a_change_that_nobody_waits_for_any_more_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rest, and would rest for ever."""
    rest, resting = RunController._quiesce, asyncio.Event()

    async def long(self: RunController, course: ManagedRun) -> None:
        await rest(self, course)
        resting.set()
        await asyncio.sleep(0.5)  # the operator gives up

    monkeypatch.setattr(RunController, "_quiesce", long)
    spec = LOSABLE["ldp-dol"]
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 5)
        asked = asyncio.ensure_future(leave(up, up.learners["ann"].status.run_id, "dora"))
        await resting.wait()
        asked.cancel()
        outcome = await running
    assert outcome.state == "finished", outcome.detail
    assert [each.learner for each in outcome.offline_intervals] == ["dora"]


async def test_a_run_that_is_stopped_while_it_is_changed_stays_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, stopped = asyncio.Event(), asyncio.Event()

    async def slow(self: CaptureClient, book: RunStateMachine, run: Run) -> None:
        if not told.is_set():
            told.set()
            await stopped.wait()

    prepare, prepared = Learner._prepare, list[str]()

    async def noted(self: Learner, run_id: str, told: coordinator_pb2.Assignment) -> None:
        prepared.append(run_id)
        await prepare(self, run_id, told)

    monkeypatch.setattr(CaptureClient, "reconfigure", slow)
    spec = LOSABLE["ldp-dol"]
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 5)
        run_id = up.learners["ann"].status.run_id
        asked = asyncio.ensure_future(leave(up, run_id, "dora"))
        await told.wait()
        monkeypatch.setattr(Learner, "_prepare", noted)
        await ask(up, "StopRun", coordinator_pb2.StopRunRequest(run_id=run_id))
        stopped.set()
        await asked
        assert (await running).state == "stopped"
        another = small_spec(5, NAMES, topology=COMPLETE)  # what they were told before is done by then
        assert (await up.run(another, made_up(another))).state == "finished"
    assert run_id not in prepared


CHANGING = {"sequence": {"kind": "periodic", "graphs": ["complete", "ring"]}}
STARTED_AGAIN = {
    "ldp-dol": small_spec(**{**PLACE, **OPEN, "clock": {**PACED, "window": 8}}),
    "dola, by a sequence of graphs": RunSpec.model_validate(
        {**CASES["dola"].model_dump(mode="json"), **OPEN, "topology": CHANGING, "clock": {**PACED, "window": 8}}
    ),
}


@pytest.mark.parametrize("name", ["dora", "ann"])
@pytest.mark.parametrize("spec", STARTED_AGAIN.values(), ids=STARTED_AGAIN)
async def test_who_leaves_is_waited_for_where_the_coordinator_was_started_again(
    tmp_path: Path, spec: RunSpec, name: str
) -> None:
    """Nobody may be back yet, and each goes on for as long as it was granted."""
    noise, _ = noise_for(build_run(spec, 3), tmp_path)
    async with network(tmp_path, NAMES, noise=noise, durable=True) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 10)
        run_id = up.learners["ann"].status.run_id
        await up.restart_coordinator()
        async with asyncio.timeout(PATIENCE_S):
            while (refusal := await left(up, run_id, name)) is not None:
                assert "has no round under way" in refusal
        outcome = await running
    (absence,) = outcome.offline_intervals
    assert absence.learner == name and absence.first_round >= 10 and not absence.missed_from_rounds
    require_simulated(outcome, spec, noise)


def test_whose_stream_breaks_while_all_rest_is_waited_for() -> None:
    """It was not told before, and may say what it was granted; it may be in an attempt before this one."""
    held = RunStateMachine("r-1", build_run(LOSABLE["ldp-dol"], 3), 3, ("a:1", "b:2", "c:3", "d:4"))
    running = [LearnerStatus(name, "r-1", LearnerState.RUNNING, rounds_done=4, rounds_committed=5) for name in NAMES]
    held.restore(RunState.RUNNING, running, datetime.now(UTC))
    assert held.busy_learners == [0, 1, 2, 3]  # nobody is back
    for i in range(4):
        held.mark_connected(i)
        held.handle_report(replace(running[i], state=LearnerState.STOPPED))
    held.possible_senders.add(2)
    assert held.busy_learners == [2]
    held.handle_quiesced_report(running[2])
    assert held.busy_learners == [2]
    held.handle_quiesced_report(replace(running[2], state=LearnerState.STOPPED, rounds_committed=6))
    assert not held.busy_learners and held.first_unsent_round == 6


async def test_a_learner_is_lost_when_the_disk_has_room_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run waits for that, as for all that its coordinator cannot write."""
    tries = []

    def full(method: str) -> None:
        write = getattr(CoordinatorStore, method)

        def once(self: CoordinatorStore, *arguments: Any) -> None:
            tries.append(method)
            if tries.count(method) == 1:
                raise Unavailable("the disk is full")
            write(self, *arguments)

        monkeypatch.setattr(CoordinatorStore, method, once)

    monkeypatch.setattr(run_controller, "_RETRY_INTERVAL_S", 0.2)
    spec = LOSABLE["ldp-dol"]
    noise, _ = noise_for(build_run(spec, 3), tmp_path)
    async with network(tmp_path, NAMES, noise=noise) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("dora", LearnerState.RUNNING, 10)
        full("save_views")
        full("update_spec")
        missed_soon(monkeypatch)
        await up.leave("dora")
        outcome = await running
    assert tries.count("save_views") > 1 and tries.count("update_spec") == 2
    assert [each.learner for each in outcome.offline_intervals] == ["dora"]
    require_simulated(outcome, spec, noise, 3)


@pytest.mark.parametrize("later", [0.0, 1.0], ids=["at once", "while the others rest"])
async def test_a_run_that_loses_two_is_overheard_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: float
) -> None:
    """Nobody knows how far each of them heard the other: what they would have said is not waited for."""
    spec = LOSABLE["ldp-dol"]
    noise, _ = noise_for(build_run(spec, 3), tmp_path)
    async with network(tmp_path, NAMES, noise=noise) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("dora", LearnerState.RUNNING, 10)
        missed_soon(monkeypatch, dora=later)
        await asyncio.gather(up.leave("cleo"), up.leave("dora"))
        outcome = await running
    first = {each.learner: each.first_round for each in outcome.offline_intervals}
    assert first.keys() == {"cleo", "dora"} and len(set(first.values())) == 1
    require_simulated(outcome, spec, noise, 2, 3)


def test_who_rested_under_a_coordinator_before_this_one_is_waited_for_when_it_is_back() -> None:
    """It was briefed, and speaks, before it has said so."""
    held = RunStateMachine("r-1", build_run(LOSABLE["ldp-dol"], 3), 3, ("a:1", "b:2", "c:3", "d:4"))
    rested = [LearnerStatus(name, "r-1", LearnerState.STOPPED, rounds_done=4, rounds_committed=5) for name in NAMES]
    held.restore(RunState.RUNNING, rested, datetime.now(UTC))
    held.mark_connected(0)
    assert 0 in held.busy_learners


def test_of_two_that_are_lost_each_has_heard_the_other() -> None:
    """As far as others have heard it, it had: reports of those who are gone are old."""
    held = RunStateMachine("r-1", build_run(LOSABLE["ldp-dol"], 3), 3, ("a:1", "b:2", "c:3", "d:4"))
    said = dict(zip(NAMES, (9, 9, 2, 3), strict=True))
    known = [LearnerStatus(name, "r-1", LearnerState.STOPPED, rounds_committed=said[name]) for name in NAMES]
    held.restore(RunState.RUNNING, known, datetime.now(UTC))
    held.pending_removals = {2, 3}
    assert held.compute_missed_from_rounds(2) == {"ann": 8, "ben": 8, "dora": 9}
    assert held.compute_missed_from_rounds(3) == {"ann": 8, "ben": 8, "cleo": 9}


def without(held: RunStateMachine, lost: int) -> RunSpec:
    return run_controller._remove_lost(held.run.spec, machine=held, lost=frozenset({lost}))


def test_who_has_learned_its_last_round_before_it_died_has_heard_who_is_lost() -> None:
    """By its log, which alone knows: it could not report that any more."""
    held = RunStateMachine("r-1", build_run(LOSABLE["ldp-dol"], 3), 3, ("a:1", "b:2", "c:3", "d:4"))
    known = [LearnerStatus(name, "r-1", LearnerState.RUNNING, rounds_done=59, rounds_committed=60) for name in NAMES]
    held.restore(RunState.RUNNING, known, datetime.now(UTC))
    held.pending_removals = {3}
    held.mark_quiesced(0, 60, is_last_round_learned=True)
    held.mark_quiesced(1, 60, is_last_round_learned=False)
    assert held.compute_missed_from_rounds(3) == {"ann": 60, "ben": 59, "cleo": 59}
    left = without(held, 3)
    require_valid_reconfiguration(
        held.run.spec.participation, left.participation, 0, committed_rounds=60, learned_rounds=60
    )
    require_valid_reconfiguration(
        held.run.spec.participation, left.participation, 1, committed_rounds=60, learned_rounds=59
    )


def test_a_lost_learner_may_have_said_what_a_coordinator_before_this_one_has_granted() -> None:
    """It alone may have been told: how far the others were granted says nothing."""
    run = build_run(LOSABLE["ldp-dol"], 3)
    course = ManagedRun(RunStateMachine("r-1", run, 3, ("a:1", "b:2", "c:3", "d:4")), datetime.now(UTC))
    course.machine.state = RunState.RUNNING
    with contextlib.closing(CoordinatorStore(None)) as kept:
        kept.add_run(course.to_stored_run())
        kept.reserve_lease("r-1", 12, 4, course.encode_view())
        (written,) = kept.load_runs()
    again = ManagedRun.from_stored_run(written, run, datetime.now(UTC)).machine
    assert again.clock.leased_until == 0
    (absence,) = without(again, 3).offline_intervals or ()
    assert absence.first_round == 16
    again.clock.raise_lease(59)
    again.inherited_lease = 64
    assert [each.first_round for each in without(again, 3).offline_intervals or ()] == [60]  # of a run of 60 rounds


def test_a_run_ends_though_its_coordinator_died_before_it_said_so_and_nobody_is_left() -> None:
    lost: dict[str, Any] = {"learner": "dora", "first_round": 60, "missed_from_rounds": dict.fromkeys(NAMES[:3], 60)}
    run = build_run(LOSABLE["ldp-dol"].model_copy(update={"offline_intervals": (OfflineInterval(**lost),)}), 3)
    held, now = RunStateMachine("r-1", run, 3, ("a:1", "b:2", "c:3", "d:4")), datetime.now(UTC)
    known = [
        LearnerStatus(name, "r-1", LearnerState.FINISHED, rounds_done=60, rounds_committed=60) for name in NAMES[:3]
    ]
    held.restore(RunState.RUNNING, [*known, LearnerStatus("dora", "r-1", LearnerState.RUNNING)], now)
    held.handle_deadline(0, now)
    assert held.state is RunState.FINISHED


async def test_nobody_leaves_by_what_those_who_do_not_rest_have_told_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have said more than that: first they are lost."""
    obey, learn = Learner._execute, Session._update

    async def slowly(self: Session, t: int) -> None:
        await asyncio.sleep(0.03)
        await learn(self, t)

    async def deaf(self: Learner, run_id: str, told: Command | None) -> None:
        if told == QUIESCE_COMMAND and self.config.name == "ben":
            await asyncio.sleep(PATIENCE_S)
        await obey(self, run_id, told)

    monkeypatch.setattr(Session, "_update", slowly)
    monkeypatch.setattr(Learner, "_execute", deaf)
    spec = small_spec(**{**PLACE, **OPEN, "clock": {"window": 60, "staleness": "drop", "deadline_s": 6.0}})
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 5)
        run_id = up.learners["ann"].status.run_id
        refusal = await refused(leave(up, run_id, "dora"))
        assert "ben did not pause within the deadline" in (refusal.details() or "")
        outcome = await running
    assert outcome.state == "finished", outcome.detail
    assert [each.learner for each in outcome.offline_intervals] == ["ben"]


async def test_who_cannot_be_fed_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the run goes on is not for its feeder to say."""
    spec = LOSABLE["ldp-dol"]
    async with network(tmp_path, NAMES) as up:

        async def undelivered(address: str, *rest: Any, **more: Any) -> None:
            if address == up.addresses["dora"]:
                await up.until("ann", LearnerState.RUNNING, 1)  # and so all others have records
                given_up_soon(monkeypatch, WaitCause.RECORDS)
                raise Unavailable("it cannot be reached")
            await feed(address, *rest, **more)

        monkeypatch.setattr(run_client, "feed", undelivered)
        outcome = await up.run(spec, made_up(spec))
    assert outcome.state == "finished", outcome.detail
    assert [each.learner for each in outcome.offline_intervals] == ["dora"]


async def test_the_last_one_is_lost_when_all_others_have_finished_and_gone(tmp_path: Path) -> None:
    """Nobody is there to say that the run is over."""
    spec = LOSABLE["ldp-dol"]
    learn = Session._update

    async with network(tmp_path, NAMES) as up:
        with pytest.MonkeyPatch.context() as patch:

            async def slowly(self: Session, t: int) -> None:
                if self.assignment.name == "dora" and t == 59:
                    await asyncio.sleep(PATIENCE_S)
                await learn(self, t)

            patch.setattr(Session, "_update", slowly)
            missed_soon(patch)
            running = asyncio.ensure_future(up.run(spec, made_up(spec)))
            for name in NAMES[:3]:
                await up.until(name, LearnerState.FINISHED, 60)
            await asyncio.sleep(0.3)  # each has said so
            for name in NAMES:
                await up.leave(name)
            outcome = await running
    assert outcome.state == "finished", outcome.detail
    assert [each.learner for each in outcome.offline_intervals] == ["dora"]


async def test_a_run_is_taken_up_again_after_a_learner_was_lost(tmp_path: Path) -> None:
    """By the spec that it was started with, whatever became of who was lost."""
    spec = small_spec(**{**PLACE, **OPEN, "clock": {**DROP, "period_s": 0.04, "deadline_s": 2.0}})
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("dora", LearnerState.RUNNING, 5)
        run_id = up.learners["ann"].status.run_id
        await up.leave("dora")
        await up.until_gone("dora")
        await leave(up, run_id, "dora")
        await up.join("dora")
        another = small_spec(3, ["dora"], topology=COMPLETE)
        assert (await up.run(another, made_up(another))).state == "finished"
        with pytest.MonkeyPatch.context() as patch:
            missed_soon(patch)
            for name in NAMES[:3]:
                await up.leave(name)
            failed = await running
        for name in NAMES[:3]:
            await up.join(name)
        outcome = await up.run(spec, made_up(spec), resume=run_id, place_data=made_up)
    assert failed.state == "failed" and "a learner must participate in every round" in failed.detail
    assert outcome.state == "finished" and outcome.offline_intervals == failed.offline_intervals
    assert [each.rounds_committed for each in outcome.statuses[:3]] == [60] * 3


def test_what_a_lost_learner_said_last_may_have_been_overheard() -> None:
    """Though nobody learned it any more."""
    lost = {"learner": "dora", "first_round": 10, "missed_from_rounds": {"ann": 7, "ben": 7, "cleo": 7}}
    network = build_run(small_spec(**{**PLACE, **OPEN, "offline_intervals": [lost]}), 3).network
    listening = _AllowedChannels(network, NAMES)
    listening.require(3, 0, 3, 7, "a capture")
    with pytest.raises(CaptureError, match="ann does not receive from dora in round 10"):
        listening.require(3, 0, 3, 10, "a capture")
