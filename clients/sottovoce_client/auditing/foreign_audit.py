"""`sottovoce eavesdropper audit`: the audit of captures of a foreign service, its file of noise claims, its page and its JSON."""

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
from sottovoce_core.privacy.guarantee import WEAK_EPSILON
from sottovoce_core.registry import import_object
from sottovoce_core.yaml_files import parse_document, read_text_file, require_mapping

# ---- noise file ------------------------------------------------------------------------------------------------------

_KEYS = {"distribution", "scale", "centre"}
_WHAT = "a file of noise claims"


def _load_noise(path: Path) -> dict[str, NoiseClaim]:
    """Read the claims of a file, by decoded field.

    Raises:
        SpecError: it cannot be read, or does not say what it should.
    """
    document = parse_document(read_text_file(path, _WHAT), str(path), _WHAT)
    if not document:
        raise SpecError(f"{path} must name decoded fields, got none")
    found = {}
    for name, given in document.items():
        where = f"{path}, {name}"
        found[str(name)] = _claim(require_mapping(given, where, "a noise claim"), where)
    return found


def _claim(fields: Mapping[Any, Any], where: str) -> NoiseClaim:
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
    return NoiseClaim(distribution, tuple(scales), _centre(fields.get("centre"), f"{where}: centre"))


def _centre(given: Any, where: str) -> Centre | None:
    """Numbers for both worlds, by world, or a function's; None: not known."""
    if given is None:
        return None
    if isinstance(given, str):
        found: Callable[[int, DecodedMessage, Sequence[DecodedMessage]], Any] = import_object(given, where)
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
"""Of each world, that the figure of power shows."""

_TALL = 3.0
"""Of the claim, how far that figure reaches."""


def _foreign_page(done: ForeignAudit, reading: ForeignRuns, asked: ForeignRequest, digest: str) -> Page:
    """The page of an audit.

    Args:
        done: the audit.
        reading: what was read of the captures.
        asked: the request.
        digest: SHA-256 of its `audit.json`.
    """
    found = done.findings
    kinds = {
        test: [str(sign) for sign in done.anomalies if sign.test == test] for test in ("repetition", "equivocation")
    }
    values: dict[str, Any] = {
        "done": done,
        "found": found,
        "reading": reading,
        "asked": asked,
        "name": asked.name,
        "kinds": kinds,
        "weak_epsilon": WEAK_EPSILON,
        "best_guess": 100.0 / (1.0 + math.exp(-found.claim)),
        "failed_tests": [test for test in found.tests if test.is_significant],
        "command": _command(asked),
        "centred": done.noise is not None and not math.isnan(done.noise.epsilon),
        "digest": digest,
        "digest_lines": DIGEST_LINES,
    }
    return Page("foreign.html.j2", [*_figures(done), *_tables(done)], values)


def _figures(done: ForeignAudit) -> Iterator[Figure]:
    if done.leaks:
        first = done.leaks[0]
        yield plot_worlds("leak", first.place[:1].upper() + first.place[1:], first.values, first.worlds, first.place)
    shown = done.noise.noise_sample if done.noise is not None else np.empty(0)
    yield plot_noise(shown)
    yield plot_quantiles(shown)
    yield _power(done)


def _power(done: ForeignAudit) -> Figure:
    """What guesses show with so many runs: of a service with half of its noise, and of one that keeps nothing back."""
    found, title = done.findings, "What more runs would show"
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
            runs, np.where(best <= _TALL * found.claim, best, math.nan), "every guess right", PINK, "dot"
        ),
        make_line(runs, halved, "half of the noise, best of guessers", GREEN, width=2.2),
        make_reference_line(runs[[0, -1]], [found.claim] * 2, "claim"),
        make_vertical_line(found.runs, "this audit", BLUE, "solid"),
    ]
    up = Axis("lower bound on ε", zero=True)
    return Figure(
        "power", title, marks, (PlotView("", Axis("runs of each world", log=True, value_format="count"), up),)
    )


def _tables(done: ForeignAudit) -> Iterator[PageTable]:
    rows = [(leak.place, leak.view, leak.auc) for leak in done.leaks]
    columns = (
        PageColumn("number", kind="long"),
        PageColumn("seen in", kind="long"),
        PageColumn("AUC", lambda auc: format_number(auc, 3)),
    )
    yield PageTable("leaks", "Numbers that differ between the worlds", columns, rows)
    yield build_tests_table(done.findings.tests)
    yield build_guesses_table("guesses", "Guesses that count", done.findings.bounds)
    yield build_guesses_table("timed", "Guesses by time, which do not count", done.timing_bounds)


