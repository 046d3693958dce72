"""The intake: every record once, in its round, whatever a feeder does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.errors import DataError, FailedPrecondition, RemoteProtocolError, SottovoceError
from sottovoce_core.losses import enforce_bounds
from sottovoce_core.losses.linear import LogisticLoss, RidgeLoss
from sottovoce_core.network.participation_schedule import Participation
from sottovoce_learner.ingest import record_queue as module
from sottovoce_learner.ingest.record_queue import PlannedRecordQueue, RecordQueue
from sottovoce_learner.storage.snapshot import pack, unpack
from sottovoce_rpc.codec import to_tensor
from sottovoce_wire.v1 import learner_pb2, tensor_pb2

ROUNDS = 10


def intake(kind: str = "logistic", rounds: int = ROUNDS) -> PlannedRecordQueue:
    return PlannedRecordQueue(
        2, RidgeLoss() if kind == "ridge" else LogisticLoss(), rounds, Participation((range(rounds),), rounds)
    )


def batch(sequence: int, features: Any, labels: Any = None, **fields: Any) -> learner_pb2.SampleBatch:
    """Records of two features; by default each carries its number twice, and label 1."""
    rows = np.asarray(features, dtype=np.float64)
    rows = np.column_stack([rows, rows]) if rows.ndim == 1 else rows
    labels = np.ones(len(rows)) if labels is None else np.asarray(labels, dtype=np.float64)
    fields = {"source": "s", **fields}
    return learner_pb2.SampleBatch(sequence=sequence, features=to_tensor(rows), labels=to_tensor(labels), **fields)


def ids(taken: Any) -> list[int]:
    values: FloatArray = taken.features[:, 0]
    return [int(value) for value in values]


def contents(held: RecordQueue, rounds: int = ROUNDS) -> list[list[int]]:
    return [ids(held.take(t)) for t in range(rounds)]


# ---- taken in --------------------------------------------------------------------------------------------------------


def test_live_batches_fill_round_after_round() -> None:
    held = intake()
    for k in range(3):
        held.put(batch(k, [10 * k, 10 * k + 1]))
        assert held.filled_rounds == k + 1
    assert contents(held, 4) == [[0, 1], [10, 11], [20, 21], []]


def test_counts_cut_a_batch_into_rounds() -> None:
    held = intake()
    held.put(batch(0, range(5), counts=[2, 0, 3], first_round=0))
    held.put(batch(1, [9], counts=[1, 0]))
    assert held.filled_rounds == 5
    assert contents(held) == [[0, 1], [], [2, 3, 4], [9], [], [], [], [], [], []]


def test_an_explicit_round_may_leave_rounds_without_records() -> None:
    held = intake()
    held.put(batch(0, [1], first_round=3))
    assert held.filled_rounds == 4
    assert contents(held, 5) == [[], [], [], [1], []]


def test_a_round_may_bring_no_record_at_all() -> None:
    held = intake()
    held.put(batch(0, np.empty((0, 2))))
    assert held.filled_rounds == 1
    assert held.take(0).size == 0


def test_records_are_taken_once() -> None:
    held = intake()
    held.put(batch(0, [7], [0.0]))
    first = held.take(0)
    assert (ids(first), first.labels.tolist(), first.mask) == ([7], [0.0], None)
    assert held.take(0).size == 0


def test_a_batch_said_again_is_passed_over() -> None:
    held = intake()
    for sequence in (0, 0, 1, 0, 1):
        held.put(batch(sequence, [sequence]))
    assert held.get_next_sequence("s") == 2
    assert contents(held, 3) == [[0], [1], []]


def test_a_batch_said_again_is_not_even_looked_at() -> None:
    """It may have been cut off when the connection broke."""
    held = intake()
    held.put(batch(0, [5]))
    held.put(learner_pb2.SampleBatch(source="s", sequence=0))
    assert contents(held, 2) == [[5], []]


def test_sources_count_for_themselves() -> None:
    held = intake()
    held.put(batch(0, [1], source="a"))
    held.put(batch(0, [2], source="b"))
    held.put(batch(1, [3], source="a"))
    assert [held.get_next_sequence(source) for source in "abc"] == [2, 1, 0]
    assert contents(held, 3) == [[1], [2], [3]]


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=5),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6),
)
def test_a_feeder_that_reconnects_neither_loses_nor_doubles(
    plan: list[list[int]], breaks: list[tuple[int, int]]
) -> None:
    """Batches of one source, each said again from any earlier one after a break: rounds come out as planned."""
    held, made, number = intake(rounds=20), [], 0
    for sequence, counts in enumerate(plan):
        records = range(number, number + sum(counts))
        made.append(batch(sequence, np.column_stack([records, records]), counts=counts))
        number += sum(counts)
    sent = 0
    for back, ahead in [*breaks, (0, len(made))]:
        restart, sent = max(0, sent - back), min(len(made), sent + ahead)
        for each in made[restart:sent]:
            held.put(each)
        assert held.get_next_sequence("s") == sent

    flat = [record for taken in contents(held, 20) for record in taken]
    assert flat == list(range(number))
    assert held.filled_rounds == sum(len(counts) for counts in plan)


# ---- refused, and nothing changed ------------------------------------------------------------------------------------

MALFORMED = learner_pb2.SampleBatch(
    source="s", sequence=1, features=tensor_pb2.Tensor(shape=[1, 2], dtype=tensor_pb2.DATA_TYPE_FLOAT64, data=b"x")
)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (batch(2, [1]), FailedPrecondition, "source 's' must send batch 1 next, got batch 2"),
        (batch(1, [1], source="new"), FailedPrecondition, "source 'new' must send batch 0 next, got batch 1"),
        (MALFORMED, RemoteProtocolError, r"a float64 tensor of shape \(1, 2\) must have 16 bytes, got 1"),
        (batch(1, np.zeros((1, 3))), DataError, "a record must have 2 features, got 3"),
        (batch(1, np.zeros((1, 2, 1))), DataError, r"features must have the shape \(records, 2\), got 3 axes"),
        (batch(1, [1, 2], [1.0]), DataError, r"labels must have the shape \(2,\)"),
        (batch(1, [np.nan]), DataError, "features must be finite numbers"),
        (batch(1, [-np.inf]), DataError, "features must be finite numbers"),
        (batch(1, [1], [np.nan]), DataError, "labels must be finite numbers"),
        (batch(1, [1], [7.0]), DataError, "labels of the logistic loss must be 0 or 1"),
        (batch(1, [1, 2], counts=[1]), DataError, "must add up to its records, 2, got 1"),
        (batch(1, [1], first_round=0), RemoteProtocolError, "records must be for round 1 or later, got round 0"),
        (batch(1, [1], first_round=10), DataError, "the run has rounds 0 to 9, got records for round 10"),
        (batch(1, [1], counts=[1] + [0] * 9), DataError, "the run has rounds 0 to 9, got records for round 10"),
        (batch(1, [1], first_round=2**64 - 1), DataError, "the run has rounds 0 to 9, got records for round"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused_whole(
    wrong: learner_pb2.SampleBatch, error: type[SottovoceError], text: str
) -> None:
    held = intake()
    held.put(batch(0, [5]))
    with pytest.raises(error, match=text):
        held.put(wrong)

    assert (held.filled_rounds, held.get_next_sequence("s"), held.get_next_sequence("new")) == (1, 1, 0)
    assert contents(held) == [[5], *[[]] * 9]


def test_what_a_feeder_may_say_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    held = intake(rounds=100_000)
    monkeypatch.setattr(module, "MAX_SOURCES", 2)
    for source in ("a", "b"):
        held.put(batch(0, [1], source=source))
    for wrong, text in (
        (batch(0, [1], source="c"), "at most 2 sources"),
        (batch(0, [1], source="x" * 129), "at most 128 characters, got 129"),
        (batch(1, [], source="a", counts=[0] * 65_537), "at most 65536 rounds, got 65537"),
    ):
        with pytest.raises(RemoteProtocolError, match=text):
            held.put(wrong)
    held.put(batch(1, [7], source="a"))
    assert contents(held, 4) == [[1], [1], [7], []]


def test_bytes_that_wait_are_counted() -> None:
    held = intake()
    held.put(batch(0, range(5), counts=[2, 0, 3], first_round=1))
    assert held.queued_bytes == 5 * 3 * 8
    assert [(held.take(t).size, held.queued_bytes) for t in range(4)] == [(0, 120), (2, 72), (0, 72), (3, 0)]


def test_labels_of_the_squared_loss_are_any_number() -> None:
    held = intake("ridge")
    held.put(batch(0, [1], [-123.5]))
    assert held.take(0).labels.tolist() == [-123.5]


@pytest.mark.parametrize("wrong", [batch(0, [987.5, np.nan]), batch(0, [1, 2], [1, 987.5])], ids=["features", "labels"])
def test_a_refusal_quotes_no_record(wrong: learner_pb2.SampleBatch) -> None:
    with pytest.raises(DataError) as failure:
        intake().put(wrong)
    assert "987" not in str(failure.value)


# ---- looked at once, and held by a snapshot --------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 2)), max_size=4),
    st.integers(0, 20),
    st.sampled_from([(range(20),), (range(3), range(5, 20)), (range(2, 9),)]),
    st.sampled_from([0.1, 1.0, 3.0]),
    st.sampled_from([2, 117]),
    st.integers(0, 2**32),
)
def test_another_one_goes_on_where_this_one_stood(
    fed: list[tuple[list[int], int]], done: int, stretches: tuple[range, ...], size: float, width: int, seed: int
) -> None:
    """Whatever was fed, with gaps, and however much of it was taken: records as they came, and within the loss's bounds."""
    loss, generator, first = RidgeLoss(), np.random.default_rng(seed), 0
    attendance = Participation(stretches, 20)
    held, other = (PlannedRecordQueue(width, loss, 20, attendance) for _ in range(2))
    wanted: dict[int, tuple[Any, Any]] = {}
    for sequence, (counts, gap) in enumerate(fed):
        first += gap
        counts = counts[: 20 - first]
        if not counts:
            break
        rows, labels = generator.normal(size=(sum(counts), width)) * size, generator.normal(size=sum(counts))
        held.put(batch(sequence, rows, labels, counts=counts, first_round=first))
        parts = zip(np.split(rows, np.cumsum(counts)), np.split(labels, np.cumsum(counts)), strict=True)
        wanted |= {t: part for t, part in enumerate(parts, first) if t in attendance and t < first + len(counts)}
        first += len(counts)

    def brought(one: PlannedRecordQueue, t: int) -> None:
        taken, (rows, labels) = one.take(t), wanted.get(t, (np.empty((0, width)), np.empty(0)))
        np.testing.assert_array_equal(taken.features, rows)
        np.testing.assert_array_equal(taken.labels, labels)
        ours, plain = enforce_bounds(loss, taken), enforce_bounds(loss, Batch(rows, labels))
        assert ours.features.tobytes() == plain.features.tobytes()
        assert ours.labels.tobytes() == plain.labels.tobytes()

    for t in range(done):
        brought(held, t)
    other.restore(unpack(pack(held.get_state(), {}), {}))
    assert (other.filled_rounds, other.queued_records, other.records) == (
        held.filled_rounds,
        held.queued_records,
        held.records,
    )
    assert held.queued_records == sum(len(labels) for t, (_, labels) in wanted.items() if t >= done)
    for t in range(done, 20):
        brought(held, t)
        brought(other, t)
    assert (held.queued_records, other.queued_records) == (0, 0)


def test_bounds_of_records_that_came_together_are_enforced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the loss of the run; whoever asks by another one has its own."""
    loss, enforce, seen = RidgeLoss(), RidgeLoss.enforce_bounds, list[int]()

    def counted(self: RidgeLoss, rows: FloatArray, labels: FloatArray) -> tuple[FloatArray, FloatArray]:
        seen.append(len(rows))
        return enforce(self, rows, labels)

    monkeypatch.setattr(RidgeLoss, "enforce_bounds", counted)
    held = PlannedRecordQueue(2, loss, 20, Participation((range(20),), 20))
    held.put(batch(0, [[3.0, 4.0]] * 20, [0.0] * 20, counts=[1] * 20))
    assert not seen
    for taken in map(held.take, range(20)):
        assert taken.features.tolist() == [[3.0, 4.0]]
        np.testing.assert_allclose(enforce_bounds(loss, taken).features, [[0.6, 0.8]], rtol=1e-15)
        np.testing.assert_allclose(
            enforce_bounds(RidgeLoss(feature_bound=0.5), taken).features, [[0.3, 0.4]], rtol=1e-15
        )
    assert seen == [20, *[1] * 20]
