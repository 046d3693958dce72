"""Whoever errs is told so with a status, on its own call; the run goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import structlog.testing
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from sottovoce_client import terminal
from sottovoce_client.runs.feeder import feed, make_batch
from sottovoce_client.runs.run_client import RunInterrupted, run_on_services
from sottovoce_coordinator import learner_registry, run_launcher, run_registry
from sottovoce_coordinator.run_state import RunStateMachine
from sottovoce_coordinator.service import Coordinator, CoordinatorConfig
from sottovoce_core.algorithms.interface import Message
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.errors import FailedPrecondition, SpecError, Unavailable
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.spec import RunSpec
from sottovoce_core.spec_versions import FORMAT, FORMAT_FIELD
from sottovoce_eavesdropper.service import Eavesdropper, EavesdropperConfig
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.peers import connection
from sottovoce_learner.service import Learner
from sottovoce_learner.session import Session
from sottovoce_rpc import tasks
from sottovoce_rpc.codec import to_fields, to_tensor
from sottovoce_rpc.error_status import convert_status_error
from sottovoce_rpc.learner_status import LearnerState, LearnerStatus
from sottovoce_rpc.server import open_channel
from sottovoce_rpc.specs import compute_plan_hash, spec_from_wire
from sottovoce_wire.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    eavesdropper_pb2,
    eavesdropper_pb2_grpc,
    learner_pb2,
    learner_pb2_grpc,
    tensor_pb2,
)
from tests.examples import made_up, small_spec
from tests.services.capturing import METHOD, encode_round, hello
from tests.services.dictating import changed
from tests.services.network import PATIENCE_S, Network, network, refused, said_rounds
from tests.services.test_run import recorded

Code = grpc.StatusCode

ROUNDS = 12
NAMES = [
    "ann",
    "ben",
    "cleo",
    "dan",
]  # on a ring: cleo's neighbours are ben (1), who opens the stream to her, and dan (3)


def spec_of(**more: Any) -> RunSpec:
    return small_spec(ROUNDS, NAMES, clock={"window": 5, "deadline_s": 100.0}, **more)


@asynccontextmanager
async def run_that_ends_well(folder: Path, spec: RunSpec) -> AsyncIterator[tuple[Network, str, PlacedData]]:
    """A run that waits for cleo's records; afterwards she gets them, and it must end as it was simulated."""
    data = made_up(spec)
    noise, _, last = recorded(spec, data, folder / "noise.npz")
    async with network(folder, NAMES, noise=noise) as up:
        run_id = (await up.start(spec, 3)).run_id
        await up.feed(run_id, spec, data, but=["cleo"])
        await up.until("cleo", LearnerState.RUNNING)
        yield up, run_id, data

        assert [(await up.status(name)).detail for name in NAMES] == [""] * 4
        await feed(up.addresses["cleo"], run_id, data.learners[2])
        end = await up.end(run_id)
        assert (end.state, end.detail) == (coordinator_pb2.RUN_STATE_FINISHED, "")
        sessions = [up.learners[name].require_session() for name in NAMES]
        decisions = [session.algorithm.decision(session.state_machine.state) for session in sessions]
        np.testing.assert_allclose(decisions, last, rtol=1e-12, atol=1e-12)


def reason(failure: grpc.aio.AioRpcError) -> str:
    """The class of ours that its reason stands for."""
    return type(convert_status_error(failure, "the service")).__name__


# ---- between learners ------------------------------------------------------------------------------------------------


def introduced(up: Network, **more: Any) -> bytes:
    """Ben's hello to cleo, changed in part."""
    told = up.learners["cleo"].require_session().assignment
    usual = {"learner": 1, "next_round": 0, "run_id": told.run_id, "plan_hash": compute_plan_hash(told.spec, 3)}
    usual["incarnation"] = up.learners["ben"].require_session().assignment.incarnation
    return hello(**{**usual, **more})


async def exchange(address: str, *payloads: bytes) -> grpc.aio.AioRpcError:
    """Open a stream, say something, and wait for the status."""

    async def said() -> AsyncIterator[bytes]:
        for payload in payloads:
            yield payload
        await asyncio.Event().wait()

    async with open_channel(address) as to:
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = to.stream_stream(METHOD)
        return await refused(method(said(), timeout=PATIENCE_S))


DISPLACED = "another stream of ben took the place of this one"


