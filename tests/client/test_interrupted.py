"""Ctrl-C ends a command in a line and with exit code 130, whenever it comes; and bars show how far what takes long is."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from sottovoce.running.metrics import Metrics
from sottovoce_client import terminal
from sottovoce_client.backends import mapper_over
from sottovoce_client.cli import app

LINE = "sottovoce: interrupted\n"
SPEC: dict[str, Any] = {"rounds": 6, "learners": 3, "algorithm": "ldp-dol", "data": {"source": "breast_cancer"}}
WHILE_IMPORTED = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever starts the tests may have it ignored
sys.meta_path.insert(0, Interrupting())
sys.argv = ["sottovoce", *{words!r}]
from sottovoce_client.entry import main
main()
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SPEC), "utf-8")
    return str(tmp_path / "small.yaml")


class Cut(RuntimeError):
    """What C code may make of it."""


@pytest.mark.parametrize(
    ("words", "how"),
    [
        (["simulate", "SPEC"], KeyboardInterrupt()),
        (["simulate", "SPEC"], Cut("while building: KeyboardInterrupt: ")),
        (["compare", "SPEC"], KeyboardInterrupt()),
        (["tradeoff", "SPEC", "--epsilons", "1,2,3"], KeyboardInterrupt()),
    ],
)
def test_work_ends_in_a_line(
    words: list[str], how: BaseException, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: object) -> None:
        raise how

    monkeypatch.setattr(Metrics, "take", cut)
    done = CliRunner().invoke(
        app, [spec if word == "SPEC" else word for word in [*words, "--out", str(tmp_path / "o")]]
    )
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", LINE)


def test_what_came_of_an_interrupt_is_known_by_its_cause(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*_: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise ImportError("cannot import it") from None

    monkeypatch.setattr(Metrics, "take", cut)
    done = CliRunner().invoke(app, ["simulate", spec])
    assert (done.exit_code, done.stderr) == (130, LINE)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("sottovoce_client.cli", ["--help"]),
        ("sottovoce_client.cli.pki", ["--help"]),
        ("sottovoce_client.running.simulation", ["simulate", "SPEC"]),
        ("numpy", ["simulate", "SPEC"]),
        ("scipy.optimize", ["simulate", "SPEC", "--out", "o"]),
    ],
)
def test_so_does_what_is_still_imported(module: str, words: list[str], spec: str, tmp_path: Path) -> None:
    code = WHILE_IMPORTED.format(module=module, words=[spec if word == "SPEC" else word for word in words])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", LINE)


def test_workers_do_not_hear_it_and_whoever_started_them_does() -> None:
    with mapper_over("processes", 2) as mapper:
        blocked = list(mapper(partial(signal.pthread_sigmask, signal.SIG_BLOCK), [()] * 4))
    assert all(signal.SIGINT in each for each in blocked)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


# ---- bars ------------------------------------------------------------------------------------------------------------


def test_a_bar_counts_what_is_said_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(terminal, "console", lambda **_: Console(file=out, force_terminal=True, width=80))
    with terminal.bar("choosing") as say:
        say("run 1,000 of 2,000 runs")
        say("spec 1 of 2: 5 of 5 rounds")
        say("weighing")
    shown = out.getvalue()
    assert "choosing" in shown or "1,000 of 2,000" in shown
    assert "━" in shown
    assert shown.endswith("\x1b[2K")  # nothing of it stays


def test_elsewhere_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.bar("choosing") as say:
        say("run 1 of 2")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "last"),
    [
        (["simulate", "SPEC"], "simulating: 6 of 6 rounds"),
        (["compare", "SPEC", "--replicas", "2"], "spec 1 of 1, SPEC: 6 of 6 rounds"),
        (
            ["sweep", "SPEC", "--set", "algorithm.sigma=1,2", "--seeds", "2", "--jobs", "1"],
            "simulating: 24 of 24 rounds",
        ),
        (["audit", "SPEC", "--runs", "30", "--jobs", "1"], "simulating and examining: 60 of 60 runs"),
        (["tradeoff", "SPEC", "--epsilons", "5,10,20", "--replicas", "2"], "simulating at epsilon 20: 6 of 6 rounds"),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_what_takes_long_says_how_far_it_is(
    words: list[str], last: str, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(terminal, "bar", lambda what: Told(said))
    done = CliRunner().invoke(
        app, [spec if word == "SPEC" else word for word in [*words, "--out", str(tmp_path / "o")]]
    )
    assert done.exit_code == 0, done.output
    assert last.replace("SPEC", spec) in said


class Told:
    """In place of a bar: keeps what it is told."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def __enter__(self) -> Any:
        return self.said.append

    def __exit__(self, *_: object) -> None:
        pass
