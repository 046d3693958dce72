"""The lookout: shows what is recorded, part by part, to `sottovoce_core.auditing.online_checks`, and keeps what that finds.

It marks what was said again in the same bytes, as after a reconnect. It runs where parts are written, never where bytes are
passed on.

`Gaps` names the rounds of a run that did not come. A learner copies every round, and on a channel that is relayed rounds
follow each other; so what is missing in between is a gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import structlog

from sottovoce_core.algorithms.interface import LatticeAlgorithm, Message
from sottovoce_core.auditing.online_checks import CapturedMessage, Detection, ExpectedTraffic, OnlineChecks
from sottovoce_core.auditing.traffic_features import digest
from sottovoce_core.errors import RemoteProtocolError, SottovoceError
from sottovoce_core.network.network import Network
from sottovoce_core.network.participation_schedule import Participation
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.spec import parse_spec
from sottovoce_rpc.codec import RoundCodec, Shapes, from_fields, read_hello, to_fields
from sottovoce_rpc.signatures import SignedStatement

log = structlog.get_logger()

_MAX_LOGGED_DETECTIONS, _MAX_STORED_DETECTIONS = 20, 100
_MAX_QUOTED_CHARS = 300
"""Characters of what a stranger's message is quoted with."""
_MAX_DECODED_MESSAGES = 64
EXCHANGE_METHODS = frozenset({"/sottovoce_wire.v1.Learner/Exchange", ""})
"""The methods whose messages are rounds; mirrored messages have none."""


class CaptureRow(NamedTuple):
    """One record of a channel: a message, or a hello, a signature, metadata or trailers.

    Attributes:
        caller, callee: the edge, from the learner that opens the stream to the one that accepts it.
        sender: whose bytes these are.
        direction: `out`, from caller to callee, or `back`.
        kind: `message`, `hello`, `signature` (of what its sender has said), `metadata` or `trailers`; of a wiretap `ciphertext`,
            or `opened` and `closed`: one side of a connection has nothing more to send.
        stream: counts the streams of an edge from 1; 0 where a learner mirrored the message, or it is not known.
        connection: counts the connections of an edge (its callers' addresses) from 1; 0 where mirrored.
        method: the gRPC method; empty where mirrored, or not known.
        wall_ns, mono_ns: Unix time and monotonic time, in nanoseconds.
        size: of the payload, or of the ciphertext, in bytes.
        payload: the gRPC message as it crossed the channel, a hello or a signature too; metadata and trailers as JSON; of a
            wiretap empty.
        again: whether it was said before, on this edge and in the same bytes; the lookout knows.
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


def is_tapped(spec: Mapping[str, Any]) -> bool:
    """Whether a run's channels are tapped, by its spec: all that is noted of them is ciphertext."""
    return spec.get("capture") == "wiretap"


