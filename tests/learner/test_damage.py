"""Damage of a state folder: whatever is cut, flipped, lost or another's, it is noticed, or nothing was lost by it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sottovoce_core.errors import CorruptStateError
from sottovoce_learner.storage import ledger, state_folder, wal
from sottovoce_learner.storage.ledger import LedgerEntry, StoredState
from sottovoce_learner.storage.run_log import SLOT_BYTES, LogOptions, RunLog
from sottovoce_learner.storage.state_folder import LearnerLock, LearnerPaths, read_if_exists
from sottovoce_learner.storage.store import LearnerStore, Ledger
from sottovoce_learner.storage.wal import PAGE_BYTES, Durability, RoundPayload

SIZE, ROUNDS, PRICE = 24, 3, 0.25
NAME, AHEAD = "ann", 512
Change = Callable[[bytes], bytes]


def line(run_id: str, name: str = NAME) -> LedgerEntry:
    return LedgerEntry(name, run_id, 0, 3, '{"learners":2,"algorithm":{"name":"ldp-dol"}}')


def open_run(
    folder: Path, run_id: str, name: str = NAME, durability: Durability = "process", window: int = 2
) -> RunLog:
    terms = LogOptions(durability, SIZE, window, 9, 5.0)
    store = LearnerStore(folder, name)
    return store.open_run(line(run_id, name), terms)


def say(log: RunLog, rounds: range) -> None:
    for t in rounds:
        heard = (bytes([t]) * SIZE,) if t else ()
        log.write_ahead(t, PRICE * (t + 1), RoundPayload(bytes([100 + t]) * SIZE, heard, t, 1))
        log.append_records(t, b"records")
        log.make_durable()  # as before a receipt


def lived(folder: Path, name: str = NAME) -> float:
    """A learner that has been in a run, and is in another; all that it has spent."""
    say(first := open_run(folder, "run-a", name), range(2))
    first.close()
    say(second := open_run(folder, "run-b", name), range(ROUNDS))
    second.close()
    return PRICE * (2 + ROUNDS)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is allocated ahead: every byte is looked at."""
    monkeypatch.setattr(wal, "PREALLOCATED_BYTES", AHEAD)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert lived(tmp_path) == Ledger(tmp_path).sum_epsilon(NAME)
    return tmp_path


def files(folder: Path) -> list[Path]:
    """All that stands there."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def holds(folder: Path) -> list[object]:
    """What rests on a folder: the entries, up to the last that something visible rests on, and the figures."""
    standing = StoredState.read_verified(LearnerPaths(folder, NAME))
    assert standing is not None and standing.log is not None
    return [
        standing.log.entries,
        [(run.run_id, run.rounds_committed, run.epsilon_spent) for run in standing.iterate_entries()],
    ]


def noticed_or_whole(folder: Path, whole: list[object]) -> bool:
    """Was it noticed? If not, nothing is lost."""
    try:
        assert holds(folder) == whole
    except CorruptStateError as error:
        return any(way_out in str(error) for way_out in ("ledger --repair", "newer Sottovoce", "ledger --adopt-copy"))
    return False


def test_runs_add_up_and_the_open_one_is_the_last(folder: Path) -> None:
    found = [(run.run_id, run.rounds_committed, run.epsilon_spent) for run in Ledger(folder).list_entries()]
    assert found == [("run-a", 2, 2 * PRICE), ("run-b", ROUNDS, ROUNDS * PRICE)]
    assert [path.name for path in files(folder)] == [
        "ann.high_water_mark",
        "ann.runs",
        "00000000.log",
    ]  # one run's log is kept


@contextmanager
def changed(path: Path, raw: bytes) -> Iterator[None]:
    """For a moment; in place, since another file in its place would be noticed as that."""
    was = path.read_bytes()
    path.write_bytes(raw)
    try:
        yield
    finally:
        path.write_bytes(was)


def told(folder: Path) -> tuple[str, int, bool]:
    standing = StoredState.read_verified(LearnerPaths(folder, NAME))
    found = None if standing is None else standing.open_run_progress
    assert found is not None
    return found[0].run_id, found[0].rounds_committed, found[1]


def test_whether_all_that_was_said_was_learned_is_known_by_the_log(tmp_path: Path) -> None:
    log = open_run(tmp_path, "run-a")
    assert told(tmp_path) == ("run-a", 0, False)
    say(log, range(ROUNDS))
    assert told(tmp_path) == ("run-a", ROUNDS, False)
    log.close_rounds(ROUNDS, RoundPayload(b"", (bytes(SIZE),), ROUNDS, 1))
    assert told(tmp_path) == ("run-a", ROUNDS, True)


@pytest.mark.slow
def test_every_byte_flipped(folder: Path) -> None:
    """In the page of a segment's header and in allocated space beyond the last entry no byte has a meaning."""
    whole, unnoticed = holds(folder), dict[str, int]()
    for path in files(folder):
        raw = path.read_bytes()
        for k in range(len(raw.rstrip(b"\0"))):
            with changed(path, raw[:k] + bytes([raw[k] ^ (1 << k % 8)]) + raw[k + 1 :]):
                unnoticed[path.name] = unnoticed.get(path.name, 0) + (not noticed_or_whole(folder, whole))
    # One slot of the mark may be spoilt: the other one stands for the write before.
    assert unnoticed["ann.runs"] == 0
    assert 0 < unnoticed["ann.high_water_mark"] <= 2 * SLOT_BYTES
    assert unnoticed["00000000.log"] <= PAGE_BYTES


