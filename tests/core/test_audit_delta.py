"""An audit at a delta: what the losses of runs show, beside the claim."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from sottovoce_core.auditing.audit import audit_simulated
from sottovoce_core.auditing.likelihood import RunLosses, bound_at_delta
from sottovoce_core.auditing.plan import AuditPlan, plan_audit
from sottovoce_core.noise import NoiseSource, SeededNoise
from sottovoce_core.privacy.guarantee import ThreatModel
from tests.claims import EXPOSED, SETUPS, Times
from tests.examples import made_up

DELTA, EPSILON, SHARE = 0.01, 1.0, 0.2


def losses_of(worlds: np.ndarray, in_own_world: np.ndarray) -> RunLosses:
    total = np.where(worlds == 0, in_own_world, -in_own_world)
    return replace(RunLosses.create_empty(worlds, 1), total=total)


def planned(name: str, *, runs: int = 60, seed: int = 1, delta: float = 1e-5) -> AuditPlan:
    run = SETUPS[name].build()
    data = made_up(run.spec, SETUPS[name].n_features)
    return plan_audit(run, data, 1, runs=runs, seed=seed, delta=delta)


def halved(seed: np.random.SeedSequence) -> NoiseSource:
    return Times(SeededNoise(seed), 0.5)


def test_a_bound_is_above_the_true_epsilon_as_rarely_as_stated() -> None:
    """Losses that attain epsilon 1 at delta 0.01. More than 40 of 400 bounds above it have probability below 1e-4."""
    generator, above = np.random.default_rng(4), 0
    high = EPSILON - math.log1p(-SHARE) + 1e-9
    for _ in range(400):
        worlds = generator.integers(0, 2, 300)
        rare = generator.random(300) < DELTA / SHARE
        above += bound_at_delta(losses_of(worlds, np.where(rare, high, -0.5)), EPSILON, DELTA, 0.05).is_above_claim
    assert 0 < above <= 40


def test_more_losses_above_a_claim_than_it_allows_refute_it() -> None:
    generator = np.random.default_rng(5)
    worlds = generator.integers(0, 2, 300)
    rare = generator.random(300) < 3 * DELTA / SHARE
    bound = bound_at_delta(losses_of(worlds, np.where(rare, 2.0, -0.5)), EPSILON, DELTA, 0.05)
    assert bound.is_above_claim and bound.value == pytest.approx(2.0 + math.log(1.0 - SHARE))


def test_few_runs_show_nothing_at_a_delta() -> None:
    bound = bound_at_delta(losses_of(np.zeros(2, np.int64), np.full(2, math.inf)), EPSILON, 0.1, 0.01)
    assert bound.value == 0.0 and not bound.is_above_claim


def test_an_impossible_message_refutes_every_claim() -> None:
    bound = bound_at_delta(losses_of(np.zeros(50, np.int64), np.full(50, math.inf)), 100.0, 1e-5, 0.01)
    assert bound.is_above_claim and bound.value == math.inf


@pytest.mark.parametrize("name", ["ldp-dol", "dsgd", "dola", "pd-ftgl", "dpsda-c", "pvp"])
def test_a_correct_learner_keeps_its_claim_at_a_delta(name: str) -> None:
    """At 95 %, with a fixed seed: an audit refutes it with probability below 0.05."""
    plan = planned(name)
    assert 0.0 < plan.epsilon_at_delta <= plan.epsilon
    done = audit_simulated(plan)
    bound = done.findings.loss_bound
    assert done.verdict.kind == "consistent"
    assert bound is not None and bound.value <= bound.claim == plan.epsilon_at_delta
    assert f"and {bound.claim:.4g} at delta 1e-05, of which the losses show at least" in done.verdict.text


def test_a_claim_that_is_too_small_at_a_delta_is_refuted() -> None:
    """The noise is as claimed, so nothing else refutes it."""
    plan = planned("ldp-dol", runs=100)
    honest = audit_simulated(plan).findings.loss_bound
    assert honest is not None and honest.value > 0.0
    done = audit_simulated(replace(plan, epsilon_at_delta=0.9 * honest.value))
    assert done.verdict.kind == "refuted" and done.verdict_learner == plan.worlds.learner
    assert f"epsilon at delta 1e-05 is above {honest.value:.4g}" in done.verdict.text


def test_there_is_no_bound_without_a_delta_or_exact_losses() -> None:
    assert audit_simulated(planned("ldp-dol", delta=0.0)).findings.loss_bound is None
    setup = EXPOSED["pd-ftgl after gossip"]
    run = setup.build()
    plan = plan_audit(
        run, made_up(run.spec, setup.n_features), 1, runs=60, seed=1, threat=ThreatModel.OUTPUT, delta=1e-5
    )
    assert audit_simulated(plan).findings.loss_bound is None


@pytest.mark.long
def test_a_hundred_correct_audits_at_a_delta_and_ten_with_half_the_noise() -> None:
    """Each refutes a correct learner with probability below 0.05: more than 14 of 100 have probability below 1e-4."""
    names = ["ldp-dol", "dsgd", "dola", "pd-ftgl", "dpsda-c"]
    refuted = sum(audit_simulated(planned(names[seed % 5], seed=seed)).verdict.kind == "refuted" for seed in range(100))
    assert refuted <= 14
    for seed in range(10):
        assert audit_simulated(planned(names[seed % 5], seed=seed), noise=halved).verdict.kind == "refuted"
