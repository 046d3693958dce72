"""`sottovoce audit`: audit one learner in two worlds, and report the tests and the verdict."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from sottovoce_client.auditing.summary import AuditSummary, Tone, summarise_audit
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

_COLOURS: Mapping[Tone, str] = {
    "consistent": "green",
    "partial": "green",
    "weak": "yellow",
    "refuted": "bold red",
    "open": "yellow",
}
_MIN_TABLE_COLUMNS = 80
"""Minimum width of a terminal, in columns, for the table of an audit."""
_MAX_SHOWN_EVIDENCE = 6
"""Maximum number of printed pieces of evidence; the rest is counted."""

TableRow = tuple[str, str, str, str, str]
"""Family, subject of the test, result, epsilon at least, epsilon claimed."""

Auditor = Callable[..., Audit]
"""Function that makes and examines the runs of an audit; takes an `AuditPlan` and `report_progress`."""


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """Options of an audit.

    Attributes:
        learner: name of the audited learner; None: the one with the largest epsilon.
        record: row of the learner's record to replace, in all of its uses; None: the worst-case replacement.
        replacement: the other record: `mirror`, `label`, `LEARNER:ROW`, or a JSON file with `features` and `label`; under a
            schema, with the fields of a record.
        threat: threat model.
        neighbour: name of the neighbour that is the adversary.
        runs: runs of each world.
        confidence: probability that a correct learner is not refuted.
        seed: seed of coins and noise.
        delta: delta at which the claim is tested, too; None: that of the spec.
    """

    learner: str | None = None
    record: int | None = None
    replacement: str = "mirror"
    threat: ThreatModel = ThreatModel.WIRE
    neighbour: str | None = None
    runs: int = 1000
    confidence: float = 0.95
    seed: int = 0
    delta: float | None = None

    def plan(
        self,
        prepared: PreparedRun,
        worlds: Sequence[Worlds] | None = None,
        counts: Sequence[int] = (),
        *,
        is_paired: bool = True,
    ) -> AuditPlan:
        """Plan the audit.

        Args:
            prepared: the run and its data.
            worlds: pairs of worlds; None: they are chosen.
            counts: runs of each world of every pair; empty: they are chosen.
            is_paired: whether there are runs of both worlds; False: `runs` is the number of runs of the first world.

        Raises:
            SpecError: No learner has this name, or there are too few runs.
            DataError: The record does not exist, or the loss is not defined for the replacement.
        """
        spec = prepared.run.spec
        learner = choose_audited_learner(prepared, self.learner) if worlds is None else worlds[0].learner
        if worlds is None and self.record is not None:
            worlds = [_build_requested_worlds(prepared, learner, self.record, self.replacement)]
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
            delta=spec.privacy.delta if self.delta is None else self.delta,
        )


def run_audit(
    folder: Path,
    prepared: PreparedRun,
    request: AuditRequest,
    auditor: Auditor,
    console: Console | None = None,
) -> int:
    """Audit a learner, print the results, and write `audit.json` and `audit.html`.

    Args:
        folder: folder of the results.
        prepared: the run and its data.
        request: options of the audit.
        auditor: makes the runs and examines them.
        console: where to print (default: standard output).

    Returns:
        The exit code: 1 if the claim is refuted; else 3 if the page could not be made; else 0.

    Raises:
        SpecError: The request does not fit the run, or an optional dependency is not installed.
        DataError: There is no record to replace.
    """
    console = console or terminal.create_console()
    began = time.monotonic()
    with terminal.show_progress_bar("choosing the worlds") as report:
        done = auditor(request.plan(prepared), report_progress=report)
    return report_audit(done, request.seed, folder, console, _format_pace(done, time.monotonic() - began))


def audit_on_simulator(plan: AuditPlan, *, report_progress: ProgressReporter, mapper: Mapper) -> Audit:
    """Audit simulated runs, and report how many of them are done."""
    stage = ""

    def begin(name: str) -> None:
        nonlocal stage
        stage = name
        report_progress(name)

    mapper_with_progress = map_with_progress(
        mapper, lambda share: share.runs, lambda done, total: report_progress(stage, done, total, "runs")
    )
    return audit_simulated(plan, mapper=mapper_with_progress, on_stage=begin)


def _format_pace(done: Audit, seconds: float) -> str:
    """Format the number of runs and noise values, and the speed."""
    runs = 2 * done.plan.total_runs
    examined = f"{runs:,} runs and {done.noise_count:,} numbers of noise in {format_duration(seconds)}"
    return f"{examined}: {format_number(runs / seconds, 3)} runs, {done.noise_count / seconds:,.0f} numbers a second."


def report_audit(done: Audit, seed: int, folder: Path, console: Console, *notes: str) -> int:
    """Print an audit and write its files; return the exit code."""
    name = done.plan.run.spec.names[done.plan.worlds.learner]
    write_json(folder / "audit.json", build_audit_document(done, name, seed))
    digest = hashlib.sha256((folder / "audit.json").read_bytes()).hexdigest()
    page = folder / "audit.html"
    code = terminal.attempt(str(page), lambda: build_audit_page(done, name, seed, digest).write(page))
    print_verdict(
        done.verdict,
        summarise_audit(done, name),
        get_verdict_subject(done) or "the run",
        _list_rows(done),
        [*_list_notes(done, seed), *notes],
        console,
        done.unproven_reason,
    )
    console.out(f"{folder}: audit.json{'' if code else ', audit.html'}", highlight=False)
    return 1 if done.verdict.kind == "refuted" else code


def choose_audited_learner(prepared: PreparedRun, learner: str | None) -> int:
    """Return the index of a learner by name; None: the one with the largest epsilon.

    Raises:
        SpecError: No learner has this name.
    """
    return prepared.find_worst_case_learner() if learner is None else find_learner_index(prepared.run.spec, learner)


def _build_requested_worlds(prepared: PreparedRun, learner: int, row: int, replacement: str) -> Worlds:
    """Build the two worlds of the requested record and replacement."""
    own = prepared.data.learners[learner]
    if not 0 <= row < len(own.labels):
        raise SpecError(f"--record must be in [0, {len(own.labels)}), the learner's records, got {row}")
    features, label = _resolve_replacement(prepared, learner, row, replacement)
    other = {"mirror": "its mirror image", "label": "itself with the other label"}.get(replacement, replacement)
    shared = prepared.run.algorithm.accountant(learner).has_shared_records
    return build_worlds(prepared.data, learner, row, features, label, replacement_name=other, is_shared=shared)


def _resolve_replacement(prepared: PreparedRun, learner: int, row: int, text: str) -> tuple[Any, float]:
    own = prepared.data.learners[learner]
    if text == "mirror":
        return mirror_record(own.features[row], prepared.run.spec.data.schema), float(own.labels[row])
    if text == "label":
        others = [float(value) for value in np.unique(own.labels) if value != own.labels[row]]
        if not others:
            raise SpecError("--replacement label needs a second label among the learner's records, and there is none")
        return own.features[row], others[0]
    if text.endswith(".json"):
        return _load_replacement(Path(text), prepared)
    name, _, number_ = text.rpartition(":")
    if not number_.isdigit():
        raise SpecError(f"--replacement must be mirror, label, LEARNER:ROW or a .json file, got {text}")
    other = prepared.data.learners[find_learner_index(prepared.run.spec, name, "--replacement")]
    if int(number_) >= len(other.labels):
        raise SpecError(f"--replacement: {name} has {len(other.labels)} records, got {number_}")
    return other.features[int(number_)], float(other.labels[int(number_)])


def _require_in_bounds(prepared: PreparedRun, features: FloatArray, label: float, source: str) -> None:
    """Refuse a replacement that the bounds of the loss would change.

    Raises:
        DataError: It is out of the bounds of the loss.
    """
    loss = prepared.run.loss
    if not (np.isfinite(features).all() and np.isfinite(label)) or features.ndim != 1:
        return  # `Worlds` raises for these
    rows, labels = loss.enforce_bounds(features[None], np.array([label]))
    if not (np.allclose(rows[0], features, rtol=1e-9, atol=0.0) and labels[0] == label):
        raise DataError(
            f"--replacement {source} must be within the bounds of the {loss.kind} loss, got features of norm "
            f"{np.linalg.norm(features):.6g}, where at most {loss.feature_bound:g} is allowed, and label {label:g}"
        )


def _load_replacement(path: Path, prepared: PreparedRun) -> tuple[FloatArray, float]:
    """Load a replacement: features as the learner uses them, or, if the run has a schema, its fields."""
    schema = prepared.run.spec.data.schema
    content = (
        "features (a list of numbers) and label" if schema is None else "the fields of a record, its label included"
    )
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise TypeError(f"got {type(document).__name__}")
        if schema is not None:
            return _encode_by_schema(document, schema, prepared, path)
        features, label = np.asarray(document["features"], dtype=np.float64), float(document["label"])
    except (OSError, KeyError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        reason = f"it has no {error}" if isinstance(error, KeyError) else reason
        raise SpecError(f"--replacement {path} must hold a JSON object with {content}: {reason}") from None
    _require_in_bounds(prepared, features, label, str(path))
    return features, label


def _encode_by_schema(
    record: dict[str, Any], schema: Schema, prepared: PreparedRun, path: Path
) -> tuple[FloatArray, float]:
    spec = prepared.run.spec
    found = Encoder.from_schema(schema, spec.loss, spec.data.positive).encode_records([record])
    if found.refusals:
        raise DataError(f"--replacement {path} must be a record that the schema allows: {found.refusals[0]}")
    return add_intercept(prepared.run, found.features[0]), float(found.labels[0])


def print_verdict(
    verdict: Verdict,
    summary: AuditSummary,
    name: str,
    rows: Iterable[TableRow],
    notes: Iterable[str],
    console: Console,
    unproven: str = "",
) -> None:
    """Print the verdict with its summary, the tests as a table, and notes.

    Args:
        verdict: the verdict.
        summary: the summary, as on the page.
        name: name of the audited learner or service.
        rows: the tests.
        notes: one line each.
        console: where to print.
        unproven: as `Audit.unproven_reason`.
    """
    doubt = f" ({unproven})" if unproven else ""
    console.print(Text.assemble((name, "bold"), " ", (verdict.kind.upper(), _COLOURS[summary.tone]), (doubt, "yellow")))
    console.print(Text(summary.finding))
    for more in verdict.evidence[1:_MAX_SHOWN_EVIDENCE]:
        console.print(Text(f"also: {more}"))
    if len(verdict.evidence) > _MAX_SHOWN_EVIDENCE:
        console.print(Text(f"and {len(verdict.evidence) - _MAX_SHOWN_EVIDENCE} more: audit.json"))
    for title, sentences in summary.points:
        console.print(Text.assemble((f"{title}: ", "bold"), sentences[0]))
    _print_rows(rows, console)
    for text in notes:
        console.print(Text(text, style="dim"))


def _print_rows(rows: Iterable[TableRow], console: Console) -> None:
    """Print the tests as a table, or, on a narrow terminal, as a paragraph each."""
    if console.width < _MIN_TABLE_COLUMNS:
        for family, subject, result, bound, claim in rows:
            epsilons = "" if bound == claim == MISSING_VALUE else f"; ε at least {bound}, claimed {claim}"
            console.print(Text.assemble((family, "bold"), f", {subject}: {result}{epsilons}"))
        return
    table = Table("family", "tested", "result", box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    table.add_column("ε at\nleast", justify="right")
    table.add_column("ε\nclaimed", justify="right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _list_rows(done: Audit) -> Iterator[TableRow]:
    found = done.findings
    yield format_tests_row(found, "conformance", "the noise is what the algorithm says", "no noise to test")
    if done.run_losses is None:
        yield (
            "likelihood",
            "the loss of every transcript",
            "not known to this adversary",
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
    if (at_delta := found.loss_bound) is not None:
        yield (
            "likelihood",
            f"losses at delta {at_delta.delta:g}",
            f"rank {at_delta.rank} of {at_delta.runs:,}: {format_number(at_delta.loss)}",
            format_number(at_delta.value, 3),
            format_number(at_delta.claim),
        )
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
    """Format the guesses of one guesser."""
    blind = bound.family == "black box" and not bound.view
    subject = f"{bound.name}: nothing to look at" if blind else bound.name
    sure = f"sure of {bound.guesses:,}, {bound.correct_guesses:,} of these right" if bound.guesses else "sure of none"
    return bound.family, subject, sure, format_number(bound.value, 3), format_number(bound.claim)


def format_tests_row(found: Findings, family: Family, subject: str, no_tests: str) -> TableRow:
    """Format the tests of a family, by the one nearest to refuting the claim."""
    tests = [test for test in found.select_family(family).tests if test.p_value == test.p_value]
    if not tests:
        return family, subject, no_tests, MISSING_VALUE, MISSING_VALUE
    worst = min(tests, key=lambda test: test.p_value / test.level)
    smallest = f"worst of {len(tests)} p-values {format_p_value(worst.p_value)} ({worst.name})"
    return family, subject, f"{smallest}; below {format_number(worst.level, 2)} rejects", MISSING_VALUE, MISSING_VALUE


def format_coins_line(coins: CoinSource, seed: int) -> str:
    """Describe the source of the coins in a sentence; empty if there were none."""
    if coins == "none":
        return ""
    return f"Coins: {f'seed {seed}' if coins == 'seed' else COIN_SOURCE_NAMES[coins]}."


def _list_notes(done: Audit, seed: int) -> Iterator[str]:
    found, plan = done.findings, done.plan
    paper = float(plan.guarantee.paper_epsilon[-1])
    yield f"Runs: {done.source}. Worlds: {'; '.join(each.worlds.description for each in plan.pairs)}."
    if done.captures and (line := format_coins_line(done.coin_source, seed)):
        yield line
    yield f"Paper's ε {format_number(paper)}, claimed ε {format_number(found.claim)}."
    if done.largest_loss > paper * (1.0 + 1e-9) + 1e-9:
        yield "A transcript shows more than the paper's ε: see the algorithm's page about the paper's claim."
    if not found.has_both_worlds:
        yield "All runs are of one world, so nothing was guessed."
        return
    max_provable = found.max_provable_epsilon
    needed = ""
    if 0.0 < found.claim <= 20.0:
        full = compute_needed_runs(found.claim, found.alpha_allocation.compute_level("likelihood", "whole runs"))
        needed = f" If the worlds show all of the claim, {full:,} runs of each show 90 % of it."
    yield f"At best {plan.runs:,} runs of each world show ε {format_number(max_provable, 3)}.{needed}"
    if max_provable < found.claim < np.inf:
        yield _describe_decisive_tests(done)


def _describe_decisive_tests(done: Audit) -> str:
    """Name the tests of this audit that may refute a claim above the bound of any number of right guesses."""
    found = done.findings
    tests = {
        "exact losses": done.run_losses is not None,
        "single rounds": found.round_bounds is not None,
        "conformance": bool(found.select_family("conformance").tests),
        "side channels": bool(done.varying_counts.keys() - NUMBER_VIEWS.keys()),
    }
    *others, last = [name for name, is_present in tests.items() if is_present] or [""]
    if not last:
        return "So guesses of whole runs, which are all there is here, cannot refute this claim."
    return f"So guesses of whole runs cannot refute this claim; {', '.join(others)}{' and ' * bool(others)}{last} can."
