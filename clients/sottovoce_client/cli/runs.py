"""Runs: on this machine, on services that are up, on the simulator."""

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
    ExportFormats,
    KeepLogFlag,
    OutputFolder,
    SpecFile,
    WarningPrinter,
    app,
    make_results_folder,
    make_results_option,
    prepare_run,
)
from sottovoce_client.cli.common_options import OPERATOR_OPTIONS, get_common_options
from sottovoce_core.errors import SpecError

if TYPE_CHECKING:
    from sottovoce_core.spec import RunSpec

_RUN = ("summary.json", "report.html", "canaries.json", "commitment.json")
"""What a run leaves in its folder beside its spec. One that failed left none of it, and is taken up again in the same folder."""
_SIMULATED = {
    "metrics": ("results.parquet", "results.json"),
    "models": ("models.parquet",),
    "decisions": ("decisions.parquet",),
    "transcript": ("transcript.parquet",),
    "noise": ("noise.parquet",),
}
"""What `simulate` can write, and the files of each."""


@app.command(rich_help_panel="Runs")
def demo(
    data: Annotated[
        str | None,
        typer.Option(
            help="A name (sottovoce data list), or a .npz, .csv or .parquet file.",
            show_default="vital_signs",
            autocompletion=completion.complete_dataset_names,
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, max=MAX_COUNT, help="Rounds to run.", show_default="500")] = None,
    out: OutputFolder = None,
    print_spec: Annotated[bool, typer.Option("--print-spec", help="Print the demo's run spec and exit.")] = False,
) -> None:
    """The main job on this machine: five learners, a coordinator and an eavesdropper, each its own process.

    Learners run private push-sum dual averaging (dpps) on a ring; every edge passes through the eavesdropper, and every record is
    used once, one a round with --data. Ends with a summary and an HTML report.
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
    _up(parse_spec(document, source="demo", allow_imports=True), out)


@app.command(rich_help_panel="Runs")
def up(
    spec: SpecFile,
    out: OutputFolder = None,
    per_process: Annotated[int, typer.Option(min=1, max=MAX_COUNT, help="Learners in one process.")] = 1,
    recorded_noise: Annotated[
        Path | None, typer.Option(help="Use this noise instead of drawing it. Protects nobody: for tests.")
    ] = None,
    canaries: CanaryCount = 0,
    tls: Annotated[
        bool, typer.Option("--tls", help="Encrypt all channels, with identities made for this run.")
    ] = False,
    keep_log: KeepLogFlag = False,
) -> None:
    """Start all services of a spec on this machine, run it, stop them."""
    from sottovoce_core.spec import load_spec

    if recorded_noise is not None:  # before services are started, each of which reads it
        from sottovoce_core.runs.transcript import read_noise

        read_noise(recorded_noise)
    services = {"per_process": per_process, "noise": recorded_noise, "tls": tls, "keep_log": keep_log}
    _up(load_spec(spec), out, canaries, **services)


@app.command(rich_help_panel="Runs", common_options=OPERATOR_OPTIONS)
def run(
    spec: SpecFile,
    out: OutputFolder = None,
    canaries: CanaryCount = 0,
    resume: Annotated[
        str,
        typer.Option(
            metavar="RUN",
            help="Take up this run of the spec, which failed: its id, or its beginning.",
            show_default=False,
        ),
    ] = "",
    recover: Annotated[
        str,
        typer.Option(
            metavar="RUN",
            help="Take up this run of the spec, which the coordinator does not know: the --state that knew it is lost. All "
            "its learners must be there.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Run a spec on services that are already up, feeding the learners from here."""
    from sottovoce_client.runs.run_client import run_on_services
    from sottovoce_client.runs.run_command import prepare_changed_run
    from sottovoce_core.spec import load_spec

    credentials = get_common_options().credentials
    if resume and recover:
        raise SpecError("a run failed (--resume), or its coordinator lost it (--recover): give one of the two")
    _conduct(
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
            help="Independent repetitions, side by side. Each has the noise of its index: the first of 4 is that of 1 alone. "
            "Times learners, times numbers of a model, they are 2^27 at most.",
        ),
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
    recorded_noise: Annotated[
        Path | None, typer.Option(help="Recorded noise to use instead (.parquet or .npz; zeros are allowed).")
    ] = None,
    write: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            autocompletion=completion.make_list_completer((*_SIMULATED, "all")),
            help="What to keep: metrics (losses, regrets, accuracy), models (the final ones), decisions (models of every round), "
            "transcript (what was said), noise (what was drawn), or all; commas between. The last three grow with the rounds.",
        ),
    ] = "metrics,models",
    export: ExportFormats = "",
) -> None:
    """Run a spec without a network, many replicas at once: what it comes to, its models, and what else --write names.

    How much a large result will take is said before it begins; a file that is not complete yet is called NAME.partial.
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
    from sottovoce_core.runs.simulator import require_size
    from sottovoce_core.spec import dump_spec

    experiment, asked = load(spec), parse_formats(export)
    require_size(experiment.run, replicas)
    kept = _kept(write, ["metrics"] if asked else [])
    WarningPrinter()(experiment.prepared_run)  # before a folder is made: a spec that cannot be run leaves none
    require_disk_space(out or Path(), estimate_sizes(experiment.run, replicas, kept))
    names = [file for files in _SIMULATED.values() for file in files]
    folder = make_results_folder(experiment.name, out, names, dump_spec(experiment.run.spec, out))
    done = simulate_to_folder(
        folder, experiment, outputs=kept, replicas=replicas, seed=seed, recorded_noise=recorded_noise
    )
    left = [name for name in _SIMULATED if name not in kept]
    more = f"; left out: {', '.join(left)} (--write)" if left else ""
    files = [file for name in kept for file in _SIMULATED[name]]
    print(f"{folder}: {', '.join(files)}{more}")
    code = 0
    if asked:
        code = terminal.attempt("a file of --export", lambda: export_files(folder, asked, done.results))
    ran = experiment.run.spec
    terminal.print_json_if_requested(
        lambda: {
            "folder": folder,
            "files": files,
            "left_out": left,
            "rounds": ran.rounds,
            "learners": ran.names,
            "replicas": replicas,
            "epsilon_record_use": experiment.epsilon() if recorded_noise is None else None,
            "metrics": {} if done.curves is None else get_final_metrics(done.curves),
        }
    )
    raise typer.Exit(code)


def _kept(text: str, more: Sequence[str]) -> tuple[str, ...]:
    """What `--write` asks for, and other options beside it.

    Raises:
        SpecError: it is not of what there is.
    """
    found = {part.strip() for part in text.split(",")} - {""}
    if (unknown := found - {*_SIMULATED, "all"}) or not found:
        raise SpecError(
            f"--write must be of {', '.join(_SIMULATED)} or all, got {', '.join(sorted(unknown)) or text!r}"
        )
    return tuple(name for name in _SIMULATED if name in found or name in more or "all" in found)


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
    field: Annotated[bool, typer.Option("--field", help="Every built-in algorithm on one problem.")] = False,
    out: Annotated[Path | None, make_results_option("compare")] = None,
    replicas: Annotated[
        int, typer.Option(min=1, max=MAX_COUNT, help="Independent repetitions of each, side by side.")
    ] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
    export: ExportFormats = "",
) -> None:
    """Run several specs in the simulator and show what they came to in one table.

    Writes results.parquet, results.json, compare.md and compare.html. Exits with 1 if a spec could not be run.
    """
    from sottovoce_client.reports.figure import parse_formats
    from sottovoce_client.runs.compare import compare_to_folder as run_all
    from sottovoce_client.runs.compare import list_builtin_sources, list_file_sources
    from sottovoce_core.results import RESULT_FILE_NAMES

    asked = parse_formats(export)
    sources = [*(list_builtin_sources() if field else []), *list_file_sources(specs or [])]
    if not sources:
        raise SpecError("compare needs specs, or --field for every built-in algorithm")
    folder = make_results_folder("compare", out, [*RESULT_FILE_NAMES, "compare.md", "compare.html"])
    raise typer.Exit(run_all(sources, WarningPrinter(), folder, replicas=replicas, seed=seed, export_formats=asked))


def _up(spec: RunSpec, out: Path | None, canaries: int = 0, **services: Any) -> None:
    """On services as `LocalServices` has them."""
    from sottovoce_client.runs.run_command import run_with_local_services

    def start(prepared: Any, folder: Path, watch: Any, stop: Any) -> Coroutine[Any, Any, Any]:
        return run_with_local_services(prepared.run.spec, prepared.data, folder, watch, stop, **services)

    _conduct(spec, out, start, canaries, served=True)


def _conduct(
    spec: RunSpec,
    out: Path | None,
    start: Callable[..., Coroutine[Any, Any, Any]],
    canaries: int = 0,
    *,
    served: bool = False,
) -> None:
    """Prepare, run while the console shows it, then summarise; a spec that cannot be run leaves no folder."""
    from sottovoce_client.runs.run_command import run_and_report
    from sottovoce_core.experiment import PAUSES
    from sottovoce_core.spec import dump_spec

    prepared = WarningPrinter()(prepare_run(spec, live=True))
    for finding in prepared.run.warnings:  # the others are for whoever reads the results
        if finding.code == PAUSES:
            typer.echo(f"warning: {finding.text} [{finding.code}]", err=True)
    folder = make_results_folder(
        spec.name, out, [*_RUN, *(SERVICE_FILES if served else ())], dump_spec(prepared.run.spec, out)
    )
    if canaries:
        from sottovoce_client.watching.canary_files import commit_canaries

        prepared = commit_canaries(prepared, canaries, folder)
    raise typer.Exit(
        run_and_report(prepared, folder, lambda ready, *watching: start(ready, folder, *watching), owns_services=served)
    )
