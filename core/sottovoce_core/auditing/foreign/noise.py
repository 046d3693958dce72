"""Tests of the claimed noise of a foreign service: its distribution, scale and centre, and its presence in messages.

If the centre is known, noise is the message minus its centre. If it is not, but the same in all runs of a world, the
difference of two runs has no centre: its distribution is known exactly, and two runs give one sample. In both cases noise is
converted to standard Laplace numbers of the same probability, and tested by the conformance tests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy import special

from sottovoce_core.arrays import FloatArray, IntArray, as_floats
from sottovoce_core.auditing.bounds import AlphaAllocation, Test
from sottovoce_core.auditing.conformance.battery import Dependence
from sottovoce_core.auditing.conformance.block import Block, ConformanceTest, Layout
from sottovoce_core.auditing.conformance.marginal import Marginal
from sottovoce_core.auditing.conformance.residuals import convert_to_laplace
from sottovoce_core.auditing.foreign.power import compute_gaussian_epsilon
from sottovoce_core.auditing.foreign.repeats import estimate_resolution
from sottovoce_core.auditing.traffic_features import DecodedMessage, RunTraffic, find_field_sources
from sottovoce_core.errors import SpecError

_MAX_ROUNDING_SCALES = 1.0 / 64.0
"""Maximum rounding step in scales: with coarser rounding, the distribution depends on the rounding method."""

_MAX_SLICE_NUMBERS = 2**20
"""Maximum count of numbers that the conformance tests process together: about 100 MB."""

Centre = Callable[[int, DecodedMessage, Sequence[DecodedMessage]], Any]
"""Function that returns the numbers without noise, from the world, a message, and all decoded messages of the run before it."""


@dataclass(frozen=True, slots=True)
class NoiseClaim:
    """Claimed noise of one decoded field.

    Attributes:
        distribution: `laplace` or `gaussian`.
        scale: Laplace scale, or standard deviation; one for each message of a run, the last one for all later ones.
        centre: value of the field without noise; None: not known, and the same in all runs of a world.
    """

    distribution: Literal["laplace", "gaussian"]
    scale: tuple[float, ...]
    centre: Centre | None = None


@dataclass(frozen=True, slots=True, eq=False)
class NoiseFindings:
    """Results on the claimed noise.

    Attributes:
        tests: conformance tests, each with its level.
        noise_count: count of tested noise values.
        noise_sample: sample of them as standard Laplace numbers.
        epsilon: epsilon of a run, if the noise is as claimed; not-a-number if centres are not known.
        exclusions: fields that were not tested, with the reason, a sentence each.
        undecided_fields: varying fields of answers whose loss does not follow from the tested noise: guesses decide.
    """

    tests: tuple[Test, ...]
    noise_count: int
    noise_sample: FloatArray
    epsilon: float
    exclusions: tuple[str, ...]
    undecided_fields: tuple[str, ...]

    @property
    def is_decisive(self) -> bool:
        """True if the loss of a run follows from the tested noise, without a guess."""
        return not math.isnan(self.epsilon) and not self.undecided_fields


@dataclass(frozen=True, slots=True, eq=False)
class _Field:
    """Claimed field in all runs, `(runs, messages, numbers)` each; not-a-number where a run has none.

    Attributes:
        values: numbers of the messages.
        centres: numbers without noise, in worlds 0 and 1; None: not known.
        scale: `(messages, 1)` noise scale.
        step: rounding step of the numbers.
    """

    claim: NoiseClaim
    values: FloatArray
    centres: tuple[FloatArray, FloatArray] | None
    scale: FloatArray
    step: FloatArray


def check_noise(
    runs: Sequence[RunTraffic],
    claims: Mapping[str, NoiseClaim],
    levels: AlphaAllocation,
    generator: np.random.Generator,
    claim: float = math.inf,
    delta: float = 0.0,
) -> NoiseFindings:
    """Test whether the fields of all messages have the claimed noise.

    Args:
        runs: runs of both worlds.
        claims: claims by the name of a decoded field.
        levels: alpha allocation of the audit, with parts for conformance.
        generator: generator that spreads rounded numbers over their rounding interval.
        claim, delta: claim for a run; infinite: none.

    Raises:
        SpecError: no message has such a field, or a centre has another shape.
    """
    worlds = np.array([run.world for run in runs], dtype=np.int64)
    fields, exclusions = {}, []
    for name, each in claims.items():
        field = _collect_field(runs, name, each)
        if coarse_step := _find_coarse_step(field):
            exclusions.append(f"{name} is rounded to {coarse_step:.2g} scales: its noise was not tested")
        else:
            fields[name] = field
    noise = {name: _standardize(field, worlds, generator) for name, field in fields.items()}
    epsilon = _compute_epsilon(fields, delta)
    tests, numbers = _run_conformance_tests(noise, levels, list(_test_claimed_epsilon(epsilon, claim, delta)))
    ties = levels.assign_levels("freshness", [_test_ties(fields, worlds)]) if numbers else ()
    noise_sample = np.concatenate([np.empty(0), *(values[np.isfinite(values)] for values, _ in noise.values())])
    decided_fields = {name for name, field in fields.items() if field.centres is not None}
    return NoiseFindings(
        tests=(*tests, *ties),
        noise_count=numbers,
        noise_sample=noise_sample,
        epsilon=epsilon,
        exclusions=tuple(exclusions),
        undecided_fields=tuple(name for name in _list_varying_answers(runs) if name not in decided_fields),
    )


def _list_varying_answers(runs: Sequence[RunTraffic]) -> Iterator[str]:
    """List decoded fields of the service's answers whose numbers differ between runs."""
    answers = {id(each.decoded_message) for run in runs for each in run.messages if each.direction == "back"}
    for name, messages in find_field_sources(runs).items():
        short = name.split(" in ", 1)[0]
        of_message = ([each.fields[short] for _, each in them if id(each) in answers] for them in messages)
        if any(not np.array_equal(values, them[0], equal_nan=True) for them in of_message for values in them[1:]):
            yield name


