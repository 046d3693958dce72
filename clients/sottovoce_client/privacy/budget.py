"""`sottovoce budget`: the guarantees of a run before it starts, for record uses, records, groups and several learners."""

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
from sottovoce_core.budget.composition import require_delta
from sottovoce_core.budget.cost import LearnerCost
from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import PreparedRun
from sottovoce_core.privacy.guarantee import Guarantee
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.run_warnings import BUDGET_ENDS
from sottovoce_core.spec import RunSpec
from sottovoce_core.text import suggest_name


@dataclass(frozen=True, slots=True, eq=False)
class _BudgetLine:
    """Epsilons of one learner's messages.

    Attributes:
        name: Name of the learner.
        guarantee: Guarantee of one record use, with the planned numbers of records.
        epsilons: The requested or available ones, by kind: `record_use`, `record` (the most expensive one in all of its uses),
            `group` (the most expensive), `record_use_at_delta`, `record_at_delta`, `paper`, `infinite_horizon`, `output` (against
            an adversary that reads published decisions alone); None: there is no record.
        record_curve: `(rounds,)` cumulative epsilon of the most expensive record.
    """

    name: str
    guarantee: Guarantee
    epsilons: Mapping[str, float | None]
    record_curve: FloatArray | None

    def curve(self, kind: str) -> FloatArray | None:
        """Return the `(rounds,)` cumulative epsilon of a kind in `EPSILON_STYLES`."""
        curves = {
            "paper": self.guarantee.paper_epsilon,
            "record_use": self.guarantee.cumulative_epsilon,
            "record": self.record_curve,
        }
        return curves.get(kind, self.guarantee.output_epsilon)


@dataclass(frozen=True, slots=True)
class BudgetRequest:
    """Request for every learner: a delta, a group size, and whether records are charged for all of their uses.

    Attributes:
        records_per_round: Assumed number of records per round, if they are live.
    """

    delta: float | None = None
    group_size: int | None = None
    include_per_record: bool = False
    records_per_round: float | None = None

    def describe_assumption(self, run: Run) -> str:
        """Describe the assumed number of records; empty if the data determine it."""
        if self.records_per_round is None:
            return ""
        arrival = (
            "1 record arrives"
            if self.records_per_round == 1.0
            else f"{format_number(self.records_per_round)} records arrive"
        )
        return f"if {arrival} per round, in {pluralize(run.spec.rounds, 'round')}"


def report_budget(
    prepared: PreparedRun, folder: Path, names: Sequence[str], request: BudgetRequest, console: Console | None = None
) -> int:
    """Print the guarantees of a run, and write `budget.json` and `budget.html`; return the exit code.

    Args:
        prepared: Run and its records; only the numbers by round matter.
        folder: Output folder.
        names: Names of the learners to show (empty: all).
        request: Requested epsilons.
        console: Console of the table.

    Raises:
        SpecError: The learner does not exist, a delta is out of range, or an optional dependency is missing.
    """
    if request.delta is not None:
        require_delta(request.delta)
    console, run = console or terminal.create_console(), prepared.run
    chosen = [find_learner_index(run.spec, name) for name in names] or list(range(run.spec.n_learners))
    with console.status("adding up"):
        lines = [_compute_line(prepared, i, request) for i in chosen]
    if console.is_terminal:
        console.print(_table(lines, request))
    else:
        for line in lines:
            console.out(_format_line(line, request), highlight=False)
    if assumption := request.describe_assumption(run):
        console.print(
            f"{assumption}; fewer records cost more with algorithms that learn from means",
            highlight=False,
            soft_wrap=True,
        )
    run = replace(run, warnings=(*run.warnings, *(each for each in prepared.warnings if each.code == BUDGET_ENDS)))
    for text in _facts(run, lines):
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    write_json(folder / "budget.json", _document(run, lines, request))
    page = folder / "budget.html"
    code = terminal.attempt(str(page), lambda: _budget_page(run, lines, request).write(page))
    terminal.print_json_file_if_requested(folder / "budget.json")
    console.out(f"{folder}: budget.json{'' if code else ', budget.html'}", highlight=False)
    return code


