"""Signatures of the messages that a learner sent: no intermediary can forge them, and the sender cannot deny them.

Signing takes longer than creating a message. So a learner signs the digests of a block of rounds together, after the last one.
Until then its messages are only as trustworthy as the channel, and are no evidence. A recipient of only some rounds of a block
can verify these. Two signatures of one learner that disagree on a round prove that it sent two different messages in it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.x509.verification import Criticality, ExtensionPolicy, PolicyBuilder, Store

from sottovoce_core.errors import FailedPrecondition, PermissionDenied, RemoteProtocolError, ViolationKind
from sottovoce_rpc.certificates import read_principal
from sottovoce_rpc.codec import read_signature
from sottovoce_rpc.principals import Principal
from sottovoce_wire.v1 import learner_pb2

ROUNDS_PER_BLOCK = 32
"""Number of rounds signed together."""
DIGEST_BYTES = 32
"""Length of a message digest in bytes."""
EMPTY_DIGESTS = bytes(ROUNDS_PER_BLOCK * DIGEST_BYTES)
"""Digests of a block without messages."""
_PURPOSE = b"sottovoce: digests of what a learner said in a block of rounds, 1\0"  # part of the signed bytes
_MAX_CERTIFICATES_BYTES = 16 * 1024
_MAX_CHAIN_DEPTH = 4
"""Maximum number of intermediate authorities between a trusted one and a learner."""
_PSS = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)
_SIGNATURE = b"\x1a"
"""Protobuf tag of a Signature in an ExchangeMessage: its first byte."""


def compute_frame_digest(frame: bytes) -> bytes:
    """Return the SHA-256 of a round's message bytes."""
    return hashlib.sha256(frame).digest()


def is_signature(payload: bytes) -> bool:
    """Return whether a message of a stream is the signature of a block of rounds."""
    return payload.startswith(_SIGNATURE)


@dataclass(frozen=True, slots=True)
class Statement:
    """A learner's statement of the messages that it sent in a block of rounds.

    Attributes:
        run_id: the run.
        sender: index of the learner.
        block: block number; it covers rounds `ROUNDS_PER_BLOCK * block` to `ROUNDS_PER_BLOCK * (block + 1) - 1`.
        digests: concatenated digests of these rounds; zeros for a round without a message.
    """

    run_id: str
    sender: int
    block: int
    digests: bytes

    def __getitem__(self, t: int) -> bytes | None:
        """Return the digest of round t; None if the round is of another block, or no message is stated for it."""
        k = t - ROUNDS_PER_BLOCK * self.block
        if not 0 <= k < ROUNDS_PER_BLOCK:
            return None
        found = self.digests[DIGEST_BYTES * k : DIGEST_BYTES * (k + 1)]
        return found if any(found) else None

    @property
    def content(self) -> bytes:
        """Bytes that are signed."""
        run = self.run_id.encode()
        numbers = b"".join(n.to_bytes(8, "little") for n in (len(run), self.sender, self.block))
        return b"".join((_PURPOSE, numbers, run, self.digests))


@dataclass(frozen=True, slots=True)
class SignedStatement:
    """A statement with a signature not verified yet.

    Attributes:
        statement: the statement.
        certificates: PEM of the signer's chain, its own certificate first.
        signature: signature over the statement's content.
    """

    statement: Statement
    certificates: bytes
    signature: bytes

    def encode(self) -> bytes:
        """Encode as a message of the stream."""
        statement = self.statement
        return learner_pb2.ExchangeMessage(
            signature=learner_pb2.Signature(
                block=statement.block,
                sender=statement.sender,
                digests=statement.digests,
                certificates=self.certificates,
                signature=self.signature,
            )
        ).SerializeToString()

    @classmethod
    def decode(cls, run_id: str, payload: bytes) -> SignedStatement:
        """Decode a message of the stream.

        Raises:
            RemoteProtocolError: the bytes are not a signature, or have a wrong size.
        """
        message = read_signature(payload)
        if len(message.digests) != len(EMPTY_DIGESTS) or len(message.certificates) > _MAX_CERTIFICATES_BYTES:
            raise RemoteProtocolError(
                f"a signature must have {len(EMPTY_DIGESTS)} bytes of digests and at most {_MAX_CERTIFICATES_BYTES} of "
                "certificates, got "
                f"{len(message.digests)} and {len(message.certificates)}"
            )
        return cls(
            Statement(run_id, message.sender, message.block, message.digests), message.certificates, message.signature
        )

    @property
    def claimed_principal(self) -> Principal | None:
        """Principal that the signer's certificate names, not verified; None if it names none."""
        try:
            return read_principal(x509.load_pem_x509_certificate(self.certificates))
        except (ValueError, x509.InvalidVersion):
            return None

    def verify_signature(self, authorities: bytes, moment: datetime) -> x509.Certificate:
        """Verify certificates and signature, and return the signer's certificate.

        Args:
            authorities: trusted authorities, PEM.
            moment: time at which the certificates must be valid.

        Raises:
            PermissionDenied: the chain leads to none of the authorities, or the signature is not of the certificate's key.
        """
        found = verify_chain(self.certificates, authorities, moment)
        if not _is_signature_of(found.public_key(), self.signature, self.statement.content):
            raise PermissionDenied("a signature that is not of the key of its certificate", ViolationKind.SIGNATURE)
        return found


