"""Partitions by labels, by consecutive records, and copies for all learners."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce_core.arrays import Batch
from sottovoce_core.data import Dataset, PlacedData
from sottovoce_core.data.partitions import ClassPartition
from sottovoce_core.data.spec import DataSpec
from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import Experiment
from sottovoce_core.runs.placement import place_data
from sottovoce_core.spec import RunSpec, parse_spec

NAMES = ("ann", "ben", "cy")
LETTERS = ("a", "b", "c", "d")


def place(partition: Any, records: int = 24, named: bool = True, **data: Any) -> PlacedData:
    """Place records for three learners: record i has the feature i and the class i mod 4; none is held out."""
    document = {"rounds": 6, "learners": NAMES, "algorithm": "ldp-dol"}
    document["data"] = {"intercept": False, "partition": partition, **data}
    classes = np.arange(records, dtype=np.int64) % 4
    dataset = Dataset(
        "numbers",
        np.arange(float(records))[:, None],
        (classes // 2).astype(np.float64),
        classes,
        test=Batch(np.empty((0, 1)), np.empty(0)),
        class_names=LETTERS if named else (),
    )
    return place_data(parse_spec(document, allow_imports=False), dataset)


def records_of(placed: PlacedData) -> list[list[int]]:
    return [sorted(own.features[:, 0].astype(int).tolist()) for own in placed.learners]


# ---- by labels -------------------------------------------------------------------------------------------------------


def test_named_labels_go_to_their_learners_and_one_of_several_is_split_evenly() -> None:
    placed = records_of(place({"kind": "classes", "labels": {"ann": ["a", "b"], "ben": ["b"], "cy": ["c"]}}))
    assert [{k % 4 for k in own} for own in placed] == [{0, 1}, {1}, {2}]
    assert [len(own) for own in placed] == [6 + 3, 3, 6], "those of d go to nobody"
    assert len({k for own in placed for k in own}) == 18


def test_numbers_and_words_name_labels_as_a_file_has_them() -> None:
    pytest.importorskip("sklearn")
    labels = {"ann": [0, "1"], "ben": ["2"], "cy": [3]}
    experiment = Experiment(
        rounds=3,
        learners=NAMES,
        algorithm="ldp-dol",
        loss={"kind": "softmax", "classes": 10},
        data={"source": "digits", "partition": {"kind": "classes", "labels": labels}},
    )
    assert [set(own.labels) for own in experiment.records.learners] == [{0.0, 1.0}, {2.0}, {3.0}]


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_number_of_labels_is_that_of_every_learner(n_classes: int, each: int, n_learners: int, seed: int) -> None:
    classes = np.arange(n_classes * 30, dtype=np.int64) % n_classes
    partition, rng = ClassPartition(kind="classes", labels=each), np.random.default_rng(seed)
    if each > n_classes or each * n_learners < n_classes:
        with pytest.raises(SpecError, match=r"data\.partition\.labels must"):
            partition.owners(classes.astype(float), classes, n_learners, rng)
        return
    owners = partition.owners(classes.astype(float), classes, n_learners, rng)
    assert (owners >= 0).all()
    assert [len(set(classes[owners == i])) for i in range(n_learners)] == [each] * n_learners
    holders = [len(set(owners[classes == c])) for c in range(n_classes)]
    assert max(holders) - min(holders) <= 1


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (5, "must be at most the number of labels, 4, got 5"),
        (1, "3 learners of 1 have 3 of 4: set it to at least 2, or name"),
        ({"ann": ["a"], "ben": ["b"]}, "a list for every learner, and has none for cy"),
        (
            {"ann": ["a"], "ben": ["b"], "cyn": ["c"]},
            "learners of the run, ann, ben, cy, got 'cyn'; did you mean 'cy'?",
        ),
        ({"ann": ["a"], "ben": ["b"], "cy": ["e", 7]}, "labels that occur, a, b, c, d, got e, 7"),
        ({"ann": ["a"], "ben": ["b"], "cy": []}, "labels.cy: must have at least 1 items"),
        (0, "labels: must be greater than 0, got 0"),
        (True, "must be a whole number or a mapping of fields, got True"),
        ("a", "must be a whole number or a mapping of fields, got 'a'"),
    ],
)
def test_labels_refused(labels: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message.replace("?", r"\?")):
        place({"kind": "classes", "labels": labels})


def test_labels_of_a_regression_are_refused() -> None:
    with pytest.raises(SpecError, match="those of this loss are numbers: take a loss of classes"):
        place({"kind": "classes", "labels": {name: ["a"] for name in NAMES}}, named=False)


def test_the_kind_alone_shows_what_it_needs() -> None:
    with pytest.raises(SpecError, match=r"labels is required: write partition: \{kind: classes, labels: 2\}"):
        place("classes")


# ---- consecutive records ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (None, [range(8), range(8, 16), range(16, 24)]),
        ([3, 1, 5], [range(3), range(3, 4), range(4, 9)]),
        (2, [range(2), range(2, 4), range(4, 6)]),
    ],
)
def test_consecutive_records_in_the_order_of_the_source(counts: Any, expected: list[range]) -> None:
    partition = {"kind": "contiguous", **({} if counts is None else {"counts": counts})}
    assert records_of(place(partition)) == [list(each) for each in expected]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([1, 2], "must have one number for each of the 3 learners, got 2"),
        ([10, 10, 5], "must add up to at most 24, the records that are not held out, got 25: lower the counts"),
        ([1, 0, 1], "counts.1: must be greater than 0"),
    ],
)
def test_counts_refused(counts: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        place({"kind": "contiguous", "counts": counts})


def test_a_learner_without_consecutive_records_is_refused() -> None:
    with pytest.raises(SpecError, match=r"cy \(index 2\) gets none"):
        place("contiguous", records=2)


# ---- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_order", [False, True])
def test_copies_are_of_the_same_records_in_one_order_or_in_their_own(own_order: bool) -> None:
    placed = place({"kind": "shared", "own_order": own_order}, batch_size=4)
    orders = [own.order.tolist() for own in placed.learners]
    assert records_of(placed) == [list(range(24))] * 3
    assert all(sorted(order) == list(range(24)) for order in orders)
    assert (orders[0] == orders[1] == orders[2]) is not own_order
    assert placed.learners[0].features is placed.learners[2].features, "one array for all"


def test_an_own_order_needs_an_order_that_is_not_given() -> None:
    with pytest.raises(
        SpecError, match="own_order must be left out with order: given, which is the same for all"
    ) as caught:
        place({"kind": "shared", "own_order": True}, order="given")
    assert "must be in a file" not in str(caught.value)


def test_learners_with_an_own_order_may_be_offline_and_others_may_not() -> None:
    document = {
        "rounds": 6,
        "learners": NAMES,
        "algorithm": "ldp-dol",
        "topology": {"graph": "complete"},
        "offline_intervals": [{"learner": "cy", "first_round": 2}],
    }

    def run(partition: dict[str, Any]) -> Experiment:
        return Experiment.model_validate({**document, "data": {"source": "digits", "partition": partition}})

    placed = run({"kind": "shared", "own_order": True}).records
    assert np.diff(placed.learners[2].offsets).tolist() == [1, 1, 0, 0, 0, 0]
    with pytest.raises(SpecError, match=r"offline_intervals must be empty with .*own_order to true"):
        run({"kind": "shared"}).records  # noqa: B018


@pytest.mark.parametrize("own_order", [False, True])
def test_copies_cost_the_sum_over_learners(own_order: bool) -> None:
    """Every learner sends messages about the same record, also if the algorithm does not know that."""
    fields: dict[str, Any] = {"rounds": 8, "learners": 3, "algorithm": "ldp-dol", "topology": {"graph": "complete"}}
    alone = Experiment(**fields, data={"source": "digits"})
    copies = Experiment(**fields, data={"source": "digits", "partition": {"kind": "shared", "own_order": own_order}})
    assert copies.run.has_shared_records and not alone.run.has_shared_records
    assert copies.epsilon() == pytest.approx(3 * alone.epsilon())


def test_an_algorithm_of_one_global_loss_refuses_own_orders() -> None:
    experiment = Experiment(
        rounds=8,
        algorithm={"name": "dpsda-c", "sigma": 1.0},
        loss={"ridge": 0.0},
        data={"source": "digits", "partition": {"kind": "shared", "own_order": True}},
    )
    with pytest.raises(SpecError, match=r"set data\.partition to shared, without own_order"):
        experiment.records  # noqa: B018


def test_partitions_are_written_and_read_again() -> None:
    for partition in (
        {"kind": "classes", "labels": {"learner-0": ["1", 2]}},
        {"kind": "contiguous", "counts": [4, 5]},
        {"kind": "shared", "own_order": True},
    ):
        data = DataSpec.model_validate({"partition": partition})
        spec = RunSpec.model_validate({"rounds": 2, "algorithm": "ldp-dol", "data": data})
        assert parse_spec(spec.model_dump(mode="json"), allow_imports=False).data == data
