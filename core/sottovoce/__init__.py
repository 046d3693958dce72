"""Differentially private decentralized online learning, and an eavesdropper that audits the wire.

Every name below is imported when it is first used, so that `import sottovoce` costs nothing and changes nothing in the process
that does it. Types: `__init__.pyi`.
"""

from importlib import import_module

__all__ = (
    "Audit",
    "DataError",
    "Experiment",
    "Guarantee",
    "LabelJoin",
    "Prequential",
    "Simulation",
    "SottovoceError",
    "SpecError",
    "Table",
    "__version__",
    "audit",
    "calibrate",
    "compare",
    "connect",
    "connect_learner",
    "load",
    "simulate",
    "sweep",
)

_PLACES = {
    "Audit": "sottovoce.auditing.audit",
    "DataError": "sottovoce.errors",
    "Experiment": "sottovoce.experiment",
    "Guarantee": "sottovoce.privacy.guarantee",
    "LabelJoin": "sottovoce.data.joining",
    "Simulation": "sottovoce.door",
    "SottovoceError": "sottovoce.errors",
    "SpecError": "sottovoce.errors",
    "Table": "sottovoce.table",
    "audit": "sottovoce.door",
    "calibrate": "sottovoce.door",
    "load": "sottovoce.experiment",
    "simulate": "sottovoce.door",
    # Of the client, which knows the network and this machine's processes. The core imports neither: it names them by string
    # alone, for who has the door has the whole house.
    "Prequential": "sottovoce_client.live.prequential",
    "compare": "sottovoce_client.running.compare",
    "connect": "sottovoce_client.deployment",
    "connect_learner": "sottovoce_client.live.connecting",
    "sweep": "sottovoce_client.running.sweep",
}
"""Where each name is defined."""


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("sottovoce")
    if name not in _PLACES:
        raise AttributeError(f"module 'sottovoce' has no attribute {name!r}")
    found: object = getattr(import_module(_PLACES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
