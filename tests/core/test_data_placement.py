"""Who gets which record in which round: a partition of the records, a schedule, and swaps that do what they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce_core.algorithms.ldp_dol.parameters import LdpDolSpec
from sottovoce_core.arrays import Batch
from sottovoce_core.data import Dataset, LearnerData, PlacedData
from sottovoce_core.data.partitions import (
    DirichletPartition,
    IidPartition,
    LabelPartition,
    Paper4060Partition,
    Partition,
)
from sottovoce_core.data.spec import DataSpec
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.runs.placement import place_data
from sottovoce_core.spec import RunSpec

NO_TEST = Batch(np.empty((0, 1)), np.empty(0))
"""A held-out part without records, so that all records are dealt out."""


def run_spec(rounds: int = 4, learners: int | tuple[str, ...] = 2, **data: Any) -> RunSpec:
    return RunSpec(rounds=rounds, learners=learners, algorithm=LdpDolSpec(name="ldp-dol"), data=DataSpec(**data))


def numbered(records: int, n_classes: int = 2, **fields: Any) -> Dataset:
    """Record i has the single feature i, so that every record can be told from its features."""
    classes = np.arange(records, dtype=np.int64) % n_classes
    labels = (2 * classes >= n_classes).astype(float)
    return Dataset("numbers", np.arange(float(records))[:, None], labels, classes, **fields)


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def ids(features: np.ndarray) -> list[int]:
    return [int(value) for value in features[:, 0]]


def learned(placed: PlacedData) -> list[list[list[int]]]:
    """Records by learner and round."""
    return [[ids(learner.batch(t).features) for t in range(placed.rounds)] for learner in placed.learners]


partitions: st.SearchStrategy[Partition] = st.one_of(
    st.just(IidPartition(kind="iid")),
    st.floats(0, 1).map(lambda mixed: LabelPartition(kind="by_label", iid_fraction=mixed)),
    st.floats(1e-3, 1e3).map(lambda concentration: DirichletPartition(kind="dirichlet", concentration=concentration)),
    st.just(Paper4060Partition(kind="paper_40_60")),
)
seeds = st.integers(0, 2**32)
tables = st.lists(st.integers(0, 4), min_size=1, max_size=60).map(lambda classes: np.array(classes, dtype=np.int64))


def owners(
    partition: Partition, classes: np.ndarray, n_learners: int, seed: int = 0, labels: np.ndarray | None = None
) -> np.ndarray:
    labels = classes.astype(float) if labels is None else labels
    return partition.owners(labels, classes, n_learners, np.random.default_rng(seed))


# ---- partition -------------------------------------------------------------------------------------------------------


@given(partitions, tables, st.integers(1, 7), seeds)
@settings(max_examples=60, deadline=None)
def test_every_record_gets_one_learner_and_the_same_one_again(
    partition: Partition, classes: np.ndarray, n_learners: int, seed: int
) -> None:
    owner = owners(partition, classes, n_learners, seed)
    assert owner.shape == classes.shape
    assert ((owner >= 0) & (owner < n_learners)).all()
    assert np.array_equal(owner, owners(partition, classes, n_learners, seed))


# From 30 records on, these partitions give each of at most 4 learners something.
@given(st.sampled_from(["iid", "by_label", "paper_40_60"]), st.integers(30, 60), st.integers(1, 4), seeds)
@settings(max_examples=60, deadline=None)
def test_placed_and_held_out_records_are_all_records(partition: str, records: int, n_learners: int, seed: int) -> None:
    spec = run_spec(learners=n_learners, partition=partition, seed=seed, intercept=False)
    placed = place_data(spec, numbered(records, n_classes=3))
    dealt = [i for learner in placed.learners for i in ids(learner.features)]
    assert sorted(dealt + ids(placed.test_features)) == list(range(records))


@given(tables, st.integers(1, 7), st.floats(0, 1), seeds)
@settings(max_examples=40, deadline=None)
def test_equal_partitions_differ_by_one_record_at_most(
    classes: np.ndarray, n_learners: int, mixed: float, seed: int
) -> None:
    for partition in (IidPartition(kind="iid"), LabelPartition(kind="by_label", iid_fraction=mixed)):
        sizes = np.bincount(owners(partition, classes, n_learners, seed), minlength=n_learners)
        assert sizes.max() - sizes.min() <= 1


def test_by_label_gives_most_learners_one_label() -> None:
    classes = np.arange(100) % 2
    owner = owners(LabelPartition(kind="by_label"), classes, 5)
    assert [set(classes[owner == i]) for i in range(5)] == [{0}, {0}, {0, 1}, {1}, {1}]


def test_by_label_sorts_by_label_before_class() -> None:
    """Odd digits are positive: the even ones must come first, though their classes lie in between."""
    classes = np.arange(40) % 4
    owner = owners(LabelPartition(kind="by_label"), classes, 2, labels=(classes % 2).astype(float))
    assert [set(classes[owner == i]) for i in range(2)] == [{0, 2}, {1, 3}]


def test_by_label_mixes_the_share_that_was_asked_for() -> None:
    classes = np.repeat([0, 1], 500)
    owner = owners(LabelPartition(kind="by_label", iid_fraction=0.4), classes, 2)
    # 40 % are dealt at random, half of them to the other side: 100 of 500, within six standard deviations.
    assert 40 < classes[owner == 0].sum() < 160


def test_paper_40_60_gives_a_class_to_its_learner_and_shares_the_rest() -> None:
    classes = np.repeat(np.arange(10), 100)
    owner = owners(Paper4060Partition(kind="paper_40_60"), classes, 5)
    for c in range(10):
        counts = np.bincount(owner[classes == c], minlength=5)
        assert counts[c % 5] == 40
        assert np.delete(counts, c % 5).tolist() == [15, 15, 15, 15]


def test_paper_40_60_alone_gets_everything() -> None:
    assert not owners(Paper4060Partition(kind="paper_40_60"), np.arange(10) % 3, 1).any()


def test_dirichlet_skew_falls_with_the_concentration() -> None:
    classes = np.repeat(np.arange(10), 200)

    def largest_share(concentration: float) -> float:
        owner = owners(DirichletPartition(kind="dirichlet", concentration=concentration), classes, 5)
        counts = np.array([np.bincount(owner[classes == c], minlength=5) for c in range(10)])
        return float(counts.max(axis=1).mean() / 200)

    assert largest_share(1e-3) > 0.95
    assert largest_share(1e4) < 0.25


def test_partition_deals_by_class_not_by_the_binary_label() -> None:
    placed = place_data(run_spec(learners=4, partition="by_label"), numbered(40, n_classes=4, test=NO_TEST))
    assert [{i % 4 for i in ids(learner.features)} for learner in placed.learners] == [{0}, {1}, {2}, {3}]


def test_classes_default_to_labels() -> None:
    dataset = Dataset("numbers", np.arange(8.0)[:, None], np.array([2.5, -1.0] * 4), test=NO_TEST)
    placed = place_data(run_spec(partition="by_label"), dataset)
    assert [set(learner.labels) for learner in placed.learners] == [{-1.0}, {2.5}]


def test_learner_without_records_is_refused_with_advice() -> None:
    with pytest.raises(SpecError, match=r"rome \(index 2\) gets none: take fewer learners"):
        place_data(run_spec(learners=("bern", "oslo", "rome")), numbered(3))
    with pytest.raises(SpecError, match=r"and rome \(index 2\), wien \(index 3\) get none: take fewer learners"):
        place_data(run_spec(learners=("bern", "oslo", "rome", "wien")), numbered(3))


# ---- held-out part and scaling ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fraction", "held"), [(0.25, 5), (0.001, 1), (0.999, 19)])
def test_held_out_share(fraction: float, held: int) -> None:
    """At least one record is held out, and at least one is left to learn from."""
    assert len(place_data(run_spec(learners=1, test_fraction=fraction), numbered(20)).test_labels) == held


def test_order_and_partition_do_not_change_the_split() -> None:
    first = place_data(run_spec(seed=3), numbered(40))
    given_order = place_data(run_spec(seed=3, order="given"), numbered(40))
    other_partition = place_data(run_spec(seed=3, partition="by_label"), numbered(40))
    assert np.array_equal(first.test_features, given_order.test_features)
    assert np.array_equal(first.test_features, other_partition.test_features)
    assert all(
        np.array_equal(a.features, b.features) for a, b in zip(first.learners, given_order.learners, strict=True)
    )
    assert not np.array_equal(first.test_features, place_data(run_spec(seed=4), numbered(40)).test_features)


def test_same_seed_same_placement() -> None:
    assert learned(place_data(run_spec(seed=9), numbered(40))) == learned(place_data(run_spec(seed=9), numbered(40)))


def test_test_part_of_the_source_is_used_in_place_of_a_split() -> None:
    dataset = numbered(6, test=Batch(np.array([[100.0]]), np.array([1.0])))
    placed = place_data(run_spec(intercept=False), dataset)
    assert placed.test_features.tolist() == [[100.0]]
    assert sorted(i for learner in placed.learners for i in ids(learner.features)) == list(range(6))


@pytest.mark.parametrize(("scale", "expected"), [("standard", (40 - 4) / 2), ("range", (40 - 2) / 4)])
def test_scale_constants_come_from_the_held_out_part(scale: str, expected: float) -> None:
    test = Batch(np.column_stack([np.tile([2.0, 6.0], 3), np.full(6, 7.1)]), np.zeros(6))
    assert test.features[:, 1].std() > 0, "rounding must make the constant column look as if it varied"
    dataset = Dataset("numbers", np.array([[40.0, 9.1]]), np.zeros(1), test=test)
    learner = place_data(run_spec(learners=1, scale=scale), dataset).learners[0]
    # The second column is constant in the held-out part: it is shifted and divided by 1.
    assert learner.features == pytest.approx(np.array([[expected, 2.0, 1.0]]))


@pytest.mark.parametrize("scale", ["standard", "range"])
def test_scaled_held_out_part_is_normalised(scale: str) -> None:
    scaled = place_data(run_spec(scale=scale), numbered(40)).test_features[:, 0]
    came = (scaled.mean(), scaled.std()) if scale == "standard" else (scaled.min(), scaled.max())
    assert came == pytest.approx((0, 1))


@pytest.mark.parametrize(("intercept", "n"), [(True, 2), (False, 1)])
def test_intercept_is_a_last_column_of_ones(intercept: bool, n: int) -> None:
    placed = place_data(run_spec(intercept=intercept), numbered(8))
    assert placed.n_features == n
    for features in (placed.test_features, *(learner.features for learner in placed.learners)):
        assert features.shape[1] == n
        assert not intercept or (features[:, -1] == 1).all()


def test_range_that_overflows_is_refused() -> None:
    dataset = numbered(1, test=Batch(np.array([[-1.7e308], [1.7e308]]), np.zeros(2)))
    with np.errstate(over="ignore"), pytest.raises(DataError, match="range of column 0"):
        place_data(run_spec(learners=1, scale="range"), dataset)


# ---- schedule --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 12), st.booleans(), st.sampled_from(["given", "shuffled"]))
@settings(max_examples=60, deadline=None)
def test_schedule(records: int, batch_size: int, rounds: int, reuse: bool, order: str) -> None:
    spec = run_spec(rounds, 1, batch_size=batch_size, reuse=reuse, order=order)
    learner = place_data(spec, numbered(records, test=NO_TEST)).learners[0]
    sizes = [learner.batch(t).size for t in range(rounds)]
    total = rounds * batch_size if reuse else min(records, rounds * batch_size)
    assert sizes == [min(batch_size, max(total - t * batch_size, 0)) for t in range(rounds)]
    # The first pass takes every record once; a later pass repeats the first one.
    assert len(set(learner.order[:records])) == min(records, total)
    assert learner.order.tolist() == [learner.order[k % records] for k in range(total)]
    if order == "given":
        assert ids(learner.features[learner.order[:records]]) == list(range(min(records, total)))


def test_reuse_wraps_within_a_batch() -> None:
    placed = place_data(run_spec(4, 1, batch_size=2, reuse=True, order="given"), numbered(3, test=NO_TEST))
    assert learned(placed) == [[[0, 1], [2, 0], [1, 2], [0, 1]]]
    assert placed.learners[0].uses().tolist() == [3, 3, 2]
    assert placed.learners[0].find_rounds(1) == [0, 2, 3]


def test_without_reuse_later_rounds_are_empty() -> None:
    placed = place_data(run_spec(4, 1, batch_size=2, order="given"), numbered(3, test=NO_TEST))
    assert learned(placed) == [[[0, 1], [2], [], []]]
    assert placed.learners[0].find_rounds(2) == [1]
    assert placed.learners[0].batch(3).features.shape == (0, 2)


@pytest.mark.parametrize(
    ("rounds", "data"),
    [
        (10**9, {}),
        (2**53, {}),
        (5, {"batch_size": 10**15, "reuse": True}),
        (2**27, {"batch_size": "all", "reuse": True}),
    ],
)
def test_more_places_than_memory_are_refused(rounds: int, data: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="at most 134217728 places for records"):
        place_data(run_spec(rounds, **data), numbered(6, test=NO_TEST))


def test_a_batch_may_be_larger_than_all_records() -> None:
    """Its end in a late round is beyond int64."""
    placed = place_data(run_spec(3000, 1, batch_size=2**53, intercept=False), numbered(6, test=NO_TEST))
    assert [len(each) for each in learned(placed)[0]] == [6, *[0] * 2999]


@pytest.mark.parametrize("reuse", [True, False])
def test_shuffled_order_is_shuffled_per_learner(reuse: bool) -> None:
    placed = place_data(run_spec(100, reuse=reuse), numbered(80, test=NO_TEST))
    orders = [learner.order[:40].tolist() for learner in placed.learners]
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])


@pytest.mark.parametrize("t", [-1, 4])
def test_round_outside_the_run_is_refused(t: int) -> None:
    with pytest.raises(IndexError, match=rf"round must be in \[0, 4\), got {t}"):
        place_data(run_spec(4), numbered(8)).learners[0].batch(t)


# ---- placement by the file -------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=30), seeds, st.booleans())
@settings(max_examples=60, deadline=None)
def test_explicit_placement_is_kept_exactly(where: list[tuple[int, int]], seed: int, reuse: bool) -> None:
    where = [*where, (0, 0), (1, 4), (2, 2)]
    dataset = numbered(len(where), learner=column(*(i for i, _ in where)), round=column(*(t for _, t in where)))
    placed = place_data(run_spec(5, 3, seed=seed, reuse=reuse, batch_size=2, partition="by_label"), dataset)
    expected = [[[k for k, at in enumerate(where) if at == (i, t)] for t in range(5)] for i in range(3)]
    assert [[sorted(records) for records in rounds] for rounds in learned(placed)] == expected
    assert placed.test_features.shape == (0, 2)
    assert placed.test_labels.shape == (0,)


def test_given_order_holds_within_a_round_of_the_file() -> None:
    # Long enough that a sort which is not stable would mix the rows of a round.
    dataset = numbered(200, learner=np.zeros(200, dtype=np.int64), round=1 - np.arange(200) % 2)
    assert learned(place_data(run_spec(2, 1, order="given"), dataset)) == [
        [list(range(1, 200, 2)), list(range(0, 200, 2))]
    ]


def test_learner_column_alone_is_scheduled_by_batch_size() -> None:
    dataset = numbered(5, learner=column(1, 0, 1, 0, 1))
    placed = place_data(run_spec(2, 2, batch_size=2, order="given"), dataset)
    assert learned(placed) == [[[1, 3], []], [[0, 2], [4]]]


def test_round_column_alone_keeps_rounds_and_partitions_learners() -> None:
    dataset = numbered(40, round=np.arange(40) % 4)
    placed = place_data(run_spec(4, 2), dataset)
    for t in range(4):
        assert sorted(learned(placed)[0][t] + learned(placed)[1][t]) == list(range(t, 40, 4))
    assert [len(learner.labels) for learner in placed.learners] == [20, 20]


def test_learner_names_of_the_file_are_those_of_the_run() -> None:
    dataset = numbered(3, learner=column(0, 1, 0), learner_names=("bern", "rome"))
    placed = place_data(run_spec(2, ("rome", "bern"), order="given", batch_size=2), dataset)
    assert [ids(learner.features) for learner in placed.learners] == [[1], [0, 2]]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"round": column(0, 3, 4)}, DataError, r"row 2 \(counted from 0\), column 'round' must be in \[0, 4\), got 4"),
        ({"learner": column(0, 2, 1)}, DataError, r"row 1 .*must be an index in \[0, 2\), got 2"),
        (
            {"learner": column(0, 0, 1), "learner_names": ("a", "mars")},
            DataError,
            "row 2 .*must be one of a, b, got another name",
        ),
        ({"learner": column(0, 0, 0)}, SpecError, r"b \(index 1\) gets none: give each rows in the column 'learner'"),
    ],
)
def test_explicit_placement_refused(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        place_data(run_spec(4, ("a", "b")), numbered(3, **fields))


def test_scale_without_held_out_part_is_refused() -> None:
    with pytest.raises(SpecError, match="takes its constants from held-out records, and this source has none"):
        place_data(run_spec(scale="standard"), numbered(2, learner=column(0, 1)))


# ---- stacking --------------------------------------------------------------------------------------------------------


def test_equal_batches_are_stacked_without_a_mask() -> None:
    placed = place_data(run_spec(2, 2, order="given", batch_size=2), numbered(4, learner=column(0, 0, 1, 1)))
    batch = placed.stack_round(0)
    assert batch.features[..., 0].tolist() == [[0, 1], [2, 3]]
    assert batch.labels.shape == (2, 2)
    assert batch.mask is None


def test_ragged_batches_are_padded_and_marked() -> None:
    placed = place_data(run_spec(2, 2, order="given", batch_size=2), numbered(4, learner=column(0, 1, 1, 1)))
    batch = placed.stack_round(0)
    assert batch.features.tolist() == [[[0, 1], [0, 0]], [[1, 1], [2, 1]]]
    assert batch.labels.tolist() == [[0, 0], [1, 0]]
    assert batch.mask is not None
    assert batch.mask.tolist() == [[1, 0], [1, 1]]


def test_round_in_which_nobody_learns_has_no_slots() -> None:
    placed = place_data(run_spec(2, 2), numbered(2, learner=column(0, 1)))
    assert placed.stack_round(1).features.shape == (2, 0, 2)
    assert placed.stack_round(1).mask is None


# ---- swaps -----------------------------------------------------------------------------------------------------------

NEW = np.array([-9.0])


@st.composite
def learner_data(draw: st.DrawFn) -> LearnerData:
    """Some records, used in any order, any number of times."""
    records = draw(st.integers(1, 6))
    rounds = draw(st.lists(st.lists(st.integers(0, records - 1), max_size=3), min_size=1, max_size=6))
    order = np.array([row for rows in rounds for row in rows], dtype=np.int64)
    offsets = np.cumsum([0, *map(len, rounds)])
    return LearnerData(np.arange(float(records))[:, None], np.zeros(records), order, offsets)


@given(learner_data())
@settings(max_examples=60, deadline=None)
def test_uses_and_rounds_are_counted_from_the_batches(data: LearnerData) -> None:
    rows = [data.rows(t).tolist() for t in range(data.rounds)]
    for row in range(len(data.labels)):
        assert data.uses()[row] == sum(r.count(row) for r in rows)
        assert data.find_rounds(row) == [t for t, r in enumerate(rows) if row in r]


@given(learner_data(), st.data())
@settings(max_examples=60, deadline=None)
def test_swapping_a_record_changes_all_its_uses_and_nothing_else(data: LearnerData, draw: st.DataObject) -> None:
    row = draw.draw(st.integers(0, len(data.labels) - 1))
    before = data.features.copy()
    other = data.with_record(row, NEW, 1.0)
    for t in range(data.rounds):
        swapped = data.rows(t) == row
        assert np.array_equal(other.batch(t).features[:, 0], np.where(swapped, NEW[0], data.batch(t).features[:, 0]))
        assert np.array_equal(other.batch(t).labels, swapped.astype(float))
    assert np.array_equal(data.features, before)


@given(learner_data().filter(lambda data: len(data.order) > 0), st.data())
@settings(max_examples=60, deadline=None)
def test_swapping_a_use_changes_that_use_alone(data: LearnerData, draw: st.DataObject) -> None:
    position = draw.draw(st.integers(0, len(data.order) - 1))
    order = data.order.copy()
    other = data.with_use(position, NEW, 1.0)
    expected = data.features[data.order, 0]
    expected[position] = NEW[0]
    assert np.array_equal(other.features[other.order, 0], expected)
    assert np.flatnonzero(other.labels[other.order]).tolist() == [position]
    assert np.array_equal(other.offsets, data.offsets)
    assert np.array_equal(data.order, order)


@pytest.mark.parametrize(
    ("index", "features", "label", "message"),
    [
        (2, NEW, 0.0, r"must be in \[0, 2\), got 2"),
        (-1, NEW, 0.0, r"must be in \[0, 2\), got -1"),
        (0, np.zeros(2), 0.0, r"must have the shape \(1,\), got \(2,\)"),
        (0, np.array([np.nan]), 0.0, "must be finite"),
        (0, NEW, np.inf, "must be finite"),
    ],
)
def test_swap_refused(index: int, features: np.ndarray, label: float, message: str) -> None:
    data = LearnerData(np.zeros((2, 1)), np.zeros(2), column(0, 1), column(0, 1, 2))
    with pytest.raises(DataError, match=message):
        data.with_record(index, features, label)
    with pytest.raises(DataError, match=message):
        data.with_use(index, features, label)


def test_adjacent_world_differs_in_one_learner() -> None:
    placed = place_data(run_spec(learners=3), numbered(12))
    other = placed.with_learner(1, placed.learners[1].with_record(0, np.array([-9.0, 1.0]), 1.0))
    assert [a is b for a, b in zip(placed.learners, other.learners, strict=True)] == [True, False, True]
    assert ids(other.learners[1].features)[0] == -9
    assert other.test_features is placed.test_features


# ---- everybody the same, everything at once --------------------------------------------------------------------------


def test_shared_records_are_everybodys_in_the_same_rounds() -> None:
    placed = place_data(run_spec(6, 3, partition={"kind": "shared"}, batch_size=2), numbered(20))

    first = placed.learners[0]
    assert len(first.labels) == 15 and sorted(first.order) == sorted(set(first.order)) and len(first.order) == 12
    for other in placed.learners[1:]:
        for t in range(6):
            assert (other.batch(t).features == first.batch(t).features).all()


@pytest.mark.parametrize(("reuse", "sizes"), [(False, [5, 0, 0]), (True, [5, 5, 5])])
def test_all_records_at_once(reuse: bool, sizes: list[int]) -> None:
    placed = place_data(run_spec(3, 3, batch_size="all", reuse=reuse), numbered(20))
    assert [placed.learners[0].batch(t).size for t in range(3)] == sizes
