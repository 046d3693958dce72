"""Who may call what: one table, and the interceptor that holds every service to it.

A table says who may call a method at all. Whom a call may be about (a learner joins as itself, a stream between learners is of a
neighbour in this run, a capture is its coordinator's) the service knows that answers it: it asks for the caller, and refuses,
too. A process without an identity has no roles to tell apart: there this machine's user may do everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from sottovoce.errors import StrangerError
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.principals import Principal, Role
from sottovoce_rpc.status import answering
from sottovoce_rpc.tasks import beside

_LEARNER, _COORDINATOR, _EAVESDROPPER = (
    f"/sottovoce_wire.v1.{name}" for name in ("Learner", "Coordinator", "Eavesdropper")
)
_AGAIN_S = 5.0
"""How often whoever holds a stream is looked at again: certificates are revoked, and end."""
_MOST_LOGGED = 20
_DENIED: Container[object] = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.PERMISSION_DENIED.value[0])
"""As gRPC says it, by its version."""
NOT_BELIEVED = "not allowed: whoever calls is not believed here"
"""All that a stranger is told."""
STRANGER, ROLE, CONDITION = "stranger", "role", "condition"
"""Why somebody is refused: not believed at all, in another role than is needed, or not whom the service itself takes."""

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may call a method.

    Attributes:
        roles: that may.
        condition: which the service holds it to besides, in words; empty: none.
        foreign: who may of these roles in another trust domain, in words; empty: nobody.
    """

    roles: frozenset[Role]
    condition: str = ""
    foreign: str = ""


def _rule(*roles: Role, condition: str = "", foreign: str = "") -> Rule:
    return Rule(frozenset(roles), condition, foreign)


_ANY = tuple(role for role in Role if role is not Role.MONITOR)
_RUNS = _rule(Role.OPERATOR)
_NAMED = "who is named with its domain"
_OWNER = _rule(*_ANY, condition="one of the learner's owners (`--owner`)", foreign=_NAMED)
ACCESS: Mapping[str, Rule] = {
    f"{_LEARNER}/Exchange": _rule(
        Role.LEARNER,
        Role.EAVESDROPPER,
        condition="a neighbour in this run, as itself; an eavesdropper where the run's spec has `capture: relay`",
        foreign="the same; an eavesdropper that the owner's policy names",
    ),
    f"{_LEARNER}/Ingest": _rule(
        *_ANY, condition="one of the learner's owners or feeders (`--owner`, `--feeder`)", foreign=_NAMED
    ),
    f"{_LEARNER}/Predict": _OWNER,
    f"{_LEARNER}/Ledger": _OWNER,
    f"{_LEARNER}/Intake": _rule(*_ANY, condition="as `Ingest`", foreign=_NAMED),
    f"{_LEARNER}/Status": _rule(*_ANY, condition="as `Ingest`, or an operator, or a coordinator", foreign=_NAMED),
    f"{_COORDINATOR}/Join": _rule(Role.LEARNER, condition="as itself", foreign="the same"),
    f"{_COORDINATOR}/StartRun": _RUNS,
    f"{_COORDINATOR}/StopRun": _RUNS,
    f"{_COORDINATOR}/ResumeRun": _RUNS,
    f"{_COORDINATOR}/LeaveRun": _RUNS,
    f"{_COORDINATOR}/JoinRun": _RUNS,
    f"{_COORDINATOR}/RecoverRun": _RUNS,
    f"{_COORDINATOR}/GetRun": _RUNS,
    f"{_COORDINATOR}/ListRuns": _RUNS,
    f"{_COORDINATOR}/WatchRun": _RUNS,
    f"{_COORDINATOR}/RebindLearner": _RUNS,
    f"{_EAVESDROPPER}/OpenCapture": _rule(Role.COORDINATOR, condition="resumed: the one that opened it"),
    f"{_EAVESDROPPER}/CloseCapture": _rule(Role.COORDINATOR, condition="the one that opened it"),
    f"{_EAVESDROPPER}/ListCaptures": _RUNS,
    f"{_EAVESDROPPER}/ListSent": _rule(Role.COORDINATOR, condition="of captures that it opened"),
    f"{_EAVESDROPPER}/StreamCapture": _RUNS,
    f"{_EAVESDROPPER}/Mirror": _rule(
        Role.LEARNER, condition="as itself, in the run that is captured", foreign="the same"
    ),
    "/grpc.health.v1.Health/Check": _rule(*_ANY, foreign="the same"),
    "/grpc.health.v1.Health/List": _rule(*_ANY, foreign="the same"),
    "/grpc.health.v1.Health/Watch": _rule(*_ANY, foreign="the same"),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _RUNS,
}
"""By method, for all services."""


