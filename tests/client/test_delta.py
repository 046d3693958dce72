"""One delta through all commands: calibrated, compared, proposed, admitted, stated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from sottovoce_client.cli import app
from sottovoce_client.reports.run_report import _promise
from sottovoce_client.runs.sweep import sweep
from sottovoce_core.api import calibrate
from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import Experiment, load, prepare
from sottovoce_core.results import read_results
from sottovoce_core.runs.policy import Policy
from sottovoce_core.spec import load_spec
from tests.client.summaries import summary
from tests.examples import small_spec

DELTA = 1e-6


@pytest.fixture
def records(tmp_path: Path) -> Path:
    features = np.random.default_rng(0).normal(size=(160, 12))
    np.savez(tmp_path / "records.npz", X=features, y=(features[:, 0] > 0).astype(int))
    return tmp_path / "records.npz"


def written(records: Path, algorithm: dict[str, Any], **more: Any) -> Path:
    document = {"rounds": 15, "learners": 3, "algorithm": algorithm, "data": {"source": str(records), "reuse": True}}
    path = records.parent / f"{algorithm['name']}.yaml"
    path.write_text(yaml.safe_dump({**document, **more}), encoding="utf-8")
    return path


def command(*words: str) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return done.output


SCALED: list[dict[str, Any]] = [
    {"name": "ldp-dol"},
    {"name": "dsgd", "noise": {"kind": "power", "sigma": 0.6}},
    {"name": "pd-ogd", "noise": {"kind": "calibrated"}},
    {"name": "pd-ftgl", "block_length": 4, "epsilon": 1.0},
]


@pytest.mark.parametrize("algorithm", SCALED, ids=lambda each: str(each["name"]))
def test_what_is_calibrated_costs_its_budget_from_below(records: Path, algorithm: dict[str, Any]) -> None:
    experiment = load(written(records, algorithm))
    found, pure = calibrate(experiment, 1.5, delta=DELTA), calibrate(experiment, 1.5)
    assert 0.995 * 1.5 <= found.epsilon(delta=DELTA) <= 1.5
    assert found.epsilon() > pure.epsilon()  # less noise for the same promise


def test_every_compared_spec_costs_the_same(records: Path, tmp_path: Path) -> None:
    specs = [str(written(records, each)) for each in SCALED]
    output = command(
        "compare", *specs, "--target", "2", "--delta", str(DELTA), "--replicas", "2", "--out", str(tmp_path / "out")
    )
    assert "ε per record use, delta 1e-06" in output
    facts = [each.facts for each in read_results(tmp_path / "out").runs]
    assert [each.delta for each in facts] == [DELTA] * 4
    assert all(1.99 <= each.epsilon_record_use <= 2.0 for each in facts)


def test_so_does_every_combination_of_a_sweep() -> None:
    experiment = Experiment(rounds=8, learners=3, algorithm="ldp-dol")
    results = sweep(
        experiment,
        {"algorithm.lam0": [0.5, 1.0]},
        replicas=2,
        target=1.0,
        delta=DELTA,
        metrics=["average_loss"],
        jobs=1,
    )
    assert all(0.995 <= each.facts.epsilon_record_use <= 1.0 for each in results.runs)


def test_the_delta_of_a_spec_is_that_of_its_results(records: Path) -> None:
    path = written(records, SCALED[0], privacy={"budget": 3.0, "delta": DELTA})
    assert "at δ = 1e-06" in command("budget", str(path), "--out", str(records.parent / "promise"))
    assert load(path).privacy.delta == DELTA


def test_a_proposed_spec_keeps_its_budget_at_a_delta_by_the_charge_of_a_learner(records: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    command("init", str(records), "--epsilon", "1", "--delta", str(DELTA), "--out", str(path), "--learners", "2")
    spec = load_spec(path)
    assert spec.privacy.delta == DELTA and f"at delta {DELTA:g}" in path.read_text(encoding="utf-8")
    prepared = prepare(spec)
    assert not prepared.warnings and not prepared.run.warnings
    for i in range(2):
        limit = prepared.run.budget(i)
        counts = np.diff(prepared.data.learners[i].offsets)
        assert limit is not None
        assert 0.99 <= prepared.run.algorithm.accountant(i).spending(counts, limit)[-1] <= 1.0


def test_a_policy_at_a_delta_admits_what_it_refuses_as_a_pure_one() -> None:
    spec = small_spec(200, algorithm={"sigma": 60.0, "varsigma": 0.0})
    run = Policy(epsilon_per_run=None).admit(spec, 400, 0)
    pure, at_delta = run.planned_loss(0).epsilon(), run.planned_loss(0, DELTA).epsilon(DELTA)
    assert at_delta < 0.5 * pure
    between = 0.5 * (at_delta + pure)
    with pytest.raises(SpecError, match=f"epsilon_per_run {between:.6g}, the spec asks for"):
        Policy(epsilon_per_run=between).admit(spec, 400, 0)
    Policy(epsilon_per_run=between, delta=DELTA).admit(spec, 400, 0)
    with pytest.raises(SpecError, match="epsilon_per_run"):
        Policy(epsilon_per_run=0.9 * at_delta, delta=DELTA).admit(spec, 400, 0)


def test_a_pure_budget_bounds_the_cost_at_any_delta_and_no_other_does() -> None:
    spec = small_spec(200, algorithm={"sigma": 60.0, "varsigma": 0.0}, privacy={"budget": 0.01})
    Policy(epsilon_per_run=0.01, delta=DELTA).admit(spec, 400, 0)
    loose = small_spec(200, algorithm={"sigma": 60.0, "varsigma": 0.0}, privacy={"budget": 0.01, "delta": 0.1})
    with pytest.raises(SpecError, match="epsilon_per_run"):
        Policy(epsilon_per_run=0.01, delta=DELTA).admit(loose, 400, 0)


def test_a_report_states_the_epsilon_at_the_delta_first() -> None:
    made = summary()
    stated = replace(made.guarantee, delta=DELTA, record_use_at_delta=0.5, record_at_delta=1.25)
    text = _promise(replace(made, guarantee=stated))
    assert text.startswith("ε = 0.5 per record use, 1.25 per record in all its uses, at delta 1e-06 (at delta 0: ε = ")
    assert "is right in at most 62.2 % of all runs" in text
    assert "at delta" not in _promise(made)


@pytest.mark.parametrize(
    "words", [("--repair", "--learner", "a"), ("--adopt-copy", "--learner", "a")], ids=["repair", "adopt"]
)
def test_a_delta_is_for_showing_a_ledger(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["ledger", "--state", str(tmp_path), "--delta", "1e-6", *words])
    assert done.exit_code != 0
    assert "--delta is for showing and verifying a ledger" in done.output + str(done.exception)
