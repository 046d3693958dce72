"""The picture of what was overheard, and pictures of bare numbers."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.arrays import FloatArray, as_floats
from sottovoce_client.reports.drawing import Figure, View, rounds_across, thinned
from sottovoce_client.reports.marks import Axis, Mark
from sottovoce_client.reports.tables import Column, PageTable
from sottovoce_client.wording import number

MOST_HEARD = (500, 200)
"""Rounds and coordinates that a heatmap shows at most."""
_LOUD = 8.0
"""Noise scales that a number of noise alone exceeds too seldom to be seen: Laplace noise does once in 3,000."""
_BELOW, _ABOVE = (0x1F, 0x6F, 0xC0), (0xD6, 0x4A, 0x1C)
_MOST_ROWS = 8


def heard_figure(heard: FloatArray) -> Figure:
    """What one learner said: rounds across, coordinates down; blue below zero, red above, extreme values clipped."""
    rounds, coordinates = (thinned(n, most) for n, most in zip(heard.shape, MOST_HEARD, strict=True))
    shown = heard[np.ix_(rounds, coordinates)].T
    reach = _reach(shown) or 1.0
    part = np.nan_to_num(np.clip(shown / reach, -1, 1))
    # Colour grows out of the page's own ground, light or dark.
    pixels = np.empty((*part.shape, 4), dtype=np.uint8)
    pixels[..., :3] = np.where((part < 0)[..., None], _BELOW, _ABOVE)
    pixels[..., 3] = np.rint(255 * np.abs(part))
    ends = [as_floats(np.array([0.5, n + 0.5])) for n in heard.shape]
    sides = [rounds_across(low=0.5, high=ends[0][1]), Axis("coordinate", low=ends[1][1], high=0.5, form="count")]
    picture = Mark("image", ends[0], ends[1], image=png(pixels))
    scale = [
        Mark("bars", np.zeros(0), np.zeros(0), f"{sign}{number(reach, 2)} and beyond", colour)
        for sign, colour in (("−", "heard-below"), ("", "heard-above"))
    ]
    return Figure("heard", "What was recorded", [picture, *scale], (View("", *sides),), 320, _numbers(heard))


def _reach(heard: FloatArray) -> float:
    """What 2 % of the numbers lie beyond, whatever their sign; 0 of none."""
    known = np.abs(heard[np.isfinite(heard)])
    return float(np.quantile(known, 0.98)) if known.size else 0.0


def loud(heard: FloatArray, scale: float) -> bool:
    """Whether what was said is more than noise of this scale, at a glance."""
    return _reach(heard) > _LOUD * scale


def _numbers(heard: FloatArray) -> PageTable:
    """What was said in a few of the rounds, in short."""
    rows = []
    for t in thinned(len(heard), _MOST_ROWS).tolist():
        known = heard[t][np.isfinite(heard[t])]
        spread: list[Any] = [float(f(known)) if known.size else None for f in (np.min, np.median, np.max)]
        rows.append((f"{t + 1:,}", *spread))
    heads = ("smallest number", "median", "largest")
    return PageTable(
        "numbers-heard", "What was recorded", (Column("round"), *(Column(head, number) for head in heads)), rows
    )


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG of `(rows, columns)` greys, or of `(rows, columns, 4)` colours with their opacity."""
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 6 if pixels.ndim == 3 else 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
