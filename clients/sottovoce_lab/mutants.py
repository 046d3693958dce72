"""Mutants: learners that are correct but for one fault, which an audit must find.

A mutant defines its fault, the small run that it is tried on (`BASE_RUNS`), the family of tests that must find it, and the
maximum number of runs of each world. The catalogue is in `catalogue`. A mutant of your own::

    LOW_NOISE = Mutant("low noise", "noise of 0.7 of its scale", mutate_noise(scale_noise(0.7)), "conformance", 20)

Information theory gives a lower limit: the number of runs with enough evidence for the best possible test. Values that follow Q
where P is claimed give KL(Q || P) nats each, on average. A test at level alpha that knew the fault beforehand needs about
`ln(1/alpha)` nats (Stein), and no other test needs fewer.
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

Family = Literal["conformance", "likelihood", "black box", "detections", "ledger"]
"""Check that finds a mutant: a family of the audit, the online checks of messages, or the privacy spent by messages."""

Kind = Literal[
    "scale",
    "tails and shape",
    "support and atoms",
    "lattice and low bits",
    "reuse within a run",
    "across learners",
    "across runs",
    "centre",
    "data-dependent noise",
    "side channels",
]
"""Class of the fault: the ten classes of the catalogue."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Real behaviour of a learner; a field that is not given means correct behaviour.

    Attributes:
        noise: factory of the noise source.
        actual_run: the run that is executed; None: the claimed run.
        claim_factor: the claim, as a fraction of the correct epsilon.
        compute_leak: side-channel features of some runs, `(runs, features)`.
        detect: findings in the messages of one run, a sentence for each family; None: judge the values of the messages.
    """

    noise: NoiseFactory = SeededNoise
    actual_run: Run | None = None
    claim_factor: float = 1.0
    compute_leak: Callable[[AuditPlan, RunChunk], FloatArray] | None = None
    detect: Callable[[AuditPlan], Mapping[Family, str]] | None = None


FaultFactory = Callable[[AuditPlan], Fault]
WorldsFactory = Callable[[Run, PlacedData, int], Worlds]

MinRunsEstimator = Callable[[Run, float], float]
"""Estimate, from a run and a level, the runs of each world with enough evidence; conformance uses both worlds."""

MAX_QUICK_RUNS, MAX_RUNS = 20, 2000
"""Maximum runs of each world in which conformance must find a large fault, and any fault that it can find."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A learner with one fault.

    Attributes:
        name: one or two words.
        description: the fault, in a few words.
        build_fault: builds the fault; raises a `SpecError` with the reason where it does not apply to a run.
        family: family of tests that must find it.
        max_runs: maximum runs of each world in which it must be found.
        base: name of the run that it is tried on, unless a run is given.
        build_worlds: builds the two worlds from run, data and learner; None: the worst-case worlds.
        kind: class in the catalogue.
        estimate_min_runs: runs of each world with enough evidence; None: not known.
        quick: whether every self-test tries it, or only a measurement of power.
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
    """Return a constructor of mutants of one class, with conformance as the default family."""

    def make_mutant(
        name: str,
        description: str,
        build_fault: FaultFactory,
        limit: MinRunsEstimator | None = None,
        *,
        quick: bool = False,
        **options: Any,
    ) -> Mutant:
        defaults: dict[str, Any] = {
            "family": "conformance",
            "max_runs": MAX_QUICK_RUNS if quick else MAX_RUNS,
            "estimate_min_runs": limit,
        }
        return Mutant(name, description, build_fault, kind=kind, quick=quick, **{**defaults, **options})

    return make_mutant


def make_noise_mutant_factory(kind: Kind) -> Callable[..., Mutant]:
    """Return a constructor of mutants of one class that change the noise, by default Laplace noise."""
    make_mutant = make_mutant_factory(kind)

    def make_noise_mutant(
        name: str,
        description: str,
        mutation: NoiseMutation,
        limit: MinRunsEstimator | None = None,
        *,
        noise_kind: NoiseKind = "laplace",
        **options: Any,
    ) -> Mutant:
        return make_mutant(name, description, mutate_noise(mutation, noise_kind), limit, **options)

    return make_noise_mutant