class CaptureChecks:
    """What was noticed in one capture.

    Args:
        capture_id: for the log.
        spec: the run spec; empty where the capture is of no run of ours, and nothing is looked at.
        n_features: of a record; 0 where nobody said.
        fields: of a round, in their order, and their shapes.
        allow_imports: whether the spec may name code to import.

    Attributes:
        count: of findings.
        kinds: of them, by kind.
        first: the first `_MAX_STORED_DETECTIONS` of them.
        contradiction: the first round that was sent with two contents, in words; empty: none was.
        not_checked: what could not be looked for, and why; None: all was.
    """

    def __init__(
        self, capture_id: str, spec: Mapping[str, Any], n_features: int, fields: Shapes, *, allow_imports: bool
    ) -> None:
        self.detection_count = 0
        self.counts_by_kind = dict[str, int]()
        self.first_detections: list[Detection] = []
        self.contradiction = ""
        self.unchecked_reason: str | None = None if spec else "anything: there is no run spec"
        if is_tapped(spec):
            spec, self.unchecked_reason = {}, "anything: a wiretap reads no messages"
        self._capture_id, self._spec = capture_id, spec
        self._n_features, self._imports = n_features, allow_imports
        self._codec, self._begun = RoundCodec(fields), False
        self._noticing = OnlineChecks(ExpectedTraffic(self._codec.message_bytes))
        self._decoded: dict[bytes, tuple[int, int, Message]] = {}

    def reconfigure(self, spec: Mapping[str, Any]) -> None:
        """The run has another spec from now on."""
        if self._spec:
            self._spec, self._begun = spec, False

    def check_rows(self, rows: Iterable[CaptureRow]) -> list[CaptureRow]:
        """Look at records, in their order; returns them, marked where they were said again."""
        marked = []
        for row in rows:
            again, findings = False, tuple[Detection, ...]()
            try:
                if self._spec:
                    self._begin()
                    again, findings = self._at(row)
            except Exception as error:  # noqa: BLE001 -- code that a spec names may raise anything, and recording must go on
                reason = f"{type(error).__name__}: {error}"
                log.error("nothing more is noticed", capture=self._capture_id, reason=reason)
                self._spec, self.unchecked_reason = {}, f"anything more: {reason}"
            marked.append(row._replace(is_repeat=True) if again else row)
            for finding in findings:
                self._note(finding)
        return marked

    def remember_round(self, sender: int, receiver: int, t: int, payload: bytes) -> None:
        """A round that an eavesdropper before this one recorded: it was looked at then, but may be said again."""
        self._noticing.remember(sender, receiver, t, digest(payload))

    def build_metadata(self) -> dict[str, Any]:
        """For `capture.json`."""
        noticed = [asdict(finding) for finding in self.first_detections]
        return {"noticed_count": self.detection_count, "noticed": noticed, "not_checked": self.unchecked_reason}

    def _begin(self) -> None:
        """Build the run, once and as late as here: it may take a while."""
        if self._begun:
            return
        self._begun = True
        try:
            run = build_run(parse_spec(self._spec, allow_imports=self._imports), self._n_features)
        except SottovoceError as error:
            self.unchecked_reason = f"the lattice and gaps between rounds: {error}"
        else:
            self._codec = RoundCodec(run.field_shapes)  # the same, unless the coordinator errs
            self._noticing.expected = _expected_of(run)

    def _at(self, row: CaptureRow) -> tuple[bool, tuple[Detection, ...]]:
        """Whether a record was said before, and what is wrong with it."""
        if row.method not in EXCHANGE_METHODS or row.kind not in ("hello", "message", "signature"):
            return False, ()
        noticing = self._noticing
        other = row.callee if row.sender == row.caller else row.caller
        seen = digest(row.payload)
        try:
            if row.kind == "hello":
                noticing.open_stream(sender=other, receiver=row.sender, stream=row.stream, t=self._lacks(row))
                return False, ()
            if row.kind == "signature":
                self._require_signature(row)
                return False, ()
            t, claimed, message = self._decoded.get(seen) or self._decode(row.payload, seen)
        except RemoteProtocolError as error:
            return False, noticing.report_undecodable(row.sender, other, row.stream, str(error)[:_MAX_QUOTED_CHARS])
        said = CapturedMessage(row.sender, other, row.stream, claimed, t, message.fields, seen, row.size)
        return noticing.is_repeat(said), noticing.check_message(said)

    def _lacks(self, row: CaptureRow) -> int:
        """The first round that who says this hello has not heard."""
        said = read_hello(row.payload)
        if said.learner != row.sender or list(said.fields) != to_fields(self._codec.shapes):
            raise RemoteProtocolError(
                f"greets as {self._noticing.expected.get_display_name(said.learner)}, with fields {from_fields(said.fields)}"
            )
        return said.next_round

    def _require_signature(self, row: CaptureRow) -> None:
        """It is one, and of its sender; whether it is right, only who knows its authority can say."""
        said = SignedStatement.decode("", row.payload).statement
        if said.sender != row.sender:
            raise RemoteProtocolError(f"signs as {self._noticing.expected.get_display_name(said.sender)}")

    def _decode(self, payload: bytes, seen: bytes) -> tuple[int, int, Message]:
        """Decode, and keep for the other neighbours, who hear the same a moment later."""
        found = self._codec.decode(payload)
        if len(self._decoded) >= _MAX_DECODED_MESSAGES:
            self._decoded.clear()
        self._decoded[seen] = found
        return found

    def _note(self, finding: Detection) -> None:
        self.detection_count += 1
        if finding.is_contradiction:
            self.contradiction = self.contradiction or finding.text
        self.counts_by_kind[finding.kind] = self.counts_by_kind.get(finding.kind, 0) + 1
        if self.detection_count <= _MAX_STORED_DETECTIONS:
            self.first_detections.append(finding)
        if self.detection_count <= _MAX_LOGGED_DETECTIONS:
            log.error("must never happen", capture=self._capture_id, rule=finding.kind, what=finding.text)
        if self.detection_count == _MAX_LOGGED_DETECTIONS:
            log.error("more of it is counted, not logged", capture=self._capture_id)


def _expected_of(run: Run) -> ExpectedTraffic:
    """What is known of a run's messages before it begins."""
    algorithm, spec = run.algorithm, run.spec
    latticed = algorithm if isinstance(algorithm, LatticeAlgorithm) else None

    def lattice(learner: int, t: int) -> Mapping[str, float]:
        if latticed is None or learner >= spec.n_learners or t >= spec.rounds:
            return {}
        return latticed.lattice_spacings(learner, t)

    def due(sender: int, receiver: int, t: int) -> int | None:
        return find_next_received_round(run.network, spec.rounds, sender, receiver, t)

    return ExpectedTraffic(RoundCodec(run.field_shapes).message_bytes, due, lattice, spec.names)


