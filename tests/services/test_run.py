"""Whole runs in one event loop: what is captured, that it equals the simulation, and what breaks and heals on the way."""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import grpc
import numpy as np
import pytest
import structlog

from sottovoce_client.runs import feeder as feeders
from sottovoce_client.runs.feeder import make_batch
from sottovoce_client.runs.run_client import STOPPED_BY_OPERATOR, Outcome, RunInterrupted
from sottovoce_coordinator.round_clock import RoundClock
from sottovoce_coordinator.run_state import RunStateMachine
from sottovoce_core.arrays import FloatArray
from sottovoce_core.data import PlacedData, load_dataset
from sottovoce_core.errors import Unavailable
from sottovoce_core.noise import Recorder, SeededNoise
from sottovoce_core.runs.placement import place_data
from sottovoce_core.runs.run import build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper import capture_session
from sottovoce_eavesdropper.capture_reader import Capture, open_capture
from sottovoce_eavesdropper.grpc_proxy import GrpcProxy, GrpcRecorder
from sottovoce_eavesdropper.http2 import Direction, Event
from sottovoce_learner import service as learner_service
from sottovoce_learner.service import Learner
from sottovoce_learner.storage import run_log
from sottovoce_learner.storage.run_log import SNAPSHOT_AFTER_BYTES, SNAPSHOT_AFTER_ROUNDS, RunLog
from sottovoce_learner.storage.state_folder import DiskFull
from sottovoce_learner.storage.store import Ledger
from sottovoce_learner.storage.wal import EntryKind, RoundPayload
from sottovoce_rpc.codec import RoundCodec, from_fields, read_hello
from sottovoce_rpc.learner_status import LearnerState, WaitCause
from sottovoce_rpc.server import open_channel
from sottovoce_wire.v1 import coordinator_pb2, learner_pb2, learner_pb2_grpc
from tests.examples import made_up, small_spec
from tests.learner.test_links import Stream
from tests.services.capturing import said_again
from tests.services.network import PATIENCE_S, missed_soon, network, refused, said_rounds

ROUNDS = 30
NAMES = ["ann", "ben", "cleo", "dan"]
SHAPES: dict[str, tuple[int, ...]] = {"y": (3,)}
CODEC = RoundCodec(SHAPES)


def spec_of(capture: str = "none", **more: Any) -> RunSpec:
    more = {"clock": {"window": 7, "deadline_s": 100.0}, "telemetry": {"accuracy": True, "predict": True}, **more}
    return small_spec(ROUNDS, NAMES, capture=capture, **more)


def captured(outcome: Outcome) -> Capture:
    assert outcome.capture_location is not None
    capture = open_capture(outcome.capture_location)
    assert (capture.metadata["detection_count"], capture.metadata["unchecked_reason"]) == (0, None)
    return capture


def closed(outcome: Outcome) -> Capture:
    """The capture, which is complete when a run is reported over."""
    capture = captured(outcome)
    assert capture.is_complete
    return capture


def recorded(spec: RunSpec, data: PlacedData, path: Path) -> tuple[Path, FloatArray, FloatArray]:
    """Simulate; the noise as a file, what was said, and the last decisions."""
    run = build_run(spec, data.n_features)
    recorder = Recorder(SeededNoise(1))
    rounds = list(simulate_rounds(run, data, recorder))
    np.savez(path, y=np.stack(recorder.noise_by_field["y"]))
    return path, np.stack([step.message["y"] for step in rounds]), rounds[-1].decisions_after[:, 0]


# ---- a run that goes well --------------------------------------------------------------------------------------------


