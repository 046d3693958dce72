"""Atomic writes of new files, of text and of JSON; and scratch folders, which a later process removes after a crash."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic_core import to_json

from sottovoce_core.errors import SpecError

Opener = Callable[[str, int], int]
"""Function that opens a file: (path, flags) -> file descriptor."""


def require_new(out: Path | None) -> None:
    """Check that an output file does not exist, before any work starts. None: no file will be written.

    Raises:
        SpecError: The file exists.
    """
    if out is not None and os.path.lexists(out):
        raise SpecError(f"there is a file {out} already: give another --out, or move it away")


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a path `NAME.partial` to write to, which is renamed to `NAME` when the block ends without an error.

    After an error, Ctrl-C or a crash the partial file keeps its name: an incomplete file is never taken for a complete one.
    """
    draft = path.with_name(f"{path.name}.partial")
    yield draft
    draft.replace(path)


@contextmanager
def create_file(out: Path) -> Iterator[BinaryIO]:
    """Create a new file, which exists only once the block has ended without an error.

    Raises:
        SpecError: The file exists, or cannot be written.
    """
    require_new(out)
    try:
        with write_atomically(out) as draft:
            with draft.open("xb") as file:
                try:
                    yield file
                except BaseException:
                    draft.unlink(missing_ok=True)
                    raise
            require_new(out)
    except FileExistsError:
        raise SpecError(
            f"there is a file {out}.partial already, written or left behind by another command: give another --out, or move "
            "it away"
        ) from None
    except OSError as error:
        raise SpecError(f"cannot write {out}: {error.strerror or error}") from None


def open_private(path: str, flags: int) -> int:
    """Open a file that only its owner may read: `open(path, "w", opener=open_private)`."""
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)  # an existing file would keep its mode
    return descriptor


def write_text(path: Path, text: str, *, opener: Opener | None = None) -> None:
    """Write a text file in UTF-8; `opener` is passed to `open`, such as `open_private`."""
    with write_atomically(path) as draft, open(draft, "w", encoding="utf-8", opener=opener) as file:
        file.write(text)


def write_json(
    path: Path, document: Any, *, not_finite: Literal["null", "constants"] = "null", opener: Opener | None = None
) -> None:
    """Write a JSON document.

    Args:
        path: The file.
        document: Mapping or dataclass, which may contain others, lists and arrays.
        not_finite: Encoding of non-finite numbers: null, as JSON has no infinity, or the constants `Infinity` and `NaN`.
        opener: Opener for `open`, such as `open_private`.
    """
    content = to_json(document, indent=2, inf_nan_mode=not_finite, fallback=lambda array: array.tolist())
    with write_atomically(path) as draft, open(draft, "wb", opener=opener) as file:
        file.write(content + b"\n")


# ---- scratch folders -------------------------------------------------------------------------------------------------


_LOCK_FILE = ".sottovoce-scratch"
"""Name of the file that marks a scratch folder; the process that uses the folder holds a lock on it."""


@contextmanager
def create_scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Create a folder that is removed when the block ends; first remove abandoned ones of the same prefix.

    Args:
        prefix: Prefix of its name.
        parent: Parent folder (default: the system's folder for temporary files).

    Raises:
        OSError: The folder cannot be created.
    """
    parent = parent or Path(tempfile.gettempdir())
    for each in parent.glob(f"{prefix}*/{_LOCK_FILE}"):
        with suppress(OSError):  # it belongs to another user, or another process was faster
            _remove_abandoned(each)
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder,
        (Path(folder) / f"{_LOCK_FILE}.new").open("xb") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(lock.name, Path(folder) / _LOCK_FILE)  # other processes find it only once it is locked
        yield Path(folder)


def _remove_abandoned(lock: Path) -> None:
    """Remove the scratch folder of a lock file that no process holds.

    Raises:
        OSError: A process holds the lock, or the folder cannot be removed.
    """
    descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # does not block on a named pipe
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_uid == os.geteuid():
            shutil.rmtree(lock.parent)
    finally:
        os.close(descriptor)
