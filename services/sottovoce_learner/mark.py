"""The mark: how far something visible rests on a learner's log and ledger, in a file of its own.

A log that was cut looks like one whose writer died; the mark says that it was longer. Two slots, written in turn, after the
entry and before what rests on it is seen: a torn write spoils one slot, and the other stands for the write before. So the mark
is a lower bound of what was written, never more.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

from sottovoce.errors import DataError
from sottovoce_learner.bodies import NOTHING, Grant
from sottovoce_learner.lines import Held

_SLOT = struct.Struct("<8sI4xQQ16s16sQ16sd16sQ16sdQd")
_MAGIC, FORMAT = b"sotto.m\0", 1
SLOT = 512
NO_RUN = bytes(16)


class Mark(NamedTuple):
    """What a learner's files must hold at least.

    Attributes:
        store: the ledger's own number.
        host: the machine since its start, as `log.host` says.
        lines, lines_chain: of the ledger.
        elsewhere: epsilon of all runs that the ledger has closed.
        run: hash of the open run; `NO_RUN`: none.
        sequence, chain: of the run's last entry that something visible rests on.
        spent: epsilon of the run by then.
        reserved: the most that may have been said and spent in the run.
        turn: marks before this one.
        inode: of the file that it was written to.
    """

    store: bytes
    host: bytes
    lines: int
    lines_chain: bytes
    elsewhere: float = 0.0
    run: bytes = NO_RUN
    sequence: int = 0
    chain: bytes = bytes(16)
    spent: float = 0.0
    reserved: Grant = NOTHING
    turn: int = 0
    inode: int = 0


class MarkFile:
    """The mark of one learner, open for writing.

    Args:
        path: the file; made where it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            found = _newest(os.pread(self._file, 2 * SLOT, 0), path)
            self._inode = os.fstat(self._file).st_ino
            self._held = Held(path, self._file)
        except BaseException:
            self.close()
            raise
        self._turn = 0 if found is None else found.turn + 1

    def write(self, mark: Mark) -> None:
        """Make a mark, in the place of the one before the last.

        Raises:
            OSError: it could not be written.
        """
        os.pwrite(self._file, _encode(mark, self._turn, self._inode), self._turn % 2 * SLOT)
        self._turn += 1

    def settle(self, mark: Mark, *, sync: bool = True) -> None:
        """Make a mark in both places, and let it last: no mark of before is left to fall back to."""
        self.write(mark)
        self.write(mark)
        if sync:
            os.fsync(self._file)

    def require_in_place(self) -> None:
        """Raise `DataError` unless the file is still there; once settled it has both slots."""
        self._held.require_in_place(SLOT + 1)

    def close(self) -> None:
        """Close the file; it stays on disk."""
        os.close(self._file)


def read_mark(path: Path, *, copied: bool = False) -> Mark | None:
    """The newest mark of a file; None where there is no whole one.

    Args:
        path: the file.
        copied: it may be a copy.

    Raises:
        DataError: it is of a newer format, or this file is a copy of the one that was written.
    """
    try:
        raw = path.read_bytes()
        inode = path.stat().st_ino
    except OSError:
        return None
    found = _newest(raw, path)
    if found is not None and found.inode != inode and not copied:
        raise DataError(
            f"{path} was written at another place: this state folder is a copy, and two learners with one ledger would each "
            "spend the whole budget. Start the learner on the folder that it was in. Where this one is the newest and the only "
            f"one that is left, say so: `sottovoce ledger --moved --state {path.parent} --learner {path.stem}`"
        )
    return found


def _encode(mark: Mark, turn: int, inode: int) -> bytes:
    raw = _SLOT.pack(
        _MAGIC,
        FORMAT,
        inode,
        turn,
        mark.store,
        mark.host,
        mark.lines,
        mark.lines_chain,
        mark.elsewhere,
        mark.run,
        mark.sequence,
        mark.chain,
        mark.spent,
        mark.reserved.until,
        mark.reserved.epsilon,
    )
    return raw + zlib.crc32(raw).to_bytes(4, "little")


def _newest(raw: bytes, path: Path) -> Mark | None:
    slots = (_decode(raw[k * SLOT : (k + 1) * SLOT], path) for k in range(2))
    return max((mark for mark in slots if mark is not None), key=lambda mark: mark.turn, default=None)


def _decode(raw: bytes, path: Path) -> Mark | None:
    if len(raw) < _SLOT.size + 4 or not raw.startswith(_MAGIC):
        return None
    if zlib.crc32(raw[: _SLOT.size]) != int.from_bytes(raw[_SLOT.size : _SLOT.size + 4], "little"):
        return None
    _, form, inode, turn, store, host, lines, lines_chain, elsewhere, *rest = _SLOT.unpack_from(raw)
    if form > FORMAT:
        raise DataError(f"{path} has format {form}, and this version reads up to {FORMAT}: take a newer Sottovoce")
    run, sequence, chain, spent, until, reserved = rest
    return Mark(
        store, host, lines, lines_chain, elsewhere, run, sequence, chain, spent, Grant(until, reserved), turn, inode
    )
