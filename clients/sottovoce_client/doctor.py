"""`sottovoce doctor`: what of a deployment is not as it must be, seen from this machine, and what to do about it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.text import Text

from sottovoce.errors import DataError, SottovoceError
from sottovoce_client import terminal
from sottovoce_learner.ledger import Ledger
from sottovoce_learner.repair import verify
from sottovoce_rpc.certificates import AUTHORITIES, CERTIFICATE, REVOKED
from sottovoce_rpc.credentials import SOON, Credentials
from sottovoce_rpc.principals import Role
from sottovoce_rpc.private import open_to_others
from sottovoce_rpc.server import channel, reach
from sottovoce_rpc.status import as_error
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc

State = Literal["well", "warning", "wrong"]
_SIGNS: Mapping[State, tuple[str, str]] = {"well": ("✓", "green"), "warning": ("!", "yellow"), "wrong": ("✗", "red")}
_REACH_S = 10.0
_MOST_SKEW_S = 30.0
"""Between two clocks: certificates begin a few minutes before they are issued, and times of runs are compared by people."""
_LEAST_FREE = 1024**3
"""Bytes on a disk with a state folder."""
_EXTRAS = {
    "audit": ("pyarrow", "duckdb", "jinja2", "plotly", "pooch", "scipy"),
    "fast": ("uvloop",),
    "accounting": ("dp_accounting",),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at.

    Attributes:
        what: it is.
        state: whether it is as it must be.
        text: what was found; where that is not well, also what to do.
    """

    what: str
    state: State
    text: str


@dataclass(frozen=True, slots=True)
class Patient:
    """What is looked at; what is not given is not.

    Attributes:
        credentials: of whoever asks.
        services: addresses of services, by role.
        states: state folders of learners.
    """

    credentials: Credentials
    services: Sequence[tuple[Role, str]] = ()
    states: Sequence[Path] = ()


async def examine(patient: Patient) -> list[Finding]:
    """Look at everything that was given."""
    found = [*_installed(), *_identity(patient.credentials)]
    for folder in patient.states:
        found += await asyncio.to_thread(lambda own: list(_state(own)), folder)
    asked = await asyncio.gather(*(_service(*each, patient.credentials) for each in patient.services))
    return found + [finding for findings in asked for finding in findings]


def show(findings: Sequence[Finding], console: Console) -> int:
    """Print what was found.

    Returns:
        The exit code: 1 if anything is wrong.
    """
    table = terminal.table()
    for head in ("", "what", "found"):
        table.add_column(head, overflow="fold")
    for each in findings:
        table.add_row(Text(*_SIGNS[each.state]), Text(each.what), Text(each.text))
    console.print(table)
    wrong, warned = (sum(each.state == state for each in findings) for state in ("wrong", "warning"))
    console.print("all is well" if not wrong + warned else f"{wrong} wrong, {warned} to look at")
    return 1 if wrong else 0


# ---- this machine ---------------------------------------------------------------------------------------------


def _installed() -> Iterator[Finding]:
    own, grpcio = (importlib.metadata.version(name) for name in ("sottovoce", "grpcio"))
    yield Finding("versions", "well", f"sottovoce {own}, Python {platform.python_version()}, grpcio {grpcio}")
    lacking = [extra for extra, names in _EXTRAS.items() if not all(map(_there, names))]
    there = [extra for extra in _EXTRAS if extra not in lacking]
    text = f"{', '.join(there) or 'none'}{f'; not installed: {chr(44).join(lacking)}' if lacking else ''}"
    yield Finding("extras", "well", text)


def _there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _identity(credentials: Credentials) -> Iterator[Finding]:
    folder = credentials.folder
    try:
        principal, expires = credentials.principal, credentials.expires
    except SottovoceError as error:
        yield Finding("identity", "wrong", str(error))
        return
    if folder is None or principal is None or expires is None:
        text = "none: only services of this user on this machine can be asked, or with --insecure any in the clear"
        yield Finding("identity", "warning" if credentials.insecure else "well", text)
        return
    left = expires - datetime.now(UTC)
    soon = left < SOON
    text = f"{principal} of {principal.domain}, until {expires:%Y-%m-%d %H:%M} UTC"
    yield Finding("identity", "warning" if soon else "well", f"{text}: renew it" if soon else text)
    if not credentials.rooted:
        text = f"{CERTIFICATE} leads to no authority of {AUTHORITIES}: others may refuse it; are those between missing from it?"
        yield Finding("chain", "warning", text)
    if not (folder / REVOKED).exists():
        yield Finding("revoked", "warning", f"no {REVOKED}: whoever was revoked is still believed here")


def _state(folder: Path) -> Iterator[Finding]:
    """A learner's state folder."""
    what = f"state {folder}"
    if not folder.is_dir():
        yield Finding(what, "wrong", "there is no such folder: give what the learner was started with as --state")
        return
    if open_to_others(folder):
        yield Finding(what, "warning", "other users may look into it, and it may hold records: chmod 700 it")
    if not os.access(folder, os.W_OK):
        yield Finding(what, "wrong", "it cannot be written: the learner would say nothing")
    free = shutil.disk_usage(folder).free
    state: State = "well" if free >= _LEAST_FREE else "warning"
    yield Finding(f"{what}: disk", state, f"{free / 1e9:.1f} GB free")
    for name in Ledger(folder).learners():
        try:
            runs = verify(folder, name, imports=False)
            yield Finding(f"{what}: {name}", "well", f"{len(runs)} runs in its ledger: nothing is lost")
        except DataError as error:
            yield Finding(f"{what}: {name}", "wrong", str(error))


# ---- services -------------------------------------------------------------------------------------------------


async def _service(role: Role, address: str, credentials: Credentials) -> list[Finding]:
    what = f"{role} {address}"
    try:
        async with channel(address, role, credentials=credentials) as to:
            await reach(to, f"the {role} at {address}", _REACH_S)
            stub: Any = health_pb2_grpc.HealthStub(to)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_REACH_S)
            found = [_health(what, answer.status)]
            if role is Role.COORDINATOR:
                found += await _clock(what, to)
            return found
    except grpc.aio.AioRpcError as error:
        return [Finding(what, "wrong", str(as_error(error, f"the {role} at {address}")))]
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
        answer = await coordinator_pb2_grpc.CoordinatorStub(to).ListRuns(request, timeout=_REACH_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            return []
        raise
    if not answer.HasField("now"):
        return [Finding(f"{what}: clock", "warning", "it does not tell: it is of an older version")]
    now = datetime.now(UTC)
    middle = before + (now - before) / 2
    off = abs((answer.now.ToDatetime(UTC) - middle).total_seconds()) - (now - before).total_seconds() / 2
    if off > _MOST_SKEW_S:
        text = f"it is {off:.0f} s from this machine's: certificates may seem out of their time; set both by NTP"
        return [Finding(f"{what}: clock", "wrong", text)]
    return [Finding(f"{what}: clock", "well", "as this machine's")]
