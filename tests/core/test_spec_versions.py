"""Run specs between versions: a newer document is read without what is unknown, any other one to the letter."""

from __future__ import annotations

from typing import Any

import pytest

from sottovoce_core.errors import SpecError
from sottovoce_core.spec import RunSpec, parse_spec
from sottovoce_core.spec_versions import FORMAT, FORMAT_FIELD, STRICT_SECTIONS, add_format, drop_unknown_fields
from tests.examples import small_spec

pytestmark = pytest.mark.each

DOCUMENT: dict[str, Any] = small_spec(7, ["a", "b"], clock={"window": 3}).model_dump(mode="json")


def of_format(number: Any, **more: Any) -> dict[str, Any]:
    return {**add_format(DOCUMENT), FORMAT_FIELD: number, **more}


def test_what_is_written_can_be_read() -> None:
    document, left_out = drop_unknown_fields(add_format(DOCUMENT), RunSpec)
    assert (document, left_out) == (DOCUMENT, ())


def test_a_newer_document_loses_what_is_unknown() -> None:
    clock = {**DOCUMENT["clock"], "lenience_s": 9.0}
    newer = of_format(FORMAT + 1, participation=0.5, clock=clock)
    document, left_out = drop_unknown_fields(newer, RunSpec)
    assert document == DOCUMENT
    assert set(left_out) == {"clock.lenience_s", "participation"}
    assert parse_spec(document, allow_imports=True) == parse_spec(DOCUMENT, allow_imports=True)
    assert newer["participation"] == 0.5  # what came is not touched


@pytest.mark.parametrize("written", [FORMAT, None])
def test_any_other_document_is_held_to_the_letter(written: int | None) -> None:
    document = of_format(written, colour="red")
    if written is None:
        del document[FORMAT_FIELD]
    kept, left_out = drop_unknown_fields(document, RunSpec)
    assert left_out == ()
    with pytest.raises(SpecError, match="unknown field colour"):
        parse_spec(kept, allow_imports=True)


@pytest.mark.parametrize("section", sorted(STRICT_SECTIONS))
def test_nothing_is_left_out_that_a_guarantee_may_rest_on(section: str) -> None:
    """A condition that is not known would not be enforced."""
    assert section in RunSpec.model_fields
    changed = of_format(FORMAT + 1, **{section: {**DOCUMENT[section], "colour": "red"}})
    document, left_out = drop_unknown_fields(changed, RunSpec)
    assert left_out == ()
    with pytest.raises(SpecError, match="colour"):
        parse_spec(document, allow_imports=True)


def test_a_file_says_no_format() -> None:
    """The command line reads files of its own version."""
    with pytest.raises(SpecError, match="unknown field format"):
        parse_spec(add_format(DOCUMENT), allow_imports=True)


@pytest.mark.parametrize("written", [0, -1, "2", 1.5, True, None])
def test_a_format_that_is_none_is_refused(written: Any) -> None:
    with pytest.raises(SpecError, match="the format of a run spec must be a number from 1 on"):
        drop_unknown_fields(of_format(written), RunSpec)


@pytest.mark.parametrize("document", [[1], "text", None, 3])
def test_what_is_no_mapping_is_left_to_the_parser(document: object) -> None:
    assert drop_unknown_fields(document, RunSpec) == (document, ())
