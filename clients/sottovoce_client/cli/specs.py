"""Specs, and the version."""

from __future__ import annotations

import typer

from sottovoce.plain import plain
from sottovoce.spec import dump_spec, load_spec, spec_schema
from sottovoce_client.cli.app import SpecFile, app, prepared_from, spec_app


@spec_app.command("check")
def spec_check(spec: SpecFile) -> None:
    """Check a spec, its algorithm's conditions and its data, without running anything."""
    prepared = prepared_from(load_spec(spec), live=True)
    for finding in prepared.run.warnings:
        typer.echo(f"warning: {finding.text} [{finding.code}]")
    if prepared.run.spec.data.schema is not None:
        from sottovoce_client.schemas import used_lines

        for line in used_lines(prepared.run.spec, prepared.run.spec.data.schema):
            typer.echo(plain(line))
    typer.echo(f"{spec}: {prepared.run.spec.n_learners} learners, {prepared.data.n_features} features: fine")


@spec_app.command("show")
def spec_show(spec: SpecFile) -> None:
    """Print a spec with all defaults filled in."""
    typer.echo(dump_spec(load_spec(spec)), nl=False)


@spec_app.command("schema")
def spec_schema_() -> None:
    """Print the JSON schema of a run spec, for editors."""
    typer.echo(spec_schema())


@app.command(rich_help_panel="Specs")
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    typer.echo(installed("sottovoce"))
