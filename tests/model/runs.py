"""A run, as small as it can be: who takes part in it, its messages, its records and what they cost.

Here, in `folders.py`, `channels.py` and `books.py` stands nothing of the protocol: each function puts the product's objects
together from values, calls them, and takes the result apart. So what is modelled is what runs, and a change of the product
changes the model. All are remembered: a state asks what others have asked before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from sottovoce_core.algorithms.interface import Message
from sottovoce_core.arrays import as_floats
from sottovoce_core.network.network import NetworkDigests
from sottovoce_core.network.participation_schedule import Participation
from sottovoce_core.runs.participation import USED_ROUNDS_FIELD, compute_used_rounds_width, encode_used_rounds
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.spec import RunSpec
from sottovoce_learner.peers.neighbour_schedule import NeighbourSchedule
from sottovoce_learner.privacy_filter import PrivacyFilter
from sottovoce_rpc.codec import RoundCodec, to_tensor
from sottovoce_wire.v1 import learner_pb2
from tests.examples import small_spec

RUN, SOURCE, FEATURES = "run", "feeder", 1


class Shape(NamedTuple):
    """A run, and who takes part in it.

    Attributes:
        learners, rounds, window: how many.
        graph: who hears whom.
        late: what a round does without a neighbour that is late (`ClockSpec.staleness`).
        offline_intervals: of its spec, as a document. A run that learners have left or joined is a run of another shape.
    """

    learners: int = 2
    rounds: int = 2
    window: int = 3
    graph: str = "complete"
    late: str = "wait"
    offline_intervals: str = "[]"

    def owner(self, f: int) -> int:
        """The learner whose folder this is; behind those of all learners stands a copy of the first one's."""
        return f if f < self.learners else 0

    def called(self, f: int) -> str:
        """The learner on this folder, in words."""
        return f"learner {f}" if f < self.learners else "the copy of learner 0"

    def amended(self, offline_intervals: str) -> Shape:
        """The same run with other offline_intervals."""
        return self._replace(offline_intervals=offline_intervals)


def absences_of(spec: RunSpec) -> str:
    """As a shape has them."""
    return json.dumps([each.model_dump(mode="json") for each in spec.offline_intervals or ()])


@cache
def run_of(shape: Shape) -> Run:
    """The run itself."""
    clock: dict[str, Any] = {"window": shape.window, "staleness": shape.late}
    offline_intervals = json.loads(shape.offline_intervals)
    spec = small_spec(
        shape.rounds, shape.learners, clock=clock, topology={"graph": shape.graph}, offline_intervals=offline_intervals
    )
    return build_run(spec, FEATURES)


# ---- who takes part --------------------------------------------------------------------------------------------------


def plan_of(shape: Shape, learner: int) -> NeighbourSchedule:
    """Whom a learner hears and tells; new, for it remembers rounds."""
    network = run_of(shape).network
    return NeighbourSchedule(network, learner, NetworkDigests(network, 1))


@cache
def neighbours(shape: Shape, learner: int) -> tuple[int, ...]:
    """Of a learner, in order: everybody whom it may ever hear or tell."""
    return tuple(sorted(plan_of(shape, learner).neighbours))


@cache
def attendance(shape: Shape, learner: int) -> Participation:
    """The rounds in which a learner takes part."""
    return run_of(shape).participation(learner)


@cache
def there(shape: Shape, t: int) -> frozenset[int]:
    """Who takes part in a round."""
    return frozenset(np.flatnonzero(run_of(shape).spec.participation.participant_mask(t)).tolist())


@cache
def heard_in(shape: Shape, learner: int, t: int) -> tuple[int, ...]:
    """Whose messages a learner uses in a round."""
    return tuple(plan_of(shape, learner).get_in_neighbours(t))


@cache
def told_in(shape: Shape, learner: int, t: int) -> tuple[int, ...]:
    """To whom a learner's message of a round goes."""
    return plan_of(shape, learner).get_round_part(t).out_neighbours


@cache
def met(shape: Shape, learner: int, t: int) -> frozenset[int]:
    """Whom a learner that begins in a round is connected with first (`Outbox.met`)."""
    return (there(shape, t) - run_of(shape).spec.participation.lost_senders(learner, t)) & {*neighbours(shape, learner)}


@cache
def lost(shape: Shape) -> frozenset[int]:
    """Learners that the run goes on without, whether they live or not."""
    spec = run_of(shape).spec
    return frozenset(spec.names.index(each.learner) for each in spec.offline_intervals or () if each.missed_from_rounds)


# ---- messages and records --------------------------------------------------------------------------------------------


@cache
def codec_of(shape: Shape) -> RoundCodec:
    """How a round looks on the wire: whoever takes part in it."""
    return RoundCodec(run_of(shape).field_shapes)


@cache
def frame(shape: Shape, learner: int, t: int, content: int, used: tuple[int, ...] = ()) -> bytes:
    """A message; other contents are other draws of the noise.

    Args:
        shape: of the run.
        learner, t, content: whose, of which round, and the draw.
        used: rounds whose messages the update before it used, where rounds go on without late neighbours.
    """
    run, codec = run_of(shape), codec_of(shape)
    fields: Mapping[str, Any] = {name: np.full(size, float(content)) for name, size in codec.shapes.items()}
    if run.has_bounded_staleness:
        fields = {**fields, USED_ROUNDS_FIELD: encode_used_rounds(used, compute_used_rounds_width(run.network))}
    return codec.encode(t, learner, Message({**fields}))


@cache
def about(shape: Shape, message: bytes) -> tuple[int, int]:
    """Sender and round of a message."""
    t, sender, _ = codec_of(shape).decode(message)
    return sender, t


@cache
def states(shape: Shape, message: bytes) -> tuple[float, ...]:
    """The rounds that a message says were used, as they stand in it."""
    return tuple(codec_of(shape).decode(message)[2].fields[USED_ROUNDS_FIELD].tolist())


@cache
def record(number: int) -> learner_pb2.SampleBatch:
    """A feeder's batch: one record, which is its number."""
    return learner_pb2.SampleBatch(
        source=SOURCE,
        sequence=number,
        features=to_tensor(as_floats([[number / 10]])),
        labels=to_tensor(as_floats([0.0])),
    )


@cache
def prices(shape: Shape, learner: int) -> tuple[float, ...]:
    """Epsilon of a run once its rounds below each were said; one in which the learner is away brings no record."""
    books, spent = PrivacyFilter(run_of(shape).algorithm.accountant(learner), None), [0.0]
    for t in range(shape.rounds):
        books.charge(books.admit_round(t))
        books.advance(int(t in attendance(shape, learner)))
        spent.append(books.epsilon_spent)
    return tuple(spent)
