"""MkDocs hooks: pages from outside `docs/`, screenshots for the dark scheme, tables for phones, and checks of each page.

Pages from outside are those at the root of the repository, and the examples. Pages link to files of the repository; on the
site these links lead to the page built from the file.
"""

from __future__ import annotations

import json
import re
from html import escape, unescape
from pathlib import Path, PurePosixPath
from posixpath import relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
SCRIPTS = {".py": "python", ".mjs": "js", ".yaml": "yaml"}
"""Language of each type of file that is shown as code."""
INTO_DOCS = re.compile(r"(?<=\]\()docs/")
OUT_OF_DOCS = re.compile(rf"(?<=\]\()(?:\.\./)+({'|'.join(PAGES)}|examples/\w+\.\w+)(?=[)#])")

TABLE, ROW = (re.compile(rf"<{tag}>.*?</{tag}>", re.DOTALL) for tag in ("table", "tr"))
HEADER_CELL, CELL = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL), re.compile(r"<td\b")
EMPTY_HEADER = re.compile(r"<th(\b[^>]*)></th>")
TAG = re.compile(r"<[^>]+>")
CODE = re.compile(r"<pre\b.*?</pre>|<code>([^<]+)</code>", re.DOTALL)
"""A block of code, or code in a sentence or a cell, which is the group."""
OPTION = re.compile(r"--?[\w-]{1,26}")
LONG_WORD = re.compile(r"[^\s<]{20,}")
AFTER = re.compile(r"[_./](?=[A-Za-z{])")
"""Characters after which a long word of code in a sentence or a cell may break."""
SYMBOL = re.compile(r"((?:doc-symbol[^>]*></code>(?:&nbsp;|\s)|doc-object-name[^>]*>)\s*)([\w.]+)")
"""A name of the Python API in a heading or a table of contents."""
IN_SYMBOL = re.compile(r"[_.](?=\w)|(?<=[a-z])(?=[A-Z])")
WITH_BREAK = r"\g<0><wbr>"
SEARCH = re.compile(r'(?<=<div class="md-search" data-md-component="search" role="dialog")')
CONTENTS = re.compile(r'(?<=<nav class="md-nav") aria-label="[^"]*"')
"""A part of the table of contents, which the theme makes a landmark of its own."""
SECTION = re.compile(r' aria-expanded="\w+">\s*<label class="md-nav__title"[^>]*>\s*<span[^>]*></span>\s*([^<]*[^<\s])')
"""A section of the navigation, from its name's attribute on. The theme gives a section with a page of its own an empty name."""
SCREENSHOT = re.compile(r'(<img\b[^>]*\ssrc=")([^":]+)\.png("[^>]*>)')
MAX_PAGE_BYTES = 500_000

REMOTE = re.compile(r"""<(?:(?:script|img|iframe)[^>]*\ssrc|link[^>]*\shref)=["']?(?:https?:)?//[^>]*>""")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside `docs/`."""
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=INTO_DOCS.sub("", text)))
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix in {*SCRIPTS, ".ipynb"}:
            content = render_script(path) if path.suffix in SCRIPTS else render_notebook(path)
            files.append(File.generated(config, f"examples/{path.stem}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links out of `docs/` by links to the added pages."""
    folder = PurePosixPath(page.file.src_uri).parent
    return OUT_OF_DOCS.sub(lambda link: relpath(PurePosixPath(link[1]).with_suffix(".md"), folder), markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Adapt a page to the dark scheme and to phones, and check that it is small and readable without a network.

    Raises:
        PluginError: the page loads a file from another host, or has too many bytes.
    """
    if found := REMOTE.search(output):
        raise PluginError(f"{page.file.src_uri} must not load files from other hosts, found {found[0]}")
    output = add_dark_screenshots(output, Path(page.file.abs_dest_path).parent)
    output = TABLE.sub(lambda table: label_cells(table[0]), output)
    output = CODE.sub(add_breaks, output)
    output = SYMBOL.sub(lambda symbol: symbol[1] + IN_SYMBOL.sub(WITH_BREAK, symbol[2]), output)
    output = SEARCH.sub(' aria-label="Search"', CONTENTS.sub(' role="none"', output))
    output = SECTION.sub(r' aria-label="\1"\g<0>', output)
    if (size := len(output.encode())) > MAX_PAGE_BYTES:
        raise PluginError(f"{page.file.src_uri} must have at most {MAX_PAGE_BYTES} bytes of HTML, has {size}: split it")
    return output


def add_dark_screenshots(output: str, folder: Path) -> str:
    """Show `NAME-dark.png` in the dark scheme for each `NAME.png` that has one; `folder` is that of the built page."""

    def add(image: re.Match[str]) -> str:
        dark = f"{image[2]}-dark.png"
        if not (folder / dark).is_file():
            return image[0]
        return f"{image[1]}{image[2]}.png#only-light{image[3]}{image[1]}{dark}#only-dark{image[3]}"

    return SCREENSHOT.sub(add, output)


def add_breaks(code: re.Match[str]) -> str:
    """Allow long words of code in a sentence or a cell to break after punctuation; blocks stay as they are."""
    if not code[1]:
        return code[0]
    if OPTION.fullmatch(code[1]):
        return f'<code class="option">{code[1]}</code>'  # browsers would break it after a hyphen
    return f"<code>{LONG_WORD.sub(lambda word: AFTER.sub(WITH_BREAK, word[0]), code[1])}</code>"


def label_cells(table: str) -> str:
    """Give each cell of a table the name of its column, which a phone shows above the value."""
    names = [escape(unescape(TAG.sub("", cell)).strip()) for cell in HEADER_CELL.findall(table)]
    labelled = ROW.sub(lambda row: _label_row(row[0], names), table)
    return EMPTY_HEADER.sub(r"<td\1></td>", labelled)  # a header cell must have a text


def _label_row(row: str, names: list[str]) -> str:
    labels = iter(names)
    return CELL.sub(lambda cell: f'<td data-label="{name}"' if (name := next(labels, "")) else cell[0], row)


def render_script(path: Path) -> str:
    """Render a script as a page."""
    return f"# `{relpath(path, ROOT)}`\n\n```{SCRIPTS[path.suffix]}\n{path.read_text(encoding='utf-8')}```\n"


def render_notebook(path: Path) -> str:
    """Render a notebook as a page: its text, and its code without output."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = (("".join(cell["source"]), cell["cell_type"]) for cell in cells)
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for text, kind in texts) + "\n"
