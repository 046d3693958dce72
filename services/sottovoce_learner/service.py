"""Learner process: follows its coordinator from run to run, and serves neighbours, owner and feeders (`servicer.py`)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import structlog

from sottovoce_core.errors import CorruptStateError, FailedPrecondition, SottovoceError, SpecError
from sottovoce_core.noise import KeyedNoise, NoiseSource, OpenDpNoise, RecordedNoise, SystemNoise
from sottovoce_core.runs.policy import extract_identity_names
from sottovoce_core.runs.transcript import read_noise
from sottovoce_core.text import format_learner_name
from sottovoce_learner.assignment import CachedRun, RunAssignment
from sottovoce_learner.config import LearnerConfig, compute_max_message_bytes
from sottovoce_learner.coordinator_client import CoordinatorClient
from sottovoce_learner.metrics import collect_metrics
from sottovoce_learner.mirror import Mirror
from sottovoce_learner.peers import connection
from sottovoce_learner.peers.in_process import InProcessTransport
from sottovoce_learner.servicer import SERVICE_NAME, LearnerServicer
from sottovoce_learner.session import Session
from sottovoce_learner.session_factory import open_session
from sottovoce_learner.storage.ledger import StoredState
from sottovoce_learner.storage.state_folder import LearnerLock, LearnerPaths, StoreIdentity
from sottovoce_learner.storage.store import Ledger, end_run
from sottovoce_learner.tracing import Tracing
from sottovoce_rpc import principals
from sottovoce_rpc.commands import Command
from sottovoce_rpc.learner_status import LearnerState, LearnerStatus
from sottovoce_rpc.logs import describe_failure, warn_if_open
from sottovoce_rpc.metrics import MetricSample
from sottovoce_rpc.server import RunningServer, start_server
from sottovoce_rpc.tasks import Tasks, run_cleanup, run_in_background
from sottovoce_wire.v1 import coordinator_pb2
from sottovoce_wire.v1.coordinator_pb2 import Assignment, Neighbour, RoundLease, Stop, TopologyEpoch

log = structlog.get_logger()

FLUSH_TIMEOUT_S = 1.0
FOLDER_CHECK_INTERVAL_S = 1.0
"""Seconds between two checks that the state folder is in place; each round checks it, too, before it sends."""
_MAX_RUN_ID_CHARS = 128


class Learner:
    """Learner service: serves neighbours and owner, and follows the coordinator.

    Args:
        config: settings of the learner.
        tracing: tracing of its rounds; None: off.
        in_process: transport between the learners of its process; None: it is alone.
    """

    def __init__(
        self, config: LearnerConfig, tracing: Tracing | None = None, in_process: InProcessTransport | None = None
    ) -> None:
        config.check()
        self.config, self._open_session = config, open_session if tracing is None else tracing.open_session
        self._noise_fields = None if config.recorded_noise is None else read_noise(config.recorded_noise)
        self._sampler = OpenDpNoise() if config.noise == "opendp" else SystemNoise()
        self._session: Session | None = None
        self._refusal: tuple[str, str] | None = None  # run id and reason
        self._attempt = 0  # attempt of the last assigned run
        self._closing: asyncio.Task[None] | None = None
        self._stopped_run_id = ""  # until the next assignment
        self._ended_run_id = ""  # run that has ended for all, until its log is deleted
        self._report_event = asyncio.Event()  # set when a report is due
        self._round_tasks, self._channel_tasks, self._mirror_tasks = Tasks(), Tasks(), Tasks()
        self._closing_tasks = Tasks()
        # Address and task of each stream to a neighbour.
        self._neighbour_tasks: dict[int, tuple[str, asyncio.Task[None] | None]] = {}
        self._mirror: Mirror | None = None
        self._lock: LearnerLock | None = None
        self._coordinator_client = CoordinatorClient(
            config,
            lambda: self._session,
            self._get_run_state,
            self._execute_or_refuse,
            self._build_report,
            self._report_event,
        )
        self._in_process = InProcessTransport() if in_process is None else in_process
        self.servicer = LearnerServicer(config, self.require_session, self._build_public_status)
        self.service: RunningServer | None = None

    # ---- life ---------------------------------------------------------------------------------------------

    async def start(self) -> str:
        """Lock the state folder and listen; return the address for others.

        Raises:
            FailedPrecondition: another process is this learner, its state folder cannot be written or has its ledger
                under another name, or its identity is of another principal.
            SpecError: other machines can reach the address, and it has no identity.
            CorruptStateError: its identity, or anything else in its state folder, is damaged, or a copy.
            Unavailable: it cannot listen on the address.
        """
        folder = self.config.state_folder
        self.config.credentials.require_principal(principals.Role.LEARNER, self.config.name)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds records
            self._require_single_name()
            lock = LearnerLock(folder, self.config.name)
            try:
                await asyncio.to_thread(self._verify_state)
                lock.refresh_guards()
                self._coordinator_client.identity = StoreIdentity.load_or_create(folder, self.config.name)
                self.service = await start_server(
                    self.config.listen,
                    self.servicer.register,
                    [SERVICE_NAME],
                    self.config.credentials,
                    compute_max_message_bytes(self.config.policy),
                )
            except BaseException:
                lock.close()
                raise
        except OSError as error:
            raise FailedPrecondition(f"the state folder {folder} cannot be written: {error.strerror}") from None
        self._lock = lock
        warn_if_open(folder, "state folder, which holds records")
        address = self.config.advertise or self.service.address
        if self.config.credentials.principal is None:  # else both sides must authenticate
            self._in_process.add(address, self.servicer.accept_in_process)
        return address

    def _verify_state(self) -> None:
        """Reject a damaged or copied state folder before joining: later, it would cost others their run."""
        StoredState.read_verified(LearnerPaths(self.config.state_folder, self.config.name))
        # what a crash has left of a run
        end_run(self.config.state_folder, self.config.name, keep_log=self.config.keep_log)

    async def follow(self, address: str) -> None:
        """Follow the coordinator forever, reconnecting when it becomes unreachable.

        Raises:
            Unavailable: it could not be reached at the start.
            CorruptStateError: the state folder was deleted, moved or replaced.
        """
        async with run_in_background(self._watch_folder()):
            await self._coordinator_client.follow(address)

    async def _watch_folder(self) -> None:
        """Fail when the state folder is lost between rounds or runs: the learner would begin another ledger."""
        while self._lock is not None:
            await asyncio.sleep(FOLDER_CHECK_INTERVAL_S)
            self._lock.require_in_place()

    async def stop(self) -> None:
        """Finish the current message, then end."""
        await self._end_run()
        await self._close_ended_run()
        await self._closing_tasks.end()
        await self._mirror_tasks.end()
        if self.service is not None:
            self._in_process.remove(self.config.advertise or self.service.address)
            await self.service.stop()
        if self._lock is not None:
            self._lock.close()

    async def _get_run_state(self) -> dict[str, Any]:
        """Return the progress in the current run. The coordinator may know less, or more if the state was set back."""
        session = self._session
        # A session that has finished may not know yet that all have.
        if session is not None and not session.lifecycle.is_silent:
            role, committed = session.assignment, session.status.rounds_committed
            return {
                "run_id": role.run_id,
                "rounds_committed": committed,
                "lease_until_round": session.lease_tracker.end_round,
                "term": 0 if session.lifecycle.has_ended else self._coordinator_client.term,
                "attempt": self._attempt,
                "plan_hash": role.cached_run.plan_hash,
            }
        return await asyncio.to_thread(self._read_open_run)

    def _read_open_run(self) -> dict[str, Any]:
        """Return the progress of the run whose log is open, after a stop or before resuming."""
        try:
            stored_state = StoredState.read_verified(LearnerPaths(self.config.state_folder, self.config.name))
        except CorruptStateError:  # such a folder sends nothing: the next run fails with the reason
            return {}
        if stored_state is None or (progress := stored_state.open_run_progress) is None:
            return {}
        entry, is_last_round_learned = progress
        known = {
            "run_id": entry.run_id,
            "rounds_committed": entry.rounds_committed,
            "attempt": self._attempt,
            "last_round_learned": is_last_round_learned,
        }
        try:
            self.config.policy.require_allowed_imports(json.loads(entry.spec))
            spec = entry.parse_spec(imports=self.config.allow_imports)
        except SpecError:  # it names code that may not be imported now
            return known
        return {**known, "plan_hash": CachedRun.get_cached(spec, entry.n_features).plan_hash}

    # ---- the coordinator ----------------------------------------------------------------------------------

    async def _execute_or_refuse(self, run_id: str, command: Command | None) -> None:
        """Carry out a command; a failure fails the run, with the reason, and keeps the learner alive.

        After a failure only the run's end is accepted: the first error is what its operator sees.
        """
        if (
            self._refusal is not None
            and self._refusal[0] == run_id
            and not (isinstance(command, Stop) or self._is_resume(run_id, command))
        ):
            return
        try:
            await self._execute(run_id, command)
        except SottovoceError as error:
            log.error("command refused", run_id=run_id, reason=str(error), **describe_failure(error))
            self._set_refusal(run_id, str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a run too large for this machine, or user code named by a spec
            failure = describe_failure(error)
            log.error("command refused", run_id=run_id, **failure)
            cause = getattr(error, "strerror", None) or "an internal error"  # the system's text for a file error
            self._set_refusal(run_id, f"{cause}, {failure['kind']}; see the learner's log")

    def _set_refusal(self, run_id: str, detail: str) -> None:
        self._refusal = (run_id[:_MAX_RUN_ID_CHARS], detail)
        self._report_event.set()

    @property
    def status(self) -> LearnerStatus:
        """Status in the current run; a run that it refused counts as its run."""
        idle = LearnerStatus(self.config.name, state=LearnerState.IDLE)
        if self._refusal is None:
            return idle if self._session is None else self._session.status
        run_id, detail = self._refusal
        session = self._find_session(run_id)  # for what it has sent and spent until then
        return replace(
            idle if session is None else session.status, run_id=run_id, state=LearnerState.FAILED, detail=detail
        )

    def _build_public_status(self) -> LearnerStatus:
        """Return the status for other callers, with a missing coordinator: the coordinator cannot report that."""
        status = self.status
        return replace(
            status, detail="; ".join(filter(None, (status.detail, self._coordinator_client.connection_problem)))
        )

    def collect_metrics(self) -> Iterator[MetricSample]:
        """Yield the learner's Prometheus samples."""
        client = self._coordinator_client
        return collect_metrics(self.status, self._session, self._mirror, client.join_count, is_joined=client.is_joined)

    def require_session(self) -> Session:
        """Return the session in the current run.

        Raises:
            FailedPrecondition: it is in none.
        """
        if self._session is None:
            raise FailedPrecondition("this learner is not in a run yet")
        return self._session

    def _build_report(self) -> coordinator_pb2.LearnerMessage:
        """Build the report to the coordinator."""
        report = coordinator_pb2.Report(status=self.status.to_wire(), attempt=self._attempt)
        if self._refusal is None and self._session is not None:
            if (waits := self._session.reportable_wait) is not None:
                report.wait.CopyFrom(waits.to_wire())
            report.violations.extend(self._session.receiver.violations)
        return coordinator_pb2.LearnerMessage(report=report)

    async def _execute(self, run_id: str, command: Command | None) -> None:
        session = self._find_session(run_id)
        match command:
            case Assignment() if session is None or self._is_resume(run_id, command):
                # Else it is a repetition after a reconnect.
                await self._prepare(run_id, command)
            case TopologyEpoch() if session is not None:
                self._apply_epoch(session, command)
            case RoundLease() if session is not None:
                session.extend_lease(command)
            case Stop(reason=reason, final=is_final):
                log.info("stop requested", learner=self.config.name, run_id=run_id, reason=reason, run_ended=is_final)
                self._stopped_run_id, self._ended_run_id = run_id, run_id if is_final else ""
                if session is not None:
                    await self._end_run()
                    if is_final:
                        session.lifecycle.mark_run_ended()
                await self._close_ended_run()

    def _is_resume(self, run_id: str, command: Command | None) -> bool:
        """Return whether an assignment resumes the run: it continues from the log, as after a crash.

        This includes the same attempt: a coordinator that did not know the run may have ended it here, and know it by
        now.
        """
        return isinstance(command, Assignment) and (command.attempt > self._attempt or run_id == self._stopped_run_id)

    def _require_single_name(self) -> None:
        """Reject a ledger under the learner's name with, or without, its trust domain: it would not count.

        Raises:
            FailedPrecondition: there is one.
        """
        own, folder = self.config.credentials.principal, self.config.state_folder
        if own is None:
            return
        (other,) = {own.name, f"{own.name}@{own.domain}"} - {self.config.name}
        if other in Ledger(folder).list_learners():
            raise FailedPrecondition(
                f"the state folder {folder} must have no ledger of {other!r}, another name of this learner: start it as "
                f"{other!r}, or with another state folder, where what it has spent does not count"
            )

    def _find_session(self, run_id: str) -> Session | None:
        session = self._session
        return session if session is not None and session.assignment.run_id == run_id else None

    async def _prepare(self, run_id: str, command: Assignment) -> None:
        await self._end_run()
        if self._lock is not None:
            self._lock.require_in_place()
        self._attempt, self._stopped_run_id = command.attempt, ""
        role = RunAssignment.from_wire(run_id, command, self._coordinator_client.identity, self.config)
        Ledger(self.config.state_folder).require_sent_rounds(role.name, command.earlier_runs)
        to = extract_identity_names(self.config.policy.eavesdroppers)
        mirror = (
            Mirror(run_id, command.index, command.mirror_address, self.config.credentials, to)
            if command.mirror_address
            else None
        )
        if (before := self._find_session(run_id)) is not None:
            before.lifecycle.mark_replaced()
        self._session = self._open_session(
            role,
            self._build_noise(role),
            self.config.state_folder,
            mirror.copy if mirror else None,
            policy=self.config.policy,
            is_noise_private=self.config.is_noise_private,
            own_budget=self.config.own_budget,
            credentials=self.config.credentials,
            report_event=self._report_event,
            keep_log=self.config.keep_log,
        )
        if self._lock is not None:
            self._lock.refresh_guards()
        self._mirror, self._refusal = mirror, None

    def _build_noise(self, role: RunAssignment) -> NoiseSource:
        index = role.index
        if self.config.noise_seed is not None:  # the name: the run id differs each time
            return KeyedNoise(self.config.noise_seed, role.spec.name, index)
        if self._noise_fields is None:
            return self._sampler
        for name, values in self._noise_fields.items():
            if index >= values.shape[1]:
                own, count = format_learner_name(role.spec.names, index), values.shape[1]
                raise SpecError(f"recorded noise of field {name!r} must cover {own}, got that of {count} learners")
        return RecordedNoise({name: values[:, index, 0] for name, values in self._noise_fields.items()})

    def _apply_epoch(self, session: Session, epoch: TopologyEpoch) -> None:
        had_begun = session.plan.announced_rounds > 0
        session.plan.accept_epoch(
            epoch.first_round,
            {neighbour.index: neighbour.weight for neighbour in epoch.neighbours},
            [neighbour.index for neighbour in epoch.neighbours if neighbour.is_recipient],
        )
        for neighbour in epoch.neighbours:
            if neighbour.index > session.assignment.index:
                self._open_stream(session, neighbour)
        if had_begun:
            return
        if self._mirror is not None:
            self._mirror_tasks.start(self._mirror.run(), "mirroring ended")
        self._round_tasks.start(self._run(session), "the rounds ended")

    def _open_stream(self, session: Session, neighbour: Neighbour) -> None:
        """Keep the stream to a neighbour open; the neighbour may have come back at another address."""
        index, address = neighbour.index, neighbour.address
        before, opened = self._neighbour_tasks.get(index, ("", None))
        if address in (before, ""):  # unchanged, or not joined yet
            return
        if opened is not None:
            opened.cancel()
        lock = connection.keep_open(session, neighbour, self.config.credentials, self._in_process)
        self._neighbour_tasks[index] = address, self._channel_tasks.start(lock, "a channel ended")

    async def _run(self, session: Session) -> None:
        await session.run()
        if self._mirror is not None:
            self._mirror.end()

    async def _end_run(self) -> None:
        """Begin no other round, flush the current message to the neighbours, then close the channels."""
        if self._session is not None:
            await self._round_tasks.end()
            await run_cleanup(self._session.outbox.flush(), FLUSH_TIMEOUT_S)
            await self._session.close()
        await self._channel_tasks.end()
        self._neighbour_tasks.clear()

    async def _close_ended_run(self) -> None:
        """Close a run that has ended for all: the ledger gets its cost, and its log, with its records, is deleted.

        Closing goes on where its caller is cancelled: another process may have the state folder only when it is done.
        """
        if self._ended_run_id and self._closing is None:
            self._closing = self._closing_tasks.start(self._close_run(self._ended_run_id))
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _close_run(self, run_id: str) -> None:
        try:
            own = self.config
            await asyncio.to_thread(end_run, own.state_folder, own.name, run_id, keep_log=own.keep_log)
        except (
            CorruptStateError
        ) as error:  # it may be evidence: nothing is deleted, and the next run fails with the reason
            log.error("the run's log is kept", run_id=run_id, reason=str(error))
        except OSError as error:
            log.error("the run's log is kept", run_id=run_id, reason=error.strerror)
        finally:
            self._closing = None
            if self._ended_run_id == run_id:
                self._ended_run_id = ""
