"""The first command of a user with records: a spec for them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from sottovoce.errors import SpecError
from sottovoce.plain import plain
from sottovoce_client.cli.app import MOST, app, real
from sottovoce_client.cli.common_options import common


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
    delta: Annotated[
        float | None, real(least=0.0, most=1.0, help="The promise is pure: it holds at any delta.", show_default="0")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=2, max=MOST, help="At most so many.", show_default="6")] = None,
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
        from sottovoce_client import schemas

        spec_options: dict[str, object] = {
            "--task": task,
            "--positive": positive,
            "--label-bound": label_bound,
            "--schema": schema,
        }
        spec_options |= {"--learners": learners, "--partition": partition, "--scale": scale, "--epsilon": epsilon}
        spec_options |= {"--delta": delta, "--rounds": rounds, "--name": name}
        if given := [option for option, value in spec_options.items() if value is not None]:
            raise SpecError(f"--schema-only drafts a schema and no spec: it goes without {', '.join(given)}")
        schemas.infer(file, label, out)
        return
    from sottovoce_client.documents import new_file, require_new
    from sottovoce_client.starting import Wishes, begin, next_commands
    from sottovoce_client.terminal import print_json
    from sottovoce_client.wording import plural

    asks = sys.stdin.isatty() and not common().as_json
    wishes = Wishes(
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
    replaces = asks and path.exists() and typer.confirm(f"replace {path}?", err=True)
    if not replaces:
        require_new(path)
    begun = begin(wishes, path.parent, _ask if asks else None, _say if asks else _unheard)
    if replaces:
        path.unlink()  # it was asked for; what comes in its place is ready
    with new_file(path) as written:
        written.write(begun.text.encode())
    spec = begun.spec
    if common().as_json:
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
    size = f"{plural(spec.n_learners, 'learner')}, {plural(spec.rounds, 'round')}"
    typer.echo(f"{path}: {spec.algorithm.name}, {size}; epsilon {begun.epsilon:.4g} per record")
    if begun.left and spec.data.batch_size != "all":
        typer.echo(
            f"note: of a learner's records up to {begun.left:,} are not learned: all batches are full (batch_size)"
        )
    for note in begun.notes:
        typer.echo(plain(f"note: {note}"))
    typer.echo("next:")
    for command in next_commands(str(path)):
        typer.echo(f"  {command}")


def _ask(question: str, usual: str) -> str:
    return str(typer.prompt(question, default=usual or None, err=True))


def _say(text: str) -> None:
    typer.echo(plain(text), err=True)


def _unheard(text: str) -> None:
    """Nobody is there to be told."""
