"""A run from one command: its services, its progress, a clean end whatever happens, then a summary and a report."""

from __future__ import annotations

import asyncio
import shlex
import signal
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sottovoce_client import terminal
from sottovoce_client.atomic_files import write_json, write_text
from sottovoce_client.formatting import describe_detections
from sottovoce_client.reports.run_report import build_run_page
from sottovoce_client.runs.evaluate import describe_missing_traffic, read_detections, summarise
from sottovoce_client.runs.local_services import LEARNER_STATE_FOLDER, LocalServices
from sottovoce_client.runs.run_client import (
    COMMAND_STOP_REASONS,
    COORDINATOR_LABEL,
    STOPPED_BY_OPERATOR,
    STOPPED_BY_SIGTERM,
    Outcome,
    RunInterrupted,
    RunProgressCallback,
    StopSignal,
    run_on_services,
)
from sottovoce_client.runs.summary import RunProgress
from sottovoce_client.runs.terminal_display import display_run, print_summary
from sottovoce_core.algorithms.run_context import broadcast_to_learners
from sottovoce_core.data import PlacedData
from sottovoce_core.data.catalogue import get_data_folders
from sottovoce_core.errors import SottovoceError, Unavailable
from sottovoce_core.experiment import PreparedRun, prepare
from sottovoce_core.spec import RunSpec, dump_spec
from sottovoce_core.text import escape_control
from sottovoce_rpc.logs import SEE_LOG_TEXT
from sottovoce_rpc.tasks import Tasks

_SERVICE_EXIT_TIMEOUT_S = 1.0


class ServiceDied(SottovoceError):
    """A service ended by itself, and took the run with it."""


async def run_with_local_services(
    spec: RunSpec,
    data: PlacedData,
    folder: Path,
    watch: RunProgressCallback,
    stop: asyncio.Event,
    **services: Any,
) -> Outcome:
    """Start all services here, run the spec, stop them.

    Args:
        spec: what to run.
        data: streamed into the learners by this process.
        folder: for journals, captures and logs.
        watch: called a few times a second.
        stop: when set, the run is stopped.
        services: as `LocalServices` has them.

    Raises:
        SottovoceError: a service did not start, or the run was refused.
        ServiceDied: a service died, and the run's outcome with it.
        Interrupted: told to stop before the run had begun.
    """
    local = LocalServices(spec, folder, **services)
    print(f"starting {local.description} ...", flush=True)
    async with local as up:
        if stop.is_set():
            raise RunInterrupted("stopped before the run had begun")
        if spec.data.is_live:
            _tell_feeders(up.learner_addresses, folder)
        with _told(up, folder / "services.json"):
            running = run_on_services(up.coordinator, spec, data, watch, stop, credentials=up.credentials)
            return await await_run_or_exit(up, running, stop)


@contextmanager
def _told(services: LocalServices, place: Path) -> Iterator[None]:
    """Where the services are, for `sottovoce console`, while they are there."""
    identity = services.credentials.folder
    at = {"coordinator": services.coordinator, "eavesdropper": services.eavesdropper}
    write_json(place, {**at, "identity": None if identity is None else str(identity.resolve())})
    try:
        yield
    finally:
        place.unlink(missing_ok=True)


def _tell_feeders(learners: Mapping[str, str], folder: Path) -> None:
    """Where records are to be brought, for people and, in `learners.json`, for programs."""
    write_json(folder / "learners.json", learners)
    for name, address in learners.items():
        print(escape_control(f"{name} takes records at {address}"))


async def await_run_or_exit(services: LocalServices, run: Coroutine[Any, Any, Outcome], stop: asyncio.Event) -> Outcome:
    """The outcome of a run, unless a service dies.

    Raises:
        SottovoceError: what the run failed with.
        ServiceDied: a service died, and the run's outcome with it.
    """
    async with Tasks() as tasks:
        running, death = tasks.start(run), tasks.start(services.wait_for_exit())
        await asyncio.wait([running, death], return_when=asyncio.FIRST_COMPLETED)
        if running.done() and isinstance(running.exception(), Unavailable):
            await asyncio.wait([death], timeout=_SERVICE_EXIT_TIMEOUT_S)  # the reason, where a service has died
        if not death.done():
            return running.result()
        return await _after_death(death.result(), running, stop)


async def _after_death(what: str, running: asyncio.Task[Outcome], stop: asyncio.Event) -> Outcome:
    """A service has died: the run is over; take what the others still tell."""
    stop.set()
    await asyncio.wait([running], timeout=_SERVICE_EXIT_TIMEOUT_S)
    if running.done() and not running.cancelled() and running.exception() is None:
        return replace(running.result(), state="failed", detail=what)
    raise ServiceDied(what)


