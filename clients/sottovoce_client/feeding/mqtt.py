"""Records from MQTT 5, with QoS 1: acknowledged when the learner has stored them.

MQTT brokers have no positions. A field of the message gives one, or positions continue the learner's; then messages that
the broker sends again are recognised by their packet identifiers. The library runs on its own thread; all state belongs
to the event loop.
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
"""Reason codes without a retry: protocol, client identifier, password, not authorized, banned, method, topic."""
_SESSION_TAKEN_OVER = 0x8E
_CLOSED_TEXT = "the connection was closed"


def _run_on_event_loop(connection: Any) -> None:
    """Run a connected client of the library on this event loop, instead of its own thread.

    That thread waits with `select`, which supports no descriptor above 1,023: in a process with more it would do nothing.
    """
    loop, socket = asyncio.get_running_loop(), connection.socket()

    def read() -> None:
        connection.loop_read()
        while (
            connection.socket() is not None and getattr(socket, "pending", int)()
        ):  # TLS may have more decrypted bytes
            connection.loop_read()

    def maintain() -> None:
        if connection.loop_misc() == 0:  # it is still connected
            loop.call_later(_MAINTENANCE_INTERVAL_S, maintain)

    connection.on_socket_close = lambda *_: loop.remove_reader(socket)
    connection.on_socket_register_write = lambda *_: loop.add_writer(socket, connection.loop_write)
    connection.on_socket_unregister_write = lambda *_: loop.remove_writer(socket)
    loop.add_reader(socket, read)
    if connection.want_write():
        loop.add_writer(socket, connection.loop_write)
    maintain()


class _MqttConnection(BrokerConnection):
    """Session with a broker, over successive connections."""

    connection_errors = (OSError, TimeoutError, ValueError)

    def __init__(self, source: SourceConfig) -> None:
        super().__init__(source)
        self._paho, self._enums = MQTT.import_module("paho.mqtt.client"), MQTT.import_module("paho.mqtt.enums")
        self._packets = MQTT.import_module("paho.mqtt.packettypes").PacketTypes
        self._properties = MQTT.import_module("paho.mqtt.properties").Properties
        self._subscribe = MQTT.import_module("paho.mqtt.subscribeoptions")
        ((self._host, self._port),), self._tls = source.servers, source.build_tls_context()
        self._topics, self._client, self._credentials = (
            list(source.names),
            source.settings["client"],
            source.credentials,
        )
        state = None if source.position else source.settings["state"] or _default_state_path(self._client)
        self.unacknowledged = _UnacknowledgedMessages(state, self._client)
        self.arrived: asyncio.Queue[Any] = asyncio.Queue()
        self.dropped_count = 0
        self._connection: Any = None
        self._subscription_answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def start(self) -> list[BrokerPartition]:
        return [_MqttPartition(self, self._client, is_session_present=await self.connect())]

    async def connect(self) -> bool:
        """Open a new connection; return whether the broker knows the session."""
        await self._disconnect()
        arrived = asyncio.Queue[Any]()
        connected: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.arrived = arrived

        def resolve(future: asyncio.Future[Any], result: Any) -> None:
            if not future.done():
                future.set_result(result)

        def handle_disconnect(reason: Any) -> None:
            resolve(connected, (False, reason))
            resolve(self._subscription_answer, [reason])
            arrived.put_nowait(reason)

        def handle_message(message: Any) -> None:
            if message.qos == 0 and arrived.qsize() >= _MAX_UNACKNOWLEDGED_MESSAGES:  # QoS 0 has no flow control
                self.dropped_count += 1
            else:
                arrived.put_nowait(message)

        connection, session = self._create_client(), self._properties(self._packets.CONNECT)
        session.SessionExpiryInterval, session.ReceiveMaximum = (
            self.source.settings["session"],
            _MAX_UNACKNOWLEDGED_MESSAGES,
        )
        connection.on_connect = lambda _c, _u, flags, reason, _p: resolve(connected, (flags.session_present, reason))
        connection.on_subscribe = lambda _c, _u, _m, reasons, _p: resolve(self._subscription_answer, reasons)
        connection.on_disconnect = lambda _c, _u, _f, reason, _p: handle_disconnect(reason)
        connection.on_message = lambda _c, _u, message: handle_message(message)
        await asyncio.to_thread(
            connection.connect,
            self._host,
            self._port,
            keepalive=_KEEPALIVE_INTERVAL_S,
            clean_start=False,
            properties=session,
        )
        if connection.socket() is None:  # closed before the handshake
            raise ConnectionError(_CLOSED_TEXT)
        self._connection = connection
        _run_on_event_loop(connection)
        async with asyncio.timeout(_CALL_TIMEOUT_S):
            is_session_present, reason = await connected
            self.require_success(reason)
            for reason in await self._subscribe_topics():
                self.require_success(reason)
        return bool(is_session_present)

    async def _subscribe_topics(self) -> Sequence[Any]:
        """Subscribe; return the broker's reason code for each topic, after all that was sent before."""
        self._subscription_answer = asyncio.get_running_loop().create_future()
        options = self._subscribe.SubscribeOptions
        own = options(qos=1, retainHandling=options.RETAIN_DO_NOT_SEND)
        self._connection.subscribe([(topic, own) for topic in self._topics])
        reasons: Sequence[Any] = await self._subscription_answer
        return reasons

    def _create_client(self) -> Any:
        """Create a client of the library that does not reconnect by itself."""
        created = self._paho.Client(
            self._enums.CallbackAPIVersion.VERSION2,
            client_id=self._client,
            protocol=self._paho.MQTTv5,
            reconnect_on_failure=False,
            manual_ack=True,
        )
        if self._credentials.user:
            created.username_pw_set(self._credentials.user, self._credentials.password or None)
        if self._tls is not None:
            created.tls_set_context(self._tls)
        return created

    def require_success(self, reason: Any) -> None:
        """Raise unless a reason code means success.

        Raises:
            FailedPrecondition: the broker has refused permanently.
            ConnectionError: the broker has refused.
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
        """Acknowledge a stored message."""
        if self._connection is not None:
            self._connection.ack(mid, 1)

    async def close(self) -> None:
        with contextlib.suppress(*self.connection_errors):
            await self._disconnect()
        self.unacknowledged.close()

    async def _disconnect(self) -> None:
        """Close the connection; the session remains."""
        if self._connection is not None:
            if self._connection.is_connected():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CLOSE_TIMEOUT_S):  # unacknowledged messages are sent again
                        await self._subscribe_topics()
            connection, self._connection = self._connection, None
            connection.disconnect()
            connection.loop_write()


class _MqttPartition(BrokerPartition):
    """Messages of some topics, in the broker's order."""

    _connection: _MqttConnection

    def __init__(self, connection: _MqttConnection, name: str, *, is_session_present: bool) -> None:
        super().__init__(connection, name, f"session {name}")
        self._counter, self._unacknowledged = (
            PositionCounter(connection.source.position, -1, requires_ascending=False),
            connection.unacknowledged,
        )
        self._is_session_present: bool | None = is_session_present
        self._positions = dict[int, int]()
        """Positions of unacknowledged messages, by packet identifier."""
        self._connection_ids = set[int]()
        """Packet identifiers of this connection: only these may be acknowledged on it."""

    async def _begin(self, after: int) -> int:
        self._counter.last_position = after
        self._unacknowledged.begin(after)
        return after

    async def _read_on(self, after: int) -> AsyncGenerator[Sequence[SourceMessage], None]:
        if self._is_session_present is None:
            self._is_session_present = await self._connection.connect()
        is_session_present, self._is_session_present = self._is_session_present, None
        self._begin_connection(is_session_present=is_session_present)
        self._retry_timer.log_subscription(self.name)
        while True:
            messages = self._select_new(await self._receive_messages())
            if self._connection.dropped_count:
                self._lost_messages.add(self._connection.dropped_count)
                self._connection.dropped_count = 0
            if messages:
                await self._unacknowledged.flush()
                yield messages

    async def _commit(self, position: int) -> None:
        self._unacknowledged.keep(position)
        for mid in [mid for mid, source in self._positions.items() if source <= position]:
            del self._positions[mid]
            if mid in self._connection_ids:
                self._connection.acknowledge(mid)

    def _begin_connection(self, *, is_session_present: bool) -> None:
        """Begin a connection, in a session that the broker knows or has forgotten."""
        self._connection_ids.clear()
        if not is_session_present:
            if self._positions or self._unacknowledged.has_messages:
                self._lost_messages.add(0)
            self._positions.clear()
            self._unacknowledged.forget()

    async def _receive_messages(self) -> list[Any]:
        """Return a few messages.

        Raises:
            ConnectionError: the connection is lost.
        """
        queue = self._connection.arrived
        messages = [await queue.get()]
        while not queue.empty() and len(messages) < _MAX_BATCH_MESSAGES:
            messages.append(queue.get_nowait())
        for each in messages:
            if not hasattr(each, "mid"):
                self._connection.require_success(each)
                raise ConnectionError(_CLOSED_TEXT)
        return messages

    def _select_new(self, arrived: Sequence[Any]) -> list[SourceMessage]:
        """Return new messages."""
        messages = list[SourceMessage]()
        for each in arrived:
            digest = self._unacknowledged.digest(each.topic, each.payload)
            self._connection_ids.add(each.mid)
            if each.dup and self._unacknowledged.is_known(each.mid, digest):
                if each.mid not in self._positions:
                    self._connection.acknowledge(each.mid)
                continue
            message = self._counter.number_message(each.payload)
            if each.qos:
                self._positions[each.mid] = message.position
                self._unacknowledged.add(each.mid, digest, message.position)
            messages.append(message)
        return messages


