"""Commands for records, data sets and run specs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sottovoce_client.cli import completion
from sottovoce_client.cli.app import (
    MAX_COUNT,
    app,
    data_app,
    make_address_option,
    make_number_option,
    prepare_run,
    spec_app,
)
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
        Literal["classify", "regress"] | None, typer.Option(help="Kind of task.", show_default="by the labels")
    ] = None,
    positive: Annotated[
        list[str] | None,
        typer.Option(help="Label of the positive class (1); repeatable.", show_default="the last one of two"),
    ] = None,
    label_bound: Annotated[
        float | None, typer.Option(help="Bound of numeric labels, public: they are clipped to plus and minus this.")
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(help="Schema of the fields (see --schema-only), required for text or missing values."),
    ] = None,
    learners: Annotated[
        str | None,
        typer.Option(
            help="Number of learners, or their names: north,east.", show_default="the file's column learner, else 5"
        ),
    ] = None,
    partition: Annotated[
        Literal["iid", "by_label"] | None,
        typer.Option(help="Partition of the records.", show_default="iid"),
    ] = None,
    scale: Annotated[
        Literal["standard", "range", "none"] | None,
        typer.Option(
            help="Scaling by constants of held-out records, which are not protected.",
            show_default="standard; none if no record is held out",
        ),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Maximum epsilon of a record.", show_default="2")] = None,
    delta: Annotated[
        float, make_number_option(min_value=0.0, max_value=1.0, help="Delta of epsilon; 0: it is pure.")
    ] = 0.0,
    rounds: Annotated[
        int | None, typer.Option(min=2, max=MAX_COUNT, help="Maximum number of rounds.", show_default="6")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run.", show_default="name of the file")] = None,
    schema_only: Annotated[
        bool,
        typer.Option(
            "--schema-only",
            help="Draft a schema of the fields instead, from public records: bounds and categories are read from them, and are "
            "visible to all. Never draft from records that must be protected.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="File to write to.", show_default="FILE.yaml in this folder; for a schema: standard output"
        ),
    ] = None,
) -> None:
    """Write a commented spec for your own records, with noise calibrated to your privacy budget.

    On a terminal it asks for missing options; elsewhere it uses defaults. Each record is learned once. Existing files are not
    replaced without confirmation.

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
        spec_options |= {"--delta": delta or None, "--rounds": rounds, "--name": name}
        if given := [option for option, value in spec_options.items() if value is not None]:
            raise SpecError(f"--schema-only drafts a schema, not a spec, and does not go with {', '.join(given)}")
        schemas.infer(file, label, out)
        return
    from sottovoce_client.atomic_files import create_file, require_new
    from sottovoce_client.formatting import format_epsilon, pluralize
    from sottovoce_client.init_wizard import InitOptions, draft_spec, list_next_commands
    from sottovoce_client.terminal import ignore_progress, print_json, print_notice

    interactive = sys.stdin.isatty() and not get_common_options().as_json
    options = InitOptions(
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
        delta=delta,
        rounds=rounds,
        name=name,
    )
    path = out or Path(f"{file.stem}.yaml")
    replaces = interactive and path.exists() and typer.confirm(f"replace {path}?", err=True)
    if not replaces:
        require_new(path)
    draft = draft_spec(
        options, path.parent, _ask if interactive else None, print_notice if interactive else ignore_progress
    )
    if replaces:
        path.unlink()  # confirmed by the user; the new content is ready
    with create_file(path) as output:
        output.write(draft.text.encode())
    spec = draft.spec
    if get_common_options().as_json:
        print_json(
            {
                "spec": path,
                "algorithm": spec.algorithm.name,
                "epsilon": draft.epsilon,
                "delta": delta,
                "rounds": spec.rounds,
                "learners": spec.names,
                "batch_size": spec.data.batch_size,
                "records": draft.records,
            }
        )
        return
    size = f"{pluralize(spec.n_learners, 'learner')}, {pluralize(spec.rounds, 'round')}"
    typer.echo(f"{path}: {spec.algorithm.name}, {size}; epsilon {format_epsilon(draft.epsilon, delta)} per record")
    if draft.unused_records and spec.data.batch_size != "all":
        typer.echo(
            f"note: up to {draft.unused_records:,} records of a learner are not learned: all batches are full (batch_size)"
        )
    for note in draft.notes:
        typer.echo(escape_control(f"note: {note}"))
    typer.echo("next:")
    for command in list_next_commands(str(path)):
        typer.echo(f"  {command}")


