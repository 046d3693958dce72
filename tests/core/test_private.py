"""What a learner keeps to itself: a channel that tells it is found, and one that follows the messages is not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.auditing.audit import Audit, compute_chunk_statistics, conclude, merge_noise
from sottovoce_core.auditing.coin_tests import PairRuns, run_channel_tests, run_private_quantity_tests
from sottovoce_core.auditing.plan import AuditPlan, plan_audit
from sottovoce_core.auditing.traffic_features import build_features
from sottovoce_core.auditing.worlds import (
    PRIVATE_QUANTITIES,
    RecordedRuns,
    RunChunk,
    Worlds,
    build_worlds,
    compute_private_differences,
    plan_chunks,
    simulate_runs,
)
from sottovoce_core.data import PlacedData
from sottovoce_core.losses import mean_gradient
from sottovoce_core.noise import SeededNoise
from sottovoce_core.runs.run import Run
from tests.examples import made_up, small_run

ROUNDS, FEATURES = 6, 5

LEVEL = 0.05 / 10 / 20
"""Of one of ten primary tests, at a confidence of 95 %: half of the tenth that is for worlds."""


def mirror_pair(at: int, rounds: int = ROUNDS) -> tuple[Run, PlacedData, Worlds]:
    """A record of one round, on the bound, against its mirror image."""
    run = small_run(rounds, 3, FEATURES, algorithm={"sigma": 4.0})
    data = made_up(run.spec, FEATURES)
    own = data.learners[0]
    row = int(own.rows(at)[0])
    record = own.features[row] / np.linalg.norm(own.features[row]) * run.loss.feature_bound
    data = data.with_learner(0, own.with_record(row, record, 1.0))
    return run, data, build_worlds(data, 0, row, -record, 1.0)


def norms(run: Run, worlds: Worlds, heard: RecordedRuns, world: int, t: int) -> FloatArray:
    """`(runs,)` of the learner's gradient in a round, in a world."""
    assert heard.decisions is not None
    batch = worlds.get_records(world).batch(t)
    enforced = Batch(*run.loss.enforce_bounds(batch.features, batch.labels))
    found: FloatArray = np.linalg.norm(mean_gradient(run.loss, heard.decisions[t, 0], enforced), axis=-1)
    return found


def overheard(run: Run, data: PlacedData, worlds: Worlds, share: RunChunk) -> RecordedRuns:
    return simulate_runs(run, data, worlds, share, SeededNoise, keep_all_learners=True, keep_decisions=True)


def test_worlds_differ_by_what_each_would_have_made_of_the_round() -> None:
    """Of the last round, before which there is no difference; nothing of the world that the run lived in."""
    run, data, worlds = mirror_pair(ROUNDS - 1)
    heard = overheard(run, data, worlds, RunChunk(1, 40, np.random.SeedSequence(0)))
    found = compute_private_differences(run, worlds, heard.transcript)
    first, second = (norms(run, worlds, heard, world, ROUNDS - 1) for world in (0, 1))
    assert found.shape == (40, len(PRIVATE_QUANTITIES))
    assert found[:, 0] == pytest.approx(first - second) and np.ptp(found[:, 0]) > 0.5
    assert np.sign(found[:, 0]) == pytest.approx(np.sign(found[:, 1]))  # a steeper loss is a larger one
    assert found[:, 2] == pytest.approx(0.0)
    swapped = replace(worlds, records_0=worlds.records_1, records_1=worlds.records_0)
    assert compute_private_differences(run, swapped, heard.transcript) == pytest.approx(-found)


def leaking(view: str, count: int, seed: int) -> PairRuns:
    """Runs of a mirror pair whose channel shows the norm of one gradient, and twenty things that say nothing."""
    run, data, worlds = mirror_pair(3)
    generator = np.random.default_rng(seed)
    parts, coins, told = [], [], []
    for share in plan_chunks(count, 10**6, np.random.SeedSequence(seed)):
        heard = overheard(run, data, worlds, share)
        norm = norms(run, worlds, heard, share.world, 3)
        shown = np.rint(1000.0 * norm) if view == "metadata" else norm + generator.exponential(0.02, share.runs)
        told.append(np.column_stack([shown, generator.normal(size=(share.runs, 20))]))
        coins.append(np.full(share.runs, 1 - share.world))
        parts.append(
            (
                worlds.compute_losses(run, heard.transcript).sum(axis=0),
                compute_private_differences(run, worlds, heard.transcript),
            )
        )
    losses, private = (np.concatenate(each) for each in zip(*parts, strict=True))
    return PairRuns(losses, np.concatenate(coins), {view: np.concatenate(told)}, private)