def find_learner_index(spec: RunSpec, name: str, option: str = "--learner") -> int:
    """Return the index of the learner that an option names.

    Raises:
        SpecError: The learner does not exist.
    """
    if name not in spec.names:
        raise SpecError(f"{option} must be one of {', '.join(spec.names)}, got {name}{suggest_name(name, spec.names)}")
    return spec.names.index(name)


def _compute_line(prepared: PreparedRun, learner: int, request: BudgetRequest) -> _BudgetLine:
    """Compute the epsilons of one learner's messages."""
    run = prepared.run
    cost = LearnerCost(run, learner, prepared.data.learners[learner])
    has_records = request.include_per_record and bool(cost.records)
    guarantee = cost.guarantee
    epsilons: dict[str, float | None] = {"record_use": cost.epsilon("record_use")}
    if request.include_per_record:
        epsilons["record"] = cost.epsilon("record") if has_records else None
    if request.group_size is not None:
        epsilons["group"] = cost.group_epsilon(request.group_size, all_uses=request.include_per_record)
    if request.delta is not None:
        epsilons["record_use_at_delta"] = cost.epsilon("record_use", request.delta)
        if request.include_per_record:
            epsilons["record_at_delta"] = cost.epsilon("record", request.delta) if has_records else None
    epsilons |= {"paper": float(guarantee.paper_epsilon[-1]), "infinite_horizon": guarantee.infinite_horizon_epsilon}
    if guarantee.output_epsilon is not None:
        epsilons["output"] = float(guarantee.output_epsilon[-1])
    curve = as_floats(np.cumsum(cost.losses("record"))) if has_records else None
    return _BudgetLine(run.spec.names[learner], guarantee, epsilons, curve)


# ---- terminal output -------------------------------------------------------------------------------------------------


def _heads(lines: Sequence[_BudgetLine], request: BudgetRequest) -> dict[str, str]:
    """Return the headings of the available epsilons, by kind, in the order in which they are shown."""
    noun = ("record" if request.include_per_record else "record use") + "s" * (request.group_size != 1)
    heads = {
        "record_use": "per record use",
        "record": "per record, all uses",
        "group": f"{request.group_size} {noun}",
        "record_use_at_delta": f"per record use at δ = {request.delta or 0:g}",
        "record_at_delta": f"per record at δ = {request.delta or 0:g}",
        "paper": "by the paper",
        "output": "published decisions only",
        "infinite_horizon": "infinite horizon",
    }
    return {kind: head for kind, head in heads.items() if any(kind in line.epsilons for line in lines)}


def _rows(lines: Sequence[_BudgetLine], heads: Iterable[str]) -> Iterator[tuple[str, ...]]:
    for line in lines:
        values = (format_number(line.epsilons.get(kind)) for kind in heads)
        yield line.name, line.guarantee.basis.threat_model.value, *values


def _table(lines: Sequence[_BudgetLine], request: BudgetRequest) -> Table:
    table, heads = terminal.create_table(title="epsilon", title_justify="left"), _heads(lines, request)
    for k, head in enumerate(("learner", "threat model", *heads.values())):
        table.add_column(head, justify="left" if k < 2 else "right", overflow="fold")
    for row in _rows(lines, heads):
        table.add_row(*row)
    return table


def _format_line(line: _BudgetLine, request: BudgetRequest) -> str:
    values = ", ".join(f"{head} {format_number(line.epsilons[kind])}" for kind, head in _heads([line], request).items())
    return f"{line.name}: epsilon {values}; threat model: {line.guarantee.basis.threat_model.value}"


def _facts(run: Run, lines: Sequence[_BudgetLine]) -> Iterator[str]:
    """Yield sentences for the area under the table: sum over learners, assumptions, proof, and warnings."""
    if len(lines) > 1:
        yield f"{_describe_total(run, lines)}: epsilon {format_number(_sum(lines))}"
    guarantee = lines[0].guarantee
    yield f"adjacent data sets: {guarantee.adjacency_description}"
    yield f"accounting: {guarantee.basis.mode}; proof: {guarantee.basis.proof}"
    for name, values, enforcement in _list_constants(lines):
        yield f"assumes {name} = {values}: {enforcement}"
    for finding in run.warnings:
        yield f"warning: {finding.text} [{finding.code}]"


