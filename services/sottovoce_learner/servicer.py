"""The learner's gRPC face: what its neighbours, its owner and whoever brings records may ask of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from operator import methodcaller
from typing import Any, TypeVar

import grpc
import structlog

from sottovoce_core.errors import FailedPrecondition, PermissionDenied, SottovoceError, Unavailable
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.peers import connection
from sottovoce_learner.peers.in_process import InProcessStream
from sottovoce_learner.session import Session
from sottovoce_learner.storage.store import Ledger
from sottovoce_rpc import principals
from sottovoce_rpc.access import Context, StreamLimit
from sottovoce_rpc.codec import from_tensor, to_tensor
from sottovoce_rpc.error_status import abort_on_error
from sottovoce_rpc.learner_status import LearnerStatus
from sottovoce_rpc.logs import describe_failure
from sottovoce_rpc.specs import spec_to_wire
from sottovoce_rpc.tasks import Tasks, run_in_background
from sottovoce_wire.v1 import learner_pb2

log = structlog.get_logger()

SERVICE_NAME = "sottovoce_wire.v1.Learner"
_BATCHES_PER_RECEIPT, _PAUSE_TIMEOUT_S = 16, 0.002
"""Batches between receipts on a stream that does not pause, and how long a pause is."""

MAX_RECORD_STREAMS = 64
"""Streams of records of one caller at a time; those without an identity are one."""

T = TypeVar("T")


class LearnerServicer:
    """What may be asked of a learner, and by whom.

    Args:
        config: of the learner.
        in_run: its session in the run of now, or FailedPrecondition.
        status: of now.
    """

    def __init__(
        self, config: LearnerConfig, in_run: Callable[[], Session], status: Callable[[], LearnerStatus]
    ) -> None:
        self._config, self._in_run, self._now = config, in_run, status
        self._feeds = StreamLimit(MAX_RECORD_STREAMS, "records")

    def register(self, server: grpc.aio.Server) -> None:
        """By hand rather than by the generated function: Exchange passes bytes through, encoded once for all neighbours."""
        pb, write = learner_pb2, methodcaller("SerializeToString")
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Exchange": grpc.stream_stream_rpc_method_handler(self.exchange),
            "Ingest": grpc.stream_stream_rpc_method_handler(self.ingest, pb.SampleBatch.FromString, write),
            "GetIntake": grpc.unary_unary_rpc_method_handler(self.intake, pb.GetIntakeRequest.FromString, write),
            "Predict": grpc.unary_unary_rpc_method_handler(self.predict, pb.PredictRequest.FromString, write),
            "GetLedger": grpc.unary_unary_rpc_method_handler(self.ledger, pb.GetLedgerRequest.FromString, write),
            "GetStatus": grpc.unary_unary_rpc_method_handler(self.status, pb.GetStatusRequest.FromString, write),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    @property
    def _owners(self) -> frozenset[str]:
        return frozenset((f"{principals.Role.LEARNER}/{self._config.name}", *self._config.owners))

    @property
    def _feeders(self) -> frozenset[str]:
        return self._owners | {f"{principals.Role.FEEDER}/{self._config.name}", *self._config.feeders}

    def _require(self, context: Context, names: frozenset[str], *roles: principals.Role) -> None:
        """Hold a call to whom its owner has named.

        Raises:
            PermissionDenied: the caller is not one of them, and has none of these roles in this learner's domain.
        """
        caller = self._config.credentials.identify_caller(context)
        if caller is not None and not caller.is_one_of(*names) and (caller.role not in roles or caller.is_foreign):
            options = " or ".join([f"--owner {caller}", *([f"--feeder {caller}"] if names == self._feeders else [])])
            raise PermissionDenied(
                f"{caller} is not one whom the owner of {self._config.name!r} has named for this: {options} at that learner"
            )

    async def exchange(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """A stream that a neighbour opens, or a relay for it."""
        async with abort_on_error(context):
            session = self._announced()
            await self._open(context)
            await self._accept(session, context, self._config.credentials.identify_caller(context))

    async def accept_in_process(self, stream: InProcessStream) -> None:
        """A stream that a neighbour in this process opens.

        Raises:
            SottovoceError: what the neighbour is told.
        """
        try:
            await self._accept(self._announced(), stream, None)
        except SottovoceError:
            raise
        except Exception as error:  # noqa: BLE001 - as a call is answered: a bug here is none of the neighbour's
            log.error("bug", **describe_failure(error))
            raise Unavailable("an internal error; the log says where") from None

    def _announced(self) -> Session:
        session = self._in_run()
        if not session.plan.announced_rounds:
            raise FailedPrecondition("this learner does not know its neighbours yet")
        return session

    async def _accept(
        self, session: Session, stream: Context | InProcessStream, caller: principals.Principal | None
    ) -> None:
        async with run_in_background(_replacement(session)):
            await connection.accept(session, stream, caller)

    async def _open(self, context: Context) -> None:
        """Send what opens the answers, before anything may end them.

        Until it has gone out gRPC sends no status, and whoever has opened the stream would wait for ever.
        """
        await context.send_initial_metadata(())

    async def ingest(
        self, batches: AsyncIterator[learner_pb2.SampleBatch], context: Context
    ) -> AsyncIterator[learner_pb2.IngestReceipt]:
        """Records, answered by receipts for what is in keeping. The end of a run of live ones ends the stream, and is told."""
        async with abort_on_error(context):
            self._require(context, self._feeders)
            session = self._in_run()
            taken, source = 0, ""
            with (
                session.ingestor.receipts.register_stream(),
                self._feeds.hold_stream(self._config.credentials.identify_caller(context)),
            ):
                async with Tasks() as tasks:
                    over = tasks.start(
                        session.lifecycle.wait_run_ended()
                        if session.assignment.spec.data.is_live
                        else asyncio.Event().wait()
                    )
                    coming = tasks.start(_next(batches))
                    while (batch := await _unless(over, coming)) is not None:
                        coming = tasks.start(_next(batches))
                        await session.ingestor.feed(batch)
                        taken, source = taken + 1, batch.source
                        # At once what is due: more may be here than its feeder knows. Then seldom, and in every lull.
                        if taken == 1 or taken % _BATCHES_PER_RECEIPT == 0 or not await _at_once(coming):
                            yield await _receipt(session, source)
                yield await _receipt(session, source)
            if session.lifecycle.is_run_ended and session.assignment.spec.data.is_live:
                raise await session.lifecycle.wait_run_ended()

    async def intake(self, request: learner_pb2.GetIntakeRequest, context: Context) -> learner_pb2.GetIntakeResponse:
        """What whoever brings records needs before the first one."""
        async with abort_on_error(context):
            self._require(context, self._feeders)
            session = self._in_run()
            role, receipt = session.assignment, await _receipt(session, request.source)
            spec = spec_to_wire(role.spec)
            return learner_pb2.GetIntakeResponse(
                run_id=role.run_id, spec=spec, n_features=role.n_features, receipt=receipt
            )

    async def predict(self, request: learner_pb2.PredictRequest, context: Context) -> learner_pb2.PredictResponse:
        """What the model in use says of records, where the run opted in."""
        async with abort_on_error(context):
            self._require(context, self._owners)
            session = self._in_run()
            if not session.assignment.spec.telemetry.predict:
                raise FailedPrecondition(
                    "predictions depend on private data; this run did not opt in (telemetry.predict)"
                )
            scores, labels, rounds = session.state_machine.predict(from_tensor(request.features))
            return learner_pb2.PredictResponse(scores=to_tensor(scores), labels=to_tensor(labels), rounds_done=rounds)

    async def ledger(self, request: learner_pb2.GetLedgerRequest, context: Context) -> learner_pb2.GetLedgerResponse:
        """What all runs have cost."""
        async with abort_on_error(context):
            self._require(context, self._owners)
            lines = await asyncio.to_thread(Ledger(self._config.state_folder).list_entries, self._config.name)
            return learner_pb2.GetLedgerResponse(
                entries=[learner_pb2.LedgerEntry(algorithm=line.algorithm, **asdict(line)) for line in lines],
                owner_budget=self._config.own_budget,
            )

    async def status(self, request: learner_pb2.GetStatusRequest, context: Context) -> learner_pb2.GetStatusResponse:
        """How far it is."""
        async with abort_on_error(context):
            self._require(context, self._feeders, principals.Role.OPERATOR, principals.Role.COORDINATOR)
            return learner_pb2.GetStatusResponse(status=self._now().to_wire())


async def _receipt(session: Session, source: str) -> learner_pb2.IngestReceipt:
    """What is in keeping of a source: not what another stream of it brings meanwhile.

    Raises:
        FailedPrecondition: it cannot be kept.
    """
    intake = session.record_queue
    receipt = learner_pb2.IngestReceipt(
        next_sequence=intake.get_next_sequence(source), position=intake.get_position(source)
    )
    await session.ingestor.receipts.wait_durable()
    return receipt


async def _next(batches: AsyncIterator[learner_pb2.SampleBatch]) -> learner_pb2.SampleBatch | None:
    return await anext(batches, None)


async def _unless(over: asyncio.Task[object], coming: asyncio.Task[T]) -> T | None:
    """What comes; None: the run is over before."""
    if not coming.done():
        await asyncio.wait((over, coming), return_when=asyncio.FIRST_COMPLETED)
    return coming.result() if coming.done() else None


async def _at_once(coming: asyncio.Task[object]) -> bool:
    """Is there more, or the end, within a moment?"""
    return bool((await asyncio.wait([coming], timeout=_PAUSE_TIMEOUT_S))[0])


async def _replacement(session: Session) -> None:
    """A run that is taken up again: neighbours have to greet who this learner is from now on.

    Raises:
        Unavailable: it is.
    """
    raise await session.lifecycle.wait_replaced()
