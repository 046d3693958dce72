"""Bits of the uniform numbers behind the noise: those that decide a sign or are drawn twice are found; fair ones are not accused.

Seeds are fixed. Reference noise is drawn by `tests.blocks`, which the simulator's arithmetic has no part in.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
import pytest

from sottovoce_core.auditing.conformance.battery import Dependence
from sottovoce_core.auditing.conformance.block import Block
from sottovoce_core.auditing.conformance.residuals import convert_to_laplace
from sottovoce_core.auditing.conformance.uniforms import Uniforms
from sottovoce_core.auditing.plan import plan_audit
from sottovoce_core.noise import NoiseRequest, SeededNoise, lattice_spacing
from tests import blocks
from tests.blocks import MID, SCALE, block_of, closely, gaussian, noise_block, require_adds_up, require_right_p_values
from tests.claims import SETUPS
from tests.core.test_reach import within_reach
from tests.examples import made_up

Words = npt.NDArray[np.uint64]

SPACING = float(lattice_spacing(SCALE)) / SCALE
"""Of the lattice, in scales."""

SMALL = (3, 8, 20, 16)
"""Learners, rounds, runs and numbers: 7,680 numbers."""


judged, refuted = partial(blocks.judged, Uniforms), partial(blocks.refuted, Uniforms)
dependent = partial(blocks.refuted, Dependence)


# ---- samplers that invert their law ----------------------------------------------------------------------------------


def words(rng: np.random.Generator, width: int, shape: tuple[int, ...] = SMALL) -> Words:
    return rng.integers(0, 2**width, shape, dtype=np.uint64)


def inverted(drawn: Words, width: int, signs: npt.NDArray[np.bool_], offset: float = 1.0) -> Block:
    """Noise whose sizes are `-log((word + offset) / 2^width)`."""
    sizes = -np.log(np.ldexp(drawn.astype(np.longdouble) + np.longdouble(offset), -width))
    return block_of(np.rint(np.where(signs, -sizes, sizes) / SPACING).astype(np.int64))


def bit(drawn: Words, k: int) -> npt.NDArray[np.bool_]:
    return (drawn >> np.uint64(k) & np.uint64(1)).astype(np.bool_)


@pytest.mark.parametrize("offset", [1.0, 0.5])
@pytest.mark.parametrize(
    ("width", "k", "where"),
    [
        (53, 8, "bit 45 of exp(-size)"),
        (53, 20, "bit 33 of exp(-size)"),
        (53, 31, "bit 22 of exp(-size)"),
        (53, 51, "bit 2 of exp(-size)"),
        (32, 3, "bit 29 of exp(-size)"),
        (32, 8, "bit 24 of exp(-size)"),
        (60, 20, "bit 40 of exp(-size)"),
    ],
)
def test_a_sign_that_is_a_bit_of_the_word_of_its_size_is_found(width: int, k: int, where: str, offset: float) -> None:
    """Doornik's flaw: bit 45 of u is resolved in 240 of the numbers, and the sign follows it in all of these."""
    drawn = words(np.random.default_rng(1), width)
    tests = judged(inverted(drawn, width, bit(drawn, k), offset))
    assert tests["signs and bits"].is_significant and tests["signs and bits"].location == where


@pytest.mark.parametrize(("offset", "where"), [(1.0, "bits 32 and 33 of exp(-size)"), (0.5, "bit 32 of exp(-size)")])
def test_the_last_bit_of_a_word_is_found_on_either_side_of_where_it_changes(offset: float, where: str) -> None:
    drawn = words(np.random.default_rng(2), 32)
    assert judged(inverted(drawn, 32, bit(drawn, 0), offset))["signs and bits"].location == where


@pytest.mark.parametrize("k", [0, 3])
def test_deep_bits_are_found_in_the_few_numbers_that_resolve_them(k: int) -> None:
    """Bits 53 and 50 of u are resolved in one number of 2^13 and 2^10: in 48 and 384 of 393,216, all of which follow."""
    drawn = words(np.random.default_rng(3), 53, (3, 16, 512, 16))
    assert "signs and bits" in refuted(inverted(drawn, 53, bit(drawn, k)))


@pytest.mark.parametrize(
    ("axis", "kind"), [(3, "coordinate"), (1, "round"), (0, "learner")], ids=["coordinate", "round", "learner"]
)
@pytest.mark.parametrize(("shift", "side"), [(1, "previous"), (-1, "next")])
def test_a_sign_that_is_a_bit_of_a_neighbours_word_is_found(axis: int, kind: str, shift: int, side: str) -> None:
    drawn = words(np.random.default_rng(4), 53)
    test = judged(inverted(drawn, 53, bit(np.roll(drawn, shift, axis), 8)))["signs and neighbours' bits"]
    assert test.is_significant and test.location == f"bit 45 of exp(-size) of the {side} {kind}"


