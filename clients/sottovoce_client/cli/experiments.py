"""Many runs of one spec, and figures of what runs wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sottovoce_client.cli.app import (
    MAX_COUNT,
    MAX_JOBS,
    BackendName,
    ExportFormats,
    SpecFile,
    WarningPrinter,
    app,
    make_results_folder,
    make_results_option,
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
        bool, typer.Option("--vary-data", help="Deal the records anew for each seed, not the noise alone.")
    ] = False,
    backend: BackendName = "processes",
    jobs: Annotated[
        int | None, typer.Option(min=1, max=MAX_JOBS, help="How many at a time.", show_default="one per core")
    ] = None,
    export: ExportFormats = "",
    out: Annotated[Path | None, make_results_option("sweep")] = None,
) -> None:
    """Simulate a spec at every combination of some values, with many seeds: means, 95 % intervals and epsilon.

    Writes results.parquet and results.json.
    """
    from sottovoce_client import terminal
    from sottovoce_client.reports.figure import parse_formats
    from sottovoce_client.runs.plot import export_files
    from sottovoce_client.runs.sweep import sweep_with_progress
    from sottovoce_core.experiment import load
    from sottovoce_core.results import RESULT_FILE_NAMES

    asked, listed = parse_formats(export), list(map(parse_field_values, changes))
    wanted = dict(listed)
    if len(wanted) < len(listed):
        raise SpecError(f"--set must name each field once, with all its values, got {', '.join(changes)}")
    options: dict[str, Any] = {"seed": seed, "vary_data": vary_data, "backend": backend, "jobs": jobs}
    experiment = load(spec)
    folder = make_results_folder("sweep", out, RESULT_FILE_NAMES)
    with terminal.show_progress_bar("simulating") as say:
        results = sweep_with_progress(WarningPrinter(), experiment, wanted, replicas, **options, display=say)
    results.write(folder, seed=seed)
    table = results.summary()
    print(table)
    print(f"{folder}: {', '.join(RESULT_FILE_NAMES)}")
    code = terminal.attempt("a file of --export", lambda: export_files(folder, asked, results))
    terminal.print_json_if_requested(
        lambda: {"folder": folder, "rows": [dict(zip(table.columns, row, strict=True)) for row in table.rows()]}
    )
    raise typer.Exit(code)


def parse_field_values(text: str) -> tuple[str, list[Any]]:
    """`algorithm.sigma=1,2,4` as a field and its values, which are read as YAML.

    Raises:
        SpecError: not so.
    """
    from sottovoce_core.yaml_files import parse_document

    field, equals, values = text.partition("=")
    try:
        found = parse_document(f"values: [{values}]", f"--set {text}", "a value").get("values")
    except SpecError as error:
        raise SpecError(f"--set must be FIELD=V,V,... with values as in a spec file: {error}") from None
    if not (field and equals and found):
        raise SpecError(f"--set must be FIELD=V,V,... with values as in a spec file, got {text!r}")
    return field, found


@app.command(rich_help_panel="Runs")
def plot(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="results.parquet, or the folders they are in.",
            show_default=False,
        ),
    ],
    x: Annotated[
        str,
        typer.Option(
            "--x",
            metavar="COLUMN",
            help="What is across: rounds, epsilon (per event), or a field that was changed.",
            show_default="the first changed field with numbers; epsilon for a privacy level, and of a comparison; else rounds",
        ),
    ] = "",
    log: Annotated[
        str | None,
        typer.Option(
            metavar="AXES",
            help="Logarithmic axes: x, y, both with a comma, or none.",
            show_default="rounds, and what spans two decades",
        ),
    ] = None,
    export: ExportFormats = "",
    out: Annotated[Path | None, make_results_option("plot")] = None,
) -> None:
    """Draw what simulate, sweep or compare wrote: one figure for every metric, lines of every file.

    Writes plot.html.
    """
    from sottovoce_client import terminal
    from sottovoce_client.reports.figure import parse_formats
    from sottovoce_client.reports.page import Page
    from sottovoce_client.runs.plot import HorizontalAxis, export_files, make_figures
    from sottovoce_core.results import RESULT_FILE_NAMES, read_results

    asked, axes = parse_formats(export), None if log is None else _axes(log)
    results = {
        (path.parent if path.name == RESULT_FILE_NAMES[0] else path).absolute().name: read_results(path)
        for path in files
    }
    if len(results) < len(files):
        raise SpecError(f"plot names lines by their folders, which must differ, got {', '.join(map(str, files))}")
    across = HorizontalAxis.choose(results, x)
    shown = make_figures(across, axes)
    if across.omission_note:
        typer.echo(across.omission_note, err=True)
    folder = make_results_folder("plot", out, ["plot.html"])
    Page("plot.html.j2", shown, {"figures": shown}).write(folder / "plot.html")
    print(f"{folder}: plot.html")
    more = [path.name for path in export_files(folder, asked, results, shown)]
    names = [each.name for each in shown]
    terminal.print_json_if_requested(lambda: {"folder": folder, "files": ["plot.html", *more], "figures": names})


def _axes(text: str) -> set[str]:
    """`x,y` as axes.

    Raises:
        SpecError: another one.
    """
    found = {part.strip() for part in text.split(",")}
    if not (found <= {"x", "y"} or found == {"none"}):
        raise SpecError(f"--log must be x, y, x,y or none, got {text!r}")
    return found - {"none"}
