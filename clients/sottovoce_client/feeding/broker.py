"""Sources that a URL names, and what brokers have in common: access, patience, and reading that survives a lost connection.

A broker is one module with a `Feed`, which an entry point of the group `sottovoce.feeds` offers: in this package as in others.
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
_REFUSAL_TEXT = "{} refuses these credentials, or is not believed: {}"
_PERMANENT_ERROR_PATTERN = re.compile(
    r"authori[sz]ation violation|permissions violation|not authori[sz]ed|authentication|certificate.verify.failed",
    re.IGNORECASE,
)
"""Texts of errors that waiting does not cure: the broker does not know the feeder, or the feeder does not believe the broker."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.2, 5.0


# ---- sources that URLs name ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UrlSetting:
    """A setting in the query of a source's URL.

    Attributes:
        name: as the query has it.
        help: a sentence for `--help-for`.
        default: its value where the URL does not name it. A number allows whole numbers alone; None: a path, of no file.
        choices: the only values that are allowed; empty: any.
        least, most: bounds of a number.
        required: refuse a URL without it.
        default_help: what the help shows in place of the default.
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
        """The value that a text of the query means.

        Raises:
            SpecError: it is not allowed.
        """
        wanted = f"one of {', '.join(self.choices)}" if self.choices else "a value"
        if isinstance(self.default, int):
            wanted = f"a whole number from {self.minimum} to {self.maximum}"
            if re.fullmatch(r"[0-9]{1,12}", text) and self.minimum <= int(text) <= self.maximum:
                return int(text)
        elif text in self.choices if self.choices else text:
            return Path(text) if self.default is None else text
        raise SpecError(f"?{self.name}= of {url} must be {wanted}, got {text!r}")

    @property
    def help_text(self) -> str:
        """The help, the choices and the default."""
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
    """A kind of source that a URL names: a broker, or the endpoint that clients POST to.

    Attributes:
        name: of the product or protocol.
        schemes: of its URLs, the usual one first, each with its usual port.
        tls: those schemes that mean TLS.
        help: a sentence.
        examples: URLs.
        settings: of the query.
        path: what stands behind the host in its URLs; empty: nothing does.
        many: whether a URL may name several of that, with commas between.
        cluster: whether a URL may name several hosts, with commas between.
        modules: that must be importable.
        extra: optional dependency of the package that installs them.
        has_positions: whether `--position` may name a field with a record's position.
        connect: makes the link to a broker, without connecting; None: this feed listens at its URL.
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
        """The form of its URLs."""
        usual, port = next(iter(self.schemes.items()))
        path = f"/{self.path}{f',{self.path}...' if self.allows_many_names else ''}" if self.path else ""
        return f"{usual}://HOST:{port}{f',HOST:{port}...' if self.allows_many_hosts else ''}{path}"

    def format_help(self) -> str:
        """The page of `sottovoce feed --help-for`."""
        secure = ", ".join(f"{each}://" for each in self.schemes if each in self.tls_schemes)
        lines = [f"{self.url_form}?SETTING=VALUE&...", "", self.help, f"With TLS: {secure}.", "", "Settings:"]
        for each in self.settings:
            lines += [f"  {each.name}", f"      {each.help_text}"]
        lines += ["", "Examples:", *(f"  sottovoce feed '{each}' --learner 127.0.0.1:7401" for each in self.examples)]
        return "\n".join(lines)

    def import_module(self, module: str) -> Any:
        """A module of the optional dependency.

        Raises:
            SpecError: it is not installed.
        """
        return import_optional(module, module.partition(".")[0], f"feeding from {self.name}", self.extra)

    def parse_url(self, url: str, **more: Any) -> SourceConfig:
        """The source that a URL names.

        Args:
            url: in full.
            more: further attributes of the source.

        Raises:
            SpecError: the URL is none of this feed's, holds a password, or has a setting that is unknown or wrong.
        """
        before, _, query = url.partition("?")
        scheme, _, rest = before.partition("://")
        if "@" in rest:  # the URL is not shown: it may hold a password
            raise SpecError(f"SOURCE must hold no user or password: {_CREDENTIALS_HINT}. An @ in a name is written %40")
        hosts, _, path = rest.partition("/")
        places = [self._place(scheme, each) for each in (hosts.split(",") if self.allows_many_hosts else [hosts])]
        names = tuple(map(unquote, path.split(",") if self.allows_many_names else [path]))
        if bool(self.path) != all(names) or (path and not self.path):
            raise SpecError(f"SOURCE must be like {self.url_form}, got {before!r}")
        return SourceConfig(self, scheme.lower(), places, names, self._values(query, before), **more)

    def _place(self, scheme: str, host: str) -> tuple[str, int]:
        if self.connect is not None:
            return parse_url(f"{scheme}://{host}", self.schemes, "SOURCE")[1:]
        port = "" if re.search(r":[^\]]*$", host) else f":{self.schemes[scheme.lower()]}"
        return parse_address(f"{host}{port}", "SOURCE", allow_port_zero=True)

    def _values(self, query: str, url: str) -> dict[str, Any]:
        """All settings, by a query and the defaults."""
        known, found = {each.name: each for each in self.settings}, dict[str, Any]()
        for each in filter(None, query.split("&")):
            name, _, text = (unquote(part) for part in each.partition("="))
            if name.lower() in _SECRETS:
                raise SpecError(f"{url} must hold no user or password, got ?{name}=...: {_CREDENTIALS_HINT}")
            if name not in known:
                usual = next(iter(self.schemes))
                raise SpecError(
                    f"?{name}= of {url} must be one of {', '.join(known)}: see `sottovoce feed --help-for {usual}`"
                )
            if name in found:
                raise SpecError(f"?{name}= of {url} must be there once, got it twice: leave one out")
            found[name] = known[name].parse_value(text, url)
        if missing := [each for each in self.settings if each.is_required and each.name not in found]:
            raise SpecError(f"{url} must have ?{missing[0].name}=, and has none. {missing[0].help}")
        return {name: each.default for name, each in known.items()} | found


