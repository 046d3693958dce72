"""Addresses as people write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from sottovoce.errors import SpecError

_PLACE = re.compile(r"(?:(?:ipv4|ipv6):|dns:(?:///)?)?(\[[0-9A-Fa-f:.%]+\]|[^\s\[\]:/,?#@]+):([0-9]{1,5})")
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


def place_of_url(url: str, schemes: Mapping[str, int], what: str, *, path: bool = False) -> tuple[str, str, int]:
    """Scheme, host and port of a URL that somebody else's service has: `nats://host:4222`, or `host:4222`.

    Args:
        url: as somebody wrote it.
        schemes: that there are, the usual one first, and the usual port of each.
        what: it is, in errors: an option or a variable.
        path: whether something may stand behind the port.

    Raises:
        SpecError: it is no such address, or holds a password.

    >>> place_of_url("tls://[::1]", {"nats": 4222, "tls": 4222}, "--server")
    ('tls', '::1', 4222)
    """
    usual, port = next(iter(schemes.items()))
    wanted = f"{what} must be like {usual}://HOST:{port}, with a port from 1 to {_HIGHEST}, and {_begin(schemes)}"
    scheme, _, rest = url.rpartition("://") if "://" in url.split("?")[0] else (usual, "", url)
    place, slash, behind = rest.partition("/")
    if "@" in (place if path else rest):  # what came is not shown: it holds a secret
        raise SpecError(
            f"{what} must hold no user or password: others see them; give the user, and the password in a file"
        )
    try:
        if scheme.lower() not in schemes or (slash and behind and not path) or urlsplit(f"//{place}").hostname is None:
            raise ValueError
        found = place if re.search(r":[^\]]*$", place) else f"{place}:{schemes[scheme.lower()]}"
        return scheme.lower(), *place_of(found, what)
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


def require_address(address: str, what: str, *, listen: bool = False) -> str:
    """The same address, which a gRPC service may have: `place_of`, or `unix:PATH`.

    Raises:
        SpecError: it is none.
    """
    if not re.fullmatch(r"unix(-abstract)?:.+", address):
        place_of(address, what, listen=listen)
    return address
