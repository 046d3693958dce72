"""What the simulator gathers and draws ahead is what it would have gathered and drawn round by round."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from sottovoce import noise
from sottovoce.data import LearnerData, PlacedData
from sottovoce.losses.quadratic import Ridge
from sottovoce.noise import Draw, SeededNoise, grid
from sottovoce.running import simulator


def dealt(sizes: np.ndarray) -> PlacedData:
    """Records for `sizes (learners, rounds)`, drawn with repetition."""
    generator = np.random.default_rng(1)
    learners = []
    for mine in sizes:
        offsets = np.concatenate([[0], np.cumsum(mine)]).astype(np.int64)
        order = generator.integers(0, 7, offsets[-1])
        learners.append(LearnerData(generator.normal(size=(7, 3)), generator.normal(size=7), order, offsets))
    return PlacedData(tuple(learners), np.empty((0, 3)), np.empty(0))


LOSS = Ridge(feature_bound=9.0, label_bound=9.0)

SIZES = {
    "even": np.full((2, 9), 2),
    "one learner": np.full((1, 9), 1),
    "they run out": np.array([[1] * 5 + [0] * 4] * 2),
    "one runs out": np.array([[1] * 9, [1] * 5 + [0] * 4]),
    "ragged": np.random.default_rng(2).integers(0, 3, (3, 9)),
    "none at all": np.zeros((2, 9), np.int64),
}


@pytest.mark.parametrize("ahead", [1, 30, 10_000])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_every_round_has_its_records(sizes: np.ndarray, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "AHEAD", ahead)
    data = dealt(sizes)
    batches = list(simulator._batches(data, 9, LOSS))
    assert len(batches) == 9
    for t, batch in enumerate(batches):
        wanted = data.stacked(t)
        np.testing.assert_array_equal(batch.features, wanted.features)
        np.testing.assert_array_equal(batch.labels, wanted.labels)
        assert (batch.present is None) == (wanted.present is None)
        if wanted.present is not None:
            np.testing.assert_array_equal(batch.present, wanted.present)


@pytest.mark.parametrize("count", [7, noise.AHEAD // 4, noise.AHEAD // 4 + 1])
def test_small_and_large_draws_are_new_laplace_numbers(count: int) -> None:
    """Fails by chance with probability below 1e-6."""
    source, rounds = SeededNoise(3), 40_000 // count + 2
    drawn = [source(Draw("laplace", "y", t, 2.0, grid(2.0), (count,))) for t in range(rounds)]
    kept = [values.copy() for values in drawn]
    source(Draw("laplace", "y", rounds, 2.0, grid(2.0), (count,)))
    values = np.concatenate(drawn)
    assert (values == np.concatenate(kept)).all(), "a draw must not change an older one"
    assert len(np.unique(values)) == len(values)
    assert stats.kstest(values, stats.laplace(scale=2.0).cdf).pvalue > 1e-6
    assert (values / grid(2.0) == np.rint(values / grid(2.0))).all()


def test_every_learner_has_its_own_scale() -> None:
    scales = np.array([1.0, 100.0]).reshape(-1, 1, 1)
    drawn = SeededNoise(4)(Draw("laplace", "y", 0, scales, np.asarray(grid(scales)), (2, 50, 100)))
    np.testing.assert_allclose(np.abs(drawn).mean(axis=(1, 2)), [1.0, 100.0], rtol=0.1)  # ten standard errors
