"""The audit on the simulator: correct learners are let off, broken ones are caught, and the verdict says no more than that."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.auditing import worlds as simulated_module
from sottovoce_core.auditing import worst_case_search as swaps_module
from sottovoce_core.auditing.audit import Audit, audit_simulated
from sottovoce_core.auditing.blackbox import (
    MAX_NUMBERS,
    MAX_ROUNDS,
    _drop_constant_features,
    attack,
    build_number_views,
)
from sottovoce_core.auditing.bounds import (
    ALPHA_ALLOCATION,
    BLACK_BOX_ALLOCATION,
    AlphaAllocation,
    Bound,
    BudgetPart,
    Test,
)
from sottovoce_core.auditing.likelihood import RoundLosses, RunLosses, bound_rounds, compute_run_losses
from sottovoce_core.auditing.plan import AuditPlan, _build_adversary, plan_audit
from sottovoce_core.auditing.verdict import Findings, decide, find_blamed_learner
from sottovoce_core.auditing.worlds import (
    NoiseFactory,
    RecordedRuns,
    RunChunk,
    Worlds,
    build_worlds,
    count_runs_in_memory,
    plan_chunks,
    simulate_coupled_runs,
    simulate_runs,
)
from sottovoce_core.auditing.worst_case_search import find_worst_worlds
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.noise import NoiseSource, SeededNoise, no_noise
from sottovoce_core.privacy.guarantee import ThreatModel
from sottovoce_core.runs.replay import replay
from sottovoce_core.runs.run import Run
from tests.claims import EXPOSED, SETUPS, Setup, Times
from tests.examples import made_up, small_run


def stream(
    run: Run, data: PlacedData, worlds: Worlds, runs: int, seed: np.random.SeedSequence, noise: NoiseFactory
) -> Iterator[RecordedRuns]:
    """All shares, one after the other."""
    for share in plan_chunks(runs, count_runs_in_memory(run), seed):
        yield simulate_runs(run, data, worlds, share, noise)


def planned(setup: Setup, **more: Any) -> AuditPlan:
    run = setup.build()
    data = made_up(run.spec, setup.n_features)
    if run.algorithm.accountant(0).has_shared_records:
        data = replace(data, learners=data.learners[:1] * run.spec.n_learners)
    return plan_audit(run, data, 1, **{"runs": 200, "seed": 1, **more})


def audited(setup: Setup, noise: Any = SeededNoise, **more: Any) -> Audit:
    return audit_simulated(planned(setup, **more), noise=noise)


def halved(seed: np.random.SeedSequence) -> NoiseSource:
    """Broken: half as much noise as claimed."""
    return Times(SeededNoise(seed), 0.5)


# ---- correct learners ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ldp-dol", "dola", "pdop", "pd-ftgl", "dpsda-c"])
def test_what_does_as_it_claims_is_consistent(name: str) -> None:
    """One in twenty other seeds may say otherwise."""
    found = audited(SETUPS[name])
    assert found.verdict.kind == "consistent" and not found.verdict.evidence
    assert 0.0 < found.findings.epsilon_lower_bound <= found.largest_loss <= found.findings.claim * (1 + 1e-9)
    assert found.findings.whole_run_bound is not None and len(found.run_worlds) == 2 * found.plan.runs
    assert "(lower bound on epsilon: " in found.verdict.text and "200 runs" in found.verdict.text


def test_an_audit_can_be_repeated() -> None:
    setup = SETUPS["ldp-dol"]
    once, again, other = (audited(setup, runs=60, seed=seed) for seed in (1, 1, 2))
    assert (once.verdict, once.findings.tests, once.findings.bounds) == (
        again.verdict,
        again.findings.tests,
        again.findings.bounds,
    )
    assert once.findings.whole_run_bound != other.findings.whole_run_bound


def test_shares_may_be_worked_on_side_by_side() -> None:
    """Whatever works on them, and in whatever processes: the same verdict and the same numbers."""
    plan = planned(SETUPS["ldp-dol"], runs=60)
    here = audit_simulated(plan)
    there = audit_simulated(plan, mapper=lambda work, own: [pickle.loads(pickle.dumps(work))(each) for each in own])  # noqa: S301 - our own
    assert here.findings.bounds == there.findings.bounds and here.findings.tests == there.findings.tests


def test_shares_say_how_far_they_are_and_find_the_same() -> None:
    plan, told = planned(SETUPS["ldp-dol"], runs=60), list[list[float]]()

    def over(work: Any, own: Sequence[RunChunk]) -> Iterator[Any]:
        for share in own:
            told.append([])
            yield work(replace(share, on_progress=told[-1].append))

    there, here = audit_simulated(plan, mapper=over), audit_simulated(plan)
    assert here.findings.bounds == there.findings.bounds and here.findings.tests == there.findings.tests
    examined = told[: 2 * len(plan.pairs)]
    assert all(each == sorted(each) and len(set(each)) > plan.run.spec.rounds for each in told[: len(examined)])
    assert [each[-1] for each in examined] == pytest.approx([1.0] * len(examined))
    assert all(each and 0.0 < each[-1] < 1.0 for each in told[len(examined) :])  # of which the losses alone are wanted


# ---- broken ones -----------------------------------------------------------------------------------------------------


def test_half_the_noise_is_refuted() -> None:
    """By conformance and, on its own, by the guesses. Failure probability below 1e-6 (their p-values are below 1e-9)."""
    found = audited(SETUPS["ldp-dol"], noise=halved, runs=600)
    assert found.verdict.kind == "refuted"
    assert min(test.p_value for test in found.findings.select_family("conformance").tests) < 1e-9
    alone = decide(replace(found.findings, tests=found.findings.select_family("likelihood").tests))
    assert alone.kind == "refuted" and any("(slope at " in each for each in alone.evidence)


def test_evidence_says_what_was_found_one_line_a_class_the_cause_first() -> None:
    """Noise said again has not the law of fresh noise either; a p-value that is no number is none."""
    levels = consistent().alpha_allocation
    marginal = [
        Test("scale", "the mean size is the scale", 0.4985, 0.0, ""),
        Test("learner scale", "the noise of every learner has its scale", 0.48, 0.0, "east", is_primary=False),
        Test("tails", "as many numbers are large as the law says", 0.3, 1e-200, "sizes above 2", is_primary=False),
    ]
    fresh = [Test("ties", "no noise is said again", 40.0, 4.4e-7, "numbers; 0.00161 expected; east, in two runs")]
    lags = [Test("lags", "no noise is related to noise before it", 0.1, 1e-20, "")]
    judged = levels.assign_levels
    tests = (*judged("marginal", marginal), *judged("dependence", lags), *judged("freshness", fresh))
    found = decide(replace(consistent(), tests=tests))
    assert found.evidence == (
        "the same noise was repeated 40 times (ties at numbers; 0.00161 expected; east, in two runs: p = 4.4e-07)",
        "noise is 0.498 of the claimed size (scale: p < 1e-300; 2 more tests of marginal fail)",
        "it does not hold that no noise is related to noise before it (lags: p = 1e-20)",
    )
    assert found.text.startswith("The claim does not hold: the same noise was repeated")


@pytest.mark.parametrize(
    ("tests", "blame"),
    [
        ([], 0),
        ([("marginal", "east, field 'y', coordinate 3"), ("marginal", ""), ("dependence", "4005 pairs")], 1),
        ([("lattice", "east, field 'y'"), ("dependence", "east, and south -2 noisy rounds and 0 coordinates on")], 1),
        ([("dependence", "south, and south 1 noisy rounds and 0 coordinates on")], 2),
        ([("freshness", "32 low bits; 0.1 expected; east, round 1, and east, round 2")], 1),
        ([("marginal", "east, round 3"), ("lattice", "south, field 'y'")], None),
        ([("marginal", "eastern, round 3"), ("marginal", "")], None),
        ([("marginal", "east, round 3"), ("worlds", "north")], 0),
    ],
)
def test_a_verdict_is_about_whom_it_was_found_at(tests: list[tuple[BudgetPart, str]], blame: int | None) -> None:
    made = [
        Test(
            "t",
            "it holds",
            0.0,
            0.0,
            where,
            family="black box" if part == "worlds" else "conformance",
            part=part,
            level=0.1,
        )
        for part, where in tests
    ]
    passed = Test("t", "it holds", 0.0, 0.5, "south, field 'y'", part="marginal", level=0.1)
    found = Findings(
        runs=1, alpha_allocation=AlphaAllocation(0.05), claim=1.0, tests=(*made, passed), has_both_worlds=False
    )
    assert find_blamed_learner(found, ("north", "east", "south"), 0) == blame


@pytest.mark.statistics
def test_half_the_noise_shows_in_single_rounds() -> None:
    """Twice the claim in each, and no bound above the claim for a correct learner (chance of a false alarm below 1/180)."""
    broken, correct = (
        audited(SETUPS["pd-ftgl"], noise=noise, runs=3000).findings.round_bounds for noise in (halved, SeededNoise)
    )
    assert broken is not None and any(bound.is_above_claim for bound in broken.bounds)
    assert correct is not None and not any(bound.is_above_claim for bound in correct.bounds) and correct.estimate > 0.0
    evidence = decide(replace(consistent(), round_bounds=broken)).evidence
    assert "the message of round" in evidence[0] and "alone is guessed correctly" in evidence[0]


def test_single_rounds_added_up_are_no_bound() -> None:
    """One of two rounds tells with an epsilon of 1, the other one says nothing: the run's epsilon is 1, and the sum 1.8.

    By construction, a bound of guesses is above 1 with probability at most 0.05.
    """
    generator, runs = np.random.default_rng(5), 10_000
    tells = np.arange(2)[:, None] == generator.integers(0, 2, runs)
    coins = generator.integers(0, 2, (2, runs))
    lies = generator.random((2, runs)) < 1.0 / (1.0 + math.e)
    each = RoundLosses(coins, np.where(tells, np.where((coins == 1) ^ lies, -1.0, 1.0), 0.0))
    rounds = bound_rounds(each, each, np.ones(2), AlphaAllocation(0.05))
    found = Findings(runs=runs, alpha_allocation=AlphaAllocation(0.05), claim=1.0, round_bounds=rounds)
    assert rounds.estimate > 1.5 and all(0.8 < bound.value <= 1.0 for bound in rounds.bounds)
    assert found.best_bound == ("", 0.0) and decide(found).kind == "consistent"
    said = decide(found).text
    assert "above" not in said and said.endswith("lower bound on epsilon is 0.")


def test_no_noise_is_refuted() -> None:
    assert audited(SETUPS["dola"], runs=40, noise=lambda seed: no_noise).verdict.kind == "refuted"


def test_sums_without_noise_are_refuted_on_the_wire_and_hold_at_the_output() -> None:
    """PD-FTGL as published: its epsilon is about decisions, and messages that no noise hides exceed it."""
    exposed = EXPOSED["pd-ftgl after gossip"]
    wire, output = (audited(exposed, runs=100, threat=threat) for threat in (ThreatModel.WIRE, ThreatModel.OUTPUT))
    assert (
        wire.verdict.kind == "refuted"
        and "a transcript that is impossible in one of the two worlds" in wire.verdict.text
    )
    assert math.isinf(wire.largest_loss) and wire.plan.claim_threat_model is ThreatModel.OUTPUT
    assert (
        output.verdict.kind == "consistent" and output.findings.whole_run_bound is None and output.findings.tests == ()
    )
    assert 0.0 < wire.findings.claim == output.findings.claim < 20.0


def test_what_promises_nothing_is_not_refuted() -> None:
    found = audited(SETUPS["d-ogd"], runs=100) if "d-ogd" in SETUPS else audited(EXPOSED["d-ogd"], runs=100)
    assert found.verdict.kind == "no-claim" and "There is no privacy claim" in found.verdict.text
    assert found.findings.excess is None and found.findings.epsilon_lower_bound > 2.0


# ---- who listens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pd-ogd", "dpsda-c", "dpps noised", "pd-ftgl", "dvp"])
def test_decisions_that_follow_from_messages_are_promised_as_much(name: str) -> None:
    plan = planned(SETUPS[name], runs=40, threat=ThreatModel.OUTPUT)
    assert plan.epsilon == planned(SETUPS[name], runs=40).epsilon < np.inf


@pytest.mark.parametrize("name", ["ldp-dol", "dola", "dpsda-c clean", "dpps", "pvp"])
def test_of_clean_decisions_nothing_is_promised(name: str) -> None:
    """They tell the swap for certain, and accuse nobody."""
    plan = planned(SETUPS[name], runs=40, threat=ThreatModel.OUTPUT)
    assert np.isinf(plan.epsilon) and np.isinf(plan.claim_per_round).all()


def test_clean_decisions_are_no_accusation() -> None:
    """A classifier tells them apart in every run: they are deterministic."""
    found = audited(SETUPS["pvp"], runs=40, threat=ThreatModel.OUTPUT)
    assert found.verdict.kind == "no-claim" and found.findings.epsilon_lower_bound > 0.5


def test_a_neighbour_that_does_not_hear_all_cannot_replay() -> None:
    """On a path 0 - 1 - 2, learner 1 hears all that learner 0 hears, and learner 2 hears only one of those that 1 hears."""
    run = small_run(rounds=6, topology={"graph": "path"})
    data = made_up(run.spec)
    ends = plan_audit(run, data, 0, runs=50, threat=ThreatModel.NEIGHBOUR)
    assert ends.adversary.neighbour == 1 and ends.adversary.can_replay
    middle = plan_audit(run, data, 1, runs=50, threat=ThreatModel.NEIGHBOUR, neighbour=2)
    assert not middle.adversary.can_replay
    found = audit_simulated(middle)
    assert found.findings.whole_run_bound is None and found.findings.round_bounds is None and found.findings.bounds
    with pytest.raises(SpecError, match="must be an out-neighbour of"):
        plan_audit(run, data, 0, runs=50, threat=ThreatModel.NEIGHBOUR, neighbour=2)
    with pytest.raises(SpecError, match="all learners hold the record"):
        planned(SETUPS["dpsda-c"], threat=ThreatModel.NEIGHBOUR)


def test_shared_records_are_swapped_everywhere() -> None:
    """The joint claim is the sum, and the loss of the wire that of all learners together."""
    plan = planned(SETUPS["dpsda-c"], runs=50)
    single = plan.run.guarantee(1, np.diff(plan.worlds.records_0.offsets), plan.worlds.replacements_per_round)
    assert plan.epsilon == pytest.approx(3 * single.epsilon())
    part = simulate_runs(plan.run, plan.data, plan.worlds, RunChunk(1, 5, np.random.SeedSequence(0)), SeededNoise)
    each = [
        replay(plan.run, part.transcript, i, [plan.worlds.records_0, plan.worlds.records_1]).realised_losses[:, 0]
        for i in range(3)
    ]
    np.testing.assert_allclose(plan.worlds.compute_losses(plan.run, part.transcript), sum(each))
    assert all(own is plan.worlds.records_1 for own in plan.worlds.build_data(plan.data, 1).learners)


def test_too_few_runs_for_the_confidence_are_refused() -> None:
    with pytest.raises(SpecError, match="at least"):
        planned(SETUPS["ldp-dol"], runs=10, confidence=0.999999)


def test_twins_differ_from_the_swapped_round_on() -> None:
    run = small_run(rounds=10)
    data = made_up(run.spec)
    own = data.learners[0]
    pair = simulate_coupled_runs(
        run, data, Worlds(0, own, own.with_use(4, -own.features[4], own.labels[4]), ""), np.random.SeedSequence(0)
    )
    assert pair.first_affected_round == 4 and pair.largest_shift_round > 4
    assert np.array_equal(pair.message_0[:5], pair.message_1[:5]) and pair.message_0[5] != pair.message_1[5]
    assert np.array_equal(pair.noiseless_0[:5], pair.noiseless_1[:5]) and (pair.scale > 0).all()


def test_a_transcript_above_a_claim_is_named() -> None:
    """A claim of half of what is shown: the first run and round above it, as replayed by hand."""
    run = SETUPS["dola"].build()
    data = made_up(run.spec, 2)
    chosen_worlds = find_worst_worlds(run, data, 1, np.random.SeedSequence(0))
    parts = list(stream(run, data, chosen_worlds, 20, np.random.SeedSequence(1), SeededNoise))
    shown = np.concatenate(
        [
            np.cumsum(
                replay(run, part.transcript, 1, [chosen_worlds.records_0, chosen_worlds.records_1]).realised_losses[
                    :, 0
                ],
                axis=0,
            )
            for part in parts
        ],
        axis=1,
    )
    claim = np.full(run.spec.rounds, 0.5 * float(np.abs(shown).max()))
    found = RunLosses.concatenate([compute_run_losses(run, chosen_worlds, part, claim) for part in parts])
    excess = found.find_excess(claim)
    assert excess is not None
    above = np.abs(shown) > claim[:, None]
    assert excess.transcript_count == above.any(axis=0).sum() and excess.run == above.any(axis=0).argmax()
    assert excess.round == above[:, excess.run].argmax()
    assert excess.loss == pytest.approx(abs(shown[excess.round, excess.run])) and excess.loss > excess.claim
    assert (
        RunLosses.concatenate([compute_run_losses(run, chosen_worlds, part, 2 * claim) for part in parts]).find_excess(
            2 * claim
        )
        is None
    )
    verdict = decide(replace(consistent(), excess=excess))
    assert verdict.kind == "refuted" and f"run {excess.run} shows, after the message of round {excess.round}" in str(
        verdict.evidence
    )


# ---- worlds ----------------------------------------------------------------------------------------------------------


def test_worlds_are_adjacent_or_refused() -> None:
    run = small_run(rounds=6)
    data = made_up(run.spec, records=3)
    own = data.learners[0]
    once = Worlds(0, own, own.with_use(2, np.ones(3), 1.0), "")
    assert once.replacements_per_round.tolist() == [0, 0, 1, 0, 0, 0]
    always = build_worlds(data, 0, 1, np.ones(3), 0.0)
    assert always.replacements_per_round.tolist() == [0, 1, 0, 0, 1, 0]
    assert always.compute_guarantee(run).epsilon() > once.compute_guarantee(run).epsilon() > 0.0
    with pytest.raises(DataError, match="exactly one record, got 0"):
        Worlds(0, own, own, "")
    with pytest.raises(DataError, match="exactly one record, got 2"):
        Worlds(0, own, own.with_record(0, np.ones(3), 1.0).with_record(1, np.ones(3), 1.0), "")
    with pytest.raises(DataError, match="equally many records"):
        Worlds(0, own, LearnerData(own.features, own.labels, own.order[1:], np.maximum(own.offsets - 1, 0)), "")
    silent = data.with_learner(0, replace(own, order=own.order[:0], offsets=np.zeros_like(own.offsets)))
    with pytest.raises(DataError, match="must have a record"):
        find_worst_worlds(run, silent, 0, np.random.SeedSequence(0))


def test_the_worst_swap_shows_more_than_a_small_one() -> None:
    run = small_run(rounds=10)
    data = made_up(run.spec)
    seed = np.random.SeedSequence(0)
    own = data.learners[0]
    small = build_worlds(data, 0, 0, 1.01 * own.features[0], float(own.labels[0]))
    strengths = []
    for each in (find_worst_worlds(run, data, 0, seed), small):
        heard = stream(run, data, each, 100, seed, SeededNoise)
        parts = [compute_run_losses(run, each, part, np.full(10, np.inf)) for part in heard]
        strengths.append(float(np.abs(RunLosses.concatenate(parts).total).mean()))
    assert strengths[0] > 3.0 * strengths[1]


def test_the_search_finds_the_same_swap_however_many_are_tried_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(rounds=6)
    data = made_up(run.spec)
    seed = np.random.SeedSequence(2)
    together = find_worst_worlds(run, data, 0, seed)
    monkeypatch.setattr(swaps_module, "MAX_TRANSCRIPT_BYTES", 1)
    one_by_one = find_worst_worlds(run, data, 0, seed)
    assert together.description == one_by_one.description and not together.find_differing_uses()[1:].any()
    for each in (together.records_0, together.records_1):
        assert any(np.array_equal(each.features, its.features) for its in (one_by_one.records_0, one_by_one.records_1))


def test_runs_are_split_by_a_fair_coin_and_held_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(rounds=4, learners=4, topology={"graph": "path"})
    data = made_up(run.spec)
    two = find_worst_worlds(run, data, 0, np.random.SeedSequence(0))
    monkeypatch.setattr(simulated_module, "MAX_TRANSCRIPT_BYTES", 8 * 4 * 4 * 3 * 7)  # seven runs
    assert count_runs_in_memory(run) == 7
    parts = list(stream(run, data, two, 50, np.random.SeedSequence(3), SeededNoise))
    sizes = [(part.world, part.transcript.replicas) for part in parts]
    assert sum(size for _, size in sizes) == 100 and max(size for _, size in sizes) == 7
    first = sum(size for world, size in sizes if world == 0)
    assert 20 < first < 80 and first != 50
    said = parts[0].transcript.fields["y"]
    assert said[:, :2].all() and not said[:, 2:].any()
    assert not np.isin(parts[0].transcript.fields["y"][1:, 0], parts[1].transcript.fields["y"][1:, 0]).any()
    assert [each.world for each in plan_chunks(50, 7, np.random.SeedSequence(3))][:4] == [0, 1, 0, 1]


# ---- the black box ---------------------------------------------------------------------------------------------------


def noisy(runs: int, seed: int) -> tuple[IntArray, FloatArray]:
    """Worlds, and numbers that have nothing to do with them."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 2, runs), generator.laplace(size=(runs, 4, 2))


