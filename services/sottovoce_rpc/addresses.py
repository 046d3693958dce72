"""Addresses as people write them."""

from __future__ import annotations

import re

from sottovoce.errors import SpecError

_PLACE = re.compile(r"(?:(?:ipv4|ipv6):|dns:(?:///)?)?(\[[0-9A-Fa-f:.%]+\]|[^\s\[\]:/,]+):([0-9]{1,5})")
_HIGHEST = 65_535
"""Of the ports. gRPC takes a larger one for what is left of it after division."""


def place_of(address: str, what: str, *, listen: bool = False) -> tuple[str, int]:
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
    found, lowest = _PLACE.fullmatch(address), 0 if listen else 1
    if found is None or not lowest <= int(found[2]) <= _HIGHEST:
        raise SpecError(f"{what} must be HOST:PORT with a port from {lowest} to {_HIGHEST}, got {address!r}")
    return found[1].strip("[]"), int(found[2])


def require_address(address: str, what: str, *, listen: bool = False) -> str:
    """The same address, which a gRPC service may have: `place_of`, or `unix:PATH`.

    Raises:
        SpecError: it is none.
    """
    if not re.fullmatch(r"unix(-abstract)?:.+", address):
        place_of(address, what, listen=listen)
    return address
