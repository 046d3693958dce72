"""`sottovoce lab power`: a table of what is found with how many runs, and the page of it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path

import pytest
from rich.console import Console

from sottovoce_lab import power
from sottovoce_lab.auditor_evaluation import (
    MIN_EVIDENCE_FACTOR,
    POWER_RUN_COUNTS,
    PowerMeasurement,
    measure_mutant_power,
    search_run_count,
)
from sottovoce_lab.catalogue import CATALOGUE
from sottovoce_lab.mutants import Fault, Mutant, estimate_from_runs
from sottovoce_lab.service_mutants import NETWORK_MUTANTS, WIRETAP_MUTANTS
from sottovoce_lab.service_power import FOREIGN_SERVICE_MUTANTS, measure_foreign_power, measure_service_power

BY_NAME = {mutant.name: mutant for mutant in CATALOGUE}
RUNNING = {broken.name: broken for broken in NETWORK_MUTANTS}
TAPPED = {broken.name: broken for broken in WIRETAP_MUTANTS}
CALLED = {broken.name: broken for broken in FOREIGN_SERVICE_MUTANTS}
SERVICES = {
    "## On real services": set(RUNNING),
    "## By wiretap": set(TAPPED),
    "## Foreign services": set(CALLED),
}
FAINT = Mutant(
    "faint",
    "all but well",
    lambda plan: Fault(),
    "conformance",
    20,
    base="dola",
    estimate_min_runs=estimate_from_runs(1e-3),
)
"""As if it were one of somebody's own; nothing is wrong, and no more than that is said to be."""

DOCS = Path(__file__).resolve().parents[2] / "docs"


def without_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "NETWORK_MUTANTS", ())
    monkeypatch.setattr(power, "WIRETAP_MUTANTS", ())
    monkeypatch.setattr(power, "FOREIGN_SERVICE_MUTANTS", ())


def measured(monkeypatch: pytest.MonkeyPatch, names: Iterable[str], **more: object) -> tuple[int, str]:
    monkeypatch.setattr(power, "CATALOGUE", [BY_NAME[name] for name in names])
    without_services(monkeypatch)
    console = Console(file=io.StringIO(), width=140)
    code = power.measure_power(jobs=1, audits=2, runs=10, console=console, **more)  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


def test_what_is_found_is_told_with_how_many_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, text = measured(monkeypatch, ["raw doubles", "retry"], out=tmp_path / "new")
    rows = [line.split() for line in text.splitlines()]
    assert code == 0 and "2 of 2 mutants found" in text
    assert any(row[-4:] == ["lattice", "5", "<", "1"] or row[-5:] == ["lattice", "5", "<", "1", "1"] for row in rows)
    assert any(row[-4:] == ["detections", "1", "–", "–"] for row in rows)
    document = json.loads((tmp_path / "new" / "power.json").read_text(encoding="utf-8"))
    assert [each["runs_needed"] for each in document["found"]] == [5, 1]
    made = (tmp_path / "new" / "power.md").read_text(encoding="utf-8")
    assert (
        "## Lattice and low bits" in made
        and "| retry | a round sent again with fresh noise | detections | 1 | – | – |" in made
    )


def test_what_gives_too_little_evidence_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At this seed it is no false alarm; one has probability 1 %."""
    code, text = measured(monkeypatch, [], mutants=["tests.lab.test_power_page:FAINT"])
    assert code == 0 and "> 10" in text and "0 of 1 mutants found; the others give too little evidence" in text


def test_what_is_missed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = PowerMeasurement("lost", "", None, int(10 * MIN_EVIDENCE_FACTOR), 2, "dola", min_runs=10.0)
    assert lost.is_missed and not replace(lost, max_runs=int(10 * MIN_EVIDENCE_FACTOR) - 1).is_missed
    monkeypatch.setattr(power, "measure_mutant_power", lambda mutant, **more: lost)
    monkeypatch.setattr(power, "CATALOGUE", [FAINT])
    without_services(monkeypatch)
    console = Console(file=io.StringIO(), width=140)
    assert power.measure_power(jobs=1, console=console) == 1
    assert isinstance(console.file, io.StringIO) and "missed: lost" in console.file.getvalue()


def test_worlds_in_which_a_break_does_nothing_are_audits_that_miss_it() -> None:
    """With the seed 3 an audit of five runs takes records without zeros, so no message is shorter."""
    found = measure_mutant_power(BY_NAME["length"], audits=1, seed=3, max_runs=5)

    assert (found.runs_needed, found.found_by) == (None, "")


@pytest.mark.statistics
def test_the_fewest_runs_with_enough_evidence_are_found() -> None:
    """3 % of scale in numbers of 3 learners, 16 rounds and 16 coordinates: 24.4/0.03^2 of them, so 18 runs of each world."""
    found = measure_mutant_power(BY_NAME["0.97 of the scale"], audits=2, max_runs=100)
    assert found.runs_needed in {10, 20, 50} and found.found_by == "marginal" and found.min_runs is not None
    assert found.min_runs == pytest.approx(6.53, rel=0.01) and found.runs_needed in POWER_RUN_COUNTS


def rows_below(lines: Sequence[str], heading: str) -> list[str]:
    """Of the table below a heading, without its head."""
    after = lines[lines.index(heading) + 1 :]
    own = takewhile(lambda line: not line.startswith("## "), after)
    return [line for line in own if line.startswith("| ")][1:]


def test_the_page_tells_of_the_catalogue() -> None:
    """As the command made it: at least 60 breaks in ten classes, and services in tables of their own, none of which is gone."""
    lines = (DOCS / "developers" / "power.md").read_text(encoding="utf-8").splitlines()
    headings = [line for line in lines if line.startswith("## ")]
    told = {
        heading: {row.split(" | ")[0].removeprefix("| ") for row in rows_below(lines, heading)} for heading in headings
    }
    for heading, services in SERVICES.items():
        assert told.pop(heading, set()) <= services
    rows = set().union(*told.values())
    assert rows <= set(BY_NAME) and len(rows) >= 60
    assert len(told) == 10


# ---- services --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_broken_services_have_tables_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A real service, called through real relays. By construction the correct one is accused with probability at most 0.01."""
    monkeypatch.setattr(power, "CATALOGUE", [BY_NAME["retry"]])
    monkeypatch.setattr(power, "NETWORK_MUTANTS", ())
    monkeypatch.setattr(power, "WIRETAP_MUTANTS", ())
    monkeypatch.setattr(power, "FOREIGN_SERVICE_MUTANTS", [CALLED["six digits"], CALLED["no noise"]])
    monkeypatch.setattr(power, "measure_foreign_power", partial(measure_foreign_power, audits=1))
    console = Console(file=io.StringIO(), width=140)
    assert power.measure_power(jobs=1, audits=2, runs=24, out=tmp_path, console=console) == 0
    lines = (tmp_path / "power.md").read_text(encoding="utf-8").splitlines()
    assert lines.count("| service | fault | found by | runs | audits |") == 1
    assert "## On real services" not in lines
    assert rows_below(lines, "## Foreign services") == [
        "| six digits | nothing: answers are rounded | – | never | 0 of 1 |",
        "| no noise | gradient and loss without noise | values of gradient | 24 | 1 of 1 |",
    ]
    document = json.loads((tmp_path / "power.json").read_text(encoding="utf-8"))
    assert [each["runs_needed"] for each in document["services"]] == [None, 24]
    assert isinstance(console.file, io.StringIO)
    text = " ".join(console.file.getvalue().split())
    assert "1 of 1 faulty services; 0 of 1 audits refute correct ones" in text


