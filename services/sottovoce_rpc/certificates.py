"""Requirements for the files of an identity, of any authority.

gRPC's TLS takes fewer kinds of keys than authorities issue, and checks what a certificate may be used for. What it would refuse
in a handshake, with its own texts and at the other end, is refused here, when the files are read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from sottovoce_core.errors import FailedPrecondition
from sottovoce_rpc.principals import Principal, Role, build_host_name

CERTIFICATE_FILE, KEY_FILE, AUTHORITIES_FILE, REVOCATION_FILE = "tls.crt", "tls.key", "ca.crt", "crl.pem"
_CURVES = (ec.SECP256R1, ec.SECP384R1)
_MIN_RSA_BITS = 2_048
_KEYS = f"ECDSA on P-256 or P-384, or RSA of {_MIN_RSA_BITS} bits or more"
_SERVICES = (Role.LEARNER, Role.COORDINATOR, Role.EAVESDROPPER)
"""Roles that serve calls; the others only make calls."""
_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
_SCHEME = "spiffe://"
_LIST_BEGINS = b"-----BEGIN X509 CRL-----"
_LIST = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)


def parse_certificates(raw: bytes, name: str) -> list[x509.Certificate]:
    """Parse all certificates of a file, at least one.

    Raises:
        FailedPrecondition: there is none, or one cannot be read.
    """
    try:
        return x509.load_pem_x509_certificates(raw)
    except ValueError:
        raise FailedPrecondition(
            f"{name} must hold certificates in PEM, got none, or one that cannot be read"
        ) from None


def parse_private_key(raw: bytes, name: str = KEY_FILE) -> PrivateKeyTypes:
    """Parse the private key of a file.

    Raises:
        FailedPrecondition: it holds none, or an encrypted one.
    """
    try:
        return load_pem_private_key(raw, None)
    except TypeError:
        raise FailedPrecondition(
            f"{name} must not be encrypted, because a service cannot ask for a password: "
            f"`openssl pkey -in {name} -out plain.key`, chmod 600"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise FailedPrecondition(
            f"{name} must hold a private key in PEM ({_KEYS}), got none that can be read"
        ) from None


def require_usable_certificate(chain: Sequence[x509.Certificate], key: PrivateKeyTypes) -> Principal:
    """Check that a certificate and its key can be used; return the principal that it names.

    Args:
        chain: the own certificate, then those between it and an authority.
        key: its private key.

    Raises:
        FailedPrecondition: they do not match, name no principal, or gRPC would refuse them.
    """
    own = chain[0]
    _require_matching_key(key, chain)
    principal = read_principal(own)
    if principal is None:
        raise FailedPrecondition(
            f"{CERTIFICATE_FILE} must name its owner by one URI such as spiffe://ward.example/learner/north, got "
            f"{_read_uris(own)[:5]}"
        )
    _require_uses(own, principal)
    if principal.role in _SERVICES:
        _require_hosts(own, principal)
    return principal


def group_by_domain(authorities: Sequence[x509.Certificate], home: str = "") -> dict[str, list[x509.Certificate]]:
    """Group authorities by the trust domain that they certify.

    Args:
        authorities: trusted authorities.
        home: domain of the authorities that name none, if no other one names it. Empty: these are under "".

    Raises:
        FailedPrecondition: one names more than one domain, or a principal.
    """
    found = defaultdict[str, list[x509.Certificate]](list)
    for each in authorities:
        found[read_trust_domain(each)].append(each)
    if home and home not in found and "" in found:
        found[home] = found.pop("")
    return dict(found)


def parse_revocations(
    raw: bytes, signers: Mapping[str, Sequence[x509.Certificate]]
) -> Mapping[str, frozenset[tuple[bytes, int]]]:
    """Return issuers and serial numbers of revoked certificates, by trust domain.

    Args:
        raw: any number of lists in PEM, or one in DER.
        signers: allowed signers of a list, by the domain that they certify.

    Raises:
        FailedPrecondition: a list cannot be read, or has another signer.
    """
    found = {domain: set[tuple[bytes, int]]() for domain in signers}
    for listed in parse_revocation_lists(raw):
        issuer = listed.issuer.public_bytes()
        domains = [domain for domain, own in signers.items() if any(has_signed_list(each, listed) for each in own)]
        if not domains:
            raise FailedPrecondition(
                f"{REVOCATION_FILE} must be signed by an authority of {AUTHORITIES_FILE}, or of the chain in {CERTIFICATE_FILE}"
            )
        for domain in domains:
            found[domain] |= {(issuer, each.serial_number) for each in listed}
    return {domain: frozenset(revoked) for domain, revoked in found.items()}


def has_signed_list(authority: x509.Certificate, listed: x509.CertificateRevocationList) -> bool:
    """Return whether an authority has signed a revocation list. The name is not enough: two authorities may share one."""
    if listed.issuer != authority.subject:
        return False
    return listed.is_signature_valid(authority.public_key())  # type: ignore[arg-type]


def parse_revocation_lists(raw: bytes, name: str = REVOCATION_FILE) -> list[x509.CertificateRevocationList]:
    """Parse all revocation lists of a file, any number in PEM or one in DER; their signatures are not verified.

    Raises:
        FailedPrecondition: there is none, or one cannot be read: then certificates that it revokes would be trusted.
    """
    found = _LIST.findall(raw)
    try:
        if _LIST_BEGINS not in raw:
            return [x509.load_der_x509_crl(raw)]
        if len(found) == raw.count(_LIST_BEGINS):
            return [x509.load_pem_x509_crl(each) for each in found]
    except ValueError:
        pass
    raise FailedPrecondition(f"{name} must hold revocation lists in PEM, or one in DER, got what cannot be read")


def has_chain_to_root(
    own: x509.Certificate, between: Sequence[x509.Certificate], roots: Sequence[x509.Certificate]
) -> bool:
    """Return whether one of the roots has signed a certificate, directly or through those between."""
    reached = [own]
    for each in reached:
        if any(_is_issued_by(each, root) for root in roots):
            return True
        reached += [other for other in between if other not in reached and _is_issued_by(each, other)]
    return False


def read_principal(certificate: x509.Certificate) -> Principal | None:
    """Return the principal that a certificate names; None if it names none or several."""
    uris = _read_uris(certificate)
    return Principal.from_uri(uris[0]) if len(uris) == 1 else None


def read_issuer_and_serial(certificate: x509.Certificate) -> tuple[bytes, int]:
    """Return issuer and serial number, by which revocation lists name a certificate."""
    return certificate.issuer.public_bytes(), certificate.serial_number


def read_trust_domain(authority: x509.Certificate) -> str:
    """Return the trust domain that an authority's certificate names by SPIFFE (`spiffe://ward.example`); empty if none.

    Raises:
        FailedPrecondition: it names more than one, or a principal.
    """
    uris = [each for each in _read_uris(authority) if each.startswith(_SCHEME)]
    domain = uris[0].removeprefix(_SCHEME).removesuffix("/") if uris else ""
    if len(uris) > 1 or "/" in domain:
        raise FailedPrecondition(
            f"an authority must name one trust domain as spiffe://ward.example, got {uris[:3]} of "
            f"{authority.subject.rfc4514_string()[:100]}"
        )
    return domain


def require_key_type(public: PublicKeyTypes, what: str) -> None:
    """Raise `FailedPrecondition` for a key of a kind that gRPC does not accept."""
    if isinstance(public, rsa.RSAPublicKey):
        kind, fits = f"RSA of {public.key_size} bits", public.key_size >= _MIN_RSA_BITS
    elif isinstance(public, ec.EllipticCurvePublicKey):
        kind, fits = f"ECDSA on {public.curve.name}", isinstance(public.curve, _CURVES)
    else:
        kind, fits = type(public).__name__.removeprefix("_").removesuffix("PublicKey"), False
    if not fits:
        raise FailedPrecondition(f"{what} must be of {_KEYS}, which gRPC accepts, got {kind}: have another one issued")


# ---- checks ----------------------------------------------------------------------------------------------------


def _require_matching_key(key: PrivateKeyTypes, chain: Sequence[x509.Certificate]) -> None:
    """Raise `FailedPrecondition` if the key does not match the certificate, or is of a kind that gRPC does not accept."""
    public = key.public_key()
    if public != chain[0].public_key():
        if any(public == each.public_key() for each in chain[1:]):
            raise FailedPrecondition(
                f"{CERTIFICATE_FILE} must begin with the certificate of {KEY_FILE}; those between it and an authority follow"
            )
        raise FailedPrecondition(
            f"{KEY_FILE} must be the key of {CERTIFICATE_FILE}, got the key of another certificate"
        )
    require_key_type(public, KEY_FILE)


def _require_uses(own: x509.Certificate, principal: Principal) -> None:
    """Raise `FailedPrecondition` if the certificate's extended key usage or key usage does not allow what its role needs."""
    wanted = {"client auth": _CLIENT, **({"server auth": _SERVER} if principal.role in _SERVICES else {})}
    try:
        uses = own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        lacking = [name for name, use in wanted.items() if use not in uses]
    except x509.ExtensionNotFound:  # without the extension every usage is allowed
        lacking = []
    if lacking:
        raise FailedPrecondition(
            f"{CERTIFICATE_FILE} must be for {' and '.join(wanted)} (extended key usage), and is not for "
            f"{' nor '.join(lacking)}: "
            "have one issued for these usages, or without this extension"
        )
    try:
        signs = own.extensions.get_extension_for_class(x509.KeyUsage).value.digital_signature
    except x509.ExtensionNotFound:
        signs = True
    if not signs:
        raise FailedPrecondition(
            f"{CERTIFICATE_FILE} must be for digital signatures (key usage), and is not: have one issued that is"
        )


def _require_hosts(own: x509.Certificate, principal: Principal) -> None:
    """Raise `FailedPrecondition` if a service's certificate lacks a host name that its clients require."""
    wanted = (principal.host, build_host_name(principal.domain, principal.role))
    hosts = {each.lower() for each in _read_names(own, x509.DNSName)}
    if lacking := [each for each in wanted if each not in hosts]:
        raise FailedPrecondition(
            f"{CERTIFICATE_FILE} must hold the hosts (DNS names) {' and '.join(wanted)} beside its URI, because clients "
            f"of {principal} "
            f"require them; it lacks {' and '.join(lacking)}: have one issued with them (docs/operate/identities.md)"
        )


def _is_issued_by(certificate: x509.Certificate, by: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(by)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):  # another issuer, key type, or signature
        return False
    return True


def _read_uris(certificate: x509.Certificate) -> list[str]:
    return _read_names(certificate, x509.UniformResourceIdentifier)


def _read_names(
    certificate: x509.Certificate, kind: type[x509.DNSName] | type[x509.UniformResourceIdentifier]
) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError):
        return []
    return names.get_values_for_type(kind)
