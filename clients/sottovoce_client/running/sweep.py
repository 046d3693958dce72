"""A sweep: one experiment at every combination of some values, each simulated with many seeds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce_client.backends import Backend, Count, counted, mapper_over
from sottovoce_client.terminal import Say, say_nothing
from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.worlds import Tell, nobody
from sottovoce_core.data.known import data_folders
from sottovoce_core.door import simulate
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.experiment import Experiment, Prepared, experiment_of, prepare, require_count
from sottovoce_core.running.simulator import SimulatedRound
from sottovoce_core.table import Table

_RESAMPLES = 10_000
"""Of the bootstrap: then the ends of an interval hardly move with its seed."""
_LEVEL = 0.95
RESULTS = ("metric", "mean", "low", "high", "epsilon", "seeds")
"""Columns after those of the changed fields."""


@dataclass(frozen=True, slots=True)
class _Job:
    """Some seeds of one experiment."""

    experiment: Experiment
    replicas: int
    seed: np.random.SeedSequence
    metrics: Sequence[str] | None
    tell: Tell = nobody

    @property
    def rounds(self) -> int:
        """Of all seeds."""
        return self.replicas * self.experiment.rounds


@dataclass(frozen=True, slots=True, eq=False)
class _Done:
    """`(replicas,)` final values of every metric that is wanted, and the largest epsilon of a learner."""

    finals: Mapping[str, FloatArray]
    epsilon: float


def sweep(
    experiment: Experiment | Path | str,
    changes: Mapping[str, Sequence[Any]],
    seeds: int = 20,
    *,
    seed: int = 0,
    metrics: Sequence[str] | None = None,
    vary_data: bool = False,
    backend: Backend = "processes",
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Table:
    """Simulate an experiment at every combination of these values, and say how well it learned, and what it promises.

    Seeds are replicas: they differ in their noise, and every combination gets the same noise, so that their differences are due
    to what was changed. With `vary_data` each seed also deals the records anew (`data.seed`, counted up), so that the interval
    holds for another split of the same source, not for these records alone. A table does not depend on backend and jobs.

    Args:
        experiment: what is the same in all, or the path of a spec file.
        changes: field to its values; a field of a section by its place, with dots.
        seeds: repetitions of each combination.
        seed: of the noise, and of the bootstrap.
        metrics: names of those wanted (default: all; docs/metrics.md lists them), each after the last round.
        vary_data: deal the records anew for each seed.
        backend: `processes` of this machine; `ray` or `dask`; or the address of a cluster, `ray://…` or `dask://…`.
        jobs: at a time (default: one for each core).
        progress: told how many of how many jobs are done.

    Returns:
        One row per combination and metric: the changed fields, `metric`, `mean` over the seeds, `low` and `high` of its 95 %
        interval (percentile bootstrap, 10,000 resamples; not-a-number for one seed), `epsilon` of the learner with the
        largest one (the sum, where all share their records; with `vary_data` the largest of all seeds), and `seeds`.

    Raises:
        SpecError: a field or value is not allowed (of which combination, is said before anything is simulated), no such
            metric, or what the backend or the metrics need is not installed.
        Unavailable: nobody answers where the cluster should be.
        DataError: the data cannot be used.

    >>> from sottovoce_core.experiment import Experiment
    >>> experiment = Experiment(rounds=5, learners=3, algorithm="ldp-dol")
    >>> table = sweep(experiment, {"algorithm.sigma": [1, 2]}, seeds=4, metrics=["average_loss"], jobs=1)
    >>> table.where(metric="average_loss")["algorithm.sigma"]
    array([1, 2])
    >>> bool((table["low"] <= table["mean"]).all()), table["seeds"].tolist()
    (True, [4, 4])
    """
    return sweep_saying(
        lambda _: None, experiment, changes, seeds,
        seed=seed, metrics=metrics, vary_data=vary_data, backend=backend, jobs=jobs, progress=progress,
    )  # fmt: skip


def sweep_saying(
    ready: Callable[[Prepared], object],
    experiment: Experiment | Path | str,
    changes: Mapping[str, Sequence[Any]],
    seeds: int,
    *,
    seed: int,
    vary_data: bool,
    backend: Backend,
    jobs: int | None,
    metrics: Sequence[str] | None = None,
    progress: Count | None = None,
    say: Say = say_nothing,
) -> Table:
    """As `sweep`; `ready` is given each combination's run before anything is simulated, `say` is told how far it is."""
    require_count("seeds", seeds)
    experiment = experiment_of(experiment)
    if empty := [field for field, values in changes.items() if not len(values)]:
        raise SpecError(f"a sweep needs values for {', '.join(empty)}")
    if vary_data and "data.seed" in changes:
        raise SpecError("data.seed is what vary_data varies, so it cannot be among the changes")
    settings = list(itertools.product(*changes.values()))
    each = [_changed(experiment, dict(zip(changes, setting, strict=True)), ready) for setting in settings]
    jobs_of = [_jobs(one, seeds, seed, metrics, vary_data=vary_data) for one in each]
    found = _worked(list(itertools.chain(*jobs_of)), backend, jobs, progress, say)
    done, rows = iter(found), list[tuple[Any, ...]]()
    for setting, mine in zip(settings, jobs_of, strict=True):
        for row in _rows(list(itertools.islice(done, len(mine))), seeds, seed):
            rows.append((*map(_shown, setting), *row))
            say("resampling", len(rows), len(settings) * len(found[0].finals), "intervals")
    return Table.of((*changes, *RESULTS), rows)


