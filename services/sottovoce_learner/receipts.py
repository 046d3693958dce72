"""Receipts: streams of records share a sync. Nobody goes on before it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

COMPANY_S = 0.01
"""How long one waits for others that need a sync, too: about as long as a slow disk takes for it."""


class Receipts:
    """Lets what several streams have written down last, all at once.

    A stream waits until all others do, but at most `COMPANY_S`; so one that is alone waits for nobody.

    Args:
        settle: makes last what was written down before it is called.
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = settle
        self._streams = self._waiting = 0
        self._settled: asyncio.Future[None] | None = None

    @contextmanager
    def stream(self) -> Iterator[None]:
        """While a stream is open, it may be company."""
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    async def settled(self) -> None:
        """Wait until what was written down by now lasts; whatever `settle` raises is raised to all who wait."""
        if self._settled is None:
            loop = asyncio.get_running_loop()
            self._settled, self._waiting = loop.create_future(), 0
            loop.call_later(COMPANY_S, self._over, self._settled)
        settled = self._settled
        self._waiting += 1
        if self._waiting >= self._streams:
            self.now()
        await asyncio.shield(settled)

    def now(self) -> None:
        """Whoever waits need wait no longer for company."""
        settled, self._settled = self._settled, None
        if settled is None:
            return
        try:
            self._settle()
        except Exception as error:  # noqa: BLE001 -- whoever waits is told, whatever it is
            settled.set_exception(error)
        else:
            settled.set_result(None)

    def _over(self, settled: asyncio.Future[None]) -> None:
        if self._settled is settled:
            self.now()
