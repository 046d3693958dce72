"""What a coordinator tells a learner, as values of ours; on the wire each is a `Directive`."""

from __future__ import annotations

from dataclasses import dataclass

from sottovoce_wire.v1 import coordinator_pb2


@dataclass(frozen=True, slots=True)
class Assignment:
    """Prepare for a run.

    Attributes:
        spec: the run spec, as a document for the wire.
        n_features: features of a record.
        index: the learner's.
        mirror: where to copy messages to; empty for nowhere.
    """

    spec: str
    n_features: int
    index: int
    mirror: str = ""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Somebody whom a learner hears or tells.

    Attributes:
        index, name: who it is.
        address: its own, or that of a relay in its place.
        weight: of its messages; 0: they do not come here.
        told: messages go to it.
    """

    index: int
    name: str
    address: str
    weight: float
    told: bool


@dataclass(frozen=True, slots=True)
class Epoch:
    """The neighbours from a round on. The first one names all whom the learner hears or tells in any round."""

    first_round: int
    neighbours: tuple[Neighbour, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """Rounds below `until_round` may be run."""

    until_round: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run."""

    reason: str


@dataclass(frozen=True, slots=True)
class Issued:
    """The learner's incarnation, to be written to its state folder and confirmed. About no run."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The learner is let in, as this incarnation. About no run."""

    incarnation: int


Directive = Assignment | Epoch | Grant | Stop | Issued | Confirmed


def to_wire(run_id: str, told: Directive) -> coordinator_pb2.Directive:
    """A directive as a message."""
    pb = coordinator_pb2
    match told:
        case Assignment(spec, n_features, index, mirror):
            assignment = pb.Assignment(spec=spec, n_features=n_features, index=index, mirror_address=mirror)
            return pb.Directive(run_id=run_id, assignment=assignment)
        case Epoch(first_round, neighbours):
            named = [
                pb.Neighbour(index=each.index, name=each.name, address=each.address, weight=each.weight, told=each.told)
                for each in neighbours
            ]
            return pb.Directive(run_id=run_id, epoch=pb.TopologyEpoch(first_round=first_round, neighbours=named))
        case Grant(until_round):
            return pb.Directive(run_id=run_id, grant=pb.Grant(until_round=until_round))
        case Stop(reason):
            return pb.Directive(run_id=run_id, stop=pb.Stop(reason=reason))
        case Issued(incarnation):
            return pb.Directive(run_id=run_id, issued=pb.Issued(incarnation=incarnation))
        case Confirmed(incarnation):
            return pb.Directive(run_id=run_id, confirmed=pb.Confirmed(incarnation=incarnation))


def from_wire(said: coordinator_pb2.Directive) -> Directive | None:
    """Read a message; None: a directive of a newer coordinator, unknown here."""
    match said.WhichOneof("directive"):
        case "assignment":
            told = said.assignment
            return Assignment(told.spec, told.n_features, told.index, told.mirror_address)
        case "epoch":
            neighbours = (Neighbour(n.index, n.name, n.address, n.weight, n.told) for n in said.epoch.neighbours)
            return Epoch(said.epoch.first_round, tuple(neighbours))
        case "grant":
            return Grant(said.grant.until_round)
        case "stop":
            return Stop(said.stop.reason)
        case "issued":
            return Issued(said.issued.incarnation)
        case "confirmed":
            return Confirmed(said.confirmed.incarnation)
    return None
