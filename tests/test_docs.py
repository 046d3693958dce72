"""Pages lead where they say: paths exist, and so do the files and headings that links name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
PAGES = [CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md", CHECKOUT / "SECURITY.md", *CHECKOUT.glob("docs/**/*.md")]
FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
FOLDERS = "core|services|clients|coordinator|proto|tests|benchmarks|deploy|examples"
CODE_PATH = re.compile(rf"`((?:{FOLDERS})/[^`\s]*)`")
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
NAMED_PAGE = re.compile(r"(?<![\w/])(docs/[a-z/-]+\.md)(?:#([a-z0-9-]+))?")
TOLD = {".md", ".py", ".ipynb", ".j2", ".html", ".sh", ".yaml"}
"""Kinds of files that tell readers what to install."""
HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)


def _prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def _spread(path: str) -> list[str]:
    """`a/{b,c}.py` names two files."""
    choice = re.search(r"\{([^}]*)\}", path)
    if choice is None:
        return [path]
    return [made for part in choice[1].split(",") for made in _spread(path.replace(choice[0], part.strip(), 1))]


def _anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and the site make them."""
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()) for heading in HEADING.findall(_prose(page)))
    return {re.sub(r"\s+", "-", heading.strip()) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(CHECKOUT).as_posix())
def test_a_page_leads_where_it_says(page: Path) -> None:
    text = _prose(page)
    named = [path for found in CODE_PATH.findall(text) for path in _spread(found)]
    missing = [path for path in named if not any(CHECKOUT.glob(path.rstrip("/")))]
    for target, anchor in LINK.findall(text):
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            missing.append(f"{target}#{anchor}")

    assert missing == []


def test_pages_that_other_files_name_exist() -> None:
    """With their headings: error messages, comments and help texts send readers there."""
    files = [each for folder in (*FOLDERS.split("|"), "experiments", ".ci") for each in (CHECKOUT / folder).rglob("*")]
    named = {
        (each, page, anchor)
        for each in [*files, CHECKOUT / "noxfile.py"]
        if each.suffix in TOLD | {".proto", ".toml", ".mjs", ".service"}
        for page, anchor in NAMED_PAGE.findall(each.read_text(encoding="utf-8"))
    }
    assert len(named) > 30
    missing = [
        (str(each), page, anchor)
        for each, page, anchor in named
        if not (CHECKOUT / page).exists() or (anchor and anchor not in _anchors(CHECKOUT / page))
    ]
    assert missing == []


def test_links_and_paths_are_found() -> None:
    """What the test above looks for is there to be found."""
    assert LINK.findall("[a](b.md#c-d), ![e](f.png), [g](https://h.org)") == [("b.md", "c-d"), ("f.png", "")]
    assert [_spread(path) for path in CODE_PATH.findall("`core/a/{b,c}.py` `other/d`")] == [
        ["core/a/b.py", "core/a/c.py"]
    ]


def test_whoever_is_told_to_install_something_can() -> None:
    """No package index has a release: extras are installed from a clone, and these extras exist."""
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    folders = ("docs", "deploy", "examples", "benchmarks", *FOLDERS.split("|")[:4])
    files = [each for folder in folders for each in (CHECKOUT / folder).rglob("*") if each.suffix in TOLD]
    told = [
        (each, line)
        for each in [*PAGES, *files]
        for line in re.findall(r"pip install [^\n]*|format_install_hint\([^)]*\)", each.read_text(encoding="utf-8"))
    ]
    assert len(told) > 20
    for each, line in told:
        assert not re.search(r"pip install '?sottovoce(?!-\*\.whl)", line), (each, line)
        named = re.findall(r"'\.\[([\w,]+)\]'", line) + re.findall(r"format_install_hint\([\"']([\w-]+)[\"']\)", line)
        assert {name for group in named for name in group.split(",")} <= extras.keys(), (each, line)
