"""Measurement of power: with how many runs an audit finds a mutant, or a broken service, nine times in ten.

A fault of the noise is looked for by conformance, which must see it; any other fault by the whole audit. A fault that a single
run may show is also watched. A broken service is audited with more and more runs, in some audits of each size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from sottovoce_core.auditing.plan import AuditPlan, plan_audit
from sottovoce_core.auditing.worlds import at_a_time, overhear, shares
from sottovoce_core.errors import SpecError
from sottovoce_core.noise import SeededNoise
from sottovoce_lab.mutants import FOUND, Broken, Kind, Mutant, mirrored
from sottovoce_lab.trial import audited, base_of, rounds_to_alarm, seen_by, strongest, too_many

# ---- power -----------------------------------------------------------------------------------------------------------

LADDER = (5, 10, 20, 50, 100, 200, 500, 1000, 2000)
"""Runs of each world that are tried, one after the other."""

CONFIDENCE = 0.99
"""With which none of these audits would refute a correct learner."""

ENOUGH = 4.0
"""Times the evidence that the best of all tests needs: an audit looks at much else, and is to find it nine times in ten."""

WATCHED = 200
"""Rounds under watch, at most."""


@dataclass(frozen=True, slots=True)
class Power:
    """With how much a broken learner is found.

    Attributes:
        name, what, kind: of the mutant.
        base: the run that it is tried on.
        audits: how often it is tried with as many runs.
        needed: runs of each world with which enough audits find it; None: not with those that were tried.
        found_by: the part of the audit that found it most often, there.
        limit: runs of each world that carry the evidence it takes; None: that is not known.
        rounds: within which enough runs under watch raise an alarm; None: not within those that were watched.
        watched: runs under watch; 0: there is nothing to watch.
    """

    name: str
    what: str
    kind: Kind | None
    base: str
    audits: int
    needed: int | None = None
    found_by: str = ""
    limit: float | None = None
    rounds: int | None = None
    watched: int = 0

    def missed(self, most: int) -> bool:
        """It was not found, though so many runs carry enough evidence, or nobody knows how many do."""
        return self.needed is None and (self.limit is None or ENOUGH * self.limit <= most)


def measure(mutant: Mutant, *, audits: int = 10, seed: int = 0, most: int = LADDER[-1]) -> Power:
    """Audit a broken learner with more and more runs, each number of runs with several seeds, and watch it.

    Args:
        mutant: how it is broken; tried on its own base.
        audits: seeds of each number of runs.
        seed: of the first audit.
        most: runs of each world.

    Raises:
        SpecError: it does not fit its base, or there is no such base.
    """
    run, data = base_of(mutant).build()
    worlds = None if mutant.swap is None else mutant.swap(run, data, 0)
    plan = plan_audit(run, data, 0, runs=LADDER[0], confidence=CONFIDENCE, worlds=worlds)
    if mutant.breaks(plan).leak is None:  # else the pairs of worlds that an audit chooses are part of what is tested
        worlds = plan.worlds
    limit = None if mutant.limit is None else mutant.limit(run, 1.0 - CONFIDENCE)
    blank = Power(mutant.name, mutant.what, mutant.kind, mutant.base, audits, limit=limit)

    def plans(runs: int) -> Iterator[AuditPlan]:
        for k in range(audits):
            yield plan_audit(run, data, 0, runs=runs, confidence=CONFIDENCE, seed=seed + k, worlds=worlds)

    certain = mutant.family in ("notices", "ledger")  # what must never be is seen in one run
    # With less than half of the evidence that the best test needs, no audit finds it nine times in ten.
    worth = [rung for rung in LADDER if rung <= most and 2.0 * rung >= (limit or 0.0)]
    for runs in worth:
        if found := _found_in((_found_by(mutant, plan) for plan in plans(runs)), audits):
            found_by = found.most_common(1)[0][0]
            return replace(_under_watch(blank, mutant, audits, seed), needed=1 if certain else runs, found_by=found_by)
    return _under_watch(blank, mutant, audits, seed)


def _found_in(finders: Iterable[str], audits: int) -> Counter[str]:
    """What found something in how many audits; nothing once it was missed more often than may be.

    Args:
        finders: of every audit, as they are held, the part that found it; empty: none did.
        audits: how many there are.
    """
    found, spare = Counter[str](), math.floor((1.0 - FOUND) * audits + 1e-9)
    for who in finders:
        if who:
            found[who] += 1
        elif not spare:
            return Counter()
        else:
            spare -= 1
    return found


def _found_by(mutant: Mutant, plan: AuditPlan) -> str:
    """The part of the audit that refutes the claim first; empty: none."""
    broken = mutant.breaks(plan)
    if broken.noticed is not None:
        return next(iter(broken.noticed(plan)), "")
    if mutant.family == "conformance":
        return _nonconforming(plan, broken)
    found = audited(plan, broken).found
    return next(iter(seen_by(found)), "")


def _nonconforming(plan: AuditPlan, broken: Broken) -> str:
    """The part of conformance whose p-value is furthest below its level."""
    from sottovoce_core.auditing.conformance.battery import Battery, examine_noise  # they need scipy from the start

    run, battery = broken.actual or plan.run, Battery()
    for share in shares(plan.runs, at_a_time(plan.run), plan.seeds.audited):
        said = overhear(run, plan.data, plan.worlds, share, broken.noise, everybody=True).transcript
        close = math.ceil(plan.close * said.replicas)
        battery.merge(examine_noise(plan.run, plan.data, plan.worlds, share.world, said, close))
    return strongest(battery.tests(plan.levels))


def _under_watch(blank: Power, mutant: Mutant, runs: int, seed: int) -> Power:
    """Watch some runs, longer than those that are audited."""
    run, data = base_of(mutant).lasting(WATCHED).build()
    plan = plan_audit(run, data, 0, worlds=(mutant.swap or mirrored(1.0, -1.0))(run, data, 0))
    try:
        broken = mutant.breaks(plan)
    except SpecError:
        return blank
    if mutant.kind == "across runs" or (broken.noise is SeededNoise and broken.actual is None):
        return blank
    records, seeds = plan.worlds.data(plan.data, 0), (np.random.SeedSequence((seed, k)) for k in range(runs))
    alarms = sorted(rounds_to_alarm(plan.run, records, each, broken.actual, broken.noise) for each in seeds)
    last = alarms[math.ceil(FOUND * runs) - 1]
    return replace(blank, rounds=None if math.isinf(last) else int(last), watched=runs)


# ---- served ----------------------------------------------------------------------------------------------------------

ServiceKind = Literal["on real services", "by wiretap", "foreign services"]

_FoundBy = Callable[[int, int], str]
"""The part that refutes the claim in an audit with so many runs of each world, by the audit's seed; empty: none."""


