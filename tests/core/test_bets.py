"""Bets on noise: their e-values are those of the formulas, fair under the claim, and what is unknown counts for nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from scipy import integrate, stats

from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.online.bets import (
    _BLOCKS,
    _LEARNER_BETS,
    _POOLED_BETS,
    _SAME_ROUND_BETS,
    EProcesses,
    _Bet,
    _bet_on_excess,
    _bet_on_signs,
    _bet_on_sizes,
    _FarLag,
    _Histogram,
    _krichevsky_trofimov,
    _LowBits,
    _Repeats,
    _Scale,
)
from sottovoce_core.auditing.online.noise_history import (
    _MAX_LAG_ROUNDS,
    KEY_MATCH_PROBABILITY,
    LAGS,
    KeyTable,
    NoiseHistory,
    RoundNoise,
    RoundObservation,
    _compute_keys,
    _Sums,
)

ALARM = math.log(1e3)
"""At alpha = 0.001."""

Stream = Callable[[np.random.Generator, int], Iterator[FloatArray]]


def said(values: FloatArray, generator: np.random.Generator) -> RoundNoise:
    """A round in which this noise was said, `(learners, numbers)`, not-a-number where none is known; centres at random."""
    round_ = RoundNoise(*values.shape)
    known = np.isfinite(values)
    round_.values[:] = values
    round_.steps[known] = np.rint(values[known] * 2.0**40).astype(np.int64)
    round_.message_steps[known] = round_.steps[known] + generator.integers(-(2**40), 2**40, size=known.sum())
    round_.lost_bits[known] = 0
    round_.past[:, 0] = 1.0
    round_.past[:, 1] = generator.normal(size=values.shape)
    return round_


class Watched:
    """Rounds as bets see them."""

    def __init__(self, learners: int, numbers: int, seed: int = 0) -> None:
        self._memory = NoiseHistory(learners, numbers, KeyTable())
        self._generator = np.random.default_rng(seed)

    def observe(self, values: FloatArray) -> RoundObservation:
        """The next round, until the one after it."""
        return self._memory.observe(said(values, self._generator))


def totals(bets: Sequence[_Bet], watched: Watched, rounds: FloatArray) -> list[FloatArray]:
    """`(learners, width)` sums of every bet over all rounds, `(rounds, learners, numbers)`."""
    each: list[list[FloatArray]] = []
    for values in rounds:
        seen = watched.observe(values)
        each.append([bet.compute_sums(seen) for bet in bets])
    return [np.sum(sums, axis=0) for sums in zip(*each, strict=True)]


# ---- the values ------------------------------------------------------------------------------------------------------


def test_e_values_are_those_of_the_formulas() -> None:
    """Against the products and integrals that the closed forms stand for."""
    values = np.random.default_rng(0).laplace(size=(2, 1, 20))
    histogram, scale = totals((_Histogram(), _Scale()), Watched(1, 20), values)
    products = []
    for cells, probabilities in ((16, stats.laplace.cdf(values)), (8, stats.expon.cdf(np.abs(values)))):
        counts, product = np.zeros(cells), 1.0
        for cell in (probabilities.ravel() * cells).astype(int):
            product *= cells * (counts[cell] + 0.5) / (counts.sum() + cells / 2)
            counts[cell] += 1
        products.append(product)
    sizes = np.abs(values).sum()
    mixed, _ = integrate.quad(
        lambda rate: stats.gamma.pdf(rate, 20, scale=1 / 20) * rate**40 * math.exp((1 - rate) * sizes), 0, 10
    )
    assert _Histogram().compute_log_e_value(histogram)[0] == pytest.approx(math.log(np.mean(products)))
    assert _Scale().compute_log_e_value(scale)[0] == pytest.approx(math.log(mixed))


def test_e_values_of_worked_examples() -> None:
    """Computed by hand, from the formulas."""
    fair = np.array([0.5, 0.5])
    assert _bet_on_signs(np.array(50.0), np.array(400.0), 0.01) == pytest.approx(1.695, abs=1e-3)
    assert _Scale().compute_log_e_value(np.array([900.0, 1000.0])) == pytest.approx(3.278, abs=1e-3)
    assert _krichevsky_trofimov(np.array([60.0, 0.0]), fair) == pytest.approx(38.967, abs=1e-3)
    assert _krichevsky_trofimov(np.array([30.0, 30.0]), fair) == pytest.approx(-2.277, abs=1e-3)
    assert _krichevsky_trofimov(85.0 * np.eye(16)[3], np.full(16, 1 / 16)) == pytest.approx(209.98, abs=5e-3)


def test_what_is_rarer_than_expected_is_no_evidence() -> None:
    """How often a number is heard again is only bounded: fewer than that, for long, gains nothing; far more does."""
    expected = np.array([1e-6, 1.0, 60.0, 3000.0])
    for share in (0.0, 0.5, 1.0):
        assert np.all(_bet_on_excess(np.floor(share * expected), expected) <= 0.0)
    assert np.all(_bet_on_excess(np.ceil(3.0 * expected) + 6.0, expected) > 0.0)
    counted = np.arange(400.0)
    stakes = np.exp(_bet_on_excess(counted, np.full(400, 60.0)))
    assert stats.poisson.pmf(counted, 60.0) @ stakes <= 1.0


@pytest.mark.parametrize("variance", [0.01, 0.1])
def test_signs_are_bet_on_as_a_normal_mixture(variance: float) -> None:
    for s, v in ((3.0, 10.0), (-8.0, 40.0), (0.0, 5.0)):
        mixed, _ = integrate.quad(
            lambda rate, s=s, v=v: stats.norm.pdf(rate, scale=variance**0.5) * math.exp(rate * s - rate**2 * v / 2),
            *(-5.0, 5.0),
            epsabs=1e-12,
        )
        assert _bet_on_signs(np.array(s), np.array(v), variance) == pytest.approx(math.log(mixed))


def test_bets_on_sizes_are_never_better_than_fair() -> None:
    """`E exp(u (|r| - 1)) = exp(-u)/(1 - u)` for u = rate X, whatever X in [-1, 1] is."""
    x = np.linspace(-1.0, 1.0, 201)
    for rate in (-0.3, -0.1, 0.1, 0.3):
        exact = -rate * x - np.log1p(-rate * x)
        assert np.all(exact + _bet_on_sizes(np.zeros(201), x**2, rate) <= 1e-15)


def test_far_lags_are_those_of_their_rounds() -> None:
    """Of learner 0's signs on learner 1's normal scores, so many rounds back; nearer ones and farther ones do not count."""
    values = np.random.default_rng(6).laplace(size=(_MAX_LAG_ROUNDS + 5, 2, 3))
    (sums,) = totals((_FarLag(),), Watched(2, 3), values)
    normal = stats.norm.ppf(stats.laplace.cdf(values))
    assert sums.shape == (2, 2 * (_MAX_LAG_ROUNDS - LAGS) * 2)
    for lag in (LAGS + 1, 20, _MAX_LAG_ROUNDS):
        column = (lag - LAGS - 1) * 2 + 1
        followed = (np.sign(values[lag:, 0]) * normal[:-lag, 1]).sum(), (normal[:-lag, 1] ** 2).sum()
        assert (sums[0, column], sums[0, sums.shape[1] // 2 + column]) == pytest.approx(followed)


@pytest.mark.statistics
def test_bets_on_far_lags_are_fair() -> None:
    """400 runs of twice as many rounds as are near, five standard errors: failure probability below 1e-4."""
    generator, bet = np.random.default_rng(7), _FarLag()
    rounds = (generator.laplace(size=(2 * LAGS, 1, 4)) for _ in range(400))
    found = np.exp([bet.compute_log_e_value(totals((bet,), Watched(1, 4), values)[0])[0] for values in rounds])
    assert np.ptp(found) > 0.01 and found.mean() <= 1.0 + 5.0 * found.std() / 20.0


def test_shares_add_up_to_one() -> None:
    for shares in (_LEARNER_BETS, (*_POOLED_BETS, *_SAME_ROUND_BETS)):
        assert sum(share for _, share in shares) == pytest.approx(1.0)
    assert _LowBits.zero_probabilities.sum() == pytest.approx(1.0)


# ---- under the claim -------------------------------------------------------------------------------------------------


@pytest.mark.statistics
def test_e_values_are_at_most_one_on_average() -> None:
    """Of every bet and of the mixtures. Over 400 runs, five standard errors: failure probability below 1e-4."""
    generator, found = np.random.default_rng(2), []
    bets = [bet for bet, _ in (*_LEARNER_BETS, *_POOLED_BETS, *_SAME_ROUND_BETS)]
    for _ in range(400):
        rounds, seed = generator.laplace(size=(3, 2, 4)), int(generator.integers(2**32))
        stakes, watched = EProcesses(2), Watched(2, 4, seed)
        for values in rounds:
            stakes.add(watched.observe(values))
        each = [
            bet.compute_log_e_value(sums)
            for bet, sums in zip(bets, totals(bets, Watched(2, 4, seed), rounds), strict=True)
        ]
        found.append(np.concatenate([*each, stakes.log_e_values]))
    e_values = np.exp(found)
    assert np.all(e_values.mean(axis=0) <= 1.0 + 5.0 * e_values.std(axis=0) / math.sqrt(len(e_values)))


@pytest.mark.statistics
def test_changes_are_at_most_the_blocks_begun_on_average() -> None:
    """That gives the run length. 120 streams of two short blocks, five standard errors: failure probability below 1e-4.

    Of two kinds of blocks the long one has begun once, the short one twice: 1.5 on average.
    """
    generator, found = np.random.default_rng(4), []
    for _ in range(120):
        watched, stakes = Watched(1, 2), EProcesses(1)
        for _ in range(_BLOCKS[0] + 2):
            stakes.add(watched.observe(generator.laplace(size=(1, 2))))
        found.append(np.exp(stakes.change_log_e_values))
    most = (2.0 + 1.0) / 2.0
    assert np.all(np.mean(found, axis=0) <= most + 5.0 * np.std(found, axis=0) / math.sqrt(len(found)))


def test_what_is_not_a_number_counts_for_nothing() -> None:
    """A number that never carries noise, a learner that is not heard, and a round without noise."""
    values = np.random.default_rng(3).laplace(size=(6, 2, 5))
    padded = np.full((7, 3, 6), np.nan)
    padded[:6, :2, :5] = values
    bets = (_Scale(), _Histogram(), _Repeats())  # the others know of centres, which are random, or of shifts
    sparse, dense = totals(bets, Watched(3, 6), padded), totals(bets, Watched(2, 5), values)
    for bet, some, all_of_them in zip(bets, sparse, dense, strict=True):
        assert bet.compute_log_e_value(some)[:2] == pytest.approx(bet.compute_log_e_value(all_of_them), abs=1e-9)
    every, watched = [bet for bet, _ in (*_LEARNER_BETS, *_POOLED_BETS, *_SAME_ROUND_BETS)], Watched(3, 6)
    watched.observe(padded[0])
    for bet, sums in zip(every, totals(every, watched, padded[6:]), strict=True):
        assert bet.compute_log_e_value(sums) == pytest.approx(0.0, abs=1e-9)


# ---- what is new -----------------------------------------------------------------------------------------------------


def test_keys_are_as_unlikely_as_stated() -> None:
    """At any place: a key's numbers of the lattice, each with its probability."""
    h = 2.0**-41 * 1.0000001  # the finest spacing, in scales
    around: FloatArray = np.arange(-400.0, 401.0)
    keys = _compute_keys(around * h)
    chance = [np.sum(np.tanh(h / 2) * np.exp(-h * np.abs(around[keys == key]))) for key in np.unique(keys)[1:-1]]
    assert max(chance) <= KEY_MATCH_PROBABILITY
    assert max(chance) > 0.9 * KEY_MATCH_PROBABILITY


