"""Learners of real services that are broken: what they say beside their messages, when they say it, and whether they go on."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, cast

import grpc
import numpy as np

from sottovoce_core.algorithms.interface import ReceivedMessages
from sottovoce_core.arrays import Batch
from sottovoce_core.auditing.plan import AuditPlan
from sottovoce_core.errors import BudgetExhausted
from sottovoce_core.noise import NoiseSource, SeededNoise
from sottovoce_lab.catalogue import CATALOGUE
from sottovoce_lab.mutants import MethodOverride
from sottovoce_learner.assignment import RunAssignment
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.service import Learner
from sottovoce_learner.servicer import LearnerServicer
from sottovoce_rpc.access import Context, release_read_slot
from sottovoce_rpc.codec import from_tensor
from sottovoce_rpc.tasks import Tasks
from sottovoce_wire.v1 import coordinator_pb2, learner_pb2

_Metadata = tuple[tuple[str, str], ...]
_NoiseOf = Callable[[str, int], NoiseSource]
"""A learner's noise, from the run's name and its index."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The first record of a run, as its learner knows it, and the world that the run is in."""

    norm: float
    world: int


@dataclass(frozen=True, slots=True)
class _Ending:
    """How a learner ends a stream in the middle of a run; its neighbour opens another one."""

    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    trailers: _Metadata = ()


@dataclass(frozen=True, slots=True)
class ServiceMutant:
    """What is wrong with a learner of real services; what is left out is as it should be.

    Attributes:
        name: in a word or two.
        what: is wrong, in a few words.
        noise: where all learners' noise comes from.
        takes: called with every round's records, its number and the world before the audited learner learns them.
        greets: metadata that stand before its answers.
        pads: bytes that its hello is longer by.
        ends: how it ends its first stream; None: it does not.
        dials: connections to its neighbours that it opens when all is said, and drops.
        lost: whether a run's capture is lost, by its world.
        sure: it must be found; a busy machine may hide a delay.
    """

    name: str
    description: str
    build_noise: Callable[[AuditPlan], _NoiseOf] | None = None
    update_hook: Callable[[Batch, int, int], None] | None = None
    build_initial_metadata: Callable[[_Known], _Metadata] | None = None
    compute_hello_padding: Callable[[_Known], int] | None = None
    choose_stream_end: Callable[[_Known], _Ending | None] | None = None
    count_extra_connections: Callable[[_Known], int] | None = None
    is_capture_lost: Callable[[int], bool] | None = None
    must_be_found: bool = True

    @property
    def is_correct(self) -> bool:
        """Nothing is wrong."""
        return self == ServiceMutant(self.name, self.description)


# ---- the learner -----------------------------------------------------------------------------------------------------


class CustomNoiseLearner(Learner):
    """A learner whose noise comes from elsewhere."""

    def __init__(self, config: LearnerConfig, noise: _NoiseOf | None) -> None:
        super().__init__(config)
        self.world = 0  # of the run, as whoever makes it says
        self._other = noise

    def _build_noise(self, role: RunAssignment) -> NoiseSource:
        return super()._build_noise(role) if self._other is None else self._other(role.run_id, role.index)


class _Leaking(CustomNoiseLearner):
    """The learner that is audited."""

    def __init__(self, config: LearnerConfig, noise: _NoiseOf | None, broken: ServiceMutant) -> None:
        super().__init__(config, noise)
        self.broken = broken
        self.servicer = _LeakingFace(self)

    async def _prepare(self, run_id: str, told: coordinator_pb2.Assignment) -> None:
        await super()._prepare(run_id, told)
        assert self._session is not None  # noqa: S101 - it was made
        self.first: asyncio.Future[_Known] = asyncio.get_running_loop().create_future()
        self.halfway, self.ended, self._taken = asyncio.Event(), False, 0
        self._session.algorithm = _taking(self._session.algorithm, self._take)

    @property
    def introduced(self) -> bool:
        """True when it is in a run, and knows its neighbours."""
        return self._session is not None and self._session.plan.announced_rounds > 0

    def _take(self, batch: Batch) -> None:
        if self.broken.update_hook is not None:
            self.broken.update_hook(batch, self._taken, self.world)
        self._taken += 1
        assert self._session is not None  # noqa: S101 - it is its round
        rounds = self._session.assignment.spec.rounds
        if 2 * self._taken >= rounds:
            self.halfway.set()
        if self.broken.count_extra_connections is not None and self._taken == rounds:
            self._dial(self.broken.count_extra_connections(self.first.result()))

    def _dial(self, times: int) -> None:
        """Open connections to the neighbours whose streams this learner opens, and say nothing on them."""
        for address, _ in self._neighbour_tasks.values():
            host, _, port = address.rpartition(":")
            for _ in range(times):
                socket.create_connection((host, int(port))).close()


