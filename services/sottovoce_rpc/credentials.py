"""What a process shows of itself, and whom it believes: mutual TLS, or this machine's users alone.

A folder holds what any authority can write (cert-manager does under these names):

- `tls.crt`, `tls.key`: the certificate, with its chain, and its key;
- `ca.crt`: the authorities that are believed, each for the trust domain that it names alone (one that names none: for that
  of `tls.crt`, where no other names that);
- `crl.pem`, if there is one: what they have revoked.

Files are read again when they change. A process without an identity speaks in the clear, and only on this machine, where it
answers its own user (and root) alone; unless it is told to speak to anybody (`insecure`).
"""

from __future__ import annotations

import contextlib
import ssl
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import grpc
import structlog
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding

from sottovoce_core.errors import FailedPrecondition, PermissionDenied, SpecError, Unavailable
from sottovoce_rpc.addresses import is_loopback, is_same_user, listen_addresses
from sottovoce_rpc.certificates import (
    AUTHORITIES_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    REVOCATION_FILE,
    group_by_domain,
    has_chain_to_root,
    parse_certificates,
    parse_private_key,
    parse_revocations,
    read_issuer_and_serial,
    read_principal,
    require_usable_certificate,
)
from sottovoce_rpc.principals import Principal, Role, build_host_name
from sottovoce_rpc.signatures import SignedStatement, Statement, sign, verify_chain

