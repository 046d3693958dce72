"""Conformance: one transcript shows a learner whose noise is not what it says; a correct one passes.

Seeds are fixed. Tests that a correct learner passes fail with probability at most the alpha they name; those that a broken
one is caught with probability below 1e-6.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.bounds import AlphaAllocation, Test
from sottovoce_core.auditing.conformance.battery import examine_noise
from sottovoce_core.auditing.conformance.residuals import compute_residuals, convert_to_laplace
from sottovoce_core.auditing.worlds import Worlds
from sottovoce_core.auditing.worst_case_search import list_replacements
from sottovoce_core.data import PlacedData
from sottovoce_core.noise import NoiseRequest, NoiseSource, Recorder, SeededNoise
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.spec import parse_spec
from tests.examples import made_up, small_run

FIELD: dict[str, Any] = yaml.safe_load(
    resources.files("sottovoce_client.runs").joinpath("builtin_algorithms.yaml").read_text("utf-8")
)


LEVELS = AlphaAllocation(0.01)


def conformance(run: Run, transcript: Transcript, data: PlacedData) -> tuple[Test, ...]:
    """All tests of all learners' noise, each with its level; none if no message carries any."""
    worlds = Worlds(0, data.learners[0], list_replacements(data, 0)[0][0], "")
    return examine_noise(run, data, worlds, 0, transcript, transcript.replicas).compute_tests(LEVELS)


def rejected(tests: Iterable[Test]) -> tuple[Test, ...]:
    """The tests that fail: any at all for correct learners with probability at most 0.01."""
    return tuple(test for test in tests if test.is_significant)


def overheard(run: Run, data: PlacedData, noise: NoiseSource, replicas: int = 1) -> Transcript:
    return Transcript.from_rounds(step.message for step in simulate_rounds(run, data, noise, replicas))


def of_the_field(name: str) -> tuple[Run, PlacedData]:
    """An algorithm of `builtin_algorithms.yaml` in few rounds, with five leaves for those that have trees."""
    changes = next(run for run in FIELD["runs"] if run["name"] == name)
    if "block_length" in changes["algorithm"]:
        changes = {**changes, "algorithm": {**changes["algorithm"], "block_length": 8}}
    spec = parse_spec({**FIELD["common"], **changes, "rounds": min(50, changes.get("rounds", 50))}, allow_imports=True)
    return build_run(spec, 6), made_up(spec, 6, batch=2)


def names(tests: tuple[Test, ...]) -> set[str]:
    return {test.name for test in tests}


# ---- residuals -------------------------------------------------------------------------------------------------------


def test_residuals_are_the_noise_that_was_drawn() -> None:
    run = small_run(rounds=12)
    data, recorder = made_up(run.spec), Recorder(SeededNoise(0))
    transcript = overheard(run, data, recorder, replicas=4)
    for learner in range(3):
        (found,) = compute_residuals(run, transcript, data, learner)
        scale = np.array([run.algorithm.noise_scale(learner, t) for t in range(12)])
        drawn = np.stack(recorder.noise_by_field["y"])[:, learner]

        assert (found.learner, found.field) == (learner, "y")
        np.testing.assert_allclose(found.values, drawn / scale[:, None, None], atol=2.0**-38)
        np.testing.assert_array_equal(found.scale, scale)
        assert not found.is_off_lattice.any() and not found.lost_bits.any()
        assert np.abs(found.steps - drawn / found.grid[:, None, None]).max() <= 1


def test_only_perturbed_coordinates_have_residuals() -> None:
    """Dual averaging of split parameters: a learner perturbs its own block, and nothing in round 0."""
    run, data = of_the_field("dpsda-c")
    transcript = overheard(run, data, SeededNoise(0))
    blocks = [np.isfinite(compute_residuals(run, transcript, data, i)[0].values[:, 0]) for i in range(5)]

    assert not np.any([block[0] for block in blocks])
    np.testing.assert_array_equal(np.sum([block[1:] for block in blocks], axis=0), 1)