class Refusals:
    """Counts who was refused, and tells of some: a stranger does not fill the disk.

    Attributes:
        by_reason: so many were.
    """

    def __init__(self) -> None:
        self.by_reason = Counter({STRANGER: 0, ROLE: 0, CONDITION: 0})

    def note(self, reason: str, **facts: str) -> None:
        """One more."""
        self.by_reason[reason] += 1
        refused = self.by_reason.total()
        if refused <= _MOST_LOGGED or refused.bit_count() == 1:
            log.warning("call refused", **facts, refused=refused)


class Access(grpc.aio.ServerInterceptor):
    """Holds a server to the table. What is not in it, nobody may call.

    Args:
        credentials: of the server, which know the callers.
        refused: counts calls that are (default: those of this server alone).
    """

    def __init__(self, credentials: Credentials, refused: Refusals | None = None) -> None:
        self.refused, self._credentials = refused or Refusals(), credentials

    def require(self, method: str, context: Context) -> Principal | None:
        """Who calls; None: this machine's user, or anybody, where the server answers anybody.

        Raises:
            StrangerError: who may not.
        """
        try:
            caller = self._credentials.caller(context)
        except StrangerError as error:
            self.refused.note(STRANGER, method=method, caller=str(error), peer=context.peer())
            raise StrangerError(NOT_BELIEVED) from None
        if caller is not None:
            rule = ACCESS.get(method)
            if rule is None or caller.role not in rule.roles:
                self.refused.note(ROLE, method=method, caller=str(caller), peer=context.peer())
                raise StrangerError(f"{caller} may not call {method.rsplit('/', 1)[-1]}")
            if caller.is_foreign and not rule.foreign:
                self.refused.note(ROLE, method=method, caller=str(caller), peer=context.peer())
                raise StrangerError(
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
        method = handler_call_details.method
        make, own = next(
            (make, own)
            for make, own in (
                (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
                (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
                (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
                (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
            )
            if own is not None
        )
        streams = handler.request_streaming or handler.response_streaming
        held = self._generated(method, own) if inspect.isasyncgenfunction(own) else self._awaited(method, own, streams)
        return make(held, handler.request_deserializer, handler.response_serializer)

    def _awaited(self, method: str, own: Callable[..., Awaitable[Any]], streams: bool) -> Callable[..., Awaitable[Any]]:
        async def answer(request: Any, context: Context) -> Any:
            async with answering(context):
                caller = self.require(method, context)
                with self._counted(method, caller, context):
                    if not streams or caller is None:
                        return await own(request, context)
                    async with beside(self._still(method, context)):
                        return await own(request, context)

        return answer

    def _generated(self, method: str, own: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        async def answers(request: Any, context: Context) -> AsyncIterator[Any]:
            async with answering(context):
                caller = self.require(method, context)
                with self._counted(method, caller, context):
                    async for each in own(request, context):
                        if caller is not None:
                            self.require(method, context)
                        yield each

        return answers

    @contextlib.contextmanager
    def _counted(self, method: str, caller: Principal | None, context: Context) -> Iterator[None]:
        """Count a call to which the service that answers it says no."""
        try:
            yield
        except grpc.aio.AbortError:
            if context.code() in _DENIED:
                self.refused.note(CONDITION, method=method, caller=str(caller or ""), peer=context.peer())
            raise

    async def _still(self, method: str, context: Context) -> None:
        """While a stream is held.

        Raises:
            StrangerError: its caller may no longer be answered.
        """
        while True:
            await asyncio.sleep(_AGAIN_S)
            self.require(method, context)
