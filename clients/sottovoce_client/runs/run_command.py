"""Commands that run a spec: local services, progress, an orderly end in all cases, then summary and report."""

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
    """A service ended by itself, and the run with it."""


async def run_with_local_services(
    spec: RunSpec,
    data: PlacedData,
    folder: Path,
    watch: RunProgressCallback,
    stop: asyncio.Event,
    **services: Any,
) -> Outcome:
    """Start all services on this machine, run the spec, stop them.

    Args:
        spec: Run spec.
        data: Records, which this process streams into the learners.
        folder: Folder for learner state, captures and logs.
        watch: Called a few times a second.
        stop: When set, the run is stopped.
        services: Arguments of `LocalServices`.

    Raises:
        SottovoceError: A service did not start, or the run was refused.
        ServiceDied: A service died, and the outcome of the run is unknown.
        RunInterrupted: The command was stopped before the run began.
    """
    local = LocalServices(spec, folder, **services)
    print(f"starting {local.description} ...", flush=True)
    async with local as services_up:
        if stop.is_set():
            raise RunInterrupted("stopped before the run began")
        if spec.data.is_live:
            _announce_learners(services_up.learner_addresses, folder)
        with _publish_addresses(services_up, folder / "services.json"):
            running = run_on_services(
                services_up.coordinator, spec, data, watch, stop, credentials=services_up.credentials
            )
            return await await_run_or_exit(services_up, running, stop)


@contextmanager
def _publish_addresses(services: LocalServices, path: Path) -> Iterator[None]:
    """Publish the addresses of the services in a file, for `sottovoce console`, while they run."""
    identity = services.credentials.folder
    addresses = {"coordinator": services.coordinator, "eavesdropper": services.eavesdropper}
    write_json(path, {**addresses, "identity": None if identity is None else str(identity.resolve())})
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _announce_learners(learners: Mapping[str, str], folder: Path) -> None:
    """Publish the addresses that accept records: print them, and write `learners.json`."""
    write_json(folder / "learners.json", learners)
    for name, address in learners.items():
        print(escape_control(f"{name} accepts records at {address}"))


async def await_run_or_exit(services: LocalServices, run: Coroutine[Any, Any, Outcome], stop: asyncio.Event) -> Outcome:
    """Return the outcome of a run, unless a service dies.

    Raises:
        SottovoceError: The error of the run.
        ServiceDied: A service died, and the outcome of the run is unknown.
    """
    async with Tasks() as tasks:
        running, exit_ = tasks.start(run), tasks.start(services.wait_for_exit())
        await asyncio.wait([running, exit_], return_when=asyncio.FIRST_COMPLETED)
        if running.done() and isinstance(running.exception(), Unavailable):
            await asyncio.wait([exit_], timeout=_SERVICE_EXIT_TIMEOUT_S)  # a dead service is the better reason
        if not exit_.done():
            return running.result()
        return await _end_after_exit(exit_.result(), running, stop)


async def _end_after_exit(reason: str, running: asyncio.Task[Outcome], stop: asyncio.Event) -> Outcome:
    """End a run after the death of a service, with what the other services still report."""
    stop.set()
    await asyncio.wait([running], timeout=_SERVICE_EXIT_TIMEOUT_S)
    if running.done() and not running.cancelled() and running.exception() is None:
        return replace(running.result(), state="failed", detail=reason)
    raise ServiceDied(reason)


def run_async(work: Callable[[asyncio.Event], Coroutine[Any, Any, Any]]) -> Any:
    """Run to the end. The first Ctrl-C or SIGTERM sets the event that `work` receives, the second one cancels it.

    Raises:
        RunInterrupted: It was cancelled; its cleanup has run.
    """

    async def main() -> Any:
        stop, task = StopSignal(), asyncio.current_task()

        def request_stop(reason: str) -> None:
            if stop.is_set() and task is not None:
                task.cancel()
            if not stop.is_set():
                stop.reason = reason
            stop.set()

        for number, reason in ((signal.SIGINT, STOPPED_BY_OPERATOR), (signal.SIGTERM, STOPPED_BY_SIGTERM)):
            asyncio.get_running_loop().add_signal_handler(number, request_stop, reason)
        try:
            return await work(stop)
        except asyncio.CancelledError:
            raise RunInterrupted("stopped twice: ended at once") from None

    before = signal.getsignal(signal.SIGTERM)
    try:
        return asyncio.run(main())
    finally:
        signal.signal(signal.SIGTERM, before)  # the loop leaves the system's default handler


