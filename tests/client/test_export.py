"""Figures and tables as files of their own, and JSON files as their models say."""

from __future__ import annotations

import csv
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sottovoce.errors import SpecError
from sottovoce_client.documents import Document
from sottovoce_client.reports.drawing import Figure, extra, line
from sottovoce_client.reports.export import as_latex, export
from sottovoce_client.reports.page import Column, Table
from sottovoce_client.wording import number, share

COLUMNS = (Column("learner"), Column("test", share, group="accuracy"), Column("ε", partial(number, digits=2)))
TABLE = Table("learners", "By learner", COLUMNS, [("a & b", 0.9123, math.pi), ("c_d", None, math.inf)])
CURVE = Figure("curve", "A curve", [line([1, 2], [3.0, 4.0], "c", "#0072B2")])


def test_a_csv_has_numbers_as_they_are(tmp_path: Path) -> None:
    assert export([TABLE, CURVE], tmp_path, ["csv"]) == [tmp_path / "learners.csv"]
    rows = list(csv.reader((tmp_path / "learners.csv").read_text(encoding="utf-8").splitlines()))
    assert rows == [["learner", "accuracy test", "ε"], ["a & b", "0.9123", "3.141592653589793"], ["c_d", "", "inf"]]


def test_a_latex_table_has_what_people_read() -> None:
    assert as_latex(TABLE).splitlines() == [
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"\multicolumn{1}{c}{} & \multicolumn{1}{c}{accuracy} & \multicolumn{1}{c}{} \\",
        r"learner & test & $\varepsilon$ \\",
        r"\midrule",
        r"a \& b & 91.2 \% & 3.1 \\",
        r"c\_d & -- & $\infty$ \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_images_are_drawn_by_plotly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = extra("plotly.graph_objects").Figure
    monkeypatch.setattr(figure, "to_image", lambda self, format: f"{format} of {len(self.data)}".encode())
    assert export([TABLE, CURVE], tmp_path, ["svg"]) == [tmp_path / "curve.svg"]
    assert (tmp_path / "curve.svg").read_bytes() == b"svg of 1"

    def missing(self: Any, format: str) -> bytes:
        raise ValueError("requires\n  the Kaleido package")

    monkeypatch.setattr(figure, "to_image", missing)
    with pytest.raises(SpecError, match=r"cannot write curve\.png: requires the Kaleido package"):
        export([CURVE], tmp_path, ["png"])


def test_nothing_is_written_of_nothing(tmp_path: Path) -> None:
    nothing: list[Figure | Table] = [Table("t", "", COLUMNS, []), Figure("f", "", [])]
    assert export(nothing, tmp_path, ["csv", "tex", "svg"]) == [] == list(tmp_path.iterdir())
    with pytest.raises(SpecError, match="--export must be of svg, pdf, png, csv, tex, got doc"):
        export([TABLE], tmp_path, ["doc"])


class Example(Document):
    """A file."""

    values: list[float]
    """What was measured."""
    asked: int | None = None
    """Where it was asked for."""


def test_a_document_says_what_is_known(tmp_path: Path) -> None:
    Example(values=[1.0, math.inf, math.nan]).write(tmp_path / "a.json")
    Example(values=[], asked=None).write(tmp_path / "b.json")
    first, second = (json.loads((tmp_path / name).read_text(encoding="utf-8")) for name in ("a.json", "b.json"))
    assert first == {"values": [1.0, None, None]}
    assert second == {"values": [], "asked": None}
    assert Example.model_json_schema()["properties"]["values"]["description"] == "What was measured."
