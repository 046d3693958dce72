"""What a learner is told before a run, and the log that it opens for it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sottovoce.errors import NotReady, RemoteProtocolError
from sottovoce.spec import RunSpec
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.sharing import document_of, spec_of
from sottovoce_learner.storage.ledger import LedgerLine
from sottovoce_learner.storage.state_folder import Identity
from sottovoce_learner.storage.store import RunLog, Store, Terms
from sottovoce_rpc.directives import Assignment
from sottovoce_rpc.specs import require_run_id


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


@dataclass(frozen=True, slots=True)
class Others:
    """What a learner has spent in other runs: in all, and in those that were charged lately."""

    in_all: float
    lately: float


def open_log(
    folder: Path, role: Role, terms: Terms, since: datetime, *, keep_log: bool = False
) -> tuple[Others, RunLog]:
    """What all other runs have cost, and the log of this one.

    Args:
        folder: the state folder.
        role: of the learner.
        terms: what the log is kept by.
        since: when lately begins.
        keep_log: whether the log is kept when the run is over.

    Raises:
        NotReady: the learner has been in another run since, or the log cannot be written.
        DataError: something of the state folder is damaged.
    """
    store = Store(folder, role.name, keep_log=keep_log)
    elsewhere, lately = store.spent(but=role.run_id), store.spent_since(since, role.run_id)
    line = LedgerLine(role.name, role.run_id, role.index, role.n_features, role.spec.model_dump_json())
    try:
        return Others(elsewhere, lately), store.open_run(line, terms, elsewhere)
    except OSError as error:
        raise NotReady(f"the log of the run cannot be written: {error.strerror}") from None
