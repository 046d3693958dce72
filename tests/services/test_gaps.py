"""A mirror that is cut off comes back; what it could not keep meanwhile is a gap that the capture names."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sottovoce_client.runs.coordinator_commands import show_run
from sottovoce_client.runs.evaluate import list_capture_gaps
from sottovoce_client.runs.run_client import Outcome, run_on_services
from sottovoce_client.runs.summary import RunProgress
from sottovoce_client.runs.terminal_display import display_run
from sottovoce_coordinator import capture_client
from sottovoce_core.algorithms.interface import Message
from sottovoce_core.errors import Unavailable
from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper import service as eavesdropping
from sottovoce_eavesdropper.capture_checks import CaptureChecks, CaptureRow, Gaps
from sottovoce_eavesdropper.capture_reader import Capture, open_capture
from sottovoce_eavesdropper.capture_session import resume_capture
from sottovoce_eavesdropper.capture_writer import CaptureWriter
from sottovoce_eavesdropper.grpc_proxy import GrpcProxy
from sottovoce_eavesdropper.parts import parse_part_number, read_part
from sottovoce_eavesdropper.service import Eavesdropper, EavesdropperConfig
from sottovoce_eavesdropper.storage import Folder
from sottovoce_learner import mirror as mirrors
from sottovoce_rpc.access import Refusals
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.error_status import abort_on_error
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_rpc.server import open_channel
from sottovoce_wire.v1 import coordinator_pb2, eavesdropper_pb2, eavesdropper_pb2_grpc
from tests.examples import made_up, small_spec
from tests.services.capturing import said_again
from tests.services.network import PATIENCE_S, network
from tests.services.test_run import SHAPES

NAMES, ROUNDS = ["ann", "ben", "cleo"], 200


def spec_of(capture: str = "mirror") -> RunSpec:
    clock = {"mode": "paced", "period_s": 0.005, "window": 20, "deadline_s": 100.0}
    return small_spec(ROUNDS, NAMES, capture=capture, clock=clock)


class Cut:
    """Breaks streams of copies while it is on, and lets none begin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on, true = False, Eavesdropper.Mirror

        async def passing(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
            async for request in requests:
                if self.on:
                    raise Unavailable("cut")
                yield request

        async def mirror(own: Eavesdropper, requests: AsyncIterator[Any], context: Any) -> Any:
            async with abort_on_error(context):
                if self.on:
                    raise Unavailable("cut")
            return await true(own, passing(requests), context)

        monkeypatch.setattr(Eavesdropper, "Mirror", mirror)


async def run_with_a_cut(folder: Path, cut: Cut, *, off: bool, spec: RunSpec | None = None) -> tuple[Outcome, Capture]:
    """Cut from about round 30 on, to about round 120 or the end."""
    spec = spec or spec_of()
    async with network(folder, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 30)
        cut.on = True
        await up.until("ann", LearnerState.RUNNING, 120)
        cut.on = not off
        outcome = await running
    return outcome, open_capture(outcome.capture_location or "")


def heard(capture: Capture) -> list[set[int]]:
    """Rounds of each learner that were captured."""
    rounds: list[set[int]] = [set() for _ in NAMES]
    codec = RoundCodec(SHAPES)
    for payload in capture.read_messages()["payload"].to_pylist() if capture.metadata["messages"] else []:
        t, sender, _ = codec.decode(payload)
        rounds[sender].add(t)
    return rounds


async def test_a_mirror_that_was_cut_off_comes_back_and_nothing_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, capture = await run_with_a_cut(tmp_path, Cut(monkeypatch), off=True)
    assert outcome.state == "finished"
    assert capture.is_complete and capture.metadata["gaps"] == [] and list_capture_gaps(outcome) == ()
    assert heard(capture) == [set(range(ROUNDS))] * 3
    assert capture.read_transcript(SHAPES, 3).rounds == ROUNDS
    assert capture.metadata["detection_count"] == 0
    said_again(capture)


async def test_what_a_mirror_could_not_keep_is_a_gap_that_the_capture_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "MAX_QUEUED_COPIES", 10)
    monkeypatch.setattr(mirrors, "MAX_RESENT_COPIES", 5)
    monkeypatch.setattr(mirrors, "FLUSH_INTERVAL_S", 0.02)
    outcome, capture = await run_with_a_cut(tmp_path, Cut(monkeypatch), off=True)
    named: list[set[int]] = [set(), set(), set()]
    for gap in capture.metadata["gaps"]:
        named[gap["sender"]] |= set(range(gap["from"], gap["to"]))
    assert outcome.state == "finished"
    assert not capture.is_complete and all(named)
    assert named == [set(range(ROUNDS)) - rounds for rounds in heard(capture)]
    assert list_capture_gaps(outcome)[0].startswith("ann, rounds ")


