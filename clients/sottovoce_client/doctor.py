"""`sottovoce doctor`: checks of a deployment, run from this machine, with advice for each problem."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import grpc
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.text import Text

from sottovoce_client import terminal
from sottovoce_client.feeding.broker import load_feeds
from sottovoce_client.formatting import format_count
from sottovoce_core.errors import CorruptStateError, SottovoceError
from sottovoce_core.text import escape_control
from sottovoce_learner.storage.store import Ledger
from sottovoce_rpc.access import UNTRUSTED_CALLER_TEXT
from sottovoce_rpc.addresses import is_loopback
from sottovoce_rpc.certificates import AUTHORITIES_FILE, CERTIFICATE_FILE, REVOCATION_FILE
from sottovoce_rpc.credentials import EXPIRY_WARNING_PERIOD, Credentials
from sottovoce_rpc.error_status import convert_status_error, explain_handshake_failure
from sottovoce_rpc.logs import is_open_to_others
from sottovoce_rpc.metrics import MetricsEndpoint
from sottovoce_rpc.principals import Principal, Role
from sottovoce_rpc.server import open_channel
from sottovoce_rpc.tasks import await_answer
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc

State = Literal["ok", "warning", "error"]
_SIGNS: Mapping[State, tuple[str, str]] = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "error": ("✗", "red")}
_REQUEST_TIMEOUT_S = 10.0
_MAX_CLOCK_SKEW_S = 30.0
"""Maximum difference between two clocks: certificates start a few minutes early, and users compare times of runs."""
_MAX_METRICS_BYTES = 16 * 1024**2
"""Maximum number of bytes read of a metrics response."""
_MIN_FREE_BYTES = 1024**3
"""Free bytes on the disk of a state folder below which doctor warns."""
_EXTRAS = {
    "audit": ("pyarrow", "jinja2", "matplotlib", "requests", "scipy"),
    "fast": ("uvloop",),
    "accounting": ("dp_accounting",),
    "metrics": ("prometheus_client",),
    "query": ("duckdb",),
    "track": ("mlflow", "wandb"),
    "trace": ("opentelemetry.sdk", "opentelemetry.exporter"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check.

    Attributes:
        subject: The checked item.
        state: Outcome.
        text: Details; for a warning or an error also what to do.
    """

    subject: str
    state: State
    text: str


@dataclass(frozen=True, slots=True)
class CheckTargets:
    """Targets of the checks.

    Attributes:
        credentials: Credentials of the caller.
        services: Roles and addresses of services.
        state_folders: State folders of learners.
        metrics_addresses: Addresses of metrics endpoints.
    """

    credentials: Credentials
    services: Sequence[tuple[Role, str]] = ()
    state_folders: Sequence[Path] = ()
    metrics_addresses: Sequence[str] = ()


async def run_checks(targets: CheckTargets) -> list[Finding]:
    """Run all checks of the targets."""
    found = [*_check_installation(), *_check_identity(targets.credentials)]
    for folder in targets.state_folders:
        found += await asyncio.to_thread(lambda own: list(_check_state_folder(own)), folder)
    remote = await asyncio.gather(
        *(_check_service(*each, targets.credentials) for each in targets.services),
        *(_check_metrics(each, targets.credentials) for each in targets.metrics_addresses),
    )
    return found + [finding for findings in remote for finding in findings]


def print_findings(findings: Sequence[Finding], console: Console) -> int:
    """Print a table of the findings.

    Returns:
        The exit code: 1 if there is an error.
    """
    table = terminal.create_table()
    for head in ("", "check", "result"):
        table.add_column(head, overflow="fold")
    for each in findings:
        table.add_row(Text(*_SIGNS[each.state]), Text(each.subject), Text(each.text))
    console.print(table)
    errors, warnings = (sum(each.state == state for each in findings) for state in ("error", "warning"))
    console.print("no problems" if not errors + warnings else f"{errors} errors, {warnings} warnings")
    return 1 if errors else 0


# ---- this machine ---------------------------------------------------------------------------------------------


def _check_installation() -> Iterator[Finding]:
    own, grpcio = (importlib.metadata.version(name) for name in ("sottovoce", "grpcio"))
    yield Finding("versions", "ok", f"sottovoce {own}, Python {platform.python_version()}, grpcio {grpcio}")
    extras = {extra: [*names] for extra, names in _EXTRAS.items()}
    for feed in load_feeds():
        extras.setdefault(feed.extra, []).extend(feed.modules)
    missing = [extra for extra, names in extras.items() if not all(map(_is_installed, names))]
    text = ", ".join(extra for extra in extras if extra not in missing) or "none"
    if missing:
        text += f"; not installed: {', '.join(missing)}"
    yield Finding("extras", "ok", text)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not installed
        return False


