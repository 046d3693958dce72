"""The catalogue of breaks: each changes what it says, and nothing else; and the evidence that it gives is what is written."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from typing import get_args

import numpy as np
import pytest

from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.conformance.residuals import compute_residuals
from sottovoce_core.auditing.plan import AuditPlan, plan_audit
from sottovoce_core.auditing.worlds import RunChunk, simulate_runs, spawn_seeds
from sottovoce_core.noise import NoiseRequest, NoiseSource, SeededNoise, lattice_spacing
from sottovoce_lab.auditor_evaluation import audit_mutant
from sottovoce_lab.catalogue import CATALOGUE, QUICK_MUTANTS
from sottovoce_lab.catalogue.distribution import _compute_shape_kl
from sottovoce_lab.catalogue.reuse import _compute_correlation_kl, _estimate_repeats
from sottovoce_lab.mutants import (
    BASE_RUNS,
    Kind,
    compute_bernoulli_kl,
    compute_scale_kl,
    estimate_from_messages,
    estimate_from_numbers,
)

BY_NAME = {mutant.name: mutant for mutant in CATALOGUE}
SEED = np.random.SeedSequence(7)
SCALE = 2.0
GRID = float(lattice_spacing(SCALE))


@cache
def planned(base: str) -> AuditPlan:
    run, data = BASE_RUNS[base].build()
    return plan_audit(run, data, 0, runs=20)


def said(source: NoiseSource, rounds: int, shape: tuple[int, ...], scale: float) -> FloatArray:
    return np.stack(
        [source(NoiseRequest("laplace", "y", t, scale, float(lattice_spacing(scale)), shape)) for t in range(rounds)]
    )


def drawn(name: str, rounds: int = 8, shape: tuple[int, ...] = (3, 50, 16), scale: float = SCALE) -> FloatArray:
    """`(rounds, learners, runs, numbers)` of a broken learner's Laplace noise."""
    return said(BY_NAME[name].build_fault(planned("ldp-dol")).noise(SEED), rounds, shape, scale)


def correct(rounds: int = 8, shape: tuple[int, ...] = (3, 50, 16), scale: float = SCALE) -> FloatArray:
    """The same of the correct noise that it was made from."""
    return said(SeededNoise(spawn_seeds(SEED, 2)[0]), rounds, shape, scale)


def steps(noise: FloatArray, scale: float = SCALE) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.rint(noise / float(lattice_spacing(scale))).astype(np.int64)


# ---- the list --------------------------------------------------------------------------------------------------------


def test_there_are_breaks_of_ten_classes() -> None:
    counts = Counter(mutant.kind for mutant in CATALOGUE)
    assert counts.keys() == set(get_args(Kind)) and len(counts) == 10
    assert len(CATALOGUE) >= 60 and min(counts.values()) >= 6
    assert len(BY_NAME) == len(CATALOGUE) and all(mutant.base in BASE_RUNS for mutant in CATALOGUE)


def test_some_of_them_are_tried_by_every_self_test() -> None:
    assert {mutant.kind for mutant in QUICK_MUTANTS} == set(get_args(Kind))
    assert all(mutant in CATALOGUE for mutant in QUICK_MUTANTS) and 20 <= len(QUICK_MUTANTS) < 30


@pytest.mark.parametrize("name", BY_NAME)
def test_a_break_fits_its_own_run_and_breaks_one_thing(name: str) -> None:
    mutant = BY_NAME[name]
    broken = mutant.build_fault(planned(mutant.base))
    other = (broken.noise is not SeededNoise, broken.actual_run is not None, broken.claim_factor != 1.0)
    assert sum((*other, broken.compute_leak is not None, broken.detect is not None)) == 1


ON_NO_LATTICE = {"raw doubles"}
NOISY = [
    m.name for m in CATALOGUE if m.build_fault(planned(m.base)).noise is not SeededNoise and m.name not in ON_NO_LATTICE
]


@pytest.mark.parametrize("name", NOISY)
def test_broken_noise_is_on_the_lattice(name: str) -> None:
    """But for the noise whose fault it is that it is not, of which a float of size 8 has 1000 places on a spacing."""
    noise = drawn(name, 4, (3, 10, 6))
    assert noise.shape == (4, 3, 10, 6) and np.isfinite(noise).all()
    assert (noise / GRID == steps(noise)).all()
    raw = drawn("raw doubles")
    np.testing.assert_allclose(raw, correct(), atol=GRID)
    assert np.mean(raw / GRID == np.rint(raw / GRID)) < 0.01


