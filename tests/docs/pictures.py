"""Make the pictures of docs/images again: `python -m tests.docs.pictures [NAME ...]`; without a name, all, in some five minutes.

Nothing is drawn for a picture: each is what a command shows, in a Chromium or on a terminal. A screenshot, `NAME.png`, has a
second file for the dark scheme, `NAME-dark.png`, which the site shows by itself (docs/theme/hooks.py). Look at what changed
before you commit it.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import yaml
from PIL import Image
from playwright.sync_api import FloatRect, Locator, Page, sync_playwright
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME
from rich.text import Text

from tests.client.browsers import CHROMIUM
from tests.docs.following import follow
from tests.docs.pages import BY_PAGES, CHECKOUT, blocks, text_of
from tests.docs.shell import PATIENCE_S

IMAGES = CHECKOUT / "docs" / "images"
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
THEMES = {"light": DEFAULT_TERMINAL_THEME, "dark": SVG_EXPORT_THEME}
"""Colours of a terminal in each scheme."""
DRAWN = {"exchange.svg", "threat-models.svg"}
"""Those that are drawn by hand, and show what no command prints."""
COLUMNS, LINES = 106, 40
REDRAWN = re.compile(r"(?:\r|\x1b\[2K|\x1b\[1A)+(?=[^\n])")
"""What a terminal is told before lines are written over."""
UNSEEN = re.compile(r"\x1b\[\?\d+[hl]")
FONTS = re.compile(r"@font-face \{.*?\}", re.DOTALL)
WATCHED = {
    "rounds": 20_000,
    "privacy": {"budget": [4.0, 6.0, 10.0, 20.0, 40.0]},
    "clock": {"mode": "paced", "period_s": 0.25},
}
"""What a run that the console shows has otherwise than the demo."""
ROUNDS = 120
"""After which the console is looked at."""


@dataclass(frozen=True)
class Report:
    """A page that a command writes, as wide as a screen, from its top to the end of so many sections or folded parts."""

    command: str
    page: str
    sections: int


REPORTS = {
    "report.png": Report("sottovoce demo --out demo", "demo/report.html", 3),
    "audit.png": Report("sottovoce audit ring.yaml --runs 2000 --out audit", "audit/audit.html", 9),
    "gallery.png": Report("sottovoce lab gallery --out gallery", "gallery/gallery.html", 1),
}


def list_files(name: str) -> list[str]:
    """List the files of a picture: a screenshot has one for the light and one for the dark scheme."""
    return [name, name.replace(".png", "-dark.png")] if name.endswith(".png") else [name]


def take_screenshots(tab: Page, name: str, **options: Any) -> None:
    """Save screenshots of a page in the light and the dark scheme, with at most 256 colours, to keep the files small."""
    for scheme, file in zip(SCHEMES, list_files(name), strict=True):
        tab.emulate_media(color_scheme=scheme)
        taken = Image.open(io.BytesIO(tab.screenshot(**options))).convert("RGB")
        taken.quantize(256, dither=Image.Dither.NONE).save(IMAGES / file, optimize=True)


@contextmanager
def browser(width: int, height: int) -> Iterator[Page]:
    """Open an empty tab."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        look = {"viewport": {"width": width, "height": height}, "reduced_motion": "reduce"}
        yield chromium.new_page(**look)  # type: ignore[arg-type]
        chromium.close()


def run(command: str, folder: Path) -> None:
    """Do what a recipe says; it must end well."""
    subprocess.run(command.split(), cwd=folder, check=True, stdout=subprocess.DEVNULL)


def report(name: str, folder: Path) -> None:
    """A report, from its top."""
    recipe = REPORTS[name]
    for block in blocks(text_of("docs/audit/run.md")):
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
    run(recipe.command, folder)
    with browser(1280, 1000) as tab:
        tab.goto((folder / recipe.page).as_uri())
        bottom = max(
            box["y"] + box["height"] for box in map(_box, tab.locator("section, .part").all()[: recipe.sections])
        )
        take_screenshots(tab, name, full_page=True, clip={"x": 0, "y": 0, "width": 1280, "height": bottom + 12})


def _box(each: Locator) -> FloatRect:
    box = each.bounding_box()
    assert box is not None
    return box


