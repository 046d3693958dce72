#!/usr/bin/env python3
"""What learners of one process cost, and their coordinator, as they become more.

For each number of learners a coordinator and host processes (`sottovoce learner --host`) are started, run some rounds, and are
stopped. Nothing is asserted: the exit code is 1 only where something could not be run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
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
from measure import OPEN, cancelled
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

console = Console() if sys.stdout.isatty() else Console(width=130)


@dataclass(frozen=True, slots=True)
class Case:
    """What is run: so many learners in so many processes, on a graph, over so many measured rounds."""

    learners: int
    graph: str
    hosts: int
    rounds: int
    state: bool

    @property
    def planned(self) -> int:
        """Rounds of the run: as many as are measured, and as many as come before."""
        return self.rounds + self.warm

    @property
    def warm(self) -> int:
        """Rounds before the measured ones."""
        return max(self.rounds // 4, 10)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement.

    Attributes:
        listening_s, joined_s, running_s: from the start to all listening, to all in the run, to the first round done.
        rounds_per_s: of the run.
        host_us, coordinator_us: CPU a learner-round.
        memory_mb: of the hosts, a learner, above a process without any.
        descriptors: of the hosts, a learner.
        blocked_ms: longest time that the coordinator's event loop was busy with one turn, in CPU time: at the start, and later.
        load: of the machine.
    """

    case: Case
    listening_s: float
    joined_s: float
    running_s: float
    rounds_per_s: float
    host_us: float
    coordinator_us: float
    memory_mb: float
    descriptors: float
    start_blocked_ms: float
    blocked_ms: float
    load: float


# ---- what is run -----------------------------------------------------------------------------------------