def run_async(work: Callable[[asyncio.Event], Coroutine[Any, Any, Any]]) -> Any:
    """Run to the end. The first Ctrl-C or SIGTERM sets the event that `work` was given, the second one cancels it.

    Raises:
        Interrupted: cancelled; its cleanup has run.
    """

    async def main() -> Any:
        stop, task = StopSignal(), asyncio.current_task()

        def tell(reason: str) -> None:
            if stop.is_set() and task is not None:
                task.cancel()
            if not stop.is_set():
                stop.reason = reason
            stop.set()

        for number, reason in ((signal.SIGINT, STOPPED_BY_OPERATOR), (signal.SIGTERM, STOPPED_BY_SIGTERM)):
            asyncio.get_running_loop().add_signal_handler(number, tell, reason)
        try:
            return await work(stop)
        except asyncio.CancelledError:
            raise RunInterrupted("told to stop twice: ended at once") from None

    before = signal.getsignal(signal.SIGTERM)
    try:
        return asyncio.run(main())
    finally:
        signal.signal(signal.SIGTERM, before)  # a loop leaves that of the system


_ENDED_STATES = ("finished", "stopped", "failed")
_NO_SUMMARY_DETAIL = "this command was told to end before it had made the summary"
_Start = Callable[[PreparedRun, RunProgressCallback, asyncio.Event], Coroutine[Any, Any, Outcome]]


def run_and_report(prepared: PreparedRun, folder: Path, start: _Start, *, owns_services: bool = False) -> int:
    """Run, show, summarise, and tell programs that ask; returns the exit code.

    0: finished; without a planned end (`rounds: null`), stopped. 1: failed, stopped by a learner whose budget was used up, the
    capture could not be written, or something was noticed in it that must never happen. 3: as 0, but the report or a part of
    the summary could not be made. 130: stopped by the operator, or this command was told to end before the run was over.

    Args:
        prepared: what to run.
        folder: for spec, summary and report.
        start: runs it.
        served: its services are those of this command, and end with it.

    Raises:
        SottovoceError: the run was refused, or a service did not start.
    """
    spec = prepared.run.spec
    write_text(folder / "spec.yaml", dump_spec(spec, folder))
    captured = spec.capture in ("relay", "mirror")
    budget = spec.privacy.budget
    budgets = () if budget is None else broadcast_to_learners(budget, spec.n_learners, "privacy.budget")
    last = list[tuple[RunProgress, str]]()  # the newest look, and the state of the run
    with display_run(spec.name, None if spec.is_unbounded else spec.rounds, spec.names, budgets=budgets) as console:

        def watch(progress: RunProgress, state: str) -> None:
            last[:] = [(progress, state)]
            console.update(progress, state, captured_messages=sum(progress.messages) if captured else None)

        try:
            outcome: Outcome = run_async(lambda stop: start(prepared, watch, stop))
        except ServiceDied as death:
            kept = str(folder / "captures") if captured else None
            overheard = "" if kept is None else f". What was overheard is kept in {kept}"
            print(escape_control(f"The run failed: {death}{overheard}"))
            seen = last[0][0] if last else RunProgress(0.0, (), (), (), ())
            _tell(folder, spec, seen.run_id, "failed", str(death), seen.rounds_done, kept)
            return 1
        except RunInterrupted as told:
            if last:
                return _left(*last[0], folder, spec, served=owns_services)
            print(escape_control(f"Nothing was run: {told}"))
            _tell(folder, spec, "", "stopped", str(told), 0, None)
            return 130
    if outcome.state != "failed" and (spec.is_unbounded or outcome.detail not in COMMAND_STOP_REASONS):
        if outcome.offline_intervals != spec.offline_intervals:
            prepared = prepare_changed_run(spec.model_copy(update={"offline_intervals": outcome.offline_intervals}))
            write_text(folder / "spec.yaml", dump_spec(prepared.run.spec, folder))
        report = folder / "report.html"
        try:
            with terminal.print_if_slow("making the summary and the report ..."):
                summary = summarise(prepared.run, prepared.data, outcome, folder / LEARNER_STATE_FOLDER)
                summary.save(folder / "summary.json")
                code = terminal.attempt(str(report), lambda: build_run_page(summary).write(report))
        except KeyboardInterrupt:
            return _cut_short(replace(outcome, detail=_NO_SUMMARY_DETAIL), folder, spec, code=130)
        print_summary(summary, report=None if code else report)
        _print_all(summary.missing_traffic)
        for line in summary.failed_parts:
            terminal.print_notice(f"sottovoce: {line}. The other results are complete.")
        terminal.print_json_file_if_requested(folder / "summary.json", rounds_done=summary.rounds_done)
        over = outcome.state == "finished" or spec.is_unbounded
        if not over or outcome.capture_error or (summary.detections is not None and summary.detections.count):
            return 1
        return terminal.INCOMPLETE_EXIT_CODE if summary.failed_parts else code
    return _cut_short(outcome, folder, spec)


