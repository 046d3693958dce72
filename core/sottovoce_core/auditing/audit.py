"""An audit: two worlds, many runs of each, three families of tests, one verdict.

The runs come from the simulator, from real services or from captures. What is kept of them is small, so that they may be many,
and are made and examined side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from sottovoce_core.arrays import FloatArray, IntArray
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
    RoundBounds,
    RoundLosses,
    RunLosses,
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

if TYPE_CHECKING:
    from sottovoce_core.auditing.conformance.battery import Battery

_MAX_SWEEP_NUMBERS, _MAX_SWEEP_RUNS = 2**21, 20
"""Of the runs in which the exact losses of all learners are looked at: numbers, and runs, at most, but at least one run."""

_MAX_SWEEP_LEARNERS = 32
"""Learners, at most, whose exact losses are looked at beside the audited one's."""

MAX_CHUNK_RUNS = 2500
"""Runs in a share, at most, so that shares can be made side by side."""

_MADE, _MADE_OF_LOSSES = 0.1, 0.6
"""What share of the time of some runs their simulation takes, about: where their noise is examined, and where it is not."""

ChunkTask = Callable[[RunChunk], "ChunkStatistics"]
Mapper = Callable[[ChunkTask, Sequence[RunChunk]], Iterable["ChunkStatistics"]]
"""How shares are worked on: one after the other, as `map`, or side by side; in order."""
CoinSource = Literal["seed", "operating system", "not known", "none"]
"""What chose the world of every run; none: all are of one world."""


@dataclass(frozen=True, slots=True)
class ChunkStatistics:
    """What is kept of some runs of one world.

    Attributes:
        world: 0 or 1.
        seen: `(runs, rounds seen, numbers)` by the black box.
        channel: what else crossed the wire, of every run, by view; empty where nothing else did.
        ratios: exact losses; None where the listener does not hear enough.
        apart: single rounds' losses; None where rounds cannot be drawn anew.
        noise: what conformance keeps of the noise of all learners; None where the listener hears no message.
        pair: of worlds, by its place in `AuditPlan.pairs`.
        private: `(runs, quantities)` how much the worlds differ in what the learner keeps to itself (`private`); None where
            nothing else crossed the wire that could tell it, or where the listener does not hear enough.
    """

    world: int
    visible_numbers: FloatArray
    channel_features: tuple[Mapping[str, RunFeatures], ...]
    run_losses: RunLosses | None
    round_losses: RoundLosses | None
    noise: Battery | None = None
    pair_index: int = 0
    private_differences: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class LearnerLoss:
    """Exact losses of one learner in a few runs, for the swap among those tried that they tell apart best.

    That is seen in hindsight, so it is hardly the swap of the audit: of the audited learner there are two losses.

    Attributes:
        learner: its index.
        swap: which, in words.
        claim: epsilon for the swap.
        largest: the largest absolute loss of any run by any round.
    """

    learner: int
    replacement: str
    claim: float
    largest_loss: float


