"""Conformance: one transcript shows a learner whose noise is not what it says; a correct one passes.

Seeds are fixed. Tests that a correct learner passes fail with probability at most the alpha they name; those that a broken
one is caught with probability below 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from sottovoce.arrays import FloatArray
from sottovoce.auditing.conformance import Residuals, as_laplace, examine, residuals
from sottovoce.auditing.levels import Test
from sottovoce.data import PlacedData
from sottovoce.noise import Draw, KeyedNoise, Noise, Recorder, SeededNoise
from sottovoce.running.run import Run, build_run
from sottovoce.running.simulator import simulate
from sottovoce.running.transcript import Transcript
from sottovoce.spec import parse_spec
from tests.examples import made_up, small_run

FIELD: dict[str, Any] = yaml.safe_load(
    resources.files("sottovoce_client.running").joinpath("field.yaml").read_text("utf-8")
)


def conformance(run: Run, transcript: Transcript, data: PlacedData, learner: int) -> tuple[Test, ...]:
    """All tests of one learner's noise; none if its messages carry none.

    Args:
        run: the run that was overheard.
        transcript: what all learners said. Replicas are independent runs.
        data: what they learned.
        learner: whose noise is tested.
    """
    others = [residuals(run, transcript, data, j) for j in range(run.spec.n_learners) if j != learner]
    return examine(residuals(run, transcript, data, learner), others)


def rejected(tests: Iterable[Test], alpha: float) -> tuple[Test, ...]:
    """The tests that fail together, smallest p-value first: Holm's procedure.

    Whatever the tests' dependence, none of them fails for a correct learner but with probability `alpha`.
    """
    ordered = sorted(tests, key=lambda test: test.p_value)
    for k, test in enumerate(ordered):
        if test.p_value > alpha / (len(ordered) - k):
            return tuple(ordered[:k])
    return tuple(ordered)


def overheard(run: Run, data: PlacedData, noise: Noise, replicas: int = 1) -> Transcript:
    return Transcript.of(step.message for step in simulate(run, data, noise, replicas))


def of_the_field(name: str) -> tuple[Run, PlacedData]:
    """An algorithm of `field.yaml` in few rounds, with five leaves for those that have trees."""
    changes = next(run for run in FIELD["runs"] if run["name"] == name)
    if "block_length" in changes["algorithm"]:
        changes = {**changes, "algorithm": {**changes["algorithm"], "block_length": 8}}
    spec = parse_spec({**FIELD["common"], **changes, "rounds": min(50, changes.get("rounds", 50))})
    return build_run(spec, 6), made_up(spec, 6, batch=2)


def names(tests: tuple[Test, ...]) -> set[str]:
    return {test.name for test in tests}


# ---- residuals -------------------------------------------------------------------------------------------------------


def test_residuals_are_the_noise_that_was_drawn() -> None:
    run = small_run(rounds=12)
    data, recorder = made_up(run.spec), Recorder(SeededNoise(0))
    transcript = overheard(run, data, recorder, replicas=4)
    for learner in range(3):
        (found,) = residuals(run, transcript, data, learner)
        scale = np.array([run.algorithm.noise_scale(learner, t) for t in range(12)])
        drawn = np.stack(recorder.drawn["y"])[:, learner] / scale[:, None, None]

        assert (found.learner, found.field) == (learner, "y")
        np.testing.assert_allclose(found.values, drawn, atol=2.0**-38)
        np.testing.assert_array_equal(found.scale, scale)
        assert np.nanmax(found.off_lattice) < 1e-3


def test_only_perturbed_coordinates_have_residuals() -> None:
    """Dual averaging of split parameters: a learner perturbs its own block, and nothing in round 0."""
    run, data = of_the_field("dpsda-c")
    transcript = overheard(run, data, SeededNoise(0))
    blocks = [np.isfinite(residuals(run, transcript, data, i)[0].values[:, 0]) for i in range(5)]

    assert not np.any([block[0] for block in blocks])
    np.testing.assert_array_equal(np.sum([block[1:] for block in blocks], axis=0), 1)


@pytest.mark.parametrize("name", ["d-ogd", "pd-ftgl-published", "admm", "dvp"])
def test_messages_without_noise_of_their_own_are_not_tested(name: str) -> None:
    run, data = of_the_field(name)
    transcript = overheard(run, data, SeededNoise(0))
    assert residuals(run, transcript, data, 0) == ()
    assert conformance(run, transcript, data, 0) == ()


def test_what_follows_from_a_message_that_nobody_heard_is_left_out() -> None:
    run = small_run(rounds=30, learners=4, topology={"graph": "path"})
    data = made_up(run.spec)
    said = overheard(run, data, SeededNoise(3)).fields["y"].copy()
    said[10, 0] = np.nan
    transcript = Transcript({"y": said})
    known = [np.isfinite(residuals(run, transcript, data, i)[0].values[:, 0, 0]) for i in range(4)]

    assert [int(each.sum()) for each in known] == [10, 11, 30, 30]
    assert rejected(conformance(run, transcript, data, 0), 0.01) == ()
    said[0] = np.nan
    assert residuals(run, Transcript({"y": said}), data, 0) == ()
    assert conformance(run, Transcript({"y": said}), data, 0) == ()


@pytest.mark.parametrize("law", ["laplace", "gaussian", "spherical"])
def test_noise_of_every_law_becomes_independent_laplace_numbers(law: Any) -> None:
    """2,000 vectors; each of the p-values is below 1e-4 with probability 1e-4."""
    generator, source = np.random.default_rng(5), SeededNoise(5)
    drawn = {
        "laplace": generator.laplace(size=(2000, 4)),
        "gaussian": generator.normal(size=(2000, 4)),
        "spherical": source(Draw("spherical", "y", 0, 1.0, None, (2000, 4))),
    }[law]
    values = as_laplace(law, drawn)

    assert (np.sign(values) == np.sign(drawn)).all()
    for k in range(4):
        assert stats.kstest(values[:, k], "laplace").pvalue > 1e-4
        for other in range(k):
            assert stats.spearmanr(np.abs(values[:, k]), np.abs(values[:, other])).pvalue > 1e-4


# ---- correct learners ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ldp-dol", "dsgd", "dola", "dpsr", "dpsda-c", "dpsda-ps", "pd-ftgl", "pd-ocg", "pvp"])
def test_correct_algorithms_pass_and_half_their_noise_does_not(name: str) -> None:
    """At alpha = 0.01 for five learners together."""
    run, data = of_the_field(name)
    transcript = overheard(run, data, SeededNoise(1), replicas=20)
    broken = overheard(run, data, Broken(SeededNoise(1), half), replicas=20)
    found = [residuals(run, transcript, data, i) for i in range(5)]
    for learner in range(5):
        others = found[:learner] + found[learner + 1 :]
        assert rejected(examine(found[learner], others), 0.01 / 5) == ()
        assert "coordinate scale" in names(rejected(examine(residuals(run, broken, data, learner), []), 1e-6))


def test_false_alarms_are_as_rare_as_stated() -> None:
    """300 runs. More than 9 alarms at alpha = 0.01 have probability 1e-3; no test's p-values lean to the small ones."""
    run = small_run(rounds=20, learners=2, n_features=5)
    data = made_up(run.spec, 5)
    transcript = overheard(run, data, SeededNoise(7), replicas=300)
    own, other = (residuals(run, transcript, data, i) for i in range(2))
    audits = [examine(one(own, k), [one(other, k)]) for k in range(300)]

    assert sum(bool(rejected(tests, 0.01)) for tests in audits) <= 9
    for tests in zip(*audits, strict=True):
        p_values = np.array([test.p_value for test in tests])
        for level in (0.01, 0.05, 0.2):
            count = int(np.count_nonzero(p_values <= level))
            assert stats.binom.sf(count - 1, 300, level) > 1e-4, tests[0].name
        if tests[0].name in {"tails", "law", "scale"}:
            assert stats.kstest(p_values, "uniform").pvalue > 1e-4


