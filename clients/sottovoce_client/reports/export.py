"""Figures and tables of a page as files of their own, for papers: SVG, PDF and PNG; CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from sottovoce.errors import SpecError
from sottovoce_client.reports.drawing import Figure
from sottovoce_client.reports.page import Table

OF_FIGURES, OF_TABLES = ("svg", "pdf", "png"), ("csv", "tex")
"""Formats."""

LATEX = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
        **{"<": r"\textless{}", ">": r"\textgreater{}"},
        **{"ε": r"$\varepsilon$", "δ": r"$\delta$", "∞": r"$\infty$", "−": "$-$", "±": r"$\pm$", "–": "--"},
    }
)


def export(exhibits: Iterable[Figure | Table], folder: Path, formats: Collection[str]) -> list[Path]:
    """Write every figure and table of a page that shows anything, in those of the formats that suit it.

    Args:
        exhibits: of a page.
        folder: where to: each is called `NAME.FORMAT`.
        formats: of `OF_FIGURES` and `OF_TABLES`.

    Returns:
        The files, in order.

    Raises:
        SpecError: no such format, or plotly, or what it needs to write images, is not installed.
    """
    for form in formats:
        if form not in OF_FIGURES + OF_TABLES:
            raise SpecError(f"--export must be of {', '.join(OF_FIGURES + OF_TABLES)}, got {form}")
    written = []
    for each in exhibits:
        suited = OF_FIGURES if isinstance(each, Figure) else OF_TABLES
        for form in [form for form in formats if each and form in suited]:
            path = folder / f"{each.name}.{form}"
            path.write_bytes(_bytes(each, form))
            written.append(path)
    return written


def _bytes(each: Figure | Table, form: str) -> bytes:
    if isinstance(each, Table):
        return (as_csv(each) if form == "csv" else as_latex(each)).encode()
    try:
        image: bytes = each.drawn().to_image(format=form)
    except (ValueError, RuntimeError) as error:  # plotly draws images with kaleido, and that with Chrome
        raise SpecError(f"cannot write {each.name}.{form}: {' '.join(str(error).split())}") from None
    return image


def as_csv(table: Table) -> str:
    """Numbers as they are, everything else as people read it; a heading holds its group's, too."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(f"{column.group} {column.head}".strip() for column in table.columns)
    for row, texts in zip(table.rows, table.texts(), strict=True):
        rows.writerow(_plain(value, shown) for value, shown in zip(row, texts, strict=True))
    return text.getvalue()


def _plain(value: Any, shown: str) -> Any:
    return value if value is None or isinstance(value, int | float) else shown


def as_latex(table: Table) -> str:
    r"""A `tabular` with the rules of the package booktabs."""
    sides = "".join("r" if column.kind == "number" and k else "l" for k, column in enumerate(table.columns))
    above = [rf"\multicolumn{{{span}}}{{c}}{{{title.translate(LATEX)}}}" for title, span in table.groups]
    heads = [column.head.translate(LATEX) for column in table.columns]
    rows = [[text.translate(LATEX) for text in texts] for texts in table.texts()]
    lines = [" & ".join(cells) + r" \\" for cells in ([above] if above else []) + [heads]]
    lines += [r"\midrule", *(" & ".join(cells) + r" \\" for cells in rows)]
    return "\n".join([rf"\begin{{tabular}}{{{sides}}}", r"\toprule", *lines, r"\bottomrule", r"\end{tabular}", ""])