# ---- evidence --------------------------------------------------------------------------------------------------------

TARGET_POWER = 0.9
"""Required probability of finding a fault."""


def estimate_from_numbers(nats: float, share: float = 1.0) -> MinRunsEstimator:
    """Estimate runs from the evidence per value: `nats` is the mean over all values, concentrated in the fraction `share`."""
    return lambda run, alpha: _compute_min_runs(alpha, nats, share, count_numbers(run))


def estimate_from_messages(nats: float, share: float = 1.0) -> MinRunsEstimator:
    """Estimate runs from the mean evidence per message."""
    return lambda run, alpha: _compute_min_runs(alpha, nats, share, run.spec.rounds * run.spec.n_learners)


def estimate_from_runs(nats: float, share: float = 1.0) -> MinRunsEstimator:
    """Estimate runs from the mean evidence per run."""
    return lambda run, alpha: _compute_min_runs(alpha, nats, share, 1)


def _compute_min_runs(alpha: float, nats: float, share: float, count: int) -> float:
    """Compute runs of each of the two worlds with enough evidence; a rare fault must also occur at least once."""
    to_occur = math.log(1.0 / (1.0 - TARGET_POWER)) / share if share < 1.0 else 0.0
    return max(math.log(1.0 / alpha) / nats, to_occur) / (2.0 * count)


def compute_bernoulli_kl(actual: float, claimed: float) -> float:
    """Compute the KL divergence in nats of an event with these actual and claimed probabilities."""
    return _kl_term(actual, claimed) + _kl_term(1.0 - actual, 1.0 - claimed)


def _kl_term(actual: float, claimed: float) -> float:
    return 0.0 if actual == 0.0 else actual * math.log(actual / claimed)


def compute_scale_kl(factor: float) -> float:
    """Compute the KL divergence in nats of a Laplace value whose scale is wrong by this factor."""
    return factor - 1.0 - math.log(factor)


# ---- noise -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class NoiseMutationState:
    """State of a mutated noise source.

    Attributes:
        generator: random number generator of the mutation.
        memory: values kept from message to message.
    """

    generator: np.random.Generator
    memory: dict[Any, Any] = field(default_factory=dict)

    def replace_previous(self, request: NoiseRequest, now: Any) -> Any:
        """Store `now` and return the stored value of the same field of the previous round; None if absent or of other runs."""
        before, self.memory[request.field] = self.memory.get(request.field), now
        return before if before is not None and before.shape == now.shape else None


NoiseMutation = Callable[[FloatArray, NoiseRequest, NoiseMutationState], FloatArray]
"""Function from correct noise to the noise that is used."""

NoiseKind = Literal["laplace", "lattice", "any"]
"""Noise that a mutation applies to: Laplace noise, noise on a lattice, or any noise."""


def require_noise(plan: AuditPlan, noise_kind: NoiseKind) -> None:
    """Refuse an algorithm whose noise requests do not fit.

    Raises:
        SpecError: The algorithm requests noise of another kind, or none.
    """
    distributions = set[Distribution]()

    def record_request(request: NoiseRequest) -> FloatArray:
        distributions.add(request.distribution)
        return no_noise(request)

    for _ in simulate_rounds(plan.run, plan.data, record_request):
        pass
    if not distributions:
        raise SpecError(f"the algorithm must request noise, and {plan.run.algorithm.name} requests none")
    if noise_kind == "laplace" and distributions != {"laplace"}:
        raise SpecError(f"the noise must be Laplace noise, got {', '.join(sorted(distributions))}")
    if noise_kind == "lattice" and "spherical" in distributions:
        raise SpecError("the noise must be on a lattice, got spherical noise")


