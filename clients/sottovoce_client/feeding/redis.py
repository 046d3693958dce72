"""Records from Redis: streams, read by the ids of their entries.

An id is two numbers, milliseconds and a sequence in them; a position is both in one. How far a learner is for good stands in a
consumer group of the stream, as its last delivered id, with how many entries were read until then; the group delivers nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from sottovoce_client.feeding.broker import (
    GROUP_SETTING,
    START_SETTING,
    BrokerConnection,
    BrokerPartition,
    Feed,
    SourceConfig,
    UrlSetting,
    shorten_error,
)
from sottovoce_client.feeding.records import SourceMessage
from sottovoce_core.errors import DataError, FailedPrecondition

NOT_UTF8, NO_FIELD = "an entry that is not UTF-8", "an entry without the field that holds records"
_SEQUENCE_BITS, _POSITION_BITS = 20, 63
_MAX_BATCH_ENTRIES, _BLOCK_TIMEOUT_MS, _CALL_TIMEOUT_S, _CHECK_INTERVAL_S = 512, 1_000, 5.0, 10.0


def _position_of(entry: bytes) -> int:
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


def _id_of(position: int) -> str:
    """Of the entry at a position."""
    return f"{position >> _SEQUENCE_BITS}-{position & ((1 << _SEQUENCE_BITS) - 1)}"


class _Link(BrokerConnection):
    """A client, which connects for each call that finds no connection."""

    def __init__(self, at: SourceConfig) -> None:
        super().__init__(at)
        redis, retry = REDIS.import_module("redis.asyncio"), REDIS.import_module("redis.asyncio.retry")
        self.errors = REDIS.import_module("redis.exceptions")
        access, ((host, port),), tls = at.credentials, at.servers, dict[str, Any]()
        if at.build_tls_context() is not None:
            files = {"ssl_ca_certs": access.ca, "ssl_certfile": access.certificate, "ssl_keyfile": access.key}
            tls = {"ssl": True, "ssl_check_hostname": True}
            tls |= {name: str(path) for name, path in files.items() if path is not None}
        self.connection_errors = (self.errors.RedisError, OSError, TimeoutError)
        self.permanent_errors = (self.errors.AuthenticationError, self.errors.AuthorizationError)
        self.client: Any = redis.Redis(
            host=host,
            port=port,
            db=at.settings["database"],
            username=access.user or None,
            password=access.password or None,
            socket_timeout=_CALL_TIMEOUT_S,
            socket_connect_timeout=_CALL_TIMEOUT_S,
            retry=retry.Retry(REDIS.import_module("redis.backoff").NoBackoff(), 0),
            **tls,
        )

    async def start(self) -> list[BrokerPartition]:
        try:
            await self.client.ping()
        except self.errors.ResponseError as error:
            raise self.build_refusal_error(error) from None
        return [_Stream(self, key) for key in self.source.names]

    async def close(self) -> None:
        await self.client.aclose()


class _Stream(BrokerPartition):
    """A stream."""

    _link: _Link

    def __init__(self, link: _Link, key: str) -> None:
        super().__init__(link, key, f"stream {key}")
        self._group, self._begin_at = link.source.group, link.source.settings["from"]
        self._field = link.source.settings["field"].encode()
        self._read: int | None = None
        """Entries that the stream ever had, up to the last one that was read; None: the number is not known."""
        self._exactly = True
        self._unkept = deque[tuple[int, int | None]]()
        self._kept: tuple[int, int | None] | None = None

    async def _read_on(self, after: int) -> AsyncGenerator[Sequence[SourceMessage], None]:
        await self._look(after)
        self._patience.log_subscription(self.name)
        looked = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() < looked + _CHECK_INTERVAL_S:
            found = await self._link.client.xread(
                {self.name: _id_of(after)}, count=_MAX_BATCH_ENTRIES, block=_BLOCK_TIMEOUT_MS
            )
            self._patience.record_answer()
            if found:
                messages = self._messages(_entries(found))
                after = messages[-1].position
                yield messages

    def _explain_error(self, error: BaseException) -> str:
        if isinstance(error, self._link.errors.ResponseError):
            raise self._refused(error) from None
        return super()._explain_error(error)

    async def _commit(self, position: int) -> None:
        while self._unkept and self._unkept[0][0] <= position:
            self._kept = self._unkept.popleft()
        if self._kept is None:
            return
        try:
            at, read = self._kept
            await self._link.client.xgroup_setid(self.name, self._group, _id_of(at), entries_read=read)
        except self._link.errors.ResponseError as error:
            raise self._refused(error) from None

    # ---- where to begin ----------------------------------------------------------------------------------------------

    async def _begin(self, after: int) -> int:
        """Position behind which to read, in a stream that is the one it was."""
        group, info = await self._standing()
        if group is None and after >= 0:
            raise self._build_replaced_error(
                f"the learner has its entry {_id_of(after)}, and group {self._group} is not there"
            )
        last, added = _position_of(info["last-generated-id"]), info["entries-added"]
        oldest = 0 if info["first-entry"] is None else _position_of(info["first-entry"][0]) - 1
        if group is None:
            after, self._read = (last, added) if self._begin_at == "new" else (oldest, added - info["length"])
            await self._link.client.xgroup_create(
                self.name, self._group, _id_of(after), mkstream=True, entries_read=self._read
            )
            return after
        committed, read = _position_of(group["last-delivered-id"]), group["entries-read"]
        if after < 0 and self._begin_at != "committed":
            after, read = (last, added) if self._begin_at == "new" else (oldest, added - info["length"])
        elif after < 0 or after == committed:
            after = committed
        elif after > committed and read is not None:  # a feeder died before it could say so
            between = await self._link.client.xrange(self.name, f"({_id_of(committed)}", _id_of(after))
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
            raise DataError(f"{self._link.display_name} must be version 7 or newer, to tell what is gone")
        groups = await self._link.client.xinfo_groups(self.name)
        return next((each for each in groups if each["name"] == self._group.encode()), None), info

    async def _look(self, after: int) -> None:
        """Return whether the stream is the one it was, and has what comes behind a position.

        Raises:
            DataError: it is not.
        """
        group, info = await self._standing()
        if group is None:
            raise self._build_replaced_error(f"group {self._group} is not there any more")
        last, added = _position_of(info["last-generated-id"]), info["entries-added"]
        if last < after:
            raise self._build_replaced_error(f"it ends with entry {_id_of(last)}, and the learner has {_id_of(after)}")
        if last == after:
            self._count(added)
        elif info["first-entry"] is None or _position_of(info["first-entry"][0]) > after:
            self._count(added - info["length"])

    def _count(self, read: int) -> None:
        """So many entries stood before what is read next: those that were not read are gone."""
        if self._read is not None and read > self._read:
            self._gone.add(read - self._read, at_most=not self._exactly)
        self._read = read

    def _refused(self, error: BaseException) -> DataError | FailedPrecondition:
        """What Redis has answered, as ours."""
        if isinstance(error, self._link.errors.NoPermissionError):
            return self._link.build_refusal_error(error)
        if str(error).startswith("NOGROUP") or "key to exist" in str(error) or "no such key" in str(error):
            return self._build_replaced_error("it was deleted")
        return DataError(f"{self._link.display_name} cannot give stream {self.name}: {shorten_error(error)}")

    # ---- entries -----------------------------------------------------------------------------------------------------

    def _messages(self, entries: Sequence[tuple[bytes, Mapping[bytes, bytes] | None]]) -> list[SourceMessage]:
        messages = [self._message(_position_of(entry), fields or {}) for entry, fields in entries]
        for each in messages:
            self._read = None if self._read is None else self._read + 1
            self._unkept.append((each.position, self._read))
        return messages

    def _message(self, position: int, fields: Mapping[bytes, bytes]) -> SourceMessage:
        if self._field:
            body = fields.get(self._field)
            return SourceMessage(b"", position, NO_FIELD) if body is None else SourceMessage(body, position)
        try:
            return SourceMessage({name.decode(): value.decode() for name, value in fields.items()}, position)
        except UnicodeDecodeError:
            return SourceMessage(b"", position, NOT_UTF8)


def _entries(found: Any) -> Sequence[tuple[bytes, Mapping[bytes, bytes] | None]]:
    """Of the one stream that was asked for: newer libraries and protocols answer with a mapping."""
    if isinstance(found, Mapping):
        ((entries,),) = found.values()
    else:
        ((_, entries),) = found
    return list(entries)


REDIS = Feed(
    name="Redis",
    schemes={"redis": 6379, "rediss": 6379},
    tls_schemes=frozenset({"rediss"}),
    help="Streams of Redis 7 or newer, each record once. A URL names keys, and each is a source.",
    examples=("redis://broker:6379/ward-3?group=north", "rediss://broker/ward-3,ward-4?field=record&from=new"),
    settings=(
        UrlSetting(
            "field", "Field of an entry that holds a JSON object.", default_help="an entry's fields are the record's"
        ),
        UrlSetting("database", "Number of the database.", 0),
        START_SETTING,
        GROUP_SETTING,
    ),
    modules=("redis",),
    connect=_Link,
    path="STREAM",
    allows_many_names=True,
)
"""Offered by an entry point."""
