"""Signatures: of every kind of key, of one length, and of nobody else."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import dsa, ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce_core.errors import FailedPrecondition, PermissionDenied, RemoteProtocolError, SottovoceError
from sottovoce_rpc import credentials
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.signatures import (
    DIGEST_BYTES,
    EMPTY_DIGESTS,
    ROUNDS_PER_BLOCK,
    SignedStatement,
    Statement,
    compute_frame_digest,
    is_signature,
    sign,
)
from sottovoce_wire.v1 import learner_pb2
from tests.services.identities import Elsewhen, Identities

NOW = datetime.now(UTC)
SAID = Statement("run-1", 2, 3, compute_frame_digest(b"a round") + EMPTY_DIGESTS[DIGEST_BYTES:])
KEYS: dict[str, Callable[[], CertificateIssuerPrivateKeyTypes]] = {
    "P-256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
}


def certificate(
    name: str,
    key: CertificateIssuerPrivateKeyTypes,
    issuer: tuple[str, CertificateIssuerPrivateKeyTypes],
    *,
    ca: bool | None,
    begins: datetime = NOW - timedelta(days=1),
) -> x509.Certificate:
    """As plain as an authority may write it; `ca=None`: it does not say whether it is one."""

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    made = x509.CertificateBuilder().subject_name(named(name)).issuer_name(named(issuer[0]))
    made = made.public_key(key.public_key()).serial_number(x509.random_serial_number())
    made = made.not_valid_before(begins).not_valid_after(begins + timedelta(days=2))
    if ca is not None:
        made = made.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    else:
        host = x509.SubjectAlternativeName([x509.DNSName("north.learner.ward.example")])
        made = made.add_extension(host, critical=False)
    return made.sign(issuer[1], hashes.SHA256())


def pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(each.public_bytes(Encoding.PEM) for each in certificates)


@pytest.mark.parametrize("make", KEYS.values(), ids=KEYS)
def test_every_kind_of_key_signs_in_one_length_and_for_itself_alone(
    make: Callable[[], CertificateIssuerPrivateKeyTypes],
) -> None:
    root, key = ec.generate_private_key(ec.SECP256R1()), make()
    authority = certificate("root", root, ("root", root), ca=True)
    own = certificate("north", key, ("root", root), ca=None)
    signed = [SignedStatement(SAID, pem(own), sign(key, SAID.content)) for _ in range(20)]
    again = [SignedStatement.decode("run-1", each.encode()) for each in signed]
    forged = replace(signed[0], signature=sign(make(), SAID.content))
    halved = replace(signed[0], signature=signed[0].signature[:-1])

    assert again == signed and all(is_signature(each.encode()) for each in signed)
    assert len({len(each.encode()) for each in signed}) == 1
    assert all(each.verify_signature(pem(authority), NOW) == own for each in signed)
    for wrong in (forged, halved, replace(signed[0], signature=b"")):
        with pytest.raises(PermissionDenied, match="not of the key"):
            wrong.verify_signature(pem(authority), NOW)


def test_what_is_signed_is_all_of_it() -> None:
    """Another run, sender, block or digest is another statement."""
    others = [
        replace(SAID, run_id="run-2"),
        replace(SAID, sender=1),
        replace(SAID, block=4),
        replace(SAID, digests=compute_frame_digest(b"another round") + EMPTY_DIGESTS[DIGEST_BYTES:]),
        replace(SAID, digests=EMPTY_DIGESTS[DIGEST_BYTES:] + compute_frame_digest(b"a round")),
    ]
    assert len({SAID.content, *(each.content for each in others)}) == 6
    assert [SAID[t] for t in (3 * ROUNDS_PER_BLOCK - 1, 3 * ROUNDS_PER_BLOCK, 3 * ROUNDS_PER_BLOCK + 1)] == [
        None,
        compute_frame_digest(b"a round"),
        None,
    ]


def test_a_chain_must_lead_to_an_authority_by_authorities() -> None:
    """Not by another learner: its certificate signs no certificates."""
    root, middle, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    authority = certificate("root", root, ("root", root), ca=True)
    signature = sign(key, SAID.content)

    def signer(*between: x509.Certificate, moment: datetime = NOW) -> x509.Certificate:
        own = certificate("north", key, ("middle", middle), ca=None)
        return SignedStatement(SAID, pem(own, *between), signature).verify_signature(pem(authority), moment)

    good = certificate("middle", middle, ("root", root), ca=True)
    assert signer(good).subject.rfc4514_string() == "CN=north"
    wrong = [
        (),
        (certificate("middle", middle, ("root", root), ca=False),),
        (certificate("middle", middle, ("root", root), ca=None),),
        (certificate("middle", middle, ("middle", middle), ca=True),),
        (certificate("middle", middle, ("root", root), ca=True, begins=NOW - timedelta(days=9)),),
    ]
    for between in wrong:
        with pytest.raises(
            PermissionDenied,
            match=r"do not lead to a trusted authority: none of the authorities given has issued them",
        ):
            signer(*between)
    with pytest.raises(
        PermissionDenied, match=r"do not lead to a trusted authority: .*they were not valid when they were used"
    ):
        signer(good, moment=NOW + timedelta(days=3))


def test_a_certificate_that_was_issued_a_moment_ago_is_believed() -> None:
    """By authorities that do not date back, too."""
    root, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    now = datetime(2030, 1, 1, 12, 0, 30, tzinfo=UTC)
    authority = certificate("root", root, ("root", root), ca=True, begins=now - timedelta(days=1))
    signed = SignedStatement(
        SAID, pem(certificate("north", key, ("root", root), ca=None, begins=now)), sign(key, SAID.content)
    )
    assert signed.verify_signature(pem(authority), now).subject.rfc4514_string() == "CN=north"
    with pytest.raises(PermissionDenied, match="do not lead to a trusted authority"):
        signed.verify_signature(pem(authority), now - timedelta(minutes=2))


def test_nothing_shows_a_key(tmp_path: Path) -> None:
    own = Identities(tmp_path).of("learner/north")
    own.sign_statement(SAID)
    assert "Identity(" in repr(own) and "PRIVATE KEY" not in repr(own)


def test_a_key_that_cannot_sign_is_refused() -> None:
    with pytest.raises(FailedPrecondition, match="must be of an elliptic curve or RSA"):
        sign(dsa.generate_private_key(2048), b"")


def test_who_signs_is_of_the_deployment_and_not_revoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, others = Identities(tmp_path / "ours"), Identities(tmp_path / "theirs")
    north, south = ids.of("learner/north"), ids.of("learner/south")
    signed = north.sign_statement(SAID)

    def refused(believer: Credentials, error: type[SottovoceError], why: str) -> None:
        with pytest.raises(error, match=why):
            believer.verify_statement(signed)

    assert str(south.verify_statement(signed)) == "learner/north"
    refused(others.of("learner/south"), PermissionDenied, "do not lead to a trusted authority")
    with monkeypatch.context() as patched:
        patched.setattr(Elsewhen, "off", timedelta(days=91))
        patched.setattr(credentials, "datetime", Elsewhen)
        refused(south, PermissionDenied, "do not lead to a trusted authority")
    ids.authority.revoke("learner/north")
    folder = ids.at("learner/south")
    (folder / "crl.pem").write_bytes((ids.authority.folder / "crl.pem").read_bytes())
    refused(south, PermissionDenied, "revoked")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"sender": 1, "digests": EMPTY_DIGESTS}, "must carry block and sender"),
        ({"block": 1, "digests": EMPTY_DIGESTS}, "must carry block and sender"),
        ({"block": 1, "sender": 1, "digests": EMPTY_DIGESTS[1:]}, "bytes of digests"),
        ({"block": 1, "sender": 1, "digests": EMPTY_DIGESTS, "certificates": bytes(16_385)}, "bytes of digests"),
    ],
)
def test_what_is_no_signature_is_refused(fields: dict[str, object], why: str) -> None:
    said = learner_pb2.ExchangeMessage(signature=learner_pb2.Signature(**fields))  # type: ignore[arg-type]
    with pytest.raises(RemoteProtocolError, match=why):
        SignedStatement.decode("run-1", said.SerializeToString())


def test_other_messages_are_no_signatures() -> None:
    for payload in (b"", b"\x1a", b"\x1a\xff", b"\x12\x00", bytes(100), b"\x1a" + bytes(2**20)):
        with pytest.raises(RemoteProtocolError):
            SignedStatement.decode("run-1", payload)


def test_padding_around_what_an_authority_signed_does_not_change_whom_it_names() -> None:
    """The first bit that a search found to mean nothing: how much of a signature's last byte is padding."""
    signed, authority = _good()
    own = x509.load_pem_x509_certificate(signed.certificates)
    der = bytearray(own.public_bytes(Encoding.DER))
    padded = len(der) - len(own.signature) - 1
    assert der[padded] == 0
    for bits in range(256):
        der[padded] = bits
        text = base64.encodebytes(bytes(der)).decode()
        forged = f"-----BEGIN CERTIFICATE-----\n{text}-----END CERTIFICATE-----\n".encode()
        try:
            believed = replace(signed, certificates=forged).verify_signature(authority, NOW)
            assert believed.tbs_certificate_bytes == own.tbs_certificate_bytes
        except PermissionDenied:
            assert bits > 0


