"""Calibration of noise to a privacy budget, and a first spec for your own records.

Epsilon falls as noise grows, mostly in inverse proportion. So every step guesses in proportion; a guess outside the known
bracket is replaced by bisection. Each learner's budget depends on its own noise, so all are searched at once.

`propose_spec` chooses algorithm, batches and noise such that no record costs more than a given epsilon. It takes PD-OGD, whose
decision is the public mix: a record influences one message, whose noise is proportional to the influence of one record of a
batch, so large batches cost little accuracy, and the model follows from messages that were charged.

A round's records first influence the message after it. So a learner's records left over from full batches come in the last
round, which influences no message: a small batch would cost more than a full one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sottovoce_core.arrays import FloatArray
from sottovoce_core.budget.cost import LearnerCost, PrivacyUnit, compose_costs
from sottovoce_core.data import PlacedData
from sottovoce_core.data.dataset import Dataset
from sottovoce_core.errors import SpecError
from sottovoce_core.runs.placement import place_data
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.spec import RunSpec, parse_spec

# ---- calibration -----------------------------------------------------------------------------------------------------

_TOLERANCE = 1e-3
"""Share of a target that may stay unspent."""
MAX_CALIBRATION_STEPS = 100
"""Maximum number of steps of one search."""


@dataclass(frozen=True, slots=True)
class BudgetTarget:
    """Privacy budget of each learner's messages.

    Attributes:
        epsilons: one for each learner. If learners share one noise scale, none exceeds its own budget and at least one meets
            it. If they share their records, all must be equal: the budget of all their messages together.
        horizon: number of rounds covered, at most those of the run (None: all of them); infinite: for ever.
        unit: budget for one use of a record, or for a record in all of its uses.
        delta: the epsilons are at this delta; 0: pure.
    """

    epsilons: tuple[float, ...]
    horizon: float | None = None
    unit: PrivacyUnit = "record_use"
    delta: float = 0.0


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """The calibrated spec, the factors on its noise, and the epsilon of each learner."""

    spec: RunSpec
    factors: tuple[float, ...]
    epsilons: tuple[float, ...]


def calibrate(
    spec: RunSpec, data: PlacedData, target: BudgetTarget, *, has_distributions: bool = True
) -> CalibrationResult:
    """Return the spec with the least noise that meets the budget, within `_TOLERANCE` below it.

    Args:
        spec: spec with noise to start from.
        data: its records; their numbers by round, and how often each is used, are public.
        target: the budget.
        has_distributions: as of `LearnerCost.epsilon`; False: the target bounds what a learner itself charges.

    Raises:
        SpecError: epsilon is infinite, the target cannot be met, or a condition of the algorithm fails during the search.
    """
    targets = _targets(spec, target)
    if not target.delta:
        return _search(spec, data, target, targets, np.ones(len(targets)))
    # Loss distributions are slow to compose, and mostly give a larger epsilon than Renyi divergences, which are tried first.
    found = _search(spec, data, target, targets, np.ones(len(targets)), has_distributions=False)
    return _search(spec, data, target, targets, np.array(found.factors)) if has_distributions else found


def _search(
    spec: RunSpec,
    data: PlacedData,
    target: BudgetTarget,
    targets: FloatArray,
    factors: FloatArray,
    *,
    has_distributions: bool = True,
) -> CalibrationResult:
    """Search from these factors on; arguments and errors as of `calibrate` and `LearnerCost.epsilon`."""
    has_one_scale = spec.algorithm.has_shared_noise_scale
    low, high = np.zeros(len(targets)), np.full(len(targets), math.inf)
    before: tuple[FloatArray, FloatArray] | None = None
    spent = factors
    for _ in range(MAX_CALIBRATION_STEPS):
        scaled, run = _scale_noise(spec, data, factors)
        spent = _compute_spent(run, data, target, has_distributions=has_distributions)
        _require_finite(run, target, spent)
        ratio = spent / targets
        if has_one_scale:
            ratio = np.full_like(ratio, ratio.max())
        met = ratio <= 1.0
        if (met & (ratio >= 1.0 - _TOLERANCE)).all():
            return CalibrationResult(scaled, tuple(factors.tolist()), tuple(spent.tolist()))
        if before is not None:
            _require_progress(run, factors / before[0], ratio, before[1], target)
        low, high = np.where(met, low, np.maximum(low, factors)), np.where(met, np.minimum(high, factors), high)
        before, factors = (factors, ratio), _next_factors(factors, ratio, low, high)
    raise SpecError(f"no noise was found that meets epsilon {_format(targets)}; the last step got {_format(spent)}")


def compute_epsilons(
    run: Run, data: PlacedData, unit: PrivacyUnit = "record_use", delta: float = 0.0
) -> tuple[float, ...]:
    """Return epsilon of each learner's messages alone, pure or at a delta, as a learner charges it."""
    costs = [LearnerCost(run, i, own) for i, own in enumerate(data.learners)]
    return tuple(each.epsilon(unit, delta, has_distributions=False) for each in costs)


