#!/usr/bin/env python3
"""Benchmark of the rate at which learners read messages from one NATS server, each its own subject.

The server runs on this machine, with JetStream on disk. A process publishes; its start is included in the time. This process runs
the feeders of all learners. By default learners are real, in their own processes, and receive records of three fields; with
`--bare` there are no learners: feeders read and acknowledge. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import nats
from rich.console import Console
from rich.table import Table

from sottovoce_client.feeding.broker import open_source
from sottovoce_client.feeding.feeder import FeedOptions, FeedTarget, feed
from sottovoce_client.feeding.nats import NATS
from sottovoce_client.feeding.progress import FeedCounters
from sottovoce_client.runs.local_services import LocalServices
from sottovoce_client.runs.run_client import run_on_services
from sottovoce_core.experiment import prepare
from sottovoce_core.spec import parse_spec

RECORD = json.dumps({"age": 61, "ward": "icu", "outcome": "home"}).encode()
SCHEMA = {
    "features": {
        "age": {"type": "number", "bounds": [0, 120]},
        "ward": {"type": "category", "categories": ["icu", "surgery"]},
    },
    "label": {"name": "outcome", "type": "category", "categories": ["home", "died"]},
}
GOAL = 5_000
MAX_PROCESSES = 5


def publish(address: str, learners: int, messages: int) -> None:
    """Publish messages to each learner in turn, as fast as the server accepts them."""

    async def publish_all() -> None:
        connection = await nats.connect(address)
        js = connection.jetstream(publish_async_max_pending=1_000)
        for k in range(messages):
            await js.publish_async(f"wards.{k % learners}", RECORD)
        await js.publish_async_completed()
        await connection.close()

    asyncio.run(publish_all())


def start_publisher(address: str, learners: int, messages: int) -> multiprocessing.process.BaseProcess:
    """Start a process that publishes the messages."""
    process = multiprocessing.get_context("spawn").Process(target=publish, args=(address, learners, messages))
    process.start()
    return process


async def read_without_learners(address: str, learners: int, messages: int) -> None:
    """Run feeders without learners until each has read its messages."""

    async def read_part(part: Any) -> None:
        left = messages // learners
        async for each in part.read(-1):
            await part.keep(each[-1].position)
            left -= len(each)
            if left <= 0:
                return

    async with AsyncExitStack() as stack:
        urls = [f"nats://{address}/wards?subject=wards.{k}&group=bench-{k}" for k in range(learners)]
        parts = [(await stack.enter_async_context(open_source(NATS.parse_url(url))))[0] for url in urls]
        await asyncio.gather(*map(read_part, parts))


async def feed_learners(address: str, names: Sequence[str], services: LocalServices, messages: int) -> None:
    """Feed real learners until they have all messages."""
    stop, accounts = asyncio.Event(), [FeedCounters() for _ in names]

    async def feed_one(k: int, name: str) -> None:
        async with open_source(NATS.parse_url(f"nats://{address}/wards?subject=wards.{k}&group={name}")) as parts:
            await feed(parts, FeedTarget(services.learner_addresses[name]), FeedOptions(), accounts[k], stop)

    feeding = [asyncio.ensure_future(feed_one(k, name)) for k, name in enumerate(names)]
    while sum(each.records_fed for each in accounts) < messages:  # noqa: ASYNC110 - counters send no events
        await asyncio.sleep(0.01)
    stop.set()
    await asyncio.gather(*feeding)


async def ignore_error(_: Exception) -> None:
    """Ignore an error while the server starts."""


async def measure_rate(learners: int, messages: int, *, real: bool) -> float:
    """Return messages/s, published and read at the same time."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
        found.close()
        command = ["nats-server", "-js", "-sd", folder, "-a", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: ASYNC220
        address = f"127.0.0.1:{port}"
        try:
            connection = await nats.connect(address, reconnect_time_wait=0.1, error_cb=ignore_error)
            await connection.jetstream().add_stream(name="wards", subjects=["wards.>"])
            await connection.close()
            if not real:
                process, began = start_publisher(address, learners, messages), time.monotonic()
                await read_without_learners(address, learners, messages)
                seconds = time.monotonic() - began
            else:
                process, seconds = await measure_with_learners(address, learners, messages, Path(folder))
            process.join()
            return messages / seconds
        finally:
            server.kill()
            server.wait()


async def measure_with_learners(address: str, learners: int, messages: int, folder: Path) -> tuple[Any, float]:
    """Feed learners of a run; return the publisher, and seconds until learners have all messages."""
    names, stop = [f"ward-{k}" for k in range(learners)], asyncio.Event()
    document = {
        "rounds": 1_000_000,
        "learners": names,
        "algorithm": {"name": "ldp-dol", "sigma": 1.0},
        "data": {"source": "live", "batch_size": 10_000, "schema": SCHEMA},
        "clock": {"mode": "paced", "period_s": 1.0},
    }
    spec = parse_spec(document, allow_imports=False)
    async with LocalServices(spec, folder, learners_per_process=-(-learners // MAX_PROCESSES)) as services:
        data = prepare(spec, live=True).data
        running = asyncio.ensure_future(run_on_services(services.coordinator, spec, data, lambda *_: None, stop))
        process, began = start_publisher(address, learners, messages), time.monotonic()
        try:
            await feed_learners(address, names, services, messages)
            return process, time.monotonic() - began
        finally:
            stop.set()
            await running


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bare", action="store_true", help="Run feeders without learners.")
    given = parser.parse_args()
    assert shutil.which("nats-server"), "nats-server is not installed"
    table = Table("learners", "messages/s", "least", "most")
    for learners in given.learners:
        messages = given.messages // learners * learners
        found = [asyncio.run(measure_rate(learners, messages, real=not given.bare)) for _ in range(given.repeats)]
        table.add_row(str(learners), *(f"{each:,.0f}" for each in (statistics.median(found), min(found), max(found))))
    console = Console(width=100)
    console.print(table)
    console.print(f"goal: {GOAL:,} messages/s into 100 learners; load of this machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
