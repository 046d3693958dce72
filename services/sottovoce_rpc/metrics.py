"""Metrics of a service for Prometheus, made when a scraper asks for them, and the small server that answers `GET /metrics`.

A service lists its metrics once, in a `Catalogue`, and gives readings of them from plain numbers that it holds: nothing is done
for them in between. Names, labels and numbers are of ours: a label is a name that a rule allows, or one of a few words.

The server runs in the service's own loop. It takes readings between two steps of the service, so they fit each other, and makes
their text in a thread. It takes the callers that the service's other servers take: with an identity, over TLS, monitors and
operators who show a certificate; without one this machine's user. One request a connection, within seconds. The server of
prometheus_client can check neither the role of a certificate nor the user of a process, and never reads renewed files.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, NamedTuple

from sottovoce_core.errors import FailedPrecondition, PermissionDenied, Unavailable
from sottovoce_core.optional import import_optional
from sottovoce_rpc.access import ROLE, UNTRUSTED, Refusals
from sottovoce_rpc.addresses import is_loopback, is_same_user, parse_address
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import announce
from sottovoce_rpc.tasks import Tasks

EXTRA = "metrics"


class MetricSample(NamedTuple):
    """What a metric is now, of what its labels name."""

    metric: _Metric
    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True)
class _Metric:
    """Something that is counted or measured.

    Attributes:
        name: as Prometheus has it: with its unit, and `_total` where it only grows.
        text: what it means, in a sentence.
        labels: what tells its series apart.
    """

    name: str
    description: str
    labels: tuple[str, ...] = ()

    def sample(self, value: float, *labels: str) -> MetricSample:
        """A reading, with a value for each label."""
        return MetricSample(self, labels, value)


@dataclass(slots=True)
class Catalogue:
    """The metrics of a service, in their order.

    Args:
        prefix: of their names.
    """

    prefix: str
    metrics: list[_Metric] = field(default_factory=list)

    def add_metric(self, name: str, text: str, *labels: str) -> _Metric:
        """One more."""
        self.metrics.append(_Metric(f"{self.prefix}_{name}", text, labels))
        return self.metrics[-1]


COMMON_METRICS = Catalogue("sottovoce")
_BUILD = COMMON_METRICS.add_metric("build_info", "Always 1; the version that runs.", "version")
_EXPIRY = COMMON_METRICS.add_metric(
    "certificate_expiry_timestamp_seconds", "When the certificate of an identity ends, in Unix time.", "identity"
)
_REFUSED = COMMON_METRICS.add_metric(
    "calls_refused_total",
    "Calls that were refused, for whoever called is not believed (stranger), has another role than it takes (role), or is "
    "not the one that the service takes (condition).",
    "reason",
)


def collect_common_metrics(credentials: Iterable[Credentials], refusals: Iterable[Refusals]) -> Iterator[MetricSample]:
    """Of any service.

    Args:
        credentials: of this process.
        refused: whom its servers refused.
    """
    yield _BUILD.sample(1, _version())
    for each in credentials:
        try:
            principal, expires = each.principal, each.expiry
        except FailedPrecondition:  # it has not begun
            continue
        if principal is not None and expires is not None:
            yield _EXPIRY.sample(expires.timestamp(), str(principal))
    totals = [each.counts_by_reason for each in refusals]
    for reason in Refusals().counts_by_reason:
        yield _REFUSED.sample(sum(each[reason] for each in totals), reason)


@cache
def _version() -> str:
    return version("sottovoce")


class Exposition:
    """Readings in Prometheus' words.

    Args:
        metrics: all that there are: one without a reading is told, too, so that whoever asks knows its name.
        process: whether to tell what the process has used of its machine.

    Raises:
        SpecError: prometheus_client is not installed.
    """

    def __init__(self, metrics: Sequence[_Metric], *, include_process: bool) -> None:
        client, self._exposition, self._core = (
            import_optional(name, "prometheus_client", "--metrics", EXTRA)
            for name in ("prometheus_client", "prometheus_client.exposition", "prometheus_client.core")
        )
        self._metrics = metrics
        self._process = client.ProcessCollector(registry=None) if include_process else None

    def render_text(self, readings: Sequence[MetricSample], accepted: str = "") -> tuple[str, bytes]:
        """The type of a text and the text: all metrics, and the readings that there are of each.

        Args:
            readings: of them.
            accepted: types that whoever asks knows.
        """
        encode, kind = self._exposition.choose_encoder(accepted)
        return kind, encode(_Registry([*self._families(readings), *(self._process.collect() if self._process else ())]))

    def _families(self, readings: Sequence[MetricSample]) -> Iterator[Any]:
        core, found = self._core, dict[str, Any]()
        for each in self._metrics:
            counts = each.name.endswith("_total")
            family = core.CounterMetricFamily if counts else core.GaugeMetricFamily
            found[each.name] = family(each.name.removesuffix("_total"), each.description, labels=each.labels)
        for metric, labels, value in readings:
            found[metric.name].add_metric(labels, value)
        yield from found.values()


@dataclass(frozen=True, slots=True)
class _Registry:
    """What the client's encoders ask for."""

    families: list[Any]

    def collect(self) -> list[Any]:
        return self.families


