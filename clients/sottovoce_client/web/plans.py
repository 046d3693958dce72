"""What a run's spec says that does not change from look to look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from sottovoce.errors import SottovoceError, SpecError
from sottovoce.network.roster import Absence, Roster, names_of
from sottovoce.network.topology import Topology
from sottovoce.registry import ENDLESS
from sottovoce_rpc.specs import document_from_wire

_FEW_ROUNDS = 64
"""Of a network that changes more often, every edge is taken to lead both ways."""

Way = tuple[int, int]
"""From whom to whom: indices of learners."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known of a run from its spec; code that it names is not imported.

    Attributes:
        name: of the run.
        rounds: planned; None: no end is.
        algorithm: by name.
        learners: names.
        ways: who says something to whom; empty where only code of the run could tell.
        capture: how it is overheard: `none`, `relay`, `mirror` or `wiretap`.
        clock: its mode.
        period_s: of a round, where the clock paces them.
        live: whether records come while it goes on.
        lost: names of learners that the run goes on without.
    """

    name: str
    rounds: int | None
    algorithm: str
    learners: tuple[str, ...]
    ways: tuple[Way, ...]
    capture: str
    clock: str
    period_s: float | None
    live: bool
    lost: frozenset[str] = frozenset()


def plan_of(spec: str) -> Plan:
    """Read a spec as it crosses the wire.

    Raises:
        SpecError: it is not JSON, of a format that is none, or of a version that says things otherwise.
    """
    return plan_from(document_from_wire(spec))


def plan_from(document: Any) -> Plan:
    """Read a spec as YAML or JSON gives it.

    Raises:
        SpecError: it is of a version that says things otherwise.
    """
    try:
        return _plan(document)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise SpecError("the run's spec is of a version that this one cannot read") from None


def _plan(document: Any) -> Plan:
    names = names_of(document["learners"])
    absences = tuple(Absence(**each) for each in document.get("absences") or ())
    clock, algorithm = document.get("clock") or {}, document["algorithm"]
    return Plan(
        name=str(document.get("name") or "run"),
        rounds=None if document["rounds"] is None else int(document["rounds"]),
        algorithm=str(algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm),
        learners=names,
        ways=_ways(document, names, absences),
        capture=str(document.get("capture") or "none"),
        clock=str(clock.get("mode") or "free"),
        period_s=clock.get("period_s"),
        live=(document.get("data") or {}).get("source") == "live",
        lost=frozenset(each.learner for each in absences if each.unheard),
    )


def _ways(document: Mapping[str, Any], names: tuple[str, ...], absences: tuple[Absence, ...]) -> tuple[Way, ...]:
    """Who says something to whom in any round."""
    try:
        topology = Topology.model_validate(document.get("topology") or {})
        network = topology.network(len(names), int(document["rounds"] or ENDLESS), Roster(names, absences))
        if network.horizon > _FEW_ROUNDS:
            return tuple(way for i, j in network.edges for way in ((i, j), (j, i)))
        heard = np.any([network.at(t).neighbours > 0 for t in range(network.horizon)], axis=0)
    except (SottovoceError, ValidationError):  # a graph of one's own, which only its code could tell
        return ()
    return tuple((int(speaker), int(listener)) for speaker, listener in np.argwhere(heard.T))
