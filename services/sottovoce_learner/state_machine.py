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

from sottovoce_core.algorithms.interface import Algorithm, HiddenNoiseAlgorithm, LocalMessages, Message
from sottovoce_core.arrays import Batch, FloatArray, as_floats
from sottovoce_core.errors import CorruptStateError, DataError
from sottovoce_core.network.participation_schedule import Participation
from sottovoce_core.noise import NoiseRequest, NoiseSource
from sottovoce_core.runs.participation import USED_ROUNDS_FIELD, encode_used_rounds, update_offline_state
from sottovoce_core.runs.run import Run
from sottovoce_learner.ingest.record_queue import RecordQueue
from sottovoce_learner.peers.inbox import DecodedFrame
from sottovoce_learner.peers.neighbour_schedule import NeighbourSchedule
from sottovoce_learner.peers.outbox import SentDigests
from sottovoce_learner.privacy_filter import PrivacyFilter
from sottovoce_learner.storage.snapshot import LearnerSnapshot
from sottovoce_learner.storage.wal import EntryKind, LogContents, LogEntry, RoundPayload
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.signatures import compute_frame_digest
from sottovoce_wire.v1 import learner_pb2

_OTHER_VERSION_TEXT = (
    "it was written by another version of Sottovoce or of the algorithm, with which alone this learner can go on"
)


# ---- noise that no message shows: written down with the message, and drawn from there after a death -------------------


def _hides_noise(algorithm: Algorithm[object]) -> bool:
    """Whether the messages of this run do not tell the state that said them."""
    return isinstance(algorithm, HiddenNoiseAlgorithm) and algorithm.has_hidden_noise