class _LeakingFace(LearnerServicer):
    """What it answers to feeders and neighbours."""

    def __init__(self, learner: _Leaking) -> None:
        super().__init__(learner.config, learner.require_session, lambda: learner.status)
        self._learner, self._broken = learner, learner.broken

    async def ingest(
        self, batches: AsyncIterator[learner_pb2.SampleBatch], context: Context
    ) -> AsyncIterator[learner_pb2.IngestReceipt]:
        async for receipt in super().ingest(self._looked_at(batches), context):
            yield receipt

    async def _looked_at(
        self, batches: AsyncIterator[learner_pb2.SampleBatch]
    ) -> AsyncIterator[learner_pb2.SampleBatch]:
        async for batch in batches:
            if not self._learner.first.done():
                norm = float(np.linalg.norm(from_tensor(batch.features)[0]))
                self._learner.first.set_result(_Known(norm, self._learner.world))
            yield batch

    async def exchange(self, requests: AsyncIterator[bytes], context: Context) -> None:
        broken, learner = self._broken, self._learner
        release_read_slot()  # what it leaks is known once its records have come, and they may be of the same caller
        if learner.introduced:
            if broken.compute_hello_padding is not None:
                context = _padded(context, broken.compute_hello_padding(await learner.first))
            if (
                broken.choose_stream_end is not None
                and not learner.ended
                and (ending := broken.choose_stream_end(await learner.first))
            ):
                await self._end_halfway(requests, context, ending)
                return
        await super().exchange(requests, context)

    async def _send_initial_metadata(self, context: Context) -> None:
        greets = self._broken.build_initial_metadata
        greeting = () if greets is None else greets(await self._learner.first)
        await context.send_initial_metadata(greeting)

    async def _end_halfway(self, requests: AsyncIterator[bytes], context: Context, ending: _Ending) -> None:
        async with Tasks() as tasks:
            serving = tasks.start(super().exchange(requests, context))
            halfway = tasks.start(self._learner.halfway.wait())
            await asyncio.wait([serving, halfway], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
                return
        self._learner.ended = True
        context.set_trailing_metadata(ending.trailers)
        await context.abort(ending.code)


def _taking(algorithm: Any, take: Callable[[Batch], None]) -> MethodOverride:
    """An algorithm whose records are seen before it learns them."""

    def update(state: Any, heard: ReceivedMessages, batch: Batch) -> Any:
        take(batch)
        return algorithm.update(state, heard, batch)

    return MethodOverride(algorithm, update=update)


def _padded(context: Context, size: int) -> Context:
    """A stream whose first message has a field more, which nobody knows."""
    left = [b"\xfa\x07" + bytes([size]) + bytes(size)]  # field 127, of so many bytes

    async def write(message: bytes) -> None:
        await context.write(message + (left.pop() if left else b""))

    return cast(Context, MethodOverride(context, write=write))


def build_learners(
    broken: ServiceMutant, plan: AuditPlan, config: Callable[[str], LearnerConfig]
) -> list[CustomNoiseLearner]:
    """All learners of a run; what is wrong beside the noise is wrong with the audited one.

    Args:
        broken: how.
        plan: the audit.
        config: of the learner of a name.
    """
    noise = None if broken.build_noise is None else broken.build_noise(plan)
    return [
        _Leaking(config(name), noise, broken)
        if index == plan.worlds.learner
        else CustomNoiseLearner(config(name), noise)
        for index, name in enumerate(plan.run.spec.names)
    ]


# ---- breaks ----------------------------------------------------------------------------------------------------------


def _as_simulated(name: str) -> Callable[[AuditPlan], _NoiseOf]:
    """The noise of a broken learner of the catalogue."""
    mutant = next(each for each in CATALOGUE if each.name == name)

    def noise(plan: AuditPlan) -> _NoiseOf:
        source = mutant.build_fault(plan).noise
        return lambda run_id, learner: source(np.random.SeedSequence())

    return noise


def _one_seed(plan: AuditPlan) -> _NoiseOf:
    """Learners draw what their neighbour draws: the seed is the run's."""
    return lambda run_id, learner: SeededNoise(
        np.random.SeedSequence(int.from_bytes(hashlib.sha256(run_id.encode()).digest()))
    )


def _waits(milliseconds: float, size: Callable[[Batch], float]) -> Callable[[Batch, int, int], None]:
    """Take longer over every round, by a size of its records."""
    return lambda batch, t, world: time.sleep(milliseconds * size(batch) / 1e3)


def _norm(batch: Batch) -> float:
    return float(np.linalg.norm(batch.features))


def _raises(error: Callable[[], Exception], share: float) -> Callable[[Batch, int, int], None]:
    """Fail in some runs of one world, after the first message."""

    def take(batch: Batch, t: int, world: int) -> None:
        if t == 0 and world == 1 and random.random() < share:  # noqa: S311 - no secret
            raise error()

    return take


def _in_tenths(known: _Known) -> _Metadata:
    return (("x-norm", f"{known.norm:.1f}"),)


_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)