def test_the_sampler_of_deployed_learners_passes() -> None:
    """Its bytes come from a key, so that the numbers are the same in every test; alpha = 0.01."""
    found = []
    for learner in range(3):
        source = KeyedNoise("a secret", "a run", learner)
        values = np.stack([source(Draw("laplace", "y", t, 1.0, 2.0**-40, (4, 25))) for t in range(50)])
        off_lattice = np.abs(values * 2.0**40 - np.rint(values * 2.0**40))
        found.append((Residuals(learner, "y", values, np.ones(50), off_lattice),))
    for learner in range(3):
        assert rejected(examine(found[learner], found[:learner] + found[learner + 1 :]), 0.01 / 3) == ()


def one(found: tuple[Residuals, ...], replica: int) -> tuple[Residuals, ...]:
    """The residuals of a single replica."""
    only = slice(replica, replica + 1)
    return tuple(replace(each, values=each.values[:, only], off_lattice=each.off_lattice[:, only]) for each in found)


# ---- broken learners -------------------------------------------------------------------------------------------------


Change = Callable[["Broken", Draw, FloatArray], FloatArray]


@dataclass
class Broken:
    """Noise of another source, changed."""

    source: SeededNoise
    change: Change
    said: list[FloatArray] = field(default_factory=list)
    standard: FloatArray = field(default_factory=lambda: np.empty(0))
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(99))

    def __call__(self, draw: Draw) -> FloatArray:
        self.said.append(self.change(self, draw, self.source(draw)))
        return self.said[-1]


