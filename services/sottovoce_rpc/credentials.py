"""Credentials of a process: its identity, and the callers that it trusts, by mutual TLS or as this machine's users.

A folder holds the files of an identity, which any authority can write (cert-manager uses these names):

- `tls.crt`, `tls.key`: the certificate, with its chain, and its key;
- `ca.crt`: the trusted authorities, each for the one trust domain that it names (an authority that names none: for the domain
  of `tls.crt`, unless another one names that);
- `crl.pem`, optional: certificates that they have revoked.

Files are read again when they change. A process without an identity communicates in the clear, and only on this machine, where it
accepts only its own user (and root); `insecure` lifts both restrictions.
"""

from __future__ import annotations

import asyncio
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
from sottovoce_rpc.addresses import format_peer, is_loopback, is_same_user, listen_addresses
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
"""Period before its expiry in which a certificate causes a warning."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Identity:
    """Content of an identity's files at one time."""

    folder: Path
    chain: bytes
    key: bytes = field(repr=False)
    signing_key: PrivateKeyTypes = field(repr=False)
    """The private key, parsed."""
    authorities: bytes
    """All trusted authorities, PEM."""
    bundles: Mapping[str, bytes]
    """Trusted authorities of each trust domain, PEM."""
    principal: Principal
    expiry: datetime
    revocations: Mapping[str, frozenset[tuple[bytes, int]]]
    """Issuers and serial numbers of revoked certificates, by trust domain."""
    is_rooted: bool
    """True if the chain leads to an authority of its own domain that this process itself trusts."""

    @property
    def is_revoked(self) -> bool:
        """Return whether the certificate, or one between it and its authority, is revoked by this process's own list."""
        return not self.revocations.get(self.principal.domain, frozenset()).isdisjoint(_read_serials(self.chain))

    def get_bundle(self, domain: str) -> bytes:
        """Return the authorities of a trust domain.

        Raises:
            FailedPrecondition: none of the domain is trusted.
        """
        if domain not in self.bundles:
            raise FailedPrecondition(
                f"{self.folder / AUTHORITIES_FILE} must hold an authority that names spiffe://{domain}, and has only those of "
                f"{', '.join(filter(None, self.bundles))}: add it (docs/operate/identities.md)"
            )
        return self.bundles[domain]


