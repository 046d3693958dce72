"""Signals end a command in a line, with all that works for it, whenever they come; and bars show how far what takes long is."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from sottovoce_client import entry_point, terminal
from sottovoce_client.backends import _run_in_worker, open_mapper
from sottovoce_client.cli import app, services
from sottovoce_client.runs.compare import compare
from sottovoce_client.runs.run_client import STOPPED_BY_OPERATOR, STOPPED_BY_SIGTERM, StopSignal
from sottovoce_client.runs.run_command import run_async
from sottovoce_core.api import simulate
from sottovoce_core.errors import SpecError
from sottovoce_core.results import InterruptedSimulation, read_results
from sottovoce_core.runs.metrics import Metrics
from tests.client.progress import Reported

LINE = "sottovoce: interrupted\n"
SPEC: dict[str, Any] = {"rounds": 6, "learners": 3, "algorithm": "ldp-dol", "data": {"source": "breast_cancer"}}
WHILE_IMPORTED = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.{number})
            os.kill(os.getpid(), signal.{number})  # as `timeout` does; it does not cut short how it ends
for number in (signal.SIGTERM, signal.SIGHUP):  # whatever starts the tests may have them ignored, or caught
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.{ctrl_c})
sys.meta_path.insert(0, Interrupting())
sys.argv = ["sottovoce", *{words!r}]
from sottovoce_client.entry_point import main
main()
"""

HEEDING = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever starts the tests may have it ignored
from sottovoce_client.entry_point import main
main()
"""
CLOSING = """
import os, signal, threading, time

def close():  # twice, once the service has told its loop to heed signals
    while "sighandler" not in getattr(signal.getsignal(signal.SIGINT), "__name__", ""):  # asyncio's and uvloop's
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGHUP)

