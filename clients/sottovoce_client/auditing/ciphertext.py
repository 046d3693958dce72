"""`sottovoce audit --on wiretap`: do sizes, times and connections of what is encrypted tell two worlds apart?

Nothing is decrypted, so nothing is known of the messages: it is the black box alone, which has all of the error budget, as of a
service that is not ours. The same processes live in both worlds, in turns, so times are judged, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from sottovoce.auditing.bounds import Bound
from sottovoce.auditing.conversation import Conversation
from sottovoce.auditing.plan import AuditPlan
from sottovoce.auditing.swaps import others
from sottovoce.errors import SpecError
from sottovoce.experiment import Prepared
from sottovoce.lab.foreign.audit import ForeignAudit, audit_conversations
from sottovoce_client import terminal
from sottovoce_client.auditing.audit import AuditRequest, TableRow, coins_line, guess_row, print_verdict
from sottovoce_client.auditing.channel import conversation, lines_of
from sottovoce_client.auditing.document import attempts_of
from sottovoce_client.auditing.network import made
from sottovoce_client.auditing.started import Started
from sottovoce_client.auditing.worlds import digest
from sottovoce_client.documents import write_json
from sottovoce_client.terminal import Say
from sottovoce_client.wording import at_best_line, ciphertext_line, count, plural
from sottovoce_eavesdropper.records import Ciphertext


def audit_ciphertext_to(
    folder: Path, prepared: Prepared, asked: AuditRequest, *, seeded: bool = False, console: Console | None = None
) -> int:
    """Make runs on real services whose channels are encrypted and tapped, audit them, and write `audit.json`.

    Args:
        folder: for the results.
        prepared: the run and its data.
        asked: what is asked.
        seeded: the coins come from the seed, as of `on_network`.
        console: where to print (default: standard output).

    Returns:
        The exit code: 1 if the claim is refuted, else 0.

    Raises:
        SpecError: the question does not fit the run, or an extra is not installed.
        Interrupted: told to stop.
        RunFailed: services do not work.
    """
    console = console or terminal.console()
    with terminal.bar("choosing the swap") as say:
        plan = plan_for_ciphertext(prepared, asked)
        runs = made(plan, folder, "wiretap", seeded=seeded, say=say)
        source = f"{plural(len(runs.kept), 'run')} of real services on this machine, channels encrypted and tapped"
        done = audit_ciphertext(plan, runs, asked.seed, say)
    return show_ciphertext(done, plan, runs, "; ".join((source, *runs.notes)), asked.seed, folder, console)


def plan_for_ciphertext(prepared: Prepared, asked: AuditRequest) -> AuditPlan:
    """The audit that was asked for, with one pair of worlds: what numbers say best is no matter, for nobody sees them.

    Unless a record was asked for, a loud one stands against a silent one, for whatever depends on a norm.

    Raises:
        SpecError, DataError: as `AuditRequest.plan`.
    """
    plan = asked.plan(prepared)
    if asked.record is not None:
        return plan
    beside = others(prepared.run, prepared.data, plan.worlds.learner, plan.worlds)
    return asked.plan(prepared, [*beside, plan.worlds][:1])


def audit_ciphertext(plan: AuditPlan, runs: Started, seed: int, say: Say) -> ForeignAudit:
    """Audit what wiretaps noted.

    Args:
        plan: the audit.
        runs: that were started.
        seed: of the split and the classifiers.
        say: told what is being done.

    Raises:
        SpecError: there are runs of one world only, or an extra is not installed.
        CaptureError: a capture cannot be read.
    """
    starts = runs.starts(plan)
    if starts is None:
        raise SpecError(
            "captures by wiretap are audited where there are runs of two worlds, got one: sottovoce audit --on wiretap makes them"
        )
    heard = _conversations(plan, runs)
    confidence = 1.0 - plan.levels.alpha
    void = starts.void(plan.levels.of("black box", "worlds"))
    claim = max(pair.epsilon for pair in plan.pairs)
    return audit_conversations(
        heard, claim=claim, confidence=confidence, seed=seed, one_machine=True, void=void, say=say
    )


def _conversations(plan: AuditPlan, runs: Started) -> list[Conversation]:
    """Every run that was started; of one without a capture nothing was heard."""
    import pyarrow as pa

    lines = lines_of(plan)
    found = []
    for k, capture in enumerate(runs.kept):
        table = pa.Table.from_batches(capture.batches())
        order = k if capture.replica is None else capture.replica
        name = str(capture.facts["run_id"])
        found.append(conversation(table, lines, name, world=capture.world or 0, number=order))
    silent = [Conversation(world, "", float(len(found) + k), ()) for k, (_, world) in enumerate(runs.gone)]
    return found + silent


# ---- what came of it -------------------------------------------------------------------------------------------------


def show_ciphertext(
    done: ForeignAudit, plan: AuditPlan, runs: Started, source: str, seed: int, folder: Path, console: Console
) -> int:
    """Print an audit of ciphertext and write it down; returns the exit code."""
    name = plan.run.spec.names[plan.worlds.learner]
    write_json(folder / "audit.json", _document(done, plan, runs, source, seed))
    notes = _notes(done, plan, runs, source, seed)
    print_verdict(done.verdict, name, _rows(done.found.bounds), notes, console)
    console.out(f"{folder}: audit.json", highlight=False)
    return 1 if done.verdict.kind == "refuted" else 0


def _total(runs: Started) -> Ciphertext:
    """What wiretaps noted in all runs."""
    total = Ciphertext()
    for own in (capture.ciphertext for capture in runs.kept):
        if own is not None:
            total = Ciphertext(
                total.connections + own.connections, total.records + own.records, total.bytes + own.bytes
            )
    return total


def _document(done: ForeignAudit, plan: AuditPlan, runs: Started, source: str, seed: int) -> dict[str, Any]:
    """`audit.json` of ciphertext."""
    return {
        "sottovoce": version("sottovoce"),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "data_sha256": digest(plan.data),  # equal for equal records in equal rounds
        "spec": plan.run.spec.model_dump(mode="json"),
        "learner": plan.run.spec.names[plan.worlds.learner],
        "verdict": done.verdict,
        "source": source,  # where the runs came from, in words
        "captures_sha256": runs.digests(),  # by their paths in the folder of the audit, or that was named
        "coins": runs.coins,  # what chose the world of every run
        "provisos": runs.provisos,  # what must be known of the runs besides
        "worlds": plan.worlds.what,  # what was swapped, in words
        "threat_model": plan.listener.threat,  # who listened
        "adjacency": plan.guarantee.adjacency,  # which two data sets must look alike
        "runs_of_each_world": done.runs,
        "runs_left_out": done.left_out,  # to make both worlds as frequent
        "confidence": 1.0 - done.found.levels.alpha,  # with which a correct learner is not refuted
        "seed": seed,  # of the split and the classifiers
        "epsilon": {
            "promised": done.found.claim,  # by the algorithm, for this swap
            "lower_bound": done.found.largest,
            "most_that_so_many_runs_show": done.most,  # if every guess were right
        },
        "black_box": attempts_of(done.found.bounds),
        "ciphertext": _total(runs),  # that was noted in all runs
    }


def _rows(bounds: Sequence[Bound]) -> Iterator[TableRow]:
    for bound in bounds:
        _, seen, result, least, claimed = guess_row(bound)
        yield "ciphertext", seen, result, least, claimed


def _notes(done: ForeignAudit, plan: AuditPlan, runs: Started, source: str, seed: int) -> Iterator[str]:
    first, second = done.runs
    total = _total(runs)
    noted = ciphertext_line(total.connections, total.records, total.bytes)
    yield f"Runs: {source}; {plural(first, 'run')} of world 0, {count(second)} of world 1. {coins_line(runs.coins, seed)}"
    yield from runs.provisos
    yield f"Worlds: {plan.worlds.what}. Adjacent: {plan.guarantee.adjacency}. Noted: {noted}."
    yield "What the numbers say was not looked at: sottovoce audit --on network reads them."
    if done.left_out:
        yield f"Worlds were not equally frequent: {plural(done.left_out, 'run')} left out."
    yield at_best_line(done.most, done.found.needed, done.found.claim)
