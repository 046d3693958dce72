"""Sources named by URLs, and the common part of brokers: credentials, timeouts, and reading that survives a lost connection.

A broker is one module with a `Feed`, which an entry point of the group `sottovoce.feeds` offers: in this package as in
others.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import structlog

from sottovoce_client.feeding.records import SourceMessage, SourcePartition
from sottovoce_core.errors import DataError, FailedPrecondition, SpecError, Unavailable
from sottovoce_core.optional import import_optional
from sottovoce_core.registry import import_object
from sottovoce_rpc.addresses import parse_address, parse_url

log = structlog.get_logger()

ENTRY_POINTS = "sottovoce.feeds"
"""Group of the entry points that offer a `Feed`."""
PASSWORD_VARIABLE = "SOTTOVOCE_FEED_PASSWORD"  # noqa: S105 - the name of a variable
_CREDENTIALS_HINT = f"others see them; give --user, and the password in --password-file or ${PASSWORD_VARIABLE}"
_SECRETS = ("user", "username", "password", "passwd", "token", "secret")
_MAX_SECRET_BYTES = 64 * 1024
_REFUSAL_TEXT = "{} rejects these credentials, or is not trusted: {}"
_PERMANENT_ERROR_PATTERN = re.compile(
    r"authori[sz]ation violation|permissions violation|not authori[sz]ed|authentication|certificate.verify.failed",
    re.IGNORECASE,
)
"""Texts of errors without a retry: the broker rejects the feeder's credentials, or the feeder does not trust the broker."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.2, 5.0


# ---- sources named by URLs -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UrlSetting:
    """Setting in the query of a source's URL.

    Attributes:
        name: name in the query.
        help: a sentence for `--help-for`.
        default: value where the URL does not name it. With a number, only integers are allowed; None: a path, default no
            file.
        choices: allowed values; empty: any.
        minimum, maximum: bounds of a number.
        is_required: reject a URL without it.
        default_help: text shown in place of the default.
    """

    name: str
    help: str
    default: str | int | None = ""
    choices: tuple[str, ...] = ()
    minimum: int = 0
    maximum: int = 2**31 - 1
    is_required: bool = False
    default_help: str = ""

    def parse_value(self, text: str, url: str) -> str | int | Path:
        """Parse the text of a query.

        Raises:
            SpecError: it is not allowed.
        """
        requirement = f"one of {', '.join(self.choices)}" if self.choices else "a value"
        if isinstance(self.default, int):
            requirement = f"a whole number from {self.minimum} to {self.maximum}"
            if re.fullmatch(r"[0-9]{1,12}", text) and self.minimum <= int(text) <= self.maximum:
                return int(text)
        elif text in self.choices if self.choices else text:
            return Path(text) if self.default is None else text
        raise SpecError(f"?{self.name}= of {url} must be {requirement}, got {text!r}")

    @property
    def help_text(self) -> str:
        """Help, choices and default."""
        default = "required" if self.is_required else f"default: {self.default_help or self.default or 'none'}"
        choices = f" One of {', '.join(self.choices)}." if self.choices else ""
        return f"{self.help}{choices} [{default}]"


START_SETTING = UrlSetting(
    "from",
    "Where to begin if the learner has no record of the source in this run: where the feeder before it ended (at the oldest "
    "message if there was none), at the oldest message, or with the messages that come from now on.",
    "committed",
    ("committed", "start", "new"),
)
GROUP_SETTING = UrlSetting(
    "group",
    "Name under which the broker keeps the learner's position: one for each learner.",
    default_help="the learner's name or address",
)


