"""An audit: two worlds, many runs of each, three families of tests, one verdict.

The runs come from the simulator, from real services or from captures. What is kept of them is small, so that they may be many,
and are made and examined side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.auditing.blackbox import VIEWS, attack, number_views
from sottovoce.auditing.bounds import Bound
from sottovoce.auditing.levels import Test
from sottovoce.auditing.likelihood import Ratios, guess, overconfidence, ratios
from sottovoce.auditing.plan import AuditPlan
from sottovoce.auditing.rounds import Apart, RoundBounds, apart, bound_rounds
from sottovoce.auditing.simulated import NoiseOf, Recording, Share, at_a_time, children, overhear, shares
from sottovoce.auditing.swaps import peak, search, swaps
from sottovoce.auditing.twins import Twins, twins
from sottovoce.auditing.verdict import Findings, Verdict, decide
from sottovoce.auditing.views import Features, tables
from sottovoce.data.files import import_extra
from sottovoce.noise import SeededNoise
from sottovoce.privacy.guarantee import ThreatModel
from sottovoce.running.run import Run
from sottovoce.running.transcript import Transcript

CONFORMING_NUMBERS, CONFORMING_RUNS = 2**21, 20
"""Of the transcript that conformance sees: numbers, and runs, at most, but at least one run."""

SWEPT = 32
"""Learners, at most, whose exact losses are looked at beside the audited one's."""

SHARE_RUNS = 2500
"""Runs in a share, at most, so that shares can be made side by side."""

Work = Callable[[Share], "Examined"]
Mapper = Callable[[Work, Sequence[Share]], Iterable["Examined"]]
"""How shares are worked on: one after the other, as `map`, or side by side; in order."""


@dataclass(frozen=True, slots=True)
class Examined:
    """What is kept of some runs of one world.

    Attributes:
        world: 0 or 1.
        seen: `(runs, rounds seen, numbers)` by the black box.
        channel: what else crossed the wire, of every run, by view; empty where nothing else did.
        ratios: exact losses; None where the listener does not hear enough.
        apart: single rounds' losses; None where rounds cannot be drawn anew.
    """

    world: int
    seen: FloatArray
    channel: tuple[Mapping[str, Features], ...]
    ratios: Ratios | None
    apart: Apart | None


