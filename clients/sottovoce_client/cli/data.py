"""Data sets that have a name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sottovoce.errors import SpecError
from sottovoce_client.cli import completing
from sottovoce_client.cli.app import address, data_app


@data_app.command("list")
def list_() -> None:
    """Show every data set that has a name: what is in it, its licence, and whether it is on this machine."""
    from sottovoce.data.folders import data_folders
    from sottovoce_client import terminal
    from sottovoce_client.data.catalogue import show

    show(data_folders(), terminal.console())


def _place(elsewhere: str, what: str) -> None:
    if elsewhere:  # what comes with it is large, and Tab waits for this
        from sottovoce_client.data.fetch import require_place

        require_place(elsewhere, what)


@data_app.command("fetch")
def fetch(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            help="As `sottovoce data list` shows them.",
            show_default=False,
            autocompletion=completing.data_sets,
        ),
    ],
    folder: Annotated[
        Path | None, typer.Option(help="Where to put them.", show_default="$SOTTOVOCE_DATA, else your cache")
    ] = None,
    elsewhere: Annotated[
        str,
        address(
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

    from sottovoce.data.folders import data_folders, find
    from sottovoce_client import terminal
    from sottovoce_client.data.catalogue import known
    from sottovoce_client.data.fetch import fetch as bring

    told: list[dict[str, Any]] = []
    sources, console = [known(name) for name in dict.fromkeys(names)], terminal.console()
    folders = (folder,) if folder else data_folders()
    if not folders:
        raise SpecError("there is no folder to put data sets in: give one with --folder, or set SOTTOVOCE_DATA to one")
    for source in sources:
        if not source.originals:
            whose = "it is made when it is asked for" if source.made else "scikit-learn ships it"
            console.print(f"{source.name}: {whose}, there is nothing to fetch")
            told.append({"name": source.name, "path": None, "came": []})
            continue
        if (path := find(source.name, folders)) is not None:
            console.print(Text(f"{source.name}: here already, {path}"))
            told.append({"name": source.name, "path": path, "came": []})
            continue
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            done = bring(source, folders[0], progress, elsewhere=elsewhere)
        for each in done.came:
            checked = "as published" if each.known else "no checksum of it is known: compare it with a copy you trust"
            console.print(Text(f"{each.name}: {each.digest}, {checked}"))
        console.print(Text(f"{source.name}: {done.path} (licence: {source.licence})"))
        told.append({"name": source.name, "path": done.path, "came": done.came})
    terminal.tell(lambda: told)


@data_app.command("describe")
def describe(
    source: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE",
            help="A name; a .npz, .csv or .parquet file of your own; or a schema, a .yaml file.",
            show_default=False,
            autocompletion=completing.data_sets,
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
        from sottovoce.spec import load_schema, load_spec
        from sottovoce_client import schemas

        if label is not None:
            raise SpecError("a schema names its label: --label goes without one")
        records = None if own == Path(source) else Path(source)
        fits = schemas.check(load_schema(own), records, None if spec is None else load_spec(spec))
        raise typer.Exit(0 if fits else 1)
    if spec is not None:
        raise SpecError("--spec is held against a schema: give --schema, too")
    from sottovoce.data.folders import data_folders
    from sottovoce_client import terminal
    from sottovoce_client.data.describe import describe as show

    show(source, data_folders(), terminal.console(), label)
