"""The built site in a browser: readable on a phone, in light and dark, and with a screen reader; `nox -s docs` builds it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from tests.client.browsers import NEEDED, chromium, hindrances, tab
from tests.docs.pages import CHECKOUT

SITE = CHECKOUT / "site"
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html") if path.name != "404.html")
"""Pages that open from files; a server shows 404.html for each address that does not exist, so its links are absolute."""
SAMPLE = [
    *("index.html", "start/engineer.html", "operate/deploy.html", "privacy/concepts.html", "reference/spec.html"),
    *("papers/ldp-dol.html", "api/audit.html", "CONTRIBUTING.html"),
]
"""A page of each kind: the first one, a tutorial, and those with tabs, drawings, wide tables, figures or signatures."""
pytestmark = [*NEEDED, pytest.mark.skipif(not PAGES, reason="the site is not built: nox -s docs")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


async def test_no_page_is_scrolled_sideways_on_a_phone(browser: Browser) -> None:
    widths = {}
    async with tab(browser, viewport={"width": 400, "height": 800}) as seen:
        for page in PAGES:
            await seen.goto((SITE / page).as_uri())
            widths[page] = await seen.evaluate("document.documentElement.scrollWidth")
    assert {page: width for page, width in widths.items() if width > 400} == {}


@pytest.mark.parametrize(("scheme", "width"), [("dark", 400), ("light", 1280)])
async def test_nothing_hinders_a_reader(browser: Browser, scheme: Any, width: int) -> None:
    async with tab(browser, color_scheme=scheme, viewport={"width": width, "height": 800}) as seen:
        for page in SAMPLE:
            await seen.goto((SITE / page).as_uri())
            assert (page, await hindrances(seen)) == (page, [])


async def test_a_table_is_cards_on_a_phone(browser: Browser) -> None:
    async with tab(browser, viewport={"width": 400, "height": 800}) as seen:
        await seen.goto((SITE / "reference/spec.html").as_uri())
        cell = seen.locator("td[data-label=meaning]").first
        assert await cell.evaluate("cell => getComputedStyle(cell, '::before').content") == '"meaning"'
        await seen.set_viewport_size({"width": 1280, "height": 800})
        assert await cell.evaluate("cell => getComputedStyle(cell, '::before').content") == "none"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_screenshot_has_the_scheme_of_the_page(browser: Browser, scheme: Any) -> None:
    async with tab(browser, color_scheme=scheme) as seen:
        await seen.goto((SITE / "index.html").as_uri())
        shown = await seen.locator("article img[src*='.png']").evaluate_all(
            "images => images.filter((image) => image.checkVisibility()).map((image) => image.getAttribute('src'))"
        )
    assert shown == [f"images/report{'-dark' if scheme == 'dark' else ''}.png#only-{scheme}"]
