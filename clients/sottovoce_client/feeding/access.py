"""Entering a broker: who feeds, and whom it believes. Passwords come from files and the environment alone."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from sottovoce.errors import NotReady, SpecError

_MOST_SECRET = 64 * 1024
SCHEMES = {
    "nats": {"nats": 4222, "tls": 4222},
    "redis": {"redis": 6379, "rediss": 6379},
    "mqtt": {"mqtt": 1883, "mqtts": 8883},
    "kafka": {"kafka": 9092},
}
"""How the address of a broker begins, the usual form first, and the usual port of each."""


@dataclass(frozen=True, slots=True)
class Access:
    """How a broker is entered.

    Attributes:
        user: whom the broker knows; empty: nobody, and a password is a token.
        password: of the user.
        tls: speak through TLS.
        ca: file of the authorities that are believed; None: those of this machine.
        certificate, key: files of a certificate of the feeder's own, with its chain, and its key; None: it has none.
    """

    user: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise SpecError("a certificate and its key go together: give both, or none")

    def context(self) -> ssl.SSLContext | None:
        """What TLS is spoken with; None: it is not.

        Raises:
            NotReady: a file cannot be used.
        """
        if not (self.tls or self.ca or self.certificate):
            return None
        files = ", ".join(str(each) for each in (self.ca, self.certificate, self.key) if each is not None)
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate is not None:
                # A key under a passphrase would ask for it on the terminal.
                context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as error:
            raise NotReady(f"no TLS with {files}: {getattr(error, 'reason', None) or error}") from None
        return context


def secret_in(path: Path) -> str:
    """A password from a file, without the end of its line.

    Raises:
        NotReady: there is none.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_SECRET).decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise NotReady(f"no password in {path}: {getattr(error, 'strerror', None) or 'it is no text'}") from None
    if not text:
        raise NotReady(f"no password in {path}: it is empty")
    return text
