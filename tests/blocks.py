"""Blocks of noise made of whole numbers: what tests of conformance look at, and reference noise free of the simulator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy import special

from sottovoce_core.arrays import BoolArray, FloatArray, IntArray
from sottovoce_core.auditing.bounds import AlphaAllocation, Test
from sottovoce_core.auditing.conformance.block import Block, ConformanceTest, Layout
from sottovoce_core.auditing.conformance.residuals import ALL_BITS
from sottovoce_core.noise import lattice_spacing

SCALE = 1.5
"""Of the noise, where a test does not say another one; spacings are `1.5 * 2^40` of a scale apart."""

MID = (5, 16, 20, 17)
"""Learners, rounds, runs and numbers: 27,200 numbers in 1,600 messages."""


def discrete_laplace(
    rng: np.random.Generator, shape: tuple[int, ...], rate: float = float(lattice_spacing(SCALE)) / SCALE
) -> IntArray:
    """Whole numbers K with `P(K = k) = tanh(h/2) exp(-h |k|)`, h the `rate`; every bit of them is random.

    |K| is geometric with ratio `exp(-h)`, so its low bits, below 2^w, are independent of the others: these are geometric with
    ratio `exp(-h 2^w)`, and those are uniform numbers, taken with probability `exp(-h U)`. A negative zero is drawn again.
    """
    count = int(np.prod(shape, dtype=np.int64))
    drawn, waiting = np.zeros(count, np.int64), np.arange(count)
    low = max(0, int(np.floor(np.log2(2.0**-8 / rate))))  # bits: so few are refused that it does not matter
    while waiting.size:
        size = rng.integers(0, 2**low, waiting.size)
        taken = rng.random(waiting.size) < np.exp(-rate * size)
        size += (rng.geometric(-np.expm1(-rate * 2.0**low), waiting.size) - 1) << low
        negative = rng.integers(0, 2, waiting.size).astype(np.bool_)
        taken &= ~(negative & (size == 0))
        drawn[waiting] = np.where(negative, -size, size)
        waiting = waiting[~taken]
    return drawn.reshape(shape)


def gaussian(rng: np.random.Generator, shape: tuple[int, ...], deviation: float = 2.0**0.5) -> IntArray:
    """Gaussian numbers of so many scales (of `SCALE`), by default with the variance of Laplace noise; low bits drawn apart."""
    coarse = np.floor(rng.normal(0.0, deviation * SCALE / float(lattice_spacing(SCALE)) / 2**16, shape)).astype(
        np.int64
    )
    return (coarse << 16) + rng.integers(0, 2**16, shape)


def block_of(
    steps: IntArray,
    *,
    scale: FloatArray | float = SCALE,
    fields: Sequence[tuple[str, int]] | None = None,
    learners: Sequence[str] | None = None,
    centre: IntArray | int = 0,
    known: BoolArray | None = None,
    judged: BoolArray | None = None,
    lost: int = 0,
    past: Mapping[str, FloatArray] | None = None,
) -> Block:
    """A block of this noise.

    Args:
        steps: `(learners, rounds, runs, numbers)` noise in lattice spacings, K'.
        scale: of the noise, one for all or of a shape that broadcasts to `(learners, rounds, numbers)`; it says the spacing, too.
        fields: names and widths; None: one, "y".
        learners: their names; None: learner 0, learner 1, ...
        centre: what was said without noise, in spacings; broadcasts to `steps`.
        known: where noise is known, of a shape that broadcasts to `steps`; None: everywhere.
        judged: likewise, where float64 resolves the lattice; None: wherever noise is known.
        lost: low bits that it does not resolve there.
        past: `Block.past`.
    """
    n_learners, rounds, _, numbers = steps.shape
    scales = np.broadcast_to(np.asarray(scale, dtype=float), (n_learners, rounds, numbers)).copy()
    spacing = np.asarray(lattice_spacing(scales))
    everywhere = np.broadcast_to(True if known is None else known, steps.shape)
    resolved = everywhere & np.broadcast_to(True if judged is None else judged, steps.shape)
    values = steps * (spacing / scales)[:, :, None]
    return Block(
        Layout(
            tuple(f"learner {i}" for i in range(n_learners)) if learners is None else tuple(learners),
            rounds,
            (("y", numbers),) if fields is None else tuple(fields),
        ),
        values=np.where(everywhere, values, np.nan),
        steps=np.where(resolved, steps, 0),
        message_steps=np.where(resolved, steps + centre, 0),
        lost_bits=np.where(resolved, lost, ALL_BITS).astype(np.int8),
        is_off_lattice=np.zeros(steps.shape, np.bool_),
        scale=scales,
        grid=spacing,
        past=past or {},
    )


def noise_block(
    rng: np.random.Generator, shape: tuple[int, int, int, int] = MID, *, known: BoolArray | None = None
) -> Block:
    """Correct noise around centres that are anywhere."""
    centre = rng.integers(-(2**43), 2**43, (shape[0], shape[1], 1, shape[3]))
    return block_of(discrete_laplace(rng, shape), centre=centre, known=known)


def likely(failures: int, tries: int, chance: float) -> float:
    """How likely so many failures, or more, are where each has this chance."""
    return float(special.betainc(failures, tries - failures + 1, chance)) if failures else 1.0


_FEW = ((1, 1, 1, 1), (5, 1, 1, 1), (3, 1, 10, 7), (1, 5, 20, 3), (2, 3, 20, 1), (2, 6, 9, 4))
_MANY = ((20, 2, 5, 2), (1, 50, 4, 5), (1, 1, 300, 1), (2, 4, 8, 60), (1, 2, 3, 500))
ODD = _FEW + _MANY
"""Shapes of small audits: few learners, rounds, runs, numbers, or many."""


def odd_block(rng: np.random.Generator) -> Block:
    """Correct noise of one of the shapes `ODD`: messages unheard, several fields, slips of the replay, a lost bit.

    A replay that rounds elsewhere finds K' one off K in one number of twenty, to the side that the centre is on.
    """
    shape = ODD[rng.integers(len(ODD))]
    steps = discrete_laplace(rng, shape)
    centre = rng.integers(-(2**43), 2**43, (shape[0], shape[1], 1, shape[3]))
    slip = np.where(rng.random(steps.shape) < 0.05, np.sign(centre), 0)
    first = int(rng.integers(1, shape[3] + 1))
    widths = ((name, width) for name, width in (("x", first), ("y", shape[3] - first)) if width)
    heard = rng.random((*shape[:3], 1)) < rng.choice([0.8, 1.1])
    judged = rng.random((shape[0], shape[1], 1, 1)) < rng.choice([0.8, 1.1])
    lost = int(rng.integers(0, 2))
    return block_of(
        steps - slip, centre=centre + slip, fields=tuple(widths), known=heard, judged=heard & judged, lost=lost
    )


# ---- what every instrument must do -----------------------------------------------------------------------------------


def closely(block: Block) -> Block:
    """The block as one that is looked at for dependence, too."""
    return replace(block, past={"nothing": np.zeros(block.values.shape), **block.past})


def judged(kind: type[ConformanceTest], *blocks: Block) -> dict[str, Test]:
    """What an instrument comes to, by name, each test with its level at 99 %; looked at closely."""
    instrument = kind(blocks[0].layout)
    for block in blocks:
        instrument.add(closely(block))
    return {test.name: test for test in AlphaAllocation(0.01).assign_levels(kind.part, instrument.compute_tests())}


def refuted(kind: type[ConformanceTest], *blocks: Block) -> set[str]:
    """The tests of an instrument that correct noise would hardly ever fail, and these blocks do."""
    return {name for name, test in judged(kind, *blocks).items() if test.is_significant}


def require_right_p_values(kind: type[ConformanceTest], rng: np.random.Generator) -> None:
    """P-values of 400 audits of odd shapes: as few are below .01 and .001 as chance has it.

    Two counts for every test; each is allowed what a correct one exceeds with probability 1e-6.
    """
    found = defaultdict(list)
    for _ in range(400):
        for name, test in judged(kind, odd_block(rng)).items():
            found[name].append(test.p_value)
    for name, p_values in found.items():
        assert np.isfinite(p_values).all(), name
        for chance in (0.01, 0.001):
            count = int(np.count_nonzero(np.array(p_values) < chance))
            assert likely(count, len(p_values), chance) > 1e-6, (name, chance, count)


def require_adds_up(kind: type[ConformanceTest], rng: np.random.Generator, rel: float) -> None:
    """One block, and three of which two are in another instrument: p-values are equal but for so much of them."""
    noise, heard = discrete_laplace(rng, (3, 4, 60, 5)), rng.random((3, 4, 60, 1)) < 0.9
    parts = [closely(block_of(noise[:, :, k : k + 20], known=heard[:, :, k : k + 20])) for k in (0, 20, 40)]
    first, others = kind(parts[0].layout), kind(parts[0].layout)
    first.add(parts[0])
    others.add(parts[1])
    others.add(parts[2])
    first.merge(others)
    whole = judged(kind, block_of(noise, known=heard))
    assert [test.name for test in first.compute_tests()] == list(whole)
    for test in first.compute_tests():
        assert test.p_value == pytest.approx(whole[test.name].p_value, rel=rel), test.name
        assert test.location == whole[test.name].location
