"""The command `sottovoce`, as people run it: real processes, their exit codes, and what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import typer.main
import yaml
from typer.testing import CliRunner

from sottovoce_client.cli import app, main
from sottovoce_client.cli.app import VARIABLES, reject_misspelled_variables
from sottovoce_client.feeding.broker import PASSWORD_VARIABLE
from sottovoce_client.runs.local_services import LocalServices
from sottovoce_core.data.catalogue import DATA_FOLDER_VARIABLE
from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import load as load_experiment
from sottovoce_core.runs.transcript import read_noise
from sottovoce_core.spec import load_spec, parse_spec
from sottovoce_core.spec_versions import FORMAT
from sottovoce_eavesdropper import CAPTURE_FORMAT as CAPTURES
from sottovoce_eavesdropper.capture_reader import open_capture
from sottovoce_wire.v1.learner_pb2 import DESCRIPTOR

GUARD_S = 300.0  # against a hang; a busy machine may take its time
"""Longest that anything here may take: a guard against hanging, not a promise."""
FEATURES = 4  # of the records below, intercept included

TINY: dict[str, Any] = {
    "name": "tiny",
    "rounds": 20,
    "learners": 3,
    "algorithm": {"name": "ldp-dol"},
    "data": {"scale": "standard", "reuse": True},
    "capture": "relay",
    "durability": "process",
    "telemetry": {"accuracy": True, "predict": True},
}


def written(folder: Path, name: str = "spec.yaml", **changes: Any) -> str:
    """A spec file of `TINY` with these changes, and records for it."""
    records = folder / "records.npz"
    features = np.random.default_rng(0).normal(size=(60, FEATURES - 1))
    np.savez(records, X=features, y=(features[:, 0] > 0).astype(int))
    data = {**TINY["data"], "source": str(records), **changes.pop("data", {})}
    path = folder / name
    path.write_text(yaml.safe_dump({**TINY, "data": data, **changes}), encoding="utf-8")
    return str(path)


def started(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SOTTOVOCE_")}
    return subprocess.Popen(
        [sys.executable, "-m", "sottovoce_client", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "COLUMNS": "100"},
        **more,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    try:
        out, err = process.communicate(timeout=GUARD_S)
    finally:
        process.kill()
    return process.returncode, out, err


def ran(*arguments: str, **more: Any) -> tuple[int, str, str]:
    return ended(started(*arguments, **more))


def at_once(commands: list[list[str]]) -> list[tuple[int, str, str]]:
    """What each of them came to."""
    return [ended(process) for process in [started(*command) for command in commands]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`ran` in this process: what starts nothing comes to the same there, and a process takes a second to begin."""
    for name in [name for name in os.environ if name.startswith("SOTTOVOCE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "100")

    def ran_here(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sottovoce", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return ran_here


def eventually(holds: Callable[[], bool]) -> None:
    """Wait for something that must happen."""
    until = time.monotonic() + GUARD_S
    while not holds():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


# ---- help ------------------------------------------------------------------------------------------------------------

COMMANDS = {
    "": "Start with sottovoce demo",
    "demo": "--print-spec",
    "data": "describe",
    "data fetch": "--from",
    "up": "--per-process",
    "run": "Also takes --json, --coordinator, --identity, --insecure: see sottovoce --help.",
    "simulate": "--write",
    "compare": "compare.html",
    "coordinator": "--eavesdropper",
    "learner": "--join-timeout",
    "status": "Show the current status",
    "policy": "learner to check",
    "eavesdropper": "--advertise-host",
    "watch": "False alarm rate.",
    "predict": "(telemetry.predict)",
    "models": "cost of publishing it",
    "models export": "--unprotected",
    "spec": "values",
    "spec check": "without running anything",
    "spec values": "for the Helm chart",
    "init": "--schema-only",
    "data describe": "Show the content of a data set",
}


def test_every_command_explains_itself(here: Callable[..., tuple[int, str, str]]) -> None:
    """Groups as people ask them, in a process."""
    groups = ["", *{command.split()[0] for command in COMMANDS if " " in command}]
    asked = at_once([[*command.split(), "--help"] for command in groups])
    helping = [(command, here(*command.split(), "--help")) for command in COMMANDS]
    for command, (code, out, err) in [*helping, *zip(groups, asked, strict=True)]:
        assert (code, err) == (0, ""), command
        assert COMMANDS[command] in out, command


def test_the_version_is_said_with_the_formats_that_others_must_read() -> None:
    code, out, err = ran("--version")
    assert (code, err) == (0, "")
    assert version("sottovoce") in out.splitlines()[0]
    for format_ in (DESCRIPTOR.package, f"of format {FORMAT}", CAPTURES):
        assert format_ in out.splitlines()[1]


LINKS = {  # as Kubernetes makes them for a service sottovoce-coordinator with a port that is called grpc
    "SOTTOVOCE_COORDINATOR_SERVICE_HOST": "10.0.0.7",
    "SOTTOVOCE_COORDINATOR_SERVICE_PORT": "7400",
    "SOTTOVOCE_COORDINATOR_SERVICE_PORT_GRPC": "7400",
    "SOTTOVOCE_COORDINATOR_PORT": "tcp://10.0.0.7:7400",
    "SOTTOVOCE_COORDINATOR_PORT_7400_TCP": "tcp://10.0.0.7:7400",
    "SOTTOVOCE_COORDINATOR_PORT_7400_TCP_PROTO": "tcp",
    "SOTTOVOCE_COORDINATOR_PORT_7400_TCP_PORT": "7400",
    "SOTTOVOCE_COORDINATOR_PORT_7400_TCP_ADDR": "10.0.0.7",
}


def test_the_variables_of_settings_are_those_of_all_commands() -> None:
    def of(command: Any) -> Iterator[str]:
        for each in command.params:
            given = each.envvar or ()
            yield from (given,) if isinstance(given, str) else given
        for each in getattr(command, "commands", {}).values():
            yield from of(each)

    found = {name for name in of(typer.main.get_command(app)) if name.startswith("SOTTOVOCE_")}
    assert {*found, "SOTTOVOCE_DATA", "SOTTOVOCE_FEED_PASSWORD"} == VARIABLES
    assert DATA_FOLDER_VARIABLE in VARIABLES and PASSWORD_VARIABLE in VARIABLES


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("BUGDET", "BUDGET"),
        ("LOGLEVEL", "LOG_LEVEL"),
        ("IDENTTY", "IDENTITY"),
        ("METRIC", "METRICS"),
        ("budget", "BUDGET"),
    ],
)
def test_a_variable_that_is_nearly_a_setting_is_refused(name: str, near: str) -> None:
    """It would be ignored: a budget of nobody."""
    with pytest.raises(SpecError, match=f"SOTTOVOCE_{name} is not a setting, but similar to SOTTOVOCE_{near}"):
        reject_misspelled_variables({f"SOTTOVOCE_{name}": "1"})


def test_a_variable_that_is_none_is_told_and_those_of_kubernetes_are_not() -> None:
    assert (
        reject_misspelled_variables({**LINKS, "SOTTOVOCE_BUDGET": "1", "PATH": "/bin", "_SOTTOVOCE_COMPLETE": "x"})
        == []
    )
    others = {"SOTTOVOCE_COLOUR": "red", "SOTTOVOCE_PORT": "7400"}
    assert reject_misspelled_variables(others) == list(others)
    shown = CliRunner().invoke(app, ["data", "list"], env=others).stderr
    told = "sottovoce: the environment variable SOTTOVOCE_{} is not a setting, and is ignored\n"
    assert told.format("COLOUR") + told.format("PORT") in shown


def test_a_command_looks_at_its_variables_unless_it_explains_itself() -> None:
    run = partial(CliRunner().invoke, app, env={"SOTTOVOCE_BUGDET": "1"})
    assert isinstance(run(["learner", "--name", "ann", "--coordinator", "127.0.0.1:9"]).exception, SpecError)
    assert run(["learner", "--help"]).exit_code == 0


def test_what_is_printed_can_be_used(tmp_path: Path, here: Callable[..., tuple[int, str, str]]) -> None:
    demo = tmp_path / "demo.yaml"
    demo.write_text(ran("demo", "--print-spec")[1], encoding="utf-8")
    shown, checked, schema = (
        ran("spec", "check", str(demo), "--print"),
        here("spec", "check", str(demo)),
        here("spec", "check", "--json-schema"),
    )

    assert (shown[0], checked[0], schema[0]) == (0, 0, 0)
    (tmp_path / "shown.yaml").write_text(shown[1], encoding="utf-8")
    assert load_spec(tmp_path / "shown.yaml") == load_spec(demo)
    assert "5 learners, 6 features and an intercept: valid" in checked[1]
    assert json.loads(schema[1])["title"] == "RunSpec"


def test_the_demo_keeps_to_the_theory_uses_each_record_once_and_promises_little(tmp_path: Path) -> None:
    path = tmp_path / "demo.yaml"
    path.write_text(ran("demo", "--print-spec")[1], encoding="utf-8")
    demo = load_experiment(path)

    assert not demo.run.warnings and not demo.data.reuse
    learned = demo.records.learners[0]
    assert len(learned.order) == len(np.unique(learned.order))
    assert max(demo.guarantee(name).epsilon() for name in demo.names) <= 4


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_what_goes_wrong_is_said_in_a_line_and_exits_with_2(
    tmp_path: Path, here: Callable[..., tuple[int, str, str]]
) -> None:
    """Once for every command in a process, all of those at once; never a traceback."""
    np.savez(tmp_path / "nan.npz", X=np.full((30, 2), np.nan), y=np.arange(30) % 2)
    np.savez(tmp_path / "noise.npz", y=np.zeros((5, 3, FEATURES)))
    nan, nobody = {"source": str(tmp_path / "nan.npz")}, "127.0.0.1:1"
    edges = {"graph": {"kind": "edges", "edges": [[0, 1]]}}
    out = ["--out", str(tmp_path / "out")]
    tiny = written(tmp_path)
    wrong_before: list[tuple[list[str], str]] = [  # before anything is started
        (["up", written(tmp_path, "b.yaml", topology=edges), *out], "the communication graph is not connected"),
        (["up", written(tmp_path, "c.yaml", data=nan), *out], "must be a finite number, got nan"),
        (
            ["simulate", written(tmp_path, "e.yaml", algorithm={"name": "ldp-dol", "sigma": -1}), *out],
            "sigma must be positive and finite, got -1.0",
        ),
        (["simulate", str(tmp_path / "none.yaml"), *out], "cannot read the run spec"),
        (["simulate", tiny, "--out", f"{tiny}/x"], "cannot write to the folder"),
        (["run", tiny, "--resume", "a", "--recover", "a", *out], "exclude each other"),
        (["coordinator", "--log-level", "loud"], "debug, info, warning"),
        (["coordinator", "--config", written(tmp_path, "f.yaml")], "must map options of this command"),
    ]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = f"127.0.0.1:{taken.getsockname()[1]}"
        wrong: list[tuple[list[str], str]] = [
            (["up", written(tmp_path, "a.yaml", colour="red"), *out], "unknown field colour"),
            (
                ["spec", "check", written(tmp_path, "d.yaml", algorithm={"name": "sgd"})],
                "or module:Class of your own, got 'sgd'",
            ),
            (["simulate", tiny, *out, "--recorded-noise", str(tmp_path / "noise.npz")], "noise must cover 20 rounds"),
            (
                ["run", tiny, "--coordinator", nobody, "--out", str(tmp_path / "run")],
                "cannot reach the coordinator at 127.0.0.1:1",
            ),
            (
                ["learner", "--name", "a", "--coordinator", nobody, "--join-timeout", "0.3", "--state", out[1]],
                "cannot reach the coordinator at 127.0.0.1:1 within 0.3 s",
            ),
            (["coordinator", "--listen", used], f"cannot listen on {used}: the port is in use"),
        ]
        results = at_once([arguments for arguments, _ in wrong])
    results += [here(*arguments) for arguments, _ in wrong_before]
    for (arguments, text), (code, _, err) in zip([*wrong, *wrong_before], results, strict=True):
        lines = [line for line in err.splitlines() if not line.startswith("{")]  # a service's log is JSON
        assert code == 2, (arguments, err)
        assert text in err, arguments
        assert len(lines) == 1, err
        assert lines[0].startswith("sottovoce: ")


# ---- simulate --------------------------------------------------------------------------------------------------------


def test_simulate_writes_what_it_promises(tmp_path: Path) -> None:
    spec = written(tmp_path)
    options = ["--replicas", "2", "--seed", "7", "--write", "decisions,transcript,noise"]
    code, out, err = ran("simulate", spec, "--out", str(tmp_path / "one"), *options)
    assert (code, err) == (0, "")
    assert "20 rounds of 3 learners, 2 replicas" in out
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert names == {"spec.yaml", "transcript.parquet", "decisions.parquet", "noise.parquet"}

    said = read_noise(tmp_path / "one" / "transcript.parquet")["y"]
    decided = read_noise(tmp_path / "one" / "decisions.parquet")["decision"]
    noise = read_noise(tmp_path / "one" / "noise.parquet")["y"]
    assert said.shape == noise.shape == (20, 3, 2, FEATURES)
    assert decided.shape == (21, 3, 2, FEATURES)
    np.testing.assert_allclose(said, decided[:-1] + noise, rtol=0, atol=1e-9)
    assert load_spec(tmp_path / "one" / "spec.yaml") == load_spec(Path(spec))

    recorded = ["--replicas", "2", "--write", "transcript", "--recorded-noise", str(tmp_path / "one" / "noise.parquet")]
    assert ran("simulate", spec, "--out", str(tmp_path / "two"), *recorded)[0] == 0
    again = read_noise(tmp_path / "two" / "transcript.parquet")["y"]
    np.testing.assert_allclose(again, said, rtol=1e-12, atol=1e-12)


# ---- up --------------------------------------------------------------------------------------------------------------


class Up:
    """`sottovoce up` under way.

    Attributes:
        process: the parent.
        folder: its results.
        children: services seen so far.
    """

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder = folder / "out"
        self.process = started("up", written(folder, **changes), "--out", str(self.folder), start_new_session=True)
        self.children: dict[int, psutil.Process] = {}

    def look(self) -> dict[int, psutil.Process]:
        """The services seen so far, those of now included."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.children.setdefault(child.pid, child)
        return self.children

    def over(self) -> bool:
        """True when the parent has ended; remembers the services until then."""
        self.look()
        return self.process.poll() is not None

    def service(self, name: str) -> psutil.Process:
        """A running service, by an argument of its command line."""
        self.look()
        return next(child for child in self.children.values() if child.is_running() and name in child.cmdline())

    def listening(self) -> None:
        """Wait until messages have been captured and written."""
        eventually(lambda: any(self.folder.glob("captures/*/part-*.parquet")))
        assert len(self.look()) == 5  # coordinator, eavesdropper, three learners

    def gone(self) -> bool:
        """True when no service is left."""
        return not any(
            child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in self.children.values()
        )


@contextlib.contextmanager
def up(folder: Path, **changes: Any) -> Iterator[Up]:
    running = Up(folder, **changes)
    try:
        yield running
    finally:
        running.look()
        running.process.kill()
        for child in running.children.values():
            if child.is_running():
                child.kill()


ENDLESS = 200_000
"""Rounds of a run that is cut short."""


def test_up_runs_a_spec_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with up(tmp_path) as running:
        eventually(running.over)
        code, out, err = ended(running.process)
        assert running.children
        assert running.gone()
    assert (code, err) == (0, ""), out
    assert "learner-2" in out

    names = {path.name for path in running.folder.iterdir()}
    assert names >= {"spec.yaml", "summary.json", "report.html", "captures", "learner-state", "logs"}
    summary = json.loads((running.folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["state"], summary["rounds"]) == ("finished", 20)
    (capture,) = (running.folder / "captures").iterdir()
    assert open_capture(capture).is_complete
    assert open_capture(capture).read_transcript({"y": (FEATURES,)}, 3).rounds == 20


@pytest.mark.slow
def test_ctrl_c_ends_a_run_and_keeps_what_was_captured(tmp_path: Path) -> None:
    with up(tmp_path, rounds=ENDLESS) as running:
        running.listening()
        running.process.send_signal(signal.SIGINT)
        code, out, err = ended(running.process)
        assert running.gone()
    assert (code, err) == (130, "")
    assert "the operator stopped the run" in out
    (capture,) = (running.folder / "captures").iterdir()
    assert str(capture) in out.replace("\n", "")
    assert open_capture(capture).is_complete
    assert open_capture(capture).read_transcript({"y": (FEATURES,)}, 3).rounds >= 1


@pytest.mark.slow
def test_ctrl_c_while_services_are_starting_leaves_nothing_behind(tmp_path: Path) -> None:
    with up(tmp_path, rounds=ENDLESS) as running:
        eventually(lambda: len(running.look()) >= 2)
        running.process.send_signal(signal.SIGINT)
        eventually(running.over)
        code, _, err = ended(running.process)
        assert running.gone()
    assert code == 130
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_learner_that_is_killed_is_named(tmp_path: Path) -> None:
    with up(tmp_path, rounds=ENDLESS) as running:
        running.listening()
        victim = running.service("learner-1")
        victim.kill()
        code, out, err = ended(running.process)
        assert running.gone()
    assert code == 1
    assert f"learner-1 (process {victim.pid}) died, killed by SIGKILL" in f"{out} {err}".replace("\n", " ")
    assert "Traceback" not in err
    (capture,) = (running.folder / "captures").iterdir()
    assert open_capture(capture).read_transcript({"y": (FEATURES,)}, 3).rounds >= 1


@pytest.mark.slow
def test_when_the_parent_is_killed_nothing_outlives_it(tmp_path: Path) -> None:
    with up(tmp_path, rounds=ENDLESS) as running:
        running.listening()
        running.process.kill()
        eventually(running.gone)
        ended(running.process)
    (capture,) = (running.folder / "captures").iterdir()
    assert open_capture(capture).read_transcript({"y": (FEATURES,)}, 3).rounds >= 1


@pytest.mark.parametrize(("name", "leave"), [("ldp-dol", []), ("tests.gossip:GossipSpec", ["--allow-imports"])])
def test_local_services_import_code_only_for_a_spec_that_names_it(tmp_path: Path, name: str, leave: list[str]) -> None:
    """Whoever else is on this machine could start a run on them."""
    services = LocalServices(parse_spec({"rounds": 3, "algorithm": {"name": name}}, allow_imports=True), tmp_path)
    assert services._imports == leave
    assert [word for word in services._learner_command(["ann"]) if word.startswith("--allow")] == leave
