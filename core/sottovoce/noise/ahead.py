"""Rows of noise that were drawn before they are asked for: each is given out once, in order.

Most of what one short vector costs are the calls that draw it, so those of later rounds are drawn in the same calls where their
scales are known. They lie in memory alone, and in no copy, no pickle and no forked process.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from sottovoce.arrays import FloatArray, Scalars
from sottovoce.noise.lattice import LARGEST_SCALE, SMALLEST_SCALE, grid

MOST_ROWS = 64
"""That are drawn together."""

_process = [object()]
"""This process: another object after a fork."""


def _forked() -> None:
    _process[0] = object()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Row(NamedTuple):
    """What one row is for: two that are alike may have the same numbers, and no others."""

    round: int
    scale: float
    grid: float
    shape: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Of the geometric law of a magnitude."""
        return self.grid / self.scale

    def following(self, later: Callable[[int], Scalars], most: int) -> list[Row]:
        """This row and those of the next rounds, fewer than `most` of them where the sampler would cut a number elsewhere."""
        rows, cut = [self], math.frexp(self.rate)[1]
        for t in range(self.round + 1, self.round + most):
            scale = later(t)
            if not (isinstance(scale, float) and SMALLEST_SCALE <= scale <= LARGEST_SCALE):
                break
            row = Row(t, scale, float(grid(scale)), self.shape)
            if math.frexp(row.rate)[1] != cut:
                break
            rows.append(row)
        return rows


class Ahead:
    """What waits, by field. Threads may share it: a row is taken out before it is looked at."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[tuple[object, Row, FloatArray]]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Ahead, ()

    def take(self, field: str, row: Row) -> FloatArray | None:
        """The numbers that wait for this row. If the next ones are for another, all are thrown away."""
        waiting = self._waiting.get(field)
        if not waiting:
            return None
        try:
            process, due, numbers = waiting.popleft()
        except IndexError:  # another thread has taken the last
            return None
        if process is _process[0] and due == row:
            return numbers
        waiting.clear()
        return None

    def draw(self, field: str, rows: list[Row], sample: Callable[[list[Row]], Iterable[FloatArray]]) -> FloatArray:
        """The numbers of the first of `rows`; those of the others wait."""
        process = _process[0]
        first, *others = sample(rows)
        self._waiting[field] = deque((process, row, numbers) for row, numbers in zip(rows[1:], others, strict=True))
        return first
