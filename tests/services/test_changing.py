"""Runs over networks that are directed or change, by an algorithm of a user's own: they equal their simulation."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sottovoce_client.runs.feeder import feed
from sottovoce_coordinator import run_state
from sottovoce_coordinator.run_state import RunStateMachine
from sottovoce_core.arrays import FloatArray
from sottovoce_core.data import PlacedData
from sottovoce_core.errors import CaptureError
from sottovoce_core.network.network import NetworkDigests
from sottovoce_core.runs.replay import replay
from sottovoce_core.runs.run import build_run
from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper import capture_session
from sottovoce_eavesdropper.capture_reader import open_capture
from sottovoce_learner.session import Session
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_wire.v1 import coordinator_pb2
from sottovoce_wire.v1.coordinator_pb2 import RoundLease, TopologyEpoch
from tests.examples import made_up
from tests.gossip import gossip_spec
from tests.services.network import PATIENCE_S, Network, network
from tests.services.test_run import SHAPES, Cutting, closed, recorded

ROUNDS = 30
NAMES = ["ann", "ben", "cleo", "dan"]


def ways(*pairs: tuple[int, int]) -> dict[str, Any]:
    return {"kind": "edges", "edges": list(pairs), "directed": True}


RING = {"graph": ways((0, 1), (1, 2), (2, 3), (3, 0)), "weights": "out_degree"}
TURNS = {
    "sequence": {"kind": "periodic", "graphs": [ways((0, 1), (0, 2), (1, 2)), ways((3, 0)), ways((2, 3), (1, 3))]},
    "weights": "out_degree",
}
"""In every round somebody speaks whom nobody hears."""
DIGRAPHS = {"sequence": {"kind": "random", "probability": 0.3, "seed": 1, "directed": True}, "weights": "in_degree"}
GRAPHS = {"sequence": {"kind": "random", "probability": 0.4, "seed": 2}}


def spec_of(topology: dict[str, Any], capture: str = "none", rounds: int = ROUNDS, **more: Any) -> RunSpec:
    more = {"clock": {"window": 7, "deadline_s": 100.0}, **more}
    return gossip_spec(topology, rounds, NAMES, capture=capture, **more)


def told(spec: RunSpec) -> FloatArray:
    """`(rounds, learners)`: how many hear what a learner says."""
    topology = build_run(spec, 3).network
    return np.stack([(topology.mixing(t).neighbour_weights > 0).sum(axis=0) for t in range(spec.rounds)])


def decisions(up: Network) -> list[FloatArray]:
    sessions = [up.learners[name].require_session() for name in NAMES]
    return [session.algorithm.decision(session.state_machine.state) for session in sessions]


# ---- runs that go well -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "capture"),
    [(RING, "relay"), (TURNS, "relay"), (TURNS, "mirror"), (DIGRAPHS, "relay"), (GRAPHS, "mirror")],
    ids=["ring", "turns", "turns mirrored", "random digraphs", "random graphs"],
)
async def test_a_run_equals_its_simulation_and_the_capture_shows_it(
    tmp_path: Path, topology: dict[str, Any], capture: str
) -> None:
    spec = spec_of(topology, capture)
    data, receivers = made_up(spec, batch=2), told(spec)
    noise, said, last = recorded(spec, data, tmp_path / "noise.npz")
    async with network(tmp_path, NAMES, noise=noise) as up:
        outcome = await up.run(spec, data)
        found = decisions(up)
        overheard = closed(outcome)

    assert (outcome.state, outcome.detail) == ("finished", "")
    np.testing.assert_allclose(found, last, rtol=1e-12, atol=1e-12)
    assert [status.messages_sent for status in outcome.statuses] == receivers.sum(axis=0).tolist()
    assert overheard.metadata["messages"] == receivers.sum()

    run = build_run(spec, 3)
    transcript = overheard.read_transcript(SHAPES, 4, run.network)
    shown = np.where((receivers > 0)[:, :, None, None], said, np.nan)[: transcript.rounds]
    assert receivers[transcript.rounds :].sum() == 0
    np.testing.assert_allclose(transcript.fields["y"], shown, rtol=1e-12, atol=1e-12)
    assert np.isnan(shown).any() == (topology is not RING)
    if topology is RING:
        losses = replay(run, transcript, 1, [data.learners[1], data.learners[0]])
        assert losses.realised_losses.shape == (ROUNDS, 1, 1) and np.isfinite(losses.realised_losses).all()
    else:
        with pytest.raises(CaptureError, match="no round in which all 4 learners were recorded"):
            overheard.read_transcript(SHAPES, 4)  # as if everybody had been heard


@pytest.mark.parametrize(
    "clock", [{"mode": "data", "window": 3}, {"mode": "paced", "period_s": 0.01}, {"window": 1}], ids=str
)
async def test_other_clocks_bring_a_run_to_its_end(tmp_path: Path, clock: dict[str, Any]) -> None:
    spec = spec_of(DIGRAPHS, clock={"deadline_s": 100.0, **clock})
    data = made_up(spec)
    noise, _, last = recorded(spec, data, tmp_path / "noise.npz")
    async with network(tmp_path, NAMES, noise=noise) as up:
        outcome = await up.run(spec, data)
        found = decisions(up)
    assert (outcome.state, outcome.detail) == ("finished", "")
    np.testing.assert_allclose(found, last, rtol=1e-12, atol=1e-12)


# ---- what breaks and heals -------------------------------------------------------------------------------------------


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for is no event
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("edge", "direction", "rounds"),
    [((1, 2), "out", [0, 2]), ((1, 2), "out", [1, 7, 8]), ((0, 3), "back", [4])],
    ids=str,
)
async def test_a_learner_that_is_not_waited_for_is_rounds_ahead_and_a_broken_stream_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edge: tuple[int, int], direction: str, rounds: list[int]
) -> None:
    """Cleo has no records yet: ben, whom she hears, says three rounds more; then a stream breaks, again and again."""
    spec = spec_of(RING, "relay")
    data, left = made_up(spec), list(rounds)
    noise, said, last = recorded(spec, data, tmp_path / "noise.npz")
    monkeypatch.setattr(Cutting, "cuts", {(*edge, direction): left})
    monkeypatch.setattr(capture_session, "GrpcProxy", Cutting)
    async with network(tmp_path, NAMES, noise=noise) as up:
        run_id = (await up.start(spec, 3)).run_id
        await up.feed(run_id, spec, data, but=["cleo"])
        cleo = up.learners["cleo"]
        await eventually(lambda: cleo._session is not None and cleo.require_session().inbox.get_due_round(1) == 4)
        assert [(await up.status(name)).rounds_done for name in NAMES] == [2, 3, 0, 1]
        await feed(up.addresses["cleo"], run_id, data.learners[2])
        end = await up.end(run_id)
        found = decisions(up)
        (folder,) = (tmp_path / "captures").iterdir()
        capture = open_capture(folder)
        assert (capture.metadata["detections"], capture.metadata["unchecked_reason"]) == ([], None)
    assert left == []
    assert (end.state, end.detail) == (coordinator_pb2.RUN_STATE_FINISHED, "")
    np.testing.assert_allclose(found, last, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(capture.read_transcript(SHAPES, 4).fields["y"], said, rtol=1e-12, atol=1e-12)


async def test_a_neighbour_a_window_ahead_still_has_what_a_learner_lacks_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ben dies before he says a round: his log lacks the round before, which he has reported and heard ann in."""
    spec, silent, say = spec_of(RING, clock={"window": 2, "deadline_s": 100.0}), asyncio.Event(), Session._send

    async def not_yet(self: Session, t: int) -> None:
        if (self.assignment.index, t) == (1, 10):
            await silent.wait()
        await say(self, t)

    monkeypatch.setattr(Session, "_send", not_yet)
    data = made_up(spec)
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, data))
        await up.until("ann", LearnerState.RUNNING, 12)
        assert [(await up.status(name)).rounds_done for name in NAMES] == [12, 10, 10, 11]
        await up.leave("ben")
        silent.set()
        await up.join("ben")
        outcome = await running
    assert (outcome.state, outcome.detail) == ("finished", "")