threading.Thread(target=close, daemon=True).start()
"""
PATIENCE_S = 120.0


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
        (["budget", "SPEC", "--tradeoff", "1,2,3"], KeyboardInterrupt()),
    ],
)
def test_work_ends_in_a_line(
    words: list[str], how: BaseException, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: object) -> None:
        raise how

    monkeypatch.setattr(Metrics, "add_round", cut)
    done = CliRunner().invoke(
        app, [spec if word == "SPEC" else word for word in [*words, "--out", str(tmp_path / "o")]]
    )
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", LINE)


@pytest.mark.parametrize(
    ("words", "calls", "kept", "rounds"),
    [
        (["simulate", "SPEC", "--checkpoints", "2,4,6"], 5, "results until round 4 of 6 are kept: ", [[2, 4]]),
        (["simulate", "SPEC", "--checkpoints", "6,"], 5, "", []),
        (["compare", "SPEC", "SPEC", "--checkpoints", "1"], 8, "results of 1 run of 2 are kept: ", [[6]]),
        (
            ["sweep", "SPEC", "--set", "algorithm.sigma=1,2,4", "--jobs", "1"],
            14,
            "results of 2 of 3 combinations are kept: ",
            [[6], [6]],
        ),
    ],
)
def test_an_interrupt_keeps_what_was_measured(
    words: list[str],
    calls: int,
    kept: str,
    rounds: list[list[int]],
    spec: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_round, count = Metrics.add_round, 0

    def interrupt(self: Metrics, step: Any) -> None:
        nonlocal count
        if (count := count + 1) == calls:
            raise KeyboardInterrupt
        add_round(self, step)

    monkeypatch.setattr(Metrics, "add_round", interrupt)
    folder = tmp_path / "o"
    done = CliRunner().invoke(
        app, [*(spec if word == "SPEC" else word for word in words), "--metrics", "error", "--out", str(folder)]
    )
    assert (done.exit_code, done.stderr) == (130, f"{kept}{folder}\n{LINE}" if kept else LINE)
    assert folder.exists() == bool(kept)
    if kept:
        assert [run.curves.rounds.tolist() for run in read_results(folder).runs] == rounds
        assert not list(folder.glob("*.partial"))


def test_an_interrupt_in_python_has_the_results(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(step: Any) -> None:
        if step.t == 4:
            raise KeyboardInterrupt

    with pytest.raises(InterruptedSimulation) as stop:
        simulate(spec, metrics=["error"], checkpoints=[2, 4, 6], progress=interrupt)
    assert stop.value.results.runs[0].curves.rounds.tolist() == [2, 4]

    add_round, count = Metrics.add_round, 0

    def interrupt_later(self: Metrics, step: Any) -> None:
        nonlocal count
        if (count := count + 1) == 8:
            raise KeyboardInterrupt
        add_round(self, step)

    monkeypatch.setattr(Metrics, "add_round", interrupt_later)
    with pytest.raises(InterruptedSimulation) as stop:
        compare({"one": spec, "two": spec}, 1, metrics=["error"])
    assert [run.facts.spec for run in stop.value.results.runs] == ["one"]


def test_what_came_of_an_interrupt_is_known_by_its_cause(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*_: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise ImportError("cannot import it") from None

    monkeypatch.setattr(Metrics, "add_round", cut)
    done = CliRunner().invoke(app, ["simulate", spec])
    assert (done.exit_code, done.stderr) == (130, LINE)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("sottovoce_client.cli", ["--help"]),
        ("sottovoce_client.cli.pki", ["--help"]),
        ("sottovoce_client.runs.simulation", ["simulate", "SPEC"]),
        ("numpy", ["simulate", "SPEC"]),
        ("scipy.optimize", ["simulate", "SPEC", "--out", "o"]),
    ],
)
def test_so_does_what_is_still_imported(module: str, words: list[str], spec: str, tmp_path: Path) -> None:
    assert told_while_imported(module, words, spec, tmp_path) == (130, "", LINE)


@pytest.mark.parametrize("ctrl_c", ["default_int_handler", "SIG_IGN"])  # as in a shell's background job
@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
@pytest.mark.parametrize(
    ("module", "words"),
    [("sottovoce_client.cli.pki", ["--help"]), ("scipy.optimize", ["simulate", "SPEC", "--out", "o"])],
    ids=["starting", "working"],
)
def test_other_signals_end_it_as_ctrl_c_does(
    module: str, words: list[str], number: str, code: int, ctrl_c: str, spec: str, tmp_path: Path
) -> None:
    assert told_while_imported(module, words, spec, tmp_path, number, ctrl_c) == (code, "", LINE)
    assert [each.name for each in tmp_path.iterdir()] == ["small.yaml"]


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("sottovoce_client.cli.pki", ["coordinator"]),
        ("sottovoce_coordinator.service", ["coordinator", "--listen", "127.0.0.1:0"]),
        ("sottovoce_learner.service", ["learner", "--name", "ann", "--coordinator", "127.0.0.1:9"]),
        ("sottovoce_eavesdropper.grpc_proxy", ["eavesdropper", "relay", "--to", "127.0.0.1:9"]),
    ],
)
def test_a_service_that_is_told_to_end_while_it_is_imported_ends_well(
    module: str, words: list[str], number: str, spec: str, tmp_path: Path
) -> None:
    """It serves nobody, and has nothing to drain: that is no failure, for whoever restarts services that fail."""
    code, told, log = told_while_imported(module, words, spec, tmp_path, number)
    assert (code, told) == (0, "")
    assert json.loads(log) == {"event": "stopped", "level": "info", "reason": number, "drained": True}


async def test_a_service_that_is_told_to_end_while_it_starts_ends_well() -> None:
    """Nor does it when it has begun to open its files; cancelled by anybody else it is cut off."""
    ended, begun = list[str](), asyncio.Event()

    async def starting() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            ended.append("cleaned up")

    serving = asyncio.ensure_future(services._run_service(starting()))
    await begun.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await serving
    begun.clear()
    cut = asyncio.ensure_future(services._run_service(starting()))
    await begun.wait()
    cut.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cut
    assert ended == ["cleaned up"] * 2
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)


def test_a_command_of_the_eavesdropper_that_ends_by_itself_is_no_service() -> None:
    assert [
        entry_point._is_service(words) for words in (["eavesdropper"], ["eavesdropper", "audit", "x"], ["run"], [])
    ] == [
        True,
        False,
        False,
        False,
    ]


def told_while_imported(
    module: str,
    words: list[str],
    spec: str,
    folder: Path,
    number: str = "SIGINT",
    ctrl_c: str = "default_int_handler",
) -> tuple[int, str, str]:
    """Exit code, standard output and error of a command that is told to end when it imports this."""
    own = [spec if word == "SPEC" else word for word in words]
    code = WHILE_IMPORTED.format(module=module, words=own, number=number, ctrl_c=ctrl_c)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=False)
    return done.returncode, done.stdout, done.stderr


def test_workers_do_not_hear_it_and_whoever_started_them_does() -> None:
    with open_mapper("processes", 2) as mapper:
        blocked = list(mapper(partial(signal.pthread_sigmask, signal.SIG_BLOCK), [()] * 4))
    assert all(signal.SIGINT in each for each in blocked)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


SLEEPERS = """
import os, time
from sottovoce_client.backends import open_mapper
def work(seconds):
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(seconds)
with open_mapper("processes", 2) as mapper:
    list(mapper(work, [10_000] * 4))
