"""Records from NATS: a stream of JetStream, read by sequence.

A learner's position is a stream sequence, and reading begins after it: a consumer that redelivers could bring a message
after a later one, and the learner would skip it. So the server's consumer acknowledges nothing, lives as long as it is
used, and is recreated where a number is missing. The learner's last position is kept in a key-value bucket, with the
creation time of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from sottovoce_client.feeding.broker import (
    GROUP_SETTING,
    START_SETTING,
    BrokerConnection,
    BrokerPartition,
    Feed,
    SourceConfig,
    UrlSetting,
)
from sottovoce_client.feeding.records import SourceMessage
from sottovoce_core.errors import DataError, SpecError

BUCKET = "sottovoce"
"""Bucket of the bookmarks: the position of each feeder's learner, beyond a run."""
_MAX_BATCH_MESSAGES, _FETCH_TIMEOUT_S, _CALL_TIMEOUT_S, _CONSUMER_IDLE_TIMEOUT_S, _CHECK_INTERVAL_S = (
    512,
    0.25,
    5.0,
    60.0,
    10.0,
)
_PING_INTERVAL_S, _CLOSE_TIMEOUT_S = 10, 1.0
_NO_SUBJECT = 10093
"""JetStream error code: a filter outside the stream's subjects."""


class _NatsConnection(BrokerConnection):
    """Connection to a server, reopened after it is lost."""

    def __init__(self, source: SourceConfig) -> None:
        super().__init__(source)
        for name, value, allowed in (
            ("stream", source.names[0], r"[^\s.*>/\\]+"),
            ("subject", source.settings["subject"], r"\S*"),
        ):
            if not re.fullmatch(allowed, value):
                raise SpecError(f"a {name} of NATS must be a name as NATS has them, got {value!r}")
        self.client = NATS.import_module("nats.aio.client")
        self.errors = NATS.import_module("nats.errors")
        self.not_found = NATS.import_module("nats.js.errors").NotFoundError
        self._servers = [f"{source.scheme}://{each}" for each in source.addresses]
        user, password, creds = source.credentials.user, source.credentials.password, source.settings["creds"]
        own = {"user": user, "password": password} if user else {"token": password or None}
        self._options = {
            **own,
            "tls": source.build_tls_context(),
            "user_credentials": None if creds is None else str(creds),
        }
        self.connection_errors = (self.errors.Error, OSError, TimeoutError)  # an APIError is an Error
        self._connection: Any = None
        self._reported_errors = list[BaseException]()
        self._lock = asyncio.Lock()

    async def start(self) -> list[BrokerPartition]:
        await self.jetstream()
        return [_NatsPartition(self, self.source)]

    def list_reported_errors(self) -> Sequence[object]:
        return self._reported_errors

    async def jetstream(self) -> Any:
        """Return JetStream, on an open connection."""
        async with self._lock:
            if self._connection is None or not self._connection.is_connected:
                await self.close()
                self._connection = await self._connect()
            return self._connection.jetstream(timeout=_CALL_TIMEOUT_S)

    async def call_api(self, call: str) -> dict[str, Any]:
        """Call the JetStream API."""
        await self.jetstream()
        answer = await self._connection.request(f"$JS.API.{call}", b"", timeout=_CALL_TIMEOUT_S)
        result: dict[str, Any] = json.loads(answer.data)
        return result

    async def _connect(self) -> Any:
        """Connect to the first server that answers."""
        failed: BaseException | None = None
        for server in self._servers:
            connection, connecting = _require_encryption(self.client.Client)(), True
            self._reported_errors.clear()

            async def record_error(error: BaseException) -> None:
                self._reported_errors = [error]
                if connecting:  # noqa: B023 - the library would retry forever, and leave a connection open each time
                    raise error

            try:
                await connection.connect(
                    server,
                    allow_reconnect=False,
                    connect_timeout=_CALL_TIMEOUT_S,
                    ping_interval=_PING_INTERVAL_S,
                    error_cb=record_error,
                    name="sottovoce feed",
                    **self._options,
                )
            except self.connection_errors as error:
                failed = error
                await self._close_connection(connection)
                self.explain_error(error)
            else:
                return connection
            finally:
                connecting = False
        assert failed is not None  # noqa: S101 - there is a server
        raise failed

    def require_connected(self) -> None:
        """Require an open connection."""
        if self._connection is None or not self._connection.is_connected:
            raise self.errors.ConnectionClosedError

    async def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            await self._close_connection(self._connection)

    async def _close_connection(self, connection: Any) -> None:
        with contextlib.suppress(*self.connection_errors, AttributeError):  # library before 2.10, without a connection
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):  # it would wait forever after a TLS failure
                await connection.close()