LAW = [
    *(f"{name} later" for name in ("two rounds", "five rounds", "one learner, two rounds")),
    *("at another scale", "antithetic", "shifted coordinates", "other way round", "1 % repeated"),
    *(f"correlation {rho} with the round before" for rho in ("0.3", "0.1")),
    *("one seed", "clock as seed", "a shifted copy", "a late copy", "a mirrored copy", "correlation 0.1 of two"),
    *("summing to zero", "summing to 0.8 of it", "2^16 seeds", "seconds of a day", "2^20 streams", "restored"),
    *("sign in the word of the size", "sign in a low bit of the word of the size", "sign in the word of another size"),
    *("words that overlap", "low words again in 1 %", "32 random bits", "float32"),
    *("lattice 2^16 coarser", "bit 12 is one in 51 %"),
]


@pytest.mark.parametrize("name", LAW)
def test_noise_that_is_not_fresh_or_too_coarse_has_the_right_law(name: str) -> None:
    """Mean size 1, half of the signs positive. Of 16,000 independent numbers at least: six deviations, so 1e-8 for each."""
    noise = drawn(name, 8, (3, 2000, 16)) / SCALE
    assert np.mean(np.abs(noise)) == pytest.approx(1.0, abs=6.0 / math.sqrt(16_000))
    assert np.mean(noise > 0.0) == pytest.approx(0.5, abs=3.0 / math.sqrt(16_000))


# ---- scale, shape, support -------------------------------------------------------------------------------------------


def test_scaled_noise_shows_nothing_in_its_low_bits() -> None:
    """Half of an odd number is rounded to an even one: the share of even numbers would be 5/8. Nine deviations: 1e-18."""
    half = drawn("half the noise", 8, (3, 200, 16))
    np.testing.assert_allclose(half, 0.5 * correct(8, (3, 200, 16)), rtol=1e-8, atol=GRID)
    assert np.mean(steps(half) & 1) == pytest.approx(0.5, abs=4.5 / math.sqrt(half.size))


def test_scales_of_a_learner_and_of_runs() -> None:
    one = drawn("one learner at 0.95")
    np.testing.assert_allclose(one[:, 0], 0.95 * correct()[:, 0], rtol=1e-8, atol=GRID)
    assert np.array_equal(one[:, 1:], correct()[:, 1:])
    ratio = drawn("runs vary by 20 %") / correct()
    np.testing.assert_allclose(ratio, np.broadcast_to(ratio[:1, :1, :, :1], ratio.shape), rtol=1e-6)
    assert set(np.round(ratio.ravel(), 4)) == {0.8, 1.2}


def test_laws_have_the_right_variance_or_mean_size() -> None:
    """Of 400,000 numbers, whose standard errors are below 0.4 %."""
    size = 1, (1, 1, 400_000), 1.0
    assert np.var(drawn("Gaussian", *size)) == pytest.approx(2.0, rel=0.02)
    for name in ("logistic", "uniform"):
        assert np.mean(np.abs(drawn(name, *size))) == pytest.approx(1.0, rel=0.02)
    assert np.abs(drawn("uniform", *size)).max() <= 2.0
    assert np.mean(drawn("60 % positive", *size) > 0.0) == pytest.approx(0.6, abs=0.005)
    np.testing.assert_allclose(drawn("centred at 0.02", *size), correct(*size) + 0.02, atol=1e-9)


def test_spherical_noise_becomes_gaussian_of_the_same_variance() -> None:
    """Within 2 %: their standard error is 0.2 %."""
    broken = BY_NAME["Gaussian"].build_fault(planned("pvp")).noise(SEED)
    draw = NoiseRequest("spherical", "y", 0, 0.5, None, (200_000, 3))
    assert np.var(broken(draw)) == pytest.approx(np.var(SeededNoise(1)(draw)), rel=0.02)


