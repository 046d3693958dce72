"""Fixtures of all tests of commands."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from typer.main import get_command

from sottovoce_client.reports import figure as figures
from sottovoce_client.reports.figure import Figure
from sottovoce_client.reports.page import Page
from sottovoce_client.reports.plot_elements import PlotView
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


@pytest.fixture(scope="session", autouse=True)
def _views_drawn_once() -> Iterator[None]:
    """Draw a view of a figure once for all pages: many differ in their text alone, and Matplotlib takes a second for a page."""
    draw, drawings = figures._inline, dict[bytes, str]()

    def draw_once(figure: Figure, view: PlotView, k: int, canvas: Any) -> str:
        content = figure.name, figure.title, figure.label, figure.height, figure.marks, view, k
        key = hashlib.sha256(pickle.dumps(content)).digest()
        if key not in drawings:
            drawings[key] = draw(figure, view, k, canvas)
        return drawings[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "_inline", draw_once)
        yield
