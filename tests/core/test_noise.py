"""Noise: the law of every sampler, the lattice, and what a key, a seed and a recording may be asked for.

Statistical tests have fixed seeds. OpenDP takes no seed, so its tests, skipped where it is not installed, may fail by chance:
with the probability that each of them states.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import math
import sys
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import SpecError
from sottovoce_core.noise import (
    Distribution,
    KeyedNoise,
    NoiseRequest,
    NoiseSource,
    OpenDpNoise,
    RecordedNoise,
    Recorder,
    SeededNoise,
    SystemNoise,
    lattice_spacing,
    no_noise,
    round_to_lattice,
)

DRAWS = 200_000
needs_opendp = pytest.mark.skipif(
    importlib.util.find_spec("opendp") is None, reason="OpenDP is not installed (extra: opendp)"
)
SAMPLERS = ["bitwise", "ahead", "keyed", "seeded", pytest.param("opendp", marks=needs_opendp)]


class Entropy:
    """An endless stream of bytes that is the same in every test run: SHAKE-128 in counter mode."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.asked: list[int] = []

    def __call__(self, count: int) -> bytes:
        self.asked.append(count)
        return hashlib.shake_128(f"{self._seed}/{len(self.asked)}".encode()).digest(count)


class InRounds:
    """The numbers of one draw, a hundred a round, whose scales are known beforehand."""

    def __init__(self, source: NoiseSource) -> None:
        self._source = source

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        one = replace(draw, shape=(100,), future_scale=lambda t: draw.scale)
        return np.concatenate([self._source(replace(one, round=t)) for t in range(math.prod(draw.shape) // 100)])


COARSE = 0.125
"""A spacing that leaves single points to count: 8 a scale of 1."""


def source_of(sampler: str) -> NoiseSource:
    """The source of that name, seeded where it takes a seed."""
    match sampler:
        case "bitwise":
            return SystemNoise(Entropy(20))
        case "ahead":
            return InRounds(SystemNoise(Entropy(23)))
        case "keyed":
            return KeyedNoise("hush", "run", 0)
        case "seeded":
            return SeededNoise(21)
    return OpenDpNoise()


@functools.cache
def laplace_of(sampler: str) -> FloatArray:
    """Numbers of scale 1 on its own lattice: 200,000, fewer from OpenDP, which takes ten microseconds for each."""
    return drawn(source_of(sampler), 1.0, 50_000 if sampler == "opendp" else DRAWS)


@functools.cache
def gaussian_of(sampler: str) -> FloatArray:
    """The same of standard deviation 1."""
    count = 30_000 if sampler == "opendp" else DRAWS
    return source_of(sampler)(NoiseRequest("gaussian", "y", 0, 1.0, lattice_spacing(1.0), (count,)))


def lattice_points(values: FloatArray) -> npt.NDArray[np.int64]:
    """What multiples of the spacing for scale 1 they are."""
    points = values / lattice_spacing(1.0)
    assert (points == np.rint(points)).all()
    return points.astype(np.int64)


def drawn(source: NoiseSource, scale: float, count: int = DRAWS, spacing: float = 0.0) -> FloatArray:
    return source(NoiseRequest("laplace", "y", 0, scale, spacing or lattice_spacing(scale), (count,)))


# ---- every sampler ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_laplace_has_its_law(sampler: str) -> None:
    """Kolmogorov-Smirnov against the continuous law, 2^-40 away. Failure probability 1e-9."""
    assert stats.kstest(laplace_of(sampler), "laplace").pvalue > 1e-9


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_laplace_has_the_moments_and_tails_of_its_law(sampler: str) -> None:
    """`E x = 0`, `E |x| = 1`, `E x^2 = 2`, and both tails: six standard deviations each, so below 1e-6 together.

    `E x^2k = (2k)!` gives the variances. Tails are counts; the smallest, of 62 expected, is skewed: 5e-8.
    """
    x = laplace_of(sampler)
    assert abs(x.mean()) < 6 * math.sqrt(2 / x.size)
    assert abs(np.abs(x).mean() - 1) < 6 * math.sqrt(1 / x.size)
    assert abs((x**2).mean() - 2) < 6 * math.sqrt((24 - 4) / x.size)
    for edge in (1.0, 3.0, 6.0):
        expected = x.size * math.exp(-edge) / 2
        for tail in (x > edge, x < -edge):
            assert abs(int(tail.sum()) - expected) < 6 * math.sqrt(expected)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_signs_are_fair_and_follow_nothing(sampler: str) -> None:
    """A binomial test, and rank correlations with the magnitude and of neighbouring draws: 3e-9 together."""
    x = laplace_of(sampler)
    assert stats.binomtest(int((x > 0).sum()), int(np.count_nonzero(x))).pvalue > 1e-9
    assert stats.spearmanr(np.sign(x), np.abs(x)).pvalue > 1e-9
    assert stats.spearmanr(x[:-1], x[1:]).pvalue > 1e-9


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_low_bits_are_uniform_and_know_nothing_of_the_rest(sampler: str) -> None:
    """The last 8 bits: uniform; independent of the next draw's, of the 8 bits above, of sign and size. 4e-9 together."""
    points = lattice_points(laplace_of(sampler))
    last = points & 255
    coarse = np.digitize(laplace_of(sampler), [-1.0, 0.0, 1.0])

    assert stats.chisquare(np.bincount(last, minlength=256)).pvalue > 1e-9
    assert independent(last[:-1] & 15, last[1:] & 15) > 1e-9
    assert independent(last >> 4, points >> 8 & 15) > 1e-9
    assert independent(last & 15, coarse) > 1e-9


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_binary_digits_and_sign_are_pairwise_independent(sampler: str) -> None:
    """Of the absolute value less one, which is geometric: 900 correlations, each seven deviations, so 3e-9 together."""
    points = lattice_points(laplace_of(sampler))
    points = points[points != 0]
    digits = (np.abs(points) - 1)[None, :] >> np.arange(41)[:, None] & 1
    both = np.vstack([digits, points > 0]).astype(np.float64)
    correlations = np.corrcoef(both) - np.eye(len(both))
    assert np.abs(correlations).max() < 7 / math.sqrt(points.size)


def independent(rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]) -> float:
    """p-value of chi-square for independence."""
    table = np.zeros((rows.max() + 1, columns.max() + 1))
    np.add.at(table, (rows, columns), 1.0)
    return float(stats.chi2_contingency(table).pvalue)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_gaussian_has_its_law_and_lies_on_the_lattice(sampler: str) -> None:
    """Kolmogorov-Smirnov, the last 8 bits, and the fourth moment (variance 96) to six deviations: 4e-9 together."""
    x = gaussian_of(sampler)
    assert stats.kstest(x, "norm").pvalue > 1e-9
    assert stats.chisquare(np.bincount(lattice_points(x) & 255, minlength=256)).pvalue > 1e-9
    assert abs((x**4).mean() - 3) < 6 * math.sqrt(96 / x.size)


@pytest.mark.parametrize("sampler", ["bitwise", "keyed", "seeded"])
@pytest.mark.parametrize("dim", [3, 4])
def test_spherical_noise_has_a_gamma_norm_and_any_direction(sampler: str, dim: int) -> None:
    """The norm is Gamma(dim) over the rate. A direction's coordinate c has `(c+1)/2 ~ Beta((dim-1)/2, (dim-1)/2)`.

    Kolmogorov-Smirnov for both, and rank correlation of the two: failure probability 6e-9 at most, fixed seeds.
    """
    vectors = source_of(sampler)(NoiseRequest("spherical", "y", 0, 2.0, None, (40_000, dim)))
    norms = np.linalg.norm(vectors, axis=-1)

    assert stats.kstest(norms, "gamma", (dim, 0, 0.5)).pvalue > 1e-9
    for axis in range(dim):
        cosine = vectors[:, axis] / norms
        assert stats.kstest((cosine + 1) / 2, "beta", ((dim - 1) / 2, (dim - 1) / 2)).pvalue > 1e-9
    assert stats.spearmanr(norms, vectors[:, 0] / norms).pvalue > 1e-9


# ---- ours beside OpenDP's --------------------------------------------------------------------------------------------


@needs_opendp
def test_bitwise_and_opendp_draw_the_same_laplace() -> None:
    """Two-sample Kolmogorov-Smirnov at full resolution. Failure probability 1e-9."""
    assert stats.ks_2samp(laplace_of("bitwise"), laplace_of("opendp")).pvalue > 1e-9


@needs_opendp
def test_bitwise_and_opendp_draw_the_same_gaussian() -> None:
    """Two-sample Kolmogorov-Smirnov at full resolution. Failure probability 1e-9."""
    assert stats.ks_2samp(gaussian_of("bitwise"), gaussian_of("opendp")).pvalue > 1e-9


@needs_opendp
@pytest.mark.parametrize("scale", [1.37, 0.3])
@pytest.mark.parametrize("law", ["laplace", "gaussian"])
def test_bitwise_and_opendp_agree_point_by_point(law: Distribution, scale: float) -> None:
    """Chi-square of two samples over single lattice points, 8 a unit. Failure probability 1e-9."""
    edge = math.ceil(3 * scale / COARSE)
    counts = []
    for source, count in ((SystemNoise(Entropy(22)), DRAWS), (OpenDpNoise(), 10_000)):
        values = source(NoiseRequest(law, "y", 0, scale, COARSE, (count,)))
        points = np.clip(np.rint(values / COARSE).astype(int), -edge, edge) + edge
        counts.append(np.bincount(points, minlength=2 * edge + 1))
    assert stats.chi2_contingency(np.array(counts)).pvalue > 1e-9


@needs_opendp
def test_opendp_is_for_one_learner_and_keeps_the_shape() -> None:
    assert OpenDpNoise()(NoiseRequest("laplace", "y", 0, 1.0, lattice_spacing(1.0), (2, 3))).shape == (2, 3)
    with pytest.raises(TypeError, match="scale and spacing must be one number each"):
        OpenDpNoise()(NoiseRequest("gaussian", "y", 0, np.ones(2), np.ones(2), (2, 3)))


def test_opendp_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opendp.prelude", None)
    with pytest.raises(SpecError, match=r"in a clone of the repository, pip install '\.\[opendp\]'"):
        OpenDpNoise()


@pytest.mark.parametrize("source", [SystemNoise(), KeyedNoise("hush", "run", 0), SeededNoise(0)])
def test_an_unknown_law_is_not_taken_for_another_one(source: NoiseSource) -> None:
    with pytest.raises(AssertionError, match="cauchy"):
        source(NoiseRequest("cauchy", "y", 0, 1.0, lattice_spacing(1.0), (3,)))  # type: ignore[arg-type]


# ---- the operating system's noise ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1.37, 0.3])
def test_system_noise_has_the_discrete_laplace_law(scale: float) -> None:
    """Chi-square over single lattice points. A right sampler fails with probability 1e-6; the seed is fixed."""
    assert discrete_laplace(drawn(SystemNoise(Entropy(1)), scale, spacing=COARSE) / COARSE, COARSE / scale) > 1e-6


def test_numbers_of_several_rates_have_a_law_each() -> None:
    """The same for rows that are drawn together. Each fails with probability 1e-6; the seed is fixed."""
    rates = COARSE / np.array([1.0, 1.37, 0.3])
    for rate, row in zip(rates, SystemNoise(Entropy(24))._integers(rates, DRAWS).reshape(3, -1), strict=True):
        assert discrete_laplace(row, rate) > 1e-6


def discrete_laplace(points: FloatArray, rate: float) -> float:
    """p-value of chi-square over single whole numbers within four scales."""
    q, edge = math.exp(-rate), math.ceil(4 / rate)
    observed = np.bincount(np.clip(np.rint(points).astype(int), -edge, edge) + edge, minlength=2 * edge + 1)
    expected = (1 - q) / (1 + q) * q ** np.abs(np.arange(-edge, edge + 1)).astype(float)
    expected[[0, -1]] = q**edge / (1 + q)  # both tails

    assert expected.sum() == pytest.approx(1.0)
    return float(stats.chisquare(observed, points.size * expected).pvalue)


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


def test_draws_do_not_repeat() -> None:
    values = drawn(SystemNoise(Entropy(5)), 1.0)
    assert len(np.unique(values)) > DRAWS - 5  # ties: about DRAWS^2 / 2^43, so 0.005 expected


@pytest.mark.parametrize("scale", [1.0, 1.37, 0.3])
def test_system_noise_has_the_discrete_gaussian_law(scale: float) -> None:
    """Chi-square over single lattice points. A right sampler fails with probability 1e-6; the seed is fixed."""
    values = SystemNoise(Entropy(12))(NoiseRequest("gaussian", "y", 0, scale, COARSE, (DRAWS,)))
    edge = math.ceil(3 * scale / COARSE)
    observed = np.bincount(np.clip(np.rint(values / COARSE).astype(int), -edge, edge) + edge, minlength=2 * edge + 1)
    mass = np.exp(-0.5 * (np.arange(-20 * edge, 20 * edge + 1) * COARSE / scale) ** 2)
    mass /= mass.sum()
    expected = mass[19 * edge : 21 * edge + 1].copy()
    expected[[0, -1]] = mass[: 19 * edge + 1].sum()  # both tails
    assert stats.chisquare(observed, DRAWS * expected).pvalue > 1e-6


def test_the_moments_of_bitwise_gaussian_noise() -> None:
    """`E |x|` and `E x^2` of two million numbers, six standard deviations each: failure probability 4e-9, fixed seed."""
    x = SystemNoise(Entropy(13))(NoiseRequest("gaussian", "y", 0, 1.0, lattice_spacing(1.0), (2_000_000,)))
    assert abs(np.abs(x).mean() - math.sqrt(2 / math.pi)) < 6 * math.sqrt((1 - 2 / math.pi) / x.size)
    assert abs((x**2).mean() - 1) < 6 * math.sqrt(2 / x.size)


@pytest.mark.parametrize("rest", [b"\x00", b"\xff"])
def test_high_bits_are_set_below_their_probability(rest: bytes) -> None:
    """Coins just below, at and above the leading 16 bits of `1 / (1 + exp(rate 2^k))`: where they tie, the rest decides."""
    rate = 1.3 * 2.0**-12
    chance = 1 / (1 + np.exp(rate * 2.0 ** np.arange(18)))
    coins = np.floor(chance * 2**16)[:, None] + np.array([-1, 0, 1])
    rows = np.maximum(coins, 0).astype(np.uint16)[:, None]
    bits = SystemNoise(lambda count: rest * count)._high_bits(rows, np.array([rate]))[:, 0]

    tossed = (np.maximum(coins, 0) + (0.0 if rest == b"\x00" else 1 - 2.0**-40)) / 2**16
    settled = chance > 2.0**-40  # the 64 bits of a coin are too few for what is rarer
    assert (bits == (tossed < chance[:, None]))[settled].all()


@pytest.mark.parametrize(("rest", "below"), [(b"\x00", True), (b"\xff", False)])
def test_a_tie_in_sixteen_bits_is_settled_by_the_rest(rest: bytes, below: bool) -> None:
    chance = np.array([0.3, 0.49, 1e-3, 0.999])
    leading = np.floor(chance * 2**16).astype(np.uint16)
    assert SystemNoise(lambda count: rest * count)._is_below(leading, chance).tolist() == [below] * 4


@pytest.mark.parametrize("share", [0.0, 0.25, 0.75, 0.999])
@pytest.mark.parametrize("coin", [0, 65_503, 65_504, 65_505, 65_506, 65_512, 65_528, 65_535])
def test_low_bits_are_accepted_with_their_probability(coin: int, share: float) -> None:
    """One number from chosen bytes, of which 29 bits are low. No sample of a size to draw here would show a mistake."""
    rate, low = 1.9 * 2.0**-41, int(share * 2**29)
    words = np.zeros(22, np.uint16)
    words[0], words[2:4] = coin, np.array([low << 3], np.uint32).view(np.uint16)
    drawn, rejected = SystemNoise(lambda count: words.tobytes() if count == 44 else bytes(count))._attempt(
        np.array([rate]), 1
    )

    assert drawn[0] % 2**29 == low
    assert bool(rejected.size) == (coin / 2**16 >= math.exp(-rate * low))


@given(st.floats(1e-6, 1e6), st.integers(0, 2**32))
def test_system_noise_lies_on_the_lattice(scale: float, seed: int) -> None:
    spacing = float(lattice_spacing(scale))
    values = SystemNoise(Entropy(seed))(NoiseRequest("laplace", "y", 0, scale, spacing, (4, 5)))

    assert values.shape == (4, 5)
    assert (values / spacing == np.rint(values / spacing)).all()


def test_system_noise_asks_the_operating_system_by_default() -> None:
    first, second = drawn(SystemNoise(), 1.0, 100), drawn(SystemNoise(), 1.0, 100)
    assert not (first == second).any()


def test_system_noise_is_for_one_learner() -> None:
    scales = np.ones((2, 1, 1))
    with pytest.raises(TypeError, match="scale and spacing must be one number each"):
        SystemNoise()(NoiseRequest("laplace", "y", 0, scales, lattice_spacing(scales), (2, 1, 3)))


def test_system_noise_of_a_lattice_law_needs_a_lattice() -> None:
    with pytest.raises(TypeError, match="scale and spacing must be one number each"):
        SystemNoise()(NoiseRequest("laplace", "y", 0, 1.0, None, (3,)))


def test_system_noise_refuses_a_lattice_that_it_is_too_fine_for() -> None:
    with pytest.raises(
        SpecError, match=r"scale must be at most 2\^43 times the spacing, got spacing/scale of 8.88178e-16"
    ):
        SystemNoise(Entropy(0))(NoiseRequest("laplace", "y", 0, 1.0, 2.0**-50, (1,)))


@pytest.mark.parametrize("sampler", ["bitwise", "keyed", pytest.param("opendp", marks=needs_opendp)])
@pytest.mark.parametrize("law", ["laplace", "gaussian"])
@pytest.mark.parametrize(
    ("scale", "spacing"),
    [
        (math.inf, 2.0**-41),
        (math.nan, 2.0**-41),
        (0.0, 2.0**-41),
        (-1.0, 2.0**-41),
        (1.0, 0.0),
        (1.0, 2.0),
        (1.0, math.nan),
        (1e-320, 0.0),
    ],
)
def test_no_source_of_real_noise_serves_a_scale_without_noise(
    sampler: str, law: Distribution, scale: float, spacing: float
) -> None:
    with pytest.raises(SpecError, match="must have 0 < spacing <= scale < inf"):
        source_of(sampler)(NoiseRequest(law, "y", 3, scale, spacing, (3,)))


@pytest.mark.parametrize("sampler", ["bitwise", "keyed", pytest.param("opendp", marks=needs_opendp)])
@pytest.mark.parametrize("rate", [0.0, math.inf, math.nan, -1.0, 5e-324])
def test_no_source_of_real_noise_serves_a_rate_without_noise(sampler: str, rate: float) -> None:
    with pytest.raises(SpecError, match="must have a rate that is positive and finite"):
        source_of(sampler)(NoiseRequest("spherical", "y", 3, rate, None, (3,)))


def test_a_ratio_that_underflows_is_refused() -> None:
    """Else 18 bits of so fine a lattice would be drawn: next to nothing."""
    with pytest.raises(SpecError, match="got spacing/scale of 0"):
        SystemNoise(Entropy(0))(NoiseRequest("laplace", "y", 0, 1e308, 2.0**-1000, (1,)))


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan, 1e-320, -1.0])
def test_a_scale_without_a_lattice_has_no_grid(scale: float) -> None:
    for value in (scale, np.array([1.0, scale])):
        with pytest.raises(SpecError, match="must be positive, finite and have a lattice in float64"):
            lattice_spacing(value)


