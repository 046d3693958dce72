"""Runs of an item, in parallel, and their results: a JSON document with a row for each variant and setting."""

from __future__ import annotations

import json
import math
import runpy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np

from experiments.item import FOLDER, Item, load_item
from sottovoce_client.atomic_files import write_atomically
from sottovoce_client.backends import Backend, map_with_progress, open_mapper
from sottovoce_client.terminal import ProgressReporter
from sottovoce_core.api import calibrate, simulate
from sottovoce_core.auditing.worlds import ProgressCallback, discard_progress
from sottovoce_core.budget.cost import LearnerCost, PrivacyUnit, combine_costs
from sottovoce_core.experiment import Experiment
from sottovoce_core.runs.curves import Curves
from sottovoce_core.runs.metrics import METRICS, resolve_checkpoints
from sottovoce_core.runs.simulator import SimulatedRound

DELTA = 1e-5
_BUDGETS: Mapping[str, tuple[PrivacyUnit, float]] = {
    "epsilon": ("record_use", 0.0),
    "epsilon_at_delta": ("record_use", DELTA),
    "epsilon_record": ("record", 0.0),
}
_BY_PAPER = "epsilon_by_paper"
_DIGITS = 6
"""Significant digits of stored numbers."""


@dataclass(frozen=True, slots=True)
class _Job:
    """Run of an item: all replicas of a variant at a setting."""

    paper: str
    name: str
    form: str
    variant: str
    setting: str
    on_progress: ProgressCallback = discard_progress


