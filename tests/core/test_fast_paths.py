"""What is computed in fewer steps is what the plain formula gives, number by number, over long runs of every algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sottovoce_core import noise
from sottovoce_core.algorithms.interface import StackedMessages
from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.data import PlacedData
from sottovoce_core.decision_sets import L2Ball
from sottovoce_core.losses import Loss, enforce_bounds, loss, scale_rows
from sottovoce_core.losses.linear import LogisticLoss, RidgeLoss
from sottovoce_core.noise import NoiseRequest, SeededNoise, lattice_spacing, simulation
from sottovoce_core.runs import simulator
from sottovoce_core.runs.run import build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.spec import parse_spec
from tests.examples import made_up
from tests.strategies import vectors

FIELD: dict[str, Any] = yaml.safe_load(
    resources.files("sottovoce_client.runs").joinpath("builtin_algorithms.yaml").read_text("utf-8")
)
ROUNDS = 2_000
SOLVING = {"admm", "dvp", "pvp"}
"""They solve a problem of all records in every round: in fewer rounds."""

# ---- plain formulas --------------------------------------------------------------------------------------------------


class PlainNoise:
    """The numbers of `SeededNoise`: `-log|2u - 1|` with the other sign than `2u - 1`.

    The first replica's from one generator, `simulated.AHEAD` at a time where draws are small; the others' from another, replica
    by replica, each draw from 2^64 numbers behind where the last one began.
    """

    def __init__(self, seed: int) -> None:
        first, self._others = (
            np.random.SeedSequence(seed, spawn_key=(simulation._REPLICA_SPAWN_KEY, 0, k)) for k in range(2)
        )
        self._first, self._left = np.random.Generator(np.random.SFC64(first)), np.empty(0)
        self._draws = 0

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        assert draw.distribution == "laplace" and draw.spacing is not None
        lead, replicas, dim = (1, 1, *draw.shape)[-3:]  # without learners: of one; without replicas: of the first one
        count = lead * dim
        if count > len(self._left):
            self._left = self._standard(self._first, max(simulation.MIN_BLOCK_NUMBERS, count))
        rows, self._left = [self._left[:count]], self._left[count:]
        if replicas > 1:
            self._draws += 1
            at = np.random.PCG64DXSM(self._others).advance(2**64 * self._draws)
            rows += list(self._standard(np.random.Generator(at), (replicas - 1) * count).reshape(-1, count))
        standard = np.stack([row.reshape(lead, dim) for row in rows], axis=1).reshape(draw.shape)
        rounded: FloatArray = np.floor(standard * (draw.scale / draw.spacing) + 0.5) * draw.spacing
        return rounded

    def _standard(self, generator: np.random.Generator, count: int) -> FloatArray:
        side = 2.0 * generator.random(count) - (1.0 - 2.0**-53)
        return np.copysign(np.log(np.abs(side)), -side)


def plain_project(ball: L2Ball, theta: FloatArray) -> FloatArray:
    square = np.vecdot(theta, theta)
    if (square <= ball.radius * ball.radius).all():
        return theta
    shrink: FloatArray = np.minimum(1.0, ball.radius / np.sqrt(np.maximum(square, np.finfo(float).tiny)))
    return theta * shrink[..., None]


def plain_batches(data: PlacedData, rounds: int, loss: Loss) -> Iterator[Batch]:
    return (data.stack_round(t) for t in range(rounds))


def plain_sum(heard: StackedMessages, weights: FloatArray, name: str) -> FloatArray:
    said = heard.message[name]
    mixed: FloatArray = np.matmul(weights, said.reshape(len(said), -1))
    return mixed.reshape(said.shape)


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", FIELD["runs"], ids=lambda run: str(run["name"]))
def test_a_long_run_is_the_plain_one(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    most = 40 if changes["algorithm"]["name"] in SOLVING else ROUNDS
    rounds = min(most, changes.get("rounds", most))
    spec = parse_spec({**FIELD["common"], **changes, "rounds": rounds}, allow_imports=True)
    run, data = build_run(spec, 6), made_up(spec, 6)

    def every_hundredth() -> list[FloatArray]:
        steps = enumerate(simulate_rounds(run, data, SeededNoise(1), 2))
        return [step.decisions_after.copy() for t, step in steps if t % 100 == 0 or t == rounds - 1]

    fast = every_hundredth()
    monkeypatch.setattr(loss, "_weighted_rows", np.matmul)
    monkeypatch.setattr(L2Ball, "project", plain_project)
    monkeypatch.setattr(simulator, "_batches", plain_batches)
    monkeypatch.setattr(StackedMessages, "_sum", plain_sum)
    np.testing.assert_array_equal(fast, every_hundredth())


def logistic_gradient(theta: FloatArray, features: FloatArray, labels: FloatArray) -> FloatArray:
    """The mean over records, each by itself."""
    slopes = 1.0 / (1.0 + np.exp(-features @ theta)) - labels
    mean: FloatArray = (slopes[:, None] * features).mean(axis=0)
    return mean


@pytest.mark.parametrize("name", ["ldp-dol", "dsgd"])
def test_thousands_of_rounds_are_the_recursion(name: str) -> None:
    """Learner by learner, with one record a round, on a ring; what the lattice and the order of sums do stays below 1e-9."""
    steps, learners, ridge = 3_000 if name == "dsgd" else 1_200, 3, 0.01
    document = {
        "rounds": steps,
        "learners": learners,
        "topology": {"graph": "ring", "weights": {"kind": "constant", "value": 0.3}},
        "algorithm": {"name": name},
        "loss": {"kind": "logistic", "ridge": ridge, "feature_bound": 9.0},
        "decision_set": {"kind": "l2_ball", "radius": 3.0},
    }
    spec = parse_spec(document, allow_imports=True)
    run, data = build_run(spec, 4), made_up(spec, 4)
    drawn, theta = noise.Recorder(SeededNoise(2)), np.zeros((learners, 4))
    for t, step in enumerate(simulate_rounds(run, data, drawn)):
        said = theta + drawn.noise_by_round["y"].pop(t)[:, 0]
        after, played = np.empty_like(theta), np.empty_like(theta)
        for i, own in enumerate(data.learners):
            heard = sum(0.3 * said[j] for j in range(learners) if j != i)
            if name == "dsgd":
                mixed = 0.4 * theta[i] + heard
                gradient = logistic_gradient(mixed, own.features[t : t + 1], own.labels[t : t + 1]) + ridge * mixed
                after[i], played[i] = mixed - (t + 1) ** -0.77 * gradient, mixed
            else:
                gradient = logistic_gradient(theta[i], own.features[: t + 1], own.labels[: t + 1]) + ridge * theta[i]
                pull = (t + 1) ** -0.65 * (heard - 0.6 * theta[i])
                after[i] = played[i] = theta[i] + pull - (t + 1) ** -0.77 * gradient
        theta, played = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True) / 3.0, 1.0) for x in (after, played))
        np.testing.assert_allclose(step.decisions_after[:, 0], played, rtol=0, atol=1e-9)


# ---- part by part ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count", [7, 585, simulation.MIN_BLOCK_NUMBERS // 2, simulation.MIN_BLOCK_NUMBERS // 2 + 1, 58_500]
)
def test_seeded_numbers_are_those_of_their_definition(count: int) -> None:
    source, plain = SeededNoise(5), PlainNoise(5)
    for t in range(40_000 // count + 3):
        scale = 1.5 * (t + 1.0) ** 0.11
        draw = NoiseRequest("laplace", "y", t, scale, lattice_spacing(scale), (count,))
        np.testing.assert_array_equal(source(draw), plain(draw))


def test_what_is_done_to_a_draw_reaches_no_other_one() -> None:
    source, plain = SeededNoise(6), PlainNoise(6)
    for t in range(100):
        draw = NoiseRequest("laplace", "y", t, 1.0, lattice_spacing(1.0), (2, 300))
        values = source(draw)
        np.testing.assert_array_equal(values, plain(draw))
        values[:] = np.nan


@given(st.floats(0.1, 10.0), vectors(6, 8.0), vectors(6, 8.0))
def test_a_ball_lets_pass_what_lies_inside(radius: float, one: FloatArray, other: FloatArray) -> None:
    ball, both = L2Ball(radius=radius), np.stack([one, other])[:, None]
    np.testing.assert_array_equal(ball.project(both), plain_project(ball, both))
    on_it = one * (radius / np.linalg.norm(one)) if np.linalg.norm(one) > 0 else one
    np.testing.assert_array_equal(ball.project(on_it), plain_project(ball, on_it))


@pytest.mark.parametrize("lead", [(), (3,), (3, 2)], ids=str)
@pytest.mark.parametrize("records", [1, 2])
def test_weighted_rows_are_a_matrix_product(lead: tuple[int, ...], records: int) -> None:
    generator = np.random.default_rng(1)
    rows = generator.normal(size=(*lead[:1], records, 5))
    weights = generator.normal(size=(*lead, records)) if len(lead) != 1 else generator.normal(size=(3, 1, records))
    np.testing.assert_array_equal(loss._weighted_rows(weights, rows), np.matmul(weights, rows))


@given(vectors(5, 3.0), st.floats(0.1, 10.0))
def test_a_single_row_is_scaled_as_one_of_many(row: FloatArray, bound: float) -> None:
    """Up to rounding: the sum of squares may be taken in another order."""
    np.testing.assert_allclose(
        scale_rows(row[None], bound)[0], scale_rows(np.stack([row, row]), bound)[1], rtol=1e-14, atol=1e-300
    )


@pytest.mark.parametrize(
    "loss", [LogisticLoss(feature_bound=2.0), RidgeLoss(feature_bound=2.0, label_bound=0.9)], ids=str
)
def test_only_records_that_obey_are_taken_as_they_are(loss: Loss) -> None:
    """Batches say so of themselves, for one loss; another loss looks at them again."""
    spec = parse_spec(
        {"rounds": 40, "learners": 2, "algorithm": {"name": "ldp-dol"}, "loss": loss.model_dump()}, allow_imports=True
    )
    obeying = 0
    for scale in (0.1, 3.0):
        data = made_up(spec)
        for i, own in enumerate(data.learners):
            data = data.with_learner(
                i, type(own)(scale * own.features, 0.5 * own.labels * scale, own.order, own.offsets)
            )
        for t, batch in enumerate(simulator._batches(data, 40, loss)):
            features, labels = loss.enforce_bounds(data.stack_round(t).features, data.stack_round(t).labels)
            obeying += batch.bounding_loss is loss
            for each in (enforce_bounds(loss, batch), enforce_bounds(loss, enforce_bounds(loss, batch))):
                np.testing.assert_array_equal(each.features, features)
                np.testing.assert_array_equal(each.labels, labels)
            louder = replace(
                enforce_bounds(loss, batch), features=100.0 * batch.features
            )  # other records: nothing is known of them
            np.testing.assert_array_equal(
                enforce_bounds(loss, louder).features, loss.enforce_bounds(louder.features, labels)[0]
            )
            stricter = loss.model_copy(update={"feature_bound": 0.01})
            assert np.linalg.norm(enforce_bounds(stricter, batch).features, axis=-1).max() <= 0.01 * (1 + 1e-12)
    assert obeying == 40
