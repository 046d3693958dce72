"""`sottovoce eavesdropper audit`: audit captures of a foreign service; its file of noise claims, its page and its JSON."""

from __future__ import annotations

import hashlib
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from rich.console import Console

from sottovoce_client import terminal
from sottovoce_client.atomic_files import write_json
from sottovoce_client.auditing.audit import TableRow, format_guess_row, format_tests_row, print_verdict
from sottovoce_client.auditing.foreign_runs import ForeignRequest, ForeignRuns, load_decoder, read_runs
from sottovoce_client.auditing.plots import plot_noise, plot_quantiles, plot_worlds
from sottovoce_client.auditing.report import DIGEST_LINES, build_guesses_table, build_tests_table, list_attempts
from sottovoce_client.auditing.summary import summarise_foreign_audit
from sottovoce_client.formatting import MISSING_VALUE, describe_max_epsilon, format_count, format_number, pluralize
from sottovoce_client.reports.figure import Figure
from sottovoce_client.reports.page import Page, PageColumn, PageTable
from sottovoce_client.reports.plot_elements import (
    BLUE,
    GREEN,
    PINK,
    Axis,
    PlotView,
    make_line,
    make_reference_line,
    make_vertical_line,
)
from sottovoce_core.auditing.blackbox import compute_classifier_level, count_guessed_runs
from sottovoce_core.auditing.bounds import compute_epsilon_lower_bound
from sottovoce_core.auditing.foreign.audit import ForeignAudit, audit_traffic
from sottovoce_core.auditing.foreign.noise import Centre, NoiseClaim
from sottovoce_core.auditing.foreign.power import PowerAnalysis
from sottovoce_core.auditing.traffic_features import DecodedMessage
from sottovoce_core.errors import SpecError
from sottovoce_core.registry import import_object
from sottovoce_core.yaml_files import parse_document, read_text_file, require_mapping

# ---- noise file ------------------------------------------------------------------------------------------------------

_KEYS = {"distribution", "scale", "centre"}
_FILE_KIND = "a file of noise claims"


def _load_noise_claims(path: Path) -> dict[str, NoiseClaim]:
    """Load a file of noise claims, by decoded field.

    Raises:
        SpecError: It cannot be read, or is invalid.
    """
    document = parse_document(read_text_file(path, _FILE_KIND), str(path), _FILE_KIND)
    if not document:
        raise SpecError(f"{path} must name decoded fields, got none")
    found = {}
    for name, given in document.items():
        where = f"{path}, {name}"
        found[str(name)] = _parse_claim(require_mapping(given, where, "a noise claim"), where)
    return found


def _parse_claim(fields: Mapping[Any, Any], where: str) -> NoiseClaim:
    if extra := sorted(map(str, fields.keys() - _KEYS)):
        raise SpecError(f"{where}: a noise claim has distribution, scale and centre, got {extra[0]}")
    distribution = fields.get("distribution")
    if distribution not in ("laplace", "gaussian"):
        raise SpecError(f"{where}: distribution must be laplace or gaussian, got {distribution}")
    scale = fields.get("scale")
    scales = [float(each) for each in (scale if isinstance(scale, list) else [scale]) if _is_number(each)]
    if not scales or min(scales) <= 0.0 or (isinstance(scale, list) and len(scales) < len(scale)):
        raise SpecError(
            f"{where}: scale must be a number above 0, or a list of them, one for each message, got {scale}"
        )
    return NoiseClaim(distribution, tuple(scales), _parse_centre(fields.get("centre"), f"{where}: centre"))


def _parse_centre(given: Any, where: str) -> Centre | None:
    """Parse a centre: values for both worlds, values by world, or a function; None: not known."""
    if given is None:
        return None
    if isinstance(given, str):
        found: Callable[[int, DecodedMessage, Sequence[DecodedMessage]], Any] = import_object(given, where, is_own=True)
        if not callable(found):
            raise SpecError(f"{where}: {given!r} must be a function, got {type(found).__name__}")
        return found
    by_world = given if isinstance(given, Mapping) else {0: given, 1: given}
    if set(by_world) != {0, 1} or not all(map(_are_numbers, by_world.values())):
        raise SpecError(
            f"{where} must be numbers, numbers of each world ({{0: [1.0], 1: [2.0]}}), or module:function, got {given}"
        )
    return lambda world, message, before: by_world[world]


