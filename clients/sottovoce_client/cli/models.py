"""What an owner does with its learner's model."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from sottovoce.errors import SpecError
from sottovoce_client.cli.app import MOST, app, models_app
from sottovoce_client.cli.common_options import NETWORK, common

LearnerName = Annotated[
    str, typer.Option("--learner", help="Of the learner, which it must have.", show_default="whoever is there")
]
OwnSpec = Annotated[
    Path | None,
    typer.Option(
        "--spec", help="The run's spec, whose records are here: where they are scaled, and to name classes and columns."
    ),
]


@app.command(rich_help_panel="Runs", uses=("as_json", "allow_imports", *NETWORK))
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
    from sottovoce.spec import load_spec
    from sottovoce_client.documents import require_new
    from sottovoce_client.live.sending import At
    from sottovoce_client.models import inputs, predicting
    from sottovoce_client.terminal import print_json
    from sottovoce_client.wording import plural

    inputs.require_file(file)  # before anybody is asked
    predicting.require_writable(out)
    require_new(out)
    own = None if spec is None else load_spec(spec)
    at = At(address, learner, common().credentials)
    found = asyncio.run(predicting.predict(at, file, own, imports=common().allow_imports))
    if out is not None:
        predicting.write(found.table, out)
    if common().as_json:
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
        predicting.write(found.table, None)
    many, rounds = plural(len(found.table), "record"), plural(found.rounds_done, "round")
    whose = f"{many}, by the model of {found.learner} after {rounds} of {found.run_id}{f': {out}' if out else ''}"
    print(f"{whose}\nto hand them out: {found.publication.text}", file=sys.stderr)


@models_app.command("export", uses=("as_json", "allow_imports", *NETWORK))
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
    replica: Annotated[int, typer.Option(min=0, max=MOST, help="Of a simulation: which repetition.")] = 0,
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
    from sottovoce.spec import load_spec
    from sottovoce_client import terminal
    from sottovoce_client.documents import require_new
    from sottovoce_client.live.sending import At
    from sottovoce_client.models import exporting

    exporting.require_writable(out)
    require_new(out)
    if Path(source).is_dir():
        model = exporting.of_simulation(Path(source), learner or None, replica)
    else:
        if ":" not in source:
            raise SpecError(f"a model is a learner's, at HOST:PORT, or in a folder that exists, got {source!r}")
        own = None if spec is None else load_spec(spec)
        at = At(source, learner, common().credentials)
        model = asyncio.run(exporting.of_learner(at, own, imports=common().allow_imports))
    exporting.require_covered(model, unprotected)
    exporting.write(model, out)
    if common().as_json:
        terminal.print_json({"out": out, **model.about})
        return
    table = terminal.facts()
    for name, text in {**exporting.facts(model), "written": str(out)}.items():
        table.add_row(name, text)
    terminal.console().print(table)
