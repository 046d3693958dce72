"""A file of keys: which noise was heard in the runs of one deployment, so that the next run is compared with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sottovoce.errors import CaptureError
from sottovoce.lab.watch.keys import SIZE, Keys
from sottovoce_client.documents import private


def load(path: Path | None, run_id: str) -> Keys:
    """What was heard before this run: nothing, if there is no file yet.

    Raises:
        CaptureError: unreadable, or this run is in it: it would be said to repeat itself.
    """
    if path is None or not path.exists():
        return Keys()
    runs, table = _read(path)
    if run_id in runs:
        raise CaptureError(f"--keys must be of the runs before this one, and {path} has those of run {run_id} already")
    return Keys.of(table)


def save(path: Path, keys: Keys, run_id: str) -> None:
    """Write what was heard, this run's noise too: for the owner's eyes, for it gives the noise away."""
    runs = [*(_read(path)[0] if path.exists() else ()), run_id]
    beside = path.with_name(path.name + ".new")
    with open(beside, "wb", opener=private) as file:
        np.savez(file, runs=np.array(runs, dtype=str), table=keys.table)
    beside.replace(path)


def _read(path: Path) -> tuple[tuple[str, ...], np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as stored:
            runs, table = stored["runs"], stored["table"]
    except (OSError, ValueError, KeyError) as error:
        raise CaptureError(f"cannot read the keys {path}: {error}") from None
    if runs.dtype.kind != "U" or table.dtype != np.int64 or table.ndim != 2 or table.shape[0] != 2:
        raise CaptureError(f"{path} has no keys")
    if table.shape[1] > SIZE or (table[0] < 0).any():
        raise CaptureError(f"{path} has no keys")
    return tuple(map(str, runs.ravel())), table