@pytest.mark.slow
def test_every_cut(folder: Path) -> None:
    whole = holds(folder)
    for path in files(folder):
        raw = path.read_bytes()
        meant = len(raw.rstrip(b"\0"))
        for k in range(meant):
            with changed(path, raw[:k]):
                assert noticed_or_whole(folder, whole) or path.suffix == ".high_water_mark", (path.name, k)
        with changed(path, raw[:meant]):
            noticed_or_whole(folder, whole)


@pytest.mark.parametrize("change", [lambda raw: b"", lambda raw: bytes(len(raw)), lambda raw: b"\xff" * len(raw)])
def test_every_file_emptied_or_overwritten(folder: Path, change: Change) -> None:
    whole = holds(folder)
    for path in files(folder):
        with changed(path, change(path.read_bytes())):
            assert noticed_or_whole(folder, whole), path.name


@pytest.mark.parametrize("lost", ["ann.high_water_mark", "ann.runs", "run-b@ann", "run-b@ann/00000000.log"])
def test_every_file_lost(folder: Path, lost: str) -> None:
    path = folder / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(
        CorruptStateError, match=r"ledger --repair .* charges what may have been spent, at most "
    ) as caught:
        open_run(folder, "run-c")
    assert str(path.parent if path.suffix == ".log" else path) in str(caught.value)


