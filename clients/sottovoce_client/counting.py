"""How far pieces of work are, while they are worked on: here or in other processes of this machine."""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sottovoce_client.backends import Mapper
from sottovoce_client.scratch import scratch

_TOLD_S = 0.1
"""A piece says how far it is once in so long: what tells it every millisecond is not slowed down."""
_LOOKED_S = 0.3
"""Whoever waits is told anew after so long."""
_SHARE = struct.Struct("=d")

Count = Callable[[int, int], None]
"""Is told how much is done, and of how much."""


def counted(mapper: Mapper, size: Callable[[Any], int], count: Count) -> Mapper:
    """The same mapper; while it works, `count` is told how much of all pieces is done, from a thread of its own.

    Args:
        mapper: works on pieces, which have a field `tell`: it is told what share of them is done, in [0, 1].
        size: of a piece.
        count: is told. Of a piece on another machine nothing is known before its result comes.
    """

    def over(work: Callable[[Any], Any], pieces: Sequence[Any]) -> Iterator[Any]:
        sizes = [size(piece) for piece in pieces]
        with contextlib.ExitStack() as files:
            try:
                path = files.enter_context(scratch("sottovoce-count-")) / "done"
                path.write_bytes(bytes(_SHARE.size * len(pieces)))
            except OSError:  # work does not depend on whether it can be counted
                yield from mapper(work, pieces)
                return
            files.enter_context(_watched(path, sizes, count))
            tells = [_Tell(path, k) for k in range(len(pieces))]
            told = [replace(piece, tell=tell) for piece, tell in zip(pieces, tells, strict=True)]
            for tell, result in zip(tells, mapper(work, told), strict=True):
                tell(1.0)
                yield result

    return over


class _Tell:
    """Writes down what share of a piece is done. It may be pickled."""

    def __init__(self, path: Path, place: int) -> None:
        self._path, self._place, self._due = path, place, 0.0

    def __call__(self, done: float) -> None:
        now = time.monotonic()
        if done < 1.0 and now < self._due:
            return
        self._due = now + _TOLD_S
        with contextlib.suppress(OSError), self._path.open("r+b", buffering=0) as file:  # elsewhere there is none
            file.seek(_SHARE.size * self._place)
            file.write(_SHARE.pack(done))

    def __getstate__(self) -> tuple[Path, int]:
        return self._path, self._place

    def __setstate__(self, state: tuple[Path, int]) -> None:
        self._path, self._place = state
        self._due = 0.0  # clocks of two machines have nothing to do with each other


@contextlib.contextmanager
def _watched(path: Path, sizes: Sequence[int], count: Count) -> Iterator[None]:
    """Tell what is written down: at once, now and then, and in the end."""
    over = threading.Event()

    def look() -> None:
        with contextlib.suppress(OSError):  # somebody has tidied up
            shares = [share for (share,) in _SHARE.iter_unpack(path.read_bytes())]
            count(int(sum(share * size for share, size in zip(shares, sizes, strict=True))), sum(sizes))

    def watch() -> None:
        while not over.wait(_LOOKED_S):
            look()

    look()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    look()
