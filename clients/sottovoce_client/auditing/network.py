"""`sottovoce audit --on network` and `--on wiretap`: real services run the spec repeatedly; a coin chooses each run's world.

A wiretap decrypts nothing, so the messages are unknown: only the black box is used, with the whole alpha allocation, as for a
foreign service. The same processes run both worlds in turns, so times are judged, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from sottovoce_client import terminal
from sottovoce_client.atomic_files import write_json
from sottovoce_client.auditing.audit import AuditRequest, TableRow, format_coins_line, format_guess_row, print_verdict
from sottovoce_client.auditing.audit_files import (
    CaptureMethod,
    RunLedgerWriter,
    hash_data,
    prepare_audit_spec,
    read_run_ledger,
    read_worlds,
    toss_coins,
    write_worlds,
)
from sottovoce_client.auditing.audit_runs import AuditRuns, collect_runs
from sottovoce_client.auditing.captures import (
    audit_captures,
    list_captures,
    read_conversation,
    require_wire_threat,
    select_channels,
)
from sottovoce_client.auditing.report import list_attempts
from sottovoce_client.auditing.summary import summarise_ciphertext_audit
from sottovoce_client.formatting import describe_ciphertext, describe_max_epsilon, format_count, pluralize
from sottovoce_client.runs.local_services import LocalServices
from sottovoce_client.runs.run_client import COMMAND_STOP_REASONS, STOPPED_BY_OPERATOR, RunInterrupted, run_on_services
from sottovoce_client.runs.run_command import ServiceDied, await_run_or_exit, run_async
from sottovoce_client.terminal import ProgressReporter
from sottovoce_core.arrays import IntArray
from sottovoce_core.auditing.audit import Audit
from sottovoce_core.auditing.bounds import Bound
from sottovoce_core.auditing.foreign.audit import ForeignAudit, audit_traffic
from sottovoce_core.auditing.plan import AuditPlan
from sottovoce_core.auditing.traffic_features import RunTraffic
from sottovoce_core.auditing.worst_case_search import build_other_worlds
from sottovoce_core.errors import SottovoceError, SpecError
from sottovoce_core.experiment import PreparedRun
from sottovoce_eavesdropper.capture_writer import CiphertextCounts
from sottovoce_eavesdropper.storage import open_folder

# ---- on the network --------------------------------------------------------------------------------------------------

_MAX_CONSECUTIVE_FAILURES = 5
"""Maximum number of consecutive failed runs, after which no more are started."""


class RunFailed(SottovoceError):
    """A run of an audit failed."""


def audit_on_network(
    plan: AuditPlan, *, report_progress: ProgressReporter, folder: Path, seeded_coins: bool = False
) -> Audit:
    """Audit real services on this machine, with a relay on every edge.

    Captures, `worlds.json` and the ledger of the runs stay in `captures` below the folder, so that the audit can be repeated from
    them. The coins are committed to before the first run, and revealed after the last one. Write-ahead logs and budgets are those
    of these runs alone: no learner's own budget is spent.

    Args:
        plan: the audit plan.
        report_progress: progress callback.
        folder: folder of the results.
        seeded_coins: take the coins from the plan's seed, for a repeatable test: the seed determines them. Otherwise they come
            from the operating system's entropy.

    Raises:
        SpecError, RunFailed, CaptureError: As `_make_runs`.
        RunInterrupted: The audit was stopped; the message tells how to go on.
    """
    return audit_captures(
        plan,
        _make_runs(plan, folder, "relay", "captured by relays", seeded=seeded_coins, report_progress=report_progress),
        report_progress,
    )


def _make_runs(
    plan: AuditPlan,
    folder: Path,
    capture: CaptureMethod,
    method: str,
    *,
    seeded: bool,
    report_progress: ProgressReporter,
) -> AuditRuns:
    """Make all runs of an audit on real services of this machine.

    Args:
        plan: the audit plan.
        folder, seeded: as in `audit_on_network`.
        capture: method of recording edges; with a wiretap, they are encrypted.
        method: the same in words.
        report_progress: progress callback.

    Raises:
        SpecError: No channel carries what the threat model needs, or the folder holds captures.
        RunInterrupted: The audit was stopped.
        RunFailed: Services do not work.
        CaptureError: As `collect_runs`.
    """
    require_wire_threat(plan.adversary.threat)
    captures = _create_captures_folder(folder)
    worlds, pairs = draw_seeded_coins(plan) if seeded else toss_coins(2 * plan.total_runs), interleave_pairs(plan)
    ledger = RunLedgerWriter(captures, worlds)
    write_worlds(captures, plan, ledger.commitment, pairs, capture=capture, seeded_coins=seeded)
    ledger.bind()
    services = LocalServices(prepare_audit_spec(plan.run.spec, capture), folder, tls=capture == "wiretap")
    maker = _RunMaker(plan, list(zip(pairs, worlds.tolist(), strict=True)), ledger, report_progress)
    try:
        try:
            run_async(lambda stop: maker.make_all(services, stop))
        finally:
            ledger.reveal(list_captures(open_folder(captures)))
    except (RunInterrupted, ServiceDied, RunFailed, OSError) as error:  # the disk may be full
        kind = RunInterrupted if isinstance(error, RunInterrupted) else RunFailed
        reason = STOPPED_BY_OPERATOR if kind is RunInterrupted else str(error)
        kept = f"; to audit them: sottovoce audit --captures {captures}" if maker.done else ""
        raise kind(f"{maker.done:,} of {2 * plan.total_runs:,} runs were made: {reason}{kept}") from None
    place = open_folder(captures)
    worlds_file = read_worlds(place)
    run_ledger = read_run_ledger(place, worlds_file)
    runs = collect_runs(list_captures(place), plan.run, run_ledger, worlds_file.find_pair_index)
    description = f"{pluralize(len(runs.complete_captures), 'run')} of real services on this machine, {method}"
    return replace(runs, coins=worlds_file.coins).with_root(open_folder(folder), description)


def _create_captures_folder(folder: Path) -> Path:
    """Create the folder of captures; it must be empty, so that captures of other runs are not mixed in."""
    captures = folder / "captures"
    if captures.exists() and any(captures.iterdir()):
        raise SpecError(f"{captures} must be empty or missing: --out is for a folder without captures of other runs")
    captures.mkdir(mode=0o700, parents=True, exist_ok=True)
    return captures


class _RunMaker:
    """Makes the runs of an audit.

    Args:
        plan: the audit plan.
        assignments: pair of worlds and world of every run.
        ledger: ledger of the runs.
        report_progress: progress callback.

    Attributes:
        done: number of finished runs.
    """

    def __init__(
        self,
        plan: AuditPlan,
        assignments: Sequence[tuple[int, int]],
        ledger: RunLedgerWriter,
        report_progress: ProgressReporter,
    ) -> None:
        self.done = 0
        self._plan, self._assignments, self._ledger, self._report = plan, assignments, ledger, report_progress
        self._began = time.monotonic()

    async def make_all(self, local: LocalServices, stop: asyncio.Event) -> None:
        """Make all runs; a failed run is an outcome, but many in a row end the audit, because the services do not work."""
        failed = 0
        data = [[pair.worlds.build_data(self._plan.data, world) for world in (0, 1)] for pair in self._plan.pairs]
        self._report("starting services")
        async with local as services:
            for k, (pair, world) in enumerate(self._assignments):
                if stop.is_set():
                    raise RunInterrupted(STOPPED_BY_OPERATOR)
                self._ledger.record_start(k)
                running = run_on_services(
                    services.coordinator,
                    services.spec,
                    data[pair][world],
                    lambda *progress: None,
                    stop,
                    world=world,
                    replica=k,
                    credentials=services.credentials,
                )
                outcome = await await_run_or_exit(services, running, stop)
                seeded = any(status.noise_is_not_private for status in outcome.statuses)
                self._ledger.record_end(k, outcome.run_id, outcome.state, seeded_noise=seeded)
                if outcome.detail in COMMAND_STOP_REASONS:
                    raise RunInterrupted(STOPPED_BY_OPERATOR)
                finished = outcome.state == "finished"
                self.done, failed = self.done + finished, 0 if finished else failed + 1
                if failed == _MAX_CONSECUTIVE_FAILURES or (
                    stop.is_set() and outcome.state == "failed"
                ):  # a service died
                    raise RunFailed(outcome.detail)
                self._report_pace()

    def _report_pace(self) -> None:
        """Report the number of finished runs and their pace."""
        now = time.monotonic()
        if self.done == 1:  # the first run includes the start of the services
            self._began = now
        pace = (self.done - 1) / (now - self._began) if self.done > 1 else 0.0
        self._report("running", self.done, len(self._assignments), f"runs, {pace:.2g} runs/s" if pace else "runs")


def draw_seeded_coins(plan: AuditPlan) -> IntArray:
    """Draw the world of every run by fair coins from the plan's seed, `(2 runs,)`."""
    return np.random.default_rng(plan.seeds.audited_runs).integers(0, 2, 2 * plan.total_runs)


