"""Files that commands write: those that are new, and JSON of plain values, dataclasses and arrays, for programs.

`scratch` makes a folder for a while: one that a killed process has left is removed by the next process.
"""

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
"""What opens a file: its path and flags to a descriptor."""


def require_new(out: Path | None) -> None:
    """What an earlier command wrote is not replaced: refused before anything is done for it. None: nothing is written.

    Raises:
        SpecError: something is there.
    """
    if out is not None and os.path.lexists(out):
        raise SpecError(f"there is a file {out} already: give another --out, or move it away")


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Where to write a file: beside its place, as `NAME.partial`, which takes its name when the block ends.

    It stays what it is called where an error or Ctrl-C ends the block, or the process: what is not whole never looks so.
    """
    draft = path.with_name(f"{path.name}.partial")
    yield draft
    draft.replace(path)


@contextmanager
def create_file(out: Path) -> Iterator[BinaryIO]:
    """A file that was not there, complete once the block ends; where that fails, nothing stays.

    Raises:
        SpecError: something is there by now, or it cannot be written.
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
            f"there is a file {out}.partial already, which another command writes, or has left when it was killed: "
            "give another --out, or move it away"
        ) from None
    except OSError as error:
        raise SpecError(f"cannot write {out}: {error.strerror or error}") from None


def open_private(path: str, flags: int) -> int:
    """What opens a file that its user alone may read: `open(path, "w", opener=private)`."""
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)  # a file that was there keeps its mode
    return descriptor


def write_text(path: Path, text: str, *, opener: Opener | None = None) -> None:
    """Write a text file, in UTF-8; `opener`: as of `open`, such as `private`."""
    with write_atomically(path) as draft, open(draft, "w", encoding="utf-8", opener=opener) as file:
        file.write(text)


def write_json(
    path: Path, document: Any, *, not_finite: Literal["null", "constants"] = "null", opener: Opener | None = None
) -> None:
    """Write a document: a mapping or a dataclass, of such, of lists and of arrays.

    Args:
        path: the file.
        document: what it says.
        not_finite: how numbers stand in it that are not finite: as null, for JSON knows no infinity, or as `Infinity` and `NaN`.
        opener: as of `open`, such as `private`.
    """
    content = to_json(document, indent=2, inf_nan_mode=not_finite, fallback=lambda array: array.tolist())
    with write_atomically(path) as draft, open(draft, "wb", opener=opener) as file:
        file.write(content + b"\n")


# ---- folders for a while ---------------------------------------------------------------------------------------------


_MARK = ".sottovoce-scratch"
"""A file that makes a folder one of these; whoever works there holds a lock on it, which ends with the process."""


@contextmanager
def create_scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A folder that is removed in the end; before, those that were left behind under the same prefix.

    Args:
        prefix: of its name.
        where: in which folder (default: where the system has such).

    Raises:
        OSError: it cannot be made.
    """
    parent = parent or Path(tempfile.gettempdir())
    for each in parent.glob(f"{prefix}*/{_MARK}"):
        with suppress(OSError):  # another user's, or another process has been faster
            _clear(each)
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as made,
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
