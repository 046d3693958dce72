"""The state of a learner in a run, and the steps of a round. No network, no file, no clock.

A learner that lives and one whose log is replayed after a death take the same steps here, so both come to the same state, to the
last bit. A step is taken when it counts: a message when it is written down, a round when it is learned. What the log has of a
round is enough: the algorithm's state after saying exactly the logged message (`overheard`), then `listen` with the logged
messages and records. Where the state keeps noise that no message shows, the log has that, too, and the message is formed again.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from sottovoce_core.algorithms.interface import Algorithm, LocalMessages, Message, HiddenNoiseAlgorithm
from sottovoce_core.arrays import Batch, FloatArray, as_floats
from sottovoce_core.errors import DataError
from sottovoce_core.network.roster import Participation
from sottovoce_core.noise import NoiseRequest, NoiseSource
from sottovoce_core.running.participation import USED_ROUNDS_FIELD, update_offline_state, encode_used_rounds
from sottovoce_core.running.run import Run
from sottovoce_learner.budget import PrivacyFilter
from sottovoce_learner.ingest.intake import RecordQueue
from sottovoce_learner.peers.inbox import DecodedFrame
from sottovoce_learner.peers.outbox import Own
from sottovoce_learner.peers.plan import Plan
from sottovoce_learner.storage.snapshot import LearnerSnapshot
from sottovoce_learner.storage.wal import Entry, Kind, Reading, Said
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.signatures import digest
from sottovoce_wire.v1 import learner_pb2

_OTHER_VERSION_TEXT = "it was written by another version of Sottovoce or of the algorithm, with which alone this learner can go on"


# ---- noise that no message shows: written down with the message, and drawn from there after a death -------------------


def _hides_noise(algorithm: Algorithm[object]) -> bool:
    """Whether the messages of this run do not tell the state that said them."""
    return isinstance(algorithm, HiddenNoiseAlgorithm) and algorithm.has_hidden_noise


class Kept:
    """Passes the noise of one round on, and keeps it.

    Args:
        source: where it comes from.
    """

    def __init__(self, source: NoiseSource) -> None:
        self._source = source
        self._drawn: list[FloatArray] = []

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        noise = self._source(draw)
        self._drawn.append(noise)
        return noise

    @property
    def drawn(self) -> bytes:
        """All of it so far, in order."""
        return b"".join(noise.tobytes() for noise in self._drawn)


class _DrawnAgain:
    """The noise of one round, as it was drawn.

    Args:
        drawn: what was kept.

    Attributes:
        left: what is not yet drawn of it.
    """

    def __init__(self, drawn: bytes) -> None:
        self.left = as_floats(np.frombuffer(drawn))

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        """The next numbers.

        Raises:
            DataError: there are not so many.
        """
        count = math.prod(draw.shape)
        if count > len(self.left):
            left = len(self.left)
            raise DataError(
                f"a round needs {count} more numbers of noise, and its entry has {left}: another version wrote it"
            )
        noise, self.left = self.left[:count].reshape(draw.shape), self.left[count:]
        return noise


# ---- the steps of a round --------------------------------------------------------------------------------------------


class Memory:
    """A learner's part of a run, so far.

    Args:
        run: as it was built.
        plan: whom the learner hears and tells.
        attendance: the rounds in which it takes part.
        books: what it spends.
        intake: its records.
        state: of the algorithm, before round 0.
        keep: rounds whose messages a neighbour may lack.

    Attributes:
        codec: of its messages.
        names: what is no data in a state (`pack`).
        hidden: whether messages do not tell the state that said them.
        said: rounds that were said.
        done: rounds that were learned, too; one less than `said` until the run is over.
        inputs: of the round that was learned last, from which the next message is made.
        frames: what was said last, by round, as much of it as a neighbour may lack.
        own: the same, as signatures say it.
        messages: that were said, one for everybody who was told.
        correct, judged: records that were predicted before they were learned: those that it got right, and all.
    """

    def __init__(
        self, run: Run, plan: Plan, attendance: Participation, books: PrivacyFilter, intake: RecordQueue, state: Any, keep: int
    ) -> None:
        self.plan, self.attendance, self.books, self.intake, self.state = plan, attendance, books, intake, state
        self.algorithm, self.loss, self._clipping = run.algorithm, run.loss, run.clipping
        self._judges, self._late, self._used = run.spec.telemetry.accuracy, run.late, list[float]()
        self.codec, self.names = RoundCodec(run.field_shapes), LearnerSnapshot.names(run)
        self.hidden = _hides_noise(run.algorithm)
        self.said = self.done = 0
        self.inputs = Said(b"")
        self.frames: deque[tuple[int, bytes]] = deque(maxlen=keep)
        self.own = Own(keep)
        self.messages = self.correct = self.judged = 0

    @property
    def over(self) -> bool:
        """Were all rounds learned in which the learner takes part?"""
        return self.done >= self.attendance.end

    def remember(self, t: int, state: Any, frame: bytes, spent: float) -> None:
        """The message of round t is written down, whoever hears it.

        Args:
            t: the round.
            state: of the algorithm, having said it.
            frame: the message.
            spent: epsilon of the run from now on.
        """
        self.state = state
        self.books.charge(spent)
        self.frames.append((t, frame))
        told = self.plan.part(t).told
        self.own.said(t, digest(frame), told)
        self.messages += len(told)
        self.said = t + 1

    def form_message(self, t: int, message: Message, noise: Kept) -> Said:
        """The round's message as it goes out, and what it was made from.

        Raises:
            LocalProtocolError: it has a number that no neighbour would take.
        """
        if self._late:
            message = Message({**message.fields, USED_ROUNDS_FIELD: encode_used_rounds(self._used, *self.codec.shapes[USED_ROUNDS_FIELD])})
        self.codec.require_sendable(message)
        frame = self.codec.encode(t, self.plan.index, message)
        return self.inputs.before(frame, noise.drawn if self.hidden else b"")

    def taken_in(self, here: Mapping[int, DecodedFrame]) -> tuple[LocalMessages, Batch, Said]:
        """What the round that is due learns from: the neighbours' messages, its records, and both as they are written down."""
        t = self.done
        batch, used = self.intake.take(t), [here[j] for j in self.plan.heard(t)]
        if self._late:
            self._used = [float(each.round) for each in used]
        inputs = Said(b"", tuple(each.frame for each in used), self.intake.batches, batch.size)
        return self.hear({j: each.message for j, each in here.items()}, batch), batch, inputs

    def get_late_messages(self) -> dict[int, tuple[int, DecodedFrame]] | None:
        """What stands for a neighbour that is late; None: no round goes on without one."""
        if not self._late:
            return None
        decoded = ((frame, *self.codec.decode(frame)) for frame in self.inputs.heard)
        return {sender: (t, DecodedFrame(t, frame, message)) for frame, t, sender, message in decoded}

    def predict(self, features: FloatArray) -> tuple[FloatArray, FloatArray, int]:
        """Predictions of the model in use.

        Returns:
            scores, labels: `(records,)`.
            rounds: that the model has learned from.

        Raises:
            DataError: rows of another width.
        """
        if features.ndim != 2 or features.shape[1] != self.intake.n_features:
            raise DataError(f"features must be shaped (records, {self.intake.n_features}), got {features.shape}")
        scores = self.loss.predict(self.algorithm.decision(self.state), features)
        return scores, self.loss.classify(scores), self.done

    def hear(self, messages: Mapping[int, Message], batch: Batch) -> LocalMessages:
        """What the round takes in that is learned now: messages as they were said, or clipped; its records are judged before."""
        self._judge(batch)
        t, part = self.done, self.plan.part(self.done)
        used = {j: self._clipping.of(j, t, message) for j, message in messages.items()}
        return LocalMessages(part.heard, used, part.own)

    def learn(self, state: Any, inputs: Said) -> None:
        """The round is learned.

        Args:
            state: of the algorithm, having learned it.
            inputs: that it was learned from.
        """
        self.state, self.inputs = state, inputs
        self._pass(inputs.records)

    def skip_offline_rounds(self, until: int) -> None:
        """The rounds from here on in which the learner is away, but for those from `until` on.

        They are charged as if it spoke: a meter may follow the largest of several sums, of which none may be left out.
        """
        while self.done < until and self.done not in self.attendance and self.said <= self.done:
            nothing = self.intake.take(self.done)
            self.books.charge(self.books.price(self.done))
            self.state = update_offline_state(self.algorithm, self.state, nothing)
            self.inputs = Said(b"", (), self.intake.batches)
            self._pass(nothing.size)

    def _pass(self, records: int) -> None:
        self.books.advance(records)
        self.plan.forget(self.done)
        self.done += 1

    def _judge(self, batch: Batch) -> None:
        """Prequential accuracy: predict the records before learning them. Opt-in, because it depends on the data."""
        if not self._judges or batch.size == 0:
            return
        scores = self.loss.predict(self.algorithm.decision(self.state), batch.features)
        self.correct += int((self.loss.classify(scores) == batch.labels).sum())
        self.judged += batch.size

    def image(self) -> LearnerSnapshot:
        """What it is now, right after a round was said."""
        return LearnerSnapshot(
            self.state,
            self.books.spent,
            self.books.counts.tobytes(),
            self.intake.taken(),
            tuple(self.frames),
            (self.correct, self.judged),
            self.own.copy(),
            self.inputs.heard if self._late else (),
            self.messages,
        )

    def restore(self, image: LearnerSnapshot) -> None:
        """Stand where an image was made, before any step was taken.

        Raises:
            DataError: what it has spent is not what its rounds cost.
        """
        counts = array("I", image.counts)
        for t, records in enumerate(counts):
            self.books.charge(self.books.price(t))
            self.books.advance(records)
        self.books.charge(self.books.price(len(counts)))
        if self.books.spent != image.spent:
            raise DataError(
                f"a snapshot says that {len(counts) + 1} rounds have cost {image.spent:.6g}, and by its records they cost "
                f"{self.books.spent:.6g}: {_OTHER_VERSION_TEXT}"
            )
        if counts:
            self.plan.forget(len(counts) - 1)
        self.intake.restore(image.taken)
        self.own.restore(image.own)
        self.state, self.inputs = image.state, Said(b"", image.heard)
        self.frames.extend(image.frames)
        self.correct, self.judged = image.judged
        self.said, self.done = len(counts) + 1, len(counts)
        self.messages = image.messages

    # ---- after a death --------------------------------------------------------------------------------------

    def recover(self, reading: Reading) -> None:
        """Remember all that a log says, before any step was taken.

        Raises:
            DataError: the log was written by another version, or for another spec.
        """
        if (image := LearnerSnapshot.of(reading, self.names)) is not None:
            self.restore(image)
        for entry in reading.entries_after_snapshot:
            self.replay(entry)

    def replay(self, entry: Entry) -> None:
        """The next entry of a log.

        Raises:
            DataError: it does not follow from those before: the log was written by another version, or for another spec.
        """
        if entry.kind is Kind.BATCH:
            self.intake.replay(entry.round, learner_pb2.SampleBatch.FromString(entry.body))
        elif entry.kind in (Kind.ROUND, Kind.CLOSE):
            said = Said.decode(entry.body)
            self.skip_offline_rounds(entry.round)
            if entry.round > self.done:
                self._learn_again(entry, said)
            if entry.kind is Kind.ROUND:
                self._say_again(entry, said)

    def _say_again(self, entry: Entry, said: Said) -> None:
        """What was said is said: no noise is drawn, and the charge is the one that stands in the log."""
        t, _, message = self.codec.decode(said.frame)
        if t != entry.round or self.books.price(t) != entry.spent:
            raise _unlike(entry, f"round {entry.round} at epsilon {entry.spent:.6g}", f"round {t} at another price")
        if self.hidden:
            noise = _DrawnAgain(said.drawn)
            state, formed = self.algorithm.speak(self.state, noise)
            if len(noise.left) or any(
                each.tobytes() != message[name].tobytes() for name, each in formed.fields.items()
            ):
                raise _unlike(entry, "a message", "another one")
        else:
            state, _ = self.algorithm.overheard(self.state, message)
        self.remember(t, state, said.frame, entry.spent)

    def _learn_again(self, entry: Entry, said: Said) -> None:
        t, wanted = entry.round - 1, self.plan.heard(entry.round - 1)
        messages = {sender: message for _, sender, message in map(self.codec.decode, said.heard)}
        if t != self.done or messages.keys() != wanted.keys():
            raise _unlike(entry, f"messages of {sorted(messages)} in round {t}", f"of {sorted(wanted)} in {self.done}")
        batch = self.intake.take(t, said.records)
        if batch.size != said.records or self.intake.filled <= t:
            raise _unlike(entry, f"{said.records} records in round {t}", f"{batch.size}")
        self.learn(self.algorithm.listen(self.state, self.hear(messages, batch), batch), said.before(b""))


def _unlike(entry: Entry, wanted: str, got: str) -> DataError:
    return DataError(
        f"entry {entry.sequence} of the log says {wanted}, and by the entries before it would be {got}: {_OTHER_VERSION_TEXT}"
    )