def interleave_pairs(plan: AuditPlan) -> list[int]:
    """Return the pair of worlds of every run: pairs alternate in proportion to their runs, so all have the same conditions."""
    places = [((k + 0.5) / each.runs, number) for number, each in enumerate(plan.pairs) for k in range(2 * each.runs)]
    return [number for _, number in sorted(places)]


# ---- ciphertext ------------------------------------------------------------------------------------------------------


def run_ciphertext_audit(
    folder: Path,
    prepared: PreparedRun,
    request: AuditRequest,
    *,
    seeded_coins: bool = False,
    console: Console | None = None,
) -> int:
    """Make runs on real services with encrypted channels and wiretaps, audit them, and write `audit.json`.

    Args:
        folder: folder of the results.
        prepared: the run and its data.
        request: options of the audit.
        seeded_coins: take the coins from the seed, as in `audit_on_network`.
        console: where to print (default: standard output).

    Returns:
        The exit code: 1 if the claim is refuted, else 0.

    Raises:
        SpecError: The request does not fit the run, or an optional dependency is not installed.
        RunInterrupted: The audit was stopped.
        RunFailed: Services do not work.
    """
    console = console or terminal.create_console()
    with terminal.show_progress_bar("choosing the worlds") as report:
        plan = plan_ciphertext_audit(prepared, request)
        runs = _make_runs(
            plan, folder, "wiretap", "channels encrypted and tapped", seeded=seeded_coins, report_progress=report
        )
        done = audit_ciphertext(plan, runs, request.seed, report)
    return report_ciphertext_audit(done, plan, runs, request.seed, folder, console)