def _are_numbers(values: Any) -> bool:
    return all(map(_is_number, values if isinstance(values, list) else [values]))


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# ---- report ----------------------------------------------------------------------------------------------------------

_RUNS = np.geomspace(16, 20_000, 40).astype(int)
"""Runs of each world in the figure of power."""

_MAX_CLAIM_MULTIPLE = 3.0
"""Upper limit of that figure, as a multiple of the claim."""


def _build_page(done: ForeignAudit, reading: ForeignRuns, request: ForeignRequest, digest: str) -> Page:
    """Build the page of an audit.

    Args:
        done: the audit.
        reading: content of the captures.
        request: options of the audit.
        digest: SHA-256 of its `audit.json`.
    """
    found = done.findings
    kinds = {
        test: [str(anomaly) for anomaly in done.anomalies if anomaly.test == test]
        for test in ("repetition", "equivocation")
    }
    values: dict[str, Any] = {
        "done": done,
        "found": found,
        "reading": reading,
        "request": request,
        "name": request.name,
        "kinds": kinds,
        "summary": summarise_foreign_audit(done, request.name),
        "failed_tests": [test for test in found.tests if test.is_significant],
        "command": _build_command(request),
        "centred": done.noise is not None and not math.isnan(done.noise.epsilon),
        "digest": digest,
        "digest_lines": DIGEST_LINES,
    }
    return Page("foreign.html.j2", [*_plot_figures(done), *_build_tables(done)], values)


def _plot_figures(done: ForeignAudit) -> Iterator[Figure]:
    if done.leaks:
        first = done.leaks[0]
        yield plot_worlds("leak", first.place[:1].upper() + first.place[1:], first.values, first.worlds, first.place)
    shown = done.noise.noise_sample if done.noise is not None else np.empty(0)
    yield plot_noise(shown)
    yield plot_quantiles(shown)
    yield _plot_power(done)


def _plot_power(done: ForeignAudit) -> Figure:
    """Plot the bound by number of runs: for a service with half of its noise, and for all guesses right."""
    found, title = done.findings, "Bound by number of runs"
    if not 0.0 < found.claim < math.inf or math.isinf(found.needed_runs):
        return Figure("power", title, (), ())
    power = PowerAnalysis(found.claim, found.delta, done.message_count, found.alpha_allocation)
    runs = np.unique(np.append(_RUNS, max(1, found.runs)))
    halved = np.array([power.compute_bound(2.0, 2 * int(each)) for each in runs])
    guesses = [count_guessed_runs(2 * int(each)) for each in runs]
    best = np.array(
        [
            compute_epsilon_lower_bound(each, each, compute_classifier_level(found.alpha_allocation), found.delta, each)
            for each in guesses
        ]
    )
    marks = [
        make_reference_line(
            runs, np.where(best <= _MAX_CLAIM_MULTIPLE * found.claim, best, math.nan), "every guess right", PINK, "dot"
        ),
        make_line(runs, halved, "half of the noise, optimal guesses", GREEN, width=2.2),
        make_reference_line(runs[[0, -1]], [found.claim] * 2, "claim"),
        make_vertical_line(found.runs, "this audit", BLUE, "solid"),
    ]
    up = Axis("lower bound on ε", zero=True)
    return Figure(
        "power", title, marks, (PlotView("", Axis("runs of each world", log=True, value_format="count"), up),)
    )


def _build_tables(done: ForeignAudit) -> Iterator[PageTable]:
    rows = [(leak.place, leak.view, leak.auc) for leak in done.leaks]
    columns = (
        PageColumn("number", kind="long"),
        PageColumn("view", kind="long"),
        PageColumn("AUC", lambda auc: format_number(auc, 3)),
    )
    yield PageTable("leaks", "Numbers that differ between the worlds", columns, rows)
    yield build_tests_table(done.findings.tests)
    yield build_guesses_table("guesses", "Guesses that count", done.findings.bounds)
    yield build_guesses_table("timed", "Guesses by time, which do not count", done.timing_bounds)