def _check_identity(credentials: Credentials) -> Iterator[Finding]:
    folder = credentials.folder
    try:
        own = credentials.load_identity()
    except SottovoceError as error:
        yield Finding("identity", "error", str(error))
        return
    if folder is None or own is None:
        text = (
            "none: only this user's services on this machine accept it; with --insecure also others, without encryption"
        )
        yield Finding("identity", "warning" if credentials.insecure else "ok", text)
        return
    principal = own.principal
    if own.is_revoked:
        text = f"{principal} of {principal.domain} was revoked by {REVOCATION_FILE}, so services refuse it: issue a new one"
        yield Finding("identity", "error", text)
    else:
        yield _check_expiry("identity", principal, own.expiry)
    if not own.is_rooted:
        text = (
            f"{CERTIFICATE_FILE} has no chain to an authority of {AUTHORITIES_FILE}: add the intermediate certificates"
        )
        yield Finding("chain", "warning", text)
    yield from _check_authorities({domain: pem.count(b"BEGIN") for domain, pem in own.bundles.items()})
    if not (folder / REVOCATION_FILE).exists():
        yield Finding("revoked", "warning", f"no {REVOCATION_FILE}: revoked identities are still accepted here")


def _check_authorities(domains: Mapping[str, int]) -> Iterator[Finding]:
    """Report the authorities by trust domain, if there are several."""
    if len(domains) > 1:
        counts = ", ".join(f"{format_count(number)} of {domain}" for domain, number in domains.items() if domain)
        yield Finding("authorities", "ok", f"{counts}: each is trusted only for its own trust domain")
    if "" in domains:
        text = f"{AUTHORITIES_FILE} has {format_count(domains[''])} without a trust domain: not trusted, because others name one"
        yield Finding("authorities", "warning", text)


def _check_expiry(subject: str, principal: Principal, expires: datetime) -> Finding:
    """Report the principal of a certificate, and whether it expires soon."""
    text = f"{principal} of {principal.domain}, until {expires:%Y-%m-%d %H:%M} UTC"
    if expires - datetime.now(UTC) < EXPIRY_WARNING_PERIOD:
        return Finding(subject, "warning", f"{text}: renew it")
    return Finding(subject, "ok", text)


def _check_state_folder(folder: Path) -> Iterator[Finding]:
    subject = f"state {folder}"
    if not folder.is_dir():
        yield Finding(subject, "error", "there is no such folder: give the --state folder of the learner")
        return
    if is_open_to_others(folder):
        yield Finding(subject, "warning", "other users can read it, and it may hold records: chmod 700 it")
    if not os.access(folder, os.W_OK):
        yield Finding(subject, "error", "it cannot be written: the learner would send no messages")
    free = shutil.disk_usage(folder).free
    state: State = "ok" if free >= _MIN_FREE_BYTES else "warning"
    yield Finding(f"{subject}: disk", state, f"{free / 1e9:.1f} GB free")
    for name in Ledger(folder).list_learners():
        try:
            runs = Ledger(folder).verify(name, imports=False)
            yield Finding(f"{subject}: {name}", "ok", f"{len(runs)} runs in its ledger: the ledger is complete")
        except CorruptStateError as error:
            yield Finding(f"{subject}: {name}", "error", str(error))


# ---- services -------------------------------------------------------------------------------------------------


async def _check_service(role: Role, address: str, credentials: Credentials) -> list[Finding]:
    subject = f"{role} {address}"
    try:
        async with open_channel(address, role, credentials=credentials) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            call = stub.Check(health_pb2.HealthCheckRequest(), timeout=_REQUEST_TIMEOUT_S)
            answer = await await_answer(call, channel, f"the {role} at {address}", terminal.print_notice)
            found = [_check_health(subject, answer.status)]
            if role is Role.COORDINATOR:
                found += await _check_clock(subject, channel)
            return found
    except grpc.aio.AioRpcError as error:
        text = str(convert_status_error(error, f"the {role} at {address}"))
        if text == UNTRUSTED_CALLER_TEXT:
            text += ": this identity was revoked, or is of another deployment; `sottovoce pki show` at its authority shows which"
        return [Finding(subject, "error", text)]
    except SottovoceError as error:
        return [Finding(subject, "error", str(error))]


def _check_health(subject: str, status: int) -> Finding:
    if status == health_pb2.HealthCheckResponse.SERVING:
        return Finding(subject, "ok", "it answers")
    return Finding(subject, "warning", "it answers, and is shutting down")


