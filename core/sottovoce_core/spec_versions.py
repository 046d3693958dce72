"""Run specs between versions: the format of a document, and what a reader leaves out of a newer one.

A document that crosses the wire says its format. A service that is older than the sender leaves out fields that it does not
know, so that one new field does not shut it out; one of its own format is held to the letter, as any file is.

Not so in the sections that a guarantee rests on: there a field that is not known is a condition that would not be
enforced, so it is left for the parser to refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sottovoce_core.errors import SpecError

if TYPE_CHECKING:
    from pydantic import BaseModel

FORMAT = 1
"""The format of documents that this version writes. One more whenever a field is added, or means something else."""
FORMAT_FIELD = "format"
STRICT_SECTIONS = frozenset({"algorithm", "loss", "decision_set", "topology", "privacy"})
"""Sections that a guarantee rests on."""


def add_format(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with its format, for the wire."""
    return {FORMAT_FIELD: FORMAT, **document}


def drop_unknown_fields(document: object, model: type[BaseModel]) -> tuple[object, tuple[str, ...]]:
    """The document as a reader of this version takes it, and the names of the fields that were left out of it.

    Args:
        document: from the wire, as JSON gives it; without a format it is in the first one.
        model: of a run spec.

    Raises:
        SpecError: a format that is none.
    """
    if not isinstance(document, Mapping):
        return document, ()
    fields = dict(document)
    written = fields.pop(FORMAT_FIELD, 1)
    if not isinstance(written, int) or isinstance(written, bool) or written < 1:
        raise SpecError(f"the format of a run spec must be a number from 1 on, got {written!r}")
    if written <= FORMAT:
        return fields, ()
    left_out: list[str] = []
    return _known(fields, model, "", left_out), tuple(left_out)


def _known(fields: Mapping[str, Any], model: type[BaseModel], prefix: str, left_out: list[str]) -> dict[str, Any]:
    from pydantic import BaseModel  # here, for `sottovoce --version` needs none of it

    known: dict[str, Any] = {}
    for name, value in fields.items():
        field = model.model_fields.get(name)
        if field is None:
            left_out.append(f"{prefix}{name}")
            continue
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel) and isinstance(value, Mapping):
            strict = not prefix and name in STRICT_SECTIONS
            value = value if strict else _known(value, section, f"{prefix}{name}.", left_out)
        known[name] = value
    return known