NETWORK_MUTANTS = (
    ServiceMutant("correct", "nothing"),
    ServiceMutant("half the noise", "noise of half its scale", build_noise=_as_simulated("half the noise")),
    ServiceMutant("0.9 of the scale", "noise of another scale", build_noise=_as_simulated("0.9 of the scale")),
    ServiceMutant("float32", "noise of 24 significant bits", build_noise=_as_simulated("float32")),
    ServiceMutant(
        "two rounds later", "noise said again two rounds later", build_noise=_as_simulated("two rounds later")
    ),
    ServiceMutant("one seed", "a learner draws what its neighbour draws", build_noise=_one_seed),
    ServiceMutant(
        "20 ms a norm", "rounds last longer by a record's norm", update_hook=_waits(20.0, _norm), must_be_found=False
    ),
    ServiceMutant(
        "5 ms a norm", "rounds last longer by a record's norm", update_hook=_waits(5.0, _norm), must_be_found=False
    ),
    ServiceMutant(
        "20 ms a label",
        "rounds last longer by a record's label",
        update_hook=_waits(20.0, lambda batch: float(batch.labels.max())),
        must_be_found=False,
    ),
    ServiceMutant("metadata", "a norm in tenths before the answers", build_initial_metadata=_in_tenths),
    ServiceMutant(
        "length", "a hello is longer by a record's norm", compute_hello_padding=lambda known: int(10.0 * known.norm)
    ),
    ServiceMutant(
        "trailers",
        "a norm in tenths behind a stream that ends",
        choose_stream_end=lambda known: _Ending(trailers=_in_tenths(known)),
    ),
    ServiceMutant(
        "status",
        "a stream ends with another code in one world",
        choose_stream_end=lambda known: _Ending(_CODES[known.world]),
    ),
    ServiceMutant(
        "reconnect",
        "a stream ends early in one world",
        choose_stream_end=lambda known: _Ending() if known.world == 1 else None,
    ),
    ServiceMutant("50 % fail", "runs of one world fail", update_hook=_raises(RuntimeError, 0.5)),
    ServiceMutant("20 % fail", "runs of one world fail", update_hook=_raises(RuntimeError, 0.2)),
    ServiceMutant(
        "50 % end early",
        "a learner of one world falls silent",
        update_hook=_raises(lambda: BudgetExhausted("the next message would be too dear"), 0.5),
    ),
    ServiceMutant(
        "20 % are lost",
        "captures of one world are missing",
        is_capture_lost=lambda world: world == 1 and random.random() < 0.2,  # noqa: S311 - no secret
    ),
)
"""Learners of real services, a correct one among them."""

WIRETAP_MUTANTS = (
    ServiceMutant("correct", "nothing"),
    ServiceMutant(
        "another connection",
        "opened and dropped after a loud first record",
        count_extra_connections=lambda known: int(known.norm > 0.5),
    ),
)
"""Learners of real services whose channels are encrypted; what is wrong passes beside gRPC, where a relay hears nothing."""