_ENDED_STATES = ("finished", "stopped", "failed")
_NO_SUMMARY_DETAIL = "this command was stopped before it had made the summary"
_Start = Callable[[PreparedRun, RunProgressCallback, asyncio.Event], Coroutine[Any, Any, Outcome]]


def run_and_report(prepared: PreparedRun, folder: Path, start: _Start, *, owns_services: bool = False) -> int:
    """Run, show progress, summarise, and print JSON if requested; return the exit code.

    0: finished; with `rounds: null`, stopped. 1: failed, stopped by a learner whose budget was used up, the capture could not be
    written, or there was a detection in it. 3: as 0, but the report or a part of the summary could not be made. 130: stopped by
    the operator, or this command was stopped before the end of the run.

    Args:
        prepared: Run and its records.
        folder: Folder for spec, summary and report.
        start: Starts the run.
        owns_services: Whether the services belong to this command and end with it.

    Raises:
        SottovoceError: The run was refused, or a service did not start.
    """
    spec = prepared.run.spec
    write_text(folder / "spec.yaml", dump_spec(spec, folder))
    captured = spec.capture in ("relay", "mirror")
    budget = spec.privacy.budget
    budgets = () if budget is None else broadcast_to_learners(budget, spec.n_learners, "privacy.budget")
    last = list[tuple[RunProgress, str]]()  # the newest progress, and the state of the run
    with display_run(spec.name, None if spec.is_unbounded else spec.rounds, spec.names, budgets=budgets) as console:

        def watch(progress: RunProgress, state: str) -> None:
            last[:] = [(progress, state)]
            console.update(progress, state, captured_messages=sum(progress.messages) if captured else None)

        try:
            outcome: Outcome = run_async(lambda stop: start(prepared, watch, stop))
        except ServiceDied as error:
            capture = str(folder / "captures") if captured else None
            note = "" if capture is None else f". The recorded messages are in {capture}"
            print(escape_control(f"The run failed: {error}{note}"))
            progress = last[0][0] if last else RunProgress(0.0, (), (), (), ())
            _print_json(folder, spec, progress.run_id, "failed", str(error), progress.rounds_done, capture)
            return 1
        except RunInterrupted as error:
            if last:
                return _report_unawaited_run(*last[0], folder, spec, owns_services=owns_services)
            print(escape_control(f"Nothing was run: {error}"))
            _print_json(folder, spec, "", "stopped", str(error), 0, None)
            return 130
    if outcome.state != "failed" and (spec.is_unbounded or outcome.detail not in COMMAND_STOP_REASONS):
        if outcome.offline_intervals != spec.absences:
            prepared = prepare_changed_run(spec.model_copy(update={"absences": outcome.offline_intervals}))
            write_text(folder / "spec.yaml", dump_spec(prepared.run.spec, folder))
        report = folder / "report.html"
        try:
            with terminal.print_if_slow("making the summary and the report ..."):
                summary = summarise(prepared.run, prepared.data, outcome, folder / LEARNER_STATE_FOLDER)
                summary.save(folder / "summary.json")
                code = terminal.attempt(str(report), lambda: build_run_page(summary).write(report))
        except KeyboardInterrupt:
            return _report_incomplete_run(replace(outcome, detail=_NO_SUMMARY_DETAIL), folder, spec, code=130)
        print_summary(summary, report=None if code else report)
        _print_lines(summary.missing_traffic)
        for line in summary.failed_parts:
            terminal.print_notice(f"sottovoce: {line}. The other results are complete.")
        terminal.print_json_file_if_requested(folder / "summary.json", rounds_done=summary.rounds_done)
        has_ended = outcome.state == "finished" or spec.is_unbounded
        if not has_ended or outcome.capture_error or (summary.detections is not None and summary.detections.count):
            return 1
        return terminal.INCOMPLETE_EXIT_CODE if summary.failed_parts else code
    return _report_incomplete_run(outcome, folder, spec)


