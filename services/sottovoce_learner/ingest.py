"""Records from the learner's owner, written down before they count: a feeder waits where there are enough, or no room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sottovoce.errors import NotReady
from sottovoce_learner.intake import Intake
from sottovoce_learner.lifecycle import Lifecycle
from sottovoce_learner.receipts import Receipts
from sottovoce_learner.role import Role
from sottovoce_learner.room import Room
from sottovoce_learner.storage.store import RunLog
from sottovoce_wire.v1 import learner_pb2

AHEAD, MOST_HELD = 4096, 64 * 1024 * 1024
"""Rounds of records, and their bytes, that a learner takes in before it lets the feeder wait."""


class Ingest:
    """What comes of records, until a round takes them.

    Args:
        role: of the learner.
        run_log: where they are written down.
        intake: takes them in.
        life: of the session.
        t: the round that it begins with.
        changed: told when records are there, or wait for room.
    """

    def __init__(
        self, role: Role, run_log: RunLog, intake: Intake, life: Lifecycle, t: int, changed: Callable[[], None]
    ) -> None:
        self._live, self._log, self._intake, self._life, self._round = role.spec.data.live, run_log, intake, life, t
        self._changed = changed
        self._room = Room(role.name, "records wait", "records cannot be kept", self._pause)
        self._hungry = asyncio.Event()  # there may be room: a feeder that waits looks again
        self.receipts = Receipts(self._settle)

    async def feed(self, batch: learner_pb2.SampleBatch) -> None:
        """Records from the owner; waits while the learner has more than enough, and once it takes no more.

        Raises:
            DataError: they do not fit the run.
            Unavailable: the run is taken up again: its next session takes them.
            NotReady: the run is over, and what is live comes to none of its rounds; or they cannot be kept.
        """
        while self.enough and not self._life.ended:
            self._hungry.clear()
            await self._hungry.wait()
        if self._life.ended and not self._intake.covers(batch):
            if self._live:
                raise NotReady(self._life.ending)
            # No receipt for what is not kept. The end of the run is told by the coordinator, and ends the feeder, too.
            raise await self._life.replaced()
        try:
            await self._room.written(
                self._round, lambda: self._intake.put(batch, lambda first: self._keep(first, batch))
            )
        finally:
            self._changed()

    def _keep(self, first: int, batch: learner_pb2.SampleBatch) -> None:
        self._log.keep(first, batch.SerializeToString(deterministic=True))

    async def _pause(self, seconds: float) -> None:
        self._changed()
        await asyncio.sleep(seconds)

    @property
    def lacks_room(self) -> bool:
        """Are records held up by a full disk?"""
        return self._room.lacking

    @property
    def enough(self) -> bool:
        """Are there as many as it takes in beforehand?"""
        return self._intake.filled > self._round + AHEAD or self._intake.held > MOST_HELD

    def next_round(self, t: int) -> None:
        """Round t is next to take its records; or no other one is."""
        self._round = t
        if self._life.ended or not self.enough:
            self._hungry.set()

    async def settled(self) -> None:
        """Wait until all records that were taken in by now last; then receipts may go out.

        Raises:
            NotReady: they cannot be kept.
        """
        if not self._log.settled:
            await self.receipts.settled()

    def _settle(self) -> None:
        try:
            self._log.settle()
        except OSError as error:
            raise NotReady(f"records cannot be kept: {error.strerror}") from None
