"""Noise that is said twice is found, wherever and in whatever scale; fresh noise is not accused.

Seeds are fixed. A fresh seed would hide a break with probability below 1e-4, but where a test says otherwise; correct noise fails
with the probability that its test says.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from scipy import special

from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.auditing.bounds import AlphaAllocation, Test
from sottovoce_core.auditing.conformance.block import Block, Layout
from sottovoce_core.auditing.conformance.freshness import (
    MAX_COPIES,
    SIZE_TIE_PROBABILITY,
    TOP_PAIR_TIE_PROBABILITY,
    Freshness,
    _hash_keys,
    _hash_pairs,
    _Keys,
    _Ties,
)
from sottovoce_core.noise import KeyedNoise, NoiseRequest, lattice_spacing
from tests.blocks import SCALE, block_of, discrete_laplace, likely

MID = (5, 16, 20, 17)
"""Learners, rounds, runs, numbers."""


def examined(*blocks: Block) -> dict[str, Test]:
    """All tests of some runs, by name, each with its level at alpha = 0.01."""
    found = Freshness(blocks[0].layout)
    for block in blocks:
        found.add(block)
    return {test.name: test for test in AlphaAllocation(0.01).assign_levels("freshness", found.compute_tests())}


def refuted(tests: Mapping[str, Test]) -> set[str]:
    return {name for name, test in tests.items() if test.is_significant}


# ---- keys ------------------------------------------------------------------------------------------------------------


def gathered(most: int, *parts: IntArray) -> _Keys:
    keys = _Keys(most)
    for part in parts:
        keys.add(_hash_keys(part.astype(np.uint64)), np.arange(part.size, dtype=np.uint32).reshape(part.shape))
    return keys


def test_hashes_of_different_keys_differ() -> None:
    """A bijection of one; of a million neighbouring pairs, no two alike (by chance with probability 6e-5)."""
    assert len(np.unique(_hash_keys(np.arange(10**6, dtype=np.uint64)))) == 10**6
    one = _hash_keys(np.arange(1000, dtype=np.uint64))
    assert len(np.unique(_hash_pairs(*(each.ravel() for each in np.meshgrid(one, one))))) == 10**6


def test_a_pair_is_kept_where_its_first_one_is() -> None:
    """Of pairs, as many as of their first ones; equal pairs are found, and pairs that share one number are not equal."""
    rng = np.random.default_rng(3)
    first, second = (_hash_keys(rng.integers(0, 2**40, 50_000).astype(np.uint64)) for _ in range(2))
    places = np.arange(50_000, dtype=np.uint32)
    single, pairs = _Keys(5000), _Keys(5000)
    single.add(first, places)
    pairs.add_pairs(first, second, places)
    assert pairs.count_ties(0.0).count == 0
    assert pairs.fraction == single.fraction < 1.0
    single.count_ties(0.0)
    assert pairs.key_count == single.key_count == np.count_nonzero(first < np.uint64(int(pairs.fraction * 2**64)))
    pairs.add_pairs(first, second[::-1], places)
    assert pairs.count_ties(0.0).count == 0
    pairs.add_pairs(first, second, places)
    assert pairs.count_ties(0.0).count == np.count_nonzero(first < np.uint64(int(pairs.fraction * 2**64)))


def test_a_share_of_all_runs_keeps_few_keys_and_the_whole_the_same() -> None:
    """Forty shares that know what they are keep few each, and come to what one that sees all comes to."""
    rng = np.random.default_rng(4)
    parts = [rng.integers(0, 2**24, 20_000) for _ in range(40)]
    whole, merged = gathered(20_000, *parts), _Keys(20_000)
    for part in parts:
        keys = _Keys(20_000, fraction=1.0 / 40.0)
        keys.add(_hash_keys(part.astype(np.uint64)), np.arange(20_000, dtype=np.uint32))
        assert keys.key_count <= 5000
        merged.merge(keys)
    assert merged.count_ties(2.0**-24).count == whole.count_ties(2.0**-24).count > 0
    assert (merged.offered_count, merged.key_count, merged.fraction) == (
        whole.offered_count,
        whole.key_count,
        whole.fraction,
    )


def test_a_share_of_keys_keeps_the_same_share_of_repeats() -> None:
    """20,000 of 200,000 numbers come twice: as many of the share as binomially, within 6 standard deviations."""
    rng = np.random.default_rng(1)
    numbers = rng.choice(2**40, 200_000, replace=False)
    keys = gathered(30_000, *np.split(numbers, 10), numbers[:20_000])
    assert keys.offered_count == 220_000
    ties = keys.count_ties(0.0)
    assert keys.key_count <= 30_000
    assert keys.fraction in {2.0**-k for k in range(2, 6)}
    mean = 20_000 * keys.fraction
    assert abs(ties.count - mean) < 6.0 * np.sqrt(mean)
    assert ties.places is not None
    assert ties.places[0] % 20_000 == ties.places[1] % 20_000


def test_collections_unite_in_any_order() -> None:
    rng = np.random.default_rng(2)
    parts = [rng.integers(0, 2**18, 4000) for _ in range(9)]
    counts = set()
    for order in (range(9), reversed(range(9)), (4, 1, 8, 0, 3, 2, 7, 6, 5)):
        whole = _Keys(5000)
        for k in order:
            whole.merge(gathered(5000, parts[k]))
        ties = whole.count_ties(2.0**-18)
        counts.add((whole.offered_count, ties.count, ties.expected, whole.fraction))
    assert len(counts) == 1
    one = gathered(5000, *parts)
    assert one.count_ties(2.0**-18).count == counts.pop()[1]


def test_one_key_over_and_over_stays_small() -> None:
    """Where its hash is in the share that is kept, some copies stay; where it is not, the first numbers have it."""
    least = int(_hash_keys(np.arange(1000, dtype=np.uint64)).argmin())
    parts = [np.full(5000, least)] * 8
    keys = gathered(1000, *parts, np.arange(20_000))
    assert keys.count_ties(2.0**-40).count >= MAX_COPIES * (MAX_COPIES - 1) // 2
    assert keys.key_count <= 1000
    first = _Keys(100, first_only=True)
    for part in parts:
        first.add(_hash_keys(part.astype(np.uint64)), np.zeros(5000, np.uint32))
    assert first.count_ties(2.0**-40).count == 100 * 99 // 2
    assert first.offered_count == first.key_count == 100


def test_one_size_that_is_said_often_is_found_among_many_numbers() -> None:
    """A thousandth of three million numbers, whatever its hash."""
    rng = np.random.default_rng(12)
    found = Freshness(Layout(tuple("abcde"), 20, (("y", 100),)))
    for _ in range(3):
        steps = discrete_laplace(rng, (5, 20, 100, 100))
        steps[rng.random(steps.shape) < 1e-3] = 2**40 + 7 * 2**30
        found.add(block_of(steps))
    tests = {test.name: test for test in found.compute_tests()}
    assert tests["ties"].p_value < 1e-6


def test_ties_expected_of_numbers_pairs_and_streams() -> None:
    def expected(numbers: int, chance: float) -> float:
        keys = _Keys(10)
        keys.offered_count = numbers
        return keys.count_ties(chance).expected

    assert expected(27_200, SIZE_TIE_PROBABILITY / 2.0) == pytest.approx(0.0054, abs=5e-5)
    assert expected(10**6, SIZE_TIE_PROBABILITY / 2.0) == pytest.approx(7.28, abs=5e-3)
    assert expected(10**6, SIZE_TIE_PROBABILITY**2) < 1e-7  # a hash of 63 bits rules, 2^-72 would be 1e-10
    assert expected(10**6, TOP_PAIR_TIE_PROBABILITY) < 1e-7
    assert special.pdtr(0, 500 * 499 / 2 / 50_000) == pytest.approx(0.0825, abs=1e-4)


def test_ties_are_judged_on_one_side_or_on_both() -> None:
    assert _Ties(1, 1e-10, (0, 1)).p_value == pytest.approx(1e-10)
    assert _Ties(0, 30.0, None).p_value == 1.0
    assert _Ties(0, 30.0, None).two_sided_p_value == pytest.approx(2.0 * np.exp(-30.0))
    assert _Ties(30, 30.0, (0, 1)).two_sided_p_value > 0.9


# ---- runs add up -----------------------------------------------------------------------------------------------------


def test_runs_add_up() -> None:
    """Two blocks in one instrument, in two that are merged, and in one block: one result, with repeats across both."""
    rng = np.random.default_rng(4)
    steps = discrete_laplace(rng, (3, 6, 40, 5))
    steps[2, 3, 39] = steps[0, 1, 0]
    halves = [block_of(steps[:, :, :20]), block_of(steps[:, :, 20:])]
    at_once, first, second, empty = (Freshness(halves[0].layout) for _ in range(4))
    at_once.add(block_of(steps))
    first.add(halves[0])
    second.add(halves[1])
    first.merge(pickle.loads(pickle.dumps(second)))  # noqa: S301  as between processes
    empty.merge(first)
    assert "pair ties" in {test.name for test in at_once.compute_tests() if test.p_value < 1e-9}
    for other in (examined(*halves), *({t.name: t for t in each.compute_tests()} for each in (first, empty))):
        for test in at_once.compute_tests():
            assert (other[test.name].statistic, other[test.name].p_value) == (test.statistic, test.p_value)


def test_no_noise_is_no_test() -> None:
    assert Freshness(Layout(("a",), 3, (("y", 5),))).compute_tests() == []
    steps = np.zeros((2, 3, 4, 5), np.int64)
    assert examined(block_of(steps, known=np.array(False))) == {}
    assert examined(block_of(steps, lost=1)) == {}  # float64 does not resolve it, so equal numbers say nothing


# ---- fresh noise -----------------------------------------------------------------------------------------------------

SHAPES = ((5, 16, 20, 17), (2, 3, 20, 1), (1, 16, 20, 8), (5, 1, 40, 17), (1, 1, 30, 1), (20, 4, 5, 3), (2, 4, 8, 60))


def fresh(rng: np.random.Generator, shape: tuple[int, int, int, int]) -> Block:
    """Fresh noise of decaying scales around centres that do not move, 5 % of it replayed off by one."""
    drawn = discrete_laplace(rng, shape)
    slips = np.zeros_like(drawn)
    slips[:, 1:] = np.where(
        np.abs(drawn[:, :-1]) > 3.0 / (float(lattice_spacing(SCALE)) / SCALE), np.sign(drawn[:, :-1]), 0
    )
    scale: FloatArray = (
        SCALE * 2.0 ** -np.arange(float(shape[1]))[None, :, None]
    )  # so that spacings have one ratio to scales
    return block_of(drawn - slips, scale=scale, centre=12345, known=rng.random((*shape[:3], 1)) < 0.97)


@pytest.mark.statistics
def test_fresh_noise_is_not_accused() -> None:
    """60 audits of each of seven shapes.

    The chance to be refuted is at most alpha / 10; that of more refutations than are allowed is below 1e-4, at both levels.
    """
    rng = np.random.default_rng(5)
    smallest = []
    for shape in SHAPES:
        for _ in range(60):
            block = fresh(rng, shape)
            found = Freshness(block.layout)
            found.add(block)
            tests = AlphaAllocation(1.0).assign_levels("freshness", found.compute_tests())
            smallest.append(min((test.p_value / test.level for test in tests), default=1.0))
    for alpha in (0.01, 0.3):
        accused = int(np.count_nonzero(np.array(smallest) < alpha))
        assert likely(accused, len(smallest), alpha / 10.0) > 1e-4


def test_low_words_of_fresh_noise_come_twice_as_often_as_chance_has_it() -> None:
    """2.4 million numbers of the deployed sampler, of which a share is kept; alpha = 0.01. Its bytes come from a key."""
    found = Freshness(Layout(tuple("abcde"), 20, (("y", 120),)))
    for n in range(4):
        drawn = KeyedNoise("a secret", f"part {n}", 0)(
            NoiseRequest("laplace", "y", 0, SCALE, float(lattice_spacing(SCALE)), (5, 20, 50, 120))
        )
        found.add(block_of(np.rint(drawn / float(lattice_spacing(SCALE))).astype(np.int64)))
    tests = {test.name: test for test in AlphaAllocation(0.01).assign_levels("freshness", found.compute_tests())}
    assert refuted(tests) == set()
    assert tests["low words"].statistic > 0


# ---- noise that is said again ----------------------------------------------------------------------------------------

Breaks = Callable[[np.random.Generator, IntArray], IntArray]


def taken_back(rng: np.random.Generator, steps: IntArray) -> IntArray:
    steps[2, 9, 4] = -steps[2, 7, 4]
    return steps


def shifted_copy(rng: np.random.Generator, steps: IntArray) -> IntArray:
    """One learner's message is another one's, five coordinates on."""
    steps[1, 8, 3] = np.roll(steps[0, 8, 3], 5)
    return steps


def between_runs(rng: np.random.Generator, steps: IntArray) -> IntArray:
    steps[3, :, 17] = steps[3, :, 2]
    return steps


def permuted(rng: np.random.Generator, steps: IntArray) -> IntArray:
    steps[1, 5, 6] = rng.permutation(steps[4, 2, 11])
    return steps


def few_streams(rng: np.random.Generator, steps: IntArray) -> IntArray:
    """2^17 streams: 9.8 pairs of 1,600 messages are the same on average; none with probability 6e-5."""
    stream = rng.integers(0, 2**17, steps.shape[:3])
    _, first, which = np.unique(stream, return_index=True, return_inverse=True)
    drawn = steps.reshape(-1, steps.shape[-1])
    return np.asarray(drawn[first][which.reshape(stream.shape)])


def low_bits_again(rng: np.random.Generator, steps: IntArray) -> IntArray:
    """0.05 % of the numbers repeat 32 low bits of others."""
    flat = steps.ravel()
    which = rng.choice(flat.size, 28, replace=False)
    flat[which[14:]] = (flat[which[14:]] & ~np.int64(2**32 - 1)) | (flat[which[:14]] & np.int64(2**32 - 1))
    return steps


BREAKS: dict[str, tuple[Breaks, set[str], str]] = {
    "taken back two rounds later": (taken_back, {"permuted messages", "ties", "low words"}, ""),
    "a shifted copy": (shifted_copy, {"pair ties", "ties", "low words", "permuted messages"}, ""),
    "again in another run": (between_runs, {"pair ties"}, ", in two runs"),
    "permuted": (permuted, {"permuted messages", "ties"}, ""),
    "few streams": (few_streams, {"pair ties", "permuted messages"}, ""),
    "low bits again": (low_bits_again, {"low words"}, "32 low bits"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_noise_that_is_said_again_is_found(name: str) -> None:
    broken, expected, where = BREAKS[name]
    rng = np.random.default_rng(6)
    tests = examined(block_of(broken(rng, discrete_laplace(rng, MID))))
    assert refuted(tests) >= expected, {name: test.p_value for name, test in tests.items()}
    if where:
        assert any(where in tests[each].location for each in expected)


def test_a_copy_in_another_scale_is_found_and_one_in_the_same_units_is() -> None:
    """Learner 1 has 0.3 of learner 0's scale. It says the other's noise in its own scale, or as it is on its own lattice."""
    rng = np.random.default_rng(7)
    scale = SCALE * np.array([1.0, 0.3])[:, None, None]
    spacing = np.asarray(lattice_spacing(scale)) / scale
    steps = discrete_laplace(rng, (2, 4, 10, 12))
    standard = steps.copy()
    standard[1, 2, 5] = np.rint(steps[0, 2, 5] * (spacing[0] / spacing[1]))
    assert {"ties", "pair ties", "permuted messages"} <= refuted(examined(block_of(standard, scale=scale)))
    as_it_is = steps.copy()
    as_it_is[1, 2, 5] = np.rint(
        steps[0, 2, 5] * (float(lattice_spacing(SCALE)) / np.asarray(lattice_spacing(scale))[1, 0, 0])
    )
    tests = examined(block_of(as_it_is, scale=scale))
    assert {"ties", "pair ties"} <= refuted(tests)
    assert tests["pair ties"].location.startswith("unscaled pairs")


def test_one_number_said_again_in_the_next_run_is_found() -> None:
    """Messages of one number: rounds are its neighbours."""
    rng = np.random.default_rng(8)
    steps = discrete_laplace(rng, (2, 6, 10, 1))
    steps[0, 2:4, 7] = steps[0, 1:3, 3] + 1
    tests = examined(block_of(steps))
    assert {"ties", "pair ties"} <= refuted(tests)


def test_an_old_message_is_found_whatever_its_centre() -> None:
    rng = np.random.default_rng(9)
    steps, centre = discrete_laplace(rng, MID), rng.integers(-(2**43), 2**43, MID)
    said = steps + centre
    said[1, 9, 4] = said[1, 3, 4]
    block = block_of(said - centre, centre=centre)
    assert refuted(examined(block)) == {"repeated messages"}


def test_a_generator_that_never_repeats_is_found() -> None:
    """Low words from a permutation of all of them: 46 pairs of 630,000 would be equal by chance."""
    rng = np.random.default_rng(10)
    steps = discrete_laplace(rng, (3, 50, 42, 100))
    counter = np.arange(steps.size, dtype=np.uint32) * np.uint32(2654435761) & np.uint32(2**31 - 1)
    steps = (np.abs(steps) >> 32 << 32) + counter.reshape(steps.shape).astype(np.int64)
    tests = examined(block_of(steps))
    assert "low words" in refuted(tests)
    assert tests["low words"].statistic == 0


def test_learners_and_worlds_are_looked_at_together() -> None:
    """What one block had is found in another one; a learner's index names it."""
    rng = np.random.default_rng(11)
    first, second = discrete_laplace(rng, (2, 4, 5, 6)), discrete_laplace(rng, (2, 4, 5, 6))
    second[1, 2, 4] = first[0, 3, 1]
    one, other = (block_of(each, learners=("ann", "ben")) for each in (first, second))
    tests = examined(one, other)
    assert "ann, round 3" in tests["pair ties"].location
    assert "ben, round 2" in tests["pair ties"].location
