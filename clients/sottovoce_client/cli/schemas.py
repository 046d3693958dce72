"""Schemas of records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sottovoce_client.cli.app import AsJson, schema_app


@schema_app.command("infer")
def infer(
    sample: Annotated[
        Path, typer.Argument(metavar="FILE", help="Public records: a .csv or .parquet file.", show_default=False)
    ],
    label: Annotated[
        str | None, typer.Option(help="Its label column.", show_default="label, else y, else the last one")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write the schema to.", show_default="standard output")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draft a schema from a sample that is public: bounds and categories are read off it, and everybody will see them.

    Never draft from records that are to be protected. Put what is possible in place of what was seen.
    """
    from sottovoce_client.data import schemas

    schemas.infer(sample, label, out)


@schema_app.command("check")
def check(
    schema: Annotated[Path, typer.Argument(metavar="SCHEMA", help="The schema, a YAML file.", show_default=False)],
    records: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Records of your own: a .csv or .parquet file.", show_default=False),
    ] = None,
    spec: Annotated[
        Path | None, typer.Option(help="A run spec whose loss the label must suit.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a schema says; and how many records of a file fit it, and why the others do not. Exits with 1 if any does not.

    Counts of your own records are figures of them: nothing protects them.
    """
    from sottovoce.spec import load_schema, load_spec
    from sottovoce_client.data import schemas

    fits = schemas.check(load_schema(schema), records, None if spec is None else load_spec(spec))
    raise typer.Exit(0 if fits else 1)