async def _check_clock(subject: str, channel: grpc.aio.Channel) -> list[Finding]:
    """Compare a coordinator's clock with this machine's; only an operator is authorised."""
    before = datetime.now(UTC)
    try:
        request = coordinator_pb2.ListRunsRequest(page_size=1)
        answer = await coordinator_pb2_grpc.CoordinatorStub(channel).ListRuns(request, timeout=_REQUEST_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            return []
        raise
    now = datetime.now(UTC)
    middle = before + (now - before) / 2
    off = abs((answer.now.ToDatetime(UTC) - middle).total_seconds()) - (now - before).total_seconds() / 2
    if off > _MAX_CLOCK_SKEW_S:
        text = f"it differs by {off:.0f} s from this machine's, so certificates may seem invalid: set both by NTP"
        return [Finding(f"{subject}: clock", "error", text)]
    return [Finding(f"{subject}: clock", "ok", "as this machine's")]


# ---- metrics --------------------------------------------------------------------------------------------------


class _Answer(NamedTuple):
    """Response to a request for metrics.

    Attributes:
        status: HTTP status; 0: the response is not HTTP.
        body: Metrics, or the reason of a refusal.
        certificate: Server certificate, DER; empty: none was presented.
    """

    status: int
    body: str
    certificate: bytes


async def _check_metrics(address: str, credentials: Credentials) -> list[Finding]:
    """Check a metrics endpoint, its certificate, and whether its channel is encrypted."""
    subject = f"metrics {address}"
    try:
        answer = await asyncio.to_thread(_request_metrics, address, credentials.build_tls_client_context())
        found = [_check_answer(subject, answer)]
        if answer.certificate:
            certificate = x509.load_der_x509_certificate(answer.certificate)
            principal = credentials.authenticate_certificate(ssl.DER_cert_to_PEM_cert(answer.certificate).encode())
            found.append(_check_expiry(f"{subject}: certificate", principal, certificate.not_valid_after_utc))
        elif not is_loopback(address):
            text = "not encrypted: others on the network can read and change them; give the service an identity (--identity)"
            found.append(Finding(f"{subject}: channel", "warning", text))
        return found
    except SottovoceError as error:
        return [Finding(subject, "error", str(error))]
    except (OSError, TimeoutError) as error:
        return [Finding(subject, "error", _explain_failure(error))]


def _request_metrics(address: str, tls: ssl.SSLContext | None) -> _Answer:
    """Request metrics without TLS, then, as a TLS server ends that at once, over TLS.

    Raises:
        SpecError: The address is malformed.
        OSError: The server does not answer in time, or one side does not trust the other.
    """
    host, port = MetricsEndpoint(address).parse_listen_address()
    answer = _send_request(HTTPConnection(host, port, timeout=_REQUEST_TIMEOUT_S))
    if answer.status or tls is None:
        return answer
    return _send_request(HTTPSConnection(host, port, timeout=_REQUEST_TIMEOUT_S, context=tls))


def _send_request(connection: HTTPConnection) -> _Answer:
    certificate = b""
    with contextlib.closing(connection):
        connection.connect()
        if isinstance(connection.sock, ssl.SSLSocket):
            certificate = connection.sock.getpeercert(True) or b""
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            return _Answer(answer.status, answer.read(_MAX_METRICS_BYTES).decode(errors="replace"), certificate)
        except (HTTPException, ConnectionResetError):
            return _Answer(0, "", certificate)


def _check_answer(subject: str, answer: _Answer) -> Finding:
    if answer.status == 200 and "sottovoce_build_info" in answer.body:
        series = sum(bool(line) and not line.startswith("#") for line in answer.body.splitlines())
        return Finding(subject, "ok", f"it answers: {series} series")
    if answer.status == 403:
        return Finding(subject, "warning", f"it refuses this caller: {escape_control(answer.body.strip())}")
    if not answer.status and not answer.certificate:
        text = "no answer without TLS: its channel may be encrypted, and this process has no identity (--identity)"
        return Finding(subject, "error", text)
    return Finding(subject, "error", f"no Sottovoce service answers there: HTTP status {answer.status or 'none'}")


def _explain_failure(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (
            explain_handshake_failure(str(error))
            or f"the handshake failed: {escape_control(error.reason or str(error))}"
        )
    if isinstance(error, TimeoutError):
        return f"no answer within {_REQUEST_TIMEOUT_S:g} s"
    return (
        f"it cannot be reached ({escape_control(str(error))}): is it running with --metrics, and is the address right?"
    )
