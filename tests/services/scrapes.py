"""Asking services for metrics, as Prometheus does."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path

from sottovoce_rpc.certificates import AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE

PATIENCE_S = 100.0


@dataclass(frozen=True)
class Answer:
    """What a service says."""

    status: int
    headers: dict[str, str]
    body: str


def shown(folder: Path | None, believes: Path) -> ssl.SSLContext:
    """TLS, with an identity or none."""
    # As Prometheus: from 3.13 on Python's default asks more of an authority's certificate.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(believes / AUTHORITIES_FILE)
    if folder is not None:
        context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE)
    return context


async def said(address: str, request: bytes, tls: ssl.SSLContext | None = None, host: str | None = None) -> bytes:
    """All that is answered to some bytes."""
    name, _, port = address.rpartition(":")
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(
            name.strip("[]"), int(port), ssl=tls, server_hostname=host if tls else None
        )
        try:
            writer.write(request)
            return await reader.read()
        finally:
            writer.transport.abort()


async def asked(
    address: str,
    tls: ssl.SSLContext | None = None,
    *,
    host: str = "learner.ward.example",
    target: str = "/metrics",
    method: str = "GET",
    header: str = "",
) -> Answer:
    """What a service says to a request."""
    request = f"{method} {target} HTTP/1.1\r\nHost: {address}\r\n{header}\r\n"
    head, _, body = (await said(address, request.encode(), tls, host)).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    pairs = (line.partition(": ") for line in lines)
    return Answer(int(first.split()[1]), {name.lower(): value for name, _, value in pairs}, body.decode())


def series(text: str) -> dict[str, float]:
    """The series of a text, by name and labels as they stand there."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}
