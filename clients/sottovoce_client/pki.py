"""Certificate authority in a folder (`sottovoce pki`), for deployments without a PKI.

The authority's key stays in its folder (`ca.key`); identities are issued into separate folders, for `--identity`. Keys are
P-256, which every TLS library supports.
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
"""Subfolder of an authority with a copy of each issued certificate, by serial number."""
_CLOCK_TOLERANCE = timedelta(minutes=5)
"""Time by which validity starts before issuance, because clocks differ."""
_LIST_DAYS = 30
"""Days until the next update of a revocation list; services honour the list also afterwards."""


class Authority:
    """A certificate authority in a folder.

    Args:
        folder: Folder made by `Authority.init`.

    Raises:
        NotFound: There is no authority in the folder.
        FailedPrecondition: Its files cannot be used.
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
            raise FailedPrecondition(f"the authority in {folder} must have an elliptic-curve key")
        own = [each for each in believed if each.public_key() == key.public_key()]
        if not own:
            raise FailedPrecondition(
                f"{folder / AUTHORITIES_FILE} must hold the certificate of {AUTHORITY_KEY}, got only others"
            )
        self._certificate, self._key = max(own, key=_get_start), key

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
            folder: Folder for it.
            domain: Its trust domain.
            days: Validity of its certificate.
            replaced_authority: Authority of this domain that it replaces: each gets the certificate of the other, and the new
                one also the revocation lists and the issued certificates, so that it can revoke them.

        Raises:
            SpecError: The domain is malformed, or not that of the replaced authority.
            AlreadyExists: The folder holds an authority.
            FailedPrecondition: The folder cannot be written.
        """
        Principal.parse(domain, f"{Role.OPERATOR}/any")
        if replaced_authority is not None and replaced_authority.domain != domain:
            raise SpecError(
                f"the authority that is replaced must be of {domain}, got one of {replaced_authority.domain}"
            )
        if (folder / AUTHORITIES_FILE).exists():  # written last: an interrupted init starts again
            raise AlreadyExists(f"there is an authority in {folder} already")
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Sottovoce authority of {domain}")])
        uri = x509.UniformResourceIdentifier(f"spiffe://{domain}")
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        extensions = (identifier, x509.SubjectAlternativeName([uri]))
        ends = datetime.now(UTC) + timedelta(days=days)
        certificate = _build_certificate(name, key.public_key(), ends, name, key, extensions, is_authority=True)
        _make_folder(folder)
        _write(folder / AUTHORITY_KEY, _to_pem(key), 0o600)
        revocations, trusted = _build_revocation_list((), name, key), [certificate]
        if replaced_authority is not None:
            trusted += replaced_authority._list_trusted()
            revocations += _join_pem(_read_lists(replaced_authority.folder / REVOCATION_FILE))
            _make_folder(folder / _ISSUED)
            for path in (replaced_authority.folder / _ISSUED).glob("*.crt"):
                _write(folder / _ISSUED / path.name, path.read_bytes())
            _write(
                replaced_authority.folder / AUTHORITIES_FILE,
                _join_pem(_keep_newest([*replaced_authority._list_trusted(), certificate])),
            )
        _write(folder / REVOCATION_FILE, revocations)
        _write(folder / AUTHORITIES_FILE, _join_pem(trusted))
        return cls(folder)

    @property
    def domain(self) -> str:
        """Trust domain.

        Raises:
            FailedPrecondition: Its certificate names no trust domain.
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
        """Issue a certificate to a principal, in a separate folder, with a new key unless a request provides one.

        Authorities and revocation lists in the folder are kept. A revoked identity of this principal is replaced.

        Args:
            principal_name: `role/name`.
            folder: Folder for `--identity`.
            days: Validity from now on.
            hosts: Additional host names and addresses, for clients other than Sottovoce's.
            request: File of a certificate signing request. Its key is certified and stays where it is; principal and hosts are
                those given here, not those of the request. A certificate of this principal in the folder is replaced.

        Raises:
            SpecError: The principal is malformed.
            AlreadyExists: The folder holds an identity.
            FailedPrecondition: The folder cannot be written, or the request cannot be used.
        """
        principal = Principal.parse(self.domain, principal_name)
        if principal.domain != self.domain:
            raise SpecError(
                f"{principal_name} must be of {self.domain}, the trust domain of this authority: have its own authority issue it"
            )
        if request is None:
            if (folder / CERTIFICATE_FILE).exists():  # written last: an interrupted issue starts again
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
        """Give an identity a new key and certificate, for the same principal and hosts. Running services reload it.

        Other authorities in its `ca.crt`, and their lists in its `crl.pem`, are kept.

        Raises:
            NotFound: The folder holds no identity.
            FailedPrecondition: Its key is kept elsewhere, its authority is not of this domain or not in this authority's
                `ca.crt`, or it was revoked.
        """
        before = read_certificate(folder)
        if not (folder / KEY_FILE).exists():
            raise FailedPrecondition(
                f"the key of {folder} is kept elsewhere: make a new request there, and issue the certificate from it "
                "(`sottovoce pki issue --csr`)"
            )
        principal = read_principal(before)
        roots = [each for each in self._list_trusted() if read_trust_domain(each) == self.domain]
        if principal is None or principal.domain != self.domain or not has_chain_to_root(before, (), roots):
            raise FailedPrecondition(
                f"the identity in {folder} must be issued by this authority, or by one of its domain in its {AUTHORITIES_FILE}"
            )
        if self._is_revoked(before, folder):
            raise FailedPrecondition(
                f"the identity in {folder} was revoked: issue another one with `sottovoce pki issue`"
            )
        hosts = before.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        own = {principal.host, build_host_name(principal.domain, principal.role)}
        more = [each for each in hosts.get_values_for_type(x509.DNSName) if each not in own]
        if not self._has_issued(before):  # recorded here, so that `revoke` includes it
            content = before.public_bytes(serialization.Encoding.PEM)
            _write(self.folder / _ISSUED / f"{before.serial_number:x}.crt", content)
        hosts_kept = [*more, *map(str, hosts.get_values_for_type(x509.IPAddress))]
        return self._issue(principal, folder, days, hosts_kept, None)

    def revoke(self, principal_name: str) -> list[x509.Certificate]:
        """Revoke all valid certificates of a principal that are not revoked yet.

        This includes certificates of an authority that this one has replaced: both have the same name, by which revocation
        lists name certificates.

        Raises:
            SpecError: The principal is malformed, or has no valid certificate.
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
                f"{principal_name} has no valid certificate; valid certificates: {', '.join(known) or 'none'}"
            )
        serials = [*(serial for _, serial in revoked), *(each.serial_number for each in own)]
        own_list = x509.load_pem_x509_crl(_build_revocation_list(serials, self._certificate.subject, self._key))
        foreign = [each for each in _read_lists(self.folder / REVOCATION_FILE) if not self._has_signed(each)]
        _write(self.folder / REVOCATION_FILE, _join_pem([own_list, *foreign]))
        return own

    @property
    def other_authorities(self) -> list[x509.Certificate]:
        """Other authorities of its domain in its `ca.crt` whose issued certificates are not recorded here."""
        issued = self.list_issued()
        own = [
            each for each in self._list_trusted() if read_trust_domain(each) == self.domain and not self._is_own(each)
        ]
        return [each for each in own if not any(has_chain_to_root(one, (), [each]) for one in issued)]

    def distribute_revocations(
        self, identities: Path, *, replaced_authority: Authority | None = None
    ) -> tuple[list[Path], dict[Path, str]]:
        """Copy the revocation list to the identities that trust this authority; lists of other authorities are kept.

        Args:
            identities: Parent folder of the identities.
            replaced_authority: Update the identities that trust this authority, and add the new authority's certificate.

        Returns:
            The updated folders, and the skipped ones with the reason.
        """
        updated, skipped = list[Path](), dict[Path, str]()
        folders = {
            path.parent for name in (CERTIFICATE_FILE, AUTHORITIES_FILE) for path in identities.glob(f"*/{name}")
        }
        for folder in sorted(each for each in folders if not (each / AUTHORITY_KEY).exists()):
            try:
                trusted = parse_certificates((folder / AUTHORITIES_FILE).read_bytes(), AUTHORITIES_FILE)
                if not any(map((replaced_authority or self)._is_own, trusted)):
                    which = "this authority" if replaced_authority is None else "the replaced authority"
                    skipped[folder] = f"its {AUTHORITIES_FILE} does not hold {which}"
                    continue
                if replaced_authority is not None:
                    trusted = _keep_newest([*trusted, self._certificate])
                    _write(folder / AUTHORITIES_FILE, _join_pem(trusted))
                _write(folder / REVOCATION_FILE, self._merge_lists(folder, trusted))
                updated.append(folder)
            except (OSError, FailedPrecondition) as error:
                skipped[folder] = (
                    f"{Path(error.filename).name}: {error.strerror}" if isinstance(error, OSError) else str(error)
                )
        return updated, skipped

    def list_issued(self) -> list[x509.Certificate]:
        """Return all issued certificates, the oldest first."""
        found = [x509.load_pem_x509_certificate(path.read_bytes()) for path in (self.folder / _ISSUED).glob("*.crt")]
        return sorted(found, key=lambda each: (_get_start(each), each.not_valid_after_utc, str(read_principal(each))))

    @property
    def revoked_serials(self) -> set[tuple[bytes, int]]:
        """Issuers and serial numbers of the certificates that it has revoked."""
        return _collect_serials(each for each in _read_lists(self.folder / REVOCATION_FILE) if self._has_signed(each))

    # ---- internal -----------------------------------------------------------------------------------------

    def _issue(
        self, principal: Principal, folder: Path, days: int, hosts: Iterable[str], public: PublicKeyTypes | None
    ) -> x509.Certificate:
        """Issue a certificate; raise `FailedPrecondition` before any write if existing files of the folder cannot be merged."""
        key = None if public is not None else ec.generate_private_key(ec.SECP256R1())
        ends = min(datetime.now(UTC) + timedelta(days=days), self._certificate.not_valid_after_utc)
        own = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        extensions = (
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            _build_alternative_names(principal, hosts),
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own),
        )
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(principal)[:64])])
        certified = key.public_key() if key is not None else public
        certificate = _build_certificate(subject, certified, ends, self._certificate.subject, self._key, extensions)
        content = certificate.public_bytes(serialization.Encoding.PEM)
        trusted = _keep_newest([*_read_certificates(folder / AUTHORITIES_FILE), *self._list_trusted()])
        lists = self._merge_lists(folder, trusted)
        _make_folder(self.folder / _ISSUED)
        _write(self.folder / _ISSUED / f"{certificate.serial_number:x}.crt", content)
        _make_folder(folder)
        if key is not None:
            _write(folder / KEY_FILE, _to_pem(key), 0o600)
        _write(folder / AUTHORITIES_FILE, _join_pem(trusted))
        _write(folder / REVOCATION_FILE, lists)
        _write(folder / CERTIFICATE_FILE, content)
        return certificate

    def _is_revoked(self, certificate: x509.Certificate, folder: Path) -> bool:
        revoked = _collect_serials(
            [*_read_lists(self.folder / REVOCATION_FILE), *_read_lists(folder / REVOCATION_FILE)]
        )
        return read_issuer_and_serial(certificate) in revoked

    def _has_issued(self, certificate: x509.Certificate) -> bool:
        return has_chain_to_root(certificate, (), [self._certificate])

    def _is_own(self, certificate: x509.Certificate) -> bool:
        return _get_name_and_key(certificate) == _get_name_and_key(self._certificate)

    def _has_signed(self, revocations: x509.CertificateRevocationList) -> bool:
        return has_signed_list(self._certificate, revocations)

    def _list_trusted(self) -> list[x509.Certificate]:
        """Return the authorities that every identity gets: its own certificate and the others in its folder."""
        return _read_certificates(self.folder / AUTHORITIES_FILE)

    def _merge_lists(self, folder: Path, trusted: Sequence[x509.Certificate]) -> bytes:
        """Build the revocation file of an identity: the newest list of each authority, and its own list from here.

        Raises:
            FailedPrecondition: A list is of no authority in `ca.crt`, so that services would refuse the file.
        """
        own, existing = _read_lists(self.folder / REVOCATION_FILE), _read_lists(folder / REVOCATION_FILE)
        signers = [*trusted, *_read_certificates(folder / CERTIFICATE_FILE)[1:]]
        newest = dict[tuple[bytes, bytes], x509.CertificateRevocationList]()
        for each in (*own, *existing):
            signer = next((_get_name_and_key(one) for one in signers if has_signed_list(one, each)), None)
            if signer is None and each in existing:
                raise FailedPrecondition(
                    f"every list in {folder / REVOCATION_FILE} must be signed by an authority of {AUTHORITIES_FILE}, got one of "
                    f"{each.issuer.rfc4514_string()[:100]}: add that authority to {AUTHORITIES_FILE}, or remove the list"
                )
            if signer is None or (self._has_signed(each) and each not in own):
                continue
            if signer not in newest or _get_age_key(newest[signer]) < _get_age_key(each):
                newest[signer] = each
        return _join_pem(newest.values())


def _get_start(certificate: x509.Certificate) -> datetime:
    return certificate.not_valid_before_utc


def _get_name_and_key(certificate: x509.Certificate) -> tuple[bytes, bytes]:
    """Return name and key of an authority, which a renewed certificate keeps."""
    return certificate.subject.public_bytes(), certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _keep_newest(certificates: Iterable[x509.Certificate]) -> list[x509.Certificate]:
    """Return the newest certificate of each authority, in the order of their first occurrence."""
    newest = dict[tuple[bytes, bytes], x509.Certificate]()
    for each in certificates:
        if (before := newest.get(_get_name_and_key(each))) is None or _get_start(before) < _get_start(each):
            newest[_get_name_and_key(each)] = each
    return list(newest.values())


def _read_certificates(path: Path) -> list[x509.Certificate]:
    """Read the certificates of a file; empty if there is no file.

    Raises:
        FailedPrecondition: The file cannot be parsed.
    """
    return parse_certificates(path.read_bytes(), str(path)) if path.exists() else []


def _read_lists(path: Path) -> list[x509.CertificateRevocationList]:
    """Read the revocation lists of a file; empty if there is no file.

    Raises:
        FailedPrecondition: The file cannot be parsed.
    """
    return parse_revocation_lists(path.read_bytes(), str(path)) if path.exists() else []


def _get_age_key(revocations: x509.CertificateRevocationList) -> tuple[datetime, int]:
    """Return a sort key of lists of one authority: by time, within one second by the number of revocations."""
    return revocations.last_update_utc, len(revocations)


def _join_pem(each: Iterable[x509.Certificate | x509.CertificateRevocationList]) -> bytes:
    return b"".join(one.public_bytes(serialization.Encoding.PEM) for one in each)


def _collect_serials(lists: Iterable[x509.CertificateRevocationList]) -> set[tuple[bytes, int]]:
    return {(revocations.issuer.public_bytes(), each.serial_number) for revocations in lists for each in revocations}


def _build_revocation_list(serials: Iterable[int], issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> bytes:
    """Build and sign the revocation list of an authority, in PEM."""
    now = datetime.now(UTC)
    builder = x509.CertificateRevocationListBuilder(
        issuer, last_update=now - _CLOCK_TOLERANCE, next_update=now + timedelta(days=_LIST_DAYS)
    )
    for serial in dict.fromkeys(serials):
        one = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
        builder = builder.add_revoked_certificate(one)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def read_certificate(folder: Path) -> x509.Certificate:
    """Read the certificate of an identity.

    Raises:
        NotFound: There is no valid certificate.
    """
    try:
        return x509.load_pem_x509_certificate((folder / CERTIFICATE_FILE).read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a PEM certificate"
        raise NotFound(f"no certificate in {folder / CERTIFICATE_FILE}: {reason}") from None


def read_request(path: Path) -> x509.CertificateSigningRequest:
    """Read a certificate signing request in PEM or DER, and verify that its own key has signed it.

    Raises:
        NotFound: There is no file.
        FailedPrecondition: It is no request, its signature is invalid, or gRPC does not support the type of its key.
    """
    try:
        raw = path.read_bytes()
        load = x509.load_pem_x509_csr if b"-----BEGIN" in raw else x509.load_der_x509_csr
        found = load(raw)
        is_valid = found.is_signature_valid
    except OSError as error:
        raise NotFound(f"no certificate signing request in {path}: {error.strerror}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise FailedPrecondition(
            f"{path} must hold a certificate signing request in PEM or DER, got something else"
        ) from None
    if not is_valid:
        raise FailedPrecondition(
            f"{path} must be signed by the key that it requests a certificate for: make a new request"
        )
    require_key_type(found.public_key(), f"the key of {path}")
    return found


def list_requested_names(request: x509.CertificateSigningRequest) -> list[str]:
    """Return the names in a request: its URIs, or if it has none its common names."""
    try:
        names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (x509.ExtensionNotFound, ValueError):
        uris = []
    return uris or [str(each.value) for each in request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]


def create_request(principal_name: str, folder: Path) -> Path:
    """Make a key, unless the folder has one, and a request to certify it for a principal; return the request's file.

    Raises:
        SpecError: The principal is malformed.
        FailedPrecondition: The folder cannot be written, or its key cannot be used.
    """
    Principal.parse("any", principal_name)
    _make_folder(folder)
    if not (folder / KEY_FILE).exists():
        _write(folder / KEY_FILE, _to_pem(ec.generate_private_key(ec.SECP256R1())), 0o600)
    key = parse_private_key((folder / KEY_FILE).read_bytes())
    require_key_type(key.public_key(), str(folder / KEY_FILE))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, principal_name[:64])])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())  # type: ignore[arg-type]
    _write(folder / REQUEST, request.public_bytes(serialization.Encoding.PEM))
    return folder / REQUEST


def _write(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file atomically; `mode` is reduced by the umask."""
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.replace(partial, path)


