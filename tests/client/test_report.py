"""The report: complete, self-contained, safe against what it shows, and unbroken by what is missing or infinite."""

from __future__ import annotations

import base64
import hashlib
import importlib
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce_client.reports import page as pages
from sottovoce_client.reports.figure import Figure
from sottovoce_client.reports.page import PageColumn, PageTable
from sottovoce_client.reports.plot_elements import (
    Axis,
    PlotMark,
    PlotView,
    make_line,
    mask_nonfinite,
    select_evenly,
    spread_labels,
)
from sottovoce_client.reports.run_figures import MAX_HEATMAP_SHAPE, build_run_figures, stack_curves
from sottovoce_client.reports.run_report import (
    build_run_page,
    compose_statements,
    determine_verdict,
    find_worst_case,
    is_above_claim,
)
from sottovoce_client.runs.summary import ObservedPrivacyLoss, RunSummary
from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import SpecError
from sottovoce_core.privacy.guarantee import WEAK_EPSILON
from tests.client.paths import is_path, wrong_paths
from tests.client.summaries import (
    boundless,
    capture,
    learner,
    looks,
    summary,
    summary_of,
    tapped,
    unasked,
    unheard,
    unstarted,
)

SECTIONS = (
    "Who sends to whom",
    "How they learned",
    "What it cost",
    "Privacy loss of the recorded messages",
    "What was recorded",
    "Learner by learner",
    "What was promised",
    "Warnings",
    "Spec",
)
PLOTS = ("graph", "learning", "budget", "loss-record_use", "loss-record", "messages")
HOSTILE = '<img src=x onerror="alert(1)">&\'</script>{0}'


_PLACES = ("d", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "data-x", "data-y", "style")
"""Attributes that say where on a picture something is."""