def no_copies_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither side tries, or waits, for long at the end of a run."""
    monkeypatch.setattr(mirrors, "DRAIN_TIMEOUT_S", 0.2)
    monkeypatch.setattr(eavesdropping, "_MIRROR_DRAIN_TIMEOUT_S", 0.2)


async def test_a_mirror_that_does_not_come_back_leaves_a_gap_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_copies_come(monkeypatch)
    outcome, capture = await run_with_a_cut(tmp_path, Cut(monkeypatch), off=False)
    assert outcome.state == "finished" and not capture.is_complete
    assert [(gap["sender"], gap["to"]) for gap in capture.metadata["gaps"]] == [(i, None) for i in range(3)]
    assert [gap["from"] for gap in capture.metadata["gaps"]] == [len(rounds) for rounds in heard(capture)]
    assert all(text.endswith("to the end") for text in list_capture_gaps(outcome))


async def test_learners_that_never_copied_anything_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_copies_come(monkeypatch)
    cut, spec = Cut(monkeypatch), spec_of()
    cut.on = True
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, made_up(spec))
    capture = open_capture(outcome.capture_location or "")
    assert outcome.state == "finished" and capture.metadata["messages"] == 0 and not capture.is_complete
    assert capture.metadata["gaps"] == [{"sender": i, "from": 0, "to": None} for i in range(3)]
    assert list_capture_gaps(outcome)[0].startswith("ann, rounds 0 to the end")


async def test_who_takes_no_part_is_not_missing(tmp_path: Path) -> None:
    spec = small_spec(
        20, NAMES, capture="mirror", topology={"graph": "complete"}, offline_intervals=[{"learner": "cleo"}]
    )
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, made_up(spec))
    assert outcome.state == "finished" and open_capture(outcome.capture_location or "").is_complete


@pytest.mark.parametrize("told", [2**31 - 1, 2**63, 5_000, ["x"] * 5_000, [3], "zoe", None])
async def test_of_learners_that_no_run_has_none_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: object
) -> None:
    """A stranger's capture would else have two thousand million gaps."""
    no_copies_come(monkeypatch)
    eavesdropper = Eavesdropper(EavesdropperConfig(folder=tmp_path))
    address = await eavesdropper.start()
    try:
        spec = json.dumps({"learners": told, "capture": "mirror"})
        capture_id = (await opened(eavesdropper, PATIENCE_S, spec=spec)).capture_id
        async with open_channel(address) as to:
            closing = eavesdropper_pb2.CloseCaptureRequest(capture_id=capture_id)
            await eavesdropper_pb2_grpc.EavesdropperStub(to).CloseCapture(closing, timeout=PATIENCE_S)
    finally:
        await eavesdropper.stop()
    assert open_capture(tmp_path / capture_id).metadata["gaps"] == []


async def test_a_full_disk_is_said_to_whoever_asked_for_the_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(own: CaptureWriter, rows: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CaptureWriter, "_write", full)
    spec = small_spec(5, NAMES, capture="relay")
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, made_up(spec))
    assert (outcome.state, outcome.capture_error) == ("finished", "No space left on device")
    assert not open_capture(outcome.capture_location or "").is_complete