# ---- the keyed source ------------------------------------------------------------------------------------------------


def test_keyed_noise_of_a_round_depends_on_no_earlier_draw() -> None:
    source = KeyedNoise("hush", "run", 3)
    straight = [drawn_at(source, t) for t in range(3)]
    assert (drawn_at(KeyedNoise("hush", "run", 3), 2) == straight[2]).all()
    assert (drawn_at(source, 0) == straight[0]).all()


@pytest.mark.parametrize(
    ("other", "name", "t"),
    [
        (KeyedNoise("hush!", "run", 3), "y", 1),
        (KeyedNoise("hush", "run2", 3), "y", 1),
        (KeyedNoise("hush", "run", 31), "y", 1),
        (KeyedNoise("hus", "hrun", 3), "y", 1),
        (KeyedNoise("hush', 'run", "run", 3), "y", 1),
        (KeyedNoise("hush", "run", 3), "z", 1),
        (KeyedNoise("hush", "run", 3), "y", 11),
    ],
)
def test_keyed_noise_differs_with_all_that_it_is_keyed_with(other: KeyedNoise, name: str, t: int) -> None:
    assert not (drawn_at(other, t, name) == drawn_at(KeyedNoise("hush", "run", 3), 1)).any()


def test_keyed_noise_stays_what_it_is() -> None:
    """A version that draws anything else breaks who relies on it: three numbers, as whole multiples of the spacing."""
    assert lattice_points(drawn_at(KeyedNoise("hush", "run", 3), 1)[:3]).tolist() == [
        -213374010738,
        -628902032352,
        -65898364472,
    ]


