"""Stream of a learner to its coordinator: it joins, receives commands, sends reports, and reconnects."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import structlog

from sottovoce_core.errors import FailedPrecondition, RemoteProtocolError, Unavailable
from sottovoce_core.runs.policy import extract_identity_names
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.session import Session
from sottovoce_learner.storage.state_folder import StoreIdentity
from sottovoce_rpc import commands, principals
from sottovoce_rpc.commands import Command, command_from_wire
from sottovoce_rpc.error_status import CallOutcome, convert_status_error
from sottovoce_rpc.server import HELLO_TIMEOUT_S, open_channel, wait_until_reachable
from sottovoce_rpc.tasks import notify_if_slow, run_in_background
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc

log = structlog.get_logger()

REPORT_INTERVAL_S, _MAX_REPORTS_PER_S = 0.25, 500
"""Seconds between two reports of a learner on which nothing depends; maximum reports a second of all learners of a run."""
_MIN_REJOIN_PAUSE_S, _MAX_REJOIN_PAUSE_S = 0.5, 10.0
"""First and maximum pause between two attempts to join. A run waits twice as long for its learners when it starts."""
_JITTER = secrets.SystemRandom()

_JoinCall = grpc.aio.StreamStreamCall[coordinator_pb2.LearnerMessage, coordinator_pb2.Command]


class CoordinatorClient:
    """Client of one learner's coordinator.

    Args:
        config: settings of the learner.
        get_session: returns the current session.
        get_run_state: returns what the learner sends about its run when it joins.
        execute: carries out a command of a run.
        build_report: returns the current report.
        report_event: set when a report is due at once.
    """

    def __init__(
        self,
        config: LearnerConfig,
        get_session: Callable[[], Session | None],
        get_run_state: Callable[[], Awaitable[dict[str, Any]]],
        execute: Callable[[str, Command | None], Awaitable[None]],
        build_report: Callable[[], coordinator_pb2.LearnerMessage],
        report_event: asyncio.Event,
    ) -> None:
        self._config, self._get_session, self._get_run_state, self._execute = (
            config,
            get_session,
            get_run_state,
            execute,
        )
        self._build_report, self._report_event = build_report, report_event
        self.identity = StoreIdentity(config.name, b"")  # until the state folder is claimed
        self._confirmed = False  # the coordinator knows this process's incarnation
        self._origin = commands.Origin()  # coordinator whose commands it follows
        self.join_count, self.is_joined = 0, False
        """Number of successful joins, and whether the learner is joined now."""
        self._rounds_done_at_last_command: int | None = None  # at its last command in the run
        self._away_reason, self._is_reason_logged = "", False

    @property
    def connection_problem(self) -> str:
        """Description of a missing coordinator: since when, and what the learner waits for; empty: connected."""
        if self.is_joined:
            return ""
        session, why = (
            self._get_session(),
            self._away_reason or f"that at {self._config.coordinator} has not answered yet",
        )
        if not self.join_count:
            return f"no coordinator has let it in yet: {why}"
        since = "" if self._rounds_done_at_last_command is None else f" since round {self._rounds_done_at_last_command}"
        lacks = "" if session is None or session.lifecycle.has_ended else session.wait_tracker.describe()
        return f"it has had no command from its coordinator{since}: {why}{f'; it waits for {lacks}' if lacks else ''}"

    def _note_unreachable(self, why: str) -> None:
        self._away_reason = why
        log.warning("coordinator unreachable", reason=why)

    @property
    def term(self) -> int:
        """Term of the coordinator whose commands are followed; 0: it keeps no state."""
        return self._origin.term

    async def follow(self, address: str) -> None:
        """Follow the coordinator forever, reconnecting when it becomes unreachable.

        Args:
            address: the learner's address for others.

        Raises:
            Unavailable: it could not be reached at the start.
        """
        names = await self._find_coordinator()
        attempts = 0
        while True:
            joined = self.join_count
            async with self._open_channel(names[0]) as to:  # a new channel: an old one backs off ever longer
                await self._follow_once(coordinator_pb2_grpc.CoordinatorStub(to), address)
            if self.join_count > joined:
                attempts = 0
            else:
                attempts += 1
                names.rotate(-1)
            await asyncio.sleep(self._compute_pause_s(attempts))

    async def _find_coordinator(self) -> deque[str]:
        """Wait for a trusted coordinator; return the trusted names, the one that answered first.

        Raises:
            Unavailable: none answers.
        """
        names, at = deque(extract_identity_names(self._config.policy.coordinators)), self._config.coordinator
        for left in reversed(range(len(names))):
            who = f"coordinator/{names[0]}, trusted by its owner," if names[0] else "the coordinator"
            try:
                async with self._open_channel(names[0]) as to, notify_if_slow(self._log_slow_start):
                    await wait_until_reachable(
                        to, f"{who} at {at}", self._config.join_timeout_s / len(names), self._note_unreached
                    )
                    break
            except Unavailable:
                if not left:
                    raise
            names.rotate(-1)
        return names

    async def _log_slow_start(self) -> None:
        if not self._is_reason_logged:  # else it was logged at once
            self._log_waiting("is it running, and is the address right?")

    def _note_unreached(self, why: str, is_permanent: bool) -> None:
        """Note why the coordinator is not reached; log it at once where waiting alone does not help."""
        self._away_reason = f"that at {self._config.coordinator}: {why}"
        if is_permanent:
            self._is_reason_logged = True
            self._log_waiting(why)

    def _log_waiting(self, why: str) -> None:
        at, seconds = self._config.coordinator, self._config.join_timeout_s
        log.warning("waiting for the coordinator", address=at, timeout_s=seconds, reason=why)

    def _open_channel(self, name: str) -> grpc.aio.Channel:
        """Open a channel to the coordinator with this name; empty: any."""
        own = self._config
        return open_channel(own.coordinator, principals.Role.COORDINATOR, name, credentials=own.credentials)

    def _compute_pause_s(self, attempts: int) -> float:
        """Return the seconds until the next attempt to join: growing, shorter than a run's deadline, with jitter."""
        longest, session = _MAX_REJOIN_PAUSE_S, self._get_session()
        if session is not None and not session.lifecycle.has_ended:
            longest = min(longest, session.assignment.spec.clock.deadline_s / 4)
        return _JITTER.uniform(0.5, 1.0) * min(_MIN_REJOIN_PAUSE_S * 2.0**attempts, longest)

    async def _follow_once(self, stub: coordinator_pb2_grpc.CoordinatorAsyncStub, address: str) -> None:
        """Join, and carry out commands until the stream ends."""
        call = stub.Join()
        ending, received_command = CallOutcome(call), False
        try:
            await self._join(call, address)
            self.join_count, self.is_joined = self.join_count + 1, True
            async with run_in_background(self._send_reports(call)):
                while (command := await _read_command(call)) is not None:
                    self._require_newest(command)
                    received_command = True
                    self._set_coordinator_away(is_away=False)  # the run has a coordinator again
                    await self._execute(command.run_id, command_from_wire(command))
        except Unavailable as error:
            self._note_unreachable(str(error))
        except asyncio.InvalidStateError:  # it broke during a write; the next attempt gets the reason
            self._note_unreachable("the stream broke")
        except grpc.aio.AioRpcError:
            status = await ending.wait_for_status()
            refusal = convert_status_error(status, f"the coordinator at {self._config.coordinator}")
            # Its end during a report, or a bug over there, does not end this learner: runs of other operators may come.
            if not isinstance(refusal, Unavailable) and status.code() not in (
                grpc.StatusCode.OK,
                grpc.StatusCode.INTERNAL,
            ):
                raise refusal from None
            self._note_unreachable(str(refusal))
        finally:
            self.is_joined, session = False, self._get_session()
            if received_command:
                self._rounds_done_at_last_command = (
                    None if session is None or session.lifecycle.has_ended else session.state_machine.rounds_done
                )
            call.cancel()
            if self.term:  # a coordinator without state cannot resume the run
                self._set_coordinator_away(is_away=True)

    def _set_coordinator_away(self, *, is_away: bool) -> None:
        if (session := self._get_session()) is not None:
            session.wait_tracker.set_coordinator_away(is_away=is_away)

    def _require_newest(self, command: coordinator_pb2.Command) -> None:
        """Accept commands only from the coordinator of the current run or its successor.

        Raises:
            Unavailable: this is an older coordinator, or a second one.
        """
        origin, session = commands.Origin(command.term, command.nonce), self._get_session()
        if session is not None and not session.lifecycle.has_ended:
            self._origin.require_newest(origin)
        self._origin = origin

    async def _join(self, call: _JoinCall, address: str) -> None:
        """Introduce this learner and be admitted: with a new incarnation, stored and confirmed, or with that of this process.

        Only then may this learner open streams to neighbours or send messages.

        Raises:
            RemoteProtocolError: the coordinator sends something else first.
            Unavailable: it sends nothing: is it older than this learner?
            FailedPrecondition: the state folder cannot be written.
        """
        pb, own = coordinator_pb2, self.identity
        introduction = pb.Introduction(
            learner=own.learner,
            address=address,
            store_id=own.store_id,
            incarnation=own.incarnation,
            is_reconnect=self._confirmed,
            accepts_network_hash=True,
            **await self._get_run_state(),
        )
        await call.write(pb.LearnerMessage(introduction=introduction))
        answer = await _read_answer(call)
        if isinstance(answer, pb.IncarnationIssued) and not self._confirmed:
            try:
                self.identity = own.write_incarnation(answer.incarnation, self._config.state_folder)
            except OSError as error:
                raise FailedPrecondition(f"the state folder cannot be written: {error.strerror}") from None
            await call.write(pb.LearnerMessage(incarnation_stored=pb.IncarnationStored(incarnation=answer.incarnation)))
            answer = await _read_answer(call)
        if answer != pb.IncarnationConfirmed(incarnation=self.identity.incarnation):
            raise RemoteProtocolError(
                f"the coordinator must confirm incarnation {self.identity.incarnation}, got {answer}"
            )
        self._confirmed = True

    async def _send_reports(self, call: _JoinCall) -> None:
        """Report progress when the clock needs it and a few times a second.

        A broken stream is handled by its reader, so this function just returns.
        """
        last = None
        with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, grpc.aio.UsageError, asyncio.InvalidStateError):
            while True:
                if (now := self._build_report()) != last:
                    await call.write(now)
                    last = now
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._report_interval_s):
                        await self._report_event.wait()
                self._report_event.clear()

    @property
    def _report_interval_s(self) -> float:
        """Seconds between reports that the clock does not need: the load of a coordinator does not grow with its learners."""
        session = self._get_session()
        learners = 0 if session is None else session.assignment.spec.n_learners
        return max(REPORT_INTERVAL_S, learners / _MAX_REPORTS_PER_S)


async def _read_command(call: _JoinCall) -> coordinator_pb2.Command | None:
    """Return the next command; None: the stream has ended without an error."""
    command = await call.read()
    return command if isinstance(command, coordinator_pb2.Command) else None


async def _read_answer(call: _JoinCall) -> Command | None:
    """Return the coordinator's answer to an introduction or a confirmation."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            command = await _read_command(call)
    except TimeoutError:
        raise Unavailable(
            f"the coordinator does not answer within {HELLO_TIMEOUT_S:g} s: is it older than this learner?"
        ) from None
    if command is None:
        raise Unavailable("the coordinator ended the stream without an answer")
    return command_from_wire(command)
