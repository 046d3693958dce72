"""The journal: a noised message, and the budget that is spent with it, stand on disk before the first byte is sent.

Two slots of fixed size, written in turn: a torn write spoils the newest slot and leaves the one before it whole. More is
never needed: it shows what was said last, and what is said again after a break is kept by the links. The file does not
grow, and a slot is

    magic | run hash | round | epsilon spent | length | crc32 of all this and the message | message
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sottovoce.errors import LocalProtocolError

_HEADER = struct.Struct("<8s16sQdII")
_MAGIC = b"sotto.j1"
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Entry:
    """What was said in a round, and the epsilon spent with it and before it."""

    round: int
    spent: float
    payload: bytes


def last_entry(path: Path) -> Entry | None:
    """The newest whole entry of a journal, of whichever run it is; None where nothing was said yet."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    half = len(raw) // 2
    found = (_parse(raw[:half]), _parse(raw[half:]))
    return max((entry for entry in found if entry is not None), key=lambda entry: entry.round, default=None)


def _header(run: bytes, entry: Entry, checksum: int) -> bytes:
    return _HEADER.pack(_MAGIC, run, entry.round, entry.spent, len(entry.payload), checksum)


def _parse(raw: bytes, run: bytes | None = None) -> Entry | None:
    """The entry of a slot, if it is whole, and of this run."""
    if len(raw) < _HEADER.size:
        return None
    magic, whose, t, spent, length, checksum = _HEADER.unpack_from(raw)
    payload = raw[_HEADER.size : _HEADER.size + length]
    entry = Entry(t, spent, payload)
    if magic != _MAGIC or run not in (None, whose) or zlib.crc32(_header(whose, entry, 0) + payload) != checksum:
        return None
    return entry


class Journal:
    """The journal of one learner in one run.

    Args:
        path: the file; its folder must exist.
        run_id: entries of other runs do not count.
        message_size: length of every message.
        durability: `process` survives the death of this process; `power` is on the disk when `write` returns.
    """

    def __init__(self, path: Path, run_id: str, message_size: int, durability: Literal["process", "power"]) -> None:
        self._run = hashlib.sha256(run_id.encode()).digest()[:16]
        self._message_size = message_size
        self._slot = -(-(_HEADER.size + message_size) // _PAGE) * _PAGE
        self._sync = durability == "power"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self._file).st_size < 2 * self._slot:
            os.posix_fallocate(self._file, 0, 2 * self._slot)  # a sync then has no metadata to write
            os.fsync(self._file)
            folder = os.open(path.parent, os.O_RDONLY)  # the new name has to last, too
            os.fsync(folder)
            os.close(folder)

    def write(self, entry: Entry) -> None:
        """Make an entry last. Only after this may the message be sent.

        Raises:
            LocalProtocolError: a message of another length: lengths must not depend on the data.
        """
        if len(entry.payload) != self._message_size:
            raise LocalProtocolError(
                f"a message must have {self._message_size} bytes in every round, got {len(entry.payload)}"
            )
        body = _header(self._run, entry, 0) + entry.payload
        header = _header(self._run, entry, zlib.crc32(body))
        os.pwritev(self._file, (header, entry.payload), (entry.round % 2) * self._slot)
        if self._sync:
            os.fdatasync(self._file)

    def entries(self) -> list[Entry]:
        """The whole entries of this run, oldest first."""
        found = (self._read(slot) for slot in (0, 1))
        return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.round)

    def close(self) -> None:
        """Close the file; it stays on disk."""
        os.close(self._file)

    def _read(self, slot: int) -> Entry | None:
        return _parse(os.pread(self._file, self._slot, slot * self._slot), self._run)
