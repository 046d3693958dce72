"""What costs memory, time or descriptors has a limit, and is refused before it is spent; others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sottovoce_client.runs.feeder import choose_rounds_per_batch, make_batch
from sottovoce_coordinator import learner_registry
from sottovoce_coordinator.learner_registry import JoinedLearner
from sottovoce_coordinator.run_launcher import MAX_EDGES_PER_RUN
from sottovoce_coordinator.store import Claim
from sottovoce_core.data import LearnerData
from sottovoce_core.runs.policy import Policy
from sottovoce_core.spec import MAX_OFFLINE_INTERVALS
from sottovoce_eavesdropper import capture_registry, capture_session
from sottovoce_eavesdropper import service as eavesdropping
from sottovoce_eavesdropper.grpc_proxy import GrpcProxy
from sottovoce_learner import session_factory
from sottovoce_learner.config import compute_max_message_bytes
from sottovoce_learner.mirror import Mirror
from sottovoce_rpc import access, server
from sottovoce_rpc.commands import Origin
from sottovoce_rpc.error_status import CallOutcome
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import MAX_CONTROL_BYTES, MAX_MESSAGE_BYTES, MAX_OVERHEAD_BYTES, open_channel
from sottovoce_rpc.specs import spec_to_wire
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
from tests.services.capturing import frame, hello
from tests.services.identities import Identities
from tests.services.network import PATIENCE_S, Network, network, refused
from tests.services.test_exchange_errors import confirming, exchange, introducing, several, start

Code = grpc.StatusCode
EAVESDROPPER = "/sottovoce_wire.v1.Eavesdropper"


async def all_serve(up: Network, name: str = "ann") -> None:
    """Coordinator, learner and eavesdropper answer, and a run of one learner ends well."""
    assert (await up.status(name)).learner == name
    async with open_channel(up.eavesdropper) as to:
        stub = eavesdropper_pb2_grpc.EavesdropperStub(to)
        await stub.ListCaptures(eavesdropper_pb2.ListCapturesRequest(), timeout=PATIENCE_S)
    spec = small_spec(5, [name])
    assert (await up.run(spec, made_up(spec))).state == "finished"


# ---- sizes -----------------------------------------------------------------------------------------------------------

LARGE: list[tuple[dict[str, Any], int, str]] = [
    ({}, 2**32 - 1, "4294967295 features give 4294967295 with this loss"),
    ({"learners": 2_000_000}, 3, "learners"),
    ({"learners": [f"l{k}" for k in range(20_000)]}, 3, "learners"),
    ({"learners": 3_000, "topology": {"graph": {"kind": "complete"}}}, 3, "at most 1024 learners, got 3000"),
    ({"clock": {"mode": "paced", "period_s": 1e-9}}, 3, "period_s: must be greater than or equal to 0.002"),
    (
        {"offline_intervals": [{"learner": "ann"}] * (MAX_OFFLINE_INTERVALS + 1)},
        3,
        f"at most {MAX_OFFLINE_INTERVALS} items",
    ),
]


async def test_a_spec_beyond_what_is_served_is_refused(tmp_path: Path) -> None:
    """Its learner is there, and lives."""
    async with network(tmp_path, ["ann"]) as up:
        for more, n_features, text in LARGE:
            document = {**small_spec(5, ["ann"]).model_dump(mode="json"), **more}
            failure = await start(up.coordinator, document, n_features)
            assert (failure.code(), text in (failure.details() or "")) == (Code.INVALID_ARGUMENT, True), failure
        await all_serve(up)


def test_a_spec_of_all_edges_that_are_served_is_a_message() -> None:
    names = [f"{k:04}{'x' * 59}" for k in range(1_024)]
    edges = [[k // 64, 64 + k % 960] for k in range(MAX_EDGES_PER_RUN)]
    spec = small_spec(5, names, topology={"graph": {"kind": "edges", "edges": [[k, k + 1] for k in range(1_023)]}})
    document = json.loads(spec_to_wire(spec))
    document["topology"]["graph"]["edges"] = edges
    assert 2 * len(json.dumps(document)) < MAX_CONTROL_BYTES


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[Network]:
    async with network(tmp_path, ["ann"]) as running:
        yield running
        await all_serve(running)


async def raw(address: str, method: str, payload: bytes) -> grpc.aio.AioRpcError:
    any_size = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address, any_size) as to:
        call: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = to.stream_stream(method)
        return await refused(call(iter([payload]), timeout=PATIENCE_S))


async def test_what_is_longer_than_a_control_message_is_not_read(up: Network) -> None:
    """A coordinator takes no longer one; an eavesdropper and a learner, which take models, do not look into it."""
    long = bytes(MAX_CONTROL_BYTES + 1)
    for method in ("StartRun", "Join"):
        failure = await raw(up.coordinator, f"/sottovoce_wire.v1.Coordinator/{method}", long)
        assert failure.code() is Code.RESOURCE_EXHAUSTED, method
    for address, method in ((up.eavesdropper, f"{EAVESDROPPER}/OpenCapture"), (up.addresses["ann"], "GetStatus")):
        path = method if method.startswith("/") else f"/sottovoce_wire.v1.Learner/{method}"
        failure = await raw(address, path, long)
        assert failure.code() is Code.INVALID_ARGUMENT
        assert failure.details() == f"a request must have at most {MAX_CONTROL_BYTES} bytes, got {len(long)}"


async def test_nobody_reads_what_is_longer_than_any_message(up: Network) -> None:
    """Several at a time."""
    long = bytes(eavesdropping._MAX_MESSAGE_BYTES + 1)
    for method in ("OpenCapture", "Mirror"):
        failures = await asyncio.gather(*(raw(up.eavesdropper, f"{EAVESDROPPER}/{method}", long) for _ in range(3)))
        assert {failure.code() for failure in failures} == {Code.RESOURCE_EXHAUSTED}
    long = bytes(compute_max_message_bytes(up.learners["ann"].config.policy) + 1)
    failure = await raw(up.addresses["ann"], "/sottovoce_wire.v1.Learner/GetStatus", long)
    assert failure.code() is Code.RESOURCE_EXHAUSTED


def test_a_learner_is_sent_no_longer_messages_than_its_policy_has_models() -> None:
    for parameters, most in (
        (None, MAX_MESSAGE_BYTES),
        (10**9, MAX_MESSAGE_BYTES),
        (10**7, 8 * 10**7 + MAX_OVERHEAD_BYTES),
    ):
        assert compute_max_message_bytes(Policy(max_parameters=parameters)) == most
    small = compute_max_message_bytes(Policy(max_parameters=100))
    assert small == compute_max_message_bytes(Policy(max_parameters=1)) < MAX_MESSAGE_BYTES // 3


async def test_a_run_of_longer_messages_than_a_learner_takes_is_refused(
    up: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_factory, "compute_max_message_bytes", lambda policy: 10)
    run = await up.start(small_spec(5, ["ann"]), 3)
    end = await up.end(run.run_id)
    assert end.state == coordinator_pb2.RUN_STATE_FAILED
    assert "this learner takes messages of at most 10 bytes, got a run whose messages have " in end.detail
    monkeypatch.undo()


async def test_unread_messages_of_one_caller_are_as_many_as_have_a_turn(up: Network) -> None:
    """Further calls wait, and are answered when one is over; a health check has a turn of its own."""
    assert up.learners["ann"].service is not None
    turns = max(1, access.MAX_UNREAD_BYTES // compute_max_message_bytes(up.learners["ann"].config.policy))
    async with open_channel(up.addresses["ann"]) as to:
        held: list[Any] = [to.stream_stream("/sottovoce_wire.v1.Learner/Predict")() for _ in range(turns)]
        health: Any = health_pb2_grpc.HealthStub(to)
        for call in held:
            await call.wait_for_connection()
        for _ in range(3):
            await health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        waiting = learner_pb2_grpc.LearnerStub(to).GetStatus(learner_pb2.GetStatusRequest(), timeout=PATIENCE_S)
        for _ in range(3):
            await health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        assert not waiting.done()
        held.pop().cancel()
        assert (await waiting).status.learner == "ann"
        for call in held:
            call.cancel()


async def test_nothing_is_read_of_a_caller_who_may_not_call(tmp_path: Path) -> None:
    """Though it sends nothing, it is refused."""
    identities = Identities(tmp_path / "ids")
    async with network(tmp_path, ["ann"], identities=identities) as up:
        stranger = identities.of("feeder/zoe")
        async with open_channel(up.addresses["ann"], Role.LEARNER, "ann", credentials=stranger) as to:
            for method in ("Exchange", "Nothing"):
                failure = await refused(to.stream_stream(f"/sottovoce_wire.v1.Learner/{method}")(timeout=PATIENCE_S))
                assert failure.code() in (Code.PERMISSION_DENIED, Code.UNIMPLEMENTED)
        async with open_channel(up.coordinator, Role.COORDINATOR, credentials=stranger) as to:
            for method in ("StartRun", "GetRun", "WatchRun", "Join"):
                path = f"/sottovoce_wire.v1.Coordinator/{method}"
                failure = await refused(to.stream_stream(path)(timeout=PATIENCE_S))
                assert (failure.code(), method in (failure.details() or "")) == (Code.PERMISSION_DENIED, True)


def held_by_services(longer: int) -> list[bytes]:
    """Bytes beyond a length that frames of a service hold."""
    frames = [each for each in gc.get_objects() if isinstance(each, FrameType) and each.f_code.co_name != "raw"]
    own = [each for each in frames if "/services/sottovoce" in each.f_code.co_filename]
    values = [value for each in own for value in each.f_locals.values()]
    return [value for value in values if isinstance(value, bytes) and len(value) > longer]


async def test_what_refused_calls_have_sent_is_let_go(up: Network) -> None:
    """When the call ends: no collector of circles runs."""
    sent = bytes(2_000_003)
    await up.start(small_spec(5, ["ann"]), 3)
    await up.until("ann", LearnerState.RUNNING)
    gc.collect()
    gc.disable()
    try:
        for method in ("Predict", "GetStatus", "Ingest", "Exchange"):
            await raw(up.addresses["ann"], f"/sottovoce_wire.v1.Learner/{method}", b"\xff" + sent)
        kept = [each.__traceback__ for each in gc.get_objects() if isinstance(each, grpc.aio.AbortError)]
        assert kept
        files = {frame.f_code.co_filename for each in kept for frame, _ in traceback.walk_tb(each)}
        assert not [file for file in files if "sottovoce" in file]
        async with asyncio.timeout(PATIENCE_S):
            while held_by_services(len(sent)):  # noqa: ASYNC110 - an answered call may have to end yet
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
    await stop_all(up)


async def test_streams_of_records_are_so_many_of_a_caller(up: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_spec(500, ["ann"])
    await up.start(spec, 3)
    await up.until("ann", LearnerState.RUNNING)
    (own,) = made_up(spec).learners
    monkeypatch.setattr(up.learners["ann"].servicer._record_streams, "_max_streams", 1)
    async with open_channel(up.addresses["ann"]) as to:
        stub = learner_pb2_grpc.LearnerStub(to)
        held = stub.Ingest(timeout=PATIENCE_S)
        await held.write(make_batch(own, "s0", 0))
        await held.read()
        failure = await refused(stub.Ingest(iter([make_batch(own, "s1", 0)]), timeout=PATIENCE_S))
        assert failure.code() is Code.RESOURCE_EXHAUSTED
        assert "at most 1 streams of records by callers without an identity may be open here" in (
            failure.details() or ""
        )
        held.cancel()
    await stop_all(up)


async def test_a_greeting_is_short_and_so_is_what_is_said_of_it(up: Network) -> None:
    await up.start(small_spec(5, ["ann"]), 3)
    await up.until("ann", LearnerState.RUNNING)
    fields = [tensor_pb2.Field(name=f"{k}", dtype=tensor_pb2.DATA_TYPE_FLOAT64) for k in range(200_000)]
    failure = await exchange(up.addresses["ann"], hello(0, 0, fields=fields))
    assert failure.code() is Code.INVALID_ARGUMENT
    assert "expected a Hello first, got " in (failure.details() or "")
    failure = await start(up.coordinator, {"colour " * 20_000: 1})
    assert (failure.code(), len(failure.details() or "") < 2_000) == (Code.INVALID_ARGUMENT, True)
    await stop_all(up)


async def stop_all(up: Network) -> None:
    async with open_channel(up.coordinator) as to:
        stub = coordinator_pb2_grpc.CoordinatorStub(to)
        for run in (await stub.ListRuns(coordinator_pb2.ListRunsRequest(), timeout=PATIENCE_S)).runs:
            await stub.StopRun(coordinator_pb2.StopRunRequest(run_id=run.run_id), timeout=PATIENCE_S)


async def test_a_tensor_has_few_axes(up: Network) -> None:
    """Wherever one comes in: as records, as features, as a field of a capture."""
    await up.start(small_spec(5, ["ann"], telemetry={"predict": True}), 3)
    await up.until("ann", LearnerState.RUNNING)
    axes = [2**64 - 1] * 20_000
    tensor = tensor_pb2.Tensor(shape=axes, dtype=tensor_pb2.DATA_TYPE_FLOAT64)
    batch = learner_pb2.SampleBatch(source="x", features=tensor, labels=tensor)
    session_factory = eavesdropper_pb2.OpenCaptureRequest(run_id="x")
    session_factory.fields.add(name="y", shape=axes, dtype=tensor_pb2.DATA_TYPE_FLOAT64)
    for address, method, request in (
        (up.addresses["ann"], "/sottovoce_wire.v1.Learner/Ingest", batch),
        (up.addresses["ann"], "/sottovoce_wire.v1.Learner/Predict", learner_pb2.PredictRequest(features=tensor)),
        (up.eavesdropper, f"{EAVESDROPPER}/OpenCapture", session_factory),
    ):
        failure = await raw(address, method, request.SerializeToString())
        assert failure.code() is Code.INVALID_ARGUMENT
        assert "may have at most 8 axes, got 20000" in (failure.details() or "")
    await stop_all(up)


# ---- calls and connections -------------------------------------------------------------------------------------------


def changed(name: str, value: int) -> server.Options:
    """The options of servers with another value of one that they have."""
    options = dict(server.SERVER_OPTIONS)
    assert name in options
    return tuple({**options, name: value}.items())


async def test_connections_on_which_nobody_speaks_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SERVER_OPTIONS", changed("grpc.server_handshake_timeout_ms", 300))
    async with network(tmp_path, ["ann"]) as up:
        host, port = up.coordinator.rsplit(":", 1)
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(200)]
        async with asyncio.timeout(PATIENCE_S):
            for reader, _ in opened:
                while await reader.read(1_024):
                    pass
        for _, writer in opened:
            writer.close()
        await all_serve(up)


async def test_a_server_answers_so_many_calls_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONCURRENT_CALLS", 5)  # the learner's own stream is one
    async with network(tmp_path, ["ann"]) as up, open_channel(up.coordinator) as to:
        await up.until_here("ann")
        stub: Any = health_pb2_grpc.HealthStub(to)
        held = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S) for _ in range(4)]
        for call in held:
            await call.read()
        failure = await refused(stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S))
        assert failure.code() is Code.RESOURCE_EXHAUSTED
        for call in held:
            call.cancel()
        await until_answered(stub)
        await all_serve(up)


async def until_answered(stub: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):  # the calls that were cancelled are still on their way out
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
                return
            await asyncio.sleep(0.01)


# ---- joins -----------------------------------------------------------------------------------------------------------


async def joined(address: str, name: str) -> grpc.aio.AioRpcError | None:
    """How it goes where a learner of a name joins, and leaves at once; None: it was let in."""
    async with open_channel(address) as to:
        said = several(introducing(name), confirming(1))
        call = coordinator_pb2_grpc.CoordinatorStub(to).Join(said, timeout=PATIENCE_S)
        ending = CallOutcome(call)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError:
            return await ending.wait_for_status()
    return None


async def test_learners_are_so_many_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_registry, "MAX_CONNECTED_LEARNERS", 1)
    async with network(tmp_path, ["ann"]) as up:
        await up.until_here("ann")
        failure = await joined(up.coordinator, "zoe")
        assert failure is not None and failure.code() is Code.RESOURCE_EXHAUSTED
        assert "a coordinator serves at most 1 learners at a time" in (failure.details() or "")
        await all_serve(up)


async def test_names_that_are_known_for_good_are_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_registry, "MAX_KNOWN_LEARNERS", 2)
    async with network(tmp_path, ["ann"]) as up:
        await up.until_here("ann")
        assert await joined(up.coordinator, "zoe") is None
        failure = await joined(up.coordinator, "yan")
        assert failure is not None and failure.code() is Code.RESOURCE_EXHAUSTED
        assert "a coordinator knows at most 2 learners by name" in (failure.details() or "")
        await all_serve(up)


async def test_the_stream_of_a_learner_that_reads_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_registry, "_MAX_QUEUED_COMMANDS", 3)
    member = JoinedLearner(coordinator_pb2.Introduction(learner="ann"), Claim("ann", bytes(16)), Origin())
    for t in range(3):
        member.enqueue_command("run-1", coordinator_pb2.RoundLease(until_round=t))
    assert not member.displacement.is_set()
    member.enqueue_command("run-1", coordinator_pb2.RoundLease(until_round=3))
    assert member.commands.qsize() == 3
    with pytest.raises(Exception, match="learner ann"):
        await member.wait_until_displaced()


# ---- captures --------------------------------------------------------------------------------------------------------


def routes(number: int, target: str = "127.0.0.1:9") -> list[eavesdropper_pb2.Route]:
    return [eavesdropper_pb2.Route(caller=0, callee=k + 1, target=target) for k in range(number)]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def opened(up: Network, run_id: str, wanted: list[eavesdropper_pb2.Route]) -> Any:
    async with open_channel(up.eavesdropper) as to:
        request = eavesdropper_pb2.OpenCaptureRequest(run_id=run_id, routes=wanted)
        return await eavesdropper_pb2_grpc.EavesdropperStub(to).OpenCapture(request, timeout=PATIENCE_S)


async def test_relays_are_so_many_and_none_is_opened_beyond(up: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    failure = await refused(opened(up, "run-1", routes(capture_registry.MAX_PROXIES + 1)))
    assert failure.code() is Code.RESOURCE_EXHAUSTED
    assert "at most 1024 captures and 4096 relays at a time, asked for 1 and 4097" in (failure.details() or "")
    failure = await refused(opened(up, "run-1", routes(1) * 2))
    assert (failure.code(), failure.details()) == (
        Code.INVALID_ARGUMENT,
        "the routes of a capture must be of different channels",
    )
    assert descriptors() < before + 100
    monkeypatch.setattr(capture_registry, "MAX_PROXIES", 3)
    first = await opened(up, "run-1", routes(2))
    for _ in range(2):  # what was refused holds no place
        failure = await refused(opened(up, "run-2", routes(2)))
        assert "asked for 2 and 4" in (failure.details() or "")
    async with open_channel(up.eavesdropper) as to:
        closing = eavesdropper_pb2.CloseCaptureRequest(capture_id=first.capture_id)
        await eavesdropper_pb2_grpc.EavesdropperStub(to).CloseCapture(closing, timeout=PATIENCE_S)
    assert len((await opened(up, "run-2", routes(3))).relay_addresses) == 3


@pytest.mark.parametrize("spec", ["[1]", "null", "1e999", '"x"', "[" * 100_000])
async def test_the_spec_of_a_capture_is_a_mapping(up: Network, spec: str) -> None:
    """When it is opened, and when it is taken up; what is none changes nothing."""
    first = await opened(up, "run-1", [])
    async with open_channel(up.eavesdropper) as to:
        stub = eavesdropper_pb2_grpc.EavesdropperStub(to)
        for resume in (False, True):
            request = eavesdropper_pb2.OpenCaptureRequest(run_id="run-1", spec=spec, resume=resume)
            failure = await refused(stub.OpenCapture(request, timeout=PATIENCE_S))
            assert failure.code() is Code.INVALID_ARGUMENT
            assert " run spec must be" in (failure.details() or "")
        closing = eavesdropper_pb2.CloseCaptureRequest(capture_id=first.capture_id)
        assert not (await stub.CloseCapture(closing, timeout=PATIENCE_S)).capture.open


async def test_others_are_served_while_relays_are_opened(up: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    class Counted(GrpcProxy):
        def __init__(self, *args: Any, **more: Any) -> None:
            order.append("made")
            super().__init__(*args, **more)

        async def open(self, listen: str) -> str:
            address = await super().open(listen)
            order.append("opened")
            return address

    monkeypatch.setattr(capture_session, "GrpcProxy", Counted)
    served = 0
    async with open_channel(up.eavesdropper) as to:
        stub = eavesdropper_pb2_grpc.EavesdropperStub(to)
        await stub.ListCaptures(eavesdropper_pb2.ListCapturesRequest(), timeout=PATIENCE_S)
        session_factory = asyncio.ensure_future(opened(up, "run-1", routes(200)))
        while not session_factory.done():
            await stub.ListCaptures(eavesdropper_pb2.ListCapturesRequest(), timeout=PATIENCE_S)
            served += 0 < len(order) < 400
    assert len((await session_factory).relay_addresses) == 200
    assert order == ["made", "opened"] * 200
    assert served


async def test_a_relay_in_the_clear_leads_to_this_machine_alone(up: Network) -> None:
    """Those that were opened before the one that may not be are closed again."""
    failure = await refused(
        opened(up, "run-1", [*routes(3), eavesdropper_pb2.Route(caller=5, callee=6, target="192.0.2.1:80")])
    )
    assert failure.code() is Code.INVALID_ARGUMENT
    assert "192.0.2.1:80 is reached from other machines" in (failure.details() or "")
    assert up.eavesdropping is not None
    assert not up.eavesdropping._captures._opening and not up.eavesdropping._captures.sessions


async def test_copies_come_few_at_a_time_and_go_to_learners_of_the_run(
    up: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is made of them."""
    monkeypatch.setattr(eavesdropping, "_MIRROR_DRAIN_TIMEOUT_S", 0.2)  # nobody else copies anything
    spec = spec_to_wire(small_spec(5, ["ann", "ben"], capture="mirror"))
    some = eavesdropper_pb2.MirroredMessage()
    for messages, text in (
        ([some] * 100_000, "a request must have at most 1024 copies, got 100000"),
        (
            [eavesdropper_pb2.MirroredMessage(receivers=[1] * 500_000)],
            "a message must have fewer receivers than the 2 learners, got 500000",
        ),
    ):
        async with open_channel(up.eavesdropper) as to:
            stub = eavesdropper_pb2_grpc.EavesdropperStub(to)
            session_factory = eavesdropper_pb2.OpenCaptureRequest(run_id="run-1", spec=spec)
            first = await stub.OpenCapture(session_factory, timeout=PATIENCE_S)
            copies = eavesdropper_pb2.MirrorRequest(run_id="run-1", sender=0, messages=messages)
            failure = await refused(stub.Mirror(several(copies), timeout=PATIENCE_S))
            assert (failure.code(), failure.details()) == (Code.INVALID_ARGUMENT, text)
            closing = eavesdropper_pb2.CloseCaptureRequest(capture_id=first.capture_id)
            await stub.CloseCapture(closing, timeout=PATIENCE_S)