@pytest.mark.parametrize("capture", ["relay", "mirror"])
async def test_an_eavesdropper_that_is_started_again_takes_up_its_captures(tmp_path: Path, capture: str) -> None:
    """It dies with what is in its memory; the relays come back on their ports, the run goes on, and what is lost is named."""
    spec = spec_of(capture)
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 30)
        old = up.eavesdropping
        assert old is not None and old.server is not None
        (recording,) = old._captures.sessions.values()
        await recording.writer_tasks.end()
        await old.server.server.stop(None)
        for relay in recording.proxies:
            assert isinstance(relay, GrpcProxy)
            relay.stop_timeout_s = 0.0
            await relay.stop()
        recording.writer.is_open = False  # what it has in memory goes with it
        up.eavesdropping = Eavesdropper(replace(old.config, listen=up.eavesdropper))
        assert await up.eavesdropping.start() == up.eavesdropper
        outcome = await running
        (again,) = up.eavesdropping._captures.sessions.values()
        await up.eavesdropping.stop()
    taken = open_capture(outcome.capture_location or "")
    assert outcome.state == "finished"
    said_again(taken)
    assert again.writer.capture_id == recording.writer.capture_id
    rounds, lost = heard(taken), [set[int](), set[int](), set[int]()]
    for gap in taken.metadata["gaps"]:
        lost[gap["sender"]] |= set(range(gap["from"], gap["to"]))
    for there, missing in zip(rounds, lost, strict=True):
        assert set(range(ROUNDS)) - there <= missing
    assert taken.is_complete == (not any(lost))
    assert taken.count_messages()[0] == taken.metadata["messages"]
    assert taken.metadata["detection_count"] == 0
    streams = taken.read_batches(["caller", "callee", "stream", "kind"])
    hellos = [tuple(row.values()) for batch in streams for row in batch.to_pylist() if row["kind"] == "hello"]
    assert len(set(hellos)) * 2 >= len(hellos)  # one each way: no stream was counted twice


async def test_an_eavesdropper_that_is_told_to_end_in_a_run_leaves_the_capture_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that it heard is written, and the capture is not complete: the run goes on."""
    monkeypatch.setattr("sottovoce_eavesdropper.grpc_proxy.FINISH_TIMEOUT_S", 0.1)
    spec = spec_of("relay")
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 30)
        old = up.eavesdropping
        assert old is not None
        await old.stop()
        (recording,) = old._captures.sessions.values()
        left = open_capture(recording.writer.storage_folder)
        assert not left.is_complete
        assert left.count_messages()[0] == left.metadata["messages"] > 0
        up.eavesdropping = Eavesdropper(replace(old.config, listen=up.eavesdropper))
        assert await up.eavesdropping.start() == up.eavesdropper
        outcome = await running
    taken = open_capture(outcome.capture_location or "")
    assert (outcome.state, taken.metadata["capture_id"]) == ("finished", recording.writer.capture_id)
    said_again(taken)
    assert all(rounds >= {0, ROUNDS - 1} for rounds in heard(taken))
    assert taken.is_complete == (not taken.metadata["gaps"])


async def opened(at: Eavesdropper, timeout_s: float, **asked: Any) -> eavesdropper_pb2.OpenCaptureResponse:
    async with open_channel(at.address) as to:
        request = eavesdropper_pb2.OpenCaptureRequest(run_id="run-1", **asked)
        return await eavesdropper_pb2_grpc.EavesdropperStub(to).OpenCapture(request, timeout=timeout_s)


async def test_a_capture_is_taken_up_once_however_often_somebody_gave_up_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a long run takes longer to read than its coordinator waits, and it may be killed meanwhile."""
    done, begun = threading.Event(), list[str]()

    def slowly(left: Capture, *, allow_imports: bool) -> Any:
        begun.append(left.name)
        assert done.wait(PATIENCE_S)
        return resume_capture(left, allow_imports=allow_imports)

    first, second = (Eavesdropper(EavesdropperConfig(folder=tmp_path)) for _ in range(2))
    await first.start()
    capture_id = (await opened(first, PATIENCE_S)).capture_id
    await first.stop()
    monkeypatch.setattr("sottovoce_eavesdropper.capture_registry.resume_capture", slowly)
    await second.start()
    for _ in range(3):
        with pytest.raises(grpc.aio.AioRpcError, match="Deadline Exceeded"):
            await opened(second, 0.3, resume=True)
    done.set()
    assert (await opened(second, PATIENCE_S, resume=True)).capture_id == capture_id
    assert len(begun) == 1
    await second.stop()