def test_numbers_heard_before_are_known_up_to_their_sign() -> None:
    """Of six numbers five have one that follows. Chance repeats have probability below 1e-8."""
    generator, keys = np.random.default_rng(0), KeyTable()
    first, everywhere = generator.laplace(size=(2, 6)), np.ones((2, 6), dtype=bool)
    assert keys.add_round(first, everywhere).repeat_counts.tolist() == [0, 0]
    heard = keys.add_round(np.stack([-first[1], generator.laplace(size=6)]), everywhere)
    assert (heard.repeat_counts.tolist(), heard.followed_repeat_counts.tolist()) == ([5, 0], [5, 0])
    moved = np.stack([generator.laplace(size=6), np.round(first[0] * 2.0**40 + 1.0) / 2.0**40])
    assert (
        keys.add_round(moved, everywhere).followed_repeat_counts.sum() >= 3
    )  # one lattice point hardly ever moves a key
    assert (heard.same_round_repeat_counts.tolist(), heard.same_round_followed_counts.tolist()) == ([0, 0], [0, 0])


def test_who_copies_in_the_same_round_is_told_from_who_repeats() -> None:
    generator, keys = np.random.default_rng(1), KeyTable()
    row, everywhere = generator.laplace(size=4), np.ones((3, 4), dtype=bool)
    heard = keys.add_round(np.stack([row, row, np.full(4, 0.7)]), everywhere)
    assert (heard.same_round_repeat_counts.tolist(), heard.same_round_followed_counts.tolist()) == (
        [0, 3, 0],
        [0, 3, 0],
    )
    assert (heard.repeat_counts.tolist(), heard.followed_repeat_counts.tolist()) == ([0, 0, 2], [0, 0, 2])


