"""What a learner is told before a run, and what follows from it alone: that is made once for all learners of a process."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

from sottovoce_core.errors import RemoteProtocolError
from sottovoce_core.network.network import NetworkDigests
from sottovoce_core.network.participation_schedule import ParticipationSchedule
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.spec import RunSpec, parse_spec
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.storage.state_folder import StoreIdentity
from sottovoce_rpc import specs
from sottovoce_wire.v1.coordinator_pb2 import Assignment

_MAX_CACHED_RUNS = 4
"""Runs at a time: learners of one process may be in several."""


@dataclass(frozen=True, slots=True)
class RunAssignment:
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

    @classmethod
    def from_wire(cls, run_id: str, told: Assignment, own: StoreIdentity, config: LearnerConfig) -> RunAssignment:
        """What the coordinator said, checked: its run id becomes part of a file name.

        Raises:
            RemoteProtocolError: it contradicts itself, or is another learner's.
            SpecError: the run spec is not valid, or names code that may not be imported.
        """
        specs.require_run_id(run_id)
        config.policy.require_allowed_imports(_document_of(told.spec))
        spec = _spec_of(told.spec, imports=config.allow_imports)
        return cls(run_id, spec, told.n_features, told.index, own.learner, own.incarnation)

    @property
    def budget(self) -> float | None:
        """Epsilon that it may spend in the run; None: there is no limit."""
        return self.spec.get_budget(self.index)

    @property
    def cached_run(self) -> CachedRun:
        """What it has in common with the other learners of its process."""
        return CachedRun.get_cached(self.spec, self.n_features)


# ---- what learners of one process have in common ---------------------------------------------------------------------

_document_of = lru_cache(_MAX_CACHED_RUNS)(specs.document_from_wire)


@lru_cache(_MAX_CACHED_RUNS)
def _spec_of(text: str, *, imports: bool) -> RunSpec:
    """The spec of a document from the wire: all that are told the same have this very one."""
    return parse_spec(_document_of(text), allow_imports=imports)


class CachedRun:
    """What follows from a spec alone, and nobody changes. Many learners would else hold as many copies of one network.

    Args:
        spec: of a run.
        n_features: features of a record.
    """

    _known: ClassVar[deque[CachedRun]] = deque(maxlen=_MAX_CACHED_RUNS)

    def __init__(self, spec: RunSpec, n_features: int) -> None:
        self._spec, self._n_features = spec, n_features

    @classmethod
    def get_cached(cls, spec: RunSpec, n_features: int) -> CachedRun:
        """That of this very spec, not of an equal one: comparing long ones would cost as much as reading them."""
        for each in tuple(cls._known):  # another thread may ask, too
            if each._spec is spec and each._n_features == n_features:
                return each
        cls._known.append(cls(spec, n_features))
        return cls._known[-1]

    @cached_property
    def run(self) -> Run:
        """As it is built; raises `SpecError` as `build_run`."""
        return build_run(self._spec, self._n_features)

    @cached_property
    def plan_hash(self) -> bytes:
        """As that of `sottovoce_rpc.specs`."""
        return specs.compute_plan_hash(self._spec, self._n_features)

    @cached_property
    def digests(self) -> NetworkDigests:
        """Of the networks of its rounds, for a window and those that may be asked for again."""
        return NetworkDigests(self.run.network, 4 * min(self._spec.clock.window, self._spec.rounds))

    @cached_property
    def participation(self) -> ParticipationSchedule:
        """Who takes part when."""
        return self._spec.participation
