"""What the simulator gathers and draws ahead is what it would have gathered and drawn round by round, replica by replica."""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats
from threadpoolctl import threadpool_info, threadpool_limits

from sottovoce_core.api import simulate
from sottovoce_core.arrays import FloatArray
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.experiment import Experiment
from sottovoce_core.losses.linear import RidgeLoss
from sottovoce_core.noise import Distribution, NoiseRequest, Recorder, SeededNoise, lattice_spacing, simulation
from sottovoce_core.runs import simulator
from sottovoce_core.runs.run import build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.spec import parse_spec
from tests.examples import made_up


def dealt(sizes: np.ndarray) -> PlacedData:
    """Records for `sizes (learners, rounds)`, drawn with repetition."""
    generator = np.random.default_rng(1)
    learners = []
    for mine in sizes:
        offsets = np.concatenate([[0], np.cumsum(mine)]).astype(np.int64)
        order = generator.integers(0, 7, offsets[-1])
        learners.append(LearnerData(generator.normal(size=(7, 3)), generator.normal(size=7), order, offsets))
    return PlacedData(tuple(learners), np.empty((0, 3)), np.empty(0))


LOSS = RidgeLoss(feature_bound=9.0, label_bound=9.0)

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
    monkeypatch.setattr(simulator, "MAX_GATHERED_ELEMENTS", ahead)
    data = dealt(sizes)
    batches = list(simulator._iterate_batches(data, 9, LOSS))
    assert len(batches) == 9
    for t, batch in enumerate(batches):
        wanted = data.stack_round(t)
        np.testing.assert_array_equal(batch.features, wanted.features)
        np.testing.assert_array_equal(batch.labels, wanted.labels)
        assert (batch.mask is None) == (wanted.mask is None)
        if wanted.mask is not None:
            np.testing.assert_array_equal(batch.mask, wanted.mask)


