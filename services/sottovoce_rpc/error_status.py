"""Conversion of this project's errors to gRPC status and back, by one table."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from sottovoce_core import errors
from sottovoce_core.text import escape_control
from sottovoce_rpc.logs import describe_failure
from sottovoce_wire.v1 import errors_pb2

_TABLE: dict[type[errors.SottovoceError], tuple[errors_pb2.ErrorReason.ValueType, grpc.StatusCode]] = {
    errors.SottovoceError: (errors_pb2.ERROR_REASON_UNSPECIFIED, grpc.StatusCode.INTERNAL),
    errors.SpecError: (errors_pb2.ERROR_REASON_SPEC, grpc.StatusCode.INVALID_ARGUMENT),
    errors.AssumptionViolated: (errors_pb2.ERROR_REASON_ASSUMPTION_VIOLATED, grpc.StatusCode.INVALID_ARGUMENT),
    errors.DataError: (errors_pb2.ERROR_REASON_DATA, grpc.StatusCode.INVALID_ARGUMENT),
    errors.CorruptStateError: (errors_pb2.ERROR_REASON_CORRUPT_STATE, grpc.StatusCode.DATA_LOSS),
    errors.FailedPrecondition: (errors_pb2.ERROR_REASON_FAILED_PRECONDITION, grpc.StatusCode.FAILED_PRECONDITION),
    errors.LimitReached: (errors_pb2.ERROR_REASON_LIMIT_REACHED, grpc.StatusCode.RESOURCE_EXHAUSTED),
    errors.NotFound: (errors_pb2.ERROR_REASON_NOT_FOUND, grpc.StatusCode.NOT_FOUND),
    errors.AlreadyExists: (errors_pb2.ERROR_REASON_ALREADY_EXISTS, grpc.StatusCode.ALREADY_EXISTS),
    errors.LocalProtocolError: (errors_pb2.ERROR_REASON_LOCAL_PROTOCOL, grpc.StatusCode.INTERNAL),
    errors.RemoteProtocolError: (errors_pb2.ERROR_REASON_REMOTE_PROTOCOL, grpc.StatusCode.INVALID_ARGUMENT),
    errors.PermissionDenied: (errors_pb2.ERROR_REASON_PERMISSION_DENIED, grpc.StatusCode.PERMISSION_DENIED),
    errors.EquivocationError: (errors_pb2.ERROR_REASON_EQUIVOCATION, grpc.StatusCode.INVALID_ARGUMENT),
    errors.BudgetExhausted: (errors_pb2.ERROR_REASON_BUDGET_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED),
    errors.CaptureError: (errors_pb2.ERROR_REASON_CAPTURE, grpc.StatusCode.FAILED_PRECONDITION),
    errors.Unavailable: (errors_pb2.ERROR_REASON_UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
}
_PREFIX = "ERROR_REASON_"
_KINDS = {errors_pb2.ErrorReason.Name(reason).removeprefix(_PREFIX): kind for kind, (reason, _) in _TABLE.items()}
_DOMAIN, _STATE = "sottovoce", "run-state"
_DETAILS = "grpc-status-details-bin"
# A local cancellation raises `asyncio.CancelledError`: a status CANCELLED comes from a server that cuts its calls as it stops.
_UNREACHABLE_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_MAX_TEXT_BYTES = 1_500
"""Maximum bytes of an error's text: a client accepts a few thousand bytes in all, and the text is sent twice."""
_STATUS_TIMEOUT_S = 1.0
_WRITE_FAILED = (grpc.StatusCode.INTERNAL, "Internal error from Core")  # gRPC's own words, in grpc.aio
_HANDSHAKE_TEXTS = {
    (
        "Hostname Verification",
    ): "another service is there: its certificate names another one, or lacks the hosts that follow from "
    "its name (NAME.ROLE.DOMAIN and ROLE.DOMAIN)",
    ("CERTIFICATE_VERIFY_FAILED", "purpose"): "its certificate is not for a server (extended key usage)",
    (
        "CERTIFICATE_VERIFY_FAILED",
    ): "its certificate is of no authority that this process trusts for the name that it expects there (ca.crt), comes "
    "without those between it and the authority (tls.crt), or is expired or not valid yet",
    (
        "certificate signature failure",
    ): "its certificate is of another authority than the one of that name that this process trusts (ca.crt)",
    ("WRONG_VERSION_NUMBER",): "it serves in the clear, and this process has an identity: give it one, too",
    (
        "failed to connect",
        "Socket closed",
    ): "it answers and refuses: its channels are encrypted, and this process has no "
    "identity (--identity), or one that it does not trust: `sottovoce doctor` checks the identity",
}
"""Explanations of failed TLS handshakes, by fragments of gRPC's texts."""
_INVALID_MESSAGE = "a message must be one of this method, got bytes that cannot be decoded"

