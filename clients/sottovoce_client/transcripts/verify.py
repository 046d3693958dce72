"""What of a capture its learners have signed: evidence for whoever believes their authority, and nobody else."""

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
"""Authorities by trust domain."""
MISSING_SIGNATURE_REASON = "never made, or removed"
"""What can be known of signatures that are not there."""
EXIT_NOT_ALL_SIGNED = 3
"""Exit code where nothing is wrong with what is signed, and signatures are missing."""


class LearnerSignatures:
    """What one learner has said and signed: of a round that passed as it was signed a bit is kept, and no more."""

    def __init__(self) -> None:
        self.refusals: Counter[str] = Counter()
        """Why signatures in its name count for nothing, how often."""
        self._signed: dict[int, bytes] = {}  # the first digests of each block
        self._twice: set[int] = set()
        self._as_signed: defaultdict[int, int] = defaultdict(int)  # a bit for each round, by block
        self._else: defaultdict[int, set[bytes]] = defaultdict(set)  # what passed and is not signed, or not yet

    def record_message(self, t: int, said: bytes) -> None:
        """Something passed in its name."""
        if self._digest(t) == said:
            self._as_signed[t // ROUNDS_PER_BLOCK] |= 1 << t % ROUNDS_PER_BLOCK
        else:
            self._else[t].add(said)

    def record_statement(self, statement: Statement) -> None:
        """It has signed a block."""
        block, first = statement.block, ROUNDS_PER_BLOCK * statement.block
        known = bytearray(self._signed.get(block, EMPTY_DIGESTS))
        for t in range(first, first + ROUNDS_PER_BLOCK):
            if (said := statement[t]) is None:
                continue
            if self._digest(t) not in (None, said):
                self._twice.add(t)
                continue
            known[DIGEST_BYTES * (t - first) : DIGEST_BYTES * (t - first + 1)] = said
            if said in self._else.get(t, ()):
                self._else[t].discard(said)
                self._as_signed[block] |= 1 << t - first
                if not self._else[t]:
                    del self._else[t]
        self._signed[block] = bytes(known)

    @property
    def message_rounds_count(self) -> int:
        """Rounds in which anything passed in its name."""
        return sum(map(int.bit_count, self._as_signed.values())) + sum(not self._has_passed(t) for t in self._else)

    @property
    def signed_rounds_count(self) -> int:
        """Rounds in which all that passed in its name is signed by it."""
        return self.message_rounds_count - len(self._else)

    @property
    def unsigned_rounds(self) -> list[int]:
        """Rounds that it has not signed."""
        return sorted(t for t in self._else if self._digest(t) is None)

    def find_missing_rounds(self, complete: bool) -> list[int]:
        """Rounds that a learner with an identity would have signed by the end of the capture, and that nobody has.

        Args:
            complete: whether the capture is; else what passed last may be signed later.
        """
        last = max((*self._as_signed, *(t // ROUNDS_PER_BLOCK for t in self._else)), default=0)
        return [t for t in self.unsigned_rounds if complete or t // ROUNDS_PER_BLOCK < last]

    @property
    def equivocated_rounds(self) -> list[int]:
        """Rounds of which it has signed two messages: proof that it said two things."""
        return sorted(self._twice)

    @property
    def mismatched_rounds(self) -> list[int]:
        """Rounds in which something passed in its name that it has not signed, though it signed another message of them."""
        return sorted(t for t in self._else if self._digest(t) is not None)

    @property
    def has_signatures(self) -> bool:
        """Whether it has signed anything."""
        return bool(self._signed)

    def describe_faults(self, name: str) -> Iterator[str]:
        """What is wrong with what the learner of this name has said and signed, a sentence each."""
        if self.equivocated_rounds:
            yield f"{name} has signed two messages of {_rounds(self.equivocated_rounds)}: it said two things, and cannot deny it"
        if others := sorted(set(self.mismatched_rounds) - set(self.equivocated_rounds)):
            yield f"{name} has signed another message of {_rounds(others)} than passed here: a forgery, or it said two things"
        for why, times in self.refusals.most_common(_MAX_SHOWN):
            yield f"{name}: {format_count(times)}x refused: {why}"

    def _digest(self, t: int) -> bytes | None:
        """Of what it has signed first of a round."""
        block, k = divmod(t, ROUNDS_PER_BLOCK)
        found = self._signed.get(block, EMPTY_DIGESTS)[DIGEST_BYTES * k : DIGEST_BYTES * (k + 1)]
        return found if any(found) else None

    def _has_passed(self, t: int) -> bool:
        """Has what it signed of a round passed?"""
        return bool(self._as_signed.get(t // ROUNDS_PER_BLOCK, 0) >> t % ROUNDS_PER_BLOCK & 1)


def read_signatures(capture: Capture, authorities: bytes) -> dict[str, LearnerSignatures]:
    """What the learners of a capture have said and signed, by name.

    Args:
        capture: of a run of ours.
        authorities: that are believed, PEM.

    Raises:
        CaptureError: it cannot be read, is by wiretap, or of no run of ours.
    """
    capture.require_messages()
    names = Participants.from_spec(json.dumps(capture.metadata["spec"])).names
    if not names or not capture.shapes:
        raise CaptureError(f"{capture.name} is of no run of ours: in it nothing is signed")
    bundles = group_by_domain(x509.load_pem_x509_certificates(authorities))
    found, codec = {name: LearnerSignatures() for name in names}, RoundCodec(capture.shapes)
    for batch in capture.read_batches(("sender", "kind", "method", "wall_ns", "payload")):
        for sender, kind, method, wall, payload in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            if method not in EXCHANGE_METHODS or not 0 <= sender < len(names):
                continue
            words = found[names[sender]]
            if kind == "message":
                try:
                    words.record_message(codec.decode(payload)[0], compute_frame_digest(payload))
                except RemoteProtocolError:  # no round: `transcript show` says so
                    continue
            elif kind == "signature":
                _take(words, names[sender], sender, payload, capture, bundles, wall)
    return found


def _take(
    words: LearnerSignatures,
    name: str,
    sender: int,
    payload: bytes,
    capture: Capture,
    bundles: AuthorityBundles,
    wall_ns: int,
) -> None:
    try:
        signed = SignedStatement.decode(str(capture.metadata["run_id"]), payload)
        who = _signer(signed, bundles, datetime.fromtimestamp(wall_ns / 1e9, UTC))
    except (RemoteProtocolError, PermissionDenied, ValueError, OverflowError, OSError) as error:
        words.refusals[str(error)] += 1
        return
    if who is None or not who.is_one_of(f"{Role.LEARNER}/{name}") or signed.statement.sender != sender:
        home = next(iter(bundles)) if len(bundles) == 1 else ""
        other = who.qualify_for(home) if who else "nobody of a deployment"
        words.refusals[f"a signature of {other} in the name of {name}"] += 1
    elif "@" not in name and len(bundles) > 1:
        words.refusals[
            f"a signature of {who} of {who.domain} in the name of {name}, which holds no trust domain: take the authorities of "
            "one domain alone"
        ] += 1
    else:
        words.record_statement(signed.statement)


def _signer(signed: SignedStatement, bundles: AuthorityBundles, moment: datetime) -> Principal | None:
    """Who has signed, by an authority of its own trust domain; None: nobody of a deployment.

    Raises:
        PermissionDenied: no such authority has issued its certificate, or the signature is wrong.
    """
    claimed = signed.claimed_principal
    believed = bundles.get(claimed.domain, bundles.get("", ())) if claimed else chain.from_iterable(bundles.values())
    if not believed:
        raise PermissionDenied(f"a signature of {claimed}, of a trust domain of which no authority is believed")
    signed.verify_signature(b"".join(each.public_bytes(Encoding.PEM) for each in believed), moment)
    return claimed


def verify(place: str, authorities: Path, console: Console | None = None) -> int:
    """Print what of a capture is signed.

    Args:
        place: a capture, or a folder with one: a path, or a URL.
        authorities: file of those that are believed, PEM.

    Returns:
        The exit code: 1 where somebody has said two things, or a signature is wrong; else 3 where signatures are missing; else 0.

    Raises:
        CaptureError: there is no capture, or it cannot be read.
        FailedPrecondition: the file of authorities cannot be read.
    """
    console = console or terminal.create_console(highlight=False)
    try:
        believed = authorities.read_bytes()
        x509.load_pem_x509_certificates(believed)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it holds no certificates (PEM)"
        raise NotFound(f"no authorities in {authorities}: {why}") from None
    captures, _ = find_transcripts(place)
    if len(captures) != 1:
        raise CaptureError(f"{place} must hold one capture, got {len(captures)}: name one")
    found = read_signatures(captures[0], believed)
    table = terminal.create_table("learner")
    for head in ("rounds heard", "signed", "not signed"):
        table.add_column(head, justify="right")
    for name, words in found.items():
        heard, evidence = words.message_rounds_count, words.signed_rounds_count
        table.add_row(Text(name), format_count(heard), format_count(evidence), format_count(heard - evidence))
    console.print(table)
    wrong = [line for name, words in found.items() for line in words.describe_faults(name)]
    for line in wrong:
        console.print(Text(line, style="bold red"))
    signed = any(words.has_signatures for words in found.values())
    missing = {name: words.find_missing_rounds(captures[0].is_complete) for name, words in found.items()}
    lacks = not signed or any(missing.values())
    if not signed:
        why = (
            "nothing is signed by anyone whom these authorities know"
            if wrong
            else f"no signatures here: {MISSING_SIGNATURE_REASON}"
        )
        console.print(Text(why, style="yellow"))
    else:
        for name in filter(missing.get, found):
            of = f"of {_rounds(missing[name])}" if found[name].has_signatures else "at all"
            console.print(Text(f"{name}: no signature {of}: {MISSING_SIGNATURE_REASON}", style="yellow"))
        if not wrong:
            style = "yellow" if lacks else "green"
            console.print(Text("nobody has said two things, as far as it is signed", style=style))
    terminal.print_json_if_requested(
        lambda: {
            "signed": signed,
            "all_signed": not lacks,
            "wrong": wrong,
            "learners": [
                {"name": name, "rounds_heard": words.message_rounds_count, "rounds_signed": words.signed_rounds_count}
                for name, words in found.items()
            ],
        }
    )
    return 1 if wrong else EXIT_NOT_ALL_SIGNED if lacks else 0


def _rounds(rounds: list[int]) -> str:
    more = f" and {format_count(len(rounds) - _MAX_SHOWN)} more" if len(rounds) > _MAX_SHOWN else ""
    return f"round{'s' if len(rounds) > 1 else ''} {', '.join(map(str, rounds[:_MAX_SHOWN]))}{more}"
