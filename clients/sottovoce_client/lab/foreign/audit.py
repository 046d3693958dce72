"""`sottovoce eavesdropper audit`: captures of a service that is not ours. What gives the world away, and what may be said."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from sottovoce.errors import SpecError
from sottovoce.lab.foreign.audit import ForeignAudit, audit_conversations
from sottovoce_client import terminal
from sottovoce_client.auditing.audit import TableRow, guess_row, print_verdict, tests_row
from sottovoce_client.auditing.report import attempts_of
from sottovoce_client.documents import write_json
from sottovoce_client.lab.foreign.noise_file import load_noise
from sottovoce_client.lab.foreign.report import foreign_page
from sottovoce_client.lab.foreign.runs import ForeignRequest, Reading, load_decoder, read_runs
from sottovoce_client.wording import NOTHING, at_best_line, count, plural


def audit_foreign(asked: ForeignRequest, out: Path, console: Console | None = None) -> int:
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
    console = console or terminal.console()
    if asked.delta > 0.0 and math.isinf(asked.claim):
        raise SpecError("--delta needs --claim, the epsilon that is claimed at this delta")
    reader = None if asked.decoder is None else load_decoder(asked.decoder)
    noise = None if asked.noise is None else load_noise(asked.noise)
    with terminal.bar("reading the captures") as say:
        reading = read_runs(asked.folder, reader, asked.run_is)
        done = audit_conversations(
            reading.runs,
            claim=asked.claim,
            delta=asked.delta,
            noise=noise,
            confidence=asked.confidence,
            seed=asked.seed,
            say=say,
        )
    write_json(out / "audit.json", _document(done, reading, asked))
    digest = hashlib.sha256((out / "audit.json").read_bytes()).hexdigest()
    page = out / "audit.html"
    code = terminal.attempt(str(page), lambda: foreign_page(done, reading, asked, digest).write(page))
    print_verdict(done.verdict, asked.name, _rows(done, reading, asked), _notes(done, reading, asked), console)
    console.out(f"{out}: audit.json{'' if code else ', audit.html'}", highlight=False)
    return 1 if done.verdict.kind == "refuted" else code


def _document(done: ForeignAudit, reading: Reading, asked: ForeignRequest) -> dict[str, Any]:
    """`audit.json` of a service that is not ours."""
    noise = done.noise
    return {
        "sottovoce": version("sottovoce"),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": done.verdict,
        "captures_sha256": reading.captures,  # of capture.json and the parts of every capture, by its path in the folder
        "run_is": asked.run_is,
        "runs_of_each_world": done.runs,
        "runs_left_out": done.left_out,  # to make both worlds as frequent
        "worlds_in_turns": done.in_turns,  # they follow each other as coins do
        "confidence": 1.0 - done.found.levels.alpha,
        "seed": asked.seed,  # of the split and the classifiers
        "epsilon": {
            "claimed": done.found.claim,  # by the owner, for a run; null: nothing
            "delta": done.found.delta,  # at which it is claimed and bounded
            "lower_bound": done.found.largest,  # timing left aside
            "most_that_so_many_runs_show": done.most,  # if every guess were right
        },
        "would_have_found": done.found.reaches,  # the smallest violations that would have been found, nine times in ten
        "not_found_even": done.found.blind or None,  # the plainest violation that would not
        "black_box": attempts_of(done.found.bounds),
        "leaks": [
            {"number": leak.place, "view": leak.view, "auc": leak.auc} for leak in done.leaks
        ],  # numbers that tell the worlds apart, the clearest first
        "timing": attempts_of(done.timed),  # shown and not judged: two processes differ in it whatever they hold
        "noise": None
        if noise is None or asked.noise is None
        else {
            "claimed_sha256": hashlib.sha256(asked.noise.read_bytes()).hexdigest(),  # of the file behind --noise
            "epsilon": noise.epsilon,  # of a run, if the noise is what is claimed; null: centres are not known
            "numbers": noise.numbers,
            "not_tested": noise.left_out,
            "tests": done.found.tests,
        },
        "findings": done.signs,  # what was said twice
        "messages": reading.messages,
        "decoder": {
            "name": asked.decoder,  # `module:function`; null: only bytes were looked at
            "decoded": reading.decoded,
            "failed": reading.failed,
            "first_failures": reading.failures,
        },
        "captures_not_closed": reading.unfinished,
        "runs_cut_short": reading.cut,
        "connections_left_out": reading.paused,
        "streams_of_no_run": reading.unnamed,
    }


def _rows(done: ForeignAudit, reading: Reading, asked: ForeignRequest) -> Iterator[TableRow]:
    if done.noise is not None:
        yield tests_row(done.found, "conformance", "the noise is what is claimed", "no noise to test")
    for family, bounds in (("black box", done.found.bounds), ("timing", done.timed)):
        for bound in bounds:
            _, seen, result, least, claimed = guess_row(bound)
            yield family, seen, result, least, claimed if math.isfinite(bound.claim) else NOTHING
    tests = {"said again": "numbers or messages repeated", "equivocation": "one sender, one round, other bytes"}
    for test, what in tests.items():
        yield test, what, "; ".join(str(sign) for sign in done.signs if sign.test == test) or "none", NOTHING, NOTHING
    if asked.decoder is not None:
        failed = f", {count(reading.failed)} failed" if reading.failed else ""
        yield "decoder", asked.decoder, f"{count(reading.decoded)} messages read{failed}", NOTHING, NOTHING


def _notes(done: ForeignAudit, reading: Reading, asked: ForeignRequest) -> Iterator[str]:
    first, second = done.runs
    yield (
        f"{plural(first, 'run')} of world 0, {count(second)} of world 1; a run is one {asked.run_is}. "
        f"{plural(reading.messages, 'message')}."
    )
    if done.leaks:
        yield f"Most shows in: {'; '.join(map(str, done.leaks))}."
    if done.noise is not None:
        yield from (f"{each}." for each in done.noise.left_out)
    if reading.paused:
        yield (
            f"{plural(reading.paused, 'connection')} left out: silent for a second between calls, so each may be two that came "
            "from one port. Let clients name their runs, and use --run-is metadata:KEY."
        )
    if reading.unnamed:
        yield f"{plural(reading.unnamed, 'stream')} left out: no metadata name their run."
    if done.left_out:
        yield f"Worlds were not equally frequent: {plural(done.left_out, 'run')} left out."
    if not done.in_turns:
        yield "Worlds did not take turns as coins do: what changes with time (a clock, a counter) tells them apart, too."
    if any(bound.value > 0.0 for bound in done.timed):
        yield "Time tells the worlds apart. Two processes differ in it whatever they hold, so the verdict leaves it aside."
    if reading.unfinished:
        yield f"{plural(reading.unfinished, 'capture')} not closed: what was in memory is missing."
    if reading.cut:
        yield f"{plural(reading.cut, 'run')} said more than is looked at."
    for failure in reading.failures:
        yield f"The decoder failed on {failure}"
    if done.found.reaches and done.verdict.kind in ("consistent", "inconclusive"):
        yield f"Would have been found, nine times in ten: {'; '.join(each.text for each in done.found.reaches)}."
    yield at_best_line(done.most, done.found.needed, done.found.claim)
