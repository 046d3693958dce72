"""gRPC proxy (relay) of one edge: takes the place of a learner, passes every byte on, and records calls, messages and frames.

It passes any gRPC method and message unchanged. It knows only that learners send a hello first, and signatures of their messages,
which are recorded under these kinds. Each edge has a port of its own, which tells whose traffic it is.

`StandaloneProxy` records the traffic of any gRPC server, without a change at either end.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import grpc
import structlog

from sottovoce_core.errors import CaptureError, PermissionDenied, SottovoceError, SpecError, Unavailable
from sottovoce_eavesdropper.capture_checks import EXCHANGE_METHODS, CaptureRow
from sottovoce_eavesdropper.capture_writer import WRITE_TIMEOUT_S, CaptureWriter, prefer_messages
from sottovoce_eavesdropper.http2 import Direction, Event, GrpcDecoder, GrpcRefusal
from sottovoce_eavesdropper.proxy import Proxy
from sottovoce_eavesdropper.storage import open_folder, require_folder
from sottovoce_rpc.access import CONDITION, ROLE, UNTRUSTED, UNTRUSTED_CALLER_TEXT, Refusals
from sottovoce_rpc.addresses import format_peer, require_address
from sottovoce_rpc.credentials import NO_IDENTITY, Credentials
from sottovoce_rpc.logs import log_start
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import MAX_OVERHEAD_BYTES, announce, serve_until_stopped
from sottovoce_rpc.signatures import is_signature
from sottovoce_rpc.tasks import Tasks
from sottovoce_wire.v1 import eavesdropper_pb2

log = structlog.get_logger()

_MAX_METHOD_CHARS, MAX_PAYLOAD_BYTES = 1_024, 128 * 1024 * 1024
"""Maximum recorded characters of a method and bytes of a message: longer ones pass, but would make a capture unreadable."""

_FRAMES_INTERVAL_NS, _MAX_PASSED_BYTES = 1_000_000_000, 1024 * 1024
"""Time, and number of passed bytes, after which the frames so far become a row, with the next bytes that pass."""

FINISH_TIMEOUT_S = 1.0
"""Time for open calls to end when a capture closes: the trailers of the last one are still on their way."""
_PROTOCOLS = ("h2",)
"""Protocols over TLS (ALPN), as gRPC requires."""


class GrpcProxy(Proxy):
    """Proxy of one edge.

    Args:
        route: learners that open and accept the stream, and the address of the latter.
        capture: receives the copies.
        stream_count: streams of this edge recorded before, by an eavesdropper that died.
        end_names: names of the learners that open and accept the stream; empty: not checked.
        credentials: credentials of the eavesdropper, under which it serves and calls where channels are encrypted.
        refusals: counts refused callers.
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
    ) -> None:
        super().__init__(route, capture)
        self._end_names, self._credentials, self._refusals = end_names, credentials, refusals or Refusals()
        self._stream_count = stream_count
        self.stop_timeout_s = FINISH_TIMEOUT_S
        self._require_local_target()

    def build_recorder(self, number: int) -> GrpcRecorder:
        return GrpcRecorder(self.route, self.capture, number, self._number_stream)

    @property
    def has_identities(self) -> bool:
        return self._credentials.folder is not None

    def _number_stream(self) -> int:
        self._stream_count += 1
        return self._stream_count

    def build_listen_context(self, listen: str) -> ssl.SSLContext | None:
        return self._credentials.build_tls_server_context(listen, _PROTOCOLS)

    def build_target_context(self) -> tuple[ssl.SSLContext | None, str | None]:
        self._require_local_target()
        return self._credentials.build_tls_client_context(_PROTOCOLS), None

    def _require_local_target(self) -> None:
        if self.route.target:  # empty: a learner that has not joined yet
            self._credentials.require_local(self.route.target)

    def require_caller(self, transport: asyncio.Transport) -> None:
        try:
            caller = self._credentials.authenticate_connection(transport, [self.address])
        except PermissionDenied as error:
            self._record_refusal(UNTRUSTED, transport, str(error))
            raise PermissionDenied(UNTRUSTED_CALLER_TEXT) from None
        name = self._end_names[0]
        if caller is not None and (
            caller.role is not Role.LEARNER or (name and not caller.is_one_of(f"{Role.LEARNER}/{name}"))
        ):
            reason = CONDITION if caller.role is Role.LEARNER else ROLE
            self._record_refusal(reason, transport, str(caller))
            raise PermissionDenied(f"{caller} must not send messages of {name or 'a learner'}")

    def require_target(self, transport: asyncio.Transport) -> None:
        if not self.has_identities:
            return
        target, name = self._credentials.authenticate_connection(transport), self._end_names[1]
        if target is not None and not (
            target.is_one_of(f"{Role.LEARNER}/{name}")
            if name
            else target.role is Role.LEARNER and not target.is_foreign
        ):
            raise PermissionDenied(f"{self.route.target} must be learner/{name or 'NAME'}, got {target}")

    def refuse(self, transport: asyncio.Transport, error: SottovoceError) -> Callable[[bytes], bytes]:
        code = grpc.StatusCode.PERMISSION_DENIED if isinstance(error, PermissionDenied) else grpc.StatusCode.UNAVAILABLE
        return GrpcRefusal(code, str(error)).answer

    def _record_refusal(self, reason: str, transport: asyncio.Transport, caller: str) -> None:
        edge = " to ".join(
            map(str, self._end_names if all(self._end_names) else (self.route.caller, self.route.callee))
        )
        self._refusals.record_refusal(reason, relay=edge, caller=caller, peer=format_peer(transport))


