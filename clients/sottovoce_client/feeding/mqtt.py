"""Records from MQTT 5, with QoS 1: acknowledged when they are in the learner's keeping.

A broker of MQTT knows no positions. A field of the message says one, or positions are counted on from the learner's; then what
the broker sends again is told by its packet identifier. The library speaks on a thread of its own; all state is the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sottovoce.data.cells import normal
from sottovoce.errors import NotReady
from sottovoce.optional import import_extra
from sottovoce_client.feeding.access import SCHEMES, Access
from sottovoce_client.feeding.broker import NOBODY, REFUSED, Gone, Patience, why_of
from sottovoce_client.feeding.fields import Unfit, object_of
from sottovoce_client.feeding.source import Message, Part, Unreadable
from sottovoce_client.feeding.standard_input import NO_POSITION, whole_number
from sottovoce_client.feeding.unacknowledged import Unacknowledged
from sottovoce_rpc.addresses import place_of_url

EMPTY = "an empty message"
_BATCH, _RECEIVE, _CALL_S, _CLOSE_S, _KEEPALIVE_S, _TURN_S = 512, 4_096, 10.0, 2.0, 20, 1.0
_NOT_AUTHORIZED = frozenset({0x84, 0x85, 0x86, 0x87, 0x8A, 0x8C, 0x90})
"""Reasons that no patience mends: protocol, client identifier, password, not authorized, banned, method, topic."""
_TAKEN_OVER = 0x8E
_CLOSED = "the connection was closed"


def drive(connection: Any) -> None:
    """Have this event loop do what a client of the library's, which has connected, would do in a thread of its own.

    That thread waits with `select`, which knows no descriptor above 1,023: in a process with more it would do nothing.
    """
    loop, socket = asyncio.get_running_loop(), connection.socket()

    def read() -> None:
        connection.loop_read()
        while connection.socket() is not None and getattr(socket, "pending", int)():  # TLS has more, decrypted
            connection.loop_read()

    def turn() -> None:
        if connection.loop_misc() == 0:  # it is still connected
            loop.call_later(_TURN_S, turn)

    connection.on_socket_close = lambda *_: loop.remove_reader(socket)
    connection.on_socket_register_write = lambda *_: loop.add_writer(socket, connection.loop_write)
    connection.on_socket_unregister_write = lambda *_: loop.remove_writer(socket)
    loop.add_reader(socket, read)
    if connection.want_write():
        loop.add_writer(socket, connection.loop_write)
    turn()


class _Link:
    """A session with a broker; a connection of it after the other."""

    def __init__(self, server: str, topics: Sequence[str], client: str, access: Access, session_s: int) -> None:
        self._paho = import_extra("paho.mqtt.client", "paho-mqtt", "feeding from MQTT", "feed")
        self._enums = import_extra("paho.mqtt.enums", "paho-mqtt", "feeding from MQTT", "feed")
        self._packets = import_extra("paho.mqtt.packettypes", "paho-mqtt", "feeding from MQTT", "feed").PacketTypes
        self._properties = import_extra("paho.mqtt.properties", "paho-mqtt", "feeding from MQTT", "feed").Properties
        self._subscribe = import_extra("paho.mqtt.subscribeoptions", "paho-mqtt", "feeding from MQTT", "feed")
        scheme, self._host, self._port = place_of_url(server, SCHEMES["mqtt"], "--server")
        self._tls = Access(tls=True).context() if scheme == "mqtts" and access.context() is None else access.context()
        self._topics, self._client, self._access, self._session_s = list(topics), client, access, session_s
        self.what = f"MQTT at {self._host}:{self._port}"
        self.away = (OSError, TimeoutError, ValueError)
        self.arrived: asyncio.Queue[Any] = asyncio.Queue()
        self.dropped = 0
        self._connection: Any = None
        self._answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def connect(self) -> bool:
        """On a new connection; whether the broker knows the session."""
        await self.close()
        arrived = asyncio.Queue[Any]()
        connected: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.arrived = arrived

        def tell(whom: asyncio.Future[Any], what: Any) -> None:
            if not whom.done():
                whom.set_result(what)

        def lost(reason: Any) -> None:
            tell(connected, (False, reason))
            tell(self._answered, [reason])
            arrived.put_nowait(reason)

        def take(message: Any) -> None:
            if message.qos == 0 and arrived.qsize() >= _RECEIVE:  # no receipt holds it back
                self.dropped += 1
            else:
                arrived.put_nowait(message)

        connection = self._made()
        connection.on_connect = lambda _c, _u, flags, reason, _p: tell(connected, (flags.session_present, reason))
        connection.on_subscribe = lambda _c, _u, _m, reasons, _p: tell(self._answered, reasons)
        connection.on_disconnect = lambda _c, _u, _f, reason, _p: lost(reason)
        connection.on_message = lambda _c, _u, message: take(message)
        await asyncio.to_thread(
            connection.connect,
            self._host,
            self._port,
            keepalive=_KEEPALIVE_S,
            clean_start=False,
            properties=self._of_session(),
        )
        if connection.socket() is None:  # closed before it had said who it is
            raise ConnectionError(_CLOSED)
        self._connection = connection
        drive(connection)
        async with asyncio.timeout(_CALL_S):
            present, reason = await connected
            self.require(reason)
            for reason in await self._subscribed():
                self.require(reason)
        return bool(present)

    async def _subscribed(self) -> Sequence[Any]:
        """What the broker says of each topic, when it has heard all that was said before."""
        self._answered = asyncio.get_running_loop().create_future()
        options = self._subscribe.SubscribeOptions
        own = options(qos=1, retainHandling=options.RETAIN_DO_NOT_SEND)
        self._connection.subscribe([(topic, own) for topic in self._topics])
        reasons: Sequence[Any] = await self._answered
        return reasons

    def _made(self) -> Any:
        """A client of the library's, which reconnects only when it is told to."""
        made = self._paho.Client(
            self._enums.CallbackAPIVersion.VERSION2,
            client_id=self._client,
            protocol=self._paho.MQTTv5,
            reconnect_on_failure=False,
            manual_ack=True,
        )
        if self._access.user:
            made.username_pw_set(self._access.user, self._access.password or None)
        if self._tls is not None:
            made.tls_set_context(self._tls)
        return made

    def _of_session(self) -> Any:
        found = self._properties(self._packets.CONNECT)
        found.SessionExpiryInterval, found.ReceiveMaximum = self._session_s, _RECEIVE
        return found

    def require(self, reason: Any) -> None:
        """That the broker has not refused.

        Raises:
            NotReady: it has, for good.
            ConnectionError: it has.
        """
        if reason.value == _TAKEN_OVER:
            raise NotReady(f"another feeder has taken over the session of client {self._client!r} with {self.what}")
        if reason.value in _NOT_AUTHORIZED:
            raise NotReady(REFUSED.format(self.what, str(reason).lower()))
        if reason.is_failure:
            raise ConnectionError(str(reason).lower())

    def why(self, error: BaseException) -> str:
        """Of a failed call, in a few words.

        Raises:
            NotReady: no patience helps.
        """
        if NOBODY.search(str(error)):
            raise NotReady(REFUSED.format(self.what, why_of(error))) from None
        return why_of(error)

    def acknowledge(self, mid: int) -> None:
        """A message is kept."""
        if self._connection is not None:
            self._connection.ack(mid, 1)

    async def close(self) -> None:
        """End the connection; the session goes on."""
        if self._connection is not None:
            if self._connection.is_connected():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CLOSE_S):  # what it was not told is sent again
                        await self._subscribed()
            connection, self._connection = self._connection, None
            connection.disconnect()
            connection.loop_write()