async def test_of_a_long_capture_only_the_last_messages_are_read_when_it_is_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything forgotten: who fell silent long ago is known from the part in which it was last heard."""
    codec, parts, silent = RoundCodec(SHAPES), 9, 4
    message = Message({name: np.zeros(shape) for name, shape in SHAPES.items()})
    routes = [{"caller": 0, "callee": i, "target": "127.0.0.1:1", "address": "127.0.0.1:1"} for i in (1, 2)]
    file = CaptureWriter(tmp_path / "run-1-a", "run-1-a", "run-1", "{}", fields=SHAPES, routes=routes)
    for part in range(parts):
        for t in range(3 * part, 3 * part + 3):
            for callee in (1, 2) if part < silent else (1,):
                payload = codec.encode(t, 0, message)
                method = "/sottovoce_wire.v1.Learner/Exchange"
                file.add_row(
                    CaptureRow(0, callee, 0, "out", "message", part + 1, 1, method, 1, 1, len(payload), payload)
                )
        await file.flush()
    await file.write_metadata()

    read, recalled = list[int](), list[tuple[int, int, int]]()

    def noting(place: Folder, name: str, columns: Sequence[str]) -> Any:
        if "payload" in columns:
            read.append(parse_part_number(name))
        return read_part(place, name, columns)

    monkeypatch.setattr("sottovoce_eavesdropper.capture_reader.read_part", noting)
    monkeypatch.setattr("sottovoce_eavesdropper.capture_session.MAX_REMEMBERED_MESSAGES", 6)  # two parts
    monkeypatch.setattr(CaptureChecks, "remember_round", lambda own, each: recalled.append(each[:3]))
    again, streams = resume_capture(open_capture(tmp_path / "run-1-a"), allow_imports=False)
    assert read == [silent, parts - 1, parts]
    assert recalled == [(0, 1, t) for t in range(3 * parts - 6, 3 * parts)]
    assert again.awaited_rounds == {(0, 1): 3 * parts, (1, 0): 0, (0, 2): 3 * silent, (2, 0): 0}
    assert streams == {(0, 1): parts, (0, 2): silent}
    assert (again.message_count, again.byte_count, again.channel_traffic) == (
        file.message_count,
        file.byte_count,
        file.channel_traffic,
    )
    assert again.message_count == 3 * (parts + silent)


async def test_a_capture_that_is_closed_before_a_way_is_heard_again_says_so(tmp_path: Path) -> None:
    """Its eavesdropper came back, and the run ended before a neighbour said anything more."""
    codec, spec = RoundCodec(SHAPES), json.dumps(spec_of("relay").model_dump(mode="json"))
    routes = [{"caller": 0, "callee": 1, "target": "127.0.0.1:1", "address": "127.0.0.1:1"}]
    file = CaptureWriter(tmp_path / "run-1-a", "run-1-a", "run-1", spec, 3, fields=SHAPES, routes=routes)
    payload = codec.encode(7, 0, Message({name: np.zeros(shape) for name, shape in SHAPES.items()}))
    file.add_row(
        CaptureRow(0, 1, 0, "out", "message", 1, 1, "/sottovoce_wire.v1.Learner/Exchange", 1, 1, len(payload), payload)
    )
    await file.flush()
    await file.write_metadata()
    again, _ = resume_capture(open_capture(tmp_path / "run-1-a"), allow_imports=False)
    await again.close()
    facts = open_capture(tmp_path / "run-1-a").metadata
    assert (facts["complete"], facts["gaps"]) == (False, [{"sender": 0, "receiver": 1, "from": 8, "to": None}])


async def test_a_capture_that_is_closed_while_it_is_described_is_described_as_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One writes at a time: else the file could be half of each, or that of before."""
    place = os.replace

    def slowly(before: Path, after: Path) -> None:
        time.sleep(0.1)
        place(before, after)

    file = CaptureWriter(tmp_path / "run-1-a", "run-1-a", "run-1", "{}", fields=SHAPES)
    monkeypatch.setattr("sottovoce_eavesdropper.storage.os.replace", slowly)
    amending = [asyncio.ensure_future(file.write_metadata()) for _ in range(3)]
    await asyncio.sleep(0.05)
    amending[1].cancel()
    await asyncio.gather(file.close(), *amending, return_exceptions=True)
    assert (file.write_error, [each.exception() for each in amending if not each.cancelled()]) == (None, [None, None])
    assert open_capture(tmp_path / "run-1-a").is_complete