class GrpcRecorder:
    """Recorder of the calls of one connection.

    Args:
        route: the edge.
        capture: receives the rows.
        connection: number of the connection on the edge.
        number_stream: returns the number of a new stream on the edge.
    """

    def __init__(
        self, route: eavesdropper_pb2.Route, capture: CaptureWriter, connection: int, number_stream: Callable[[], int]
    ) -> None:
        self._route, self._add_row, self._connection = route, capture.add_row, connection
        self._is_run = bool(capture.fields)
        # The longest message of a run of ours is known. A longer one is cut, and detected as a wrong one.
        longest = capture.codec.message_bytes + MAX_OVERHEAD_BYTES if self._is_run else MAX_PAYLOAD_BYTES
        # Learners do not compress: two encodings of a message would be a choice that no row shows.
        self._decoder = GrpcDecoder(min(longest, MAX_PAYLOAD_BYTES), number_stream, allow_compression=not self._is_run)
        self._due_ns = self._passed_bytes = 0

    @property
    def is_busy(self) -> bool:
        return self._decoder.has_open_calls

    def record(self, direction: Direction, data: bytes) -> None:
        for event in self._decoder.decode(direction, data):
            self.record_event(direction, event)
        self._passed_bytes += len(data)
        if (now := time.monotonic_ns()) >= self._due_ns or self._passed_bytes >= _MAX_PASSED_BYTES:
            self._due_ns, self._passed_bytes = now + _FRAMES_INTERVAL_NS, 0
            self._record_frames()

    def end(self, direction: Direction) -> None:
        for event in self._decoder.end(direction):
            self.record_event(direction, event)
        self._record_frames()

    def _record_frames(self) -> None:
        """Record the bytes so far that are in no other row; together, because two frames of flow control go with each message."""
        for direction in get_args(Direction):
            for event in self._decoder.take_frames(direction):
                self.record_event(direction, event)

    def record_event(self, direction: Direction, event: Event) -> None:
        """Record one event as a row."""
        kind, payload, method = str(event.kind), event.payload, event.method[:_MAX_METHOD_CHARS]
        if kind == "message":
            # Only the first message may be a hello: a later one is recorded as a message, and detected as a wrong one.
            if self._is_run and method in EXCHANGE_METHODS:
                kind = "hello" if event.is_first else "signature" if is_signature(payload) else kind
        elif kind == "metadata":
            facts: dict[str, Any] = {"method": event.method} if direction == "out" else {}
            payload = _to_json({**facts, "metadata": event.metadata})
        elif kind == "trailers":
            payload = _to_json({"code": event.code, "details": event.details, "metadata": event.metadata})
        caller, callee, stream = self._route.caller, self._route.callee, event.call
        sender = caller if direction == "out" else callee
        now, mono, size = time.time_ns(), time.monotonic_ns(), len(payload)
        self._add_row(
            CaptureRow(
                caller, callee, sender, direction, kind, stream, self._connection, method, now, mono, size, payload
            )
        )


