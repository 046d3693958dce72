"""Trials of the auditor: mutants that it must find, its false alarms, and its power.

Every mutant is audited with more and more runs until it is refuted. Correct algorithms are audited many times with other seeds:
at a confidence of 95 %, at most one audit in twenty may refute one; under watch (`watch`), one in a thousand.

Power is the number of runs with which an audit finds a mutant, or a broken service, nine times in ten. A fault of the noise is
looked for by conformance, which must see it; any other fault by the whole audit. A fault that a single run may show is also
watched. A broken service is audited with more and more runs, in some audits of each size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from sottovoce_core.auditing.audit import Audit, ChunkStatistics, ChunkTask, audit_simulated
from sottovoce_core.auditing.bounds import ALPHA_ALLOCATION, Test
from sottovoce_core.auditing.plan import AuditPlan, plan_audit
from sottovoce_core.auditing.traffic_features import build_features
from sottovoce_core.auditing.verdict import Findings, decide
from sottovoce_core.auditing.worlds import NoiseFactory, RunChunk, count_runs_in_memory, plan_chunks, simulate_runs
from sottovoce_core.auditing.worst_case_search import find_worst_worlds
from sottovoce_core.data import PlacedData
from sottovoce_core.errors import SpecError
from sottovoce_core.noise import SeededNoise
from sottovoce_core.optional import import_optional
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_lab.mutants import BASE_RUNS, TARGET_POWER, BaseRun, Family, Fault, Kind, Mutant, build_spike_worlds

# ---- trial -----------------------------------------------------------------------------------------------------------

_SELF_TEST_RUN_COUNTS = (20, 100, 500, 2000)
"""Runs of each world that are tried, one after the other, up to a mutant's own limit."""

AUDIT_LEVEL, WATCH_LEVEL = 0.05, 0.001
"""Of false alarms: of an audit, and of a run under watch."""

_WATCHED_RUNS_PER_AUDIT = 4
"""Runs under watch of a correct algorithm, for every audit of it."""

EXCESS_ALARM_P_VALUE = 0.001
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
    def is_missed(self) -> bool:
        """It fits, and was not caught."""
        return self.needed is None and not self.unfit


def _base_of(mutant: Mutant) -> BaseRun:
    """The run that it is tried on, unless one is given.

    Raises:
        SpecError: there is none of that name.
    """
    if mutant.base not in BASE_RUNS:
        raise SpecError(f"{mutant.name}: base must be one of {', '.join(BASE_RUNS)}, got {mutant.base}")
    return BASE_RUNS[mutant.base]


def try_mutant(
    mutant: Mutant,
    given: tuple[Run, PlacedData] | None = None,
    *,
    learner: int = 0,
    max_runs: int | None = None,
    seed: int = 0,
) -> MutantOutcome:
    """Break a run, and look for who notices.

    Args:
        mutant: how.
        given: what is claimed to run, and the data of all learners; None: the mutant's own base.
        learner: whose messages are audited.
        most: runs of each world (default: the mutant's own limit).
        seed: of coins and noise.

    Raises:
        SpecError: the mutant has no base that is known.
    """
    run, data = given or _base_of(mutant).build()
    base = run.spec.algorithm.name if given else mutant.base
    blank = MutantOutcome(mutant.name, mutant.description, mutant.family, max_runs or mutant.max_runs, base)
    try:
        worlds = None if mutant.build_worlds is None else mutant.build_worlds(run, data, learner)
        plan = plan_audit(run, data, learner, runs=_SELF_TEST_RUN_COUNTS[0], seed=seed, worlds=worlds)
        broken = mutant.build_fault(plan)
        seen = {} if broken.detect is None else broken.detect(plan)
    except SpecError as error:
        return replace(blank, unfit=str(error))
    if broken.detect is not None:
        evidence = next(iter(seen.values()), "")
        return replace(blank, needed=1 if seen else None, families=tuple(seen), evidence=evidence)
    if broken.compute_leak is None:  # else the pairs of worlds that an audit chooses are part of what is tested
        worlds = plan.worlds
    for runs in (
        *(rung for rung in _SELF_TEST_RUN_COUNTS if rung < blank.allowed),
        max(blank.allowed, _SELF_TEST_RUN_COUNTS[0]),
    ):
        done = audit_mutant(plan_audit(run, data, learner, runs=runs, seed=seed, worlds=worlds), broken)
        blank = replace(blank, numbers=done.noise_count)
        if done.verdict.kind == "refuted":
            return replace(blank, needed=runs, families=_seen_by(done.findings), evidence=done.verdict.evidence[0])
    return blank


