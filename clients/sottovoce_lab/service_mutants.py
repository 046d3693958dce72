"""Mutants of real services: faulty learners that leak by metadata, sizes, times, connections, or the end of their streams."""

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
_NoiseFactory = Callable[[str, int], NoiseSource]
"""Factory of a learner's noise source, from the run id and the learner's index."""


@dataclass(frozen=True, slots=True)
class _RunSecret:
    """Norm of the first record of a run, and the world of the run."""

    norm: float
    world: int


@dataclass(frozen=True, slots=True)
class _StreamEnd:
    """Status and trailers with which a learner ends a stream in the middle of a run; its neighbour opens another one."""

    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    trailers: _Metadata = ()


@dataclass(frozen=True, slots=True)
class ServiceMutant:
    """A learner of real services with a fault; a field that is not given means correct behaviour.

    Attributes:
        name: one or two words.
        description: the fault, in a few words.
        build_noise: builds the noise factory of all learners.
        update_hook: called with the records of every round, its number and the world, before the audited learner's update.
        build_initial_metadata: builds the initial metadata of its answers.
        compute_hello_padding: computes additional bytes of its hello message.
        choose_stream_end: chooses how it ends its first stream; None: it does not.
        count_extra_connections: counts connections to its neighbours that it opens and drops after the last message.
        is_capture_lost: whether a run's capture is lost, by its world.
        must_be_found: whether a miss counts; a busy machine may hide a delay.
    """

    name: str
    description: str
    build_noise: Callable[[AuditPlan], _NoiseFactory] | None = None
    update_hook: Callable[[Batch, int, int], None] | None = None
    build_initial_metadata: Callable[[_RunSecret], _Metadata] | None = None
    compute_hello_padding: Callable[[_RunSecret], int] | None = None
    choose_stream_end: Callable[[_RunSecret], _StreamEnd | None] | None = None
    count_extra_connections: Callable[[_RunSecret], int] | None = None
    is_capture_lost: Callable[[int], bool] | None = None
    must_be_found: bool = True

    @property
    def is_correct(self) -> bool:
        """True if there is no fault."""
        return self == ServiceMutant(self.name, self.description)


# ---- the learner -----------------------------------------------------------------------------------------------------


class CustomNoiseLearner(Learner):
    """A learner with another noise source."""

    def __init__(self, config: LearnerConfig, noise: _NoiseFactory | None) -> None:
        super().__init__(config)
        self.world = 0  # set before every run
        self._noise_factory = noise

    def _build_noise(self, role: RunAssignment) -> NoiseSource:
        return (
            super()._build_noise(role) if self._noise_factory is None else self._noise_factory(role.run_id, role.index)
        )


class _LeakingLearner(CustomNoiseLearner):
    """The audited learner."""

    def __init__(self, config: LearnerConfig, noise: _NoiseFactory | None, mutant: ServiceMutant) -> None:
        super().__init__(config, noise)
        self.mutant = mutant
        self.servicer = _LeakingServicer(self)

    async def _prepare(self, run_id: str, assignment: coordinator_pb2.Assignment) -> None:
        await super()._prepare(run_id, assignment)
        assert self._session is not None  # noqa: S101 - set by super()
        self.first: asyncio.Future[_RunSecret] = asyncio.get_running_loop().create_future()
        self.halfway, self.has_ended_stream, self._update_count = asyncio.Event(), False, 0
        self._session.algorithm = _hook_updates(self._session.algorithm, self._on_update)

    @property
    def is_introduced(self) -> bool:
        """True if it is in a run and knows its neighbours."""
        return self._session is not None and self._session.plan.announced_rounds > 0

    def _on_update(self, batch: Batch) -> None:
        if self.mutant.update_hook is not None:
            self.mutant.update_hook(batch, self._update_count, self.world)
        self._update_count += 1
        assert self._session is not None  # noqa: S101 - updates happen in a session
        rounds = self._session.assignment.spec.rounds
        if 2 * self._update_count >= rounds:
            self.halfway.set()
        if self.mutant.count_extra_connections is not None and self._update_count == rounds:
            self._open_connections(self.mutant.count_extra_connections(self.first.result()))

    def _open_connections(self, count: int) -> None:
        """Open connections to the neighbours whose streams this learner opens, and close them unused."""
        for address, _ in self._neighbour_tasks.values():
            host, _, port = address.rpartition(":")
            for _ in range(count):
                socket.create_connection((host, int(port))).close()