@pytest.fixture
def kept_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners keep the log of a run that is over."""
    monkeypatch.setattr(learner_service, "end_run", lambda *_, **__: None)


@pytest.mark.parametrize("capture", ["none", "mirror", "relay"])
async def test_a_run_equals_its_simulation_and_the_capture_shows_it(tmp_path: Path, capture: str) -> None:
    """Equal noise, equal data: what crosses the wire is what the simulator computed, to 1e-12."""
    spec = spec_of(capture)
    data = made_up(spec, batch=2)
    noise, said, last = recorded(spec, data, tmp_path / "noise.npz")
    async with network(tmp_path, NAMES, noise=noise) as up:
        outcome = await up.run(spec, data)
        decisions = [
            up.learners[name]
            .require_session()
            .algorithm.decision(up.learners[name].require_session().state_machine.state)
            for name in NAMES
        ]
        if capture != "none":
            closed(outcome)

    assert (outcome.state, outcome.detail) == ("finished", "")
    np.testing.assert_allclose(decisions, last, rtol=1e-12, atol=1e-12)
    for status, own in zip(outcome.statuses, data.learners, strict=True):
        assert (status.state, status.rounds_done) == (LearnerState.FINISHED, ROUNDS)
        assert (status.rounds_with_data, status.messages_sent) == (ROUNDS, 2 * ROUNDS)
        assert status.noise_is_not_private
        assert status.prequential_accuracy is not None
        assert len(own.order) == 2 * ROUNDS
    run = build_run(spec, 3)
    spent = [status.epsilon_spent for status in outcome.statuses]
    counts = np.full(ROUNDS, 2)
    assert spent == pytest.approx([run.guarantee(i, counts).epsilon() for i in range(4)], rel=1e-12)
    assert all(labels is not None and labels.shape == (8,) for labels in outcome.predictions)

    if capture == "none":
        assert outcome.capture_location is None
        return
    transcript = captured(outcome).read_transcript(SHAPES, 4)
    np.testing.assert_allclose(transcript.fields["y"], said, rtol=1e-12, atol=1e-12)
    assert captured(outcome).metadata["messages"] == 2 * 4 * ROUNDS == captured(outcome).read_messages().num_rows


async def test_mirror_and_relay_show_the_same(tmp_path: Path) -> None:
    """Row by row: who said which bytes to whom, over which stream; the relay sees metadata besides."""
    seen = {}
    for capture in ("mirror", "relay"):
        spec = spec_of(capture)
        data = made_up(spec)
        noise, _, _ = recorded(spec, data, tmp_path / "noise.npz")
        async with network(tmp_path / capture, NAMES, noise=noise) as up:
            table = closed(await up.run(spec, data)).read_messages()
        columns = ["caller", "callee", "sender", "direction", "size", "payload"]
        seen[capture] = sorted(zip(*(table[name].to_pylist() for name in columns), strict=True))
    assert seen["mirror"] == seen["relay"]
    assert len({size for *_, size, _ in seen["relay"]}) == 1


async def test_both_sides_of_every_stream_greet_first(tmp_path: Path) -> None:
    """What they say of themselves has one length, and none of it depends on records: it is all said before the first."""
    spec = spec_of("relay")
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, made_up(spec))
        capture = closed(outcome)
    ways: dict[tuple[int, int, str], list[tuple[str, bytes]]] = {}
    for batch in capture.read_batches(["caller", "callee", "sender", "direction", "kind", "payload"]):
        for each in batch.to_pylist():
            if each["kind"] in ("hello", "message"):
                way = each["sender"], each["caller"] + each["callee"] - each["sender"], each["direction"]
                ways.setdefault(way, []).append((each["kind"], each["payload"]))
    assert len(ways) == 8
    assert all([kind for kind, _ in said] == ["hello", *["message"] * ROUNDS] for said in ways.values())
    hellos = {way: read_hello(said[0][1]) for way, said in ways.items()}
    assert {(said.learner, said.next_round) for said in hellos.values()} == {(i, 0) for i in range(4)}
    assert all(sender == said.learner for (sender, *_), said in hellos.items())
    assert {said.run_id for said in hellos.values()} == {outcome.run_id}
    assert all(from_fields(said.fields) == SHAPES == capture.shapes for said in hellos.values())
    assert len({said.plan_hash for said in hellos.values()}) == len({said.ByteSize() for said in hellos.values()}) == 1


async def test_private_noise_differs_from_run_to_run_and_is_said_to_be_private(tmp_path: Path) -> None:
    spec, said = spec_of("mirror"), []
    async with network(tmp_path, NAMES) as up:
        for _ in range(2):
            outcome = await up.run(spec, made_up(spec))
            said.append(closed(outcome).read_transcript(SHAPES, 4).fields["y"])
            assert not any(status.noise_is_not_private for status in outcome.statuses)
    assert not (said[0] == said[1]).any()


async def test_every_neighbour_hears_the_bytes_of_the_journal(tmp_path: Path, kept_logs: None) -> None:
    spec = spec_of("relay")
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, made_up(spec))
        table = closed(outcome).read_messages()
    heard: dict[tuple[int, int], set[bytes]] = {}
    for sender, payload in zip(table["sender"].to_pylist(), table["payload"].to_pylist(), strict=True):
        heard.setdefault((sender, CODEC.decode(payload)[0]), set()).add(payload)

    assert all(len(payloads) == 1 for payloads in heard.values())
    for i, name in enumerate(NAMES):
        rounds = said_rounds(tmp_path / "journals", name)
        assert [t for t, _ in rounds] == list(range(ROUNDS + 1))
        assert [{said.frame} for _, said in rounds[:-1]] == [heard[i, t] for t in range(ROUNDS)]
        (line,) = Ledger(tmp_path / "journals").list_entries(name)
        assert (line.rounds_committed, line.epsilon_spent) == (ROUNDS, outcome.statuses[i].epsilon_spent)


async def test_the_log_has_all_that_a_learner_took_in(tmp_path: Path, kept_logs: None) -> None:
    spec = spec_of()
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, made_up(spec))
    logs = [dict(said_rounds(tmp_path / "journals", name)) for name in NAMES]
    network_of = build_run(spec, 3).network
    for i, log in enumerate(logs):
        for t in range(1, ROUNDS + 1):
            heard = [logs[j][t - 1].frame for j in network_of.mixing(t - 1).in_neighbour_weights(i)]
            assert list(log[t].received_frames) == heard
    assert outcome.state == "finished"


async def test_a_file_says_who_learns_what_when(tmp_path: Path) -> None:
    """Columns `learner` and `round`, some rounds without any record: the run equals the simulation."""
    rows = ["a,b,label,learner,round"]
    generator = np.random.default_rng(5)
    for k in range(40):
        a, b = generator.normal(size=2)
        rows.append(f"{a},{b},{k % 2},{NAMES[k % 4]},{3 * k % 25}")
    (tmp_path / "d.csv").write_text("\n".join(rows), encoding="utf-8")
    spec = spec_of("mirror", data={"source": str(tmp_path / "d.csv"), "order": "given"})
    data = place_data(spec, load_dataset(spec.data, spec.loss))
    noise, said, _ = recorded(spec, data, tmp_path / "noise.npz")
    async with network(tmp_path, NAMES, noise=noise) as up:
        outcome = await up.run(spec, data)
        transcript = closed(outcome).read_transcript(SHAPES, 4)

    assert outcome.state == "finished"
    assert {data.learners[i].batch(t).size for i in range(4) for t in range(ROUNDS)} >= {0, 1}
    np.testing.assert_allclose(transcript.fields["y"], said, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clock", [{"mode": "data"}, {"mode": "paced", "period_s": 0.01}, {"window": 1}], ids=str)
async def test_other_clocks_bring_a_run_to_its_end(tmp_path: Path, clock: dict[str, Any]) -> None:
    spec = spec_of(clock={**clock, "deadline_s": 100.0})
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, made_up(spec))
    assert outcome.state == "finished"


async def test_a_paced_clock_says_nothing_while_a_learner_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is fed, so no round is ever done: after the first grant of a window of one nothing grows."""
    ticks, said, enough, true = 0, list[int](), asyncio.Event(), (RoundClock.tick, RunStateMachine.build_next_lease)

    def tick(own: RoundClock) -> int:
        nonlocal ticks
        ticks += 1
        if ticks == 20:
            enough.set()
        return true[0](own)

    def go_on(own: RunStateMachine) -> Any:
        said.append(own.clock.leased_until)
        return true[1](own)

    monkeypatch.setattr(RoundClock, "tick", tick)
    monkeypatch.setattr(RunStateMachine, "build_next_lease", go_on)
    async with network(tmp_path, NAMES) as up:
        await up.start(spec_of(clock={"mode": "paced", "period_s": 0.002, "window": 1, "deadline_s": 100.0}), 3)
        await asyncio.wait_for(enough.wait(), PATIENCE_S)
    assert said == [1]