def test_keyed_noise_of_other_laws_stays_what_it_is() -> None:
    key, lattice = KeyedNoise("hush", "run", 3), NoiseRequest("gaussian", "y", 1, 1.0, lattice_spacing(1.0), (50,))
    assert lattice_points(key(lattice)[:3]).tolist() == [-213374010738, -628902032352, -164198827505]
    vectors = key(NoiseRequest("spherical", "y", 1, 1.5, None, (4, 3)))
    assert vectors[0].tolist() == pytest.approx(
        [0.2045311153076317, -2.1095168065070533, 0.8537735417961925], rel=1e-12
    )


def drawn_at(source: KeyedNoise, t: int, name: str = "y") -> FloatArray:
    return source(NoiseRequest("laplace", name, t, 1.0, lattice_spacing(1.0), (50,)))


# ---- other sources ---------------------------------------------------------------------------------------------------


def test_seeded_noise_is_laplace_for_every_learner() -> None:
    """Kolmogorov-Smirnov for each of two scales. Failure probability 2e-6 together, fixed seed."""
    scales = np.array([0.5, 4.0]).reshape(2, 1, 1)
    values = SeededNoise(6)(NoiseRequest("laplace", "y", 0, scales, lattice_spacing(scales), (2, 1000, 50)))

    for row, scale in zip(values, scales.ravel(), strict=True):
        assert stats.kstest(row.ravel(), "laplace", (0, scale)).pvalue > 1e-6
        assert (row / lattice_spacing(float(scale)) == np.rint(row / lattice_spacing(float(scale)))).all()


