"""Proxy of one edge: listens in place of a learner, passes every byte on unchanged, and records before it passes on.

It ends TLS where it has an identity, and knows no protocol above that: the recorder of a connection reads the bytes. What one
end does not take is not read from the other one, and nothing is read while a capture's rows wait to be written. It cannot pass on
how TCP cut the bytes into segments, nor a refused connection: it accepts first, and connects then.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from sottovoce_core.errors import SottovoceError, Unavailable
from sottovoce_eavesdropper.capture_writer import CaptureWriter
from sottovoce_eavesdropper.http2 import Direction
from sottovoce_rpc.addresses import parse_address
from sottovoce_rpc.tasks import Tasks
from sottovoce_wire.v1 import eavesdropper_pb2

log = structlog.get_logger()

CONNECTION_TIMEOUT_S = 10.0
"""Time to connect to the accepting side, for a handshake, and for both ends to take the last bytes."""
_CLOSE_TIMEOUT_S = 0.1
"""Time for the last bytes to be taken when a proxy stops."""
_CHECK_INTERVAL_S = 5.0
"""Interval between checks of both ends of a connection: certificates expire or are revoked."""
_BUFFER_BYTES = 64 * 1024
"""Approximate number of buffered bytes per direction: nothing more is read until these are taken."""


class ConnectionRecorder(Protocol):
    """ConnectionRecorder of one connection."""

    @property
    def is_busy(self) -> bool:
        """Return whether more must come before a capture can be closed."""
        ...

    def record(self, direction: Direction, data: bytes) -> None:
        """Record bytes of a direction (`out` or `back`) that pass now.

        Raises:
            SottovoceError: they cannot be recorded; then they do not pass, and the connection is cut.
        """
        ...

    def end(self, direction: Direction) -> None:
        """Record the end of a direction; a second call does nothing."""
        ...


class Proxy(ABC):
    """Proxy of one edge.

    Args:
        route: learners that open and accept connections, and the address of the latter.
        capture: receives the rows.
        connection_count: connections of this edge recorded before, by an eavesdropper that died.
    """

    max_connections = 256
    """Maximum concurrent connections: learners need one, and another while they reconnect."""
    stop_timeout_s = 0.1
    """Time for the recorders to end when a capture closes: the last bytes are on their way."""

    def __init__(self, route: eavesdropper_pb2.Route, capture: CaptureWriter, *, connection_count: int = 0) -> None:
        self.route, self.capture, self.tasks = route, capture, Tasks()
        self._connection_count = connection_count
        self._server: asyncio.Server | None = None
        self.address = ""
        """Address on which it listens."""
        self.connections: set[Connection] = set()
        self.refused: set[Connection] = set()
        self._quiet = asyncio.Event()
        self._is_writing = self.is_stopping = False

    # ---- what kinds of proxies differ in --------------------------------------------------------------------

    @abstractmethod
    def build_recorder(self, number: int) -> ConnectionRecorder:
        """Build the recorder of a connection, which are numbered from 1."""

    def build_listen_context(self, listen: str) -> ssl.SSLContext | None:
        """Build the TLS context of the listening side; None: no TLS.

        Raises:
            SottovoceError: the identity cannot be used, or does not allow this address.
        """
        return None

    def build_target_context(self) -> tuple[ssl.SSLContext | None, str | None]:
        """Build the TLS context of the connecting side, and the host name that is required; None: no TLS, or no name.

        Raises:
            SottovoceError: the identity cannot be used.
        """
        return None, None

    def require_caller(self, transport: asyncio.Transport) -> None:  # noqa: B027 - a proxy may serve all
        """Require that the end that opened a connection may do so.

        Raises:
            SottovoceError: it must not.
        """

    def require_target(self, transport: asyncio.Transport) -> None:  # noqa: B027 - likewise
        """Require that the end that accepted a connection is the right one.

        Raises:
            SottovoceError: it is another one.
        """

    @property
    def has_identities(self) -> bool:
        """Return whether both ends show certificates, which may expire or be revoked."""
        return False

    def refuse(self, transport: asyncio.Transport, error: SottovoceError) -> Callable[[bytes], bytes] | None:
        """Return what answers the bytes of a refused caller; None: it is cut off at once."""
        return None

    # ---- listening ------------------------------------------------------------------------------------------

    async def open(self, listen: str) -> str:
        """Listen on `host:port`; return the address.

        Raises:
            Unavailable: the address cannot be listened on.
            SottovoceError: the identity cannot be used, or does not allow this address.
        """
        host, port = parse_address(listen, "an address of a proxy", allow_port_zero=True)
        context, loop = self.build_listen_context(listen), asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, *_, address = found[0]
            both = family is socket.AF_INET6 and socket.has_dualstack_ipv6()
            own = socket.create_server(address[:2], family=family, dualstack_ipv6=both)
        except OSError as error:
            raise Unavailable(f"cannot listen on {listen}: {error.strerror or error}") from None
        timeout = None if context is None else CONNECTION_TIMEOUT_S
        self._server = await loop.create_server(self._accept, sock=own, ssl=context, ssl_handshake_timeout=timeout)
        self.address = f"{listen.rsplit(':', 1)[0]}:{own.getsockname()[1]}"
        return self.address

    def _accept(self) -> asyncio.Protocol:
        self._connection_count += 1
        return Connection(self, self._connection_count).caller

    async def redirect(self, target: str) -> None:
        """Send later connections to another address, and cut open ones."""
        if target != self.route.target:
            self.route.target = target
            self._cut_all()

    async def stop(self) -> None:
        """Accept no new connection, wait `stop_timeout_s` for the recorders, then end the rest."""
        if self._server is not None:
            self._server.close()
        self.is_stopping = True
        await self._wait_until_quiet(lambda: any(each.is_busy for each in self.connections), self.stop_timeout_s)
        for each in tuple(self.connections):
            each.close()
        await self._wait_until_quiet(lambda: bool(self.connections), _CLOSE_TIMEOUT_S)
        self._cut_all()
        await self.tasks.end()
        await self._wait_until_quiet(lambda: bool(self.connections or self.refused), CONNECTION_TIMEOUT_S)

    async def _wait_until_quiet(self, is_loud: Callable[[], bool], seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while is_loud():
                    self._quiet.clear()
                    await self._quiet.wait()

    def _cut_all(self) -> None:
        for each in (*self.connections, *self.refused):
            each.cut("the proxy ends it")

    # ---- for its connections --------------------------------------------------------------------------------

    def note_progress(self) -> None:
        """Note that a connection has changed: a stopping proxy may wait for it."""
        self._quiet.set()

    def pause_if_behind(self) -> None:
        """Read nothing while the capture has too many rows in memory."""
        if self.capture.is_behind and not self._is_writing:
            self._is_writing = True
            for each in self.connections:
                each.hold("capture")
            self.tasks.start(self._write_capture(), "a capture is no longer written")

    async def _write_capture(self) -> None:
        try:
            await self.capture.wait_for_buffer()
        finally:
            self._is_writing = False
            for each in self.connections:
                each.release("capture")


class Connection:
    """Connection that a caller has opened, and the one to the accepting side that belongs to it.

    Args:
        proxy: the proxy that accepted it.
        number: its number on the edge.
    """

    def __init__(self, proxy: Proxy, number: int) -> None:
        self.proxy, self.number = proxy, number
        self.caller, self.target = _End(self, "out"), _End(self, "back")
        self.caller.other, self.target.other = self.target, self.caller
        self._recorder: ConnectionRecorder | None = None
        self._check: asyncio.TimerHandle | None = None
        self._is_over = False

    @property
    def is_busy(self) -> bool:
        """Return whether its recorder expects more."""
        return self._recorder is not None and self._recorder.is_busy

    def begin(self) -> None:
        """Check the caller, which has connected, and connect to the target."""
        proxy, caller = self.proxy, self.caller.transport
        assert caller is not None  # noqa: S101 - it has just connected
        if proxy.is_stopping:  # it was accepted before, and its TLS handshake has ended only now
            caller.abort()
            return
        proxy.connections.add(self)
        self._recorder = proxy.build_recorder(self.number)
        try:
            if len(proxy.connections) > proxy.max_connections:
                raise Unavailable(f"at most {proxy.max_connections} connections of an edge are served")
            proxy.require_caller(caller)
        except SottovoceError as error:
            proxy.connections.discard(self)  # it must not take the place of a caller that may connect
            proxy.refused.add(self)
            if len(proxy.refused) <= proxy.max_connections:
                self.caller.answer = proxy.refuse(caller, error)
            if self.caller.answer is None:
                self.cut(str(error))
            else:
                self._check = asyncio.get_running_loop().call_later(CONNECTION_TIMEOUT_S, self.cut, str(error))
            return
        self.caller.hold("target")
        proxy.tasks.start(self._connect(), "a connection is not passed on")

    async def _connect(self) -> None:
        proxy, loop = self.proxy, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECTION_TIMEOUT_S):
                await proxy.capture.wait_for_buffer()
                context, name = proxy.build_target_context()
                secured: dict[str, Any] = {} if context is None else {"ssl": context, "server_hostname": name or ""}
                to = proxy.route.target
                if to.startswith("unix:"):
                    await loop.create_unix_connection(lambda: self.target, to.removeprefix("unix:"), **secured)
                else:
                    await loop.create_connection(
                        lambda: self.target, *parse_address(to, "the address of a learner"), **secured
                    )
            if self.target.transport is not None:
                proxy.require_target(self.target.transport)
                if proxy.has_identities:
                    self._schedule_check()
                self.caller.release("target")
        except (OSError, TimeoutError, SottovoceError) as error:  # reset, not reachable, or no address yet
            self.cut(str(error) or "not reachable in time")

    def _schedule_check(self) -> None:
        self._check = asyncio.get_running_loop().call_later(_CHECK_INTERVAL_S, self._check_ends)

    def _check_ends(self) -> None:
        """Cut the connection when one end is no longer trusted."""
        try:
            if self.caller.transport is not None and self.target.transport is not None:
                self.proxy.require_caller(self.caller.transport)
                self.proxy.require_target(self.target.transport)
        except SottovoceError as error:
            self.cut(str(error))
        else:
            self._schedule_check()

    def forward(self, end: _End, data: bytes) -> None:
        """Record bytes of one end, and pass them on."""
        recorder, to = self._recorder, end.other.transport
        if recorder is None or to is None or self._is_over:
            return
        try:
            recorder.record(end.direction, data)
        except SottovoceError as error:
            log.warning("connection cut", edge=self._edge, reason=str(error))
            self.cut(str(error))
            return
        to.write(data)
        if self.proxy.is_stopping:
            self.proxy.note_progress()
        self.proxy.pause_if_behind()

    def hold(self, reason: str) -> None:
        """Read nothing from both ends."""
        self.caller.hold(reason)
        self.target.hold(reason)

    def release(self, reason: str) -> None:
        """Read again."""
        self.caller.release(reason)
        self.target.release(reason)

    def end_direction(self, end: _End) -> None:
        """Record that one end has nothing more to send, and tell the other one."""
        if self._recorder is not None:
            self._recorder.end(end.direction)
        end.other.write_eof()
        if end.other.has_ended:
            self.close()

    def close(self) -> None:
        """Close both ends once they have taken the last bytes."""
        for each in (self.caller, self.target):
            each.close()

    def cut(self, reason: str) -> None:
        """Cut both ends."""
        if not self._is_over:
            log.debug("connection cut", edge=self._edge, reason=reason)
            self._finish()
            for each in (self.caller.transport, self.target.transport):
                if each is not None:
                    each.abort()

    def lose(self, end: _End, error: Exception | None) -> None:
        """Note that the connection of one end is over."""
        if error is not None:
            self.cut(str(error))
        if end.other.transport is None or end.other.is_lost:
            self._finish()
            self.proxy.connections.discard(self)
            self.proxy.refused.discard(self)
            self.proxy.note_progress()
        elif not self._is_over:
            end.other.close()

    def _finish(self) -> None:
        """End the recorder: nothing more passes."""
        self._is_over = True
        if self._check is not None:
            self._check.cancel()
        if self._recorder is not None:
            self._recorder.end("out")
            self._recorder.end("back")

    @property
    def _edge(self) -> tuple[int, int]:
        return self.proxy.route.caller, self.proxy.route.callee


class _End(asyncio.Protocol):
    """One end of a connection; its bytes go to the other end."""

    other: _End

    def __init__(self, connection: Connection, direction: Direction) -> None:
        self._connection, self.direction = connection, direction
        self.transport: asyncio.Transport | None = None
        self.answer: Callable[[bytes], bytes] | None = None
        self.has_ended = self.is_lost = False
        self._holds, self._backlog = set[str](), list[bytes]()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(_BUFFER_BYTES)
        if (own := transport.get_extra_info("socket")) is not None and own.family is not socket.AF_UNIX:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # detects a vanished peer eventually
        if self._holds:
            self._pause()
        if self.direction == "out":
            self._connection.begin()
        elif self.other.is_lost:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.answer is not None and self.transport is not None:
            self.transport.write(self.answer(data))
        elif self._holds:  # an event loop may deliver more after it was asked to pause
            self._backlog.append(data)
            self._pause()
        else:
            self._connection.forward(self, data)

    def eof_received(self) -> bool:
        if self._holds:
            self._backlog.append(b"")
        else:
            self._end()
        return self.transport is not None and self.transport.can_write_eof()

    def connection_lost(self, error: Exception | None) -> None:
        if error is None:
            self._pass_backlog()
        self.is_lost = self.has_ended = True
        self._connection.lose(self, error)

    def _end(self) -> None:
        self.has_ended = True
        self._connection.end_direction(self)

    def _pass_backlog(self) -> None:
        backlog, self._backlog = self._backlog, []
        for data in backlog:
            if data:
                self._connection.forward(self, data)
            else:
                self._end()

    def pause_writing(self) -> None:
        self.other.hold("buffer")

    def resume_writing(self) -> None:
        self.other.release("buffer")

    def write_eof(self) -> None:
        """Tell this end that nothing more comes."""
        if self.transport is not None and not self.transport.is_closing():
            if self.transport.can_write_eof():
                self.transport.write_eof()
            else:
                self.close()

    def close(self) -> None:
        """Close this end once it has taken the last bytes."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()
            asyncio.get_running_loop().call_later(CONNECTION_TIMEOUT_S, self.transport.abort)

    def hold(self, reason: str) -> None:
        """Read nothing until every reason to wait is released."""
        self._holds.add(reason)
        if len(self._holds) == 1:
            self._pause()

    def release(self, reason: str) -> None:
        """Remove a reason to wait."""
        if reason in self._holds:
            self._holds.remove(reason)
            if not self._holds:
                self._pass_backlog()
            if not self._holds and self.transport is not None and not self.transport.is_closing():
                self.transport.resume_reading()

    def _pause(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()
