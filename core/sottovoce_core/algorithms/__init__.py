"""Algorithms, by their name in a spec. To add one: its family's folder here, and a line below.

Another package offers its own by an entry point of the group `sottovoce.algorithms`, and a spec may name any importable
subclass of `AlgorithmSpec` as `module:Class`.
"""

from typing import Annotated

from pydantic import SerializeAsAny

from sottovoce_core.algorithms.run_context import AlgorithmSpec
from sottovoce_core.registry import Registry

ALGORITHMS = Registry(
    AlgorithmSpec,
    {
        "ldp-dol": "sottovoce_core.algorithms.ldp_dol.parameters:LdpDolSpec",
        "dsgd": "sottovoce_core.algorithms.gradient_descent.parameters:DsgdSpec",
        "dola": "sottovoce_core.algorithms.gradient_descent.parameters:DolaSpec",
        "pdop": "sottovoce_core.algorithms.gradient_descent.parameters:PdopSpec",
        "dpdola": "sottovoce_core.algorithms.gradient_descent.parameters:DpdolaSpec",
        "pd-ogd": "sottovoce_core.algorithms.gradient_descent.parameters:PdOgdSpec",
        "d-ogd": "sottovoce_core.algorithms.gradient_descent.parameters:DOgdSpec",
        "dpsr": "sottovoce_core.algorithms.gradient_descent.parameters:DpsrSpec",
        "dpsda-c": "sottovoce_core.algorithms.dual_averaging.parameters:DpsdaCSpec",
        "dpsda-ps": "sottovoce_core.algorithms.dual_averaging.parameters:DpsdaPsSpec",
        "dpcda": "sottovoce_core.algorithms.dual_averaging.parameters:DpcdaSpec",
        "dpps": "sottovoce_core.algorithms.dual_averaging.parameters:DppsSpec",
        "pd-ftgl": "sottovoce_core.algorithms.follow_the_leader.parameters:PdFtglSpec",
        "pd-ocg": "sottovoce_core.algorithms.follow_the_leader.parameters:PdOcgSpec",
        "d-ftgl": "sottovoce_core.algorithms.follow_the_leader.d_ftgl:DFtglSpec",
        "admm": "sottovoce_core.algorithms.admm.parameters:AdmmSpec",
        "dvp": "sottovoce_core.algorithms.admm.parameters:DvpSpec",
        "pvp": "sottovoce_core.algorithms.admm.parameters:PvpSpec",
    },
    group="algorithms",
    key="name",
)

AnyAlgorithm = Annotated[SerializeAsAny[AlgorithmSpec], ALGORITHMS]
"""Type of a spec field that holds the parameters of an algorithm, selected by its `name`."""

__all__ = ["ALGORITHMS", "AlgorithmSpec", "AnyAlgorithm"]