def prepare_changed_run(spec: RunSpec) -> PreparedRun:
    """Prepare a run again whose learners have left or joined since it was prepared.

    Raises:
        SottovoceError: Its data cannot be used any more.
    """
    return prepare(spec, folders=get_data_folders(), live=True)


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(escape_control(line))


def _report_unawaited_run(
    progress: RunProgress, state: str, folder: Path, spec: RunSpec, *, owns_services: bool
) -> int:
    """Report what is known of a run whose end this command, stopped twice, did not wait for; return the exit code."""
    run_id, captured = progress.run_id, owns_services and spec.capture in ("relay", "mirror")
    if state in _ENDED_STATES:
        text = f"{state} in round {progress.rounds_done}: {_NO_SUMMARY_DETAIL}"
    elif owns_services:
        state = "stopped"
        text = f"stopped in round {progress.rounds_done}: stopped twice, its services ended at once"
    elif COORDINATOR_LABEL in progress.offline_learners:
        feeding_note = "" if spec.data.is_live else " It receives no more records: this command sent them."
        text = (
            f"continues, and was in round {progress.rounds_done} when last seen: {COORDINATOR_LABEL} was disconnected, and this "
            f"command, stopped twice, has ended.{feeding_note} To stop the run: sottovoce runs stop {run_id}"
        )
    else:
        text = (
            f"was stopped in round {progress.rounds_done}, and this command, stopped twice, did not wait for its end: sottovoce "
            f"runs show {run_id} shows how it ended"
        )
    print(escape_control(f"The run {run_id} {text}"))
    _print_json(folder, spec, run_id, state, text, progress.rounds_done, str(folder / "captures") if captured else None)
    return 130


def _report_incomplete_run(outcome: Outcome, folder: Path, spec: RunSpec, code: int = 1) -> int:
    """Report how a run ended that has no summary, and what remains of it; return the exit code."""
    done = min((status.rounds_done for status in outcome.statuses), default=0)
    print(
        escape_control(
            f"The run {outcome.run_id} {outcome.state} in round {done}: {outcome.detail}{_describe_log(outcome, folder)}"
        )
    )
    if outcome.detail != _NO_SUMMARY_DETAIL:
        ending = "was stopped by its operator" if outcome.detail == STOPPED_BY_OPERATOR else "was stopped"
        ending = "failed" if outcome.state == "failed" else ending
        print(f"A run that {ending} has no summary and no report")
    if outcome.capture_location is not None:
        shown = f"sottovoce transcript show {shlex.quote(outcome.capture_location)}"
        print(escape_control(f"The recorded messages are in {outcome.capture_location}; to show them: {shown}"))
    _print_lines(describe_missing_traffic(outcome))
    detections = read_detections(outcome)
    if detections is not None and detections.count:
        print(escape_control(describe_detections(detections.count, detections.first)))
    _print_json(folder, spec, outcome.run_id, outcome.state, outcome.detail, done, outcome.capture_location)
    return 130 if outcome.detail in COMMAND_STOP_REASONS else code


def _describe_log(outcome: Outcome, folder: Path) -> str:
    """Return the path of the log of a failed learner, if a command of ours keeps it."""
    if SEE_LOG_TEXT not in outcome.detail or not (logs := folder / "logs").is_dir():
        return ""
    named = [each.learner for each in outcome.statuses if f"{each.learner} failed: " in outcome.detail]
    own = logs / f"{named[0]}.log" if named else logs
    return f": {own if own.is_file() else logs}"  # of several learners in a process, the first has the log


def _print_json(
    folder: Path, spec: RunSpec, run_id: str, state: str, detail: str, done: int, capture: str | None
) -> None:
    """Print the JSON document of a run without a summary, with the keys of one; unknown values are null."""
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