async def spoken(address: str, *payloads: bytes) -> grpc.aio.AioRpcError:
    """As `exchange`, once all was heard: ben wants his stream back, and may get it before we have spoken."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            failure = await exchange(address, *payloads)
            if failure.details() != DISPLACED:
                return failure


STRANGERS: list[tuple[dict[str, Any], Code, str, str]] = [
    ({"run_id": ""}, Code.PERMISSION_DENIED, "PermissionDenied", "this learner is in another run than ''"),
    ({"run_id": "other"}, Code.PERMISSION_DENIED, "PermissionDenied", "this learner is in another run than 'other'"),
    ({"learner": 0}, Code.PERMISSION_DENIED, "PermissionDenied", "ann is not a neighbour"),
    ({"learner": 2**32 - 1}, Code.PERMISSION_DENIED, "PermissionDenied", "learner 4294967295 is not a neighbour"),
    (
        {"learner": 3},
        Code.INVALID_ARGUMENT,
        "RemoteProtocolError",
        "the earlier of two in the spec opens their stream: dan",
    ),
    ({"learner": None}, Code.INVALID_ARGUMENT, "RemoteProtocolError", "must carry learner and next_round"),
    ({"next_round": None}, Code.INVALID_ARGUMENT, "RemoteProtocolError", "must carry learner and next_round"),
    ({"incarnation": 0}, Code.PERMISSION_DENIED, "PermissionDenied", "ben has greeted as incarnation 1, got 0"),
    ({"plan_hash": b""}, Code.INVALID_ARGUMENT, "RemoteProtocolError", "ben must have the plan "),
    (
        {"plan_hash": bytes(32)},
        Code.INVALID_ARGUMENT,
        "RemoteProtocolError",
        ", got 0000000000000000: it was told another",
    ),
    *(
        ({"fields": fields}, Code.INVALID_ARGUMENT, "RemoteProtocolError", text)
        for fields, text in (
            ([], "ben must say the fields {'y': (3,)}, got {}"),
            (to_fields({"z": (3,)}), "must say the fields {'y': (3,)}, got {'z': (3,)}"),
            (to_fields({"y": (4,)}), "must say the fields {'y': (3,)}, got {'y': (4,)}"),
            (to_fields({"y": (3,), "z": ()}), "got {'y': (3,), 'z': ()}"),
            (
                [tensor_pb2.Field(name="y", shape=[3], dtype=9)],  # type: ignore[arg-type]
                "fields must differ in name and be FLOAT64 (1), got 'y', 9",
            ),
        )
    ),
]
"""What is wrong in a hello."""


async def test_strangers_are_turned_away_and_nobody_is_harmed(tmp_path: Path) -> None:
    async with run_that_ends_well(tmp_path, spec_of()) as (up, _, _):
        for facts, code, kind, text in STRANGERS:
            failure = await exchange(up.addresses["cleo"], introduced(up, **facts))

            assert (failure.code(), reason(failure)) == (code, kind), text
            assert text in (failure.details() or "")


async def test_whoever_does_not_greet_is_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_that_ends_well(tmp_path, spec_of()) as (up, _, _):
        for payloads, text in (
            ([b"\xff"], "expected a Hello first, got 1 bytes that cannot be decoded"),
            ([said(0, 1, np.zeros(3))], "expected a Hello first, got another message"),
            ([], "expected a Hello within 0.05 s, got nothing"),
        ):
            if not payloads:
                monkeypatch.setattr(connection, "HELLO_TIMEOUT_S", 0.05)
            failure = await exchange(up.addresses["cleo"], *payloads)
            assert (failure.code(), reason(failure)) == (Code.INVALID_ARGUMENT, "RemoteProtocolError"), text
            assert text in (failure.details() or "")
        monkeypatch.undo()


async def test_both_sides_refuse_another_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ben was told another spec than his neighbours: none of them says a round to him, nor he to them."""
    true = RunStateMachine.build_assignment

    def altered(book: RunStateMachine, index: int) -> coordinator_pb2.Assignment:
        told = true(book, index)
        other = {**json.loads(told.spec), "algorithm": {"name": "ldp-dol", "sigma": 2.0}}
        return changed(told, spec=json.dumps(other)) if index == 1 else told

    monkeypatch.setattr(RunStateMachine, "build_assignment", altered)
    spec = spec_of().model_copy(update={"clock": spec_of().clock.model_copy(update={"deadline_s": 2.0})})
    with structlog.testing.capture_logs() as logs:
        async with network(tmp_path, NAMES) as up:
            outcome = await up.run(spec, made_up(spec))
            statuses = [await up.status(name) for name in NAMES]
    refusals = [event["reason"] for event in logs if event["event"] == "stream ended"]
    assert outcome.state == "failed"
    assert any("ann must have the plan" in text for text in refusals)  # ben's, who accepts ann's stream
    assert any("ben must have the plan" in text for text in refusals)  # cleo's, who accepts ben's
    assert [status.messages_sent for status in statuses] == [0] * 4


def said(t: int, sender: int, values: Any) -> bytes:
    return encode_round(t, sender, Message({"y": np.asarray(values, dtype=np.float64)}))


WRONG = [
    (b"\xff\xff\xff", "expected a round of 42 bytes, for the fields {'y': (3,)}, got 3 bytes that cannot be decoded"),
    (b"", "expected a round of 42 bytes, for the fields {'y': (3,)}, got another message"),
    (hello(1, 0), "expected a round of 42 bytes, for the fields {'y': (3,)}, got another message"),
    (said(7, 1, np.zeros(3)), "ben must say round "),
    (said(2**63, 1, np.zeros(3)), "next, got round 9223372036854775808"),
    (said(0, 3, np.zeros(3)), "ben sent a message in the name of dan"),
    (said(0, 1, np.zeros(4)), "for the fields {'y': (3,)}, got one of 50 bytes or in another encoding"),
    (said(0, 1, [0.0, np.nan, 0.0]), "field 'y' must be finite"),
    (said(0, 1, [0.0, np.inf, 0.0]), "field 'y' must be finite"),
    (said(0, 1, [0.0, 1e300, 0.0]), "field 'y' must be finite and within 1e+100"),
]


@pytest.mark.misbehaves
async def test_wrong_messages_end_their_stream_and_nobody_is_harmed(tmp_path: Path) -> None:
    """Somebody who introduces itself as ben displaces his stream; ben opens another, and what was wrong has changed nothing."""
    async with run_that_ends_well(tmp_path, spec_of()) as (up, _, _):
        for payload, text in WRONG:
            failure = await spoken(up.addresses["cleo"], introduced(up), payload)

            assert (failure.code(), reason(failure)) == (Code.INVALID_ARGUMENT, "RemoteProtocolError"), text
            assert text in (failure.details() or "")


@pytest.mark.misbehaves
async def test_another_version_of_a_round_is_called_what_it_is(tmp_path: Path) -> None:
    async with run_that_ends_well(tmp_path, spec_of()) as (up, _, _):
        cleo = up.learners["cleo"].require_session()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if cleo.inbox.get_due_round(1) > 0:
                    break
                await asyncio.sleep(0.01)
        again = next(said.frame for t, said in said_rounds(tmp_path / "journals", "ben") if t == 0)
        for payload, kind, text in (
            (said(0, 1, np.zeros(3)), "EquivocationError", "ben said two different things in round 0"),
            (again, "RemoteProtocolError", "ben must say round "),
        ):
            failure = await spoken(up.addresses["cleo"], introduced(up), payload)
            assert (failure.code(), reason(failure)) == (Code.INVALID_ARGUMENT, kind)
            assert text in (failure.details() or "")


