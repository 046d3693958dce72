"""Commands for many simulations of one spec, and for figures of results."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from sottovoce_client.cli.app import (
    MAX_COUNT,
    MAX_JOBS,
    BackendName,
    CalibrationTarget,
    CheckpointList,
    ExportFormats,
    MetricNames,
    ResultDelta,
    SpecFile,
    TunedFields,
    WarningPrinter,
    app,
    make_results_folder,
    make_results_option,
    parse_checkpoints,
    parse_field_values,
    parse_metrics,
)
from sottovoce_core.errors import SpecError


@app.command(rich_help_panel="Runs")
def sweep(
    spec: SpecFile,
    changes: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="FIELD=V,V,...", help="Values of a field; repeat for every combination of several."
        ),
    ],
    replicas: Annotated[
        int, typer.Option(min=1, max=MAX_COUNT, help="Independent repetitions of each combination.")
    ] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise, and of the bootstrap.")] = 0,
    vary_data: Annotated[
        bool, typer.Option("--vary-data", help="Partition the records anew for each seed, besides the noise.")
    ] = False,
    target: CalibrationTarget = None,
    delta: ResultDelta = 0.0,
    tune: TunedFields = None,
    backend: BackendName = "processes",
    jobs: Annotated[
        int | None, typer.Option(min=1, max=MAX_JOBS, help="Number of concurrent jobs.", show_default="one per core")
    ] = None,
    metrics: MetricNames = "",
    checkpoints: CheckpointList = "1",
    export: ExportFormats = "",
    out: Annotated[Path | None, make_results_option("sweep")] = None,
) -> None:
    """Simulate a spec at every combination of given values, with many seeds: means, 95 % intervals and epsilon.

    Writes results.parquet and results.json.
    """
    from sottovoce_client import terminal
    from sottovoce_client.reports.figure import parse_formats
    from sottovoce_client.runs.plot import export_files
    from sottovoce_client.runs.sweep import sweep_with_progress
    from sottovoce_core.experiment import load
    from sottovoce_core.results import RESULT_FILE_NAMES, InterruptedSimulation

    formats, field_values = parse_formats(export), parse_field_values(changes, "--set")
    options: dict[str, Any] = {"seed": seed, "vary_data": vary_data, "target": target, "delta": delta}
    options |= {"tune": parse_field_values(tune or [], "--tune")}
    options |= {"backend": backend, "jobs": jobs}
    options |= {"metrics": parse_metrics(metrics), "checkpoints": parse_checkpoints(checkpoints)}
    experiment = load(spec)
    folder = make_results_folder("sweep", out, RESULT_FILE_NAMES)
    try:
        with terminal.show_progress_bar("simulating") as report:
            results = sweep_with_progress(
                WarningPrinter(), experiment, field_values, replicas, **options, report=report
            )
    except InterruptedSimulation as interrupt:
        interrupt.results.write(folder, seed=seed)
        count, total = len(interrupt.results.runs), math.prod(map(len, field_values.values()))
        terminal.print_notice(f"results of {count} of {total} combinations are kept: {folder}")
        raise
    results.write(folder, seed=seed)
    table = results.summary()
    print(table)
    print(f"{folder}: {', '.join(RESULT_FILE_NAMES)}")
    code = terminal.attempt("a file of --export", lambda: export_files(folder, formats, results))
    terminal.print_json_if_requested(
        lambda: {"folder": folder, "rows": [dict(zip(table.columns, row, strict=True)) for row in table.rows()]}
    )
    raise typer.Exit(code)


@app.command(rich_help_panel="Runs")
def plot(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="results.parquet files, or their folders.",
            show_default=False,
        ),
    ],
    x: Annotated[
        str,
        typer.Option(
            "--x",
            metavar="COLUMN",
            help="Horizontal axis: rounds, epsilon (per record use), or a changed field.",
            show_default="the first changed field with numbers; epsilon for a privacy parameter or a comparison; else rounds",
        ),
    ] = "",
    log: Annotated[
        str | None,
        typer.Option(
            metavar="AXES",
            help="Logarithmic axes: x, y, both with a comma, or none.",
            show_default="rounds, and values that span two decades",
        ),
    ] = None,
    export: ExportFormats = "",
    out: Annotated[Path | None, make_results_option("plot")] = None,
) -> None:
    """Plot results of simulate, sweep or compare: one figure for every metric, lines of every file.

    Writes plot.html.
    """
    from sottovoce_client import terminal
    from sottovoce_client.reports.figure import parse_formats
    from sottovoce_client.reports.page import Page
    from sottovoce_client.runs.plot import HorizontalAxis, export_files, make_figures
    from sottovoce_core.results import RESULT_FILE_NAMES, read_results

    formats, axes = parse_formats(export), None if log is None else _parse_axes(log)
    results = {
        (path.parent if path.name == RESULT_FILE_NAMES[0] else path).absolute().name: read_results(path)
        for path in files
    }
    if len(results) < len(files):
        raise SpecError(
            f"plot names lines by their folders, which must have different names, got {', '.join(map(str, files))}"
        )
    axis = HorizontalAxis.choose(results, x)
    figures = make_figures(axis, axes)
    if axis.omission_note:
        typer.echo(axis.omission_note, err=True)
    folder = make_results_folder("plot", out, ["plot.html"])
    Page("plot.html.j2", figures, {"figures": figures, "axis": axis}).write(folder / "plot.html")
    print(f"{folder}: plot.html")
    more = [path.name for path in export_files(folder, formats, results, figures)]
    names = [each.name for each in figures]
    terminal.print_json_if_requested(lambda: {"folder": folder, "files": ["plot.html", *more], "figures": names})


def _parse_axes(text: str) -> set[str]:
    """Parse `x,y` into axes.

    Raises:
        SpecError: An axis does not exist.
    """
    axes = {part.strip() for part in text.split(",")}
    if not (axes <= {"x", "y"} or axes == {"none"}):
        raise SpecError(f"--log must be x, y, x,y or none, got {text!r}")
    return axes - {"none"}


@app.command(rich_help_panel="Runs")
def track(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS", help="results.parquet of simulate, sweep or compare, or its folder.", show_default=False
        ),
    ],
    tracker: Annotated[
        str, typer.Argument(metavar="TRACKER", help="mlflow or wandb (Weights & Biases).", show_default=False)
    ],
) -> None:
    """Export results to MLflow or Weights & Biases: parameters, metrics over the rounds, epsilon, and a report.

    Destination, project and credentials are those of the tracker's own environment variables (MLFLOW_TRACKING_URI,
    MLFLOW_EXPERIMENT_NAME; WANDB_MODE, WANDB_PROJECT).

    Example: MLFLOW_TRACKING_URI=http://127.0.0.1:5000 sottovoce track results mlflow
    """
    from sottovoce_client import terminal
    from sottovoce_client.runs import tracking
    from sottovoce_core.results import read_results

    runs = tracking.track(read_results(results), tracker)
    print(f"{tracker}: {', '.join(runs)}")
    terminal.print_json_if_requested(lambda: {"tracker": tracker, "runs": runs})