@dataclass(frozen=True, kw_only=True)
class Feed:
    """Kind of source that a URL names: a broker, or the endpoint that clients POST to.

    Attributes:
        name: name of the product or protocol.
        schemes: URL schemes, the usual one first, each with its default port.
        tls_schemes: schemes that mean TLS.
        help: a sentence.
        examples: URLs.
        settings: settings of the query.
        path: placeholder of the path after the host; empty: no path.
        allows_many_names: whether the path may have several names, separated by commas.
        allows_many_hosts: whether a URL may have several hosts, separated by commas.
        modules: modules that must be importable.
        extra: optional dependency of the package that installs them.
        has_positions: whether `--position` may name a field with a record's position.
        connect: creates the connection to a broker, without connecting; None: this feed listens at its URL.
    """

    name: str
    schemes: Mapping[str, int]
    tls_schemes: frozenset[str]
    help: str
    examples: Sequence[str]
    settings: Sequence[UrlSetting] = ()
    path: str = ""
    allows_many_names: bool = False
    allows_many_hosts: bool = False
    modules: Sequence[str] = ()
    extra: str = "feed"
    has_positions: bool = False
    connect: Callable[[SourceConfig], BrokerConnection] | None = None

    @property
    def url_form(self) -> str:
        """Form of its URLs."""
        usual_scheme, port = next(iter(self.schemes.items()))
        path = f"/{self.path}{f',{self.path}...' if self.allows_many_names else ''}" if self.path else ""
        return f"{usual_scheme}://HOST:{port}{f',HOST:{port}...' if self.allows_many_hosts else ''}{path}"

    def format_help(self) -> str:
        """Format the output of `sottovoce feed --help-for`."""
        secure = ", ".join(f"{each}://" for each in self.schemes if each in self.tls_schemes)
        lines = [f"{self.url_form}?SETTING=VALUE&...", "", self.help, f"With TLS: {secure}.", "", "Settings:"]
        for each in self.settings:
            lines += [f"  {each.name}", f"      {each.help_text}"]
        lines += ["", "Examples:", *(f"  sottovoce feed '{each}' --learner 127.0.0.1:7401" for each in self.examples)]
        return "\n".join(lines)

    def import_module(self, module: str) -> Any:
        """Import a module of the optional dependency.

        Raises:
            SpecError: it is not installed.
        """
        return import_optional(module, module.partition(".")[0], f"feeding from {self.name}", self.extra)

    def parse_url(self, url: str, **more: Any) -> SourceConfig:
        """Parse the URL of a source.

        Args:
            url: full URL.
            more: further attributes of the source.

        Raises:
            SpecError: the URL is not of this feed, holds a password, or has an unknown or invalid setting.
        """
        before, _, query = url.partition("?")
        scheme, _, rest = before.partition("://")
        if "@" in rest:  # the URL is not quoted: it may hold a password
            raise SpecError(f"SOURCE must hold no user or password: {_CREDENTIALS_HINT}. An @ in a name is written %40")
        hosts, _, path = rest.partition("/")
        servers = [self._parse_host(scheme, each) for each in (hosts.split(",") if self.allows_many_hosts else [hosts])]
        names = tuple(map(unquote, path.split(",") if self.allows_many_names else [path]))
        if bool(self.path) != all(names) or (path and not self.path):
            raise SpecError(f"SOURCE must be like {self.url_form}, got {before!r}")
        return SourceConfig(self, scheme.lower(), servers, names, self._parse_settings(query, before), **more)

    def _parse_host(self, scheme: str, host: str) -> tuple[str, int]:
        if self.connect is not None:
            return parse_url(f"{scheme}://{host}", self.schemes, "SOURCE")[1:]
        port = "" if re.search(r":[^\]]*$", host) else f":{self.schemes[scheme.lower()]}"
        return parse_address(f"{host}{port}", "SOURCE", allow_port_zero=True)

    def _parse_settings(self, query: str, url: str) -> dict[str, Any]:
        """Return all settings, from a query and the defaults."""
        known_settings, found = {each.name: each for each in self.settings}, dict[str, Any]()
        for each in filter(None, query.split("&")):
            name, _, text = (unquote(part) for part in each.partition("="))
            if name.lower() in _SECRETS:
                raise SpecError(f"{url} must hold no user or password, got ?{name}=...: {_CREDENTIALS_HINT}")
            if name not in known_settings:
                usual_scheme = next(iter(self.schemes))
                raise SpecError(
                    f"?{name}= of {url} must be one of {', '.join(known_settings)}: see `sottovoce feed "
                    f"--help-for {usual_scheme}`"
                )
            if name in found:
                raise SpecError(f"?{name}= of {url} must be given once, got it twice: leave one out")
            found[name] = known_settings[name].parse_value(text, url)
        if missing := [each for each in self.settings if each.is_required and each.name not in found]:
            raise SpecError(f"{url} must have ?{missing[0].name}=, got none. {missing[0].help}")
        return {name: each.default for name, each in known_settings.items()} | found