@pytest.mark.misbehaves
async def test_a_second_stream_in_the_same_name_ends_the_first(tmp_path: Path) -> None:
    async with run_that_ends_well(tmp_path, spec_of()) as (up, _, _):
        first = asyncio.ensure_future(exchange(up.addresses["cleo"], introduced(up)))
        await asyncio.sleep(0.05)
        second = asyncio.ensure_future(spoken(up.addresses["cleo"], introduced(up), b"\xff"))
        failure = await first  # by ben's own stream, or by the second

        assert (failure.code(), reason(failure)) == (Code.UNAVAILABLE, "Unavailable")
        assert failure.details() == DISPLACED
        assert (await second).code() is Code.INVALID_ARGUMENT


@pytest.mark.misbehaves
async def test_a_stream_that_ends_as_it_opens_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GRPC sends no status while what opens the answers is on its way: who has opened the stream would wait for ever."""
    async with run_that_ends_well(tmp_path, spec_of()) as (up, _, _):
        cleo = up.learners["cleo"].require_session()

        def greeting(session: Session, neighbour: int) -> bytes:
            """The run is taken up again just then."""
            if session is cleo:
                session.lifecycle.mark_replaced()
            return say(session, neighbour)

        say = connection._hello
        with monkeypatch.context() as patched:
            patched.setattr(connection, "_hello", greeting)
            failure = await spoken(up.addresses["cleo"], introduced(up))
        cleo.lifecycle._replaced.clear()
        assert (failure.code(), failure.details()) == (Code.UNAVAILABLE, "this learner takes the run up again")


async def test_a_learner_without_a_run_says_so(tmp_path: Path) -> None:
    async with network(tmp_path, ["ann"]) as up, open_channel(up.addresses["ann"]) as to:
        stub = learner_pb2_grpc.LearnerStub(to)
        failures = [
            await exchange(up.addresses["ann"], hello()),
            await refused(stub.Ingest(several(learner_pb2.SampleBatch()))),
            await refused(stub.Predict(learner_pb2.PredictRequest())),
        ]
        idle = await up.status("ann")
    for failure in failures:
        assert (failure.code(), reason(failure)) == (Code.FAILED_PRECONDITION, "FailedPrecondition")
        assert "not in a run" in (failure.details() or "")
    assert (idle.learner, idle.state) == ("ann", LearnerState.IDLE)


# ---- from the owner --------------------------------------------------------------------------------------------------


async def several(*messages: Any) -> AsyncIterator[Any]:
    for message in messages:
        yield message


def wrong_batches(own: LearnerData) -> list[tuple[learner_pb2.SampleBatch, Code, str, str]]:
    """Batches that cannot be taken in; the marker 987.5 must not be seen anywhere else."""

    def batch(features: Any, labels: Any, **more: Any) -> learner_pb2.SampleBatch:
        tensors = {"features": to_tensor(np.array(features, float)), "labels": to_tensor(np.array(labels, float))}
        return learner_pb2.SampleBatch(source="s", **{"sequence": 0, **tensors, **more})

    fine = np.full((1, 3), 987.5)
    whole = make_batch(own, "s", 0)
    short = learner_pb2.SampleBatch()
    short.CopyFrom(whole)
    short.counts[0] += 1
    return [
        (
            batch(np.full((1, 4), 987.5), [1]),
            Code.INVALID_ARGUMENT,
            "DataError",
            "a record must have 3 features, got 4",
        ),
        (batch([[987.5, np.nan, 0]], [1]), Code.INVALID_ARGUMENT, "DataError", "features must be finite numbers"),
        (batch([[987.5, np.inf, 0]], [1]), Code.INVALID_ARGUMENT, "DataError", "features must be finite numbers"),
        (
            batch(fine, [7]),
            Code.INVALID_ARGUMENT,
            "DataError",
            "labels of the logistic loss must be 0 or 1, got another",
        ),
        (batch(fine, [np.nan]), Code.INVALID_ARGUMENT, "DataError", "labels must be finite numbers"),
        (batch(fine, [1, 1]), Code.INVALID_ARGUMENT, "DataError", "labels must have the shape (1,)"),
        (
            batch(fine, [1], sequence=4),
            Code.FAILED_PRECONDITION,
            "FailedPrecondition",
            "must send batch 0 next, got batch 4",
        ),
        (batch(fine, [1], first_round=99), Code.INVALID_ARGUMENT, "DataError", "the run has rounds 0 to 11"),
        (short, Code.INVALID_ARGUMENT, "DataError", "the counts of a batch must add up to its records, 12, got 13"),
    ]


async def test_wrong_records_are_refused_to_the_feeder_alone(tmp_path: Path) -> None:
    """Codes and texts go to the owner; no status, no neighbour, no channel and no log gets a word of it."""
    spec = spec_of(capture="relay")
    with structlog.testing.capture_logs() as logs:
        async with run_that_ends_well(tmp_path, spec) as (up, run_id, data):
            before = len(logs)
            async with open_channel(up.addresses["cleo"]) as to:
                for batch, code, kind, text in wrong_batches(data.learners[2]):
                    failure = await refused(learner_pb2_grpc.LearnerStub(to).Ingest(several(batch), timeout=PATIENCE_S))

                    assert (failure.code(), reason(failure)) == (code, kind), text
                    assert text in (failure.details() or "")
                    assert "987" not in str(failure)
            status = await up.status("cleo")
            async for view in up.watch(run_id):
                assert view.state in (coordinator_pb2.RUN_STATE_CONNECTING, coordinator_pb2.RUN_STATE_RUNNING)
                assert view.detail == ""
                assert [each.status.detail for each in view.learners] == [""] * 4
                break

            assert (status.rounds_with_data, status.rounds_done, status.detail) == (0, 0, "")
            assert {event["event"] for event in logs[before:]} <= {"state"}  # who is running, in which round


async def test_bytes_that_are_no_message_are_the_callers_error_and_no_bug(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        async with run_that_ends_well(tmp_path, spec_of()) as (up, _, _):
            for address, method in (
                (up.addresses["cleo"], "/sottovoce_wire.v1.Learner/Ingest"),
                (up.coordinator, "/sottovoce_wire.v1.Coordinator/Join"),
                (up.eavesdropper, "/sottovoce_wire.v1.Eavesdropper/Mirror"),
            ):
                async with open_channel(address) as to:
                    call: Any = to.stream_stream(method)
                    failure = await refused(call(several(b"\xff\xff\xffgarbage"), timeout=PATIENCE_S))
                assert (failure.code(), reason(failure)) == (Code.INVALID_ARGUMENT, "RemoteProtocolError"), method
    assert "bug" not in [event["event"] for event in logs]


async def test_records_that_cannot_be_delivered_fail_the_run_and_only_their_owner_knows_why(tmp_path: Path) -> None:
    spec = spec_of()
    data = made_up(spec)
    own = replace(data.learners[1], labels=np.full(ROUNDS, 7.0))
    stop = asyncio.Event()
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, data.with_learner(1, own), stop)
        known = [(await up.status(name)).detail for name in NAMES]
        view = await up.end(outcome.run_id)

    assert outcome.state == "failed"
    assert outcome.detail.startswith("records could not be delivered: labels of the logistic loss must be 0 or 1")
    assert not stop.is_set()  # other runs may follow
    assert view.detail == "a feeder could not deliver its records"
    assert "label" not in " ".join([view.detail, *known, *(each.status.detail for each in view.learners)])


async def test_predictions_need_an_opt_in(tmp_path: Path) -> None:
    async with run_that_ends_well(tmp_path, spec_of()) as (up, _, _), open_channel(up.addresses["ann"]) as to:
        request = learner_pb2.PredictRequest(features=to_tensor(np.zeros((2, 3))))
        failure = await refused(learner_pb2_grpc.LearnerStub(to).Predict(request, timeout=PATIENCE_S))

        assert (failure.code(), reason(failure)) == (Code.FAILED_PRECONDITION, "FailedPrecondition")
        assert "this run did not opt in (telemetry.predict)" in (failure.details() or "")


@pytest.mark.parametrize("shape", [(2, 4), (3,), (1, 2, 3)], ids=str)
async def test_predictions_need_rows_of_the_right_width(tmp_path: Path, shape: tuple[int, ...]) -> None:
    spec = spec_of(telemetry={"predict": True})
    async with run_that_ends_well(tmp_path, spec) as (up, _, _), open_channel(up.addresses["ann"]) as to:
        request = learner_pb2.PredictRequest(features=to_tensor(np.zeros(shape)))
        failure = await refused(learner_pb2_grpc.LearnerStub(to).Predict(request, timeout=PATIENCE_S))

        assert (failure.code(), reason(failure)) == (Code.INVALID_ARGUMENT, "DataError")
        assert f"features must be shaped (records, 3), got {shape}" in (failure.details() or "")


async def test_the_accuracy_is_told_by_those_alone_who_opted_in(tmp_path: Path) -> None:
    async with run_that_ends_well(tmp_path, spec_of()) as (up, _, _):
        assert (await up.status("ann")).prequential_accuracy is None


# ---- from operators --------------------------------------------------------------------------------------------------


async def start(address: str, document: Any, n_features: int = 3) -> grpc.aio.AioRpcError:
    text = document if isinstance(document, str) else json.dumps(document)
    async with open_channel(address) as to:
        request = coordinator_pb2.StartRunRequest(spec=text, n_features=n_features)
        return await refused(coordinator_pb2_grpc.CoordinatorStub(to).StartRun(request, timeout=PATIENCE_S))


def document(**changes: Any) -> dict[str, Any]:
    return {**spec_of().model_dump(mode="json"), **changes}


EDGES = {"graph": {"kind": "edges", "edges": [[0, 1], [2, 3]]}}
RANDOM = {"sequence": {"kind": "random", "probability": 0.5}}
LIPSCHITZ = {"kind": "logistic", "feature_bound": 1.0}
UNFIT = [
    ("{", 3, "SpecError", "the run spec must be JSON: "),
    ("[1]", 3, "SpecError", "a run spec must be a mapping of fields, got a list"),
    (document(colour="red"), 3, "SpecError", "unknown field colour"),
    (document(algorithm={"name": "sgd"}), 3, "SpecError", "got 'sgd'"),
    (document(topology=EDGES), 3, "AssumptionViolated", "the communication graph is not connected"),
    (
        document(algorithm={"name": "ldp-dol", "sigma": 0}),
        3,
        "AssumptionViolated",
        "sigma must be positive and finite, got 0.0",
    ),
    (document(algorithm={"name": "ldp-dol", "sigma": [1.0]}), 3, "SpecError", "one number per learner (4), got 1"),
    (document(), 0, "SpecError", "n_features must be at least 1, got 0"),
    (document(learners=1025), 3, "SpecError", "at most 1024 learners, got 1025"),
    (document(rounds=2**53, clock={"window": 2**53}, topology=RANDOM), 3, "SpecError", "clock.window times learners"),
    (document(rounds=2**53, algorithm="dpsr", loss=LIPSCHITZ), 3, "SpecError", "more memory than there is"),
]


async def test_a_run_that_cannot_be_is_refused(tmp_path: Path) -> None:
    async with network(tmp_path, NAMES) as up:
        for unfit, n_features, kind, text in UNFIT:
            failure = await start(up.coordinator, unfit, n_features)
            assert (failure.code(), reason(failure)) == (Code.INVALID_ARGUMENT, kind), text
            assert text in (failure.details() or "")
        outcome = await up.run(spec_of(), made_up(spec_of()))
    assert outcome.state == "finished"


async def test_a_run_of_too_many_edges_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_launcher, "MAX_EDGES_PER_RUN", 5)
    async with network(tmp_path, NAMES) as up:
        failure = await start(up.coordinator, document(topology={"graph": "complete"}))
        outcome = await up.run(spec_of(), made_up(spec_of()))
    assert (failure.code(), reason(failure)) == (Code.INVALID_ARGUMENT, "SpecError")
    assert "at most 5 edges, got 6" in (failure.details() or "")
    assert outcome.state == "finished"


async def test_nothing_is_built_before_all_have_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def built(*_: object) -> None:
        raise AssertionError("a network of learners that are not there was built")

    monkeypatch.setattr(run_launcher, "build_run", built)
    async with network(tmp_path, ["ann"]) as up:
        failure = await start(up.coordinator, document(clock={"deadline_s": 0.1}))
    assert (failure.code(), reason(failure)) == (Code.FAILED_PRECONDITION, "FailedPrecondition")


async def test_others_are_served_while_a_run_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    building, served = threading.Event(), threading.Event()

    def slowly(*told: Any) -> Run:
        building.set()
        assert served.wait(20), "nobody was served meanwhile"
        return build_run(*told)

    monkeypatch.setattr(run_launcher, "build_run", slowly)
    async with network(tmp_path, NAMES) as up, open_channel(up.coordinator) as to:
        begun = asyncio.ensure_future(up.start(spec_of(), 3))
        await asyncio.to_thread(building.wait, PATIENCE_S)
        await coordinator_pb2_grpc.CoordinatorStub(to).ListRuns(coordinator_pb2.ListRunsRequest(), timeout=PATIENCE_S)
        served.set()
        assert (await begun).state == coordinator_pb2.RUN_STATE_CONNECTING


async def test_a_spec_of_a_newer_operator_is_run_without_what_is_unknown(tmp_path: Path) -> None:
    """But not without a condition of the guarantee."""
    newer = {**document(patience="long"), FORMAT_FIELD: FORMAT + 1}
    strict = {**newer, "privacy": {"per_week": 1.0}}
    with structlog.testing.capture_logs() as logs:
        async with network(tmp_path, NAMES) as up, open_channel(up.coordinator) as to:
            failure = await start(up.coordinator, strict)
            request = coordinator_pb2.StartRunRequest(spec=json.dumps(newer), n_features=3)
            run = await coordinator_pb2_grpc.CoordinatorStub(to).StartRun(request, timeout=PATIENCE_S)
            assert (run.state, len(run.learners)) == (coordinator_pb2.RUN_STATE_CONNECTING, 4)
    assert (failure.code(), reason(failure)) == (Code.INVALID_ARGUMENT, "SpecError")
    assert "per_week" in (failure.details() or "")
    assert ("patience",) in [event.get("fields") for event in logs]


async def test_learners_that_have_not_joined_are_named(tmp_path: Path) -> None:
    async with network(tmp_path, ["ann", "cleo"]) as up:
        failure = await start(up.coordinator, document(clock={"deadline_s": 0.3}))
    assert (failure.code(), reason(failure)) == (Code.FAILED_PRECONDITION, "FailedPrecondition")
    assert (failure.details() or "").startswith(
        "2 of 4 learners have not joined: ben, dan. Start each under the name that"
    )


async def test_who_waits_for_learners_is_told_for_whom_while_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word comes before the answer: the learner that it names joins only then, and the run begins."""
    monkeypatch.setattr(tasks, "WAIT_NOTICE_DELAY_S", 0.05)
    spec, said, told = spec_of(), list[str](), asyncio.Event()

    def say(text: str) -> None:
        if text.startswith("waiting for dan"):  # on a busy machine, other waits are told first
            said.append(text)
            told.set()

    monkeypatch.setattr(terminal, "print_notice", say)
    async with network(tmp_path, [*NAMES[:3], "don"]) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await asyncio.wait_for(told.wait(), PATIENCE_S)
        begun = running.done()
        await up.join("dan")
        outcome = await asyncio.wait_for(running, PATIENCE_S)
    assert not begun and outcome.state == "finished"
    assert (
        said[0].startswith("waiting for dan: not joined yet; is each started,")
        and "Others have joined: don." in said[0]
    )


