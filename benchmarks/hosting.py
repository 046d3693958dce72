#!/usr/bin/env python3
"""Benchmark of the cost of many learners in one process, and of their coordinator, by number of learners.

For each number of learners the script starts a coordinator and host processes (`sottovoce learner --host`), runs some rounds and
stops them. Nothing is asserted: the exit code is 1 only if a case could not run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: one core
import grpc
import networkx as nx
import numpy as np
import psutil
import yaml
from machine import write_json
from measure import OPEN, cancel_and_wait
from rich import box
from rich.console import Console
from rich.table import Table

from sottovoce_client.runs.feeder import feed
from sottovoce_coordinator.run_launcher import MAX_LEARNERS_PER_RUN
from sottovoce_coordinator.service import CoordinatorConfig, serve
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.errors import SottovoceError
from sottovoce_core.spec import RunSpec, parse_spec
from sottovoce_rpc.logs import configure_logs
from sottovoce_rpc.server import open_channel
from sottovoce_rpc.specs import spec_to_wire
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc, learner_pb2, learner_pb2_grpc

DIM, WINDOW, DEADLINE_S, CALL_S = 117, 100, 600.0, 600.0
BEAT_S = 0.002
OWN = str(Path(__file__).resolve())
LEARNERS = (5, 50, 200, 1_000)
GRAPHS = ("ring", "regular", "random")
POLICY = {"epsilon_per_run": None, "epsilon_per_month": None, "guarantees": {"threat_model": "output"}}

console = Console() if sys.stdout.isatty() else Console(width=150)


@dataclass(frozen=True, slots=True)
class Case:
    """Case of the benchmark.

    Attributes:
        learners, graph: number of learners, and their communication graph.
        hosts: processes that share them.
        rounds: measured rounds.
        state: the coordinator stores its state.
        capture: kind of capture, `none` for no eavesdropper.
        workers: processes of the eavesdropper that serve its relays; 0: its own.
    """

    learners: int
    graph: str
    hosts: int
    rounds: int
    state: bool
    capture: str = "none"
    workers: int = 0

    @property
    def total_rounds(self) -> int:
        """Rounds of the run: the measured ones and those before."""
        return self.rounds + self.warmup

    @property
    def warmup(self) -> int:
        """Rounds before the measured ones."""
        return max(self.rounds // 4, 10)


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurement of a case.

    Attributes:
        listening_s, joined_s, running_s: seconds from the start until all learners listen, all are in the run, one round is done.
        rounds_per_s: rate of the run.
        host_us, coordinator_us, eavesdropper_us: CPU microseconds per learner-round.
        memory_mb: resident memory of the hosts per learner.
        descriptors: file descriptors of the hosts per learner.
        start_blocked_ms, blocked_ms: longest turn of the coordinator's event loop (CPU time) until the first round, and later.
        load: load of the machine.
    """

    case: Case
    listening_s: float
    joined_s: float
    running_s: float
    rounds_per_s: float
    host_us: float
    coordinator_us: float
    eavesdropper_us: float
    memory_mb: float
    descriptors: float
    start_blocked_ms: float
    blocked_ms: float
    load: float


# ---- the run --------------------------------------------------------------------------------------------


