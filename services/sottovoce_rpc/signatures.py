"""What a learner has said, signed: nobody on the way can say another thing in its name, and it cannot deny what it said.

To sign a message takes longer than to make it. So a learner signs the digests of a block of rounds together, behind the last
one. Until then what it said is trusted as its channel is, and is no evidence. Who has heard only some rounds of a block can check
these. Two signatures of one learner that disagree on a round prove to anybody that it has said two things in it.
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
"""Rounds that are signed together."""
DIGEST_BYTES = 32
"""Bytes of the digest of a message."""
EMPTY_DIGESTS = bytes(ROUNDS_PER_BLOCK * DIGEST_BYTES)
"""The digests of a block in which nothing was said."""
_PURPOSE = b"sottovoce: digests of what a learner said in a block of rounds, 1\0"
_MAX_CERTIFICATES_BYTES = 16 * 1024
_MAX_CHAIN_DEPTH = 4
"""Authorities between one that is believed and a learner."""
_PSS = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)
_SIGNATURE = b"\x1a"
"""Protobuf's tag of a Signature in an ExchangeMessage, its first byte."""


def compute_frame_digest(frame: bytes) -> bytes:
    """Of a round's message: SHA-256 of its bytes."""
    return hashlib.sha256(frame).digest()


def is_signature(payload: bytes) -> bool:
    """Is this what stands in a stream behind a block of rounds?"""
    return payload.startswith(_SIGNATURE)


@dataclass(frozen=True, slots=True)
class Statement:
    """What a learner says that it said.

    Attributes:
        run_id: the run.
        sender: its index.
        block: rounds `BLOCK * block` to `BLOCK * (block + 1) - 1`.
        digests: of each of them, one behind the other; zeros where it said nothing.
    """

    run_id: str
    sender: int
    block: int
    digests: bytes

    def __getitem__(self, t: int) -> bytes | None:
        """The digest of round t; None: it is of another block, or the learner does not say that it said anything."""
        k = t - ROUNDS_PER_BLOCK * self.block
        if not 0 <= k < ROUNDS_PER_BLOCK:
            return None
        found = self.digests[DIGEST_BYTES * k : DIGEST_BYTES * (k + 1)]
        return found if any(found) else None

    @property
    def content(self) -> bytes:
        """What is signed."""
        run = self.run_id.encode()
        numbers = b"".join(n.to_bytes(8, "little") for n in (len(run), self.sender, self.block))
        return b"".join((_PURPOSE, numbers, run, self.digests))


@dataclass(frozen=True, slots=True)
class SignedStatement:
    """A statement with a signature that nobody has checked yet.

    Attributes:
        statement: what is said.
        certificates: of the signer, PEM, its own first.
        signature: over the statement's content.
    """

    statement: Statement
    certificates: bytes
    signature: bytes

    def encode(self) -> bytes:
        """As it stands in a stream."""
        said = self.statement
        return learner_pb2.ExchangeMessage(
            signature=learner_pb2.Signature(
                block=said.block,
                sender=said.sender,
                digests=said.digests,
                certificates=self.certificates,
                signature=self.signature,
            )
        ).SerializeToString()

    @classmethod
    def decode(cls, run_id: str, payload: bytes) -> SignedStatement:
        """`encode` backwards.

        Raises:
            RemoteProtocolError: it is none.
        """
        said = read_signature(payload)
        if len(said.digests) != len(EMPTY_DIGESTS) or len(said.certificates) > _MAX_CERTIFICATES_BYTES:
            raise RemoteProtocolError(
                f"a signature must have {len(EMPTY_DIGESTS)} bytes of digests and at most {_MAX_CERTIFICATES_BYTES} of certificates, got "
                f"{len(said.digests)} and {len(said.certificates)}"
            )
        return cls(Statement(run_id, said.sender, said.block, said.digests), said.certificates, said.signature)

    @property
    def claimed_principal(self) -> Principal | None:
        """Whom the signer's certificate names, which nobody has checked; None: nobody of a deployment."""
        try:
            return read_principal(x509.load_pem_x509_certificate(self.certificates))
        except (ValueError, x509.InvalidVersion):
            return None

    def verify_signature(self, authorities: bytes, moment: datetime) -> x509.Certificate:
        """The certificate of who has signed this.

        Args:
            authorities: that are believed, PEM.
            moment: at which the certificates must be valid.

        Raises:
            PermissionDenied: none of theirs, or the signature is not of its key.
        """
        found = verify_chain(self.certificates, authorities, moment)
        if not _holds(found.public_key(), self.signature, self.statement.content):
            raise PermissionDenied("a signature that is not of the key of its certificate", ViolationKind.SIGNATURE)
        return found


# ---- keys ------------------------------------------------------------------------------------------------------------


def sign(key: PrivateKeyTypes, content: bytes) -> bytes:
    """A signature, of one length for one key.

    Raises:
        FailedPrecondition: with such a key nothing can be signed here.
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


def _holds(key: PublicKeyTypes, signature: bytes, content: bytes) -> bool:
    """Is this a signature of the key?"""
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
    except (InvalidSignature, UnsupportedAlgorithm):  # of a curve that is not known here
        return False
    return True


# ---- certificates ----------------------------------------------------------------------------------------------------


def _authority(_: object, __: x509.Certificate, found: x509.BasicConstraints) -> None:
    if not found.ca:
        raise ValueError("who has signed a certificate is no authority")


def _usage(_: object, __: x509.Certificate, found: x509.KeyUsage | None) -> None:
    if found is not None and not found.key_cert_sign:
        raise ValueError("who has signed a certificate must not sign any")


# As gRPC's own handshake takes them: many an authority of one's own writes less than those of the web must.
_AUTHORITIES = (
    ExtensionPolicy.permit_all()
    .require_present(x509.BasicConstraints, Criticality.AGNOSTIC, _authority)
    .may_be_present(x509.KeyUsage, Criticality.AGNOSTIC, _usage)
)


_REASONS = {
    "candidates exhausted": "none of the authorities given has issued them, or they were not valid when they were used",
    "not valid at validation time": "they were not valid when they were used",
}
"""What the library says, and what we do."""


def verify_chain(certificates: bytes, authorities: bytes, moment: datetime) -> x509.Certificate:
    """The first certificate of a chain that leads to one of some authorities.

    Args:
        certificates: PEM, its own first.
        authorities: PEM.
        moment: at which all of them must be valid.

    Raises:
        PermissionDenied: it does not, or not at this moment.
    """
    # A minute is found to be right once. Its end: a certificate may have been issued in it.
    return _leaf(certificates, authorities, moment.replace(second=0, microsecond=0) + timedelta(minutes=1))


@lru_cache(maxsize=256)
def _leaf(certificates: bytes, authorities: bytes, moment: datetime) -> x509.Certificate:
    try:
        own, *between = x509.load_pem_x509_certificates(certificates)
        policy = PolicyBuilder().store(Store(x509.load_pem_x509_certificates(authorities))).time(moment)
        policy = policy.max_chain_depth(_MAX_CHAIN_DEPTH)
        policy = policy.extension_policies(ca_policy=_AUTHORITIES, ee_policy=ExtensionPolicy.permit_all())
        policy.build_client_verifier().verify(own, between)
    except Exception as error:  # noqa: BLE001 - a stranger's bytes, in a library with many exceptions of its own
        told = " ".join(str(error).split())[:200]
        why = next((ours for theirs, ours in _REASONS.items() if theirs in told), told)
        raise PermissionDenied(
            f"a signature whose certificates do not lead to an authority that is believed: {why}"
        ) from None
    return own