def test_zero_after_zero_is_known_from_the_start() -> None:
    heard = KeyTable().add_round(np.zeros((1, 5)), np.ones((1, 5), dtype=bool))
    assert (heard.repeat_counts.tolist(), heard.followed_repeat_counts.tolist()) == ([4], [4])


def test_a_number_a_message_is_a_stream_of_its_own() -> None:
    """Of one number a round, what followed it is known, too."""
    keys, numbers = KeyTable(), np.random.default_rng(2).laplace(size=5)
    found = [keys.add_round(np.array([[x]]), np.ones((1, 1), dtype=bool)) for x in (*numbers, *numbers)]
    assert [int(heard.followed_repeat_counts[0]) for heard in found] == [0] * 6 + [1] * 4


def test_numbers_that_float64_blurs_are_not_compared() -> None:
    watched, blurred = NoiseHistory(1, 3, KeyTable()), said(np.zeros((1, 3)), np.random.default_rng(0))
    blurred.resolution[:] = 2.0**-30
    seen = watched.observe(blurred)
    assert (seen.exact_counts.sum(), seen.repeat_counts.sum(), seen.key_repeats.repeat_counts.sum()) == (0, 0, 0)


# ---- what adds up ----------------------------------------------------------------------------------------------------


def on_lattice(generator: np.random.Generator, *shape: int) -> FloatArray:
    values: FloatArray = np.rint(generator.laplace(size=shape) * 2.0**40) / 2.0**40
    return values


