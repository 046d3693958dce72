"""What a learner tells its coordinator of a neighbour that broke a rule, as a value of ours; on the wire it is a `Misconduct`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from sottovoce.errors import Rule
from sottovoce_wire.v1 import coordinator_pb2

_RULES = {coordinator_pb2.Rule.Value(f"RULE_{rule.name}"): rule for rule in Rule}


class KnownBy(Enum):
    """How a learner knows who spoke."""

    NAME = coordinator_pb2.KNOWN_BY_NAME
    """It said so, in the clear: anybody could."""
    CERTIFICATE = coordinator_pb2.KNOWN_BY_CERTIFICATE
    """It showed its own, and nobody is in between."""
    RELAY = coordinator_pb2.KNOWN_BY_RELAY
    """An eavesdropper showed its own, and passes on what the neighbour says, or something else."""


_KNOWN_BY = {each.value: each for each in KnownBy}


@dataclass(frozen=True, slots=True)
class Misconduct:
    """A neighbour broke a rule. It holds nothing that came from there: no text, and no number.

    Attributes:
        learner: index of the neighbour.
        round: that was due from it.
        rule: the first that it broke.
        known_by: how sure it is that it was the neighbour.
    """

    learner: int
    round: int
    rule: Rule
    known_by: KnownBy

    @property
    def attributed(self) -> bool:
        """Was it the neighbour, or whoever the run put in between? Else it may have been a stranger."""
        return self.known_by is not KnownBy.NAME

    def to_wire(self, noticed_by: int | None = None) -> coordinator_pb2.Misconduct:
        """As a message; of a run, with the index of who noticed it."""
        rule, known_by = coordinator_pb2.Rule.Value(f"RULE_{self.rule.name}"), self.known_by.value
        return coordinator_pb2.Misconduct(
            learner=self.learner, round=self.round, rule=rule, known_by=known_by, noticed_by=noticed_by
        )

    @classmethod
    def from_wire(cls, said: coordinator_pb2.Misconduct) -> Misconduct | None:
        """Read a message; None: of a rule that is unknown here."""
        rule = _RULES.get(said.rule)
        known_by = _KNOWN_BY.get(said.known_by, KnownBy.NAME)
        return None if rule is None else cls(said.learner, said.round, rule, known_by)

    def in_words(self, whom: str, noticed_by: str) -> str:
        """As people read it.

        Args:
            whom: name of the neighbour.
            noticed_by: name of who noticed it.
        """
        who = {
            KnownBy.NAME: f"somebody in the clear under the name of {whom}",
            KnownBy.CERTIFICATE: whom,
            KnownBy.RELAY: f"{whom}, or the relay in between,",
        }[self.known_by]
        return f"{who} said {self.rule.value} when round {self.round} was due, as {noticed_by} noticed"


def noticed_in(told: Iterable[coordinator_pb2.Misconduct]) -> tuple[Misconduct, ...]:
    """What is known here of what was told."""
    return tuple(each for each in map(Misconduct.from_wire, told) if each is not None)


def noticed_of(run: coordinator_pb2.Run) -> dict[tuple[int, int], Misconduct]:
    """What learners of a run noticed: by who noticed it, and who did it."""
    found = ((said.noticed_by, Misconduct.from_wire(said)) for said in run.misconduct)
    return {(by, each.learner): each for by, each in found if each is not None}


def misconduct_lines(run: coordinator_pb2.Run) -> tuple[str, ...]:
    """The same, as people read it."""
    names = [each.status.learner for each in run.learners]
    return tuple(each.in_words(names[whom], names[by]) for (by, whom), each in noticed_of(run).items())