def test_noise_that_is_left_out() -> None:
    first, but_one, last = drawn("first only"), drawn("a round left out"), drawn("a coordinate left out")
    assert np.array_equal(first[0], correct()[0]) and not first[1:].any()
    (silent,) = np.flatnonzero(~drawn("a round left out", 16).any(axis=(1, 2, 3)))
    assert silent == planned("ldp-dol").adversary.visible_rounds[-1] and np.array_equal(but_one, correct()[:8])
    assert not last[..., -1].any() and np.array_equal(last[..., :-1], correct()[..., :-1])
    zeros = drawn("0.1 % of messages without noise", 8, (3, 2000, 4)) == 0.0
    assert (zeros.any(axis=-1) == zeros.all(axis=-1)).all()
    assert 15 <= zeros.all(axis=-1).sum() <= 90  # of 48 on average; fails with probability below 1e-6


def test_bounded_noise() -> None:
    """A number beyond 4 scales has probability 1.8 %, so 80,000 of them have some; the law of the others is Laplace."""
    size = 1, (1, 1, 80_000), 1.0
    assert np.abs(correct(*size)).max() > 6.0
    within, clipped = np.abs(drawn("none beyond 4 scales", *size)), drawn("clipped at 6 scales", *size)
    assert within.max() <= 4.0 and np.mean(within < 1.0) == pytest.approx(math.expm1(-1.0) / math.expm1(-4.0), abs=0.01)
    assert np.array_equal(clipped, np.clip(correct(*size), -6.0, 6.0))
    assert np.abs(drawn("none within 0.01 scales", *size)).min() >= 0.01 - GRID


def test_the_biased_sampler_is_biased_by_as_much_as_it_says() -> None:
    """Standard error of the share: 0.03 %."""
    noise = drawn("biased sampler", 1, (1, 1, 1_000_000), 1.0)
    assert np.mean(np.abs(noise) < 0.1) == pytest.approx(-np.expm1(-0.1) + 0.015, abs=0.0015)


# ---- low bits --------------------------------------------------------------------------------------------------------


def test_coarse_lattices_and_short_mantissas() -> None:
    assert not (steps(drawn("lattice 2^16 coarser")) & 0xFFFF).any()
    rare = drawn("lattice 2^8 coarser in 0.5 %", 8, (3, 2000, 16))
    coarse = ~(steps(rare) & 0xFF).any(axis=-1)
    assert 150 <= coarse.sum() <= 330 and np.array_equal(rare[~coarse], correct(8, (3, 2000, 16))[~coarse])  # 240
    short = drawn("float32")
    assert np.array_equal(short.astype(np.float32).astype(np.float64), short)
    assert np.abs(short - correct()).max() <= 2.0**-20


def test_a_bit_that_is_not_fair() -> None:
    """Six deviations of 192,000 bits: 2e-9."""
    size = 8, (3, 500, 16)
    bits = steps(drawn("bit 5 is one in 60 %", *size))
    assert np.mean(bits >> 5 & 1) == pytest.approx(0.6, abs=0.007)
    assert not ((bits ^ steps(correct(*size))) & ~np.int64(32)).any()  # and no other bit


def words_of(noise: FloatArray) -> FloatArray:
    """The words of 53 bits behind its sizes, where the lattice resolves them: NaN elsewhere."""
    tail = np.exp(-np.abs(noise) / SCALE)
    return np.where(tail < 2.0**-8, np.rint(tail * 2.0**53) - 1.0, np.nan)


@pytest.mark.parametrize(("name", "others"), [("the size", 0), ("another size", 1)])
def test_signs_that_are_bits_of_words(name: str, others: int) -> None:
    """Bit 8, as far as the lattice tells: in nearly all numbers beyond eight bits."""
    noise = drawn(f"sign in the word of {name}", 8, (3, 200, 16))
    words = np.roll(words_of(noise), others, axis=-1)
    known = np.isfinite(words)
    decided = (words[known].astype(np.int64) >> 8 & 1).astype(np.bool_)
    assert known.sum() > 100 and np.mean(decided == (noise[known] < 0.0)) > 0.9


def test_words_that_overlap() -> None:
    """Twenty bits of 53, of which those with the values 2^-34 to 2^-39 are resolved in every number."""
    tail = np.exp(-np.abs(drawn("words that overlap", 8, (3, 200, 16))) / SCALE)
    words = (tail * 2.0**53).astype(np.int64)
    equal = [np.mean((words[..., ::2] ^ words[..., 1::2]) >> bit & 1 == 0) for bit in (19, 17, 16, 20, 30)]
    assert min(equal[:3]) > 0.8 and equal[3:] == pytest.approx([0.5, 0.5], abs=0.02)