def test_a_batch_of_copies_fits_into_a_message() -> None:
    """Of models of ten million parameters, too."""
    mirror = Mirror("run-1", 0, "127.0.0.1:1")
    for _ in range(5):
        mirror.copy(bytes(10_000_000), [1])
    assert [len(mirror._take_batch()) for _ in range(6)] == [1, 1, 1, 1, 1, 0]
    mirror.copy(bytes(6_000_000), [1])
    mirror.copy(bytes(6_000_000), [1])
    mirror.copy(bytes(60_000_000), [1])
    assert [len(mirror._take_batch()) for _ in range(3)] == [2, 1, 0]
    for _ in range(100):
        mirror.copy(frame(0, 0), [1])
    assert [len(mirror._take_batch()) for _ in range(3)] == [64, 36, 0]


def test_a_batch_of_records_fits_into_a_message() -> None:
    """Of a thousand pictures in a round, and of one; of many features; and a round alone may be as long as a message."""
    for n_features, each, rounds in ((784, 1, 64), (784, 1_000, 1), (10_000, 10, 10), (2**20, 10, 1), (3, 0, 64)):
        offsets = np.arange(200, dtype=np.int64) * each
        features, order = np.broadcast_to(np.zeros(1), (1, n_features)), np.zeros(0, np.int64)
        assert choose_rounds_per_batch(LearnerData(features, np.zeros(1), order, offsets)) == rounds
        assert rounds == 1 or 8 * (n_features + 1) * each * rounds < compute_max_message_bytes(Policy()) // 4


# ---- what is said around calls ---------------------------------------------------------------------------------------


async def test_metadata_is_short(up: Network) -> None:
    async with open_channel(up.coordinator) as to:
        stub: Any = health_pb2_grpc.HealthStub(to)
        long = (("x-long", "a" * 20_000),)
        failure = await refused(stub.Check(health_pb2.HealthCheckRequest(), metadata=long, timeout=PATIENCE_S))
        assert failure.code() is Code.RESOURCE_EXHAUSTED


async def test_a_connection_without_calls_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And opened again when there is a call."""
    monkeypatch.setattr(server, "SERVER_OPTIONS", changed("grpc.max_connection_idle_ms", 300))
    async with network(tmp_path, ["ann"]) as up, open_channel(up.eavesdropper) as to:
        stub: Any = health_pb2_grpc.HealthStub(to)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            await to.wait_for_state_change(grpc.ChannelConnectivity.READY)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        await all_serve(up)
