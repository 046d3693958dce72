"""Records from NATS, against a real server."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from sottovoce_client.feeding.broker import BrokerCredentials
from sottovoce_client.feeding.nats import BUCKET
from sottovoce_core.errors import DataError, FailedPrecondition, SpecError, Unavailable
from tests import brokers
from tests.brokers import (
    Feeder,
    Server,
    certificate_in,
    killed_again_and_again,
    open_url,
    serving,
    take,
    troubles,
    until,
)

nats = pytest.importorskip("nats")

# The library leaves sockets to the garbage collector where connecting fails, and before version 2.16 where a server is gone.
pytestmark = [
    pytest.mark.external,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@asynccontextmanager
async def server(folder: Path, *more: str) -> AsyncIterator[Server]:
    options = ("-js", "-sd", str(folder / "nats"), "-a", "127.0.0.1")
    async with serving("nats-server", lambda port: [*options, "-p", str(port), *more]) as found:
        yield found


@asynccontextmanager
async def jetstream(at: Server, **options: Any) -> AsyncIterator[Any]:
    connection = await nats.connect(f"127.0.0.1:{at.port}", **options)
    try:
        yield connection.jetstream(timeout=60)
    finally:
        await connection.close()


async def publish(js: Any, first: int, end: int, subject: str = "wards.north") -> None:
    for k in range(first, end):
        await js.publish(subject, b"%d" % k)


def options_of(at: Server, names: str = "wards", scheme: str = "nats", **more: Any) -> dict[str, Any]:
    return brokers.options_of(scheme, at.port, names, **more)


async def test_messages_come_in_order_and_the_next_feeder_goes_on(tmp_path: Path) -> None:
    async with server(tmp_path) as at, jetstream(at) as js:
        await js.add_stream(name="wards", subjects=["wards.>"])
        await publish(js, 0, 1_000)
        await js.publish("wards.north", b"")
        async with open_url(**options_of(at)) as (part,):
            found = await take(part, 1_001)
            assert [each.body for each in found[:-1]] == [b"%d" % k for k in range(1_000)]
            assert [each.position for each in found] == list(range(1, 1_002))
            assert found[-1].body == b""
        await publish(js, 1_000, 1_010)
        async with open_url(**options_of(at)) as (part,):
            assert [each.body for each in await take(part, 10)] == [b"%d" % k for k in range(1_000, 1_010)]
            assert [each.position for each in await take(part, 1, after=1_006)] == list(range(1_007, 1_012))
        async with open_url(**options_of(at, group="another")) as (part,):
            assert (await take(part, 1, keep=False))[0].position == 1


async def test_a_feeder_that_dies_again_and_again_brings_each_record_once(tmp_path: Path) -> None:
    async with server(tmp_path) as at, jetstream(at) as js:
        await js.add_stream(name="wards", subjects=["wards.>"])
        feeder = Feeder(options_of(at, subject="wards.*"), tmp_path / "kept")
        publishing = asyncio.ensure_future(publish(js, 0, 2_000))
        found = await killed_again_and_again(feeder, 2_000)
        await publishing
    assert [int(body) for _, _, body in found] == list(range(2_000))


async def test_a_server_that_is_killed_and_comes_back_is_waited_for(tmp_path: Path) -> None:
    async with server(tmp_path) as at:
        async with jetstream(at) as js:
            await js.add_stream(name="wards", subjects=["wards.>"])
            await publish(js, 0, 100)
        with capture_logs() as logs:
            async with open_url(**options_of(at)) as (part,):
                messages: Any = part.read(-1)
                found = [*await anext(messages)]
                while len(found) < 100:
                    found += await anext(messages)
                following = asyncio.ensure_future(anext(messages))
                at.kill()
                await until(lambda: bool(troubles(logs)))
                await part.acknowledge(50)  # nobody hears it
                await at.start()
                async with jetstream(at) as js:
                    await publish(js, 100, 101)
                found += await following
                await messages.aclose()
        assert [each.body for each in found] == [b"%d" % k for k in range(101)]
        assert [each["event"] for each in logs] == [
            "subscribed",
            "the broker is unreachable",
            "the broker is back",
            "subscribed",
        ]
        async with open_url(**options_of(at)) as (part,):  # the bookmark was written when the server was back
            assert (await take(part, 1))[0].position == 51


async def test_patience_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with server(tmp_path) as at:
        async with jetstream(at) as js:
            await js.add_stream(name="wards")
        async with open_url(**options_of(at, patience_s=0.1)) as (part,):
            at.kill()
            monkeypatch.setattr("sottovoce_client.feeding.nats._CALL_TIMEOUT_S", 0.5)  # nobody will answer
            with pytest.raises(Unavailable, match=r"NATS at 127.0.0.1.* was unreachable for 0.1 s"):
                await take(part, 1)
        with pytest.raises(Unavailable, match=r"was unreachable for 0.1 s"):
            async with open_url(**options_of(at, patience_s=0.1)):
                pass


ANN = {"user": "ann", "password": "right"}
CLOSED = """
authorization {{ users = [
  {{user: ann, password: right}}
  {{user: ben, password: right, permissions: {{publish: nothing, subscribe: "_INBOX.>"}}}}
]}}
{}
"""


async def test_who_is_not_known_is_told_so_at_once(tmp_path: Path) -> None:
    (tmp_path / "conf").write_text(CLOSED.format(""))
    async with server(tmp_path, "-c", str(tmp_path / "conf")) as at:
        for access in (BrokerCredentials("ann", "wrong"), BrokerCredentials(), BrokerCredentials("", "right")):
            with pytest.raises(FailedPrecondition, match="rejects these credentials, or is not trusted") as refused:
                async with open_url(**options_of(at, credentials=access)):
                    pass
            assert "right" not in str(refused.value)
        async with open_url(**options_of(at, credentials=BrokerCredentials("ben", "right"))) as (part,):
            with pytest.raises(FailedPrecondition, match=r"[Pp]ermissions"):
                await take(part, 1)
        async with jetstream(at, **ANN) as js:
            await js.add_stream(name="wards", subjects=["wards.>"])
            await publish(js, 0, 1)
        async with open_url(**options_of(at, credentials=BrokerCredentials("ann", "right"))) as (part,):
            assert len(await take(part, 1)) == 1
    with pytest.raises(SpecError, match="no user or password") as misplaced:
        async with open_url("nats://ann:right@host/wards"):
            pass
    assert "right" not in str(misplaced.value)


async def test_through_tls_the_server_is_known_by_its_authority(tmp_path: Path) -> None:
    certificate, key = certificate_in(tmp_path)
    (tmp_path / "conf").write_text(CLOSED.format(f'tls {{ cert_file: "{certificate}", key_file: "{key}" }}'))
    async with server(tmp_path, "-c", str(tmp_path / "conf")) as at:
        ann = BrokerCredentials("ann", "right", ca=certificate)
        async with jetstream(at, **ANN, tls=ssl.create_default_context(cafile=certificate)) as js:
            await js.add_stream(name="wards", subjects=["wards.>"])
            await publish(js, 0, 1)
        async with open_url(**options_of(at, credentials=ann)) as (part,):
            assert len(await take(part, 1)) == 1
        with pytest.raises(FailedPrecondition, match=r"(?i)certificate.verify.failed"):
            async with open_url(**options_of(at, scheme="tls", credentials=BrokerCredentials("ann", "right"))):
                pass


@pytest.mark.parametrize("scheme", ["nats", "tls"])
async def test_no_password_is_shown_in_the_clear_where_tls_was_asked_for(scheme: str, tmp_path: Path) -> None:
    said, ca = list[bytes](), certificate_in(tmp_path)[0] if scheme == "nats" else None

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id": "a", "max_payload": 1000, "auth_required": true}\r\n')
        said.append(await reader.read())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as at:
        server = f"{scheme}://127.0.0.1:{at.sockets[0].getsockname()[1]}"
        with pytest.raises(FailedPrecondition, match="the server has no TLS"):
            async with open_url(f"{server}/wards", credentials=BrokerCredentials("ann", "right", ca)):
                pass
        await until(lambda: bool(said))
    assert said == [b""]


async def test_a_subject_that_a_stream_cannot_have_is_refused(tmp_path: Path) -> None:
    async with server(tmp_path) as at:
        async with jetstream(at) as js:
            await js.add_stream(name="wards", subjects=["wards.*"])
            await publish(js, 0, 1)
        async with open_url(**options_of(at, subject="wrads.north")) as (part,):
            with pytest.raises(DataError, match=r"has messages of wards\.\*: wrads\.north is not among them"):
                await take(part, 1)
        async with open_url(**options_of(at, subject="wards.north")) as (part,):
            assert len(await take(part, 1)) == 1


async def test_what_is_no_stream_is_refused() -> None:
    for path in ("a b", "a.b", "wards?subject=a%0D%0APUB%20b%200"):
        with pytest.raises(SpecError, match="as NATS has them"):
            async with open_url(f"nats://nowhere/{path}"):
                pass


async def test_a_stream_that_was_made_anew_is_refused(tmp_path: Path) -> None:
    async with server(tmp_path) as at, jetstream(at) as js:
        await js.add_stream(name="wards", subjects=["wards.>"])
        await publish(js, 0, 10)
        async with open_url(**options_of(at)) as (part,):
            await take(part, 10)
            await js.delete_stream("wards")
            with pytest.raises(DataError, match="has no stream wards"):
                await take(part, 1, after=10)
            await js.add_stream(name="wards", subjects=["wards.>"])
            await publish(js, 0, 20)  # longer than the old one
            with pytest.raises(DataError, match="was replaced: the learner has its message 10, of one"):
                await take(part, 1, after=10)
        async with open_url(**options_of(at)) as (part,):  # in another run
            assert len(await take(part, 20)) == 20
        async with open_url(**options_of(at, group="without a bookmark")) as (part,):
            with pytest.raises(DataError, match="it ends with message 20, and the learner has 30"):
                await take(part, 1, after=30)


@pytest.mark.parametrize(("subject", "said"), [("", "15"), ("wards.*", "up to 15")])
async def test_what_retention_took_away_is_counted(tmp_path: Path, subject: str, said: str) -> None:
    async with server(tmp_path) as at, jetstream(at) as js:
        await js.add_stream(name="wards", subjects=["wards.>"], max_msgs=5)
        await publish(js, 0, 5)
        async with open_url(**options_of(at, subject=subject)) as (part,):
            assert len(await take(part, 5)) == 5
        await publish(js, 5, 25)
        with capture_logs() as logs:
            async with open_url(**options_of(at, subject=subject)) as (part,):
                assert [each.body for each in await take(part, 5, after=5)] == [b"%d" % k for k in range(20, 25)]
    assert [(each["event"], each["messages"]) for each in troubles(logs)] == [
        ("messages were deleted before they were read", said)
    ]


async def test_it_begins_where_it_is_told_to(tmp_path: Path) -> None:
    async with server(tmp_path) as at, jetstream(at) as js:
        await js.add_stream(name="wards", subjects=["wards.>"], max_msgs=8)
        await publish(js, 0, 10)
        async with open_url(**options_of(at, from_="new")) as (part,):
            messages: Any = part.read(-1)
            following = asyncio.ensure_future(anext(messages))
            await until_marked(js)
            await publish(js, 10, 11)
            assert [each.body for each in await following] == [b"10"]
            await messages.aclose()
        async with open_url(**options_of(at, from_="start")) as (part,):
            assert [each.position for each in await take(part, 8)] == list(range(4, 12))
        await publish(js, 11, 13, "wards.south")
        async with open_url(**options_of(at, subject="wards.south")) as (part,):
            assert [each.body for each in await take(part, 2)] == [b"11", b"12"]


async def until_marked(js: Any) -> None:
    """A feeder has begun."""
    while True:
        try:
            if await (await js.key_value(BUCKET)).keys():
                return
        except (nats.js.errors.NotFoundError, nats.js.errors.NoKeysError):
            await asyncio.sleep(0.01)


async def test_a_stream_that_forgets_what_was_delivered_is_refused(tmp_path: Path) -> None:
    async with server(tmp_path) as at, jetstream(at) as js:
        await js.add_stream(name="wards", subjects=["wards.>"], retention="workqueue")
        async with open_url(**options_of(at)) as (part,):
            with pytest.raises(DataError, match="by limits, not by workqueue"):
                await take(part, 1)