def plan_ciphertext_audit(prepared: PreparedRun, request: AuditRequest) -> AuditPlan:
    """Plan the audit with one pair of worlds: those that are worst in the messages do not matter, since messages are encrypted.

    Unless a record was requested, a record of large norm is compared with one of small norm: side channels may depend on it.

    Raises:
        SpecError, DataError: As `AuditRequest.plan`.
    """
    plan = request.plan(prepared)
    if request.record is not None:
        return plan
    others = build_other_worlds(prepared.run, prepared.data, plan.worlds.learner, plan.worlds)
    return request.plan(prepared, [*others, plan.worlds][:1])


def audit_ciphertext(plan: AuditPlan, runs: AuditRuns, seed: int, report_progress: ProgressReporter) -> ForeignAudit:
    """Audit sizes, times and connections of encrypted traffic.

    Args:
        plan: the audit plan.
        runs: the started runs.
        seed: seed of the split and the classifiers.
        report_progress: progress callback.

    Raises:
        SpecError: There are runs of one world only, or an optional dependency is not installed.
        CaptureError: A capture cannot be read.
    """
    starts = runs.build_starts(plan)
    if starts is None:
        raise SpecError(
            "captures by wiretap must be of two worlds to be audited, got one: sottovoce audit --on wiretap makes them"
        )
    traffic = _read_traffic(plan, runs)
    confidence = 1.0 - plan.alpha_allocation.alpha
    void = starts.explain_unfair_coins(plan.alpha_allocation.compute_level("black box", "worlds"))
    claim = max(pair.epsilon for pair in plan.pairs)
    return audit_traffic(
        traffic,
        claim=claim,
        confidence=confidence,
        seed=seed,
        same_processes=True,
        void_reason=void,
        on_stage=report_progress,
    )


