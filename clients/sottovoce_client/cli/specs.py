"""Run specs: checked, printed, and turned into values of the chart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sottovoce.errors import SpecError
from sottovoce.plain import plain
from sottovoce_client.cli import completing
from sottovoce_client.cli.app import prepared_from, spec_app


@spec_app.command("check")
def spec_check(
    spec: Annotated[
        Path | None,
        typer.Argument(
            metavar="SPEC",
            help="The run spec, a YAML file.",
            show_default="required, but with --json-schema",
            autocompletion=completing.spec_files,
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
        from sottovoce.spec import spec_schema
        from sottovoce_client import terminal

        if spec is not None or print_:
            raise SpecError("--json-schema is of all specs: it goes with no SPEC, and not with --print")
        typer.echo(spec_schema())
        terminal.tell(lambda: json.loads(spec_schema()))
        return
    if spec is None:
        raise SpecError("spec check needs a SPEC, or --json-schema")
    if print_:
        _print(spec)
        return
    from sottovoce.data.folders import data_folders
    from sottovoce.running.policy import default_policy_caution
    from sottovoce.spec import load_spec
    from sottovoce_client import terminal
    from sottovoce_client.data.reading import graph_lines
    from sottovoce_client.wording import ALONE, plural

    prepared = prepared_from(load_spec(spec), live=True)
    warnings = [*prepared.run.warnings, *prepared.cautions, *default_policy_caution(prepared.run)]
    if not prepared.run.spec.data.live:
        from sottovoce_client.data.reading import long_rows

        warnings += long_rows(prepared.run.spec, prepared.data)
    for finding in warnings:
        typer.echo(plain(f"warning: {finding.text} [{finding.code}]"))
    if prepared.run.spec.data.schema is not None:
        from sottovoce_client.schemas import used_lines

        for line in used_lines(prepared.run.spec, prepared.run.spec.data.schema):
            typer.echo(plain(line))
    width = plural(prepared.data.n_features, "feature")
    if prepared.run.spec.data.intercept:
        width = f"{plural(prepared.data.n_features - 1, 'feature')} and an intercept"
    if not prepared.run.spec.data.live:
        from sottovoce_client.data.reading import reading_lines

        for line in reading_lines(prepared.run.spec, prepared.data, data_folders()):
            typer.echo(plain(line))
    for line in graph_lines(prepared.run.spec):
        typer.echo(plain(line))
    if prepared.run.spec.n_learners == 1 and prepared.run.algorithm.name != "dpcda":  # which is for one
        typer.echo(f"note: {ALONE}")
    but = f", but for {plural(len(warnings), 'warning')} above" if warnings else ""
    typer.echo(f"{spec}: {plural(prepared.run.spec.n_learners, 'learner')}, {width}: fine{but}")
    run, data = prepared.run, prepared.data
    terminal.tell(
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
    from sottovoce.spec import dump_spec, load_spec
    from sottovoce_client import terminal

    asked = load_spec(spec)
    typer.echo(dump_spec(asked), nl=False)
    terminal.tell(lambda: asked.model_dump(mode="json"))


@spec_app.command("values")
def spec_values(
    specs: Annotated[
        list[Path],
        typer.Argument(
            metavar="SPEC", help="The run specs, YAML files.", show_default=False, autocompletion=completing.spec_files
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
    from sottovoce.spec import load_spec
    from sottovoce_client import terminal
    from sottovoce_client.chart import as_yaml, chart_values

    values = chart_values([load_spec(spec) for spec in specs], own or (), coordinator=with_coordinator)
    typer.echo(as_yaml(values), nl=False)
    terminal.tell(lambda: values)
