"""Records from Redis, against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from sottovoce_client.feeding.broker import BrokerCredentials
from sottovoce_client.feeding.redis import _format_entry_id, _parse_entry_id
from sottovoce_core.errors import DataError, FailedPrecondition, Unavailable
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

pytestmark = pytest.mark.external

redis = pytest.importorskip("redis.asyncio")

ANN = {"password": "right"}


@asynccontextmanager
async def server(folder: Path, *more: str, tls: bool = False) -> AsyncIterator[Server]:
    kept = ("--dir", str(folder), "--appendonly", "yes", "--appendfsync", "always", "--save", "", "--bind", "127.0.0.1")
    port = "--tls-port" if tls else "--port"
    async with serving("redis-server", lambda free: [*kept, *more, port, str(free)]) as found:
        yield found


@asynccontextmanager
async def client(at: Server, **options: Any) -> AsyncIterator[Any]:
    found = redis.Redis(host="127.0.0.1", port=at.port, **options)
    try:
        yield found
    finally:
        await found.aclose()


async def add(to: Any, first: int, end: int, key: str = "wards") -> None:
    for k in range(first, end):
        await to.xadd(key, {"k": k})


def options_of(at: Server, names: str = "wards", scheme: str = "redis", **more: Any) -> dict[str, Any]:
    return brokers.options_of(scheme, at.port, names, **more)


def numbers(messages: Any) -> list[int]:
    return [int(each.body["k"]) for each in messages]


async def test_entries_come_in_order_and_the_next_feeder_goes_on(tmp_path: Path) -> None:
    async with server(tmp_path) as at, client(at) as to:
        await add(to, 0, 1_000)
        async with open_url(**options_of(at)) as (part,):
            found = await take(part, 1_000)
            assert numbers(found) == list(range(1_000))
            assert _format_entry_id(found[-1].position).encode() == (await to.xrevrange("wards", count=1))[0][0]
        (group,) = await to.xinfo_groups("wards")
        assert (group["entries-read"], group["lag"]) == (1_000, 0)  # as the broker's own tools show it
        await add(to, 1_000, 1_010)
        async with open_url(**options_of(at)) as (part,):
            assert numbers(await take(part, 10)) == list(range(1_000, 1_010))
            assert numbers(await take(part, 1, after=found[989].position)) == list(range(990, 1_010))
        async with open_url(**options_of(at, group="another")) as (part,):
            assert numbers(await take(part, 1))[0] == 0


async def test_several_streams_and_what_is_no_record(tmp_path: Path) -> None:
    async with server(tmp_path) as at, client(at) as to:
        await to.xadd("north", {"record": b'{"k": 1}'})
        await to.xadd("south", {"k": 2})
        await to.xadd("south", {"record": b"\xff"})
        async with open_url(**options_of(at, names="north,south", field="record")) as (north, south):
            assert [each.body for each in await take(north, 1)] == [b'{"k": 1}']
            found = await take(south, 2)
            assert [bool(each.reason) for each in found] == [True, False]
        async with open_url(**options_of(at, names="south", from_="start")) as (south,):
            assert [bool(each.reason) for each in await take(south, 2)] == [False, True]


async def test_a_feeder_that_dies_again_and_again_brings_each_record_once(tmp_path: Path) -> None:
    async with server(tmp_path) as at, client(at) as to:
        feeder = Feeder(options_of(at), tmp_path / "kept")
        adding = asyncio.ensure_future(add(to, 0, 2_000))
        found: Any = await killed_again_and_again(feeder, 2_000)
        await adding
    assert [int(body["k"]) for _, _, body in found] == list(range(2_000))


async def test_a_server_that_is_killed_and_comes_back_is_waited_for(tmp_path: Path) -> None:
    async with server(tmp_path) as at:
        async with client(at) as to:
            await add(to, 0, 100)
        with capture_logs() as logs:
            async with open_url(**options_of(at)) as (part,):
                messages: Any = part.read(-1)
                found = [*await anext(messages)]
                following = asyncio.ensure_future(anext(messages))
                at.kill()
                await until(lambda: bool(troubles(logs)))
                await part.acknowledge(found[50].position)  # nobody hears it
                await at.start()
                async with client(at) as to:
                    await add(to, 100, 101)
                found += await following
                await messages.aclose()
        assert numbers(found) == list(range(101))
        assert [each["event"] for each in logs] == [
            "subscribed",
            "the broker is unreachable",
            "the broker is back",
            "subscribed",
        ]
        async with open_url(**options_of(at)) as (part,):  # the group was told when the server was back
            assert numbers(await take(part, 1))[0] == 51


async def test_patience_ends(tmp_path: Path) -> None:
    async with server(tmp_path) as at:
        async with open_url(**options_of(at, patience_s=0.1)) as (part,):
            at.kill()
            with pytest.raises(Unavailable, match=r"Redis at 127.0.0.1.* was unreachable for 0.1 s"):
                await take(part, 1)
        with pytest.raises(Unavailable, match=r"was unreachable for 0.1 s"):
            async with open_url(**options_of(at, patience_s=0.1)):
                pass


async def test_who_is_not_known_is_told_so_at_once(tmp_path: Path) -> None:
    (tmp_path / "users").write_text("user default on >right ~* +@all\nuser ben on >right ~* -@all +ping +exists\n")
    async with server(tmp_path, "--aclfile", str(tmp_path / "users")) as at:
        for access in (BrokerCredentials("", "wrong"), BrokerCredentials(), BrokerCredentials("ann", "right")):
            with pytest.raises(FailedPrecondition, match="rejects these credentials, or is not trusted") as refused:
                async with open_url(**options_of(at, credentials=access)):
                    pass
            assert "right" not in str(refused.value)
        async with client(at, **ANN) as to:
            await add(to, 0, 1)
        async with open_url(**options_of(at, credentials=BrokerCredentials("ben", "right"))) as (part,):
            with pytest.raises(FailedPrecondition, match="permissions"):
                await take(part, 1)
        async with open_url(**options_of(at, credentials=BrokerCredentials("", "right"))) as (part,):
            assert len(await take(part, 1)) == 1


async def test_through_tls_the_server_is_known_by_its_authority(tmp_path: Path) -> None:
    certificate, key = map(str, certificate_in(tmp_path))
    files = ("--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate)
    async with server(tmp_path, *files, "--tls-auth-clients", "yes", "--port", "0", tls=True) as at:
        ours = BrokerCredentials(ca=Path(certificate), certificate=Path(certificate), key=Path(key))
        async with client(at, ssl=True, ssl_ca_certs=certificate, ssl_certfile=certificate, ssl_keyfile=key) as to:
            await add(to, 0, 1)
        async with open_url(**options_of(at, credentials=ours)) as (part,):
            assert len(await take(part, 1)) == 1
        with pytest.raises(FailedPrecondition, match=r"(?i)certificate.verify.failed"):
            async with open_url(**options_of(at, scheme="rediss")):
                pass


async def test_a_stream_that_was_made_anew_is_refused(tmp_path: Path) -> None:
    async with server(tmp_path) as at, client(at) as to:
        await add(to, 0, 10)
        async with open_url(**options_of(at)) as (part,):
            found = await take(part, 10, keep=False)
            await to.delete("wards")
            with pytest.raises(DataError, match="was replaced: it was deleted"):
                await part.acknowledge(found[-1].position)
            await add(to, 0, 20)
            with pytest.raises(DataError, match="was replaced"):
                await take(part, 1, after=found[-1].position)
        async with open_url(**options_of(at)) as (part,):  # in another run
            assert numbers(await take(part, 20)) == list(range(20))
            with pytest.raises(DataError, match=r"it ends with entry .*, and the learner has 8000000000000-5"):
                await take(part, 1, after=_parse_entry_id(b"8000000000000-5"))
        await to.set("number", 1)
        async with open_url(**options_of(at, names="number")) as (part,):
            with pytest.raises(DataError, match="cannot give stream number"):
                await take(part, 1)


async def test_what_was_trimmed_is_counted(tmp_path: Path) -> None:
    async with server(tmp_path) as at, client(at) as to:
        await add(to, 0, 10)
        async with open_url(**options_of(at)) as (part,):
            found = await take(part, 10)
        await add(to, 10, 30)
        await to.xtrim("wards", maxlen=5, approximate=False)
        with capture_logs() as logs:
            async with open_url(**options_of(at)) as (part,):
                assert numbers(await take(part, 5, after=found[-1].position)) == list(range(25, 30))
        assert [(each["event"], each["messages"]) for each in troubles(logs)] == [
            ("messages were deleted before they were read", "15")
        ]
        await to.xadd("wards", {"k": 30})
        middle = await to.xadd("wards", {"k": 31})
        await to.xadd("wards", {"k": 32})
        await to.xdel("wards", middle)
        with capture_logs() as logs:
            async with open_url(**options_of(at)) as (part,):
                found = await take(part, 2)
                assert numbers(found) == [30, 32]
            async with open_url(**options_of(at)) as (part,):
                following = asyncio.ensure_future(take(part, 1))
                await until(lambda: bool(troubles(logs)))
                await add(to, 33, 34)
                assert numbers(await following) == [33]
        assert [each["messages"] for each in troubles(logs)] == ["1"]


async def test_it_begins_where_it_is_told_to(tmp_path: Path) -> None:
    async with server(tmp_path) as at, client(at) as to:
        async with open_url(**options_of(at)) as (part,):  # there is no stream yet
            following = asyncio.ensure_future(take(part, 1))
            async with asyncio.timeout(100):
                while not await to.exists("wards"):  # noqa: ASYNC110 - a server's state is no event
                    await asyncio.sleep(0.01)
            await add(to, 0, 10)
            assert numbers(await following)[0] == 0
        async with open_url(**options_of(at, from_="start")) as (part,):
            assert numbers(await take(part, 10)) == list(range(10))
        async with open_url(**options_of(at, from_="new", group="late")) as (part,):
            following = asyncio.ensure_future(take(part, 1))
            async with asyncio.timeout(100):
                while len(await to.xinfo_groups("wards")) < 2:  # noqa: ASYNC110 - a server's state is no event
                    await asyncio.sleep(0.01)
            await add(to, 10, 11)
            assert numbers(await following) == [10]


def test_an_id_is_a_position() -> None:
    for each in (b"0-1", b"1700000000000-0", b"8796093022207-1048575"):
        assert _format_entry_id(_parse_entry_id(each)).encode() == each
    assert 0 < _parse_entry_id(b"1-0") - _parse_entry_id(b"0-1048575") <= 1
    assert _parse_entry_id(b"8796093022207-1048575") == 2**63 - 1
    for each in (b"0-1048576", b"8796093022208-0"):
        with pytest.raises(DataError, match="sequence below 1,048,576"):
            _parse_entry_id(each)
