"""Online checks: violations on a channel that are detected message by message while a run goes on.

These rules hold with certainty for learners that follow the protocol, for any data and noise:

- `decoding`: a message belongs to this run, in its only encoding, with finite numbers; so does the hello before it.
- `sender`: a learner sends under its own name.
- `framing`: beside messages a learner sends what gRPC's library does, and no other frame, flag or setting of HTTP/2.
- `length`: every message has the same number of bytes; where the run's fields are known, `decoding` checks this.
- `round`: a stream carries the rounds in which its receiver has its sender as in-neighbour, each once, in order; it begins
  with the first one that the receiver reported as missing.
- `changed-resend`: a round that is resent after a reconnect has the same bytes: fresh noise on one state would average out.
- `equivocation`: every neighbour receives the same bytes.
- `lattice`: noise and the value it hides are multiples of one power of two, and so are the sent numbers
  (`algorithms.interface.LatticeAlgorithm`).

Properties that hold with high probability only, such as the noise distribution, are tested by `conformance` after the run.
Memory is bounded: the oldest messages are forgotten, and contradictions with them are not detected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sottovoce_core.arrays import FloatArray
from sottovoce_core.runs.transcript import MAX_REMEMBERED_MESSAGES, BoundedDict
from sottovoce_core.text import format_learner_name

_Kind = Literal["decoding", "sender", "framing", "length", "round", "changed-resend", "equivocation", "lattice"]


@dataclass(frozen=True, slots=True)
class Detection:
    """Violation of a rule that an honest learner never breaks.

    Attributes:
        kind: broken rule.
        sender, receiver: sender and receiver of the message.
        round: round that the message states; None if it cannot be decoded.
        text: one readable line.
    """

    kind: _Kind
    sender: int
    receiver: int
    round: int | None
    text: str

    @property
    def is_contradiction(self) -> bool:
        """True if two contents of one round were sent, whose difference no noise hides."""
        return self.kind in ("changed-resend", "equivocation")


@dataclass(frozen=True, slots=True)
class CapturedMessage:
    """Message as captured on the wire.

    Attributes:
        sender, receiver: learners at the ends of the channel.
        stream: number of the stream on that channel; 0: none, the order is not known.
        claimed_sender: sender that the message states.
        round: round that the message states.
        fields: numbers of the message.
        digest: digest of its bytes.
        size: number of its bytes.
    """

    sender: int
    receiver: int
    stream: int
    claimed_sender: int
    round: int
    fields: Mapping[str, FloatArray]
    digest: bytes
    size: int


@dataclass(frozen=True, slots=True)
class ExpectedTraffic:
    """Facts about a run that are known before it begins; the defaults are for an unknown run.

    Attributes:
        message_bytes: bytes of a message; None: as the first one of its sender.
        next_due_round: (sender, receiver, t) to the first round from t on in which the receiver has the sender as
            in-neighbour, None for no more; without this function, rounds must increase.
        lattice_spacings: (learner, round) to the spacing of each field that is on a lattice.
        names: names of the learners, by index; a learner without a name is shown by its index.
    """

    message_bytes: int | None = None
    next_due_round: Callable[[int, int, int], int | None] | None = None
    lattice_spacings: Callable[[int, int], Mapping[str, float]] = lambda learner, t: {}
    names: Sequence[str] = ()

    def get_display_name(self, learner: int) -> str:
        """Return a learner's display name."""
        return format_learner_name(self.names, learner)


