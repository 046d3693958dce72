"""From a privacy budget to the noise that meets it, and to a first spec for records of one's own.

Epsilon falls as noise grows, mostly in inverse proportion. So every step guesses in proportion; a guess outside the bracket
that is known so far is replaced by bisection. Each learner's budget depends on its own noise, so all are searched at once.

A first spec for somebody's records: an algorithm, batches and noise, such that no record costs more than a wished epsilon.

PD-OGD, with the public mix played: a record shows in one message, whose noise is in proportion to what one record of a batch
can move it, so large batches cost little accuracy, and the model follows from messages that were charged.

A round's records first show in the message after it. So what is left of a learner's records when all batches are full comes in
the last round, which shows in none: a small batch would cost more than a full one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sottovoce_core.arrays import FloatArray
from sottovoce_core.budget.composition import group_record_losses, worst_case_record_epsilon
from sottovoce_core.data import PlacedData
from sottovoce_core.data.dataset import Dataset
from sottovoce_core.errors import SpecError
from sottovoce_core.runs.placement import place_data
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.spec import RunSpec, parse_spec

# ---- calibration -----------------------------------------------------------------------------------------------------

BudgetUnit = Literal["record_use", "record"]

_TOLERANCE = 1e-3
"""Part of a target that may be left unspent."""
MAX_CALIBRATION_STEPS = 100


@dataclass(frozen=True, slots=True)
class BudgetTarget:
    """What a learner's messages may cost.

    Attributes:
        epsilons: one for each learner. Where learners share one number for their noise, none exceeds its own and the nearest
            meets it. Where they share their records, all must be equal: the budget of all their messages together.
        horizon: rounds that they cover, at most those of the run (None: all of them); infinite: for ever.
        per: for an event, or for a record in all of its uses.
    """

    epsilons: tuple[float, ...]
    horizon: float | None = None
    unit: BudgetUnit = "record_use"


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """The spec that was found, the factors on its noise, and what each learner then spends."""

    spec: RunSpec
    factors: tuple[float, ...]
    epsilons: tuple[float, ...]


def calibrate(spec: RunSpec, data: PlacedData, target: BudgetTarget) -> CalibrationResult:
    """The same spec with as little noise as meets the budget from below, within `_TOLERANCE` of it.

    Args:
        spec: with noise to start from.
        data: its records: their numbers by round, and how often each is used, are public.
        target: what to meet.

    Raises:
        SpecError: nothing finite is promised, the target is out of reach, or a condition of the algorithm fails on the way.
    """
    targets = _targets(spec, target)
    one = spec.algorithm.has_shared_noise_scale
    factors, low, high = np.ones(len(targets)), np.zeros(len(targets)), np.full(len(targets), math.inf)
    before: tuple[FloatArray, FloatArray] | None = None
    spent = factors
    for _ in range(MAX_CALIBRATION_STEPS):
        found, run = _louder(spec, data, factors)
        spent = _spent(run, data, target)
        _insist_on_finite(run, target, spent)
        ratio = spent / targets
        if one:
            ratio = np.full_like(ratio, ratio.max())
        met = ratio <= 1.0
        if (met & (ratio >= 1.0 - _TOLERANCE)).all():
            return CalibrationResult(found, tuple(factors.tolist()), tuple(spent.tolist()))
        if before is not None:
            _insist_on_progress(run, factors / before[0], ratio, before[1], target)
        low, high = np.where(met, low, np.maximum(low, factors)), np.where(met, np.minimum(high, factors), high)
        before, factors = (factors, ratio), _next(factors, ratio, low, high)
    raise SpecError(f"no noise was found that meets epsilon {_several(targets)}; got {_several(spent)} at last")


def compute_epsilons(
    run: Run, data: PlacedData, horizon: float | None = None, unit: BudgetUnit = "record_use"
) -> tuple[float, ...]:
    """What each learner's messages cost over the horizon, by itself."""
    return tuple(_epsilon(run, data, i, horizon, unit) for i in range(run.spec.n_learners))


