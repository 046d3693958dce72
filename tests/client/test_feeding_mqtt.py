"""Records from MQTT, against a real broker."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from sottovoce_client.feeding.broker import BrokerCredentials
from sottovoce_client.feeding.mqtt import _run_on_event_loop, _UnacknowledgedMessages
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

paho = pytest.importorskip("paho.mqtt.client")

ANN = {"user": "ann", "password": "right"}


@pytest.fixture(autouse=True)
def states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folder of the files that tell what a broker sends again."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))


@asynccontextmanager
async def server(folder: Path, *more: str, persist: bool = True) -> AsyncIterator[Server]:
    """A broker that writes down what it has when it ends."""
    (folder / "kept").mkdir(exist_ok=True)

    def command(port: int) -> Sequence[str]:
        keeping = ["persistence true", f"persistence_location {folder}/kept/"]
        own = [f"listener {port} 127.0.0.1", "max_queued_messages 0", *(keeping if persist else []), *more]
        if not any(line.startswith("allow_anonymous") for line in more):
            own.append("allow_anonymous true")
        (folder / "conf").write_text("\n".join([*own, "user root", ""]))
        return ["-c", str(folder / "conf")]

    async with serving("mosquitto", command) as found:
        yield found


@asynccontextmanager
async def publishing(at: Server, **options: Any) -> AsyncIterator[Any]:
    """A client that publishes and waits until the broker has it."""
    found = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    if "user" in options:
        found.username_pw_set(options["user"], options["password"])
    if "tls" in options:
        found.tls_set_context(options["tls"])
    found.connect("127.0.0.1", at.port)
    _run_on_event_loop(found)

    async def publish(*bodies: bytes, topic: str = "wards/north", **more: Any) -> None:
        for each in bodies:
            await until(found.publish(topic, each, qos=1, **more).is_published)

    try:
        yield publish
    finally:
        found.disconnect()
        found.loop_write()


def options_of(at: Server, names: str = "wards/#", scheme: str = "mqtt", **more: Any) -> dict[str, Any]:
    return brokers.options_of(scheme, at.port, names, **{"client": "sottovoce", **more})


def bodies(first: int, end: int) -> list[bytes]:
    return [b"%d" % k for k in range(first, end)]


async def test_a_process_may_have_many_files_open(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4_096:
        pytest.skip(f"a process may have {hard} files open here")
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4_096), hard))
        for _ in range(1_100):
            stack.enter_context(open(os.devnull))  # noqa: ASYNC230 - for its descriptor
        async with server(tmp_path) as at, publishing(at) as publish, open_url(**options_of(at)) as (part,):
            await publish(*bodies(0, 10))
            assert [each.body for each in await take(part, 10)] == bodies(0, 10)


async def test_messages_come_in_order_and_wait_for_the_next_feeder(tmp_path: Path) -> None:
    async with server(tmp_path) as at, publishing(at) as publish:
        await publish(b"retained", topic="wards/old", retain=True)
        async with open_url(**options_of(at)) as (part,):
            await publish(*bodies(0, 200))
            await publish(b"200", topic="wards/a/b")
            await publish(b"other", topic="beds")
            await publish(b"")
            found = await take(part, 202)
            assert [each.body for each in found] == [*bodies(0, 201), b""]
            assert [each.position for each in found] == list(range(202))
            assert found[-1].body == b""
        await publish(*bodies(201, 205))
        async with open_url(**options_of(at)) as (part,):
            found = await take(part, 4, after=900)
            assert [(each.position, each.body) for each in found] == [
                *zip(range(901, 905), bodies(201, 205), strict=True)
            ]


async def test_a_feeder_that_dies_again_and_again_brings_each_record_once(tmp_path: Path) -> None:
    async with server(tmp_path) as at, publishing(at) as publish:
        async with open_url(**options_of(at)):
            pass  # the session begins
        feeder = Feeder(options_of(at, state=str(tmp_path / "state")), tmp_path / "learned")
        publish_all = asyncio.ensure_future(publish(*bodies(0, 1_000)))
        found = await killed_again_and_again(feeder, 1_000)
        await publish_all
    assert [int(body) for _, _, body in found] == list(range(1_000))
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("learned", [0, 3, 5])
async def test_what_was_kept_and_not_acknowledged_is_not_fed_again(tmp_path: Path, learned: int) -> None:
    """A feeder dies when the learner has some of five messages, and the broker knows of none."""
    async with server(tmp_path) as at, publishing(at) as publish:
        state = tmp_path / "state"
        async with open_url(**options_of(at, state=state)) as (part,):
            await publish(*bodies(0, 5))
            assert len(await take(part, 5, keep=False)) == 5
        async with open_url(**options_of(at, state=state)) as (part,):
            await publish(*bodies(5, 7))
            found = await take(part, 7 - learned, after=learned - 1)
            assert [(each.position, each.body) for each in found] == [
                *zip(range(learned, 7), bodies(learned, 7), strict=True)
            ]
        async with open_url(**options_of(at, state=state)) as (part,):  # all were acknowledged
            await publish(b"last")
            assert [each.body for each in await take(part, 1, after=6)] == [b"last"]


async def test_a_field_says_where_a_message_stands(tmp_path: Path) -> None:
    async with server(tmp_path) as at, publishing(at) as publish:
        texts = [b'{"n": %d, "age": 1}' % k for k in range(5, 10)]
        async with open_url(**options_of(at, position="n")) as (part,):
            await publish(*texts, texts[2], b"{}", b"no object")
            found = await take(part, 8, keep=False)
        assert [each.position for each in found] == [5, 6, 7, 8, 9, 7, 9, 9]
        assert [bool(each.reason) for each in found] == [False] * 6 + [True] * 2
        async with open_url(**options_of(at, position="n")) as (part,):  # sent again, and the learner passes over it
            assert [each.position for each in await take(part, 8, after=7)] == [5, 6, 7, 8, 9, 7, 9, 9]
        async with open_url(**options_of(at, position="n")) as (part,):
            await publish(b'{"n": 10}')
            assert [each.position for each in await take(part, 1, after=9)] == [10]


async def test_a_broker_that_is_killed_and_comes_back_is_waited_for(tmp_path: Path) -> None:
    async with server(tmp_path) as at:
        with capture_logs() as logs:
            async with open_url(**options_of(at, state=tmp_path / "state")) as (part,):
                async with publishing(at) as publish:
                    await publish(*bodies(0, 10))
                messages: Any = part.read(-1)
                found = [*await anext(messages)]
                while len(found) < 10:
                    found += await anext(messages)
                following = asyncio.ensure_future(anext(messages))
                assert at.process is not None
                at.process.terminate()  # it writes down what it has
                at.process.wait()
                await until(lambda: bool(troubles(logs)))
                await part.acknowledge(4)  # nobody hears it
                await at.start()
                async with publishing(at) as publish:
                    await publish(*bodies(10, 11))
                found += await following
                await part.acknowledge(10)
                await messages.aclose()
        assert [each.body for each in found] == bodies(0, 11)
        assert [each["event"] for each in logs] == [
            "subscribed",
            "the broker is unreachable",
            "the broker is back",
            "subscribed",
        ]


async def test_a_session_that_the_broker_forgot_is_told(tmp_path: Path) -> None:
    async with server(tmp_path, persist=False) as at:
        with capture_logs() as logs:
            async with open_url(**options_of(at)) as (part,):
                async with publishing(at) as publish:
                    await publish(*bodies(0, 3))
                messages: Any = part.read(-1)
                found = [*await anext(messages)]
                while len(found) < 3:
                    found += await anext(messages)
                following = asyncio.ensure_future(anext(messages))
                at.kill()
                await until(lambda: bool(troubles(logs)))
                await at.start()
                await until(lambda: len(troubles(logs)) == 3)
                async with publishing(at) as publish:
                    await publish(b"new")
                assert [each.body for each in await following][-1] == b"new"
                await messages.aclose()
        assert ("messages were deleted before they were read", "an unknown number") in [
            (each["event"], each.get("messages")) for each in troubles(logs)
        ]


async def test_patience_ends(tmp_path: Path) -> None:
    async with server(tmp_path) as at, open_url(**options_of(at, patience_s=0.1)) as (part,):
        at.kill()
        with pytest.raises(Unavailable, match=r"MQTT at 127.0.0.1.* was unreachable for 0.1 s"):
            await take(part, 1)


async def test_a_server_that_hangs_up_at_once_is_away() -> None:
    async with await asyncio.start_server(lambda _, writer: writer.transport.abort(), "127.0.0.1", 0) as nobody:
        url = f"mqtt://127.0.0.1:{nobody.sockets[0].getsockname()[1]}/wards/#?client=a"
        with pytest.raises(Unavailable, match=r"was unreachable for 0.1 s"):
            async with open_url(url, patience_s=0.1):
                pass


# The library leaves a socket to the garbage collector where TLS fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_who_is_not_known_is_told_so_at_once(tmp_path: Path) -> None:
    tool = shutil.which("mosquitto_passwd")
    if tool is None:
        pytest.skip("mosquitto_passwd is not installed")
    users = tmp_path / "users"
    users.touch()
    adding = await asyncio.create_subprocess_exec(tool, "-b", str(users), "ann", "right")
    assert await adding.wait() == 0
    certificate, key = certificate_in(tmp_path)
    own = ["allow_anonymous false", f"password_file {users}", f"certfile {certificate}", f"keyfile {key}"]
    async with server(tmp_path, *own) as at:
        for access in (BrokerCredentials("ann", "wrong", ca=certificate), BrokerCredentials(ca=certificate)):
            with pytest.raises(FailedPrecondition, match="rejects these credentials, or is not trusted") as refused:
                async with open_url(**options_of(at, credentials=access)):
                    pass
            assert "right" not in str(refused.value)
        with pytest.raises(FailedPrecondition, match=r"(?i)certificate.verify.failed"):
            async with open_url(**options_of(at, scheme="mqtts", credentials=BrokerCredentials("ann", "right"))):
                pass
        ann = BrokerCredentials("ann", "right", ca=certificate)
        async with open_url(**options_of(at, credentials=ann)) as (part,):
            async with publishing(at, **ANN, tls=ssl.create_default_context(cafile=certificate)) as publish:
                await publish(b"1")
            assert len(await take(part, 1)) == 1


async def test_two_feeders_do_not_share_a_session(tmp_path: Path) -> None:
    ann, other = (_UnacknowledgedMessages(tmp_path / "state", "ann") for _ in range(2))
    ann.begin(-1)
    for _ in range(2):  # a refused one has not got it the second time either
        with pytest.raises(FailedPrecondition, match="another feeder has"):
            other.begin(-1)
    ann.close()
    other.begin(-1)
    other.close()


async def test_a_file_of_another_client_is_not_taken(tmp_path: Path) -> None:
    state = tmp_path / "state"
    ann = _UnacknowledgedMessages(state, "ann")
    ann.begin(-1)
    ann.close()
    ben = _UnacknowledgedMessages(state, "ben")
    with pytest.raises(DataError, match="is of client 'ann', and this is 'ben'"):
        ben.begin(-1)
    state.write_text("no header\n")
    with pytest.raises(DataError, match="was not written by a feeder"):
        ben.begin(-1)
    ben.close()