# ---- their server ----------------------------------------------------------------------------------------------------


SCRAPER_ROLES = frozenset({Role.MONITOR, Role.OPERATOR})
"""Who may ask, where there is an identity."""
_PATH = "/metrics"
_REQUEST_TIMEOUT_S, _MAX_CONNECTIONS, _MAX_HEAD_BYTES = 10.0, 32, 8 * 1024

CollectMetrics = Callable[[], Iterable[MetricSample]]


@dataclass(frozen=True, slots=True)
class MetricsEndpoint:
    """Where metrics are served.

    Attributes:
        listen: `host:port`; port 0 picks one.
        credentials: of the service.
        process: whether to tell what the process has used of its machine: of a learner that may depend on its records.
    """

    listen: str
    credentials: Credentials = field(default_factory=Credentials)
    include_process: bool = True

    def parse_listen_address(self) -> tuple[str, int]:
        """Host and port.

        Raises:
            SpecError: there are none.
        """
        return parse_address(self.listen, "--metrics", allow_port_zero=True)


@asynccontextmanager
async def serve_metrics(
    at: MetricsEndpoint | None, catalogue: Catalogue, read: CollectMetrics, refused: Refusals
) -> AsyncIterator[str]:
    """Serve metrics while the block lasts, and say where, on standard output too; empty: nowhere.

    Args:
        at: where; None: nowhere.
        catalogue: of the service.
        read: gives readings of all of it.
        refused: counts who may not ask.

    Raises:
        SpecError: this is no address, others can reach it and there is no identity, or prometheus_client is not installed.
        FailedPrecondition: the files of the identity cannot be used.
        Unavailable: the address cannot be listened on.
    """
    if at is None:
        yield ""
        return
    exposition = Exposition([*COMMON_METRICS.metrics, *catalogue.metrics], include_process=at.include_process)
    (host, port), secured = at.parse_listen_address(), at.credentials.build_https_server_context(at.listen)
    async with Tasks() as tasks:
        door = _Door(at.credentials, exposition, read, refused, tasks)
        # To be None in the clear, too: it is an error to say how long a handshake may take that there is not.
        patience = _REQUEST_TIMEOUT_S if secured else None
        try:
            server = await asyncio.start_server(
                door.enter, host, port, limit=_MAX_HEAD_BYTES, ssl=secured, ssl_handshake_timeout=patience
            )
        except OSError as error:
            raise Unavailable(f"--metrics cannot listen on {at.listen}: {error.strerror or error}") from None
        try:
            door.address = f"{at.listen.rpartition(':')[0]}:{server.sockets[0].getsockname()[1]}"
            announce("metrics", address=door.address)
            yield door.address
        finally:
            server.close()