async def test_a_learner_alone_can_run(tmp_path: Path) -> None:
    spec = small_spec(ROUNDS, ["solo"])
    async with network(tmp_path, ["solo"]) as up:
        outcome = await up.run(spec, made_up(spec))
    assert (outcome.state, outcome.statuses[0].rounds_done, outcome.statuses[0].messages_sent) == (
        "finished",
        ROUNDS,
        0,
    )


async def test_learners_serve_one_run_after_another(tmp_path: Path) -> None:
    spec = spec_of()
    async with network(tmp_path, NAMES) as up:
        outcomes = [await up.run(spec, made_up(spec, seed=k)) for k in range(3)]
    assert [outcome.state for outcome in outcomes] == ["finished"] * 3
    assert len({outcome.run_id for outcome in outcomes}) == 3


async def test_the_logs_of_a_run_go_with_it(tmp_path: Path) -> None:
    """They hold the owners' records. What the run has cost stays; a run that failed leaves them, to be taken up again."""
    journals = tmp_path / "journals"
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec_of(), made_up(spec_of()))
        spent = {name: Ledger(journals).sum_epsilon(name) for name in NAMES}
        async with asyncio.timeout(PATIENCE_S):
            while list(journals.glob("*@*")):  # noqa: ASYNC110 - a folder is no event
                await asyncio.sleep(0.01)
        assert {name: Ledger(journals).sum_epsilon(name) for name in NAMES} == spent
        assert [Ledger(journals).verify(name, imports=False)[-1].rounds_committed for name in NAMES] == [ROUNDS] * 4
        late = await up.start(small_spec(100_000, NAMES, clock={"deadline_s": 1.0}), 3)
        await up.end(late.run_id)
    assert outcome.state == "finished" and min(spent.values()) > 0
    assert len(list(journals.glob("*@*"))) == 4


# ---- a run that is stopped -------------------------------------------------------------------------------------------