def _build_command(request: ForeignRequest) -> str:
    """Build the command line of this audit."""
    words = ["sottovoce", "eavesdropper", "audit", str(request.folder)]
    given = {
        "--decoder": request.decoder,
        "--run-boundary": request.run_boundary,
        "--claim": None if math.isinf(request.claim) else f"{request.claim:g}",
        "--delta": f"{request.delta:g}" if request.delta else None,
        "--noise-distribution": request.noise_claims_file,
        "--confidence": f"{request.confidence:g}",
        "--seed": request.seed,
    }
    words += [str(word) for flag, value in given.items() if value is not None for word in (flag, value)]
    return shlex.join(words)


# ---- audit -----------------------------------------------------------------------------------------------------------


def audit_foreign_captures(request: ForeignRequest, out: Path, console: Console | None = None) -> int:
    """Audit captures of two worlds by relays, print the results, and write `audit.json` and `audit.html`.

    Args:
        request: options of the audit.
        out: folder of the results.
        console: where to print (default: standard output).

    Returns:
        The exit code: 1 if the claim is refuted, else 0, or `terminal.INCOMPLETE` if the page could not be made.

    Raises:
        SpecError: The decoder or the file of noise claims cannot be used, or scipy or scikit-learn are not installed.
        CaptureError: There are no captures, or not of both worlds.
    """
    console = console or terminal.create_console()
    if request.delta > 0.0 and math.isinf(request.claim):
        raise SpecError("--delta needs --claim, the claimed epsilon at this delta")
    decoder = None if request.decoder is None else load_decoder(request.decoder)
    noise = None if request.noise_claims_file is None else _load_noise_claims(request.noise_claims_file)
    with terminal.show_progress_bar("reading the captures") as report:
        reading = read_runs(request.folder, decoder, request.run_boundary)
        done = audit_traffic(
            reading.runs,
            claim=request.claim,
            delta=request.delta,
            noise=noise,
            confidence=request.confidence,
            seed=request.seed,
            on_stage=report,
        )
    write_json(out / "audit.json", _build_document(done, reading, request))
    digest = hashlib.sha256((out / "audit.json").read_bytes()).hexdigest()
    page = out / "audit.html"
    code = terminal.attempt(str(page), lambda: _build_page(done, reading, request, digest).write(page))
    rows, notes = _list_rows(done, reading, request), _list_notes(done, reading, request)
    print_verdict(done.verdict, summarise_foreign_audit(done, request.name), request.name, rows, notes, console)
    console.out(f"{out}: audit.json{'' if code else ', audit.html'}", highlight=False)
    return 1 if done.verdict.kind == "refuted" else code


def _build_document(done: ForeignAudit, reading: ForeignRuns, request: ForeignRequest) -> dict[str, Any]:
    """Build `audit.json` of a foreign service."""
    noise = done.noise
    return {
        "sottovoce": version("sottovoce"),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": done.verdict,
        "captures_sha256": reading.capture_digests,  # of every capture, by its path in the folder
        "run_is": request.run_boundary,
        "runs_of_each_world": done.runs,
        "runs_left_out": done.excluded_runs,  # to balance both worlds
        "worlds_in_turns": done.is_interleaved,  # their order is compatible with coins
        "confidence": 1.0 - done.findings.alpha_allocation.alpha,
        "seed": request.seed,  # of the split and the classifiers
        "epsilon": {
            "claimed": done.findings.claim,  # by the owner, for a run; null: no claim
            "delta": done.findings.delta,  # of the claim and the bound
            "lower_bound": done.findings.epsilon_lower_bound,  # without timing
            "max_provable": done.max_provable_epsilon,  # if every guess were right
        },
        # The smallest violations found with probability 0.9, and the most obvious one that is not found.
        "minimum_detectable_effects": done.findings.detectable_effects,
        "undetectable_effect": done.findings.undetectable_violation or None,
        "black_box": list_attempts(done.findings.bounds),
        "leaks": [
            {"number": leak.place, "view": leak.view, "auc": leak.auc} for leak in done.leaks
        ],  # the clearest first
        "timing": list_attempts(done.timing_bounds),  # not judged: two processes always differ in time
        "noise": None
        if noise is None or request.noise_claims_file is None
        else {
            "claimed_sha256": hashlib.sha256(
                request.noise_claims_file.read_bytes()
            ).hexdigest(),  # of the file of noise claims
            "epsilon": noise.epsilon,  # of a run, if the noise claims hold; null: centres are not known
            "numbers": noise.noise_count,
            "not_tested": noise.exclusions,
            "tests": done.findings.tests,
        },
        "findings": done.anomalies,  # repetitions and equivocations
        "messages": reading.message_count,
        "decoder": {
            "name": request.decoder,  # `module:function`; null: only bytes are examined
            "decoded": reading.decoded_count,
            "failed": reading.failed_count,
            "first_failures": reading.failures,
        },
        "captures_not_closed": reading.unclosed_captures,
        "runs_cut_short": reading.truncated_runs,
        "connections_left_out": reading.ambiguous_connections,
        "unassigned_streams": reading.unnamed_streams,
    }


