"""Records by Kafka's protocol, against the brokers that librdkafka has for tests."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from sottovoce_client.feeding.broker import BrokerCredentials
from sottovoce_core.errors import DataError, FailedPrecondition, Unavailable
from tests.brokers import Feeder, free_port, killed_again_and_again, open_url, take, troubles, until
from tests.brokers import options_of as broker_options_of

confluent_kafka = pytest.importorskip("confluent_kafka")

pytestmark = pytest.mark.external
PARTITIONS = 2


class Brokers:
    """Brokers in this process, and who writes to them."""

    def __init__(self) -> None:
        own = {"test.mock.num.brokers": 1, "log_level": 0, "linger.ms": 0}
        self.producer = confluent_kafka.Producer({"bootstrap.servers": "nowhere:1", **own})
        (one,) = self.producer.list_topics(timeout=60).brokers.values()
        self.port: int = one.port

    def write(self, first: int, end: int, partition: int = 0, value: bytes | None = b"") -> None:
        for k in range(first, end):
            self.producer.produce("wards", b"%d" % k if value == b"" else value, partition=partition)
        assert self.producer.flush(60) == 0


@pytest.fixture
def brokers() -> Iterator[Brokers]:
    found = Brokers()
    yield found
    found.producer.purge()


def options_of(at: Brokers | int, names: str = "wards", scheme: str = "kafka", **more: Any) -> dict[str, Any]:
    return broker_options_of(scheme, at if isinstance(at, int) else at.port, names, **more)


def numbers(messages: Any) -> list[int]:
    return [int(each.body) for each in messages]


async def test_partitions_come_in_order_and_the_next_feeder_goes_on(brokers: Brokers) -> None:
    brokers.write(0, 500, 0)
    brokers.write(500, 1_000, 1)
    brokers.write(0, 1, 1, None)
    async with open_url(**options_of(brokers)) as parts:
        assert [each.name for each in parts][:2] == ["wards/0", "wards/1"]
        first, second = await asyncio.gather(take(parts[0], 500), take(parts[1], 501))
        assert [each.position for each in first] == list(range(500))
        assert numbers(first) + numbers(second[:-1]) == list(range(1_000))
        assert second[-1].body == b""
    brokers.write(1_000, 1_010)
    async with open_url(**options_of(brokers)) as parts:
        assert numbers(await take(parts[0], 10)) == list(range(1_000, 1_010))
        assert numbers(await take(parts[0], 12, after=497)) == [498, 499, *range(1_000, 1_010)]
    async with open_url(**options_of(brokers, group="another")) as parts:
        assert numbers(await take(parts[0], 1))[0] == 0


async def test_a_feeder_that_dies_again_and_again_brings_each_record_once(brokers: Brokers, tmp_path: Path) -> None:
    feeder = Feeder(options_of(brokers), tmp_path / "kept")
    brokers.write(0, 10, 0)
    brokers.write(0, 10, 1)

    async def write() -> None:
        for k in range(10, 500, 10):
            for partition in range(PARTITIONS):
                await asyncio.to_thread(brokers.write, k, k + 10, partition)

    writing = asyncio.ensure_future(write())
    found = await killed_again_and_again(feeder, 1_000)
    await writing
    for partition in range(PARTITIONS):
        own = [int(body) for name, _, body in found if name == f"wards/{partition}"]
        assert own == list(range(500))


async def test_it_begins_where_it_is_told_to(brokers: Brokers) -> None:
    brokers.write(0, 10)
    async with open_url(**options_of(brokers, from_="new")) as parts:
        messages: Any = parts[0].read(-1)
        following = asyncio.ensure_future(anext(messages))
        while await parts[0]._connection.consumer.committed(parts[0]._partition) is None:  # type: ignore[attr-defined]  # noqa: ASYNC110 - a server's state is no event
            await asyncio.sleep(0.01)
        brokers.write(10, 11)
        assert numbers(await following) == [10]
        await messages.aclose()
    async with open_url(**options_of(brokers, from_="start")) as parts:
        assert numbers(await take(parts[0], 11)) == list(range(11))


async def test_a_topic_that_was_made_anew_is_refused(brokers: Brokers) -> None:
    brokers.write(0, 10)
    async with open_url(**options_of(brokers)) as parts:
        with pytest.raises(DataError, match="it ends before offset 10, and the learner has 10"):
            await take(parts[0], 1, after=10)


async def test_what_retention_took_away_is_counted(brokers: Brokers) -> None:
    brokers.write(0, 10)
    large = bytes(500_000)  # of a partition these brokers keep five MiB
    brokers.write(0, 30, 0, large)
    with capture_logs() as logs:
        async with open_url(**options_of(brokers)) as parts:
            found = await take(parts[0], 1, after=4)
    (told,) = troubles(logs)
    assert told["event"] == "messages were deleted before they were read"
    assert int(told["messages"]) == found[0].position - 5 > 5


async def test_patience_ends() -> None:
    with pytest.raises(Unavailable, match=r"Kafka at 127.0.0.1.* was unreachable for 0.1 s"):
        async with open_url(**options_of(free_port(), patience_s=0.1)):
            pass


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As a broker does to whom it does not know: versions of calls, ways to show a password, and no."""
    versions = b"".join(struct.pack(">hhh", *each) for each in ((18, 0, 0), (17, 0, 1), (36, 0, 0), (3, 0, 1)))
    answers = {
        18: struct.pack(">hi", 0, 4) + versions,
        17: struct.pack(">hih", 0, 1, 5) + b"PLAIN",
        36: struct.pack(">hh", 58, 4) + b"nono" + struct.pack(">i", 0),
    }
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            (size,) = struct.unpack(">i", await reader.readexactly(4))
            call, _, number = struct.unpack(">hhi", (await reader.readexactly(size))[:8])
            answer = struct.pack(">i", number) + answers[call]
            writer.write(struct.pack(">i", len(answer)) + answer)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def test_who_is_not_known_is_told_so_at_once() -> None:
    answering = set[asyncio.Task[None]]()

    def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.add(asyncio.ensure_future(refuse(reader, writer)))

    async with await asyncio.start_server(answer, "127.0.0.1") as at:
        access = BrokerCredentials("ann", "wrong")
        with pytest.raises(FailedPrecondition, match="rejects these credentials, or is not trusted") as refused:
            async with open_url(**options_of(at.sockets[0].getsockname()[1], credentials=access, sasl="PLAIN")):
                pass
        await asyncio.gather(*answering)
    assert "wrong" not in str(refused.value)


