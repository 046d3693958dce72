"""What comes on the channels of neighbours: taken in, or the rule that it broke is told. No network, no clock."""

from __future__ import annotations

from typing import NamedTuple

from sottovoce.algorithms.interface import Message
from sottovoce.errors import EquivocationError, RemoteProtocolError, Rule, StrangerError
from sottovoce.network.roster import called
from sottovoce_learner.inbox import Inbox
from sottovoce_learner.role import Role
from sottovoce_learner.signing import Unsigned
from sottovoce_rpc import principals
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.learner_status import KnownBy, Misconduct
from sottovoce_rpc.signatures import Signed, digest, is_signature

REMEMBERED = 1_024
"""Rounds of a neighbour after which it is still noticed that it says another thing of one."""


class Received(NamedTuple):
    """A neighbour's message: of which round, as it came, and what it says."""

    round: int
    frame: bytes
    message: Message


class Hearing:
    """What a learner hears in a run.

    Args:
        role: of the learner.
        codec: of the run.
        inbox: which messages may come next.
        credentials: of the learner: with an identity its neighbours must sign what they say.
    """

    def __init__(self, role: Role, codec: RoundCodec, inbox: Inbox[Received], credentials: Credentials) -> None:
        self._role, self._codec, self._inbox, self._credentials = role, codec, inbox, credentials
        self._said = dict[tuple[int, int], tuple[int, int]]()
        self._unsigned = None if credentials.principal is None else Unsigned(role.spec.names)
        self._misconduct = dict[int, Misconduct]()
        self.rules_broken = 0
        """Messages that broke one, of whomever."""
        self.messages = 0
        """Messages that were taken in."""

    def take(self, neighbour: int, payload: bytes) -> bool:
        """Take a neighbour's message in, or its signature of several; True when by it the current round is complete.

        Args:
            neighbour: whose channel it is.
            payload: as it came.

        Raises:
            EquivocationError: the neighbour has said something else in this round: two noisy copies of one state.
            RemoteProtocolError: it is not what is due from this neighbour.
            StrangerError: it is signed by somebody else.
        """
        if self._unsigned is not None and is_signature(payload):
            self._check(self._unsigned, neighbour, Signed.decode(self._role.run_id, payload))
            return False
        t, sender, message = self._codec.decode(payload)
        if self._unsigned is not None:
            self._unsigned.require_signed(neighbour, t)
        said = hash(payload)  # by a key of this process
        try:
            complete = self._inbox.put(neighbour, t, sender, Received(t, payload, message))
        except RemoteProtocolError:
            before = self._said.get((neighbour, t % REMEMBERED))
            if sender == neighbour and before is not None and before[0] == t and before[1] != said:
                name = called(self._role.spec.names, neighbour)
                raise EquivocationError(f"{name} said two different things in round {t}") from None
            raise
        self._said[neighbour, t % REMEMBERED] = t, said
        self.messages += 1
        if self._unsigned is not None:
            self._unsigned.heard(neighbour, t, digest(payload))
        return complete

    def _check(self, unsigned: Unsigned, neighbour: int, signed: Signed) -> None:
        """A neighbour signs for itself, and what it said.

        Raises:
            StrangerError: somebody else does.
            RemoteProtocolError: it signs something else.
        """
        if not unsigned.waits(neighbour, signed.statement.block):
            return
        signer, name = self._credentials.signer(signed), self._role.spec.names[neighbour]
        if not signer.is_one_of(f"{principals.Role.LEARNER}/{name}"):
            text = f"what {name} says must be signed by itself, got a signature of {signer}"
            raise StrangerError(text, Rule.NAME)
        unsigned.signed(neighbour, signed.statement)

    @property
    def owing(self) -> set[int]:
        """Neighbours that have not signed all that was heard of them; where nothing is signed, nobody."""
        return set() if self._unsigned is None else self._unsigned.owing

    def notice(self, neighbour: int, rule: Rule, known_by: KnownBy) -> Misconduct | None:
        """A neighbour broke a rule; returned the first time alone, for whatever it says later tells nothing new."""
        if neighbour in self._misconduct:
            return None
        found = Misconduct(neighbour, self._inbox.next_round(neighbour), rule, known_by)
        self._misconduct[neighbour] = found
        return found

    @property
    def misconduct(self) -> tuple[Misconduct, ...]:
        """What was noticed: of each neighbour the first rule that it broke."""
        return tuple(self._misconduct.values())