def _make_folder(folder: Path) -> None:
    """Make a folder for keys.

    Raises:
        FailedPrecondition: It cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise FailedPrecondition(f"cannot write to the folder {folder}: {error.strerror}") from None


def _to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _build_certificate(
    subject: x509.Name,
    public: PublicKeyTypes | None,
    ends: datetime,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    extensions: Iterable[x509.ExtensionType],
    *,
    is_authority: bool = False,
) -> x509.Certificate:
    """Build and sign a certificate that is valid from now on.

    Args:
        subject, public: Subject and its public key.
        ends: End of validity.
        issuer, key: Issuer and its signing key.
        extensions: Extensions in addition to key usage and basic constraints.
        is_authority: True: it signs only certificates and revocation lists; False: it signs anything but these.
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
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)  # type: ignore[arg-type] # `read_request` has checked its type
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - _CLOCK_TOLERANCE)
        .not_valid_after(ends)
    )
    for extension in (constraints, usage, *extensions):
        builder = builder.add_extension(extension, critical=extension in (constraints, usage))
    return builder.sign(key, hashes.SHA256())


def _build_alternative_names(principal: Principal, hosts: Iterable[str]) -> x509.SubjectAlternativeName:
    """Build the alternative names of a principal: its URI, the host names that clients verify, and additional hosts.

    Raises:
        SpecError: A host is malformed.
    """
    names = dict.fromkeys([principal.host, build_host_name(principal.domain, principal.role), *hosts])
    return x509.SubjectAlternativeName([x509.UniformResourceIdentifier(principal.uri), *map(_parse_host, names)])


