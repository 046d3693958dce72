"""Modules of the working folder: found where imports are allowed, and never in place of installed ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sottovoce_core.errors import SpecError
from sottovoce_core.registry import Registry, Section, import_object
from sottovoce_core.spec import parse_spec

SPEC = "{rounds: 4, learners: 3, algorithm: ldp-dol, loss: {kind: 'own_kinds:OwnLoss'}}"
OWN = """\
from pathlib import Path
from typing import Literal
from sottovoce_core.losses.linear import LogisticLoss
import own_sibling
Path("imported").touch()
class OwnLoss(LogisticLoss):
    kind: Literal["own_kinds:OwnLoss"] = "own_kinds:OwnLoss"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_kinds.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "own_sibling.py").touch()
    (tmp_path / "spec.yaml").write_text(SPEC, encoding="utf-8")
    for name in ("json", "numpy", "scipy", "colorsys", "sottovoce_core"):  # some of them are not imported yet
        (tmp_path / f"{name}.py").write_text("open('shadowed', 'w').close()", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    for name in ("own_kinds", "own_sibling"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env={**inherited, **environment}, capture_output=True, text=True)


SOTTOVOCE = str(Path(sys.executable).with_name("sottovoce"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate", "spec.yaml"),
        ("up", "spec.yaml"),
        ("sweep", "spec.yaml", "--set", "rounds=3,4", "--replicas", "2", "--jobs", "2"),
    ],
)
def test_the_command_line_finds_them_also_in_child_processes(folder: Path, arguments: tuple[str, ...]) -> None:
    done = run(folder, SOTTOVOCE, *arguments, "--out", "results")
    assert done.returncode == 0, done.stderr
    assert (folder / "imported").exists() and not (folder / "shadowed").exists()


def test_a_script_in_another_folder_finds_them(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    script = tmp_path_factory.mktemp("scripts") / "script.py"
    script.write_text("import sottovoce as sv; sv.load('spec.yaml'); import colorsys, scipy", encoding="utf-8")
    done = run(folder, sys.executable, str(script))
    assert done.returncode == 0, done.stderr
    assert (folder / "imported").exists() and not (folder / "shadowed").exists()


def test_without_leave_nothing_is_imported_and_the_path_stays(folder: Path) -> None:
    before = [*sys.path]
    document: dict[str, Any] = {"rounds": 4, "algorithm": "ldp-dol", "loss": {"kind": "own_kinds:OwnLoss"}}
    with pytest.raises(SpecError, match="--allow-imports"):
        parse_spec(document, allow_imports=False)
    with pytest.raises(SpecError, match="No module named 'own_kinds'"):  # a package's entry point, not the user's word
        import_object("own_kinds:OwnLoss", "kind")
    registry: Registry[Section] = Registry(Section, {"own": "own_kinds:OwnLoss"}, None)
    with pytest.raises(SpecError, match="No module named 'own_kinds'"):
        registry.find("own")
    assert sys.path == before and not (folder / "imported").exists()
    assert parse_spec(document, allow_imports=True).loss.kind == "own_kinds:OwnLoss"
    assert sys.path == [*before, str(folder)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_kinds:OwnLos", "did you mean OwnLoss?"),
        ("own_kinds:Zzz", "name one that the module has"),
        ("nowhere:Class", "is it installed, or a file of the working folder"),
        ("colorsys:Class", "an installed module has the name of colorsys in the working folder: rename that"),
        ("..:Class", "cannot import"),
        ("../own_kinds:OwnLoss", "cannot import"),
    ],
)
def test_what_cannot_be_imported_is_explained(folder: Path, name: str, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        import_object(name, "kind", is_own=True)
    assert message in str(refused.value)
    assert not (folder / "shadowed").exists()