def test_sums_and_differences_are_found_however_scales_differ() -> None:
    """One number in sixteen finds its slot taken; that 9 of 40 hits are lost has probability below 1e-3."""
    generator, sums = np.random.default_rng(0), _Sums(2, 3, 40)
    scale, exact = np.array([1.0, 4.0, 0.5])[:, None] * np.ones(40), np.ones((3, 40), dtype=bool)
    first, second, third = on_lattice(generator, 3, 3, 40)
    for said in (first, second):
        heard = sums.add_round(said, scale, exact)
        assert not heard.earlier_counts.any() and not heard.same_round_counts.any()
    third[0] = first[2] * 0.5 - second[0]
    third[1] = -second[1]
    third[2] = (third[0] + second[1] * 4.0) / 0.5
    heard = sums.add_round(third, scale, exact)
    assert np.all(heard.earlier_counts[:2] > 31) and heard.earlier_counts[2] == 0
    assert heard.same_round_counts[:2].sum() == 0 and heard.same_round_counts[2] > 31
    assert sums.add_round(first, scale, exact).earlier_counts[:2].sum() == 0  # two rounds are kept


def test_what_adds_up_by_chance_is_no_more_than_is_expected() -> None:
    """Beside noise of a large scale numbers are compared as coarsely; upper limits, at most a hundred times too high.

    500 rounds expect 600 and 400 at most; five deviations.
    """
    generator, sums = np.random.default_rng(1), _Sums(4, 4, 2)
    scale, exact = np.array([1.0, 1.0, 1.0, 2.0**22])[:, None] * np.ones(2), np.ones((4, 2), dtype=bool)
    found = np.zeros(4)
    for _ in range(500):
        heard = sums.add_round(generator.laplace(size=(4, 2)), scale, exact)
        found += [
            heard.earlier_counts.sum(),
            heard.expected_counts.sum(),
            heard.same_round_counts.sum(),
            heard.expected_same_round_counts.sum(),
        ]
    for hits, expected in (found[:2], found[2:]):
        assert expected / 100.0 < hits <= expected + 5.0 * math.sqrt(expected)


