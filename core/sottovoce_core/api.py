"""Operations on an experiment: simulate it, audit it, calibrate its noise."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import get_args

import numpy as np

from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.audit import Audit, audit_simulated
from sottovoce_core.auditing.plan import plan_audit
from sottovoce_core.budget.calibration import BudgetTarget
from sottovoce_core.budget.calibration import calibrate as calibrate_noise
from sottovoce_core.budget.cost import PrivacyUnit
from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import Experiment, require_count, resolve_experiment
from sottovoce_core.noise import NoiseSource, RecordedNoise, SeededNoise
from sottovoce_core.privacy.guarantee import ThreatModel
from sottovoce_core.results import InterruptedSimulation, Result, Results, collect_facts
from sottovoce_core.runs.curves import Curves
from sottovoce_core.runs.metrics import CHECKPOINTS, Metrics
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.simulator import SimulatedRound, limit_blas_threads
from sottovoce_core.runs.simulator import simulate_rounds as iterate_rounds
from sottovoce_core.runs.transcript import Transcript, read_noise
from sottovoce_core.table import Table
from sottovoce_core.text import suggest_name
from sottovoce_core.validation_errors import abbreviate_value


@dataclass(frozen=True, eq=False)
class Simulation:
    """Result of a simulation.

    Attributes:
        experiment: the simulated experiment.
        decisions: `(learners, replicas, dim)` after the last round.
        curves: measured curves by the name of the metric, each over the rounds; None: nothing was measured.
        transcript: all messages, `(rounds, learners, replicas, ...)` for each field; None: it was not kept.
    """

    experiment: Experiment
    decisions: FloatArray
    curves: Curves | None
    transcript: Transcript | None

    @cached_property
    def results(self) -> Results:
        """Measurements and guarantees, to write to files; `summary` has means and intervals over the replicas.

        Raises:
            SpecError: nothing was measured.
        """
        if self.curves is None:
            raise SpecError("results need measurements, got a simulation without: simulate with metrics=True")
        return Results((Result(collect_facts(self.experiment.prepared_run, self.experiment.name), self.curves),))

    @property
    def metrics(self) -> Table:
        """Measurements, one number a row: the table `Results.metrics`. Names and units: docs/reference/metrics.md.

        Raises:
            SpecError: nothing was measured.
        """
        return self.results.metrics

    def __repr__(self) -> str:
        replicas = self.decisions.shape[1]
        return f"Simulation of {self.experiment}, {replicas} replica{'s' * (replicas != 1)}"

    def _repr_html_(self) -> str:
        """Render the summary of the measurements, for notebooks."""
        heading = f"<p>{html.escape(repr(self))}</p>"
        return heading if self.curves is None else heading + self.results._repr_html_()


def simulate(
    experiment: Experiment | Path | str,
    replicas: int = 1,
    seed: int | np.random.SeedSequence = 0,
    *,
    metrics: bool | Sequence[str] = True,
    checkpoints: int | Sequence[int] = CHECKPOINTS,
    transcript: bool = False,
    noise: NoiseSource | Path | str | None = None,
    progress: Callable[[SimulatedRound], None] | None = None,
) -> Simulation:
    """Run an experiment without a network, many replicas at once. Replicas share the records and differ in their noise.

    Memory does not grow with the rounds, unless the transcript is kept.

    Args:
        experiment: an experiment, or the path of a spec file.
        replicas: independent repetitions.
        seed: seed of the noise; equal seeds give equal numbers, for each replica independently of the number of replicas.
        metrics: names of metrics (docs/reference/metrics.md), and nothing else is computed; True: the default ones, losses,
            regrets, agreement and accuracy; False: none.
        checkpoints: numbers of rounds after which to measure; or how many, evenly spread on a logarithmic scale up to the last.
        transcript: keep all messages: rounds times learners times replicas times numbers of a message, 8 bytes each.
        noise: replaces seeded noise: a recorded file (`.parquet`, `.npz`) or any `sottovoce_core.noise.NoiseSource`.
        progress: callback for every round: its number, messages and decisions.

    Raises:
        SpecError: the experiment cannot be run as it is, or not measured by these metrics at these checkpoints; the noise does
            not cover its rounds; or SciPy, which regrets and tracking errors need, is not installed.
        DataError: its data cannot be used.
        CaptureError: the noise file cannot be read.
        InterruptedSimulation: Ctrl-C after the first checkpoint; its `results` have the checkpoints until then.

    >>> from sottovoce_core.experiment import Experiment
    >>> result = simulate(Experiment(rounds=10, algorithm="ldp-dol"), replicas=3, seed=1, transcript=True)
    >>> result.decisions.shape, result.transcript.fields["y"].shape
    ((5, 3, 31), (10, 5, 3, 31))
    >>> result.metrics.where(metric="consensus_error", round=10)["value"].shape
    (3,)
    >>> simulate(result.experiment, metrics=["average_loss", "error"], checkpoints=[5, 10]).curves.rounds
    array([ 5, 10])
    """
    require_count("replicas", replicas)
    experiment = resolve_experiment(experiment)
    run, data = experiment.run, experiment.records
    measured = None
    if metrics is not False:
        measured = Metrics(run, data, metrics=None if metrics is True else metrics, checkpoints=checkpoints)
    kept_fields: dict[str, FloatArray] = {}
    decisions = np.empty(0)
    try:
        with limit_blas_threads():
            for step in iterate_rounds(run, data, resolve_noise(noise, seed, run), replicas):
                if transcript:
                    _store_round(kept_fields, step, run.spec.rounds)
                if measured is not None:
                    measured.add_round(step)
                if progress is not None:
                    progress(step)
                decisions = step.decisions_after
    except KeyboardInterrupt:
        if measured is None or not measured.has_measured:
            raise
        raise InterruptedSimulation(Simulation(experiment, decisions, measured.curves, None).results) from None
    curves = None if measured is None else measured.curves
    return Simulation(experiment, decisions, curves, Transcript(kept_fields) if transcript else None)


def _store_round(kept_fields: dict[str, FloatArray], step: SimulatedRound, rounds: int) -> None:
    for name, values in step.message.fields.items():
        kept_fields.setdefault(name, np.empty((rounds, *values.shape)))[step.t] = values


def resolve_noise(noise: NoiseSource | Path | str | None, seed: int | np.random.SeedSequence, run: Run) -> NoiseSource:
    """Return the noise of a simulation: seeded, from a file, or the given source.

    Raises:
        SpecError: the file does not cover the rounds.
        CaptureError: the file cannot be read.
    """
    if noise is None:
        return SeededNoise(seed)
    if not isinstance(noise, Path | str):
        return noise
    fields = read_noise(Path(noise))
    if short := [name for name, values in fields.items() if len(values) < run.spec.rounds]:
        raise SpecError(f"{noise}: noise must cover {run.spec.rounds} rounds, got fewer for {short}")
    return RecordedNoise(fields)


def calibrate(
    experiment: Experiment | Path | str,
    epsilon: float | Mapping[str, float],
    *,
    privacy_unit: PrivacyUnit = "record_use",
    horizon: float | None = None,
    delta: float = 0.0,
) -> Experiment:
    """Return the experiment with the least noise that meets a privacy budget from below, within a thousandth of it.

    Args:
        experiment: experiment with noise to start from, or the path of a spec file.
        epsilon: budget of every learner's messages; or a budget for each learner, by name.
        privacy_unit: `record_use` (one use of a record), or `record` (all uses of a record).
        horizon: number of rounds to cover (default: all of the run); infinity: unlimited.
        delta: the budget is epsilon at this delta; 0: pure epsilon.

    Raises:
        SpecError: there is no finite guarantee, the budget cannot be met, or a learner has none.
        DataError: the data cannot be used.

    >>> from sottovoce_core.experiment import Experiment
    >>> louder = calibrate(Experiment(rounds=10, learners=3, algorithm="ldp-dol"), 2.0)
    >>> 1.998 <= louder.epsilon() <= 2.0
    True
    """
    experiment = resolve_experiment(experiment)
    if isinstance(epsilon, Mapping):
        if epsilon.keys() != set(experiment.names):
            unknown = next((name for name in epsilon if name not in experiment.names), None)
            raise SpecError(
                f"epsilon must name each of {', '.join(experiment.names)}, got {', '.join(epsilon) or 'none'}"
                f"{suggest_name(unknown, experiment.names)}"
            )
        wanted = tuple(epsilon[name] for name in experiment.names)
    else:
        wanted = (epsilon,) * experiment.n_learners
    if privacy_unit not in (units := get_args(PrivacyUnit)):
        raise SpecError(
            f"privacy_unit must be one of {', '.join(units)}, got {abbreviate_value(privacy_unit)}"
            f"{suggest_name(privacy_unit, units)}"
        )
    if wrong := [each for each in wanted if isinstance(each, bool) or not isinstance(each, int | float | np.number)]:
        raise SpecError(f"epsilon must be a number, got {wrong[0]!r}")
    found = calibrate_noise(
        experiment, experiment.records, BudgetTarget(tuple(map(float, wanted)), horizon, privacy_unit, delta)
    ).spec
    return Experiment.model_validate(found.to_document())


def audit(
    experiment: Experiment | Path | str,
    runs: int = 1000,
    *,
    learner: str | int | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    threat: ThreatModel | str = ThreatModel.WIRE,
    neighbour: str | int | None = None,
    delta: float | None = None,
) -> Audit:
    """Try to refute the guarantee of one learner: many simulated runs in two worlds that differ in one record.

    Args:
        experiment: experiment with the guarantee, or the path of a spec file.
        runs: mean number of runs of each world.
        learner: name or index (default: the one with the largest epsilon).
        confidence: probability that all tests together do not refute a guarantee that holds.
        seed: seed of coins and noise.
        threat: view of the adversary: `wire`, `neighbour` or `output`.
        neighbour: name or index of the adversary, with threat `neighbour` (default: the first out-neighbour).
        delta: delta at which the claim is tested, too; 0: the pure claim alone (default: that of the spec).

    Returns:
        The audit; `verdict.kind` is `consistent`, `refuted`, `inconclusive` or `no-claim`, and `verdict.text` explains it in a
        sentence.

    Raises:
        SpecError: too few runs for this confidence, no possible adversary, or scipy or scikit-learn are not installed.
        DataError: there is no record to swap, or the data cannot be used.

    >>> from sottovoce_core.experiment import Experiment
    >>> audit(Experiment(rounds=3, learners=3, algorithm="ldp-dol"), runs=60).verdict.kind
    'consistent'
    """
    require_count("runs", runs)
    experiment = resolve_experiment(experiment)
    known = [model.value for model in ThreatModel]
    if threat not in known:
        raise SpecError(
            f"threat must be one of {', '.join(known)}, got {abbreviate_value(threat)}{suggest_name(threat, known)}"
        )
    planned = plan_audit(
        experiment.run,
        experiment.records,
        experiment.find_worst_case_learner() if learner is None else experiment.index(learner),
        runs=runs,
        confidence=confidence,
        seed=seed,
        threat=ThreatModel(threat),
        neighbour=None if neighbour is None else experiment.index(neighbour),
        delta=experiment.privacy.delta if delta is None else delta,
    )
    return audit_simulated(planned)
