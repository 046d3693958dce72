"""The one condition that every algorithm's noise has to meet: float64 and the wire can carry it."""

from __future__ import annotations

from collections.abc import Iterable

from sottovoce.errors import require
from sottovoce.noise import LARGEST_SCALE, SMALLEST_SCALE


def require_scales(scales: Iterable[float], code: str = "NOISE_SCALE") -> None:
    """Refuse noise that would not be drawn as it is charged.

    A scale that overflows would be charged as infinite noise, and one that underflows drawn as none.

    Args:
        scales: of all planned rounds, or the smallest and the largest; 0: no noise, and no promise.
        code: what the condition is called.

    Raises:
        CheckFailed: one of them lies outside the range, or is not a number.
    """
    text = f"the noise scale must stay within [{SMALLEST_SCALE:.0e}, {LARGEST_SCALE:.0e}] in all rounds"
    for scale in scales:
        require(scale == 0.0 or SMALLEST_SCALE <= scale <= LARGEST_SCALE, code, f"{text}, or be 0, got {scale:.3g}")
