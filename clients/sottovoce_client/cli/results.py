"""Commands for the results of runs: models and recorded traffic."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from sottovoce_client.cli.app import MAX_COUNT, app, models_app, transcript_app
from sottovoce_client.cli.common_options import NETWORK_OPTIONS, get_common_options
from sottovoce_core.errors import SpecError

LearnerName = Annotated[str, typer.Option("--learner", help="Name that the learner must have.", show_default="any")]
OwnSpec = Annotated[
    Path | None,
    typer.Option(
        "--spec",
        help="Run spec, needed if records are scaled; its records must be here. It also names classes and columns.",
    ),
]


@app.command(rich_help_panel="Runs", common_options=("as_json", "allow_imports", *NETWORK_OPTIONS))
def predict(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="Address of your learner, HOST:PORT.", show_default=False)
    ],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Records: a .csv, .parquet or .npz file. Its labels are ignored.",
            show_default=False,
        ),
    ],
    spec: OwnSpec = None,
    learner: LearnerName = "",
    out: Annotated[
        Path | None, typer.Option("--out", help="Output file, .csv or .parquet.", show_default="standard output")
    ] = None,
) -> None:
    """Predict the labels of the records in a file with your learner's model.

    The run must opt in (telemetry.predict). Also prints the privacy cost of publishing these predictions.

    Example: sottovoce predict 127.0.0.1:7401 new.csv --spec wards.yaml --out predicted.csv
    """
    from sottovoce_client.atomic_files import require_new
    from sottovoce_client.formatting import pluralize
    from sottovoce_client.live.sender import LearnerEndpoint
    from sottovoce_client.models import predicting
    from sottovoce_client.terminal import print_json
    from sottovoce_core.data.dataset import require_source_file
    from sottovoce_core.spec import load_spec

    require_source_file(file)  # before any call
    predicting.require_writable(out)
    require_new(out)
    own = None if spec is None else load_spec(spec)
    endpoint = LearnerEndpoint(address, learner, get_common_options().credentials)
    predictions = asyncio.run(predicting.predict(endpoint, file, own, imports=get_common_options().allow_imports))
    if out is not None:
        predictions.write(out)
    if get_common_options().as_json:
        print_json(
            {
                "run_id": predictions.run_id,
                "learner": predictions.learner,
                "rounds_done": predictions.rounds_done,
                "privacy": predictions.publication,
                "out": out,
                "predictions": None
                if out
                else [dict(zip(predictions.table.columns, row, strict=True)) for row in predictions.table.rows()],
            }
        )
        return
    if out is None:
        predictions.write(None)
    records, rounds = pluralize(len(predictions.table), "record"), pluralize(predictions.rounds_done, "round")
    text = f"{records}, by the model of {predictions.learner} after {rounds} of {predictions.run_id}{f': {out}' if out else ''}"
    print(f"{text}\nto publish them: {predictions.publication.text}", file=sys.stderr)


@models_app.command("export", common_options=("as_json", "allow_imports", *NETWORK_OPTIONS))
def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS|FOLDER",
            help="Address of your learner, HOST:PORT; or the output folder of `sottovoce simulate`.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Output file, .npz or .onnx.", show_default=False)],
    spec: OwnSpec = None,
    learner: LearnerName = "",
    replica: Annotated[int, typer.Option(min=0, max=MAX_COUNT, help="Of a simulation: index of the replica.")] = 0,
    unprotected: Annotated[
        bool,
        typer.Option("--unprotected", help="Write the model even if no epsilon covers it: it may reveal records."),
    ] = False,
) -> None:
    """Write a learner's linear model to a file, with its columns, scaling, classes, and the privacy cost of publishing it.

    A model that leaves its owner is a publication. If it follows from messages that were charged, it costs nothing more. If no
    epsilon covers it, it is refused. The run must opt in (telemetry.predict). Files of .onnx need the optional dependency onnx.

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
            raise SpecError(f"the source must be a learner's HOST:PORT, or an existing folder, got {source!r}")
        own = None if spec is None else load_spec(spec)
        endpoint = LearnerEndpoint(source, learner, get_common_options().credentials)
        model = asyncio.run(exporting.fetch_learner_model(endpoint, own, imports=get_common_options().allow_imports))
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
        str, typer.Option(metavar="LEARNER", help="Learner whose first messages are shown: a name, or an index.")
    ] = "0",
    first: Annotated[int, typer.Option(min=0, max=MAX_COUNT, help="Number of messages shown.")] = 3,
) -> None:
    """Show senders, rounds, amounts, gaps, first messages, and detections of events that must never happen."""
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
    """Query messages in SQL. Tables: messages (raw records) and broadcasts (run, world, replica, round, sender, field, value).

    A query can read these tables alone: no file, no network.
    """
    from sottovoce_client.transcripts.query import query

    query(folder, sql, out=out, csv_file=sys.stdout if as_csv else None)


@transcript_app.command("verify")
def verify_transcript(
    capture: Annotated[str, typer.Argument(metavar="CAPTURE", help="Folder or URL of a capture.", show_default=False)],
    ca: Annotated[
        Path,
        typer.Option("--ca", metavar="FILE", help="Trusted authorities: ca.crt of any identity.", show_default=False),
    ],
) -> None:
    """Verify the signatures of a capture's messages, and detect a learner that signed two versions.

    Exit code 1: two versions, or a wrong signature. 3: signatures are missing, of some rounds or of all.
    """
    from sottovoce_client.transcripts.verify import verify

    raise typer.Exit(verify(capture, ca))
