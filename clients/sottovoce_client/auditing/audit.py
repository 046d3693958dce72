"""`sottovoce audit`: one learner, in two worlds. What was tested, and what may be said of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sottovoce.audit.audit import Audit
from sottovoce.audit.bounds import ceiling, runs_needed
from sottovoce.audit.plan import Plan, plan_audit
from sottovoce.audit.verdict import Findings
from sottovoce.audit.worlds import Worlds, chosen
from sottovoce.errors import SpecError
from sottovoce.experiment import Prepared
from sottovoce.privacy.guarantee import ThreatModel
from sottovoce_client.auditing.report import write_audit_report
from sottovoce_client.auditing.worlds import digest
from sottovoce_client.running.simulation import finite
from sottovoce_client.wording import NOTHING, number

COLOURS = {"consistent": "green", "refuted": "bold red", "inconclusive": "yellow", "unpromised": "yellow"}

Row = tuple[str, str, str, str, str]
Say = Callable[[str], None]


class Work(Protocol):
    """Makes the runs of an audit, and examines them; `say` is told what is being done."""

    def __call__(self, plan: Plan, *, say: Say) -> Audit: ...


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked.

    Attributes:
        learner: its name; None: the one that may spend most.
        record: row of the learner's record to swap, in all of its uses; None: the swap that shows most.
        replacement: what for: `mirror`, `label`, `LEARNER:ROW`, or a JSON file with `features` and `label`.
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


def plan(prepared: Prepared, asked: Question, worlds: Worlds | None = None, *, paired: bool = True) -> Plan:
    """The audit that was asked for.

    Args:
        prepared: the run and its data.
        asked: what is asked.
        worlds: the two worlds, where they are known beforehand.
        paired: there are to be runs of both worlds; False: so many of the first one.

    Raises:
        SpecError: no learner of that name, or too few runs.
        DataError: there is no such record.
    """
    learner = index_of(prepared, asked.learner) if worlds is None else worlds.learner
    if worlds is None and asked.record is not None:
        worlds = _swap(prepared, learner, asked.record, asked.replacement)
    neighbour = None if asked.neighbour is None else _named(prepared, asked.neighbour, "--neighbour")
    return plan_audit(
        prepared.run,
        prepared.data,
        learner,
        runs=asked.runs,
        confidence=asked.confidence,
        seed=asked.seed,
        worlds=worlds,
        threat=asked.threat,
        neighbour=neighbour,
        paired=paired,
    )


def audit_to(
    folder: Path,
    prepared: Prepared,
    asked: Question,
    work: Work,
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
        The exit code: 1 if the claim is refuted, else 0.

    Raises:
        SpecError: the question does not fit the run, or an extra is not installed.
        DataError: there is no record to swap.
    """
    console = console or Console()
    with console.status("choosing the swap") as status:
        done = work(plan(prepared, asked), say=status.update)
    return show(done, asked.seed, folder, console)


def show(done: Audit, seed: int, folder: Path, console: Console) -> int:
    """Print an audit and write it down; returns the exit code."""
    name = done.plan.run.spec.names[done.plan.worlds.learner]
    document = json.dumps({**provenance(done), **as_document(done, name, seed)}, indent=2)
    (folder / "audit.json").write_text(document + "\n", encoding="utf-8")
    write_audit_report(done, name, folder / "audit.html", seed)
    print_audit(done, name, console)
    console.out(f"{folder}: audit.json, audit.html", highlight=False)
    return 1 if done.verdict.kind == "refuted" else 0


def index_of(prepared: Prepared, learner: str | None) -> int:
    """The learner of that name; None: the one with the largest epsilon.

    Raises:
        SpecError: there is none.
    """
    if learner is None:
        sizes = [np.diff(own.offsets) for own in prepared.data.learners]
        claims = [prepared.run.algorithm.guarantee(i, counts).epsilon() for i, counts in enumerate(sizes)]
        return int(np.argmax(claims))
    return _named(prepared, learner, "--learner")


def _named(prepared: Prepared, name: str, option: str) -> int:
    names = prepared.run.spec.names
    if name not in names:
        raise SpecError(f"{option} must be one of {', '.join(names)}, got {name}")
    return names.index(name)


def _swap(prepared: Prepared, learner: int, row: int, replacement: str) -> Worlds:
    """The swap of the record that was asked for."""
    own = prepared.data.learners[learner]
    if not 0 <= row < len(own.labels):
        raise SpecError(f"--record must be in [0, {len(own.labels)}), the learner's records, got {row}")
    features, label = _replacement(prepared, learner, row, replacement)
    other = {"mirror": "its mirror image", "label": "itself with the other label"}.get(replacement, replacement)
    shared = prepared.run.algorithm.guarantee(learner).shared
    return chosen(prepared.data, learner, row, features, label, other=other, shared=shared)


def _replacement(prepared: Prepared, learner: int, row: int, text: str) -> tuple[Any, float]:
    own = prepared.data.learners[learner]
    if text == "mirror":
        return -own.features[row], float(own.labels[row])
    if text == "label":
        others = [float(value) for value in np.unique(own.labels) if value != own.labels[row]]
        if not others:
            raise SpecError("--replacement label needs a second label among the learner's records, and there is none")
        return own.features[row], others[0]
    if text.endswith(".json"):
        return _from_file(Path(text))
    name, _, number_ = text.rpartition(":")
    if not number_.isdigit():
        raise SpecError(f"--replacement must be mirror, label, LEARNER:ROW or a .json file, got {text}")
    other = prepared.data.learners[_named(prepared, name, "--replacement")]
    if int(number_) >= len(other.labels):
        raise SpecError(f"--replacement: {name} has {len(other.labels)} records, got {number_}")
    return other.features[int(number_)], float(other.labels[int(number_)])