def find_next_received_round(network: Network, rounds: int, sender: int, receiver: int, t: int) -> int | None:
    """The first round from t on in which a learner hears another one; None: there is none."""
    if max(sender, receiver) >= network.n_learners:
        return None
    last = min(rounds, t + network.horizon)
    return next((u for u in range(t, last) if network.mixing(u).neighbour_weights[receiver, sender]), None)


# ---- missing rounds --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sender:
    """Copies of one learner: rounds below `due` have come, but for those that are missing."""

    due: int = 0
    missing: list[range] = field(default_factory=list)
    streams: int = 0
    broken: bool = False


ChannelKey = tuple[int, ...]
"""Whose messages: a sender's, to all; or a sender's to a receiver."""


class Gaps:
    """Gaps in what was overheard of one run.

    Attributes:
        attendances: in which rounds learners take part, by index; of those who are not named, in all.
    """

    def __init__(self, attendances: Mapping[int, Participation] | None = None) -> None:
        self.participations = attendances or {}
        self._senders: dict[ChannelKey, _Sender] = {}

    def begin_stream(self, *sender: int) -> None:
        """A stream of copies has begun."""
        own = self._senders.setdefault(sender, _Sender())
        own.streams, own.broken = own.streams + 1, False

    def expect_sender(self, *sender: int) -> None:
        """Copies of a learner came before; where none come any more, the end is missing."""
        self._senders.setdefault(sender, _Sender(broken=True))

    def expect_learners(self, learners: int) -> None:
        """Of so many learners, all that is copied should have come: of one that never began everything is missing."""
        for learner in range(learners):
            attendance = self.participations.get(learner)
            if (learner,) not in self._senders and (attendance is None or attendance.intervals):
                self.expect_sender(learner)

    def resume_channel(self, *way: int, next_round: int, t: int | None) -> None:
        """A way is overheard again, from round t on, where rounds below `due` had come; None: it never was."""
        own = self._senders.setdefault(way, _Sender())
        own.due, own.broken = max(own.due, next_round), t is None
        if t is not None:
            self.record_round(*way, t=t)

    def end_stream(self, *sender: int, is_complete: bool) -> None:
        """It has ended: by the learner, who has no more, or by whatever came between."""
        own = self._senders[sender]
        own.streams -= 1
        own.broken = not is_complete and own.streams == 0

    def record_round(self, *way: int, t: int) -> None:
        """A round has come, for the first time or again; on a way that is not watched that says nothing."""
        own = self._senders.get(way)
        if own is None:
            return
        if t >= own.due:
            own.missing += self._lacking(way, range(own.due, t))
            own.due = t + 1
            return
        parts = ((range(each.start, t), range(t + 1, each.stop)) if t in each else (each,) for each in own.missing)
        own.missing = [part for pair in parts for part in pair if part]

    def _lacking(self, way: ChannelKey, rounds: range) -> list[range]:
        """Those of some rounds that did not come in which both ends take part."""
        parts = [rounds]
        for learner in way:
            if (attendance := self.participations.get(learner)) is not None:
                cuts = ((part, each) for part in parts for each in attendance.intervals)
                parts = [range(max(part.start, each.start), min(part.stop, each.stop)) for part, each in cuts]
        return [part for part in parts if part]

    @property
    def has_pending_copies(self) -> bool:
        """Some learner may have more to copy: its stream is there, or broke."""
        return any(own.streams or own.broken for own in self._senders.values())

    @property
    def sender_count(self) -> int:
        """Learners that have begun to copy."""
        return sum(len(way) == 1 for way in self._senders)

    @property
    def idle_learner_count(self) -> int:
        """Learners that take part in no round, and have nothing to copy."""
        return sum(not each.intervals for each in self.participations.values())

    @property
    def gap_count(self) -> int:
        """Intervals that are missing so far: rounds before and after them have come."""
        return sum(len(own.missing) for own in self._senders.values())

    def build_metadata(self) -> list[dict[str, Any]]:
        """For `capture.json`: by sender (and receiver), rounds from `from` on, below `to`; None: how many is not known."""
        found: list[dict[str, Any]] = []
        for way, own in sorted(self._senders.items()):
            named = dict(zip(("sender", "receiver"), way, strict=False))
            found += [{**named, "from": each.start, "to": each.stop} for each in own.missing]
            if own.broken or own.streams:
                found.append({**named, "from": own.due, "to": None})
        return found
