"""What of a run's records its owner is told: that they end before the run, and that their labels tell little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sottovoce.experiment import prepare
from sottovoce.spec import parse_spec


def told(folder: Path, rows: list[str], data: dict[str, Any] | None = None, **spec: Any) -> dict[str, str]:
    """The cautions of a run of two learners, by code."""
    path = folder / "records.csv"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    document = {"learners": 2, "rounds": 4, "algorithm": "ldp-dol", **spec}
    document["data"] = {"source": str(path), **(data or {})}
    return {each.code: each.text for each in prepare(parse_spec(document, imports=True)).cautions}


def rows(*labels: Any, many: int = 10) -> list[str]:
    """With eight records of ten to learn from."""
    return ["age,label", *(f"{k},{labels[k % len(labels)]}" for k in range(many))]


@pytest.mark.parametrize(("rounds", "more"), [(4, {}), (400, {"reuse": True}), (400, {"batch_size": "all"})])
def test_records_that_last_are_no_matter(tmp_path: Path, rounds: int, more: dict[str, Any]) -> None:
    assert told(tmp_path, rows(0, 1), {"test_fraction": 0.2, **more}, rounds=rounds) == {}


def test_records_that_end_before_the_run_are_told(tmp_path: Path) -> None:
    text = told(tmp_path, rows(0, 1), {"test_fraction": 0.2, "batch_size": 2}, rounds=50)["RECORDS_END"]
    assert text.startswith("the records last 2 of 50 rounds at every learner: after that nothing more is learned")
    assert (
        "average_loss is over the rounds that bring records" in text and "set rounds to at most 2, take a smaller data.batch_size, or data.reuse" in text
    )


def test_whose_records_end_is_told_and_not_of_many(tmp_path: Path) -> None:
    several = [f"{k},{k % 2},{k if k < 40 else 0}" for k in range(90)]
    text = told(tmp_path, ["age,label,learner", *several], learners=40, rounds=40)["RECORDS_END"]
    assert text.startswith("the records last 1 of 40 rounds at learner-1 (1), learner-2 (1)")
    assert " and " in text and "learner-39" not in text and "learner-0 " not in text


def test_records_that_a_file_places_are_told_by_their_rounds(tmp_path: Path) -> None:
    placed = [f"{k},{k % 2},{k // 2}" for k in range(8)]
    assert told(tmp_path, ["age,label,round", *placed]) == {}
    text = told(tmp_path, ["age,label,round", *placed], rounds=9)["RECORDS_END"]
    assert "last " in text and text.endswith("set rounds to at most 4")


def test_who_is_away_needs_no_records(tmp_path: Path) -> None:
    gone = [{"learner": "learner-1", "first_round": 4}]
    assert set(told(tmp_path, rows(0, 1), {"test_fraction": 0.2}, rounds=4, absences=[])) == set()
    text = told(tmp_path, rows(0, 1), {"test_fraction": 0.2}, rounds=9, topology={"graph": "complete"}, absences=gone)
    assert text["RECORDS_END"].startswith("the records last 4 of 9 rounds at learner-0 (4): ")


@pytest.mark.parametrize("kind", ["logistic", "smoothed_hinge"])
def test_three_labels_of_a_loss_of_two_are_told(tmp_path: Path, kind: str) -> None:
    data = {"test_fraction": 0.2}
    text = told(tmp_path, rows(1, 2, 3), data, loss=kind)["CLASSES_JOINED"]
    assert text.startswith(
        f"3 labels under the {kind} loss, which has two classes: 1 is 0, 2 is 0, 3 is 1; take loss: "
    )
    assert "{kind: softmax, classes: 3}, or name in data.positive" in text
    assert told(tmp_path, rows(1, 2, 3), {**data, "positive": [1]}, loss=kind) == {}
    assert told(tmp_path, rows(1, 2, 3), data, loss={"kind": "softmax", "classes": 3}) == {}
    assert told(tmp_path, rows(1, 2), data, loss=kind) == {}


def test_labels_are_listed_up_to_some(tmp_path: Path) -> None:
    text = told(tmp_path, rows(*range(30), many=60), {"test_fraction": 0.2})["CLASSES_JOINED"]
    assert text.startswith("30 labels") and "11 is 0, ...; take" in text


@pytest.mark.parametrize("loss", ["logistic", {"kind": "softmax", "classes": 2}])
def test_one_class_is_told(tmp_path: Path, loss: Any) -> None:
    text = told(tmp_path, rows(1), {"test_fraction": 0.2}, loss=loss)["ONE_CLASS"]
    assert text.startswith("all records have the same class (1): there is nothing to tell apart")


def test_numbers_are_no_classes(tmp_path: Path) -> None:
    assert told(tmp_path, rows(1, 2, 3), {"test_fraction": 0.2}, loss={"kind": "ridge", "label_bound": 3.0}) == {}
    assert told(tmp_path, rows(1), {"test_fraction": 0.2}, loss={"kind": "ridge", "label_bound": 3.0}) == {}
