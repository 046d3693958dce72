"""Check of an HTML report in a browser: `python check_report.py report.html [--screenshot report.png]`.

The script opens the page in headless Chromium and requires that
1. the console is empty: errors of scripts appear there;
2. the page has plots, and every plot is drawn;
3. the page loads no other file: a reader can mail and archive it as one file.
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
DRAWN = {"path", "image", "circle"}
# Elements without an end tag, which have no content.
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


class Page(HTMLParser):
    """Parser that collects the plots of a page, whether each is drawn, and the addresses of remote resources."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.plots: dict[str, bool] = {}
        """True for each plot that is drawn, by id."""
        self.remote: list[str] = []
        self._open: list[tuple[str, str | None]] = []
        """Open elements: the tag, and the id of the plot if the element is one."""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record plots, drawings and addresses."""
        values = {name: value or "" for name, value in attrs}
        classes = values.get("class", "").split()
        plot = None
        if tag == "figure" and "plot" in classes:
            plot = values.get("id", f"plot {len(self.plots)}")
            self.plots[plot] = False
        if tag in DRAWN:
            self.plots.update((ancestor, True) for _, ancestor in self._open if ancestor is not None)
        if tag not in VOID:
            self._open.append((tag, plot))
        self._record_remote(tag, values)

    def handle_endtag(self, tag: str) -> None:
        """Close the innermost open element of this name, and all elements still open in it."""
        tags = [name for name, _ in self._open]
        if tag in tags:
            del self._open[len(tags) - 1 - tags[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        """Record addresses in style sheets."""
        if self._open and self._open[-1][0] == "style":
            self.remote.extend(REMOTE_STYLE.findall(data))

    def _record_remote(self, tag: str, values: dict[str, str]) -> None:
        loaded = ["src", "srcset", "poster"]
        if tag not in {"a", "area"}:  # a link that the reader can follow loads nothing
            loaded += ["href", "xlink:href"]
        self.remote.extend(f"<{tag} {name}={values[name]}>" for name in loaded if not LOCAL.match(values.get(name, "")))
        self.remote.extend(REMOTE_STYLE.findall(values.get("style", "")))


def browse(chromium: str, report: Path, *action: str) -> subprocess.CompletedProcess[str]:
    """Open the report in Chromium with a new profile, run its scripts, and do the action (dump or screenshot)."""
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
        *(f"loaded from elsewhere: {resource}" for resource in page.remote),
    ]


def main() -> int:
    """Run the command; return 1 if the report has a problem."""
    parser = argparse.ArgumentParser(description="Check an HTML report in a browser.")
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
