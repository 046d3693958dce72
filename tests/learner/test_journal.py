"""The journal: the last two messages survive whatever happens to the newest one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sottovoce.errors import DataError, LocalProtocolError
from sottovoce_learner.journal import Entry, Journal, last_entry

SIZE = 100
HEADER = 8 + 16 + 8 + 8 + 4 + 4
PAGE = 4096


def entry(t: int, size: int = SIZE) -> Entry:
    return Entry(t, 0.25 * t, bytes((t + k) % 256 for k in range(size)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run-0.journal"


def written(path: Path, rounds: range, size: int = SIZE) -> None:
    journal = Journal(path, "run", size, "process")
    for t in rounds:
        journal.write(entry(t, size))
    journal.close()


def read(path: Path, run: str = "run", size: int = SIZE) -> list[Entry]:
    journal = Journal(path, run, size, "process")
    try:
        return journal.entries()
    finally:
        journal.close()


def test_a_new_journal_is_empty(path: Path) -> None:
    assert read(path) == []


@pytest.mark.parametrize("durability", ["process", "power"])
def test_the_last_two_messages_come_back_oldest_first(path: Path, durability: str) -> None:
    journal = Journal(path, "run", SIZE, "power" if durability == "power" else "process")
    for t in range(6):
        journal.write(entry(t))
        assert journal.entries() == [entry(k) for k in range(max(0, t - 1), t + 1)]
    journal.close()
    assert read(path) == [entry(4), entry(5)]


def test_what_is_written_is_in_the_file_at_once(path: Path) -> None:
    """Nothing waits in this process: another reader sees it while the journal is open."""
    journal = Journal(path, "run", SIZE, "process")
    journal.write(entry(0))
    assert read(path) == [entry(0)]
    journal.close()


@pytest.mark.parametrize("size", [1, SIZE, PAGE - HEADER, PAGE - HEADER + 1, 100_000])
def test_messages_of_any_size_fit_and_slots_do_not_overlap(path: Path, size: int) -> None:
    written(path, range(3), size)
    assert read(path, size=size) == [entry(1, size), entry(2, size)]


def test_the_file_does_not_grow(path: Path) -> None:
    sizes = set()
    for rounds in (range(1), range(2), range(50)):
        written(path, rounds)
        sizes.add(path.stat().st_size)
    assert sizes == {2 * PAGE}


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
        assert read(path) == [entry(last - 1)]
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

    unchanged = kept <= 24  # the first fields are the same in all entries of a run
    assert read(path) == ([entry(2), entry(3)] if unchanged else [entry(3)])


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
    assert last_entry(path, "run") is None and read(path) == []


def test_a_second_write_that_was_torn_was_not_sent(path: Path) -> None:
    for beginning in range(0, HEADER + SIZE, 7):
        written(path, range(2))
        raw = path.read_bytes()
        path.write_bytes(raw[: PAGE + beginning] + bytes(PAGE - beginning))
        assert last_entry(path, "run") == entry(0)
        path.unlink()


def test_entries_of_another_run_are_neither_counted_nor_written_over(path: Path) -> None:
    written(path, range(2))
    for look in (lambda: read(path, run="other"), lambda: last_entry(path, "other")):
        with pytest.raises(DataError, match="holds entries of another run than 'other'"):
            look()
    with pytest.raises(DataError, match="has 8192 bytes in place of 16384"):
        Journal(path, "run", PAGE, "process")
    assert read(path) == [entry(0), entry(1)]


def test_a_write_that_is_not_whole_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(path, "run", SIZE, "process")
    whole = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda file, parts, at: whole(file, [parts[0], parts[1][:-1]], at))
    with pytest.raises(OSError, match=f"{HEADER + SIZE - 1} of {HEADER + SIZE} bytes were written"):
        journal.write(entry(0))
    assert journal.entries() == []
    journal.close()


def test_a_reader_beside_a_writer_sees_no_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads may be of two moments: one slot of round 0, the other of round 3."""
    written(path, range(2))
    early = path.read_bytes()
    written(path, range(2, 4))
    late = path.read_bytes()
    looks = iter([early[:PAGE] + late[PAGE:], late])
    monkeypatch.setattr(Path, "read_bytes", lambda self: next(looks))
    assert last_entry(path, "run") == entry(3)


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1])
def test_a_message_of_another_length_is_refused_and_nothing_changes(path: Path, size: int) -> None:
    written(path, range(2))
    journal = Journal(path, "run", SIZE, "process")
    with pytest.raises(LocalProtocolError, match=f"must have {SIZE} bytes in every round, got {size}"):
        journal.write(entry(2, size))
    assert journal.entries() == [entry(0), entry(1)]
    journal.close()


def test_nobody_else_may_read_it(path: Path) -> None:
    written(path, range(1))
    assert path.stat().st_mode & 0o077 == 0


def test_power_syncs_before_it_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            calls.append(name)
            return function(*arguments)

        return noted

    monkeypatch.setattr(os, "pwritev", noting("write", os.pwritev))
    monkeypatch.setattr(os, "fdatasync", noting("sync", os.fdatasync))
    for durability, expected in (("power", ["write", "sync"]), ("process", ["write"])):
        journal = Journal(path, "run", SIZE, "power" if durability == "power" else "process")
        calls.clear()
        journal.write(entry(0))
        assert calls == expected
        journal.close()