def _command(asked: ForeignRequest) -> str:
    """The command that makes the same audit."""
    words = ["sottovoce", "eavesdropper", "audit", str(asked.folder)]
    given = {
        "--decoder": asked.decoder,
        "--run-boundary": asked.run_is,
        "--claim": None if math.isinf(asked.claim) else f"{asked.claim:g}",
        "--delta": f"{asked.delta:g}" if asked.delta else None,
        "--noise-distribution": asked.noise_claims_file,
        "--confidence": f"{asked.confidence:g}",
        "--seed": asked.seed,
    }
    words += [str(word) for flag, value in given.items() if value is not None for word in (flag, value)]
    return shlex.join(words)


# ---- audit -----------------------------------------------------------------------------------------------------------


def audit_foreign_captures(request: ForeignRequest, out: Path, console: Console | None = None) -> int:
    """Audit what relays recorded of two worlds, print what was found, and write `audit.json` and `audit.html`.

    Args:
        asked: the request.
        out: folder for the results.
        console: where to print (default: standard output).

    Returns:
        The exit code: 1 if the claim is refuted, else 0, or `terminal.INCOMPLETE` if the page could not be made.

    Raises:
        SpecError: the decoder or the file of noise claims cannot be used, or scipy or scikit-learn are not installed.
        CaptureError: no captures, or not of both worlds.
    """
    console = console or terminal.create_console()
    if request.delta > 0.0 and math.isinf(request.claim):
        raise SpecError("--delta needs --claim, the epsilon that is claimed at this delta")
    reader = None if request.decoder is None else load_decoder(request.decoder)
    noise = None if request.noise_claims_file is None else _load_noise(request.noise_claims_file)
    with terminal.show_progress_bar("reading the captures") as say:
        reading = read_runs(request.folder, reader, request.run_is)
        done = audit_traffic(
            reading.runs,
            claim=request.claim,
            delta=request.delta,
            noise=noise,
            confidence=request.confidence,
            seed=request.seed,
            on_stage=say,
        )
    write_json(out / "audit.json", _document(done, reading, request))
    digest = hashlib.sha256((out / "audit.json").read_bytes()).hexdigest()
    page = out / "audit.html"
    code = terminal.attempt(str(page), lambda: _foreign_page(done, reading, request, digest).write(page))
    print_verdict(done.verdict, request.name, _rows(done, reading, request), _notes(done, reading, request), console)
    console.out(f"{out}: audit.json{'' if code else ', audit.html'}", highlight=False)
    return 1 if done.verdict.kind == "refuted" else code


def _document(done: ForeignAudit, reading: ForeignRuns, asked: ForeignRequest) -> dict[str, Any]:
    """`audit.json` of a service that is not ours."""
    noise = done.noise
    return {
        "sottovoce": version("sottovoce"),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": done.verdict,
        "captures_sha256": reading.capture_digests,  # of capture.json and the parts of every capture, by its path in the folder
        "run_is": asked.run_is,
        "runs_of_each_world": done.runs,
        "runs_left_out": done.excluded_runs,  # to make both worlds as frequent
        "worlds_in_turns": done.is_interleaved,  # they follow each other as coins do
        "confidence": 1.0 - done.findings.alpha_allocation.alpha,
        "seed": asked.seed,  # of the split and the classifiers
        "epsilon": {
            "claimed": done.findings.claim,  # by the owner, for a run; null: nothing
            "delta": done.findings.delta,  # at which it is claimed and bounded
            "lower_bound": done.findings.epsilon_lower_bound,  # timing left aside
            "most_that_so_many_runs_show": done.max_provable_epsilon,  # if every guess were right
        },
        "would_have_found": done.findings.detectable_effects,  # the smallest violations that would have been found, nine times in ten
        "not_found_even": done.findings.undetectable_violation or None,  # the plainest violation that would not
        "black_box": list_attempts(done.findings.bounds),
        "leaks": [
            {"number": leak.place, "view": leak.view, "auc": leak.auc} for leak in done.leaks
        ],  # numbers that tell the worlds apart, the clearest first
        "timing": list_attempts(
            done.timing_bounds
        ),  # shown and not judged: two processes differ in it whatever they hold
        "noise": None
        if noise is None or asked.noise_claims_file is None
        else {
            "claimed_sha256": hashlib.sha256(
                asked.noise_claims_file.read_bytes()
            ).hexdigest(),  # of the file behind --noise
            "epsilon": noise.epsilon,  # of a run, if the noise is what is claimed; null: centres are not known
            "numbers": noise.noise_count,
            "not_tested": noise.exclusions,
            "tests": done.findings.tests,
        },
        "findings": done.anomalies,  # what was said twice
        "messages": reading.message_count,
        "decoder": {
            "name": asked.decoder,  # `module:function`; null: only bytes were looked at
            "decoded": reading.decoded_count,
            "failed": reading.failed_count,
            "first_failures": reading.failures,
        },
        "captures_not_closed": reading.unclosed_captures,
        "runs_cut_short": reading.truncated_runs,
        "connections_left_out": reading.ambiguous_connections,
        "streams_of_no_run": reading.unnamed_streams,
    }


