"""The lattice of noise and messages: what covers it badly is refuted, and correct noise is not.

Seeds are fixed. Reference noise is drawn by `tests.blocks`, which the simulator's arithmetic has no part in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from sottovoce_core.arrays import IntArray
from sottovoce_core.auditing.conformance.lattice import Lattice
from tests import blocks
from tests.blocks import (
    MID,
    block_of,
    closely,
    discrete_laplace,
    gaussian,
    likely,
    noise_block,
    require_adds_up,
    require_right_p_values,
)

Drawn = Callable[[np.random.Generator, IntArray], IntArray]
judged, refuted = partial(blocks.judged, Lattice), partial(blocks.refuted, Lattice)


def rounded(noise: IntArray, bits: int) -> IntArray:
    """To mantissas of so many bits."""
    coarse = np.exp2(np.maximum(np.frexp(noise.astype(float))[1] - bits, 0))
    kept: IntArray = (np.rint(noise / coarse) * coarse).astype(np.int64)
    return kept


# ---- breaks ----------------------------------------------------------------------------------------------------------


def coarser(bits: int, share: float) -> Drawn:
    """So many messages have noise on a lattice 2^bits coarser."""

    def drawn(rng: np.random.Generator, noise: IntArray) -> IntArray:
        broken = np.zeros(noise[..., 0].size, np.bool_)
        broken[rng.permutation(broken.size)[: round(share * broken.size)]] = True
        return np.where(broken.reshape(noise.shape[:-1])[..., None], noise >> bits << bits, noise)

    return drawn


def short(bits: int, share: float) -> Drawn:
    """So many numbers have mantissas of so many bits."""
    return lambda rng, noise: np.where(rng.random(noise.shape) < share, rounded(noise, bits), noise)


def by_one_learner(rng: np.random.Generator, noise: IntArray) -> IntArray:
    noise[3] |= (rng.random(noise[3].shape) < 0.2).astype(np.int64)
    return noise


def without_noise(rng: np.random.Generator, noise: IntArray) -> IntArray:
    return np.zeros_like(noise)


@pytest.mark.parametrize(
    ("broken", "by"),
    [
        (coarser(8, 0.005), "coarse messages"),
        (coarser(1, 0.01), "coarse messages"),
        (coarser(16, 1.0), "trailing zeros"),
        (coarser(16, 1.0), "bits"),
        (coarser(1, 1.0), "bits"),
        (short(30, 0.03), "low bytes"),
        (short(24, 1.0), "mantissas"),
        (short(24, 1.0), "trailing zeros"),
        (short(24, 0.001), "mantissas"),
        (by_one_learner, "learner bits"),
        (without_noise, "bits"),
    ],
)
def test_a_break_is_found(broken: Drawn, by: str) -> None:
    """In each of four audits of 27,200 numbers. A fresh seed fails with probability below .01."""
    rng = np.random.default_rng(1)
    for _ in range(4):
        centre = rng.integers(-(2**43), 2**43, (5, 16, 1, 17))
        assert by in refuted(block_of(broken(rng, discrete_laplace(rng, MID)), centre=centre))


def adding_up(noise: IntArray, axis: int, bit: int) -> None:
    """This bit, and that of the sign, is fair; that of all numbers along an axis adds up to nothing, modulo two."""
    along = np.moveaxis(noise, axis, 0)
    odd = np.bitwise_xor.reduce(along, axis=0) >> bit & 1
    along[0] ^= -odd if bit == SIGN else odd << bit  # K is as likely as -1 - K, whose bits are all others


def alternating(noise: IntArray, axis: int, bit: int) -> None:
    """It changes from each number to the next, as that of a generator of low period does."""
    along = np.moveaxis(noise, axis, 0)
    for k in range(1, len(along)):
        along[k] ^= (~(along[k] ^ along[k - 1]) >> bit & 1) << bit


SIGN = 63


@pytest.mark.parametrize(
    ("change", "axis", "bit", "where"),
    [
        (alternating, 3, 0, "bit 0 of next coordinates"),
        (alternating, 1, 31, "bit 31 of next rounds"),
        (alternating, 0, 7, "bit 7 of next learners"),
        (adding_up, 3, 20, "bit 20 of all of a message"),
        (adding_up, 0, SIGN, "signs of all learners"),
    ],
)
def test_bits_that_are_fair_but_not_independent_are_found(
    change: Callable[[IntArray, int, int], None], axis: int, bit: int, where: str
) -> None:
    """1,360 sums that are all alike, or more: p = 2^-1359, times the sums and bits."""
    noise = discrete_laplace(np.random.default_rng(14), MID)
    change(noise, axis, bit)
    test = judged(block_of(noise))["bits together"]
    assert test.p_value < 1e-300 and test.location == where


def test_coarse_messages_show_without_their_centre() -> None:
    """Messages sent as float32: the noise that a replay finds has low bits of the centre's, which are even."""
    rng = np.random.default_rng(2)
    centre = rng.integers(-(2**43), 2**43, (5, 16, 1, 17))
    noise = discrete_laplace(rng, MID)
    sent = rounded(centre + noise, 24)
    found = refuted(block_of(sent - centre, centre=centre))
    assert {"sent bits", "sent trailing zeros", "sent low bytes"} <= found
    assert "sent bits" not in refuted(block_of(noise >> 8 << 8, centre=centre))


