"""Commands that run a spec: on this machine, on running services, in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sottovoce_client.cli import completion
from sottovoce_client.cli.app import (
    MAX_COUNT,
    SERVICE_FILES,
    CanaryCount,
    CheckpointList,
    ExportFormats,
    KeepLogFlag,
    MetricNames,
    OutputFolder,
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
    parse_privacy_levels,
    prepare_run,
)
from sottovoce_client.cli.common_options import OPERATOR_OPTIONS, get_common_options
from sottovoce_core.errors import SpecError

if TYPE_CHECKING:
    from sottovoce_core.spec import RunSpec

_RUN_FILES = ("summary.json", "report.html", "canaries.json", "commitment.json")
"""Files that a run writes into its folder, without its spec. A failed run wrote none, and is resumed in the same folder."""
_OUTPUT_FILES = {
    "metrics": ("results.parquet", "results.json"),
    "models": ("models.parquet",),
    "decisions": ("decisions.parquet",),
    "transcript": ("transcript.parquet",),
    "noise": ("noise.parquet",),
}
"""Outputs of `simulate`, and the files of each."""


@app.command(rich_help_panel="Runs")
def demo(
    data: Annotated[
        str | None,
        typer.Option(
            help="Name of a data set (sottovoce data list), or a .npz, .csv or .parquet file.",
            show_default="vital_signs",
            autocompletion=completion.complete_dataset_names,
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=MAX_COUNT, help="Number of rounds.", show_default="500")
    ] = None,
    out: OutputFolder = None,
    print_spec: Annotated[bool, typer.Option("--print-spec", help="Print the demo's run spec and exit.")] = False,
) -> None:
    """Run the demo on this machine: five learners, a coordinator and an eavesdropper, each its own process.

    Learners run private push-sum dual averaging (dpps) on a ring; every edge passes through the eavesdropper, and every record is
    used once, one per round with --data. Ends with a summary and an HTML report.
    """
    from sottovoce_client import terminal
    from sottovoce_core.spec import parse_spec
    from sottovoce_core.yaml_files import parse_yaml

    text = resources.files("sottovoce_client.runs").joinpath("demo.yaml").read_text(encoding="utf-8")
    if print_spec:
        typer.echo(text, nl=False)
        terminal.print_json_if_requested(lambda: parse_yaml(text))
        return
    document = parse_yaml(text)
    if data is not None:
        document["data"] |= {"source": data, "batch_size": 1}
    if rounds is not None:
        document["rounds"] = rounds
    _run_locally(parse_spec(document, source="demo", allow_imports=True), out)


@app.command(rich_help_panel="Runs")
def up(
    spec: SpecFile,
    out: OutputFolder = None,
    per_process: Annotated[int, typer.Option(min=1, max=MAX_COUNT, help="Number of learners in one process.")] = 1,
    recorded_noise: Annotated[
        Path | None, typer.Option(help="Use this noise instead of drawing it, for tests. Gives no privacy.")
    ] = None,
    canaries: CanaryCount = 0,
    tls: Annotated[bool, typer.Option("--tls", help="Encrypt all channels, with new identities for this run.")] = False,
    keep_log: KeepLogFlag = False,
) -> None:
    """Start all services of a spec on this machine, run it, stop them."""
    from sottovoce_core.spec import load_spec

    if recorded_noise is not None:  # checked before the services, which all read it, are started
        from sottovoce_core.runs.transcript import read_noise

        read_noise(recorded_noise)
    services = {"learners_per_process": per_process, "recorded_noise": recorded_noise, "tls": tls, "keep_log": keep_log}
    _run_locally(load_spec(spec), out, canaries, **services)


@app.command(rich_help_panel="Runs", common_options=OPERATOR_OPTIONS)
def run(
    spec: SpecFile,
    out: OutputFolder = None,
    canaries: CanaryCount = 0,
    resume: Annotated[
        str,
        typer.Option(
            metavar="RUN",
            help="Resume this failed run of the spec: its id, or a unique prefix.",
            show_default=False,
        ),
    ] = "",
    recover: Annotated[
        str,
        typer.Option(
            metavar="RUN",
            help="Recover this run of the spec, which the coordinator has lost with its --state. All its learners must be "
            "connected.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Run a spec on running services, and feed the learners."""
    from sottovoce_client.runs.run_client import run_on_services
    from sottovoce_client.runs.run_command import prepare_changed_run
    from sottovoce_core.spec import load_spec

    credentials = get_common_options().credentials
    if resume and recover:
        raise SpecError("--resume (a failed run) and --recover (a lost run) exclude each other: give one of them")
    _run_and_exit(
        load_spec(spec),
        out,
        lambda prepared, _, watch, stop: run_on_services(
            get_common_options().coordinator_or_local,
            prepared.run.spec,
            prepared.data,
            watch,
            stop,
            resume=resume,
            recover=recover,
            place_data=lambda spec: prepare_changed_run(spec).data,
            credentials=credentials,
        ),
        canaries,
    )