def test_a_log_of_several_segments_is_one_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them emptied, zeroed, cut, or in the place of another is noticed; a new one that was not written to may go."""
    monkeypatch.setattr(wal, "MAX_SEGMENT_BYTES", PAGE_BYTES + 450)
    assert lived(tmp_path) == Ledger(tmp_path).sum_epsilon(NAME)
    whole, segments = holds(tmp_path), sorted((tmp_path / "run-b@ann").iterdir())
    assert len(segments) > 2
    for path in segments:
        raw = path.read_bytes()
        for other in (b"", bytes(len(raw)), raw[: len(raw.rstrip(b"\0")) - 1], segments[1].read_bytes()):
            if other != raw:
                with changed(path, other):
                    assert noticed_or_whole(tmp_path, whole)
    torn = tmp_path / "run-b@ann" / f"{len(segments):08d}.log"
    torn.write_bytes(bytes(PAGE_BYTES))
    assert holds(tmp_path) == whole
    say(again := open_run(tmp_path, "run-b"), range(ROUNDS, ROUNDS + 3))
    again.close()
    assert Ledger(tmp_path).sum_epsilon(NAME) == PRICE * (2 + ROUNDS + 3)


def lived_with_snapshots(folder: Path) -> float:
    """A learner in a run, whose log begins with a snapshot; all that it has spent."""
    log = open_run(folder, "run-a")
    for t in range(ROUNDS):
        say(log, range(t, t + 1))
        log.commit_snapshot(log.write_snapshot(log.begin_segment(), bytes([t]) * 100))
    say(log, range(ROUNDS, ROUNDS + 1))
    log.close()
    return PRICE * (ROUNDS + 1)


def test_a_learner_may_delete_what_is_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_run(tmp_path, "run-a")
    say(log, range(ROUNDS))

    def first_it_goes_on(path: Path, *_: int) -> bytes:
        monkeypatch.setattr("sottovoce_learner.storage.wal.read_if_exists", read_if_exists)
        log.commit_snapshot(log.write_snapshot(log.begin_segment(), bytes(100)))
        assert not path.exists()
        say(log, range(ROUNDS, ROUNDS + 1))
        return read_if_exists(path)

    monkeypatch.setattr("sottovoce_learner.storage.wal.read_if_exists", first_it_goes_on)
    standing = StoredState.read_verified(LearnerPaths(tmp_path, NAME))
    assert standing is not None and standing.log is not None and standing.log.snapshot is not None
    assert [run.rounds_committed for run in standing.iterate_entries()] == [ROUNDS + 1]


def test_a_snapshot_stands_in_place_of_what_it_covers(tmp_path: Path) -> None:
    spent = lived_with_snapshots(tmp_path)
    standing = StoredState.read_verified(LearnerPaths(tmp_path, NAME))
    assert standing is not None and standing.log is not None
    snapshot = standing.log.snapshot
    assert snapshot is not None and standing.log.first_sequence == snapshot.last_sequence + 1
    assert [path.name for path in files(tmp_path / "run-a@ann")] == [snapshot.file_name, f"{ROUNDS:08d}.log"]
    assert (tmp_path / "run-a@ann" / snapshot.file_name).read_bytes() == bytes([ROUNDS - 1]) * 100
    assert [(run.rounds_committed, run.epsilon_spent) for run in standing.iterate_entries()] == [(ROUNDS + 1, spent)]
    say(again := open_run(tmp_path, "run-a"), range(ROUNDS + 1, ROUNDS + 2))
    again.close()
    assert Ledger(tmp_path).sum_epsilon(NAME) == spent + PRICE


@pytest.mark.slow
def test_every_byte_of_a_log_with_a_snapshot(tmp_path: Path) -> None:
    lived_with_snapshots(tmp_path)
    whole = holds(tmp_path)
    for path in files(tmp_path / "run-a@ann"):
        raw = path.read_bytes()
        for k in range(len(raw.rstrip(b"\0")) if path.suffix == ".log" else len(raw)):
            with changed(path, raw[:k] + bytes([raw[k] ^ (1 << k % 8)]) + raw[k + 1 :]):
                noticed = noticed_or_whole(tmp_path, whole)
                assert noticed or (path.suffix == ".log" and k < PAGE_BYTES), (path.name, k)
            if k % 9 == 0:
                with changed(path, raw[:k]):
                    assert noticed_or_whole(tmp_path, whole), (path.name, k)
        aside = path.with_name("aside")
        path.rename(aside)
        with pytest.raises(CorruptStateError, match=r"ledger --repair .* charges what may have been spent, at most "):
            holds(tmp_path)
        aside.rename(path)
    assert holds(tmp_path) == whole


@pytest.mark.parametrize("lost", ["snapshot", "log"])
def test_what_is_lost_beside_a_snapshot_is_charged(tmp_path: Path, lost: str) -> None:
    spent = lived_with_snapshots(tmp_path)
    (path,) = (tmp_path / "run-a@ann").glob(f"*.{lost}")
    path.unlink()
    repaired = Ledger(tmp_path).repair(NAME)
    assert (
        repaired.epsilon_charged >= spent
        and Ledger(tmp_path).sum_epsilon(NAME) == repaired.total_epsilon_spent >= spent
    )


def test_a_log_and_a_snapshot_of_different_times_are_noticed(tmp_path: Path) -> None:
    """An older snapshot with its log, beside a newer mark; and an older one beside a newer log."""
    log = open_run(tmp_path, "run-a")
    say(log, range(1))
    log.commit_snapshot(log.write_snapshot(log.begin_segment(), b"older"))
    before = {path: path.read_bytes() for path in files(tmp_path / "run-a@ann")}
    say(log, range(1, 2))
    log.commit_snapshot(log.write_snapshot(log.begin_segment(), b"newer"))
    log.close()
    now = files(tmp_path / "run-a@ann")
    for kept in ([], now):
        for path in set(now) - set(kept):
            path.unlink()
        for path, raw in before.items():
            path.write_bytes(raw)
        with pytest.raises(CorruptStateError, match="ledger --repair"):
            holds(tmp_path)


@pytest.mark.parametrize("page", range(2))
def test_a_lost_page_is_noticed(folder: Path, page: int) -> None:
    path = folder / "run-b@ann" / "00000000.log"
    raw, whole = path.read_bytes(), holds(folder)
    zeroed = raw[: page * 512 + PAGE_BYTES] + bytes(512) + raw[page * 512 + PAGE_BYTES + 512 :]
    with changed(path, zeroed):
        assert noticed_or_whole(folder, whole) == (zeroed != raw)


def test_a_folder_set_back_in_part_is_noticed(tmp_path: Path) -> None:
    """Each file as it was a round before, the others as they are now."""
    say(log := open_run(tmp_path, "run-a"), range(3))
    before = {path: path.read_bytes() for path in files(tmp_path)}
    say(log, range(3, 5))
    log.close()
    whole = holds(tmp_path)
    for path, raw in before.items():
        with changed(path, raw):
            assert noticed_or_whole(tmp_path, whole) == (path.suffix == ".log")


def test_another_learners_files_are_noticed(folder: Path) -> None:
    lived(folder, "bob")
    whole = holds(folder)
    for theirs, ours in (
        ("bob.high_water_mark", "ann.high_water_mark"),
        ("bob.runs", "ann.runs"),
        ("run-b@bob", "run-b@ann"),
    ):
        path = folder / ours / "00000000.log" if "@" in ours else folder / ours
        other = folder / theirs / "00000000.log" if "@" in theirs else folder / theirs
        with changed(path, other.read_bytes()):
            assert noticed_or_whole(folder, whole)


def test_another_runs_log_is_noticed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    say(open_run(elsewhere, "run-b"), range(ROUNDS))
    other = elsewhere / "run-b@ann" / "00000000.log"
    with (
        changed(folder / "run-b@ann" / "00000000.log", other.read_bytes()),
        pytest.raises(CorruptStateError, match="of another"),
    ):
        holds(folder)


def test_a_copy_is_noticed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("other") / "state"
    shutil.copytree(folder, copy)
    with pytest.raises(CorruptStateError, match="this state folder is a copy, and two learners with one ledger"):
        open_run(copy, "run-b")


def replaced(path: Path) -> None:
    """By a copy with the same content."""
    draft = path.with_name("draft")
    shutil.copy2(path, draft)
    draft.replace(path)


def put_back(folder: Path) -> None:
    """The folder is deleted, and a copy put in its place."""
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    shutil.rmtree(folder)
    copy.rename(folder)


FOLDER_LOST: dict[str, Callable[[Path], object]] = {
    "deleted": shutil.rmtree,
    "moved": lambda folder: folder.rename(folder.with_name("elsewhere")),
    "put back": put_back,
}
FILES = [Path("run-a@ann", "00000000.log"), Path("ann.high_water_mark"), Path("ann.runs")]
FILE_LOST: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "moved": lambda path: path.rename(path.with_name("elsewhere")),
    "replaced": replaced,
    "cut": lambda path: os.truncate(path, 100),
}


@pytest.mark.parametrize(
    ("harm", "file"),
    [
        *(pytest.param(harm, Path(), id=f"folder {name}") for name, harm in FOLDER_LOST.items()),
        *(pytest.param(FOLDER_LOST[name], FILES[0].parent, id=f"run's folder {name}") for name in FOLDER_LOST),
        *(pytest.param(harm, file, id=f"{file} {name}") for file in FILES for name, harm in FILE_LOST.items()),
    ],
)
def test_nothing_is_said_once_a_file_is_gone(tmp_path: Path, harm: Callable[[Path], object], file: Path) -> None:
    """Deleted, moved, replaced or cut by another process, while the learner goes on: a restart would not find what it writes."""
    say(log := open_run(folder := tmp_path / "state", "run-a", window=9), range(2))
    harm(folder / file)
    with pytest.raises(CorruptStateError, match=r"state folder must stay .* was deleted, moved, replaced or cut"):
        say(log, range(2, 3))


def test_nothing_is_said_in_a_segment_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The segment that is written now counts, whichever it is; those before it may be deleted."""
    monkeypatch.setattr(wal, "MAX_SEGMENT_BYTES", PAGE_BYTES + 600)
    say(log := open_run(tmp_path, "run-a"), range(4))
    first, *_, last = sorted(tmp_path.glob("run-a@ann/*.log"))
    first.unlink()
    say(log, range(4, 5))
    last = max(tmp_path.glob("run-a@ann/*.log"))
    last.unlink()
    with pytest.raises(CorruptStateError, match=last.name):
        say(log, range(5, 6))