class Page(HTMLParser):
    """Headings, text, plots and what the page would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.headings: list[str] = []
        self.words: list[str] = []
        self.plots: list[str] = []
        self.loads: list[str] = []
        self.drawn: list[str] = []
        self.scripts: list[str] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        loads = [values[name] for name in ("src", "href", "srcset", "data", "poster") if name in values]
        # A place on the page, and pictures that are in it, are loaded from nowhere.
        self.loads += [address for address in loads if not address.startswith(("#", "data:image/png;base64,"))]
        self.drawn += [values[name] for name in _PLACES if name in values]
        if tag == "figure":
            self.plots.append(values["id"].removeprefix("plot-"))
        if tag == "tr":
            self.rows.append([])
        if tag not in {"meta", "link", "img", "br", "input"}:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "script":
            self.scripts.append(data)
        elif inside != "style":
            self.words.append(data)
        if inside == "h2":
            self.headings.append(data)
        if inside in {"td", "th"} and self.rows:
            self.rows[-1].append(data)


def page(made: RunSummary) -> Page:
    return Page(build_run_page(made).to_html())


def figure(made: RunSummary, name: str) -> Figure:
    """A figure of the page that is made of marks."""
    (found,) = (each for each in build_run_figures(made) if each.name == name)
    assert isinstance(found, Figure)
    return found


def with_swap(made: RunSummary, swap: ObservedPrivacyLoss) -> RunSummary:
    return replace(made, learners=(replace(made.learners[0], record_use_loss=swap), *made.learners[1:]))


def test_of_a_tapped_run_the_page_says_what_was_recorded_and_what_was_not() -> None:
    text = build_run_page(tapped(summary())).to_html()
    for said in (
        "Only ciphertext was recorded",
        "Recorded ciphertext",
        "1,204 records",
        "96 kB in 3 connections, mode wiretap",
        "needs a capture of messages",
        "A wiretap reads no messages, so no loss can be computed",
    ):
        assert said in text
    assert "Not recorded" not in text and "no eavesdropper took part" not in text
    assert determine_verdict(tapped(summary())).kind == "open"


def test_every_section_and_plot_is_there() -> None:
    shown = page(summary())

    assert tuple(shown.headings) == SECTIONS
    assert tuple(shown.plots) == PLOTS


def test_file_is_the_page_in_utf8(tmp_path: Path) -> None:
    build_run_page(summary(2, 20)).write(tmp_path / "report.html")

    written = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert written.startswith("<!doctype html>")
    assert "ε" in written


def test_nothing_is_loaded_from_anywhere() -> None:
    text = build_run_page(summary()).to_html()
    shown = Page(text)

    assert shown.loads == []
    assert "link" not in shown.tags
    assert "default-src 'none'" in text
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style


def test_a_page_of_many_learners_is_small() -> None:
    assert all(len(build_run_page(summary(n)).to_html().encode()) < 500_000 for n in (1, 5, 16, 21))
    assert len(build_run_page(summary(200)).to_html().encode()) < 750_000


def test_no_script_runs_but_the_pages_own() -> None:
    text = build_run_page(summary()).to_html()
    (script,) = Page(text).scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert "onclick" not in text and "{{" not in script


@pytest.mark.parametrize(
    "made",
    [
        replace(summary(), learners=(learner(HOSTILE), *summary().learners[1:])),
        replace(summary(), name=HOSTILE, run_id=HOSTILE, data=HOSTILE, version=HOSTILE, started_at=HOSTILE),
        replace(summary(), state="failed", detail=HOSTILE, spec_yaml=HOSTILE, warnings=((HOSTILE, HOSTILE),)),
        replace(summary(), capture=capture(sender=HOSTILE, location=HOSTILE, mode=HOSTILE)),
    ],
    ids=["learner", "names", "texts", "capture"],
)
def test_hostile_text_is_shown_not_obeyed(made: RunSummary) -> None:
    honest, shown = page(summary()), page(made)

    assert HOSTILE in shown.text
    assert "img" not in shown.tags
    assert shown.tags.count("script") == honest.tags.count("script")


def test_plots_read_no_tags_in_a_learners_name() -> None:
    made = replace(summary(2), learners=(learner("<b>x</b>"), learner("y")))

    text = build_run_page(made).to_html()
    assert "<b>x</b>" not in text and "<title>&lt;b&gt;x&lt;/b&gt;</title>" in text


@pytest.mark.parametrize("name", ["_ward", "$\\alpha$ $", "^{}_{", "#0072b2", "url(#x_1"])
def test_a_name_is_in_the_legend_as_it_is(name: str) -> None:
    lines = [make_line([1, 2], [1, 2], each, "blue") for each in (name, "other")]
    drawn = Figure("f", "F", lines, (PlotView("", Axis(name), Axis("y")),)).__html__()
    assert drawn.count(name) >= 3  # its tip, the axis and the legend


def test_an_arrow_leads_from_who_speaks_to_who_only_listens() -> None:
    mutual, directed = (replace(summary(3), one_way=pairs) for pairs in ((), ((0, 1), (1, 2))))
    arrows = [[mark for mark in figure(made, "graph").marks if mark.kind == "arrow"] for made in (mutual, directed)]
    assert [len(each) for each in arrows] == [0, 2]
    lines = [next(mark for mark in figure(made, "graph").marks if mark.kind == "line") for made in (mutual, directed)]
    assert [len(each.x) for each in lines] == [9, 3]  # two ends and a gap for every channel that leads both ways
    text = build_run_page(directed).to_html()
    assert "An arrow leads from" in text and "Who sends to whom: 3 learners, 3 edges" in text
    rows = {row[0]: row[2:] for row in Page(text).rows[1:4]}
    assert rows == {
        "Aarhus": ["Bergen, Cork", "Cork"],
        "Bergen": ["Cork", "Aarhus"],
        "Cork": ["Aarhus", "Aarhus, Bergen"],
    }


def test_names_stand_beside_their_learners_or_under_the_pointer_where_these_are_many() -> None:
    for n, seen in (5, 5), (12, 12), (40, 0):
        made = figure(summary(n), "graph")
        assert len([mark for mark in made.marks if mark.kind == "text"]) == seen
        drawn = made.__html__()
        assert drawn.count("<title>") == n and "<title>Aarhus: 93.1 %</title>" in drawn


@pytest.mark.parametrize(("points", "marked"), [(5, True), (60, False)])
def test_points_of_short_curves_are_marked(points: int, marked: bool) -> None:
    made = figure(replace(summary(1), progress=looks(1, 500, 1.0, points)), "learning").__html__()
    assert ("<g clip-path" in made) == marked


def test_a_curve_of_what_was_measured_here_stands_where_no_learner_told_its_own() -> None:
    curve = tuple((k, 0.5 + 0.05 * k) for k in range(1, 9))
    silent = [replace(each, accuracy=(None,) * 2) for each in looks(2, 8, 1.0, 4)]
    made = summary(2, progress=tuple(silent), publication_cost="it costs nothing more")
    measured = replace(made, learners=tuple(replace(each, test_curve=curve) for each in made.learners))
    page, told = (
        build_run_page(measured).to_html(),
        build_run_page(replace(measured, progress=looks(2, 8, 1.0, 4))).to_html(),
    )
    assert (
        "labels correctly after a round" in page and "test accuracy" in page and "No accuracy was reported" not in page
    )
    assert "prequential accuracy" in told and "labels rightly after a round" not in told
    assert "No accuracy was reported" in build_run_page(replace(made, publication_cost="")).to_html()


def test_a_run_too_short_for_more_points_says_so() -> None:
    short, long = (page(replace(summary(2), progress=looks(2, 20, 0.2, n))).text for n in (3, 8))
    assert "a few times a second, and this run took" in short and "so there are few points" in short
    assert "few points" not in long
    every_round = page(replace(summary(2, rounds=4), progress=looks(2, 4, 0.2, 5))).text
    assert "few points" not in every_round


def used_once(made: RunSummary) -> RunSummary:
    """The same where each record is used once: both levels have the same epsilon and the same loss."""
    learners = (
        replace(
            each,
            max_uses=1,
            epsilon_record=each.epsilon_record_use,
            epsilon_record_curve=each.epsilon_record_use_curve,
            record_loss=each.record_use_loss,
        )
        for each in made.learners
    )
    return replace(made, learners=tuple(learners))


def test_what_is_equal_for_a_record_and_its_use_is_drawn_once() -> None:
    shown = page(used_once(summary()))
    assert tuple(shown.plots) == tuple(name for name in PLOTS if name != "loss-record_use")
    assert [mark.name for mark in figure(used_once(summary()), "budget").marks if mark.kind == "line"] == [
        "by the paper’s formula",
        "tight, per record",
        "where a learner stops",
    ]
    assert "so ε per record use and per record are equal" in shown.text and "there is one figure for both" in shown.text
    (heads,) = (row for row in shown.rows if "most uses" in row)
    assert len(heads) == 16 and "record use" not in heads  # without the column of that epsilon, and its three losses
    assert "there is one figure for both" not in page(summary()).text


@pytest.mark.parametrize(("n", "panels"), [(1, 0), (2, 2), (16, 16), (17, 0)])
def test_each_of_a_few_learners_has_a_panel_in_which_the_others_are_pale(n: int, panels: int) -> None:
    made = figure(summary(n), "learning")
    text = made.__html__()
    assert len(made.panels) == panels
    assert text.count('role="img"') == max(panels, 1)
    # One ground with all curves is drawn once, and repeated in the other panels.
    assert (text.count('id="learning-0-ground"'), text.count('href="#learning-0-ground"')) == (
        panels > 0,
        max(panels - 1, 0),
    )
    assert ("the others" in text) == (panels > 0)
    if panels:
        assert (
            "<b>Aarhus</b>" in text
            and "How they learned: across round, up prequential accuracy. Bergen ends at" in text
        )
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_curves_are_named_where_they_end_and_names_do_not_meet() -> None:
    text = figure(summary(), "budget").__html__().partition("</svg>")[0]
    names = ["by the paper’s formula", "tight, per record", "tight, per record use", "where a learner stops"]
    found = re.findall(r'<g class="end-label">.*?<text [^>]*?y="([-\d.]+)"[^>]*>([^<]+)</text>', text)
    assert sorted(name for _, name in found) == names
    heights = sorted(float(y) for y, _ in found)
    assert all(b - a > 10 for a, b in itertools.pairwise(heights))  # points; the text has 8.5
    assert spread_labels([1.0, 2.0, 50.0, 99.0, 99.0], 10, 100) == [1.0, 11.0, 50.0, 90.0, 100.0]


def test_a_table_becomes_cards_on_a_phone_if_it_has_many_columns_and_few_rows() -> None:
    columns, row = [PageColumn("learner"), *(PageColumn(f"head {k}", group="group") for k in range(3))], ("a", 1, 2, 3)
    for kept, rows, folded in ((columns, 50, True), (columns[:3], 50, False), (columns, 51, False)):
        table = PageTable("t", "T", kept, [row[: len(kept)]] * rows)
        text = table.__html__()
        assert ('class="fold"' in text) is table.is_folded is folded
        assert text.count('data-name="group: head 1"') == (rows if folded else 0)


def test_losses_that_would_lie_on_zero_are_shown_from_close_by() -> None:
    made = summary(1)
    small = ObservedPrivacyLoss(0.01, 0.02, 7.0, np.linspace(0, 0.01, 500))
    large = ObservedPrivacyLoss(6.0, 6.5, 7.0, np.linspace(0, -6.0, 500))
    views = [[view.name for view in figure(with_swap(made, swap), "loss-record_use").views] for swap in (small, large)]
    assert views == [["closer", "whole budget"], ["whole budget"]]
    text = build_run_page(with_swap(made, small)).to_html()
    assert text.index("<span>closer</span>") < text.index("<span>whole budget</span>")


@pytest.mark.parametrize("n", [8, 9, 30])
def test_every_curve_shows_its_name_under_the_pointer(n: int) -> None:
    made = figure(summary(n), "learning").__html__()
    assert made.count("<title>") == n + 1  # and the level of the centralised model


def test_every_plot_says_what_it_shows_to_who_does_not_see_it() -> None:
    text = build_run_page(summary()).to_html()
    for name in PLOTS:
        plot = text.partition(f'id="plot-{name}"')[2].partition("</figure>")[0]
        assert plot.count('role="img" aria-label="') >= 1, name
        shown = " open" if name == "graph" else ""
        assert f'<details class="numbers"{shown}><summary>' in plot and "<tbody>" in plot, name
    assert "Aarhus ends at 94." in text.partition('id="plot-learning"')[2].partition("</figure>")[0]


def test_the_numbers_below_a_plot_are_those_of_the_run() -> None:
    made = summary(2, 20, progress=looks(2, 20, 1.0, 21))
    text = figure(made, "budget").__html__()
    last = Page(text).rows[-1]
    paper, record, event = (
        max(getattr(each, f"epsilon_{kind}") for each in made.learners) for kind in ("paper", "record", "record_use")
    )
    assert last[:4] == ["20", *(f"{value:.4g}" for value in (paper, record, event))]


def test_key_figures() -> None:
    text = page(summary()).text

    for figure in (
        "500 of 500",
        "412 rounds/s",
        "93.1–94.7 %",
        "96.5 % for one model of all records, without privacy",
        "ε = 7.312",
        "The paper’s formula (23.34), published with the algorithm, bounds the same ε per record use, but loosely",
    ):
        assert figure in text
    assert "Recorded messages 5,000 1.43 MB" in text
    assert "used in up to 4 rounds" in text


def test_table_has_every_figure_of_every_learner() -> None:
    rows = page(summary()).rows
    first = next(k for k, row in enumerate(rows) if row[:2] == ["learner", "records"])
    assert rows[first] == [
        "learner",
        "records",
        "test accuracy",
        "own accuracy",
        "ε spent",
        "ε limit",
        "privacy loss found",
        "of the promised ε",
    ]
    assert rows[first + 1][:6] == ["Aarhus", "1,300", "93.1 %", "91.0 %", "7.312", "10"]
    rows = rows[first + 6 :]

    assert rows[1][1:3] == ["held", "most uses"]
    assert rows[2][:12] == [
        "Aarhus",
        "1,300",
        "4",
        "93.1 %",
        "91.0 %",
        "500",
        "1,000",
        "1.01 MB",
        "7.312",
        "10",
        "23.34",
        "7.312",
    ]
    assert {len(row) for row in rows[1:7]} == {20}
    assert rows[7:] == [["constant", "value", "enforced by"], ["diameter", "20", "projection onto the decision set"]]


def test_warnings_are_listed_by_code_and_left_out_if_none() -> None:
    assert "GAMMA0_LARGE gam0 exceeds 1/(3 |delta_m|)" in page(summary()).text
    assert "Warnings" not in page(replace(summary(), warnings=())).headings


def test_without_capture() -> None:
    shown = page(unheard(summary()))

    assert "Not recorded" in shown.text and "no eavesdropper took part" in shown.text
    assert tuple(shown.plots) == ("graph", "learning", "budget")


def test_without_accuracy() -> None:
    shown = page(unasked(summary()))

    assert "learning" not in shown.plots
    assert "No accuracy was reported" in shown.text
    assert "None" not in shown.text


def test_infinite_epsilons_are_words_not_plots() -> None:
    shown = page(boundless(summary()))

    assert "budget" not in shown.plots
    assert "ε = ∞" in shown.text
    assert "No finite bound is known" in shown.text
    assert "Nothing finite was promised" in shown.text


def test_a_curve_that_becomes_infinite_ends_there() -> None:
    curve = np.array([0.0, 1.0, 2.0, math.inf])
    made = replace(learner("Aarhus", 4), epsilon_record_curve=curve, epsilon_record=math.inf)

    lines = {mark.name: mark.y for mark in figure(summary_of(made), "budget").marks}

    np.testing.assert_array_equal(lines["tight, per record"], [math.nan, 1.0, 2.0, math.nan])


@pytest.mark.parametrize(
    "make",
    [
        lambda: summary(),
        lambda: summary(1, 1),
        lambda: summary(1),
        lambda: summary(2),
        lambda: boundless(summary(3)),
        lambda: unasked(summary(3)),
        lambda: unstarted(summary()),
        lambda: summary(2, 3, capture=capture(0, 0)),
    ],
)
def test_odd_runs_leave_no_trace_of_nothing(make: Callable[[], RunSummary]) -> None:
    shown = page(make())

    assert not re.search(r"\b(nan|NaN|inf|None)\b", shown.text)
    assert not re.search(r".{20}[a-z]\.[A-Z].{20}", shown.text)  # between two sentences is a blank
    assert not any(re.search(r"nan|inf|None", place) for place in shown.drawn)


def test_what_is_missing_is_not_drawn() -> None:
    made = summary(2, 10)
    heard = np.full((10, 4), math.nan)
    shown = page(replace(made, capture=capture(10, sender_values=heard), progress=looks(2, 10, 1.0, 5)))

    assert not any("nan" in place for place in shown.drawn)
    assert ["1", "–", "–", "–"] in shown.rows


NUMBERS = st.one_of(st.floats(-10, 1e6), st.sampled_from([math.nan, 0.0, -1.0, 1e300]))


@settings(max_examples=25)
@given(st.data(), st.booleans(), st.sampled_from(["line", "dots", "bars", "area", "upright"]), st.integers(1, 12))
def test_whatever_is_drawn_is_a_path_that_browsers_draw(data: st.DataObject, log: bool, kind: Any, n: int) -> None:
    def values() -> FloatArray:
        return np.array(data.draw(st.lists(NUMBERS, min_size=n, max_size=n)))

    x = np.sort(values())[:1] if kind == "upright" else np.arange(1.0, n + 1)
    y = values()[: len(x)]
    low = values()[: len(x)] if kind == "area" or (kind == "dots" and log) else None
    step: Any = data.draw(st.sampled_from(["", "after", "middle"])) if kind == "line" else ""
    drawn = PlotMark(kind, x, y, "wards", low=low, step=step)
    text = str(Figure("f", "F", [drawn], (PlotView("", Axis("x", log=log), Axis("y", log=log)),)).__html__())
    assert wrong_paths(text) == []


@pytest.mark.parametrize("kind", ["dots", "area"])
def test_a_logarithmic_axis_along_which_nothing_is_drawn_has_limits(kind: Any) -> None:
    drawn = PlotMark(kind, np.ones(1), np.full(1, math.nan), "wards", low=np.ones(1))  # a warning would be an error
    text = str(Figure("f", "F", [drawn], (PlotView("", Axis("x", log=True), Axis("y", log=True)),)).__html__())
    assert wrong_paths(text) == []


@pytest.mark.parametrize("y", [[1.0], [1.0, math.nan, 2.0, 3.0], [math.nan, 1.0, math.nan], [math.nan, math.nan]])
def test_a_point_between_two_gaps_does_not_end_a_path(y: list[float]) -> None:
    drawn = Figure(
        "f", "F", [make_line(np.arange(len(y)), y, "wards", "blue")], (PlotView("", Axis("x"), Axis("y")),)
    ).__html__()
    assert wrong_paths(drawn) == []
    assert (
        not is_path("M9762 238l")
        and not is_path("M1 2Lnan 3")
        and not is_path("1 2L3 4")
        and is_path("M1 2h0M3 4l5-6 7 8")
    )


@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_a_run_cut_short_says_so(state: str) -> None:
    cut = tuple(replace(each, rounds_done=120) for each in summary().learners)

    text = page(replace(summary(), learners=cut, state=state, detail="Bergen has spent its budget of 7.0")).text

    assert f"This run {state} after 120 of 500 rounds. Bergen has spent its budget of 7.0" in text


def test_of_fifty_learners_the_legend_names_none() -> None:
    few, many = (
        Page(
            figure(summary(n), "learning").__html__().replace("<title>", "<style>").replace("</title>", "</style>")
        ).text
        for n in (5, 50)
    )
    assert "centralised, not private (test)" in many and "Aarhus" not in many.partition("The numbers")[0]
    assert "Aarhus" in few.partition("The numbers")[0]


def test_budget_is_logarithmic_where_the_paper_dwarfs_the_rest() -> None:
    dwarfing = tuple(replace(each, epsilon_paper_curve=500 * each.epsilon_paper_curve) for each in summary().learners)

    assert figure(summary_of(*dwarfing), "budget").views[0].y.log
    assert not figure(summary(), "budget").views[0].y.log


def test_heatmap_is_small_and_clipped() -> None:
    heard = np.random.default_rng(3).laplace(0, 1, (1_200, 450))
    heard[7, 7] = 1e9

    made = figure(summary(2, capture=capture(sender_values=heard)), "messages")
    picture, below, above = made.marks
    assert picture.image is not None and picture.image.shape == (*MAX_HEATMAP_SHAPE[::-1], 4)
    assert (made.views[0].x.low, made.views[0].x.high) == (0.5, 1_200.5)
    # 2 % of Laplace's numbers lie beyond -ln(0.02) = 3.9.
    assert [below.name, above.name] == ["−3.9 and beyond", "3.9 and beyond"]


def test_what_grows_beyond_its_noise_is_not_called_noise() -> None:
    noise = np.random.default_rng(3).laplace(0, 1, (200, 4))
    for heard, loud in ((noise, False), (noise + np.arange(200.0)[:, None], True)):
        text = page(summary(2, capture=replace(capture(sender_values=heard), first_scale=1.0, last_scale=1.0))).text
        assert ("Most of it is noise" in text) is not loud
        assert ("persistent bands show what was learned from many records together" in text) is loud


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    pages._templates.cache_clear()
    with pytest.raises(SpecError, match=r"needs Jinja2: in a clone of the repository, pip install '\.\[audit\]'"):
        build_run_page(summary(2, 5)).to_html()


# ---- verdict ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("record", "tone"), [(WEAK_EPSILON, "consistent"), (10.01, "weak"), (26.87, "weak")])
def test_a_weak_promise_is_amber_even_if_it_is_kept(record: float, tone: str) -> None:
    one = learner("Aarhus", 500)
    kept = ObservedPrivacyLoss(1.0, 2.0, 3.0, np.zeros(500))
    made = summary_of(replace(one, epsilon_record=record, record_use_loss=kept, record_loss=kept))
    found, text = determine_verdict(made), build_run_page(made).to_html()
    assert (found.kind, found.tone, found.is_weak) == ("consistent", tone, tone == "weak")
    assert f'<div class="verdict {tone}">' in text and ("with a weak promise" in text) == found.is_weak


@pytest.mark.parametrize(
    ("swap", "kind", "says"),
    [
        (ObservedPrivacyLoss(1.0, 2.0, 3.0, np.zeros(500)), "consistent", "The promise allows"),
        (
            ObservedPrivacyLoss(3.1, 3.2, 3.0, np.zeros(500)),
            "refuted",
            "3.1 when one use of a record of Aarhus is replaced, above",
        ),
        (
            ObservedPrivacyLoss(1.0, 3.2, 3.0, np.zeros(500)),
            "refuted",
            "could have had a privacy loss of 3.2, above the promised 3 (Aarhus",
        ),
        (ObservedPrivacyLoss(3.0 + 1e-12, 3.0, 3.0, np.zeros(500)), "consistent", "The promise allows 3."),
        (ObservedPrivacyLoss(0.1, 0.1, 0.0, np.zeros(500)), "refuted", "above the promised 0."),
    ],
)
def test_verdict(swap: ObservedPrivacyLoss, kind: str, says: str) -> None:
    verdict = determine_verdict(with_swap(summary(), swap))

    assert verdict.kind == kind
    assert says in verdict.text


def test_the_promise_names_its_observer_and_its_meaning() -> None:
    made = summary()
    at_neighbour = replace(made, guarantee=replace(made.guarantee, threat_model="neighbour", shared=True))
    decisions = replace(boundless(made), guarantee=replace(made.guarantee, threat_model="output", output=1.0))
    for run, says in (
        (
            made,
            "ε = 7.312 per record use, 23.4 per record in all its uses, against an observer of every message. An",
        ),
        (
            at_neighbour,
            "against one learner, which reads the messages sent to it, all learners together, for they share",
        ),
        (boundless(made), "Nothing: ε is infinite for an observer of the messages."),
        (decisions, "ε = 1 against an observer of the published decisions, who sees no message. An observer"),
        (decisions, "at most 73.1 % sure of one of them."),  # e / (1 + e)
        (at_neighbour, "This rules out almost no conclusion about a record."),
    ):
        assert says in compose_statements(run)["promise"]
    both = replace(made, guarantee=replace(made.guarantee, output=1.0))
    assert compose_statements(both)["promise"].count("ε = ") == 2


def test_a_refuted_claim_is_marked_in_the_table() -> None:
    text = build_run_page(with_swap(summary(), ObservedPrivacyLoss(9.25, 9.25, 3.0, np.zeros(500)))).to_html()

    assert text.count('class="over">9.25</td>') == 3  # of the short table; as it is and at most, of the full one
    assert 'class="verdict refuted"' in text


def test_the_telling_swap_is_the_largest_of_the_table_but_one_above_its_claim_comes_first() -> None:
    large, small, above, unbound = (
        ObservedPrivacyLoss(loss, loss, claim, np.zeros(500))
        for loss, claim in ((2.0, 100.0), (0.9, 1.0), (0.2, 0.1), (9.0, np.inf))
    )
    for event, record, wanted in (
        (large, small, ("record_use", large)),
        (small, large, ("record", large)),
        (large, above, ("record", above)),
        (unbound, small, ("record", small)),
    ):
        found = find_worst_case(summary_of(replace(learner("a"), record_use_loss=event, record_loss=record)))
        assert found is not None and found[1:] == wanted
    assert find_worst_case(unheard(summary())) is None


def test_rounding_exceeds_no_claim() -> None:
    assert not is_above_claim(1.0 + 1e-12, 1.0)
    assert is_above_claim(1.0 + 1e-6, 1.0)
    assert not is_above_claim(math.inf, math.inf)


# ---- pieces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "kept"), [(0, 0), (1, 1), (399, 399), (5_000, 400)])
def test_thinned_keeps_both_ends(length: int, kept: int) -> None:
    positions = select_evenly(length)

    assert len(positions) == kept
    assert not length or (positions[0], positions[-1]) == (0, length - 1)


def test_finite_makes_gaps() -> None:
    np.testing.assert_array_equal(
        mask_nonfinite([1.0, math.nan, math.inf, -math.inf, 0.1]), [1.0, math.nan, math.nan, math.nan, 0.1]
    )


def test_who_has_stopped_spends_no_more() -> None:
    rows = stack_curves([np.array([1.0, 2.0, 3.0]), np.array([1.0, 5.0, 9.0]), np.ones(3)], [3, 2, 0])

    np.testing.assert_array_equal(rows, [[1, 2, 3], [1, 5, 5], [0, 0, 0]])


def test_noise_that_can_be_repeated_protects_nobody() -> None:
    assert determine_verdict(replace(summary(), private_noise=False)).headline == "This run protected no record"
    assert determine_verdict(summary()).kind == "consistent"


def test_a_capture_of_few_rounds_is_not_called_consistent() -> None:
    def heard_for(rounds: int) -> RunSummary:
        made = summary()
        short = [
            replace(each.record_use_loss, cumulative_loss=np.zeros(rounds))
            for each in made.learners
            if each.record_use_loss
        ]
        learners = [replace(each, record_use_loss=cut) for each, cut in zip(made.learners, short, strict=True)]
        return replace(made, learners=tuple(learners))

    assert determine_verdict(heard_for(249)).headline == "Too few messages were recorded to tell"
    assert determine_verdict(heard_for(250)).kind == "consistent"


def test_shared_records_cost_the_sum_of_all_learners() -> None:
    alone, made = summary(), replace(summary(), guarantee=replace(summary().guarantee, shared=True))
    assert made.epsilon_record_use == pytest.approx(sum(each.epsilon_record_use for each in made.learners))
    assert alone.epsilon_record_use == max(each.epsilon_record_use for each in alone.learners)
    assert "all learners together, for they share their records" in build_run_page(made).to_html()