def audit_mutant(plan: AuditPlan, broken: Fault) -> Audit:
    """An audit on the simulator of what a broken learner says and gives away."""
    if (factor := broken.claim_factor) != 1.0:
        output = None if plan.guarantee.output_epsilon is None else factor * plan.guarantee.output_epsilon
        smaller = replace(plan.guarantee, round_losses=factor * plan.guarantee.round_losses, output_epsilon=output)
        plan = replace(plan, claim=factor * plan.claim, guarantee=smaller)

    def over(work: ChunkTask, shares: Sequence[RunChunk]) -> Iterator[ChunkStatistics]:
        for share in shares:
            part = work(share)
            leaked = () if broken.compute_leak is None else broken.compute_leak(plan, share)
            yield replace(
                part, channel_features=tuple({"channel": build_features([("leak", told)])} for told in leaked)
            )

    return audit_simulated(plan, noise=broken.noise, actual_run=broken.actual_run, mapper=over)


def _seen_by(found: Findings) -> tuple[Family, ...]:
    """The families whose findings refute the claim by themselves."""
    return tuple(family for family in ALPHA_ALLOCATION if decide(found.select_family(family)).kind == "refuted")


def _strongest(tests: Iterable[Test]) -> str:
    """The part of an audit whose p-value is furthest below its level; empty: none rejects."""
    rejecting = [test for test in tests if test.is_significant]
    return str(min(rejecting, key=lambda test: test.p_value / test.level).part) if rejecting else ""


def find_refuting_part(found: Findings) -> str:
    """The part of an audit that refutes the claim most clearly, or the first family that does; empty: none does."""
    return _strongest(found.tests) or next(iter(_seen_by(found)), "")


# ---- correct learners ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FalseAlarmCounts:
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
    def is_excessive(self) -> bool:
        """Hardly any correct audit, or watch, would accuse it so often."""
        return _too_many(self.refuted, self.audits, AUDIT_LEVEL) or _too_many(self.alarmed, self.watched, WATCH_LEVEL)


def _too_many(count: int, trials: int, level: float) -> bool:
    """Whether hardly any chance, at this level, explains so many accusations of a correct one."""
    return (
        float(import_optional("scipy.stats", "scipy", "a self-test").binom.sf(count - 1, trials, level))
        < EXCESS_ALARM_P_VALUE
    )


def measure_false_alarms(
    run: Run, data: PlacedData, seeds: Sequence[int], *, name: str, learner: int = 0
) -> FalseAlarmCounts:
    """Audit and watch a correct run, for every seed; one that promises nothing finite cannot be accused.

    Args:
        run: what runs.
        data: of all learners.
        seeds: of coins and noise.
        name: of the run.
        learner: whose messages are audited; all are watched.
    """
    if not np.isfinite(run.guarantee(learner).round_losses).all():
        return FalseAlarmCounts(name, 0, 0, 0, 0)
    worlds = find_worst_worlds(run, data, learner, np.random.SeedSequence(0))
    plans = [plan_audit(run, data, learner, runs=_SELF_TEST_RUN_COUNTS[0], seed=seed, worlds=worlds) for seed in seeds]
    refuted = [families for plan in plans if (families := _seen_by(audit_simulated(plan).findings))]
    families = tuple(dict.fromkeys(family for each in refuted for family in each))
    lots = [(seed, k) for seed in seeds for k in range(_WATCHED_RUNS_PER_AUDIT)]
    alarmed = sum(math.isfinite(_rounds_to_alarm(run, data, np.random.SeedSequence(lot))) for lot in lots)
    return FalseAlarmCounts(name, len(refuted), len(plans), alarmed, len(lots), families)


