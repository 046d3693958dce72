"""Repeats of numbers and messages by a service, and the resolution to which its numbers are printed.

Numbers that are sent twice, and numbers that differ between recipients, make noise ineffective even if no classifier sees it. A
number counts as repeated only if chance cannot explain it: the density of the numbers of a field, and the resolution that they
were rounded to, determine the expected number of coincidences.
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
"""Minimum ratio of a rounding step to the float spacing: otherwise every number would count as rounded."""

_MIN_GAPS = 16
"""Minimum number of gaps between numbers from which a step is estimated."""


def estimate_resolution(values: FloatArray) -> FloatArray:
    """Estimate the coarsest rounding, number by number, that all of the finite numbers have been through.

    Known roundings are floats of any size, multiples of a power of two, of ten, or of any step, and a fixed count of digits.
    """
    floats = _compute_float_spacing(values)
    coarsest = np.maximum(floats, _estimate_binary(values))
    for step in (_estimate_decimals(values, floats), _estimate_digits(values, floats), _estimate_step(values, floats)):
        if step is not None:
            coarsest = np.maximum(coarsest, step)
    return coarsest


def _compute_float_spacing(values: FloatArray) -> FloatArray:
    """Compute the spacing of float32 if all are float32 numbers, otherwise of float64."""
    with np.errstate(over="ignore", under="ignore"):
        single = values.astype(np.float32)
        if (single == values).all():
            return np.spacing(np.abs(single)).astype(np.float64)
    return np.spacing(np.abs(values))


def _estimate_binary(values: FloatArray) -> FloatArray:
    """Estimate the spacing of floats with the mantissa length of the longest of these (float16, bfloat16, or any other).

    It is the largest power of two that divides all of them, if this is coarser.
    """
    mantissas, exponents = np.frexp(values)
    bits = np.abs(mantissas * 2.0**53).astype(np.int64)
    zeros = np.bitwise_count((bits & -bits) - 1).astype(np.int64)
    grid = float(np.ldexp(1.0, int((exponents - 53 + zeros).min())))
    last_bits = exponents - 53 + int(zeros[bits > 0].min(initial=53))
    with np.errstate(under="ignore"):
        spacing: FloatArray = np.where(bits > 0, np.ldexp(1.0, last_bits), 0.0)
    return np.maximum(spacing, grid)


def _estimate_decimals(values: FloatArray, floats: FloatArray) -> float | None:
    """Find the largest power of ten that divides all; None: none beyond what floats do by chance."""
    for places in range(-6, 16):
        unit = 10.0**-places
        if unit <= _MIN_COARSENESS * float(floats.max()):
            return None
        if (np.abs(values - np.round(values, places)) <= floats).all():
            return unit
    return None


def _estimate_digits(values: FloatArray, floats: FloatArray) -> FloatArray | None:
    """Find the last digit of each, if all have few digits; None: they do not."""
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


def _estimate_step(values: FloatArray, floats: FloatArray) -> float | None:
    """Find the step of a quantiser: the smallest gap, or a small fraction of it, that divides all others."""
    finest = float(floats.max())
    gaps = np.diff(np.sort(values))
    gaps = gaps[gaps > _MIN_COARSENESS * finest]
    if len(gaps) < _MIN_GAPS:
        return None
    smallest = float(gaps.min())
    return next(
        (smallest / parts for parts in range(1, 17) if _is_multiple(smallest / parts, gaps, finest).all()), None
    )


def _is_multiple(step: float, gaps: FloatArray, finest: float) -> BoolArray:
    """Return whether gaps are multiples of a step, as far as floats can decide; a single False if too few can be decided."""
    multiples = gaps[gaps * finest <= 0.01 * step * step] / step
    if len(multiples) < _MIN_GAPS:
        return np.zeros(1, dtype=np.bool_)
    is_near: BoolArray = np.abs(multiples - np.rint(multiples)) < 0.05
    return is_near


# ---- repeats ---------------------------------------------------------------------------------------------------------

_MAX_P_VALUE = 1e-6
"""Maximum probability of reported coincidences."""

_MIN_NUMBERS = 16
"""Minimum count of numbers, or of bytes of a message, from which conclusions are drawn."""

_MAX_CONSTANT_COUNT = 8
"""Maximum count of a number in both worlds; a more frequent one is a constant of the protocol, and no noise."""

_MAX_ONE_WORLD_RUNS = 24
"""Maximum number of runs of only one world that may share a message: fair coins do so once in ten million times."""

_MIN_CONSTANT_RUNS = 24
"""Minimum number of runs of each world that show that a number is constant in it."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """Observation that no correct mechanism produces.

    Attributes:
        test: `repetition` or `equivocation`.
        text: finding, in a sentence without a full stop.
        count: number of occurrences.
        location: first place.
    """

    test: str
    text: str
    count: int
    location: str

    def __str__(self) -> str:
        return f"{self.text} ({self.location})"


def find_anomalies(runs: Sequence[RunTraffic]) -> tuple[Anomaly, ...]:
    """Find all anomalies."""
    return (
        *_find_constants(runs),
        *_find_repeated_numbers(runs),
        *_find_repeated_bytes(runs),
        *_find_equivocations(runs),
    )


def _find_constants(runs: Sequence[RunTraffic]) -> list[Anomaly]:
    """Find numbers that are constant in each world and differ between them: noise is missing, or always the same."""
    worlds = np.array([run.world for run in runs])
    if min(np.count_nonzero(worlds == world) for world in (0, 1)) < _MIN_CONSTANT_RUNS:
        return []
    anomalies = []
    for field, values in collect_decoded_fields(runs).items():
        first, second = (values[worlds == world] for world in (0, 1))
        same = (first == first[:1]).all(axis=0) & (second == second[:1]).all(axis=0) & (first[0] != second[0])
        if same.any():
            t, number = (int(axis[0]) for axis in np.nonzero(same))
            place = f"number {number} of {field}, {name_messages(runs)[field][t]}"
            others = int(same.sum()) - 1
            suffix = f", as {others:,} more of {field} {'are' if others > 1 else 'is'}" if others else ""
            text = f"{place} is the same in all runs of a world, without noise or always with the same noise{suffix}"
            location = f"{first[0, t, number]:.6g} in world 0, {second[0, t, number]:.6g} in world 1"
            anomalies.append(Anomaly("repetition", text, len(runs) * (others + 1), location))
    return anomalies


def _find_repeated_numbers(runs: Sequence[RunTraffic]) -> list[Anomaly]:
    poisson = import_optional("scipy.stats", "scipy", "an audit").poisson
    worlds = np.array([run.world for run in runs])
    anomalies = []
    for field, values in collect_decoded_fields(runs).items():
        place = np.nonzero(values * (values != values[:1]).any(axis=0))
        mask = _is_possible_noise(values[place], worlds[place[0]])
        place = tuple(axis[mask] for axis in place)
        numbers = values[place]
        distinct, counts = np.unique(numbers, return_counts=True)
        ties = len(numbers) - len(distinct)
        if (
            len(numbers) < _MIN_NUMBERS
            or not ties
            or poisson.sf(ties - 1, _compute_expected_ties(distinct, counts)) >= _MAX_P_VALUE
        ):
            continue
        first, second = (tuple(int(axis[k]) for axis in place) for k in _find_first_repeat(numbers))
        location = f"{_format_position(runs, first)} and {_format_position(runs, second)}"
        anomalies.append(
            Anomaly("repetition", f"{ties:,} of {len(numbers):,} numbers of {field} are repeated", ties, location)
        )
    return anomalies


def _is_possible_noise(numbers: FloatArray, worlds: IntArray) -> BoolArray:
    """Return which numbers may be noise: neither the extremes, which may be clipped, nor frequent constants of both worlds."""
    _, inverse = np.unique(numbers, return_inverse=True)
    counts = [np.bincount(inverse[worlds == world], minlength=int(inverse.max(initial=-1)) + 1) for world in (0, 1)]
    constant = (counts[0] > 0) & (counts[1] > 0) & (counts[0] + counts[1] > _MAX_CONSTANT_COUNT)
    is_noise: BoolArray = ~constant[inverse]
    if len(numbers):
        is_noise &= (numbers != numbers.min()) & (numbers != numbers.max())
    return is_noise


def _compute_expected_ties(distinct: FloatArray, counts: IntArray) -> float:
    """Compute the expected ties among these numbers, if each were drawn anew from the density that they show.

    The density counts numbers among neighbouring distinct ones: a few that recur very often do not explain themselves.
    """
    reach = max(2, int(np.sqrt(len(distinct))) // 2)
    above = np.minimum(np.arange(len(distinct)) + reach, len(distinct) - 1)
    below = np.maximum(np.arange(len(distinct)) - reach, 0)
    if above[0] == below[0]:
        return np.inf  # a single distinct number always coincides
    cumulative = counts.cumsum()
    relative_steps = estimate_resolution(distinct) / (
        distinct[above] - distinct[below]
    )  # the density of tiny numbers would overflow
    return float(0.5 * np.sum(counts * (cumulative[above] - cumulative[below]) * relative_steps))


def _find_first_repeat(numbers: FloatArray) -> tuple[int, int]:
    """Find the first repetition, and the number it repeats."""
    positions: dict[float, int] = {}
    for k, value in enumerate(numbers.tolist()):
        if value in positions:
            return positions[value], k
        positions[value] = k
    raise AssertionError("the numbers contain a repeat")


def _format_position(runs: Sequence[RunTraffic], place: tuple[int, ...]) -> str:
    run, message, number = place
    return f"{runs[run].name}, message {message}, number {number}"


def _find_repeated_bytes(runs: Sequence[RunTraffic]) -> list[Anomaly]:
    """Find repeats of whole messages, if they are not decoded and most differ."""
    places: dict[str, list[tuple[RunTraffic, int, CapturedFrame]]] = defaultdict(list)
    for run in runs:
        count = Counter[str]()
        for each in run.messages:
            places[each.place].append((run, count[each.place], each))
            count[each.place] += 1
    anomalies = []
    for place, messages in places.items():
        if any(each.decoded_message is not None for _, _, each in messages):
            continue
        varying = _select_varying(messages, len(runs))
        first_places: dict[bytes, str] = {}
        repeated = []
        for run, k, each in varying:
            location = f"{run.name}, message {k}"
            if each.digest in first_places:
                repeated.append(f"{first_places[each.digest]} and {location}")
            first_places.setdefault(each.digest, location)
        if repeated and (2 * len(first_places) > len(varying) or _is_of_one_world(varying)):
            text = f"{len(repeated):,} of {len(varying):,} messages of {place} are repeated, byte for byte"
            anomalies.append(Anomaly("repetition", text, len(repeated), repeated[0]))
    return anomalies


def _is_of_one_world(messages: Sequence[tuple[RunTraffic, int, CapturedFrame]]) -> bool:
    """Return whether a message occurs so often, and in one world only, that fair coins cannot explain it."""
    places = {(each.digest, run.world, run.name) for run, _, each in messages}
    runs = Counter((message, world) for message, world, _ in places)
    return any(count > _MAX_ONE_WORLD_RUNS and not runs[message, 1 - world] for (message, world), count in runs.items())


def _select_varying(
    messages: Sequence[tuple[RunTraffic, int, CapturedFrame]], runs: int
) -> list[tuple[RunTraffic, int, CapturedFrame]]:
    """Select messages long enough to be no coincidence, without those that are equal in all runs."""
    counts = Counter((k, each.digest) for _, k, each in messages)
    return [(run, k, each) for run, k, each in messages if each.size >= _MIN_NUMBERS and counts[k, each.digest] < runs]


def _find_equivocations(runs: Sequence[RunTraffic]) -> list[Anomaly]:
    equivocations = []
    for run in runs:
        versions = BoundedDict[tuple[object, ...], bytes]()
        for each in run.messages:
            if each.decoded_message is None or each.decoded_message.round is None:
                continue
            key = (each.place, each.decoded_message.sender, each.decoded_message.round)
            if versions.setdefault(key, each.digest) != each.digest:
                equivocations.append((run, each))
    if not equivocations:
        return []
    run, each = equivocations[0]
    message = each.decoded_message
    sender = "one sender" if message is None or message.sender is None else message.sender
    t = None if message is None else message.round
    text = f"{sender} sends different messages in one round, {len(equivocations):,} times"
    return [Anomaly("equivocation", text, len(equivocations), f"{run.name}, {each.place}, round {t}")]