def test_the_black_box_finds_nothing_where_there_is_nothing() -> None:
    """Bounds above 0.3 at alpha .05: a twentieth of seeds at most; this one is fixed."""
    worlds, said = noisy(2000, 0)
    for each in attack(
        build_number_views(said), worlds, AlphaAllocation(0.05, BLACK_BOX_ALLOCATION), 1.0, np.random.SeedSequence(0)
    ):
        assert each.bound.value < 0.3


def _bits(said: FloatArray, worlds: FloatArray) -> None:
    said[:, 1, 0].view(np.uint64)[:] &= ~np.uint64(1)
    said[:, 1, 0] = (said[:, 1, 0].copy().view(np.uint64) | worlds.astype(np.uint64)).view(np.float64)


def _again(said: FloatArray, worlds: FloatArray) -> None:
    said[worlds == 1, 2] = said[worlds == 1, 1]


def _silence(said: FloatArray, worlds: FloatArray) -> None:
    said[worlds == 1, 3, 1] = 0.0


@pytest.mark.parametrize(
    ("leak", "telling"),
    [(_bits, {"low bits"}), (_again, {"repeats"}), (_silence, {"repeats", "lengths", "low bits"})],
    ids=["low bits", "noise said again", "a number left out"],
)
def test_the_black_box_says_which_view_gave_it_away(leak: Any, telling: set[str]) -> None:
    worlds, said = noisy(1000, 1)
    leak(said, worlds)
    attacks = attack(
        build_number_views(said), worlds, AlphaAllocation(0.05, BLACK_BOX_ALLOCATION), 1.0, np.random.SeedSequence(0)
    )
    best = max((each.bound for each in attacks), key=lambda bound: bound.value)
    assert best.view in telling and best.value > 4.0


