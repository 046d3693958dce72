"""Feeders: from files that grow, standard input and HTTP into a learner."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sottovoce_client.cli.app import (
    MOST_SECONDS,
    Listen,
    address,
    feed_app,
    real,
)
from sottovoce_client.cli.common_options import NETWORK, common

if TYPE_CHECKING:
    from sottovoce_client.feeding.pump import Target, Terms
    from sottovoce_client.feeding.source import Part

Learner = Annotated[
    str,
    address(
        "--learner",
        "-l",
        metavar="HOST:PORT",
        envvar="SOTTOVOCE_LEARNER",
        help="Address of the learner.",
        show_default=False,
    ),
]
Name = Annotated[
    str, typer.Option("--name", help="Of the learner: another one at the address is refused.", show_default="any")
]
Source = Annotated[
    str,
    typer.Option(
        "--source",
        envvar="SOTTOVOCE_SOURCE",
        help="Under which the learner counts the records: what is fed under one name must be the same, or go on.",
        show_default="as what is fed is called",
    ),
]
Map = Annotated[
    list[str] | None,
    typer.Option(
        "--map",
        metavar="FIELD=PATH",
        help="Where a field stands, as age=patient.age; repeat for several.",
        show_default="by its own name",
    ),
]
IgnoreUnknown = Annotated[
    bool,
    typer.Option(
        "--ignore-unknown",
        help="Leave out fields that neither the schema nor a map knows, in place of refusing the message.",
    ),
]
DeadLetters = Annotated[
    Path | None,
    typer.Option(
        "--dead-letters",
        metavar="FILE",
        help="Where messages go that are no records, as JSON lines.",
        show_default="dropped, and counted",
    ),
]
Patience = Annotated[
    float,
    real(
        least=0.0, most=MOST_SECONDS, metavar="SECONDS", help="How long the learner may be away, or between two runs."
    ),
]
Position = Annotated[
    str,
    typer.Option(
        "--position",
        metavar="FIELD",
        help="Field that says where a record stands: a whole number that rises. What is sent again is then learned once.",
        show_default="counted on",
    ),
]
Follow = Annotated[bool, typer.Option("--follow", help="Wait for more at a file's end.")]
Delimiter = Annotated[str, typer.Option(help="Between values of CSV.")]
Files = Annotated[
    list[Path], typer.Argument(metavar="FILE...", help="Each is a source by its name.", show_default=False)
]


@feed_app.command("csv", uses=("as_json", "allow_imports", "log_level", *NETWORK))
def csv(
    files: Files,
    learner: Learner,
    delimiter: Delimiter = ",",
    follow: Follow = False,
    source: Source = "",
    map_: Map = None,
    ignore_unknown: IgnoreUnknown = False,
    dead_letters: DeadLetters = None,
    patience: Patience = 60.0,
    name: Name = "",
) -> None:
    """Feed CSV files with a header, each record once."""
    from sottovoce_client.feeding.files import csv_files, require_files

    require_files(files, dead_letters)
    target = target_of(learner, source, name, common().identity, common().insecure, patience, common().allow_imports)
    feed_from(
        nullcontext(csv_files(files, delimiter=delimiter, follow=follow)),
        target,
        terms_of(map_, ignore_unknown, dead_letters),
        _log_level(),
    )


@feed_app.command("jsonl", uses=("as_json", "allow_imports", "log_level", *NETWORK))
def jsonl(
    files: Files,
    learner: Learner,
    follow: Follow = False,
    source: Source = "",
    map_: Map = None,
    ignore_unknown: IgnoreUnknown = False,
    dead_letters: DeadLetters = None,
    patience: Patience = 60.0,
    name: Name = "",
) -> None:
    """Feed files with a JSON object on each line, each record once."""
    from sottovoce_client.feeding.files import jsonl_files, require_files

    require_files(files, dead_letters)
    target = target_of(learner, source, name, common().identity, common().insecure, patience, common().allow_imports)
    feed_from(
        nullcontext(jsonl_files(files, follow=follow)),
        target,
        terms_of(map_, ignore_unknown, dead_letters),
        _log_level(),
    )


@feed_app.command("parquet", uses=("as_json", "allow_imports", "log_level", *NETWORK))
def parquet(
    files: Files,
    learner: Learner,
    source: Source = "",
    map_: Map = None,
    ignore_unknown: IgnoreUnknown = False,
    dead_letters: DeadLetters = None,
    patience: Patience = 60.0,
    name: Name = "",
) -> None:
    """Feed Parquet files, each record once (extra `audit`)."""
    from sottovoce_client.feeding.files import require_files
    from sottovoce_client.feeding.parquet import parquet_files

    require_files(files, dead_letters)
    target = target_of(learner, source, name, common().identity, common().insecure, patience, common().allow_imports)
    terms = terms_of(map_, ignore_unknown, dead_letters)
    feed_from(nullcontext(parquet_files(files)), target, terms, _log_level())


@feed_app.command("stdin", uses=("as_json", "allow_imports", "log_level", *NETWORK))
def stdin(
    learner: Learner,
    form: Annotated[Literal["jsonl", "csv"], typer.Option("--form", help="How records are written.")] = "jsonl",
    delimiter: Delimiter = ",",
    position: Position = "",
    source: Source = "",
    map_: Map = None,
    ignore_unknown: IgnoreUnknown = False,
    dead_letters: DeadLetters = None,
    patience: Patience = 60.0,
    name: Name = "",
) -> None:
    """Feed what comes on standard input, until it ends."""
    from sottovoce_client.feeding.forms import Csv, JsonLines
    from sottovoce_client.feeding.standard_input import StandardInput

    target = target_of(learner, "", name, common().identity, common().insecure, patience, common().allow_imports)
    part = StandardInput(source or "stdin", Csv(delimiter) if form == "csv" else JsonLines(), position)
    feed_from(
        nullcontext([part]),
        target,
        terms_of(map_, ignore_unknown, dead_letters, position),
        _log_level(),
    )


@feed_app.command("http", uses=("as_json", "allow_imports", "log_level", *NETWORK))
def http(
    learner: Learner,
    listen: Listen = "127.0.0.1:7490",
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the bearer token that every request must have.", show_default="this machine's user alone"
        ),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file: clients speak TLS.", show_default=False)] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with its key.", show_default=False)] = None,
    when_full: Annotated[
        Literal["wait", "reject"],
        typer.Option("--when-full", help="Whether a request that finds no room waits, or is refused (429)."),
    ] = "wait",
    most_bytes: Annotated[int, typer.Option(min=1, max=2**31 - 1, help="Bytes of a request at most.")] = 1024 * 1024,
    position: Position = "",
    source: Source = "http",
    map_: Map = None,
    ignore_unknown: IgnoreUnknown = False,
    patience: Patience = 60.0,
    name: Name = "",
) -> None:
    """Feed what clients POST to /records, as JSON (extra `feed`). They are answered when the learner has it in keeping."""
    from sottovoce.data.files import import_extra

    for module in ("starlette", "uvicorn"):
        import_extra(module, module, "sottovoce feed http", "feed")
    from sottovoce_client import terminal
    from sottovoce_client.feeding.conduct import conduct
    from sottovoce_client.feeding.endpoint import Listening, serve
    from sottovoce_rpc.server import announce

    listening = Listening(listen, token_file, tls_cert, tls_key, common().insecure, most_bytes)
    target = target_of(
        learner,
        source,
        name,
        common().identity,
        common().insecure and common().identity is None,
        patience,
        common().allow_imports,
    )
    console = terminal.console()

    def tell(address: str) -> None:
        if console.is_terminal:
            console.print(f"POST records to {address}")
        else:
            announce("feeder", address=address)

    work = serve(target, terms_of(map_, ignore_unknown, None, position), listening, when_full, tell)
    raise typer.Exit(conduct(work, _log_level()))


def _log_level() -> str:
    return common().log_level or "info"


def target_of(
    learner: str,
    source: str,
    name: str,
    identity: Path | None,
    insecure: bool,
    patience_s: float,
    allow_imports: bool,
) -> Target:
    """The learner that options name."""
    from sottovoce_client.feeding.pump import Target

    return Target(learner, source, name, identity, insecure, patience_s, allow_imports)


def terms_of(maps: list[str] | None, ignore_unknown: bool, dead_letters: Path | None, position: str = "") -> Terms:
    """What options say of messages."""
    from sottovoce_client.feeding.pump import Terms

    return Terms(tuple(maps or ()), ignore_unknown, position, dead_letters)


def feed_from(
    opened: AbstractAsyncContextManager[Sequence[Part]], target: Target, terms: Terms, log_level: str
) -> None:
    """Feed, and exit as that went."""
    from sottovoce_client.feeding.conduct import conduct, feeding

    raise typer.Exit(conduct(feeding(opened, target, terms), log_level))
