"""A log whose disk is full: what found no room does not count, and is written when there is."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sottovoce_core.errors import CorruptStateError
from sottovoce_learner.storage import wal
from sottovoce_learner.storage.ledger import LedgerEntry
from sottovoce_learner.storage.run_log import LogOptions, RunLog
from sottovoce_learner.storage.state_folder import DiskFull, LearnerPaths
from sottovoce_learner.storage.store import LearnerStore, end_run
from sottovoce_learner.storage.wal import EntryKind, LogHeader, WriteAheadLog, read_log

ABOUT = LogHeader("00" * 16, "ann", "run-1", "power")


class Disk:
    """A disk that has so many bytes left, counted as files grow; a write to what is there already always fits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.fails = 10**9, 0
        allocate, write = os.posix_fallocate, os.pwrite

        def allocated(file: int, at: int, size: int) -> None:
            if self.fails or size > self.free:
                raise OSError(self.fails or errno.ENOSPC, "")
            self.free -= size
            allocate(file, at, size)

        def written(file: int, raw: bytes, at: int) -> int:
            if self.fails:
                raise OSError(self.fails, "")
            return write(file, raw, at)

        monkeypatch.setattr(os, "posix_fallocate", allocated)
        monkeypatch.setattr(os, "pwrite", written)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def new_log(folder: Path) -> WriteAheadLog:
    files = LearnerPaths(folder, ABOUT.learner)
    files.get_log_folder(ABOUT.run_id).mkdir()
    return WriteAheadLog(files, ABOUT)


def append(log: WriteAheadLog, k: int) -> None:
    log.append(EntryKind.ROUND, k, 0.5 * k, 1.0 * k, bytes([k]) * 3_000)


def bodies(folder: Path) -> list[bytes]:
    return [entry.body for entry in read_log(LearnerPaths(folder, ABOUT.learner).get_log_folder(ABOUT.run_id)).entries]


@pytest.mark.parametrize("segment", [wal.MAX_SEGMENT_BYTES, 20_000], ids=["in a segment", "at its end"])
@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EDQUOT])
def test_an_entry_is_tried_again_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk, segment: int, full: int
) -> None:
    """Whatever was refused leaves no trace: neither in the file nor in the chain."""
    monkeypatch.setattr(wal, "PREALLOCATED_BYTES", 4_096)
    monkeypatch.setattr(wal, "MAX_SEGMENT_BYTES", segment)
    log = new_log(tmp_path)
    for k in range(20):
        if k % 3 == 2:
            disk.fails = full
            for _ in range(3):
                with pytest.raises(DiskFull):
                    append(log, k)
                assert bodies(tmp_path) == [bytes([j]) * 3_000 for j in range(k)]
            disk.fails = 0
        append(log, k)
        log.sync()
    log.close()
    assert bodies(tmp_path) == [bytes([k]) * 3_000 for k in range(20)]
    assert len(list(tmp_path.rglob("*.log"))) == (1 if segment == wal.MAX_SEGMENT_BYTES == 64 * 2**20 else 4)


def test_a_disk_without_room_for_a_segment_leaves_none(tmp_path: Path, disk: Disk) -> None:
    disk.free = 1_000
    with pytest.raises(DiskFull, match="No space left on device"):
        new_log(tmp_path)
    assert list(tmp_path.rglob("*.log")) == []


def test_a_disk_that_fails_is_not_full(tmp_path: Path, disk: Disk) -> None:
    log = new_log(tmp_path)
    disk.fails = errno.EIO
    with pytest.raises(OSError) as failure:  # noqa: PT011 - which one, is asked below
        append(log, 0)
    assert not isinstance(failure.value, DiskFull) and failure.value.errno == errno.EIO
    disk.fails = 0
    log.close()


def test_a_sync_that_finds_no_room_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it could not write may be gone, though the next sync says that all is well."""
    log = new_log(tmp_path)
    append(log, 0)

    def full(file: int) -> Any:
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(OSError) as failure:  # noqa: PT011
        log.sync()
    assert not isinstance(failure.value, DiskFull)
    monkeypatch.undo()
    for _ in range(2):
        with pytest.raises(OSError, match="an earlier sync failed"):
            log.sync()
    log.close()


# ---- files that stay open ----------------------------------------------------------------------------------------------


def opened(folder: Path) -> RunLog:
    """The log of a run: a new one, or the one that stands there."""
    terms = LogOptions("power", message_size=8, window=1, rounds=2, budget=None)
    return LearnerStore(folder, "ann").open_run(LedgerEntry("ann", "run-1", 0, 3, "{}"), terms)


def left_open(folder: Path) -> list[str]:
    """Files below a folder that this process has open."""
    names = []
    for descriptor in Path("/proc/self/fd").glob("*"):
        with suppress(FileNotFoundError):
            names.append(os.readlink(descriptor))
    return [name for name in names if name.startswith(f"{folder}/")]


@pytest.mark.parametrize("begun", [False, True], ids=["begun", "gone on with"])
def test_a_run_that_cannot_be_opened_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """Whatever fails: a learner that is told of it again and again lives on. Nor does one whose log cannot be put away."""
    change, at = math.inf, 0  # of a file, before one that fails

    def failing(real: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal change
            change -= 1
            if change == 0:
                raise OSError(errno.EIO, "")
            return real(*given, **named)

        return call

    for name in ("pwrite", "pread", "ftruncate", "fsync", "posix_fallocate", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    ways: list[Callable[[Path], None]] = [
        lambda folder: opened(folder).close(),
        lambda folder: end_run(folder, "ann", "run-1"),
    ]
    reached = True
    while reached:
        at, reached, folder, change = at + 1, False, tmp_path / str(at), math.inf
        if begun:
            opened(folder).close()
        for what in ways:
            change = at
            with suppress(OSError, CorruptStateError):  # the latter of what the former has left
                what(folder)
            assert left_open(tmp_path) == []
            reached |= change <= 0
    assert at > 9
