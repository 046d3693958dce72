"""What a learner tells its operators, as a value of ours; on the wire it is `LearnerStatus`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from sottovoce.text import plain
from sottovoce_wire.v1 import learner_pb2

LONGEST_DETAIL = 4096
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
    def under_way(self) -> bool:
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
        epsilon_elsewhere, epsilon_own_budget: in other runs, and what the owner allows in all of them.
        noise_is_not_private: it is not the operating system's.
        rules_broken: messages on the channels of neighbours that broke a rule, and changed nothing.
        records, records_waiting: taken in, and those of them that wait for their round.
        prequential_accuracy: share of records that were predicted before they were learned; only where the run opted in.
    """

    learner: str = ""
    run_id: str = ""
    state: LearnerState = LearnerState.UNSPECIFIED
    detail: str = ""
    rounds_done: int = 0
    rounds_said: int = 0
    rounds_with_data: int = 0
    messages_sent: int = 0
    bytes_sent: int = 0
    epsilon_spent: float = 0.0
    epsilon_budget: float | None = None
    epsilon_elsewhere: float = 0.0
    epsilon_own_budget: float | None = None
    noise_is_not_private: bool = False
    prequential_accuracy: float | None = None
    rules_broken: int = 0
    records: int = 0
    records_waiting: int = 0

    @property
    def limit(self) -> float | None:
        """Where the learner would have stopped in this run: by the run's budget, or by what its owner has left."""
        limits = [] if self.epsilon_budget is None else [self.epsilon_budget]
        if self.epsilon_own_budget is not None:
            limits.append(max(self.epsilon_own_budget - self.epsilon_elsewhere, 0.0))
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
    return whole if len(whole) <= LONGEST_DETAIL else f"{whole[: LONGEST_DETAIL - 1]}…"


def _readable(value: Any) -> Any:
    """What a learner says in words goes to terminals and logs."""
    return plain(value) if isinstance(value, str) else value
