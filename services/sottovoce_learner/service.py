"""A learner process: it follows its coordinator from run to run, and serves whoever may ask it something (`servicer.py`)."""

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
from sottovoce_learner.config import LearnerConfig, max_message_bytes
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
"""Between two looks at whether the state folder is still there; a round looks, too, before it is said."""
_MAX_RUN_ID_CHARS = 128


class Learner:
    """A learner: serves its neighbours and its owner, follows its coordinator.

    Args:
        config: what it was started with.
        tracing: traces its rounds; None: they are not traced.
        nearby: the learners of its process; None: it is alone.
    """

    def __init__(
        self, config: LearnerConfig, tracing: Tracing | None = None, in_process: InProcessTransport | None = None
    ) -> None:
        config.check()
        self.config, self._make = config, open_session if tracing is None else tracing.open_session
        self._noise_fields = None if config.recorded_noise is None else read_noise(config.recorded_noise)
        self._sampler = OpenDpNoise() if config.noise == "opendp" else SystemNoise()
        self._session: Session | None = None
        self._refused: tuple[str, str] | None = None  # run, and why it could not be followed
        self._attempt = 0  # at the run that it was assigned to last
        self._stopped = ""  # run that it was told to end, until it is told to prepare for one again
        self._over = ""  # run that nobody goes on with, until its log is deleted
        self._changed = asyncio.Event()  # there is something to report
        self._rounds, self._channels, self._copying = Tasks(), Tasks(), Tasks()
        # Streams to neighbours, and where they lead.
        self._opened: dict[int, tuple[str, asyncio.Task[None] | None]] = {}
        self._mirror: Mirror | None = None
        self._claim: LearnerLock | None = None
        self._following = CoordinatorClient(
            config, lambda: self._session, self._under_way, self._obey_or_tell, self._report, self._changed
        )
        self._nearby = InProcessTransport() if in_process is None else in_process
        self.servicer = LearnerServicer(config, self.require_session, self._told)
        self.service: RunningServer | None = None

    # ---- life ---------------------------------------------------------------------------------------------

    async def start(self) -> str:
        """Claim the state folder and listen; returns the address for others.

        Raises:
            FailedPrecondition: another process is this learner, its state folder cannot be written, or has its ledger by another name, or
                its identity is another one's.
            SpecError: other machines can reach the address, and it has no identity.
            CorruptStateError: its identity, or anything else in its state folder, is damaged, or a copy.
            Unavailable: the address cannot be listened on.
        """
        folder = self.config.state_folder
        self.config.credentials.require_principal(principals.Role.LEARNER, self.config.name)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # records lie below it
            self._require_one_name()
            held = LearnerLock(folder, self.config.name)
            try:
                await asyncio.to_thread(self._require_whole)
                held.refresh_guards()
                self._following.identity = StoreIdentity.load_or_create(folder, self.config.name)
                self.service = await start_server(
                    self.config.listen,
                    self.servicer.register,
                    [SERVICE_NAME],
                    self.config.credentials,
                    max_message_bytes(self.config.policy),
                )
            except BaseException:
                held.close()
                raise
        except OSError as error:
            raise FailedPrecondition(f"the state folder {folder} cannot be written: {error.strerror}") from None
        self._claim = held
        warn_if_open(folder, "state folder, and records lie in it")
        address = self.config.advertise or self.service.address
        if self.config.credentials.principal is None:  # else both sides have to show who they are
            self._nearby.add(address, self.servicer.accept_in_process)
        return address

    def _require_whole(self) -> None:
        """Refuse a damaged or copied state folder here: a learner that has joined with it would cost others their run."""
        StoredState.read_verified(LearnerPaths(self.config.state_folder, self.config.name))
        # what a death has left of a run
        end_run(self.config.state_folder, self.config.name, keep_log=self.config.keep_log)

    async def follow(self, address: str) -> None:
        """Follow the coordinator for ever; it may come back after having been away.

        Raises:
            Unavailable: it could not be reached in the first place.
            CorruptStateError: its state folder was deleted, moved or replaced.
        """
        async with run_in_background(self._watch_folder()):
            await self._following.follow(address)

    async def _watch_folder(self) -> None:
        """End a learner that has lost its state folder between rounds or runs: it would begin another ledger."""
        while self._claim is not None:
            await asyncio.sleep(FOLDER_CHECK_INTERVAL_S)
            self._claim.require_in_place()

    async def stop(self) -> None:
        """Finish the message on its way, then end."""
        await self._end_run()
        await self._let_go()
        await self._copying.end()
        if self.service is not None:
            self._nearby.remove(self.config.advertise or self.service.address)
            await self.service.stop()
        if self._claim is not None:
            self._claim.close()

    async def _under_way(self) -> dict[str, Any]:
        """How far it is in its run, for a coordinator that may know less of it, or more: then its state was set back."""
        session = self._session
        # One that has finished may not have been told that all have.
        if session is not None and not session.lifecycle.is_silent:
            role, said = session.assignment, session.status.rounds_committed
            return {
                "run_id": role.run_id,
                "rounds_committed": said,
                "lease_until_round": session.lease_tracker.end_round,
                "term": 0 if session.lifecycle.has_ended else self._following.term,
                "attempt": self._attempt,
                "plan_hash": role.cached_run.plan_hash,
            }
        return await asyncio.to_thread(self._left_open)

    def _left_open(self) -> dict[str, Any]:
        """The same of the run whose log it has, where it has stopped, or is yet to go on with it."""
        try:
            standing = StoredState.read_verified(LearnerPaths(self.config.state_folder, self.config.name))
        except CorruptStateError:  # nothing is said from such a folder: a run is told so when it begins
            return {}
        if standing is None or (found := standing.open_run_progress) is None:
            return {}
        line, closed = found
        known = {
            "run_id": line.run_id,
            "rounds_committed": line.rounds_committed,
            "attempt": self._attempt,
            "last_round_learned": closed,
        }
        try:
            self.config.policy.require_allowed_imports(json.loads(line.spec))
            spec = line.parse_spec(imports=self.config.allow_imports)
        except SpecError:  # it names code that may not be imported now
            return known
        return {**known, "plan_hash": CachedRun.get_cached(spec, line.n_features).plan_hash}

    # ---- the coordinator ----------------------------------------------------------------------------------

    async def _obey_or_tell(self, run_id: str, told: Command | None) -> None:
        """A directive that cannot be followed fails the run, with the reason, and leaves the learner alive.

        Of that run only the end is obeyed from then on: what went wrong first is what its operator is told.
        """
        if (
            self._refused is not None
            and self._refused[0] == run_id
            and not (isinstance(told, Stop) or self._anew(run_id, told))
        ):
            return
        try:
            await self._obey(run_id, told)
        except SottovoceError as error:
            log.error("directive refused", run_id=run_id, reason=str(error), **describe_failure(error))
            self._refuse(run_id, str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a run that does not fit this machine, or own code that a spec names
            what = describe_failure(error)
            log.error("directive refused", run_id=run_id, **what)
            cause = getattr(error, "strerror", None) or "an internal error"  # the system's word on a file
            self._refuse(run_id, f"{cause}, {what['kind']}; the learner's log says where")

    def _refuse(self, run_id: str, detail: str) -> None:
        self._refused = (run_id[:_MAX_RUN_ID_CHARS], detail)
        self._changed.set()

    @property
    def status(self) -> LearnerStatus:
        """How far it is in its run; a run that it refused is its run, too."""
        idle = LearnerStatus(self.config.name, state=LearnerState.IDLE)
        if self._refused is None:
            return idle if self._session is None else self._session.status
        run_id, detail = self._refused
        session = self._of_run(run_id)  # what it has said and spent until then
        return replace(
            idle if session is None else session.status, run_id=run_id, state=LearnerState.FAILED, detail=detail
        )

    def _told(self) -> LearnerStatus:
        """The same for who asks it: also that it has no coordinator, which nobody else can say then."""
        status = self.status
        return replace(status, detail="; ".join(filter(None, (status.detail, self._following.connection_problem))))

    def collect_metrics(self) -> Iterator[MetricSample]:
        """For Prometheus."""
        following = self._following
        return collect_metrics(
            self.status, self._session, self._mirror, following.join_count, is_joined=following.is_joined
        )

    def require_session(self) -> Session:
        """Its session in the run of now.

        Raises:
            FailedPrecondition: it is in none.
        """
        if self._session is None:
            raise FailedPrecondition("this learner is not in a run yet")
        return self._session

    def _report(self) -> coordinator_pb2.LearnerMessage:
        """What its coordinator is told of its run."""
        report = coordinator_pb2.Report(status=self.status.to_wire(), attempt=self._attempt)
        if self._refused is None and self._session is not None:
            if (waits := self._session.reportable_wait) is not None:
                report.wait.CopyFrom(waits.to_wire())
            report.violations.extend(self._session.receiver.violations)
        return coordinator_pb2.LearnerMessage(report=report)

    async def _obey(self, run_id: str, told: Command | None) -> None:
        session = self._of_run(run_id)
        match told:
            case Assignment() if session is None or self._anew(run_id, told):
                # Else it is said again after a reconnect.
                await self._prepare(run_id, told)
            case TopologyEpoch() if session is not None:
                self._meet(session, told)
            case RoundLease() if session is not None:
                session.extend_lease(told)
            case Stop(reason=reason, final=over):
                log.info("told to stop", learner=self.config.name, run_id=run_id, reason=reason, over=over)
                self._stopped, self._over = run_id, run_id if over else ""
                if session is not None:
                    await self._end_run()
                    if over:
                        session.lifecycle.mark_run_ended()
                await self._let_go()

    def _anew(self, run_id: str, told: Command | None) -> bool:
        """Is a run taken up again? Whatever became of it here, it goes on from the log, as after a death.

        Also in the same attempt, where a coordinator that did not know the run has ended it here, and knows it by now.
        """
        return isinstance(told, Assignment) and (told.attempt > self._attempt or run_id == self._stopped)

    def _require_one_name(self) -> None:
        """A learner is called with and without its own trust domain: a ledger by the other name would not count.

        Raises:
            FailedPrecondition: there is one.
        """
        own, folder = self.config.credentials.principal, self.config.state_folder
        if own is None:
            return
        (other,) = {own.name, f"{own.name}@{own.domain}"} - {self.config.name}
        if other in Ledger(folder).list_learners():
            raise FailedPrecondition(
                f"the state folder {folder} must have no ledger of {other!r}, who is this learner by another name: start it as "
                f"{other!r}, or with another state folder, where what it has spent does not count"
            )

    def _of_run(self, run_id: str) -> Session | None:
        session = self._session
        return session if session is not None and session.assignment.run_id == run_id else None

    async def _prepare(self, run_id: str, told: Assignment) -> None:
        await self._end_run()
        if self._claim is not None:
            self._claim.require_in_place()
        self._attempt, self._stopped = told.attempt, ""
        role = RunAssignment.from_wire(run_id, told, self._following.identity, self.config)
        Ledger(self.config.state_folder).require_sent_rounds(role.name, told.earlier_runs)
        to = extract_identity_names(self.config.policy.eavesdroppers)
        mirror = (
            Mirror(run_id, told.index, told.mirror_address, self.config.credentials, to)
            if told.mirror_address
            else None
        )
        if (before := self._of_run(run_id)) is not None:
            before.lifecycle.mark_replaced()
        self._session = self._make(
            role,
            self._noise(role),
            self.config.state_folder,
            mirror.copy if mirror else None,
            policy=self.config.policy,
            is_noise_private=self.config.is_noise_private,
            own_budget=self.config.own_budget,
            credentials=self.config.credentials,
            report_event=self._changed,
            keep_log=self.config.keep_log,
        )
        if self._claim is not None:
            self._claim.refresh_guards()
        self._mirror, self._refused = mirror, None

    def _noise(self, role: RunAssignment) -> NoiseSource:
        index = role.index
        if self.config.noise_seed is not None:  # the name: a run's id is another each time
            return KeyedNoise(self.config.noise_seed, role.spec.name, index)
        if self._noise_fields is None:
            return self._sampler
        for name, values in self._noise_fields.items():
            if index >= values.shape[1]:
                own, of = format_learner_name(role.spec.names, index), values.shape[1]
                raise SpecError(f"recorded noise of field {name!r} must cover {own}, got that of {of} learners")
        return RecordedNoise({name: values[:, index, 0] for name, values in self._noise_fields.items()})

    def _meet(self, session: Session, epoch: TopologyEpoch) -> None:
        begun = session.plan.announced_rounds > 0
        session.plan.accept_epoch(
            epoch.first_round,
            {neighbour.index: neighbour.weight for neighbour in epoch.neighbours},
            [neighbour.index for neighbour in epoch.neighbours if neighbour.is_recipient],
        )
        for neighbour in epoch.neighbours:
            if neighbour.index > session.assignment.index:
                self._open(session, neighbour)
        if begun:
            return
        if self._mirror is not None:
            self._copying.start(self._mirror.run(), "nothing more is mirrored")
        self._rounds.start(self._run(session), "the rounds broke off")

    def _open(self, session: Session, neighbour: Neighbour) -> None:
        """Hold the stream to a neighbour open, which may have come back elsewhere."""
        index, address = neighbour.index, neighbour.address
        before, opened = self._opened.get(index, ("", None))
        if address in (before, ""):  # it is where it was, or has not joined yet
            return
        if opened is not None:
            opened.cancel()
        held = connection.keep_open(session, neighbour, self.config.credentials, self._nearby)
        self._opened[index] = address, self._channels.start(held, "a channel is given up")

    async def _run(self, session: Session) -> None:
        await session.run()
        if self._mirror is not None:
            self._mirror.end()

    async def _end_run(self) -> None:
        """Begin no other round, let the message on its way reach the neighbours, then close the channels."""
        if self._session is not None:
            await self._rounds.end()
            await run_cleanup(self._session.outbox.flush(), FLUSH_TIMEOUT_S)
            await self._session.close()
        await self._channels.end()
        self._opened.clear()

    async def _let_go(self) -> None:
        """The run is over for all: the ledger says what it has cost, and its log is deleted, with the records in it."""
        run_id = self._over
        if not run_id:
            return
        try:
            own = self.config
            await asyncio.to_thread(end_run, own.state_folder, own.name, run_id, keep_log=own.keep_log)
        except CorruptStateError as error:  # nothing is deleted that may be evidence; the next run is told
            log.error("the run's log stays", run_id=run_id, reason=str(error))
        except OSError as error:
            log.error("the run's log stays", run_id=run_id, reason=error.strerror)
        self._over = ""
