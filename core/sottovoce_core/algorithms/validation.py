"""What an algorithm must have and say, held against one before it runs: somebody's own may be wrong, and is told where."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce_core.algorithms.interface import Algorithm, Message
from sottovoce_core.algorithms.run_context import RunWarning
from sottovoce_core.errors import SpecError

_METHODS = ("field_shapes", "init", "emit", "update", "decision", "replay", "noise_scale", "accountant")
_DOCS_HINT = "see docs/own-algorithm.md"


def require_algorithm(built: object, parameters: object, dim: int) -> tuple[Algorithm[Any], tuple[RunWarning, ...]]:
    """What `AlgorithmSpec.build` gave, if it is an algorithm and its caveats.

    Args:
        built: what came.
        parameters: whose `build` it was.
        dim: number of parameters of the run's loss.

    Raises:
        SpecError: it is something else, or misses a part, or its fields have no shapes.
    """
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[1], tuple)):
        raise SpecError(
            f"{_named(parameters, 'build')} must return the algorithm and a tuple of caveats, such as (algorithm, ()), "
            f"got {_kind(built)}; {_DOCS_HINT}"
        )
    algorithm, caveats = built
    if missing := [name for name in _METHODS if not callable(getattr(algorithm, name, None))]:
        raise SpecError(
            f"an algorithm must have the methods {', '.join(_METHODS)}, and {_named(algorithm)} has no "
            f"{', '.join(missing)}; {_DOCS_HINT}"
        )
    name, own = (getattr(algorithm, each, None) for each in ("name", "dim"))
    if own != dim or not isinstance(name, str):
        raise SpecError(
            f"an algorithm must have a text `name` and `dim`, the number of parameters, which is {dim} here; "
            f"{_named(algorithm)} has name {name!r} and dim {own!r}; {_DOCS_HINT}"
        )
    shapes: object = algorithm.field_shapes()
    if not (isinstance(shapes, Mapping) and shapes and all(map(_is_field, shapes.items()))):
        raise SpecError(
            f"{_named(algorithm, 'field_shapes')} must return the shape of each field of a message by its name, such as "
            f"{{'y': ({dim},)}}, got {shapes!r}; {_DOCS_HINT}"
        )
    return algorithm, caveats


def require_emitted_message(algorithm: Algorithm[Any], result: object, lead: tuple[int, ...]) -> None:
    """Refuse what `speak` returned where its message has not the fields that the algorithm says.

    Args:
        algorithm: who spoke.
        spoken: what it returned.
        lead: the axes before those of a field.

    Raises:
        SpecError: it is no state with a message, or the fields, their shapes or types are others.
    """
    who = _named(algorithm, "speak")
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Message)):
        raise SpecError(f"{who} must return the state and a Message, got {_kind(result)}; {_DOCS_HINT}")
    said = result[1].fields
    wanted = {name: (*lead, *shape) for name, shape in algorithm.field_shapes().items()}
    if said.keys() != wanted.keys():
        raise SpecError(
            f"{who} must say the fields of field_shapes, {', '.join(wanted)}, got {', '.join(map(str, said)) or 'none'}; {_DOCS_HINT}"
        )
    for name, shape in wanted.items():
        _require_array(f"the field {name} that {who} says", said[name], shape, lead)


def require_decision(algorithm: Algorithm[Any], decision: object, lead: tuple[int, ...]) -> None:
    """Refuse a decision of another shape than the model's; as `require_emitted_message`.

    Raises:
        SpecError: it is.
    """
    _require_array(f"what {_named(algorithm, 'decision')} returns", decision, (*lead, algorithm.dim), lead)


def _require_array(what: str, value: object, shape: tuple[int, ...], lead: tuple[int, ...]) -> None:
    if isinstance(value, np.ndarray) and value.dtype == np.float64 and value.shape == shape:
        return
    came = f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else _kind(value)
    raise SpecError(
        f"{what} must be float64 of shape {shape}, {lead} for learners and replicas before its own, got {came}; {_DOCS_HINT}"
    )


def _is_field(item: tuple[object, object]) -> bool:
    name, shape = item
    return (
        isinstance(name, str)
        and isinstance(shape, tuple)
        and all(isinstance(n, int | np.integer) and n > 0 for n in shape)
    )


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_kind, value))})"
    return "None" if value is None else type(value).__name__


def _named(part: object, method: str = "") -> str:
    """A class of somebody's, or a method of it, with file and line; not its folder, for others may read this."""
    owner = type(part)
    name = f"{owner.__module__}.{owner.__qualname__}{'.' * bool(method)}{method}"
    try:
        source = inspect.unwrap(getattr(owner, method)) if method else owner
        file, line = inspect.getsourcefile(source) or "", inspect.getsourcelines(source)[1]
    except (AttributeError, OSError, TypeError):  # made without a file
        return name
    return f"{name} ({Path(file).name}:{line})"