async def test_who_waits_for_a_coordinator_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody accepts the connection and never says a word."""
    monkeypatch.setattr(tasks, "WAIT_NOTICE_DELAY_S", 0.05)
    told, said = asyncio.Event(), list[str]()

    def say(text: str) -> None:
        said.append(text)
        told.set()

    monkeypatch.setattr(terminal, "print_notice", say)

    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await told.wait()
        writer.close()

    silent = await asyncio.start_server(nothing, "127.0.0.1", 0)
    async with silent:
        at = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        spec, stop = spec_of(), asyncio.Event()
        running = asyncio.ensure_future(run_on_services(at, spec, made_up(spec), lambda progress, state: None, stop))
        await asyncio.wait_for(told.wait(), PATIENCE_S)
        stop.set()
        with pytest.raises(RunInterrupted):
            await asyncio.wait_for(running, PATIENCE_S)
    assert said == [f"waiting for the coordinator at {at}: not reached yet; is it running, and is the address right?"]


async def test_a_capture_needs_an_eavesdropper(tmp_path: Path) -> None:
    async with network(tmp_path, NAMES) as up:
        assert up.coordinating is not None
        up.coordinating._captures.address = None
        none = await start(up.coordinator, document(capture="relay"))
        up.coordinating._captures.address = "127.0.0.1:1"
        away = await start(up.coordinator, document(capture="mirror"))
        up.coordinating._captures.address = up.eavesdropper
        outcome = await up.run(spec_of(capture="mirror"), made_up(spec_of()))

    assert (none.code(), reason(none)) == (Code.FAILED_PRECONDITION, "FailedPrecondition")
    assert "capture: relay needs an eavesdropper" in (none.details() or "")
    assert (away.code(), reason(away)) == (Code.UNAVAILABLE, "Unavailable")
    assert "cannot reach the eavesdropper at 127.0.0.1:1" in (away.details() or "")
    assert outcome.state == "finished"


async def test_runs_that_are_not_there_are_not_watched_or_stopped(tmp_path: Path) -> None:
    async with run_that_ends_well(tmp_path, spec_of()) as (up, run_id, _), open_channel(up.coordinator) as to:
        stub = coordinator_pb2_grpc.CoordinatorStub(to)
        for failure in (
            await refused(stub.WatchRun(coordinator_pb2.WatchRunRequest(run_id="other"), timeout=PATIENCE_S)),
            await refused(stub.StopRun(coordinator_pb2.StopRunRequest(run_id="other"), timeout=PATIENCE_S)),
            await refused(stub.GetRun(coordinator_pb2.GetRunRequest(run_id="other"), timeout=PATIENCE_S)),
        ):
            assert (failure.code(), reason(failure)) == (Code.NOT_FOUND, "NotFound")
            assert failure.details() == f"no run 'other': the last one is {run_id!r}"


STORE = bytes(range(16))


def introducing(learner: str, **more: Any) -> coordinator_pb2.LearnerMessage:
    usual = {"learner": learner, "address": "127.0.0.1:1", "store_id": STORE}
    return coordinator_pb2.LearnerMessage(introduction=coordinator_pb2.Introduction(**{**usual, **more}))


def confirming(incarnation: int) -> coordinator_pb2.LearnerMessage:
    return coordinator_pb2.LearnerMessage(incarnation_stored=coordinator_pb2.IncarnationStored(incarnation=incarnation))


def reporting(learner: str, run_id: str) -> coordinator_pb2.LearnerMessage:
    """That a learner has failed."""
    status = LearnerStatus(learner, run_id, LearnerState.FAILED, "mischief")
    return coordinator_pb2.LearnerMessage(report=coordinator_pb2.Report(status=status.to_wire()))


async def test_reports_of_strangers_change_nothing(tmp_path: Path) -> None:
    """Who has joined under one name reports of no other; and one who is not in the run fails only itself."""
    async with run_that_ends_well(tmp_path, spec_of()) as (up, run_id, _), open_channel(up.coordinator) as to:
        join = coordinator_pb2_grpc.CoordinatorStub(to).Join
        for before, run in enumerate((run_id, "other")):
            learner_registry = introducing("zoe", incarnation=before), confirming(before + 1)
            failure = await refused(join(several(*learner_registry, reporting("ann", run)), timeout=PATIENCE_S))
            assert (failure.code(), reason(failure)) == (Code.PERMISSION_DENIED, "PermissionDenied")
            assert failure.details() == "a report on this stream must be of learner 'zoe', got 'ann'"
        outside = (
            introducing("zoe", incarnation=2),
            confirming(3),
            reporting("zoe", run_id),
            coordinator_pb2.LearnerMessage(),
        )
        told = [each.WhichOneof("command") async for each in join(several(*outside), timeout=PATIENCE_S)]
        assert told == ["issued", "confirmed"]  # and nothing of the run
        for first in (reporting("ann", run_id), introducing(""), coordinator_pb2.LearnerMessage()):
            failure = await refused(join(several(first), timeout=PATIENCE_S))
            assert (failure.code(), reason(failure)) == (Code.INVALID_ARGUMENT, "RemoteProtocolError")
            assert "must introduce itself first" in (failure.details() or "")


@pytest.mark.parametrize("name", ["../a", "\x1b[31mred", "y" * 64, " a", "a\n"])
async def test_a_learner_joins_by_a_name_that_a_spec_may_give(tmp_path: Path, name: str) -> None:
    async with network(tmp_path, []) as up, open_channel(up.coordinator) as to:
        with structlog.testing.capture_logs() as logs:
            join = coordinator_pb2_grpc.CoordinatorStub(to).Join
            failure = await refused(join(several(introducing(name)), timeout=PATIENCE_S))
            far = introducing("ann")
            far.introduction.address = "a" * 301
            away = await refused(join(several(far), timeout=PATIENCE_S))
    assert (failure.code(), reason(failure)) == (Code.INVALID_ARGUMENT, "RemoteProtocolError")
    assert "a learner's name must be 1 to 63 letters and digits" in (failure.details() or "")
    assert (away.code(), reason(away)) == (Code.INVALID_ARGUMENT, "RemoteProtocolError")
    assert "joined" not in [event["event"] for event in logs]


async def test_no_coordinator_has_had_more_terms_than_can_be_outranked(tmp_path: Path) -> None:
    """Whoever tells of more would leave none for the next start."""
    async with network(tmp_path, []) as up, open_channel(up.coordinator) as to:
        join = coordinator_pb2_grpc.CoordinatorStub(to).Join
        failure = await refused(join(several(introducing("ann", term=2**32 + 1)), timeout=PATIENCE_S))
    assert (failure.code(), reason(failure)) == (Code.INVALID_ARGUMENT, "RemoteProtocolError")
    assert "a term is one more at each start of a coordinator" in (failure.details() or "")


@pytest.mark.parametrize("rejoins", [False, True])
async def test_no_learner_was_started_more_often_than_its_coordinator_can_count(tmp_path: Path, rejoins: bool) -> None:
    async with network(tmp_path, []) as up, open_channel(up.coordinator) as to:
        join = coordinator_pb2_grpc.CoordinatorStub(to).Join
        said = introducing("ann", incarnation=2**64 - 1, rejoins=rejoins)
        failure = await refused(join(several(said), timeout=PATIENCE_S))
    assert (failure.code(), reason(failure)) == (Code.INVALID_ARGUMENT, "RemoteProtocolError")
    assert "an incarnation is one more at each start of a learner" in (failure.details() or "")


async def test_a_stream_on_which_nobody_joins_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_registry, "HELLO_TIMEOUT_S", 0.05)

    async def silent() -> AsyncIterator[coordinator_pb2.LearnerMessage]:
        await asyncio.Event().wait()
        yield coordinator_pb2.LearnerMessage()

    async with network(tmp_path, []) as up, open_channel(up.coordinator) as to:
        failure = await refused(coordinator_pb2_grpc.CoordinatorStub(to).Join(silent(), timeout=PATIENCE_S))
    assert (failure.code(), reason(failure)) == (Code.INVALID_ARGUMENT, "RemoteProtocolError")
    assert failure.details() == "expected an introduction within 0.05 s, got nothing"


async def test_somebody_else_does_not_take_the_place_of_a_learner(tmp_path: Path) -> None:
    """With another state folder, without one, or without a word of confirmation: refused, and the run goes on."""
    async with run_that_ends_well(tmp_path, spec_of()) as (up, _, _), open_channel(up.coordinator) as to:
        join = coordinator_pb2_grpc.CoordinatorStub(to).Join
        ann = up.learners["ann"]._following.identity
        other = await refused(join(several(introducing("ann")), timeout=PATIENCE_S))
        again = await refused(join(several(introducing("ann", store=ann.store_id, incarnation=1)), timeout=PATIENCE_S))
        older = await refused(join(several(introducing("ann", store=b"")), timeout=PATIENCE_S))
        hasty = await refused(join(several(introducing("zoe"), reporting("zoe", "")), timeout=PATIENCE_S))
        wrong = await refused(join(several(introducing("zoe"), confirming(7)), timeout=PATIENCE_S))
    assert (other.code(), reason(other)) == (Code.PERMISSION_DENIED, "PermissionDenied")
    assert "has joined with another state folder than this one" in (other.details() or "")
    assert "sottovoce rebind ann" in (other.details() or "")
    assert (again.code(), reason(again)) == (Code.UNAVAILABLE, "Unavailable")
    assert (again.details() or "").startswith("learner 'ann' is connected already: stop the other process")
    assert "is it older than its coordinator?" in (older.details() or "")
    assert hasty.details() == "a learner must confirm the incarnation that it was issued"
    assert (wrong.details() or "").startswith("learner 'zoe' must confirm incarnation 2, got 7")


async def test_a_learner_that_could_not_be_welcomed_is_not_taken_for_one_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the disk of the coordinator is full: the next attempt must not be told that the learner is here already."""
    true = Coordinator._connect_learner

    async def welcome(own: Coordinator, member: Any) -> None:
        await true(own, member)
        raise Unavailable("full")

    async with network(tmp_path, []) as up, open_channel(up.coordinator) as to:
        join = coordinator_pb2_grpc.CoordinatorStub(to).Join
        with monkeypatch.context() as patch:
            patch.setattr(Coordinator, "_connect_learner", welcome)
            failure = await refused(join(several(introducing("zoe"), confirming(1)), timeout=PATIENCE_S))
        again = join(several(introducing("zoe", incarnation=1), confirming(2)), timeout=PATIENCE_S)
        told = [each.WhichOneof("command") async for each in again]
    assert failure.details() == "full"
    assert told == ["issued", "confirmed"]


