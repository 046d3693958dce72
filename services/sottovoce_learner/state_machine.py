"""State of a learner in a run, and the steps of a round. No network, file or clock.

A running learner and one whose log is replayed after a crash take the same steps here, so both reach the same state, bit
for bit. A step is taken when it counts: a message when it is logged, a round when it is learned. The log of a round is
sufficient: `replay` gives the algorithm's state after exactly the logged message, then `update` takes the logged messages
and records. Where the state keeps noise that no message reveals, the log has that noise, too, and the message is formed
again.
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


# ---- noise that no message reveals: logged with the message, and read back after a crash ------------------------------


def _hides_noise(algorithm: Algorithm[object]) -> bool:
    """Return whether the messages of this run do not determine the state after them."""
    return isinstance(algorithm, HiddenNoiseAlgorithm) and algorithm.has_hidden_noise


class NoiseRecorder:
    """Noise source that passes on the noise of one round and records it.

    Args:
        source: source of the noise.
    """

    def __init__(self, source: NoiseSource) -> None:
        self._source = source
        self._recorded: list[FloatArray] = []

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        noise = self._source(draw)
        self._recorded.append(noise)
        return noise

    @property
    def recorded_bytes(self) -> bytes:
        """All noise so far, in order."""
        return b"".join(noise.tobytes() for noise in self._recorded)


class _ReplayedNoise:
    """Recorded noise of one round.

    Args:
        recorded: recorded bytes.

    Attributes:
        left: noise not requested yet.
    """

    def __init__(self, recorded: bytes) -> None:
        self.left = as_floats(np.frombuffer(recorded))

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        """Return the next numbers.

        Raises:
            CorruptStateError: fewer numbers are left.
        """
        count = math.prod(draw.shape)
        if count > len(self.left):
            left = len(self.left)
            raise CorruptStateError(
                f"a round needs {count} more numbers of noise, got an entry with {left}: it was written by another version"
            )
        noise, self.left = self.left[:count].reshape(draw.shape), self.left[count:]
        return noise


# ---- the steps of a round --------------------------------------------------------------------------------------------


class LearnerStateMachine:
    """State of a learner in a run.

    Args:
        run: run built from the spec.
        plan: neighbours of the learner by round.
        participation: rounds in which it participates.
        privacy_filter: its epsilon.
        intake: its records.
        state: state of the algorithm before round 0.
        retained_rounds: number of rounds whose messages a neighbour may lack.

    Attributes:
        codec: codec of its messages.
        named_objects: objects that a snapshot stores by name (`pack`).
        has_hidden_noise: whether messages do not determine the state after them.
        rounds_committed: rounds whose message is logged.
        rounds_done: rounds that were learned; one less than `rounds_committed` until the run is over.
        inputs: inputs of the last learned round, from which the next message is formed.
        frames: last messages by round, as many as a neighbour may lack.
        sent_digests: digests of the same messages, for signatures.
        messages_sent: messages sent, one for each recipient.
        records_correct, records_judged: records predicted before they were learned: the correct ones, and all.
    """

    def __init__(
        self,
        run: Run,
        plan: NeighbourSchedule,
        participation: Participation,
        privacy_filter: PrivacyFilter,
        intake: RecordQueue,
        state: Any,
        retained_rounds: int,
    ) -> None:
        self.plan, self.learner_participation, self.privacy_filter, self.intake, self.state = (
            plan,
            participation,
            privacy_filter,
            intake,
            state,
        )
        self.algorithm, self.loss, self._clipping = run.algorithm, run.loss, run.clipping
        self._has_accuracy, self._has_bounded_staleness, self._used_rounds = (
            run.spec.telemetry.accuracy,
            run.has_bounded_staleness,
            list[float](),
        )
        self.codec, self.named_objects = RoundCodec(run.field_shapes), LearnerSnapshot.collect_named_objects(run)
        self.has_hidden_noise = _hides_noise(run.algorithm)
        self.rounds_committed = self.rounds_done = 0
        self.inputs = RoundPayload(b"")
        self.frames: deque[tuple[int, bytes]] = deque(maxlen=retained_rounds)
        self.sent_digests = SentDigests(retained_rounds)
        self.messages_sent = self.records_correct = self.records_judged = 0

    @property
    def is_finished(self) -> bool:
        """Return whether all rounds are learned in which the learner participates."""
        return self.rounds_done >= self.learner_participation.end

    def commit_message(self, t: int, state: Any, frame: bytes, spent: float) -> None:
        """Commit the message of round t, which is logged.

        Args:
            t: round.
            state: state of the algorithm after the message.
            frame: encoded message.
            spent: epsilon of the run from now on.
        """
        self.state = state
        self.privacy_filter.charge(spent)
        self.frames.append((t, frame))
        recipients = self.plan.get_round_part(t).out_neighbours
        self.sent_digests.add_round(t, compute_frame_digest(frame), recipients)
        self.messages_sent += len(recipients)
        self.rounds_committed = t + 1

    def form_message(self, t: int, message: Message, noise: NoiseRecorder) -> RoundPayload:
        """Encode the round's message, with the inputs it was formed from.

        Raises:
            LocalProtocolError: it has a number that neighbours would reject.
        """
        if self._has_bounded_staleness:
            message = Message(
                {
                    **message.fields,
                    USED_ROUNDS_FIELD: encode_used_rounds(self._used_rounds, *self.codec.shapes[USED_ROUNDS_FIELD]),
                }
            )
        self.codec.require_sendable(message)
        frame = self.codec.encode(t, self.plan.index, message)
        return self.inputs.with_message(frame, noise.recorded_bytes if self.has_hidden_noise else b"")

    def prepare_update(self, received: Mapping[int, DecodedFrame]) -> tuple[LocalMessages, Batch, RoundPayload]:
        """Return the inputs of the due round: the neighbours' messages, its records, and both as logged."""
        t = self.rounds_done
        batch, used = self.intake.take(t), [received[j] for j in self.plan.get_in_neighbours(t)]
        if self._has_bounded_staleness:
            self._used_rounds = [float(each.round) for each in used]
        inputs = RoundPayload(b"", tuple(each.frame for each in used), self.intake.batch_count, batch.size)
        return self.collect_messages({j: each.message for j, each in received.items()}, batch), batch, inputs

    def get_late_messages(self) -> dict[int, tuple[int, DecodedFrame]] | None:
        """Return the messages that may replace those of late neighbours; None: no bounded staleness."""
        if not self._has_bounded_staleness:
            return None
        decoded = ((frame, *self.codec.decode(frame)) for frame in self.inputs.received_frames)
        return {sender: (t, DecodedFrame(t, frame, message)) for frame, t, sender, message in decoded}

    def predict(self, features: FloatArray) -> tuple[FloatArray, FloatArray, int]:
        """Predict with the current model.

        Returns:
            scores, labels: `(records,)`.
            rounds: rounds that the model has learned from.

        Raises:
            DataError: rows of another width.
        """
        if features.ndim != 2 or features.shape[1] != self.intake.n_features:
            raise DataError(f"features must be shaped (records, {self.intake.n_features}), got {features.shape}")
        scores = self.loss.predict(self.algorithm.decision(self.state), features)
        return scores, self.loss.classify(scores), self.rounds_done

    def collect_messages(self, messages: Mapping[int, Message], batch: Batch) -> LocalMessages:
        """Return the messages of the round to be learned, clipped where the run clips; its records are judged before."""
        self._judge(batch)
        t, part = self.rounds_done, self.plan.get_round_part(self.rounds_done)
        used = {j: self._clipping.clip(j, t, message) for j, message in messages.items()}
        return LocalMessages(part.in_neighbours, used, part.own_weight)

    def commit_update(self, state: Any, inputs: RoundPayload) -> None:
        """Complete the round.

        Args:
            state: state of the algorithm after the round.
            inputs: inputs of the round.
        """
        self.state, self.inputs = state, inputs
        self._finish_round(inputs.records)

    def skip_offline_rounds(self, until: int) -> None:
        """Skip the rounds from here on in which the learner is offline, up to `until` exclusive.

        They are charged as if it sent messages: an accountant may follow the largest of several sums, and every term
        counts.
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
            self._finish_round(nothing.size)

    def _finish_round(self, records: int) -> None:
        self.privacy_filter.advance(records)
        self.plan.forget(self.rounds_done)
        self.rounds_done += 1

    def _judge(self, batch: Batch) -> None:
        """Update the prequential accuracy: predict records before learning them. Opt-in, because it depends on the data."""
        if not self._has_accuracy or batch.size == 0:
            return
        scores = self.loss.predict(self.algorithm.decision(self.state), batch.features)
        self.records_correct += int((self.loss.classify(scores) == batch.labels).sum())
        self.records_judged += batch.size

    def take_snapshot(self) -> LearnerSnapshot:
        """Return a snapshot, directly after a round was committed."""
        return LearnerSnapshot(
            self.state,
            self.privacy_filter.epsilon_spent,
            self.privacy_filter.record_counts.tobytes(),
            self.intake.get_state(),
            tuple(self.frames),
            (self.records_correct, self.records_judged),
            self.sent_digests.copy(),
            self.inputs.received_frames if self._has_bounded_staleness else (),
            self.messages_sent,
        )

    def restore(self, image: LearnerSnapshot) -> None:
        """Restore a snapshot, before any step was taken.

        Raises:
            CorruptStateError: the epsilon it spent does not follow from its rounds.
        """
        counts = array("I", image.record_counts)
        for t, records in enumerate(counts):
            self.privacy_filter.charge(self.privacy_filter.admit_round(t))
            self.privacy_filter.advance(records)
        self.privacy_filter.charge(self.privacy_filter.admit_round(len(counts)))
        if self.privacy_filter.epsilon_spent != image.epsilon_spent:
            raise CorruptStateError(
                f"a snapshot must charge for {len(counts) + 1} rounds what its records cost, got {image.epsilon_spent:.6g}, not "
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

    # ---- after a crash --------------------------------------------------------------------------------------

    def recover(self, reading: LogContents) -> None:
        """Replay all of a log, before any step was taken.

        Raises:
            CorruptStateError: the log was written by another version, or for another spec.
        """
        if (image := LearnerSnapshot.read_from_log(reading, self.named_objects)) is not None:
            self.restore(image)
        for entry in reading.entries_after_snapshot:
            self.replay_entry(entry)

    def replay_entry(self, entry: LogEntry) -> None:
        """Replay the next entry of a log.

        Raises:
            CorruptStateError: it does not follow from those before: the log was written by another version, or for
                another spec.
        """
        if entry.kind is EntryKind.BATCH:
            self.intake.replay(entry.round, learner_pb2.SampleBatch.FromString(entry.body))
        elif entry.kind in (EntryKind.ROUND, EntryKind.CLOSE):
            payload = RoundPayload.decode(entry.body)
            self.skip_offline_rounds(entry.round)
            if entry.round > self.rounds_done:
                self._replay_update(entry, payload)
            if entry.kind is EntryKind.ROUND:
                self._replay_message(entry, payload)

    def _replay_message(self, entry: LogEntry, payload: RoundPayload) -> None:
        """Commit a logged message: no noise is drawn, and the charge is the logged one."""
        t, _, message = self.codec.decode(payload.frame)
        if t != entry.round or self.privacy_filter.admit_round(t) != entry.epsilon_spent:
            raise _build_mismatch_error(
                entry, f"round {entry.round} at epsilon {entry.epsilon_spent:.6g}", f"round {t} at another epsilon"
            )
        if self.has_hidden_noise:
            noise = _ReplayedNoise(payload.hidden_noise)
            state, formed = self.algorithm.emit(self.state, noise)
            if len(noise.left) or any(
                each.tobytes() != message[name].tobytes() for name, each in formed.fields.items()
            ):
                raise _build_mismatch_error(entry, "a message", "another one")
        else:
            state, _ = self.algorithm.replay(self.state, message)
        self.commit_message(t, state, payload.frame, entry.epsilon_spent)

    def _replay_update(self, entry: LogEntry, payload: RoundPayload) -> None:
        t, expected = entry.round - 1, self.plan.get_in_neighbours(entry.round - 1)
        messages = {sender: message for _, sender, message in map(self.codec.decode, payload.received_frames)}
        if t != self.rounds_done or messages.keys() != expected.keys():
            raise _build_mismatch_error(
                entry, f"messages of {sorted(messages)} in round {t}", f"of {sorted(expected)} in {self.rounds_done}"
            )
        batch = self.intake.take(t, payload.records)
        if batch.size != payload.records or self.intake.filled_rounds <= t:
            raise _build_mismatch_error(entry, f"{payload.records} records in round {t}", f"{batch.size}")
        self.commit_update(
            self.algorithm.update(self.state, self.collect_messages(messages, batch), batch), payload.with_message(b"")
        )


def _build_mismatch_error(entry: LogEntry, expected: str, got: str) -> CorruptStateError:
    return CorruptStateError(
        f"entry {entry.sequence} of the log has {expected}, and by the entries before it must have {got}: {_OTHER_VERSION_TEXT}"
    )
