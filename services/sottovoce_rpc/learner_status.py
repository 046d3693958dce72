"""Learner reports as values: `LearnerStatus`, `WaitReport`, and violations by its neighbours, with their text."""

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
"""Maximum number of characters of a status detail."""


class LearnerState(Enum):
    """State of a learner, as documented in `learner.proto`; states of a newer version read as `UNSPECIFIED`."""

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
        """Return whether the learner has more messages to send."""
        return self in (LearnerState.CONNECTING, LearnerState.RUNNING)


@dataclass(frozen=True, slots=True)
class LearnerStatus:
    """Progress of a learner. Independent of the data, except for the last field.

    Attributes:
        learner, run_id: the learner, and its run; no run while idle.
        state, detail: its state, and why it stopped.
        rounds_done: rounds whose messages were sent, received and learned from.
        rounds_committed: messages written to the WAL, and so charged: `rounds_done` or one more.
        rounds_with_data: rounds for which records have arrived.
        messages_sent, bytes_sent: counted once per neighbour.
        epsilon_spent: pure epsilon of this run.
        epsilon_charged, epsilon_budget: epsilon of this run at `delta`, and its limit; None: no limit.
        epsilon_other_runs, epsilon_owner_budget: epsilon of other runs at `owner_delta`, and the owner's limit over all runs.
        delta, owner_delta: 0: pure epsilon.
        noise_is_not_private: the noise does not come from the operating system's generator.
        violation_count: messages on the channels of neighbours that broke a rule; they changed nothing.
        records, records_waiting: records taken in, and those of them that wait for their round.
        prequential_accuracy: share of records predicted correctly before they were learned; only if the run opted in.
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
    epsilon_charged: float = 0.0
    epsilon_budget: float | None = None
    epsilon_other_runs: float = 0.0
    epsilon_owner_budget: float | None = None
    delta: float = 0.0
    owner_delta: float = 0.0
    noise_is_not_private: bool = False
    prequential_accuracy: float | None = None
    violation_count: int = 0
    records: int = 0
    records_waiting: int = 0

    @property
    def epsilon_limit(self) -> float | None:
        """Epsilon at `delta` at which the learner stops in this run: the smaller of the run's budget and what the owner has left.

        What the owner has left is not counted if it holds at another delta.
        """
        limits = [] if self.epsilon_budget is None else [self.epsilon_budget]
        if self.epsilon_owner_budget is not None and self.owner_delta == self.delta:
            limits.append(max(self.epsilon_owner_budget - self.epsilon_other_runs, 0.0))
        return min(limits, default=None)

    def to_wire(self) -> learner_pb2.LearnerStatus:
        """Encode as a message; a detail that quotes foreign text is cut to the limit."""
        own = {name: getattr(self, name) for name in _FIELDS}
        return learner_pb2.LearnerStatus(**{**own, "state": self.state.value, "detail": _encode_detail(self.detail)})

    @classmethod
    def from_wire(cls, message: learner_pb2.LearnerStatus) -> LearnerStatus:
        """Decode a message."""
        # Absent or zero fields have their defaults; fields of a newer learner are ignored.
        values = {field.name: _clean(value) for field, value in message.ListFields() if field.name in _FIELDS}
        return cls(**{**values, "state": _STATES.get(message.state, LearnerState.UNSPECIFIED)})


_FIELDS = frozenset(field.name for field in fields(LearnerStatus))
_STATES = {state.value: state for state in LearnerState}


def _encode_detail(text: str) -> str:
    """Escape lone surrogates, which protobuf cannot encode, and cut the text to the limit."""
    encodable = text.encode("utf-8", "backslashreplace").decode()
    return encodable if len(encodable) <= MAX_DETAIL_CHARS else f"{encodable[: MAX_DETAIL_CHARS - 1]}…"


def _clean(value: Any) -> Any:
    """Escape control characters: texts of a learner are shown on terminals and written to logs."""
    return escape_control(value) if isinstance(value, str) else value


# ---- waits -----------------------------------------------------------------------------------------------------------


class WaitCause(Enum):
    """Cause of a learner's wait, with its text."""

    LEASE = "a lease of the coordinator"
    RECORDS = "records"
    NEIGHBOUR = "a neighbour"
    DISK = "space on its disk"


@dataclass(frozen=True, slots=True)
class WaitReport:
    """A wait that exceeds the reporting threshold.

    Attributes:
        round: the learner's current round.
        cause: what it waits for.
        neighbours: for cause NEIGHBOUR, indices of those whose messages are missing.
    """

    round: int
    cause: WaitCause
    neighbours: tuple[int, ...] = ()

    def to_wire(self) -> coordinator_pb2.Wait:
        """Encode as a message."""
        cause = coordinator_pb2.WaitCause.Value(f"WAIT_CAUSE_{self.cause.name}")
        return coordinator_pb2.Wait(round=self.round, cause=cause, neighbours=self.neighbours)

    @classmethod
    def from_wire(cls, report: coordinator_pb2.Report) -> WaitReport | None:
        """Decode the wait in a report; None if the learner waits for nothing, or for a cause unknown here."""
        wait = report.wait
        causes = {coordinator_pb2.WaitCause.Value(f"WAIT_CAUSE_{cause.name}"): cause for cause in WaitCause}
        cause = causes.get(wait.cause)
        return None if cause is None else cls(wait.round, cause, tuple(wait.neighbours))


# ---- violations ------------------------------------------------------------------------------------------------------


VIOLATION_KINDS = {coordinator_pb2.ViolationKind.Value(f"VIOLATION_KIND_{rule.name}"): rule for rule in ViolationKind}
"""Violation kinds known here, by their number on the wire."""


class Attribution(Enum):
    """Evidence for the identity of the sender of a violating message."""

    CLAIM = coordinator_pb2.ATTRIBUTION_CLAIM
    """A name sent in the clear, which proves nothing."""
    CERTIFICATE = coordinator_pb2.ATTRIBUTION_CERTIFICATE
    """The sender's own certificate, on a direct channel."""
    RELAY = coordinator_pb2.ATTRIBUTION_RELAY
    """The certificate of an eavesdropper, which may have changed what the neighbour sent."""


_ATTRIBUTIONS = {each.value: each for each in Attribution}


def read_attribution(violation: Violation) -> Attribution:
    """Return the attribution of a violation; an unknown one counts as CLAIM, the weakest."""
    return _ATTRIBUTIONS.get(violation.attribution, Attribution.CLAIM)


def describe_violation(violation: Violation, names: Sequence[str]) -> str:
    """Describe a violation for users. The text quotes nothing that the neighbour sent, neither text nor number.

    Args:
        violation: of a kind known here.
        names: names of the run's learners.
    """
    learner, reporter = names[violation.learner], names[violation.reporter]
    sender = {
        Attribution.CLAIM: f"an unauthenticated sender under the name of {learner}",
        Attribution.CERTIFICATE: learner,
        Attribution.RELAY: f"{learner}, or the relay in between,",
    }[read_attribution(violation)]
    return f"{sender} sent {VIOLATION_KINDS[violation.kind].value} when round {violation.round} was due, as {reporter} reported"


def describe_violations(run: coordinator_pb2.Run) -> tuple[str, ...]:
    """Describe all known violations in a run."""
    names = [each.status.learner for each in run.learners]
    return tuple(describe_violation(each, names) for each in run.violations if each.kind in VIOLATION_KINDS)
