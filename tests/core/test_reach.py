"""What an audit would have found: formulas that shrink with the runs, and audits that could have found nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.audit import audit_simulated
from sottovoce_core.auditing.bounds import Test
from sottovoce_core.auditing.plan import AuditPlan, divide_runs, plan_audit
from sottovoce_core.auditing.verdict import DetectableEffect, Findings, add_detectable_effects
from sottovoce_core.privacy.guarantee import ThreatModel
from tests.claims import SETUPS
from tests.examples import made_up

NOTHING = np.empty(0)


def planned(name: str = "ldp-dol", **more: Any) -> AuditPlan:
    run = SETUPS[name].build()
    return plan_audit(run, made_up(run.spec, SETUPS[name].n_features), 1, **{"runs": 400, **more})


def within_reach(plan: AuditPlan, numbers: int, losses: FloatArray = NOTHING, *, on_lattice: bool = True) -> Findings:
    """What would have been found, where there is a test of the lattice or none."""
    tests = (Test("lattice", "", 0.0, 1.0, part="lattice"),) if on_lattice else ()
    return add_detectable_effects(
        Findings(plan.total_runs, plan.alpha_allocation, plan.epsilon, tests), plan, numbers, losses
    )


def least(plan: AuditPlan, numbers: int) -> dict[str, float]:
    return {
        each.text.split(" by ")[0].split(" up ")[0]: each.min_effect
        for each in within_reach(plan, numbers).detectable_effects
    }


def test_more_numbers_show_smaller_errors() -> None:
    """At alpha = 0.05; an error of the scale is found at (z + 1.28)/sqrt(N), audit-wide level 0.05 * 2/15 / 8 two-sided."""
    few, many = (least(planned(), numbers) for numbers in (10_000, 40_000))
    error = "noise whose size is wrong"
    assert few[error] == pytest.approx(2 * many[error])
    assert few[error] == pytest.approx((3.3401 + 1.2816) / 100, rel=0.01)
    together = "noise of two learners that is correlated"
    assert few[together] == pytest.approx(2 * many[together])


def test_deeper_bits_of_signs_take_more_numbers() -> None:
    """One bit for twice the numbers; none of noise that is on no lattice, or of too few numbers."""
    bits = [
        least(planned(), numbers).get(f"signs that equal any of the first {k} bits after their sizes")
        for k, numbers in ((45, 2_000), (46, 4_000))
    ]
    assert bits == [45, 46]
    for without in (within_reach(planned(), 4_000, on_lattice=False), within_reach(planned(), 30)):
        assert not any("bits" in each.text for each in without.detectable_effects)


@pytest.mark.statistics
def test_an_error_of_the_scale_of_that_size_is_found() -> None:
    """By the formula, in 9 of 10 audits; in fewer than 6 of 12 with probability 1e-4."""
    run = SETUPS["ldp-dol"].build()
    data, found = made_up(run.spec, SETUPS["ldp-dol"].n_features), 0
    numbers = 2 * 60 * run.spec.rounds * run.spec.n_learners * SETUPS["ldp-dol"].n_features
    for seed in range(12):
        plan = plan_audit(run, data, 1, runs=60, seed=seed)
        error = least(plan, numbers)["noise whose size is wrong"]

        def wrong(own: np.random.SeedSequence, factor: float = 1.0 + error) -> Any:
            from sottovoce_core.noise import SeededNoise

            source = SeededNoise(own)
            return lambda draw: draw.round_to_lattice(factor * source(draw))

        done = audit_simulated(plan, noise=wrong)
        assert done.noise_count == numbers
        found += done.verdict.kind == "refuted"
    assert found >= 6


def test_runs_are_divided_among_pairs_that_have_enough_of_them() -> None:
    assert divide_runs(1000, 3) == [500, 250, 125, 125]
    assert divide_runs(1000, 1) == [750, 250]
    assert divide_runs(100, 3) == [51, 25, 24]
    assert divide_runs(60, 3) == [36, 24]
    assert divide_runs(48, 3) == [24, 24]
    assert divide_runs(47, 3) == [47] and divide_runs(20, 3) == [20]
    assert planned().total_runs == 400 and len(planned().pairs) == 4
    swaps = [pair.worlds.description for pair in planned().pairs]
    assert len(set(swaps)) == len(swaps)


def test_an_audit_that_could_find_nothing_is_inconclusive() -> None:
    """Somebody who sees decisions only, and so few runs that even right guesses alone stay below the claim."""
    plan = planned("pd-ftgl", runs=40, threat=ThreatModel.OUTPUT)
    assert within_reach(plan, 0).max_provable_epsilon < plan.epsilon
    done = audit_simulated(plan)
    assert done.verdict.kind == "inconclusive" and "without noise" in done.verdict.text


def test_what_an_audit_could_have_found_is_what_it_had() -> None:
    plan = planned()
    assert plan.epsilon > within_reach(plan, 0).max_provable_epsilon
    assert within_reach(plan, 0, NOTHING).undetectable_violation == "a learner without noise"
    assert within_reach(plan, 5, NOTHING).undetectable_violation == "a learner with half of its noise"
    assert within_reach(plan, 1000, NOTHING).undetectable_violation == ""
    # Losses that are as large as these would all be right guesses, and so many are too many.
    assert within_reach(plan, 0, np.full(400, 1.5)).undetectable_violation == ""
    assert within_reach(plan, 0, np.full(3, 0.01)).undetectable_violation == "a learner without noise"


def test_an_error_of_the_scale_is_written_without_powers_of_ten() -> None:
    assert [DetectableEffect.from_scale_error(error).text.split(" by ")[1] for error in (0.0012, 0.997, 1.23)] == [
        "0.12 %",
        "100 %",
        "120 %",
    ]