async def test_a_learner_outlives_a_bug_of_its_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    welcomed, true = [0], Coordinator._connect_learner

    async def welcome(own: Coordinator, member: Any) -> None:
        welcomed[0] += 1
        if welcomed[0] <= 2:
            raise ZeroDivisionError
        await true(own, member)

    monkeypatch.setattr(Coordinator, "_connect_learner", welcome)
    spec = spec_of()
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, made_up(spec))
    assert outcome.state == "finished" and welcomed[0] == 6


async def test_runs_are_remembered_newest_first_and_in_bounded_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_registry, "MAX_ENDED_RUNS", 3)
    spec, wire = spec_of(), coordinator_pb2
    async with network(tmp_path, NAMES) as up, open_channel(up.coordinator) as to:
        stub = coordinator_pb2_grpc.CoordinatorStub(to)
        outcomes = [await up.run(spec, made_up(spec)) for _ in range(4)]
        pages = [await stub.ListRuns(wire.ListRunsRequest(page_size=2), timeout=PATIENCE_S)]
        pages.append(await stub.ListRuns(wire.ListRunsRequest(page_token=pages[0].next_page_token), timeout=PATIENCE_S))
        nowhere = wire.ListRunsRequest(page_token=outcomes[0].run_id)
        bad = await refused(stub.ListRuns(nowhere, timeout=PATIENCE_S))
        forgotten = await refused(stub.GetRun(wire.GetRunRequest(run_id=outcomes[0].run_id), timeout=PATIENCE_S))
        run = await stub.GetRun(wire.GetRunRequest(run_id=outcomes[1].run_id), timeout=PATIENCE_S)
        stopped = await stub.StopRun(wire.StopRunRequest(run_id=outcomes[1].run_id), timeout=PATIENCE_S)
        (last,) = [view async for view in up.watch(outcomes[1].run_id)]

    listed = [[each.run_id for each in page.runs] for page in pages]
    assert listed == [[outcomes[3].run_id, outcomes[2].run_id], [outcomes[1].run_id]]
    assert (pages[1].next_page_token, pages[0].runs[0].spec) == ("", "")
    assert (bad.code(), reason(bad)) == (Code.INVALID_ARGUMENT, "SpecError")
    assert reason(forgotten) == "NotFound"
    assert spec_from_wire(run.spec, imports=False) == spec and run.n_features == 3
    assert run.started_at.ToDatetime() < run.ended_at.ToDatetime()
    assert stopped.state == last.state == run.state == wire.RUN_STATE_FINISHED  # stopping it comes too late
    assert [each.address for each in run.learners] == [up.addresses[name] for name in NAMES]
    assert [each.status.rounds_committed for each in run.learners] == [ROUNDS] * 4


