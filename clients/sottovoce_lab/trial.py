"""Trials of the auditor: the small runs that it is tried on, mutants that it must find, and its false alarms.

Every mutant is audited with more and more runs until it is refuted. Correct algorithms are audited many times with other seeds:
at a confidence of 95 %, at most one audit in twenty may refute one; under watch (`watch`), one in a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sottovoce_core.auditing.audit import Audit, Examined, Work, audit_simulated
from sottovoce_core.auditing.bounds import SHARES, Test
from sottovoce_core.auditing.plan import AuditPlan, plan_audit
from sottovoce_core.auditing.swaps import worst
from sottovoce_core.auditing.verdict import Findings, decide
from sottovoce_core.auditing.views import features
from sottovoce_core.auditing.worlds import NoiseOf, Share
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.errors import SpecError
from sottovoce_core.noise import SeededNoise
from sottovoce_core.optional import import_extra
from sottovoce_core.running.run import Run, build_run
from sottovoce_core.running.simulator import simulate
from sottovoce_core.spec import parse_spec
from sottovoce_lab.mutants import Broken, Family, Mutant

# ---- bases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Base:
    """A small run with made-up records.

    Attributes:
        algorithm: that section of its spec.
        sections: other sections, over those of `_COMMON`.
        n_features: of a record.
        batch: records of a round.
        epsilon: about what the first learner's claim is to be, by noise of another size; None: what comes of the spec.
    """

    algorithm: Mapping[str, Any]
    sections: Mapping[str, Any] = field(default_factory=dict)
    n_features: int = 3
    batch: int = 1
    epsilon: float | None = None

    def lasting(self, rounds: int) -> Base:
        """The same for more rounds, or for fewer."""
        return replace(self, sections={**self.sections, "rounds": rounds})

    def build(self) -> tuple[Run, PlacedData]:
        """The run and its data."""
        spec = parse_spec({**_COMMON, "algorithm": dict(self.algorithm), **self.sections}, imports=True)
        run = build_run(spec, self.n_features)
        if self.epsilon is not None:
            factor = run.guarantee(0).epsilon() / self.epsilon
            louder = spec.algorithm.noisier((factor,) * spec.n_learners)
            run = build_run(spec.model_copy(update={"algorithm": louder}), self.n_features)
        return run, _made_up(run, self.n_features, self.batch)


_COMMON: dict[str, Any] = {
    "rounds": 8,
    "learners": 3,
    "loss": {"kind": "logistic", "ridge": 0.05},
    "decision_set": {"kind": "l2_ball", "radius": 2.0},
    "topology": {"graph": "ring", "weights": "metropolis"},
    "durability": "process",
}
_PUSHED = {"sequence": {"kind": "random", "probability": 0.5, "seed": 1, "directed": True}, "weights": "out_degree"}
_CYCLE = {"graph": {"kind": "edges", "edges": [[0, 1], [1, 2], [2, 0]], "directed": True}, "weights": "in_degree"}
_HINGE = {"loss": {"kind": "hinge", "ridge": 0.02}}


def _private(name: str, sections: Mapping[str, Any] = {}, **parameters: Any) -> Base:
    """At so small an epsilon that few runs would be enough for a false alarm."""
    return Base({"name": name, **parameters}, sections, epsilon=0.3)


ALGORITHMS: dict[str, Base] = {
    "ldp-dol": _private("ldp-dol"),
    "dsgd": _private("dsgd"),
    "dola": _private("dola"),
    "pdop": _private("pdop", _HINGE),
    "dpdola": _private("dpdola", _HINGE),
    "pd-ogd": _private("pd-ogd", _HINGE),
    "dpsr": _private("dpsr", {"topology": _CYCLE}),
    "dpsda-c": _private("dpsda-c"),
    "dpsda-ps": _private("dpsda-ps", {"topology": _PUSHED}),
    "dpps": _private("dpps", {"topology": _PUSHED}),
    "dpcda": _private("dpcda", {**_HINGE, "learners": 1}),
    "pd-ftgl": _private("pd-ftgl", _HINGE, epsilon=3.0, block_length=1),
    "pd-ocg": _private("pd-ocg", _HINGE, epsilon=3.0, block_length=1),
    "dvp": _private("dvp", {"rounds": 5}),
    "pvp": _private("pvp", {"rounds": 5}),
    "admm": Base({"name": "admm"}, {"rounds": 5}),
    "d-ogd": Base({"name": "d-ogd"}),
    "d-ftgl": Base({"name": "d-ftgl"}),
}
"""A run of every algorithm, for false alarms. The last three promise nothing, so nothing can be refuted."""

_LONG = {"rounds": 16}
BASES: dict[str, Base] = {
    "ldp-dol": Base({"name": "ldp-dol"}, _LONG, n_features=16, epsilon=10.0),
    "ldp-dol, 60,000 numbers": Base({"name": "ldp-dol"}, {"rounds": 50}, n_features=60, epsilon=10.0),
    "ldp-dol, epsilon 1": Base({"name": "ldp-dol"}, epsilon=1.0),
    "ldp-dol, budget": Base({"name": "ldp-dol"}, {**_LONG, "privacy": {"budget": 4.0}}, epsilon=10.0),
    "dola": Base({"name": "dola"}),
    "dola, batches of 4": Base({"name": "dola"}, batch=4),
    "dola, 9 features": Base({"name": "dola"}, n_features=9),
    "dola, 1 feature": Base({"name": "dola"}, _HINGE, n_features=1, epsilon=3.0),
    "dvp": Base({"name": "dvp", "alpha": 1.0}, {"rounds": 3}),
    "pvp": Base({"name": "pvp", "alpha": 1.0}),
}
"""The runs that mutants are tried on."""


def _made_up(run: Run, n_features: int, batch: int) -> PlacedData:
    """Normal features, fair labels; shared where the algorithm asks for it."""
    generator, rounds, n = np.random.default_rng(0), run.spec.rounds, run.spec.n_learners
    offsets = (np.arange(rounds + 1) * batch).astype(np.int64)
    features = generator.normal(size=(n, rounds * batch, n_features))
    labels = (generator.random((n, rounds * batch)) < 0.5).astype(np.float64)
    order = np.arange(rounds * batch)
    learners = [LearnerData(features[i], labels[i], order, offsets) for i in range(n)]
    if run.algorithm.accountant(0).shared:
        learners = learners[:1] * n
    return PlacedData(tuple(learners), features[0], labels[0])


# ---- trial -----------------------------------------------------------------------------------------------------------

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
        seen = {} if broken.noticed is None else broken.noticed(plan)
    except SpecError as error:
        return replace(blank, unfit=str(error))
    if broken.noticed is not None:
        evidence = next(iter(seen.values()), "")
        return replace(blank, needed=1 if seen else None, families=tuple(seen), evidence=evidence)
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
            leaked = () if broken.leak is None else broken.leak(plan, share)
            yield replace(part, channel=tuple({"channel": features([("leak", told)])} for told in leaked))

    return audit_simulated(plan, noise=broken.noise, actual=broken.actual, mapper=over)


def _understated(plan: AuditPlan, factor: float) -> AuditPlan:
    guarantee = plan.guarantee
    output = None if guarantee.output is None else factor * guarantee.output
    smaller = replace(guarantee, per_round=factor * guarantee.per_round, output=output)
    return replace(plan, claim=factor * plan.claim, guarantee=smaller)


def seen_by(found: Findings) -> tuple[Family, ...]:
    """The families whose findings refute the claim by themselves."""
    return tuple(family for family in SHARES if decide(found.of(family)).kind == "refuted")


def strongest(tests: Iterable[Test]) -> str:
    """The part of an audit whose p-value is furthest below its level; empty: none rejects."""
    rejecting = [test for test in tests if test.rejects]
    return str(min(rejecting, key=lambda test: test.p_value / test.level).part) if rejecting else ""


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
        return too_many(self.refuted, self.audits, LEVEL) or too_many(self.alarmed, self.watched, WATCH_LEVEL)


def too_many(count: int, trials: int, level: float) -> bool:
    """Whether hardly any chance, at this level, explains so many accusations of a correct one."""
    return float(import_extra("scipy.stats", "scipy", "a self-test").binom.sf(count - 1, trials, level)) < RARE


def false_alarms(
    run: Run, data: PlacedData, seeds: Sequence[int], *, name: str, learner: int = 0, runs: int = 20, watched: int = 4
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
    alarmed = sum(math.isfinite(rounds_to_alarm(run, data, np.random.SeedSequence(lot))) for lot in lots)
    return Alarms(name, len(refuted), len(plans), alarmed, len(lots), families)


def rounds_to_alarm(
    run: Run, data: PlacedData, seed: np.random.SeedSequence, actual: Run | None = None, noise: NoiseOf = SeededNoise
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
        step.t + 1.0 for step in simulate(actual or run, data, noise(seed)) if watch.take(step.t, step.by_sender())
    )
    return next(alarms, math.inf)


def added(parts: Sequence[Alarms]) -> Alarms:
    """Alarms of one run, from several lots of seeds."""
    totals = {key: sum(getattr(part, key) for part in parts) for key in ("refuted", "audits", "alarmed", "watched")}
    families = tuple(dict.fromkeys(family for part in parts for family in part.families))
    return Alarms(parts[0].name, **totals, families=families)
