"""The book of one run: who takes part, what they were told, how far they are, how it ended. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sottovoce.network.mixing import Mixing
from sottovoce.running.run import Run
from sottovoce_coordinator.clock import RoundClock
from sottovoce_wire.v1 import coordinator_pb2, eavesdropper_pb2, learner_pb2

FINAL = frozenset(
    {coordinator_pb2.RUN_STATE_FINISHED, coordinator_pb2.RUN_STATE_STOPPED, coordinator_pb2.RUN_STATE_FAILED}
)


@dataclass(slots=True)
class RunBook:
    """A run in progress.

    Attributes:
        run_id: its name.
        run: what is run.
        n_features: features of a record.
        addresses: of the learners, by index.
        state, detail: where it stands, and why it ended.
        relays: addresses in place of the learners' own, by edge, where an eavesdropper listens in between.
        mirror: where learners copy their messages to; empty for nowhere.
        statuses: the learners' last reports, by index.
    """

    run_id: str
    run: Run
    n_features: int
    addresses: tuple[str, ...]
    state: coordinator_pb2.RunState.ValueType = coordinator_pb2.RUN_STATE_CONNECTING
    detail: str = ""
    relays: dict[tuple[int, int], str] = field(default_factory=dict)
    mirror: str = ""
    statuses: list[learner_pb2.LearnerStatus] = field(init=False)
    clock: RoundClock = field(init=False)
    _announced: int = 1

    def __post_init__(self) -> None:
        spec = self.run.spec
        self.statuses = [learner_pb2.LearnerStatus(learner=name, run_id=self.run_id) for name in spec.names]
        self.clock = RoundClock(spec.clock, spec.rounds, spec.n_learners)

    def use_capture(self, opened: eavesdropper_pb2.OpenCaptureResponse) -> None:
        """An eavesdropper is ready: by relays on every edge, or by copies."""
        edges = [(route.caller, route.callee) for route in self.routes()]
        if self.run.spec.capture == "relay":
            self.relays = dict(zip(edges, opened.relay_addresses, strict=True))
        else:
            self.mirror = opened.mirror_address

    # ---- what learners are told ---------------------------------------------------------------------------

    def routes(self) -> list[eavesdropper_pb2.Route]:
        """Every pair that ever talks, in the direction in which its stream is opened."""
        edges = self.run.topology.edges
        return [eavesdropper_pb2.Route(caller=i, callee=j, target=self.addresses[j]) for i, j in edges]

    def briefing(self, index: int) -> list[coordinator_pb2.Directive]:
        """All that a learner has to know, at the start or after its stream of directives broke."""
        done = self.statuses[index].round  # it holds the epochs of all rounds that it has done
        (epochs,) = self._epochs([index], done, max(self.clock.granted, 1))
        return [self.assignment(index, self.mirror), *epochs, self.grant()]

    def go_on(self) -> list[list[coordinator_pb2.Directive]]:
        """What each learner, by index, is told when the grant has grown: new epochs, then the grant."""
        first, self._announced = self._announced, max(self._announced, self.clock.granted)
        grant = self.grant()
        return [[*epochs, grant] for epochs in self._epochs(range(len(self.addresses)), first, self._announced)]

    def assignment(self, index: int, mirror_address: str = "") -> coordinator_pb2.Directive:
        """The preparation of one learner."""
        spec = self.run.spec
        told = spec.model_copy(update={"topology": spec.topology.explicit(spec.n_learners)})
        return coordinator_pb2.Directive(
            assignment=coordinator_pb2.Assignment(
                run_id=self.run_id,
                spec=json.dumps(told.model_dump(mode="json")),
                n_features=self.n_features,
                index=index,
                mirror_address=mirror_address,
            )
        )

    def _epochs(self, learners: Sequence[int], first: int, until: int) -> list[list[coordinator_pb2.Directive]]:
        """For each of these learners the epochs that it needs for the rounds from `first` on, below `until`.

        One for the first of these rounds, and one for every round that differs for it from the one before. A network that
        never changes has one epoch, that of round 0.
        """
        told: list[list[coordinator_pb2.Directive]] = [[] for _ in learners]
        before: list[object] = [None] * len(learners)
        network = self.run.topology
        for t in range(first, until if network.horizon > 1 else min(until, 1)):
            mixing = network.at(t)
            for k, i in enumerate(learners):
                if (part := (mixing.heard_by(i), mixing.told_by(i))) != before[k]:
                    before[k] = part
                    told[k].append(self._epoch(i, t, mixing))
        return told

    def _epoch(self, index: int, t: int, mixing: Mixing) -> coordinator_pb2.Directive:
        """The topology of a round as one learner needs it; the first one names all whom it ever talks to."""
        names, heard, told = self.run.spec.names, mixing.heard_by(index), mixing.told_by(index)
        pairs = self.run.topology.edges if t == 0 else ()
        ever = {j for pair in pairs if index in pair for j in pair if j != index}
        neighbours = [
            coordinator_pb2.Neighbour(
                index=j,
                name=names[j],
                address=self.relays.get((index, j), self.addresses[j]),
                weight=heard.get(j, 0.0),
                told=j in told,
            )
            for j in sorted({*heard, *told, *ever})
        ]
        epoch = coordinator_pb2.TopologyEpoch(run_id=self.run_id, first_round=t, neighbours=neighbours)
        return coordinator_pb2.Directive(epoch=epoch)

    def grant(self) -> coordinator_pb2.Directive:
        """What is granted now."""
        return coordinator_pb2.Directive(
            grant=coordinator_pb2.Grant(run_id=self.run_id, until_round=self.clock.granted)
        )

    def stop(self) -> coordinator_pb2.Directive:
        """The end."""
        return coordinator_pb2.Directive(stop=coordinator_pb2.Stop(run_id=self.run_id, reason=self.detail))

    # ---- what learners tell -------------------------------------------------------------------------------

    def report(self, status: learner_pb2.LearnerStatus) -> bool:
        """Take in a report; True when the grant has grown."""
        index = self.run.spec.names.index(status.learner)
        self.statuses[index] = status
        self._judge(status)
        before = self.clock.granted
        running = learner_pb2.LEARNER_STATE_RUNNING
        if self.state == coordinator_pb2.RUN_STATE_CONNECTING and all(s.state == running for s in self.statuses):
            self.state = coordinator_pb2.RUN_STATE_RUNNING
            self.clock.start()
            for i, each in enumerate(self.statuses):  # records may have come while others were still connecting
                self.clock.progress(i, each.round, each.data_rounds)
        elif self.state == coordinator_pb2.RUN_STATE_RUNNING:
            self.clock.progress(index, status.round, status.data_rounds)
        return self.clock.granted > before

    def _judge(self, status: learner_pb2.LearnerStatus) -> None:
        """Does this report end the run?"""
        if status.state == learner_pb2.LEARNER_STATE_FAILED:
            self.end(coordinator_pb2.RUN_STATE_FAILED, f"{status.learner} failed: {status.detail}")
        elif status.state == learner_pb2.LEARNER_STATE_BUDGET_EXHAUSTED:
            self.end(coordinator_pb2.RUN_STATE_STOPPED, f"{status.learner} stopped speaking: {status.detail}")
        elif all(s.state == learner_pb2.LEARNER_STATE_FINISHED for s in self.statuses):
            self.end(coordinator_pb2.RUN_STATE_FINISHED, "")

    def end(self, state: coordinator_pb2.RunState.ValueType, detail: str) -> None:
        """End the run, once."""
        if self.state not in FINAL:
            self.state, self.detail = state, detail

    @property
    def ended(self) -> bool:
        """True when the state is final."""
        return self.state in FINAL

    def view(self) -> coordinator_pb2.WatchRunResponse:
        """The run as it stands."""
        return coordinator_pb2.WatchRunResponse(
            run_id=self.run_id, state=self.state, detail=self.detail, learners=self.statuses
        )


def missing(names: Sequence[str], joined: Mapping[str, object]) -> list[str]:
    """Learners of a run that have not joined."""
    return [name for name in names if name not in joined]
