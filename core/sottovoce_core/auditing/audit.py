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
    calibration,
    run_channel_tests,
    run_classifier_tests,
    run_private_quantity_tests,
)
from sottovoce_core.auditing.likelihood import RoundLosses, RunLosses, RoundBounds, apart, bound_rounds, guess, ratios
from sottovoce_core.auditing.plan import AuditPlan
from sottovoce_core.auditing.swaps import peak, search, swaps
from sottovoce_core.auditing.verdict import Findings, Verdict, blamed, decide
from sottovoce_core.auditing.views import RunFeatures, tables
from sottovoce_core.auditing.worlds import (
    NoiseFactory,
    Recording,
    RunChunk,
    Tell,
    CoupledRuns,
    at_a_time,
    children,
    differences,
    nobody,
    count_numbers,
    overhear,
    shares,
    twins,
    within,
)
from sottovoce_core.noise import SeededNoise
from sottovoce_core.optional import import_optional
from sottovoce_core.privacy.guarantee import ThreatModel
from sottovoce_core.running.run import Run
from sottovoce_core.running.transcript import Transcript

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

Work = Callable[[RunChunk], "Examined"]
Mapper = Callable[[Work, Sequence[RunChunk]], Iterable["Examined"]]
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
    seen: FloatArray
    channel: tuple[Mapping[str, RunFeatures], ...]
    ratios: RunLosses | None
    apart: RoundLosses | None
    noise: Battery | None = None
    pair: int = 0
    private: FloatArray | None = None


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
    swap: str
    claim: float
    largest: float


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
    shown: RunLosses | None
    worlds: IntArray
    seen: FloatArray
    views: Mapping[str, int]
    about: int | None
    noise: FloatArray
    numbers: int
    learners: tuple[LearnerLoss, ...]
    twins: CoupledRuns
    found: Findings
    verdict: Verdict
    captures: Mapping[str, str] = field(default_factory=dict)
    coins: CoinSource = "seed"
    provisos: tuple[str, ...] = ()
    unproven: str = ""

    @property
    def black_box_claim(self) -> float:
        """The claim that the black box is held against."""
        return _claim_seen(self.plan, self.views)

    @property
    def largest(self) -> float:
        """The largest exact loss of any transcript; not-a-number where it is not known."""
        return float("nan") if self.shown is None else float(self.shown.largest.max())


# ---- runs ------------------------------------------------------------------------------------------------------------


