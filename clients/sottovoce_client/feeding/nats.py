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
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sottovoce.errors import DataError, NotReady, SpecError
from sottovoce.optional import import_extra
from sottovoce_client.feeding.access import SCHEMES, Access
from sottovoce_client.feeding.broker import NOBODY, REFUSED, Begin, Gone, Patience, why_of
from sottovoce_client.feeding.source import Message, Part, Unreadable
from sottovoce_rpc.addresses import place_of_url

BUCKET, EMPTY = "sottovoce", "an empty message"
"""Of the bookmarks: how far each feeder's learner is, beyond a run; and why a message is no record."""
_BATCH, _FETCH_S, _CALL_S, _UNUSED_S, _LOOK_S = 512, 0.25, 5.0, 60.0, 10.0
_PING_S, _CLOSE_S = 10, 1.0
_NO_SUBJECT = 10093
"""Error of JetStream: a filter that is no part of the stream's subjects."""


@dataclass(frozen=True, slots=True)
class _Bookmark:
    """How far a learner is in a stream, as the bucket has it.

    Attributes:
        position: stream sequence.
        created: when the stream was made.
    """

    position: int
    created: str


class _Link:
    """A connection, made again when it is lost."""

    def __init__(self, servers: Sequence[str], access: Access, creds: Path | None) -> None:
        self.client = import_extra("nats.aio.client", "nats-py", "feeding from NATS", "feed")
        self.errors = import_extra("nats.errors", "nats-py", "feeding from NATS", "feed")
        self.api_errors = import_extra("nats.js.errors", "nats-py", "feeding from NATS", "feed")
        places = [place_of_url(each, SCHEMES["nats"], "--server") for each in servers]
        self._servers = [f"{scheme}://{host}:{port}" for scheme, host, port in places]
        tls = access.context() or Access(tls=any(scheme == "tls" for scheme, _, _ in places)).context()
        own = {"user": access.user, "password": access.password} if access.user else {"token": access.password or None}
        self._options = {**own, "tls": tls, "user_credentials": None if creds is None else str(creds)}
        self.what = f"NATS at {', '.join(self._servers)}"
        self.away = (self.errors.Error, OSError, TimeoutError)  # an APIError is an Error
        self._connection: Any = None
        self._said = list[BaseException]()
        self._lock = asyncio.Lock()

    async def jetstream(self) -> Any:
        """JetStream, on a connection that stands."""
        async with self._lock:
            if self._connection is None or not self._connection.is_connected:
                await self.close()
                self._connection = await self._connected()
            return self._connection.jetstream(timeout=_CALL_S)

    async def asked(self, call: str) -> dict[str, Any]:
        """What JetStream answers."""
        await self.jetstream()
        answer = await self._connection.request(f"$JS.API.{call}", b"", timeout=_CALL_S)
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
                    connect_timeout=_CALL_S,
                    ping_interval=_PING_S,
                    error_cb=hear,
                    name="sottovoce feed",
                    **self._options,
                )
            except self.away as error:
                failed = error
                await self._closed(connection)
                self.why(error)
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

    def why(self, error: BaseException) -> str:
        """Of a failed call, in a few words.

        Raises:
            NotReady: no patience helps: the server knows us not, or we it.
        """
        for each in (*self._said, error):
            if NOBODY.search(str(each)):
                raise NotReady(REFUSED.format(self.what, why_of(each))) from None
        return why_of(error)

    async def close(self) -> None:
        """Nothing is said or heard any more."""
        if self._connection is not None:
            await self._closed(self._connection)

    async def _closed(self, connection: Any) -> None:
        with contextlib.suppress(
            *self.away, AttributeError
        ):  # of a library before 2.10, where there is no connection yet
            async with asyncio.timeout(_CLOSE_S):  # it would wait for ever where TLS had failed
                await connection.close()


def _encrypting(client: type[Any]) -> type[Any]:
    """A client that shows no password in the clear where TLS was asked for: the library's own does, if the server says no."""

    class Encrypting(client):  # type: ignore[misc]
        def _connect_command(self) -> Any:
            if self.options.get("tls") is not None and not self._server_info.get("tls_required"):
                raise ssl.SSLError("authentication in the clear is refused: the server speaks no TLS")
            return super()._connect_command()

    return Encrypting


