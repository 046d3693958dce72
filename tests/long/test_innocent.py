"""Correct runs over random settings are not accused: 1,000 audits at 99 %, most of an hour. `pytest -m long tests/long`."""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from sottovoce_core.auditing.audit import audit_simulated
from sottovoce_core.auditing.plan import plan_audit
from sottovoce_core.data import PlacedData
from sottovoce_core.errors import SottovoceError
from sottovoce_core.privacy.guarantee import ThreatModel
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.spec import parse_spec
from tests.examples import made_up

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(7200)]

AUDITS, LOTS, ALPHA = 1000, 20, 0.01

FIELD: dict[str, Any] = yaml.safe_load(
    resources.files("sottovoce_client.runs").joinpath("builtin_algorithms.yaml").read_text("utf-8")
)


def drawn(seed: int) -> tuple[Run, PlacedData, int, np.random.Generator]:
    """A random setting that can be run: algorithm, graph, sizes, scale of the noise over twelve decades, batches, reuse."""
    generator = np.random.default_rng(seed)
    while True:
        changes = FIELD["runs"][generator.integers(len(FIELD["runs"]))]
        algorithm = dict(changes["algorithm"])
        for name in {"sigma", "epsilon"} & algorithm.keys():
            algorithm[name] = float(algorithm[name] * 10.0 ** generator.uniform(-6, 6))
        if "block_length" in algorithm:
            algorithm["block_length"] = 4
        learners = int(generator.choice([1, 2, 3, 5, 8, 20], p=[0.1, 0.2, 0.3, 0.2, 0.1, 0.1]))
        dim = int(generator.choice([1, 2, 5, 17, 60, 500], p=[0.15, 0.2, 0.3, 0.2, 0.1, 0.05]))
        rounds = int(generator.choice([1, 2, 4, 8, 16, 30]))
        graph = str(generator.choice(["ring", "path", "star", "complete"]))
        shape = changes.get("topology", {"graph": graph, "weights": "metropolis"})
        document = {**FIELD["common"], **changes, "algorithm": algorithm, "learners": learners, "rounds": rounds}
        try:
            spec = parse_spec({**document, "topology": shape}, allow_imports=True)
            batch = int(generator.choice([1, 1, 2, 5]))
            records = int(generator.integers(1, rounds * batch + 1))
            data = made_up(spec, dim, batch=batch, records=records, seed=seed)
            run, learner = build_run(spec, dim), int(generator.integers(learners))
            plan = plan_audit(run, data, learner, runs=10)
        except SottovoceError:
            continue
        # A promise about decisions alone is held against the messages, too, and fails rightly.
        if plan.claim_threat_model is ThreatModel.WIRE:
            return run, data, learner, generator


@pytest.mark.parametrize("lot", range(LOTS))
def test_correct_runs_are_not_refuted(lot: int) -> None:
    """Of 50 audits at 99 %, six or more refute by chance with probability 1.4e-5: 3e-4 for all lots together."""
    accused = []
    for seed in range(lot * AUDITS // LOTS, (lot + 1) * AUDITS // LOTS):
        run, data, learner, generator = drawn(seed)
        runs = int(generator.choice([10, 20, 60]))
        plan = plan_audit(run, data, learner, runs=runs, confidence=1.0 - ALPHA, seed=seed)
        done = audit_simulated(plan)
        if done.verdict.kind == "refuted":
            accused.append((seed, run.spec.algorithm.name, done.verdict.evidence[0]))
    print(f"lot {lot}: {len(accused)} of {AUDITS // LOTS} refuted {accused}")
    assert stats.binom.sf(len(accused) - 1, AUDITS // LOTS, ALPHA) > 1e-4, accused