@dataclass(slots=True)
class Credentials:
    """Identity of a process and rules for its channels and servers.

    Args:
        folder: folder of its identity; None: it has none.
        insecure: without an identity, use channels in the clear to other machines, too, and accept any caller.
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
        """Principal of this process; None if it has no identity.

        Raises:
            FailedPrecondition: the identity's files cannot be used.
        """
        return None if self.folder is None else self._load_current().principal

    def require_principal(self, role: Role, name: str = "") -> None:
        """Require that the certificate of a service is of its kind.

        Args:
            role: required role.
            name: required name; empty: any.

        Raises:
            FailedPrecondition: the certificate names another role or name, or the files cannot be used.
        """
        own = self.principal
        if own is not None and (own.role is not role or not (name == "" or own.is_one_of(f"{role}/{name}"))):
            wanted = f"{role}/{name or 'NAME'}"
            raise FailedPrecondition(
                f"the identity in {self.folder} must be of {wanted}, got {own}: `sottovoce pki issue {wanted}`"
            )

    @property
    def expiry(self) -> datetime | None:
        """Expiry of the certificate; None if there is none.

        Raises:
            FailedPrecondition: the identity's files cannot be used.
        """
        return None if self.folder is None else self._load_current().expiry

    def load_identity(self) -> Identity | None:
        """Return the current content of the identity's files; None if this process has no identity.

        Raises:
            FailedPrecondition: the files cannot be used.
        """
        return None if self.folder is None else self._load_current()

    # ---- channels -----------------------------------------------------------------------------------------

    def open_channel(
        self, address: str, role: Role | None, name: str, options: Sequence[tuple[str, Any]]
    ) -> grpc.aio.Channel:
        """Open a channel to a service.

        Args:
            address: address of the service.
            role, name: with an identity, the role and name that the service's certificate must have; an empty name allows all of
                this process's domain. Only authorities of the name's domain are trusted.
            options: options of the channel.

        Raises:
            SpecError: the service is on another machine, and there is no identity.
            FailedPrecondition: the files of the identity cannot be used, or no authority of the domain is trusted.
        """
        if self.folder is None:
            self.require_local(address)
            return grpc.aio.insecure_channel(address, options=options)
        if role is None:
            raise ValueError(f"a channel to {address} with an identity requires the role of the service")
        now = self._load_current()
        bundle = now.get_bundle(name.partition("@")[2] or now.principal.domain)
        credentials = grpc.ssl_channel_credentials(bundle, now.key, now.chain)
        host = build_host_name(now.principal.domain, role, name)
        return grpc.aio.secure_channel(address, credentials, options=[*options, (_OVERRIDE, host)])

    def require_local(self, address: str) -> None:
        """Require that without an identity an address is of this machine, unless `insecure`.

        Raises:
            SpecError: other machines can reach it.
        """
        if self.folder is None and not (self.insecure or is_loopback(address)):
            raise SpecError(
                f"{address} is reached from other machines, so channels to it must be encrypted: give this process an identity "
                "(--identity FOLDER, from `sottovoce pki issue`), or allow channels in the clear (--insecure)"
            )

    # ---- servers ------------------------------------------------------------------------------------------

    def build_server_credentials(self, listen: str) -> grpc.ServerCredentials | None:
        """Build credentials of a gRPC server; None: it serves in the clear.

        Args:
            listen: listen address.

        Raises:
            SpecError: other machines can reach the address, and there is no identity.
            FailedPrecondition: the files of the identity cannot be used.
        """
        if self.folder is None:
            self.require_local(listen)
            return None
        current = self._load_current()

        def reload() -> grpc.ServerCertificateConfiguration | None:
            """Return a changed configuration, or None; gRPC calls it before each handshake, in a thread of its own."""
            nonlocal current
            before, current = current, self._load_current()
            return None if current is before else _build_configuration(current)

        return grpc.dynamic_ssl_server_credentials(
            _build_configuration(current),
            reload,  # type: ignore[arg-type] # the stubs do not know that None means unchanged
            require_client_authentication=True,
        )

    def __reduce__(self) -> tuple[type[Credentials], tuple[Path | None, bool]]:
        """Pickle folder and option only: loaded files and registered servers belong to this process."""
        return Credentials, (self.folder, self.insecure)

    def register_server(self, server: object, address: str) -> None:
        """Register the listen address of a server, so that callers are looked up among its connections only."""
        self._serving[server] = address

    def build_tls_server_context(self, listen: str, protocols: Sequence[str] = ()) -> ssl.SSLContext | None:
        """Build a context for a server without gRPC that requires client certificates; it loads renewed files by itself.

        Sessions are never resumed: each connection is authenticated anew.

        Args:
            listen: listen address.
            protocols: protocols that are negotiated (ALPN), such as `h2`.

        Raises:
            SpecError: other machines can reach the address, and there is no identity.
            FailedPrecondition: the files of the identity cannot be used.
        """
        if self.folder is None:
            self.require_local(listen)
            return None
        current = self._load_current()
        first = latest = _build_tls_context(current, protocols)

        def reload(tls: ssl.SSLObject, *_: object) -> None:
            """Switch to renewed files; called at the beginning of each handshake."""
            nonlocal current, latest
            if (now := self._load_current()) is not current:
                with contextlib.suppress(OSError):  # the files are being written: the next handshake tries again
                    latest, current = _build_tls_context(now, protocols), now
            tls.context = latest

        first.sni_callback = reload
        return first

    def build_tls_client_context(self, protocols: Sequence[str] = ()) -> ssl.SSLContext | None:
        """Build a context for a client of such a server; the server's principal is checked by `authenticate_connection`.

        Returns None if this process has no identity.

        Raises:
            FailedPrecondition: the files of the identity cannot be used.
        """
        if self.folder is None:
            return None
        return _build_tls_context(self._load_current(), protocols, ssl.PROTOCOL_TLS_CLIENT)

    def identify_caller(self, context: grpc.aio.ServicerContext[Any, Any]) -> Principal | None:
        """Return the caller of an RPC; None: this machine's user, or any caller if `insecure`.

        Raises:
            PermissionDenied: the caller is not trusted.
            Unavailable: its certificate has expired since it connected.
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

    def can_serve(self, peer: str, servers: Sequence[str]) -> bool:
        """Return whether a connection may be served: without an identity only if it is this user's, unless `insecure`.

        Args:
            peer: as gRPC reports it: `ipv4:127.0.0.1:40123`.
            servers: addresses of the servers that the connection may lead to.
        """
        return self.folder is not None or self.insecure or is_same_user(peer, servers)

    def authenticate_connection(
        self, connection: asyncio.BaseTransport, servers: Sequence[str] = ()
    ) -> Principal | None:
        """Return the principal at the other end of a connection without gRPC; None: this machine's user, or any if `insecure`.

        Args:
            connection: connection that asyncio has opened, with TLS if this process has an identity.
            servers: addresses of the servers that it may lead to, if known.

        Raises:
            PermissionDenied: the other end is not trusted.
            Unavailable: its certificate has expired.
        """
        if self.folder is None:
            if not (self.insecure or is_same_user(format_peer(connection), servers)):
                raise PermissionDenied("another user of this machine")
            return None
        return self.authenticate_certificate(*_read_peer_chain(connection.get_extra_info("ssl_object")))

    def authenticate_certificate(self, certificate: bytes, chain: bytes = b"") -> Principal:
        """Return the principal of a certificate that the TLS handshake has verified.

        Args:
            certificate: PEM.
            chain: PEM of the chain sent with it.

        Raises:
            PermissionDenied: it names no principal of this deployment, or is revoked.
            Unavailable: it has expired since.
        """
        now, found = self._load_current(), _parse_certificate(certificate)
        principal = _check_certificate(now, found, chain)
        if (
            bundle := now.bundles[principal.domain]
        ) != now.authorities:  # the handshake trusts authorities of all domains
            try:
                verify_chain(certificate + chain, bundle, datetime.now(UTC))
            except PermissionDenied:
                raise PermissionDenied(
                    f"a certificate of {principal} that no authority of {principal.domain} has issued"
                ) from None
        return principal

    # ---- signing ------------------------------------------------------------------------------------------

    def sign_statement(self, statement: Statement) -> SignedStatement:
        """Sign a statement with the key of this identity.

        Raises:
            FailedPrecondition: the files of the identity cannot be used, or the key cannot sign.
        """
        now = self._load_current()
        return SignedStatement(statement, now.chain, sign(now.signing_key, statement.content))

    def verify_statement(self, signed: SignedStatement) -> Principal:
        """Verify a signed statement, and return its signer.

        Raises:
            PermissionDenied: the signer is not of this deployment or revoked, or the signature is not the certificate's.
            Unavailable: its certificate has expired.
        """
        now, claimed = self._load_current(), signed.claimed_principal
        found = signed.verify_signature(
            now.bundles.get(claimed.domain if claimed else "", now.authorities), datetime.now(UTC)
        )
        return _check_certificate(now, found, signed.certificates)

    # ---- files --------------------------------------------------------------------------------------------

    def _load_current(self) -> Identity:
        """Return the current content of the files; if it cannot be used, the last content that could.

        Raises:
            FailedPrecondition: the files could never be used.
        """
        folder = self.folder
        if folder is None:
            raise FailedPrecondition("this process has no identity")
        if self._loaded is not None and _compute_stamp(folder) == self._seen:
            return self._loaded
        try:
            self._seen = _compute_stamp(folder)
            self._loaded = _load_identity(folder)
        except (OSError, ValueError, UnsupportedAlgorithm, FailedPrecondition) as error:
            why = f"the identity in {folder} cannot be used: {_describe_error(error)}"
            if self._loaded is None:
                raise FailedPrecondition(why) from None
            log.error("identity not renewed", reason=why)
        return self._loaded


