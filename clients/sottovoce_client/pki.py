"""A certificate authority of one's own, for deployments that have none: in a folder, by `sottovoce pki`.

The authority's key stays in its folder (`ca.key`); what is issued goes into folders of its own, as `--identity` takes them.
Keys are of P-256, which every TLS library has.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from rich.console import Console

from sottovoce_client import terminal
from sottovoce_core.errors import AlreadyExists, FailedPrecondition, NotFound, SpecError
from sottovoce_rpc.certificates import (
    AUTHORITIES_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    REVOCATION_FILE,
    has_chain_to_root,
    has_signed_list,
    parse_certificates,
    parse_private_key,
    parse_revocation_lists,
    read_issuer_and_serial,
    read_principal,
    read_trust_domain,
    require_key_type,
)
from sottovoce_rpc.credentials import EXPIRY_WARNING_PERIOD
from sottovoce_rpc.principals import Principal, Role, build_host_name

AUTHORITY_KEY, REQUEST = "ca.key", "tls.csr"
DEFAULT_VALIDITY_DAYS, DEFAULT_AUTHORITY_DAYS = 90, 3_650
_ISSUED = "issued"
"""Folder of an authority with a copy of each certificate that it issued, by serial number."""
_EARLY = timedelta(minutes=5)
"""A certificate begins a little before it is issued: clocks differ."""
_LIST_DAYS = 30
"""Until when a list of what was revoked says of itself that it is current; it is honoured ever after."""


class Authority:
    """A certificate authority in a folder.

    Args:
        folder: as `Authority.init` made it.

    Raises:
        NotFound: there is none.
        FailedPrecondition: it cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            raw, raw_key = (folder / AUTHORITIES_FILE).read_bytes(), (folder / AUTHORITY_KEY).read_bytes()
        except OSError as error:
            raise NotFound(
                f"no authority in {folder}: {Path(error.filename).name}: {error.strerror}; make one with `sottovoce pki init`"
            ) from None
        believed, key = (
            parse_certificates(raw, str(folder / AUTHORITIES_FILE)),
            parse_private_key(raw_key, str(folder / AUTHORITY_KEY)),
        )
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise FailedPrecondition(f"the authority in {folder} must have a key of an elliptic curve")
        own = [each for each in believed if each.public_key() == key.public_key()]
        if not own:
            raise FailedPrecondition(
                f"{folder / AUTHORITIES_FILE} must hold the certificate of {AUTHORITY_KEY}, got only others"
            )
        self._certificate, self._key = max(own, key=_begins), key

    @classmethod
    def init(
        cls,
        folder: Path,
        domain: str,
        days: int = DEFAULT_AUTHORITY_DAYS,
        *,
        replaced_authority: Authority | None = None,
    ) -> Authority:
        """Make an authority for a trust domain.

        Args:
            folder: for it.
            domain: that it speaks for.
            days: for which its certificate is valid.
            replaces: the authority of this domain whose place it takes: each gets the certificate of the other, and the new
                one the lists and the record of what was issued, so that it can revoke that.

        Raises:
            SpecError: the domain is none, or not that of the authority that is replaced.
            FailedPrecondition: there is one already, or the folder cannot be written.
        """
        Principal.parse(domain, f"{Role.OPERATOR}/any")
        if replaced_authority is not None and replaced_authority.domain != domain:
            raise SpecError(
                f"the authority that is replaced must be of {domain}, got one of {replaced_authority.domain}"
            )
        if (folder / AUTHORITIES_FILE).exists():  # written last: what died before it is begun again
            raise AlreadyExists(f"there is an authority in {folder} already")
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Sottovoce authority of {domain}")])
        uri = x509.UniformResourceIdentifier(f"spiffe://{domain}")
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        extensions = (identifier, x509.SubjectAlternativeName([uri]))
        ends = datetime.now(UTC) + timedelta(days=days)
        certificate = _certificate(name, key.public_key(), ends, name, key, extensions, is_authority=True)
        _make(folder)
        _write(folder / AUTHORITY_KEY, _pem(key), 0o600)
        listed, believed = _list_of((), name, key), [certificate]
        if replaced_authority is not None:
            believed += replaced_authority._believed()
            listed += _as_file(_lists(replaced_authority.folder / REVOCATION_FILE))
            _make(folder / _ISSUED)
            for path in (replaced_authority.folder / _ISSUED).glob("*.crt"):
                _write(folder / _ISSUED / path.name, path.read_bytes())
            _write(
                replaced_authority.folder / AUTHORITIES_FILE,
                _as_file(_merged([*replaced_authority._believed(), certificate])),
            )
        _write(folder / REVOCATION_FILE, listed)
        _write(folder / AUTHORITIES_FILE, _as_file(believed))
        return cls(folder)

    @property
    def domain(self) -> str:
        """The trust domain.

        Raises:
            FailedPrecondition: its certificate names none.
        """
        found = read_trust_domain(self._certificate)
        if not found:
            raise FailedPrecondition(
                f"the certificate of the authority in {self.folder} must name one trust domain, and names none"
            )
        return found

    def issue(
        self,
        principal_name: str,
        folder: Path,
        *,
        days: int = DEFAULT_VALIDITY_DAYS,
        hosts: Sequence[str] = (),
        request: Path | None = None,
    ) -> x509.Certificate:
        """Issue a certificate to a principal, in a folder of its own, with a new key unless a request names one.

        Authorities and revocation lists that stand in the folder stay there. An identity of this principal that was revoked is
        replaced.

        Args:
            whom: `role/name`.
            folder: that `--identity` is to be given.
            days: for which it is valid, from now on.
            hosts: names and addresses by which other clients than ours know it.
            request: file of a certificate signing request. Its key is certified and stays where it is; the principal and
                the hosts are those given here, whatever the request asks for. A certificate of this principal in the folder
                is replaced.

        Raises:
            SpecError: it is no principal.
            FailedPrecondition: the folder has an identity already, or cannot be written, or the request cannot be used.
        """
        principal = Principal.parse(self.domain, principal_name)
        if principal.domain != self.domain:
            raise SpecError(
                f"{principal_name} must be of {self.domain}, the trust domain of this authority: have its own one issue it"
            )
        if request is None:
            if (folder / CERTIFICATE_FILE).exists():  # written last: what died before it is begun again
                before = read_certificate(folder)
                if read_principal(before) != principal or not self._is_revoked(before, folder):
                    raise AlreadyExists(
                        f"there is an identity in {folder} already: renew it with `sottovoce pki issue {folder}`"
                    )
            return self._issue(principal, folder, days, hosts, None)
        if (folder / CERTIFICATE_FILE).exists() and (known := read_principal(read_certificate(folder))) != principal:
            raise FailedPrecondition(
                f"the identity in {folder} must be of {principal_name}, got {known or 'another one'}: take another folder"
            )
        public = read_request(request).public_key()
        if (folder / KEY_FILE).exists() and parse_private_key((folder / KEY_FILE).read_bytes()).public_key() != public:
            raise FailedPrecondition(
                f"{folder / KEY_FILE} must be the key of the request {request}, and is another one: take another folder"
            )
        return self._issue(principal, folder, days, hosts, public)

    def renew(self, folder: Path, *, days: int = DEFAULT_VALIDITY_DAYS) -> x509.Certificate:
        """Give an identity another key and certificate, for the same principal and hosts. Services take it up as they run.

        Other authorities in its `ca.crt`, and their lists in its `crl.pem`, stay.

        Raises:
            FailedPrecondition: there is none in the folder, its key is kept elsewhere, it is of no authority of this domain that this
                authority's `ca.crt` holds, or it was revoked.
        """
        before = read_certificate(folder)
        if not (folder / KEY_FILE).exists():
            raise FailedPrecondition(
                f"the key of {folder} is kept elsewhere: have another request made there, and issue by it "
                "(`sottovoce pki issue --csr`)"
            )
        principal = read_principal(before)
        roots = [each for each in self._believed() if read_trust_domain(each) == self.domain]
        if principal is None or principal.domain != self.domain or not has_chain_to_root(before, (), roots):
            raise FailedPrecondition(
                f"the identity in {folder} must be of this authority, or of one of its domain in its {AUTHORITIES_FILE}"
            )
        if self._is_revoked(before, folder):
            raise FailedPrecondition(
                f"the identity in {folder} was revoked: issue another one with `sottovoce pki issue`"
            )
        hosts = before.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        own = {principal.host, build_host_name(principal.domain, principal.role)}
        more = [each for each in hosts.get_values_for_type(x509.DNSName) if each not in own]
        if not self._signed(before):  # so that it is revoked with those that were issued here
            content = before.public_bytes(serialization.Encoding.PEM)
            _write(self.folder / _ISSUED / f"{before.serial_number:x}.crt", content)
        hosts_kept = [*more, *map(str, hosts.get_values_for_type(x509.IPAddress))]
        return self._issue(principal, folder, days, hosts_kept, None)

    def revoke(self, principal_name: str) -> list[x509.Certificate]:
        """Take back all certificates of a principal that are still valid; what is not listed yet is listed now.

        An authority that has taken the place of another one takes back those of that one, too: both have one name, and lists
        name certificates by that.

        Raises:
            SpecError: it is no principal, or has no certificate that is still valid.
        """
        principal, now = Principal.parse(self.domain, principal_name), datetime.now(UTC)
        revoked = self.revoked_serials
        valid = [
            each
            for each in self.list_issued()
            if each.not_valid_after_utc > now and read_issuer_and_serial(each) not in revoked
        ]
        own = [each for each in valid if read_principal(each) == principal]
        if not own:
            known = sorted({str(read_principal(each)) for each in valid})
            raise SpecError(
                f"{principal_name} has no certificate that is valid; there are those of {', '.join(known) or 'nobody'}"
            )
        serials = [*(serial for _, serial in revoked), *(each.serial_number for each in own)]
        listed = x509.load_pem_x509_crl(_list_of(serials, self._certificate.subject, self._key))
        foreign = [each for each in _lists(self.folder / REVOCATION_FILE) if not self._has_signed(each)]
        _write(self.folder / REVOCATION_FILE, _as_file([listed, *foreign]))
        return own

    @property
    def other_authorities(self) -> list[x509.Certificate]:
        """Authorities of its domain that its `ca.crt` holds besides, and of which it has no record of what they issued."""
        issued = self.list_issued()
        own = [each for each in self._believed() if read_trust_domain(each) == self.domain and not self._is_own(each)]
        return [each for each in own if not any(has_chain_to_root(one, (), [each]) for one in issued)]

    def distribute_revocations(
        self, identities: Path, *, replaced_authority: Authority | None = None
    ) -> tuple[list[Path], dict[Path, str]]:
        """Give the identities that believe this authority its list of revoked certificates; lists of others stay.

        Args:
            identities: folder of the folders of identities.
            replaced: give those that believe this authority the certificate of the one that takes its place, too.

        Returns:
            The folders that have it now, and those that do not, with the reason.
        """
        given, skipped = list[Path](), dict[Path, str]()
        folders = {
            path.parent for name in (CERTIFICATE_FILE, AUTHORITIES_FILE) for path in identities.glob(f"*/{name}")
        }
        for folder in sorted(each for each in folders if not (each / AUTHORITY_KEY).exists()):
            try:
                believed = parse_certificates((folder / AUTHORITIES_FILE).read_bytes(), AUTHORITIES_FILE)
                if not any(map((replaced_authority or self)._is_own, believed)):
                    which = "this authority" if replaced_authority is None else "the authority that is replaced"
                    skipped[folder] = f"its {AUTHORITIES_FILE} does not hold {which}"
                    continue
                if replaced_authority is not None:
                    believed = _merged([*believed, self._certificate])
                    _write(folder / AUTHORITIES_FILE, _as_file(believed))
                _write(folder / REVOCATION_FILE, self._lists_for(folder, believed))
                given.append(folder)
            except (OSError, FailedPrecondition) as error:
                skipped[folder] = (
                    f"{Path(error.filename).name}: {error.strerror}" if isinstance(error, OSError) else str(error)
                )
        return given, skipped

    def list_issued(self) -> list[x509.Certificate]:
        """All that were issued, the oldest first."""
        found = [x509.load_pem_x509_certificate(path.read_bytes()) for path in (self.folder / _ISSUED).glob("*.crt")]
        return sorted(found, key=lambda each: (_begins(each), each.not_valid_after_utc, str(read_principal(each))))

    @property
    def revoked_serials(self) -> set[tuple[bytes, int]]:
        """Issuers and serial numbers of what it has taken back."""
        return _revoked_by(each for each in _lists(self.folder / REVOCATION_FILE) if self._has_signed(each))

    # ---- inside -------------------------------------------------------------------------------------------

    def _issue(
        self, principal: Principal, folder: Path, days: int, hosts: Iterable[str], public: PublicKeyTypes | None
    ) -> x509.Certificate:
        """Raises `FailedPrecondition` before anything is written where the files in the folder cannot be kept."""
        key = None if public is not None else ec.generate_private_key(ec.SECP256R1())
        ends = min(datetime.now(UTC) + timedelta(days=days), self._certificate.not_valid_after_utc)
        own = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        extensions = (
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            _names(principal, hosts),
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own),
        )
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(principal)[:64])])
        certified = key.public_key() if key is not None else public
        certificate = _certificate(subject, certified, ends, self._certificate.subject, self._key, extensions)
        content = certificate.public_bytes(serialization.Encoding.PEM)
        believed = _merged([*_certificates(folder / AUTHORITIES_FILE), *self._believed()])
        lists = self._lists_for(folder, believed)
        _make(self.folder / _ISSUED)
        _write(self.folder / _ISSUED / f"{certificate.serial_number:x}.crt", content)
        _make(folder)
        if key is not None:
            _write(folder / KEY_FILE, _pem(key), 0o600)
        _write(folder / AUTHORITIES_FILE, _as_file(believed))
        _write(folder / REVOCATION_FILE, lists)
        _write(folder / CERTIFICATE_FILE, content)
        return certificate

    def _is_revoked(self, certificate: x509.Certificate, folder: Path) -> bool:
        listed = _revoked_by([*_lists(self.folder / REVOCATION_FILE), *_lists(folder / REVOCATION_FILE)])
        return read_issuer_and_serial(certificate) in listed

    def _signed(self, certificate: x509.Certificate) -> bool:
        return has_chain_to_root(certificate, (), [self._certificate])

    def _is_own(self, certificate: x509.Certificate) -> bool:
        return _authority_of(certificate) == _authority_of(self._certificate)

    def _has_signed(self, listed: x509.CertificateRevocationList) -> bool:
        return has_signed_list(self._certificate, listed)

    def _believed(self) -> list[x509.Certificate]:
        """Its own certificate, and those of others in its folder: every identity gets them."""
        return _certificates(self.folder / AUTHORITIES_FILE)

    def _lists_for(self, folder: Path, believed: Sequence[x509.Certificate]) -> bytes:
        """The file of revocation lists of an identity: of each authority the newest, its own as it stands here.

        Raises:
            FailedPrecondition: a list is of no authority in `ca.crt`: services would refuse the file.
        """
        here, there = _lists(self.folder / REVOCATION_FILE), _lists(folder / REVOCATION_FILE)
        signers = [*believed, *_certificates(folder / CERTIFICATE_FILE)[1:]]
        newest = dict[tuple[bytes, bytes], x509.CertificateRevocationList]()
        for each in (*here, *there):
            signer = next((_authority_of(one) for one in signers if has_signed_list(one, each)), None)
            if signer is None and each in there:
                raise FailedPrecondition(
                    f"every list in {folder / REVOCATION_FILE} must be signed by an authority of {AUTHORITIES_FILE}, got one of "
                    f"{each.issuer.rfc4514_string()[:100]}: put that authority into {AUTHORITIES_FILE}, or take the list out"
                )
            if signer is None or (self._has_signed(each) and each not in here):
                continue
            if signer not in newest or _newer(newest[signer]) < _newer(each):
                newest[signer] = each
        return _as_file(newest.values())


