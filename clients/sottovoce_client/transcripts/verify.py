"""What of a capture its learners have signed: evidence for whoever believes their authority, and nobody else."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from rich.console import Console
from rich.text import Text

from sottovoce.errors import CaptureError, NotReady, RemoteProtocolError, StrangerError
from sottovoce.network.roster import names_of
from sottovoce_client import terminal
from sottovoce_client.transcripts.query import find
from sottovoce_client.wording import count
from sottovoce_eavesdropper.lookout import EXCHANGE
from sottovoce_eavesdropper.reading import Capture
from sottovoce_rpc.certificates import named
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.principals import Role
from sottovoce_rpc.signatures import BLOCK, Signed, digest

_MOST_SHOWN = 5


@dataclass(slots=True)
class Words:
    """What one learner has said and signed.

    Attributes:
        heard: round to the digests of what passed in its name.
        signed: round to the digests that it signed.
        refused: why signatures in its name count for nothing, how often.
    """

    heard: dict[int, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    signed: dict[int, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def twice(self) -> list[int]:
        """Rounds of which it has signed two messages: proof that it said two things."""
        return sorted(t for t, own in self.signed.items() if len(own) > 1)

    @property
    def others(self) -> list[int]:
        """Rounds in which something passed in its name that it has not signed, though it signed another message of them."""
        return sorted(t for t, own in self.heard.items() if (vouched := self.signed.get(t)) and own - vouched)

    @property
    def evidence(self) -> int:
        """Rounds in which all that passed in its name is signed by it."""
        return sum(own <= self.signed.get(t, set()) for t, own in self.heard.items())


def read(capture: Capture, authorities: bytes) -> dict[str, Words]:
    """What the learners of a capture have said and signed, by name.

    Args:
        capture: of a run of ours.
        authorities: that are believed, PEM.

    Raises:
        CaptureError: it cannot be read, is by wiretap, or of no run of ours.
    """
    capture.require_messages()
    names = names_of(capture.facts["spec"].get("learners", 0))
    if not names or not capture.shapes:
        raise CaptureError(f"{capture.name} is of no run of ours: in it nothing is signed")
    found, codec = {name: Words() for name in names}, RoundCodec(capture.shapes)
    for batch in capture.batches(("sender", "kind", "method", "wall_ns", "payload")):
        for sender, kind, method, wall, payload in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            if method not in EXCHANGE or not 0 <= sender < len(names):
                continue
            words = found[names[sender]]
            if kind == "message":
                try:
                    words.heard[codec.decode(payload)[0]].add(digest(payload))
                except RemoteProtocolError:  # no round: `transcript show` says so
                    continue
            elif kind == "signature":
                _take(words, names[sender], sender, payload, capture, authorities, wall)
    return found


def _take(
    words: Words, name: str, sender: int, payload: bytes, capture: Capture, authorities: bytes, wall_ns: int
) -> None:
    try:
        signed = Signed.decode(str(capture.facts["run_id"]), payload)
        who = named(signed.signer(authorities, datetime.fromtimestamp(wall_ns / 1e9, UTC)))
    except (RemoteProtocolError, StrangerError, ValueError, OverflowError, OSError) as error:
        words.refused[str(error)] += 1
        return
    if who is None or (who.role, who.name) != (Role.LEARNER, name) or signed.statement.sender != sender:
        words.refused[f"a signature of {who or 'nobody of a deployment'} in the name of {name}"] += 1
        return
    first = BLOCK * signed.statement.block
    for t in range(first, first + BLOCK):
        if (said := signed.statement[t]) is not None:
            words.signed[t].add(said)


def verify(place: str, authorities: Path, console: Console | None = None) -> int:
    """Print what of a capture is signed.

    Args:
        place: a capture, or a folder with one: a path, or a URL.
        authorities: file of those that are believed, PEM.

    Returns:
        The exit code: 1 where somebody has said two things, a signature is wrong, or nothing is signed.

    Raises:
        CaptureError: there is no capture, or it cannot be read.
        NotReady: the file of authorities cannot be read.
    """
    console = console or terminal.console(highlight=False)
    try:
        believed = authorities.read_bytes()
        x509.load_pem_x509_certificates(believed)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it holds no certificates (PEM)"
        raise NotReady(f"no authorities in {authorities}: {why}") from None
    captures = find(place).captures
    if len(captures) != 1:
        raise CaptureError(f"{place} must hold one capture, got {len(captures)}: name one")
    found = read(captures[0], believed)
    table = terminal.table("learner")
    for head in ("rounds heard", "signed", "not signed"):
        table.add_column(head, justify="right")
    for name, words in found.items():
        heard = len(words.heard)
        table.add_row(Text(name), count(heard), count(words.evidence), count(heard - words.evidence))
    console.print(table)
    wrong = [line for name, words in found.items() for line in _wrong(name, words)]
    for line in wrong:
        console.print(Text(line, style="bold red"))
    signed = any(words.signed for words in found.values())
    if not signed:
        nobody = "by nobody whom these authorities know" if wrong else "the learners had no identities"
        console.print(Text(f"nothing is signed: {nobody}", style="yellow"))
    elif not wrong:
        console.print(Text("nobody has said two things, as far as it is signed", style="green"))
    return 1 if wrong or not signed else 0


def _wrong(name: str, words: Words) -> Iterator[str]:
    if words.twice:
        yield f"{name} has signed two messages of {_rounds(words.twice)}: it said two things, and cannot deny it"
    if others := sorted(set(words.others) - set(words.twice)):
        yield f"{name} has signed another message of {_rounds(others)} than passed here: a forgery, or it said two things"
    for why, times in words.refused.most_common(_MOST_SHOWN):
        yield f"{name}: {count(times)}x refused: {why}"


def _rounds(rounds: list[int]) -> str:
    more = f" and {count(len(rounds) - _MOST_SHOWN)} more" if len(rounds) > _MOST_SHOWN else ""
    return f"round{'s' if len(rounds) > 1 else ''} {', '.join(map(str, rounds[:_MOST_SHOWN]))}{more}"
