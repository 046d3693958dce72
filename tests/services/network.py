"""Coordinator, learners and eavesdropper in one event loop, over real gRPC on loopback."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest

from sottovoce_client.runs.feeder import feed
from sottovoce_client.runs.run_client import Outcome, run_on_services
from sottovoce_coordinator.run_controller import RunController
from sottovoce_coordinator.run_registry import ManagedRun
from sottovoce_coordinator.service import Coordinator, CoordinatorConfig
from sottovoce_core.data import PlacedData
from sottovoce_core.runs.policy import Policy
from sottovoce_core.spec import ClockSpec, RunSpec
from sottovoce_eavesdropper.service import Eavesdropper, EavesdropperConfig
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.peers.in_process import InProcessTransport
from sottovoce_learner.progress import TimedWait
from sottovoce_learner.service import Learner
from sottovoce_learner.storage.ledger import StoredState
from sottovoce_learner.storage.state_folder import LearnerPaths
from sottovoce_learner.storage.wal import EntryKind, RoundPayload
from sottovoce_learner.tracing import Tracing
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.error_status import CallOutcome
from sottovoce_rpc.learner_status import LearnerState, LearnerStatus, WaitCause
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import open_channel
from sottovoce_rpc.specs import spec_to_wire
from sottovoce_rpc.tasks import Tasks
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc, learner_pb2, learner_pb2_grpc
from tests.examples import ALLOWING
from tests.services.identities import Issuing

PATIENCE_S = 100.0
"""Longest that a test waits for something that must happen."""


OPERATOR = "operator/alice"
_LIMIT_S = TimedWait.compute_limit_s


def credentials_of(identities: Issuing | None, whom: str) -> Credentials:
    """Of `role/name`, where channels are encrypted."""
    return Credentials() if identities is None else identities.of(whom)


@dataclass
class Network:
    """Services that are up.

    Attributes:
        folder: for journals and captures.
        coordinator, eavesdropper: addresses.
        identities: of all, where channels are encrypted.
        learners: by name.
        addresses: of the learners, by name.
        owners: whom their owners name.
        budget: epsilon in all runs that the owners of learners that join from now on allow.
        policy: what they allow else.
        keep_log: whether they keep their logs.
        noise_seed: that all their noise follows from; None: it is the operating system's.
        tracing: sends spans of their rounds.
        nearby: the process that they share; None: each is as in one of its own.
    """

    folder: Path
    coordinator: str
    eavesdropper: str
    identities: Issuing | None = None
    learners: dict[str, Learner] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    owners: tuple[str, ...] = (OPERATOR,)
    budget: float | None = None
    policy: Policy = ALLOWING
    keep_log: bool = False
    noise_seed: str | None = None
    tracing: Tracing | None = None
    nearby: InProcessTransport | None = None
    coordinating: Coordinator | None = None
    eavesdropping: Eavesdropper | None = None
    _tasks: Tasks = field(default_factory=Tasks)
    _following: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def join(self, name: str, noise: Path | None = None) -> None:
        """Start a learner and let it follow the coordinator."""
        state = self.folder / "journals"
        learner = Learner(
            LearnerConfig(
                name,
                self.coordinator,
                state_folder=state,
                recorded_noise=noise,
                allow_imports=True,
                budget=self.budget,
                credentials=credentials_of(self.identities, f"learner/{name}"),
                owners=self.owners,
                policy=self.policy,
                keep_log=self.keep_log,
                noise_seed=self.noise_seed,
            ),
            self.tracing,
            self.nearby,
        )
        self.addresses[name] = await learner.start()
        self.learners[name] = learner
        self.follow(name)

    @property
    def operator(self) -> Credentials:
        """Of who starts runs, and owns all learners."""
        return credentials_of(self.identities, OPERATOR)

    def _to_coordinator(self) -> grpc.aio.Channel:
        return open_channel(self.coordinator, Role.COORDINATOR, credentials=self.operator)

    def follow(self, name: str) -> None:
        """Let a learner follow the coordinator."""
        self._following[name] = self._tasks.start(self.learners[name].follow(self.addresses[name]))

    async def leave(self, name: str) -> None:
        """Stop a learner as SIGTERM does."""
        self._following.pop(name).cancel()
        await self.learners.pop(name).stop()

    async def start(self, spec: RunSpec, n_features: int) -> coordinator_pb2.Run:
        """Start a run."""
        async with self._to_coordinator() as to:
            request = coordinator_pb2.StartRunRequest(spec=spec_to_wire(spec), n_features=n_features)
            return await coordinator_pb2_grpc.CoordinatorStub(to).StartRun(request, timeout=PATIENCE_S)

    async def start_another(self, spec: RunSpec, n_features: int) -> coordinator_pb2.Run:
        """Start a run, and wait until its learners have it: until then they are in the one before."""
        run = await self.start(spec, n_features)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if {self.learners[name].status.run_id for name in spec.names} == {run.run_id}:
                    return run
                await asyncio.sleep(0)

    async def run(self, spec: RunSpec, data: PlacedData, stop: asyncio.Event | None = None, **more: Any) -> Outcome:
        """Run to the end, as the client does."""
        more = {"credentials": self.operator, **more}
        running = run_on_services(self.coordinator, spec, data, lambda progress, state: None, stop, **more)
        return await asyncio.wait_for(running, PATIENCE_S)

    async def feed(self, run_id: str, spec: RunSpec, data: PlacedData, *, but: Sequence[str] = ()) -> None:
        """Feed all learners, but for those named."""
        await asyncio.gather(
            *(
                feed(self.addresses[name], run_id, own, learner=name, credentials=self.operator)
                for name, own in zip(spec.names, data.learners, strict=True)
                if name not in but
            )
        )

    async def until_gone(self, name: str) -> None:
        """Wait until the coordinator has noticed that a learner left."""
        assert self.coordinating is not None
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if name not in self.coordinating._learners:
                    return
                await asyncio.sleep(0.01)

    async def until_here(self, name: str) -> None:
        """Wait until a learner has joined."""
        assert self.coordinating is not None
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if name in self.coordinating._learners:
                    return
                await asyncio.sleep(0.01)

    async def cut_coordinator(self) -> Coordinator:
        """End the coordinator as if it were killed: it tells nobody, and writes nothing."""
        old = self.coordinating
        assert old is not None and old.server is not None
        await old._tasks.end()
        await old.server.server.stop(None)
        old._store.close()
        return old

    async def restart_coordinator(self, *, lose: bool = False) -> None:
        """End the coordinator as if it were killed: it tells nobody, and writes nothing; another takes its place.

        Args:
            lose: its state folder is lost with it.
        """
        old = await self.cut_coordinator()
        if lose and old.config.state is not None:
            shutil.rmtree(old.config.state, ignore_errors=True)
        self.coordinating = Coordinator(replace(old.config, listen=self.coordinator))
        assert await self.coordinating.start() == self.coordinator

    async def watch(self, run_id: str) -> AsyncIterator[coordinator_pb2.Run]:
        """The run as it stands, until its end."""
        async with self._to_coordinator() as to:
            request = coordinator_pb2.WatchRunRequest(run_id=run_id)
            async for view in coordinator_pb2_grpc.CoordinatorStub(to).WatchRun(request, timeout=PATIENCE_S):
                yield view

    async def end(self, run_id: str) -> coordinator_pb2.Run:
        """The last word on a run."""
        last = None
        async for view in self.watch(run_id):
            last = view
        assert last is not None
        return last

    async def status(self, name: str) -> LearnerStatus:
        """What a learner says of itself."""
        async with open_channel(self.addresses[name], Role.LEARNER, name, credentials=self.operator) as to:
            stub = learner_pb2_grpc.LearnerStub(to)
            answer = await stub.GetStatus(learner_pb2.GetStatusRequest(), timeout=PATIENCE_S)
            return LearnerStatus.from_wire(answer.status)

    async def until(self, name: str, state: LearnerState, rounds: int = 0) -> None:
        """Wait until a learner is in a state, with so many rounds done.

        Looked at every millisecond, which no round is done in: a short run may be over before a call has come back.
        """
        async with asyncio.timeout(PATIENCE_S):
            while True:
                status = self.learners[name].status
                if status.state is state and status.rounds_done >= rounds:
                    return
                await asyncio.sleep(0.001)


@asynccontextmanager
async def network(
    folder: Path,
    names: Sequence[str],
    *,
    noise: Path | None = None,
    durable: bool = False,
    identities: Issuing | None = None,
    workers: int = 0,
    remote_workers: int = 0,
) -> AsyncIterator[Network]:
    """All services for learners of these names; edges are served by processes of the eavesdropper, or by workers that join."""
    own, captures = credentials_of(identities, "eavesdropper/ear"), folder / "captures"
    eavesdropper = Eavesdropper(
        EavesdropperConfig(
            folder=captures, allow_imports=True, credentials=own, workers=workers, remote_workers=remote_workers
        )
    )
    state, own = folder / "coordinator" if durable else None, credentials_of(identities, "coordinator/main")
    config = CoordinatorConfig(
        eavesdropper=await eavesdropper.start(), allow_imports=True, state=state, credentials=own
    )
    coordinator = Coordinator(config)
    up = Network(folder, await coordinator.start(), eavesdropper.address, identities)
    up.coordinating, up.eavesdropping = coordinator, eavesdropper
    try:
        for name in names:
            await up.join(name, noise)
        yield up
    finally:
        for name in list(up.learners):
            await up.leave(name)
        await up.coordinating.stop()
        await up.eavesdropping.stop()
        await up._tasks.end()


def missed_soon(patch: pytest.MonkeyPatch, seconds: float = 0.2, **later: float) -> None:
    """Who is gone from now on misses its deadline in a moment, or so many seconds later. Others have those of their run."""

    async def soon(self: RunController, course: ManagedRun, index: int, since: datetime) -> None:
        await asyncio.sleep(seconds + later.get(course.machine.run.spec.names[index], 0.0))
        course.machine.handle_deadline(index, since)
        self._handle_consequences(course)

    patch.setattr(RunController, "_watch_deadline", soon)


def given_up_soon(patch: pytest.MonkeyPatch, *causes: WaitCause) -> None:
    """Limit the waits of learners to a second from now on, all of them or those for the given causes."""

    def soon(own: TimedWait, clock: ClockSpec) -> float:
        return min(1.0, _LIMIT_S(own, clock)) if own.cause in (causes or WaitCause) else _LIMIT_S(own, clock)

    patch.setattr(TimedWait, "compute_limit_s", soon)


def said_rounds(state: Path, name: str) -> list[tuple[int, RoundPayload]]:
    """What a learner's log has of the rounds of its last run, the closing entry included."""
    reading = StoredState.read(LearnerPaths(state, name)).log
    assert reading is not None
    kinds = (EntryKind.ROUND, EntryKind.CLOSE)
    return [(entry.round, RoundPayload.decode(entry.body)) for entry in reading.entries if entry.kind in kinds]


async def refused(call: Any) -> grpc.aio.AioRpcError:
    """The status with which a call ends."""
    ending = CallOutcome(call) if isinstance(call, grpc.aio.Call) else None
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        await call
    except grpc.aio.AioRpcError as error:
        return error if ending is None else await ending.wait_for_status()
    raise AssertionError("the call was not refused")


async def until_charged(files: LearnerPaths) -> None:
    """Wait until the ledger says what the last run has cost, and the files of the run are gone."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if StoredState.read(files).open_entry is None and not files.list_log_folders():
                return
            await asyncio.sleep(0.01)
