"""Single numbers of noise: what is refuted, and that correct noise is not.

Seeds are fixed. Reference noise is drawn by `tests.blocks`, which the simulator's arithmetic has no part in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from sottovoce_core.arrays import IntArray
from sottovoce_core.auditing.conformance.marginal import Marginal, _compute_maximum_p_value
from sottovoce_core.auditing.conformance.p_values import compute_gamma_p_value
from sottovoce_core.noise import lattice_spacing
from tests import blocks
from tests.blocks import (
    MID,
    SCALE,
    block_of,
    discrete_laplace,
    gaussian,
    noise_block,
    require_adds_up,
    require_right_p_values,
)

RATE = float(lattice_spacing(SCALE)) / SCALE
judged, refuted = partial(blocks.judged, Marginal), partial(blocks.refuted, Marginal)


# ---- laws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "bit", "share"), [(1.0, 0, 0.3932239), (0.5, 2, 0.4067357), (RATE, 0, 0.5), (RATE, 39, 0.5)]
)
def test_reference_noise_has_its_law(rate: float, bit: int, share: float) -> None:
    """Shares of ones by formula. Fails with probability 1e-6 under a fresh seed."""
    noise = discrete_laplace(np.random.default_rng(1), (200_000,), rate)
    assert (noise >> bit & 1).mean() == pytest.approx(share, abs=4.9 * math.sqrt(0.25 / noise.size))


@pytest.mark.parametrize(
    ("mean", "count", "p_value"), [(0.97, 64_000, 1.783e-14), (0.97, 27_200, 5.851e-7), (0.99, 5_120, 0.476)]
)
def test_a_scale_is_judged_by_its_exact_law(mean: float, count: int, p_value: float) -> None:
    assert compute_gamma_p_value(mean * count, count) == pytest.approx(p_value, rel=1e-3)


@pytest.mark.parametrize(("size", "count", "p_value"), [(6.5, 20_000, 1.71e-13), (7.0, 5_000, 0.0209)])
def test_the_largest_number_is_judged_by_its_exact_law(size: float, count: int, p_value: float) -> None:
    assert _compute_maximum_p_value(size, count) == pytest.approx(p_value, rel=3e-3)


def test_the_largest_number_may_be_too_large_or_zero() -> None:
    assert _compute_maximum_p_value(40.0, 100) == pytest.approx(200 * math.exp(-40.0))
    assert _compute_maximum_p_value(0.0, 5) == 0.0


def test_counts_are_those_of_the_numbers() -> None:
    """Every count that the tests show, against one made number by number."""
    block = noise_block(np.random.default_rng(2), (2, 3, 40, 5))
    tests, sizes = judged(block), block.sizes.reshape(-1)
    assert tests["scale"].statistic == pytest.approx(sizes.mean())
    assert tests["largest"].statistic == sizes.max()
    assert tests["signs"].statistic == pytest.approx((block.values > 0).mean())
    uniform = np.sort(np.where(block.values > 0, 1 - block.tail / 2, block.tail / 2).reshape(-1))
    steps = np.arange(len(uniform) + 1) / len(uniform)
    distance = max((steps[1:] - uniform).max(), (uniform - steps[:-1]).max())
    assert distance - 1 / 128 <= tests["distribution"].statistic <= distance  # seen at the edges of bins
    j = round(float(tests["tails"].location.split()[-1]) / math.log(2.0))
    assert tests["tails"].statistic == pytest.approx((sizes > j * math.log(2.0)).mean())
    j = int(tests["near zero"].location[3:])
    assert tests["near zero"].statistic == pytest.approx((-np.expm1(-sizes) <= 2.0**-j).mean())


# ---- breaks ----------------------------------------------------------------------------------------------------------


def scaled(rng: np.random.Generator) -> IntArray:
    return discrete_laplace(rng, MID, RATE / 0.97)


def scaled_by_run(rng: np.random.Generator) -> IntArray:
    factors = 1.0 + 0.08 * rng.standard_normal((1, 1, MID[2], 1))
    return np.rint(discrete_laplace(rng, MID) * factors).astype(np.int64)


def gaussian_in_part(rng: np.random.Generator) -> IntArray:
    return np.where(rng.random(MID) < 0.2, gaussian(rng, MID), discrete_laplace(rng, MID))


def bounded(rng: np.random.Generator) -> IntArray:
    noise = discrete_laplace(rng, MID)
    return np.where(np.abs(noise) * RATE > 7.5, noise // 4, noise)


def heavy(rng: np.random.Generator) -> IntArray:
    noise = discrete_laplace(rng, MID)
    return np.where(rng.random(MID) < 1e-3, noise * 64, noise)


def without_noise(rng: np.random.Generator) -> IntArray:
    return np.where(rng.random(MID) < 2e-4, 1, discrete_laplace(rng, MID))


def one_sided(rng: np.random.Generator) -> IntArray:
    noise = discrete_laplace(rng, MID)
    noise[2, ..., 3] = np.abs(noise[2, ..., 3])
    return noise


def quiet_message(rng: np.random.Generator) -> IntArray:
    noise = discrete_laplace(rng, MID)
    noise[1, 7, 11] >>= 4
    return noise


def quiet_round(rng: np.random.Generator) -> IntArray:
    noise = discrete_laplace(rng, MID)
    noise[1, 7] >>= 1
    return noise


def copied_in_a_message(rng: np.random.Generator) -> IntArray:
    return np.repeat(discrete_laplace(rng, (*MID[:3], 1)), MID[3], axis=3)


def too_regular(rng: np.random.Generator) -> IntArray:
    """The two halves of each message have complementary sizes."""
    noise = discrete_laplace(rng, MID)
    sizes = np.maximum(np.abs(noise[..., :8]) * RATE, 1e-12)
    noise[..., 8:16] = np.rint(-np.log(-np.expm1(-sizes)) / RATE)
    return np.where(rng.random(MID) < 0.5, -noise, noise)


@pytest.mark.parametrize(
    ("drawn", "least", "by"),
    [
        (scaled, 2, "scale"),
        (scaled_by_run, 5, "run dispersion"),
        (gaussian_in_part, 4, "tails"),
        (bounded, 5, "largest"),
        (heavy, 5, "tails"),
        (without_noise, 4, "zeros"),
        (one_sided, 5, "coordinate signs"),
        (quiet_message, 5, "message scale"),
        (quiet_round, 5, "learner's round scale"),
        (copied_in_a_message, 5, "message dispersion"),
        (too_regular, 5, "message dispersion"),
    ],
)
def test_a_break_is_found(drawn: Callable[[np.random.Generator], IntArray], least: int, by: str) -> None:
    """In so many of five audits of 27,200 numbers.

    A fresh seed fails with probability below .001: `scaled` is found in .89 of audits, the others in .99 and more.
    """
    rng = np.random.default_rng(3)
    found = [refuted(block_of(drawn(rng))) for _ in range(5)]
    assert sum(by in names for names in found) >= least


def test_places_are_named() -> None:
    noise = discrete_laplace(np.random.default_rng(4), MID)
    noise[1, 7, 11, 3] = 2**46
    noise[3, ..., 9] >>= 1
    tests = judged(block_of(noise, fields=(("x", 5), ("y", 12)), learners=("ann", "ben", "eve", "Süd", "zoe")))
    assert tests["largest"].location == "ben, field 'x'"
    assert tests["message scale"].location == "ben, round 7, run 11"
    assert tests["learner's coordinate scale"].location == "Süd, field 'y', coordinate 4"
    assert tests["learner scale"].location == "Süd, field 'y'"


def test_the_run_is_named_in_whatever_block_it_came() -> None:
    rng = np.random.default_rng(5)
    noise = discrete_laplace(rng, MID)
    noise[:, :, 2] >>= 1
    tests = judged(noise_block(rng), block_of(noise))
    assert tests["run scale"].location == "run 22"
    assert tests["run scale"].is_significant


# ---- correct noise ---------------------------------------------------------------------------------------------------


@pytest.mark.statistics
def test_correct_noise_is_rarely_refuted_by_any_test() -> None:
    """About 80 counts, so it fails with probability 1e-4 under a fresh seed."""
    require_right_p_values(Marginal, np.random.default_rng(6))


def test_blocks_add_up() -> None:
    require_adds_up(Marginal, np.random.default_rng(7), rel=1e-9)


def test_nothing_known_comes_to_nothing() -> None:
    noise = discrete_laplace(np.random.default_rng(8), (2, 3, 4, 5))
    empty, full = (Marginal(block_of(noise).layout) for _ in range(2))
    empty.add(block_of(noise, known=np.array(False)))
    assert empty.compute_tests() == []
    full.add(block_of(noise))
    expected = full.compute_tests()
    full.merge(empty)
    assert full.compute_tests() == expected
    empty.merge(full)
    assert empty.compute_tests() == expected


def test_a_single_number_has_the_primary_tests() -> None:
    """The primary tests are those that share the first half of the level."""
    tests = judged(noise_block(np.random.default_rng(9), (1, 1, 1, 1)))
    assert {name for name, test in tests.items() if test.is_primary} == {"scale", "signs", "tails", "largest"}
