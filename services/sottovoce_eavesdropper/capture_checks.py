"""Online checks of a capture: runs `sottovoce_core.auditing.online_checks` on recorded rows, part by part, and stores detections.

It marks messages that were resent in the same bytes, as after a reconnect. It runs when parts are written, never while bytes are
passed on.

`Gaps` tracks the missing rounds of a run. A learner copies every round, and on a relayed channel rounds follow each other; so
rounds missing in between are a gap.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import structlog

from sottovoce_core.algorithms.interface import LatticeAlgorithm, Message
from sottovoce_core.auditing.http2_frames import find_violations
from sottovoce_core.auditing.online_checks import CapturedMessage, Detection, ExpectedTraffic, OnlineChecks
from sottovoce_core.auditing.traffic_features import DIGEST_BYTES, digest
from sottovoce_core.errors import RemoteProtocolError, SottovoceError
from sottovoce_core.network.network import Network
from sottovoce_core.network.participation_schedule import Participation
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.spec import parse_spec
from sottovoce_rpc.codec import RoundCodec, Shapes, from_fields, read_hello, to_fields
from sottovoce_rpc.signatures import SignedStatement
from sottovoce_wire.v1 import eavesdropper_pb2

log = structlog.get_logger()

_MAX_LOGGED_DETECTIONS, _MAX_STORED_DETECTIONS = 20, 100
_MAX_QUOTED_CHARS = 300
"""Maximum number of quoted characters of an untrusted message."""
_MAX_DECODED_MESSAGES = 64
EXCHANGE_METHODS = frozenset({"/sottovoce_wire.v1.Learner/Exchange", ""})
"""Methods whose messages are rounds; mirrored messages have an empty method."""


class CaptureRow(NamedTuple):
    """Row of a capture: a message, or a hello, a signature, metadata or trailers; or bytes that are in none of these.

    Attributes:
        caller, callee: the edge, from the learner that opens the stream to the one that accepts it.
        sender: learner that sent these bytes.
        direction: `out`, from caller to callee, or `back`.
        kind: `message`, `hello`, `signature` (of the sender's messages), `metadata` or `trailers`; `http2`, frames of a direction
            of a connection without the messages in them; `unfinished`, a message or a frame that has no end. In a wiretap
            capture `ciphertext`, or `opened` and `closed`: one side of a connection has nothing more to send.
        stream: number of the stream on its edge, from 1; 0 for a mirrored message, for frames, or if unknown.
        connection: number of the connection (the caller's address) on its edge, from 1; 0 if mirrored.
        method: gRPC method; empty if mirrored, or unknown.
        wall_ns, mono_ns: Unix time and monotonic time, in nanoseconds.
        size: bytes of the payload, or of the ciphertext.
        payload: the gRPC message as it crossed the channel, also a hello or a signature; metadata and trailers as JSON; frames as
            `GrpcDecoder.take_frames` has them; empty for a wiretap.
        is_repeat: the same bytes were sent on this edge before; set by the online checks.
    """

    caller: int
    callee: int
    sender: int
    direction: str
    kind: str
    stream: int
    connection: int
    method: str
    wall_ns: int
    mono_ns: int
    size: int
    payload: bytes
    is_repeat: bool = False


class RecordedRound(NamedTuple):
    """A message of a round that was recorded: its channel, its round, and the digest of its bytes."""

    sender: int
    receiver: int
    round: int
    digest: bytes


def encode_rounds(rounds: Sequence[RecordedRound]) -> eavesdropper_pb2.RecordedRounds:
    """Encode recorded rounds for another process."""
    senders, receivers, numbers, digests = zip(*rounds, strict=True) if rounds else ((), (), (), ())
    return eavesdropper_pb2.RecordedRounds(
        senders=senders, receivers=receivers, rounds=numbers, digests=b"".join(digests)
    )


def decode_rounds(rounds: eavesdropper_pb2.RecordedRounds) -> Iterator[RecordedRound]:
    """Yield the rounds that another process has recorded."""
    for k, ends in enumerate(zip(rounds.senders, rounds.receivers, rounds.rounds, strict=True)):
        yield RecordedRound(*ends, rounds.digests[DIGEST_BYTES * k : DIGEST_BYTES * (k + 1)])


def is_tapped(spec: Mapping[str, Any]) -> bool:
    """Return whether a spec asks for a wiretap, which records ciphertext only."""
    return spec.get("capture") == "wiretap"


class CaptureChecks:
    """Online checks of one capture, with their detections.

    Args:
        capture_id: id for the log.
        spec: run spec; empty if the capture is not of a run of ours, and nothing is checked.
        n_features: features of a record; 0 if unknown.
        fields: fields of a round in order, with their shapes.
        allow_imports: allow the spec to name code to import.

    Attributes:
        detection_count: number of detections.
        counts_by_kind: number of detections of each kind.
        first_detections: the first `_MAX_STORED_DETECTIONS` detections.
        contradiction: description of the first round sent with two contents; empty if there is none.
        unchecked_reason: what could not be checked, and why; None if everything is.
        is_logged: detections are logged.
        rounds: messages since they were taken, each with whether it is the first content of its round; None: they are not kept.
    """

    def __init__(
        self, capture_id: str, spec: Mapping[str, Any], n_features: int, fields: Shapes, *, allow_imports: bool
    ) -> None:
        self.detection_count = 0
        self.counts_by_kind = dict[str, int]()
        self.first_detections: list[Detection] = []
        self.contradiction = ""
        self.rounds: list[tuple[RecordedRound, bool]] | None = None
        self.is_logged = True
        self.unchecked_reason: str | None = None if spec else "anything: there is no run spec"
        if is_tapped(spec):
            spec, self.unchecked_reason = {}, "anything: a wiretap reads no messages"
        self._capture_id, self._spec = capture_id, spec
        self._n_features, self._imports = n_features, allow_imports
        self._codec, self._is_built = RoundCodec(fields), False
        self._checks = OnlineChecks(ExpectedTraffic(self._codec.message_bytes))
        self._decoded: dict[bytes, tuple[int, int, Message]] = {}

    def reconfigure(self, spec: Mapping[str, Any]) -> None:
        """Replace the run's spec."""
        if self._spec:
            self._spec, self._is_built = spec, False

    def check_rows(self, rows: Iterable[CaptureRow]) -> list[CaptureRow]:
        """Check rows in order; return them with repeats marked."""
        marked = []
        for row in rows:
            is_repeat, detections = False, tuple[Detection, ...]()
            try:
                if self._spec:
                    self._build_run()
                    is_repeat, detections = self._check_row(row)
            except Exception as error:  # noqa: BLE001 -- code that a spec names may raise anything, and recording must go on
                self._stop(error)
            marked.append(row._replace(is_repeat=True) if is_repeat else row)
            for detection in detections:
                self.record_detection(detection)
        return marked

    def _stop(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        log.error("online checks stopped", capture=self._capture_id, reason=reason)
        self._spec, self.unchecked_reason = {}, f"anything more: {reason}"

    def check_versions(self, rounds: Iterable[tuple[RecordedRound, bool]]) -> None:
        """Remember messages that a worker has checked; check those that were the first of their round there against others."""
        try:
            if self._spec:
                self._build_run()
        except Exception as error:  # noqa: BLE001 -- likewise
            self._stop(error)
        for each, is_first in rounds:
            if is_first:
                for detection in self._checks.check_version(*each):
                    self.record_detection(detection)
            else:
                self._checks.remember(*each)

    def remember_round(self, each: RecordedRound) -> None:
        """Remember a round that another process has recorded: it was checked then, but may be resent."""
        self._checks.remember(*each)

    def list_remembered(self, learners: Collection[int]) -> list[RecordedRound]:
        """Return the remembered rounds of an edge, the oldest first."""
        return [RecordedRound(*each) for each in self._checks.list_remembered(learners)]

    def build_metadata(self) -> dict[str, Any]:
        """Build the entries of `capture.json`."""
        return {
            "detection_count": self.detection_count,
            "detections": [asdict(detection) for detection in self.first_detections],
            "unchecked_reason": self.unchecked_reason,
        }

    def _build_run(self) -> None:
        """Build the run once, when the first row is checked, because it may take a while."""
        if self._is_built:
            return
        self._is_built = True
        try:
            run = build_run(parse_spec(self._spec, allow_imports=self._imports), self._n_features)
        except SottovoceError as error:
            self.unchecked_reason = f"the lattice and gaps between rounds: {error}"
        else:
            self._codec = RoundCodec(run.field_shapes)  # the same fields, unless the coordinator is faulty
            self._checks.expected = _build_expected_traffic(run)

    def _check_row(self, row: CaptureRow) -> tuple[bool, tuple[Detection, ...]]:
        """Return whether a row is a repeat, and what is wrong with it."""
        if row.kind == "http2" or (row.kind == "trailers" and row.direction == "out"):
            return False, self._check_framing(row)
        if row.method not in EXCHANGE_METHODS or row.kind not in ("hello", "message", "signature"):
            return False, ()
        checks = self._checks
        other = row.callee if row.sender == row.caller else row.caller
        content_digest = digest(row.payload)
        try:
            if row.kind == "hello":
                checks.open_stream(
                    sender=other, receiver=row.sender, stream=row.stream, t=self._read_first_missing_round(row)
                )
                return False, ()
            if row.kind == "signature":
                self._require_signature(row)
                return False, ()
            t, claimed, message = self._decoded.get(content_digest) or self._decode(row.payload, content_digest)
        except RemoteProtocolError as error:
            return False, checks.report_undecodable(row.sender, other, row.stream, str(error)[:_MAX_QUOTED_CHARS])
        if self.rounds is not None:
            is_first = not checks.is_remembered(row.sender, t)
            self.rounds.append((RecordedRound(row.sender, other, t, content_digest), is_first))
        found = CapturedMessage(row.sender, other, row.stream, claimed, t, message.fields, content_digest, row.size)
        return checks.is_repeat(found), checks.check_message(found)

    def _check_framing(self, row: CaptureRow) -> tuple[Detection, ...]:
        """Detect what gRPC's library never sends for a learner."""
        violations = ("trailers of a caller",) if row.kind == "trailers" else tuple(find_violations(row.payload))
        receiver = row.callee if row.sender == row.caller else row.caller
        return self._checks.report_framing(row.sender, receiver, violations)

    def _read_first_missing_round(self, row: CaptureRow) -> int:
        """Return the first round that the sender of a hello has not received."""
        hello = read_hello(row.payload)
        if hello.learner != row.sender or list(hello.fields) != to_fields(self._codec.shapes):
            raise RemoteProtocolError(
                f"greets as {self._checks.expected.get_display_name(hello.learner)}, with fields {from_fields(hello.fields)}"
            )
        return hello.next_round

    def _require_signature(self, row: CaptureRow) -> None:
        """Require a signature under the sender's index; it is verified only where the sender's authority is known."""
        statement = SignedStatement.decode("", row.payload).statement
        if statement.sender != row.sender:
            raise RemoteProtocolError(f"signs as {self._checks.expected.get_display_name(statement.sender)}")

    def _decode(self, payload: bytes, content_digest: bytes) -> tuple[int, int, Message]:
        """Decode, and cache for the other neighbours, to which the same bytes are sent a moment later."""
        found = self._codec.decode(payload)
        if len(self._decoded) >= _MAX_DECODED_MESSAGES:
            self._decoded.clear()
        self._decoded[content_digest] = found
        return found

    def record_detection(self, detection: Detection) -> None:
        """Count a detection, keep it if it is one of the first, and log it."""
        if detection.is_contradiction:
            self.contradiction = self.contradiction or detection.text
        self.count_detections(detection.kind, 1)
        if self.detection_count <= _MAX_STORED_DETECTIONS:
            self.first_detections.append(detection)
        if self.is_logged and self.detection_count <= _MAX_LOGGED_DETECTIONS:
            log.error(
                "protocol violation detected", capture=self._capture_id, kind=detection.kind, detail=detection.text
            )
        if self.is_logged and self.detection_count == _MAX_LOGGED_DETECTIONS:
            log.error("more detections are counted, not logged", capture=self._capture_id)

    def count_detections(self, kind: str, number: int) -> None:
        """Count detections of a kind."""
        self.detection_count += number
        self.counts_by_kind[kind] = self.counts_by_kind.get(kind, 0) + number

    def clear_detections(self) -> None:
        """Forget the detections so far."""
        self.detection_count, self.counts_by_kind, self.first_detections = 0, {}, []


def _build_expected_traffic(run: Run) -> ExpectedTraffic:
    """Return what is known of a run's messages before it starts."""
    algorithm, spec = run.algorithm, run.spec
    lattice_algorithm = algorithm if isinstance(algorithm, LatticeAlgorithm) else None

    def get_lattice(learner: int, t: int) -> Mapping[str, float]:
        if lattice_algorithm is None or learner >= spec.n_learners or t >= spec.rounds:
            return {}
        return lattice_algorithm.lattice_spacings(learner, t)

    def find_next_round(sender: int, receiver: int, t: int) -> int | None:
        return find_next_received_round(run.network, spec.rounds, sender, receiver, t)

    return ExpectedTraffic(RoundCodec(run.field_shapes).message_bytes, find_next_round, get_lattice, spec.names)


def find_next_received_round(network: Network, rounds: int, sender: int, receiver: int, t: int) -> int | None:
    """Return the first round from t on in which `receiver` receives from `sender`; None if there is none."""
    if max(sender, receiver) >= network.n_learners:
        return None
    last = min(rounds, t + network.horizon)
    return next((u for u in range(t, last) if network.mixing(u).neighbour_weights[receiver, sender]), None)


# ---- missing rounds --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _SenderProgress:
    """Recorded rounds of one sender: those below `next_round`, except for the missing ones."""

    next_round: int = 0
    missing: list[range] = field(default_factory=list)
    streams: int = 0
    is_broken: bool = False


ChannelKey = tuple[int, ...]
"""Key of a message sequence: (sender,) for copies, (sender, receiver) for a relayed channel."""


class Gaps:
    """Missing rounds in the capture of one run.

    Args:
        participations: rounds of the learners by index; learners without an entry take part in all.
    """

    def __init__(self, participations: Mapping[int, Participation] | None = None) -> None:
        self.participations = participations or {}
        self._senders: dict[ChannelKey, _SenderProgress] = {}

    def begin_stream(self, *sender: int) -> None:
        """Record that a stream of copies has begun."""
        own = self._senders.setdefault(sender, _SenderProgress())
        own.streams, own.is_broken = own.streams + 1, False

    def expect_sender(self, *sender: int) -> None:
        """Expect more copies of a learner that has sent some before: if none arrive, the end is missing."""
        self._senders.setdefault(sender, _SenderProgress(is_broken=True))

    def expect_learners(self, learners: int) -> None:
        """Expect copies of this number of learners: if one never began, all of its rounds are missing."""
        for learner in range(learners):
            participation = self.participations.get(learner)
            if (learner,) not in self._senders and (participation is None or participation.intervals):
                self.expect_sender(learner)

    def resume_channel(self, *channel: int, next_round: int, t: int | None) -> None:
        """Resume a channel at round t after rounds below `next_round` were recorded; t None: it was never resumed."""
        own = self._senders.setdefault(channel, _SenderProgress())
        own.next_round, own.is_broken = max(own.next_round, next_round), t is None
        if t is not None:
            self.record_round(*channel, t=t)

    def end_stream(self, *sender: int, is_complete: bool) -> None:
        """Record the end of a stream of copies, complete or broken."""
        own = self._senders[sender]
        own.streams -= 1
        own.is_broken = not is_complete and own.streams == 0

    def record_round(self, *channel: int, t: int) -> None:
        """Record a round, for the first time or again; ignored for a channel that is not tracked."""
        own = self._senders.get(channel)
        if own is None:
            return
        if t >= own.next_round:
            own.missing += self._find_missing(channel, range(own.next_round, t))
            own.next_round = t + 1
            return
        parts = ((range(each.start, t), range(t + 1, each.stop)) if t in each else (each,) for each in own.missing)
        own.missing = [part for pair in parts for part in pair if part]

    def _find_missing(self, channel: ChannelKey, rounds: range) -> list[range]:
        """Return the intervals of skipped rounds in which both ends take part."""
        parts = [rounds]
        for learner in channel:
            if (participation := self.participations.get(learner)) is not None:
                cuts = ((part, each) for part in parts for each in participation.intervals)
                parts = [range(max(part.start, each.start), min(part.stop, each.stop)) for part, each in cuts]
        return [part for part in parts if part]

    @property
    def has_pending_copies(self) -> bool:
        """Return whether a learner may send more copies: its stream is open, or broke."""
        return any(own.streams or own.is_broken for own in self._senders.values())

    @property
    def sender_count(self) -> int:
        """Number of learners that have begun to send copies."""
        return sum(len(channel) == 1 for channel in self._senders)

    @property
    def idle_learner_count(self) -> int:
        """Number of learners that take part in no round, and have nothing to copy."""
        return sum(not each.intervals for each in self.participations.values())

    @property
    def gap_count(self) -> int:
        """Number of missing intervals so far: rounds before and after each were recorded."""
        return sum(len(own.missing) for own in self._senders.values())

    def build_metadata(self) -> list[dict[str, Any]]:
        """Build the entry of `capture.json`: by sender (and receiver), rounds >= `from` and < `to`; `to` None: end unknown."""
        found: list[dict[str, Any]] = []
        for channel, own in sorted(self._senders.items()):
            ends = dict(zip(("sender", "receiver"), channel, strict=False))
            found += [{**ends, "from": each.start, "to": each.stop} for each in own.missing]
            if own.is_broken or own.streams:
                found.append({**ends, "from": own.next_round, "to": None})
        return found
