"""Who may call what: the one table, held against real servers with real certificates."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import structlog.testing
from cryptography import x509
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from sottovoce_client import terminal
from sottovoce_client.runs.feeder import feed
from sottovoce_client.runs.run_client import Outcome
from sottovoce_coordinator.service import Coordinator, CoordinatorConfig
from sottovoce_core.errors import Unavailable
from sottovoce_core.runs.policy import Policy
from sottovoce_eavesdropper.capture_writer import CaptureWriter
from sottovoce_eavesdropper.grpc_proxy import GrpcProxy
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.peers import connection
from sottovoce_learner.peers.connection import _build_hello
from sottovoce_learner.peers.in_process import InProcessTransport
from sottovoce_learner.service import Learner
from sottovoce_learner.session import Session
from sottovoce_rpc import tasks
from sottovoce_rpc.access import ACCESS_RULES
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.error_status import CallOutcome
from sottovoce_rpc.principals import Role
from sottovoce_wire.v1 import coordinator_pb2, eavesdropper_pb2, learner_pb2
from tests.examples import made_up, small_spec
from tests.services.identities import Identities, raw_channel
from tests.services.network import PATIENCE_S, Network, network, refused

NAMES = ["ann", "ben", "cleo"]
NOBODY = "127.0.0.1:1"
HOUSES = {
    "coordinator": coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"],
    "eavesdropper": eavesdropper_pb2.DESCRIPTOR.services_by_name["Eavesdropper"],
    "learner": learner_pb2.DESCRIPTOR.services_by_name["Learner"],
}
COMMON = (
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
METHODS = [
    (house, f"/{service.full_name}/{method.name}")
    for house, own in HOUSES.items()
    for service in (own, *COMMON)
    for method in service.methods
]
CALLERS = ["learner/ann", "learner/ben", "learner/zoe", "coordinator/main", "coordinator/other", "eavesdropper/ear"]
CALLERS += ["feeder/ann", "feeder/ben", "operator/alice", "operator/bob", "monitor/prometheus"]

LEARNER, COORDINATOR, EAVESDROPPER = (
    f"/{own.full_name}" for own in (HOUSES["learner"], HOUSES["coordinator"], HOUSES["eavesdropper"])
)
OWN = {"learner/ann", "operator/alice"}
"""Ann's owners, as the network of these tests has it."""
CONDITIONS = {
    f"{LEARNER}/Ingest": OWN | {"feeder/ann"},
    f"{LEARNER}/GetIntake": OWN | {"feeder/ann"},
    f"{LEARNER}/Predict": OWN,
    f"{LEARNER}/GetLedger": OWN,
    f"{LEARNER}/GetStatus": OWN | {"feeder/ann", "operator/bob", "coordinator/main", "coordinator/other"},
}
"""Of those in a fitting role, whom ann's owner has named."""


def address(up: Network, house: str) -> str:
    own = {"coordinator": up.coordinator, "eavesdropper": up.eavesdropper, "learner": up.addresses["ann"]}
    return own[house]


def host(house: str) -> str:
    return f"{house}.ward.example"


async def status(up: Network, ids: Identities, house: str, method: str, caller: str) -> grpc.StatusCode:
    """With which an empty request is answered."""
    async with raw_channel(ids.at(caller), ids.at(caller), address(up, house), host(house)) as to:
        asked: Any = to.stream_stream(method)
        first = await _first(asked(iter([b""]), timeout=PATIENCE_S))
        return grpc.StatusCode.OK if first is None else first.code()


async def _first(call: Any) -> grpc.aio.AioRpcError | None:
    """The failure with which a call ends before it says anything: the peer's, not that of a write on its way."""
    ending = CallOutcome(call)
    try:
        await call.read()
    except grpc.aio.AioRpcError:
        return await ending.wait_for_status()
    if call.done() and await call.code() is not grpc.StatusCode.OK:
        return await refused(call)
    call.cancel()
    return None


def test_every_method_of_every_service_is_in_the_table() -> None:
    known = {method for _, method in METHODS}
    assert known <= set(ACCESS_RULES)
    assert all(method.startswith("/grpc.") for method in set(ACCESS_RULES) - known)  # which older versions have not all


async def test_the_table_is_what_servers_do(tmp_path: Path) -> None:
    """Every method, every caller: refused as the table says, and only then."""
    ids = Identities(tmp_path / "ids")
    async with network(tmp_path, ["ann"], identities=ids) as up:
        for house, method in METHODS:
            for caller in CALLERS:
                allowed = Role(caller.split("/")[0]) in ACCESS_RULES[method].roles
                allowed = allowed and caller in CONDITIONS.get(method, {caller})
                allowed = allowed and method != f"{EAVESDROPPER}/Work"  # a worker shows a secret of its eavesdropper
                denied = await status(up, ids, house, method, caller) is grpc.StatusCode.PERMISSION_DENIED
                assert denied != allowed, (method, caller)


