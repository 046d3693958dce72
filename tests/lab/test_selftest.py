"""`sottovoce lab self-test`: what it prints, writes and refuses, and its exit code."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from sottovoce_client import terminal
from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import PreparedRun
from sottovoce_lab import selftest
from sottovoce_lab.auditor_evaluation import FalseAlarmCounts, try_mutant
from sottovoce_lab.catalogue import QUICK_MUTANTS
from sottovoce_lab.mutants import ALGORITHM_RUNS, BASE_RUNS, Fault, Mutant

NOTHING_WRONG = Mutant("nothing", "all is well", lambda plan: Fault(), "conformance", 20, base="dola")
"""As if it were one of somebody's own."""


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two mutants, and three correct algorithms."""
    chosen = [mutant for mutant in QUICK_MUTANTS if mutant.name in {"summed", "retry"}]
    monkeypatch.setattr(selftest, "QUICK_MUTANTS", chosen)
    monkeypatch.setattr(
        selftest, "ALGORITHM_RUNS", {name: ALGORITHM_RUNS[name] for name in ("dola", "pd-ftgl", "admm")}
    )


def outcome_of(**more: object) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=100)
    code = selftest.run_self_test(jobs=1, console=console, **{"audits": 1, **more})  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


def test_broken_and_correct_learners_are_told_apart(tmp_path: Path) -> None:
    code, text = outcome_of(out=tmp_path / "new")
    *tables, last = text.splitlines()
    assert code == 0 and max(map(len, tables)) <= 100 and last.endswith("selftest.json")
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.split()}
    assert rows["summed"][-5:] == ["conformance,", "black", "box", "20", "20"]
    assert rows["retry"][-3:] == ["detections", "1", "1"]
    assert rows["dola"][1:3] == ["1", "0"] and rows["admm"] == ["admm", "no", "claim"]
    assert rows["all"][1:3] == ["2", "0"] and "8" in rows["all"]
    assert "2 of 2 mutants found. 0 of 2 audits of correct learners refuted them" in " ".join(text.split())
    document = json.loads((tmp_path / "new" / "selftest.json").read_text(encoding="utf-8"))
    assert [each["runs_needed"] for each in document["mutants"]] == [20, 1] and not document["mutants"][0]["missed"]
    assert {each["name"]: each["audits"] for each in document["correct"]} == {"dola": 1, "pd-ftgl": 1, "admm": 0}


def test_a_mutant_that_is_missed_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.reserve_stdout_for_json():
        code, text = outcome_of(mutants=["tests.lab.test_selftest:NOTHING_WRONG"], audits=0)
    told = json.loads(capsys.readouterr().out)
    assert told["folder"] is None and [each["missed"] for each in told["mutants"]] == [False, False, True]
    assert code == 1 and "MISSED" in text and "2 of 3 mutants found; missed: nothing." in text


def test_false_alarms_that_are_no_chance_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        selftest, "_measure_base_alarms", lambda name, seeds: FalseAlarmCounts(name, 4, len(seeds), 0, 4 * len(seeds))
    )
    code, text = outcome_of(audits=5)
    assert code == 1 and "12 of 15 audits of correct learners refuted them" in " ".join(text.split())


def test_a_run_of_ones_own_is_broken() -> None:
    """What does not fit it is listed, and is no failure."""
    prepared = PreparedRun(*BASE_RUNS["dola"].build())
    code, text = outcome_of(prepared=prepared, learner="learner-1")
    assert code == 0 and "does not apply: a round must bring more than one record" in " ".join(text.split())
    assert "1 of 1 mutants found." in text and "pd-ftgl" not in text


@pytest.mark.parametrize(
    ("name", "problem"),
    [("nowhere:X", "cannot import"), ("json", "cannot import"), ("json:loads", "must be a sottovoce")],
)
def test_a_mutant_must_be_one(name: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        selftest.load_mutant(name)


def test_a_base_must_be_known() -> None:
    assert "ldp-dol" in BASE_RUNS
    with pytest.raises(SpecError, match="base must be one of"):
        try_mutant(Mutant("x", "", lambda plan: Fault(), "ledger", 20, base="none"))
