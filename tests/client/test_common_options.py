"""Options that many commands share: declared once, accepted before the command and after it, refused where they have no use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from sottovoce_client.cli import app
from sottovoce_client.cli.common_options import COMMON_OPTIONS
from sottovoce_client.command_words import OPTIONS_WITH_VALUE, strip_common_options
from sottovoce_core.errors import SottovoceError, SpecError
from tests.client.test_completing import offered
from tests.client.test_json import commands

ROOT: Any = typer.main.get_command(app)
COMMON = {each.name: each for each in ROOT.params if each.name in COMMON_OPTIONS}


def ran(*words: str, **environment: str) -> Result:
    done = CliRunner().invoke(app, words, env=environment)
    if isinstance(done.exception, SottovoceError):
        raise done.exception
    return done


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The coordinators that `runs show` has asked, and the credentials."""
    found = list[tuple[str, Any]]()

    async def list_runs(coordinator: str, *, credentials: Any) -> None:
        found.append((coordinator, credentials))

    monkeypatch.setattr("sottovoce_client.runs.coordinator_commands.list_runs", list_runs)
    return found


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of profiles, with the profile `ward`."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "sottovoce"
    folder.mkdir()
    (folder / "ward.yaml").write_text("coordinator: ward:7400\nallow-imports: true\n", encoding="utf-8")
    return folder


def test_no_command_declares_them_again() -> None:
    assert COMMON.keys() == {*COMMON_OPTIONS}
    flags = {flag for each in COMMON.values() for flag in each.opts}
    again = {name for name, command in commands(ROOT) for each in command.params if flags & {*each.opts}}
    assert again - {""} == set()
    assert all(command.common_options <= COMMON.keys() for _, command in commands(ROOT))


def test_those_with_a_value_are_known_before_anything_is_imported() -> None:
    valued = {each.opts[0] for each in COMMON.values() if not each.is_flag}
    assert valued == {*OPTIONS_WITH_VALUE}
    assert strip_common_options(["--json", "--identity", "learner", "status", "--json"]) == ["status", "--json"]
    assert strip_common_options(["--identity=x", "learner"]) == ["learner"]
    assert strip_common_options(["--help"]) == []


@pytest.mark.parametrize("words", ["--json data list", "data --json list", "data list --json"])
def test_they_stand_before_the_command_or_after_it(words: str) -> None:
    assert json.loads(ran(*words.split()).stdout)


def test_the_last_one_counts(asked: list[tuple[str, Any]]) -> None:
    ran("--coordinator", "a:1", "runs", "show", "--coordinator", "b:2")
    ran("--coordinator", "a:1", "runs", "show", "--insecure", SOTTOVOCE_COORDINATOR="c:3")
    ran("runs", "show", SOTTOVOCE_COORDINATOR="c:3", SOTTOVOCE_INSECURE="1")
    ran("runs", "show")
    assert [coordinator for coordinator, _ in asked] == ["b:2", "a:1", "c:3", "127.0.0.1:7400"]
    assert [credentials.insecure for _, credentials in asked] == [False, True, True, False]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("simulate x.yaml --coordinator a:1", "--coordinator"),
        ("--coordinator a:1 simulate x.yaml", "--coordinator"),
        ("--json coordinator", "--json"),
        ("eavesdropper --coordinator a:1", "--coordinator"),
        ("eavesdropper audit x --insecure", "--insecure"),
        ("--config x.yaml data list", "--config"),
    ],
)
def test_a_command_without_use_for_one_refuses_it(words: str, option: str) -> None:
    with pytest.raises(SpecError, match=f"takes no {option}: leave it out"):
        ran(*words.split())


def test_the_environment_is_not_the_command_line() -> None:
    """What it sets for one command is of no concern to another: not even where it is wrong."""
    wrong = {"SOTTOVOCE_COORDINATOR": "nowhere", "SOTTOVOCE_CONFIG": "none.yaml", "SOTTOVOCE_LOG_FORMAT": "odd"}
    assert ran("data", "list", **wrong).exit_code == 0
    with pytest.raises(SpecError, match="--coordinator must be HOST:PORT"):
        ran("runs", "show", **wrong)


def test_a_profile_is_weaker_than_environment_and_command_line(asked: list[tuple[str, Any]], profiles: Path) -> None:
    ran("--profile", "ward", "runs", "show")
    ran("runs", "show", SOTTOVOCE_PROFILE="ward")
    ran("runs", "show", "--profile", "ward", SOTTOVOCE_COORDINATOR="c:3")
    ran("runs", "show", "--profile", "ward", "--coordinator", "d:4")
    ran("runs", "show")
    assert [coordinator for coordinator, _ in asked] == ["ward:7400", "ward:7400", "c:3", "d:4", "127.0.0.1:7400"]
    assert ran("data", "list", "--profile", "ward").exit_code == 0  # of which it uses nothing


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("none", None, "cannot read a profile|cannot read the profile"),
        ("../ward", None, "--profile must be the NAME"),
        ("odd", "listen: a:1\n", r"unknown: \['listen'\]"),
        ("odd", "coordinator: nowhere\n", "--coordinator must be HOST:PORT"),
    ],
)
def test_a_profile_that_is_none(name: str, text: str | None, words: str, profiles: Path) -> None:
    if text is not None:
        (profiles / f"{name}.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=words):
        ran("runs", "show", "--profile", name)


def test_help_shows_them_once() -> None:
    assert "--allow-imports" in ran("--help", COLUMNS="100").output
    shown = ran("predict", "--help", COLUMNS="100").output
    assert "Also takes --json, --allow-imports, --identity, --insecure: see sottovoce --help." in " ".join(
        shown.split()
    )
    assert "--coordinator" not in shown


def test_they_are_completed_after_a_command() -> None:
    assert "--json" in offered("sottovoce simulate --js").split()
    assert "--json" in offered("sottovoce --js").split()
