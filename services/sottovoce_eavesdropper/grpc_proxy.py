"""The relay: stands in a learner's place for one edge, passes every byte on, and keeps a copy.

It knows nothing of what passes: any gRPC method, any message; but that learners greet each other first, and sign what they
said, which is recorded as what it is. One listening port per edge tells whose traffic it is. What it cannot pass on is what
gRPC itself adds: `user-agent`, `:authority` and compression are the relay's own.

`StandaloneProxy` stands on its own in front of any gRPC server, and records what passes; neither side needs to know.
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
"""Characters of a method, and bytes of a message, that are kept: longer ones pass, but would make a capture unreadable."""

FINISH_TIMEOUT_S = 1.0
"""How long calls under way may take to end when a capture closes: the trailers of the last one are still on their way."""

_Note = Callable[[str, bytes], None]
_Room = Callable[[], Awaitable[None]]

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
"""Where nobody listens: in place of a learner that has not joined yet."""


class GrpcProxy(grpc.GenericRpcHandler):
    """One edge.

    Args:
        route: who opens the stream, who accepts it, and where the latter listens.
        capture: gets the copies.
        streams: of this edge that were recorded before, by an eavesdropper that died.
        ends: names of who opens the stream and who accepts it; empty: anybody.
        credentials: of the eavesdropper, as which it stands in the middle where channels are encrypted.
        refused: counts calls that are.
        to: leads to whoever accepts (default: a channel to the route's target, by the credentials).
        options: of the listening side (default: for messages of the fields of the capture).
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
        self._own = target is None  # else of a service that is not ours, and of its clients
        guards = [AccessInterceptor(credentials, refusals)] if self._own else []
        options = limit_message_size(SERVER_OPTIONS, self._most) if options is None else options
        self._server = grpc.aio.server(
            interceptors=guards, options=options, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS
        )
        self._to, self._before = target or self._channel(), list[grpc.aio.Channel]()

    def _channel(self) -> grpc.aio.Channel:
        self._shown = self._credentials.expiry
        to = self._route.target or _UNREACHABLE_ADDRESS
        return open_channel(
            to, Role.LEARNER, self._ends[1], credentials=self._credentials, max_message_bytes=self._most
        )

    @property
    def _most(self) -> int:
        """Bytes of the longest message that passes: of a run of ours it is known how long they are."""
        return self._capture.codec.message_bytes + MAX_OVERHEAD_BYTES if self._capture.fields else MAX_MESSAGE_BYTES

    async def open(self, listen: str) -> str:
        """Listen as the eavesdropper does; returns the address.

        Raises:
            SottovoceError: the address cannot be listened on, or the identity cannot be used.
        """
        return await self.listen(listen, self._credentials.build_server_credentials(listen))

    async def listen(self, listen: str, credentials: grpc.ServerCredentials | None = None) -> str:
        """Listen on `host:port`, with TLS if there are credentials; returns the address.

        Raises:
            Unavailable: the address cannot be listened on.
        """
        self._server.add_generic_rpc_handlers((self,))
        address = listen_on(self._server, listen, credentials)
        await self._server.start()
        return address

    async def redirect(self, target: str) -> None:
        """Whoever accepts is at another address now: calls under way end, and later ones lead there."""
        if target == self._route.target:
            return
        self._route.target, before = target, self._to
        self._to = self._channel()
        await before.close()

    async def stop(self) -> None:
        """Take no new call, let those under way end within `FINISH_TIMEOUT_S`, and cut what still passes then."""
        await self._server.stop(FINISH_TIMEOUT_S)
        for each in (self._to, *self._before):
            await each.close()

    def _leading(self) -> grpc.aio.Channel:
        """To whoever accepts; a new one where the identity was renewed since, and calls under way go on."""
        if self._own and self._credentials.expiry != self._shown:
            self._before.append(self._to)
            self._to = self._channel()
        return self._to

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """Every method is passed on as a stream of bytes in both directions; a unary call is a stream of one."""

        async def handle(requests: object, context: Context) -> None:
            async with abort_on_error(context):
                if self._own:
                    self._require_caller(context)
                await self._pass(details.method, context)

        return grpc.stream_stream_rpc_method_handler(handle)

    def _require_caller(self, context: Context) -> None:
        """The learner that opens this edge, and nobody else who has shown a certificate.

        Raises:
            PermissionDenied: somebody else does.
        """
        caller, name = self._credentials.identify_caller(context), self._ends[0]
        if caller is not None and name and not caller.is_one_of(f"{Role.LEARNER}/{name}"):
            raise PermissionDenied(f"{caller} must not speak for {name}")

    async def _pass(self, method: str, context: Context) -> None:
        stream = self._streams = self._streams + 1
        connection = self._connections.setdefault(context.peer(), len(self._connections) + 1)
        note_out = self._noter("out", stream, connection, method)
        note_back = self._noter("back", stream, connection, method)
        note_out("metadata", _as_json({"method": method, "metadata": tuple(context.invocation_metadata() or ())}))
        metadata = _passable(context.invocation_metadata())
        call: grpc.aio.StreamStreamCall[Any, Any] = self._leading().stream_stream(method)(
            metadata=metadata, timeout=context.time_remaining()
        )
        ending, room = CallOutcome(call), self._capture.wait_for_buffer
        try:
            async with run_in_background(_pump_out(context, call, note_out, room)):
                with contextlib.suppress(grpc.aio.AioRpcError):
                    introduction = _passable(await call.initial_metadata())
                    note_back("metadata", _as_json({"metadata": introduction}))
                    await context.send_initial_metadata(introduction)
                    await _pump(call.read, context.write, note_back, room)
                status = await ending.wait_for_status()
        finally:
            call.cancel()
        code, text, trailers = status.code(), status.details() or "", tuple(status.trailing_metadata() or ())
        note_back("trailers", _as_json({"code": code.name, "details": text, "metadata": trailers}))
        context.set_trailing_metadata(trailers)
        context.set_code(code)
        context.set_details(text)

    def _noter(self, direction: str, stream: int, connection: int, method: str) -> _Note:
        caller, callee, add = self._route.caller, self._route.callee, self._capture.add_row
        sender, method = (caller if direction == "out" else callee), method[:_MAX_METHOD_CHARS]
        # The first thing that is said, and no other: a hello in the middle is looked at as what it is, a wrong message.
        greeting = ours = method in EXCHANGE_METHODS and bool(self._capture.fields)

        def note(kind: str, payload: bytes) -> None:
            nonlocal greeting
            if kind == "message":
                kind, greeting = "hello" if greeting else "signature" if ours and is_signature(payload) else kind, False
            payload = payload[:MAX_PAYLOAD_BYTES]
            now, mono, size = time.time_ns(), time.monotonic_ns(), len(payload)
            add(
                CaptureRow(
                    caller, callee, sender, direction, kind, stream, connection, method, now, mono, size, payload
                )
            )

        return note


async def _pump(read: Any, write: Any, note: _Note, room: _Room) -> None:
    """Pass messages on, in order, until the source ends; not faster than copies are written."""
    while (payload := await read()) is not grpc.aio.EOF:
        note("message", payload)
        await room()
        await write(payload)


async def _pump_out(context: Context, call: grpc.aio.StreamStreamCall[Any, Any], note: _Note, room: _Room) -> None:
    """Pass the caller's messages on, then its end. A broken call shows at its reading end, so here it just ends."""
    with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, grpc.aio.UsageError, asyncio.InvalidStateError):
        await _pump(context.read, call.write, note, room)
        await call.done_writing()


