"""A disk that is full: what does not fit is written again, until there is room."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from sottovoce.errors import NotReady
from sottovoce_learner.storage.state_folder import DiskFull

log = structlog.get_logger()

ROOM_S = 1.0
"""Between tries to write to a disk that is full."""


class Room:
    """Room for what a learner writes of one kind.

    Args:
        learner: its name.
        waits: what does, where there is none, in the log's words.
        unwritten: what an error says of it.
        pause: for so many seconds, until the next try.
    """

    def __init__(self, learner: str, waits: str, unwritten: str, pause: Callable[[float], Awaitable[None]]) -> None:
        self._learner, self._waits, self._unwritten, self._pause = learner, waits, unwritten, pause
        self.lacking = False
        """Something waits for it."""

    async def written(self, t: int, write: Callable[[], None]) -> None:
        """Write; where there is no room, the same again, until there is.

        Args:
            t: the round that the learner is in.
            write: what is to be done; whole or not at all.

        Raises:
            NotReady: it cannot be written.
        """
        try:
            while True:
                try:
                    write()
                except DiskFull:
                    if not self.lacking:
                        log.warning(f"disk full: {self._waits} until there is room", learner=self._learner, round=t)
                    self.lacking = True
                    await self._pause(ROOM_S)
                except OSError as error:
                    raise NotReady(f"{self._unwritten}: {error.strerror}") from None
                else:
                    return
        finally:
            self.lacking = False