class NoiseRecorder:
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
    def recorded_bytes(self) -> bytes:
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
            CorruptStateError: there are not so many.
        """
        count = math.prod(draw.shape)
        if count > len(self.left):
            left = len(self.left)
            raise CorruptStateError(
                f"a round needs {count} more numbers of noise, and its entry has {left}: another version wrote it"
            )
        noise, self.left = self.left[:count].reshape(draw.shape), self.left[count:]
        return noise


# ---- the steps of a round --------------------------------------------------------------------------------------------


class LearnerStateMachine:
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
        self,
        run: Run,
        plan: NeighbourSchedule,
        attendance: Participation,
        books: PrivacyFilter,
        intake: RecordQueue,
        state: Any,
        keep: int,
    ) -> None:
        self.plan, self.learner_participation, self.privacy_filter, self.intake, self.state = (
            plan,
            attendance,
            books,
            intake,
            state,
        )
        self.algorithm, self.loss, self._clipping = run.algorithm, run.loss, run.clipping
        self._judges, self._late, self._used = run.spec.telemetry.accuracy, run.has_bounded_staleness, list[float]()
        self.codec, self.named_objects = RoundCodec(run.field_shapes), LearnerSnapshot.collect_named_objects(run)
        self.has_hidden_noise = _hides_noise(run.algorithm)
        self.rounds_committed = self.rounds_done = 0
        self.inputs = RoundPayload(b"")
        self.frames: deque[tuple[int, bytes]] = deque(maxlen=keep)
        self.sent_digests = SentDigests(keep)
        self.messages_sent = self.records_correct = self.records_judged = 0

    @property
    def is_finished(self) -> bool:
        """Were all rounds learned in which the learner takes part?"""
        return self.rounds_done >= self.learner_participation.end

    def commit_message(self, t: int, state: Any, frame: bytes, spent: float) -> None:
        """The message of round t is written down, whoever hears it.

        Args:
            t: the round.
            state: of the algorithm, having said it.
            frame: the message.
            spent: epsilon of the run from now on.
        """
        self.state = state
        self.privacy_filter.charge(spent)
        self.frames.append((t, frame))
        told = self.plan.get_round_part(t).out_neighbours
        self.sent_digests.add_round(t, compute_frame_digest(frame), told)
        self.messages_sent += len(told)
        self.rounds_committed = t + 1

    def form_message(self, t: int, message: Message, noise: NoiseRecorder) -> RoundPayload:
        """The round's message as it goes out, and what it was made from.

        Raises:
            LocalProtocolError: it has a number that no neighbour would take.
        """
        if self._late:
            message = Message(
                {
                    **message.fields,
                    USED_ROUNDS_FIELD: encode_used_rounds(self._used, *self.codec.shapes[USED_ROUNDS_FIELD]),
                }
            )
        self.codec.require_sendable(message)
        frame = self.codec.encode(t, self.plan.index, message)
        return self.inputs.with_message(frame, noise.recorded_bytes if self.has_hidden_noise else b"")

    def prepare_update(self, here: Mapping[int, DecodedFrame]) -> tuple[LocalMessages, Batch, RoundPayload]:
        """What the round that is due learns from: the neighbours' messages, its records, and both as they are written down."""
        t = self.rounds_done
        batch, used = self.intake.take(t), [here[j] for j in self.plan.get_in_neighbours(t)]
        if self._late:
            self._used = [float(each.round) for each in used]
        inputs = RoundPayload(b"", tuple(each.frame for each in used), self.intake.batch_count, batch.size)
        return self.collect_messages({j: each.message for j, each in here.items()}, batch), batch, inputs

    def get_late_messages(self) -> dict[int, tuple[int, DecodedFrame]] | None:
        """What stands for a neighbour that is late; None: no round goes on without one."""
        if not self._late:
            return None
        decoded = ((frame, *self.codec.decode(frame)) for frame in self.inputs.received_frames)
        return {sender: (t, DecodedFrame(t, frame, message)) for frame, t, sender, message in decoded}

    def predict(self, features: FloatArray) -> tuple[FloatArray, FloatArray, int]:
        """Predictions of the model in use.

        Returns:
            scores, labels: `(records,)`.
            rounds: that the model has learned from.

        Raises:
            CorruptStateError: rows of another width.
        """
        if features.ndim != 2 or features.shape[1] != self.intake.n_features:
            raise DataError(f"features must be shaped (records, {self.intake.n_features}), got {features.shape}")
        scores = self.loss.predict(self.algorithm.decision(self.state), features)
        return scores, self.loss.classify(scores), self.rounds_done

    def collect_messages(self, messages: Mapping[int, Message], batch: Batch) -> LocalMessages:
        """What the round takes in that is learned now: messages as they were said, or clipped; its records are judged before."""
        self._judge(batch)
        t, part = self.rounds_done, self.plan.get_round_part(self.rounds_done)
        used = {j: self._clipping.clip(j, t, message) for j, message in messages.items()}
        return LocalMessages(part.in_neighbours, used, part.own_weight)

    def commit_update(self, state: Any, inputs: RoundPayload) -> None:
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
        while (
            self.rounds_done < until
            and self.rounds_done not in self.learner_participation
            and self.rounds_committed <= self.rounds_done
        ):
            nothing = self.intake.take(self.rounds_done)
            self.privacy_filter.charge(self.privacy_filter.admit_round(self.rounds_done))
            self.state = update_offline_state(self.algorithm, self.state, nothing)
            self.inputs = RoundPayload(b"", (), self.intake.batch_count)
            self._pass(nothing.size)

    def _pass(self, records: int) -> None:
        self.privacy_filter.advance(records)
        self.plan.forget(self.rounds_done)
        self.rounds_done += 1

    def _judge(self, batch: Batch) -> None:
        """Prequential accuracy: predict the records before learning them. Opt-in, because it depends on the data."""
        if not self._judges or batch.size == 0:
            return
        scores = self.loss.predict(self.algorithm.decision(self.state), batch.features)
        self.records_correct += int((self.loss.classify(scores) == batch.labels).sum())
        self.records_judged += batch.size

    def take_snapshot(self) -> LearnerSnapshot:
        """What it is now, right after a round was said."""
        return LearnerSnapshot(
            self.state,
            self.privacy_filter.epsilon_spent,
            self.privacy_filter.record_counts.tobytes(),
            self.intake.get_state(),
            tuple(self.frames),
            (self.records_correct, self.records_judged),
            self.sent_digests.copy(),
            self.inputs.received_frames if self._late else (),
            self.messages_sent,
        )

    def restore(self, image: LearnerSnapshot) -> None:
        """Stand where an image was made, before any step was taken.

        Raises:
            CorruptStateError: what it has spent is not what its rounds cost.
        """
        counts = array("I", image.record_counts)
        for t, records in enumerate(counts):
            self.privacy_filter.charge(self.privacy_filter.admit_round(t))
            self.privacy_filter.advance(records)
        self.privacy_filter.charge(self.privacy_filter.admit_round(len(counts)))
        if self.privacy_filter.epsilon_spent != image.epsilon_spent:
            raise CorruptStateError(
                f"a snapshot says that {len(counts) + 1} rounds have cost {image.epsilon_spent:.6g}, and by its records they cost "
                f"{self.privacy_filter.epsilon_spent:.6g}: {_OTHER_VERSION_TEXT}"
            )
        if counts:
            self.plan.forget(len(counts) - 1)
        self.intake.restore(image.intake_state)
        self.sent_digests.restore(image.sent_digests)
        self.state, self.inputs = image.state, RoundPayload(b"", image.received_frames)
        self.frames.extend(image.frames)
        self.records_correct, self.records_judged = image.accuracy_counts
        self.rounds_committed, self.rounds_done = len(counts) + 1, len(counts)
        self.messages_sent = image.messages_sent

    # ---- after a death --------------------------------------------------------------------------------------

    def recover(self, reading: LogContents) -> None:
        """Remember all that a log says, before any step was taken.

        Raises:
            CorruptStateError: the log was written by another version, or for another spec.
        """
        if (image := LearnerSnapshot.read_from_log(reading, self.named_objects)) is not None:
            self.restore(image)
        for entry in reading.entries_after_snapshot:
            self.replay_entry(entry)

    def replay_entry(self, entry: LogEntry) -> None:
        """The next entry of a log.

        Raises:
            CorruptStateError: it does not follow from those before: the log was written by another version, or for another spec.
        """
        if entry.kind is EntryKind.BATCH:
            self.intake.replay(entry.round, learner_pb2.SampleBatch.FromString(entry.body))
        elif entry.kind in (EntryKind.ROUND, EntryKind.CLOSE):
            said = RoundPayload.decode(entry.body)
            self.skip_offline_rounds(entry.round)
            if entry.round > self.rounds_done:
                self._learn_again(entry, said)
            if entry.kind is EntryKind.ROUND:
                self._say_again(entry, said)

    def _say_again(self, entry: LogEntry, said: RoundPayload) -> None:
        """What was said is said: no noise is drawn, and the charge is the one that stands in the log."""
        t, _, message = self.codec.decode(said.frame)
        if t != entry.round or self.privacy_filter.admit_round(t) != entry.epsilon_spent:
            raise _unlike(
                entry, f"round {entry.round} at epsilon {entry.epsilon_spent:.6g}", f"round {t} at another price"
            )
        if self.has_hidden_noise:
            noise = _DrawnAgain(said.hidden_noise)
            state, formed = self.algorithm.emit(self.state, noise)
            if len(noise.left) or any(
                each.tobytes() != message[name].tobytes() for name, each in formed.fields.items()
            ):
                raise _unlike(entry, "a message", "another one")
        else:
            state, _ = self.algorithm.replay(self.state, message)
        self.commit_message(t, state, said.frame, entry.epsilon_spent)

    def _learn_again(self, entry: LogEntry, said: RoundPayload) -> None:
        t, wanted = entry.round - 1, self.plan.get_in_neighbours(entry.round - 1)
        messages = {sender: message for _, sender, message in map(self.codec.decode, said.received_frames)}
        if t != self.rounds_done or messages.keys() != wanted.keys():
            raise _unlike(
                entry, f"messages of {sorted(messages)} in round {t}", f"of {sorted(wanted)} in {self.rounds_done}"
            )
        batch = self.intake.take(t, said.records)
        if batch.size != said.records or self.intake.filled_rounds <= t:
            raise _unlike(entry, f"{said.records} records in round {t}", f"{batch.size}")
        self.commit_update(
            self.algorithm.update(self.state, self.collect_messages(messages, batch), batch), said.with_message(b"")
        )


def _unlike(entry: LogEntry, wanted: str, got: str) -> CorruptStateError:
    return CorruptStateError(
        f"entry {entry.sequence} of the log says {wanted}, and by the entries before it would be {got}: {_OTHER_VERSION_TEXT}"
    )