def _parse_host(text: str) -> x509.GeneralName:
    """Parse a host name or an IP address.

    Raises:
        SpecError: It is neither.
    """
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        pass
    try:
        return x509.DNSName(text)
    except ValueError:
        raise SpecError(f"a host must be an ASCII name or an address, got {text[:100]!r}") from None


def print_certificates(folder: Path, console: Console) -> int:
    """Print the certificates of an authority or an identity.

    Returns:
        The exit code: 1 if a certificate in use expires soon or has expired.

    Raises:
        NotFound: The folder holds neither an authority nor an identity.
    """
    if (folder / AUTHORITY_KEY).exists():
        authority = Authority(folder)
        issued, revoked = authority.list_issued(), authority.revoked_serials
    else:
        issued, revoked = [read_certificate(folder)], _collect_serials(_read_lists(folder / REVOCATION_FILE))
    newest = {read_principal(each): each for each in issued if read_issuer_and_serial(each) not in revoked}
    table, expiring, now = terminal.create_table(), 0, datetime.now(UTC)
    rows = []
    for head in ("identity", "from", "until", "serial", ""):
        table.add_column(head, overflow="fold")
    for each in issued:
        principal, ends, serial = read_principal(each), each.not_valid_after_utc, f"{each.serial_number:x}"
        is_revoked, expires_soon = (
            read_issuer_and_serial(each) in revoked,
            ends - now < EXPIRY_WARNING_PERIOD and newest.get(principal) == each,
        )
        state = "revoked" if is_revoked else "ended" if ends < now else "ends soon" if expires_soon else ""
        expiring += expires_soon and not is_revoked
        style = "yellow" if expires_soon else "dim" if state else ""
        name, start = str(principal or "no principal"), _get_start(each)
        rows.append({"identity": name, "from": start, "until": ends, "serial": serial, "state": state})
        table.add_row(name, f"{start:%Y-%m-%d}", f"{ends:%Y-%m-%d}", serial[:12], state, style=style)
    console.print(table if issued else "no certificates")
    terminal.print_json_if_requested(lambda: rows)
    return 1 if expiring else 0