async def test_a_learner_whose_budget_would_be_exceeded_stops_speaking(tmp_path: Path, kept_logs: None) -> None:
    """The run stops and says why; the message that was too dear is nowhere: not sent, not journaled, not charged."""
    free = build_run(spec_of(), 3).guarantee(1).cumulative_epsilon
    budget = float((free[11] + free[12]) / 2)  # enough for the messages of rounds 0 to 11
    spec = spec_of("relay", privacy={"budget": [1e9, budget, 1e9, 1e9]})
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, made_up(spec))
        table = closed(outcome).read_messages()
    status = outcome.statuses[1]

    assert outcome.state == "stopped"
    assert outcome.detail.startswith("ben stopped sending: sending round 12 would bring the spent epsilon from ")
    assert outcome.detail.endswith(f"above the budget of {budget:.6g}")
    assert status.state == LearnerState.BUDGET_EXHAUSTED
    assert status.epsilon_spent == pytest.approx(free[11]) and status.epsilon_spent <= budget == status.epsilon_budget
    said = {
        CODEC.decode(payload)[0]
        for sender, payload in zip(table["sender"].to_pylist(), table["payload"].to_pylist(), strict=True)
        if sender == 1
    }
    assert said == set(range(12))
    assert [t for t, _ in said_rounds(tmp_path / "journals", "ben")] == list(range(12))


async def test_an_operator_stops_a_run(tmp_path: Path) -> None:
    spec = small_spec(100_000, NAMES, capture="relay")
    data, stop = made_up(small_spec(ROUNDS, NAMES)), asyncio.Event()
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, data, stop))
        await up.until("ann", LearnerState.RUNNING, 5)
        stop.set()
        outcome = await running
        for name in NAMES:
            await up.until(name, LearnerState.STOPPED)
        capture = closed(outcome)
    assert (outcome.state, outcome.detail) == ("stopped", STOPPED_BY_OPERATOR)
    assert capture.read_transcript(SHAPES, 4).rounds >= 5


async def test_a_run_is_stopped_when_its_coordinator_is_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, stop = (
        small_spec(100_000, NAMES, clock={"mode": "paced", "period_s": 0.01, "deadline_s": 100.0}),
        asyncio.Event(),
    )
    said = ""
    async with network(tmp_path, NAMES, durable=True) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec), stop))
        await up.until("ann", LearnerState.RUNNING, 2)
        old = await up.cut_coordinator()
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            while "the coordinator is disconnected: the run is stopped when it is back" not in said:
                await asyncio.sleep(0.05)
                said += capsys.readouterr().err
        up.coordinating = old
        await up.restart_coordinator()
        outcome = await running
    assert (outcome.state, outcome.detail) == ("stopped", STOPPED_BY_OPERATOR)


async def test_an_operator_need_not_wait_for_learners_that_never_join(tmp_path: Path) -> None:
    """And the coordinator is free for the next run."""
    spec, stop = spec_of(), asyncio.Event()
    async with network(tmp_path, NAMES[:3]) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec), stop))
        await asyncio.sleep(0.1)
        stop.set()
        with pytest.raises(RunInterrupted, match="stopped before the run began"):
            await running
        await up.join(NAMES[3])
        assert (await up.run(spec, made_up(spec))).state == "finished"


@pytest.mark.parametrize("rounds", [1, 50])
async def test_a_learner_that_is_told_to_end_finishes_the_message_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """As SIGTERM does it, in full run: whatever was journaled and charged crossed the wire."""
    spec = small_spec(2_000, NAMES, capture="relay", clock={"deadline_s": 5.0})
    data = made_up(spec, records=5)
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, data))
        await up.until("ben", LearnerState.RUNNING, rounds)
        leaving = up.learners["ben"]
        missed_soon(monkeypatch)
        await up.leave("ben")
        assert leaving.require_session().status.state == LearnerState.STOPPED
        outcome = await running
        table = closed(outcome).read_messages()
    entries = said_rounds(tmp_path / "journals", "ben")
    payloads = set(table["payload"].to_pylist())

    assert outcome.state == "failed"
    assert outcome.detail.startswith("ben is gone since round ")
    assert entries and entries[-1][0] < 2_000 - 1
    assert all(said.frame in payloads for _, said in entries)