@pytest.mark.parametrize("times", [1e2, 1e4, 3e5, 1e7])
@pytest.mark.parametrize("name", ["dpsda-c", "dpsda-ps", "dpps"])
def test_noise_far_below_what_stands_beside_it_is_not_accused(name: str, times: float) -> None:
    """Dual averaging adds it to what others said: where that is large, the sum has lost low bits of it, however small it is."""
    changes = next(run for run in FIELD["runs"] if run["name"] == name)
    algorithm = {**changes["algorithm"], "epsilon": changes["algorithm"]["epsilon"] * times}
    graphs = {"sequence": {"kind": "random", "probability": 0.5, "seed": 1, "directed": name != "dpsda-c"}}
    topology = {**graphs, "weights": "metropolis" if name == "dpsda-c" else "out_degree"}
    document = {**FIELD["common"], **changes, "algorithm": algorithm, "topology": topology, "learners": 3, "rounds": 8}
    spec = parse_spec(document, allow_imports=True)
    run, data = build_run(spec, 20), made_up(spec, 20)
    assert not rejected(conformance(run, overheard(run, data, SeededNoise(0), replicas=20), data))


@pytest.mark.parametrize("name", ["d-ogd", "pd-ftgl-published", "admm", "dvp"])
def test_messages_without_noise_of_their_own_are_not_tested(name: str) -> None:
    run, data = of_the_field(name)
    transcript = overheard(run, data, SeededNoise(0))
    assert compute_residuals(run, transcript, data, 0) == ()
    assert conformance(run, transcript, data) == ()


def test_what_follows_from_a_message_that_nobody_heard_is_left_out() -> None:
    run = small_run(rounds=30, learners=4, topology={"graph": "path"})
    data = made_up(run.spec)
    said = overheard(run, data, SeededNoise(3)).fields["y"].copy()
    said[10, 0] = np.nan
    transcript = Transcript({"y": said})
    known = [np.isfinite(compute_residuals(run, transcript, data, i)[0].values[:, 0, 0]) for i in range(4)]

    assert [int(each.sum()) for each in known] == [10, 11, 30, 30]
    assert rejected(conformance(run, transcript, data)) == ()
    said[0] = np.nan
    assert compute_residuals(run, Transcript({"y": said}), data, 0) == ()
    assert conformance(run, Transcript({"y": said}), data) == ()


@pytest.mark.parametrize("law", ["laplace", "gaussian", "spherical"])
def test_noise_of_every_law_becomes_independent_laplace_numbers(law: Any) -> None:
    """2,000 vectors; each of the p-values is below 1e-4 with probability 1e-4."""
    generator, source = np.random.default_rng(5), SeededNoise(5)
    drawn = {
        "laplace": generator.laplace(size=(2000, 4)),
        "gaussian": generator.normal(size=(2000, 4)),
        "spherical": source(NoiseRequest("spherical", "y", 0, 1.0, None, (2000, 4))),
    }[law]
    values = convert_to_laplace(law, drawn)

    assert (np.sign(values) == np.sign(drawn)).all()
    for k in range(4):
        assert stats.kstest(values[:, k], "laplace").pvalue > 1e-4
        for other in range(k):
            assert stats.spearmanr(np.abs(values[:, k]), np.abs(values[:, other])).pvalue > 1e-4


# ---- correct learners ------------------------------------------------------------------------------------------------


@pytest.mark.statistics
@pytest.mark.parametrize("name", ["ldp-dol", "dsgd", "dola", "dpsr", "dpsda-c", "dpsda-ps", "pd-ftgl", "pd-ocg", "pvp"])
def test_correct_algorithms_pass_and_half_their_noise_does_not(name: str) -> None:
    run, data = of_the_field(name)
    assert rejected(conformance(run, overheard(run, data, SeededNoise(1), replicas=20), data)) == ()
    broken = rejected(conformance(run, overheard(run, data, Broken(SeededNoise(1), half), replicas=20), data))
    assert "scale" in names(broken)


