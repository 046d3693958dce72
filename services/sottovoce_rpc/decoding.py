"""Requests that are no message of their method are refused as such."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from sottovoce.errors import RemoteProtocolError
from sottovoce_rpc.status import answering

_WITH_RECORDS = frozenset({"/sottovoce_wire.v1.Learner/Predict"})
"""Single requests that may be as long as any message."""

_Context = grpc.aio.ServicerContext[Any, Any]


class Decoding(grpc.aio.ServerInterceptor):
    """Reads single requests in gRPC's place, which answers UNKNOWN, with the text of an exception, and logs a traceback.

    Messages of a stream are read where they are asked for, and refused there (`answering`).

    Args:
        longest: bytes of a request without records: read, it may take ten times as much memory.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a method, which gets the message that the bytes are."""
        found = await continuation(handler_call_details)
        handler: Any = found
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return found
        longest = None if handler_call_details.method in _WITH_RECORDS else self._longest
        decode = _within(longest, handler.request_deserializer)
        if not handler.response_streaming:

            async def answer(raw: bytes, context: _Context) -> Any:
                request = await _decoded(decode, raw, context)
                del raw  # the request has its own copy
                return await handler.unary_unary(request, context)

            return grpc.unary_unary_rpc_method_handler(answer, None, handler.response_serializer)

        if inspect.isasyncgenfunction(handler.unary_stream):

            async def answers(raw: bytes, context: _Context) -> AsyncIterator[Any]:
                async for each in handler.unary_stream(await _decoded(decode, raw, context), context):
                    yield each

            return grpc.unary_stream_rpc_method_handler(answers, None, handler.response_serializer)

        async def written(raw: bytes, context: _Context) -> None:
            await handler.unary_stream(await _decoded(decode, raw, context), context)

        return grpc.unary_stream_rpc_method_handler(written, None, handler.response_serializer)


async def _decoded(decode: Callable[[bytes], Any], raw: bytes, context: _Context) -> Any:
    async with answering(context):
        return decode(raw)


def _within(longest: int | None, decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def bounded(raw: bytes) -> Any:
        if longest is not None and len(raw) > longest:
            raise RemoteProtocolError(f"a request must have at most {longest} bytes, got {len(raw)}")
        return decode(raw)

    return bounded