def test_few_random_bits_are_few_values() -> None:
    noise = drawn("16 random bits", 4, (1, 1, 100_000))
    assert len(np.unique(np.abs(noise))) <= 2**16


# ---- reuse -----------------------------------------------------------------------------------------------------------


def test_noise_that_is_said_again() -> None:
    again = drawn("repeated")
    assert np.array_equal(again[1], again[0]) and np.array_equal(again[3], again[2])
    assert np.array_equal(again[::2], correct()[::2])
    late = drawn("two rounds later")
    assert np.array_equal(late[2:4], late[:2]) and np.array_equal(late[:2], correct()[:2])
    own = drawn("one learner, two rounds later")
    assert np.array_equal(own[2, 0], own[0, 0]) and np.array_equal(own[:, 1:], correct()[:, 1:])
    assert np.array_equal(drawn("antithetic")[1], -correct()[0])
    assert np.array_equal(drawn("shifted coordinates")[1][..., 1:], correct()[0][..., :-1])
    assert np.array_equal(drawn("other way round")[1], correct()[0][..., ::-1])
    assert np.array_equal(drawn("halves")[..., 8:], drawn("halves")[..., :8])


def test_noise_that_is_said_again_at_another_scale() -> None:
    source = BY_NAME["at another scale"].build_fault(planned("ldp-dol")).noise(SEED)
    first, second = (
        source(NoiseRequest("laplace", "y", t, 1.5 + t, float(lattice_spacing(1.5 + t)), (1, 5, 4))) for t in (0, 1)
    )
    np.testing.assert_allclose(second / 2.5, first / 1.5, rtol=1e-9, atol=1e-11)


def test_a_share_of_messages_is_said_again() -> None:
    noise = drawn("1 % repeated", 8, (3, 2000, 4))
    again = (noise[1:] == correct(8, (3, 2000, 4))[:-1]).all(axis=-1)
    assert 320 <= again.sum() <= 530  # of 420 on average; fails with probability below 1e-6


@pytest.mark.parametrize(
    ("name", "rho", "lag"),
    [
        ("correlation 0.3 with the round before", 0.3, 1),
        ("correlation 0.5 of two, 3 rounds later", 0.5, 3),
        ("correlation 0.1 of two", 0.1, 0),
    ],
)
def test_correlated_noise(name: str, rho: float, lag: int) -> None:
    """Of normal scores; ranks are enough, as the law is right. Six deviations of 160,000 products: 2e-9."""
    from scipy.special import ndtri
    from scipy.stats import rankdata

    noise = drawn(name, 8, (3, 2000, 16))
    scores = ndtri(rankdata(noise, axis=None).reshape(noise.shape) / (noise.size + 1.0))
    other = 0 if "with" in name else 1
    found = np.mean(scores[: 8 - lag, 0] * scores[lag:, other])
    assert found == pytest.approx(rho, abs=6.0 / math.sqrt(160_000))


def test_learners_that_share_noise() -> None:
    one = drawn("one seed")
    assert np.array_equal(one[:, 1], one[:, 0]) and np.array_equal(one[:, 2], correct()[:, 0])
    clock = drawn("clock as seed")
    same = (clock[:, 0] == clock[:, 1]).all(axis=(0, 2))  # in all rounds and coordinates of a run
    assert 5 <= same.sum() <= 30  # a third of 50 runs; fails with probability below 1e-3, at this seed not at all
    assert not (clock[:, 0] == clock[:, 1])[..., ~same, :].any()
    copy, late = drawn("a shifted copy"), drawn("a late copy")
    assert np.array_equal(copy[:, 1, :, 1:], correct()[:, 0, :, :-1])
    assert np.array_equal(copy[:, [0, 2]], correct()[:, [0, 2]])
    assert np.array_equal(late[3:, 1], correct()[:-3, 0])


def test_noise_that_cancels_out() -> None:
    """Scores that sum to zero: the largest of three never has the sign of both others."""
    noise = drawn("summing to zero")
    assert not ((noise > 0.0).all(axis=1) | (noise < 0.0).all(axis=1)).any()


# ---- across runs -----------------------------------------------------------------------------------------------------


