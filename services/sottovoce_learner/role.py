"""What a learner is told before a run."""

from __future__ import annotations

from dataclasses import dataclass

from sottovoce_core.errors import RemoteProtocolError
from sottovoce_core.spec import RunSpec
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.sharing import document_of, spec_of
from sottovoce_learner.storage.state_folder import Identity
from sottovoce_rpc.specs import require_run_id
from sottovoce_wire.v1.coordinator_pb2 import Assignment


@dataclass(frozen=True, slots=True)
class Role:
    """What a learner is told before a run.

    Attributes:
        run_id: the run.
        spec: the run spec.
        n_features: features of a record.
        index: this learner's index.
        name: the learner's own, by which its ledger counts.
        incarnation: of the process.

    Raises:
        RemoteProtocolError: the spec has no such learner, or calls it by another name: under that its budget would begin anew.
    """

    run_id: str
    spec: RunSpec
    n_features: int
    index: int
    name: str
    incarnation: int = 0

    def __post_init__(self) -> None:
        if not self.index < self.spec.n_learners:
            raise RemoteProtocolError(f"an assignment needs an index below {self.spec.n_learners}, got {self.index}")
        if (told := self.spec.names[self.index]) != self.name:
            raise RemoteProtocolError(f"learner {self.name!r} must be assigned under its own name, got {told!r}")

    @property
    def budget(self) -> float | None:
        """Epsilon that it may spend in the run; None: there is no limit."""
        return self.spec.budget_of(self.index)


def role_of(run_id: str, told: Assignment, own: Identity, config: LearnerConfig) -> Role:
    """What the coordinator said, checked: its run id becomes part of a file name.

    Raises:
        RemoteProtocolError: it contradicts itself, or is another learner's.
        SpecError: the run spec is not valid, or names code that may not be imported.
    """
    require_run_id(run_id)
    config.policy.require_code(document_of(told.spec))
    spec = spec_of(told.spec, imports=config.allow_imports)
    return Role(run_id, spec, told.n_features, told.index, own.learner, own.incarnation)
