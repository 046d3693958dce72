"""What the owner of a run is told before it begins: its budget or its records end early, or its labels tell little."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sottovoce_core.errors import BudgetExhausted
from sottovoce_core.experiment import estimate_live_run, prepare
from sottovoce_core.runs.run import format_above
from sottovoce_core.spec import parse_spec
from sottovoce_core.yaml_files import parse_yaml
from sottovoce_learner.privacy_filter import PrivacyFilter


def told(folder: Path, rows: list[str], data: dict[str, Any] | None = None, **spec: Any) -> dict[str, str]:
    """The cautions of a run of two learners, by code."""
    path = folder / "records.csv"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    document = {"learners": 2, "rounds": 4, "algorithm": "ldp-dol", **spec}
    document["data"] = {"source": str(path), **(data or {})}
    return {each.code: each.text for each in prepare(parse_spec(document, allow_imports=True)).warnings}


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
        "average_loss is over the rounds that bring records" in text
        and "set rounds to at most 2, take a smaller data.batch_size, or data.reuse" in text
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
    assert set(told(tmp_path, rows(0, 1), {"test_fraction": 0.2}, rounds=4, offline_intervals=[])) == set()
    text = told(
        tmp_path, rows(0, 1), {"test_fraction": 0.2}, rounds=9, topology={"graph": "complete"}, offline_intervals=gone
    )
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
    assert text.startswith("30 labels") and "9 is 0 and 20 more; take" in text


@pytest.mark.parametrize("loss", ["logistic", {"kind": "softmax", "classes": 2}])
def test_one_class_is_told(tmp_path: Path, loss: Any) -> None:
    text = told(tmp_path, rows(1), {"test_fraction": 0.2}, loss=loss)["ONE_CLASS"]
    assert text.startswith("all records have the same class (1): there is nothing to distinguish")


def test_numbers_are_no_classes(tmp_path: Path) -> None:
    assert told(tmp_path, rows(1, 2, 3), {"test_fraction": 0.2}, loss={"kind": "ridge", "label_bound": 3.0}) == {}
    assert told(tmp_path, rows(1), {"test_fraction": 0.2}, loss={"kind": "ridge", "label_bound": 3.0}) == {}


# ---- a budget that is less than the planned rounds cost ---------------------------------------------------------------

BUDGETED: list[dict[str, Any]] = [
    {"algorithm": {"name": "ldp-dol", "sigma": 2.0}, "privacy": {"budget": 1.5}},
    {"algorithm": {"name": "ldp-dol", "sigma": [1.0, 2.0]}, "privacy": {"budget": [0.3, 1.5]}},
    {"algorithm": {"name": "dola", "noise": {"kind": "calibrated", "epsilon": 3.0}}, "privacy": {"budget": 2.0}},
    {
        "algorithm": {"name": "dola", "noise": {"kind": "calibrated", "epsilon": 90.0, "charged": "every_round"}},
        "privacy": {"budget": 2.0},
    },
    {"algorithm": {"name": "dpsda-c", "epsilon": 4.0}, "data": {"partition": "shared"}, "privacy": {"budget": 1.0}},
]  # fmt: skip


@pytest.mark.parametrize("changes", BUDGETED, ids=lambda each: str(each["algorithm"]))
def test_a_budget_that_ends_before_the_run_is_told_with_the_round_and_what_fits(changes: dict[str, Any]) -> None:
    document = {"rounds": 30, "learners": 2, "data": {"reuse": True}, "loss": {"ridge": 0.0}, **changes}
    document["data"] = {"reuse": True, **document["data"]}
    found = prepare(parse_spec(document, allow_imports=True))
    text = next(each.text for each in found.warnings if each.code == "BUDGET_ENDS")
    told = {int(name): int(t) for name, t in re.findall(r"learner-(\d) in round (\d+)", text)}
    stopped = {}
    for i, own in enumerate(found.data.learners):
        books = PrivacyFilter(found.run.algorithm.accountant(i), found.run.budget(i))
        t = 0
        try:
            for t, records in enumerate(np.diff(own.offsets).tolist()):
                books.charge(books.admit_round(t))
                books.advance(records)
        except BudgetExhausted:
            stopped[i] = t
    assert told == stopped and stopped

    rounds, budget = re.search(r"rounds: (\d+)", text), re.search(r"privacy\.budget: (\[[^]]*\]|[\d.e+-]+),", text)
    assert budget is not None
    fitting = [{"privacy": {"budget": parse_yaml(budget[1])}}] + ([{"rounds": int(rounds[1])}] if rounds else [])
    for fits in fitting:
        cautions = prepare(parse_spec({**document, **fits}, allow_imports=True)).warnings
        assert "BUDGET_ENDS" not in {each.code for each in cautions}, fits


def test_a_budget_that_is_below_the_cost_by_a_rounding_error_is_told_with_the_digits_that_show_it() -> None:
    document = parse_yaml((Path(__file__).parents[2] / "examples" / "wards.yaml").read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    found = prepare(parse_spec({**document, "privacy": {"budget": 4.0}}, allow_imports=True))
    text = next(each.text for each in found.warnings if each.code == "BUDGET_ENDS")
    cost = re.search(r"budget 4 is below what 8 rounds cost, epsilon ([\d.]+) at", text)
    assert cost is not None and 4.0 < float(cost[1]) < 4.0 + 1e-6
    assert format_above(2.0, 3.0) == "2" and format_above(3.5, 3.0) == "3.5" and format_above(math.inf, 3.0) == "inf"


def test_a_budget_that_is_enough_or_is_what_ends_the_run_is_no_matter() -> None:
    document = {"rounds": 30, "learners": 2, "algorithm": {"name": "ldp-dol", "sigma": 2.0}, "privacy": {"budget": 1e4}}
    assert "BUDGET_ENDS" not in {each.code for each in prepare(parse_spec(document, allow_imports=True)).warnings}
    live = {**document, "rounds": None, "data": {"source": "live", "features": 3}, "privacy": {"budget": 1.5}}
    assert prepare(parse_spec(live, allow_imports=True), live=True).warnings == ()
    (caution,) = estimate_live_run(parse_spec(live, allow_imports=True), 30, 1.0).warnings
    (planned,) = prepare(parse_spec({**live, "rounds": 30}, allow_imports=True), live=True).warnings
    assert caution.code == planned.code == "BUDGET_ENDS" and caution.text == planned.text
