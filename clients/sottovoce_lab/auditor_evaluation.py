"""Evaluation of the auditor: mutants that it must find, its false alarms, and its power.

Every mutant is audited with more and more runs until it is refuted. Correct algorithms are audited many times with other seeds:
at a confidence of 95 %, at most one audit in twenty may refute one; under watch (`watch`), one in a thousand.

Power is the number of runs with which an audit finds a mutant, or a faulty service, with probability 0.9. A fault of the noise
is tested by conformance, which must find it; any other fault by the whole audit. A fault that a single run may show is also
watched. A faulty service is audited with more and more runs, in several audits of each size.
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
"""Numbers of runs of each world that a self-test tries, in order, up to the mutant's own maximum."""

AUDIT_LEVEL, WATCH_LEVEL = 0.05, 0.001
"""False alarm rate of an audit, and of a run under watch."""

_WATCHED_RUNS_PER_AUDIT = 4
"""Watched runs of a correct algorithm, for every audit of it."""

EXCESS_ALARM_P_VALUE = 0.001
"""P-value of the number of false alarms below which it is excessive."""


# ---- mutants ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MutantOutcome:
    """Result of trying one mutant.

    Attributes:
        name, description, expected_family, max_runs: properties of the mutant.
        base: the run that it was tried on.
        runs_needed: runs of each world with which it was first refuted; None: it was not.
        noise_numbers: number of noise values that conformance tested by then.
        families: families that refuted it on their own.
        evidence: first piece of evidence.
        inapplicable_reason: why it does not apply to the run; empty: it applies.
    """

    name: str
    description: str
    expected_family: Family
    max_runs: int
    base: str
    runs_needed: int | None = None
    noise_numbers: int = 0
    families: tuple[Family, ...] = ()
    evidence: str = ""
    inapplicable_reason: str = ""

    @property
    def is_missed(self) -> bool:
        """True if it applies to the run and was not found."""
        return self.runs_needed is None and not self.inapplicable_reason


