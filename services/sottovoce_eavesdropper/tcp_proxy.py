"""TCP proxy (wiretap) of one edge: passes bytes on unchanged, and records how many passed when, in which direction.

It needs neither key nor name: any attacker on the network can do this to encrypted channels. Of a TLS record it reads the
header only, five bytes in the clear. If a stream is not TLS, it records the size of each read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from sottovoce_core.errors import PermissionDenied
from sottovoce_eavesdropper.capture_checks import CaptureRow
from sottovoce_eavesdropper.capture_writer import CaptureWriter
from sottovoce_eavesdropper.proxy import Proxy
from sottovoce_rpc.addresses import format_peer
from sottovoce_rpc.credentials import NO_IDENTITY, Credentials
from sottovoce_wire.v1 import eavesdropper_pb2

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


class TcpProxy(Proxy):
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
        super().__init__(route, capture, connection_count=connection_count)
        self._credentials = credentials

    def build_recorder(self, number: int) -> _TapRecorder:
        return _TapRecorder(self.route, self.capture, number)

    def require_caller(self, transport: asyncio.Transport) -> None:
        if not self._credentials.can_serve(format_peer(transport), [self.address]):
            raise PermissionDenied("another user of this machine")


class _TapRecorder:
    """Recorder of the sizes and times of one connection."""

    def __init__(self, route: eavesdropper_pb2.Route, capture: CaptureWriter, number: int) -> None:
        self._route, self._capture, self._number = route, capture, number
        self._framings = {"out": Framing(), "back": Framing()}
        self._add_row("opened", "out")

    @property
    def is_busy(self) -> bool:
        return bool(self._framings)

    def record(self, direction: str, data: bytes) -> None:
        if (framing := self._framings.get(direction)) is not None:
            for size in framing.split_records(data):
                self._add_row("ciphertext", direction, size)

    def end(self, direction: str) -> None:
        if (framing := self._framings.pop(direction, None)) is not None:
            if rest := framing.count_partial_bytes():
                self._add_row("ciphertext", direction, rest)
            self._add_row("closed", direction)

    def _add_row(self, kind: str, direction: str, size: int = 0) -> None:
        caller, callee = self._route.caller, self._route.callee
        sender = caller if direction == "out" else callee
        now, mono = time.time_ns(), time.monotonic_ns()
        self._capture.add_row(
            CaptureRow(caller, callee, sender, direction, kind, 0, self._number, "", now, mono, size, b"")
        )
