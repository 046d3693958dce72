"""Comparison at equal epsilon: what is calibrated, and which values tuning chooses, on public records alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sottovoce_client.runs import tuning
from sottovoce_client.runs.compare import compare
from sottovoce_client.runs.sweep import sweep
from sottovoce_core.data import PlacedData
from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import Experiment
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.simulator import SimulatedRound, simulate_rounds

FIELDS: dict[str, Any] = {
    "rounds": 40,
    "learners": 3,
    "loss": {"kind": "least_squares", "clip_norm": 1},
    "decision_set": {"kind": "l2_ball", "radius": 2},
    "data": {"source": {"kind": "linear_regression", "features": 3, "records": 400, "noise": 0.0}, "intercept": False},
}
OGD = Experiment(algorithm={"name": "pd-ogd", "step": {"kind": "power", "scale": 1.0, "exponent": 0.5}}, **FIELDS)
LDP = Experiment(algorithm={"name": "ldp-dol"}, **FIELDS)
STEPS = {"algorithm.step.scale": [1e-6, 0.3], "algorithm.lam0": [1.0, 1e-6]}


def test_every_candidate_has_the_target_and_the_best_values_are_chosen() -> None:
    results = compare({"ogd": OGD, "ldp": LDP}, replicas=2, target=1000.0, tune=STEPS, metrics=["average_loss"])
    specs = [each.facts.spec_yaml for each in results.runs]
    assert "scale: 0.3" in specs[0]
    assert "lam0: 1.0" in specs[1]
    assert all(999.0 <= each.facts.epsilon_record_use <= 1000.0 for each in results.runs)


def test_a_sweep_tunes_each_combination() -> None:
    results = sweep(OGD, {"learners": [2, 3]}, 2, target=500.0, tune=STEPS, metrics=["average_loss"], jobs=1)
    assert all("scale: 0.3" in each.facts.spec_yaml for each in results.runs)
    assert all(499.0 <= each.facts.epsilon_record_use <= 500.0 for each in results.runs)


def test_tuning_sees_no_record_of_a_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[PlacedData] = []

    def record(run: Run, data: PlacedData, *_: Any) -> Iterator[SimulatedRound]:
        placed.append(data)
        return simulate_rounds(run, data, *_)

    monkeypatch.setattr(tuning, "simulate_rounds", record)
    tuning.equalise(OGD, None, 0.0, STEPS)
    assert len(placed) == 2
    own = OGD.records
    for data in placed:
        for learner, private in zip(data.learners, own.learners, strict=True):
            assert np.array_equal(learner.features, own.test_features)
            assert np.array_equal(learner.offsets, private.offsets)
            assert len(learner.order) == len(private.order)


def test_records_without_a_held_out_part_cannot_be_tuned_on(tmp_path: Any) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "all.npz", X=rng.normal(size=(9, 3)), y=rng.normal(size=9), learner=np.arange(9) % 3)
    own = OGD.replace(**{"data": {"source": str(tmp_path / "all.npz"), "intercept": False}, "rounds": 3})
    with pytest.raises(SpecError, match="tuning needs held-out records, which are public, got none"):
        tuning.equalise(own, None, 0.0, STEPS)
    with pytest.raises(SpecError, match=r"tuning needs values for algorithm\.step\.scale"):
        tuning.equalise(OGD, None, 0.0, {"algorithm.step.scale": []})