async def test_a_capture_is_taken_up_when_its_last_port_is_free_again(tmp_path: Path) -> None:
    first, second = (Eavesdropper(EavesdropperConfig(folder=tmp_path)) for _ in range(2))
    await first.start()
    routes = [eavesdropper_pb2.Route(caller=0, callee=i, target="127.0.0.1:1") for i in (1, 2)]
    spec = json.dumps(spec_of("relay").model_dump(mode="json"))
    relays = (await opened(first, PATIENCE_S, routes=routes, spec=spec)).relay_addresses
    await first.stop()
    await second.start()
    host, port = relays[1].rsplit(":", 1)
    with socket.create_server((host, int(port))), pytest.raises(grpc.aio.AioRpcError, match="cannot listen on"):
        await opened(second, PATIENCE_S, resume=True)
    assert (await opened(second, PATIENCE_S, resume=True)).relay_addresses == relays
    await second.stop()


@given(st.lists(st.integers(0, 30), max_size=60))
def test_gaps_are_the_rounds_below_the_last_one_that_did_not_come(rounds: list[int]) -> None:
    """In any order, however often."""
    gaps = Gaps()
    gaps.begin_stream(4)
    for t in rounds:
        gaps.record_round(4, t=t)
    gaps.end_stream(4, is_complete=True)
    named = [t for gap in gaps.build_metadata() for t in range(gap["from"], gap["to"])]
    assert named == [t for t in range(max(rounds, default=0)) if t not in rounds]
    assert all(gap["sender"] == 4 for gap in gaps.build_metadata())


def test_a_stream_that_broke_and_came_back_leaves_no_gap() -> None:
    gaps = Gaps()
    for t, well in ((0, False), (1, True)):
        gaps.begin_stream(2)
        gaps.record_round(2, t=t)
        assert gaps.build_metadata() == [{"sender": 2, "from": t + 1, "to": None}]
        gaps.end_stream(2, is_complete=well)
    assert gaps.build_metadata() == []


def test_a_way_that_is_lost_twice_has_two_gaps() -> None:
    gaps = Gaps()
    gaps.resume_channel(0, 1, next_round=5, t=8)
    gaps.resume_channel(0, 1, next_round=20, t=20)
    gaps.resume_channel(0, 1, next_round=30, t=31)
    gaps.resume_channel(1, 0, next_round=40, t=None)
    assert gaps.build_metadata() == [
        {"sender": 0, "receiver": 1, "from": 5, "to": 8},
        {"sender": 0, "receiver": 1, "from": 30, "to": 31},
        {"sender": 1, "receiver": 0, "from": 40, "to": None},
    ]


