"""Who may not, but has a certificate of the deployment, and neighbours that break their word: what becomes of runs.

In the clear whoever reaches the ports is this machine's user, and may do all of the former.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from sottovoce_core.algorithms.interface import Message
from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper.capture_reader import open_capture
from sottovoce_learner.peers.connection import _hello
from sottovoce_rpc.learner_status import LearnerState, LearnerStatus
from sottovoce_rpc.specs import spec_to_wire
from sottovoce_wire.v1 import coordinator_pb2, eavesdropper_pb2, learner_pb2
from tests.examples import made_up, small_spec
from tests.services.capturing import encode_round, frame
from tests.services.identities import Identities, raw_channel
from tests.services.network import PATIENCE_S, Network, given_up_soon, network, refused
from tests.services.test_exchange_errors import confirming, introducing

COORDINATOR, EAVESDROPPER, LEARNER = (
    f"/sottovoce_wire.v1.{name}" for name in ("Coordinator", "Eavesdropper", "Learner")
)
NAMES = ["ann", "ben"]
ROUNDS = 12


def spec_of(names: list[str] = NAMES, **more: Any) -> RunSpec:
    return small_spec(ROUNDS, names, **more)


def in_the_name_of_others(
    run: coordinator_pb2.Run, spec: RunSpec, greeting: bytes, before: int
) -> list[tuple[str, str, list[Any], str]]:
    """What eve, who has joined so often before, and is in no run, does: method, who is there, requests, what she is told."""
    pb, eaves = coordinator_pb2, eavesdropper_pb2
    finished = LearnerStatus("ann", run.run_id, LearnerState.FINISHED, rounds_done=ROUNDS)
    reporting = pb.LearnerMessage(report=pb.Report(status=finished.to_wire()))
    copy = eaves.MirrorRequest(run_id=run.run_id, sender=0)
    copy.messages.add(payload=frame(0, 0), receivers=[1])
    route = eaves.Route(caller=0, callee=1, target="127.0.0.1:9")
    may_not = "learner/eve may not call "
    return [
        (f"{LEARNER}/Exchange", "ben", [greeting, frame(0, 0, 1e99)], "learner/eve must not speak for ann"),
        (f"{LEARNER}/Ingest", "ann", [learner_pb2.SampleBatch(source="eve")], "is not one whom the owner"),
        (f"{COORDINATOR}/Join", "", [introducing("ben")], "learner/eve must join as itself, got 'ben'"),
        (
            f"{COORDINATOR}/Join",
            "",
            [introducing("eve", incarnation=before), confirming(before + 1), reporting],
            "a report on this stream must be of learner 'eve', got 'ann'",
        ),
        (f"{COORDINATOR}/StartRun", "", [pb.StartRunRequest(spec=spec_to_wire(spec), n_features=3)], f"{may_not}StartRun"),
        (f"{COORDINATOR}/StopRun", "", [pb.StopRunRequest(run_id=run.run_id)], f"{may_not}StopRun"),
        (f"{EAVESDROPPER}/Mirror", "", [copy], "learner/eve must not send copies for ann"),
        (f"{EAVESDROPPER}/CloseCapture", "", [eaves.CloseCaptureRequest(capture_id=run.capture_id)], f"{may_not}CloseCapture"),
        (f"{EAVESDROPPER}/OpenCapture", "", [eaves.OpenCaptureRequest(run_id="x", routes=[route])], f"{may_not}OpenCapture"),
    ]  # fmt: skip


def encoded(requests: Iterable[Any]) -> Iterable[bytes]:
    return (each if isinstance(each, bytes) else each.SerializeToString() for each in requests)


def house_of(up: Network, method: str, name: str) -> tuple[str, str]:
    """Where a method is called, and whose certificate is there."""
    if method.startswith(LEARNER):
        return up.addresses[name], f"{name}.learner.ward.example"
    return (
        (up.coordinator, "coordinator.ward.example")
        if method.startswith(COORDINATOR)
        else (up.eavesdropper, "eavesdropper.ward.example")
    )


async def test_a_learner_that_is_not_in_a_run_cannot_harm_it(tmp_path: Path) -> None:
    """She is refused whatever she tries, more than once; the run ends well, its capture is whole, and nothing is noticed."""
    ids, spec = Identities(tmp_path / "ids"), spec_of(capture="mirror")
    data = made_up(spec)
    async with network(tmp_path, NAMES, identities=ids) as up:
        run = await up.start(spec, 3)
        for name in NAMES:
            await up.until(name, LearnerState.RUNNING)
        greeting = _hello(up.learners["ann"].require_session(), 1)
        for before in range(2):
            for method, name, requests, text in in_the_name_of_others(run, spec, greeting, before):
                address, host = house_of(up, method, name)
                async with raw_channel(ids.at("learner/eve"), ids.at("learner/eve"), address, host) as to:
                    call: Any = to.stream_stream(method)
                    failure = await refused(call(iter(list(encoded(requests))), timeout=PATIENCE_S))
                assert failure.code() is grpc.StatusCode.PERMISSION_DENIED, method
                assert text in (failure.details() or ""), method
        await up.feed(run.run_id, spec, data)
        end = await up.end(run.run_id)
    assert (end.state, end.detail) == (coordinator_pb2.RUN_STATE_FINISHED, "")
    assert [each.status.rounds_done for each in end.learners] == [ROUNDS] * 2
    capture = open_capture(end.capture_location)
    assert (capture.is_complete, capture.metadata["detection_count"]) == (True, 0)


# ---- neighbours that break their word --------------------------------------------------------------------------------


def nan(t: int, sender: int) -> bytes:
    return _said(t, sender, np.nan)


def beyond(t: int, sender: int) -> bytes:
    return _said(t, sender, 1e300)


def huge(t: int, sender: int) -> bytes:
    return _said(t, sender, 1e99)


def early(t: int, sender: int) -> bytes:
    return _said(t + 5, sender, 0.0)


def long(t: int, sender: int) -> bytes:
    return _said(t, sender, 0.0) + bytes(100_000)


def _said(t: int, sender: int, value: float) -> bytes:
    return encode_round(t, sender, Message({"y": np.full(3, value)}))


async def ended(
    up: Network, spec: RunSpec, wrong: Callable[[int, int], bytes], monkeypatch: pytest.MonkeyPatch
) -> coordinator_pb2.Run:
    """A run of ann and ben in which ben says something else to her in round 3, as it ends."""
    run_id = (await up.start(spec, 3)).run_id
    await up.until("ben", LearnerState.RUNNING)
    link = up.learners["ben"].require_session().links[0]
    usual = link.queue

    def say(t: int, payload: bytes) -> None:
        usual(t, wrong(t, 1) if t == 3 else payload)

    monkeypatch.setattr(link, "queue", say)
    await up.feed(run_id, spec, made_up(spec))
    return await up.end(run_id)


@pytest.mark.misbehaves
@pytest.mark.parametrize("wrong", [nan, beyond, early, long])
async def test_a_neighbour_that_breaks_its_word_is_named_and_other_runs_go_on(
    tmp_path: Path, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing, other = spec_of(clock={"deadline_s": 100.0}), spec_of(["cleo", "dan"])
    async with network(tmp_path, [*failing.names, *other.names]) as up:
        ending = asyncio.ensure_future(ended(up, failing, wrong, monkeypatch))
        beside = await up.run(other, made_up(other))
        given_up_soon(monkeypatch)
        end = await ending
        assert end.state == coordinator_pb2.RUN_STATE_FAILED
        assert "ben" in end.detail
        assert beside.state == "finished"


async def test_a_huge_number_of_a_neighbour_is_taken_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large as a message may have: decisions stay in their set."""
    async with network(tmp_path, NAMES) as up:
        end = await ended(up, spec_of(), huge, monkeypatch)
        assert (end.state, end.detail) == (coordinator_pb2.RUN_STATE_FINISHED, "")
        for name in NAMES:
            session = up.learners[name].require_session()
            assert np.linalg.norm(session.algorithm.decision(session.state_machine.state)) <= 100.0 + 1e-9
