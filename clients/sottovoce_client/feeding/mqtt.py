"""Records from MQTT 5, with QoS 1: acknowledged when they are in the learner's keeping.

A broker of MQTT knows no positions. A field of the message says one, or positions are counted on from the learner's; then what
the broker sends again is told by its packet identifier. The library speaks on a thread of its own; all state is the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import sqlite3
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sottovoce_client.feeding.broker import BrokerConnection, BrokerPartition, Feed, SourceConfig, UrlSetting
from sottovoce_client.feeding.records import PositionCounter, SourceMessage
from sottovoce_core.errors import DataError, FailedPrecondition

(
    _MAX_BATCH_MESSAGES,
    _MAX_UNACKNOWLEDGED_MESSAGES,
    _CALL_TIMEOUT_S,
    _CLOSE_TIMEOUT_S,
    _KEEPALIVE_INTERVAL_S,
    _MAINTENANCE_INTERVAL_S,
) = 512, 4_096, 10.0, 2.0, 20, 1.0
_NOT_AUTHORIZED = frozenset({0x84, 0x85, 0x86, 0x87, 0x8A, 0x8C, 0x90})
"""Reasons that no patience mends: protocol, client identifier, password, not authorized, banned, method, topic."""
_SESSION_TAKEN_OVER = 0x8E
_CLOSED_TEXT = "the connection was closed"


def _drive(connection: Any) -> None:
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
            loop.call_later(_MAINTENANCE_INTERVAL_S, turn)

    connection.on_socket_close = lambda *_: loop.remove_reader(socket)
    connection.on_socket_register_write = lambda *_: loop.add_writer(socket, connection.loop_write)
    connection.on_socket_unregister_write = lambda *_: loop.remove_writer(socket)
    loop.add_reader(socket, read)
    if connection.want_write():
        loop.add_writer(socket, connection.loop_write)
    turn()


class _Link(BrokerConnection):
    """A session with a broker; a connection of it after the other."""

    connection_errors = (OSError, TimeoutError, ValueError)

    def __init__(self, at: SourceConfig) -> None:
        super().__init__(at)
        self._paho, self._enums = MQTT.import_module("paho.mqtt.client"), MQTT.import_module("paho.mqtt.enums")
        self._packets = MQTT.import_module("paho.mqtt.packettypes").PacketTypes
        self._properties = MQTT.import_module("paho.mqtt.properties").Properties
        self._subscribe = MQTT.import_module("paho.mqtt.subscribeoptions")
        ((self._host, self._port),), self._tls = at.servers, at.build_tls_context()
        self._topics, self._client, self._access = list(at.names), at.settings["client"], at.credentials
        state = None if at.position else at.settings["state"] or _usual_place(self._client)
        self.noted = _Unacknowledged(state, self._client)
        self.arrived: asyncio.Queue[Any] = asyncio.Queue()
        self.dropped = 0
        self._connection: Any = None
        self._answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def start(self) -> list[BrokerPartition]:
        return [_Session(self, self._client, present=await self.connect())]

    async def connect(self) -> bool:
        """On a new connection; whether the broker knows the session."""
        await self._disconnect()
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
            if message.qos == 0 and arrived.qsize() >= _MAX_UNACKNOWLEDGED_MESSAGES:  # no receipt holds it back
                self.dropped += 1
            else:
                arrived.put_nowait(message)

        connection, session = self._made(), self._properties(self._packets.CONNECT)
        session.SessionExpiryInterval, session.ReceiveMaximum = (
            self.source.settings["session"],
            _MAX_UNACKNOWLEDGED_MESSAGES,
        )
        connection.on_connect = lambda _c, _u, flags, reason, _p: tell(connected, (flags.session_present, reason))
        connection.on_subscribe = lambda _c, _u, _m, reasons, _p: tell(self._answered, reasons)
        connection.on_disconnect = lambda _c, _u, _f, reason, _p: lost(reason)
        connection.on_message = lambda _c, _u, message: take(message)
        await asyncio.to_thread(
            connection.connect,
            self._host,
            self._port,
            keepalive=_KEEPALIVE_INTERVAL_S,
            clean_start=False,
            properties=session,
        )
        if connection.socket() is None:  # closed before it had said who it is
            raise ConnectionError(_CLOSED_TEXT)
        self._connection = connection
        _drive(connection)
        async with asyncio.timeout(_CALL_TIMEOUT_S):
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

    def require(self, reason: Any) -> None:
        """That the broker has not refused.

        Raises:
            FailedPrecondition: it has, for good.
            ConnectionError: it has.
        """
        if reason.value == _SESSION_TAKEN_OVER:
            raise FailedPrecondition(
                f"another feeder has taken over the session of client {self._client!r} with {self.display_name}"
            )
        if reason.value in _NOT_AUTHORIZED:
            raise self.build_refusal_error(str(reason).lower())
        if reason.is_failure:
            raise ConnectionError(str(reason).lower())

    def acknowledge(self, mid: int) -> None:
        """A message is kept."""
        if self._connection is not None:
            self._connection.ack(mid, 1)

    async def close(self) -> None:
        with contextlib.suppress(*self.connection_errors):
            await self._disconnect()
        self.noted.close()

    async def _disconnect(self) -> None:
        """End the connection; the session goes on."""
        if self._connection is not None:
            if self._connection.is_connected():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CLOSE_TIMEOUT_S):  # what it was not told is sent again
                        await self._subscribed()
            connection, self._connection = self._connection, None
            connection.disconnect()
            connection.loop_write()


class _Session(BrokerPartition):
    """Messages of some topics, in the order in which the broker sends them."""

    _link: _Link

    def __init__(self, link: _Link, name: str, *, present: bool) -> None:
        super().__init__(link, name, f"session {name}")
        self._numbered, self._noted = PositionCounter(link.source.position, -1, requires_ascending=False), link.noted
        self._present: bool | None = present
        self._open = dict[int, int]()
        """Positions of messages that are not acknowledged, by packet identifier."""
        self._here = set[int]()
        """Identifiers that came on this connection: only these may be acknowledged on it."""

    async def _begin(self, after: int) -> int:
        self._numbered.last_position = after
        self._noted.begin(after)
        return after

    async def _read_on(self, after: int) -> AsyncGenerator[Sequence[SourceMessage], None]:
        if self._present is None:
            self._present = await self._link.connect()
        present, self._present = self._present, None
        self._renewed(present=present)
        self._patience.log_subscription(self.name)
        while True:
            messages = self._taken(await self._arrived())
            if self._link.dropped:
                self._gone.add(self._link.dropped)
                self._link.dropped = 0
            if messages:
                await self._noted.flush()
                yield messages

    async def _commit(self, position: int) -> None:
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
        while not queue.empty() and len(found) < _MAX_BATCH_MESSAGES:
            found.append(queue.get_nowait())
        for each in found:
            if not hasattr(each, "mid"):
                self._link.require(each)
                raise ConnectionError(_CLOSED_TEXT)
        return found

    def _taken(self, arrived: Sequence[Any]) -> list[SourceMessage]:
        """Messages that were not taken before."""
        found = list[SourceMessage]()
        for each in arrived:
            digest = self._noted.digest(each.topic, each.payload)
            self._here.add(each.mid)
            if each.dup and self._noted.is_known(each.mid, digest):
                if each.mid not in self._open:
                    self._link.acknowledge(each.mid)
                continue
            message = self._numbered.number_message(each.payload)
            if each.qos:
                self._open[each.mid] = message.position
                self._noted.note(each.mid, digest, message.position)
            found.append(message)
        return found


# ---- messages that the broker may send again ---------------------------------------------------------------------------


def _usual_place(client: str) -> Path:
    """File of a session, in this user's folder for what outlasts a process."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "sottovoce")
    return folder / f"{quote(client, safe='')}.mqtt"


