"""Workers of an eavesdropper on other hosts: its capture is that of one process, also when they die, stop or come back."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from typer.testing import CliRunner

from sottovoce_client.cli import app
from sottovoce_core.errors import SpecError, Unavailable
from sottovoce_eavesdropper import worker_pool
from sottovoce_eavesdropper.capture_reader import open_capture
from sottovoce_eavesdropper.service import Eavesdropper, EavesdropperConfig, join
from sottovoce_eavesdropper.worker import JoiningWorker
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import open_channel
from sottovoce_wire.v1 import eavesdropper_pb2, eavesdropper_pb2_grpc
from tests.examples import made_up
from tests.services.capturing import said_again
from tests.services.dying_worker import STEPS
from tests.services.identities import Identities
from tests.services.network import PATIENCE_S, Network, network, refused
from tests.services.test_gaps import heard
from tests.services.test_run import SHAPES, by_round, recorded
from tests.services.test_workers import NAMES, kinds, require_named, spec_of

HOSTS = ("127.0.0.1", "localhost")


@asynccontextmanager
async def joined(up: Network, host: str, credentials: Credentials | None = None) -> AsyncIterator[JoiningWorker]:
    """A worker in this process that has joined the eavesdropper."""
    assert up.eavesdropping is not None
    credentials = credentials or up.eavesdropping.config.credentials
    worker = JoiningWorker(up.eavesdropper, "127.0.0.1", host, credentials, allow_imports=True)
    worker.start()
    try:
        await until_connected(up, host)
        yield worker
    finally:
        await worker.stop()


async def until_connected(up: Network, host: str, *, connected: bool = True) -> None:
    """Wait until a worker of this host has joined, or the eavesdropper has noticed that it is gone."""
    assert up.eavesdropping is not None
    workers = up.eavesdropping._captures.pool.workers
    async with asyncio.timeout(PATIENCE_S):
        while any(each.host == host and each.stream is not None for each in workers) != connected:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def process(up: Network, host: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker as a user starts it, that has joined the eavesdropper."""
    command = [sys.executable, "-m", "sottovoce_client", "eavesdropper", "--allow-imports", "--stop-with-stdin"]
    options = ["--join", up.eavesdropper, "--listen", "127.0.0.1:0", "--advertise-host", host]
    pipe = asyncio.subprocess.PIPE
    started = await asyncio.create_subprocess_exec(*command, *options, stdin=pipe, stdout=pipe)
    try:
        assert started.stdout is not None
        assert f'"address": "{host}:'.encode() in await started.stdout.readline()
        await until_connected(up, host)
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


def hosts_of(folder: str) -> set[str]:
    return {each["address"].rpartition(":")[0] for each in open_capture(folder).metadata["routes"]}


async def test_a_capture_of_workers_on_several_hosts_is_that_of_one_process(tmp_path: Path) -> None:
    """Every row of every edge, and the transcript is that of the simulation; over TLS."""
    spec = spec_of(rounds=50)
    data = made_up(spec)
    noise, sent, _ = recorded(spec, data, tmp_path / "noise.npz")
    found = list[Any]()
    for count in (0, 2):
        folder = tmp_path / str(count)
        ids = Identities(folder / "ids")
        async with (
            network(folder, NAMES, noise=noise, identities=ids, remote_workers=count) as up,
            AsyncExitStack() as stack,
        ):
            for host in HOSTS[:count]:
                await stack.enter_async_context(joined(up, host))
            outcome = await up.run(spec, data)
        assert outcome.state == "finished", outcome.detail
        capture = open_capture(outcome.capture_location or "")
        assert capture.is_complete and capture.metadata["detections"] == []
        assert hosts_of(outcome.capture_location or "") == set(HOSTS[: max(count, 1)])
        np.testing.assert_array_equal(by_round(capture.read_transcript(SHAPES, 3)), sent[:, :, 0])
        found.append((kinds(capture), capture.metadata["messages"], capture.metadata["bytes"]))
    assert found[0] == found[1]


async def test_a_worker_that_stops_in_order_loses_nothing(tmp_path: Path) -> None:
    """Its rows are stored first. The next one from the same host serves the same ports, and the capture is complete."""
    spec = spec_of(rounds=400)
    async with network(tmp_path, NAMES, remote_workers=2) as up, joined(up, HOSTS[0]), AsyncExitStack() as stack:
        leaving = AsyncExitStack()
        await leaving.enter_async_context(joined(up, HOSTS[1]))
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        for after in (30, 150):
            await up.until("ann", LearnerState.RUNNING, after)
            await leaving.aclose()
            await leaving.enter_async_context(joined(up, HOSTS[1]))
        stack.push_async_callback(leaving.aclose)
        outcome = await running
    assert outcome.state == "finished", outcome.detail
    capture = open_capture(outcome.capture_location or "")
    said_again(capture)
    assert capture.metadata["gaps"] == []
    require_named(capture, 400)


