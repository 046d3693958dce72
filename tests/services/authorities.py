"""Identities as other authorities write them: other keys, forms and chains than those of `sottovoce pki`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sottovoce_rpc.certificates import AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.principals import Principal, build_host_name
from tests.services.identities import DOMAIN

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey
KEYS: dict[str, Callable[[], Key]] = {
    "P-256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "RSA-1024": lambda: rsa.generate_private_key(65_537, 1_024),  # noqa: S505 - to be refused
    "RSA-2048": lambda: rsa.generate_private_key(65_537, 2_048),
    "RSA-3072": lambda: rsa.generate_private_key(65_537, 3_072),
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
}
FORMS = {"PKCS#8": PrivateFormat.PKCS8, "PKCS#1 or SEC1": PrivateFormat.TraditionalOpenSSL}
SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
_DAYS = timedelta(days=30)


@dataclass(frozen=True)
class Signer:
    """A certificate that may sign others, and its key."""

    certificate: x509.Certificate
    key: Key

    @classmethod
    def of(cls, name: str, by: Signer | None = None, key: str = "P-256") -> Signer:
        """A new one, with identifiers of the keys, as all authorities of today write them."""
        own = KEYS[key]()
        above = own if by is None else by.key
        builder = _builder(name, own, name if by is None else _name_of(by.certificate))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        subject = x509.SubjectKeyIdentifier.from_public_key(own.public_key())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(above.public_key())
        builder = builder.add_extension(subject, critical=False).add_extension(issuer, critical=False)
        return cls(builder.sign(above, _hash(above)), own)

    def revoking(self, *certificates: x509.Certificate) -> x509.CertificateRevocationList:
        """Its list of what was revoked."""
        now = datetime.now(UTC)
        listed = x509.CertificateRevocationListBuilder(
            self.certificate.subject, last_update=now - _DAYS, next_update=now + _DAYS
        )
        for each in certificates:
            one = x509.RevokedCertificateBuilder().serial_number(each.serial_number).revocation_date(now).build()
            listed = listed.add_revoked_certificate(one)
        return listed.sign(self.key, _hash(self.key))


@dataclass(frozen=True)
class Request:
    """What a certificate is asked for with, and how its files are written.

    Attributes:
        key: its kind.
        form: of the file of the key.
        encryption: of the file of the key.
        hosts: None: those that follow from the name.
        usages: extended ones; none: the certificate has no such extension.
        signs: whether its key usage says digital signatures; None: it has no such extension.
    """

    key: str = "P-256"
    form: str = "PKCS#8"
    encryption: KeySerializationEncryption = field(default_factory=NoEncryption)
    hosts: Sequence[str] | None = None
    usages: Sequence[x509.ObjectIdentifier] = (SERVER, CLIENT)
    signs: bool | None = True


@dataclass
class OtherAuthority:
    """An authority of somebody else's making: a root, and as many certificates between it and what it issues as wanted.

    Attributes:
        folder: for identities.
        between: so many.
        request: that identities are made by.
        root: of the authority.
        believed: what stands in ca.crt.
    """

    folder: Path
    between: int = 0
    request: Request = field(default_factory=Request)
    root: Signer = field(default_factory=lambda: Signer.of("An authority"))
    believed: list[x509.Certificate] = field(default_factory=list)
    chain: list[Signer] = field(init=False)
    """From whoever issues to below the root."""

    def __post_init__(self) -> None:
        self.believed, self.chain = self.believed or [self.root.certificate], []
        for level in range(self.between):
            self.chain.insert(0, Signer.of(f"Between {level}", self.issuer))

    @property
    def issuer(self) -> Signer:
        """Who signs what is issued."""
        return self.chain[0] if self.chain else self.root

    def at(self, whom: str) -> Path:
        """The folder of an identity."""
        folder = self.folder / whom.replace("/", "-", 1)
        if not folder.exists():
            self.write(whom, folder)
        return folder

    def of(self, whom: str) -> Credentials:
        """The credentials of `role/name`."""
        return Credentials(self.at(whom))

    def write(self, whom: str, folder: Path) -> x509.Certificate:
        """Issue an identity, as cert-manager lays its files out: its certificate first, then those between."""
        key, asked = KEYS[self.request.key](), self.request
        certificate = self._issue(whom, key)
        chain = [certificate, *(each.certificate for each in self.chain)]
        folder.mkdir(parents=True)
        (folder / CERTIFICATE_FILE).write_bytes(pem(*chain))
        (folder / KEY_FILE).write_bytes(key.private_bytes(Encoding.PEM, FORMS[asked.form], asked.encryption))
        (folder / KEY_FILE).chmod(0o600)
        (folder / AUTHORITIES_FILE).write_bytes(pem(*self.believed))
        return certificate

    def _issue(self, whom: str, key: Key) -> x509.Certificate:
        own, asked, issuer = Principal.parse(DOMAIN, whom), self.request, self.issuer
        hosts = (own.host, build_host_name(DOMAIN, own.role)) if asked.hosts is None else asked.hosts
        names = [x509.UniformResourceIdentifier(own.uri), *map(x509.DNSName, hosts)]
        builder = _builder("", key, _name_of(issuer.certificate))
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
        if asked.usages:
            builder = builder.add_extension(x509.ExtendedKeyUsage(asked.usages), critical=False)
        if asked.signs is not None:
            builder = builder.add_extension(_usage(signs=asked.signs), critical=True)
        above = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.key.public_key())
        builder = builder.add_extension(above, critical=False)
        return builder.sign(issuer.key, _hash(issuer.key))


def pem(*certificates: x509.Certificate | x509.CertificateRevocationList) -> bytes:
    """One file of them."""
    return b"".join(each.public_bytes(Encoding.PEM) for each in certificates)


def password() -> KeySerializationEncryption:
    """Of an encrypted key."""
    return BestAvailableEncryption(b"secret")


def by_openssl(folder: Path, whom: str, key: Sequence[str]) -> Path:
    """An identity of an authority in `folder`, made by the command line; `key`: the command that makes one."""
    own = Principal.parse(DOMAIN, whom)
    out, root = folder / whom.replace("/", "-", 1), folder / "root"
    out.mkdir(parents=True)
    if not root.exists():
        root.mkdir()
        about = [
            "-subj",
            "/CN=By hand",
            "-days",
            "30",
            "-nodes",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
        ]
        _openssl("req", "-x509", *about, "-keyout", str(root / "key"), "-out", str(root / "crt"))
    (out / KEY_FILE).write_bytes(_openssl(*key))
    (out / KEY_FILE).chmod(0o600)
    names = f"subjectAltName=URI:{own.uri},DNS:{own.host},DNS:{build_host_name(DOMAIN, own.role)}"
    (out / "names").write_text(f"{names}\nextendedKeyUsage=serverAuth,clientAuth\n", encoding="utf-8")
    _openssl("req", "-new", "-key", str(out / KEY_FILE), "-subj", f"/CN={own.name}", "-out", str(out / "request"))
    signer = ["-CA", str(root / "crt"), "-CAkey", str(root / "key"), "-CAcreateserial", "-extfile", str(out / "names")]
    (out / CERTIFICATE_FILE).write_bytes(
        _openssl("x509", "-req", "-in", str(out / "request"), *signer, "-days", "30", "-text")
    )
    (out / AUTHORITIES_FILE).write_bytes((root / "crt").read_bytes())
    return out


def _openssl(*command: str) -> bytes:
    return subprocess.run(["openssl", *command], check=True, capture_output=True).stdout  # noqa: S607 - that of the PATH


def _builder(name: str, key: Key, issuer: str) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + _DAYS)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)] if text else [])


def _name_of(certificate: x509.Certificate) -> str:
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def _usage(*, signs: bool) -> x509.KeyUsage:
    no = dict.fromkeys(
        ("content_commitment", "data_encipherment", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
        False,
    )
    return x509.KeyUsage(digital_signature=signs, key_encipherment=True, key_agreement=False, **no)


def _hash(key: Key) -> hashes.SHA256 | None:
    return None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
