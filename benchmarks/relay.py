"""Limit of an eavesdropper: messages a second that its relays pass on and record, by workers, and its memory meanwhile.

Each edge has a client that writes messages of rounds as fast as its relay takes them, as bytes of HTTP/2, and a server that only
reads: neither learns, so that the eavesdropper is what is measured. The table has a row for each tenth of the messages.

    python benchmarks/relay.py                                        # one edge, no workers
    python benchmarks/relay.py --edges 16 --workers 8                 # with as many cores
    python benchmarks/relay.py --edges 4 --messages 10000000 --dim 8  # is memory flat?
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from hpack import Encoder
from hyperframe.frame import DataFrame, HeadersFrame, SettingsFrame
from machine import machine
from rich.console import Console
from rich.table import Table

from sottovoce_core.algorithms.interface import Message
from sottovoce_core.runs.run import build_run
from sottovoce_core.spec import RunSpec, parse_spec
from sottovoce_rpc.codec import RoundCodec, to_fields
from sottovoce_rpc.server import open_channel
from sottovoce_rpc.specs import spec_to_wire
from sottovoce_wire.v1 import eavesdropper_pb2, learner_pb2
from sottovoce_wire.v1.eavesdropper_pb2_grpc import EavesdropperStub

METHOD = "/sottovoce_wire.v1.Learner/Exchange"
BATCH = 64
"""Messages that a client writes at once."""
CALL_TIMEOUT_S = 60.0


def build_spec(edges: int, rounds: int) -> RunSpec:
    """Build the spec of a ring; the benchmark uses every second edge of it."""
    document = {
        "rounds": rounds,
        "learners": max(2 * edges, 3),
        "topology": {"graph": "ring"},
        "algorithm": {"name": "dsgd"},
        "data": {"source": "live", "features": 3},
        "capture": "relay",
    }
    return parse_spec(document, allow_imports=False)


def discard(listening: socket.socket) -> None:
    """Serve an edge: read until the end."""
    connection, _ = listening.accept()
    connection.sendall(SettingsFrame(0).serialize())
    while connection.recv(1 << 20):
        pass


def write_messages(pipe: Any, caller: int, shapes: dict[str, tuple[int, ...]], rounds: int) -> None:
    """Be both ends of an edge; runs in a process of its own."""
    listening = socket.create_server(("127.0.0.1", 0))
    pipe.send(f"127.0.0.1:{listening.getsockname()[1]}")
    host, _, port = pipe.recv().rpartition(":")
    threading.Thread(target=discard, args=(listening,), daemon=True).start()
    fields = [(":method", "POST"), (":scheme", "http"), (":path", METHOD), (":authority", "x"), ("te", "trailers")]
    fields.append(("content-type", "application/grpc"))
    opened = learner_pb2.Hello(
        learner=caller, next_round=0, run_id="run-1", fields=to_fields(shapes), plan_hash=bytes(32)
    )
    codec = RoundCodec(shapes)
    values = {name: np.zeros(shape) for name, shape in shapes.items()}
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize())
        connection.sendall(HeadersFrame(1, Encoder().encode(fields), flags=["END_HEADERS"]).serialize())
        connection.sendall(frame(learner_pb2.ExchangeMessage(hello=opened).SerializeToString()))
        for begin in range(0, rounds, BATCH):
            last = min(begin + BATCH, rounds)
            connection.sendall(b"".join(frame(codec.encode(t, caller, Message(values))) for t in range(begin, last)))
        pipe.send("written")
        pipe.recv()


def frame(payload: bytes) -> bytes:
    """Return the bytes of a message as gRPC writes it."""
    data = b"\0" + len(payload).to_bytes(4, "big") + payload
    return DataFrame(1, data).serialize()


def measure(edges: int, workers: int, messages: int, dim: int, folder: Path) -> Table:
    """Let clients write, and watch the eavesdropper."""
    command = [sys.executable, "-m", "sottovoce_client", "eavesdropper", "--listen", "127.0.0.1:0"]
    command += ["--folder", str(folder), "--workers", str(workers), "--stop-with-stdin", "--log-level", "warning"]
    table = Table("messages", "messages/s", "us of CPU", "MiB", title=f"{edges} edges, {workers} workers, d = {dim}")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        address = json.loads(process.stdout.readline())["address"]
        asyncio.run(record(address, process.pid, edges, messages // edges, dim, table))
        process.stdin.close()
    return table


async def record(address: str, pid: int, edges: int, rounds: int, dim: int, table: Table) -> None:
    """Record a capture of so many rounds."""
    spec = build_spec(edges, rounds + 1)
    shapes = dict(build_run(spec, dim).field_shapes)
    pipes, clients = [], []
    for edge in range(edges):
        here, there = multiprocessing.Pipe()
        client = multiprocessing.Process(target=write_messages, args=(there, 2 * edge, shapes, rounds), daemon=True)
        client.start()
        pipes.append(here)
        clients.append(client)
    routes = [
        eavesdropper_pb2.Route(caller=2 * k, callee=2 * k + 1, target=each.recv()) for k, each in enumerate(pipes)
    ]
    async with open_channel(address) as channel:
        stub = EavesdropperStub(channel)
        opening = eavesdropper_pb2.OpenCaptureRequest(
            run_id="run-1", spec=spec_to_wire(spec), n_features=dim, routes=routes, fields=to_fields(shapes)
        )
        opened = await stub.OpenCapture(opening, timeout=CALL_TIMEOUT_S)
        for pipe, relay in zip(pipes, opened.relay_addresses, strict=True):
            pipe.send(relay)
        await watch(stub, pid, edges * rounds, table)
        for pipe in pipes:
            pipe.recv()
            pipe.send("end")
        closing = eavesdropper_pb2.CloseCaptureRequest(capture_id=opened.capture_id)
        closed = (await stub.CloseCapture(closing, timeout=CALL_TIMEOUT_S)).capture
    table.caption = f"{closed.messages:,} recorded; {closed.error or 'no error'}"
    for client in clients:
        client.join()


async def watch(stub: EavesdropperStub, pid: int, messages: int, table: Table) -> None:
    """Add a row for each tenth of the messages."""
    known, began, used = 0, time.perf_counter(), measure_process(pid)[0]
    request = eavesdropper_pb2.ListCapturesRequest()
    while known < messages:
        await asyncio.sleep(0.05)
        count = (await stub.ListCaptures(request, timeout=CALL_TIMEOUT_S)).captures[0].messages
        if count == messages or count - known >= messages / 10:
            now, (cpu, memory) = time.perf_counter(), measure_process(pid)
            row = count, (count - known) / (now - began), 1e6 * (cpu - used) / (count - known), memory / 2**20
            table.add_row(f"{row[0]:,}", f"{row[1]:,.0f}", f"{row[2]:.0f}", f"{row[3]:.0f}")
            print(f"{row[0]:,} messages, {row[1]:,.0f} a second, {row[3]:.0f} MiB", file=sys.stderr, flush=True)
            known, began, used = count, now, cpu


def measure_process(pid: int) -> tuple[float, int]:
    """Return processor time and resident bytes of the eavesdropper and its workers."""
    root = psutil.Process(pid)
    family = [root, *root.children(recursive=True)]
    return (
        sum(sum(each.cpu_times()[:2]) for each in family),
        sum(each.memory_info().rss for each in family),
    )


def main() -> None:
    """Measure each number of workers, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", type=int, default=1)
    parser.add_argument("--workers", type=int, nargs="+", default=[0], help="numbers of workers, one after the other")
    parser.add_argument("--messages", type=int, default=200_000, help="of all edges together")
    parser.add_argument("--dim", type=int, default=117, help="numbers in a message")
    parser.add_argument("--folder", type=Path, help="parent folder of captures (default: a temporary one)")
    options = parser.parse_args()
    console = Console()
    for workers in options.workers:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            console.print(measure(options.edges, workers, options.messages, options.dim, Path(folder)))
    console.print_json(data=machine())


if __name__ == "__main__":
    main()
