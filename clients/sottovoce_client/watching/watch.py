"""`sottovoce watch`: follow a capture while it is written, and raise an alarm if noise is not as claimed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import structlog
from rich.console import Console

from sottovoce_client import terminal
from sottovoce_client.auditing.audit_runs import UNSIGNED_PROMISE_NOTE, require_same_spec
from sottovoce_client.privacy.budget import find_learner_index
from sottovoce_client.runs.run_command import run_async
from sottovoce_client.transcripts.provenance import check_provenance
from sottovoce_client.watching.canary_files import find_commitment, insert_canaries, load_canaries
from sottovoce_client.watching.capture_sources import (
    CaptureSource,
    FolderSource,
    load_noise_history,
    open_eavesdropper_source,
    save_noise_history,
)
from sottovoce_client.watching.display import INCOMPLETE_STATE, NO_ALARM, Gauges, WatchDisplay, WatchStatus
from sottovoce_core.algorithms.interface import Message
from sottovoce_core.auditing.online.canaries import CanaryTest
from sottovoce_core.auditing.online.watch import Alarm, Watch
from sottovoce_core.errors import CaptureError, SpecError
from sottovoce_core.experiment import PreparedRun
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.runs.transcript import MAX_REMEMBERED_MESSAGES, RoundReassembler
from sottovoce_core.spec import RunSpec, find_first_import, parse_spec
from sottovoce_eavesdropper.capture_reader import Capture
from sottovoce_learner.storage.logged_records import LoggedRecords, find_learners
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.credentials import NO_IDENTITY, Credentials

log = structlog.get_logger()

POLL_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class WatchRequest:
    """Options of a watch.

    Attributes:
        alpha: false alarm rate.
        learners: names of the watched learners; empty: all.
        canary_file: file of the run's canaries.
        commitment: its SHA-256; None: that in the file next to it.
        keep_going: go on after an alarm.
        once: do not wait for more data.
        noise_history_file: file of the noise of earlier runs; this run's is added when it has been watched to its end.
        state_folders: state folders of learners, whose write-ahead logs have the records; empty: the spec's data source has them.
        allow_imports: import code that the capture's spec names.
    """

    alpha: float = 1e-3
    learners: tuple[str, ...] = ()
    canary_file: Path | None = None
    commitment: str | None = None
    keep_going: bool = False
    once: bool = False
    noise_history_file: Path | None = None
    state_folders: tuple[Path, ...] = ()
    allow_imports: bool = False


def open_source(
    place: str | None,
    eavesdropper: str | None,
    run_id: str | None,
    credentials: Credentials = NO_IDENTITY,
    *,
    once: bool = False,
) -> AbstractAsyncContextManager[CaptureSource]:
    """Open the capture in a folder, or at an eavesdropper; `once`: the folder must exist already.

    Raises:
        SpecError: Not exactly one of the two is given.
    """
    if place is not None and eavesdropper is None and run_id is None:
        return nullcontext(FolderSource(place, 0.0) if once else FolderSource(place))
    if place is None and eavesdropper is not None and run_id is not None:
        return open_eavesdropper_source(eavesdropper, run_id, credentials)
    raise SpecError("watch needs either a capture's folder, or --eavesdropper HOST:PORT and --run RUN_ID")


def watch(
    source: AbstractAsyncContextManager[CaptureSource],
    request: WatchRequest,
    prepare: Callable[[RunSpec], PreparedRun],
    *,
    metrics_address: str | None = None,
    console: Console | None = None,
) -> int:
    """Watch until the capture is complete, the first alarm, or an interrupt; then print a summary.

    Args:
        source: source of the capture.
        request: options of the watch.
        prepare: loads the data of a spec.
        metrics_address: `host:port` of a Prometheus endpoint.
        console: where to print (default: standard output).

    Returns:
        The exit code: 1 after an alarm, 130 if interrupted without one, 2 if the capture is incomplete or differs from what was
        signed (`once`), 3 if the noise history could not be written, else 0.

    Raises:
        SottovoceError: The capture, the data or the canaries cannot be used.
    """
    if not 0.0 < request.alpha < 1.0:
        raise SpecError(f"--alpha must be in (0, 1), got {request.alpha}")
    console = console or terminal.create_console()
    with ExitStack() as stack:
        gauges = stack.enter_context(Gauges(metrics_address)) if metrics_address else None
        if gauges is not None:
            console.out(f"metrics: http://{gauges.address}/metrics", highlight=False)

        async def follow(stop: asyncio.Event) -> WatchStatus | None:
            async with source as opened:
                return await _CaptureWatch(opened, request, prepare, gauges, stop).run(console)

        status: WatchStatus | None = run_async(follow)
    if status is None:
        console.out("Nothing was watched: there was no capture yet.", highlight=False)
        return 130
    status.print_end(console)
    terminal.print_json_if_requested(status.build_document)
    return 1 if status.alarms else {"interrupted": 130, INCOMPLETE_STATE: 2}.get(status.state, status.history_exit_code)


class _CaptureWatch:
    """A watch of one capture."""

    def __init__(
        self,
        source: CaptureSource,
        request: WatchRequest,
        prepare: Callable[[RunSpec], PreparedRun],
        metrics: Gauges | None,
        stop: asyncio.Event,
    ) -> None:
        self._source, self._request, self._prepare = source, request, prepare
        self._metrics, self._stop = metrics, stop
        self._part, self._reported_equivocations = 0, 0
        self._logs: dict[int, LoggedRecords] = {}

    async def run(self, console: Console) -> WatchStatus | None:
        """Watch to the end, and return the final status; None if interrupted before there was a capture."""
        capture = await self._wait_for_capture(console)
        if capture is None:
            return None
        status, run = self._start(capture)
        codec = RoundCodec(run.field_shapes)
        rounds = RoundReassembler[Message](
            run.spec.n_learners, run.spec.rounds, run.network, MAX_REMEMBERED_MESSAGES, names=run.spec.names
        )
        if self._logs and (others := [name for i, name in enumerate(status.names) if i not in self._logs]):
            console.out(f"Not watched: {', '.join(others)}.", highlight=False)
        with WatchDisplay(console) as display:
            while True:
                await self._process(capture, codec, rounds, status, display)
                if self._is_over(capture, status) or await self._wait_or_stop():
                    break
                capture = await self._source.fetch_latest() or capture
        status.state, problem = self._get_final_state(status), ""
        if status.alarms or self._request.once:
            status.provenance, problem = _check_capture(capture)
        path = self._request.noise_history_file
        if path is not None and (
            status.watch.round == status.rounds or (status.rounds is None and capture.is_complete)
        ):
            keys, run_id = status.watch.key_table, capture.metadata["run_id"]
            status.history_exit_code = terminal.attempt(str(path), lambda: save_noise_history(path, keys, run_id))
        if (
            capture.is_complete
            and status.rounds is not None
            and rounds.next_round < status.rounds
            and not self._is_over_early(status)
        ):
            missing = _describe_missing_rounds(rounds, status)
            problem = problem or ("" if run.spec.data.is_live else missing)  # a live run may end when it is stopped
            console.out(missing, highlight=False)
        if self._request.once and problem and status.state == NO_ALARM:
            status.state = INCOMPLETE_STATE
        if status.watch.round < rounds.next_round and not self._is_over_early(status):
            text = f"The logs end before the records of round {status.watch.round}: earlier rounds were watched."
            console.out(text, highlight=False)
        return status

    async def _wait_for_capture(self, console: Console) -> Capture | None:
        """Wait until there is a capture; None if interrupted."""
        capture = await self._source.fetch_latest()
        if capture is None and self._request.once:
            raise CaptureError("--once needs a capture, and there is none")
        if capture is None:
            console.out(f"waiting for {self._source.wait_description}", highlight=False)
        while capture is None and not await self._wait_or_stop():
            capture = await self._source.fetch_latest()
        return capture

    def _start(self, capture: Capture) -> tuple[WatchStatus, Run]:
        request = self._request
        capture.require_messages()
        spec = parse_spec(capture.metadata["spec"], source=capture.name, allow_imports=request.allow_imports)
        if find_first_import(capture.metadata["spec"]) is None:  # else the file next to it may import code, too
            require_same_spec(spec, [capture])
        if request.state_folders:
            return self._start_with_logs(capture, spec)
        if spec.data.is_live:
            raise SpecError(
                "records of a live run are only in the write-ahead logs of its learners: start these with --keep-log, and give "
                "their state folders (--state FOLDER)"
            )
        prepared, canaries, alpha = self._prepare(spec), None, request.alpha
        spec = prepared.run.spec
        if request.canary_file is None and (found := find_commitment(capture.name)) is not None:
            raise SpecError(f"this run has canaries in its records ({found}): give --canary-file canaries.json")
        if request.canary_file is not None:
            canaries = load_canaries(request.canary_file, request.commitment)
            prepared = insert_canaries(prepared, canaries)
            alpha = alpha * 2.0 / 3.0  # a third for each of three tests
        learners = sorted({find_learner_index(spec, name) for name in request.learners or spec.names})
        history = load_noise_history(request.noise_history_file, capture.metadata["run_id"])
        watch = Watch(prepared.run, prepared.data.learners, alpha, learners, history)
        test = None if canaries is None else CanaryTest(prepared.run, prepared.data, canaries, request.alpha / 3.0)
        return WatchStatus(
            spec.name, _get_planned_rounds(spec), tuple(spec.names), request.alpha, watch, test
        ), prepared.run

    def _start_with_logs(self, capture: Capture, spec: RunSpec) -> tuple[WatchStatus, Run]:
        """Start with the records in learners' write-ahead logs."""
        request, run_id, n_features = self._request, capture.metadata["run_id"], capture.metadata["n_features"]
        if request.canary_file is not None:
            raise SpecError(
                "canaries are in the records of the spec's data source: give either --canary-file or --state"
            )
        found = {name: folder for folder in request.state_folders for name in find_learners(folder, run_id)}
        names = request.learners or tuple(name for name in spec.names if name in found)
        if not names or not set(names) <= found.keys():
            owners = " and of ".join(names) or "one of its learners"
            raise SpecError(
                f"--state must name state folders with the log of {owners} in run {run_id}: it exists during the run, and "
                "afterwards if the learner was started with --keep-log"
            )
        indices = {find_learner_index(spec, name): name for name in names}
        self._logs = {
            i: LoggedRecords(found[name], name, run_id, spec, n_features) for i, name in sorted(indices.items())
        }
        run, history = build_run(spec, n_features), load_noise_history(request.noise_history_file, run_id)
        watch = Watch(run, self._logs, request.alpha, sorted(indices), history)
        return WatchStatus(spec.name, _get_planned_rounds(spec), tuple(spec.names), request.alpha, watch), run

    async def _wait_for_records(self, t: int) -> bool:
        """Wait until the logs have the records of a round; False if they will not."""
        is_last_look = self._request.once
        while True:
            for each in self._logs.values():
                each.refresh()
            if all(t < each.known_rounds for each in self._logs.values()):
                return True
            if is_last_look or await self._wait_or_stop():
                return False
            latest = await self._source.fetch_latest()
            is_last_look = latest is None or latest.is_complete  # all records are in the logs by then: look once more

    async def _process(
        self,
        capture: Capture,
        codec: RoundCodec,
        rounds: RoundReassembler[Message],
        status: WatchStatus,
        display: WatchDisplay,
    ) -> None:
        """Process new messages, round by round."""
        since = self._part
        for part, batch in capture.read_parts(("sender", "kind", "method", "payload"), lambda part: part > since):
            capture.assemble_rounds(batch, codec, rounds)
            for t, messages in rounds.pop_complete_rounds():
                if not await self._wait_for_records(t):
                    return
                alarms = status.watch.take(t, messages)
                alarms += status.canary_test.take(t, messages) if status.canary_test else []
                self._report(alarms, status, display)
                await asyncio.sleep(0)  # for signals
                if self._is_over_early(status):
                    return
            self._report(self._find_equivocations(rounds, status), status, display)
            self._part = part
        display.update(status)

    def _find_equivocations(self, rounds: RoundReassembler[Message], status: WatchStatus) -> list[Alarm]:
        new = rounds.equivocations[self._reported_equivocations :]
        self._reported_equivocations += len(new)
        return [alarm for t, learner in new for alarm in status.watch.report_equivocation(learner, t)]

    def _report(self, alarms: list[Alarm], status: WatchStatus, display: WatchDisplay) -> None:
        for alarm in alarms:
            status.alarms.append(alarm)
            status.state = "ALARM"
            with display.suspend():
                log.error(
                    "alarm",
                    run=status.title,
                    learner=status.name_blamed_learner(alarm),
                    round=alarm.round,
                    test=alarm.test,
                    change=alarm.is_change,
                    log_e_value=round(alarm.log_e_value, 2)
                    if math.isfinite(alarm.log_e_value)
                    else "infinite",  # JSON has no infinity
                    log_threshold=round(alarm.log_threshold, 2),
                )
        display.update(status)
        if self._metrics is not None:
            self._metrics.update(status)

    def _is_over_early(self, status: WatchStatus) -> bool:
        return self._stop.is_set() or bool(status.alarms and not self._request.keep_going)

    def _is_over(self, capture: Capture, status: WatchStatus) -> bool:
        return capture.is_complete or self._request.once or self._is_over_early(status)

    def _get_final_state(self, status: WatchStatus) -> str:
        if status.alarms:
            return "ALARM"
        return "interrupted" if self._stop.is_set() else NO_ALARM

    async def _wait_or_stop(self) -> bool:
        """Wait for the next poll; return whether to stop instead."""
        try:
            async with asyncio.timeout(POLL_INTERVAL_S):
                await self._stop.wait()
        except TimeoutError:
            return False
        return True


def _get_planned_rounds(spec: RunSpec) -> int | None:
    return None if spec.is_unbounded else spec.rounds


def _check_capture(capture: Capture) -> tuple[str, str]:
    """Describe the signatures of a capture and the origin of its claim; and the problem, empty if there is none."""
    problem = ""
    try:
        provenance = check_provenance([capture], capture.folder, relative_to=Path.cwd()).text
    except CaptureError as error:
        provenance = problem = f"{error}."
    return (
        f"{provenance} {UNSIGNED_PROMISE_NOTE} sottovoce audit SPEC --captures compares the capture with a spec that you trust.",
        problem,
    )


def _describe_missing_rounds(rounds: RoundReassembler[Message], status: WatchStatus) -> str:
    """Describe why the last rounds were not watched."""
    names = ", ".join(status.names[i] for i in rounds.missing_senders[:5])
    return f"The capture ends before round {rounds.next_round} of {status.rounds}: it has no messages of {names}."