def _epsilon(run: Run, data: PlacedData, learner: int, horizon: float | None, per: BudgetUnit) -> float:
    own = data.learners[learner]
    event = run.guarantee(learner, np.diff(own.offsets))
    records = (
        group_record_losses(run.algorithm.accountant(learner), own, run.participation(learner).end)
        if per == "record"
        else []
    )
    if horizon == math.inf:  # a record that is used again and again has no end to be planned for
        return event.infinite_horizon_epsilon if all(each.n_uses == 1 for each in records) else math.inf
    rounds = run.spec.rounds if horizon is None else int(horizon)
    if per == "record_use":
        return event.epsilon(rounds)
    return worst_case_record_epsilon([each.truncate(rounds) for each in records], event.round_losses[:rounds])


def _spent(run: Run, data: PlacedData, target: BudgetTarget) -> FloatArray:
    """`(learners,)`, to be compared with the targets."""
    each = compute_epsilons(run, data, target.horizon, target.unit)
    return np.array([math.fsum(each)] * len(each) if _shared(run.spec) else each)


def _shared(spec: RunSpec) -> bool:
    return spec.data.partition.is_shared


def _louder(spec: RunSpec, data: PlacedData, factors: FloatArray) -> tuple[RunSpec, Run]:
    changed = spec.model_copy(update={"algorithm": spec.algorithm.scale_noise(tuple(factors.tolist()))})
    return changed, build_run(changed, data.n_features)


def _next(factors: FloatArray, ratio: FloatArray, low: FloatArray, high: FloatArray) -> FloatArray:
    """In proportion, to the middle of what is allowed; else bisect, on a logarithmic scale."""
    done = (ratio <= 1.0) & (ratio >= 1.0 - _TOLERANCE)
    guess = factors * ratio * (1.0 + _TOLERANCE / 2.0)
    between = np.sqrt(low * high)  # infinite or 0 while one side is open
    open_ended = np.where(high == math.inf, factors * 8.0, factors / 8.0)
    middle = np.where((low > 0.0) & (high < math.inf), between, open_ended)
    return np.where(done, factors, np.where((guess > low) & (guess < high), guess, middle))


# ---- what cannot be met ----------------------------------------------------------------------------------------------


def _targets(spec: RunSpec, target: BudgetTarget) -> FloatArray:
    for epsilon in target.epsilons:
        if not 0.0 < epsilon < math.inf:
            raise SpecError(f"a target epsilon must be above 0 and finite, got {epsilon}")
    if _shared(spec) and len(set(target.epsilons)) > 1:
        text = "learners that share their records share one budget, that of all their messages together"
        raise SpecError(f"{text}: give one epsilon, got {_several(np.array(target.epsilons))}")
    horizon = spec.rounds if target.horizon is None else target.horizon
    if horizon < 1 or spec.rounds < horizon < math.inf:
        text = f"a horizon must be at least 1 and at most the run's {spec.rounds} rounds, or inf"
        raise SpecError(f"{text}, got {horizon:g}; for a longer one raise rounds")
    return np.array(target.epsilons)


def _insist_on_finite(run: Run, target: BudgetTarget, spent: FloatArray) -> None:
    """Say why there is nothing to calibrate."""
    unbounded = np.flatnonzero(~np.isfinite(spent))
    if len(unbounded):
        learner = int(unbounded[0])
        raise SpecError(f"the budget of {run.spec.names[learner]} is infinite: {_why_infinite(run, learner, target)}")
    if (spent == 0.0).any():
        name, text = run.spec.names[int(np.argmin(spent))], "no message of the horizon depends on a record"
        raise SpecError(f"the budget of {name} is 0 whatever its noise: {text}; give it more rounds or records")


def _why_infinite(run: Run, learner: int, target: BudgetTarget) -> str:
    finite_rounds = math.isfinite(run.guarantee(learner).epsilon())
    if target.horizon == math.inf and finite_rounds:
        text = f"with these parameters and records {run.algorithm.name} has no finite bound over infinitely many rounds"
        return f"{text}, as ldp-dol has where u < v and every round brings records, each once; give a number of rounds"
    exposed = [finding.text for finding in run.warnings if finding.code == "WIRE_EXPOSED"]
    if exposed:
        return exposed[0]
    silent = [t for t in range(1, run.spec.rounds) if run.algorithm.noise_scale(learner, t) == 0.0]
    if silent:
        return f"its message of round {silent[0]} carries no noise; give algorithm a noise above 0"
    return f"a record's gradient has no bound, got loss.clip_norm={run.spec.loss.clip_norm}; set it"