def _compute_spent(run: Run, data: PlacedData, target: BudgetTarget, *, has_distributions: bool) -> FloatArray:
    """Compute the epsilons `(learners,)` to compare with the targets."""
    if target.horizon == math.inf:
        costs = [LearnerCost(run, i, own) for i, own in enumerate(data.learners)]
        epsilons = [_compute_infinite_horizon(each, target.unit) for each in costs]
        return np.array([math.fsum(epsilons)] * len(epsilons) if _has_shared_records(run.spec) else epsilons)
    rounds = None if target.horizon is None else int(target.horizon)
    costs = [LearnerCost(run, i, own, rounds) for i, own in enumerate(data.learners)]
    if _has_shared_records(run.spec):
        together = compose_costs(costs, target.unit, target.delta, has_distributions=has_distributions)
        return np.full(len(costs), together)
    return np.array([each.epsilon(target.unit, target.delta, has_distributions=has_distributions) for each in costs])


def _compute_infinite_horizon(cost: LearnerCost, unit: PrivacyUnit) -> float:
    """Return epsilon over infinitely many rounds. A record that is used repeatedly has no bounded number of uses."""
    is_used_once = unit == "record_use" or all(each.n_uses == 1 for each in cost.records)
    return cost.guarantee.infinite_horizon_epsilon if is_used_once else math.inf


def _has_shared_records(spec: RunSpec) -> bool:
    return spec.data.partition.is_shared


def _scale_noise(spec: RunSpec, data: PlacedData, factors: FloatArray) -> tuple[RunSpec, Run]:
    changed = spec.model_copy(update={"algorithm": spec.algorithm.scale_noise(tuple(factors.tolist()))})
    return changed, build_run(changed, data.n_features)


def _next_factors(factors: FloatArray, ratio: FloatArray, low: FloatArray, high: FloatArray) -> FloatArray:
    """Scale in proportion, to the middle of the tolerance; outside the bracket bisect on a logarithmic scale."""
    done = (ratio <= 1.0) & (ratio >= 1.0 - _TOLERANCE)
    guess = factors * ratio * (1.0 + _TOLERANCE / 2.0)
    between = np.sqrt(low * high)  # infinite or 0 while one side is open
    open_ended = np.where(high == math.inf, factors * 8.0, factors / 8.0)
    middle = np.where((low > 0.0) & (high < math.inf), between, open_ended)
    return np.where(done, factors, np.where((guess > low) & (guess < high), guess, middle))


# ---- unreachable targets ---------------------------------------------------------------------------------------------


def _targets(spec: RunSpec, target: BudgetTarget) -> FloatArray:
    for epsilon in target.epsilons:
        if not 0.0 < epsilon < math.inf:
            raise SpecError(f"a target epsilon must be above 0 and finite, got {epsilon}")
    if not 0.0 <= target.delta < 1.0:
        raise SpecError(f"delta must be at least 0 and below 1, got {target.delta:g}")
    if target.delta and target.horizon == math.inf:
        raise SpecError("a target at a delta needs a finite horizon: give a number of rounds, or leave delta out")
    if _has_shared_records(spec) and len(set(target.epsilons)) > 1:
        text = "learners that share their records have one budget for all their messages together"
        raise SpecError(f"{text}: give one epsilon, got {_format(np.array(target.epsilons))}")
    horizon = spec.rounds if target.horizon is None else target.horizon
    if horizon < 1 or spec.rounds < horizon < math.inf:
        text = f"a horizon must be at least 1 and at most the run's {spec.rounds} rounds, or inf"
        raise SpecError(f"{text}, got {horizon:g}; for a longer one raise rounds")
    return np.array(target.epsilons)


def _require_finite(run: Run, target: BudgetTarget, spent: FloatArray) -> None:
    """Raise `SpecError` with the reason if a budget is infinite, or 0 for any noise."""
    unbounded = np.flatnonzero(~np.isfinite(spent))
    if len(unbounded):
        learner = int(unbounded[0])
        raise SpecError(f"the budget of {run.spec.names[learner]} is infinite: {_why_infinite(run, learner, target)}")
    if (spent == 0.0).any():
        name, text = run.spec.names[int(np.argmin(spent))], "no message of the horizon depends on a record"
        raise SpecError(f"the budget of {name} is 0 with any noise: {text}; give it more rounds or records")


