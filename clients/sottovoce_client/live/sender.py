"""Sender of live records to a learner, each exactly once, through failures of the connection, the learner or its neighbours."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.errors import (
    DataError,
    FailedPrecondition,
    LimitReached,
    RemoteProtocolError,
    RunEnded,
    SottovoceError,
    Unavailable,
)
from sottovoce_core.text import escape_control
from sottovoce_rpc.addresses import require_address
from sottovoce_rpc.codec import from_tensor, to_tensor
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.error_status import CallOutcome, convert_status_error
from sottovoce_rpc.learner_status import LearnerStatus
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import open_channel
from sottovoce_rpc.tasks import Tasks, run_in_background
from sottovoce_wire.v1 import learner_pb2, learner_pb2_grpc

MAX_BATCH_RECORDS, _MAX_BATCH_BYTES = 1_024, 4 * 1024 * 1024
"""Maximum records of a batch, and maximum bytes unless one record has more."""
MAX_PENDING_RECORDS = 32 * MAX_BATCH_RECORDS
"""Maximum number of records without a receipt, before more have to wait."""
_CALL_TIMEOUT_S, _PREDICT_TIMEOUT_S, _RETRY_INTERVAL_S = 30.0, 60.0, 0.5


@dataclass(frozen=True, slots=True)
class LearnerEndpoint:
    """Address of a learner, and the credentials of its caller.

    Attributes:
        address: `host:port`.
        name: name of the learner, which its certificate must hold; empty: any.
        credentials: credentials of the caller.
    """

    address: str
    name: str
    credentials: Credentials

    def __post_init__(self) -> None:
        require_address(self.address, "the address of a learner")

    def open_channel(self) -> Any:
        """Open a new channel for each attempt: the identity may have been renewed."""
        return open_channel(self.address, Role.LEARNER, self.name, credentials=self.credentials)

    def convert_error(self, failure: grpc.aio.AioRpcError) -> SottovoceError:
        """Convert a failed call to an error of this project."""
        return convert_status_error(failure, f"the learner at {self.address}")

    def build_away_error(self, run_id: str, seconds: float, error: SottovoceError) -> SottovoceError:
        """Build the error for a learner that was unreachable for too long.

        Args:
            run_id: its last run.
            seconds: how long it may be unreachable.
            error: error of the last attempt.
        """
        if not isinstance(error, Unavailable):
            return error
        return Unavailable(
            f"the learner at {self.address} was in run {run_id}, and has not answered for {seconds:g} s; `sottovoce up` ends its "
            f"learners with their run ({error})"
        )

    async def await_answer(self, call: Any) -> Any:
        """Return the answer of a call.

        Raises:
            SottovoceError: the call failed.
        """
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self.convert_error(error) from None

    async def fetch_status(self, stub: Any) -> LearnerStatus:
        """Return the learner's status; errors as of `await_answer`."""
        answer = await self.await_answer(stub.GetStatus(learner_pb2.GetStatusRequest(), timeout=_CALL_TIMEOUT_S))
        return LearnerStatus.from_wire(answer.status)

    async def fetch_intake(self, stub: Any, source: str) -> learner_pb2.GetIntakeResponse:
        """Return the spec of the run and the receipt of a source; errors as of `await_answer`."""
        request = learner_pb2.GetIntakeRequest(source=source)
        answer: learner_pb2.GetIntakeResponse = await self.await_answer(
            stub.GetIntake(request, wait_for_ready=True, timeout=_CALL_TIMEOUT_S)
        )
        return answer

    async def predict(self, stub: Any, rows: FloatArray) -> tuple[FloatArray, FloatArray, int]:
        """Return scores and labels of rows by the current model, and its learned rounds; errors as of `await_answer`."""
        request = learner_pb2.PredictRequest(features=to_tensor(rows))
        answer = await self.await_answer(stub.Predict(request, timeout=_PREDICT_TIMEOUT_S))
        return from_tensor(answer.scores), from_tensor(answer.labels), answer.rounds_done

    def require_name(self, status: LearnerStatus) -> None:
        """Reject another learner than the named one; a certificate was checked before.

        Raises:
            FailedPrecondition: it is another one.
        """
        if self.name and status.learner != self.name:
            raise FailedPrecondition(
                f"at {self.address} is the learner {escape_control(status.learner)!r}, not {self.name!r}"
            )