async def run(up: Network, capture: str) -> Outcome:
    spec = small_spec(30, NAMES, capture=capture, telemetry={"predict": True})
    return await up.run(spec, made_up(spec))


@pytest.mark.parametrize("capture", ["none", "relay", "mirror"])
async def test_a_run_over_encrypted_channels(tmp_path: Path, capture: str) -> None:
    async with network(tmp_path, NAMES, identities=Identities(tmp_path / "ids")) as up:
        outcome = await run(up, capture)
    assert (outcome.state, outcome.capture_error) == ("finished", "")
    assert [status.rounds_done for status in outcome.statuses] == [30] * 3
    assert all(each is not None for each in outcome.predictions)


async def test_a_learner_joins_as_itself(tmp_path: Path) -> None:
    ids = Identities(tmp_path / "ids")
    async with network(tmp_path, ["ann"], identities=ids) as up:
        introduction = coordinator_pb2.Introduction(learner="ann", address="127.0.0.1:1", store_id=b"x" * 16)
        said = coordinator_pb2.LearnerMessage(introduction=introduction).SerializeToString()
        async with raw_channel(ids.at("learner/ben"), ids.at("learner/ben"), up.coordinator, host("coordinator")) as to:
            call: Any = to.stream_stream(f"{COORDINATOR}/Join")
            failure = await refused(call(iter([said]), timeout=PATIENCE_S))
    assert (failure.code(), failure.details()) == (
        grpc.StatusCode.PERMISSION_DENIED,
        "learner/ben must join as itself, got 'ann'",
    )


async def test_a_neighbour_speaks_as_itself(tmp_path: Path) -> None:
    """Cleo is in the run, too, and greets cleo's neighbour as ann; and an eavesdropper where nobody is overheard."""
    ids = Identities(tmp_path / "ids")
    async with network(tmp_path, NAMES, identities=ids) as up:
        spec = small_spec(10_000, NAMES)
        started = await up.start(spec, 3)
        session = up.learners["ann"]._session
        while session is None or not session.plan.announced_rounds:
            session = await _later(up)
        hello = _build_hello(session, 1)
        for caller in ("learner/cleo", "eavesdropper/ear"):
            async with raw_channel(
                ids.at(caller), ids.at(caller), up.addresses["ben"], "ben.learner.ward.example"
            ) as to:
                call: Any = to.stream_stream(f"{LEARNER}/Exchange")
                failure = await refused(call(iter([hello]), timeout=PATIENCE_S))
            assert failure.code() is grpc.StatusCode.PERMISSION_DENIED
            assert failure.details() == f"{caller} must not send in the name of ann"
        assert started.run_id


async def _later(up: Network) -> Any:
    await asyncio.sleep(0.01)
    return up.learners["ann"]._session


async def test_a_capture_is_its_coordinators(tmp_path: Path) -> None:
    ids = Identities(tmp_path / "ids")
    async with network(tmp_path, [], identities=ids) as up:

        async def asked(caller: str, method: str, request: Any) -> Any:
            async with raw_channel(ids.at(caller), ids.at(caller), up.eavesdropper, host("eavesdropper")) as to:
                return await to.unary_unary(f"{EAVESDROPPER}/{method}")(request.SerializeToString(), timeout=PATIENCE_S)

        opening = eavesdropper_pb2.OpenCaptureRequest(run_id="run-1")
        raw = await asked("coordinator/main", "OpenCapture", opening)
        capture_id = eavesdropper_pb2.OpenCaptureResponse.FromString(raw).capture_id
        again = eavesdropper_pb2.OpenCaptureRequest(run_id="run-1", resume=True)
        for method, request in (
            ("OpenCapture", again),
            ("CloseCapture", eavesdropper_pb2.CloseCaptureRequest(capture_id=capture_id)),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="the capture is of coordinator/main") as failure:
                await asked("coordinator/other", method, request)
            assert failure.value.code() is grpc.StatusCode.PERMISSION_DENIED
            await asked("coordinator/main", method, request)


async def test_a_copy_is_of_whoever_sends_it(tmp_path: Path) -> None:
    ids = Identities(tmp_path / "ids")
    async with network(tmp_path, NAMES, identities=ids) as up:
        spec = small_spec(10_000, NAMES, capture="mirror")
        started = await up.start(spec, 3)
        copy = eavesdropper_pb2.MirrorRequest(run_id=started.run_id, sender=1).SerializeToString()
        async with raw_channel(
            ids.at("learner/ann"), ids.at("learner/ann"), up.eavesdropper, host("eavesdropper")
        ) as to:
            call: Any = to.stream_unary(f"{EAVESDROPPER}/Mirror")
            with pytest.raises(grpc.aio.AioRpcError, match="learner/ann must not send copies for ben"):
                await call(iter([copy]), timeout=PATIENCE_S)


