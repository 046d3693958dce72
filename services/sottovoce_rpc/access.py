"""Who may call what: one table, and the interceptor that holds every service to it.

A table says who may call a method at all. Whom a call may be about (a learner joins as itself, a stream between learners is of a
neighbour in this run, a capture is its coordinator's) the service knows that answers it: it asks for the caller, and refuses,
too. A process without an identity has no roles to tell apart: there this machine's user may do everything.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
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
_NOBODY = "not allowed: whoever calls is not believed here"

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may call a method.

    Attributes:
        roles: that may.
        condition: which the service holds it to besides, in words; empty: none.
    """

    roles: frozenset[Role]
    condition: str = ""


def _rule(*roles: Role, condition: str = "") -> Rule:
    return Rule(frozenset(roles), condition)


_RUNS = _rule(Role.OPERATOR)
_OWNER = _rule(*Role, condition="one of the learner's owners (`--owner`)")
ACCESS: Mapping[str, Rule] = {
    f"{_LEARNER}/Exchange": _rule(
        Role.LEARNER,
        Role.EAVESDROPPER,
        condition="a neighbour in this run, as itself; an eavesdropper where the run's spec has `capture: relay`",
    ),
    f"{_LEARNER}/Ingest": _rule(*Role, condition="one of the learner's owners or feeders (`--owner`, `--feeder`)"),
    f"{_LEARNER}/Predict": _OWNER,
    f"{_LEARNER}/Ledger": _OWNER,
    f"{_LEARNER}/Intake": _rule(*Role, condition="as `Ingest`"),
    f"{_LEARNER}/Status": _rule(*Role, condition="as `Ingest`, or an operator, or a coordinator"),
    f"{_COORDINATOR}/Join": _rule(Role.LEARNER, condition="as itself"),
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
    f"{_EAVESDROPPER}/StreamCapture": _RUNS,
    f"{_EAVESDROPPER}/Mirror": _rule(Role.LEARNER, condition="as itself, in the run that is captured"),
    "/grpc.health.v1.Health/Check": _rule(*Role),
    "/grpc.health.v1.Health/List": _rule(*Role),
    "/grpc.health.v1.Health/Watch": _rule(*Role),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _RUNS,
}
"""By method, for all services."""


class Access(grpc.aio.ServerInterceptor):
    """Holds a server to the table. What is not in it, nobody may call.

    Args:
        credentials: of the server, which know the callers.

    Attributes:
        refused: so many calls were.
    """

    def __init__(self, credentials: Credentials) -> None:
        self.refused, self._credentials = 0, credentials

    def require(self, method: str, context: Context) -> Principal | None:
        """Who calls; None: this machine's user, or anybody, where the server answers anybody.

        Raises:
            StrangerError: who may not.
        """
        try:
            caller = self._credentials.caller(context)
        except StrangerError as error:
            self._note(method, context, str(error))
            raise StrangerError(_NOBODY) from None
        if caller is not None:
            rule = ACCESS.get(method)
            if rule is None or caller.role not in rule.roles:
                self._note(method, context, str(caller))
                raise StrangerError(f"{caller} may not call {method.rsplit('/', 1)[-1]}")
        return caller

    def _note(self, method: str, context: Context, who: str) -> None:
        self.refused += 1
        if self.refused <= _MOST_LOGGED or self.refused.bit_count() == 1:  # a stranger does not fill the disk
            log.warning("call refused", method=method, caller=who, peer=context.peer(), refused=self.refused)

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
                if not streams or caller is None:
                    return await own(request, context)
                async with beside(self._still(method, context)):
                    return await own(request, context)

        return answer

    def _generated(self, method: str, own: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        async def answers(request: Any, context: Context) -> AsyncIterator[Any]:
            async with answering(context):
                caller = self.require(method, context)
                async for each in own(request, context):
                    if caller is not None:
                        self.require(method, context)
                    yield each

        return answers

    async def _still(self, method: str, context: Context) -> None:
        """While a stream is held.

        Raises:
            StrangerError: its caller may no longer be answered.
        """
        while True:
            await asyncio.sleep(_AGAIN_S)
            self.require(method, context)
