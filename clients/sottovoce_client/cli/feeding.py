"""Command `feed`: from growing files, standard input, HTTP and brokers into a learner."""

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

_FILES, _BROKER = ("--format", "--dead-letters"), ("--dead-letters", "--broker-timeout", "--user", "--password-file")
_OWN_OPTIONS = {
    "csv": (*_FILES, "--delimiter", "--follow"),
    "jsonl": (*_FILES, "--follow"),
    "parquet": _FILES,
    "standard input": (*_FILES, "--delimiter", "--position"),
    "HTTP": ("--token-file", "--tls-cert", "--tls-key"),
    "broker": (*_BROKER, "--tls-ca", "--tls-cert", "--tls-key"),
}
"""Options of single kinds of sources. Some feeds have `--position`, too."""
_SPECIFIC_OPTIONS = frozenset(option for options in _OWN_OPTIONS.values() for option in options)


def _file_option(help_: str, default: str | bool = False) -> Any:
    return typer.Option(metavar="FILE", help=help_, show_default=default)


def _timeout_option(help_: str) -> Any:
    return make_number_option(min_value=0.0, max_value=MAX_DURATION_S, metavar="SECONDS", help=help_)


def _find_feed(scheme: str, what: str) -> Feed:
    """Return the feed of a URL scheme."""
    from sottovoce_client.feeding.broker import load_feeds

    known = {each: feed for feed in load_feeds() for each in feed.schemes}
    if scheme.lower() not in known:
        raise SpecError(f"{what} must be one of {', '.join(known)}, got {scheme!r}")
    return known[scheme.lower()]


def _list_options(kind: str, feed: Feed | None) -> list[str]:
    """Return the options of a source besides the common ones."""
    return [*_OWN_OPTIONS[kind], *(("--position",) if feed is not None and feed.has_positions else ())]


def _find_kind(feed: Feed | None, sources: Sequence[str] = (), given: str | None = None) -> str:
    """Return the kind of a source, as in `_OWN_OPTIONS`."""
    if feed is not None:
        return "HTTP" if feed.connect is None else "broker"
    from sottovoce_client.feeding.files import infer_format

    return "standard input" if "-" in sources else infer_format(sources, given)


def _print_feed_help(scheme: str | None) -> None:
    if scheme is not None:
        feed = _find_feed(scheme, "--help-for")
        options = ", ".join(_list_options(_find_kind(feed), feed))
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
            callback=_print_feed_help,
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
    delimiter: Annotated[str, typer.Option(help="Delimiter between values of CSV.")] = ",",
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for more at the end of a CSV or JSON lines file.")
    ] = False,
    position: Annotated[
        str,
        typer.Option(
            metavar="FIELD",
            help="Field with a record's position, an increasing integer: repeated records are then learned once. For "
            "standard input, HTTP and MQTT.",
            show_default="counted on",
        ),
    ] = "",
    source: Annotated[
        str,
        typer.Option(
            envvar="SOTTOVOCE_SOURCE",
            help="Name under which the learner counts the records. A later source with this name must have the same content, or "
            "continue it.",
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
            help="Leave out fields that neither the schema nor a map has, instead of refusing the message.",
        ),
    ] = False,
    dead_letters: Annotated[
        Path | None,
        _file_option(
            "File for messages that are not records, as JSON lines. HTTP answers its client instead.",
            "dropped, and counted",
        ),
    ] = None,
    learner_timeout: Annotated[
        float, _timeout_option("How long the learner may be unreachable, or between two runs.")
    ] = 60.0,
    broker_timeout: Annotated[float, _timeout_option("How long the broker may be unreachable.")] = 60.0,
    user: Annotated[
        str,
        typer.Option(
            envvar="SOTTOVOCE_FEED_USER",
            help="User of the broker. The password is in --password-file, or in $SOTTOVOCE_FEED_PASSWORD.",
            show_default="none",
        ),
    ] = "",
    password_file: Annotated[Path | None, _file_option("The user's password.")] = None,
    token_file: Annotated[
        Path | None, _file_option("Bearer token that every HTTP request must have.", "this machine's user alone")
    ] = None,
    tls_ca: Annotated[Path | None, _file_option("Trusted authorities of a broker.", "this machine's")] = None,
    tls_cert: Annotated[Path | None, _file_option("PEM certificate, sent to the broker or HTTP's clients.")] = None,
    tls_key: Annotated[Path | None, _file_option("Its key.")] = None,
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
    url_feed = _find_feed(scheme, "SOURCE: the scheme of a URL") if scheme else None
    kind = _find_kind(url_feed, sources, format_)
    _require_allowed_options(context, _list_options(kind, url_feed), kind if url_feed is None else url_feed.name)
    prefix = "" if kind == "standard input" else source or ("http" if kind == "HTTP" else "")
    shared = get_common_options()
    in_the_clear = shared.insecure and (kind != "HTTP" or shared.identity is None)
    target = FeedTarget(learner, prefix, name, shared.identity, in_the_clear, learner_timeout, shared.allow_imports)
    options = FeedOptions(tuple(map_ or ()), ignore_unknown, position, dead_letters)
    work: FeedTask
    parts: Sequence[SourcePartition]
    if url_feed is None:
        if kind == "standard input":
            parts = [build_standard_input(source or "stdin", format_ or "jsonl", delimiter, position)]
        else:
            parts = build_file_partitions(
                [Path(each) for each in sources], kind, delimiter=delimiter, follow=follow, excluded_path=dead_letters
            )
        work = build_feed_task(nullcontext(parts), target, options)
    else:
        password = os.environ.get(PASSWORD_VARIABLE, "") if password_file is None else read_secret(password_file)
        credentials = BrokerCredentials(user, password, tls_ca, tls_cert, tls_key)
        allowed_options = {
            "credentials": credentials,
            "default_group": name or learner,
            "position": position,
            "patience_s": broker_timeout,
        }
        source_config = url_feed.parse_url(first, **allowed_options)
        if kind == "HTTP":
            work = _build_http_task(source_config, target, options, token_file, insecure=shared.insecure)
        else:
            work = build_feed_task(open_source(source_config), target, options)
    raise typer.Exit(run_feeder(work, shared.log_level or "info"))


def _require_allowed_options(context: typer.Context, allowed_options: Collection[str], source_name: str) -> None:
    """Reject command-line options that the kind of source does not have.

    Raises:
        SpecError: there is one.
    """
    for parameter in context.command.params:
        option, given = parameter.opts[0], context.get_parameter_source(parameter.name or "")
        if given is not None and given.name == "COMMANDLINE" and option in _SPECIFIC_OPTIONS - {*allowed_options}:
            raise SpecError(
                f"{option} must be left out: a source of {source_name} does not have it. Its options are "
                f"{', '.join(allowed_options)}"
            )


def _build_http_task(
    source_config: SourceConfig, target: FeedTarget, options: FeedOptions, token_file: Path | None, *, insecure: bool
) -> FeedTask:
    """Build the task of the HTTP endpoint."""
    for module in source_config.feed.modules:
        source_config.feed.import_module(module)
    from sottovoce_client import terminal
    from sottovoce_client.feeding.http_endpoint import serve
    from sottovoce_rpc.server import announce

    console = terminal.create_console()

    def announce_address(address: str) -> None:
        if console.is_terminal:
            console.print(f"POST records to {address}")
        else:
            announce("feeder", address=address)

    return serve(source_config, target, options, announce_address, token_file=token_file, insecure=insecure)
