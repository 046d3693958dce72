"""How runs ended against their coins: anchors by hand, and what an audit makes of coins that are none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sottovoce_core.auditing.audit import compute_chunk_statistics, conclude, count_sweep_runs, merge_noise
from sottovoce_core.auditing.bounds import AlphaAllocation
from sottovoce_core.auditing.coin_tests import COMPLETE_OUTCOME, RunOutcomes
from sottovoce_core.auditing.likelihood import Excess, RunLosses, compute_run_losses
from sottovoce_core.auditing.plan import AuditPlan, plan_audit
from sottovoce_core.auditing.verdict import Findings, Verdict, decide
from sottovoce_core.auditing.worlds import RecordedRuns, RunChunk, simulate_runs
from sottovoce_core.noise import SeededNoise
from sottovoce_core.privacy.guarantee import WEAK_EPSILON, ThreatModel
from tests.claims import SETUPS
from tests.examples import made_up


def starts(first: int, second: int, lost: tuple[int, int] = (0, 0), outcome: str = "missing") -> RunOutcomes:
    """Started runs of either world, and how many of them had this outcome."""
    outcomes = [
        outcome if k < gone else COMPLETE_OUTCOME
        for count, gone in zip((first, second), lost, strict=True)
        for k in range(count)
    ]
    return RunOutcomes(np.repeat([0, 1], [first, second]), tuple(outcomes))


# ---- anchors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second", "p"), [(250, 50, 3.8e-33), (1040, 960, 0.077), (50, 50, 1.0), (0, 0, 1.0)])
def test_the_balance_of_coins_is_binomial(first: int, second: int, p: float) -> None:
    assert starts(first, second).coin_p_value == pytest.approx(p, rel=0.02)


@pytest.mark.parametrize(
    ("each", "lost", "p"),
    [(1000, (33, 0), 1.8e-10), (100, (12, 0), 3.4e-4), (100, (6, 0), 0.029), (100, (6, 6), 1.0), (100, (0, 0), 1.0)],
)
def test_missing_runs_are_compared_between_the_worlds(each: int, lost: tuple[int, int], p: float) -> None:
    test = starts(each, each, lost).test()
    assert test.p_value == pytest.approx(p, rel=0.05)
    assert test.description.endswith(
        f"missing in {lost[0]} of {each} and {lost[1]} of {each} runs" if any(lost) else "complete"
    )


def test_every_outcome_that_is_compared_is_paid_for() -> None:
    """Two kinds of ends, and both together: the one that differs most, three times its p-value."""
    one, other = starts(100, 100, (12, 0), "failed"), starts(100, 100, (3, 3), "ended early")
    alone, both = one.test(), RunOutcomes(np.r_[one.worlds, other.worlds], one.outcomes + other.outcomes).test()
    again = starts(200, 200, (12, 0), "failed").test()
    assert "failed in 12" in alone.description and both.p_value == pytest.approx(3 * again.p_value)


# ---- verdicts --------------------------------------------------------------------------------------------------------


def test_what_rests_on_coins_is_no_evidence_where_these_are_none() -> None:
    levels = AlphaAllocation(0.05)
    leak = levels.assign_levels("worlds", (starts(100, 100, (40, 0)).test(),))
    plain = Findings(100, levels, 1.0, leak)
    assert decide(plain).kind == "refuted"
    void = Findings(100, levels, 1.0, leak, void_reason="250 runs of one world and 50 of the other")
    assert decide(void) == Verdict(
        "inconclusive", f"The audit is void with 100 runs of each world: {void.void_reason}.", (void.void_reason,)
    )
    loud = Findings(100, levels, 1.0, leak, excess=Excess(3, 2, 9.0, 1.0, 5), void_reason=void.void_reason)
    assert decide(loud).kind == "refuted" and decide(loud).evidence[-1] == void.void_reason


@pytest.mark.parametrize(("claim", "weak"), [(0.5, False), (WEAK_EPSILON, False), (10.01, True), (26.87, True)])
def test_a_claim_that_is_kept_may_be_weak(claim: float, weak: bool) -> None:
    levels = AlphaAllocation(0.05)
    kept = decide(Findings(100, levels, claim))
    assert (kept.kind, kept.is_weak) == ("consistent", weak)
    assert ("an epsilon above 10 rules out almost nothing" in kept.text) == weak
    leak = levels.assign_levels("worlds", (starts(100, 100, (40, 0)).test(),))
    assert not decide(Findings(100, levels, claim, leak)).is_weak
    assert not decide(Findings(100, levels, math.inf)).is_weak


# ---- in an audit -----------------------------------------------------------------------------------------------------


def planned() -> AuditPlan:
    run = SETUPS["ldp-dol"].build()
    data = made_up(run.spec, 2)
    worlds = plan_audit(run, data, 1, runs=30, seed=1).worlds
    return plan_audit(run, data, 1, runs=30, seed=1, worlds=worlds)


def heard(plan: AuditPlan, world: int, runs: int) -> RecordedRuns:
    seed = plan.seeds.audited_runs if world else plan.seeds.rehearsal
    return simulate_runs(
        plan.run, plan.data, plan.worlds, RunChunk(world, runs, seed), SeededNoise, keep_all_learners=True
    )


def concluded(plan: AuditPlan, runs: tuple[int, int], ends: RunOutcomes) -> Findings:
    parts = merge_noise(compute_chunk_statistics(plan, heard(plan, world, count)) for world, count in enumerate(runs))
    return conclude(
        plan, parts, heard(plan, 0, count_sweep_runs(plan.run)).transcript, "here", run_outcomes=ends
    ).findings


@pytest.mark.parametrize("runs", [(250, 50), (280, 20)])
def test_coins_that_are_none_void_the_audit_and_refute_nobody(runs: tuple[int, int]) -> None:
    """A correct learner, many more runs of one world. The part on conformance alone has a false alarm: below 0.03."""
    found = concluded(planned(), runs, starts(*runs))
    verdict = decide(found)
    assert verdict.kind == "inconclusive" and "the coin or the ledger is at fault" in verdict.text
    assert (
        found.bounds == ()
        and {test.family for test in found.tests} <= {"conformance"}
        and found.epsilon_lower_bound == 0.0
    )


def test_runs_that_end_early_in_one_world_are_a_leak() -> None:
    plan = planned()
    ends = starts(60, 60, (0, 20), "failed")
    found = concluded(plan, (60, 40), ends)
    assert not found.void_reason and decide(found).kind == "refuted"
    assert "failed in 0 of 60 and 20 of 60 runs" in decide(found).evidence[0]


def test_what_was_heard_of_runs_that_end_early_counts_with_its_loss() -> None:
    """Four rounds of eight: their losses, and silence from there on."""
    plan = planned()
    whole = heard(plan, 1, 5)
    known = compute_run_losses(plan.run, plan.worlds, whole, plan.claim)
    cut = compute_run_losses(plan.run, plan.worlds, RecordedRuns(1, whole.transcript.truncate(4)), plan.claim)
    np.testing.assert_array_equal(cut.segment_losses, np.hstack([known.segment_losses[:, :4], np.zeros((5, 4))]))
    silent = RunLosses.create_empty(np.array([0, 1]), plan.run.spec.rounds)
    joined = RunLosses.concatenate([known, cut, silent])
    np.testing.assert_array_equal(joined.total[-2:], 0.0)
    assert plan.adversary.threat is ThreatModel.WIRE and len(joined.total) == 12
