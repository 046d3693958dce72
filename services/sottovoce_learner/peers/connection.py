"""Streams between neighbours: opening, handshake and received messages.

The learner with the lower index opens the stream and reopens it when it breaks; the other one accepts. The first message
in each direction is a Hello (learner.proto), the caller's first. An error of the other side ends its stream with a status
that gives the reason; nothing of ours changes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import structlog

from sottovoce_core.errors import PermissionDenied, RemoteProtocolError, SottovoceError, Unavailable
from sottovoce_core.runs.policy import extract_identity_names
from sottovoce_core.text import format_learner_name
from sottovoce_learner.peers.in_process import InProcessStream, InProcessTransport
from sottovoce_learner.session import Session
from sottovoce_rpc.access import release_read_slot
from sottovoce_rpc.codec import from_fields, read_hello, to_fields
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.error_status import CallOutcome
from sottovoce_rpc.learner_status import Attribution
from sottovoce_rpc.principals import Principal, Role
from sottovoce_rpc.server import HELLO_TIMEOUT_S, MAX_OVERHEAD_BYTES, open_channel
from sottovoce_wire.v1 import learner_pb2
from sottovoce_wire.v1.coordinator_pb2 import Neighbour

log = structlog.get_logger()

_METHOD = "/sottovoce_wire.v1.Learner/Exchange"
_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)


def _build_hello(session: Session, neighbour: int) -> bytes:
    """Build the Hello of this side."""
    assignment = session.assignment
    hello = learner_pb2.Hello(
        run_id=assignment.run_id,
        plan_hash=assignment.cached_run.plan_hash,
        learner=assignment.index,
        next_round=session.inbox.get_due_round(neighbour),
        fields=to_fields(session.codec.shapes),
        incarnation=assignment.incarnation,
    )
    return learner_pb2.ExchangeMessage(hello=hello).SerializeToString()


def _verify_hello(session: Session, payload: bytes, caller: Principal | None = None) -> tuple[int, int]:
    """Verify the Hello of the other side; return its index and the first round that it has not received.

    Args:
        session: session of the run.
        payload: its Hello.
        caller: principal that opened the stream, where known.

    Raises:
        PermissionDenied: it is of another run, not a neighbour, an older process of one, or uses another learner's name.
        CorruptStateError: it has received rounds that this learner's log does not have.
        RemoteProtocolError: no Hello, or of another plan or other fields: the same bytes would mean something else.
    """
    hello, assignment = read_hello(payload), session.assignment
    if hello.run_id != assignment.run_id:
        raise PermissionDenied(f"this learner is in another run than {hello.run_id!r}")
    session.inbox.get_due_round(hello.learner)
    _require_authentic(session, hello.learner, caller)
    name = assignment.spec.names[hello.learner]
    if hello.plan_hash != (plan_hash := assignment.cached_run.plan_hash):
        raise RemoteProtocolError(
            f"{name} must have the plan {plan_hash.hex()[:16]}, got {hello.plan_hash.hex()[:16]}: it has "
            "another spec, or parses it differently"
        )
    if list(hello.fields) != to_fields(session.codec.shapes):  # in order, too: it is the order of the numbers
        raise RemoteProtocolError(
            f"{name} must send the fields {session.codec.shapes}, got {from_fields(hello.fields)}"
        )
    link = session.links[hello.learner]
    if hello.incarnation < link.incarnation:
        raise PermissionDenied(
            f"{name} has connected as incarnation {link.incarnation}, got {hello.incarnation}: that is an older "
            "process, or runs on a copy of its state"
        )
    link.incarnation = hello.incarnation
    session.require_log_complete(hello.learner, hello.next_round)
    return hello.learner, hello.next_round


def _require_authentic(session: Session, learner: int, caller: Principal | None) -> None:
    """Require that the caller is the neighbour itself, or a relay accepted by the owner where the run is captured by a relay.

    Raises:
        PermissionDenied: it is not.
    """
    if caller is None:
        return
    spec, accepts = session.assignment.spec, session.policy.eavesdroppers
    if caller.role is Role.EAVESDROPPER and spec.capture == "relay":
        is_accepted = not caller.is_foreign if accepts is None else caller.is_one_of(*accepts)
        if not is_accepted:
            raise PermissionDenied(f"the owner of {session.assignment.name!r} does not accept {caller} as a relay")
        return
    if not caller.is_one_of(f"{Role.LEARNER}/{spec.names[learner]}"):
        raise PermissionDenied(f"{caller} must not send in the name of {spec.names[learner]}")


async def accept(
    session: Session, stream: grpc.aio.ServicerContext[Any, Any] | InProcessStream, caller: Principal | None = None
) -> None:
    """Serve a stream that a neighbour opened, until it ends.

    Args:
        session: session of the run.
        stream: our end of it.
        caller: principal that opened it, where known.

    Raises:
        SottovoceError: the other side erred; the caller converts it to a status.
    """
    neighbour, next_round = _verify_hello(session, await _read_first(stream), caller)
    if neighbour > session.assignment.index:
        raise RemoteProtocolError(
            "the earlier of two in the spec opens their stream: "
            f"{format_learner_name(session.assignment.spec.names, neighbour)} must wait for us"
        )
    release_read_slot()
    await stream.write(_build_hello(session, neighbour))  # before the link's first write: one operation at a time
    await _use_stream(
        session, neighbour, stream, next_round, _find_attribution(None if caller is None else caller.role)
    )


async def keep_open(
    session: Session, neighbour: Neighbour, credentials: Credentials, in_process: InProcessTransport
) -> None:
    """Keep the stream to a neighbour open until cancelled.

    Args:
        session: session of the run.
        neighbour: neighbour to connect to.
        credentials: credentials of the learner.
        in_process: learners of this process without an identity, as this one: they need no channel.
    """
    index, attempt = neighbour.index, 0
    spec = session.assignment.spec
    is_relayed = neighbour.relayed and spec.capture == "relay"  # else the other side must be the neighbour itself
    role, names = (
        (Role.EAVESDROPPER, extract_identity_names(session.policy.eavesdroppers))
        if is_relayed
        else (Role.LEARNER, (spec.names[index],))
    )
    max_bytes = session.codec.message_bytes + MAX_OVERHEAD_BYTES
    while not session.lifecycle.is_silent:
        name = names[attempt % len(names)]
        try:
            if credentials.principal is None and in_process.has_learner(neighbour.address):
                async with in_process.open_stream(neighbour.address) as stream:
                    await _greet(session, index, stream, Attribution.CLAIM)
            else:
                async with open_channel(  # a new channel: the identity may have been renewed
                    neighbour.address, role, name, credentials=credentials, max_message_bytes=max_bytes
                ) as to:
                    await _call(session, index, to, _find_attribution(role if credentials.principal else None))
            attempt = 0
        except SottovoceError as error:
            attempt += 1
            log.warning(
                "stream ended", neighbour=format_learner_name(spec.names, index), attempt=attempt, reason=str(error)
            )
        await asyncio.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])


def _find_attribution(role: Role | None) -> Attribution:
    """Return how the neighbour is identified: by the role in the certificate of the other side; None: no certificate."""
    if role is None:
        return Attribution.CLAIM
    return Attribution.RELAY if role is Role.EAVESDROPPER else Attribution.CERTIFICATE


async def _call(session: Session, neighbour: int, to: grpc.aio.Channel, attribution: Attribution) -> None:
    """Make one call, from Hello to end.

    Raises:
        SottovoceError: it broke, or the other side erred.
    """
    # No serialisers: the bytes of the log.
    method: grpc.aio.StreamStreamMultiCallable[Any, Any] = to.stream_stream(_METHOD)
    call = method()
    ending = CallOutcome(call)
    try:
        await _greet(session, neighbour, call, attribution)
    except grpc.aio.AioRpcError:
        raise Unavailable((await ending.wait_for_status()).details() or "the stream broke") from None
    finally:
        call.cancel()


async def _greet(session: Session, neighbour: int, stream: Any, attribution: Attribution) -> None:
    """Use an opened stream, from Hello to end.

    Raises:
        SottovoceError: the other side erred.
    """
    await stream.write(_build_hello(session, neighbour))
    peer, next_round = _verify_hello(session, await _read_first(stream))
    if peer != neighbour:
        names = session.assignment.spec.names
        raise PermissionDenied(
            f"expected {format_learner_name(names, neighbour)} at its address, found {format_learner_name(names, peer)}"
        )
    await _use_stream(session, neighbour, stream, next_round, attribution)


async def _read_first(stream: Any) -> bytes:
    """Return the first message.

    Raises:
        RemoteProtocolError: there is none.
    """
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            payload = await stream.read()
    except TimeoutError:
        raise RemoteProtocolError(f"expected a Hello within {HELLO_TIMEOUT_S:g} s, got nothing") from None
    if payload is grpc.aio.EOF:
        raise RemoteProtocolError("expected a Hello first, got the end of the stream")
    first: bytes = payload
    return first


async def _use_stream(session: Session, neighbour: int, stream: Any, next_round: int, attribution: Attribution) -> None:
    """Use a stream until it ends.

    Another stream in this neighbour's name replaces it, and this one must end then: the neighbour would wait on it
    forever for messages of the other one. If that stream was an impostor's, the true neighbour opens a third.

    Raises:
        Unavailable: another stream replaced it.
        RemoteProtocolError: it received a message that is not due.
    """
    link, now = session.links[neighbour], asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(None) as deadline:  # no deadline, unless displaced
            link.attach(stream, next_round, lambda: deadline.reschedule(now()))
            try:
                while (payload := await stream.read()) is not grpc.aio.EOF:
                    session.receive(neighbour, payload)
            except RemoteProtocolError as error:
                ended = session.lifecycle.has_ended
                if error.violation is not None and session.receiver.record_violation(
                    neighbour, error.violation, attribution, has_ended=ended
                ):
                    session.request_report()
                raise
            finally:
                link.detach(stream)
                await link.wait_idle()
    except TimeoutError:
        name = format_learner_name(session.assignment.spec.names, neighbour)
        raise Unavailable(f"another stream of {name} replaced this one") from None
