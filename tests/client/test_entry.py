"""Where processes begin: what is set there, before NumPy reads it, and that importing sets nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
CODE = """
import json, os, sys
before = dict(os.environ)
{work}
changed = {{key: value for key, value in os.environ.items() if before.get(key) != value}}
print(json.dumps([changed, "numpy" in sys.modules]))
"""
OURS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "GRPC_VERBOSITY")


def changed_by(work: str, **environment: str) -> tuple[dict[str, str], bool]:
    """What a piece of code sets in its process, and whether NumPy was there by then."""
    clean = {key: value for key, value in os.environ.items() if key not in OURS}
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(work=work)],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    changed, with_numpy = json.loads(done.stdout.splitlines()[-1])
    return changed, with_numpy


def test_an_entry_point_takes_one_thread_before_numpy_is_there() -> None:
    changed, with_numpy = changed_by(
        "from sottovoce_client.entry_point import set_environment_defaults; set_environment_defaults()"
    )
    assert changed == {**dict.fromkeys(OURS, "1"), "GRPC_VERBOSITY": "NONE"}
    assert not with_numpy


def test_what_the_user_set_stays() -> None:
    changed, _ = changed_by(
        "from sottovoce_client.entry_point import set_environment_defaults; set_environment_defaults()",
        OPENBLAS_NUM_THREADS="8",
    )
    assert "OPENBLAS_NUM_THREADS" not in changed


@pytest.mark.parametrize("start", ["import runpy; runpy.run_module('sottovoce_client', run_name='__main__')", "main()"])
def test_every_way_to_the_command_is_that_entry_point(start: str) -> None:
    scripts = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["scripts"]
    module, function = scripts["sottovoce"].split(":")
    work = f"""
sys.argv = ["sottovoce", "data", "--help"]
from {module} import {function} as main
try:
    {start}
except SystemExit:
    pass
"""
    assert changed_by(work)[0].keys() == set(OURS)


def test_importing_sets_nothing() -> None:
    houses = "sottovoce, sottovoce_core.runs.run, sottovoce_learner.service, sottovoce_coordinator.service"
    clients = "sottovoce_eavesdropper.service, sottovoce_client.runs.run_client, sottovoce_client.cli"
    assert changed_by(f"import {houses}, {clients}")[0] == {}


@pytest.mark.parametrize(
    "words", [["--version"], ["--help"], ["learner", "--help"], ["simulate", "--help"], ["audit", "--help"]]
)
def test_help_waits_for_nothing_large(words: list[str]) -> None:
    """Nobody who asks what there is waits for what computes it."""
    code = f"""
import sys
from sottovoce_client.cli import app
try:
    app({words!r})
finally:
    large = {{"numpy", "grpc", "pyarrow", "yaml", "google.protobuf", "sottovoce_core.spec"}}
    print(sorted(large & sys.modules.keys()), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ("run specs of format" if words == ["--version"] else "Usage") in done.stdout
    assert done.stderr.strip() == "[]"
