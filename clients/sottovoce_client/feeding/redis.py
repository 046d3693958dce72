"""Records from Redis: streams, read by the ids of their entries.

An id is two numbers, milliseconds and a sequence in them; a position combines both. The learner's last position is kept
in a consumer group of the stream, as its last delivered id, with the number of entries read until then; the group
delivers nothing.
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


def _parse_entry_id(entry: bytes) -> int:
    """Return the position of an entry id, such as `1700000000000-3`.

    Raises:
        DataError: its numbers are too large for a position.
    """
    milliseconds, _, sequence = entry.partition(b"-")
    high, low = int(milliseconds), int(sequence or 0)
    if low >> _SEQUENCE_BITS or high >> (_POSITION_BITS - _SEQUENCE_BITS):
        raise DataError(
            f"ids of a stream must be milliseconds and a sequence below {1 << _SEQUENCE_BITS:,}, got {entry.decode()}"
        )
    return high << _SEQUENCE_BITS | low


def _format_entry_id(position: int) -> str:
    """Return the entry id of a position."""
    return f"{position >> _SEQUENCE_BITS}-{position & ((1 << _SEQUENCE_BITS) - 1)}"


class _RedisConnection(BrokerConnection):
    """Client, which connects for each call without an open connection."""

    def __init__(self, source: SourceConfig) -> None:
        super().__init__(source)
        redis, retry = REDIS.import_module("redis.asyncio"), REDIS.import_module("redis.asyncio.retry")
        self.errors = REDIS.import_module("redis.exceptions")
        credentials, ((host, port),), tls = source.credentials, source.servers, dict[str, Any]()
        if source.build_tls_context() is not None:
            files = {
                "ssl_ca_certs": credentials.ca,
                "ssl_certfile": credentials.certificate,
                "ssl_keyfile": credentials.key,
            }
            tls = {"ssl": True, "ssl_check_hostname": True}
            tls |= {name: str(path) for name, path in files.items() if path is not None}
        self.connection_errors = (self.errors.RedisError, OSError, TimeoutError)
        self.permanent_errors = (self.errors.AuthenticationError, self.errors.AuthorizationError)
        self.client: Any = redis.Redis(
            host=host,
            port=port,
            db=source.settings["database"],
            username=credentials.user or None,
            password=credentials.password or None,
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
        return [_RedisPartition(self, key) for key in self.source.names]

    async def close(self) -> None:
        await self.client.aclose()


class _RedisPartition(BrokerPartition):
    """Partition of one stream."""

    _connection: _RedisConnection

    def __init__(self, connection: _RedisConnection, key: str) -> None:
        super().__init__(connection, key, f"stream {key}")
        self._group, self._begin_at = connection.source.group, connection.source.settings["from"]
        self._field = connection.source.settings["field"].encode()
        self._entry_count: int | None = None
        """Number of entries that the stream ever had, up to the last one read; None: unknown."""
        self._is_count_exact = True
        self._uncommitted = deque[tuple[int, int | None]]()
        self._committed: tuple[int, int | None] | None = None

    async def _read_on(self, after: int) -> AsyncGenerator[Sequence[SourceMessage], None]:
        await self._check_stream(after)
        self._retry_timer.log_subscription(self.name)
        last_check = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() < last_check + _CHECK_INTERVAL_S:
            found = await self._connection.client.xread(
                {self.name: _format_entry_id(after)}, count=_MAX_BATCH_ENTRIES, block=_BLOCK_TIMEOUT_MS
            )
            self._retry_timer.record_answer()
            if found:
                messages = self._build_messages(_list_entries(found))
                after = messages[-1].position
                yield messages

    def _explain_error(self, error: BaseException) -> str:
        if isinstance(error, self._connection.errors.ResponseError):
            raise self._convert_error(error) from None
        return super()._explain_error(error)

    async def _commit(self, position: int) -> None:
        while self._uncommitted and self._uncommitted[0][0] <= position:
            self._committed = self._uncommitted.popleft()
        if self._committed is None:
            return
        try:
            source, read = self._committed
            await self._connection.client.xgroup_setid(
                self.name, self._group, _format_entry_id(source), entries_read=read
            )
        except self._connection.errors.ResponseError as error:
            raise self._convert_error(error) from None

    # ---- start position ----------------------------------------------------------------------------------------------

    async def _begin(self, after: int) -> int:
        """Return the position to read after, in an unchanged stream."""
        group, info = await self._fetch_info()
        if group is None and after >= 0:
            raise self._build_replaced_error(
                f"the learner has its entry {_format_entry_id(after)}, and group {self._group} is missing"
            )
        last, added = _parse_entry_id(info["last-generated-id"]), info["entries-added"]
        oldest = 0 if info["first-entry"] is None else _parse_entry_id(info["first-entry"][0]) - 1
        if group is None:
            after, self._entry_count = (last, added) if self._begin_at == "new" else (oldest, added - info["length"])
            await self._connection.client.xgroup_create(
                self.name, self._group, _format_entry_id(after), mkstream=True, entries_read=self._entry_count
            )
            return after
        committed, read = _parse_entry_id(group["last-delivered-id"]), group["entries-read"]
        if after < 0 and self._begin_at != "committed":
            after, read = (last, added) if self._begin_at == "new" else (oldest, added - info["length"])
        elif after < 0 or after == committed:
            after = committed
        elif after > committed and read is not None:  # a feeder crashed before its commit
            between = await self._connection.client.xrange(
                self.name, f"({_format_entry_id(committed)}", _format_entry_id(after)
            )
            read, self._is_count_exact = read + len(between), False
        else:
            read = None
        self._entry_count = read
        return after

    async def _fetch_info(self) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Return the state of the group, if it exists, and of the stream, which is created if missing."""
        if not await self._connection.client.exists(self.name):
            return None, {"last-generated-id": b"0-0", "entries-added": 0, "first-entry": None, "length": 0}
        info = await self._connection.client.xinfo_stream(self.name)
        if "entries-added" not in info:
            raise DataError(f"{self._connection.display_name} must be version 7 or newer, to detect deleted entries")
        groups = await self._connection.client.xinfo_groups(self.name)
        return next((each for each in groups if each["name"] == self._group.encode()), None), info

    async def _check_stream(self, after: int) -> None:
        """Check that the stream is unchanged, and has the entries after a position.

        Raises:
            DataError: it is not.
        """
        group, info = await self._fetch_info()
        if group is None:
            raise self._build_replaced_error(f"group {self._group} was deleted")
        last, added = _parse_entry_id(info["last-generated-id"]), info["entries-added"]
        if last < after:
            raise self._build_replaced_error(
                f"it ends with entry {_format_entry_id(last)}, and the learner has {_format_entry_id(after)}"
            )
        if last == after:
            self._set_entry_count(added)
        elif info["first-entry"] is None or _parse_entry_id(info["first-entry"][0]) > after:
            self._set_entry_count(added - info["length"])

    def _set_entry_count(self, read: int) -> None:
        """Set the number of entries before the next one: those that were not read are lost."""
        if self._entry_count is not None and read > self._entry_count:
            self._lost_messages.add(read - self._entry_count, at_most=not self._is_count_exact)
        self._entry_count = read

    def _convert_error(self, error: BaseException) -> DataError | FailedPrecondition:
        """Convert an error answer of Redis."""
        if isinstance(error, self._connection.errors.NoPermissionError):
            return self._connection.build_refusal_error(error)
        if str(error).startswith("NOGROUP") or "key to exist" in str(error) or "no such key" in str(error):
            return self._build_replaced_error("it was deleted")
        return DataError(f"{self._connection.display_name} cannot give stream {self.name}: {shorten_error(error)}")

    # ---- entries -----------------------------------------------------------------------------------------------------

    def _build_messages(self, entries: Sequence[tuple[bytes, Mapping[bytes, bytes] | None]]) -> list[SourceMessage]:
        messages = [self._build_message(_parse_entry_id(entry), fields or {}) for entry, fields in entries]
        for each in messages:
            self._entry_count = None if self._entry_count is None else self._entry_count + 1
            self._uncommitted.append((each.position, self._entry_count))
        return messages

    def _build_message(self, position: int, fields: Mapping[bytes, bytes]) -> SourceMessage:
        if self._field:
            body = fields.get(self._field)
            return SourceMessage(b"", position, NO_FIELD) if body is None else SourceMessage(body, position)
        try:
            return SourceMessage({name.decode(): value.decode() for name, value in fields.items()}, position)
        except UnicodeDecodeError:
            return SourceMessage(b"", position, NOT_UTF8)


def _list_entries(found: Any) -> Sequence[tuple[bytes, Mapping[bytes, bytes] | None]]:
    """Return the entries of the only requested stream: newer libraries and protocols answer with a mapping."""
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
    connect=_RedisConnection,
    path="STREAM",
    allows_many_names=True,
)
"""Feed of Redis, offered by an entry point."""