def _begins(certificate: x509.Certificate) -> datetime:
    return certificate.not_valid_before_utc


def _authority_of(certificate: x509.Certificate) -> tuple[bytes, bytes]:
    """Name and key of an authority: its renewed certificate has the same."""
    return certificate.subject.public_bytes(), certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _merged(certificates: Iterable[x509.Certificate]) -> list[x509.Certificate]:
    """Of each authority its newest certificate, in the order in which they first stand."""
    newest = dict[tuple[bytes, bytes], x509.Certificate]()
    for each in certificates:
        if (before := newest.get(_authority_of(each))) is None or _begins(before) < _begins(each):
            newest[_authority_of(each)] = each
    return list(newest.values())


def _certificates(path: Path) -> list[x509.Certificate]:
    """Those of a file; none where there is no file.

    Raises:
        FailedPrecondition: it cannot be read.
    """
    return parse_certificates(path.read_bytes(), str(path)) if path.exists() else []


def _lists(path: Path) -> list[x509.CertificateRevocationList]:
    """The revocation lists of a file; none where there is no file.

    Raises:
        FailedPrecondition: it cannot be read.
    """
    return parse_revocation_lists(path.read_bytes(), str(path)) if path.exists() else []


def _newer(listed: x509.CertificateRevocationList) -> tuple[datetime, int]:
    """Greater for the newer of two lists of one authority; of one second, for the one that revokes more."""
    return listed.last_update_utc, len(listed)