def _sum(lines: Sequence[_BudgetLine]) -> float:
    """Sum the epsilons of a replacement at each of these learners: each sends its own noisy messages, so losses add up."""
    return math.fsum(line.guarantee.epsilon() for line in lines)


def _describe_total(run: Run, lines: Sequence[_BudgetLine]) -> str:
    if run.spec.data.partition.is_shared:
        return f"learners share records, so one record use affects the messages of all; total over these {len(lines)} learners"
    return f"one record use at each of these {len(lines)} learners, total"


def _list_constants(lines: Sequence[_BudgetLine]) -> Iterator[tuple[str, str, str]]:
    """Yield the constants: name, value or range of values over the learners, and what enforces it."""
    for name, constant in lines[0].guarantee.basis.constants.items():
        values = [
            line.guarantee.basis.constants[name].value for line in lines if name in line.guarantee.basis.constants
        ]
        low, high = format_number(min(values)), format_number(max(values))
        yield name, low if low == high else f"{low} to {high}", constant.enforcement


# ---- output files ----------------------------------------------------------------------------------------------------


def _document(run: Run, lines: Sequence[_BudgetLine], request: BudgetRequest) -> dict[str, Any]:
    """Build `budget.json`; an epsilon of null is infinite."""
    return {
        "name": run.spec.name,
        "algorithm": run.algorithm.name,
        "rounds": run.spec.rounds,
        "delta": request.delta,
        "group_size": request.group_size,
        "records_per_round": request.records_per_round,  # assumed, of live records
        "include_per_record": request.include_per_record,  # whether records were charged for all of their uses
        "total_epsilon": _sum(lines),  # epsilon of a record use at every one of these learners
        "learners": [_learner_document(line) for line in lines],
        "warnings": [{"code": finding.code, "text": finding.text} for finding in run.warnings],
    }


def _learner_document(line: _BudgetLine) -> dict[str, Any]:
    """Build the document of one learner's messages, with the requested and available epsilons."""
    guarantee = line.guarantee
    return {
        "name": line.name,
        "threat_model": guarantee.basis.threat_model,
        "adjacency": guarantee.adjacency_description,  # description of adjacent data sets
        "epsilon": line.epsilons,
        "cumulative": guarantee.cumulative_epsilon,  # epsilon of one record use, after every round
        "accounting": guarantee.basis.mode,
        "proof": guarantee.basis.proof,
        "constants": {
            name: {"value": each.value, "enforced_by": each.enforcement}
            for name, each in guarantee.basis.constants.items()
        },
    }


def _budget_page(run: Run, lines: Sequence[_BudgetLine], request: BudgetRequest) -> Page:
    """Build the page: guarantees, and their assumptions."""
    heads = _heads(lines, request)
    columns = (
        PageColumn("learner"),
        PageColumn("threat model", kind="text"),
        *(PageColumn(f"ε {head}") for head in heads.values()),
    )
    title = "Epsilon of the messages"
    values = {
        "run": run,
        "supposed": request.describe_assumption(run),
        "promise": lines[0].guarantee,
        "warned": [(finding.code, finding.text) for finding in run.warnings],
        "together": _describe_total(run, lines) if len(lines) > 1 else "",
        "epsilon": _sum(lines),
    }
    table = PageTable("learners", title, columns, list(_rows(lines, heads)))
    return Page(
        "budget.html.j2", [table, build_assumption_table(list(_list_constants(lines))), _plot(lines, request)], values
    )


def _plot(lines: Sequence[_BudgetLine], request: BudgetRequest) -> Figure:
    """Plot cumulative epsilons over rounds; empty if none is finite and above zero."""
    curves = {}
    for kind in EPSILON_STYLES:
        known = [curve for line in lines if (curve := line.curve(kind)) is not None]
        if known:
            curves[kind] = np.stack(known)
    at_delta = (line.epsilons.get("record_use_at_delta") or 0.0 for line in lines)
    deltas = [epsilon for epsilon in at_delta if 0 < epsilon < math.inf]
    rounds, name = len(lines[0].guarantee.round_losses), f"per record use at δ = {request.delta:g}" if deltas else ""
    return build_budget_figure(
        "Over the rounds", curves, [make_diamond(rounds, max(deltas), name, PINK)] if deltas else []
    )