def _rounds_to_alarm(
    run: Run,
    data: PlacedData,
    seed: np.random.SeedSequence,
    actual: Run | None = None,
    noise: NoiseFactory = SeededNoise,
) -> float:
    """Rounds of a run under watch until the first alarm; infinite: there is none.

    Args:
        run: what is claimed to run.
        data: of all learners.
        seed: of the noise.
        actual: what runs; None: what is claimed.
        noise: where it comes from.
    """
    from sottovoce_core.auditing.online.watch import Watch  # it needs scipy from the start

    watch = Watch(run, data.learners, WATCH_LEVEL, range(run.spec.n_learners))
    alarms = (
        step.t + 1.0
        for step in simulate_rounds(actual or run, data, noise(seed))
        if watch.take(step.t, step.split_by_sender())
    )
    return next(alarms, math.inf)


def sum_false_alarms(parts: Sequence[FalseAlarmCounts]) -> FalseAlarmCounts:
    """Alarms of one run, from several lots of seeds."""
    totals = {key: sum(getattr(part, key) for part in parts) for key in ("refuted", "audits", "alarmed", "watched")}
    families = tuple(dict.fromkeys(family for part in parts for family in part.families))
    return FalseAlarmCounts(parts[0].name, **totals, families=families)


# ---- power -----------------------------------------------------------------------------------------------------------

POWER_RUN_COUNTS = (5, 10, 20, 50, 100, 200, 500, 1000, 2000)
"""Runs of each world that are tried, one after the other."""

CONFIDENCE = 0.99
"""With which none of these audits would refute a correct learner."""

MIN_EVIDENCE_FACTOR = 4.0
"""Times the evidence that the best of all tests needs: an audit looks at much else, and is to find it nine times in ten."""

MAX_WATCHED_ROUNDS = 200
"""Rounds under watch, at most."""


ServiceKind = Literal["on real services", "by wiretap", "foreign services"]
"""Of broken services: how they are audited."""


@dataclass(frozen=True, slots=True)
class PowerMeasurement:
    """With how many runs a broken learner or service is found; of a correct service, how often it is accused.

    Attributes:
        name, what, kind: of the fault.
        most: runs of each world, at most.
        audits: with each number of runs; of a correct service, with all numbers of runs together.
        base: the run that a mutant is tried on; empty: it is a service.
        correct: nothing is wrong, and no audit may say so.
        sure: it must be found.
        limit: runs of each world that carry the evidence it takes; None: that is not known.
        needed: runs of each world with which enough audits find it; None: not with those that were tried.
        found_by: the part of the audit that found it most often, there.
        found: audits that find it, there; of a correct service, those that accuse it.
        rounds: within which enough runs under watch raise an alarm; None: not within those that were watched.
        watched: runs under watch; 0: there is nothing to watch.
    """

    name: str
    what: str
    kind: Kind | ServiceKind | None
    most: int
    audits: int
    base: str = ""
    correct: bool = False
    sure: bool = True
    limit: float | None = None
    needed: int | None = None
    found_by: str = ""
    found: int = 0
    rounds: int | None = None
    watched: int = 0

    @property
    def is_missed(self) -> bool:
        """It was not found, though there is enough evidence, or it is correct and was accused more often than by chance."""
        if self.correct:
            return _too_many(self.found, self.audits, 1.0 - CONFIDENCE)
        enough = self.limit is None or MIN_EVIDENCE_FACTOR * self.limit <= self.most
        return self.needed is None and self.sure and enough


