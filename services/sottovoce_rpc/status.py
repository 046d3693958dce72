"""Errors of this project as gRPC status, and back: the one table."""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import structlog
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from sottovoce import errors

_CODES: tuple[tuple[type[errors.SottovoceError], grpc.StatusCode], ...] = (  # the first class that fits
    (errors.StrangerError, grpc.StatusCode.PERMISSION_DENIED),
    (errors.RemoteProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.DataError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.SpecError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.BudgetExhausted, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.NotReady, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.CaptureError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.SottovoceError, grpc.StatusCode.INTERNAL),
)
DOMAIN = "sottovoce"

log = structlog.get_logger()


@asynccontextmanager
async def answering(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """End the call with the status that an error of ours stands for, details attached (`google.rpc.Status`).

    Of any other error, which is a bug, neither the peer nor the log gets the text.
    """
    try:
        yield
    except errors.SottovoceError as error:
        code = next(code for kind, code in _CODES if isinstance(error, kind))
        await context.abort(code, str(error), (("grpc-status-details-bin", _details(code, error)),))
    except grpc.aio.BaseError:  # an abort, or the end of the connection
        raise
    except Exception as error:  # noqa: BLE001 - gRPC would send its text, and that may quote a record
        frame = traceback.extract_tb(error.__traceback__)[-1]
        log.error("bug", kind=type(error).__name__, where=f"{frame.filename}:{frame.lineno}")
        await context.abort(grpc.StatusCode.INTERNAL, "an internal error; the log of the service says where")


def _details(code: grpc.StatusCode, error: errors.SottovoceError) -> bytes:
    info = error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=DOMAIN)
    if isinstance(error, errors.CheckFailed):
        info.metadata["code"] = error.code
    packed = any_pb2.Any()
    packed.Pack(info)
    packed_status: bytes = status_pb2.Status(
        code=code.value[0], message=str(error), details=[packed]
    ).SerializeToString()
    return packed_status


def as_error(failure: grpc.aio.AioRpcError, who: str) -> errors.SottovoceError:
    """What a failed call means to its caller: our own class where the status carries one."""
    text = failure.details() or failure.code().name
    if failure.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return errors.Unavailable(f"cannot reach {who}: {text}")
    for key, value in failure.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            kind = getattr(errors, _reason(value), None)
            if isinstance(kind, type) and issubclass(kind, errors.SottovoceError) and kind is not errors.CheckFailed:
                return kind(text)
    if failure.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return errors.SpecError(text)
    return errors.SottovoceError(f"{who}: {text} ({failure.code().name})")


def _reason(packed: bytes) -> str:
    """Name of our class, empty where the details are somebody else's or no details at all."""
    info = error_details_pb2.ErrorInfo()
    try:
        for detail in status_pb2.Status.FromString(packed).details:
            if detail.Unpack(info) and info.domain == DOMAIN:
                return str(info.reason)
    except DecodeError:
        pass
    return ""
