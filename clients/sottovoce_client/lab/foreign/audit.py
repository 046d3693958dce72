"""`sottovoce eavesdropper audit`: captures of a service that is not ours. What gives the world away, and what may be said."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from sottovoce.lab.foreign.audit import ForeignAudit, audit_conversations
from sottovoce_client import terminal
from sottovoce_client.auditing.audit import TableRow, guess_row, print_verdict
from sottovoce_client.auditing.document import attempts_of
from sottovoce_client.documents import write_json
from sottovoce_client.lab.foreign.runs import Reading, RunIs, load_decoder, read_runs
from sottovoce_client.wording import NOTHING, at_best_line, count, plural


def audit_foreign(
    folder: str | Path,
    *,
    decoder: str | None,
    run_is: RunIs,
    claim: float,
    confidence: float,
    seed: int,
    out: Path,
    console: Console | None = None,
) -> int:
    """Audit what relays recorded of two worlds, print what was found, and write `audit.json`.

    Args:
        folder: with captures of both worlds below it.
        decoder: `module:function` that reads a message (None: only bytes are looked at).
        run_is: what one run is.
        claim: epsilon that the owner claims for a run; infinite: nothing is.
        confidence: with which a claim that holds is not refuted.
        seed: of the split and the classifiers.
        out: folder for the results.
        console: where to print (default: standard output).

    Returns:
        The exit code: 1 if the claim is refuted, else 0.

    Raises:
        SpecError: the decoder cannot be imported, or scipy or scikit-learn are not installed.
        CaptureError: no captures, or not of both worlds.
    """
    console = console or terminal.console()
    reader = None if decoder is None else load_decoder(decoder)
    with terminal.bar("reading the captures") as say:
        reading = read_runs(folder, reader, run_is)
        done = audit_conversations(reading.runs, claim=claim, confidence=confidence, seed=seed, say=say)
    write_json(out / "audit.json", _document(done, reading, run_is, decoder, seed))
    print_verdict(
        done.verdict, Path(folder).name, _rows(done, reading, decoder), _notes(done, reading, run_is), console
    )
    console.out(f"{out}: audit.json", highlight=False)
    return 1 if done.verdict.kind == "refuted" else 0


def _document(done: ForeignAudit, reading: Reading, run_is: RunIs, decoder: str | None, seed: int) -> dict[str, Any]:
    """`audit.json` of a service that is not ours."""
    return {
        "verdict": done.verdict,
        "run_is": run_is,
        "runs_of_each_world": done.runs,
        "runs_left_out": done.left_out,  # to make both worlds as frequent
        "worlds_in_turns": done.in_turns,  # they follow each other as coins do
        "confidence": 1.0 - done.found.levels.alpha,
        "seed": seed,  # of the split and the classifiers
        "epsilon": {
            "claimed": done.found.claim,  # by the owner, for a run; null: nothing
            "lower_bound": done.found.largest,  # timing left aside
            "most_that_so_many_runs_show": done.most,  # if every guess were right
        },
        "black_box": attempts_of(done.found.bounds),
        "timing": attempts_of(done.timed),  # shown and not judged: two processes differ in it whatever they hold
        "findings": done.signs,  # what was said twice
        "messages": reading.messages,
        "decoder": {
            "name": decoder,  # `module:function`; null: only bytes were looked at
            "decoded": reading.decoded,
            "failed": reading.failed,
            "first_failures": reading.failures,
        },
        "captures_not_closed": reading.unfinished,
        "runs_cut_short": reading.cut,
        "connections_left_out": reading.paused,
        "streams_of_no_run": reading.unnamed,
    }


def _rows(done: ForeignAudit, reading: Reading, decoder: str | None) -> Iterator[TableRow]:
    for family, bounds in (("black box", done.found.bounds), ("timing", done.timed)):
        for bound in bounds:
            _, seen, result, least, claimed = guess_row(bound)
            yield family, seen, result, least, claimed if math.isfinite(bound.claim) else NOTHING
    tests = {"said again": "numbers or messages repeated", "equivocation": "one sender, one round, other bytes"}
    for test, what in tests.items():
        yield test, what, "; ".join(str(sign) for sign in done.signs if sign.test == test) or "none", NOTHING, NOTHING
    if decoder is not None:
        failed = f", {count(reading.failed)} failed" if reading.failed else ""
        yield "decoder", decoder, f"{count(reading.decoded)} messages read{failed}", NOTHING, NOTHING


def _notes(done: ForeignAudit, reading: Reading, run_is: RunIs) -> Iterator[str]:
    first, second = done.runs
    yield (
        f"{plural(first, 'run')} of world 0, {count(second)} of world 1; a run is one {run_is}. "
        f"{plural(reading.messages, 'message')}."
    )
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
    yield at_best_line(done.most, done.found.needed, done.found.claim)
