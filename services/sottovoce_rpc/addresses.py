"""Addresses as people write them, and whose the other end of a connection on this machine is."""

from __future__ import annotations

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

_PLACE = re.compile(r"(?:(?:ipv4|ipv6):|dns:(?:///)?)?(\[[0-9A-Fa-f:.%]+\]|[^\s\[\]:/,?#@]+):([0-9]{1,5})")
_MAX_PORT = 65_535
"""Of the ports. gRPC takes a larger one for what is left of it after division."""


def parse_address(address: str, what: str, *, allow_port_zero: bool = False) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 address stands in brackets there, and comes without.

    Args:
        address: as somebody wrote it.
        what: it is, in errors: an option.
        listen: whether it is to be listened on; port 0 then picks one.

    Raises:
        SpecError: it is no such address.

    >>> place_of("[::1]:7400", "--coordinator")
    ('::1', 7400)
    """
    found, lowest = _PLACE.fullmatch(address), 0 if allow_port_zero else 1
    if found is None or not lowest <= int(found[2]) <= _MAX_PORT:
        raise SpecError(f"{what} must be HOST:PORT with a port from {lowest} to {_MAX_PORT}, got {address!r}")
    return found[1].strip("[]"), int(found[2])


def parse_url(url: str, schemes: Mapping[str, int], what: str, *, allow_path: bool = False) -> tuple[str, str, int]:
    """Scheme, host and port of a URL that somebody else's service has: `nats://host:4222`, or `host:4222`.

    Args:
        url: as somebody wrote it.
        schemes: that there are, the usual one first, and the usual port of each.
        what: it is, in errors: an option or a variable.
        path: whether something may stand behind the port.

    Raises:
        SpecError: it is no such address, or holds a password.

    >>> parse_url("tls://[::1]", {"nats": 4222, "tls": 4222}, "--server")
    ('tls', '::1', 4222)
    """
    usual, port = next(iter(schemes.items()))
    wanted = f"{what} must be like {usual}://HOST:{port}, with a port from 1 to {_MAX_PORT}, and {_begin(schemes)}"
    scheme, _, rest = url.rpartition("://") if "://" in url.split("?")[0] else (usual, "", url)
    place, slash, behind = rest.partition("/")
    if "@" in (place if allow_path else rest):  # what came is not shown: it holds a secret
        raise SpecError(
            f"{what} must hold no user or password: others see them; give the user, and the password in a file"
        )
    try:
        if (
            scheme.lower() not in schemes
            or (slash and behind and not allow_path)
            or urlsplit(f"//{place}").hostname is None
        ):
            raise ValueError
        found = place if re.search(r":[^\]]*$", place) else f"{place}:{schemes[scheme.lower()]}"
        return scheme.lower(), *parse_address(found, what)
    except (ValueError, SpecError):
        raise SpecError(f"{wanted}, got {url!r}") from None


def _begin(schemes: Mapping[str, int]) -> str:
    return f"begin with {' or '.join(f'{each}://' for each in schemes)}, or with the host"


def require_host(host: str, what: str) -> str:
    """The same name or address of a machine, without a port.

    Raises:
        SpecError: it is none.
    """
    if _PLACE.fullmatch(f"{host}:1") is None:
        raise SpecError(f"{what} must be the name or address of a machine, without a port, got {host!r}")
    return host


def require_address(address: str, what: str, *, allow_port_zero: bool = False) -> str:
    """The same address, which a gRPC service may have: `place_of`, or `unix:PATH`.

    Raises:
        SpecError: it is none.
    """
    if not re.fullmatch(r"unix(-abstract)?:.+", address):
        parse_address(address, what, allow_port_zero=allow_port_zero)
    return address


# ---- users of this machine -------------------------------------------------------------------------------------------


_Host = ipaddress.IPv4Address | ipaddress.IPv6Address

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED, _HALF_CLOSED = 1, 8
"""States of a connection whose end still belongs to a process: Linux says 0, as of root, where none does."""
_DIAGNOSIS, _ASKED = 4, 20
"""NETLINK_SOCK_DIAG and SOCK_DIAG_BY_FAMILY: the kernel finds one connection in microseconds, and all in milliseconds."""
_HEADER, _QUESTION, _ANSWER = struct.Struct("=IHHII"), struct.Struct("=BBBxI"), struct.Struct("=BBxx48x12xII")
_ENDS = struct.Struct("!HH16s16s")
_MAX_QUERIED_SERVERS = 64
"""Servers that are asked for one by one."""

listen_addresses: WeakKeyDictionary[object, str] = WeakKeyDictionary()
"""Where each gRPC server of this process listens."""


def is_loopback(address: str) -> bool:
    """True when nobody outside this machine can reach the address."""
    host = address.removeprefix("ipv4:").removeprefix("ipv6:").rsplit(":", 1)[0].strip("[]")
    if address.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: who knows where it leads
        return False


def is_same_user(peer: str, servers: Iterable[str] = ()) -> bool:
    """Whether the other end of a connection is this process's user's, or root's.

    Only Linux says whose a connection is: elsewhere every user of the machine is let in. A socket in the file system is guarded
    by the rights of its folder.

    Args:
        peer: as gRPC has it: `ipv4:127.0.0.1:40123`.
        servers: addresses of all servers of this process to one of which it may be, where that is known: asking for these
            alone is much faster.
    """
    if peer.startswith("unix:"):
        return True
    found = re.fullmatch(r"ipv[46]:\[?([^\]]+)\]?:(\d+)", unquote(peer))
    if found is None:
        return False
    if not any(table.exists() for table in _TABLES):
        return True
    host, port, known = ipaddress.ip_address(found[1]), int(found[2]), [*servers]
    users = _users_of(host, port, known) if len(known) <= _MAX_QUERIED_SERVERS else set()
    users = users or _listed_users(host, port)
    return len(users) == 1 and users <= {os.getuid(), 0}


def _listed_users(host: _Host, port: int) -> set[int]:
    """The users of all connections that begin there; none: it is no longer there."""
    mark = f":{port:04X} "
    return {
        user
        for local, state, user in _connections(mark)
        if f"{local} ".endswith(mark) and int(state, 16) in (_ESTABLISHED, _HALF_CLOSED) and _address(local) == host
    }


def _users_of(host: _Host, port: int, servers: Iterable[str]) -> set[int]:
    """The users of connections from there to these servers; none where the kernel says nothing."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _DIAGNOSIS) as kernel:
            return {user for server in servers if (user := _user_of(kernel, host, port, server)) is not None}
    except (OSError, AttributeError):  # it is not Linux, or does not let us ask
        return set()


def _user_of(kernel: socket.socket, host: _Host, port: int, server: str) -> int | None:
    """The user whose end of a connection this is; None: there is no such connection."""
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
    asked = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, states) + ends + bytes(4) + b"\xff" * 8
    kernel.send(_HEADER.pack(_HEADER.size + len(asked), _ASKED, 1, 0, 0) + asked)
    answer = kernel.recv(4096)
    _, kind, *_ = _HEADER.unpack_from(answer)
    if kind != _ASKED:
        return None
    _, state, user, _ = _ANSWER.unpack_from(answer, _HEADER.size)
    return int(user) if state in (_ESTABLISHED, _HALF_CLOSED) else None


def _connections(mark: str) -> Iterator[tuple[str, str, int]]:
    """Local address, state, and user, as the kernel lists them, of lines that hold a mark."""
    for table in _TABLES:
        try:
            lines = table.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if mark in line:
                parts = line.split(maxsplit=8)
                yield parts[1], parts[3], int(parts[7])


def _address(local: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as the kernel writes it: in words of four bytes, each as this machine has them."""
    digits = local.split(":")[0]
    words = [int(digits[k : k + 8], 16) for k in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    found = ipaddress.ip_address(packed)
    return getattr(found, "ipv4_mapped", None) or found
