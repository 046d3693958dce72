"""What runs leave: models and recorded traffic."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from sottovoce_client.cli.app import MAX_COUNT, app, models_app, transcript_app
from sottovoce_client.cli.common_options import NETWORK_OPTIONS, get_common_options
from sottovoce_core.errors import SpecError

LearnerName = Annotated[
    str, typer.Option("--learner", help="Of the learner, which it must have.", show_default="whoever is there")
]
OwnSpec = Annotated[
    Path | None,
    typer.Option(
        "--spec", help="The run's spec, whose records are here: where they are scaled, and to name classes and columns."
    ),
]


@app.command(rich_help_panel="Runs", common_options=("as_json", "allow_imports", *NETWORK_OPTIONS))
def predict(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="Of your learner, HOST:PORT.", show_default=False)],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Records: a .csv, .parquet or .npz file. Labels in it are not looked at.",
            show_default=False,
        ),
    ],
    spec: OwnSpec = None,
    learner: LearnerName = "",
    out: Annotated[
        Path | None, typer.Option("--out", help="A .csv or .parquet file to write.", show_default="standard output")
    ] = None,
) -> None:
    """What your learner's model says of the records of a file.

    Its run opted in to that (telemetry.predict). What it costs to hand these predictions to others is said, too.

    Example: sottovoce predict 127.0.0.1:7401 new.csv --spec wards.yaml --out said.csv
    """
    from sottovoce_client.atomic_files import require_new
    from sottovoce_client.formatting import pluralize
    from sottovoce_client.live.sender import LearnerEndpoint
    from sottovoce_client.models import predicting
    from sottovoce_client.terminal import print_json
    from sottovoce_core.data.dataset import require_source_file
    from sottovoce_core.spec import load_spec

    require_source_file(file)  # before anybody is asked
    predicting.require_writable(out)
    require_new(out)
    own = None if spec is None else load_spec(spec)
    at = LearnerEndpoint(address, learner, get_common_options().credentials)
    found = asyncio.run(predicting.predict(at, file, own, imports=get_common_options().allow_imports))
    if out is not None:
        found.write(out)
    if get_common_options().as_json:
        print_json(
            {
                "run": found.run_id,
                "learner": found.learner,
                "rounds_done": found.rounds_done,
                "privacy": found.publication,
                "out": out,
                "predictions": None
                if out
                else [dict(zip(found.table.columns, row, strict=True)) for row in found.table.rows()],
            }
        )
        return
    if out is None:
        found.write(None)
    many, rounds = pluralize(len(found.table), "record"), pluralize(found.rounds_done, "round")
    whose = f"{many}, by the model of {found.learner} after {rounds} of {found.run_id}{f': {out}' if out else ''}"
    print(f"{whose}\nto hand them out: {found.publication.text}", file=sys.stderr)


@models_app.command("export", common_options=("as_json", "allow_imports", *NETWORK_OPTIONS))
def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS|FOLDER",
            help="Of your learner, HOST:PORT; or what `sottovoce simulate` wrote.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="A .npz or .onnx file to write.", show_default=False)],
    spec: OwnSpec = None,
    learner: LearnerName = "",
    replica: Annotated[int, typer.Option(min=0, max=MAX_COUNT, help="Of a simulation: which repetition.")] = 0,
    unprotected: Annotated[
        bool,
        typer.Option(
            "--unprotected", help="Write it, too, where no epsilon covers it: whoever has it may learn of records."
        ),
    ] = False,
) -> None:
    """Write a learner's linear model to a file, with its columns, scaling, classes, and what handing it out costs.

    A model that leaves its owner is a publication. Where it follows from messages that were charged, it costs nothing more. Where
    no epsilon covers it, it is refused. The learner's run opted in to telemetry.predict. Files of .onnx need the extra onnx.

    Example: sottovoce models export 127.0.0.1:7401 --spec wards.yaml --out north.npz
    """
    from sottovoce_client import terminal
    from sottovoce_client.atomic_files import require_new
    from sottovoce_client.live.sender import LearnerEndpoint
    from sottovoce_client.models import exporting
    from sottovoce_core.spec import load_spec

    exporting.require_writable(out)
    require_new(out)
    if Path(source).is_dir():
        model = exporting.load_simulated_model(Path(source), learner or None, replica)
    else:
        if ":" not in source:
            raise SpecError(f"a model is a learner's, at HOST:PORT, or in a folder that exists, got {source!r}")
        own = None if spec is None else load_spec(spec)
        at = LearnerEndpoint(source, learner, get_common_options().credentials)
        model = asyncio.run(exporting.fetch_learner_model(at, own, imports=get_common_options().allow_imports))
    if not unprotected:
        model.require_protected()
    model.write(out)
    if get_common_options().as_json:
        terminal.print_json({"out": out, **model.metadata})
        return
    table = terminal.create_fact_grid()
    for name, text in {**model.facts, "written": str(out)}.items():
        table.add_row(name, text)
    terminal.create_console().print(table)


CaptureArgument = Annotated[
    str,
    typer.Argument(
        metavar="FOLDER",
        help="A capture, a folder with captures or runs, or a .parquet file; also a URL.",
        show_default=False,
    ),
]


@transcript_app.command("show")
def show_transcript(
    folder: CaptureArgument,
    sender: Annotated[
        str, typer.Option(metavar="LEARNER", help="Whose first messages to show: a name, or an index.")
    ] = "0",
    first: Annotated[int, typer.Option(min=0, max=MAX_COUNT, help="How many of them.")] = 3,
) -> None:
    """Who spoke when, how much, what is missing, what was said first, and what was noticed that must never happen."""
    from sottovoce_client.transcripts.show import show

    show(folder, sender=sender, max_messages=first)


@transcript_app.command("query")
def query_transcript(
    folder: CaptureArgument,
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

    query(folder, sql, out=out, csv_file=sys.stdout if as_csv else None)


@transcript_app.command("verify")
def verify_transcript(
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
