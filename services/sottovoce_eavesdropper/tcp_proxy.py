"""The wiretap: stands on the way of one edge, passes bytes on as they are, and notes how many passed when, and which way.

It needs no key and no name: it is what anybody on the network can do, where channels are encrypted. Of a TLS record it reads
the header, five bytes in the clear, and looks into nothing. Where a stream is no TLS, it notes what one read gave.

What it cannot pass on is how TCP cut the bytes into segments, and a refusal to connect: it accepts first, and calls then.
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
"""For whoever accepts to be there, and for both ends to take the last bytes."""
_LINGER_TIMEOUT_S = 0.1
"""How long connections may take to end when a capture closes: the last bytes are on their way, but callers may keep the rest."""
MAX_CONNECTIONS = 256
"""Of an edge, at a time: learners need one, and another one while they reconnect."""
_READ_BYTES = 64 * 1024
"""Bytes that are held of a direction, about: what is not taken is not read."""

_HEADER_BYTES = 5
_TYPES = range(20, 25)
"""Of TLS records: change of cipher, alert, handshake, data, heartbeat."""
_MAX_RECORD_BYTES = 2**14 + 2048
"""Bytes of a record after its header (RFC 5246, 6.2.3; later versions have less)."""


@dataclass(slots=True)
class Framing:
    """One direction of a connection, cut into TLS records, however it was cut into segments.

    A stream that does not begin with one, or that breaks off being one, is cut into what came at a time.
    """

    _head: bytearray = field(default_factory=bytearray)
    _size: int = 0  # of the record under way, once its header is there
    _left: int = 0  # of it, still to come
    _plain: bool = False

    def split_records(self, came: bytes) -> Iterator[int]:
        """Bytes, header and all, of every record that these bytes end."""
        at = 0
        while at < len(came) and not self._plain:
            if self._size:
                taken = min(self._left, len(came) - at)
                self._left, at = self._left - taken, at + taken
            else:
                taken = min(_HEADER_BYTES - len(self._head), len(came) - at)
                self._head += came[at : at + taken]
                at += taken
                if len(self._head) == _HEADER_BYTES:
                    self._begin()
            if self._size and not self._left:
                yield self._size
                self._size = 0
                self._head.clear()
        if self._plain and (rest := len(self._head) + len(came) - at):
            self._head.clear()
            yield rest

    def count_partial_bytes(self) -> int:
        """Bytes of the record that the end of the stream has cut off."""
        return self._size - self._left if self._size else len(self._head)

    def _begin(self) -> None:
        """Read a header."""
        kind, major, length = self._head[0], self._head[1], int.from_bytes(self._head[3:])
        if kind in _TYPES and major == 3 and length <= _MAX_RECORD_BYTES:
            self._size, self._left = _HEADER_BYTES + length, length
        else:
            self._plain = True


class TcpProxy:
    """One edge.

    Args:
        route: who opens connections, who accepts them, and where the latter listens.
        capture: gets what is noted.
        connections: of this edge that were noted before, by an eavesdropper that died.
        credentials: of the eavesdropper. Nobody is shown them; without an identity, connections of this machine's other users
            are closed at once, as its services do: to whoever accepts, a connection of theirs would be this user's.
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
        self._passing = Tasks()
        self._under_way: set[asyncio.Task[None]] = set()

    async def open(self, listen: str) -> str:
        """Listen on `host:port`; returns the address.

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
        self._server = await asyncio.start_server(self._take, sock=own, limit=_READ_BYTES)
        return f"{listen.rsplit(':', 1)[0]}:{own.getsockname()[1]}"

    async def redirect(self, target: str) -> None:
        """Whoever accepts is at another address now: connections under way end, and later ones lead there."""
        if target != self._route.target:
            self._route.target = target
            await self._cut()

    async def stop(self) -> None:
        """Let connections under way end within `_LINGER_TIMEOUT_S`, then take no new one, and cut what is left."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=_LINGER_TIMEOUT_S)
        if self._server is not None:
            self._server.close()
        await self._cut()

    async def _cut(self) -> None:
        await self._passing.end()

    # ---- connections --------------------------------------------------------------------------------------

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Somebody has connected."""
        self._connections += 1
        passing = self._passing.start(self._pass(self._connections, reader, writer), "a connection is not passed on")
        self._under_way.add(passing)
        passing.add_done_callback(self._under_way.discard)

    async def _pass(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its opening to its end."""
        ends, writers = _Ends(self._route, self._capture, number), [writer]
        ends.note("opened", "out")
        try:
            if self._admits(writer):
                await self._capture.wait_for_buffer()
                async with asyncio.timeout(_CONNECTION_TIMEOUT_S):
                    far_reader, far_writer = await _dial(self._route.target)
                writers.append(far_writer)
                async with asyncio.TaskGroup() as both:
                    both.create_task(ends.pump("out", reader, far_writer))
                    both.create_task(ends.pump("back", far_reader, writer))
                async with asyncio.timeout(_CONNECTION_TIMEOUT_S):
                    await _left(writers)
        except* (OSError, TimeoutError, SpecError) as errors:  # reset, nobody there, or no address yet
            log.debug(
                "connection cut", edge=(self._route.caller, self._route.callee), reason=str(extract_first_error(errors))
            )
        finally:
            ends.close()
            for each in writers:
                each.transport.abort()

    def _admits(self, writer: asyncio.StreamWriter) -> bool:
        """Whether somebody may be passed on: there may be room, and it may be this user."""
        _keep_alive(writer)
        host, port = (writer.get_extra_info("peername") or ("", 0))[:2]
        family = "ipv6" if ":" in host else "ipv4"
        return len(self._under_way) <= MAX_CONNECTIONS and self._credentials.can_serve(f"{family}:[{host}]:{port}")


