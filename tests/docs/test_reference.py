"""The reference pages are those of the code, and all fields of a spec and all options have a description."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import typer

from sottovoce_client.cli.app import app
from sottovoce_core.registry import Registry, Section
from sottovoce_core.spec import RunSpec
from tests.docs.pages import CHECKOUT, text_of

sys.path.insert(0, str(CHECKOUT / "docs" / "theme"))
import reference


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


def walk(section: type[Section], seen: set[type[Section]]) -> set[type[Section]]:
    """All sections that a spec may have."""
    if section not in seen:
        seen.add(section)
        for field in section.model_fields.values():
            for each in sections_in(field.annotation, tuple(field.metadata)):
                walk(each, seen)
    return seen


SECTIONS = sorted(walk(RunSpec, set()), key=lambda each: (each.__module__, each.__name__))


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_page_is_fresh(name: str) -> None:
    page = text_of(f"docs/reference/{name}")
    generated = "\n".join(reference.PAGES[name]())
    assert page.partition(reference.MARKER)[2] == generated, "run `python docs/theme/reference.py`"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda each: each.__name__)
def test_every_field_has_a_description_and_a_row(section: type[Section]) -> None:
    assert len(SECTIONS) > 60
    fields = (
        section.model_fields.keys() - {"kind", "type"} - ({"name"} if "algorithms" in section.__module__ else set())
    )
    assert fields - section.get_field_docs().keys() == set()
    rows = text_of("docs/reference/spec.md")
    assert [name for name in fields if f"\n| `{name}` |" not in rows] == []


def test_the_json_schema_describes_fields_for_editors() -> None:
    schema = RunSpec.model_json_schema()
    assert schema["$defs"]["ClockSpec"]["properties"]["window"]["description"].startswith("Rounds leased at a time")
    ldp_dol = next(each for each in schema["properties"]["algorithm"]["anyOf"] if each.get("title") == "LdpDolSpec")
    assert ldp_dol["properties"]["lam0"]["description"] == "Step size in round t: lam0/(t+1)^v."


def test_every_command_and_option_has_a_help_text() -> None:
    commands = list(reference._iterate_commands(typer.main.get_command(app), ()))
    assert len(commands) > 40
    missing = [
        (*words, each.opts[0])
        for words, command in commands
        for each in command.params
        if not each.help and not getattr(each, "hidden", False)
    ]
    assert missing == [] and all(command.help for _, command in commands)
