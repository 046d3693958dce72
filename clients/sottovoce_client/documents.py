"""Files for programs: JSON of plain values, dataclasses and arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic_core import to_json


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
