"""Errors of this project as gRPC status, and back: the one table."""

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
# Whoever cancels a call is told by `asyncio.CancelledError`: a status CANCELLED is of a server that cuts its calls as it ends.
_UNREACHABLE_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_MAX_TEXT_BYTES = 1_500
"""Bytes of an error's text: a caller takes a few thousand in all, and it goes out twice."""
_STATUS_TIMEOUT_S = 1.0
_WRITE_FAILED = (grpc.StatusCode.INTERNAL, "Internal error from Core")  # gRPC's own words, in grpc.aio
_HANDSHAKE_TEXTS = {
    (
        "Hostname Verification",
    ): "somebody else is there: its certificate names another one, or lacks the hosts that follow from "
    "its name (NAME.ROLE.DOMAIN and ROLE.DOMAIN)",
    ("CERTIFICATE_VERIFY_FAILED", "purpose"): "its certificate is not for a server (extended key usage)",
    (
        "CERTIFICATE_VERIFY_FAILED",
    ): "its certificate is of no authority that this process believes for the name that it expects there (ca.crt), comes "
    "without those between it and the authority (tls.crt), or is out of its time",
    (
        "certificate signature failure",
    ): "its certificate is of another authority than the one of that name that this process believes (ca.crt)",
    ("WRONG_VERSION_NUMBER",): "it speaks in the clear, and this process has an identity: give it one, too",
    (
        "failed to connect",
        "Socket closed",
    ): "it is there and refuses: its channels are encrypted, and this process shows no "
    "identity (--identity), or one that it does not believe: `sottovoce doctor` looks at what it shows",
}
"""What gRPC says of a channel that did not come about, in other words."""
_NO_MESSAGE = "a message must be one of this method, got bytes that are none"

T = TypeVar("T")

log = structlog.get_logger()


class abort_on_error:  # noqa: N801 - it reads as a function; a class, for its type says that it swallows nothing
    """In `async with`: end the call with the status that an error of ours stands for, details attached (`google.rpc.Status`).

    Of any other error, which is a bug, neither the peer nor the log gets the text.
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, DecodeError):  # of a message on a stream, which gRPC reads only when it is asked for
            error = errors.RemoteProtocolError(_NO_MESSAGE)
        if isinstance(error, errors.SottovoceError):
            reason, code = next(_TABLE[each] for each in type(error).__mro__ if each in _TABLE)
            text = shorten_text(str(error))
            await self._context.abort(code, text, ((_DETAILS, _details(reason, code, error, text)),))
        elif isinstance(error, NotImplementedError):  # of a service of gRPC's own, which has less than its contract
            await self._context.abort(grpc.StatusCode.UNIMPLEMENTED, "not implemented")
        elif isinstance(error, Exception) and not isinstance(error, grpc.aio.BaseError):  # an abort, a lost connection
            log.error("bug", **describe_failure(error))  # gRPC would send its text, and that may quote a record
            await self._context.abort(grpc.StatusCode.INTERNAL, "an internal error; the log of the service says where")


def shorten_text(text: str) -> str:
    """Cut a text, which may hold a caller's words, to the length of an error."""
    raw = text.encode(errors="replace")
    return text if len(raw) <= _MAX_TEXT_BYTES else f"{raw[:_MAX_TEXT_BYTES].decode(errors='ignore')} ..."


