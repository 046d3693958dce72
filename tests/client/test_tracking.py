"""Export of results to MLflow and Weights & Biases, with the real libraries and without a network."""

from __future__ import annotations

import importlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.testing

import sottovoce as sv
from sottovoce_client.cli import app
from sottovoce_client.runs import tracking
from sottovoce_core.errors import SpecError, Unavailable
from sottovoce_core.results import Result, Results

SPEC: dict[str, Any] = {"rounds": 6, "learners": 3, "algorithm": "ldp-dol", "privacy": {"delta": 1e-6}}


@pytest.fixture(scope="module")
def results() -> Results:
    return sv.sweep(sv.Experiment(**SPEC), {"algorithm.sigma": [1.0, 4.0]}, replicas=3, jobs=1, checkpoints=[2, 6])


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    library = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.chdir(tmp_path)
    return library


def test_mlflow_gets_parameters_metrics_epsilon_and_the_report(results: Results, mlflow: Any, tmp_path: Path) -> None:
    identifiers, client = sv.track(results, "mlflow"), mlflow.MlflowClient()
    assert len(identifiers) == len(set(identifiers)) == 2
    for identifier, each in zip(identifiers, results.runs, strict=True):
        run, facts = client.get_run(identifier), each.facts
        assert (
            run.info.status == "FINISHED"
            and run.info.run_name == f"run algorithm.sigma={facts.changes['algorithm.sigma']}"
        )
        assert run.data.params["algorithm.sigma"] == str(facts.changes["algorithm.sigma"])
        assert run.data.params["rounds"] == "6" and run.data.params["data.source"] == "breast_cancer"
        assert run.data.metrics["epsilon"] == facts.epsilon_record_use < math.inf
        assert run.data.metrics["delta"] == facts.delta == 1e-6
        history = {one.step: one.value for one in client.get_metric_history(identifier, "average_loss")}
        assert history == dict(zip((2, 6), map(float, each.curves["average_loss"].mean), strict=True))
        spread = client.get_metric_history(identifier, "average_loss_standard_error")
        np.testing.assert_array_equal([one.value for one in spread], each.curves["average_loss"].error)
        folder = Path(client.download_artifacts(identifier, "", str(tmp_path)))
        assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
        assert (folder / "spec.yaml").read_text(encoding="utf-8") == facts.spec_yaml
        assert sv.read_results(folder).runs[0].facts == facts


def test_wandb_gets_the_same(results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    type_of_run = importlib.import_module("wandb.sdk.wandb_run").Run
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    made, logged, real, real_log = [], dict[tuple[str, int], dict[str, float]](), wandb.init, type_of_run.log

    def init(**options: Any) -> Any:
        made.append((run := real(**options), options))
        return run

    def log(run: Any, values: dict[str, float], step: int) -> None:
        logged[run.id, step] = values
        real_log(run, values, step=step)

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(type_of_run, "log", log)
    identifiers = sv.track(results, "wandb")
    for identifier, (run, options), each in zip(identifiers, made, results.runs, strict=True):
        assert run.id == identifier and options["config"]["algorithm.sigma"] == each.facts.changes["algorithm.sigma"]
        losses = [logged[identifier, done]["average_loss"] for done in (2, 6)]
        np.testing.assert_array_equal(losses, each.curves["average_loss"].mean)
        assert logged[identifier, 6]["epsilon"] == each.facts.epsilon_record_use
        (file,) = tmp_path.glob(f"wandb/offline-run-*-{identifier}/run-{identifier}.wandb")
        assert all(name in file.read_bytes() for name in (b"average_loss", b"epsilon", b"report.html"))


def test_an_infinite_epsilon_is_a_parameter_and_many_numbers_go_in_several_requests(mlflow: Any) -> None:
    quiet = sv.Experiment(rounds=600, learners=3, algorithm={"name": "pd-ogd", "noise": {"kind": "none"}})
    done = sv.simulate(quiet, metrics=["average_loss", "consensus_error"], checkpoints=600)
    (identifier,) = sv.track(done, "mlflow")
    data = mlflow.MlflowClient().get_run(identifier).data
    assert data.params["epsilon"] == "inf" and "epsilon" not in data.metrics
    assert "average_loss_standard_error" not in data.metrics  # of one seed there is none
    assert len(mlflow.MlflowClient().get_metric_history(identifier, "consensus_error")) == 600


def test_the_command_exports_a_folder(results: Results, mlflow: Any, tmp_path: Path) -> None:
    results.write(tmp_path)
    done = typer.testing.CliRunner().invoke(app, ["track", str(tmp_path), "mlflow", "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert [mlflow.MlflowClient().get_run(each).info.status for each in document["runs"]] == ["FINISHED"] * 2


def test_what_cannot_be_exported_is_explained(
    results: Results, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match="tracker must be one of mlflow, wandb, got 'mlflo'"):
        sv.track(results, "mlflo")
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(SpecError, match=r"exporting to wandb needs wandb: .*track"):
        sv.track(results, "wandb")


def test_a_tracker_that_refuses_is_an_error_of_ours(results: Results, mlflow: Any, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("no folder", encoding="utf-8")
    with pytest.raises(Unavailable, match="mlflow must accept the run"):
        sv.track(results, "mlflow")


def test_parameters_are_short_and_have_names_that_trackers_accept(results: Results) -> None:
    schema = {
        "features": {"blood, pressure": {"type": "number", "bounds": [0, 1]}},
        "label": {"name": "y", "type": "boolean"},
    }
    names = [f"ward {k}" for k in range(200)]
    spec = sv.Experiment(rounds=1, learners=names, algorithm="ldp-dol", data={"source": "r.csv", "schema": schema})
    first = results.runs[0]
    facts = replace(first.facts, spec_yaml=spec.to_yaml(), changes={"topology.graph": "a, 'b'", "x:y": 1})
    found = tracking._list_parameters(Result(facts, first.curves))
    assert all(len(str(value)) <= 500 and re.fullmatch(r"[\w. -]+", name) for name, value in found.items())
    assert found["learners"].endswith("…") and found["x_y"] == 1
    assert not [name for name in found if "blood" in name or "schema" in name]