# ---- from messages to noise ------------------------------------------------------------------------------------------


def _collect_field(runs: Sequence[RunTraffic], name: str, claim: NoiseClaim) -> _Field:
    sources = find_field_sources(runs)
    if name not in sources:
        names = ", ".join(sources) or "none; a decoder provides them"
        raise SpecError(f"--noise-distribution must name decoded fields, got {name!r}: choose from {names}")
    short = name.split(" in ", 1)[0]
    width = max(len(each.fields[short]) for occurrences in sources[name] for _, each in occurrences)
    shape = (len(runs), len(sources[name]), width)
    numbers, *centres = (np.full(shape, np.nan) for _ in range(3))
    earlier = _index_earlier_messages(runs) if claim.centre is not None else {}
    for t, occurrences in enumerate(sources[name]):
        for k, message in occurrences:
            own = message.fields[short]
            numbers[k, t, : len(own)] = own
            if claim.centre is not None:
                decoded, place = earlier[id(message)]
                for world, values in enumerate(centres):
                    centre = claim.centre(world, message, decoded[:place])
                    values[k, t, : len(own)] = _parse_centre(name, centre, len(own))
    scales = np.array([claim.scale[min(t, len(claim.scale) - 1)] for t in range(shape[1])])[:, None]
    step = np.zeros(shape)
    is_present = np.isfinite(numbers)
    step[is_present] = estimate_resolution(numbers[is_present])
    both_centres = None if claim.centre is None else (centres[0], centres[1])
    return _Field(claim, numbers, both_centres, scales, step)


def _index_earlier_messages(runs: Sequence[RunTraffic]) -> dict[int, tuple[Sequence[DecodedMessage], int]]:
    """Return, for every decoded message by identity, the messages of its run, and the number before it."""
    earlier: dict[int, tuple[Sequence[DecodedMessage], int]] = {}
    for run in runs:
        decoded = [each.decoded_message for each in run.messages if each.decoded_message is not None]
        for k, each in enumerate(decoded):
            earlier[id(each)] = decoded, k
    return earlier


