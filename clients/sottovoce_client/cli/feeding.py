"""The command `feed`: from files that grow, standard input, HTTP and brokers into a learner."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sottovoce_client.cli.app import (
    MAX_DURATION_S,
    app,
    make_address_option,
    make_number_option,
)
from sottovoce_client.cli.common_options import NETWORK_OPTIONS, get_common_options
from sottovoce_core.errors import SpecError

if TYPE_CHECKING:
    from sottovoce_client.feeding.broker import Feed, SourceConfig
    from sottovoce_client.feeding.feeder import FeedOptions, FeedTarget
    from sottovoce_client.feeding.progress import FeedTask
    from sottovoce_client.feeding.records import SourcePartition

_FILES, _BROKER = ("--format", "--dead-letters"), ("--dead-letters", "--broker-patience", "--user", "--password-file")
_OWN_OPTIONS = {
    "csv": (*_FILES, "--delimiter", "--follow"),
    "jsonl": (*_FILES, "--follow"),
    "parquet": _FILES,
    "standard input": (*_FILES, "--delimiter", "--position"),
    "HTTP": ("--token-file", "--tls-cert", "--tls-key"),
    "broker": (*_BROKER, "--tls-ca", "--tls-cert", "--tls-key"),
}
"""Options that only some sources have, by the kind of source. `--position` is one of those of some feeds, too."""
_SOME_OPTIONS = frozenset(option for options in _OWN_OPTIONS.values() for option in options)


def _file(help_: str, default: str | bool = False) -> Any:
    return typer.Option(metavar="FILE", help=help_, show_default=default)


def _patience(help_: str) -> Any:
    return make_number_option(min_value=0.0, max_value=MAX_DURATION_S, metavar="SECONDS", help=help_)


def _feed_of(scheme: str, what: str) -> Feed:
    """The feed whose URLs begin with a scheme."""
    from sottovoce_client.feeding.broker import load_feeds

    known = {each: feed for feed in load_feeds() for each in feed.schemes}
    if scheme.lower() not in known:
        raise SpecError(f"{what} must be one of {', '.join(known)}, got {scheme!r}")
    return known[scheme.lower()]


def _options_of(kind: str, feed: Feed | None) -> list[str]:
    """Options that a source has beside those of all."""
    return [*_OWN_OPTIONS[kind], *(("--position",) if feed is not None and feed.has_positions else ())]


def _kind_of(feed: Feed | None, sources: Sequence[str] = (), given: str | None = None) -> str:
    """The kind of a source, as of `_OWN_OPTIONS`."""
    if feed is not None:
        return "HTTP" if feed.connect is None else "broker"
    from sottovoce_client.feeding.files import infer_format

    return "standard input" if "-" in sources else infer_format(sources, given)


def _help_for(scheme: str | None) -> None:
    if scheme is not None:
        feed = _feed_of(scheme, "--help-for")
        options = ", ".join(_options_of(_kind_of(feed), feed))
        print(f"{feed.format_help()}\n\nOptions that this source has beside those of all: {options}")
        raise typer.Exit


@app.command("feed", rich_help_panel="Runs", common_options=("as_json", *NETWORK_OPTIONS, "allow_imports", "log_level"))
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
        make_address_option(
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
        _file(
            "Messages that are no records, as JSON lines. HTTP answers its client in its place.", "dropped, and counted"
        ),
    ] = None,
    patience: Annotated[float, _patience("How long the learner may be away, or between two runs.")] = 60.0,
    broker_patience: Annotated[float, _patience("How long the broker may be away.")] = 60.0,
    user: Annotated[
        str,
        typer.Option(
            envvar="SOTTOVOCE_FEED_USER",
            help="User that the broker knows. The password is in --password-file, or in $SOTTOVOCE_FEED_PASSWORD.",
            show_default="none",
        ),
    ] = "",
    password_file: Annotated[Path | None, _file("The user's password.")] = None,
    token_file: Annotated[
        Path | None, _file("Bearer token that every HTTP request must have.", "this machine's user alone")
    ] = None,
    tls_ca: Annotated[Path | None, _file("Authorities that are believed of a broker.", "this machine's")] = None,
    tls_cert: Annotated[Path | None, _file("PEM certificate, shown to the broker or HTTP's clients.")] = None,
    tls_key: Annotated[Path | None, _file("Its key.")] = None,
    name: Annotated[
        str, typer.Option(help="Name of the learner: another one at the address is refused.", show_default="any")
    ] = "",
) -> None:
    """Bring live records into a learner, each once. `--help-for kafka` prints the settings of one kind of URL."""
    from sottovoce_client.feeding.broker import PASSWORD_VARIABLE, BrokerCredentials, open_source, read_secret
    from sottovoce_client.feeding.feeder import FeedOptions, FeedTarget, build_feed_task
    from sottovoce_client.feeding.files import build_file_partitions, build_standard_input
    from sottovoce_client.feeding.progress import run_feeder

    first = sources[0]
    scheme = next((each.partition("://")[0] for each in sources if "://" in each.partition("?")[0]), "")
    if len(sources) > 1 and (scheme or "-" in sources):
        raise SpecError(f"SOURCE must be files, or one URL, or - alone, got {len(sources)}: start a feeder for each")
    url_feed = _feed_of(scheme, "SOURCE: the scheme of a URL") if scheme else None
    kind = _kind_of(url_feed, sources, format_)
    _require_fitting(context, _options_of(kind, url_feed), kind if url_feed is None else url_feed.name)
    prefix = "" if kind == "standard input" else source or ("http" if kind == "HTTP" else "")
    shared = get_common_options()
    in_the_clear = shared.insecure and (kind != "HTTP" or shared.identity is None)
    target = FeedTarget(learner, prefix, name, shared.identity, in_the_clear, patience, shared.allow_imports)
    terms = FeedOptions(tuple(map_ or ()), ignore_unknown, position, dead_letters)
    work: FeedTask
    parts: Sequence[SourcePartition]
    if url_feed is None:
        if kind == "standard input":
            parts = [build_standard_input(source or "stdin", format_ or "jsonl", delimiter, position)]
        else:
            parts = build_file_partitions(
                [Path(each) for each in sources], kind, delimiter=delimiter, follow=follow, excluded_path=dead_letters
            )
        work = build_feed_task(nullcontext(parts), target, terms)
    else:
        password = os.environ.get(PASSWORD_VARIABLE, "") if password_file is None else read_secret(password_file)
        access = BrokerCredentials(user, password, tls_ca, tls_cert, tls_key)
        own = {"credentials": access, "default_group": name or learner, "position": position, "patience_s": broker_patience}
        at = url_feed.parse_url(first, **own)
        if kind == "HTTP":
            work = _http_work(at, target, terms, token_file, insecure=shared.insecure)
        else:
            work = build_feed_task(open_source(at), target, terms)
    raise typer.Exit(run_feeder(work, shared.log_level or "info"))


def _require_fitting(context: typer.Context, own: Collection[str], called: str) -> None:
    """Refuse options that were given on the command line and that the kind of source does not have.

    Raises:
        SpecError: there is one.
    """
    for parameter in context.command.params:
        option, given = parameter.opts[0], context.get_parameter_source(parameter.name or "")
        if given is not None and given.name == "COMMANDLINE" and option in _SOME_OPTIONS - {*own}:
            raise SpecError(
                f"{option} must be left out: a source of {called} does not have it. It has {', '.join(own)}"
            )


def _http_work(
    at: SourceConfig, target: FeedTarget, terms: FeedOptions, token_file: Path | None, *, insecure: bool
) -> FeedTask:
    """Answering requests."""
    for module in at.feed.modules:
        at.feed.import_module(module)
    from sottovoce_client import terminal
    from sottovoce_client.feeding.http_endpoint import serve
    from sottovoce_rpc.server import announce

    console = terminal.create_console()

    def tell(address: str) -> None:
        if console.is_terminal:
            console.print(f"POST records to {address}")
        else:
            announce("feeder", address=address)

    return serve(at, target, terms, tell, token_file=token_file, insecure=insecure)
