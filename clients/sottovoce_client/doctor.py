"""`sottovoce doctor`: what of a deployment is not as it must be, seen from this machine, and what to do about it."""

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

State = Literal["well", "warning", "wrong"]
_SIGNS: Mapping[State, tuple[str, str]] = {"well": ("✓", "green"), "warning": ("!", "yellow"), "wrong": ("✗", "red")}
_REQUEST_TIMEOUT_S = 10.0
_MAX_CLOCK_SKEW_S = 30.0
"""Between two clocks: certificates begin a few minutes before they are issued, and times of runs are compared by people."""
_MAX_METRICS_BYTES = 16 * 1024**2
"""Bytes of an answer that are read."""
_MIN_FREE_BYTES = 1024**3
"""Bytes on a disk with a state folder."""
_EXTRAS = {
    "audit": ("pyarrow", "jinja2", "matplotlib", "requests", "scipy"),
    "fast": ("uvloop",),
    "accounting": ("dp_accounting",),
    "metrics": ("prometheus_client",),
    "query": ("duckdb",),
    "trace": ("opentelemetry.sdk", "opentelemetry.exporter"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at.

    Attributes:
        what: it is.
        state: whether it is as it must be.
        text: what was found; where that is not well, also what to do.
    """

    subject: str
    state: State
    text: str


@dataclass(frozen=True, slots=True)
class CheckTargets:
    """What is looked at; what is not given is not.

    Attributes:
        credentials: of whoever asks.
        services: addresses of services, by role.
        states: state folders of learners.
        metrics: addresses at which services tell metrics.
    """

    credentials: Credentials
    services: Sequence[tuple[Role, str]] = ()
    state_folders: Sequence[Path] = ()
    metrics_addresses: Sequence[str] = ()


async def run_checks(targets: CheckTargets) -> list[Finding]:
    """Look at everything that was given."""
    found = [*_installed(), *_identity(targets.credentials)]
    for folder in targets.state_folders:
        found += await asyncio.to_thread(lambda own: list(_state(own)), folder)
    services = [_service(*each, targets.credentials) for each in targets.services]
    asked = await asyncio.gather(
        *services, *(_metrics(each, targets.credentials) for each in targets.metrics_addresses)
    )
    return found + [finding for findings in asked for finding in findings]


def print_findings(findings: Sequence[Finding], console: Console) -> int:
    """Print what was found.

    Returns:
        The exit code: 1 if anything is wrong.
    """
    table = terminal.create_table()
    for head in ("", "what", "found"):
        table.add_column(head, overflow="fold")
    for each in findings:
        table.add_row(Text(*_SIGNS[each.state]), Text(each.subject), Text(each.text))
    console.print(table)
    wrong, warned = (sum(each.state == state for each in findings) for state in ("wrong", "warning"))
    console.print("all is well" if not wrong + warned else f"{wrong} wrong, {warned} to look at")
    return 1 if wrong else 0


# ---- this machine ---------------------------------------------------------------------------------------------


def _installed() -> Iterator[Finding]:
    own, grpcio = (importlib.metadata.version(name) for name in ("sottovoce", "grpcio"))
    yield Finding("versions", "well", f"sottovoce {own}, Python {platform.python_version()}, grpcio {grpcio}")
    extras = {extra: [*names] for extra, names in _EXTRAS.items()}
    for feed in load_feeds():
        extras.setdefault(feed.extra, []).extend(feed.modules)
    lacking = [extra for extra, names in extras.items() if not all(map(_there, names))]
    there = [extra for extra in extras if extra not in lacking]
    text = ", ".join(there) or "none"
    if lacking:
        text += f"; not installed: {', '.join(lacking)}"
    yield Finding("extras", "well", text)


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor is there what it is part of
        return False


def _identity(credentials: Credentials) -> Iterator[Finding]:
    folder = credentials.folder
    try:
        own = credentials.load_identity()
    except SottovoceError as error:
        yield Finding("identity", "wrong", str(error))
        return
    if folder is None or own is None:
        text = "none: only services of this user on this machine can be asked, or with --insecure any in the clear"
        yield Finding("identity", "warning" if credentials.insecure else "well", text)
        return
    principal = own.principal
    if own.is_revoked:
        text = f"{principal} of {principal.domain} was revoked, by {REVOCATION_FILE}: no service believes it; have another one issued"
        yield Finding("identity", "wrong", text)
    else:
        yield _certificate("identity", principal, own.expiry)
    if not own.is_rooted:
        text = f"{CERTIFICATE_FILE} leads to no authority of {AUTHORITIES_FILE}: others may refuse it; are those between missing from it?"
        yield Finding("chain", "warning", text)
    yield from _authorities({domain: pem.count(b"BEGIN") for domain, pem in own.bundles.items()})
    if not (folder / REVOCATION_FILE).exists():
        yield Finding("revoked", "warning", f"no {REVOCATION_FILE}: whoever was revoked is still believed here")


def _authorities(domains: Mapping[str, int]) -> Iterator[Finding]:
    """For which trust domains authorities are believed, where there are several."""
    if len(domains) > 1:
        told = ", ".join(f"{format_count(number)} of {domain}" for domain, number in domains.items() if domain)
        yield Finding("authorities", "well", f"{told}: each is believed for its own trust domain alone")
    if "" in domains:
        text = f"{AUTHORITIES_FILE} has {format_count(domains[''])} that name no trust domain, and are believed for nobody, for others do"
        yield Finding("authorities", "warning", text)


def _certificate(what: str, principal: Principal, expires: datetime) -> Finding:
    """Whose it is, and whether it ends soon."""
    text = f"{principal} of {principal.domain}, until {expires:%Y-%m-%d %H:%M} UTC"
    if expires - datetime.now(UTC) < EXPIRY_WARNING_PERIOD:
        return Finding(what, "warning", f"{text}: renew it")
    return Finding(what, "well", text)


def _state(folder: Path) -> Iterator[Finding]:
    """A learner's state folder."""
    what = f"state {folder}"
    if not folder.is_dir():
        yield Finding(what, "wrong", "there is no such folder: give what the learner was started with as --state")
        return
    if is_open_to_others(folder):
        yield Finding(what, "warning", "other users may look into it, and it may hold records: chmod 700 it")
    if not os.access(folder, os.W_OK):
        yield Finding(what, "wrong", "it cannot be written: the learner would say nothing")
    free = shutil.disk_usage(folder).free
    state: State = "well" if free >= _MIN_FREE_BYTES else "warning"
    yield Finding(f"{what}: disk", state, f"{free / 1e9:.1f} GB free")
    for name in Ledger(folder).list_learners():
        try:
            runs = Ledger(folder).verify(name, imports=False)
            yield Finding(f"{what}: {name}", "well", f"{len(runs)} runs in its ledger: nothing is lost")
        except CorruptStateError as error:
            yield Finding(f"{what}: {name}", "wrong", str(error))


# ---- services -------------------------------------------------------------------------------------------------


async def _service(role: Role, address: str, credentials: Credentials) -> list[Finding]:
    what = f"{role} {address}"
    try:
        async with open_channel(address, role, credentials=credentials) as to:
            stub: Any = health_pb2_grpc.HealthStub(to)
            call = stub.Check(health_pb2.HealthCheckRequest(), timeout=_REQUEST_TIMEOUT_S)
            answer = await await_answer(call, to, f"the {role} at {address}", terminal.print_notice)
            found = [_health(what, answer.status)]
            if role is Role.COORDINATOR:
                found += await _clock(what, to)
            return found
    except grpc.aio.AioRpcError as error:
        text = str(convert_status_error(error, f"the {role} at {address}"))
        if text == UNTRUSTED_CALLER_TEXT:
            text += ": this identity was revoked, or is of another deployment; `sottovoce pki show` at its authority says which"
        return [Finding(what, "wrong", text)]
    except SottovoceError as error:
        return [Finding(what, "wrong", str(error))]


def _health(what: str, status: int) -> Finding:
    if status == health_pb2.HealthCheckResponse.SERVING:
        return Finding(what, "well", "it answers")
    return Finding(what, "warning", "it is there, and about to end")


async def _clock(what: str, to: grpc.aio.Channel) -> list[Finding]:
    """How far a coordinator's clock is from this one; only an operator may ask."""
    before = datetime.now(UTC)
    try:
        request = coordinator_pb2.ListRunsRequest(page_size=1)
        answer = await coordinator_pb2_grpc.CoordinatorStub(to).ListRuns(request, timeout=_REQUEST_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            return []
        raise
    now = datetime.now(UTC)
    middle = before + (now - before) / 2
    off = abs((answer.now.ToDatetime(UTC) - middle).total_seconds()) - (now - before).total_seconds() / 2
    if off > _MAX_CLOCK_SKEW_S:
        text = f"it is {off:.0f} s from this machine's: certificates may seem out of their time; set both by NTP"
        return [Finding(f"{what}: clock", "wrong", text)]
    return [Finding(f"{what}: clock", "well", "as this machine's")]


# ---- metrics --------------------------------------------------------------------------------------------------


class _Answer(NamedTuple):
    """What a request for metrics gets.

    Attributes:
        status: of HTTP; 0: it is none.
        body: what is told, or why not.
        certificate: that was shown, DER; empty: none was.
    """

    status: int
    body: str
    certificate: bytes


async def _metrics(address: str, credentials: Credentials) -> list[Finding]:
    """Whether metrics are told there, by whom, and who else may read them on the way."""
    what = f"metrics {address}"
    try:
        answer = await asyncio.to_thread(_asked, address, credentials.build_https_client_context())
        found = [_told(what, answer)]
        if answer.certificate:
            shown = x509.load_der_x509_certificate(answer.certificate)
            principal = credentials.authenticate_certificate(ssl.DER_cert_to_PEM_cert(answer.certificate).encode())
            found.append(_certificate(f"{what}: certificate", principal, shown.not_valid_after_utc))
        elif not is_loopback(address):
            text = (
                "in the clear: whoever is on the way reads and changes them; give the service an identity (--identity)"
            )
            found.append(Finding(f"{what}: channel", "warning", text))
        return found
    except SottovoceError as error:
        return [Finding(what, "wrong", str(error))]
    except (OSError, TimeoutError) as error:
        return [Finding(what, "wrong", _unanswered(error))]


def _asked(address: str, tls: ssl.SSLContext | None) -> _Answer:
    """The answer to a request for metrics: in the clear, which whoever speaks TLS ends at once, or else over TLS.

    Raises:
        SpecError: this is no address.
        OSError: nobody answers in time, or one of the two does not believe the other.
    """
    host, port = MetricsEndpoint(address).parse_listen_address()
    answer = _said(HTTPConnection(host, port, timeout=_REQUEST_TIMEOUT_S))
    if answer.status or tls is None:
        return answer
    return _said(HTTPSConnection(host, port, timeout=_REQUEST_TIMEOUT_S, context=tls))


def _said(connection: HTTPConnection) -> _Answer:
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


def _told(what: str, answer: _Answer) -> Finding:
    if answer.status == 200 and "sottovoce_build_info" in answer.body:
        series = sum(bool(line) and not line.startswith("#") for line in answer.body.splitlines())
        return Finding(what, "well", f"it answers: {series} series")
    if answer.status == 403:
        return Finding(what, "warning", f"it answers, and tells nothing: {escape_control(answer.body.strip())}")
    if not answer.status and not answer.certificate:
        text = "it says nothing in the clear: its channel may be encrypted, and this process shows no identity (--identity)"
        return Finding(what, "wrong", text)
    return Finding(what, "wrong", f"no service of ours answers there: HTTP status {answer.status or 'none'}")


def _unanswered(error: Exception) -> str:
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