@dataclass(frozen=True, slots=True)
class BrokerCredentials:
    """Credentials for a broker, and the authorities that the feeder trusts.

    Attributes:
        user: user of the broker; empty: none, and a password is a token.
        password: password of the user.
        ca: file of the trusted authorities; None: those of this machine.
        certificate, key: files of the feeder's certificate, with its chain, and its key; None: none.
    """

    user: str = ""
    password: str = field(default="", repr=False)
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise SpecError("a certificate and its key go together: give both --tls-cert and --tls-key, or none")


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """A source, from its URL and options, created by `Feed.parse_url`.

    Attributes:
        feed: its kind.
        scheme: scheme of the URL.
        servers: hosts and ports.
        names: names of topics, streams or keys.
        settings: all settings of the feed.
        credentials: credentials.
        default_group: group where the URL names none.
        position: field with a record's position; empty: none.
        patience_s: how long the broker may be unreachable, in seconds.
    """

    feed: Feed
    scheme: str
    servers: Sequence[tuple[str, int]]
    names: Sequence[str]
    settings: Mapping[str, Any]
    credentials: BrokerCredentials = BrokerCredentials()
    default_group: str = "sottovoce"
    position: str = ""
    patience_s: float = 60.0

    @property
    def group(self) -> str:
        """Group under which the broker keeps the position."""
        return self.settings["group"] or self.default_group

    @property
    def addresses(self) -> list[str]:
        """Servers, each as `host:port`."""
        return [f"{f'[{host}]' if ':' in host else host}:{port}" for host, port in self.servers]

    def build_tls_context(self) -> ssl.SSLContext | None:
        """Build the TLS context; None: neither the URL nor a file asks for TLS.

        Raises:
            FailedPrecondition: a file cannot be used.
        """
        credentials = self.credentials
        if not (self.scheme in self.feed.tls_schemes or credentials.ca or credentials.certificate):
            return None
        files = ", ".join(
            str(each) for each in (credentials.ca, credentials.certificate, credentials.key) if each is not None
        )
        try:
            context = ssl.create_default_context(cafile=credentials.ca)
            if credentials.certificate is not None:
                # A key under a passphrase would ask for it on the terminal.
                context.load_cert_chain(credentials.certificate, credentials.key, password="")
        except (OSError, ValueError) as error:
            raise FailedPrecondition(f"no TLS with {files}: {getattr(error, 'reason', None) or error}") from None
        return context


HTTP = Feed(
    name="HTTP",
    schemes={"http": 7490, "https": 7490},
    tls_schemes=frozenset({"https"}),
    help="Records that clients POST to /records at this address, as JSON; they are answered when the learner has kept them. "
    "Other addresses than this machine's own need https, --tls-cert, --tls-key and --token-file, or --insecure.",
    examples=("http://127.0.0.1:7490", "https://0.0.0.0:7490?when-full=reject"),
    settings=(
        UrlSetting(
            "when-full", "Whether a request that finds no room waits, or is refused (429).", "wait", ("wait", "reject")
        ),
        UrlSetting("max-bytes", "Maximum size of a request, in bytes.", 1024 * 1024, minimum=1),
    ),
    modules=("starlette", "uvicorn"),
    has_positions=True,
)
"""Feed that listens at its URL; all others are offered by entry points."""


def load_feeds() -> list[Feed]:
    """Load HTTP and the feeds of all installed packages, by name.

    Raises:
        SpecError: an entry point cannot be imported, or is not a feed.
    """
    found = [HTTP]
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda each: each.name):
        feed = import_object(point.value, f"the entry point {point.name} of {ENTRY_POINTS}")
        if not isinstance(feed, Feed):
            raise SpecError(f"the entry point {point.name} of {ENTRY_POINTS} must be a Feed, got {point.value}")
        found.append(feed)
    return found


