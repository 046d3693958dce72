"""Where results go: nothing that an earlier command wrote is replaced, and two results never share a folder unasked."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner, Result

from sottovoce_client.cli import app
from sottovoce_client.cli.app import make_results_folder
from sottovoce_client.reports.page import Page
from sottovoce_client.terminal import INCOMPLETE_EXIT_CODE
from sottovoce_core.errors import SpecError
from sottovoce_core.spec import dump_spec

SMALL: dict[str, Any] = {"name": "small", "rounds": 6, "learners": 3, "algorithm": {"name": "ldp-dol", "sigma": 2.0}}
COMMANDS: dict[str, list[str]] = {
    "simulate": ["--write", "all"],
    "compare": ["--replicas", "2"],
    "sweep": ["--set", "algorithm.sigma=1,2", "--replicas", "2", "--jobs", "1"],
    "budget": [],
    "budget --tradeoff": ["--tradeoff", "5,10,20", "--replicas", "2"],
    "audit": ["--runs", "30", "--jobs", "1"],
}


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    features = np.random.default_rng(0).normal(size=(80, 3))
    np.savez(tmp_path / "records.npz", X=features, y=(features[:, 0] > 0).astype(int))
    path = tmp_path / "small.yaml"
    data = {"source": str(tmp_path / "records.npz"), "reuse": True}
    path.write_text(yaml.safe_dump({**SMALL, "data": data}), encoding="utf-8")
    return path


def ran(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(done: Result, *words: str) -> bool:
    said = str(done.exception)
    return isinstance(done.exception, SpecError) and all(word in said for word in ("choose another --out", *words))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_replaces_nothing(command: str, spec: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = ran(command.split()[0], spec, *COMMANDS[command], "--out", out)
    assert first.exit_code == 0, first.output
    before = contents(out)
    names = {path.name for path in out.iterdir()} - {"spec.yaml"}
    assert names
    assert refused(
        ran(command.split()[0], spec, *COMMANDS[command], "--out", out), str(out), *names
    )  # which are all that it writes
    assert contents(out) == before


@pytest.mark.parametrize(
    ("command", "kept"), [("budget", "budget.json"), ("audit", "audit.json"), ("compare", "compare.md")]
)
def test_a_page_that_cannot_be_made_costs_no_results(
    command: str, kept: str, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found is printed, written, and told to programs; a line says what is missing, and so does the exit code."""

    def broken(page: Page) -> str:
        raise ValueError("secret 3.25")

    expected = ran(command.split()[0], spec, *COMMANDS[command], "--out", tmp_path / "whole")
    monkeypatch.setattr(Page, "to_html", broken)
    done = ran(command.split()[0], spec, *COMMANDS[command], "--out", tmp_path / "out")
    page = tmp_path / "out" / f"{command}.html"
    assert (expected.exit_code, done.exit_code) == (0, INCOMPLETE_EXIT_CODE)
    assert (tmp_path / "out" / kept).exists() and not page.exists() and f"{command}.html" not in done.stdout
    assert (
        f"{page} could not be made: ValueError at " in done.stderr and "All other results are complete" in done.stderr
    )
    assert len(done.stderr.splitlines()) == len(expected.stderr.splitlines()) + 1 and "secret" not in done.output
    told = ran(command.split()[0], spec, *COMMANDS[command], "--out", tmp_path / "told", "--json")
    assert told.exit_code == INCOMPLETE_EXIT_CODE and json.loads(told.stdout)["folder"] == str(tmp_path / "told")


