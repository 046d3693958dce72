"""The algorithms, by the name that a spec gives.

A built-in algorithm has a line in `BUILT_IN`. A package of somebody else's offers its own by an entry point of the group
`sottovoce.algorithms`, and a spec may name any importable class as `module:Class`: a subclass of `spec.AlgorithmSpec`.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from importlib.metadata import entry_points

from sottovoce.algorithms.parameters import AlgorithmSpec
from sottovoce.errors import SpecError

ENTRY_POINTS = "sottovoce.algorithms"

BUILT_IN = {
    "ldp-dol": "sottovoce.algorithms.ldp_dol.parameters:LdpDolSpec",
    "dsgd": "sottovoce.algorithms.gradient_descent.parameters:DsgdSpec",
    "dola": "sottovoce.algorithms.gradient_descent.parameters:DolaSpec",
    "pdop": "sottovoce.algorithms.gradient_descent.parameters:PdopSpec",
    "dpdola": "sottovoce.algorithms.gradient_descent.parameters:DpdolaSpec",
    "pd-ogd": "sottovoce.algorithms.gradient_descent.parameters:PdOgdSpec",
    "d-ogd": "sottovoce.algorithms.gradient_descent.parameters:DOgdSpec",
    "dpsr": "sottovoce.algorithms.gradient_descent.parameters:DpsrSpec",
    "dpsda-c": "sottovoce.algorithms.dual_averaging.parameters:DpsdaCSpec",
    "dpsda-ps": "sottovoce.algorithms.dual_averaging.parameters:DpsdaPsSpec",
    "dpcda": "sottovoce.algorithms.dual_averaging.parameters:DpcdaSpec",
    "dpps": "sottovoce.algorithms.dual_averaging.parameters:DppsSpec",
    "pd-ftgl": "sottovoce.algorithms.follow_the_leader.parameters:PdFtglSpec",
    "pd-ocg": "sottovoce.algorithms.follow_the_leader.parameters:PdOcgSpec",
    "d-ftgl": "sottovoce.algorithms.follow_the_leader.d_ftgl:DFtglSpec",
    "admm": "sottovoce.algorithms.admm.parameters:AdmmSpec",
    "dvp": "sottovoce.algorithms.admm.parameters:DvpSpec",
    "pvp": "sottovoce.algorithms.admm.parameters:PvpSpec",
}


def spec_class(name: str) -> type[AlgorithmSpec]:
    """The class of an algorithm's parameters.

    Raises:
        SpecError: there is no such algorithm, or it cannot be imported.
    """
    offered = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    where = BUILT_IN.get(name) or offered.get(name) or (name if ":" in name else None)
    if where is None:
        known = ", ".join(sorted({*BUILT_IN, *offered}))
        near = difflib.get_close_matches(name, {*BUILT_IN, *offered}, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise SpecError(f"algorithm.name must be one of {known}, or module:Class of your own, got {name!r}{hint}")
    module, _, attribute = where.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SpecError(
            f"algorithm.name: cannot import {where!r}: {error}; is it installed, or its folder in PYTHONPATH?"
        ) from None
    if not (isinstance(found, type) and issubclass(found, AlgorithmSpec)):
        raise SpecError(f"algorithm.name: {where!r} must be a subclass of sottovoce.spec.AlgorithmSpec, got {found!r}")
    return found


def spec_classes() -> dict[str, type[AlgorithmSpec]]:
    """All built-in algorithms."""
    return {name: spec_class(name) for name in BUILT_IN}
