"""Epsilon at a delta beside what is attained, over random settings: `pytest -m long tests/long/test_delta.py`, minutes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from sottovoce_core.arrays import FloatArray, as_floats
from sottovoce_core.budget.composition import _compose, epsilon_for_delta
from sottovoce_core.budget.cost import LearnerCost
from sottovoce_core.data import LearnerData
from sottovoce_core.privacy.loss import Mechanism
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.spec import parse_spec
from tests.examples import made_up
from tests.long.test_innocent import FIELD, drawn

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(7200)]

pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution", reason="dp-accounting is not installed")


def attained(mechanism: Mechanism, losses: FloatArray, delta: float) -> float:
    """Epsilon of one record if every message moves all its numbers by the same length, as its l2 bound allows.

    Its discretisation is pessimistic, with an error of the second order in its spacing.
    """
    composed, interval = None, min(1e-4, float(losses.sum()) / 10_000)
    values, times = np.unique(losses[losses > 0], return_counts=True)
    for loss, repeats in zip(values.tolist(), times.tolist(), strict=True):
        n = mechanism.n_coordinates
        one = pld.from_laplace_mechanism(n / loss, value_discretization_interval=interval)
        several = one.self_compose(n * repeats, tail_mass_truncation=1e-15)
        composed = several if composed is None else composed.compose(several, tail_mass_truncation=1e-15)
    return 0.0 if composed is None else float(composed.get_epsilon_for_delta(delta))


def worst_losses(run: Run, own: LearnerData, learner: int) -> FloatArray:
    """The losses of one record that costs most in all."""
    accountant, counts = run.algorithm.accountant(learner), np.diff(own.offsets)
    if accountant.has_dominating_losses:
        return accountant.losses(counts)
    units = np.eye(len(counts), dtype=np.int64)[np.flatnonzero(counts)]
    each = accountant.losses_by_change(counts, units)
    return as_floats(each[int(np.argmax((each**2).sum(axis=1)))])


def test_epsilon_at_a_delta_lies_between_what_is_attained_and_the_sum_on_300_settings() -> None:
    """All algorithms are drawn, and one use of a record is accounted; where only the pure loss is known, the least is 0."""
    examined = Counter[str]()
    for seed in range(300):
        run, data, learner, generator = drawn(seed)
        cost, delta = LearnerCost(run, learner, data.learners[learner]), float(10.0 ** generator.uniform(-9, -2))
        messages = cost.message_losses("record_use")
        pure = math.fsum(messages.losses)
        if not 0.0 < pure < 200.0:
            continue
        found = cost.epsilon("record_use", delta)
        today = float(_compose([messages], max(1e-4, pure / 50_000)).get_epsilon_for_delta(delta))
        assert 0.0 <= found <= min(pure, cost.epsilon("record_use"), today) * (1.0 + 1e-9), seed
        assert found <= cost.epsilon("record_use", delta, has_distributions=False)
        if 0 < messages.mechanism.n_coordinates <= 64:
            least = attained(messages.mechanism, worst_losses(run, data.learners[learner], learner), delta)
            assert found >= 0.995 * least - 1e-6, seed
        examined[run.algorithm.name] += 1
    assert len(examined) >= 10 and sum(examined.values()) > 100


@pytest.mark.parametrize("changes", FIELD["runs"], ids=lambda run: str(run["name"]))
def test_on_the_field_epsilon_at_a_delta_is_at_most_a_fifth_above_what_is_attained(changes: dict[str, Any]) -> None:
    spec = parse_spec({**FIELD["common"], **changes}, allow_imports=True)
    run = build_run(spec, 30)
    own = made_up(spec, 30, batch=8, records=85).learners[0]
    messages = LearnerCost(run, 0, own).message_losses("record_use")
    if not (messages.mechanism.n_coordinates >= 30 and 0.0 < math.fsum(messages.losses) < math.inf):
        pytest.skip("no l2 bound on at least 30 numbers is known")
    assert epsilon_for_delta(1e-5, [messages]) <= 1.2 * attained(messages.mechanism, worst_losses(run, own, 0), 1e-5)
