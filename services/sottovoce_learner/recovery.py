"""Recovery: the state of a learner that died, from its log. No file, no clock.

Its state is a function of what it said, heard and learned, all of which its log has: the algorithm's state after saying exactly
the logged message (`overheard`), then `listen` with the logged messages and records, round by round. Where the state keeps noise
that no message shows, the log has that, too, and the message is formed again. So that a log need not be kept whole, it goes on
from an image of the learner right after some round was said.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sottovoce.algorithms.interface import Algorithm, HeardFromNeighbours, Message
from sottovoce.arrays import Batch
from sottovoce.errors import DataError
from sottovoce.network.roster import Attendance
from sottovoce.running.away import go_on_alone
from sottovoce.running.clipping import Clipping
from sottovoce_learner.bodies import Said
from sottovoce_learner.books import Books
from sottovoce_learner.entries import Entry, Kind
from sottovoce_learner.hidden import DrawnAgain, hides_noise
from sottovoce_learner.intake import Intake
from sottovoce_learner.plan import Plan
from sottovoce_learner.signing import Own
from sottovoce_learner.snapshots import Image
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.signatures import digest
from sottovoce_wire.v1 import learner_pb2


@dataclass(slots=True)
class Recovery:
    """A learner as its log has it, so far.

    Attributes:
        algorithm, codec, plan: of the run.
        attendance: the rounds in which the learner takes part.
        books, intake: brought to where they were.
        state: of the algorithm.
        own: brought to where it was.
        about_to_learn: told every batch before it is learned.
        frames: what was said last, by round, as much of it as a neighbour may lack.
        heard: the messages that were used last, as they came.
        said: rounds that were said.
        done: rounds that were learned, too; one less than `said` until the run is over.
        clipping: of the run.
    """

    algorithm: Algorithm[Any]
    codec: RoundCodec
    plan: Plan
    attendance: Attendance
    books: Books
    intake: Intake
    state: Any
    own: Own
    about_to_learn: Callable[[Any, Batch], None]
    frames: deque[tuple[int, bytes]] = field(default_factory=deque)
    heard: tuple[bytes, ...] = ()
    said: int = 0
    done: int = 0
    clipping: Clipping = field(default_factory=Clipping)

    def restore(self, image: Image) -> None:
        """Stand where an image was made, before any entry was taken.

        Raises:
            DataError: what it has spent is not what its rounds cost.
        """
        counts = array("I", image.counts)
        for t, records in enumerate(counts):
            self.books.charge(self.books.price(t))
            self.books.round_over(records)
        self.books.charge(self.books.price(len(counts)))
        if self.books.spent != image.spent:
            raise DataError(
                f"a snapshot says that {len(counts) + 1} rounds have cost {image.spent:.6g}, and by its records they cost "
                f"{self.books.spent:.6g}: {_ANOTHER}"
            )
        if counts:
            self.plan.forget(len(counts) - 1)
        self.intake.restore(image.taken)
        self.state, self.frames = image.state, deque(image.frames, self.frames.maxlen)
        self.heard = image.heard
        self.own.restore(image.vouched)
        self.said, self.done = len(counts) + 1, len(counts)

    def take(self, entry: Entry) -> None:
        """The next entry of the log.

        Raises:
            DataError: it does not follow from those before: the log was written by another version, or for another spec.
        """
        if entry.kind is Kind.BATCH:
            self.intake.replay(entry.round, learner_pb2.SampleBatch.FromString(entry.body))
        elif entry.kind in (Kind.ROUND, Kind.CLOSE):
            said = Said.decode(entry.body)
            self.pass_absence(entry.round)
            if entry.round > self.done:
                self._learn(entry, said)
            if entry.kind is Kind.ROUND:
                self._say(entry, said)

    def pass_absence(self, until: int) -> None:
        """The rounds in which the learner is away, from where it stands, but for those from `until` on."""
        while self.done < until and self.done not in self.attendance and self.said <= self.done:
            self.state = away_for_a_round(self.algorithm, self.state, self.plan, self.books, self.intake, self.done)
            self.done += 1

    def _say(self, entry: Entry, said: Said) -> None:
        """What was said is said: no noise is drawn, and the charge is the one that stands in the log."""
        t, _, message = self.codec.decode(said.frame)
        if t != entry.round or self.books.price(t) != entry.spent:
            raise _unlike(entry, f"round {entry.round} at epsilon {entry.spent:.6g}", f"round {t} at another price")
        self.books.charge(entry.spent)
        self.state = self._having_said(entry, message, said.drawn)
        self.frames.append((t, said.frame))
        self.own.said(t, digest(said.frame), self.plan.part(t).told)
        self.said = t + 1

    def _having_said(self, entry: Entry, message: Message, drawn: bytes) -> Any:
        if not hides_noise(self.algorithm):
            return self.algorithm.overheard(self.state, message)[0]
        noise = DrawnAgain(drawn)
        state, formed = self.algorithm.speak(self.state, noise)
        if len(noise.left) or any(value.tobytes() != message[name].tobytes() for name, value in formed.fields.items()):
            raise _unlike(entry, "a message", "another one")
        return state

    def _learn(self, entry: Entry, said: Said) -> None:
        t, part = entry.round - 1, self.plan.part(entry.round - 1)
        messages = {sender: message for _, sender, message in map(self.codec.decode, said.heard)}
        if t != self.done or messages.keys() != part.heard.keys():
            raise _unlike(
                entry, f"messages of {sorted(messages)} in round {t}", f"of {sorted(part.heard)} in {self.done}"
            )
        batch = self.intake.take(t, said.records)
        if batch.size != said.records or self.intake.filled <= t:
            raise _unlike(entry, f"{said.records} records in round {t}", f"{batch.size}")
        self.about_to_learn(self.state, batch)
        used = {j: self.clipping.of(j, t, message) for j, message in messages.items()}
        self.state = self.algorithm.listen(self.state, HeardFromNeighbours(part.heard, used, part.own), batch)
        self.books.round_over(batch.size)
        self.plan.forget(t)
        self.done, self.heard = t + 1, said.heard


def away_for_a_round(algorithm: Algorithm[Any], state: Any, plan: Plan, books: Books, intake: Intake, t: int) -> Any:
    """The state after a round in which the learner is away.

    The round is charged as if it spoke: a meter may follow the largest of several sums, of which none may be left out.

    Args:
        algorithm, plan: of the run.
        state: before the round.
        books, intake: of the learner, brought behind the round.
        t: the round.
    """
    nothing = intake.take(t)
    books.charge(books.price(t))
    books.round_over(nothing.size)
    plan.forget(t)
    return go_on_alone(algorithm, state, nothing)


_ANOTHER = "it was written by another version of Sottovoce or of the algorithm, with which alone this learner can go on"


def _unlike(entry: Entry, wanted: str, got: str) -> DataError:
    return DataError(
        f"entry {entry.sequence} of the log says {wanted}, and by the entries before it would be {got}: {_ANOTHER}"
    )
