"""The auditor's own test: does it catch broken learners, and how often does it accuse correct ones?

Every mutant is audited with more and more runs until it is refuted. Correct algorithms are audited many times with other seeds:
at a confidence of 95 %, at most one audit in twenty may refute one; under watch (`watch`), one in a thousand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sottovoce.auditing.audit import Audit, Examined, Work, audit_simulated
from sottovoce.auditing.bounds import SHARES
from sottovoce.auditing.plan import AuditPlan, plan_audit
from sottovoce.auditing.swaps import worst
from sottovoce.auditing.verdict import Findings, decide
from sottovoce.auditing.views import features
from sottovoce.auditing.worlds import Share
from sottovoce.data import PlacedData
from sottovoce.errors import SpecError
from sottovoce.lab.selftest.bases import BASES, Base
from sottovoce.lab.selftest.breaking import inside
from sottovoce.lab.selftest.doctoring import Spoken, notices
from sottovoce.lab.selftest.mutants import Broken, Family, Mutant
from sottovoce.noise import SeededNoise
from sottovoce.optional import import_extra
from sottovoce.running.run import Run
from sottovoce.running.simulator import simulate

_LADDER = (20, 100, 500, 2000)
"""Runs of each world that are tried, one after the other, up to a mutant's own limit."""

LEVEL, WATCH_LEVEL = 0.05, 0.001
"""Of false alarms: of an audit, and of a run under watch."""

RARE = 0.001
"""So many false alarms, or more, are too many if their chance is below this."""


# ---- broken learners -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MutantOutcome:
    """What came of a mutant.

    Attributes:
        name, what, expected, allowed: of the mutant.
        base: the run it was tried on.
        needed: runs of each world with which it was caught first; None: it was not.
        numbers: of noise that conformance looked at, by then.
        families: that saw it by themselves.
        evidence: the first piece of it.
        unfit: why it does not fit the run; empty: it does.
    """

    name: str
    what: str
    expected: Family
    allowed: int
    base: str
    needed: int | None = None
    numbers: int = 0
    families: tuple[Family, ...] = ()
    evidence: str = ""
    unfit: str = ""

    @property
    def missed(self) -> bool:
        """It fits, and was not caught."""
        return self.needed is None and not self.unfit


def base_of(mutant: Mutant) -> Base:
    """The run that it is tried on, unless one is given.

    Raises:
        SpecError: there is none of that name.
    """
    if mutant.base not in BASES:
        raise SpecError(f"{mutant.name}: base must be one of {', '.join(BASES)}, got {mutant.base}")
    return BASES[mutant.base]


def attempt(
    mutant: Mutant,
    run: Run,
    data: PlacedData,
    *,
    learner: int = 0,
    base: str = "",
    most: int | None = None,
    seed: int = 0,
) -> MutantOutcome:
    """Break a run, and look for who notices.

    Args:
        mutant: how.
        run: what is claimed to run.
        data: of all learners.
        learner: whose messages are audited.
        base: name of the run.
        most: runs of each world (default: the mutant's own limit).
        seed: of coins and noise.
    """
    blank = MutantOutcome(mutant.name, mutant.what, mutant.family, most or mutant.runs, base)
    try:
        worlds = None if mutant.swap is None else mutant.swap(run, data, learner)
        plan = plan_audit(run, data, learner, runs=_LADDER[0], seed=seed, worlds=worlds)
        broken = mutant.breaks(plan)
        if broken.heard is not None:
            return _noticed(blank, plan, broken)
    except SpecError as error:
        return replace(blank, unfit=str(error))
    if broken.leak is None:  # else the pairs of worlds that an audit chooses are part of what is tested
        worlds = plan.worlds
    for runs in _rungs(blank.allowed):
        done = audited(plan_audit(run, data, learner, runs=runs, seed=seed, worlds=worlds), broken)
        blank = replace(blank, numbers=done.numbers)
        if done.verdict.kind == "refuted":
            return replace(blank, needed=runs, families=seen_by(done.found), evidence=done.verdict.evidence[0])
    return blank


def _rungs(most: int) -> Iterator[int]:
    yield from (runs for runs in _LADDER if runs < most)
    yield max(most, _LADDER[0])