def read_secret(path: Path, display_name: str = "password") -> str:
    """Read a password or token from a file, without its line end.

    Raises:
        FailedPrecondition: there is none.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_SECRET_BYTES).decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise FailedPrecondition(
            f"no {display_name} in {path}: {getattr(error, 'strerror', None) or 'it is no text'}"
        ) from None
    if not text:
        raise FailedPrecondition(f"no {display_name} in {path}: it is empty")
    return text


# ---- reading ---------------------------------------------------------------------------------------------------------


class BrokerConnection(ABC):
    """Connection to a broker, reopened after it is lost.

    Attributes:
        source: the source.
        display_name: name of the broker in messages.
        connection_errors: exceptions after which the connection is reopened.
        permanent_errors: those of them without a retry.
    """

    connection_errors: tuple[type[BaseException], ...] = (OSError, TimeoutError)
    permanent_errors: tuple[type[BaseException], ...] = ()

    def __init__(self, source: SourceConfig) -> None:
        self.source, self.display_name = source, f"{source.feed.name} at {', '.join(source.addresses)}"

    @abstractmethod
    async def start(self) -> list[BrokerPartition]:
        """Connect for the first time, and list the partitions."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection; also called without one."""

    def explain_error(self, error: BaseException) -> str:
        """Describe a failed call in a few words.

        Raises:
            FailedPrecondition: a retry would not help.
        """
        for each in (*self.list_reported_errors(), error):
            if isinstance(error, self.permanent_errors) or _PERMANENT_ERROR_PATTERN.search(str(each)):
                raise self.build_refusal_error(each) from None
        return shorten_error(error)

    def list_reported_errors(self) -> Sequence[object]:
        """Return errors, or texts of errors, that the library reported without raising them."""
        return ()

    def build_refusal_error(self, reason: object) -> FailedPrecondition:
        """Build the error for credentials that the broker rejects."""
        return FailedPrecondition(_REFUSAL_TEXT.format(self.display_name, shorten_error(reason)))


class BrokerPartition(ABC):
    """Partition of a broker's source: continues after a lost connection, and commits the learner's position to the broker.

    Args:
        connection: connection to the broker.
        name: name of the partition.
        display_name: its name in messages.
    """

    def __init__(self, connection: Any, name: str, display_name: str) -> None:
        self._connection, self.name, self._display_name = connection, name, display_name
        self._retry_timer = _RetryTimer(connection.display_name, connection.source.patience_s)
        self._lost_messages = _LostMessageCounter(display_name)
        self._uncommitted_position: int | None = None
        """Position that the broker does not have yet."""

    async def read(self, after: int) -> AsyncIterator[Sequence[SourceMessage]]:
        """Read messages, as of `SourcePartition`."""
        has_begun = False
        while True:
            try:
                if not has_begun:
                    after, has_begun = await self._begin(after), True
                async with aclosing(self._read_on(after)) as reading:
                    async for messages in reading:
                        after = messages[-1].position
                        yield messages
            except self._connection.connection_errors as error:
                await self._retry_timer.wait_or_give_up(self._explain_error(error))

    async def acknowledge(self, position: int) -> None:
        """Commit a position. A failure is ignored: a later position covers it, and the learner's own position is what counts."""
        self._uncommitted_position = position
        with suppress(*self._connection.connection_errors):
            await self._commit(position)
            self._uncommitted_position = None

    async def close(self) -> None:
        """Commit the last position once more, if the broker is reachable."""
        if self._uncommitted_position is not None:
            with suppress(FailedPrecondition, DataError):
                await self.acknowledge(self._uncommitted_position)

    def _choose_start(self, oldest: int, newest: int, committed: int | None) -> int:
        """Choose the position to read after where the learner has none, as of `START_SETTING`.

        Args:
            oldest: position before the oldest message.
            newest: position of the newest message.
            committed: last position of an earlier feeder; None: there was none.
        """
        ends = {"committed": oldest if committed is None else committed, "start": oldest, "new": newest}
        return ends[self._connection.source.settings[START_SETTING.name]]

    @abstractmethod
    async def _begin(self, after: int) -> int:
        """Return the position to read after, given the learner's; -1: the learner has none."""

    @abstractmethod
    def _read_on(self, after: int) -> AsyncGenerator[Sequence[SourceMessage], None]:
        """Yield messages after a position; return where reading must restart after the last one."""

    @abstractmethod
    async def _commit(self, position: int) -> None:
        """Commit a position to the broker."""

    def _explain_error(self, error: BaseException) -> str:
        return str(self._connection.explain_error(error))

    def _build_replaced_error(self, reason: str) -> DataError:
        return DataError(
            f"{self._display_name} was replaced: {reason}. Feed its current content under another --source"
        )