@pytest.mark.parametrize("view", ["gaps", "metadata"])
def test_a_channel_that_tells_a_norm_is_found_with_few_runs(view: str) -> None:
    """24 runs of each world are enough; by the coin alone 400 are not. Median of five, failure probability below 1e-4."""
    few, many = ([leaking(view, count, seed) for seed in range(5)] for count in (24, 400))
    found = [run_private_quantity_tests([heard])[0].p_value for heard in few]
    by_coin = [run_channel_tests([heard])[0].p_value for heard in many]
    assert np.median(found) < LEVEL / 100.0
    assert np.median(by_coin) > LEVEL


def test_what_the_worlds_differ_in_alike_in_every_run_is_left_to_the_coin() -> None:
    """A constant times a rank is that rank: it is tried, and paid for, once."""
    generator = np.random.default_rng(0)
    coins, view = generator.integers(0, 2, 100), generator.normal(size=(100, 2))
    for private in (None, np.ones((100, 3))):
        assert run_private_quantity_tests([PairRuns(np.zeros(100), coins, {"gaps": view}, private)]) == ()
    some = np.column_stack([np.ones(100), generator.normal(size=100)])
    (one,) = run_private_quantity_tests([PairRuns(np.zeros(100), coins, {"gaps": view[:, :1]}, some)])
    (two,) = run_private_quantity_tests([PairRuns(np.zeros(100), coins, {"gaps": view[:, [0, 0]]}, some)])
    assert two.p_value == pytest.approx(min(1.0, 2.0 * one.p_value))
    assert run_private_quantity_tests([PairRuns(np.zeros(100), coins, {"values": view}, some)]) == ()  # no channel


@pytest.mark.statistics
@pytest.mark.parametrize(("epsilon", "count"), [(0.0, 60), (1.0, 60), (6.0, 60), (1.0, 400)])
def test_correct_runs_raise_no_more_alarms_than_the_level(epsilon: float, count: int) -> None:
    """500 audits; channels follow the messages, and so do differences: at most 5 % below .05, six standard errors.

    Failure probability below 1e-8 each.
    """
    generator, below = np.random.default_rng(1), 0
    for _ in range(500):
        losses = generator.choice([-epsilon, epsilon], count)
        coins = (generator.random(count) < 1.0 / (1.0 + np.exp(-losses))).astype(np.int64)
        private = losses[:, None] + generator.standard_cauchy((count, 2))
        view = np.column_stack([private[:, 0] + generator.normal(size=count), np.round(losses + private[:, 1])])
        (test,) = run_private_quantity_tests([PairRuns(losses, coins, {"sizes": view}, private)])
        below += test.p_value < 0.05
    assert below <= 25 + 6 * math.sqrt(500 * 0.05 * 0.95)


def audit_of(plan: AuditPlan, told: float) -> Audit:
    """An audit of a correct learner whose delays grow by so much with the norm of its gradient in one round."""
    parts, said, generator = [], [], np.random.default_rng(5)
    for share in plan_chunks(plan.runs, 10**6, plan.seeds.audited_runs):
        heard = overheard(plan.run, plan.data, plan.worlds, share)
        delays = told * norms(plan.run, plan.worlds, heard, share.world, 3) + generator.exponential(0.02, share.runs)
        channel = tuple({"gaps": build_features([("gap", [delay])])} for delay in delays.tolist())
        parts.append(compute_chunk_statistics(plan, replace(heard, channel_features=channel)))
        said.append(heard.transcript)
    return conclude(plan, merge_noise(parts), said[0], "tests")


def test_an_audit_refutes_a_learner_whose_delay_tells_a_norm() -> None:
    """A correct one is refuted with probability below 0.05; seeds are fixed."""
    run, data, worlds = mirror_pair(3)
    plan = plan_audit(run, data, 0, runs=40, seed=3, worlds=worlds)
    refuted = {
        told: [test.name for test in audit_of(plan, told).findings.tests if test.is_significant] for told in (0.0, 1.0)
    }
    assert refuted == {0.0: [], 1.0: ["private quantities"]}