async def test_a_capture_that_is_not_closed_is_said(tmp_path: Path) -> None:
    """The eavesdropper is gone at the end of the run."""
    spec = spec_of()
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 30)
        assert up.eavesdropping is not None and up.eavesdropping.server is not None
        await up.eavesdropping.server.server.stop(None)
        outcome = await running
        capture = open_capture(outcome.capture_location or "")
        assert not capture.is_complete
    assert outcome.state == "finished"
    assert outcome.capture_error.startswith(f"cannot reach the eavesdropper at {up.eavesdropper}")


async def test_an_eavesdropper_that_goes_and_comes_back_is_said_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `run`, once each time, by `runs show` and by the metrics; what is written down of the run has nothing of it."""
    monkeypatch.setattr(capture_client, "_CHECK_INTERVAL_S", 0.02)
    spec, shown, said = spec_of().model_copy(update={"rounds": 100_000}), io.StringIO(), io.StringIO()
    async with network(tmp_path, NAMES) as up:
        went, came, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
        with display_run("run", spec.rounds, spec.names, console=Console(file=shown)) as console:

            def watch(progress: RunProgress, state: str) -> None:
                console.update(progress, state, captured_messages=None)
                if progress.capture_error:
                    went.set()
                elif went.is_set():
                    came.set()

            running = asyncio.ensure_future(run_on_services(up.coordinator, spec, made_up(spec), watch, stop))
            await up.until("ann", LearnerState.RUNNING, 30)
            old, coordinating = up.eavesdropping, up.coordinating
            assert old is not None and old.server is not None and coordinating is not None
            await old.server.server.stop(None)
            await asyncio.wait_for(went.wait(), PATIENCE_S)
            (course,) = coordinating._runs.active_runs
            await show_run(up.coordinator, course.machine.run_id, Console(file=said, width=200))
            kept = coordinator_pb2.Run.FromString(course.encode_view())
            (uncaptured,) = (
                each for each in coordinating.collect_metrics(Refusals()) if "uncaptured" in each.metric.name
            )
            await old.stop()
            up.eavesdropping = Eavesdropper(replace(old.config, listen=up.eavesdropper))
            await up.eavesdropping.start()
            await asyncio.wait_for(came.wait(), PATIENCE_S)
            stop.set()
            await asyncio.wait_for(running, PATIENCE_S)
    why = f"nothing is captured now: cannot reach the eavesdropper at {up.eavesdropper}"
    lines = [line for line in shown.getvalue().splitlines() if "captured" in line]
    assert lines[0].startswith(why) and lines[1:] == ["the run is captured again: its eavesdropper has reconnected"]
    assert why in said.getvalue() and kept.capture_error == ""
    assert uncaptured.value == 1


@pytest.mark.parametrize("off", [True, False], ids=["middle", "end"])
async def test_a_run_whose_capture_must_be_whole_fails_at_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: bool
) -> None:
    """A gap in the middle ends the run when it is seen; one that is seen at the end is said of the capture."""
    monkeypatch.setattr(mirrors, "MAX_QUEUED_COPIES", 10)
    monkeypatch.setattr(mirrors, "MAX_RESENT_COPIES", 5)
    monkeypatch.setattr(mirrors, "FLUSH_INTERVAL_S", 0.02)
    if not off:
        no_copies_come(monkeypatch)
    monkeypatch.setattr(capture_client, "_CHECK_INTERVAL_S", 0.02 if off else 1_000.0)
    # A gap in the middle is known when the mirror is back: until then there must be rounds left.
    rounds = 3_000 if off else ROUNDS
    spec = spec_of().model_copy(update={"capture_gap": "fail", "rounds": rounds})
    outcome, _ = await run_with_a_cut(tmp_path, Cut(monkeypatch), off=off, spec=spec)
    told = outcome.detail if off else outcome.capture_error
    assert outcome.state == ("failed" if off else "finished")
    assert told.startswith("the capture must be complete (capture_gap: fail), and ")