def _to_json(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts, default=lambda value: value.hex() if isinstance(value, bytes) else str(value)).encode()


# ---- a relay before any gRPC server ----------------------------------------------------------------------------------


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

    def build_listen_context(self) -> ssl.SSLContext | None:
        """Build the TLS context of the listening side; None: no TLS.

        Raises:
            SpecError: a file cannot be read.
            Unavailable: the files are not a certificate and its key.
        """
        if self.tls_cert is None or self.tls_key is None:
            return None
        for path in (self.tls_cert, self.tls_key):
            _require_readable(path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key)
        except OSError:
            raise Unavailable("--tls-cert and --tls-key are not a certificate and its key") from None
        context.set_alpn_protocols(list(_PROTOCOLS))
        return context

    def build_target_context(self) -> ssl.SSLContext | None:
        """Build the TLS context of connections to the server; None: no TLS.

        Raises:
            SpecError: the file of authorities cannot be read, or has none.
        """
        if not self.server_tls:
            return None
        if self.server_ca is not None:
            _require_readable(self.server_ca)
        try:
            context = ssl.create_default_context(cafile=self.server_ca)
        except OSError:
            raise SpecError(f"{self.server_ca} must hold certificates of authorities") from None
        context.set_alpn_protocols(list(_PROTOCOLS))
        return context


class _ServerProxy(GrpcProxy):
    """Proxy in front of a foreign server, with its own rules for TLS."""

    max_connections = 4_096

    def __init__(
        self,
        server_address: str,
        capture: CaptureWriter,
        listen_context: ssl.SSLContext | None,
        target_context: ssl.SSLContext | None,
    ) -> None:
        route = eavesdropper_pb2.Route(caller=0, callee=1, target=server_address)
        super().__init__(route, capture, credentials=Credentials(insecure=True))
        self._listen_context, self._target_context = listen_context, target_context

    def build_listen_context(self, listen: str) -> ssl.SSLContext | None:
        return self._listen_context

    def build_target_context(self) -> tuple[ssl.SSLContext | None, str | None]:
        return self._target_context, self.route.target.rpartition(":")[0].strip("[]")


class StandaloneProxy:
    """A proxy in front of a foreign server, with its capture."""

    def __init__(self, config: StandaloneProxyConfig) -> None:
        self._config = config
        world = "" if config.world is None else f"world-{config.world}-"
        capture_id = f"relay-{world}{uuid.uuid4().hex[:6]}"
        require_folder(config.folder)
        self.folder = open_folder(config.folder).get_subfolder(capture_id).name
        contexts = config.build_listen_context(), config.build_target_context()
        try:
            self.writer = CaptureWriter(self.folder, capture_id, capture_id, "{}", world=config.world)
        except OSError as error:
            raise CaptureError(f"cannot write to the folder {self.folder}: {error.strerror or error}") from None
        self._proxy, self._writing = _ServerProxy(config.server_address, self.writer, *contexts), Tasks()

    async def start(self) -> str:
        """Listen; return the address.

        Raises:
            Unavailable: the address is in use.
        """
        try:
            address = await self._proxy.open(self._config.listen)
        except Unavailable:
            await self.writer.close()
            raise
        self._writing.start(self.writer.write_parts(), "a capture is no longer written")
        log.info("capture opened", target=self._config.server_address, folder=self.folder)
        return address

    async def stop(self) -> None:
        """Wait for the last calls, write the rest, and close the capture."""
        await self._proxy.stop()
        await self._writing.end(WRITE_TIMEOUT_S)
        await self.writer.close()
        log.info("capture closed", messages=self.writer.message_count, bytes=self.writer.byte_count, folder=self.folder)


def _require_readable(path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None


async def serve(config: StandaloneProxyConfig, *, stop_with_stdin: bool = False) -> None:
    """Run a standalone proxy in this process until it is asked to stop.

    Raises:
        SottovoceError: the address is in use, or a file cannot be used.
    """
    prefer_messages()
    relay = StandaloneProxy(config)
    address = await relay.start()
    announce("relay", address=address, to=config.server_address, capture=relay.folder)
    log_start("relay", address=address, to=config.server_address, folder=relay.folder)
    await serve_until_stopped(
        lambda _: relay.stop(), stop_with_stdin=stop_with_stdin, drain_timeout_s=FINISH_TIMEOUT_S + WRITE_TIMEOUT_S
    )
