"""What others have packed, unpacked in memory: never more than was expected, and nothing of it becomes a path."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from typing import IO

from sottovoce.errors import DataError

_BROKEN = (EOFError, OSError, zlib.error, tarfile.TarError, zipfile.BadZipFile, NotImplementedError, RuntimeError)
"""What Python's readers raise of a file that is torn, of another kind, encrypted, or packed as they do not know."""


def gunzip(packed: bytes, most: int) -> bytes:
    """What is in a gzip file.

    Raises:
        DataError: it is none, it ends too early, or there are more than `most` bytes in it.
    """
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
            return _read(file, most)
    except EOFError:
        raise DataError(f"the gzip file ends too early, after {len(packed):,} bytes: it did not arrive whole") from None
    except _BROKEN:
        raise DataError("must be a gzip file, and is none, or a broken one") from None


def unzip(packed: bytes, member: str, most: int) -> bytes:
    """A file of a zip archive.

    Raises:
        DataError: it is no such archive, lacks the file, or the file has more than `most` bytes.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive, archive.open(member) as file:
            return _read(file, most)
    except KeyError:
        raise DataError(f"the zip archive must hold {member}, and does not") from None
    except _BROKEN:
        raise DataError("must be a zip archive, and is none, or a broken one") from None


def untar(packed: bytes, members: Sequence[str], most: int) -> list[bytes]:
    """Files of a `.tar.gz` archive.

    Raises:
        DataError: it is no such archive, lacks one of them, one is a link, or there are more than `most` bytes in it.
    """
    content = gunzip(packed, most)
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            return [_member(archive, member, most) for member in members]
    except _BROKEN:
        raise DataError("must be a tar archive, and is none, or a broken one") from None


def _member(archive: tarfile.TarFile, name: str, most: int) -> bytes:
    try:
        found = archive.getmember(name)
    except KeyError:
        raise DataError(f"the tar archive must hold {name}, and does not") from None
    file = archive.extractfile(found) if found.isreg() else None  # a link leads elsewhere
    if file is None:
        raise DataError(f"{name} in the tar archive must be a file, and is something else")
    with file:
        return _read(file, most)


def _read(file: IO[bytes] | gzip.GzipFile, most: int) -> bytes:
    content = file.read(most + 1)
    if len(content) > most:
        raise DataError(f"there must be at most {most:,} bytes in it, and there are more")
    return content
