"""One suite for every meter: the dearest event, a change that is told, many changes at once, and the one function over it."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest

from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.budget.composition import group_record_losses, message_losses, worst_case_record_losses
from sottovoce_core.data import LearnerData
from sottovoce_core.errors import SpecError
from sottovoce_core.privacy.accountant import Accountant, PrecomputedAccountant, compute_guarantee
from sottovoce_core.privacy.guarantee import (
    Adjacency,
    Guarantee,
    GuaranteeBasis,
    ThreatModel,
    compose_guarantees,
)
from sottovoce_core.privacy.loss import PURE
from tests.claims import EXPOSED, SETUPS, counts_of

EVERY = pytest.mark.parametrize("name", [*SETUPS, *EXPOSED])


def meter_of(name: str) -> tuple[Accountant, int]:
    """A fresh meter of learner 0 of a run, and its rounds."""
    setup = {**SETUPS, **EXPOSED}[name]
    return setup.build().algorithm.accountant(0), setup.rounds


def charged(meter: Accountant, counts: IntArray, replaced: IntArray | None = None) -> FloatArray:
    """What a learner charges, round by round."""
    meter, losses = copy.deepcopy(meter), []
    for t, records in enumerate(counts.tolist()):
        losses.append(meter.next_loss())
        meter.advance(records, None if replaced is None else int(replaced[t]))
    return np.array(losses)


def plans(rounds: int, seed: int) -> tuple[IntArray, IntArray]:
    """Records of every round, and how many of them each of five changes replaces `(5, rounds)`: the first, one; some, several."""
    generator = np.random.default_rng(seed)
    counts = counts_of(rounds, seed % 4, generator)
    changes = np.minimum(generator.integers(0, 3, (5, rounds)), counts)
    changes[0] = np.arange(rounds) == np.flatnonzero(counts)[0]
    return counts, changes.astype(np.int64)


@EVERY
@pytest.mark.parametrize("seed", range(4))
def test_what_is_promised_is_what_is_charged(name: str, seed: int) -> None:
    meter, rounds = meter_of(name)
    counts, _ = plans(rounds, seed)
    promised = compute_guarantee(meter, rounds, counts)
    np.testing.assert_allclose(promised.round_losses, charged(meter, counts), rtol=1e-12, atol=0)
    assert promised.epsilon() > 0.0 or seed > 0  # records that come in the last round alone show in no message
    assert promised.paper_epsilon.shape == (rounds,)


@EVERY
@pytest.mark.parametrize("seed", range(4))
def test_a_told_meter_follows_that_change(name: str, seed: int) -> None:
    """In the learner's steps, alone, and many at once."""
    meter, rounds = meter_of(name)
    counts, changes = plans(rounds, seed)
    together = meter.losses_by_change(counts, changes)
    for change, losses in zip(changes, together, strict=True):
        np.testing.assert_array_equal(compute_guarantee(meter, rounds, counts, change).round_losses, losses)
        if meter.can_track_replacements:
            expected = charged(meter, counts, change)
            finite = np.isfinite(expected)
            np.testing.assert_array_equal(np.isfinite(losses), finite)
            scale = max(
                1.0, expected[finite].sum()
            )  # a total comes back in increments, which rounds in its last digits
            np.testing.assert_allclose(losses[finite], expected[finite], rtol=1e-9, atol=1e-14 * scale)


@EVERY
def test_nothing_replaced_costs_nothing(name: str) -> None:
    meter, rounds = meter_of(name)
    counts = np.full(rounds, 2)
    assert compute_guarantee(meter, rounds, counts, np.zeros(rounds, np.int64)).epsilon() == 0.0


@EVERY
def test_no_single_event_costs_more_than_the_dearest_by_any_round(name: str) -> None:
    meter, rounds = meter_of(name)
    counts = np.full(rounds, 2)
    change = np.eye(rounds, dtype=np.int64)
    if meter.adjacency is Adjacency.LEARNER:
        change = counts[None]
    with np.errstate(invalid="ignore"):
        singles = np.cumsum(meter.losses_by_change(counts, change), axis=1)
    assert (singles <= np.cumsum(meter.losses(counts)) * (1 + 1e-12) + 1e-12).all()


def test_more_rounds_than_memory_are_refused() -> None:
    meter, _ = meter_of(next(iter(SETUPS)))
    with pytest.raises(SpecError, match="for at most 134217728 rounds, got 1000000000000"):
        compute_guarantee(meter, 10**12)


