"""Records that a program hands over and does not wait for: brought many at a time, and none silently lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.errors import NotReady, SottovoceError, Unavailable

MOST_WAITING = 4_096
"""Records that were handed over and are not on their way yet."""


class Behind:
    """Records on their way behind a program's back.

    What is handed over while others are on their way goes next, all together: so there are few messages where records come
    faster than receipts, and none waits where they come seldom. Once something fails, nothing more is brought, and every
    call says why: what follows must not be learned before it.

    Args:
        bring: brings records `(records, features)` and their labels, and comes back when they are kept.
        loop: where it does.
    """

    def __init__(
        self, bring: Callable[[FloatArray, FloatArray], Awaitable[object]], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._bring, self._loop = bring, loop
        self._changed = threading.Condition()
        self._waiting: list[tuple[FloatArray, FloatArray]] = []
        self._records, self._bringing = 0, False
        self._error: SottovoceError | None = None
        self._told = False
        self._task: Future[None] | None = None  # its owner

    def put(self, features: FloatArray, labels: FloatArray) -> None:
        """Hand records over, as soon as there is room.

        Raises:
            SottovoceError: why some that were handed over before are not kept.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._records < MOST_WAITING or self._error is not None)
            self._require_well()
            self._waiting.append((features, labels))
            self._records += len(labels)
            begins, self._bringing = not self._bringing, True
        if begins:
            self._task = asyncio.run_coroutine_threadsafe(self._bring_all(), self._loop)

    def flush(self) -> None:
        """Wait until all that was handed over is kept.

        Raises:
            SottovoceError: why some of it is not.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._bringing)
            self._require_well()

    def end(self) -> None:
        """As `flush`, but what was said before is not said again."""
        if not self._told:
            self.flush()

    def _require_well(self) -> None:
        if self._error is not None:
            self._told = True
            raise self._error.with_traceback(None)

    def _taken(self) -> list[tuple[FloatArray, FloatArray]]:
        """All that waits."""
        with self._changed:
            taken, self._waiting, self._records = self._waiting, [], 0
            self._bringing = bool(taken)
            self._changed.notify_all()
            return taken

    async def _bring_all(self) -> None:
        error: SottovoceError = Unavailable("the sending of records was ended")
        taken: list[tuple[FloatArray, FloatArray]] = []
        try:
            while taken := self._taken():
                await self._bring(*map(np.concatenate, zip(*taken, strict=True)))
        except SottovoceError as failure:
            error = failure
        finally:
            if taken:
                self._fail(error, sum(len(labels) for _, labels in taken))

    def _fail(self, why: SottovoceError, under_way: int) -> None:
        with self._changed:
            kind = Unavailable if isinstance(why, Unavailable) else NotReady
            self._error = kind(f"of the last {under_way + self._records} records some are not kept: {why}")
            self._waiting, self._records, self._bringing = [], 0, False
            self._changed.notify_all()