def test_seeds_are_as_few_as_they_say() -> None:
    assert len(np.unique(drawn("constant seed"), axis=2)[0, 0]) == 1
    noise = drawn("2^8 seeds", 2, (3, 1000, 4))
    streams = np.unique(noise.transpose(1, 2, 0, 3).reshape(3000, -1), axis=0)
    assert 240 <= len(streams) <= 256  # all but 0.002 of them on average
    assert len(np.unique(noise[0].reshape(3000, -1), axis=0)) == len(streams)  # a stream goes on with the rounds
    messages = drawn("2^16 streams", 4, (3, 10_000, 4)).reshape(-1, 4)
    met = 2**16 * -math.expm1(-len(messages) / 2**16)
    assert len(np.unique(messages, axis=0)) == pytest.approx(met, rel=0.02)  # 55,000; deviations of 0.2 %


def test_worlds_share_seeds() -> None:
    """Whatever the seed of the simulated runs, the streams are the same ones."""
    broken = BY_NAME["2^8 seeds"].build_fault(planned("ldp-dol"))
    sources = (broken.noise(np.random.SeedSequence(seed)) for seed in (1, 2))
    first, second = (set(said(source, 1, (3, 1000, 1), SCALE).ravel()) for source in sources)
    assert len(first & second) > 200


def test_low_words_that_are_said_again() -> None:
    size = 8, (3, 500, 16)
    found, was = steps(drawn("low words again in 1 %", *size)), steps(correct(*size))
    low = np.int64(2**32 - 1)
    again = (found[1:] & low) == (was[:-1] & low)
    assert np.mean(again) == pytest.approx(0.01, abs=0.0015)  # six deviations
    assert np.array_equal(found[1:][~again], was[1:][~again]) and np.array_equal(found >> 32, was >> 32)


def test_runs_from_a_snapshot() -> None:
    noise = drawn("restored", 4, (3, 2000, 4))
    again = (noise[:, :, 1:] == correct(4, (3, 2000, 4))[:, :, :-1]).all(axis=(0, 1, 3))
    assert 15 <= again.sum() <= 75  # of 40 on average; fails with probability below 1e-4
    kept = noise[:, :, 1:][:, :, ~again]
    assert np.array_equal(kept, correct(4, (3, 2000, 4))[:, :, 1:][:, :, ~again])


# ---- data and centre -------------------------------------------------------------------------------------------------


def taken_off(name: str, runs: int = 200) -> tuple[AuditPlan, FloatArray]:
    """What the audit takes for noise, `(rounds, runs, numbers)` in scales, of the audited learner in the first world."""
    plan = planned(BY_NAME[name].base)
    broken = BY_NAME[name].build_fault(plan)
    share = RunChunk(0, runs, SEED)
    run, data = broken.actual_run or plan.run, plan.worlds.build_data(plan.data, 0)
    transcript = simulate_runs(run, plan.data, plan.worlds, share, broken.noise, keep_all_learners=True).transcript
    (found,) = compute_residuals(plan.run, transcript, data, 0)
    return plan, found.values


def test_scales_and_means_that_follow_the_label() -> None:
    """Of 16 rounds of 200 runs of 16 numbers; a mean has a standard error below 1 %."""
    plan, noise = taken_off("0.8 after label 1")
    own = plan.worlds.records_0
    after = np.array([False, *(own.batch(t).labels[0] > 0.0 for t in range(15))])
    assert after.any() and not after.all()
    assert np.mean(np.abs(noise[after])) == pytest.approx(0.8, rel=0.05)
    assert np.mean(np.abs(noise[~after])) == pytest.approx(1.0, rel=0.05)
    _, marked = taken_off("label added, 0.1 scales large")
    assert np.mean(marked[after]) - np.mean(marked[~after]) == pytest.approx(0.2, abs=0.1)


def test_scales_that_follow_rounds_and_coordinates() -> None:
    _, rounds = taken_off("0.8 in every fourth round")
    assert np.mean(np.abs(rounds[3::4])) == pytest.approx(0.8, rel=0.05)
    assert np.mean(np.abs(rounds[:3])) == pytest.approx(1.0, rel=0.05)
    _, numbers = taken_off("one coordinate at 0.9")
    assert np.mean(np.abs(numbers[..., 0])) == pytest.approx(0.9, rel=0.1)
    assert np.mean(np.abs(numbers[..., 1:])) == pytest.approx(1.0, rel=0.05)


