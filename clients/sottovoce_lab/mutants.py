"""The class `Mutant`: a learner that is correct but for one fault, which an audit must find; and what faults are made from.

A mutant says how it breaks a run, on which small run it is tried (`BASE_RUNS`), which family of tests is expected to see it,
and within how many runs of each world. All of them: `catalogue`. One of your own::

    LOUD = Mutant("loud", "noise of 0.7 of its scale", noisy(times(0.7)), "conformance", 20)

The limit of a mutant is by information: how many runs carry enough evidence for the best of all tests. A fault whose numbers
follow Q where P is claimed gives KL(Q || P) nats each, on average. A test at a level alpha that knew the fault beforehand would
need about `ln(1/alpha)` nats (Stein), and no other test needs fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.plan import AuditPlan
from sottovoce_core.auditing.worlds import NoiseFactory, RunChunk, Worlds, count_numbers, spawn_seeds
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.errors import SpecError
from sottovoce_core.noise import Distribution, NoiseRequest, NoiseSource, SeededNoise, no_noise
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.spec import parse_spec

# ---- mutants ---------------------------------------------------------------------------------------------------------

Family = Literal["conformance", "likelihood", "black box", "notices", "ledger"]
"""What sees a mutant: the three families of an audit, the rules of `noticing`, or the sum of what was heard."""

Kind = Literal[
    "scale",
    "tails and shape",
    "support and atoms",
    "lattice and low bits",
    "reuse within a run",
    "across learners",
    "across runs",
    "centre",
    "noise that follows data",
    "beside the numbers",
]
"""What is broken: the ten classes of the catalogue."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What a learner really does; what is left out is as it should be.

    Attributes:
        noise: where its noise comes from.
        actual: what runs.
        understated: its claim is this part of what holds.
        leak: what it gives away beside its numbers in some runs, `(runs, features)`.
        noticed: what its messages show in one run whatever their numbers, where these do not show what is wrong: family to a
            sentence.
    """

    noise: NoiseFactory = SeededNoise
    actual_run: Run | None = None
    claim_factor: float = 1.0
    compute_leak: Callable[[AuditPlan, RunChunk], FloatArray] | None = None
    detect: Callable[[AuditPlan], Mapping[Family, str]] | None = None


FaultFactory = Callable[[AuditPlan], Fault]
WorldsFactory = Callable[[Run, PlacedData, int], Worlds]

MinRunsEstimator = Callable[[Run, float], float]
"""From a run and a level to the runs of each world that carry enough evidence; conformance looks at both worlds."""

MAX_QUICK_RUNS, MAX_RUNS = 20, 2000
"""Runs of each world in which conformance sees what is gross, and in which it must see whatever it can see."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A broken learner.

    Attributes:
        name: in a word or two.
        what: is broken, in a few words.
        breaks: how; it raises a `SpecError` that says why, where it does not fit a run.
        family: expected to see it.
        runs: of each world, within which it must be caught.
        base: name of the run that it is tried on, unless one is given.
        swap: chooses the two worlds from run, data and learner; None: the swap that shows most.
        kind: its class in the catalogue.
        limit: runs of each world that carry the evidence it takes; None: that is not known.
        quick: whether every self-test tries it, or only one that measures power.
    """

    name: str
    description: str
    build_fault: FaultFactory
    family: Family
    max_runs: int
    base: str = "ldp-dol"
    build_worlds: WorldsFactory | None = None
    kind: Kind | None = None
    estimate_min_runs: MinRunsEstimator | None = None
    quick: bool = True


def make_mutant_factory(kind: Kind) -> Callable[..., Mutant]:
    """Return a constructor of mutants of one class, which conformance must find unless more is given."""

    def fault(
        name: str,
        what: str,
        breaks: FaultFactory,
        limit: MinRunsEstimator | None = None,
        *,
        quick: bool = False,
        **more: Any,
    ) -> Mutant:
        usual: dict[str, Any] = {
            "family": "conformance",
            "max_runs": MAX_QUICK_RUNS if quick else MAX_RUNS,
            "estimate_min_runs": limit,
        }
        return Mutant(name, what, breaks, kind=kind, quick=quick, **{**usual, **more})

    return fault


def make_noise_mutant_factory(kind: Kind) -> Callable[..., Mutant]:
    """The same of mutants whose noise is changed, Laplace noise unless more is given."""
    fault = make_mutant_factory(kind)

    def of_noise(
        name: str,
        what: str,
        change: NoiseMutation,
        limit: MinRunsEstimator | None = None,
        *,
        noise_kind: NoiseKind = "laplace",
        **more: Any,
    ) -> Mutant:
        return fault(name, what, mutate_noise(change, noise_kind), limit, **more)

    return of_noise


# ---- evidence --------------------------------------------------------------------------------------------------------

TARGET_POWER = 0.9
"""The probability with which something is to be found."""


def estimate_from_numbers(nats: float, share: float = 1.0) -> MinRunsEstimator:
    """So much evidence in every number that any learner says, on average; all of it in a share of them."""
    return lambda run, alpha: _enough(alpha, nats, share, count_numbers(run))


def estimate_from_messages(nats: float, share: float = 1.0) -> MinRunsEstimator:
    """So much in every message."""
    return lambda run, alpha: _enough(alpha, nats, share, run.spec.rounds * run.spec.n_learners)


def estimate_from_runs(nats: float, share: float = 1.0) -> MinRunsEstimator:
    """So much in every run."""
    return lambda run, alpha: _enough(alpha, nats, share, 1)


def _enough(alpha: float, nats: float, share: float, count: int) -> float:
    """Runs of each world; there are two. What is seldom must happen once at all."""
    happens = math.log(1.0 / (1.0 - TARGET_POWER)) / share if share < 1.0 else 0.0
    return max(math.log(1.0 / alpha) / nats, happens) / (2.0 * count)


def compute_bernoulli_kl(broken: float, claimed: float) -> float:
    """Nats of whether something happens: its probability, and the claimed one."""
    return _term(broken, claimed) + _term(1.0 - broken, 1.0 - claimed)


def _term(broken: float, claimed: float) -> float:
    return 0.0 if broken == 0.0 else broken * math.log(broken / claimed)


def compute_scale_kl(factor: float) -> float:
    """Nats of a number whose scale is another one."""
    return factor - 1.0 - math.log(factor)


# ---- noise -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class NoiseMutationState:
    """What a broken source of noise has beside the correct noise.

    Attributes:
        generator: of random numbers.
        kept: from message to message.
    """

    generator: np.random.Generator
    memory: dict[Any, Any] = field(default_factory=dict)

    def replace_previous(self, draw: NoiseRequest, now: Any) -> Any:
        """What was kept of the same field in the round before; None: nothing, or of other runs. Keep `now` in its place."""
        before, self.memory[draw.field] = self.memory.get(draw.field), now
        return before if before is not None and before.shape == now.shape else None


NoiseMutation = Callable[[FloatArray, NoiseRequest, NoiseMutationState], FloatArray]
"""From correct noise to what is said in its place."""

NoiseKind = Literal["laplace", "lattice", "any"]
"""Noise that a change is one of: of the Laplace law, on a lattice, or any."""


def require_noise(plan: AuditPlan, noise_kind: NoiseKind) -> None:
    """Refuse an algorithm that asks for other noise.

    Raises:
        SpecError: it does, or it asks for none.
    """
    laws = set[Distribution]()

    def note(draw: NoiseRequest) -> FloatArray:
        laws.add(draw.distribution)
        return no_noise(draw)

    for _ in simulate_rounds(plan.run, plan.data, note):
        pass
    if not laws:
        raise SpecError(f"{plan.run.algorithm.name} draws no noise")
    if noise_kind == "laplace" and laws != {"laplace"}:
        raise SpecError("its noise is no Laplace noise")
    if noise_kind == "lattice" and "spherical" in laws:
        raise SpecError("its noise is on no lattice in the first place")


def mutate_noise(mutation: NoiseMutation, noise_kind: NoiseKind = "any") -> FaultFactory:
    """Other noise, of a learner whose noise is of this kind."""

    def source(seed: np.random.SeedSequence) -> NoiseSource:
        correct, other = spawn_seeds(seed, 2)
        noise, own = SeededNoise(correct), NoiseMutationState(np.random.default_rng(other))
        return lambda draw: mutation(noise(draw), draw, own)

    def breaks(plan: AuditPlan) -> Fault:
        require_noise(plan, noise_kind)
        return Fault(noise=source)

    return breaks


def apply_in_scale_units(change: Callable[[FloatArray, NoiseMutationState], FloatArray]) -> NoiseMutation:
    """A change of noise in units of its scale; what comes of it is on the lattice again."""
    return lambda noise, draw, source: draw.round_to_lattice(change(noise / draw.scale, source) * draw.scale)


def scale_on_lattice(noise: FloatArray, factor: float | FloatArray, draw: NoiseRequest) -> FloatArray:
    """Noise times a factor, on the lattice.

    Half of an odd number is always rounded to an even one, so a factor of few digits would show in low bits: it gets some more.
    """
    factors = np.where(np.asarray(factor) == 1.0, 1.0, np.asarray(factor) * (1.0 - 1e-9))
    return draw.round_to_lattice(factors * noise)


def scale_noise(factor: float) -> NoiseMutation:
    """Noise of another scale."""
    return lambda noise, draw, source: scale_on_lattice(noise, factor, draw)


def apply_randomly(change: NoiseMutation, share: float, *, per_message: bool = False) -> NoiseMutation:
    """A change of some numbers only, or of some messages, at random."""

    def partly(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState) -> FloatArray:
        shape = (*noise.shape[:-1], 1) if per_message else noise.shape
        return np.where(source.generator.random(shape) < share, change(noise, draw, source), noise)

    return partly


# ---- algorithms and losses -------------------------------------------------------------------------------------------


def mutate_algorithm(change: Callable[[Any], Any]) -> FaultFactory:
    """Another algorithm."""
    return lambda plan: Fault(actual_run=replace(plan.run, algorithm=change(plan.run.algorithm)))


class MethodOverride:
    """An algorithm, a loss, or what is heard, but for some methods.

    Args:
        correct: as it should be.
        methods: by name, in place of its own.
    """

    def __init__(self, correct: Any, **methods: Callable[..., Any]) -> None:
        self.original = correct
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "correct"), name)


def restrict_fault(build_fault: FaultFactory, is_applicable: Callable[[AuditPlan], bool], reason: str) -> FaultFactory:
    """A break that refuses the runs that it does not fit, and says why."""

    def checked(plan: AuditPlan) -> Fault:
        if not is_applicable(plan):
            raise SpecError(reason)
        return build_fault(plan)

    return checked


# ---- worlds ----------------------------------------------------------------------------------------------------------


def build_spike_worlds(times: float, other: float) -> WorldsFactory:
    """The first record with all weight in one feature, so many times the loss's bound, against another multiple."""

    def swap(run: Run, data: PlacedData, learner: int) -> Worlds:
        own = data.learners[learner]
        bound = run.loss.feature_bound if np.isfinite(run.loss.feature_bound) else 1.0
        spike, label = bound * np.eye(data.n_features)[0], float(own.labels.max())
        what = f"a first record of {times:g} times the bound, against one of {other:g} times"
        shared = run.algorithm.accountant(learner).has_shared_records
        first, second = (own.with_use(0, factor * spike, label) for factor in (times, other))
        return Worlds(learner, first, second, what, shared)

    return swap


