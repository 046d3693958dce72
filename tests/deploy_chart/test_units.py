"""The units of systemd: systemd has nothing to say against them, and they open what they must and nothing more."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sottovoce_rpc.server import _DRAIN_TIMEOUT_S, _GRACE_TIMEOUT_S
from tests.deploy_chart.test_chart import _options, _parsed

UNITS = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
PROGRAM = "/opt/sottovoce/bin/sottovoce"
SERVICES = {"learner": "sottovoce-learner@.service", "coordinator": "sottovoce-coordinator.service"} | {
    "eavesdropper": "sottovoce-eavesdropper.service"
}
SPECIFIERS = {"%I": "north", "%i": "north", "%S": "/var/lib", "%d": "/run/credentials/a.service"}
MOST_EXPOSURE = 1.5
"""Of 10, by `systemd-analyze security`: what is left is the network, and that it runs on this machine's files."""
each_service = pytest.mark.parametrize("service", SERVICES)


def settings(service: str) -> dict[str, list[str]]:
    """What a unit sets, in its order."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / SERVICES[service]).read_text(encoding="utf-8").splitlines():
        if (said := re.fullmatch(r"(\w+)=(.*)", line)) is not None:
            found.setdefault(said[1], []).append(said[2])
    return found


@pytest.fixture(scope="module")
def analyze() -> Any:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not there: apt-get install systemd")

    def ran(*arguments: str, cwd: Path = UNITS) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}
        command = [program, *arguments]
        return subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120
        )

    return ran


@each_service
def test_systemd_takes_it(service: str, analyze: Any, tmp_path: Path) -> None:
    """The program stands somewhere else here."""
    for name in SERVICES.values():
        text = (UNITS / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace(PROGRAM, sys.executable), encoding="utf-8")
    said = analyze("verify", "--man=no", f"./{SERVICES[service].replace('@', '@north')}", cwd=tmp_path)

    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")


def test_a_unit_that_is_wrong_would_be_noticed(analyze: Any, tmp_path: Path) -> None:
    text = (UNITS / SERVICES["coordinator"]).read_text(encoding="utf-8")
    wrong = text.replace(PROGRAM, sys.executable).replace("ProtectHome=yes", "ProtectHome=maybe")
    (tmp_path / "a.service").write_text(wrong, encoding="utf-8")

    assert "protect home" in analyze("verify", "--man=no", "./a.service", cwd=tmp_path).stderr


@each_service
def test_it_is_little_exposed(service: str, analyze: Any) -> None:
    said = analyze("security", "--offline=true", "--no-pager", f"./{SERVICES[service]}")
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", said.stdout)

    assert found is not None, said.stderr
    assert float(found[1]) <= MOST_EXPOSURE, said.stdout


@each_service
def test_the_real_command_line_takes_how_it_is_started(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = (UNITS / f"{service}.env.example").read_text(encoding="utf-8")
    set_there = dict(re.findall(r"^(?:# )?(SOTTOVOCE_\w+)=(.*)$", example, re.MULTILINE))
    for name, value in set_there.items():
        monkeypatch.setenv(name, value)
    (line,) = settings(service)["ExecStart"]
    for short, meant in SPECIFIERS.items():
        line = line.replace(short, meant)
    program, command, *arguments = line.split()
    _parsed(command, arguments)

    assert (program, command) == (PROGRAM, service)
    assert "%" not in line
    assert set(set_there) <= {each.envvar for each in _options(command)}


@each_service
def test_it_keeps_its_state_and_shows_its_identity_to_itself_alone(service: str) -> None:
    found = settings(service)
    (line,) = found["ExecStart"]
    shown = dict(each.split(":", 1) for each in found["LoadCredential"])

    assert set(shown) == {"tls.crt", "tls.key", "ca.crt", "crl.pem"}
    assert all(Path(path).name == name for name, path in shown.items())
    assert "--identity %d" in line
    assert f"%S/{found['StateDirectory'][0]}" in line.split()
    assert (found["StateDirectoryMode"], found["UMask"]) == (["0700"], ["0077"])
    assert found["DynamicUser"] == ["yes"]


@each_service
def test_it_is_given_the_time_that_it_takes_to_end(service: str) -> None:
    """Who takes longer is killed: by the ladder of every service, and what an eavesdropper may take to write."""
    from sottovoce_eavesdropper.service import DRAIN_TIMEOUT_S

    found = settings(service)
    takes = (DRAIN_TIMEOUT_S if service == "eavesdropper" else _DRAIN_TIMEOUT_S) + _GRACE_TIMEOUT_S

    assert float(found["TimeoutStopSec"][0]) > takes
    assert found["Restart"] == ["on-failure"]


def test_learners_are_users_of_their_own() -> None:
    """A dynamic user is named after its unit, and all instances of a template have one."""
    assert settings("learner")["User"] == ["sottovoce-%i"]