def _ask(question: str, default: str) -> str:
    return str(typer.prompt(question, default=default or None, err=True))


@data_app.command("list")
def list_() -> None:
    """List the named data sets: content, licence, and whether they are on this machine."""
    from sottovoce_client import terminal
    from sottovoce_client.data.catalogue import show
    from sottovoce_core.data.catalogue import get_data_folders

    show(get_data_folders(), terminal.create_console())


def _check_location(location: str, option: str) -> None:
    if location:  # imported here because it is slow, and shell completion waits
        from sottovoce_client.data.fetch import require_location

        require_location(location, option)


@data_app.command("fetch")
def fetch(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            help="Names of data sets, from `sottovoce data list`.",
            show_default=False,
            autocompletion=completion.complete_dataset_names,
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Output folder.", show_default="$SOTTOVOCE_DATA, else the user's cache"),
    ] = None,
    location: Annotated[
        str,
        make_address_option(
            "--from",
            check=_check_location,
            metavar="LOCATION",
            help="A folder or URL with the original files, instead of the publishers' servers.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Download data sets from their publishers, verify them, and convert them. Existing ones are not changed."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    from rich.text import Text

    from sottovoce_client import terminal
    from sottovoce_client.data.catalogue import require_dataset
    from sottovoce_client.data.fetch import fetch as fetch_dataset
    from sottovoce_core.data.catalogue import find_dataset_file, get_data_folders

    documents: list[dict[str, Any]] = []
    sources, console = [require_dataset(name) for name in dict.fromkeys(names)], terminal.create_console()
    folders = (folder,) if folder else get_data_folders()
    if not folders:
        raise SpecError("data sets need an output folder, and there is none: give --out, or set SOTTOVOCE_DATA")
    for source in sources:
        if not source.originals:
            origin = "it is generated on demand" if source.is_synthetic else "it is part of scikit-learn"
            console.print(f"{source.name}: {origin}, there is nothing to fetch")
            documents.append({"name": source.name, "path": None, "originals": []})
            continue
        if (path := find_dataset_file(source.name, folders)) is not None:
            console.print(Text(f"{source.name}: already present, {path}"))
            documents.append({"name": source.name, "path": path, "originals": []})
            continue
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            path, locations = fetch_dataset(source, folders[0], progress, alternative_location=location)
        originals = [
            {"name": each.name, "location": locations[each.name], "digest": each.digest} for each in source.originals
        ]
        for each in source.originals:
            console.print(Text(f"{each.name}: {each.digest}, as published"))
        console.print(Text(f"{source.name}: {path} (licence: {source.licence})"))
        documents.append({"name": source.name, "path": path, "originals": originals})
    terminal.print_json_if_requested(lambda: documents)


@data_app.command("describe")
def describe(
    source: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE",
            help="Name of a data set; a .npz, .csv or .parquet file; or a schema, a .yaml file.",
            show_default=False,
            autocompletion=completion.complete_dataset_names,
        ),
    ],
    label: Annotated[
        str | None, typer.Option(help="Label column of a file.", show_default="label, else y, else the last one")
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Count the records of the file that fit this schema.", show_default="none"),
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option(help="With a schema: run spec whose loss must accept its label.", show_default="none"),
    ] = None,
) -> None:
    """Show the content of a data set: records, features and ranges, classes, source, licence, and a spec that uses it.

    For a schema, show the allowed values of its fields; with --schema, the number of records that fit it, and the reasons for the
    others: exits with 1 if any does not fit. The figures describe the records of your file and are not protected.
    """
    schema_file = schema or (Path(source) if source.endswith((".yaml", ".yml")) else None)
    if schema_file is not None:
        from sottovoce_client.data import schemas
        from sottovoce_core.spec import load_schema, load_spec

        if label is not None:
            raise SpecError("--label does not go with a schema, which names its label")
        records = None if schema_file == Path(source) else Path(source)
        fits = schemas.check(load_schema(schema_file), records, None if spec is None else load_spec(spec))
        raise typer.Exit(0 if fits else 1)
    if spec is not None:
        raise SpecError("--spec requires a schema: give --schema")
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
            show_default="required without --json-schema",
            autocompletion=completion.complete_spec_files,
        ),
    ] = None,
    print_: Annotated[
        bool, typer.Option("--print", help="Print the spec with all defaults filled in; its data is not read.")
    ] = False,
    json_schema: Annotated[
        bool, typer.Option("--json-schema", help="Print the JSON schema of all run specs, for editors.")
    ] = False,
) -> None:
    """Check a spec, its algorithm's conditions and its data, without running anything.

    Shows how the records are read: columns, labels and the positive class, the intercept, and the first five records.
    """
    if json_schema:
        from sottovoce_client import terminal
        from sottovoce_core.spec import build_spec_json_schema

        if spec is not None or print_:
            raise SpecError("--json-schema describes all specs: it goes with neither a SPEC nor --print")
        typer.echo(build_spec_json_schema())
        terminal.print_json_if_requested(lambda: json.loads(build_spec_json_schema()))
        return
    if spec is None:
        raise SpecError("spec check requires a SPEC, or --json-schema")
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
    if prepared.run.spec.n_learners == 1 and prepared.run.algorithm.name != "dpcda":  # dpcda is made for one learner
        typer.echo(f"note: {SINGLE_LEARNER_NOTE}")
    note = f", with {pluralize(len(warnings), 'warning')} above" if warnings else ""
    typer.echo(f"{spec}: {pluralize(prepared.run.spec.n_learners, 'learner')}, {width}: valid{note}")
    run, data = prepared.run, prepared.data
    terminal.print_json_if_requested(
        lambda: {
            "spec": spec,
            "algorithm": run.algorithm.name,
            "rounds": run.spec.rounds,
            "learners": run.spec.names,
            "features": data.n_features - run.spec.data.intercept,
            "intercept": run.spec.data.intercept,
            "records": None if run.spec.data.is_live else [len(each.labels) for each in data.learners],
            "held_out": None if run.spec.data.is_live else len(data.test_labels),
            "warnings": [{"code": each.code, "text": each.text} for each in warnings],
        }
    )


def _print(spec: Path) -> None:
    from sottovoce_client import terminal
    from sottovoce_core.spec import dump_spec, load_spec

    loaded = load_spec(spec)
    typer.echo(dump_spec(loaded), nl=False)
    terminal.print_json_if_requested(lambda: loaded.model_dump(mode="json"))


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
        typer.Option(metavar="NAME", help="Learner of this release; repeatable.", show_default="all"),
    ] = None,
    with_coordinator: Annotated[
        bool,
        typer.Option("--with-coordinator", help="This release has the coordinator, and only the learners of --own."),
    ] = False,
) -> None:
    """Print values for the Helm chart: learners, channels between them, and the capture mode of runs.

    Give all runs that will be started on the deployment. If the release does not have all learners, the output has fields to
    fill in about the others.
    """
    from sottovoce_client import terminal
    from sottovoce_client.helm import derive_chart_values, format_yaml
    from sottovoce_core.spec import load_spec

    values = derive_chart_values([load_spec(spec) for spec in specs], own or (), coordinator=with_coordinator)
    typer.echo(format_yaml(values), nl=False)
    terminal.print_json_if_requested(lambda: values)
