"""An eavesdropper of several processes: its capture is that of one process, also when a process dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper import worker_pool
from sottovoce_eavesdropper.capture_checks import CaptureRow
from sottovoce_eavesdropper.capture_reader import Capture, open_capture
from sottovoce_eavesdropper.capture_writer import CaptureWriter
from sottovoce_eavesdropper.service import Eavesdropper
from sottovoce_eavesdropper.worker import SendingWriter
from sottovoce_rpc.codec import RoundCodec, Shapes
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_rpc.server import open_channel
from sottovoce_rpc.specs import document_from_wire, spec_to_wire
from sottovoce_wire.v1 import eavesdropper_pb2, eavesdropper_pb2_grpc
from tests.examples import made_up, small_spec
from tests.services.capturing import frame, hello, row, said_again
from tests.services.identities import Identities
from tests.services.network import PATIENCE_S, Network, network, refused
from tests.services.test_gaps import heard
from tests.services.test_metrics import denied
from tests.services.test_run import SHAPES, by_round, recorded

NAMES, ROUNDS = ["ann", "ben", "cleo"], 200
CODEC = RoundCodec(SHAPES)
TRIANGLE = {"graph": {"kind": "complete"}}


def spec_of(capture: str = "relay", rounds: int = ROUNDS) -> RunSpec:
    clock = {"mode": "paced", "period_s": 0.005, "window": 20, "deadline_s": PATIENCE_S}
    return small_spec(rounds, NAMES, capture=capture, clock=clock, topology=TRIANGLE)


def kinds(capture: Capture) -> Counter[Any]:
    """Numbers of rows by edge, sender and kind, but frames of HTTP/2, which come in rows by time."""
    columns = ("caller", "callee", "sender", "kind")
    rows = (tuple(each.values()) for batch in capture.read_batches(columns) for each in batch.to_pylist())
    return Counter(each for each in rows if each[-1] != "http2")


def processes(up: Network) -> list[int]:
    """The process ids of the workers."""
    assert up.eavesdropping is not None
    pool = up.eavesdropping._captures.pool
    return [each.pid for each in pool._processes.values() if each is not None and each.returncode is None]


def require_named(capture: Capture, rounds: int) -> None:
    """Require that each message of the complete graph is in the capture or in a gap of its channel."""
    lost = {
        (gap["sender"], gap["receiver"], t)
        for gap in capture.metadata["gaps"]
        for t in range(gap["from"], rounds if gap["to"] is None else gap["to"])
    }
    captured = set[tuple[int, int, int]]()
    for batch in capture.read_batches(("caller", "callee", "sender", "kind", "payload")):
        for caller, callee, sender, kind, payload in (tuple(each.values()) for each in batch.to_pylist()):
            if kind == "message":
                captured.add((sender, caller + callee - sender, CODEC.decode(payload)[0]))
    assert {(i, j, t) for i in range(3) for j in range(3) if i != j for t in range(rounds)} - captured <= lost
    assert capture.is_complete == (not capture.metadata["gaps"])


async def test_a_capture_of_several_workers_is_that_of_one_process(tmp_path: Path) -> None:
    """The same rows of every edge, the same transcript, the same counts; equal to the simulation. Both over TLS."""
    spec = spec_of(rounds=50)
    data = made_up(spec)
    noise, sent, _ = recorded(spec, data, tmp_path / "noise.npz")
    found = list[tuple[Any, ...]]()
    for workers in (0, 2):
        folder = tmp_path / str(workers)
        ids = Identities(folder / "ids")
        async with network(folder, NAMES, noise=noise, identities=ids, workers=workers) as up:
            outcome = await up.run(spec, data)
            assert len(processes(up)) == workers
        assert outcome.state == "finished"
        capture = open_capture(outcome.capture_location or "")
        assert capture.is_complete and capture.metadata["detections"] == []
        assert capture.metadata["unchecked_reason"] is None
        transcript = capture.read_transcript(SHAPES, 3)
        np.testing.assert_array_equal(by_round(transcript), sent[:, :, 0])
        facts = capture.metadata
        found.append((kinds(capture), facts["messages"], facts["bytes"], [each["caller"] for each in facts["routes"]]))
    assert found[0] == found[1]


async def test_a_wiretap_of_several_workers_counts_all_records(tmp_path: Path) -> None:
    spec = spec_of("wiretap", rounds=20)
    async with network(tmp_path, NAMES, workers=2) as up:
        outcome = await up.run(spec, made_up(spec))
        assert up.eavesdropping is not None
        (session,) = up.eavesdropping._captures.sessions.values()
        traffic = session.writer.channel_traffic
    capture = open_capture(outcome.capture_location or "")
    counts = capture.ciphertext
    assert outcome.state == "finished" and capture.is_complete and counts is not None
    rows = kinds(capture)
    assert counts.connections == sum(count for key, count in rows.items() if key[3] == "opened") >= 3
    assert counts.records == sum(count for key, count in rows.items() if key[3] == "ciphertext")
    assert sum(messages for messages, _ in traffic.values()) == counts.records and len(traffic) == 6


async def test_a_worker_that_is_killed_is_started_again_and_what_it_lost_is_named(tmp_path: Path) -> None:
    """Its relays come back on their ports, the run goes on, and rounds that are missing are in gaps of their channel."""
    spec = spec_of(rounds=400)
    async with network(tmp_path, NAMES, workers=2) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        for death in range(3):
            await up.until("ann", LearnerState.RUNNING, 30 + 80 * death)
            alive = processes(up)
            os.kill(alive[death % len(alive)], signal.SIGKILL)
        outcome = await running
    assert outcome.state == "finished", outcome.detail
    capture = open_capture(outcome.capture_location or "")
    said_again(capture)
    assert capture.metadata["detection_count"] == 0
    require_named(capture, 400)
    assert capture.count_messages()[0] == capture.metadata["messages"]


async def test_an_eavesdropper_with_workers_is_resumed(tmp_path: Path) -> None:
    """Its processes end; the next eavesdropper serves the same ports with workers of its own."""
    spec = spec_of(rounds=400)
    async with network(tmp_path, NAMES, workers=2) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 30)
        old = up.eavesdropping
        assert old is not None and old.server is not None
        for pid in processes(up):
            os.kill(pid, signal.SIGKILL)
        old._captures.pool._is_stopping = True
        for session in old._captures.sessions.values():
            session.writer.is_open, session.is_closed = False, True
            await session.writer_tasks.end()
        await old.server.server.stop(None)
        up.eavesdropping = Eavesdropper(replace(old.config, listen=up.eavesdropper))
        assert await up.eavesdropping.start() == up.eavesdropper
        outcome = await running
        assert len(processes(up)) == 2
        await old.stop()
    capture = open_capture(outcome.capture_location or "")
    said_again(capture)
    assert outcome.state == "finished", outcome.detail
    assert capture.metadata["detection_count"] == 0
    assert capture.count_messages()[0] == capture.metadata["messages"]
    assert all(len(rounds) > 200 for rounds in heard(capture))


# ---- one worker ------------------------------------------------------------------------------------------------------


async def test_a_process_that_the_eavesdropper_has_not_started_is_refused(tmp_path: Path) -> None:
    async with network(tmp_path, NAMES, workers=1) as up:
        spec = spec_of(rounds=2)
        assert (await up.run(spec, made_up(spec))).state == "finished"
        async with open_channel(up.eavesdropper) as to:
            for unknown in (
                eavesdropper_pb2.WorkerHello(worker=0, token=bytes(16)),
                eavesdropper_pb2.WorkerHello(worker=7),
            ):
                call: Any = eavesdropper_pb2_grpc.EavesdropperStub(to).Work(timeout=PATIENCE_S)
                await call.write(eavesdropper_pb2.WorkRequest(hello=unknown))
                failure = await refused(_read_all(call))
                assert failure.code() is grpc.StatusCode.PERMISSION_DENIED
            silent: Any = eavesdropper_pb2_grpc.EavesdropperStub(to).Work(timeout=PATIENCE_S)
            await silent.done_writing()
            assert (await refused(_read_all(silent))).code() is grpc.StatusCode.PERMISSION_DENIED


async def _read_all(call: Any) -> None:
    async for _ in call:
        pass


async def test_contents_of_a_round_in_two_workers_are_compared(tmp_path: Path) -> None:
    """Ann sends ben, whose edge is in one worker, other bytes than cleo, whose edge is in another one."""
    document: Any = document_from_wire(spec_to_wire(spec_of(rounds=5)))
    file = CaptureWriter(tmp_path / "c", "c", "run-1", json.dumps(document), 3, allow_imports=True, fields=SHAPES)
    sent = ((0, 1, 1.0), (0, 2, 1.0), (0, 2, 2.0), (1, 1, 1.0), (1, 2, 3.0))
    for t, receiver, value in sent:
        await file.add_part(await build_part(tmp_path, document, [row(frame(t, 0, value), 0, receiver)]))
    await file.close()
    found = [(each["kind"], each["text"]) for each in open_capture(tmp_path / "c").metadata["detections"]]
    assert found == [
        ("changed-resend", "ann to cleo, round 0: resent to the same neighbour with other bytes"),
        ("equivocation", "ann to cleo, round 1: other bytes than ben received"),
    ]
    assert (file.message_count, file.part_count, file.checks.contradiction) == (5, 5, found[0][1])


async def build_part(
    tmp_path: Path, document: dict[str, Any], rows: list[CaptureRow], fields: Shapes = SHAPES
) -> eavesdropper_pb2.WorkerPart:
    """Return the part that a worker sends for these rows."""
    sent = list[eavesdropper_pb2.WorkerPart]()

    async def send(report: eavesdropper_pb2.WorkRequest) -> None:
        sent.append(report.part)
        writer.confirm_stored(report.part.number)

    writer = SendingWriter("", "c", "run-1", json.dumps(document), 3, fields=fields, part_count=1, send=send)
    for each in rows:
        writer.add_row(each)
    await writer.flush()
    (part,) = sent
    return part


async def test_detections_of_a_worker_are_those_of_the_capture(tmp_path: Path) -> None:
    """The first ones by themselves, and the number of all."""
    document: Any = document_from_wire(spec_to_wire(spec_of(rounds=500)))
    rows = [row(frame(t, 2), 0, 1) for t in range(150)]
    part = await build_part(tmp_path, document, rows)
    assert (len(part.detections), sum(part.detection_counts.values())) == (100, 150)
    file = CaptureWriter(tmp_path / "c", "c", "run-1", json.dumps(document), 3, allow_imports=True, fields=SHAPES)
    for number in (1, 2):
        await file.add_part(part)
        assert file.checks.counts_by_kind == {"sender": 150 * number}
    assert open_capture(tmp_path / "c").metadata["detection_count"] == 300
    assert file.next_rounds == {(0, 1): 150} and dict(file.edge_counts) == {(0, 1): 1}


async def test_a_part_that_cannot_be_stored_ends_the_capture_and_not_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    spec = spec_of(rounds=20)
    async with network(tmp_path, NAMES, workers=2) as up:
        monkeypatch.setattr("sottovoce_eavesdropper.storage.Folder.write", full, raising=True)
        monkeypatch.setattr("sottovoce_eavesdropper.capture_writer.CaptureWriter._write_metadata", lambda _: None)
        outcome = await up.run(spec, made_up(spec))
        monkeypatch.undo()
        assert (outcome.state, outcome.capture_error) == ("finished", "No space left on device")
        again = await up.run(spec, made_up(spec))
    assert again.state == "finished" and open_capture(again.capture_location or "").is_complete


async def test_an_edge_that_cannot_be_served_is_an_error_of_the_capture(tmp_path: Path) -> None:
    """With the class and the words of the worker's error; the other edges are closed again."""
    async with network(tmp_path, NAMES, workers=2) as up:
        routes = [eavesdropper_pb2.Route(caller=0, callee=k, target="127.0.0.1:1") for k in (1, 2)]
        routes[1].target = "192.0.2.1:80"
        async with open_channel(up.eavesdropper) as to:
            request = eavesdropper_pb2.OpenCaptureRequest(run_id="run-1", spec="{}", routes=routes)
            stub = eavesdropper_pb2_grpc.EavesdropperStub(to)
            failure = await refused(stub.OpenCapture(request, timeout=PATIENCE_S))
        assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "192.0.2.1:80 is reached from other machines" in (failure.details() or "")
        assert up.eavesdropping is not None
        assert not any(worker.recordings for worker in up.eavesdropping._captures.pool.workers)


