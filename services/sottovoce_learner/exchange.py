"""The channels between neighbours: who opens them, how both sides introduce themselves, and what comes in.

The learner with the lower index opens the stream and opens it again when it breaks; the other one accepts. Both introduce
themselves in their initial metadata (see learner.proto). An error of the other side ends its stream with a status that says
why; nothing of ours changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import structlog

from sottovoce.errors import NotReady, RemoteProtocolError, SottovoceError, StrangerError, Unavailable
from sottovoce_learner.session import Session
from sottovoce_rpc.codec import decode_round
from sottovoce_rpc.server import channel

log = structlog.get_logger()

METHOD = "/sottovoce_wire.v1.Learner/Exchange"
RUN, LEARNER, NEXT_ROUND = "sottovoce-run", "sottovoce-learner", "sottovoce-next-round"
BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)

Metadata = Sequence[tuple[str, str | bytes]]


def introduction(session: Session, neighbour: int) -> tuple[tuple[str, str], ...]:
    """What this side says of itself when a stream is opened."""
    facts = {
        RUN: session.assignment.run_id,
        LEARNER: session.assignment.index,
        NEXT_ROUND: session.inbox.next_round(neighbour),
    }
    return tuple((key, str(value)) for key, value in facts.items())


def introduced(session: Session, metadata: Metadata) -> tuple[int, int]:
    """Index of the other side, and the first round that it has not heard.

    Raises:
        StrangerError: of another run, or not a neighbour.
        RemoteProtocolError: the introduction is incomplete.
    """
    facts = {key: value for key, value in metadata if isinstance(value, str)}
    if facts.get(RUN) != session.assignment.run_id:
        raise StrangerError(f"this learner is in another run than {facts.get(RUN)!r}")
    try:
        neighbour, next_round = int(facts[LEARNER]), int(facts[NEXT_ROUND])
    except (KeyError, ValueError):
        raise RemoteProtocolError(f"an introduction needs the numbers {LEARNER} and {NEXT_ROUND}") from None
    session.inbox.next_round(neighbour)
    return neighbour, next_round


async def accept(session: Session | None, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Serve a stream that a neighbour opened, until it ends.

    Raises:
        SottovoceError: the other side erred; the caller makes a status of it.
    """
    if session is None:
        raise NotReady("this learner is not in a run")
    neighbour, next_round = introduced(session, tuple(context.invocation_metadata() or ()))
    if neighbour > session.assignment.index:
        raise RemoteProtocolError(f"the lower index opens the stream: learner {neighbour} must wait for us")
    await context.send_initial_metadata(introduction(session, neighbour))  # before any write: one operation at a time
    await _hold(session, neighbour, context, next_round)


async def keep_open(session: Session, neighbour: int, address: str) -> None:
    """Hold the stream to a neighbour open until cancelled."""
    attempt = 0
    async with channel(address) as to:
        method: grpc.aio.StreamStreamMultiCallable[Any, Any] = to.stream_stream(
            METHOD
        )  # no serialisers: bytes as they were journaled
        while not session.silent:
            call = method(metadata=introduction(session, neighbour))
            try:
                attempt = 0 if await _converse(session, neighbour, call) else attempt + 1
            except (grpc.aio.AioRpcError, SottovoceError) as error:
                attempt += 1
                text = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                log.warning("stream ended", neighbour=neighbour, attempt=attempt, reason=text)
            finally:
                call.cancel()
            await asyncio.sleep(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)])


async def _converse(session: Session, neighbour: int, call: grpc.aio.StreamStreamCall[Any, Any]) -> bool:
    """One stream, from introduction to end; True when it was used."""
    metadata = await call.initial_metadata()
    if LEARNER not in dict(metadata):  # refused: the status says why
        raise RemoteProtocolError(f"refused by learner {neighbour}: {await call.details() or 'no reason given'}")
    peer, next_round = introduced(session, tuple(metadata))
    if peer != neighbour:
        raise StrangerError(f"expected learner {neighbour} at its address, found learner {peer}")
    await _hold(session, neighbour, call, next_round)
    return True


async def _hold(session: Session, neighbour: int, stream: Any, next_round: int) -> None:
    """Use a stream until it ends.

    Another stream in this neighbour's name takes its place, and it must end then: the neighbour would wait on it for ever
    for what is said on the other one. If that was an impostor's, the true neighbour opens a third.

    Raises:
        Unavailable: another stream took its place.
    """
    link, now = session.links[neighbour], asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(None) as held:  # no deadline, unless displaced
            link.attach(stream, next_round, lambda: held.reschedule(now()))
            try:
                await _listen(session, neighbour, stream)
            finally:
                link.detach(stream)
    except TimeoutError:
        raise Unavailable(f"another stream of learner {neighbour} took the place of this one") from None


async def _listen(session: Session, neighbour: int, stream: Any) -> None:
    """Take in what comes until the stream ends."""
    while (payload := await stream.read()) is not grpc.aio.EOF:
        session.hear(neighbour, *decode_round(payload, session.shapes))
