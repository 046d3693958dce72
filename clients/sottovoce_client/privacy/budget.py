"""`sottovoce budget`: what a run promises before anything runs, for events, records, groups and several learners."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from sottovoce.arrays import FloatArray, as_floats
from sottovoce.budget.composition import (
    Alike,
    envelope,
    epsilon_at,
    group_loss,
    learners_loss,
    mechanism_of,
    message_losses,
    record_losses,
    replaces_all,
)
from sottovoce.errors import SpecError
from sottovoce.experiment import Prepared
from sottovoce.privacy.guarantee import Guarantee
from sottovoce.running.run import Run
from sottovoce.spec import RunSpec
from sottovoce_client.reports.drawing import Trace, axis, buttons, draw, finite, thinned
from sottovoce_client.reports.page import page, section, table, terms
from sottovoce_client.running.simulation import finite as number_or_none
from sottovoce_client.wording import count, number

KINDS = (
    ("paper", "by the paper’s formula", "#6b7785"),
    ("record", "tight, per record", "#D55E00"),
    ("event", "tight, per event", "#0072B2"),
    ("output", "published decisions only", "#009E73"),
)
"""Curves of the plot: their names here and on the page, and their colours, as in the report."""

AT_DELTA = "#CC79A7"


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """What one learner's messages may tell.

    Attributes:
        name: of the learner.
        guarantee: of one event, with the planned numbers of records.
        event: epsilon of one event.
        record: of the dearest record in all of its uses; None: not asked for.
        group: of the dearest group; None: not asked for.
        at_delta: of one event; None: no delta was given.
        record_at_delta: of the dearest record in all of its uses.
        record_curve: `(rounds,)` cumulative epsilon of that record.
    """

    name: str
    guarantee: Guarantee
    event: float
    record: float | None
    group: float | None
    at_delta: float | None
    record_at_delta: float | None
    record_curve: FloatArray | None

    @property
    def output(self) -> float | None:
        """Against somebody who sees published decisions only, where that is a promise of its own."""
        return None if self.guarantee.output is None else float(self.guarantee.output[-1])

    def curve(self, kind: str) -> FloatArray | None:
        """`(rounds,)` cumulative epsilon of a kind of `KINDS`."""
        curves = {"paper": self.guarantee.paper, "event": self.guarantee.cumulative, "record": self.record_curve}
        return curves.get(kind, self.guarantee.output)


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask of every learner: a delta, the size of a group, and whether records are charged for all of their uses."""

    delta: float | None = None
    group: int | None = None
    uses: bool = False


def budget(
    prepared: Prepared, folder: Path, names: Sequence[str], question: Question, console: Console | None = None
) -> None:
    """Print what a run promises, and write `budget.json` and `budget.html`.

    Args:
        prepared: the run and its records, of which only the numbers by round matter.
        folder: where results are written.
        names: of the learners to show (empty: all).
        question: what to ask.
        console: where the table is printed.

    Raises:
        SpecError: no such learner, a delta out of range, or an extra is missing.
    """
    console, run = console or Console(), prepared.run
    chosen = [learner_index(run.spec, name) for name in names] or list(range(run.spec.n_learners))
    with console.status("adding up"):
        lines = [line_of(prepared, i, question) for i in chosen]
    if console.is_terminal:
        console.print(_table(lines, question))
    else:
        for line in lines:
            console.out(_plain(line, question), highlight=False)
    for text in facts(run, lines):
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    (folder / "budget.json").write_text(
        json.dumps(as_document(run, lines, question), indent=2) + "\n", encoding="utf-8"
    )
    (folder / "budget.html").write_text(_page(run, lines, question), encoding="utf-8")
    console.out(f"{folder}: budget.json, budget.html", highlight=False)


def learner_index(spec: RunSpec, name: str) -> int:
    """Which learner that is.

    Raises:
        SpecError: none.
    """
    if name not in spec.names:
        raise SpecError(f"--learner must be one of {', '.join(spec.names)}, got {name}")
    return spec.names.index(name)


def line_of(prepared: Prepared, learner: int, question: Question) -> Line:
    """What one learner's messages may tell."""
    algorithm, own = prepared.run.algorithm, prepared.data.learners[learner]
    counts = np.diff(own.offsets)
    guarantee = algorithm.guarantee(learner, counts)
    records = record_losses(algorithm, learner, own) if question.uses else []
    charged = [each.charged(guarantee.per_round) for each in records]
    dearest = max(charged, key=math.fsum) if charged else None
    group = None
    if question.group is not None:
        size = 1 if replaces_all(algorithm, learner) else question.group
        group = group_loss(records or [Alike(size, 1, None)], guarantee.per_round, size)
    at_delta = record_at_delta = None
    if question.delta is not None:
        single, mechanism = message_losses(algorithm, learner, counts), mechanism_of(algorithm, learner)
        at_delta, record_at_delta = guarantee.epsilon(), None if dearest is None else math.fsum(dearest)
        if single is not None:
            at_delta = min(at_delta, epsilon_at(question.delta, single, mechanism))
            if record_at_delta is not None:
                worst = envelope([each.charged(single) for each in records])
                record_at_delta = min(record_at_delta, epsilon_at(question.delta, worst, mechanism))
    return Line(
        name=prepared.run.spec.names[learner],
        guarantee=guarantee,
        event=guarantee.epsilon(),
        record=None if dearest is None else math.fsum(dearest),
        group=group,
        at_delta=at_delta,
        record_at_delta=record_at_delta,
        record_curve=None if dearest is None else as_floats(np.cumsum(dearest)),
    )