def test_off_the_lattice_is_certain() -> None:
    block = noise_block(np.random.default_rng(3))
    off = np.zeros(MID, np.bool_)
    off[4, 2, 1, 6] = True
    test = judged(replace(block, is_off_lattice=off, layout=replace(block.layout, fields=(("x", 3), ("y", 14)))))[
        "lattice"
    ]
    assert (test.p_value, test.statistic, test.location) == (0.0, 1.0, "learner 4, field 'y'")
    assert test.is_significant
    assert judged(block)["lattice"].p_value == 1.0
    nothing_else = replace(block, is_off_lattice=np.ones(MID, np.bool_), lost_bits=np.full(MID, 64, np.int8))
    assert refuted(nothing_else) == {"lattice"}


def test_places_are_named() -> None:
    rng = np.random.default_rng(4)
    noise = discrete_laplace(rng, MID)
    noise[1, 7, 11, 5:] &= -(2**20)
    noise[3, ..., 5:] |= 2**13
    tests = judged(block_of(noise, fields=(("x", 5), ("y", 12)), learners=("ann", "ben", "eve", "Süd", "zoe")))
    assert tests["coarse messages"].location == "ben, field 'y', round 7"
    assert tests["bits"].location == "bit 13"
    assert tests["learner bits"].location == "Süd, field 'y', bit 13"


# ---- correct noise ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1.5, 1.99999, 0.3e-9])
def test_correct_noise_passes(scale: float) -> None:
    """Of whatever scale, and Gaussian, too. Fails with probability 2e-3 under a fresh seed."""
    rng = np.random.default_rng(5)
    for noise in (discrete_laplace(rng, MID), gaussian(rng, MID)):
        centre = rng.integers(-(2**45), 2**45, (5, 16, 1, 17))
        assert refuted(block_of(noise, scale=scale, centre=centre)) == set()


def test_a_lost_bit_is_not_held_against_anyone() -> None:
    """The spacing may be twice the assumed one. Fails with probability 2e-3 under a fresh seed."""
    rng = np.random.default_rng(6)
    noise, centre = 2 * discrete_laplace(rng, MID), 2 * rng.integers(-(2**43), 2**43, (5, 16, 1, 17))
    assert refuted(block_of(noise, centre=centre, lost=1)) == set()
    assert refuted(block_of(noise + rng.integers(0, 2, MID), centre=centre, lost=1)) == set()
    assert {"bits", "trailing zeros", "sent bits"} <= refuted(block_of(2 * noise, centre=2 * centre, lost=1))


def test_a_replay_that_is_one_off_alarms_nothing() -> None:
    """In every twentieth number, to the side of the centre, over 100 audits. Fails with probability 1e-4 under a fresh seed."""
    rng, found = np.random.default_rng(7), 0
    for _ in range(100):
        noise, centre = discrete_laplace(rng, (2, 8, 20, 9)), rng.integers(-(2**43), 2**43, (2, 8, 1, 9))
        slip = np.where(rng.random(noise.shape) < 0.05, np.sign(centre), 0)
        found += bool(refuted(block_of(noise - slip, centre=centre + slip)))
    assert likely(found, 100, 0.001) > 1e-4


@pytest.mark.statistics
def test_correct_noise_is_rarely_refuted_by_any_test() -> None:
    """About 40 counts, so it fails with probability 4e-5 under a fresh seed."""
    require_right_p_values(Lattice, np.random.default_rng(8))


def test_blocks_add_up() -> None:
    require_adds_up(Lattice, np.random.default_rng(9), rel=1e-12)


def test_nothing_judged_comes_to_nothing() -> None:
    noise = discrete_laplace(np.random.default_rng(10), (2, 3, 4, 5))
    empty, full = (Lattice(block_of(noise).layout) for _ in range(2))
    empty.add(closely(block_of(noise, judged=np.array(False))))
    assert empty.compute_tests() == []
    full.add(closely(block_of(noise)))
    expected = full.compute_tests()
    full.merge(empty)
    assert full.compute_tests() == expected
    empty.merge(full)
    assert empty.compute_tests() == expected


def test_a_field_without_a_lattice_is_left_out() -> None:
    """Of two fields, one is on no lattice."""
    noise = discrete_laplace(np.random.default_rng(11), (3, 4, 60, 6))
    noise[..., 2:] = 0
    on_lattice = np.arange(6) < 2
    assert refuted(block_of(noise, fields=(("x", 2), ("y", 4)), judged=on_lattice)) == set()
    assert "bits" in refuted(block_of(noise, fields=(("x", 2), ("y", 4))))


def test_primary_tests_are_of_all_numbers() -> None:
    """They share the first half of the level."""
    tests = judged(noise_block(np.random.default_rng(12), MID))
    assert {name for name, test in tests.items() if test.is_primary} == {
        "bits",
        "sent bits",
        "trailing zeros",
        "mantissas",
    }
