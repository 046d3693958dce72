"""How a peer's learner says how far it is: a file of its last round and the moment, which `peers.py` reads meanwhile.

Runs in every peer's environment, so it needs the standard library alone.
"""

from __future__ import annotations

import os
import struct
import time
from functools import cache
from pathlib import Path

FILE = "SOTTOVOCE_PEER_PROGRESS"
"""The variable that names the file; every process of a run has it, which is also how they are found."""
FORM = struct.Struct("<Qd")


@cache
def _file() -> int:
    return os.open(os.environ[FILE], os.O_WRONLY)


def reached(rounds: int) -> None:
    """So many rounds are done, now."""
    os.pwrite(_file(), FORM.pack(rounds, time.monotonic()), 0)


def read(file: Path) -> tuple[int, float]:
    """Rounds that are done, and when the last of them was (seconds, monotonic)."""
    rounds, at = FORM.unpack(file.read_bytes())
    return int(rounds), float(at)
