"""docs/reference/spec.md, with the pages that it names, has all fields of a spec and all words that they may be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from sottovoce_core.registry import Registry, Section
from sottovoce_core.spec import RunSpec

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
PAGES = {
    "sottovoce_core.algorithms.gradient_descent": "theory/gossip.md",
    "sottovoce_core.algorithms.admm": "theory/admm.md",
    "sottovoce_core.algorithms.follow_the_leader": "theory/pd-ftgl.md",
    "sottovoce_core.algorithms.dual_averaging": "theory/dpsda.md",
    "sottovoce_core.losses.torch": "guides/torch.md",
    "sottovoce_core.data.spec.Schema": "guides/data.md",
    "sottovoce_core.data.fields": "guides/data.md",
}
"""Where fields stand that docs/reference/spec.md leaves to another page, by the beginning of their section's name."""
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`]+)`")
WORD = re.compile(r"[\w-]+")
TABLE = re.compile(
    r"^\| `?(field|name|kind|graph|sequence|weights|partition)`? \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", re.MULTILINE
)


def sections_in(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[type[Section]]:
    """Sections that a value of an annotation may be."""
    if registries := [each for each in metadata if isinstance(each, Registry)]:
        yield from (registry.find(name) for registry in registries for name in registry.built_in_classes)
        return
    inner, *more = (get_args(annotation) or (annotation,)) if hasattr(annotation, "__metadata__") else (annotation,)
    if more or hasattr(annotation, "__metadata__"):
        yield from sections_in(inner, tuple(more))
    elif isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    else:
        for each in get_args(annotation):
            yield from sections_in(each)


def literals_in(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from (each for each in get_args(annotation) if isinstance(each, str))
    for each in get_args(annotation):
        yield from literals_in(each)


def walked(section: type[Section], seen: set[type[Section]]) -> set[type[Section]]:
    """All sections that a spec may have."""
    if section not in seen:
        seen.add(section)
        for field in section.model_fields.values():
            for each in sections_in(field.annotation, tuple(field.metadata)):
                walked(each, seen)
    return seen


def page_of(section: type[Section]) -> str:
    name = f"{section.__module__}.{section.__qualname__}"
    return next((page for beginning, page in PAGES.items() if name.startswith(beginning)), "reference/spec.md")


def words_of(page: str) -> set[str]:
    """All that stands in code there."""
    text = (DOCS / page).read_text(encoding="utf-8")
    codes = [*FENCE.findall(text), *CODE.findall(FENCE.sub("", text))]
    return {word for code in codes for word in WORD.findall(code)}


SECTIONS = sorted(walked(RunSpec, set()), key=lambda each: (each.__module__, each.__name__))
FIELDS = {
    (section, name): {name, *literals_in(field.annotation)}
    for section in SECTIONS
    for name, field in section.model_fields.items()
}
KNOWN = {word for words in FIELDS.values() for word in words}


def test_all_sections_are_found() -> None:
    assert len(SECTIONS) > 60 and len(KNOWN) > 120


@pytest.mark.parametrize("section", SECTIONS, ids=lambda each: each.__name__)
def test_the_page_has_every_field_and_every_word_of_it(section: type[Section]) -> None:
    there = words_of(page_of(section)) | {"name", "kind"}  # which docs/reference/spec.md says of all
    missing = {name: words - there for (of, name), words in FIELDS.items() if of is section and words - there}
    assert missing == {}, f"docs/{page_of(section)} lacks these"


def test_the_page_has_no_field_that_is_not_there() -> None:
    """In the first column of its tables of fields and kinds."""
    bodies = [body for _, body in TABLE.findall((DOCS / "reference/spec.md").read_text(encoding="utf-8"))]
    rows = [line.split("|")[1] for body in bodies for line in body.splitlines()]
    named = {word for row in rows for code in CODE.findall(row) for word in WORD.findall(code)}
    assert len(named) > 80
    assert named - KNOWN - {"module", "Class"} == set()
