"""`sottovoce audit`: one learner, in two worlds. What was tested, and what may be said of it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sottovoce_client import terminal
from sottovoce_client.atomic_files import write_json
from sottovoce_client.auditing.report import (
    COIN_SOURCE_NAMES,
    build_audit_document,
    build_audit_page,
    get_verdict_subject,
)
from sottovoce_client.backends import Mapper, map_with_progress
from sottovoce_client.formatting import MISSING_VALUE, format_duration, format_number, format_p_value
from sottovoce_client.privacy.budget import find_learner_index
from sottovoce_client.terminal import ProgressReporter
from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.audit import Audit, CoinSource, audit_simulated
from sottovoce_core.auditing.blackbox import NUMBER_VIEWS
from sottovoce_core.auditing.bounds import Bound, Family, compute_needed_runs
from sottovoce_core.auditing.plan import AuditPlan, plan_audit
from sottovoce_core.auditing.verdict import Findings, Verdict, decide
from sottovoce_core.auditing.worlds import Worlds, build_worlds
from sottovoce_core.auditing.worst_case_search import add_intercept, mirror_record
from sottovoce_core.data.encoding import Encoder
from sottovoce_core.data.spec import Schema
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.experiment import PreparedRun
from sottovoce_core.privacy.guarantee import ThreatModel

_COLOURS = {"consistent": "green", "refuted": "bold red", "inconclusive": "yellow", "no-claim": "yellow"}
_MIN_TABLE_COLUMNS = 80
"""Columns of a terminal that the table of an audit needs."""
_MAX_SHOWN_EVIDENCE = 6
"""Pieces of evidence that are told; more are counted."""

TableRow = tuple[str, str, str, str, str]
"""Family, what was tested, result, epsilon at least, epsilon claimed."""

Auditor = Callable[..., Audit]
"""Makes the runs of an audit, and examines them: takes an `AuditPlan` and `say`, told what is being done."""


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """What is asked.

    Attributes:
        learner: its name; None: the one that may spend most.
        record: row of the learner's record to swap, in all of its uses; None: the swap that shows most.
        replacement: what for: `mirror`, `label`, `LEARNER:ROW`, or a JSON file with `features` and `label`; under a schema, with
            the fields of a record.
        threat: who listens.
        neighbour: name of the neighbour that listens.
        runs: of each world.
        confidence: with which a correct learner is not refuted.
        seed: of coins and noise.
    """

    learner: str | None = None
    record: int | None = None
    replacement: str = "mirror"
    threat: ThreatModel = ThreatModel.WIRE
    neighbour: str | None = None
    runs: int = 1000
    confidence: float = 0.95
    seed: int = 0

    def plan(
        self,
        prepared: PreparedRun,
        worlds: Sequence[Worlds] | None = None,
        counts: Sequence[int] = (),
        *,
        is_paired: bool = True,
    ) -> AuditPlan:
        """The audit that was asked for.

        Args:
            prepared: the run and its data.
            worlds: pairs of worlds, where they are known beforehand.
            counts: runs of each world of every pair, likewise.
            paired: there are to be runs of both worlds; False: so many of the first one.

        Raises:
            SpecError: no learner of that name, or too few runs.
            DataError: there is no such record, or the replacement is none that the loss is defined for.
        """
        spec = prepared.run.spec
        learner = choose_audited_learner(prepared, self.learner) if worlds is None else worlds[0].learner
        if worlds is None and self.record is not None:
            worlds = [_swap(prepared, learner, self.record, self.replacement)]
        return plan_audit(
            prepared.run,
            prepared.data,
            learner,
            runs=self.runs,
            confidence=self.confidence,
            seed=self.seed,
            worlds=worlds,
            counts=counts,
            threat=self.threat,
            neighbour=None if self.neighbour is None else find_learner_index(spec, self.neighbour, "--neighbour"),
            has_both_worlds=is_paired,
        )


def run_audit(
    folder: Path,
    prepared: PreparedRun,
    request: AuditRequest,
    auditor: Auditor,
    console: Console | None = None,
) -> int:
    """Audit a learner, print what was found, and write `audit.json` and `audit.html`.

    Args:
        folder: where to.
        prepared: the run and its data.
        asked: what is asked.
        work: makes the runs and examines them.
        console: where to print (default: standard output).

    Returns:
        The exit code: 1 if the claim is refuted; else 3 if the page could not be made; else 0.

    Raises:
        SpecError: the question does not fit the run, or an extra is not installed.
        DataError: there is no record to swap.
    """
    console = console or terminal.create_console()
    began = time.monotonic()
    with terminal.show_progress_bar("choosing the swap") as say:
        done = auditor(request.plan(prepared), say=say)
    return report_audit(done, request.seed, folder, console, _pace(done, time.monotonic() - began))


def audit_on_simulator(plan: AuditPlan, *, report_progress: ProgressReporter, mapper: Mapper) -> Audit:
    """An audit of simulated runs, which are counted while the mapper works on shares of them."""
    doing = ""

    def begin(what: str) -> None:
        nonlocal doing
        doing = what
        report_progress(what)

    over = map_with_progress(
        mapper, lambda share: share.runs, lambda done, of: report_progress(doing, done, of, "runs")
    )
    return audit_simulated(plan, mapper=over, on_stage=begin)


def _pace(done: Audit, seconds: float) -> str:
    """What was weighed, and how fast."""
    runs = 2 * done.plan.total_runs
    weighed = f"{runs:,} runs and {done.noise_count:,} numbers of noise in {format_duration(seconds)}"
    return f"{weighed}: {format_number(runs / seconds, 3)} runs, {done.noise_count / seconds:,.0f} numbers a second."


def report_audit(done: Audit, seed: int, folder: Path, console: Console, *notes: str) -> int:
    """Print an audit and write it down; returns the exit code."""
    name = done.plan.run.spec.names[done.plan.worlds.learner]
    write_json(folder / "audit.json", build_audit_document(done, name, seed))
    digest = hashlib.sha256((folder / "audit.json").read_bytes()).hexdigest()
    page = folder / "audit.html"
    code = terminal.attempt(str(page), lambda: build_audit_page(done, name, seed, digest).write(page))
    print_verdict(
        done.verdict,
        get_verdict_subject(done) or "the run",
        _rows(done),
        [*_notes(done, seed), *notes],
        console,
        done.unproven_reason,
    )
    console.out(f"{folder}: audit.json{'' if code else ', audit.html'}", highlight=False)
    return 1 if done.verdict.kind == "refuted" else code


def choose_audited_learner(prepared: PreparedRun, learner: str | None) -> int:
    """The learner of that name; None: the one with the largest epsilon.

    Raises:
        SpecError: there is none.
    """
    return prepared.find_worst_case_learner() if learner is None else find_learner_index(prepared.run.spec, learner)


def _swap(prepared: PreparedRun, learner: int, row: int, replacement: str) -> Worlds:
    """The swap of the record that was asked for."""
    own = prepared.data.learners[learner]
    if not 0 <= row < len(own.labels):
        raise SpecError(f"--record must be in [0, {len(own.labels)}), the learner's records, got {row}")
    features, label = _replacement(prepared, learner, row, replacement)
    other = {"mirror": "its mirror image", "label": "itself with the other label"}.get(replacement, replacement)
    shared = prepared.run.algorithm.accountant(learner).has_shared_records
    return build_worlds(prepared.data, learner, row, features, label, replacement_name=other, is_shared=shared)


def _replacement(prepared: PreparedRun, learner: int, row: int, text: str) -> tuple[Any, float]:
    own = prepared.data.learners[learner]
    if text == "mirror":
        return mirror_record(own.features[row], prepared.run.spec.data.schema), float(own.labels[row])
    if text == "label":
        others = [float(value) for value in np.unique(own.labels) if value != own.labels[row]]
        if not others:
            raise SpecError("--replacement label needs a second label among the learner's records, and there is none")
        return own.features[row], others[0]
    if text.endswith(".json"):
        return _from_file(Path(text), prepared)
    name, _, number_ = text.rpartition(":")
    if not number_.isdigit():
        raise SpecError(f"--replacement must be mirror, label, LEARNER:ROW or a .json file, got {text}")
    other = prepared.data.learners[find_learner_index(prepared.run.spec, name, "--replacement")]
    if int(number_) >= len(other.labels):
        raise SpecError(f"--replacement: {name} has {len(other.labels)} records, got {number_}")
    return other.features[int(number_)], float(other.labels[int(number_)])


def _require_bounded(prepared: PreparedRun, features: FloatArray, label: float, where: str) -> None:
    """Refuse a made-up record that the loss would make another one of: it would not be the swap that was asked for.

    Raises:
        DataError: it is beyond the bounds of the loss.
    """
    loss = prepared.run.loss
    if not (np.isfinite(features).all() and np.isfinite(label)) or features.ndim != 1:
        return  # the worlds say what is wrong with it
    rows, labels = loss.enforce_bounds(features[None], np.array([label]))
    if not (np.allclose(rows[0], features, rtol=1e-9, atol=0.0) and labels[0] == label):
        raise DataError(
            f"--replacement {where} is beyond the bounds of the {loss.kind} loss: its features have norm "
            f"{np.linalg.norm(features):.6g}, where at most {loss.feature_bound:g} is learned, and its label is {label:g}"
        )


def _from_file(path: Path, prepared: PreparedRun) -> tuple[FloatArray, float]:
    """A record that was made up: as it would be placed, or, where the run has a schema, in its fields."""
    schema = prepared.run.spec.data.schema
    holds = "features (a list of numbers) and label" if schema is None else "the fields of a record, its label included"
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(told, dict):
            raise TypeError(f"it holds a {type(told).__name__}")
        if schema is not None:
            return _by_schema(told, schema, prepared, path)
        features, label = np.asarray(told["features"], dtype=np.float64), float(told["label"])
    except (OSError, KeyError, ValueError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        why = f"it has no {error}" if isinstance(error, KeyError) else why
        raise SpecError(f"--replacement {path} must hold a JSON object with {holds}: {why}") from None
    _require_bounded(prepared, features, label, str(path))
    return features, label


def _by_schema(record: dict[str, Any], schema: Schema, prepared: PreparedRun, path: Path) -> tuple[FloatArray, float]:
    spec = prepared.run.spec
    found = Encoder.from_schema(schema, spec.loss, spec.data.positive).encode_records([record])
    if found.refusals:
        raise DataError(f"--replacement {path} must be a record that the schema allows: {found.refusals[0]}")
    return add_intercept(prepared.run, found.features[0]), float(found.labels[0])


def print_verdict(
    verdict: Verdict, name: str, rows: Iterable[TableRow], notes: Iterable[str], console: Console, unproven: str = ""
) -> None:
    """The verdict, what was tested side by side, and what else there is to know.

    Args:
        verdict: what may be said.
        name: of whom.
        rows: what was tested.
        notes: a line each.
        console: where to.
        unproven: as of `Audit`.
    """
    doubtful = verdict.is_weak or (unproven and verdict.kind == "consistent")
    doubt = f" ({unproven})" if unproven else ""
    colour = "yellow" if doubtful else _COLOURS[verdict.kind]
    console.print(Text.assemble((name, "bold"), " ", (verdict.kind.upper(), colour), (doubt, "yellow")))
    console.print(Text(verdict.text))
    for more in verdict.evidence[1:_MAX_SHOWN_EVIDENCE]:
        console.print(Text(f"also: {more}"))
    if len(verdict.evidence) > _MAX_SHOWN_EVIDENCE:
        console.print(Text(f"and {len(verdict.evidence) - _MAX_SHOWN_EVIDENCE} more: audit.json"))
    _print_rows(rows, console)
    for text in notes:
        console.print(Text(text, style="dim"))


def _print_rows(rows: Iterable[TableRow], console: Console) -> None:
    """What families tested and found: a table, or, where that would be cramped, a paragraph each."""
    if console.width < _MIN_TABLE_COLUMNS:
        for family, what, result, bound, claim in rows:
            epsilons = "" if bound == claim == MISSING_VALUE else f"; ε at least {bound}, claimed {claim}"
            console.print(Text.assemble((family, "bold"), f", {what}: {result}{epsilons}"))
        return
    table = Table("family", "what was tested", "result", box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    table.add_column("ε at\nleast", justify="right")
    table.add_column("ε\nclaimed", justify="right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _rows(done: Audit) -> Iterator[TableRow]:
    found = done.findings
    yield format_tests_row(found, "conformance", "the noise is what the algorithm says", "no noise to test")
    if done.run_losses is None:
        yield (
            "likelihood",
            "the loss of every transcript",
            "not known to this listener",
            MISSING_VALUE,
            format_number(found.claim),
        )
    else:
        above = "none above" if found.excess is None else f"{found.excess.transcript_count:,} above"
        result = f"largest {format_number(done.largest_loss)}, {above} the claim"
        if decide(found.select_family("conformance")).kind == "refuted":
            result += "; as if the noise were as claimed, which it is not"
        yield "likelihood", "the loss of every transcript", result, MISSING_VALUE, format_number(found.claim)
    if found.select_family("likelihood").tests:
        yield format_tests_row(found, "likelihood", "coins, given the losses", "nothing to test")
    yield from map(format_guess_row, found.select_family("likelihood").bounds)
    if found.round_bounds is not None:
        values = [bound.value for bound in found.round_bounds.bounds]
        result = f"{int(np.count_nonzero(values))} of {len(values)} show something"
        yield (
            "likelihood",
            "single rounds",
            f"{result}; added up: about {format_number(found.round_bounds.estimate, 3)}",
            MISSING_VALUE,
            MISSING_VALUE,
        )
    yield from map(format_guess_row, found.select_family("black box").bounds)
    if found.select_family("black box").tests:
        yield format_tests_row(found, "black box", "the rest, given the messages", "nothing to test")


def format_guess_row(bound: Bound) -> TableRow:
    """One guesser."""
    blind = bound.family == "black box" and not bound.view
    seen = f"{bound.name}: nothing to look at" if blind else bound.name
    result = f"{bound.correct_guesses:,} of {bound.guesses:,} right" if bound.guesses else "sure of none"
    return bound.family, seen, result, format_number(bound.value, 3), format_number(bound.claim)


def format_tests_row(found: Findings, family: Family, what: str, none: str) -> TableRow:
    """The tests of a family, by the one that says most against the claim."""
    tests = [test for test in found.select_family(family).tests if test.p_value == test.p_value]
    if not tests:
        return family, what, none, MISSING_VALUE, MISSING_VALUE
    worst = min(tests, key=lambda test: test.p_value / test.level)
    smallest = f"worst of {len(tests)} p-values {format_p_value(worst.p_value)} ({worst.name})"
    return family, what, f"{smallest}; below {format_number(worst.level, 2)} rejects", MISSING_VALUE, MISSING_VALUE


def format_coins_line(coins: CoinSource, seed: int) -> str:
    """What chose the world of every run, a sentence; empty: nothing did."""
    if coins == "none":
        return ""
    return f"Coins: {f'seed {seed}' if coins == 'seed' else COIN_SOURCE_NAMES[coins]}."


def _notes(done: Audit, seed: int) -> Iterator[str]:
    found, plan = done.findings, done.plan
    paper = float(plan.guarantee.paper_epsilon[-1])
    heard = plan.adversary.threat.value
    if plan.adversary.neighbour is not None:
        heard = f"{heard} {plan.run.spec.names[plan.adversary.neighbour]}"
    swaps = "; ".join(each.worlds.description for each in plan.pairs)
    yield f"Runs: {done.source}. Worlds: {swaps}. Adjacent: {plan.guarantee.adjacency_description}. Heard: {heard}."
    if done.captures and (line := format_coins_line(done.coin_source, seed)):
        yield line
    yield from done.assumptions
    if plan.claim_threat_model is ThreatModel.OUTPUT and plan.adversary.threat is not ThreatModel.OUTPUT:
        yield "The claim is about published decisions; nothing finite is promised about messages, which were heard here."
    yield f"Paper's ε {format_number(paper)}, promised ε {format_number(found.claim)}."
    if done.largest_loss > paper * (1.0 + 1e-9) + 1e-9:
        yield "A transcript shows more than the paper's ε: see what the algorithm's page says of the paper's claim."
    if found.detectable_effects and done.verdict.kind in ("consistent", "inconclusive"):
        yield f"Would have been found, nine times in ten: {'; '.join(each.text for each in found.detectable_effects)}."
    if not found.has_both_worlds:
        yield "All runs are of one world, so nothing was guessed."
        return
    most = found.max_provable_epsilon
    needed = ""
    if 0.0 < found.claim <= 20.0:
        full = compute_needed_runs(found.claim, found.alpha_allocation.compute_level("likelihood", "whole runs"))
        needed = f" If the worlds show all of the claim, {full:,} runs of each show 90 % of it."
    yield f"At best {plan.runs:,} runs of each world show ε {format_number(most, 3)}.{needed}"
    if most < found.claim < np.inf:
        yield _despite(done)


def _despite(done: Audit) -> str:
    """What may refute a claim that is beyond all guesses of so many runs: of what was looked at here."""
    found = done.findings
    looked = {
        "exact losses": done.run_losses is not None,
        "single rounds": found.round_bounds is not None,
        "conformance": bool(found.select_family("conformance").tests),
        "what differs beside the messages": bool(done.varying_counts.keys() - NUMBER_VIEWS.keys()),
    }
    *others, last = [what for what, here in looked.items() if here] or [""]
    if not last:
        return "So guesses of whole runs, which are all there is here, cannot refute this claim."
    return f"So guesses of whole runs cannot refute this claim; {', '.join(others)}{' and ' * bool(others)}{last} can."
