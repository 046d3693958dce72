"""Export of results to experiment trackers: MLflow, Weights & Biases."""

from __future__ import annotations

import importlib
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sottovoce_client.runs.compare import make_compare_page
from sottovoce_core.api import Simulation
from sottovoce_core.errors import SpecError, Unavailable
from sottovoce_core.optional import format_install_hint
from sottovoce_core.results import Result, Results
from sottovoce_core.text import suggest_name
from sottovoce_core.yaml_files import parse_yaml

_PROJECT = "sottovoce"
"""Name of the project, or experiment, if the environment names none."""
_MAX_VALUE_CHARACTERS = 500
"""Maximum length of a parameter that every version of the trackers accepts; the artifact `spec.yaml` has it in full."""
_METRICS_PER_BATCH, _PARAMETERS_PER_BATCH = 1000, 100
"""Maximum numbers in one request to MLflow."""


def track(results: Results | Simulation, tracker: str) -> list[str]:
    """Export results to MLflow or Weights & Biases: one run there for each run of the results.

    A run gets the fields of the spec as parameters; each metric as its mean over learners and seeds after each measured round,
    with its standard error if there are several seeds; the tight `epsilon` of one use of a record and `epsilon_record`, of all
    its uses, at `delta`; and as artifacts `report.html`, `spec.yaml`, `results.parquet` and `results.json`. Numbers that are not
    finite are left out of the metrics; an infinite epsilon is a parameter, as `inf`.

    Args:
        results: results of `simulate`, `sweep`, `compare` or `read_results`.
        tracker: `mlflow` or `wandb`. Their own environment variables choose destination, project and mode.

    Returns:
        The identifiers of the new runs.

    Raises:
        SpecError: no such tracker, or it is not installed.
        Unavailable: the tracker refuses the run, or does not answer.
    """
    if tracker not in _TRACKERS:
        raise SpecError(
            f"tracker must be one of {', '.join(_TRACKERS)}, got {tracker!r}{suggest_name(tracker, _TRACKERS)}"
        )
    runs = results.results.runs if isinstance(results, Simulation) else results.runs
    try:
        library = importlib.import_module(tracker)
        wrong: type[Exception] = library.exceptions.MlflowException if tracker == "mlflow" else library.errors.Error
    except (ImportError, AttributeError):  # a folder `wandb`, which that library makes, imports as an empty module
        package = {"mlflow": "mlflow-skinny"}.get(tracker, tracker)
        raise SpecError(f"exporting to {tracker} needs {package}: {format_install_hint('track')}") from None
    identifiers = []
    for each in runs:
        try:
            with tempfile.TemporaryDirectory() as folder:
                _write_artifacts(each, Path(folder))
                identifiers.append(_TRACKERS[tracker](library, each, Path(folder)))
        except (wrong, OSError) as error:
            raise Unavailable(f"{tracker} must accept the run {_name_run(each)}, and does not: {error}") from None
    return identifiers


def _export_to_mlflow(library: Any, result: Result, folder: Path) -> str:
    client, entities = library.MlflowClient(), library.entities
    project = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT
    experiment = client.get_experiment_by_name(project)
    identifier = client.create_experiment(project) if experiment is None else experiment.experiment_id
    run: str = client.create_run(identifier, run_name=_name_run(result)).info.run_id
    now = int(time.time() * 1000)
    metrics = [
        entities.Metric(name, value, now, done)
        for done, values in _iterate_rounds(result)
        for name, value in values.items()
    ]
    parameters = [entities.Param(name, str(value)) for name, value in _list_parameters(result).items()]
    try:
        for start in range(0, len(parameters), _PARAMETERS_PER_BATCH):
            client.log_batch(run, params=parameters[start : start + _PARAMETERS_PER_BATCH])
        for start in range(0, len(metrics), _METRICS_PER_BATCH):
            client.log_batch(run, metrics=metrics[start : start + _METRICS_PER_BATCH])
        client.log_artifacts(run, str(folder))
    except BaseException:
        client.set_terminated(run, "FAILED")
        raise
    client.set_terminated(run)
    return run


def _export_to_wandb(library: Any, result: Result, folder: Path) -> str:
    project = os.environ.get("WANDB_PROJECT") or _PROJECT
    with library.init(
        project=project, name=_name_run(result), config=_list_parameters(result), reinit="create_new"
    ) as run:
        for done, values in _iterate_rounds(result):
            run.log(values, step=done)
        artifact = library.Artifact(f"results-{run.id}", "results")
        artifact.add_dir(str(folder))
        run.log_artifact(artifact)
        identifier: str = run.id
    return identifier


_TRACKERS: Mapping[str, Callable[[Any, Result, Path], str]] = {"mlflow": _export_to_mlflow, "wandb": _export_to_wandb}


# ---- content of a run ------------------------------------------------------------------------------------------------


def _name_run(result: Result) -> str:
    return f"{result.facts.spec} {result.facts.setting}".strip()


def _list_parameters(result: Result) -> dict[str, Any]:
    """List the fields of the spec, by their place in it, and the guarantee; a schema and long values are in the artifacts."""
    facts, spec = result.facts, parse_yaml(result.facts.spec_yaml)
    spec["data"].pop("schema", None)
    return {
        **dict(_flatten(spec)),
        **{_clean(field): value for field, value in facts.changes.items()},
        "threat_model": facts.threat_model or "none",
        "epsilon": _as_parameter(facts.epsilon_record_use),
        "epsilon_record": _as_parameter(facts.epsilon_record),
        "epsilon_paper": _as_parameter(facts.epsilon_paper),
        "delta": facts.delta,
        "seeds": next((curve.replicas.shape[1] for curve in result.curves.curves.values()), 0),
    }


def _flatten(section: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the fields as `section.field` and value."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{place}{name}.")
        elif value is not None:
            yield _clean(f"{place}{name}"), _as_parameter(value)


def _clean(name: str) -> str:
    """Replace the characters that a tracker does not accept in a name."""
    return re.sub(r"[^\w. -]", "_", name, flags=re.ASCII)


def _as_parameter(value: Any) -> Any:
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    text = str(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[: _MAX_VALUE_CHARACTERS - 1]}…"


def _iterate_rounds(result: Result) -> Iterator[tuple[int, dict[str, float]]]:
    """Iterate over the measured rounds and their finite numbers; the last one has the guarantee, too."""
    facts, curves = result.facts, result.curves.curves
    series = {name: curve.mean for name, curve in curves.items()}
    series |= {f"{name}_standard_error": curve.error for name, curve in curves.items()}
    final = {"epsilon": facts.epsilon_record_use, "epsilon_record": facts.epsilon_record, "delta": facts.delta}
    rounds = result.curves.rounds.tolist()
    for k, done in enumerate(rounds):
        found = {name: float(values[k]) for name, values in series.items()}
        found |= final if k == len(rounds) - 1 else {}
        yield done, {name: value for name, value in found.items() if math.isfinite(value)}


def _write_artifacts(result: Result, folder: Path) -> None:
    """Write the report, the spec and the results of a run."""
    alone = Results((result,))
    alone.write(folder)
    (folder / "spec.yaml").write_text(result.facts.spec_yaml, encoding="utf-8")
    make_compare_page(alone).write(folder / "report.html")
