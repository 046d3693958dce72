"""The page of `sottovoce gallery`: pictures of what was rebuilt, and the ROC of guesses."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.errors import get_extra
from sottovoce_client.lab.gallery.cases import Gallery, Membership, Strip
from sottovoce_client.reports.drawing import Figure
from sottovoce_client.reports.marks import FAINT, PALETTE, RULE, Axis, View, line, rule, thinned
from sottovoce_client.reports.page import Column, Page, PageTable
from sottovoce_client.wording import NOTHING, number, share

SHOWN = 8
"""Pictures in a row."""
_LEAST_ERROR = 1e-9
"""A mean squared error below it is rounding."""
GET_TORCH = get_extra("torch")
TITLES = {
    "linear": "Read off a gradient",
    "network": "Searched for in a network’s gradient",
    "gossip": "Overheard in gossip",
    "capture": "Rebuilt from a capture",
}
"""Of attacks."""


class _Image(NamedTuple):
    """A picture, its size in pixels of the page, and what it is of."""

    data: str
    width: int
    height: int
    label: str


def gallery_page(shown: Gallery) -> Page:
    """All attacks, and all guesses."""
    attacked = [(each.name, each.strips, list(_rows(each.strips)), _faded_at(each.strips)) for each in shown.exhibits]
    first = [strips[0].rebuilt for _, strips, _, _ in attacked if strips]
    values = {
        "source": shown.source,
        "attacked": attacked,
        "titles": TITLES,
        "total": sum(len(each.pictures) for each in first),
        "right": round(sum(each.found * len(each.pictures) for each in first)),
        "get_torch": GET_TORCH,
        "runs": shown.memberships[0].guessed.runs if shown.memberships else 0,
    }
    return Page("gallery.html.j2", [_guesses(shown.memberships), _roc(shown.memberships)], values)


# ---- pictures --------------------------------------------------------------------------------------------------------


def _faded_at(strips: Sequence[Strip]) -> Strip | None:
    """The first strip whose pictures are gone."""
    return next((each for each in strips[1:] if each.rebuilt.found < 0.05), None)


def _rows(strips: Sequence[Strip]) -> Iterator[tuple[str, list[_Image], Sequence[str]]]:
    """The true records, and what was made of them in each transcript: a label, pictures, figures."""
    if strips:
        yield "the true records", _images(strips[0].rebuilt.originals, "the true records"), ("",) * 4
    for each in strips:
        made = each.rebuilt
        error = number(made.error, 2) if made.error >= _LEAST_ERROR else "< 1e−9"
        yield (
            each.label,
            _images(made.pictures, each.label),
            (error, number(made.alike, 2), share(made.found), share(made.told)),
        )


def _images(pictures: FloatArray, label: str) -> list[_Image]:
    """Square where the number of features is a square, else one line."""
    side = math.isqrt(pictures.shape[1])
    square = side * side == pictures.shape[1]
    shape, size = ((side, side), (56, 56)) if square else ((1, pictures.shape[1]), (72, 28))
    return [_Image(base64.b64encode(png(each.reshape(shape))).decode(), *size, label) for each in pictures[:SHOWN]]


def png(values: FloatArray) -> bytes:
    """A grey PNG of values in [0, 1] (1 is black), or in [-1, 1] where some are negative; one pixel a value."""
    ink = (values + 1.0) / 2.0 if (values < 0).any() else values
    grey = np.rint(255.0 * (1.0 - np.clip(ink, 0.0, 1.0))).astype(np.uint8)
    lines = b"".join(b"\0" + line.tobytes() for line in grey)
    header = struct.pack(">IIBBBBB", grey.shape[1], grey.shape[0], 8, 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


# ---- membership ------------------------------------------------------------------------------------------------------


def _guesses(rows: Sequence[Membership]) -> PageTable:
    texts = ("algorithm, decisions", "records", "seen")
    columns = [Column(head, kind="text") for head in texts]
    columns += [Column(head) for head in ("right guesses", "95 % interval", "ε at least", "ε claimed", "allows")]
    cells = [
        (
            each.algorithm,
            each.record,
            each.seen,
            share(each.guessed.rate),
            f"{share(each.guessed.low).removesuffix(' %')}{NOTHING}{share(each.guessed.high)}",
            number(each.guessed.bound, 3),
            number(each.claim) if each.covered else "none",
            share(1.0 / (1.0 + math.exp(-each.claim))) if each.covered else "100.0 %",
        )
        for each in rows
    ]
    return PageTable("guesses", "Was this record learned?", columns, cells)


def _roc(rows: Sequence[Membership]) -> Figure:
    """Every row's ROC, and the regions that the claims leave."""
    title = "Guesses of membership"
    marks = [rule([0, 1], [0, 1], "a coin", RULE, "solid")]
    claims = sorted({round(each.claim, 6) for each in rows if each.covered})
    for claim, dash in zip(claims, ("dot", "dash", "dashdot"), strict=False):
        corner, most = 1.0 / (1.0 + math.exp(claim)), f"most that ε = {number(claim)} allows"
        marks.append(rule([0, corner, 1], [0, 1 - corner, 1], most, FAINT, dash))
    for each, colour in zip(rows, PALETTE, strict=False):
        kept = thinned(len(each.guessed.false_alarms))
        name = f"{each.algorithm}, ε = {number(each.claim)}: {each.record}, from {each.seen}"
        marks.append(line(each.guessed.false_alarms[kept], each.guessed.detections[kept], name, colour))
    axes = (Axis(what, low=0.0, high=1.005, form="share") for what in ("false alarms", "detections"))
    return Figure("roc", title, marks if rows else (), (View("", *axes),), height=420)
