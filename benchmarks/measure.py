"""One measurement of a ring: the bare gRPC yardstick, or the real services, started for it and stopped after it."""

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
"""The variable by which the services can be run without gRPC's event engine; the floor never is."""

Loops = Literal["installed", "asyncio", "uvloop"]
"""Event loops. `installed`: uvloop's for services where it is installed, asyncio's for the floor; else the same for both."""

WINDOW, DEADLINE_S, CALL_S = 100, 20.0, 40.0
OPEN = (learner_pb2.LEARNER_STATE_CONNECTING, learner_pb2.LEARNER_STATE_RUNNING, learner_pb2.LEARNER_STATE_IDLE)
ROLES = ("learner", "eavesdropper", "coordinator")


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured.

    Attributes:
        name: as on the command line.
        rounds: in the measured window; as many again as a tenth of it go before (warm-up) and after.
        target: rounds/s that it should reach, in those of its floor.
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

    @property
    def margin(self) -> int:
        """Rounds before and after the measured ones."""
        return max(self.rounds // 10, 20)

    def messages(self, rounds: int) -> int:
        """Messages that cross the ring: two per learner and round."""
        return 2 * self.learners * rounds


@dataclass(frozen=True, slots=True)
class Floor:
    """A run of the yardstick, bare or with the least arithmetic of a private learner."""

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
    """One measured window.

    Attributes:
        cpu_us: CPU microseconds per message, by role of the process (the floor has learners only).
        joined_s: from the first process's start to all learners being announced and joined.
        running_s: to the last of the first learner's streams to its neighbours.
    """

    rounds_per_s: float
    cpu_us: dict[str, float]
    joined_s: float = 0.0
    running_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Probe:
    """How far the ring is at one moment, and what its processes have used until then."""

    round: int
    at: float
    cpu_s: dict[str, float]
    rss_mb: tuple[float, ...]
    peak_mb: dict[str, float]
    """The largest resident memory of a process until then, by role."""


# ---- the yardstick ---------------------------------------------------------------------------------------


async def run_floor(script: Path, floor: Floor, place: Path | None = None) -> Sample:
    """Run the yardstick once; what it writes lies in a place, or where temporary files do.

    Raises:
        SottovoceError: it failed.
    """
    numbers = {"--dim": floor.dim, "--learners": floor.learners, "--rounds": floor.rounds}
    numbers["--warmup"] = max(floor.rounds // 10, 20)
    arguments = [floor.layout, *(str(part) for pair in numbers.items() for part in pair)]
    if floor.arithmetic:
        arguments.append("--arithmetic")
    if floor.loops == "uvloop":
        arguments += ["--loop", "uvloop"]
    with tempfile.TemporaryDirectory(dir=place) as folder:  # it leaves its own behind where it is cut off
        if floor.tls:
            own = Path(folder) / "learner"
            Authority.init(Path(folder) / "authority", "bench").issue("learner/any", own)
            arguments += ["--identity", str(own)]
        environment = {key: value for key, value in os.environ.items() if key != EVENT_ENGINE} | {"TMPDIR": folder}
        said = await _output([sys.executable, str(script), *arguments], environment)
    facts = json.loads(said)
    return Sample(facts["rounds_per_s"], {"learner": facts["cpu_us_per_msg"]}, facts["startup_s"], facts["startup_s"])


async def _output(command: Sequence[str], environment: dict[str, str]) -> bytes:
    """What a program writes; it and its children do not outlive this call."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=pipe, stderr=pipe, start_new_session=True
    )
    try:
        said, complaint = await child.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()
    if child.returncode != 0:
        lines = complaint.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise SottovoceError(f"{Path(command[1]).name} failed with exit code {child.returncode}: {lines[-1]}")
    return said


# ---- the services ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Ring:
    """A run of the real services under way; the learners are asked directly how far they are."""

    processes: dict[str, list[psutil.Process]]
    feeders: asyncio.Future[Any]
    stub: learner_pb2_grpc.LearnerAsyncStub
    joined_s: float
    began: float
    running_s: float = field(default=0.0)

    async def reach(self, target: int) -> Probe:
        """Wait for a round; what is used in the meantime is next to nothing.

        Raises:
            SottovoceError: the ring will not get there.
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
        cpu = {role: sum(map(_cpu, processes)) for role, processes in self.processes.items()}
        rss = tuple(p.memory_info().rss / 2**20 for p in self.processes["learner"])
        return Probe(t, at, cpu, rss, {role: max(map(_peak_mb, each)) for role, each in self.processes.items()})


@contextlib.contextmanager
def on_loop(loops: Loops, folder: Path) -> Iterator[None]:
    """Processes that are started meanwhile have this event loop: asyncio's, if uvloop cannot be imported.

    Raises:
        SottovoceError: uvloop is asked for, and is not installed.
    """
    if loops == "uvloop" and find_spec("uvloop") is None:
        raise SottovoceError(f"the event loop uvloop is not installed: {format_install_hint('fast')}")
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
async def ring_of(case: Case, rounds: int, folder: Path) -> AsyncIterator[Ring]:
    """Start the services of a case and a run of so many rounds, fed by this process.

    Raises:
        SottovoceError: they did not start, or the ring broke.
    """
    spec, data = spec_of(case, rounds), data_of(case, rounds)
    began = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(on_loop(case.loops, folder))
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
            stack.push_async_callback(cancelled, feeders)
            yield Ring(_processes(), feeders, learner_pb2_grpc.LearnerStub(first), joined, began)
        except grpc.aio.AioRpcError as error:
            raise SottovoceError(f"{error.code().name}: {error.details()}") from None


async def run_services(case: Case, folder: Path) -> Sample:
    """Measure the real services once.

    Raises:
        SottovoceError: they did not start, or the ring broke.
    """
    async with ring_of(case, case.rounds + 2 * case.margin, folder) as ring:
        begin = await ring.reach(case.margin)
        end = await ring.reach(case.margin + case.rounds)
        rounds = end.round - begin.round
        used = {role: end.cpu_s[role] - begin.cpu_s[role] for role in begin.cpu_s}
        return Sample(
            rounds / (end.at - begin.at),
            {role: 1e6 * seconds / case.messages(rounds) for role, seconds in used.items()},
            ring.joined_s,
            ring.running_s,
        )


async def _start(to: grpc.aio.Channel, spec: RunSpec, data: PlacedData) -> coordinator_pb2.Run:
    request = coordinator_pb2.StartRunRequest(spec=spec_to_wire(spec), n_features=data.n_features)
    return await coordinator_pb2_grpc.CoordinatorStub(to).StartRun(request, timeout=CALL_S)


async def cancelled(task: asyncio.Future[Any]) -> None:
    """It has ended, whatever that has led to."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _processes() -> dict[str, list[psutil.Process]]:
    """Our services, by role."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.Process().children():
        role = next((word for word in process.cmdline()[:4] if word in ROLES), None)
        if role is not None:
            found.setdefault(role, []).append(process)
    return found


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _peak_mb(process: psutil.Process) -> float:
    """As Linux counts it."""
    lines = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 2**10


# ---- what is run -----------------------------------------------------------------------------------------


def spec_of(case: Case, rounds: int) -> RunSpec:
    """The run spec of a case."""
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


def data_of(case: Case, rounds: int) -> PlacedData:
    """Records for which the loss costs little, and the same in every round.

    The squared loss has one record a round. With many parameters the loss is logistic, whose every round costs as much as
    the records so far, and there are records in the first three rounds only.
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
