"""What a learner tells its coordinator of its waiting, as a value of ours; on the wire it is a `Wait`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sottovoce_wire.v1 import coordinator_pb2


class Cause(Enum):
    """What a learner waits for, in words."""

    GRANT = "a grant of the coordinator"
    RECORDS = "records"
    NEIGHBOUR = "a neighbour"
    DISK = "room on its disk"


@dataclass(frozen=True, slots=True)
class Waiting:
    """A wait that has lasted.

    Attributes:
        round: the learner's.
        cause: what is missing.
        neighbours: indices of those whom it has not heard, where it waits for neighbours.
    """

    round: int
    cause: Cause
    neighbours: tuple[int, ...] = ()

    def to_wire(self) -> coordinator_pb2.Wait:
        """As a message."""
        cause = coordinator_pb2.WaitCause.Value(f"WAIT_CAUSE_{self.cause.name}")
        return coordinator_pb2.Wait(round=self.round, cause=cause, neighbours=self.neighbours)

    @classmethod
    def from_wire(cls, report: coordinator_pb2.Report) -> Waiting | None:
        """Read it off a report; None: the learner waits for nothing, or for something that is unknown here."""
        said = report.waiting
        causes = {coordinator_pb2.WaitCause.Value(f"WAIT_CAUSE_{cause.name}"): cause for cause in Cause}
        cause = causes.get(said.cause)
        return None if cause is None else cls(said.round, cause, tuple(said.neighbours))
