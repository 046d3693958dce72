"""`--json`: every command that prints a result gives it to programs, too, with standard output to itself."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import typer
import yaml
from typer.testing import CliRunner

from sottovoce_client import terminal
from sottovoce_client.cli import app
from sottovoce_client.runs.run_client import STOPPED_BY_OPERATOR, STOPPED_BY_SIGTERM, Outcome, RunInterrupted
from sottovoce_client.runs.run_command import ServiceDied
from sottovoce_client.runs.summary import RunProgress
from sottovoce_core.experiment import prepare
from sottovoce_core.noise import Recorder, SeededNoise
from sottovoce_core.results import read_results
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.spec import load_spec
from sottovoce_rpc.learner_status import LearnerStatus
from sottovoce_rpc.logs import SEE_LOG_TEXT

WITHOUT = {
    "coordinator": "a service",
    "learner": "a service",
    "eavesdropper": "a service",
    "eavesdropper relay": "a service",
    "console": "a service",
}
"""Commands that have no `--json`, and why."""
SPEC: dict[str, Any] = {"name": "small", "rounds": 6, "learners": 3, "algorithm": {"name": "ldp-dol", "sigma": 2.0}}


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """All that can be typed."""
    below = getattr(command, "commands", {})
    if not below or command.invoke_without_command:
        yield " ".join(path), command
    for name, each in below.items():
        yield from commands(each, (*path, name))


def test_every_command_has_it_or_a_reason() -> None:
    lacking = {
        name for name, command in commands(typer.main.get_command(app)) if "as_json" not in command.common_options
    }
    assert lacking == WITHOUT.keys()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    features = np.random.default_rng(0).normal(size=(80, 3))
    np.savez("records.npz", X=features, y=(features[:, 0] > 0).astype(int))
    rows = [f"{a:.3f},{b:.3f},{'yes' if a > b else 'no'}" for a, b, _ in features.tolist()]
    Path("wards.csv").write_text("\n".join(["age,dose,ill", *rows]) + "\n", "utf-8")
    data = {"source": "records.npz", "reuse": True}
    Path("small.yaml").write_text(yaml.safe_dump({**SPEC, "data": data}), "utf-8")
    return tmp_path


def told(*words: str, code: int = 0) -> Any:
    """What is said to a program; it can be read, and people are told elsewhere."""
    try:
        done = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    finally:
        structlog.reset_defaults()  # what logs was told of the runner's standard error, which is closed now
    assert done.exit_code == code, done.output
    return json.loads(done.stdout, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))


RESULTS: dict[str, tuple[str, set[str]]] = {
    "simulate small.yaml --out o --write models,noise": ("left_out", {"folder", "files", "learners", "metrics"}),
    "compare small.yaml --out o --replicas 2": ("runs", {"folder", "failures"}),
    "sweep small.yaml --out o --set algorithm.sigma=1,2 --replicas 2 --jobs 1": ("rows", {"folder"}),
    "budget small.yaml --out o": ("learners", {"folder"}),
    "budget small.yaml --target 5": ("learners", {"out", "spec"}),
    "budget small.yaml --tradeoff 5,10,20 --replicas 2 --out o": ("folder", set()),
    "audit small.yaml --runs 30 --jobs 1 --out o": ("verdict", {"folder"}),
    "policy": ("epsilon_per_run", {"algorithms"}),
    "spec check small.yaml": ("records", {"spec", "learners", "features", "warnings"}),
    "spec check small.yaml --print": ("rounds", {"algorithm", "data"}),
    "spec values small.yaml": ("learners", set()),
    "data describe records.npz": ("records", {"features", "classes", "file"}),
    "init wards.csv --schema-only --label ill": ("schema", {"out"}),
    "doctor": ("findings", {"ok"}),
    "pki init --domain ward.example --authority a": ("authority", {"domain"}),
    "demo --print-spec": ("algorithm", {"data"}),
}


@pytest.mark.each
@pytest.mark.parametrize("command", list(RESULTS))
def test_a_result_is_a_document(command: str, folder: Path) -> None:
    document, (first, others) = told(*command.split()), RESULTS[command]
    assert {first, *others} <= document.keys()
    assert document[first] is not None


def test_simulate_tells_what_metrics_came_to(folder: Path) -> None:
    document = told("simulate", "small.yaml", "--out", "o", "--replicas", "2")
    assert document["files"] == ["results.parquet", "results.json", "models.parquet"]
    assert document["left_out"] == ["decisions", "transcript", "noise"]
    (run,) = read_results("o").runs
    assert {name: each["mean"] for name, each in document["metrics"].items()} == {
        name: curve.final_mean for name, curve in run.curves.curves.items()
    }


def test_what_is_written_is_what_is_told(folder: Path) -> None:
    for command, name in (("budget small.yaml", "budget.json"), ("audit small.yaml --runs 30 --jobs 1", "audit.json")):
        document = told(*command.split(), "--out", "o")
        assert document.pop("folder") == "o"
        assert document == json.loads((folder / "o" / name).read_text("utf-8"))


def test_a_bad_result_is_told_and_its_exit_code_stays(folder: Path) -> None:
    lines = (folder / "wards.csv").read_text("utf-8").splitlines()
    told("init", "wards.csv", "--schema-only", "--label", "ill", "--out", "schema.yaml")
    Path("other.csv").write_text("\n".join([*lines[:4], "old,1,yes"]) + "\n", "utf-8")
    document = told("data", "describe", "other.csv", "--schema", "schema.yaml", code=1)
    assert (document["file"]["records"], document["file"]["fit"]) == (4, 3)
    assert told("compare", "small.yaml", "none.yaml", "--out", "o", "--replicas", "2", code=1)["failures"]


def test_an_error_leaves_standard_output_empty(folder: Path) -> None:
    done = CliRunner().invoke(app, ["budget", "none.yaml", "--json"])
    assert done.exit_code != 0
    assert done.stdout == ""


def test_transcripts(folder: Path) -> None:
    pytest.importorskip("duckdb")
    told("simulate", "small.yaml", "--out", "o", "--write", "transcript")
    (shown,) = told("transcript", "show", "o")["simulated"]
    assert (shown["field"], shown["rounds"], shown["learners"]) == ("y", 6, 3)
    rows = told("transcript", "query", "o", "SELECT round, sender, value FROM broadcasts ORDER BY ALL")
    assert len(rows) == 18
    assert rows[0].keys() == {"round", "sender", "value"}
    assert told("transcript", "query", "o", "SELECT 1 AS one", "--out", "one.parquet") == {"out": "one.parquet"}


def test_data_sets(folder: Path) -> None:
    names = [each["name"] for each in told("data", "list")]
    assert "breast_cancer" in names
    assert told("data", "fetch", "breast_cancer") == [{"name": "breast_cancer", "path": None, "originals": []}]


def test_identities(folder: Path) -> None:
    told("pki", "init", "--domain", "ward.example", "--authority", "a")
    (issued,) = told("pki", "issue", "learner/north", "--authority", "a")
    assert issued["folder"] == "identities/learner-north"
    assert [each["identity"] for each in told("pki", "show", "a")] == ["learner/north"]
    assert (
        told("pki", "issue", "identities/learner-north", "--authority", "a")[0]["expires_at"]
        > issued["expires_at"][:10]
    )
    assert len(told("pki", "revoke", "learner/north", "--authority", "a")["revoked"]) == 2


def test_a_policy_and_a_run(folder: Path) -> None:
    document = told("policy", "small.yaml", "--learner", "learner-0")
    assert document["takes_part"]
    assert {"clause", "allows", "asks", "fits"} == document["clauses"][0].keys()


@pytest.mark.slow
def test_a_run_and_all_that_is_asked_of_what_it_leaves(folder: Path) -> None:
    """With other noise the audit would refute it with probability 0.05 at most, and a watch raise an alarm with 0.001."""
    spec = {**yaml.safe_load(Path("small.yaml").read_text("utf-8")), "capture": "relay"}
    Path("small.yaml").write_text(yaml.safe_dump(spec), "utf-8")
    prepared, recorder = prepare(load_spec(Path("small.yaml"))), Recorder(SeededNoise(0))
    list(simulate_rounds(prepared.run, prepared.data, recorder))
    np.savez("noise.npz", y=np.stack(recorder.noise_by_field["y"]))
    more = ("--tls", "--per-process", "3", "--recorded-noise", "noise.npz")
    document = told("up", "small.yaml", "--out", "o", *more)
    assert (document["folder"], document["state"], document["rounds"], document["rounds_done"]) == (
        "o",
        "finished",
        6,
        6,
    )

    shown = told("transcript", "show", "o")
    assert [each["run_id"] for each in shown["captures"]] == [document["run_id"]]
    assert sum(each["messages"] for each in shown["channels"]) == 6 * 6
    verified = told("transcript", "verify", "o", "--ca", "o/ca.crt")
    assert (verified["signed"], verified["wrong"]) == (True, [])
    assert [each["rounds_signed"] for each in verified["learners"]] == [6, 6, 6]
    assert told("audit", "--captures", "o/captures", "--out", "a")["verdict"]["kind"] == "consistent"
    watched = told("watch", "o", "--once")
    assert (watched["rounds_watched"], watched["alarms"]) == (6, [])

    lines = told("ledger", "--state", "o/learner-state")
    assert [each["learner"] for each in lines] == ["learner-0", "learner-1", "learner-2"]
    checked = told("ledger", "--verify", "--state", "o/learner-state")
    assert [each["epsilon"] for each in checked] == [each["epsilon"] for each in lines]
    repaired = told("ledger", "--repair", "--state", "o/learner-state", "--learner", "learner-1")
    assert repaired == {"learner": "learner-1", "charged": 0.0, "epsilon": lines[1]["epsilon"], "backup": None}
    assert (
        told("ledger", "--adopt-copy", "--state", "o/learner-state", "--learner", "learner-1")["state"]
        == "o/learner-state"
    )


def show(words: tuple[Any, ...], state: str, away: tuple[str, ...] = ()) -> None:
    """Let the command that calls see three learners, in rounds 3 to 5."""
    (watch,) = (each for each in words if callable(each))
    counts = (3, 4, 5)
    watch(RunProgress(1.0, counts, (None,) * 3, (0.0,) * 3, counts, away, run_id="small-1"), state)


def in_place_of_services(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    monkeypatch.setattr("sottovoce_client.runs.run_command.run_with_local_services", run)
    monkeypatch.setattr("sottovoce_client.runs.run_client.run_on_services", run)


@pytest.mark.parametrize("command", ["up", "run"])
@pytest.mark.parametrize(
    ("end", "code", "told_of_it"),
    [
        (("failed", "ann is gone since round 2"), 1, ("small-1", "failed", "ann is gone since round 2", 2)),
        (("stopped", STOPPED_BY_OPERATOR), 130, ("small-1", "stopped", STOPPED_BY_OPERATOR, 2)),
        (("stopped", STOPPED_BY_SIGTERM), 130, ("small-1", "stopped", STOPPED_BY_SIGTERM, 2)),
        (ServiceDied("ann died"), 1, ("small-1", "failed", "ann died", 3)),
        (
            RunInterrupted("stopped before the run began"),
            130,
            (None, "stopped", "stopped before the run began", 3),
        ),
    ],
)
def test_a_run_without_a_summary_says_how_it_ended(
    command: str,
    end: tuple[str, str] | Exception,
    code: int,
    told_of_it: tuple[str | None, str, str, int],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run(*words: Any, **more: Any) -> Outcome:
        if not isinstance(end, RunInterrupted):
            show(words, "running")
        if isinstance(end, Exception):
            raise end
        statuses = tuple(LearnerStatus(str(i), "small-1", rounds_done=2 + i) for i in range(3))
        return Outcome("small-1", *end, 1.0, statuses, (), None, (None,) * 3)

    in_place_of_services(monkeypatch, run)
    document, (run_id, state, detail, done) = told(command, "small.yaml", "--out", "o", code=code), told_of_it
    assert document == {
        "folder": "o",
        "name": "small",
        "run_id": run_id,
        "state": state,
        "detail": detail,
        "rounds": 6,
        "rounds_done": 0 if isinstance(end, RunInterrupted) else done,
        "capture": None,
    }


def test_a_run_that_failed_names_the_log_of_its_learner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*_: Any, **__: Any) -> Outcome:
        logs = folder / "o" / "logs"
        logs.mkdir(exist_ok=True)
        (logs / "1.log").touch()
        statuses = tuple(LearnerStatus(str(i), "small-1", rounds_done=2) for i in range(3))
        return Outcome("small-1", "failed", f"{failed}{SEE_LOG_TEXT}", 1.0, statuses, (), None, (None,) * 3)

    monkeypatch.setattr("sottovoce_client.runs.run_command.run_with_local_services", run)
    for failed, named in (("1 failed: an error; ", "logs/1.log"), ("2 failed: an error; ", "logs")):
        done = CliRunner().invoke(app, ["up", "small.yaml", "--out", "o"])
        assert done.exit_code == 1
        assert f"{failed}{SEE_LOG_TEXT}: {Path('o', named)}\n" in done.output
        shutil.rmtree(folder / "o")


@pytest.mark.parametrize(
    ("command", "seen", "away", "state", "says"),
    [
        ("run", "running", ("the coordinator",), "running", "continues, and was in round 3 when last seen"),
        ("run", "running", ("learner-1",), "running", "was stopped in round 3"),
        ("run", "finished", (), "finished", "finished in round 3: this command was stopped before"),
        ("up", "running", (), "stopped", "stopped in round 3: stopped twice, its services ended at once"),
    ],
)
def test_a_command_that_is_told_to_stop_twice_says_what_comes_of_its_run(
    command: str,
    seen: str,
    away: tuple[str, ...],
    state: str,
    says: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run(*words: Any, **more: Any) -> Outcome:
        show(words, seen, away)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.01)
        await asyncio.sleep(60.0)
        raise AssertionError("not cancelled")

    in_place_of_services(monkeypatch, run)
    document = told(command, "small.yaml", "--out", "o", code=130)
    assert (document["run_id"], document["state"], document["rounds_done"]) == ("small-1", state, 3)
    assert says in document["detail"] and "Nothing was run" not in document["detail"]
    assert ("sottovoce runs stop small-1" in document["detail"]) == ("the coordinator" in away)


@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_people_are_told_that_there_is_no_report_and_what_there_is(
    state: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(*words: Any, **more: Any) -> Outcome:
        detail = STOPPED_BY_OPERATOR if state == "stopped" else "ann is gone"
        return Outcome("small-1", state, detail, 1.0, (), (), "my captures/small-1", (None,) * 3)

    monkeypatch.setattr("sottovoce_client.runs.run_client.run_on_services", run)
    said = CliRunner().invoke(app, ["run", "small.yaml", "--out", "o"]).stdout
    assert f"A run that {state if state == 'failed' else 'was stopped by its operator'} has no summary" in said
    assert "are in my captures/small-1; to show them: sottovoce transcript show 'my captures/small-1'" in said


def test_a_signal_during_the_summary_says_that_the_run_is_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*words: Any, **more: Any) -> Outcome:
        return Outcome("small-1", "finished", "", 1.0, (), (), None, (None,) * 3)

    def cut(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sottovoce_client.runs.run_client.run_on_services", run)
    monkeypatch.setattr("sottovoce_client.runs.run_command.summarise", cut)
    document = told("run", "small.yaml", "--out", "o", code=130)
    assert (document["run_id"], document["state"]) == ("small-1", "finished")
    assert "before it had made the summary" in document["detail"]


def test_models_and_figures_of_a_simulation(folder: Path) -> None:
    told("simulate", "small.yaml", "--out", "o")
    assert told("models", "export", "o", "--out", "m.npz", "--unprotected")["out"] == "m.npz"
    drawn = told("plot", "o", "--out", "p", "--export", "csv")
    assert drawn["files"] == ["plot.html", "o.csv"]
    assert "accuracy" in drawn["figures"]


def test_words_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.reserve_stdout_for_json():
        print("a word")
        terminal.create_console().print("a table")
        terminal.print_json_if_requested(
            lambda: {"epsilon": math.inf, "at": Path("o"), "values": np.arange(2), "each": np.float64(0.5)}
        )
    terminal.print_json_if_requested(lambda: pytest.fail("nobody asked"))
    out, error = capsys.readouterr()
    assert json.loads(out) == {"epsilon": None, "at": "o", "values": [0, 1], "each": 0.5}
    assert error.splitlines() == ["a word", "a table"]