_MAX_FILE_BYTES = 1024 * 1024
_OVERRIDE = "grpc.ssl_target_name_override"
EXPIRY_WARNING_PERIOD = timedelta(days=14)
"""Before its end a certificate is warned of."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Identity:
    """What stands in the files of a folder, at one time."""

    folder: Path
    chain: bytes
    key: bytes = field(repr=False)
    signing_key: PrivateKeyTypes = field(repr=False)
    """The key, read."""
    authorities: bytes
    """All that are believed, PEM."""
    bundles: Mapping[str, bytes]
    """Those of each trust domain, PEM."""
    principal: Principal
    expiry: datetime
    revocations: Mapping[str, frozenset[tuple[bytes, int]]]
    """By trust domain: issuers and serial numbers."""
    is_rooted: bool
    """Whether the chain leads to an authority of its own domain that this process itself believes."""

    @property
    def is_revoked(self) -> bool:
        """Whether the certificate, or one between it and its authority, is revoked by the list that this process itself has."""
        return not self.revocations.get(self.principal.domain, frozenset()).isdisjoint(_numbers(self.chain))

    def get_bundle(self, domain: str) -> bytes:
        """The authorities of a trust domain.

        Raises:
            FailedPrecondition: none is believed.
        """
        if domain not in self.bundles:
            raise FailedPrecondition(
                f"{self.folder / AUTHORITIES_FILE} must hold an authority that names spiffe://{domain}, and has those of "
                f"{', '.join(filter(None, self.bundles))} alone: add it (docs/identities.md)"
            )
        return self.bundles[domain]


@dataclass(slots=True)
class Credentials:
    """How a process speaks to others.

    Args:
        folder: with its identity; None: it has none.
        insecure: without an identity, speak in the clear to other machines, too, and answer whoever asks.
    """

    folder: Path | None = None
    insecure: bool = False
    _loaded: Identity | None = field(default=None, init=False)
    _seen: tuple[object, ...] = field(default=(), init=False)
    _serving: WeakKeyDictionary[object, str] = field(default_factory=WeakKeyDictionary, init=False, compare=False)

    def __post_init__(self) -> None:
        if self.folder is not None and self.insecure:
            raise SpecError(
                "an identity and --insecure exclude each other: with an identity every channel is encrypted"
            )

    @property
    def principal(self) -> Principal | None:
        """Who this process is; None: it has no identity.

        Raises:
            FailedPrecondition: its files cannot be used.
        """
        return None if self.folder is None else self._current().principal

    def require_principal(self, role: Role, name: str = "") -> None:
        """Of a service: its certificate is one of its kind.

        Args:
            role: that it must hold.
            name: that it must hold; empty: any.

        Raises:
            FailedPrecondition: it holds others, or the files cannot be used.
        """
        own = self.principal
        if own is not None and (own.role is not role or not (name == "" or own.is_one_of(f"{role}/{name}"))):
            wanted = f"{role}/{name or 'NAME'}"
            raise FailedPrecondition(
                f"the identity in {self.folder} must be of {wanted}, got {own}: `sottovoce pki issue {wanted}`"
            )

    @property
    def expiry(self) -> datetime | None:
        """When the certificate ends; None: there is none.

        Raises:
            FailedPrecondition: its files cannot be used.
        """
        return None if self.folder is None else self._current().expiry

    def load_identity(self) -> Identity | None:
        """All that the files say; None: this process has no identity.

        Raises:
            FailedPrecondition: its files cannot be used.
        """
        return None if self.folder is None else self._current()

    # ---- speaking -----------------------------------------------------------------------------------------

    def open_channel(
        self, address: str, role: Role | None, name: str, options: Sequence[tuple[str, Any]]
    ) -> grpc.aio.Channel:
        """A channel to a service.

        Args:
            address: where it listens.
            whom, name: who must be there, where there is an identity: a role, and a name, or anybody in this process's
                domain (empty). Only authorities of the name's domain are believed.
            options: of the channel.

        Raises:
            SpecError: it is on another machine, and there is no identity.
            FailedPrecondition: the files of the identity cannot be used, or no authority of the domain is believed.
        """
        if self.folder is None:
            self._require_here(address)
            return grpc.aio.insecure_channel(address, options=options)
        if role is None:
            raise ValueError(f"a channel to {address} with an identity must say who is to be there")
        now = self._current()
        bundle = now.get_bundle(name.partition("@")[2] or now.principal.domain)
        credentials = grpc.ssl_channel_credentials(bundle, now.key, now.chain)
        host = build_host_name(now.principal.domain, role, name)
        return grpc.aio.secure_channel(address, credentials, options=[*options, (_OVERRIDE, host)])

    def _require_here(self, address: str) -> None:
        if not (self.insecure or is_loopback(address)):
            raise SpecError(
                f"{address} is reached from other machines, so channels to it must be encrypted: give this process an identity "
                "(--identity FOLDER, from `sottovoce pki issue`), or let it speak in the clear (--insecure)"
            )

    # ---- answering ----------------------------------------------------------------------------------------

    def build_server_credentials(self, listen: str) -> grpc.ServerCredentials | None:
        """For a server; None: it speaks in the clear.

        Args:
            listen: where it listens.

        Raises:
            SpecError: others can reach it there, and there is no identity.
            FailedPrecondition: the files of the identity cannot be used.
        """
        if self.folder is None:
            self._require_here(listen)
            return None
        shown = self._current()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            """Asked for before each handshake, in a thread of gRPC's; None: as before."""
            nonlocal shown
            before, shown = shown, self._current()
            return None if shown is before else _configuration(shown)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(shown),
            renewed,  # type: ignore[arg-type] # the stubs do not know that None means unchanged
            require_client_authentication=True,
        )

    def __reduce__(self) -> tuple[type[Credentials], tuple[Path | None, bool]]:
        """In another process they begin anew: what was read here, and who serves here, is this one's."""
        return Credentials, (self.folder, self.insecure)

    def register_server(self, server: object, address: str) -> None:
        """A server with these credentials listens there: who calls may be asked for among its connections alone."""
        self._serving[server] = address

    def build_https_server_context(self, listen: str) -> ssl.SSLContext | None:
        """The same for a server of HTTPS, whose callers show a certificate, too; renewed files are taken in as they come.

        Nothing is resumed: each connection is believed anew.

        Raises:
            SpecError: others can reach it there, and there is no identity.
            FailedPrecondition: the files of the identity cannot be used.
        """
        if self.folder is None:
            self._require_here(listen)
            return None
        shown = self._current()
        first = latest = _https(shown)

        def renewed(tls: ssl.SSLObject, *_: object) -> None:
            """Asked at the beginning of each handshake."""
            nonlocal shown, latest
            if (now := self._current()) is not shown:
                with contextlib.suppress(OSError):  # they are just being written: the next one asks again
                    latest, shown = _https(now), now
            tls.context = latest

        first.sni_callback = renewed
        return first

    def build_https_client_context(self) -> ssl.SSLContext | None:
        """To ask such a server, of whatever name: its certificate says who it is (`known`). None: this process has no identity.

        Raises:
            FailedPrecondition: the files of the identity cannot be used.
        """
        return None if self.folder is None else _https(self._current(), ssl.PROTOCOL_TLS_CLIENT)

    def identify_caller(self, context: grpc.aio.ServicerContext[Any, Any]) -> Principal | None:
        """Who calls; None: whoever this machine's user is, or anybody, where that was wanted.

        Raises:
            PermissionDenied: nobody who may be answered.
            Unavailable: its certificate has ended since it connected.
        """
        if self.folder is None:
            if not (
                self.insecure or is_same_user(context.peer(), list(self._serving.values()) or listen_addresses.values())
            ):
                raise PermissionDenied("another user of this machine")
            return None
        shown = context.auth_context()
        certificate, chain = (next(iter(shown.get(name, ())), b"") for name in ("x509_pem_cert", "x509_pem_cert_chain"))
        return self.authenticate_certificate(certificate, chain)

    def can_serve(self, peer: str) -> bool:
        """Whether a connection may be served at all: without an identity, this machine's user's, unless anybody's may be.

        Args:
            peer: as gRPC has it: `ipv4:127.0.0.1:40123`.
        """
        return self.folder is not None or self.insecure or is_same_user(peer)

    def authenticate_certificate(self, certificate: bytes, chain: bytes = b"") -> Principal:
        """Whom a certificate names, which the handshake has found to be valid and of an authority that is believed.

        Args:
            certificate: in PEM.
            chain: what was shown with it, in PEM.

        Raises:
            PermissionDenied: nobody of this deployment, or it was revoked.
            Unavailable: it has ended since.
        """
        now, found = self._current(), _parsed(certificate)
        principal = _known(now, found, chain)
        if (bundle := now.bundles[principal.domain]) != now.authorities:  # the handshake has believed all of them
            try:
                verify_chain(certificate + chain, bundle, datetime.now(UTC))
            except PermissionDenied:
                raise PermissionDenied(
                    f"a certificate of {principal} that no authority of {principal.domain} has issued"
                ) from None
        return principal

    # ---- signing ------------------------------------------------------------------------------------------

    def sign_statement(self, statement: Statement) -> SignedStatement:
        """A statement, signed with the key of this identity.

        Raises:
            FailedPrecondition: the files of the identity cannot be used, or its key cannot sign.
        """
        now = self._current()
        return SignedStatement(statement, now.chain, sign(now.signing_key, statement.content))

    def verify_statement(self, signed: SignedStatement) -> Principal:
        """Who has signed a statement.

        Raises:
            PermissionDenied: nobody of this deployment, it was revoked, or the signature is another one's.
            Unavailable: its certificate has ended.
        """
        now, claimed = self._current(), signed.claimed_principal
        found = signed.verify_signature(
            now.bundles.get(claimed.domain if claimed else "", now.authorities), datetime.now(UTC)
        )
        return _known(now, found, signed.certificates)

    # ---- files --------------------------------------------------------------------------------------------

    def _current(self) -> Identity:
        """What the files say now; while they cannot be used, what they said before.

        Raises:
            FailedPrecondition: they never could.
        """
        folder = self.folder
        if folder is None:
            raise FailedPrecondition("this process has no identity")
        if self._loaded is not None and _stamp(folder) == self._seen:
            return self._loaded
        try:
            self._seen = _stamp(folder)
            self._loaded = _load(folder)
        except (OSError, ValueError, UnsupportedAlgorithm, FailedPrecondition) as error:
            why = f"the identity in {folder} cannot be used: {_in_words(error)}"
            if self._loaded is None:
                raise FailedPrecondition(why) from None
            log.error("identity not renewed", reason=why)
        return self._loaded


