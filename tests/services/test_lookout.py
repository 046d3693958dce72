"""The lookout: what the eavesdropper notices of recorded bytes, where it says so, and what it never hinders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from sottovoce_client.runs.run_client import run_on_services
from sottovoce_core.algorithms.interface import Message
from sottovoce_core.auditing.traffic_features import digest
from sottovoce_core.runs.run import build_run
from sottovoce_eavesdropper.capture_checks import CaptureChecks, CaptureRow, RecordedRound, find_next_received_round
from sottovoce_eavesdropper.capture_reader import open_capture
from sottovoce_eavesdropper.capture_session import resume_capture
from sottovoce_rpc.codec import RoundCodec, to_fields
from sottovoce_rpc.server import open_channel
from sottovoce_wire.v1 import eavesdropper_pb2, eavesdropper_pb2_grpc
from tests.examples import made_up, small_run, small_spec
from tests.gossip import gossip_spec
from tests.services.capturing import SHAPES, captured, encode_round, frame, hello, row, said_again
from tests.services.network import PATIENCE_S, network, refused

ROUNDS = 6
RUN = small_run(ROUNDS, 3)
SPEC = RUN.spec.model_dump(mode="json")
"""Learners 0, 1 and 2 in a triangle; field y of three numbers."""


def clean(t: int, sender: int, value: float = 0.0) -> bytes:
    """A message on the lattice."""
    return encode_round(t, sender, Message({"y": np.full(3, value + t)}))


def talk(rounds: int = ROUNDS) -> list[CaptureRow]:
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    return [row(clean(t, i), i, j) for t in range(rounds) for i, j in pairs]


def looking(rows: Sequence[CaptureRow], spec: dict[str, Any] = SPEC, *, allow_imports: bool = False) -> CaptureChecks:
    found = CaptureChecks("cap", spec, 3, SHAPES, allow_imports=allow_imports)
    found.check_rows(rows)
    return found


def kinds(rows: Sequence[CaptureRow]) -> list[str]:
    return [each.kind for each in looking(rows).first_detections]


def opening(sender: int, receiver: int, stream: int, lacks: int, **more: Any) -> CaptureRow:
    """The hello with which a learner opens, or accepts, a stream."""
    return row(hello(**{"sender": sender, "next_round": lacks, **more}), sender, receiver, stream=stream, kind="hello")


def test_nothing_is_noticed_where_all_is_right() -> None:
    found = looking(talk())
    assert (found.detection_count, found.unchecked_reason) == (0, None)


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ([row(clean(3, 0, 1.0), 0, 1, stream=2)], ["changed-resend"]),
        ([row(clean(3, 1), 0, 1, stream=2)], ["sender", "changed-resend"]),
        ([row(b"\xff", 0, 1)], ["decoding"]),
        ([row(frame(6, 0), 0, 1)], ["round"]),  # there are but six rounds
        ([row(clean(2, 0), 0, 1)], ["round"]),
        ([row(clean(3, 7), 7, 1, stream=2)], []),  # its index is beyond the run: its own words stand alone
        ([opening(1, 0, 2, 4), row(clean(3, 0), 0, 1, stream=2)], ["round"]),
        ([opening(1, 0, 2, 3), row(clean(3, 0), 0, 1, stream=2)], []),
        ([opening(1, 0, 2, 3, learner=2)], ["decoding"]),
        ([opening(1, 0, 2, 3, fields=to_fields({"z": (3,)}))], ["decoding"]),
        ([row(b"\x0a\xff", 1, 0, stream=2, kind="hello"), row(clean(3, 0), 0, 1, stream=2)], ["decoding"]),
        ([row(hello(0), 0, 1)], ["decoding"]),  # in the middle of a stream
        ([row(encode_round(6, 0, Message({"y": np.zeros(4)})), 0, 1)], ["decoding"]),  # of another length
        ([row(b"\x00", 0, 1, method="/grpc.health.v1.Health/Check")], []),
        (
            [row(clean(5, 0)[:-1] + b"\x50", 0, 1, stream=0)],
            ["changed-resend"],
        ),  # a number so large that it is on the lattice
    ],
)
def test_what_must_never_happen_is_noticed(more: list[CaptureRow], wanted: list[str]) -> None:
    assert kinds([*talk(), *more]) == wanted


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        (["0000040800000000010000002f", "00002f000000000001", "0000080600000000008934580bdb635b4f"], ""),
        (["0000060400000000000004" + "00400000", "000000040100000000"], ""),
        (["00000453000000000001020304"], "a frame of kind 83 (4 bytes)"),
        (["0000040800000000010000002f", "000005020000000001" + "00" * 5] * 3, "a frame PRIORITY (5 bytes), and 2 more"),
    ],
)
def test_frames_that_grpc_never_sends_are_noticed(frames: list[str], text: str) -> None:
    found = looking([row(bytes.fromhex("".join(frames)), 2, 1, kind="http2", stream=0, method="")])
    told = [(each.kind, each.sender, each.receiver, each.text) for each in found.first_detections]
    assert told == ([("framing", 2, 1, f"learner-2 to learner-1: gRPC never sends {text}")] if text else [])


def test_trailers_of_a_caller_are_noticed() -> None:
    assert kinds([row(b"{}", 0, 1, kind="trailers"), row(b"{}", 1, 0, kind="trailers")]) == ["framing"]


def test_the_lattice_is_that_of_the_round() -> None:
    spacing = RUN.algorithm.lattice_spacings(0, 0)["y"]  # type: ignore[attr-defined]
    assert kinds([row(clean(0, 0, spacing), 0, 1)]) == []
    found = looking([row(clean(0, 0, spacing / 2), 0, 1), row(clean(0, 0, spacing / 2), 0, 2)])
    assert [each.kind for each in found.first_detections] == ["lattice"]
    assert "3 of 3 off the lattice" in found.first_detections[0].text


def test_what_was_said_before_in_the_same_bytes_is_marked() -> None:
    """By whoever heard it: not the same message to another neighbour, nor other bytes, nor what is no round."""
    found = CaptureChecks("cap", SPEC, 3, SHAPES, allow_imports=False)
    assert found.check_rows(talk()) == talk()
    other = row(clean(3, 0, 1.0), 0, 1, stream=2)
    more = [opening(1, 0, 3, 3), row(clean(3, 0), 0, 1, stream=3), row(clean(6, 0), 0, 1, stream=3), row(b"\xff", 0, 1)]
    marked = found.check_rows([other, *more, *more])
    assert [k for k, each in enumerate(marked) if each.is_repeat] == [2, 6, 7]
    assert [each._replace(is_repeat=False) for each in marked] == [other, *more, *more]


def test_bytes_that_contradict_are_marked_when_they_are_said_again() -> None:
    """The mark is of an edge, whatever others heard."""
    heard = [(1.0, 1), (2.0, 2), (2.0, 2), (1.0, 2), (1.0, 1)]
    marked = CaptureChecks("cap", SPEC, 3, SHAPES, allow_imports=False).check_rows(
        row(clean(0, 0, v), 0, to) for v, to in heard
    )
    assert [each.is_repeat for each in marked] == [False, False, True, False, True]


def test_what_an_eavesdropper_before_recorded_is_remembered() -> None:
    found = CaptureChecks("cap", SPEC, 3, SHAPES, allow_imports=False)
    for t in range(ROUNDS):
        found.remember_round(RecordedRound(0, 1, t, digest(clean(t, 0))))
    marked = found.check_rows([row(clean(4, 0), 0, 1, stream=3), row(clean(5, 0, 1.0), 0, 1, stream=3)])
    assert [each.is_repeat for each in marked] == [True, False]
    assert [each.kind for each in found.first_detections] == ["changed-resend"]


def test_every_neighbour_hears_the_same() -> None:
    assert kinds([row(clean(0, 0), 0, 1), row(clean(0, 0, 1.0), 0, 2)]) == ["equivocation"]


def test_code_is_imported_only_where_that_is_allowed() -> None:
    spec = gossip_spec({"graph": "ring"}, ROUNDS, 3).model_dump(mode="json")
    rows = [row(clean(0, 0, 0.1), 0, 1), row(clean(0, 0, 0.2), 0, 2)]
    refused, allowed = looking(rows, spec), looking(rows, spec, allow_imports=True)
    assert refused.unchecked_reason is not None and refused.unchecked_reason.startswith("the lattice and gaps")
    assert "--allow-imports" in refused.unchecked_reason
    assert allowed.unchecked_reason is None
    assert (
        [each.kind for each in refused.first_detections]
        == [each.kind for each in allowed.first_detections]
        == ["equivocation"]
    )


def test_without_a_spec_nothing_is_looked_at() -> None:
    found = looking([row(b"\xff", 0, 1)], {})
    assert (found.detection_count, found.unchecked_reason) == (0, "anything: there is no run spec")


def test_a_flood_is_counted_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with structlog.testing.capture_logs() as logs:
        found = looking([row(bytes([255, k % 256]) * 300, 0, 1) for k in range(500)])
    assert (found.detection_count, len(found.first_detections), len(found.build_metadata()["detections"])) == (
        500,
        100,
        100,
    )
    assert [each["log_level"] for each in logs] == ["error"] * 21
    assert max(len(each.text) for each in found.first_detections) < 400


def test_an_error_of_its_own_ends_the_looking_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(codec: RoundCodec, payload: bytes) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(RoundCodec, "decode", broken)
    found = looking(talk())
    assert found.unchecked_reason == "anything more: ZeroDivisionError: a bug"
    assert found.check_rows(talk()) == talk()
    assert found.detection_count == 0


def test_who_is_heard_next() -> None:
    turns = {
        "sequence": {
            "kind": "periodic",
            "graphs": [{"kind": "edges", "edges": [[0, 1]]}, {"kind": "edges", "edges": [[1, 2]]}],
        }
    }
    run = build_run(gossip_spec(turns, ROUNDS, 3), 3)
    heard = [find_next_received_round(run.network, ROUNDS, 0, 1, t) for t in range(ROUNDS + 1)]
    assert heard == [0, 2, 2, 4, 4, None, None]
    assert find_next_received_round(run.network, ROUNDS, 0, 2, 0) is None
    assert find_next_received_round(run.network, ROUNDS, 9, 1, 0) is None


async def test_the_capture_says_what_was_said_again(tmp_path: Path) -> None:
    more = [row(clean(t, 0), 0, 1, stream=2) for t in (4, 5)]
    await captured(tmp_path, [*talk(), *more], spec=json.dumps(SPEC), n_features=3)
    assert said_again(open_capture(tmp_path)) == [clean(4, 0), clean(5, 0)]


async def test_a_capture_that_is_taken_up_marks_what_it_had_before(tmp_path: Path) -> None:
    await captured(tmp_path, talk(), spec=json.dumps(SPEC), n_features=3, close=False)
    file, _ = resume_capture(open_capture(tmp_path), allow_imports=False)
    for t in (5, 6):
        file.add_row(row(clean(t, 0), 0, 1, stream=2))
    await file.flush()
    assert said_again(open_capture(tmp_path)) == [clean(5, 0)]


async def test_the_capture_says_what_was_noticed(tmp_path: Path) -> None:
    rows = [row(clean(0, 0), 0, 1), row(clean(0, 0, 1.0), 0, 2)]
    await captured(tmp_path, rows, spec=json.dumps(SPEC), n_features=3, close=False)  # before it is closed, too
    facts = open_capture(tmp_path).metadata
    assert facts["detection_count"] == 1
    assert facts["detections"][0] == {
        "kind": "equivocation",
        "sender": 0,
        "receiver": 2,
        "round": 0,
        "text": "learner-0 to learner-2, round 0: other bytes than learner-1 received",
    }


async def test_labels_reach_the_capture_and_no_learner(tmp_path: Path) -> None:
    spec = small_spec(ROUNDS, ["ann", "ben"], capture="relay", topology={"graph": "path"})
    async with network(tmp_path, ["ann", "ben"]) as up:
        outcome = await run_on_services(up.coordinator, spec, made_up(spec), lambda *seen: None, world=1, replica=9)
        assignments = [str(learner.require_session().assignment) for learner in up.learners.values()]
    assert outcome.capture_location is not None
    capture = open_capture(outcome.capture_location)
    assert (capture.metadata["world"], capture.metadata["replica"], capture.metadata["n_features"]) == (1, 9, 3)
    table = capture.read_messages()
    assert (set(table["world"].to_pylist()), set(table["replica"].to_pylist())) == ({1}, {9})
    assert set(table["connection"].to_pylist()) == {1}
    assert not any("world" in each or "replica" in each for each in assignments)


async def test_a_world_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    async with network(tmp_path, []) as up, open_channel(up.eavesdropper) as to:
        request = eavesdropper_pb2.OpenCaptureRequest(run_id="r", world=300)
        failure = await refused(eavesdropper_pb2_grpc.EavesdropperStub(to).OpenCapture(request, timeout=PATIENCE_S))
    assert "world must be at most 127" in (failure.details() or "")