T = TypeVar("T")

log = structlog.get_logger()


class abort_on_error:  # noqa: N801 - it reads as a function; a class, so that type checkers see that it swallows nothing
    """Context manager (`async with`) that ends the call with the status of a project error, with details (`google.rpc.Status`).

    Any other error is a bug: its text is neither sent nor logged.
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, DecodeError):  # gRPC decodes a message of a stream only when it is read
            error = errors.RemoteProtocolError(_INVALID_MESSAGE)
        if isinstance(error, errors.SottovoceError):
            reason, code = next(_TABLE[each] for each in type(error).__mro__ if each in _TABLE)
            text = shorten_text(str(error))
            await self._context.abort(code, text, ((_DETAILS, _encode_details(reason, code, error, text)),))
        elif isinstance(error, NotImplementedError):  # gRPC's own services lack some methods of their contract
            await self._context.abort(grpc.StatusCode.UNIMPLEMENTED, "not implemented")
        elif isinstance(error, Exception) and not isinstance(error, grpc.aio.BaseError):  # an abort, a lost connection
            log.error("bug", **describe_failure(error))  # gRPC would send its text, and that may quote a record
            await self._context.abort(grpc.StatusCode.INTERNAL, "an internal error; the log of the service says where")


def shorten_text(text: str) -> str:
    """Cut a text, which may contain a caller's words, to the length of an error."""
    raw = text.encode(errors="replace")
    return text if len(raw) <= _MAX_TEXT_BYTES else f"{raw[:_MAX_TEXT_BYTES].decode(errors='ignore')} ..."


def _encode_details(
    reason: errors_pb2.ErrorReason.ValueType, code: grpc.StatusCode, error: errors.SottovoceError, text: str
) -> bytes:
    name = errors_pb2.ErrorReason.Name(reason).removeprefix(_PREFIX)
    info = error_details_pb2.ErrorInfo(reason=name, domain=_DOMAIN)
    if isinstance(error, errors.AssumptionViolated):
        info.metadata["code"] = error.code
    if isinstance(error, errors.RunEnded):
        info.metadata[_STATE] = error.state
    packed = any_pb2.Any()
    packed.Pack(info)
    packed_status: bytes = status_pb2.Status(code=code.value[0], message=text, details=[packed]).SerializeToString()
    return packed_status


class CallOutcome:
    """Final status of a call that is written to, as its peer sent it.

    A pending write fails when the peer ends the call, and gRPC replaces the peer's status by this failure (grpc/grpc#36066).

    Args:
        call: a call just started.
    """

    def __init__(self, call: grpc.aio.Call) -> None:
        self._status: asyncio.Future[grpc.aio.AioRpcError] = asyncio.get_running_loop().create_future()
        call.add_done_callback(self._record_status)

    async def wait_for_status(self) -> grpc.aio.AioRpcError:
        """Return the final status of a call whose stream has ended.

        Call it before a pending write is cancelled: that cancels the call, which then receives nothing more.
        """
        try:
            async with asyncio.timeout(_STATUS_TIMEOUT_S):
                return await asyncio.shield(self._status)
        except TimeoutError:
            nothing, text = grpc.aio.Metadata(), "the stream broke during a write"
            return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, text)

    async def require_ok(self) -> None:
        """Check that a call whose stream failed ended well: the failure may be that of a write only.

        Raises:
            AioRpcError: the peer sent an error status, or none.
        """
        status = await self.wait_for_status()
        if status.code() is not grpc.StatusCode.OK:
            raise status

    def _record_status(self, call: grpc.aio.Call) -> None:
        """Record each status that gRPC sets on the call, except a failed write's."""
        code, text, trailers = _run_now(call.code()), _run_now(call.details()), _run_now(call.trailing_metadata())
        if not self._status.done() and (code, text) != _WRITE_FAILED:
            self._status.set_result(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, text))


