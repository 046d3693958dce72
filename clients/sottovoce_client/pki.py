"""A certificate authority of one's own, for deployments that have none: in a folder, by `sottovoce pki`.

The authority's key stays in its folder (`ca.key`); what is issued goes into folders of its own, as `--identity` takes them.
Keys are of P-256, which every TLS library has.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from rich.console import Console

from sottovoce.errors import NotReady, SpecError
from sottovoce_client import terminal
from sottovoce_rpc.certificates import AUTHORITIES, CERTIFICATE, KEY, REVOKED, named
from sottovoce_rpc.credentials import SOON
from sottovoce_rpc.principals import Principal, Role, host_of

AUTHORITY_KEY = "ca.key"
USUAL_DAYS, AUTHORITY_DAYS = 90, 3_650
_ISSUED = "issued"
"""Folder of an authority with a copy of each certificate that it issued, by serial number."""
_EARLY = timedelta(minutes=5)
"""A certificate begins a little before it is issued: clocks differ."""
_LIST_DAYS = 30
"""Until when a list of what was revoked says of itself that it is current; it is honoured ever after."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate.

    Attributes:
        principal: whom it names; None: nobody of a deployment.
        serial: its number.
        begins, ends: between which it is valid.
        revoked: whether its authority has taken it back.
    """

    principal: Principal | None
    serial: int
    begins: datetime
    ends: datetime
    revoked: bool = False


class Authority:
    """A certificate authority in a folder.

    Args:
        folder: as `Authority.init` made it.

    Raises:
        NotReady: there is none, or it cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._certificate = x509.load_pem_x509_certificate((folder / AUTHORITIES).read_bytes())
            key = serialization.load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), None)
        except OSError as error:
            raise NotReady(
                f"no authority in {folder}: {Path(error.filename).name}: {error.strerror}; make one with `sottovoce pki init`"
            ) from None
        except ValueError as error:
            raise NotReady(f"the authority in {folder} cannot be used: {' '.join(str(error).split())[:200]}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise NotReady(f"the authority in {folder} must have a key of an elliptic curve")
        self._key = key

    @classmethod
    def init(cls, folder: Path, domain: str, days: int = AUTHORITY_DAYS) -> Authority:
        """Make an authority for a trust domain.

        Raises:
            SpecError: the domain is none.
            NotReady: there is one already, or the folder cannot be written.
        """
        Principal.of(domain, f"{Role.OPERATOR}/any")
        if (folder / AUTHORITIES).exists():  # written last: what died before it is begun again
            raise NotReady(f"there is an authority in {folder} already")
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Sottovoce authority of {domain}")])
        now = datetime.now(UTC)
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _EARLY)
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(own, critical=False)
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"spiffe://{domain}")]), critical=False
            )
            .sign(key, hashes.SHA256())
        )
        _make(folder)
        write_private(folder / AUTHORITY_KEY, _pem(key))
        _write(folder / REVOKED, _list_of((), name, key))
        _write(folder / AUTHORITIES, certificate.public_bytes(serialization.Encoding.PEM))
        return cls(folder)

    @property
    def domain(self) -> str:
        """The trust domain.

        Raises:
            NotReady: its certificate names none.
        """
        names = self._certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        if len(uris) != 1 or not uris[0].startswith("spiffe://"):
            raise NotReady(f"the authority in {self.folder} must name one trust domain, got {uris[:3]}")
        return uris[0].removeprefix("spiffe://")

    def issue(self, whom: str, folder: Path, *, days: int = USUAL_DAYS, hosts: Sequence[str] = ()) -> Issued:
        """Give a principal a certificate and a key, in a folder of its own.

        Args:
            whom: `role/name`.
            folder: that `--identity` is to be given.
            days: for which it is valid, from now on.
            hosts: names and addresses by which other clients than ours know it.

        Raises:
            SpecError: it is no principal.
            NotReady: the folder has an identity already, or cannot be written.
        """
        principal = Principal.of(self.domain, whom)
        if (folder / CERTIFICATE).exists():  # written last: what died before it is begun again
            raise NotReady(f"there is an identity in {folder} already: renew it with `sottovoce pki renew`")
        return self._issue(principal, folder, days, hosts)

    def renew(self, folder: Path, *, days: int = USUAL_DAYS) -> Issued:
        """Give an identity another key and certificate, for the same principal and hosts. Services take it up as they run.

        Raises:
            NotReady: there is none in the folder, or it is none of this authority's, or was revoked.
        """
        before = certificate_of(folder)
        principal = named(before)
        if principal is None or principal.domain != self.domain or not self._signed(before):
            raise NotReady(f"the identity in {folder} must be of this authority")
        if before.serial_number in self._revoked():
            raise NotReady(f"the identity in {folder} was revoked: issue another one")
        hosts = before.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        own = {principal.host, host_of(principal.domain, principal.role)}
        more = [each for each in hosts.get_values_for_type(x509.DNSName) if each not in own]
        return self._issue(principal, folder, days, [*more, *map(str, hosts.get_values_for_type(x509.IPAddress))])

    def revoke(self, whom: str) -> list[Issued]:
        """Take back all certificates of a principal that are still valid; what is not listed yet is listed now.

        Raises:
            SpecError: it is no principal, or has no certificate that is still valid.
        """
        principal, now = Principal.of(self.domain, whom), datetime.now(UTC)
        own = [each for each in self.issued() if each.principal == principal and each.ends > now and not each.revoked]
        if not own:
            known = sorted({str(each.principal) for each in self.issued() if each.ends > now and not each.revoked})
            raise SpecError(
                f"{whom} has no certificate that is valid; there are those of {', '.join(known) or 'nobody'}"
            )
        serials = [*self._revoked(), *(each.serial for each in own)]
        _write(self.folder / REVOKED, _list_of(serials, self._certificate.subject, self._key))
        return own

    def issued(self) -> list[Issued]:
        """All that were issued, the oldest first."""
        revoked = self._revoked()
        found = [_issued(path, revoked) for path in (self.folder / _ISSUED).glob("*.crt")]
        return sorted(found, key=lambda each: (each.begins, each.ends, str(each.principal)))

    # ---- inside -------------------------------------------------------------------------------------------

    def _issue(self, principal: Principal, folder: Path, days: int, hosts: Iterable[str]) -> Issued:
        now, key = datetime.now(UTC), ec.generate_private_key(ec.SECP256R1())
        ends = min(now + timedelta(days=days), self._certificate.not_valid_after_utc)
        own = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(principal)[:64])]))
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _EARLY)
            .not_valid_after(ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(_names(principal, hosts), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        content = certificate.public_bytes(serialization.Encoding.PEM)
        _make(self.folder / _ISSUED)
        _write(self.folder / _ISSUED / f"{certificate.serial_number:x}.crt", content)
        _make(folder)
        write_private(folder / KEY, _pem(key))
        for name in (AUTHORITIES, REVOKED):
            _write(folder / name, (self.folder / name).read_bytes())
        _write(folder / CERTIFICATE, content)
        return Issued(principal, certificate.serial_number, certificate.not_valid_before_utc, ends)

    def _signed(self, certificate: x509.Certificate) -> bool:
        try:
            certificate.verify_directly_issued_by(self._certificate)
        except (ValueError, TypeError, InvalidSignature):  # another issuer, another kind of key, a bad signature
            return False
        return True

    def _revoked(self) -> list[int]:
        return _listed(self.folder)


def _list_of(serials: Iterable[int], issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> bytes:
    """The list of what an authority has revoked, as its file."""
    now = datetime.now(UTC)
    listed = x509.CertificateRevocationListBuilder(
        issuer, last_update=now - _EARLY, next_update=now + timedelta(days=_LIST_DAYS)
    )
    for serial in dict.fromkeys(serials):
        one = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
        listed = listed.add_revoked_certificate(one)
    return listed.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def certificate_of(folder: Path) -> x509.Certificate:
    """The certificate of an identity.

    Raises:
        NotReady: there is none.
    """
    try:
        return x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is none"
        raise NotReady(f"no certificate in {folder / CERTIFICATE}: {why}") from None


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.replace(partial, path)


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def _make(folder: Path) -> None:
    """A folder for keys.

    Raises:
        NotReady: it cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise NotReady(f"cannot write to the folder {folder}: {error.strerror}") from None


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _names(principal: Principal, hosts: Iterable[str]) -> x509.SubjectAlternativeName:
    """Of a principal: its URI, and the hosts that are insisted on, or asked for besides.

    Raises:
        SpecError: a host is none.
    """
    known = dict.fromkeys([principal.host, host_of(principal.domain, principal.role), *hosts])
    return x509.SubjectAlternativeName([x509.UniformResourceIdentifier(principal.uri), *map(_host, known)])


def _host(text: str) -> x509.GeneralName:
    """A name of a host, or an address.

    Raises:
        SpecError: it is neither.
    """
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        pass
    try:
        return x509.DNSName(text)
    except ValueError:
        raise SpecError(f"a host must be a name in plain letters or an address, got {text[:100]!r}") from None


def _issued(path: Path, revoked: Iterable[int]) -> Issued:
    found = x509.load_pem_x509_certificate(path.read_bytes())
    ends, begins, serial = found.not_valid_after_utc, found.not_valid_before_utc, found.serial_number
    return Issued(named(found), serial, begins, ends, serial in set(revoked))


def spread(authority: Path, identities: Path) -> list[Path]:
    """Give identities the authority's list of what was revoked; returns their folders."""
    own = (authority / AUTHORITIES).read_bytes()
    found = [
        path.parent
        for path in sorted(identities.glob(f"*/{AUTHORITIES}"))
        if path.read_bytes() == own and (path.parent / CERTIFICATE).exists()
    ]
    for folder in found:
        _write(folder / REVOKED, (authority / REVOKED).read_bytes())
    return found


def shown(folder: Path, console: Console) -> int:
    """Print who has certificates, and until when.

    Returns:
        The exit code: 1 where one that is in use ends soon, or has ended.

    Raises:
        NotReady: there is neither an authority nor an identity.
    """
    if (folder / AUTHORITY_KEY).exists():
        issued = Authority(folder).issued()
        newest = {each.principal: each.serial for each in issued if not each.revoked}
    else:
        certificate_of(folder)
        issued = [_issued(folder / CERTIFICATE, _listed(folder))]
        newest = {each.principal: each.serial for each in issued}
    table, late, now = terminal.table(), 0, datetime.now(UTC)
    told = []
    for head in ("identity", "from", "until", "serial", ""):
        table.add_column(head, overflow="fold")
    for each in issued:
        soon = each.ends - now < SOON and newest.get(each.principal) == each.serial
        state = "revoked" if each.revoked else "ended" if each.ends < now else "ends soon" if soon else ""
        late += soon and not each.revoked
        style = "yellow" if soon else "dim" if state else ""
        who = str(each.principal or "nobody of a deployment")
        told.append(
            {"identity": who, "from": each.begins, "until": each.ends, "serial": f"{each.serial:x}", "state": state}
        )
        table.add_row(
            who, f"{each.begins:%Y-%m-%d}", f"{each.ends:%Y-%m-%d}", f"{each.serial:x}"[:12], state, style=style
        )
    console.print(table if issued else "no certificates")
    terminal.tell(lambda: told)
    return 1 if late else 0


def _listed(folder: Path) -> list[int]:
    path = folder / REVOKED
    return [each.serial_number for each in x509.load_pem_x509_crl(path.read_bytes())] if path.exists() else []
