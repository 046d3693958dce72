"""Records from Redis: streams, read by the ids of their entries.

An id is two numbers, milliseconds and a sequence in them; a position is both in one. How far a learner is for good stands in a
consumer group of the stream, as its last delivered id, with how many entries were read until then; the group delivers nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from sottovoce.errors import DataError, NotReady
from sottovoce.optional import import_extra
from sottovoce_client.feeding.access import SCHEMES, Access
from sottovoce_client.feeding.broker import NOBODY, REFUSED, Begin, Gone, Patience, why_of
from sottovoce_client.feeding.source import Message, Part, Unreadable
from sottovoce_rpc.addresses import place_of_url

NOT_UTF8, NO_FIELD = "an entry that is not UTF-8", "an entry without the field that holds records"
_SEQUENCE_BITS, _POSITION_BITS = 20, 63
_BATCH, _BLOCK_MS, _CALL_S, _LOOK_S = 512, 1_000, 5.0, 10.0


def position_of(entry: bytes) -> int:
    """Of an entry's id, such as `1700000000000-3`.

    Raises:
        DataError: too large a number for one position.
    """
    milliseconds, _, sequence = entry.partition(b"-")
    high, low = int(milliseconds), int(sequence or 0)
    if low >> _SEQUENCE_BITS or high >> (_POSITION_BITS - _SEQUENCE_BITS):
        raise DataError(
            f"ids of a stream must be milliseconds and a sequence below {1 << _SEQUENCE_BITS:,}, got {entry.decode()}"
        )
    return high << _SEQUENCE_BITS | low


def id_of(position: int) -> str:
    """Of the entry at a position."""
    return f"{position >> _SEQUENCE_BITS}-{position & ((1 << _SEQUENCE_BITS) - 1)}"


class _Link:
    """A client, which connects for each call that finds no connection."""

    def __init__(self, server: str, database: int, access: Access) -> None:
        redis = import_extra("redis.asyncio", "redis", "feeding from Redis", "feed")
        retry = import_extra("redis.asyncio.retry", "redis", "feeding from Redis", "feed")
        backoff = import_extra("redis.backoff", "redis", "feeding from Redis", "feed")
        self.errors = import_extra("redis.exceptions", "redis", "feeding from Redis", "feed")
        scheme, host, port = place_of_url(server, SCHEMES["redis"], "--server")
        tls = dict[str, Any]()
        if scheme == "rediss" or access.context() is not None:
            files = {"ssl_ca_certs": access.ca, "ssl_certfile": access.certificate, "ssl_keyfile": access.key}
            tls = {"ssl": True, "ssl_check_hostname": True}
            tls |= {name: str(path) for name, path in files.items() if path is not None}
        self.what = f"Redis at {host}:{port}"
        self.away = (self.errors.ConnectionError, self.errors.TimeoutError, OSError, TimeoutError)
        self.client: Any = redis.Redis(
            host=host,
            port=port,
            db=database,
            username=access.user or None,
            password=access.password or None,
            socket_timeout=_CALL_S,
            socket_connect_timeout=_CALL_S,
            retry=retry.Retry(backoff.NoBackoff(), 0),
            **tls,
        )

    def why(self, error: BaseException) -> str:
        """Of a failed call, in a few words.

        Raises:
            NotReady: no patience helps.
        """
        refusals = (self.errors.AuthenticationError, self.errors.AuthorizationError)
        if isinstance(error, refusals) or NOBODY.search(str(error)):
            raise NotReady(REFUSED.format(self.what, why_of(error))) from None
        return why_of(error)


class _Stream:
    """A stream."""

    def __init__(self, link: _Link, key: str, field: str, group: str, begin: Begin, patience_s: float) -> None:
        self.name, self._link, self._group, self._begin_at = key, link, group, begin
        self._field = field.encode()
        self._patience = Patience(link.what, patience_s)
        self._gone = Gone(f"stream {key}")
        self._read: int | None = None
        """Entries that the stream ever had, up to the last one that was read; None: nobody knows."""
        self._exactly = True
        self._unkept = deque[tuple[int, int | None]]()
        self._kept: tuple[int, int | None] | None = None

    async def read(self, after: int) -> AsyncIterator[Sequence[Message]]:
        begun = False
        while True:
            try:
                if not begun:
                    after, begun = await self._begin(after), True
                await self._look(after)
                self._patience.subscribed(self.name)
                looked = asyncio.get_running_loop().time()
                while asyncio.get_running_loop().time() < looked + _LOOK_S:
                    found = await self._link.client.xread({self.name: id_of(after)}, count=_BATCH, block=_BLOCK_MS)
                    self._patience.here()
                    if found:
                        messages = self._messages(_entries(found))
                        after = messages[-1].position
                        yield messages
            except self._link.errors.ResponseError as error:
                raise self._refused(error) from None
            except self._link.away as error:
                await self._patience.away(self._link.why(error))

    async def keep(self, position: int) -> None:
        while self._unkept and self._unkept[0][0] <= position:
            self._kept = self._unkept.popleft()
        with contextlib.suppress(
            *self._link.away
        ):  # a later one says more, and a learner's own position is what counts
            await self._say()

    async def close(self) -> None:
        """The group stands where the learner does, if the server is there."""
        with contextlib.suppress(*self._link.away, DataError, NotReady):
            await self._say()

    async def _say(self) -> None:
        """The group stands where the learner does."""
        if self._kept is not None:
            (position, read), kept = self._kept, self._kept
            try:
                await self._link.client.xgroup_setid(self.name, self._group, id_of(position), entries_read=read)
            except self._link.errors.ResponseError as error:
                raise self._refused(error) from None
            if self._kept == kept:
                self._kept = None

    # ---- where to begin ----------------------------------------------------------------------------------------------

    async def _begin(self, after: int) -> int:
        """Position behind which to read, in a stream that is the one it was."""
        group, info = await self._standing()
        if group is None and after >= 0:
            raise self._anew(f"the learner has its entry {id_of(after)}, and group {self._group} is not there")
        last, added = position_of(info["last-generated-id"]), info["entries-added"]
        oldest = 0 if info["first-entry"] is None else position_of(info["first-entry"][0]) - 1
        if group is None:
            after, self._read = (last, added) if self._begin_at == "new" else (oldest, added - info["length"])
            await self._link.client.xgroup_create(
                self.name, self._group, id_of(after), mkstream=True, entries_read=self._read
            )
            return after
        committed, read = position_of(group["last-delivered-id"]), group["entries-read"]
        if after < 0 and self._begin_at != "committed":
            after, read = (last, added) if self._begin_at == "new" else (oldest, added - info["length"])
        elif after < 0 or after == committed:
            after = committed
        elif after > committed and read is not None:  # a feeder died before it could say so
            between = await self._link.client.xrange(self.name, f"({id_of(committed)}", id_of(after))
            read, self._exactly = read + len(between), False
        else:
            read = None
        self._read = read
        return after

    async def _standing(self) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Of the group, if it is there; and of the stream, which is made where there is none."""
        if not await self._link.client.exists(self.name):
            return None, {"last-generated-id": b"0-0", "entries-added": 0, "first-entry": None, "length": 0}
        info = await self._link.client.xinfo_stream(self.name)
        if "entries-added" not in info:
            raise DataError(f"{self._link.what} must be version 7 or newer, to tell what is gone")
        groups = await self._link.client.xinfo_groups(self.name)
        return next((each for each in groups if each["name"] == self._group.encode()), None), info

    async def _look(self, after: int) -> None:
        """Whether the stream is the one it was, and has what comes behind a position.

        Raises:
            DataError: it is not.
        """
        group, info = await self._standing()
        if group is None:
            raise self._anew(f"group {self._group} is not there any more")
        last, added = position_of(info["last-generated-id"]), info["entries-added"]
        if last < after:
            raise self._anew(f"it ends with entry {id_of(last)}, and the learner has {id_of(after)}")
        if last == after:
            self._count(added)
        elif info["first-entry"] is None or position_of(info["first-entry"][0]) > after:
            self._count(added - info["length"])

    def _count(self, read: int) -> None:
        """So many entries stood before what is read next: those that were not read are gone."""
        if self._read is not None and read > self._read:
            self._gone.add(read - self._read, at_most=not self._exactly)
        self._read = read

    def _anew(self, why: str) -> DataError:
        return DataError(
            f"stream {self.name} is not the one it was: {why}. Feed what it has now under another --source"
        )

    def _refused(self, error: BaseException) -> DataError | NotReady:
        """What Redis has answered, as ours."""
        if isinstance(error, self._link.errors.NoPermissionError):
            return NotReady(REFUSED.format(self._link.what, why_of(error)))
        if str(error).startswith("NOGROUP") or "key to exist" in str(error) or "no such key" in str(error):
            return self._anew("it was deleted")
        return DataError(f"{self._link.what} cannot give stream {self.name}: {why_of(error)}")

    # ---- entries -----------------------------------------------------------------------------------------------------

    def _messages(self, entries: Sequence[tuple[bytes, Mapping[bytes, bytes] | None]]) -> list[Message]:
        messages = [self._message(position_of(entry), fields or {}) for entry, fields in entries]
        for each in messages:
            self._read = None if self._read is None else self._read + 1
            self._unkept.append((each.position, self._read))
        return messages

    def _message(self, position: int, fields: Mapping[bytes, bytes]) -> Message:
        if self._field:
            body = fields.get(self._field)
            return Unreadable(b"", position, NO_FIELD) if body is None else Message(body, position)
        try:
            return Message({name.decode(): value.decode() for name, value in fields.items()}, position)
        except UnicodeDecodeError:
            return Unreadable(b"", position, NOT_UTF8)