@dataclass(frozen=True, slots=True)
class BrokerCredentials:
    """Credentials for a broker, and the authorities that the feeder believes.

    Attributes:
        user: that the broker knows; empty: none, and a password is a token.
        password: of the user.
        ca: file of the authorities that are believed; None: those of this machine.
        certificate, key: files of a certificate of the feeder's own, with its chain, and its key; None: it has none.
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
    """A source, as its URL and options name it. `Feed.source` makes one.

    Attributes:
        feed: its kind.
        scheme: of the URL.
        servers: hosts and ports.
        names: of topics, streams or keys.
        settings: all of the feed's.
        access: credentials.
        default_group: the group where the URL names none.
        position: field with a record's position; empty: none.
        patience_s: how long the broker may be away, in seconds.
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
        """The group under which the broker keeps the position."""
        return self.settings["group"] or self.default_group

    @property
    def addresses(self) -> list[str]:
        """The servers, each as `host:port`."""
        return [f"{f'[{host}]' if ':' in host else host}:{port}" for host, port in self.servers]

    def build_tls_context(self) -> ssl.SSLContext | None:
        """The context of TLS; None: neither the URL nor a file asks for it.

        Raises:
            FailedPrecondition: a file cannot be used.
        """
        access = self.credentials
        if not (self.scheme in self.feed.tls_schemes or access.ca or access.certificate):
            return None
        files = ", ".join(str(each) for each in (access.ca, access.certificate, access.key) if each is not None)
        try:
            context = ssl.create_default_context(cafile=access.ca)
            if access.certificate is not None:
                # A key under a passphrase would ask for it on the terminal.
                context.load_cert_chain(access.certificate, access.key, password="")
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
"""The feed that listens at its URL; all others are offered by entry points."""


