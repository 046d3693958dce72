"""The page in a real browser: what it shows, on a phone, by keyboard, its contrasts, fifty learners, and that it comes back."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from playwright.async_api import Page as Tab
from playwright.async_api import async_playwright, expect

from sottovoce_client.web.view import Page, Problem
from tests.client.consoles import NOON, TOKEN, Told, a_page, free_port, served

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
GUARD_MS = 60_000.0
"""Longest that a test waits for what must happen."""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")
expect.set_options(timeout=GUARD_MS)

HOSTILE = "<img src=x onerror=document.title='broken'>"


@asynccontextmanager
async def tab(**look: Any) -> AsyncIterator[Tab]:
    """An empty one; at its end the page has had no error."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            context = await browser.new_context(**{"reduced_motion": "reduce", **look})
            page = await context.new_page()
            page.set_default_timeout(GUARD_MS)
            errors: list[str] = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on(
                "console", lambda said: errors.append(said.text) if "Content Security Policy" in said.text else None
            )
            yield page
            assert errors == []
        finally:
            await browser.close()


@asynccontextmanager
async def shown(page: Page, **look: Any) -> AsyncIterator[tuple[Tab, Told]]:
    """A page of a console that was opened by its address, and has heard from it."""
    told = Told(page)
    async with tab(**look) as browser, served(told, free_port()) as address:
        await browser.goto(address)
        await expect(browser.locator("body.waiting")).to_have_count(0)
        yield browser, told


async def test_what_is_known_is_shown_and_follows() -> None:
    async with shown(a_page()) as (browser, told):
        assert TOKEN not in browser.url  # it is in a cookie by now
        assert TOKEN not in await browser.evaluate("document.cookie")
        await expect(browser.locator("h1")).to_have_text("run")
        await expect(browser.locator("#round")).to_have_text("20 of 1,000")
        await expect(browser.locator("#rate")).to_have_text("1 rounds/s")
        rows = browser.locator("#learner-rows tr")
        await expect(rows).to_have_count(3)
        assert [text.strip() for text in await rows.first.locator("th, td").all_inner_texts()][:4] == [
            "learner-0",
            "running",
            "20",
            "1 of 4",
        ]
        await expect(browser.locator("#nodes .node")).to_have_count(3)
        await expect(browser.locator("#edges .flows")).to_have_count(3)
        await expect(browser.locator("#captures-rows a")).to_have_attribute(
            "href", "files/captures/run-1-ab/capture.json"
        )
        await expect(browser.locator("#reports-rows a")).to_have_attribute("href", "files/old/report.html")
        await expect(browser.locator("#watch-rows tr")).to_have_count(4)
        assert told.asked == [""]
        page = a_page()
        assert page.run is not None
        await told.put(replace(page, run=replace(page.run, round=21, state="failed", detail="gone", ended=NOON + 21.0)))
        await expect(browser.locator("#round")).to_have_text("21 of 1,000")
        await expect(browser.locator("#state")).to_have_text("failed")
        await expect(browser.locator("#said")).to_contain_text("The run is failed")
        await expect(browser.locator("#notices")).to_contain_text("The run failed: gone")


async def test_text_of_others_is_text() -> None:
    page = a_page()
    assert page.run is not None
    learners = tuple(replace(each, name=HOSTILE, notices=(HOSTILE,), address=HOSTILE) for each in page.run.learners)
    run = replace(page.run, name=HOSTILE, detail=HOSTILE, notices=(HOSTILE,), learners=learners)
    lines = tuple(replace(each, detail=HOSTILE, run_id=HOSTILE) for each in page.runs)
    captures = tuple(replace(each, name=HOSTILE, state=HOSTILE, path=HOSTILE) for each in page.captures)
    hostile = replace(page, run=run, runs=lines, captures=captures, problems=(Problem(HOSTILE, NOON),))
    async with shown(hostile) as (browser, _):
        await expect(browser.locator("h1")).to_have_text(HOSTILE)
        await expect(browser.locator("#problems")).to_contain_text(HOSTILE)
        assert await browser.locator("img, iframe, object").count() == 0
        assert await browser.title() == f"{HOSTILE}: running"


async def test_another_run_is_looked_at_by_its_link() -> None:
    async with shown(a_page()) as (browser, told):
        await browser.locator("#runs-rows a", has_text="run-0").click()
        await browser.wait_for_url("**/?run=run-0")
        await expect(browser.locator("body.waiting")).to_have_count(0)
        assert told.asked == ["", "run-0"]