@pytest.mark.parametrize(
    "count",
    [7, simulation.MIN_BLOCK_NUMBERS // 2, simulation.MIN_BLOCK_NUMBERS // 2 + 1, simulation.MIN_BLOCK_NUMBERS + 1],
)
def test_small_and_large_draws_are_new_laplace_numbers(count: int) -> None:
    """Fails by chance with probability below 1e-6."""
    source, rounds = SeededNoise(3), 40_000 // count + 2
    drawn = [source(NoiseRequest("laplace", "y", t, 2.0, lattice_spacing(2.0), (count,))) for t in range(rounds)]
    kept = [values.copy() for values in drawn]
    source(NoiseRequest("laplace", "y", rounds, 2.0, lattice_spacing(2.0), (count,)))
    values = np.concatenate(drawn)
    assert (values == np.concatenate(kept)).all(), "a draw must not change an older one"
    assert len(np.unique(values)) == len(values)
    assert stats.kstest(values, stats.laplace(scale=2.0).cdf).pvalue > 1e-6
    assert (values / lattice_spacing(2.0) == np.rint(values / lattice_spacing(2.0))).all()


def test_every_learner_has_its_own_scale() -> None:
    scales = np.array([1.0, 100.0]).reshape(-1, 1, 1)
    drawn = SeededNoise(4)(NoiseRequest("laplace", "y", 0, scales, np.asarray(lattice_spacing(scales)), (2, 50, 100)))
    np.testing.assert_allclose(np.abs(drawn).mean(axis=(1, 2)), [1.0, 100.0], rtol=0.1)  # ten standard errors


# ---- replicas --------------------------------------------------------------------------------------------------------

FIELD: dict[str, Any] = yaml.safe_load(
    resources.files("sottovoce_client.runs").joinpath("builtin_algorithms.yaml").read_text("utf-8")
)


@pytest.mark.parametrize("changes", FIELD["runs"], ids=lambda run: str(run["name"]))
def test_a_replica_is_the_same_beside_any_number_of_others(changes: dict[str, Any]) -> None:
    """Its noise to the last bit; what comes of it up to rounding, for a product of larger matrices may sum in another order."""
    rounds = min(60, changes.get("rounds", 60))
    spec = parse_spec({**FIELD["common"], **changes, "rounds": rounds}, allow_imports=True)
    run, data = build_run(spec, 6), made_up(spec, 6)

    def of(replicas: int) -> tuple[dict[str, list[FloatArray]], FloatArray, dict[str, FloatArray]]:
        noise = Recorder(SeededNoise(1))
        steps = list(simulate_rounds(run, data, noise, replicas))
        said = {name: np.stack([step.message[name] for step in steps]) for name in steps[0].message.fields}
        return noise.noise_by_field, np.stack([step.decisions_after for step in steps]), said

    drawn, after, said = of(11)
    for fewer in (1, 2, 10):
        own_drawn, own_after, own_said = of(fewer)
        assert own_drawn.keys() == drawn.keys()
        for name, own in own_drawn.items():
            np.testing.assert_array_equal(own, np.stack(drawn[name])[:, :, :fewer])
        np.testing.assert_allclose(own_after, after[:, :, :fewer], rtol=1e-9, atol=1e-9)
        for name, values in own_said.items():
            np.testing.assert_allclose(values, said[name][:, :, :fewer], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ahead", [1, 50, 10_000])
@pytest.mark.parametrize("law", ["laplace", "gaussian", "spherical"])
def test_seeded_noise_is_the_same_for_any_number_of_replicas(
    law: Distribution, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two fields with vectors of two lengths, drawn in turns."""
    monkeypatch.setattr(simulation, "MIN_BLOCK_NUMBERS", ahead)

    def of(replicas: int) -> list[FloatArray]:
        source, lattice = SeededNoise(2), None if law == "spherical" else lattice_spacing(2.0)
        shapes = [(3, replicas, 4), (3, replicas, 7)] * 40
        return [source(NoiseRequest(law, "y", t, 2.0, lattice, shape)) for t, shape in enumerate(shapes)]

    wanted = of(9)
    for replicas in (1, 2, 4):
        for values, all_values in zip(of(replicas), wanted, strict=True):
            np.testing.assert_array_equal(values, all_values[:, :replicas])
    numbers = np.concatenate([values.ravel() for values in wanted])
    assert len(np.unique(numbers)) == len(numbers), "each number is used once"


def test_seeded_noise_of_one_learner_has_replicas_first() -> None:
    """As arrays of a learner that is driven alone have; and replica 0 stands for itself."""

    def drawn(shape: tuple[int, ...]) -> FloatArray:
        return SeededNoise(2)(NoiseRequest("laplace", "y", 0, 2.0, lattice_spacing(2.0), shape))

    np.testing.assert_array_equal(drawn((5, 4)), drawn((1, 5, 4))[0])
    np.testing.assert_array_equal(drawn((4,)), drawn((5, 4))[0])


def test_children_of_a_seed_are_no_replicas() -> None:
    """Whoever seeds something else with a child of the same seed shares no numbers with a replica."""
    seed = np.random.SeedSequence(2)
    own = SeededNoise(seed)(NoiseRequest("gaussian", "y", 0, 1.0, None, (2, 3, 4)))
    others = [np.random.Generator(np.random.SFC64(child)).standard_normal(8) for child in seed.spawn(4)]
    assert not np.isin(own, np.concatenate(others)).any()


@pytest.mark.parametrize(("variable", "threads"), [(None, 1), ("OPENBLAS_NUM_THREADS", 2)])
def test_a_simulation_computes_with_one_thread_unless_the_user_has_set_a_number(
    variable: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "2")

    def count_threads(_: object = None) -> set[int]:
        return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}

    found: list[set[int]] = []
    with threadpool_limits(2, user_api="blas"):
        simulate(Experiment(rounds=2, algorithm="ldp-dol"), progress=lambda step: found.append(count_threads()))
        assert found == [{threads}] * 2
        assert count_threads() == {2}
