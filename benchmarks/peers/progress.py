"""Progress file of a peer: number of the last round and its time, written by a learner and read by `peers.py`.

The module runs in the environment of every peer, so it needs only the standard library.
"""

from __future__ import annotations

import os
import struct
import time
from functools import cache
from pathlib import Path

FILE = "SOTTOVOCE_PEER_PROGRESS"
"""Environment variable with the path of the file. `peers.py` finds the processes of a run by it."""
FORM = struct.Struct("<Qd")


@cache
def _open_file() -> int:
    return os.open(os.environ[FILE], os.O_WRONLY)


def record_round(rounds: int) -> None:
    """Record that `rounds` rounds are done now."""
    os.pwrite(_open_file(), FORM.pack(rounds, time.monotonic()), 0)


def read(file: Path) -> tuple[int, float]:
    """Read the number of rounds done, and the time of the last one (seconds, monotonic)."""
    rounds, at = FORM.unpack(file.read_bytes())
    return int(rounds), float(at)