async def test_a_learner_does_not_end_before_its_last_message_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A channel that takes its time: the learner waits for it (`FLUSH_S`, here for long)."""
    monkeypatch.setattr(learner_service, "FLUSH_TIMEOUT_S", 60.0)
    spec, slow = spec_of(), Stream(hold=True)
    async with network(tmp_path, NAMES) as up:
        await up.start(spec, 3)
        await up.until("ben", LearnerState.RUNNING)
        await eventually_said(up.learners["ben"])
        up.learners["ben"].require_session().links[2].attach(slow, 0)
        leaving = asyncio.ensure_future(up.leave("ben"))
        done, _ = await asyncio.wait([leaving], timeout=1.5)
        assert not done
        slow.release()
        await leaving
    (frame,) = slow.written
    assert CODEC.decode(frame)[:2] == (0, 1)


async def eventually_said(learner: Learner) -> None:
    """Wait until a learner, which has no records yet, has said round 0."""
    async with asyncio.timeout(PATIENCE_S):
        while learner._session is None or learner.require_session().status.messages_sent == 0:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)


# ---- channels that break ---------------------------------------------------------------------------------------------


class Cutting(GrpcProxy):
    """A relay that records a message, and cuts the connection in place of passing it on, at chosen messages of a direction."""

    cuts: ClassVar[dict[tuple[int, int, str], list[int]]] = {}
    """(caller, callee, direction) to the rounds whose messages cut the connection, each once."""

    def build_recorder(self, number: int) -> GrpcRecorder:
        recorder = super().build_recorder(number)
        record_event = recorder.record_event

        def check(direction: Direction, event: Event) -> None:
            record_event(direction, event)
            due, payload = self.cuts.get((self.route.caller, self.route.callee, direction), []), event.payload
            if due and len(payload) == CODEC.message_bytes and CODEC.decode(payload)[0] == due[0]:
                due.pop(0)
                raise Unavailable("cut")

        recorder.record_event = check  # type: ignore[method-assign]
        return recorder


def by_round(transcript: Transcript) -> FloatArray:
    return transcript.fields["y"][:, :, 0]


@pytest.mark.parametrize(
    ("direction", "rounds"),
    [("back", [0]), ("back", [7, 8, 20]), ("back", [ROUNDS - 1]), ("out", [0]), ("out", [11]), ("out", [ROUNDS - 1])],
    ids=str,
)
async def test_a_broken_stream_is_opened_again_and_the_same_bytes_are_said_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direction: str, rounds: list[int]
) -> None:
    """The relay takes a message in and dies with it, even the last one: the run ends as if nothing had happened.

    Equal to the simulation, so each learner heard every message once; and nothing was said twice in different bytes, which
    reading the transcript checks. What was said again is marked in the capture, and nothing else.
    """
    spec = spec_of("relay")
    data = made_up(spec)
    noise, said, last = recorded(spec, data, tmp_path / "noise.npz")
    left = list(rounds)
    monkeypatch.setattr(Cutting, "cuts", {(1, 2, direction): left})
    monkeypatch.setattr(capture_session, "GrpcProxy", Cutting)
    async with network(tmp_path, NAMES, noise=noise) as up:
        outcome = await up.run(spec, data)
        capture = closed(outcome)
        decisions = [
            up.learners[name]
            .require_session()
            .algorithm.decision(up.learners[name].require_session().state_machine.state)
            for name in NAMES
        ]

    assert left == []
    assert (outcome.state, outcome.detail) == ("finished", "")
    np.testing.assert_allclose(decisions, last, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(by_round(capture.read_transcript(SHAPES, 4)), said[:, :, 0], rtol=1e-12, atol=1e-12)
    marked = said_again(capture)
    assert {(1 if direction == "out" else 2, t) for t in rounds} <= {CODEC.decode(payload)[1::-1] for payload in marked}


async def test_a_relay_that_is_restarted_on_its_port_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sottovoce_eavesdropper.grpc_proxy.FINISH_TIMEOUT_S", 0.2)
    clock = {"mode": "paced", "period_s": 0.004, "window": 50, "deadline_s": 100.0}
    spec = small_spec(400, NAMES, capture="relay", clock=clock)
    data = made_up(spec, records=10)
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, data))
        await up.until("ann", LearnerState.RUNNING, 20)
        assert up.eavesdropping is not None
        (recording,) = up.eavesdropping._captures.sessions.values()
        relay = recording.proxies[0]
        assert up.coordinating is not None
        address = up.coordinating._runs.active_runs[0].machine.capture_binding.relay_addresses[0, 1]
        await relay.stop()
        before = (await up.status("ann")).rounds_done
        assert before < 400
        await asyncio.sleep(0.2)
        assert (await up.status("ann")).rounds_done <= before + 1  # nobody can go on without a neighbour

        again = recording.proxies[0] = GrpcProxy(relay.route, recording.writer)
        assert await again.open(address) == address
        outcome = await running
        transcript = closed(outcome).read_transcript(SHAPES, 4)
    assert (outcome.state, transcript.rounds) == ("finished", 400)


# ---- what is written before it is said -------------------------------------------------------------------------------


async def test_a_message_is_journaled_and_charged_before_it_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal that cannot be written stops the learner, and what it could not write was never said."""
    say = RunLog.write_ahead
    failing: list[bytes] = []

    def full(log: RunLog, t: int, spent: float, said: RoundPayload) -> None:
        if (t, CODEC.decode(said.frame)[1]) == (9, 2):
            failing.append(said.frame)
            raise OSError(5, "Input/output error", "/secret/path")
        say(log, t, spent, said)

    monkeypatch.setattr(RunLog, "write_ahead", full)
    spec = spec_of("relay")
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, made_up(spec))
        table = closed(outcome).read_messages()

    assert len(failing) == 1
    assert failing[0] not in table["payload"].to_pylist()
    assert (outcome.state, outcome.detail) == (
        "failed",
        "cleo failed: the log cannot be written: Input/output error",
    )
    spent = build_run(spec, 3).guarantee(2).cumulative_epsilon
    assert outcome.statuses[2].epsilon_spent == pytest.approx(spent[8])


