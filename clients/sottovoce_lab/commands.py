"""Commands of the laboratory: `sottovoce lab self-test`, `power` and `gallery`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sottovoce_client.cli import completion
from sottovoce_client.cli.app import (
    MAX_COUNT,
    MAX_JOBS,
    BackendName,
    make_results_folder,
    make_results_option,
    parse_privacy_levels,
    prepare_run,
)
from sottovoce_client.cli.common_options import CommandApp, get_common_options

lab_app = CommandApp(
    no_args_is_help=True,
    help="Test the auditor itself, and show in pictures what an eavesdropper can rebuild.",
)

_Mutants = Annotated[
    list[str] | None, typer.Option("--mutant", metavar="MODULE:NAME", help="An additional mutant; repeatable.")
]
_Jobs = Annotated[
    int | None, typer.Option(min=1, max=MAX_JOBS, help="Maximum parallel tasks.", show_default="one per core")
]
_Seed = Annotated[int, typer.Option(min=0, help="Seed of the coins and the noise.")]
_Out = Annotated[
    Path | None,
    typer.Option("--out", help="Folder for the results.", show_default="none are written"),
]


@lab_app.command("self-test")
def self_test(
    spec: Annotated[
        Path | None,
        typer.Argument(
            metavar="SPEC",
            help="The run spec that mutants break.",
            show_default="small runs of all algorithms",
            autocompletion=completion.complete_spec_files,
        ),
    ] = None,
    mutant: _Mutants = None,
    audits: Annotated[int, typer.Option(min=0, max=MAX_COUNT, help="Audits of every correct algorithm.")] = 5,
    learner: Annotated[
        str | None, typer.Option(help="The audited learner.", show_default="the one with the largest epsilon")
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_COUNT,
            help="Maximum runs of each of the two worlds.",
            show_default="each mutant's own",
        ),
    ] = None,
    backend: BackendName = "processes",
    jobs: _Jobs = None,
    seed: _Seed = 0,
    out: _Out = None,
) -> None:
    """Test the auditor: count the mutants that it finds, and its false alarms on correct learners.

    Writes selftest.json to the folder of --out. Exits with 1 if a mutant is missed, or if false alarms are too many to be chance.
    """
    from sottovoce_core.spec import load_spec
    from sottovoce_lab import selftest

    if out is not None:
        make_results_folder("audit", out, ["selftest.json"])
    prepared = None if spec is None else prepare_run(load_spec(spec))
    code = selftest.run_self_test(
        prepared,
        learner=learner,
        mutants=mutant or [],
        audits=audits,
        runs=runs,
        backend=backend,
        jobs=jobs,
        seed=seed,
        out=out,
    )
    raise typer.Exit(code)


@lab_app.command()
def power(
    mutant: _Mutants = None,
    runs: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_COUNT, help="Maximum runs of each of the two worlds.", show_default="2000"),
    ] = None,
    backend: BackendName = "processes",
    jobs: _Jobs = None,
    seed: _Seed = 0,
    out: _Out = None,
) -> None:
    """Measure with how many runs the audit finds every mutant of the catalogue. Takes half an hour.

    Writes power.md and power.json to the folder of --out, in place of earlier ones. Exits with 1 if a fault with enough
    evidence is missed.
    """
    from sottovoce_lab.power import measure_power

    code = measure_power(mutants=mutant or [], runs=runs, backend=backend, jobs=jobs, seed=seed, out=out)
    raise typer.Exit(code)


@lab_app.command(common_options=("as_json", "allow_imports"))
def gallery(
    spec: Annotated[
        Path | None,
        typer.Argument(
            metavar="SPEC",
            help="The run spec whose simulated messages are attacked.",
            show_default="small runs over handwritten digits, and guesses of membership",
            autocompletion=completion.complete_spec_files,
        ),
    ] = None,
    capture: Annotated[
        Path | None,
        typer.Option("--captures", metavar="CAPTURE", help="Attack this capture, a folder, instead of simulated runs."),
    ] = None,
    epsilons: Annotated[
        str | None,
        typer.Option(
            metavar="E,E,...",
            help="Epsilons of a record over the whole run, for the pictures.",
            show_default="100000,10000,1000,100,1",
        ),
    ] = None,
    noise_factors: Annotated[
        str | None,
        typer.Option(
            metavar="F,F,...", help="Factors on the noise of SPEC, for the pictures.", show_default="epsilons instead"
        ),
    ] = None,
    runs: Annotated[
        int, typer.Option(min=10, max=MAX_COUNT, help="Simulated runs in which membership is guessed.")
    ] = 4000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of noise, coins and searches.")] = 0,
    out: Annotated[Path | None, make_results_option("gallery")] = None,
) -> None:
    """Show what an eavesdropper can rebuild of the records, in pictures, beside guesses that need no message.

    Writes gallery.json and gallery.html. The attack on a network's gradients needs the extra torch.
    """
    from sottovoce_client import terminal
    from sottovoce_core.data.catalogue import get_data_folders
    from sottovoce_core.errors import SpecError
    from sottovoce_core.spec import load_spec
    from sottovoce_lab.gallery import write_capture_gallery, write_simulated_gallery, write_spec_gallery

    if spec is not None and capture is not None:
        raise SpecError("a gallery is of SPEC or of --captures, got both: leave one out")
    if noise_factors is not None and spec is None:
        raise SpecError("--noise-factors need SPEC, whose noise they multiply, got none")
    levels = None if epsilons is None else parse_privacy_levels(epsilons)[::-1]  # from little noise to much
    factors = () if noise_factors is None else parse_privacy_levels(noise_factors, option="--noise-factors")
    prepared = None if spec is None else prepare_run(load_spec(spec))
    folder = make_results_folder("gallery", out, ["gallery.json", "gallery.html"])
    if prepared is not None:
        code = write_spec_gallery(prepared, folder, levels, factors, seed)
    elif capture is None:
        code = write_simulated_gallery(folder, levels, runs, seed)
    else:
        code = write_capture_gallery(
            capture, folder, seed, get_data_folders(), allow_imports=get_common_options().allow_imports
        )
    terminal.print_json_file_if_requested(folder / "gallery.json")
    raise typer.Exit(code)