def _list_rows(done: ForeignAudit, reading: ForeignRuns, request: ForeignRequest) -> Iterator[TableRow]:
    if done.noise is not None:
        yield format_tests_row(done.findings, "conformance", "the noise is as claimed", "no noise to test")
    for family, bounds in (("black box", done.findings.bounds), ("timing", done.timing_bounds)):
        for bound in bounds:
            _, subject, result, bound_text, claim = format_guess_row(bound)
            yield family, subject, result, bound_text, claim if math.isfinite(bound.claim) else MISSING_VALUE
    tests = {"repetition": "numbers or messages repeated", "equivocation": "one sender, one round, other bytes"}
    for test, subject in tests.items():
        yield (
            test,
            subject,
            "; ".join(str(anomaly) for anomaly in done.anomalies if anomaly.test == test) or "none",
            MISSING_VALUE,
            MISSING_VALUE,
        )
    if request.decoder is not None:
        failed = f", {format_count(reading.failed_count)} failed" if reading.failed_count else ""
        yield (
            "decoder",
            request.decoder,
            f"{format_count(reading.decoded_count)} messages read{failed}",
            MISSING_VALUE,
            MISSING_VALUE,
        )


def _list_notes(done: ForeignAudit, reading: ForeignRuns, request: ForeignRequest) -> Iterator[str]:
    first, second = done.runs
    yield (
        f"{pluralize(first, 'run')} of world 0, {format_count(second)} of world 1; a run is one {request.run_boundary}. "
        f"{pluralize(reading.message_count, 'message')}."
    )
    if done.leaks:
        yield f"Clearest leaks: {'; '.join(map(str, done.leaks))}."
    if done.noise is not None:
        yield from (f"{each}." for each in done.noise.exclusions)
    if reading.ambiguous_connections:
        yield (
            f"{pluralize(reading.ambiguous_connections, 'connection')} left out: idle for a second between calls, so each may be "
            "two connections from one port. Let clients name their runs, and use --run-boundary metadata:KEY."
        )
    if reading.unnamed_streams:
        yield f"{pluralize(reading.unnamed_streams, 'stream')} left out: no metadata with the name of their run."
    if done.excluded_runs:
        yield f"Worlds were not equally frequent: {pluralize(done.excluded_runs, 'run')} left out."
    if any(bound.value > 0.0 for bound in done.timing_bounds):
        yield "Timing tells the worlds apart. Two processes always differ in time, so the verdict does not include it."
    if reading.unclosed_captures:
        yield f"{pluralize(reading.unclosed_captures, 'capture')} not closed: the last messages may be missing."
    if reading.truncated_runs:
        yield f"{pluralize(reading.truncated_runs, 'run')} had more messages than are examined."
    for failure in reading.failures:
        yield f"The decoder failed on {failure}"
    yield describe_max_epsilon(done.max_provable_epsilon, done.findings.needed_runs, done.findings.claim)