@dataclass(slots=True)
class _Ends:
    """A connection as it is noted."""

    route: eavesdropper_pb2.Route
    capture: CaptureWriter
    number: int
    framings: dict[str, Framing] = field(default_factory=lambda: {"out": Framing(), "back": Framing()})

    async def pump(self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass bytes on until the one side ends, then tell the other one; not faster than they are taken, and noted."""
        framing = self.framings[direction]
        while came := await reader.read(_READ_BYTES):
            for size in framing.split_records(came):
                self.note("ciphertext", direction, size)
            await self.capture.wait_for_buffer()
            writer.write(came)
            await writer.drain()
        self.end(direction)
        if writer.can_write_eof():
            writer.write_eof()

    def end(self, direction: str) -> None:
        """Nothing more comes this way."""
        if (framing := self.framings.pop(direction, None)) is not None:
            if rest := framing.count_partial_bytes():
                self.note("ciphertext", direction, rest)
            self.note("closed", direction)

    def close(self) -> None:
        """Nothing more comes."""
        for direction in list(self.framings):
            self.end(direction)

    def note(self, kind: str, direction: str, size: int = 0) -> None:
        caller, callee = self.route.caller, self.route.callee
        sender = caller if direction == "out" else callee
        now, mono = time.time_ns(), time.monotonic_ns()
        self.capture.add_row(
            CaptureRow(caller, callee, sender, direction, kind, 0, self.number, "", now, mono, size, b"")
        )


async def _dial(target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to whoever accepts.

    Raises:
        OSError: nobody is there.
        SpecError: it is not known yet where that is.
    """
    if target.startswith("unix:"):
        return await asyncio.open_unix_connection(target.removeprefix("unix:"), limit=_READ_BYTES)
    reader, writer = await asyncio.open_connection(
        *parse_address(target, "the address of a learner"), limit=_READ_BYTES
    )
    _keep_alive(writer)
    return reader, writer


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """A caller that vanished without a word is noticed some time; learners themselves notice it sooner, and reconnect."""
    if (own := writer.get_extra_info("socket")) is not None:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


async def _left(writers: Sequence[asyncio.StreamWriter]) -> None:
    """Close connections, and wait until what was written to them is taken."""
    for each in writers:
        each.close()
    for each in writers:
        await each.wait_closed()
