"""Sweep: one experiment at every combination of some values, each simulated with many seeds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce_client.backends import Backend, CountCallback, map_with_progress, open_mapper
from sottovoce_client.runs.tuning import equalise
from sottovoce_client.terminal import ProgressReporter, ignore_progress
from sottovoce_core.api import simulate
from sottovoce_core.auditing.worlds import ProgressCallback, discard_progress
from sottovoce_core.data.catalogue import get_data_folders
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.experiment import Experiment, PreparedRun, prepare, require_count, resolve_experiment
from sottovoce_core.results import InterruptedSimulation, Result, Results, collect_facts
from sottovoce_core.runs.curves import Curves
from sottovoce_core.runs.metrics import resolve_checkpoints, select_metrics
from sottovoce_core.runs.simulator import SimulatedRound


@dataclass(frozen=True, slots=True)
class _Job:
    """Some seeds of one experiment, at one combination of the values."""

    experiment: Experiment
    changes: Mapping[str, Any]
    replicas: int
    seed: np.random.SeedSequence
    metrics: Sequence[str] | None
    checkpoints: int | Sequence[int]
    on_progress: ProgressCallback = discard_progress

    @property
    def rounds(self) -> int:
        """Rounds of all seeds."""
        return self.replicas * self.experiment.rounds


def sweep(
    experiment: Experiment | Path | str,
    changes: Mapping[str, Sequence[Any]],
    replicas: int = 20,
    *,
    seed: int = 0,
    metrics: Sequence[str] | None = None,
    checkpoints: int | Sequence[int] = 1,
    vary_data: bool = False,
    target: float | None = None,
    delta: float = 0.0,
    tune: Mapping[str, Sequence[Any]] | None = None,
    backend: Backend = "processes",
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Results:
    """Simulate an experiment at every combination of these values, and return its metrics and guarantees.

    Seeds are replicas: they differ in their noise, and every combination gets the same noise, so that differences are due to the
    changed values. With `vary_data` each seed also partitions the records anew (`data.seed`, counted up), so that the interval
    covers other partitions of the same source, not these records alone. Results do not depend on backend and jobs.

    Args:
        experiment: Experiment with the common values, or the path of a spec file.
        changes: Values of each field; a field of a section is named by its path, with dots.
        replicas: Repetitions of each combination.
        seed: Seed of the noise.
        metrics: Names of metrics to compute (docs/reference/metrics.md). Default: losses, regrets, agreement and accuracy.
        checkpoints: Numbers of rounds after which to measure; or how many, evenly spread on a logarithmic scale up to the last.
        vary_data: Whether each seed partitions the records anew.
        target: Epsilon of one use of a record to which the noise of every combination is calibrated; None: as it is.
        delta: Delta of the target and of the epsilons in the results (0: that of the spec).
        tune: Values of fields of which each combination gets the best ones, as tuned on the held-out records, which are public;
            every candidate is calibrated to the target.
        backend: `processes` of this machine; `ray` or `dask`; or the address of a cluster, `ray://…` or `dask://…`.
        jobs: Number of concurrent jobs (default: one for each core).
        progress: Called with the numbers of completed jobs and of all jobs.

    Returns:
        A run per combination. `summary()` has a row for each run and metric after the last checkpoint, with the mean over the
        seeds, 95 % interval and epsilon (with `vary_data` the largest of all seeds); `metrics` has every number.

    Raises:
        SpecError: A field, value, metric or checkpoint is not allowed (the error names the combination, before any simulation),
            or a package that the backend or the metrics need is not installed.
        Unavailable: The cluster does not answer.
        DataError: The data cannot be used.
        InterruptedSimulation: Ctrl-C after the first combination; its `results` have the complete ones.

    >>> from sottovoce_core.experiment import Experiment
    >>> experiment = Experiment(rounds=5, learners=3, algorithm="ldp-dol")
    >>> table = sweep(experiment, {"algorithm.sigma": [1, 2]}, replicas=4, metrics=["average_loss"], jobs=1).summary()
    >>> table.where(metric="average_loss")["algorithm.sigma"]
    array([1, 2])
    >>> bool((table["low"] <= table["mean"]).all()), table["seeds"].tolist()
    (True, [4, 4])
    """
    return sweep_with_progress(
        lambda _: None, experiment, changes, replicas,
        seed=seed, metrics=metrics, checkpoints=checkpoints, vary_data=vary_data, target=target, delta=delta, tune=tune,
        backend=backend, jobs=jobs, progress=progress,
    )  # fmt: skip


def sweep_with_progress(
    on_ready: Callable[[PreparedRun], object],
    experiment: Experiment | Path | str,
    changes: Mapping[str, Sequence[Any]],
    replicas: int,
    *,
    seed: int,
    vary_data: bool,
    backend: Backend,
    jobs: int | None,
    target: float | None = None,
    delta: float = 0.0,
    tune: Mapping[str, Sequence[Any]] | None = None,
    metrics: Sequence[str] | None = None,
    checkpoints: int | Sequence[int] = 1,
    progress: CountCallback | None = None,
    report: ProgressReporter = ignore_progress,
) -> Results:
    """Sweep; `on_ready` is called with each combination's run before any simulation, `report` with the progress."""
    require_count("seeds", replicas)
    experiment = resolve_experiment(experiment)
    if empty := [field for field, values in changes.items() if not len(values)]:
        raise SpecError(f"a sweep needs values for {', '.join(empty)}")
    if vary_data and "data.seed" in changes:
        raise SpecError("data.seed must not be among the changes with vary_data, which changes it for each seed")
    settings = [dict(zip(changes, setting, strict=True)) for setting in itertools.product(*changes.values())]

    def require_measurable(prepared: PreparedRun) -> None:
        select_metrics(prepared.run, prepared.data, metrics)
        resolve_checkpoints(prepared.run.spec.rounds, checkpoints)
        on_ready(prepared)

    each = [
        _apply_changes(
            experiment, setting, require_measurable, partial(equalise, target=target, delta=delta, tune=tune, seed=seed)
        )
        for setting in settings
    ]
    job_lists = [
        _make_jobs(one, setting, replicas, seed, metrics, checkpoints, vary_data=vary_data)
        for one, setting in zip(each, settings, strict=True)
    ]
    found: list[Result] = []
    try:
        _run_jobs(list(itertools.chain(*job_lists)), backend, jobs, progress, report, found)
    except KeyboardInterrupt:
        if not (complete := _join_complete(found, job_lists)).runs:
            raise
        raise InterruptedSimulation(complete) from None
    return _join_complete(found, job_lists)


