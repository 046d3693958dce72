"""A page, followed from its first command to its last.

A tutorial begins in an empty folder. Other pages are followed in a clone: there are its `examples` and `deploy`, the spec
`wards.yaml` of examples/, and `wards.csv`, as the researcher's tutorial makes it, unless the page brings its own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.left_out import NOT_RUN
from tests.docs.outputs import STEADY, shows, tidy
from tests.docs.pages import CHECKOUT, SERVES, TUTORIALS, Block, blocks, text_of
from tests.docs.shell import Shell, shell

INIT = {"docs/guides/data.md"}
"""Pages whose commands write `wards.yaml`."""

BY_CHANCE = re.compile(r"sottovoce (?:audit --captures|watch) ")
"""What looks at noise that no seed decides, and so may accuse a correct run, seldom: its exit code 1 is an answer, too."""


@dataclass(frozen=True)
class Said:
    """What the commands of a block printed, and the exit code of the first that failed, or 0."""

    block: Block
    text: str
    code: int
    whole: bool
    """Nothing of the block was left out."""

    @property
    def shown(self) -> bool:
        """Whether the page shows it."""
        exact = all(STEADY.match(command) for command in self.block.commands)
        return shows(self.block.output, self.text, exact=exact)


def reason(page: str, command: str) -> str:
    """Why a command of a page is not run; empty where it is."""
    return next((why for start, why in NOT_RUN.get(page, {}).items() if command.startswith(start)), "")


def ready(page: str, folder: Path) -> None:
    """Put there what a reader of any page has."""
    for name in ("deploy", "examples"):
        (folder / name).symlink_to(CHECKOUT / name)
    if page not in INIT:
        shutil.copy(CHECKOUT / "examples" / "wards.yaml", folder)
    made = next(block for block in blocks(text_of("docs/start/researcher.md")) if block.file == "make_wards.py")
    subprocess.run([sys.executable, "-"], input=made.text, cwd=folder, text=True, check=True)


def follow(page: str, folder: Path) -> Iterator[Said]:
    """Do what a page says, in a folder that is not there yet."""
    found = blocks(text_of(page))
    with shell(folder) as terminal:
        if page not in TUTORIALS:
            ready(page, terminal.folder)
        for block in found:
            if block.file:
                (terminal.folder / block.file).write_text(block.text, encoding="utf-8")
        for block in found:
            if block.commands:
                yield _do(page, block, terminal)


def _do(page: str, block: Block, terminal: Shell) -> Said:
    texts, whole = list[str](), True
    for command in block.commands:
        if reason(page, command):
            whole = False
            continue
        code, text = terminal.type(command, serves=bool(SERVES.match(command)))
        texts.append(text)
        if code and not (code == 1 and BY_CHANCE.match(command)):
            return Said(block, f"{command}\n{text}", code, whole)
    return Said(block, tidy("".join(texts)), 0, whole)
