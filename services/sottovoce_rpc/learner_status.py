"""Reports of a learner: `LearnerStatus` and `WaitReport` as values of ours; misconduct of its neighbours in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from sottovoce_core.errors import ViolationKind
from sottovoce_core.text import escape_control
from sottovoce_wire.v1 import coordinator_pb2, learner_pb2
from sottovoce_wire.v1.coordinator_pb2 import Violation

MAX_DETAIL_CHARS = 4096
"""Characters of what a status says in words."""


class LearnerState(Enum):
    """Where a learner stands. What each means is said in `learner.proto`; one of a newer learner is `UNSPECIFIED`."""

    UNSPECIFIED = learner_pb2.LEARNER_STATE_UNSPECIFIED
    IDLE = learner_pb2.LEARNER_STATE_IDLE
    CONNECTING = learner_pb2.LEARNER_STATE_CONNECTING
    RUNNING = learner_pb2.LEARNER_STATE_RUNNING
    FINISHED = learner_pb2.LEARNER_STATE_FINISHED
    BUDGET_EXHAUSTED = learner_pb2.LEARNER_STATE_BUDGET_EXHAUSTED
    FAILED = learner_pb2.LEARNER_STATE_FAILED
    STOPPED = learner_pb2.LEARNER_STATE_STOPPED

    @property
    def is_active(self) -> bool:
        """Is more to be said?"""
        return self in (LearnerState.CONNECTING, LearnerState.RUNNING)


@dataclass(frozen=True, slots=True)
class LearnerStatus:
    """How far a learner is. Independent of the data, but for the last field.

    Attributes:
        learner, run_id: whose it is; no run while idle.
        state, detail: where it stands, and why it stopped.
        rounds_done: said, heard and learned from.
        rounds_said: messages journaled, and so charged: `rounds_done` or one more.
        rounds_with_data: rounds for which records have arrived.
        messages_sent, bytes_sent: one for every neighbour.
        epsilon_spent, epsilon_budget: in this run; None: no limit.
        epsilon_other_runs, epsilon_owner_budget: in other runs, and what the owner allows in all of them.
        noise_is_not_private: it is not the operating system's.
        violation_count: messages on the channels of neighbours that broke a rule, and changed nothing.
        records, records_waiting: taken in, and those of them that wait for their round.
        prequential_accuracy: share of records that were predicted before they were learned; only where the run opted in.
    """

    learner: str = ""
    run_id: str = ""
    state: LearnerState = LearnerState.UNSPECIFIED
    detail: str = ""
    rounds_done: int = 0
    rounds_committed: int = 0
    rounds_with_data: int = 0
    messages_sent: int = 0
    bytes_sent: int = 0
    epsilon_spent: float = 0.0
    epsilon_budget: float | None = None
    epsilon_other_runs: float = 0.0
    epsilon_owner_budget: float | None = None
    noise_is_not_private: bool = False
    prequential_accuracy: float | None = None
    violation_count: int = 0
    records: int = 0
    records_waiting: int = 0

    @property
    def epsilon_limit(self) -> float | None:
        """Where the learner would have stopped in this run: by the run's budget, or by what its owner has left."""
        limits = [] if self.epsilon_budget is None else [self.epsilon_budget]
        if self.epsilon_owner_budget is not None:
            limits.append(max(self.epsilon_owner_budget - self.epsilon_other_runs, 0.0))
        return min(limits, default=None)

    def to_wire(self) -> learner_pb2.LearnerStatus:
        """As a message; of a detail that quotes what somebody sent, as much as a message may hold."""
        own = {name: getattr(self, name) for name in _FIELDS}
        return learner_pb2.LearnerStatus(**{**own, "state": self.state.value, "detail": _sayable(self.detail)})

    @classmethod
    def from_wire(cls, said: learner_pb2.LearnerStatus) -> LearnerStatus:
        """Read a message."""
        # What is absent or zero is what a status begins with; what a newer learner tells besides is passed over.
        values = {field.name: _readable(value) for field, value in said.ListFields() if field.name in _FIELDS}
        return cls(**{**values, "state": _STATES.get(said.state, LearnerState.UNSPECIFIED)})