@pytest.mark.parametrize("what", ["a message", "records", "the end"])
async def test_a_full_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Whoever looks sees who waits for what; then the same bytes are written, and the run ends as if nothing had been."""
    kind = {"a message": EntryKind.ROUND, "records": EntryKind.BATCH, "the end": EntryKind.CLOSE}[what]
    append, room, tried = RunLog._append, asyncio.Event(), list[bytes]()

    def appended(own: RunLog, asked: EntryKind, t: int, spent: float, body: bytes) -> None:
        about = own._log._header
        if asked is kind and about.learner == "cleo" and (kind is not EntryKind.ROUND or t == 9):
            tried.append(body)
            if not room.is_set():
                raise DiskFull
        append(own, asked, t, spent, body)

    monkeypatch.setattr(RunLog, "_append", appended)
    monkeypatch.setattr("sottovoce_learner.progress.DISK_RETRY_INTERVAL_S", 0.05)
    spec = spec_of()
    noise, _, last = recorded(spec, made_up(spec, batch=2), tmp_path / "noise.npz")
    with structlog.testing.capture_logs() as logs:
        async with network(tmp_path, NAMES, noise=noise) as up:
            running = asyncio.ensure_future(up.run(spec, made_up(spec, batch=2)))
            cleo = up.learners["cleo"]
            async with asyncio.timeout(PATIENCE_S):
                while cleo._session is None or cleo._session.reportable_wait is None or len(tried) < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert cleo._session.reportable_wait.cause is WaitCause.DISK
            room.set()
            outcome = await running
            found = np.stack(
                [
                    up.learners[name]
                    .require_session()
                    .algorithm.decision(up.learners[name].require_session().state_machine.state)
                    for name in NAMES
                ]
            )
    assert (outcome.state, outcome.detail) == ("finished", "")
    full = [(each["learner"], each["log_level"]) for each in logs if each["event"].startswith("disk full")]
    assert full == [("cleo", "warning")]
    assert len(set(tried)) == 1 or kind is EntryKind.BATCH
    np.testing.assert_allclose(found, last, rtol=1e-12, atol=1e-12)


async def test_a_learner_that_is_started_again_on_a_full_disk_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(clock={"mode": "paced", "period_s": 0.02, "deadline_s": PATIENCE_S})
    allocate, full = os.posix_fallocate, asyncio.Event()

    def allocated(file: int, at: int, size: int) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(file, at, size)

    monkeypatch.setattr(os, "posix_fallocate", allocated)
    monkeypatch.setattr("sottovoce_learner.progress.DISK_RETRY_INTERVAL_S", 0.05)
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ben", LearnerState.RUNNING, 5)
        await up.leave("ben")
        full.set()
        await up.join("ben")
        async with asyncio.timeout(PATIENCE_S):
            ben = up.learners["ben"]
            while (  # noqa: ASYNC110 - no event says so
                ben._session is None
                or (wait := ben._session.wait_tracker.current_wait) is None
                or wait.cause is not WaitCause.DISK
            ):
                await asyncio.sleep(0.01)
        full.clear()
        outcome = await running
    assert (outcome.state, outcome.detail) == ("finished", "")


async def test_a_disk_without_room_for_another_run_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, at: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    spec = spec_of()
    async with network(tmp_path, NAMES) as up:
        monkeypatch.setattr(os, "posix_fallocate", full)
        outcome = await up.run(spec, made_up(spec))
    assert outcome.state == "failed"
    assert re.search(
        "(ann|ben|cleo|dan) failed: the log of the run cannot be written: No space left on device", outcome.detail
    )


async def test_a_feeder_that_leaves_a_full_disk_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing from then on are records, not room: there is another deadline for them."""
    append, room = RunLog._append, asyncio.Event()

    def appended(own: RunLog, kind: EntryKind, *more: Any) -> None:
        if kind is EntryKind.BATCH and not room.is_set():
            raise DiskFull
        append(own, kind, *more)

    monkeypatch.setattr(RunLog, "_append", appended)
    spec = small_spec(20, NAMES[:1], clock={"deadline_s": 2.0, "outage_timeout_s": 1_000.0})
    async with network(tmp_path, NAMES[:1]) as up:
        run_id = (await up.start(spec, 3)).run_id
        feeding = asyncio.ensure_future(up.feed(run_id, spec, made_up(spec)))
        async with asyncio.timeout(PATIENCE_S):
            ann = up.learners["ann"]
            while (  # noqa: ASYNC110 - no event says so
                ann._session is None
                or (wait := ann._session.wait_tracker.current_wait) is None
                or wait.cause is not WaitCause.DISK
            ):
                await asyncio.sleep(0.01)
        feeding.cancel()
        end = await up.end(run_id)
    assert end.state == coordinator_pb2.RUN_STATE_FAILED
    assert end.detail == "ann failed: waited 2 s for records in round 0"


