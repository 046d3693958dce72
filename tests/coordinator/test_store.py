"""What a coordinator remembers: nothing that was told is lost, and no damage or second process goes unnoticed."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from sottovoce_coordinator.run_state import CaptureBinding
from sottovoce_coordinator.store import FILE, CoordinatorStore, LearnerBinding, StoredRun
from sottovoce_core.errors import CorruptStateError, FailedPrecondition, Unavailable
from sottovoce_rpc.commands import Origin

RUN = StoredRun(
    "run-1", "{}", 3, CaptureBinding("c-1", "/captures/c-1", {(0, 1): "h:1", (1, 2): "h:2"}, "m:3"), b"view"
)


def test_what_was_written_is_there_at_the_next_start(tmp_path: Path) -> None:
    store = CoordinatorStore(tmp_path)
    ann = LearnerBinding(bytes(16), 7, 6)
    store.save_learner("ann", LearnerBinding(bytes(16), 6, 6))
    store.save_learner("ann", ann)
    store.add_run(RUN)
    store.reserve_lease("run-1", 10, 5, b"granted")
    store.save_views({"run-1": b"later"})
    store.close()
    again = CoordinatorStore(tmp_path)
    assert again.load_learners() == {"ann": ann}
    assert again.load_runs() == [StoredRun("run-1", "{}", 3, RUN.capture_binding, b"later", 15)]
    again.close()


def test_runs_come_back_oldest_first_but_for_those_forgotten(tmp_path: Path) -> None:
    store = CoordinatorStore(tmp_path)
    for k in range(5):
        store.add_run(StoredRun(f"run-{k}", "{}", 3, CaptureBinding(), b""))
    store.delete_run("run-1")
    store.close()
    again = CoordinatorStore(tmp_path)
    again.add_run(StoredRun("run-5", "{}", 3, CaptureBinding(), b""))
    assert [run.run_id for run in again.load_runs()] == ["run-0", "run-2", "run-3", "run-4", "run-5"]
    again.close()


def test_how_several_runs_stand_is_written_at_once(tmp_path: Path) -> None:
    store = CoordinatorStore(tmp_path)
    for k in range(3):
        store.add_run(StoredRun(f"run-{k}", "{}", 3, CaptureBinding(), b"old"))
    store.save_views({"run-0": b"a", "run-2": b"c"})
    assert [run.encoded_view for run in store.load_runs()] == [b"a", b"old", b"c"]
    store.close()


def test_no_grant_is_above_what_is_written(tmp_path: Path) -> None:
    """However grants grow: and most of them need no write."""
    store, written = CoordinatorStore(tmp_path), []
    store.add_run(RUN)
    for until in range(1, 101):
        store.reserve_lease("run-1", until, 9, b"")
        (run,) = store.load_runs()
        assert run.leased_until >= until
        written.append(run.leased_until)
    assert len(set(written)) == 10
    store.close()


def test_a_coordinator_that_knows_of_fewer_grants_does_not_lower_what_is_written(tmp_path: Path) -> None:
    for until, written in ((40, 50), (20, 50), (60, 70)):
        store = CoordinatorStore(tmp_path)
        if not store.load_runs():
            store.add_run(RUN)
        store.reserve_lease("run-1", until, 10, b"")
        assert store.load_runs()[0].leased_until == written
        store.close()


def test_every_start_is_another_term(tmp_path: Path) -> None:
    origins = []
    for _ in range(3):
        store = CoordinatorStore(tmp_path)
        origins.append(store.origin)
        assert store.is_durable
        store.close()
    assert [origin.term for origin in origins] == [1, 2, 3]
    assert len({origin.nonce for origin in origins}) == 3


def test_a_coordinator_that_takes_over_is_of_a_later_term_at_once_and_after_its_next_start(tmp_path: Path) -> None:
    store = CoordinatorStore(tmp_path)
    first = store.origin
    for told, term in ((0, 1), (1, 2), (7, 8), (3, 8)):
        store.outrank(told)
        assert store.origin == Origin(term, first.nonce)
    store.close()
    store = CoordinatorStore(tmp_path)
    assert store.origin.term == 9
    store.close()


def test_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    store = CoordinatorStore(None)
    for run in (replace(RUN, run_id="run-0"), RUN):
        store.add_run(run)
    assert (store.is_durable, store.origin.term, [run.run_id for run in store.load_runs()]) == (
        False,
        0,
        ["run-0", "run-1"],
    )
    store.close()
    other = CoordinatorStore(None)
    assert other.load_runs() == []
    other.close()


def test_a_second_coordinator_on_one_folder_is_refused(tmp_path: Path) -> None:
    store = CoordinatorStore(tmp_path)
    with pytest.raises(FailedPrecondition, match=f"another coordinator uses the state folder {tmp_path}: stop it"):
        CoordinatorStore(tmp_path)
    store.close()
    CoordinatorStore(tmp_path).close()


def filled(folder: Path) -> Path:
    store = CoordinatorStore(folder)
    for k in range(50):
        store.save_learner(f"learner-{k}", LearnerBinding(bytes(16), k, k))
        store.add_run(StoredRun(f"run-{k}", "{}" * 100, 3, CaptureBinding(), bytes(500)))
    store.close()
    return folder / FILE


@pytest.mark.parametrize("damage", ["no database", "cut", "zeroes"])
def test_damage_is_noticed_and_the_folder_is_free_again(tmp_path: Path, damage: str) -> None:
    path = filled(tmp_path)
    content = path.read_bytes()
    match damage:
        case "no database":
            path.write_bytes(b"something else" * 1000)
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "zeroes":
            path.write_bytes(content[:8192] + bytes(8192) + content[16384:])
    for _ in range(2):
        with pytest.raises(CorruptStateError, match=f"{path} is damaged: .*; restore an intact copy"):
            CoordinatorStore(tmp_path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = filled(tmp_path)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 9")
    db.close()
    with pytest.raises(CorruptStateError, match="must be of format 2, got 9: use the version that wrote it"):
        CoordinatorStore(tmp_path)


def test_what_cannot_be_written_is_not_there_and_may_be_tried_again(tmp_path: Path) -> None:
    """A disk that is full, here a file that may not grow."""
    store = CoordinatorStore(tmp_path)
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    big = StoredRun("big", "x" * 1_000_000, 3, CaptureBinding(), b"")
    with pytest.raises(Unavailable, match=r"cannot be written: .*full"):
        store.add_run(big)
    assert store.load_runs() == []
    store._db.execute(f"PRAGMA max_page_count = {pages + 10_000}")
    store.add_run(big)
    assert len(store.load_runs()) == 1
    store.close()


def test_a_folder_that_cannot_be_made_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match=r"the state folder .* cannot be written"):
        CoordinatorStore(tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        (Origin(3, b"a"), Origin(2, b"b"), "outdated: a newer one, of term 3, leads the run, got term 2"),
        (Origin(3, b"a"), Origin(3, b"b"), "two coordinators lead the run in term 3"),
        (Origin(3, b"a"), Origin(0, b"b"), "is outdated"),
    ],
)
def test_a_learner_obeys_no_older_coordinator_and_no_copy(before: Origin, now: Origin, text: str) -> None:
    with pytest.raises(Unavailable, match=text):
        before.require_newest(now)


@pytest.mark.parametrize("now", [Origin(3, b"a"), Origin(4, b"b")])
def test_a_learner_obeys_the_same_coordinator_and_a_later_one(now: Origin) -> None:
    Origin(3, b"a").require_newest(now)
    Origin().require_newest(now)
