"""Marks as SVG that is as wide as the page gives it: lines stretch, and text, dots and widths of lines do not.

Places are shares of the plot's width and height. What stretches lies in an inner drawing of `_UNITS` each way.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce_client.reports.marks import Mark, Scale

_UNITS = 10_000
_FAR = 50 * _UNITS
_FEW_POINTS = 25
"""A curve of so many points, or fewer, shows them."""
_SHAPES = {"circle": "", "diamond": "M-7 0L0-7L7 0L0 7Z", "cross": "M-4-4L4 4M-4 4L4-4"}


def stretched(pieces: Iterable[str], more: str = "") -> str:
    """Pieces in the inner drawing, outside of which nothing of them is seen."""
    size = f'viewBox="0 0 {_UNITS} {_UNITS}" width="100%" height="100%" preserveAspectRatio="none"'
    return f"<svg {size}{more}>{''.join(pieces)}</svg>"


def grid(across: Scale, up: Scale, most: int = 6) -> str:
    """Lines at the marks of both axes, and their labels; every other one across gives way where there is little room."""
    drawn = []
    for at, text in up.ticks(min(most, 6)):
        y = _percent(1 - at)
        drawn.append(
            f'<line class="grid" x2="100%" y1="{y}" y2="{y}"/><text class="up" x="-8" y="{y}" dy=".32em">{text}</text>'
        )
    for k, (at, text) in enumerate(across.ticks(most)):
        x = _percent(at)
        odd = " odd" if k % 2 else ""
        drawn.append(f'<text class="across{odd}" x="{x}" y="100%" dy="18">{text}</text>')
    return "".join(drawn) + '<line class="axis" x2="100%" y1="100%" y2="100%"/>'


def widest(up: Scale) -> int:
    """Letters of the longest label at the left."""
    return max((len(text) for _, text in up.ticks()), default=1)


def mark(each: Mark, across: Scale, up: Scale) -> str:
    """What a mark adds to the inner drawing."""
    if each.kind == "upright":
        if not np.isfinite(_across(each.x, across)[0]):
            return ""
        return f'<path {_look(each)} d="M{_across(each.x, across)[0]:.0f} 0V{_UNITS}"/>'
    if each.kind == "image":
        data = base64.b64encode(each.image).decode()
        place = f'width="{_UNITS}" height="{_UNITS}" preserveAspectRatio="none"'
        return f'<image class="pixels" {place} href="data:image/png;base64,{data}"/>'
    x, y = _stepped(_across(each.x, across), _up(each.y, up), each.step)
    if each.kind == "area":
        assert each.low is not None  # noqa: S101 - an area has two edges
        return _area(each, x, y, _up(each.low, up))
    if each.kind == "bars":
        return _bars(each, across, up)
    whiskers = ""
    if each.low is not None:
        low, high = _up(each.y - each.low, up), _up(each.y + each.low, up)
        low = np.where(np.isnan(low), _FAR, low)  # below zero, where the axis is logarithmic
        known = np.isfinite(x) & np.isfinite(high)
        ends = zip(x[known], low[known], high[known], strict=True)
        path = "".join(f"M{a:.0f} {b:.0f}V{c:.0f}" for a, b, c in ends)
        whiskers = f'<path class="line {each.colour}" stroke-width="1.2" d="{path}"/>'
    if each.kind == "dots":
        return whiskers + (_dots(each, x, y) if each.shape == "circle" else "")
    line = f'<path {_look(each)}{_name(each)} d="{_path(x, y)}"/>'
    return line + (_dots(each, x, y) if len(each.x) <= _FEW_POINTS and not (each.context or each.step) else "")


def shapes(each: Mark, across: Scale, up: Scale) -> str:
    """Dots that are no circles: they lie above the inner drawing."""
    if each.kind != "dots" or not (path := _SHAPES[each.shape]):
        return ""
    places = zip(across.at(each.x).tolist(), up.at(each.y).tolist(), strict=True)
    return "".join(
        f'<svg x="{_percent(x)}" y="{_percent(1 - y)}" class="beyond"><path class="{each.shape} {each.colour}" d="{path}"/></svg>'
        for x, y in places
        if 0 <= x <= 1 and 0 <= y <= 1
    )


def key(each: Mark) -> str:
    """The mark's sign in a legend."""
    if each.kind in ("bars", "area"):
        inner = f'<rect class="{"bars" if each.kind == "bars" else "filled"} {each.colour}" width="22" height="10"/>'
    elif each.kind == "dots":
        path = _SHAPES[each.shape]
        dot = f'<path class="line round {each.colour}" stroke-width="6" d="M11 5h0"/>'
        inner = (
            f'<path class="{each.shape} {each.colour}" transform="translate(11 5) scale(.7)" d="{path}"/>'
            if path
            else dot
        )
    else:
        d = "M11 0V10" if each.kind == "upright" else "M0 5H22"
        inner = f'<path {_look(each)} d="{d}"/>'
    return f'<svg class="key" width="22" height="10" aria-hidden="true">{inner}</svg>'


