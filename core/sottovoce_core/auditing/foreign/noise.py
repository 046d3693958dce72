"""Claimed noise of a service that is not ours: its law, scale and centre, and whether messages have it.

Where the centre is known, noise is what a message has beside it. Where it is not, but the same in all runs of a world, the
difference of two runs has no centre: its law is known exactly, and two runs give one. Either way noise becomes standard Laplace
numbers of the same probability, and the tests of conformance look at them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy import stats

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
"""Scales that numbers may be rounded to: the law of what is rounded more coarsely depends on how that is done."""

_MAX_SLICE_NUMBERS = 2**20
"""Numbers that the tests of conformance look at together: about 100 MB."""

Centre = Callable[[int, DecodedMessage, Sequence[DecodedMessage]], Any]
"""The numbers without noise: of the world, a message, and all decoded messages of the run before it."""


@dataclass(frozen=True, slots=True)
class NoiseClaim:
    """What is claimed of the noise of one decoded field.

    Attributes:
        law: `laplace` or `gaussian`.
        scale: of the Laplace law, or the standard deviation; one for each message of a run, the last one for all that follow.
        centre: what the field holds without noise; None: not known, and the same in all runs of a world.
    """

    distribution: Literal["laplace", "gaussian"]
    scale: tuple[float, ...]
    centre: Centre | None = None


@dataclass(frozen=True, slots=True, eq=False)
class NoiseFindings:
    """What came of the claimed noise.

    Attributes:
        tests: of conformance, each with its level.
        numbers: of noise that were tested.
        shown: some of them as standard Laplace numbers.
        epsilon: of a run, if the noise is what is claimed; not-a-number where centres are not known.
        left_out: fields that were not tested, and why, a sentence each.
        undecided: fields of answers that differ from run to run, and whose loss the tested noise does not tell: guesses decide.
    """

    tests: tuple[Test, ...]
    noise_count: int
    noise_sample: FloatArray
    epsilon: float
    exclusions: tuple[str, ...]
    undecided_fields: tuple[str, ...]

    @property
    def is_decisive(self) -> bool:
        """Whether the tested noise tells what a run loses, without a guess."""
        return not math.isnan(self.epsilon) and not self.undecided_fields


@dataclass(frozen=True, slots=True, eq=False)
class _Field:
    """A claimed field in all runs, `(runs, messages, numbers)` each; not-a-number where a run has none.

    Attributes:
        said: the numbers.
        centres: without noise, in worlds 0 and 1; None: not known.
        scale: `(messages, 1)` of the noise.
        step: what the numbers are rounded to.
    """

    claim: NoiseClaim
    said: FloatArray
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
    """Test whether the fields of all messages have the noise that is claimed.

    Args:
        runs: of both worlds.
        claims: by the name of a decoded field.
        levels: of the audit, with parts for conformance.
        generator: spreads rounded numbers over what was rounded to them.
        claim, delta: what is claimed of a run; infinite: nothing is.

    Raises:
        SpecError: no message has such a field, or a centre has another shape.
    """
    worlds = np.array([run.world for run in runs], dtype=np.int64)
    fields, left_out = {}, []
    for name, each in claims.items():
        field = _gathered(runs, name, each)
        if coarse := _coarse(field):
            left_out.append(f"{name} is rounded to {coarse:.2g} scales: its noise was not tested")
        else:
            fields[name] = field
    noise = {name: _standard(field, worlds, generator) for name, field in fields.items()}
    epsilon = _epsilon(fields, delta)
    tests, numbers = _conformance(noise, levels, list(_fits(epsilon, claim, delta)))
    ties = levels.assign_levels("freshness", [_ties(fields, worlds)]) if numbers else ()
    shown = np.concatenate([np.empty(0), *(values[np.isfinite(values)] for values, _ in noise.values())])
    decided = {name for name, field in fields.items() if field.centres is not None}
    return NoiseFindings(
        tests=(*tests, *ties),
        noise_count=numbers,
        noise_sample=shown,
        epsilon=epsilon,
        exclusions=tuple(left_out),
        undecided_fields=tuple(name for name in _varying(runs) if name not in decided),
    )


def _varying(runs: Sequence[RunTraffic]) -> Iterator[str]:
    """Decoded fields of what the service answers whose numbers are not the same in all runs."""
    answers = {id(each.decoded_message) for run in runs for each in run.messages if each.direction == "back"}
    for name, messages in find_field_sources(runs).items():
        short = name.split(" in ", 1)[0]
        of_message = ([each.fields[short] for _, each in them if id(each) in answers] for them in messages)
        if any(not np.array_equal(values, them[0], equal_nan=True) for them in of_message for values in them[1:]):
            yield name


# ---- from messages to noise ------------------------------------------------------------------------------------------


def _gathered(runs: Sequence[RunTraffic], name: str, claim: NoiseClaim) -> _Field:
    known = find_field_sources(runs)
    if name not in known:
        names = ", ".join(known) or "none: a decoder gives them"
        raise SpecError(f"--noise-distribution must name decoded fields, got {name!r}; there are {names}")
    short = name.split(" in ", 1)[0]
    width = max(len(each.fields[short]) for them in known[name] for _, each in them)
    shape = (len(runs), len(known[name]), width)
    said, *centres = (np.full(shape, np.nan) for _ in range(3))
    before = _before(runs) if claim.centre is not None else {}
    for t, them in enumerate(known[name]):
        for k, message in them:
            own = message.fields[short]
            said[k, t, : len(own)] = own
            if claim.centre is not None:
                decoded, place = before[id(message)]
                for world, values in enumerate(centres):
                    found = claim.centre(world, message, decoded[:place])
                    values[k, t, : len(own)] = _numbers(name, found, len(own))
    scales = np.array([claim.scale[min(t, len(claim.scale) - 1)] for t in range(shape[1])])[:, None]
    step = np.zeros(shape)
    there = np.isfinite(said)
    step[there] = estimate_resolution(said[there])
    both = None if claim.centre is None else (centres[0], centres[1])
    return _Field(claim, said, both, scales, step)


def _before(runs: Sequence[RunTraffic]) -> dict[int, tuple[Sequence[DecodedMessage], int]]:
    """Of every decoded message, by identity, those of its run, and how many come before it."""
    found: dict[int, tuple[Sequence[DecodedMessage], int]] = {}
    for run in runs:
        decoded = [each.decoded_message for each in run.messages if each.decoded_message is not None]
        for k, each in enumerate(decoded):
            found[id(each)] = decoded, k
    return found


def _numbers(name: str, centre: Any, width: int) -> FloatArray:
    """A centre as so many numbers; one stands for all."""
    try:
        values: FloatArray = np.asarray(centre, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise SpecError(f"--noise: the centre of {name} must be {width} numbers: {error}") from None
    if len(values) not in (1, width) or not np.isfinite(values).all():
        raise SpecError(f"--noise: the centre of {name} must be {width} finite numbers, got {values.tolist()}")
    return as_floats(np.broadcast_to(values, (width,)))


def _coarse(field: _Field) -> float:
    """The step of the rounding in scales where it is too coarse to test the noise; else 0."""
    steps = (field.step / field.scale)[np.isfinite(field.said)]
    largest = float(np.median(steps)) if len(steps) else 0.0
    return largest if largest > _MAX_ROUNDING_SCALES else 0.0


def _standard(field: _Field, worlds: IntArray, generator: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Noise as standard Laplace numbers `(runs, messages, numbers)`, one run for two where centres are not known; and worlds.

    Numbers are spread evenly over what was rounded to them: else what is rounded alike would look like the same noise.
    """
    jitter = generator.uniform(-0.5, 0.5, field.said.shape) * field.step
    said = field.said + jitter
    if field.centres is not None:
        own = np.where((worlds == 1)[:, None, None], field.centres[1], field.centres[0])
        return convert_to_laplace(field.claim.distribution, (said - own) / field.scale), _signs(worlds)
    first, second = _pairs(worlds)
    difference = (said[first] - said[second]) / field.scale
    if field.claim.distribution == "gaussian":
        return convert_to_laplace("gaussian", difference / math.sqrt(2.0)), _signs(worlds[first])
    # Of two standard Laplace numbers: P(|D| > t) = exp(-t) (1 + t/2).
    sizes = np.abs(difference)
    return as_floats(np.copysign(sizes - np.log1p(sizes / 2.0), difference)), _signs(worlds[first])