class _LeakingServicer(LearnerServicer):
    """Servicer of the audited learner, for feeders and neighbours."""

    def __init__(self, learner: _LeakingLearner) -> None:
        super().__init__(learner.config, learner.require_session, lambda: learner.status)
        self._learner, self._mutant = learner, learner.mutant

    async def ingest(
        self, batches: AsyncIterator[learner_pb2.SampleBatch], context: Context
    ) -> AsyncIterator[learner_pb2.IngestReceipt]:
        async for receipt in super().ingest(self._observe(batches), context):
            yield receipt

    async def _observe(self, batches: AsyncIterator[learner_pb2.SampleBatch]) -> AsyncIterator[learner_pb2.SampleBatch]:
        async for batch in batches:
            if not self._learner.first.done():
                norm = float(np.linalg.norm(from_tensor(batch.features)[0]))
                self._learner.first.set_result(_RunSecret(norm, self._learner.world))
            yield batch

    async def exchange(self, requests: AsyncIterator[bytes], context: Context) -> None:
        mutant, learner = self._mutant, self._learner
        release_read_slot()  # the leak is known once records have arrived, and they may come from the same caller
        if learner.is_introduced:
            if mutant.compute_hello_padding is not None:
                context = _pad_first_message(context, mutant.compute_hello_padding(await learner.first))
            if (
                mutant.choose_stream_end is not None
                and not learner.has_ended_stream
                and (end := mutant.choose_stream_end(await learner.first))
            ):
                await self._end_halfway(requests, context, end)
                return
        await super().exchange(requests, context)

    async def _send_initial_metadata(self, context: Context) -> None:
        build_metadata = self._mutant.build_initial_metadata
        metadata = () if build_metadata is None else build_metadata(await self._learner.first)
        await context.send_initial_metadata(metadata)

    async def _end_halfway(self, requests: AsyncIterator[bytes], context: Context, end: _StreamEnd) -> None:
        async with Tasks() as tasks:
            serving = tasks.start(super().exchange(requests, context))
            halfway = tasks.start(self._learner.halfway.wait())
            await asyncio.wait([serving, halfway], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
                return
        self._learner.has_ended_stream = True
        context.set_trailing_metadata(end.trailers)
        await context.abort(end.code)


def _hook_updates(algorithm: Any, hook: Callable[[Batch], None]) -> MethodOverride:
    """Call a hook with the records of every round before the algorithm's update."""

    def update(state: Any, received: ReceivedMessages, batch: Batch) -> Any:
        hook(batch)
        return algorithm.update(state, received, batch)

    return MethodOverride(algorithm, update=update)


def _pad_first_message(context: Context, size: int) -> Context:
    """Add an unknown field to the first message of a stream."""
    padding = [b"\xfa\x07" + bytes([size]) + bytes(size)]  # field 127 with `size` bytes

    async def write(message: bytes) -> None:
        await context.write(message + (padding.pop() if padding else b""))

    return cast(Context, MethodOverride(context, write=write))


def build_learners(
    mutant: ServiceMutant, plan: AuditPlan, config: Callable[[str], LearnerConfig]
) -> list[CustomNoiseLearner]:
    """Build all learners of a run; faults other than noise apply to the audited one alone.

    Args:
        mutant: the fault.
        plan: the audit plan.
        config: builds the configuration of a learner, from its name.
    """
    noise = None if mutant.build_noise is None else mutant.build_noise(plan)
    return [
        _LeakingLearner(config(name), noise, mutant)
        if index == plan.worlds.learner
        else CustomNoiseLearner(config(name), noise)
        for index, name in enumerate(plan.run.spec.names)
    ]


# ---- mutants ---------------------------------------------------------------------------------------------------------


def _take_noise_of(name: str) -> Callable[[AuditPlan], _NoiseFactory]:
    """Take the noise of a mutant of the catalogue."""
    mutant = next(each for each in CATALOGUE if each.name == name)

    def build_noise(plan: AuditPlan) -> _NoiseFactory:
        source = mutant.build_fault(plan).noise
        return lambda run_id, learner: source(np.random.SeedSequence())

    return build_noise


def _share_seed(plan: AuditPlan) -> _NoiseFactory:
    """Seed all learners by the run's id, so that neighbours draw the same noise."""
    return lambda run_id, learner: SeededNoise(
        np.random.SeedSequence(int.from_bytes(hashlib.sha256(run_id.encode()).digest()))
    )


def _delay_updates(milliseconds: float, measure: Callable[[Batch], float]) -> Callable[[Batch, int, int], None]:
    """Delay every round in proportion to a measure of its records."""
    return lambda batch, t, world: time.sleep(milliseconds * measure(batch) / 1e3)


def _compute_norm(batch: Batch) -> float:
    return float(np.linalg.norm(batch.features))


def _fail_randomly(error: Callable[[], Exception], share: float) -> Callable[[Batch, int, int], None]:
    """Fail in a fraction of the runs of world 1, after the first message."""

    def fail(batch: Batch, t: int, world: int) -> None:
        if t == 0 and world == 1 and random.random() < share:  # noqa: S311 - no secret
            raise error()

    return fail


def _build_norm_metadata(secret: _RunSecret) -> _Metadata:
    return (("x-norm", f"{secret.norm:.1f}"),)


_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)