def _as_file(each: Iterable[x509.Certificate | x509.CertificateRevocationList]) -> bytes:
    return b"".join(one.public_bytes(serialization.Encoding.PEM) for one in each)


def _revoked_by(lists: Iterable[x509.CertificateRevocationList]) -> set[tuple[bytes, int]]:
    return {(listed.issuer.public_bytes(), each.serial_number) for listed in lists for each in listed}


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


def read_certificate(folder: Path) -> x509.Certificate:
    """The certificate of an identity.

    Raises:
        FailedPrecondition: there is none.
    """
    try:
        return x509.load_pem_x509_certificate((folder / CERTIFICATE_FILE).read_bytes())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is none"
        raise NotFound(f"no certificate in {folder / CERTIFICATE_FILE}: {why}") from None


def read_request(path: Path) -> x509.CertificateSigningRequest:
    """A certificate signing request in PEM or DER, signed by the key that it asks a certificate for.

    Raises:
        FailedPrecondition: there is none, its signature is wrong, or its key is of a kind that gRPC does not take.
    """
    try:
        raw = path.read_bytes()
        load = x509.load_pem_x509_csr if b"-----BEGIN" in raw else x509.load_der_x509_csr
        found = load(raw)
        holds = found.is_signature_valid
    except OSError as error:
        raise NotFound(f"no certificate signing request in {path}: {error.strerror}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise FailedPrecondition(
            f"{path} must hold a certificate signing request in PEM or DER, got something else"
        ) from None
    if not holds:
        raise FailedPrecondition(
            f"{path} must be signed by the key that it asks a certificate for, and is not: have another one made"
        )
    require_key_type(found.public_key(), f"the key of {path}")
    return found