def _entries(found: Any) -> Sequence[tuple[bytes, Mapping[bytes, bytes] | None]]:
    """Of the one stream that was asked for: newer libraries and protocols answer with a mapping."""
    if isinstance(found, Mapping):
        ((entries,),) = found.values()
    else:
        ((_, entries),) = found
    return list(entries)


@asynccontextmanager
async def open_redis(
    server: str,
    streams: Sequence[str],
    *,
    field: str = "",
    group: str = "sottovoce",
    begin: Begin = "committed",
    database: int = 0,
    access: Access = Access(),  # noqa: B008 - it is frozen
    patience_s: float = 60.0,
) -> AsyncIterator[list[Part]]:
    """Streams of Redis, version 7 or newer.

    Args:
        server: such as `redis://host:6379`; with `rediss` through TLS.
        streams: keys, each a part.
        field: of an entry, that holds a JSON object; empty: an entry's fields are the record's.
        group: consumer group that says how far a learner is: one for each learner.
        begin: where, if the learner has no record of a stream in this run.
        database: number.
        access: user and password, or a password alone.
        patience_s: how long the server may be away.

    Raises:
        NotReady: the server refuses these credentials.
        Unavailable: it is away for too long.
    """
    link = _Link(server, database, access)
    patience = Patience(link.what, patience_s)
    parts = [_Stream(link, key, field, group, begin, patience_s) for key in streams]
    try:
        while True:
            try:
                await link.client.ping()
                break
            except link.errors.ResponseError as error:
                raise NotReady(REFUSED.format(link.what, why_of(error))) from None
            except link.away as error:
                await patience.away(link.why(error))
        yield list(parts)
    finally:
        for part in parts:
            await part.close()
        await link.client.aclose()