def _rows(done: ForeignAudit, reading: ForeignRuns, asked: ForeignRequest) -> Iterator[TableRow]:
    if done.noise is not None:
        yield format_tests_row(done.findings, "conformance", "the noise is what is claimed", "no noise to test")
    for family, bounds in (("black box", done.findings.bounds), ("timing", done.timing_bounds)):
        for bound in bounds:
            _, seen, result, least, claimed = format_guess_row(bound)
            yield family, seen, result, least, claimed if math.isfinite(bound.claim) else MISSING_VALUE
    tests = {"repetition": "numbers or messages repeated", "equivocation": "one sender, one round, other bytes"}
    for test, what in tests.items():
        yield (
            test,
            what,
            "; ".join(str(sign) for sign in done.anomalies if sign.test == test) or "none",
            MISSING_VALUE,
            MISSING_VALUE,
        )
    if asked.decoder is not None:
        failed = f", {format_count(reading.failed_count)} failed" if reading.failed_count else ""
        yield (
            "decoder",
            asked.decoder,
            f"{format_count(reading.decoded_count)} messages read{failed}",
            MISSING_VALUE,
            MISSING_VALUE,
        )


def _notes(done: ForeignAudit, reading: ForeignRuns, asked: ForeignRequest) -> Iterator[str]:
    first, second = done.runs
    yield (
        f"{pluralize(first, 'run')} of world 0, {format_count(second)} of world 1; a run is one {asked.run_is}. "
        f"{pluralize(reading.message_count, 'message')}."
    )
    if done.leaks:
        yield f"Most shows in: {'; '.join(map(str, done.leaks))}."
    if done.noise is not None:
        yield from (f"{each}." for each in done.noise.exclusions)
    if reading.ambiguous_connections:
        yield (
            f"{pluralize(reading.ambiguous_connections, 'connection')} left out: silent for a second between calls, so each may be two that came "
            "from one port. Let clients name their runs, and use --run-boundary metadata:KEY."
        )
    if reading.unnamed_streams:
        yield f"{pluralize(reading.unnamed_streams, 'stream')} left out: no metadata name their run."
    if done.excluded_runs:
        yield f"Worlds were not equally frequent: {pluralize(done.excluded_runs, 'run')} left out."
    if not done.is_interleaved:
        yield "Worlds did not take turns as coins do: what changes with time (a clock, a counter) tells them apart, too."
    if any(bound.value > 0.0 for bound in done.timing_bounds):
        yield "Time tells the worlds apart. Two processes differ in it whatever they hold, so the verdict leaves it aside."
    if reading.unclosed_captures:
        yield f"{pluralize(reading.unclosed_captures, 'capture')} not closed: what was in memory is missing."
    if reading.truncated_runs:
        yield f"{pluralize(reading.truncated_runs, 'run')} said more than is looked at."
    for failure in reading.failures:
        yield f"The decoder failed on {failure}"
    if done.findings.detectable_effects and done.verdict.kind in ("consistent", "inconclusive"):
        yield f"Would have been found, nine times in ten: {'; '.join(each.text for each in done.findings.detectable_effects)}."
    yield describe_max_epsilon(done.max_provable_epsilon, done.findings.needed_runs, done.findings.claim)
