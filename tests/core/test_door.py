"""The front door: what `import sottovoce` offers, and what it leaves alone."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sottovoce as sv
from sottovoce_core.auditing.plan import plan_audit
from sottovoce_core.errors import SpecError
from sottovoce_core.noise import SeededNoise, no_noise
from sottovoce_core.runs.metrics import Metrics
from sottovoce_core.runs.simulator import simulate_rounds as rounds_of
from tests.core.test_experiment import small

pytestmark = pytest.mark.each

NAMES = [
    "Audit",
    "DataError",
    "Experiment",
    "Guarantee",
    "InterruptedSimulation",
    "LabelJoin",
    "PrequentialEvaluation",
    "Results",
    "Simulation",
    "SottovoceError",
    "SpecError",
    "Table",
    "__version__",
    "audit",
    "calibrate",
    "compare",
    "connect",
    "connect_learner",
    "load",
    "read_results",
    "simulate",
    "sweep",
    "track",
]


def told(code: str) -> object:
    """What a fresh interpreter prints, as JSON."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


# ---- names -----------------------------------------------------------------------------------------------------------


def test_the_names_are_pinned() -> None:
    """A name more or less is a decision: here it is made twice."""
    assert sorted(sv.__all__) == NAMES
    assert set(NAMES) <= set(dir(sv))


def test_type_checkers_see_the_same_names() -> None:
    assert sv.__file__ is not None
    tree = ast.parse(Path(sv.__file__).read_text(encoding="utf-8"))
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.asname: f"{node.module}:{alias.name}"
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert {*imported, "__version__"} == set(NAMES)
    for name, place in imported.items():
        module, attribute = place.split(":")
        assert getattr(importlib.import_module(module), attribute) is getattr(sv, str(name))


def test_importing_costs_nothing_and_changes_nothing() -> None:
    code = """
import json, os, sys
before = dict(os.environ)
import sottovoce
heavy = sorted({"numpy", "pydantic", "grpc", "yaml", "pandas"} & set(sys.modules))
for name in sottovoce.__all__:
    getattr(sottovoce, name)
print(json.dumps([heavy, dict(os.environ) == before]))
"""
    assert told(code) == [[], True]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        sv.simulat  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    "module",
    [
        "sottovoce_core.api",
        "sottovoce_core.experiment",
        "sottovoce_core.results",
        "sottovoce_core.table",
        "sottovoce_client.deployment",
        "sottovoce_client.runs.compare",
        "sottovoce_client.runs.sweep",
    ],
)
def test_examples_in_docstrings_hold(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module))

    assert found.attempted > 0
    assert found.failed == 0


# ---- simulate --------------------------------------------------------------------------------------------------------


def test_a_simulation_is_that_of_the_simulator(tmp_path: Path) -> None:
    experiment = small(tmp_path)
    passed: list[int] = []
    result = sv.simulate(experiment, replicas=4, seed=3, transcript=True, progress=lambda step: passed.append(step.t))
    metrics = Metrics(experiment.run, experiment.records)
    steps = list(rounds_of(experiment.run, experiment.records, SeededNoise(3), 4))
    for step in steps:
        metrics.add_round(step)

    assert passed == list(range(6))
    assert result.transcript is not None
    assert result.curves is not None
    np.testing.assert_array_equal(result.decisions, steps[-1].decisions_after)
    np.testing.assert_array_equal(result.transcript.fields["y"], [step.message["y"] for step in steps])
    for name, curve in metrics.curves.curves.items():
        table = result.metrics.where(metric=name)
        np.testing.assert_array_equal(table.where(learner=None)["value"], curve.replicas.ravel())
        summary = result.results.summary(every_round=True).where(metric=name)
        np.testing.assert_array_equal(summary["mean"], curve.mean)
        np.testing.assert_array_equal(summary["standard_error"], curve.error)
        if curve.learners is not None:
            np.testing.assert_array_equal(table.where(learner="ben", seed=None)["value"], curve.learners[:, 1])


def test_nothing_is_kept_that_was_not_asked_for(tmp_path: Path) -> None:
    result = sv.simulate(small(tmp_path), metrics=False)

    assert (result.curves, result.transcript) == (None, None)
    assert repr(result).endswith("1 replica")
    with pytest.raises(SpecError, match="metrics=True"):
        _ = result.metrics


def test_noise_may_be_given_or_recorded(tmp_path: Path) -> None:
    experiment = small(tmp_path)
    silent = sv.simulate(experiment, metrics=False, noise=no_noise)
    shape = (experiment.rounds, experiment.n_learners, 1, silent.decisions.shape[-1])
    np.savez(tmp_path / "zeros.npz", y=np.zeros(shape))
    np.savez(tmp_path / "short.npz", y=np.zeros((2, *shape[1:])))

    recorded = sv.simulate(experiment, metrics=False, noise=tmp_path / "zeros.npz")
    np.testing.assert_array_equal(recorded.decisions, silent.decisions)
    with pytest.raises(SpecError, match=r"noise must cover 6 rounds, got fewer for \['y'\]"):
        sv.simulate(experiment, noise=str(tmp_path / "short.npz"))
    with pytest.raises(SpecError, match="replicas must be at least 1, got 0"):
        sv.simulate(experiment, replicas=0)


