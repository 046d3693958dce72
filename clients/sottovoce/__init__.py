"""Differentially private decentralized online learning, and an eavesdropper that audits the wire.

Names are imported on first use, so that `import sottovoce` loads no other module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sottovoce_client.deployment import connect as connect
    from sottovoce_client.live.connect import connect_learner as connect_learner
    from sottovoce_client.live.prequential import PrequentialEvaluation as PrequentialEvaluation
    from sottovoce_client.runs.compare import compare as compare
    from sottovoce_client.runs.sweep import sweep as sweep
    from sottovoce_client.runs.tracking import track as track
    from sottovoce_core.api import Simulation as Simulation
    from sottovoce_core.api import audit as audit
    from sottovoce_core.api import calibrate as calibrate
    from sottovoce_core.api import simulate as simulate
    from sottovoce_core.auditing.audit import Audit as Audit
    from sottovoce_core.data.label_join import LabelJoin as LabelJoin
    from sottovoce_core.errors import DataError as DataError
    from sottovoce_core.errors import SottovoceError as SottovoceError
    from sottovoce_core.errors import SpecError as SpecError
    from sottovoce_core.experiment import Experiment as Experiment
    from sottovoce_core.experiment import load as load
    from sottovoce_core.privacy.guarantee import Guarantee as Guarantee
    from sottovoce_core.results import InterruptedSimulation as InterruptedSimulation
    from sottovoce_core.results import Results as Results
    from sottovoce_core.results import read_results as read_results
    from sottovoce_core.table import Table as Table

    __version__: str

_MODULES = {
    "sottovoce_client.deployment": ("connect",),
    "sottovoce_client.live.connect": ("connect_learner",),
    "sottovoce_client.live.prequential": ("PrequentialEvaluation",),
    "sottovoce_client.runs.compare": ("compare",),
    "sottovoce_client.runs.sweep": ("sweep",),
    "sottovoce_client.runs.tracking": ("track",),
    "sottovoce_core.auditing.audit": ("Audit",),
    "sottovoce_core.data.label_join": ("LabelJoin",),
    "sottovoce_core.api": ("Simulation", "audit", "calibrate", "simulate"),
    "sottovoce_core.errors": ("DataError", "SottovoceError", "SpecError"),
    "sottovoce_core.experiment": ("Experiment", "load"),
    "sottovoce_core.privacy.guarantee": ("Guarantee",),
    "sottovoce_core.results": ("InterruptedSimulation", "Results", "read_results"),
    "sottovoce_core.table": ("Table",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]


if not TYPE_CHECKING:  # type checkers would accept any name as an attribute

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            return version("sottovoce")
        if name not in _MODULE_OF:
            from sottovoce_core.text import suggest_name

            hint = "" if name.startswith("_") else f": it has {', '.join(__all__)}{suggest_name(name, __all__)}"
            raise AttributeError(f"module 'sottovoce' has no attribute {name!r}{hint}", name=name, obj=None)
        found: object = getattr(import_module(_MODULE_OF[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
