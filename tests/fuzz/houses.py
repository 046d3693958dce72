"""The services as processes, hostile calls on their ports, and what must hold afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sottovoce_core.algorithms.interface import Message
from sottovoce_learner.config import LearnerConfig
from sottovoce_rpc.codec import RoundCodec, to_fields
from sottovoce_rpc.error_status import CallOutcome
from sottovoce_rpc.server import open_channel
from sottovoce_rpc.specs import compute_plan_hash, spec_from_wire, spec_to_wire
from sottovoce_wire.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    eavesdropper_pb2,
    eavesdropper_pb2_grpc,
    learner_pb2,
    learner_pb2_grpc,
)
from tests.examples import ALLOWING, small_spec
from tests.faults.processes import Process, chance, command, learners
from tests.fuzz.hostile import COORDINATOR, EAVESDROPPER, LEARNER, METHODS, Call, Known, call

MOST_MIB = 512
"""What no service may ever hold of memory, whatever it is sent."""
PATIENCE_S = 100.0
_AT_ONCE = 48
_NAMES, _IDLE = ("ann", "ben"), "cleo"
_FEATURES = 3
_HELD_OPEN = 16
_BAD_WORDS = ('"event": "bug"', '"event": "not caught"', "Traceback", '"event": "tasks do not end"')
_BAD_CODES = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)


@dataclass
class Houses:
    """Processes that are up, with a run of two learners under way, which waits for its records.

    Attributes:
        processes, addresses: by service.
        known: what a stranger may know.
        answers: how often calls of a method ended with a status.
    """

    processes: Mapping[str, Process]
    addresses: Mapping[str, str]
    known: Known
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)

    async def lot(self, house: str, seed: str, inputs: int) -> list[str]:
        """So many calls of a service, several at a time; returns what should not have come of them."""
        random, found = chance(seed), list[str]()
        async with contextlib.AsyncExitStack() as held:
            to = [await held.enter_async_context(open_channel(self.addresses[house])) for _ in range(4)]
            room = asyncio.Semaphore(_AT_ONCE)

            async def one(k: int, said: Call) -> None:
                async with room:
                    code, text = await _answered(to[k % len(to)], said)
                self.answers[said.method.rsplit("/", 1)[-1], code.name] += 1
                if code in _BAD_CODES:
                    sizes = [len(each) for each in said.payloads]
                    found.append(f"{house}, lot {seed}, input {k}: {said.method} {sizes}: {code}: {text[:300]}")

            if house == LEARNER:
                await self._stranger(to[0])
            calls = [call(random, house, self.known) for _ in range(inputs)]
            await asyncio.gather(
                self._strangers(house, random.randbytes(4_096)), *(one(*each) for each in enumerate(calls))
            )
        return found + await self._ended() + await self.broken()

    async def _ended(self) -> list[str]:
        """End what strangers have begun, and every run of theirs and every capture can be ended."""
        found = []
        async with open_channel(self.addresses[COORDINATOR]) as to, open_channel(self.addresses[EAVESDROPPER]) as ear:
            runs, captures = coordinator_pb2_grpc.CoordinatorStub(to), eavesdropper_pb2_grpc.EavesdropperStub(ear)
            listed = await runs.ListRuns(coordinator_pb2.ListRunsRequest(), timeout=PATIENCE_S)
            for run in listed.runs:
                if run.run_id != self.known.run_id and not run.HasField("ended_at"):
                    await runs.StopRun(coordinator_pb2.StopRunRequest(run_id=run.run_id), timeout=PATIENCE_S)
            opened = await captures.ListCaptures(eavesdropper_pb2.ListCapturesRequest(), timeout=PATIENCE_S)
            for capture in opened.captures:
                if capture.open and capture.capture_id != self.known.capture_id:
                    closing = eavesdropper_pb2.CloseCaptureRequest(capture_id=capture.capture_id)
                    try:
                        await captures.CloseCapture(closing, timeout=PATIENCE_S)
                    except grpc.aio.AioRpcError as error:
                        found.append(f"capture {capture.capture_id} is not closed: {error.code()}: {error.details()}")
        return found

    async def _stranger(self, to: grpc.aio.Channel) -> None:
        """Greet a learner as one who is no neighbour, as soon as it has the run."""
        greeting = learner_pb2.ExchangeMessage.FromString(self.known.hello)
        greeting.hello.learner = len(_NAMES)
        (path,) = (path for path, *_ in METHODS[LEARNER] if path.endswith("/Exchange"))
        said, code = Call(path, (greeting.SerializeToString(),), True, PATIENCE_S), grpc.StatusCode.FAILED_PRECONDITION
        async with asyncio.timeout(PATIENCE_S):
            while code is grpc.StatusCode.FAILED_PRECONDITION:  # it has no run yet
                code, _ = await _answered(to, said)
        self.answers["Exchange", code.name] += 1

    async def _strangers(self, house: str, noise: bytes) -> None:
        """Connections on which no gRPC is spoken: some say nothing, some anything."""
        host, port = self.addresses[house].rsplit(":", 1)
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(_HELD_OPEN)]
        greeting = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
        for k, (_, writer) in enumerate(opened):
            with contextlib.suppress(ConnectionError):
                writer.write((b"", noise[:500], greeting + noise[k * 200 : k * 200 + 200], greeting)[k % 4])
                await writer.drain()
        for _, writer in opened:
            writer.close()

    async def broken(self) -> list[str]:
        """What does not hold: every process lives, within its memory, answers, and has logged no bug."""
        found = []
        for house, process in self.processes.items():
            if process.code is not None:
                found.append(f"{house} has ended with {process.code}: {process.words[-2_000:]}")
                continue
            if (mib := _resident(process.pid)) > MOST_MIB:
                found.append(f"{house} holds {mib} MiB")
            found += [f"{house} has logged: {line[:600]}" for line in _lines(process) if _is_bad(line)]
            try:
                await _served(house, self.addresses[house])
            except grpc.aio.AioRpcError as error:
                found.append(f"{house} does not answer: {error.code()}: {error.details()}")
        return found

    async def again(self) -> None:
        """Begin a run anew, where somebody has ended the one before."""
        async with open_channel(self.addresses[COORDINATOR]) as to:
            stub = coordinator_pb2_grpc.CoordinatorStub(to)
            if self.known.run_id:
                asked = coordinator_pb2.GetRunRequest(run_id=self.known.run_id)
                with contextlib.suppress(grpc.aio.AioRpcError):  # it is forgotten
                    if not (await stub.GetRun(asked, timeout=PATIENCE_S)).HasField("ended_at"):
                        return
            spec = small_spec(1_000, list(_NAMES), capture="mirror", telemetry={"predict": True})
            wanted = coordinator_pb2.StartRunRequest(spec=spec_to_wire(spec), n_features=_FEATURES)
            run = await _started(stub, wanted)
            told = await stub.GetRun(coordinator_pb2.GetRunRequest(run_id=run.run_id), timeout=PATIENCE_S)
        self.known = _known(told)


async def _started(stub: Any, wanted: coordinator_pb2.StartRunRequest) -> coordinator_pb2.Run:
    """A run on learners that a hostile run may have just now."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                run: coordinator_pb2.Run = await stub.StartRun(wanted, timeout=PATIENCE_S)
                return run
            except grpc.aio.AioRpcError:
                listed = await stub.ListRuns(coordinator_pb2.ListRunsRequest(), timeout=PATIENCE_S)
                for each in listed.runs:
                    if not each.HasField("ended_at"):
                        await stub.StopRun(coordinator_pb2.StopRunRequest(run_id=each.run_id), timeout=PATIENCE_S)
                await asyncio.sleep(0.2)


