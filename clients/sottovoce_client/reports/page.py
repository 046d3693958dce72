"""A self-contained HTML page in the report's style, for the smaller tools."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from importlib.resources import files

from sottovoce_client.reports.drawing import plotly
from sottovoce_client.reports.run_report import POLICY

STYLE = """
header { margin-bottom: 22px; }
main thead tr:first-child th { text-align: right; }
main thead tr:first-child th:first-child { text-align: left; }
table.numbers { width: auto; margin-top: 16px; }
table.numbers :is(th, td) + td, table.numbers th + th { padding-left: 32px; }
"""
"""What these pages add to the report's style."""


def page(kicker: str, title: str, facts: Iterable[str], sections: Iterable[str], style: str = "") -> str:
    """The page as text.

    Args:
        kicker: what wrote it.
        title: its heading, as plain text.
        facts: a line under the heading, as plain text.
        sections: as `section` gives them.
        style: what they add to the style.

    Raises:
        SpecError: plotly is not installed.
    """
    style = files("sottovoce_client.reports").joinpath("report.css").read_text(encoding="utf-8") + STYLE + style
    line = "".join(f"<span>{html.escape(fact)}</span>" for fact in facts)
    head = f'<div class="kicker">Sottovoce · {kicker}</div><h1>{html.escape(title)}</h1><div class="facts">{line}</div>'
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f"<title>{html.escape(title)}: Sottovoce {kicker}</title>\n<style>\n{style}\n</style>",
            f"<script>{plotly('offline').get_plotlyjs()}</script>\n</head>\n<body>\n<main>\n<header>{head}</header>",
            *filter(None, sections),
            "</main>\n</body>\n</html>\n",
        ]
    )


def section(title: str, lead: str, *content: str) -> str:
    """A part of the page.

    Args:
        title: its heading, as plain text.
        lead: a sentence under it, as plain text.
        content: HTML.
    """
    lead = f'<p class="lead">{html.escape(lead)}</p>' if lead else ""
    return f"<section>\n<h2>{html.escape(title)}</h2>\n{lead}\n{''.join(content)}\n</section>"


def terms(pairs: Iterable[tuple[str, str]]) -> str:
    """A list of plain texts, each with a name."""
    return f"<dl>{''.join(f'<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>' for name, text in pairs)}</dl>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, narrow: bool = False) -> str:
    """A table of plain texts, as wide as the page unless narrow; the first cell of a row names it."""
    kind = ' class="numbers"' if narrow else ""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads)
    body = "\n".join(
        f"<tr><th>{html.escape(first)}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    )
    return f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'