class _Stream:
    """A stream, or the messages of some subjects in it: the one part of what is fed."""

    def __init__(self, link: _Link, stream: str, subject: str, group: str, begin: Begin, patience_s: float) -> None:
        self._link, self._stream, self._subject, self._begin_at = link, stream, subject, begin
        self.name = f"{stream}/{subject}" if subject else stream
        self._key = re.sub(r"[^-_a-zA-Z0-9]", lambda found: f"={ord(found[0]):02X}", f"{group}/{self.name}")
        self._patience = Patience(link.what, patience_s)
        self._gone = Gone(f"stream {stream}")
        self._created = self._subjects = ""
        self._due: int | None = None
        """What the bookmark should say, and does not yet."""

    async def read(self, after: int) -> AsyncIterator[Sequence[Message]]:
        begun = False
        while True:
            try:
                if not begun:
                    after, begun = await self._begin(after), True
                sub, count = await self._consumer(after), 0
                self._patience.subscribed(self.name)
                looked = after, asyncio.get_running_loop().time()
                while count >= 0:
                    messages, count = self._in_order(await self._fetched(sub), after, count)
                    self._patience.here()
                    if messages:
                        after = messages[-1].position
                        yield messages
                    if asyncio.get_running_loop().time() > looked[1] + _LOOK_S:
                        await self._look(looked[0])
                        looked = after, asyncio.get_running_loop().time()
            except self._link.away as error:
                if getattr(error, "err_code", None) == _NO_SUBJECT:
                    raise DataError(
                        f"stream {self._stream} has messages of {self._subjects}: {self._subject} is none of them, nor part "
                        "of one"
                    ) from None
                await self._patience.away(self._link.why(error))

    async def keep(self, position: int) -> None:
        self._due = position
        with contextlib.suppress(
            *self._link.away
        ):  # a later one says more, and a learner's own position is what counts
            async with asyncio.timeout(_CALL_S):
                await self._mark(position)
                self._due = None

    async def close(self) -> None:
        """The bookmark stands where the learner does, if the server is there."""
        if self._due is not None:
            await self.keep(self._due)

    # ---- where to begin ----------------------------------------------------------------------------------------------

    async def _begin(self, after: int) -> int:
        """Position behind which to read, of a stream that is the one it was."""
        info, bookmark = await self._info(), await self._bookmark()
        self._created, self._subjects = str(info["created"]), ", ".join(info["config"].get("subjects") or ())
        same = bookmark is not None and bookmark.created == self._created
        if after >= 0 and bookmark is not None and not same:
            raise self._anew(f"the learner has its message {after}, of one that was made at another time")
        if after < 0:
            oldest = max(0, info["state"]["first_seq"] - 1)
            committed = bookmark.position if bookmark is not None and same else oldest
            after = {"committed": committed, "start": oldest, "new": info["state"]["last_seq"]}[self._begin_at]
        if not same:
            await self._mark(after)
        return after

    async def _info(self) -> dict[str, Any]:
        """Of the stream, as it is now, in JetStream's own words: the library's had no time of making before its version 2.15."""
        info = await self._link.asked(f"STREAM.INFO.{self._stream}")
        if (error := info.get("error")) is not None:
            if error.get("code") == 404:
                raise DataError(f"{self._link.what} has no stream {self._stream}")
            raise self._link.errors.Error(str(error.get("description")))
        if (retention := info["config"]["retention"]) != "limits":
            raise DataError(f"stream {self._stream} must keep messages by limits, not by {retention}, to be read again")
        return info

    async def _look(self, after: int) -> None:
        """Whether the stream is the one it was, and has what comes behind a position.

        Raises:
            DataError: it is not.
        """
        info = await self._info()
        if str(info["created"]) != self._created or info["state"]["last_seq"] < after:
            raise self._anew(f"it ends with message {info['state']['last_seq']}, and the learner has {after}")
        if self._subject and (gone := info["state"]["first_seq"] - 1 - after) > 0:
            self._gone.add(gone, at_most=True)  # some may be of other subjects

    def _anew(self, why: str) -> DataError:
        return DataError(
            f"stream {self._stream} is not the one it was: {why}. Feed what it has now under another --source"
        )

    # ---- reading -----------------------------------------------------------------------------------------------------

    async def _consumer(self, after: int) -> Any:
        """A consumer of the server's that begins behind a position."""
        await self._look(after)
        api, js = import_extra("nats.js.api", "nats-py", "feeding from NATS", "feed"), await self._link.jetstream()
        config = api.ConsumerConfig(
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=after + 1,
            ack_policy=api.AckPolicy.NONE,
            inactive_threshold=_UNUSED_S,
            mem_storage=True,
        )
        return await js.pull_subscribe(self._subject, stream=self._stream, config=config)

    async def _fetched(self, sub: Any) -> list[Any]:
        """A few messages; none where none has come for a moment."""
        try:
            fetched: list[Any] = await sub.fetch(_BATCH, timeout=_FETCH_S)
        except TimeoutError:
            self._link.require()
            return []
        return fetched

    def _in_order(self, fetched: Sequence[Any], after: int, count: int) -> tuple[list[Message], int]:
        """Messages, and how many the consumer has sent; -1: one of them did not arrive, nor did what came behind it."""
        messages = list[Message]()
        for each in fetched:
            place = each.metadata.sequence
            if place.consumer != count + 1:
                return messages, -1
            count, missing = place.consumer, place.stream - after - 1
            if missing and not self._subject:
                self._gone.add(missing)
            after = place.stream
            messages.append(Message(each.data, after) if each.data else Unreadable(b"", after, EMPTY))
        return messages, count

    # ---- the bookmark ------------------------------------------------------------------------------------------------

    async def _bucket(self) -> Any:
        """Of the bookmarks, made where it is not there yet."""
        js, errors = await self._link.jetstream(), self._link.api_errors
        try:
            return await js.key_value(BUCKET)
        except errors.NotFoundError:
            return await js.create_key_value(bucket=BUCKET)

    async def _bookmark(self) -> _Bookmark | None:
        try:
            entry = await (await self._bucket()).get(self._key)
        except self._link.api_errors.NotFoundError:
            return None
        try:
            return _Bookmark(**json.loads(entry.value or b""))
        except (ValueError, TypeError):
            raise DataError(f"key {self._key} of bucket {BUCKET} is no bookmark of a feeder") from None

    async def _mark(self, position: int) -> None:
        text = json.dumps({"position": position, "created": self._created})
        await (await self._bucket()).put(self._key, text.encode())


