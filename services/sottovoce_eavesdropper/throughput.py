"""How much a recording process has to do: messages a second, how busy its event loop is, and how long messages wait for it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import numpy as np

_INTERVAL_S, _SAMPLES = 0.1, 100
"""Interval of samples, and number of samples that a measurement is of: the last ten seconds."""
BUSY_SHARE = 0.9
"""Share of the time from which on a process is what a run waits for."""


class LoadMeter:
    """Meter of this process, which `run` keeps up to date.

    A message waits until the event loop has done all that came before it, as does a timer: so the delay of a timer is that of a
    message that came at the same time.

    Args:
        count_messages: returns the number of messages so far.
    """

    def __init__(self, count_messages: Callable[[], int]) -> None:
        self._count_messages = count_messages
        self._delays = deque[float](maxlen=_SAMPLES)
        self._samples = deque[tuple[float, float, int]](maxlen=_SAMPLES)

    async def run(self) -> None:
        """Sample until cancelled, in the thread of the event loop."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            self._delays.append(max(loop.time() - due, 0.0))
            self._samples.append((loop.time(), time.thread_time(), self._count_messages()))

    @property
    def messages_per_second(self) -> float:
        """Messages a second in the last ten seconds."""
        return self._compute_rate(2)

    @property
    def busy_share(self) -> float:
        """Share of the last ten seconds in which the event loop worked."""
        return min(self._compute_rate(1), 1.0)

    def _compute_rate(self, column: int) -> float:
        if len(self._samples) < 2:
            return 0.0
        first, last = self._samples[0], self._samples[-1]
        return max(float(last[column] - first[column]), 0.0) / (last[0] - first[0])

    def compute_delay(self, quantile: float) -> float:
        """Return a quantile of the seconds that messages waited."""
        return float(np.quantile(self._delays, quantile)) if self._delays else 0.0