@pytest.mark.statistics
def test_false_alarms_are_as_rare_as_stated() -> None:
    """300 runs. More than 9 alarms at alpha = 0.01 have probability 1e-3; no test's p-values lean to the small ones."""
    run = small_run(rounds=20, learners=2, n_features=5)
    data = made_up(run.spec, 5)
    said = overheard(run, data, SeededNoise(7), replicas=300).fields["y"]
    audits = [conformance(run, Transcript({"y": said[:, :, k : k + 1]}), data) for k in range(300)]

    assert sum(bool(rejected(tests)) for tests in audits) <= 9
    found: dict[str, list[float]] = {}
    for test in itertools.chain(*audits):
        found.setdefault(test.name, []).append(test.p_value)
    for name, p_values in found.items():
        for level in (0.01, 0.05, 0.2):
            count = int(np.count_nonzero(np.array(p_values) <= level))
            assert stats.binom.sf(count - 1, len(p_values), level) > 1e-4, name


# ---- broken learners -------------------------------------------------------------------------------------------------


Change = Callable[["Broken", NoiseRequest, FloatArray], FloatArray]


@dataclass
class Broken:
    """Noise of another source, changed."""

    source: SeededNoise
    change: Change
    said: list[FloatArray] = field(default_factory=list)
    standard: FloatArray = field(default_factory=lambda: np.empty(0))
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(99))

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        self.said.append(self.change(self, draw, self.source(draw)))
        return self.said[-1]


def half(self: Broken, draw: NoiseRequest, drawn: FloatArray) -> FloatArray:
    return draw.round_to_lattice(0.5 * drawn)


def nine_tenths(self: Broken, draw: NoiseRequest, drawn: FloatArray) -> FloatArray:
    return draw.round_to_lattice(0.9 * drawn)


def a_little_less(self: Broken, draw: NoiseRequest, drawn: FloatArray) -> FloatArray:
    return draw.round_to_lattice(0.97 * drawn)


def from_the_round_before(self: Broken, draw: NoiseRequest, drawn: FloatArray) -> FloatArray:
    return self.said[-1] if draw.round % 2 else drawn


def from_long_ago(self: Broken, draw: NoiseRequest, drawn: FloatArray) -> FloatArray:
    return self.said[5] if draw.round == 30 else drawn


def in_other_scales(self: Broken, draw: NoiseRequest, drawn: FloatArray) -> FloatArray:
    """A generator that starts anew in every other round, as one with a constant seed does."""
    if not draw.round % 2:
        self.standard = drawn / draw.scale
        return drawn
    return draw.round_to_lattice(self.standard * draw.scale)


def half_of_it_stays(self: Broken, draw: NoiseRequest, drawn: FloatArray) -> FloatArray:
    """Correlated, but never equal."""
    return draw.round_to_lattice(0.6 * self.said[-1] + 0.8 * drawn) if draw.round else drawn


def not_in_one_round(self: Broken, draw: NoiseRequest, drawn: FloatArray) -> FloatArray:
    return np.zeros_like(drawn) if draw.round == 17 else drawn


def little_in_one_round(self: Broken, draw: NoiseRequest, drawn: FloatArray) -> FloatArray:
    return draw.round_to_lattice(0.01 * drawn) if draw.round == 17 else drawn


def in_the_first_round_only(self: Broken, draw: NoiseRequest, drawn: FloatArray) -> FloatArray:
    return np.zeros_like(drawn) if draw.round else drawn


def not_on_one_coordinate(self: Broken, draw: NoiseRequest, drawn: FloatArray) -> FloatArray:
    return np.where(np.arange(drawn.shape[-1]) == 3, 0.0, drawn)


def little_on_one_coordinate(self: Broken, draw: NoiseRequest, drawn: FloatArray) -> FloatArray:
    return np.where(np.arange(drawn.shape[-1]) == 3, draw.round_to_lattice(0.3 * drawn), drawn)


def normal(self: Broken, draw: NoiseRequest, drawn: FloatArray) -> FloatArray:
    """Of the same variance."""
    return draw.round_to_lattice(self.generator.normal(size=drawn.shape) * draw.scale * np.sqrt(2.0))