# ---- keys ------------------------------------------------------------------------------------------------------------


def sign(key: PrivateKeyTypes, content: bytes) -> bytes:
    """Sign content; the length of the signature depends on the key only.

    Raises:
        FailedPrecondition: the type of the key is not supported.
    """
    match key:
        case ec.EllipticCurvePrivateKey():
            size = (key.curve.key_size + 7) // 8
            parts = decode_dss_signature(key.sign(content, ec.ECDSA(hashes.SHA256())))
            return b"".join(part.to_bytes(size, "big") for part in parts)
        case rsa.RSAPrivateKey():
            return key.sign(content, _PSS, hashes.SHA256())
    raise FailedPrecondition(
        f"the key of an identity must be of an elliptic curve or RSA to sign, got {type(key).__name__}"
    )


def _is_signature_of(key: PublicKeyTypes, signature: bytes, content: bytes) -> bool:
    """Return whether this is a signature of the key over the content."""
    try:
        match key:
            case ec.EllipticCurvePublicKey():
                half = len(signature) // 2
                parts = (int.from_bytes(part, "big") for part in (signature[:half], signature[half:]))
                key.verify(encode_dss_signature(*parts), content, ec.ECDSA(hashes.SHA256()))
            case rsa.RSAPublicKey():
                key.verify(signature, content, _PSS, hashes.SHA256())
            case _:
                return False
    except (InvalidSignature, UnsupportedAlgorithm):  # the latter: a curve unknown here
        return False
    return True


# ---- certificates ----------------------------------------------------------------------------------------------------


def _require_authority(_: object, __: x509.Certificate, found: x509.BasicConstraints) -> None:
    if not found.ca:
        raise ValueError("the issuer of a certificate is not an authority")


def _require_signing_usage(_: object, __: x509.Certificate, found: x509.KeyUsage | None) -> None:
    if found is not None and not found.key_cert_sign:
        raise ValueError("the issuer of a certificate must not sign certificates (key usage)")


# The same requirements as in gRPC's own handshake: private authorities often write fewer extensions than web ones must.
_AUTHORITIES = (
    ExtensionPolicy.permit_all()
    .require_present(x509.BasicConstraints, Criticality.AGNOSTIC, _require_authority)
    .may_be_present(x509.KeyUsage, Criticality.AGNOSTIC, _require_signing_usage)
)


_REASONS = {
    "candidates exhausted": "none of the authorities given has issued them, or they were not valid when they were used",
    "not valid at validation time": "they were not valid when they were used",
}
"""Our texts for the texts of the library."""


def verify_chain(certificates: bytes, authorities: bytes, moment: datetime) -> x509.Certificate:
    """Verify a certificate chain, and return its first certificate.

    Args:
        certificates: PEM, the own certificate first.
        authorities: trusted authorities, PEM.
        moment: time at which all certificates must be valid.

    Raises:
        PermissionDenied: the chain leads to none of the authorities, or is not valid at this time.
    """
    # Verified once a minute, for the end of the minute: a certificate may have been issued in it.
    return _verify_chain(certificates, authorities, moment.replace(second=0, microsecond=0) + timedelta(minutes=1))


@lru_cache(maxsize=256)
def _verify_chain(certificates: bytes, authorities: bytes, moment: datetime) -> x509.Certificate:
    try:
        own, *between = x509.load_pem_x509_certificates(certificates)
        policy = PolicyBuilder().store(Store(x509.load_pem_x509_certificates(authorities))).time(moment)
        policy = policy.max_chain_depth(_MAX_CHAIN_DEPTH)
        policy = policy.extension_policies(ca_policy=_AUTHORITIES, ee_policy=ExtensionPolicy.permit_all())
        policy.build_client_verifier().verify(own, between)
    except Exception as error:  # noqa: BLE001 - foreign bytes, in a library with many exceptions of its own
        text = " ".join(str(error).split())[:200]
        why = next((ours for theirs, ours in _REASONS.items() if theirs in text), text)
        raise PermissionDenied(f"a signature whose certificates do not lead to a trusted authority: {why}") from None
    return own