def _read_traffic(plan: AuditPlan, runs: AuditRuns) -> list[RunTraffic]:
    """Read the traffic of every started run; empty without a capture."""
    import pyarrow as pa

    channels = select_channels(plan)
    found = []
    for k, run in enumerate(runs.runs):
        if (capture := run.capture) is None:
            found.append(RunTraffic(run.world, "", float(k), ()))
            continue
        table = pa.Table.from_batches(capture.read_batches())
        order = k if capture.replica is None else capture.replica
        name = str(capture.metadata["run_id"])
        found.append(read_conversation(table, channels, name, world=run.world, run_number=order))
    return found


# ---- output ----------------------------------------------------------------------------------------------------------


def report_ciphertext_audit(
    done: ForeignAudit, plan: AuditPlan, runs: AuditRuns, seed: int, folder: Path, console: Console
) -> int:
    """Print an audit of ciphertext and write its file; return the exit code."""
    name = plan.run.spec.names[plan.worlds.learner]
    write_json(folder / "audit.json", _build_document(done, plan, runs, seed))
    notes = _list_notes(done, plan, runs, seed)
    summary = summarise_ciphertext_audit(done, plan, runs.assumptions)
    print_verdict(done.verdict, summary, name, _list_rows(done.findings.bounds), notes, console)
    console.out(f"{folder}: audit.json", highlight=False)
    return 1 if done.verdict.kind == "refuted" else 0


def _sum_ciphertext(runs: AuditRuns) -> CiphertextCounts:
    """Add up the ciphertext counts of all runs."""
    counts = [capture.ciphertext for capture in runs.complete_captures if capture.ciphertext is not None]
    return CiphertextCounts(
        *(sum(getattr(each, name) for each in counts) for name in ("connections", "records", "bytes"))
    )


def _build_document(done: ForeignAudit, plan: AuditPlan, runs: AuditRuns, seed: int) -> dict[str, Any]:
    """Build `audit.json` of ciphertext."""
    return {
        "sottovoce": version("sottovoce"),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "data_sha256": hash_data(plan.data),  # equal for equal records in equal rounds
        "spec": plan.run.spec.model_dump(mode="json"),
        "learner": plan.run.spec.names[plan.worlds.learner],
        "verdict": done.verdict,
        "source": "; ".join(runs.source),  # of the runs, in words
        "captures_sha256": runs.compute_digests(),  # by path in the folder of the audit, or in the named one
        "coins": runs.coins,  # source of the world of every run
        "provisos": runs.assumptions,  # assumptions about the runs
        "worlds": plan.worlds.description,
        "threat_model": plan.adversary.threat,
        "adjacency": plan.guarantee.adjacency_description,  # of the two data sets
        "runs_of_each_world": done.runs,
        "runs_left_out": done.excluded_runs,  # to balance both worlds
        "confidence": 1.0 - done.findings.alpha_allocation.alpha,  # probability that a correct learner is not refuted
        "seed": seed,  # of the split and the classifiers
        "epsilon": {
            "promised": done.findings.claim,  # by the algorithm, for these worlds
            "lower_bound": done.findings.epsilon_lower_bound,
            "max_provable": done.max_provable_epsilon,  # if every guess were right
        },
        "black_box": list_attempts(done.findings.bounds),
        "ciphertext": _sum_ciphertext(runs),  # of all runs
    }


def _list_rows(bounds: Sequence[Bound]) -> Iterator[TableRow]:
    for bound in bounds:
        _, subject, result, bound_text, claim = format_guess_row(bound)
        yield "ciphertext", subject, result, bound_text, claim


def _list_notes(done: ForeignAudit, plan: AuditPlan, runs: AuditRuns, seed: int) -> Iterator[str]:
    first, second = done.runs
    total = _sum_ciphertext(runs)
    recorded = describe_ciphertext(total.connections, total.records, total.bytes)
    each = f"{pluralize(first, 'run')} of world 0, {format_count(second)} of world 1"
    yield f"Runs: {'; '.join(runs.source)}; {each}. {format_coins_line(runs.coins, seed)}"
    yield f"Recorded: {recorded}."
    yield "The content of messages was not read: sottovoce audit --on network reads it."
    if done.excluded_runs:
        yield f"Worlds were not equally frequent: {pluralize(done.excluded_runs, 'run')} left out."
    yield describe_max_epsilon(done.max_provable_epsilon, done.findings.needed_runs, done.findings.claim)
