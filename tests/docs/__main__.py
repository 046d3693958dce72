"""Follow pages, and write what their commands print now into them: `python -m tests.docs [PAGE ...]`; without a page, all.

What a page shows stays as it is where the commands still say so: `…` in it stands for anything. The pictures that its commands
draw are renewed, too.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.docs.following import follow
from tests.docs.pages import BY_PAGES, CHECKOUT, PAGES, text_of


def renew(page: str) -> None:
    """Write the outputs of a page anew where they are others."""
    began, text, later = time.monotonic(), text_of(page), 0
    with tempfile.TemporaryDirectory() as folder:
        for said in follow(page, Path(folder, "page")):
            if said.code:
                sys.exit(f"{page}: exit code {said.code} of {said.text}")
            start, end = said.block.span
            if end and said.whole and not said.shown:
                text = f"{text[: start + later]}{said.text}{text[end + later :]}"
                later += len(said.text) - (end - start)
                (CHECKOUT / page).write_text(text, encoding="utf-8")
                print(f"{page}: now prints otherwise: {said.block.commands[0].splitlines()[0]}")
        for picture, (drawing, made) in BY_PAGES.items():
            if drawing == page:
                shutil.copy(Path(folder, "page", "work", made), CHECKOUT / "docs" / "images" / picture)
    print(f"{page}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    for each in sys.argv[1:] or PAGES:
        renew(each)
