"""Sending: live records into a learner, each exactly once, whatever happens to the connection, the learner or its neighbours."""

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
"""Of a batch: records, and bytes unless one record has more."""
MAX_PENDING_RECORDS = 32 * MAX_BATCH_RECORDS
"""Records that may wait for their receipts before more are taken."""
_CALL_TIMEOUT_S, _PREDICT_TIMEOUT_S, _RETRY_INTERVAL_S = 30.0, 60.0, 0.5


@dataclass(frozen=True, slots=True)
class LearnerEndpoint:
    """Where a learner is, and who asks it.

    Attributes:
        address: `host:port`.
        name: of the learner, which its certificate must hold; empty: any.
        credentials: of who asks.
    """

    address: str
    name: str
    credentials: Credentials

    def __post_init__(self) -> None:
        require_address(self.address, "the address of a learner")

    def open_channel(self) -> Any:
        """A channel of its own for each try: the identity may have been renewed."""
        return open_channel(self.address, Role.LEARNER, self.name, credentials=self.credentials)

    def convert_error(self, failure: grpc.aio.AioRpcError) -> SottovoceError:
        """A failed call, as ours."""
        return convert_status_error(failure, f"the learner at {self.address}")

    def build_away_error(self, run_id: str, seconds: float, error: SottovoceError) -> SottovoceError:
        """Why nothing more is sent, where it was away for longer than it may be.

        Args:
            run_id: that it was in before.
            seconds: that it may be away.
            error: of the last try.
        """
        if not isinstance(error, Unavailable):
            return error
        return Unavailable(
            f"the learner at {self.address} was in run {run_id}, and has not answered for {seconds:g} s; `sottovoce up` ends its "
            f"learners with their run ({error})"
        )

    async def await_answer(self, call: Any) -> Any:
        """The answer of a call.

        Raises:
            SottovoceError: why there is none.
        """
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self.convert_error(error) from None

    async def fetch_status(self, stub: Any) -> LearnerStatus:
        """How far the learner is; errors as of `asked`."""
        answer = await self.await_answer(stub.GetStatus(learner_pb2.GetStatusRequest(), timeout=_CALL_TIMEOUT_S))
        return LearnerStatus.from_wire(answer.status)

    async def fetch_intake(self, stub: Any, source: str) -> learner_pb2.GetIntakeResponse:
        """What the learner says to whoever brings records under a source; errors as of `asked`."""
        request = learner_pb2.GetIntakeRequest(source=source)
        answer: learner_pb2.GetIntakeResponse = await self.await_answer(
            stub.GetIntake(request, wait_for_ready=True, timeout=_CALL_TIMEOUT_S)
        )
        return answer

    async def predict(self, stub: Any, rows: FloatArray) -> tuple[FloatArray, FloatArray, int]:
        """Scores and labels of rows by the model in use, and the rounds that it has learned from; errors as of `asked`."""
        request = learner_pb2.PredictRequest(features=to_tensor(rows))
        answer = await self.await_answer(stub.Predict(request, timeout=_PREDICT_TIMEOUT_S))
        return from_tensor(answer.scores), from_tensor(answer.labels), answer.rounds_done

    def require_name(self, status: LearnerStatus) -> None:
        """Refuse another learner than the one that is named; where it has a certificate, that was looked at before.

        Raises:
            FailedPrecondition: it is another one.
        """
        if self.name and status.learner != self.name:
            raise FailedPrecondition(
                f"at {self.address} is the learner {escape_control(status.learner)!r}, not {self.name!r}"
            )


def _position_of(receipt: learner_pb2.IngestReceipt) -> int:
    """Of the last record that is in keeping; -1: there is none."""
    return receipt.position if receipt.HasField("position") else -1


@dataclass(eq=False, slots=True)
class _Batch:
    """Records on their way."""

    features: FloatArray
    labels: FloatArray
    positions: list[int]
    kept: asyncio.Future[None]


