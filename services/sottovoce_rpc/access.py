"""Access control: the table of roles that may call each method, and the interceptor that enforces it in every service.

The table decides on the method only. What a call may be about (a learner joins as itself, a stream between learners is of a
neighbour in this run, a capture belongs to its coordinator) the service itself checks: it asks for the caller, and refuses,
too. A process without an identity cannot tell roles apart: there this machine's user may do everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from sottovoce_core.errors import LimitReached, PermissionDenied, RemoteProtocolError
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.error_status import abort_on_error
from sottovoce_rpc.principals import Principal, Role
from sottovoce_rpc.tasks import run_in_background

_LEARNER, _COORDINATOR, _EAVESDROPPER = (
    f"/sottovoce_wire.v1.{name}" for name in ("Learner", "Coordinator", "Eavesdropper")
)
_RECHECK_INTERVAL_S = 5.0
"""Interval between checks of the caller of an open stream: certificates expire or are revoked."""
_MAX_LOGGED_REFUSALS = 20
_DENIED_STATUS_CODES: Container[object] = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.PERMISSION_DENIED.value[0],
)
"""Representations of PERMISSION_DENIED in different versions of gRPC."""
MAX_UNREAD_BYTES = 192 * 1024 * 1024
"""Maximum bytes of one caller's messages that a server holds unread, unless a single message is longer."""
_REQUEST_TIMEOUT_S = 30.0
"""Time to receive a single request, once it is its turn."""
UNTRUSTED_CALLER_TEXT = "not allowed: this service does not trust the caller"
"""Only text sent to an untrusted caller."""
UNIDENTIFIED_CALLER = "not known, without an identity"
"""Log text for a caller without a certificate."""
UNTRUSTED, ROLE, CONDITION = "untrusted", "role", "condition"
"""Reasons of refusal: caller not trusted, role not allowed, or the service's own condition not met."""

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]
_Decode = Callable[[bytes], Any]
_LARGE_REQUEST_METHODS = frozenset({f"{_LEARNER}/Predict"})
"""Methods whose single request may be as long as any message."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """Rule for the callers of a method.

    Attributes:
        roles: allowed roles.
        condition: what the service itself requires besides, in words; empty: nothing.
        foreign: which callers of other trust domains are allowed, in words; empty: none.
    """

    roles: frozenset[Role]
    condition: str = ""
    foreign: str = ""


def _build_rule(*roles: Role, condition: str = "", foreign: str = "") -> _Rule:
    return _Rule(frozenset(roles), condition, foreign)


_ALL_CALLER_ROLES = tuple(role for role in Role if role is not Role.MONITOR)
_OPERATOR_RULE = _build_rule(Role.OPERATOR)
_FOREIGN_OWNER_CONDITION = "named with its domain"
_OWNER = _build_rule(
    *_ALL_CALLER_ROLES, condition="one of the learner's owners (`--owner`)", foreign=_FOREIGN_OWNER_CONDITION
)
ACCESS_RULES: Mapping[str, _Rule] = {
    f"{_LEARNER}/Exchange": _build_rule(
        Role.LEARNER,
        Role.EAVESDROPPER,
        condition="a neighbour in this run, as itself; an eavesdropper where the run's spec has `capture: relay`",
        foreign="the same; an eavesdropper that the owner's policy names",
    ),
    f"{_LEARNER}/Ingest": _build_rule(
        *_ALL_CALLER_ROLES,
        condition="one of the learner's owners or feeders (`--owner`, `--feeder`)",
        foreign=_FOREIGN_OWNER_CONDITION,
    ),
    f"{_LEARNER}/Predict": _OWNER,
    f"{_LEARNER}/GetLedger": _OWNER,
    f"{_LEARNER}/GetIntake": _build_rule(*_ALL_CALLER_ROLES, condition="as `Ingest`", foreign=_FOREIGN_OWNER_CONDITION),
    f"{_LEARNER}/GetStatus": _build_rule(
        *_ALL_CALLER_ROLES, condition="as `Ingest`, or an operator, or a coordinator", foreign=_FOREIGN_OWNER_CONDITION
    ),
    f"{_COORDINATOR}/Join": _build_rule(Role.LEARNER, condition="as itself", foreign="the same"),
    f"{_COORDINATOR}/StartRun": _OPERATOR_RULE,
    f"{_COORDINATOR}/StopRun": _OPERATOR_RULE,
    f"{_COORDINATOR}/ResumeRun": _OPERATOR_RULE,
    f"{_COORDINATOR}/LeaveRun": _OPERATOR_RULE,
    f"{_COORDINATOR}/JoinRun": _OPERATOR_RULE,
    f"{_COORDINATOR}/RecoverRun": _OPERATOR_RULE,
    f"{_COORDINATOR}/GetRun": _OPERATOR_RULE,
    f"{_COORDINATOR}/ListRuns": _OPERATOR_RULE,
    f"{_COORDINATOR}/WatchRun": _OPERATOR_RULE,
    f"{_COORDINATOR}/RebindLearner": _OPERATOR_RULE,
    f"{_EAVESDROPPER}/OpenCapture": _build_rule(Role.COORDINATOR, condition="resumed: the one that opened it"),
    f"{_EAVESDROPPER}/CloseCapture": _build_rule(Role.COORDINATOR, condition="the one that opened it"),
    f"{_EAVESDROPPER}/ListCaptures": _OPERATOR_RULE,
    f"{_EAVESDROPPER}/ListSentRounds": _build_rule(Role.COORDINATOR, condition="of captures that it opened"),
    f"{_EAVESDROPPER}/StreamCapture": _OPERATOR_RULE,
    f"{_EAVESDROPPER}/Mirror": _build_rule(
        Role.LEARNER, condition="as itself, in the run that is captured", foreign="the same"
    ),
    f"{_EAVESDROPPER}/Work": _build_rule(
        Role.EAVESDROPPER, condition="a process that it has started, or with its own identity"
    ),
    "/grpc.health.v1.Health/Check": _build_rule(*_ALL_CALLER_ROLES, foreign="the same"),
    "/grpc.health.v1.Health/List": _build_rule(*_ALL_CALLER_ROLES, foreign="the same"),
    "/grpc.health.v1.Health/Watch": _build_rule(*_ALL_CALLER_ROLES, foreign="the same"),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OPERATOR_RULE,
}
"""Access rules of all services, by method."""


class Refusals:
    """Counter of refused calls; it logs only some of them, so that an untrusted caller cannot fill the disk.

    Attributes:
        counts_by_reason: number of refused calls by reason.
    """

    def __init__(self) -> None:
        self.counts_by_reason = Counter({UNTRUSTED: 0, ROLE: 0, CONDITION: 0})

    def record_refusal(self, reason: str, **facts: str) -> None:
        """Count a refused call."""
        self.counts_by_reason[reason] += 1
        refused = self.counts_by_reason.total()
        if refused <= _MAX_LOGGED_REFUSALS or refused.bit_count() == 1:
            log.warning("call refused", **facts, refused=refused)


class _ReadSlots:
    """Limit on the memory of messages that a server has not read yet.

    When a call reads, gRPC buffers the whole message before it returns any of it. So a call reads only while it holds a slot, and
    other calls of the same caller wait. All callers without an identity count as one.

    Args:
        max_message_bytes: size of the longest message of this server.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._slots_per_caller = max(1, MAX_UNREAD_BYTES // max_message_bytes)
        self._open: dict[tuple[str, str], asyncio.Semaphore] = {}
        self._calls = Counter[tuple[str, str]]()

    @contextlib.asynccontextmanager
    async def acquire(self, method: str, caller: Principal | None) -> AsyncIterator[_ReadSlot]:
        """Wait for a slot of this caller, and hold it until the block ends or the slot is released.

        Health checks have slots of their own: they must not wait for a service's messages.
        """
        own = str(caller or ""), method.split("/")[1]
        count = self._slots_per_caller if own[1].startswith("sottovoce") else 1
        slots = self._open.setdefault(own, asyncio.Semaphore(count))
        self._calls[own] += 1
        try:
            await slots.acquire()
            slot = _ReadSlot(slots)
            try:
                yield slot
            finally:
                slot.release()
        finally:
            self._calls[own] -= 1
            if not self._calls[own]:
                del self._calls[own], self._open[own]


class _ReadSlot:
    """Permission of one call to hold an unread message."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots: asyncio.Semaphore | None = slots

    def release(self) -> None:
        """Let another call of the caller read; a second release does nothing."""
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.release()


_CURRENT_SLOT: ContextVar[_ReadSlot | None] = ContextVar("read slot", default=None)


def release_read_slot() -> None:
    """Release the read slot of the current call for good; its caller must be limited in another way."""
    if (slot := _CURRENT_SLOT.get()) is not None:
        slot.release()


class StreamLimit:
    """Limit on the open streams of one caller: each may hold an unread message as long as it is open.

    Args:
        max_streams: maximum number of open streams of a caller.
        content: what they carry, for errors.
    """

    def __init__(self, max_streams: int, content: str) -> None:
        self._max_streams, self._content, self._open = max_streams, content, Counter[str]()

    @contextlib.contextmanager
    def hold_stream(self, caller: Principal | None) -> Iterator[None]:
        """Count a stream during the block, and release its read slot.

        Raises:
            LimitReached: the caller has the maximum number already.
        """
        whom = str(caller or "callers without an identity")
        if self._open[whom] >= self._max_streams:
            raise LimitReached(
                f"at most {self._max_streams} streams of {self._content} by {whom} may be open here: end one, send several "
                "sources on "
                "one, or give processes identities of their own"
            )
        self._open[whom] += 1
        release_read_slot()
        try:
            yield
        finally:
            self._open[whom] -= 1
            if not self._open[whom]:
                del self._open[whom]


class _CountedRefusal(PermissionDenied):
    """A refusal by the table, already counted."""


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that enforces the access table; methods missing in it are refused.

    Nothing of a call is read before its caller is authorized. Single requests are decoded here instead of in gRPC, which would
    answer UNKNOWN with the text of an exception, and log a traceback. Messages of a stream are decoded when the service reads
    them, and refused there (`abort_on_error`).

    Args:
        credentials: credentials of the server, which authenticate callers.
        refusals: counts refused calls (default: those of this server only).
        max_message_bytes: size of the longest message of this server; None: reads are not limited.
        max_request_bytes: maximum size of a single request without records: decoded, it may take ten times as much memory.
    """

    def __init__(
        self,
        credentials: Credentials,
        refusals: Refusals | None = None,
        *,
        max_message_bytes: int | None = None,
        max_request_bytes: int = MAX_UNREAD_BYTES,
    ) -> None:
        self.refusals, self._credentials = refusals or Refusals(), credentials
        self._slots = None if max_message_bytes is None else _ReadSlots(max_message_bytes)
        self._max_request = max_request_bytes

    def authorize_caller(self, method: str, context: Context) -> Principal | None:
        """Authenticate and authorize the caller; None: this machine's user, or any caller of an insecure server.

        Raises:
            PermissionDenied: the caller may not call this method.
        """
        try:
            caller = self._credentials.identify_caller(context)
        except PermissionDenied as error:
            self.refusals.record_refusal(UNTRUSTED, method=method, caller=str(error), peer=context.peer())
            raise _CountedRefusal(UNTRUSTED_CALLER_TEXT) from None
        if caller is not None:
            rule = ACCESS_RULES.get(method)
            if rule is None or caller.role not in rule.roles:
                self.refusals.record_refusal(ROLE, method=method, caller=str(caller), peer=context.peer())
                raise _CountedRefusal(f"{caller} may not call {method.rsplit('/', 1)[-1]}")
            if caller.is_foreign and not rule.foreign:
                self.refusals.record_refusal(ROLE, method=method, caller=str(caller), peer=context.peer())
                raise _CountedRefusal(
                    f"{caller} may not call {method.rsplit('/', 1)[-1]}: it is of another trust domain than this service"
                )
        return caller

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handler of a method so that it authorizes the caller first."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        method, single = handler_call_details.method, not handler.request_streaming
        decode = handler.request_deserializer if single else None
        # A single request is read as a stream of one: else gRPC would read it before the caller is authorized.
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        own = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        guarded = self._guard(method, own, decode, recheck=not single or handler.response_streaming)
        return make(guarded, None if single else handler.request_deserializer, handler.response_serializer)

    def _guard(
        self, method: str, own: Callable[..., Any], decode: _Decode | None, *, recheck: bool
    ) -> Callable[..., Awaitable[Any]]:
        async def answer(_: object, context: Context) -> Any:
            held: list[Any] = [_Requests(context)]
            with _clear_refused_call():
                async with abort_on_error(context):
                    caller = self.authorize_caller(method, context)
                    with self._count_refusal(method, caller, context):
                        async with self._read_request(method, caller, held, decode):
                            if inspect.isasyncgenfunction(own):
                                async with contextlib.aclosing(own(held.pop(), context)) as answers:
                                    async for each in answers:
                                        if caller is not None:
                                            self.authorize_caller(method, context)
                                        await context.write(each)
                                return None
                            if not recheck or caller is None:
                                return await own(held.pop(), context)
                            async with run_in_background(self._recheck_caller(method, context)):
                                return await own(held.pop(), context)

        return answer

    @contextlib.asynccontextmanager
    async def _read_request(
        self, method: str, caller: Principal | None, held: list[Any], decode: _Decode | None
    ) -> AsyncIterator[None]:
        """Replace the stream in `held` by its single request, read in a slot; without `decode`, give the stream a slot."""
        if self._slots is None:
            yield
            return
        async with self._slots.acquire(method, caller) as slot:
            if decode is not None:
                raw = await _read_single(held[0])
                if len(raw) > self._max_request and method not in _LARGE_REQUEST_METHODS:
                    raise RemoteProtocolError(f"a request must have at most {self._max_request} bytes, got {len(raw)}")
                held[0] = decode(raw)
                del raw  # the request has its own copy
                slot.release()
            else:
                _CURRENT_SLOT.set(slot)
            yield

    @contextlib.contextmanager
    def _count_refusal(self, method: str, caller: Principal | None, context: Context) -> Iterator[None]:
        """Count a call that the service itself refuses."""
        try:
            yield
        except (grpc.aio.AbortError, PermissionDenied) as error:
            denied = context.code() in _DENIED_STATUS_CODES if isinstance(error, grpc.aio.AbortError) else True
            if denied and not isinstance(error, _CountedRefusal):
                self.refusals.record_refusal(CONDITION, method=method, caller=str(caller or ""), peer=context.peer())
            raise

    async def _recheck_caller(self, method: str, context: Context) -> None:
        """Authorize the caller of an open stream again and again.

        Raises:
            PermissionDenied: the caller is no longer allowed.
        """
        while True:
            await asyncio.sleep(_RECHECK_INTERVAL_S)
            self.authorize_caller(method, context)


class _Requests:
    """Requests of a call in order. gRPC's own iterator keeps the last request in memory if it is not read to its end."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        request = await self._context.read()
        if request is grpc.aio.EOF:
            raise StopAsyncIteration
        return request


@contextlib.contextmanager
def _clear_refused_call() -> Iterator[None]:
    """Free a refused call and what it has sent: gRPC keeps the error, whose frames keep the call, a reference cycle.

    The error is swallowed here; gRPC has recorded it, and raises it again.
    """
    try:
        yield
    except grpc.aio.AbortError as error:
        chained: BaseException | None = error
        while chained is not None:  # an error group, as of a `TaskGroup`, is a reference cycle, too
            traceback.clear_frames(chained.__traceback__)
            chained = chained.__context__
        error.__context__ = error.__traceback__ = None


async def _read_single(requests: AsyncIterator[Any]) -> Any:
    """Return the request of a unary call.

    Raises:
        RemoteProtocolError: there is none, or it takes too long.
    """
    try:
        async with asyncio.timeout(_REQUEST_TIMEOUT_S):
            return await anext(requests)
    except StopAsyncIteration:
        raise RemoteProtocolError("a call of this method must have a request, got none") from None
    except TimeoutError:
        raise RemoteProtocolError(
            f"a request must arrive within {_REQUEST_TIMEOUT_S:g} s, and this one did not"
        ) from None