@dataclass(frozen=True, slots=True)
class Served:
    """What came of a broken service, or of a correct one.

    Attributes:
        name, what, kind: of the break.
        correct: nothing is wrong, and no audit may say so.
        most: runs of each world, at most.
        audits: with each number of runs; of a correct service, with all numbers of runs together.
        needed: runs of each world with which enough audits find it; None: not with those that were tried.
        found_by: the part of the audit that found it most often, there.
        found: audits that find it, there; of a correct service, those that accuse it.
        sure: it must be found.
    """

    name: str
    what: str
    kind: ServiceKind
    correct: bool
    most: int
    audits: int
    needed: int | None = None
    found_by: str = ""
    found: int = 0
    sure: bool = True

    @property
    def missed(self) -> bool:
        """It must be found and was not, or it is correct and was accused more often than chance explains."""
        if not self.correct:
            return self.sure and self.needed is None
        return too_many(self.found, self.audits, 1.0 - CONFIDENCE)


def served(blank: Served, found_by: _FoundBy, rungs: Sequence[int], seed: int) -> Served:
    """Audit a broken service with more and more runs until it is found, and a correct one with all numbers of runs.

    Args:
        blank: which service, and how often.
        found_by: holds an audit.
        rungs: runs of each world that are tried, one after the other.
        seed: of the first audit.
    """
    seeds = range(seed, seed + blank.audits)
    if blank.correct:
        accusers = [who for runs in rungs for each in seeds if (who := found_by(runs, each))]
        return replace(blank, audits=len(rungs) * blank.audits, found_by="".join(accusers[:1]), found=len(accusers))
    for runs in rungs:
        if found := _found_in((found_by(runs, each) for each in seeds), blank.audits):
            return replace(blank, needed=runs, found_by=found.most_common(1)[0][0], found=found.total())
    return blank