def run_item(
    paper: str, name: str, form: str, folder: Path, report: ProgressReporter, backend: Backend, jobs: int | None
) -> dict[str, Any]:
    """Run an item, and return its document.

    The rows that are done are kept in `folder`, from where an interrupted command goes on.

    Args:
        paper: name of the paper.
        name: name of the item.
        form: `quick`, `full` or `check`.
        folder: folder of unfinished results.
        report: callback for progress.
        backend: backend of the runs, as of `sottovoce sweep`.
        jobs: number of parallel runs; None: one for each core.

    Raises:
        SpecError, DataError: a run is not possible as its spec states it.
        Unavailable: the backend does not answer.
    """
    item, began = load_item(paper, name), time.monotonic()
    fields = {"base", "variants", "settings", "forms", "measures", "thresholds", "script", "checkpoints"}
    key = json.dumps([item.model_dump(mode="json", include=fields), form, version("sottovoce")])
    path = folder / f"{paper}-{name}-{form}.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    kept = kept if kept.get("key") == key else {"key": key, "rows": [], "seconds": 0.0}
    done = {(row["variant"], row["setting"]): row for row in kept["rows"]}
    pairs = [(variant, setting) for variant in item.variants for setting in item.settings]
    missing = [_Job(paper, name, form, *pair) for pair in pairs if pair not in done]
    with open_mapper(backend, jobs) as mapper:
        progress = map_with_progress(
            mapper, lambda _: 1000, lambda ready, total: report(name, 100 * ready // max(total, 1), 100, "%")
        )
        for job, row in zip(missing, progress(_run_job, missing), strict=True):
            done[job.variant, job.setting] = row
            seconds = kept["seconds"] + time.monotonic() - began
            _write(path, {"key": key, "rows": list(done.values()), "seconds": seconds})
    seconds = kept["seconds"] + time.monotonic() - began
    path.unlink(missing_ok=True)
    versions = {name: version(name) for name in ("sottovoce", item.needs) if name is not None}
    facts = {"form": form, "date": date.today().isoformat(), "versions": versions, "seconds": round(seconds, 1)}
    return {**facts, "rows": [done[pair] for pair in pairs]}


def _run_job(job: _Job) -> dict[str, Any]:
    """Run one variant at one setting; return its row: for each measure the rounds, and mean and deviation over the replicas."""
    item = load_item(job.paper, job.name)
    experiment, target = item.build(job.form, job.variant, job.setting)
    if target is not None:
        experiment = calibrate(experiment, target)
    replicas, found = item.forms[job.form].replicas, dict[str, Any]()  # type: ignore[index]
    if metrics := [each for each in item.measures if each in METRICS]:

        def report_round(step: SimulatedRound) -> None:
            job.on_progress((step.t + 1) / experiment.rounds)

        done = simulate(
            experiment, replicas, metrics=metrics, checkpoints=_fit(item.checkpoints, experiment), progress=report_round
        )
        curves = cast("Curves", done.curves)  # without `results`, which have the budgets, too
        found |= {each: _describe(curves.rounds.tolist(), curves[each].replicas) for each in metrics}
        for name, (metric, threshold) in item.thresholds.items():
            counts = np.nan_to_num(curves.count_rounds_until(metric, threshold), nan=np.inf)
            found[name] = _describe([experiment.rounds], counts[None])
    if item.script is not None:
        measured = runpy.run_path(str(FOLDER / job.paper / item.script))["measure"](experiment, replicas)
        found |= {each: _describe([experiment.rounds], np.atleast_2d(values)) for each, values in measured.items()}
    found |= dict(_measure_budgets(item, experiment))
    return {"variant": job.variant, "setting": job.setting, "measures": {each: found[each] for each in item.measures}}


def _fit(checkpoints: int | Sequence[int], experiment: Experiment) -> int | list[int]:
    """Return the checkpoints within the rounds of a smaller form."""
    if isinstance(checkpoints, int):
        return checkpoints
    return sorted({min(each, experiment.rounds) for each in checkpoints})


def _measure_budgets(item: Item, experiment: Experiment) -> Iterator[tuple[str, Any]]:
    """Yield the wanted budgets, cumulative at the checkpoints."""
    wanted = [each for each in item.measures if each in (*_BUDGETS, _BY_PAPER)]
    if not wanted:
        return
    run, data = experiment.run, experiment.records.learners
    rounds = resolve_checkpoints(experiment.rounds, _fit(item.checkpoints, experiment)).tolist()
    costs = [[LearnerCost(run, i, own, end) for i, own in enumerate(data)] for end in rounds]
    for each in wanted:
        if each == _BY_PAPER:
            values = [max(float(one.guarantee.paper_epsilon[-1]) for one in now) for now in costs]
        else:
            values = [combine_costs(now, *_BUDGETS[each]) for now in costs]
        yield each, _describe(rounds, np.array(values)[:, None])


def _describe(rounds: Sequence[int], replicas: Any) -> dict[str, Any]:
    """Describe a measure `(checkpoints, replicas)`: mean and standard deviation over the replicas at each checkpoint."""
    values = np.asarray(replicas, dtype=np.float64)
    found: dict[str, Any] = {"rounds": list(rounds), "mean": [_round(each) for each in values.mean(axis=1)]}
    if values.shape[1] > 1 and np.isfinite(values).all():
        found["deviation"] = [_round(each) for each in values.std(axis=1, ddof=1)]
    return found


def _round(value: float) -> float | str | None:
    """Round to the stored digits; infinity becomes text, and not-a-number null, because JSON has neither."""
    if math.isnan(value):
        return None
    return "inf" if math.isinf(value) else float(f"{value:.{_DIGITS}g}")


# ---- results ---------------------------------------------------------------------------------------------------------


def read_results(paper: str, name: str) -> dict[str, Any]:
    """Read the stored results of an item, by form; empty: there are none."""
    path = FOLDER / paper / f"{name}.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def store_results(paper: str, name: str, document: Mapping[str, Any]) -> Path:
    """Store the results of one form beside those of the others; return the file."""
    path = FOLDER / paper / f"{name}.json"
    _write(path, {**read_results(paper, name), document["form"]: document})
    return path


def get_last(row: Mapping[str, Any], measure: str, part: str = "mean") -> float | None:
    """Return the mean (or the deviation) of a measure after the last checkpoint; None: there is none."""
    values = row["measures"][measure].get(part)
    return None if not values or values[-1] is None else float(values[-1])


def _write(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as draft:
        draft.write_text(json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
