"""Inbox: accepts messages of neighbours, or records the violated rule. No network or clock.

The rules. A neighbour sends each round in which we receive from it once, in order. It may be ahead of us by a bounded
number of rounds: one where it needs our message of every round, else the rounds that the clock leases beyond the slowest
learner. Any other message is its error, and changes nothing here. A round that was sent before is no violation: streams
that break and are reopened may bring it twice.

With bounded staleness, a late neighbour's messages of completed rounds still arrive, in order. Its last message may
replace the missing one, as long as it is not older than the clock lets a learner be ahead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import structlog

from sottovoce_core.algorithms.interface import Message
from sottovoce_core.errors import EquivocationError, PermissionDenied, RemoteProtocolError, ViolationKind
from sottovoce_core.text import format_learner_name
from sottovoce_learner.assignment import RunAssignment
from sottovoce_rpc import principals
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.learner_status import Attribution
from sottovoce_rpc.signatures import ROUNDS_PER_BLOCK, SignedStatement, Statement, compute_frame_digest, is_signature
from sottovoce_wire.v1.coordinator_pb2 import Violation
from sottovoce_wire.v1.coordinator_pb2 import ViolationKind as RuleNumber

MAX_REMEMBERED_ROUNDS = 1_024
"""Number of rounds of a neighbour for which a second, different message is detected."""

log = structlog.get_logger()

V = TypeVar("V")


class Inbox(Generic[V]):
    """Messages of the current round and the next ones.

    Args:
        neighbours: indices of the neighbours that may send.
        get_senders: returns the senders that a round needs, some of `neighbours`.
        ahead: rounds, the current one included, whose messages are accepted.
        first_round: round to begin with.
        late_messages: with bounded staleness, the last received message of each neighbour, and its round. None: no
            bounded staleness.
        names: names of the learners, by index, for errors.
    """

    def __init__(
        self,
        neighbours: Iterable[int],
        get_senders: Callable[[int], Collection[int]],
        ahead: int = 2,
        first_round: int = 0,
        *,
        late_messages: Mapping[int, tuple[int, V]] | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self._names = names
        self.round, self._get_senders, self._ahead, self._has_bounded_staleness = (
            first_round,
            get_senders,
            ahead,
            late_messages is not None,
        )
        self._next = dict.fromkeys(neighbours, 0 if self._has_bounded_staleness else first_round)
        self._received: dict[int, dict[int, V]] = {}
        self._last_messages: dict[int, V] = {}
        for j, (t, message) in (late_messages or {}).items():
            self._next[j], self._last_messages[j] = t + 1, message
        self._needed_count = len(get_senders(first_round))

    def get_due_round(self, neighbour: int) -> int:
        """Return the first round whose message of this neighbour is due, within the rounds it may be ahead.

        Raises:
            PermissionDenied: not a neighbour.
        """
        if neighbour not in self._next:
            raise PermissionDenied(f"{format_learner_name(self._names, neighbour)} is not a neighbour")
        due, beyond = self._next[neighbour], self.round + self._ahead
        if self._has_bounded_staleness:
            return due if neighbour in self._get_senders(self.round) else beyond
        due = max(due, self.round)
        while due < beyond and neighbour not in self._get_senders(due):
            due += 1
        return due

    def put(self, neighbour: int, t: int, sender: int, message: V) -> bool:
        """Accept a message; return True when the current round is complete.

        Raises:
            RemoteProtocolError: sent in another learner's name, or in the wrong round.
        """
        due = self.get_due_round(neighbour)
        if sender != neighbour:
            text = f"{self._name(neighbour)} sent a message in the name of {self._name(sender)}"
            raise RemoteProtocolError(text, ViolationKind.SENDER)
        if t != due or t >= self.round + self._ahead:
            raise RemoteProtocolError(
                f"{self._name(neighbour)} must send round {due} next, got round {t} (we are in round {self.round})",
                None if t < due else ViolationKind.ROUND,
            )
        self._next[neighbour] = t + 1
        if t < self.round:
            self._last_messages[neighbour] = message
        else:
            self._received.setdefault(t, {})[neighbour] = message
        return self.is_complete

    def _name(self, learner: int) -> str:
        return format_learner_name(self._names, learner)

    @property
    def is_complete(self) -> bool:
        """Return whether all messages of the current round have arrived."""
        return len(self._received.get(self.round, ())) == self._needed_count

    @property
    def missing_neighbours(self) -> list[int]:
        """Neighbours whose message of the current round is missing."""
        return [j for j in self._get_senders(self.round) if self._next[j] <= self.round]

    @property
    def has_enough(self) -> bool:
        """Return whether the current round has, from each sender, its message or one that is not too old."""
        if not self._has_bounded_staleness:
            return self.is_complete
        oldest = max(self.round - self._ahead + 1, 0)
        return all(self._next[j] > oldest for j in self._get_senders(self.round))

    def take(self) -> dict[int, V]:
        """Return the messages of the current round, and begin the next one.

        Missing messages are replaced by the senders' last ones; `has_enough` must hold.
        """
        messages = self._received.pop(self.round, {})
        if self._has_bounded_staleness:
            self._last_messages.update(messages)
            messages = {j: self._last_messages[j] for j in self._get_senders(self.round)}
        self.round += 1
        self._needed_count = len(self._get_senders(self.round))
        return messages


class _UnsignedMessages:
    """Messages of neighbours that are not signed yet, as far as this process has received them.

    A neighbour signs a block before it sends a message of another one, so at most one block of each is kept.

    Args:
        names: names of the learners, by index, for errors.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = names
        self._received: defaultdict[int, dict[int, bytes]] = defaultdict(dict)

    def require_signed(self, neighbour: int, t: int) -> None:
        """Check before a message of round t is accepted.

        Raises:
            RemoteProtocolError: the neighbour has not signed its messages of earlier blocks.
        """
        waiting = self._received[neighbour]
        if waiting and (first := next(iter(waiting))) // ROUNDS_PER_BLOCK < t // ROUNDS_PER_BLOCK:
            raise RemoteProtocolError(
                f"{format_learner_name(self._names, neighbour)} must sign its messages from round {first} on before it "
                f"sends round {t}: is it "
                "older than this learner?",
                ViolationKind.SIGNATURE,
            )

    def add(self, neighbour: int, t: int, digest: bytes) -> None:
        """Note an accepted message."""
        self._received[neighbour][t] = digest

    def has_unsigned(self, neighbour: int, block: int) -> bool:
        """Return whether a message of a block is unsigned. Else its signature adds nothing and is not checked."""
        return any(t // ROUNDS_PER_BLOCK == block for t in self._received[neighbour])

    @property
    def unsigned_neighbours(self) -> set[int]:
        """Neighbours that have not signed all received messages."""
        return {neighbour for neighbour, waiting in self._received.items() if waiting}

    def verify_statement(self, neighbour: int, statement: Statement) -> None:
        """Compare a valid signature with the received messages.

        Raises:
            RemoteProtocolError: it is in another learner's name, or lacks a message.
            EquivocationError: it is of another message than the received one.
        """
        name = format_learner_name(self._names, neighbour)
        if statement.sender != neighbour:
            text = f"{name} signed in the name of {format_learner_name(self._names, statement.sender)}"
            raise RemoteProtocolError(text, ViolationKind.SENDER)
        waiting = self._received[neighbour]
        block_digests = {t: own for t, own in waiting.items() if t // ROUNDS_PER_BLOCK == statement.block}
        for t, own in block_digests.items():
            if (payload_hash := statement[t]) is None:
                text = f"{name} did not sign its message of round {t}"
                raise RemoteProtocolError(text, ViolationKind.SIGNATURE)
            if payload_hash != own:
                raise EquivocationError(
                    f"{name} signed another message of round {t} than arrived here in its name: it, or a relay in "
                    "between, sends two messages"
                )
        for t in block_digests:
            del waiting[t]


class DecodedFrame(NamedTuple):
    """Message of a neighbour: its round, the bytes as received, and the decoded message."""

    round: int
    frame: bytes
    message: Message


class MessageReceiver:
    """Receiver of all messages of a learner in a run.

    Args:
        role: assignment of the learner.
        codec: codec of the run.
        inbox: messages that may come next.
        credentials: credentials of the learner: with an identity its neighbours must sign their messages.
    """

    def __init__(
        self, role: RunAssignment, codec: RoundCodec, inbox: Inbox[DecodedFrame], credentials: Credentials
    ) -> None:
        self._role, self._codec, self.inbox, self._credentials = role, codec, inbox, credentials
        self._payload_hashes = dict[tuple[int, int], tuple[int, int]]()
        self._unsigned = None if credentials.principal is None else _UnsignedMessages(role.spec.names)
        self._violations = dict[int, Violation]()
        self.violation_count = 0
        """Number of messages that violated a rule, of all neighbours."""
        self.messages_received = 0
        """Number of accepted messages."""

    def take(self, neighbour: int, payload: bytes) -> bool:
        """Accept a neighbour's message, or its signature of several; return True if the current round is now complete.

        Args:
            neighbour: neighbour of the channel.
            payload: bytes as received.

        Raises:
            EquivocationError: the neighbour has sent another message of this round: two noisy copies of one state.
            RemoteProtocolError: it is not what is due from this neighbour.
            PermissionDenied: it is signed by another principal.
        """
        if self._unsigned is not None and is_signature(payload):
            self._verify_signature(self._unsigned, neighbour, SignedStatement.decode(self._role.run_id, payload))
            return False
        t, sender, message = self._codec.decode(payload)
        if self._unsigned is not None:
            self._unsigned.require_signed(neighbour, t)
        payload_hash = hash(payload)  # by a key of this process
        try:
            complete = self.inbox.put(neighbour, t, sender, DecodedFrame(t, payload, message))
        except RemoteProtocolError:
            before = self._payload_hashes.get((neighbour, t % MAX_REMEMBERED_ROUNDS))
            if sender == neighbour and before is not None and before[0] == t and before[1] != payload_hash:
                name = format_learner_name(self._role.spec.names, neighbour)
                raise EquivocationError(f"{name} sent two different messages of round {t}") from None
            raise
        self._payload_hashes[neighbour, t % MAX_REMEMBERED_ROUNDS] = t, payload_hash
        self.messages_received += 1
        if self._unsigned is not None:
            self._unsigned.add(neighbour, t, compute_frame_digest(payload))
        return complete

    def _verify_signature(self, unsigned: _UnsignedMessages, neighbour: int, signed: SignedStatement) -> None:
        """Verify that a neighbour signs for itself, and its own messages.

        Raises:
            PermissionDenied: another principal signed.
            RemoteProtocolError: it signs something else.
        """
        if not unsigned.has_unsigned(neighbour, signed.statement.block):
            return
        signer, name = self._credentials.verify_statement(signed), self._role.spec.names[neighbour]
        if not signer.is_one_of(f"{principals.Role.LEARNER}/{name}"):
            text = f"messages of {name} must be signed by itself, got a signature of {signer}"
            raise PermissionDenied(text, ViolationKind.SENDER)
        unsigned.verify_statement(neighbour, signed.statement)

    @property
    def unsigned_neighbours(self) -> set[int]:
        """Neighbours that have not signed all received messages; empty without signatures."""
        return set() if self._unsigned is None else self._unsigned.unsigned_neighbours

    def record_violation(
        self, neighbour: int, kind: ViolationKind, attribution: Attribution, *, has_ended: bool
    ) -> bool:
        """Record a violation; return True for a neighbour's first one while the run goes on: later ones add nothing."""
        self.violation_count += 1
        if has_ended or neighbour in self._violations:
            return False
        number = RuleNumber.Value(f"VIOLATION_KIND_{kind.name}")
        found = Violation(
            learner=neighbour, round=self.inbox.get_due_round(neighbour), kind=number, attribution=attribution.value
        )
        self._violations[neighbour] = found
        details = {"round": found.round, "kind": kind.name.lower(), "attribution": attribution.name.lower()}
        log.warning(
            "violation",
            learner=self._role.name,
            neighbour=format_learner_name(self._role.spec.names, neighbour),
            **details,
        )
        return True

    @property
    def violations(self) -> tuple[Violation, ...]:
        """First violation of each neighbour."""
        return tuple(self._violations.values())
