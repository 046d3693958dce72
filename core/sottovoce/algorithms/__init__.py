"""The algorithms, by the name that a spec gives. To add one: its family's folder here, and a line below.

A package of somebody else's offers its own by an entry point of the group `sottovoce.algorithms`, and a spec may name any
importable class as `module:Class`: a subclass of `AlgorithmSpec`.
"""

from typing import Annotated

from pydantic import SerializeAsAny

from sottovoce.algorithms.setting import AlgorithmSpec
from sottovoce.registry import Registry

ALGORITHMS = Registry(
    AlgorithmSpec,
    {
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
    },
    group="algorithms",
    key="name",
)

AnyAlgorithm = Annotated[SerializeAsAny[AlgorithmSpec], ALGORITHMS]
"""A field of a spec: the parameters of the algorithm that it names."""

__all__ = ["ALGORITHMS", "AlgorithmSpec", "AnyAlgorithm"]
