"""How far work is, while it goes on."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sottovoce_client.auditing.audit import on_simulator
from sottovoce_client.backends import counted
from sottovoce_client.running.sweep import sweep_saying
from sottovoce_core.auditing.plan import plan_audit
from sottovoce_core.auditing.worlds import Tell, nobody
from tests.client.progress import Reported
from tests.core.test_experiment import small
from tests.examples import made_up, small_run


@dataclass(frozen=True)
class Piece:
    size: int
    tell: Tell = nobody


def as_in_another_process(work: Callable[[Any], Any], pieces: Sequence[Any]) -> Iterator[Any]:
    return (work(pickle.loads(pickle.dumps(piece))) for piece in pieces)  # noqa: S301 - our own


@pytest.mark.parametrize("mapper", [map, as_in_another_process], ids=["here", "elsewhere"])
def test_what_is_done_of_a_piece_is_told_before_the_piece_is_over_where_that_is_known(mapper: Any) -> None:
    told: list[tuple[int, int]] = []

    def work(piece: Piece) -> int:
        piece.tell(0.5)
        return piece.size

    over = counted(mapper, lambda piece: piece.size, lambda done, of: told.append((done, of)))
    assert list(over(work, [Piece(10), Piece(30)])) == [10, 30]
    within = [5, 25] if mapper is map else []
    assert told == [(done, 40) for done in sorted([0, 10, 40, *within])]


def test_a_failure_is_the_callers() -> None:
    def work(piece: Piece) -> None:
        raise ValueError("so it is")

    with pytest.raises(ValueError, match="so it is"):
        list(counted(map, lambda piece: piece.size, lambda done, of: None)(work, [Piece(1)]))


def test_an_audit_counts_runs_under_what_is_being_done() -> None:
    said = Reported()
    run = small_run(6)
    plan = plan_audit(run, made_up(run.spec), 0, runs=60)
    on_simulator(plan, say=said.say, mapper=map)
    assert said[0] == "simulating and examining"
    assert "simulating and examining: 120 of 120 runs" in said
    assert f"fixing thresholds: {2 * plan.runs} of {2 * plan.runs} runs" in said
    doing = ["fixing thresholds", "whole runs and single rounds", "black box"]
    assert sorted(doing, key=said.index) == doing


def test_a_sweep_counts_rounds_of_all_seeds(tmp_path: Path) -> None:
    said = Reported()
    jobs: list[tuple[int, int]] = []
    sweep_saying(
        lambda _: None, small(tmp_path), {"rounds": [3, 4]}, 5,
        seed=0, vary_data=False, backend="processes", jobs=1,
        progress=lambda done, of: jobs.append((done, of)), say=said.say,
    )  # fmt: skip
    assert jobs == [(1, 2), (2, 2)]
    assert said[0] == "simulating: 0 of 35 rounds" and said[-1] == "simulating: 35 of 35 rounds"