def examine(
    plan: AuditPlan,
    part: Recording,
    pair: int = 0,
    single: RoundLosses | None = None,
    tell: Tell = nobody,
    *,
    losses_alone: bool = False,
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
    run, hears, transcript = plan.run, plan.listener, part.transcript
    noise = None
    if not losses_alone and hears.threat is not ThreatModel.OUTPUT:
        from sottovoce_core.auditing.conformance.battery import examine_noise  # it needs scipy from the start

        close = math.ceil(plan.close * transcript.replicas)
        share = min(1.0, transcript.replicas * count_numbers(run) / max(1, plan.numbers))
        noise = examine_noise(run, plan.data, plan.worlds, part.world, transcript, close, share, tell)
    replayed = ratios(run, plan.worlds, part, plan.claim) if hears.can_replay else None
    seen = np.nan_to_num(hears.seen(part, plan.worlds, run), nan=0.0)  # what nobody heard
    private = differences(run, plan.worlds, transcript) if hears.can_replay and part.channel else None
    return ChunkStatistics(part.world, seen, part.channel, replayed, single, noise, pair, private)


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
    pair = plan.pairs[share.pair]
    runs, coins, drawn = children(share.seed, 3)
    made = _MADE_OF_LOSSES if losses_alone else _MADE
    of_share = RunChunk(share.world, share.runs, runs, tell=within(share.tell, 0.0, made))
    decisions = pair.listener.threat is ThreatModel.OUTPUT
    part = overhear(actual or pair.run, pair.data, pair.worlds, of_share, noise, everybody=True, decisions=decisions)
    single = None
    if pair.listener.can_replay:
        single = apart(pair.run, pair.worlds, part.transcript, noise(drawn), np.random.default_rng(coins), actual)
    return examine(plan, part, share.pair, single, within(share.tell, made, 1.0), losses_alone=losses_alone)


def audit_simulated(
    plan: AuditPlan,
    *,
    noise: NoiseFactory = SeededNoise,
    actual: Run | None = None,
    mapper: Mapper = map,
    say: Callable[[str], None] = lambda what: None,
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
        share for k, pair in enumerate(plan.pairs) for share in shares(pair.runs, _most(plan), pair.seeds.audited, k)
    ]

    say("simulating and examining")
    heard = gathered(mapper(partial(_simulated, plan, noise=noise, actual=actual), lots))
    return conclude(plan, heard, _few(plan, noise, actual), "the simulator", mapper=mapper, say=say)


def gathered(parts: Iterable[ChunkStatistics]) -> list[ChunkStatistics]:
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
    decisions = plan.listener.threat is ThreatModel.OUTPUT
    return min(MAX_CHUNK_RUNS, at_a_time(plan.run, decisions=decisions))


def _few(plan: AuditPlan, noise: NoiseFactory, actual: Run | None) -> Transcript:
    """All that is said in a few runs of the first world."""
    run = actual or plan.run
    share = RunChunk(0, few(run), plan.seeds.swept)
    return overhear(run, plan.data, plan.worlds, share, noise, everybody=True).transcript


def few(run: Run) -> int:
    """Runs in which the losses of all learners are looked at, at most."""
    fitting = _MAX_SWEEP_NUMBERS * run.spec.n_learners // count_numbers(run)
    return max(1, min(_MAX_SWEEP_RUNS, fitting))


def rehearsed(runs: int) -> int:
    """Runs of each world from which thresholds are fixed: rare strong losses count where there are many runs."""
    return min(runs, max(500, runs // 10))


# ---- tests -----------------------------------------------------------------------------------------------------------


def conclude(
    plan: AuditPlan,
    heard: Sequence[ChunkStatistics],
    transcript: Transcript,
    source: str,
    *,
    starts: RunOutcomes | None = None,
    mapper: Mapper = map,
    say: Callable[[str], None] = lambda what: None,
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
    lost = {} if starts is None else starts.lost
    by_pair = ([part for part in heard if part.pair == k] for k in range(len(plan.pairs)))
    pairs = [_Pair(each, lost.get(each[0].pair)) for each in by_pair if each]
    first, noise = pairs[0], heard[0].noise
    found = _findings(plan, pairs, noise, starts, mapper, say)
    about = blamed(found, plan.run.spec.names, plan.worlds.learner)
    return Audit(
        plan=plan,
        source=source,
        shown=first.started,
        worlds=first.worlds,
        seen=first.seen,
        views={name: int((view != view[:1]).any(axis=0).sum()) for name, view in first.views.items()},
        about=about,
        noise=_shown(noise, about),
        numbers=0 if noise is None else noise.numbers,
        learners=_sweep(plan, transcript),
        twins=twins(plan.run, plan.data, plan.worlds, plan.seeds.twins),
        found=found,
        verdict=decide(found),
    )


def _shown(noise: Battery | None, learner: int | None) -> FloatArray:
    """Of this learner, or of all."""
    if noise is None or not noise.shown:
        return np.empty(0)
    return np.concatenate(noise.shown) if learner is None else noise.shown[learner]


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
        self.seen = np.concatenate([part.seen for part in parts])
        self.worlds = np.concatenate([np.full(len(part.seen), part.world) for part in parts])
        channel = [run for part in parts for run in part.channel]
        self.views = {**build_number_views(self.seen), **(tables(channel) if channel else {})}
        known = [part.ratios for part in parts if part.ratios is not None]
        self.losses = RunLosses.joined(known) if known else None
        self.started = RunLosses.joined([*known, lost]) if known and lost is not None else self.losses

    @property
    def judged(self) -> PairRuns | None:
        """For the tests of what the messages do not say; None where nobody knows what they do say."""
        if self.losses is None:
            return None
        known = [part.private for part in self.parts if part.private is not None]
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
    from sottovoce_core.auditing.verdict import reached

    numbers = 0 if noise is None else noise.numbers
    say("conformance")
    conformance = () if noise is None else noise.tests(plan.levels)
    guessed, rounds = _likelihood(plan, pairs[0], mapper, say)
    say("black box")
    views = pairs[0].views
    attacks = (
        attack(views, pairs[0].worlds, plan.levels, _claim_seen(plan, views), plan.seeds.black_box)
        if plan.paired
        else ()
    )
    where, coins = (
        plan.run.spec.names[plan.worlds.learner],
        _of_coins(plan, pairs, starts, attacks) if plan.paired else (),
    )
    claimed = ((pair.started, each.claim) for pair, each in zip(pairs, plan.pairs, strict=False))
    excesses = (started.excess(claim) for started, claim in claimed if started is not None)
    found = Findings(
        runs=plan.all_runs,
        levels=plan.levels,
        claim=plan.epsilon,
        tests=(*conformance, *(replace(test, where=where) for test in coins)),
        bounds=(*guessed, *(each.bound for each in attacks)),
        excess=next((excess for excess in excesses if excess is not None), None),
        rounds=rounds,
        paired=plan.paired,
        void=starts.void(plan.levels.of("black box", "worlds")) if starts is not None and plan.paired else "",
    )
    losses = np.concatenate([np.empty(0), *(pair.losses.total for pair in pairs if pair.losses is not None)])
    found = reached(found, plan, numbers, losses)
    return found.coin_free_findings if found.void else found


def _likelihood(
    plan: AuditPlan, pair: _Pair, mapper: Mapper, say: Callable[[str], None]
) -> tuple[tuple[Bound, ...], RoundBounds | None]:
    """Guesses by the exact loss, of whole runs and of single rounds; none to somebody who does not hear enough."""
    if pair.started is None or not plan.paired:
        return (), None
    say("fixing thresholds")
    lots = shares(rehearsed(plan.runs), _most(plan), plan.seeds.rehearsal)
    before = list(mapper(partial(_simulated, plan, losses_alone=True), lots))
    claimed = RunLosses.joined([part.ratios for part in before if part.ratios is not None])
    say("whole runs and single rounds")
    bound = guess(pair.started, claimed, plan.epsilon, plan.levels.of("likelihood", "whole runs"))
    audited, single = ([part.apart for part in each if part.apart is not None] for each in (pair.parts, before))
    if len(audited) < len(pair.parts):
        return (bound,), None
    return (bound,), bound_rounds(RoundLosses.joined(audited), RoundLosses.joined(single), plan.per_round, plan.levels)


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
        *plan.levels.judged("calibration", calibration(losses) if losses else ()),
        *plan.levels.judged("worlds", beside),
    )


def _claim_seen(plan: AuditPlan, views: Iterable[str]) -> float:
    """Numbers are those of some rounds; what a channel gives away is of all of them."""
    return plan.visible_epsilon if NUMBER_VIEWS.keys() >= set(views) else plan.epsilon


# ---- all learners ----------------------------------------------------------------------------------------------------


def _sweep(plan: AuditPlan, transcript: Transcript) -> tuple[LearnerLoss, ...]:
    """Exact losses of every learner, for the most telling swap of its first record."""
    data = plan.worlds.data(plan.data, 0)
    if not plan.listener.can_replay or plan.worlds.shared or len(data.learners) > _MAX_SWEEP_LEARNERS:
        return ()
    found = []
    for i, own in enumerate(data.learners):
        if len(own.order) and (tried := swaps(data, i, schema=plan.run.spec.data.schema)):
            claim = plan.run.guarantee(i, np.diff(own.offsets)).epsilon()
            (_, swap), largest = search(plan.run, transcript, (i,), own, tried, peak)
            found.append(LearnerLoss(i, swap, claim, largest))
    return tuple(found)
