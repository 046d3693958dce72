"""Checks of an algorithm against the interface before it runs, with errors that name the line of a user's own code."""

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
_DOCS_HINT = "see docs/guides/extending.md"


def require_algorithm(built: object, parameters: object, dim: int) -> tuple[Algorithm[Any], tuple[RunWarning, ...]]:
    """Return the result of `AlgorithmSpec.build` if it is an algorithm and its warnings.

    Args:
        built: the result.
        parameters: the object whose `build` returned it.
        dim: number of parameters of the run's loss.

    Raises:
        SpecError: it is something else, lacks a member, or its fields have no shapes.
    """
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[1], tuple)):
        raise SpecError(
            f"{_describe(parameters, 'build')} must return the algorithm and a tuple of warnings, such as (algorithm, ()), "
            f"got {_type_name(built)}; {_DOCS_HINT}"
        )
    algorithm, warnings = built
    if missing := [name for name in _METHODS if not callable(getattr(algorithm, name, None))]:
        raise SpecError(
            f"an algorithm must have the methods {', '.join(_METHODS)}, and {_describe(algorithm)} has no "
            f"{', '.join(missing)}; {_DOCS_HINT}"
        )
    name, own = (getattr(algorithm, each, None) for each in ("name", "dim"))
    if own != dim or not isinstance(name, str):
        raise SpecError(
            f"an algorithm must have a text `name` and `dim`, the number of parameters, which is {dim} here; "
            f"{_describe(algorithm)} has name {name!r} and dim {own!r}; {_DOCS_HINT}"
        )
    shapes: object = algorithm.field_shapes()
    if not (isinstance(shapes, Mapping) and shapes and all(map(_is_field, shapes.items()))):
        raise SpecError(
            f"{_describe(algorithm, 'field_shapes')} must return the shape of each field of a message by its name, such as "
            f"{{'y': ({dim},)}}, got {shapes!r}; {_DOCS_HINT}"
        )
    return algorithm, warnings


def require_emitted_message(algorithm: Algorithm[Any], result: object, lead: tuple[int, ...]) -> None:
    """Raise an error if the result of `emit` is not a state and a message with the declared fields.

    Args:
        algorithm: the algorithm.
        result: result of its `emit`.
        lead: lengths of the axes before those of a field.

    Raises:
        SpecError: it is no state and message, or the fields, their shapes or types differ from `field_shapes`.
    """
    method = _describe(algorithm, "emit")
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Message)):
        raise SpecError(f"{method} must return the state and a Message, got {_type_name(result)}; {_DOCS_HINT}")
    fields = result[1].fields
    expected = {name: (*lead, *shape) for name, shape in algorithm.field_shapes().items()}
    if fields.keys() != expected.keys():
        raise SpecError(
            f"{method} must return a message with the fields of field_shapes, {', '.join(expected)}, "
            f"got {', '.join(map(str, fields)) or 'none'}; {_DOCS_HINT}"
        )
    for name, shape in expected.items():
        _require_array(f"the field {name} of the message of {method}", fields[name], shape, lead)


def require_decision(algorithm: Algorithm[Any], decision: object, lead: tuple[int, ...]) -> None:
    """Raise an error for a decision with another shape or type than the model; arguments as in `require_emitted_message`.

    Raises:
        SpecError: the shape or type differs.
    """
    _require_array(f"the result of {_describe(algorithm, 'decision')}", decision, (*lead, algorithm.dim), lead)


def _require_array(subject: str, value: object, shape: tuple[int, ...], lead: tuple[int, ...]) -> None:
    if isinstance(value, np.ndarray) and value.dtype == np.float64 and value.shape == shape:
        return
    received = f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else _type_name(value)
    raise SpecError(
        f"{subject} must be float64 of shape {shape}, with {lead} for learners and replicas first, got {received}; {_DOCS_HINT}"
    )


def _is_field(item: tuple[object, object]) -> bool:
    name, shape = item
    return (
        isinstance(name, str)
        and isinstance(shape, tuple)
        and all(isinstance(n, int | np.integer) and n > 0 for n in shape)
    )


def _type_name(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_type_name, value))})"
    return "None" if value is None else type(value).__name__


def _describe(part: object, method: str = "") -> str:
    """Describe a user's class, or a method of it, with file name and line, but without the folder, which may be private."""
    owner = type(part)
    name = f"{owner.__module__}.{owner.__qualname__}{'.' * bool(method)}{method}"
    try:
        source = inspect.unwrap(getattr(owner, method)) if method else owner
        file, line = inspect.getsourcefile(source) or "", inspect.getsourcelines(source)[1]
    except (AttributeError, OSError, TypeError):  # defined without a file
        return name
    return f"{name} ({Path(file).name}:{line})"