@settings(max_examples=1_500)
@given(data=st.data())
def test_whatever_comes_in_place_of_a_signature_is_refused_in_our_words(data: st.DataObject) -> None:
    """Certificates are a stranger's bytes, too, and their library has exceptions of its own.

    Some bytes around what an authority signed may be another's and mean the same (that a signature's last bit is
    padding): what is believed is then what it did sign, its serial number too, by which it is taken back.
    """
    signed, authority = _good()
    own = x509.load_pem_x509_certificate(signed.certificates)
    der = bytearray(own.public_bytes(Encoding.DER))
    for _ in range(data.draw(st.integers(1, 4))):
        der[data.draw(st.integers(0, len(der) - 1))] = data.draw(st.integers(0, 255))
    text = base64.encodebytes(bytes(der)).decode()
    forged = f"-----BEGIN CERTIFICATE-----\n{text}-----END CERTIFICATE-----\n".encode()
    own_first = data.draw(st.booleans())
    chain = signed.certificates + forged if own_first else forged
    try:
        believed = replace(signed, certificates=chain).verify_signature(authority, NOW)
    except PermissionDenied:
        pass
    else:
        assert believed.tbs_certificate_bytes == own.tbs_certificate_bytes


@cache
def _good() -> tuple[SignedStatement, bytes]:
    root, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    own = certificate("north", key, ("root", root), ca=None)
    return SignedStatement(SAID, pem(own), sign(key, SAID.content)), pem(
        certificate("root", root, ("root", root), ca=True)
    )
