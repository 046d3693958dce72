"""Learners that join late, leave early or pause, as services."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from sottovoce.noise import Recorder, SeededNoise
from sottovoce.running.replay import replay
from sottovoce.running.run import Run, build_run
from sottovoce.running.simulator import simulate
from sottovoce.running.transcript import Transcript
from sottovoce.spec import RunSpec
from sottovoce_client.running.operate import Outcome
from sottovoce_eavesdropper.reading import open_capture
from sottovoce_rpc.learner_status import LearnerState
from tests.examples import made_up, small_spec
from tests.services.network import network
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