@app.command(rich_help_panel="Runs")
def simulate(
    spec: SpecFile,
    out: OutputFolder = None,
    replicas: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_COUNT,
            help="Independent repetitions, side by side. The noise of each depends on its index alone: the first of 4 "
            "equals that of "
            "1. Replicas x learners x dimensions of a model: 2^27 at most.",
        ),
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
    recorded_noise: Annotated[
        Path | None, typer.Option(help="Use this recorded noise instead (.parquet or .npz; zeros are allowed).")
    ] = None,
    write: Annotated[
        str,
        typer.Option(
            metavar="OUTPUTS",
            autocompletion=completion.make_list_completer((*_OUTPUT_FILES, "all")),
            help="Outputs: metrics (losses, regrets, accuracy), models (final ones), decisions (models of every round), "
            "transcript (messages), noise, or all; commas between. The last three grow with the rounds.",
        ),
    ] = "metrics,models",
    metrics: MetricNames = "",
    checkpoints: CheckpointList = "25",
    export: ExportFormats = "",
) -> None:
    """Simulate a spec without a network, with many replicas at once: metrics, models, and the outputs of --write.

    Announces the size of a large output first; an unfinished file is called NAME.partial.
    """
    from sottovoce_client import terminal
    from sottovoce_client.reports.figure import parse_formats
    from sottovoce_client.runs.plot import export_files
    from sottovoce_client.runs.simulation import (
        estimate_sizes,
        get_final_metrics,
        require_disk_space,
        simulate_to_folder,
    )
    from sottovoce_core.experiment import load
    from sottovoce_core.runs.metrics import resolve_checkpoints, select_metrics
    from sottovoce_core.runs.simulator import require_size
    from sottovoce_core.spec import dump_spec

    experiment, formats = load(spec), parse_formats(export)
    require_size(experiment.run, replicas)
    outputs = _parse_outputs(write, ["metrics"] if formats or metrics else [])
    measured, at = parse_metrics(metrics), parse_checkpoints(checkpoints)
    if "metrics" in outputs:  # before the folder is created
        select_metrics(experiment.run, experiment.records, measured)
        resolve_checkpoints(experiment.rounds, at)
    WarningPrinter()(experiment.prepared_run)  # before the folder is created: an invalid spec leaves none
    require_disk_space(out or Path(), estimate_sizes(experiment.run, replicas, outputs))
    names = [file for files in _OUTPUT_FILES.values() for file in files]
    folder = make_results_folder(experiment.name, out, names, dump_spec(experiment.run.spec, out))
    result = simulate_to_folder(
        folder,
        experiment,
        outputs=outputs,
        replicas=replicas,
        seed=seed,
        recorded_noise=recorded_noise,
        metrics=measured,
        checkpoints=at,
    )
    omitted = [name for name in _OUTPUT_FILES if name not in outputs]
    more = f"; not written: {', '.join(omitted)} (see --write)" if omitted else ""
    files = [file for name in outputs for file in _OUTPUT_FILES[name]]
    print(f"{folder}: {', '.join(files)}{more}")
    code = 0
    if formats:
        code = terminal.attempt("a file of --export", lambda: export_files(folder, formats, result.results))
    simulated = experiment.run.spec
    terminal.print_json_if_requested(
        lambda: {
            "folder": folder,
            "files": files,
            "left_out": omitted,
            "rounds": simulated.rounds,
            "learners": simulated.names,
            "replicas": replicas,
            "epsilon_record_use": experiment.epsilon() if recorded_noise is None else None,
            "metrics": {} if result.curves is None else get_final_metrics(result.curves),
        }
    )
    raise typer.Exit(code)


