"""The page in a real browser: what it shows, on a phone, by keyboard, its contrasts, fifty learners, and that it comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect
from playwright.async_api import Page as Tab

from sottovoce_client.web.poller import ConsoleProblem, ConsoleState
from sottovoce_client.web.result_files import ReportEntry
from tests.client.browsers import GUARD_MS, NEEDED, chromium, hindrances, tab
from tests.client.consoles import NOON, TOKEN, Told, a_page, free_port, served

pytestmark = NEEDED
expect.set_options(timeout=GUARD_MS)

HOSTILE = "<img src=x onerror=document.title='broken'>"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


@asynccontextmanager
async def shown(browser: Browser, page: ConsoleState, **look: Any) -> AsyncIterator[tuple[Tab, Told]]:
    """A page of a console that was opened by its address, and has heard from it."""
    told = Told(page)
    async with tab(browser, **look) as opened, served(told, free_port()) as address:
        await opened.goto(address)
        await expect(opened.locator("body.waiting")).to_have_count(0)
        yield opened, told


async def test_what_is_known_is_shown_and_follows(browser: Browser) -> None:
    async with shown(browser, a_page()) as (seen, told):
        assert TOKEN not in seen.url  # it is in a cookie by now
        assert TOKEN not in await seen.evaluate("document.cookie")
        await expect(seen.locator("h1")).to_have_text("run")
        await expect(seen.locator("#round")).to_have_text("20 of 1,000")
        await expect(seen.locator("#rate")).to_have_text("1 rounds/s")
        rows = seen.locator("#learner-rows tr")
        await expect(rows).to_have_count(3)
        assert [text.strip() for text in await rows.first.locator("th, td").all_inner_texts()][:4] == [
            "learner-0",
            "running",
            "20",
            "1 of 4",
        ]
        await expect(seen.locator("#nodes .node")).to_have_count(3)
        await expect(seen.locator("#edges .flows")).to_have_count(3)
        await expect(seen.locator("#captures-rows a")).to_have_attribute("href", "files/captures/run-1-ab/capture.json")
        await expect(seen.locator("#reports-rows a")).to_have_attribute("href", "files/old/report.html")
        await expect(seen.locator("#watch-rows tr")).to_have_count(4)
        assert told.asked == [""]
        page = a_page()
        assert page.run is not None
        await told.put(
            replace(page, run=replace(page.run, rounds_done=21, state="failed", detail="gone", ended_at=NOON + 21.0))
        )
        await expect(seen.locator("#round")).to_have_text("21 of 1,000")
        await expect(seen.locator("#state")).to_have_text("failed")
        await expect(seen.locator("#announcement")).to_contain_text("The run is failed")
        await expect(seen.locator("#notices")).to_contain_text("The run failed: gone")


async def test_a_finished_run_is_whole(browser: Browser) -> None:
    """Its report is one click away, traffic is that of the whole run, and a budget that is nearly used up warns of nothing."""
    page = a_page(reports=(ReportEntry("demo/report.html", "demo, finished", 200_000, NOON, "run-1"),))
    assert page.run is not None
    spent = tuple(replace(each, epsilon=3.7, epsilon_limit=4.0) for each in page.run.learners)
    async with shown(browser, replace(page, run=replace(page.run, learners=spent))) as (seen, told):
        await expect(seen.locator("#report")).to_have_attribute("href", "files/demo/report.html")
        await expect(seen.locator("#spent-meter")).to_have_class("meter near")
        ended = replace(page.run, learners=spent, state="finished", ended_at=NOON + 20.0)
        await told.put(replace(page, run=ended))
        await expect(seen.locator("#traffic-note")).to_have_text("in the whole run")
        await expect(seen.locator("#traffic")).to_have_text(f"{sum(each.messages for each in ended.edges)} messages")
        await expect(seen.locator("#spent-meter")).to_have_class("meter")
        await told.put(a_page())
        await expect(seen.locator("#report")).to_be_hidden()


async def test_backticks_become_code(browser: Browser) -> None:
    page = a_page(problems=(ConsoleProblem("no run is up: `sottovoce up` writes services.json", NOON),))
    assert page.run is not None
    warned = replace(page, run=replace(page.run, warnings=("see `sottovoce status`",)))
    async with shown(browser, warned) as (seen, _):
        await expect(seen.locator("#problems code")).to_have_text("sottovoce up")
        await expect(seen.locator("#notices code")).to_have_text("sottovoce status")
        assert "`" not in await seen.locator("main").inner_text()


@pytest.mark.parametrize("watched", [True, False])
async def test_the_grid_has_no_holes(browser: Browser, watched: bool) -> None:
    page = a_page() if watched else a_page(watch=None)
    async with shown(browser, page, viewport={"width": 1280, "height": 900}) as (seen, _):
        await expect(seen.locator("#learner-rows tr")).to_have_count(3)
        ends = """[...document.querySelectorAll('.pair > div')].map((each) =>
            Math.max(...[...each.querySelectorAll('section')].map((one) => one.getBoundingClientRect().bottom)))"""
        left, right = await seen.evaluate(ends)
        assert abs(left - right) < 1


async def test_text_of_others_is_text(browser: Browser) -> None:
    page = a_page()
    assert page.run is not None
    learners = tuple(replace(each, name=HOSTILE, warnings=(HOSTILE,), address=HOSTILE) for each in page.run.learners)
    run = replace(page.run, name=HOSTILE, detail=HOSTILE, warnings=(HOSTILE,), learners=learners)
    lines = tuple(replace(each, detail=HOSTILE, run_id=HOSTILE) for each in page.runs)
    captures = tuple(replace(each, name=HOSTILE, state=HOSTILE, path=HOSTILE) for each in page.captures)
    hostile = replace(page, run=run, runs=lines, captures=captures, problems=(ConsoleProblem(HOSTILE, NOON),))
    async with shown(browser, hostile) as (seen, _):
        await expect(seen.locator("h1")).to_have_text(HOSTILE)
        await expect(seen.locator("#problems")).to_contain_text(HOSTILE)
        assert await seen.locator("img, iframe, object").count() == 0
        assert await seen.title() == f"{HOSTILE}: running"


async def test_a_run_whose_coordinator_does_not_answer_is_not_said_to_run(browser: Browser) -> None:
    stale = a_page(is_stale=True, problems=(ConsoleProblem("nobody is there", NOON),))
    async with shown(browser, stale) as (seen, told):
        await expect(seen.locator("#state")).to_have_text("no answer")
        await expect(seen.locator("#problems")).to_contain_text("nobody is there")
        await expect(seen.locator("body.stale")).to_have_count(1)
        await told.put(a_page())
        await expect(seen.locator("#state")).to_have_text("running")
        await expect(seen.locator("body.stale")).to_have_count(0)


async def test_another_run_is_looked_at_by_its_link(browser: Browser) -> None:
    async with shown(browser, a_page()) as (seen, told):
        await seen.locator("#runs-rows a", has_text="run-0").click()
        await seen.wait_for_url("**/?run=run-0")
        await expect(seen.locator("body.waiting")).to_have_count(0)
        assert told.asked == ["", "run-0"]


@pytest.mark.parametrize("n", [1, 5, 50])
async def test_nothing_is_scrolled_sideways(browser: Browser, n: int) -> None:
    """Not on a phone, and not with fifty learners."""
    async with shown(browser, a_page(n), viewport={"width": 360, "height": 740}) as (seen, _):
        for width in (360, 768, 1280):
            await seen.set_viewport_size({"width": width, "height": 740})
            await expect(seen.locator("#learner-rows tr")).to_have_count(n)
            assert await seen.evaluate("document.documentElement.scrollWidth") <= width


async def test_fifty_learners_have_names_that_do_not_meet(browser: Browser) -> None:
    async with shown(browser, a_page(50), viewport={"width": 1280, "height": 900}) as (seen, _):
        await expect(seen.locator("#nodes .node")).to_have_count(50)
        await expect(seen.locator("#watch-rows tr")).to_have_count(7)  # all together, and the six that are nearest
        apart = """[...document.querySelectorAll('#nodes text')].map((each) => {
            const { a, b, c, d, e, f } = each.getScreenCTM(), { x, y, height } = each.getBBox();
            return [e + a * x + c * y, f + b * x + d * y, height * Math.hypot(c, d)];
        })"""
        places = await seen.evaluate(apart)
        for (x, y, height), (u, v, _) in zip(places, places[1:] + places[:1], strict=True):
            assert ((x - u) ** 2 + (y - v) ** 2) ** 0.5 > 0.8 * height
        await seen.set_viewport_size({"width": 360, "height": 740})
        await expect(seen.locator("#nodes text").first).to_be_hidden()


async def test_everything_is_reached_by_keyboard_in_its_order(browser: Browser) -> None:
    async with shown(browser, a_page(20)) as (seen, _):
        reached = []
        for _ in range(7):
            await seen.keyboard.press("Tab")
            reached.append(await seen.evaluate("document.activeElement.textContent.trim()"))
            outline = await seen.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline == "solid", reached[-1]
        assert reached == [
            "To the learners",
            "Edges as a table",
            "run-1-ab",
            "Show all 20",
            "run-1",
            "run-0",
            "old, finished",
        ]


async def test_the_keyboard_opens_and_skips(browser: Browser) -> None:
    async with shown(browser, a_page()) as (seen, _):
        await seen.keyboard.press("Tab")
        await seen.keyboard.press("Enter")
        await expect(seen.locator("#learners")).to_be_focused()
        await seen.locator("summary").focus()
        await seen.keyboard.press("Enter")
        await expect(seen.locator("#edge-rows tr")).to_have_count(3)


CONTRASTS = """() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const rgb = channels(getComputedStyle(each).backgroundColor);
      if (rgb.length < 4 || rgb[3] === 1) return rgb;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
    if (!own || !element.checkVisibility() || element.closest(".unseen, .skip, noscript, title, script")) continue;
    const style = getComputedStyle(element), drawn = element instanceof SVGElement;
    const [a, b] = [light(channels(drawn ? style.fill : style.color)), light(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push([element.textContent.slice(0, 40), element.className, ratio.toFixed(2)]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_stands_out_from_its_ground(browser: Browser, scheme: Any) -> None:
    """By WCAG's AA, for the smallest text: 4.5 to 1, in every state that a page may be in."""
    page = a_page(8)
    assert page.run is not None
    states = ["running", "disconnected", "lost", "failed", "finished", "stopped", "budget exhausted", "idle"]
    learners = tuple(
        replace(each, state=state, epsilon=0.7 * k, warnings=("look here",), accuracy=0.9, disconnected_since=NOON)
        for k, (each, state) in enumerate(zip(page.run.learners, states, strict=True))
    )
    run = replace(page.run, learners=learners, warnings=("something",), state="failed", ended_at=NOON + 20.0)
    assert page.watch is not None
    watch = replace(
        page.watch, alarms=1, learners=tuple(replace(each, log_e_value=99.0) for each in page.watch.learners)
    )
    many = replace(page, run=run, watch=watch, problems=(ConsoleProblem("the coordinator is away", NOON),))
    async with shown(browser, many, color_scheme=scheme) as (seen, told):
        assert await seen.evaluate(CONTRASTS) == []
        assert await hindrances(seen) == []
        await told.end()
        await expect(seen.locator("#lost")).to_be_visible()
        assert await seen.evaluate(CONTRASTS) == []


async def test_a_page_whose_console_is_gone_says_since_when_and_comes_back_by_itself(browser: Browser) -> None:
    port, told, again = free_port(), Told(a_page()), Told(a_page(4))
    async with tab(browser) as seen:
        async with served(told, port) as address:
            await seen.goto(address)
            await expect(seen.locator("#learner-rows tr")).to_have_count(3)
        await expect(seen.locator("#lost")).to_contain_text("Not connected since")
        await expect(seen.locator("#announcement")).to_contain_text("Not connected since")
        async with served(again, port):
            await expect(seen.locator("#learner-rows tr")).to_have_count(4)
            await expect(seen.locator("#lost")).to_be_hidden()
            await expect(seen.locator("#announcement")).to_contain_text("Connected again")
            await expect(seen.locator("body.stale")).to_have_count(0)
        async with served(Told(a_page()), port, token="c" * 30):
            await expect(seen.locator("#lost")).to_contain_text("another token")


async def test_nobody_looks_from_a_page_without_a_run(browser: Browser) -> None:
    async with shown(browser, ConsoleState(time=NOON, version="1")) as (seen, _):
        await expect(seen.locator("h1")).to_have_text("No run yet")
        await expect(seen.locator("#no-runs")).to_be_visible()
        await expect(seen.locator("#learners")).to_be_hidden()
