"""What is on this machine, and whose."""

from __future__ import annotations

import ipaddress
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED, _HALF_CLOSED = "01", "08"
"""States of a connection whose end still belongs to a process: Linux says 0, as of root, where none does."""


def is_loopback(address: str) -> bool:
    """True when nobody outside this machine can reach the address."""
    host = address.removeprefix("ipv4:").removeprefix("ipv6:").rsplit(":", 1)[0].strip("[]")
    if address.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: who knows where it leads
        return False


def of_this_user(peer: str) -> bool:
    """Whether the other end of a connection is this process's user's, or root's.

    Only Linux says whose a connection is: elsewhere every user of the machine is let in. A socket in the file system is guarded
    by the rights of its folder.

    Args:
        peer: as gRPC has it: `ipv4:127.0.0.1:40123`.
    """
    if peer.startswith("unix:"):
        return True
    found = re.fullmatch(r"ipv[46]:\[?([^\]]+)\]?:(\d+)", unquote(peer))
    if found is None:
        return False
    if not any(table.exists() for table in _TABLES):
        return True
    return _owner(ipaddress.ip_address(found[1]), int(found[2])) in (os.getuid(), 0)


def _owner(host: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> int | None:
    """The user whose end of a connection this is; None: it is no longer there, or there are several users' that begin there."""
    mark = f":{port:04X} "
    users = {
        user
        for local, state, user in _connections(mark)
        if f"{local} ".endswith(mark) and state in (_ESTABLISHED, _HALF_CLOSED) and _address(local) == host
    }
    return users.pop() if len(users) == 1 else None


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