async def test_a_connection_that_breaks_while_a_feeder_asks_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner dies at just that moment, once for each of them and again after the first records."""
    ready, breaks = feeders._wait_for_run, Counter[str]()

    async def broken(stub: Any, run_id: str, address: str, patience_s: float) -> None:
        breaks[address] += 1
        if breaks[address] in (1, 3):
            empty = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, empty, empty, "Stream removed")
        await ready(stub, run_id, address, patience_s)

    async def brief(own: Any) -> AsyncIterator[Any]:
        """A stream that ends before all is sent, the first time."""
        for k, batch in enumerate([each async for each in batches(own)]):
            if k and breaks[""] < len(NAMES):
                breaks[""] += 1
                return
            yield batch

    batches = feeders._BatchStream.batches
    monkeypatch.setattr(feeders, "_wait_for_run", broken)
    monkeypatch.setattr(feeders, "_RETRY_DELAY_S", 0.01)
    monkeypatch.setattr(feeders._BatchStream, "batches", brief)
    spec = small_spec(200, NAMES, clock={"deadline_s": PATIENCE_S})
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, made_up(spec))
    assert (outcome.state, outcome.detail) == ("finished", "")
    assert breaks[""] == len(NAMES) and len(breaks) == len(NAMES) + 1


@pytest.mark.parametrize(
    ("failures", "given_up"), [([0, 30, 60], False), ([0, 61], True), ([0, 50, None, 70, 130], False)]
)
def test_patience_is_counted_from_the_first_failure_in_a_row(failures: list[float | None], given_up: bool) -> None:
    failing, found = feeders._FailureTimer(60.0), False
    for now in failures:
        if now is None:
            failing.reset()
        else:
            found = failing.has_expired(now)
    assert found == given_up


# ---- what was spent --------------------------------------------------------------------------------------------------


async def test_a_learner_can_be_asked_what_it_has_spent(tmp_path: Path) -> None:
    """In all runs, also after it was restarted; and its owner's budget, which no run's spec can raise, stops it."""
    spec = spec_of()
    async with network(tmp_path, NAMES) as up:
        first, second = [await up.run(spec, made_up(spec)) for _ in range(2)]
        await up.leave("ann")
        up.budget = 2.5 * first.statuses[0].epsilon_spent
        await up.join("ann")
        third = await up.run(spec, made_up(spec))
        async with open_channel(up.addresses["ann"]) as to:
            ledger = await learner_pb2_grpc.LearnerStub(to).GetLedger(learner_pb2.GetLedgerRequest())
    spent = [outcome.statuses[0].epsilon_spent for outcome in (first, second, third)]

    assert (first.state, second.state, third.state) == ("finished", "finished", "stopped")
    assert "in all runs" in third.detail
    assert sorted(line.epsilon_spent for line in ledger.entries) == sorted(spent)
    assert {(line.learner, line.algorithm, line.index) for line in ledger.entries} == {("ann", "ldp-dol", 0)}
    assert sum(spent) <= ledger.owner_budget == up.budget
    assert third.statuses[0].epsilon_other_runs == pytest.approx(2 * spent[0])


# ---- files of the client ---------------------------------------------------------------------------------------------


async def test_a_graph_file_stays_with_the_client(tmp_path: Path) -> None:
    """The client sends its edges; a coordinator reads no file of its own machine for somebody who asks."""
    edges = tmp_path / "edges.txt"
    edges.write_text("0 1\n1 2\n2 3\n", encoding="utf-8")
    spec = spec_of(topology={"graph": {"kind": "file", "path": str(edges)}})
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, made_up(spec))
        refusal = await refused(up.start(spec, 3))

    assert outcome.state == "finished"
    assert [status.messages_sent for status in outcome.statuses] == [ROUNDS, 2 * ROUNDS, 2 * ROUNDS, ROUNDS]
    assert refusal.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "must list its edges" in (refusal.details() or "")


# ---- what goes on after a death --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grown", "rounds"),
    [(SNAPSHOT_AFTER_BYTES, SNAPSHOT_AFTER_ROUNDS), (3_000, SNAPSHOT_AFTER_ROUNDS), (SNAPSHOT_AFTER_BYTES, 60)],
    ids=["log", "snapshots by bytes", "snapshots by rounds"],
)
async def test_a_learner_that_is_started_again_goes_on_in_its_run(
    tmp_path: Path, kept_logs: None, monkeypatch: pytest.MonkeyPatch, grown: int, rounds: int
) -> None:
    """With its records there already; its state folder has all that it needs, and its neighbours what it has not heard."""
    spec = small_spec(400, NAMES, capture="relay", clock={"deadline_s": PATIENCE_S})
    data = made_up(spec, records=3)
    monkeypatch.setattr(run_log, "SNAPSHOT_AFTER_BYTES", grown)
    monkeypatch.setattr(run_log, "SNAPSHOT_AFTER_ROUNDS", rounds)
    async with network(tmp_path, NAMES) as up:
        run_id = (await up.start(spec, data.n_features)).run_id
        await up.feed(run_id, spec, data)
        await up.until("ann", LearnerState.RUNNING, 50)
        await up.leave("ann")
        before = said_rounds(tmp_path / "journals", "ann")
        await up.join("ann")
        end = await up.end(run_id)
        after = said_rounds(tmp_path / "journals", "ann")
    snapshots = list((tmp_path / "journals").glob("*@*/*.snapshot"))
    assert (end.state, end.detail) == (coordinator_pb2.RUN_STATE_FINISHED, "")
    if (grown, rounds) == (SNAPSHOT_AFTER_BYTES, SNAPSHOT_AFTER_ROUNDS):
        assert snapshots == []
        assert 5 <= len(before) < 400
        assert after[: len(before)] == before
        assert [t for t, _ in after] == list(range(401))
    else:  # the first rounds are gone; of each learner the last snapshot stays, and one before it where the run ended meanwhile
        assert len({each.parent for each in snapshots}) == 4 and len(snapshots) <= 8
        assert after[0][0] > 0 and after[-1][0] == 400
    assert (
        open_capture(end.capture_location).read_transcript(SHAPES, 4).rounds == 400
    )  # refused where a round has two contents


@pytest.mark.parametrize("capture", ["none", "relay"])
async def test_a_learner_may_come_back_at_another_address(tmp_path: Path, capture: str) -> None:
    """Its neighbours, those that open streams to it, too, its relays and its feeder find it there."""
    spec = small_spec(400, NAMES, capture=capture, clock={"mode": "paced", "period_s": 0.004, "deadline_s": PATIENCE_S})
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec, records=3)))
        for name in ("cleo", "dan"):
            await up.until(name, LearnerState.RUNNING, 20)
            before = up.addresses[name]
            await up.leave(name)
            await up.join(name)
            assert up.addresses[name] != before
        outcome = await running
        assert (outcome.state, outcome.detail) == ("finished", "")
        assert [status.rounds_done for status in outcome.statuses] == [400] * 4
        if capture == "relay":
            assert closed(outcome).read_transcript(SHAPES, 4).rounds == 400


async def test_a_feeder_makes_no_more_than_its_learner_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its neighbours have no records, so it stays in round 0."""
    made = [0]

    def counting(*given: Any) -> Any:
        made[0] += 1
        return make_batch(*given)

    monkeypatch.setattr(feeders, "make_batch", counting)
    spec = small_spec(64 * 1_000, NAMES)
    data = made_up(spec, records=1)
    async with network(tmp_path, NAMES) as up:
        run_id = (await up.start(spec, data.n_features)).run_id
        feeding = asyncio.ensure_future(up.feed(run_id, spec, data, but=NAMES[1:]))
        async with asyncio.timeout(PATIENCE_S):
            while not up.learners["ann"]._session or not up.learners["ann"].require_session().ingestor.has_enough:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        assert 64 <= made[0] < 200
        feeding.cancel()