def test_seeded_noise_repeats_with_its_seed_alone() -> None:
    assert (drawn(SeededNoise(7), 1.0, 50) == drawn(SeededNoise(7), 1.0, 50)).all()
    assert not (drawn(SeededNoise(7), 1.0, 50) == drawn(SeededNoise(8), 1.0, 50)).any()


def test_seeded_noise_goes_on_in_the_next_round() -> None:
    source = SeededNoise(9)
    assert not (drawn(source, 1.0, 50) == drawn(source, 1.0, 50)).any()


def test_seeded_noise_is_rounded_only_where_there_is_a_lattice() -> None:
    draw = NoiseRequest("laplace", "y", 0, 1.5, 0.5, (50,))
    rounded, raw = SeededNoise(9)(draw), SeededNoise(9)(replace(draw, spacing=None))
    assert (draw.round_to_lattice(raw) == rounded).all() and (rounded != raw).any()


@pytest.mark.parametrize("law", ["laplace", "gaussian"])
def test_seeded_noise_has_no_more_even_numbers_than_odd_ones(law: Distribution) -> None:
    """On a lattice so fine that few binary places are left, halves are frequent. Fails with probability 1e-6 (4.9 deviations)."""
    drawn = SeededNoise(11)(NoiseRequest(law, "y", 0, 2.0**49, 1.0, (40_000,)))
    odd = int((drawn.astype(np.int64) & 1).sum())
    assert abs(odd - 20_000) < 4.9 * 100


