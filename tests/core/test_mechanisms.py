"""Mechanisms: what their densities and losses claim holds exactly, on coarse lattices too, and low bits tell nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sottovoce_core.arrays import FloatArray
from sottovoce_core.noise import (
    KeyedNoise,
    NoiseRequest,
    SeededNoise,
    SystemNoise,
    lattice_spacing,
    mechanisms,
    no_noise,
)
from sottovoce_core.noise.mechanisms import (
    add_gaussian_noise,
    add_laplace_noise,
    dirac_log_density,
    gaussian_log_density,
    gaussian_zcdp_rho,
    laplace_log_density,
    laplace_loss,
    spherical_log_density,
    zcdp_epsilon,
)

COARSE = 0.125
"""A spacing at which discreteness matters: 8 points a unit."""
POINTS = np.arange(-800, 801) * COARSE
"""100 units to both sides: what lies beyond has probability below e^-60 for the scales below."""
SCALES = [1.0, 0.3, 1.37]


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mechanisms on the lattice of eighths, whatever the scale."""
    monkeypatch.setattr(mechanisms, "lattice_spacing", lambda scale: COARSE)


def laplace_mass(centre: float, scale: float) -> FloatArray:
    """Exact probabilities of `POINTS`: `(1-q)/(1+q) q^k` for k points from the rounded centre, `q = exp(-COARSE/scale)`."""
    q = math.exp(-COARSE / scale)
    away = np.abs(POINTS - round(centre / COARSE) * COARSE) / COARSE
    mass: FloatArray = (1 - q) / (1 + q) * q**away
    return mass


def gaussian_mass(centre: float, scale: float) -> FloatArray:
    mass: FloatArray = np.exp(-0.5 * ((POINTS - round(centre / COARSE) * COARSE) / scale) ** 2)
    mass /= mass.sum()
    return mass


def losses(density: Callable[..., FloatArray], first: float, second: float, scale: float) -> FloatArray:
    """`log p(x | first) - log p(x | second)` of every point."""
    said = POINTS[:, None]
    loss: FloatArray = density(said, np.array([first]), scale) - density(said, np.array([second]), scale)
    return loss


# ---- exact probabilities ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("worlds", [(0.0, 0.125), (0.3, -1.1), (5.0, 4.07)])
def test_the_laplace_density_ratio_is_that_of_the_exact_probabilities(
    worlds: tuple[float, float], scale: float
) -> None:
    first, second = (laplace_mass(world, scale) for world in worlds)
    computed = losses(laplace_log_density, *worlds, scale)

    assert first.sum() == pytest.approx(1.0, abs=1e-12)
    near = (first > 1e-300) & (second > 1e-300)  # further out, probabilities lose digits
    np.testing.assert_allclose(computed[near], np.log(first[near] / second[near]), atol=1e-9)
    assert (first * np.exp(-computed)).sum() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("scale", SCALES)
def test_the_laplace_loss_covers_rounding_and_must(scale: float) -> None:
    """0.06 and 0.07 lie on two sides of the middle between lattice points: rounding parts them by a whole spacing."""
    largest = np.abs(losses(laplace_log_density, 0.06, 0.07, scale)).max()

    assert largest == pytest.approx(COARSE / scale)
    assert largest > 0.01 / scale  # the loss without lattice
    assert largest <= laplace_loss(0.01, 1, scale)