def _parse_centre(name: str, centre: Any, width: int) -> FloatArray:
    """Parse a centre as `width` numbers; a single one is repeated."""
    try:
        values: FloatArray = np.asarray(centre, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise SpecError(f"--noise: the centre of {name} must be {width} numbers: {error}") from None
    if len(values) not in (1, width) or not np.isfinite(values).all():
        raise SpecError(f"--noise: the centre of {name} must be {width} finite numbers, got {values.tolist()}")
    return as_floats(np.broadcast_to(values, (width,)))


def _find_coarse_step(field: _Field) -> float:
    """Return the rounding step in scales if it is too coarse to test the noise; otherwise 0."""
    steps = (field.step / field.scale)[np.isfinite(field.values)]
    largest = float(np.median(steps)) if len(steps) else 0.0
    return largest if largest > _MAX_ROUNDING_SCALES else 0.0


def _standardize(field: _Field, worlds: IntArray, generator: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Convert noise to standard Laplace numbers `(runs, messages, numbers)`; return them with the worlds.

    If centres are not known, two runs give one. Numbers are spread evenly over their rounding interval: otherwise equal
    rounded numbers would look like repeated noise.
    """
    jitter = generator.uniform(-0.5, 0.5, field.values.shape) * field.step
    values = field.values + jitter
    if field.centres is not None:
        centre = np.where((worlds == 1)[:, None, None], field.centres[1], field.centres[0])
        return convert_to_laplace(field.claim.distribution, (values - centre) / field.scale), _convert_worlds_to_signs(
            worlds
        )
    first, second = _pair_runs(worlds)
    difference = (values[first] - values[second]) / field.scale
    if field.claim.distribution == "gaussian":
        return convert_to_laplace("gaussian", difference / math.sqrt(2.0)), _convert_worlds_to_signs(worlds[first])
    # Difference of two standard Laplace numbers: P(|D| > t) = exp(-t) (1 + t/2).
    sizes = np.abs(difference)
    return as_floats(np.copysign(sizes - np.log1p(sizes / 2.0), difference)), _convert_worlds_to_signs(worlds[first])


def _convert_worlds_to_signs(worlds: IntArray) -> FloatArray:
    """Convert worlds to -1 in world 0, 1 in world 1."""
    return as_floats(2 * worlds - 1)


def _pair_runs(worlds: IntArray) -> tuple[IntArray, IntArray]:
    """Pair consecutive runs of the same world."""
    ranks = [np.flatnonzero(worlds == world) for world in (0, 1)]
    first = np.concatenate([own[0 : 2 * (len(own) // 2) : 2] for own in ranks])
    second = np.concatenate([own[1 : 2 * (len(own) // 2) : 2] for own in ranks])
    order = np.argsort(first, kind="stable")
    return first[order], second[order]


# ---- tests -----------------------------------------------------------------------------------------------------------


def _run_conformance_tests(
    noise: Mapping[str, tuple[FloatArray, FloatArray]], levels: AlphaAllocation, others: list[Test]
) -> tuple[tuple[Test, ...], int]:
    """Run all conformance tests that need no lattice; return them with the count of numbers.

    `others` are levelled among the tests of single numbers.
    """
    numbers, single, dependent = 0, list[Test](), list[Test]()
    if noise:
        rounds = max(values.shape[1] for values, _ in noise.values())
        layout = Layout(("the service",), rounds, tuple((name, each.shape[2]) for name, (each, _) in noise.items()))
        conformance_tests: tuple[ConformanceTest, ...] = (Marginal(layout), Dependence(layout))
        for block in _build_blocks(noise, layout):
            numbers += block.count
            for each in conformance_tests:
                each.add(block)
        single, dependent = (each.compute_tests() for each in conformance_tests)
    tests = *levels.assign_levels("marginal", [*single, *others]), *levels.assign_levels("dependence", dependent)
    return tuple(map(_describe_in_messages, tests)), numbers


def _build_blocks(noise: Mapping[str, tuple[FloatArray, FloatArray]], layout: Layout) -> Iterator[Block]:
    """Build blocks of some runs, fields concatenated; fields with unknown centres have half as many."""
    total = max(len(values) for values, _ in noise.values())
    step = max(2, _MAX_SLICE_NUMBERS // layout.numbers_per_run)
    for start in range(0, total, step):
        runs = min(step, total - start)
        block = Block.create_blank(layout, runs)
        world = np.zeros(block.values.shape)
        for (values, signs), (_, part) in zip(noise.values(), layout.iterate_field_slices(), strict=True):
            part_values = values[start : start + runs]
            block.values[0, : part_values.shape[1], : len(part_values), part] = part_values.transpose(1, 0, 2)
            world[0, :, : len(part_values), part] = signs[start : start + runs, None]
        block.scale[:] = 1.0
        yield replace(block, past={"the world": world})


def _describe_in_messages(test: Test) -> Test:
    """Rename rounds of the location to messages of a field, counted within a run, and omit the only learner."""
    location = re.sub(r"\bround (?=\d)", "message ", test.location).replace("noisy rounds", "noisy messages")
    return replace(test, location=re.sub(r"\bthe service, (?=field |message |coordinate )", "", location))


def _test_ties(fields: Mapping[str, _Field], worlds: IntArray) -> Test:
    """Test whether noise is repeated, with any sign: in a message, in a run or across runs, though the messages differ.

    Two sizes of claimed noise, as exponential numbers, are in one cell of width w with probability w/2. Cells are ten rounding
    steps wide, because sizes of Gaussian noise grow that much faster than the noise.
    """
    ties, expected = 0, 0.0
    generator = np.random.default_rng(0)
    for field in fields.values():
        unrounded = replace(field, step=np.zeros_like(field.step))
        sizes = np.abs(_standardize(unrounded, worlds, generator)[0])
        sizes = sizes[np.isfinite(sizes)]
        if len(sizes) < 2:
            continue
        steps = (field.step / field.scale)[np.isfinite(field.values)]
        width = max(10.0 * float(steps.max(initial=0.0)), 2.0**-40)
        cells = np.floor(sizes / width)
        if field.centres is not None:
            cells = cells[cells > 0.0]  # numbers without noise are counted by another test
        ties += len(cells) - len(np.unique(cells))
        expected += 0.25 * width * float(len(sizes)) ** 2
    p_value = float(special.gammainc(ties, expected)) if ties else 1.0
    return Test("ties", "no noise is repeated", float(ties), p_value, f"{expected:.2g} expected")


# ---- epsilon of the claims -------------------------------------------------------------------------------------------


def _compute_epsilon(fields: Mapping[str, _Field], delta: float) -> float:
    """Compute epsilon of a run, at a delta, if its noise is as claimed; not-a-number if no centre is known.

    The loss of some fields is at most that of the whole run: they are part of it. The loss of Laplace noise is the sum of all
    differences of its centres, in scales, in the run where this is largest; that of Gaussian noise follows from their root sum
    of squares, in the run where this is smallest, because only a loss of all runs is a property of the mechanism at a delta.
    """
    known = [field for field in fields.values() if field.centres is not None]
    if not known:
        return math.nan
    shifts = {"laplace": np.zeros(len(known[0].values)), "gaussian": np.zeros(len(known[0].values))}
    for field in known:
        first, second = field.centres or (field.values, field.values)
        shift = np.abs(first - second) / field.scale
        power = 1 if field.claim.distribution == "laplace" else 2
        shifts[field.claim.distribution] += np.nansum(shift**power, axis=(1, 2))
    return float(shifts["laplace"].max()) + compute_gaussian_epsilon(math.sqrt(float(shifts["gaussian"].min())), delta)


def _test_claimed_epsilon(epsilon: float, claim: float, delta: float) -> Iterator[Test]:
    """Test whether the claimed noise gives the claimed epsilon, without randomness; empty if either is not known."""
    if math.isnan(epsilon) or math.isinf(claim):
        return
    is_kept = epsilon <= claim * (1.0 + 1e-6) + 1e-9
    at = f" at delta {delta:.3g}" if delta else ""
    description = "the claimed noise keeps the claimed epsilon"
    yield Test(
        "epsilon of the noise", description, epsilon, float(is_kept), f"{claim:.4g} claimed{at}", is_primary=False
    )