async def test_captures_that_are_not_there_are_refused(tmp_path: Path) -> None:
    async with network(tmp_path, []) as up, open_channel(up.eavesdropper) as to:
        stub = eavesdropper_pb2_grpc.EavesdropperStub(to)
        wire = eavesdropper_pb2
        for failure in (
            await refused(stub.CloseCapture(wire.CloseCaptureRequest(capture_id="c"), timeout=PATIENCE_S)),
            await refused(stub.StreamCapture(wire.StreamCaptureRequest(capture_id="c"), timeout=PATIENCE_S)),
            await refused(stub.Mirror(several(wire.MirrorRequest(run_id="r")), timeout=PATIENCE_S)),
        ):
            assert (failure.code(), reason(failure)) == (Code.NOT_FOUND, "NotFound")
        failure = await refused(stub.OpenCapture(wire.OpenCaptureRequest(run_id="r", spec="{"), timeout=PATIENCE_S))
        listed = await stub.ListCaptures(wire.ListCapturesRequest(), timeout=PATIENCE_S)

    assert (failure.code(), reason(failure)) == (Code.INVALID_ARGUMENT, "SpecError")
    assert "the run spec must be JSON" in (failure.details() or "")
    assert list(listed.captures) == []


async def test_a_capture_needs_a_folder_that_can_be_written(tmp_path: Path) -> None:
    """Also where it is lost after the eavesdropper has begun, which refuses a file at its start."""
    async with network(tmp_path, NAMES) as up:
        (tmp_path / "captures").write_text("a file, not a folder", encoding="utf-8")
        failure = await start(up.coordinator, document(capture="mirror"))
    assert (failure.code(), reason(failure)) == (Code.FAILED_PRECONDITION, "CaptureError")
    assert "cannot write to the folder" in (failure.details() or "")


