"""Prometheus metrics of a service, computed when scraped, and the small server that answers `GET /metrics`.

A service lists its metrics once, in a `Catalogue`, and computes samples from plain numbers that it holds: between scrapes nothing
is done for them. Names, labels and numbers are this project's: a label is a validated name, or one of a few fixed words.

The server runs in the service's event loop. It takes all samples between two steps of the service, so they are consistent, and
renders the text in a thread. It accepts the callers that the service's other servers accept: with an identity, over TLS, monitors
and operators with a certificate; without one, this machine's user. One request per connection, within seconds. The server of
prometheus_client can check neither the role of a certificate nor the user of a process, and never reads renewed files.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from sottovoce_rpc.addresses import format_peer, is_loopback, parse_address
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import announce
from sottovoce_rpc.tasks import Tasks

EXTRA = "metrics"


class MetricSample(NamedTuple):
    """Value of a metric for one combination of labels."""

    metric: _Metric
    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True)
class _Metric:
    """A counter or gauge.

    Attributes:
        name: Prometheus name: with its unit, and `_total` for a counter.
        description: its meaning, in one sentence.
        labels: names of its labels.
    """

    name: str
    description: str
    labels: tuple[str, ...] = ()

    def sample(self, value: float, *labels: str) -> MetricSample:
        """Return a sample with a value for each label."""
        return MetricSample(self, labels, value)


@dataclass(slots=True)
class Catalogue:
    """Metrics of a service, in order.

    Args:
        prefix: prefix of their names.
    """

    prefix: str
    metrics: list[_Metric] = field(default_factory=list)

    def add_metric(self, name: str, text: str, *labels: str) -> _Metric:
        """Add a metric, and return it."""
        self.metrics.append(_Metric(f"{self.prefix}_{name}", text, labels))
        return self.metrics[-1]


COMMON_METRICS = Catalogue("sottovoce")
_BUILD = COMMON_METRICS.add_metric("build_info", "Always 1; the label has the running version.", "version")
_EXPIRY = COMMON_METRICS.add_metric(
    "certificate_expiry_timestamp_seconds", "Expiry of the certificate of an identity, in Unix time.", "identity"
)
_REFUSED = COMMON_METRICS.add_metric(
    "calls_refused_total",
    "Calls that were refused, because the caller is not trusted (untrusted), has a role that may not call the method (role), or "
    "does not meet the service's own condition (condition).",
    "reason",
)


def collect_common_metrics(credentials: Iterable[Credentials], refusals: Iterable[Refusals]) -> Iterator[MetricSample]:
    """Yield samples of the metrics that every service has.

    Args:
        credentials: credentials of this process.
        refusals: refused calls of its servers.
    """
    yield _BUILD.sample(1, _version())
    for each in credentials:
        try:
            principal, expires = each.principal, each.expiry
        except FailedPrecondition:  # the identity could not be loaded yet
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
    """Renderer of samples in Prometheus' text formats.

    Args:
        metrics: all metrics: one without a sample is listed, too, so that scrapers learn its name.
        include_process: add resource usage of the process.

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
        """Return the content type and the text of all metrics and their samples.

        Args:
            readings: samples.
            accepted: `Accept` header of the request.
        """
        encode, kind = self._exposition.choose_encoder(accepted)
        process = self._process.collect() if self._process else ()
        return kind, encode(_Registry([*self._build_families(readings), *process]))

    def _build_families(self, readings: Sequence[MetricSample]) -> Iterator[Any]:
        core, found = self._core, dict[str, Any]()
        for each in self._metrics:
            is_counter = each.name.endswith("_total")
            family = core.CounterMetricFamily if is_counter else core.GaugeMetricFamily
            found[each.name] = family(each.name.removesuffix("_total"), each.description, labels=each.labels)
        for metric, labels, value in readings:
            found[metric.name].add_metric(labels, value)
        yield from found.values()


@dataclass(frozen=True, slots=True)
class _Registry:
    """Registry interface that the client library's encoders require."""

    families: list[Any]

    def collect(self) -> list[Any]:
        return self.families


# ---- server ----------------------------------------------------------------------------------------------------------


SCRAPER_ROLES = frozenset({Role.MONITOR, Role.OPERATOR})
"""Roles that may scrape a service with an identity."""
_PATH = "/metrics"
_REQUEST_TIMEOUT_S, _MAX_CONNECTIONS, _MAX_HEAD_BYTES = 10.0, 32, 8 * 1024

CollectMetrics = Callable[[], Iterable[MetricSample]]


@dataclass(frozen=True, slots=True)
class MetricsEndpoint:
    """Address and options of a metrics server.

    Attributes:
        listen: `host:port`; port 0 picks a free one.
        credentials: credentials of the service.
        include_process: add resource usage of the process, which for a learner may depend on its records.
    """

    listen: str
    credentials: Credentials = field(default_factory=Credentials)
    include_process: bool = True

    def parse_listen_address(self) -> tuple[str, int]:
        """Return host and port.

        Raises:
            SpecError: the address is not valid.
        """
        return parse_address(self.listen, "--metrics", allow_port_zero=True)