async def test_a_feeder_that_comes_back_is_told_at_once_what_is_due(tmp_path: Path) -> None:
    """Also after the learner was started again, and while its feeder says nothing more: records are kept before their receipt."""
    spec = small_spec(400, NAMES)
    data = made_up(spec, records=3)
    sent = [make_batch(data.learners[0], "feeder", k) for k in range(7)]
    async with network(tmp_path, NAMES) as up:
        run_id = (await up.start(spec, data.n_features)).run_id
        await up.feed(run_id, spec, data, but=NAMES[1:])
        await up.leave("ann")
        await up.join("ann")
        await up.until("ann", LearnerState.RUNNING)
        async with open_channel(up.addresses["ann"]) as to:
            call = learner_pb2_grpc.LearnerStub(to).Ingest(timeout=PATIENCE_S)
            await call.write(sent[0])
            receipt = await call.read()
            call.cancel()
    assert isinstance(receipt, learner_pb2.IngestReceipt)
    assert receipt.next_sequence == len(sent) > 1


async def test_a_learner_whose_folder_was_set_back_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, to an earlier moment, on the same disk: its coordinator or its neighbours know what it has said."""
    spec = small_spec(100_000, NAMES)
    data, state = made_up(small_spec(ROUNDS, NAMES), records=200), tmp_path / "journals"
    async with network(tmp_path, NAMES) as up:
        run_id = (await up.start(spec, data.n_features)).run_id
        await eventually_said(up.learners["ann"])  # and writes nothing more until there are records
        early = {path: path.read_bytes() for path in state.rglob("*") if path.is_file() and "ann" in str(path)}
        await up.feed(run_id, spec, data)
        await up.until("ann", LearnerState.RUNNING, 10)
        missed_soon(monkeypatch, 1.0)
        await up.leave("ann")
        for path, raw in early.items():
            path.write_bytes(raw)
        before = said_rounds(state, "ann")
        await up.join("ann")
        over = await up.end(run_id)
        assert over.state == coordinator_pb2.RUN_STATE_FAILED, over.detail
        assert said_rounds(state, "ann") == before
