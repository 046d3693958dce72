#!/usr/bin/env python3
"""Benchmark of a learner's intake of live records, and of its prediction latency while it learns.

Ingest: records of d = 117 into one learner of two, over loopback, with receipts that survive the learner's process. The floor
is a bare gRPC stream of the same messages, whose server only answers every sixteenth. Both run in turn, each server in its own
process. Predict: one record per call, at a fixed rate of calls, while rounds run; and a stream of records, as fast as the
learner answers. Nothing is asserted.
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

DIM, ANSWER_INTERVAL, METHOD = 117, 16, "/bare.Bare/Stream"
RATES = (0, 1, 10, 100, 1_000, 10_000)
TARGETS = {"records/s": "50,000", "of the floor": "0.5", "predict p99, ms": "10"}


def build_spec(period_s: float) -> Any:
    """Build the spec of two learners whose rounds take all records that have arrived."""
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
async def start_learner(period_s: float) -> AsyncIterator[tuple[ConnectedLearner, LocalServices]]:
    """Start a run, and connect to its first learner, which has its own process."""
    spec, stop = build_spec(period_s), asyncio.Event()
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


async def measure_ingest(batch: int, seconds: float, in_flight: int) -> tuple[float, float]:
    """Return records/s, and the growth of the learner's process in the second half, in MiB."""
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(batch, DIM - 1)) / DIM, rng.uniform(-1, 1, batch)
    async with start_learner(0.1) as (one, services):
        process = next(p for p in services._processes if "one" in p.addresses)
        memory = psutil.Process(process.child.pid).memory_info
        sent, sizes, began = 0, [], time.monotonic()
        while time.monotonic() - began < seconds:
            await asyncio.gather(*(one.feed(features, labels) for _ in range(in_flight)))
            sent += in_flight * batch
            sizes.append(memory().rss / 2**20)
        return sent / (time.monotonic() - began), sizes[-1] - sizes[len(sizes) // 2]


@dataclass(frozen=True, slots=True)
class RateUsage:
    """Usage of a learner that is fed at a rate, with ten rounds a second.

    Attributes:
        rate, taken: records/s that are due, and that were acknowledged.
        cpu: CPU seconds a second.
        rss_mb: resident memory at the end.
        written: bytes a second written to its log.
    """

    rate: int
    taken: float
    cpu: float
    rss_mb: float
    written: float


async def measure_rate(rate: int, seconds: float) -> RateUsage:
    """Feed `rate` records a second, in at most a hundred calls a second, and measure the usage of the learner."""
    rng, batch = np.random.default_rng(0), max(1, rate // 100)
    features, labels = rng.normal(size=(batch, DIM - 1)) / DIM, rng.uniform(-1, 1, batch)
    async with start_learner(0.1) as (one, services):
        own = psutil.Process(next(p for p in services._processes if "one" in p.addresses).child.pid)
        await one.feed(features, labels)
        await asyncio.sleep(1.0)  # the start is not measured
        before, began, calls = own.as_dict(["cpu_times", "io_counters"]), time.monotonic(), []
        for k in range(int(rate * seconds / batch)):
            await asyncio.sleep(max(0.0, began + k * batch / rate - time.monotonic()))
            calls.append(asyncio.ensure_future(one.feed(features, labels)))
        await asyncio.gather(*calls)
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
        took, after = time.monotonic() - began, own.as_dict(["cpu_times", "io_counters", "memory_info"])
    cpu = sum(after["cpu_times"][:2]) - sum(before["cpu_times"][:2])
    written = after["io_counters"].write_chars - before["io_counters"].write_chars
    return RateUsage(rate, len(calls) * batch / took, cpu / took, after["memory_info"].rss / 2**20, written / took)


async def measure_latencies(rate: int, seconds: float) -> list[float]:
    """Return the milliseconds from the due time of each call to its answer."""
    record, took = np.zeros((1, DIM - 1)), list[float]()

    async def call_once(due: float) -> None:
        await one.predict(record)
        took.append(1e3 * (time.monotonic() - due))

    async with start_learner(0.01) as (one, _):
        await one.feed(np.zeros((1_000, DIM - 1)), np.zeros(1_000))
        began, calls = time.monotonic(), []
        for k in range(int(rate * seconds)):
            due = began + k / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            calls.append(asyncio.ensure_future(call_once(due)))
        await asyncio.gather(*calls)
    return took


async def measure_stream(seconds: float) -> float:
    """Return records/s of a stream of predictions, one record per message."""
    record, began = np.zeros(DIM - 1), time.monotonic()

    async def generate_records() -> AsyncIterator[Any]:
        while time.monotonic() - began < seconds:
            yield record

    async with start_learner(0.01) as (one, _):
        began, answered = time.monotonic(), 0
        async for _ in one.predict_each(generate_records()):
            answered += 1
        return answered / (time.monotonic() - began)


# ---- the floor -------------------------------------------------------------------------------------------------------


def run_bare_server(pipe: Connection) -> None:
    """Serve a stream that answers every sixteenth message; send the port over the pipe."""

    async def stream(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[bytes]:
        count = 0
        async for _ in requests:
            count += 1
            if count % ANSWER_INTERVAL == 0:
                yield count.to_bytes(8, "little")

    async def serve() -> None:
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        handlers = {"Stream": grpc.stream_stream_rpc_method_handler(stream)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Bare", handlers),))
        pipe.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    asyncio.run(serve())


async def measure_floor(batch: int, seconds: float) -> float:
    """Return records/s of a bare stream, at most 32 batches ahead of the answers."""
    parent_end, child_end = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=run_bare_server, args=(child_end,), daemon=True)
    process.start()
    rows = np.zeros((batch, DIM))
    message = learner_pb2.SampleBatch(
        source="bench", features=to_tensor(rows), labels=to_tensor(rows[:, 0]), positions=range(batch)
    )
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{parent_end.recv()}") as to:
            call: Any = to.stream_stream(METHOD, request_serializer=learner_pb2.SampleBatch.SerializeToString)()
            sent = done = 0
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                await call.write(message)
                sent += 1
                while sent - done >= 2 * ANSWER_INTERVAL:
                    done = int.from_bytes(await call.read(), "little")
            return sent * batch / (time.monotonic() - began)
    finally:
        process.kill()
        process.join()


# ---- the command -----------------------------------------------------------------------------------------------------


def measure_both(batch: int, seconds: float, in_flight: int) -> tuple[float, float, float]:
    """Measure learner and floor in turn; return records/s and growth of the learner, and records/s of the floor."""
    return *asyncio.run(measure_ingest(batch, seconds, in_flight)), asyncio.run(measure_floor(batch, seconds))


def print_rates(rates: Sequence[int], seconds: float, file: Path | None) -> None:
    """Measure the usage at each rate; print a table and write a file."""
    table, found = Table("records/s due", "taken", "CPU, s a second", "memory, MB", "written, kB/s"), list[RateUsage]()
    for rate in rates:
        each = asyncio.run(measure_rate(rate, seconds))
        found.append(each)
        numbers = (f"{each.taken:,.1f}", f"{each.cpu:.3f}", f"{each.rss_mb:.0f}", f"{each.written / 1e3:,.1f}")
        table.add_row(f"{rate:,}", *numbers)
    Console(width=100).print(table)
    if file is not None:
        write_json(file, {"seconds": seconds, "rates": [asdict(each) for each in found]})


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rate", type=int, default=500, help="Predict calls a second.")
    parser.add_argument(
        "--rates", type=int, nargs="*", help="Measure only the usage of a learner at these rates (records/s)."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the results of --rates to a file.")
    given = parser.parse_args()
    if given.rates is not None:
        print_rates(given.rates or RATES, given.seconds, given.json)
        return
    table = Table("records in a batch", "records/s", "floor", "ratio", "growth, MiB")
    for batch, in_flight in ((1_024, 8), (256, 16), (16, 64), (1, 256)):
        found = [measure_both(batch, given.seconds, in_flight) for _ in range(given.repeats)]
        rate, grown, floor = (statistics.median(each) for each in zip(*found, strict=True))
        ratio = statistics.median(own / floor for own, _, floor in found)
        table.add_row(f"{batch:,}", f"{rate:,.0f}", f"{floor:,.0f}", f"{ratio:.2f}", f"{grown:+.1f}")
    console = Console(width=100)
    console.print(table)
    took = asyncio.run(measure_latencies(given.rate, given.seconds))
    p50, p99 = np.percentile(took, [50, 99])
    console.print(
        f"predict, {given.rate} calls/s, 100 rounds/s: p50 {p50:.2f} ms, p99 {p99:.2f} ms, most {max(took):.2f} ms"
    )
    console.print(f"predictions of a stream: {asyncio.run(measure_stream(given.seconds)):,.0f} records/s")
    console.print("targets: " + ", ".join(f"{name} {value}" for name, value in TARGETS.items()))


if __name__ == "__main__":
    main()
