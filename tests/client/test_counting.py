"""How far work is, while it goes on."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sottovoce_client.auditing.audit import audit_on_simulator
from sottovoce_client.backends import map_with_progress
from sottovoce_client.runs.sweep import sweep_with_progress
from sottovoce_core.auditing.plan import plan_audit
from sottovoce_core.auditing.worlds import ProgressCallback, discard_progress
from tests.client.progress import Reported
from tests.core.test_experiment import small
from tests.examples import made_up, small_run

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Piece:
    size: int
    on_progress: ProgressCallback = discard_progress


def as_in_another_process(work: Callable[[Any], Any], pieces: Sequence[Any]) -> Iterator[Any]:
    return (work(pickle.loads(pickle.dumps(piece))) for piece in pieces)  # noqa: S301 - our own


@pytest.mark.parametrize("mapper", [map, as_in_another_process], ids=["here", "elsewhere"])
def test_what_is_done_of_a_piece_is_told_before_the_piece_is_over(mapper: Any) -> None:
    told: list[tuple[int, int]] = []
    seen = threading.Event()

    def count(done: int, of: int) -> None:
        told.append((done, of))
        if done == 5:
            seen.set()

    def work(piece: Piece) -> int:
        piece.on_progress(0.5)
        assert piece.size != 10 or seen.wait(PATIENCE_S)
        return piece.size

    assert list(map_with_progress(mapper, lambda piece: piece.size, count)(work, [Piece(10), Piece(30)])) == [10, 30]
    assert told[0] == (0, 40) and (5, 40) in told and told[-1] == (40, 40)
    assert told == sorted(told)


def test_a_piece_may_tell_when_nobody_counts_any_more() -> None:
    kept: list[ProgressCallback] = []
    list(
        map_with_progress(map, lambda piece: piece.size, lambda done, of: None)(
            lambda piece: kept.append(piece.on_progress), [Piece(1)]
        )
    )
    kept[0](0.5)  # as a worker on another machine does
    assert not Path(kept[0]._path).exists()  # type: ignore[attr-defined]


def test_work_does_not_depend_on_whether_it_can_be_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    told: list[int] = []
    over = map_with_progress(map, lambda piece: piece.size, lambda done, of: told.append(done))
    assert list(over(lambda piece: piece.size, [Piece(1), Piece(2)])) == [1, 2] and told == []

    def tidy(piece: Piece) -> int:
        for each in tmp_path.rglob("done"):
            each.unlink()
        piece.on_progress(0.5)
        return piece.size

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert list(over(tidy, [Piece(1), Piece(2)])) == [1, 2] and set(told) == {0}
    assert list(tmp_path.iterdir()) == []


def test_a_failure_ends_counting_and_is_the_callers() -> None:
    def work(piece: Piece) -> None:
        raise ValueError("so it is")

    before = threading.active_count()
    with pytest.raises(ValueError, match="so it is"):
        list(map_with_progress(map, lambda piece: piece.size, lambda done, of: None)(work, [Piece(1)]))
    assert threading.active_count() == before


def test_an_audit_counts_runs_under_what_is_being_done() -> None:
    said = Reported()
    run = small_run(6)
    plan = plan_audit(run, made_up(run.spec), 0, runs=60)
    audit_on_simulator(plan, report_progress=said.say, mapper=map)
    assert said[0] == "simulating and examining"
    assert "simulating and examining: 120 of 120 runs" in said
    assert f"fixing thresholds: {2 * plan.runs} of {2 * plan.runs} runs" in said
    doing = ["fixing thresholds", "whole runs and single rounds", "black box"]
    assert sorted(doing, key=said.index) == doing


def test_a_sweep_counts_rounds_of_all_seeds(tmp_path: Path) -> None:
    said = Reported()
    jobs: list[tuple[int, int]] = []
    sweep_with_progress(
        lambda _: None, small(tmp_path), {"rounds": [3, 4]}, 5,
        seed=0, vary_data=False, backend="processes", jobs=1,
        progress=lambda done, of: jobs.append((done, of)), report=said.say,
    )  # fmt: skip
    assert jobs == [(1, 2), (2, 2)]
    assert said[0] == "simulating: 0 of 35 rounds" and said[-1] == "simulating: 35 of 35 rounds"