def test_numbers_that_are_not_known_add_up_to_nothing() -> None:
    values, scale, sums = on_lattice(np.random.default_rng(2), 2, 6), np.ones((2, 6)), _Sums(1, 2, 6)
    exact = np.arange(12).reshape(6, 2).T % 4 > 0
    nothing = sums.add_round(values, scale, exact)
    assert (nothing.earlier_counts.sum(), nothing.same_round_counts.sum(), nothing.expected_same_round_counts[0]) == (
        0,
        0,
        0.0,
    )
    again = sums.add_round(values, scale, exact)
    assert again.earlier_counts.tolist() == [3, 6]
    assert again.expected_counts == pytest.approx(
        [KEY_MATCH_PROBABILITY * 3 * 5**2, KEY_MATCH_PROBABILITY * 3 * (3**2 + 5**2)]
    )


# ---- streams that are not what is claimed ----------------------------------------------------------------------------


def correct(generator: np.random.Generator, numbers: int) -> Iterator[FloatArray]:
    while True:
        yield generator.laplace(size=numbers)


def half(generator: np.random.Generator, numbers: int) -> Iterator[FloatArray]:
    return (values / 2 for values in correct(generator, numbers))


def nine_tenths(generator: np.random.Generator, numbers: int) -> Iterator[FloatArray]:
    return (0.9 * values for values in correct(generator, numbers))


def normal(generator: np.random.Generator, numbers: int) -> Iterator[FloatArray]:
    while True:
        yield generator.normal(size=numbers) * math.sqrt(2.0)


def reused(generator: np.random.Generator, numbers: int) -> Iterator[FloatArray]:
    for values in correct(generator, numbers):
        yield values
        yield values


def omitted_in_round_20(generator: np.random.Generator, numbers: int) -> Iterator[FloatArray]:
    for t, values in enumerate(correct(generator, numbers), 1):
        yield np.zeros(numbers) if t == 20 else values


def correlated(generator: np.random.Generator, numbers: int) -> Iterator[FloatArray]:
    """Laplace numbers with normal scores that are autocorrelated by 0.5."""
    score = generator.normal(size=numbers)
    while True:
        yield stats.laplace.ppf(stats.norm.cdf(score))
        score = 0.5 * score + math.sqrt(0.75) * generator.normal(size=numbers)


def rounds_to_alarm(stream: Iterator[FloatArray], numbers: int, most: int, alarm: float = ALARM) -> int:
    """The round, from 1, after which one learner's e-value is there; one more than `most` if it was not."""
    watched, stakes = Watched(1, numbers), EProcesses(1)
    for t, values in zip(range(1, most + 1), stream, strict=False):
        stakes.add(watched.observe(values[None]))
        if stakes.log_e_values[1] >= alarm:
            return t
    return most + 1


@pytest.mark.statistics
@pytest.mark.parametrize(
    ("stream", "numbers", "least", "most"),
    [
        (half, 100, 1, 3),
        (nine_tenths, 100, 8, 36),
        (normal, 100, 5, 20),
        (reused, 100, 2, 2),
        (omitted_in_round_20, 100, 20, 20),
        (correlated, 100, 2, 6),
        (half, 1, 30, 130),
        (reused, 1, 2, 2),
        (omitted_in_round_20, 1, 20, 20),
    ],
)
def test_median_rounds_to_alarm(stream: Stream, numbers: int, least: int, most: int) -> None:
    """Of nine streams, within a factor of two of what is known: a median outside has probability below 1e-4."""
    alarms = [rounds_to_alarm(stream(np.random.default_rng(k), numbers), numbers, 2 * most) for k in range(9)]
    assert least <= np.median(alarms) <= most


@pytest.mark.statistics
@pytest.mark.parametrize(("numbers", "streams", "rounds"), [(1, 40, 80), (100, 15, 100)])
def test_false_alarms_are_as_rare_as_stated_however_often_one_looks(numbers: int, streams: int, rounds: int) -> None:
    """At alpha = 0.05 two or one of the streams are expected to raise an alarm, at most."""
    alarms = [
        rounds_to_alarm(correct(np.random.default_rng(k), numbers), numbers, rounds, math.log(20)) <= rounds
        for k in range(streams)
    ]
    assert stats.binom.sf(sum(alarms) - 1, streams, 0.05) > 1e-3