def mutate_noise(mutation: NoiseMutation, noise_kind: NoiseKind = "any") -> FaultFactory:
    """Build a fault that changes noise of this kind."""

    def make_source(seed: np.random.SeedSequence) -> NoiseSource:
        correct, other = spawn_seeds(seed, 2)
        noise, state = SeededNoise(correct), NoiseMutationState(np.random.default_rng(other))
        return lambda request: mutation(noise(request), request, state)

    def build_fault(plan: AuditPlan) -> Fault:
        require_noise(plan, noise_kind)
        return Fault(noise=make_source)

    return build_fault


def apply_in_scale_units(change: Callable[[FloatArray, NoiseMutationState], FloatArray]) -> NoiseMutation:
    """Apply a change to noise in units of its scale, and round the result to the lattice."""
    return lambda noise, request, state: request.round_to_lattice(change(noise / request.scale, state) * request.scale)


def scale_on_lattice(noise: FloatArray, factor: float | FloatArray, request: NoiseRequest) -> FloatArray:
    """Multiply noise by a factor, on the lattice.

    Half of an odd integer is always rounded to an even one, so a factor of few digits would show in the low bits. More digits are
    added to the factor.
    """
    factors = np.where(np.asarray(factor) == 1.0, 1.0, np.asarray(factor) * (1.0 - 1e-9))
    return request.round_to_lattice(factors * noise)


def scale_noise(factor: float) -> NoiseMutation:
    """Multiply all noise by a factor."""
    return lambda noise, request, state: scale_on_lattice(noise, factor, request)


def apply_randomly(change: NoiseMutation, share: float, *, per_message: bool = False) -> NoiseMutation:
    """Apply a mutation to a random fraction of the values, or of the messages."""

    def mutate_part(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState) -> FloatArray:
        shape = (*noise.shape[:-1], 1) if per_message else noise.shape
        return np.where(state.generator.random(shape) < share, change(noise, request, state), noise)

    return mutate_part


# ---- algorithms and losses -------------------------------------------------------------------------------------------


def mutate_algorithm(change: Callable[[Any], Any]) -> FaultFactory:
    """Build a fault that runs a changed algorithm."""
    return lambda plan: Fault(actual_run=replace(plan.run, algorithm=change(plan.run.algorithm)))


class MethodOverride:
    """A wrapper of an algorithm, a loss or received messages that replaces some methods.

    Args:
        original: the wrapped object.
        methods: replacements, by name.
    """

    def __init__(self, original: Any, **methods: Callable[..., Any]) -> None:
        self.original = original
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "original"), name)


def restrict_fault(build_fault: FaultFactory, is_applicable: Callable[[AuditPlan], bool], reason: str) -> FaultFactory:
    """Make a fault refuse the runs that it does not apply to, with this reason."""

    def build_if_applicable(plan: AuditPlan) -> Fault:
        if not is_applicable(plan):
            raise SpecError(reason)
        return build_fault(plan)

    return build_if_applicable


# ---- worlds ----------------------------------------------------------------------------------------------------------


def build_spike_worlds(times: float, other: float) -> WorldsFactory:
    """Build worlds whose first record has all weight in one feature: two multiples of the loss's feature bound."""

    def build_worlds(run: Run, data: PlacedData, learner: int) -> Worlds:
        own = data.learners[learner]
        bound = run.loss.feature_bound if np.isfinite(run.loss.feature_bound) else 1.0
        spike, label = bound * np.eye(data.n_features)[0], float(own.labels.max())
        description = f"a first record of {times:g} times the bound, against one of {other:g} times"
        shared = run.algorithm.accountant(learner).has_shared_records
        first, second = (own.with_use(0, factor * spike, label) for factor in (times, other))
        return Worlds(learner, first, second, description, shared)

    return build_worlds


