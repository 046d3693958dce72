"""Texts as numbers that a classifier can use."""

from __future__ import annotations

import math
from hashlib import blake2b


def bucket(text: str) -> int:
    """A number below 256 that tells a text from most others."""
    return blake2b(text.encode(errors="replace"), digest_size=1).digest()[0]


def bits(text: str) -> list[float]:
    """`bucket` as eight numbers."""
    return [float(bucket(text) >> k & 1) for k in range(8)]


def parsed(text: str) -> float:
    """The number that a text is; 0 if it is none, or none that a classifier could use."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return min(max(value, -1e100), 1e100) if math.isfinite(value) else 0.0