@asynccontextmanager
async def serve_metrics(
    at: MetricsEndpoint | None, catalogue: Catalogue, read: CollectMetrics, refused: Refusals
) -> AsyncIterator[str]:
    """Serve metrics during the block; yield the address, which is announced on standard output too, or "" if there is none.

    Args:
        at: endpoint; None: no metrics are served.
        catalogue: metrics of the service.
        read: returns samples of all of them.
        refused: counts refused scrapes.

    Raises:
        SpecError: the address is not valid, other machines can reach it without an identity, or prometheus_client is missing.
        FailedPrecondition: the files of the identity cannot be used.
        Unavailable: the address cannot be listened on.
    """
    if at is None:
        yield ""
        return
    exposition = Exposition([*COMMON_METRICS.metrics, *catalogue.metrics], include_process=at.include_process)
    (host, port), secured = at.parse_listen_address(), at.credentials.build_tls_server_context(at.listen)
    async with Tasks() as tasks:
        handler = _Handler(at.credentials, exposition, read, refused, tasks)
        # asyncio requires None without TLS.
        handshake_timeout = _REQUEST_TIMEOUT_S if secured else None
        try:
            server = await asyncio.start_server(
                handler.accept, host, port, limit=_MAX_HEAD_BYTES, ssl=secured, ssl_handshake_timeout=handshake_timeout
            )
        except OSError as error:
            raise Unavailable(f"--metrics cannot listen on {at.listen}: {error.strerror or error}") from None
        try:
            handler.address = f"{at.listen.rpartition(':')[0]}:{server.sockets[0].getsockname()[1]}"
            announce("metrics", address=handler.address)
            yield handler.address
        finally:
            server.close()


class _HttpError(Exception):
    """Error response, with status and text."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(slots=True)
class _Handler:
    """Handler of scrape connections, with a maximum number of concurrent ones."""

    credentials: Credentials
    exposition: Exposition
    read: CollectMetrics
    refused: Refusals
    tasks: Tasks
    address: str = ""
    connections: int = 0

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a new connection, or abort it if there are too many."""
        if self.connections >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self.connections += 1
        self.tasks.start(self._serve(reader, writer), "metrics cannot be served")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
                async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                    writer.write(await self._answer(reader, writer))
                    await writer.drain()
                    writer.close()
        finally:
            self.connections -= 1
            if not writer.transport.is_closing():
                writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        try:
            # The head is read before the caller is checked: else a refused caller may be cut off before it has the answer.
            head = await _read_head(reader)
            await self._require_allowed(writer)
            headers = _parse_head(head)
            if self.credentials.folder is None and not self.credentials.insecure:
                _require_local_host(headers.get("host", ""))
            readings: Sequence[MetricSample] = tuple(self.read())
            kind, text = await asyncio.to_thread(self.exposition.render_text, readings, headers.get("accept", ""))
            return _build_response(HTTPStatus.OK, kind, text)
        except _HttpError as refused:
            return _build_response(refused.status, "text/plain; charset=utf-8", f"{refused}\n".encode())

    async def _require_allowed(self, writer: asyncio.StreamWriter) -> None:
        """Raise `_HttpError` for a caller that may not read metrics."""
        transport, peer = writer.transport, format_peer(writer.transport)
        try:
            caller = await asyncio.to_thread(self.credentials.authenticate_connection, transport, [self.address])
        except (PermissionDenied, Unavailable) as error:
            self.refused.record_refusal(UNTRUSTED, method=_PATH, caller=str(error), peer=peer)
            text = "this service does not trust the caller's certificate"
            text = "these metrics are another user's" if self.credentials.folder is None else text
            raise _HttpError(HTTPStatus.FORBIDDEN, text) from None
        if caller is None:
            return
        if caller.role not in SCRAPER_ROLES or caller.is_foreign:
            self.refused.record_refusal(ROLE, method=_PATH, caller=str(caller), peer=peer)
            wanted = " and ".join(sorted(SCRAPER_ROLES)) + (" of this trust domain" if caller.is_foreign else "")
            raise _HttpError(HTTPStatus.FORBIDDEN, f"metrics are for {wanted}, not for {caller}")


async def _read_head(reader: asyncio.StreamReader) -> str:
    """Read request line and headers; the body is never read.

    Raises:
        _HttpError: they are too long.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise _HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"at most {_MAX_HEAD_BYTES} bytes") from None
    return head.decode("latin-1")


def _parse_head(head: str) -> dict[str, str]:
    """Return the headers of a request for metrics.

    Raises:
        _HttpError: it requests something else.
    """
    first, *lines = head.split("\r\n")
    method, _, rest = first.partition(" ")
    path, _, protocol = rest.partition(" ")
    if not protocol.startswith("HTTP/1."):
        raise _HttpError(HTTPStatus.BAD_REQUEST, "the request must be HTTP/1.1")
    if path.partition("?")[0] != _PATH:
        raise _HttpError(HTTPStatus.NOT_FOUND, f"the path must be {_PATH}")
    if method != "GET":
        raise _HttpError(HTTPStatus.METHOD_NOT_ALLOWED, "the method must be GET")
    pairs = (line.partition(":") for line in lines if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _require_local_host(header: str) -> None:
    """Raise `_HttpError` for a foreign host name that was made to resolve to this machine (DNS rebinding by a web page)."""
    name, _, port = header.rpartition(":")
    if not is_loopback(f"{name if port.isdecimal() else header}:0"):
        raise _HttpError(HTTPStatus.MISDIRECTED_REQUEST, "the host must be a name of this machine")


def _build_response(status: HTTPStatus, kind: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