NO_IDENTITY = Credentials()
"""Credentials without an identity: channels in the clear, on this machine only."""


def _compute_stamp(folder: Path) -> tuple[object, ...]:
    """Return a value that changes when a file does."""
    found = []
    for name in (CERTIFICATE_FILE, KEY_FILE, AUTHORITIES_FILE, REVOCATION_FILE):
        try:
            status = (folder / name).stat()
            found.append((status.st_mtime_ns, status.st_ino, status.st_size))
        except OSError:
            found.append((0, 0, 0))
    return tuple(found)


def _load_identity(folder: Path) -> Identity:
    """Read and check the files of a folder.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file has other content.
        FailedPrecondition: the files do not match, or other users may read the key.
    """
    _require_private(folder / KEY_FILE)
    chain, key, authorities = (_read_file(folder / name) for name in (CERTIFICATE_FILE, KEY_FILE, AUTHORITIES_FILE))
    (own, *between), trusted = (
        parse_certificates(chain, CERTIFICATE_FILE),
        parse_certificates(authorities, AUTHORITIES_FILE),
    )
    signing = parse_private_key(key)
    principal = require_usable_certificate([own, *between], signing)
    if own.not_valid_after_utc < datetime.now(UTC):
        raise FailedPrecondition(
            f"the certificate of {principal} has expired at {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC: renew it"
        )
    if (left := own.not_valid_after_utc - datetime.now(UTC)) < EXPIRY_WARNING_PERIOD:
        log.warning("certificate expires soon", identity=str(principal), days=left.days)
    bundles = group_by_domain(trusted, principal.domain)
    revoked: Mapping[str, frozenset[tuple[bytes, int]]] = {}
    if "" in bundles:
        unused = ", ".join(each.subject.rfc4514_string()[:80] for each in bundles[""][:3])
        log.warning(
            "authority not trusted for any domain", authority=unused, reason="it names no trust domain, and others do"
        )
    if (folder / REVOCATION_FILE).exists():
        home = principal.domain
        signers = {**bundles, home: [*bundles.get(home, ()), *between]}
        revoked = parse_revocations(_read_file(folder / REVOCATION_FILE), signers)
    rooted = has_chain_to_root(own, between, bundles.get(principal.domain, ()))
    if len(bundles) == 1:
        bundle_bytes = dict.fromkeys(bundles, authorities)
    else:
        bundle_bytes = {
            name: b"".join(each.public_bytes(Encoding.PEM) for each in roots) for name, roots in bundles.items()
        }
    ends = own.not_valid_after_utc
    return Identity(folder, chain, key, signing, authorities, bundle_bytes, principal, ends, revoked, rooted)


