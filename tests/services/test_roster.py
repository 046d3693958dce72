"""Learners that join late, leave early or pause, as services."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from sottovoce.errors import CaptureError
from sottovoce.noise import RecordedNoise, Recorder, SeededNoise
from sottovoce.running.replay import replay
from sottovoce.running.run import Run, build_run
from sottovoce.running.simulator import simulate
from sottovoce.running.transcript import Transcript
from sottovoce.spec import RunSpec
from sottovoce_client.running.evaluate import summarise
from sottovoce_client.running.operate import Outcome
from sottovoce_eavesdropper.reading import _Listening, open_capture
from sottovoce_learner import store
from sottovoce_learner.ledger import Ledger
from sottovoce_learner.session import Session
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_rpc.server import channel
from sottovoce_rpc.specs import spec_from_wire
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.examples import made_up, small_spec
from tests.services.network import PATIENCE_S, Network, network, refused
from tests.services.test_every_algorithm import FIELD

NAMES = ["ann", "ben", "cleo", "dora"]
ABSENCES = [
    {"learner": "dora", "until_round": 10},
    {"learner": "ben", "first_round": 20},
    {"learner": "cleo", "first_round": 5, "until_round": 9},
]
PLACE: dict[str, Any] = {"learners": NAMES, "rounds": 30, "absences": ABSENCES, "capture": "relay"}
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
        run["name"]: RunSpec.model_validate({**FIELD["common"], **run, **PLACE, **ALSO[run["name"]]})
        for run in FIELD["runs"]
        if run["name"] in ALSO
    },
}


def transcript_of(outcome: Outcome, run: Run) -> Transcript:
    return open_capture(outcome.capture or "").transcript(run.field_shapes, run.spec.n_learners, run.network)


def noise_for(run: Run, folder: Path) -> tuple[Path, Transcript]:
    """A file of noise, and what is said with it."""
    recorder = Recorder(SeededNoise(1))
    said = Transcript.of(step.message for step in simulate(run, made_up(run.spec), recorder))
    np.savez(
        folder / "noise.npz", **cast(dict[str, Any], {name: np.stack(each) for name, each in recorder.drawn.items()})
    )
    return folder / "noise.npz", said


@pytest.mark.parametrize("spec", CASES.values(), ids=CASES)
async def test_a_run_with_absences_is_what_the_simulator_says(tmp_path: Path, spec: RunSpec) -> None:
    run, data = build_run(spec, 3), made_up(spec)
    noise, simulated = noise_for(run, tmp_path)
    async with network(tmp_path, spec.names, noise=noise) as up:
        outcome = await up.run(spec, data)
    assert outcome.state == "finished"
    assert open_capture(outcome.capture or "").complete
    said = transcript_of(outcome, run)
    for name, values in simulated.fields.items():
        np.testing.assert_allclose(said.fields[name], values, rtol=1e-9, atol=1e-12)
    away = np.isnan(next(iter(said.fields.values()))[:, :, 0, 0])
    there = np.array([spec.roster.there(t) for t in range(spec.rounds)])
    assert (away == ~there).all()
    for i, learned in enumerate(data.learners):
        promised = run.guarantee(i)
        losses = replay(run, said, i, [learned, learned.with_use(0, -learned.features[0], 1.0 - learned.labels[0])])
        assert len(losses.realised) == spec.rounds
        assert np.abs(losses.total).max() <= promised.cumulative[-1]
        assert outcome.statuses[i].epsilon_spent == pytest.approx(promised.epsilon(), rel=1e-12)
    for reported in summarise(
        run, data, outcome
    ).learners:  # rounds in which nobody spoke are not rounds that nobody heard
        assert reported.swap_event is not None and len(reported.swap_event.by_round) == spec.rounds


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

OPEN = {"topology": COMPLETE, "absences": None, "rounds": 60, "capture": "mirror", "clock": {"window": 8}}


async def ask(up: Network, name: str, request: Any) -> coordinator_pb2.Run:
    async with channel(up.coordinator) as to:
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
    return run, Transcript.of(step.message for step in simulate(run, made_up(spec), source))


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
    (absence,) = left.absences or ()
    assert absence.learner == "dora" and 10 <= absence.first_round < 60 and not absence.unheard
    assert outcome.absences == left.absences
    run, simulated = as_amended(left, noise)
    said = transcript_of(outcome, run)
    np.testing.assert_allclose(said.fields["y"], simulated.fields["y"], rtol=1e-9, atol=1e-12)
    assert said.rounds == 60


async def test_who_joins_takes_part_from_then_on(tmp_path: Path) -> None:
    spec = small_spec(**{**PLACE, **OPEN, "absences": [{"learner": "dora"}]})
    everybody = spec.model_copy(update={"absences": None})
    noise, _ = noise_for(build_run(everybody, 3), tmp_path)
    async with network(tmp_path, NAMES, noise=noise) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec), place=made_up))
        await up.until("ann", LearnerState.RUNNING, 10)
        run_id = up.learners["ann"].status.run_id
        await ask(up, "JoinRun", coordinator_pb2.JoinRunRequest(run_id=run_id, learner="dora"))
        joined = await amended_spec(up, run_id)
        outcome = await running
    assert outcome.state == "finished", outcome.detail
    (absence,) = joined.absences or ()
    assert absence.until_round is not None and 10 <= absence.until_round < 60
    run, simulated = as_amended(joined, noise)
    said = transcript_of(outcome, run)
    np.testing.assert_allclose(said.fields["y"], simulated.fields["y"], rtol=1e-9, atol=1e-12)


DROP = {"mode": "paced", "period_s": 0.04, "window": 8, "late": "drop", "deadline_s": 2.0}
LOSABLE = {
    "ldp-dol": small_spec(**{**PLACE, **OPEN, "clock": DROP}),
    **{
        name: RunSpec.model_validate({**spec.model_dump(mode="json"), **OPEN, "topology": spec.topology, "clock": DROP})
        for name, spec in CASES.items()
        if name in ALSO
    },
}


@pytest.mark.parametrize("after", [store.SNAPSHOT_AFTER, 0], ids=["by logs", "by snapshots"])
@pytest.mark.parametrize(
    ("name", "t"), [("ldp-dol", 1), ("ldp-dol", 10), ("ldp-dol", 57), *((name, 20) for name in ALSO)]
)
async def test_a_run_goes_on_without_a_learner_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, t: int, after: int
) -> None:
    """What its neighbours have not learned of it is left out, and the spec says so: the simulator says the same."""
    monkeypatch.setattr(store, "SNAPSHOT_AFTER", after)
    spec = LOSABLE[name]
    noise, _ = noise_for(build_run(spec, 3), tmp_path)
    async with network(tmp_path, NAMES, noise=noise) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("dora", LearnerState.RUNNING, t)
        await up.leave("dora")
        outcome = await running
    assert outcome.state == "finished", outcome.detail
    (absence,) = outcome.absences or ()
    assert absence.learner == "dora" and set(absence.unheard) == set(NAMES[:3])
    run, simulated = as_amended(spec.model_copy(update={"absences": outcome.absences}), noise)
    for field, said in transcript_of(outcome, run).fields.items():
        assert len(said) == 60
        np.testing.assert_allclose(said[:, :3], simulated.fields[field][:, :3], rtol=1e-9, atol=1e-12)
        heard = ~np.isnan(said[:, 3, 0, 0])
        np.testing.assert_allclose(said[heard, 3], simulated.fields[field][heard, 3], rtol=1e-9, atol=1e-12)
        assert heard[: max(absence.unheard.values()) - 1].all()


async def test_who_is_gone_when_all_others_have_finished_is_lost_in_the_end(tmp_path: Path) -> None:
    """It has said all that it had to say: the others need nothing of it."""
    spec = LOSABLE["ldp-dol"]
    learn = Session._learn

    async with network(tmp_path, NAMES) as up:
        with pytest.MonkeyPatch.context() as patch:

            async def slowly(self: Session, t: int) -> None:
                if self.role.name == "dora" and t == 59:
                    await asyncio.sleep(PATIENCE_S)
                await learn(self, t)

            patch.setattr(Session, "_learn", slowly)
            running = asyncio.ensure_future(up.run(spec, made_up(spec)))
            await up.until("ann", LearnerState.FINISHED, 60)
            await up.leave("dora")
            outcome = await running
    assert outcome.state == "finished", outcome.detail
    (absence,) = outcome.absences or ()
    assert (absence.learner, absence.first_round, dict(absence.unheard)) == ("dora", 60, dict.fromkeys(NAMES[:3], 60))


async def test_a_learner_that_is_lost_is_told_so_and_free_for_other_runs(tmp_path: Path) -> None:
    """It may come back; the run goes on without it, and its ledger says what it has cost."""
    spec = LOSABLE["ldp-dol"]
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
        assert "dora was lost in this run" in (refusal.details() or "")
        outcome = await running
        lines = {line.run_id: line for line in Ledger(tmp_path / "journals").lines("dora")}
    assert outcome.state == "finished", outcome.detail
    assert lines[run_id].said >= 10 and lines[run_id].spent == outcome.statuses[3].epsilon_spent > 0


REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "nobody of this name": ("Leave", "eve", {}, "has no learner 'eve'"),
    "who is not away": ("Join", "ben", {}, "ben is not away"),
    "a graph that falls apart": ("Leave", "ann", {"topology": {"graph": "star"}}, "is not connected"),
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
    assert outcome.state == "finished" and not outcome.absences


def test_what_came_of_a_lost_learner_and_was_not_used_is_no_forgery() -> None:
    """It is on the wire, as long as the learner may have spoken; afterwards nobody can have heard it."""
    lost = {"learner": "dora", "first_round": 20, "unheard": {"ann": 12, "ben": 12, "cleo": 13}}
    run = build_run(small_spec(30, NAMES, topology=COMPLETE, absences=[lost]), 3)
    listening = _Listening(run.network)
    listening.require(3, 0, 3, 12, "a capture")
    with pytest.raises(CaptureError, match="learner 0 does not hear learner 3 in round 20"):
        listening.require(3, 0, 3, 20, "a capture")