# ---- bases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BaseRun:
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
    batch_size: int = 1
    epsilon: float | None = None

    def with_rounds(self, rounds: int) -> BaseRun:
        """The same for more rounds, or for fewer."""
        return replace(self, sections={**self.sections, "rounds": rounds})

    def build(self) -> tuple[Run, PlacedData]:
        """The run and its data."""
        spec = parse_spec({**_COMMON, "algorithm": dict(self.algorithm), **self.sections}, allow_imports=True)
        run = build_run(spec, self.n_features)
        if self.epsilon is not None:
            factor = run.guarantee(0).epsilon() / self.epsilon
            louder = spec.algorithm.scale_noise((factor,) * spec.n_learners)
            run = build_run(spec.model_copy(update={"algorithm": louder}), self.n_features)
        return run, _made_up(run, self.n_features, self.batch_size)


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


def _private(name: str, sections: Mapping[str, Any] = {}, **parameters: Any) -> BaseRun:
    """At so small an epsilon that few runs would be enough for a false alarm."""
    return BaseRun({"name": name, **parameters}, sections, epsilon=0.3)


ALGORITHM_RUNS: dict[str, BaseRun] = {
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
    "admm": BaseRun({"name": "admm"}, {"rounds": 5}),
    "d-ogd": BaseRun({"name": "d-ogd"}),
    "d-ftgl": BaseRun({"name": "d-ftgl"}),
}
"""A run of every algorithm, for false alarms. The last three promise nothing, so nothing can be refuted."""

