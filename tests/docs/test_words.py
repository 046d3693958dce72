"""Pages of words keep to the code: what glossary, tasks and the page on verdicts name exists, and what exists is named."""

from __future__ import annotations

import re
from typing import get_args

import typer

import sottovoce
from sottovoce_client.cli.app import app
from sottovoce_core.algorithms import ALGORITHMS
from sottovoce_core.auditing.verdict import VerdictKind
from tests.docs.commands import Named, mistake, named
from tests.docs.pages import CHECKOUT, text_of

ENTRY = re.compile(r"^## (.+)$", re.MULTILINE)
ROW = re.compile(r"^\| (?!I want to|---)(.+?) \| (.*?) ?\| (.*?) ?\|$", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
BOLD_CELL = re.compile(r"^\| \*\*([\w-]+)\*\* \|", re.MULTILINE)
DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
LINK = re.compile(r"\]\([^)]+\)")


def test_every_term_of_the_glossary_is_used_on_another_page() -> None:
    pages = [path for path in CHECKOUT.glob("docs/**/*.md") if path.name != "glossary.md"]
    text = " ".join(path.read_text(encoding="utf-8") for path in pages).lower()
    terms = ENTRY.findall(text_of("docs/reference/glossary.md"))
    assert terms == sorted(terms)
    assert [term for term in terms if not re.search(rf"\b{term.lower()}", text)] == []


def test_the_glossary_has_the_verdicts_that_there_are() -> None:
    entry = text_of("docs/reference/glossary.md").split("## Verdict\n")[1].split("\n## ")[0]
    assert sorted(CODE.findall(entry)) == sorted(get_args(VerdictKind))


def test_every_verdict_is_explained_without_a_formula() -> None:
    assert sorted(BOLD_CELL.findall(text_of("docs/audit/verdict.md"))) == sorted(get_args(VerdictKind))


def test_every_wish_has_a_command_or_a_page() -> None:
    wishes = ROW.findall(text_of("docs/start/tasks.md"))
    assert len(wishes) > 50
    assert len({wish for wish, _, _ in wishes}) == len(wishes)
    assert [wish for wish, command, more in wishes if not LINK.search(command + more)] == []


def test_every_command_of_a_wish_is_whole() -> None:
    """As one would type it: nothing that must be said is missing."""
    commands = [
        Named(each.words, whole=True)
        for each in named(text_of("docs/start/tasks.md"))
        if each.words[:1] != ("COMMAND",)
    ]
    assert len(commands) > 40
    assert [f"{each}: {mistake(each)}" for each in commands if mistake(each)] == []


def test_every_command_serves_a_wish() -> None:
    wished = {each.words[0] for each in named(text_of("docs/start/tasks.md"))}
    assert [name for name in typer.main.get_command(app).commands if name not in wished] == []  # type: ignore[attr-defined]


def test_every_algorithm_is_where_one_chooses_and_no_other() -> None:
    section = text_of("docs/reference/spec.md").split("## `algorithm`")[1].split("## `algorithm.step`")[0]
    kinds = "".join(re.findall(r"^\| `name` \| \|\n\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE))
    assert {name for row in kinds.splitlines() for name in CODE.findall(row.split("|")[1])} == set(
        ALGORITHMS.built_in_classes
    )
    listed = text_of("docs/reference/algorithms.md").split("## All of them")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in listed.splitlines() if line.startswith("| `")]
    assert sorted(CODE.findall(" ".join(rows))) == sorted(ALGORITHMS.built_in_classes)


def test_every_public_name_of_the_package_is_in_the_python_reference() -> None:
    """Under its own path, or in a module that the pages list as a whole."""
    listed = [name for path in CHECKOUT.glob("docs/api/*.md") for name in DIRECTIVE.findall(path.read_text("utf-8"))]
    paths = {name: f"{module}.{name}" for module, names in sottovoce._MODULES.items() for name in names}
    assert [name for name, path in paths.items() if path not in listed and path.rpartition(".")[0] not in listed] == []
