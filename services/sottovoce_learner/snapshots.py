"""Snapshots: files that stand in place of the beginning of a log, so that neither the log nor its replay grows with the run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sottovoce.errors import DataError
from sottovoce_learner.bodies import Grant, Snapshot
from sottovoce_learner.intake import Taken
from sottovoce_learner.log import Reading, sync_folder
from sottovoce_learner.packing import unpack

_PIECE = 64 * 1024 * 1024
"""Bytes that are written at a time."""


@dataclass(frozen=True, slots=True)
class Image:
    """A learner right after it has said a round.

    Attributes:
        state: of the algorithm.
        spent: epsilon of the run.
        counts: records of each round that it has learned, as 32-bit numbers.
        taken: its intake.
        frames: what was said last, by round, as much of it as a neighbour may lack.
        judged: records that it predicted before it learned them: those that it got right, and all.
    """

    state: Any
    spent: float
    counts: bytes
    taken: Taken
    frames: tuple[tuple[int, bytes], ...]
    judged: tuple[int, int]


def read_image(log: Reading, taken: Mapping[str, object]) -> Image | None:
    """What a log goes on from; None: from the start.

    Args:
        log: what is left of it.
        taken: as for `unpack`.

    Raises:
        DataError: another version wrote it.
    """
    if log.snapshot is None:
        return None
    image = unpack((log.folder / log.snapshot.name).read_bytes(), taken)
    if not isinstance(image, Image):
        raise DataError(f"a snapshot must hold an image of a learner, got {type(image).__name__}")
    return image


def write_snapshot(folder: Path, covers: int, chain: bytes, reserved: Grant, raw: bytes) -> Snapshot:
    """A snapshot's file, whole or not at all.

    Raises:
        OSError: it could not be written.
    """
    snapshot = Snapshot(covers, chain, hashlib.sha256(raw).digest(), len(raw), reserved)
    draft = folder / f"{snapshot.name}.draft"
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        for at in range(0, len(raw), _PIECE):
            if os.pwrite(file, piece := raw[at : at + _PIECE], at) != len(piece):
                raise OSError(28, os.strerror(28))
        os.fsync(file)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)
    draft.replace(folder / snapshot.name)
    sync_folder(folder)
    return snapshot
