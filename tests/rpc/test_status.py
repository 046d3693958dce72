"""Errors as gRPC status and back: over a real call on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import structlog.testing
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from sottovoce_core import errors
from sottovoce_core.errors import SottovoceError
from sottovoce_rpc.error_status import CallOutcome, abort_on_error, convert_status_error
from sottovoce_rpc.server import open_channel
from sottovoce_wire.v1 import errors_pb2

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, SottovoceError)]
KNOWN = {
    "SottovoceError": (grpc.StatusCode.INTERNAL, "UNSPECIFIED"),
    "SpecError": (grpc.StatusCode.INVALID_ARGUMENT, "SPEC"),
    "AssumptionViolated": (grpc.StatusCode.INVALID_ARGUMENT, "ASSUMPTION_VIOLATED"),
    "DataError": (grpc.StatusCode.INVALID_ARGUMENT, "DATA"),
    "CorruptStateError": (grpc.StatusCode.DATA_LOSS, "CORRUPT_STATE"),
    "FailedPrecondition": (grpc.StatusCode.FAILED_PRECONDITION, "FAILED_PRECONDITION"),
    "LimitReached": (grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_REACHED"),
    "NotFound": (grpc.StatusCode.NOT_FOUND, "NOT_FOUND"),
    "AlreadyExists": (grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS"),
    "RunEnded": (grpc.StatusCode.FAILED_PRECONDITION, "FAILED_PRECONDITION"),
    "LocalProtocolError": (grpc.StatusCode.INTERNAL, "LOCAL_PROTOCOL"),
    "RemoteProtocolError": (grpc.StatusCode.INVALID_ARGUMENT, "REMOTE_PROTOCOL"),
    "PermissionDenied": (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"),
    "EquivocationError": (grpc.StatusCode.INVALID_ARGUMENT, "EQUIVOCATION"),
    "BudgetExhausted": (grpc.StatusCode.RESOURCE_EXHAUSTED, "BUDGET_EXHAUSTED"),
    "CaptureError": (grpc.StatusCode.FAILED_PRECONDITION, "CAPTURE"),
    "Unavailable": (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE"),
}
WORDS = "u must lie in (0.5, 1), got u=0.5 – naïve"


class Failing(grpc.GenericRpcHandler):
    """A service whose only method fails as it is told."""

    def __init__(self) -> None:
        self.error: BaseException = SottovoceError(WORDS)
        self.trailers: tuple[tuple[str, bytes], ...] = ()
        self.code = grpc.StatusCode.INTERNAL

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        async def handle(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
            if self.trailers:
                await context.abort(self.code, "odd", self.trailers)
            async with abort_on_error(context):
                raise self.error

        return grpc.unary_unary_rpc_method_handler(handle)


@pytest.fixture
async def failing() -> AsyncIterator[tuple[Failing, str]]:
    handler, server = Failing(), grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield handler, f"127.0.0.1:{port}"
    await server.stop(0)


async def failure(address: str) -> grpc.aio.AioRpcError:
    async with open_channel(address) as to:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = to.unary_unary("/any/Method")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(b"", timeout=60)
    return raised.value


def instance(kind: type[SottovoceError]) -> SottovoceError:
    own = {
        errors.AssumptionViolated: errors.AssumptionViolated("CODE", WORDS),
        errors.RunEnded: errors.RunEnded(WORDS, "stopped"),
    }
    return own.get(kind) or kind(WORDS)


def test_every_class_has_a_reason_and_every_reason_a_class() -> None:
    assert {kind.__name__ for kind in CLASSES} == KNOWN.keys()
    reasons = {name.removeprefix("ERROR_REASON_") for name in dict(errors_pb2.ErrorReason.items())}
    assert {reason for _, reason in KNOWN.values()} == reasons


class Newer(errors.FailedPrecondition):
    """Of a part of ours that is not the core, or of somebody who extends it: it is told as what it is a kind of."""


async def test_a_class_beyond_the_table_is_told_as_its_nearest_base(failing: tuple[Failing, str]) -> None:
    handler, address = failing
    handler.error = Newer(WORDS)
    back = convert_status_error(await failure(address), "the service")
    assert (type(back), str(back)) == (errors.FailedPrecondition, WORDS)


async def test_a_reason_of_a_newer_service_is_a_plain_error(failing: tuple[Failing, str]) -> None:
    handler, address = failing
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason="OUT_OF_TUNE", domain="sottovoce"))
    handler.code = grpc.StatusCode.INVALID_ARGUMENT
    handler.trailers = (("grpc-status-details-bin", status_pb2.Status(details=[detail]).SerializeToString()),)
    back = convert_status_error(await failure(address), "the service")
    assert (type(back), str(back)) == (SottovoceError, "the service: odd (INVALID_ARGUMENT)")


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
async def test_every_error_crosses_the_wire_and_comes_back(
    failing: tuple[Failing, str], kind: type[SottovoceError]
) -> None:
    handler, address = failing
    handler.error = instance(kind)
    got = await failure(address)

    assert got.code() is KNOWN[kind.__name__][0]
    assert got.details() == str(handler.error)

    status = rpc_status.from_call(got)  # type: ignore[arg-type] # its stubs know the synchronous call alone
    info = error_details_pb2.ErrorInfo()
    assert status is not None and status.details[0].Unpack(info)
    assert (info.reason, info.domain) == (KNOWN[kind.__name__][1], "sottovoce")
    own = {errors.AssumptionViolated: {"code": "CODE"}, errors.RunEnded: {"run-state": "stopped"}}
    assert dict(info.metadata) == own.get(kind, {})

    back = convert_status_error(got, "the service")
    expected = SottovoceError if kind is errors.LocalProtocolError else kind
    assert type(back) is expected
    texts = {
        SottovoceError: f"the service: {WORDS} (INTERNAL)",
        errors.Unavailable: f"cannot reach the service: {WORDS}",
    }
    assert str(back) == texts.get(expected, str(handler.error))
    for own_field in ("code", "state"):
        assert getattr(back, own_field, None) == getattr(handler.error, own_field, None)


async def test_an_error_that_is_not_ours_tells_nothing(failing: tuple[Failing, str]) -> None:
    """A bug's text may quote a record, and gRPC by itself would send it."""
    handler, address = failing
    handler.error = ValueError("could not convert string to float: 'diagnosis: positive'")
    with structlog.testing.capture_logs() as logs:
        got = await failure(address)

    assert got.code() is grpc.StatusCode.INTERNAL
    assert got.details() == "an internal error; the log of the service says where"
    assert "diagnosis" not in f"{got.trailing_metadata()} {logs}"
    assert [(event["event"], event["kind"]) for event in logs] == [("bug", "ValueError")]
    assert "test_status.py" in logs[0]["where"]


