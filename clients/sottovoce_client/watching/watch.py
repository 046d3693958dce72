"""`sottovoce watch`: follow a capture that is being written, and raise the alarm when noise is not what is claimed."""

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
    load_keys,
    open_eavesdropper_source,
    save_keys,
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
    """What to watch for.

    Attributes:
        alpha: the chance of a false alarm.
        learners: names of those to watch; none: all.
        canaries: file of the run's canaries.
        commitment: its SHA-256; None: what stands beside it.
        keep_going: watch on after an alarm.
        once: do not wait for more than is there.
        keys: file of the noise that was heard in the runs before; this run's is added when it has been watched to its end.
        logs: state folders of learners, whose logs have the records; none: the spec's data source has them.
        allow_imports: import code that the capture's spec names.
    """

    alpha: float = 1e-3
    learners: tuple[str, ...] = ()
    canary_file: Path | None = None
    commitment: str | None = None
    keep_going: bool = False
    once: bool = False
    keys_file: Path | None = None
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
    """Where the capture is: in a folder, or at an eavesdropper; `once`: a folder must be there already.

    Raises:
        SpecError: not exactly one of the two.
    """
    if place is not None and eavesdropper is None and run_id is None:
        return nullcontext(FolderSource(place, 0.0) if once else FolderSource(place))
    if place is None and eavesdropper is not None and run_id is not None:
        return open_eavesdropper_source(eavesdropper, run_id, credentials)
    raise SpecError("watch needs a capture's folder, or --eavesdropper HOST:PORT and --run RUN_ID")


def watch(
    source: AbstractAsyncContextManager[CaptureSource],
    request: WatchRequest,
    prepare: Callable[[RunSpec], PreparedRun],
    *,
    metrics_address: str | None = None,
    console: Console | None = None,
) -> int:
    """Watch until the capture is complete, or the first alarm, or somebody interrupts; then say what was seen.

    Args:
        source: of the capture.
        question: what to watch for.
        prepare: gives a spec its data.
        metrics: `host:port` to serve numbers for Prometheus on.
        console: where to show it (default: standard output).

    Returns:
        The exit code: 1 after an alarm, 130 if interrupted without one, 2 where all that was to be looked at is not there or not
        what was signed (`once`), 3 where the keys could not be written, else 0.

    Raises:
        SottovoceError: the capture, the data or the canaries cannot be used.
    """
    if not 0.0 < request.alpha < 1.0:
        raise SpecError(f"--alpha must be in (0, 1), got {request.alpha}")
    console = console or terminal.create_console()
    with ExitStack() as stack:
        served = stack.enter_context(Gauges(metrics_address)) if metrics_address else None
        if served is not None:
            console.out(f"metrics: http://{served.address}/metrics", highlight=False)

        async def work(stop: asyncio.Event) -> WatchStatus | None:
            async with source as opened:
                return await _Watching(opened, request, prepare, served, stop).to_its_end(console)

        sight: WatchStatus | None = run_async(work)
    if sight is None:
        console.out("Nothing was watched: there was no capture yet.", highlight=False)
        return 130
    sight.print_end(console)
    terminal.print_json_if_requested(sight.build_document)
    return 1 if sight.alarms else {"interrupted": 130, INCOMPLETE_STATE: 2}.get(sight.state, sight.keys_exit_code)


