"""What a shell offers when Tab is pressed, and that it does not wait long for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sottovoce_client.cli import app, completion
from sottovoce_core.data.catalogue import CATALOGUE

SHELLS = ("bash", "zsh", "fish")


def offered(line: str, shell: str = "bash") -> str:
    """What is offered for the last word of a line, as the shell gets it."""
    words = line.split(" ")
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_TYPER_COMPLETE_ARGS": line}
    more = {"_SOTTOVOCE_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    return CliRunner().invoke(app, [], env={**asked, **more}).stdout


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("wards.yaml", "ward-2.yml", "wards.csv", "deep/spec.yaml", "deep.yaml/none"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("command", ["simulate", "up", "run", "audit", "budget", "compare", "spec check", "policy"])
def test_spec_files_are_offered_where_a_spec_is_asked_for(command: str, folder: Path) -> None:
    assert offered(f"sottovoce {command} ").split() == ["ward-2.yml", "wards.yaml"]


@pytest.mark.parametrize(
    ("start", "names"),
    [
        ("war", ["ward-2.yml", "wards.yaml"]),
        ("wards", ["wards.yaml"]),
        ("deep/", ["deep/spec.yaml"]),
        ("./w", ["./ward-2.yml", "./wards.yaml"]),
        ("nowhere/", []),
        ("de", []),  # a folder: the shell's own to offer
    ],
)
def test_spec_files_by_their_beginning(start: str, names: list[str], folder: Path) -> None:
    assert completion.complete_spec_files(start) == names
    assert completion.complete_spec_files(f"{folder}/{start}") == [f"{folder}/{name}" for name in names]


def test_specs_after_specs(folder: Path) -> None:
    assert offered("sottovoce compare wards.yaml ward-").split() == ["ward-2.yml"]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_commands_options_and_values(shell: str, folder: Path) -> None:
    assert "simulate" in offered("sottovoce sim", shell)
    assert "--replicas" in offered("sottovoce simulate --repl", shell)
    assert "wards.yaml" in offered("sottovoce simulate wards", shell)
    assert "mushrooms" in offered("sottovoce data fetch mu", shell)
    assert "network" in offered("sottovoce audit wards.yaml --on ne", shell)


def test_names_with_commas_between(folder: Path) -> None:
    assert offered("sottovoce simulate wards.yaml --write m").split() == ["metrics", "models"]
    assert offered("sottovoce simulate wards.yaml --write models,m").split() == ["models,metrics"]
    assert offered("sottovoce simulate wards.yaml --export csv,").split() == [
        f"csv,{form}" for form in ("latex", "svg", "pdf", "png")
    ]


def test_all_data_sets_are_offered() -> None:
    assert set(completion.complete_dataset_names("")) == CATALOGUE.keys()
    for words in ("data describe m", "demo --data m", "data fetch m"):
        assert offered(f"sottovoce {words}").split() == ["mushrooms", "mnist"]


@pytest.mark.parametrize("line", ["sottovoce ", "sottovoce simulate ", "sottovoce data fetch ", "sottovoce budget --"])
def test_nobody_waits_for_what_computes(line: str, folder: Path) -> None:
    code = """
import sys
from sottovoce_client.cli import app
try:
    app(prog_name="sottovoce")
finally:
    large = {"numpy", "grpc", "pyarrow", "yaml", "google.protobuf", "sottovoce_core.spec"}
    print(sorted(large & sys.modules.keys()), file=sys.stderr)
"""
    asked = {"_SOTTOVOCE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    environment = {**os.environ, **asked}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip()
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell: str) -> None:
    """Of which a shell that is here says that it can be read."""
    script = CliRunner().invoke(app, [], env={"_SOTTOVOCE_COMPLETE": f"source_{shell}"}).stdout
    assert "_SOTTOVOCE_COMPLETE=complete_" in script
    if found := shutil.which(shell):
        done = subprocess.run([found, "-n"], input=script, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_bash_itself_completes(folder: Path) -> None:
    if (bash := shutil.which("bash")) is None:
        pytest.skip("no bash here")
    script = f"""
export PATH={Path(sys.executable).parent}:$PATH
eval "$(_SOTTOVOCE_COMPLETE=source_bash sottovoce)"
COMP_WORDS=(sottovoce simulate ward); COMP_CWORD=2
_sottovoce_completion sottovoce ward simulate
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["ward-2.yml", "wards.yaml"], done.stderr