def half(self: Broken, draw: Draw, drawn: FloatArray) -> FloatArray:
    return draw.rounded(0.5 * drawn)


def nine_tenths(self: Broken, draw: Draw, drawn: FloatArray) -> FloatArray:
    return draw.rounded(0.9 * drawn)


def from_the_round_before(self: Broken, draw: Draw, drawn: FloatArray) -> FloatArray:
    return self.said[-1] if draw.round % 2 else drawn


def from_long_ago(self: Broken, draw: Draw, drawn: FloatArray) -> FloatArray:
    return self.said[5] if draw.round == 30 else drawn


def in_other_scales(self: Broken, draw: Draw, drawn: FloatArray) -> FloatArray:
    """A generator that starts anew in every other round, as one with a constant seed does."""
    if not draw.round % 2:
        self.standard = drawn / draw.scale
        return drawn
    return draw.rounded(self.standard * draw.scale)


def half_of_it_stays(self: Broken, draw: Draw, drawn: FloatArray) -> FloatArray:
    """Correlated, but never equal."""
    return draw.rounded(0.6 * self.said[-1] + 0.8 * drawn) if draw.round else drawn


def not_in_one_round(self: Broken, draw: Draw, drawn: FloatArray) -> FloatArray:
    return np.zeros_like(drawn) if draw.round == 17 else drawn


def little_in_one_round(self: Broken, draw: Draw, drawn: FloatArray) -> FloatArray:
    return draw.rounded(0.01 * drawn) if draw.round == 17 else drawn


def in_the_first_round_only(self: Broken, draw: Draw, drawn: FloatArray) -> FloatArray:
    return np.zeros_like(drawn) if draw.round else drawn


def not_on_one_coordinate(self: Broken, draw: Draw, drawn: FloatArray) -> FloatArray:
    return np.where(np.arange(drawn.shape[-1]) == 3, 0.0, drawn)


def little_on_one_coordinate(self: Broken, draw: Draw, drawn: FloatArray) -> FloatArray:
    return np.where(np.arange(drawn.shape[-1]) == 3, draw.rounded(0.3 * drawn), drawn)


def normal(self: Broken, draw: Draw, drawn: FloatArray) -> FloatArray:
    """Of the same variance."""
    return draw.rounded(self.generator.normal(size=drawn.shape) * draw.scale * np.sqrt(2.0))


def raw_doubles(self: Broken, draw: Draw, drawn: FloatArray) -> FloatArray:
    return self.generator.laplace(size=drawn.shape) * draw.scale


def the_same_for_all_learners(self: Broken, draw: Draw, drawn: FloatArray) -> FloatArray:
    return np.broadcast_to(drawn[:1], drawn.shape).copy()


def alike_for_all_learners(self: Broken, draw: Draw, drawn: FloatArray) -> FloatArray:
    return draw.rounded(0.6 * drawn[:1] + 0.8 * drawn)


