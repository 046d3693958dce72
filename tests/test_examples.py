"""The scripts and notebooks of examples/ run as they stand there."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from sottovoce_core.spec import parse_spec
from tests.services.network import network

CHECKOUT = Path(__file__).resolve().parent.parent
EXAMPLES = CHECKOUT / "examples"
SAYS = {
    "compare": r"(?s)LDP-DOL, epsilon of a record 9\.99\d.*average_loss.*DSGD, epsilon of a record 9\.99\d",
    "sweep": r"algorithm\.sigma +topology\.graph +round +metric",
    "own_loss": r"own_loss:Huber +accuracy 0\.\d+, epsilon \d(?s:.*)logistic",
    "audit_own": r"gossip:GossipSpec: consistent(?s:.*)audit_own:StingySpec: refuted",
}
"""What every script prints, where it works."""
WRITES = {"sweep": ["sweep.csv", "sweep.pdf", "sweep.svg", "sweep.tex"]}
NEEDS = {"sweep": ["matplotlib"]}
OTHERS = {"gossip", "services"}
"""Scripts with a test of their own."""
LIVE = {
    "delayed_labels": r"JoinCounts\(joined_events=\d\d, .*duplicate_labels=0\)\n(\d\d) predictions evaluated",
    "river_pipeline": r"Accuracy: \d+\.\d+%\n.*Accuracy: .* ROCAUC: .* drifts \[",
    "sklearn_pipeline": r"(accuracy \d\.\d\d\n){10}\['home' 'died'\]",
}
"""Output of each script that uses the learner of docs/guides/live.md."""


async def _output(folder: Path, name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    environment = {**os.environ, "MPLBACKEND": "agg"}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()


def test_every_script_is_tried() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SAYS, *OTHERS, *LIVE}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAYS)
def test_a_script_runs(name: str, tmp_path: Path) -> None:
    for module in ["sklearn", *NEEDS.get(name, [])]:
        pytest.importorskip(module)

    assert re.search(SAYS[name], asyncio.run(_output(tmp_path, name)))
    assert sorted(path.name for path in tmp_path.iterdir()) == WRITES.get(name, [])


@pytest.mark.slow
async def test_services_that_are_up_run_an_experiment(tmp_path: Path) -> None:
    async with network(tmp_path, ["north", "east", "south"]) as up:
        said = await _output(tmp_path, "services", up.coordinator)

    assert said.splitlines()[-1] == "finished"
    assert "round 50, epsilon" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", LIVE)
async def test_a_learner_of_live_records_learns_from_a_script(name: str, tmp_path: Path) -> None:
    needs = {"river_pipeline": "river", "sklearn_pipeline": "sklearn"}
    if name in needs:
        pytest.importorskip(needs[name])
    page = (CHECKOUT / "docs" / "guides" / "live.md").read_text(encoding="utf-8")
    document = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])
    spec = parse_spec(document, allow_imports=False)
    async with network(tmp_path, list(spec.names)) as up:
        await up.start(spec, spec.data.width or 0)
        said = await _output(tmp_path, name, up.addresses["north"])

    assert re.fullmatch(f"{LIVE[name]}.*", said.rstrip(), re.DOTALL), said


def test_gossip_is_what_the_page_shows() -> None:
    page = (CHECKOUT / "docs" / "guides" / "extending.md").read_text(encoding="utf-8")
    shown = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    kept = (EXAMPLES / "gossip.py").read_text(encoding="utf-8")

    assert ast.dump(ast.parse(kept)) == ast.dump(ast.parse(shown))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="the extra notebooks is not installed")
    nbclient = pytest.importorskip("nbclient", reason="the extra notebooks is not installed")
    pytest.importorskip("ipykernel", reason="the extra notebooks is not installed")
    found = [str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(found))  # where a notebook is opened, it finds its neighbours
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not kept"

    nbclient.NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()


async def test_more_learners_than_a_run_has_are_refused_by_their_benchmark_in_words() -> None:
    script = CHECKOUT / "benchmarks" / "hosting.py"
    process = await asyncio.create_subprocess_exec(
        sys.executable, script, "2000", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, said = await process.communicate()
    assert (process.returncode, out) == (2, b"")
    assert said.decode().endswith("a run has at most 1,024 learners, got 2,000\n")
