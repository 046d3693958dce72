"""Parsing of network addresses, and the user at the other end of a local connection."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit
from weakref import WeakKeyDictionary

from sottovoce_core.errors import SpecError

_ADDRESS = re.compile(r"(?:(?:ipv4|ipv6):|dns:(?:///)?)?(\[[0-9A-Fa-f:.%]+\]|[^\s\[\]:/,?#@]+):([0-9]{1,5})")
_MAX_PORT = 65_535
"""Largest port. gRPC takes a larger number modulo 65,536."""


def parse_address(address: str, what: str, *, allow_port_zero: bool = False) -> tuple[str, int]:
    """Parse `host:port`; brackets around an IPv6 address are removed.

    Args:
        address: text as the user wrote it.
        what: name of the option, for errors.
        allow_port_zero: for an address to listen on, where port 0 picks a free one.

    Raises:
        SpecError: the text is not an address.

    >>> parse_address("[::1]:7400", "--coordinator")
    ('::1', 7400)
    """
    found, lowest = _ADDRESS.fullmatch(address), 0 if allow_port_zero else 1
    if found is None or not lowest <= int(found[2]) <= _MAX_PORT:
        raise SpecError(f"{what} must be HOST:PORT with a port from {lowest} to {_MAX_PORT}, got {address!r}")
    return found[1].strip("[]"), int(found[2])


def parse_url(url: str, schemes: Mapping[str, int], what: str, *, allow_path: bool = False) -> tuple[str, str, int]:
    """Parse scheme, host and port of an external service: `nats://host:4222`, or `host:4222`.

    Args:
        url: text as the user wrote it.
        schemes: allowed schemes, the default one first, with the default port of each.
        what: name of the option or variable, for errors.
        allow_path: allow a path after the port.

    Raises:
        SpecError: the text is not such a URL, or contains a user or password.

    >>> parse_url("tls://[::1]", {"nats": 4222, "tls": 4222}, "--server")
    ('tls', '::1', 4222)
    """
    usual, port = next(iter(schemes.items()))
    wanted = f"{what} must be like {usual}://HOST:{port}, with a port from 1 to {_MAX_PORT}, and {_describe_schemes(schemes)}"
    scheme, _, rest = url.rpartition("://") if "://" in url.split("?")[0] else (usual, "", url)
    place, slash, path = rest.partition("/")
    if "@" in (place if allow_path else rest):  # the URL is not quoted: it contains a secret
        raise SpecError(
            f"{what} must hold no user or password, because others see them; give the user, and the password in a file"
        )
    try:
        if (
            scheme.lower() not in schemes
            or (slash and path and not allow_path)
            or urlsplit(f"//{place}").hostname is None
        ):
            raise ValueError
        found = place if re.search(r":[^\]]*$", place) else f"{place}:{schemes[scheme.lower()]}"
        return scheme.lower(), *parse_address(found, what)
    except (ValueError, SpecError):
        raise SpecError(f"{wanted}, got {url!r}") from None


def _describe_schemes(schemes: Mapping[str, int]) -> str:
    return f"begin with {' or '.join(f'{each}://' for each in schemes)}, or with the host"


def require_host(host: str, what: str) -> str:
    """Return the host unchanged; refuse anything but a host name or IP address without a port.

    Raises:
        SpecError: it is not one.
    """
    if _ADDRESS.fullmatch(f"{host}:1") is None:
        raise SpecError(f"{what} must be the name or address of a machine, without a port, got {host!r}")
    return host


def require_address(address: str, what: str, *, allow_port_zero: bool = False) -> str:
    """Return the address unchanged, if it is valid for a gRPC service: as of `parse_address`, or `unix:PATH`.

    Raises:
        SpecError: it is not valid.
    """
    if not re.fullmatch(r"unix(-abstract)?:.+", address):
        parse_address(address, what, allow_port_zero=allow_port_zero)
    return address


# ---- users of this machine -------------------------------------------------------------------------------------------


_Host = ipaddress.IPv4Address | ipaddress.IPv6Address

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED, _HALF_CLOSED = 1, 8
"""Socket states in which the end still belongs to a process; in other states Linux reports user 0, that is, root."""
_SOCK_DIAG_PROTOCOL, _SOCK_DIAG_BY_FAMILY = 4, 20
"""Netlink constants: the kernel finds one connection in microseconds, and lists all in milliseconds."""
_HEADER, _QUESTION, _ANSWER = struct.Struct("=IHHII"), struct.Struct("=BBBxI"), struct.Struct("=BBxx48x12xII")
_ENDS = struct.Struct("!HH16s16s")
_MAX_QUERIED_SERVERS = 64
"""Maximum number of servers to query one by one."""

listen_addresses: WeakKeyDictionary[object, str] = WeakKeyDictionary()
"""Listen address of each gRPC server of this process."""


def is_loopback(address: str) -> bool:
    """Return whether the address can be reached from this machine only."""
    host = address.removeprefix("ipv4:").removeprefix("ipv6:").rsplit(":", 1)[0].strip("[]")
    if address.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name may resolve to any address
        return False


def format_peer(connection: asyncio.BaseTransport) -> str:
    """Return the other end of a connection of asyncio as gRPC reports it: `ipv4:127.0.0.1:40123`."""
    host, port = (connection.get_extra_info("peername") or ("", 0))[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def is_same_user(peer: str, servers: Iterable[str] = ()) -> bool:
    """Return whether the other end of a connection belongs to this process's user, or to root.

    Only Linux reports the user of a connection: on other systems every user of the machine is accepted. A Unix socket is
    protected by the permissions of its folder.

    Args:
        peer: as gRPC reports it: `ipv4:127.0.0.1:40123`.
        servers: addresses of all servers of this process that the connection may lead to, if known: querying these only is
            much faster.
    """
    if peer.startswith("unix:"):
        return True
    found = re.fullmatch(r"ipv[46]:\[?([^\]]+)\]?:(\d+)", unquote(peer))
    if found is None:
        return False
    if not any(table.exists() for table in _TABLES):
        return True
    host, port, known = ipaddress.ip_address(found[1]), int(found[2]), [*servers]
    users = _query_users(host, port, known) if len(known) <= _MAX_QUERIED_SERVERS else set()
    users = users or _list_users(host, port)
    return len(users) == 1 and users <= {os.getuid(), 0}


def _list_users(host: _Host, port: int) -> set[int]:
    """Return the users of all connections that start at this address; empty if there is none any more."""
    port_text = f":{port:04X} "
    return {
        user
        for local, state, user in _read_connections(port_text)
        if f"{local} ".endswith(port_text)
        and int(state, 16) in (_ESTABLISHED, _HALF_CLOSED)
        and _parse_kernel_address(local) == host
    }


def _query_users(host: _Host, port: int, servers: Iterable[str]) -> set[int]:
    """Return the users of connections from this address to these servers; empty if the kernel does not answer."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG_PROTOCOL) as kernel:
            return {user for server in servers if (user := _query_user(kernel, host, port, server)) is not None}
    except (OSError, AttributeError):  # not Linux, or the query is not permitted
        return set()


