"""The experiments of the papers: every item runs in its short form with the stored numbers, and the pages are up to date."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sottovoce_client.terminal import ignore_progress

sys.path.append(str(Path(__file__).parents[1]))  # the experiments are not installed
from experiments import page, run
from experiments.item import PAPERS, Check, Item, list_items, load_item
from experiments.run import read_results, run_item
from experiments.verdict import compare_with_stored, judge

ITEMS = [(paper, name) for paper in PAPERS for name in list_items(paper)]


@pytest.mark.slow
@pytest.mark.parametrize(("paper", "name"), [pytest.param(*each, id="-".join(each)) for each in ITEMS])
def test_the_short_form_gives_the_stored_numbers(
    paper: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOTTOVOCE_DATA", raising=False)
    item = load_item(paper, name)
    if item.needs is not None and find_spec(item.needs) is None:
        pytest.skip(f"needs {item.needs}, which is not installed")
    document = run_item(paper, name, "check", tmp_path, ignore_progress, "processes", 1)
    assert compare_with_stored(document, read_results(paper, name)["check"], item.forms["check"].tolerance) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("paper", "name"), [pytest.param(*each, id="-".join(each)) for each in ITEMS])
def test_an_item_says_what_the_paper_shows_and_what_comes_out(paper: str, name: str) -> None:
    item = load_item(paper, name)
    assert item.conclusion
    assert {"quick", "check"} <= set(item.forms)
    for variant, printed in item.paper.items():
        assert variant in item.variants
        assert set(printed) <= set(item.measures)
        assert all(len(values) == len(item.settings) for values in printed.values())
    for check in item.checks:
        assert check.measure in item.measures
        assert set(check.variants) <= set(item.variants)
        assert set(check.settings) <= set(item.settings)
    assert set(item.plot) | set(item.names) <= set(item.measures)


def test_the_pages_and_their_figures_are_those_of_the_stored_results() -> None:
    shown = set()
    for paper in PAPERS:
        text = (page.DOCS / f"{paper}.md").read_text(encoding="utf-8")
        assert "\n".join(page.describe_paper(paper)) == text, "run `python -m experiments --pages`"
        shown |= set(re.findall(r"\]\(../images/papers/([^)]+)\)", text))
    assert shown == {path.name for path in page.IMAGES.iterdir()}


# ---- verdicts --------------------------------------------------------------------------------------------------------


def make_item(*checks: dict[str, Any], **fields: Any) -> Item:
    return Item(
        title="Table 1", shows="More is better.", base={}, measures=("loss",), forms={},
        variants={"a": {}, "b": {}}, settings={"low": {}, "high": {}},
        paper={"a": {"loss": (1.0, 2.0)}, "b": {"loss": (None, 4.0)}},
        checks=tuple(map(Check.model_validate, checks)), **fields,
    )  # fmt: skip


def make_document(*values: float | None) -> dict[str, Any]:
    pairs = [(variant, setting) for variant in "ab" for setting in ("low", "high")]
    return {
        "rows": [
            {"variant": variant, "setting": setting, "measures": {"loss": {"rounds": [1, 9], "mean": [5.0, value]}}}
            for (variant, setting), value in zip(pairs, values, strict=True)
        ]
    }


WITHIN = {"rule": "within", "measure": "loss", "tolerance": 0.5}
RISING = {"rule": "increasing", "measure": "loss"}
OVER_ROUNDS = {"rule": "decreasing", "measure": "loss", "along": "rounds"}
VARIANTS = {"rule": "increasing", "measure": "loss", "along": "variants", "settings": ["high"]}


@pytest.mark.parametrize(
    ("checks", "values", "verdict"),
    [
        ([WITHIN, RISING], (1.0, 2.4, 3.0, 4.0), "reproduced"),
        ([WITHIN, RISING], (1.0, 2.6, 3.0, 4.0), "in shape"),
        ([WITHIN, RISING], (1.0, 2.0, 5.0, 4.0), "not reproduced"),
        ([WITHIN], (1.0, 2.6, 3.0, 4.0), "not reproduced"),
        ([RISING], (1.0, 2.0, 3.0, 4.0), "in shape"),
        ([RISING], (1.0, None, 3.0, 4.0), "not reproduced"),
        ([{**WITHIN, "factor": 1.5}], (1.5, 3.0, 9.0, 6.0), "reproduced"),
        ([{**WITHIN, "factor": 1.5}], (1.5, 3.1, 9.0, 6.0), "not reproduced"),
        ([OVER_ROUNDS], (4.0, 4.0, 4.0, 4.0), "in shape"),
        ([OVER_ROUNDS], (4.0, 4.0, 6.0, 4.0), "not reproduced"),
        ([VARIANTS], (9.0, 2.0, 3.0, 4.0), "in shape"),
        ([VARIANTS], (9.0, 5.0, 3.0, 4.0), "not reproduced"),
        ([], (1.0, 2.0, 3.0, 4.0), "not stated"),
    ],
)
def test_a_verdict_follows_from_the_checks(checks: list[Any], values: tuple[Any, ...], verdict: str) -> None:
    found, reasons = judge(make_item(*checks), make_document(*values))
    assert found == verdict
    assert bool(reasons) == (
        verdict not in ("reproduced", "not stated") and not (verdict == "in shape" and len(checks) == 1)
    )


def test_a_finding_is_confirmed_or_not() -> None:
    above = {"rule": "above", "measure": "loss", "factor": 2.0}
    assert judge(make_item(above, is_finding=True), make_document(2.0, 4.0, 0.0, 8.0))[0] == "confirmed"
    verdict, reasons = judge(make_item(above, is_finding=True), make_document(2.0, 3.9, 0.0, 8.0))
    assert (verdict, reasons) == ("not confirmed", ["loss of a, high: the paper has 2, we have 3.9"])


def test_numbers_that_differ_by_more_than_a_hundredth_are_named() -> None:
    stored = make_document(1.0, 2.0, 3.0, 4.0)
    assert compare_with_stored(make_document(1.009, 2.0, 3.0, 4.0), stored, 0.01) == []
    (line,) = compare_with_stored(make_document(1.02, 2.0, 3.0, 4.0), stored, 0.01)
    assert line == "loss of a, low: stored [5.0, 1.0], now [5.0, 1.02]"
    assert len(compare_with_stored(stored, {}, 0.01)) == 4


def test_an_interrupted_command_goes_on_with_the_missing_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str]] = []

    def run_job(job: Any) -> dict[str, Any]:
        if len(done) == 1 and not resumed:
            raise KeyboardInterrupt
        done.append((job.variant, job.setting))
        return {"variant": job.variant, "setting": job.setting, "measures": {}}

    monkeypatch.setattr(run, "_run_job", run_job)
    monkeypatch.setattr(run, "load_item", lambda *_: make_item())
    resumed = False
    with pytest.raises(KeyboardInterrupt):
        run_item("dpsda", "table-9", "full", tmp_path, ignore_progress, "processes", 1)
    (kept,) = tmp_path.iterdir()
    assert len(json.loads(kept.read_text(encoding="utf-8"))["rows"]) == 1
    resumed = True
    document = run_item("dpsda", "table-9", "full", tmp_path, ignore_progress, "processes", 1)
    assert done == [("a", "low"), ("a", "high"), ("b", "low"), ("b", "high")]
    assert [(row["variant"], row["setting"]) for row in document["rows"]] == done


def test_rounds_until_a_threshold_are_infinite_if_the_run_does_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    item = Item(
        title="Table 1", shows="Learners agree.", base={"rounds": 3, "algorithm": {"name": "ldp-dol"}}, forms={"quick": {}},
        measures=("consensus_error", "rounds_until_any", "rounds_until_negative"),
        thresholds={"rounds_until_any": ("consensus_error", 1e9), "rounds_until_negative": ("consensus_error", -1.0)},
        checkpoints=(2, 3),
    )  # fmt: skip
    monkeypatch.setattr(run, "load_item", lambda *_: item)
    measures = run._run_job(run._Job("dpsda", "table-9", "quick", "", ""))["measures"]
    assert measures["rounds_until_any"] == {"rounds": [3], "mean": [2.0]}
    assert measures["rounds_until_negative"] == {"rounds": [3], "mean": ["inf"]}
