"""Certificates for tests: an authority, and identities made when they are first asked for."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

import grpc

from sottovoce_client.pki import Authority
from sottovoce_rpc.certificates import AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE
from sottovoce_rpc.credentials import Credentials

DOMAIN = "ward.example"


class Issuing(Protocol):
    """Whoever gives everybody of a deployment an identity."""

    def of(self, whom: str) -> Credentials:
        """The credentials of `role/name`."""
        ...


@dataclass
class Identities:
    """All of one deployment.

    Attributes:
        folder: of the authority and the identities.
    """

    folder: Path
    domain: str = DOMAIN
    authority: Authority = field(init=False)

    def __post_init__(self) -> None:
        self.authority = Authority.init(self.folder / "authority", self.domain)

    def at(self, whom: str) -> Path:
        """The folder of an identity."""
        folder = self.folder / whom.replace("/", "-", 1)
        if not (folder / KEY_FILE).exists():
            self.authority.issue(whom, folder)
        return folder

    def of(self, whom: str) -> Credentials:
        """The credentials of `role/name`."""
        return Credentials(self.at(whom))


@dataclass
class Federation:
    """Authorities of several trust domains, and identities that believe all of them.

    Attributes:
        folder: of the authorities and the identities.
        domains: a name without a domain is of the first one.
    """

    folder: Path
    domains: tuple[str, ...]
    authorities: dict[str, Authority] = field(init=False)

    def __post_init__(self) -> None:
        made = {domain: Authority.init(self.folder / domain, domain) for domain in self.domains}
        pems = {domain: (own.folder / AUTHORITIES_FILE).read_bytes() for domain, own in made.items()}
        for domain, own in made.items():
            others = [pem for other, pem in pems.items() if other != domain]
            (own.folder / AUTHORITIES_FILE).write_bytes(b"".join((pems[domain], *others)))
        self.authorities = made

    def at(self, whom: str, by: str = "") -> Path:
        """The folder of an identity.

        Args:
            whom: `role/name`, or `role/name@domain`.
            by: domain of the authority that issues it (default: the identity's own).
        """
        bare, _, domain = whom.partition("@")
        domain = domain or self.domains[0]
        by = by or domain
        folder = self.folder / f"{bare.replace('/', '-', 1)}@{domain} by {by}"
        if not (folder / KEY_FILE).exists():
            _Impostor.of(self.authorities[by], domain).issue(bare, folder)
        return folder

    def of(self, whom: str, by: str = "") -> Credentials:
        """The credentials of an identity, as `at` has it."""
        return Credentials(self.at(whom, by))


class _Impostor(Authority):
    """An authority that names whom it likes."""

    named = ""

    @classmethod
    def of(cls, authority: Authority, domain: str) -> _Impostor:
        own = cls(authority.folder)
        own.named = domain
        return own

    @property
    def domain(self) -> str:
        return self.named


class Elsewhen(datetime.datetime):
    """A clock that is wrong by `off`: an authority that looks at it issues what has ended, or has not begun."""

    off = datetime.timedelta()

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Self:
        return super().now(tz) + cls.off


def raw_channel(folder: Path | None, believes: Path, address: str, host: str) -> grpc.aio.Channel:
    """A channel as a stranger opens it: with whatever certificate, or none, and believing whomever."""
    pair = (
        (None, None) if folder is None else ((folder / KEY_FILE).read_bytes(), (folder / CERTIFICATE_FILE).read_bytes())
    )
    credentials = grpc.ssl_channel_credentials((believes / AUTHORITIES_FILE).read_bytes(), *pair)
    return grpc.aio.secure_channel(address, credentials, options=[("grpc.ssl_target_name_override", host)])
