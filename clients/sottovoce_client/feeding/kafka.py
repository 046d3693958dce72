"""Records from topics of Kafka's protocol: each partition is a `BrokerPartition`, and offsets are positions.

Partitions are assigned explicitly, so that no rebalance takes one away, and read after the learner's position. The offset
of a consumer group is committed when the learner has stored the records; the feeder of the next run begins there.
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


class _LogRecorder(logging.Handler):
    """Log handler that keeps the library's last warning: the library raises less than it logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


class _KafkaConnection(BrokerConnection):
    """Consumer, which reconnects by itself."""

    def __init__(self, source: SourceConfig) -> None:
        super().__init__(source)
        self.kafka, self._admin = KAFKA.import_module("aiokafka"), KAFKA.import_module("aiokafka.admin")
        self.errors = KAFKA.import_module("aiokafka.errors")
        self.connection_errors = (self.errors.KafkaError, OSError, TimeoutError)
        self.permanent_errors = (
            self.errors.AuthenticationFailedError,
            self.errors.SaslAuthenticationFailed,
            self.errors.TopicAuthorizationFailedError,
            self.errors.GroupAuthorizationFailedError,
        )
        context, credentials = source.build_tls_context(), source.credentials
        self._options: dict[str, Any] = {
            "bootstrap_servers": source.addresses,
            "client_id": "sottovoce feed",
            "request_timeout_ms": int(1_000 * _CALL_TIMEOUT_S),
            "ssl_context": context,
            "security_protocol": ("SASL_" if credentials.user else "") + ("PLAINTEXT" if context is None else "SSL"),
        }
        if credentials.user:
            self._options |= {
                "sasl_mechanism": source.settings["sasl"],
                "sasl_plain_username": credentials.user,
                "sasl_plain_password": credentials.password,
            }
        self.consumer: Any = None
        self._log_recorder = _LogRecorder()

    def list_reported_errors(self) -> Sequence[object]:
        last_warning, self._log_recorder.last = self._log_recorder.last, ""
        return [last_warning] if last_warning else []

    async def start(self) -> list[BrokerPartition]:
        await self.close()
        log = logging.getLogger("aiokafka")
        log.addHandler(self._log_recorder)
        log.propagate = False
        admin = self._admin.AIOKafkaAdminClient(**self._options)
        try:
            await admin.start()
            described = await admin.describe_topics(list(self.source.names))
        finally:
            await admin.close()
        partitions = list[Any]()
        for topic in sorted(described, key=lambda each: self.source.names.index(each["topic"])):
            if topic["error_code"]:
                kind = self.errors.for_code(topic["error_code"])
                if kind is self.errors.UnknownTopicOrPartitionError:
                    raise DataError(f"{self.display_name} has no topic {topic['topic']}")
                raise kind
            numbers = sorted(each["partition"] for each in topic["partitions"])
            partitions += [self.kafka.TopicPartition(topic["topic"], number) for number in numbers]
        self.consumer = self.kafka.AIOKafkaConsumer(
            group_id=self.source.group,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            **self._options,
        )
        await self.consumer.start()
        self.consumer.assign(partitions)
        return [_KafkaPartition(self, each) for each in partitions]

    async def await_answer(self, call: Any) -> Any:
        """Await an answer with a timeout."""
        async with asyncio.timeout(_CALL_TIMEOUT_S):
            return await call

    async def close(self) -> None:
        """Stop the consumer and the log handler."""
        if self.consumer is not None:
            with contextlib.suppress(*self.connection_errors):
                await self.await_answer(self.consumer.stop())
        logging.getLogger("aiokafka").removeHandler(self._log_recorder)


class _KafkaPartition(BrokerPartition):
    """Partition of a topic."""

    _connection: _KafkaConnection

    def __init__(self, connection: _KafkaConnection, partition: Any) -> None:
        name = f"{partition.topic}/{partition.partition}"
        super().__init__(connection, name, f"partition {name}")
        self._partition = partition

    async def _read_on(self, after: int) -> AsyncGenerator[Sequence[SourceMessage], None]:
        try:
            after = await self._check_bounds(after)
            self._connection.consumer.seek(self._partition, after + 1)
            self._retry_timer.log_subscription(self.name)
            while messages := await self._fetch_messages():
                after = messages[-1].position
                yield messages
        except self._connection.errors.OffsetOutOfRangeError:
            return  # retention deleted them meanwhile
        except (self._connection.errors.CorruptRecordException, self._connection.errors.UnsupportedCodecError) as error:
            raise DataError(f"{self.name} cannot be read behind offset {after}: {shorten_error(error)}") from None

    async def _begin(self, after: int) -> int:
        if after >= 0:
            return after
        oldest, end = await self._fetch_bounds()
        committed = await self._connection.await_answer(self._connection.consumer.committed(self._partition))
        after = self._choose_start(oldest - 1, end - 1, None if committed is None else int(committed) - 1)
        await self._commit(after)
        return after

    async def _fetch_bounds(self) -> tuple[int, int]:
        """Return the first available offset, and the next one to come."""
        partition, consumer = self._partition, self._connection.consumer
        first = await self._connection.await_answer(consumer.beginning_offsets([partition]))
        return int(first[partition]), int(
            (await self._connection.await_answer(consumer.end_offsets([partition])))[partition]
        )

    async def _commit(self, position: int) -> None:
        try:
            await self._connection.await_answer(self._connection.consumer.commit({self._partition: position + 1}))
        except (self._connection.errors.CommitFailedError, self._connection.errors.UnknownMemberIdError):
            raise FailedPrecondition("the consumer group has other members: a feeder needs its own ?group=") from None

    async def _check_bounds(self, after: int) -> int:
        """Return the offset after which messages are available, in an unchanged partition.

        Raises:
            DataError: it ends before `after`.
        """
        oldest, end = await self._fetch_bounds()
        if end <= after:
            raise self._build_replaced_error(f"it ends before offset {end}, and the learner has {after}")
        if oldest > after + 1:
            self._lost_messages.add(oldest - after - 1)
        return max(after, oldest - 1)

    async def _fetch_messages(self) -> list[SourceMessage]:
        """Return a few messages; none after a while without messages, which may have a reason."""
        until = asyncio.get_running_loop().time() + _CHECK_INTERVAL_S
        while asyncio.get_running_loop().time() < until:
            partitions = await self._connection.consumer.getmany(
                self._partition, timeout_ms=_POLL_TIMEOUT_MS, max_records=_MAX_BATCH_MESSAGES
            )
            if records := partitions.get(self._partition):
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
            "sasl",
            "SASL mechanism for the password of --user.",
            "SCRAM-SHA-512",
            ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"),
        ),
    ),
    modules=("aiokafka",),
    connect=_KafkaConnection,
    path="TOPIC",
    allows_many_names=True,
    allows_many_hosts=True,
)
"""Feed of Kafka, offered by an entry point."""
