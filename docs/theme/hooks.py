"""MkDocs hooks that add pages from outside `docs/`: pages at the root of the repository, and the examples.

Pages link to files of the repository; on the site these links lead to the page built from the file.
"""

from __future__ import annotations

import json
import re
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
    """Check that a page is readable without a network.

    Raises:
        PluginError: the page loads a file from another host.
    """
    if found := REMOTE.search(output):
        raise PluginError(f"{page.file.src_uri} must not load files from other hosts, found {found[0]}")
    return output


def render_script(path: Path) -> str:
    """Render a script as a page."""
    return f"# `{relpath(path, ROOT)}`\n\n```{SCRIPTS[path.suffix]}\n{path.read_text(encoding='utf-8')}```\n"


def render_notebook(path: Path) -> str:
    """Render a notebook as a page: its text, and its code without output."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = (("".join(cell["source"]), cell["cell_type"]) for cell in cells)
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for text, kind in texts) + "\n"
