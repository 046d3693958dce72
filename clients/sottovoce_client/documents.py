"""Files for programs: JSON of plain values, dataclasses and arrays."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

from pydantic_core import to_json, to_jsonable_python


def page_json(document: Any) -> bytes:
    """JSON for a page, on one line; numbers that are not finite stand as text, which scripts make numbers of."""
    return json.dumps(_finite(to_jsonable_python(document)), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def write_json(path: Path, document: Any, *, not_finite: Literal["null", "constants"] = "null") -> None:
    """Write a document: a mapping or a dataclass, of such, of lists and of arrays.

    Args:
        path: the file.
        document: what it says.
        not_finite: how numbers stand in it that are not finite: as null, for JSON knows no infinity, or as `Infinity` and `NaN`.
    """
    path.write_bytes(
        to_json(document, indent=2, inf_nan_mode=not_finite, fallback=lambda array: array.tolist()) + b"\n"
    )
