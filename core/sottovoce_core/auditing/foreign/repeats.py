"""Numbers and messages that a service repeats, and the resolution to which its numbers are printed.

Numbers that are sent twice, and numbers that differ between recipients, void noise, whatever a classifier makes of them.
A number counts as said again only where chance cannot explain it: from how densely the numbers of a field lie, and from the
resolution that they were rounded to, follows how many should coincide.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sottovoce_core.arrays import BoolArray, FloatArray, IntArray
from sottovoce_core.auditing.foreign.answer_features import name_messages
from sottovoce_core.auditing.traffic_features import CapturedFrame, RunTraffic, collect_decoded_fields
from sottovoce_core.optional import import_optional
from sottovoce_core.runs.transcript import BoundedDict

# ---- resolution ------------------------------------------------------------------------------------------------------

_MIN_COARSENESS = 64.0
"""A rounding is one if it is so many times coarser than the floats: else every number would be said to be rounded."""

_MIN_GAPS = 16
"""Fewer gaps between numbers show no step."""


def estimate_resolution(values: FloatArray) -> FloatArray:
    """Of finite numbers, each by itself: the coarsest rounding that all of them have been through.

    Known are floats of any size, multiples of a power of two, of ten, or of any step, and so many digits.
    """
    floats = _spacing(values)
    coarsest = np.maximum(floats, _binary(values))
    for found in (_decimals(values, floats), _digits(values, floats), _step(values, floats)):
        if found is not None:
            coarsest = np.maximum(coarsest, found)
    return coarsest


def _spacing(values: FloatArray) -> FloatArray:
    """To the next float32 where all are float32 numbers, else to the next float64."""
    with np.errstate(over="ignore", under="ignore"):
        single = values.astype(np.float32)
        if (single == values).all():
            return np.spacing(np.abs(single)).astype(np.float64)
    return np.spacing(np.abs(values))


def _binary(values: FloatArray) -> FloatArray:
    """To the next float of as few digits in base two as the longest of these has (float16, bfloat16, or any other).

    Or to the largest power of two of which all are multiples, whichever is coarser.
    """
    mantissas, exponents = np.frexp(values)
    bits = np.abs(mantissas * 2.0**53).astype(np.int64)
    zeros = np.bitwise_count((bits & -bits) - 1).astype(np.int64)
    grid = float(np.ldexp(1.0, int((exponents - 53 + zeros).min())))
    short = exponents - 53 + int(zeros[bits > 0].min(initial=53))
    with np.errstate(under="ignore"):
        spacing: FloatArray = np.where(bits > 0, np.ldexp(1.0, short), 0.0)
    return np.maximum(spacing, grid)


def _decimals(values: FloatArray, floats: FloatArray) -> float | None:
    """The largest power of ten of which all are multiples; None: of none that floats could not be by chance."""
    for places in range(-6, 16):
        unit = 10.0**-places
        if unit <= _MIN_COARSENESS * float(floats.max()):
            return None
        if (np.abs(values - np.round(values, places)) <= floats).all():
            return unit
    return None


def _digits(values: FloatArray, floats: FloatArray) -> FloatArray | None:
    """The last digit of each, where all have so few; None: they do not."""
    sizes = np.where(values == 0.0, np.abs(values).max(), np.abs(values))
    if not sizes.any():
        return None
    exponents = np.floor(np.log10(sizes))
    with np.errstate(over="ignore", under="ignore"):
        units = 10.0**exponents
        if not (np.isfinite(units) & (units > 0)).all():
            return None
        leading = values / units
        for digits in range(1, 16):
            last = units * 10.0 ** (1 - digits)
            if (last <= _MIN_COARSENESS * floats).any():
                return None
            if (np.abs(leading - np.round(leading, digits - 1)) * units <= 2.0 * floats).all():
                return last
    return None


def _step(values: FloatArray, floats: FloatArray) -> float | None:
    """The step between the levels of a quantiser: the smallest gap, or a small fraction of it, that divides all others."""
    finest = float(floats.max())
    gaps = np.diff(np.sort(values))
    gaps = gaps[gaps > _MIN_COARSENESS * finest]
    if len(gaps) < _MIN_GAPS:
        return None
    smallest = float(gaps.min())
    return next((smallest / parts for parts in range(1, 17) if _divides(smallest / parts, gaps, finest).all()), None)


def _divides(step: float, gaps: FloatArray, finest: float) -> BoolArray:
    """Whether gaps are multiples of a step, as far as floats can tell; a single False where they tell of too few."""
    told = gaps[gaps * finest <= 0.01 * step * step] / step
    if len(told) < _MIN_GAPS:
        return np.zeros(1, dtype=np.bool_)
    near: BoolArray = np.abs(told - np.rint(told)) < 0.05
    return near


# ---- repeats ---------------------------------------------------------------------------------------------------------

_MAX_P_VALUE = 1e-6
"""Coincidences less likely than this are reported."""

_MIN_NUMBERS = 16
"""Of fewer numbers, or of messages with fewer bytes, nothing is concluded."""

_MAX_CONSTANT_COUNT = 8
"""What both worlds say more often than this is a constant of the protocol, and no noise."""

_MAX_ONE_WORLD_RUNS = 24
"""What so many runs say, all of one world, tells the world: fair coins do so once in ten million times."""

_MIN_CONSTANT_RUNS = 24
"""Runs of each world, at least, that show that a number is always the same in it."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """Something that no correct mechanism does.

    Attributes:
        test: `said again` or `equivocation`.
        text: what was found, in a sentence without a full stop.
        count: how often.
        where: the first place.
    """

    test: str
    text: str
    count: int
    location: str

    def __str__(self) -> str:
        return f"{self.text} ({self.location})"


def find_anomalies(runs: Sequence[RunTraffic]) -> tuple[Anomaly, ...]:
    """All of them."""
    return (*_constant(runs), *_numbers_again(runs), *_bytes_again(runs), *_equivocations(runs))


def _constant(runs: Sequence[RunTraffic]) -> list[Anomaly]:
    """Numbers that are the same in all runs of a world, and others in the other one: without noise, or always with the same."""
    worlds = np.array([run.world for run in runs])
    if min(np.count_nonzero(worlds == world) for world in (0, 1)) < _MIN_CONSTANT_RUNS:
        return []
    found = []
    for field, values in collect_decoded_fields(runs).items():
        first, second = (values[worlds == world] for world in (0, 1))
        same = (first == first[:1]).all(axis=0) & (second == second[:1]).all(axis=0) & (first[0] != second[0])
        if same.any():
            t, number = (int(axis[0]) for axis in np.nonzero(same))
            place = f"number {number} of {field}, {name_messages(runs)[field][t]}"
            more = int(same.sum()) - 1
            also = f", as {more:,} more of {field} {'are' if more > 1 else 'is'}" if more else ""
            text = f"{place} is the same in all runs of a world, without noise or always with the same{also}"
            where = f"{first[0, t, number]:.6g} in world 0, {second[0, t, number]:.6g} in world 1"
            found.append(Anomaly("said again", text, len(runs) * (more + 1), where))
    return found


def _numbers_again(runs: Sequence[RunTraffic]) -> list[Anomaly]:
    poisson = import_optional("scipy.stats", "scipy", "an audit").poisson
    worlds = np.array([run.world for run in runs])
    found = []
    for field, values in collect_decoded_fields(runs).items():
        place = np.nonzero(values * (values != values[:1]).any(axis=0))
        kept = _noisy(values[place], worlds[place[0]])
        place = tuple(axis[kept] for axis in place)
        said = values[place]
        distinct, counts = np.unique(said, return_counts=True)
        ties = len(said) - len(distinct)
        if len(said) < _MIN_NUMBERS or not ties or poisson.sf(ties - 1, _by_chance(distinct, counts)) >= _MAX_P_VALUE:
            continue
        first, again = (tuple(int(axis[k]) for axis in place) for k in _pair(said))
        where = f"{_position(runs, first)} and {_position(runs, again)}"
        found.append(Anomaly("said again", f"{ties:,} of {len(said):,} numbers of {field} are repeated", ties, where))
    return found


def _noisy(said: FloatArray, worlds: IntArray) -> BoolArray:
    """Which numbers may be noise: not the ends, to which numbers are cut off, and no constant that both worlds say often."""
    _, inverse = np.unique(said, return_inverse=True)
    counts = [np.bincount(inverse[worlds == world], minlength=int(inverse.max(initial=-1)) + 1) for world in (0, 1)]
    constant = (counts[0] > 0) & (counts[1] > 0) & (counts[0] + counts[1] > _MAX_CONSTANT_COUNT)
    noisy: BoolArray = ~constant[inverse]
    if len(said):
        noisy &= (said != said.min()) & (said != said.max())
    return noisy


def _by_chance(distinct: FloatArray, counts: IntArray) -> float:
    """How many of these numbers should coincide with another one, were each drawn anew from the density that they show.

    The density is how many lie among so many different ones: a few that are repeated very often do not explain themselves.
    """
    reach = max(2, int(np.sqrt(len(distinct))) // 2)
    above = np.minimum(np.arange(len(distinct)) + reach, len(distinct) - 1)
    below = np.maximum(np.arange(len(distinct)) - reach, 0)
    if above[0] == below[0]:
        return np.inf  # of a single number coincidence is the rule
    upto = counts.cumsum()
    rounded = estimate_resolution(distinct) / (
        distinct[above] - distinct[below]
    )  # a density of tiny numbers would overflow
    return float(0.5 * np.sum(counts * (upto[above] - upto[below]) * rounded))


def _pair(said: FloatArray) -> tuple[int, int]:
    """Where the first repetition is, and what it repeats."""
    known: dict[float, int] = {}
    for k, value in enumerate(said.tolist()):
        if value in known:
            return known[value], k
        known[value] = k
    raise AssertionError("there is one")


def _position(runs: Sequence[RunTraffic], place: tuple[int, ...]) -> str:
    run, message, number = place
    return f"{runs[run].name}, message {message}, number {number}"


def _bytes_again(runs: Sequence[RunTraffic]) -> list[Anomaly]:
    """Whole messages, where nobody decoded them and most differ."""
    places: dict[str, list[tuple[RunTraffic, int, CapturedFrame]]] = defaultdict(list)
    for run in runs:
        count = Counter[str]()
        for each in run.messages:
            places[each.place].append((run, count[each.place], each))
            count[each.place] += 1
    found = []
    for place, said in places.items():
        if any(each.decoded_message is not None for _, _, each in said):
            continue
        varied = _varied(said, len(runs))
        known: dict[bytes, str] = {}
        repeated = []
        for run, k, each in varied:
            where = f"{run.name}, message {k}"
            if each.digest in known:
                repeated.append(f"{known[each.digest]} and {where}")
            known.setdefault(each.digest, where)
        if repeated and (2 * len(known) > len(varied) or _of_one_world(varied)):
            text = f"{len(repeated):,} of {len(varied):,} messages of {place} are said again, byte for byte"
            found.append(Anomaly("said again", text, len(repeated), repeated[0]))
    return found


def _of_one_world(said: Sequence[tuple[RunTraffic, int, CapturedFrame]]) -> bool:
    """Whether some message is said so often, and in one world alone, that no coin does that."""
    places = {(each.digest, run.world, run.name) for run, _, each in said}
    runs = Counter((message, world) for message, world, _ in places)
    return any(count > _MAX_ONE_WORLD_RUNS and not runs[message, 1 - world] for (message, world), count in runs.items())


def _varied(
    said: Sequence[tuple[RunTraffic, int, CapturedFrame]], runs: int
) -> list[tuple[RunTraffic, int, CapturedFrame]]:
    """Messages long enough to be no coincidence, without those that are the same in all runs."""
    counts = Counter((k, each.digest) for _, k, each in said)
    return [(run, k, each) for run, k, each in said if each.size >= _MIN_NUMBERS and counts[k, each.digest] < runs]


def _equivocations(runs: Sequence[RunTraffic]) -> list[Anomaly]:
    found = []
    for run in runs:
        versions = BoundedDict[tuple[object, ...], bytes]()
        for each in run.messages:
            if each.decoded_message is None or each.decoded_message.round is None:
                continue
            key = (each.place, each.decoded_message.sender, each.decoded_message.round)
            if versions.setdefault(key, each.digest) != each.digest:
                found.append((run, each))
    if not found:
        return []
    run, each = found[0]
    sender = (
        ""
        if each.decoded_message is None or each.decoded_message.sender is None
        else f"{each.decoded_message.sender} says "
    )
    t = None if each.decoded_message is None else each.decoded_message.round
    text = f"{sender or 'one sender says '}different things in one round, {len(found):,} times"
    return [Anomaly("equivocation", text, len(found), f"{run.name}, {each.place}, round {t}")]
