"""Templates: whatever one shows is escaped, and a name that nothing defines is an error."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from sottovoce.optional import import_extra
from sottovoce_client import wording

_FILTERS = ("number", "chance", "count", "plural", "share", "share_range", "size", "duration", "reached_of")
"""Functions of `wording` that templates may use."""


def render(template: str, **values: Any) -> str:
    """A template of `templates/`, filled in.

    Raises:
        SpecError: Jinja2 is not installed.
    """
    text: str = _templates().get_template(template).render(**values)
    return text


@cache
def _templates() -> Any:
    jinja = import_extra("jinja2", "Jinja2", "a page")
    made = jinja.Environment(
        loader=jinja.PackageLoader("sottovoce_client.reports"),
        autoescape=True,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {name: getattr(wording, name) for name in _FILTERS}
    made.tests["infinite"] = math.isinf
    return made
