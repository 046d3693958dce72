"""`sottovoce budget`: what a run promises before anything runs, for events, records, groups and several learners."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from sottovoce_client import terminal
from sottovoce_client.atomic_files import write_json
from sottovoce_client.formatting import format_number, pluralize
from sottovoce_client.reports.figure import Figure
from sottovoce_client.reports.page import Page, PageColumn, PageTable
from sottovoce_client.reports.plot_elements import PINK, make_diamond
from sottovoce_client.reports.run_figures import EPSILON_STYLES, build_budget_figure
from sottovoce_client.reports.run_report import build_assumption_table
from sottovoce_core.arrays import FloatArray, as_floats
from sottovoce_core.budget.composition import (
    RecordGroup,
    envelope,
    epsilon_for_delta,
    group_loss,
    group_record_losses,
    message_losses,
    worst_case_record_losses,
)
from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import PreparedRun
from sottovoce_core.privacy.guarantee import Adjacency, Guarantee
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.run_warnings import BUDGET_ENDS
from sottovoce_core.spec import RunSpec


@dataclass(frozen=True, slots=True, eq=False)
class _BudgetLine:
    """What one learner's messages may tell.

    Attributes:
        name: of the learner.
        guarantee: of one event, with the planned numbers of records.
        epsilons: those that were asked for, or exist, by kind: `event`, `record` (the dearest one in all of its uses), `group`
            (the dearest), `record_use_at_delta`, `record_at_delta`, `paper`, `infinite_horizon`, `output` (against a reader of
            published decisions alone); None: there is no record.
        record_curve: `(rounds,)` cumulative epsilon of the dearest record.
    """

    name: str
    guarantee: Guarantee
    epsilons: Mapping[str, float | None]
    record_curve: FloatArray | None

    def curve(self, kind: str) -> FloatArray | None:
        """`(rounds,)` cumulative epsilon of a kind of `KINDS`."""
        curves = {
            "paper": self.guarantee.paper_epsilon,
            "record_use": self.guarantee.cumulative_epsilon,
            "record": self.record_curve,
        }
        return curves.get(kind, self.guarantee.output_epsilon)


@dataclass(frozen=True, slots=True)
class BudgetRequest:
    """What to ask of every learner: a delta, the size of a group, and whether records are charged for all of their uses.

    Attributes:
        rate: records a round that are supposed to come, where they are live.
    """

    delta: float | None = None
    group_size: int | None = None
    include_per_record: bool = False
    records_per_round: float | None = None

    def describe_assumption(self, run: Run) -> str:
        """What the numbers suppose; nothing where the data say it."""
        if self.records_per_round is None:
            return ""
        come = (
            "1 record comes"
            if self.records_per_round == 1.0
            else f"{format_number(self.records_per_round)} records come"
        )
        return f"if {come} a round, in {pluralize(run.spec.rounds, 'round')}"


def report_budget(
    prepared: PreparedRun, folder: Path, names: Sequence[str], question: BudgetRequest, console: Console | None = None
) -> int:
    """Print what a run promises, and write `budget.json` and `budget.html`; returns the exit code.

    Args:
        prepared: the run and its records, of which only the numbers by round matter.
        folder: where results are written.
        names: of the learners to show (empty: all).
        question: what to ask.
        console: where the table is printed.

    Raises:
        SpecError: no such learner, a delta out of range, or an extra is missing.
    """
    console, run = console or terminal.create_console(), prepared.run
    chosen = [find_learner_index(run.spec, name) for name in names] or list(range(run.spec.n_learners))
    with console.status("adding up"):
        lines = [_line_of(prepared, i, question) for i in chosen]
    if console.is_terminal:
        console.print(_table(lines, question))
    else:
        for line in lines:
            console.out(_plain(line, question), highlight=False)
    if supposed := question.describe_assumption(run):
        console.print(f"{supposed}; fewer cost more where means are learned from", highlight=False, soft_wrap=True)
    run = replace(run, warnings=(*run.warnings, *(each for each in prepared.warnings if each.code == BUDGET_ENDS)))
    for text in _facts(run, lines):
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    write_json(folder / "budget.json", _document(run, lines, question))
    page = folder / "budget.html"
    code = terminal.attempt(str(page), lambda: _budget_page(run, lines, question).write(page))
    terminal.print_json_file_if_requested(folder / "budget.json")
    console.out(f"{folder}: budget.json{'' if code else ', budget.html'}", highlight=False)
    return code


def find_learner_index(spec: RunSpec, name: str, option: str = "--learner") -> int:
    """Which learner an option names.

    Raises:
        SpecError: none.
    """
    if name not in spec.names:
        raise SpecError(f"{option} must be one of {', '.join(spec.names)}, got {name}")
    return spec.names.index(name)


def _line_of(prepared: PreparedRun, learner: int, question: BudgetRequest) -> _BudgetLine:
    """What one learner's messages may tell."""
    run, own = prepared.run, prepared.data.learners[learner]
    counts, accountant = np.diff(own.offsets), run.algorithm.accountant(learner)
    guarantee = run.guarantee(learner, counts)
    end = run.participation(learner).end
    records = group_record_losses(accountant, own, end) if question.include_per_record else []
    dearest = worst_case_record_losses(records, guarantee.round_losses) if records else None
    epsilons: dict[str, float | None] = {"record_use": guarantee.epsilon()}
    if question.include_per_record:
        epsilons["record"] = None if dearest is None else math.fsum(dearest)
    if question.group_size is not None:
        size = 1 if guarantee.adjacency is Adjacency.LEARNER else question.group_size
        epsilons["group"] = group_loss(records or [RecordGroup(size, 1, None)], guarantee.round_losses, size)
    if question.delta is not None:
        single, mechanism = message_losses(accountant, counts, end), guarantee.mechanism
        for kind in ("record_use", "record") if question.include_per_record else ("record_use",):
            pure = epsilons[kind]
            if single is not None and pure is not None:
                losses = (
                    single if kind == "record_use" else envelope([each.composable_losses(single) for each in records])
                )
                pure = min(pure, epsilon_for_delta(question.delta, losses, mechanism))
            epsilons[f"{kind}_at_delta"] = pure
    epsilons |= {"paper": float(guarantee.paper_epsilon[-1]), "infinite_horizon": guarantee.infinite_horizon_epsilon}
    if guarantee.output_epsilon is not None:
        epsilons["output"] = float(guarantee.output_epsilon[-1])
    curve = None if dearest is None else as_floats(np.cumsum(dearest))
    return _BudgetLine(run.spec.names[learner], guarantee, epsilons, curve)


