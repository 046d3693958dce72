"""Feeders from brokers: NATS, Redis, MQTT and Kafka's protocol, into a learner."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sottovoce_client.cli.app import (
    MOST_SECONDS,
    address,
    feed_app,
    real,
)
from sottovoce_client.cli.common_options import NETWORK, common
from sottovoce_client.cli.feeding import (
    DeadLetters,
    IgnoreUnknown,
    Learner,
    Map,
    Name,
    Patience,
    Source,
    feed_from,
    target_of,
    terms_of,
)

if TYPE_CHECKING:
    from sottovoce_client.feeding.access import Access

PASSWORD = "SOTTOVOCE_FEED_PASSWORD"  # noqa: S105 - of a variable


def _at(broker: str, help_: str = "Of the broker; repeat for several of a cluster.") -> Any:
    def check(server: str, what: str) -> None:
        from sottovoce_client.feeding.access import SCHEMES
        from sottovoce_rpc.addresses import place_of_url

        place_of_url(server, SCHEMES[broker], what)

    return address("--server", check=check, metavar="ADDRESS", help=help_)


Begin = Annotated[
    Literal["committed", "start", "new"],
    typer.Option(
        "--from",
        help="Where to begin if the learner has no record of it in this run: where the feeder before it ended, at the oldest "
        "message, or with what comes from now on.",
    ),
]
Group = Annotated[
    str,
    typer.Option(
        help="Under which the broker keeps how far the learner is: one for each learner.",
        show_default="the learner's name or address",
    ),
]
User = Annotated[
    str,
    typer.Option(
        envvar="SOTTOVOCE_FEED_USER",
        help=f"Whom the broker knows. The password is in --password-file, or in the variable {PASSWORD}.",
        show_default="nobody",
    ),
]
PasswordFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="With the user's password.", show_default=False)
]
Tls = Annotated[bool, typer.Option("--tls", help="Speak TLS with the broker, and believe this machine's authorities.")]
TlsCa = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Authorities that are believed in their place.", show_default=False)
]
TlsCert = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Certificate that the broker is shown.", show_default=False)
]
TlsKey = Annotated[Path | None, typer.Option(metavar="FILE", help="Its key.", show_default=False)]
BrokerPatience = Annotated[
    float, real(least=0.0, most=MOST_SECONDS, metavar="SECONDS", help="How long the broker may be away.")
]


@feed_app.command("nats", uses=("as_json", "allow_imports", "log_level", *NETWORK))
def nats(
    stream: Annotated[str, typer.Argument(help="Of JetStream, with retention by limits.", show_default=False)],
    learner: Learner,
    server: Annotated[list[str], _at("nats")] = ["nats://127.0.0.1:4222"],  # noqa: B006 - Typer copies it
    subject: Annotated[
        str, typer.Option(help="Messages of this one alone, perhaps with wildcards.", show_default="all of the stream")
    ] = "",
    from_: Begin = "committed",
    group: Group = "",
    user: User = "",
    password_file: PasswordFile = None,
    creds: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A user's JWT and seed.", show_default=False)
    ] = None,
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    broker_patience: BrokerPatience = 60.0,
    source: Source = "",
    map_: Map = None,
    ignore_unknown: IgnoreUnknown = False,
    dead_letters: DeadLetters = None,
    patience: Patience = 60.0,
    name: Name = "",
) -> None:
    """Feed a stream of NATS JetStream, each record once (extra `feed`). Without a user a password is a token."""
    from sottovoce_client.feeding.nats import open_nats

    access = _access(user, password_file, tls, tls_ca, tls_cert, tls_key)
    feed_from(
        open_nats(
            server,
            stream,
            subject,
            group=group or name or learner,
            begin=from_,
            access=access,
            creds=creds,
            patience_s=broker_patience,
        ),
        target_of(learner, source, name, common().identity, common().insecure, patience, common().allow_imports),
        terms_of(map_, ignore_unknown, dead_letters),
        common().log_level or "info",
    )


@feed_app.command("redis", uses=("as_json", "allow_imports", "log_level", *NETWORK))
def redis(
    streams: Annotated[
        list[str], typer.Argument(metavar="STREAM...", help="Keys, each a source by its name.", show_default=False)
    ],
    learner: Learner,
    server: Annotated[str, _at("redis", "Of Redis 7 or newer.")] = "redis://127.0.0.1:6379",
    database: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Its number.")] = 0,
    field: Annotated[
        str,
        typer.Option(help="Of an entry, that holds a JSON object.", show_default="an entry's fields are the record's"),
    ] = "",
    from_: Begin = "committed",
    group: Group = "",
    user: User = "",
    password_file: PasswordFile = None,
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    broker_patience: BrokerPatience = 60.0,
    source: Source = "",
    map_: Map = None,
    ignore_unknown: IgnoreUnknown = False,
    dead_letters: DeadLetters = None,
    patience: Patience = 60.0,
    name: Name = "",
) -> None:
    """Feed streams of Redis, each record once (extra `feed`)."""
    from sottovoce_client.feeding.redis import open_redis

    access = _access(user, password_file, tls, tls_ca, tls_cert, tls_key)
    feed_from(
        open_redis(
            server,
            streams,
            field=field,
            group=group or name or learner,
            begin=from_,
            database=database,
            access=access,
            patience_s=broker_patience,
        ),
        target_of(learner, source, name, common().identity, common().insecure, patience, common().allow_imports),
        terms_of(map_, ignore_unknown, dead_letters),
        common().log_level or "info",
    )


@feed_app.command("mqtt", uses=("as_json", "allow_imports", "log_level", *NETWORK))
def mqtt(
    topics: Annotated[
        list[str], typer.Argument(metavar="TOPIC...", help="Perhaps with wildcards.", show_default=False)
    ],
    client: Annotated[
        str,
        typer.Option(help="Identifier of the session that the broker keeps: one for each feeder.", show_default=False),
    ],
    learner: Learner,
    server: Annotated[str, _at("mqtt", "Of a broker of MQTT 5.")] = "mqtt://127.0.0.1:1883",
    position: Annotated[
        str,
        typer.Option(
            metavar="FIELD",
            help="Field that says where a message stands among all of them: a whole number that rises.",
            show_default="counted on",
        ),
    ] = "",
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Tells, after the feeder's death, what the broker sends again; needless with --position.",
            show_default="~/.local/state/sottovoce/CLIENT.mqtt",
        ),
    ] = None,
    session: Annotated[
        int,
        typer.Option(min=1, max=2**32 - 1, metavar="SECONDS", help="How long the broker keeps it while nobody feeds."),
    ] = 604_800,
    user: User = "",
    password_file: PasswordFile = None,
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    broker_patience: BrokerPatience = 60.0,
    source: Source = "",
    map_: Map = None,
    ignore_unknown: IgnoreUnknown = False,
    dead_letters: DeadLetters = None,
    patience: Patience = 60.0,
    name: Name = "",
) -> None:
    """Feed topics of MQTT 5, with QoS 1 (extra `feed`)."""
    from sottovoce_client.feeding.mqtt import open_mqtt
    from sottovoce_client.feeding.unacknowledged import usual_place

    access = _access(user, password_file, tls, tls_ca, tls_cert, tls_key)
    feed_from(
        open_mqtt(
            server,
            topics,
            client=client,
            position=position,
            state=state or usual_place(client),
            session_s=session,
            access=access,
            patience_s=broker_patience,
        ),
        target_of(learner, source, name, common().identity, common().insecure, patience, common().allow_imports),
        terms_of(map_, ignore_unknown, dead_letters, position),
        common().log_level or "info",
    )


@feed_app.command("kafka", uses=("as_json", "allow_imports", "log_level", *NETWORK))
def kafka(
    topics: Annotated[
        list[str], typer.Argument(metavar="TOPIC...", help="Each partition is a source.", show_default=False)
    ],
    learner: Learner,
    server: Annotated[list[str], _at("kafka")] = ["127.0.0.1:9092"],  # noqa: B006 - Typer copies it
    from_: Begin = "committed",
    group: Group = "",
    user: User = "",
    password_file: PasswordFile = None,
    sasl: Annotated[
        Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"], typer.Option(help="How a user's password is shown.")
    ] = "SCRAM-SHA-512",
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    broker_patience: BrokerPatience = 60.0,
    source: Source = "",
    map_: Map = None,
    ignore_unknown: IgnoreUnknown = False,
    dead_letters: DeadLetters = None,
    patience: Patience = 60.0,
    name: Name = "",
) -> None:
    """Feed topics of brokers that speak Kafka's protocol, each record once (extra `feed`)."""
    from sottovoce_client.feeding.kafka import open_kafka

    access = _access(user, password_file, tls, tls_ca, tls_cert, tls_key)
    feed_from(
        open_kafka(
            server,
            topics,
            group=group or name or learner,
            begin=from_,
            sasl=sasl,
            access=access,
            patience_s=broker_patience,
        ),
        target_of(learner, source, name, common().identity, common().insecure, patience, common().allow_imports),
        terms_of(map_, ignore_unknown, dead_letters),
        common().log_level or "info",
    )


def _access(
    user: str, password_file: Path | None, tls: bool, ca: Path | None, certificate: Path | None, key: Path | None
) -> Access:
    from sottovoce_client.feeding.access import Access, secret_in

    password = os.environ.get(PASSWORD, "") if password_file is None else secret_in(password_file)
    return Access(user, password, tls, ca, certificate, key)
