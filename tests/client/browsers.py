"""Pages in a browser: a Chromium that is there, tabs that notice every error, and axe-core, which finds what hinders readers."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

import pytest
from playwright.async_api import Browser, Page, async_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
GUARD_MS = 60_000.0
"""Longest that a test waits for what must happen."""
NEEDED = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH"),
    pytest.mark.asyncio(loop_scope="module"),
]


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """One for all tests of a module: each has a context of its own."""
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        await started.close()


@asynccontextmanager
async def tab(browser: Browser, **look: Any) -> AsyncIterator[Page]:
    """An empty one; at its end the page has had no error."""
    context = await browser.new_context(**{"reduced_motion": "reduce", **look})
    page, errors = await context.new_page(), list[str]()
    page.set_default_timeout(GUARD_MS)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if "Content Security Policy" in said.text else None)
    yield page
    await context.close()
    assert errors == []


async def hindrances(page: Page) -> list[tuple[str, str]]:
    """Rules of WCAG 2.2, up to AA, that the page breaks, and what breaks each first."""
    axe = pytest.importorskip("axe_playwright_python", reason="axe-core is not installed (axe-playwright-python)")
    await page.evaluate((files(axe) / "axe.min.js").read_text(encoding="utf-8"))
    tags = [f"wcag{version}{level}" for version in ("2", "21", "22") for level in ("a", "aa")] + ["best-practice"]
    passes, broken = await page.evaluate(
        """async (values) => {
            const asked = { runOnly: { type: 'tag', values }, resultTypes: ['violations'] };
            const { passes, violations } = await axe.run(document, asked);
            return [passes.length, violations.map((each) => [each.id, each.nodes[0].html.slice(0, 200)])];
        }""",  # all that passes is megabytes of JSON, which Playwright checks value by value
        tags,
    )
    assert passes
    return [(rule, html) for rule, html in broken]