APART = """
import sys
from tests.client.test_feeding_kafka import Brokers
brokers = Brokers()
print(brokers.port, flush=True)
for line in sys.stdin:
    brokers.write(*map(int, line.split()))
    print("written", flush=True)
"""


async def test_brokers_that_hang_and_come_back_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sottovoce_client.feeding.kafka._CALL_TIMEOUT_S", 2.0)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", APART, stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None
    try:
        port = int(await process.stdout.readline())
        process.stdin.write(b"0 10\n")
        await process.stdout.readline()
        with capture_logs() as logs:
            async with open_url(**options_of(port)) as parts:
                messages: Any = parts[0].read(-1)
                found = list[Any]()
                while len(found) < 10:  # else the next call returns the rest, and no call finds the broker away
                    found += await anext(messages)
                following = asyncio.ensure_future(anext(messages))
                process.send_signal(signal.SIGSTOP)
                await until(lambda: bool(troubles(logs)))
                process.send_signal(signal.SIGCONT)
                process.stdin.write(b"10 11\n")
                while len(found) < 11:
                    found += await following
                    following = asyncio.ensure_future(anext(messages))
                following.cancel()
                await asyncio.wait([following])
                await messages.aclose()
        assert numbers(found) == list(range(11))
        assert [each["event"] for each in logs][:4] == [
            "subscribed",
            "the broker is unreachable",
            "the broker is back",
            "subscribed",
        ]
    finally:
        process.kill()
        await process.wait()
