"""`sottovoce audit --on network` and `--on wiretap`: real services run the spec again and again; a coin chooses each run's world.

On a wiretap nothing is decrypted, so nothing is known of the messages: it is the black box alone, which has all of the error
budget, as of a service that is not ours. The same processes live in both worlds, in turns, so times are judged, too.
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
"""Runs that fail one after the other until no more are started."""


class RunFailed(SottovoceError):
    """A run of an audit did not reach its end."""


def audit_on_network(
    plan: AuditPlan, *, report_progress: ProgressReporter, folder: Path, seeded_coins: bool = False
) -> Audit:
    """Audit real services of this machine, every edge overheard by a relay.

    Captures, `worlds.json` and the ledger of the runs stay in `captures` below the folder, so that the audit can be repeated
    from them. The coins are committed to before the first run, and revealed after the last one. Journals and budgets are of
    these runs alone: nobody's budget is touched.

    Args:
        plan: the audit.
        say: told what is being done.
        folder: for the results.
        seeded: the coins come from the plan's seed, for a test that must be repeated: whoever knows the seed knows them.
            Else from the operating system's entropy.

    Raises:
        SpecError, RunFailed, CaptureError: as `_made`.
        Interrupted: told to stop; it says how to go on.
    """
    return audit_captures(
        plan,
        _made(plan, folder, "relay", "overheard by relays", seeded=seeded_coins, say=report_progress),
        report_progress,
    )


def _made(
    plan: AuditPlan, folder: Path, capture: CaptureMethod, how: str, *, seeded: bool, say: ProgressReporter
) -> AuditRuns:
    """Make all runs of an audit on real services of this machine.

    Args:
        plan: the audit.
        folder, seeded: as of `audit_on_network`.
        capture: how edges are overheard; by wiretap, they are encrypted.
        how: the same in words.
        say: told what is being done.

    Raises:
        SpecError: the listener hears what no channel carries, or the folder holds captures.
        Interrupted: told to stop.
        RunFailed: services do not work.
        CaptureError: as `started`.
    """
    require_wire_threat(plan.adversary.threat)
    captures = _fresh(folder)
    worlds, pairs = draw_seeded_coins(plan) if seeded else toss_coins(2 * plan.total_runs), interleave_pairs(plan)
    ledger = RunLedgerWriter(captures, worlds)
    write_worlds(captures, plan, ledger.commitment, pairs, capture=capture, seeded_coins=seeded)
    ledger.bind()
    services = LocalServices(prepare_audit_spec(plan.run.spec, capture), folder, tls=capture == "wiretap")
    making = _Making(plan, list(zip(pairs, worlds.tolist(), strict=True)), ledger, say)
    try:
        try:
            run_async(lambda stop: making.all_runs(services, stop))
        finally:
            ledger.reveal(list_captures(open_folder(captures)))
    except (RunInterrupted, ServiceDied, RunFailed, OSError) as error:  # the disk may be full
        kind = RunInterrupted if isinstance(error, RunInterrupted) else RunFailed
        why = "told to stop" if kind is RunInterrupted else str(error)
        more = f"; what they said is kept: sottovoce audit --captures {captures}" if making.done else ""
        raise kind(f"{making.done:,} of {2 * plan.total_runs:,} runs were made: {why}{more}") from None
    place = open_folder(captures)
    told = read_worlds(place)
    runs = collect_runs(list_captures(place), plan.run, read_run_ledger(place, told), told.find_pair_index)
    what = f"{pluralize(len(runs.complete_captures), 'run')} of real services on this machine, {how}"
    return replace(runs, coins=told.coins).with_root(open_folder(folder), what)


def _fresh(folder: Path) -> Path:
    """The folder for captures: those of other runs must not be taken for ours."""
    captures = folder / "captures"
    if captures.exists() and any(captures.iterdir()):
        raise SpecError(f"{captures} must be empty or missing: --out is for a folder without captures of other runs")
    captures.mkdir(mode=0o700, parents=True, exist_ok=True)
    return captures


class _Making:
    """The runs of an audit while they are made.

    Args:
        plan: the audit.
        lives: of every run its pair of worlds, and the world.
        ledger: in which they are entered.
        say: told what is being done.

    Attributes:
        done: runs that are finished.
    """

    def __init__(
        self, plan: AuditPlan, lives: Sequence[tuple[int, int]], ledger: RunLedgerWriter, say: ProgressReporter
    ) -> None:
        self.done = 0
        self._plan, self._lives, self._ledger, self._say = plan, lives, ledger, say
        self._began = time.monotonic()

    async def all_runs(self, local: LocalServices, stop: asyncio.Event) -> None:
        """A run that fails is one more outcome; only many in a row end the audit, for then nothing works any more."""
        failed = 0
        data = [[pair.worlds.build_data(self._plan.data, world) for world in (0, 1)] for pair in self._plan.pairs]
        self._say("starting services")
        async with local as services:
            for k, (pair, world) in enumerate(self._lives):
                if stop.is_set():
                    raise RunInterrupted(STOPPED_BY_OPERATOR)
                self._ledger.record_start(k)
                running = run_on_services(
                    services.coordinator,
                    services.spec,
                    data[pair][world],
                    lambda *seen: None,
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
                self._tell()

    def _tell(self) -> None:
        """How many runs are done, and at what pace."""
        now = time.monotonic()
        if self.done == 1:  # the services were still waking up
            self._began = now
        pace = (self.done - 1) / (now - self._began) if self.done > 1 else 0.0
        self._say("running", self.done, len(self._lives), f"runs, {pace:.2g} runs/s" if pace else "runs")


def draw_seeded_coins(plan: AuditPlan) -> IntArray:
    """`(2 runs,)` the world of every run, by a fair coin each from the plan's seed."""
    return np.random.default_rng(plan.seeds.audited_runs).integers(0, 2, 2 * plan.total_runs)


