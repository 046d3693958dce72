"""Look at an HTML report as a reader's browser does: `python check_report.py report.html [--screenshot report.png]`.

Opens the page in headless Chromium and insists that
1. the console stays silent: whatever a script complains about lands there;
2. there are plots, and every one of them was drawn;
3. the page loads nothing from elsewhere: it can be mailed and archived as one file.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path

CONSOLE = re.compile(r":CONSOLE[:(]\d+\)?\] (.*)")
# An address that loads no other file: empty, an anchor on the page, or inline data.
LOCAL = re.compile(r"\s*(?:$|#|data:|blob:|about:)", re.IGNORECASE)
REMOTE_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?\s*(?:https?:)?//[^\"')\s]*", re.IGNORECASE)
# Elements without an end tag, which therefore hold nothing.
DRAWN = {"path", "image", "circle"}
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


class Page(HTMLParser):
    """Plots of the page, which of them were drawn, and addresses of remote resources."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.plots: dict[str, bool] = {}
        """True for each drawn plot, by id."""
        self.remote: list[str] = []
        self._open: list[tuple[str, str | None]] = []
        """Open elements: the tag, and the plot that it begins, if it does."""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note plots, drawings and addresses."""
        values = {name: value or "" for name, value in attrs}
        classes = values.get("class", "").split()
        plot = None
        if tag == "figure" and "plot" in classes:
            plot = values.get("id", f"plot {len(self.plots)}")
            self.plots[plot] = False
        if tag in DRAWN:
            self.plots.update((around, True) for _, around in self._open if around is not None)
        if tag not in VOID:
            self._open.append((tag, plot))
        self._note_remote(tag, values)

    def handle_endtag(self, tag: str) -> None:
        """Leave the innermost open element of this name, and all elements left open in it."""
        tags = [name for name, _ in self._open]
        if tag in tags:
            del self._open[len(tags) - 1 - tags[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        """Note addresses in style sheets."""
        if self._open and self._open[-1][0] == "style":
            self.remote.extend(REMOTE_STYLE.findall(data))

    def _note_remote(self, tag: str, values: dict[str, str]) -> None:
        loaded = ["src", "srcset", "poster"]
        if tag not in {"a", "area"}:  # a link that the reader may follow loads nothing
            loaded += ["href", "xlink:href"]
        self.remote.extend(f"<{tag} {name}={values[name]}>" for name in loaded if not LOCAL.match(values.get(name, "")))
        self.remote.extend(REMOTE_STYLE.findall(values.get("style", "")))


def browse(chromium: str, report: Path, *action: str) -> subprocess.CompletedProcess[str]:
    """Open the report with a profile of its own, let its scripts run, and do the action (dump or screenshot)."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            chromium,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={profile}",
            "--virtual-time-budget=15000",
            "--enable-logging=stderr",
            "--v=0",
            *action,
            report.resolve().as_uri(),
        ]
        return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120, check=True)


def problems(page: Page, log: str) -> list[str]:
    """Return the problems of the report, one line each."""
    return [
        *(f"console: {text}" for text in CONSOLE.findall(log)),
        *([] if page.plots else ["no plots on the page"]),
        *(f"plot was not drawn: {plot}" for plot, drawn in page.plots.items() if not drawn),
        *(f"loaded from elsewhere: {what}" for what in page.remote),
    ]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Look at an HTML report as a reader's browser does.")
    parser.add_argument("report", type=Path)
    parser.add_argument("--screenshot", type=Path, help="also write a picture of the page here (PNG)")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        parser.error("no chromium on the PATH")
    if options.screenshot is not None:
        browse(chromium, options.report, "--window-size=1280,4000", f"--screenshot={options.screenshot.resolve()}")
    shown = browse(chromium, options.report, "--dump-dom")
    page = Page(shown.stdout)
    found = problems(page, shown.stderr)
    print("\n".join(found) or f"{options.report}: {len(page.plots)} plots drawn, nothing loaded from elsewhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