def _parse_outputs(text: str, more: Sequence[str]) -> tuple[str, ...]:
    """Parse `--write`, and add the outputs that other options need.

    Raises:
        SpecError: An output does not exist.
    """
    names = {part.strip() for part in text.split(",")} - {""}
    if (unknown := names - {*_OUTPUT_FILES, "all"}) or not names:
        raise SpecError(
            f"--write must be of {', '.join(_OUTPUT_FILES)} or all, got {', '.join(sorted(unknown)) or text!r}"
        )
    return tuple(name for name in _OUTPUT_FILES if name in names or name in more or "all" in names)


@app.command(rich_help_panel="Runs")
def compare(
    specs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="SPEC...",
            help="Run specs with the same data.",
            show_default=False,
            autocompletion=completion.complete_spec_files,
        ),
    ] = None,
    all_algorithms: Annotated[
        bool, typer.Option("--all-algorithms", help="Compare every built-in algorithm on one problem.")
    ] = False,
    out: Annotated[Path | None, make_results_option("compare")] = None,
    replicas: Annotated[
        int, typer.Option(min=1, max=MAX_COUNT, help="Independent repetitions of each, side by side.")
    ] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
    target: Annotated[
        str,
        typer.Option(
            metavar="E,E,...",
            help="Calibrate the noise of every run to this epsilon of one use of a record first; several: to each of them.",
            show_default="the noise of the spec",
        ),
    ] = "",
    delta: ResultDelta = 0.0,
    tune: TunedFields = None,
    metrics: MetricNames = "",
    checkpoints: CheckpointList = "25",
    export: ExportFormats = "",
) -> None:
    """Run several specs in the simulator and show the results in one table.

    Writes results.parquet, results.json, compare.md and compare.html. Exits with 1 if a spec cannot be run.
    """
    from sottovoce_client.reports.figure import parse_formats
    from sottovoce_client.runs.compare import compare_to_folder, list_builtin_sources, list_file_sources
    from sottovoce_core.results import RESULT_FILE_NAMES

    formats, targets = parse_formats(export), parse_privacy_levels(target, option="--target") if target else ()
    sources = [*(list_builtin_sources() if all_algorithms else []), *list_file_sources(specs or [])]
    if not sources:
        raise SpecError("compare requires specs, or --all-algorithms")
    measured, at, tuned = (
        parse_metrics(metrics),
        parse_checkpoints(checkpoints),
        parse_field_values(tune or [], "--tune"),
    )
    folder = make_results_folder("compare", out, [*RESULT_FILE_NAMES, "compare.md", "compare.html"])
    raise typer.Exit(
        compare_to_folder(
            sources,
            WarningPrinter(),
            folder,
            replicas=replicas,
            seed=seed,
            targets=targets,
            delta=delta,
            tune=tuned,
            export_formats=formats,
            metrics=measured,
            checkpoints=at,
        )
    )


def _run_locally(spec: RunSpec, out: Path | None, canaries: int = 0, **services: Any) -> None:
    """Run a spec on local services, with arguments of `LocalServices`."""
    from sottovoce_client.runs.run_command import run_with_local_services

    def start(prepared: Any, folder: Path, watch: Any, stop: Any) -> Coroutine[Any, Any, Any]:
        return run_with_local_services(prepared.run.spec, prepared.data, folder, watch, stop, **services)

    _run_and_exit(spec, out, start, canaries, owns_services=True)


def _run_and_exit(
    spec: RunSpec,
    out: Path | None,
    start: Callable[..., Coroutine[Any, Any, Any]],
    canaries: int = 0,
    *,
    owns_services: bool = False,
) -> None:
    """Prepare, run while the console shows it, then summarise; a spec that cannot be run leaves no folder."""
    from sottovoce_client.runs.run_command import run_and_report
    from sottovoce_core.experiment import PAUSES
    from sottovoce_core.spec import dump_spec

    prepared = WarningPrinter()(prepare_run(spec, live=True))
    for finding in prepared.run.warnings:  # the others are shown with the results
        if finding.code == PAUSES:
            typer.echo(f"warning: {finding.text} [{finding.code}]", err=True)
    folder = make_results_folder(
        spec.name, out, [*_RUN_FILES, *(SERVICE_FILES if owns_services else ())], dump_spec(prepared.run.spec, out)
    )
    if canaries:
        from sottovoce_client.watching.canary_files import commit_canaries

        prepared = commit_canaries(prepared, canaries, folder)
    raise typer.Exit(
        run_and_report(
            prepared, folder, lambda ready, *arguments: start(ready, folder, *arguments), owns_services=owns_services
        )
    )
