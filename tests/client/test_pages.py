"""What holds of every page: names are text, whatever they are; every figure and table of it is on it; one skeleton, one file."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from sottovoce_client.auditing.foreign_audit import _build_page
from sottovoce_client.auditing.foreign_runs import ForeignRequest, ForeignRuns
from sottovoce_client.auditing.report import build_audit_page
from sottovoce_client.privacy.budget import BudgetRequest, _budget_page, _compute_line
from sottovoce_client.privacy.tradeoff import TradeoffRequest, _Measurement, _solve, _tradeoff_page
from sottovoce_client.reports.page import Page, PageTable
from sottovoce_client.reports.run_report import build_run_page
from sottovoce_client.runs.compare import make_compare_page
from sottovoce_client.runs.summary import DetectionSummary
from sottovoce_core.auditing.audit import Audit, audit_simulated
from sottovoce_core.auditing.foreign.audit import ForeignAudit, audit_traffic
from sottovoce_core.auditing.foreign.repeats import Anomaly
from sottovoce_core.auditing.plan import plan_audit
from sottovoce_core.experiment import PreparedRun
from sottovoce_core.results import Facts, Result, Results
from sottovoce_core.runs.curves import Curve, Curves
from sottovoce_core.runs.run import Run
from sottovoce_lab.gallery import _build_gallery_page
from sottovoce_lab.reconstruction import Reconstruction, ReferenceGuess
from sottovoce_lab.simulated_attacks import Gallery, MembershipInference, _GuessSummary
from tests.claims import SETUPS
from tests.client.summaries import learner, summary
from tests.client.test_report import Page as Parsed
from tests.core.test_audit_foreign import CENTRED, conversations, raw_later
from tests.examples import made_up

HOSTILE = '<script>alert("&")'
"""As a name, a source or a label: if it were not escaped, it would swallow the rest of the page."""


def named(run: Run, name: str) -> Run:
    """The same run, of which everything that has a name has this one."""
    return replace(run, spec=run.spec.model_copy(update={"name": name, "learners": (name, *run.spec.names[1:])}))


def of_a_run(name: str) -> Page:
    made = summary(3, 20)
    learners = (learner(name, 20), *made.learners[1:])
    promise = replace(made.guarantee, algorithm=name, proof=name, constants=((name, 1.0, name),))
    capture = replace(made.capture, location=name, sender=name) if made.capture else None
    told: dict[str, Any] = {
        "run_id": name,
        "detail": name,
        "offline_intervals": (name,),
        "missing_traffic": (name,),
        "detections": DetectionSummary(1, (name,), name),
        "name": name,
        "data": name,
        "learners": learners,
        "warnings": ((name, name),),
        "spec_yaml": name,
    }
    return build_run_page(replace(made, guarantee=promise, capture=capture, version=name, **told))


@cache
def audited() -> Audit:
    setup = replace(SETUPS["ldp-dol"], rounds=3)
    run = setup.build()
    return audit_simulated(plan_audit(run, made_up(run.spec, setup.n_features), 0, runs=20, seed=1))


def of_an_audit(name: str) -> Page:
    done = audited()
    plan = replace(done.plan, run=named(done.plan.run, name))
    return build_audit_page(replace(done, source=name, plan=plan), name, 1)


@cache
def audited_traffic() -> ForeignAudit:
    return audit_traffic(conversations(raw_later, 60), claim=1.0, noise={"total": CENTRED})


def of_a_foreign_audit(name: str) -> Page:
    done = replace(audited_traffic(), anomalies=(Anomaly("repetition", name, 1, name),))
    return _build_page(done, ForeignRuns(capture_digests={name: "ab"}), ForeignRequest(name, claim=1.0), "cd")


def of_a_gallery(name: str) -> Page:
    pictures = np.linspace(0, 1, 8).reshape(2, 4)
    guesses = {each: ReferenceGuess(pictures, 0.2) for each in ("blank", "mean record", "random record")}
    rebuilt = Reconstruction(pictures, pictures, 0.1, 0.9, 0.0, math.nan, 1.0, 7, guesses)
    attacked = {name: rebuilt, f"{name} again": rebuilt}
    rates = np.array([0.0, 0.5, 1.0])
    guessed = _GuessSummary(runs=10, correct=6, low=0.3, high=0.8, bound=0.0, detections=rates, false_alarms=rates)
    membership = MembershipInference(name, name, name, 1.0, True, guessed)
    attacks = {"linear": attacked, "network": {}, "gossip": attacked, "spec": attacked, "capture": attacked}
    return _build_gallery_page(Gallery(attacks, (membership,), name))


def of_a_comparison(name: str) -> Page:
    curves = {key: Curve(np.array([[0.9, 1.1]] * 3), None) for key in ("accuracy", "average_loss")}
    facts = Facts(name, {}, name, "wire", math.inf, 1.0, 2.0, 4, 10, (name,), name, 100.0)
    result = Result(facts, Curves(np.arange(1, 4), curves, np.arange(1.0, 4.0)))
    return make_compare_page(Results((result, result)))


def of_a_budget(name: str) -> Page:
    setup = SETUPS["ldp-dol"]
    run = named(setup.build(), name)
    prepared = PreparedRun(run, made_up(run.spec, setup.n_features))
    question = BudgetRequest(delta=1e-6, group_size=2, include_per_record=True)
    return _budget_page(run, [_compute_line(prepared, i, question) for i in range(2)], question)


def of_a_tradeoff(name: str) -> Page:
    measured = [_Measurement(a, 0.2 * math.exp(-25 * a) + 0.1, 0.01) for a in (0.02, 0.1, 0.5, 1.0)]
    return _tradeoff_page(
        named(SETUPS["ldp-dol"].build(), name).spec, _solve(measured, TradeoffRequest(())), TradeoffRequest(())
    )


PAGES = (of_a_run, of_an_audit, of_a_foreign_audit, of_a_gallery, of_a_comparison, of_a_budget, of_a_tradeoff)


@pytest.mark.parametrize("made", PAGES)
def test_a_name_is_text_on_every_page(made: Callable[[str], Page]) -> None:
    text, honest = made(HOSTILE).to_html(), Parsed(made("wards").to_html())
    shown = Parsed(text)
    assert "<script>alert" not in text
    assert shown.text.count("<script>alert") >= 2 and HOSTILE in shown.text
    assert shown.tags == honest.tags


@pytest.mark.parametrize("made", PAGES)
def test_every_figure_and_table_is_on_the_page_once(made: Callable[[str], Page]) -> None:
    page = made("wards")
    text = page.to_html()
    names = [each.name for each in page.elements]
    assert len(set(names)) == len(names) and any(page.elements)
    for each in page.elements:
        mark = each.__html__() if isinstance(each, PageTable) else f'id="plot-{each.name}"'
        assert not each or text.count(mark) == 1, each.name


@pytest.mark.parametrize("made", PAGES)
def test_every_page_has_the_one_skeleton_and_loads_nothing(made: Callable[[str], Page]) -> None:
    text = made("wards").to_html()
    shown = Parsed(text)
    assert text.startswith("<!doctype html>") and "default-src 'none'" in text
    assert len(shown.scripts) == 1 and len(text.encode()) < 500_000
    assert "link" not in shown.tags and shown.loads == []
    assert "Written by Sottovoce" in shown.text


@pytest.mark.parametrize("made", PAGES)
def test_headings_descend_step_by_step(made: Callable[[str], Page]) -> None:
    levels = [int(tag[1]) for tag in Parsed(made("wards").to_html()).tags if tag in ("h1", "h2", "h3", "h4")]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(low <= high + 1 for high, low in itertools.pairwise(levels))


@pytest.mark.parametrize("made", PAGES)
def test_every_table_can_be_scrolled_by_keyboard_and_has_a_name(made: Callable[[str], Page]) -> None:
    text = made("wards").to_html()
    regions = re.findall(r'<div class="wide" tabindex="0" role="region" aria-label="[^"]+">', text)
    assert len(regions) == text.count("<table") > 0


def test_an_unknown_name_in_a_template_is_an_error() -> None:
    made = of_a_tradeoff("wards")
    values: dict[str, Any] = {**made.values}
    del values["loss"]
    with pytest.raises(Exception, match="'loss' is undefined"):
        replace(made, values=values).to_html()