def list_requested_names(request: x509.CertificateSigningRequest) -> list[str]:
    """The names that a request asks for: its URIs, or else its common names."""
    try:
        names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (x509.ExtensionNotFound, ValueError):
        uris = []
    return uris or [str(each.value) for each in request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]


def create_request(principal_name: str, folder: Path) -> Path:
    """Make a key, where a folder has none, and a request to certify it for a principal; returns the request's file.

    Raises:
        SpecError: it is no principal.
        FailedPrecondition: the folder cannot be written, or its key cannot be used.
    """
    Principal.parse("any", principal_name)
    _make(folder)
    if not (folder / KEY_FILE).exists():
        _write(folder / KEY_FILE, _pem(ec.generate_private_key(ec.SECP256R1())), 0o600)
    key = parse_private_key((folder / KEY_FILE).read_bytes())
    require_key_type(key.public_key(), str(folder / KEY_FILE))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, principal_name[:64])])
    made = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())  # type: ignore[arg-type]
    _write(folder / REQUEST, made.public_bytes(serialization.Encoding.PEM))
    return folder / REQUEST


def _write(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file whole or not at all; `mode` is who may read it, less what this process's umask forbids."""
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.replace(partial, path)


def _make(folder: Path) -> None:
    """A folder for keys.

    Raises:
        FailedPrecondition: it cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise FailedPrecondition(f"cannot write to the folder {folder}: {error.strerror}") from None


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _certificate(
    subject: x509.Name,
    public: PublicKeyTypes | None,
    ends: datetime,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    extensions: Iterable[x509.ExtensionType],
    *,
    is_authority: bool = False,
) -> x509.Certificate:
    """A certificate from now on.

    Args:
        subject, public: whose it is, and the key.
        ends: until when.
        issuer, key: who signs it, with which key.
        extensions: besides its use.
        is_authority: it signs certificates, and nothing else; else it signs, and no certificates.
    """
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )
    constraints = x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)  # type: ignore[arg-type] # as `read_request` has it
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - _EARLY)
        .not_valid_after(ends)
    )
    for extension in (constraints, usage, *extensions):
        made = made.add_extension(extension, critical=extension in (constraints, usage))
    return made.sign(key, hashes.SHA256())


def _names(principal: Principal, hosts: Iterable[str]) -> x509.SubjectAlternativeName:
    """Of a principal: its URI, and the hosts that are insisted on, or asked for besides.

    Raises:
        SpecError: a host is none.
    """
    known = dict.fromkeys([principal.host, build_host_name(principal.domain, principal.role), *hosts])
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


def print_certificates(folder: Path, console: Console) -> int:
    """Print who has certificates, and until when.

    Returns:
        The exit code: 1 where one that is in use ends soon, or has ended.

    Raises:
        FailedPrecondition: there is neither an authority nor an identity.
    """
    if (folder / AUTHORITY_KEY).exists():
        authority = Authority(folder)
        issued, revoked = authority.list_issued(), authority.revoked_serials
    else:
        issued, revoked = [read_certificate(folder)], _revoked_by(_lists(folder / REVOCATION_FILE))
    newest = {read_principal(each): each for each in issued if read_issuer_and_serial(each) not in revoked}
    table, late, now = terminal.create_table(), 0, datetime.now(UTC)
    told = []
    for head in ("identity", "from", "until", "serial", ""):
        table.add_column(head, overflow="fold")
    for each in issued:
        principal, ends, serial = read_principal(each), each.not_valid_after_utc, f"{each.serial_number:x}"
        taken_back, soon = (
            read_issuer_and_serial(each) in revoked,
            ends - now < EXPIRY_WARNING_PERIOD and newest.get(principal) == each,
        )
        state = "revoked" if taken_back else "ended" if ends < now else "ends soon" if soon else ""
        late += soon and not taken_back
        style = "yellow" if soon else "dim" if state else ""
        who = str(principal or "nobody of a deployment")
        told.append({"identity": who, "from": _begins(each), "until": ends, "serial": serial, "state": state})
        table.add_row(who, f"{_begins(each):%Y-%m-%d}", f"{ends:%Y-%m-%d}", serial[:12], state, style=style)
    console.print(table if issued else "no certificates")
    terminal.print_json_if_requested(lambda: told)
    return 1 if late else 0
