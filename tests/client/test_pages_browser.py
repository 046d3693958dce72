"""Reports in a real browser: on a screen, a phone and paper, by keyboard, without scripts, in light and dark."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect
from playwright.async_api import Page as Tab

from sottovoce_client.reports.page import Page
from sottovoce_client.reports.run_report import build_run_page
from tests.client.browsers import GUARD_MS, NEEDED, chromium, hindrances, tab
from tests.client.summaries import summary
from tests.client.test_pages import PAGES

pytestmark = NEEDED
expect.set_options(timeout=GUARD_MS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


async def opened(seen: Tab, page: Page, folder: Path) -> Tab:
    page.write(folder / "page.html")
    await seen.goto((folder / "page.html").as_uri())
    return seen


def of_many(name: str) -> Page:
    return build_run_page(summary(12, 40, name=name))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("made", [*PAGES, of_many])
async def test_nothing_hinders_a_reader(
    browser: Browser, tmp_path: Path, made: Callable[[str], Page], scheme: Any
) -> None:
    async with tab(browser, color_scheme=scheme) as seen:
        await opened(seen, made("wards"), tmp_path)
        assert await hindrances(seen) == []
        await seen.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert await hindrances(seen) == []


@pytest.mark.parametrize("made", [*PAGES, of_many])
async def test_nothing_but_tables_is_scrolled_sideways(
    browser: Browser, tmp_path: Path, made: Callable[[str], Page]
) -> None:
    async with tab(browser, viewport={"width": 360, "height": 740}) as seen:
        await opened(seen, made("wards"), tmp_path)
        for width in (360, 768, 1280):
            await seen.set_viewport_size({"width": width, "height": 740})
            assert await seen.evaluate("document.documentElement.scrollWidth") <= width


async def test_no_line_of_facts_begins_with_a_dot(browser: Browser, tmp_path: Path) -> None:
    """Dots lie in the 20 pixels before a fact; those before the first one of a line are cut off."""
    async with tab(browser, viewport={"width": 390, "height": 844}) as seen:
        await opened(seen, build_run_page(summary()), tmp_path)
        places = await seen.evaluate(
            """() => {
                const facts = document.querySelector('.facts'), left = facts.getBoundingClientRect().left;
                const boxes = [...facts.children].map((each) => each.getBoundingClientRect());
                const first = boxes.filter((box, k) => k === 0 || box.top > boxes[k - 1].top);
                return [getComputedStyle(facts).clipPath, ...first.map((box) => box.left - left)];
            }"""
        )
        assert places == ["inset(0px 0px 0px 20px)", *[0] * (len(places) - 1)] and len(places) > 2


async def test_a_page_is_as_dark_as_its_reader_likes(browser: Browser, tmp_path: Path) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        async with tab(browser, color_scheme=scheme) as seen:
            await opened(seen, build_run_page(summary(2, 20)), tmp_path)
            grounds.append(await seen.evaluate("getComputedStyle(document.body).backgroundColor"))
            if scheme == "dark":  # paper is white
                await seen.emulate_media(media="print")
                grounds.append(await seen.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(244, 246, 248)", "rgb(16, 23, 30)", "rgb(255, 255, 255)"]


async def test_another_view_is_chosen_without_a_script(browser: Browser, tmp_path: Path) -> None:
    async with tab(browser, java_script_enabled=False) as seen:
        await opened(seen, build_run_page(summary(2, 20)), tmp_path)
        views = seen.locator("#plot-budget .view")
        await expect(views.nth(0)).to_be_visible()
        await expect(views.nth(1)).to_be_hidden()
        await seen.locator("#plot-budget label").nth(1).click()
        await expect(views.nth(1)).to_be_visible()
        await expect(views.nth(0)).to_be_hidden()


async def test_figures_are_as_wide_as_there_is_room_and_as_dark_as_the_page(browser: Browser, tmp_path: Path) -> None:
    made, inks = build_run_page(summary(2, 20)), []
    for scheme in ("light", "dark"):
        async with tab(browser, color_scheme=scheme, viewport={"width": 1280, "height": 900}) as seen:
            await opened(seen, made, tmp_path)
            drawn = seen.locator("#plot-budget .view:visible .drawn")
            for width, least, most in ((1280, 700, 760), (360, 280, 340)):
                await seen.set_viewport_size({"width": width, "height": 900})
                box = await drawn.bounding_box()
                assert box is not None and least <= box["width"] <= most
            inks.append(await drawn.locator("text").first.evaluate("(each) => getComputedStyle(each).fill"))
    assert inks == ["rgb(79, 93, 106)", "rgb(169, 182, 194)"]


async def test_a_table_with_more_than_is_seen_is_reached_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    async with tab(browser, viewport={"width": 700, "height": 844}) as seen:
        await opened(seen, build_run_page(summary()), tmp_path)
        await seen.get_by_text("All figures of each learner").click()
        table = seen.get_by_role("region", name="Learner by learner, all figures, a table")
        await expect(table).to_have_attribute("tabindex", "0")
        await table.focus()
        await seen.keyboard.press("ArrowRight")
        # In the browser: the page's policy lets no waiting of Playwright's own run in it.
        await table.evaluate(
            """(each) => new Promise((done) => {
                const look = () => (each.scrollLeft > 0 ? done() : requestAnimationFrame(look));
                look();
            })"""
        )
        await seen.set_viewport_size({"width": 1280, "height": 844})
        await expect(table).to_have_attribute("tabindex", "-1")


async def test_on_a_phone_each_row_of_a_table_is_a_card(browser: Browser, tmp_path: Path) -> None:
    """Each value stands beside its name, and nothing is cut off or wider than the card."""
    async with tab(browser, viewport={"width": 400, "height": 844}) as seen:
        await opened(seen, build_run_page(summary()), tmp_path)
        await seen.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        region = seen.get_by_role("region", name="Learner by learner, a table")
        cell = region.locator("tbody tr").first.locator("td").first
        assert await cell.evaluate("(each) => getComputedStyle(each, '::before').content") == '"records"'
        await expect(cell).to_have_text("1,300")
        cut = """[...document.querySelectorAll('.fold :is(th, td)')]
            .filter((each) => each.checkVisibility() && each.scrollWidth > each.clientWidth + 1 && !each.closest('thead'))
            .map((each) => each.outerHTML)"""
        assert await seen.evaluate(cut) == []
        scrolled = (
            "[...document.querySelectorAll('.wide:has(.fold)')].map((each) => each.scrollWidth - each.clientWidth)"
        )
        assert max(await seen.evaluate(scrolled)) <= 0


@pytest.mark.parametrize("width", [360, 1280])
async def test_panels_repeat_the_axes_of_the_first_in_the_same_size(
    browser: Browser, tmp_path: Path, width: int
) -> None:
    async with tab(browser, viewport={"width": width, "height": 844}) as seen:
        await opened(seen, build_run_page(summary(5)), tmp_path)
        heights = "[...document.querySelectorAll('#plot-learning .drawn')].map((each) => each.getBBox().height)"
        found = await seen.evaluate(heights)
        assert len(found) == 5 and max(found) - min(found) < 1


async def test_on_paper_a_report_takes_few_pages_and_loses_nothing(browser: Browser, tmp_path: Path) -> None:
    async with tab(browser) as seen:
        await opened(seen, build_run_page(summary()), tmp_path)
        paper = await seen.pdf(format="A4")
        assert 3 <= paper.count(b"/Type /Page\n") <= 4
        await seen.emulate_media(media="print")
        await seen.set_viewport_size({"width": 694, "height": 1000})  # A4, less its margins
        wide = "[...document.querySelectorAll('table')].filter((each) => each.checkVisibility()).map((each) => each.offsetWidth)"
        assert max(await seen.evaluate(wide)) <= 694
        await expect(seen.locator(".views:visible")).to_have_count(0)