def _most(features: FloatArray) -> int:
    """Records of a message."""
    return max(1, min(MAX_BATCH_RECORDS, _MAX_BATCH_BYTES // (8 * (int(features.shape[1]) + 1))))


class Sender:
    """Sends records under one source, in one run. It reconnects and sends again what has no receipt, in a task of its own.

    What waits goes together: a message costs about as much with one record as with a hundred.

    Args:
        at: where the learner is.
        source: under which records are counted.
        told: what the learner said of its run, and of the last record that is in keeping.
        patience_s: how long the learner may be away, or take nothing in.
        tasks: that own the sending.
        tell: called with why records wait, where the learner has no place for this stream (default: nobody is told).
    """

    def __init__(
        self,
        at: LearnerEndpoint,
        source: str,
        told: learner_pb2.GetIntakeResponse,
        patience_s: float,
        tasks: Tasks,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._tell = tell
        self._at, self._source, self._run_id, self._patience_s = at, source, told.run_id, patience_s
        self._kept = self._last = _position_of(told.receipt)
        self._batches: deque[_Batch] = deque()
        self._records = 0
        self._more, self._less = asyncio.Event(), asyncio.Event()
        self._failing_since: float | None = None
        self.run_end: RunEnded | None = None
        """How the learner said that the run is over; None: it has not."""
        self._over: SottovoceError | None = None
        self._apart = False  # each batch is a message, so that the one that is refused is known
        tasks.start(self._run(), "records are not sent")

    @property
    def last_position(self) -> int:
        """Position of the last record that was given to it; -1: there is none."""
        return self._last

    async def put(self, features: FloatArray, labels: FloatArray, positions: IntArray) -> list[asyncio.Future[None]]:
        """Take records on, as soon as there is room; one call at a time.

        Args:
            features: `(records, features)`, as they are learned.
            labels: `(records,)`.
            positions: `(records,)`, ascending, above all before.

        Returns:
            What is done when they are in the learner's keeping, or raises why they are not.

        Raises:
            FailedPrecondition: the run is over, or another one.
            Unavailable: the learner was away for too long.
        """
        rows, waits = _most(features), []
        for at in range(0, len(labels), rows):
            while self._records >= MAX_PENDING_RECORDS and self._over is None:
                self._less.clear()
                await self._less.wait()
            if self._over is not None:
                raise self._over
            kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            kept.add_done_callback(
                lambda kept: kept.cancelled() or kept.exception()
            )  # whoever waited may wait no longer
            end = at + rows
            waits.append(kept)
            self._batches.append(_Batch(features[at:end], labels[at:end], positions[at:end].tolist(), kept))
            self._records += len(labels[at:end])
            self._last = int(positions[at:end][-1])
            self._more.set()
        return waits

    def find_pending(self, position: int) -> list[asyncio.Future[None]]:
        """As `put` gives them, of records up to a position that were put before."""
        return [batch.kept for batch in self._batches if batch.positions[0] <= position]

    async def _run(self) -> None:
        """Send what there is, on one stream after the other, until it has to be given up."""
        now = asyncio.get_running_loop().time
        refused: SottovoceError | None = None
        try:
            while True:
                try:
                    await self._on_one_stream(refused)
                except (DataError, RemoteProtocolError) as error:
                    refused = error if self._apart else None  # of the first that has no receipt then
                    self._apart = True
                    continue
                except (Unavailable, FailedPrecondition) as error:
                    if isinstance(error, RunEnded):
                        self.run_end = error
                        raise
                    refused = None
                    if isinstance(error, LimitReached):
                        self._tell(str(error))
                    self._failing_since = self._failing_since or now()
                    if self._over is not None or (self._batches and now() - self._failing_since > self._patience_s):
                        self._give_up(self._at.build_away_error(self._run_id, self._patience_s, error))
                        return
                await asyncio.sleep(_RETRY_INTERVAL_S)
        except SottovoceError as error:
            self._give_up(error)
        finally:
            self._give_up(Unavailable("the sending of records was ended"))

    async def _on_one_stream(self, refused: SottovoceError | None) -> None:
        """Until it breaks.

        Args:
            refused: why the learner did not take the first batch that it has not, on the stream before.

        Raises:
            SottovoceError: why.
        """
        async with self._at.open_channel() as to:
            stub = learner_pb2_grpc.LearnerStub(to)
            try:
                told = await self._at.fetch_intake(stub, self._source)
                if told.run_id != self._run_id:
                    self._over = FailedPrecondition(
                        f"run {self._run_id} is over for this learner; it is in run {told.run_id} now"
                    )
                    raise self._over
                if self._at.name:
                    self._at.require_name(await self._at.fetch_status(stub))
                self._receive(told.receipt)
                if refused is not None and self._batches:
                    self._done(refused)
                    self._apart = False
                call = stub.Ingest()
                ending = CallOutcome(call)
                async with run_in_background(self._said(call)):
                    try:
                        async for receipt in call:
                            self._receive(receipt)
                    except grpc.aio.AioRpcError:
                        await ending.require_ok()
            except grpc.aio.AioRpcError as error:
                raise self._at.convert_error(error) from None
        raise Unavailable(f"the learner at {self._at.address} ended the stream of records")

    async def _said(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        """Whoever reads the receipts is told why a stream ended."""
        with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            async for batch in self._unsent():
                await call.write(batch)

    async def _unsent(self) -> AsyncIterator[learner_pb2.SampleBatch]:
        """Every batch, once on a stream."""
        sent = self._kept
        while True:
            self._more.clear()
            for together in self._together(sent):
                sent = together[-1].positions[-1]
                yield learner_pb2.SampleBatch(
                    source=self._source,
                    features=to_tensor(np.concatenate([each.features for each in together])),
                    labels=to_tensor(np.concatenate([each.labels for each in together])),
                    positions=[position for each in together for position in each.positions],
                )
            await self._more.wait()

    def _together(self, sent: int) -> Iterator[list[_Batch]]:
        """Batches behind a position, in their order, as many at a time as go into a message."""
        found: list[_Batch] = []
        room = 0
        for batch in [each for each in self._batches if each.positions[-1] > sent]:
            room -= len(batch.labels)
            if found and (self._apart or room < 0 or batch.positions[0] <= found[-1].positions[-1]):
                yield found
                found = []
            if not found:
                room = _most(batch.features) - len(batch.labels)
            found.append(batch)
        if found:
            yield found

    def _receive(self, receipt: learner_pb2.IngestReceipt) -> None:
        """So much is in keeping."""
        if _position_of(receipt) > self._kept:
            self._failing_since = None
        self._kept = max(self._kept, _position_of(receipt))
        while self._batches and self._batches[0].positions[-1] <= self._kept:
            self._done(None)

    def _give_up(self, why: SottovoceError) -> None:
        """Nothing more is sent."""
        self._over = self._over or why
        while self._batches:
            self._done(self._over)
        self._less.set()

    def _done(self, why: SottovoceError | None) -> None:
        batch = self._batches.popleft()
        self._records -= len(batch.labels)
        self._less.set()
        if batch.kept.done():  # nobody waits any more
            return
        if why is None:
            batch.kept.set_result(None)
        else:
            batch.kept.set_exception(why)