# ---- every service ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Coordinator", "Learner", "Eavesdropper"])
async def test_every_service_tells_its_health_and_what_it_offers(tmp_path: Path, kind: str) -> None:
    async with network(tmp_path, ["ann"]) as up:
        address = {
            "Coordinator": up.coordinator,
            "Learner": up.addresses["ann"],
            "Eavesdropper": up.eavesdropper,
        }[kind]
        async with open_channel(address) as to:
            check: Any = to.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            for name in ("", f"sottovoce_wire.v1.{kind}"):
                answer = await check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_S)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            unknown = health_pb2.HealthCheckRequest(service="sottovoce_wire.v1.Nobody")
            assert (await refused(check(unknown, timeout=PATIENCE_S))).code() is Code.NOT_FOUND

            reflect: Any = to.stream_stream(
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            ask = several(reflection_pb2.ServerReflectionRequest(list_services=""))
            answers = [answer async for answer in reflect(ask, timeout=PATIENCE_S)]
    names = {service.name for service in answers[0].list_services_response.service}
    assert names >= {f"sottovoce_wire.v1.{kind}", "grpc.health.v1.Health"}


async def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    async with network(tmp_path, ["ann"]) as up:
        taken = up.coordinator
        for service in (
            Coordinator(CoordinatorConfig(listen=taken)),
            Eavesdropper(EavesdropperConfig(listen=taken, folder=tmp_path)),
            Learner(LearnerConfig("zoe", taken, listen=taken, state_folder=tmp_path)),
        ):
            with pytest.raises(Unavailable, match=f"cannot listen on {taken}: the port is in use"):
                await service.start()


async def test_a_state_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file in its place: whoever runs the tests may write anywhere else."""
    taken = tmp_path / "state"
    taken.write_text("")
    with pytest.raises(FailedPrecondition, match=f"the state folder {taken} cannot be written: File exists"):
        await Learner(LearnerConfig("ann", "127.0.0.1:1", state_folder=taken)).start()


async def test_a_coordinator_that_is_not_there_is_named(tmp_path: Path) -> None:
    learner = Learner(LearnerConfig("ann", "127.0.0.1:1", state_folder=tmp_path, join_timeout_s=0.2))
    with pytest.raises(Unavailable, match=r"cannot reach the coordinator at 127\.0\.0\.1:1 within 0\.2 s"):
        await learner.follow(await learner.start())
    await learner.stop()


@pytest.mark.parametrize(
    "where",
    [{"listen": "0.0.0.0:0", "advertise": "hospital:7"}, {"advertise": "10.0.0.7:7"}, {"advertise": "127.evil:7"}],
)
def test_recorded_noise_is_for_loopback_alone(tmp_path: Path, where: dict[str, str]) -> None:
    with pytest.raises(SpecError, match="recorded noise protects nobody"):
        Learner(LearnerConfig("ann", "127.0.0.1:1", recorded_noise=tmp_path / "n.npz", **where))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"y": np.zeros((ROUNDS, 2, 3))}, "must cover (cleo|dan), got that of 2 learners"),
        ({"y": np.zeros((5, 4, 3))}, "must have field 'y' for round 5, and it does not"),
        ({"y": np.zeros((ROUNDS, 4, 2))}, r"must have shape \(3,\) in a round, got \(2,\)"),
    ],
    ids=["learners", "rounds", "numbers"],
)
async def test_recorded_noise_that_does_not_fit_fails_the_run_with_its_reason(
    tmp_path: Path, fields: dict[str, Any], text: str
) -> None:
    np.savez(tmp_path / "n.npz", **fields)
    spec = spec_of()
    async with network(tmp_path, NAMES, noise=tmp_path / "n.npz") as up:
        outcome = await up.run(spec, made_up(spec))
    assert outcome.state == "failed"
    assert "failed: " in outcome.detail
    assert re.search(text, outcome.detail), outcome.detail
