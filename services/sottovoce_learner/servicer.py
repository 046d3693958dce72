"""gRPC servicer of a learner: methods for its neighbours, its owner and its feeders."""

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
"""Batches between receipts on a stream without pauses, and the duration of a pause."""

MAX_RECORD_STREAMS = 64
"""Maximum number of record streams of one caller; callers without an identity count as one."""

T = TypeVar("T")


class LearnerServicer:
    """Methods of a learner, with the permissions of each caller.

    Args:
        config: settings of the learner.
        get_session: returns its current session, or raises FailedPrecondition.
        get_status: returns its current status.
    """

    def __init__(
        self, config: LearnerConfig, get_session: Callable[[], Session], get_status: Callable[[], LearnerStatus]
    ) -> None:
        self._config, self._get_session, self._get_status = config, get_session, get_status
        self._record_streams = StreamLimit(MAX_RECORD_STREAMS, "records")

    def register(self, server: grpc.aio.Server) -> None:
        """Register the methods by hand: Exchange passes bytes through, encoded once for all neighbours."""
        pb, write = learner_pb2, methodcaller("SerializeToString")
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Exchange": grpc.stream_stream_rpc_method_handler(self.exchange),
            "Ingest": grpc.stream_stream_rpc_method_handler(self.ingest, pb.SampleBatch.FromString, write),
            "GetIntake": grpc.unary_unary_rpc_method_handler(self.get_intake, pb.GetIntakeRequest.FromString, write),
            "Predict": grpc.unary_unary_rpc_method_handler(self.predict, pb.PredictRequest.FromString, write),
            "GetLedger": grpc.unary_unary_rpc_method_handler(self.get_ledger, pb.GetLedgerRequest.FromString, write),
            "GetStatus": grpc.unary_unary_rpc_method_handler(self.get_status, pb.GetStatusRequest.FromString, write),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    @property
    def _owners(self) -> frozenset[str]:
        return frozenset((f"{principals.Role.LEARNER}/{self._config.name}", *self._config.owners))

    @property
    def _feeders(self) -> frozenset[str]:
        return self._owners | {f"{principals.Role.FEEDER}/{self._config.name}", *self._config.feeders}

    def _require_authorised(self, context: Context, names: frozenset[str], *roles: principals.Role) -> None:
        """Require that the owner has authorised the caller.

        Raises:
            PermissionDenied: the caller is not one of `names`, and has none of these roles in this learner's domain.
        """
        caller = self._config.credentials.identify_caller(context)
        if caller is not None and not caller.is_one_of(*names) and (caller.role not in roles or caller.is_foreign):
            options = " or ".join([f"--owner {caller}", *([f"--feeder {caller}"] if names == self._feeders else [])])
            raise PermissionDenied(
                f"{caller} must be authorised for this by the owner of {self._config.name!r}: start that learner with {options}"
            )

    async def exchange(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Serve a stream that a neighbour, or a relay for it, opens."""
        async with abort_on_error(context):
            session = self._require_neighbours_known()
            await self._send_initial_metadata(context)
            await self._accept(session, context, self._config.credentials.identify_caller(context))

    async def accept_in_process(self, stream: InProcessStream) -> None:
        """Serve a stream that a neighbour in this process opens.

        Raises:
            SottovoceError: the error sent to the neighbour.
        """
        try:
            await self._accept(self._require_neighbours_known(), stream, None)
        except SottovoceError:
            raise
        except Exception as error:  # noqa: BLE001 - as for a gRPC call: the neighbour must not see the text of a bug
            log.error("bug", **describe_failure(error))
            raise Unavailable("an internal error; see the log") from None

    def _require_neighbours_known(self) -> Session:
        session = self._get_session()
        if not session.plan.announced_rounds:
            raise FailedPrecondition("this learner does not know its neighbours yet")
        return session

    async def _accept(
        self, session: Session, stream: Context | InProcessStream, caller: principals.Principal | None
    ) -> None:
        async with run_in_background(_raise_when_replaced(session)):
            await connection.accept(session, stream, caller)

    async def _send_initial_metadata(self, context: Context) -> None:
        """Send the initial metadata before anything may end the call.

        Until then gRPC sends no status, and the caller would wait forever.
        """
        await context.send_initial_metadata(())

    async def ingest(
        self, batches: AsyncIterator[learner_pb2.SampleBatch], context: Context
    ) -> AsyncIterator[learner_pb2.IngestReceipt]:
        """Receive records, and send receipts for durable ones. The end of a run of live records ends the stream with an error."""
        async with abort_on_error(context):
            self._require_authorised(context, self._feeders)
            session = self._get_session()
            batch_count, source = 0, ""
            with (
                session.ingestor.receipts.register_stream(),
                self._record_streams.hold_stream(self._config.credentials.identify_caller(context)),
            ):
                async with Tasks() as tasks:
                    run_ended = tasks.start(
                        session.lifecycle.wait_run_ended()
                        if session.assignment.spec.data.is_live
                        else asyncio.Event().wait()
                    )
                    next_batch = tasks.start(_read_next(batches))
                    while (batch := await _wait_unless_ended(run_ended, next_batch)) is not None:
                        next_batch = tasks.start(_read_next(batches))
                        await session.ingestor.feed(batch)
                        batch_count, source = batch_count + 1, batch.source
                        # The first receipt at once: more may be stored than the feeder knows. Then rarely, and in every pause.
                        if (
                            batch_count == 1
                            or batch_count % _BATCHES_PER_RECEIPT == 0
                            or not await _arrives_soon(next_batch)
                        ):
                            yield await _build_receipt(session, source)
                yield await _build_receipt(session, source)
            if session.lifecycle.is_run_ended and session.assignment.spec.data.is_live:
                raise await session.lifecycle.wait_run_ended()

    async def get_intake(
        self, request: learner_pb2.GetIntakeRequest, context: Context
    ) -> learner_pb2.GetIntakeResponse:
        """Return the spec of the run and the receipt of a source, before its first record."""
        async with abort_on_error(context):
            self._require_authorised(context, self._feeders)
            session = self._get_session()
            role, receipt = session.assignment, await _build_receipt(session, request.source)
            spec = spec_to_wire(role.spec)
            return learner_pb2.GetIntakeResponse(
                run_id=role.run_id, spec=spec, n_features=role.n_features, receipt=receipt
            )

    async def predict(self, request: learner_pb2.PredictRequest, context: Context) -> learner_pb2.PredictResponse:
        """Predict with the current model, where the run opted in."""
        async with abort_on_error(context):
            self._require_authorised(context, self._owners)
            session = self._get_session()
            if not session.assignment.spec.telemetry.predict:
                raise FailedPrecondition(
                    "predictions depend on private data; this run did not opt in (telemetry.predict)"
                )
            scores, labels, rounds = session.state_machine.predict(from_tensor(request.features))
            return learner_pb2.PredictResponse(scores=to_tensor(scores), labels=to_tensor(labels), rounds_done=rounds)

    async def get_ledger(
        self, request: learner_pb2.GetLedgerRequest, context: Context
    ) -> learner_pb2.GetLedgerResponse:
        """Return the ledger entries of all runs."""
        async with abort_on_error(context):
            self._require_authorised(context, self._owners)
            entries = await asyncio.to_thread(Ledger(self._config.state_folder).list_entries, self._config.name)
            return learner_pb2.GetLedgerResponse(
                entries=[learner_pb2.LedgerEntry(algorithm=entry.algorithm, **asdict(entry)) for entry in entries],
                owner_budget=self._config.own_budget,
                owner_delta=self._config.policy.delta,
            )

    async def get_status(
        self, request: learner_pb2.GetStatusRequest, context: Context
    ) -> learner_pb2.GetStatusResponse:
        """Return the learner's status."""
        async with abort_on_error(context):
            self._require_authorised(context, self._feeders, principals.Role.OPERATOR, principals.Role.COORDINATOR)
            return learner_pb2.GetStatusResponse(status=self._get_status().to_wire())


async def _build_receipt(session: Session, source: str) -> learner_pb2.IngestReceipt:
    """Acknowledge what this learner has durably stored of the source; concurrent streams are not included.

    Raises:
        FailedPrecondition: it cannot be stored.
    """
    intake = session.record_queue
    receipt = learner_pb2.IngestReceipt(
        next_sequence=intake.get_next_sequence(source), position=intake.get_position(source)
    )
    await session.ingestor.receipts.wait_durable()
    return receipt


async def _read_next(batches: AsyncIterator[learner_pb2.SampleBatch]) -> learner_pb2.SampleBatch | None:
    return await anext(batches, None)


async def _wait_unless_ended(run_ended: asyncio.Task[object], next_batch: asyncio.Task[T]) -> T | None:
    """Return the next item; None: the run has ended before."""
    if not next_batch.done():
        await asyncio.wait((run_ended, next_batch), return_when=asyncio.FIRST_COMPLETED)
    return next_batch.result() if next_batch.done() else None


async def _arrives_soon(next_batch: asyncio.Task[object]) -> bool:
    """Return whether the next item, or the end, arrives within a moment."""
    return bool((await asyncio.wait([next_batch], timeout=_PAUSE_TIMEOUT_S))[0])


async def _raise_when_replaced(session: Session) -> None:
    """Wait until a new session resumes the run: neighbours must send it a new Hello.

    Raises:
        Unavailable: it has.
    """
    raise await session.lifecycle.wait_replaced()
