"""Pages: one HTML file each, with everything that it needs inside, to be opened, mailed and archived.

Python prepares values, figures and tables; the words and the structure are in `templates/`, where every page extends the one
skeleton `page.html.j2`. Whatever a template shows is escaped, and a name that nothing defines is an error.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from sottovoce_client.documents import Opener, write_text
from sottovoce_client.reports.marks import COLOURS
from sottovoce_client.reports.rendering import render
from sottovoce_client.reports.tables import Column as Column
from sottovoce_client.reports.tables import PageTable as PageTable


class Exhibit(Protocol):
    """A figure or a table; false, and not shown, where there is nothing to show."""

    @property
    def name(self) -> str:
        """No other one of the page has it."""
        ...

    def __bool__(self) -> bool: ...

    def __html__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Page:
    """A page.

    Attributes:
        template: what it is made from.
        exhibits: its figures and tables, which the template finds by name in `shown`.
        values: what else the template shows.
    """

    template: str
    exhibits: Sequence[Exhibit]
    values: Mapping[str, Any]

    def html(self) -> str:
        """The page as text.

        Raises:
            SpecError: Jinja2 is not installed.
        """
        shown = {each.name: each for each in self.exhibits}
        script = render("page.js")
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        skeleton = {"script": script, "script_digest": digest, "colours": COLOURS, "version": version("sottovoce")}
        return render(self.template, shown=shown, **skeleton, **self.values)

    def write(self, path: Path, *, opener: Opener | None = None) -> None:
        """Write the page; `opener`: as of `open`, such as `private`.

        Raises:
            SpecError: Jinja2 is not installed.
        """
        write_text(path, self.html(), opener=opener)
