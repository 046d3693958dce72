"""Verification of the signatures in a capture: evidence for those who trust the learners' authority."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from rich.console import Console
from rich.text import Text

from sottovoce_client import terminal
from sottovoce_client.formatting import format_count
from sottovoce_client.transcripts.query import find_transcripts
from sottovoce_core.errors import CaptureError, NotFound, PermissionDenied, RemoteProtocolError
from sottovoce_eavesdropper.capture_checks import EXCHANGE_METHODS
from sottovoce_eavesdropper.capture_reader import Capture
from sottovoce_eavesdropper.capture_session import Participants
from sottovoce_rpc.certificates import group_by_domain
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.principals import Principal, Role
from sottovoce_rpc.signatures import (
    DIGEST_BYTES,
    EMPTY_DIGESTS,
    ROUNDS_PER_BLOCK,
    SignedStatement,
    Statement,
    compute_frame_digest,
)

_MAX_SHOWN = 5
AuthorityBundles = Mapping[str, Sequence[x509.Certificate]]
"""Certificates of authorities, by trust domain."""
MISSING_SIGNATURE_REASON = "never made, or removed"
"""Possible reasons of missing signatures."""
EXIT_NOT_ALL_SIGNED = 3
"""Exit code if all signatures are right, and some are missing."""


class LearnerSignatures:
    """Messages and signatures of one learner; a round whose message matches its signature takes one bit."""

    def __init__(self) -> None:
        self.refusals: Counter[str] = Counter()
        """Reasons for refused signatures in its name, with their counts."""
        self._signed: dict[int, bytes] = {}  # first signed digests of each block
        self._signed_twice: set[int] = set()
        self._matching: defaultdict[int, int] = defaultdict(int)  # a bit for each round, by block
        self._other: defaultdict[int, set[bytes]] = defaultdict(set)  # messages without a matching signature so far

    def record_message(self, t: int, digest: bytes) -> None:
        """Record a message in its name."""
        if self._get_signed_digest(t) == digest:
            self._matching[t // ROUNDS_PER_BLOCK] |= 1 << t % ROUNDS_PER_BLOCK
        else:
            self._other[t].add(digest)

    def record_statement(self, statement: Statement) -> None:
        """Record a signed block."""
        block, first = statement.block, ROUNDS_PER_BLOCK * statement.block
        known = bytearray(self._signed.get(block, EMPTY_DIGESTS))
        for t in range(first, first + ROUNDS_PER_BLOCK):
            if (digest := statement[t]) is None:
                continue
            if self._get_signed_digest(t) not in (None, digest):
                self._signed_twice.add(t)
                continue
            known[DIGEST_BYTES * (t - first) : DIGEST_BYTES * (t - first + 1)] = digest
            if digest in self._other.get(t, ()):
                self._other[t].discard(digest)
                self._matching[block] |= 1 << t - first
                if not self._other[t]:
                    del self._other[t]
        self._signed[block] = bytes(known)

    @property
    def message_rounds_count(self) -> int:
        """Number of rounds with a message in its name."""
        return sum(map(int.bit_count, self._matching.values())) + sum(
            not self._has_matching_message(t) for t in self._other
        )

    @property
    def signed_rounds_count(self) -> int:
        """Number of rounds in which all messages in its name are signed."""
        return self.message_rounds_count - len(self._other)

    @property
    def unsigned_rounds(self) -> list[int]:
        """Rounds with messages and without a signature."""
        return sorted(t for t in self._other if self._get_signed_digest(t) is None)

    def find_missing_rounds(self, complete: bool) -> list[int]:
        """Find rounds without a signature that a learner with an identity would have signed by the end of the capture.

        Args:
            complete: whether the capture is complete; otherwise the last messages may be signed later.
        """
        last = max((*self._matching, *(t // ROUNDS_PER_BLOCK for t in self._other)), default=0)
        return [t for t in self.unsigned_rounds if complete or t // ROUNDS_PER_BLOCK < last]

    @property
    def equivocated_rounds(self) -> list[int]:
        """Rounds with two signed messages: proof of equivocation."""
        return sorted(self._signed_twice)

    @property
    def mismatched_rounds(self) -> list[int]:
        """Rounds with a message in its name that it did not sign, although it signed another message of the round."""
        return sorted(t for t in self._other if self._get_signed_digest(t) is not None)

    @property
    def has_signatures(self) -> bool:
        """True if it signed anything."""
        return bool(self._signed)

    def describe_faults(self, name: str) -> Iterator[str]:
        """Yield a sentence for each fault in the messages and signatures of the learner of this name."""
        if self.equivocated_rounds:
            rounds = _format_rounds(self.equivocated_rounds)
            yield f"{name} has signed two messages of {rounds}: it sent two messages of one round, and cannot deny it"
        if others := sorted(set(self.mismatched_rounds) - set(self.equivocated_rounds)):
            rounds = _format_rounds(others)
            yield f"{name} has signed another message of {rounds} than was captured: a forgery, or it sent two of one round"
        for reason, times in self.refusals.most_common(_MAX_SHOWN):
            yield f"{name}: {format_count(times)}x refused: {reason}"

    def _get_signed_digest(self, t: int) -> bytes | None:
        """Return the digest of the message of a round that it signed first."""
        block, k = divmod(t, ROUNDS_PER_BLOCK)
        found = self._signed.get(block, EMPTY_DIGESTS)[DIGEST_BYTES * k : DIGEST_BYTES * (k + 1)]
        return found if any(found) else None

    def _has_matching_message(self, t: int) -> bool:
        """Return whether the signed message of a round was captured."""
        return bool(self._matching.get(t // ROUNDS_PER_BLOCK, 0) >> t % ROUNDS_PER_BLOCK & 1)


def read_signatures(capture: Capture, authorities: bytes) -> dict[str, LearnerSignatures]:
    """Read the messages and signatures of a capture's learners, by name.

    Args:
        capture: capture of a Sottovoce run.
        authorities: trusted certificates, PEM.

    Raises:
        CaptureError: It cannot be read, is by wiretap, or is of another service.
    """
    capture.require_messages()
    names = Participants.from_spec(json.dumps(capture.metadata["spec"])).names
    if not names or not capture.shapes:
        raise CaptureError(f"{capture.name} must be of a Sottovoce run to have signatures, and is of another service")
    bundles = group_by_domain(x509.load_pem_x509_certificates(authorities))
    found, codec = {name: LearnerSignatures() for name in names}, RoundCodec(capture.shapes)
    for batch in capture.read_batches(("sender", "kind", "method", "wall_ns", "payload")):
        for sender, kind, method, wall, payload in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            if method not in EXCHANGE_METHODS or not 0 <= sender < len(names):
                continue
            signatures = found[names[sender]]
            if kind == "message":
                try:
                    signatures.record_message(codec.decode(payload)[0], compute_frame_digest(payload))
                except RemoteProtocolError:  # no message of a round: `transcript show` counts these
                    continue
            elif kind == "signature":
                _record_signature(signatures, names[sender], sender, payload, capture, bundles, wall)
    return found


def _record_signature(
    signatures: LearnerSignatures,
    name: str,
    sender: int,
    payload: bytes,
    capture: Capture,
    bundles: AuthorityBundles,
    wall_ns: int,
) -> None:
    try:
        statement = SignedStatement.decode(str(capture.metadata["run_id"]), payload)
        signer = _identify_signer(statement, bundles, datetime.fromtimestamp(wall_ns / 1e9, UTC))
    except (RemoteProtocolError, PermissionDenied, ValueError, OverflowError, OSError) as error:
        signatures.refusals[str(error)] += 1
        return
    if signer is None or not signer.is_one_of(f"{Role.LEARNER}/{name}") or statement.statement.sender != sender:
        home = next(iter(bundles)) if len(bundles) == 1 else ""
        other = signer.qualify_for(home) if signer else "no principal of a deployment"
        signatures.refusals[f"a signature of {other} in the name of {name}"] += 1
    elif "@" not in name and len(bundles) > 1:
        signatures.refusals[
            f"a signature of {signer} of {signer.domain} in the name of {name}, which names no trust domain: give the "
            "authorities of one domain only"
        ] += 1
    else:
        signatures.record_statement(statement.statement)


def _identify_signer(statement: SignedStatement, bundles: AuthorityBundles, moment: datetime) -> Principal | None:
    """Identify the signer by an authority of its own trust domain; None if it is no principal of a deployment.

    Raises:
        PermissionDenied: No such authority issued its certificate, or the signature is wrong.
    """
    claimed = statement.claimed_principal
    trusted = bundles.get(claimed.domain, bundles.get("", ())) if claimed else chain.from_iterable(bundles.values())
    if not trusted:
        raise PermissionDenied(f"a signature of {claimed}, of a trust domain without a trusted authority")
    statement.verify_signature(b"".join(each.public_bytes(Encoding.PEM) for each in trusted), moment)
    return claimed


def verify(place: str, authorities: Path, console: Console | None = None) -> int:
    """Print which messages of a capture are signed.

    Args:
        place: a capture, or a folder with one: a path, or a URL.
        authorities: file of trusted certificates, PEM.

    Returns:
        The exit code: 1 if a learner signed two messages of one round, or a signature is wrong; else 3 if signatures are missing;
        else 0.

    Raises:
        CaptureError: There is no capture, or it cannot be read.
        NotFound: The file of authorities cannot be read.
    """
    console = console or terminal.create_console(highlight=False)
    try:
        certificates = authorities.read_bytes()
        x509.load_pem_x509_certificates(certificates)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it holds no certificates (PEM)"
        raise NotFound(f"no authorities in {authorities}: {reason}") from None
    captures, _ = find_transcripts(place)
    if len(captures) != 1:
        raise CaptureError(f"{place} must hold one capture, got {len(captures)}: name one")
    learners = read_signatures(captures[0], certificates)
    table = terminal.create_table("learner")
    for head in ("rounds captured", "signed", "not signed"):
        table.add_column(head, justify="right")
    for name, signatures in learners.items():
        total, signed = signatures.message_rounds_count, signatures.signed_rounds_count
        table.add_row(Text(name), format_count(total), format_count(signed), format_count(total - signed))
    console.print(table)
    faults = [line for name, signatures in learners.items() for line in signatures.describe_faults(name)]
    for line in faults:
        console.print(Text(line, style="bold red"))
    has_signatures = any(signatures.has_signatures for signatures in learners.values())
    missing = {name: signatures.find_missing_rounds(captures[0].is_complete) for name, signatures in learners.items()}
    has_missing = not has_signatures or any(missing.values())
    if not has_signatures:
        reason = (
            "no signature is of a learner that these authorities certify"
            if faults
            else f"no signatures here: {MISSING_SIGNATURE_REASON}"
        )
        console.print(Text(reason, style="yellow"))
    else:
        for name in filter(missing.get, learners):
            rounds = f"of {_format_rounds(missing[name])}" if learners[name].has_signatures else "at all"
            console.print(Text(f"{name}: no signature {rounds}: {MISSING_SIGNATURE_REASON}", style="yellow"))
        if not faults:
            style = "yellow" if has_missing else "green"
            console.print(Text("no learner signed two messages of one round", style=style))
    terminal.print_json_if_requested(
        lambda: {
            "signed": has_signatures,
            "all_signed": not has_missing,
            "wrong": faults,
            "learners": [
                {
                    "name": name,
                    "rounds_captured": signatures.message_rounds_count,
                    "rounds_signed": signatures.signed_rounds_count,
                }
                for name, signatures in learners.items()
            ],
        }
    )
    return 1 if faults else EXIT_NOT_ALL_SIGNED if has_missing else 0


def _format_rounds(rounds: list[int]) -> str:
    more = f" and {format_count(len(rounds) - _MAX_SHOWN)} more" if len(rounds) > _MAX_SHOWN else ""
    return f"round{'s' if len(rounds) > 1 else ''} {', '.join(map(str, rounds[:_MAX_SHOWN]))}{more}"