def build_spec(case: Case) -> RunSpec:
    """Build the run spec; on a random sequence of graphs the algorithm is dual averaging, which accepts it."""
    names = build_names(case.learners)
    document: dict[str, Any] = {
        "name": f"hosting-{case.learners}-{case.graph}",
        "rounds": case.total_rounds,
        "learners": names,
        "algorithm": {"name": "ldp-dol"},
        "loss": {"kind": "ridge"},
        "topology": {"graph": "ring"},
        "clock": {"mode": "free", "window": min(WINDOW, 65_536 // case.learners), "deadline_s": DEADLINE_S},
        "durability": "process",
        "capture": case.capture,
    }
    if case.graph == "regular":
        edges = nx.random_regular_graph(min(4, case.learners - 1), case.learners, seed=1).edges
        document["topology"] = {"graph": {"kind": "edges", "edges": [list(edge) for edge in edges]}}
    if case.graph == "random":
        probability = min(4 / case.learners, 1.0)
        document["topology"] = {"sequence": {"kind": "random", "probability": probability, "seed": 1}}
        document["algorithm"] = {"name": "dpsda-c"}
    return parse_spec(document, allow_imports=True)


def build_names(learners: int) -> list[str]:
    """Return the names of all learners."""
    return [f"ward-{i:04d}" for i in range(learners)]


def build_data(case: Case) -> PlacedData:
    """Build data with one record per round, from 16 records that repeat."""
    rng = np.random.default_rng(0)
    features, labels = rng.standard_normal((16, DIM)), rng.integers(0, 2, 16).astype(np.float64)
    order, offsets = np.arange(case.total_rounds) % 16, np.arange(case.total_rounds + 1)
    own = LearnerData(features, labels, order.astype(np.int64), offsets.astype(np.int64))
    return PlacedData((own,) * case.learners, np.empty((0, DIM)), np.empty(0))


# ---- processes -------------------------------------------------------------------------------------------


class Child:
    """Child process that writes lines of JSON."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.info = psutil.Process(process.pid)

    async def read_line(self) -> dict[str, Any]:
        """Read the next line."""
        assert self._process.stdout is not None
        async with asyncio.timeout(CALL_S):
            line = await self._process.stdout.readline()
        if not line:
            raise SottovoceError(f"a process ended with exit code {await self._process.wait()}")
        return dict(json.loads(line))

    @property
    def cpu_s(self) -> float:
        """CPU seconds used until now, by its own processes, too."""
        times = [each.cpu_times() for each in (self.info, *self.info.children(recursive=True))]
        return float(sum(each.user + each.system for each in times))

    async def blocked_ms(self) -> float:
        """Ask a coordinator for the longest turn of its event loop since the last request."""
        self._process.send_signal(signal.SIGUSR1)
        return float((await self.read_line())["blocked_ms"])


@contextlib.asynccontextmanager
async def start_child(*command: str, log: Path) -> AsyncIterator[Child]:
    """Start a process; end it with the block."""
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=errors, limit=2**20
        )
    try:
        yield Child(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(30.0):
                await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()


async def serve_coordinator(state: str, eavesdropper: str | None) -> None:
    """Run the coordinator in this process, and measure the turns of its event loop."""
    loop, longest, before = asyncio.get_running_loop(), 0.0, time.thread_time()

    def beat() -> None:
        nonlocal longest, before
        now = time.thread_time()
        longest, before = max(longest, now - before), now
        loop.call_later(BEAT_S, beat)

    def report() -> None:
        nonlocal longest
        print(json.dumps({"blocked_ms": 1e3 * longest}), flush=True)
        longest = 0.0

    loop.call_soon(beat)
    loop.add_signal_handler(signal.SIGUSR1, report)
    configure_logs("warning")
    await serve(CoordinatorConfig(state=Path(state) if state else None, eavesdropper=eavesdropper))


# ---- measuring -------------------------------------------------------------------------------------------


async def measure(case: Case, folder: Path) -> Sample:
    """Start the processes of a case, run it, measure, and stop them.

    Raises:
        SottovoceError: the case did not run.
    """
    spec, data, began = build_spec(case), build_data(case), time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        state = str(folder / "coordinator") if case.state else ""
        own = [OWN, "--serve", state]
        eavesdroppers = [await stack.enter_async_context(each) for each in start_eavesdropper(case, folder)]
        for each in eavesdroppers:
            own += ["--eavesdropper", (await each.read_line())["address"]]
        coordinator = await stack.enter_async_context(start_child(*own, log=folder / "coordinator.log"))
        address = (await coordinator.read_line())["address"]
        hosts = [await stack.enter_async_context(each) for each in start_hosts(case, folder, address)]
        for k, host in enumerate(hosts):
            for _ in build_names(case.learners)[k :: case.hosts]:
                await host.read_line()
        listening = time.monotonic() - began
        to = await stack.enter_async_context(open_channel(address))
        request = coordinator_pb2.StartRunRequest(spec=spec_to_wire(spec), n_features=data.n_features)
        run = await coordinator_pb2_grpc.CoordinatorStub(to).StartRun(request, timeout=CALL_S)
        joined = time.monotonic() - began
        feeding = asyncio.gather(
            *(
                feed(i.address, run.run_id, d, timeout_s=CALL_S)
                for i, d in zip(run.learners, data.learners, strict=True)
            )
        )
        stack.push_async_callback(cancel_and_wait, feeding)
        first = await stack.enter_async_context(open_channel(run.learners[0].address))
        stub = learner_pb2_grpc.LearnerStub(first)
        await wait_for_rounds(stub, 1, feeding)
        running = time.monotonic() - began
        at_start = await coordinator.blocked_ms()
        await wait_for_rounds(stub, case.warmup, feeding)
        roles = hosts, [coordinator], eavesdroppers
        before, at, t = measure_processors(roles), time.monotonic(), await get_rounds_done(stub)
        end = await wait_for_rounds(stub, case.total_rounds - 1, feeding)
        seconds, used = time.monotonic() - at, measure_processors(roles)
        if not (rounds := end - t):
            raise SottovoceError(f"the run must outlast its measurement: {case.total_rounds} rounds are too few")
        blocked = await coordinator.blocked_ms()
        spent = [1e6 * (now - then) / rounds / case.learners for now, then in zip(used, before, strict=True)]
        memory = sum(host.info.memory_info().rss for host in hosts) / 2**20
        descriptors = sum(host.info.num_fds() for host in hosts)
        numbers = (rounds / seconds, *spent, memory / case.learners, descriptors / case.learners)
        return Sample(case, listening, joined, running, *numbers, at_start, blocked, os.getloadavg()[0])


def measure_processors(roles: Iterable[Sequence[Child]]) -> list[float]:
    """Return the CPU seconds of each role's processes."""
    return [sum(each.cpu_s for each in processes) for processes in roles]


def start_eavesdropper(case: Case, folder: Path) -> list[contextlib.AbstractAsyncContextManager[Child]]:
    """Build the context manager of an eavesdropper, if the case has one."""
    command = ["-m", "sottovoce_client", "eavesdropper", "--listen", "127.0.0.1:0", "--log-level", "warning"]
    command += ["--folder", str(folder / "captures"), "--workers", str(case.workers), "--allow-imports"]
    return [] if case.capture == "none" else [start_child(*command, log=folder / "eavesdropper.log")]


def start_hosts(case: Case, folder: Path, coordinator: str) -> list[contextlib.AbstractAsyncContextManager[Child]]:
    """Build context managers of the host processes, each with its share of the learners."""
    policy = folder / "policy.yaml"
    policy.write_text(yaml.safe_dump(POLICY), encoding="utf-8")
    found = []
    for k in range(case.hosts):
        file = folder / f"host-{k}.yaml"
        config = {"coordinator": coordinator, "state": str(folder / "states"), "policy": str(policy)}
        file.write_text(
            yaml.safe_dump({**config, "learners": build_names(case.learners)[k :: case.hosts]}), encoding="utf-8"
        )
        command = ["-m", "sottovoce_client", "learner", "--host", str(file), "--log-level", "warning"]
        found.append(start_child(*command, log=folder / f"host-{k}.log"))
    return found


async def get_rounds_done(stub: learner_pb2_grpc.LearnerAsyncStub) -> int:
    """Return the number of rounds that the first learner has done.

    Raises:
        SottovoceError: the learner is no longer in the run.
    """
    status = (await stub.GetStatus(learner_pb2.GetStatusRequest(), timeout=CALL_S)).status
    if status.state not in (*OPEN, learner_pb2.LEARNER_STATE_FINISHED):
        raise SottovoceError(f"{status.learner} stopped in round {status.rounds_done}: {status.detail}")
    return int(status.rounds_done)


async def wait_for_rounds(stub: learner_pb2_grpc.LearnerAsyncStub, target: int, feeding: asyncio.Future[Any]) -> int:
    """Wait until the first learner has done `target` rounds; return the number done."""
    while (now := await get_rounds_done(stub)) < target:
        if feeding.done():
            feeding.result()
        await asyncio.sleep(0.01)
    return now


# ---- showing ---------------------------------------------------------------------------------------------


def build_table(samples: Sequence[Sample]) -> Table:
    """Build the table, one line per sample."""
    table = Table(title="Learners of one process", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    heads = ("learners", "graph", "hosts", "listen s", "joined s", "running s", "rounds/s", "host us", "coord us")
    heads = ("capture", *heads, "eaves us")
    for head in (*heads, "MB", "fds", "block start ms", "block ms", "load"):
        table.add_column(head, justify="right", no_wrap=True)
    for s in samples:
        facts = (s.listening_s, s.joined_s, s.running_s, s.rounds_per_s)
        rest = [f"{each:.0f}" for each in (s.host_us, s.coordinator_us, s.eavesdropper_us)]
        rest += [f"{s.memory_mb:.2f}", f"{s.descriptors:.1f}"]
        rest += [f"{s.start_blocked_ms:.0f}", f"{s.blocked_ms:.0f}", f"{s.load:.1f}"]
        capture = s.case.capture if not s.case.workers else f"{s.case.capture}-{s.case.workers}"
        own = capture, str(s.case.learners), s.case.graph, str(s.case.hosts)
        table.add_row(*own, *(f"{each:.1f}" for each in facts), *rest)
    table.caption = (
        "host, coord, eaves us: CPU microseconds a learner-round. MB, fds: memory and file descriptors of the hosts a learner. "
        "block: longest turn of the coordinator's event loop, CPU milliseconds, until the first round and after it"
    )
    table.caption_justify = "left"
    return table


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("learners", nargs="*", type=int, help=f"numbers of learners (default: {LEARNERS})")
    parser.add_argument("--graph", choices=GRAPHS, default="ring", help="communication graph (default: ring)")
    parser.add_argument("--hosts", type=int, default=1, help="processes that share the learners (default: 1)")
    parser.add_argument(
        "--rounds", type=int, help="measured rounds (default: 50000 learner-rounds, 100 to 10000 rounds)"
    )
    parser.add_argument("--state", action="store_true", help="the coordinator stores its state: every lease is synced")
    captures = ("none", "mirror", "relay")
    parser.add_argument("--capture", choices=captures, nargs="+", default=["none"], help="kinds of captures, in turn")
    parser.add_argument("--workers", type=int, default=0, help="processes of the eavesdropper for relays (default: 0)")
    parser.add_argument(
        "--quick", action="store_true", help="5 and 20 learners, few rounds, to test the benchmark itself"
    )
    parser.add_argument("--folder", type=Path, help="folder of the states (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to a file")
    parser.add_argument("--serve", metavar="STATE", help=argparse.SUPPRESS)
    parser.add_argument("--eavesdropper", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.learners, options.rounds = [5, 20], 200
    options.learners = options.learners or list(LEARNERS)
    if min(options.learners) < 3 or options.hosts < 1:
        parser.error("there must be at least 3 learners, and one host")
    if (most := max(options.learners)) > MAX_LEARNERS_PER_RUN:
        parser.error(f"a run has at most {MAX_LEARNERS_PER_RUN:,} learners, got {most:,}")
    return options


def main() -> int:
    """Run the benchmark, print the results, and return 1 if a case failed."""
    options = parse_arguments()
    if options.serve is not None:
        asyncio.run(serve_coordinator(options.serve, options.eavesdropper))
        return 0
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # this process feeds all learners
    samples, failed = list[Sample](), 0
    for learners, capture in itertools.product(options.learners, options.capture):
        rounds = options.rounds or min(max(50_000 // learners, 100), 10_000)
        case = Case(learners, options.graph, options.hosts, rounds, options.state, capture, options.workers)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            try:
                samples.append(asyncio.run(measure(case, Path(folder))))
            except (SottovoceError, OSError, grpc.aio.AioRpcError) as error:
                failed += 1
                console.print(f"{learners} learners: {error}", style="red", markup=False)
                for log in sorted(Path(folder).glob("*.log")):
                    console.print(log.name, log.read_text(errors="replace")[-2000:], markup=False)
    console.print(build_table(samples))
    if options.json is not None:
        write_json(options.json, {"samples": [asdict(each) for each in samples]})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
