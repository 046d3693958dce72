"""The auditor's own test: broken learners are broken as they say, and are caught; a correct one is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sottovoce_core import algorithms
from sottovoce_core.auditing.plan import AuditPlan, plan_audit
from sottovoce_core.errors import SpecError
from sottovoce_core.noise import NoiseRequest
from sottovoce_lab.auditor_evaluation import (
    FalseAlarmCounts,
    MutantOutcome,
    measure_false_alarms,
    sum_false_alarms,
    try_mutant,
)
from sottovoce_lab.catalogue import QUICK_MUTANTS
from sottovoce_lab.catalogue.side_channels import _detect, _forget_spent_budget, _list_overspent, _RunMessages
from sottovoce_lab.mutants import ALGORITHM_RUNS, BASE_RUNS, Fault, Mutant, mutate_noise, scale_noise

BY_NAME = {mutant.name: mutant for mutant in QUICK_MUTANTS}


def planned(base: str = "ldp-dol, budget") -> AuditPlan:
    run, data = BASE_RUNS[base].build()
    return plan_audit(run, data, 0, runs=20)


def tried(name: str, base: str | None = None) -> MutantOutcome:
    mutant = BY_NAME[name]
    base = base or mutant.base
    return try_mutant(mutant, (BASE_RUNS.get(base) or ALGORITHM_RUNS[base]).build())


def test_draws_know_their_lattice() -> None:
    noise = np.array([0.3, 0.7])
    assert np.array_equal(NoiseRequest("laplace", "y", 0, 1.0, 0.5, (2,)).round_to_lattice(noise), [0.5, 0.5])
    assert np.array_equal(NoiseRequest("spherical", "y", 0, 1.0, None, (2,)).round_to_lattice(noise), noise)


# ---- caught ----------------------------------------------------------------------------------------------------------


@pytest.mark.statistics
@pytest.mark.parametrize(
    "name",
    ["0.9 of the scale", "raw doubles", "pvp sends f", "half the sensitivity", "length"],
)
def test_broken_learners_are_caught(name: str) -> None:
    """By the family that should see it. The rest of them: `tests/lab/test_whole.py`."""
    outcome = tried(name)
    assert outcome.runs_needed is not None and outcome.runs_needed <= outcome.max_runs and not outcome.is_missed
    assert BY_NAME[name].family in outcome.families and outcome.evidence


@pytest.mark.parametrize(
    ("name", "telling"),
    [
        ("retry", "resent to the same neighbour"),
        ("equivocation", "other bytes than"),
        ("forgetful", "above the budget"),
    ],
)
def test_messages_that_must_never_be_are_noticed(name: str, telling: str) -> None:
    outcome = tried(name)
    assert outcome.families == (BY_NAME[name].family,) and telling in outcome.evidence


def test_correct_messages_are_not_noticed() -> None:
    plan = planned()
    said = _RunMessages(plan)
    assert len(said.messages) == 16 * 3 * 2
    broken = _forget_spent_budget(said)
    stopped = [each for each in said.messages if each.round < 3]
    assert _detect(stopped, plan) == {} and len(broken) > len(stopped)
    assert len(_list_overspent(said.messages, plan)) == 3  # nobody stops: everybody overspends
    assert all(each.round < 16 for each in broken) and _list_overspent(broken, plan)[0].startswith("learner-0")


def test_what_breaks_nothing_is_missed() -> None:
    """Else it would be the tests that are broken. A false alarm: 1/20 for each number of runs; at this seed none."""
    nothing = Mutant("nothing", "all is well", lambda plan: Fault(), "conformance", 100)
    outcome = try_mutant(nothing, BASE_RUNS["dola"].build(), seed=3)
    assert outcome.is_missed and outcome.runs_needed is None and outcome.families == () and outcome.noise_numbers > 0


@pytest.mark.parametrize(
    ("name", "base", "why"),
    [
        ("pvp sends f", "dola", "must be pvp"),
        ("dvp, twice zeta", "dola", "must be dvp"),
        ("raw doubles", "pvp", "must be on a lattice"),
        ("one seed", "dpcda", "two learners or more"),
        ("half the noise", "d-ogd", "requests none"),
        ("summed", "dola", "more than one record"),
        ("not clipped", "pvp", "must use gradients"),
        ("forgetful", "dola", "must have a privacy.budget"),
        ("half the sensitivity", "ldp-dol", "must show more"),
    ],
)
def test_a_mutant_that_does_not_fit_says_why(name: str, base: str, why: str) -> None:
    outcome = tried(name, base)
    assert why in outcome.inapplicable_reason and not outcome.is_missed and outcome.runs_needed is None


def test_a_length_tells_nothing_where_no_gradient_is_ever_zero() -> None:
    """In batches, every feature is in some record."""
    base = replace(BASE_RUNS["ldp-dol, epsilon 1"], batch_size=4)
    assert "entries that are zero" in try_mutant(BY_NAME["length"], base.build()).inapplicable_reason


def test_a_mutant_of_ones_own() -> None:
    loud = Mutant("loud", "0.7 of the scale", mutate_noise(scale_noise(0.7)), "conformance", 20)
    assert try_mutant(loud, BASE_RUNS["dola"].build()).families == ("conformance",)


# ---- false alarms ----------------------------------------------------------------------------------------------------


def test_every_algorithm_has_a_run_for_false_alarms() -> None:
    assert set(ALGORITHM_RUNS) == set(algorithms.ALGORITHMS.built_in_classes)
    for name, base in ALGORITHM_RUNS.items():
        claim = base.build()[0].guarantee(0).epsilon()
        assert claim == pytest.approx(0.3, rel=0.1) or (name in {"admm", "d-ogd", "d-ftgl"} and claim == np.inf)


def test_false_alarms_are_counted() -> None:
    """At these seeds there are none; one with other seeds would be no fault."""
    found = measure_false_alarms(*ALGORITHM_RUNS["dola"].build(), [1, 2], name="dola")
    assert found == FalseAlarmCounts("dola", 0, 2, 0, 8) and not found.is_excessive
    assert measure_false_alarms(*ALGORITHM_RUNS["d-ogd"].build(), [1], name="d-ogd") == FalseAlarmCounts(
        "d-ogd", 0, 0, 0, 0
    )


def test_too_many_false_alarms_are_no_chance() -> None:
    few, many = FalseAlarmCounts("x", 5, 20, 0, 80), FalseAlarmCounts("x", 6, 20, 0, 80)  # chances 0.0026 and 0.00033
    assert not few.is_excessive and many.is_excessive
    assert (
        not replace(few, alarmed_runs=1).is_excessive and replace(few, alarmed_runs=3).is_excessive
    )  # 0.077 and 0.00008
    both = sum_false_alarms([replace(few, families=("black box",)), replace(many, families=("conformance",))])
    assert both == FalseAlarmCounts("x", 11, 40, 0, 160, ("black box", "conformance"))


def test_nobody_hears_the_learner_twice() -> None:
    """On a path of two there is one neighbour only, and nobody to tell something else."""
    base = replace(BASE_RUNS["dola"], sections={"learners": 2, "topology": {"graph": "path"}})
    assert "must send to two neighbours" in try_mutant(BY_NAME["equivocation"], base.build()).inapplicable_reason


def test_a_budget_that_is_enough_cannot_be_forgotten() -> None:
    base = replace(BASE_RUNS["ldp-dol, budget"], sections={"rounds": 4, "privacy": {"budget": 100.0}})
    plan = plan_audit(*base.build(), 0, runs=20)
    with pytest.raises(SpecError, match="whole run"):
        _forget_spent_budget(_RunMessages(plan))