_TABLES = (
    "CREATE TABLE IF NOT EXISTS session (client TEXT, key TEXT, kept INTEGER)",
    "CREATE TABLE IF NOT EXISTS messages (mid INTEGER PRIMARY KEY, digest TEXT, position INTEGER)",
)
"""One session, with the position up to which the learner has its messages; the last message under each packet identifier."""


class _Unacknowledged:
    """Messages by their packet identifiers. `begin` comes first.

    Args:
        path: file in which they outlast the feeder, a database of SQLite's; None: they do not.
        client: whose session they are of.
    """

    def __init__(self, path: Path | None, client: str) -> None:
        self._path, self._client, self._key = path, client, b""
        self._db: sqlite3.Connection | None = None

    def begin(self, after: int) -> None:
        """Go on behind a position: what is known of later ones is forgotten, for it will be fed under other positions.

        Raises:
            DataError: the file is none of ours.
            FailedPrecondition: it cannot be written, or another feeder has it.
        """
        try:
            if self._db is None:
                self._db = self._opened()
            self._do("DELETE FROM messages WHERE position > max(?, (SELECT kept FROM session))", after)
            self._do("UPDATE messages SET position = -1")
            self._do("UPDATE session SET kept = -1")
            self._db.commit()
        except OSError as error:
            raise FailedPrecondition(f"{self._path} cannot be written: {error.strerror}") from None
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                why = f"another feeder has {self._path}: each needs a ?client= and a ?state= of its own"
                raise FailedPrecondition(why) from None
            if error.sqlite_errorcode in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR):
                raise DataError(f"{self._path} is no file that a feeder has written") from None
            raise FailedPrecondition(f"{self._path} cannot be written: {error}") from None

    def _opened(self) -> sqlite3.Connection:
        """The file, which nobody else has until this process ends."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch(0o600)
        made = sqlite3.connect(self._path or ":memory:", timeout=0, check_same_thread=False)
        try:
            for each in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
                made.execute(f"PRAGMA {each}")
            for each in _TABLES:
                made.execute(each)
            key = secrets.token_hex(16)
            made.execute(
                "INSERT INTO session SELECT ?, ?, -1 WHERE NOT EXISTS (SELECT 1 FROM session)", (self._client, key)
            )
            made.commit()
            client, key = made.execute("SELECT client, key FROM session").fetchone()
            if client != self._client:
                raise DataError(f"{self._path} is of client {client!r}, and this is {self._client!r}")
        except BaseException:
            made.close()
            raise
        self._key = bytes.fromhex(key)
        return made

    def _do(self, statement: str, *values: int | str) -> list[Any]:
        assert self._db is not None  # noqa: S101 - it has begun
        return self._db.execute(statement, values).fetchall()

    def digest(self, topic: str, body: bytes) -> str:
        """Of a message, which tells nothing of it without the file."""
        made = hashlib.blake2b(body, digest_size=16, key=self._key, person=b"mqtt")
        made.update(topic.encode())
        return made.hexdigest()

    @property
    def any(self) -> bool:
        """Return whether messages are known at all."""
        return bool(self._do("SELECT 1 FROM messages LIMIT 1"))

    def is_known(self, mid: int, digest: str) -> bool:
        """Return whether a message was the last one under its identifier."""
        return bool(self._do("SELECT 1 FROM messages WHERE mid = ? AND digest = ?", mid, digest))

    def note(self, mid: int, digest: str, position: int) -> None:
        """A message that will be fed; `flush` before that."""
        self._do("REPLACE INTO messages VALUES (?, ?, ?)", mid, digest, position)

    def keep(self, position: int) -> None:
        """Everything up to a position is kept."""
        self._do("UPDATE session SET kept = max(kept, ?)", position)

    def forget(self) -> None:
        """The broker has: identifiers begin anew."""
        self._do("DELETE FROM messages")

    async def flush(self) -> None:
        """What was noted outlasts a loss of power."""
        if self._db is not None:
            await asyncio.to_thread(self._db.commit)

    def close(self) -> None:
        """Nothing is noted any more."""
        if self._db is not None:
            self._db.commit()
            self._db.close()
        self._db = None


MQTT = Feed(
    name="MQTT",
    schemes={"mqtt": 1883, "mqtts": 8883},
    tls_schemes=frozenset({"mqtts"}),
    help="Topics of a broker of MQTT 5, perhaps with wildcards, with QoS 1. --position names a field that counts them all.",
    examples=(
        "mqtt://broker:1883/wards/north/#?client=feeder-north",
        "mqtts://broker/wards/+/north,beds?client=a&session=3600",
    ),
    settings=(
        UrlSetting("client", "Identifier of the session that the broker keeps: one for each feeder.", is_required=True),
        UrlSetting(
            "session",
            "Seconds for which the broker keeps the session while no feeder is there.",
            604_800,
            minimum=1,
            maximum=2**32 - 1,
        ),
        UrlSetting(
            "state",
            "File that tells, after the feeder's death, which messages the broker sends again; needless with --position.",
            None,
            default_help="~/.local/state/sottovoce/CLIENT.mqtt",
        ),
    ),
    modules=("paho.mqtt",),
    has_positions=True,
    connect=_Link,
    path="TOPIC",
    allows_many_names=True,
)
"""Offered by an entry point."""
