"""Copies that anybody may send to an eavesdropper: what is none of the run's is refused, and spoils no capture."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from sottovoce_core.errors import RemoteProtocolError
from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper import capture_session
from sottovoce_eavesdropper.capture_reader import open_capture
from sottovoce_learner import mirror as mirroring
from sottovoce_rpc.error_status import convert_status_error
from sottovoce_rpc.server import open_channel
from sottovoce_rpc.specs import spec_to_wire
from sottovoce_wire.v1 import coordinator_pb2, eavesdropper_pb2, eavesdropper_pb2_grpc
from tests.examples import made_up, small_spec
from tests.services.capturing import captured, conversation, frame, row
from tests.services.network import PATIENCE_S, Network, network, refused

ROUNDS = 6
NAMES = ["ann", "ben", "cleo", "dan"]


def spec_of(capture: str) -> RunSpec:
    return small_spec(ROUNDS, NAMES, capture=capture, clock={"deadline_s": 100.0})


def copy(payload: bytes = b"x", receivers: tuple[int, ...] = (1,), **at: int) -> eavesdropper_pb2.MirroredMessage:
    return eavesdropper_pb2.MirroredMessage(payload=payload, receivers=receivers, sent_at=Timestamp(**at))


WRONG: dict[str, tuple[int, eavesdropper_pb2.MirroredMessage]] = {
    "a receiver that no column holds": (0, copy(receivers=(2**32 - 1,))),
    "a receiver that there is not": (0, copy(receivers=(1, 4))),
    "a sender that there is not": (4, copy()),
    "to itself": (1, copy()),
    "twice to one": (0, copy(receivers=(1, 1))),
    "after all time": (0, copy(seconds=2**62)),
    "before all time": (0, copy(seconds=-(2**62), nanos=-1)),
    "too long": (0, copy(bytes(101))),
}


async def mirror(up: Network, run_id: str, sender: int, message: Any) -> Exception:
    async def said() -> Any:
        yield eavesdropper_pb2.MirrorRequest(run_id=run_id, sender=sender, messages=[copy(b"ok"), message])

    async with open_channel(up.eavesdropper) as to:
        failure = await refused(eavesdropper_pb2_grpc.EavesdropperStub(to).Mirror(said(), timeout=PATIENCE_S))
        return convert_status_error(failure, "the eavesdropper")


async def test_copies_that_are_none_of_the_runs_spoil_no_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_session, "MAX_PAYLOAD_BYTES", 100)
    spec = spec_of("mirror")
    data = made_up(spec)
    async with network(tmp_path, NAMES) as up:
        run = await up.start(spec, 3)
        for what, (sender, message) in WRONG.items():
            assert isinstance(await mirror(up, run.run_id, sender, message), RemoteProtocolError), what
        await up.feed(run.run_id, spec, data)
        end = await up.end(run.run_id)
    capture = open_capture(end.capture_location)

    assert end.state == coordinator_pb2.RUN_STATE_FINISHED
    assert capture.is_complete and capture.count_messages()[0] == ROUNDS * 2 * len(NAMES)
    assert capture.metadata["detection_count"] == 0


async def test_a_relay_hears_for_itself_and_takes_no_copies(tmp_path: Path) -> None:
    """A round in ann's name would be a second version of what the relay hears of her."""
    spec = spec_of("relay")
    async with network(tmp_path, NAMES) as up:
        run = await up.start(spec, 3)
        refusal = await mirror(up, run.run_id, 0, copy(frame(0, 0, 1.0)))
        await up.feed(run.run_id, spec, made_up(spec))
        end = await up.end(run.run_id)
    assert isinstance(refusal, RemoteProtocolError) and "`capture: mirror`" in str(refusal)
    assert open_capture(end.capture_location).metadata["detection_count"] == 0


@pytest.mark.parametrize("index", [4, 2**32 - 1])
async def test_a_route_of_nobody_is_refused(tmp_path: Path, index: int) -> None:
    route = eavesdropper_pb2.Route(caller=0, callee=index, target="127.0.0.1:1")
    async with network(tmp_path, []) as up, open_channel(up.eavesdropper) as to:
        for spec in (spec_to_wire(spec_of("relay")), ""):
            if not spec and index == 4:  # who does not say how many there are may have a fifth
                continue
            opening = eavesdropper_pb2.OpenCaptureRequest(run_id="r", spec=spec, routes=[route])
            failure = await refused(eavesdropper_pb2_grpc.EavesdropperStub(to).OpenCapture(opening, timeout=PATIENCE_S))
            assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"got learner {index}" in (failure.details() or "")
    assert not (tmp_path / "captures").exists()


async def test_a_part_that_cannot_be_made_ends_a_capture_which_says_so(tmp_path: Path) -> None:
    """Whatever the reason: what stands is there to be read, and is not called complete."""
    file = await captured(tmp_path, conversation(3), close=False)
    file.add_row(row(frame(3, 0), 0, 2**32 - 1))
    await file.flush()
    assert not file.is_open
    file.add_row(row(frame(4, 0)))
    await file.close()
    capture = open_capture(tmp_path)

    assert not capture.is_complete
    assert capture.count_messages()[0] == 6
    assert json.loads((tmp_path / "capture.json").read_text())["complete"] is False


@pytest.mark.parametrize("rounds", [1, 4])
async def test_a_run_that_is_over_before_anything_was_copied_is_captured_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """Copies are sent now and then; the eavesdropper waits for the first ones, too."""
    monkeypatch.setattr(mirroring, "FLUSH_INTERVAL_S", 1.5)
    end = mirroring.Mirror.end

    def later(self: mirroring.Mirror) -> None:
        asyncio.get_running_loop().call_later(0.3, end, self)

    monkeypatch.setattr(mirroring.Mirror, "end", later)
    spec = small_spec(rounds, NAMES, capture="mirror", clock={"deadline_s": 100.0})
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, made_up(spec))
    assert (outcome.state, outcome.capture_error) == ("finished", "")
    assert outcome.capture_location is not None
    capture = open_capture(outcome.capture_location)
    assert capture.is_complete and capture.metadata["gaps"] == []
    assert capture.read_transcript({"y": (3,)}, len(NAMES)).rounds == rounds