def load_feeds() -> list[Feed]:
    """HTTP, and the feeds that installed packages offer, this one and others, by name.

    Raises:
        SpecError: an entry point cannot be imported, or is no feed.
    """
    found = [HTTP]
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda each: each.name):
        feed = import_object(point.value, f"the entry point {point.name} of {ENTRY_POINTS}")
        if not isinstance(feed, Feed):
            raise SpecError(f"the entry point {point.name} of {ENTRY_POINTS} must be a Feed, got {point.value}")
        found.append(feed)
    return found


def read_secret(path: Path, what: str = "password") -> str:
    """A password or token from a file, without the end of its line.

    Raises:
        FailedPrecondition: there is none.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_SECRET_BYTES).decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise FailedPrecondition(
            f"no {what} in {path}: {getattr(error, 'strerror', None) or 'it is no text'}"
        ) from None
    if not text:
        raise FailedPrecondition(f"no {what} in {path}: it is empty")
    return text


# ---- reading ---------------------------------------------------------------------------------------------------------


class BrokerConnection(ABC):
    """A connection to a broker, made again after it is lost.

    Attributes:
        at: the source.
        what: the broker in messages.
        away: exceptions after which the connection is made again.
        refusals: exceptions among those that waiting does not cure.
    """

    connection_errors: tuple[type[BaseException], ...] = (OSError, TimeoutError)
    permanent_errors: tuple[type[BaseException], ...] = ()

    def __init__(self, at: SourceConfig) -> None:
        self.source, self.display_name = at, f"{at.feed.name} at {', '.join(at.addresses)}"

    @abstractmethod
    async def start(self) -> list[BrokerPartition]:
        """Connect for the first time, and list the parts."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection; called without one, too."""

    def explain_error(self, error: BaseException) -> str:
        """A failed call in a few words.

        Raises:
            FailedPrecondition: waiting does not cure it.
        """
        for each in (*self.list_reported_errors(), error):
            if isinstance(error, self.permanent_errors) or _PERMANENT_ERROR_PATTERN.search(str(each)):
                raise self.build_refusal_error(each) from None
        return shorten_error(error)

    def list_reported_errors(self) -> Sequence[object]:
        """Errors, or texts of some, that the library noticed without raising them."""
        return ()

    def build_refusal_error(self, why: object) -> FailedPrecondition:
        """The error for credentials that the broker refuses."""
        return FailedPrecondition(_REFUSAL_TEXT.format(self.display_name, shorten_error(why)))


class BrokerPartition(ABC):
    """A part of a broker's source: it reads on after a lost connection, and tells the broker how far the learner is.

    Args:
        link: to the broker.
        name: of the part.
        what: it is called in messages.
    """

    def __init__(self, link: Any, name: str, what: str) -> None:
        self._link, self.name, self._what = link, name, what
        self._patience = _Patience(link.display_name, link.source.patience_s)
        self._gone = _Gone(what)
        self._due: int | None = None
        """A position that the broker should keep, and does not yet."""

    async def read(self, after: int) -> AsyncIterator[Sequence[SourceMessage]]:
        """As of `Part`."""
        begun = False
        while True:
            try:
                if not begun:
                    after, begun = await self._begin(after), True
                async with aclosing(self._read_on(after)) as reading:
                    async for messages in reading:
                        after = messages[-1].position
                        yield messages
            except self._link.connection_errors as error:
                await self._patience.wait_or_give_up(self._explain_error(error))

    async def acknowledge(self, position: int) -> None:
        """As of `Part`. A failure passes: a later position says more, and the learner's own is the one that counts."""
        self._due = position
        with suppress(*self._link.connection_errors):
            await self._commit(position)
            self._due = None

    async def close(self) -> None:
        """Tell the broker the last position once more, if it is there."""
        if self._due is not None:
            with suppress(FailedPrecondition, DataError):
                await self.acknowledge(self._due)

    def _choose_start(self, oldest: int, newest: int, committed: int | None) -> int:
        """The position to read behind where the learner has none, as `START_SETTING` says.

        Args:
            oldest: before the oldest message.
            newest: of the newest one.
            committed: where the feeder before this one ended; None: there was none.
        """
        ends = {"committed": oldest if committed is None else committed, "start": oldest, "new": newest}
        return ends[self._link.source.settings[START_SETTING.name]]

    @abstractmethod
    async def _begin(self, after: int) -> int:
        """The position to read behind, given the learner's; -1: the learner has none."""

    @abstractmethod
    def _read_on(self, after: int) -> AsyncGenerator[Sequence[SourceMessage], None]:
        """Messages behind a position; it ends where reading must begin anew behind the last one."""

    @abstractmethod
    async def _commit(self, position: int) -> None:
        """Have the broker keep a position."""

    def _explain_error(self, error: BaseException) -> str:
        return str(self._link.explain_error(error))

    def _build_replaced_error(self, why: str) -> DataError:
        return DataError(f"{self._what} is not the one it was: {why}. Feed what it has now under another --source")


