"""Fixtures of all tests of commands."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from typer.main import get_command

from sottovoce_client.reports.page import Page
from tests.client.paths import wrong_paths


@pytest.fixture(scope="session", autouse=True)
def _commands_built_once() -> Iterator[None]:
    """Build the options of all commands once for `CliRunner`, not for every call: they take a tenth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", cache(get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def _paths_of_all_pages_are_drawn() -> Iterator[None]:
    """Hold every page that a test makes against the grammar of SVG paths."""
    made = Page.to_html

    def html(page: Page) -> str:
        text = made(page)
        assert wrong_paths(text) == []
        return text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Page, "to_html", html)
        yield
