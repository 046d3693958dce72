"""Whoever follows a tutorial sees what it shows: every command is typed, from the first to the last, into an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.following import follow
from tests.docs.left_out import NOT_RUN
from tests.docs.outputs import shows
from tests.docs.pages import CHECKOUT, PAGES, blocks, text_of
from tests.docs.shell import isolated

ENTRY = re.compile(r"^## (.+)$", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_tutorial_does_what_it_says(page: str, tmp_path: Path) -> None:
    if not isolated():
        pytest.skip("no network of its own can be had here (unshare), and its services listen at the ports of the page")
    followed = 0
    for said in follow(page, tmp_path / "page"):
        assert said.code == 0, said.text
        assert said.shown or not said.block.output or not said.whole, f"{said.block.text}now prints\n{said.text}"
        followed += 1
    assert followed > 3


@pytest.mark.parametrize("page", PAGES)
def test_what_is_left_out_is_there(page: str) -> None:
    commands = [command for block in blocks(text_of(page)) for command in block.commands]
    for start in NOT_RUN[page]:
        assert any(command.startswith(start) for command in commands), start


def test_an_output_is_held_to_its_words_and_numbers() -> None:
    assert shows("epsilon 1.999, in 3 s\n", "epsilon 1.998, in 12 min\n", exact=True)
    assert not shows("epsilon 1.999\n", "epsilon 1.5\n", exact=True)
    assert shows("epsilon 1.999\n", "epsilon 1.5\n", exact=False)
    assert not shows("epsilon 1.999\n", "delta 1.999\n", exact=False)
    assert shows("\u2026 REFUTED\n\u2026\n", "north REFUTED\nthe claim\n", exact=True)
    assert not shows("\u2026 REFUTED\n\u2026\n", "north CONSISTENT\n", exact=False)


def test_every_term_of_the_glossary_is_used_on_another_page() -> None:
    pages = [path for path in CHECKOUT.glob("docs/*.md") if path.name != "glossary.md"]
    text = " ".join(path.read_text(encoding="utf-8") for path in pages).lower()
    terms = ENTRY.findall((CHECKOUT / "docs" / "glossary.md").read_text(encoding="utf-8"))
    assert terms == sorted(terms)
    assert [term for term in terms if not re.search(rf"\b{term.lower()}", text)] == []