@pytest.mark.usefixtures("coarse")
@given(st.floats(-3, 3), st.floats(-3, 3), st.sampled_from(SCALES))
def test_no_point_costs_more_than_the_laplace_loss(first: float, second: float, scale: float) -> None:
    largest = np.abs(losses(laplace_log_density, first, second, scale)).max()
    assert largest <= laplace_loss(abs(first - second), 1, scale) + 1e-9


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("worlds", [(0.0, 1.0), (0.31, -0.9)])
def test_the_mean_of_exp_of_minus_the_loss_is_one(worlds: tuple[float, float]) -> None:
    """Of 200,000 numbers that were drawn, on the coarse lattice: six standard deviations, failure probability 2e-9."""
    first, second = (np.full(1, world) for world in worlds)
    said = add_laplace_noise(KeyedNoise("hush", "run", 0), "y", 0, np.full((200_000, 1), worlds[0]), 1.0)
    inverse = np.exp(laplace_log_density(said, second, 1.0) - laplace_log_density(said, first, 1.0))

    assert inverse.std() > 0.5
    assert abs(inverse.mean() - 1.0) < 6 * inverse.std() / math.sqrt(inverse.size)


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("worlds", [(0.0, 0.125), (0.3, -1.1), (5.0, 4.07)])
def test_the_gaussian_density_ratio_is_that_of_the_exact_probabilities(
    worlds: tuple[float, float], scale: float
) -> None:
    first, second = (gaussian_mass(world, scale) for world in worlds)
    computed = losses(gaussian_log_density, *worlds, scale)

    near = (first > 1e-290) & (second > 1e-290)
    np.testing.assert_allclose(computed[near], np.log(first[near] / second[near]), atol=1e-9)


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("worlds", [(0.0, 0.125), (0.3, -1.1), (0.06, 0.07)])
@pytest.mark.parametrize("order", [1.01, 2.0, 8.0])
def test_the_renyi_divergence_is_within_the_gaussian_loss(
    worlds: tuple[float, float], scale: float, order: float
) -> None:
    first, second = (gaussian_mass(world, scale) for world in worlds)
    near = (first > 0) & (second > 0)
    terms = order * np.log(first[near]) + (1 - order) * np.log(second[near])
    divergence = (np.logaddexp.reduce(terms)) / (order - 1)

    assert 0 < divergence <= order * gaussian_zcdp_rho(abs(worlds[0] - worlds[1]), 1, scale) * (1 + 1e-9)


# ---- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "expected"), [(laplace_loss, 0.5), (gaussian_zcdp_rho, 0.125)])
def test_a_loss_without_noise_is_infinite_and_of_nothing_is_zero(
    loss: Callable[[float, int, float], float], expected: float
) -> None:
    assert loss(1.0, 3, 0.0) == math.inf
    assert loss(0.0, 3, 0.0) == loss(0.0, 3, 1.0) == 0.0
    assert loss(1.0, 3, 2.0) == pytest.approx(expected, rel=1e-11)
    assert loss(1.0, 3, 2.0) > expected  # the lattice's slack


@given(st.floats(1e-6, 1e6), st.integers(1, 10**6))
def test_the_slack_of_a_message_is_at_most_2_to_minus_40_a_number(scale: float, dim: int) -> None:
    slack = laplace_loss(1.0, dim, scale) - 1.0 / scale
    assert slack <= dim * 2.0**-40 + 1e-9 / scale


def test_zcdp_epsilon_is_that_of_bun_and_steinke() -> None:
    assert zcdp_epsilon(0.1, 1e-6) == pytest.approx(0.1 + 2 * math.sqrt(0.1 * 6 * math.log(10)))
    assert zcdp_epsilon(0.0, 1e-6) == 0.0


# ---- saying ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("say", "density"), [(add_laplace_noise, laplace_log_density), (add_gaussian_noise, gaussian_log_density)]
)
def test_without_noise_a_vector_is_said_as_it_is(say: Callable[..., FloatArray], density: Callable[..., float]) -> None:
    vector = np.array([0.1, -2.0])
    assert say(no_noise, "y", 0, vector, 0.0) is vector
    assert density(vector, vector, 0.0) == 0.0
    assert density(vector + 0.1, vector, 0.0) == -math.inf


@pytest.mark.parametrize("say", [add_laplace_noise, add_gaussian_noise])
def test_every_learner_has_its_scale(say: Callable[..., FloatArray]) -> None:
    """The mean magnitude over 20,000 numbers is within 5 % of scale 1 and 50, in standard Laplace or normal ones."""
    scales = np.array([1.0, 50.0]).reshape(2, 1, 1)
    vector = np.zeros((2, 100, 200))
    size = np.abs(say(SeededNoise(1), "y", 0, vector, scales)).mean(axis=(1, 2))

    assert (vector == 0.0).all()  # nothing was written into it
    np.testing.assert_allclose(
        size / scales.ravel(), 1.0 if say is add_laplace_noise else math.sqrt(2 / math.pi), rtol=0.05
    )


