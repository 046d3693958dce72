"""Records of one's own, data sets, and run specs: described, drafted, checked and printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sottovoce_client.cli import completion
from sottovoce_client.cli.app import MAX_COUNT, app, data_app, make_address_option, prepare_run, spec_app
from sottovoce_client.cli.common_options import get_common_options
from sottovoce_core.errors import SpecError
from sottovoce_core.text import escape_control


@app.command(rich_help_panel="Runs")
def init(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Your records: a .csv, .parquet or .npz file.", show_default=False)
    ],
    label: Annotated[
        str | None,
        typer.Option(help="Label column.", show_default="label, else y, else the one of text, else the last"),
    ] = None,
    task: Annotated[
        Literal["classify", "regress"] | None, typer.Option(help="What is learned.", show_default="by the labels")
    ] = None,
    positive: Annotated[
        list[str] | None,
        typer.Option(help="A label that counts as 1; repeat for several.", show_default="the last one of two"),
    ] = None,
    label_bound: Annotated[
        float | None, typer.Option(help="Of labels that are numbers: clipped to plus and minus this, a public bound.")
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(help="A schema of the fields (see --schema-only), where some are text or missing."),
    ] = None,
    learners: Annotated[
        str | None,
        typer.Option(help="How many, or their names: north,east.", show_default="the file's column learner, else 5"),
    ] = None,
    partition: Annotated[
        Literal["iid", "by_label"] | None,
        typer.Option(help="How records are dealt to learners.", show_default="iid"),
    ] = None,
    scale: Annotated[
        Literal["standard", "range", "none"] | None,
        typer.Option(
            help="By constants of held-out records, which nothing protects.",
            show_default="standard; none where no record is held out",
        ),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="What a record may cost at most.", show_default="2")] = None,
    rounds: Annotated[int | None, typer.Option(min=2, max=MAX_COUNT, help="At most so many.", show_default="6")] = None,
    name: Annotated[str | None, typer.Option(help="Of the run.", show_default="that of the file")] = None,
    schema_only: Annotated[
        bool,
        typer.Option(
            "--schema-only",
            help="Draft a schema of the fields instead, from public records: bounds and categories are read off them, and all "
            "will see them. Never draft from records that are to be protected.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write to.", show_default="FILE.yaml, here; of a schema: standard output"),
    ] = None,
) -> None:
    """Write a commented spec for records of your own, with the noise that keeps your privacy wish.

    On a terminal it asks what no option says; elsewhere it takes what is usual. Each record is learned once. No file is
    replaced unasked.

    Example: sottovoce init wards.csv --label outcome --positive died --learners north,east,south --epsilon 2
    """
    if schema_only:
        from sottovoce_client.data import schemas

        spec_options: dict[str, object] = {
            "--task": task,
            "--positive": positive,
            "--label-bound": label_bound,
            "--schema": schema,
        }
        spec_options |= {"--learners": learners, "--partition": partition, "--scale": scale, "--epsilon": epsilon}
        spec_options |= {"--rounds": rounds, "--name": name}
        if given := [option for option, value in spec_options.items() if value is not None]:
            raise SpecError(f"--schema-only drafts a schema and no spec: it goes without {', '.join(given)}")
        schemas.infer(file, label, out)
        return
    from sottovoce_client.atomic_files import create_file, require_new
    from sottovoce_client.formatting import pluralize
    from sottovoce_client.init_wizard import InitOptions, draft_spec, list_next_commands
    from sottovoce_client.terminal import ignore_progress, print_json, print_notice

    asks = sys.stdin.isatty() and not get_common_options().as_json
    wishes = InitOptions(
        file,
        label=label,
        task=task,
        positive=tuple(positive) if positive else None,
        label_bound=label_bound,
        schema=schema,
        learners=learners,
        partition=partition,
        scale=scale,
        epsilon=epsilon,
        rounds=rounds,
        name=name,
    )
    path = out or Path(f"{file.stem}.yaml")
    replaces = asks and path.exists() and typer.confirm(f"replace {path}?", err=True)
    if not replaces:
        require_new(path)
    begun = draft_spec(wishes, path.parent, _ask if asks else None, print_notice if asks else ignore_progress)
    if replaces:
        path.unlink()  # it was asked for; what comes in its place is ready
    with create_file(path) as written:
        written.write(begun.text.encode())
    spec = begun.spec
    if get_common_options().as_json:
        print_json(
            {
                "spec": path,
                "algorithm": spec.algorithm.name,
                "epsilon": begun.epsilon,
                "delta": 0.0,
                "rounds": spec.rounds,
                "learners": spec.names,
                "batch_size": spec.data.batch_size,
                "records": begun.records,
            }
        )
        return
    size = f"{pluralize(spec.n_learners, 'learner')}, {pluralize(spec.rounds, 'round')}"
    typer.echo(f"{path}: {spec.algorithm.name}, {size}; epsilon {begun.epsilon:.4g} per record")
    if begun.unused_records and spec.data.batch_size != "all":
        typer.echo(
            f"note: of a learner's records up to {begun.unused_records:,} are not learned: all batches are full (batch_size)"
        )
    for note in begun.notes:
        typer.echo(escape_control(f"note: {note}"))
    typer.echo("next:")
    for command in list_next_commands(str(path)):
        typer.echo(f"  {command}")


def _ask(question: str, usual: str) -> str:
    return str(typer.prompt(question, default=usual or None, err=True))


@data_app.command("list")
def list_() -> None:
    """Show every data set that has a name: what is in it, its licence, and whether it is on this machine."""
    from sottovoce_client import terminal
    from sottovoce_client.data.catalogue import show
    from sottovoce_core.data.catalogue import get_data_folders

    show(get_data_folders(), terminal.create_console())


def _place(elsewhere: str, what: str) -> None:
    if elsewhere:  # what comes with it is large, and Tab waits for this
        from sottovoce_client.data.fetch import require_location

        require_location(elsewhere, what)


@data_app.command("fetch")
def fetch(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            help="As `sottovoce data list` shows them.",
            show_default=False,
            autocompletion=completion.complete_dataset_names,
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Folder to put them in.", show_default="$SOTTOVOCE_DATA, else your cache"),
    ] = None,
    elsewhere: Annotated[
        str,
        make_address_option(
            "--from",
            check=_place,
            metavar="PLACE",
            help="A folder or URL that has the original files, in place of their owners' servers.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Download data sets from their owners, check them, and keep them as runs read them. One that is here is left as it is."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    from rich.text import Text

    from sottovoce_client import terminal
    from sottovoce_client.data.catalogue import require_dataset
    from sottovoce_client.data.fetch import fetch as bring
    from sottovoce_core.data.catalogue import find_dataset_file, get_data_folders

    told: list[dict[str, Any]] = []
    sources, console = [require_dataset(name) for name in dict.fromkeys(names)], terminal.create_console()
    folders = (folder,) if folder else get_data_folders()
    if not folders:
        raise SpecError("there is no folder to put data sets in: give one with --out, or set SOTTOVOCE_DATA to one")
    for source in sources:
        if not source.originals:
            whose = "it is made when it is asked for" if source.is_synthetic else "scikit-learn ships it"
            console.print(f"{source.name}: {whose}, there is nothing to fetch")
            told.append({"name": source.name, "path": None, "came": []})
            continue
        if (path := find_dataset_file(source.name, folders)) is not None:
            console.print(Text(f"{source.name}: here already, {path}"))
            told.append({"name": source.name, "path": path, "came": []})
            continue
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            path, came = bring(source, folders[0], progress, alternative_location=elsewhere)
        originals = [{"name": each.name, "place": came[each.name], "digest": each.digest} for each in source.originals]
        for each in source.originals:
            console.print(Text(f"{each.name}: {each.digest}, as published"))
        console.print(Text(f"{source.name}: {path} (licence: {source.licence})"))
        told.append({"name": source.name, "path": path, "came": originals})
    terminal.print_json_if_requested(lambda: told)


@data_app.command("describe")
def describe(
    source: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE",
            help="A name; a .npz, .csv or .parquet file of your own; or a schema, a .yaml file.",
            show_default=False,
            autocompletion=completion.complete_dataset_names,
        ),
    ],
    label: Annotated[
        str | None, typer.Option(help="Label column of a file.", show_default="label, else y, else the last one")
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Count how many records of the file fit this schema.", show_default="none"),
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option(help="With a schema: a run spec whose loss its label must suit.", show_default="none"),
    ] = None,
) -> None:
    """Show what a data set holds: records, features and their ranges, classes, source, licence, and a spec that uses it.

    Of a schema, show what its fields may be; with --schema, how many records fit it, and why the others do not: exits with 1 if
    any does not. These are figures of the records of your file: nothing protects them.
    """
    own = schema or (Path(source) if source.endswith((".yaml", ".yml")) else None)
    if own is not None:
        from sottovoce_client.data import schemas
        from sottovoce_core.spec import load_schema, load_spec

        if label is not None:
            raise SpecError("a schema names its label: --label goes without one")
        records = None if own == Path(source) else Path(source)
        fits = schemas.check(load_schema(own), records, None if spec is None else load_spec(spec))
        raise typer.Exit(0 if fits else 1)
    if spec is not None:
        raise SpecError("--spec is held against a schema: give --schema, too")
    from sottovoce_client import terminal
    from sottovoce_client.data.catalogue import describe as show
    from sottovoce_core.data.catalogue import get_data_folders

    show(source, get_data_folders(), terminal.create_console(), label)


@spec_app.command("check")
def check_spec(
    spec: Annotated[
        Path | None,
        typer.Argument(
            metavar="SPEC",
            help="The run spec, a YAML file.",
            show_default="required, but with --json-schema",
            autocompletion=completion.complete_spec_files,
        ),
    ] = None,
    print_: Annotated[
        bool, typer.Option("--print", help="Print the spec with all defaults filled in; its data are not read.")
    ] = False,
    json_schema: Annotated[
        bool, typer.Option("--json-schema", help="Print the JSON schema of all run specs, for editors.")
    ] = False,
) -> None:
    """Check a spec, its algorithm's conditions and its data, without running anything.

    Shows how the records are read: columns, labels and what counts as 1, the intercept, and the first five of them.
    """
    if json_schema:
        from sottovoce_client import terminal
        from sottovoce_core.spec import build_spec_json_schema

        if spec is not None or print_:
            raise SpecError("--json-schema is of all specs: it goes with no SPEC, and not with --print")
        typer.echo(build_spec_json_schema())
        terminal.print_json_if_requested(lambda: json.loads(build_spec_json_schema()))
        return
    if spec is None:
        raise SpecError("spec check needs a SPEC, or --json-schema")
    if print_:
        _print(spec)
        return
    from sottovoce_client import terminal
    from sottovoce_client.data.schemas import describe_records, find_long_records
    from sottovoce_client.formatting import SINGLE_LEARNER_NOTE, pluralize
    from sottovoce_core.data.catalogue import get_data_folders
    from sottovoce_core.runs.policy import find_default_policy_warnings
    from sottovoce_core.spec import load_spec

    prepared = prepare_run(load_spec(spec), live=True)
    warnings = [
        *prepared.run.warnings,
        *prepared.warnings,
        *find_default_policy_warnings(prepared.run),
        *find_long_records(prepared),
    ]
    for finding in warnings:
        typer.echo(escape_control(f"warning: {finding.text} [{finding.code}]"))
    for line in describe_records(prepared, get_data_folders()):
        typer.echo(escape_control(line))
    width = pluralize(prepared.data.n_features, "feature")
    if prepared.run.spec.data.intercept:
        width = f"{pluralize(prepared.data.n_features - 1, 'feature')} and an intercept"
    if prepared.run.spec.n_learners == 1 and prepared.run.algorithm.name != "dpcda":  # which is for one
        typer.echo(f"note: {SINGLE_LEARNER_NOTE}")
    but = f", but for {pluralize(len(warnings), 'warning')} above" if warnings else ""
    typer.echo(f"{spec}: {pluralize(prepared.run.spec.n_learners, 'learner')}, {width}: fine{but}")
    run, data = prepared.run, prepared.data
    terminal.print_json_if_requested(
        lambda: {
            "spec": spec,
            "algorithm": run.algorithm.name,
            "rounds": run.spec.rounds,
            "learners": run.spec.names,
            "features": data.n_features - run.spec.data.intercept,
            "intercept": run.spec.data.intercept,
            "records": None if run.spec.data.live else [len(each.labels) for each in data.learners],
            "held_out": None if run.spec.data.live else len(data.test_labels),
            "warnings": [{"code": each.code, "text": each.text} for each in warnings],
        }
    )


def _print(spec: Path) -> None:
    from sottovoce_client import terminal
    from sottovoce_core.spec import dump_spec, load_spec

    asked = load_spec(spec)
    typer.echo(dump_spec(asked), nl=False)
    terminal.print_json_if_requested(lambda: asked.model_dump(mode="json"))


@spec_app.command("values")
def print_chart_values(
    specs: Annotated[
        list[Path],
        typer.Argument(
            metavar="SPEC",
            help="The run specs, YAML files.",
            show_default=False,
            autocompletion=completion.complete_spec_files,
        ),
    ],
    own: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A learner of this release; repeat for several.", show_default="all"),
    ] = None,
    with_coordinator: Annotated[
        bool,
        typer.Option(
            "--with-coordinator", help="This release has the coordinator, and of the learners those of --own alone."
        ),
    ] = False,
) -> None:
    """Print values for the Helm chart: learners, who opens a stream to whom, and how runs are captured.

    Of all runs that are to be started on one deployment. Where a release has not all learners, it also prints what is to be
    filled in about those elsewhere.
    """
    from sottovoce_client import terminal
    from sottovoce_client.helm import derive_chart_values, format_yaml
    from sottovoce_core.spec import load_spec

    values = derive_chart_values([load_spec(spec) for spec in specs], own or (), coordinator=with_coordinator)
    typer.echo(format_yaml(values), nl=False)
    terminal.print_json_if_requested(lambda: values)