@pytest.mark.parametrize("n", [1, 5, 50])
async def test_nothing_is_scrolled_sideways(n: int) -> None:
    """Not on a phone, and not with fifty learners."""
    async with shown(a_page(n), viewport={"width": 360, "height": 740}) as (browser, _):
        for width in (360, 768, 1280):
            await browser.set_viewport_size({"width": width, "height": 740})
            await expect(browser.locator("#learner-rows tr")).to_have_count(n)
            assert await browser.evaluate("document.documentElement.scrollWidth") <= width


async def test_fifty_learners_have_names_that_do_not_meet() -> None:
    async with shown(a_page(50), viewport={"width": 1280, "height": 900}) as (browser, _):
        await expect(browser.locator("#nodes .node")).to_have_count(50)
        await expect(browser.locator("#watch-rows tr")).to_have_count(7)  # all together, and the six that are nearest
        apart = """[...document.querySelectorAll('#nodes text')].map((each) => {
            const spot = each.getScreenCTM(), box = each.getBBox();
            return [spot.e + spot.a * box.x + spot.c * box.y, spot.f + spot.b * box.x + spot.d * box.y, box.height * Math.hypot(spot.c, spot.d)];
        })"""
        places = await browser.evaluate(apart)
        for (x, y, height), (u, v, _) in zip(places, places[1:] + places[:1], strict=True):
            assert ((x - u) ** 2 + (y - v) ** 2) ** 0.5 > 0.8 * height
        await browser.set_viewport_size({"width": 360, "height": 740})
        await expect(browser.locator("#nodes text").first).to_be_hidden()


async def test_everything_is_reached_by_keyboard_in_its_order() -> None:
    async with shown(a_page(20)) as (browser, _):
        seen = []
        for _ in range(9):
            await browser.keyboard.press("Tab")
            seen.append(await browser.evaluate("document.activeElement.textContent.trim()"))
            outline = await browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline == "solid", seen[-1]
        assert seen[:7] == [
            "To the learners",
            "Edges as a table",
            "Show all 20",
            "run-1",
            "run-0",
            "old, finished",
            "run-1-ab",
        ]


async def test_the_keyboard_opens_and_skips() -> None:
    async with shown(a_page()) as (browser, _):
        await browser.keyboard.press("Tab")
        await browser.keyboard.press("Enter")
        await expect(browser.locator("#learners")).to_be_focused()
        await browser.locator("summary").focus()
        await browser.keyboard.press("Enter")
        await expect(browser.locator("#edge-rows tr")).to_have_count(3)


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
async def test_text_stands_out_from_its_ground(scheme: Any) -> None:
    """By WCAG's AA, for the smallest text: 4.5 to 1, in every state that a page may be in."""
    page = a_page(8)
    assert page.run is not None
    states = ["running", "away", "lost", "failed", "finished", "stopped", "budget exhausted", "idle"]
    learners = tuple(
        replace(each, state=state, epsilon=0.7 * k, notices=("look here",), accuracy=0.9, away_since=NOON)
        for k, (each, state) in enumerate(zip(page.run.learners, states, strict=True))
    )
    run = replace(page.run, learners=learners, notices=("something",), state="failed", ended=NOON + 20.0)
    assert page.watch is not None
    watch = replace(page.watch, alarms=1, learners=tuple(replace(each, e=99.0) for each in page.watch.learners))
    many = replace(page, run=run, watch=watch, problems=(Problem("the coordinator is away", NOON),))
    async with shown(many, color_scheme=scheme) as (browser, told):
        assert await browser.evaluate(CONTRASTS) == []
        await told.end()
        await expect(browser.locator("#lost")).to_be_visible()
        assert await browser.evaluate(CONTRASTS) == []


async def test_a_page_whose_console_is_gone_says_since_when_and_comes_back_by_itself() -> None:
    port, told, again = free_port(), Told(a_page()), Told(a_page(4))
    async with tab() as browser:
        async with served(told, port) as address:
            await browser.goto(address)
            await expect(browser.locator("#learner-rows tr")).to_have_count(3)
        await expect(browser.locator("#lost")).to_contain_text("Not connected since")
        await expect(browser.locator("#said")).to_contain_text("Not connected since")
        async with served(again, port):
            await expect(browser.locator("#learner-rows tr")).to_have_count(4)
            await expect(browser.locator("#lost")).to_be_hidden()
            await expect(browser.locator("#said")).to_contain_text("Connected again")
            await expect(browser.locator("body.stale")).to_have_count(0)
        async with served(Told(a_page()), port, token="c" * 30):
            await expect(browser.locator("#lost")).to_contain_text("another token")


async def test_nobody_looks_from_a_page_without_a_run() -> None:
    async with shown(Page(at=NOON, version="1")) as (browser, _):
        await expect(browser.locator("h1")).to_have_text("No run yet")
        await expect(browser.locator("#no-runs")).to_be_visible()
        await expect(browser.locator("#learners")).to_be_hidden()
