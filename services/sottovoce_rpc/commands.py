"""Commands of a coordinator to a learner, and the coordinator start that they come from."""

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
"""Field of the envelope for each class of command."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Start of a coordinator, as the source of commands.

    Attributes:
        term: number of coordinator starts on this state, this one included; 0: no durable state.
        nonce: random bytes drawn at this start.
    """

    term: int = 0
    nonce: bytes = b""

    def require_newest(self, other: Origin) -> None:
        """Refuse commands of a coordinator that is not this one and has not replaced it.

        Raises:
            Unavailable: the other coordinator is older, or runs on a copy of the same state.
        """
        if other.term < self.term:
            raise Unavailable(
                f"this coordinator is outdated: a newer one, of term {self.term}, leads the run, got term {other.term}; "
                f"{_RECOVER_HINT}"
            )
        if other.term == self.term > 0 and other.nonce != self.nonce:
            raise Unavailable(
                f"two coordinators lead the run in term {self.term}: one runs on a copy of the other's state; {_RECOVER_HINT}"
            )


_RECOVER_HINT = (
    "if the newest state is lost, start a coordinator on an empty folder and recover the run: "
    "`sottovoce run SPEC --recover RUN`"
)


def command_to_wire(run_id: str, command: Command, origin: Origin) -> Envelope:
    """Put a command into its envelope; an empty run id means that it belongs to no run."""
    content = {_FIELDS[type(command)]: command}
    return Envelope(run_id=run_id, term=origin.term, nonce=origin.nonce, **content)  # type: ignore[arg-type] # by the table


def command_from_wire(envelope: Envelope) -> Command | None:
    """Take a command out of its envelope; None for a kind that only a newer version knows."""
    name = envelope.WhichOneof("command")
    return None if name is None else getattr(envelope, name)
