"""TCP proxy (wiretap) of one edge: passes bytes on unchanged, and records how many passed when, in which direction.

It needs neither key nor name: any attacker on the network can do this to encrypted channels. Of a TLS record it reads the
header only, five bytes in the clear. If a stream is not TLS, it records the size of each read.

It cannot pass on how TCP cut the bytes into segments, nor a refused connection: it accepts first, and connects then.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import structlog

from sottovoce_core.errors import SpecError, Unavailable
from sottovoce_eavesdropper.capture_checks import CaptureRow
from sottovoce_eavesdropper.capture_writer import CaptureWriter
from sottovoce_rpc.addresses import parse_address
from sottovoce_rpc.credentials import NO_IDENTITY, Credentials
from sottovoce_rpc.tasks import Tasks, extract_first_error
from sottovoce_wire.v1 import eavesdropper_pb2

log = structlog.get_logger()

_CONNECTION_TIMEOUT_S = 10.0
"""Time to connect to the accepting side, and for both ends to take the last bytes."""
_LINGER_TIMEOUT_S = 0.1
"""Time for connections to end when a capture closes: the last bytes are on their way, but callers may keep connections open."""
MAX_CONNECTIONS = 256
"""Maximum concurrent connections of an edge: learners need one, and another while they reconnect."""
_READ_BYTES = 64 * 1024
"""Approximate number of buffered bytes per direction: nothing more is read until these are taken."""

_HEADER_BYTES = 5
_TYPES = range(20, 25)
"""Types of TLS records: change of cipher, alert, handshake, data, heartbeat."""
_MAX_RECORD_BYTES = 2**14 + 2048
"""Maximum bytes of a record after its header (RFC 5246, 6.2.3; later versions have less)."""


@dataclass(slots=True)
class Framing:
    """Parser of one direction of a connection into TLS records, independent of its segments.

    A stream that does not start with a record, or stops being TLS, is split into the sizes of its reads.
    """

    _head: bytearray = field(default_factory=bytearray)
    _size: int = 0  # of the current record, once its header is read
    _remaining: int = 0  # bytes of it not read yet
    _is_plain: bool = False

    def split_records(self, data: bytes) -> Iterator[int]:
        """Yield the size, header included, of every record that ends in these bytes."""
        at = 0
        while at < len(data) and not self._is_plain:
            if self._size:
                taken = min(self._remaining, len(data) - at)
                self._remaining, at = self._remaining - taken, at + taken
            else:
                taken = min(_HEADER_BYTES - len(self._head), len(data) - at)
                self._head += data[at : at + taken]
                at += taken
                if len(self._head) == _HEADER_BYTES:
                    self._parse_header()
            if self._size and not self._remaining:
                yield self._size
                self._size = 0
                self._head.clear()
        if self._is_plain and (rest := len(self._head) + len(data) - at):
            self._head.clear()
            yield rest

    def count_partial_bytes(self) -> int:
        """Return the bytes of a record that the end of the stream has cut off."""
        return self._size - self._remaining if self._size else len(self._head)

    def _parse_header(self) -> None:
        kind, major, length = self._head[0], self._head[1], int.from_bytes(self._head[3:])
        if kind in _TYPES and major == 3 and length <= _MAX_RECORD_BYTES:
            self._size, self._remaining = _HEADER_BYTES + length, length
        else:
            self._is_plain = True


class TcpProxy:
    """Proxy of one edge.

    Args:
        route: learners that open and accept connections, and the address of the latter.
        capture: receives the rows.
        connection_count: connections of this edge recorded before, by an eavesdropper that died.
        credentials: credentials of the eavesdropper, never sent. Without an identity, connections of this machine's other users
            are closed at once, as the services do: for the accepting side, they would come from this user.
    """

    def __init__(
        self,
        route: eavesdropper_pb2.Route,
        capture: CaptureWriter,
        *,
        connection_count: int = 0,
        credentials: Credentials = NO_IDENTITY,
    ) -> None:
        self._route, self._capture, self._credentials = route, capture, credentials
        self._connections = connection_count
        self._server: asyncio.Server | None = None
        self._tasks = Tasks()
        self._open_connections: set[asyncio.Task[None]] = set()

    async def open(self, listen: str) -> str:
        """Listen on `host:port`; return the address.

        Raises:
            Unavailable: the address cannot be listened on.
        """
        host, port = parse_address(listen, "an address of a wiretap", allow_port_zero=True)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, *_, address = found[0]
            both = family is socket.AF_INET6 and socket.has_dualstack_ipv6()
            own = socket.create_server(address[:2], family=family, dualstack_ipv6=both)
        except OSError as error:
            raise Unavailable(f"cannot listen on {listen}: {error.strerror or error}") from None
        self._server = await asyncio.start_server(self._accept, sock=own, limit=_READ_BYTES)
        return f"{listen.rsplit(':', 1)[0]}:{own.getsockname()[1]}"

    async def redirect(self, target: str) -> None:
        """Send later connections to another address, and cut open ones."""
        if target != self._route.target:
            self._route.target = target
            await self._tasks.end()

    async def stop(self) -> None:
        """Wait `_LINGER_TIMEOUT_S` for open connections, then accept no new one, and cut the rest."""
        if self._open_connections:
            await asyncio.wait(self._open_connections, timeout=_LINGER_TIMEOUT_S)
        if self._server is not None:
            self._server.close()
        await self._tasks.end()

    # ---- connections --------------------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Start a task for a new connection."""
        self._connections += 1
        task = self._tasks.start(self._forward(self._connections, reader, writer), "a connection is not passed on")
        self._open_connections.add(task)
        task.add_done_callback(self._open_connections.discard)

    async def _forward(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until it ends."""
        recorder, writers = _ConnectionRecorder(self._route, self._capture, number), [writer]
        recorder.record("opened", "out")
        try:
            if self._is_allowed(writer):
                await self._capture.wait_for_buffer()
                async with asyncio.timeout(_CONNECTION_TIMEOUT_S):
                    far_reader, far_writer = await _connect(self._route.target)
                writers.append(far_writer)
                async with asyncio.TaskGroup() as both:
                    both.create_task(recorder.pump("out", reader, far_writer))
                    both.create_task(recorder.pump("back", far_reader, writer))
                async with asyncio.timeout(_CONNECTION_TIMEOUT_S):
                    await _close_and_flush(writers)
        except* (OSError, TimeoutError, SpecError) as errors:  # reset, not reachable, or no address yet
            log.debug(
                "connection cut", edge=(self._route.caller, self._route.callee), reason=str(extract_first_error(errors))
            )
        finally:
            recorder.close()
            for each in writers:
                each.transport.abort()

    def _is_allowed(self, writer: asyncio.StreamWriter) -> bool:
        """Return whether a connection may be forwarded: below the limit, and of an allowed user."""
        _enable_keepalive(writer)
        host, port = (writer.get_extra_info("peername") or ("", 0))[:2]
        family = "ipv6" if ":" in host else "ipv4"
        return len(self._open_connections) <= MAX_CONNECTIONS and self._credentials.can_serve(
            f"{family}:[{host}]:{port}"
        )


@dataclass(slots=True)
class _ConnectionRecorder:
    """Recorder of one connection."""

    route: eavesdropper_pb2.Route
    capture: CaptureWriter
    number: int
    framings: dict[str, Framing] = field(default_factory=lambda: {"out": Framing(), "back": Framing()})

    async def pump(self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass bytes on until one side ends, then end the other one; not faster than they are taken, and recorded."""
        framing = self.framings[direction]
        while data := await reader.read(_READ_BYTES):
            for size in framing.split_records(data):
                self.record("ciphertext", direction, size)
            await self.capture.wait_for_buffer()
            writer.write(data)
            await writer.drain()
        self.end(direction)
        if writer.can_write_eof():
            writer.write_eof()

    def end(self, direction: str) -> None:
        """Record the end of a direction."""
        if (framing := self.framings.pop(direction, None)) is not None:
            if rest := framing.count_partial_bytes():
                self.record("ciphertext", direction, rest)
            self.record("closed", direction)

    def close(self) -> None:
        """Record the end of both directions."""
        for direction in list(self.framings):
            self.end(direction)

    def record(self, kind: str, direction: str, size: int = 0) -> None:
        caller, callee = self.route.caller, self.route.callee
        sender = caller if direction == "out" else callee
        now, mono = time.time_ns(), time.monotonic_ns()
        self.capture.add_row(
            CaptureRow(caller, callee, sender, direction, kind, 0, self.number, "", now, mono, size, b"")
        )


async def _connect(target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the accepting side.

    Raises:
        OSError: it cannot be reached.
        SpecError: its address is not known yet.
    """
    if target.startswith("unix:"):
        return await asyncio.open_unix_connection(target.removeprefix("unix:"), limit=_READ_BYTES)
    reader, writer = await asyncio.open_connection(
        *parse_address(target, "the address of a learner"), limit=_READ_BYTES
    )
    _enable_keepalive(writer)
    return reader, writer


def _enable_keepalive(writer: asyncio.StreamWriter) -> None:
    """Let the kernel detect a vanished caller eventually; learners detect it sooner, and reconnect."""
    if (own := writer.get_extra_info("socket")) is not None:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


async def _close_and_flush(writers: Sequence[asyncio.StreamWriter]) -> None:
    """Close connections, and wait until their last bytes are taken."""
    for each in writers:
        each.close()
    for each in writers:
        await each.wait_closed()