def test_a_neighbour_is_the_next_round_with_noise() -> None:
    """Noise in every other round alone."""
    rng = np.random.default_rng(5)
    drawn, noisy = words(rng, 53), np.arange(SMALL[1]) % 2 == 0
    signs = bit(np.roll(drawn, 2, axis=1), 8)
    block = inverted(drawn, 53, signs)
    block.values[:, ~noisy], block.lost_bits[:, ~noisy], block.scale[:, ~noisy] = np.nan, 64, np.nan
    test = judged(block)["signs and neighbours' bits"]
    assert test.is_significant and test.location == "bit 45 of exp(-size) of the previous round"


@pytest.mark.parametrize(("low", "first"), [(14, 40), (20, 34), (30, 24)])
def test_low_bits_that_two_sizes_share_are_found(low: int, first: int) -> None:
    rng = np.random.default_rng(6)
    drawn, mask = words(rng, 53), np.uint64(2**low - 1)
    drawn[..., 1::2] = drawn[..., 1::2] & ~mask | drawn[..., ::2] & mask
    test = judged(inverted(drawn, 53, bit(words(rng, 53), 0)))["shared bits"]
    assert test.is_significant and test.location.endswith("also of the next coordinate")
    assert first <= int(test.location.split()[1]) <= 40


def test_two_sizes_from_overlapping_parts_of_a_word_are_found() -> None:
    """The first 53 of 64 bits, and the last 53."""
    rng = np.random.default_rng(7)
    drawn = rng.integers(0, 2**64, SMALL, dtype=np.uint64)
    drawn[..., 1::2] = drawn[..., ::2] & np.uint64(2**53 - 1)
    drawn[..., ::2] >>= np.uint64(11)
    found = judged(inverted(drawn, 53, bit(words(rng, 53), 0)))["pairs of bits"]
    first, second = int(found.location.split()[1]), int(found.location.split()[6])
    assert found.is_significant and found.location.endswith("of the next coordinate") and first - second == 11


def test_words_of_few_bits_are_found() -> None:
    """Of 32, whose sizes are said again once in 2^32 only; 7,680 numbers would show this with probability 0.007."""
    drawn = words(np.random.default_rng(8), 32)
    assert refuted(inverted(drawn, 32, bit(words(np.random.default_rng(9), 53), 0))) == {"pairs of bits"}


@pytest.mark.statistics
def test_signs_that_are_a_bit_as_deep_as_the_reach_says_are_found() -> None:
    """Nine times in ten: in fewer than 8 of 16 with probability 1e-4."""
    run = SETUPS["ldp-dol"].build()
    plan = plan_audit(run, made_up(run.spec, SETUPS["ldp-dol"].n_features), 1, runs=400, confidence=0.99)
    rng, found = np.random.default_rng(18), 0
    [depth] = [
        int(each.min_effect)
        for each in within_reach(plan, 7_680).detectable_effects
        if each.text.startswith("signs that")
    ]
    assert 46 <= depth <= 50
    for _ in range(16):
        drawn = words(rng, 53)
        found += "signs and bits" in dependent(inverted(drawn, 53, bit(drawn, 53 - depth)))
    assert found >= 8


# ---- correct noise ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_p_values_are_right() -> None:
    """By construction this fails with probability at most 1e-5 with a fresh seed."""
    require_right_p_values(Uniforms, np.random.default_rng(10))


def test_runs_add_up() -> None:
    require_adds_up(Uniforms, np.random.default_rng(11), 1e-9)


def test_all_pairs_of_a_long_run_are_cut_short() -> None:
    """A run of more numbers than are compared in pairs: 2^18; correct noise fails with probability 1/600."""
    assert not refuted(noise_block(np.random.default_rng(12), (4, 16, 1, 2**12)))


@pytest.mark.parametrize("scale", [1.0, 1.0 + 2.0**-40, 1.999999, 1e-6, 1e6])
def test_noise_of_the_simulator_is_not_accused(scale: float) -> None:
    """Its words have 53 bits, the last of which is always 1, and are rounded to the lattice; a fresh seed fails with 1/600."""
    spacing, shape = float(lattice_spacing(scale)), (40, 1600, 8)
    drawn = SeededNoise(13)(NoiseRequest("laplace", "y", 0, scale, spacing, shape))
    steps = np.rint(drawn / spacing).astype(np.int64).reshape(5, 8, 1600, 8)
    assert not refuted(block_of(steps, scale=scale))


def test_gaussian_noise_is_not_accused() -> None:
    """As `convert_to_laplace` maps it; a fresh seed fails with probability 1/600."""
    block = block_of(gaussian(np.random.default_rng(14), (5, 16, 200, 17), 1.0))
    block.values[:] = convert_to_laplace("gaussian", block.values)
    assert not refuted(block)


def test_noise_that_float64_does_not_resolve_is_not_judged() -> None:
    drawn = words(np.random.default_rng(15), 53)
    block = inverted(drawn, 53, bit(drawn, 20))
    block.lost_bits[:] = 2
    assert judged(block) == {}
    block.lost_bits[:] = 1
    assert "signs and bits" in refuted(closely(block))


def test_a_word_of_a_block_of_one_number_has_no_neighbours() -> None:
    assert {test.name for test in judged(noise_block(np.random.default_rng(16), (1, 1, 9, 1))).values()} == {
        "signs and bits",
        "pairs of bits",
    }
    assert len(judged(noise_block(np.random.default_rng(17), MID))) == 4