_LONG = {"rounds": 16}
BASE_RUNS: dict[str, BaseRun] = {
    "ldp-dol": BaseRun({"name": "ldp-dol"}, _LONG, n_features=16, epsilon=10.0),
    "ldp-dol, 60,000 numbers": BaseRun({"name": "ldp-dol"}, {"rounds": 50}, n_features=60, epsilon=10.0),
    "ldp-dol, epsilon 1": BaseRun({"name": "ldp-dol"}, epsilon=1.0),
    "ldp-dol, budget": BaseRun({"name": "ldp-dol"}, {**_LONG, "privacy": {"budget": 4.0}}, epsilon=10.0),
    "dola": BaseRun({"name": "dola"}),
    "dola, batches of 4": BaseRun({"name": "dola"}, batch_size=4),
    "dola, 9 features": BaseRun({"name": "dola"}, n_features=9),
    "dola, 1 feature": BaseRun({"name": "dola"}, _HINGE, n_features=1, epsilon=3.0),
    "dvp": BaseRun({"name": "dvp", "alpha": 1.0}, {"rounds": 3}),
    "pvp": BaseRun({"name": "pvp", "alpha": 1.0}),
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
    if run.algorithm.accountant(0).has_shared_records:
        learners = learners[:1] * n
    return PlacedData(tuple(learners), features[0], labels[0])