@asynccontextmanager
async def open_nats(
    servers: Sequence[str],
    stream: str,
    subject: str = "",
    *,
    group: str = "sottovoce",
    begin: Begin = "committed",
    access: Access = Access(),  # noqa: B008 - it is frozen
    creds: Path | None = None,
    patience_s: float = 60.0,
) -> AsyncIterator[list[Part]]:
    """A stream of NATS JetStream, whose retention is by limits.

    Args:
        servers: such as `nats://host:4222`; one of them is enough.
        stream: its name.
        subject: messages of this one alone, perhaps with wildcards; empty: all, and what is gone is counted exactly.
        group: what the bookmark is kept under: one for each learner.
        begin: where, if the learner has no record of it in this run.
        access: user and password, or a password alone, which is a token.
        creds: file with a user's JWT and seed.
        patience_s: how long the server may be away.

    Raises:
        SpecError: that is no stream, or no address.
        NotReady: the server refuses these credentials, or speaks no TLS.
        Unavailable: it is away for too long.
    """
    for each, what in ((stream, "stream"), (subject, "subject")):
        if re.search(r"\s", each) or (each is stream and not re.fullmatch(r"[^.*>/\\]+", each)):
            raise SpecError(f"a {what} of NATS must be a name as NATS has them, got {each!r}")
    link = _Link(servers, access, creds)
    patience = Patience(link.what, patience_s)
    part = _Stream(link, stream, subject, group, begin, patience_s)
    try:
        while True:
            try:
                await link.jetstream()
                break
            except link.away as error:
                await patience.away(link.why(error))
        yield [part]
    finally:
        await part.close()
        await link.close()
