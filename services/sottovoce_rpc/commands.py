"""Directives of a coordinator to a learner, and from which coordinator they come."""

from __future__ import annotations

from dataclasses import dataclass

from sottovoce_core.errors import Unavailable
from sottovoce_wire.v1.coordinator_pb2 import (
    Assignment,
    IncarnationConfirmed,
    IncarnationIssued,
    RoundLease,
    Stop,
    TopologyEpoch,
)
from sottovoce_wire.v1.coordinator_pb2 import Command as Envelope

Command = Assignment | TopologyEpoch | RoundLease | Stop | IncarnationIssued | IncarnationConfirmed

_FIELDS: dict[type[Command], str] = {
    Assignment: "assignment",
    TopologyEpoch: "epoch",
    RoundLease: "lease",
    Stop: "stop",
    IncarnationIssued: "incarnation_issued",
    IncarnationConfirmed: "incarnation_confirmed",
}
"""Fields of the envelope, by what they hold."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Which coordinator speaks.

    Attributes:
        term: how often one has started on its state; 0: it keeps nothing.
        nonce: what it drew at this start.
    """

    term: int = 0
    nonce: bytes = b""

    def require_newest(self, other: Origin) -> None:
        """Refuse to obey another coordinator in a run in which this one was obeyed, unless it has taken its place.

        Raises:
            Unavailable: it is an older one, or a second one on a copy of the same state.
        """
        if other.term < self.term:
            raise Unavailable(
                f"this coordinator is an old one: a later one, of term {self.term}, leads the run, got {other.term}; {_LOST}"
            )
        if other.term == self.term > 0 and other.nonce != self.nonce:
            raise Unavailable(
                f"two coordinators lead the run in term {self.term}: one runs on a copy of the other's state; {_LOST}"
            )


_LOST = "if that one's state is lost, start one on an empty folder and let it take the run up: `sottovoce run SPEC --recover RUN`"


def command_to_wire(run_id: str, told: Command, origin: Origin) -> Envelope:
    """Put a directive about a run into its envelope; the empty run id: it is about no run."""
    content = {_FIELDS[type(told)]: told}
    return Envelope(run_id=run_id, term=origin.term, nonce=origin.nonce, **content)  # type: ignore[arg-type] # by the table


def command_from_wire(said: Envelope) -> Command | None:
    """Take a directive out of its envelope; None: a directive of a newer coordinator, unknown here."""
    name = said.WhichOneof("command")
    return None if name is None else getattr(said, name)
