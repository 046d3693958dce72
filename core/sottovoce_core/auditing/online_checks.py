"""Noticing at once what must never happen on a channel, message by message, while a run goes on.

The rules, all of which hold with certainty for learners that do what they say, whatever their data and their noise:

- `decoding`: a message is one of this run's, in its one encoding, with finite numbers; so is the hello before it.
- `impostor`: a learner speaks as itself.
- `length`: every message has the same number of bytes; where the run's fields are known, `decoding` says so.
- `turn`: a stream carries the rounds in which its receiver hears its sender, each once, in order; it begins with the first
  one that the receiver said it lacked.
- `again`: a round said once more, after a reconnect, is the same bytes: fresh noise on one state would average out.
- `equivocation`: every neighbour hears the same bytes.
- `lattice`: noise and what it hides are multiples of one power of two, and so is what is said (`algorithms.interface.LatticeAlgorithm`).

What holds with high probability only, such as the law of the noise, is for `conformance`, after the run. Memory is bounded: of
the messages longest ago nothing is known any more, and nothing that they contradict is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sottovoce_core.arrays import FloatArray
from sottovoce_core.runs.transcript import MAX_REMEMBERED_MESSAGES, BoundedDict
from sottovoce_core.text import format_learner_name

_Kind = Literal["decoding", "impostor", "length", "turn", "again", "equivocation", "lattice"]


@dataclass(frozen=True, slots=True)
class Detection:
    """Something that must never happen.

    Attributes:
        kind: which rule is broken.
        sender, receiver: whose message, and who got it.
        round: that it says it is for; None where it cannot be decoded.
        text: one line, for people.
    """

    kind: _Kind
    sender: int
    receiver: int
    round: int | None
    text: str

    @property
    def is_contradiction(self) -> bool:
        """Two contents of one round were sent, whose difference no noise hides."""
        return self.kind in ("again", "equivocation")


@dataclass(frozen=True, slots=True)
class CapturedMessage:
    """A message as it was overheard.

    Attributes:
        sender, receiver: by the channel it came on.
        stream: number of the stream on that channel; 0: none, the order is not known.
        claimed: who the message says is speaking.
        round: that it says it is for.
        fields: the numbers in it.
        digest: of its bytes.
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
    """What is known of a run before it begins; the defaults are for one of which nothing is.

    Attributes:
        length: bytes of a message; None: as the first one of its sender.
        due: (sender, receiver, t) to the first round from t on in which the receiver hears the sender, None for no more;
            where it is not known, rounds must increase.
        lattice: (learner, round) to the spacing of each field that is on a lattice.
        names: of the learners, by index; those that are not known are told by their index.
    """

    message_bytes: int | None = None
    next_due_round: Callable[[int, int, int], int | None] | None = None
    lattice_spacings: Callable[[int, int], Mapping[str, float]] = lambda learner, t: {}
    names: Sequence[str] = ()

    def get_display_name(self, learner: int) -> str:
        """A learner's name."""
        return format_learner_name(self.names, learner)