@asynccontextmanager
async def open_source(source: SourceConfig) -> AsyncIterator[list[SourcePartition]]:
    """Open the partitions of a source, while the block lasts.

    Raises:
        SpecError: an optional dependency is missing.
        FailedPrecondition: the broker rejects these credentials.
        DataError: it has no such source.
        Unavailable: it is unreachable for too long.
    """
    assert source.feed.connect is not None  # noqa: S101 - it is a broker's
    connection = source.feed.connect(source)
    retry_timer, parts = _RetryTimer(connection.display_name, source.patience_s), list[BrokerPartition]()
    try:
        while True:
            try:
                parts = await connection.start()
                break
            except connection.connection_errors as error:
                await retry_timer.wait_or_give_up(connection.explain_error(error))
        yield list(parts)
    finally:
        for part in parts:
            await part.close()
        await connection.close()


class _RetryTimer:
    """Retry timer of a broker. An outage, its end and the subscription are logged once each time.

    Args:
        display_name: name of the broker in messages.
        timeout_s: how long it may be unreachable.
    """

    def __init__(self, display_name: str, timeout_s: float) -> None:
        self._display_name, self._timeout_s = display_name, timeout_s
        self._outage_start_s: float | None = None
        self._pause_s, self._is_subscription_logged = _FIRST_PAUSE_S, False

    def log_subscription(self, source: str) -> None:
        """Note that the broker has answered, and that a source misses no message from now on."""
        self.record_answer()
        if not self._is_subscription_logged:
            log.info("subscribed", broker=self._display_name, source=source)
        self._is_subscription_logged = True

    def record_answer(self) -> None:
        """Note that the broker has answered."""
        if self._outage_start_s is not None:
            log.warning("the broker is back", broker=self._display_name)
        self._outage_start_s, self._pause_s = None, _FIRST_PAUSE_S

    async def wait_or_give_up(self, reason: str) -> None:
        """Note that the broker has not answered, and wait: longer each time.

        Args:
            reason: reason in a few words.

        Raises:
            Unavailable: it is unreachable for too long.
        """
        now, self._is_subscription_logged = asyncio.get_running_loop().time(), False
        if self._outage_start_s is None:
            self._outage_start_s = now
            log.warning(
                "the broker is unreachable", broker=self._display_name, reason=reason, timeout_s=self._timeout_s
            )
        remaining_s = self._outage_start_s + self._timeout_s - now
        if remaining_s <= 0:
            raise Unavailable(f"{self._display_name} was unreachable for {self._timeout_s:g} s: {reason}")
        await asyncio.sleep(min(self._pause_s, remaining_s))
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)


class _LostMessageCounter:
    """Count of messages that a source no longer had when they were due; logged whenever it has doubled.

    Args:
        display_name: name of the source in messages.
    """

    def __init__(self, display_name: str) -> None:
        self._display_name, self._logged_count = display_name, 0
        self.messages = 0

    def add(self, messages: int, *, at_most: bool = False) -> None:
        """Count messages.

        Args:
            messages: number of messages; 0: unknown.
            at_most: whether there may be fewer.
        """
        self.messages += messages
        if self.messages >= 2 * self._logged_count:
            self._logged_count = self.messages
            count_text = "an unknown number" if not messages else f"{'up to ' * at_most}{self.messages}"
            log.warning("messages were deleted before they were read", source=self._display_name, messages=count_text)


def shorten_error(error: object) -> str:
    """Shorten a failed call's text to a few words on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"
