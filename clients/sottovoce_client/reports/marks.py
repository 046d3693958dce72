"""What figures are made of: marks on two axes, and where on an axis a value lies.

Nothing infinite or missing reaches a figure: such values become gaps, and the page says in words what is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sottovoce.arrays import FloatArray, IntArray, as_floats
from sottovoce_client.wording import number, share

Values = Sequence[float] | FloatArray | IntArray

COLOURS = {
    "blue": ("#0072b2", "#58aee6"),
    "red": ("#d55e00", "#ff8f4a"),
    "green": ("#008a64", "#3fc99f"),
    "pink": ("#b5568f", "#e39bc6"),
    "orange": ("#b57a00", "#e6b04c"),
    "sky": ("#3391c9", "#9ad4f5"),
    "grey": ("#5f6870", "#b3bec8"),
    "brown": ("#8c6d31", "#c9a866"),
    "ink": ("#1f2933", "#e4eaf0"),
    "faint": ("#6b7785", "#93a1ae"),
    "rule": ("#8b97a3", "#75838f"),
    "area": ("#9aa5b1", "#7c8a97"),
}
"""In light and in dark: Okabe and Ito's, which all readers can tell apart, darker where they would be pale on white."""
PALETTE = tuple(COLOURS)[:8]
DASHES = ("solid", "dash", "dot", "dashdot")
Kind = Literal["line", "dots", "bars", "area", "upright", "image"]


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """Something drawn.

    Attributes:
        kind: `line` and `dots` connect points or do not; `bars` stand on zero, centred at x; an `area` lies between `low`
            and y; an `upright` goes through the whole plot at x; an `image` fills the axes.
        x: where across.
        y: how high.
        name: in the legend; empty: it is not there.
        colour: of `COLOURS`.
        width: of lines, or the size of dots, in pixels.
        dash: `solid`, `dash`, `dot` or `dashdot`.
        low: the lower edge of an area, or half the length of dots' error bars.
        step: where a line that goes in steps does so: `after` a point, or in the `middle` of two; empty: it is straight.
        shape: of dots.
        context: it is there to compare curves with.
        image: a PNG.
    """

    kind: Kind
    x: FloatArray
    y: FloatArray
    name: str = ""
    colour: str = "blue"
    width: float = 2.0
    dash: str = "solid"
    low: FloatArray | None = None
    step: Literal["", "after", "middle"] = ""
    shape: Literal["circle", "diamond", "cross"] = "circle"
    context: bool = False
    image: bytes = b""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis.

    Attributes:
        title: what is on it.
        log: whether it is logarithmic.
        low: where it begins; None: with the least that is drawn.
        high: where it ends; None: with the most.
        form: how values are written; those of a `count` are whole.
        zero: it begins with zero at the latest, if it is not logarithmic.
    """

    title: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    form: Literal["number", "share", "count"] = "number"
    zero: bool = False

    def said(self, value: float) -> str:
        """A value as people read it."""
        return share(value) if self.form == "share" else number(value)


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis whose ends are known."""

    axis: Axis
    low: float
    high: float

    def at(self, values: FloatArray) -> FloatArray:
        """Where values lie, from 0 to 1; not a number where a logarithmic axis cannot show one."""
        low, high = self.low, self.high
        if self.axis.log:
            values = np.log10(np.where(values > 0, values, np.nan))
            low, high = math.log10(low), math.log10(high)
        return np.asarray((values - low) / (high - low))

    def ticks(self, most: int = 6) -> list[tuple[float, str]]:
        """Where marks stand, from 0 to 1, and what is written there."""
        low, high = sorted((self.low, self.high))
        texts, values = _decades(low, high, most) if self.axis.log else self._round_numbers(low, high, most)
        return list(zip(self.at(as_floats(values)).tolist(), texts, strict=True))

    def _round_numbers(self, low: float, high: float, most: int) -> tuple[list[str], list[float]]:
        step = _round_step((high - low) / most)
        if self.axis.form == "count":
            step = max(1.0, step)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        values = [k * step for k in range(first, last + 1)]
        if self.axis.form == "share":
            digits = max(0, -math.floor(math.log10(step) + 1e-9) - 2)
            return [f"{100 * value:.{digits}f} %".replace("-", "−") for value in values], values
        return [number(float(f"{value:.10g}")) for value in values], values


def scaled(axis: Axis, values: FloatArray) -> Scale:
    """The axis as far as the values go, with a little room where nothing fixes its ends."""
    known = values[np.isfinite(values) & ((values > 0) if axis.log else True)]
    low, high = (float(known.min()), float(known.max())) if known.size else (1.0, 10.0) if axis.log else (0.0, 1.0)
    if axis.log:
        low, high = low / 1.15, high * 1.15
    else:
        room = 0.04 * (high - low) or 0.05 * abs(high) or 0.5
        low, high = (min(0.0, low) if axis.zero and low >= 0 else low - room), high + room
    return Scale(axis, low if axis.low is None else axis.low, high if axis.high is None else axis.high)


def styled(k: int) -> tuple[str, str]:
    """Colour and dash of the k-th of several curves: no two of 32 share both, and the next one differs in both, also in print."""
    return PALETTE[k % len(PALETTE)], DASHES[(k + k // len(PALETTE)) % len(DASHES)]


def decades(values: FloatArray) -> bool:
    """Whether values are spread so far that only a logarithmic axis shows all of them: above zero, and over two decades."""
    known = values[np.isfinite(values)]
    return bool(known.size and known.min() > 0 and known.max() >= 100 * known.min())


def _round_step(least: float) -> float:
    """The next of 1, 2, 5, 10, and so on."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))


def _decades(low: float, high: float, most: int) -> tuple[list[str], list[float]]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    powers = list(range(first, last + 1))
    if len(powers) < 3:  # within few decades: 1, 2 and 5 of each
        values = [digit * 10.0**k for k in range(first - 1, last + 1) for digit in (1, 2, 5)]
        values = [value for value in values if low <= value <= high]
        return [number(value) for value in values], values
    powers = powers[:: math.ceil(len(powers) / most)]
    return [_power(k) for k in powers], [10.0**k for k in powers]


def _power(k: int) -> str:
    """`10,000`, or `10⁵`."""
    return number(10.0**k) if -4 <= k <= 4 else "10" + str(k).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
