"""Snapshots: files that stand in place of the beginning of a log, so that neither the log nor its replay grows with the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from sottovoce.errors import DataError
from sottovoce.running.run import Run
from sottovoce_learner.bodies import Snapshot
from sottovoce_learner.intake import Taken
from sottovoce_learner.log import Reading
from sottovoce_learner.packing import Unpackable, pack, packs_as, unpack
from sottovoce_learner.signing import Vouched
from sottovoce_learner.store import RunLog
from sottovoce_rpc.logs import failure

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Image:
    """A learner right after it has said a round.

    Attributes:
        state: of the algorithm.
        spent: epsilon of the run.
        counts: records of each round that it has learned, as 32-bit numbers.
        taken: its intake.
        frames: what was said last, by round, as much of it as a neighbour may lack.
        judged: records that it predicted before it learned them: those that it got right, and all.
        vouched: digests of what it said, in the blocks that it signs or may sign again.
        heard: where rounds may go on without late neighbours, the messages that it used last, as they came.
        messages: that it has said.
    """

    state: Any
    spent: float
    counts: bytes
    taken: Taken
    frames: tuple[tuple[int, bytes], ...]
    judged: tuple[int, int]
    vouched: Vouched
    heard: tuple[bytes, ...] = ()
    messages: int = 0


def named(run: Run) -> dict[str, object]:
    """What is no data in an algorithm's state, and is there again when the run is."""
    return {"loss": run.loss, "algorithm": run.algorithm}


def read_image(log: Reading, names: Mapping[str, object]) -> Image | None:
    """What a log goes on from; None: from the start.

    Args:
        log: what is left of it.
        names: as for `unpack`.

    Raises:
        DataError: another version wrote it.
    """
    if log.snapshot is None:
        return None
    image = unpack((log.folder / log.snapshot.name).read_bytes(), names)
    if not isinstance(image, Image):
        raise DataError(f"a snapshot must hold an image of a learner, got {type(image).__name__}")
    return image


class Snapshots:
    """Takes a learner's snapshots, while its rounds go on.

    Args:
        learner: its name.
        run_log: the log that they shorten.
        names: as for `pack`.
    """

    def __init__(self, learner: str, run_log: RunLog, names: Mapping[str, object]) -> None:
        self._learner, self._log, self._names = learner, run_log, names
        self._begun: tuple[Image, Callable[[bytes], Snapshot]] | None = None
        self._wanted, self._possible = asyncio.Event(), True

    @property
    def due(self) -> bool:
        """Should one be taken?"""
        return self._possible and self._begun is None and self._log.due

    def begin(self, image: Image) -> None:
        """Hold on to what the learner is, right after a round was said: its values never change, so it may go on at once."""
        try:
            self._begun = image, self._log.turn()
        except OSError as error:
            log.warning("no snapshot", learner=self._learner, reason=error.strerror)
            return
        self._wanted.set()

    async def run(self) -> None:
        """Finish those that were begun, for ever."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self.finish()

    async def finish(self) -> None:
        """Write what is held on to, then let the log forget what was before. Where that fails, the log stays longer."""
        if self._begun is None:
            return
        image, write = self._begun
        try:
            self._log.covered(await asyncio.to_thread(lambda: write(self._packed(image))))
        except Unpackable as error:
            self._possible = False
            log.warning("no snapshots: the log stays whole", learner=self._learner, reason=str(error))
        except OSError as error:
            log.warning("no snapshot", learner=self._learner, reason=error.strerror)
        except Exception as error:  # noqa: BLE001 - of a state of somebody's own, or for want of memory: no reason to end the run
            self._possible = False
            log.error("no snapshots: the log stays whole", learner=self._learner, **failure(error))
        finally:
            self._begun = None

    def _packed(self, image: Image) -> bytes:
        """In a thread: its bytes, of which the same image can be made. What it stands in place of is then deleted.

        Raises:
            Unpackable: it cannot.
        """
        raw = pack(image, self._names)
        try:
            same = packs_as(raw, unpack(raw, self._names), self._names)
        except DataError as error:
            raise Unpackable(str(error)) from None
        if not same:
            raise Unpackable("a state must be what its fields say, and this one comes back as another")
        return raw
