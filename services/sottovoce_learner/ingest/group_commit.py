"""Group commit: concurrent ingest streams share one fsync; no record is acknowledged before it.

A feeder waits while the queue is full, or the disk is.
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
"""Maximum wait for other streams before a sync: about the duration of a sync on a slow disk."""
MAX_ROUNDS_AHEAD, MAX_QUEUED_BYTES = 4096, 64 * 1024 * 1024
"""Maximum number of rounds of records, and of their bytes, queued before a feeder has to wait."""


class RecordIngestor:
    """Path of records from a feeder into the log and the queue.

    Args:
        role: assignment of the learner.
        run_log: log of the run.
        record_queue: queue of the records.
        lifecycle: state of the session.
        lease_tracker, wait_tracker: lease and waits of the rounds, which may need these records.
        t: round to begin with.
    """

    def __init__(
        self,
        role: RunAssignment,
        run_log: RunLog,
        record_queue: RecordQueue,
        lifecycle: Lifecycle,
        lease_tracker: LeaseTracker,
        wait_tracker: WaitTracker,
        t: int,
    ) -> None:
        self._is_live, self._log, self._record_queue, self._lifecycle, self._round = (
            role.spec.data.is_live,
            run_log,
            record_queue,
            lifecycle,
            t,
        )
        self._lease_tracker, self._wait_tracker = lease_tracker, wait_tracker
        self._disk_full_wait = DiskFullWait(role.name, "records wait", "records cannot be stored")
        self._space_event = asyncio.Event()  # set when the queue may have space
        self.receipts = _Receipts(run_log)

    async def feed(self, batch: learner_pb2.SampleBatch) -> None:
        """Accept a batch of the owner; wait while the queue is full, and while the session takes no more records.

        Raises:
            DataError: the records do not fit the run.
            Unavailable: the run is resumed: its next session takes them.
            FailedPrecondition: the run is over, so that none of its rounds takes live records; or they cannot be stored.
        """
        while self.has_enough and not self._lifecycle.has_ended:
            self._space_event.clear()
            await self._space_event.wait()
        if self._lifecycle.has_ended and not self._record_queue.has_batch(batch):
            if self._is_live:
                raise FailedPrecondition(self._lifecycle.end_message)
            # No receipt for what is not stored. The coordinator reports the end of the run, which ends the feeder, too.
            raise await self._lifecycle.wait_replaced()
        try:
            with self._disk_full_wait:
                # New records are logged and queued in one step: after a pause other records may be new.
                while (new := self._record_queue.prepare(batch)) is not None:
                    try:
                        self._log.append_records(new.first_round, batch.SerializeToString(deterministic=True))
                    except OSError as error:
                        self._disk_full_wait.require_disk_full(error, self._round)
                    else:
                        self._record_queue.add(new)
                        break
                    self._wait_tracker.wake()
                    await asyncio.sleep(DISK_RETRY_INTERVAL_S)
        finally:
            self._lease_tracker.set_filled_rounds(self._record_queue.filled_rounds)
            self._wait_tracker.wake()

    @property
    def is_disk_full(self) -> bool:
        """Return whether records wait for disk space."""
        return self._disk_full_wait.is_waiting

    @property
    def has_enough(self) -> bool:
        """Return whether the queue is full."""
        return (
            self._record_queue.filled_rounds > self._round + MAX_ROUNDS_AHEAD
            or self._record_queue.queued_bytes > MAX_QUEUED_BYTES
        )

    def begin_round(self, t: int) -> None:
        """Note that round t is next to take its records; or that no other round is."""
        self._round = t
        if self._lifecycle.has_ended or not self.has_enough:
            self._space_event.set()


class _Receipts:
    """Shared sync of the last writes of several streams.

    A stream waits until all others do, but at most `GROUP_COMMIT_DELAY_S`; a single stream does not wait.

    Args:
        run_log: log of the run.
    """

    def __init__(self, run_log: RunLog) -> None:
        self._log = run_log
        self._streams = self._waiting = 0
        self._pending_commit: asyncio.Future[None] | None = None

    @contextmanager
    def register_stream(self) -> Iterator[None]:
        """Count a stream among those to wait for, while the block lasts."""
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    async def wait_durable(self) -> None:
        """Wait until all that was written by now is durable; then receipts may be sent.

        Raises:
            FailedPrecondition: it cannot be stored; any other error of the sync is raised to all that wait, too.
        """
        if self._log.is_durable:
            return
        if self._pending_commit is None:
            loop = asyncio.get_running_loop()
            self._pending_commit, self._waiting = loop.create_future(), 0
            loop.call_later(GROUP_COMMIT_DELAY_S, self._commit_if_pending, self._pending_commit)
        commit = self._pending_commit
        self._waiting += 1
        if self._waiting >= self._streams:
            self.commit_now()
        await asyncio.shield(commit)

    def commit_now(self) -> None:
        """Sync now, and wake all that wait."""
        commit, self._pending_commit = self._pending_commit, None
        if commit is None:
            return
        try:
            self._log.make_durable()
        except OSError as error:
            commit.set_exception(FailedPrecondition(f"records cannot be stored: {error.strerror}"))
        except Exception as error:  # noqa: BLE001 -- every error reaches all that wait
            commit.set_exception(error)
        else:
            commit.set_result(None)

    def _commit_if_pending(self, commit: asyncio.Future[None]) -> None:
        if self._pending_commit is commit:
            self.commit_now()
