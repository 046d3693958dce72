"""Folders for the time being: of a process that was killed the next one clears them away."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MARK = ".sottovoce-scratch"
"""A file that makes a folder one of these; whoever works there holds a lock on it, which ends with the process."""


@contextmanager
def scratch(prefix: str, where: Path | None = None) -> Iterator[Path]:
    """A folder that is removed in the end; before, those that were left behind under the same prefix.

    Args:
        prefix: of its name.
        where: in which folder (default: where the system has such).

    Raises:
        OSError: it cannot be made.
    """
    where = where or Path(tempfile.gettempdir())
    for each in where.glob(f"{prefix}*/{_MARK}"):
        with suppress(OSError):  # another user's, or another process has been faster
            _clear(each)
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=where) as made,
        (Path(made) / f"{_MARK}.new").open("xb") as mark,
    ):
        fcntl.flock(mark, fcntl.LOCK_EX)
        os.rename(mark.name, Path(made) / _MARK)  # nobody finds it before it is locked
        yield Path(made)


def _clear(mark: Path) -> None:
    """Remove a folder in which nobody works.

    Raises:
        OSError: somebody does, or it is not this user's.
    """
    descriptor = os.open(
        mark, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    )  # a named pipe of somebody's is not waited on
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_uid == os.geteuid():
            shutil.rmtree(mark.parent)
    finally:
        os.close(descriptor)