def _require_encryption(client: type[Any]) -> type[Any]:
    """Return a client class that never sends a password unencrypted where TLS was requested.

    The library's class does, if the server has no TLS.
    """

    class Encrypting(client):  # type: ignore[misc]
        def _connect_command(self) -> Any:
            if self.options.get("tls") is not None and not self._server_info.get("tls_required"):
                raise ssl.SSLError("authentication in the clear is refused: the server has no TLS")
            return super()._connect_command()

    return Encrypting


class _NatsPartition(BrokerPartition):
    """Stream, or the messages of some of its subjects: the only partition of the source."""

    _connection: _NatsConnection

    def __init__(self, connection: _NatsConnection, source: SourceConfig) -> None:
        (self._stream,), self._subject = source.names, source.settings["subject"]
        name = f"{self._stream}/{self._subject}" if self._subject else self._stream
        super().__init__(connection, name, f"stream {self._stream}")
        self._bookmark_key = re.sub(
            r"[^-_a-zA-Z0-9]", lambda result: f"={ord(result[0]):02X}", f"{source.group}/{self.name}"
        )
        self._stream_created = self._subjects = ""

    async def _read_on(self, after: int) -> AsyncGenerator[Sequence[SourceMessage], None]:
        sub, count = await self._create_consumer(after), 0
        self._retry_timer.log_subscription(self.name)
        last_check = after, asyncio.get_running_loop().time()
        while count >= 0:
            messages, count = self._take_in_order(await self._fetch(sub), after, count)
            self._retry_timer.record_answer()
            if messages:
                after = messages[-1].position
                yield messages
            if asyncio.get_running_loop().time() > last_check[1] + _CHECK_INTERVAL_S:
                await self._check_stream(last_check[0])
                last_check = after, asyncio.get_running_loop().time()

    def _explain_error(self, error: BaseException) -> str:
        if getattr(error, "err_code", None) == _NO_SUBJECT:
            raise DataError(
                f"{self._display_name} has messages of {self._subjects}: {self._subject} is not among them"
            ) from None
        return super()._explain_error(error)

    # ---- start position ----------------------------------------------------------------------------------------------

    async def _begin(self, after: int) -> int:
        """Return the position to read after, in an unchanged stream."""
        info, bookmark = await self._fetch_info(), await self._read_bookmark()
        self._stream_created, self._subjects = str(info["created"]), ", ".join(info["config"].get("subjects") or ())
        is_same_stream = bookmark is not None and bookmark[1] == self._stream_created
        if after >= 0 and bookmark is not None and not is_same_stream:
            raise self._build_replaced_error(
                f"the learner has its message {after}, of one that was made at another time"
            )
        if after < 0:
            state = info["state"]
            committed = bookmark[0] if bookmark is not None and is_same_stream else None
            after = self._choose_start(max(0, state["first_seq"] - 1), state["last_seq"], committed)
        if not is_same_stream:
            await self._commit(after)
        return after

    async def _fetch_info(self) -> dict[str, Any]:
        """Return the current state of the stream from the JetStream API.

        The library has no creation time before its version 2.15.
        """
        info = await self._connection.call_api(f"STREAM.INFO.{self._stream}")
        if (error := info.get("error")) is not None:
            if error.get("code") == 404:
                raise DataError(f"{self._connection.display_name} has no stream {self._stream}")
            raise self._connection.errors.Error(str(error.get("description")))
        if (retention := info["config"]["retention"]) != "limits":
            raise DataError(f"stream {self._stream} must keep messages by limits, not by {retention}, to be read again")
        return info

    async def _check_stream(self, after: int) -> None:
        """Check that the stream is unchanged, and has the messages after a position.

        Raises:
            DataError: it is not.
        """
        info = await self._fetch_info()
        if str(info["created"]) != self._stream_created or info["state"]["last_seq"] < after:
            raise self._build_replaced_error(
                f"it ends with message {info['state']['last_seq']}, and the learner has {after}"
            )
        if self._subject and (gone := info["state"]["first_seq"] - 1 - after) > 0:
            self._lost_messages.add(gone, at_most=True)  # some may have other subjects

    # ---- reading -----------------------------------------------------------------------------------------------------

    async def _create_consumer(self, after: int) -> Any:
        """Create a consumer on the server that begins after a position."""
        await self._check_stream(after)
        api, js = NATS.import_module("nats.js.api"), await self._connection.jetstream()
        config = api.ConsumerConfig(
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=after + 1,
            ack_policy=api.AckPolicy.NONE,
            inactive_threshold=_CONSUMER_IDLE_TIMEOUT_S,
            mem_storage=True,
        )
        return await js.pull_subscribe(self._subject, stream=self._stream, config=config)

    async def _fetch(self, sub: Any) -> list[Any]:
        """Return a few messages; none after a moment without messages."""
        try:
            fetched: list[Any] = await sub.fetch(_MAX_BATCH_MESSAGES, timeout=_FETCH_TIMEOUT_S)
        except TimeoutError:
            self._connection.require_connected()
            return []
        return fetched

    def _take_in_order(self, fetched: Sequence[Any], after: int, count: int) -> tuple[list[SourceMessage], int]:
        """Return messages, and the number sent by the consumer; -1: a message is missing, and all after it are discarded."""
        messages = list[SourceMessage]()
        for each in fetched:
            place = each.metadata.sequence
            if place.consumer != count + 1:
                return messages, -1
            count, missing = place.consumer, place.stream - after - 1
            if missing and not self._subject:
                self._lost_messages.add(missing)
            after = place.stream
            messages.append(SourceMessage(each.data, after))
        return messages, count

    # ---- the bookmark ------------------------------------------------------------------------------------------------

    async def _open_bucket(self) -> Any:
        """Return the bucket of the bookmarks, created if missing."""
        js = await self._connection.jetstream()
        try:
            return await js.key_value(BUCKET)
        except self._connection.not_found:
            return await js.create_key_value(bucket=BUCKET)

    async def _read_bookmark(self) -> tuple[int, str] | None:
        """Return the kept position and the creation time of the stream; None: there is no bookmark."""
        try:
            entry = await (await self._open_bucket()).get(self._bookmark_key)
        except self._connection.not_found:
            return None
        try:
            result = json.loads(entry.value or b"")
            return result["position"], result["created"]
        except (ValueError, TypeError, KeyError):
            raise DataError(f"key {self._bookmark_key} of bucket {BUCKET} is not a bookmark of a feeder") from None

    async def _commit(self, position: int) -> None:
        text = json.dumps({"position": position, "created": self._stream_created})
        async with asyncio.timeout(_CALL_TIMEOUT_S):
            await (await self._open_bucket()).put(self._bookmark_key, text.encode())


NATS = Feed(
    name="NATS",
    schemes={"nats": 4222, "tls": 4222},
    tls_schemes=frozenset({"tls"}),
    help="A stream of NATS JetStream with retention by limits, each record once. A password without a user is a token.",
    examples=(
        "nats://broker:4222/WARDS?subject=wards.north&group=north",
        "tls://one:4222,two:4222/WARDS?creds=north.creds",
    ),
    settings=(
        UrlSetting(
            "subject", "Messages of this subject alone, perhaps with wildcards.", default_help="all of the stream"
        ),
        START_SETTING,
        GROUP_SETTING,
        UrlSetting("creds", "File with a user's JWT and seed.", None),
    ),
    modules=("nats",),
    connect=_NatsConnection,
    path="STREAM",
    allows_many_hosts=True,
)
"""Feed of NATS, offered by an entry point."""