class _Refused(Exception):
    """With a status, and why."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(slots=True)
class _Door:
    """Answers whoever asks, one after the other and all at once, up to a few."""

    credentials: Credentials
    exposition: Exposition
    read: CollectMetrics
    refused: Refusals
    tasks: Tasks
    address: str = ""
    inside: int = 0

    def enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Somebody has connected."""
        if self.inside >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self.inside += 1
        self.tasks.start(self._serve(reader, writer), "metrics cannot be told")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
                async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                    writer.write(await self._answer(reader, writer))
                    await writer.drain()
                    writer.close()
        finally:
            self.inside -= 1
            if not writer.transport.is_closing():
                writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        try:
            head = await _head(
                reader
            )  # first: whoever is refused before it was read may be cut off before it has the answer
            await self._require_known(writer)
            headers = _asked(head)
            if self.credentials.folder is None and not self.credentials.insecure:
                _require_own_host(headers.get("host", ""))
            readings: Sequence[MetricSample] = tuple(self.read())
            kind, text = await asyncio.to_thread(self.exposition.render_text, readings, headers.get("accept", ""))
            return _response(HTTPStatus.OK, kind, text)
        except _Refused as refused:
            return _response(refused.status, "text/plain; charset=utf-8", f"{refused}\n".encode())

    async def _require_known(self, writer: asyncio.StreamWriter) -> None:
        """Raises `_Refused` where somebody asks who may not."""
        tls: ssl.SSLObject | None = writer.get_extra_info("ssl_object")
        host, port = writer.get_extra_info("peername")[:2]
        peer = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
        if tls is None:
            if self.credentials.insecure or await asyncio.to_thread(is_same_user, peer, [self.address]):
                return
            self.refused.record_refusal(UNTRUSTED, method=_PATH, caller="another user of this machine", peer=peer)
            raise _Refused(HTTPStatus.FORBIDDEN, "these metrics are another user's")
        try:
            caller = self.credentials.authenticate_certificate(*_shown(tls))
        except (PermissionDenied, Unavailable) as error:
            self.refused.record_refusal(UNTRUSTED, method=_PATH, caller=str(error), peer=peer)
            raise _Refused(HTTPStatus.FORBIDDEN, "whoever asks is not believed here") from None
        if caller.role not in SCRAPER_ROLES or caller.is_foreign:
            self.refused.record_refusal(ROLE, method=_PATH, caller=str(caller), peer=peer)
            wanted = " and ".join(sorted(SCRAPER_ROLES)) + (" of this trust domain" if caller.is_foreign else "")
            raise _Refused(HTTPStatus.FORBIDDEN, f"metrics are for {wanted}, not for {caller}")


def _shown(tls: ssl.SSLObject) -> tuple[bytes, bytes]:
    """The certificate of whoever connected, and its chain, in PEM."""
    # Until Python 3.13 the chain is there, but under a private name alone.
    chain = getattr(tls, "get_unverified_chain", None) or tls._sslobj.get_unverified_chain  # type: ignore[attr-defined]
    der = (each if isinstance(each, bytes) else each.public_bytes(2) for each in chain() or ())
    own, *between = (ssl.DER_cert_to_PEM_cert(each).encode() for each in der)
    return own, b"".join(between)


async def _head(reader: asyncio.StreamReader) -> str:
    """All of a request but for its body, of which nothing is read.

    Raises:
        _Refused: it is too long.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise _Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"at most {_MAX_HEAD_BYTES} bytes") from None
    return head.decode("latin-1")


def _asked(head: str) -> dict[str, str]:
    """The headers of a request for metrics.

    Raises:
        _Refused: it asks for something else.
    """
    first, *lines = head.split("\r\n")
    method, _, rest = first.partition(" ")
    path, _, protocol = rest.partition(" ")
    if not protocol.startswith("HTTP/1."):
        raise _Refused(HTTPStatus.BAD_REQUEST, "this is HTTP/1.1")
    if path.partition("?")[0] != _PATH:
        raise _Refused(HTTPStatus.NOT_FOUND, f"there is {_PATH} alone")
    if method != "GET":
        raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, "GET alone")
    pairs = (line.partition(":") for line in lines if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _require_own_host(header: str) -> None:
    """Raises `_Refused` for a name of somebody's that was made to lead here: a page in a browser asks."""
    name, _, port = header.rpartition(":")
    if not is_loopback(f"{name if port.isdecimal() else header}:0"):
        raise _Refused(HTTPStatus.MISDIRECTED_REQUEST, "this answers under the names of this machine alone")


def _response(status: HTTPStatus, kind: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
