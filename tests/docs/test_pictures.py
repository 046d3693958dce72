"""Every picture of docs/images has a recipe, by which it can be made again, and a page that shows it.

The figures in its folder `papers` are drawn by `python -m experiments --pages`: tests/test_experiments.py.
"""

from __future__ import annotations

import re

import pytest

from tests.docs.commands import mistake, named
from tests.docs.pages import CHECKOUT, text_of

pictures = pytest.importorskip("tests.docs.pictures", reason="pictures are taken by Playwright")
SHOWN = re.compile(r"!\[[^\]]*\]\((?:(?:\.\./)?docs/|\.\./)?images/([\w.-]+)\)")
SHOWING = [CHECKOUT / "README.md", CHECKOUT / "benchmarks" / "README.md", *CHECKOUT.glob("docs/**/*.md")]
PICTURES = sorted(path.name for path in pictures.IMAGES.iterdir() if path.is_file())


def test_every_picture_can_be_made_again() -> None:
    assert (
        sorted(file for name in {*pictures.RECIPES, *pictures.DRAWN} for file in pictures.list_files(name)) == PICTURES
    )
    assert not pictures.DRAWN & set(pictures.RECIPES)


def test_every_picture_is_shown() -> None:
    pages = [path.relative_to(CHECKOUT).as_posix() for path in SHOWING]
    shown = {name for page in pages for name in SHOWN.findall(text_of(page))}
    assert sorted(file for name in shown for file in pictures.list_files(name)) == PICTURES


def test_a_recipe_is_a_command_that_there_is() -> None:
    for recipe in pictures.REPORTS.values():
        (command,) = named(f"```sh\n{recipe.command}\n```\n")
        assert mistake(command) == ""


def test_a_screen_is_what_was_drawn_last() -> None:
    drawn = "one\r\nround 1/500\r\n\x1b[2K\x1b[1A\x1b[2K\x1b[1Around 2/500\r\n"
    assert pictures.REDRAWN.split(pictures.UNSEEN.sub("", f"\x1b[?25l{drawn}"))[-1] == "round 2/500\r\n"
