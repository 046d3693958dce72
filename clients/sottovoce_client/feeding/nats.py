"""Records from NATS: a stream of JetStream, read by sequence.

A learner's position is a stream sequence, and what is read begins behind it: a consumer that redelivers would bring a message
after a later one, and the learner would pass over it. So the server's consumer acknowledges nothing, lasts as long as it is used,
and is made anew where a number is missing. How far a learner is for good stands in a key-value bucket, with when the stream was
made.
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
"""Of the bookmarks: how far each feeder's learner is, beyond a run."""
_MAX_BATCH_MESSAGES, _FETCH_TIMEOUT_S, _CALL_TIMEOUT_S, _CONSUMER_IDLE_TIMEOUT_S, _CHECK_INTERVAL_S = (
    512,
    0.25,
    5.0,
    60.0,
    10.0,
)
_PING_INTERVAL_S, _CLOSE_TIMEOUT_S = 10, 1.0
_NO_SUBJECT = 10093
"""Error of JetStream: a filter that is no part of the stream's subjects."""


class _Link(BrokerConnection):
    """A connection, made again after it is lost."""

    def __init__(self, at: SourceConfig) -> None:
        super().__init__(at)
        for name, value, allowed in (
            ("stream", at.names[0], r"[^\s.*>/\\]+"),
            ("subject", at.settings["subject"], r"\S*"),
        ):
            if not re.fullmatch(allowed, value):
                raise SpecError(f"a {name} of NATS must be a name as NATS has them, got {value!r}")
        self.client = NATS.import_module("nats.aio.client")
        self.errors = NATS.import_module("nats.errors")
        self.not_found = NATS.import_module("nats.js.errors").NotFoundError
        self._servers = [f"{at.scheme}://{each}" for each in at.addresses]
        user, password, creds = at.credentials.user, at.credentials.password, at.settings["creds"]
        own = {"user": user, "password": password} if user else {"token": password or None}
        self._options = {
            **own,
            "tls": at.build_tls_context(),
            "user_credentials": None if creds is None else str(creds),
        }
        self.connection_errors = (self.errors.Error, OSError, TimeoutError)  # an APIError is an Error
        self._connection: Any = None
        self._said = list[BaseException]()
        self._lock = asyncio.Lock()

    async def start(self) -> list[BrokerPartition]:
        await self.jetstream()
        return [_Stream(self, self.source)]

    def list_reported_errors(self) -> Sequence[object]:
        return self._said

    async def jetstream(self) -> Any:
        """JetStream, on a connection that stands."""
        async with self._lock:
            if self._connection is None or not self._connection.is_connected:
                await self.close()
                self._connection = await self._connected()
            return self._connection.jetstream(timeout=_CALL_TIMEOUT_S)

    async def asked(self, call: str) -> dict[str, Any]:
        """What JetStream answers."""
        await self.jetstream()
        answer = await self._connection.request(f"$JS.API.{call}", b"", timeout=_CALL_TIMEOUT_S)
        found: dict[str, Any] = json.loads(answer.data)
        return found

    async def _connected(self) -> Any:
        """To the first server that answers."""
        failed: BaseException | None = None
        for server in self._servers:
            connection, connecting = _encrypting(self.client.Client)(), True
            self._said.clear()

            async def hear(error: BaseException) -> None:
                self._said = [error]
                if connecting:  # noqa: B023 - the library would try for ever, and leave a connection open each time
                    raise error

            try:
                await connection.connect(
                    server,
                    allow_reconnect=False,
                    connect_timeout=_CALL_TIMEOUT_S,
                    ping_interval=_PING_INTERVAL_S,
                    error_cb=hear,
                    name="sottovoce feed",
                    **self._options,
                )
            except self.connection_errors as error:
                failed = error
                await self._closed(connection)
                self.explain_error(error)
            else:
                return connection
            finally:
                connecting = False
        assert failed is not None  # noqa: S101 - there is a server
        raise failed

    def require(self) -> None:
        """A connection that stands."""
        if self._connection is None or not self._connection.is_connected:
            raise self.errors.ConnectionClosedError

    async def close(self) -> None:
        """Nothing is said or heard any more."""
        if self._connection is not None:
            await self._closed(self._connection)

    async def _closed(self, connection: Any) -> None:
        with contextlib.suppress(
            *self.connection_errors, AttributeError
        ):  # of a library before 2.10, where there is no connection yet
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):  # it would wait for ever where TLS had failed
                await connection.close()


def _encrypting(client: type[Any]) -> type[Any]:
    """A client that shows no password in the clear where TLS was asked for: the library's own does, if the server says no."""

    class Encrypting(client):  # type: ignore[misc]
        def _connect_command(self) -> Any:
            if self.options.get("tls") is not None and not self._server_info.get("tls_required"):
                raise ssl.SSLError("authentication in the clear is refused: the server speaks no TLS")
            return super()._connect_command()

    return Encrypting