class OnlineChecks:
    """All channels of a run.

    Args:
        expected: what is known beforehand; it may be told later.
        kept: rounds of a learner, and streams, that are remembered.
    """

    def __init__(self, expected: ExpectedTraffic, max_kept: int = MAX_REMEMBERED_MESSAGES) -> None:
        self.expected = expected
        self._versions: BoundedDict[tuple[int, int], bytes] = BoundedDict(max_kept)
        self._receivers: BoundedDict[tuple[int, int], dict[int, bytes]] = BoundedDict(
            max_kept
        )  # and what each of them heard first
        self._next: BoundedDict[tuple[int, int, int], int] = BoundedDict(max_kept)
        self._lengths: BoundedDict[int, int] = BoundedDict(max_kept)

    def open_stream(self, sender: int, receiver: int, stream: int, t: int) -> None:
        """A stream was opened on which the receiver lacks the rounds from t on."""
        self._next[sender, receiver, stream] = t

    def report_undecodable(self, sender: int, receiver: int, stream: int, why: str) -> tuple[Detection, ...]:
        """A message came that cannot be decoded."""
        self._next.pop((sender, receiver, stream), None)  # it may have been any round
        return (Detection("decoding", sender, receiver, None, f"{self._way(sender, receiver)}: {why}"),)

    def remember(self, sender: int, receiver: int, t: int, digest: bytes) -> None:
        """A message was heard; it is known from now on."""
        key = sender, t
        first = self._versions.setdefault(key, digest)
        receivers = self._receivers.get(key)
        if receivers is None:
            receivers = self._receivers[key] = {}
        receivers.setdefault(receiver, first if first == digest else digest)  # one object for all who heard the same

    def is_repeat(self, said: CapturedMessage) -> bool:
        """True when its receiver heard these bytes of this round before, as it does after a reconnect."""
        return self._receivers.get((said.sender, said.round), {}).get(said.receiver) == said.digest

    def check_message(self, said: CapturedMessage) -> tuple[Detection, ...]:
        """A message came; what is wrong with it."""
        found = []
        if said.claimed_sender != said.sender:
            found.append(
                self._finding("impostor", said, f"speaks as {self.expected.get_display_name(said.claimed_sender)}")
            )
        if said.size != (usual := self._length(said)):
            found.append(self._finding("length", said, f"{said.size} bytes; all others have {usual}"))
        if wanted := self._wanted(said):
            text = f"out of turn: stream {said.stream} must go on with {wanted}"
            found.append(self._finding("turn", said, text))
        key = said.sender, said.round
        other = self._versions.setdefault(key, said.digest) != said.digest
        receivers = self._receivers.get(key, {})
        if other:
            found.append(self._contradiction(said, receivers))
        if other or not receivers:  # else these bytes have been looked at
            found += self._lattice(said)
        self.remember(said.sender, said.receiver, said.round, said.digest)
        return tuple(found)

    def _length(self, said: CapturedMessage) -> int:
        """Bytes that a message of this sender has."""
        usual = self.expected.message_bytes
        if usual is None:
            usual = self._lengths.get(said.sender)
        if usual is None:
            self._lengths[said.sender] = usual = said.size
        return usual

    def _wanted(self, said: CapturedMessage) -> str:
        """The round that had to come on this stream, in words; empty: this one, or nobody knows."""
        place = said.sender, said.receiver, said.stream
        earliest = None if said.stream == 0 else self._next.get(place)
        if said.stream:
            self._next[place] = said.round + 1
        if earliest is None:
            return ""
        if self.expected.next_due_round is None:
            return "" if said.round >= earliest else f"round {earliest} or later"
        due = self.expected.next_due_round(said.sender, said.receiver, earliest)
        return "" if said.round == due else "no round" if due is None else f"round {due}"

    def _contradiction(self, said: CapturedMessage, receivers: Collection[int]) -> Detection:
        if said.receiver in receivers:
            return self._finding("again", said, "said once more to the same neighbour, in other bytes")
        others = ", ".join(map(self.expected.get_display_name, sorted(receivers)[:3]))
        return self._finding("equivocation", said, f"other bytes than {others} heard")

    def _lattice(self, said: CapturedMessage) -> list[Detection]:
        found = []
        for name, spacing in self.expected.lattice_spacings(said.sender, said.round).items():
            values = np.ravel(said.fields[name])
            off = np.flatnonzero(_off_lattice(values, spacing))
            if len(off):
                first = f"{name}[{off[0]}] = {float(values[off[0]])!r}"
                count = f"{len(off)} of {len(values)}" if len(off) > 1 else "one"
                text = f"{count} off the lattice of spacing {spacing:g}, {first}"
                found.append(self._finding("lattice", said, text))
        return found

    def _way(self, sender: int, receiver: int) -> str:
        return f"{self.expected.get_display_name(sender)} to {self.expected.get_display_name(receiver)}"

    def _finding(self, kind: _Kind, said: CapturedMessage, what: str) -> Detection:
        text = f"{self._way(said.sender, said.receiver)}, round {said.round}: {what}"
        return Detection(kind, said.sender, said.receiver, said.round, text)


def _off_lattice(values: FloatArray, spacing: float) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Which values are no multiple of `spacing`, a power of two: exact, as dividing by it is.

    A value so large that float64 has no room for less than the spacing is always a multiple.
    """
    with np.errstate(over="ignore"):  # infinity: as large as that
        steps = values / spacing
    off: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = steps != np.rint(steps)
    return off