@EVERY
def test_a_meter_stays_fresh_and_refuses_more_than_came(name: str) -> None:
    meter, rounds = meter_of(name)
    before = charged(meter, np.ones(rounds, np.int64))
    compute_guarantee(meter, rounds, np.full(rounds, 3), np.ones(rounds, np.int64))
    np.testing.assert_array_equal(charged(meter, np.ones(rounds, np.int64)), before)
    with pytest.raises(SpecError, match="more replaced records than records"):
        compute_guarantee(meter, rounds, np.ones(rounds, np.int64), np.full(rounds, 2))
    if meter.can_track_replacements:
        for records, replaced in ((1, 2), (0, 1), (1, -1)):
            with pytest.raises(SpecError, match="replaced must lie in"):
                meter.advance(records, replaced)
        np.testing.assert_array_equal(charged(meter, np.ones(rounds, np.int64)), before)


# ---- meters of one's own ---------------------------------------------------------------------------------------------


class Own(Accountant):
    """Says nothing of itself."""

    def __init__(self) -> None:
        self.t = 0

    def next_loss(self) -> float:
        return 0.5 * self.t

    def advance(self, records: int, n_replaced: int | None = None) -> None:
        self.t += 1


def test_every_default_is_the_careful_one() -> None:
    counts = np.full(4, 3)
    promised = compute_guarantee(Own(), 4, counts)
    assert (promised.mechanism, promised.adjacency, promised.has_shared_records) == (
        PURE,
        Adjacency.RECORD_USE,
        False,
    )
    assert promised.paper_epsilon.tolist() == [0.0, 0.5, 1.5, 3.0]
    assert (promised.infinite_horizon_epsilon, promised.output_epsilon) == (math.inf, None)
    assert promised.basis.threat_model is ThreatModel.WIRE
    assert message_losses(Own(), counts) is None  # no single record is known: the sum is all there is


def test_a_meter_that_follows_nothing_is_charged_k_times() -> None:
    counts, replaced = np.full(4, 3), np.array([2, 0, 3, 0])
    assert compute_guarantee(Own(), 4, counts, replaced).round_losses.tolist() == [0.0, 2.5, 5.0, 7.5]
    for event, many in ((Adjacency.RECORD_USE, 5), (Adjacency.ROUND, 2), (Adjacency.LEARNER, 1)):
        listed = PrecomputedAccountant(np.array([0.0, 1.0, 0.0, 0.0]), adjacency=event)
        assert compute_guarantee(listed, 4, counts, replaced).epsilon() == many


def test_a_record_used_again_costs_n_events_where_the_meter_cannot_follow_it() -> None:
    own = LearnerData(np.zeros((2, 1)), np.zeros(2), np.array([0, 1, 0, 0]), np.arange(5))
    event = PrecomputedAccountant(np.array([0.0, 1.0, 0.5, 0.0])).losses(np.ones(4, np.int64))
    found = {each.n_uses: each for each in group_record_losses(PrecomputedAccountant(event), own)}
    assert math.fsum(worst_case_record_losses(found.values(), event)) == 3 * 1.5
    assert found[3].losses is None and found[1].losses is None


# ---- in words, and together ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "shared", "replaced", "text"),
    [
        (
            Adjacency.RECORD_USE,
            False,
            None,
            "one use of one record of one learner replaced (numbers of records are public)",
        ),
        (
            Adjacency.RECORD_USE,
            False,
            3,
            "one use of each of 3 records of one learner replaced (numbers of records are public)",
        ),
        (
            Adjacency.LEARNER,
            False,
            None,
            "one use of each record of one learner replaced (numbers of records are public)",
        ),
        (
            Adjacency.LEARNER,
            False,
            1,
            "one use of one record of one learner replaced (numbers of records are public)",
        ),
        (Adjacency.ROUND, False, None, "the loss of one round replaced, with all its records, of one learner"),
        (
            Adjacency.ROUND,
            True,
            2,
            "the losses of 2 rounds replaced, with all its records, which every learner holds: epsilons of all learners add up",
        ),
    ],
)
def test_adjacency_in_words(event: Adjacency, shared: bool, replaced: int | None, text: str) -> None:
    zeros = np.zeros(1)
    assert Guarantee(PURE, event, shared, replaced, zeros, zeros, 0.0, GuaranteeBasis()).adjacency_description == text


def test_learners_heard_together_cost_the_sum() -> None:
    meters = [PrecomputedAccountant(np.array([0.0, 1.0, 2.0]) * k) for k in (1, 2)]
    alone = [compute_guarantee(meter, 3) for meter in meters]
    together = compose_guarantees(alone)
    assert together.round_losses.tolist() == [0.0, 3.0, 6.0]
    assert together.epsilon() == sum(each.epsilon() for each in alone)
    assert together.paper_epsilon.tolist() == [0.0, 2.0, 6.0]
    assert compose_guarantees(alone[:1]) is alone[0]