def one_number(self: Broken, draw: Draw, drawn: FloatArray) -> FloatArray:
    return np.broadcast_to(drawn[..., :1], drawn.shape).copy()


def running_sums(self: Broken, draw: Draw, drawn: FloatArray) -> FloatArray:
    return draw.rounded(0.6 * np.roll(drawn, 1, axis=-1) + 0.8 * drawn)


def mostly_positive(self: Broken, draw: Draw, drawn: FloatArray) -> FloatArray:
    flipped: FloatArray = np.where(self.generator.random(drawn.shape) < 0.5, np.abs(drawn), drawn)
    return flipped


@pytest.mark.parametrize(
    ("change", "replicas", "caught"),
    [
        (half, 1, {"scale", "tails", "law"}),
        (nine_tenths, 20, {"scale"}),
        (from_the_round_before, 1, {"round ties", "rounds"}),
        (from_long_ago, 1, {"round ties"}),
        (in_other_scales, 1, {"round ties", "rounds"}),
        (half_of_it_stays, 1, {"rounds"}),
        (not_in_one_round, 1, {"zeros", "round scale"}),
        (little_in_one_round, 1, {"round scale"}),
        (in_the_first_round_only, 1, {"zeros", "round scale", "scale"}),
        (not_on_one_coordinate, 1, {"zeros", "coordinate scale"}),
        (little_on_one_coordinate, 1, {"coordinate scale"}),
        (normal, 30, {"tails"}),
        (raw_doubles, 1, {"lattice"}),
        (the_same_for_all_learners, 1, {"learner ties", "learners"}),
        (alike_for_all_learners, 1, {"learners"}),
        (one_number, 1, {"coordinate ties", "coordinates"}),
        (running_sums, 1, {"coordinates"}),
        (mostly_positive, 1, {"signs"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("dim", [10, 100])
def test_broken_noise_is_caught(change: Change, replicas: int, caught: set[str], dim: int) -> None:
    """From one transcript of 50 rounds; a scale that is a tenth too small and Gaussian noise from 20 and 30."""
    run = small_run(rounds=50, n_features=dim)
    data = made_up(run.spec, dim)
    transcript = overheard(run, data, Broken(SeededNoise(2), change), replicas)
    tests = conformance(run, transcript, data, 0)

    assert caught <= names(rejected(tests, 1e-3))


def test_a_test_says_where_it_failed() -> None:
    run = small_run(rounds=50, n_features=10)
    data = made_up(run.spec, 10)
    where: dict[tuple[str, str], str] = {}
    for change in (not_in_one_round, not_on_one_coordinate, the_same_for_all_learners):
        tests = conformance(run, overheard(run, data, Broken(SeededNoise(2), change)), data, 1)
        where |= {(change.__name__, test.name): test.where for test in rejected(tests, 1e-6)}

    assert where["not_in_one_round", "round scale"] == "learner 1, field 'y', round 17"
    assert where["not_on_one_coordinate", "coordinate scale"] == "learner 1, field 'y', coordinate 3"
    assert where["the_same_for_all_learners", "learner ties"].startswith("learner 1, field 'y', with learner ")


def test_the_least_bug_is_not_seen_and_the_same_bug_is_in_more_runs() -> None:
    """What one transcript of ten coordinates cannot tell is not claimed to be told."""
    run = small_run(rounds=50, n_features=10)
    data = made_up(run.spec, 10)
    found = [
        names(rejected(conformance(run, overheard(run, data, Broken(SeededNoise(2), nine_tenths), n), data, 0), 1e-3))
        for n in (1, 30)
    ]
    assert found[0] == set()
    assert "scale" in found[1]


def test_holm_rejects_in_order_until_the_first_that_holds() -> None:
    tests = [Test(str(p), "", 0.0, p, "") for p in (0.02, 0.5, 0.004, 0.0126, 0.01)]
    assert [test.p_value for test in rejected(tests, 0.05)] == [0.004, 0.01, 0.0126, 0.02]
    assert [test.p_value for test in rejected(tests, 0.04)] == [0.004, 0.01, 0.0126, 0.02]
    assert [test.p_value for test in rejected(tests, 0.03)] == [0.004]
    assert rejected(tests, 0.01) == ()