@pytest.mark.parametrize("harm", FOLDER_LOST.values(), ids=FOLDER_LOST)
def test_a_claim_holds_the_files_that_it_was_made_on(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    """Between runs, too: on another folder in its place a learner would begin another ledger."""
    lived(folder := tmp_path / "state")
    with LearnerLock(folder, NAME) as held:
        held.refresh_guards()
        say(open_run(folder, "run-c"), range(2))
        held.require_in_place()
        harm(folder)
        with pytest.raises(CorruptStateError, match="was deleted, moved, replaced or cut"):
            held.require_in_place()


@pytest.mark.parametrize("file", ["ann.runs", "ann.high_water_mark", "ann.lock"])
@pytest.mark.parametrize("harm", ["deleted", "replaced"])
def test_a_claim_holds_each_file(folder: Path, file: str, harm: str) -> None:
    with LearnerLock(folder, NAME) as held:
        held.refresh_guards()
        FILE_LOST[harm](folder / file)
        with pytest.raises(CorruptStateError, match=file):
            held.require_in_place()


def test_a_newer_format_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_folder, "FORMAT", 0)
    with pytest.raises(
        CorruptStateError,
        match=r"ann\.high_water_mark has format 1, and this version reads up to 0: take a newer Sottovoce",
    ):
        open_run(folder, "run-b")