class _Session:
    """Messages of some topics, in the order in which the broker sends them."""

    def __init__(
        self, link: _Link, name: str, position: str, noted: Unacknowledged, patience_s: float, *, present: bool
    ) -> None:
        self.name, self._link, self._field, self._noted = name, link, normal(position), noted
        self._patience = Patience(link.what, patience_s)
        self._gone = Gone(f"session {name}")
        self._present: bool | None = present
        self._last = self._kept = -1
        self._open = dict[int, int]()
        """Positions of messages that are not acknowledged, by packet identifier."""
        self._here = set[int]()
        """Identifiers that came on this connection: only these may be acknowledged on it."""

    async def read(self, after: int) -> AsyncIterator[Sequence[Message]]:
        self._last = self._kept = after
        self._noted.begin(after)
        while True:
            try:
                if self._present is None:
                    self._present = await self._link.connect()
                self._renewed(present=self._present)
                self._patience.subscribed(self.name)
                while True:
                    messages = self._taken(await self._arrived())
                    if self._link.dropped:
                        self._gone.add(self._link.dropped)
                        self._link.dropped = 0
                    if messages:
                        await self._noted.flush()
                        yield messages
            except self._link.away as error:
                self._present = None
                await self._patience.away(self._link.why(error))

    async def keep(self, position: int) -> None:
        self._kept = max(self._kept, position)
        self._noted.keep(position)
        for mid in [mid for mid, at in self._open.items() if at <= position]:
            del self._open[mid]
            if mid in self._here:
                self._link.acknowledge(mid)

    def _renewed(self, *, present: bool) -> None:
        """A connection has begun, in a session that the broker knows or has forgotten."""
        self._here.clear()
        if not present:
            if self._open or self._noted.any:
                self._gone.add(0)
            self._open.clear()
            self._noted.forget()

    async def _arrived(self) -> list[Any]:
        """A few messages.

        Raises:
            ConnectionError: the connection is lost.
        """
        queue = self._link.arrived
        found = [await queue.get()]
        while not queue.empty() and len(found) < _BATCH:
            found.append(queue.get_nowait())
        for each in found:
            if not hasattr(each, "mid"):
                self._link.require(each)
                raise ConnectionError(_CLOSED)
        return found

    def _taken(self, arrived: Sequence[Any]) -> list[Message]:
        """Messages that were not taken before."""
        found = list[Message]()
        for each in arrived:
            digest = self._noted.digest(each.topic, each.payload)
            self._here.add(each.mid)
            if each.dup and self._noted.is_known(each.mid, digest):
                if each.mid not in self._open:
                    self._link.acknowledge(each.mid)
                continue
            message = self._message(each.payload)
            if each.qos:
                self._open[each.mid] = message.position
                self._noted.note(each.mid, digest, message.position)
            found.append(message)
        return found

    def _message(self, body: bytes) -> Message:
        """With its position, that its field says, or the next one."""
        if not self._field:
            self._last += 1
            return Message(body, self._last) if body else Unreadable(b"", self._last, EMPTY)
        try:
            said = whole_number(object_of(body), self._field)
        except Unfit as why:
            return Unreadable(body, self._last, str(why))
        if said is None:
            return Unreadable(body, self._last, NO_POSITION)
        self._last = max(self._last, said)
        return Message(body, said)