# ---- bases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BaseRun:
    """A small run with synthetic records.

    Attributes:
        algorithm: the `algorithm` section of its spec.
        sections: other sections, which replace those of `_COMMON`.
        n_features: number of features of a record.
        batch_size: records of a round.
        epsilon: approximate claim of the first learner, reached by scaling the noise; None: the claim of the spec.
    """

    algorithm: Mapping[str, Any]
    sections: Mapping[str, Any] = field(default_factory=dict)
    n_features: int = 3
    batch_size: int = 1
    epsilon: float | None = None

    def with_rounds(self, rounds: int) -> BaseRun:
        """Return a copy with another number of rounds."""
        return replace(self, sections={**self.sections, "rounds": rounds})

    def build(self) -> tuple[Run, PlacedData]:
        """Build the run and its data."""
        spec = parse_spec({**_COMMON, "algorithm": dict(self.algorithm), **self.sections}, allow_imports=True)
        run = build_run(spec, self.n_features)
        if self.epsilon is not None:
            factor = run.guarantee(0).epsilon() / self.epsilon
            rescaled = spec.algorithm.scale_noise((factor,) * spec.n_learners)
            run = build_run(spec.model_copy(update={"algorithm": rescaled}), self.n_features)
        return run, _generate_data(run, self.n_features, self.batch_size)


_COMMON: dict[str, Any] = {
    "rounds": 8,
    "learners": 3,
    "loss": {"kind": "logistic", "ridge": 0.05},
    "decision_set": {"kind": "l2_ball", "radius": 2.0},
    "topology": {"graph": "ring", "weights": "metropolis"},
    "durability": "process",
}
_DIRECTED = {"sequence": {"kind": "random", "probability": 0.5, "seed": 1, "directed": True}, "weights": "out_degree"}
_CYCLE = {"graph": {"kind": "edges", "edges": [[0, 1], [1, 2], [2, 0]], "directed": True}, "weights": "in_degree"}
_HINGE = {"loss": {"kind": "hinge", "ridge": 0.02}}


def _private(name: str, sections: Mapping[str, Any] = {}, **parameters: Any) -> BaseRun:
    """Build a base run with an epsilon so small that few runs are enough for a false alarm."""
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
    "dpsda-ps": _private("dpsda-ps", {"topology": _DIRECTED}),
    "dpps": _private("dpps", {"topology": _DIRECTED}),
    "dpcda": _private("dpcda", {**_HINGE, "learners": 1}),
    "pd-ftgl": _private("pd-ftgl", _HINGE, epsilon=3.0, block_length=1),
    "pd-ocg": _private("pd-ocg", _HINGE, epsilon=3.0, block_length=1),
    "dvp": _private("dvp", {"rounds": 5}),
    "pvp": _private("pvp", {"rounds": 5}),
    "admm": BaseRun({"name": "admm"}, {"rounds": 5}),
    "d-ogd": BaseRun({"name": "d-ogd"}),
    "d-ftgl": BaseRun({"name": "d-ftgl"}),
}
"""Base run of every algorithm, for false alarms. The last three have no finite claim, so no audit can refute them."""

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
"""Base runs of the mutants."""


def _generate_data(run: Run, n_features: int, batch_size: int) -> PlacedData:
    """Generate normal features and fair labels; all learners share the records where the algorithm requires it."""
    generator, rounds, n = np.random.default_rng(0), run.spec.rounds, run.spec.n_learners
    offsets = (np.arange(rounds + 1) * batch_size).astype(np.int64)
    features = generator.normal(size=(n, rounds * batch_size, n_features))
    labels = (generator.random((n, rounds * batch_size)) < 0.5).astype(np.float64)
    order = np.arange(rounds * batch_size)
    learners = [LearnerData(features[i], labels[i], order, offsets) for i in range(n)]
    if run.algorithm.accountant(0).has_shared_records:
        learners = learners[:1] * n
    return PlacedData(tuple(learners), features[0], labels[0])