def _signs(worlds: IntArray) -> FloatArray:
    """-1 in world 0, 1 in world 1."""
    return as_floats(2 * worlds - 1)


def _pairs(worlds: IntArray) -> tuple[IntArray, IntArray]:
    """Runs of one world by twos, in order."""
    ranks = [np.flatnonzero(worlds == world) for world in (0, 1)]
    first = np.concatenate([own[0 : 2 * (len(own) // 2) : 2] for own in ranks])
    second = np.concatenate([own[1 : 2 * (len(own) // 2) : 2] for own in ranks])
    order = np.argsort(first, kind="stable")
    return first[order], second[order]


# ---- tests -----------------------------------------------------------------------------------------------------------


def _conformance(
    noise: Mapping[str, tuple[FloatArray, FloatArray]], levels: AlphaAllocation, beside: list[Test]
) -> tuple[tuple[Test, ...], int]:
    """All tests of conformance that need no lattice, others beside those of single numbers, and how many numbers they saw."""
    numbers, single, dependent = 0, list[Test](), list[Test]()
    if noise:
        rounds = max(values.shape[1] for values, _ in noise.values())
        layout = Layout(("the service",), rounds, tuple((name, each.shape[2]) for name, (each, _) in noise.items()))
        instruments: tuple[ConformanceTest, ...] = (Marginal(layout), Dependence(layout))
        for block in _blocks(noise, layout):
            numbers += block.count
            for each in instruments:
                each.add(block)
        single, dependent = (each.compute_tests() for each in instruments)
    found = *levels.assign_levels("marginal", [*single, *beside]), *levels.assign_levels("dependence", dependent)
    return tuple(map(_in_messages, found)), numbers


def _blocks(noise: Mapping[str, tuple[FloatArray, FloatArray]], layout: Layout) -> Iterator[Block]:
    """Some runs at a time, fields side by side; fields whose centres are not known have half as many."""
    total = max(len(values) for values, _ in noise.values())
    step = max(2, _MAX_SLICE_NUMBERS // layout.numbers_per_run)
    for start in range(0, total, step):
        runs = min(step, total - start)
        block = Block.create_blank(layout, runs)
        world = np.zeros(block.values.shape)
        for (values, signs), (_, part) in zip(noise.values(), layout.iterate_field_slices(), strict=True):
            some = values[start : start + runs]
            block.values[0, : some.shape[1], : len(some), part] = some.transpose(1, 0, 2)
            world[0, :, : len(some), part] = signs[start : start + runs, None]
        block.scale[:] = 1.0
        yield replace(block, past={"the world": world})


def _in_messages(test: Test) -> Test:
    """Rounds of the tests are the messages of a field, counted within a run; and there is one speaker."""
    where = re.sub(r"\bround (?=\d)", "message ", test.location).replace("noisy rounds", "noisy messages")
    return replace(test, location=re.sub(r"\bthe service, (?=field |message |coordinate )", "", where))


def _ties(fields: Mapping[str, _Field], worlds: IntArray) -> Test:
    """Whether noise is repeated, of any sign: in a message, in a run or across runs, though the messages differ.

    Of claimed noise two sizes, as exponential numbers, lie in one cell of width w with probability w/2. Cells are as wide as
    ten steps of the rounding: where the law is Gaussian, sizes grow so much faster than the noise.
    """
    ties, expected = 0, 0.0
    quiet = np.random.default_rng(0)
    for field in fields.values():
        plain = replace(field, step=np.zeros_like(field.step))
        sizes = np.abs(_standard(plain, worlds, quiet)[0])
        sizes = sizes[np.isfinite(sizes)]
        if len(sizes) < 2:
            continue
        steps = (field.step / field.scale)[np.isfinite(field.said)]
        width = max(10.0 * float(steps.max(initial=0.0)), 2.0**-40)
        cells = np.floor(sizes / width)
        if field.centres is not None:
            cells = cells[cells > 0.0]  # numbers without noise are counted by another test
        ties += len(cells) - len(np.unique(cells))
        expected += 0.25 * width * float(len(sizes)) ** 2
    p_value = float(stats.poisson.sf(ties - 1, expected)) if ties else 1.0
    return Test("ties", "no noise is said again", float(ties), p_value, f"{expected:.2g} expected")


# ---- what the claims come to -----------------------------------------------------------------------------------------


def _epsilon(fields: Mapping[str, _Field], delta: float) -> float:
    """Of a run, at a delta, if its noise is what is claimed; not-a-number where no centre is known.

    What some fields lose is no more than the whole run loses: they are part of it. Laplace noise loses the sum of all
    differences of its centres, in scales, in the run where this is largest; Gaussian noise by their root of squares, in the run
    where this is smallest, for only what all runs lose is a property of the mechanism at a delta.
    """
    known = [field for field in fields.values() if field.centres is not None]
    if not known:
        return math.nan
    moved = {"laplace": np.zeros(len(known[0].said)), "gaussian": np.zeros(len(known[0].said))}
    for field in known:
        first, second = field.centres or (field.said, field.said)
        shift = np.abs(first - second) / field.scale
        power = 1 if field.claim.distribution == "laplace" else 2
        moved[field.claim.distribution] += np.nansum(shift**power, axis=(1, 2))
    return float(moved["laplace"].max()) + compute_gaussian_epsilon(math.sqrt(float(moved["gaussian"].min())), delta)


def _fits(epsilon: float, claim: float, delta: float) -> Iterator[Test]:
    """Whether the claimed noise keeps the claimed epsilon: no chance is in it. Nothing where either is not known."""
    if math.isnan(epsilon) or math.isinf(claim):
        return
    holds = epsilon <= claim * (1.0 + 1e-6) + 1e-9
    at = f" at delta {delta:.3g}" if delta else ""
    what = "the claimed noise keeps the claimed epsilon"
    yield Test("epsilon of the noise", what, epsilon, float(holds), f"{claim:.4g} claimed{at}", is_primary=False)
