"""The journal: the last two messages survive whatever happens to the newest one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sottovoce.errors import LocalProtocolError
from sottovoce_learner.journal import Entry, Journal

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
    """Any byte of the newest entry changed: it does not count, and the one before it is whole."""
    written(path, range(last + 1))
    with path.open("r+b") as file:
        file.seek((last % 2) * PAGE + position)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ flip]))
    assert read(path) == [entry(last - 1)]


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


def test_a_file_cut_off_holds_what_is_whole(path: Path) -> None:
    written(path, range(2))
    with path.open("r+b") as file:
        file.truncate(PAGE + 20)
    assert read(path) == [entry(0)]


def test_entries_of_another_run_do_not_count(path: Path) -> None:
    written(path, range(2))
    assert read(path, run="other") == []

    journal = Journal(path, "other", SIZE, "process")
    journal.write(entry(7))
    assert journal.entries() == [entry(7)]
    journal.close()
    assert read(path) == [entry(0)]


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
