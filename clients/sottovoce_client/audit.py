"""`sottovoce audit`: one learner on the simulator, in two worlds. What was tested, and what may be said of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sottovoce.audit.bounds import ceiling, runs_needed
from sottovoce.audit.simulated import Audit, audit
from sottovoce.audit.verdict import Findings
from sottovoce.errors import SpecError
from sottovoce_client.prepare import Prepared
from sottovoce_client.simulation import finite
from sottovoce_client.wording import NOTHING, number

COLOURS = {"consistent": "green", "refuted": "bold red", "inconclusive": "yellow", "unpromised": "yellow"}

Row = tuple[str, str, str, str, str]


def audit_to(
    folder: Path,
    prepared: Prepared,
    *,
    learner: str | None,
    runs: int,
    confidence: float,
    seed: int,
    console: Console | None = None,
) -> int:
    """Audit a learner, print what was found, and write `audit.json`.

    Args:
        folder: where to.
        prepared: the run and its data.
        learner: its name (None: the one that may spend most).
        runs: of each world.
        confidence: with which a correct learner is not refuted.
        seed: of coins and noise.
        console: where to print (default: standard output).

    Returns:
        The exit code: 1 if the claim is refuted, else 0.

    Raises:
        SpecError: no learner of that name, or scipy or scikit-learn are not installed.
        DataError: the learner has no record.
    """
    console = console or Console()
    chosen = index_of(prepared, learner)
    with console.status("auditing") as status:
        done = audit(
            prepared.run, prepared.data, chosen, runs=runs, confidence=confidence, seed=seed, say=status.update
        )
    name = prepared.run.spec.names[chosen]
    document = json.dumps(as_document(done, name, seed), indent=2)
    (folder / "audit.json").write_text(document + "\n", encoding="utf-8")
    print_audit(done, name, console)
    console.out(f"{folder}: audit.json", highlight=False)
    return 1 if done.verdict.kind == "refuted" else 0


def index_of(prepared: Prepared, learner: str | None) -> int:
    """The learner of that name; None: the one with the largest epsilon.

    Raises:
        SpecError: there is none.
    """
    names = prepared.run.spec.names
    if learner is None:
        sizes = [np.diff(own.offsets) for own in prepared.data.learners]
        claims = [prepared.run.algorithm.guarantee(i, counts).epsilon() for i, counts in enumerate(sizes)]
        return int(np.argmax(claims))
    if learner not in names:
        raise SpecError(f"--learner must be one of {', '.join(names)}, got {learner}")
    return names.index(learner)


def as_document(done: Audit, name: str, seed: int) -> dict[str, Any]:
    """An audit for a JSON file; null for what is not finite."""
    found = done.found
    return {
        "learner": name,
        "verdict": asdict(done.verdict),
        "worlds": done.swap,
        "threat_model": done.threat_model,
        "adjacency": done.adjacency,
        "runs_of_each_world": found.runs,
        "confidence": 1.0 - found.alpha,
        "seed": seed,
        "epsilon": {
            "promised": finite(found.claim),
            "paper": finite(done.paper),
            "largest_realised": finite(done.largest),
            "lower_bound": found.largest,
            "most_that_so_many_runs_show": ceiling(found.runs, found.alpha / 6),
        },
        "conformance": [_finite(asdict(test)) for test in found.conformance],
        "likelihood": {
            **_finite(asdict(found.guessed)),
            "excess": None if found.excess is None else _finite(asdict(found.excess)),
        },
        "black_box": {
            "epsilon_promised_in_the_rounds_seen": finite(found.claim_seen),
            "attempts": [asdict(attempt) for attempt in found.attempts],
        },
    }


def _finite(document: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity."""
    return {
        key: _finite(value) if isinstance(value, dict) else finite(value) if isinstance(value, float) else value
        for key, value in document.items()
    }


def print_audit(done: Audit, name: str, console: Console) -> None:
    """The verdict, and the families side by side."""
    verdict = done.verdict
    console.print(Text.assemble((name, "bold"), " ", (verdict.kind.upper(), COLOURS[verdict.kind])))
    console.print(Text(verdict.text))
    for more in verdict.evidence[1:6]:
        console.print(Text(f"also: {more}"))
    if len(verdict.evidence) > 6:
        console.print(Text(f"and {len(verdict.evidence) - 6} more: audit.json"))
    table = Table("family", "what was tested", "result", box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    table.add_column("ε at\nleast", justify="right")
    table.add_column("ε\nclaimed", justify="right")
    for row in _rows(done.found, done.largest):
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    for text in _notes(done):
        console.print(Text(text, style="dim"))


def _rows(found: Findings, largest: float) -> Iterator[Row]:
    tests = [test for test in found.conformance if test.p_value == test.p_value]
    if tests:
        worst = min(tests, key=lambda test: test.p_value)
        result = f"smallest of {len(tests)} p-values {number(worst.p_value, 2)} ({worst.name})"
    else:
        result = "no noise to test"
    yield "conformance", "the noise is what the algorithm says", result, NOTHING, NOTHING
    above = "none above" if found.excess is None else f"{found.excess.transcripts} above"
    yield (
        "likelihood",
        "the loss of every transcript",
        f"largest {number(largest)}, {above} the claim",
        NOTHING,
        number(found.claim),
    )
    p_value = found.guessed.overconfident.p_value
    yield "likelihood", "right guesses, given the losses", f"p-value {number(p_value, 2)}", NOTHING, NOTHING
    for k, (guesser, correct, guesses, bound, claim, _) in enumerate(found.bounds):
        family = "black box" if k else "likelihood"
        yield family, guesser, f"{correct:,} of {guesses:,} right", number(bound, 3), number(claim)


def _notes(done: Audit) -> Iterator[str]:
    found = done.found
    yield f"Worlds: {done.swap}. Adjacent: {done.adjacency}. Heard: {done.threat_model}."
    yield f"Paper's ε {number(done.paper)}, promised ε {number(found.claim)}."
    if done.largest > done.paper * (1.0 + 1e-9) + 1e-9:
        yield "A transcript shows more than the paper's ε: see what the algorithm's page says of the paper's claim."
    most = ceiling(found.runs, found.alpha / 6)
    needed = ""
    if 0.0 < found.claim <= 20.0:
        full = runs_needed(found.claim, found.alpha / 6)
        needed = f" If the worlds show all of the claim, {full:,} runs of each show 90 % of it."
    yield f"At best {found.runs:,} runs of each world show ε {number(most, 3)}.{needed}"
