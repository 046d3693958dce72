"""Audit of one learner: two worlds, many runs of each, three families of tests, one verdict.

The runs come from the simulator, from real services or from captures. Only small statistics of each run are kept, so that
there may be many runs, simulated and examined in parallel.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from sottovoce_core.arrays import FloatArray, IntArray, summarize_fields
from sottovoce_core.auditing.blackbox import NUMBER_VIEWS, Attack, attack, build_number_views
from sottovoce_core.auditing.bounds import Bound, Test
from sottovoce_core.auditing.coin_tests import (
    PairRuns,
    RunOutcomes,
    run_calibration_tests,
    run_channel_tests,
    run_classifier_tests,
    run_private_quantity_tests,
)
from sottovoce_core.auditing.likelihood import (
    LossBound,
    RoundBounds,
    RoundLosses,
    RunLosses,
    bound_at_delta,
    bound_rounds,
    compute_run_losses,
    guess,
    redraw_rounds,
)
from sottovoce_core.auditing.plan import AuditPlan
from sottovoce_core.auditing.traffic_features import RunFeatures, build_tables
from sottovoce_core.auditing.verdict import Findings, Verdict, decide, find_blamed_learner
from sottovoce_core.auditing.worlds import (
    CoupledRuns,
    NoiseFactory,
    ProgressCallback,
    RecordedRuns,
    RunChunk,
    compute_private_differences,
    count_numbers,
    count_runs_in_memory,
    discard_progress,
    plan_chunks,
    scale_progress,
    simulate_coupled_runs,
    simulate_runs,
    spawn_seeds,
)
from sottovoce_core.auditing.worst_case_search import compute_peak_losses, find_worst_replacement, list_replacements
from sottovoce_core.noise import SeededNoise
from sottovoce_core.optional import import_optional
from sottovoce_core.privacy.guarantee import ThreatModel
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.table import Table

if TYPE_CHECKING:
    from sottovoce_core.auditing.conformance.battery import Battery

_MAX_SWEEP_NUMBERS, _MAX_SWEEP_RUNS = 2**21, 20
"""Maximum number of numbers, and of runs, for which the exact losses of all learners are computed; at least one run."""

_MAX_SWEEP_LEARNERS = 32
"""Maximum number of learners for which the exact losses of all learners are computed."""

MAX_CHUNK_RUNS = 2500
"""Maximum number of runs in a chunk, so that chunks can be made in parallel."""

_SIMULATION_FRACTION, _SIMULATION_FRACTION_LOSSES_ONLY = 0.1, 0.6
"""Approximate fraction of the time of a chunk spent on simulation: where its noise is examined, and where it is not."""

ChunkTask = Callable[[RunChunk], "ChunkStatistics"]
Mapper = Callable[[ChunkTask, Sequence[RunChunk]], Iterable["ChunkStatistics"]]
"""Function that maps a task over chunks: in sequence, as `map`, or in parallel; results in order."""
CoinSource = Literal["seed", "operating system", "not known", "none"]
"""Source of the coin that chose the world of every run; none: all runs are of one world."""


@dataclass(frozen=True, slots=True)
class ChunkStatistics:
    """Statistics of the runs of one chunk.

    Attributes:
        world: 0 or 1.
        visible_numbers: `(runs, visible rounds, numbers)` input of the black box.
        channel_features: features of other traffic of every run, by view; empty if there is none.
        run_losses: exact losses; None if the adversary's view is too small.
        round_losses: losses of single rounds; None if rounds cannot be redrawn.
        noise: conformance statistics of the noise of all learners; None if the adversary sees no message.
        pair_index: index of the pair of worlds in `AuditPlan.pairs`.
        private_differences: `(runs, quantities)` differences of the private quantities between the worlds
            (`compute_private_differences`); None if no other traffic could reveal them, or if the adversary's view is too
            small.
    """

    world: int
    visible_numbers: FloatArray
    channel_features: tuple[Mapping[str, RunFeatures], ...]
    run_losses: RunLosses | None
    round_losses: RoundLosses | None
    noise: Battery | None = None
    pair_index: int = 0
    private_differences: FloatArray | None = None

    __repr__ = summarize_fields


@dataclass(frozen=True, slots=True)
class LearnerLoss:
    """Exact losses of one learner in a few runs, for the most revealing of the replacements tried.

    It is chosen in hindsight, so it usually differs from the replacement of the audit: the audited learner has two losses.

    Attributes:
        learner: its index.
        replacement: replacement in words.
        claim: epsilon for the replacement.
        largest_loss: largest absolute loss of any run at any round.
    """

    learner: int
    replacement: str
    claim: float
    largest_loss: float

    __repr__ = summarize_fields


_MAX_DISPLAYED_TESTS = 5
"""Number of tests that an audit shows in a notebook."""


@dataclass(frozen=True, slots=True)
class Audit:
    """Subject and results of an audit.

    Attributes:
        plan: plan of the audit.
        source: origin of the runs, in words.
        run_losses: exact losses of all runs; None if the adversary's view is too small.
        run_worlds: `(runs,)` world of each run, in order.
        visible_numbers: `(runs, visible rounds, numbers)` input of the black box.
        varying_counts: number of features that vary between runs, by view.
        verdict_learner: learner whose claim the verdict is about: the one with the replaced record, or one whose noise alone
            refutes it. None: the noise of several does, or that of all together.
        noise: sample of this learner's noise, or of all, standardised: independent standard Laplace numbers if the claim
            holds.
        noise_count: number of noise values of all learners that conformance examined.
        learner_losses: exact losses of all learners in a few runs.
        coupled_runs: two runs that differ only in the record.
        findings: results of the tests.
        verdict: conclusion.
        captures: SHA-256 of every capture read, by name; empty for simulated runs.
        coin_source: source of the world of every run.
        assumptions: further facts about the runs on which the verdict depends, a sentence each.
        unproven_reason: reason why the captures do not prove the messages of their learners, in a few words; empty: they do,
            or the runs were made here.
    """

    plan: AuditPlan
    source: str
    run_losses: RunLosses | None
    run_worlds: IntArray
    visible_numbers: FloatArray
    varying_counts: Mapping[str, int]
    verdict_learner: int | None
    noise: FloatArray
    noise_count: int
    learner_losses: tuple[LearnerLoss, ...]
    coupled_runs: CoupledRuns
    findings: Findings
    verdict: Verdict
    captures: Mapping[str, str] = field(default_factory=dict)
    coin_source: CoinSource = "seed"
    assumptions: tuple[str, ...] = ()
    unproven_reason: str = ""

    def __repr__(self) -> str:
        learner = self.plan.run.spec.names[self.plan.worlds.learner]
        return f"Audit of {learner!r}, {self.findings.runs} runs of each world, {self.source}: {self.verdict.kind}"

    def _repr_html_(self) -> str:
        """Render the verdict and the tests, for notebooks."""
        tests = sorted(self.findings.tests, key=lambda each: each.p_value)[:_MAX_DISPLAYED_TESTS]
        rows = [(each.name, each.p_value, each.level) for each in tests]
        table = Table.from_rows(("smallest p-values", "p", "level"), rows)._repr_html_() if tests else ""
        return f"<p>{html.escape(repr(self))}</p>{self.verdict._repr_html_()}{table}"

    @property
    def black_box_claim(self) -> float:
        """Claim with which the black box is compared."""
        return _select_black_box_claim(self.plan, self.varying_counts)

    @property
    def largest_loss(self) -> float:
        """Largest exact loss of any transcript; not-a-number if it is not known."""
        return float("nan") if self.run_losses is None else float(self.run_losses.largest_losses.max())


# ---- runs ------------------------------------------------------------------------------------------------------------


def compute_chunk_statistics(
    plan: AuditPlan,
    part: RecordedRuns,
    pair_index: int = 0,
    round_losses: RoundLosses | None = None,
    on_progress: ProgressCallback = discard_progress,
    *,
    losses_only: bool = False,
) -> ChunkStatistics:
    """Compute the statistics that the tests need of some runs.

    Args:
        plan: plan with all pairs of worlds.
        part: recorded runs of one world.
        pair_index: index of the pair of worlds in the plan.
        round_losses: losses of single rounds, if these were redrawn.
        on_progress: receives the progress of slow steps.
        losses_only: do not examine the noise.
    """
    plan = plan.pairs[pair_index]
    run, adversary, transcript = plan.run, plan.adversary, part.transcript
    noise = None
    if not losses_only and adversary.threat is not ThreatModel.OUTPUT:
        from sottovoce_core.auditing.conformance.battery import examine_noise  # imports scipy

        past_runs = math.ceil(plan.dependence_fraction * transcript.replicas)
        fraction = min(1.0, transcript.replicas * count_numbers(run) / max(1, plan.noise_count))
        noise = examine_noise(run, plan.data, plan.worlds, part.world, transcript, past_runs, fraction, on_progress)
    run_losses = compute_run_losses(run, plan.worlds, part, plan.claim) if adversary.can_replay else None
    visible_numbers = np.nan_to_num(
        adversary.extract_visible_numbers(part, plan.worlds, run), nan=0.0
    )  # numbers without a recorded message
    private_differences = (
        compute_private_differences(run, plan.worlds, transcript)
        if adversary.can_replay and part.channel_features
        else None
    )
    return ChunkStatistics(
        part.world,
        visible_numbers,
        part.channel_features,
        run_losses,
        round_losses,
        noise,
        pair_index,
        private_differences,
    )


def _simulate_chunk(
    plan: AuditPlan,
    chunk: RunChunk,
    noise: NoiseFactory = SeededNoise,
    actual: Run | None = None,
    *,
    losses_only: bool = False,
) -> ChunkStatistics:
    """Simulate a chunk of runs and compute its statistics.

    Args:
        plan: plan with all pairs of worlds.
        chunk: runs to simulate.
        noise: constructor of the noise source.
        actual: run that produces the messages (default: the claimed one).
        losses_only: do not examine the noise.
    """
    pair = plan.pairs[chunk.pair_index]
    run_seed, coin_seed, noise_seed = spawn_seeds(chunk.seed, 3)
    simulated = _SIMULATION_FRACTION_LOSSES_ONLY if losses_only else _SIMULATION_FRACTION
    simulation = RunChunk(
        chunk.world, chunk.runs, run_seed, on_progress=scale_progress(chunk.on_progress, 0.0, simulated)
    )
    decisions = pair.adversary.threat is ThreatModel.OUTPUT
    part = simulate_runs(
        actual or pair.run, pair.data, pair.worlds, simulation, noise, keep_all_learners=True, keep_decisions=decisions
    )
    round_losses = None
    if pair.adversary.can_replay:
        round_losses = redraw_rounds(
            pair.run, pair.worlds, part.transcript, noise(noise_seed), np.random.default_rng(coin_seed), actual
        )
    return compute_chunk_statistics(
        plan,
        part,
        chunk.pair_index,
        round_losses,
        scale_progress(chunk.on_progress, simulated, 1.0),
        losses_only=losses_only,
    )


def audit_simulated(
    plan: AuditPlan,
    *,
    noise: NoiseFactory = SeededNoise,
    actual_run: Run | None = None,
    mapper: Mapper = map,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Audit:
    """Run an audit on the simulator.

    Args:
        plan: plan of the audit.
        noise: constructor of the audited run's noise source (default: the claimed one).
        actual_run: run that produces the messages (default: the claimed one).
        mapper: maps a task over chunks of the runs; each chunk reports its progress (`RunChunk.on_progress`).
        on_stage: receives the name of each stage.

    Raises:
        SpecError: scipy or scikit-learn are not installed.
    """
    chunks = [
        chunk
        for k, pair in enumerate(plan.pairs)
        for chunk in plan_chunks(pair.runs, _count_chunk_runs(plan), pair.seeds.audited_runs, k)
    ]

    on_stage("simulating and examining")
    parts = merge_noise(mapper(partial(_simulate_chunk, plan, noise=noise, actual=actual_run), chunks))
    return conclude(
        plan, parts, _simulate_sweep_runs(plan, noise, actual_run), "the simulator", mapper=mapper, on_stage=on_stage
    )


def merge_noise(parts: Iterable[ChunkStatistics]) -> list[ChunkStatistics]:
    """Merge the noise statistics of all parts into the first one, because they are large."""
    merged: list[ChunkStatistics] = []
    for part in parts:
        total = merged[0].noise if merged else None
        if total is None:
            part = replace(part, noise=deepcopy(part.noise))  # results of another process may be read-only (Ray)
        elif part.noise is not None:
            total.merge(part.noise)
            part = replace(part, noise=None)
        merged.append(part)
    return merged


def _count_chunk_runs(plan: AuditPlan) -> int:
    """Return the maximum number of runs in a chunk."""
    decisions = plan.adversary.threat is ThreatModel.OUTPUT
    return min(MAX_CHUNK_RUNS, count_runs_in_memory(plan.run, keep_decisions=decisions))


def _simulate_sweep_runs(plan: AuditPlan, noise: NoiseFactory, actual: Run | None) -> Transcript:
    """Simulate a few runs of world 0, with the messages of all learners."""
    run = actual or plan.run
    chunk = RunChunk(0, count_sweep_runs(run), plan.seeds.sweep)
    return simulate_runs(run, plan.data, plan.worlds, chunk, noise, keep_all_learners=True).transcript


def count_sweep_runs(run: Run) -> int:
    """Count the runs for which the losses of all learners are computed."""
    fitting = _MAX_SWEEP_NUMBERS * run.spec.n_learners // count_numbers(run)
    return max(1, min(_MAX_SWEEP_RUNS, fitting))


def count_rehearsal_runs(runs: int) -> int:
    """Count the runs of each world that fix thresholds: with many runs, rare large losses matter."""
    return min(runs, max(500, runs // 10))


# ---- tests -----------------------------------------------------------------------------------------------------------


def conclude(
    plan: AuditPlan,
    parts: Sequence[ChunkStatistics],
    transcript: Transcript,
    source: str,
    *,
    run_outcomes: RunOutcomes | None = None,
    mapper: Mapper = map,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Audit:
    """Run all tests on the recorded runs, and decide the verdict.

    Args:
        plan: plan of the audit.
        parts: statistics of the runs, in order, in all pairs of worlds (`merge_noise`).
        transcript: messages of all learners in a few runs of world 0.
        source: origin of the runs, in words.
        run_outcomes: outcomes of all started runs; None: all were simulated to their end.
        mapper: maps a task over chunks of the runs that fix thresholds.
        on_stage: receives the name of each stage.

    Raises:
        SpecError: scipy or scikit-learn are not installed.
    """
    for extra, package in (("scipy", "scipy"), ("sklearn", "scikit-learn")):
        import_optional(extra, package, "an audit")
    incomplete = {} if run_outcomes is None else run_outcomes.incomplete_losses
    by_pair = ([part for part in parts if part.pair_index == k] for k in range(len(plan.pairs)))
    pairs = [_Pair(each, incomplete.get(each[0].pair_index)) for each in by_pair if each]
    first, noise = pairs[0], parts[0].noise
    findings = _run_tests(plan, pairs, noise, run_outcomes, mapper, on_stage)
    verdict_learner = find_blamed_learner(findings, plan.run.spec.names, plan.worlds.learner)
    return Audit(
        plan=plan,
        source=source,
        run_losses=first.started,
        run_worlds=first.worlds,
        visible_numbers=first.visible_numbers,
        varying_counts={name: int((view != view[:1]).any(axis=0).sum()) for name, view in first.views.items()},
        verdict_learner=verdict_learner,
        noise=_select_noise_sample(noise, verdict_learner),
        noise_count=0 if noise is None else noise.noise_count,
        learner_losses=_compute_learner_losses(plan, transcript),
        coupled_runs=simulate_coupled_runs(plan.run, plan.data, plan.worlds, plan.seeds.coupled_runs),
        findings=findings,
        verdict=decide(findings),
    )


def _select_noise_sample(noise: Battery | None, learner: int | None) -> FloatArray:
    """Select the noise sample of one learner, or of all."""
    if noise is None or not noise.noise_samples:
        return np.empty(0)
    return np.concatenate(noise.noise_samples) if learner is None else noise.noise_samples[learner]


class _Pair:
    """Runs of one pair of worlds in the form that tests use.

    Attributes:
        parts: statistics of the runs.
        visible_numbers, worlds: visible numbers of all runs, for the black box, and the world of each.
        views: views for the classifiers.
        losses: exact losses of whole runs; None if the adversary's view is too small.
        started: losses of all started runs: none is excluded because of its outcome.
    """

    def __init__(self, parts: Sequence[ChunkStatistics], incomplete: RunLosses | None) -> None:
        self.parts = parts
        self.visible_numbers = np.concatenate([part.visible_numbers for part in parts])
        self.worlds = np.concatenate([np.full(len(part.visible_numbers), part.world) for part in parts])
        channel = [run for part in parts for run in part.channel_features]
        self.views = {**build_number_views(self.visible_numbers), **(build_tables(channel) if channel else {})}
        known = [part.run_losses for part in parts if part.run_losses is not None]
        self.losses = RunLosses.concatenate(known) if known else None
        self.started = RunLosses.concatenate([*known, incomplete]) if known and incomplete is not None else self.losses

    @property
    def pair_runs(self) -> PairRuns | None:
        """Runs for the tests of information beyond the messages; None if the losses of the messages are not known."""
        if self.losses is None:
            return None
        known = [part.private_differences for part in self.parts if part.private_differences is not None]
        differences = np.concatenate(known) if len(known) == len(self.parts) else None
        return PairRuns(self.losses.total, 1 - self.losses.worlds, self.views, differences)


def _run_tests(
    plan: AuditPlan,
    pairs: Sequence[_Pair],
    noise: Battery | None,
    run_outcomes: RunOutcomes | None,
    mapper: Mapper,
    on_stage: Callable[[str], None],
) -> Findings:
    """Run the tests of all families; if the coins are not fair, return only the findings that need no coin."""
    from sottovoce_core.auditing.verdict import add_detectable_effects

    noise_count = 0 if noise is None else noise.noise_count
    on_stage("conformance")
    conformance = () if noise is None else noise.compute_tests(plan.alpha_allocation)
    likelihood_bounds, round_bounds = _run_likelihood_tests(plan, pairs[0], mapper, on_stage)
    loss_bound = _bound_at_delta(plan, pairs[0])
    on_stage("black box")
    views = pairs[0].views
    attacks = (
        attack(
            views, pairs[0].worlds, plan.alpha_allocation, _select_black_box_claim(plan, views), plan.seeds.black_box
        )
        if plan.has_both_worlds
        else ()
    )
    location = plan.run.spec.names[plan.worlds.learner]
    coin_tests = _run_coin_tests(plan, pairs, run_outcomes, attacks) if plan.has_both_worlds else ()
    started_runs = ((pair.started, each.claim) for pair, each in zip(pairs, plan.pairs, strict=False))
    excesses = (started.find_excess(claim) for started, claim in started_runs if started is not None)
    findings = Findings(
        runs=plan.total_runs,
        alpha_allocation=plan.alpha_allocation,
        claim=plan.epsilon,
        tests=(*conformance, *(replace(test, location=location) for test in coin_tests)),
        bounds=(*likelihood_bounds, *(each.bound for each in attacks)),
        excess=next((excess for excess in excesses if excess is not None), None),
        round_bounds=round_bounds,
        loss_bound=loss_bound,
        has_both_worlds=plan.has_both_worlds,
        void_reason=run_outcomes.explain_unfair_coins(plan.alpha_allocation.compute_level("black box", "worlds"))
        if run_outcomes is not None and plan.has_both_worlds
        else "",
    )
    losses = np.concatenate([np.empty(0), *(pair.losses.total for pair in pairs if pair.losses is not None)])
    findings = add_detectable_effects(findings, plan, noise_count, losses)
    return findings.coin_free_findings if findings.void_reason else findings


def _run_likelihood_tests(
    plan: AuditPlan, pair: _Pair, mapper: Mapper, on_stage: Callable[[str], None]
) -> tuple[tuple[Bound, ...], RoundBounds | None]:
    """Guess by the exact loss, for whole runs and single rounds; return nothing if the adversary's view is too small."""
    if pair.started is None or not plan.has_both_worlds:
        return (), None
    on_stage("fixing thresholds")
    chunks = plan_chunks(count_rehearsal_runs(plan.runs), _count_chunk_runs(plan), plan.seeds.rehearsal)
    rehearsal = list(mapper(partial(_simulate_chunk, plan, losses_only=True), chunks))
    claimed = RunLosses.concatenate([part.run_losses for part in rehearsal if part.run_losses is not None])
    on_stage("whole runs and single rounds")
    level = plan.alpha_allocation.compute_level("likelihood", "whole runs", 2 if plan.delta else 1)
    bound = guess(pair.started, claimed, plan.epsilon, level)
    audited, rehearsed = (
        [part.round_losses for part in each if part.round_losses is not None] for each in (pair.parts, rehearsal)
    )
    if len(audited) < len(pair.parts):
        return (bound,), None
    return (bound,), bound_rounds(
        RoundLosses.concatenate(audited),
        RoundLosses.concatenate(rehearsed),
        plan.claim_per_round,
        plan.alpha_allocation,
    )