# ---- showing ---------------------------------------------------------------------------------------------------------


def _columns(lines: Sequence[Line], question: Question) -> list[tuple[str, list[float | None]]]:
    """What is shown of every learner: a heading, and an epsilon each."""
    columns: list[tuple[str, list[float | None]]] = [("per event", [line.event for line in lines])]
    if question.uses:
        columns.append(("per record, all uses", [line.record for line in lines]))
    if question.group is not None:
        columns.append((f"{question.group} {_what(question)}", [line.group for line in lines]))
    if question.delta is not None:
        columns.append((f"per event at δ = {question.delta:g}", [line.at_delta for line in lines]))
        if question.uses:
            columns.append((f"per record at δ = {question.delta:g}", [line.record_at_delta for line in lines]))
    columns.append(("by the paper", [float(line.guarantee.paper[-1]) for line in lines]))
    if any(line.output is not None for line in lines):
        columns.append(("published decisions only", [line.output for line in lines]))
    columns.append(("for ever", [line.guarantee.infinite_horizon for line in lines]))
    return columns


def _what(question: Question) -> str:
    noun = "record" if question.uses else "event"
    return noun if question.group == 1 else f"{noun}s"


def _rows(lines: Sequence[Line], question: Question) -> Iterator[tuple[str, ...]]:
    columns = _columns(lines, question)
    for k, line in enumerate(lines):
        yield line.name, line.guarantee.threat_model.value, *(number(values[k]) for _, values in columns)


def _table(lines: Sequence[Line], question: Question) -> Table:
    table = Table(title="epsilon", box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim", title_justify="left")
    for k, head in enumerate(("learner", "listening", *(head for head, _ in _columns(lines, question)))):
        table.add_column(head, justify="left" if k < 2 else "right", overflow="fold")
    for row in _rows(lines, question):
        table.add_row(*row)
    return table


def _plain(line: Line, question: Question) -> str:
    values = ", ".join(f"{head} {number(value)}" for head, (value,) in _columns([line], question))
    return f"{line.name}: epsilon {values}; listening: {line.guarantee.threat_model.value}"


def facts(run: Run, lines: Sequence[Line]) -> Iterator[str]:
    """Sentences under the table: the sum over learners, what the numbers rest on, the proof, and warnings."""
    if len(lines) > 1:
        yield f"{_together(run, lines)}: epsilon {number(learners_loss(line.event for line in lines))}"
    promise = lines[0].guarantee
    yield f"one event: {promise.adjacency}"
    yield f"accounting: {promise.mode}; proof: {promise.proof}"
    for name, values, why in _grounds(lines):
        yield f"rests on {name} = {values}: {why}"
    for finding in run.warnings:
        yield f"warning: {finding.text} [{finding.code}]"


def _together(run: Run, lines: Sequence[Line]) -> str:
    if run.spec.data.partition.shared:
        return f"an event shows in the messages of every learner, for they share their records; of these {len(lines)} together"
    return f"an event at each of these {len(lines)} learners, together"


def _grounds(lines: Sequence[Line]) -> Iterator[tuple[str, str, str]]:
    """Constants: name, value or range of values over the learners, and what makes it true."""
    for name, ground in lines[0].guarantee.constants.items():
        values = [line.guarantee.constants[name].value for line in lines if name in line.guarantee.constants]
        low, high = number(min(values)), number(max(values))
        yield name, low if low == high else f"{low} to {high}", ground.enforced_by


# ---- files -----------------------------------------------------------------------------------------------------------


def as_document(run: Run, lines: Sequence[Line], question: Question) -> dict[str, object]:
    """What `budget.json` says; null for what is infinite, and keys only for what was asked."""
    return {
        "name": run.spec.name,
        "algorithm": run.algorithm.name,
        "rounds": run.spec.rounds,
        "delta": question.delta,
        "group": question.group,
        "uses": question.uses,
        "together": number_or_none(learners_loss(line.event for line in lines)),
        "learners": [_learner(line, question) for line in lines],
        "warnings": [{"code": finding.code, "text": finding.text} for finding in run.warnings],
    }


def _learner(line: Line, question: Question) -> dict[str, object]:
    promise = line.guarantee
    epsilons: dict[str, float | None] = {"event": line.event}
    if question.uses:
        epsilons["record"] = line.record
    if question.group is not None:
        epsilons["group"] = line.group
    if question.delta is not None:
        epsilons["event_at_delta"] = line.at_delta
        if question.uses:
            epsilons["record_at_delta"] = line.record_at_delta
    epsilons |= {"paper": float(promise.paper[-1]), "infinite_horizon": promise.infinite_horizon}
    if line.output is not None:
        epsilons["output"] = line.output
    return {
        "name": line.name,
        "threat_model": promise.threat_model.value,
        "adjacency": promise.adjacency,
        "epsilon": {key: None if value is None else number_or_none(value) for key, value in epsilons.items()},
        "cumulative": [number_or_none(value) for value in promise.cumulative.tolist()],
        "accounting": promise.mode,
        "proof": promise.proof,
        "constants": {
            name: {"value": number_or_none(each.value), "enforced_by": each.enforced_by}
            for name, each in promise.constants.items()
        },
    }


def _page(run: Run, lines: Sequence[Line], question: Question) -> str:
    heads = ("learner", "listening", *(f"ε {head}" for head, _ in _columns(lines, question)))
    promise = lines[0].guarantee
    grounds = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td><td class='why'>{html.escape(why)}</td></tr>"
        for name, value, why in _grounds(lines)
    )
    words = terms((("One event", promise.adjacency), ("Accounting", promise.mode), ("Proof", promise.proof)))
    warnings = "".join(f"<li><code>{each.code}</code>{html.escape(each.text)}</li>" for each in run.warnings)
    together = learners_loss(line.event for line in lines)
    lead = f"{_together(run, lines).capitalize()}: ε = {number(together)}." if len(lines) > 1 else ""
    plot = _plot(lines, question)
    rests = words + (f'<div class="wide"><table class="grounds">{grounds}</table></div>' if grounds else "")
    planned = (f"{count(run.spec.rounds)} rounds", run.algorithm.name, run.spec.data.source)
    return page(
        "budget",
        run.spec.name,
        (*planned, "planned: nothing was run"),
        (
            section("What the messages may tell", lead, table(heads, _rows(lines, question))),
            plot
            and section("Over the rounds", "The largest of these learners, and the range down to the smallest.", plot),
            section("What the numbers rest on", "", rests),
            section("Warnings", "", f'<ul class="codes">{warnings}</ul>') if warnings else "",
        ),
    )


