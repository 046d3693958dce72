"""What a page has its reader do: files to write, commands to run, and what these print.

A block of `sh` holds commands; a block of `text` right below it is what they print, where `…` stands for anything. A block
below a line that ends in a name, as "`wards.yaml`:", or that begins with one, as "# wards.yaml", is that file.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from textwrap import dedent

CHECKOUT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(\w*)[^\n]*\n(.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`([\w-]+\.\w+)`\)?[.:,]?[^`\n]*:?\n\s*$")
FIRST = re.compile(r"# ([\w-]+\.\w+)\n")
FILES = {"yaml", "python", "csv", "json"}
PLAIN = re.compile(r"(?!(?:case|do|for|function|if|select|time|until|while)\b)[\w./:=,+@%~ -]+")
"""A command without quotes, expansions or keywords: whole, without asking Bash."""
SERVES = re.compile(r"sottovoce (coordinator|learner|eavesdropper|console)\b(?! relay| audit)[^&]*$")
"""What goes on until somebody ends it, and so needs a terminal of its own."""


@dataclass(frozen=True)
class Block:
    """A fenced block; `output` is what stands below its commands, and `span` where in the page that is."""

    language: str
    text: str
    file: str = ""
    output: str = ""
    span: tuple[int, int] = (0, 0)

    @cached_property
    def commands(self) -> list[str]:
        """Of a block of `sh`, one by one: what is quoted, or goes on in the next line, stays together."""
        commands, lines = list[str](), list[str]()
        for line in self.text.splitlines() if self.language in {"sh", "bash"} else ():
            if lines or (line.strip() and not line.startswith("#")):
                lines.append(line)
            if lines and _whole("\n".join(lines)):
                commands.append("\n".join(lines))
                lines = []
        return commands


@cache
def _whole(command: str) -> bool:
    """Whether Bash waits for no further line."""
    if PLAIN.fullmatch(command):
        return True
    read = subprocess.run(["bash", "-n"], input=command, capture_output=True, text=True, check=False)  # noqa: S607
    return not command.endswith("\\") and not read.stderr


def text_of(page: str) -> str:
    """Of README.md, or of a page of docs/."""
    return (CHECKOUT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """All fenced blocks of a page's text."""
    made, found, before = list[Block](), list(FENCE.finditer(page)), 0
    for match, below in zip(found, [*found[1:], *[None] * bool(found)], strict=True):
        named = NAMED.search(page[before : match.start()]) or FIRST.match(dedent(match[3]))
        file = named[1] if named and match[2] in FILES else ""
        shown = below is not None and below[2] == "text" and not page[match.end() : below.start()].strip()
        output = (dedent(below[3]), below.span(3)) if below is not None and shown else ("", (0, 0))
        made.append(Block(match[2], dedent(match[3]), file, *output))
        before = match.end()
    return made


def _pages() -> Iterator[str]:
    for path in [CHECKOUT / "README.md", *sorted(CHECKOUT.glob("docs/**/*.md"))]:
        page = path.relative_to(CHECKOUT).as_posix()
        if any(block.commands for block in blocks(text_of(page))):
            yield page


TUTORIALS = [f"docs/start/{role}.md" for role in ("auditor", "engineer", "researcher")]
"""Those that begin in an empty folder; the others are followed in a clone, beside what they name (`following.ready`)."""
PAGES = list(_pages())
"""Those that are followed, command by command."""
BY_PAGES = {
    "tutorial-epsilon.svg": ("docs/start/researcher.md", "tradeoff/over-epsilon.svg"),
    "tutorial-rounds.svg": ("docs/start/researcher.md", "blocks/accuracy.svg"),
}
"""Of a picture of docs/images, the page whose commands draw it, and where they put it."""