# ---- showing ---------------------------------------------------------------------------------------------------------


def _heads(lines: Sequence[_BudgetLine], question: BudgetRequest) -> dict[str, str]:
    """The headings of the epsilons that these lines have, by kind, in the order in which they are shown."""
    noun = ("record" if question.include_per_record else "record_use") + "s" * (question.group_size != 1)
    heads = {
        "record_use": "per event",
        "record": "per record, all uses",
        "group": f"{question.group_size} {noun}",
        "record_use_at_delta": f"per event at δ = {question.delta or 0:g}",
        "record_at_delta": f"per record at δ = {question.delta or 0:g}",
        "paper": "by the paper",
        "output": "published decisions only",
        "infinite_horizon": "for ever",
    }
    return {kind: head for kind, head in heads.items() if any(kind in line.epsilons for line in lines)}


def _rows(lines: Sequence[_BudgetLine], heads: Iterable[str]) -> Iterator[tuple[str, ...]]:
    for line in lines:
        values = (format_number(line.epsilons.get(kind)) for kind in heads)
        yield line.name, line.guarantee.basis.threat_model.value, *values


def _table(lines: Sequence[_BudgetLine], question: BudgetRequest) -> Table:
    table, heads = terminal.create_table(title="epsilon", title_justify="left"), _heads(lines, question)
    for k, head in enumerate(("learner", "listening", *heads.values())):
        table.add_column(head, justify="left" if k < 2 else "right", overflow="fold")
    for row in _rows(lines, heads):
        table.add_row(*row)
    return table


def _plain(line: _BudgetLine, question: BudgetRequest) -> str:
    values = ", ".join(
        f"{head} {format_number(line.epsilons[kind])}" for kind, head in _heads([line], question).items()
    )
    return f"{line.name}: epsilon {values}; listening: {line.guarantee.basis.threat_model.value}"


def _facts(run: Run, lines: Sequence[_BudgetLine]) -> Iterator[str]:
    """Sentences under the table: the sum over learners, what the numbers rest on, the proof, and warnings."""
    if len(lines) > 1:
        yield f"{_together(run, lines)}: epsilon {format_number(_sum(lines))}"
    promise = lines[0].guarantee
    yield f"one event: {promise.adjacency_description}"
    yield f"accounting: {promise.basis.mode}; proof: {promise.basis.proof}"
    for name, values, why in _grounds(lines):
        yield f"rests on {name} = {values}: {why}"
    for finding in run.warnings:
        yield f"warning: {finding.text} [{finding.code}]"


