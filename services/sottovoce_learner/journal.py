"""The journal: a noised message, and the budget that is spent with it, stand on disk before the first byte is sent.

Two slots of fixed size, written in turn: a torn write spoils the newest slot and leaves the one before it whole. More is
never needed: it shows what was said last, and what is said again after a break is kept by the links. The file does not
grow, and a slot is

    magic | run hash | round | epsilon spent | length | crc32 of all this and the message | message
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sottovoce.errors import DataError, LocalProtocolError

_HEADER = struct.Struct("<8s16sQdII")
_MAGIC = b"sotto.j1"
_PAGE = 4096

WAY_OUT = (
    "put the file back as it was after the run's last message; where that is lost, move the run's .journal and .ledger out of "
    "the folder, and take what all its planned rounds may have cost (`sottovoce budget`) off this learner's --budget"
)
"""What an owner can do about a journal that is lost."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What was said in a round, and the epsilon spent with it and before it."""

    round: int
    spent: float
    payload: bytes


def last_entry(path: Path, run_id: str) -> Entry | None:
    """The newest whole entry of a journal; None where nothing was said yet.

    Raises:
        DataError: the file is missing, damaged, or another run's: what was spent cannot be known.
    """
    raw = _read(path)
    while True:
        try:
            return max(_entries(raw, run_id, path), key=lambda entry: entry.round, default=None)
        except DataError:
            # Its learner may be writing rounds while we read: damage is what a second look shows unchanged.
            if (again := _read(path)) == raw:
                raise
            raw = again


def is_blank(path: Path) -> bool:
    """Was nothing ever written into a journal?"""
    return _blank(_read(path))


def _blank(raw: bytes) -> bool:
    return raw.count(0) == len(raw)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"the journal {path} cannot be read: {error.strerror}; {WAY_OUT}") from None


def _entries(raw: bytes, run_id: str, path: Path) -> list[Entry]:
    """The whole entries of both slots, oldest first.

    A write that was torn had not been sent. So one slot may be unreadable, if it is the one whose turn it was: it stands
    beside a whole one, and its header names the round before or after that one's (a page may last before another); or all was
    blank before.

    Raises:
        DataError: anything else: of what was sent, something is lost.
    """
    half, run = len(raw) // 2, _hash(run_id)
    if not raw or len(raw) % (2 * _PAGE):
        raise _damage(path, f"has {len(raw)} bytes, which are no two slots")
    slots = raw[:half], raw[half:]
    found = [_parse(slot) for slot in slots]
    if any(entry is not None and whose != run for entry, whose in found):
        raise _damage(path, f"holds entries of another run than {run_id!r}")
    entries = sorted((entry for entry, _ in found if entry is not None), key=lambda entry: entry.round)
    rest = [(slot, k) for k, slot in enumerate(slots) if found[k][0] is None]
    if not _follow(entries, rest, half):
        raise _damage(path, "has a slot that was damaged or wiped")
    return entries


def _follow(entries: list[Entry], rest: list[tuple[bytes, int]], half: int) -> bool:
    """Can the slots be what writing rounds 0, 1, 2, ... in turn has left, the last of them torn?"""
    if len(entries) == 2:
        return entries[1].round == entries[0].round + 1
    slot, place = rest[0]
    round_there, length = _claims(slot)
    if _HEADER.size + length > half:  # the file was cut
        return False
    if not entries:  # the first write of all was torn, if there was one
        return round_there == 0 and _blank(rest[1][0])
    newest = entries[0].round
    if _blank(slot):
        return newest == 0 and place == 1
    return place == (newest + 1) % 2 and round_there in (max(newest - 1, 0), newest + 1)


def _claims(slot: bytes) -> tuple[int, int]:
    """Round and length that a slot's header names, whole or not."""
    _, _, t, _, length, _ = _HEADER.unpack_from(slot)
    return t, length


def _damage(path: Path, what: str) -> DataError:
    return DataError(f"the journal {path} {what}: what was spent in its run cannot be known; {WAY_OUT}")


def _hash(run_id: str) -> bytes:
    return hashlib.sha256(run_id.encode()).digest()[:16]


def _header(run: bytes, entry: Entry, checksum: int) -> bytes:
    return _HEADER.pack(_MAGIC, run, entry.round, entry.spent, len(entry.payload), checksum)


def _parse(raw: bytes) -> tuple[Entry | None, bytes]:
    """The entry of a slot, if it is whole, and the hash of its run."""
    magic, whose, t, spent, length, checksum = _HEADER.unpack_from(raw)
    payload = raw[_HEADER.size : _HEADER.size + length]
    entry = Entry(t, spent, payload)
    whole = magic == _MAGIC and zlib.crc32(_header(whose, entry, 0) + payload) == checksum
    return (entry if whole else None), whose


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Journal:
    """The journal of one learner in one run.

    Args:
        path: the file; its folder must exist.
        run_id: the run.
        message_size: length of every message.
        durability: `process` survives the death of this process; `power` is on the disk when `write` returns.

    Raises:
        DataError: there is a file of another size, which is not this run's.
    """

    def __init__(self, path: Path, run_id: str, message_size: int, durability: Literal["process", "power"]) -> None:
        self._path, self._run_id, self._run = path, run_id, _hash(run_id)
        self._message_size = message_size
        self._slot = -(-(_HEADER.size + message_size) // _PAGE) * _PAGE
        self._sync = durability == "power"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._allocate()
        except BaseException:
            self.close()
            raise

    def _allocate(self) -> None:
        """A file of its full size, all zero, before anything is written: a sync then has no metadata to write."""
        size = os.fstat(self._file).st_size
        if size == 2 * self._slot:
            return
        if not _blank(os.pread(self._file, size, 0)):
            raise _damage(self._path, f"has {size} bytes in place of {2 * self._slot}")
        os.ftruncate(self._file, 0)
        os.posix_fallocate(self._file, 0, 2 * self._slot)
        os.fsync(self._file)
        sync_folder(self._path.parent)  # the new name has to last, too

    def write(self, entry: Entry) -> None:
        """Make an entry last. Only after this may the message be sent.

        Raises:
            LocalProtocolError: a message of another length: lengths must not depend on the data.
            OSError: it could not be written whole. It does not count, and must not be sent.
        """
        if len(entry.payload) != self._message_size:
            raise LocalProtocolError(
                f"a message must have {self._message_size} bytes in every round, got {len(entry.payload)}"
            )
        body = _header(self._run, entry, 0) + entry.payload
        header = _header(self._run, entry, zlib.crc32(body))
        wanted = len(header) + self._message_size
        written = os.pwritev(self._file, (header, entry.payload), (entry.round % 2) * self._slot)
        if written != wanted:
            raise OSError(errno.EIO, f"{written} of {wanted} bytes were written")
        if self._sync:
            os.fdatasync(self._file)

    def entries(self) -> list[Entry]:
        """The whole entries, oldest first.

        Raises:
            DataError: the file is damaged, or another run's.
        """
        return _entries(os.pread(self._file, 2 * self._slot, 0), self._run_id, self._path)

    def close(self) -> None:
        """Close the file; it stays on disk."""
        os.close(self._file)