def measure_mutant_power(
    mutant: Mutant, *, audits: int = 10, seed: int = 0, max_runs: int = POWER_RUN_COUNTS[-1]
) -> PowerMeasurement:
    """Audit a broken learner with more and more runs, each number of runs with several seeds, and watch it.

    Args:
        mutant: how it is broken; tried on its own base.
        audits: seeds of each number of runs.
        seed: of the first audit.
        most: runs of each world.

    Raises:
        SpecError: it does not fit its base, or there is no such base.
    """
    run, data = _base_of(mutant).build()
    worlds = None if mutant.build_worlds is None else mutant.build_worlds(run, data, 0)
    plan = plan_audit(run, data, 0, runs=POWER_RUN_COUNTS[0], confidence=CONFIDENCE, worlds=worlds)
    if (
        mutant.build_fault(plan).compute_leak is None
    ):  # else the pairs of worlds that an audit chooses are part of what is tested
        worlds = plan.worlds
    limit = None if mutant.estimate_min_runs is None else mutant.estimate_min_runs(run, 1.0 - CONFIDENCE)
    blank = PowerMeasurement(mutant.name, mutant.description, mutant.kind, max_runs, audits, mutant.base, limit=limit)

    def found_by(runs: int, each: int) -> str:
        plan = plan_audit(run, data, 0, runs=runs, confidence=CONFIDENCE, seed=each, worlds=worlds)
        return _found_by(mutant, plan)

    # With less than half of the evidence that the best test needs, no audit finds it nine times in ten.
    worth = [rung for rung in POWER_RUN_COUNTS if rung <= max_runs and 2.0 * rung >= (limit or 0.0)]
    power = search_run_count(blank, found_by, worth, seed)
    if power.needed is not None and mutant.family in ("notices", "ledger"):  # what must never be is seen in one run
        power = replace(power, needed=1)
    return _under_watch(power, mutant, seed)


def search_run_count(
    blank: PowerMeasurement, found_by: Callable[[int, int], str], rungs: Sequence[int], seed: int
) -> PowerMeasurement:
    """Audit with more and more runs until a fault is found; what is correct, with all numbers of runs.

    Args:
        blank: what is audited, and how often.
        found_by: holds an audit with so many runs of each world, by its seed: the part that refutes the claim; empty: none.
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


def _found_in(finders: Iterable[str], audits: int) -> Counter[str]:
    """What found something in how many audits; nothing once it was missed more often than may be.

    Args:
        finders: of every audit, as they are held, the part that found it; empty: none did.
        audits: how many there are.
    """
    found, spare = Counter[str](), math.floor((1.0 - TARGET_POWER) * audits + 1e-9)
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
    try:
        broken = mutant.build_fault(plan)
    except SpecError:  # it fits its base, but not these worlds: here it does nothing
        return ""
    if broken.detect is not None:
        return next(iter(broken.detect(plan)), "")
    if mutant.family == "conformance":
        return _strongest(_conformance(plan, broken))
    return next(iter(_seen_by(audit_mutant(plan, broken).findings)), "")


def _conformance(plan: AuditPlan, broken: Fault) -> Sequence[Test]:
    """Only the tests of conformance."""
    from sottovoce_core.auditing.conformance.battery import Battery, examine_noise  # they need scipy from the start

    def examined(share: RunChunk) -> Battery:
        said = simulate_runs(run, plan.data, plan.worlds, share, broken.noise, keep_all_learners=True).transcript
        close = math.ceil(plan.dependence_fraction * said.replicas)
        return examine_noise(plan.run, plan.data, plan.worlds, share.world, said, close)

    run = broken.actual_run or plan.run
    first, *others = plan_chunks(plan.runs, count_runs_in_memory(plan.run), plan.seeds.audited_runs)
    battery = examined(first)
    for share in others:
        battery.merge(examined(share))
    return battery.compute_tests(plan.alpha_allocation)


def _under_watch(blank: PowerMeasurement, mutant: Mutant, seed: int) -> PowerMeasurement:
    """Watch some runs, longer than those that are audited."""
    run, data = _base_of(mutant).with_rounds(MAX_WATCHED_ROUNDS).build()
    plan = plan_audit(run, data, 0, worlds=(mutant.build_worlds or build_spike_worlds(1.0, -1.0))(run, data, 0))
    try:
        broken = mutant.build_fault(plan)
    except SpecError:
        return blank
    if mutant.kind == "across runs" or (broken.noise is SeededNoise and broken.actual_run is None):
        return blank
    records, seeds = (
        plan.worlds.build_data(plan.data, 0),
        (np.random.SeedSequence((seed, k)) for k in range(blank.audits)),
    )
    alarms = sorted(_rounds_to_alarm(plan.run, records, each, broken.actual_run, broken.noise) for each in seeds)
    last = alarms[math.ceil(TARGET_POWER * blank.audits) - 1]
    return replace(blank, rounds=None if math.isinf(last) else int(last), watched=blank.audits)
