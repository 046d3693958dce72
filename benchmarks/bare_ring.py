#!/usr/bin/env python3
"""The yardstick of ring.py: the least that grpc.aio can do and still be a ring of learners in step.

In every round each learner sends its vector to both neighbours, waits for theirs of that round, and goes half the way to their
mean. One stream per edge, opened by the lower index, carries the round as eight bytes, and raw float64: no coordinator, no
protobuf, no noise, no journal, no learning. With --arithmetic each learner also does what no private one can do without, in its
least form: a row of Laplace noise, a gradient, its message in one of two slots of a file. Prints a JSON line: rounds/s,
microseconds of processor time per message, and seconds until the first round.
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
"""Parameters from which the exact statistics of the squared loss (a square matrix) would outweigh the exchange."""
STEP = 1e-9
"""Of noise and gradient: values stay near the mean of all, which costs what any others would."""


@dataclass(frozen=True, slots=True)
class Window:
    """What the measured rounds took: when they began and ended (seconds, monotonic), and processor time."""

    began: float
    ended: float
    cpu_s: float


class Arithmetic:
    """What no private learner can do without, in its least form: noise, gradient, journal.

    The gradient is that of the squared loss from its statistics, a product of (dim, dim) and (dim,); from `SPARSE_FROM`
    parameters on that of one record. The journal has two slots in a file that is gone with the process; nothing is synced.
    """

    def __init__(self, dim: int) -> None:
        self._noise = np.random.Generator(np.random.SFC64(1))
        self._moments = np.eye(dim) if dim < SPARSE_FROM else None
        self._record = np.full(dim, dim**-0.5)
        self._journal = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as the process lives

    def said(self, value: NDArray[np.float64]) -> NDArray[np.float64]:
        """The values with noise on them."""
        return value + self._noise.laplace(scale=STEP, size=len(value))

    def journal(self, t: int, message: bytes) -> None:
        """Write a message down before it is sent; whole pages, so that no slot touches the other."""
        os.pwrite(self._journal.fileno(), message, t % 2 * (len(message) // 4096 + 1) * 4096)

    def stepped(self, mean: NDArray[np.float64], value: NDArray[np.float64]) -> NDArray[np.float64]:
        """A step from a mean along the gradient at a value."""
        if self._moments is None:
            return mean - STEP * (self._record @ value) * self._record
        return mean - STEP * (self._moments @ value)


class Learner:
    """One learner: a server for the edge from below, and a stream to the neighbour above."""

    def __init__(self, index: int, options: argparse.Namespace) -> None:
        self.index, self._identity = index, options.identity
        self.neighbours = neighbours(index, options.learners)
        self._value = np.full(options.dim, float(index))
        self._arithmetic = Arithmetic(options.dim) if options.arithmetic else None
        self._heard: defaultdict[int, list[bytes]] = defaultdict(list)
        self._awaited, self._complete = -1, asyncio.Event()
        self._streams: list[Any] = []
        self._linked = asyncio.Event()
        self._kept: list[Any] = []
        """Server, channels and tasks, which live as long as the learner."""

    async def serve(self) -> str:
        """Listen on a free port; returns the address."""
        server = grpc.aio.server(options=OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(self._answer)  # no serialiser: bytes are sent as they are
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ring", {"exchange": handler}),))
        if self._identity is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            key, chain, authorities = _pems(self._identity)
            mutual = grpc.ssl_server_credentials([(key, chain)], authorities, require_client_auth=True)
            port = server.add_secure_port("127.0.0.1:0", mutual)
        await server.start()
        self._kept.append(server)
        return f"127.0.0.1:{port}"

    async def connect(self, addresses: Sequence[str]) -> None:
        """Open the streams to neighbours above, and wait for those from below."""
        for neighbour in self.neighbours:
            if neighbour > self.index:
                channel = self._channel(addresses[neighbour])
                call = channel.stream_stream("/ring/exchange")()
                await call.wait_for_connection()
                self._kept += [channel, asyncio.ensure_future(self._listen(call))]
                self._link(call)
        await self._linked.wait()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if self._identity is None:
            return grpc.aio.insecure_channel(address, options=OPTIONS)
        key, chain, authorities = _pems(self._identity)
        return grpc.aio.secure_channel(
            address, grpc.ssl_channel_credentials(authorities, key, chain), [*OPTIONS, (OVERRIDE, HOST)]
        )

    async def run(self, first: int, rounds: int) -> None:
        """So many rounds."""
        sent: Sequence[asyncio.Future[Any]] = ()
        for t in range(first, first + rounds):
            message = ROUND.pack(t) + self._said().tobytes()
            if self._arithmetic is not None:
                self._arithmetic.journal(t, message)
            for write in sent:  # a stream takes one message at a time; last round's have long gone
                await write
            sent = [asyncio.ensure_future(stream.write(message)) for stream in self._streams]
            mean = 0.5 * (self._value + _mean(await self._all_of(t)))
            self._value = mean if self._arithmetic is None else self._arithmetic.stepped(mean, self._value)
        for write in sent:
            await write

    def _said(self) -> NDArray[np.float64]:
        return self._value if self._arithmetic is None else self._arithmetic.said(self._value)

    async def _answer(self, _: Any, context: Any) -> None:
        await context.send_initial_metadata(())  # before any message: it would be sent with the first one otherwise
        self._link(context)
        await self._listen(context)

    async def _listen(self, stream: Any) -> None:
        while (message := await stream.read()) is not grpc.aio.EOF:
            t = ROUND.unpack_from(message)[0]
            self._heard[t].append(message)
            if t == self._awaited and len(self._heard[t]) == len(self.neighbours):
                self._complete.set()

    def _link(self, stream: Any) -> None:
        self._streams.append(stream)
        if len(self._streams) == len(self.neighbours):
            self._linked.set()

    async def _all_of(self, t: int) -> list[bytes]:
        """What all neighbours say in round t, once they have."""
        self._awaited = t
        if len(self._heard[t]) < len(self.neighbours):
            self._complete.clear()
            await self._complete.wait()
        return self._heard.pop(t)


def neighbours(index: int, learners: int) -> list[int]:
    """Of a learner on the ring."""
    return sorted({(index - 1) % learners, (index + 1) % learners} - {index})


def _pems(folder: Path) -> tuple[bytes, bytes, bytes]:
    """Key, certificate and authorities."""
    key, chain, authorities = ((folder / name).read_bytes() for name in ("tls.key", "tls.crt", "ca.crt"))
    return key, chain, authorities


def _mean(messages: Sequence[bytes]) -> NDArray[np.float64]:
    total = np.frombuffer(messages[0], offset=ROUND.size).copy()
    for message in messages[1:]:
        total += np.frombuffer(message, offset=ROUND.size)
    total /= len(messages)
    return total


async def measured(learners: Sequence[Learner], warmup: int, rounds: int) -> Window:
    """Run learners of this process through the measured rounds."""
    cpu, began = time.process_time(), time.monotonic()
    await asyncio.gather(*(learner.run(warmup, rounds) for learner in learners))
    return Window(began, time.monotonic(), time.process_time() - cpu)


async def together(options: argparse.Namespace) -> tuple[float, list[Window]]:
    """All learners in this process: seconds to the first round, and the window."""
    learners = [Learner(i, options) for i in range(options.learners)]
    addresses = [await learner.serve() for learner in learners]
    await asyncio.gather(*(learner.connect(addresses) for learner in learners))
    await asyncio.gather(*(learner.run(0, options.warmup) for learner in learners))
    return time.monotonic() - BEGAN, [await measured(learners, options.warmup, options.rounds)]


def apart(options: argparse.Namespace) -> tuple[float, list[Window]]:
    """A process for each learner: seconds to the first round, and a window of each."""
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    pipes = [context.Pipe() for _ in range(options.learners)]
    for i, (_, theirs) in enumerate(pipes):
        context.Process(target=work, args=(i, options, theirs), daemon=True).start()
    ends = [ours for ours, _ in pipes]
    addresses = [end.recv() for end in ends]
    _tell(ends, addresses)
    for end in ends:
        end.recv()
    up = time.monotonic() - BEGAN
    _tell(ends, "go")
    windows = [end.recv() for end in ends]
    _tell(ends, "bye")
    return up, windows


def _tell(ends: Sequence[Connection], what: object) -> None:
    for end in ends:
        end.send(what)


def work(index: int, options: argparse.Namespace, pipe: Connection) -> None:
    """One learner in a process of its own: address, addresses; ready, go; window."""

    async def run() -> None:
        learner = Learner(index, options)
        pipe.send(await learner.serve())
        await learner.connect(await asyncio.to_thread(pipe.recv))
        await learner.run(0, options.warmup)
        pipe.send(True)
        await asyncio.to_thread(pipe.recv)
        pipe.send(await measured([learner], options.warmup, options.rounds))
        await asyncio.to_thread(pipe.recv)  # streams stay open for whoever is slower
        os._exit(0)  # taking them down politely is no part of it

    with asyncio.Runner(loop_factory=event_loop(options.loop)) as runner:
        runner.run(run())


def event_loop(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """What makes one."""
    if name == "asyncio":
        return asyncio.new_event_loop
    from uvloop import new_event_loop

    return new_event_loop


def main() -> None:
    """Measure, and print what it came to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"--learners": 5, "--dim": 117, "--rounds": 2000, "--warmup": 50}.items():
        parser.add_argument(name, type=int, default=default, help="default: %(default)s")
    parser.add_argument(
        "--identity", type=Path, help="folder with tls.crt, tls.key, ca.crt, of learner.bench: mutual TLS"
    )
    parser.add_argument("--arithmetic", action="store_true", help="noise, a gradient and a journal besides")
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio", help="default: %(default)s")
    layout = parser.add_mutually_exclusive_group()
    layout.add_argument("--single", action="store_true", help="all learners in one process (default)")
    layout.add_argument("--processes", action="store_true", help="a process for each")
    options = parser.parse_args()
    if options.processes:
        up, windows = apart(options)
    else:
        with asyncio.Runner(loop_factory=event_loop(options.loop)) as runner:
            up, windows = runner.run(together(options))
    seconds = max(w.ended for w in windows) - min(w.began for w in windows)
    messages = sum(len(neighbours(i, options.learners)) for i in range(options.learners)) * options.rounds
    facts = {
        "rounds_per_s": options.rounds / seconds,
        "cpu_us_per_msg": 1e6 * sum(w.cpu_s for w in windows) / messages,
        "startup_s": up,
    }
    print(json.dumps(facts), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
