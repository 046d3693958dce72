"""gRPC proxy (relay) of one edge: takes the place of a learner, passes every byte on, and records a copy.

It passes any gRPC method and message unchanged. It knows only that learners send a hello first, and signatures of their messages,
which are recorded under these kinds. Each edge has a port of its own, which tells whose traffic it is. It cannot pass on what
gRPC itself adds: `user-agent`, `:authority` and compression are the proxy's own.

`StandaloneProxy` records the traffic of any gRPC server, without a change at either end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog

from sottovoce_core.errors import CaptureError, PermissionDenied, SpecError, Unavailable
from sottovoce_eavesdropper.capture_checks import EXCHANGE_METHODS, CaptureRow
from sottovoce_eavesdropper.capture_writer import WRITE_TIMEOUT_S, CaptureWriter
from sottovoce_eavesdropper.storage import open_folder, require_folder
from sottovoce_rpc.access import AccessInterceptor, Refusals
from sottovoce_rpc.addresses import require_address
from sottovoce_rpc.credentials import NO_IDENTITY, Credentials
from sottovoce_rpc.error_status import CallOutcome, abort_on_error
from sottovoce_rpc.logs import log_start
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import (
    CHANNEL_OPTIONS,
    MAX_CONCURRENT_CALLS,
    MAX_MESSAGE_BYTES,
    MAX_OVERHEAD_BYTES,
    SERVER_OPTIONS,
    Options,
    announce,
    limit_message_size,
    listen_on,
    open_channel,
    serve_until_stopped,
)
from sottovoce_rpc.signatures import is_signature
from sottovoce_rpc.tasks import Tasks, run_in_background
from sottovoce_wire.v1 import eavesdropper_pb2

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]
_Metadata = tuple[tuple[str, str | bytes], ...]

_MAX_METHOD_CHARS, MAX_PAYLOAD_BYTES = 1_024, 128 * 1024 * 1024
"""Maximum recorded characters of a method and bytes of a message: longer ones pass, but would make a capture unreadable."""

FINISH_TIMEOUT_S = 1.0
"""Time for open calls to end when a capture closes: the trailers of the last one are still on their way."""

_Record = Callable[[str, bytes], None]
_WaitForBuffer = Callable[[], Awaitable[None]]

_TRANSPORT_KEYS = frozenset(
    {
        "user-agent",
        "te",
        "content-type",
        "host",
        "grpc-timeout",
        "grpc-encoding",
        "grpc-accept-encoding",
        "grpc-previous-rpc-attempts",
    }
)
_UNREACHABLE_ADDRESS = "127.0.0.1:0"
"""Address at which no service can be reached, in place of a learner that has not joined yet."""


class GrpcProxy(grpc.GenericRpcHandler):
    """Proxy of one edge.

    Args:
        route: learners that open and accept the stream, and the address of the latter.
        capture: receives the copies.
        stream_count: streams of this edge recorded before, by an eavesdropper that died.
        end_names: names of the learners that open and accept the stream; empty: not checked.
        credentials: credentials of the eavesdropper, under which it serves and calls where channels are encrypted.
        refusals: counts refused calls.
        target: channel to the accepting side (default: a channel to the route's target, with the credentials).
        options: options of the listening side (default: for messages of the capture's fields).
    """

    def __init__(
        self,
        route: eavesdropper_pb2.Route,
        capture: CaptureWriter,
        *,
        stream_count: int = 0,
        end_names: tuple[str, str] = ("", ""),
        credentials: Credentials = NO_IDENTITY,
        refusals: Refusals | None = None,
        target: grpc.aio.Channel | None = None,
        options: Options | None = None,
    ) -> None:
        self._route, self._capture = route, capture
        self._streams = stream_count
        self._connections: dict[str, int] = {}
        self._ends, self._credentials = end_names, credentials
        self._is_own_service = target is None
        guards = [AccessInterceptor(credentials, refusals)] if self._is_own_service else []
        options = limit_message_size(SERVER_OPTIONS, self._max_message_bytes) if options is None else options
        self._server = grpc.aio.server(
            interceptors=guards, options=options, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS
        )
        self._channel, self._old_channels = target or self._open_channel(), list[grpc.aio.Channel]()

    def _open_channel(self) -> grpc.aio.Channel:
        self._channel_expiry = self._credentials.expiry
        address = self._route.target or _UNREACHABLE_ADDRESS
        return open_channel(
            address,
            Role.LEARNER,
            self._ends[1],
            credentials=self._credentials,
            max_message_bytes=self._max_message_bytes,
        )

    @property
    def _max_message_bytes(self) -> int:
        """Maximum bytes of a message, which is known for a run of ours."""
        return self._capture.codec.message_bytes + MAX_OVERHEAD_BYTES if self._capture.fields else MAX_MESSAGE_BYTES

    async def open(self, listen: str) -> str:
        """Listen with the eavesdropper's credentials; return the address.

        Raises:
            SottovoceError: the address cannot be listened on, or the identity cannot be used.
        """
        return await self.listen(listen, self._credentials.build_server_credentials(listen))

    async def listen(self, listen: str, credentials: grpc.ServerCredentials | None = None) -> str:
        """Listen on `host:port`, with TLS if there are credentials; return the address.

        Raises:
            Unavailable: the address cannot be listened on.
        """
        self._server.add_generic_rpc_handlers((self,))
        address = listen_on(self._server, listen, credentials)
        await self._server.start()
        return address

    async def redirect(self, target: str) -> None:
        """Send later calls to another address, and end open calls."""
        if target == self._route.target:
            return
        self._route.target, before = target, self._channel
        self._channel = self._open_channel()
        await before.close()

    async def stop(self) -> None:
        """Accept no new call, wait `FINISH_TIMEOUT_S` for open calls, then cut them."""
        await self._server.stop(FINISH_TIMEOUT_S)
        for each in (self._channel, *self._old_channels):
            await each.close()

    def _get_channel(self) -> grpc.aio.Channel:
        """Return the channel to the accepting side; a new one after the identity was renewed, while open calls continue."""
        if self._is_own_service and self._credentials.expiry != self._channel_expiry:
            self._old_channels.append(self._channel)
            self._channel = self._open_channel()
        return self._channel

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler of any method: streams of bytes in both directions; a unary call is a special case."""

        async def handle(requests: object, context: Context) -> None:
            async with abort_on_error(context):
                if self._is_own_service:
                    self._require_caller(context)
                await self._forward_call(details.method, context)

        return grpc.stream_stream_rpc_method_handler(handle)

    def _require_caller(self, context: Context) -> None:
        """Require that a caller with a certificate is the learner that opens this edge.

        Raises:
            PermissionDenied: it is another principal.
        """
        caller, name = self._credentials.identify_caller(context), self._ends[0]
        if caller is not None and name and not caller.is_one_of(f"{Role.LEARNER}/{name}"):
            raise PermissionDenied(f"{caller} must not send messages of {name}")

    async def _forward_call(self, method: str, context: Context) -> None:
        stream = self._streams = self._streams + 1
        connection = self._connections.setdefault(context.peer(), len(self._connections) + 1)
        record_out = self._build_recorder("out", stream, connection, method)
        record_back = self._build_recorder("back", stream, connection, method)
        record_out("metadata", _to_json({"method": method, "metadata": tuple(context.invocation_metadata() or ())}))
        metadata = _remove_transport_metadata(context.invocation_metadata())
        call: grpc.aio.StreamStreamCall[Any, Any] = self._get_channel().stream_stream(method)(
            metadata=metadata, timeout=context.time_remaining()
        )
        outcome, wait_for_buffer = CallOutcome(call), self._capture.wait_for_buffer
        try:
            async with run_in_background(_pump_requests(context, call, record_out, wait_for_buffer)):
                with contextlib.suppress(grpc.aio.AioRpcError):
                    initial = _remove_transport_metadata(await call.initial_metadata())
                    record_back("metadata", _to_json({"metadata": initial}))
                    await context.send_initial_metadata(initial)
                    await _pump(call.read, context.write, record_back, wait_for_buffer)
                status = await outcome.wait_for_status()
        finally:
            call.cancel()
        code, text, trailers = status.code(), status.details() or "", tuple(status.trailing_metadata() or ())
        record_back("trailers", _to_json({"code": code.name, "details": text, "metadata": trailers}))
        context.set_trailing_metadata(trailers)
        context.set_code(code)
        context.set_details(text)

    def _build_recorder(self, direction: str, stream: int, connection: int, method: str) -> _Record:
        caller, callee, add = self._route.caller, self._route.callee, self._capture.add_row
        sender, method = (caller if direction == "out" else callee), method[:_MAX_METHOD_CHARS]
        # Only the first message may be a hello: a later one is recorded as a message, and detected as a wrong one.
        is_first = is_exchange = method in EXCHANGE_METHODS and bool(self._capture.fields)

        def record(kind: str, payload: bytes) -> None:
            nonlocal is_first
            if kind == "message":
                kind = "hello" if is_first else "signature" if is_exchange and is_signature(payload) else kind
                is_first = False
            payload = payload[:MAX_PAYLOAD_BYTES]
            now, mono, size = time.time_ns(), time.monotonic_ns(), len(payload)
            add(
                CaptureRow(
                    caller, callee, sender, direction, kind, stream, connection, method, now, mono, size, payload
                )
            )

        return record


async def _pump(read: Any, write: Any, record: _Record, wait_for_buffer: _WaitForBuffer) -> None:
    """Pass messages on, in order, until the source ends; not faster than copies are written."""
    while (payload := await read()) is not grpc.aio.EOF:
        record("message", payload)
        await wait_for_buffer()
        await write(payload)


async def _pump_requests(
    context: Context, call: grpc.aio.StreamStreamCall[Any, Any], record: _Record, wait_for_buffer: _WaitForBuffer
) -> None:
    """Pass the caller's messages on, then the end of its stream. Reads of a broken call report it, so errors end here."""
    with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, grpc.aio.UsageError, asyncio.InvalidStateError):
        await _pump(context.read, call.write, record, wait_for_buffer)
        await call.done_writing()


def _remove_transport_metadata(metadata: Any) -> _Metadata:
    """Return metadata without the entries that the transport itself adds."""
    return tuple(
        (key, value)
        for key, value in metadata or ()
        if key not in _TRANSPORT_KEYS and not key.startswith(("grpc-internal-", ":"))
    )


def _to_json(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts, default=lambda value: value.hex() if isinstance(value, bytes) else str(value)).encode()


# ---- a relay before any gRPC server ----------------------------------------------------------------------------------


_ANY_SIZE = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
_TO_OPTIONS = (
    *(option for option in CHANNEL_OPTIONS if not option[0].endswith("message_length")),
    *_ANY_SIZE,
    ("grpc.enable_retries", 0),  # resending is the caller's choice
    ("grpc.initial_reconnect_backoff_ms", 100),  # the server may start after the proxy
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_REPLACED_OPTIONS = (
    "message_length",
    "algorithms_bitset",
    "max_concurrent_streams",
    "connection_idle_ms",
    "metadata_size",
)
_LISTEN_OPTIONS = (*(option for option in SERVER_OPTIONS if not option[0].endswith(_REPLACED_OPTIONS)), *_ANY_SIZE)


@dataclass(frozen=True, slots=True)
class StandaloneProxyConfig:
    """Configuration of a proxy in front of a foreign server.

    Attributes:
        server_address: `host:port` of the server.
        listen: `host:port` for its clients; port 0 picks a free one.
        folder: parent of the capture's folder: a path, or a URL for fsspec.
        world: 0 or 1, for an audit.
        tls_cert, tls_key: PEM files; with them, clients connect over TLS.
        server_tls: connect to the server over TLS.
        server_ca: PEM file of trusted authorities for the server (default: the system's).
    """

    server_address: str
    listen: str = "127.0.0.1:0"
    folder: str | Path = "sottovoce-captures"
    world: int | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    server_tls: bool = False
    server_ca: Path | None = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SpecError("--tls-cert and --tls-key must be given together, got one of them")
        if self.server_ca is not None and not self.server_tls:
            raise SpecError("--to-ca needs --to-tls")
        require_address(self.server_address, "--to")
        require_address(self.listen, "--listen", allow_port_zero=True)

    def build_listen_credentials(self) -> grpc.ServerCredentials | None:
        """Build credentials of the listening side; None: no TLS.

        Raises:
            SpecError: a file cannot be read.
        """
        if self.tls_cert is None or self.tls_key is None:
            return None
        return grpc.ssl_server_credentials([(_read_pem(self.tls_key), _read_pem(self.tls_cert))])

    def open_channel(self) -> grpc.aio.Channel:
        """Open a channel to the server.

        Raises:
            SpecError: the file of authorities cannot be read.
        """
        if not self.server_tls:
            return grpc.aio.insecure_channel(self.server_address, options=_TO_OPTIONS)
        authorities = None if self.server_ca is None else _read_pem(self.server_ca)
        return grpc.aio.secure_channel(
            self.server_address, grpc.ssl_channel_credentials(authorities), options=_TO_OPTIONS
        )


class StandaloneProxy:
    """A proxy in front of a foreign server, with its capture."""

    def __init__(self, config: StandaloneProxyConfig) -> None:
        self._config = config
        world = "" if config.world is None else f"world-{config.world}-"
        capture_id = f"relay-{world}{uuid.uuid4().hex[:6]}"
        require_folder(config.folder)
        self.folder = open_folder(config.folder).get_subfolder(capture_id).name
        credentials, channel = config.build_listen_credentials(), config.open_channel()
        try:
            self.writer = CaptureWriter(self.folder, capture_id, capture_id, "{}", world=config.world)
        except OSError as error:
            raise CaptureError(f"cannot write to the folder {self.folder}: {error.strerror or error}") from None
        route = eavesdropper_pb2.Route(caller=0, callee=1, target=config.server_address)
        self._proxy = GrpcProxy(route, self.writer, target=channel, options=_LISTEN_OPTIONS)
        self._credentials, self._writing = credentials, Tasks()

    async def start(self) -> str:
        """Listen; return the address.

        Raises:
            Unavailable: the address is in use, or the certificate and its key cannot be used.
        """
        try:
            address = await self._proxy.listen(self._config.listen, self._credentials)
        except Unavailable as error:
            await self.writer.close()
            if self._credentials is None:
                raise
            raise Unavailable(f"{error}, or --tls-cert and --tls-key are not a certificate and its key") from None
        self._writing.start(self.writer.write_parts(), "a capture is no longer written")
        log.info("capture opened", target=self._config.server_address, folder=self.folder)
        return address

    async def stop(self) -> None:
        """Wait for the last calls, write the rest, and close the capture."""
        await self._proxy.stop()
        await self._writing.end(WRITE_TIMEOUT_S)
        await self.writer.close()
        log.info("capture closed", messages=self.writer.message_count, bytes=self.writer.byte_count, folder=self.folder)


def _read_pem(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None


async def serve(config: StandaloneProxyConfig, *, stop_with_stdin: bool = False) -> None:
    """Run a standalone proxy in this process until it is asked to stop.

    Raises:
        SottovoceError: the address is in use, or a file cannot be used.
    """
    relay = StandaloneProxy(config)
    address = await relay.start()
    announce("relay", address=address, to=config.server_address, capture=relay.folder)
    log_start("relay", address=address, to=config.server_address, folder=relay.folder)
    await serve_until_stopped(
        lambda _: relay.stop(), stop_with_stdin=stop_with_stdin, drain_timeout_s=FINISH_TIMEOUT_S + WRITE_TIMEOUT_S
    )