def _known(run: coordinator_pb2.Run) -> Known:
    spec = spec_from_wire(run.spec, imports=False)
    spec = spec.model_copy(update={"topology": spec.topology.to_edge_list(len(_NAMES))})
    codec = RoundCodec({"y": (_FEATURES,)})
    hello = learner_pb2.Hello(
        run_id=run.run_id,
        plan_hash=compute_plan_hash(spec, run.n_features),
        learner=0,
        next_round=0,
        fields=to_fields(codec.shapes),
        incarnation=1,
    )
    greeting = learner_pb2.ExchangeMessage(hello=hello).SerializeToString()
    return Known(
        run.spec, run.run_id, run.capture_id, greeting, codec.encode(0, 0, Message({"y": np.zeros(_FEATURES)}))
    )


async def _answered(to: grpc.aio.Channel, said: Call) -> tuple[grpc.StatusCode, str]:
    """With what a call ends."""
    asked: Any = to.stream_stream(said.method)(timeout=said.deadline_s)
    ending = CallOutcome(asked)
    with contextlib.suppress(
        grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError
    ):  # it is over: its ending says why
        for each in said.payloads:
            await asked.write(each)
        if said.closes:
            await asked.done_writing()
        while await asked.read() is not grpc.aio.EOF:
            pass
    status = await ending.wait_for_status()
    return status.code(), status.details() or ""