def _details(
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
    """How a call that is written to ends, as its peer says it.

    A write that is under way when the peer ends the call fails, and gRPC puts this failure in the place of the peer's status
    (grpc/grpc#36066).

    Args:
        call: a call just made.
    """

    def __init__(self, call: grpc.aio.Call) -> None:
        self._status: asyncio.Future[grpc.aio.AioRpcError] = asyncio.get_running_loop().create_future()
        call.add_done_callback(self._note)

    async def wait_for_status(self) -> grpc.aio.AioRpcError:
        """The status of the call, which is ending: whoever read from it was told so.

        To be asked for before a write under way is cancelled: that cancels the call, which is then told nothing more.
        """
        try:
            async with asyncio.timeout(_STATUS_TIMEOUT_S):
                return await asyncio.shield(self._status)
        except TimeoutError:
            nothing, text = grpc.aio.Metadata(), "the stream broke while it was written to"
            return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, text)

    async def require_ok(self) -> None:
        """Whoever read from the call was told of a failure; it may be that of a write alone.

        Raises:
            AioRpcError: the peer says so, too, or nothing.
        """
        status = await self.wait_for_status()
        if status.code() is not grpc.StatusCode.OK:
            raise status

    def _note(self, call: grpc.aio.Call) -> None:
        """Called with each status that the call is given."""
        code, text, trailers = _at_hand(call.code()), _at_hand(call.details()), _at_hand(call.trailing_metadata())
        if not self._status.done() and (code, text) != _WRITE_FAILED:
            self._status.set_result(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, text))


def _at_hand(answer: Coroutine[Any, Any, T]) -> T:
    """What needs no waiting for, without a chance for anything else to happen."""
    try:
        answer.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    raise RuntimeError("a call that is over must know its status")


def convert_status_error(refusal: grpc.aio.AioRpcError, who: str) -> errors.SottovoceError:
    """What a failed call means to its caller: our own class where the status carries a reason that is known here."""
    text = escape_control("; ".join((refusal.details() or refusal.code().name).splitlines()))
    if refusal.code() in _UNREACHABLE_CODES:
        return errors.Unavailable(
            f"cannot reach {who}: {explain_handshake_failure(text) or explain_unreachable(text) or text}"
        )
    info = _info(refusal)
    if info is None and refusal.code() is grpc.StatusCode.UNIMPLEMENTED:
        text = f"{who} does not know this call: another service listens there, or a much older one"
        return errors.FailedPrecondition(f"{text}; is the address right?")
    kind = errors.SottovoceError if info is None else _KINDS.get(info.reason, errors.SottovoceError)
    if kind is errors.AssumptionViolated and info is not None:
        code = info.metadata["code"]
        return errors.AssumptionViolated(code, text.removesuffix(f" [{code}]"))
    if kind is errors.FailedPrecondition and info is not None and _STATE in info.metadata:
        return errors.RunEnded(text, escape_control(info.metadata[_STATE]))
    if kind not in (errors.SottovoceError, errors.LocalProtocolError):  # the latter's bug is not ours, but theirs
        return kind(text)
    if info is None and refusal.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return errors.SpecError(text)
    return errors.SottovoceError(f"{who}: {text} ({refusal.code().name})")


_UNREACHABLE_TEXTS = (
    (re.compile(r"Connection refused"), "nobody listens there: is it running, and is the address right?"),
    (
        re.compile(r"[Dd]omain name not found|DNS (resolution|query)|Name or service not known|Could not contact DNS"),
        "no machine of this name is found: is the address right?",
    ),
    (
        re.compile(r"[Nn]etwork is unreachable|No route to host"),
        "there is no way to this machine: is the address right?",
    ),
    (
        re.compile(r"^Deadline Exceeded$|before receiving SETTINGS frame|[Cc]onnection timed out"),
        "no answer in time: is it running, and is the address right?",
    ),
)
"""What gRPC says where no service is, in other words."""


def explain_handshake_failure(text: str) -> str:
    """Why a channel did not come about, where gRPC's words say that its ends do not believe each other; else empty."""
    return next((words for signs, words in _HANDSHAKE_TEXTS.items() if all(sign in text for sign in signs)), "")


def _info(refusal: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    """What our services say of an error; None where the details are somebody else's or no details at all."""
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
    """Why there is nobody, where gRPC's words say so; else empty."""
    return next((words for sign, words in _UNREACHABLE_TEXTS if sign.search(text)), "")