def test_the_black_box_looks_at_the_first_rounds() -> None:
    run = small_run(rounds=20, n_features=10)
    data = made_up(run.spec, 10)
    two = find_worst_worlds(run, data, 0, np.random.SeedSequence(0))
    part = simulate_runs(run, data, two, RunChunk(0, 5, np.random.SeedSequence(0)), SeededNoise)
    hears = _build_adversary(run, two, two.compute_guarantee(run), ThreatModel.WIRE)
    seen = hears.extract_visible_numbers(part, two, run)
    assert seen.shape == (5, MAX_ROUNDS, MAX_NUMBERS // MAX_ROUNDS)
    assert np.array_equal(seen[2, 3], part.transcript.fields["y"][hears.visible_rounds[3], 0, 2, :8])
    assert _drop_constant_features(build_number_views(np.zeros((5, 2, 2)))) == {}


def test_numbers_that_are_nearly_all_zero_are_looked_at_without_an_overflow() -> None:
    """Beside a spread of nothing any number is infinite."""
    said = np.zeros((5, 2, 3))
    said[0, 0, 0], said[1, 1, 2] = 1e300, -7.0
    relative = build_number_views(said)["values"].reshape(5, 2, 6)[..., 3:]
    np.testing.assert_array_equal(relative, np.sign(said))


# ---- verdicts --------------------------------------------------------------------------------------------------------


LEVELS = AlphaAllocation(0.06)


def outcome(p_value: float) -> Test:
    return Test("scale", "the noise has its scale", 1.0, p_value, "round 3")


def guesses(correct: int) -> Bound:
    return Bound(
        "likelihood", "the likelihood ratio", "", correct, 1000, 1.0, LEVELS.compute_level("likelihood", "whole runs")
    )


def noise_tests(*p_values: float) -> tuple[Test, ...]:
    return LEVELS.assign_levels("marginal", [outcome(p) for p in p_values])


def consistent() -> Findings:
    right = LEVELS.assign_levels("calibration", [outcome(0.5)])
    return Findings(1000, LEVELS, 1.0, (*noise_tests(0.4, 0.4, 0.4, 0.4), *right), (guesses(500),))


def test_no_more_than_alpha_is_given_away() -> None:
    for budget in (ALPHA_ALLOCATION, BLACK_BOX_ALLOCATION):
        levels = AlphaAllocation(0.06, budget)
        assert sum(sum(parts.values()) for parts in budget.values()) == 1
        assert sum(
            levels.compute_level(*part) for part in ((a, b) for a in budget for b in budget[a])
        ) == pytest.approx(0.06)
    tests = LEVELS.assign_levels("lattice", [outcome(0.5)] * 4)
    assert {test.level for test in tests} == {LEVELS.compute_level("conformance", "lattice") / 4}
    others = LEVELS.assign_levels("lattice", [*tests, replace(outcome(0.5), is_primary=False)])
    assert sum(test.level for test in others) == pytest.approx(LEVELS.compute_level("conformance", "lattice"))
    assert others[0].level == others[-1].level / 4
    assert not outcome(0.0).is_significant  # it has no level yet
    assert LEVELS.assign_levels("calibration", ()) == ()


def test_a_family_keeps_its_levels_where_it_stands_alone() -> None:
    found = consistent()
    assert (
        found.select_family("conformance").tests == found.tests[:4] and found.select_family("conformance").bounds == ()
    )
    assert found.select_family("likelihood").bounds == found.bounds == (found.whole_run_bound,)
    broken = replace(found, bounds=(guesses(800),))
    kinds = {family: decide(broken.select_family(family)).kind for family in ALPHA_ALLOCATION}
    assert kinds == {"conformance": "consistent", "likelihood": "refuted", "black box": "consistent"}


def test_what_no_mechanism_does_and_too_few_runs_forbid_the_word_consistent() -> None:
    found = consistent()
    said = decide(replace(found, anomalies=("noise is said again",)))
    assert said.kind == "inconclusive" and said.evidence == ("noise is said again",)
    few = decide(replace(found, needed_runs=1001))
    assert few.kind == "inconclusive" and "1,001 of each world are needed" in few.text
    nothing = decide(replace(found, claim=math.inf, anomalies=("noise is said again",)))
    assert nothing.kind == "no-claim" and "noise is said again" in nothing.text


def test_verdicts_say_what_the_numbers_allow() -> None:
    found = consistent()
    assert decide(found).kind == "consistent"
    assert decide(replace(found, claim=math.inf)).kind == "no-claim"
    level = LEVELS.compute_level("conformance", "marginal") / 4
    rejected = replace(found, tests=noise_tests(0.9 * level, 0.4, 0.4, 0.4))
    assert decide(rejected).kind == "refuted" and "round 3" in decide(rejected).text
    hinted = decide(replace(found, tests=noise_tests(1.1 * level, 0.4, 0.4, 0.4)))
    assert hinted.kind == "inconclusive" and "runs of each world would decide" in hinted.text
    assert guesses(800).value == pytest.approx(1.19, abs=5e-3) and guesses(761).value < 1.0
    above = decide(replace(found, bounds=(guesses(800),)))
    assert above.kind == "refuted" and "epsilon is above 1.19, not 1" in above.text
    assert decide(replace(found, bounds=(guesses(761),))).kind == "inconclusive"
