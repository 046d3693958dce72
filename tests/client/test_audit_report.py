"""The audit's page: complete, self-contained, in no stronger words than the verdict, unbroken by what is missing or infinite."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from sottovoce_client.auditing.audit import _list_rows as audit_rows
from sottovoce_client.auditing.audit import _print_rows, print_verdict, report_audit
from sottovoce_client.auditing.plots import (
    _compute_allowed_rates,
    _compute_expected_counts,
    _compute_progress,
    _compute_quantiles,
    _compute_roc,
    _select_close_rounds,
    find_most_different_number,
)
from sottovoce_client.auditing.report import build_audit_page
from sottovoce_client.auditing.summary import summarise_audit
from sottovoce_core.auditing.audit import Audit, audit_simulated
from sottovoce_core.auditing.bounds import compute_epsilon_lower_bound
from sottovoce_core.auditing.likelihood import LossBound, RunLosses
from sottovoce_core.auditing.plan import plan_audit
from sottovoce_core.auditing.verdict import Verdict, VerdictKind
from sottovoce_core.noise import NoiseSource, SeededNoise
from sottovoce_core.privacy.guarantee import ThreatModel
from tests.claims import EXPOSED, SETUPS, Setup, Times
from tests.client.test_report import Page
from tests.examples import made_up

SECTIONS = [
    "Results in numbers",
    "Privacy losses and guesses",
    "The noise in the messages",
    "The effect of the replacement",
    "Learner by learner",
    "All comparisons",
    "Limits and terms",
    "How to repeat it",
]
POINTS = [
    "The claim",
    "Whom the verdict concerns",
    "What was tried",
    "Smallest violation that would be found",
    "What the verdict does not mean",
]
PLOTS = {
    *("losses", "roc", "cumulative", "single", "progress", "noise", "quantiles"),
    *("coupled", "coupled-close", "coordinate"),
}


def halved(seed: np.random.SeedSequence) -> NoiseSource:
    """Broken: half as much noise as claimed."""
    return Times(SeededNoise(seed), 0.5)


def audited(setup: Setup, *, threat: ThreatModel = ThreatModel.WIRE, runs: int = 60, **more: Any) -> Audit:
    run = setup.build()
    plan = plan_audit(run, made_up(run.spec, setup.n_features), 1, runs=runs, seed=1, threat=threat)
    return audit_simulated(plan, **more)


def long(name: str, rounds: int = 30) -> Setup:
    return replace(SETUPS[name], rounds=rounds)


@pytest.fixture(scope="module")
def done() -> Audit:
    return audited(long("ldp-dol"), runs=200)


@pytest.fixture(scope="module")
def broken() -> Audit:
    return audited(long("ldp-dol"), runs=200, noise=halved)


@pytest.fixture(scope="module")
def exposed() -> Audit:
    return audited(EXPOSED["pd-ftgl after gossip"])


@pytest.fixture(scope="module")
def published() -> Audit:
    return audited(EXPOSED["pd-ftgl after gossip"], threat=ThreatModel.OUTPUT)


def page_of(done: Audit, name: str = "learner-1") -> Page:
    return Page(build_audit_page(done, name, 7).to_html())


# ---- the page --------------------------------------------------------------------------------------------------------


def test_everything_is_there_and_nothing_is_loaded(done: Audit, tmp_path: Path) -> None:
    build_audit_page(done, "learner-1", 7).write(tmp_path / "audit.html")
    text = (tmp_path / "audit.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.headings == SECTIONS
    assert set(page.plots) == PLOTS and len(page.plots) == len(PLOTS)
    assert page.loads == []
    assert "default-src 'none'" in text
    assert len(text.encode()) < 500_000


def test_figures_are_those_of_the_audit(done: Audit) -> None:
    text = page_of(done).text
    guessed, rounds = done.findings.whole_run_bound, done.findings.round_bounds
    assert guessed is not None and rounds is not None
    assert "learner-1" in text and "200 runs of each world" in text and "--confidence 0.95 --seed 7" in text
    assert f"Claimed ε {done.findings.claim:.4g}" in text
    assert f"The paper’s own ε {done.plan.guarantee.paper_epsilon[-1]:.4g}" in text
    assert f"Largest exact loss {done.largest_loss:.4g}" in text
    pair = f"{len(done.run_worlds)} runs of the first pair of worlds"
    assert f"{guessed.guesses} of {pair} reveal enough to be guessed; {guessed.correct_guesses} of these" in text
    assert f"ε is at least {done.findings.epsilon_lower_bound:.3g}" in text
    assert done.findings.epsilon_lower_bound == max(bound.value for bound in done.findings.bounds)


def test_every_test_and_every_guess_is_in_a_table(done: Audit) -> None:
    text = page_of(done).text
    assert done.findings.round_bounds is not None
    for test in done.findings.tests:
        assert f"{test.name} {test.description}" in text
    for bound in done.findings.bounds:
        assert f"{bound.name} {bound.correct_guesses} of {bound.guesses}" in text
    for t, bound in enumerate(done.findings.round_bounds.bounds):
        assert f"round {t} {bound.correct_guesses} of {bound.guesses}" in text


def test_the_command_repeats_it(done: Audit, published: Audit) -> None:
    options = "--runs 200 --threat wire --confidence 0.95 --seed 7"
    assert f"sottovoce audit run.yaml --learner learner-1 {options}" in page_of(done).text
    assert "--threat output" in page_of(published).text
    elsewhere = page_of(replace(done, source="captures")).text
    assert "sottovoce audit" not in elsewhere and "The runs came from captures" in elsewhere
    assert "Simulated runs" not in elsewhere


# ---- the first page --------------------------------------------------------------------------------------------------


def opening_of(html: str) -> str:
    """Text of a page before its first folded part."""
    assert '<details class="part">' in html and "<details open" not in html
    return Page(html[: html.index('<p class="note parts">')].partition("</header>")[2]).text


def of_too_few() -> Audit:
    return audited(SETUPS["pd-ftgl"], threat=ThreatModel.OUTPUT, runs=40)


def of_no_claim() -> Audit:
    return audited(EXPOSED["d-ogd"], runs=10)


def at_a_delta() -> Audit:
    run = long("ldp-dol").build()
    return audit_simulated(plan_audit(run, made_up(run.spec, 2), 1, runs=60, seed=1, delta=0.001))


@pytest.mark.parametrize(
    ("made", "headline", "sentence"),
    [
        ("done", "Consistent with a weak claim: no violation was found", "That is no proof of it."),
        (
            "published",
            "Consistent: no violation was found",
            "an observer of published decisions only, which knows all else",
        ),
        ("broken", "Refuted: the claim does not hold", "Do not rely on the claim until the cause is known."),
        (
            of_too_few,
            "Inconclusive: this audit cannot decide",
            "Not even a learner without noise: the audit is too small.",
        ),
        (of_no_claim, "Nothing was claimed", "as far as anyone claims"),
        (at_a_delta, "Consistent with a weak claim", "at δ (delta) 0.001, the probability that more is revealed"),
    ],
)
def test_a_page_opens_with_claim_verdict_and_limits(
    request: pytest.FixtureRequest, made: str | Callable[[], Audit], headline: str, sentence: str
) -> None:
    """All that follows is folded away, and the same sentences are printed."""
    audit: Audit = request.getfixturevalue(made) if isinstance(made, str) else made()
    html = build_audit_page(audit, "learner-1", 7).to_html()
    opening, points = (
        opening_of(html),
        [each for each in POINTS if audit.verdict.kind != "no-claim" or "Smallest" not in each],
    )
    assert opening.startswith(headline) and sentence in opening
    places = [opening.index(f"{each} ") for each in points]
    assert places == sorted(places)
    assert opening.count(f"{2 * audit.findings.runs:,} simulated runs") == 1
    assert not re.search(r"AUC|stream|scale|p-value|likelihood|black box", opening)
    assert "<section" not in html.split('<p class="note parts">')[1]  # folded parts, and nothing else
    console = Console(width=1000, record=True, file=io.StringIO())
    print_verdict(audit.verdict, summarise_audit(audit, "learner-1"), "learner-1", (), (), console)
    printed = [line.partition(": ") for line in console.export_text().splitlines()]
    assert [title for title, _, _ in printed if title in POINTS] == points
    assert all(text.strip() in opening for title, _, text in printed if title in POINTS)


# ---- the verdict -----------------------------------------------------------------------------------------------------


def test_what_is_broken_is_shown_where_it_was_found(broken: Audit) -> None:
    text = build_audit_page(broken, "learner-1", 7).to_html()
    assert '<div class="verdict refuted">' in text
    assert '<div class="family refuted"><h3>Conformance' in text
    assert re.search(r'<th scope="row" title="[^"]*" class="over"', text)
    for each in broken.verdict.evidence[:8]:
        assert Page(text).text.count(each) == 1
    said = "never shows this" if broken.findings.excess else "shows this in at most one of 20 audits"
    assert f"A system that keeps its claim {said}" in opening_of(text)


def test_who_is_refuted_by_the_noise_of_another_is_that_other_one(done: Audit, tmp_path: Path) -> None:
    def half_of_one(seed: np.random.SeedSequence) -> NoiseSource:
        source = SeededNoise(seed)
        factors = np.array([1.0, 1.0, 0.5])[:, None, None]
        return lambda draw: (
            source(draw) * (factors if len(factors) == draw.shape[0] else 1.0)
        )  # else of one of them alone

    other = audited(long("ldp-dol"), noise=half_of_one)
    assert (other.verdict_learner, other.plan.worlds.learner) == (2, 1) and other.verdict.kind == "refuted"
    assert np.mean(np.abs(other.noise)) == pytest.approx(0.5, rel=0.05)
    assert done.verdict_learner == 1 and np.mean(np.abs(done.noise)) == pytest.approx(1.0, rel=0.05)
    html = build_audit_page(other, "learner-1", 7).to_html()
    assert "<span>learner learner-2</span><span>record of learner-1 replaced</span>" in html
    assert "Refuted: the claim for learner-2 does not hold" in html and "of learner learner-2." in html
    console = Console(file=io.StringIO(), width=1000)
    report_audit(other, 7, tmp_path, console)
    assert isinstance(console.file, io.StringIO) and console.file.getvalue().startswith("learner-2 REFUTED")
    told = json.loads((tmp_path / "audit.json").read_text())
    assert (told["learner"], told["claim_learner"]) == ("learner-1", "learner-2")


def test_losses_by_the_claimed_noise_say_nothing_for_a_claim_that_the_noise_refutes(done: Audit, broken: Audit) -> None:
    """No green beneath the red, and said wherever they stand: beside a card, over a picture, at every learner."""
    supposed = "computed as if the noise had the claimed distribution, which it does not have"
    assert (
        supposed not in page_of(done).text
        and "doubted" not in build_audit_page(done, "learner-1", 7).to_html().split("<body")[1]
    )
    html = build_audit_page(broken, "learner-1", 7).to_html()
    assert '<div class="doubted"><div class="wide"' in html and Page(html).text.count(supposed) >= 4
    tests = broken.findings.select_family("conformance").tests
    told = build_audit_page(replace(broken, findings=replace(broken.findings, tests=tests)), "learner-1", 7).to_html()
    assert '<div class="family idle"><h3>Likelihood' in told and f"No violation found, {supposed}." in Page(told).text
    console = Console(width=200, record=True, file=io.StringIO())
    _print_rows(audit_rows(broken), console)
    assert "as if the noise were as claimed, which it is not" in console.export_text()


def test_cells_above_the_claim_stand_as_others_of_their_column(broken: Audit) -> None:
    """A text that is red is broken into lines as one that is black."""
    html = build_audit_page(broken, "learner-1", 7).to_html()
    assert '<td class="over long">' in html and '<td class="over">' in html


@pytest.mark.parametrize("kind", ["consistent", "refuted", "inconclusive", "no-claim"])
def test_no_verdict_is_put_more_strongly_than_it_is(done: Audit, kind: VerdictKind) -> None:
    evidence = tuple(f"reason <{k}>" for k in range(10)) if kind in ("refuted", "inconclusive") else ()
    text = build_audit_page(replace(done, verdict=Verdict(kind, "so & so", evidence)), "learner-1", 7).to_html()
    page = Page(text)
    banner = page.text[: page.text.index("Claimed ε")]
    assert "so & so" in banner
    assert ("Refuted" in banner) == (kind == "refuted")
    assert ("reason <7>" in banner and "reason <8>" not in banner and "and 2 more" in banner) == bool(evidence)
    assert "reason <0>" not in page.text  # the first one stands in the sentence
    assert "reason <1>" not in text  # escaped
    assert not re.search(
        r"\b(is|are) (safe|private|proven)\b",
        page.text.replace("does not show that the learner is private", "").replace(
            "not mean That the data are private", ""
        ),
    )


def test_a_weak_claim_is_amber_on_the_page_and_in_the_terminal(done: Audit) -> None:
    for weak, tone, colour in ((True, "weak", "yellow"), (False, "consistent", "green")):
        judged = replace(done, verdict=Verdict("consistent", "so", is_weak=weak))
        text = build_audit_page(judged, "learner-1", 7).to_html()
        assert f'<div class="verdict {tone}">' in text
        assert ("Consistent with a weak claim: no violation was found" in text) == weak
        console = Console(width=80, record=True, file=io.StringIO(), force_terminal=True)
        print_verdict(judged.verdict, summarise_audit(judged, "learner-1"), "north", (), (), console)
        code = {"yellow": "33", "green": "32"}[colour]
        assert f"\x1b[{code}mCONSISTENT" in console.export_text(styles=True)


def test_a_page_says_what_its_epsilon_lets_somebody_guess(done: Audit) -> None:
    promised = done.plan.guarantee
    small = replace(promised, round_losses=promised.round_losses / done.plan.epsilon)
    one = replace(done, plan=replace(done.plan, guarantee=small), findings=replace(done.findings, claim=1.0))
    text = page_of(one).text
    assert (
        "In the worst case 73.1 of 100 such guesses are right; 50 are by chance." in text
        and "almost no protection" not in text
    )
    stated = LossBound(delta=0.1, claim=0.0, level=0.01, runs=200, rank=3, loss=0.5)
    at_delta = replace(one, plan=replace(one.plan, delta=0.1), findings=replace(one.findings, loss_bound=stated))
    text = page_of(at_delta).text
    assert "ε (epsilon) is 1, and 0 at δ (delta) 0.1, the probability that more is revealed" in text
    assert "In the worst case 55 of 100 such guesses are right" in text
    assert done.plan.epsilon > 10 and "this claim gives almost no protection" in page_of(done).text


def test_the_audited_learner_has_two_losses_and_each_is_named(done: Audit) -> None:
    page = page_of(done)
    (own,) = [each for each in done.learner_losses if each.learner == done.plan.worlds.learner]
    assert own.replacement.startswith("the first record against") and own.replacement in page.text
    assert "after any round, for the replacement of this audit" in page.text
    assert "so the loss of learner-1 here is not the one above" in page.text


def test_runs_of_one_world_are_called_what_the_terminal_calls_them(done: Audit) -> None:
    found = replace(done.findings, has_both_worlds=False, bounds=(), round_bounds=None, runs=1)
    text = page_of(replace(done, findings=found, verdict=Verdict("consistent", "so"))).text
    assert "Consistent: nothing was found in the noise; the two worlds were not compared" in text
    assert "It compared" not in text and "1 simulated run of one world" in text
    assert "Can programs" not in text


# ---- what is missing or infinite -------------------------------------------------------------------------------------


def test_infinite_losses_are_said_and_not_drawn(exposed: Audit) -> None:
    page = page_of(exposed)
    assert "losses" not in page.plots and "noise" not in page.plots
    assert f"{2 * exposed.plan.runs} runs cannot be drawn" in page.text
    assert "belong to the first world" not in page.text  # none is drawn
    assert "Largest exact loss ∞" in page.text
    assert "the verdict does not concern published decisions" in page.text
    assert not any(re.search("nan|inf", place) for place in page.drawn)


def test_who_hears_no_message_has_nothing_to_replay(published: Audit) -> None:
    page = page_of(published)
    assert published.run_losses is None
    assert set(page.plots) <= {"coupled", "coupled-close", "coordinate"}
    assert page.text.count("sees no message") >= 3
    without = {"Privacy losses and guesses", "The noise in the messages", "Learner by learner"}
    assert page.headings == [each for each in SECTIONS if each not in without]


@pytest.mark.parametrize(
    ("setup", "runs"),
    [
        (replace(SETUPS["dola"], rounds=1), 10),
        (EXPOSED["d-ogd"], 10),
        (replace(SETUPS["ldp-dol"], rounds=120), 10),
    ],
    ids=["one round", "no claim", "many rounds"],
)
def test_small_and_large(setup: Setup, runs: int) -> None:
    page = page_of(audited(setup, runs=runs))
    assert page.headings and page.loads == []
    assert not any(re.search("nan|inf", place) for place in page.drawn)


def test_parts_that_are_missing(done: Audit) -> None:
    """As of runs that were not simulated, and of classifiers that had nothing to look at."""
    bare = replace(
        done,
        noise=np.empty(0),
        learner_losses=(),
        findings=replace(
            done.findings, round_bounds=None, bounds=tuple(replace(b, view="") for b in done.findings.bounds)
        ),
    )
    page = page_of(bare)
    assert PLOTS - set(page.plots) == {"single", "noise", "quantiles"}
    assert "Learner by learner" not in page.headings
    assert "were not sampled again" in page.text and "all runs are equal" in page.text
    assert "there is none" in page_of(replace(done, noise=np.zeros(10))).text


def test_names_are_text(done: Audit) -> None:
    hostile = '<img src=x onerror="alert(1)">'
    text = build_audit_page(replace(done, source=hostile), hostile, 7).to_html()
    assert hostile not in text and "&lt;img src=x" in text


def test_many_runs_fit_into_a_page(done: Audit) -> None:
    assert done.run_losses is not None and done.findings.whole_run_bound is not None
    many = {
        name: np.resize(getattr(done.run_losses, name), 100_000)
        for name in ("worlds", "total", "largest_losses", "first_excess_round", "excess_losses")
    }
    large = replace(
        done,
        run_losses=replace(done.run_losses, **many),
        run_worlds=many["worlds"],
        visible_numbers=np.resize(done.visible_numbers, (100_000, 2, 2)),
    )
    assert len(build_audit_page(large, "learner-1", 7).to_html()) < 500_000


# ---- figures ---------------------------------------------------------------------------------------------------------


def ratios_of(total: list[float], worlds: list[int]) -> RunLosses:
    losses, n = np.array(total), len(total)
    blank = np.zeros(1)
    return RunLosses(
        np.array(worlds), losses, np.abs(losses), np.full(n, -1), np.abs(losses), blank, blank, losses[:, None]
    )


def test_roc_by_hand() -> None:
    false, true = _compute_roc(ratios_of([math.inf, 2.0, 2.0, -1.0, -math.inf], [0, 0, 1, 0, 1]))
    assert true.tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1, 1])
    assert false.tolist() == pytest.approx([0, 0, 1 / 2, 1 / 2, 1])


def test_what_a_claim_allows() -> None:
    at = np.array([0.0, 0.1, 0.5, 1.0])
    assert _compute_allowed_rates(0.0, at) == pytest.approx(at)
    assert _compute_allowed_rates(1.0, at) == pytest.approx([0.0, 0.1 * math.e, 1 - 0.5 / math.e, 1.0])
    assert _compute_allowed_rates(5000.0, at[1:]) == pytest.approx([1.0, 1.0, 1.0])
    # Randomised response on the edge: right with chance e/(1+e).
    chance = math.e / (1 + math.e)
    assert _compute_allowed_rates(1.0, np.array([1 - chance])) == pytest.approx([chance])


def test_expected_bars_add_up_to_what_was_found() -> None:
    totals = np.array([-1.0, 0.0, 2.0, 2.0])
    first, second = _compute_expected_counts(totals, np.array([-3.0, -0.5, 0.5, 3.0]))
    assert first + second == pytest.approx([1, 1, 2])
    assert first == pytest.approx([1 / (1 + math.e), 0.5, 2 / (1 + math.exp(-2))])


def test_bounds_grow_with_the_runs(broken: Audit) -> None:
    assert broken.run_losses is not None and broken.findings.whole_run_bound is not None
    alpha = broken.findings.whole_run_bound.level
    at, lower, best = _compute_progress(broken.run_losses, broken.findings.whole_run_bound)
    assert at[-1] == 2 * broken.plan.runs and (np.diff(lower) >= 0).all()
    assert (lower <= best).all() and best[-1] == compute_epsilon_lower_bound(int(at[-1]), int(at[-1]), alpha)
    assert 0.3 * broken.findings.whole_run_bound.value < lower[-1] <= broken.findings.whole_run_bound.value


def test_quantiles_of_laplace_numbers_lie_on_the_diagonal() -> None:
    """The Kolmogorov-Smirnov distance of 10,000 numbers is below 0.025 but for a probability of 1e-5."""
    should, has = _compute_quantiles(np.random.default_rng(0).laplace(size=10_000))
    middle = np.abs(should) < 2
    assert middle.sum() > 50 and np.abs(should - has)[middle].max() < 0.4
    assert (np.diff(should) > 0).all()
    assert _compute_quantiles(np.array([3.0]))[1].tolist() == [3.0]


def test_the_number_that_differs_most(done: Audit) -> None:
    planted = done.visible_numbers.copy()
    position = int(np.flatnonzero(done.plan.adversary.visible_rounds >= done.coupled_runs.largest_shift_round)[0])
    planted[done.run_worlds == 1, position, 1] += 100.0
    assert find_most_different_number(replace(done, visible_numbers=planted)) == (position, 1)
    assert find_most_different_number(replace(done, visible_numbers=np.zeros_like(done.visible_numbers))) is None
    near = _select_close_rounds(done.coupled_runs)
    assert done.coupled_runs.largest_shift_round in near and len(near) <= 12
