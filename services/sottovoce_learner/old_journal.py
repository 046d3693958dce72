"""Journals of earlier versions: what was spent in their runs counts for ever. They are read, and no longer written.

Two slots of fixed size were written in turn: a torn write spoilt the newest slot and left the one before it whole. A slot is

    magic | run hash | round | epsilon spent | length | crc32 of all this and the message | message
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from sottovoce.errors import DataError

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
