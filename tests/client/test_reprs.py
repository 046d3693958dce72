"""Representations of what users of notebooks meet: one line, no records, and tables that a page of any colour can hold."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

import sottovoce as sv
from sottovoce_client.deployment import Deployment
from sottovoce_client.live.learner import Prediction
from sottovoce_core.results import Results
from sottovoce_core.table import MAX_DISPLAYED_ROWS, Table

SECRET = 76543.25
"""A value of a record; it is in no representation."""
_MAX_DEPTH = 4


@pytest.fixture(scope="module")
def experiment() -> sv.Experiment:
    features = np.full((40, 3), SECRET) + np.arange(120).reshape(40, 3)
    return sv.Experiment(rounds=3, learners=3, algorithm="ldp-dol", data=(features, np.arange(40) % 2))


@pytest.fixture(scope="module")
def met(experiment: sv.Experiment) -> list[Any]:
    """Objects that the public functions return, and the objects in them."""
    simulated = sv.simulate(experiment, 2, transcript=True)
    join = sv.LabelJoin[Any](window_s=10, max_waiting=5)
    join.add_event("key", {"age": SECRET}, now=0.0)
    first = [
        experiment,
        simulated,
        simulated.results,
        simulated.metrics,
        experiment.guarantee(0),
        experiment.prepared_run,
    ]
    first += [sv.sweep(experiment, {"algorithm.sigma": [1.0, 2.0]}, jobs=1), sv.compare([experiment])]
    first += [sv.audit(experiment, runs=60), join, sv.PrequentialEvaluation(), sv.connect_learner("127.0.0.1:7401")]
    first += [Deployment("127.0.0.1:7400"), Prediction([SECRET], np.array([SECRET]), 3)]
    first += [experiment.run.algorithm.accountant(0), experiment.data, experiment.data.source]
    return [*iterate_parts(first)]


def iterate_parts(values: list[Any], depth: int = 0, known: set[int] | None = None) -> Iterator[Any]:
    known = set() if known is None else known
    for value in values:
        ours = type(value).__module__.startswith("sottovoce")
        if id(value) in known or depth > _MAX_DEPTH or not (ours or isinstance(value, tuple | Mapping)):
            continue
        known.add(id(value))
        inner = [*value.values()] if isinstance(value, Mapping) else [*value] if isinstance(value, tuple) else []
        if ours:
            yield value
            inner += (
                [getattr(value, each.name) for each in dataclasses.fields(value)]
                if dataclasses.is_dataclass(value)
                else []
            )
        yield from iterate_parts(inner, depth + 1, known)


def test_every_object_is_a_short_line_without_records(met: list[Any]) -> None:
    assert len({type(each) for each in met}) > 30
    texts = [(type(each), repr(each)) for each in met]
    assert not [each for each in texts if re.search(r"\b765[4-6]\d\.|\b7\.65[4-6]\d*e\+04", each[1])]
    lines = [each for each in texts if each[0] not in (Table, Results)]  # a table shows itself
    odd = {of.__qualname__: text for of, text in lines if not is_short_line(text)}
    assert not odd
    assert all(len(text.splitlines()) <= MAX_DISPLAYED_ROWS + 2 for _, text in texts)


def is_short_line(text: str) -> bool:
    return 0 < len(text) <= 450 and text.isprintable() and " at 0x" not in text


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[Any] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[Any]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_tables_for_notebooks_are_plain_and_complete(met: list[Any]) -> None:
    rich = [each for each in met if hasattr(each, "_repr_html_")]
    wanted = {"Experiment", "Guarantee", "Simulation", "Results", "Table", "Audit", "Verdict"}
    assert {type(each).__name__ for each in rich} == wanted
    for each in rich:
        page = Page()
        page.feed(each._repr_html_())
        assert "table" in page.tags and page.tags <= {"table", "thead", "tbody", "tr", "th", "td", "p"}
        assert not page.attributes and "76543" not in page.text  # no colours, files or scripts


def test_values_are_escaped() -> None:
    bad = "<script>alert(1)</script>\x1b[2J"
    made: list[Any] = [
        Table.from_facts({bad: bad}),
        sv.Experiment(rounds=1, algorithm="ldp-dol", data={"source": f"{bad}.csv"}),
    ]
    for each in made:
        text = each._repr_html_()
        assert "<script" not in text and "&lt;script&gt;" in text and "\x1b" not in text
    assert re.search("records</td><td>&lt;script", made[1]._repr_html_())


def test_an_experiment_shows_itself_without_reading_its_records() -> None:
    missing = sv.Experiment(rounds=1, algorithm={"name": "ldp-dol", "sigma": 2.0}, data={"source": "nowhere.csv"})
    text = missing._repr_html_()
    assert "nowhere.csv" in text and "sigma: 2.0" in text
    assert "prepared_run" not in missing.__dict__