def spec_of(case: Case) -> RunSpec:
    """The run spec: on a random sequence the algorithm is dual averaging, which takes graphs that change."""
    names = names_of(case.learners)
    document: dict[str, Any] = {
        "name": f"hosting-{case.learners}-{case.graph}",
        "rounds": case.planned,
        "learners": names,
        "algorithm": {"name": "ldp-dol"},
        "loss": {"kind": "ridge"},
        "topology": {"graph": "ring"},
        "clock": {"mode": "free", "window": min(WINDOW, 65_536 // case.learners), "deadline_s": DEADLINE_S},
        "durability": "process",
    }
    if case.graph == "regular":
        edges = nx.random_regular_graph(min(4, case.learners - 1), case.learners, seed=1).edges
        document["topology"] = {"graph": {"kind": "edges", "edges": [list(edge) for edge in edges]}}
    if case.graph == "random":
        probability = min(4 / case.learners, 1.0)
        document["topology"] = {"sequence": {"kind": "random", "probability": probability, "seed": 1}}
        document["algorithm"] = {"name": "dpsda-c"}
    return parse_spec(document, allow_imports=True)


def names_of(learners: int) -> list[str]:
    """Of all learners."""
    return [f"ward-{i:04d}" for i in range(learners)]


def data_of(case: Case) -> PlacedData:
    """A record a round, of few that come again."""
    rng = np.random.default_rng(0)
    features, labels = rng.standard_normal((16, DIM)), rng.integers(0, 2, 16).astype(np.float64)
    order, offsets = np.arange(case.planned) % 16, np.arange(case.planned + 1)
    own = LearnerData(features, labels, order.astype(np.int64), offsets.astype(np.int64))
    return PlacedData((own,) * case.learners, np.empty((0, DIM)), np.empty(0))


# ---- processes -------------------------------------------------------------------------------------------


class Child:
    """A process of ours, and the lines of JSON that it says."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.seen = psutil.Process(process.pid)

    async def said(self) -> dict[str, Any]:
        """The next line."""
        assert self._process.stdout is not None
        async with asyncio.timeout(CALL_S):
            line = await self._process.stdout.readline()
        if not line:
            raise SottovoceError(f"a process ended with exit code {await self._process.wait()}")
        return dict(json.loads(line))

    @property
    def cpu_s(self) -> float:
        """Used until now."""
        times = self.seen.cpu_times()
        return float(times.user + times.system)

    async def blocked_ms(self) -> float:
        """Of a coordinator: the longest turn of its event loop since this was asked last."""
        self._process.send_signal(signal.SIGUSR1)
        return float((await self.said())["blocked_ms"])


@contextlib.asynccontextmanager
async def child(*command: str, log: Path) -> AsyncIterator[Child]:
    """A process that ends with the block."""
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


async def coordinate(state: str) -> None:
    """The coordinator, in a process of its own, with a look at its event loop."""
    loop, longest, before = asyncio.get_running_loop(), 0.0, time.thread_time()

    def beat() -> None:
        nonlocal longest, before
        now = time.thread_time()
        longest, before = max(longest, now - before), now
        loop.call_later(BEAT_S, beat)

    def tell() -> None:
        nonlocal longest
        print(json.dumps({"blocked_ms": 1e3 * longest}), flush=True)
        longest = 0.0

    loop.call_soon(beat)
    loop.add_signal_handler(signal.SIGUSR1, tell)
    configure_logs("warning")
    await serve(CoordinatorConfig(state=Path(state) if state else None))


# ---- measuring -------------------------------------------------------------------------------------------


async def measure(case: Case, folder: Path) -> Sample:
    """Start, run, look, stop.

    Raises:
        SottovoceError: it did not run.
    """
    spec, data, began = spec_of(case), data_of(case), time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        state = str(folder / "coordinator") if case.state else ""
        own = [OWN, "--serve", state]
        coordinator = await stack.enter_async_context(child(*own, log=folder / "coordinator.log"))
        address = (await coordinator.said())["address"]
        hosts = [await stack.enter_async_context(each) for each in hosting(case, folder, address)]
        for k, host in enumerate(hosts):
            for _ in names_of(case.learners)[k :: case.hosts]:
                await host.said()
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
        stack.push_async_callback(cancelled, feeding)
        first = await stack.enter_async_context(open_channel(run.learners[0].address))
        stub = learner_pb2_grpc.LearnerStub(first)
        await reach(stub, 1, feeding)
        running = time.monotonic() - began
        at_start = await coordinator.blocked_ms()
        await reach(stub, case.warm, feeding)
        before, at, t = [coordinator.cpu_s, *(host.cpu_s for host in hosts)], time.monotonic(), await done(stub)
        end = await reach(stub, case.planned - 1, feeding)
        seconds, used = time.monotonic() - at, [coordinator.cpu_s, *(host.cpu_s for host in hosts)]
        if not (rounds := end - t):
            raise SottovoceError(f"the run was over before it was looked at: {case.planned} rounds are too few")
        blocked = await coordinator.blocked_ms()
        spent = [1e6 * (now - then) / rounds / case.learners for now, then in zip(used, before, strict=True)]
        memory = sum(host.seen.memory_info().rss for host in hosts) / 2**20
        held = sum(host.seen.num_fds() for host in hosts)
        numbers = (rounds / seconds, sum(spent[1:]), spent[0], memory / case.learners, held / case.learners)
        return Sample(case, listening, joined, running, *numbers, at_start, blocked, os.getloadavg()[0])


def hosting(case: Case, folder: Path, coordinator: str) -> list[contextlib.AbstractAsyncContextManager[Child]]:
    """The host processes, each with its share of the learners."""
    policy = folder / "policy.yaml"
    policy.write_text(yaml.safe_dump(POLICY), encoding="utf-8")
    found = []
    for k in range(case.hosts):
        file = folder / f"host-{k}.yaml"
        said = {"coordinator": coordinator, "state": str(folder / "states"), "policy": str(policy)}
        file.write_text(
            yaml.safe_dump({**said, "learners": names_of(case.learners)[k :: case.hosts]}), encoding="utf-8"
        )
        command = ["-m", "sottovoce_client", "learner", "--host", str(file), "--log-level", "warning"]
        found.append(child(*command, log=folder / f"host-{k}.log"))
    return found


async def done(stub: learner_pb2_grpc.LearnerAsyncStub) -> int:
    """Rounds that the first learner has done.

    Raises:
        SottovoceError: it is no longer in the run.
    """
    status = (await stub.GetStatus(learner_pb2.GetStatusRequest(), timeout=CALL_S)).status
    if status.state not in (*OPEN, learner_pb2.LEARNER_STATE_FINISHED):
        raise SottovoceError(f"{status.learner} stopped in round {status.rounds_done}: {status.detail}")
    return int(status.rounds_done)


async def reach(stub: learner_pb2_grpc.LearnerAsyncStub, target: int, feeding: asyncio.Future[Any]) -> int:
    """Wait until the first learner has done so many rounds."""
    while (now := await done(stub)) < target:
        if feeding.done():
            feeding.result()
        await asyncio.sleep(0.01)
    return now


# ---- showing ---------------------------------------------------------------------------------------------


def table_of(samples: Sequence[Sample]) -> Table:
    """A line for each."""
    table = Table(title="Learners of one process", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    heads = ("learners", "graph", "hosts", "listen s", "joined s", "running s", "rounds/s", "host us", "coord us")
    for head in (*heads, "MB", "fds", "block start ms", "block ms", "load"):
        table.add_column(head, justify="right", no_wrap=True)
    for s in samples:
        facts = (s.listening_s, s.joined_s, s.running_s, s.rounds_per_s)
        rest = [f"{s.host_us:.0f}", f"{s.coordinator_us:.0f}", f"{s.memory_mb:.2f}", f"{s.descriptors:.1f}"]
        rest += [f"{s.start_blocked_ms:.0f}", f"{s.blocked_ms:.0f}", f"{s.load:.1f}"]
        table.add_row(str(s.case.learners), s.case.graph, str(s.case.hosts), *(f"{each:.1f}" for each in facts), *rest)
    table.caption = (
        "host us, coord us: CPU microseconds a learner-round. MB, fds: of the hosts, a learner. block: longest turn of the "
        "coordinator's event loop, CPU milliseconds, until the first round and after it"
    )
    table.caption_justify = "left"
    return table


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("learners", nargs="*", type=int, help=f"how many (default: {LEARNERS})")
    parser.add_argument("--graph", choices=GRAPHS, default="ring", help="who talks to whom (default: ring)")
    parser.add_argument("--hosts", type=int, default=1, help="processes that share the learners (default: 1)")
    parser.add_argument("--rounds", type=int, help="measured (default: 50000 learner-rounds, 100 to 10000 rounds)")
    parser.add_argument("--state", action="store_true", help="the coordinator keeps its state: every grant is synced")
    parser.add_argument("--quick", action="store_true", help="5 and 20 learners, few rounds: does it run at all?")
    parser.add_argument("--folder", type=Path, help="where states are written (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to a file")
    parser.add_argument("--serve", metavar="STATE", help=argparse.SUPPRESS)
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
    """Measure, show, and say whether everything could be run."""
    options = parse()
    if options.serve is not None:
        asyncio.run(coordinate(options.serve))
        return 0
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # this process feeds all of them
    samples, failed = list[Sample](), 0
    for learners in options.learners:
        rounds = options.rounds or min(max(50_000 // learners, 100), 10_000)
        case = Case(learners, options.graph, options.hosts, rounds, options.state)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            try:
                samples.append(asyncio.run(measure(case, Path(folder))))
            except (SottovoceError, OSError, grpc.aio.AioRpcError) as error:
                failed += 1
                console.print(f"{learners} learners: {error}", style="red", markup=False)
                for log in sorted(Path(folder).glob("*.log")):
                    console.print(log.name, log.read_text(errors="replace")[-2000:], markup=False)
    console.print(table_of(samples))
    if options.json is not None:
        write_json(options.json, {"samples": [asdict(each) for each in samples]})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
