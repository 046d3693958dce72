"""The log of one learner in one run, on disk: segments of entries, allocated before they are written.

A segment is a page that says whose it is and what its first entry stands behind, and entries after that. Nothing in a segment
is ever changed. Space is allocated ahead, all zero, so that a sync has no metadata to write.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from sottovoce.errors import DataError
from sottovoce_learner.bodies import Grant, Snapshot
from sottovoce_learner.entries import START, Entry, Kind, encode, walk
from sottovoce_learner.lines import Held, content, ending

Durability = Literal["process", "power"]

_MAGIC, FORMAT = b"sotto.l\0", 1
PAGE = 4096
_PIECE = 64 * 1024 * 1024
"""Bytes of a snapshot that are written at a time."""
AHEAD, SEGMENT = 256 * 1024, 64 * 1024 * 1024
"""Bytes allocated at a time, and those of a segment, unless one entry is longer."""


class DiskFull(OSError):
    """An entry found no room, and does not count; nothing of what stands in the log is in doubt, and it may be tried again."""

    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass(frozen=True, slots=True)
class About:
    """Whose log it is.

    Attributes:
        store: number of the learner's ledger, hexadecimal.
        learner: its name.
        run_id: the run.
        durability: `process` survives the death of the writer; `power` is on the disk when `sync` returns.
    """

    store: str
    learner: str
    run_id: str
    durability: Durability


@dataclass(frozen=True, slots=True)
class Reading:
    """What a log holds.

    Attributes:
        about: as its first segment says; None where there is none.
        first: sequence number that its first entry must have; above 0 where a snapshot stands in place of what was before.
        base: chain that its first entry stands behind.
        entries: those that are right, oldest first.
        chains: behind each of them.
        path: the newest segment.
        end: first byte of it behind the last right entry.
    """

    about: About | None
    first: int
    base: bytes
    entries: tuple[Entry, ...]
    chains: tuple[bytes, ...]
    path: Path
    end: int

    @property
    def next(self) -> int:
        """The sequence number that is due."""
        return self.first + len(self.entries)

    @property
    def folder(self) -> Path:
        """Where it stands."""
        return self.path.parent

    def chain(self, sequence: int) -> bytes | None:
        """What stands behind an entry; None where it is not there."""
        at = sequence - self.first
        if at == -1:
            return self.base
        return self.chains[at] if 0 <= at < len(self.chains) else None

    @property
    def uncovered(self) -> tuple[Entry, ...]:
        """Entries that no snapshot stands in place of."""
        return self.entries if self.snapshot is None else self.entries[self.snapshot.covers + 1 - self.first :]

    @property
    def snapshot(self) -> Snapshot | None:
        """The newest; None: nothing is missing before the first entry."""
        bodies = (entry.body for entry in reversed(self.entries) if entry.kind is Kind.SNAPSHOT)
        return next((Snapshot.decode(body) for body in bodies), None)


class Log:
    """A log, open for writing. Every error of the system is passed on: what could not be written whole does not count.

    Args:
        folder: the run's, of this learner.
        about: whose it is.
        reading: what it holds already; None: it begins here.
        kept: folder for what is forgotten; None: it is deleted.
    """

    def __init__(self, folder: Path, about: About, reading: Reading | None = None, kept: Path | None = None) -> None:
        self.folder, self._about, self._kept = folder, about, kept
        self.sequence, self.chain = 0, START
        self._unsynced, self._doubtful = False, False
        if reading is None or reading.about is None:
            self._begin(0)
            return
        self.sequence, self._segment = reading.next, int(reading.path.stem)
        self.chain = reading.chains[-1] if reading.chains else reading.base
        self._file = os.open(reading.path, os.O_RDWR | os.O_CLOEXEC)
        self._at = reading.end
        try:
            self._held = Held(reading.path, self._file)
            self._wipe()
        except BaseException:
            self.close()
            raise

    def append(self, kind: Kind, t: int, spent: float, in_all: float, body: bytes, incarnation: int = 0) -> int:
        """Write an entry; returns its sequence number. Only after `sync` does it survive what it must.

        Raises:
            DiskFull: there is no room for it.
        """
        raw, after = encode(Entry(kind, self.sequence, t, spent, in_all, body, incarnation), self.chain)
        if self._at > PAGE and self._at + len(raw) > SEGMENT:
            self.turn()
        self._allocate(self._at + len(raw))
        with _room:
            if os.pwrite(self._file, raw, self._at) != len(raw):
                raise DiskFull
        self._at, self.chain = self._at + len(raw), after
        self.sequence += 1
        self._unsynced = True
        return self.sequence - 1

    def sync(self) -> None:
        """Let all that was written survive what it must.

        Raises:
            OSError: it does not, or an earlier sync failed: what that could not write may be gone, though this one would say that
                all is well.
        """
        if self._doubtful:
            raise OSError(errno.EIO, "an earlier sync failed")
        if self._unsynced and self._about.durability == "power":
            self._doubtful = True
            os.fdatasync(self._file)
            self._doubtful = False
        self._unsynced = False

    def require_in_place(self) -> None:
        """Raise `DataError` unless what was written stands where a restart of the learner would look for it."""
        self._held.require_in_place(self._allocated)

    def forget(self, covers: int) -> None:
        """Put away all segments that a snapshot, up to this entry, stands in place of; delete other snapshots, and drafts."""
        segments = sorted(self.folder.glob("*.log"))
        for segment, after in pairwise(segments):  # oldest first, so that what is left hangs together
            if (_first(after) or 0) > covers + 1:
                break
            put_away(segment, self._kept)
        for other in self.folder.glob("*.snapshot*"):
            if other.name != f"{covers:016d}.snapshot":
                other.unlink()

    def close(self) -> None:
        """Close the file; it stays on disk."""
        os.close(self._file)

    def turn(self) -> None:
        """Go on in a new segment."""
        self.sync()
        old = self._file
        self._begin(self._segment + 1)
        os.close(old)

    def _begin(self, number: int) -> None:
        path = _path(self.folder, number)
        with _room:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with _room:
                os.posix_fallocate(file, 0, PAGE + AHEAD)
                os.pwrite(file, _header(self._about, self.sequence, self.chain), 0)
            os.fsync(file)
            sync_folder(self.folder)
            held = Held(path, file)
        except BaseException:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        self._file, self._at, self._allocated = file, PAGE, PAGE + AHEAD
        self._segment, self._held = number, held

    def _allocate(self, size: int) -> None:
        if size > self._allocated:
            wanted = size + AHEAD
            with _room:
                os.posix_fallocate(self._file, self._allocated, wanted - self._allocated)
            if self._about.durability == "power":
                os.fsync(self._file)
            self._allocated = wanted

    def _wipe(self) -> None:
        """What a torn write left behind the last entry is cut off: nothing rested on it."""
        os.ftruncate(self._file, self._at)
        self._allocated = self._at
        with suppress(DiskFull):  # there will be room, or the next entry waits for it
            self._allocate(self._at + 1)
        for other in self.folder.glob("*.log"):
            if int(other.stem) > self._segment:
                other.unlink()


def put_away(segment: Path, kept: Path | None) -> None:
    """Delete a segment, or move it to a folder of the same disk."""
    if kept is None:
        segment.unlink()
        return
    kept.mkdir(mode=0o700, parents=True, exist_ok=True)
    segment.replace(kept / segment.name)


def read_log(folder: Path) -> Reading:
    """All that is right in a log; of one whose learner deletes segments meanwhile, what comes before the first of them.

    Raises:
        DataError: a segment is of a newer format.
    """
    about, entries, chains = None, [], []
    path, end, first, base = folder / "none", 0, 0, START
    due, chain = first, base
    for segment in ending(folder, ".log"):
        raw = content(segment)
        facts = _facts(raw, segment)
        if facts is not None and about is None:
            due, chain = first, base = facts["sequence"], bytes.fromhex(facts["chain"])
        if facts is None or (facts["sequence"], facts["chain"]) != (due, chain.hex()):
            break
        found = walk(raw, PAGE, due, chain)
        about = about or About(**facts["about"])
        entries += [placed.entry for placed in found]
        chains += [placed.chain for placed in found]
        path, end = segment, found[-1].end if found else PAGE
        due, chain = due + len(found), found[-1].chain if found else chain
    return Reading(about, first, base, tuple(entries), tuple(chains), path, end)


def begins(segment: Path, sequence: int, chain: bytes) -> bool:
    """Does a segment begin with this entry, behind this chain?

    Raises:
        FileNotFoundError: there is no such segment.
    """
    with segment.open("rb") as file:
        facts = _facts(file.read(PAGE), segment)
    return facts is not None and (facts["sequence"], facts["chain"]) == (sequence, chain.hex())


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
                raise DiskFull
        os.fsync(file)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)
    draft.replace(folder / snapshot.name)
    sync_folder(folder)
    return snapshot


class _Room:
    """Tells a disk that has no room from one that fails. Not of a sync: what that could not write may be lost."""

    def __enter__(self) -> None: ...

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull from None


_room = _Room()


def host() -> bytes:
    """The machine since its start: what was written without a sync is there as long as it is the same."""
    return hashed(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))


def hashed(text: str) -> bytes:
    """16 bytes that stand for a text."""
    return hashlib.sha256(text.encode()).digest()[:16]


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.log"


def _header(about: About, sequence: int, chain: bytes) -> bytes:
    facts = {"about": asdict(about), "sequence": sequence, "chain": chain.hex()}
    text = json.dumps(facts, separators=(",", ":")).encode()
    head = _MAGIC + FORMAT.to_bytes(4, "little") + len(text).to_bytes(4, "little") + text
    return head + zlib.crc32(head).to_bytes(4, "little")


def _first(segment: Path) -> int | None:
    """Sequence number of a segment's first entry."""
    with segment.open("rb") as file:
        facts = _facts(file.read(PAGE), segment)
    return None if facts is None else int(facts["sequence"])


def _facts(raw: bytes, path: Path) -> dict[str, Any] | None:
    """What a segment's first page says; None where it cannot be read."""
    end = 16 + int.from_bytes(raw[12:16], "little")
    if not raw.startswith(_MAGIC) or zlib.crc32(raw[:end]).to_bytes(4, "little") != raw[end : end + 4]:
        return None
    if (form := int.from_bytes(raw[8:12], "little")) > FORMAT:
        raise DataError(f"{path} has format {form}, and this version reads up to {FORMAT}: take a newer Sottovoce")
    facts: dict[str, Any] = json.loads(raw[16:end])
    return facts