"""


@pytest.mark.slow
def test_whatever_works_for_a_command_ends_with_it(spec: str, tmp_path: Path) -> None:
    """Its terminal is closed."""
    out = tmp_path / "o"
    words = ["audit", spec, "--runs", "1000000", "--jobs", "2", "--out", str(out)]
    with child(HEEDING, *words) as process:
        workers = workers_of(process)
        process.send_signal(signal.SIGHUP)
        _, said = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, said) == (129, LINE)
        assert not psutil.wait_procs(workers, PATIENCE_S)[1]
    assert not out.exists()


@pytest.mark.slow
def test_and_also_where_it_is_killed() -> None:
    with child(SLEEPERS) as process:
        assert process.stdout is not None
        workers = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
        process.kill()
        assert not psutil.wait_procs(workers, PATIENCE_S)[1]


def test_and_where_its_own_work_fails() -> None:
    """What is not waited for any more does not go on."""

    def fail() -> None:
        with open_mapper("processes", 2) as mapper:
            results = mapper(time.sleep, [0, 10_000, 10_000])
            next(results)
            workers.extend(started_by(os.getpid()))
            raise SpecError("no")

    workers: list[psutil.Process] = []
    with pytest.raises(SpecError, match="no"):
        fail()
    assert workers and not psutil.wait_procs(workers, PATIENCE_S)[1]


def test_a_service_whose_terminal_is_closed_drains_however_often_it_is_told() -> None:
    with child(CLOSING + HEEDING, "coordinator", "--listen", "127.0.0.1:0") as process:
        said, _ = process.communicate(timeout=PATIENCE_S)
        assert '"service": "coordinator"' in said
        assert process.returncode == 0


def test_what_follows_a_loop_hears_what_was_heard_before_it() -> None:
    async def work(_: asyncio.Event) -> str:
        return "done"

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        assert run_async(work) == "done"
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGINT, STOPPED_BY_OPERATOR), (signal.SIGTERM, STOPPED_BY_SIGTERM)]
)
def test_a_run_is_stopped_with_the_reason_that_its_command_ends_for(number: signal.Signals, reason: str) -> None:
    async def work(stop: asyncio.Event) -> str:
        signal.raise_signal(number)
        await stop.wait()
        assert isinstance(stop, StopSignal)
        return stop.reason

    assert run_async(work) == reason


def test_where_no_workers_may_be_started_the_process_that_works_itself_goes_on() -> None:
    assert _run_in_worker(os.getpid(), Path.cwd(), str, 1) == "1"
    assert all(each.name != "parent" for each in threading.enumerate())


@contextmanager
def child(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A Python of its own, whose terminal may be closed; killed at the end, with all that it started."""
    process = subprocess.Popen(
        [sys.executable, "-c", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that work for it, once there are two."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        if len(found := started_by(process.pid)) == 2:
            return found
        time.sleep(0.05)
    raise AssertionError("nobody works for it")


def started_by(process: int) -> list[psutil.Process]:
    """The workers of a process."""
    found = []
    for each in psutil.Process(process).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [each] * ("popen_loky" in " ".join(each.cmdline()))
    return found


# ---- bars ------------------------------------------------------------------------------------------------------------


def test_a_bar_counts_what_is_said_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(terminal, "create_console", lambda **_: Console(file=out, force_terminal=True, width=80))
    with terminal.show_progress_bar("choosing") as say:
        say("simulating", 1_000, 2_000, "runs")
        say("spec 1 of 2", 5, 5, "rounds")
        say("weighing")
    shown = out.getvalue()
    assert "choosing" in shown or "1,000 of 2,000" in shown
    assert "━" in shown
    assert shown.endswith("\x1b[2K")  # nothing of it stays


def test_elsewhere_a_line_is_printed_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("sottovoce_client.terminal.time.monotonic", lambda: now)
    with terminal.show_progress_bar("simulating") as report:
        for done in range(1, 201):
            now += 0.5
            report("simulating", 10 * done, 2_000, "rounds")
        now += 30.0
        report("weighing")
    lines = [
        "simulating: 200 of 2,000 rounds, after 10 s, about 1 min 30 s left",
        "simulating: 800 of 2,000 rounds, after 40 s, about 1 min 00 s left",
        "simulating: 1,400 of 2,000 rounds, after 70 s, about 30 s left",
        "simulating: 2,000 of 2,000 rounds, after 100 s",
        "weighing, after 130 s",
    ]
    assert capsys.readouterr() == ("", "\n".join(lines) + "\n")


def test_elsewhere_short_work_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.show_progress_bar("choosing") as say:
        say("simulating", 1, 2, "runs")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "last"),
    [
        (["simulate", "SPEC"], "simulating: 6 of 6 rounds"),
        (["compare", "SPEC", "--replicas", "2"], "run 1 of 1, SPEC: 6 of 6 rounds"),
        (
            ["sweep", "SPEC", "--set", "algorithm.sigma=1,2", "--replicas", "2", "--jobs", "1"],
            "simulating: 24 of 24 rounds",
        ),
        (["audit", "SPEC", "--runs", "30", "--jobs", "1"], "simulating and examining: 60 of 60 runs"),
        (["budget", "SPEC", "--tradeoff", "5,10,20", "--replicas", "2"], "simulating at epsilon 20: 6 of 6 rounds"),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_what_takes_long_says_how_far_it_is(
    words: list[str], last: str, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Reported()
    monkeypatch.setattr(terminal, "show_progress_bar", lambda what: Told(said))
    done = CliRunner().invoke(
        app, [spec if word == "SPEC" else word for word in [*words, "--out", str(tmp_path / "o")]]
    )
    assert done.exit_code == 0, done.output
    assert last.replace("SPEC", spec) in said


class Told:
    """In place of a bar: keeps what it is told."""

    def __init__(self, said: Reported) -> None:
        self.said = said

    def __enter__(self) -> Any:
        return self.said.say

    def __exit__(self, *_: object) -> None:
        pass