def _sum(lines: Sequence[_BudgetLine]) -> float:
    """What replacing something at each of these learners costs: each says its own noisy messages, so losses add up."""
    return math.fsum(line.guarantee.epsilon() for line in lines)


def _together(run: Run, lines: Sequence[_BudgetLine]) -> str:
    if run.spec.data.partition.is_shared:
        return f"an event shows in the messages of every learner, for they share their records; of these {len(lines)} together"
    return f"an event at each of these {len(lines)} learners, together"


def _grounds(lines: Sequence[_BudgetLine]) -> Iterator[tuple[str, str, str]]:
    """Constants: name, value or range of values over the learners, and what makes it true."""
    for name, ground in lines[0].guarantee.basis.constants.items():
        values = [
            line.guarantee.basis.constants[name].value for line in lines if name in line.guarantee.basis.constants
        ]
        low, high = format_number(min(values)), format_number(max(values))
        yield name, low if low == high else f"{low} to {high}", ground.enforcement


# ---- files -----------------------------------------------------------------------------------------------------------


def _document(run: Run, lines: Sequence[_BudgetLine], question: BudgetRequest) -> dict[str, Any]:
    """`budget.json`; an epsilon of null is infinite."""
    return {
        "name": run.spec.name,
        "algorithm": run.algorithm.name,
        "rounds": run.spec.rounds,
        "delta": question.delta,
        "group": question.group_size,
        "records_a_round": question.records_per_round,  # of live ones, supposed
        "uses": question.include_per_record,  # whether records were charged for all of their uses
        "together": _sum(lines),  # epsilon of an event at every one of these learners
        "learners": [_learner(line) for line in lines],
        "warnings": [{"code": finding.code, "text": finding.text} for finding in run.warnings],
    }


def _learner(line: _BudgetLine) -> dict[str, Any]:
    """What one learner's messages may tell; of the epsilons those that were asked for, and exist."""
    promise = line.guarantee
    return {
        "name": line.name,
        "threat_model": promise.basis.threat_model,  # who may listen
        "adjacency": promise.adjacency_description,  # which two data sets must look alike
        "epsilon": line.epsilons,
        "cumulative": promise.cumulative_epsilon,  # epsilon of one event, after every round
        "accounting": promise.basis.mode,
        "proof": promise.basis.proof,
        "constants": {
            name: {"value": each.value, "enforced_by": each.enforcement}
            for name, each in promise.basis.constants.items()
        },
    }


def _budget_page(run: Run, lines: Sequence[_BudgetLine], question: BudgetRequest) -> Page:
    """What a run promises, and what that rests on."""
    heads = _heads(lines, question)
    columns = (
        PageColumn("learner"),
        PageColumn("listening", kind="text"),
        *(PageColumn(f"ε {head}") for head in heads.values()),
    )
    title = "What the messages may tell"
    values = {
        "run": run,
        "supposed": question.describe_assumption(run),
        "promise": lines[0].guarantee,
        "warned": [(finding.code, finding.text) for finding in run.warnings],
        "together": _together(run, lines) if len(lines) > 1 else "",
        "epsilon": _sum(lines),
    }
    table = PageTable("learners", title, columns, list(_rows(lines, heads)))
    return Page(
        "budget.html.j2", [table, build_assumption_table(list(_grounds(lines))), _plot(lines, question)], values
    )


def _plot(lines: Sequence[_BudgetLine], question: BudgetRequest) -> Figure:
    """Cumulative epsilons over rounds; nothing where none is finite and above zero."""
    curves = {}
    for kind in EPSILON_STYLES:
        known = [curve for line in lines if (curve := line.curve(kind)) is not None]
        if known:
            curves[kind] = np.stack(known)
    at_delta = (line.epsilons.get("record_use_at_delta") or 0.0 for line in lines)
    deltas = [epsilon for epsilon in at_delta if 0 < epsilon < math.inf]
    rounds, name = len(lines[0].guarantee.round_losses), f"per event at δ = {question.delta:g}" if deltas else ""
    return build_budget_figure(
        "Over the rounds", curves, [make_diamond(rounds, max(deltas), name, PINK)] if deltas else []
    )
