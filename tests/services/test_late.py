"""Rounds that go on without a neighbour that is late."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from sottovoce_client.runs.run_client import Outcome
from sottovoce_core.noise import RecordedNoise, Recorder, SeededNoise
from sottovoce_core.runs.participation import NO_ROUND, USED_ROUNDS_FIELD, encode_punctual_rounds
from sottovoce_core.runs.replay import replay
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper.capture_reader import open_capture
from sottovoce_learner.peers.outbox import NeighbourLink
from sottovoce_learner.session import Session
from sottovoce_learner.storage import run_log
from sottovoce_rpc.learner_status import LearnerState
from tests.examples import made_up, small_spec
from tests.services.network import given_up_soon, network
from tests.services.test_every_algorithm import FIELD

NAMES = ["ann", "ben", "cleo"]
HOLD = {"staleness": "reuse", "stale_after_s": 0.02, "window": 8, "deadline_s": 100.0}
ASYNC = {"mode": "async", "window": 8, "deadline_s": 100.0}


def spec_of(clock: dict[str, Any], rounds: int = 40, **more: Any) -> RunSpec:
    return small_spec(rounds, NAMES, **{"clock": clock, "capture": "relay", "topology": {"graph": "path"}, **more})


CYCLE = {"kind": "edges", "edges": [[0, 1], [1, 2], [2, 0]], "directed": True}
MORE = {"rounds": 30, "learners": NAMES, "clock": ASYNC, "capture": "mirror"}


def slow(monkeypatch: pytest.MonkeyPatch, index: int, seconds: float) -> None:
    """Every third round of a learner takes so long."""
    learn = Session._update

    async def slowly(self: Session, t: int) -> None:
        if self.assignment.index == index and t % 3 == 1:
            await asyncio.sleep(seconds)
        await learn(self, t)

    monkeypatch.setattr(Session, "_update", slowly)


def transcript_of(outcome: Outcome, run: Run) -> Transcript:
    return open_capture(outcome.capture_location or "").read_transcript(
        run.field_shapes, run.spec.n_learners, run.network
    )


def used_in(said: Transcript) -> np.ndarray[Any, Any]:
    """`(rounds - 1, learners, width)`: what the updates used, as the next messages say."""
    return said.fields[USED_ROUNDS_FIELD][1:, :, 0]


ALSO: dict[str, Any] = {"dpsda-c": {}, "dpsr": {"topology": {"graph": CYCLE, "weights": "in_degree"}}, "dvp": {}}
CASES = {
    "hold": spec_of(HOLD),
    "async": spec_of(ASYNC),
    **{
        run["name"]: RunSpec.model_validate({**FIELD["common"], **run, **MORE, **ALSO[run["name"]]})
        for run in FIELD["runs"]
        if run["name"] in ALSO
    },
}


@pytest.mark.parametrize("spec", CASES.values(), ids=CASES)
async def test_what_was_used_is_said_and_explains_every_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: RunSpec
) -> None:
    """The simulator, told which messages were used, says the same; so does replay, whose losses keep the guarantee."""
    run, data, recorder = build_run(spec, 3), made_up(spec), Recorder(SeededNoise(1))
    list(simulate_rounds(run, data, recorder))
    noise = {name: np.stack(drawn) for name, drawn in recorder.noise_by_field.items()}
    np.savez(tmp_path / "noise.npz", **cast(dict[str, Any], noise))
    slow(monkeypatch, 1, 0.1)
    async with network(tmp_path, spec.names, noise=tmp_path / "noise.npz") as up:
        outcome = await up.run(spec, data)
    said = transcript_of(outcome, run)
    assert outcome.state == "finished" and said.rounds == spec.rounds

    used = used_in(said)
    own = np.stack([encode_punctual_rounds(run.network, t + 1) for t in range(spec.rounds - 1)])
    assert (said.fields[USED_ROUNDS_FIELD][0] == NO_ROUND).all()
    assert ((used == NO_ROUND) == (own == NO_ROUND)).all() and (used <= own).all()
    assert (np.diff(used, axis=0) >= 0).all()
    assert (own - used).max() <= spec.clock.window
    assert (used < own).any(), "nobody was late: nothing was tested"

    forced = np.concatenate([used, own[-1:]])
    again = Transcript.from_rounds(
        step.message for step in simulate_rounds(run, data, RecordedNoise(noise), used_rounds=forced)
    )
    assert said.fields.keys() == again.fields.keys()
    for name, values in said.fields.items():
        np.testing.assert_allclose(values, again.fields[name], rtol=1e-9, atol=1e-12)
    for i, learned in enumerate(data.learners):
        worlds = [learned, learned.with_use(0, -learned.features[0], 1.0 - learned.labels[0])]
        losses = replay(run, said, i, worlds)
        assert len(losses.realised_losses) == spec.rounds
        assert np.abs(losses.total).max() <= run.guarantee(i).cumulative_epsilon[-1]


async def test_who_is_on_time_says_what_a_run_that_waits_says(tmp_path: Path) -> None:
    """The policy costs nothing where it is not needed: only the field is there, too."""
    clock = {"staleness": "reuse", "stale_after_s": 50.0, "deadline_s": 100.0}
    spec = spec_of(clock, rounds=12)
    run, data, recorder = build_run(spec, 3), made_up(spec), Recorder(SeededNoise(1))
    steps = list(simulate_rounds(run, data, recorder))
    np.savez(tmp_path / "noise.npz", y=np.stack(recorder.noise_by_field["y"]))
    async with network(tmp_path, NAMES, noise=tmp_path / "noise.npz") as up:
        outcome = await up.run(spec, data)
    said, simulated = transcript_of(outcome, run), Transcript.from_rounds(step.message for step in steps)
    for name in ("y", USED_ROUNDS_FIELD):
        np.testing.assert_allclose(said.fields[name], simulated.fields[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("after", [run_log.SNAPSHOT_AFTER_BYTES, 0], ids=["by its log", "by snapshots"])
async def test_others_go_on_without_a_learner_that_died_and_it_catches_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Its log holds what it used, so it comes back to the state that it had, and is not held to its neighbours' rounds."""
    monkeypatch.setattr(run_log, "SNAPSHOT_AFTER_BYTES", after)
    spec = spec_of(
        {
            "mode": "paced",
            "period_s": 0.01,
            "staleness": "reuse",
            "stale_after_s": 0.02,
            "window": 60,
            "deadline_s": 100.0,
        },
        120,
    )
    run, data, recorder = build_run(spec, 3), made_up(spec), Recorder(SeededNoise(1))
    list(simulate_rounds(run, data, recorder))
    noise = {"y": np.stack(recorder.noise_by_field["y"])}
    np.savez(tmp_path / "noise.npz", y=noise["y"])
    async with network(tmp_path, NAMES, noise=tmp_path / "noise.npz") as up:
        running = asyncio.ensure_future(up.run(spec, data))
        await up.until("cleo", LearnerState.RUNNING, 10)
        await up.leave("ben")
        gone_at = (await up.status("ann")).rounds_done
        await up.until("ann", LearnerState.RUNNING, gone_at + 10)  # it hears ben alone
        await up.join("ben", tmp_path / "noise.npz")
        outcome = await running
    assert outcome.state == "finished"
    said = transcript_of(outcome, run)
    used = used_in(said)
    assert said.rounds == spec.rounds
    assert (np.diff(used, axis=0) >= 0).all()
    assert (np.arange(spec.rounds - 1) - used[:, 0, 0]).max() >= 5
    forced = np.concatenate([used, used[-1:]])  # what the last update uses, no message shows
    again = np.stack(
        [step.message["y"] for step in simulate_rounds(run, data, RecordedNoise(noise), used_rounds=forced)]
    )
    np.testing.assert_allclose(said.fields["y"], again, rtol=0, atol=1e-12)


async def test_a_channel_on_which_nothing_passes_is_noticed_before_the_budget_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message may be as old as a learner may be ahead, and no older; then it is waited for, up to the deadline."""
    spec, say, cut = spec_of(ASYNC, 2_000), NeighbourLink.queue, list[NeighbourLink]()

    def silent(self: NeighbourLink, t: int, frame: bytes) -> None:
        if self not in cut:
            say(self, t, frame)

    monkeypatch.setattr(NeighbourLink, "queue", silent)
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 10)
        cut += [up.learners["ann"].require_session().links[1], up.learners["ben"].require_session().links[0]]
        given_up_soon(monkeypatch)
        outcome = await running
    assert outcome.state == "failed"
    assert re.match("no messages pass between ann and ben in round [0-9]+: ", outcome.detail)
    assert all(status.rounds_done < 2_000 for status in outcome.statuses)
