"""The command `feed`: from files that grow, standard input, HTTP and brokers into a learner."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sottovoce.errors import SpecError
from sottovoce_client.cli.app import (
    MOST_SECONDS,
    AllowImports,
    AsJson,
    IdentityFolder,
    Insecure,
    LogLevel,
    address,
    app,
    real,
)

if TYPE_CHECKING:
    from sottovoce_client.feeding.broker import Feed, Source
    from sottovoce_client.feeding.progress import Work
    from sottovoce_client.feeding.pump import Target, Terms

_FORMATS = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_OWN_OPTIONS = {
    "csv": ("--format", "--delimiter", "--follow", "--dead-letters"),
    "jsonl": ("--format", "--follow", "--dead-letters"),
    "parquet": ("--format", "--dead-letters"),
    "-": ("--format", "--delimiter", "--position", "--dead-letters"),
    "http": ("--position", "--token-file", "--tls-cert", "--tls-key"),
    "broker": (
        *("--dead-letters", "--broker-patience", "--user", "--password-file", "--tls-ca", "--tls-cert", "--tls-key"),
    ),
}
"""Options that only some sources have, by the kind of source."""


def _feeds() -> list[Feed]:
    """All kinds of sources that URLs name."""
    from sottovoce_client.feeding.broker import feeds
    from sottovoce_client.feeding.sinks import HTTP

    return [HTTP, *feeds()]


def _feed_of(scheme: str, what: str) -> Feed:
    """The feed whose URLs begin with a scheme."""
    known = {each: feed for feed in _feeds() for each in feed.schemes}
    if scheme.lower() not in known:
        raise SpecError(f"{what} must be one of {', '.join(known)}, got {scheme!r}")
    return known[scheme.lower()]


def _help_for(scheme: str | None) -> None:
    if scheme is not None:
        feed = _feed_of(scheme, "--help-for")
        kind, position = "broker" if feed.connect else "http", ("--position",) * feed.has_positions
        options = ", ".join(dict.fromkeys((*_OWN_OPTIONS[kind], *position)))
        print(f"{feed.help_text()}\n\nOptions that this source has beside those of all: {options}")
        raise typer.Exit


@app.command("feed", rich_help_panel="Runs")
def feed(
    context: typer.Context,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Files (.csv, .jsonl, .parquet), each a source by its name; - for standard input; or a URL: http://HOST:PORT "
            "listens, nats://, redis://, mqtt:// and kafka:// read from a broker.",
            show_default=False,
        ),
    ],
    learner: Annotated[
        str,
        address(
            "--learner",
            "-l",
            metavar="HOST:PORT",
            envvar="SOTTOVOCE_LEARNER",
            help="Address of the learner.",
            show_default=False,
        ),
    ],
    help_for: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEME",
            is_eager=True,
            callback=_help_for,
            help="Print the settings of URLs of one kind, as kafka or http, with examples.",
            show_default=False,
        ),
    ] = None,
    format_: Annotated[
        Literal["csv", "jsonl", "parquet"] | None,
        typer.Option(
            "--format", help="Format of records.", show_default="by the file's ending; jsonl of standard input"
        ),
    ] = None,
    delimiter: Annotated[str, typer.Option(help="Between values of CSV.")] = ",",
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for more at the end of a CSV or JSON lines file.")
    ] = False,
    position: Annotated[
        str,
        typer.Option(
            metavar="FIELD",
            help="Field with a record's position, a whole number that rises: what is sent again is then learned once. Of "
            "standard input, HTTP and MQTT.",
            show_default="counted on",
        ),
    ] = "",
    source: Annotated[
        str,
        typer.Option(
            envvar="SOTTOVOCE_SOURCE",
            help="Name under which the learner counts the records: what is fed under one name must be the same, or go on.",
            show_default="the name of the file, stream or topic",
        ),
    ] = "",
    map_: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="FIELD=PATH",
            help="Where a field of a record is found, as age=patient.age; repeat for several.",
            show_default="by its own name",
        ),
    ] = None,
    ignore_unknown: Annotated[
        bool,
        typer.Option(
            "--ignore-unknown",
            help="Leave out fields that neither the schema nor a map knows, in place of refusing the message.",
        ),
    ] = False,
    dead_letters: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File for messages that are no records, as JSON lines. Not of HTTP, which answers its client.",
            show_default="dropped, and counted",
        ),
    ] = None,
    patience: Annotated[
        float,
        real(
            least=0.0,
            most=MOST_SECONDS,
            metavar="SECONDS",
            help="How long the learner may be away, or between two runs.",
        ),
    ] = 60.0,
    broker_patience: Annotated[
        float, real(least=0.0, most=MOST_SECONDS, metavar="SECONDS", help="How long the broker may be away.")
    ] = 60.0,
    user: Annotated[
        str,
        typer.Option(
            envvar="SOTTOVOCE_FEED_USER",
            help="User that the broker knows. The password is in --password-file, or in $SOTTOVOCE_FEED_PASSWORD.",
            show_default="none",
        ),
    ] = "",
    password_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the user's password.", show_default=False)
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the bearer token that every HTTP request must have.",
            show_default="this machine's user alone",
        ),
    ] = None,
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Authorities that are believed of a broker.", show_default="those of this machine"
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="PEM certificate, shown to the broker or HTTP's clients.", show_default=False
        ),
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key.", show_default=False)] = None,
    name: Annotated[
        str, typer.Option(help="Name of the learner: another one at the address is refused.", show_default="any")
    ] = "",
    identity: IdentityFolder = None,
    insecure: Insecure = False,
    allow_imports: AllowImports = False,
    log_level: LogLevel = "info",
    as_json: AsJson = False,
) -> None:
    """Bring live records into a learner, each once. `--help-for kafka` prints the settings of one kind of URL."""
    from sottovoce_client.feeding.broker import PASSWORD_VARIABLE, Access, opened, secret_in
    from sottovoce_client.feeding.progress import conduct
    from sottovoce_client.feeding.pump import Target, Terms, feeding

    scheme = _scheme_of(sources)
    url_feed = _feed_of(scheme, "SOURCE: the scheme of a URL") if scheme else None
    is_http = url_feed is not None and url_feed.connect is None
    kind = _format_of(sources, format_) if url_feed is None else "http" if is_http else "broker"
    own_kind = "-" if sources == ["-"] else kind
    _require_fitting(context, own_kind, url_feed)
    terms = Terms(tuple(map_ or ()), ignore_unknown, position, dead_letters)
    if url_feed is None:
        default = "stdin" if own_kind == "-" else ""
        prefix = "" if own_kind == "-" else source
        target = Target(learner, prefix, name, identity, insecure, patience, allow_imports)
        work = _file_work(sources, kind, delimiter, follow, source or default, target, terms)
    elif is_http:
        target = Target(
            learner, source or "http", name, identity, insecure and identity is None, patience, allow_imports
        )
        work = _http_work(url_feed.source(sources[0]), target, terms, token_file, tls_cert, tls_key, insecure)
    else:
        password = os.environ.get(PASSWORD_VARIABLE, "") if password_file is None else secret_in(password_file)
        at = url_feed.source(
            sources[0],
            access=Access(user, password, tls_ca, tls_cert, tls_key),
            default_group=name or learner,
            position=position,
            patience_s=broker_patience,
        )
        target = Target(learner, source, name, identity, insecure, patience, allow_imports)
        work = feeding(opened(at), target, terms)
    raise typer.Exit(conduct(work, log_level))


def _scheme_of(sources: Sequence[str]) -> str:
    """The scheme of the URL; empty: the sources are files, or standard input.

    Raises:
        SpecError: there are several sources, and not all are files.
    """
    urls = [each for each in sources if "://" in each.partition("?")[0]]
    if len(sources) > 1 and (urls or "-" in sources):
        raise SpecError(
            f"SOURCE must be files, or one URL, or - alone, got {' '.join(sources)}: start a feeder for each"
        )
    return urls[0].partition("://")[0] if urls else ""


def _format_of(sources: Sequence[str], given: str | None) -> str:
    """The format of files.

    Raises:
        SpecError: their endings do not say it, or say several.
    """
    if sources == ["-"]:
        if given == "parquet":
            raise SpecError("--format of standard input must be csv or jsonl, got parquet: write it to a file first")
        return given or "jsonl"
    found = {given or _FORMATS.get(Path(each).suffix.lower(), "") for each in sources}
    if "" in found:
        unknown = next(each for each in sources if Path(each).suffix.lower() not in _FORMATS)
        raise SpecError(f"SOURCE must end in one of {', '.join(_FORMATS)}, got {unknown!r}: say its format by --format")
    if len(found) > 1:
        raise SpecError(
            f"SOURCE must be files of one format, got {' and '.join(sorted(found))}: start a feeder for each"
        )
    return found.pop()


def _require_fitting(context: typer.Context, kind: str, url_feed: Feed | None) -> None:
    """Refuse options that were given on the command line and that the kind of source does not have.

    Raises:
        SpecError: there is one.
    """
    own = {*_OWN_OPTIONS[kind], *(("--position",) if url_feed is not None and url_feed.has_positions else ())}
    some = {option for options in _OWN_OPTIONS.values() for option in options}
    for parameter in context.command.params:
        option = parameter.opts[0]
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE" and option in some - own:
            called = "standard input" if kind == "-" else url_feed.name if url_feed is not None else kind
            raise SpecError(
                f"{option} must be left out: a source of {called} does not have it. It has {', '.join(sorted(own))}"
            )


def _file_work(
    sources: Sequence[str], kind: str, delimiter: str, follow: bool, name: str, target: Target, terms: Terms
) -> Work:
    """Feeding files, or standard input."""
    from sottovoce_client.feeding.files import csv_files, jsonl_files, parquet_files, require_files
    from sottovoce_client.feeding.forms import Csv, JsonLines, StandardInput
    from sottovoce_client.feeding.pump import feeding

    if list(sources) == ["-"]:
        form = Csv(delimiter) if kind == "csv" else JsonLines()
        return feeding(nullcontext([StandardInput(name, form, terms.position)]), target, terms)
    paths = [Path(each) for each in sources]
    require_files(paths, terms.dead_letters)
    if kind == "csv":
        parts = csv_files(paths, delimiter=delimiter, follow=follow)
    else:
        parts = jsonl_files(paths, follow=follow) if kind == "jsonl" else parquet_files(paths)
    return feeding(nullcontext(parts), target, terms)


def _http_work(
    at: Source,
    target: Target,
    terms: Terms,
    token_file: Path | None,
    certificate: Path | None,
    key: Path | None,
    insecure: bool,
) -> Work:
    """Answering requests."""
    for module in at.feed.modules:
        at.feed.imported(module)
    from sottovoce_client import terminal
    from sottovoce_client.feeding.endpoint import Listening, serve
    from sottovoce_rpc.server import announce

    if (certificate is not None) != (at.scheme == "https"):
        raise SpecError(f"https:// needs --tls-cert and --tls-key, and http:// has neither, got {at.scheme}://")
    listening = Listening(at.addresses[0], token_file, certificate, key, insecure, at.settings["max-bytes"])
    console = terminal.console()

    def tell(address: str) -> None:
        if console.is_terminal:
            console.print(f"POST records to {address}")
        else:
            announce("feeder", address=address)

    return serve(target, terms, listening, at.settings["when-full"], tell)
