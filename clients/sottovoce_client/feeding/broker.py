"""What brokers have in common: where to begin, how long they may be away, and messages that are gone, which are counted."""

from __future__ import annotations

import asyncio
import re
from typing import Literal

import structlog

from sottovoce.errors import Unavailable

log = structlog.get_logger()

Begin = Literal["committed", "start", "new"]
"""Where a feeder begins whose learner has no record of a source in this run: where the one before it ended (at the oldest message
where there was none), at the oldest message that is there, or with what comes from now on."""
REFUSED = "{} refuses these credentials, or is not believed: {}"
NOBODY = re.compile(
    r"authori[sz]ation violation|permissions violation|not authori[sz]ed|authentication|certificate.verify.failed",
    re.IGNORECASE,
)
"""What is said where no patience helps: the broker does not know the feeder, or the feeder does not believe it."""
_FIRST_S, _MOST_S = 0.2, 5.0


class Patience:
    """How long a broker may be away. That it is, that it is back, and that it sends what comes, is said once each time.

    Args:
        what: of the broker, in messages.
        seconds: that it may be away.
    """

    def __init__(self, what: str, seconds: float) -> None:
        self._what, self._seconds = what, seconds
        self._since: float | None = None
        self._pause, self._subscribed = _FIRST_S, False

    def subscribed(self, source: str) -> None:
        """It has answered, and nothing is missed that comes to a source of its from now on."""
        self.here()
        if not self._subscribed:
            log.info("subscribed", broker=self._what, source=source)
        self._subscribed = True

    def here(self) -> None:
        """It has answered."""
        if self._since is not None:
            log.warning("the broker is back", broker=self._what)
        self._since, self._pause = None, _FIRST_S

    async def away(self, why: str) -> None:
        """It has not: wait a little, longer each time.

        Args:
            why: in a few words.

        Raises:
            Unavailable: it is away for too long.
        """
        now, self._subscribed = asyncio.get_running_loop().time(), False
        if self._since is None:
            self._since = now
            log.warning("the broker is away", broker=self._what, why=why, patience_s=self._seconds)
        left = self._since + self._seconds - now
        if left <= 0:
            raise Unavailable(f"{self._what} was away for {self._seconds:g} s: {why}")
        await asyncio.sleep(min(self._pause, left))
        self._pause = min(2 * self._pause, _MOST_S)


class Gone:
    """Messages that a source did not have any more when they were due: their number is said whenever it has doubled.

    Args:
        what: of the source, in messages.
    """

    def __init__(self, what: str) -> None:
        self._what, self._said = what, 0
        self.messages = 0

    def add(self, messages: int, *, at_most: bool = False) -> None:
        """So many more.

        Args:
            messages: how many; 0: nobody knows.
            at_most: there were perhaps fewer.
        """
        self.messages += messages
        if self.messages >= 2 * self._said:
            self._said = self.messages
            number = "nobody knows how many" if not messages else f"{'up to ' * at_most}{self.messages}"
            log.warning("messages were gone before they were read", source=self._what, messages=number)


def why_of(error: BaseException) -> str:
    """Of a failed call, in a few words, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"