@pytest.mark.parametrize("command", ["simulate", "sweep", "compare"])
def test_a_file_for_papers_that_cannot_be_made_costs_no_results(
    command: str, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("sottovoce_client.runs.plot.export", broken)
    done = ran(command.split()[0], spec, *COMMANDS[command], "--out", tmp_path / "out", "--export", "csv", "--json")
    assert done.exit_code == INCOMPLETE_EXIT_CODE and json.loads(done.stdout)["folder"] == str(tmp_path / "out")
    assert "a file of --export could not be made: no space left. All other results are complete." in done.stderr


def test_results_of_different_commands_may_lie_together(spec: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for command in ("simulate", "budget"):
        assert ran(command, spec, *COMMANDS[command], "--out", out).exit_code == 0
    assert refused(ran("sweep", spec, *COMMANDS["sweep"], "--out", out), "results.parquet")
    plotted = [ran("plot", out / "results.parquet", "--out", out) for _ in range(2)]
    assert plotted[0].exit_code == 0 and refused(plotted[1], "plot.html")


def test_a_spec_that_says_something_else_is_not_replaced(spec: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    own = "# my notes\n" + spec.read_text(encoding="utf-8")
    (out / "spec.yaml").write_text(own, encoding="utf-8")
    assert refused(ran("simulate", out / "spec.yaml", "--out", out), "a different spec.yaml")
    assert (out / "spec.yaml").read_text(encoding="utf-8") == own
    assert [path.name for path in out.iterdir()] == ["spec.yaml"]


def of_run(kind: str, spec: Path, out: Path) -> Result:
    more = {
        "run": ["--coordinator", "127.0.0.1:1"],
        "up": [],
        "resume": ["--coordinator", "127.0.0.1:1", "--resume", "x"],
    }
    return ran("run" if kind == "resume" else kind, spec, "--out", out, *more[kind])


@pytest.mark.parametrize("kind", ["run", "up", "resume"])
@pytest.mark.parametrize("there", ["summary.json", "report.html", "canaries.json"])
def test_a_run_leaves_results_alone(kind: str, there: str, spec: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / there).write_text("of an earlier run", encoding="utf-8")
    assert refused(of_run(kind, spec, out), str(out), there)
    assert contents(out) == {there: b"of an earlier run"}


@pytest.mark.parametrize("there", ["captures", "learner-state", "logs"])
def test_services_are_not_started_where_others_were(there: str, spec: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / there).mkdir(parents=True)
    assert refused(of_run("up", spec, tmp_path / "out"), there)
    assert not list((tmp_path / "out" / there).iterdir())


@pytest.mark.parametrize("kind", ["run", "resume"])
def test_a_run_that_failed_is_tried_again_in_the_same_folder(
    kind: str, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, tried = tmp_path / "out", list[Path]()

    def conduct(prepared: Any, folder: Path, start: Callable[..., Any], **_: Any) -> int:
        (folder / "spec.yaml").write_text(dump_spec(prepared.run.spec), encoding="utf-8")
        tried.append(folder)
        return 1

    monkeypatch.setattr("sottovoce_client.runs.run_command.run_and_report", conduct)
    assert [of_run(each, spec, out).exit_code for each in ("run", kind)] == [1, 1]
    assert tried == [out, out]


@pytest.mark.parametrize("kind", ["run", "up"])
def test_a_spec_that_cannot_be_run_leaves_no_folder(kind: str, spec: Path, tmp_path: Path) -> None:
    (tmp_path / "records.npz").unlink()
    assert isinstance(of_run(kind, spec, tmp_path / "out").exception, SpecError)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_all_that_up_writes_is_guarded(spec: Path, tmp_path: Path) -> None:
    """A name that `up` learns to write, and nobody guards, is found here."""
    out = tmp_path / "out"
    captured = {**yaml.safe_load(spec.read_text(encoding="utf-8")), "capture": "relay"}
    spec.write_text(yaml.safe_dump(captured), encoding="utf-8")
    done = ran("up", spec, "--out", out, "--tls", "--canaries", "1", "--per-process", "3")
    assert done.exit_code == 0, done.output
    names = {path.name for path in out.iterdir()} - {"spec.yaml"}
    before = contents(out)
    assert {"captures", "learner-state", "logs", "summary.json"} <= names
    assert refused(of_run("up", spec, out), *names)
    assert contents(out) == before


def test_results_of_one_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    class Noon(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Noon:
            return cls(2026, 1, 1, 12)

    monkeypatch.setattr(datetime, "datetime", Noon)
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: make_results_folder("wards", None, []), range(8)))
    assert len(set(made)) == 8
    first = "wards-20260101-120000"
    assert {path.name for path in made} == {first, *(f"{first}-{n}" for n in range(2, 9))}
