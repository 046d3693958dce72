"""Brokers for tests: real servers on free ports, and a feeder that stands in for a learner's, in a process that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from sottovoce_client.feeding.broker import Feed, load_feeds, open_source
from sottovoce_client.feeding.records import SourceMessage, SourcePartition

PATIENCE_S = 100.0


def free_port() -> int:
    """Below those that the system gives to whoever wants any: of tests beside this one nobody is given it meanwhile."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@dataclass
class Server:
    """A server that can be killed, and started again on its port.

    Attributes:
        command: with which it is started.
        port: on which it answers.
    """

    command: Sequence[str]
    port: int
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    async def start(self) -> None:
        """It answers."""
        silent = subprocess.DEVNULL
        self.process = subprocess.Popen(self.command, stdout=silent, stderr=silent)  # noqa: ASYNC220 - it is waited for below
        async with asyncio.timeout(PATIENCE_S):
            while True:
                assert self.process.poll() is None, f"{self.command[0]} has ended"
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    writer.close()
                    await asyncio.sleep(0.02)  # if it is another's, ours has ended by now
                    assert self.process.poll() is None, f"{self.command[0]} has ended"
                    return
                await asyncio.sleep(0.02)

    def kill(self) -> None:
        """With -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


async def _started(program: str, command: Callable[[int], Sequence[str]], tries: int = 5) -> Server:
    """On a port that nobody else took meanwhile."""
    while True:
        port = free_port()
        server = Server([program, *command(port)], port)
        try:
            await server.start()
        except AssertionError:
            tries -= 1
            if not tries:
                raise
        else:
            return server


@asynccontextmanager
async def serving(program: str, command: Callable[[int], Sequence[str]]) -> AsyncIterator[Server]:
    """A server, on a free port; skips the test where it is not installed."""
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip(f"{program} is not installed")
    server = await _started(found, command)
    try:
        yield server
    finally:
        server.kill()


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what no event tells."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - a file, or a server's state, is no event
            await asyncio.sleep(0.01)


async def take(part: SourcePartition, count: int, after: int = -1, *, keep: bool = True) -> list[SourceMessage]:
    """So many messages, kept like those that a learner has; fewer where it ends."""
    found = list[SourceMessage]()
    messages = part.read(after)
    async with asyncio.timeout(PATIENCE_S):
        try:
            async for each in messages:
                found += each
                if keep:
                    await part.acknowledge(found[-1].position)
                if len(found) >= count:
                    break
        finally:
            await messages.aclose()  # type: ignore[attr-defined]
    return found


def options_of(scheme: str, port: int, names: str, **more: Any) -> dict[str, Any]:
    """Arguments of `open_url`: a URL with settings, and attributes of the source."""
    own: dict[str, Any] = {name: more.pop(name) for name in ("credentials", "patience_s", "position") if name in more}
    query = "&".join(f"{name.rstrip('_')}={quote(str(value), safe='')}" for name, value in more.items() if value)
    return {"url": f"{scheme}://127.0.0.1:{port}/{names}?{query}", **own}


def feed_of(url: str) -> Feed:
    return next(each for each in load_feeds() if url.partition("://")[0] in each.schemes)


def open_url(url: str, **more: Any) -> AbstractAsyncContextManager[list[SourcePartition]]:
    return open_source(feed_of(url).parse_url(url, **more))


def certificate_in(folder: Path) -> tuple[Path, Path]:
    """Files of a certificate for 127.0.0.1 that is its own authority, and of its key."""
    key, now, name = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC), x509.Name([])
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(days=1), now + timedelta(days=1))
        .add_extension(address, critical=True)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(certificate.public_bytes(Encoding.PEM))
    files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return files


# ---- a feeder of its own ---------------------------------------------------------------------------------------------


@dataclass
class Feeder:
    """A process that feeds a file: a line is a record in a learner's keeping.

    Attributes:
        options: of `open_url`, as JSON has them.
        kept: the file.
    """

    options: Mapping[str, Any]
    kept: Path
    process: asyncio.subprocess.Process | None = field(default=None, init=False)

    async def start(self) -> None:
        arguments = json.dumps([self.options, str(self.kept)])
        self.process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.brokers", arguments)

    async def kill(self) -> None:
        """With -9."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    def records(self) -> list[tuple[str, int, str]]:
        """Name of the part, position, body; of whole lines."""
        text = self.kept.read_text() if self.kept.exists() else ""
        return [tuple(json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]


async def _feed(options: dict[str, Any], kept: Path) -> None:
    last = {name: position for name, position, _ in Feeder(options, kept).records()}
    async with open_url(**options) as parts:
        with kept.open("a") as file:

            async def one(part: SourcePartition) -> None:
                async for messages in part.read(last.get(part.name, -1)):
                    for each in messages:
                        if each.position > last.get(part.name, -1):  # as a learner does
                            last[part.name] = each.position
                            body = each.body.decode() if isinstance(each.body, bytes) else dict(each.body)
                            file.write(json.dumps([part.name, each.position, body]) + "\n")
                    file.flush()
                    await part.acknowledge(messages[-1].position)

            await asyncio.gather(*map(one, parts))


async def killed_again_and_again(feeder: Feeder, records: int, times: int = 3) -> list[tuple[str, int, str]]:
    """What it kept in the end, having been killed so many times on the way."""
    for k in range(times + 1):
        await feeder.start()
        wanted = records * (k + 1) // (times + 1)
        await until(lambda wanted=wanted: len(feeder.records()) >= wanted)  # type: ignore[misc]
        await feeder.kill()
    return feeder.records()


if __name__ == "__main__":
    _options, _kept = json.loads(sys.argv[1])
    asyncio.run(_feed(_options, Path(_kept)))


def troubles(logs: Sequence[Any]) -> list[Any]:
    """What a feeder logged, but for that it is subscribed."""
    return [each for each in logs if each["event"] != "subscribed"]