@dataclass(frozen=True, slots=True)
class Audit:
    """What was audited, and what came of it.

    Attributes:
        plan: what was audited.
        source: where the runs came from, in words.
        shown: exact losses of all runs; None where the listener does not hear enough.
        worlds: `(runs,)` of each run, in order.
        seen: `(runs, rounds seen, numbers)` by the black box.
        views: what the classifiers could look at, and how many of its numbers are not the same in all runs.
        about: the learner whose promise the verdict is about: the one of the swap, or one whose noise alone refutes it. None:
            the noise of several does, or that of all together.
        noise: some of this learner's noise, or of all, standardised: independent standard Laplace numbers if all is well.
        numbers: of noise, of all learners, that conformance looked at.
        learners: exact losses of all learners in a few runs.
        twins: two runs that differ in the record alone.
        found: what the tests found.
        verdict: what may be said.
        captures: SHA-256 of every capture that was read, by name; none where runs were simulated.
        coins: what chose the world of every run.
        provisos: what must be known of the runs besides to judge the verdict, a sentence each.
        unproven: why captures do not prove what their learners said, in a few words; empty: they do, or runs were made here.
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

    @property
    def black_box_claim(self) -> float:
        """The claim that the black box is held against."""
        return _claim_seen(self.plan, self.varying_counts)

    @property
    def largest_loss(self) -> float:
        """The largest exact loss of any transcript; not-a-number where it is not known."""
        return float("nan") if self.run_losses is None else float(self.run_losses.largest_losses.max())


# ---- runs ------------------------------------------------------------------------------------------------------------


def compute_chunk_statistics(
    plan: AuditPlan,
    part: RecordedRuns,
    pair: int = 0,
    single: RoundLosses | None = None,
    tell: ProgressCallback = discard_progress,
    *,
    losses_only: bool = False,
) -> ChunkStatistics:
    """Keep what the tests need of some runs.

    Args:
        plan: the audit, of all pairs of worlds.
        part: what was heard of these runs, which live in one world.
        pair: of worlds, by its place in the plan.
        single: losses of single rounds, where these were drawn anew.
        tell: is told how far it is, in what takes long.
        losses_alone: their noise is not examined.
    """
    plan = plan.pairs[pair]
    run, hears, transcript = plan.run, plan.adversary, part.transcript
    noise = None
    if not losses_only and hears.threat is not ThreatModel.OUTPUT:
        from sottovoce_core.auditing.conformance.battery import examine_noise  # it needs scipy from the start

        close = math.ceil(plan.dependence_fraction * transcript.replicas)
        share = min(1.0, transcript.replicas * count_numbers(run) / max(1, plan.noise_count))
        noise = examine_noise(run, plan.data, plan.worlds, part.world, transcript, close, share, tell)
    replayed = compute_run_losses(run, plan.worlds, part, plan.claim) if hears.can_replay else None
    seen = np.nan_to_num(hears.extract_visible_numbers(part, plan.worlds, run), nan=0.0)  # what nobody heard
    private = (
        compute_private_differences(run, plan.worlds, transcript)
        if hears.can_replay and part.channel_features
        else None
    )
    return ChunkStatistics(part.world, seen, part.channel_features, replayed, single, noise, pair, private)


def _simulated(
    plan: AuditPlan,
    share: RunChunk,
    noise: NoiseFactory = SeededNoise,
    actual: Run | None = None,
    *,
    losses_alone: bool = False,
) -> ChunkStatistics:
    """Simulate some runs and examine them.

    Args:
        plan: the audit, of all pairs of worlds.
        share: which runs.
        noise: where their noise comes from.
        actual: what really runs (default: what is claimed).
        losses_alone: their noise is not examined.
    """
    pair = plan.pairs[share.pair_index]
    runs, coins, drawn = spawn_seeds(share.seed, 3)
    made = _MADE_OF_LOSSES if losses_alone else _MADE
    of_share = RunChunk(share.world, share.runs, runs, on_progress=scale_progress(share.on_progress, 0.0, made))
    decisions = pair.adversary.threat is ThreatModel.OUTPUT
    part = simulate_runs(
        actual or pair.run, pair.data, pair.worlds, of_share, noise, keep_all_learners=True, keep_decisions=decisions
    )
    single = None
    if pair.adversary.can_replay:
        single = redraw_rounds(
            pair.run, pair.worlds, part.transcript, noise(drawn), np.random.default_rng(coins), actual
        )
    return compute_chunk_statistics(
        plan, part, share.pair_index, single, scale_progress(share.on_progress, made, 1.0), losses_only=losses_alone
    )


def audit_simulated(
    plan: AuditPlan,
    *,
    noise: NoiseFactory = SeededNoise,
    actual_run: Run | None = None,
    mapper: Mapper = map,
    on_stage: Callable[[str], None] = lambda what: None,
) -> Audit:
    """Audit on the simulator.

    Args:
        plan: the audit.
        noise: where the audited run's noise comes from (default: what is claimed).
        actual: what really runs (default: what is claimed).
        mapper: how shares of the runs are worked on; each says how far it is (`RunChunk.tell`).
        say: told what is being done.

    Raises:
        SpecError: scipy or scikit-learn are not installed.
    """
    lots = [
        share
        for k, pair in enumerate(plan.pairs)
        for share in plan_chunks(pair.runs, _most(plan), pair.seeds.audited_runs, k)
    ]

    on_stage("simulating and examining")
    heard = merge_noise(mapper(partial(_simulated, plan, noise=noise, actual=actual_run), lots))
    return conclude(plan, heard, _few(plan, noise, actual_run), "the simulator", mapper=mapper, on_stage=on_stage)


def merge_noise(parts: Iterable[ChunkStatistics]) -> list[ChunkStatistics]:
    """All parts, the noise of all of them in the first one, for what is kept of it is large."""
    kept: list[ChunkStatistics] = []
    for part in parts:
        whole = kept[0].noise if kept else None
        if whole is None:
            part = replace(part, noise=deepcopy(part.noise))  # what comes from another process may be read-only (Ray)
        elif part.noise is not None:
            whole.merge(part.noise)
            part = replace(part, noise=None)
        kept.append(part)
    return kept


def _most(plan: AuditPlan) -> int:
    """Of how many runs a share is, at most."""
    decisions = plan.adversary.threat is ThreatModel.OUTPUT
    return min(MAX_CHUNK_RUNS, count_runs_in_memory(plan.run, keep_decisions=decisions))


def _few(plan: AuditPlan, noise: NoiseFactory, actual: Run | None) -> Transcript:
    """All that is said in a few runs of the first world."""
    run = actual or plan.run
    share = RunChunk(0, count_sweep_runs(run), plan.seeds.sweep)
    return simulate_runs(run, plan.data, plan.worlds, share, noise, keep_all_learners=True).transcript


def count_sweep_runs(run: Run) -> int:
    """Runs in which the losses of all learners are looked at, at most."""
    fitting = _MAX_SWEEP_NUMBERS * run.spec.n_learners // count_numbers(run)
    return max(1, min(_MAX_SWEEP_RUNS, fitting))


def count_rehearsal_runs(runs: int) -> int:
    """Runs of each world from which thresholds are fixed: rare strong losses count where there are many runs."""
    return min(runs, max(500, runs // 10))


# ---- tests -----------------------------------------------------------------------------------------------------------


def conclude(
    plan: AuditPlan,
    heard: Sequence[ChunkStatistics],
    transcript: Transcript,
    source: str,
    *,
    run_outcomes: RunOutcomes | None = None,
    mapper: Mapper = map,
    on_stage: Callable[[str], None] = lambda what: None,
) -> Audit:
    """All tests of what was heard, and the verdict.

    Args:
        plan: the audit.
        heard: what was heard, in order, in all pairs of worlds (`gathered`).
        transcript: all that was said in a few runs of the first world (`few`).
        source: where the runs came from, in words.
        starts: all runs that were started, and how they ended; None: all were simulated to their end.
        mapper: how shares of the runs that thresholds are fixed on are worked on.
        say: told what is being done.

    Raises:
        SpecError: scipy or scikit-learn are not installed.
    """
    for extra, package in (("scipy", "scipy"), ("sklearn", "scikit-learn")):
        import_optional(extra, package, "an audit")
    lost = {} if run_outcomes is None else run_outcomes.incomplete_losses
    by_pair = ([part for part in heard if part.pair_index == k] for k in range(len(plan.pairs)))
    pairs = [_Pair(each, lost.get(each[0].pair_index)) for each in by_pair if each]
    first, noise = pairs[0], heard[0].noise
    found = _findings(plan, pairs, noise, run_outcomes, mapper, on_stage)
    about = find_blamed_learner(found, plan.run.spec.names, plan.worlds.learner)
    return Audit(
        plan=plan,
        source=source,
        run_losses=first.started,
        run_worlds=first.worlds,
        visible_numbers=first.seen,
        varying_counts={name: int((view != view[:1]).any(axis=0).sum()) for name, view in first.views.items()},
        verdict_learner=about,
        noise=_shown(noise, about),
        noise_count=0 if noise is None else noise.noise_count,
        learner_losses=_sweep(plan, transcript),
        coupled_runs=simulate_coupled_runs(plan.run, plan.data, plan.worlds, plan.seeds.coupled_runs),
        findings=found,
        verdict=decide(found),
    )


def _shown(noise: Battery | None, learner: int | None) -> FloatArray:
    """Of this learner, or of all."""
    if noise is None or not noise.noise_samples:
        return np.empty(0)
    return np.concatenate(noise.noise_samples) if learner is None else noise.noise_samples[learner]


class _Pair:
    """Runs of one pair of worlds, as tests look at them.

    Attributes:
        parts: what was heard of them.
        seen, worlds: of all of them, by the black box; and the world of each.
        views: what classifiers may look at.
        losses: exact losses of whole runs; None where the listener does not hear enough.
        started: the same of all started runs: none is left out for its end.
    """

    def __init__(self, parts: Sequence[ChunkStatistics], lost: RunLosses | None) -> None:
        self.parts = parts
        self.seen = np.concatenate([part.visible_numbers for part in parts])
        self.worlds = np.concatenate([np.full(len(part.visible_numbers), part.world) for part in parts])
        channel = [run for part in parts for run in part.channel_features]
        self.views = {**build_number_views(self.seen), **(build_tables(channel) if channel else {})}
        known = [part.run_losses for part in parts if part.run_losses is not None]
        self.losses = RunLosses.concatenate(known) if known else None
        self.started = RunLosses.concatenate([*known, lost]) if known and lost is not None else self.losses

    @property
    def judged(self) -> PairRuns | None:
        """For the tests of what the messages do not say; None where nobody knows what they do say."""
        if self.losses is None:
            return None
        known = [part.private_differences for part in self.parts if part.private_differences is not None]
        private = np.concatenate(known) if len(known) == len(self.parts) else None
        return PairRuns(self.losses.total, 1 - self.losses.worlds, self.views, private)


def _findings(
    plan: AuditPlan,
    pairs: Sequence[_Pair],
    noise: Battery | None,
    starts: RunOutcomes | None,
    mapper: Mapper,
    say: Callable[[str], None],
) -> Findings:
    """What all families find; where the coins are none, only what needs no coin."""
    from sottovoce_core.auditing.verdict import add_detectable_effects

    numbers = 0 if noise is None else noise.noise_count
    say("conformance")
    conformance = () if noise is None else noise.compute_tests(plan.alpha_allocation)
    guessed, rounds = _likelihood(plan, pairs[0], mapper, say)
    say("black box")
    views = pairs[0].views
    attacks = (
        attack(views, pairs[0].worlds, plan.alpha_allocation, _claim_seen(plan, views), plan.seeds.black_box)
        if plan.has_both_worlds
        else ()
    )
    where, coins = (
        plan.run.spec.names[plan.worlds.learner],
        _of_coins(plan, pairs, starts, attacks) if plan.has_both_worlds else (),
    )
    claimed = ((pair.started, each.claim) for pair, each in zip(pairs, plan.pairs, strict=False))
    excesses = (started.find_excess(claim) for started, claim in claimed if started is not None)
    found = Findings(
        runs=plan.total_runs,
        alpha_allocation=plan.alpha_allocation,
        claim=plan.epsilon,
        tests=(*conformance, *(replace(test, location=where) for test in coins)),
        bounds=(*guessed, *(each.bound for each in attacks)),
        excess=next((excess for excess in excesses if excess is not None), None),
        round_bounds=rounds,
        has_both_worlds=plan.has_both_worlds,
        void_reason=starts.explain_unfair_coins(plan.alpha_allocation.compute_level("black box", "worlds"))
        if starts is not None and plan.has_both_worlds
        else "",
    )
    losses = np.concatenate([np.empty(0), *(pair.losses.total for pair in pairs if pair.losses is not None)])
    found = add_detectable_effects(found, plan, numbers, losses)
    return found.coin_free_findings if found.void_reason else found


def _likelihood(
    plan: AuditPlan, pair: _Pair, mapper: Mapper, say: Callable[[str], None]
) -> tuple[tuple[Bound, ...], RoundBounds | None]:
    """Guesses by the exact loss, of whole runs and of single rounds; none to somebody who does not hear enough."""
    if pair.started is None or not plan.has_both_worlds:
        return (), None
    say("fixing thresholds")
    lots = plan_chunks(count_rehearsal_runs(plan.runs), _most(plan), plan.seeds.rehearsal)
    before = list(mapper(partial(_simulated, plan, losses_alone=True), lots))
    claimed = RunLosses.concatenate([part.run_losses for part in before if part.run_losses is not None])
    say("whole runs and single rounds")
    bound = guess(pair.started, claimed, plan.epsilon, plan.alpha_allocation.compute_level("likelihood", "whole runs"))
    audited, single = (
        [part.round_losses for part in each if part.round_losses is not None] for each in (pair.parts, before)
    )
    if len(audited) < len(pair.parts):
        return (bound,), None
    return (bound,), bound_rounds(
        RoundLosses.concatenate(audited), RoundLosses.concatenate(single), plan.claim_per_round, plan.alpha_allocation
    )


def _of_coins(
    plan: AuditPlan, pairs: Sequence[_Pair], starts: RunOutcomes | None, attacks: Sequence[Attack]
) -> tuple[Test, ...]:
    """Whether exact losses say how often they are right, and nothing else depends on the world, in any pair."""
    ends = () if starts is None else (starts.test(),)
    judged = [each for pair in pairs if (each := pair.judged) is not None]
    learned = run_classifier_tests(judged[0], attacks) if judged else ()
    beside = (*ends, *run_channel_tests(judged), *run_private_quantity_tests(judged), *learned)
    losses = [pair.started for pair in pairs if pair.started is not None]
    return (
        *plan.alpha_allocation.assign_levels("calibration", run_calibration_tests(losses) if losses else ()),
        *plan.alpha_allocation.assign_levels("worlds", beside),
    )


def _claim_seen(plan: AuditPlan, views: Iterable[str]) -> float:
    """Numbers are those of some rounds; what a channel gives away is of all of them."""
    return plan.visible_epsilon if NUMBER_VIEWS.keys() >= set(views) else plan.epsilon


# ---- all learners ----------------------------------------------------------------------------------------------------


def _sweep(plan: AuditPlan, transcript: Transcript) -> tuple[LearnerLoss, ...]:
    """Exact losses of every learner, for the most telling swap of its first record."""
    data = plan.worlds.build_data(plan.data, 0)
    if not plan.adversary.can_replay or plan.worlds.is_shared or len(data.learners) > _MAX_SWEEP_LEARNERS:
        return ()
    found = []
    for i, own in enumerate(data.learners):
        if len(own.order) and (tried := list_replacements(data, i, schema=plan.run.spec.data.schema)):
            claim = plan.run.guarantee(i, np.diff(own.offsets)).epsilon()
            (_, swap), largest = find_worst_replacement(plan.run, transcript, (i,), own, tried, compute_peak_losses)
            found.append(LearnerLoss(i, swap, claim, largest))
    return tuple(found)