def test_a_certain_density_forgives_rounding_alone() -> None:
    vector = np.array([1e6, 1.0])
    assert dirac_log_density(vector * (1 + 1e-15), vector) == 0.0
    assert dirac_log_density(vector + np.array([0.0, 1e-3]), vector) == -math.inf


def test_the_spherical_density_is_that_of_its_norm() -> None:
    """Times the surface of the sphere it is Gamma(dim), up to a constant."""
    norms = np.array([0.5, 2.0, 7.0])
    noise = norms[:, None] * np.array([0.6, 0.0, 0.8])
    constant = spherical_log_density(noise, 2.0) + 2 * np.log(norms) - stats.gamma(3, scale=0.5).logpdf(norms)
    np.testing.assert_allclose(constant, constant[0])


# ---- low bits --------------------------------------------------------------------------------------------------------


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e6), st.sampled_from([add_laplace_noise, add_gaussian_noise]))
def test_whatever_the_state_what_is_said_lies_on_the_lattice(
    state: float, scale: float, say: Callable[..., FloatArray]
) -> None:
    points = say(SystemNoise(), "y", 0, np.full(8, state), scale) / lattice_spacing(scale)
    assert (points == np.rint(points)).all()


def test_low_bits_of_what_is_said_are_uniform_for_any_state() -> None:
    """The last 8 bits for three states, and whether they tell the states apart: chi-square, 4e-9 together, fixed seeds."""
    counts = [np.bincount(last_bits(0.1 + 0.37 * k, k), minlength=256) for k in range(3)]
    for count in counts:
        assert stats.chisquare(count).pvalue > 1e-9
    assert stats.chi2_contingency(np.array(counts)).pvalue > 1e-9


def last_bits(state: float, seed: int) -> npt.NDArray[np.int64]:
    said = add_laplace_noise(KeyedNoise("hush", "run", seed), "y", 0, np.full(100_000, state), 1.0)
    bits: npt.NDArray[np.int64] = (said / lattice_spacing(1.0)).astype(np.int64) & 255
    return bits


def finest(values: FloatArray) -> npt.NDArray[np.int64]:
    """The power of two that each value is an odd multiple of."""
    mantissa, exponent = np.frexp(values)
    whole = np.ldexp(mantissa, 53).astype(np.int64)
    trailing = np.round(np.log2(whole & -whole)).astype(np.int64)
    finest: npt.NDArray[np.int64] = exponent - 53 + trailing
    return finest


def given_away(of_zero: FloatArray, of_one: FloatArray) -> float:
    """Mironov's attack: share of what state 0 says, within 1/4 of it, that is finer than anything state 1 can say there."""
    near, far = of_zero[np.abs(of_zero) < 0.25], of_one[np.abs(of_one) < 0.25]
    return float((finest(near[near != 0]) < finest(far[far != 0]).min()).sum() / of_zero.size)


def test_a_precision_attack_breaks_numpy_and_not_us() -> None:
    """Noise around 0 is a finer float than noise around -1: one output that is too fine for 1 proves that it was 0."""
    noise = np.random.default_rng(0).laplace(size=(2, 50_000))
    assert given_away(noise[0], 1.0 + noise[1]) > 0.1

    for say in (add_laplace_noise, add_gaussian_noise):
        zero, one = (say(KeyedNoise("hush", "run", k), "y", 0, np.full(50_000, 1.0 * k), 1.0) for k in range(2))
        assert given_away(zero, one) < 1e-3


def test_the_precision_attack_breaks_spherical_noise() -> None:
    """As its docs say: it is in float64. Should it once be on a lattice, they may say so."""
    noise, again = (
        KeyedNoise("hush", "run", k)(NoiseRequest("spherical", "y", 0, 1.0, None, (50_000, 3)))[:, 0] for k in range(2)
    )
    assert given_away(noise, 1.0 + again) > 0.01