def raw_doubles(self: Broken, draw: NoiseRequest, drawn: FloatArray) -> FloatArray:
    return self.generator.laplace(size=drawn.shape) * draw.scale


def the_same_for_all_learners(self: Broken, draw: NoiseRequest, drawn: FloatArray) -> FloatArray:
    return np.broadcast_to(drawn[:1], drawn.shape).copy()


def alike_for_all_learners(self: Broken, draw: NoiseRequest, drawn: FloatArray) -> FloatArray:
    return draw.round_to_lattice(0.6 * drawn[:1] + 0.8 * drawn)


def one_number(self: Broken, draw: NoiseRequest, drawn: FloatArray) -> FloatArray:
    return np.broadcast_to(drawn[..., :1], drawn.shape).copy()


def running_sums(self: Broken, draw: NoiseRequest, drawn: FloatArray) -> FloatArray:
    return draw.round_to_lattice(0.6 * np.roll(drawn, 1, axis=-1) + 0.8 * drawn)


def mostly_positive(self: Broken, draw: NoiseRequest, drawn: FloatArray) -> FloatArray:
    flipped: FloatArray = np.where(self.generator.random(drawn.shape) < 0.5, np.abs(drawn), drawn)
    return flipped


@pytest.mark.statistics
@pytest.mark.parametrize(
    ("change", "replicas", "caught"),
    [
        (half, 1, {"marginal"}),
        (nine_tenths, 20, {"marginal"}),
        (from_the_round_before, 1, {"dependence", "freshness"}),
        (from_long_ago, 1, {"freshness"}),
        (in_other_scales, 1, {"dependence", "freshness"}),
        (half_of_it_stays, 1, {"dependence"}),
        (not_in_one_round, 1, {"marginal"}),
        (little_in_one_round, 1, {"marginal"}),
        (in_the_first_round_only, 1, {"marginal"}),
        (not_on_one_coordinate, 1, {"marginal"}),
        (little_on_one_coordinate, 1, {"marginal"}),
        (normal, 30, {"marginal"}),
        (raw_doubles, 1, {"lattice"}),
        (the_same_for_all_learners, 1, {"dependence", "freshness"}),
        (alike_for_all_learners, 1, {"dependence"}),
        (one_number, 1, {"dependence"}),
        (running_sums, 1, {"dependence"}),
        (mostly_positive, 1, {"marginal"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("dim", [10, 100])
def test_broken_noise_is_caught(change: Change, replicas: int, caught: set[str], dim: int) -> None:
    """From one transcript of 50 rounds; a scale that is a tenth too small and Gaussian noise from 20 and 30."""
    run = small_run(rounds=50, n_features=dim)
    data = made_up(run.spec, dim)
    transcript = overheard(run, data, Broken(SeededNoise(2), change), replicas)

    assert caught <= {str(test.part) for test in rejected(conformance(run, transcript, data))}


def test_a_test_says_where_it_failed() -> None:
    run = small_run(rounds=50, n_features=10)
    data = made_up(run.spec, 10)
    said = overheard(run, data, SeededNoise(2)).fields["y"].copy()
    said[17, 1] += 50.0 * run.algorithm.noise_scale(1, 17)  # nobody hears the noise alone: the message says it
    (worst, *_) = sorted(conformance(run, Transcript({"y": said}), data), key=lambda test: test.p_value)
    assert "learner-1," in worst.location and "round 17" in " ".join(
        test.location for test in rejected(conformance(run, Transcript({"y": said}), data))
    )


def test_the_least_bug_is_not_seen_and_the_same_bug_is_in_more_runs() -> None:
    """What one transcript of ten coordinates cannot tell is not claimed to be told."""
    run = small_run(rounds=50, n_features=10)
    data = made_up(run.spec, 10)
    found = [
        names(rejected(conformance(run, overheard(run, data, Broken(SeededNoise(2), a_little_less), n), data)))
        for n in (1, 30)
    ]
    assert found[0] == set()
    assert "scale" in found[1]