def test_no_noise_is_zero() -> None:
    assert no_noise(NoiseRequest("laplace", "y", 3, 1.0, 0.5, (2, 3))).tolist() == [[0.0] * 3] * 2


def test_recorded_noise_says_the_round_again() -> None:
    recording = np.arange(12.0).reshape(2, 2, 1, 3)
    source = RecordedNoise({"y": recording})

    assert (source(NoiseRequest("laplace", "y", 1, 1.0, 1.0, (2, 1, 3))) == recording[1]).all()
    assert (source(NoiseRequest("laplace", "y", 1, 1.0, 1.0, (2, 4, 3))) == np.repeat(recording[1], 4, axis=1)).all()


@pytest.mark.parametrize(("name", "t"), [("y", 2), ("z", 0)])
def test_recorded_noise_must_have_the_field_and_the_round(name: str, t: int) -> None:
    source = RecordedNoise({"y": np.zeros((2, 3))})
    with pytest.raises(
        SpecError, match=f"must have field '{name}' for round {t}, got {len(source.fields.get(name, ()))} rounds of it"
    ):
        source(NoiseRequest("laplace", name, t, 1.0, 1.0, (3,)))


def test_recorded_noise_must_have_the_shape() -> None:
    with pytest.raises(SpecError, match=r"field 'y' must have shape \(4,\) in a round, got \(3,\)"):
        RecordedNoise({"y": np.zeros((2, 3))})(NoiseRequest("laplace", "y", 0, 1.0, 1.0, (4,)))