# ---- messages that the broker may send again ---------------------------------------------------------------------------


def _default_state_path(client: str) -> Path:
    """Return the default path of a session's file, in this user's state folder."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "sottovoce")
    return folder / f"{quote(client, safe='')}.mqtt"


_TABLES = (
    "CREATE TABLE IF NOT EXISTS session (client TEXT, key TEXT, kept INTEGER)",
    "CREATE TABLE IF NOT EXISTS messages (mid INTEGER PRIMARY KEY, digest TEXT, position INTEGER)",
)
"""Tables: the session, with the position up to which the learner has its messages; the last message of each packet identifier."""


class _UnacknowledgedMessages:
    """Unacknowledged messages by packet identifier. `begin` must be called first.

    Args:
        path: SQLite file that survives the feeder; None: in memory.
        client: client identifier of the session.
    """

    def __init__(self, path: Path | None, client: str) -> None:
        self._path, self._client, self._key = path, client, b""
        self._db: sqlite3.Connection | None = None

    def begin(self, after: int) -> None:
        """Continue after a position: later messages are forgotten, because they will be fed with other positions.

        Raises:
            DataError: the file was not written by a feeder.
            FailedPrecondition: it cannot be written, or another feeder has it.
        """
        try:
            if self._db is None:
                self._db = self._open_database()
            self._execute("DELETE FROM messages WHERE position > max(?, (SELECT kept FROM session))", after)
            self._execute("UPDATE messages SET position = -1")
            self._execute("UPDATE session SET kept = -1")
            self._db.commit()
        except OSError as error:
            raise FailedPrecondition(f"{self._path} cannot be written: {error.strerror}") from None
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                why = f"another feeder has {self._path}: each needs its own ?client= and ?state="
                raise FailedPrecondition(why) from None
            if error.sqlite_errorcode in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR):
                raise DataError(f"{self._path} was not written by a feeder") from None
            raise FailedPrecondition(f"{self._path} cannot be written: {error}") from None

    def _open_database(self) -> sqlite3.Connection:
        """Open the file, exclusively until this process ends."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch(0o600)
        created = sqlite3.connect(self._path or ":memory:", timeout=0, check_same_thread=False)
        try:
            for each in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
                created.execute(f"PRAGMA {each}")
            for each in _TABLES:
                created.execute(each)
            key = secrets.token_hex(16)
            created.execute(
                "INSERT INTO session SELECT ?, ?, -1 WHERE NOT EXISTS (SELECT 1 FROM session)", (self._client, key)
            )
            created.commit()
            client, key = created.execute("SELECT client, key FROM session").fetchone()
            if client != self._client:
                raise DataError(f"{self._path} is of client {client!r}, and this is {self._client!r}")
        except BaseException:
            created.close()
            raise
        self._key = bytes.fromhex(key)
        return created

    def _execute(self, statement: str, *values: int | str) -> list[Any]:
        assert self._db is not None  # noqa: S101 - it has begun
        return self._db.execute(statement, values).fetchall()

    def digest(self, topic: str, body: bytes) -> str:
        """Return the keyed digest of a message; without the file it reveals nothing of it."""
        created = hashlib.blake2b(body, digest_size=16, key=self._key, person=b"mqtt")
        created.update(topic.encode())
        return created.hexdigest()

    @property
    def has_messages(self) -> bool:
        """True if any message is known."""
        return bool(self._execute("SELECT 1 FROM messages LIMIT 1"))

    def is_known(self, mid: int, digest: str) -> bool:
        """Return whether a message was the last one with its identifier."""
        return bool(self._execute("SELECT 1 FROM messages WHERE mid = ? AND digest = ?", mid, digest))

    def add(self, mid: int, digest: str, position: int) -> None:
        """Add a message before it is fed; `flush` must follow."""
        self._execute("REPLACE INTO messages VALUES (?, ?, ?)", mid, digest, position)

    def keep(self, position: int) -> None:
        """Note that the learner has all messages up to a position."""
        self._execute("UPDATE session SET kept = max(kept, ?)", position)

    def forget(self) -> None:
        """Forget all messages: the broker has, and begins new identifiers."""
        self._execute("DELETE FROM messages")

    async def flush(self) -> None:
        """Make all changes durable."""
        if self._db is not None:
            await asyncio.to_thread(self._db.commit)

    def close(self) -> None:
        """Close the file."""
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
    connect=_MqttConnection,
    path="TOPIC",
    allows_many_names=True,
)
"""Feed of MQTT, offered by an entry point."""