def interleave_pairs(plan: AuditPlan) -> list[int]:
    """Of every run the pair of worlds: pairs take turns, each as often as it has runs, so that all meet the same machine."""
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
    """Make runs on real services whose channels are encrypted and tapped, audit them, and write `audit.json`.

    Args:
        folder: for the results.
        prepared: the run and its data.
        asked: what is asked.
        seeded: the coins come from the seed, as of `audit_on_network`.
        console: where to print (default: standard output).

    Returns:
        The exit code: 1 if the claim is refuted, else 0.

    Raises:
        SpecError: the question does not fit the run, or an extra is not installed.
        Interrupted: told to stop.
        RunFailed: services do not work.
    """
    console = console or terminal.create_console()
    with terminal.show_progress_bar("choosing the swap") as say:
        plan = plan_ciphertext_audit(prepared, request)
        runs = _made(plan, folder, "wiretap", "channels encrypted and tapped", seeded=seeded_coins, say=say)
        done = audit_ciphertext(plan, runs, request.seed, say)
    return report_ciphertext_audit(done, plan, runs, request.seed, folder, console)


def plan_ciphertext_audit(prepared: PreparedRun, request: AuditRequest) -> AuditPlan:
    """The audit that was asked for, with one pair of worlds: what numbers say best is no matter, for nobody sees them.

    Unless a record was asked for, a loud one stands against a silent one, for whatever depends on a norm.

    Raises:
        SpecError, DataError: as `AuditRequest.plan`.
    """
    plan = request.plan(prepared)
    if request.record is not None:
        return plan
    beside = build_other_worlds(prepared.run, prepared.data, plan.worlds.learner, plan.worlds)
    return request.plan(prepared, [*beside, plan.worlds][:1])


def audit_ciphertext(plan: AuditPlan, runs: AuditRuns, seed: int, report_progress: ProgressReporter) -> ForeignAudit:
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
    starts = runs.build_starts(plan)
    if starts is None:
        raise SpecError(
            "captures by wiretap are audited where there are runs of two worlds, got one: sottovoce audit --on wiretap makes them"
        )
    heard = _conversations(plan, runs)
    confidence = 1.0 - plan.alpha_allocation.alpha
    void = starts.explain_unfair_coins(plan.alpha_allocation.compute_level("black box", "worlds"))
    claim = max(pair.epsilon for pair in plan.pairs)
    return audit_traffic(
        heard,
        claim=claim,
        confidence=confidence,
        seed=seed,
        same_processes=True,
        void_reason=void,
        on_stage=report_progress,
    )


