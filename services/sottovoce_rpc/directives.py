"""What a coordinator tells a learner, as values of ours; on the wire each is a `Directive`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

from sottovoce_core.errors import Unavailable
from sottovoce_wire.v1 import coordinator_pb2, eavesdropper_pb2


@dataclass(frozen=True, slots=True)
class Sent:
    """What a learner has sent in a run at least, as its coordinator or a capture knows.

    Attributes:
        run_id: the run.
        learner: name of the learner.
        rounds: one more than the last round of which a message is known.
        at: when it was sent.
    """

    run_id: str
    learner: str
    rounds: int
    at: datetime

    def to_wire(self) -> eavesdropper_pb2.Sent:
        """As a message."""
        at = Timestamp()
        at.FromDatetime(self.at)
        return eavesdropper_pb2.Sent(run_id=self.run_id, learner=self.learner, rounds=self.rounds, last_at=at)

    @classmethod
    def from_wire(cls, said: eavesdropper_pb2.Sent) -> Sent:
        """Read a message."""
        return cls(said.run_id, said.learner, said.rounds, said.last_at.ToDatetime(UTC))


def read_sent(told: Iterable[eavesdropper_pb2.Sent]) -> tuple[Sent, ...]:
    """Read messages."""
    return tuple(map(Sent.from_wire, told))


@dataclass(frozen=True, slots=True)
class Assignment:
    """Prepare for a run.

    Attributes:
        spec: the run spec, as a document for the wire.
        n_features: features of a record.
        index: the learner's.
        mirror: where to copy messages to; empty for nowhere.
        attempt: how often the run was taken up again after it had failed.
        earlier: what is known of the learner in runs before this one.
    """

    spec: str
    n_features: int
    index: int
    mirror: str = ""
    attempt: int = 0
    earlier: tuple[Sent, ...] = ()


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Somebody whom a learner hears or tells.

    Attributes:
        index, name: who it is.
        address: its own, or that of a relay in its place.
        weight: of its messages; 0: they do not come here.
        told: messages go to it.
        relayed: a relay listens at the address.
    """

    index: int
    name: str
    address: str
    weight: float
    told: bool
    relayed: bool = False


@dataclass(frozen=True, slots=True)
class Epoch:
    """The neighbours from a round on. The first one names all whom the learner hears or tells in any round."""

    first_round: int
    neighbours: tuple[Neighbour, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """Rounds below `until_round` may be run.

    Attributes:
        until_round: so far.
        since_round, network_hash: in place of epochs from that round on: what `network_hash` says of them; empty: epochs say it.
    """

    until_round: int
    since_round: int = 0
    network_hash: bytes = b""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run.

    Attributes:
        reason: why.
        over: nobody will go on with it: what was kept for that is deleted.
    """

    reason: str
    over: bool = False


@dataclass(frozen=True, slots=True)
class Issued:
    """The learner's incarnation, to be written to its state folder and confirmed. About no run."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The learner is let in, as this incarnation. About no run."""

    incarnation: int


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

Directive = Assignment | Epoch | Grant | Stop | Issued | Confirmed


def to_wire(run_id: str, told: Directive, origin: Origin) -> coordinator_pb2.Directive:
    """A directive as a message."""
    said = _to_wire(run_id, told)
    said.term, said.nonce = origin.term, origin.nonce
    return said


def _to_wire(run_id: str, told: Directive) -> coordinator_pb2.Directive:
    pb = coordinator_pb2
    match told:
        case Assignment(spec, n_features, index, mirror, attempt, earlier):
            assignment = pb.Assignment(
                spec=spec,
                n_features=n_features,
                index=index,
                mirror_address=mirror,
                attempt=attempt,
                earlier=[each.to_wire() for each in earlier],
            )
            return pb.Directive(run_id=run_id, assignment=assignment)
        case Epoch(first_round, neighbours):
            named = [
                pb.Neighbour(
                    index=each.index,
                    name=each.name,
                    address=each.address,
                    weight=each.weight,
                    told=each.told,
                    relayed=each.relayed,
                )
                for each in neighbours
            ]
            return pb.Directive(run_id=run_id, epoch=pb.TopologyEpoch(first_round=first_round, neighbours=named))
        case Grant(until_round, since_round, network):
            grant = pb.Grant(until_round=until_round, since_round=since_round, network_hash=network)
            return pb.Directive(run_id=run_id, grant=grant)
        case Stop(reason, over):
            return pb.Directive(run_id=run_id, stop=pb.Stop(reason=reason, over=over))
        case Issued(incarnation):
            return pb.Directive(run_id=run_id, issued=pb.Issued(incarnation=incarnation))
        case Confirmed(incarnation):
            return pb.Directive(run_id=run_id, confirmed=pb.Confirmed(incarnation=incarnation))


def from_wire(said: coordinator_pb2.Directive) -> Directive | None:
    """Read a message; None: a directive of a newer coordinator, unknown here."""
    match said.WhichOneof("directive"):
        case "assignment":
            told = said.assignment
            earlier = read_sent(told.earlier)
            return Assignment(told.spec, told.n_features, told.index, told.mirror_address, told.attempt, earlier)
        case "epoch":
            neighbours = (
                Neighbour(n.index, n.name, n.address, n.weight, n.told, n.relayed) for n in said.epoch.neighbours
            )
            return Epoch(said.epoch.first_round, tuple(neighbours))
        case "grant":
            return Grant(said.grant.until_round, said.grant.since_round, said.grant.network_hash)
        case "stop":
            return Stop(said.stop.reason, said.stop.over)
        case "issued":
            return Issued(said.issued.incarnation)
        case "confirmed":
            return Confirmed(said.confirmed.incarnation)
    return None