_FIELDS = frozenset(field.name for field in fields(LearnerStatus))
_STATES = {state.value: state for state in LearnerState}


def _sayable(text: str) -> str:
    """A text without half characters, which no message holds, and no longer than anybody reads."""
    whole = text.encode("utf-8", "backslashreplace").decode()
    return whole if len(whole) <= MAX_DETAIL_CHARS else f"{whole[: MAX_DETAIL_CHARS - 1]}…"


def _readable(value: Any) -> Any:
    """What a learner says in words goes to terminals and logs."""
    return escape_control(value) if isinstance(value, str) else value


# ---- its waits -------------------------------------------------------------------------------------------------------


class WaitCause(Enum):
    """What a learner waits for, in words."""

    LEASE = "a grant of the coordinator"
    RECORDS = "records"
    NEIGHBOUR = "a neighbour"
    DISK = "room on its disk"


@dataclass(frozen=True, slots=True)
class WaitReport:
    """A wait that has lasted.

    Attributes:
        round: the learner's.
        cause: what is missing.
        neighbours: indices of those whom it has not heard, where it waits for neighbours.
    """

    round: int
    cause: WaitCause
    neighbours: tuple[int, ...] = ()

    def to_wire(self) -> coordinator_pb2.Wait:
        """As a message."""
        cause = coordinator_pb2.WaitCause.Value(f"WAIT_CAUSE_{self.cause.name}")
        return coordinator_pb2.Wait(round=self.round, cause=cause, neighbours=self.neighbours)

    @classmethod
    def from_wire(cls, report: coordinator_pb2.Report) -> WaitReport | None:
        """Read it off a report; None: the learner waits for nothing, or for something that is unknown here."""
        said = report.wait
        causes = {coordinator_pb2.WaitCause.Value(f"WAIT_CAUSE_{cause.name}"): cause for cause in WaitCause}
        cause = causes.get(said.cause)
        return None if cause is None else cls(said.round, cause, tuple(said.neighbours))


# ---- rules that its neighbours broke ---------------------------------------------------------------------------------


VIOLATION_KINDS = {coordinator_pb2.ViolationKind.Value(f"VIOLATION_KIND_{rule.name}"): rule for rule in ViolationKind}
"""Rules that are known here, by their number on the wire."""


class Attribution(Enum):
    """How a learner knows who spoke."""

    CLAIM = coordinator_pb2.ATTRIBUTION_CLAIM
    """It said so, in the clear: anybody could."""
    CERTIFICATE = coordinator_pb2.ATTRIBUTION_CERTIFICATE
    """It showed its own, and nobody is in between."""
    RELAY = coordinator_pb2.ATTRIBUTION_RELAY
    """An eavesdropper showed its own, and passes on what the neighbour says, or something else."""


_ATTRIBUTIONS = {each.value: each for each in Attribution}


def read_attribution(said: Violation) -> Attribution:
    """How sure it is that it was the neighbour; where that is unknown here, it may have been a stranger."""
    return _ATTRIBUTIONS.get(said.attribution, Attribution.CLAIM)


def describe_violation(said: Violation, names: Sequence[str]) -> str:
    """Misconduct in a run as people read it. It quotes nothing that came from the neighbour: no text, and no number.

    Args:
        said: of a rule that is known here.
        names: of the run's learners.
    """
    whom, noticed_by = names[said.learner], names[said.reporter]
    who = {
        Attribution.CLAIM: f"somebody in the clear under the name of {whom}",
        Attribution.CERTIFICATE: whom,
        Attribution.RELAY: f"{whom}, or the relay in between,",
    }[read_attribution(said)]
    return f"{who} said {VIOLATION_KINDS[said.kind].value} when round {said.round} was due, as {noticed_by} noticed"


def describe_violations(run: coordinator_pb2.Run) -> tuple[str, ...]:
    """All misconduct that is known of a run, as people read it."""
    names = [each.status.learner for each in run.learners]
    return tuple(describe_violation(each, names) for each in run.violations if each.kind in VIOLATION_KINDS)
