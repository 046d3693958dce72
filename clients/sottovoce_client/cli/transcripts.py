"""What was overheard, or simulated."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sottovoce_client.cli.app import MOST, transcript_app

Overheard = Annotated[
    str,
    typer.Argument(
        metavar="FOLDER",
        help="A capture, a folder with captures or runs, or a .parquet file; also a URL.",
        show_default=False,
    ),
]


@transcript_app.command("show")
def transcript_show(
    folder: Overheard,
    sender: Annotated[
        str, typer.Option(metavar="LEARNER", help="Whose first messages to show: a name, or an index.")
    ] = "0",
    first: Annotated[int, typer.Option(min=0, max=MOST, help="How many of them.")] = 3,
) -> None:
    """Who spoke when, how much, what is missing, what was said first, and what was noticed that must never happen."""
    from sottovoce_client.transcripts.show import show

    show(folder, sender=sender, first=first)


@transcript_app.command("query")
def transcript_query(
    folder: Overheard,
    sql: Annotated[str, typer.Argument(metavar="SQL", help="One SELECT statement.", show_default=False)],
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all rows as CSV.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.parquet", help="Write all rows to this file.")
    ] = None,
) -> None:
    """Ask in SQL. Tables: messages (the raw records) and said (run, world, replica, round, sender, field, value).

    A query sees these tables and nothing else: no file, no network.
    """
    from sottovoce_client.transcripts.query import query

    query(folder, sql, out=out, as_csv=sys.stdout if as_csv else None)


@transcript_app.command("verify")
def transcript_verify(
    capture: Annotated[str, typer.Argument(metavar="CAPTURE", help="Folder or URL of a capture.", show_default=False)],
    ca: Annotated[
        Path,
        typer.Option(
            "--ca", metavar="FILE", help="Authorities that are believed: ca.crt of any identity.", show_default=False
        ),
    ],
) -> None:
    """What of a capture its learners have signed, and whether one has said two things.

    Exit code 1: one has, or a signature is wrong. 3: signatures are missing, of some rounds or of all.
    """
    from sottovoce_client.transcripts.verify import verify

    raise typer.Exit(verify(capture, ca))