@asynccontextmanager
async def open_source(source: SourceConfig) -> AsyncIterator[list[SourcePartition]]:
    """Parts of a source, open while the block lasts.

    Raises:
        SpecError: an optional dependency is missing.
        FailedPrecondition: the broker refuses these credentials.
        DataError: it has no such source.
        Unavailable: it is away for too long.
    """
    assert source.feed.connect is not None  # noqa: S101 - it is a broker's
    link = source.feed.connect(source)
    patience, parts = _Patience(link.display_name, source.patience_s), list[BrokerPartition]()
    try:
        while True:
            try:
                parts = await link.start()
                break
            except link.connection_errors as error:
                await patience.wait_or_give_up(link.explain_error(error))
        yield list(parts)
    finally:
        for part in parts:
            await part.close()
        await link.close()


class _Patience:
    """How long a broker may be away. Its absence, its return and the subscription are logged once each time.

    Args:
        what: the broker in messages.
        seconds: that it may be away.
    """

    def __init__(self, what: str, seconds: float) -> None:
        self._what, self._seconds = what, seconds
        self._since: float | None = None
        self._pause, self._subscribed = _FIRST_PAUSE_S, False

    def log_subscription(self, source: str) -> None:
        """Note that the broker has answered, and that a source misses nothing from now on."""
        self.record_answer()
        if not self._subscribed:
            log.info("subscribed", broker=self._what, source=source)
        self._subscribed = True

    def record_answer(self) -> None:
        """Note that the broker has answered."""
        if self._since is not None:
            log.warning("the broker is back", broker=self._what)
        self._since, self._pause = None, _FIRST_PAUSE_S

    async def wait_or_give_up(self, why: str) -> None:
        """Note that the broker has not answered, and wait: longer each time.

        Args:
            why: in a few words.

        Raises:
            Unavailable: it is away for too long.
        """
        now, self._subscribed = asyncio.get_running_loop().time(), False
        if self._since is None:
            self._since = now
            log.warning("the broker is away", broker=self._what, why=why, patience_s=self._seconds)
        left = self._since + self._seconds - now
        if left <= 0:
            raise Unavailable(f"{self._what} was away for {self._seconds:g} s: {why}")
        await asyncio.sleep(min(self._pause, left))
        self._pause = min(2 * self._pause, _MAX_PAUSE_S)


class _Gone:
    """Number of messages that a source no longer had when they were due; it is logged whenever it has doubled.

    Args:
        what: the source in messages.
    """

    def __init__(self, what: str) -> None:
        self._what, self._logged = what, 0
        self.messages = 0

    def add(self, messages: int, *, at_most: bool = False) -> None:
        """Count messages.

        Args:
            messages: how many; 0: the number is not known.
            at_most: whether there were perhaps fewer.
        """
        self.messages += messages
        if self.messages >= 2 * self._logged:
            self._logged = self.messages
            number = "nobody knows how many" if not messages else f"{'up to ' * at_most}{self.messages}"
            log.warning("messages were gone before they were read", source=self._what, messages=number)


def shorten_error(error: object) -> str:
    """A failed call in a few words, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"