@asynccontextmanager
async def open_mqtt(
    server: str,
    topics: Sequence[str],
    *,
    client: str = "sottovoce",
    position: str = "",
    state: Path | None = None,
    session_s: int = 7 * 86_400,
    access: Access = Access(),  # noqa: B008 - it is frozen
    patience_s: float = 60.0,
) -> AsyncIterator[list[Part]]:
    """Topics of a broker that speaks MQTT 5, with QoS 1.

    Args:
        server: such as `mqtt://host:1883`; with `mqtts` through TLS.
        topics: perhaps with wildcards.
        client: identifier of the session, in which the broker keeps what comes while nobody reads: one for each learner.
        position: field of a message that says where it stands among all that are fed; empty: they are counted on.
        state: file that says, beyond a feeder's death, what the broker sends again; needless with a field.
        session_s: how long the broker keeps the session of a feeder that is away.
        access: user and password.
        patience_s: how long the broker may be away.

    Raises:
        NotReady: it refuses these credentials, or the topics.
        Unavailable: it is away for too long.
    """
    link = _Link(server, topics, client, access, session_s)
    patience, noted = Patience(link.what, patience_s), Unacknowledged(None if position else state, client)
    present: bool | None = None
    try:
        while present is None:
            try:
                present = await link.connect()
            except link.away as error:
                await patience.away(link.why(error))
        yield [_Session(link, client, position, noted, patience_s, present=present)]
    finally:
        with contextlib.suppress(*link.away):
            await link.close()
        noted.close()