def _why_infinite(run: Run, learner: int, target: BudgetTarget) -> str:
    finite_rounds = math.isfinite(run.guarantee(learner).epsilon())
    if target.horizon == math.inf and finite_rounds:
        text = f"with these parameters and records {run.algorithm.name} has no finite bound over infinitely many rounds"
        return f"{text}, as ldp-dol has where u < v and every round brings records, each once; give a number of rounds"
    exposed = [finding.text for finding in run.warnings if finding.code == "WIRE_EXPOSED"]
    if exposed:
        return exposed[0]
    unprotected = [t for t in range(1, run.spec.rounds) if run.algorithm.noise_scale(learner, t) == 0.0]
    if unprotected:
        return f"its message of round {unprotected[0]} carries no noise; give algorithm a noise above 0"
    return f"a record's gradient has no bound, got loss.clip_norm={run.spec.loss.clip_norm}; set it"


def _require_progress(
    run: Run, growth: FloatArray, ratio: FloatArray, before: FloatArray, target: BudgetTarget
) -> None:
    """Raise `SpecError` if more noise no longer lowers epsilon: the rest is a floor that no noise lowers."""
    stuck = np.flatnonzero((growth >= 2.0) & (ratio > 1.0) & (ratio >= 0.99 * before))
    if len(stuck):
        learner, epsilon = int(stuck[0]), target.epsilons[int(stuck[0])]
        text = "rounding to the noise's lattice, and a solver's tolerance, cost the same with any noise"
        least = f"{epsilon * ratio[learner]:.3g}"
        raise SpecError(f"epsilon of {run.spec.names[learner]} must be above {least}: {text}; got {epsilon:g}")


def _format(values: FloatArray) -> str:
    return ", ".join(f"{value:.6g}" for value in np.unique(values))


# ---- first spec ------------------------------------------------------------------------------------------------------

DEFAULT_ALGORITHM: Mapping[str, Any] = {"name": "pd-ogd", "noise": {"kind": "calibrated"}}
DEFAULT_ROUNDS = 6
"""Default number of rounds: few rounds have large batches, whose noise is small."""
_DIGITS = 4
"""Significant digits of a proposed epsilon, rounded towards more noise."""


def propose_spec(
    document: Mapping[str, Any], dataset: Dataset, epsilon: float, rounds: int = DEFAULT_ROUNDS, *, delta: float = 0.0
) -> RunSpec:
    """Complete a spec with an algorithm, rounds, batches and noise.

    Args:
        document: spec without these.
        dataset: its records.
        epsilon: maximum epsilon of a record.
        rounds: maximum number of rounds; a source that places its records in rounds has its own.
        delta: delta of epsilon; 0: it is pure.

    Raises:
        SpecError: a learner gets no record, no noise is enough, or the result has a warning.
        DataError: the records cannot be placed.
    """
    if dataset.round is not None:
        rounds, batch = int(dataset.round.max()) + 1, 1
    else:
        fewest = min(len(own.labels) for own in place_data(_parse(document, 1, "all"), dataset).learners)
        batch = max(1, fewest // max(rounds - 1, 1))
        rounds = min(rounds, fewest // batch + 1)
    if rounds < 2:
        raise SpecError(f"rounds must be at least 2, because records of round 0 first influence round 1, got {rounds}")
    spec = _parse(document, rounds, batch)
    data = place_data(spec, dataset)
    target = BudgetTarget((epsilon,) * spec.n_learners, unit="record", delta=delta)
    proposal = calibrate(spec, data, target, has_distributions=False).spec
    proposal = proposal.model_copy(update={"algorithm": _round_epsilons(proposal.algorithm)})
    run = build_run(proposal, data.n_features)
    if run.warnings:
        raise SpecError(f"no spec for epsilon {epsilon:g} satisfies the theory: {run.warnings[0].text}")
    spent = max(compute_epsilons(run, data, "record", delta))
    if spent > epsilon:  # impossible: rounding only adds noise
        raise AssertionError(f"epsilon {spent} was to be at most {epsilon}")
    return proposal


def _parse(document: Mapping[str, Any], rounds: int, batch: int | str) -> RunSpec:
    data = {**document["data"], "batch_size": batch}
    return parse_spec(
        {**document, "rounds": rounds, "algorithm": dict(DEFAULT_ALGORITHM), "data": data}, allow_imports=False
    )


def _round_epsilons(algorithm: Any) -> Any:
    """Round the epsilons of an algorithm down to few digits."""
    noise = algorithm.noise
    rounded = tuple(_round_down(float(each)) for each in np.atleast_1d(noise.epsilon))
    epsilon = rounded if len(set(rounded)) > 1 else rounded[0]
    return algorithm.model_copy(update={"noise": noise.model_copy(update={"epsilon": epsilon})})


def _round_down(value: float) -> float:
    step = 10.0 ** (math.floor(math.log10(value)) + 1 - _DIGITS)
    return float(f"{math.floor(value / step * (1 + 1e-12)) * step:.{_DIGITS}g}")
