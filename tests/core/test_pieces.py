"""What is made fast in conformance is what a plain computation gives: pieces of a block, words, regressors, memory used again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.bounds import AlphaAllocation
from sottovoce_core.auditing.conformance import block as blocks
from sottovoce_core.auditing.conformance.battery import CONFORMANCE_TESTS, Battery, examine_noise
from sottovoce_core.auditing.conformance.block import Block, ConformanceTest
from sottovoce_core.auditing.conformance.lattice import _count_bits, _count_bytes, _count_trailing_zeros
from sottovoce_core.auditing.conformance.regressors import _BlockNoise
from sottovoce_core.auditing.conformance.residuals import UNKNOWN_VALUES, Residuals, Schedule, compute_residuals
from sottovoce_core.auditing.worlds import Worlds
from sottovoce_core.auditing.worst_case_search import list_replacements
from sottovoce_core.noise import SeededNoise
from sottovoce_core.runs.transcript import Transcript
from tests.blocks import block_of, discrete_laplace, judged, odd_block
from tests.core.test_conformance import of_the_field, overheard
from tests.examples import made_up, small_run

# ---- pieces ----------------------------------------------------------------------------------------------------------


def edge_blocks() -> Iterator[Block]:
    """Odd shapes with and without noise, two scales, copies, and what float64 does not resolve."""
    rng = np.random.default_rng(0)
    for shape in ((1, 1, 1, 1), (2, 1, 3, 1), (3, 9, 1, 1), (3, 4, 1, 5), (2, 6, 7, 4)):
        steps = discrete_laplace(rng, shape)
        scale = 1.5 * 2.0 ** -np.arange(float(shape[1]))[None, :, None]
        copies = steps.copy()
        copies[:, :, -1] = copies[:, :, 0]
        yield block_of(steps, scale=scale, centre=12345)
        yield block_of(np.zeros_like(steps))
        yield block_of(copies)
        yield block_of(steps >> 9 << 9)
        yield block_of(steps, known=rng.random((*shape[:3], 1)) < 0.7, lost=3)
    yield from (odd_block(rng) for _ in range(12))


@pytest.mark.parametrize("kind", CONFORMANCE_TESTS)
def test_results_do_not_depend_on_pieces(kind: type[ConformanceTest], monkeypatch: pytest.MonkeyPatch) -> None:
    """One run of one learner at a time, or all at once."""
    found = []
    for numbers in (1, 2**30):
        monkeypatch.setattr(blocks, "_MAX_PIECE_NUMBERS", numbers)
        found.append([judged(kind, block) for block in edge_blocks()])
    for one, other in zip(*found, strict=True):
        assert list(one) == list(other)
        for name, test in one.items():
            assert test.statistic == pytest.approx(other[name].statistic, rel=1e-9, abs=1e-9, nan_ok=True), name
            assert test.p_value == pytest.approx(other[name].p_value, rel=1e-9), name


def test_pieces_are_all_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_MAX_PIECE_NUMBERS", 50)
    rng = np.random.default_rng(1)
    steps = discrete_laplace(rng, (3, 4, 7, 5))
    past: dict[str, FloatArray] = {"all": rng.random((3, 4, 7, 5)), "same in all runs": rng.random((3, 4, 1, 5))}
    block = block_of(steps, past=past)
    again = np.zeros_like(steps)
    for i, runs, piece in block.iterate_pieces():
        assert len(piece.values) == 1 and piece.runs <= 2
        assert np.shares_memory(piece.steps, block.steps)
        again[i : i + 1, :, runs] += piece.steps
    np.testing.assert_array_equal(again, steps)
    parts = [part for _, part in block.iterate_run_pieces()]
    np.testing.assert_array_equal(np.concatenate([part.steps for part in parts], axis=2), steps)
    np.testing.assert_array_equal(np.concatenate([part.past["all"] for part in parts], axis=2), past["all"])
    assert all((part.past["same in all runs"] == past["same in all runs"]).all() for part in parts)


# ---- words -----------------------------------------------------------------------------------------------------------


def test_bits_are_counted_as_one_by_one() -> None:
    rng = np.random.default_rng(2)
    words = np.concatenate([rng.integers(-(2**53), 2**53, 3000), rng.integers(-9, 9, 100), [0, -1, 2**52, -(2**52)]])
    counted = _count_bytes(words)
    for k, start in enumerate((0, 4, 8, 12, 16, 20, 24, 32)):
        expected = np.zeros(256, np.int64)
        for word in words.tolist():
            expected[word >> start & 255] += 1
        np.testing.assert_array_equal(counted[k], expected)
    plain = [(word if word >= 0 else -1 - word).bit_length() for word in words.tolist()]
    assert _count_bits(words).tolist() == plain
    assert _count_trailing_zeros(words).tolist() == [(w & -w).bit_length() - 1 if w else 64 for w in words.tolist()]


# ---- regressors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heard", [1.0, 0.7])
def test_what_is_the_same_in_all_runs_is_summed_as_if_it_were_not(heard: float) -> None:
    rng = np.random.default_rng(3)
    shape = (3, 5, 6, 4)
    noise = _BlockNoise(block_of(discrete_laplace(rng, shape), known=rng.random((*shape[:3], 1)) < heard))
    for same in (rng.normal(size=(3, 5, 1, 4)), np.arange(5.0)[None, :, None, None], np.full((1, 1, 1, 1), np.nan)):
        once, each = noise.sum_against(same), noise.sum_against(np.broadcast_to(same, shape).copy())
        np.testing.assert_allclose(once.signed, each.signed, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(once.square, each.square, rtol=1e-12, atol=1e-12)
        assert once.sized == pytest.approx(each.sized, abs=1e-9)
        assert once.largest == pytest.approx(each.largest)


@pytest.mark.parametrize("heard", [1.0, 0.7])
def test_all_learners_on_anothers_past_is_each_of_them_on_it(heard: float) -> None:
    rng = np.random.default_rng(4)
    shape = (3, 5, 6, 4)
    noise = _BlockNoise(block_of(discrete_laplace(rng, shape), known=rng.random((*shape[:3], 1)) < heard))
    values = rng.normal(size=shape) * 10.0 ** rng.integers(-2, 3, shape)
    for j, sums in enumerate(noise.sum_against_others(values)):
        one = noise.sum_against(np.broadcast_to(values[j : j + 1], (1, *shape[1:])))
        np.testing.assert_allclose(sums.signed[:, 0], one.signed.sum(axis=1), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(sums.square[:, 0], one.square.sum(axis=1), rtol=1e-9)


# ---- memory and schedules that are used again ------------------------------------------------------------------------


def full_of_rubbish(learner: int, field: str, shape: tuple[int, ...]) -> Residuals:
    rows: dict[str, Any] = {
        name: np.full(shape, 1, np.asarray(nothing).dtype) for name, nothing in UNKNOWN_VALUES.items()
    }
    rows["scale"], rows["grid"] = np.ones(shape[0]), np.ones(shape[0])
    return Residuals(learner, field, **rows)


@pytest.mark.parametrize("name", ["ldp-dol", "dpsda-c", "pd-ftgl", "dpps", "dpsr"])
def test_residuals_fill_memory_whatever_was_in_it(name: str) -> None:
    """Rounds without noise, a message that nobody heard, and a schedule that another replay found out, too."""
    run, data = of_the_field(name)
    transcript = overheard(run, data, SeededNoise(0), replicas=3)
    fields = {field: values.copy() for field, values in transcript.fields.items()}
    for values in fields.values():
        values[7, 0] = np.nan
    schedule: Schedule = {}
    for part in (transcript, Transcript(fields)):
        for i in range(run.spec.n_learners):
            room = {
                field: full_of_rubbish(i, field, (part.rounds, 3, values.shape[-1])) for field, values in fields.items()
            }
            new = compute_residuals(run, part, data, i, keep_past=True)
            used = compute_residuals(run, part, data, i, keep_past=True, buffers=room, schedule=schedule)
            assert [each.field for each in used] == [each.field for each in new]
            for one, other in zip(used, new, strict=True):
                for row in UNKNOWN_VALUES:
                    mine, its = getattr(one, row), getattr(other, row)
                    np.testing.assert_array_equal(mine, np.broadcast_to(its.T, mine.T.shape).T, err_msg=row)
                assert one.past.keys() == other.past.keys()
                for what, values in one.past.items():
                    np.testing.assert_array_equal(values, other.past[what], err_msg=what)


def test_shares_of_an_audit_come_to_what_one_comes_to() -> None:
    """Three shares that know how much of all runs they are, and all runs at once."""
    run = small_run(rounds=8, learners=3, n_features=4)
    data = made_up(run.spec, 4)
    said = overheard(run, data, SeededNoise(9), replicas=30).fields["y"]
    worlds = Worlds(0, data.learners[0], list_replacements(data, 0)[0][0], "")

    def of(runs: slice, share: float) -> Battery:
        return examine_noise(run, data, worlds, 0, Transcript({"y": said[:, :, runs]}), 30, share)

    whole = of(slice(None), 1.0)
    merged = of(slice(0, 10), 1 / 3)
    for k in (10, 20):
        merged.merge(of(slice(k, k + 10), 1 / 3))
    assert merged.noise_count == whole.noise_count
    by_name = {test.name: test for test in merged.compute_tests(AlphaAllocation(0.01))}
    for test in whole.compute_tests(AlphaAllocation(0.01)):
        if not test.name.endswith("runs"):  # which meet within a share
            assert by_name[test.name].p_value == pytest.approx(test.p_value, rel=1e-3), test.name