def test_a_path_is_as_good_as_the_experiment(tmp_path: Path) -> None:
    experiment, path = small(tmp_path), tmp_path / "spec.yaml"
    experiment.to_yaml(path)
    own = sv.simulate(experiment, replicas=2).decisions
    for source in (path, str(path)):
        np.testing.assert_array_equal(sv.simulate(source, replicas=2).decisions, own)
    changes = {"algorithm.sigma": [1.0]}
    wrong: Any = {"rounds": 3}
    one, other = (sv.sweep(source, changes, 2, jobs=1).metrics.to_dict() for source in (experiment, path))
    np.testing.assert_equal(one, other)
    assert sv.calibrate(path, 5.0) == sv.calibrate(experiment, 5.0)
    for ask in (
        sv.simulate,
        sv.audit,
        lambda source: sv.sweep(source, changes),
        lambda source: sv.calibrate(source, 1.0),
    ):
        with pytest.raises(SpecError, match=r"an experiment must be a sottovoce\.Experiment or the path .*, got dict"):
            ask(wrong)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("20", "a whole number, got '20'"),
        (2.0, "a whole number, got 2.0"),
        (True, "got True"),
        (0, "at least 1, got 0"),
    ],
)
def test_numbers_of_repetitions_are_whole(tmp_path: Path, given: object, said: str) -> None:
    experiment = small(tmp_path)
    with pytest.raises(SpecError, match=f"replicas must be .*{said}"):
        sv.simulate(experiment, replicas=given)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=f"seeds must be .*{said}"):
        sv.sweep(experiment, {}, replicas=given)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=f"runs must be .*{said}"):
        sv.audit(experiment, runs=given)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=f"replicas must be .*{said}"):
        sv.compare([experiment], replicas=given)  # type: ignore[arg-type]


# ---- calibrate and compare -------------------------------------------------------------------------------------------


def test_noise_is_calibrated_to_a_budget(tmp_path: Path) -> None:
    experiment = small(tmp_path)
    met = sv.calibrate(experiment, 3.0)
    own = dict(zip(experiment.names, (1.0, 2.0, 4.0), strict=True))
    each = sv.calibrate(experiment, own)

    assert isinstance(met, sv.Experiment)
    assert 3.0 * 0.999 <= met.epsilon() <= 3.0
    assert [each.guarantee(name).epsilon() for name in own] == pytest.approx([*own.values()], rel=1e-3)
    assert sv.calibrate(experiment, 3.0, horizon=2).guarantee(0).epsilon(2) == pytest.approx(3.0, rel=1e-3)
    with pytest.raises(SpecError, match=r"epsilon must be a number, got '8'"):
        sv.calibrate(experiment, "8")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"epsilon must name each of .*, got nobody"):
        sv.calibrate(experiment, {"nobody": 1.0})


def test_a_comparison_is_a_table(tmp_path: Path) -> None:
    experiment = small(tmp_path)
    other = experiment.replace(name="other", **{"algorithm.sigma": 3.0})
    table = sv.compare([experiment, other], replicas=3, seed=2).summary().where(metric="accuracy")
    curves = sv.simulate(other, replicas=3, seed=2).curves

    assert curves is not None
    assert table["spec"].tolist() == [experiment.name, "other"]
    assert table["epsilon"].tolist() == [experiment.epsilon(), other.epsilon()]
    assert table["mean"][1] == curves["accuracy"].final_mean
    assert table["standard_error"][1] == curves["accuracy"].final_error
    assert [each.facts.spec for each in sv.compare({"a": experiment, "b": experiment}, 1).runs] == ["a", "b"]
    with pytest.raises(
        SpecError, match=f"different names, got {experiment.name}, {experiment.name}: give them as a mapping"
    ):
        sv.compare([experiment, experiment])
    with pytest.raises(SpecError, match="different names, got none"):
        sv.compare([])
    with pytest.raises(SpecError, match=r"data\.seed must be that of the first spec, 0, got 5"):
        sv.compare({"a": experiment, "b": experiment.replace(**{"data.seed": 5})})


# ---- audit -----------------------------------------------------------------------------------------------------------


def test_an_audit_is_planned_as_asked(tmp_path: Path) -> None:
    experiment = small(tmp_path, algorithm={"name": "ldp-dol", "varsigma": [0.1, 0.3, 0.2]})
    done = sv.audit(experiment, runs=60, learner="cleo", seed=3)  # one seed in twenty may not be consistent
    planned = plan_audit(experiment.run, experiment.records, 2, runs=60, seed=3)

    assert done.plan.worlds.description == planned.worlds.description
    assert (done.plan.worlds.learner, done.plan.total_runs, done.verdict.kind) == (2, 60, "consistent")
    with pytest.raises(SpecError, match="threat must be one of wire, neighbour, output, got 'air'"):
        sv.audit(experiment, threat="air")
