"""Records from topics, by Kafka's protocol: each partition is a part, and offsets are positions.

Partitions are assigned by hand, so that no rebalance takes one away, and read behind the learner's position. The offset of a
consumer group is written when records are in the learner's keeping; it is where the next run's feeder begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
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
    shorten_error,
)
from sottovoce_client.feeding.records import SourceMessage
from sottovoce_core.errors import DataError, FailedPrecondition

_MAX_BATCH_MESSAGES, _POLL_TIMEOUT_MS, _CALL_TIMEOUT_S, _CHECK_INTERVAL_S = 512, 500, 10.0, 5.0


class _Heard(logging.Handler):
    """What the library logs of failed connections, for it raises less than it knows."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


class _Link(BrokerConnection):
    """A consumer, which connects again by itself."""

    def __init__(self, at: SourceConfig) -> None:
        super().__init__(at)
        self.kafka, self._admin = KAFKA.import_module("aiokafka"), KAFKA.import_module("aiokafka.admin")
        self.errors = KAFKA.import_module("aiokafka.errors")
        self.connection_errors = (self.errors.KafkaError, OSError, TimeoutError)
        self.permanent_errors = (
            self.errors.AuthenticationFailedError,
            self.errors.SaslAuthenticationFailed,
            self.errors.TopicAuthorizationFailedError,
            self.errors.GroupAuthorizationFailedError,
        )
        context, access = at.build_tls_context(), at.credentials
        self._options: dict[str, Any] = {
            "bootstrap_servers": at.addresses,
            "client_id": "sottovoce feed",
            "request_timeout_ms": int(1_000 * _CALL_TIMEOUT_S),
            "ssl_context": context,
            "security_protocol": ("SASL_" if access.user else "") + ("PLAINTEXT" if context is None else "SSL"),
        }
        if access.user:
            self._options |= {
                "sasl_mechanism": at.settings["sasl"],
                "sasl_plain_username": access.user,
                "sasl_plain_password": access.password,
            }
        self.consumer: Any = None
        self._heard = _Heard()

    def list_reported_errors(self) -> Sequence[object]:
        told, self._heard.last = self._heard.last, ""
        return [told] if told else []

    async def start(self) -> list[BrokerPartition]:
        await self.close()
        log = logging.getLogger("aiokafka")
        log.addHandler(self._heard)
        log.propagate = False
        admin = self._admin.AIOKafkaAdminClient(**self._options)
        try:
            await admin.start()
            described = await admin.describe_topics(list(self.source.names))
        finally:
            await admin.close()
        found = list[Any]()
        for topic in sorted(described, key=lambda each: self.source.names.index(each["topic"])):
            if topic["error_code"]:
                kind = self.errors.for_code(topic["error_code"])
                if kind is self.errors.UnknownTopicOrPartitionError:
                    raise DataError(f"{self.display_name} has no topic {topic['topic']}")
                raise kind
            numbers = sorted(each["partition"] for each in topic["partitions"])
            found += [self.kafka.TopicPartition(topic["topic"], number) for number in numbers]
        self.consumer = self.kafka.AIOKafkaConsumer(
            group_id=self.source.group,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            **self._options,
        )
        await self.consumer.start()
        self.consumer.assign(found)
        return [_Partition(self, each) for each in found]

    async def asked(self, call: Any) -> Any:
        """An answer within bounds."""
        async with asyncio.timeout(_CALL_TIMEOUT_S):
            return await call

    async def close(self) -> None:
        """Nothing is said or heard any more."""
        if self.consumer is not None:
            with contextlib.suppress(*self.connection_errors):
                await self.asked(self.consumer.stop())
        logging.getLogger("aiokafka").removeHandler(self._heard)


class _Partition(BrokerPartition):
    """A partition of a topic."""

    _link: _Link

    def __init__(self, link: _Link, partition: Any) -> None:
        name = f"{partition.topic}/{partition.partition}"
        super().__init__(link, name, f"partition {name}")
        self._partition = partition

    async def _read_on(self, after: int) -> AsyncGenerator[Sequence[SourceMessage], None]:
        try:
            after = await self._look(after)
            self._link.consumer.seek(self._partition, after + 1)
            self._patience.log_subscription(self.name)
            while messages := await self._next():
                after = messages[-1].position
                yield messages
        except self._link.errors.OffsetOutOfRangeError:
            return  # retention was faster
        except (self._link.errors.CorruptRecordException, self._link.errors.UnsupportedCodecError) as error:
            raise DataError(f"{self.name} cannot be read behind offset {after}: {shorten_error(error)}") from None

    async def _begin(self, after: int) -> int:
        if after >= 0:
            return after
        oldest, end = await self._bounds()
        committed = await self._link.asked(self._link.consumer.committed(self._partition))
        after = self._choose_start(oldest - 1, end - 1, None if committed is None else int(committed) - 1)
        await self._commit(after)
        return after

    async def _bounds(self) -> tuple[int, int]:
        """The first offset that is there, and the next one that comes."""
        one, consumer = self._partition, self._link.consumer
        first = await self._link.asked(consumer.beginning_offsets([one]))
        return int(first[one]), int((await self._link.asked(consumer.end_offsets([one])))[one])

    async def _commit(self, position: int) -> None:
        try:
            await self._link.asked(self._link.consumer.commit({self._partition: position + 1}))
        except (self._link.errors.CommitFailedError, self._link.errors.UnknownMemberIdError):
            raise FailedPrecondition(
                "the consumer group has other members: a feeder needs a ?group= of its own"
            ) from None

    async def _look(self, after: int) -> int:
        """Offset behind which something can be read, in a partition that is the one it was.

        Raises:
            DataError: it ends before it.
        """
        oldest, end = await self._bounds()
        if end <= after:
            raise self._build_replaced_error(f"it ends before offset {end}, and the learner has {after}")
        if oldest > after + 1:
            self._gone.add(oldest - after - 1)
        return max(after, oldest - 1)

    async def _next(self) -> list[SourceMessage]:
        """A few messages; none where none has come for a while, which may have a reason."""
        until = asyncio.get_running_loop().time() + _CHECK_INTERVAL_S
        while asyncio.get_running_loop().time() < until:
            found = await self._link.consumer.getmany(
                self._partition, timeout_ms=_POLL_TIMEOUT_MS, max_records=_MAX_BATCH_MESSAGES
            )
            if records := found.get(self._partition):
                return [SourceMessage(each.value or b"", each.offset) for each in records]
        return []


KAFKA = Feed(
    name="Kafka",
    schemes={"kafka": 9092, "kafka+ssl": 9092},
    tls_schemes=frozenset({"kafka+ssl"}),
    help="Topics of brokers that speak Kafka's protocol, each record once. Each partition is a source.",
    examples=("kafka://broker:9092/ward-events?group=north", "kafka+ssl://one:9093,two:9093/ward-events?sasl=PLAIN"),
    settings=(
        START_SETTING,
        GROUP_SETTING,
        UrlSetting(
            "sasl", "How the password of --user is shown.", "SCRAM-SHA-512", ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
        ),
    ),
    modules=("aiokafka",),
    connect=_Link,
    path="TOPIC",
    allows_many_names=True,
    allows_many_hosts=True,
)
"""Offered by an entry point."""