async def test_a_wrong_certificate_is_told_at_the_first_failure_that_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a learner whose coordinator is of another authority, and by what it says of itself; it goes on waiting."""
    monkeypatch.setattr(tasks, "WAIT_NOTICE_DELAY_S", 1_000.0)
    ours, theirs = Identities(tmp_path / "ours"), Identities(tmp_path / "theirs")
    coordinator = Coordinator(CoordinatorConfig(credentials=theirs.of("coordinator/main")))
    at, folder = await coordinator.start(), tmp_path / "state"
    learner = Learner(LearnerConfig("ann", at, state_folder=folder, credentials=ours.of("learner/ann")))
    with structlog.testing.capture_logs() as logs:
        following = asyncio.ensure_future(learner.follow(await learner.start()))
        async with asyncio.timeout(PATIENCE_S):
            while not any(each["event"] == "waiting for the coordinator" for each in logs):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not following.done()
        status = learner._build_public_status()
        following.cancel()
        await asyncio.wait([following])
        await learner.stop()
        await coordinator.stop()
    (told,) = (each for each in logs if each["event"] == "waiting for the coordinator")
    assert told["reason"].startswith("its certificate is of ") and told["address"] == at
    assert status.detail == f"no coordinator has let it in yet: that at {at}: {told['reason']}"


async def test_who_feeds_is_told_at_once_that_a_learner_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, said = Identities(tmp_path / "ids"), asyncio.Queue[str]()
    monkeypatch.setattr(terminal, "print_notice", said.put_nowait)
    learner = Learner(LearnerConfig("ben", NOBODY, state_folder=tmp_path / "s", credentials=ids.of("learner/ben")))
    at = await learner.start()
    records = made_up(small_spec(5, ["ann"])).learners[0]
    work = feed(at, "run-1", records, learner="ann", credentials=ids.of("operator/alice"))
    feeding = asyncio.ensure_future(work)
    told = await asyncio.wait_for(said.get(), PATIENCE_S)
    feeding.cancel()
    await asyncio.wait([feeding])
    await learner.stop()
    assert told.startswith(f"waiting for ann at {at}: another service is there: its certificate names another one")


@pytest.mark.parametrize(
    ("capture", "relayed", "whom"),
    [
        ("none", False, (Role.LEARNER, "ben")),
        ("relay", True, (Role.EAVESDROPPER, "")),
        ("relay", False, (Role.LEARNER, "ben")),
        ("none", True, (Role.LEARNER, "ben")),  # the coordinator lies
        ("mirror", True, (Role.LEARNER, "ben")),
    ],
)
async def test_a_learner_lets_itself_be_overheard_only_where_the_spec_says_so(
    monkeypatch: pytest.MonkeyPatch, capture: str, relayed: bool, whom: tuple[Role, str]
) -> None:
    asked = list[tuple[Role, str]]()

    def noting(address: str, role: Role, name: str, **_: Any) -> None:
        asked.append((role, name))
        session.lifecycle.is_silent = True
        raise Unavailable("nobody is there")

    role = SimpleNamespace(spec=small_spec(5, NAMES, capture=capture))
    session = SimpleNamespace(assignment=role, lifecycle=SimpleNamespace(is_silent=False), policy=Policy())
    session.codec = SimpleNamespace(message_bytes=100)
    monkeypatch.setattr(connection, "open_channel", noting)
    await connection.keep_open(
        cast(Session, session),
        coordinator_pb2.Neighbour(index=1, name="mallory", address="here:1", relayed=relayed),
        Credentials(),
        InProcessTransport(),
    )
    assert asked == [whom]


async def test_a_relay_connects_with_a_renewed_identity(tmp_path: Path) -> None:
    ids, shown, serials = Identities(tmp_path / "ids"), list[bytes](), list[int]()

    async def show(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        shown.append(writer.get_extra_info("ssl_object").getpeercert(True))
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    context = ids.of("learner/ben").build_tls_server_context("127.0.0.1:0", ["h2"])
    server = await asyncio.start_server(show, "127.0.0.1", 0, ssl=context)
    file = CaptureWriter(tmp_path / "run-1-a", "run-1-a", "run-1", "{}")
    target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    route = eavesdropper_pb2.Route(caller=0, callee=1, target=target)
    relay = GrpcProxy(route, file, credentials=ids.of("eavesdropper/ear"))
    host, port = (await relay.open("127.0.0.1:0")).split(":")
    for number in (1, 2):
        context = ids.of("learner/ann").build_tls_client_context(["h2"])
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
        async with asyncio.timeout(PATIENCE_S):
            while len(shown) < number:  # noqa: ASYNC110 - what is waited for is no event
                await asyncio.sleep(0.01)
        serials.append(x509.load_der_x509_certificate(shown[-1]).serial_number)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        ids.authority.renew(ids.at("eavesdropper/ear"), days=200)
    await relay.stop()
    server.close()
    assert serials[0] != serials[1]
