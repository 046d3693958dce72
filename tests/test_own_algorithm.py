"""The page `docs/guides/extending.md` holds what it promises: its example runs everywhere, and keeps its guarantee."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import yaml

from sottovoce_client.cli import main
from sottovoce_core.budget.composition import MessageLosses, epsilon_for_delta, message_losses
from sottovoce_core.noise import SeededNoise
from sottovoce_core.privacy.accountant import PrecomputedAccountant
from sottovoce_core.privacy.guarantee import Adjacency
from sottovoce_core.privacy.loss import PURE, Mechanism
from sottovoce_core.runs.replay import replay
from sottovoce_core.runs.run import build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.spec import parse_spec
from sottovoce_rpc.logs import describe_user_code_error
from tests.examples import made_up

PAGE = Path(__file__).resolve().parent.parent / "docs" / "guides" / "extending.md"
CODE, SPEC, ENTRY_POINT = (
    re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    for kind in ("python", "yaml", "toml")
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "gossip.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "spec.yaml").write_text(SPEC, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gossip", raising=False)
    return tmp_path


def test_the_example_is_short() -> None:
    assert len(CODE.splitlines()) < 60


def test_the_example_keeps_its_guarantee(folder: Path) -> None:
    """500 adjacent data sets, many records far out: no loss above the claim, and some near it."""
    document = {**yaml.safe_load(SPEC), "rounds": 6, "learners": 3}
    run = build_run(parse_spec({**document, "loss": {"kind": "logistic", "ridge": 0.0}}, allow_imports=True), 2)
    data = made_up(run.spec, 2)
    transcript = Transcript.from_rounds(step.message for step in simulate_rounds(run, data, SeededNoise(1), 200))
    own, claim = data.learners[0], run.guarantee(0).round_losses
    corner = np.array([1.0, 1.0]) / np.sqrt(2)
    worlds = [own.with_use(t, sign * corner, label) for t in range(5) for sign in (-1, 1) for label in (0.0, 1.0)]
    losses = replay(run, transcript, 0, [own, *worlds])

    assert np.abs(losses.total).max() <= claim.sum() * (1 + 1e-9)
    assert np.abs(losses.total).max() > 0.5 * claim.sum()


def test_the_example_composes_as_laplace_noise(folder: Path) -> None:
    """What its author says about its messages reaches every place that adds losses up."""
    run = build_run(parse_spec({**yaml.safe_load(SPEC), "rounds": 6, "learners": 3}, allow_imports=True), 2)
    promise = run.guarantee(0)
    three = np.array([1, 0, 2, 0, 0, 0])

    assert (promise.mechanism, promise.adjacency) == (Mechanism.laplace(2), Adjacency.RECORD_USE)
    assert run.guarantee(0, np.full(6, 2), three).epsilon() == 3 * promise.epsilon() > 0.0  # a list follows no record


@pytest.mark.parametrize(
    ("mechanism", "expected"), [(PURE, 83.5), (Mechanism.laplace(1), 71.5), (Mechanism.laplace(30), 10.4)]
)
def test_the_mechanism_that_is_stated_decides_what_a_delta_saves(mechanism: Mechanism, expected: float) -> None:
    """The page's last sentence: a hundred messages of loss 1."""
    meter = PrecomputedAccountant(np.ones(100), mechanism)
    single = message_losses(meter, np.ones(100, np.int64))

    assert single is not None
    messages = [MessageLosses(mechanism, single, mechanism.sum_renyi(single))]
    assert epsilon_for_delta(1e-6, messages) == pytest.approx(expected, abs=0.05)
    assert f"{expected}" in PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_example_runs_in_the_simulator_and_as_services(folder: Path) -> None:
    spec = yaml.safe_load(SPEC)
    (folder / "spec.yaml").write_text(yaml.safe_dump({**spec, "rounds": 20, "learners": 3}), encoding="utf-8")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    for command in (["simulate", "spec.yaml", "--out", "simulated"], ["up", "spec.yaml", "--out", "ran"]):
        done = subprocess.run(
            [sys.executable, "-m", "sottovoce_client", *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((folder / "ran" / "summary.json").read_text(encoding="utf-8"))

    assert summary["state"] == "finished"
    assert [learner["rounds_done"] for learner in summary["learners"]] == [20, 20, 20]
    assert all(
        learner["epsilon_spent"] == pytest.approx(learner["epsilon_record_use"]) for learner in summary["learners"]
    )


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        (
            "records = Batch(",
            "records = Bitch(",
            "NameError at {file}:{line}, in code of your own: name 'Bitch' is not",
        ),
        (
            "self.step, self.scale), ()",
            "self.stap, self.scale), ()",
            "AttributeError at {file}:{line}, in code of your own: ",
        ),
        (
            "loss.enforce_bounds(",
            "loss.enforce_bounds(np.zeros(3), ",
            "TypeError at {file}:{line}, in code of your own: ",
        ),
        (
            "x = project(b",
            "raise ValueError(list(range(999))); (b",
            "ValueError at {file}:{line}, in code of your own: [0, 1",
        ),
    ],
)
def test_a_mistake_in_it_is_told_in_a_line_with_its_place(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    right: str,
    wrong: str,
    told: str,
) -> None:
    assert CODE.count(right) == 1
    file, line = folder / "gossip.py", CODE[: CODE.index(right)].count("\n") + 1
    file.write_text(CODE.replace(right, wrong), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["sottovoce", "simulate", str(folder / "spec.yaml"), "--out", str(folder / "out")])
    with pytest.raises(SystemExit) as ended:
        main()
    (said,) = [each for each in capsys.readouterr().err.splitlines() if not each.startswith("warning: ")]
    assert ended.value.code == 2
    assert said.startswith(f"sottovoce: {told.format(file=file, line=line)}") and len(said) < 600


def test_a_mistake_in_it_is_told_alike_where_another_process_made_it() -> None:
    def fails() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as failed:
        fails()
    told = describe_user_code_error(failed.value)
    assert told.startswith("ValueError at ") and told.endswith(", in code of your own: mine")
    there = ValueError(*failed.value.args)  # as pickle makes it: without its frames
    there.add_note(told)
    assert describe_user_code_error(there) == told
    assert describe_user_code_error(ValueError("no frame, and no note")) == ""


def test_a_mistake_of_ours_keeps_its_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = attrgetter("nosuch")  # it is of C and has no frame, so the last one is the command's
    monkeypatch.setattr("sottovoce_client.reports.figure.parse_formats", fails)
    monkeypatch.setattr(sys, "argv", ["sottovoce", "simulate", str(folder / "spec.yaml"), "--out", str(folder / "out")])
    with pytest.raises(AttributeError):
        main()


def test_an_installed_package_offers_its_own_under_a_short_name(folder: Path) -> None:
    metadata = folder / "gossip-1.0.dist-info"
    metadata.mkdir()
    metadata.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: gossip\nVersion: 1.0\n", encoding="utf-8")
    point = re.findall(r"^gossip = \"(.+)\"$", ENTRY_POINT, re.MULTILINE)[0]
    metadata.joinpath("entry_points.txt").write_text(f"[sottovoce.algorithms]\ngossip = {point}\n", encoding="utf-8")
    spec = parse_spec({"rounds": 3, "algorithm": {"name": "gossip", "step": 0.1}}, allow_imports=True)

    assert type(spec.algorithm).__name__ == "GossipSpec"
    assert spec.model_dump()["algorithm"]["step"] == 0.1