def _query_user(kernel: socket.socket, host: _Host, port: int, server: str) -> int | None:
    """Return the user of this end of a connection; None if there is no such connection."""
    name, _, to = server.rpartition(":")
    try:
        other = host if name == "localhost" else ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return None
    if other.version != host.version:
        return None
    family = socket.AF_INET if host.version == 4 else socket.AF_INET6
    ends = _ENDS.pack(port, int(to), host.packed.ljust(16, b"\0"), other.packed.ljust(16, b"\0"))
    states = 1 << _ESTABLISHED | 1 << _HALF_CLOSED
    query = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, states) + ends + bytes(4) + b"\xff" * 8
    kernel.send(_HEADER.pack(_HEADER.size + len(query), _SOCK_DIAG_BY_FAMILY, 1, 0, 0) + query)
    answer = kernel.recv(4096)
    _, kind, *_ = _HEADER.unpack_from(answer)
    if kind != _SOCK_DIAG_BY_FAMILY:
        return None
    _, state, user, _ = _ANSWER.unpack_from(answer, _HEADER.size)
    return int(user) if state in (_ESTABLISHED, _HALF_CLOSED) else None


def _read_connections(port_text: str) -> Iterator[tuple[str, str, int]]:
    """Yield local address, state and user from the lines of the kernel's tables that contain `port_text`."""
    for table in _TABLES:
        try:
            lines = table.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if port_text in line:
                parts = line.split(maxsplit=8)
                yield parts[1], parts[3], int(parts[7])


def _parse_kernel_address(local: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an address of the kernel's tables: words of four bytes, each in the machine's byte order."""
    digits = local.split(":")[0]
    words = [int(digits[k : k + 8], 16) for k in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    found = ipaddress.ip_address(packed)
    return getattr(found, "ipv4_mapped", None) or found