def test_a_torn_entry_above_the_mark_is_cut_off_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer died before the mark: nothing rests on it. At every byte."""
    say(log := open_run(tmp_path, "run-a", window=9), range(2))
    before = holds(tmp_path)
    path = tmp_path / "run-a@ann" / "00000000.log"
    old = path.read_bytes()
    with monkeypatch.context() as died:
        died.setattr(RunLog, "make_durable", lambda self: None)
        log.write_ahead(2, 3 * PRICE, RoundPayload(b"x" * SIZE, (b"y" * SIZE,), 2, 1))
    log.close()
    mark = tmp_path / "ann.high_water_mark"
    new, marked = path.read_bytes(), mark.read_bytes()
    end = len(new.rstrip(b"\0"))
    for k in range(len(old.rstrip(b"\0")), end):
        with changed(path, new[:k] + bytes(len(new) - k)):
            entries, runs = holds(tmp_path)
            assert entries[: len(before[0])] == before[0]  # type: ignore[index, arg-type]
            assert runs == before[1]
            again = open_run(tmp_path, "run-a")
            say(again, range(2, 3))
            again.close()
            assert Ledger(tmp_path).sum_epsilon(NAME) == 3 * PRICE
            path.write_bytes(new)
            mark.write_bytes(marked)


def test_process_durability_does_not_survive_the_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "hash_boot_id", lambda: b"another".ljust(16))
    with pytest.raises(CorruptStateError, match="before this machine was started again"):
        open_run(folder, "run-b")


def test_power_durability_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say(open_run(tmp_path, "run-a", durability="power"), range(2))
    monkeypatch.setattr(ledger, "hash_boot_id", lambda: b"another".ljust(16))
    assert open_run(tmp_path, "run-a", durability="power").epsilon_spent == 2 * PRICE


def test_space_is_allocated_before_it_is_written(tmp_path: Path) -> None:
    log = open_run(tmp_path, "run-a")
    path = tmp_path / "run-a@ann" / "00000000.log"
    allocated = path.stat().st_size
    assert allocated == PAGE_BYTES + AHEAD
    log.append_records(0, bytes(2 * AHEAD))
    log.make_durable()
    assert path.stat().st_size > PAGE_BYTES + 3 * AHEAD
    assert path.stat().st_mode & 0o077 == 0


def test_power_syncs_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry, then the mark; the sync between."""
    calls: list[str] = []

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            calls.append(name)
            return real(*given)

        return noted

    for name in ("pwrite", "fdatasync"):
        monkeypatch.setattr(os, name, noting(name, getattr(os, name)))
    cases: list[tuple[Durability, list[str]]] = [
        ("power", ["pwrite", "fdatasync", "pwrite"]),
        ("process", ["pwrite", "pwrite"]),
    ]
    for durability, expected in cases:
        say(log := open_run(tmp_path, f"run-{durability}", durability=durability), range(1))
        calls.clear()
        log.write_ahead(1, 2 * PRICE, RoundPayload(bytes(SIZE)))
        assert calls == expected
