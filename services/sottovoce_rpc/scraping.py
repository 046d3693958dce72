"""Where Prometheus asks for metrics: `GET /metrics` of a small server in the service's own loop.

Readings are taken in the loop, between two steps of whatever the service does, so they fit each other; their text is made in a
thread. It answers whom the service's other servers answer: with an identity, over TLS, monitors and operators who show a
certificate; without one this machine's user. One request a connection, short and soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

from sottovoce.errors import StrangerError, Unavailable
from sottovoce_rpc.access import ROLE, STRANGER, Refusals
from sottovoce_rpc.addresses import place_of
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.loopback import is_loopback, of_this_user
from sottovoce_rpc.metrics import COMMON, Catalogue, Exposition, Reading
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import announce
from sottovoce_rpc.tasks import Tasks

SCRAPERS = frozenset({Role.MONITOR, Role.OPERATOR})
"""Who may ask, where there is an identity."""
_PATH = "/metrics"
_REQUEST_S, _MOST_CONNECTIONS, _MOST_HEAD = 10.0, 32, 8 * 1024

Read = Callable[[], Iterable[Reading]]


@dataclass(frozen=True, slots=True)
class Scraped:
    """Where metrics are served.

    Attributes:
        listen: `host:port`; port 0 picks one.
        credentials: of the service.
        process: whether to tell what the process has used of its machine: of a learner that may depend on its records.
    """

    listen: str
    credentials: Credentials = field(default_factory=Credentials)
    process: bool = True

    def place(self) -> tuple[str, int]:
        """Host and port.

        Raises:
            SpecError: there are none.
        """
        return place_of(self.listen, "--metrics", listen=True)


@asynccontextmanager
async def scraped(at: Scraped | None, catalogue: Catalogue, read: Read, refused: Refusals) -> AsyncIterator[str]:
    """Serve metrics while the block lasts, and say where, on standard output too; empty: nowhere.

    Args:
        at: where; None: nowhere.
        catalogue: of the service.
        read: gives readings of all of it.
        refused: counts who may not ask.

    Raises:
        SpecError: this is no address, others can reach it and there is no identity, or prometheus_client is not installed.
        NotReady: the files of the identity cannot be used.
        Unavailable: the address cannot be listened on.
    """
    if at is None:
        yield ""
        return
    exposition = Exposition([*COMMON.metrics, *catalogue.metrics], process=at.process)
    (host, port), secured = at.place(), at.credentials.of_https(at.listen)
    async with Tasks() as tasks:
        door = _Door(at.credentials, exposition, read, refused, tasks)
        # To be None in the clear, too: it is an error to say how long a handshake may take that there is not.
        patience = _REQUEST_S if secured else None
        try:
            server = await asyncio.start_server(
                door.enter, host, port, limit=_MOST_HEAD, ssl=secured, ssl_handshake_timeout=patience
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
    read: Read
    refused: Refusals
    tasks: Tasks
    address: str = ""
    inside: int = 0

    def enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Somebody has connected."""
        if self.inside >= _MOST_CONNECTIONS:
            writer.transport.abort()
            return
        self.inside += 1
        self.tasks.start(self._serve(reader, writer), "metrics cannot be told")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
                async with asyncio.timeout(_REQUEST_S):
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
            readings: Sequence[Reading] = tuple(self.read())
            kind, text = await asyncio.to_thread(self.exposition.text, readings, headers.get("accept", ""))
            return _response(HTTPStatus.OK, kind, text)
        except _Refused as refused:
            return _response(refused.status, "text/plain; charset=utf-8", f"{refused}\n".encode())

    async def _require_known(self, writer: asyncio.StreamWriter) -> None:
        """Raises `_Refused` where somebody asks who may not."""
        tls: ssl.SSLObject | None = writer.get_extra_info("ssl_object")
        host, port = writer.get_extra_info("peername")[:2]
        peer = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
        if tls is None:
            if self.credentials.insecure or await asyncio.to_thread(of_this_user, peer, [self.address]):
                return
            self.refused.note(STRANGER, method=_PATH, caller="another user of this machine", peer=peer)
            raise _Refused(HTTPStatus.FORBIDDEN, "these metrics are another user's")
        try:
            caller = self.credentials.known(*_shown(tls))
        except (StrangerError, Unavailable) as error:
            self.refused.note(STRANGER, method=_PATH, caller=str(error), peer=peer)
            raise _Refused(HTTPStatus.FORBIDDEN, "whoever asks is not believed here") from None
        if caller.role not in SCRAPERS or caller.is_foreign:
            self.refused.note(ROLE, method=_PATH, caller=str(caller), peer=peer)
            wanted = " and ".join(sorted(SCRAPERS)) + (" of this trust domain" if caller.is_foreign else "")
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
        raise _Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"at most {_MOST_HEAD} bytes") from None
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
