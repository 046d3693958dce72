"""The channels between neighbours: who opens them, what both agree on first, and what comes in.

The learner with the lower index opens the stream and opens it again when it breaks; the other one accepts. The first message
in each direction is a Hello (learner.proto), the caller's first. An error of the other side ends its stream with a status
that says why; nothing of ours changes.
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


def _hello(session: Session, neighbour: int) -> bytes:
    """What this side says of itself when a stream is opened."""
    told = session.assignment
    said = learner_pb2.Hello(
        run_id=told.run_id,
        plan_hash=told.cached_run.plan_hash,
        learner=told.index,
        next_round=session.inbox.get_due_round(neighbour),
        fields=to_fields(session.codec.shapes),
        incarnation=told.incarnation,
    )
    return learner_pb2.ExchangeMessage(hello=said).SerializeToString()


def _greeted(session: Session, payload: bytes, caller: Principal | None = None) -> tuple[int, int]:
    """Index of the other side, and the first round that it has not heard.

    Args:
        session: of the run.
        payload: its Hello.
        caller: who has opened the stream, where that is known.

    Raises:
        PermissionDenied: of another run, not a neighbour, or an older process of one; or it speaks in another one's name.
        DataError: it has heard rounds that this learner's log does not have.
        RemoteProtocolError: no Hello, or of another plan or other fields: the same words would mean something else.
    """
    said, told = read_hello(payload), session.assignment
    if said.run_id != told.run_id:
        raise PermissionDenied(f"this learner is in another run than {said.run_id!r}")
    session.inbox.get_due_round(said.learner)
    _require_itself(session, said.learner, caller)
    name = told.spec.names[said.learner]
    if said.plan_hash != (ours := told.cached_run.plan_hash):
        raise RemoteProtocolError(
            f"{name} must have the plan {ours.hex()[:16]}, got {said.plan_hash.hex()[:16]}: it was told "
            "another spec, or reads it in another way"
        )
    if list(said.fields) != to_fields(session.codec.shapes):  # in their order, too: it is that of the numbers
        raise RemoteProtocolError(f"{name} must say the fields {session.codec.shapes}, got {from_fields(said.fields)}")
    link = session.links[said.learner]
    if said.incarnation < link.incarnation:
        raise PermissionDenied(
            f"{name} has greeted as incarnation {link.incarnation}, got {said.incarnation}: that is an older "
            "process, or runs on a copy of its state"
        )
    link.incarnation = said.incarnation
    session.require_log_complete(said.learner, said.next_round)
    return said.learner, said.next_round


def _require_itself(session: Session, learner: int, caller: Principal | None) -> None:
    """A neighbour speaks for itself; a relay that the owner accepts for whoever speaks through it, where the run is overheard so.

    Raises:
        PermissionDenied: somebody else does.
    """
    if caller is None:
        return
    spec, accepts = session.assignment.spec, session.policy.eavesdroppers
    if caller.role is Role.EAVESDROPPER and spec.capture == "relay":
        is_accepted = not caller.is_foreign if accepts is None else caller.is_one_of(*accepts)
        if not is_accepted:
            raise PermissionDenied(f"the owner of {session.assignment.name!r} accepts no recording by {caller}")
        return
    if not caller.is_one_of(f"{Role.LEARNER}/{spec.names[learner]}"):
        raise PermissionDenied(f"{caller} must not speak for {spec.names[learner]}")


async def accept(
    session: Session, stream: grpc.aio.ServicerContext[Any, Any] | InProcessStream, caller: Principal | None = None
) -> None:
    """Serve a stream that a neighbour opened, until it ends.

    Args:
        session: of the run.
        stream: our end of it.
        caller: who has opened it, where that is known.

    Raises:
        SottovoceError: the other side erred; the caller makes a status of it.
    """
    neighbour, next_round = _greeted(session, await _first(stream), caller)
    if neighbour > session.assignment.index:
        raise RemoteProtocolError(
            f"the earlier of two in the spec opens their stream: {format_learner_name(session.assignment.spec.names, neighbour)} must wait for us"
        )
    release_read_slot()
    await stream.write(_hello(session, neighbour))  # before the link's first write: one operation at a time
    await _hold(session, neighbour, stream, next_round, _known_by(None if caller is None else caller.role))


async def keep_open(
    session: Session, neighbour: Neighbour, credentials: Credentials, in_process: InProcessTransport
) -> None:
    """Hold the stream to a neighbour open until cancelled.

    Args:
        session: of the run.
        neighbour: whom to meet.
        credentials: of the learner.
        nearby: learners of this process that show no identity, as this one: they are met without a channel.
    """
    index, attempt = neighbour.index, 0
    spec = session.assignment.spec
    overheard = (
        neighbour.relayed and spec.capture == "relay"
    )  # else whoever is there must be the neighbour, whatever we are told
    role, names = (
        (Role.EAVESDROPPER, extract_identity_names(session.policy.eavesdroppers))
        if overheard
        else (Role.LEARNER, (spec.names[index],))
    )
    most = session.codec.message_bytes + MAX_OVERHEAD_BYTES
    while not session.lifecycle.is_silent:
        name = names[attempt % len(names)]
        try:
            if credentials.principal is None and in_process.has_learner(neighbour.address):
                async with in_process.open_stream(neighbour.address) as stream:
                    await _greet(session, index, stream, Attribution.CLAIM)
            else:
                async with open_channel(  # a new one: it may be renewed
                    neighbour.address, role, name, credentials=credentials, max_message_bytes=most
                ) as to:
                    await _converse(session, index, to, _known_by(role if credentials.principal else None))
            attempt = 0
        except SottovoceError as error:
            attempt += 1
            log.warning(
                "stream ended", neighbour=format_learner_name(spec.names, index), attempt=attempt, reason=str(error)
            )
        await asyncio.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])


def _known_by(role: Role | None) -> Attribution:
    """How it is known that a neighbour speaks: by the role in the certificate of whoever is there; None: it showed none."""
    if role is None:
        return Attribution.CLAIM
    return Attribution.RELAY if role is Role.EAVESDROPPER else Attribution.CERTIFICATE


async def _converse(session: Session, neighbour: int, to: grpc.aio.Channel, known_by: Attribution) -> None:
    """One call, from hello to end.

    Raises:
        SottovoceError: it broke, or the other side erred.
    """
    # No serialisers: bytes as they were journaled.
    method: grpc.aio.StreamStreamMultiCallable[Any, Any] = to.stream_stream(_METHOD)
    call = method()
    ending = CallOutcome(call)
    try:
        await _greet(session, neighbour, call, known_by)
    except grpc.aio.AioRpcError:
        raise Unavailable((await ending.wait_for_status()).details() or "the stream broke") from None
    finally:
        call.cancel()


async def _greet(session: Session, neighbour: int, stream: Any, known_by: Attribution) -> None:
    """A stream that was opened, from hello to end.

    Raises:
        SottovoceError: the other side erred.
    """
    await stream.write(_hello(session, neighbour))
    peer, next_round = _greeted(session, await _first(stream))
    if peer != neighbour:
        names = session.assignment.spec.names
        raise PermissionDenied(
            f"expected {format_learner_name(names, neighbour)} at its address, found {format_learner_name(names, peer)}"
        )
    await _hold(session, neighbour, stream, next_round, known_by)


async def _first(stream: Any) -> bytes:
    """The first message that comes.

    Raises:
        RemoteProtocolError: none does.
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


async def _hold(session: Session, neighbour: int, stream: Any, next_round: int, known_by: Attribution) -> None:
    """Use a stream until it ends.

    Another stream in this neighbour's name takes its place, and it must end then: the neighbour would wait on it for ever
    for what is said on the other one. If that was an impostor's, the true neighbour opens a third.

    Raises:
        Unavailable: another stream took its place.
        RemoteProtocolError: what came is not what is due.
    """
    link, now = session.links[neighbour], asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(None) as held:  # no deadline, unless displaced
            link.attach(stream, next_round, lambda: held.reschedule(now()))
            try:
                while (payload := await stream.read()) is not grpc.aio.EOF:
                    session.receive(neighbour, payload)
            except RemoteProtocolError as error:
                ended = session.lifecycle.has_ended
                if error.violation is not None and session.receiver.record_violation(
                    neighbour, error.violation, known_by, has_ended=ended
                ):
                    session.request_report()
                raise
            finally:
                link.detach(stream)
                await link.wait_idle()
    except TimeoutError:
        name = format_learner_name(session.assignment.spec.names, neighbour)
        raise Unavailable(f"another stream of {name} took the place of this one") from None