class OnlineChecks:
    """Online checks of all channels of a run.

    Args:
        expected: facts known beforehand; may be replaced later.
        max_kept: maximum number of remembered rounds per learner, and of streams.
    """

    def __init__(self, expected: ExpectedTraffic, max_kept: int = MAX_REMEMBERED_MESSAGES) -> None:
        self.expected = expected
        self._versions: BoundedDict[tuple[int, int], bytes] = BoundedDict(max_kept)
        self._receivers: BoundedDict[tuple[int, int], dict[int, bytes]] = BoundedDict(
            max_kept
        )  # with the first digest that each of them received
        self._next: BoundedDict[tuple[int, int, int], int] = BoundedDict(max_kept)
        self._lengths: BoundedDict[int, int] = BoundedDict(max_kept)

    def open_stream(self, sender: int, receiver: int, stream: int, t: int) -> None:
        """Register a stream on which the receiver lacks the rounds from t on."""
        self._next[sender, receiver, stream] = t

    def report_undecodable(self, sender: int, receiver: int, stream: int, reason: str) -> tuple[Detection, ...]:
        """Report a message that cannot be decoded."""
        self._next.pop((sender, receiver, stream), None)  # it may have been any round
        return (Detection("decoding", sender, receiver, None, f"{self._format_edge(sender, receiver)}: {reason}"),)

    def report_framing(self, sender: int, receiver: int, violations: Sequence[str]) -> tuple[Detection, ...]:
        """Report what gRPC's library never sends, in one detection; none if there are no violations."""
        if not violations:
            return ()
        more = f", and {len(violations) - 1:,} more" if len(violations) > 1 else ""
        text = f"{self._format_edge(sender, receiver)}: gRPC never sends {violations[0]}{more}"
        return (Detection("framing", sender, receiver, None, text),)

    def remember(self, sender: int, receiver: int, t: int, digest: bytes) -> None:
        """Remember a received message."""
        key = sender, t
        first = self._versions.setdefault(key, digest)
        receivers = self._receivers.get(key)
        if receivers is None:
            receivers = self._receivers[key] = {}
        receivers.setdefault(
            receiver, first if first == digest else digest
        )  # one object for all receivers of the same bytes

    def check_version(self, sender: int, receiver: int, t: int, digest: bytes) -> tuple[Detection, ...]:
        """Check the first content of a round that another process has seen, and checked otherwise."""
        message = CapturedMessage(sender, receiver, 0, sender, t, {}, digest, 0)
        is_other = self._versions.setdefault((sender, t), digest) != digest
        found = (self._create_contradiction(message, self._receivers.get((sender, t), {})),) if is_other else ()
        self.remember(sender, receiver, t, digest)
        return found

    def is_remembered(self, sender: int, t: int) -> bool:
        """Return whether a content of this round is remembered."""
        return (sender, t) in self._versions

    def list_remembered(self, learners: Container[int]) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield sender, receiver, round and digest of the remembered messages between these learners, the oldest first."""
        for (sender, t), receivers in self._receivers.items():
            if sender in learners:
                for receiver, content_digest in receivers.items():
                    if receiver in learners:
                        yield sender, receiver, t, content_digest

    def is_repeat(self, message: CapturedMessage) -> bool:
        """Return whether the receiver got these bytes of this round before, as after a reconnect."""
        return self._receivers.get((message.sender, message.round), {}).get(message.receiver) == message.digest

    def check_message(self, message: CapturedMessage) -> tuple[Detection, ...]:
        """Check a received message and return its violations."""
        detections = []
        if message.claimed_sender != message.sender:
            detections.append(
                self._create_detection(
                    "sender", message, f"states the sender {self.expected.get_display_name(message.claimed_sender)}"
                )
            )
        if message.size != (expected_bytes := self._expect_length(message)):
            detections.append(
                self._create_detection(
                    "length", message, f"{message.size} bytes; every other message has {expected_bytes}"
                )
            )
        if due := self._describe_due_round(message):
            text = f"wrong round: stream {message.stream} must continue with {due}"
            detections.append(self._create_detection("round", message, text))
        key = message.sender, message.round
        is_other = self._versions.setdefault(key, message.digest) != message.digest
        receivers = self._receivers.get(key, {})
        if is_other:
            detections.append(self._create_contradiction(message, receivers))
        if is_other or not receivers:  # otherwise these bytes are checked already
            detections += self._check_lattice(message)
        self.remember(message.sender, message.receiver, message.round, message.digest)
        return tuple(detections)

    def _expect_length(self, message: CapturedMessage) -> int:
        """Return the number of bytes that a message of this sender must have."""
        usual = self.expected.message_bytes
        if usual is None:
            usual = self._lengths.get(message.sender)
        if usual is None:
            self._lengths[message.sender] = usual = message.size
        return usual

    def _describe_due_round(self, message: CapturedMessage) -> str:
        """Describe the round that was due on this stream; return an empty text if it is this one, or not known."""
        place = message.sender, message.receiver, message.stream
        earliest = None if message.stream == 0 else self._next.get(place)
        if message.stream:
            self._next[place] = message.round + 1
        if earliest is None:
            return ""
        if self.expected.next_due_round is None:
            return "" if message.round >= earliest else f"round {earliest} or later"
        due = self.expected.next_due_round(message.sender, message.receiver, earliest)
        return "" if message.round == due else "no round" if due is None else f"round {due}"

    def _create_contradiction(self, message: CapturedMessage, receivers: Collection[int]) -> Detection:
        if message.receiver in receivers:
            return self._create_detection("changed-resend", message, "resent to the same neighbour with other bytes")
        others = ", ".join(map(self.expected.get_display_name, sorted(receivers)[:3]))
        return self._create_detection("equivocation", message, f"other bytes than {others} received")

    def _check_lattice(self, message: CapturedMessage) -> list[Detection]:
        detections = []
        for name, spacing in self.expected.lattice_spacings(message.sender, message.round).items():
            values = np.ravel(message.fields[name])
            off = np.flatnonzero(_is_off_lattice(values, spacing))
            if len(off):
                first = f"{name}[{off[0]}] = {float(values[off[0]])!r}"
                count = f"{len(off)} of {len(values)}" if len(off) > 1 else "one"
                text = f"{count} off the lattice of spacing {spacing:g}, {first}"
                detections.append(self._create_detection("lattice", message, text))
        return detections

    def _format_edge(self, sender: int, receiver: int) -> str:
        return f"{self.expected.get_display_name(sender)} to {self.expected.get_display_name(receiver)}"

    def _create_detection(self, kind: _Kind, message: CapturedMessage, description: str) -> Detection:
        text = f"{self._format_edge(message.sender, message.receiver)}, round {message.round}: {description}"
        return Detection(kind, message.sender, message.receiver, message.round, text)


def _is_off_lattice(values: FloatArray, spacing: float) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Return which values are not multiples of `spacing`, a power of two: exact, because dividing by it is exact.

    A value so large that float64 cannot resolve the spacing is always a multiple.
    """
    with np.errstate(over="ignore"):  # infinity counts as a multiple
        steps = values / spacing
    off: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = steps != np.rint(steps)
    return off