async def test_refused_callers_of_workers_are_counted(tmp_path: Path) -> None:
    ids = Identities(tmp_path / "ids")
    spec = small_spec(10_000, NAMES, topology={"graph": "path"}, clock={"mode": "data"}, capture="relay")
    async with network(tmp_path, NAMES, identities=ids, workers=1) as up:
        run = await up.start(spec, 3)
        await up.until("ann", LearnerState.RUNNING)
        assert up.eavesdropping is not None
        (recording,) = up.eavesdropping._captures.sessions.values()
        relay = next(route["address"] for route in recording.writer.routes if route["caller"] == 0)
        zoe = ids.at("learner/zoe")
        await denied(zoe, zoe, relay, "eavesdropper", "Learner/Exchange", hello(0, run_id=run.run_id))
        async with asyncio.timeout(PATIENCE_S):
            while not up.eavesdropping._captures.refusals.counts_by_reason["condition"]:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("cores", "cpu", "memory", "workers"),
    [
        (2, "", "", 0),
        (4, "", "", 2),
        (16, "max 100000", "max", 8),
        (64, "", "", 8),
        (16, "100000 100000", "", 0),
        (16, "800000 100000", "", 4),
        (16, "", str(512 * 2**20), 1),
        (16, "", str(128 * 2**20), 0),
    ],
)
def test_workers_are_as_many_as_the_container_can_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, cpu: str, memory: str, workers: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(worker_pool, "_LIMITS", tmp_path)
    for name, text in (("cpu.max", cpu), ("memory.max", memory)):
        if text:
            (tmp_path / name).write_text(text + "\n", encoding="ascii")
    assert worker_pool.count_default_workers() == workers