NO_IDENTITY = Credentials()
"""Of a process that speaks in the clear, on this machine."""


def _stamp(folder: Path) -> tuple[object, ...]:
    """Changes when a file does."""
    found = []
    for name in (CERTIFICATE_FILE, KEY_FILE, AUTHORITIES_FILE, REVOCATION_FILE):
        try:
            about = (folder / name).stat()
            found.append((about.st_mtime_ns, about.st_ino, about.st_size))
        except OSError:
            found.append((0, 0, 0))
    return tuple(found)


def _load(folder: Path) -> Identity:
    """Read what stands in a folder.

    Raises:
        OSError: a file cannot be read.
        ValueError: one holds something else.
        FailedPrecondition: they do not fit each other, or others may read the key.
    """
    _require_private(folder / KEY_FILE)
    chain, key, authorities = (_read(folder / name) for name in (CERTIFICATE_FILE, KEY_FILE, AUTHORITIES_FILE))
    (own, *between), believed = (
        parse_certificates(chain, CERTIFICATE_FILE),
        parse_certificates(authorities, AUTHORITIES_FILE),
    )
    signing = parse_private_key(key)
    principal = require_usable_certificate([own, *between], signing)
    if own.not_valid_after_utc < datetime.now(UTC):
        raise FailedPrecondition(
            f"the certificate of {principal} has ended at {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC: renew it"
        )
    if (left := own.not_valid_after_utc - datetime.now(UTC)) < EXPIRY_WARNING_PERIOD:
        log.warning("certificate ends soon", identity=str(principal), days=left.days)
    bundles = group_by_domain(believed, principal.domain)
    revoked: Mapping[str, frozenset[tuple[bytes, int]]] = {}
    if "" in bundles:
        unbelieved = ", ".join(each.subject.rfc4514_string()[:80] for each in bundles[""][:3])
        log.warning(
            "authority believed for nobody", authority=unbelieved, why="it names no trust domain, and others do"
        )
    if (folder / REVOCATION_FILE).exists():
        home = principal.domain
        signers = {**bundles, home: [*bundles.get(home, ()), *between]}
        revoked = parse_revocations(_read(folder / REVOCATION_FILE), signers)
    rooted = has_chain_to_root(own, between, bundles.get(principal.domain, ()))
    if len(bundles) == 1:
        whole = dict.fromkeys(bundles, authorities)
    else:
        whole = {name: b"".join(each.public_bytes(Encoding.PEM) for each in roots) for name, roots in bundles.items()}
    ends = own.not_valid_after_utc
    return Identity(folder, chain, key, signing, authorities, whole, principal, ends, revoked, rooted)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise ValueError(f"{path.name} must have at most {_MAX_FILE_BYTES} bytes")
    return content