def _bound_at_delta(plan: AuditPlan, pair: _Pair) -> LossBound | None:
    """Bound epsilon at the plan's delta; None without a delta, or if the adversary's view is too small."""
    if pair.started is None or not plan.delta:
        return None
    level = plan.alpha_allocation.compute_level("likelihood", "whole runs", 2)
    return bound_at_delta(pair.started, plan.epsilon_at_delta, plan.delta, level)


def _run_coin_tests(
    plan: AuditPlan, pairs: Sequence[_Pair], run_outcomes: RunOutcomes | None, attacks: Sequence[Attack]
) -> tuple[Test, ...]:
    """Test, in all pairs, whether coins agree with the exact losses and nothing else depends on the world."""
    outcome_tests = () if run_outcomes is None else (run_outcomes.test(),)
    pair_runs = [each for pair in pairs if (each := pair.pair_runs) is not None]
    classifier_tests = run_classifier_tests(pair_runs[0], attacks) if pair_runs else ()
    world_tests = (
        *outcome_tests,
        *run_channel_tests(pair_runs),
        *run_private_quantity_tests(pair_runs),
        *classifier_tests,
    )
    losses = [pair.started for pair in pairs if pair.started is not None]
    return (
        *plan.alpha_allocation.assign_levels("calibration", run_calibration_tests(losses) if losses else ()),
        *plan.alpha_allocation.assign_levels("worlds", world_tests),
    )


def _select_black_box_claim(plan: AuditPlan, views: Iterable[str]) -> float:
    """Select the claim for the black box: numbers are from some rounds, but channel features are from all of them."""
    return plan.visible_epsilon if NUMBER_VIEWS.keys() >= set(views) else plan.epsilon


# ---- all learners ----------------------------------------------------------------------------------------------------


def _compute_learner_losses(plan: AuditPlan, transcript: Transcript) -> tuple[LearnerLoss, ...]:
    """Compute exact losses of every learner, for the most revealing replacement of its first record."""
    data = plan.worlds.build_data(plan.data, 0)
    if not plan.adversary.can_replay or plan.worlds.is_shared or len(data.learners) > _MAX_SWEEP_LEARNERS:
        return ()
    losses = []
    for i, own in enumerate(data.learners):
        if len(own.order) and (replacements := list_replacements(data, i, schema=plan.run.spec.data.schema)):
            claim = plan.run.guarantee(i, np.diff(own.offsets)).epsilon()
            (_, replacement), largest = find_worst_replacement(
                plan.run, transcript, (i,), own, replacements, compute_peak_losses
            )
            losses.append(LearnerLoss(i, replacement, claim, largest))
    return tuple(losses)
