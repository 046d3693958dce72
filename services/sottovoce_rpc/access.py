"""Who may call what: one table, and the interceptor that holds every service to it.

A table says who may call a method at all. Whom a call may be about (a learner joins as itself, a stream between learners is of a
neighbour in this run, a capture is its coordinator's) the service knows that answers it: it asks for the caller, and refuses,
too. A process without an identity has no roles to tell apart: there this machine's user may do everything.
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
"""How often whoever holds a stream is looked at again: certificates are revoked, and end."""
_MAX_LOGGED_REFUSALS = 20
_DENIED_STATUS_CODES: Container[object] = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.PERMISSION_DENIED.value[0],
)
"""As gRPC says it, by its version."""
MAX_UNREAD_BYTES = 192 * 1024 * 1024
"""Of messages of one caller that are on their way into a server, where one alone is not longer."""
_REQUEST_TIMEOUT_S = 30.0
"""For a single request, in its turn."""
UNTRUSTED_CALLER_TEXT = "not allowed: whoever calls is not believed here"
"""All that a stranger is told."""
UNIDENTIFIED_CALLER = "not known, without an identity"
"""In a log, in place of a caller that has shown no certificate."""
UNTRUSTED, ROLE, CONDITION = "stranger", "role", "condition"
"""Why somebody is refused: not believed at all, in another role than is needed, or not whom the service itself takes."""

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]
_Decode = Callable[[bytes], Any]
_LARGE_REQUEST_METHODS = frozenset({f"{_LEARNER}/Predict"})
"""Single requests that may be as long as any message."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """Who may call a method.

    Attributes:
        roles: that may.
        condition: which the service holds it to besides, in words; empty: none.
        foreign: who may of these roles in another trust domain, in words; empty: nobody.
    """

    roles: frozenset[Role]
    condition: str = ""
    foreign: str = ""


def _rule(*roles: Role, condition: str = "", foreign: str = "") -> _Rule:
    return _Rule(frozenset(roles), condition, foreign)


_ALL_CALLER_ROLES = tuple(role for role in Role if role is not Role.MONITOR)
_OPERATOR_RULE = _rule(Role.OPERATOR)
_FOREIGN_OWNER_CONDITION = "who is named with its domain"
_OWNER = _rule(
    *_ALL_CALLER_ROLES, condition="one of the learner's owners (`--owner`)", foreign=_FOREIGN_OWNER_CONDITION
)
ACCESS_RULES: Mapping[str, _Rule] = {
    f"{_LEARNER}/Exchange": _rule(
        Role.LEARNER,
        Role.EAVESDROPPER,
        condition="a neighbour in this run, as itself; an eavesdropper where the run's spec has `capture: relay`",
        foreign="the same; an eavesdropper that the owner's policy names",
    ),
    f"{_LEARNER}/Ingest": _rule(
        *_ALL_CALLER_ROLES,
        condition="one of the learner's owners or feeders (`--owner`, `--feeder`)",
        foreign=_FOREIGN_OWNER_CONDITION,
    ),
    f"{_LEARNER}/Predict": _OWNER,
    f"{_LEARNER}/GetLedger": _OWNER,
    f"{_LEARNER}/GetIntake": _rule(*_ALL_CALLER_ROLES, condition="as `Ingest`", foreign=_FOREIGN_OWNER_CONDITION),
    f"{_LEARNER}/GetStatus": _rule(
        *_ALL_CALLER_ROLES, condition="as `Ingest`, or an operator, or a coordinator", foreign=_FOREIGN_OWNER_CONDITION
    ),
    f"{_COORDINATOR}/Join": _rule(Role.LEARNER, condition="as itself", foreign="the same"),
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
    f"{_EAVESDROPPER}/OpenCapture": _rule(Role.COORDINATOR, condition="resumed: the one that opened it"),
    f"{_EAVESDROPPER}/CloseCapture": _rule(Role.COORDINATOR, condition="the one that opened it"),
    f"{_EAVESDROPPER}/ListCaptures": _OPERATOR_RULE,
    f"{_EAVESDROPPER}/ListSentRounds": _rule(Role.COORDINATOR, condition="of captures that it opened"),
    f"{_EAVESDROPPER}/StreamCapture": _OPERATOR_RULE,
    f"{_EAVESDROPPER}/Mirror": _rule(
        Role.LEARNER, condition="as itself, in the run that is captured", foreign="the same"
    ),
    "/grpc.health.v1.Health/Check": _rule(*_ALL_CALLER_ROLES, foreign="the same"),
    "/grpc.health.v1.Health/List": _rule(*_ALL_CALLER_ROLES, foreign="the same"),
    "/grpc.health.v1.Health/Watch": _rule(*_ALL_CALLER_ROLES, foreign="the same"),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OPERATOR_RULE,
}
"""By method, for all services."""


class Refusals:
    """Counts who was refused, and tells of some: a stranger does not fill the disk.

    Attributes:
        counts_by_reason: so many were.
    """

    def __init__(self) -> None:
        self.counts_by_reason = Counter({UNTRUSTED: 0, ROLE: 0, CONDITION: 0})

    def record_refusal(self, reason: str, **facts: str) -> None:
        """One more."""
        self.counts_by_reason[reason] += 1
        refused = self.counts_by_reason.total()
        if refused <= _MAX_LOGGED_REFUSALS or refused.bit_count() == 1:
            log.warning("call refused", **facts, refused=refused)


class _Turns:
    """Limits the memory of messages that a server has not read yet.

    Once a call has asked for a message, gRPC holds the whole of it before it hands it over. So a call asks only in its turn, and
    the others of the same caller wait. All callers without an identity are one.

    Args:
        max_message: bytes of the longest message of this server.
    """

    def __init__(self, max_message: int) -> None:
        self._many = max(1, MAX_UNREAD_BYTES // max_message)
        self._open: dict[tuple[str, str], asyncio.Semaphore] = {}
        self._calls = Counter[tuple[str, str]]()

    @contextlib.asynccontextmanager
    async def turn(self, method: str, caller: Principal | None) -> AsyncIterator[_Turn]:
        """Wait for a turn of this caller, and hold it until the block ends or the turn is given back.

        Health checks have turns of their own: they must not wait for a service's messages.
        """
        own = str(caller or ""), method.split("/")[1]
        many = self._many if own[1].startswith("sottovoce") else 1
        turns = self._open.setdefault(own, asyncio.Semaphore(many))
        self._calls[own] += 1
        try:
            await turns.acquire()
            turn = _Turn(turns)
            try:
                yield turn
            finally:
                turn.give_back()
        finally:
            self._calls[own] -= 1
            if not self._calls[own]:
                del self._calls[own], self._open[own]


class _Turn:
    """The right of one call to hold an unread message."""

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns: asyncio.Semaphore | None = turns

    def give_back(self) -> None:
        """Let another call of the caller read; a second time it changes nothing."""
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.release()


_TURN: ContextVar[_Turn | None] = ContextVar("turn", default=None)


def release_read_slot() -> None:
    """Let the present call read without a turn from now on: what is in its place is limited in another way."""
    if (turn := _TURN.get()) is not None:
        turn.give_back()


class StreamLimit:
    """Limits how many streams one caller holds open, each of which may hold an unread message for as long as it is there.

    Args:
        most: streams of a caller at a time.
        what: they bring.
    """

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what, self._open = most, what, Counter[str]()

    @contextlib.contextmanager
    def hold_stream(self, caller: Principal | None) -> Iterator[None]:
        """While a stream is open, which needs no turn.

        Raises:
            LimitReached: its caller has as many.
        """
        whom = str(caller or "callers without an identity")
        if self._open[whom] >= self._most:
            raise LimitReached(
                f"at most {self._most} streams of {self._what} by {whom} may be open here: end one, bring several sources on "
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


class _Counted(PermissionDenied):
    """A refusal that the table has made, and counted."""


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Holds a server to the table. What is not in it, nobody may call.

    Nothing of a call is read before it is known that its caller may make it. Single requests are decoded here, in gRPC's
    place, which answers UNKNOWN, with the text of an exception, and logs a traceback. Messages of a stream are decoded where
    they are asked for, and refused there (`answering`).

    Args:
        credentials: of the server, which know the callers.
        refused: counts calls that are (default: those of this server alone).
        max_message: bytes of the longest message of this server; None: its calls read without turns.
        max_request: bytes of a single request without records: decoded, it may take ten times as much memory.
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
        self._turns = None if max_message_bytes is None else _Turns(max_message_bytes)
        self._max_request = max_request_bytes

    def authorize_caller(self, method: str, context: Context) -> Principal | None:
        """Who calls; None: this machine's user, or anybody, where the server answers anybody.

        Raises:
            PermissionDenied: who may not.
        """
        try:
            caller = self._credentials.identify_caller(context)
        except PermissionDenied as error:
            self.refusals.record_refusal(UNTRUSTED, method=method, caller=str(error), peer=context.peer())
            raise _Counted(UNTRUSTED_CALLER_TEXT) from None
        if caller is not None:
            rule = ACCESS_RULES.get(method)
            if rule is None or caller.role not in rule.roles:
                self.refusals.record_refusal(ROLE, method=method, caller=str(caller), peer=context.peer())
                raise _Counted(f"{caller} may not call {method.rsplit('/', 1)[-1]}")
            if caller.is_foreign and not rule.foreign:
                self.refusals.record_refusal(ROLE, method=method, caller=str(caller), peer=context.peer())
                raise _Counted(
                    f"{caller} may not call {method.rsplit('/', 1)[-1]}, for it is of another trust domain than this service"
                )
        return caller

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a method, which asks first who calls."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        method, single = handler_call_details.method, not handler.request_streaming
        decode = handler.request_deserializer if single else None
        # A single request is read as a stream of one: else gRPC would read it before anybody has looked at its caller.
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        own = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        held = self._held(method, own, decode, watched=not single or handler.response_streaming)
        return make(held, None if single else handler.request_deserializer, handler.response_serializer)

    def _held(
        self, method: str, own: Callable[..., Any], decode: _Decode | None, *, watched: bool
    ) -> Callable[..., Awaitable[Any]]:
        async def answer(_: object, context: Context) -> Any:
            held: list[Any] = [_Requests(context)]
            with _forgotten():
                async with abort_on_error(context):
                    caller = self.authorize_caller(method, context)
                    with self._counted(method, caller, context):
                        async with self._read(method, caller, held, decode):
                            if inspect.isasyncgenfunction(own):
                                async with contextlib.aclosing(own(held.pop(), context)) as answers:
                                    async for each in answers:
                                        if caller is not None:
                                            self.authorize_caller(method, context)
                                        await context.write(each)
                                return None
                            if not watched or caller is None:
                                return await own(held.pop(), context)
                            async with run_in_background(self._still(method, context)):
                                return await own(held.pop(), context)

        return answer

    @contextlib.asynccontextmanager
    async def _read(
        self, method: str, caller: Principal | None, held: list[Any], decode: _Decode | None
    ) -> AsyncIterator[None]:
        """Put the one request of a call, read in its turn, in the place of its stream; no `decode`: give the stream a turn."""
        if self._turns is None:
            yield
            return
        async with self._turns.turn(method, caller) as turn:
            if decode is not None:
                raw = await _only(held[0])
                if len(raw) > self._max_request and method not in _LARGE_REQUEST_METHODS:
                    raise RemoteProtocolError(f"a request must have at most {self._max_request} bytes, got {len(raw)}")
                held[0] = decode(raw)
                del raw  # the request has its own copy
                turn.give_back()
            else:
                _TURN.set(turn)
            yield

    @contextlib.contextmanager
    def _counted(self, method: str, caller: Principal | None, context: Context) -> Iterator[None]:
        """Count a call to which the service that answers it says no."""
        try:
            yield
        except (grpc.aio.AbortError, PermissionDenied) as error:
            denied = context.code() in _DENIED_STATUS_CODES if isinstance(error, grpc.aio.AbortError) else True
            if denied and not isinstance(error, _Counted):
                self.refusals.record_refusal(CONDITION, method=method, caller=str(caller or ""), peer=context.peer())
            raise

    async def _still(self, method: str, context: Context) -> None:
        """While a stream is held.

        Raises:
            PermissionDenied: its caller may no longer be answered.
        """
        while True:
            await asyncio.sleep(_RECHECK_INTERVAL_S)
            self.authorize_caller(method, context)


class _Requests:
    """The requests of a call, as they come. gRPC's own iterator keeps the last one for good where it is not read to its end."""

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
def _forgotten() -> Iterator[None]:
    """Let go of a refused call and what it has sent: gRPC keeps the error, its frames keep the call, and that is a circle.

    The error ends here, and gRPC, which knows of it, raises it again.
    """
    try:
        yield
    except grpc.aio.AbortError as error:
        behind: BaseException | None = error
        while behind is not None:  # a group of errors, as of a `TaskGroup`, is a circle, too
            traceback.clear_frames(behind.__traceback__)
            behind = behind.__context__
        error.__context__ = error.__traceback__ = None


async def _only(requests: AsyncIterator[Any]) -> Any:
    """The request of a call that has one.

    Raises:
        RemoteProtocolError: it has none, or that takes too long.
    """
    try:
        async with asyncio.timeout(_REQUEST_TIMEOUT_S):
            return await anext(requests)
    except StopAsyncIteration:
        raise RemoteProtocolError("a call of this method must have a request, got none") from None
    except TimeoutError:
        raise RemoteProtocolError(f"a request must be here within {_REQUEST_TIMEOUT_S:g} s, got less of it") from None
