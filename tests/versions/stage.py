"""The processes of one run, each of an old version or of this one, and changed for the other one under way."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import open_channel
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.faults.processes import chance, free_port

LEARNERS = ("ann", "ben", "cleo")
COORDINATOR, EAVESDROPPER, CLIENT = "coordinator", "eavesdropper", "client"
ALL = (CLIENT, COORDINATOR, EAVESDROPPER, *LEARNERS)
PATIENCE_S = 300.0
"""Longest wait for something that must happen, however busy the machine."""
_LOOK_S = 0.1
_ENDED = {coordinator_pb2.RUN_STATE_FINISHED, coordinator_pb2.RUN_STATE_STOPPED, coordinator_pb2.RUN_STATE_FAILED}
SPEC = """\
name: versions
rounds: {rounds}
learners: [ann, ben, cleo]
algorithm: {{name: ldp-dol, sigma: 2.0, varsigma: 0.1}}
topology: {{graph: ring}}
clock: {{mode: paced, period_s: 0.02, window: 10, deadline_s: 200}}
data: {{source: breast_cancer, scale: standard, reuse: true}}
durability: process
capture: relay
"""


@dataclass
class Stage:
    """One run's processes, at addresses and on folders that they keep.

    Attributes:
        folder: for everything that they write.
        pythons: of `old` and `new`.
        cast: the version of each.
        captures: where the eavesdropper writes: a path or a URL; empty: below the folder.
    """

    folder: Path
    pythons: Mapping[str, str]
    cast: dict[str, str]
    captures: str = ""
    _processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    _ports: dict[str, int] = field(default_factory=dict)
    _started: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.captures = self.captures or str(self.folder / "captures")
        random = chance(self.folder)
        self._ports = {name: free_port(random) for name in (COORDINATOR, EAVESDROPPER, *LEARNERS)}

    async def begin(self, rounds: int) -> None:
        """Start the services, and then the client, which starts the run."""
        (self.folder / "spec.yaml").write_text(SPEC.format(rounds=rounds), encoding="utf-8")
        for name in (EAVESDROPPER, COORDINATOR):
            await self._start(name)
        await asyncio.gather(*map(self._start, LEARNERS))
        await self._start(CLIENT)

    async def change(self, name: str, version: str, by: signal.Signals = signal.SIGTERM) -> None:
        """Tell a service to end, or kill it, and start a version of it in its place."""
        process = self._processes[name]
        process.send_signal(by)
        await asyncio.wait_for(process.wait(), PATIENCE_S)
        self.cast[name] = version
        await self._start(name)

    async def until(self, rounds: int) -> int:
        """Wait until the slowest learner has done so many rounds, or the run is over; returns how many it has done."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with suppress(grpc.aio.AioRpcError):  # the coordinator is being changed, or has no run yet
                    async for run in self._watched():
                        slowest = min(each.status.rounds_done for each in run.learners)
                        if slowest >= rounds or run.state in _ENDED:
                            return slowest
                await asyncio.sleep(_LOOK_S)

    async def over(self) -> int:
        """How the client ended."""
        return await asyncio.wait_for(self._processes[CLIENT].wait(), PATIENCE_S)

    async def end(self) -> None:
        """Tell all to end."""
        for names in (LEARNERS, (CLIENT, COORDINATOR), (EAVESDROPPER,)):
            here = [self._processes[name] for name in names if name in self._processes]
            for process in here:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
            await asyncio.gather(*(asyncio.wait_for(process.wait(), PATIENCE_S) for process in here))

    def words(self) -> str:
        """What went wrong by the logs of all: errors, and what the client said last."""
        logs = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(self.folder.glob("*.err"))]
        lines = [line for log in logs for line in log.splitlines() if re.search(r"error|refused|critical|bug", line)]
        client = (self.folder / f"{CLIENT}.out").read_text(encoding="utf-8", errors="replace")
        return "\n".join([*lines[-8:], *client.splitlines()[-4:]])

    async def _watched(self) -> AsyncIterator[coordinator_pb2.Run]:
        async with open_channel(
            f"127.0.0.1:{self._ports[COORDINATOR]}", Role.COORDINATOR, credentials=Credentials()
        ) as to:
            stub = coordinator_pb2_grpc.CoordinatorStub(to)
            runs = (await stub.ListRuns(coordinator_pb2.ListRunsRequest(), timeout=PATIENCE_S)).runs
            if runs:
                async for run in stub.WatchRun(coordinator_pb2.WatchRunRequest(run_id=runs[0].run_id)):
                    yield run

    async def _start(self, name: str) -> None:
        """Start one, and wait until it listens.

        Raises:
            RuntimeError: it ended instead.
        """
        self._started += 1
        log = self.folder / (name if name == CLIENT else f"{self._started:02d}-{name}-{self.cast[name]}")
        out, err = log.with_suffix(".out"), log.with_suffix(".err")
        piped = asyncio.subprocess.PIPE
        with out.open("wb") as to_out, err.open("wb") as to_err:
            process = self._processes[name] = await asyncio.create_subprocess_exec(
                *(self.pythons[self.cast[name]], "-m", "sottovoce_client", *self._command(name)),
                stdin=piped,  # it ends with this process, whatever happens
                stdout=to_out if name == CLIENT else piped,
                stderr=to_err,
            )
        if process.stdout is not None:
            line = await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)
            if not line:
                raise RuntimeError(f"{name} ({self.cast[name]}) did not start: {err.read_text(encoding='utf-8')}")
            json.loads(line)

    def _command(self, name: str) -> list[str]:
        at = {other: f"127.0.0.1:{port}" for other, port in self._ports.items()}
        if name == CLIENT:
            out = str(self.folder / "run")
            return ["run", str(self.folder / "spec.yaml"), "--coordinator", at[COORDINATOR], "--out", out]
        here = ["--listen", at[name], "--stop-with-stdin"]
        if name == EAVESDROPPER:
            return [name, *here, "--folder", self.captures]
        if name == COORDINATOR:
            return [name, *here, "--eavesdropper", at[EAVESDROPPER], "--state", str(self.folder / name)]
        where = ["--state", str(self.folder / "learners")]
        return ["learner", "--name", name, "--coordinator", at[COORDINATOR], *here, *where]