def test_a_recorder_keeps_what_passes() -> None:
    recorder = Recorder(SeededNoise(10))
    rounds = [recorder(NoiseRequest("laplace", "y", t, 1.0, float(lattice_spacing(1.0)), (2, 3))) for t in range(3)]

    assert np.array_equal(recorder.noise_by_field["y"], rounds)
    assert np.array_equal(
        RecordedNoise({"y": np.stack(rounds)})(NoiseRequest("laplace", "y", 2, 1.0, 1.0, (2, 3))), rounds[2]
    )


# ---- the lattice -----------------------------------------------------------------------------------------------------


@given(st.floats(1e-100, 1e100))
def test_the_spacing_is_a_power_of_two_about_2_to_minus_40_scales(scale: float) -> None:
    spacing = lattice_spacing(scale)

    assert isinstance(spacing, float)
    assert math.frexp(spacing)[0] == 0.5
    assert 2.0**-41 < spacing / scale <= 2.0**-40
    assert np.asarray(lattice_spacing(np.array([[scale]]))).item() == spacing


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e3))
def test_rounding_moves_by_half_a_spacing_at_most(value: float, scale: float) -> None:
    spacing = float(lattice_spacing(scale))
    rounded = float(round_to_lattice(np.array([value]), spacing)[0])

    assert abs(rounded - value) <= spacing / 2
    assert rounded / spacing == round(rounded / spacing)
