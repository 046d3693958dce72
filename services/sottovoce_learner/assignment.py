"""Assignment of a learner to a run, and objects derived from the spec that all learners of a process share."""

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
"""Maximum number of runs cached in a process: its learners may be in several."""


@dataclass(frozen=True, slots=True)
class RunAssignment:
    """Assignment of one learner to a run.

    Attributes:
        run_id: run id.
        spec: run spec.
        n_features: features of a record.
        index: this learner's index.
        name: this learner's name, under which its ledger counts.
        incarnation: incarnation of the process.

    Raises:
        RemoteProtocolError: the spec has no learner with this index, or gives it another name: under that name its budget
            would begin anew.
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
        if (assigned := self.spec.names[self.index]) != self.name:
            raise RemoteProtocolError(f"learner {self.name!r} must be assigned under its own name, got {assigned!r}")

    @classmethod
    def from_wire(
        cls, run_id: str, assignment: Assignment, identity: StoreIdentity, config: LearnerConfig
    ) -> RunAssignment:
        """Validate an assignment from the coordinator. Its run id becomes part of a file name.

        Raises:
            RemoteProtocolError: it contradicts itself, or is for another learner.
            SpecError: the run spec is not valid, or names code that may not be imported.
        """
        specs.require_run_id(run_id)
        config.policy.require_allowed_imports(_parse_document(assignment.spec))
        spec = _parse_spec(assignment.spec, imports=config.allow_imports)
        return cls(run_id, spec, assignment.n_features, assignment.index, identity.learner, identity.incarnation)

    @property
    def budget(self) -> float | None:
        """Maximum epsilon that the learner may spend in the run; None: no limit."""
        return self.spec.get_budget(self.index)

    @property
    def cached_run(self) -> CachedRun:
        """Objects shared with the other learners of this process."""
        return CachedRun.get_cached(self.spec, self.n_features)


# ---- objects shared by the learners of one process -------------------------------------------------------------------

_parse_document = lru_cache(_MAX_CACHED_RUNS)(specs.document_from_wire)


@lru_cache(_MAX_CACHED_RUNS)
def _parse_spec(text: str, *, imports: bool) -> RunSpec:
    """Return the spec of a document from the wire; equal documents give the same object."""
    return parse_spec(_parse_document(text), allow_imports=imports)


class CachedRun:
    """Read-only objects derived from a spec. Learners of one process share them: each network is held once.

    Args:
        spec: run spec.
        n_features: features of a record.
    """

    _known: ClassVar[deque[CachedRun]] = deque(maxlen=_MAX_CACHED_RUNS)

    def __init__(self, spec: RunSpec, n_features: int) -> None:
        self._spec, self._n_features = spec, n_features

    @classmethod
    def get_cached(cls, spec: RunSpec, n_features: int) -> CachedRun:
        """Return the entry for this spec object. Equality is not tested: comparing long specs costs as much as reading them."""
        for each in tuple(cls._known):  # another thread may use the cache
            if each._spec is spec and each._n_features == n_features:
                return each
        cls._known.append(cls(spec, n_features))
        return cls._known[-1]

    @cached_property
    def run(self) -> Run:
        """The run built from the spec; raises `SpecError` as `build_run` does."""
        return build_run(self._spec, self._n_features)

    @cached_property
    def plan_hash(self) -> bytes:
        """Plan hash, as computed by `sottovoce_rpc.specs`."""
        return specs.compute_plan_hash(self._spec, self._n_features)

    @cached_property
    def digests(self) -> NetworkDigests:
        """Digests of the networks of the run's rounds: enough for a window and for those that may be asked for again."""
        return NetworkDigests(self.run.network, 4 * min(self._spec.clock.window, self._spec.rounds))

    @cached_property
    def participation(self) -> ParticipationSchedule:
        """Participation of all learners by round."""
        return self._spec.participation