async def test_nobody_there_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    got = convert_status_error(await failure(f"127.0.0.1:{port}"), "the coordinator at 127.0.0.1")

    assert isinstance(got, errors.Unavailable)
    assert str(got).startswith("cannot reach the coordinator at 127.0.0.1: ")


@pytest.mark.parametrize("details", [b"\xff\xff", b"", b"\x1a\x04junk"])
async def test_details_that_are_not_ours_do_no_harm(failing: tuple[Failing, str], details: bytes) -> None:
    handler, address = failing
    handler.trailers = (("grpc-status-details-bin", details),)
    got = convert_status_error(await failure(address), "the service")

    assert type(got) is SottovoceError
    assert str(got) == "the service: odd (INTERNAL)"


class Unread(grpc.GenericRpcHandler):
    """A service that reads nothing: it refuses, or is content."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        async def handle(requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            async with abort_on_error(context):
                if details.method == "/any/Refusing":
                    raise errors.FailedPrecondition(WORDS)

        return grpc.stream_stream_rpc_method_handler(handle)


async def written_to(method: str) -> AsyncIterator[CallOutcome]:
    """How calls end on which something is being written all the time."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Unread(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def write(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                await call.write(b"x" * 1000)

    async with open_channel(f"127.0.0.1:{port}") as to:
        for _ in range(100):
            call: grpc.aio.StreamStreamCall[bytes, bytes] = to.stream_stream(method)()
            ending = CallOutcome(call)
            writing = asyncio.create_task(write(call))
            with contextlib.suppress(grpc.RpcError):
                await call.read()
            await writing
            yield ending
    await server.stop(0)


async def test_a_refusal_is_told_however_much_is_being_written() -> None:
    """GRPC tells most of these callers that a write failed (19 of 20, measured)."""
    told = set()
    async for ending in written_to("/any/Refusing"):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await ending.require_ok()
        back = convert_status_error(raised.value, "the service")
        told.add((type(back), str(back)))
    assert told == {(errors.FailedPrecondition, WORDS)}


async def test_an_end_in_the_middle_of_a_write_is_no_failure() -> None:
    async for ending in written_to("/any/Content"):
        await ending.require_ok()


async def test_a_call_of_which_nothing_more_is_told_is_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """GRPC may refuse a write by itself, and never hear of the peer again."""
    monkeypatch.setattr("sottovoce_rpc.error_status._STATUS_TIMEOUT_S", 0.01)
    async with open_channel("127.0.0.1:1") as to:
        call: grpc.aio.StreamStreamCall[bytes, bytes] = to.stream_stream("/any/Method")(wait_for_ready=True)
        back = convert_status_error(await CallOutcome(call).wait_for_status(), "the service")
        call.cancel()
    assert isinstance(back, errors.Unavailable)


async def test_a_call_that_its_server_cuts_is_a_break(failing: tuple[Failing, str]) -> None:
    """As a learner does that is told to end while a feeder is sending."""
    handler, address = failing
    handler.code, handler.trailers = grpc.StatusCode.CANCELLED, (("any-bin", b"x"),)
    back = convert_status_error(await failure(address), "the service")
    assert (type(back), str(back)) == (errors.Unavailable, "cannot reach the service: odd")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: Failed to connect to remote host: Connection refused",
            "no service listens there: is it running, and is the address right?",
        ),
        (
            "DNS resolution failed for nowhere:1: Domain name not found",
            "no machine of this name is found: is the address right?",
        ),
        ("failed to connect: Network is unreachable", "no route to this machine: is the address right?"),
        ("Deadline Exceeded", "no answer in time: is it running, and is the address right?"),
        (
            "last error: UNKNOWN: ipv4:127.0.0.1:7: connection attempt timed out before receiving SETTINGS frame",
            "no answer in time: is it running, and is the address right?",
        ),
        ("something new", "something new"),
    ],
)
def test_who_is_not_reached_is_told_of_in_words(said: str, told: str) -> None:
    nothing = grpc.aio.Metadata()
    refusal = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, said)
    assert str(convert_status_error(refusal, "the coordinator")) == f"cannot reach the coordinator: {told}"