async def _served(house: str, address: str) -> None:
    """Whoever asks is answered.

    Raises:
        AioRpcError: not within `PATIENCE_S`.
    """
    async with open_channel(address) as to:
        check: Any = health_pb2_grpc.HealthStub(to)
        await check.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        if house == COORDINATOR:
            runs = coordinator_pb2_grpc.CoordinatorStub(to)
            await runs.ListRuns(coordinator_pb2.ListRunsRequest(), timeout=PATIENCE_S)
        elif house == EAVESDROPPER:
            captures = eavesdropper_pb2_grpc.EavesdropperStub(to)
            await captures.ListCaptures(eavesdropper_pb2.ListCapturesRequest(), timeout=PATIENCE_S)
        else:
            own = learner_pb2_grpc.LearnerStub(to)
            await own.GetStatus(learner_pb2.GetStatusRequest(), timeout=PATIENCE_S)


def _resident(pid: int) -> int:
    """The most memory that a process has held, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) // 1024
    return 0


def _lines(process: Process) -> list[str]:
    return process.words.splitlines()


def _is_bad(line: str) -> bool:
    return any(words in line for words in _BAD_WORDS)


@asynccontextmanager
async def houses(folder: Path) -> AsyncIterator[Houses]:
    """All services, as processes, until the block ends."""
    processes: dict[str, Process] = {}
    try:
        here = ["--listen", "127.0.0.1:0"]
        processes[EAVESDROPPER] = Process(
            partial(command, ["eavesdropper", *here, "--folder", str(folder / "captures")]), folder / "eavesdropper"
        )
        assert await processes[EAVESDROPPER].up(), processes[EAVESDROPPER].words
        ear = ["--eavesdropper", processes[EAVESDROPPER].address, "--state", str(folder / "state")]
        processes[COORDINATOR] = Process(partial(command, ["coordinator", *here, *ear]), folder / "coordinator")
        assert await processes[COORDINATOR].up(), processes[COORDINATOR].words
        to, state = processes[COORDINATOR].address, folder / "learners"
        configs = [
            LearnerConfig(name, to, state_folder=state, policy=ALLOWING) for name in ("ben", "ann", _IDLE)
        ]  # ben is who is called
        processes[LEARNER] = Process(partial(learners, configs), folder / "learners-log")
        assert await processes[LEARNER].up(), processes[LEARNER].words
        up = Houses(processes, {house: process.address for house, process in processes.items()}, Known())
        await up.again()
        yield up
    finally:
        for process in processes.values():
            process.signal(signal.SIGTERM)
        await asyncio.gather(*(process.over() for process in processes.values()))


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of it.

    Attributes:
        broken: what did not hold; the first lot after which something did not was the last.
        answers: how often calls of a method ended with a status.
        mib: the most memory that each service has held.
    """

    broken: list[str]
    answers: Counter[tuple[str, str]]
    mib: dict[str, int]


async def fuzz(folder: Path, inputs: int, seed: int, lot: int = 250) -> Tried:
    """So many inputs for each service, in lots.

    Args:
        folder: for the files of the services.
        inputs: for each of them.
        seed: of what is said.
        lot: inputs after which all is looked at.
    """
    async with houses(folder) as up:
        broken: list[str] = []
        for first in range(0, inputs, lot):
            for house in up.processes:
                if not broken:
                    await up.again()
                    broken = await up.lot(house, f"{seed}-{house}-{first}", min(lot, inputs - first))
        alive = {house: each for house, each in up.processes.items() if each.code is None}
        return Tried(broken, up.answers, {house: _resident(each.pid) for house, each in alive.items()})
