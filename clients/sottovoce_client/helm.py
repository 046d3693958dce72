"""Values of the Helm chart (deploy/helm/sottovoce) derived from run specs.

The chart's network policies allow each stream from the learner that opens it. The chart cannot compute graphs, so the edges
are derived here: the union over all rounds of the run's network, which may be directed, time-varying or have offline
intervals. The learner with the lower index of a pair opens the stream.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sottovoce_core.errors import SpecError
from sottovoce_core.spec import RunSpec
from sottovoce_core.yaml_files import write_yaml

HEADER = """\
# Written by `sottovoce spec values`. Values of your own go into another file: helm install -f THIS -f YOURS.
"""


def derive_chart_values(
    specs: Sequence[RunSpec], release_learners: Collection[str] = (), *, coordinator: bool = False
) -> dict[str, Any]:
    """Derive the values of a release from the specs of the runs to be started on it.

    Args:
        specs: Specs of these runs, at least one.
        release_learners: Learners of this release; empty, without `coordinator`: this release has all services.
        coordinator: True if this release has the coordinator but not all learners.

    Returns:
        Values. Addresses that only other owners know are left empty, and the chart rejects them until they are filled in.

    Raises:
        SpecError: A learner is in no spec, the runs have different capture modes, or a graph cannot be built.
        AssumptionViolated: A network violates its own conditions.
    """
    names = list(dict.fromkeys(name for spec in specs for name in spec.names))
    if unknown := [name for name in release_learners if name not in names]:
        raise SpecError(
            f"learners of the release must be of the run spec, got {unknown[0]!r}; there are {', '.join(names)}"
        )
    is_complete = not release_learners and not coordinator
    own = set(names if is_complete else release_learners)
    edges = [edge for edge in _edges(specs) if coordinator or own.intersection(edge)]
    connected = {name for edge in edges for name in edge} | (set(names) if coordinator else set())
    others = [name for name in names if name in connected - own]
    capture = _capture(specs)
    values: dict[str, Any] = {"learners": {name: {} for name in names if name in own}, "edges": edges}
    if others:
        values["elsewhere"] = {name: {"peers": []} for name in others}
    if not is_complete and not coordinator:
        external = {"elsewhere": {"address": "", "peers": []}}
        values |= {"coordinator": external, **({} if capture == "none" else {"eavesdropper": external})}
    return {**values, "capture": capture}


def format_yaml(values: dict[str, Any]) -> str:
    """Format values as a file for `helm install -f`."""
    return HEADER + write_yaml(values, flow=None)


def _edges(specs: Sequence[RunSpec]) -> list[list[str]]:
    """Return distinct `[caller, callee]` pairs in the order of the specs."""
    found: dict[tuple[str, str], None] = {}
    for spec in specs:
        network = spec.topology.build_network(spec.n_learners, spec.rounds, spec.participation)
        found |= {(spec.names[i], spec.names[j]): None for i, j in network.edges}
    return [list(edge) for edge in found]


def _capture(specs: Sequence[RunSpec]) -> str:
    """Return the capture mode of the runs.

    Raises:
        SpecError: The runs have different capture modes.
    """
    found = list(dict.fromkeys(spec.capture for spec in specs if spec.capture != "none"))
    if len(found) > 1:
        raise SpecError(f"runs of one release must have one capture mode, got {' and '.join(found)}")
    return found[0] if found else "none"
