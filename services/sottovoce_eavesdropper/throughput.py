"""Load of a recording process: messages a second, how busy its event loop is, and how long messages wait for it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

import numpy as np

from sottovoce_wire.v1.eavesdropper_pb2 import Load

_INTERVAL_S, _SAMPLES = 0.1, 100
"""Interval of samples, and number of samples that a measurement is of: the last ten seconds."""


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

    def build_load(self, buffer_sizes: Collection[tuple[int, int]]) -> Load:
        """Return the load of the last ten seconds.

        Args:
            buffer_sizes: rows in memory, and bytes of their messages, of each capture.
        """
        delays = np.quantile(self._delays or [0.0], (0.5, 0.99))
        return Load(
            rows=sum(rows for rows, _ in buffer_sizes),
            bytes=sum(size for _, size in buffer_sizes),
            messages_per_second=self._compute_rate(2),
            busy=min(self._compute_rate(1), 1.0),
            median_delay_s=delays[0],
            p99_delay_s=delays[1],
        )

    def _compute_rate(self, column: int) -> float:
        if len(self._samples) < 2:
            return 0.0
        first, last = self._samples[0], self._samples[-1]
        return max(float(last[column] - first[column]), 0.0) / (last[0] - first[0])


def combine_loads(loads: Iterable[Load]) -> Load:
    """Combine the loads of several processes: sums, and busy share and delays of the busiest one."""
    found = list(loads)
    busiest = max(found, key=lambda each: each.busy)
    return Load(
        rows=sum(each.rows for each in found),
        bytes=sum(each.bytes for each in found),
        messages_per_second=sum(each.messages_per_second for each in found),
        busy=busiest.busy,
        median_delay_s=busiest.median_delay_s,
        p99_delay_s=busiest.p99_delay_s,
    )