def _apply_changes(
    experiment: Experiment,
    setting: Mapping[str, Any],
    on_ready: Callable[[PreparedRun], object],
    adapt: Callable[[Experiment], Experiment],
) -> Experiment:
    """Build the experiment of one combination and check it. Its records are not kept: every process would receive them."""
    try:
        one = adapt(experiment.replace(**setting))
        on_ready(prepare(one, folders=get_data_folders()))
    except (SpecError, DataError) as error:
        text = str(error).removeprefix("experiment: ")
        setting_text = ", ".join(f"{field}={value}" for field, value in setting.items())
        if not setting_text:
            raise
        raise (SpecError if isinstance(error, SpecError) else DataError)(f"{setting_text}: {text}") from error
    return one


def _make_jobs(
    experiment: Experiment,
    changes: Mapping[str, Any],
    seeds: int,
    seed: int,
    metrics: Sequence[str] | None,
    checkpoints: int | Sequence[int],
    *,
    vary_data: bool,
) -> list[_Job]:
    """Make one job of all seeds that learn from the same records."""
    if not vary_data:
        return [_Job(experiment, changes, seeds, np.random.SeedSequence(seed), metrics, checkpoints)]
    first, own = experiment.data.seed, np.random.SeedSequence(seed).spawn(seeds)
    varied = [experiment.replace(**{"data.seed": first + k}) for k in range(seeds)]
    return [_Job(one, changes, 1, noise, metrics, checkpoints) for one, noise in zip(varied, own, strict=True)]


def _run_jobs(
    work: Sequence[_Job],
    backend: Backend,
    jobs: int | None,
    progress: CountCallback | None,
    report: ProgressReporter,
    found: list[Result],
) -> None:
    """Run the jobs in order, and append their results to `found`: after an interrupt it has those until then."""
    with open_mapper(backend, jobs) as mapper:
        for each in map_with_progress(
            mapper, lambda job: job.rounds, lambda done, total: report("simulating", done, total, "rounds")
        )(_run_job, work):
            found.append(each)
            if progress is not None:
                progress(len(found), len(work))


def _run_job(job: _Job) -> Result:
    rounds = job.experiment.rounds

    def report_round(step: SimulatedRound) -> None:
        job.on_progress((step.t + 1) / rounds)

    try:
        done = simulate(
            job.experiment,
            job.replicas,
            job.seed,
            metrics=True if job.metrics is None else job.metrics,
            checkpoints=job.checkpoints,
            progress=report_round,
        )
    except Exception as error:
        from sottovoce_rpc.logs import describe_user_code_error

        if text := describe_user_code_error(error):
            error.add_note(text)
        raise
    (run,) = done.results.runs
    return Result(collect_facts(job.experiment.prepared_run, job.experiment.name, job.changes), run.curves)


def _join_complete(found: Sequence[Result], job_lists: Sequence[Sequence[_Job]]) -> Results:
    """Join the results of each combination, as far as all of its jobs have one."""
    ends = list(itertools.accumulate(map(len, job_lists)))
    starts = [0, *ends[:-1]]
    return Results(tuple(_join(found[start:end]) for start, end in zip(starts, ends, strict=True) if end <= len(found)))


def _join(runs: Sequence[Result]) -> Result:
    """Join runs of different seeds into one, with the largest of their epsilons."""
    first, all_curves = runs[0], [each.curves for each in runs]
    epsilons = {
        name: max(getattr(each.facts, name) for each in runs)
        for name in ("epsilon_paper", "epsilon_record_use", "epsilon_record")
    }
    curves = {}
    for name, curve in first.curves.curves.items():
        replicas = np.concatenate([each[name].replicas for each in all_curves], axis=1)
        learners = [known for each in all_curves if (known := each[name].learners) is not None]
        curves[name] = replace(curve, replicas=replicas, learners=np.mean(learners, axis=0) if learners else None)
    with_records = np.mean([each.rounds_with_records for each in all_curves], axis=0)
    return Result(replace(first.facts, **epsilons), Curves(first.curves.rounds, curves, with_records))
