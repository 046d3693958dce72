"""Journals of earlier versions: what was spent in them is read, and damage is never nothing spent."""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sottovoce.errors import DataError
from sottovoce_learner.old_journal import Entry, last_entry

SIZE = 100
HEADER = 8 + 16 + 8 + 8 + 4 + 4
PAGE = 4096


def entry(t: int, size: int = SIZE) -> Entry:
    return Entry(t, 0.25 * t, bytes((t + k) % 256 for k in range(size)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run-0.journal"


def written(path: Path, rounds: range, size: int = SIZE) -> None:
    """As earlier versions wrote it."""
    slot = -(-(HEADER + size) // PAGE) * PAGE
    raw = bytearray(path.read_bytes() if path.exists() else bytes(2 * slot))
    whose = hashlib.sha256(b"run").digest()[:16]
    for t in rounds:
        said = entry(t, size)
        head = struct.pack("<8s16sQdI", b"sotto.j1", whose, t, said.spent, size)
        checksum = zlib.crc32(head + bytes(4) + said.payload)
        whole = head + struct.pack("<I", checksum) + said.payload
        raw[(t % 2) * slot : (t % 2) * slot + len(whole)] = whole
    path.write_bytes(raw)


def read(path: Path, run: str = "run") -> Entry | None:
    return last_entry(path, run)


@pytest.mark.parametrize("size", [1, SIZE, PAGE - HEADER, PAGE - HEADER + 1, 100_000])
def test_the_last_message_is_read(path: Path, size: int) -> None:
    for t in range(4):
        written(path, range(t, t + 1), size)
        assert read(path) == entry(t, size)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 9), st.integers(0, HEADER + SIZE - 1), st.integers(1, 255))
def test_a_torn_write_spoils_the_newest_slot_alone(path: Path, last: int, position: int, flip: int) -> None:
    """Any byte of the newest entry changed: it does not count, and the one before it is whole.

    Where its header no longer names a round or a length that could stand there, that is damage.
    """
    written(path, range(last + 1))
    with path.open("r+b") as file:
        file.seek((last % 2) * PAGE + position)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ flip]))
    try:
        assert read(path) == entry(last - 1)
    except DataError:
        assert 24 <= position < 32 or 40 <= position < 44


@pytest.mark.parametrize("kept", [0, 10, HEADER, HEADER + SIZE - 1])
def test_a_write_that_stopped_in_the_middle_does_not_count(path: Path, kept: int) -> None:
    """The newest slot holds the beginning of the new entry and the end of the one that stood there."""
    written(path, range(4))
    old = path.read_bytes()
    written(path, range(4, 5))
    new = path.read_bytes()
    path.write_bytes(new[:kept] + old[kept:])

    assert read(path) == entry(3)


def spoilt(path: Path, *slots: int) -> None:
    """One bit of the message in these slots is another one."""
    raw = bytearray(path.read_bytes())
    for slot in slots:
        raw[slot * PAGE + 60] ^= 1
    path.write_bytes(raw)


def wiped(path: Path, slot: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[slot * PAGE : (slot + 1) * PAGE] = bytes(PAGE)
    path.write_bytes(raw)


def short(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: spoilt(path, 0, 1),
        lambda path: short(path, PAGE),
        lambda path: short(path, PAGE + 20),
        lambda path: short(path, 0),
        lambda path: wiped(path, 0),
        lambda path: wiped(path, 1),
        lambda path: path.unlink(),
    ],
    ids=["both slots", "half", "cut", "empty", "even slot", "odd slot", "gone"],
)
def test_what_no_torn_write_leaves_is_damage_and_never_nothing_spent(path: Path, harm: Callable[[Path], None]) -> None:
    written(path, range(4))
    assert last_entry(path, "run") == entry(3)
    harm(path)
    with pytest.raises(DataError, match=r"run-0\.journal .*; put the file back as it was"):
        last_entry(path, "run")


def test_long_messages_cut_in_half_are_damage(path: Path) -> None:
    """Half of the file is one slot, whose message stands in what looks like two."""
    written(path, range(1), 5000)
    short(path, 2 * PAGE)
    with pytest.raises(DataError, match="damaged or wiped"):
        last_entry(path, "run")


def test_a_first_write_that_was_torn_was_not_sent(path: Path) -> None:
    written(path, range(1))
    spoilt(path, 0)
    assert last_entry(path, "run") is None


def test_a_second_write_that_was_torn_was_not_sent(path: Path) -> None:
    for beginning in range(0, HEADER + SIZE, 7):
        written(path, range(2))
        raw = path.read_bytes()
        path.write_bytes(raw[: PAGE + beginning] + bytes(PAGE - beginning))
        assert last_entry(path, "run") == entry(0)
        path.unlink()


def test_entries_of_another_run_are_not_counted(path: Path) -> None:
    written(path, range(2))
    with pytest.raises(DataError, match="holds entries of another run than 'other'"):
        last_entry(path, "other")


def test_a_reader_beside_a_writer_sees_no_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads may be of two moments: one slot of round 0, the other of round 3."""
    written(path, range(2))
    early = path.read_bytes()
    written(path, range(2, 4))
    late = path.read_bytes()
    looks = iter([early[:PAGE] + late[PAGE:], late])
    monkeypatch.setattr(Path, "read_bytes", lambda self: next(looks))
    assert last_entry(path, "run") == entry(3)
