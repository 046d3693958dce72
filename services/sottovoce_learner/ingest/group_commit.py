"""Group commit of records: written down before they count, and streams that wait for a receipt share a sync.

A feeder waits where there are enough records, or no room on the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from sottovoce_core.errors import FailedPrecondition
from sottovoce_learner.assignment import RunAssignment
from sottovoce_learner.ingest.record_queue import RecordQueue
from sottovoce_learner.progress import DISK_RETRY_INTERVAL_S, DiskFullWait, LeaseTracker, Lifecycle, WaitTracker
from sottovoce_learner.storage.run_log import RunLog
from sottovoce_wire.v1 import learner_pb2

GROUP_COMMIT_DELAY_S = 0.01
"""How long one waits for others that need a sync, too: about as long as a slow disk takes for it."""
MAX_ROUNDS_AHEAD, MAX_QUEUED_BYTES = 4096, 64 * 1024 * 1024
"""Rounds of records, and their bytes, that a learner takes in before it lets the feeder wait."""


class RecordIngestor:
    """What comes of records, until a round takes them.

    Args:
        role: of the learner.
        run_log: where they are written down.
        intake: takes them in.
        life: of the session.
        grants, waits: of its rounds, which may need these records.
        t: the round that it begins with.
    """

    def __init__(
        self,
        role: RunAssignment,
        run_log: RunLog,
        intake: RecordQueue,
        life: Lifecycle,
        grants: LeaseTracker,
        waits: WaitTracker,
        t: int,
    ) -> None:
        self._live, self._log, self._intake, self._life, self._round = role.spec.data.is_live, run_log, intake, life, t
        self._grants, self._waits = grants, waits
        self._room = DiskFullWait(role.name, "records wait", "records cannot be kept")
        self._hungry = asyncio.Event()  # there may be room: a feeder that waits looks again
        self.receipts = _Receipts(run_log)

    async def feed(self, batch: learner_pb2.SampleBatch) -> None:
        """Records from the owner; waits while the learner has more than enough, and once it takes no more.

        Raises:
            DataError: they do not fit the run.
            Unavailable: the run is taken up again: its next session takes them.
            FailedPrecondition: the run is over, and what is live comes to none of its rounds; or they cannot be kept.
        """
        while self.has_enough and not self._life.has_ended:
            self._hungry.clear()
            await self._hungry.wait()
        if self._life.has_ended and not self._intake.has_batch(batch):
            if self._live:
                raise FailedPrecondition(self._life.end_message)
            # No receipt for what is not kept. The end of the run is told by the coordinator, and ends the feeder, too.
            raise await self._life.wait_replaced()
        try:
            with self._room:
                # What is new is written down and held in one step: it may be another after a pause.
                while (new := self._intake.prepare(batch)) is not None:
                    try:
                        self._log.append_records(new.first_round, batch.SerializeToString(deterministic=True))
                    except OSError as error:
                        self._room.require_disk_full(error, self._round)
                    else:
                        self._intake.add(new)
                        break
                    self._waits.wake()
                    await asyncio.sleep(DISK_RETRY_INTERVAL_S)
        finally:
            self._grants.set_filled_rounds(self._intake.filled_rounds)
            self._waits.wake()

    @property
    def is_disk_full(self) -> bool:
        """Are records held up by a full disk?"""
        return self._room.is_waiting

    @property
    def has_enough(self) -> bool:
        """Are there as many as it takes in beforehand?"""
        return (
            self._intake.filled_rounds > self._round + MAX_ROUNDS_AHEAD or self._intake.queued_bytes > MAX_QUEUED_BYTES
        )

    def begin_round(self, t: int) -> None:
        """Round t is next to take its records; or no other one is."""
        self._round = t
        if self._life.has_ended or not self.has_enough:
            self._hungry.set()


class _Receipts:
    """Lets what several streams have written down last, all at once.

    A stream waits until all others do, but at most `GROUP_COMMIT_DELAY_S`; so one that is alone waits for nobody.

    Args:
        run_log: where it was written down.
    """

    def __init__(self, run_log: RunLog) -> None:
        self._log = run_log
        self._streams = self._waiting = 0
        self._settled: asyncio.Future[None] | None = None

    @contextmanager
    def register_stream(self) -> Iterator[None]:
        """While a stream is open, it may be company."""
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    async def wait_durable(self) -> None:
        """Wait until what was written down by now lasts; then receipts may go out.

        Raises:
            FailedPrecondition: it cannot be kept; or whatever else making it last raises, to all who wait.
        """
        if self._log.is_durable:
            return
        if self._settled is None:
            loop = asyncio.get_running_loop()
            self._settled, self._waiting = loop.create_future(), 0
            loop.call_later(GROUP_COMMIT_DELAY_S, self._over, self._settled)
        settled = self._settled
        self._waiting += 1
        if self._waiting >= self._streams:
            self.commit_now()
        await asyncio.shield(settled)

    def commit_now(self) -> None:
        """Whoever waits need wait no longer for company."""
        settled, self._settled = self._settled, None
        if settled is None:
            return
        try:
            self._log.make_durable()
        except OSError as error:
            settled.set_exception(FailedPrecondition(f"records cannot be kept: {error.strerror}"))
        except Exception as error:  # noqa: BLE001 -- whoever waits is told, whatever it is
            settled.set_exception(error)
        else:
            settled.set_result(None)

    def _over(self, settled: asyncio.Future[None]) -> None:
        if self._settled is settled:
            self.commit_now()