def test_what_a_foreign_service_says_again_is_found() -> None:
    found = measure_foreign_power(CALLED["repeated"], run_counts=(24,), audits=1)
    assert (found.runs_needed, found.found_by) == (24, "repetition")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "found_by"),
    [("half the noise", {"marginal", "dependence"}), ("metadata", {"worlds"}), ("status", {"worlds"})],
)
def test_a_broken_learner_is_found_on_real_services(name: str, found_by: set[str]) -> None:
    """Half the noise gives 0.19 nats a number, of which 24 runs of each world have 2,304; the rest tells a record every time."""
    found = measure_service_power(RUNNING[name], "relay", run_counts=(24,), audits=1)
    assert found.runs_needed == 24 and found.found_by in found_by and not found.is_missed


@pytest.mark.slow
def test_a_correct_learner_is_not_accused_on_real_services() -> None:
    """By construction with probability at most 0.01."""
    found = measure_service_power(RUNNING["correct"], "relay", run_counts=(24,), audits=1)
    assert (found.correct, found.audits_found, found.audits, found.is_missed) == (True, 0, 1, False)


def test_only_the_first_of_each_kind_are_correct() -> None:
    assert [each.name for each in NETWORK_MUTANTS if each.is_correct] == ["correct"]
    assert [each.name for each in FOREIGN_SERVICE_MUTANTS if each.is_correct] == ["correct", "six digits"]
    assert len(RUNNING) == len(NETWORK_MUTANTS) and len(CALLED) == len(FOREIGN_SERVICE_MUTANTS)


def blank(*, correct: bool) -> PowerMeasurement:
    return PowerMeasurement("some", "", "foreign services", 48, 5, correct=correct)


def test_a_broken_service_needs_the_fewest_runs_with_which_enough_audits_find_it() -> None:
    held = list[tuple[int, int]]()

    def found_by(runs: int, seed: int) -> str:
        held.append((runs, seed))
        return "sizes" if runs >= 48 else ""

    found = search_run_count(blank(correct=False), found_by, (24, 48, 100), seed=7)
    assert (found.runs_needed, found.found_by, found.audits_found, found.is_missed) == (48, "sizes", 5, False)
    assert held == [(24, 7), *((48, 7 + k) for k in range(5))]
    assert search_run_count(blank(correct=False), lambda runs, seed: "", (24, 48), seed=0).is_missed


@pytest.mark.parametrize(("accused", "missed"), [(0, False), (1, False), (2, True)])
def test_a_correct_service_is_audited_with_all_runs_and_may_hardly_be_accused(accused: int, missed: bool) -> None:
    """At 99 %, two of five audits accuse it with probability 0.001; two of ten with 0.004, three with 0.0001."""
    found = search_run_count(blank(correct=True), lambda runs, seed: "sizes" if seed < accused else "", (24,), seed=0)
    assert (found.runs_needed, found.audits_found, found.audits, found.is_missed) == (None, accused, 5, missed)


def test_a_false_alarm_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    accused = replace(blank(correct=True), audits_found=5, found_by="sizes")
    monkeypatch.setattr(power, "CATALOGUE", [])
    monkeypatch.setattr(power, "NETWORK_MUTANTS", ())
    monkeypatch.setattr(power, "WIRETAP_MUTANTS", ())
    monkeypatch.setattr(power, "FOREIGN_SERVICE_MUTANTS", [CALLED["correct"]])
    monkeypatch.setattr(power, "measure_foreign_power", lambda broken, **more: accused)
    console = Console(file=io.StringIO(), width=140)
    assert power.measure_power(jobs=1, console=console) == 1
    assert isinstance(console.file, io.StringIO) and "missed: some (foreign services)" in console.file.getvalue()