@dataclass(frozen=True, slots=True)
class LearnerLoss:
    """Exact losses of one learner in the runs that conformance sees, for the worst swap among those tried.

    Attributes:
        learner: its index.
        claim: epsilon for the swap.
        largest: the largest absolute loss of any run by any round.
    """

    learner: int
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
        noise: standardised noise of the learner's messages, independent standard Laplace numbers if all is well.
        learners: exact losses of all learners in a few runs.
        twins: two runs that differ in the record alone.
        found: what the tests found.
        verdict: what may be said.
    """

    plan: AuditPlan
    source: str
    shown: Ratios | None
    worlds: IntArray
    seen: FloatArray
    views: Mapping[str, int]
    noise: FloatArray
    learners: tuple[LearnerLoss, ...]
    twins: Twins
    found: Findings
    verdict: Verdict

    @property
    def claim_seen(self) -> float:
        """The claim that the black box is held against."""
        return _claim_seen(self.plan, self.views)

    @property
    def largest(self) -> float:
        """The largest exact loss of any transcript; not-a-number where it is not known."""
        return float("nan") if self.shown is None else float(self.shown.largest.max())


# ---- runs ------------------------------------------------------------------------------------------------------------


def examine(plan: AuditPlan, part: Recording, single: Apart | None = None) -> Examined:
    """Keep what the tests need of some runs."""
    replayed = ratios(plan.run, plan.worlds, part, plan.claim) if plan.listener.replayable else None
    seen = np.nan_to_num(plan.listener.seen(part, plan.worlds, plan.run), nan=0.0)  # what nobody heard
    return Examined(part.world, seen, part.channel, replayed, single)


def _simulated(plan: AuditPlan, share: Share, noise: NoiseOf = SeededNoise, actual: Run | None = None) -> Examined:
    """Simulate some runs and examine them.

    Args:
        plan: the audit.
        share: which runs.
        noise: where their noise comes from.
        actual: what really runs (default: what is claimed).
    """
    runs, coins, drawn = children(share.seed, 3)
    of_share = Share(share.world, share.runs, runs)
    decisions = plan.listener.threat is ThreatModel.OUTPUT
    part = overhear(actual or plan.run, plan.data, plan.worlds, of_share, noise, decisions=decisions)
    single = None
    if plan.listener.replayable:
        generator = np.random.default_rng(coins)
        single = apart(plan.run, plan.worlds, part.transcript, noise(drawn), generator, actual)
    return examine(plan, part, single)


def audit_simulated(
    plan: AuditPlan,
    *,
    noise: NoiseOf = SeededNoise,
    actual: Run | None = None,
    mapper: Mapper = map,
    say: Callable[[str], None] = lambda what: None,
) -> Audit:
    """Audit on the simulator.

    Args:
        plan: the audit.
        noise: where the audited run's noise comes from (default: what is claimed).
        actual: what really runs (default: what is claimed).
        mapper: how shares of the runs are worked on.
        say: told what is being done.

    Raises:
        SpecError: scipy or scikit-learn are not installed.
    """
    parts, done = [], 0
    work = partial(_simulated, plan, noise=noise, actual=actual)
    for part in mapper(work, shares(plan.runs, _most(plan), plan.seeds.audited)):
        parts.append(part)
        done += len(part.seen)
        say(f"{done:,} of {2 * plan.runs:,} runs")
    return conclude(plan, parts, _conforming(plan, noise, actual), "the simulator", mapper=mapper, say=say)


def _most(plan: AuditPlan) -> int:
    """Of how many runs a share is, at most."""
    decisions = plan.listener.threat is ThreatModel.OUTPUT
    return min(SHARE_RUNS, at_a_time(plan.run, plan.worlds, decisions=decisions))


def _conforming(plan: AuditPlan, noise: NoiseOf, actual: Run | None) -> Transcript:
    """All that is said in a few runs of the first world."""
    run = actual or plan.run
    share = Share(0, conforming(run), plan.seeds.conformance)
    return overhear(run, plan.data, plan.worlds, share, noise, everybody=True).transcript


def conforming(run: Run) -> int:
    """Runs that conformance sees, at most."""
    numbers = sum(int(np.prod(shape)) for shape in run.algorithm.field_shapes().values())
    fitting = CONFORMING_NUMBERS // (run.spec.rounds * run.spec.n_learners * numbers)
    return max(1, min(CONFORMING_RUNS, fitting))


def rehearsed(runs: int) -> int:
    """Runs of each world from which thresholds are fixed: rare strong losses count where there are many runs."""
    return min(runs, max(500, runs // 10))


# ---- tests -----------------------------------------------------------------------------------------------------------


def conclude(
    plan: AuditPlan,
    parts: Sequence[Examined],
    transcript: Transcript,
    source: str,
    *,
    mapper: Mapper = map,
    say: Callable[[str], None] = lambda what: None,
) -> Audit:
    """All tests of what was heard, and the verdict.

    Args:
        plan: the audit.
        parts: what was heard, in order.
        transcript: all that was said in a few runs of the first world.
        source: where the runs came from, in words.
        mapper: how shares of the runs that thresholds are fixed on are worked on.
        say: told what is being done.

    Raises:
        SpecError: scipy or scikit-learn are not installed.
    """
    for extra, package in (("scipy", "scipy"), ("sklearn", "scikit-learn")):
        import_extra(extra, package, "an audit")
    worlds = np.concatenate([np.full(len(part.seen), part.world) for part in parts])
    seen = np.concatenate([part.seen for part in parts])
    say("conformance")
    tests, noise = _conformance(plan, transcript)
    say("single rounds")
    shown = (
        Ratios.joined([part.ratios for part in parts if part.ratios is not None]) if plan.listener.replayable else None
    )
    right, likeliest, rounds = _likelihood(plan, parts, shown, mapper)
    say("black box")
    views = {**number_views(seen), **_channel(parts)}
    found = Findings(
        runs=plan.runs,
        levels=plan.levels,
        claim=plan.epsilon,
        tests=(*tests, *right),
        bounds=(*likeliest, *_black_box(plan, views, worlds)),
        excess=None if shown is None else shown.excess(plan.claim),
        rounds=rounds,
        paired=plan.paired,
    )
    swept = _sweep(plan, transcript)
    drawn = twins(plan.run, plan.data, plan.worlds, plan.seeds.twins)
    offered = {name: int((view != view[:1]).any(axis=0).sum()) for name, view in views.items()}
    return Audit(plan, source, shown, worlds, seen, offered, noise, swept, drawn, found, decide(found))


def _conformance(plan: AuditPlan, transcript: Transcript) -> tuple[tuple[Test, ...], FloatArray]:
    """Tests of the learner's noise, and its numbers; none to somebody who sees no message."""
    from sottovoce.auditing.conformance import examine as tests_of  # they need scipy from the start
    from sottovoce.auditing.conformance import residuals

    if plan.listener.threat is ThreatModel.OUTPUT:
        return (), np.empty(0)
    learner, data = plan.worlds.learner, plan.worlds.data(plan.data, 0)
    each = [residuals(plan.run, transcript, data, i) for i in range(plan.run.spec.n_learners)]
    own = each[learner]
    numbers = np.concatenate([np.empty(0), *(part.values[np.isfinite(part.values)] for part in own)])
    tests = tests_of(own, [other for i, other in enumerate(each) if i != learner])
    return plan.levels.judged("conformance", "noise", tests), numbers


