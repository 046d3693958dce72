"""Records from topics, by Kafka's protocol: each partition is a part, and offsets are positions.

Partitions are assigned by hand, so that no rebalance takes one away, and read behind the learner's position. The offset of a
consumer group is written when records are in the learner's keeping; it is where the next run's feeder begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from sottovoce.errors import DataError, NotReady
from sottovoce.optional import import_extra
from sottovoce_client.feeding.access import SCHEMES, Access
from sottovoce_client.feeding.broker import NOBODY, REFUSED, Begin, Gone, Patience, why_of
from sottovoce_client.feeding.source import Message, Part, Unreadable
from sottovoce_rpc.addresses import place_of_url

Sasl = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]

EMPTY = "a message without a value"
_BATCH, _WAIT_MS, _CALL_S, _LOOK_S = 512, 500, 10.0, 5.0


class _Heard(logging.Handler):
    """What the library logs of failed connections, for it raises less than it knows."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


class _Link:
    """A consumer, which connects again by itself."""

    def __init__(self, servers: Sequence[str], topics: Sequence[str], group: str, access: Access, sasl: Sasl) -> None:
        self.kafka = import_extra("aiokafka", "aiokafka", "feeding from Kafka", "feed")
        self._admin = import_extra("aiokafka.admin", "aiokafka", "feeding from Kafka", "feed")
        self.errors = import_extra("aiokafka.errors", "aiokafka", "feeding from Kafka", "feed")
        places = [place_of_url(each, SCHEMES["kafka"], "--server") for each in servers]
        self._servers, self._topics = [f"{host}:{port}" for _, host, port in places], list(topics)
        self.what = f"Kafka at {', '.join(self._servers)}"
        self.away = (self.errors.KafkaError, OSError, TimeoutError)
        context = access.context()
        self._options: dict[str, Any] = {
            "bootstrap_servers": self._servers,
            "client_id": "sottovoce feed",
            "request_timeout_ms": int(1_000 * _CALL_S),
            "ssl_context": context,
            "security_protocol": ("SASL_" if access.user else "") + ("PLAINTEXT" if context is None else "SSL"),
        }
        if access.user:
            self._options |= {
                "sasl_mechanism": sasl,
                "sasl_plain_username": access.user,
                "sasl_plain_password": access.password,
            }
        self._group = group
        self.consumer: Any = None
        self._heard = _Heard()

    def listen(self) -> None:
        """To the library's log, which is told nobody else."""
        log = logging.getLogger("aiokafka")
        log.addHandler(self._heard)
        log.propagate = False

    async def start(self) -> list[Any]:
        """Partitions of all topics, assigned."""
        admin = self._admin.AIOKafkaAdminClient(**self._options)
        try:
            await admin.start()
            described = await admin.describe_topics(self._topics)
        finally:
            await admin.close()
        found = list[Any]()
        for topic in sorted(described, key=lambda each: self._topics.index(each["topic"])):
            if topic["error_code"]:
                self._refuse(topic["topic"], self.errors.for_code(topic["error_code"]))
            numbers = sorted(each["partition"] for each in topic["partitions"])
            found += [self.kafka.TopicPartition(topic["topic"], number) for number in numbers]
        self.consumer = self.kafka.AIOKafkaConsumer(
            group_id=self._group,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            **self._options,
        )
        await self.consumer.start()
        self.consumer.assign(found)
        return found

    def _refuse(self, topic: str, kind: type[Exception]) -> None:
        """A topic that has no partitions to be had.

        Raises:
            DataError: there is no such topic.
            Exception: the broker's.
        """
        if kind is self.errors.UnknownTopicOrPartitionError:
            raise DataError(f"{self.what} has no topic {topic}")
        raise kind

    async def asked(self, call: Any) -> Any:
        """An answer within bounds."""
        async with asyncio.timeout(_CALL_S):
            return await call

    def why(self, error: BaseException) -> str:
        """Of a failed call, in a few words.

        Raises:
            NotReady: no patience helps.
        """
        refusals = (
            self.errors.AuthenticationFailedError,
            self.errors.SaslAuthenticationFailed,
            self.errors.TopicAuthorizationFailedError,
            self.errors.GroupAuthorizationFailedError,
        )
        told, self._heard.last = self._heard.last, ""
        for text in (told, why_of(error)):
            if isinstance(error, refusals) or NOBODY.search(text):
                raise NotReady(REFUSED.format(self.what, " ".join(text.split()) or why_of(error))) from None
        return why_of(error)

    async def close(self) -> None:
        """Nothing is said or heard any more."""
        if self.consumer is not None:
            with contextlib.suppress(*self.away):
                await self.asked(self.consumer.stop())
        logging.getLogger("aiokafka").removeHandler(self._heard)


