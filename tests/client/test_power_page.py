"""`sottovoce audit --self-test --power`: a table of what is found with how many runs, and the page of it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sottovoce.lab.selftest.catalogue import CATALOGUE
from sottovoce.lab.selftest.evidence import each_run
from sottovoce.lab.selftest.mutants import Broken, Mutant
from sottovoce.lab.selftest.power import ENOUGH, LADDER, Power, measure
from sottovoce_client.cli.app import app
from sottovoce_client.lab import power

BY_NAME = {mutant.name: mutant for mutant in CATALOGUE}
FAINT = Mutant("faint", "all but well", lambda plan: Broken(), "conformance", 20, base="dola", limit=each_run(1e-3))
"""As if it were one of somebody's own; nothing is wrong, and no more than that is said to be."""

DOCS = Path(__file__).resolve().parents[2] / "docs"


def measured(monkeypatch: pytest.MonkeyPatch, names: Iterable[str], **more: object) -> tuple[int, str]:
    monkeypatch.setattr(power, "CATALOGUE", [BY_NAME[name] for name in names])
    console = Console(file=io.StringIO(), width=140)
    code = power.measure_power(jobs=1, audits=2, runs=10, console=console, **more)  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


def test_what_is_found_is_told_with_how_many_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, text = measured(monkeypatch, ["raw doubles", "retry"], out=tmp_path / "new")
    rows = [line.split() for line in text.splitlines()]
    assert code == 0 and "2 of 2 broken learners found" in text
    assert any(row[-4:] == ["lattice", "5", "<", "1"] or row[-5:] == ["lattice", "5", "<", "1", "1"] for row in rows)
    assert any(row[-4:] == ["notices", "1", "–", "–"] for row in rows)
    document = json.loads((tmp_path / "new" / "power.json").read_text(encoding="utf-8"))
    assert [each["needed"] for each in document["found"]] == [5, 1]
    made = (tmp_path / "new" / "power.md").read_text(encoding="utf-8")
    assert (
        "## Lattice and low bits" in made
        and "| retry | a round said again, fresh noise | notices | 1 | – | – |" in made
    )


def test_what_gives_too_little_evidence_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At this seed it is no false alarm; one has probability 1 %."""
    code, text = measured(monkeypatch, [], mutants=["tests.client.test_power_page:FAINT"])
    assert code == 0 and "> 10" in text and "0 of 1 broken learners found; the others give too little evidence" in text


def test_what_is_missed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Power("lost", "", None, "dola", 2, limit=10.0)
    assert lost.missed(int(10 * ENOUGH)) and not lost.missed(int(10 * ENOUGH) - 1)
    monkeypatch.setattr(power, "measure", lambda mutant, **more: lost)
    monkeypatch.setattr(power, "CATALOGUE", [FAINT])
    console = Console(file=io.StringIO(), width=140)
    assert power.measure_power(jobs=1, console=console) == 1
    assert isinstance(console.file, io.StringIO) and "missed: lost" in console.file.getvalue()


def test_the_fewest_runs_with_enough_evidence_are_found() -> None:
    """3 % of scale in numbers of 3 learners, 16 rounds and 16 coordinates: 24.4/0.03^2 of them, so 18 runs of each world."""
    found = measure(BY_NAME["0.97 of the scale"], audits=2, most=100)
    assert found.needed in {10, 20, 50} and found.found_by == "marginal" and found.limit is not None
    assert found.limit == pytest.approx(6.53, rel=0.01) and found.needed in LADDER


def test_power_is_of_the_catalogue() -> None:
    refused = CliRunner().invoke(app, ["audit", "--power"])
    assert refused.exit_code != 0 and "--power goes with --self-test" in " ".join(
        str(refused.exception or refused.output).split()
    )


def test_the_page_tells_of_the_catalogue() -> None:
    """As the command made it: at least 60 breaks in ten classes, none of which is gone."""
    lines = (DOCS / "power.md").read_text(encoding="utf-8").splitlines()
    rows = {line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")} - {power.HEADS[0]}
    assert rows <= set(BY_NAME) and len(rows) >= 60
    assert sum(line.startswith("## ") for line in lines) == 10