def audited(plan: AuditPlan, broken: Broken) -> Audit:
    """An audit on the simulator of what a broken learner says and gives away."""
    if broken.understated != 1.0:
        plan = _understated(plan, broken.understated)

    def over(work: Work, shares: Sequence[Share]) -> Iterator[Examined]:
        for share in shares:
            part = work(share)
            leaked = () if broken.leak is None else broken.leak(inside(plan, share))
            yield replace(part, channel=tuple({"channel": features([("leak", told)])} for told in leaked))

    return audit_simulated(plan, noise=broken.noise, actual=broken.actual, mapper=over)


def _understated(plan: AuditPlan, factor: float) -> AuditPlan:
    guarantee = plan.guarantee
    output = None if guarantee.output is None else factor * guarantee.output
    smaller = replace(guarantee, per_round=factor * guarantee.per_round, output=output)
    return replace(plan, claim=factor * plan.claim, guarantee=smaller)


def _noticed(blank: MutantOutcome, plan: AuditPlan, broken: Broken) -> MutantOutcome:
    """Hold the messages of one run against what must never happen, and against the budget."""
    assert broken.heard is not None  # noqa: S101 - the caller looked
    seen = notices(broken.heard(Spoken(plan)), plan)
    if not seen:
        return blank
    return replace(blank, needed=1, families=tuple(seen), evidence=next(iter(seen.values())))


def seen_by(found: Findings) -> tuple[Family, ...]:
    """The families whose findings refute the claim by themselves."""
    return tuple(family for family in SHARES if decide(found.of(family)).kind == "refuted")


# ---- correct learners ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Alarms:
    """False alarms of one correct algorithm.

    Attributes:
        name: of the run.
        refuted, audits: audits that refuted it, of how many.
        alarmed, watched: runs under watch that raised an alarm, of how many.
        families: that refuted it, in whichever audit.
    """

    name: str
    refuted: int
    audits: int
    alarmed: int
    watched: int
    families: tuple[Family, ...] = ()

    @property
    def too_many(self) -> bool:
        """Hardly any correct audit, or watch, would accuse it so often."""
        return (
            _chance(self.refuted, self.audits, LEVEL) < RARE or _chance(self.alarmed, self.watched, WATCH_LEVEL) < RARE
        )


def _chance(count: int, trials: int, level: float) -> float:
    """Of so many, or more, at this level."""
    return float(import_extra("scipy.stats", "scipy", "a self-test").binom.sf(count - 1, trials, level))


def false_alarms(
    run: Run,
    data: PlacedData,
    seeds: Sequence[int],
    *,
    name: str,
    learner: int = 0,
    runs: int = 20,
    watched: int = 4,
) -> Alarms:
    """Audit and watch a correct run, for every seed; one that promises nothing finite cannot be accused.

    Args:
        run: what runs.
        data: of all learners.
        seeds: of coins and noise.
        name: of the run.
        learner: whose messages are audited; all are watched.
        runs: of each world, in every audit.
        watched: runs under watch for every audit.
    """
    if not np.isfinite(run.guarantee(learner).per_round).all():
        return Alarms(name, 0, 0, 0, 0)
    worlds = worst(run, data, learner, np.random.SeedSequence(0))
    plans = [plan_audit(run, data, learner, runs=runs, seed=seed, worlds=worlds) for seed in seeds]
    refuted = [families for plan in plans if (families := seen_by(audit_simulated(plan).found))]
    families = tuple(dict.fromkeys(family for each in refuted for family in each))
    lots = [(seed, k) for seed in seeds for k in range(watched)]
    alarmed = sum(_alarm_under_watch(run, data, np.random.SeedSequence(lot)) for lot in lots)
    return Alarms(name, len(refuted), len(plans), alarmed, len(lots), families)


def _alarm_under_watch(run: Run, data: PlacedData, seed: np.random.SeedSequence, alpha: float = WATCH_LEVEL) -> bool:
    """Is there an alarm in a correct run?"""
    from sottovoce.lab.watch.watch import Watch  # it needs scipy from the start

    watch = Watch(run, data.learners, alpha, range(run.spec.n_learners))
    return any(watch.take(step.t, step.by_sender()) for step in simulate(run, data, SeededNoise(seed)))


def added(parts: Sequence[Alarms]) -> Alarms:
    """Alarms of one run, from several lots of seeds."""
    totals = {key: sum(getattr(part, key) for part in parts) for key in ("refuted", "audits", "alarmed", "watched")}
    families = tuple(dict.fromkeys(family for part in parts for family in part.families))
    return Alarms(parts[0].name, **totals, families=families)
