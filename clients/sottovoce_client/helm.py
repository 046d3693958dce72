"""Values of the Helm chart (deploy/helm/sottovoce) that follow from run specs.

The chart's network policies let through who opens a stream to whom. A chart knows no graphs, and nobody should write edges by
hand: they are those of the run's own network, of all its rounds together, whether it is directed, changes or has absences. Of a
pair the learner with the lower index opens the stream.
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
    """What a release needs to know of the runs that are to be started on it.

    Args:
        specs: of these runs, at least one.
        own: learners of this release; none, and no coordinator: all of it is of this release.
        coordinator: whether this release has the coordinator, where it has not all learners.

    Returns:
        Values. What nobody but its owner knows, where others are, is left empty, which the chart refuses.

    Raises:
        SpecError: a name that no spec has, runs that are captured in different ways, or a graph that cannot be built.
        AssumptionViolated: a network's own conditions.
    """
    names = list(dict.fromkeys(name for spec in specs for name in spec.names))
    if unknown := [name for name in release_learners if name not in names]:
        raise SpecError(
            f"learners of the release must be of the run spec, got {unknown[0]!r}; there are {', '.join(names)}"
        )
    whole = not release_learners and not coordinator
    here = set(names if whole else release_learners)
    edges = [edge for edge in _edges(specs) if coordinator or here.intersection(edge)]
    near = {name for edge in edges for name in edge} | (set(names) if coordinator else set())
    others = [name for name in names if name in near - here]
    capture = _capture(specs)
    values: dict[str, Any] = {"learners": {name: {} for name in names if name in here}, "edges": edges}
    if others:
        values["elsewhere"] = {name: {"peers": []} for name in others}
    if not whole and not coordinator:
        away = {"elsewhere": {"address": "", "peers": []}}
        values |= {"coordinator": away, **({} if capture == "none" else {"eavesdropper": away})}
    return {**values, "capture": capture}


def format_yaml(values: dict[str, Any]) -> str:
    """Values as a file for `helm install -f`."""
    return HEADER + write_yaml(values, flow=None)


def _edges(specs: Sequence[RunSpec]) -> list[list[str]]:
    """`[caller, callee]`, each once, in the order of the specs."""
    found: dict[tuple[str, str], None] = {}
    for spec in specs:
        network = spec.topology.build_network(spec.n_learners, spec.rounds, spec.participation)
        found |= {(spec.names[i], spec.names[j]): None for i, j in network.edges}
    return [list(edge) for edge in found]


def _capture(specs: Sequence[RunSpec]) -> str:
    """How the runs are captured.

    Raises:
        SpecError: in different ways.
    """
    found = list(dict.fromkeys(spec.capture for spec in specs if spec.capture != "none"))
    if len(found) > 1:
        raise SpecError(f"runs of one release must be captured in one way, got {' and '.join(found)}")
    return found[0] if found else "none"