async def test_a_learner_whose_directives_break_off_is_told_the_epochs_that_it_missed(tmp_path: Path) -> None:
    spec = spec_of(DIGRAPHS, rounds=400, clock={"mode": "paced", "period_s": 0.002, "window": 20, "deadline_s": 100.0})
    data = made_up(spec)
    noise, _, last = recorded(spec, data, tmp_path / "noise.npz")
    async with network(tmp_path, NAMES, noise=noise) as up:
        running = asyncio.ensure_future(up.run(spec, data))
        for rounds in (20, 150):
            await up.until("ben", LearnerState.RUNNING, rounds)
            up._following["ben"].cancel()
            await asyncio.sleep(0.1)
            up.follow("ben")
        outcome = await running
        found = decisions(up)
    assert (outcome.state, outcome.detail) == ("finished", "")
    np.testing.assert_allclose(found, last, rtol=1e-12, atol=1e-12)


# ---- a coordinator that errs -----------------------------------------------------------------------------------------


async def test_a_coordinator_with_another_network_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = RunStateMachine._build_epoch

    def altered(book: RunStateMachine, index: int) -> TopologyEpoch:
        epoch = true(book, index)
        if index == 1:
            epoch.neighbours[0].weight = 0.25
        return epoch

    monkeypatch.setattr(RunStateMachine, "_build_epoch", altered)
    spec = spec_of(RING)
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, made_up(spec))
    assert outcome.state == "failed"
    assert outcome.detail.startswith("ben failed: in round 0 in-neighbours and their weights must be ann 0.5")
    assert "and the recipients cleo, got ann 0.25" in outcome.detail


async def test_a_coordinator_with_another_network_is_found_out_by_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Another(NetworkDigests):
        def digest(self, t: int) -> bytes:
            return b"another" if t == 9 else super().digest(t)

    monkeypatch.setattr(run_state, "NetworkDigests", Another)  # the coordinator's
    spec = spec_of(TURNS)
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, made_up(spec))
    assert outcome.state == "failed"
    assert "the senders and weights must be those of the run spec, and the coordinator's digest" in outcome.detail


async def test_rounds_whose_epochs_are_missing_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(book: RunStateMachine) -> RoundLease:
        return RoundLease(until_round=book.clock.leased_until)

    monkeypatch.setattr(RunStateMachine, "build_next_lease", forgetful)
    spec: RunSpec = spec_of(TURNS)
    data: PlacedData = made_up(spec)
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, data)
    assert outcome.state == "failed"
    assert "an epoch for round 1 must come first" in outcome.detail