def _run_now(answer: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that needs no waiting, without yielding to other tasks."""
    try:
        answer.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    raise RuntimeError("a call that has ended must have a status")


def convert_status_error(refusal: grpc.aio.AioRpcError, who: str) -> errors.SottovoceError:
    """Convert a failed call to an error of this project; to the class in its details if that is known here."""
    text = escape_control("; ".join((refusal.details() or refusal.code().name).splitlines()))
    if refusal.code() in _UNREACHABLE_CODES:
        return errors.Unavailable(
            f"cannot reach {who}: {explain_handshake_failure(text) or explain_unreachable(text) or text}"
        )
    info = _read_error_info(refusal)
    if info is None and refusal.code() is grpc.StatusCode.UNIMPLEMENTED:
        text = f"{who} does not know this call: another service listens there, or a much older one"
        return errors.FailedPrecondition(f"{text}; is the address right?")
    kind = errors.SottovoceError if info is None else _KINDS.get(info.reason, errors.SottovoceError)
    if kind is errors.AssumptionViolated and info is not None:
        code = info.metadata["code"]
        return errors.AssumptionViolated(code, text.removesuffix(f" [{code}]"))
    if kind is errors.FailedPrecondition and info is not None and _STATE in info.metadata:
        return errors.RunEnded(text, escape_control(info.metadata[_STATE]))
    if kind not in (errors.SottovoceError, errors.LocalProtocolError):  # a LocalProtocolError there is the peer's bug
        return kind(text)
    if info is None and refusal.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return errors.SpecError(text)
    return errors.SottovoceError(f"{who}: {text} ({refusal.code().name})")


_UNREACHABLE_TEXTS = (
    (re.compile(r"Connection refused"), "no service listens there: is it running, and is the address right?"),
    (
        re.compile(r"[Dd]omain name not found|DNS (resolution|query)|Name or service not known|Could not contact DNS"),
        "no machine of this name is found: is the address right?",
    ),
    (
        re.compile(r"[Nn]etwork is unreachable|No route to host"),
        "no route to this machine: is the address right?",
    ),
    (
        re.compile(r"^Deadline Exceeded$|before receiving SETTINGS frame|[Cc]onnection timed out"),
        "no answer in time: is it running, and is the address right?",
    ),
)
"""Explanations of unreachable services, by patterns of gRPC's texts."""


def explain_handshake_failure(text: str) -> str:
    """Explain a failed TLS handshake by gRPC's text; empty if the text is of another failure."""
    return next((words for signs, words in _HANDSHAKE_TEXTS.items() if all(sign in text for sign in signs)), "")


def _read_error_info(refusal: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    """Read the error details of this project's services; None if there are none of this domain."""
    info = error_details_pb2.ErrorInfo()
    for key, packed in refusal.trailing_metadata() or ():
        if key != _DETAILS or not isinstance(packed, bytes):
            continue
        try:
            for detail in status_pb2.Status.FromString(packed).details:
                if detail.Unpack(info) and info.domain == _DOMAIN:
                    return info
        except DecodeError:
            pass
    return None


def explain_unreachable(text: str) -> str:
    """Explain by gRPC's text why a service cannot be reached; empty if the text is of another failure."""
    return next((words for sign, words in _UNREACHABLE_TEXTS if sign.search(text)), "")