def _insist_on_progress(
    run: Run, growth: FloatArray, ratio: FloatArray, before: FloatArray, target: BudgetTarget
) -> None:
    """More noise must lower what is spent: a part that noise does not lower is a floor."""
    stuck = np.flatnonzero((growth >= 2.0) & (ratio > 1.0) & (ratio >= 0.99 * before))
    if len(stuck):
        learner, epsilon = int(stuck[0]), target.epsilons[int(stuck[0])]
        text = "rounding to the noise's lattice, and a solver's tolerance, cost the same with any noise"
        least = f"{epsilon * ratio[learner]:.3g}"
        raise SpecError(f"epsilon of {run.spec.names[learner]} must be above {least}: {text}; got {epsilon:g}")


def _several(values: FloatArray) -> str:
    return ", ".join(f"{value:.6g}" for value in np.unique(values))


# ---- first spec ------------------------------------------------------------------------------------------------------

DEFAULT_ALGORITHM: Mapping[str, Any] = {"name": "pd-ogd", "noise": {"kind": "calibrated"}}
DEFAULT_ROUNDS = 6
"""Where nobody says how many: few rounds have large batches, whose noise is small."""
_DIGITS = 4
"""Of a noise, for people: rounded towards more noise."""


def propose_spec(
    document: Mapping[str, Any], dataset: Dataset, epsilon: float, rounds: int = DEFAULT_ROUNDS
) -> RunSpec:
    """The spec with an algorithm, rounds, batches and noise.

    Args:
        document: of a spec without these.
        dataset: its records.
        epsilon: what a record may cost at most.
        rounds: at most so many; a source that places its records in rounds has its own.

    Raises:
        SpecError: a learner gets no record, or no noise is enough, or only with a warning.
        DataError: the records cannot be placed.
    """
    if dataset.round is not None:
        rounds, batch = int(dataset.round.max()) + 1, 1
    else:
        least = min(len(own.labels) for own in place_data(_parsed(document, 1, "all"), dataset).learners)
        batch = max(1, least // max(rounds - 1, 1))
        rounds = min(rounds, least // batch + 1)
    if rounds < 2:
        raise SpecError(f"rounds must be at least 2, for records of round 0 show in round 1, got {rounds}")
    spec = _parsed(document, rounds, batch)
    data = place_data(spec, dataset)
    found = calibrate(spec, data, BudgetTarget((epsilon,) * spec.n_learners, unit="record")).spec
    found = found.model_copy(update={"algorithm": _readable(found.algorithm)})
    run = build_run(found, data.n_features)
    if run.warnings:
        raise SpecError(f"no spec for epsilon {epsilon:g} is within the theory: {run.warnings[0].text}")
    spent = max(compute_epsilons(run, data, unit="record"))
    if spent > epsilon:  # noise only grew
        raise AssertionError(f"epsilon {spent} was to be at most {epsilon}")
    return found


def _parsed(document: Mapping[str, Any], rounds: int, batch: int | str) -> RunSpec:
    data = {**document["data"], "batch_size": batch}
    return parse_spec(
        {**document, "rounds": rounds, "algorithm": dict(DEFAULT_ALGORITHM), "data": data}, allow_imports=False
    )


def _readable(algorithm: Any) -> Any:
    """The same with an epsilon of few digits, not above what it was."""
    noise, told = algorithm.noise, np.atleast_1d(algorithm.noise.epsilon)
    rounded = tuple(_down(float(each)) for each in told)
    fewer = rounded if len(set(rounded)) > 1 else rounded[0]
    return algorithm.model_copy(update={"noise": noise.model_copy(update={"epsilon": fewer})})


def _down(value: float) -> float:
    step = 10.0 ** (math.floor(math.log10(value)) + 1 - _DIGITS)
    return float(f"{math.floor(value / step * (1 + 1e-12)) * step:.{_DIGITS}g}")