class _Watching:
    """One watch under way."""

    def __init__(
        self,
        source: CaptureSource,
        question: WatchRequest,
        prepare: Callable[[RunSpec], PreparedRun],
        metrics: Gauges | None,
        stop: asyncio.Event,
    ) -> None:
        self._source, self._question, self._prepare = source, question, prepare
        self._metrics, self._stop = metrics, stop
        self._part, self._noticed = 0, 0
        self._logs: dict[int, LoggedRecords] = {}

    async def to_its_end(self, console: Console) -> WatchStatus | None:
        """Returns what there was to see; None: nothing before somebody interrupted."""
        capture = await self._first(console)
        if capture is None:
            return None
        sight, run = self._begin(capture)
        codec = RoundCodec(run.field_shapes)
        rounds = RoundReassembler[Message](
            run.spec.n_learners, run.spec.rounds, run.network, MAX_REMEMBERED_MESSAGES, names=run.spec.names
        )
        if self._logs and (others := [name for i, name in enumerate(sight.names) if i not in self._logs]):
            console.out(f"Not watched: {', '.join(others)}.", highlight=False)
        with WatchDisplay(console) as shown:
            while True:
                await self._take(capture, codec, rounds, sight, shown)
                if self._over(capture, sight) or await self._told():
                    break
                capture = await self._source.fetch_latest() or capture
        sight.state, wrong = self._state(sight), ""
        if sight.alarms or self._question.once:
            sight.provenance, wrong = _provenance(capture)
        to = self._question.keys_file
        if to is not None and (sight.watch.round == sight.rounds or (sight.rounds is None and capture.is_complete)):
            heard, run_id = sight.watch.key_table, capture.metadata["run_id"]
            sight.keys_exit_code = terminal.attempt(str(to), lambda: save_keys(to, heard, run_id))
        if (
            capture.is_complete
            and sight.rounds is not None
            and rounds.next_round < sight.rounds
            and not self._over_early(sight)
        ):
            unheard = _unheard(rounds, sight)
            wrong = wrong or ("" if run.spec.data.is_live else unheard)  # a live run may well end when it is stopped
            console.out(unheard, highlight=False)
        if self._question.once and wrong and sight.state == NO_ALARM:
            sight.state = INCOMPLETE_STATE
        if sight.watch.round < rounds.next_round and not self._over_early(sight):
            text = f"The logs do not say what was learned in round {sight.watch.round}: those before it were watched."
            console.out(text, highlight=False)
        return sight

    async def _first(self, console: Console) -> Capture | None:
        """The capture, once there is one."""
        capture = await self._source.fetch_latest()
        if capture is None and self._question.once:
            raise CaptureError("there is no capture to watch")
        if capture is None:
            console.out(f"waiting for {self._source.wait_description}", highlight=False)
        while capture is None and not await self._told():
            capture = await self._source.fetch_latest()
        return capture

    def _begin(self, capture: Capture) -> tuple[WatchStatus, Run]:
        question = self._question
        capture.require_messages()
        spec = parse_spec(capture.metadata["spec"], source=capture.name, allow_imports=question.allow_imports)
        if find_first_import(capture.metadata["spec"]) is None:  # what lies beside it is not imported unasked
            require_same_spec(spec, [capture])
        if question.state_folders:
            return self._by_logs(capture, spec)
        if spec.data.is_live:
            raise SpecError(
                "records of a live run stand in the logs of its learners alone: start these with --keep-log, and give their "
                "state folders (--state FOLDER)"
            )
        prepared, canaries, alpha = self._prepare(spec), None, question.alpha
        spec = prepared.run.spec
        if question.canary_file is None and (found := find_commitment(capture.name)) is not None:
            raise SpecError(f"this run has canaries in its records ({found}): give --canary-file canaries.json")
        if question.canary_file is not None:
            canaries = load_canaries(question.canary_file, question.commitment)
            prepared, alpha = (
                insert_canaries(prepared, canaries),
                alpha * 2.0 / 3.0,
            )  # a third for each of three questions
        learners = sorted({find_learner_index(spec, name) for name in question.learners or spec.names})
        before = load_keys(question.keys_file, capture.metadata["run_id"])
        watched = Watch(prepared.run, prepared.data.learners, alpha, learners, before)
        test = None if canaries is None else CanaryTest(prepared.run, prepared.data, canaries, question.alpha / 3.0)
        return WatchStatus(spec.name, _planned(spec), tuple(spec.names), question.alpha, watched, test), prepared.run

    def _by_logs(self, capture: Capture, spec: RunSpec) -> tuple[WatchStatus, Run]:
        """As `_begin`, of records that learners' logs have."""
        question, run_id, n_features = self._question, capture.metadata["run_id"], capture.metadata["n_features"]
        if question.canary_file is not None:
            raise SpecError("canaries stand in the records of the spec's data source: give --canary-file or --state")
        found = {name: folder for folder in question.state_folders for name in find_learners(folder, run_id)}
        names = question.learners or tuple(name for name in spec.names if name in found)
        if not names or not set(names) <= found.keys():
            whose = " and of ".join(names) or "one of its learners"
            raise SpecError(
                f"--state must name state folders with the log of {whose} in run {run_id}: it is there while the run goes on, "
                "and behind it where the learner was started with --keep-log"
            )
        indices = {find_learner_index(spec, name): name for name in names}
        self._logs = {
            i: LoggedRecords(found[name], name, run_id, spec, n_features) for i, name in sorted(indices.items())
        }
        run, before = build_run(spec, n_features), load_keys(question.keys_file, run_id)
        watched = Watch(run, self._logs, question.alpha, sorted(indices), before)
        return WatchStatus(spec.name, _planned(spec), tuple(spec.names), question.alpha, watched), run

    async def _learned(self, t: int) -> bool:
        """Wait until the logs have what was learned in a round; False: they will not."""
        over = self._question.once
        while True:
            for each in self._logs.values():
                each.refresh()
            if all(t < each.known_rounds for each in self._logs.values()):
                return True
            if over or await self._told():
                return False
            latest = await self._source.fetch_latest()
            over = latest is None or latest.is_complete  # then all is written down by now: look once more

    async def _take(
        self,
        capture: Capture,
        codec: RoundCodec,
        rounds: RoundReassembler[Message],
        sight: WatchStatus,
        shown: WatchDisplay,
    ) -> None:
        """Take what is new, round by round."""
        since = self._part
        for part, batch in capture.read_parts(("sender", "kind", "method", "payload"), lambda part: part > since):
            capture.assemble_rounds(batch, codec, rounds)
            for t, messages in rounds.pop_complete_rounds():
                if not await self._learned(t):
                    return
                alarms = sight.watch.take(t, messages)
                alarms += sight.canary_test.take(t, messages) if sight.canary_test else []
                self._tell(alarms, sight, shown)
                await asyncio.sleep(0)  # for signals
                if self._over_early(sight):
                    return
            self._tell(self._equivocations(rounds, sight), sight, shown)
            self._part = part
        shown.update(sight)

    def _equivocations(self, rounds: RoundReassembler[Message], sight: WatchStatus) -> list[Alarm]:
        new = rounds.equivocations[self._noticed :]
        self._noticed += len(new)
        return [alarm for t, learner in new for alarm in sight.watch.report_equivocation(learner, t)]

    def _tell(self, alarms: list[Alarm], sight: WatchStatus, shown: WatchDisplay) -> None:
        for alarm in alarms:
            sight.alarms.append(alarm)
            sight.state = "ALARM"
            with shown.suspend():
                log.error(
                    "alarm",
                    run=sight.title,
                    learner=sight.name_blamed_learner(alarm),
                    round=alarm.round,
                    test=alarm.test,
                    change=alarm.is_change,
                    log_e_value=round(alarm.log_e_value, 2)
                    if math.isfinite(alarm.log_e_value)
                    else "infinite",  # JSON knows no infinity
                    log_threshold=round(alarm.log_threshold, 2),
                )
        shown.update(sight)
        if self._metrics is not None:
            self._metrics.update(sight)

    def _over_early(self, sight: WatchStatus) -> bool:
        return self._stop.is_set() or bool(sight.alarms and not self._question.keep_going)

    def _over(self, capture: Capture, sight: WatchStatus) -> bool:
        return capture.is_complete or self._question.once or self._over_early(sight)

    def _state(self, sight: WatchStatus) -> str:
        if sight.alarms:
            return "ALARM"
        return "interrupted" if self._stop.is_set() else NO_ALARM

    async def _told(self) -> bool:
        """Wait for the next look; says whether to stop instead."""
        try:
            async with asyncio.timeout(POLL_INTERVAL_S):
                await self._stop.wait()
        except TimeoutError:
            return False
        return True


def _planned(spec: RunSpec) -> int | None:
    return None if spec.is_unbounded else spec.rounds


def _provenance(capture: Capture) -> tuple[str, str]:
    """What the capture's signatures say of it, and whose word the promise is; and what is wrong with it, empty: nothing."""
    wrong = ""
    try:
        signed = check_provenance([capture], capture.folder, relative_to=Path.cwd()).text
    except CaptureError as error:
        signed = wrong = f"{error}."
    return (
        f"{signed} {UNSIGNED_PROMISE_NOTE} sottovoce audit SPEC --captures holds the capture to the spec that you were told.",
        wrong,
    )


def _unheard(rounds: RoundReassembler[Message], sight: WatchStatus) -> str:
    """Why the last rounds were not watched."""
    names = ", ".join(sight.names[i] for i in rounds.missing_senders[:5])
    return f"The capture ends before round {rounds.next_round} of {sight.rounds}: {names} not overheard in it."