def _get_position(receipt: learner_pb2.IngestReceipt) -> int:
    """Return the position of the last stored record; -1: none."""
    return receipt.position if receipt.HasField("position") else -1


@dataclass(eq=False, slots=True)
class _Batch:
    """Records that wait for a receipt."""

    features: FloatArray
    labels: FloatArray
    positions: list[int]
    stored: asyncio.Future[None]


def _compute_batch_size(features: FloatArray) -> int:
    """Return the maximum number of records of a message."""
    return max(1, min(MAX_BATCH_RECORDS, _MAX_BATCH_BYTES // (8 * (int(features.shape[1]) + 1))))


class Sender:
    """Sender of records of one source, in one run. It reconnects and resends records without a receipt, in its own task.

    Waiting batches share a message: one with a hundred records costs about as much as with one.

    Args:
        endpoint: address of the learner.
        source: name under which records are counted.
        intake: the learner's run, and the receipt of its last stored record.
        patience_s: how long the learner may be unreachable, or accept nothing.
        tasks: owner of the sending task.
        notify: called with the reason for which records wait, where the learner has no capacity for this stream (default:
            not reported).
    """

    def __init__(
        self,
        endpoint: LearnerEndpoint,
        source: str,
        intake: learner_pb2.GetIntakeResponse,
        patience_s: float,
        tasks: Tasks,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._notify = notify
        self._endpoint, self._source, self._run_id, self._patience_s = endpoint, source, intake.run_id, patience_s
        self._stored_position = self._last_position = _get_position(intake.receipt)
        self._batches: deque[_Batch] = deque()
        self._records = 0
        self._more_event, self._space_event = asyncio.Event(), asyncio.Event()
        self._failing_since: float | None = None
        self.run_end: RunEnded | None = None
        """Error with which the learner reported the end of the run; None: it has not."""
        self._error: SottovoceError | None = None
        self._sends_single_batches = False  # one batch a message, so that the refused one is identified
        tasks.start(self._run(), "records are not sent")

    @property
    def last_position(self) -> int:
        """Position of the last record given to it; -1: none."""
        return self._last_position

    async def put(self, features: FloatArray, labels: FloatArray, positions: IntArray) -> list[asyncio.Future[None]]:
        """Accept records, as soon as there is space; one call at a time.

        Args:
            features: `(records, features)`, as they are learned.
            labels: `(records,)`.
            positions: `(records,)`, ascending, above all before.

        Returns:
            Futures that are done when the learner has stored the records, or raise the reason why not.

        Raises:
            FailedPrecondition: the run is over, or another one.
            Unavailable: the learner was unreachable for too long.
        """
        rows, futures = _compute_batch_size(features), []
        for at in range(0, len(labels), rows):
            while self._records >= MAX_PENDING_RECORDS and self._error is None:
                self._space_event.clear()
                await self._space_event.wait()
            if self._error is not None:
                raise self._error
            stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            stored.add_done_callback(
                lambda stored: stored.cancelled() or stored.exception()
            )  # the caller may have been cancelled
            end = at + rows
            futures.append(stored)
            self._batches.append(_Batch(features[at:end], labels[at:end], positions[at:end].tolist(), stored))
            self._records += len(labels[at:end])
            self._last_position = int(positions[at:end][-1])
            self._more_event.set()
        return futures

    def find_pending(self, position: int) -> list[asyncio.Future[None]]:
        """Return the futures, as of `put`, of earlier records up to a position."""
        return [batch.stored for batch in self._batches if batch.positions[0] <= position]

    async def _run(self) -> None:
        """Send records, on one stream after the other, until it gives up."""
        now = asyncio.get_running_loop().time
        refusal: SottovoceError | None = None
        try:
            while True:
                try:
                    await self._send_on_stream(refusal)
                except (DataError, RemoteProtocolError) as error:
                    refusal = (
                        error if self._sends_single_batches else None
                    )  # then for the first batch without a receipt
                    self._sends_single_batches = True
                    continue
                except (Unavailable, FailedPrecondition) as error:
                    if isinstance(error, RunEnded):
                        self.run_end = error
                        raise
                    refusal = None
                    if isinstance(error, LimitReached):
                        self._notify(str(error))
                    self._failing_since = self._failing_since or now()
                    if self._error is not None or (self._batches and now() - self._failing_since > self._patience_s):
                        self._give_up(self._endpoint.build_away_error(self._run_id, self._patience_s, error))
                        return
                await asyncio.sleep(_RETRY_INTERVAL_S)
        except SottovoceError as error:
            self._give_up(error)
        finally:
            self._give_up(Unavailable("the sending of records was ended"))

    async def _send_on_stream(self, refusal: SottovoceError | None) -> None:
        """Send records until the stream breaks.

        Args:
            refusal: error for the first batch without a receipt, from the stream before.

        Raises:
            SottovoceError: reason of the end.
        """
        async with self._endpoint.open_channel() as to:
            stub = learner_pb2_grpc.LearnerStub(to)
            try:
                intake = await self._endpoint.fetch_intake(stub, self._source)
                if intake.run_id != self._run_id:
                    self._error = FailedPrecondition(
                        f"run {self._run_id} is over for this learner; it is in run {intake.run_id} now"
                    )
                    raise self._error
                if self._endpoint.name:
                    self._endpoint.require_name(await self._endpoint.fetch_status(stub))
                self._receive(intake.receipt)
                if refusal is not None and self._batches:
                    self._finish_first(refusal)
                    self._sends_single_batches = False
                call = stub.Ingest()
                ending = CallOutcome(call)
                async with run_in_background(self._write_batches(call)):
                    try:
                        async for receipt in call:
                            self._receive(receipt)
                    except grpc.aio.AioRpcError:
                        await ending.require_ok()
            except grpc.aio.AioRpcError as error:
                raise self._endpoint.convert_error(error) from None
        raise Unavailable(f"the learner at {self._endpoint.address} ended the stream of records")

    async def _write_batches(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        """Write batches; the reader of the receipts gets the reason why a stream ended."""
        with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            async for batch in self._list_unsent():
                await call.write(batch)

    async def _list_unsent(self) -> AsyncIterator[learner_pb2.SampleBatch]:
        """Yield every batch, once on a stream."""
        sent_position = self._stored_position
        while True:
            self._more_event.clear()
            for group in self._group_batches(sent_position):
                sent_position = group[-1].positions[-1]
                yield learner_pb2.SampleBatch(
                    source=self._source,
                    features=to_tensor(np.concatenate([each.features for each in group])),
                    labels=to_tensor(np.concatenate([each.labels for each in group])),
                    positions=[position for each in group for position in each.positions],
                )
            await self._more_event.wait()

    def _group_batches(self, sent_position: int) -> Iterator[list[_Batch]]:
        """Yield the batches after a position, in order, in groups that fit into a message."""
        batch_group: list[_Batch] = []
        space = 0
        for batch in [each for each in self._batches if each.positions[-1] > sent_position]:
            space -= len(batch.labels)
            if batch_group and (
                self._sends_single_batches or space < 0 or batch.positions[0] <= batch_group[-1].positions[-1]
            ):
                yield batch_group
                batch_group = []
            if not batch_group:
                space = _compute_batch_size(batch.features) - len(batch.labels)
            batch_group.append(batch)
        if batch_group:
            yield batch_group

    def _receive(self, receipt: learner_pb2.IngestReceipt) -> None:
        """Process a receipt."""
        if _get_position(receipt) > self._stored_position:
            self._failing_since = None
        self._stored_position = max(self._stored_position, _get_position(receipt))
        while self._batches and self._batches[0].positions[-1] <= self._stored_position:
            self._finish_first(None)

    def _give_up(self, error: SottovoceError) -> None:
        """Send nothing more, and fail all waiting records."""
        self._error = self._error or error
        while self._batches:
            self._finish_first(self._error)
        self._space_event.set()

    def _finish_first(self, error: SottovoceError | None) -> None:
        batch = self._batches.popleft()
        self._records -= len(batch.labels)
        self._space_event.set()
        if batch.stored.done():  # its caller was cancelled
            return
        if error is None:
            batch.stored.set_result(None)
        else:
            batch.stored.set_exception(error)