async def test_a_worker_that_is_frozen_is_taken_as_dead_and_joins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream stays open, as that of a host that loses its network."""
    monkeypatch.setattr(worker_pool, "_SILENCE_TIMEOUT_S", 2.0)
    spec = spec_of(rounds=400)
    async with network(tmp_path, NAMES, remote_workers=2) as up, joined(up, HOSTS[0]), process(up, HOSTS[1]) as worker:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 30)
        os.kill(worker.pid, signal.SIGSTOP)
        await until_connected(up, HOSTS[1], connected=False)
        os.kill(worker.pid, signal.SIGCONT)
        outcome = await running
    assert outcome.state == "finished", outcome.detail
    capture = open_capture(outcome.capture_location or "")
    said_again(capture)
    assert capture.metadata["detection_count"] == 0
    require_named(capture, 400)


@pytest.mark.slow
@pytest.mark.parametrize("steps", STEPS, ids=["before", "after"])
async def test_a_worker_that_is_killed_at_any_step_loses_nothing_that_is_not_named(
    tmp_path: Path, steps: Sequence[str]
) -> None:
    """In one run a worker dies at each step in turn, and another one joins from the same host."""
    deaths, stop, spec = list[str](), asyncio.Event(), spec_of(rounds=1_000_000)

    async def die_at_each_step(up: Network) -> None:
        for step in steps:
            command = [sys.executable, "-m", "tests.services.dying_worker", step, up.eavesdropper, HOSTS[1]]
            pipe = asyncio.subprocess.PIPE
            worker = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=asyncio.subprocess.DEVNULL)
            if step in ("flush", "flushed"):
                await until_connected(up, HOSTS[1])
                await read(up)
            if step == steps[-1]:
                await until_connected(up, HOSTS[1])
                stop.set()
            if await worker.wait() == -signal.SIGKILL:
                deaths.append(step)
            await until_connected(up, HOSTS[1], connected=False)

    async def read(up: Network) -> None:
        """Read the capture, which flushes what workers have in memory."""
        assert up.eavesdropping is not None
        (session,) = up.eavesdropping._captures.sessions.values()
        await session.writer.flush_fully()

    async with network(tmp_path, NAMES, remote_workers=2) as up, joined(up, HOSTS[0]):
        dying = asyncio.ensure_future(die_at_each_step(up))
        await until_connected(up, HOSTS[1])
        outcome = await up.run(spec, made_up(spec), stop)
        await dying
    assert outcome.state == "stopped", outcome.detail
    assert deaths == list(steps)
    capture = open_capture(outcome.capture_location or "")
    said_again(capture)
    assert capture.metadata["detection_count"] == 0
    require_named(capture, min(max(rounds) for rounds in heard(capture)))


async def test_a_capture_is_resumed_with_the_hosts_of_its_relays(tmp_path: Path) -> None:
    """The eavesdropper dies; its workers join the next one, which deals each edge to the host that learners know."""
    spec = spec_of(rounds=400)
    async with network(tmp_path, NAMES, remote_workers=2) as up, AsyncExitStack() as stack:
        for host in HOSTS:
            await stack.enter_async_context(joined(up, host))
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 30)
        old = up.eavesdropping
        assert old is not None and old.server is not None
        (session,) = old._captures.sessions.values()
        addresses = [each["address"] for each in session.writer.routes]
        session.writer.is_open, session.is_closed = False, True
        await session.writer_tasks.end()
        await old.server.server.stop(None)
        up.eavesdropping = Eavesdropper(replace(old.config, listen=up.eavesdropper))
        assert await up.eavesdropping.start() == up.eavesdropper
        outcome = await running
        await old.stop()
    capture = open_capture(outcome.capture_location or "")
    assert outcome.state == "finished", outcome.detail
    said_again(capture)
    assert [each["address"] for each in capture.metadata["routes"]] == addresses
    assert capture.metadata["detection_count"] == 0
    assert capture.count_messages()[0] == capture.metadata["messages"]


async def test_edges_are_dealt_to_those_who_have_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "_JOIN_TIMEOUT_S", 0.2)
    spec = spec_of(rounds=5)
    async with network(tmp_path, NAMES, remote_workers=3) as up:
        with pytest.raises(Unavailable, match=r"3 workers on other hosts .* none has joined"):
            await up.run(spec, made_up(spec))
        async with joined(up, HOSTS[0]):
            outcome = await up.run(spec, made_up(spec))
            assert outcome.state == "finished" and hosts_of(outcome.capture_location or "") == {HOSTS[0]}
            async with joined(up, HOSTS[1]):
                outcome = await up.run(spec, made_up(spec))
                assert outcome.state == "finished" and hosts_of(outcome.capture_location or "") == set(HOSTS)
        async with joined(up, HOSTS[1]):
            outcome = await up.run(spec, made_up(spec))
            assert outcome.state == "finished" and hosts_of(outcome.capture_location or "") == {HOSTS[1]}


async def test_learners_are_sent_to_the_host_of_each_worker(tmp_path: Path) -> None:
    """And not to that of the eavesdropper, which has a name of its own for learners."""
    eavesdropper = Eavesdropper(EavesdropperConfig(folder=tmp_path, advertise_host="main.example", remote_workers=2))
    await eavesdropper.start()
    assert eavesdropper.server is not None
    up = Network(tmp_path, "", eavesdropper.server.address, None)
    up.eavesdropping = eavesdropper
    hosts = ("first.example", "second.example")
    try:
        async with joined(up, hosts[0]), joined(up, hosts[1]), open_channel(up.eavesdropper) as to:
            routes = [eavesdropper_pb2.Route(caller=0, callee=k, target="127.0.0.1:1") for k in (1, 2)]
            request = eavesdropper_pb2.OpenCaptureRequest(run_id="run-1", spec="{}", routes=routes)
            opened = await eavesdropper_pb2_grpc.EavesdropperStub(to).OpenCapture(request, timeout=PATIENCE_S)
    finally:
        await eavesdropper.stop()
    assert opened.mirror_address.startswith("main.example:")
    assert {each.rpartition(":")[0] for each in opened.relay_addresses} == set(hosts)


@pytest.mark.parametrize(
    ("options", "required"),
    [
        (["--workers", "2", "--remote-workers", "2"], "exclude each other, got 2 and 2"),
        (["--join", "127.0.0.1:7500", "--workers", "2"], "leave out --workers"),
        (["--join", "127.0.0.1:7500", "--remote-workers", "2"], "leave out --workers"),
    ],
)
def test_options_of_workers_that_contradict_are_refused(options: list[str], required: str) -> None:
    result = CliRunner().invoke(app, ["eavesdropper", "--listen", "127.0.0.1:0", *options])
    assert isinstance(result.exception, SpecError) and required in str(result.exception)


# ---- who may join ----------------------------------------------------------------------------------------------------


async def say_hello(up: Network, credentials: Credentials | None, **hello: Any) -> grpc.aio.AioRpcError:
    """The status with which a worker is refused; without a hello, before it sends one.

    A write to a call that is refused meanwhile may fail inside gRPC, which then loses the status.
    """
    async with open_channel(up.eavesdropper, Role.EAVESDROPPER, credentials=credentials or Credentials()) as to:
        call: Any = eavesdropper_pb2_grpc.EavesdropperStub(to).Work(timeout=PATIENCE_S)
        if hello:
            await call.write(eavesdropper_pb2.WorkRequest(hello=eavesdropper_pb2.WorkerHello(**hello)))
        return await refused(call)


async def test_a_worker_more_than_wanted_is_refused(tmp_path: Path) -> None:
    async with network(tmp_path, NAMES, remote_workers=1) as up, joined(up, "first.example"):
        failure = await say_hello(up, None, host="second.example")
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "all 1 workers of this eavesdropper" in (failure.details() or "")
    assert "second.example" in (failure.details() or "")


async def test_an_eavesdropper_without_remote_workers_takes_none(tmp_path: Path) -> None:
    async with network(tmp_path, NAMES) as up:
        assert (await say_hello(up, None, host="first.example")).code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("principal", ["eavesdropper/other", "learner/ann", "coordinator/main", "operator/ada"])
async def test_a_worker_has_the_identity_of_its_eavesdropper(tmp_path: Path, principal: str) -> None:
    ids = Identities(tmp_path / "ids")
    async with network(tmp_path, NAMES, identities=ids, remote_workers=1) as up:
        credentials = Credentials(ids.at(principal))
        assert (await say_hello(up, credentials)).code() is grpc.StatusCode.PERMISSION_DENIED
        assert up.eavesdropping is not None
        assert up.eavesdropping._captures.pool.workers[0].stream is None


@pytest.mark.parametrize(
    ("listen", "host", "eavesdropper", "required"),
    [
        ("0.0.0.0:0", None, "127.0.0.1:7500", "--join needs --advertise-host"),
        ("[::]:0", None, "127.0.0.1:7500", "--join needs --advertise-host"),
        ("127.0.0.1:0", None, "nowhere", "--join must be HOST:PORT"),
        ("127.0.0.1:0", None, "10.1.2.3:7500", "identity"),
    ],
)
async def test_what_a_worker_cannot_be_started_with(
    listen: str, host: str | None, eavesdropper: str, required: str
) -> None:
    with pytest.raises(SpecError, match=required):
        await join(EavesdropperConfig(listen, advertise_host=host), eavesdropper)