def _conversations(plan: AuditPlan, runs: AuditRuns) -> list[RunTraffic]:
    """Every run that was started; of one without a capture nothing was heard."""
    import pyarrow as pa

    lines = select_channels(plan)
    found = []
    for k, run in enumerate(runs.runs):
        if (capture := run.capture) is None:
            found.append(RunTraffic(run.world, "", float(k), ()))
            continue
        table = pa.Table.from_batches(capture.read_batches())
        order = k if capture.replica is None else capture.replica
        name = str(capture.metadata["run_id"])
        found.append(read_conversation(table, lines, name, world=run.world, run_number=order))
    return found


# ---- what came of it -------------------------------------------------------------------------------------------------


def report_ciphertext_audit(
    done: ForeignAudit, plan: AuditPlan, runs: AuditRuns, seed: int, folder: Path, console: Console
) -> int:
    """Print an audit of ciphertext and write it down; returns the exit code."""
    name = plan.run.spec.names[plan.worlds.learner]
    write_json(folder / "audit.json", _document(done, plan, runs, seed))
    notes = _notes(done, plan, runs, seed)
    print_verdict(done.verdict, name, _rows(done.findings.bounds), notes, console)
    console.out(f"{folder}: audit.json", highlight=False)
    return 1 if done.verdict.kind == "refuted" else 0


def _total(runs: AuditRuns) -> CiphertextCounts:
    """What wiretaps noted in all runs."""
    noted = [capture.ciphertext for capture in runs.complete_captures if capture.ciphertext is not None]
    return CiphertextCounts(
        *(sum(getattr(each, name) for each in noted) for name in ("connections", "records", "bytes"))
    )


def _document(done: ForeignAudit, plan: AuditPlan, runs: AuditRuns, seed: int) -> dict[str, Any]:
    """`audit.json` of ciphertext."""
    return {
        "sottovoce": version("sottovoce"),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "data_sha256": hash_data(plan.data),  # equal for equal records in equal rounds
        "spec": plan.run.spec.model_dump(mode="json"),
        "learner": plan.run.spec.names[plan.worlds.learner],
        "verdict": done.verdict,
        "source": "; ".join(runs.source),  # where the runs came from, in words
        "captures_sha256": runs.compute_digests(),  # by their paths in the folder of the audit, or that was named
        "coins": runs.coins,  # what chose the world of every run
        "provisos": runs.provisos,  # what must be known of the runs besides
        "worlds": plan.worlds.description,  # what was swapped, in words
        "threat_model": plan.adversary.threat,  # who listened
        "adjacency": plan.guarantee.adjacency_description,  # which two data sets must look alike
        "runs_of_each_world": done.runs,
        "runs_left_out": done.excluded_runs,  # to make both worlds as frequent
        "confidence": 1.0 - done.findings.alpha_allocation.alpha,  # with which a correct learner is not refuted
        "seed": seed,  # of the split and the classifiers
        "epsilon": {
            "promised": done.findings.claim,  # by the algorithm, for this swap
            "lower_bound": done.findings.epsilon_lower_bound,
            "most_that_so_many_runs_show": done.max_provable_epsilon,  # if every guess were right
        },
        "black_box": list_attempts(done.findings.bounds),
        "ciphertext": _total(runs),  # that was noted in all runs
    }


def _rows(bounds: Sequence[Bound]) -> Iterator[TableRow]:
    for bound in bounds:
        _, seen, result, least, claimed = format_guess_row(bound)
        yield "ciphertext", seen, result, least, claimed


def _notes(done: ForeignAudit, plan: AuditPlan, runs: AuditRuns, seed: int) -> Iterator[str]:
    first, second = done.runs
    total = _total(runs)
    noted = describe_ciphertext(total.connections, total.records, total.bytes)
    each = f"{pluralize(first, 'run')} of world 0, {format_count(second)} of world 1"
    yield f"Runs: {'; '.join(runs.source)}; {each}. {format_coins_line(runs.coins, seed)}"
    yield from runs.provisos
    yield f"Worlds: {plan.worlds.description}. Adjacent: {plan.guarantee.adjacency_description}. Noted: {noted}."
    yield "What the numbers say was not looked at: sottovoce audit --on network reads them."
    if done.excluded_runs:
        yield f"Worlds were not equally frequent: {pluralize(done.excluded_runs, 'run')} left out."
    yield describe_max_epsilon(done.max_provable_epsilon, done.findings.needed_runs, done.findings.claim)
