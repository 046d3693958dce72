#!/usr/bin/env python3
"""Floor of ring.py: the least work with which grpc.aio runs a ring of learners in synchronous rounds.

In every round each learner sends its vector to both neighbours, waits for their vectors of that round, and moves halfway to their
mean. One stream per edge, opened by the lower index, carries the round as eight bytes, and raw float64: no coordinator, no
protobuf, no noise, no log, no learning. With --arithmetic each learner also does the minimum that every private learner must
do: a row of Laplace noise, a gradient, its message in one of two slots of a file. Prints a JSON line: rounds/s,
microseconds of CPU time per message, and seconds until the first round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import struct
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import grpc
import numpy as np
from numpy.typing import NDArray

BEGAN = time.monotonic()
ROUND = struct.Struct("<Q")
UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
OVERRIDE, HOST = "grpc.ssl_target_name_override", "learner.bench"
OPTIONS = (*UNLIMITED, ("grpc.use_local_subchannel_pool", 1), ("grpc.so_reuseport", 0))
SPARSE_FROM = 1_000
"""Number of parameters from which the exact statistics of the squared loss (a square matrix) cost more than the exchange."""
STEP = 1e-9
"""Scale of noise and gradient: values stay near the mean of all, at the same cost as any other values."""


@dataclass(frozen=True, slots=True)
class Window:
    """Time of the measured rounds: begin and end (seconds, monotonic), and CPU seconds."""

    began: float
    ended: float
    cpu_s: float


class Arithmetic:
    """Minimum work of every private learner: noise, gradient, write-ahead log.

    The gradient is that of the squared loss from its statistics, a product of (dim, dim) and (dim,); from `SPARSE_FROM`
    parameters on that of one record. The log has two slots in a temporary file of the process; nothing is synced.
    """

    def __init__(self, dim: int) -> None:
        self._noise = np.random.Generator(np.random.SFC64(1))
        self._moments = np.eye(dim) if dim < SPARSE_FROM else None
        self._record = np.full(dim, dim**-0.5)
        self._log_file = tempfile.TemporaryFile()  # noqa: SIM115 - open until the process ends

    def add_noise(self, value: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the values plus noise."""
        return value + self._noise.laplace(scale=STEP, size=len(value))

    def write_log(self, t: int, message: bytes) -> None:
        """Write a message to its slot before it is sent. Slots are whole pages, so that they do not overlap."""
        os.pwrite(self._log_file.fileno(), message, t % 2 * (len(message) // 4096 + 1) * 4096)

    def take_step(self, mean: NDArray[np.float64], value: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean after a step along the gradient at a value."""
        if self._moments is None:
            return mean - STEP * (self._record @ value) * self._record
        return mean - STEP * (self._moments @ value)


class Learner:
    """Learner with a server for the edge from the lower index, and a stream to the neighbour of higher index."""

    def __init__(self, index: int, options: argparse.Namespace) -> None:
        self.index, self._identity = index, options.identity
        self.neighbours = neighbours(index, options.learners)
        self._value = np.full(options.dim, float(index))
        self._arithmetic = Arithmetic(options.dim) if options.arithmetic else None
        self._received: defaultdict[int, list[bytes]] = defaultdict(list)
        self._awaited_round, self._complete = -1, asyncio.Event()
        self._streams: list[Any] = []
        self._all_linked = asyncio.Event()
        self._resources: list[Any] = []
        """Server, channels and tasks, referenced until the learner ends."""

    async def serve(self) -> str:
        """Start the server on a free port; return the address."""
        server = grpc.aio.server(options=OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(self._answer)  # no serialiser: bytes are sent as they are
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ring", {"exchange": handler}),))
        if self._identity is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            key, chain, authorities = _read_pems(self._identity)
            mutual = grpc.ssl_server_credentials([(key, chain)], authorities, require_client_auth=True)
            port = server.add_secure_port("127.0.0.1:0", mutual)
        await server.start()
        self._resources.append(server)
        return f"127.0.0.1:{port}"

    async def connect(self, addresses: Sequence[str]) -> None:
        """Open the streams to neighbours of higher index, and wait for those from lower indices."""
        for neighbour in self.neighbours:
            if neighbour > self.index:
                channel = self._channel(addresses[neighbour])
                call = channel.stream_stream("/ring/exchange")()
                await call.wait_for_connection()
                self._resources += [channel, asyncio.ensure_future(self._receive(call))]
                self._link(call)
        await self._all_linked.wait()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if self._identity is None:
            return grpc.aio.insecure_channel(address, options=OPTIONS)
        key, chain, authorities = _read_pems(self._identity)
        return grpc.aio.secure_channel(
            address, grpc.ssl_channel_credentials(authorities, key, chain), [*OPTIONS, (OVERRIDE, HOST)]
        )

    async def run(self, first: int, rounds: int) -> None:
        """Run `rounds` rounds, beginning with round `first`."""
        sent: Sequence[asyncio.Future[Any]] = ()
        for t in range(first, first + rounds):
            message = ROUND.pack(t) + self._next_value().tobytes()
            if self._arithmetic is not None:
                self._arithmetic.write_log(t, message)
            for write in sent:  # a stream accepts one message at a time; those of the last round were sent long ago
                await write
            sent = [asyncio.ensure_future(stream.write(message)) for stream in self._streams]
            mean = 0.5 * (self._value + _mean(await self._wait_for_messages(t)))
            self._value = mean if self._arithmetic is None else self._arithmetic.take_step(mean, self._value)
        for write in sent:
            await write

    def _next_value(self) -> NDArray[np.float64]:
        return self._value if self._arithmetic is None else self._arithmetic.add_noise(self._value)

    async def _answer(self, _: Any, context: Any) -> None:
        await context.send_initial_metadata(())  # at once: otherwise it is sent with the first message
        self._link(context)
        await self._receive(context)

    async def _receive(self, stream: Any) -> None:
        while (message := await stream.read()) is not grpc.aio.EOF:
            t = ROUND.unpack_from(message)[0]
            self._received[t].append(message)
            if t == self._awaited_round and len(self._received[t]) == len(self.neighbours):
                self._complete.set()

    def _link(self, stream: Any) -> None:
        self._streams.append(stream)
        if len(self._streams) == len(self.neighbours):
            self._all_linked.set()

    async def _wait_for_messages(self, t: int) -> list[bytes]:
        """Wait for the messages of all neighbours of round t, and return them."""
        self._awaited_round = t
        if len(self._received[t]) < len(self.neighbours):
            self._complete.clear()
            await self._complete.wait()
        return self._received.pop(t)


def neighbours(index: int, learners: int) -> list[int]:
    """Return the indices of the neighbours of a learner on the ring."""
    return sorted({(index - 1) % learners, (index + 1) % learners} - {index})


def _read_pems(folder: Path) -> tuple[bytes, bytes, bytes]:
    """Read key, certificate and authorities from a folder."""
    key, chain, authorities = ((folder / name).read_bytes() for name in ("tls.key", "tls.crt", "ca.crt"))
    return key, chain, authorities


def _mean(messages: Sequence[bytes]) -> NDArray[np.float64]:
    total = np.frombuffer(messages[0], offset=ROUND.size).copy()
    for message in messages[1:]:
        total += np.frombuffer(message, offset=ROUND.size)
    total /= len(messages)
    return total


async def measure(learners: Sequence[Learner], warmup: int, rounds: int) -> Window:
    """Run the measured rounds of the learners of this process."""
    cpu, began = time.process_time(), time.monotonic()
    await asyncio.gather(*(learner.run(warmup, rounds) for learner in learners))
    return Window(began, time.monotonic(), time.process_time() - cpu)


async def run_in_one_process(options: argparse.Namespace) -> tuple[float, list[Window]]:
    """Run all learners in this process; return seconds to the first round, and the window."""
    learners = [Learner(i, options) for i in range(options.learners)]
    addresses = [await learner.serve() for learner in learners]
    await asyncio.gather(*(learner.connect(addresses) for learner in learners))
    await asyncio.gather(*(learner.run(0, options.warmup) for learner in learners))
    return time.monotonic() - BEGAN, [await measure(learners, options.warmup, options.rounds)]


def run_in_processes(options: argparse.Namespace) -> tuple[float, list[Window]]:
    """Run a process for each learner; return seconds to the first round, and the window of each."""
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    pipes = [context.Pipe() for _ in range(options.learners)]
    for i, (_, child_end) in enumerate(pipes):
        context.Process(target=run_worker, args=(i, options, child_end), daemon=True).start()
    ends = [parent_end for parent_end, _ in pipes]
    addresses = [end.recv() for end in ends]
    _send_to_all(ends, addresses)
    for end in ends:
        end.recv()
    startup_s = time.monotonic() - BEGAN
    _send_to_all(ends, "go")
    windows = [end.recv() for end in ends]
    _send_to_all(ends, "bye")
    return startup_s, windows


def _send_to_all(ends: Sequence[Connection], value: object) -> None:
    for end in ends:
        end.send(value)


def run_worker(index: int, options: argparse.Namespace, pipe: Connection) -> None:
    """Run one learner in its own process. Over the pipe: send address, get addresses; send ready, get go; send window."""

    async def run() -> None:
        learner = Learner(index, options)
        pipe.send(await learner.serve())
        await learner.connect(await asyncio.to_thread(pipe.recv))
        await learner.run(0, options.warmup)
        pipe.send(True)
        await asyncio.to_thread(pipe.recv)
        pipe.send(await measure([learner], options.warmup, options.rounds))
        await asyncio.to_thread(pipe.recv)  # streams stay open for slower learners
        os._exit(0)  # an orderly shutdown is not measured

    with asyncio.Runner(loop_factory=get_loop_factory(options.loop)) as runner:
        runner.run(run())


def get_loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return the factory of an event loop."""
    if name == "asyncio":
        return asyncio.new_event_loop
    from uvloop import new_event_loop

    return new_event_loop


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"--learners": 5, "--dim": 117, "--rounds": 2000, "--warmup": 50}.items():
        parser.add_argument(name, type=int, default=default, help="default: %(default)s")
    parser.add_argument(
        "--identity", type=Path, help="folder with tls.crt, tls.key, ca.crt, of learner.bench: mutual TLS"
    )
    parser.add_argument("--arithmetic", action="store_true", help="also noise, a gradient and a log")
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio", help="default: %(default)s")
    layout = parser.add_mutually_exclusive_group()
    layout.add_argument("--single", action="store_true", help="all learners in one process (default)")
    layout.add_argument("--processes", action="store_true", help="a process for each learner")
    options = parser.parse_args()
    if options.processes:
        startup_s, windows = run_in_processes(options)
    else:
        with asyncio.Runner(loop_factory=get_loop_factory(options.loop)) as runner:
            startup_s, windows = runner.run(run_in_one_process(options))
    seconds = max(w.ended for w in windows) - min(w.began for w in windows)
    messages = sum(len(neighbours(i, options.learners)) for i in range(options.learners)) * options.rounds
    facts = {
        "rounds_per_s": options.rounds / seconds,
        "cpu_us_per_msg": 1e6 * sum(w.cpu_s for w in windows) / messages,
        "startup_s": startup_s,
    }
    print(json.dumps(facts), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
