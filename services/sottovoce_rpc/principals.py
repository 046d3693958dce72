"""Principals: the role and name in the certificate of the other end of a channel.

A principal is written as a SPIFFE URI (`spiffe://ward.example/learner/north`), so that any authority that names workloads can
name ours. Its first part is a trust domain: an authority of a domain certifies names of that domain only. gRPC verifies host
names, not URIs, so a certificate also holds a host name derived from the principal: a client that opens a channel to learner
north requires `north.learner.ward.example`, at any address.
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
"""Hexadecimal digits in the host label of a name that is no valid label itself; valid ones have no two dashes in a row."""


class Role(StrEnum):
    """Role of a principal in a deployment."""

    LEARNER = "learner"
    COORDINATOR = "coordinator"
    EAVESDROPPER = "eavesdropper"
    FEEDER = "feeder"
    OPERATOR = "operator"
    MONITOR = "monitor"
    """Reads metrics, and may call nothing."""


@dataclass(frozen=True, slots=True)
class Principal:
    """A role and a name within a trust domain.

    Attributes:
        role: decides what it may call (`sottovoce_rpc.access`).
        name: for a learner, its name in the run spec. A principal of another trust domain than this process has the domain
            in its name (`east@east.example`).
        domain: its trust domain.
    """

    role: Role
    name: str
    domain: str

    @classmethod
    def parse(cls, domain: str, text: str) -> Principal:
        """Parse `role/name`, or `role/name@domain` for another domain.

        Args:
            domain: trust domain of a name without one.
            text: the identity as a user writes it.

        Raises:
            SpecError: the text is not an identity, or the domain is not valid.
        """
        role, _, name = text.partition("/")
        bare, _, other = name.partition("@")
        if role not in frozenset(Role) or re.fullmatch(LEARNER_NAME_PATTERN, name) is None:
            raise SpecError(
                f"an identity must be ROLE/NAME with a role of {', '.join(Role)} and a name like a learner's, got {text[:100]!r}"
            )
        for each in (domain, other or domain):
            if len(each) > _MAX_DOMAIN_CHARS or re.fullmatch(_DOMAIN, each) is None:
                raise SpecError(f"a trust domain must look like ward.example, in lower case, got {each[:200]!r}")
        return cls(Role(role), bare if other in ("", domain) else name, other or domain)

    @classmethod
    def from_uri(cls, uri: str) -> Principal | None:
        """Parse the URI of a certificate; None if it names no principal."""
        found = re.fullmatch(r"spiffe://([^/]+)/([^/]+)/([^/]+)", uri)
        if found is None:
            return None
        try:
            name = unquote(found[3], errors="strict")
            return (
                None if "@" in name else cls.parse(found[1], f"{found[2]}/{name}")
            )  # the domain is the URI's host, not the name
        except (SpecError, UnicodeDecodeError):
            return None

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"

    def qualify_for(self, domain: str) -> Principal:
        """Return this principal as seen from a process of `domain`: with its own domain in its name if that is another one."""
        bare = self.name.partition("@")[0]
        return replace(self, name=bare if self.domain == domain else f"{bare}@{self.domain}")

    @property
    def is_foreign(self) -> bool:
        """Return whether it belongs to another trust domain than this process."""
        return "@" in self.name

    def is_one_of(self, *texts: str) -> bool:
        """Return whether one of these texts names this principal; its own domain may be written or left out."""
        return str(self) in texts or f"{self.role}/{self.name.partition('@')[0]}@{self.domain}" in texts

    @property
    def uri(self) -> str:
        """URI of its certificate."""
        return f"spiffe://{self.domain}/{self.role}/{quote(self.name.partition('@')[0], safe='')}"

    @property
    def host(self) -> str:
        """Host name that a client requires in this principal's certificate."""
        return build_host_name(self.domain, self.role, self.name)


def build_host_name(domain: str, role: Role, name: str = "") -> str:
    """Return the host name in certificates of a principal; without a name, the one that all principals of a role share.

    Args:
        domain: trust domain of this process.
        role: the principal's role.
        name: the principal's name, with its domain if that is another one.
    """
    name, _, other = name.partition("@")
    domain = other or domain
    if not name:
        return f"{role}.{domain}"
    label = name if re.fullmatch(_LABEL, name) else f"h--{hashlib.sha256(name.encode()).hexdigest()[:_HASH_DIGITS]}"
    return f"{label}.{role}.{domain}"
