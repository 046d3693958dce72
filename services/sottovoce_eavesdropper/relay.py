"""The relay: stands in a learner's place for one edge, passes every byte on, and keeps a copy.

It knows nothing of what passes: any gRPC method, any message. One listening port per edge tells whose traffic it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import grpc
import structlog

from sottovoce_eavesdropper.records import CaptureFile
from sottovoce_rpc.server import SERVER_OPTIONS, channel, listen_on
from sottovoce_wire.v1 import eavesdropper_pb2

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]
Metadata = tuple[tuple[str, str | bytes], ...]

_TRANSPORT_KEYS = frozenset({"user-agent", "te", "content-type"})


class Relay(grpc.GenericRpcHandler):
    """One edge.

    Args:
        route: who opens the stream, who accepts it, and where the latter listens.
        capture: gets the copies.
    """

    def __init__(self, route: eavesdropper_pb2.Route, capture: CaptureFile) -> None:
        self._route, self._capture = route, capture
        self._streams = 0
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._to = channel(route.target)

    async def start(self, host: str) -> str:
        """Listen on a free port of `host`; returns the address."""
        self._server.add_generic_rpc_handlers((self,))
        address = listen_on(self._server, f"{host}:0")
        await self._server.start()
        return address

    async def stop(self) -> None:
        """Cut what still passes."""
        await self._server.stop(0)
        await self._to.close()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """Every method is passed on as a stream of bytes in both directions; a unary call is a stream of one."""

        async def handle(requests: object, context: Context) -> None:
            await self._pass(details.method, context)

        return grpc.stream_stream_rpc_method_handler(handle)

    async def _pass(self, method: str, context: Context) -> None:
        stream = self._streams = self._streams + 1
        note_out = self._noter("out", stream, self._route.caller)
        note_back = self._noter("back", stream, self._route.callee)
        note_out("metadata", _as_json({"method": method, "metadata": tuple(context.invocation_metadata() or ())}))
        metadata = _passable(context.invocation_metadata())
        call: grpc.aio.StreamStreamCall[Any, Any] = self._to.stream_stream(method)(metadata=metadata)
        there = asyncio.ensure_future(_pump_out(context, call, note_out))
        try:
            introduction = _passable(await call.initial_metadata())
            note_back("metadata", _as_json({"metadata": introduction}))
            await context.send_initial_metadata(introduction)
            await _pump(call.read, context.write, note_back)
            code, text, trailers = await call.code(), await call.details(), tuple(await call.trailing_metadata())
        except grpc.aio.AioRpcError as error:
            code, text, trailers = error.code(), error.details() or "", tuple(error.trailing_metadata() or ())
        finally:
            there.cancel()
            call.cancel()
        note_back("trailers", _as_json({"code": code.name, "details": text, "metadata": trailers}))
        context.set_trailing_metadata(trailers)
        if code is not grpc.StatusCode.OK:
            context.set_code(code)
            context.set_details(text)

    def _noter(self, direction: str, stream: int, sender: int) -> Callable[[str, bytes], None]:
        caller, callee, add = self._route.caller, self._route.callee, self._capture.add

        def note(kind: str, payload: bytes) -> None:
            add(
                (
                    caller,
                    callee,
                    sender,
                    direction,
                    kind,
                    stream,
                    time.time_ns(),
                    time.monotonic_ns(),
                    len(payload),
                    payload,
                )
            )

        return note


async def _pump(read: Any, write: Any, note: Callable[[str, bytes], None]) -> None:
    """Pass messages on, in order, until the source ends."""
    while (payload := await read()) is not grpc.aio.EOF:
        note("message", payload)
        await write(payload)


async def _pump_out(
    context: Context, call: grpc.aio.StreamStreamCall[Any, Any], note: Callable[[str, bytes], None]
) -> None:
    """Pass the caller's messages on, then its end. A broken call shows at its reading end, so here it just ends."""
    with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, grpc.aio.UsageError, asyncio.InvalidStateError):
        await _pump(context.read, call.write, note)
        await call.done_writing()


def _passable(metadata: Any) -> Metadata:
    """Metadata without what the transport adds by itself."""
    return tuple(
        (key, value)
        for key, value in metadata or ()
        if key not in _TRANSPORT_KEYS and not key.startswith(("grpc-", ":"))
    )


def _as_json(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts, default=lambda value: value.hex() if isinstance(value, bytes) else str(value)).encode()