def _look(each: Mark) -> str:
    dashed = f" {each.dash}" if each.dash != "solid" else ""
    context = " context" if each.context else ""
    return f'class="line {each.colour}{dashed}{context}" stroke-width="{each.width:g}"'


def _name(each: Mark) -> str:
    return f' data-name="{html.escape(each.name)}"' if each.name else ""


def _dots(each: Mark, x: FloatArray, y: FloatArray) -> str:
    width = each.width if each.kind == "dots" else 5.0
    known = np.isfinite(x) & np.isfinite(y)
    path = "".join(f"M{a:.0f} {b:.0f}h0" for a, b in zip(x[known], y[known], strict=True))
    name = _name(each) if each.kind == "dots" else ""
    return f'<path class="line round {each.colour}" stroke-width="{width:g}"{name} d="{path}"/>'


def _area(each: Mark, x: FloatArray, top: FloatArray, bottom: FloatArray) -> str:
    known = np.isfinite(x) & np.isfinite(top) & np.isfinite(bottom)
    if not known.any():
        return ""
    there, back = _path(x[known], top[known]), _path(x[known][::-1], bottom[known][::-1])
    edges = f'<path class="edge {each.colour}" d="{there}{back}"/>' if each.width else ""
    return f'<path class="filled {each.colour}" d="{there}{back.replace("M", "L")}Z"/>{edges}'


def _bars(each: Mark, across: Scale, up: Scale) -> str:
    centres = _across(each.x, across)
    width = float(np.diff(centres).mean()) if len(centres) > 1 else _UNITS / 10
    foot = _up(np.zeros(1), up)[0]
    path = "".join(
        f"M{x - width / 2:.0f} {foot:.0f}V{y:.0f}h{width:.0f}V{foot:.0f}Z"
        for x, y in zip(centres, _up(each.y, up), strict=True)
        if np.isfinite(y) and y < foot
    )
    return f'<path class="bars {each.colour}" d="{path}"/>'


def _path(x: FloatArray, y: FloatArray) -> str:
    """Lines through points; a gap where one is missing. Each point is written as seen from the one before it.

    A point between two gaps is a line of length 0: a command without numbers would end the whole path.
    """
    known = np.isfinite(x) & np.isfinite(y)
    x, y = np.nan_to_num(x).round(), np.nan_to_num(y).round()
    edges = np.flatnonzero(np.diff(known, prepend=False, append=False)).tolist()
    drawn = []
    for first, end in zip(edges[::2], edges[1::2], strict=True):
        steps = zip(np.diff(x[first:end]).tolist(), np.diff(y[first:end]).tolist(), strict=True)
        path = "l" + "".join(f"{a:.0f} {b:.0f} " for a, b in steps) if end - first > 1 else "h0"
        drawn.append(f"M{x[first]:.0f} {y[first]:.0f}{path}")
    return "".join(drawn)


def _stepped(x: FloatArray, y: FloatArray, step: str) -> tuple[FloatArray, FloatArray]:
    if not step or len(x) < 2:
        return x, y
    if step == "after":
        return np.repeat(x, 2)[1:], np.repeat(y, 2)[:-1]
    middle = (x[1:] + x[:-1]) / 2
    return np.concatenate([x[:1], np.repeat(middle, 2), x[-1:]]), np.repeat(y, 2)


def _across(values: FloatArray, scale: Scale) -> FloatArray:
    return np.asarray(np.clip(scale.at(values) * _UNITS, -_FAR, _FAR))


def _up(values: FloatArray, scale: Scale) -> FloatArray:
    return np.asarray(np.clip((1 - scale.at(values)) * _UNITS, -_FAR, _FAR))


def _percent(at: float) -> str:
    return f"{100 * at:.2f}%"


def panels(curves: Sequence[Mark], context: Sequence[Mark], across: Scale, up: Scale, name: str) -> list[str]:
    """For each curve a drawing in which it stands out of all others, which are pale.

    Args:
        curves: those that are drawn together.
        context: what else is in every drawing.
        across: the scale of x.
        up: that of y.
        name: no other drawing of the page has it.
    """
    paths = [
        f'<path id="{name}-{k}" class="line" d="{_path(_across(each.x, across), _up(each.y, up))}"/>'
        for k, each in enumerate(curves)
    ]
    around = "".join(mark(each, across, up) for each in context)
    once = f'<g id="{name}">{around}<g class="pale blue" stroke-width="1">{"".join(paths)}</g></g>'
    above = [f'<use class="blue" stroke-width="2.4" href="#{name}-{k}"{_name(each)}/>' for k, each in enumerate(curves)]
    below = [once, *(f'<use href="#{name}"/>' for _ in curves[1:])]
    return [stretched(pair) for pair in zip(below, above, strict=True)]