def _likelihood(
    plan: AuditPlan, parts: Sequence[Examined], shown: Ratios | None, mapper: Mapper
) -> tuple[tuple[Test, ...], tuple[Bound, ...], RoundBounds | None]:
    """Guesses by the exact loss, of whole runs and of single rounds; none to somebody who does not hear enough."""
    if shown is None or not plan.paired:
        return (), (), None
    before = list(mapper(partial(_simulated, plan), shares(rehearsed(plan.runs), _most(plan), plan.seeds.rehearsal)))
    claimed = Ratios.joined([part.ratios for part in before if part.ratios is not None])
    bound = guess(shown, claimed, plan.epsilon, plan.levels.of("likelihood", "whole runs"))
    test = overconfidence(shown, plan.run.spec.names[plan.worlds.learner])
    tests = plan.levels.judged("likelihood", "right guesses", (test,))
    return tests, (bound,), _rounds(plan, parts, before)


def _rounds(plan: AuditPlan, parts: Sequence[Examined], before: Sequence[Examined]) -> RoundBounds | None:
    audited, claimed = ([p.apart for p in each if p.apart is not None] for each in (parts, before))
    if len(audited) < len(parts):
        return None
    return bound_rounds(Apart.joined(audited), Apart.joined(claimed), plan.per_round, plan.levels)


def _black_box(plan: AuditPlan, views: Mapping[str, FloatArray], worlds: IntArray) -> tuple[Bound, ...]:
    """Guesses of classifiers, where there are two worlds."""
    if not plan.paired:
        return ()
    return attack(views, worlds, plan.levels, _claim_seen(plan, views), plan.seeds.black_box)


def _claim_seen(plan: AuditPlan, views: Iterable[str]) -> float:
    """Numbers are those of some rounds; what a channel gives away is of all of them."""
    return plan.epsilon_seen if VIEWS.keys() >= set(views) else plan.epsilon


def _channel(parts: Sequence[Examined]) -> dict[str, FloatArray]:
    heard = [run for part in parts for run in part.channel]
    return tables(heard) if heard else {}


# ---- all learners ----------------------------------------------------------------------------------------------------


def _sweep(plan: AuditPlan, transcript: Transcript) -> tuple[LearnerLoss, ...]:
    """Exact losses of every learner, for the most telling swap of its first record."""
    data = plan.worlds.data(plan.data, 0)
    if not plan.listener.replayable or plan.worlds.shared or len(data.learners) > SWEPT:
        return ()
    found = []
    for i, own in enumerate(data.learners):
        if len(own.order) and (tried := swaps(data, i)):
            claim = plan.run.guarantee(i, np.diff(own.offsets)).epsilon()
            found.append(LearnerLoss(i, claim, search(plan.run, transcript, (i,), own, tried, peak).score))
    return tuple(found)
