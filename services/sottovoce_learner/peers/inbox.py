"""The inbox: what comes from neighbours is taken in, or the rule that it broke is noticed. No network, no clock.

The rules. A neighbour says each round in which we hear it once, in order. It may be so many rounds ahead of us, never more:
one where it needs our message of every round to go on, else what the round clock grants beyond the slowest learner.
Whatever else comes is its error, and changes nothing here. A round that was said before is no misconduct: streams that break and
are opened again may bring it twice.

Where rounds go on without a neighbour that is late, its messages of rounds that are over still come, in order. The last one that
is here may stand for the one that is missing, as long as it is not older than the clock lets anybody be ahead.
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
"""Rounds of a neighbour after which it is still noticed that it says another thing of one."""

log = structlog.get_logger()

V = TypeVar("V")


class Inbox(Generic[V]):
    """Messages of the current round and the next ones.

    Args:
        neighbours: indices of those whose messages may come.
        heard: round to those whose messages it needs, some of `neighbours`.
        ahead: rounds, the current one included, whose messages may come.
        first_round: the round to begin with.
        last: where rounds may go on without who is late: of each neighbour the last message that is here already, and its
            round. None: they may not.
        names: of the learners, by index, for errors.
    """

    def __init__(
        self,
        neighbours: Iterable[int],
        heard: Callable[[int], Collection[int]],
        ahead: int = 2,
        first_round: int = 0,
        *,
        late_messages: Mapping[int, tuple[int, V]] | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self._names = names
        self.round, self._heard_in, self._ahead, self._late = first_round, heard, ahead, late_messages is not None
        self._next = dict.fromkeys(neighbours, 0 if self._late else first_round)
        self._heard: dict[int, dict[int, V]] = {}
        self._last: dict[int, V] = {}
        for j, (t, content) in (late_messages or {}).items():
            self._next[j], self._last[j] = t + 1, content
        self._needed = len(heard(first_round))

    def get_due_round(self, neighbour: int) -> int:
        """The first round whose message of this neighbour is due, as far as it may be ahead.

        Raises:
            PermissionDenied: not a neighbour.
        """
        if neighbour not in self._next:
            raise PermissionDenied(f"{format_learner_name(self._names, neighbour)} is not a neighbour")
        due, beyond = self._next[neighbour], self.round + self._ahead
        if self._late:
            return due if neighbour in self._heard_in(self.round) else beyond
        due = max(due, self.round)
        while due < beyond and neighbour not in self._heard_in(due):
            due += 1
        return due

    def put(self, neighbour: int, t: int, sender: int, content: V) -> bool:
        """Take what a message says in; True when the current round is now complete.

        Raises:
            RemoteProtocolError: sent in somebody else's name, or out of turn.
        """
        due = self.get_due_round(neighbour)
        if sender != neighbour:
            text = f"{format_learner_name(self._names, neighbour)} sent a message in the name of {format_learner_name(self._names, sender)}"
            raise RemoteProtocolError(text, ViolationKind.SENDER)
        if t != due or t >= self.round + self._ahead:
            raise RemoteProtocolError(
                f"{format_learner_name(self._names, neighbour)} must say round {due} next, got round {t} (we are in round {self.round})",
                None if t < due else ViolationKind.ROUND,
            )
        self._next[neighbour] = t + 1
        if t < self.round:
            self._last[neighbour] = content
        else:
            self._heard.setdefault(t, {})[neighbour] = content
        return self.is_complete

    @property
    def is_complete(self) -> bool:
        """True when everybody was heard whom the current round needs."""
        return len(self._heard.get(self.round, ())) == self._needed

    @property
    def missing_neighbours(self) -> list[int]:
        """Neighbours not heard yet in the current round."""
        return [j for j in self._heard_in(self.round) if self._next[j] <= self.round]

    @property
    def has_enough(self) -> bool:
        """True when of everybody whom the current round needs a message is here, of this round or one not too long before."""
        if not self._late:
            return self.is_complete
        oldest = max(self.round - self._ahead + 1, 0)
        return all(self._next[j] > oldest for j in self._heard_in(self.round))

    def take(self) -> dict[int, V]:
        """The messages of the current round, where that is complete; the next round becomes the current one.

        Else the last ones before it stand for those that are missing; there must be enough.
        """
        heard = self._heard.pop(self.round, {})
        if self._late:
            self._last.update(heard)
            heard = {j: self._last[j] for j in self._heard_in(self.round)}
        self.round += 1
        self._needed = len(self._heard_in(self.round))
        return heard


class _Unsigned:
    """What neighbours said and have not signed yet, as far as this process has heard it.

    A neighbour signs a block before it says anything of another one, so of each no more than a block is remembered.

    Args:
        names: of the learners, by index, for errors.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = names
        self._heard: defaultdict[int, dict[int, bytes]] = defaultdict(dict)

    def require_signed(self, neighbour: int, t: int) -> None:
        """Before a message of round t is taken in.

        Raises:
            RemoteProtocolError: the neighbour has not signed what it said in the blocks before.
        """
        waiting = self._heard[neighbour]
        if waiting and (first := next(iter(waiting))) // ROUNDS_PER_BLOCK < t // ROUNDS_PER_BLOCK:
            raise RemoteProtocolError(
                f"{format_learner_name(self._names, neighbour)} must sign what it said from round {first} on before it says round {t}: is it "
                "older than this learner?",
                ViolationKind.SIGNATURE,
            )

    def heard(self, neighbour: int, t: int, digest: bytes) -> None:
        """A message was taken in."""
        self._heard[neighbour][t] = digest

    def waits(self, neighbour: int, block: int) -> bool:
        """Was anything of a block heard that is not signed yet? Else its signature says nothing new, and need not be checked."""
        return any(t // ROUNDS_PER_BLOCK == block for t in self._heard[neighbour])

    @property
    def owing(self) -> set[int]:
        """Neighbours that have not signed all that was heard of them."""
        return {neighbour for neighbour, waiting in self._heard.items() if waiting}

    def signed(self, neighbour: int, statement: Statement) -> None:
        """A neighbour has signed; its signature is right.

        Raises:
            RemoteProtocolError: it signs in another one's name, or not all that it said.
            EquivocationError: it has said one thing here, and signed another one.
        """
        name = format_learner_name(self._names, neighbour)
        if statement.sender != neighbour:
            text = f"{name} signed in the name of {format_learner_name(self._names, statement.sender)}"
            raise RemoteProtocolError(text, ViolationKind.SENDER)
        waiting = self._heard[neighbour]
        of_block = {t: own for t, own in waiting.items() if t // ROUNDS_PER_BLOCK == statement.block}
        for t, own in of_block.items():
            if (said := statement[t]) is None:
                text = f"{name} did not sign what it said in round {t}"
                raise RemoteProtocolError(text, ViolationKind.SIGNATURE)
            if said != own:
                raise EquivocationError(
                    f"{name} signed another message of round {t} than came here in its name: it, or whoever is in "
                    "between, says two things"
                )
        for t in of_block:
            del waiting[t]


class DecodedFrame(NamedTuple):
    """A neighbour's message: of which round, as it came, and what it says."""

    round: int
    frame: bytes
    message: Message


class MessageReceiver:
    """What a learner hears in a run.

    Args:
        role: of the learner.
        codec: of the run.
        inbox: which messages may come next.
        credentials: of the learner: with an identity its neighbours must sign what they say.
    """

    def __init__(
        self, role: RunAssignment, codec: RoundCodec, inbox: Inbox[DecodedFrame], credentials: Credentials
    ) -> None:
        self._role, self._codec, self.inbox, self._credentials = role, codec, inbox, credentials
        self._said = dict[tuple[int, int], tuple[int, int]]()
        self._unsigned = None if credentials.principal is None else _Unsigned(role.spec.names)
        self._misconduct = dict[int, Violation]()
        self.violation_count = 0
        """Messages that broke one, of whomever."""
        self.messages_received = 0
        """Messages that were taken in."""

    def take(self, neighbour: int, payload: bytes) -> bool:
        """Take a neighbour's message in, or its signature of several; True when by it the current round is complete.

        Args:
            neighbour: whose channel it is.
            payload: as it came.

        Raises:
            EquivocationError: the neighbour has said something else in this round: two noisy copies of one state.
            RemoteProtocolError: it is not what is due from this neighbour.
            PermissionDenied: it is signed by somebody else.
        """
        if self._unsigned is not None and is_signature(payload):
            self._check(self._unsigned, neighbour, SignedStatement.decode(self._role.run_id, payload))
            return False
        t, sender, message = self._codec.decode(payload)
        if self._unsigned is not None:
            self._unsigned.require_signed(neighbour, t)
        said = hash(payload)  # by a key of this process
        try:
            complete = self.inbox.put(neighbour, t, sender, DecodedFrame(t, payload, message))
        except RemoteProtocolError:
            before = self._said.get((neighbour, t % MAX_REMEMBERED_ROUNDS))
            if sender == neighbour and before is not None and before[0] == t and before[1] != said:
                name = format_learner_name(self._role.spec.names, neighbour)
                raise EquivocationError(f"{name} said two different things in round {t}") from None
            raise
        self._said[neighbour, t % MAX_REMEMBERED_ROUNDS] = t, said
        self.messages_received += 1
        if self._unsigned is not None:
            self._unsigned.heard(neighbour, t, compute_frame_digest(payload))
        return complete

    def _check(self, unsigned: _Unsigned, neighbour: int, signed: SignedStatement) -> None:
        """A neighbour signs for itself, and what it said.

        Raises:
            PermissionDenied: somebody else does.
            RemoteProtocolError: it signs something else.
        """
        if not unsigned.waits(neighbour, signed.statement.block):
            return
        signer, name = self._credentials.verify_statement(signed), self._role.spec.names[neighbour]
        if not signer.is_one_of(f"{principals.Role.LEARNER}/{name}"):
            text = f"what {name} says must be signed by itself, got a signature of {signer}"
            raise PermissionDenied(text, ViolationKind.SENDER)
        unsigned.signed(neighbour, signed.statement)

    @property
    def unsigned_neighbours(self) -> set[int]:
        """Neighbours that have not signed all that was heard of them; where nothing is signed, nobody."""
        return set() if self._unsigned is None else self._unsigned.owing

    def record_violation(self, neighbour: int, rule: ViolationKind, known_by: Attribution, *, has_ended: bool) -> bool:
        """A neighbour broke a rule; True the first time, as long as the run goes on: what it says later tells nothing new."""
        self.violation_count += 1
        if has_ended or neighbour in self._misconduct:
            return False
        number = RuleNumber.Value(f"VIOLATION_KIND_{rule.name}")
        found = Violation(
            learner=neighbour, round=self.inbox.get_due_round(neighbour), kind=number, attribution=known_by.value
        )
        self._misconduct[neighbour] = found
        told = {"round": found.round, "rule": rule.name.lower(), "known_by": known_by.name.lower()}
        log.warning(
            "misconduct",
            learner=self._role.name,
            neighbour=format_learner_name(self._role.spec.names, neighbour),
            **told,
        )
        return True

    @property
    def violations(self) -> tuple[Violation, ...]:
        """What was noticed: of each neighbour the first rule that it broke."""
        return tuple(self._misconduct.values())