def terminal(folder: Path) -> None:
    """The demo on a terminal: while it runs, and at its end."""
    drawn = REDRAWN.split(UNSEEN.sub("", typed("sottovoce demo --out demo", folder)))
    going = [screen for screen in drawn if "round " in screen and "/500" in screen]
    shown = {"while it runs": going[len(going) * 3 // 5], "at the end": drawn[-1]}
    framed = "".join(
        f"<p class={scheme}>{_framed(text, f'sottovoce demo: {when}', scheme)}</p>"
        for when, text in shown.items()
        for scheme in SCHEMES
    )
    style = "body, p { margin: 0; line-height: 0 } svg { width: 100% }"
    style += "".join(f"@media not (prefers-color-scheme: {each}) {{ .{each} {{ display: none }} }}" for each in SCHEMES)
    with browser(1260, 400) as tab:
        tab.set_content(f"<style>{style}</style>{framed}")
        take_screenshots(tab, "terminal.png", full_page=True)


def typed(command: str, folder: Path) -> str:
    """All that a command writes to a terminal of its own."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (LINES, COLUMNS))
    look = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    environment = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "COLUMNS", "LINES"}}
    read = list[bytes]()
    with subprocess.Popen(
        command.split(), cwd=folder, env={**environment, **look}, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        with suppress(OSError):  # EIO: nobody writes any more
            while some := os.read(ours, 65536):
                read.append(some)
    os.close(ours)
    assert process.returncode == 0, b"".join(read).decode()
    return b"".join(read).decode().replace(f"{folder}/", "")


def _framed(text: str, title: str, scheme: str) -> str:
    """What stands on a screen, in a window."""
    screen = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    screen.print(Text.from_ansi(text.replace("\r", "").strip("\n")))
    return FONTS.sub(
        "", screen.export_svg(title=title, theme=THEMES[scheme], unique_id=f"{title.split()[-1]}-{scheme}")
    )


def console(folder: Path) -> None:
    """The console of a run that goes on, watched."""
    demo = subprocess.run(["sottovoce", "demo", "--print-spec"], check=True, capture_output=True, text=True).stdout  # noqa: S607
    (folder / "paced.yaml").write_text(yaml.safe_dump({**yaml.safe_load(demo), **WATCHED}), encoding="utf-8")
    with going("sottovoce up paced.yaml --out run", folder), browser(1200, 1330) as tab:
        _until(lambda: (folder / "run" / "services.json").is_file())
        with (
            going("sottovoce watch run --metrics 127.0.0.1:7499 --keep-going", folder),
            going("sottovoce console run --watch 127.0.0.1:7499", folder) as said,
        ):
            _until(lambda: "http://" in said.read_text(encoding="utf-8"))
            found = re.search(r"http://\S+", said.read_text(encoding="utf-8"))
            assert found is not None
            tab.goto(found[0])
            _until(lambda: int(re.sub(r" of .*|\D", "", tab.text_content("#round") or "") or 0) >= ROUNDS)
            take_screenshots(tab, "console.png")


@contextmanager
def going(command: str, folder: Path) -> Iterator[Path]:
    """While something goes on; gives the file of what it says."""
    said = folder / f"{command.split()[1]}.txt"
    with said.open("w") as out:
        process = subprocess.Popen(command.split(), cwd=folder, stdout=out, stderr=out)
    try:
        yield said
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)


def _until(happened: Callable[[], bool]) -> None:
    patience = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < patience, "this must happen"
        time.sleep(0.2)


def curves(folder: Path) -> None:
    """Drawn from benchmarks/measured."""
    run(f"{sys.executable} {CHECKOUT / 'benchmarks' / 'curves.py'}", folder)


def from_page(name: str, folder: Path) -> None:
    """What the commands of a page draw."""
    page, made = BY_PAGES[name]
    for said in follow(page, folder / "page"):
        assert said.code == 0, said.text
    shutil.copy(folder / "page" / "work" / made, IMAGES / name)


RECIPES: dict[str, Callable[[Path], None]] = {
    **{name: partial(report, name) for name in REPORTS},
    **{name: partial(from_page, name) for name in BY_PAGES},
    "terminal.png": terminal,
    "console.png": console,
    "scale.svg": curves,
}
"""Of a picture, what makes it again, in an empty folder."""


if __name__ == "__main__":
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for each in sys.argv[1:] or RECIPES:
        with tempfile.TemporaryDirectory() as scratch:
            RECIPES[each](Path(scratch))
        print(f"docs/images/{each}", flush=True)
