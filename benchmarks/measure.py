"""Measurement of a ring: of the bare gRPC floor, or of the real services, which it starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: one core
import grpc
import numpy as np
import psutil
from bare_ring import SPARSE_FROM

from sottovoce_client.pki import Authority
from sottovoce_client.runs.feeder import feed
from sottovoce_client.runs.local_services import LocalServices
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.errors import SottovoceError
from sottovoce_core.optional import format_install_hint
from sottovoce_core.spec import RunSpec, parse_spec
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import open_channel
from sottovoce_rpc.specs import spec_to_wire
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc, learner_pb2, learner_pb2_grpc

EVENT_ENGINE = "GRPC_EXPERIMENTS"
"""Environment variable that runs the services without gRPC's event engine; the floor never uses it."""

Loops = Literal["installed", "asyncio", "uvloop"]
"""Event loops. `installed`: uvloop for services if it is installed, and asyncio for the floor; else the same for both."""

WINDOW, DEADLINE_S, CALL_S = 100, 20.0, 40.0
OPEN = (learner_pb2.LEARNER_STATE_CONNECTING, learner_pb2.LEARNER_STATE_RUNNING, learner_pb2.LEARNER_STATE_IDLE)
ROLES = ("learner", "eavesdropper", "coordinator")


@dataclass(frozen=True, slots=True)
class Case:
    """Case of the benchmark.

    Attributes:
        name: name on the command line.
        rounds: rounds of the measured window; a tenth of them, at least 20, run before it (warm-up), and again after it.
        target: wanted rounds/s, relative to the floor.
        workers: processes of the eavesdropper that serve relays; 0: its own.
    """

    name: str
    rounds: int
    dim: int = 117
    learners: int = 5
    per_process: int = 1
    capture: Literal["none", "mirror", "relay"] = "none"
    durability: Literal["process", "power"] = "process"
    tls: bool = False
    target: float | None = None
    deadline_s: float = DEADLINE_S
    loops: Loops = "installed"
    workers: int = 0

    @property
    def margin(self) -> int:
        """Rounds before and after the measured ones."""
        return max(self.rounds // 10, 20)

    def messages(self, rounds: int) -> int:
        """Return the number of messages on the ring: two per learner and round."""
        return 2 * self.learners * rounds


@dataclass(frozen=True, slots=True)
class Floor:
    """Run of the floor, bare or with the minimum arithmetic of a private learner."""

    name: str
    rounds: int
    dim: int = 117
    learners: int = 5
    tls: bool = False
    layout: Literal["--processes", "--single"] = "--processes"
    arithmetic: bool = False
    loops: Loops = "installed"


@dataclass(frozen=True, slots=True)
class Sample:
    """Measured window.

    Attributes:
        cpu_us: CPU microseconds per message, by role of the process (the floor has learners only).
        joined_s: seconds from the start of the first process until all learners are announced and joined.
        running_s: seconds until the first learner has all streams to its neighbours.
    """

    rounds_per_s: float
    cpu_us: dict[str, float]
    joined_s: float = 0.0
    running_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Probe:
    """Progress of the ring at one moment, and usage of its processes until then."""

    round: int
    at: float
    cpu_s: dict[str, float]
    rss_mb: tuple[float, ...]
    peak_mb: dict[str, float]
    """Largest resident memory of a process until then, by role."""


# ---- the floor -------------------------------------------------------------------------------------------


async def run_floor(script: Path, floor: Floor, place: Path | None = None) -> Sample:
    """Run the floor once; its files go into the folder `place`, or into that of temporary files.

    Raises:
        SottovoceError: the floor failed.
    """
    numbers = {"--dim": floor.dim, "--learners": floor.learners, "--rounds": floor.rounds}
    numbers["--warmup"] = max(floor.rounds // 10, 20)
    arguments = [floor.layout, *(str(part) for pair in numbers.items() for part in pair)]
    if floor.arithmetic:
        arguments.append("--arithmetic")
    if floor.loops == "uvloop":
        arguments += ["--loop", "uvloop"]
    with tempfile.TemporaryDirectory(dir=place) as folder:  # a floor that is killed leaves its files behind
        if floor.tls:
            own = Path(folder) / "learner"
            Authority.init(Path(folder) / "authority", "bench").issue("learner/any", own)
            arguments += ["--identity", str(own)]
        environment = {key: value for key, value in os.environ.items() if key != EVENT_ENGINE} | {"TMPDIR": folder}
        stdout = await _run_for_output([sys.executable, str(script), *arguments], environment)
    facts = json.loads(stdout)
    return Sample(facts["rounds_per_s"], {"learner": facts["cpu_us_per_msg"]}, facts["startup_s"], facts["startup_s"])


async def _run_for_output(command: Sequence[str], environment: dict[str, str]) -> bytes:
    """Run a program and return its standard output; kill it and its children at the end of the call."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=pipe, stderr=pipe, start_new_session=True
    )
    try:
        stdout, stderr = await child.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()
    if child.returncode != 0:
        lines = stderr.decode(errors="replace").strip().splitlines() or ["it printed no error"]
        raise SottovoceError(f"{Path(command[1]).name} failed with exit code {child.returncode}: {lines[-1]}")
    return stdout


# ---- the services ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Ring:
    """Running ring of the real services; the first learner reports its progress directly."""

    processes: dict[str, list[psutil.Process]]
    feeders: asyncio.Future[Any]
    stub: learner_pb2_grpc.LearnerAsyncStub
    joined_s: float
    began: float
    running_s: float = field(default=0.0)

    async def wait_for_round(self, target: int) -> Probe:
        """Wait until `target` rounds are done; the polling uses almost no CPU time.

        Raises:
            SottovoceError: the ring stopped before.
        """
        then, before = time.monotonic(), 0
        while True:
            status = (await self.stub.GetStatus(learner_pb2.GetStatusRequest(), timeout=CALL_S)).status
            now = time.monotonic()
            self._check(status)
            if status.rounds_done >= target:
                return self._probe(status.rounds_done, now)
            pace = max(status.rounds_done - before, 1) / max(now - then, 1e-3)
            then, before = now, status.rounds_done
            await asyncio.sleep(min(max(0.7 * (target - status.rounds_done) / pace, 0.005), 0.2))

    def _check(self, status: learner_pb2.LearnerStatus) -> None:
        if not self.running_s and status.state == learner_pb2.LEARNER_STATE_RUNNING:
            self.running_s = time.monotonic() - self.began
        if status.state not in OPEN:
            state = learner_pb2.LearnerState.Name(status.state)
            raise SottovoceError(f"{status.learner} is {state} in round {status.rounds_done}: {status.detail}")
        if self.feeders.done():
            self.feeders.result()

    def _probe(self, t: int, at: float) -> Probe:
        cpu = {role: sum(map(_cpu_s, processes)) for role, processes in self.processes.items()}
        rss = tuple(p.memory_info().rss / 2**20 for p in self.processes["learner"])
        return Probe(t, at, cpu, rss, {role: max(map(_peak_mb, each)) for role, each in self.processes.items()})


@contextlib.contextmanager
def use_event_loop(loops: Loops, folder: Path) -> Iterator[None]:
    """Select the event loop of processes that start in the block; for asyncio, uvloop is made impossible to import.

    Raises:
        SottovoceError: uvloop is selected, and is not installed.
    """
    if loops == "uvloop" and find_spec("uvloop") is None:
        raise SottovoceError(f"the event loop uvloop must be installed: {format_install_hint('fast')}")
    before = os.environ.get("PYTHONPATH")
    if loops == "asyncio":
        hidden = folder.resolve() / "without-uvloop"
        hidden.mkdir(parents=True)
        (hidden / "uvloop.py").write_text("raise ImportError\n", encoding="ascii")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(hidden), *([before] if before else [])])
    try:
        yield
    finally:
        if loops == "asyncio":
            os.environ.pop("PYTHONPATH")
            os.environ.update({"PYTHONPATH": before} if before else {})


@contextlib.asynccontextmanager
async def start_ring(case: Case, rounds: int, folder: Path) -> AsyncIterator[Ring]:
    """Start the services of a case, and a run of `rounds` rounds that this process feeds.

    Raises:
        SottovoceError: the services did not start, or the run failed.
    """
    spec, data = build_spec(case, rounds), build_data(case, rounds)
    began = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(use_event_loop(case.loops, folder))
        os.environ["SOTTOVOCE_WORKERS"] = str(case.workers)
        services = await stack.enter_async_context(
            LocalServices(spec, folder, learners_per_process=case.per_process, tls=case.tls)
        )
        own = services.credentials
        to = await stack.enter_async_context(open_channel(services.coordinator, Role.COORDINATOR, credentials=own))
        try:
            started = await _start(to, spec, data)
            joined = time.monotonic() - began
            first = await stack.enter_async_context(
                open_channel(started.learners[0].address, Role.LEARNER, credentials=own)
            )
            feeders = asyncio.gather(
                *(
                    feed(i.address, started.run_id, d, credentials=own)
                    for i, d in zip(started.learners, data.learners, strict=True)
                )
            )
            stack.push_async_callback(cancel_and_wait, feeders)
            yield Ring(_find_processes(), feeders, learner_pb2_grpc.LearnerStub(first), joined, began)
        except grpc.aio.AioRpcError as error:
            raise SottovoceError(f"{error.code().name}: {error.details()}") from None


async def run_services(case: Case, folder: Path) -> Sample:
    """Measure the real services once.

    Raises:
        SottovoceError: the services did not start, or the run failed.
    """
    async with start_ring(case, case.rounds + 2 * case.margin, folder) as ring:
        begin = await ring.wait_for_round(case.margin)
        end = await ring.wait_for_round(case.margin + case.rounds)
        rounds = end.round - begin.round
        cpu_s = {role: end.cpu_s[role] - begin.cpu_s[role] for role in begin.cpu_s}
        return Sample(
            rounds / (end.at - begin.at),
            {role: 1e6 * seconds / case.messages(rounds) for role, seconds in cpu_s.items()},
            ring.joined_s,
            ring.running_s,
        )


async def _start(to: grpc.aio.Channel, spec: RunSpec, data: PlacedData) -> coordinator_pb2.Run:
    request = coordinator_pb2.StartRunRequest(spec=spec_to_wire(spec), n_features=data.n_features)
    return await coordinator_pb2_grpc.CoordinatorStub(to).StartRun(request, timeout=CALL_S)


async def cancel_and_wait(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for its end; ignore its result."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _find_processes() -> dict[str, list[psutil.Process]]:
    """Find the processes of our services, by role."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.Process().children():
        role = next((word for word in process.cmdline()[:5] if word in ROLES), None)
        if role is not None:  # with its own processes, such as an eavesdropper's workers
            found.setdefault(role, []).extend([process, *process.children()])
    return found


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _peak_mb(process: psutil.Process) -> float:
    """Return the largest resident memory of a process so far, as Linux counts it."""
    lines = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 2**10


# ---- the run --------------------------------------------------------------------------------------------


def build_spec(case: Case, rounds: int) -> RunSpec:
    """Build the run spec of a case."""
    loss = "logistic" if case.dim >= SPARSE_FROM else "ridge"
    return parse_spec(
        {
            "name": f"bench-{case.name}",
            "rounds": rounds,
            "learners": case.learners,
            "algorithm": {"name": "ldp-dol"},
            "loss": {"kind": loss},
            "topology": {"graph": "ring"},
            "clock": {"mode": "free", "window": WINDOW, "deadline_s": case.deadline_s},
            "capture": case.capture,
            "durability": case.durability,
        },
        allow_imports=True,
    )


def build_data(case: Case, rounds: int) -> PlacedData:
    """Build records for which the loss costs little, and the same in every round.

    The squared loss has one record per round. With many parameters the loss is logistic, whose cost per round grows with the
    number of records so far, and there are records in the first three rounds only.
    """
    rng = np.random.default_rng(0)
    records = 3 if case.dim >= SPARSE_FROM else rounds
    offsets = np.minimum(np.arange(rounds + 1), records)
    learners = []
    for _ in range(case.learners):
        features = rng.standard_normal((min(records, 256), case.dim))
        labels = rng.integers(0, 2, len(features)).astype(np.float64)
        learners.append(LearnerData(features, labels, np.resize(np.arange(len(features)), records), offsets))
    return PlacedData(tuple(learners), np.empty((0, case.dim)), np.empty(0))
