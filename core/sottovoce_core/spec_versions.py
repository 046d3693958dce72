"""Compatibility of run specs between versions: the format of a document, and fields dropped from a newer one.

A document on the wire states its format. A service that is older than the sender drops unknown fields, so that one new field
does not lock it out; a document of its own format is validated strictly, as any file is.

The exception are sections that a guarantee depends on: an unknown field there is a condition that would not be enforced, so
it stays for the parser to refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sottovoce_core.errors import SpecError

if TYPE_CHECKING:
    from pydantic import BaseModel

FORMAT = 1
"""Format of documents that this version writes. Increase it whenever a field is added or changes its meaning."""
FORMAT_FIELD = "format"
STRICT_SECTIONS = frozenset({"algorithm", "loss", "decision_set", "topology", "privacy"})
"""Sections that a guarantee depends on."""


def add_format(document: Mapping[str, Any]) -> dict[str, Any]:
    """Add the format to a document, for the wire."""
    return {FORMAT_FIELD: FORMAT, **document}


def drop_unknown_fields(document: object, model: type[BaseModel]) -> tuple[object, tuple[str, ...]]:
    """Return the document as this version reads it, and the names of the fields that were dropped.

    Args:
        document: parsed JSON from the wire; without a format it is in the first one.
        model: model of a run spec.

    Raises:
        SpecError: the format is not a positive integer.
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
    return _keep_known_fields(fields, model, "", left_out), tuple(left_out)


def _keep_known_fields(
    fields: Mapping[str, Any], model: type[BaseModel], prefix: str, left_out: list[str]
) -> dict[str, Any]:
    from pydantic import BaseModel  # here, because `sottovoce --version` does not need it

    known: dict[str, Any] = {}
    for name, value in fields.items():
        field = model.model_fields.get(name)
        if field is None:
            left_out.append(f"{prefix}{name}")
            continue
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel) and isinstance(value, Mapping):
            strict = not prefix and name in STRICT_SECTIONS
            value = value if strict else _keep_known_fields(value, section, f"{prefix}{name}.", left_out)
        known[name] = value
    return known