NETWORK_MUTANTS = (
    ServiceMutant("correct", "nothing"),
    ServiceMutant("half the noise", "noise of half its scale", build_noise=_take_noise_of("half the noise")),
    ServiceMutant("0.9 of the scale", "noise of another scale", build_noise=_take_noise_of("0.9 of the scale")),
    ServiceMutant("float32", "noise of 24 significant bits", build_noise=_take_noise_of("float32")),
    ServiceMutant(
        "two rounds later", "noise repeated two rounds later", build_noise=_take_noise_of("two rounds later")
    ),
    ServiceMutant("one seed", "a learner draws what its neighbour draws", build_noise=_share_seed),
    ServiceMutant(
        "20 ms a norm",
        "rounds last longer by a record's norm",
        update_hook=_delay_updates(20.0, _compute_norm),
        must_be_found=False,
    ),
    ServiceMutant(
        "5 ms a norm",
        "rounds last longer by a record's norm",
        update_hook=_delay_updates(5.0, _compute_norm),
        must_be_found=False,
    ),
    ServiceMutant(
        "20 ms a label",
        "rounds last longer by a record's label",
        update_hook=_delay_updates(20.0, lambda batch: float(batch.labels.max())),
        must_be_found=False,
    ),
    ServiceMutant("metadata", "a norm in tenths in initial metadata", build_initial_metadata=_build_norm_metadata),
    ServiceMutant(
        "length", "a hello is longer by a record's norm", compute_hello_padding=lambda secret: int(10.0 * secret.norm)
    ),
    ServiceMutant(
        "trailers",
        "a norm in tenths in the trailers of a stream",
        choose_stream_end=lambda secret: _StreamEnd(trailers=_build_norm_metadata(secret)),
    ),
    ServiceMutant(
        "status",
        "a stream ends with another code in one world",
        choose_stream_end=lambda secret: _StreamEnd(_CODES[secret.world]),
    ),
    ServiceMutant(
        "reconnect",
        "a stream ends early in one world",
        choose_stream_end=lambda secret: _StreamEnd() if secret.world == 1 else None,
    ),
    ServiceMutant("50 % fail", "runs of one world fail", update_hook=_fail_randomly(RuntimeError, 0.5)),
    ServiceMutant("20 % fail", "runs of one world fail", update_hook=_fail_randomly(RuntimeError, 0.2)),
    ServiceMutant(
        "50 % end early",
        "a learner of one world stops early",
        update_hook=_fail_randomly(lambda: BudgetExhausted("the next message would exceed the budget"), 0.5),
    ),
    ServiceMutant(
        "20 % are lost",
        "captures of one world are missing",
        is_capture_lost=lambda world: world == 1 and random.random() < 0.2,  # noqa: S311 - no secret
    ),
)
"""Mutants of real services, a correct one among them."""

WIRETAP_MUTANTS = (
    ServiceMutant("correct", "nothing"),
    ServiceMutant(
        "another connection",
        "opened and dropped after a first record of large norm",
        count_extra_connections=lambda secret: int(secret.norm > 0.5),
    ),
)
"""Mutants of real services with encrypted channels; the fault is outside gRPC, so a relay does not record it."""
