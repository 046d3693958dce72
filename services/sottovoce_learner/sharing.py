"""What learners of one process have in common: a spec that all of them are told is read once, and its run built once.

It follows from the spec alone, and nobody changes it. Many learners would else hold as many copies of one network.
"""

from __future__ import annotations

from functools import lru_cache

from sottovoce_core.network.network import Digests, Network
from sottovoce_core.network.roster import Roster
from sottovoce_core.running.run import Run, build_run
from sottovoce_core.spec import RunSpec, parse_spec
from sottovoce_rpc import specs

_KEPT = 4
"""Runs at a time: learners of one process may be in several."""

document_of = lru_cache(_KEPT)(specs.document_from_wire)
"""As `document_from_wire`."""


@lru_cache(_KEPT)
def spec_of(text: str, *, imports: bool) -> RunSpec:
    """The spec of a document from the wire.

    Raises:
        SpecError: as `document_from_wire` and `parse_spec`.
    """
    return parse_spec(document_of(text), imports=imports)


class _Same:
    """This very spec, and none that is equal to it: comparing long ones would cost as much as reading them."""

    __slots__ = ("spec",)

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec

    def __hash__(self) -> int:
        return id(self.spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.spec is self.spec


def run_of(spec: RunSpec, n_features: int) -> Run:
    """As `build_run`."""
    return _run_of(_Same(spec), n_features)


def plan_hash(spec: RunSpec, n_features: int) -> bytes:
    """As that of `sottovoce_rpc.specs`."""
    return _plan_hash(_Same(spec), n_features)


def digests_of(run: Run) -> Digests:
    """Of the networks of its rounds, for a window and those that may be asked for again."""
    return _digests_of(_Same(run.spec), run.network)


def roster_of(spec: RunSpec) -> Roster:
    """Who takes part when."""
    return _roster_of(_Same(spec))


@lru_cache(_KEPT)
def _run_of(same: _Same, n_features: int) -> Run:
    return build_run(same.spec, n_features)


@lru_cache(_KEPT)
def _plan_hash(same: _Same, n_features: int) -> bytes:
    return specs.plan_hash(same.spec, n_features)


@lru_cache(_KEPT)
def _digests_of(same: _Same, network: Network) -> Digests:
    return Digests(network, 4 * min(same.spec.clock.window, same.spec.rounds))


@lru_cache(_KEPT)
def _roster_of(same: _Same) -> Roster:
    return same.spec.roster