def _plot(lines: Sequence[Line], question: Question) -> str:
    """Cumulative epsilons over rounds; empty where none is finite and above zero."""
    traces: list[Trace] = []
    ends: list[float] = []
    for kind, name, colour in KINDS:
        known = [curve for line in lines if (curve := line.curve(kind)) is not None]
        if known and (drawn := _spread(np.stack(known), name, colour)):
            traces += drawn
            ends.append(max(float(curve[-1]) for curve in known))
    deltas = [line.at_delta for line in lines if line.at_delta is not None and 0 < line.at_delta < math.inf]
    if not traces:
        return ""
    if deltas:
        rounds = len(lines[0].guarantee.per_round)
        ends.append(max(deltas))
        traces.append(_point(rounds, max(deltas), f"per event at δ = {question.delta:g}"))
    logarithmic = max(ends) > 8 * min(ends) and max(ends) < math.inf
    decades: Trace = {"yaxis.type": "log", "yaxis.dtick": 1}
    return draw(
        "plot-budget",
        traces,
        420,
        margin={"l": 62, "r": 40, "t": 64, "b": 48},
        xaxis=axis("round", tickformat=",", rangemode="tozero"),
        yaxis=axis("cumulative ε", type="log", dtick=1) if logarithmic else axis("cumulative ε", rangemode="tozero"),
        updatemenus=buttons(
            ("logarithmic", decades),
            ("linear", {"yaxis.type": "linear", "yaxis.dtick": None}),
            active=int(not logarithmic),
        ),
    )


def _spread(rows: FloatArray, name: str, colour: str) -> list[Trace]:
    """The largest value over the learners as a line, and a band down to the smallest."""
    kept = thinned(rows.shape[1])
    above = np.where(rows > 0, rows, math.nan)[:, kept]  # a logarithmic axis cannot show what costs nothing
    high, low = above.max(axis=0), above.min(axis=0)
    if not np.isfinite(high).any():
        return []
    across = {"type": "scatter", "mode": "lines", "x": (kept + 1).tolist()}
    line = {**across, "y": finite(high), "name": name, "line": {"color": colour, "width": 2.2}}
    line["hovertemplate"] = "round %{x:,}: %{y:.4~g}"
    if np.array_equal(high, low, equal_nan=True):
        return [line]
    band = {**across, "hoverinfo": "skip", "showlegend": False, "line": {"width": 0}}
    return [
        {**band, "y": finite(low)},
        {**band, "y": finite(high), "fill": "tonexty", "fillcolor": colour + "24"},
        line,
    ]


def _point(rounds: int, epsilon: float, name: str) -> Trace:
    marker = {"size": 11, "symbol": "diamond", "color": AT_DELTA, "line": {"color": "white", "width": 1.5}}
    place = {"x": [rounds], "y": [epsilon], "name": name, "cliponaxis": False}
    return {"type": "scatter", "mode": "markers", **place, "marker": marker, "hovertemplate": "%{y:.4~g}"}
