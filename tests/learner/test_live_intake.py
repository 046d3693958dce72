"""The intake of live records: every record once, in the order in which it came, in rounds that take what is there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce_core.arrays import as_floats
from sottovoce_core.errors import DataError, RemoteProtocolError, SottovoceError
from sottovoce_core.losses.linear import LogisticLoss
from sottovoce_core.network.participation_schedule import Participation
from sottovoce_learner.ingest.record_queue import LiveRecordQueue, RecordQueue
from sottovoce_learner.storage.snapshot import pack, unpack
from sottovoce_rpc.codec import to_tensor
from sottovoce_wire.v1 import learner_pb2
from tests.examples import small_spec

ROUNDS = 1_000


def live(most: int = 3, *, patient: bool = True, there: Participation | None = None) -> LiveRecordQueue:
    return LiveRecordQueue(
        2, LogisticLoss(), there or Participation((range(ROUNDS),), ROUNDS), most, waits_for_record=patient
    )


def batch(places: Any, source: str = "s", **fields: Any) -> learner_pb2.SampleBatch:
    """Records whose first feature is their position."""
    listed = list(places)
    rows = as_floats(np.column_stack([listed, listed]).reshape(len(listed), 2))
    usual = {"features": to_tensor(rows), "labels": to_tensor(np.ones(len(listed))), "positions": listed}
    return learner_pb2.SampleBatch(source=source, **{**usual, **fields})


def ids(taken: Any) -> list[int]:
    return [int(value) for value in taken.features[:, 0]]


def test_a_round_takes_the_oldest_that_are_there_and_no_more_than_it_may() -> None:
    held = live(3)
    held.put(batch(range(4)))
    held.put(batch([10, 20], "other"))
    assert (held.queued_records, held.records, held.filled_rounds) == (6, 6, 2)
    assert [ids(held.take(t)) for t in range(3)] == [[0, 1, 2], [3, 10, 20], []]
    assert (held.queued_records, held.queued_bytes, held.records, held.filled_rounds) == (0, 0, 6, 3)


def test_a_patient_round_waits_for_a_record_and_another_for_nothing() -> None:
    for patient in (True, False):
        held = live(patient=patient)
        assert [held.filled_rounds, held.take(0).size, held.filled_rounds] == ([0, 0, 1] if patient else [1, 0, 2])
        held.put(batch(range(7)))
        assert held.filled_rounds == 1 + 3


def test_the_spec_says_which_it_is() -> None:
    for clock, waits in (({}, True), ({"mode": "paced", "period_s": 1.0}, False), ({"mode": "data"}, True)):
        spec = small_spec(5, data={"source": "live", "features": 2, "batch_size": 4}, clock=clock)
        held = RecordQueue.from_spec(spec, 3)
        assert isinstance(held, LiveRecordQueue)
        assert held.filled_rounds == (0 if waits else 1)


@given(
    st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=8, unique=True).map(sorted), max_size=12),
    st.lists(st.integers(0, 5), max_size=12),
    st.integers(1, 4),
)
def test_a_record_said_again_is_passed_over_wherever_batches_are_cut(
    said: list[list[int]], rounds: list[int], most: int
) -> None:
    held, wanted, last, got = live(most), list[int](), -1, list[int]()
    for t, places in enumerate(said):
        held.put(batch(places))
        wanted += [place for place in places if place > last]
        last = max(last, places[-1])
        assert (held.get_position("s"), held.has_batch(batch(places))) == (last, True)
        if t in rounds:
            got += ids(held.take(t))
    assert held.records == len(wanted)
    while held.queued_records:
        got += ids(held.take(len(said)))
    assert got == wanted
    assert held.queued_bytes == 0


def test_sources_count_for_themselves() -> None:
    held = live()
    held.put(batch([5], "a"))
    held.put(batch([3], "b"))
    assert [held.get_position(source) for source in "abc"] == [5, 3, None]
    assert [held.get_next_sequence(source) for source in "abc"] == [0, 0, 0]


def test_without_positions_batches_count() -> None:
    held = live()
    for sequence in (0, 0, 1):
        held.put(
            batch([], sequence=sequence, features=to_tensor(np.full((1, 2), sequence)), labels=to_tensor(np.ones(1)))
        )
    assert (ids(held.take(0)), held.get_next_sequence("s"), held.get_position("s")) == ([0, 1], 2, None)


def test_away_it_learns_nothing_and_records_wait() -> None:
    held = live(2, there=Participation((range(2), range(5, 8)), 8))
    held.put(batch(range(9)))
    assert [ids(held.take(t)) for t in range(7)] == [[0, 1], [2, 3], [], [], [], [4, 5], [6, 7]]


WRONG = [
    (batch([1, 1]), RemoteProtocolError, "each above the one before"),
    (batch([7, 6]), RemoteProtocolError, "each above the one before"),
    (batch([5, 0]), RemoteProtocolError, "each above the one before"),  # its last one is here, its first is not
    (batch([1, 2], positions=[1]), RemoteProtocolError, "one for each of 2 records"),
    (batch([1], positions=[1, 2]), RemoteProtocolError, "one for each of 1 records"),
    (batch([1], first_round=3), RemoteProtocolError, "first_round and counts must be left out"),
    (batch([1], counts=[1]), RemoteProtocolError, "first_round and counts must be left out"),
    (batch([1], labels=to_tensor(np.full(1, 7.0))), DataError, "labels of the logistic loss must be 0 or 1"),
    (batch([1], features=to_tensor(np.full((1, 2), np.nan))), DataError, "features must be finite"),
]


@pytest.mark.parametrize(("wrong", "error", "text"), WRONG, ids=[text for _, _, text in WRONG])
def test_what_does_not_fit_is_refused_whole(
    wrong: learner_pb2.SampleBatch, error: type[SottovoceError], text: str
) -> None:
    held = live()
    held.put(batch([0]))
    with pytest.raises(error, match=text):
        held.put(wrong)
    assert (held.queued_records, held.records, held.batch_count, held.get_position("s")) == (1, 1, 1, 0)


def test_what_is_prepared_and_not_added_is_not_taken() -> None:
    """Such as where there was no room to write it down."""
    held = live()
    for _ in range(2):
        new = held.prepare(batch([0]))
        assert new is not None and (held.queued_records, held.get_position("s")) == (0, None)


@given(st.lists(st.integers(0, 5), max_size=10), st.integers(1, 4))
def test_another_one_goes_on_where_this_one_stood(taken: list[int], most: int) -> None:
    """From what it holds, and from the log: how many records each round took."""
    first, again, kept = live(most), live(4), list[tuple[int, learner_pb2.SampleBatch]]()
    rounds = []
    for t, count in enumerate(taken):
        said = batch(range(10 * t, 10 * t + count))
        if count:
            new = first.prepare(said)
            assert new is not None
            kept.append((new.first_round, said))
            first.add(new)
        rounds.append(ids(first.take(t)))
    for since, said in kept:
        again.replay(since, said)
    assert [ids(again.take(t, len(got))) for t, got in enumerate(rounds)] == rounds

    restored = live(most)
    restored.restore(unpack(pack(first.get_state(), {}), {}))
    for each in (again, restored):
        assert (each.queued_records, each.records, each.queued_bytes) == (
            first.queued_records,
            first.records,
            first.queued_bytes,
        )
        assert each.get_position("s") == first.get_position("s")
    left = [ids(first.take(len(taken) + t)) for t in range(50)]
    assert [ids(restored.take(len(taken) + t)) for t in range(50)] == left
