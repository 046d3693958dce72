"""The file behind `--noise-law`: what is claimed of the noise in decoded fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from sottovoce.auditing.conversation import Decoded
from sottovoce.errors import SpecError
from sottovoce.lab.foreign.noise import Centre, NoiseClaim
from sottovoce.registry import load
from sottovoce.yaml_files import document_of, fields_of, text_of

_KEYS = {"law", "scale", "centre"}
_WHAT = "a file of noise claims"


def load_noise(path: Path) -> dict[str, NoiseClaim]:
    """Read the claims of a file, by decoded field.

    Raises:
        SpecError: it cannot be read, or does not say what it should.
    """
    document = document_of(text_of(path, _WHAT), str(path), _WHAT)
    if not document:
        raise SpecError(f"{path} must name decoded fields, got none")
    found = {}
    for name, given in document.items():
        where = f"{path}, {name}"
        found[str(name)] = _claim(fields_of(given, where, "a noise claim"), where)
    return found


def _claim(fields: Mapping[Any, Any], where: str) -> NoiseClaim:
    if extra := sorted(map(str, fields.keys() - _KEYS)):
        raise SpecError(f"{where}: a noise claim has law, scale and centre, got {extra[0]}")
    law = fields.get("law")
    if law not in ("laplace", "gaussian"):
        raise SpecError(f"{where}: law must be laplace or gaussian, got {law}")
    scale = fields.get("scale")
    scales = [float(each) for each in (scale if isinstance(scale, list) else [scale]) if _is_number(each)]
    if not scales or min(scales) <= 0.0 or (isinstance(scale, list) and len(scales) < len(scale)):
        raise SpecError(
            f"{where}: scale must be a number above 0, or a list of them, one for each message, got {scale}"
        )
    return NoiseClaim(law, tuple(scales), _centre(fields.get("centre"), f"{where}: centre"))


def _centre(given: Any, where: str) -> Centre | None:
    """Numbers for both worlds, by world, or a function's; None: not known."""
    if given is None:
        return None
    if isinstance(given, str):
        found: Callable[[int, Decoded, Sequence[Decoded]], Any] = load(given, where)
        if not callable(found):
            raise SpecError(f"{where}: {given!r} must be a function, got {type(found).__name__}")
        return found
    by_world = given if isinstance(given, Mapping) else {0: given, 1: given}
    if set(by_world) != {0, 1} or not all(map(_are_numbers, by_world.values())):
        raise SpecError(
            f"{where} must be numbers, numbers of each world ({{0: [1.0], 1: [2.0]}}), or module:function, got {given}"
        )
    return lambda world, message, before: by_world[world]


def _are_numbers(values: Any) -> bool:
    return all(map(_is_number, values if isinstance(values, list) else [values]))


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