def _get_base_run(mutant: Mutant) -> BaseRun:
    """Return the run that a mutant is tried on, unless a run is given.

    Raises:
        SpecError: There is none of this name.
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
    """Audit a mutant with more and more runs until it is refuted.

    Args:
        mutant: the mutant.
        given: the claimed run and the data of all learners; None: the mutant's own base.
        learner: the audited learner.
        max_runs: maximum runs of each world (default: the mutant's own).
        seed: seed of coins and noise.

    Raises:
        SpecError: The mutant's base does not exist.
    """
    run, data = given or _get_base_run(mutant).build()
    base = run.spec.algorithm.name if given else mutant.base
    result = MutantOutcome(mutant.name, mutant.description, mutant.family, max_runs or mutant.max_runs, base)
    try:
        worlds = None if mutant.build_worlds is None else mutant.build_worlds(run, data, learner)
        plan = plan_audit(run, data, learner, runs=_SELF_TEST_RUN_COUNTS[0], seed=seed, worlds=worlds)
        fault = mutant.build_fault(plan)
        detected = {} if fault.detect is None else fault.detect(plan)
    except SpecError as error:
        return replace(result, inapplicable_reason=str(error))
    if fault.detect is not None:
        evidence = next(iter(detected.values()), "")
        return replace(result, runs_needed=1 if detected else None, families=tuple(detected), evidence=evidence)
    if fault.compute_leak is None:  # otherwise the pairs of worlds that an audit chooses are under test, too
        worlds = plan.worlds
    for runs in (
        *(count for count in _SELF_TEST_RUN_COUNTS if count < result.max_runs),
        max(result.max_runs, _SELF_TEST_RUN_COUNTS[0]),
    ):
        audit = audit_mutant(plan_audit(run, data, learner, runs=runs, seed=seed, worlds=worlds), fault)
        result = replace(result, noise_numbers=audit.noise_count)
        if audit.verdict.kind == "refuted":
            families = _list_refuting_families(audit.findings)
            return replace(result, runs_needed=runs, families=families, evidence=audit.verdict.evidence[0])
    return result


def audit_mutant(plan: AuditPlan, fault: Fault) -> Audit:
    """Audit simulated runs of a learner with a fault, side channels included."""
    if (factor := fault.claim_factor) != 1.0:
        output = None if plan.guarantee.output_epsilon is None else factor * plan.guarantee.output_epsilon
        smaller = replace(plan.guarantee, round_losses=factor * plan.guarantee.round_losses, output_epsilon=output)
        plan = replace(plan, claim=factor * plan.claim, guarantee=smaller)

    def map_chunks(work: ChunkTask, shares: Sequence[RunChunk]) -> Iterator[ChunkStatistics]:
        for share in shares:
            part = work(share)
            leaks = () if fault.compute_leak is None else fault.compute_leak(plan, share)
            yield replace(part, channel_features=tuple({"channel": build_features([("leak", leak)])} for leak in leaks))

    return audit_simulated(plan, noise=fault.noise, actual_run=fault.actual_run, mapper=map_chunks)


def _list_refuting_families(found: Findings) -> tuple[Family, ...]:
    """List the families whose findings refute the claim on their own."""
    return tuple(family for family in ALPHA_ALLOCATION if decide(found.select_family(family)).kind == "refuted")


def _find_strongest_part(tests: Iterable[Test]) -> str:
    """Return the part of an audit with the smallest ratio of p-value to level; empty if no test rejects."""
    rejecting = [test for test in tests if test.is_significant]
    return str(min(rejecting, key=lambda test: test.p_value / test.level).part) if rejecting else ""


def find_refuting_part(found: Findings) -> str:
    """Return the part of an audit that refutes the claim most clearly, or the first family that does; empty if none does."""
    return _find_strongest_part(found.tests) or next(iter(_list_refuting_families(found)), "")


# ---- correct learners ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FalseAlarmCounts:
    """False alarms of one correct algorithm.

    Attributes:
        name: name of the run.
        refuted_audits, audits: audits that refuted it, and all audits.
        alarmed_runs, watched_runs: runs under watch that raised an alarm, and all runs under watch.
        families: families that refuted it in any audit.
    """

    name: str
    refuted_audits: int
    audits: int
    alarmed_runs: int
    watched_runs: int
    families: tuple[Family, ...] = ()

    @property
    def is_excessive(self) -> bool:
        """True if the false alarms are too many to be chance, in audits or under watch."""
        return _is_excessive(self.refuted_audits, self.audits, AUDIT_LEVEL) or _is_excessive(
            self.alarmed_runs, self.watched_runs, WATCH_LEVEL
        )


def _is_excessive(count: int, trials: int, level: float) -> bool:
    """Return whether the binomial p-value of this number of false alarms is below `EXCESS_ALARM_P_VALUE`."""
    return (
        float(import_optional("scipy.stats", "scipy", "a self-test").binom.sf(count - 1, trials, level))
        < EXCESS_ALARM_P_VALUE
    )


def measure_false_alarms(
    run: Run, data: PlacedData, seeds: Sequence[int], *, name: str, learner: int = 0
) -> FalseAlarmCounts:
    """Audit and watch a correct run once for every seed; a run without a finite claim is not audited.

    Args:
        run: the run.
        data: data of all learners.
        seeds: seeds of coins and noise.
        name: name of the run.
        learner: the audited learner; all learners are watched.
    """
    if not np.isfinite(run.guarantee(learner).round_losses).all():
        return FalseAlarmCounts(name, 0, 0, 0, 0)
    worlds = find_worst_worlds(run, data, learner, np.random.SeedSequence(0))
    plans = [plan_audit(run, data, learner, runs=_SELF_TEST_RUN_COUNTS[0], seed=seed, worlds=worlds) for seed in seeds]
    refuted = [families for plan in plans if (families := _list_refuting_families(audit_simulated(plan).findings))]
    families = tuple(dict.fromkeys(family for each in refuted for family in each))
    watch_seeds = [(seed, k) for seed in seeds for k in range(_WATCHED_RUNS_PER_AUDIT)]
    alarmed = sum(
        math.isfinite(_count_rounds_to_alarm(run, data, np.random.SeedSequence(each))) for each in watch_seeds
    )
    return FalseAlarmCounts(name, len(refuted), len(plans), alarmed, len(watch_seeds), families)


def _count_rounds_to_alarm(
    run: Run,
    data: PlacedData,
    seed: np.random.SeedSequence,
    actual_run: Run | None = None,
    noise: NoiseFactory = SeededNoise,
) -> float:
    """Count the rounds of a run under watch until the first alarm; infinite without an alarm.

    Args:
        run: the claimed run.
        data: data of all learners.
        seed: seed of the noise.
        actual_run: the run that is executed; None: the claimed one.
        noise: factory of the noise source.
    """
    from sottovoce_core.auditing.online.watch import Watch  # imports scipy, which is optional

    watch = Watch(run, data.learners, WATCH_LEVEL, range(run.spec.n_learners))
    alarms = (
        step.t + 1.0
        for step in simulate_rounds(actual_run or run, data, noise(seed))
        if watch.take(step.t, step.split_by_sender())
    )
    return next(alarms, math.inf)


def sum_false_alarms(parts: Sequence[FalseAlarmCounts]) -> FalseAlarmCounts:
    """Add the false alarms of one run over several groups of seeds."""
    counts = ("refuted_audits", "audits", "alarmed_runs", "watched_runs")
    totals = {key: sum(getattr(part, key) for part in parts) for key in counts}
    families = tuple(dict.fromkeys(family for part in parts for family in part.families))
    return FalseAlarmCounts(parts[0].name, **totals, families=families)


# ---- power -----------------------------------------------------------------------------------------------------------

POWER_RUN_COUNTS = (5, 10, 20, 50, 100, 200, 500, 1000, 2000)
"""Numbers of runs of each world that a measurement of power tries, in order."""

CONFIDENCE = 0.99
"""Confidence of audits that measure power."""

MIN_EVIDENCE_FACTOR = 4.0
"""Multiple of the minimum evidence at which an audit must find a fault: it tests much else, and power 0.9 is required."""

MAX_WATCHED_ROUNDS = 200
"""Maximum number of rounds under watch."""


ServiceKind = Literal["on real services", "by wiretap", "foreign services"]
"""Method by which a faulty service is audited."""


@dataclass(frozen=True, slots=True)
class PowerMeasurement:
    """Power against a faulty learner or service; the false alarms, for a correct service.

    Attributes:
        name, description, kind: properties of the fault.
        max_runs: maximum runs of each world.
        audits: audits with each number of runs; for a correct service, with all numbers of runs together.
        base: the run that a mutant is tried on; empty: a service.
        correct: whether there is no fault, so that no audit may find one.
        must_be_found: whether a miss counts.
        min_runs: runs of each world with enough evidence; None: not known.
        runs_needed: runs of each world with which enough audits find it; None: more than the numbers tried.
        found_by: part of the audit that found it most often with that number.
        audits_found: audits that found it with that number; for a correct service, all audits that refuted it.
        rounds_to_alarm: rounds within which enough runs under watch raise an alarm; None: more than the watched rounds.
        watched_runs: runs under watch; 0: the fault cannot be watched.
    """

    name: str
    description: str
    kind: Kind | ServiceKind | None
    max_runs: int
    audits: int
    base: str = ""
    correct: bool = False
    must_be_found: bool = True
    min_runs: float | None = None
    runs_needed: int | None = None
    found_by: str = ""
    audits_found: int = 0
    rounds_to_alarm: int | None = None
    watched_runs: int = 0

    @property
    def is_missed(self) -> bool:
        """True if it was not found in spite of enough evidence; for a correct service, if false alarms are excessive."""
        if self.correct:
            return _is_excessive(self.audits_found, self.audits, 1.0 - CONFIDENCE)
        enough = self.min_runs is None or MIN_EVIDENCE_FACTOR * self.min_runs <= self.max_runs
        return self.runs_needed is None and self.must_be_found and enough


def measure_mutant_power(
    mutant: Mutant, *, audits: int = 10, seed: int = 0, max_runs: int = POWER_RUN_COUNTS[-1]
) -> PowerMeasurement:
    """Audit a mutant with more and more runs, each number of runs with several seeds, and watch it.

    Args:
        mutant: the mutant; tried on its own base.
        audits: number of seeds for each number of runs.
        seed: seed of the first audit.
        max_runs: maximum runs of each world.

    Raises:
        SpecError: It does not apply to its base, or the base does not exist.
    """
    run, data = _get_base_run(mutant).build()
    worlds = None if mutant.build_worlds is None else mutant.build_worlds(run, data, 0)
    plan = plan_audit(run, data, 0, runs=POWER_RUN_COUNTS[0], confidence=CONFIDENCE, worlds=worlds)
    # Otherwise the pairs of worlds that an audit chooses are under test, too.
    if mutant.build_fault(plan).compute_leak is None:
        worlds = plan.worlds
    min_runs = None if mutant.estimate_min_runs is None else mutant.estimate_min_runs(run, 1.0 - CONFIDENCE)
    blank = PowerMeasurement(
        mutant.name, mutant.description, mutant.kind, max_runs, audits, mutant.base, min_runs=min_runs
    )

    def audit(runs: int, each: int) -> str:
        plan = plan_audit(run, data, 0, runs=runs, confidence=CONFIDENCE, seed=each, worlds=worlds)
        return _audit_for_part(mutant, plan)

    # With less than half of the minimum evidence, no audit has a power of 0.9.
    counts = [count for count in POWER_RUN_COUNTS if count <= max_runs and 2.0 * count >= (min_runs or 0.0)]
    power = search_run_count(blank, audit, counts, seed)
    if power.runs_needed is not None and mutant.family in (
        "detections",
        "ledger",
    ):  # forbidden messages show in one run
        power = replace(power, runs_needed=1)
    return _measure_watch(power, mutant, seed)


def search_run_count(
    blank: PowerMeasurement, audit: Callable[[int, int], str], run_counts: Sequence[int], seed: int
) -> PowerMeasurement:
    """Audit with more and more runs until a fault is found; audit a correct service with all numbers of runs.

    Args:
        blank: the fault, and the number of audits.
        audit: makes an audit from the runs of each world and its seed; returns the part that refutes the claim, empty if none.
        run_counts: numbers of runs of each world to try, in order.
        seed: seed of the first audit.
    """
    seeds = range(seed, seed + blank.audits)
    if blank.correct:
        refuting = [part for runs in run_counts for each in seeds if (part := audit(runs, each))]
        total = len(run_counts) * blank.audits
        return replace(blank, audits=total, found_by="".join(refuting[:1]), audits_found=len(refuting))
    for runs in run_counts:
        if found := _count_finding_parts((audit(runs, each) for each in seeds), blank.audits):
            return replace(blank, runs_needed=runs, found_by=found.most_common(1)[0][0], audits_found=found.total())
    return blank


def _count_finding_parts(results: Iterable[str], audits: int) -> Counter[str]:
    """Count the audits in which each part found the fault; empty as soon as the target power is out of reach.

    Args:
        results: the part that found it, for every audit, computed lazily; empty: none did.
        audits: number of audits.
    """
    found, misses_left = Counter[str](), math.floor((1.0 - TARGET_POWER) * audits + 1e-9)
    for part in results:
        if part:
            found[part] += 1
        elif not misses_left:
            return Counter()
        else:
            misses_left -= 1
    return found


def _audit_for_part(mutant: Mutant, plan: AuditPlan) -> str:
    """Audit a mutant and return the part that refutes the claim; empty if none does."""
    try:
        fault = mutant.build_fault(plan)
    except SpecError:  # it applies to its base, but has no effect in these worlds
        return ""
    if fault.detect is not None:
        return next(iter(fault.detect(plan)), "")
    if mutant.family == "conformance":
        return _find_strongest_part(_run_conformance(plan, fault))
    return next(iter(_list_refuting_families(audit_mutant(plan, fault).findings)), "")


def _run_conformance(plan: AuditPlan, fault: Fault) -> Sequence[Test]:
    """Run only the conformance tests."""
    from sottovoce_core.auditing.conformance.battery import Battery, examine_noise  # imports scipy, which is optional

    def examine(share: RunChunk) -> Battery:
        transcript = simulate_runs(run, plan.data, plan.worlds, share, fault.noise, keep_all_learners=True).transcript
        close = math.ceil(plan.dependence_fraction * transcript.replicas)
        return examine_noise(plan.run, plan.data, plan.worlds, share.world, transcript, close)

    run = fault.actual_run or plan.run
    first, *others = plan_chunks(plan.runs, count_runs_in_memory(plan.run), plan.seeds.audited_runs)
    battery = examine(first)
    for share in others:
        battery.merge(examine(share))
    return battery.compute_tests(plan.alpha_allocation)


def _measure_watch(blank: PowerMeasurement, mutant: Mutant, seed: int) -> PowerMeasurement:
    """Watch some runs, longer than the audited ones, and add the rounds until an alarm."""
    run, data = _get_base_run(mutant).with_rounds(MAX_WATCHED_ROUNDS).build()
    plan = plan_audit(run, data, 0, worlds=(mutant.build_worlds or build_spike_worlds(1.0, -1.0))(run, data, 0))
    try:
        fault = mutant.build_fault(plan)
    except SpecError:
        return blank
    if mutant.kind == "across runs" or (fault.noise is SeededNoise and fault.actual_run is None):
        return blank
    records, seeds = (
        plan.worlds.build_data(plan.data, 0),
        (np.random.SeedSequence((seed, k)) for k in range(blank.audits)),
    )
    alarms = sorted(_count_rounds_to_alarm(plan.run, records, each, fault.actual_run, fault.noise) for each in seeds)
    last = alarms[math.ceil(TARGET_POWER * blank.audits) - 1]
    rounds = None if math.isinf(last) else int(last)
    return replace(blank, rounds_to_alarm=rounds, watched_runs=blank.audits)