def _changed(experiment: Experiment, setting: Mapping[str, Any], ready: Callable[[Prepared], object]) -> Experiment:
    """One combination, that can be run. Its records are not kept: they would travel to every process."""
    try:
        one = experiment.replace(**setting)
        ready(prepare(one, folders=data_folders()))
    except (SpecError, DataError) as error:
        told = str(error).removeprefix("experiment: ")
        named = ", ".join(f"{field}={_shown(value)}" for field, value in setting.items())
        if not named:
            raise
        raise (SpecError if isinstance(error, SpecError) else DataError)(f"{named}: {told}") from error
    return one


def _jobs(
    experiment: Experiment, seeds: int, seed: int, metrics: Sequence[str] | None, *, vary_data: bool
) -> list[_Job]:
    """All seeds at once where they learn from the same records."""
    if not vary_data:
        return [_Job(experiment, seeds, np.random.SeedSequence(seed), metrics)]
    first = experiment.data.seed
    own = np.random.SeedSequence(seed).spawn(seeds)
    return [_Job(experiment.replace(**{"data.seed": first + k}), 1, own[k], metrics) for k in range(seeds)]


def _worked(
    work: Sequence[_Job], backend: Backend, jobs: int | None, progress: Count | None, say: Say
) -> Sequence[_Done]:
    found = []
    with mapper_over(backend, jobs) as over:
        for each in counted(over, lambda job: job.rounds, lambda done, of: say("simulating", done, of, "rounds"))(
            _measured, work
        ):
            found.append(each)
            if progress is not None:
                progress(len(found), len(work))
    return found


def _measured(job: _Job) -> _Done:
    rounds = job.experiment.rounds

    def passed(step: SimulatedRound) -> None:
        job.tell((step.t + 1) / rounds)

    try:
        curves = simulate(job.experiment, job.replicas, job.seed, metrics=(rounds,), progress=passed).curves
    except Exception as error:
        from sottovoce_rpc.logs import others_fault

        if told := others_fault(error):
            error.add_note(told)
        raise
    finals = {} if curves is None else {name: curve.replicas[-1] for name, curve in curves.curves.items()}
    # Here, for the first job that ends should say so, not the last.
    if unknown := sorted(set(job.metrics or ()) - finals.keys()):
        raise SpecError(f"metrics must be of {', '.join(finals)}, got {', '.join(unknown)}")
    wanted = finals if job.metrics is None else job.metrics
    return _Done({name: finals[name] for name in wanted}, job.experiment.epsilon())


def _rows(done: Sequence[_Done], seeds: int, seed: int) -> Iterator[tuple[str, float, float, float, float, int]]:
    finals = {name: np.concatenate([each.finals[name] for each in done]) for name in done[0].finals}
    epsilon = max(each.epsilon for each in done)
    return ((name, float(finals[name].mean()), *interval(finals[name], seed), epsilon, seeds) for name in finals)


def interval(values: FloatArray, seed: int) -> tuple[float, float]:
    """The 95 % percentile-bootstrap interval of the mean of `values (n,)`; not-a-number for one value.

    Efron & Tibshirani 1993, section 13.3. Resampling has a seed of its own, the same for every call: rows do not depend on the
    order in which they are computed.
    """
    n = len(values)
    if n < 2:
        return math.nan, math.nan
    drawn = np.random.default_rng(seed).integers(n, size=(_RESAMPLES, n))
    low, high = np.quantile(values[drawn].mean(axis=1), [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(low), float(high)


def _shown(value: Any) -> Any:
    """A value as a cell: numbers and words as they are, sections in words."""
    return value if value is None or isinstance(value, int | float | str) else str(value)
