"""A sweep: one experiment at every combination of some values, each simulated with many seeds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce_client.backends import Backend, CountCallback, map_with_progress, open_mapper
from sottovoce_client.terminal import ProgressReporter, ignore_progress
from sottovoce_core.api import simulate
from sottovoce_core.auditing.worlds import ProgressCallback, discard_progress
from sottovoce_core.data.catalogue import get_data_folders
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.experiment import Experiment, PreparedRun, prepare, require_count, resolve_experiment
from sottovoce_core.results import Result, Results, collect_facts
from sottovoce_core.runs.metrics import Curves
from sottovoce_core.runs.simulator import SimulatedRound


@dataclass(frozen=True, slots=True)
class _Job:
    """Some seeds of one experiment, at one combination of the values."""

    experiment: Experiment
    changes: Mapping[str, Any]
    replicas: int
    seed: np.random.SeedSequence
    metrics: Sequence[str] | None
    tell: ProgressCallback = discard_progress

    @property
    def rounds(self) -> int:
        """Of all seeds."""
        return self.replicas * self.experiment.rounds


def sweep(
    experiment: Experiment | Path | str,
    changes: Mapping[str, Sequence[Any]],
    replicas: int = 20,
    *,
    seed: int = 0,
    metrics: Sequence[str] | None = None,
    vary_data: bool = False,
    backend: Backend = "processes",
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Results:
    """Simulate an experiment at every combination of these values, and say how well it learned, and what it promises.

    Seeds are replicas: they differ in their noise, and every combination gets the same noise, so that their differences are due
    to what was changed. With `vary_data` each seed also deals the records anew (`data.seed`, counted up), so that the interval
    holds for another split of the same source, not for these records alone. A table does not depend on backend and jobs.

    Args:
        experiment: what is the same in all, or the path of a spec file.
        changes: field to its values; a field of a section by its place, with dots.
        seeds: repetitions of each combination.
        seed: of the noise.
        metrics: names of those wanted (default: all; docs/metrics.md lists them), each after the last round.
        vary_data: deal the records anew for each seed.
        backend: `processes` of this machine; `ray` or `dask`; or the address of a cluster, `ray://…` or `dask://…`.
        jobs: at a time (default: one for each core).
        progress: told how many of how many jobs are done.

    Returns:
        A run per combination, measured after the last round. `summary()` has a row for each of them and each metric, with its
        mean over the seeds, 95 % interval and epsilon (of `vary_data` the largest of all seeds); `metrics` has every number.

    Raises:
        SpecError: a field or value is not allowed (of which combination, is said before anything is simulated), no such
            metric, or what the backend or the metrics need is not installed.
        Unavailable: nobody answers where the cluster should be.
        DataError: the data cannot be used.

    >>> from sottovoce_core.experiment import Experiment
    >>> experiment = Experiment(rounds=5, learners=3, algorithm="ldp-dol")
    >>> table = sweep(experiment, {"algorithm.sigma": [1, 2]}, seeds=4, metrics=["average_loss"], jobs=1).summary()
    >>> table.where(metric="average_loss")["algorithm.sigma"]
    array([1, 2])
    >>> bool((table["low"] <= table["mean"]).all()), table["seeds"].tolist()
    (True, [4, 4])
    """
    return sweep_with_progress(
        lambda _: None, experiment, changes, replicas,
        seed=seed, metrics=metrics, vary_data=vary_data, backend=backend, jobs=jobs, progress=progress,
    )  # fmt: skip


def sweep_with_progress(
    ready: Callable[[PreparedRun], object],
    experiment: Experiment | Path | str,
    changes: Mapping[str, Sequence[Any]],
    replicas: int,
    *,
    seed: int,
    vary_data: bool,
    backend: Backend,
    jobs: int | None,
    metrics: Sequence[str] | None = None,
    progress: CountCallback | None = None,
    display: ProgressReporter = ignore_progress,
) -> Results:
    """As `sweep`; `ready` is given each combination's run before anything is simulated, `say` is told how far it is."""
    require_count("seeds", replicas)
    experiment = resolve_experiment(experiment)
    if empty := [field for field, values in changes.items() if not len(values)]:
        raise SpecError(f"a sweep needs values for {', '.join(empty)}")
    if vary_data and "data.seed" in changes:
        raise SpecError("data.seed is what vary_data varies, so it cannot be among the changes")
    settings = [dict(zip(changes, setting, strict=True)) for setting in itertools.product(*changes.values())]
    each = [_changed(experiment, setting, ready) for setting in settings]
    jobs_of = [
        _jobs(one, setting, replicas, seed, metrics, vary_data=vary_data)
        for one, setting in zip(each, settings, strict=True)
    ]
    found = iter(_worked(list(itertools.chain(*jobs_of)), backend, jobs, progress, display))
    return Results(tuple(_joined(list(itertools.islice(found, len(mine)))) for mine in jobs_of))


def _changed(experiment: Experiment, setting: Mapping[str, Any], ready: Callable[[PreparedRun], object]) -> Experiment:
    """One combination, that can be run. Its records are not kept: they would travel to every process."""
    try:
        one = experiment.replace(**setting)
        ready(prepare(one, folders=get_data_folders()))
    except (SpecError, DataError) as error:
        told = str(error).removeprefix("experiment: ")
        named = ", ".join(f"{field}={value}" for field, value in setting.items())
        if not named:
            raise
        raise (SpecError if isinstance(error, SpecError) else DataError)(f"{named}: {told}") from error
    return one


def _jobs(
    experiment: Experiment,
    changes: Mapping[str, Any],
    seeds: int,
    seed: int,
    metrics: Sequence[str] | None,
    *,
    vary_data: bool,
) -> list[_Job]:
    """All seeds at once where they learn from the same records."""
    if not vary_data:
        return [_Job(experiment, changes, seeds, np.random.SeedSequence(seed), metrics)]
    first, own = experiment.data.seed, np.random.SeedSequence(seed).spawn(seeds)
    varied = [experiment.replace(**{"data.seed": first + k}) for k in range(seeds)]
    return [_Job(one, changes, 1, noise, metrics) for one, noise in zip(varied, own, strict=True)]


def _worked(
    work: Sequence[_Job], backend: Backend, jobs: int | None, progress: CountCallback | None, say: ProgressReporter
) -> Sequence[Result]:
    found = []
    with open_mapper(backend, jobs) as over:
        for each in map_with_progress(
            over, lambda job: job.rounds, lambda done, of: say("simulating", done, of, "rounds")
        )(_measured, work):
            found.append(each)
            if progress is not None:
                progress(len(found), len(work))
    return found


def _measured(job: _Job) -> Result:
    rounds = job.experiment.rounds

    def passed(step: SimulatedRound) -> None:
        job.tell((step.t + 1) / rounds)

    try:
        (run,) = simulate(job.experiment, job.replicas, job.seed, metrics=(rounds,), progress=passed).results.runs
    except Exception as error:
        from sottovoce_rpc.logs import describe_user_code_error

        if told := describe_user_code_error(error):
            error.add_note(told)
        raise
    finals = run.curves.curves
    # Here, for the first job that ends should say so, not the last.
    if unknown := sorted(set(job.metrics or ()) - finals.keys()):
        raise SpecError(f"metrics must be of {', '.join(finals)}, got {', '.join(unknown)}")
    wanted = {name: finals[name] for name in job.metrics or finals}
    facts = collect_facts(job.experiment.prepared_run, job.experiment.name, job.changes)
    return Result(facts, replace(run.curves, curves=wanted))


def _joined(runs: Sequence[Result]) -> Result:
    """One run of all these seeds; it promises what the worst of them does."""
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