def _from_file(path: Path) -> tuple[Any, float]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return np.asarray(told["features"], dtype=np.float64), float(told["label"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SpecError(
            f"--replacement {path} must hold a JSON object with features (a list of numbers) and label: {error!r}"
        ) from None


def provenance(done: Audit) -> dict[str, Any]:
    """Of what, when, and by which version: what an auditor's file must say."""
    return {
        "sottovoce": version("sottovoce"),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "data_sha256": digest(done.plan.data),
        "spec": done.plan.run.spec.model_dump(mode="json"),
    }


def as_document(done: Audit, name: str, seed: int) -> dict[str, Any]:
    """An audit for a JSON file; null for what is not finite."""
    found, plan = done.found, done.plan
    rounds = found.rounds
    return {
        "learner": name,
        "verdict": asdict(done.verdict),
        "source": done.source,
        "worlds": plan.worlds.what,
        "threat_model": plan.listener.threat.value,
        "claim_made_for": plan.made_for.value,
        "adjacency": plan.guarantee.adjacency,
        "runs_of_each_world": found.runs,
        "confidence": 1.0 - found.alpha,
        "seed": seed,
        "epsilon": {
            "promised": finite(found.claim),
            "paper": finite(float(plan.guarantee.paper[-1])),
            "largest_realised": finite(done.largest),
            "lower_bound": found.largest,
            "most_that_so_many_runs_show": ceiling(found.runs, found.alpha / 9) if found.paired else 0.0,
        },
        "conformance": [_finite(asdict(test)) for test in found.conformance],
        "likelihood": None
        if found.guessed is None
        else {
            **_finite(asdict(found.guessed)),
            "excess": None if found.excess is None else _finite(asdict(found.excess)),
        },
        "single_rounds": None
        if rounds is None
        else {
            "composed": rounds.composed,
            **{key: [finite(float(value)) for value in getattr(rounds, key)] for key in ("claim", "bound", "largest")},
        },
        "learners": [
            {
                "learner": plan.run.spec.names[each.learner],
                "claim": finite(each.claim),
                "largest": finite(each.largest),
            }
            for each in done.learners
        ],
        "black_box": {
            "epsilon_promised_in_the_rounds_seen": finite(found.claim_seen),
            "numbers_that_vary_by_view": dict(done.views),
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
    for row in _rows(done):
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    for text in _notes(done):
        console.print(Text(text, style="dim"))


def _rows(done: Audit) -> Iterator[Row]:
    found = done.found
    yield _conformance_row(found)
    if done.shown is None:
        yield "likelihood", "the loss of every transcript", "not known to this listener", NOTHING, number(found.claim)
    else:
        above = "none above" if found.excess is None else f"{found.excess.transcripts:,} above"
        result = f"largest {number(done.largest)}, {above} the claim"
        yield "likelihood", "the loss of every transcript", result, NOTHING, number(found.claim)
    if found.guessed is not None:
        p_value = found.guessed.overconfident.p_value
        yield "likelihood", "right guesses, given the losses", f"p-value {number(p_value, 2)}", NOTHING, NOTHING
    for k, (guesser, correct, guesses, bound, claim, _) in enumerate(found.bounds):
        family = "black box" if k or found.guessed is None else "likelihood"
        yield family, guesser, f"{correct:,} of {guesses:,} right", number(bound, 3), number(claim)
        if found.rounds is not None and family == "likelihood":
            shown = int(np.count_nonzero(found.rounds.bound))
            result = f"{shown} of {len(found.rounds.bound)} show something"
            yield family, "single rounds, composed", result, number(found.rounds.composed, 3), number(found.claim)


def _conformance_row(found: Findings) -> Row:
    tests = [test for test in found.conformance if test.p_value == test.p_value]
    if not tests:
        return "conformance", "the noise is what the algorithm says", "no noise to test", NOTHING, NOTHING
    worst = min(tests, key=lambda test: test.p_value)
    level = next(level for test, level in found.tests if test is worst)
    result = (
        f"smallest of {len(tests)} p-values {number(worst.p_value, 2)} ({worst.name}); below {number(level, 2)} rejects"
    )
    return "conformance", "the noise is what the algorithm says", result, NOTHING, NOTHING


def _notes(done: Audit) -> Iterator[str]:
    found, plan = done.found, done.plan
    paper = float(plan.guarantee.paper[-1])
    heard = plan.listener.threat.value
    if plan.listener.neighbour is not None:
        heard = f"{heard} {plan.run.spec.names[plan.listener.neighbour]}"
    yield f"Runs: {done.source}. Worlds: {plan.worlds.what}. Adjacent: {plan.guarantee.adjacency}. Heard: {heard}."
    if plan.made_for is ThreatModel.OUTPUT and plan.listener.threat is not ThreatModel.OUTPUT:
        yield "The claim is about published decisions; nothing finite is promised about messages, which were heard here."
    yield f"Paper's ε {number(paper)}, promised ε {number(found.claim)}."
    if done.largest > paper * (1.0 + 1e-9) + 1e-9:
        yield "A transcript shows more than the paper's ε: see what the algorithm's page says of the paper's claim."
    if not found.paired:
        yield "All runs are of one world, so nothing was guessed."
        return
    most = ceiling(found.runs, found.alpha / 9)
    needed = ""
    if 0.0 < found.claim <= 20.0:
        full = runs_needed(found.claim, found.alpha / 9)
        needed = f" If the worlds show all of the claim, {full:,} runs of each show 90 % of it."
    yield f"At best {found.runs:,} runs of each world show ε {number(most, 3)}.{needed}"
    if most < found.claim < np.inf:
        yield "So guesses of whole runs cannot refute this claim; exact losses, single rounds and conformance can."