class _Partition:
    """A partition of a topic."""

    def __init__(self, link: _Link, partition: Any, begin: Begin, patience_s: float) -> None:
        self._link, self._partition, self._begin_at = link, partition, begin
        self.name = f"{partition.topic}/{partition.partition}"
        self._patience = Patience(link.what, patience_s)
        self._gone = Gone(f"partition {self.name}")
        self._due: int | None = None

    async def read(self, after: int) -> AsyncIterator[Sequence[Message]]:
        begun = False
        while True:
            try:
                if not begun:
                    after, begun = await self._begin(after), True
                after = await self._look(after)
                self._link.consumer.seek(self._partition, after + 1)
                self._patience.subscribed(self.name)
                while messages := await self._next():
                    after = messages[-1].position
                    yield messages
            except self._link.errors.OffsetOutOfRangeError:
                continue  # retention was faster
            except (self._link.errors.CorruptRecordException, self._link.errors.UnsupportedCodecError) as error:
                raise DataError(f"{self.name} cannot be read behind offset {after}: {why_of(error)}") from None
            except self._link.away as error:
                await self._patience.away(self._link.why(error))

    async def keep(self, position: int) -> None:
        self._due = position
        try:
            await self._commit(position)
            self._due = None
        except (self._link.errors.CommitFailedError, self._link.errors.UnknownMemberIdError):
            raise NotReady("the consumer group has other members: a feeder needs a --group of its own") from None
        except self._link.away:  # a later one says more, and a learner's own position is what counts
            pass

    async def close(self) -> None:
        """The group stands where the learner does, if the broker is there."""
        if self._due is not None:
            with contextlib.suppress(NotReady):
                await self.keep(self._due)

    async def _begin(self, after: int) -> int:
        """Offset behind which to read."""
        if after >= 0:
            return after
        oldest, end = await self._bounds()
        committed = await self._link.asked(self._link.consumer.committed(self._partition))
        if self._begin_at == "committed" and committed is not None:
            return int(committed) - 1
        after = (end if self._begin_at == "new" else oldest) - 1
        await self._commit(after)
        return after

    async def _bounds(self) -> tuple[int, int]:
        """The first offset that is there, and the next one that comes."""
        one, consumer = self._partition, self._link.consumer
        first = await self._link.asked(consumer.beginning_offsets([one]))
        return int(first[one]), int((await self._link.asked(consumer.end_offsets([one])))[one])

    async def _commit(self, position: int) -> None:
        await self._link.asked(self._link.consumer.commit({self._partition: position + 1}))

    async def _look(self, after: int) -> int:
        """Offset behind which something can be read, in a partition that is the one it was.

        Raises:
            DataError: it ends before it.
        """
        oldest, end = await self._bounds()
        if end <= after:
            raise DataError(
                f"partition {self.name} is not the one it was: it ends before offset {end}, and the learner has {after}. "
                "Feed what it has now under another --source"
            )
        if oldest > after + 1:
            self._gone.add(oldest - after - 1)
        return max(after, oldest - 1)

    async def _next(self) -> list[Message]:
        """A few messages; none where none has come for a while, which may have a reason."""
        until = asyncio.get_running_loop().time() + _LOOK_S
        while asyncio.get_running_loop().time() < until:
            found = await self._link.consumer.getmany(self._partition, timeout_ms=_WAIT_MS, max_records=_BATCH)
            if records := found.get(self._partition):
                return [
                    Message(each.value, each.offset) if each.value else Unreadable(b"", each.offset, EMPTY)
                    for each in records
                ]
        return []


@asynccontextmanager
async def open_kafka(
    servers: Sequence[str],
    topics: Sequence[str],
    *,
    group: str = "sottovoce",
    begin: Begin = "committed",
    sasl: Sasl = "SCRAM-SHA-512",
    access: Access = Access(),  # noqa: B008 - it is frozen
    patience_s: float = 60.0,
) -> AsyncIterator[list[Part]]:
    """Topics of brokers that speak Kafka's protocol; those partitions that they have now.

    Args:
        servers: such as `host:9092`; one of them is enough.
        topics: their names.
        group: consumer group whose offsets say how far a learner is, and which has no members: one for each learner.
        begin: where, if the learner has no record of a partition in this run.
        sasl: how a user's password is shown.
        access: user and password.
        patience_s: how long the brokers may be away.

    Raises:
        NotReady: they refuse these credentials.
        DataError: there is no such topic.
        Unavailable: they are away for too long.
    """
    link = _Link(servers, topics, group, access, sasl)
    patience, parts = Patience(link.what, patience_s), list[_Partition]()
    link.listen()
    try:
        while not parts:
            try:
                parts = [_Partition(link, each, begin, patience_s) for each in await link.start()]
            except link.away as error:
                await link.close()
                link.listen()
                await patience.away(link.why(error))
        yield list(parts)
    finally:
        for part in parts:
            await part.close()
        await link.close()