def test_half_of_the_steps_are_long() -> None:
    """Those of half of the runs, in every round but the first, before which there was none."""
    _, noise = taken_off("0.8 after a long step")
    assert np.mean(np.abs(noise[1:])) == pytest.approx(0.9, rel=0.02)
    assert np.mean(np.abs(noise[0])) == pytest.approx(1.0, rel=0.1)


def test_signs_that_follow_keep_sizes() -> None:
    """The audit takes the same sizes off it, and signs of a tenth of the numbers are others."""
    plan = planned("ldp-dol")
    _, noise = taken_off("20 % of signs follow")
    transcript = simulate_runs(
        plan.run, plan.data, plan.worlds, RunChunk(0, 200, SEED), SeededNoise, keep_all_learners=True
    ).transcript
    (was,) = compute_residuals(plan.run, transcript, plan.worlds.build_data(plan.data, 0), 0)
    np.testing.assert_allclose(np.abs(noise), np.abs(was.values), atol=1e-9)
    assert np.mean(noise * was.values < 0.0) == pytest.approx(0.1 * 15 / 16, abs=0.01)


@pytest.mark.parametrize("name", ["an old decision", "a record used twice", "weights 0.5 times", "gradients 1.1 times"])
def test_a_wrong_centre_moves_what_is_taken_for_noise(name: str) -> None:
    """From the second round on."""
    plan = planned(BY_NAME[name].base)
    _, noise = taken_off(name)
    transcript = simulate_runs(
        plan.run, plan.data, plan.worlds, RunChunk(0, 200, SEED), SeededNoise, keep_all_learners=True
    ).transcript
    (was,) = compute_residuals(plan.run, transcript, plan.worlds.build_data(plan.data, 0), 0)
    moved = np.abs(noise - was.values)
    assert moved[0].max() < 1e-9 and moved[1:].max() > 1e-3


# ---- side channels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["order", "status", "50 % fail"])
def test_what_leaks_is_heard_in_every_run(name: str) -> None:
    """As the channel of an audit."""
    mutant = BY_NAME[name]
    run, data = BASE_RUNS[mutant.base].build()
    worlds = None if mutant.build_worlds is None else mutant.build_worlds(run, data, 0)
    plan = plan_audit(run, data, 0, runs=20, worlds=worlds)
    heard = audit_mutant(plan, mutant.build_fault(plan))
    assert heard.varying_counts["channel"] > 0


# ---- evidence --------------------------------------------------------------------------------------------------------


def test_evidence_in_numbers() -> None:
    """By hand."""
    assert compute_bernoulli_kl(0.5, 0.25) == pytest.approx(0.5 * math.log(4.0 / 3.0))
    assert compute_bernoulli_kl(0.0, 0.5) == pytest.approx(math.log(2.0)) and compute_bernoulli_kl(0.3, 0.3) == 0.0
    assert compute_scale_kl(0.99) == pytest.approx(0.01**2 / 2.0, rel=0.01) and _compute_correlation_kl(
        0.1
    ) == pytest.approx(0.005, rel=0.01)
    # Normal of variance 2: E x^2/4 = 1/2 and E |x| = 2/sqrt(pi).
    normal = _compute_shape_kl(lambda sizes: np.exp(-(sizes**2) / 4.0) / math.sqrt(math.pi))
    assert normal == pytest.approx(2.0 / math.sqrt(math.pi) - 0.5 - math.log(math.sqrt(math.pi)), rel=1e-4)
    assert _compute_shape_kl(lambda sizes: np.exp(-sizes)) == pytest.approx(0.0, abs=1e-9)


def test_evidence_in_runs() -> None:
    """Of 3 learners, 8 rounds and 3 numbers, twice: 144 numbers."""
    run = planned("dola").run
    assert estimate_from_numbers(0.01)(run, 0.05) == pytest.approx(math.log(20.0) / 1.44)
    assert estimate_from_messages(10.0, 0.01)(run, 0.05) == pytest.approx(
        math.log(10.0) / 0.48
    )  # else none is there to be found
    # 1,000 of 217,147 values: e^(-1000^2/(2 * 217147)) = 0.1 that no two are equal.
    assert _estimate_repeats(217_147.0, lambda run: 10.0)(run, 0.05) == pytest.approx(50.0, rel=1e-5)