def _passable(metadata: Any) -> _Metadata:
    """Metadata without what the transport adds by itself."""
    return tuple(
        (key, value)
        for key, value in metadata or ()
        if key not in _TRANSPORT_KEYS and not key.startswith(("grpc-internal-", ":"))
    )


def _as_json(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts, default=lambda value: value.hex() if isinstance(value, bytes) else str(value)).encode()


# ---- a relay before any gRPC server ----------------------------------------------------------------------------------


_ANY_SIZE = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
_TO_OPTIONS = (
    *(option for option in CHANNEL_OPTIONS if not option[0].endswith("message_length")),
    *_ANY_SIZE,
    ("grpc.enable_retries", 0),  # what is said again is the caller's choice
    ("grpc.initial_reconnect_backoff_ms", 100),  # the server may start after the relay
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
    """A relay in front of a server that is not ours.

    Attributes:
        to: `host:port` of the server.
        listen: `host:port` for its clients; port 0 picks one.
        folder: gets one folder with a capture: a path, or a URL for fsspec.
        world: 0 or 1, for an audit.
        tls_cert, tls_key: PEM files; with them, clients speak TLS.
        to_tls: the server speaks TLS.
        to_ca: PEM file with the authorities that vouch for the server (default: the system's).
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
            raise SpecError("--tls-cert and --tls-key belong together, got one of them")
        if self.server_ca is not None and not self.server_tls:
            raise SpecError("--to-ca needs --to-tls")
        require_address(self.server_address, "--to")
        require_address(self.listen, "--listen", allow_port_zero=True)

    def build_listen_credentials(self) -> grpc.ServerCredentials | None:
        """Of the side where clients call; None: no TLS.

        Raises:
            SpecError: a file cannot be read.
        """
        if self.tls_cert is None or self.tls_key is None:
            return None
        return grpc.ssl_server_credentials([(_pem(self.tls_key), _pem(self.tls_cert))])

    def open_channel(self) -> grpc.aio.Channel:
        """To the server.

        Raises:
            SpecError: the file of authorities cannot be read.
        """
        if not self.server_tls:
            return grpc.aio.insecure_channel(self.server_address, options=_TO_OPTIONS)
        authorities = None if self.server_ca is None else _pem(self.server_ca)
        return grpc.aio.secure_channel(
            self.server_address, grpc.ssl_channel_credentials(authorities), options=_TO_OPTIONS
        )


class StandaloneProxy:
    """One relay and its capture."""

    def __init__(self, config: StandaloneProxyConfig) -> None:
        self._config = config
        world = "" if config.world is None else f"world-{config.world}-"
        capture_id = f"relay-{world}{uuid.uuid4().hex[:6]}"
        require_folder(config.folder)
        self.folder = open_folder(config.folder).get_subfolder(capture_id).name
        credentials, to = config.build_listen_credentials(), config.open_channel()
        try:
            self.writer = CaptureWriter(self.folder, capture_id, capture_id, "{}", world=config.world)
        except OSError as error:
            raise CaptureError(f"cannot write to the folder {self.folder}: {error.strerror or error}") from None
        route = eavesdropper_pb2.Route(caller=0, callee=1, target=config.server_address)
        self._relay, self._credentials = GrpcProxy(route, self.writer, target=to, options=_LISTEN_OPTIONS), credentials
        self._writing = Tasks()

    async def start(self) -> str:
        """Listen; returns the address.

        Raises:
            Unavailable: the address is taken, or the certificate and its key cannot be used.
        """
        try:
            address = await self._relay.listen(self._config.listen, self._credentials)
        except Unavailable as error:
            await self.writer.close()
            if self._credentials is None:
                raise
            raise Unavailable(f"{error}, or --tls-cert and --tls-key are not a certificate and its key") from None
        self._writing.start(self.writer.write_parts(), "a capture is no longer written")
        log.info("capture opened", to=self._config.server_address, folder=self.folder)
        return address

    async def stop(self) -> None:
        """Let the last calls end, write the rest, close the capture."""
        await self._relay.stop()
        await self._writing.end(WRITE_TIMEOUT_S)
        await self.writer.close()
        log.info("capture closed", messages=self.writer.message_count, bytes=self.writer.byte_count, folder=self.folder)


def _pem(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None


async def serve(config: StandaloneProxyConfig, *, stop_with_stdin: bool = False) -> None:
    """Run a relay in this process until it is told to stop.

    Raises:
        SottovoceError: the address is taken, or a file cannot be used.
    """
    relay = StandaloneProxy(config)
    address = await relay.start()
    announce("relay", address=address, to=config.server_address, capture=relay.folder)
    log_start("relay", address=address, to=config.server_address, folder=relay.folder)
    await serve_until_stopped(
        lambda _: relay.stop(), stop_with_stdin=stop_with_stdin, drain_timeout_s=FINISH_TIMEOUT_S + WRITE_TIMEOUT_S
    )