def prepare_changed_run(spec: RunSpec) -> PreparedRun:
    """A run whose learners have left or joined since it was prepared, and who learns what when.

    Raises:
        SottovoceError: its data cannot be used any more.
    """
    return prepare(spec, folders=get_data_folders(), live=True)


def _print_all(lines: Iterable[str]) -> None:
    for line in lines:
        print(escape_control(line))


def _left(seen: RunProgress, state: str, folder: Path, spec: RunSpec, *, served: bool) -> int:
    """Told to stop twice, this command did not wait for the end of its run: say what comes of it, as far as that is known."""
    run_id, captured = seen.run_id, served and spec.capture in ("relay", "mirror")
    if state in _ENDED_STATES:
        comes = f"{state} in round {seen.rounds_done}: {_NO_SUMMARY_DETAIL}"
    elif served:
        state = "stopped"
        comes = f"stopped in round {seen.rounds_done}: told to stop twice, its services ended at once"
    elif COORDINATOR_LABEL in seen.offline_learners:
        unfed = "" if spec.data.is_live else " Records come to it no more: this command brought them."
        comes = (
            f"goes on, and was in round {seen.rounds_done} when it was seen last: {COORDINATOR_LABEL} was away, and this "
            f"command, told to stop twice, has ended.{unfed} To stop the run: sottovoce runs stop {run_id}"
        )
    else:
        comes = (
            f"was told to stop in round {seen.rounds_done}, and this command, told twice, did not wait for its end: sottovoce runs "
            f"show {run_id} says what came of it"
        )
    print(escape_control(f"The run {run_id} {comes}"))
    _tell(folder, spec, run_id, state, comes, seen.rounds_done, str(folder / "captures") if captured else None)
    return 130


def _cut_short(outcome: Outcome, folder: Path, spec: RunSpec, code: int = 1) -> int:
    """Say what happened and what is left."""
    done = min((status.rounds_done for status in outcome.statuses), default=0)
    print(
        escape_control(
            f"The run {outcome.run_id} {outcome.state} in round {done}: {outcome.detail}{_log_of(outcome, folder)}"
        )
    )
    if outcome.detail != _NO_SUMMARY_DETAIL:
        how = "was stopped by its operator" if outcome.detail == STOPPED_BY_OPERATOR else "was stopped"
        how = "failed" if outcome.state == "failed" else how
        print(f"A run that {how} has no summary and no report")
    if outcome.capture_location is not None:
        shown = f"sottovoce transcript show {shlex.quote(outcome.capture_location)}"
        print(escape_control(f"What was overheard is kept in {outcome.capture_location}, and shown by: {shown}"))
    _print_all(describe_missing_traffic(outcome))
    noticed = read_detections(outcome)
    if noticed is not None and noticed.count:
        print(escape_control(describe_detections(noticed.count, noticed.first)))
    _tell(folder, spec, outcome.run_id, outcome.state, outcome.detail, done, outcome.capture_location)
    return 130 if outcome.detail in COMMAND_STOP_REASONS else code


def _log_of(outcome: Outcome, folder: Path) -> str:
    """Where the log lies of a learner that failed, if a command of ours keeps it."""
    if SEE_LOG_TEXT not in outcome.detail or not (logs := folder / "logs").is_dir():
        return ""
    named = [each.learner for each in outcome.statuses if f"{each.learner} failed: " in outcome.detail]
    own = logs / f"{named[0]}.log" if named else logs
    return f": {own if own.is_file() else logs}"  # of several learners in a process, the first has the log


def _tell(folder: Path, spec: RunSpec, run_id: str, state: str, detail: str, done: int, capture: str | None) -> None:
    """A run that has no summary, in the words of one; what is not known is null."""
    terminal.print_json_if_requested(
        lambda: {
            "folder": folder,
            "name": spec.name,
            "run_id": run_id or None,
            "state": state,
            "detail": detail,
            "rounds": None if spec.is_unbounded else spec.rounds,
            "rounds_done": done,
            "capture": capture,
        }
    )
