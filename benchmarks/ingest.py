#!/usr/bin/env python3
"""How fast a learner takes live records in, and how soon it answers while it learns.

Ingest: records of d = 117 into one learner of two, over loopback, with receipts that outlive the learner's process; beside a bare
gRPC stream of the same messages, whose server answers every sixteenth and does nothing else. They take turns, each server in a
process of its own. Predict: one record a call, so many calls a second, while rounds go on; and a stream of records, as fast as
it is answered. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from machine import write_json
from rich.console import Console
from rich.table import Table

from sottovoce_client.live.connect import connect_learner
from sottovoce_client.live.learner import ConnectedLearner
from sottovoce_client.runs.local_services import LocalServices
from sottovoce_client.runs.run_client import run_on_services
from sottovoce_core.experiment import prepare
from sottovoce_core.spec import parse_spec
from sottovoce_rpc.codec import to_tensor
from sottovoce_wire.v1 import learner_pb2

DIM, EVERY, METHOD = 117, 16, "/bare.Bare/Stream"
RATES = (0, 1, 10, 100, 1_000, 10_000)
TARGETS = {"records/s": "50,000", "of the floor": "0.5", "predict p99, ms": "10"}


def spec_of(period_s: float) -> Any:
    """Two learners whose rounds take whatever is there."""
    document = {
        "rounds": 1_000_000,
        "learners": ["one", "two"],
        "algorithm": {"name": "ldp-dol", "sigma": 1.0},
        "loss": "least_squares",
        "data": {"source": "live", "features": DIM - 1, "batch_size": 100_000},
        "clock": {"mode": "paced", "period_s": period_s},
        "telemetry": {"predict": True},
        "durability": "process",
    }
    return parse_spec(document, allow_imports=False)


@asynccontextmanager
async def learner(period_s: float) -> AsyncIterator[tuple[ConnectedLearner, LocalServices]]:
    """The first learner of a run, in a process of its own."""
    spec, stop = spec_of(period_s), asyncio.Event()
    with tempfile.TemporaryDirectory() as folder:
        async with LocalServices(spec, Path(folder)) as services:
            data = prepare(spec, live=True).data
            running = asyncio.ensure_future(run_on_services(services.coordinator, spec, data, lambda *_: None, stop))
            try:
                async with connect_learner(services.learner_addresses["one"], source="bench") as one:
                    yield one, services
            finally:
                stop.set()
                await running


async def ingest(batch: int, seconds: float, in_flight: int) -> tuple[float, float]:
    """Records/s, and MiB by which the learner's process grew in the second half."""
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(batch, DIM - 1)) / DIM, rng.uniform(-1, 1, batch)
    async with learner(0.1) as (one, services):
        process = next(p for p in services._processes if "one" in p.addresses)
        memory = psutil.Process(process.child.pid).memory_info
        sent, sizes, began = 0, [], time.monotonic()
        while time.monotonic() - began < seconds:
            await asyncio.gather(*(one.feed(features, labels) for _ in range(in_flight)))
            sent += in_flight * batch
            sizes.append(memory().rss / 2**20)
        return sent / (time.monotonic() - began), sizes[-1] - sizes[len(sizes) // 2]


@dataclass(frozen=True, slots=True)
class Paced:
    """What a learner uses that is fed at a rate, ten rounds a second.

    Attributes:
        rate, taken: records/s that are due, and that were acknowledged.
        cpu: CPU seconds a second.
        rss_mb: resident memory at the end.
        written: bytes a second that it wrote to its log.
    """

    rate: int
    taken: float
    cpu: float
    rss_mb: float
    written: float


async def paced(rate: int, seconds: float) -> Paced:
    """Feed so many records a second, in at most a hundred calls a second."""
    rng, batch = np.random.default_rng(0), max(1, rate // 100)
    features, labels = rng.normal(size=(batch, DIM - 1)) / DIM, rng.uniform(-1, 1, batch)
    async with learner(0.1) as (one, services):
        own = psutil.Process(next(p for p in services._processes if "one" in p.addresses).child.pid)
        await one.feed(features, labels)
        await asyncio.sleep(1.0)  # what starts once has started
        before, began, calls = own.as_dict(["cpu_times", "io_counters"]), time.monotonic(), []
        for k in range(int(rate * seconds / batch)):
            await asyncio.sleep(max(0.0, began + k * batch / rate - time.monotonic()))
            calls.append(asyncio.ensure_future(one.feed(features, labels)))
        await asyncio.gather(*calls)
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
        took, after = time.monotonic() - began, own.as_dict(["cpu_times", "io_counters", "memory_info"])
    cpu = sum(after["cpu_times"][:2]) - sum(before["cpu_times"][:2])
    written = after["io_counters"].write_chars - before["io_counters"].write_chars
    return Paced(rate, len(calls) * batch / took, cpu / took, after["memory_info"].rss / 2**20, written / took)


async def predict(rate: int, seconds: float) -> list[float]:
    """Milliseconds from when each call was due to its answer."""
    record, took = np.zeros((1, DIM - 1)), list[float]()

    async def one_call(due: float) -> None:
        await one.predict(record)
        took.append(1e3 * (time.monotonic() - due))

    async with learner(0.01) as (one, _):
        await one.feed(np.zeros((1_000, DIM - 1)), np.zeros(1_000))
        began, calls = time.monotonic(), []
        for k in range(int(rate * seconds)):
            due = began + k / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            calls.append(asyncio.ensure_future(one_call(due)))
        await asyncio.gather(*calls)
    return took


async def predictions(seconds: float) -> float:
    """Records/s of a stream, one by one."""
    record, began = np.zeros(DIM - 1), time.monotonic()

    async def coming() -> AsyncIterator[Any]:
        while time.monotonic() - began < seconds:
            yield record

    async with learner(0.01) as (one, _):
        began, answered = time.monotonic(), 0
        async for _ in one.predict_each(coming()):
            answered += 1
        return answered / (time.monotonic() - began)


# ---- the floor -------------------------------------------------------------------------------------------------------


def bare_server(told: Connection) -> None:
    """Takes messages, and answers every sixteenth."""

    async def stream(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[bytes]:
        count = 0
        async for _ in requests:
            count += 1
            if count % EVERY == 0:
                yield count.to_bytes(8, "little")

    async def serve() -> None:
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        handlers = {"Stream": grpc.stream_stream_rpc_method_handler(stream)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Bare", handlers),))
        told.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    asyncio.run(serve())


async def floor(batch: int, seconds: float) -> float:
    """Records/s of a bare stream, at most 32 batches ahead of the answers."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=bare_server, args=(theirs,), daemon=True)
    process.start()
    rows = np.zeros((batch, DIM))
    message = learner_pb2.SampleBatch(
        source="bench", features=to_tensor(rows), labels=to_tensor(rows[:, 0]), positions=range(batch)
    )
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ours.recv()}") as to:
            call: Any = to.stream_stream(METHOD, request_serializer=learner_pb2.SampleBatch.SerializeToString)()
            sent = done = 0
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                await call.write(message)
                sent += 1
                while sent - done >= 2 * EVERY:
                    done = int.from_bytes(await call.read(), "little")
            return sent * batch / (time.monotonic() - began)
    finally:
        process.kill()
        process.join()


# ---- all of it -------------------------------------------------------------------------------------------------------


def measured(batch: int, seconds: float, in_flight: int) -> tuple[float, float, float]:
    """Records/s and growth of ours, and records/s of the floor, in turn."""
    return *asyncio.run(ingest(batch, seconds, in_flight)), asyncio.run(floor(batch, seconds))


def at_rates(rates: Sequence[int], seconds: float, file: Path | None) -> None:
    """Measure and print a line for each rate."""
    table, found = Table("records/s due", "taken", "CPU, s a second", "memory, MB", "written, kB/s"), list[Paced]()
    for rate in rates:
        each = asyncio.run(paced(rate, seconds))
        found.append(each)
        numbers = (f"{each.taken:,.1f}", f"{each.cpu:.3f}", f"{each.rss_mb:.0f}", f"{each.written / 1e3:,.1f}")
        table.add_row(f"{rate:,}", *numbers)
    Console(width=100).print(table)
    if file is not None:
        write_json(file, {"seconds": seconds, "rates": [asdict(each) for each in found]})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rate", type=int, default=500, help="Predict calls a second.")
    parser.add_argument("--rates", type=int, nargs="*", help="Only what a learner uses at these rates of records/s.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write what --rates found to a file.")
    given = parser.parse_args()
    if given.rates is not None:
        at_rates(given.rates or RATES, given.seconds, given.json)
        return
    table = Table("records in a batch", "records/s", "floor", "ratio", "growth, MiB")
    for batch, in_flight in ((1_024, 8), (256, 16), (16, 64), (1, 256)):
        found = [measured(batch, given.seconds, in_flight) for _ in range(given.repeats)]
        ours, grown, bare = (statistics.median(each) for each in zip(*found, strict=True))
        ratio = statistics.median(own / least for own, _, least in found)
        table.add_row(f"{batch:,}", f"{ours:,.0f}", f"{bare:,.0f}", f"{ratio:.2f}", f"{grown:+.1f}")
    console = Console(width=100)
    console.print(table)
    took = asyncio.run(predict(given.rate, given.seconds))
    p50, p99 = np.percentile(took, [50, 99])
    console.print(
        f"predict, {given.rate} calls/s, 100 rounds/s: p50 {p50:.2f} ms, p99 {p99:.2f} ms, most {max(took):.2f} ms"
    )
    console.print(f"predictions of a stream: {asyncio.run(predictions(given.seconds)):,.0f} records/s")
    console.print("targets: " + ", ".join(f"{name} {value}" for name, value in TARGETS.items()))


if __name__ == "__main__":
    main()