def _read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise ValueError(f"{path.name} must have at most {_MAX_FILE_BYTES} bytes")
    return content


def _require_private(path: Path) -> None:
    if (mode := stat.S_IMODE(path.stat().st_mode)) & 0o007:
        raise FailedPrecondition(
            f"{path.name} must not be open to every user of this machine, got mode {mode:04o}: chmod 600 it, "
            "or if it is a Kubernetes secret, mount it with defaultMode 0440"
        )


def _check_certificate(now: Identity, found: x509.Certificate, chain: bytes) -> Principal:
    """Return the principal of a certificate, as seen from this process; its issuer is not checked.

    Raises:
        PermissionDenied: it names no principal of a trusted domain, or is revoked.
        Unavailable: it has expired.
    """
    principal = read_principal(found)
    if principal is None or principal.domain not in now.bundles:
        raise PermissionDenied("a certificate that names no principal of this deployment")
    revoked = now.revocations.get(principal.domain, frozenset())
    if revoked and not revoked.isdisjoint({read_issuer_and_serial(found), *_read_serials(chain)}):
        raise PermissionDenied(f"a revoked certificate of {principal}, or of an authority between")
    if found.not_valid_after_utc < datetime.now(UTC):
        raise Unavailable("the certificate that this connection began with has expired: connect again, with a new one")
    return principal.qualify_for(now.principal.domain)


@lru_cache(maxsize=4_096)
def _parse_certificate(certificate: bytes) -> x509.Certificate:
    """Parse a certificate of a handshake.

    Raises:
        PermissionDenied: there is none.
    """
    try:
        return x509.load_pem_x509_certificate(certificate)
    except (ValueError, x509.InvalidVersion):
        raise PermissionDenied("no certificate") from None


@lru_cache(maxsize=4_096)
def _read_serials(chain: bytes) -> frozenset[tuple[bytes, int]]:
    """Return issuers and serial numbers of a chain, by which revocation lists name certificates.

    Raises:
        PermissionDenied: one cannot be read.
    """
    try:
        return frozenset(map(read_issuer_and_serial, x509.load_pem_x509_certificates(chain))) if chain else frozenset()
    except ValueError:
        raise PermissionDenied("a chain of certificates that cannot be read") from None


def _build_configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(identity.key, identity.chain)], identity.authorities)


def _build_tls_context(
    identity: Identity, protocols: Sequence[str], protocol: int = ssl.PROTOCOL_TLS_SERVER
) -> ssl.SSLContext:
    """Raise `OSError` if the files have changed since the identity was loaded."""
    context = ssl.SSLContext(protocol)
    context.minimum_version, context.check_hostname = ssl.TLSVersion.TLSv1_3, False
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    context.load_cert_chain(identity.folder / CERTIFICATE_FILE, identity.folder / KEY_FILE)
    context.load_verify_locations(cadata=identity.authorities.decode("ascii", "ignore"))
    context.verify_mode = ssl.CERT_REQUIRED
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


def _read_peer_chain(tls: ssl.SSLObject) -> tuple[bytes, bytes]:
    """Return the peer's certificate and the rest of its chain, in PEM."""
    # Before Python 3.13 the chain is available under a private name only.
    chain = getattr(tls, "get_unverified_chain", None) or tls._sslobj.get_unverified_chain  # type: ignore[attr-defined]
    der = (each if isinstance(each, bytes) else each.public_bytes(2) for each in chain() or ())
    own, *between = (ssl.DER_cert_to_PEM_cert(each).encode() for each in der)
    return own, b"".join(between)


def _describe_error(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{Path(error.filename or '').name}: {error.strerror}"
    return " ".join(str(error).split())[:300]
