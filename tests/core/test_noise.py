"""Noise: the law, the lattice, and what a recording may be asked for."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sottovoce.arrays import FloatArray
from sottovoce.errors import SpecError
from sottovoce.noise import NoNoise, RecordedNoise, Recorder, SeededNoise, SystemNoise, grid, on_grid

DRAWS = 200_000


class Entropy:
    """An endless stream of bytes that is the same in every test run: SHAKE-128 in counter mode."""

    def __init__(self, seed: int) -> None:
        self._seed, self._calls = seed, 0

    def __call__(self, count: int) -> bytes:
        self._calls += 1
        return hashlib.shake_128(f"{self._seed}/{self._calls}".encode()).digest(count)


COARSE = 0.125
"""A spacing that leaves single points to count: 8 a scale of 1."""


def drawn(source: SystemNoise | SeededNoise, scale: float, count: int = DRAWS, spacing: float = 0.0) -> FloatArray:
    return source.laplace("y", 0, scale, spacing or grid(scale), (count,))


# ---- the operating system's noise ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1.37, 0.3])
def test_system_noise_has_the_discrete_laplace_law(scale: float) -> None:
    """Chi-square over single lattice points. A right sampler fails with probability 1e-6; the seed is fixed."""
    q = math.exp(-COARSE / scale)
    points = np.rint(drawn(SystemNoise(Entropy(1)), scale, spacing=COARSE) / COARSE).astype(int)
    edge = math.ceil(4 * scale / COARSE)
    observed = np.bincount(np.clip(points, -edge, edge) + edge, minlength=2 * edge + 1)
    expected = (1 - q) / (1 + q) * q ** np.abs(np.arange(-edge, edge + 1)).astype(float)
    expected[[0, -1]] = q**edge / (1 + q)  # both tails

    assert expected.sum() == pytest.approx(1.0)
    assert stats.chisquare(observed, DRAWS * expected).pvalue > 1e-6


@pytest.mark.parametrize("bits", [8, 10, 12, 20])
def test_digits_of_system_noise_follow_the_law_on_any_lattice(bits: int) -> None:
    """Binary digits of a geometric number are independent: digit k is one with probability `q^(2^k) / (1 + q^(2^k))`.

    Of the absolute value given that it is not zero, less one, which is geometric. Four lattices of about 20 digits, each six
    standard deviations from its probability: failure probability 2e-7.
    """
    spacing = 2.0**-bits
    points = np.rint(np.abs(drawn(SystemNoise(Entropy(11)), 1.0, spacing=spacing)) / spacing).astype(np.int64)
    points = points[points > 0] - 1
    for k in range(bits + 3):
        chance = 1 / (1 + math.exp(spacing * 2.0**k))
        ones = int((points >> k & 1).sum())
        spread = math.sqrt(points.size * chance * (1 - chance))
        assert abs(ones - points.size * chance) < 6 * spread + 1, f"digit {k}"


def test_zero_is_not_counted_twice() -> None:
    """Zeros are binomial with p = (1-q)/(1+q): six standard deviations, failure probability 2e-9."""
    q = math.exp(-COARSE)
    zeros = drawn(SystemNoise(Entropy(2)), 1.0, spacing=COARSE)
    zeros = zeros[zeros == 0.0]
    p = (1 - q) / (1 + q)

    assert abs(zeros.size - DRAWS * p) < 6 * math.sqrt(DRAWS * p * (1 - p))
    assert not np.signbit(zeros).any()


@pytest.mark.parametrize("scale", [0.7, 3.0, 1e-3])
def test_system_noise_is_laplace_at_full_resolution(scale: float) -> None:
    """Kolmogorov-Smirnov against the continuous law, 2^-40 away. Failure probability 1e-6, fixed seed."""
    assert stats.kstest(drawn(SystemNoise(Entropy(3)), scale), "laplace", (0, scale)).pvalue > 1e-6


def test_low_bits_of_system_noise_are_uniform() -> None:
    """The last 8 bits of the lattice point, chi-square. Failure probability 1e-6, fixed seed."""
    last = np.rint(np.abs(drawn(SystemNoise(Entropy(4)), 1.0)) / float(grid(1.0))).astype(np.int64) & 255
    assert stats.chisquare(np.bincount(last, minlength=256)).pvalue > 1e-6


def test_draws_do_not_repeat_and_signs_do_not_follow_magnitudes() -> None:
    """Rank correlation of neighbouring draws and of sign with magnitude. Failure probability 2e-6 together, fixed seed."""
    values = drawn(SystemNoise(Entropy(5)), 1.0)

    assert len(np.unique(values)) > DRAWS - 5  # ties: about DRAWS^2 / 2^43, so 0.005 expected
    assert stats.spearmanr(values[:-1], values[1:]).pvalue > 1e-6
    assert stats.spearmanr(np.sign(values), np.abs(values)).pvalue > 1e-6


@pytest.mark.parametrize(("rest", "below"), [(b"\x00", True), (b"\xff", False)])
def test_a_tie_in_sixteen_bits_is_settled_by_the_rest(rest: bytes, below: bool) -> None:
    chance = np.array([0.3, 0.49, 1e-3, 0.999])
    leading = np.floor(chance * 2**16).astype(np.uint16)
    assert SystemNoise(lambda count: rest * count)._below(leading, chance).tolist() == [below] * 4


@given(st.floats(1e-6, 1e6), st.integers(0, 2**32))
def test_system_noise_lies_on_the_lattice(scale: float, seed: int) -> None:
    spacing = float(grid(scale))
    values = SystemNoise(Entropy(seed)).laplace("y", 0, scale, spacing, (4, 5))

    assert values.shape == (4, 5)
    assert (values / spacing == np.rint(values / spacing)).all()


def test_system_noise_asks_the_operating_system_by_default() -> None:
    first, second = drawn(SystemNoise(), 1.0, 100), drawn(SystemNoise(), 1.0, 100)
    assert not (first == second).any()


def test_system_noise_is_for_one_learner() -> None:
    scales = np.ones((2, 1, 1))
    with pytest.raises(TypeError, match="scale must be one number"):
        SystemNoise().laplace("y", 0, scales, grid(scales), (2, 1, 3))


def test_system_noise_refuses_a_lattice_that_it_is_too_fine_for() -> None:
    with pytest.raises(ValueError, match=r"scale must be at most 2\^43 times grid, got 1.1259e\+15 times"):
        SystemNoise(Entropy(0)).laplace("y", 0, 1.0, 2.0**-50, (1,))


# ---- other sources ---------------------------------------------------------------------------------------------------


def test_seeded_noise_is_laplace_for_every_learner() -> None:
    """Kolmogorov-Smirnov for each of two scales. Failure probability 2e-6 together, fixed seed."""
    scales = np.array([0.5, 4.0]).reshape(2, 1, 1)
    values = SeededNoise(6).laplace("y", 0, scales, grid(scales), (2, 1000, 50))

    for row, scale in zip(values, scales.ravel(), strict=True):
        assert stats.kstest(row.ravel(), "laplace", (0, scale)).pvalue > 1e-6
        assert (row / grid(float(scale)) == np.rint(row / grid(float(scale)))).all()


def test_seeded_noise_repeats_with_its_seed_alone() -> None:
    assert (drawn(SeededNoise(7), 1.0, 50) == drawn(SeededNoise(7), 1.0, 50)).all()
    assert not (drawn(SeededNoise(7), 1.0, 50) == drawn(SeededNoise(8), 1.0, 50)).any()


def test_seeded_noise_goes_on_in_the_next_round() -> None:
    source = SeededNoise(9)
    assert not (drawn(source, 1.0, 50) == drawn(source, 1.0, 50)).any()


def test_no_noise_is_zero() -> None:
    assert NoNoise().laplace("y", 3, 1.0, 0.5, (2, 3)).tolist() == [[0.0] * 3] * 2


def test_recorded_noise_says_the_round_again() -> None:
    recording = np.arange(12.0).reshape(2, 2, 1, 3)
    source = RecordedNoise({"y": recording})

    assert (source.laplace("y", 1, 1.0, 1.0, (2, 1, 3)) == recording[1]).all()
    assert (source.laplace("y", 1, 1.0, 1.0, (2, 4, 3)) == np.repeat(recording[1], 4, axis=1)).all()


@pytest.mark.parametrize(("name", "t"), [("y", 2), ("z", 0)])
def test_recorded_noise_must_have_the_field_and_the_round(name: str, t: int) -> None:
    source = RecordedNoise({"y": np.zeros((2, 3))})
    with pytest.raises(SpecError, match=f"must have field '{name}' for round {t}, and it does not"):
        source.laplace(name, t, 1.0, 1.0, (3,))


def test_recorded_noise_must_have_the_shape() -> None:
    with pytest.raises(SpecError, match=r"field 'y' must have shape \(4,\) in a round, got \(3,\)"):
        RecordedNoise({"y": np.zeros((2, 3))}).laplace("y", 0, 1.0, 1.0, (4,))


def test_a_recorder_keeps_what_passes() -> None:
    recorder = Recorder(SeededNoise(10))
    rounds = [recorder.laplace("y", t, 1.0, float(grid(1.0)), (2, 3)) for t in range(3)]

    assert np.array_equal(recorder.drawn["y"], rounds)
    assert np.array_equal(RecordedNoise({"y": np.stack(rounds)}).laplace("y", 2, 1.0, 1.0, (2, 3)), rounds[2])


# ---- the lattice -----------------------------------------------------------------------------------------------------


@given(st.floats(1e-100, 1e100))
def test_the_spacing_is_a_power_of_two_about_2_to_minus_40_scales(scale: float) -> None:
    spacing = grid(scale)

    assert isinstance(spacing, float)
    assert math.frexp(spacing)[0] == 0.5
    assert 2.0**-41 < spacing / scale <= 2.0**-40
    assert np.asarray(grid(np.array([[scale]]))).item() == spacing


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e3))
def test_rounding_moves_by_half_a_spacing_at_most(value: float, scale: float) -> None:
    spacing = float(grid(scale))
    rounded = float(on_grid(np.array([value]), spacing)[0])

    assert abs(rounded - value) <= spacing / 2
    assert rounded / spacing == round(rounded / spacing)