class _Stream(BrokerPartition):
    """A stream, or the messages of some subjects in it: the one part of what is fed."""

    _link: _Link

    def __init__(self, link: _Link, at: SourceConfig) -> None:
        (self._stream,), self._subject = at.names, at.settings["subject"]
        name = f"{self._stream}/{self._subject}" if self._subject else self._stream
        super().__init__(link, name, f"stream {self._stream}")
        self._key = re.sub(r"[^-_a-zA-Z0-9]", lambda found: f"={ord(found[0]):02X}", f"{at.group}/{self.name}")
        self._created = self._subjects = ""

    async def _read_on(self, after: int) -> AsyncGenerator[Sequence[SourceMessage], None]:
        sub, count = await self._consumer(after), 0
        self._patience.log_subscription(self.name)
        looked = after, asyncio.get_running_loop().time()
        while count >= 0:
            messages, count = self._in_order(await self._fetched(sub), after, count)
            self._patience.record_answer()
            if messages:
                after = messages[-1].position
                yield messages
            if asyncio.get_running_loop().time() > looked[1] + _CHECK_INTERVAL_S:
                await self._look(looked[0])
                looked = after, asyncio.get_running_loop().time()

    def _explain_error(self, error: BaseException) -> str:
        if getattr(error, "err_code", None) == _NO_SUBJECT:
            raise DataError(
                f"{self._what} has messages of {self._subjects}: {self._subject} is none of them, nor part of one"
            ) from None
        return super()._explain_error(error)

    # ---- where to begin ----------------------------------------------------------------------------------------------

    async def _begin(self, after: int) -> int:
        """Position behind which to read, of a stream that is the one it was."""
        info, bookmark = await self._info(), await self._bookmark()
        self._created, self._subjects = str(info["created"]), ", ".join(info["config"].get("subjects") or ())
        same = bookmark is not None and bookmark[1] == self._created
        if after >= 0 and bookmark is not None and not same:
            raise self._build_replaced_error(
                f"the learner has its message {after}, of one that was made at another time"
            )
        if after < 0:
            state = info["state"]
            committed = bookmark[0] if bookmark is not None and same else None
            after = self._choose_start(max(0, state["first_seq"] - 1), state["last_seq"], committed)
        if not same:
            await self._commit(after)
        return after

    async def _info(self) -> dict[str, Any]:
        """Of the stream, as it is now, in JetStream's own words: the library's had no time of making before its version 2.15."""
        info = await self._link.asked(f"STREAM.INFO.{self._stream}")
        if (error := info.get("error")) is not None:
            if error.get("code") == 404:
                raise DataError(f"{self._link.display_name} has no stream {self._stream}")
            raise self._link.errors.Error(str(error.get("description")))
        if (retention := info["config"]["retention"]) != "limits":
            raise DataError(f"stream {self._stream} must keep messages by limits, not by {retention}, to be read again")
        return info

    async def _look(self, after: int) -> None:
        """Return whether the stream is the one it was, and has what comes behind a position.

        Raises:
            DataError: it is not.
        """
        info = await self._info()
        if str(info["created"]) != self._created or info["state"]["last_seq"] < after:
            raise self._build_replaced_error(
                f"it ends with message {info['state']['last_seq']}, and the learner has {after}"
            )
        if self._subject and (gone := info["state"]["first_seq"] - 1 - after) > 0:
            self._gone.add(gone, at_most=True)  # some may be of other subjects

    # ---- reading -----------------------------------------------------------------------------------------------------

    async def _consumer(self, after: int) -> Any:
        """A consumer of the server's that begins behind a position."""
        await self._look(after)
        api, js = NATS.import_module("nats.js.api"), await self._link.jetstream()
        config = api.ConsumerConfig(
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=after + 1,
            ack_policy=api.AckPolicy.NONE,
            inactive_threshold=_CONSUMER_IDLE_TIMEOUT_S,
            mem_storage=True,
        )
        return await js.pull_subscribe(self._subject, stream=self._stream, config=config)

    async def _fetched(self, sub: Any) -> list[Any]:
        """A few messages; none where none has come for a moment."""
        try:
            fetched: list[Any] = await sub.fetch(_MAX_BATCH_MESSAGES, timeout=_FETCH_TIMEOUT_S)
        except TimeoutError:
            self._link.require()
            return []
        return fetched

    def _in_order(self, fetched: Sequence[Any], after: int, count: int) -> tuple[list[SourceMessage], int]:
        """Messages, and how many the consumer has sent; -1: one of them did not arrive, nor did what came behind it."""
        messages = list[SourceMessage]()
        for each in fetched:
            place = each.metadata.sequence
            if place.consumer != count + 1:
                return messages, -1
            count, missing = place.consumer, place.stream - after - 1
            if missing and not self._subject:
                self._gone.add(missing)
            after = place.stream
            messages.append(SourceMessage(each.data, after))
        return messages, count

    # ---- the bookmark ------------------------------------------------------------------------------------------------

    async def _bucket(self) -> Any:
        """Of the bookmarks, made where it is not there yet."""
        js = await self._link.jetstream()
        try:
            return await js.key_value(BUCKET)
        except self._link.not_found:
            return await js.create_key_value(bucket=BUCKET)

    async def _bookmark(self) -> tuple[int, str] | None:
        """The position that is kept, and when the stream was made; None: there is no bookmark."""
        try:
            entry = await (await self._bucket()).get(self._key)
        except self._link.not_found:
            return None
        try:
            found = json.loads(entry.value or b"")
            return found["position"], found["created"]
        except (ValueError, TypeError, KeyError):
            raise DataError(f"key {self._key} of bucket {BUCKET} is no bookmark of a feeder") from None

    async def _commit(self, position: int) -> None:
        text = json.dumps({"position": position, "created": self._created})
        async with asyncio.timeout(_CALL_TIMEOUT_S):
            await (await self._bucket()).put(self._key, text.encode())


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
    connect=_Link,
    path="STREAM",
    allows_many_hosts=True,
)
"""Offered by an entry point."""