def _require_private(path: Path) -> None:
    if (mode := stat.S_IMODE(path.stat().st_mode)) & 0o007:
        raise FailedPrecondition(
            f"{path.name} must not be open to every user of this machine, got mode {mode:04o}: chmod 600 it, "
            "or where it is a secret of Kubernetes, mount that with defaultMode 0440"
        )


def _known(now: Identity, found: x509.Certificate, chain: bytes) -> Principal:
    """Whom a certificate names, as this process calls it; whose authority it is of is not looked at.

    Raises:
        PermissionDenied: nobody of a domain that is believed, or it was revoked.
        Unavailable: it has ended.
    """
    principal = read_principal(found)
    if principal is None or principal.domain not in now.bundles:
        raise PermissionDenied("a certificate that names nobody of this deployment")
    revoked = now.revocations.get(principal.domain, frozenset())
    if revoked and not revoked.isdisjoint({read_issuer_and_serial(found), *_numbers(chain)}):
        raise PermissionDenied(f"a revoked certificate of {principal}, or of an authority between")
    if found.not_valid_after_utc < datetime.now(UTC):
        raise Unavailable("the certificate that this connection began with has ended: connect again, with a new one")
    return principal.qualify_for(now.principal.domain)


@lru_cache(maxsize=4_096)
def _parsed(certificate: bytes) -> x509.Certificate:
    """A certificate that a handshake has shown.

    Raises:
        PermissionDenied: there was none.
    """
    try:
        return x509.load_pem_x509_certificate(certificate)
    except (ValueError, x509.InvalidVersion):
        raise PermissionDenied("no certificate") from None


@lru_cache(maxsize=4_096)
def _numbers(chain: bytes) -> frozenset[tuple[bytes, int]]:
    """Of certificates that a handshake has shown, by which lists of what was revoked name them.

    Raises:
        PermissionDenied: one cannot be read.
    """
    try:
        return frozenset(map(read_issuer_and_serial, x509.load_pem_x509_certificates(chain))) if chain else frozenset()
    except ValueError:
        raise PermissionDenied("a chain of certificates that cannot be read") from None


def _configuration(loaded: Identity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.chain)], loaded.authorities)


def _https(loaded: Identity, protocol: int = ssl.PROTOCOL_TLS_SERVER) -> ssl.SSLContext:
    """Raises `OSError` where the files are no longer those that were loaded."""
    context = ssl.SSLContext(protocol)
    context.minimum_version, context.check_hostname = ssl.TLSVersion.TLSv1_3, False
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    context.load_cert_chain(loaded.folder / CERTIFICATE_FILE, loaded.folder / KEY_FILE)
    context.load_verify_locations(cadata=loaded.authorities.decode("ascii", "ignore"))
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{Path(error.filename or '').name}: {error.strerror}"
    return " ".join(str(error).split())[:300]
