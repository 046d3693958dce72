"""Who is at the other end of a channel: a role and a name, as they stand in its certificate.

A principal is written as a URI (`spiffe://ward.example/learner/north`), as SPIFFE has it, so that any authority that can
name workloads can name ours. Its first part is a trust domain: the authorities of a domain speak for its names, and for no
others. As gRPC compares hosts and no URIs, a certificate also holds a host that follows from the name:
who opens a channel to learner north insists on `north.learner.ward.example`, wherever that listens.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from urllib.parse import quote, unquote

from sottovoce_core.errors import SpecError
from sottovoce_core.spec import LEARNER_NAME_PATTERN

_DOMAIN = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*"
_LABEL = r"(?!.*--)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_MAX_DOMAIN_CHARS = 120
_HASH_DIGITS = 32
"""Hexadecimal digits in the host of a name that is no label of a host; no label that is a name has two dashes in a row."""


class Role(StrEnum):
    """What a principal is in a deployment."""

    LEARNER = "learner"
    COORDINATOR = "coordinator"
    EAVESDROPPER = "eavesdropper"
    FEEDER = "feeder"
    OPERATOR = "operator"
    MONITOR = "monitor"
    """It reads metrics, and may call nothing."""


@dataclass(frozen=True, slots=True)
class Principal:
    """A role and a name within a trust domain.

    Attributes:
        role: what it may be allowed, by `sottovoce_rpc.access`.
        name: a learner's is that of the run spec. With its domain (`east@east.example`) where that is another one than that
            of the process that asks.
        domain: its trust domain.
    """

    role: Role
    name: str
    domain: str

    @classmethod
    def parse(cls, domain: str, text: str) -> Principal:
        """From `role/name`, or `role/name@domain` in another domain, as people write it.

        Args:
            domain: of who writes it: a name without a domain is of this one.
            text: what is written.

        Raises:
            SpecError: it is none, or the domain is none.
        """
        role, _, name = text.partition("/")
        bare, _, other = name.partition("@")
        if role not in frozenset(Role) or re.fullmatch(LEARNER_NAME_PATTERN, name) is None:
            raise SpecError(
                f"an identity must be ROLE/NAME with a role of {', '.join(Role)} and a name like a learner's, got {text[:100]!r}"
            )
        for each in (domain, other or domain):
            if len(each) > _MAX_DOMAIN_CHARS or re.fullmatch(_DOMAIN, each) is None:
                raise SpecError(f"a trust domain must look like ward.example, in small letters, got {each[:200]!r}")
        return cls(Role(role), bare if other in ("", domain) else name, other or domain)

    @classmethod
    def from_uri(cls, uri: str) -> Principal | None:
        """Of a certificate, by its name in its own domain; None: it names nobody of a deployment."""
        found = re.fullmatch(r"spiffe://([^/]+)/([^/]+)/([^/]+)", uri)
        if found is None:
            return None
        try:
            name = unquote(found[3], errors="strict")
            return None if "@" in name else cls.parse(found[1], f"{found[2]}/{name}")  # a name in a URI holds no domain
        except (SpecError, UnicodeDecodeError):
            return None

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"

    def qualify_for(self, domain: str) -> Principal:
        """The same principal as a process of a domain calls it: with its own domain in its name, if that is another one."""
        bare = self.name.partition("@")[0]
        return replace(self, name=bare if self.domain == domain else f"{bare}@{self.domain}")

    @property
    def is_foreign(self) -> bool:
        """Whether it is of another domain than the process that asks."""
        return "@" in self.name

    def is_one_of(self, *texts: str) -> bool:
        """Whether one of these, as people write them, names this principal. Its own domain may be written or left out."""
        return str(self) in texts or f"{self.role}/{self.name.partition('@')[0]}@{self.domain}" in texts

    @property
    def uri(self) -> str:
        """As certificates hold it."""
        return f"spiffe://{self.domain}/{self.role}/{quote(self.name.partition('@')[0], safe='')}"

    @property
    def host(self) -> str:
        """What a client insists on that wants this principal and no other."""
        return build_host_name(self.domain, self.role, self.name)


def build_host_name(domain: str, role: Role, name: str = "") -> str:
    """The host that certificates of a principal hold; without a name: of everybody in a role.

    Args:
        domain: of who asks.
        role: the principal's.
        name: the principal's, with its domain where that is another one.
    """
    name, _, other = name.partition("@")
    domain = other or domain
    if not name:
        return f"{role}.{domain}"
    label = name if re.fullmatch(_LABEL, name) else f"h--{hashlib.sha256(name.encode()).hexdigest()[:_HASH_DIGITS]}"
    return f"{label}.{role}.{domain}"
